"""``doctor``: a line for each check, passed, noted, or failed with what to do; ``status``: what to do next."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
from collections.abc import Iterator
from typing import Final

from agent.errors import LedgerForkError, SiteConfigError
from agent.gateway.witness import LedgerWitness
from agent.ingest import errors as ingest_errors
from agent.operations import doctor
from agent.release.release_record import RECORD, WHAT_TO_DO, named, unrecorded
from agent.service import status
from agent.service.job_monitoring import of_people
from agent.service.jobs import INTERRUPTED
from agent.service.process_monitoring import check_processes
from agent.storage import read_only_access
from agent.storage.encrypted_sqlite import OlderVaultError
from agent.storage.read_only_access import check_history
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.site_ledger import site_policy
from policies.audit.auditor import clock_warning
from policies.ledger.backends.schema_version import SchemaVersionError
from policies.ledger.backends.sqlite import mark_of, open_read_only
from policies.ledger.read_only import Heed, read_store
from policies.ledger.store import LedgerUnsoundError, Store
from policies.review.policy import Policy, PolicyError, strictest
from protos.identity.key_files import KeyFileError
from protos.operations import next_steps
from protos.operations.checks import CheckResult, answered, examine, failed, note, passed, progress
from protos.service.control_client import ServiceAnswerError, ServiceHinderedError, ServiceRefusedError

_EXPECTED: Final = (
    *doctor.EXPECTED,
    *ingest_errors.EXPECTED,
    ServiceRefusedError,
    ServiceHinderedError,
    ServiceAnswerError,
)
_LEDGER: Final = "the ledger opens"
_VAULT: Final = "the vault opens with its key"
_RECORDS: Final = "every project has its records"
_DELTA: Final = "delta is below 1 / patients (P1)"
_TIMES: Final = "no entry is of the future"
_HISTORY: Final = "ledger and vault are of one time"
_WATCH: Final = "watch/ is as new as the vault"
_JOBS: Final = "jobs go on by themselves"
_RECEIPTS: Final = "nothing is awaited after a restore"
_BACK: Final = "restore the missing files, or restore the site from its newest backup: deploy/docs/restore.md"


def findings(home: SiteDirectory, now: dt.datetime, heed: Heed = lambda _done, _all: None) -> list[CheckResult]:
    """All of them: what a release needs, then what ingest needs.

    Args:
        home: the site.
        now: UTC, for certificates.
        heed: hears how many entries of the ledger are folded, and of how many.
    """
    found = examine(doctor.before_the_way_in(home, now), _EXPECTED)
    if any(f.name == "site.toml" and f.state == "fail" for f in found):  # nothing else can be asked
        return found
    found += examine([(_LEDGER, lambda: ledgers(home, now, heed))], _EXPECTED)
    found += examine([("ingest.toml", lambda: _way_in(home))], _EXPECTED)
    found += examine([(_JOBS, lambda: _jobs(home))], _EXPECTED)
    found += examine([("processes of `serve`", lambda: check_processes(home.root))], _EXPECTED)
    try:
        checks = doctor.of_the_way_in(home, now)
    except (SiteConfigError, KeyFileError):  # said above
        checks = []
    return found + examine(checks, _EXPECTED)


def ledgers(home: SiteDirectory, now: dt.datetime, heed: Heed) -> Iterator[CheckResult]:
    """Would :func:`agent.runtime.open_runtime` open them? Looked at as it looks, and nothing is written."""
    with contextlib.ExitStack() as held:
        notes: SiteDatabase | None = None
        most: int | None = None  # not counted
        try:
            notes = held.enter_context(read_only_access.notes(home))
            records = read_only_access.records(home)
        except OlderVaultError:
            yield note(_VAULT, "this is checked after `upgrade`")
        except doctor.EXPECTED as error:
            yield failed(_VAULT, str(error), "restore the key that it was made with, or the whole site: restore.md")
        else:
            most, many = records.most, records.opened
            told = "no vault yet" if notes is None else f"and the key of {many} of its projects opens its records"
            yield note(_VAULT, told) if notes is None else passed(_VAULT, told)
            if records.absent:
                said = (
                    f"none lie there of {', '.join(records.absent)}: this is right only if no image was ever ingested"
                )
                yield note(_RECORDS, f"{said}; otherwise restore the site from its newest backup")
        if not (home.root / "ledger.db").exists():
            yield _without_ledger(home, notes)
            yield from _delta(home, None, most)
        else:
            yield from _with_ledger(home, notes, now, heed, most)
        if notes is not None and (home.keys / "coordinator.pub").exists():
            yield _seen(home, notes)


def _jobs(home: SiteDirectory) -> Iterator[CheckResult]:
    """Those that were interrupted and do not start again by themselves; what waits for approval is no fault."""
    stuck = [(job, why, fix) for job, why, fix in of_people(home) if job.state == INTERRUPTED]
    for job, why, fix in stuck:
        yield failed(_JOBS, f"job {job.number}, {job.kind}, was interrupted: {why}", fix)
    if not stuck:
        yield passed(_JOBS)


def _without_ledger(home: SiteDirectory, notes: SiteDatabase | None) -> CheckResult:
    if (notes is not None and notes.note("ledger")) or mark_of(home.root / "ledger.db").path.exists():
        return failed(_LEDGER, "ledger.db is missing, although this site has used one", _BACK)
    return note(_LEDGER, "no ledger yet")


def _with_ledger(
    home: SiteDirectory, notes: SiteDatabase | None, now: dt.datetime, heed: Heed, most: int | None
) -> Iterator[CheckResult]:
    try:
        store = _folded(home, heed)
        if notes is not None:
            store = _compared(home, notes, store, heed)
    except SiteConfigError as error:
        yield passed(_LEDGER)
        yield failed(_HISTORY, str(error), _BACK)
        return
    except (LedgerUnsoundError, SchemaVersionError) as error:
        yield failed(_LEDGER, str(error), _BACK)
        return
    with store:
        state, site = store.state, home.settings().site
        yield passed(_LEDGER, f"{state.size} entries fold")
        wrong = clock_warning(state.latest, int(now.timestamp()))
        yield failed(_TIMES, wrong) if wrong else passed(_TIMES)
        if notes is not None:
            missing = unrecorded(notes.note(RECORD), state)
            said = f"the vault does not know the patients of {named(missing)}: {WHAT_TO_DO}"
            yield failed(_HISTORY, said, _BACK) if missing else passed(_HISTORY)
        elif state.grants and not (home.root / "vault.db").exists():
            said = "the ledger has grants, and vault.db is missing: the released patients are unknown"
            yield failed(_HISTORY, said, _BACK)
        if state.frozen(site):
            said = f"frozen: {max(1, len(state.sites_awaited))} site awaited, this one: it was restored from a backup"
            yield failed(_RECEIPTS, f"{said}, and nothing is granted", "run `recover`: deploy/docs/restore.md")
        else:
            yield passed(_RECEIPTS)
        yield from _delta(home, store, most)


def _delta(home: SiteDirectory, store: Store | None, most: int | None) -> Iterator[CheckResult]:
    """As :func:`agent.runtime.open_runtime` demands it, of the project with most patients. How many is not said."""
    if most is None:
        return
    with contextlib.suppress(SiteConfigError, KeyFileError, PolicyError, OSError):  # said where they are looked at
        if most * _policy(home, store).delta < 1:
            yield passed(_DELTA)
        else:
            said = "policy.toml: delta must be below 1 / the number of this site's patients; `serve` refuses it"
            fix = "lower delta in policy.toml, which takes effect at once; `ledger amend` then signs it"
            yield failed(_DELTA, said, fix)


def _policy(home: SiteDirectory, store: Store | None) -> Policy:
    """What will bind, where there is no ledger yet."""
    if store is not None:
        return site_policy(home, store)
    asked = home.signed_policy((home.root / "request.json").read_bytes())
    return strictest(strictest(home.policy(), asked), home.federation_policy())


def _folded(home: SiteDirectory, heed: Heed) -> Store:
    return read_store(open_read_only(home.root / "ledger.db"), origin(home.settings().site), home.sign_key(), heed)


def _compared(home: SiteDirectory, notes: SiteDatabase, store: Store, heed: Heed) -> Store:
    """The store, or a fresh fold where a `serve` that started meanwhile has told the vault of newer entries.

    Raises:
        SiteConfigError: the vault remembers more, or others.
    """
    try:
        check_history(notes, store)
    except SiteConfigError:
        store.close()
        store = _folded(home, heed)
        try:
            check_history(notes, store)
        except SiteConfigError:
            store.close()
            raise
    return store


def _seen(home: SiteDirectory, notes: SiteDatabase) -> CheckResult:
    """As :func:`agent.runtime.open_runtime` compares them; the vault is asked first, for `serve` may go on
    meanwhile.
    """
    epoch, nonce, seen = notes.note("head") or [1, "", 0]
    try:
        watch = LedgerWitness(home.root / "watch", home.coordinator_key(), forgetful=True)
    except LedgerForkError as error:
        return failed(_WATCH, str(error), _BACK)
    except (OSError, RecursionError):  # a folder in its place, or what is nested too deep
        return failed(_WATCH, "watch/seen.json cannot be read", _BACK)
    if watch.memory.epoch < epoch or (watch.memory.restored == nonce and watch.seen < seen):
        return failed(
            _WATCH, "watch/ is missing, or older than this vault: nothing is sent until it is restored", _BACK
        )
    if watch.memory.frozen:
        forked = "the coordinator's ledger is not the one that this site saw before: nothing is sent"
        return failed(_WATCH, forked, "show the signed heads in watch/ to both compliance officers")
    if watch.must_present:
        return note(_WATCH, "the coordinator's ledger was restored: `serve` shows it this site's receipts")
    return passed(_WATCH)


def _way_in(home: SiteDirectory) -> Iterator[CheckResult]:
    """The checks of :mod:`agent.cli.administration`, whose disk's is made with the watermark instead."""
    for name, wrong in doctor.ingest_checks(home).items():
        if name != "room on the disk":
            yield failed(name, wrong) if wrong else passed(name)


def run(arguments: argparse.Namespace) -> int:
    """``doctor`` or ``status``: exit 1 when something failed, or is missing."""
    if arguments.command == "status":
        home = SiteDirectory(arguments.home)
        found = status.steps(home, dt.datetime.now(dt.UTC))
        return next_steps.answered(found, next_steps.disk(home.root, status.PARTS), arguments.json)
    with progress() as heed:
        checked = findings(SiteDirectory(arguments.home), dt.datetime.now(dt.UTC), heed)
    return answered(checked, arguments.json)
