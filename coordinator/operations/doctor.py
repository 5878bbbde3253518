"""``lazaret-coordinator doctor``: the directory, its keys and certificates, the ledger, the port, the machine."""

from __future__ import annotations

import argparse
import datetime as dt
import errno
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from coordinator.errors import CoordinatorConfigError
from coordinator.explanations import count
from coordinator.operations import backup
from coordinator.storage.directory import ORIGIN, CoordinatorDirectory, look_at_ledger, unmarked
from coordinator.storage.ledger_evidence import collect, hold_against
from coordinator.storage.site_heads import SiteHeads
from coordinator.storage.uploads import KEEP_FREE
from policies.audit.auditor import clock_warning
from policies.ledger.backends.schema_version import FORM, SchemaVersionError
from policies.ledger.read_only import Heed, read_store
from policies.ledger.store import LedgerTurnedBackError, LedgerUnsoundError, MarkUnknownError
from policies.review.policy import PolicyError
from protos.identity.certificates import CertificateError, days_left, end_of
from protos.identity.key_files import KeyFileError
from protos.operations import machine_checks
from protos.operations.checks import (
    CheckResult,
    answered,
    examine,
    failed,
    healthy,
    note,
    of_days,
    passed,
    progress,
    works,
)
from protos.operations.confinement import AVAILABLE
from protos.operations.event_log import LogConfigError
from protos.operations.network_checks import Endpoint, is_open, resolves, split_address, tls_is_direct
from protos.web.console_checks import service
from protos.web.settings import ConsoleConfigError

EXPECTED: Final = (
    CertificateError,
    ConsoleConfigError,
    CoordinatorConfigError,
    KeyFileError,
    LogConfigError,
    LedgerUnsoundError,
    PolicyError,
    SchemaVersionError,
)
_DESCRIPTORS: Final = 4096
_ROOT_DAYS, _CA_DAYS = 365.0, 30.0
_WHOLE: Final = "the ledger holds what it acknowledged"
_TIMES: Final = "no entry is of the future"
_GO_ON: Final = "no site's own ledger went back"
_RECEIPTS: Final = "nothing is awaited after a restore"
_MOST_NAMED: Final = 20
Checks = list[tuple[str, Callable[[], Iterator[CheckResult]]]]


def _keys(home: CoordinatorDirectory) -> Iterator[CheckResult]:
    home.ledger_key()
    home.ca()
    home.tls()
    yield passed("keys are private")
    yield from machine_checks.private(home.root, ("ledger.db", "coordinator.log"))
    here = [path for path in (home.root / "offline" / "root.key", home.keys / "root.key") if path.exists()]
    if here:
        said = "it is on this machine: an intruder could act as anybody in the federation"
        yield failed("the root's key is away", said, "move offline/ to a medium that is locked away")
    else:
        yield passed("the root's key is away")


def _certificates(home: CoordinatorDirectory, now: dt.datetime) -> Iterator[CheckResult]:
    """Root and intermediate are the operator's business; the service renews its own, also at its start."""
    again = "`renew-ca FOLDER`, with the root's medium at hand"
    for which, soon, fix in (
        ("root", _ROOT_DAYS, "plan a new federation root: every site must enrol again"),
        ("intermediate", _CA_DAYS, again),
        ("tls", 0.0, ""),
    ):
        end = end_of(home.keys / f"{which}.crt")
        left = days_left(end, now) if end is not None else float("nan")
        found = of_days(f"the certificate of {which}", left, soon, fix)
        asleep = which == "tls" and end is not None and found.state == "fail"
        yield note(found.name, "it has expired; `serve` makes a new one at its start") if asleep else found


def _compared(home: CoordinatorDirectory, marks: int, heads: int, releases: int) -> CheckResult:
    """What the ledger was held against, of what there is: as passed, only where there is a mark that is no guess."""
    mark = f"the heads of {count(marks, 'other host')}" if home.settings().ledger else "its mark"
    named = (mark, count(heads, "cosigned head"), f"{count(releases, 'release')} in the release store")
    found = [said for said, many in zip(named, (marks, heads, releases), strict=True) if many]
    held = f"compared with {' and '.join(found)}" if found else "compared with nothing"
    doubt = unmarked(home) or ("" if marks else "there is no mark yet: `serve` makes it")
    return note(_WHOLE, f"{held}: {doubt}") if doubt else passed(_WHOLE, held)


def _ledger(home: CoordinatorDirectory, now: dt.datetime, heed: Heed) -> Iterator[CheckResult]:
    """Would `serve` open it? Folded as a start folds it, and nothing is written; also while `serve` holds it."""
    name, where = "the ledger can be read", "PostgreSQL" if home.settings().ledger else "SQLite"
    try:
        evidence = collect(home.witnesses, home.releases)  # first: what is admitted meanwhile is no evidence
        with read_store(look_at_ledger(home), ORIGIN, home.ledger_key(), heed) as store:
            heads, releases = hold_against(store, evidence)
            state, marks = store.state, store.marks
    except LedgerTurnedBackError as error:
        yield failed(
            _WHOLE, str(error), "`serve` refuses it (exit 70): `restore`, or `ledger restore` of what is here"
        )
        return
    except MarkUnknownError as error:
        yield failed(_WHOLE, str(error))
        return
    except LedgerUnsoundError as error:
        yield failed(name, str(error), "restore the coordinator from its newest backup: deploy/docs/restore.md")
        return
    yield passed(name, f"{state.size} entries fold, in {where}")
    yield _compared(home, len(marks), heads, releases)
    yield _sites(home, {name: site.sign_key for name, site in state.sites.items() if name not in state.revoked_sites})
    wrong = clock_warning(state.latest, int(now.timestamp()))
    yield failed(_TIMES, wrong) if wrong else passed(_TIMES)
    awaited = sorted(state.sites_awaited)
    if awaited:
        named = ", ".join(awaited[:_MOST_NAMED]) + (" ..." if len(awaited) > _MOST_NAMED else "")
        said = f"frozen: {count(len(awaited), 'site')} awaited, and nothing is granted until then: {named}"
        fix = "let their agents run, or `ledger waive` one that will not come back: deploy/docs/restore.md"
        yield failed(_RECEIPTS, said, fix)
    elif state.sites_pending_receipts:
        yield note(
            _RECEIPTS,
            f"{count(len(state.sites_pending_receipts), 'site')} frozen alone, until their receipts are shown",
        )
    else:
        yield passed(_RECEIPTS)


def _sites(home: CoordinatorDirectory, keys: Mapping[str, bytes]) -> CheckResult:
    """Has a site shown an older ledger of its own than before? ``keys``: of the sites that may take part."""
    heads = SiteHeads(home.site_heads)
    if behind := heads.behind(keys):
        named = ", ".join(behind[:_MOST_NAMED]) + (" ..." if len(behind) > _MOST_NAMED else "")
        fix = "let them run `lazaret-agent restore`, or restore site-heads/ from a backup: deploy/docs/restore.md"
        return failed(_GO_ON, f"rolled back, or its head cannot be read here; calls are refused from: {named}", fix)
    if awaited := heads.awaited(keys):  # for a moment at each start of an agent; for long of one that is too old
        named = ", ".join(awaited[:_MOST_NAMED]) + (" ..." if len(awaited) > _MOST_NAMED else "")
        return note(
            _GO_ON, f"has shown its head before, but not since it reconnected; calls are refused from: {named}"
        )
    return passed(_GO_ON)


def _forms(home: CoordinatorDirectory) -> Iterator[CheckResult]:
    """Would `serve` open the ledger, or send the operator to `upgrade`? A newer form is told by what reads it."""
    name = "forms of the databases"
    found = backup.form(home) if home.settings().ledger or home.ledger.exists() else 0
    if not found:
        yield note(name, "no ledger yet")
    elif found == FORM:
        yield passed(name, f"ledger: form {found} of {FORM}")
    else:
        fix = "stop `serve`, and run `upgrade`, which makes a backup first"
        yield failed(name, f"ledger: form {found} of {FORM}: `serve` refuses it", fix)


def _port(home: CoordinatorDirectory) -> Iterator[CheckResult]:
    """Could it be listened on? Where it is taken, who is it that answers?"""
    address = home.settings().listen
    host, port = split_address(address)
    name, family = f"port {port}", socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            yield note(name, "nothing listens there: `serve` is not running")
            return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            said = f"cannot listen on {address}: {error.strerror or 'no address of this machine'}"
            yield failed(name, said, "correct listen in coordinator.toml")
            return
    local = f"{'127.0.0.1' if host in ('0.0.0.0', '') else '::1' if host == '::' else host}:{port}"  # noqa: S104 - compared
    for found in tls_is_direct(Endpoint(local, "", home.keys / "root.crt")):
        if found.state == "pass":
            yield passed(name, "this coordinator's own `serve` answers")
        else:
            yield failed(name, f"something else answers: {found.said}", "stop it, or change listen")


def _reached(home: CoordinatorDirectory) -> Iterator[CheckResult]:
    """The way that sites take, as far as it can be gone from here: name, port, and that nothing ends TLS before."""
    settings = home.settings()
    if not settings.address:
        return
    way = Endpoint(settings.address, "", home.keys / "root.crt")
    for check in (resolves, is_open, tls_is_direct):
        for found in check(way):
            name = f"{settings.address}: {found.name}"
            yield CheckResult(name, found.state, found.said, found.fix)


def checks(home: CoordinatorDirectory, now: dt.datetime, heed: Heed) -> Checks:
    """All of them, by name."""
    found: Checks = [
        ("policy.toml", lambda: works("policy.toml", home.policy)),
        ("keys are private", lambda: _keys(home)),
        ("certificates", lambda: _certificates(home, now)),
        ("the ledger can be read", lambda: _ledger(home, now, heed)),
        ("forms of the databases", lambda: _forms(home)),
        ("the port", lambda: _port(home)),
        ("the address for sites", lambda: _reached(home)),
        ("room on the disk", lambda: machine_checks.disk(home.root, KEEP_FREE, "uploads are refused")),
        ("open files", lambda: machine_checks.descriptors(_DESCRIPTORS)),
        ("the clock is kept right", machine_checks.clock),
        ("SQLite", machine_checks.sqlite),
        (machine_checks.CONFINED, lambda: machine_checks.confinement(AVAILABLE)),
        *service(home.root, home.keys, now),
    ]
    return found


def findings(
    home: CoordinatorDirectory, now: dt.datetime, heed: Heed = lambda _done, _all: None
) -> list[CheckResult]:
    """What there is to say at this time, UTC; only that coordinator.toml is not in order where it is not.

    ``heed`` hears how many entries of the ledger are folded, and of how many.
    """
    first = examine([("coordinator.toml", lambda: works("coordinator.toml", home.settings))], EXPECTED)
    return first + (examine(checks(home, now, heed), (*EXPECTED, FileNotFoundError)) if healthy(first) else [])


def doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; exit 1 when something failed."""
    with progress() as heed:
        found = findings(CoordinatorDirectory(arguments.home), dt.datetime.now(dt.UTC), heed)
    return answered(found, arguments.json)
