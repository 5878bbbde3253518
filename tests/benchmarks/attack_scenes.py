"""What is attacked: real and made pictures of people, and the mechanisms that anonymise them.

Digits (scikit-learn) and faces (scikit-image) are real; their second picture is the first with a camera's noise.
Fundus phantoms have a true second picture, of another visit. Bases and thresholds come from people who are in nothing
else; the attacker trains on people of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from torch import Tensor

from agent.domain import Clusters, Cohort, Image, Latents, Patient
from agent.mechanisms.anonfaces.gallery import gallery_of
from agent.mechanisms.anonfaces.identity_mixing import Mixing, Setting, mix
from agent.mechanisms.common.linear_codec import Basis, fit_basis, invert
from agent.mechanisms.ksame.mechanism import KSame
from agent.microaggregation.partition import partition
from agent.models.image_tensors import to_tensor
from deploy.phantoms.fundus import APTOS_SHARES, fundus_patients
from deploy.reproduction.attacks.membership import Anonymise, Pool, Published
from deploy.reproduction.attacks.recognition import vectors
from deploy.reproduction.averaging_methods import pixel_average
from deploy.reproduction.datasets import RealImages

Pictures = NDArray[np.float32]
CONTROL, PIXEL, PCA, MIX = "nothing done", "k-Same-Pixel", "k-Same-PCA", "AnonFACES' mix"


class Components:
    """A recogniser of principal components, each over its spread: eigenfaces (Turk & Pentland 1991)."""

    def __init__(
        self, name: str, prepare: Callable[[Tensor], Tensor], public: tuple[Pictures, Pictures], d: int
    ) -> None:
        """Axes, spreads and threshold come from two pictures each of public people.

        The threshold takes 95 % of second pictures for the same person's, or 1 of 2,000 strangers' if that is less.
        """
        self.name, self.threshold, self.prepare = name, 1.0, prepare
        seen = prepare(to_tensor(public[0])).flatten(1).double()
        self.mean = seen.mean(dim=0)
        _, spread, axes = torch.linalg.svd(seen - self.mean, full_matrices=False)
        self.axes = (axes[:d] / spread[:d, None]).T
        far = cdist(vectors(self, public[0]), vectors(self, public[1]))
        strangers = far[~np.eye(len(far), dtype=bool)]
        self.threshold = float(min(np.quantile(far.diagonal(), 0.95), np.quantile(strangers, 0.0005)))

    def embed(self, images: Tensor) -> Tensor:
        """(n, d)."""
        seen = (self.prepare(images).flatten(1).double() - self.mean) @ self.axes
        return torch.nn.functional.normalize(seen + 1e-12, dim=1)


def _edges(images: Tensor) -> Tensor:
    """Differences of neighbours, across and down."""
    return torch.cat([images.diff(dim=2).flatten(1), images.diff(dim=3).flatten(1)], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """People, and all that is known of people who are not among them."""

    name: str
    k: int
    people: Pool  # one picture each
    again: Pool  # another picture of the same
    own: Pool  # of the attacker's
    labels: NDArray[np.int64]  # of the people, then of the attacker's
    basis: Basis
    judges: tuple[Components, Components]  # of pixels and of edges

    def mechanisms(self) -> dict[str, Anonymise]:
        """By name; every call draws anew."""
        seeds = itertools.count(1)
        return {
            CONTROL: _as_they_are,
            PIXEL: lambda pool: _pixel(pool, self.k, seeds),
            PCA: lambda pool: _pca(pool, self.k, self.basis, seeds),
            MIX: lambda pool: _mix(pool, self, seeds),
        }


def digits(real: RealImages) -> Scene:
    """880 people of one digit each, 440 of the attacker's."""
    pictures, labels = real.digits, real.digit_labels
    parts = (pictures[:880], pictures[880:1320], pictures[1320:])
    return _scene("digits", 11, tuple((p, _noisy(p)) for p in parts), labels[:1320], 40)


def faces(real: RealImages) -> Scene:
    """60 faces; the attacker's 40 are also those that basis and thresholds come from."""
    known = (real.faces[60:], _noisy(real.faces[60:]))
    people = (real.faces[:60], _noisy(real.faces[:60]))
    return _scene("faces", 5, (people, known, known), np.arange(100, dtype=np.int64) % 2, 30)


def fundus() -> Scene:
    """440 made-up right eyes in grey, 32 px, at two visits; 220 of the attacker's."""
    drawn = fundus_patients(820, np.random.default_rng(0), 32, 2, ("right",), APTOS_SHARES)
    grey = np.stack([[photo.pixels.mean(axis=2) / 255.0 for photo in one.photographs] for one in drawn])
    parts = tuple((part[:, 0], part[:, 1]) for part in np.split(grey.astype(np.float32), [440, 660]))
    return _scene("fundus phantoms", 11, parts, np.array([one.grade for one in drawn[:660]], np.int64), 60)


def cohort_of(pool: Pool) -> Cohort:
    """Everybody in the pool as a patient with all their pictures."""
    people = np.unique(pool.owners)
    own = [tuple(Image(x, "") for x in pool.images[pool.owners == p]) for p in people]
    return Cohort(tuple(Patient(pseudonym(int(p)), images) for p, images in zip(people, own, strict=True)))


def pseudonym(owner: int) -> str:
    """Sorts as the number does."""
    return f"id{owner:06d}"


def pixelated(pool: Pool) -> Pictures:
    """Blocks of four or five pixels (two where the pictures are small): what no parrot is fooled by."""
    side = pool.images.shape[1]
    block = next(size for size in (5, 4, 2) if side % size == 0 and side // size >= 4)
    small = pool.images.reshape(-1, side // block, block, side // block, block).mean(axis=(2, 4))
    return np.repeat(np.repeat(small, block, axis=1), block, axis=2).astype(np.float32)


def replaced(anonymise: Anonymise, blank: Pictures) -> Callable[[Pool], Pictures]:
    """Every picture by its cluster's; of people behind no picture by one that is the same for all of them."""

    def deidentify(pool: Pool) -> Pictures:
        published = anonymise(pool)
        of = {p: j for j, cluster in enumerate(published.members) for p in cluster}
        return np.stack([published.representatives[of[p]] if p in of else blank for p in pool.owners.tolist()])

    return deidentify


def _noisy(pictures: Pictures) -> Pictures:
    noise = np.random.default_rng(len(pictures)).normal(0, 0.02, pictures.shape)
    return np.clip(pictures + noise, 0, 1).astype(np.float32)


def _scene(
    name: str, k: int, parts: tuple[tuple[Pictures, Pictures], ...], labels: NDArray[np.int64], d: int
) -> Scene:
    (first, second), (own, _), public = parts
    basis = fit_basis(public[0], d, "public")
    judges = (Components("pixels", lambda x: x, public, d), Components("edges", _edges, public, d))
    owners = np.arange(len(first), dtype=np.int64)
    theirs = Pool(own, len(first) + np.arange(len(own), dtype=np.int64))
    return Scene(name, k, Pool(first, owners), Pool(second, owners), theirs, labels, basis, judges)


def _as_they_are(pool: Pool) -> Published:
    return Published(pool.images, tuple((int(p),) for p in pool.owners))


def _members(clusters: Clusters) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(p[2:]) for p in cluster) for cluster in clusters.members)


def _published(images: NDArray[np.uint8], clusters: Clusters) -> Published:
    return Published(images.astype(np.float32) / np.float32(255), _members(clusters))


def _pixel(pool: Pool, k: int, seeds: Iterator[int]) -> Published:
    cohort, rng = cohort_of(pool), np.random.default_rng(next(seeds))
    flat = np.stack([patient.images[0].pixels.ravel() for patient in cohort.patients])
    latents = Latents(flat, tuple(patient.pseudonym for patient in cohort.patients))
    clusters = partition(latents, [""] * len(flat), k, 1, rng)
    return _published(pixel_average(cohort, clusters), clusters)


def _pca(pool: Pool, k: int, basis: Basis, seeds: Iterator[int]) -> Published:
    made, clusters = KSame(k, 1, basis).run(cohort_of(pool), np.random.default_rng(next(seeds)))
    return _published(made.images, clusters)


def _mix(pool: Pool, scene: Scene, seeds: Iterator[int]) -> Published:
    """As ``agent.mechanisms.anonfaces.mechanism``, with the basis in the generator's place."""
    cohort, rng = cohort_of(pool), np.random.default_rng(next(seeds))
    latents = invert(cohort, scene.basis)
    seen = vectors(scene.judges[0], np.stack([patient.images[0].pixels for patient in cohort.patients]))
    space = Latents(seen.astype(np.float32), latents.patients)
    clusters = partition(space, [""] * len(latents.patients), scene.k, 1, rng)
    setting = Setting(scene.basis, gallery_of(cohort, scene.judges), lambda _: True)
    mixed = mix(latents, clusters, setting, Mixing(scene.k), rng)
    return _published(mixed.images, mixed.clusters)
