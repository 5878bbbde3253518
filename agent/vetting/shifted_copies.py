"""The copy check for images that were moved: a window of nine tenths of the side, and turns by up to five degrees.

A cropped or turned copy matches its original pixel by pixel once the movement is undone. So every synthetic image is
transformed into many *views*, each of which undoes one movement, and each view is correlated with the small images of
the candidates. Pixels that a movement has cut off are unknown: a view has a mask, and means, lengths and products are
over the mask alone (masked normalised cross-correlation, Padfield 2012, IEEE TIP 21(5)). Replicated borders in its
place would hide the copy. An error of a fifth of a pixel is too much between very similar patients: the views of the
most similar candidates are searched again, in steps of a tenth of a pixel.

All chests look alike at that size. What the mean image of the reference explains of either side, over the mask and
whatever its contrast, is taken away first: what is correlated is the rest (a partial correlation). The candidates are
the images that the verifier is asked about, for the views are too many for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import pi
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, grid_sample

from agent.vetting.copy_detection import FINE, FLAT, PLAIN, SIDE

ZOOM: Final = 0.9  # the side of the window
TURNS: Final = tuple(pi / 180 * degrees for degrees in (-5.0, -2.5, 0.0, 2.5, 5.0))  # rad
SHIFTS: Final = (-0.1, -0.05, 0.0, 0.05, 0.1)  # of the window's middle, in half sides: 0.4 small pixels
CLOSER: Final = (-0.025, -0.0125, 0.0, 0.0125, 0.025)  # ... about the best view: what is left is 0.05 small pixels
AGAIN: Final = 4  # candidates of an image that are looked at closer
_INSIDE: Final = 1.0 - 1e-4  # a pixel of a view is known where all of it lies inside
_LEAST: Final = 1e-6
_BLOCK: Final = 16  # synthetic images at once: 260 views of each
_CANDIDATES: Final = 1 << 14  # of them together
_PICTURES: Final = 1 << 12  # of the reference at once


@cache
def movements() -> Tensor:
    """(v, 4): the window, the turn and the middle (x, y) of what each view undoes."""
    still = [(1.0, turn, 0.0, 0.0) for turn in TURNS]
    return torch.tensor(still + [(ZOOM, turn, x, y) for turn in TURNS for x in SHIFTS for y in SHIFTS])


def looked_through(every: Tensor) -> tuple[Tensor, Tensor]:
    """Where views (..., 4) look (..., FINE, FINE, 2), as ``grid_sample`` wants it, and what is known (..., SIDE²)."""
    zoom, turn, x, y = every.reshape(-1, 4).unbind(1)
    cos, sin = turn.cos() / zoom, turn.sin() / zoom
    # a copy shows at q what its original shows at zoom R q + (x, y): the view looks at q = R' (p - (x, y)) / zoom
    middles = (2.0 * torch.arange(FINE, device=every.device, dtype=every.dtype) + 1.0) / FINE - 1.0  # of pixels
    # each coordinate is a sum of what the column and what the row give: affine_grid, in a third of its time
    grid = every.new_empty(len(zoom), FINE, FINE, 2)
    for place, (along, down, start) in enumerate(
        ((cos, sin, -cos * x - sin * y), (-sin, cos, sin * x - cos * y)),
    ):
        rows = down[:, None] * middles + start[:, None]
        grid[..., place] = (along[:, None] * middles)[:, None, :] + rows[:, :, None]
    inside = ((grid[..., 0].abs() <= 1.0) & (grid[..., 1].abs() <= 1.0)).to(grid.dtype)
    known = (avg_pool2d(inside[:, None], FINE // SIDE) >= _INSIDE).to(grid.dtype)
    return grid.reshape(*every.shape[:-1], FINE, FINE, 2), known.reshape(*every.shape[:-1], SIDE * SIDE)


@dataclass(frozen=True, slots=True, eq=False)
class ShiftedCopies:
    """A reference's images as the check for moved copies sees them."""

    pictures: Tensor  # (n, SIDE²), each less its own mean
    mean: Tensor  # (SIDE²,): what all have in common
    scales: Tensor  # (n, v): one over the length of what the mean leaves of each over each mask; zero if flat
    views: tuple[Tensor, Tensor]  # where each of the v views looks, and what it knows: :func:`looked_through`

    @classmethod
    def of(cls, fine: Tensor) -> ShiftedCopies:
        """Take what is common to the images (n, FINE, FINE) in [-1, 1] of a reference."""
        rows = avg_pool2d(fine[:, None], FINE // SIDE)[:, 0].flatten(1)
        rows = rows - rows.mean(dim=1, keepdim=True)
        mean = (rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(_LEAST)).mean(dim=0)
        views = looked_through(movements().to(fine.device))
        scales = [_scales(some, views[1], mean) for some in torch.split(rows, _PICTURES)]
        return cls(rows, mean, torch.cat(scales), views)

    def best(self, fine: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """The highest correlation of each image with any of its candidates, in any view.

        Args:
            fine: of m images, (m, FINE, FINE) in [-1, 1].
            candidates: (m, k) places in the reference; -1: none.
        Returns:
            (m,) correlations, -1 where there is no candidate, NaN where the image has a pixel that is no number;
            and the places (m,) they are of.
        """
        if not candidates.shape[1]:
            return torch.where(_finite(fine), -1.0, torch.nan), candidates.new_zeros(len(fine))
        values, at = [fine.new_zeros(0)], [candidates.new_zeros(0)]
        size = max(1, min(_BLOCK, _CANDIDATES // candidates.shape[1]))
        for some, places in zip(torch.split(fine, size), torch.split(candidates, size), strict=True):
            value, best = self._correlations(some, places).max(dim=1)
            values.append(torch.where(_finite(some), value, torch.nan))
            at.append(places.gather(1, best[:, None])[:, 0].clamp_min(0))
        return torch.cat(values), torch.cat(at)

    def every(self, fine: Tensor, places: Tensor) -> Tensor:
        """(m, k): of each of m images (m, FINE, FINE) with each of k places (k,) of the reference."""
        size = max(1, min(_BLOCK, _CANDIDATES // len(places)))
        return torch.cat([self._correlations(some, places.expand(len(some), -1)) for some in torch.split(fine, size)])

    def _correlations(self, fine: Tensor, places: Tensor) -> Tensor:
        """(m, k) with candidates (m, k): the highest of all views; of the most alike, of closer views too."""
        every = movements().to(fine.device)
        grid, known = self.views
        rows = torch.cat([_undone(side, grid, known, self.mean) for side in (fine, fine.flip(2))], dim=1)
        # the views are centred and have nothing of the mean image: the candidates need no more than their scale
        scales = self.scales[places.clamp_min(0)].transpose(1, 2)
        products = rows @ self.pictures[places.clamp_min(0)].transpose(1, 2)  # (m, 2 v, k)
        found, view = (products * torch.cat([scales, scales], dim=1)).max(dim=1)
        found = found.masked_fill(places < 0, -1.0)
        first = found.topk(min(AGAIN, found.shape[1]), dim=1).indices
        chosen = view.gather(1, first)
        closer = self._closer(fine, every[chosen % len(every)], chosen >= len(every), places.gather(1, first))
        return found.scatter(1, first, torch.maximum(found.gather(1, first), closer)).clamp(-1.0, 1.0)

    def _closer(self, fine: Tensor, every: Tensor, mirrored: Tensor, places: Tensor) -> Tensor:
        """(m, r): the highest correlation with places (m, r) in views about those (m, r, 4)."""
        step = torch.tensor([(0.0, 0.0, x, y) for x in CLOSER for y in CLOSER], device=fine.device)
        grid, known = (told.flatten(0, 1) for told in looked_through(every[:, :, None] + step))  # (m r, 25, ...)
        sides = torch.where(mirrored[:, :, None, None], fine.flip(2)[:, None], fine[:, None])  # (m, r, FINE, FINE)
        seen = _sampled(sides.flatten(0, 1)[:, None], grid)  # (m r, 1, 25, SIDE²)
        there = self.pictures[places.clamp_min(0)].flatten(0, 1)[:, None]
        found = _rest(seen[:, 0] * known, known, self.mean) * _rest(there * known, known, self.mean)
        return found.sum(dim=2).amax(dim=1).reshape(places.shape).masked_fill(places < 0, -1.0)


def _finite(fine: Tensor) -> Tensor:
    return torch.isfinite(fine).flatten(1).all(dim=1)


def _undone(fine: Tensor, grid: Tensor, known: Tensor, mean: Tensor) -> Tensor:
    """(m, v, SIDE²): what the mean leaves of images (m, FINE, FINE) through views (v, ...), of unit length."""
    # images as channels: the weights of a view are worked out once for all of them
    return _rest(_sampled(fine[None], grid[None])[0] * known, known, mean)


def _sampled(pictures: Tensor, grid: Tensor) -> Tensor:
    """(n, c, v, SIDE²): images (n, c, FINE, FINE) where (n, v, FINE, FINE, 2) looks, averaged."""
    n, views = grid.shape[:2]
    rows = grid.reshape(n, views * FINE, FINE, 2)
    seen = grid_sample(pictures, rows, padding_mode="border", align_corners=False)
    averaged: Tensor = avg_pool2d(seen, FINE // SIDE).reshape(n, pictures.shape[1], views, SIDE * SIDE)
    return averaged


def _centred(rows: Tensor, known: Tensor) -> Tensor:
    return (rows - rows.sum(dim=-1, keepdim=True) / known.sum(dim=-1, keepdim=True)) * known


def _common(mean: Tensor, known: Tensor) -> Tensor:
    """The mean image over masks (..., SIDE²), centred and of unit length."""
    centred = _centred(mean * known, known)
    length: Tensor = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    return centred / length.clamp_min(_LEAST)


def _rest(rows: Tensor, known: Tensor, mean: Tensor) -> Tensor:
    """What the mean leaves of rows (..., SIDE²), zero outside the masks, of unit length; zero where they are flat."""
    common = _common(mean, known)
    centred = _centred(rows, known)
    rest = centred - (centred * common).sum(dim=-1, keepdim=True) * common
    length, left = (torch.linalg.vector_norm(some, dim=-1, keepdim=True) for some in (centred, rest))
    told = (length >= FLAT * known.sum(dim=-1, keepdim=True).sqrt()) & (left > PLAIN * length)
    return torch.where(told, rest / left.clamp_min(_LEAST), torch.zeros_like(rest))


def _scales(rows: Tensor, known: Tensor, mean: Tensor) -> Tensor:
    """(n, v): one over the length of what the mean leaves of rows (n, SIDE²) over each mask (v, SIDE²)."""
    wide, masks = rows.double(), known.double()
    pixels = masks.sum(dim=1)
    length = wide.square() @ masks.T - (wide @ masks.T).square() / pixels
    left = length - (wide @ _common(mean.double(), masks).T).square()
    told = (length >= FLAT**2 * pixels) & (left > PLAIN**2 * length)
    return torch.where(told, left.clamp_min(_LEAST**2).rsqrt(), torch.zeros_like(left)).float()
