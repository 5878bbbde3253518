"""The shipped way of a release, as an attack calls it: real ledgers, the pipeline, k-Same-PCA, the artifact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.domain import Cohort, Image, Patient, Selection
from agent.errors import CohortTooSmallError
from agent.mechanisms.common.linear_codec import Basis
from agent.mechanisms.ksame.mechanism import KSame
from agent.microaggregation.released_clusters import from_note, place_of
from agent.release.pipeline import release_synthetic
from deploy.reproduction.attacks.disclosure import Release, Sums
from protos.artifacts.arrays import unpack_images
from tests.support.site_world import MemoryVault, site_world

MODALITY = "OT"


@dataclass
class Wing(MemoryVault):
    """A vault of given pictures, one of each patient, of whom some are there now; two labels in turn."""

    pictures: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 1, 1), np.float32))
    rows: tuple[int, ...] = ()

    def _inside(self, without: Iterable[str]) -> list[int]:
        excluded = set(without) | self.out
        return [row for row in self.rows if f"{row:05d}" not in excluded]

    def cohort(
        self, modality: str | Selection, shape: tuple[int, ...] | None = None, without: Iterable[str] = ()
    ) -> Cohort:
        self.reads += 1
        inside = self._inside(without)
        return Cohort(tuple(Patient(f"{row:05d}", (Image(self.pictures[row], str(row % 2)),)) for row in inside))

    def roster(
        self, selection: Selection, without: Iterable[str] = (), among: Set[str] | None = None
    ) -> tuple[tuple[str, ...], ...]:
        inside = self._inside(without)
        return tuple((str(row % 2),) for row in inside if among is None or f"{row:05d}" in among)


def frozen(folder: Path, pictures: NDArray[np.float32], basis: Basis, k: int) -> Callable[[], Release]:
    """For ``differencing``: every ``begin`` is a new site, whose later releases know of its earlier ones.

    A release is what the artifact's pictures say, encoded with the public basis. How many stand behind each is told
    too, from the site's own record: more than any attacker has. Who is not in the rows any more has opted out. Where
    the site refuses, for too few newcomers, nothing leaves, and what was published before is all there is.
    """
    names = itertools.count()

    def begin() -> Release:
        vault, dice = Wing(pictures=pictures), np.random.default_rng(next(names))
        place = folder / f"site-{next(names)}"
        place.mkdir(parents=True)
        site = site_world(place, vault=vault, max_releases_per_patient=9).site
        last: list[Sums] = []

        def release(rows: NDArray[np.int64]) -> Sums:
            gone = set(vault.rows) - set(rows.tolist())
            vault.out = vault.out | {f"{row:05d}" for row in gone}
            vault.rows = tuple(rows.tolist())
            try:
                signed, verdict = release_synthetic(site, KSame(k, 2, basis), MODALITY, dice)
            except CohortTooSmallError:
                return last[-1]
            assert verdict.admitted
            shown, _ = unpack_images(signed.artifact)
            behind = _behind(vault)
            sizes = np.array([behind[picture.tobytes()] for picture in shown], np.int64)
            codes = basis.encode(shown.astype(np.float32) / np.float32(255))
            last.append(Sums(sizes, codes.astype(np.float64)))
            return last[-1]

        return release

    return begin


def recomputed(folder: Path, pictures: NDArray[np.float32], basis: Basis, k: int) -> Callable[[], Release]:
    """The same releases by a site without a memory: every one clusters everybody anew."""
    begin = frozen(folder, pictures, basis, k)

    def forgetful() -> Release:
        return lambda rows: begin()(rows)  # noqa: PLW0108 -- a new site for every release, not for every trial

    return forgetful


def _behind(vault: MemoryVault) -> dict[bytes, int]:
    """How many patients stand behind each picture that may still be shown."""
    found = {}
    for one in vault.note("releases") or []:
        for index, members in enumerate(one["clusters"]):
            cluster = from_note(members, vault.project_note(place_of(one["release"], index)))
            if not cluster.retired:
                found[cluster.images[0].tobytes()] = len(cluster.members)
    return found
