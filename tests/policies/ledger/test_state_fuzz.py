"""The fuzz targets over the committed corpus and a few hundred fixed mutations of each seed: the short form.

The long form is ``python -m tests.fuzz --seconds 90``.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.audit.auditor import open_envelope
from policies.audit.verify import verify
from policies.ledger import cbor
from policies.ledger.backends.sqlite import export_file
from policies.ledger.cbor import EntryEncodingError
from policies.ledger.entries import InvalidEntryError, Record, decode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import Checkpoint, LedgerCheckpointError
from policies.ledger.state import State
from policies.ledger.store import AppendRequest
from policies.review.policy import Policy, PolicyError
from policies.statements import MAX_BYTES, PAYLOAD_TYPE, Reservation, Statement, StatementError, load_json, parse
from protos.common.dsse import EnvelopeError, VerifiedEnvelope, open_sealed
from tests.fuzz import targets
from tests.fuzz.ledger import LOG_KEY, ORIGIN, SITE_KEY, dressed, hospital, public, sound
from tests.fuzz.mutate import mutated
from tests.fuzz.seeds import made
from tests.fuzz.targets import TARGETS, Broken
from tests.support.ledger_world import open_register

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"
MUTATIONS = 400  # of each target, shared among its seeds


def known(name: str) -> list[bytes]:
    """The seeds and the committed corpus."""
    return [*made(name), *(path.read_bytes() for path in sorted((CORPUS / name).iterdir()))]


def mutations(name: str, count: int = MUTATIONS) -> Iterator[bytes]:
    """Mutations of what is known, the same in every run."""
    seeds, dice = known(name), random.Random(name)
    for n in range(count):
        yield mutated(seeds[n % len(seeds)], TARGETS[name].kind, dice)


def finding(name: str) -> Exception | None:
    """The first thing that a target raises, or None."""
    for data in (*known(name), *mutations(name)):
        try:
            TARGETS[name].check(data)
        except Exception as error:  # noqa: BLE001 - whatever comes out is what is looked for
            return error
    return None


@pytest.mark.parametrize("name", TARGETS)
def test_only_our_own_errors_come_out_and_every_promise_is_kept(name: str) -> None:
    check, taken = TARGETS[name].check, set()
    for data in known(name):
        check(data)
    for data in mutations(name):
        if check(data):
            taken.add(data)
    # mutations that are all refused at the door would prove nothing; only what is signed cannot be mutated and taken
    assert taken - set(made(name)) or name in ("envelope", "verify")


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_get_past_the_door(name: str) -> None:
    """A corpus that is refused at the first byte would prove nothing."""
    taken = [TARGETS[name].check(seed) for seed in made(name)]
    assert sum(taken) >= 0.8 * len(taken)
    assert not TARGETS[name].check(b"\xff\x00")


def test_the_corpus_is_small_and_belongs_to_the_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) <= 36 * len(TARGETS)
    assert sum(path.stat().st_size for path in files) < 200_000


def _leaks_a_key_error(raw: bytes) -> Record:
    outer: Any = cbor.decode(raw)
    return Record(outer["at"], outer["key"], outer["body"]["entry"])


def _ignores_the_subject(raw: bytes) -> Statement:
    document = load_json(raw)
    if not isinstance(document, dict):
        raise StatementError("not a statement")
    return parse(dressed(document))


def _ignores_the_signature(note: str, public_key: bytes) -> Checkpoint:
    try:
        origin, size, *_rest = note.split("\n")
        return Checkpoint(origin, int(size), bytes(32))
    except ValueError:
        raise LedgerCheckpointError("malformed") from None


def _calls_everything_sound(raw: bytes, since: str | None = None) -> object:
    Export.parse(raw)
    return None


def _admits_more_than_both(a: Policy, b: Policy) -> Policy:
    return replace(a, epsilon=max(a.epsilon, b.epsilon), levels=a.levels | b.levels)


def _leaks_what_toml_raises(text: str, source: str) -> Policy:
    if "[" in text[:40]:
        raise IndexError(source)
    raise PolicyError(source)


def _opens_what_is_not_signed(envelope: bytes, payload_type: str, trusted: object) -> VerifiedEnvelope:
    return VerifiedEnvelope(
        open_envelope(envelope, public(SITE_KEY)) if envelope.startswith(b'{"payload"') else b"", "site-a"
    )


@pytest.mark.parametrize(
    ("name", "parser", "broken", "what"),
    [
        ("entry", "decode", _leaks_a_key_error, KeyError),
        ("statement", "parse_statement", _ignores_the_subject, Broken),
        ("checkpoint", "open_checkpoint", _ignores_the_signature, Broken),
        ("verify", "verify", _calls_everything_sound, Broken),
        ("policy", "strictest", _admits_more_than_both, Broken),
        ("policy", "parse", _leaks_what_toml_raises, IndexError),
        ("envelope", "open_sealed", _opens_what_is_not_signed, (Broken, ValueError)),
    ],
)
def test_a_broken_parser_is_caught(
    name: str,
    parser: str,
    broken: Callable[..., object],
    what: type[Exception] | tuple[type[Exception], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets._policies()
    targets._standings()
    targets._heads()
    monkeypatch.setattr(targets, parser, broken)
    assert isinstance(finding(name), what)


def _refusable() -> Iterator[Record]:
    """Records that read well, many of which no books would take."""
    for n, data in enumerate([*known("entry"), *mutations("entry", 2 * MUTATIONS)]):
        try:
            yield replace(decode(data), key=f"fuzz-{n}")
        except (EntryEncodingError, InvalidEntryError):
            continue


def test_a_refused_entry_leaves_the_books_the_head_and_the_disk_as_they_were(tmp_path: Path) -> None:
    """Behind an entry that would have been taken, so that half of a draft could have been left behind."""
    path = tmp_path / "ledger.db"
    register = open_register(path, hospital(), key=LOG_KEY)
    store, refused = register.store, 0
    good = decode(sound().export.entries[-1]).entry
    for n, record in enumerate(_refusable()):
        before: State = copy.deepcopy(store.state)
        head, disk = store.checkpoint(), export_file(path, ORIGIN, LOG_KEY)
        try:
            store.append(f"draft-{n}", AppendRequest((good, record.entry), (b"an envelope",)))
        except InvalidEntryError:
            refused += 1
            assert store.state == before
            assert store.checkpoint() == head
            assert export_file(path, ORIGIN, LOG_KEY) == disk
    assert refused > 50
    register.store.close()
    open_register(path, hospital(), key=LOG_KEY).store.close()


@pytest.mark.parametrize("more", [b"\n", b"x", b"\xe2\x80\x94 anybody " + b"A" * 102 + b"==\n"])
def test_nothing_can_be_added_to_a_sound_export(more: bytes) -> None:
    """Not even a cosignature by nobody: its bytes would be a place for anything."""
    with pytest.raises(ExportError):
        verify(sound().raw + more)


@pytest.mark.parametrize("size", [1_000, 150_000, MAX_BYTES - 1_000, MAX_BYTES])
def test_whatever_a_site_may_say_an_auditor_can_read(size: int, tmp_path: Path) -> None:
    """An envelope that the door opens and an auditor cannot would make the ledger that holds it unsound for ever."""
    a = hospital()
    register = open_register(tmp_path / "ledger.db", a, key=LOG_KEY)
    reservation = replace(a.reservation("grant-1"), components={"c" * size: "public"})
    with contextlib.suppress(StatementError, EnvelopeError):
        envelope = a.seal(reservation)
        said = parse(open_sealed(envelope, PAYLOAD_TYPE, {"site-a": a.public}).payload)
        assert isinstance(said, Reservation)
        assert not register.reserve("k", said, envelope).admitted
    register.store.close()
    verify(export_file(tmp_path / "ledger.db", ORIGIN, LOG_KEY))
