"""``lazaret-agent doctor``: one line for each check, passed, noted, or failed with what to do. Exit 1: one failed."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import sys
from collections.abc import Iterator
from typing import Final

from rich.console import Console

from agent import site_commands
from agent.edges import doctor, looking
from agent.edges.home import BadSite, Home, origin
from agent.edges.looking import check_history
from agent.edges.notes import Notes
from agent.edges.own_ledger import site_policy
from agent.edges.sealed import OlderVault
from agent.edges.watch import Watch
from agent.nouns import Forked
from agent.release_record import RECORD, WHAT_TO_DO, named, unrecorded
from policies.forms import WrongForm
from policies.policy import Policy, PolicyError, strictest
from policies.reading import Heed, read_store
from policies.sqlite import look, mark_of
from policies.store import LedgerUnsound, Store
from protos.doctor import Finding, as_json, as_lines, examine, failed, healthy, noted, passed, progress
from protos.keyfile import BadKeyFile

OUT = Console(highlight=False)
_EXPECTED: Final = (*doctor.EXPECTED, *site_commands.EXPECTED)
_LEDGER: Final = "the ledger opens"
_VAULT: Final = "the vault opens with its key"
_RECORDS: Final = "every project has its records"
_DELTA: Final = "delta is below 1 / patients (P1)"
_HISTORY: Final = "ledger and vault are of one time"
_WATCH: Final = "watch/ is as new as the vault"
_RECEIPTS: Final = "nothing is awaited after a restore"
_BACK: Final = "put back what is missing, or bring the site back from its newest backup: deploy/docs/restore.md"


def findings(home: Home, now: dt.datetime, heed: Heed = lambda _done, _all: None) -> list[Finding]:
    """All of them: what a release needs, then the way in.

    Args:
        home: the site.
        now: UTC, for certificates.
        heed: hears how many entries of the ledger are folded, and of how many.
    """
    found = examine(doctor.before_the_way_in(home, now), _EXPECTED)
    if any(f.name == "site.toml" and f.state == "fail" for f in found):  # nothing else can be asked
        return found
    found += examine([(_LEDGER, lambda: books(home, heed))], _EXPECTED)
    found += examine([("ingest.toml", lambda: _way_in(home))], _EXPECTED)
    try:
        checks = doctor.of_the_way_in(home, now)
    except (BadSite, BadKeyFile):  # said above
        checks = []
    return found + examine(checks, _EXPECTED)


def books(home: Home, heed: Heed) -> Iterator[Finding]:
    """Would :func:`agent.desk.open_desk` open them? Looked at as it looks, and nothing is written."""
    with contextlib.ExitStack() as held:
        notes: Notes | None = None
        most: int | None = None  # not counted
        try:
            notes = held.enter_context(looking.notes(home))
            records = looking.records(home)
        except OlderVault:
            yield noted(_VAULT, "it is looked at when `upgrade` has been run")
        except doctor.EXPECTED as error:
            yield failed(_VAULT, str(error), "put back the key that it was made with; or the whole site: restore.md")
        else:
            most, many = records.most, records.opened
            told = "no vault yet" if notes is None else f"and the key of {many} of its projects opens its records"
            yield noted(_VAULT, told) if notes is None else passed(_VAULT, told)
            if records.absent:
                said = f"none lie there of {', '.join(records.absent)}: right only where nothing was ever let in"
                yield noted(_RECORDS, f"{said}; else bring the site back from its newest backup")
        if not (home.root / "ledger.db").exists():
            yield _without_ledger(home, notes)
            yield from _delta(home, None, most)
        else:
            yield from _with_ledger(home, notes, heed, most)
        if notes is not None and (home.keys / "coordinator.pub").exists():
            yield _seen(home, notes)


def _without_ledger(home: Home, notes: Notes | None) -> Finding:
    if (notes is not None and notes.note("ledger")) or mark_of(home.root / "ledger.db").path.exists():
        return failed(_LEDGER, "ledger.db is missing, and this site has worked with one", _BACK)
    return noted(_LEDGER, "no ledger yet")


def _with_ledger(home: Home, notes: Notes | None, heed: Heed, most: int | None) -> Iterator[Finding]:
    try:
        store = _folded(home, heed)
        if notes is not None:
            store = _compared(home, notes, store, heed)
    except BadSite as error:
        yield passed(_LEDGER)
        yield failed(_HISTORY, str(error), _BACK)
        return
    except (LedgerUnsound, WrongForm) as error:
        yield failed(_LEDGER, str(error), _BACK)
        return
    with store:
        state, site = store.state, home.settings().site
        yield passed(_LEDGER, f"{state.size} entries fold")
        if notes is not None:
            missing = unrecorded(notes.note(RECORD), state)
            said = f"the vault does not know who is behind {named(missing)}: {WHAT_TO_DO}"
            yield failed(_HISTORY, said, _BACK) if missing else passed(_HISTORY)
        elif state.grants and not (home.root / "vault.db").exists():
            said = "the ledger has grants, and vault.db is missing: whose images were released is not known"
            yield failed(_HISTORY, said, _BACK)
        if state.frozen(site):
            said = f"frozen: {max(1, len(state.waiting))} site awaited, this one: it came back from a backup"
            yield failed(_RECEIPTS, f"{said}, and nothing is granted", "run `recover`: deploy/docs/restore.md")
        else:
            yield passed(_RECEIPTS)
        yield from _delta(home, store, most)


def _delta(home: Home, store: Store | None, most: int | None) -> Iterator[Finding]:
    """As :func:`agent.desk.open_desk` demands it, of the project with most patients. How many is not said."""
    if most is None:
        return
    with contextlib.suppress(BadSite, BadKeyFile, PolicyError, OSError):  # said where they are looked at
        if most * _policy(home, store).delta < 1:
            yield passed(_DELTA)
        else:
            said = "policy.toml: delta must be below 1 / the number of this site's patients; `serve` refuses it"
            fix = "lower delta in policy.toml, which binds at once; `ledger amend` then signs it"
            yield failed(_DELTA, said, fix)


def _policy(home: Home, store: Store | None) -> Policy:
    """What will bind, where there is no ledger yet."""
    if store is not None:
        return site_policy(home, store)
    asked = home.signed_policy((home.root / "request.json").read_bytes())
    return strictest(strictest(home.policy(), asked), home.federation_policy())


def _folded(home: Home, heed: Heed) -> Store:
    return read_store(look(home.root / "ledger.db"), origin(home.settings().site), home.sign_key(), heed)


def _compared(home: Home, notes: Notes, store: Store, heed: Heed) -> Store:
    """The store, or a fresh fold where a `serve` that started meanwhile has told the vault of newer entries.

    Raises:
        BadSite: the vault remembers more, or others.
    """
    try:
        check_history(notes, store)
    except BadSite:
        store.close()
        store = _folded(home, heed)
        try:
            check_history(notes, store)
        except BadSite:
            store.close()
            raise
    return store


def _seen(home: Home, notes: Notes) -> Finding:
    """As :func:`agent.desk.open_desk` compares them; the vault is asked first, for `serve` may go on meanwhile."""
    epoch, nonce, seen = notes.note("head") or [1, "", 0]
    try:
        watch = Watch(home.root / "watch", home.coordinator_key(), forgetful=True)
    except Forked as error:
        return failed(_WATCH, str(error), _BACK)
    except (OSError, RecursionError):  # a folder in its place, or what is nested too deep
        return failed(_WATCH, "watch/seen.json cannot be read", _BACK)
    if watch.memory.epoch < epoch or (watch.memory.restored == nonce and watch.seen < seen):
        return failed(_WATCH, "watch/ is missing, or older than this vault: nothing is sent before it is back", _BACK)
    if watch.memory.frozen:
        forked = "the coordinator's ledger is not the one that this site saw before: nothing is sent"
        return failed(_WATCH, forked, "show the signed heads in watch/ to both compliance officers")
    if watch.must_present:
        return noted(_WATCH, "the coordinator's ledger was restored: `serve` shows it this site's receipts")
    return passed(_WATCH)


def _way_in(home: Home) -> Iterator[Finding]:
    """The checks of :mod:`agent.site_commands`, whose disk's is made with the watermark instead."""
    for name, wrong in site_commands.doctor(home).items():
        if name != "room on the disk":
            yield failed(name, wrong) if wrong else passed(name)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; exit 1 when something failed."""
    with progress() as heed:
        found = findings(Home(arguments.home), dt.datetime.now(dt.UTC), heed)
    if arguments.json:
        sys.stdout.write(as_json(found) + "\n")
    else:
        for line in as_lines(found):
            OUT.print(line, markup=False, soft_wrap=True)
    return 0 if healthy(found) else 1
