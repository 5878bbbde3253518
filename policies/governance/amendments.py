"""Approvals of a site's new policy before it is signed: each approving role in office agrees to what it loosens.

Tightening needs no approval. Where no person may approve, loosening needs none either, since no one can be asked;
appoint persons before anything else.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Final

from policies.ledger.state import State
from policies.review.policy import Policy, strictest

ACTION: Final = "amend"  # what persons sign: amend SITE SHA-256


def loosened_keys(signed: Policy, proposed: Policy) -> tuple[str, ...]:
    """The keys in which a proposal admits anything that the signed policy does not."""
    both = strictest(signed, proposed)
    return tuple(
        f.name for f in fields(Policy) if f.name != "name" and getattr(both, f.name) != getattr(proposed, f.name)
    )


def digest(text: str) -> str:
    """What persons sign: the SHA-256 of the very text."""
    return hashlib.sha256(text.encode()).hexdigest()


def amendment_serial(text: str, number: int) -> str:
    """Of the proposal: the text's, and the amendment's that it would be the successor of."""
    return f"amend-{number}-{digest(text)[:16]}"


def unapproved_keys(
    state: State, site: str, after: int, signed: Policy, proposed: Policy, text: str
) -> tuple[str, ...]:
    """Of an amendment that was signed: the keys that it loosened although not every role in office had approved it.

    ``after``: the number of the amendment before it; 0: there was none.
    """
    given = state.approvals(amendment_serial(text, after), ACTION, site, digest(text))
    return loosened_keys(signed, proposed) if state.office() - set(given) else ()
