"""``lazaret-coordinator doctor``: the directory, its keys and certificates, the ledger, the port, the machine."""

from __future__ import annotations

import argparse
import datetime as dt
import errno
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from rich.console import Console

from coordinator.edges import backup
from coordinator.edges.home import ORIGIN, BadCoordinator, Home, look_at_ledger
from coordinator.edges.ledger_evidence import collect, hold_against
from coordinator.edges.site_heads import SiteHeads
from coordinator.edges.uploads import KEEP_FREE
from coordinator.wording import count
from policies.forms import FORM, WrongForm
from policies.policy import PolicyError
from policies.reading import Heed, read_store
from policies.store import LedgerTurnedBackError, LedgerUnsound
from protos import machine
from protos.doctor import Finding, as_json, as_lines, examine, failed, healthy, noted, of_days, passed, progress
from protos.expiry import days_left, end_of
from protos.identity import BadCertificate
from protos.journal import BadLog, read_settings
from protos.keyfile import BadKeyFile
from protos.operations.confinement import AVAILABLE
from protos.passage import Way, is_open, parted, resolves, uninspected
from protos.web.examined import console
from protos.web.settings import BadConsole

OUT = Console(highlight=False)
EXPECTED: Final = (
    BadCertificate,
    BadConsole,
    BadCoordinator,
    BadKeyFile,
    BadLog,
    LedgerUnsound,
    PolicyError,
    WrongForm,
)
_DESCRIPTORS: Final = 4096
_ROOT_DAYS, _CA_DAYS = 365.0, 30.0
_WHOLE: Final = "the ledger holds what it acknowledged"
_GO_ON: Final = "no site's own ledger went back"
_RECEIPTS: Final = "nothing is awaited after a restore"
_MOST_NAMED: Final = 20
Checks = list[tuple[str, Callable[[], Iterator[Finding]]]]


def _settings(home: Home) -> Iterator[Finding]:
    home.settings()
    yield passed("coordinator.toml")


def _policy(home: Home) -> Iterator[Finding]:
    home.policy()
    yield passed("policy.toml")


def _keys(home: Home) -> Iterator[Finding]:
    home.ledger_key()
    home.ca()
    home.tls()
    yield passed("keys are private")
    yield from machine.private(home.root, ("ledger.db", "coordinator.log"))
    here = [path for path in (home.root / "offline" / "root.key", home.keys / "root.key") if path.exists()]
    if here:
        said = "it lies here: whoever takes this machine over can be anybody in the federation"
        yield failed("the root's key is away", said, "move offline/ to a medium that is locked away")
    else:
        yield passed("the root's key is away")


def _certificates(home: Home, now: dt.datetime) -> Iterator[Finding]:
    """Root and intermediate are the operator's business; the service renews its own, also at its start."""
    again = "`renew-ca FOLDER`, with the root's medium at hand"
    for which, soon, fix in (
        ("root", _ROOT_DAYS, "plan a new federation root: every site enrols anew"),
        ("intermediate", _CA_DAYS, again),
        ("tls", 0.0, ""),
    ):
        end = end_of(home.keys / f"{which}.crt")
        left = days_left(end, now) if end is not None else float("nan")
        found = of_days(f"the certificate of {which}", left, soon, fix)
        asleep = which == "tls" and end is not None and found.state == "fail"
        yield noted(found.name, "it has ended; `serve` makes a new one at its start") if asleep else found


def _ledger(home: Home, heed: Heed) -> Iterator[Finding]:
    """Would `serve` open it? Folded as a start folds it, and nothing is written; also while `serve` holds it."""
    name, where = "the ledger can be read", "PostgreSQL" if home.settings().ledger else "SQLite"
    try:
        evidence = collect(home.witnesses, home.releases)  # first: what is admitted meanwhile is no evidence
        with read_store(look_at_ledger(home), ORIGIN, home.ledger_key(), heed) as store:
            hold_against(store, evidence)
            state = store.state
    except LedgerTurnedBackError as error:
        yield failed(
            _WHOLE, str(error), "`serve` refuses it (exit 70): `restore`, or `ledger restore` of what is here"
        )
        return
    except LedgerUnsound as error:
        yield failed(name, str(error), "bring the coordinator back from its newest backup: deploy/docs/restore.md")
        return
    yield passed(name, f"{state.size} entries fold, in {where}")
    yield passed(_WHOLE, f"its mark, {count(len(evidence.heads), 'cosigned head')} and the shelf say so")
    awaited = sorted(state.waiting)
    if awaited:
        named = ", ".join(awaited[:_MOST_NAMED]) + (" ..." if len(awaited) > _MOST_NAMED else "")
        said = f"frozen: {count(len(awaited), 'site')} awaited, and nothing is granted before: {named}"
        fix = "let their agents run, or `ledger waive` one that will not come back: deploy/docs/restore.md"
        yield failed(_RECEIPTS, said, fix)
    elif state.late:
        yield noted(_RECEIPTS, f"{count(len(state.late), 'site')} frozen alone, until their receipts are shown")
    else:
        yield passed(_RECEIPTS)


def _sites(home: Home) -> Iterator[Finding]:
    """Has a site shown an older ledger of its own than before?"""
    behind = SiteHeads(home.site_heads).behind()
    if behind:
        named = ", ".join(behind[:_MOST_NAMED]) + (" ..." if len(behind) > _MOST_NAMED else "")
        fix = "have them run `lazaret-agent restore`, or put site-heads/ back from a backup: deploy/docs/restore.md"
        yield failed(_GO_ON, f"turned back, or its head cannot be read here; nothing is taken from: {named}", fix)
    else:
        yield passed(_GO_ON)


def _forms(home: Home) -> Iterator[Finding]:
    """Would `serve` open the ledger, or send the operator to `upgrade`? A newer form is told by what reads it."""
    name = "forms of the databases"
    found = backup.form(home) if home.settings().ledger or home.ledger.exists() else 0
    if not found:
        yield noted(name, "no ledger yet")
    elif found == FORM:
        yield passed(name, f"ledger: form {found} of {FORM}")
    else:
        fix = "stop `serve`, and run `upgrade`, which makes a backup first"
        yield failed(name, f"ledger: form {found} of {FORM}: `serve` refuses it", fix)


def _port(home: Home) -> Iterator[Finding]:
    """Could it be listened on? Where it is taken, who is it that answers?"""
    address = home.settings().listen
    host, port = parted(address)
    name, family = f"port {port}", socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            yield noted(name, "nothing listens there: `serve` does not run")
            return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            said = f"cannot listen on {address}: {error.strerror or 'no address of this machine'}"
            yield failed(name, said, "correct listen in coordinator.toml")
            return
    local = f"{'127.0.0.1' if host in ('0.0.0.0', '') else '::1' if host == '::' else host}:{port}"  # noqa: S104 - compared
    for found in uninspected(Way(local, "", home.keys / "root.crt")):
        if found.state == "pass":
            yield passed(name, "this coordinator's own `serve` answers")
        else:
            yield failed(name, f"something else answers: {found.said}", "stop it, or change listen")


def _reached(home: Home) -> Iterator[Finding]:
    """The way that sites take, as far as it can be gone from here: name, port, and that nothing ends TLS before."""
    settings = home.settings()
    if not settings.address:
        return
    way = Way(settings.address, "", home.keys / "root.crt")
    for check in (resolves, is_open, uninspected):
        for found in check(way):
            name = f"{settings.address}: {found.name}"
            yield Finding(name, found.state, found.said, found.fix)


def _collector(home: Home) -> Iterator[Finding]:
    found = read_settings(home.root).syslog
    if found is None:
        return
    name = "the log's collector answers"
    try:
        found.connected().close()
        yield passed(name, found.to)
    except OSError as error:
        fix = "see to, ca and the firewall; what is logged stays in the file meanwhile"
        yield failed(name, f"{found.to}: {error.strerror or type(error).__name__}", fix)


def checks(home: Home, now: dt.datetime, heed: Heed) -> Checks:
    """All of them, by name."""
    found: Checks = [
        ("policy.toml", lambda: _policy(home)),
        ("keys are private", lambda: _keys(home)),
        ("certificates", lambda: _certificates(home, now)),
        ("the ledger can be read", lambda: _ledger(home, heed)),
        (_GO_ON, lambda: _sites(home)),
        ("forms of the databases", lambda: _forms(home)),
        ("the port", lambda: _port(home)),
        ("the address for sites", lambda: _reached(home)),
        ("room on the disk", lambda: machine.disk(home.root, KEEP_FREE, "uploads are refused")),
        ("open files", lambda: machine.descriptors(_DESCRIPTORS)),
        ("the clock is kept right", machine.clock),
        ("SQLite", machine.sqlite),
        (machine.CONFINED, lambda: machine.confinement(AVAILABLE)),
        ("telemetry is off", machine.telemetry),
        ("console.toml", lambda: console(home.root, home.keys, now)),
        ("the log's collector answers", lambda: _collector(home)),
    ]
    return found


def findings(home: Home, now: dt.datetime, heed: Heed = lambda _done, _all: None) -> list[Finding]:
    """What there is to say at this time, UTC; only that coordinator.toml is not in order where it is not.

    ``heed`` hears how many entries of the ledger are folded, and of how many.
    """
    first = examine([("coordinator.toml", lambda: _settings(home))], EXPECTED)
    return first + (examine(checks(home, now, heed), (*EXPECTED, FileNotFoundError)) if healthy(first) else [])


def doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; exit 1 when something failed."""
    with progress() as heed:
        found = findings(Home(arguments.home), dt.datetime.now(dt.UTC), heed)
    if arguments.json:
        sys.stdout.write(as_json(found) + "\n")
    else:
        for line in as_lines(found):
            OUT.print(line, markup=False, soft_wrap=True)
    return 0 if healthy(found) else 1


def add_command(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """``doctor``, for the coordinator's parser."""
    command = add(commands, "doctor", doctor, "check configuration, keys, certificates, ledger, port and machine")
    command.add_argument("--json", action="store_true")
