"""A ledger as people and scripts read it: plain values for ``--json``, rows for a table. Pure."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from policies.accounting.claims import RELATION, UNIT
from policies.accounting.rounding import epsilon_text
from policies.ledger.entries import (
    Admitted,
    Amended,
    Appointed,
    Approved,
    Dismissed,
    Enrolled,
    Entry,
    Expired,
    Freed,
    Issued,
    LimitSet,
    Opened,
    Presented,
    Record,
    Recovered,
    Refused,
    Requested,
    Reserved,
    Restored,
    Revoked,
    RoundClosed,
    Sent,
    Spent,
    Waived,
    kind_of,
)
from policies.ledger.state import State
from policies.statements import load_json


def _plain(entry: Entry) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in fields(entry):
        value = getattr(entry, f.name)
        if f.name == "claim":
            value = load_json(value)
        out[f.name] = value.hex() if isinstance(value, bytes) else value
    return out


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
        "accounts": [
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
        ],
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
        "entries": [
            {"seq": seq, "at": r.at, "key": r.key, "type": kind_of(r.entry), **_plain(r.entry)}
            for seq, r in enumerate(records)
        ],
    }


def _opened(entry: Opened) -> str:
    if entry.order:
        return f"epsilon {epsilon_text(entry.epsilon)} at delta {entry.delta}, order {entry.order}"
    return f"{entry.limit} release(s) without an epsilon for each patient"


def _details(entry: Entry, state: State) -> str:  # noqa: PLR0911 - one line for each kind
    if isinstance(entry, Enrolled):
        by = f", approved as {entry.serial}" if entry.serial else ""
        return f"key {entry.sign_key.hex()[:12]}, policy {entry.policy.hex()[:12]}{by}"
    if isinstance(entry, Opened):
        return _opened(entry)
    if isinstance(entry, Reserved):
        return f"{entry.mechanism}: {_share(entry.amount, entry.account, state)} of {entry.account} held"
    if isinstance(entry, Refused):
        return f"{entry.stage}: {', '.join(entry.findings)}"
    if isinstance(entry, Admitted):
        where = f" round {entry.round}" if entry.run else ""
        read = f", encrypted to {entry.reader[:12]}" if entry.reader else ""
        return f"{entry.mechanism}{where}: level {entry.level}, artifact {entry.artifact.hex()[:12]}{read}"
    if isinstance(entry, Sent):
        return f"{entry.mechanism}: about to leave, artifact {entry.artifact.hex()[:12]}"
    if isinstance(entry, RoundClosed):
        return f"round {entry.round} of {', '.join(entry.sites)}, model {entry.model.hex()[:12]}"
    if isinstance(entry, Spent | Expired | Freed):
        grant, used = state.grants[entry.grant].reserved, getattr(entry, "used", 0)
        taken = _share(used or grant.amount, grant.account, state)
        return f"{grant.mechanism}: {taken} of {grant.account}, {entry.why}"
    return _rare(entry, state)


_Personal = Appointed | Dismissed | Requested | Approved | LimitSet
_Rare = Issued | Revoked | Amended | _Personal | Restored | Recovered | Presented | Waived


def _certified(entry: Issued | Revoked) -> str:
    """What became of a certificate."""
    if isinstance(entry, Issued):
        return f"certificate {entry.number} until {_utc(entry.not_after)}"
    return f"certificate {entry.number}: {entry.why}" if entry.number else f"the site, every certificate: {entry.why}"


def _utc(at: int) -> str:
    try:
        return dt.datetime.fromtimestamp(at, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "no time"


def _personal(entry: _Personal) -> str:
    """What persons are, ask for, approve and set."""
    if isinstance(entry, Appointed):
        return f"{entry.person} is {entry.role}, key {entry.public.hex()[:12]}"
    if isinstance(entry, Approved):
        return f"{entry.person} approves {entry.serial}"
    if isinstance(entry, Requested):
        return f"{entry.person} asks for {entry.serial}"
    if isinstance(entry, Dismissed):
        return f"{entry.person} is no longer in office"
    limit = f"{entry.limit} release(s) for each patient"
    if entry.epsilon:
        limit = f"epsilon {epsilon_text(entry.epsilon)}"
    return f"{entry.account}: {limit}, approved as {entry.serial}"


def _rare(entry: _Rare, state: State) -> str:
    """What persons did, what became of certificates, and what follows a restore."""
    if isinstance(entry, Issued | Revoked):
        return _certified(entry)
    if isinstance(entry, Amended):
        return f"policy {entry.policy.hex()[:12]}"
    if isinstance(entry, _Personal):
        return _personal(entry)
    if isinstance(entry, Restored):
        return f"epoch {entry.epoch}: from a backup of {entry.size} entries"
    if isinstance(entry, Recovered):
        return f"{entry.mechanism}: {_share(entry.amount, entry.account, state)} of {entry.account}, was lost"
    if isinstance(entry, Presented):
        return f"every receipt presented, {entry.grants} lost"
    return f"will not come back, approved as {entry.serial}: its accounts are spent"


def _share(amount: int, account: str, state: State) -> str:
    limit = state.accounts[account].limit
    return f"{100 * amount / limit:.1f} %" if limit else "all"


def rows(records: Sequence[Record]) -> list[tuple[str, str, str, str, str]]:
    """One row a record: number, time (UTC), kind, site or run, what it says."""
    state, out = State(), []
    for seq, record in enumerate(records):
        state.apply(record)
        entry = record.entry
        when = _utc(record.at)
        who = getattr(entry, "site", "") or getattr(entry, "run", "")
        if not who and hasattr(entry, "grant"):
            who = state.grants[entry.grant].reserved.site
        if isinstance(entry, Opened | LimitSet):
            who = entry.account.rpartition("/")[0]
        out.append((str(seq), when, kind_of(entry), who, _details(entry, state)))
    return out
