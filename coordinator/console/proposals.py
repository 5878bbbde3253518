"""Requests and approvals: each proposal in words, the missing roles, and who may do what about it.

The words come from the signed statements, whose digests are in the ledger. Nothing is decided here: the ledger state
counts the roles (:mod:`policies.ledger.approvals`) and refuses whatever a page should not have offered.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from policies.accounting.rounding import format_rounded_up
from policies.governance.pending import missing_roles, words_of
from policies.ledger.approvals import APPROVING, ASKING
from policies.ledger.state import State
from protos.identity.certificates import fingerprint

ACTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "limit": "Change a budget",
        "appoint": "Appoint a person",
        "dismiss": "Dismiss a person",
        "enrol": "Enrol a hospital",
        "waive": "Go on without a hospital after a restore",
    }
)
ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "auditor": "reads everything, refusals too; requests and approves nothing",
        "compliance": "approves, together with the hospital's side",
        "hospital": "approves, together with compliance",
        "operator": "runs the coordinator; makes requests, and carries out approved ones; never approves",
        "researcher": "plans and launches rounds, and makes requests; never approves",
    }
)


@dataclass(frozen=True, slots=True)
class PersonRow:
    """One person of the ledger."""

    name: str
    role: str
    key: str  # base64, as `ledger person` printed it
    fingerprint: str  # to be compared by telephone
    in_office: bool
    login: bool  # whether a certificate to log in with is pinned
    serial: str  # of the proposal that appointed the person; "": the first of the role
    last: bool  # the last of an approving role: never dismissed


@dataclass(frozen=True, slots=True)
class ProposalView:
    """One proposal, as the viewing person may act on it."""

    serial: str
    action: str
    subject: str
    value: str
    title: str
    words: str  # the whole of it in a sentence
    by: str  # who asked; "": it was signed without being asked for here
    role: str  # of who asked
    approved: tuple[tuple[str, str], ...]  # person, role: those that count
    uncounted: tuple[str, ...]  # persons whose approval does not count, as they were dismissed
    missing: tuple[str, ...]  # roles
    done: bool
    may_approve: bool  # the person who looks
    why_not: str  # why the person may not; "" for who never could

    @property
    def ready(self) -> bool:
        """Whether it can be carried out, as far as the page can tell."""
        return not self.done and not self.missing


def persons_of(state: State, pinned: frozenset[str]) -> list[PersonRow]:
    """Everybody whom the ledger ever appointed, those in office first.

    Args:
        state: the fold, under its lock.
        pinned: names with a certificate to log in with.
    """
    out = []
    for name, p in state.persons.items():
        others = {q.role for n, q in state.persons.items() if n not in state.dismissed and n != name}
        out.append(
            PersonRow(
                name,
                p.role,
                base64.b64encode(p.public).decode(),
                fingerprint(p.public),
                name not in state.dismissed,
                name in pinned,
                p.serial,
                p.role in APPROVING - others and name not in state.dismissed,
            )
        )
    return sorted(out, key=lambda row: (not row.in_office, row.role, row.name))


@dataclass(frozen=True, slots=True)
class Listing:
    """The newest proposals, and how many there are beside them."""

    waiting: tuple[ProposalView, ...]
    more: int  # that wait too; anybody who may ask can add to them, and none is withdrawn
    done: tuple[ProposalView, ...]


def proposals_of(state: State, envelope: Callable[[bytes], bytes | None], me: str, most: tuple[int, int]) -> Listing:
    """The proposals, the newest first.

    Args:
        state: the fold, under its lock.
        envelope: the sealed statement of a digest.
        me: who looks.
        most: so many that wait, and so many that are closed.
    """
    serials = list(dict.fromkeys([*state.asked, *state.proposals]))[::-1]
    closed = {serial for serial, kept in state.proposals.items() if kept.used}
    waiting, done = ([s for s in serials if (s in closed) is over] for over in (False, True))
    read = [[proposal_of(state, envelope, me, s) for s in some] for some in (waiting[: most[0]], done[: most[1]])]
    shown = [tuple(p for p in some if p is not None) for some in read]  # those whose words can be read
    return Listing(shown[0], max(0, len(waiting) - most[0]), shown[1])


def proposal_of(state: State, envelope: Callable[[bytes], bytes | None], me: str, serial: str) -> ProposalView | None:
    """One proposal; None if there is none of that serial, or its words cannot be read."""
    said = words_of(state, envelope, serial)
    if said is None:
        return None
    asked, kept = state.asked.get(serial), state.proposals.get(serial)
    agreeing = state.agreeing(serial, said.action, said.subject, said.value)
    approved = tuple((name, state.persons[name].role) for name in agreeing)
    done = kept is not None and kept.used
    given = tuple(kept.approvals) if kept is not None else ()
    missing = () if done else missing_roles(state, said, {role for _, role in approved})
    by = asked.person if asked is not None else ""
    may, why = _may(state, me, by, given, done)
    return ProposalView(
        serial=serial,
        action=said.action,
        subject=said.subject,
        value=said.value,
        title=ACTIONS.get(said.action, said.action),
        words=words(said.action, said.subject, said.value, state),
        by=by,
        role=state.persons[by].role if by else "",
        approved=approved,
        uncounted=tuple(name for name in given if name not in agreeing),
        missing=missing,
        done=done,
        may_approve=may,
        why_not=why,
    )


def _may(state: State, me: str, by: str, given: tuple[str, ...], done: bool) -> tuple[bool, str]:
    """May this person approve it, and if a role could and this person may not: why."""
    person = state.active_person(me)
    if person is None or person.role not in APPROVING or done:
        return False, ""
    if me == by:
        return False, "You requested it, so others decide."
    if me in given:
        return False, "You have approved it."
    return True, ""


def words(action: str, subject: str, value: str, state: State) -> str:
    """What is asked for, in one sentence for a compliance officer."""
    if action == "limit":
        return _limit(subject, value, state)
    if action == "appoint":
        role, _, key = value.partition(" ")
        return f"the person {subject} becomes {role}, with the key {_fingerprint(key)}"
    if action == "dismiss":
        return f"the person {subject}, {value}, leaves: their approvals no longer count"
    if action == "enrol":
        return f"the hospital {subject} takes part, as its signed request {value[:16]}… says"
    if action == "waive":
        gone = f"the hospital {subject} will not come back after the restore of epoch {value}"
        return f"{gone}; all of its budget is spent"
    return f"{action} {subject} {value}"


def _fingerprint(key: str) -> str:
    try:
        return fingerprint(bytes.fromhex(key))
    except ValueError:
        return "that cannot be read"


def _limit(account: str, value: str, state: State) -> str:
    known, site = state.accounts.get(account), account.rpartition("/")[0]
    if known is None:
        return f"the budget of {account}, which is not open, becomes {value}"
    opened = known.opened
    if not opened.order:
        return (
            f"each patient of {site} may be in {value} releases without an epsilon, ever; today it is {known.limit}"
        )
    return (
        f"the lifetime budget of {site} becomes epsilon {value} per patient (add or remove one patient, delta "
        f"{format_rounded_up(opened.delta)}); today it is epsilon {known.epsilon}"
    )


def requestable_kinds(role: str) -> tuple[str, ...]:
    """What a person of this role may ask for."""
    return tuple(ACTIONS) if role in ASKING else ()
