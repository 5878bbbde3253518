"""The vault's records of whom releases and runs were made from, and their check against the site's ledger (P5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Final, Protocol

from policies.ledger.state import State
from policies.review.rules import TERMS, Finding

RECORD: Final = "releases"  # the vault's note: every release without an epsilon, and who is behind it
_MOST_NAMED: Final = 5

MEMBERS: Final = "model_patients"  # note of the site: by run or release with an epsilon, who it was made from


class Notes(Protocol):
    """The vault, as far as it is noted in it who is behind what."""

    def note(self, name: str) -> Any:
        """What is noted under a name; None, nothing is."""

    def change_note(self, name: str, change: Callable[[Any], Any]) -> None:
        """Note what ``change`` makes of what was noted."""


def remember_members(vault: Notes, name: str, persons: Iterable[str]) -> None:
    """Write down whom a run, or a release with an epsilon, learned from, before anything of it leaves.

    It limits nothing and is counted nowhere: it is there so that a patient who opts out can be told.
    """
    whole = set(persons)
    if not whole <= set((vault.note(MEMBERS) or {}).get(name, ())):
        vault.change_note(
            MEMBERS, lambda note: {**(note or {}), name: sorted(whole.union((note or {}).get(name, ())))}
        )


def taken_part(record: Iterable[Mapping[str, Any]] | None, members: Any, persons: Set[str]) -> list[str]:
    """The runs and releases that one of them is behind, by name, sorted.

    Args:
        record: the vault's note :data:`RECORD`.
        members: its note :data:`MEMBERS`.
        persons: pseudonyms.
    """
    found = {name for name, own in (members or {}).items() if not persons.isdisjoint(own)}
    for one in record or ():
        lists = [*one["clusters"], *one.get("again", []), one.get("persons", [])]
        if any(not persons.isdisjoint(own) for own in lists):
            found.add(one["release"])
    return sorted(found)


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
