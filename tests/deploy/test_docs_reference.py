"""The reference pages say what the code says."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.docs.reference import __main__

DOCS = Path(__main__.__file__).parents[1]


def test_every_page_is_what_the_code_says() -> None:
    made = __main__.pages()
    there = {path.name: path.read_text() for path in __main__.HERE.glob("*.md")}
    old = [name for name, text in made.items() if there.get(name) != text]
    assert not old, f"run python -m deploy.docs.reference: {', '.join(old)}"
    assert set(there) == {*made, "index.md"}


def test_a_page_that_is_not_what_the_code_says_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "HERE", tmp_path)
    monkeypatch.setattr(__main__, "pages", lambda: {"a.md": "new\n"})
    (tmp_path / "a.md").write_text("old\n")
    assert __main__.main(["--check"]) == 1
    assert "a.md" in capsys.readouterr().err
    assert (tmp_path / "a.md").read_text() == "old\n"
    assert __main__.main([]) == 0
    assert __main__.main(["--check"]) == 0


def test_every_key_has_a_meaning() -> None:
    """It stands beside the field, in the code."""
    files = {**__main__.FILES, **__main__.RELEASES}
    kinds = {kind for _, tables in files.values() for _, kind in tables}
    assert [f"{kind.__name__}: {row[0]}" for kind in kinds for row in __main__.keys(kind) if not row[3]] == []


@dataclass(frozen=True, slots=True)
class Shown:
    """A table."""

    first: int  # after it,
    # and below it
    # above the next
    second: str = "x"
    third: tuple[str, ...] = ()


def test_a_field_is_described_by_what_stands_beside_it() -> None:
    said = {"first": "after it,", "second": "and below it above the next", "third": ""}
    assert __main__.field_comments(Shown) == said
    assert [row[:3] for row in __main__.keys(Shown)] == [
        ("`first`", "whole number", "required"),
        ("`second`", "text", '`"x"`'),
        ("`third`", "list: text", "`[]`"),
    ]


def test_an_event_whose_name_cannot_be_read_stops_the_generator() -> None:
    read = lambda text: __main__.names_of(ast.parse(text, mode="eval").body)  # noqa: E731 - one line
    assert read("'a' if x == 'b' else 'c'") == ["a", "c"]
    assert read("f'project_{what}'") == ["project_…"]
    with pytest.raises(TypeError, match="no name of an event"):
        read("name")


@pytest.mark.parametrize("example", sorted(DOCS.glob("*.example.toml")), ids=lambda path: path.name)
def test_every_table_and_key_of_an_example_is_in_the_reference(example: Path) -> None:
    """Found by their names: of a mechanism's own model the example alone has every key."""
    name = example.name.replace(".example", "")
    page = "configuration.md" if name in ("ingest.toml", "labels.toml") else "release-files.md"
    text = (__main__.HERE / page).read_text()
    section = text.partition(f"\n## {name.replace('-dp', '')}\n")[2].partition("\n## ")[0]
    assert section
    for key, value in tomllib.loads(example.read_text()).items():
        assert f"[{key}" in section or f"`{key}" in section, key
        table = value[0] if isinstance(value, list) and isinstance(value[0], dict) else value
        for inner in table if isinstance(table, dict) and key not in ("model", "teacher") else ():
            nested = isinstance(table[inner], dict) and key in ("pacs", "dicomweb", "columns")
            assert nested or f"`{inner}`" in section, f"{key}.{inner}"
