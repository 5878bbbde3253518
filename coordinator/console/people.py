"""People and keys: roles, requests and approvals, pending enrolments, valid keys.

A page forwards signed statements and shows the resulting ledger state. Requesters never approve their own requests,
and nothing is carried out before all roles have approved it, whatever a page offers: see
:mod:`policies.ledger.approvals`.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from starlette.responses import Response

from coordinator.console import invitations
from coordinator.console.context import COMPLIANCE, HOSPITAL, OPERATOR, READERS, CoordinatorConsoleContext
from coordinator.console.invitations import refusing
from coordinator.console.keys import keys_of, sites_of
from coordinator.console.proposals import (
    ACTIONS,
    ROLES,
    ProposalView,
    persons_of,
    proposal_of,
    proposals_of,
    requestable_kinds,
    words,
)
from policies.governance import decisions
from policies.ledger.approvals import APPROVING, ASKING
from policies.ledger.entries import InvalidEntryError
from policies.ledger.state import waiver
from policies.statements import ID
from protos.web.router import PageError, RequestContext, Router

APPROVERS: Final = frozenset({COMPLIANCE, HOSPITAL})
DOERS: Final = frozenset({OPERATOR, COMPLIANCE, HOSPITAL})  # what was approved may be carried out by any of these
MOST_OPEN: Final = 100  # open proposals that are shown
MOST_DONE: Final = 20  # closed proposals that are shown


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """The pages."""
    pages.menu("People and keys", "/people", READERS)
    invitations.add(pages, context)
    _look(pages, context)
    _ask(pages, context)
    _decide(pages, context)


def _look(pages: Router, context: CoordinatorConsoleContext) -> None:
    """Who is who, and how each proposal stands."""

    @pages.get("/people", READERS)
    def people(asked: RequestContext) -> Response:
        pinned = frozenset(
            path.stem for path in (context.home.root / "logins").glob("*.crt")
        )  # who may log in by one
        with context.store.exclusive() as state:
            persons = persons_of(state, pinned)
            proposals = proposals_of(state, context.store.envelope, asked.person.name, (MOST_OPEN, MOST_DONE))
            office = sorted(state.office())
        return asked.page(
            "people.html",
            persons=persons,
            roles=ROLES,
            office=office,
            lacking=sorted(APPROVING - set(office)),
            waiting=proposals.waiting,
            more=proposals.more,
            done=proposals.done,
            enrolments=context.authority.enrolments(),
            sites=sites_of(context.store, context.now()),
            keys=keys_of(context.home, context.store),
            actions={name: ACTIONS[name] for name in requestable_kinds(asked.person.role)},
        )

    @pages.get("/people/proposals/{serial}", READERS)
    def proposal(asked: RequestContext, serial: str) -> Response:
        found = _proposal(context, asked, serial)
        words_of = (context.store.origin, found.serial, found.action, found.subject, found.value)
        return asked.page(
            "proposal.html",
            proposal=found,
            signing=asked.signing(*words_of) if found.may_approve else None,
            pending=_pending(context, found),
            doers=DOERS,
        )


def _ask(pages: Router, context: CoordinatorConsoleContext) -> None:
    """A person asks for something, by a signature of their own."""

    @pages.get("/ask/{action}", ASKING)
    def ask(asked: RequestContext, action: str, subject: str = "") -> Response:
        return _ask_form(asked, context, action, {"subject": subject})

    @pages.post("/ask/{action}", ASKING)
    def draft(asked: RequestContext, action: str) -> Response:
        values = {name: asked.form[name].strip() for name in asked.form if name != "csrf"}
        try:
            subject, value = _words_of(context, action, values)
        except InvalidEntryError as fault:
            return _ask_form(asked, context, action, values, str(fault))
        if action == "appoint" and _first(context, value.partition(" ")[0]):
            return asked.page("first.html", subject=subject, value=value, role=value.partition(" ")[0])
        with context.store.exclusive() as state:
            said = words(action, subject, value, state)
        serial = f"{action}-{secrets.token_hex(4)}"
        signing = asked.requesting(context.store.origin, serial, action, subject, value)
        return asked.page("sign_request.html", signing=signing, words=said, heading=ACTIONS[action])

    @pages.post("/people/requests", ASKING)
    def requests(asked: RequestContext) -> Response:
        envelope = asked.envelope()
        said = refusing(lambda: decisions.said_by(envelope))
        _own(asked, said.person)
        refusing(lambda: decisions.request(context.store, envelope))
        context.log.info("requested", state=asked.person.role, rule=said.action)
        return asked.go(f"/people/proposals/{said.serial}", "The request is in the ledger. Other persons decide now.")

    @pages.post("/people/first", {OPERATOR})
    def first(asked: RequestContext) -> Response:
        name, (role, _, key) = asked.form["subject"], asked.form["value"].partition(" ")
        if not _first(context, role):
            raise PageError(409, "That role is already assigned: make a request, and let others approve.")
        # nobody approves a name that is none
        refusing(lambda: _appointing(context, name, {"role": role, "key": key}))
        refusing(lambda: decisions.appoint(context.store, name, role, _raw(key)))
        context.log.warning("appointed_first", state=role)
        return asked.go("/people", f"{name} is the first {role}; this is recorded in the ledger.")


def _decide(pages: Router, context: CoordinatorConsoleContext) -> None:
    """Others approve, and what is approved is carried out."""

    @pages.post("/people/proposals/{serial}/approve", APPROVERS)
    def approve(asked: RequestContext, serial: str) -> Response:
        envelope = asked.envelope()
        said = refusing(lambda: decisions.said_by(envelope))
        _own(asked, said.person)
        if said.serial != serial:
            raise PageError(409, "That approval is for another proposal. Nothing was written.")
        refusing(lambda: decisions.approve(context.store, envelope))
        context.log.info("approved", state=asked.person.role, rule=said.action)
        return asked.go(f"/people/proposals/{serial}", "Your approval is in the ledger.")

    @pages.post("/people/approvals", {OPERATOR})
    def hand_in(asked: RequestContext) -> Response:
        """Approvals that persons signed elsewhere, brought by whoever runs the ledger; the signature counts alone."""
        envelope = asked.envelope("approval")
        said = refusing(lambda: decisions.approve(context.store, envelope))
        context.log.info("approved", state="handed in", rule=said.action)
        return asked.go(f"/people/proposals/{said.serial}", f"The approval of {said.person} is in the ledger.")

    @pages.post("/people/proposals/{serial}/do", DOERS)
    def carry_out(asked: RequestContext, serial: str) -> Response:
        found = _proposal(context, asked, serial)
        if found.done:
            raise PageError(409, "It is done already. A proposal ID is used once.")
        act = _ACTS.get(found.action)
        if act is None:
            raise PageError(409, "This page cannot carry that out.")
        refusing(lambda: act(context, found))
        context.log.info("carried_out", state=asked.person.role, rule=found.action)
        return asked.go(f"/people/proposals/{serial}", "Done, and recorded in the ledger.")


def _do_appoint(context: CoordinatorConsoleContext, p: ProposalView) -> None:
    role, _, key = p.value.partition(" ")
    decisions.appoint(context.store, p.subject, role, _raw(key), p.serial)


def _do_enrol(context: CoordinatorConsoleContext, p: ProposalView) -> None:
    context.authority.enrol(p.subject, p.serial, ())
    context.runs.register_node(p.subject)


_ACTS: Final[Mapping[str, Callable[[CoordinatorConsoleContext, ProposalView], None]]] = {
    "limit": lambda context, p: decisions.set_limit(context.store, p.subject, p.value, p.serial),
    "appoint": _do_appoint,
    "dismiss": lambda context, p: decisions.dismiss(context.store, p.subject, p.serial),
    "waive": lambda context, p: decisions.waive(context.store, p.subject, p.serial),
    "enrol": _do_enrol,
}


def _own(asked: RequestContext, person: str) -> None:
    """A signature is handed in by the one who made it.

    Raises:
        PageError: it is somebody else's.
    """
    if person != asked.person.name:
        raise PageError(403, "The signature is of another person than the one who is logged in. Nothing was written.")


def _proposal(context: CoordinatorConsoleContext, asked: RequestContext, serial: str) -> ProposalView:
    with context.store.exclusive() as state:
        named = ID.fullmatch(serial) is not None
        found = proposal_of(state, context.store.envelope, asked.person.name, serial) if named else None
    if found is None:
        raise PageError(404, "There is no proposal with that ID.")
    return found


def _pending(context: CoordinatorConsoleContext, p: ProposalView) -> str:
    """The fingerprint of the request that an enrolment is about, to be compared; "": it waits no more."""
    if p.action != "enrol":
        return ""
    found = [e for e in context.authority.enrolments() if (e.site, e.digest) == (p.subject, p.value)]
    return found[0].fingerprint if found else ""


def _raw(key: str) -> bytes:
    """A public key of 32 bytes from hexadecimal, or from what `ledger person` printed.

    Raises:
        InvalidEntryError: it is neither.
    """
    for read in (bytes.fromhex, lambda text: base64.b64decode(text, validate=True)):
        try:
            raw = read(key)
        except (ValueError, binascii.Error):
            continue
        if len(raw) == 32:
            return raw
    raise InvalidEntryError("the key is what `ledger person` printed: 44 characters, in base64")


def _first(context: CoordinatorConsoleContext, role: str) -> bool:
    """Whether nobody approves this appointment, as the role or every office is empty."""
    office = context.store.state.office()
    return not office or role in APPROVING - office


def _words_of(context: CoordinatorConsoleContext, action: str, values: Mapping[str, str]) -> tuple[str, str]:
    """Subject and value as they are signed, from what a person typed.

    Raises:
        InvalidEntryError: it cannot be asked for; the text says why.
    """
    subject, state = values.get("subject", ""), context.store.state
    if action == "limit":
        limit, epsilon = decisions.limit_value(context.store, subject, values.get("budget", ""))
        return subject, epsilon or str(limit)
    if action == "appoint":
        return subject, _appointing(context, subject, values)
    if action == "dismiss":
        person = state.active_person(subject)
        if person is None:
            raise InvalidEntryError("no active person has that name")
        return subject, person.role
    if action == "enrol":
        waiting = {e.site: e.digest for e in context.authority.enrolments() if e.state == "waiting"}
        if subject not in waiting:
            raise InvalidEntryError("no request of that hospital is pending")
        return subject, waiting[subject]
    if subject not in state.sites_awaited:
        raise InvalidEntryError("no receipts are awaited from that hospital")
    return subject, waiver(state.epoch, state.nonce)


def _appointing(context: CoordinatorConsoleContext, subject: str, values: Mapping[str, str]) -> str:
    role, raw = values.get("role", ""), _raw(values.get("key", ""))
    if not ID.fullmatch(subject):
        raise InvalidEntryError("a person's name is short and opaque: 1 to 64 of a-z, 0-9, - and _")
    if role not in ROLES:
        raise InvalidEntryError(f"the role is one of {', '.join(ROLES)}")
    if subject in context.store.state.persons:
        raise InvalidEntryError("a person of that name was appointed before, and a name is never used again")
    return f"{role} {raw.hex()}"


def _ask_form(
    asked: RequestContext,
    context: CoordinatorConsoleContext,
    action: str,
    values: Mapping[str, str],
    problem: str = "",
) -> Response:
    if action not in ACTIONS:
        raise PageError(404, "That cannot be asked for.")
    with context.store.exclusive() as state:
        accounts = sorted(state.accounts)
        persons = sorted(name for name in state.persons if name not in state.dismissed)
        waiting = sorted(state.sites_awaited)
    sites = sorted(e.site for e in context.authority.enrolments() if e.state == "waiting")
    offered = {"limit": accounts, "dismiss": persons, "enrol": sites, "waive": waiting}.get(action, [])
    blank = {"subject": "", "budget": "", "role": "", "key": ""}
    return (asked.again if problem else asked.page)(
        "ask.html",
        action=action,
        heading=ACTIONS[action],
        values={**blank, **values},
        offered=offered,
        roles=ROLES,
        problem=problem,
    )
