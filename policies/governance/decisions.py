"""Decisions of people about a ledger, also after a restore: approvers, limits, lost receipts.

No single person decides anything here: the ledger state counts the roles (:mod:`policies.ledger.state`), and an
auditor counts them again. Every approval is a signed statement; its signature is checked before it is recorded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from policies.accounting.rdp import allowance
from policies.audit.auditor import open_envelope
from policies.governance import amendments
from policies.ledger.approvals import ROLES, RUN_PLAN, refusal
from policies.ledger.entries import (
    Amended,
    Appointed,
    Approved,
    Dismissed,
    InvalidEntryError,
    LimitSet,
    Presented,
    Recovered,
    Requested,
    Waived,
    proposal,
)
from policies.ledger.export import ExportError
from policies.ledger.state import State, waiver
from policies.ledger.store import AppendRequest, Store
from policies.review.policy import Policy
from policies.review.rules import TERMS, price
from policies.statements import (
    HEX,
    ID,
    Amendment,
    Approval,
    Receipts,
    Request,
    Reservation,
    claim_json,
    encode,
    parse,
)
from protos.common.canonical_json import canonical

# What a value is, by what is decided. A person reads it before signing: it has no room for anything else to read.
_ROLE: Final = f"({'|'.join(sorted(ROLES))})"
_VALUES: Final[Mapping[str, re.Pattern[str]]] = MappingProxyType(
    {
        "amend": HEX,
        "appoint": re.compile(f"{_ROLE} {HEX.pattern}"),
        "dismiss": re.compile(_ROLE),
        "enrol": HEX,
        "limit": re.compile(r"[0-9][0-9.e-]{0,23}"),
        "refuse": re.compile(f"{HEX.pattern} {ID.pattern}"),
        "release": HEX,
        "run": HEX,
        "use": HEX,
        "waive": re.compile(r"[1-9][0-9]{0,8}-[A-Za-z0-9_-]{1,64}"),  # the epoch and its nonce
    }
)
_ACCOUNT: Final = re.compile(f"{ID.pattern}/(rdp|k)")


def _digest(envelope: bytes) -> bytes:
    return hashlib.sha256(envelope).digest()


def appoint(store: Store, person: str, role: str, key: bytes, serial: str = "") -> None:
    """Name a person who may approve: the first of each role freely, the others as those in office approve.

    Args:
        store: the ledger.
        person: a short opaque name; who it is stays at the institution.
        role: ``compliance``, ``hospital`` or ``operator``; an operator never approves.
        key: Ed25519 public key, raw.
        serial: of the approved proposal ``appoint``.
    Raises:
        InvalidEntryError: an unknown role, a key or name in use, a name that is none, or not enough approvals.
    """
    if not ID.fullmatch(person):
        raise InvalidEntryError("a person's name is 1 to 64 of a-z, 0-9, - and _")
    store.append(f"appoint-{person}", AppendRequest((Appointed(person, role, key, serial),)))


def dismiss(store: Store, person: str, serial: str = "") -> None:
    """A person leaves office, as persons of both roles approved under ``serial``; never the last of a role.

    Raises:
        InvalidEntryError: nobody of that name is in office, the last of an approving role, or not enough approvals.
    """
    store.append(f"dismiss-{person}", AppendRequest((Dismissed(person, serial),)))


def approve(store: Store, envelope: bytes) -> Approval:
    """Write down a person's sealed approval.

    Raises:
        InvalidEntryError: not signed by an appointed person, for another ledger, by the one who asked, or of no use
        here.
    """
    key = f"approve-{_digest(envelope).hex()}"
    s = _opened(store, envelope, key)
    if not isinstance(s, Approval):
        raise InvalidEntryError("not an approval")
    entry = Approved(s.person, s.serial, proposal(s.serial, s.action, s.subject, s.value), _digest(envelope))
    store.append(key, AppendRequest((entry,), (envelope,)))
    return s


def request(store: Store, envelope: bytes) -> Request:
    """Record a person's request. From then on its serial stands for exactly this request, and others decide on it.

    Raises:
        InvalidEntryError: not signed by an appointed person who may ask, for another ledger, or the serial is in use.
    """
    key = f"request-{_digest(envelope).hex()}"
    s = _opened(store, envelope, key)
    if not isinstance(s, Request):
        raise InvalidEntryError("not a request")
    entry = Requested(s.person, s.serial, proposal(s.serial, s.action, s.subject, s.value), _digest(envelope))
    store.append(key, AppendRequest((entry,), (envelope,)))
    return s


def _opened(store: Store, envelope: bytes, key: str) -> Approval | Request:
    """A person's word, found to be signed by the key that this ledger knows for that person."""
    statement = said_by(envelope)
    person = store.state.persons.get(statement.person)
    if person is None or statement.origin != store.origin:
        raise InvalidEntryError("its signer was not appointed here, or it is for another ledger")
    if not store.answer(key):  # what was written down in a ledger of before has its old answer, whatever its words
        _readable(statement, store.state)
    try:
        open_envelope(envelope, person.public)
    except ExportError:
        raise InvalidEntryError("it is not signed by that person's key") from None
    return statement


def _readable(s: Approval | Request, state: State) -> None:
    """Refuse what others would read on a page and nobody could carry out: prose, marks that turn the writing around.

    Not in the fold: ledgers of before may hold such words, and they do no harm there.

    Raises:
        InvalidEntryError: no such action, or its subject or value is of another form.
    """
    form = _VALUES.get(s.action)
    if form is None:
        raise InvalidEntryError(f"unknown action; use one of {', '.join(sorted(_VALUES))}")
    odd = s.action == "dismiss" and s.subject in state.persons  # whoever an older ledger let in must be able to go
    if not odd and not (_ACCOUNT if s.action == "limit" else ID).fullmatch(s.subject):
        raise InvalidEntryError(
            f"{s.action}: the subject is an account's name, <site>/rdp or <site>/k, or else a short name"
        )
    if not form.fullmatch(s.value):
        now = "; `ledger waive` prints the present one" if s.action == "waive" else ""
        raise InvalidEntryError(f"{s.action}: the value cannot be carried out{now}")
    if s.serial.startswith(plan := refusal(RUN_PLAN)):  # whatever is signed there refuses the plan of that SHA-256
        digest = s.serial.removeprefix(plan)
        if s.action != "refuse" or not digest or not s.value.startswith(digest):
            raise InvalidEntryError("under that serial the plan of its own SHA-256 is refused, and nothing else said")


def statement_bytes(kind: str, fields: Sequence[str]) -> bytes:
    """The canonical bytes that a person signs to ask (``request/v1``) or to approve (``approval/v1``).

    Args:
        kind: one of the two.
        fields: person, origin, serial, action, subject, value.
    Raises:
        InvalidEntryError: a field could not be read back.
    """
    kinds: dict[str, type[Approval | Request]] = {"approval/v1": Approval, "request/v1": Request}
    statement = kinds[kind](*fields)
    try:
        parse(raw := encode(statement))
    except ValueError as error:
        raise InvalidEntryError(f"cannot be signed: {error}") from None
    return raw


def said_by(envelope: bytes) -> Approval | Request:
    """The claimed person and request of a statement; nothing is verified yet.

    Raises:
        InvalidEntryError: not a person's sealed word.
    """
    try:
        statement = parse(open_envelope(envelope, None))
    except ValueError as error:
        raise InvalidEntryError(f"not a signed statement of a person: {error}") from None
    if not isinstance(statement, Approval | Request):
        raise InvalidEntryError("not a signed statement of a person")
    return statement


def must_agree(state: State, serial: str, action: str, subject: str, value: str) -> None:
    """Tell people who is missing, before the fold refuses: every role that is in office must have approved this.

    Raises:
        InvalidEntryError: it names the roles that have not, and what they have to sign.
    """
    missing = state.office() - set(state.approvals(serial, action, subject, value))
    if missing:
        words = f"`ledger sign {action} {subject} {value} --serial {serial or 'SERIAL'}`"
        raise InvalidEntryError(
            f"{action} {subject}: not approved by {' and '.join(sorted(missing))}; to be signed: {words}"
        )
    if state.proposals[serial].used:
        raise InvalidEntryError(
            f"{action} {subject}: the proposal {serial} was used before; approve it under a new serial"
        )


def may_amend(state: State, site: str, signed: Policy, proposed: Policy, text: str) -> None:
    """Check that the site may sign this policy in its own ledger.

    Where no person may approve, no approval is needed, since no one can be asked.

    Raises:
        InvalidEntryError: it loosens something, and not every role in office has approved this very text.
    """
    if amendments.loosened_keys(signed, proposed) and state.office():
        serial = amendments.amendment_serial(text, state.amended.get(site, 0))
        must_agree(state, serial, amendments.ACTION, site, amendments.digest(text))


def limit_value(store: Store, account: str, budget: str) -> tuple[int, str]:
    """What a budget as people state it means for an account.

    Args:
        store: the ledger.
        account: its name.
        budget: epsilon as decimal text, or the number of releases per patient for an account of kind k.
    Returns:
        The limit in the account's own unit, and epsilon as text ("" for kind k).
    Raises:
        InvalidEntryError: no such account, or no such budget.
    """
    known = store.state.accounts.get(account)
    if known is None:
        raise InvalidEntryError(f"unknown account; there are {', '.join(sorted(store.state.accounts)) or 'none yet'}")
    opened = known.opened
    try:
        if not re.fullmatch(r"[0-9]{1,6}" if not opened.order else r"[0-9]{1,3}(\.[0-9]{1,9})?", budget):
            raise ValueError(budget)
        if not opened.order:
            return int(budget), ""
        epsilon = float(budget)
    except ValueError:
        raise InvalidEntryError(
            "a budget is epsilon, such as 4.0, or the number of releases of each patient"
        ) from None
    if not 0 < epsilon <= 100:
        raise InvalidEntryError("epsilon must lie in (0, 100]")
    return allowance(epsilon, float(opened.delta), opened.order), repr(epsilon)


def set_limit(store: Store, account: str, budget: str, serial: str) -> None:
    """Change an account's limit as approved under ``serial``: two roles to raise it, one to lower it.

    A limit above what the site's own policy allows changes nothing: the smaller of both binds (P12).

    Raises:
        InvalidEntryError: no such account or budget, or not enough approvals of exactly this.
    """
    limit, epsilon = limit_value(store, account, budget)
    store.append(f"limit-{serial}", AppendRequest((LimitSet(account, limit, epsilon, serial),)))


def amend(store: Store, key: str, statement: Amendment, envelope: bytes) -> None:
    """A site's new policy, from an envelope that the caller opened with the site's key."""
    policy = hashlib.sha256(statement.policy.encode()).digest()
    entry = Amended(statement.site, statement.number, policy, _digest(envelope))
    store.append(key, AppendRequest((entry,), (envelope,)))


def recover_grant(store: Store, key: str, reservation: Reservation, envelope: bytes) -> bool:
    """After a restore: a grant that the site proves with its own sealed reservation, and that the backup had lost.

    Returns:
        True if it was lost: it is spent now, at its full price. False if the ledger knew it.
    Raises:
        InvalidEntryError: nothing is awaited from that site, or it has no account for such a claim.
    """
    r = reservation
    with store.exclusive() as state:
        known = state.grants.get(r.grant)
        if known is not None:
            if (known.reserved.site, known.reserved.envelope) != (r.site, _digest(envelope)):
                raise InvalidEntryError("a grant of that name is another one")
            return False
        name = f"{r.site}/{TERMS[r.mechanism].kind}" if r.mechanism in TERMS else ""
        account = state.accounts.get(name)
        if account is None:
            raise InvalidEntryError("the site has no account for such a claim")
        amount, claim = price(r.claim, account), canonical(claim_json(r.claim))
        entry = Recovered(r.grant, r.site, r.run, r.mechanism, name, amount, claim, _digest(envelope))
        store.append(key, AppendRequest((entry,), (envelope,)))
    return True


def present(store: Store, key: str, statement: Receipts, envelope: bytes) -> None:
    """After a restore: the site says that it has shown every receipt it holds.

    Raises:
        InvalidEntryError: nothing is awaited from that site after that restore, the statement is for another ledger,
            or another number of grants was recovered.
    """
    s = statement
    if s.origin != store.origin:
        raise InvalidEntryError("the receipts are for another ledger")
    entry = Presented(s.site, s.nonce, s.grants, _digest(envelope))
    store.append(key, AppendRequest((entry,), (envelope,)))


def waive(store: Store, site: str, serial: str) -> None:
    """After a restore: a site that will not come back, as two persons approved; its accounts are spent whole.

    They sign which restore it is, by its nonce: after another one of the same backup their words are of no use.

    Raises:
        InvalidEntryError: nothing is awaited from it, or not enough approvals; it tells what is to be signed.
    """
    with store.exclusive() as state:
        if site in state.sites_awaited:
            must_agree(state, serial, "waive", site, waiver(state.epoch, state.nonce))
        store.append(f"waive-{state.epoch}-{site}", AppendRequest((Waived(site, serial),)))
