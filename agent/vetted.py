"""The vetting of representatives: what is too like a patient stays, with its cluster, and the rest is measured (P7).

k patients stand behind every representative, which promises nothing about whom it looks like: a generator may have
learned a face, a mean of k may lie at one of them. Here every representative is compared with every comparable
picture (:func:`compared`) once the mechanism has made it and before it is sealed. A cluster of which one picture is
found goes whole: its patients are behind nothing, as in a cluster that a mechanism suppresses, and nothing takes its
place. A representative of an earlier release is compared again, since newcomers may be like it; once found it is
never shown again (P5), however the making ends.

What is measured is clusters: the pictures of one cluster are views of one representative, so they are no trials of
their own, and more of them make no rate surer.

The claim stays what it was. That a picture is missing is a trace of whoever it was like, however faint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.nets.siamese import Share
from agent.nouns import CohortTooSmall, Patient, Selection
from agent.stages.drawn import Exhibit, Shown, exhibits
from agent.stages.freeze import Frozen
from agent.stages.vet import REASONS, Power, Reference, Vetted, Vetting, measured, power, reference_of, vet
from agent.training.loop import own_generator
from agent.wilson import bounds
from policies.statement import Release

# What a k-anonymous release states as its rate: the limits of the presets, and coarse elsewhere
_STEPS: Final = (0.01, 0.02, *(step / 20 for step in range(1, 21)))


class NoneLeft(CohortTooSmall):
    """No new representative passed. The text counts nobody (P14)."""

    def __init__(self) -> None:
        """Say it without numbers."""
        ValueError.__init__(
            self, "every new picture is too much like somebody, or cannot be judged: nothing is released"
        )


class TooFewToVet(CohortTooSmall):
    """So few patients could not show that the vetting finds copies. The text counts nobody (P14)."""

    def __init__(self) -> None:
        """Say what can be done."""
        ValueError.__init__(
            self, "the cohort does not qualify for a vetting: too few could show that it finds copies of them"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sifted:
    """What the site's reviewer sees of a vetting, before anything leaves. It is made of patients: it stays here."""

    pictures: int  # that were compared
    clusters: int  # behind them
    dropped: Mapping[str, int]  # pictures, by the reason of :class:`agent.stages.vet.Vetted`
    lost: tuple[str, ...]  # labels of which no cluster is left, sorted
    left: int  # clusters whose pictures leave: none, where no new one passed
    before: Share  # R_re-id by the unseen verifier: of the clusters that would leave, those of earlier releases too
    after: Share | None  # ... of those that leave; None: nothing leaves
    power: Power
    thresholds: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]  # 95 % of a false match's probability, at the verifiers' thresholds
    exhibits: tuple[Exhibit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """Who judges, and to whom it is shown before anything leaves."""

    vetting: Vetting
    shown: Callable[[Sifted], None] = lambda _: None
    pictures: bool = False  # the reviewer looks at representatives beside patients, too: maps take a while


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """The clusters that leave, those that were shown before and never will be again, and what was found."""

    fresh: tuple[Frozen, ...]
    again: tuple[Frozen, ...]
    gone: tuple[Frozen, ...] = ()
    found: Sifted | None = None

    def stated(self, draft: Release) -> Release:
        """The statement with the two figures, where there are any: both coarse, as of level B (:func:`coarse`)."""
        if self.found is None or self.found.after is None:
            return draft
        rate = coarse(self.found.after.high)
        return replace(stated(draft, self.found.after, self.found.power.caught), reid_rate=rate)


@dataclass(frozen=True, slots=True, eq=False)
class Examiner:
    """A vetting that has shown what it finds, over the patients of one site."""

    inspection: Inspection
    reference: Reference
    power: Power

    @classmethod
    def of(cls, patients: Sequence[Patient], inspection: Inspection, rng: np.random.Generator) -> Examiner:
        """Look at every picture of everybody, and plant near-duplicates.

        Args:
            patients: whoever is compared with: see :func:`compared`.
            inspection: who judges.
            rng: for what is planted.
        Raises:
            CohortTooSmall: one patient, or nobody.
            KnowsNobody: too few of what was planted were found.
        """
        reference = reference_of(patients, inspection.vetting)
        strength = power(reference, inspection.vetting, own_generator(int(rng.integers(1 << 62))))
        strength.demand()
        return cls(inspection, reference, strength)

    def examine(
        self, fresh: Sequence[Frozen], again: Sequence[Frozen], retire: Callable[[Sequence[Frozen]], None]
    ) -> Passed:
        """Compare every picture of every cluster with everybody; show what was found.

        Args:
            fresh: clusters that were just made.
            again: those that an earlier release showed.
            retire: told those of ``again`` that were found, before anything else may go wrong.
        Raises:
            NoneLeft: no fresh cluster passed; the reviewer has seen why.
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
        found = Sifted(
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
            raise NoneLeft
        return Passed(_those(fresh, new), _those(again, old), gone, found)

    def _taken(self, clusters: Sequence[Frozen]) -> NDArray[np.bool_]:
        """(n,): of which clusters the unseen verifier takes a picture for a patient."""
        vetting = self.inspection.vetting
        return np.array([measured(one.images, self.reference, vetting).value > 0 for one in clusters], np.bool_)

    def _beside(self, every: Sequence[Frozen], whose: NDArray[np.int64], vetted: Vetted) -> tuple[Exhibit, ...]:
        """The representatives that are most alike, kept and dropped, beside the pictures that they are most like."""
        names = tuple(sorted({cluster.label for cluster in every}))
        shown = Shown(
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


def _those(clusters: Sequence[Frozen], marked: NDArray[np.bool_]) -> tuple[Frozen, ...]:
    return tuple(one for one, yes in zip(clusters, marked, strict=True) if yes)


def _share(taken: NDArray[np.bool_]) -> Share:
    hits, of = int(taken.sum()), len(taken)
    return Share(hits / of, *bounds(hits, of))


def compared(selection: Selection) -> Selection:
    """Whom the pictures of a selection are compared with: other parts of its split, other labels, short series too.

    Comparable is what has the modality, the body part if one is named, and the shape. Not seen are patients who have
    opted out, pictures without a label, and what the vault withholds.
    """
    return replace(selection, split=None, part="", labels=frozenset(), min_instances=1)


def stated(draft: Release, found: Share, caught: Share) -> Release:
    """The two figures on which a vetting is judged: the upper end of what is left, the lower end of what it finds."""
    return replace(draft, reid_rate=up(found.high), vetting_power=down(caught.low))


def up(share: float) -> str:
    """A share as a statement has it: never below what was found."""
    return repr(math.ceil(share * 10_000) / 10_000)


def coarse(share: float) -> str:
    """The same in few steps: with nobody found a fine one tells how many clusters there are (design, section 5).

    Raises:
        ValueError: no share, such as NaN.
    """
    return repr(min(step for step in _STEPS if share <= step))


def down(share: float) -> str:
    """The same, never above it; coarse: an interval's width would tell how many patients there are."""
    return repr(math.floor(share * 20) / 20)
