"""What AnonFACES does with the patients of an experiment: embed, cluster, draw, mix, and be recognised."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Clusters, Cohort, Latents
from agent.errors import CohortTooSmallError
from agent.mechanisms.anonfaces.gallery import Gallery, gallery_of
from agent.mechanisms.anonfaces.identity_mixing import Mixing, Setting, mix, mix_published
from agent.mechanisms.anonfaces.identity_mixing import Published as PaperMixing
from agent.microaggregation.aggregation import average
from agent.microaggregation.partition import partition
from deploy.reproduction.attacks.recognition import vectors
from deploy.reproduction.averaging_methods import pixel_average
from deploy.reproduction.clustering_baselines import BASELINES
from deploy.reproduction.experiment import Rows, Work, cohort_of, name_of
from deploy.reproduction.networks import codec, latents, linear_codes, recogniser

Images = NDArray[np.uint8]
OURS: Final = "ours"


@dataclass(frozen=True, slots=True, eq=False)
class People:
    """One image of each patient of D, and the patients' other images."""

    work: Work
    seed: int
    rows: Rows  # (n,) one row for each patient, in the order of patients
    others: Rows  # rows of the other images
    cohort: Cohort

    @property
    def owners(self) -> Rows:
        """(n,)."""
        out: Rows = self.work.samples.owners[self.rows]
        return out


def people(work: Work, seed: int) -> People:
    """D as a person-specific data set (Definition 3.1): the first image of everybody."""

    def make() -> People:
        rows = work.parts(seed).cohort
        _, first = np.unique(work.samples.owners[rows], return_index=True)
        kept = rows[first]
        return People(work, seed, kept, np.setdiff1d(rows, kept), cohort_of(work.samples, kept))

    found: People = work.held(f"people {seed}", make)
    return found


def embedded(of: People, which: int) -> Latents:
    """The patients in a recogniser's space: (n, d) unit vectors."""

    def make() -> Latents:
        found = vectors(recogniser(of.work, of.seed, which), of.work.samples.unit(of.rows)).astype(np.float32)
        return Latents(found, tuple(name_of(int(p)) for p in of.owners))

    codes: Latents = of.work.held(f"embedded {of.seed} {which}", make)
    return codes


SPACES: Final[Mapping[str, Callable[[People], Latents]]] = {  # Fig. 9a
    "recogniser": lambda of: embedded(of, 0),
    "W+": lambda of: latents(of.work, of.seed, of.rows),
    "PCA": lambda of: linear_codes(of.work, of.seed, of.rows),
}


def clustered(of: People, where: str, method: str, k: int) -> Clusters:
    """A partition in one of :data:`SPACES` by one method; the same for the same space, method, k and seed."""

    def make() -> Clusters:
        space = SPACES[where](of)
        rng = of.work.rng("clusters", of.seed, method, k)
        if method == OURS:
            return partition(space, [""] * len(space.patients), k, 1, rng)
        found = BASELINES[method](space.codes.astype(np.float64), k, rng)
        groups = (np.flatnonzero(found == j) for j in range(int(found.max()) + 1))
        return Clusters(tuple(tuple(space.patients[i] for i in rows) for rows in groups))

    clusters: Clusters = of.work.held(f"clusters {of.seed} {where} {method} {k}", make)
    return clusters


def assignment(clusters: Clusters, patients: Sequence[str]) -> NDArray[np.int64]:
    """(n,): the cluster of every patient."""
    place = {patient: j for j, cluster in enumerate(clusters.members) for patient in cluster}
    return np.array([place[patient] for patient in patients], np.int64)


def drawn(of: People, clusters: Clusters, generator: str) -> tuple[Clusters, Images]:
    """The representatives of a partition by one generator (Fig. 9c), with the partition."""
    if generator == "pixels":
        return clusters, pixel_average(of.cohort, clusters)
    if generator == "StyleGAN":
        codes = average(latents(of.work, of.seed, of.rows), clusters)
        return clusters, codec(of.work, of.seed).decode(codes)
    raise ValueError("a generator is StyleGAN or pixels")


def risked(of: People, made: tuple[Clusters, Images] | None) -> dict[str, float]:
    """Information loss (Definition 3.2) and re-identification (section 5.1) by a recogniser that guided nothing.

    Not a number where nothing was released.
    """
    if made is None:
        return dict.fromkeys(("IL", "re-id", "5 %", "95 %", "threshold", "clusters below"), math.nan)
    clusters, images = made
    net = recogniser(of.work, of.seed, 2)
    own = embedded(of, 2)
    seen = vectors(net, images.astype(np.float32) / np.float32(255.0))
    kept = {p for cluster in clusters.members for p in cluster}
    rows = np.array([i for i, p in enumerate(own.patients) if p in kept], np.int64)
    place = assignment(clusters, [own.patients[i] for i in rows])
    far = np.sqrt(((own.codes[rows].astype(np.float64) - seen[place]) ** 2).sum(axis=1))
    sizes = np.bincount(place)
    means = np.bincount(place, weights=far) / sizes
    found = {"IL": float(far.mean()), "re-id": float((~(far >= net.threshold)).mean())}
    low, high = np.quantile(far, [0.05, 0.95])
    found |= {"5 %": float(low), "95 %": float(high), "threshold": float(net.threshold)}
    return found | {"clusters below": float((~(means >= net.threshold)).mean())}


def mixed(of: People, clusters: Clusters, k: int, how: str) -> tuple[Clusters, Images] | None:
    """Identity mixing: as the paper wrote it, or ours; nothing where every cluster stays at risk."""
    view = Setting(codec(of.work, of.seed), _gallery(of), allowed=lambda _: True)  # the paper knows no l-diversity
    codes, rng = latents(of.work, of.seed, of.rows), of.work.rng("mixing", of.seed, k, how)
    try:
        if how == MIXINGS[3]:
            found = mix(codes, clusters, view, Mixing(k), rng)
        else:
            found = mix_published(codes, clusters, view, _PAPER[how](k), rng)
    except CohortTooSmallError:
        return None
    return found.clusters, found.images


def _gallery(of: People) -> Gallery:
    judges = (recogniser(of.work, of.seed, 0), recogniser(of.work, of.seed, 1))
    gallery: Gallery = of.work.held(f"gallery {of.seed}", lambda: gallery_of(of.cohort, judges))
    return gallery


_PAPER: Final[Mapping[str, Callable[[int], PaperMixing]]] = {
    "without adjustment": lambda k: PaperMixing(rounds=1),
    "adjusted": lambda k: PaperMixing(),
    "random weights": lambda k: PaperMixing(delta=0.3 / k),
}
MIXINGS: Final = ("without adjustment", "adjusted", "random weights", "ours, bounded and re-checked")
