"""Check the vault's record of released patients against the site's own ledger (P5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from policies.ledger.state import State
from policies.review.rules import TERMS, Finding

RECORD: Final = "releases"  # the vault's note: every release without an epsilon, and who is behind it
_MOST_NAMED: Final = 5


def unrecorded(record: Iterable[Mapping[str, Any]] | None, state: State) -> tuple[str, ...]:
    """The releases without an epsilon that the ledger holds as sent and the vault does not know.

    Args:
        record: the vault's note :data:`RECORD`.
        state: the site's own ledger.
    Returns:
        Names, sorted. There is one where an older ``vault.db`` lies beside the ledger.
    """
    known = {one["release"] for one in record or ()}
    sent = {name: state.grants[entry.grant].reserved.mechanism for name, entry in state.sent.items()}
    sent |= {name: entry.mechanism for name, entry in state.releases.items()}
    return tuple(sorted(name for name, mechanism in sent.items() if of_patients(mechanism) and name not in known))


def of_patients(mechanism: str) -> bool:
    """Whether the mechanism limits how many of its releases show a patient; True for an unknown mechanism."""
    return mechanism not in TERMS or TERMS[mechanism].kind == "k"


def older_vault(record: Iterable[Mapping[str, Any]] | None, state: State, mechanism: str) -> Iterator[Finding]:
    """The objection to another release without an epsilon: the patients behind earlier ones are unknown."""
    missing = unrecorded(record, state) if of_patients(mechanism) else ()
    if missing:
        yield Finding("older_vault", f"the vault does not know the patients of {named(missing)}: {WHAT_TO_DO}")


WHAT_TO_DO: Final = (
    "an older vault.db lies beside this ledger, and its patients could be released twice; put the newer one back, or "
    "restore the whole site with `restore`"
)


def named(missing: tuple[str, ...]) -> str:
    """Some of them, and how many more there are."""
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return ", ".join(missing[:_MOST_NAMED]) + more
