"""A ledger as people and scripts read it: plain values for ``--json``, rows for a table. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from policies.accounting.claims import RELATION, UNIT
from policies.accounting.rounding import epsilon_text, format_rounded_up
from policies.ledger import entries
from policies.ledger.entries import Entry, Expired, Freed, Record, Spent, kind_of
from policies.ledger.state import State
from policies.statements import load_json
from protos.common.text import count, utc


def entry_json(seq: int, record: Record) -> dict[str, Any]:
    """One entry with everything in it, as JSON values."""
    out = {"seq": seq, "at": record.at, "key": record.key, "type": kind_of(record.entry)}
    for f in fields(record.entry):
        value = getattr(record.entry, f.name)
        if f.name == "claim":
            value = load_json(value)
        out[f.name] = value.hex() if isinstance(value, bytes) else value
    return out


def accounts_json(state: State) -> list[dict[str, Any]]:
    """Each account as it is now, as JSON values."""
    return [
        {
            "account": name,
            "site": name.rpartition("/")[0],
            "kind": name.rpartition("/")[2],
            "limit": a.limit,
            "held": a.held,
            "spent": a.spent,
            "order": a.opened.order,
            "epsilon": a.epsilon or None,
            "delta": a.opened.delta or None,
        }
        for name, a in sorted(state.accounts.items())
    ]


def as_json(origin: str, records: Sequence[Record]) -> dict[str, Any]:
    """Everything in a ledger, as JSON values; the balances are folded from the records.

    Raises:
        InvalidEntryError: the records do not fold.
    """
    state = State()
    for record in records:
        state.apply(record)
    issued = Counter(certificate.site for certificate in state.issued.values())
    revoked = Counter(state.issued[number].site for number in state.revoked)
    return {
        "origin": origin,
        "size": state.size,
        "unit": UNIT,
        "relation": RELATION,
        "sites": [
            {
                "site": name,
                "serial": known.serial or None,
                "approved": sorted(state.approvals(known.serial, "enrol", name, known.envelope.hex())),
                "revoked": name in state.revoked_sites,
                "certificates_issued": issued[name],
                "certificates_revoked": revoked[name],
            }
            for name, known in sorted(state.sites.items())
        ],
        "accounts": accounts_json(state),
        "grants": [
            {
                "grant": name,
                "site": g.reserved.site,
                "run": g.reserved.run,
                "mechanism": g.reserved.mechanism,
                "account": g.reserved.account,
                "amount": g.reserved.amount,
                "used": g.used,
                "state": g.state,
            }
            for name, g in state.grants.items()
        ],
        "entries": [entry_json(seq, record) for seq, record in enumerate(records)],
    }


def percent_up(part: int, whole: int) -> float:
    """A share in percent with one digit, rounded up: a little is never nothing. In whole numbers, so exactly."""
    return -(-1000 * part // whole) / 10


def price(amount: int, account: str, state: State) -> str:
    """An amount as people can weigh it: a share of the budget, or releases per patient."""
    known = state.accounts.get(account)
    if known is None or not known.limit:
        return f"{amount} of a budget of nothing"
    if not known.opened.order:
        return f"{count(amount, 'release')} per {UNIT}"
    return f"{percent_up(amount, known.limit):g} % of the epsilon budget"


def whose(entry: Entry, state: State) -> str:
    """Whose entry it is: a site's, the site's of a grant or an account, a person's, or those of a run's round."""
    grant = state.grants.get(getattr(entry, "grant", ""))
    site = getattr(entry, "site", "") or (grant.reserved.site if grant else "")
    site = site or getattr(entry, "account", "").rpartition("/")[0] or getattr(entry, "person", "")
    return site or ", ".join(getattr(entry, "sites", ()))


def words(entry: Entry, state: State) -> str:  # noqa: C901, PLR0911, PLR0912 - a case for each kind
    """What an entry says, in a sentence, for the consoles, the reports and the command line alike."""
    match entry:
        case entries.Enrolled():
            return f"signing key {_short(entry.sign_key)}, own policy {_short(entry.policy)}{_approved(entry)}"
        case entries.Issued():
            return f"certificate {entry.number} until {utc(entry.not_after)}"
        case entries.Revoked():
            return f"{f'certificate {entry.number}' if entry.number else 'the site, every certificate'}: {entry.why}"
        case entries.Amended():
            return f"own policy {_short(entry.policy)}"
        case entries.Opened() if entry.order:
            where = f"delta {format_rounded_up(entry.delta)} per {UNIT}, order {entry.order}"
            return f"epsilon {epsilon_text(entry.epsilon)} at {where}"
        case entries.Opened():
            return f"{count(entry.limit, 'release')} without an epsilon per {UNIT}, ever"
        case entries.Appointed():
            return f"{entry.person} is {entry.role}, key {_short(entry.public)}{_approved(entry)}"
        case entries.Dismissed():
            return f"{entry.person} is no longer active{_approved(entry)}"
        case entries.Requested():
            return f"{entry.person} asks for {entry.serial}"
        case entries.Approved():
            return f"{entry.person} approves {entry.serial}"
        case entries.LimitSet():
            limit = f"epsilon {epsilon_text(entry.epsilon)}" if entry.epsilon else count(entry.limit, "release")
            return f"{entry.account}: {limit} per {UNIT}{_approved(entry)}"
        case entries.Reserved() | entries.Recovered():
            return f"{entry.mechanism}: {price(entry.amount, entry.account, state)}"
        case entries.Refused():
            return f"{entry.mechanism or 'call'} {entry.stage}: {', '.join(entry.findings)}"
        case entries.Sent():
            return f"{entry.mechanism}: artifact {_short(entry.artifact)}"
        case entries.Admitted():
            where = f", run {entry.run}, round {entry.round}" if entry.run else ""
            read = f", encrypted to {entry.reader[:12]}, content unseen" if entry.reader else ""
            return f"{entry.mechanism}{where}: level {entry.level}, artifact {_short(entry.artifact)}{read}"
        case Spent() | Expired() | Freed():
            return _end(entry, state)
        case entries.RoundClosed():
            return f"{entry.run}, round {entry.round}: model {_short(entry.model)}"
        case entries.Restored():
            return f"epoch {entry.epoch}, from a backup of {count(entry.size, 'entry', 'entries')}"
        case entries.Presented():
            return f"every receipt presented, {count(entry.grants, 'lost grant')} shown"
        case entries.Waived():
            return f"will not come back{_approved(entry)}; its budgets are spent"


def _short(raw: bytes) -> str:
    return raw.hex()[:12]


def _approved(entry: Any) -> str:
    return f", approved as {entry.serial}" if entry.serial else ""


def _end(entry: Spent | Expired | Freed, state: State) -> str:
    """How a grant ended: what of it is gone, and what came back."""
    grant = state.grants.get(entry.grant)
    if grant is None:  # shown without the ledger that holds it
        return entry.why
    held = grant.reserved
    used = entry.used if isinstance(entry, Spent) else held.amount if isinstance(entry, Expired) else 0
    back = "" if used == held.amount else f"; {price(held.amount - used, held.account, state)} came back"
    gone = f"{price(used, held.account, state)} is spent" if used else "nothing is spent"
    return f"{held.mechanism}: {gone}{back}, {entry.why}"


def rows(records: Sequence[Record]) -> list[tuple[str, str, str, str, str]]:
    """One row a record: number, time (UTC), kind, whose it is, what it says."""
    state, out = State(), []
    for seq, record in enumerate(records):
        state.apply(record)
        entry = record.entry
        out.append((str(seq), utc(record.at), kind_of(entry), whose(entry, state), words(entry, state)))
    return out
