"""Both consoles on a running federation, in a real browser: what people of every role do there in a day."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError as LookedInVainError

from protos.service.control_client import SOCKET
from tests.support.browser import SCREENS, Chrome, Visitor, chromium
from tests.support.process_world import AT_SITE, REVIEWED, ROLES, ConsoleWorld, console_world

pytestmark = pytest.mark.timeout(4800)
RUN = "console-1"
LOOK_MS, TIMES = 240_000, 15  # of a person who follows a run: how long at a page, and how often anew


@pytest.fixture(scope="module")
def scene(enrolled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    for old in SCREENS.glob("*.png"):
        old.unlink()
    with console_world(enrolled, tmp_path_factory.mktemp("stage")) as made:
        yield made


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with chromium() as browser:
        yield browser


def at(scene: ConsoleWorld, chrome: Chrome, where: str, name: str) -> object:
    """A person at a console."""
    return chrome.visitor(scene.address(where), *scene.login(name))


def until_it_is_over(visitor: Visitor, path: str) -> None:
    """Follow a run, which takes half an hour on a machine that is busy: its answers leave at powers of two.

    The page looks again by itself, and keeps nobody logged in; a login that is not used ends after 15 minutes. So the
    person opens the page anew now and then.
    """
    over = visitor.page.get_by_text(re.compile("finished|failed")).first
    for _ in range(TIMES):
        try:
            over.wait_for(timeout=LOOK_MS)
        except LookedInVainError:
            visitor.go(path)
        else:
            return
    over.wait_for(timeout=LOOK_MS)


def menu(visitor: Visitor) -> list[str]:
    """Where this person's menu leads."""
    return [str(link.get_attribute("href")) for link in visitor.page.locator("nav a[href^='/']").all()]


@pytest.mark.parametrize(("where", "name"), [*(("coordinator", n) for n in ROLES), *((REVIEWED, n) for n in AT_SITE)])
def test_everybody_sees_the_pages_of_their_role_and_axe_finds_nothing(
    scene: ConsoleWorld, chrome: Chrome, where: str, name: str
) -> None:
    role = {**ROLES, **AT_SITE}[name]
    with at(scene, chrome, where, name) as visitor:  # type: ignore[attr-defined]
        visitor.log_in("/")
        shown = [path for path in dict.fromkeys(menu(visitor)) if not path.startswith("/log")]
        assert len(shown) >= 4
        for path in shown:
            answer = visitor.go(path)
            assert answer.status == 200, (path, visitor.page.content()[-1500:])
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy
            assert "default-src 'none'" in policy
            visitor.axe()
            visitor.screenshot(f"{where}-{role}{path.replace('/', '-').rstrip('-')}")


def test_a_round_is_planned_launched_and_followed(scene: ConsoleWorld, chrome: Chrome) -> None:
    job = scene.work / "console-job.json"
    job.write_text(json.dumps(scene.job()))
    with at(scene, chrome, "coordinator", "olga") as visitor:  # type: ignore[attr-defined]
        page = visitor.page
        visitor.log_in("/plan")
        page.set_input_files("#f-job", str(job))
        page.get_by_role("button", name="Read it").click()
        page.fill("#f-run", RUN)
        page.get_by_role("button", name="Show the cost").click()
        assert "Epsilon of the run" in page.content()
        assert "does not fit" in page.content()  # the third hospital's own policy is too tight
        visitor.axe()
        visitor.screenshot("coordinator-operator-forecast")
        page.get_by_role("button", name="Launch it at this cost").click()
        page.wait_for_url(f"**/rounds/{RUN}")
        page.get_by_text("have not approved").first.wait_for(timeout=120_000)  # the third hospital's, who say no
        visitor.screenshot("coordinator-operator-waits")
        with at(scene, chrome, REVIEWED, "head-1") as head:  # type: ignore[attr-defined]
            head.log_in(f"/plans/{RUN}")
            head.axe()
            head.screenshot("site-hospital-plan")
            head.page.get_by_role("button", name="Go on to sign the refusal").click()
            head.page.set_input_files("input.key", str(scene.key("head-1")))
            head.page.get_by_role("button", name=re.compile("my signature")).click()
            head.page.get_by_text("Your refusal is in the ledger.").wait_for()
        until_it_is_over(visitor, f"/rounds/{RUN}")
        assert "failed" not in page.inner_text("main"), page.inner_text("main")
        visitor.axe()
        visitor.screenshot("coordinator-operator-run")
    ledger = json.loads(scene.run(scene.coordinator("ledger", "show", "--json")))
    assert sum(e["type"] == "round-closed" and e["run"] == RUN for e in ledger["entries"]) == scene.scale.rounds


def test_a_release_leaves_when_the_physician_has_looked_and_signed(scene: ConsoleWorld, chrome: Chrome) -> None:
    with at(scene, chrome, REVIEWED, "head-1") as visitor:  # type: ignore[attr-defined]
        page = visitor.page
        visitor.log_in("/releases")
        page.locator("a[href^='/releases/release-']").first.click()
        release = page.url.rpartition("/")[2]
        assert not (scene.work / "coordinator" / "releases" / release).exists()  # nothing has left yet
        page.get_by_role("button", name=re.compile("^Compare")).click()
        page.get_by_text("nearest real").first.wait_for(timeout=400_000)
        visitor.axe()
        visitor.screenshot("site-hospital-review")
        page.set_input_files("input.key", str(scene.key("head-1")))
        page.get_by_role("button", name="Approve with my signature").click()
        page.get_by_text("Missing: none").wait_for()
        page.get_by_role("button", name="Send it to the coordinator").click()
        page.wait_for_load_state()
        page.get_by_text(re.compile("admitted", re.IGNORECASE)).first.wait_for(timeout=400_000)
    with at(scene, chrome, "coordinator", "rita") as visitor:  # type: ignore[attr-defined]
        page = visitor.page
        visitor.log_in(f"/releases/{release}")
        assert page.locator(".level b").first.inner_text() == "B"
        visitor.axe()
        visitor.screenshot("coordinator-researcher-release")
        with page.expect_download() as waiting:
            page.locator("a[href$='/artifact']").first.click()
        assert Path(waiting.value.path()).stat().st_size > 1000


def test_an_auditor_finds_an_entry_checks_it_prints_it_and_takes_the_ledger_along(
    scene: ConsoleWorld, chrome: Chrome, tmp_path: Path
) -> None:
    with at(scene, chrome, "coordinator", "otto") as visitor:  # type: ignore[attr-defined]
        page = visitor.page
        visitor.log_in("/ledger?kind=admitted")
        page.locator("table a[href^='/ledger/']").first.click()
        page.get_by_text("proof checked").wait_for()  # exactly one, once the page is there
        assert page.get_by_text("the same").count() >= 1  # the root that the page computed, beside the signed one
        visitor.axe()
        visitor.screenshot("coordinator-auditor-entry")
        assert visitor.pdf("coordinator-auditor-entry").read_bytes().startswith(b"%PDF")
        visitor.go("/exports")
        with page.expect_download() as waiting:
            page.locator("a[href='/exports/bundle.zip']").click()
        with zipfile.ZipFile(waiting.value.path()) as bundle:
            bundle.extractall(tmp_path)
    (export,) = tmp_path.rglob("*.export")
    (verifier,) = tmp_path.rglob("*.pyz")
    (command,) = re.findall(r"ledger\.export --key ([0-9a-f]{64})\n", next(tmp_path.rglob("README.txt")).read_text())
    words = [sys.executable, "-I", verifier, export, "--key", command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SOUND: lazaret/coordinator" in done.stdout
    raw = bytearray(export.read_bytes())
    raw[len(raw) // 2] ^= 1
    export.write_bytes(raw)
    assert subprocess.run([sys.executable, "-I", verifier, export], capture_output=True, check=False).returncode == 1


def test_metrics_and_health_answer_beside_both(scene: ConsoleWorld) -> None:
    for where in ("coordinator", REVIEWED):
        base = f"http://127.0.0.1:{scene.ports[where + ' metrics']}"
        said = urllib.request.urlopen(f"{base}/metrics", timeout=120).read().decode()
        assert "lazaret_" in said
        assert urllib.request.urlopen(f"{base}/healthz", timeout=120).status == 200
        assert urllib.request.urlopen(f"{base}/readyz", timeout=120).status == 200
        where_asked = scene.work / where / SOCKET
        aside = where_asked.rename(where_asked.with_name("aside"))
        with pytest.raises(urllib.error.HTTPError, match="503"):  # the owner is asked, and cannot be reached
            urllib.request.urlopen(f"{base}/healthz", timeout=120)
        aside.rename(where_asked)
        assert urllib.request.urlopen(f"{base}/healthz", timeout=120).status == 200


def test_pictures_of_the_screens_are_kept(scene: ConsoleWorld) -> None:
    assert len(list(SCREENS.glob("*.png"))) >= 20
