"""``lazaret-verify`` finds any change, needs nothing of ours but the law, and exits as it says."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.accounting.claims import SubsampledGaussian
from policies.audit.verify import main, verify
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import InvalidEntryError, Refused, Reserved
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import open_checkpoint
from policies.ledger.store import AppendRequest, LedgerUnsoundError
from policies.ledger_service import ArtifactFindings
from policies.statements import Settlement, claim_json
from protos.common.canonical_json import canonical
from tests.support.ledger_world import DP, K5, Hospital, open_register


@pytest.fixture
def ledger(tmp_path: Path) -> tuple[Path, Ed25519PrivateKey]:
    key, a, b = Ed25519PrivateKey.generate(), Hospital("site-a"), Hospital("site-b")
    register = open_register(tmp_path / "ledger.db", a, b, key=key)
    for hospital in (a, b):
        name = f"grant-{hospital.name}"
        reservation = hospital.reservation(name)
        register.reserve(f"k-{name}", reservation, hospital.seal(reservation))
        release = hospital.release(name)
        register.admit(f"s-{name}", release, hospital.seal(release), ArtifactFindings())
    reservation = a.reservation("grant-dp", DP, "federated", "run")
    register.reserve("k-dp", reservation, a.seal(reservation))
    again = a.reservation("grant-k2")
    assert not register.reserve("k-k2", again, a.seal(again)).admitted
    register.store.close()
    return tmp_path / "ledger.db", key


def fingerprint(key: Ed25519PrivateKey) -> str:
    return hashlib.sha256(key.public_key().public_bytes_raw()).hexdigest()


def test_an_honest_export_is_sound_and_says_what_the_ledger_says(ledger: tuple[Path, Ed25519PrivateKey]) -> None:
    found = verify(export_file(ledger[0], "lazaret/test", ledger[1]))
    assert (found.grants, found.releases, found.refusals) == (3, 2, 1)
    assert found.accounts["site-a/k"] == {"limit": 1, "held": 0, "spent": 1, "epsilon": None, "delta": None}
    assert found.accounts["site-a/rdp"]["held"] > 0


def test_any_changed_byte_of_an_export_is_found(ledger: tuple[Path, Ed25519PrivateKey]) -> None:
    raw = export_file(ledger[0], "lazaret/test", ledger[1])
    dice = random.Random(7)
    places = {*dice.sample(range(len(raw)), 250), 0, 1, len(raw) - 1, len(raw) - 2}
    for at in places:
        changed = bytearray(raw)
        changed[at] ^= 1 << dice.randrange(8)
        with pytest.raises(ExportError):
            verify(bytes(changed))


def test_a_cut_or_longer_export_is_found(ledger: tuple[Path, Ed25519PrivateKey]) -> None:
    raw = export_file(ledger[0], "lazaret/test", ledger[1])
    for changed in (raw[:-1], raw + b"\n", raw[: len(raw) // 2], b"", raw.replace(b"\n", b"\r\n")):
        with pytest.raises(ExportError):
            verify(changed)


def test_a_resigned_ledger_without_an_entry_is_found_with_an_older_checkpoint(tmp_path: Path) -> None:
    """The operator holds the signing key, so only somebody's older checkpoint can tell."""
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "one.db", a, key=key)
    register.store.append("k1", AppendRequest((Refused("s", "site-a", "ksame", "call", ["test"], b""),)))
    old = register.store.checkpoint()
    register.store.append("k2", AppendRequest((Refused("t", "site-a", "ksame", "call", ["test"], b""),)))
    register.store.close()
    verify(export_file(tmp_path / "one.db", "lazaret/test", key), since=old)
    forged = open_register(tmp_path / "two.db", a, key=key)
    for i in range(4):
        forged.store.append(f"k{i}", AppendRequest((Refused("x", "site-a", "ksame", "call", ["test"], b""),)))
    forged.store.close()
    with pytest.raises(ExportError, match="rewritten"):
        verify(export_file(tmp_path / "two.db", "lazaret/test", key), since=old)


def _sneak(tmp_path: Path, entry: object, *envelopes: bytes, hospital: Hospital | None = None) -> str:
    """Append an entry that the reviews would never make, and say what the auditor finds."""
    key = Ed25519PrivateKey.generate()
    register = open_register(tmp_path / "ledger.db", hospital or Hospital("site-a"), key=key)
    register.store.append("sneaked", AppendRequest((entry,), envelopes))  # type: ignore[arg-type]
    register.store.close()
    with pytest.raises(ExportError) as caught:
        verify(export_file(tmp_path / "ledger.db", "lazaret/test", key))
    return str(caught.value)


def test_a_price_below_the_claims_cost_is_found(tmp_path: Path) -> None:
    a = Hospital("site-a")
    reservation = a.reservation("g", DP, "federated", "run")
    envelope = a.seal(reservation)
    from policies.ledger_service import digest

    entry = Reserved("g", "site-a", "run", "federated", "site-a/rdp", 5, canonical(claim_json(DP)), digest(envelope))
    assert "another price" in _sneak(tmp_path, entry, envelope, hospital=a)


def test_an_entry_that_rests_on_another_statement_is_found(tmp_path: Path) -> None:
    a = Hospital("site-a")
    envelope = a.seal(a.reservation("another"))
    from policies.ledger_service import digest

    entry = Reserved("g", "site-a", "", "ksame", "site-a/k", 1, canonical(claim_json(K5)), digest(envelope))
    assert "something else" in _sneak(tmp_path, entry, envelope, hospital=a)


def test_an_entry_without_its_envelope_is_found(tmp_path: Path) -> None:
    entry = Reserved("g", "site-a", "", "ksame", "site-a/k", 1, canonical(claim_json(K5)), b"x" * 32)
    assert "envelope is missing" in _sneak(tmp_path, entry)


def test_an_envelope_signed_by_another_key_is_found(tmp_path: Path) -> None:
    a, stranger = Hospital("site-a"), Hospital("site-a")
    envelope = stranger.seal(stranger.reservation("g"))
    from policies.ledger_service import digest

    entry = Reserved("g", "site-a", "", "ksame", "site-a/k", 1, canonical(claim_json(K5)), digest(envelope))
    assert "another key" in _sneak(tmp_path, entry, envelope, hospital=a)


def test_a_limit_above_the_sites_own_policy_is_found(tmp_path: Path) -> None:
    """P12: the coordinator cannot give a site's patients away."""
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", key=key)
    statement, envelope = a.enrolment()
    from policies.review.policy import parse

    generous = replace(parse(a.policy_text, "p"), epsilon=50.0)
    register.enrol(statement, envelope, generous)
    register.store.close()
    with pytest.raises(ExportError, match="above the site's own policy"):
        verify(export_file(tmp_path / "ledger.db", "lazaret/test", key))


def test_an_envelope_that_no_entry_rests_on_is_found(tmp_path: Path) -> None:
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a, key=key)
    register.store.close()
    export = Export.parse(export_file(tmp_path / "ledger.db", "lazaret/test", key))
    letters = sorted((*export.envelopes, b"a message"), key=lambda raw: hashlib.sha256(raw).digest())
    smuggled = Export(export.public, export.entries, tuple(letters), export.checkpoint)
    with pytest.raises(ExportError, match="no entry rests on"):
        verify(smuggled.encode())


def test_the_command_exits_0_1_2_and_3(
    ledger: tuple[Path, Ed25519PrivateKey], capsys: pytest.CaptureFixture[str]
) -> None:
    path = ledger[0].with_suffix(".export")
    path.write_bytes(export_file(ledger[0], "lazaret/test", ledger[1]))
    named = ["--key", fingerprint(ledger[1])]
    assert main([str(path), *named]) == 0
    assert capsys.readouterr().out.startswith("SOUND: lazaret/test, ")
    assert main([str(path), *named, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["sound"], said["verdict"], said["anchors"]) == (True, "SOUND", ["key"])
    assert main([str(path)]) == 3
    assert capsys.readouterr().out.startswith("CONSISTENT: lazaret/test, ")
    path.write_bytes(path.read_bytes()[:-2] + b"x\n")
    assert main([str(path), *named]) == 1
    assert "NOT SOUND" in capsys.readouterr().out
    assert main([str(path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["sound"], said["verdict"]) == (False, "NOT SOUND")
    with pytest.raises(SystemExit) as caught:
        main([str(path.with_suffix(".nowhere"))])
    assert caught.value.code == 2


def test_the_verifier_needs_nothing_but_the_standard_library_and_cryptography(
    ledger: tuple[Path, Ed25519PrivateKey],
) -> None:
    path = ledger[0].with_suffix(".export")
    path.write_bytes(export_file(ledger[0], "lazaret/test", ledger[1]))
    code = (
        "import sys, policies.audit.verify as v\n"
        "assert v.main(sys.argv[1:]) == 3\n"
        "ours = {'policies', 'cryptography', 'cffi', '_cffi_backend', 'typing_extensions'}\n"
        "common = {m for m in sys.modules if m == 'protos' or m.startswith('protos.common')}\n"
        "bad = {m if m.startswith('protos') else m.split('.')[0] for m in {*sys.modules} - common}\n"
        "bad -= {*sys.stdlib_module_names, *ours}\n"
        "print('FOREIGN', sorted(m for m in bad if not m.startswith(('_', 'editable'))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", _with_paths(code), str(path)], capture_output=True, text=True, check=False
    )
    assert "FOREIGN []" in done.stdout, done.stdout + done.stderr


def _with_paths(code: str) -> str:
    """The same search path without site's start-up hooks, which may import anything."""
    return f"import sys; sys.path[:0] = {sys.path!r}\n{code}"


def test_a_checkpoint_of_an_export_opens_with_the_key_that_is_published(
    ledger: tuple[Path, Ed25519PrivateKey],
) -> None:
    export = Export.parse(export_file(ledger[0], "lazaret/test", ledger[1]))
    assert open_checkpoint(export.checkpoint, ledger[1].public_key().public_bytes_raw()).size == len(export.entries)


def test_a_grant_under_which_something_set_out_cannot_be_freed(tmp_path: Path) -> None:
    a = Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a)
    reservation = a.reservation("g")
    register.reserve("k", reservation, a.seal(reservation))
    release = a.release("g")
    register.send(release, a.seal(release))
    with pytest.raises(InvalidEntryError, match="cannot be freed"):
        register.free("g", "unused", a.seal(Settlement("g", "site-a", "", "ksame", "declined", "unused", 0)))


@pytest.mark.parametrize("why", ["refused", "unused"])
@pytest.mark.parametrize("reason", ["coordinator", "unused"])
def test_a_grant_is_freed_for_the_reason_that_the_site_has_signed(tmp_path: Path, why: str, reason: str) -> None:
    a, key = Hospital("site-a"), Ed25519PrivateKey.generate()
    register = open_register(tmp_path / "ledger.db", a, key=key)
    reservation = a.reservation("g")
    register.reserve("k", reservation, a.seal(reservation))
    register.free("g", why, a.seal(Settlement("g", "site-a", "", "ksame", "declined", reason, 0)))
    register.store.close()
    raw = export_file(tmp_path / "ledger.db", "lazaret/test", key)
    if (why, reason) in (("refused", "coordinator"), ("unused", "unused")):
        verify(raw)
    else:
        with pytest.raises(ExportError, match="something else"):
            verify(raw)


def test_what_set_out_against_the_law_is_found_even_without_a_verdict(tmp_path: Path) -> None:
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a, key=key)
    reservation = a.reservation("g")
    register.reserve("k", reservation, a.seal(reservation))
    release = a.release("g", components={"encoder": "private", "generator": "private"})
    register.send(release, a.seal(release))
    register.store.close()
    with pytest.raises(ExportError, match="the law does not admit it"):
        verify(export_file(tmp_path / "ledger.db", "lazaret/test", key))


def test_no_changed_byte_of_the_database_gets_a_signature_or_past_an_older_checkpoint(tmp_path: Path) -> None:
    """Every byte of the file in turn would take hours; a spread of them, the same at every run."""
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a, key=key)
    for i in range(3):
        reservation = a.reservation(f"g{i}", SubsampledGaussian(0.01, 8.0, 1), "federated", "run")
        register.reserve(f"k{i}", reservation, a.seal(reservation))
    older = register.store.checkpoint()
    register.store.close()
    honest = export_file(tmp_path / "ledger.db", "lazaret/test", key)
    whole = (tmp_path / "ledger.db").read_bytes()
    dice, signed, found = random.Random(7), 0, 0
    for _ in range(400):
        at, changed = dice.randrange(len(whole)), bytearray(whole)
        changed[at] ^= dice.randrange(1, 256)
        copy = tmp_path / "changed.db"
        copy.write_bytes(changed)
        try:
            exported = export_file(copy, "lazaret/test", key)
        except LedgerUnsoundError:
            found += 1
            continue
        if exported == honest:  # the byte was in no row: free space, or SQLite's own
            continue
        signed += 1
        with pytest.raises(ExportError):
            verify(exported, since=older)
    assert found + signed > 20, "most of so small a file is free space"
