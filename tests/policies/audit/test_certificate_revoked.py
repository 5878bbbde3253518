"""What was revoked of a site is told by each certificate of it: no promise changes, and who reads it has to know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.reports.catalog import make, snapshot
from coordinator.reports.certificates import as_document
from coordinator.reports.document import as_markdown
from policies.audit import certificate_check
from policies.audit.certificate import FIRST, FORM, PAYLOAD, Certificate, read
from policies.audit.verify import main
from policies.ledger.entries import Issued, Revoked
from policies.ledger.export import ExportError
from policies.ledger.store import AppendRequest
from protos.common.canonical_json import canonical
from protos.common.dsse import seal
from tests.support.older import HOMES, older
from tests.support.report_world import NOW, Stage, stage

STOLEN = "the site north was revoked on "


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of before the revocation lie."""
    return tmp_path_factory.mktemp("before")


@pytest.fixture(scope="module")
def world(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Site north lost a certificate and then was stolen; what was made of it before is kept."""
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        (before / "set.json").write_bytes(made(shown, shown.names["eleven"]))
        (before / "ledger.export").write_bytes(snapshot(shown.home, NOW)[0])
        shown.store.append("issue", AppendRequest((Issued("north", "3f", bytes(32), 1),)))
        shown.store.append("lost", AppendRequest((Revoked("north", "3f", "lost"),)))
        shown.store.append("stolen", AppendRequest((Revoked("north", "", "stolen"),)))
        yield shown


def made(world: Stage, subject: str, form: str = "json") -> bytes:
    return make(world.home, "certificate", form, subject, NOW).body


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([str(a) for a in arguments])
    return code, capsys.readouterr().out


def resigned(world: Stage, found: Certificate, **changes: Any) -> Certificate:
    """The same with changes, under the ledger's own key: what a lying operator could do."""
    return read(seal(replace(found, **changes).encode(), PAYLOAD, world.home.ledger_key()))


@pytest.mark.parametrize("form", ["json", "pdf"])
def test_a_certificate_says_that_its_site_was_stolen_and_when_and_stays_sound(
    form: str, world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, export = snapshot(world.home, NOW)
    (tmp_path / "ledger.export").write_bytes(raw)
    for subject in (world.names["eleven"], world.run):
        (tmp_path / f"c.{form}").write_bytes(made(world, subject, form))
        for ledger in (("--from", tmp_path / "ledger.export"), ()):
            code, text = told(capsys, tmp_path / f"c.{form}", *ledger, "--key", export.source.key)
            assert (code, text.startswith("SOUND: certificate of ")) == (0, True), text
            assert text.count("REVOKED: ") == 2
            assert "REVOKED: the certificate 3f of north was revoked on " in text
            stolen = next(line for line in text.splitlines() if STOLEN in line)
            assert " UTC: stolen (entry " in stolen
            assert "after this certificate was made" not in text
        page = as_markdown(as_document(export, export.item(subject)))
        assert "The site north was revoked on " in page
        assert "stolen" in page
    (tmp_path / "other.json").write_bytes(made(world, world.names["five"]))
    code, text = told(capsys, tmp_path / "other.json", "--key", export.source.key)
    assert (code, "REVOKED" in text) == (0, False), "of another site"


def test_machines_get_it_too(world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_bytes(made(world, world.names["eleven"]))
    key = snapshot(world.home, NOW)[1].source.key
    document = json.loads(told(capsys, tmp_path / "c.json", "--key", key, "--json")[1])
    assert [(one["number"], one["why"]) for one in document["revoked"]] == [("3f", "lost"), ("", "stolen")]
    assert document["certificate"]["revoked"] == document["revoked"]
    assert STOLEN in document["words"]["revoked"]


def test_a_newer_export_tells_what_was_revoked_after_the_certificate_was_made(
    world: Stage, before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ("--key", snapshot(world.home, NOW)[1].source.key)
    code, text = told(capsys, before / "set.json", "--from", before / "ledger.export", *named)
    assert (code, "REVOKED" in text) == (0, False)
    assert read((before / "set.json").read_bytes()).facts["revoked"] == []
    (tmp_path / "ledger.export").write_bytes(snapshot(world.home, NOW)[0])
    code, text = told(capsys, before / "set.json", "--from", tmp_path / "ledger.export", *named)
    assert (code, text.startswith("SOUND")) == (0, True)
    assert text.count("; after this certificate was made") == 2
    document = json.loads(
        told(capsys, before / "set.json", "--from", tmp_path / "ledger.export", *named, "--json")[1],
    )
    assert [one["why"] for one in document["revoked"]] == ["lost", "stolen"]


def test_what_was_revoked_can_be_neither_changed_nor_left_out(world: Stage) -> None:
    found = read(made(world, world.names["eleven"]))
    revoked = [{**one, "why": "left"} for one in found.facts["revoked"]]
    for lie in (revoked, []):
        with pytest.raises(ExportError, match="something else than the entries"):
            certificate_check.check(resigned(world, found, facts={**found.facts, "revoked": lie}))
    kept = tuple(
        s for s, (_, r) in zip(found.shown, certificate_check.lines(found.shown), strict=True) if not _ends(r.entry)
    )
    less = resigned(world, found, shown=kept, facts={**found.facts, "revoked": []})
    certificate_check.check(less)  # without the ledger nobody can tell
    with pytest.raises(ExportError, match="leaves out entries"):
        certificate_check.check_against_export(less, snapshot(world.home, NOW)[1].export)


def _ends(entry: object) -> bool:
    return isinstance(entry, Revoked)


def first(world: Stage, subject: str) -> Certificate:
    """As the first form was made."""
    found = read(made(world, subject))
    kept = tuple(
        s for s, (_, r) in zip(found.shown, certificate_check.lines(found.shown), strict=True) if not _ends(r.entry)
    )
    facts = {name: value for name, value in found.facts.items() if name != "revoked"}
    return resigned(world, found, shown=kept, facts=facts, form=FIRST)


def test_one_of_the_first_form_stays_sound_says_that_it_cannot_tell_and_the_export_tells(
    world: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older_one, (raw, ledger) = first(world, world.names["eleven"]), snapshot(world.home, NOW)
    (tmp_path / "c.json").write_bytes(seal(older_one.encode(), PAYLOAD, world.home.ledger_key()))
    (tmp_path / "ledger.export").write_bytes(raw)
    code, text = told(capsys, tmp_path / "c.json", "--key", ledger.source.key)
    assert (code, "REVOKED" in text, "give --from with the ledger's export" in text) == (0, False, True)
    assert json.loads(told(capsys, tmp_path / "c.json", "--key", ledger.source.key, "--json")[1])["revoked"] is None
    named = ("--key", ledger.source.key)
    code, text = told(capsys, tmp_path / "c.json", "--from", tmp_path / "ledger.export", *named)
    assert (code, text.count("REVOKED: "), "older one" in text) == (0, 2, False)


def test_no_certificate_is_read_under_the_other_forms_rules(world: Stage) -> None:
    new, old = read(made(world, world.names["eleven"])), first(world, world.names["eleven"])
    for odd, form in ((new, FIRST), (old, FORM)):
        with pytest.raises(ExportError):
            certificate_check.check(resigned(world, odd, form=form))
    body = json.loads(new.encode())
    with pytest.raises(ExportError, match="form that this program knows"):
        read(seal(canonical({**body, "form": "lazaret-certificate/3"}), PAYLOAD, world.home.ledger_key()))
    with pytest.raises(ExportError, match="form that this program knows"):
        replace(new, form="lazaret-certificate/3")


def test_a_certificate_that_an_older_version_made_is_sound_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_then = HOMES.parent / "certificate.json"
    (tmp_path / "ledger.export").write_bytes(older(tmp_path / "homes").exported("coordinator"))
    assert read(made_then.read_bytes()).form == FIRST
    named = ("--key", read(made_then.read_bytes()).fingerprint)
    code, text = told(capsys, made_then, "--from", tmp_path / "ledger.export", *named)
    assert (code, "REVOKED" in text) == (0, False), text
    code, text = told(capsys, made_then, *named)
    assert (code, "its form is an older one" in text) == (0, True), text


def test_a_time_that_no_calendar_has_and_a_word_that_no_terminal_shows_are_told_all_the_same() -> None:
    one = {"site": "north", "number": "", "why": "x\x1b[2J", "entry": 3, "at": 1 << 62}
    assert certificate_check.revoked_words(one) == f"the site north was revoked on second {1 << 62}: x?[2J (entry 3)"
