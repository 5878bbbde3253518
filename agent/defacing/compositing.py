"""A made head in place of the original one: in the native grid, by one surface, and nothing of the old one beneath.

C-DeID-GAN pastes the brain into a synthetic volume (section 3, "Brain preservation"), which resamples all of it. Here
the synthetic head is pasted into the scan, and voxels of the brain and outside the region stay. Where the two meet,
the synthetic and the original *surface* are blended as distances, so that there is one contour. Intensities are mixed
only deep under both surfaces, or where they agree. Air is drawn from its noise distribution, since ghosts and wrapped
parts show a face too.

Surfaces as distances: how far each voxel lies from the edge of a mask, sampled at the points of any grid.

Two surfaces are blended by blending their distances; there is one surface again, and never two contours.

How bright a made head is in one series: learned from the series' own voxels, as a few dozen aggregate numbers.

A network writes the numbers of its training heads. They are turned in two steps into those of a series: by matching
quantiles to the finest series of the study, and from there by the median of the series where the finest series is
about so bright, so that a T2, a FLAIR or a CT keeps its own contrast. Both are learned outside the face, mostly from
tissue that is published anyway; only if there is too little of that are all of the head's tissues taken. What leaks
is at most ``KNOTS`` medians and ``LAW`` quantiles of air: how bright, never where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing import head_mask as skin
from agent.defacing.change import Defaced
from agent.defacing.face_region import Region
from agent.defacing.privacy_transform import BRIGHT
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import Cube, resample, spacing

KNOTS: Final = 24
LAW: Final = 256
LEAST: Final = 300  # voxels to learn from
BOUNDS: Final = (0.5, 1.6)
_TAIL: Final = 0.005
_AIR_TAIL: Final = 0.001
_FEWEST: Final = 25  # voxels of one median
_RAYLEIGH: Final = 0.655  # sd of the magnitude of pure noise over the sd of the noise


@dataclass(frozen=True, slots=True, eq=False)
class Contrast:
    """The numbers of one series."""

    made: NDArray[np.float64]  # (n,) rising, of a made head in [0, 1]
    own: NDArray[np.float64]  # (n,) of the series
    air: NDArray[np.float64]  # (LAW,) rising quantiles of the air
    grain: float  # sd of the series' noise in tissue

    def tissue(self, made: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
        """The series' numbers for made ones, with the series' noise. One normal number is drawn for each voxel."""
        bright = np.interp(made, self.made, self.own).astype(np.float32)
        bright += np.float32(self.grain) * rng.standard_normal(made.shape, np.float32)
        return bright

    def nothing(self, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
        """Air by its law: independent from voxel to voxel, so that no ghost is left. One number for each voxel."""
        places = np.linspace(0.0, 1.0, len(self.air))
        return np.interp(rng.random(shape, np.float32), places, self.air).astype(np.float32)


def learned(
    made: NDArray[np.float32],
    finest: NDArray[np.float32],
    series: NDArray[np.float32],
    air: NDArray[Any],
    brain: NDArray[np.float32],
    white: float = float("inf"),
) -> Contrast:
    """From tissue that made head and series share.

    Args:
        made: (n,) numbers of the made head in [0, 1].
        finest: (n,) of the study's finest series at the same points.
        series: (n,) of the series at the same points.
        air: (m,) of the series, of air alone.
        brain: (b, 3) of the series, neighbours along one axis inside the brain, for the noise.
        white: of the finest series, what a made 1 stands for. Quantiles correct that within ``BOUNDS``, and no
            further: a made head of another size than the original has other tissues at the same points.

    Raises:
        NotDefacedError: ``other_frame``, the two share too little tissue.
    """
    if not len(made) >= LEAST:
        raise NotDefacedError("other_frame")
    steps = np.linspace(_TAIL, 1.0 - _TAIL, KNOTS)
    low = np.asarray(np.quantile(made, steps), np.float64)
    middle = np.asarray(np.quantile(finest, steps), np.float64)
    if np.isfinite(white) and white > 0:
        middle = np.clip(middle, BOUNDS[0] * white * low, BOUNDS[1] * white * low)
    own = _medians(finest, series, middle)
    rising, first = np.unique(low, return_index=True)
    law = np.quantile(air, np.linspace(_AIR_TAIL, 1.0 - _AIR_TAIL, LAW))
    return Contrast(rising, own[first], law, _grain(brain, air))


def _medians(
    finest: NDArray[np.float32], series: NDArray[np.float32], middle: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The series' median around each level of the finest series; levels with too few voxels are filled in."""
    edges = (middle[1:] + middle[:-1]) / 2
    box = np.searchsorted(edges, finest)
    found = np.full(len(middle), np.nan)
    for level in range(len(middle)):
        mine = series[box == level]
        if len(mine) >= _FEWEST:
            found[level] = np.median(mine)
    known = np.isfinite(found)
    if not bool(known.any()):
        return np.full(len(middle), float(np.median(series)))
    return np.asarray(np.interp(np.arange(len(middle)), np.flatnonzero(known), found[known]))


def _grain(brain: NDArray[np.float32], air: NDArray[Any]) -> float:
    """The smaller of two estimates: structure makes that of the brain too large, masking that of air too small."""
    in_air = float(np.std(air.astype(np.float64))) / _RAYLEIGH
    if len(brain) < LEAST:
        return in_air
    bent = brain[:, 1] - (brain[:, 0] + brain[:, 2]) / 2
    in_brain = float(1.4826 * np.median(np.abs(bent)) / np.sqrt(1.5))
    return min(in_air, in_brain) if in_air > 0.0 else in_brain / 2


_FINE_MM: Final = 0.75  # finer grids are thinned: distances are smooth, and need no more
FAR_MM: Final = 1e3
_ZOOM: Final = 2
_SMOOTH: Final = 1.2  # fine voxels: takes the stairs off a distance to whole voxels
_SWOLLEN: Final = 0.2  # coarse voxels by which a low level lies outside the skin, measured on phantoms


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A smooth quantity on a grid."""

    values: NDArray[np.float32]  # (i, j, k)
    affine: NDArray[np.float64]  # (4, 4), index to RAS+ mm

    def on(self, grid: NDArray[np.float64], shape: tuple[int, int, int], fill: float) -> NDArray[np.float32]:
        """Its values at the points of a grid; ``fill``, a finite number, where it is not known."""
        return resample(self.values, self.affine, shape, grid, 1, fill)


def outside(mask: NDArray[np.bool_], affine: NDArray[np.float64]) -> Field:
    """Distance to the nearest voxel of a mask in mm: 0 inside, never more than the truth."""
    thin, grid = _thinned(mask, affine)
    if not bool(thin.any()):
        return Field(np.full(thin.shape, FAR_MM, np.float32), grid)
    away = ndimage.distance_transform_edt(~thin, sampling=spacing(grid)).astype(np.float32)
    if thin.shape != mask.shape:
        np.maximum(away - np.float32(spacing(grid).max()), 0.0, out=away)
    return Field(away, grid)


def signed(mask: NDArray[np.bool_], affine: NDArray[np.float64]) -> Field:
    """Distance to the surface of a mask in mm, negative inside. The image's border is no surface."""
    thin, grid = _thinned(mask, affine)
    mm = spacing(grid)
    half = np.float32(mm.min() / 2)  # a surface lies between two voxels
    if bool(thin.all()) or not bool(thin.any()):
        return Field(np.full(thin.shape, -FAR_MM if thin.all() else FAR_MM, np.float32), grid)
    depth = ndimage.distance_transform_edt(~thin, sampling=mm).astype(np.float32)
    depth -= ndimage.distance_transform_edt(thin, sampling=mm).astype(np.float32)
    depth -= np.sign(depth) * half
    return Field(depth, grid)


def smooth(mask: NDArray[np.bool_], values: NDArray[np.float32], cut: float, affine: NDArray[np.float64]) -> Field:
    """As :func:`signed` for a coarse grid: twice as fine, and without stairs.

    Args:
        mask: (i, j, k), without holes.
        values: (i, j, k), whose level at ``cut`` says where between two voxels the mask ends.
        cut: what parts inside from outside.
        affine: (4, 4), index to mm.
    """
    level = np.clip(values / np.float32(2 * cut), 0.0, 1.0)
    level[ndimage.binary_erosion(mask, border_value=1)] = 1.0
    level[~ndimage.binary_dilation(mask)] = 0.0
    fine = ndimage.zoom(level, _ZOOM, order=1, mode="nearest", grid_mode=True)
    grid = affine.copy()
    grid[:3, :3] /= _ZOOM
    grid[:3, 3] -= grid[:3, :3] @ np.full(3, (_ZOOM - 1) / 2)
    depth = signed(fine > 0.5, grid).values
    ndimage.gaussian_filter(depth, _SMOOTH, output=depth, mode="nearest")
    depth += np.float32(_SWOLLEN * spacing(affine).mean())
    return Field(depth, grid)


def _thinned(mask: NDArray[np.bool_], affine: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Every second voxel, or third, of a very fine grid."""
    step = np.maximum(1, np.ceil(_FINE_MM / spacing(affine) - 1e-3)).astype(int)
    thin = mask[:: step[0], :: step[1], :: step[2]]
    return thin, affine @ np.diag([*step.astype(np.float64), 1.0])


COVER_MM: Final = 3.0  # of made scalp over the margin of the brain, where a made head would lie inside it
_MEET_MM: Final = 4.0  # beyond the margin of the brain, in which intensities change over
_UNDER_MM: Final = 4.0  # under both surfaces: from here to twice as deep, the original may be mixed in
_AGREE_MM: Final = 2.0  # surfaces further apart than this show as two
_SCALP_MM: Final = 4.0  # of skin under the made surface; it ends at twice this depth
_SKIN_MM: Final = 3.0  # under the original's surface, which is made anew whatever lies beneath
_UNKNOWN_MM: Final = -1e6  # of the original's surface, where its image ends
_DEEP_MM: Final = -1e3  # deeper than any head: unknown, at least in part
_SOLID: Final = 0.5  # share of head in a voxel from which on its brightness is known
_NECK_MM: Final = 160.0  # below the cube
_CHIN_MM: Final = 80.0  # in front of the template's origin
_THROAT_MM: Final = 12.0
_NECK_MM2: Final = 4000.0  # smaller cross-sections are not a neck
_SLAB: Final = 1 << 20  # voxels at once: a bound on memory
_SAMPLE: Final = 300_000  # voxels to learn the contrast from
_INSIDE_MM: Final = -3.0  # of tissue without air in it


@dataclass(frozen=True, slots=True, eq=False)
class DrawnHead:
    """A made head: where it ends, and how bright it is inside."""

    surface: Field  # mm, negative inside
    tissue: Field  # [0, 1], carried on outwards beyond the skin
    skin: float  # [0, 1], of its tissues' median: no scalp is darker


def made_head(values: NDArray[np.float32], cube: Cube) -> DrawnHead:
    """What a network drew, in a form that can be pasted: one closed head, its neck carried on downwards.

    Args:
        values: (S, S, S) in [0, 1].
        cube: where they lie; its third axis points up.

    Raises:
        NotDefacedError: ``no_head``, nothing like a head was drawn; ``not_finite``.
    """
    if values.shape != cube.shape:
        raise ValueError("a drawn head fills its cube")
    head = skin.head_mask(Volume(values, cube.affine))
    head, values, affine = _with_neck(head, values, cube)
    surface = smooth(head, values, skin.threshold(values), affine)
    # a voxel at the skin is part air: what is head in it is brighter than its mean
    much = np.clip(0.5 - surface.on(affine, head.shape, FAR_MM) / cube.mm, 0.0, 1.0)
    bright = np.clip(values / np.maximum(much, _SOLID), 0.0, 1.0)
    nearest = ndimage.distance_transform_edt(much < _SOLID, return_distances=False, return_indices=True)
    bright = bright[tuple(nearest)].astype(np.float32)
    return DrawnHead(surface, Field(bright, affine), float(np.median(bright[much == 1.0])))


def _with_neck(
    head: NDArray[np.bool_], values: NDArray[np.float32], cube: Cube
) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.float64]]:
    """The lowest slice of the neck goes on downwards and recedes from under the chin: no head is cut off."""
    areas = head.sum(axis=(0, 1)) * cube.mm**2
    neck = int(np.argmax(areas >= _NECK_MM2))
    more = int(np.ceil(_NECK_MM / cube.mm))
    down = np.maximum(np.arange(-more, cube.side), neck)
    front = (np.arange(cube.side) - (cube.side - 1) / 2) * cube.mm
    below = (neck - np.arange(-more, cube.side)) * cube.mm
    throat = front[:, None] <= np.where(below > 0, np.maximum(_CHIN_MM - 2.0 * below, _THROAT_MM), np.inf)
    affine = cube.affine.copy()
    affine[:3, 3] -= affine[:3, 2] * more
    return head[:, :, down] & throat, values[:, :, down], affine


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """The head scan to be defaced, by its finest series."""

    volume: Volume  # RAS+ oriented
    skin: NDArray[np.bool_]  # (i, j, k) of the volume
    brain: NDArray[np.bool_]  # (i, j, k) of the volume
    to_template: NDArray[np.float64]  # (4, 4), RAS+ mm of the scanner to mm of the template


@dataclass(frozen=True, slots=True, eq=False)
class Paste:
    """A change (:class:`agent.defacing.change.Change`): one made head for every series of a study."""

    original: Original
    surface: Field  # mm to the original's skin, negative inside
    made: DrawnHead
    region: Region

    def onto(self, volume: Volume, keep: NDArray[np.bool_], rng: np.random.Generator) -> Defaced:
        """The series with the made head in it, on its own grid and of its own type.

        Args:
            volume: RAS+ oriented, in the frame of reference of the original.
            keep: (i, j, k), the brain on the series' grid.
            rng: of the run. As many numbers are drawn as the series has voxels, whatever it shows.

        Raises:
            NotDefacedError: ``other_frame``, the series shares no tissue with the original.
        """
        if keep.shape != volume.values.shape or keep.dtype != np.bool_:
            raise ValueError("what is kept lies on the grid of the series")
        shape = (keep.shape[0], keep.shape[1], keep.shape[2])
        brain = resample(self.original.brain, self.original.volume.affine, shape, volume.affine, 0) > 0
        brain |= keep
        to_brain = outside(brain, volume.affine)
        contrast = self._contrast(volume, brain, to_brain)
        values, changed = volume.values.copy(), np.zeros(shape, np.bool_)
        thick = max(1, _SLAB // (shape[0] * shape[1]))
        for first in range(0, shape[2], thick):
            part = slice(first, min(first + thick, shape[2]))
            grid = volume.affine.copy()
            grid[:3, 3] += grid[:3, 2] * first
            old = values[:, :, part]
            place = self._place(grid, (shape[0], shape[1], old.shape[2]), to_brain)
            new = _drawn(place, contrast, old, rng)
            may = place.may & ~keep[:, :, part]
            old[may] = _stored(new[may], volume.values)
            changed[:, :, part] = may
        return Defaced(values, changed)

    def _place(self, grid: NDArray[np.float64], shape: tuple[int, int, int], to_brain: Field) -> _Place:
        """Where everything lies on a part of a grid."""
        brain = to_brain.on(grid, shape, FAR_MM)
        share = self.region.share(self.original.to_template, grid, shape)
        skin_ = self.surface.on(grid, shape, _UNKNOWN_MM)
        known = skin_ > _DEEP_MM
        far = self.region.too_far(self.original.to_template, grid, brain)
        np.maximum(skin_, np.float32(2 * self.region.air_mm), out=skin_, where=far & known)
        made = self.made.surface.on(grid, shape, FAR_MM)
        np.minimum(made, brain - np.float32(self.region.margin_mm + COVER_MM), out=made)
        np.clip(made, -100.0, 100.0, out=made)
        np.copyto(skin_, made, where=~known)
        edge = float(spacing(grid).mean())
        gap = np.float32(self.region.air_mm + spacing(grid).max() / 2)
        surface = share * made + (1 - share) * skin_
        beyond = brain - np.float32(self.region.margin_mm)
        # where scalp is thinner than the margin the margin gives way: a face is hidden there too
        may = ((share > 0) | (skin_ > gap)) & ((beyond > 0) | ((skin_ > -_SKIN_MM) & (brain > 0)))
        depth = -np.maximum(surface, skin_)
        fresh = np.minimum(share, np.clip(beyond / _MEET_MM, 0.0, 1.0))
        kept = (1 - fresh) * np.clip(depth / _UNDER_MM - 1.0, 0.0, 1.0)
        agree = (1 - share) * np.clip(1.0 - np.abs(surface - skin_) / _AGREE_MM, 0.0, 1.0)
        np.maximum(kept, agree, out=kept)
        kept[(skin_ > gap) | ~known] = 0.0
        made_of = self.made.tissue.on(grid, shape, 0.0)
        # a head is closed by its skin, where a coarse network draws bone up to the air too
        scalp = np.float32(self.made.skin) * np.clip(2.0 + surface / _SCALP_MM, 0.0, 1.0)
        np.maximum(made_of, scalp, out=made_of)
        return _Place(may, np.clip(0.5 - surface / edge, 0.0, 1.0), kept, made_of)

    def _contrast(self, volume: Volume, brain: NDArray[np.bool_], to_brain: Field) -> Contrast:
        """Learned at points of the series' grid: outside the face, if there is enough of it."""
        step = max(1, round((volume.values.size / _SAMPLE) ** (1 / 3)))
        steps = np.minimum(step, np.array(volume.values.shape))
        grid = volume.affine @ np.diag([*steps.astype(np.float64), 1.0])
        series = volume.values[:: steps[0], :: steps[1], :: steps[2]]
        shape = (series.shape[0], series.shape[1], series.shape[2])
        skin_ = self.surface.on(grid, shape, _UNKNOWN_MM)
        known = skin_ > _DEEP_MM
        tissue = known & (skin_ < _INSIDE_MM) & (self.made.surface.on(grid, shape, FAR_MM) < _INSIDE_MM)
        tissue &= to_brain.on(grid, shape, 0.0) > 1.0
        # never of the face, even where all of the head is made anew
        same = tissue & (Region().share(self.original.to_template, grid, shape) == 0.0)
        if int(same.sum()) < LEAST:
            same = tissue
        finest = self.original.volume
        air = self._air(volume)
        return learned(
            self.made.tissue.on(grid, shape, 0.0)[same],
            resample(finest.values, finest.affine, shape, grid)[same],
            series[same].astype(np.float32),
            air,
            _neighbours(volume.values, brain),
            self._white(),
        )

    def _white(self) -> float:
        """What 1 stands for in a cube: as :class:`agent.defacing.privacy_transform.Gamma` has it."""
        inside = self.original.volume.values[self.original.brain]
        return BRIGHT * float(np.percentile(inside, 99.0)) if inside.size else float("inf")

    def _air(self, volume: Volume) -> NDArray[Any]:
        """Of the series, far from the head and its ghosts; its lowest number where the image holds no air."""
        shape = (volume.values.shape[0], volume.values.shape[1], volume.values.shape[2])
        head = self.surface.on(volume.affine, shape, _UNKNOWN_MM) < 0.0
        try:
            return skin.noise(volume, head)
        except NotDefacedError:
            return np.array([volume.values.min()])


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One slab: what may change, how much of a voxel is head, how much original is left, how bright the head is."""

    may: NDArray[np.bool_]
    head: NDArray[np.float32]
    kept: NDArray[np.float32]
    tissue: NDArray[np.float32]


def pasted(original: Original, values: NDArray[np.float32], cube: Cube, region: Region) -> Paste:
    """The change that puts a drawn head in place of the original.

    Args:
        original: the finest series of the study.
        values: (S, S, S) in [0, 1], drawn for it.
        cube: where they lie.
        region: what may change.

    Raises:
        NotDefacedError: ``no_head``, ``not_finite``.
    """
    return Paste(original, signed(original.skin, original.volume.affine), made_head(values, cube), region)


def _drawn(place: _Place, contrast: Contrast, old: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float32]:
    """The numbers of a slab, changed or not."""
    air = contrast.nothing(old.shape, rng)
    new = contrast.tissue(place.tissue, rng)
    new -= air
    new *= place.head
    new += air
    return new + place.kept * (old.astype(np.float32) - new)


def _stored(new: NDArray[np.float32], like: NDArray[Any]) -> NDArray[Any]:
    """In the series' type, within what it holds: no number is outside its bits stored."""
    low, high = float(like.min()), float(like.max())
    new = np.clip(new, low, high)
    return (np.rint(new) if like.dtype.kind in "iu" else new).astype(like.dtype)


def _neighbours(values: NDArray[Any], brain: NDArray[np.bool_]) -> NDArray[np.float32]:
    """(b, 3): voxels of the middle of the brain, each between its two neighbours along the first axis."""
    tall = np.flatnonzero(brain.any(axis=(0, 1)))
    if not len(tall):
        return np.empty((0, 3), np.float32)
    part = slice(int(tall[len(tall) // 2]), int(tall[len(tall) // 2]) + 8)
    mask, numbers = brain[:, :, part], values[:, :, part].astype(np.float32)
    inside = mask[:-2] & mask[1:-1] & mask[2:]
    return np.stack([numbers[:-2][inside], numbers[1:-1][inside], numbers[2:][inside]], axis=1)
