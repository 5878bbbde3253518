"""The documentation site: what is dead stops it; it opens and searches from a folder, without a network."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from deploy.docs import site
from tests.support.browser import PATIENCE_MS, axe, chromium

ROOT = Path(site.__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    site.build(folder)
    return folder


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[a](nowhere.md)", "cross-reference target not found: 'nowhere.md'"),
        ("[a](backup.md#nowhere)", "local id not found in doc 'backup': 'nowhere'"),
        ("as `deploy/docs/nowhere.md` says", "unknown document: '/nowhere'"),
        ("![a](pictures/nowhere.png)", "image file not readable: pictures/nowhere.png"),
    ],
)
def test_what_is_dead_stops_the_site(
    tmp_path: Path, line: str, told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "deploy" / "docs"
    docs.mkdir(parents=True)
    for name in ("conf.py", "backup.md"):
        shutil.copy(ROOT / "deploy" / "docs" / name, docs)
    (docs / "static").mkdir()
    (docs / "conf.py").write_text((docs / "conf.py").read_text() + "exclude_patterns = []\n")
    (docs / "backup.md").write_text("# Backup\n")
    (docs / "index.md").write_text(f"# Index\n\n{line}\n\n```{{toctree}}\nbackup\n```\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(site, "HERE", docs)
    with pytest.raises(site.SiteError):
        site.build(tmp_path / "out")
    assert told in capfd.readouterr().err
    (docs / "index.md").write_text("# Index\n\n[a](backup.md#backup)\n\n```{toctree}\nbackup\n```\n")
    site.build(tmp_path / "out2")


def test_the_same_pages_make_the_same_site(built: Path, tmp_path: Path) -> None:
    site.build(tmp_path / "again")
    for path in (path for path in built.rglob("*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(built)).read_bytes(), path.name


def test_nothing_is_loaded_from_anywhere_else(built: Path) -> None:
    for path in (path for path in built.rglob("*") if path.suffix in (".html", ".css", ".js")):
        assert not re.search(r"""(?:src=|@import |url\()["']?(?:https?:)?//""", path.read_text()), path.name


def test_a_page_that_a_text_names_is_a_link(built: Path) -> None:
    text = (built / "install.html").read_text()
    assert 'href="firewall.html"' in text
    assert re.search(r'href="_downloads/[^"]+/ingest\.example\.toml"', (built / "pacs.html").read_text())


@pytest.mark.parametrize("script", [True, False])
def test_the_site_opens_from_its_folder_and_finds_a_word(built: Path, script: bool) -> None:
    with chromium() as chrome, chrome.browser.new_context(java_script_enabled=script) as context:
        context.set_default_timeout(PATIENCE_MS)
        page, asked = context.new_page(), list[str]()
        context.on("request", lambda request: asked.append(request.url))
        page.goto(f"{built.as_uri()}/index.html")
        page.get_by_role("link", name="hospital IT", exact=True).click()
        assert page.title() == "Hospital IT — Lazaret"
        if script:
            axe(page)
            page.locator("input[name=q]").fill("watermark")
            page.locator("input[name=q]").press("Enter")
            page.locator("#search-results li", has_text="Monitoring").wait_for()
        assert len(asked) > 5
        assert all(address.startswith(built.as_uri()) for address in asked)
