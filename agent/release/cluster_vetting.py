"""Vet representatives: remove clusters too similar to a patient, and measure the rest (P7).

k patients are behind every representative, but that says nothing about whom it looks like: a generator may have
learned a face, or a mean of k may lie close to one of them. So every representative is compared with every comparable
image (:func:`agent.release.vetting_statement.compared`) after the mechanism has made it and before it is signed. If
any check drops one image of a cluster the entire cluster is removed: its patients are then behind nothing, as in a
cluster that a mechanism suppresses, and nothing replaces it. Representatives of earlier releases are compared again,
since new patients may be like them; once dropped they are never shown again (P5), whatever the outcome of this
release.

What is measured is clusters: the images of one cluster are views of one representative, so they are no trials of
their own, and more of them make no rate surer.

The claim stays what it was. That an image is missing is a trace of whoever it was like, however faint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Patient
from agent.errors import CohortTooSmallError
from agent.intervals import Proportion, bounds
from agent.mechanisms.common.workspace import Workspace
from agent.microaggregation.released_clusters import ReleasedCluster
from agent.models.training_loop import torch_generator
from agent.release.ports import Run, run_here
from agent.release.vetting_statement import VettingReport, VettingResult
from agent.vetting.exhibits import Exhibit, ReviewSamples, exhibits
from agent.vetting.filter import KINDS, REASONS, FilterResult, Power, measured, power, vet
from agent.vetting.reference import SHARES, Reference, Vetting, reference_of
from protos.artifacts.shards import MAX_SAMPLES
from protos.common.errors import WorkerError

_PASSED: Final = "passed"


class NoneLeftError(CohortTooSmallError):
    """No new representative passed. The text counts nobody (P14)."""

    def __init__(self) -> None:
        """Say it without numbers."""
        ValueError.__init__(
            self, "every new image is too similar to a patient's, or cannot be checked: nothing is released"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """What was found of images beside everybody's. It comes from a confined process."""

    reasons: tuple[str, ...]  # of :data:`agent.vetting.filter.REASONS`, for each image
    taken: tuple[bool, ...]  # of which clusters the unseen verifier takes an image for a patient
    thresholds: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    exhibits: tuple[Exhibit, ...]

    def __post_init__(self) -> None:
        """Reasons and thresholds are printed: they have the names that there are."""
        if not set(self.reasons) <= set(REASONS) or not {*self.thresholds, *self.intervals} <= {*SHARES, "unseen"}:
            raise ValueError("an unknown reason or threshold")


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What is computed on patients' images, in a process that has these and the verifiers and nothing else."""

    vetting: Vetting
    pictures: bool
    places: ClassVar[tuple[str, ...]] = (_PASSED,)
    max_checkpoint_bytes: ClassVar[int] = MAX_SAMPLES

    def power(self, patients: tuple[Patient, ...], seed: int) -> Power:
        """What would be found of near-duplicates that are planted."""
        return power(reference_of(patients, self.vetting), self.vetting, torch_generator(seed))

    def compare(
        self,
        patients: tuple[Patient, ...],
        images: tuple[NDArray[np.uint8], ...],
        labels: tuple[str, ...],
        bench: Workspace,
    ) -> Findings:
        """Every image of every cluster (v, h, w[, 3]), with its label, beside everybody's.

        Which clusters pass is told at once, by the workspace: whatever goes wrong afterwards undoes no finding.
        """
        reference = reference_of(patients, self.vetting)
        every, whose = np.concatenate(images), np.repeat(np.arange(len(images)), [len(one) for one in images])
        vetted = vet(every, reference, self.vetting)
        bench.place(_PASSED).write(_passed(vetted.reasons, whose).tobytes())
        return Findings(
            vetted.reasons,
            tuple(measured(one, reference, self.vetting).value > 0 for one in images),
            dict(reference.thresholds),
            dict(reference.intervals),
            self._beside(reference, vetted, every, [labels[place] for place in whose]) if self.pictures else (),
        )

    def _beside(
        self, reference: Reference, vetted: FilterResult, images: NDArray[np.uint8], labels: Sequence[str]
    ) -> tuple[Exhibit, ...]:
        """The representatives that are most alike, kept and dropped, beside the images that they are most like."""
        names, places = np.unique(labels, return_inverse=True)
        shown = ReviewSamples(
            images=images,
            labels=places,
            scores=vetted.scores,
            nearest=vetted.nearest,
            alignments=np.full(len(places), np.nan),
            reasons=np.array([REASONS.index(reason) for reason in vetted.reasons], np.int64),
        )
        most = shown.most(shown.taken(np.zeros(0, np.int64)))
        told = tuple(f"label {name}" if name else "no label" for name in names)
        found = exhibits(told, self.vetting, most, reference)
        return tuple(replace(one, alignment=None) for one in found)


@dataclass(frozen=True, slots=True)
class _Passed:
    """Where a comparison tells which clusters pass, before anything else may go wrong."""

    tell: Callable[[NDArray[np.bool_]], None]

    def read(self) -> None:
        """Nothing is kept."""

    def write(self, data: bytes) -> None:
        """(n,) bool."""
        self.tell(np.frombuffer(data, np.bool_))


@dataclass(frozen=True, slots=True, eq=False)
class VettingRequest:
    """The judges of a vetting, and who sees the result before anything leaves."""

    vetting: Vetting
    shown: Callable[[VettingReport], None] = lambda _: None
    pictures: bool = False  # the reviewer looks at representatives beside patients, too: maps take a while

    def over(self, patients: Sequence[Patient], rng: np.random.Generator, run: Run = run_here) -> Vetter:
        """Look at every image of everybody, and plant near-duplicates.

        Args:
            patients: whoever is compared with: see :func:`agent.release.vetting_statement.compared`.
            rng: for what is planted.
            run: as :class:`agent.release.ports.SiteContext` has it.
        Raises:
            CohortTooSmallError: one patient, or nobody.
            RecogniserError: too few of what was planted were found.
            WorkerError: what looks answers what it was not asked.
        """
        comparison, patients = Comparison(self.vetting, self.pictures), tuple(patients)
        strength = run(comparison.power, patients, int(rng.integers(1 << 62)))
        if strength.kinds.keys() != KINDS.keys():
            raise WorkerError("what vets the release told of other copies than it plants: nothing left")
        strength.demand()
        return Vetter(self, comparison, patients, strength, run)


@dataclass(frozen=True, slots=True, eq=False)
class Vetter:
    """A vetting that has shown what it finds, over the patients of one site."""

    inspection: VettingRequest
    comparison: Comparison
    patients: tuple[Patient, ...]
    power: Power
    run: Run

    def examine(
        self,
        fresh: Sequence[ReleasedCluster],
        again: Sequence[ReleasedCluster],
        retire: Callable[[Sequence[ReleasedCluster]], None],
    ) -> VettingResult:
        """Compare every image of every cluster with everybody; show what was found.

        Args:
            fresh: clusters that were just made.
            again: those that an earlier release showed.
            retire: told those of ``again`` that were found, before anything else may go wrong.
        Raises:
            NoneLeftError: no fresh cluster passed; the reviewer has seen why.
            WorkerError: what looks answers of other images than it was given.
        """
        every = (*fresh, *again)
        bench = Workspace(lambda _: _Passed(lambda passed: retire(_those(again, ~passed[len(fresh) :]))))
        images, labels = tuple(one.images for one in every), tuple(one.label for one in every)
        found = self.run(self.comparison.compare, self.patients, images, labels, bench)
        whose = np.repeat(np.arange(len(every)), [len(one) for one in images])
        if (len(found.reasons), len(found.taken)) != (len(whose), len(every)):
            raise WorkerError("what vets the release told of other images than it was given: nothing left")
        passed = _passed(found.reasons, whose)
        new, old = np.split(passed, [len(fresh)])
        leaves, taken = passed & new.any(), np.array(found.taken)
        report = VettingReport(
            pictures=len(whose),
            clusters=len(every),
            dropped=Counter(reason for reason in found.reasons if reason),
            lost=tuple(sorted({*labels} - {one.label for one in _those(every, leaves)})),
            left=int(leaves.sum()),
            before=_share(taken),
            after=_share(taken[leaves]) if leaves.any() else None,
            power=self.power,
            thresholds=found.thresholds,
            intervals=found.intervals,
            exhibits=found.exhibits,
        )
        self.inspection.shown(report)
        if not leaves.any():
            raise NoneLeftError
        return VettingResult(_those(fresh, new), _those(again, old), _those(again, ~old), report)


def _passed(reasons: Sequence[str], whose: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which clusters keep all of their images."""
    passed = np.ones(whose[-1] + 1, bool)
    passed[whose[np.array(reasons, object) != ""]] = False
    return passed


def _those(clusters: Sequence[ReleasedCluster], marked: NDArray[np.bool_]) -> tuple[ReleasedCluster, ...]:
    return tuple(one for one, yes in zip(clusters, marked, strict=True) if yes)


def _share(taken: NDArray[np.bool_]) -> Proportion:
    hits, of = int(taken.sum()), len(taken)
    return Proportion(hits / of, *bounds(hits, of))
