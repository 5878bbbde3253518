"""Compare synthetic images with the patients' images before they may leave (P7).

Every synthetic image is compared with every image of the reference: exhaustive nearest neighbours by the verifier's
embedding, the verifier itself on the nearest patients, and copy checks: of the entire image, of parts, and of the
nearest patients' images after undoing a crop or a turn. Privacy Distillation (section 3.1) compares a sample only
with the one real image of its own prompt, at a threshold of 0.5; both miss images memorised under another prompt.
Images that cannot be judged are dropped.

Near-duplicates of images, as a generator that remembers a patient would make them: what a vetting must find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from agent.intervals import Proportion, bounds
from agent.models.image_tensors import to_bytes, to_tensor, to_unit
from agent.models.recognition.recogniser import RecogniserError
from agent.vetting.nearest_neighbours import candidates, exhaustive, searches, verified
from agent.vetting.reference import BATCH, Reference, Say, Vetting, look
from agent.vetting.requirements import CAUGHT, PLANTED

TURN: Final = torch.pi * 5 / 180  # rad
CROP: Final = 0.1  # of the side is cut off
LIGHT: Final = (0.15, 0.3)  # brightness in units of [-1, 1], and contrast as a factor 1 ± so much
NOISE: Final = 0.1  # standard deviation in [-1, 1]: 13 levels of 256


def exact(images: Tensor, _: torch.Generator) -> Tensor:
    """The images (n, c, h, w) in [-1, 1] themselves."""
    return images


def contrast(images: Tensor, generator: torch.Generator) -> Tensor:
    """Darker or brighter, flatter or harder."""
    light, factor = (_uniform(images, most, generator) for most in LIGHT)
    return (images * (1.0 + factor) + light).clamp(-1.0, 1.0)


def rotated(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turned by ``TURN`` about the middle, one way or the other."""
    return _seen_through(
        images, _sign(images, generator) * TURN, torch.ones(len(images)), torch.zeros(len(images), 2)
    )


def cropped(images: Tensor, generator: torch.Generator) -> Tensor:
    """A window that lacks ``CROP`` of either side, anywhere, at the old size."""
    where = (torch.rand(len(images), 2, generator=generator) * 2.0 - 1.0) * CROP
    return _seen_through(images, torch.zeros(len(images)), torch.full((len(images),), 1.0 - CROP), where)


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    """With Gaussian noise."""
    return (images + NOISE * torch.randn(images.shape, generator=generator)).clamp(-1.0, 1.0)


def flipped(images: Tensor, _: torch.Generator) -> Tensor:
    """Left and right exchanged."""
    return images.flip(3)


def combined(images: Tensor, generator: torch.Generator) -> Tensor:
    """Contrast, rotation, crop and noise, one on the other, and every other one flipped."""
    for change in (rotated, cropped, contrast, noisy):
        images = change(images, generator)
    return torch.where(_sign(images, generator)[:, None, None, None] > 0, images, images.flip(3))


KINDS: Final[Mapping[str, Callable[[Tensor, torch.Generator], Tensor]]] = MappingProxyType(
    {
        "exact": exact,
        "contrast": contrast,
        "rotation": rotated,
        "crop": cropped,
        "noise": noisy,
        "flip": flipped,
        "combined": combined,
    }
)


SINGLE: Final = tuple(kind for kind in KINDS if kind != "combined")  # one change each


def _uniform(images: Tensor, most: float, generator: torch.Generator) -> Tensor:
    return ((torch.rand(len(images), generator=generator) * 2.0 - 1.0) * most)[:, None, None, None]


def _sign(images: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (len(images),), generator=generator) * 2.0 - 1.0


def _seen_through(images: Tensor, angles: Tensor, zooms: Tensor, shifts: Tensor) -> Tensor:
    """Resampled: angles (n,) in rad, sides that are seen (n,), their middles (n, 2) in half sides; edges go on."""
    cos, sin = zooms * angles.cos(), zooms * angles.sin()
    theta = torch.stack([torch.stack([cos, -sin, shifts[:, 0]], 1), torch.stack([sin, cos, shifts[:, 1]], 1)], 1)
    grid = affine_grid(theta, list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


REASONS: Final = ("", "verifier", "copy", "patch", "moved", "not a number")  # "": kept
KNOWN: Final = 0.5  # ... and this share by the verifier alone: the copy check finds some of them without any
_BLOCK: Final = 512  # synthetic images at once
Images = NDArray[np.uint8]  # (n, h, w) or (n, h, w, 3)


@dataclass(frozen=True, slots=True, eq=False)
class FilterResult:
    """The result for each image. Scores and indices are functions of patients: they stay inside the site."""

    scores: NDArray[np.float64]  # (n,) highest log-odds that it shows a patient; NaN: it could not be judged
    nearest: NDArray[np.int64]  # (n,) place in the reference of what it is most like
    reasons: tuple[str, ...]  # n, of REASONS

    @property
    def kept(self) -> NDArray[np.bool_]:
        """(n,): no check found it like anybody."""
        return np.array([reason == "" for reason in self.reasons], np.bool_)


@dataclass(frozen=True, slots=True)
class Power:
    """What the vetting found of near-duplicates of the reference's own images, planted on purpose.

    One image of each patient is planted, once for each kind; a patient is one trial of every interval, however many
    kinds there are. ``caught``, ``verifier`` and ``unseen`` cover the single changes. All changes applied together
    (``combined``) are planted too, and appear in ``kinds`` alone: a small image under such noise keeps less than what
    separates two patients, and no threshold that keeps images of strangers finds it.
    """

    caught: Proportion  # of all single changes that were planted, by all checks
    verifier: Proportion  # ... by the verifier alone
    unseen: Proportion  # ... by the unseen verifier, which measures what is left
    kinds: Mapping[str, Proportion]  # of :data:`agent.vetting.filter.KINDS`, by all checks
    other_visits: Proportion | None  # other images of a patient, found by the rest of them; None: everybody has one

    def demand(self) -> None:
        """Refuse a vetting that misses copies: that it finds nothing in a set would prove nothing.

        Raises:
            RecogniserError: too few of the planted were found in all, of one kind, or by a verifier alone. The text
            holds
                no interval, from which a number of patients would follow.
        """
        worst = min(SINGLE, key=lambda kind: self.kinds[kind].value)
        alone = min(self.verifier.low, self.unseen.low)
        if not (self.caught.low >= CAUGHT and self.kinds[worst].value >= CAUGHT and alone >= KNOWN):
            found = ", ".join(
                f"{name} {value:.2f}"
                for name, value in (
                    ("in all", self.caught.value),
                    (f"of the worst kind, {worst},", self.kinds[worst].value),
                    ("by the verifier", self.verifier.value),
                    ("by the unseen one", self.unseen.value),
                )
            )
            raise RecogniserError(
                f"of near-duplicates that were planted, {CAUGHT:g} must be found, in all and of every kind, and "
                f"{KNOWN:g} by each verifier alone, for sure with so many patients. Found were {found}: train the "
                "verifiers longer, or on images more like these"
            )


def vet(images: Images, reference: Reference, vetting: Vetting, say: Say = lambda _done, _of: None) -> FilterResult:
    """Compare every synthetic image with every image of the reference.

    Args:
        images: (n, h, w[, 3]) of the reference's shape.
        reference: of :func:`agent.vetting.reference.reference_of`, for this vetting.
        vetting: public configuration.
        say: told how many have been compared, of how many.
    Returns:
        What is kept, and why the rest is not: ``verifier``, the log-odds reach the threshold for a gallery of that
        size; ``copy``, ``patch`` or ``moved``, a correlation of the whole, of a part, or of the whole once a crop or
        a turn is undone does; ``not a number``, no judgement, as of an image of one grey.
    Raises:
        ValueError: images of another shape, or a reference of another vetting.
    """
    _fit(images, reference, vetting)
    found = _judged(images, reference, vetting, np.full(len(images), -1, np.int64), say)
    return FilterResult(found.scores, found.nearest, found.reasons(reference.thresholds))


def measured(images: Images, reference: Reference, vetting: Vetting) -> Proportion:
    """R_re-id: the share of images that the unseen verifier takes for a patient, comparing all with all.

    At its own threshold for a gallery of that size. What it gives no number for counts as a patient found.

    Raises:
        ValueError: no image, images of another shape, or a reference of another vetting.
    """
    _fit(images, reference, vetting)
    if not len(images):
        raise ValueError("nothing to measure")
    return _share(_taken(images, reference, vetting))


def _taken(images: Images, reference: Reference, vetting: Vetting) -> NDArray[np.bool_]:
    """(n,): which the unseen verifier takes for a patient."""
    made = look(_batches(images), (vetting.unseen,), vetting.device)[0][0]
    scores = exhaustive(vetting.unseen, made, reference.unseen)[0]
    out: NDArray[np.bool_] = ~(scores < reference.thresholds["unseen"])
    return out


def power(reference: Reference, vetting: Vetting, generator: torch.Generator) -> Power:
    """Plant near-duplicates of the reference's own images, and count what the vetting finds.

    A planted copy's image stays in the reference, for it is what the copy is of. Other visits are the images of
    patients who have two or more, looked for among the rest.

    Raises:
        ValueError: a reference of another vetting.
    """
    _fit(np.zeros((0, *reference.shape), np.uint8), reference, vetting)
    order = torch.randperm(len(reference), generator=generator).numpy()
    chosen = order[np.unique(reference.owners[order], return_index=True)[1]]  # one of each patient, by chance
    chosen = chosen[torch.randperm(len(chosen), generator=generator).numpy()][:PLANTED]
    pictures = to_tensor(np.stack([reference.images[place].pixels for place in chosen]))
    none = np.full(len(chosen), -1, np.int64)
    caught, seen, measured_too = {}, {}, {}
    for kind, change in KINDS.items():
        planted = to_bytes(to_unit(change(pictures, generator)))
        found = _judged(planted, reference, vetting, none)
        caught[kind] = np.array([reason != "" for reason in found.reasons(reference.thresholds)])
        seen[kind] = found.scores >= reference.thresholds["verifier"]
        measured_too[kind] = _taken(planted, reference, vetting)
    kinds = {kind: _share(told) for kind, told in caught.items()}
    every, alone, unseen = (_by_patient(told) for told in (caught, seen, measured_too))
    return Power(every, alone, unseen, kinds, _other_visits(reference, vetting, generator))


def _by_patient(told: Mapping[str, NDArray[np.bool_]]) -> Proportion:
    """The share over the single changes; a patient is one trial, and counts with the mean over the kinds."""
    means = np.mean([told[kind] for kind in SINGLE], axis=0)
    value = float(means.mean())
    low, high = bounds(value * len(means), len(means))
    return Proportion(value, min(low, value), max(high, value))


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """What every check says of each image."""

    scores: NDArray[np.float64]  # (n,) log-odds, NaN where there are none
    nearest: NDArray[np.int64]
    whole: NDArray[np.float64]  # (n,) correlations
    patch: NDArray[np.float64]
    moved: NDArray[np.float64]

    def reasons(self, thresholds: Mapping[str, float]) -> tuple[str, ...]:
        """The first check that finds it like somebody; written so that NaN is never kept."""
        checks = {"verifier": self.scores, "copy": self.whole, "patch": self.patch, "moved": self.moved}
        known = np.all([np.abs(values) < np.inf for values in checks.values()], axis=0)
        told = np.full(len(self.scores), "", object)
        for name, values in reversed(checks.items()):
            told[~(values < thresholds[name])] = name
        told[~known] = "not a number"
        return tuple(told.tolist())


def _judged(
    images: Images,
    reference: Reference,
    vetting: Vetting,
    left_out: NDArray[np.int64],
    say: Say = lambda _done, _of: None,
) -> _Judged:
    """Every check on every image; ``left_out`` (n,) is a place that does not count for each, or -1."""
    by = searches(reference.seen, reference.owners, vetting.top)
    parts = []
    for start in range(0, len(images), _BLOCK):
        block = slice(start, start + _BLOCK)
        (made,), small = look(_batches(images[block]), (vetting.verifier,), vetting.device)
        places = torch.from_numpy(left_out[block]).to(made.features.device)
        scores, nearest = verified(made, reference.seen, vetting.verifier, by, places)
        # nothing can be said of an image of one grey: no correlation, and no verifier ever learned one
        scores = np.where(small.whole.flatten(1).any(dim=1).cpu().numpy(), scores, np.nan)
        alike = reference.copies.alike(small, places)
        moved, moved_at = reference.moved.best(small.fine, candidates(made, by, places))
        told = {
            "verifier": (scores, nearest),
            "copy": (alike.whole, alike.whole_at),
            "patch": (alike.patch, alike.patch_at),
            "moved": (moved.double().cpu().numpy(), moved_at.cpu().numpy()),
        }
        for name in ("moved", "patch", "copy", "verifier"):  # the reviewer sees what it is a copy of, where it goes
            reached = told[name][0] >= reference.thresholds[name]
            nearest = np.where(reached, told[name][1], nearest)
        parts.append((scores, nearest, *(told[name][0] for name in ("copy", "patch", "moved"))))
        say(min(start + _BLOCK, len(images)), len(images))
    if not parts:
        return _Judged(np.zeros(0), np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0))
    return _Judged(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _other_visits(reference: Reference, vetting: Vetting, generator: torch.Generator) -> Proportion | None:
    """Images of patients with two or more, without the image itself in the reference."""
    counts = np.bincount(reference.owners)
    again = np.flatnonzero(counts[reference.owners] >= 2)
    if not len(again):
        return None
    chosen = again[torch.randperm(len(again), generator=generator)[:PLANTED].numpy()]
    pictures = np.stack([reference.image(int(place)) for place in chosen])
    found = _judged(pictures, reference, vetting, chosen)
    return _share(np.array([reason != "" for reason in found.reasons(reference.thresholds)]))


def _batches(images: Images) -> Iterator[Tensor]:
    for start in range(0, len(images), BATCH):
        yield to_tensor(images[start : start + BATCH].astype(np.float32) / np.float32(255))


def _fit(images: Images, reference: Reference, vetting: Vetting) -> None:
    if images.dtype != np.uint8 or tuple(images.shape[1:]) != reference.shape:
        raise ValueError("made images are uint8 and of the reference's shape")
    if reference.form != vetting.form:
        raise ValueError("the reference was made for another vetting: its thresholds are not this one's")


def _share(found: NDArray[np.bool_]) -> Proportion:
    hits, of = int(found.sum()), len(found)
    return Proportion(hits / of, *bounds(hits, of))
