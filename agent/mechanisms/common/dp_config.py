"""What the configurations of all releases with an epsilon have in common: how they begin, and how they end."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from agent.edges.home import BadSite
from agent.edges.pictures import BadPictures
from agent.edges.synthesis import CohortTable, Shelf, document
from agent.edges.tables import Tables
from agent.nets.weights import BadWeights
from agent.nouns import Selection
from policies.accounting import Unreachable
from protos.inspection import MAX_KINDS
from protos.shards import MAX_LABEL, plain

_MOST_PATIENTS: Final = 1_000_000_000  # more than any country's registers
M = TypeVar("M")


def silent(_step: str, _detail: str) -> None:
    """Nobody listens."""


def bounded(public_patients: int) -> None:
    """Refuse what is no number of patients; larger ones are no floats either.

    Raises:
        ValueError: it is none.
    """
    if not 1 <= public_patients <= _MOST_PATIENTS:
        raise ValueError(f"public_patients: at least 1, and at most {_MOST_PATIENTS}")


@dataclass(frozen=True, slots=True)
class Prepared(Generic[M]):
    """A configuration of a release with an epsilon, read: what to make, and of whom."""

    mechanism: M
    selection: Selection
    told: tuple[str, ...]  # for people: what it promises, and what to expect


@dataclass(frozen=True, slots=True)
class PrivateFile:
    """The file of such a release, and what is wrong with it so far."""

    path: Path
    tables: Tables

    @classmethod
    def of(cls, path: Path, known: Container[str], mechanism: str) -> PrivateFile:
        """The file as tables; another mechanism's is a problem.

        Raises:
            BadSite: it is not TOML.
        """
        tables = document(path, known)
        if tables.raw.get("mechanism") != mechanism:
            tables.problems.append(f"mechanism: must be {mechanism}")
        return cls(path, tables)

    def labels(self, cohort: CohortTable | None, classes: tuple[str, ...], where: str) -> None:
        """Whose pictures are opened is said once, by the ``classes`` that ``where`` names."""
        if cohort and cohort.labels and cohort.labels != set(classes):
            told = f"cohort.labels: leave it out; the labels that count are those of {where}"
            self.tables.problems.append(told)

    def drawn(self, labels: tuple[str, ...], where: str) -> None:
        """What the set will be labelled can be written into one: known now, and not once a price is spent."""
        if not all(map(plain, labels)):
            told = f"{where}: a label of the set is at most {MAX_LABEL} plain characters, none of them beyond ASCII"
            self.tables.problems.append(told)
        if len(set(labels)) > MAX_KINDS:
            self.tables.problems.append(f"{where}: a set has at most {MAX_KINDS} different labels")

    def public(self, delta: float | None, public_patients: int) -> None:
        """A delta that gives up none of so many patients (P1)."""
        if delta is not None and not 0.0 < delta < 1.0 / public_patients:
            self.tables.problems.append("privacy.delta: must be positive, and smaller than 1 / public_patients (P1)")

    def refuse(self) -> None:
        """All problems of the tables, at once.

        Raises:
            BadSite: there are some.
        """
        if self.tables.problems:
            raise BadSite(f"{self.path.name}: " + "; ".join(self.tables.problems))

    @contextmanager
    def in_words(self, vouched: frozenset[str]) -> Iterator[Shelf]:
        """The files beside it, while they are made into a mechanism.

        Raises:
            BadSite: they do not fit; the text names the file.
            BadWeights, BadPictures: one cannot be read; they name their own.
        """
        try:
            yield Shelf(self.path.resolve().parent, vouched)
        except (BadWeights, BadPictures):
            raise
        except (Unreachable, ValueError) as error:
            raise BadSite(f"{self.path.name}: {error}") from None
