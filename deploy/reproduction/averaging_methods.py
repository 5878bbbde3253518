"""Ways to average a cluster, and what each of them would release: k-SALSA, its baselines and its ablations.

Sections 4.2 and 4.6. All methods average the same clusters, and what they draw is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Clusters, Cohort, Latents
from agent.mechanisms.ksalsa.style_alignment import Alignment, Grid, Networks, align, sources_of
from agent.microaggregation.aggregation import aggregate_labels, average, patient_label
from agent.microaggregation.partition import partition
from deploy.reproduction.experiment import Rows, Settings, Work, cohort_of
from deploy.reproduction.networks import codec, features, latents, linear, linear_codes, style
from deploy.reproduction.requirements import classes

Images = NDArray[np.uint8]
INVERTED, PIXEL, PCA, CENTROID, SALSA = "GAN-Inverted", "k-Same-Pixel", "k-Same-PCA", "k-Centroid", "k-SALSA"
ORIGINAL, HELD_OUT = "Original", "real, held out"
AVERAGED: Final = (PIXEL, PCA, CENTROID, SALSA)
ABLATIONS: Final[dict[str, Callable[[Alignment], Alignment]]] = {  # Table 4 and Supplementary Table 5
    "style only": lambda base: replace(base, lam=0.0),
    "content only": lambda base: replace(base, lam=1.0),
    "global style": lambda base: replace(base, grid=Grid(1)),
    "no alignment": lambda base: replace(base, matching="same"),
    "MSE-MSE": lambda base: replace(base, align_by="mse", compare_by="mse"),
    "COS-COS": lambda base: replace(base, align_by="cos", compare_by="cos"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Some patients, partitioned."""

    work: Work
    seed: int
    rows: Rows  # of their images
    k: int
    latents: Latents
    clusters: Clusters
    labels: tuple[str, ...]  # of the clusters

    @property
    def cohort(self) -> Cohort:
        """The patients with their images; made anew each time, since it is four times the images' bytes."""
        return cohort_of(self.work.samples, self.rows)

    @property
    def key(self) -> str:
        """Of what is computed for it."""
        return f"seed {self.seed}, k {self.k}, patients {len(self.latents.patients)} from {int(self.rows[0])}"

    @property
    def told(self) -> str:
        """For people."""
        clusters = len(self.clusters.members)
        return f"{clusters} clusters of {len(self.latents.patients)} patients, k {self.k}, seed {self.seed}"


def group(work: Work, seed: int, rows: Rows, k: int) -> Group:
    """Partition the patients of some rows in W+, at k and without a rule about labels, as the paper does."""

    def make() -> Group:
        codes = latents(work, seed, rows)
        cohort = cohort_of(replace(work.samples, labels=classes(work.samples)), rows)
        labels = [patient_label(patient) for patient in cohort.patients]
        clusters = partition(codes, labels, k, 1, work.rng("clusters", seed, k, len(rows), int(rows[0])))
        return Group(work, seed, rows, k, codes, clusters, aggregate_labels(cohort, clusters))

    found: Group = work.held(f"group {seed} {k} {len(rows)} {int(rows[0])}", make)
    return found


def _centroid(of: Group) -> Images:
    return codec(of.work, of.seed).decode(average(of.latents, of.clusters))


def pixel_average(cohort: Cohort, clusters: Clusters) -> NDArray[np.uint8]:
    """k-Same-Pixel: the mean image of each cluster, of the mean images of its patients.

    k-SALSA, section 4.2; Newton, Sweeney & Malin 2005. A baseline: its membership attack finds nearly everybody.

    Returns:
        (m, h, w) or (m, h, w, 3) uint8, in the clusters' order. Summed in float64.
    Raises:
        ValueError: a cluster names a patient who is not in the cohort, or is empty, or there is no cluster.
    """
    images = {patient.pseudonym: [image.pixels for image in patient.images] for patient in cohort.patients}
    for cluster in clusters.members:
        if not cluster or not all(patient in images for patient in cluster):
            raise ValueError("every cluster must hold patients of the cohort")
    means = [
        np.mean([np.mean(images[patient], axis=0, dtype=np.float64) for patient in cluster], axis=0)
        for cluster in clusters.members
    ]
    if not means:
        raise ValueError("there is no cluster to average")
    return np.rint(np.stack(means) * 255.0).astype(np.uint8)


def _pixel(of: Group) -> Images:
    return pixel_average(of.cohort, of.clusters)


def _pca(of: Group) -> Images:
    means = average(linear_codes(of.work, of.seed, of.rows), of.clusters)
    return linear(of.work, of.seed).decode(means).reshape(-1, *of.work.samples.images.shape[1:])


def aligned_codes(of: Group, plan: Alignment) -> NDArray[np.float32]:
    """(m, d): the representatives after local style alignment (Algorithm 1)."""
    styled = codec(of.work, of.seed)
    networks = Networks(styled.generator, style(of.work), features(of.work, of.seed))

    def compute() -> Mapping[str, NDArray[np.float32]]:
        start = styled.ws(average(of.latents, of.clusters)).cpu().numpy()
        found = align(networks, start, sources_of(of.cohort, of.clusters), plan)
        return {"ws": found.ws.reshape(len(found.ws), -1)}

    told = f"aligning styles: {of.told}, {_named(of.work.settings, plan)}"
    codes: NDArray[np.float32] = of.work.arrays(f"aligned, {of.key}, {plan}", compute, told)["ws"]
    return codes


def _named(settings: Settings, plan: Alignment) -> str:
    """What a person calls an alignment."""
    known = {change(settings.alignment): name for name, change in ABLATIONS.items()} | {settings.alignment: SALSA}
    return known.get(plan, "as configured")


def _salsa(plan: Alignment) -> Callable[[Group], Images]:
    return lambda of: codec(of.work, of.seed).decode(aligned_codes(of, plan))


def methods(settings: Settings) -> dict[str, Callable[[Group], Images]]:
    """Every way to average, by its name: section 4.2, Table 4 and Supplementary Table 5."""
    base = settings.alignment
    ways: dict[str, Callable[[Group], Images]] = {
        PIXEL: _pixel,
        PCA: _pca,
        CENTROID: _centroid,
        SALSA: _salsa(base),
    }
    return ways | {name: _salsa(change(base)) for name, change in ABLATIONS.items()}


def representatives(of: Group, method: str) -> Images:
    """One image for each cluster, (m, s, s[, 3]), made once."""
    make = methods(of.work.settings)[method]
    told = f"drawing {method}: {of.told}"
    pictures: Images = of.work.arrays(f"{method}, {of.key}", lambda: {"images": make(of)}, told)["images"]
    return pictures


def released(work: Work, seed: int, k: int, method: str) -> tuple[Images, tuple[str, ...]]:
    """The images and labels that train a classifier; those that are not averaged are drawn to be as many."""
    parts = work.parts(seed)
    of = group(work, seed, parts.cohort, k)
    if method in methods(work.settings):
        return representatives(of, method), of.labels
    rng, m = work.rng("drawn", seed, k), len(of.clusters.members)
    source = parts.test if method == HELD_OUT else parts.cohort
    people = np.unique(work.samples.owners[source])
    chosen = np.sort(rng.choice(people, min(m, len(people)), replace=False))
    first = np.array([source[work.samples.owners[source] == p][0] for p in chosen])
    told = classes(work.samples)
    labels = tuple(told[row] for row in first)
    if method in (ORIGINAL, HELD_OUT):
        return work.samples.images[first], labels
    codes = of.latents.codes[np.searchsorted(people, chosen)]
    return codec(work, seed).decode(codes), labels
