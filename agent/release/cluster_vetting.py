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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agent.domain import Patient
from agent.errors import CohortTooSmallError
from agent.intervals import Proportion, bounds
from agent.microaggregation.released_clusters import ReleasedCluster
from agent.models.training_loop import torch_generator
from agent.release.vetting_statement import VettingReport, VettingResult
from agent.vetting.exhibits import Exhibit, ReviewSamples, exhibits
from agent.vetting.filter import REASONS, FilterResult, Power, measured, power, vet
from agent.vetting.reference import Reference, Vetting, reference_of


class NoneLeftError(CohortTooSmallError):
    """No new representative passed. The text counts nobody (P14)."""

    def __init__(self) -> None:
        """Say it without numbers."""
        ValueError.__init__(
            self, "every new image is too similar to a patient's, or cannot be checked: nothing is released"
        )


@dataclass(frozen=True, slots=True, eq=False)
class VettingRequest:
    """The judges of a vetting, and who sees the result before anything leaves."""

    vetting: Vetting
    shown: Callable[[VettingReport], None] = lambda _: None
    pictures: bool = False  # the reviewer looks at representatives beside patients, too: maps take a while

    def over(self, patients: Sequence[Patient], rng: np.random.Generator) -> Vetter:
        """Look at every image of everybody, and plant near-duplicates.

        Args:
            patients: whoever is compared with: see :func:`agent.release.vetting_statement.compared`.
            rng: for what is planted.
        Raises:
            CohortTooSmallError: one patient, or nobody.
            RecogniserError: too few of what was planted were found.
        """
        reference = reference_of(patients, self.vetting)
        strength = power(reference, self.vetting, torch_generator(int(rng.integers(1 << 62))))
        strength.demand()
        return Vetter(self, reference, strength)


@dataclass(frozen=True, slots=True, eq=False)
class Vetter:
    """A vetting that has shown what it finds, over the patients of one site."""

    inspection: VettingRequest
    reference: Reference
    power: Power

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
        """
        every = (*fresh, *again)
        images = np.concatenate([cluster.images for cluster in every])
        whose = np.repeat(np.arange(len(every)), [len(cluster.images) for cluster in every])
        vetted = vet(images, self.reference, self.inspection.vetting)
        passed = np.ones(len(every), bool)
        passed[whose[~vetted.kept]] = False
        new, old = np.split(passed, [len(fresh)])
        gone = _those(again, ~old)
        retire(gone)
        leaves = passed & new.any()
        taken = self._taken(every)
        found = VettingReport(
            pictures=len(images),
            clusters=len(every),
            dropped=Counter(reason for reason in vetted.reasons if reason),
            lost=tuple(sorted({one.label for one in every} - {one.label for one in _those(every, leaves)})),
            left=int(leaves.sum()),
            before=_share(taken),
            after=_share(taken[leaves]) if leaves.any() else None,
            power=self.power,
            thresholds=self.reference.thresholds,
            intervals=self.reference.intervals,
            exhibits=self._beside(every, whose, vetted) if self.inspection.pictures else (),
        )
        self.inspection.shown(found)
        if not leaves.any():
            raise NoneLeftError
        return VettingResult(_those(fresh, new), _those(again, old), gone, found)

    def _taken(self, clusters: Sequence[ReleasedCluster]) -> NDArray[np.bool_]:
        """(n,): of which clusters the unseen verifier takes an image for a patient."""
        vetting = self.inspection.vetting
        return np.array([measured(one.images, self.reference, vetting).value > 0 for one in clusters], np.bool_)

    def _beside(
        self, every: Sequence[ReleasedCluster], whose: NDArray[np.int64], vetted: FilterResult
    ) -> tuple[Exhibit, ...]:
        """The representatives that are most alike, kept and dropped, beside the images that they are most like."""
        names = tuple(sorted({cluster.label for cluster in every}))
        shown = ReviewSamples(
            images=np.concatenate([cluster.images for cluster in every]),
            labels=np.array([names.index(every[place].label) for place in whose], np.int64),
            scores=vetted.scores,
            nearest=vetted.nearest,
            alignments=np.full(len(whose), np.nan),
            reasons=np.array([REASONS.index(reason) for reason in vetted.reasons], np.int64),
        )
        most = shown.most(shown.taken(np.zeros(0, np.int64)))
        told = tuple(f"label {name}" if name else "no label" for name in names)
        found = exhibits(told, self.inspection.vetting, most, self.reference)
        return tuple(replace(one, alignment=None) for one in found)


def _those(clusters: Sequence[ReleasedCluster], marked: NDArray[np.bool_]) -> tuple[ReleasedCluster, ...]:
    return tuple(one for one, yes in zip(clusters, marked, strict=True) if yes)


def _share(taken: NDArray[np.bool_]) -> Proportion:
    hits, of = int(taken.sum()), len(taken)
    return Proportion(hits / of, *bounds(hits, of))
