"""What the configurations of all releases with an epsilon have in common: how they begin, and how they end."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from agent.domain import Selection
from agent.dp.dpsgd import PrivateSgd
from agent.errors import SiteConfigError
from agent.mechanisms.common.config import CohortTable, Shelf, document
from agent.models.image_folder import ImageFolderError
from agent.models.weights import WeightsError
from agent.toml_config import Tables
from policies.accounting.accountant import NoiseNotFoundError
from protos.artifacts.inspection import MAX_KINDS
from protos.artifacts.shards import MAX_LABEL, plain

_MOST_PATIENTS: Final = 1_000_000_000  # more than any country's registers
# The loss distribution of a step is composed with itself so many times, once for each noise that is tried: a minute
# at most for 100,000 steps, whatever the rate and epsilon; over five for a million.
_MOST_STEPS: Final = 100_000
M = TypeVar("M")


def no_progress(_step: str, _detail: str) -> None:
    """Nobody listens."""


def bounded(public_patients: int) -> None:
    """Refuse what is no number of patients; larger ones are no floats either.

    Raises:
        ValueError: it is none.
    """
    if not 1 <= public_patients <= _MOST_PATIENTS:
        raise ValueError(f"public_patients: at least 1, and at most {_MOST_PATIENTS}")


@dataclass(frozen=True, slots=True)
class PrivacyTable:
    """``[privacy]``: what is promised, and how the training is bounded. All of it constants, none from the data."""

    steps: int  # of DP-SGD
    sampling_rate: float  # chance of each patient in each step
    public_patients: int  # a bound that may be known to all; times sampling_rate it is the divisor of every sum
    clip: float = 1e-3  # largest norm of one patient's gradient
    images_per_patient: int = 4  # drawn in each step
    epsilon: float | None = None  # of both queries together, by loss distributions: the noise follows
    delta: float | None = None  # beside epsilon
    noise_multiplier: float | None = None  # instead of the two

    def __post_init__(self) -> None:
        """Either epsilon and delta, or the noise."""
        if (self.epsilon is None) is not (self.delta is None) or (
            (self.epsilon is None) is (self.noise_multiplier is None)
        ):
            raise ValueError("write epsilon and delta, from which the noise follows, or noise_multiplier; not both")
        bounded(self.public_patients)
        if not self.steps <= _MOST_STEPS:
            raise ValueError(f"steps: at most {_MOST_STEPS}; the price of more takes minutes to find")
        self.job(self.noise_multiplier or 1.0)

    def job(self, noise_multiplier: float) -> PrivateSgd:
        """The training's constants."""
        return PrivateSgd(
            sampling_rate=self.sampling_rate,
            noise_multiplier=noise_multiplier,
            steps=self.steps,
            clip=self.clip,
            images_per_patient=self.images_per_patient,
            expected_batch=self.sampling_rate * self.public_patients,
        )


@dataclass(frozen=True, slots=True)
class Prepared(Generic[M]):
    """The parsed configuration of a release with an epsilon: the mechanism, and the selection of patients."""

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
            SiteConfigError: it is not TOML.
        """
        tables = document(path, known)
        if tables.raw.get("mechanism") != mechanism:
            tables.problems.append(f"mechanism: must be {mechanism}")
        return cls(path, tables)

    def labels(self, cohort: CohortTable | None, classes: tuple[str, ...], where: str) -> None:
        """Whose images are opened is said once, by the ``classes`` that ``where`` names."""
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
            SiteConfigError: there are some.
        """
        if self.tables.problems:
            raise SiteConfigError(f"{self.path.name}: " + "; ".join(self.tables.problems))

    @contextmanager
    def in_words(self, vouched: frozenset[str]) -> Iterator[Shelf]:
        """The files beside it, while they are made into a mechanism.

        Raises:
            SiteConfigError: they do not fit; the text names the file.
            WeightsError, ImageFolderError: one cannot be read; they name their own.
        """
        try:
            yield Shelf(self.path.resolve().parent, vouched)
        except (WeightsError, ImageFolderError):
            raise
        except (NoiseNotFoundError, ValueError) as error:
            raise SiteConfigError(f"{self.path.name}: {error}") from None
