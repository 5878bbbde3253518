"""Patient ids that may be one person: equal images, or one UID, under two of them. For k alone.

k counts people, and a person with two ids is one person. A program cannot decide whether two ids are the same person,
so they count as one patient towards k until a user says that they differ. Claims of level A never use this: one more
patient must change that patient's contribution only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import combinations
from typing import Final

from agent.storage.instance_index import InstanceRecord

WHY: Final = ("picture", "study", "series", "instance")  # what they have in common: equal pixels, or a UID
_NOTHING: Final = "0" * 32  # a study or series that an older version did not write down


@dataclass(frozen=True, slots=True)
class EqualPatients:
    """Patient ids that count as one patient."""

    persons: frozenset[str] = field(repr=False)
    why: tuple[str, ...]  # some of WHY, in its order
    studies: tuple[str, ...]  # all of theirs, sorted: what a person looks at

    @property
    def name(self) -> str:
        """For a person to say again: 16 hex characters, other ones when an id comes or goes."""
        return sha256(" ".join(sorted(self.persons)).encode()).hexdigest()[:16]


def group_equal_patients(
    heads: Iterable[InstanceRecord], apart: Sequence[frozenset[str]]
) -> tuple[EqualPatients, ...]:
    """Group the ids that have an image or a UID in common, directly or through others, by name.

    Args:
        heads: of everything in a project's vault.
        apart: groups of ids of which a person has said that each is another patient.
    """
    first: dict[tuple[str, str], str] = {}
    shared: dict[tuple[str, str], set[str]] = {}
    studies: dict[str, set[str]] = {}
    for head in heads:
        studies.setdefault(head.person, set()).add(head.study)
        for mark in _marks(head):
            one = first.setdefault(mark, head.person)
            if one != head.person:
                shared.setdefault(mark, {one}).add(head.person)
    places: dict[str, set[int]] = {}
    for index, told in enumerate(apart):
        for person in told:
            places.setdefault(person, set()).add(index)
    union = _Union()
    why: dict[str, set[str]] = {}
    for (kind, _), persons in shared.items():
        for a, b in _undecided(sorted(persons), apart, places):
            union.join(a, b)
            why.setdefault(a, set()).add(kind)
    found = []
    for group in union.groups():
        kinds = {kind for person in group for kind in why.get(person, ())}
        of_them = {study for person in group for study in studies[person]}
        found.append(EqualPatients(frozenset(group), tuple(k for k in WHY if k in kinds), tuple(sorted(of_them))))
    return tuple(sorted(found, key=lambda one: one.name))


def left_out(groups: Iterable[frozenset[str]], found: Set[str], taken: Set[str]) -> frozenset[str]:
    """Of each group all ids but the first of those found; all of them where one is taken."""
    out: set[str] = set()
    for group in groups:
        stands = set() if group & taken else set(sorted(group & found)[:1])
        out |= group - taken - stands
    return frozenset(out)


def _undecided(
    persons: list[str], apart: Sequence[frozenset[str]], places: Mapping[str, Set[int]]
) -> Iterator[tuple[str, str]]:
    """Pairs that nobody has told apart: enough of them to join all that are to be joined."""
    if any(group.issuperset(persons) for group in apart):
        return
    new = next((person for person in persons if person not in places), None)
    if new is not None:  # apart from nobody
        yield from ((new, person) for person in persons if person != new)
        return
    yield from ((a, b) for a, b in combinations(persons, 2) if places[a].isdisjoint(places[b]))


def _marks(head: InstanceRecord) -> Iterator[tuple[str, str]]:
    for kind, mark in zip(WHY, (head.picture, *(head.uids or ("", "", ""))), strict=True):
        if mark not in ("", _NOTHING):
            yield kind, mark


class _Union:
    """Disjoint sets (Tarjan 1975): who is joined with whom, directly or through others."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def _top(self, one: str) -> str:
        while (above := self._above.setdefault(one, one)) != one:
            self._above[one] = one = self._above[above]
        return one

    def join(self, a: str, b: str) -> None:
        self._above[self._top(a)] = self._top(b)

    def groups(self) -> list[set[str]]:
        found: dict[str, set[str]] = {}
        for one in list(self._above):
            found.setdefault(self._top(one), set()).add(one)
        return list(found.values())
