"""What people's decisions do to a ledger, as acts with named fields and results of plain values.

A command carries an act out on the ledger that it opened, or asks the running service for it; both run what is here.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from policies.governance import decisions
from policies.ledger.entries import InvalidEntryError
from policies.ledger.store import Store
from policies.statements import Request

Act = Callable[..., dict[str, Any]]  # on a store, with fields
Acts = Callable[..., Any]  # an act's name and its fields -> its result: done here, or by the running service


def appoint(store: Store, person: str, role: str, key: str, serial: str = "") -> dict[str, Any]:
    """See :func:`policies.governance.decisions.appoint`; ``key``: in hexadecimal."""
    try:
        public = bytes.fromhex(key)
    except ValueError:
        raise InvalidEntryError("the public key is not hexadecimal") from None
    decisions.appoint(store, person, role, public, serial)
    return {}


def dismiss(store: Store, person: str, serial: str = "") -> dict[str, Any]:
    """See :func:`policies.governance.decisions.dismiss`."""
    decisions.dismiss(store, person, serial)
    return {}


def propose(store: Store, account: str, budget: str) -> dict[str, Any]:
    """What a budget means for an account, and whether it is more than now. Nothing is written.

    Returns:
        ``limit`` in the account's unit, ``epsilon`` as text ("" for counts of releases), ``more``.
    """
    limit, epsilon = decisions.limit_value(store, account, budget)
    return {"limit": limit, "epsilon": epsilon, "more": limit > store.state.accounts[account].limit}


def limit(store: Store, account: str, budget: str, serial: str) -> dict[str, Any]:
    """See :func:`policies.governance.decisions.set_limit`."""
    decisions.set_limit(store, account, budget, serial)
    return {}


def approve(store: Store, envelope: str) -> dict[str, Any]:
    """Write down a person's sealed approval or request; ``envelope``: in base64.

    Returns:
        What it says: ``person``, ``asks`` (it is a request), ``action``, ``subject``, ``serial``.
    """
    try:
        raw = base64.b64decode(envelope, validate=True)
    except ValueError:
        raise InvalidEntryError("the envelope is not base64") from None
    asks = isinstance(decisions.said_by(raw), Request)
    word = (decisions.request if asks else decisions.approve)(store, raw)
    return {
        "person": word.person,
        "asks": asks,
        "action": word.action,
        "subject": word.subject,
        "serial": word.serial,
    }


ACTS: Final[Mapping[str, Act]] = MappingProxyType(
    {
        "ledger/appoint": appoint,
        "ledger/dismiss": dismiss,
        "ledger/propose": propose,
        "ledger/limit": limit,
        "ledger/approve": approve,
    }
)


def carry_out(store: Store, act: Act, fields: Mapping[str, Any]) -> dict[str, Any]:
    """One act, while nobody else decides anything on this ledger."""
    with store.exclusive():
        return act(store, **fields)
