"""Who takes part: enrolments that persons approve, certificates, and what a revoked site can no longer do."""

from __future__ import annotations

import argparse
import base64
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.audit.display import as_json, rows
from policies.audit.verify import main, verify
from policies.governance import cli, decisions, options
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Admitted, Enrolled, InvalidEntryError, Issued, Reserved
from policies.ledger.export import ExportError
from policies.ledger.merkle import cosign
from policies.ledger.state import KeyReusedError, State
from policies.ledger.store import AppendRequest, Store
from policies.ledger_service import ArtifactFindings, LedgerService, digest
from policies.review.policy import parse
from policies.statements import Enrolment, claim_json
from protos.common.canonical_json import canonical
from protos.operations.command_line import add
from tests.support.ledger_world import DP, Hospital, Person, open_register, policy

CAREFUL, LOCAL = Person("dpo-1", "compliance"), Person("head-1", "hospital")
LAW = parse(policy(), "site")
READER = "1f" * 32


class World:
    """A ledger with one site, two persons in office, and whatever comes next."""

    def __init__(self, folder: Path) -> None:
        self.path, self.key = folder / "ledger.db", Ed25519PrivateKey.generate()
        self.a, self.b = Hospital("site-a", policy(readers=f'["{READER}"]')), Hospital("site-b")
        self.register = open_register(self.path, self.a, key=self.key)
        for person in (CAREFUL, LOCAL):
            decisions.appoint(self.store, person.name, person.role, person.public)

    @property
    def store(self) -> Store:
        return self.register.store

    @property
    def state(self) -> State:
        return self.store.state

    def approve(self, hospital: Hospital, serial: str, *persons: Person) -> tuple[Enrolment, bytes]:
        statement, envelope = hospital.enrolment()
        for person in persons:
            words = ("enrol", hospital.name, digest(envelope).hex())
            decisions.approve(self.store, person.approval(serial, *words))
        return statement, envelope

    def enrol(self, hospital: Hospital, serial: str, *persons: Person) -> None:
        self.register.enrol(*self.approve(hospital, serial, *persons), LAW, serial)

    def issue(self, number: str, site: str = "site-a") -> None:
        self.register.issue(site, number, bytes(32), 1_800_000_000)

    def reserve(self, hospital: Hospital, grant: str) -> list[str]:
        asked = hospital.reservation(grant)
        register = LedgerService(self.store, lambda _site: LAW)
        return [f.rule for f in register.reserve(f"k-{grant}", asked, hospital.seal(asked)).findings]

    def export(self, *notes: str) -> bytes:
        self.store.close()
        return export_file(self.path, "lazaret/test", self.key, notes)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    with contextlib.suppress(Exception):
        made.store.close()


def test_a_site_is_enrolled_when_both_roles_have_approved_its_very_request(world: World) -> None:
    world.enrol(world.b, "s-1", CAREFUL, LOCAL)
    assert world.state.sites["site-b"].serial == "s-1"
    assert {"site-b/k", "site-b/rdp"} <= set(world.state.accounts)
    assert world.reserve(world.b, "g-b") == []


@pytest.mark.parametrize(
    ("persons", "missing"),
    [((), "compliance and hospital"), ((CAREFUL,), "by hospital"), ((LOCAL,), "by compliance")],
)
def test_who_has_not_approved_an_enrolment_is_named_with_what_to_sign(
    world: World, persons: tuple[Person, ...], missing: str
) -> None:
    size, (_, envelope) = world.state.size + len(persons), world.b.enrolment()
    with pytest.raises(InvalidEntryError, match=missing) as caught:
        world.enrol(world.b, "s-1", *persons)
    assert "site-b" not in world.state.sites
    assert world.state.size == size
    assert f"ledger sign enrol site-b {digest(envelope).hex()} --serial s-1" in str(caught.value)


def test_an_approval_is_for_one_request_of_one_site_and_used_once(world: World) -> None:
    _, envelope = world.approve(world.b, "s-1", CAREFUL, LOCAL)
    other = Hospital("site-b")
    with pytest.raises(InvalidEntryError, match="compliance and hospital"):
        world.register.enrol(*other.enrolment(), LAW, "s-1")
    third = Hospital("site-c", key=world.b.key)
    with pytest.raises(InvalidEntryError, match="compliance and hospital"):
        world.register.enrol(*third.enrolment(), LAW, "s-1")
    with pytest.raises(InvalidEntryError, match="compliance and hospital"):
        world.register.enrol(world.b.enrolment()[0], envelope, LAW, "")
    world.register.enrol(world.b.enrolment()[0], envelope, LAW, "s-1")
    world.register.revoke("site-b", "", "left")
    with pytest.raises(InvalidEntryError, match="fresh"):
        world.register.enrol(world.b.enrolment()[0], envelope, LAW, "s-1")
    with pytest.raises(InvalidEntryError, match="compliance and hospital"):
        world.register.enrol(*other.enrolment(), LAW, "s-1")


def test_enrolled_again_nothing_is_written_and_otherwise_it_is_an_error(world: World) -> None:
    made = world.approve(world.b, "s-1", CAREFUL, LOCAL)
    world.register.enrol(*made, LAW, "s-1")
    size = world.state.size
    world.register.enrol(*made, LAW, "s-1")
    assert world.state.size == size
    for again, serial in ((made, "s-2"), (Hospital("site-b").enrolment(), "s-1")):
        with pytest.raises(KeyReusedError):
            world.register.enrol(*again, LAW, serial)


def test_where_nobody_may_approve_a_serial_is_refused(tmp_path: Path) -> None:
    register = open_register(tmp_path / "ledger.db", Hospital("site-a"))
    with pytest.raises(InvalidEntryError, match="has no serial"):
        register.enrol(*Hospital("site-b").enrolment(), LAW, "s-1")
    register.enrol(*Hospital("site-b").enrolment(), LAW)
    assert register.store.state.sites["site-b"].serial == ""


def test_a_certificate_counts_from_its_entry_until_it_is_revoked(world: World) -> None:
    assert not world.state.admits("site-a", "1f")
    world.issue("1f")
    size = world.state.size
    world.issue("1f")
    assert world.state.size == size, "written twice, it is one entry"
    assert world.state.issued["1f"] == Issued("site-a", "1f", bytes(32), 1_800_000_000)
    assert world.state.admits("site-a", "1f")
    with pytest.raises(KeyReusedError):
        world.register.issue("site-a", "1f", b"x" * 32, 1_800_000_000)
    world.issue("2")
    world.register.revoke("site-a", "1f", "lost")
    assert [world.state.admits("site-a", n) for n in ("1f", "2")] == [False, True]
    size = world.state.size
    world.register.revoke("site-a", "1f", "lost")
    assert world.state.size == size, "revoked twice, it is one entry"


def test_what_cannot_be_revoked_is_an_error(world: World) -> None:
    world.issue("1f")
    world.enrol(world.b, "s-1", CAREFUL, LOCAL)
    for site, number, why in (("site-a", "2", "lost"), ("site-b", "1f", "lost"), ("site-x", "", "lost"),
                              ("site-x", "1f", "lost"), ("site-a", "1f", "by post"), ("site-a", "", "")):  # fmt: skip
        with pytest.raises(InvalidEntryError):
            world.register.revoke(site, number, why)
    world.register.revoke("site-a", "1f", "lost")
    with pytest.raises(InvalidEntryError):
        world.register.revoke("site-b", "1f", "lost")
    assert world.state.revoked_sites == set()


def test_a_revoked_site_gets_no_grant_and_no_admission(world: World) -> None:
    assert world.reserve(world.a, "g-1") == []
    held = world.state.accounts["site-a/k"].held
    world.issue("1f")
    world.register.revoke("site-a", "", "stolen")
    size = world.state.size
    world.register.revoke("site-a", "", "stolen")
    assert world.state.size == size
    assert world.state.revoked_sites == {"site-a"}
    assert not world.state.admits("site-a", "1f")
    assert world.reserve(world.a, "g-2") == ["revoked"]
    release = world.a.release("g-1")
    assert [f.rule for f in world.register.dry_run_review(release, world.a.seal(release)).findings] == ["revoked"]
    verdict = world.register.admit("k-admit", release, world.a.seal(release), ArtifactFindings())
    assert [f.rule for f in verdict.findings] == ["revoked"]
    assert world.state.accounts["site-a/k"].spent == held, "what it had been granted is spent, not given back"
    with pytest.raises(InvalidEntryError, match="not barred"):
        world.issue("2")


def test_the_fold_itself_refuses_grants_and_admissions_of_a_revoked_site(world: World) -> None:
    assert world.reserve(world.a, "g-1") == []
    world.register.revoke("site-a", "", "lost")
    envelope = world.a.seal(world.a.release("g-1"))
    claim = canonical(claim_json(DP))
    for entry in (
        Reserved("g-9", "site-a", "run", "federated", "site-a/rdp", 1, claim, bytes(32)),
        Admitted("r", "g-1", "site-a", "", 0, "ksame", "B", 1, claim, bytes(32), digest(envelope), ""),
    ):
        with pytest.raises(InvalidEntryError, match="revoked"):
            world.store.append("sneaked", AppendRequest((entry,), (envelope,)))


def test_a_site_comes_back_with_a_new_key_and_policy_to_the_accounts_it_had(world: World) -> None:
    assert world.reserve(world.a, "g-1") == []
    world.issue("1f")
    accounts = {name: (a.opened, a.held, a.spent) for name, a in world.state.accounts.items()}
    world.register.revoke("site-a", "", "key")
    again = Hospital("site-a", policy(k_min=7))
    with pytest.raises(InvalidEntryError, match="not approved by compliance and hospital"):
        world.enrol(again, "s-1")
    world.enrol(again, "s-2", CAREFUL, LOCAL)
    assert world.state.sites["site-a"].sign_key == again.public
    assert {name: (a.opened, a.held, a.spent) for name, a in world.state.accounts.items()} == accounts
    assert not world.state.admits("site-a", "1f")
    world.issue("2")
    assert world.state.admits("site-a", "2")
    assert world.reserve(again, "g-2") == ["budget"], "its one release of each patient is taken"
    world.register.revoke("site-a", "", "left")
    with pytest.raises(InvalidEntryError, match="fresh"):  # whoever approves what was enrolled before
        world.enrol(again, "s-3", CAREFUL, LOCAL)
    again = Hospital("site-a", policy(k_min=8), key=again.key)
    world.enrol(again, "s-4", CAREFUL, LOCAL)
    assert world.state.revoked_sites == set()
    entries = [world.store.line(i).record.entry for i in range(world.state.size)]
    assert [e.serial for e in entries if isinstance(e, Enrolled)] == ["", "s-2", "s-4"]
    found = verify(world.export())
    assert found.sites["site-a"] == {
        "key": again.public.hex(),
        "approved_by": ["dpo-1 (compliance)", "head-1 (hospital)"],
        "enrolments": 3,
        "revoked": False,
        "certificates_issued": 2,
        "certificates_revoked": 2,
    }


def test_a_head_that_a_site_cosigned_with_its_former_key_is_still_its_witness(world: World) -> None:
    seen = world.store.checkpoint()
    note = seen + cosign(seen, "site-a", world.a.key, 1_700_000_000)
    forged = seen + cosign(seen, "site-a", Ed25519PrivateKey.generate(), 1_700_000_000)
    world.register.revoke("site-a", "", "key")
    world.enrol(Hospital("site-a"), "s-1", CAREFUL, LOCAL)
    raw = world.export(note)
    assert verify(raw).witnesses == {"site-a": 5}
    with pytest.raises(ExportError, match="no enrolled site's"):
        verify(export_file(world.path, "lazaret/test", world.key, (forged,)))


def test_the_verifier_says_who_approved_each_enrolment(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.enrol(world.b, "s-1", CAREFUL, LOCAL)
    world.issue("1f")
    world.issue("2", "site-b")
    world.register.revoke("site-b", "", "left")
    raw = world.export()
    (world.path.parent / "export").write_bytes(raw)
    assert main([str(world.path.parent / "export")]) == 3, "nobody said whose ledger it is"
    said = capsys.readouterr().out
    assert "site-a: enrolled when nobody could approve it; 1 certificates issued, 0 of them revoked\n" in said
    assert (
        "site-b: enrolment approved by dpo-1 (compliance), head-1 (hospital); "
        "1 certificates issued, 1 of them revoked, REVOKED\n"
    ) in said


def test_an_enrolment_that_nobody_approved_is_found_by_the_auditor(world: World) -> None:
    """Written by an operator whose fold does not ask."""
    _, envelope = world.b.enrolment()
    key = base64.b64decode(world.b.enrolment()[0].sign_key)
    statement = world.b.enrolment()[0]
    entry = Enrolled("site-b", key, digest(statement.policy.encode()), digest(envelope), "s-1")
    world.state.persons.clear()  # what an auditor folds are the entries
    before = replace(entry, serial="")
    world.store.append("sneaked", AppendRequest((before,), (envelope,)))
    with pytest.raises(ExportError, match=r"2 role\(s\) must approve"):
        verify(world.export())


def test_an_admission_that_hides_its_reader_is_found_by_the_auditor(world: World) -> None:
    assert world.reserve(world.a, "g-1") == []
    release = world.a.release("g-1", reader=READER)
    envelope = world.a.seal(release)
    names = (release.release, "g-1", "site-a", "", 0, "ksame", "B", 1)
    entry = Admitted(*names, canonical(claim_json(release.claim)), bytes.fromhex("ab" * 32), digest(envelope), "")
    world.store.append("sneaked", AppendRequest((entry,), (envelope,)))
    with pytest.raises(ExportError, match="something else than the statement"):
        verify(world.export())


def test_an_auditor_finds_an_admission_to_a_reader_that_the_site_never_named(tmp_path: Path) -> None:
    key, site = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", site, key=key)
    lax = LedgerService(register.store, lambda _site: replace(LAW, readers=frozenset({READER})))
    reservation, release = site.reservation("g"), site.release("g", reader=READER)
    assert lax.reserve("k", reservation, site.seal(reservation)).admitted
    assert lax.admit("s", release, site.seal(release), ArtifactFindings()).admitted
    register.store.close()
    with pytest.raises(ExportError, match="reader"):
        verify(export_file(tmp_path / "ledger.db", "lazaret/test", key))


def test_the_book_as_people_read_it_tells_members_certificates_and_readers(world: World) -> None:
    world.enrol(world.b, "s-1", CAREFUL, LOCAL)
    world.issue("1f")
    world.issue("2")
    world.register.revoke("site-a", "2", "lost")
    named = LedgerService(world.store, lambda _site: parse(world.a.policy_text, "a"))
    reservation, release = world.a.reservation("g"), world.a.release("g", reader=READER)
    assert named.reserve("k", reservation, world.a.seal(reservation)).admitted
    assert named.admit("s", release, world.a.seal(release), ArtifactFindings()).admitted
    world.register.revoke("site-b", "", "left")
    records = [world.store.line(i).record for i in range(world.state.size)]
    told = as_json("lazaret/test", records)
    counts: dict[str, Any] = {"certificates_issued": 2, "certificates_revoked": 1}
    assert told["sites"] == [
        {"site": "site-a", "serial": None, "approved": [], "revoked": False, **counts},
        {"site": "site-b", "serial": "s-1", "approved": ["compliance", "hospital"], "revoked": True,
         "certificates_issued": 0, "certificates_revoked": 0},
    ]  # fmt: skip
    (admitted,) = (e for e in told["entries"] if e["type"] == "admitted")
    assert (admitted["reader"], admitted["level"]) == (READER, "B")
    said = {row[2]: row[4] for row in rows(records)}
    assert said["issued"] == "certificate 2 until 2027-01-15 08:00:00"
    assert said["revoked"] == "the site, every certificate: left"
    assert "approved as s-1" in said["enrolled"]
    assert f"encrypted to {READER[:12]}" in said["admitted"]
    assert any("certificate 2: lost" in row[4] for row in rows(records))
    verify(world.export())


def _signed(folder: Path, *words: str) -> bytes:
    """What a person signs by command, opened."""
    out = folder / f"approval-{words[0]}"
    parser = argparse.ArgumentParser()
    options.add_commands(parser.add_subparsers(), add)
    tools = cli.CliContext(
        acts=lambda _arguments: contextlib.nullcontext(),  # type: ignore[arg-type, return-value]
        origin=lambda _arguments: "lazaret/test",
        read_key=lambda _path: CAREFUL.key,
        write_key=lambda _path, _key: None,
        say=lambda _text: None,
        program="lazaret-test",
        waiting=lambda _arguments: (),
        confirm=lambda _yes, _question: True,
        compare=lambda _given, _meant: True,
        next_step=lambda _arguments, _word: None,
    )
    line = ["sign", *words, "--person", "dpo-1", "--serial", "s-1", "--key", "dpo.key", "--out", str(out)]
    line += ["--ledger", "lazaret/test"]
    arguments = parser.parse_args(line)
    assert cli.run(arguments, tools) == 0
    return out.read_bytes()


def test_persons_sign_enrolments_and_rounds_like_anything_else(world: World, tmp_path: Path) -> None:
    _, envelope = world.b.enrolment()
    digests = {"enrol": digest(envelope).hex(), "round": "ab" * 32}
    for action, subject in (("enrol", "site-b"),):
        sealed = _signed(tmp_path, action, subject, digests[action])
        if action == "enrol":
            decisions.approve(world.store, sealed)
        with pytest.raises(InvalidEntryError, match="SHA-256 in hexadecimal"):
            _signed(tmp_path / "none", action, subject, "AB" * 32)
    assert world.state.approvals("s-1", "enrol", "site-b", digests["enrol"]).keys() == {"compliance"}
