"""The copy check: images and parts of them, small and standardised, correlated with every image of a reference.

Normalised cross-correlation: each small image less its mean, of unit length, so that brightness and contrast drop
out. All chests look alike at that size; so what the reference's images have in common is taken away first, and what
is correlated is how an image differs from their mean. Whole (blurred, against noise), by overlapping patches of a
quarter of the area (a part may be copied into another image), and mirrored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, normalize, pad

from agent.models.image_tensors import resized, with_channels

SIDE: Final = 16  # pixels a side of a small image
FINE: Final = 2 * SIDE  # ... of one that is resampled before it is averaged
PATCH: Final = 8  # of a patch
STEP: Final = 4  # between patches: 3 x 3 of them
GRID: Final = (SIDE - PATCH) // STEP + 1
FLAT: Final = 4.0 / 255  # standard deviation in [-1, 1], two levels of 256, below which there is nothing to copy
PLAIN: Final = 0.05  # of unit length: what differs less from the mean differs from it by chance
BLUR: Final = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)  # binomial, of whole images
_BLOCK: Final = 8192  # images of the reference at once


class Thumbnails(NamedTuple):
    """Small images and patches, of zero mean and unit length, zero where they are flat; and finer ones."""

    whole: Tensor  # (n, SIDE, SIDE)
    patches: Tensor  # (n, GRID, GRID, PATCH, PATCH)
    fine: Tensor  # (n, FINE, FINE) in [-1, 1]

    def mirrored(self) -> Thumbnails:
        """Of the images with left and right exchanged."""
        return Thumbnails(self.whole.flip(2), self.patches.flip(2, 4), self.fine.flip(2))

    def at(self, places: Tensor) -> Thumbnails:
        """Some of them, by their places."""
        return Thumbnails(*(part[places] for part in self))

    def rows(self) -> tuple[Tensor, Tensor]:
        """Flat: (n, SIDE²) and (n, GRID², PATCH²)."""
        return self.whole.flatten(1), self.patches.flatten(3).flatten(1, 2)


class CopySimilarity(NamedTuple):
    """The highest correlation of each image with any of the reference, and with which."""

    whole: NDArray[np.float64]  # (n,)
    whole_at: NDArray[np.int64]
    patch: NDArray[np.float64]
    patch_at: NDArray[np.int64]


def thumbnail_vectors(images: Tensor) -> Thumbnails:
    """Images (n, 1 | 3, h, w) in [-1, 1], coloured ones as luma."""
    grey = with_channels(images.float(), 1)
    small = resized(grey, SIDE)[:, 0]
    patches = small.unfold(1, PATCH, STEP).unfold(2, PATCH, STEP)
    return Thumbnails(_standard(_smooth(small)), _standard(patches), resized(grey, FINE)[:, 0])


def _smooth(small: Tensor) -> Tensor:
    """Blurred by one pixel of (n, SIDE, SIDE): noise goes, and how whole chests differ lies in broad strokes."""
    weights = torch.tensor(BLUR, device=small.device)
    wide = pad(small[:, None], (2, 2, 2, 2), mode="replicate")
    smooth: Tensor = conv2d(wide, torch.outer(weights, weights)[None, None])[:, 0]
    return smooth


def _standard(small: Tensor) -> Tensor:
    deviation = small - small.mean(dim=(-2, -1), keepdim=True)
    spread = deviation.square().mean(dim=(-2, -1), keepdim=True).sqrt()
    unit = deviation / torch.linalg.vector_norm(deviation, dim=(-2, -1), keepdim=True).clamp_min(1e-12)
    return torch.where(spread >= FLAT, unit, torch.zeros_like(unit))


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A reference's images as the copy check sees them."""

    means: tuple[Tensor, Tensor]  # (SIDE²,), (GRID², PATCH²): what all have in common
    whole: Tensor  # (n, SIDE²) of unit length, or zero
    patches: Tensor  # (GRID², n, PATCH²)

    @classmethod
    def of(cls, seen: Thumbnails, means: tuple[Tensor, Tensor] | None = None) -> Copies:
        """Take away what is common to the images of a reference: their mean, unless another is given."""
        whole, patches = seen.rows()
        means = means or (whole.mean(dim=0), patches.mean(dim=0))
        return cls(means, _less(whole, means[0]), _less(patches, means[1]).transpose(0, 1).contiguous())

    def alike(self, made: Thumbnails, left_out: Tensor | None = None) -> CopySimilarity:
        """The highest correlations with any image of the reference, either way round.

        Args:
            made: of m images.
            left_out: (m,) a place in the reference that does not count for each; -1: none.
        """
        best = [(torch.full((len(made.whole),), -1.0), torch.zeros(len(made.whole), dtype=torch.int64))] * 2
        best = [(value.to(self.whole.device), place.to(self.whole.device)) for value, place in best]
        for start in range(0, len(self.whole), _BLOCK):
            found = self.correlations(made, slice(start, start + _BLOCK))
            for kind, values in enumerate(found):
                if left_out is not None:
                    _forget(values, left_out - start)
                value, place = values.max(dim=1)
                better = value > best[kind][0]
                best[kind] = (
                    torch.where(better, value, best[kind][0]),
                    torch.where(better, place + start, best[kind][1]),
                )
        whole, patch = ((value.double().cpu().numpy(), place.cpu().numpy()) for value, place in best)
        return CopySimilarity(*whole, *patch)

    def correlations(self, made: Thumbnails, block: slice) -> tuple[Tensor, Tensor]:
        """(m, b) each: of whole images, and the highest of their patches; the higher of both ways round."""
        whole, patch = torch.empty(0), torch.empty(0)
        for number, side in enumerate((made, made.mirrored())):
            rows, parts = side.rows()
            own = _less(rows, self.means[0]) @ self.whole[block].T
            whole = torch.maximum(whole, own) if number else own
            for place, part in enumerate(_less(parts, self.means[1]).transpose(0, 1)):
                own = part @ self.patches[place, block].T
                patch = torch.maximum(patch, own) if number or place else own
        return whole, patch


def _less(rows: Tensor, mean: Tensor) -> Tensor:
    """How standardised rows differ from the mean row, of unit length; zero where they are flat or hardly differ."""
    rest = rows - mean
    told = rows.any(dim=-1, keepdim=True) & (torch.linalg.vector_norm(rest, dim=-1, keepdim=True) > PLAIN)
    return torch.where(told, normalize(rest, dim=-1), torch.zeros_like(rest))


def _forget(values: Tensor, places: Tensor) -> None:
    here = torch.nonzero((places >= 0) & (places < values.shape[1])).flatten()
    values[here, places[here]] = -1.0
