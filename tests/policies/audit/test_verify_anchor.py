"""Whose ledger is it? ``lazaret-verify`` says SOUND only where that was said, by what nobody else can make up."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.audit.auditor import SKEW
from policies.audit.verify import main, verify
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import Opened, Refused, decode, encode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import Checkpoint, CompactRange, cosign, leaf_hash, sign_checkpoint
from policies.ledger.store import AppendRequest
from policies.ledger_service import ArtifactFindings
from tests.support.ledger_world import Hospital, open_register
from tests.support.weak_keys import MIXED, SMALL_ORDER

ORIGIN = "lazaret/test"
NOW = 1_800_000_000


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def fingerprint(key: Ed25519PrivateKey) -> str:
    return hashlib.sha256(public(key)).hexdigest()


def resigned(export: Export, key: Ed25519PrivateKey, entries: tuple[bytes, ...] | None = None) -> Export:
    """These entries under somebody's own key, as anybody can sign them."""
    kept, tree = export.entries if entries is None else entries, CompactRange()
    for raw in kept:
        tree.append(leaf_hash(raw))
    note = sign_checkpoint(Checkpoint(ORIGIN, tree.size, tree.root()), key)
    wanted = {getattr(decode(raw).entry, "envelope", b"") for raw in kept}
    envelopes = tuple(raw for raw in export.envelopes if hashlib.sha256(raw).digest() in wanted)
    return Export(public(key), kept, envelopes, note)


@dataclass(frozen=True)
class Ledger:
    """An honest export with a refusal in it, the head that somebody kept of its beginning, and its key."""

    folder: Path
    export: Export
    older: str
    key: Ed25519PrivateKey
    sites: tuple[Hospital, Hospital]

    def told(self, capsys: pytest.CaptureFixture[str], export: Export, *words: object) -> tuple[int, dict[str, Any]]:
        (self.folder / "x.export").write_bytes(export.encode())
        code = main([str(self.folder / "x.export"), *(str(word) for word in words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    def file(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    key, a, b = Ed25519PrivateKey.generate(), Hospital("site-a"), Hospital("site-b")
    register = open_register(tmp_path / "ledger.db", a, b, key=key)
    asked, release = a.reservation("g"), a.release("g")
    register.reserve("k", asked, a.seal(asked))
    older = register.store.checkpoint()
    register.admit("s", release, a.seal(release), ArtifactFindings())
    again = a.reservation("again")
    assert not register.reserve("k2", again, a.seal(again)).admitted
    register.store.close()
    return Ledger(tmp_path, Export.parse(export_file(tmp_path / "ledger.db", ORIGIN, key)), older, key, (a, b))


def attackers(ledger: Ledger) -> tuple[Export, Ed25519PrivateKey]:
    """The second half cut off, so the refusal too, every time 1970, and signed by a key of the attacker's own."""
    own, kept = Ed25519PrivateKey.generate(), ledger.export.entries[: len(ledger.export.entries) - 2]
    early = tuple(encode(replace(decode(raw), at=n)) for n, raw in enumerate(kept))
    return resigned(ledger.export, own, early), own


def test_a_ledger_that_somebody_signed_with_a_key_of_their_own_is_consistent_and_not_sound(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    forged, own = attackers(ledger)
    code, said = ledger.told(capsys, forged)
    assert (code, said["verdict"], said["sound"], said["anchors"]) == (3, "CONSISTENT", False, [])
    assert (said["refusals"], said["key"]) == (0, fingerprint(own))
    code, said = ledger.told(capsys, forged, "--key", fingerprint(ledger.key))
    assert (code, said["verdict"]) == (1, "NOT SOUND")
    assert "signed by another key" in said["reason"]


def test_an_older_checkpoint_of_the_same_hand_says_nothing_of_whose_it_is(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attacker delivers it with the export."""
    forged, own = attackers(ledger)
    theirs = resigned(forged, own, forged.entries[:3]).checkpoint
    code, said = ledger.told(capsys, forged, "--from", ledger.file("theirs", theirs))
    assert (code, said["verdict"], said["extends"]) == (3, "CONSISTENT", True)
    kept = ledger.file("kept", ledger.older)
    assert ledger.told(capsys, forged, "--from", kept)[0] == 1
    code, said = ledger.told(capsys, ledger.export, "--from", kept)
    assert (code, said["verdict"]) == (3, "CONSISTENT"), "the honest one too: the file alone names nobody"
    code, said = ledger.told(capsys, ledger.export, "--from", kept, "--key", fingerprint(ledger.key))
    assert (code, said["verdict"], said["anchors"]) == (0, "SOUND", ["key"])


def test_a_checkpoint_that_was_named_by_its_digest_says_whose_it_is(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(ledger.older.encode()).hexdigest()
    kept = ledger.file("kept", ledger.older)
    code, said = ledger.told(capsys, ledger.export, "--from", kept, "--checkpoint", digest)
    assert (code, said["verdict"], said["anchors"]) == (0, "SOUND", ["checkpoint"])
    head = hashlib.sha256(ledger.export.checkpoint.encode()).hexdigest()
    code, said = ledger.told(capsys, ledger.export, "--checkpoint", head)
    assert (code, said["checkpoint"]) == (0, head), "as an earlier look had printed it"
    code, said = ledger.told(capsys, ledger.export, "--checkpoint", digest)
    assert (code, "the checkpoint that you named" in said["reason"]) == (1, True), "it was not given"
    forged, own = attackers(ledger)
    theirs = ledger.file("theirs", resigned(forged, own, forged.entries[:3]).checkpoint)
    assert ledger.told(capsys, forged, "--from", theirs, "--checkpoint", digest)[0] == 1


def test_the_same_entries_under_another_key_are_not_under_the_checkpoint_that_was_named(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its root is the same; the signature under it is not."""
    own = Ed25519PrivateKey.generate()
    head = hashlib.sha256(ledger.export.checkpoint.encode()).hexdigest()
    assert ledger.told(capsys, resigned(ledger.export, own), "--checkpoint", head)[0] == 1


@pytest.mark.parametrize("option", ["--key", "--checkpoint"])
@pytest.mark.parametrize("cut", [0, 1, 16, 32, 63, 65, 128])
def test_the_beginning_of_a_digest_is_a_usage_error(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], option: str, cut: int
) -> None:
    value = (fingerprint(ledger.key) * 2)[:cut]
    with pytest.raises(SystemExit) as stopped:
        ledger.told(capsys, ledger.export, option, value)
    assert stopped.value.code == 2
    assert "give the whole of it" in capsys.readouterr().err


@pytest.mark.parametrize("weak", [*MIXED[:2], *sorted(SMALL_ORDER)[:2]], ids=bytes.hex)
def test_a_ledger_whose_key_others_can_sign_with_is_not_sound(ledger: Ledger, weak: bytes) -> None:
    with pytest.raises(ExportError, match="not an Ed25519 key of one owner"):
        verify(replace(ledger.export, public=weak).encode())


def at_times(ledger: Ledger, *times: int) -> bytes:
    """The honest entries, with other times, under the ledger's own key."""
    given = [*times, *[times[-1]] * (len(ledger.export.entries) - len(times))]
    entries = [encode(replace(decode(raw), at=at)) for raw, at in zip(ledger.export.entries, given, strict=True)]
    return resigned(ledger.export, ledger.key, tuple(entries)).encode()


@pytest.mark.parametrize(
    ("times", "fault"),
    [
        ((NOW - 9000, NOW), ""),
        ((NOW, NOW - SKEW), ""),
        ((NOW, NOW - SKEW - 1), "entry 1: times run backwards"),
        ((NOW, NOW - SKEW, NOW - 2 * SKEW), "entry 2: times run backwards"),  # a little each time
        ((NOW - 9000, NOW - 5000, 0), "entry 2: times run backwards"),
        ((NOW + SKEW,), ""),
        ((NOW + SKEW + 1,), "entry 0: it lies 301 s in the future of this machine's clock"),
        ((NOW, NOW, 1 << 62), "entry 2: it lies "),
    ],
)
def test_times_that_run_backwards_or_lie_in_the_future_are_found(
    ledger: Ledger, times: tuple[int, ...], fault: str
) -> None:
    raw = at_times(ledger, *times)
    verify(raw)  # where a site takes its receipts out of it, nobody asks
    if not fault:
        verify(raw, now=NOW)
        return
    with pytest.raises(ExportError, match=fault):
        verify(raw, now=NOW)


def test_the_command_holds_times_against_the_clock_of_its_machine(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    for times, reason in (((1 << 40,), "in the future"), ((NOW - 10**8, 5), "times run backwards")):
        code, said = ledger.told(capsys, Export.parse(at_times(ledger, *times)), "--key", fingerprint(ledger.key))
        assert (code, reason in said["reason"]) == (1, True)


def test_no_honest_ledger_has_times_that_run_backwards_whatever_its_clock_does(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    register = open_register(tmp_path / "ledger.db", Hospital("site-a"), key=key)
    times = iter((NOW - 5000, NOW - 900_000, 3, NOW - 4000))
    register.store._clock = lambda: next(times)
    for n in range(4):
        register.store.append(f"k{n}", AppendRequest((Refused(f"s{n}", "site-a", "ksame", "call", ["test"], b""),)))
    register.store.close()
    raw = export_file(tmp_path / "ledger.db", ORIGIN, key)
    assert [decode(body).at - NOW for body in Export.parse(raw).entries[-4:]] == [-5000, -5000, -5000, -4000]
    verify(raw, now=NOW)


def cosigned(ledger: Ledger, *by: tuple[str, Ed25519PrivateKey]) -> str:
    note = ledger.export.checkpoint
    return note + "".join(cosign(note, name, key, NOW) for name, key in by)


def test_a_quorum_of_the_sites_that_the_ledger_names_must_have_cosigned_the_head(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = ledger.sites
    named = ("--key", fingerprint(ledger.key), "--witnesses")
    code, said = ledger.told(capsys, ledger.export, *named, 1)
    assert (code, "1 witnesses must have cosigned the head" in said["reason"]) == (1, True)
    one = replace(ledger.export, witnessed=(cosigned(ledger, ("site-a", a.key)),))
    code, said = ledger.told(capsys, one, *named, 1)
    assert (code, said["cosigned"]) == (0, ["site-a"])
    assert ledger.told(capsys, one, *named, 2)[0] == 1
    note = cosigned(ledger, ("site-a", a.key), ("site-b", b.key))
    code, said = ledger.told(capsys, replace(ledger.export, witnessed=(note,)), *named, 2)
    assert (code, said["cosigned"]) == (0, ["site-a", "site-b"])
    code, said = ledger.told(capsys, replace(ledger.export, witnessed=(note,)), "--witnesses", 2)
    assert (code, said["verdict"]) == (3, "CONSISTENT"), "sites that an attacker invented cosign whatever they want"


def test_one_witness_counts_once_and_an_older_head_is_not_this_one(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = ledger.sites
    named = ("--key", fingerprint(ledger.key), "--witnesses", 2)
    twice = tuple(cosigned(ledger, ("site-a", a.key)) for _ in range(2))
    later = ledger.export.checkpoint + cosign(ledger.export.checkpoint, "site-a", a.key, NOW + 1)
    old = ledger.older + cosign(ledger.older, "site-b", b.key, NOW)
    for notes in (twice, (twice[0], later), (twice[0], old)):
        code, said = ledger.told(capsys, replace(ledger.export, witnessed=notes), *named)
        assert (code, "and 1 of the sites" in said["reason"]) == (1, True)


def test_the_ledger_is_no_witness_of_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In its own book a site is a site, too; and an operator can enrol the ledger's key."""
    key = Ed25519PrivateKey.generate()
    own = Hospital("site-a", key=key)
    open_register(tmp_path / "ledger.db", own, key=key).store.close()
    export = Export.parse(export_file(tmp_path / "ledger.db", ORIGIN, key))
    itself = Ledger(tmp_path, export, "", key, (own, own))
    noted = replace(export, witnessed=(cosigned(itself, ("site-a", key)),))
    assert verify(noted.encode()).cosigned == []
    assert itself.told(capsys, noted, "--witnesses", 1)[0] == 1
    assert itself.told(capsys, noted, "--witnesses", 1, "--witness", f"site-a={public(key).hex()}")[0] == 1


def test_a_site_that_was_revoked_is_no_witness_any_longer(tmp_path: Path) -> None:
    key, a = Ed25519PrivateKey.generate(), Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a, key=key)
    register.revoke("site-a", "", "stolen")
    register.store.close()
    export = Export.parse(export_file(tmp_path / "ledger.db", ORIGIN, key))
    gone = Ledger(tmp_path, export, "", key, (a, a))
    found = verify(replace(export, witnessed=(cosigned(gone, ("site-a", a.key)),)).encode())
    assert (found.cosigned, found.witnesses) == ([], {"site-a": len(export.entries)})


def test_only_the_witnesses_that_were_named_count_and_each_with_the_key_that_was_named(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = ledger.sites
    stranger = Ed25519PrivateKey.generate()
    both = replace(ledger.export, witnessed=(cosigned(ledger, ("site-a", a.key), ("site-b", b.key)),))
    base = ("--key", fingerprint(ledger.key), "--witnesses")
    mine = ("--witness", f"site-a={a.public.hex()}")
    assert ledger.told(capsys, both, *base, 1, *mine)[0] == 0
    code, said = ledger.told(capsys, both, *base, 2, *mine)
    assert (code, "1 of those that you named" in said["reason"]) == (1, True)
    assert ledger.told(capsys, both, *base, 1, "--witness", f"site-a={public(stranger).hex()}")[0] == 1
    observer = ledger.file("observed", cosigned(ledger, ("observer", stranger)))  # somebody whom no ledger names
    outside = (*mine, "--witness", f"observer={public(stranger).hex()}")
    assert ledger.told(capsys, both, "--from", observer, *base, 2, *outside)[0] == 0
    assert ledger.told(capsys, both, *base, 2, *outside)[0] == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--witnesses", "0"),
        ("--witnesses", "-1"),
        ("--witnesses", "many"),
        ("--witness", "a=" + "00" * 32, "--witnesses", "1"),
        ("--witness", "a=" + MIXED[0].hex(), "--witnesses", "1"),
        ("--witness", "a", "--witnesses", "1"),
        ("--witness", "A=" + public(Ed25519PrivateKey.from_private_bytes(bytes(32))).hex(), "--witnesses", "1"),
        ("--witness", "a=" + public(Ed25519PrivateKey.from_private_bytes(bytes(32))).hex()),
        *(
            ("--witnesses", "1", "--witness", f"{one}={key.hex()}", "--witness", f"{two}={other.hex()}")
            for key in [public(Ed25519PrivateKey.from_private_bytes(bytes(32)))]
            for one, two, other in (
                ("a", "b", key),
                ("a", "a", public(Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32))),
            )
        ),
    ],
)
def test_a_quorum_that_cannot_be_meant_is_a_usage_error(ledger: Ledger, words: tuple[str, ...]) -> None:
    (ledger.folder / "x.export").write_bytes(ledger.export.encode())
    with pytest.raises(SystemExit) as stopped:
        main([str(ledger.folder / "x.export"), *words])
    assert stopped.value.code == 2


@pytest.mark.parametrize("told", [{"epsilon": "0.5"}, {"delta": "1e-06"}, {"epsilon": "none"}])
def test_an_account_that_counts_releases_and_states_an_epsilon_is_found(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], told: dict[str, str]
) -> None:
    """P4: what has no epsilon is given none, also in a field that nobody adds up."""
    records = [decode(raw) for raw in ledger.export.entries]
    entries = tuple(
        encode(replace(r, entry=replace(r.entry, **told)) if isinstance(r.entry, Opened) and not r.entry.order else r)
        for r in records
    )
    code, said = ledger.told(capsys, resigned(ledger.export, ledger.key, entries), "--key", fingerprint(ledger.key))
    assert (code, "has no epsilon and no delta" in said["reason"]) == (1, True)
