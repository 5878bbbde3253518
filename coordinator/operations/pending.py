"""What waits for people at the coordinator, with the short numbers that ``status`` shows and other commands take."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from functools import partial
from typing import Final

from coordinator.enrolment.enrolment_requests import Enrolments, SignedRequest
from coordinator.errors import CoordinatorConfigError
from coordinator.storage.directory import ORIGIN, CoordinatorDirectory, look_at_ledger
from policies.governance.pending import Pending, choose, numbered, open_proposals, serial_for
from policies.ledger.approvals import APPROVING
from policies.ledger.read_only import read_store
from policies.ledger.state import State
from policies.ledger.store import Store
from protos.identity.certificates import fingerprint
from protos.operations.short_numbers import numbers

PROGRAM: Final = "lazaret-coordinator"


def waiting(home: CoordinatorDirectory, now: dt.datetime) -> list[Pending]:
    """Everything that waits, also while the coordinator serves; nothing but numbers is written.

    Args:
        home: the coordinator's directory.
        now: UTC, for requests that have ended.
    Raises:
        LedgerUnsoundError, CoordinatorConfigError, KeyFileError: it cannot be looked at; the text says why.
    """
    with read_store(look_at_ledger(home), ORIGIN, home.ledger_key()) as store:
        return of_store(home, store, now)


def of_store(home: CoordinatorDirectory, store: Store, now: dt.datetime) -> list[Pending]:
    """The same, where the ledger is open already."""
    found = [*_requests(home, store.state, now), *open_proposals(store, PROGRAM)]
    return numbered(found, partial(numbers, home.root))


def request_named(home: CoordinatorDirectory, word: str, now: dt.datetime) -> Pending:
    """The request to join that waits: by its short number, or by the name of its site.

    Raises:
        InvalidEntryError: nothing waits under that number, or something else.
        CoordinatorConfigError: no request of that site waits.
    """
    found = waiting(home, now)
    if word.isascii() and word.isdigit():
        return choose(found, word, PROGRAM, "enrol")
    for one in found:
        if (one.action, one.subject) == ("enrol", word):
            return one
    raise CoordinatorConfigError(f"no request of that site waits for approval: `{PROGRAM} status` shows what waits")


def _requests(home: CoordinatorDirectory, state: State, now: dt.datetime) -> Iterator[Pending]:
    """Requests to join, the oldest first."""
    records = Enrolments(home.enrolments).all() if home.enrolments.exists() else []
    asked = [(record.site, record.asked) for record in records if record.asked is not None]
    for site, one in sorted(asked, key=lambda pair: (pair[1].received, pair[0])):
        enrolled = state.sites.get(site)
        in_force = enrolled is not None and enrolled.envelope.hex() == one.digest and site not in state.revoked_sites
        if one.state != "declined" and now < one.ends and not in_force:
            yield _request(state, site, one)


def _request(state: State, site: str, asked: SignedRequest) -> Pending:
    words = "enrol", site, asked.digest
    serial = serial_for(state, words, f"join-{asked.digest[:16]}")
    given = state.approvals(serial, *words)
    missing = tuple(sorted(APPROVING - set(given)))
    details = (
        f"the hospital {site} asks to take part",
        f"approved by: {', '.join(sorted(given)) or 'nobody yet'}; missing: {', '.join(missing) or 'nobody'}",
    )
    return Pending(
        *(*words, serial),
        f"request NUMBER, {site}",
        missing,
        f"{PROGRAM} approve NUMBER",
        details=details,
        fingerprint=fingerprint(asked.envelope),
    )
