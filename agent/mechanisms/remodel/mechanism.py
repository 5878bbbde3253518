"""Remodelled heads: patients' own scans, each with another face, measured by an attacker before they may leave.

C-DeID-GAN, section 3; corrected where it leaks: see :mod:`agent.defacing.remodel`. There is no formal guarantee
(level C): the brain is the patient's, bit for bit, and anyone with another scan of it can re-identify it. The
evidence of a release is an attack on the faces of the very set that leaves. An attacker who has every patient's
unaltered head, and was trained on half of the patients, looks for the other half, and vice versa. Its rank-1 rate is
the statement's ``reid_rate``, and its rate on unaltered heads of another day is its power.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from agent.defacing.change import checked
from agent.defacing.deface import Examine
from agent.defacing.face_region import Region
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import threshold
from agent.defacing.reidentification.features import Eye, ScanFeatures, extract_features
from agent.defacing.reidentification.matching import Attacker, People, first
from agent.defacing.reidentification.rendering import surface
from agent.defacing.reidentification.simulated_rescan import revisited
from agent.defacing.remodel import RemodelNetwork, remodel
from agent.domain import Scan, Volume, VolumeSet
from agent.errors import CohortTooSmallError
from agent.intervals import Interval, wilson
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import spacing
from policies.accounting.claims import NoClaim

LEAST: Final = (
    36  # heads, all of them known unaltered: fewer cannot show a power of 0.9 (:mod:`policies.review.rules`)
)
_NEAR: Final = 0.02  # of a spacing: grids that are one but for rounding


@dataclass(frozen=True, slots=True)
class MatchRate:
    """How many of so many, with Wilson's interval."""

    hits: float
    of: int

    @property
    def interval(self) -> Interval:
        """95 %."""
        return wilson(self.hits, self.of)


@dataclass(frozen=True, slots=True, eq=False)
class Remodelled:
    """The heads to release, and their figures. The figures depend on patients: they are for the site's reviewer."""

    made: VolumeSet
    known: MatchRate  # rank-1 on what leaves
    power: MatchRate  # rank-1 on unaltered heads of another day
    gallery: int  # heads to choose from
    persons: frozenset[str]  # whose heads are in it
    left_out: dict[str, int]  # why -> scans


@dataclass(frozen=True, slots=True, eq=False)
class Remodel:
    """Public configuration of one release of remodelled heads."""

    network: RemodelNetwork
    atlas: str  # SHA-256 of the template
    shape: tuple[int, int, int]  # voxels of the scans that count, axes towards right, front and up
    spacing: tuple[float, float, float]  # mm
    region: Region = field(default_factory=lambda: Region(parts="surface"))
    eye: Eye = field(default_factory=Eye)
    attacker: Attacker = field(default_factory=Attacker)

    name: ClassVar[str] = "remodel"

    def __post_init__(self) -> None:
        """A grid on which a head fits."""
        if len(self.shape) != 3 or not all(type(n) is int and n >= 16 for n in self.shape):
            raise ValueError("shape: three numbers of voxels, 16 or more")
        if len(self.spacing) != 3 or not all(0.2 <= edge <= 4.0 for edge in self.spacing):
            raise ValueError("spacing: three of 0.2 to 4 mm")

    @property
    def form(self) -> str:
        """SHA-256 of the whole configuration."""
        grid = [self.shape, self.spacing, repr(self.region), repr(self.eye), repr(self.attacker)]
        told: list[Any] = [self.name, self.network.origin.sha256, self.atlas, *grid]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def claim(self) -> NoClaim:
        """Nothing: an attack that failed is no guarantee, and the brain remains linkable."""
        return NoClaim()

    def components(self) -> dict[str, str]:
        """Where what draws the face and finds the head comes from (P6)."""
        return {"generator": self.network.origin.component, "atlas": "public"}

    def run(
        self,
        scans: Sequence[Scan],
        examine: Examine,
        rng: np.random.Generator,
        say: Callable[[int, int], None] = lambda _done, _of: None,
    ) -> Remodelled:
        """Give every head another face, and look for the patients in what comes out.

        Args:
            scans: one of each patient.
            examine: finds skin and brain, or refuses; such a scan is left out, by itself alone.
            rng: of this release.
            say: heads done, and of how many.

        Raises:
            CohortTooSmallError: too few heads for the attack to be shown.
        """
        left: dict[str, int] = {}
        values, labels, persons, known, made, again = [], [], [], [], [], []
        for number, scan in enumerate(sorted(scans, key=lambda one: one.pseudonym)):
            try:
                head, new = self._one(scan, examine, rng)
            except NotDefacedError as error:
                left[error.code] = left.get(error.code, 0) + 1
                continue
            values.append(new)
            labels.append(scan.label)
            persons.append(scan.pseudonym)
            known.append(self._look(head.volume, head.brain.to_template))
            made.append(self._look(Volume(new, head.volume.affine), head.brain.to_template))
            day, back = revisited(head.volume, rng)
            again.append(self._look(day, head.brain.to_template @ back))
            say(number + 1, len(scans))
        if len(values) < LEAST:
            raise CohortTooSmallError
        order = rng.permutation(len(values))  # the order of pseudonyms tells nothing, and that of the set no more
        found, gallery = self._attacked([known[i] for i in order], [made[i] for i in order])
        power, _ = self._attacked([known[i] for i in order], [again[i] for i in order])
        out = VolumeSet(np.stack([values[i] for i in order]), tuple(labels[i] for i in order), self.spacing)
        return Remodelled(out, found, power, gallery, frozenset(persons), dict(sorted(left.items())))

    def _one(self, scan: Scan, examine: Examine, rng: np.random.Generator) -> tuple[HeadScan, NDArray[Any]]:
        """The head, and its values with another face, int16 or float32.

        Raises:
            NotDefacedError: whatever keeps the face on; ``mixed_series``, it lies on another grid.
        """
        head = examine(scan.volume)
        edges = spacing(head.volume.affine)
        if head.volume.values.shape != self.shape or not bool(np.allclose(edges, self.spacing, rtol=_NEAR, atol=0)):
            raise NotDefacedError("mixed_series")
        keep = head.brain.mask
        change = remodel(head, self.network, self.region, rng, self.network.coarse)
        made = checked(head.volume, keep, change.onto(head.volume, keep, rng))
        values = made.values
        if values.dtype.kind == "f":
            return head, values.astype(np.float32)
        bounds = np.iinfo(np.int16)
        if not bounds.min <= int(values.min()) <= int(values.max()) <= bounds.max:
            raise NotDefacedError("too_large")
        return head, values.astype(np.int16)

    def _look(self, volume: Volume, to_template: NDArray[np.float64]) -> ScanFeatures:
        return extract_features(surface(volume, threshold(volume.values)), to_template, self.eye)

    def _attacked(self, known: list[ScanFeatures], made: list[ScanFeatures]) -> tuple[MatchRate, int]:
        """Rank-1 over two halves, each found by an attacker who learned on the other; and the size of a gallery."""
        half = len(known) // 2
        parts = [slice(0, half), slice(half, None)]
        hits = 0.0
        for learn, find in (parts, parts[::-1]):
            choice = self.attacker.learned(People(tuple(known[learn]), tuple(made[learn])))
            scores = choice.matcher(People(tuple(known[find]), tuple(made[find])))
            hits += float(np.diag(first(scores)).sum())
        return MatchRate(hits, len(known)), half
