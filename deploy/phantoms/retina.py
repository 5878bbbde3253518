"""Made-up eyes: what of a retina belongs to the person, and how one photograph of it is drawn.

The vessel tree, disc, macula and pigment are the person's and stay; lesions and the camera belong to one visit.
Lengths are in half sides of the image: the field of view has radius 0.97 around (0, 0), x to the right, y down.
Everything is computed from distances to points, so an image is anti-aliased at any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, tau
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

GRADES: Final = 5  # international clinical diabetic retinopathy scale (ICDR): 0 none to 4 proliferative
FIELD: Final = 0.97
_STEP: Final = 0.02  # between two points of a vessel
_LEAST_DOT: Final = 0.85  # pixels: smaller lesions would vanish in small images
_WAVES: Final = 10
# heading at the disc and total turn, in degrees against the x axis, of a right eye: temporal is to the left
_ARCADES: Final = np.array([(112, 88), (-112, -88), (58, -30), (-58, 30)], dtype=np.float32)
_LIGHT, _DARK = np.array((0.88, 0.50, 0.26), np.float32), np.array((0.56, 0.25, 0.10), np.float32)
_ARTERY, _VEIN = np.array((0.80, 0.52, 0.48), np.float32), np.array((0.64, 0.36, 0.36), np.float32)
_DISC, _BLOOD = np.array((0.97, 0.84, 0.58), np.float32), np.array((0.26, 0.02, 0.04), np.float32)
_EXUDATE, _COTTON = np.array((0.98, 0.93, 0.50), np.float32), np.array((0.93, 0.86, 0.74), np.float32)
# least and most: microaneurysms, blots, groups of exudates, cotton-wool spots, large haemorrhages
_LESIONS: Final = (
    ((0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
    ((3, 6), (0, 0), (0, 0), (0, 0), (0, 0)),
    ((8, 14), (3, 6), (3, 5), (0, 1), (0, 0)),
    ((24, 36), (14, 20), (5, 9), (2, 4), (0, 0)),
    ((16, 28), (8, 14), (5, 9), (2, 4), (1, 3)),
)


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Vessels: lines of points; a line ends where its radius becomes 0."""

    points: Floats  # (b, t, 2)
    radii: Floats  # (b, t)
    veins: NDArray[np.bool_]  # (b,)


@dataclass(frozen=True, slots=True, eq=False)
class Eye:
    """One eye of one person, as it is at every visit."""

    disc: Floats  # (2,)
    macula: Floats  # (2,)
    disc_radius: float
    cup: float  # of the disc's radius
    tree: Tree
    waves: Floats  # (w, 4) texture of the choroid: two frequencies, phase, height


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """One person's two eyes, a mirror pair but for their small vessels."""

    left: Eye
    right: Eye
    pigment: Floats  # (3,) RGB of the fundus

    def eye(self, side: str) -> Eye:
        """``left`` or ``right``."""
        return {"left": self.left, "right": self.right}[side]


@dataclass(frozen=True, slots=True, eq=False)
class _Traits:
    """What both eyes of a person share."""

    disc: Floats
    macula: Floats
    arcades: Floats  # (8, 2) heading and turn in radians: four arteries, four veins
    lengths: Floats  # (8,)
    width: float
    winding: float  # tortuosity: how far headings swing, in radians
    spread: float  # mean angle of a branch
    disc_radius: float
    cup: float
    waves: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Shoots:
    """Where vessels begin and which way they go."""

    starts: Floats  # (b, 2)
    turns: Floats  # (b, 2) heading and whole turn in radians
    radii: Floats  # (b,)
    lengths: Floats  # (b,)
    veins: NDArray[np.bool_]  # (b,)


def anatomy(rng: np.random.Generator) -> Anatomy:
    """Draw a person. Nothing here depends on a disease."""
    turns = np.radians(np.concatenate([_ARCADES, _ARCADES]))
    turns[:, 0] += np.radians(rng.normal(0, 16, 8))
    turns[4:, 0] += np.radians(rng.choice((-1, 1), 4) * rng.uniform(8, 18, 4))  # a vein beside its artery
    turns[:, 1] *= rng.uniform(0.6, 1.35, 8)
    traits = _Traits(
        disc=np.array((rng.normal(0.42, 0.05), rng.normal(0.0, 0.05)), np.float32),
        macula=np.array((rng.normal(-0.13, 0.03), rng.normal(0.05, 0.03)), np.float32),
        arcades=turns.astype(np.float32),
        lengths=rng.uniform(1.0, 1.7, 8).astype(np.float32),
        width=float(rng.uniform(0.80, 1.2)),
        winding=float(rng.uniform(0.05, 0.45)),
        spread=float(rng.uniform(0.55, 1.0)),
        disc_radius=float(rng.uniform(0.10, 0.14)),
        cup=float(rng.uniform(0.25, 0.6)),
        waves=np.stack(
            [*rng.normal(0, 6, (2, _WAVES)), rng.uniform(0, tau, _WAVES), rng.uniform(0.005, 0.02, _WAVES)], axis=1
        ).astype(np.float32),
    )
    light = float(rng.uniform(0, 1))
    pigment = light * _LIGHT + (1 - light) * _DARK + rng.normal(0, 0.02, 3).astype(np.float32)
    right, left = _eye(traits, rng), _mirrored(_eye(traits, rng))
    return Anatomy(left, right, pigment.astype(np.float32))


def _eye(traits: _Traits, rng: np.random.Generator) -> Eye:
    """A right eye with these traits; every eye has small differences and small vessels of its own."""
    disc = traits.disc + rng.normal(0, 0.012, 2).astype(np.float32)
    arcades = traits.arcades + np.radians(rng.normal(0, 5, (8, 2))).astype(np.float32)
    macula = traits.macula + rng.normal(0, 0.012, 2).astype(np.float32)
    mains = np.where(np.arange(8) < 4, 0.0125, 0.0165).astype(np.float32) * traits.width
    veins = np.arange(8) >= 4
    roots = np.repeat(disc[None], 8, axis=0) + rng.normal(0, 0.012, (8, 2)).astype(np.float32)
    trees = [_walk(_Shoots(roots, arcades, mains, traits.lengths, veins), traits.winding, rng)]
    for children, share in ((6, 0.62), (3, 0.45)):
        trees.append(_branches(trees[-1], children, share, traits, rng))
    longest = max(tree.radii.shape[1] for tree in trees)
    points = np.concatenate([_padded(tree.points, longest) for tree in trees])
    radii = np.concatenate([_padded(tree.radii, longest) for tree in trees])
    bare = ((points - macula) ** 2).sum(-1) < 0.10**2  # the fovea has no vessels
    tree = Tree(points, np.where(bare, 0, radii), np.concatenate([tree.veins for tree in trees]))
    return Eye(disc, macula, traits.disc_radius, traits.cup, tree, traits.waves)


def _walk(shoots: _Shoots, winding: float, rng: np.random.Generator) -> Tree:
    """Vessels from these points: a steady turn and two swings, ever thinner."""
    starts, turns, lengths = shoots.starts, shoots.turns, shoots.lengths
    count, steps = len(starts), max(2, ceil(float(lengths.max()) / _STEP))
    along = (np.arange(steps, dtype=np.float32) * _STEP)[None]
    part = along / lengths[:, None]
    heading = turns[:, :1] + turns[:, 1:] * part
    for period in (0.45, 0.16):
        phase, own = rng.uniform(0, tau, (count, 1)), rng.uniform(0.7, 1.4, (count, 1)) * period
        heading = heading + winding * np.minimum(1, 4 * part) * np.sin(tau * along / own + phase)
    forward = np.stack([np.cos(heading), -np.sin(heading)], axis=-1) * _STEP
    points = starts[:, None] + np.cumsum(forward, axis=1)
    inside = (part <= 1) & ((points**2).sum(-1) < 1.05)
    radii = np.where(inside, shoots.radii[:, None] * (1 - 0.55 * part), 0)
    return Tree(points.astype(np.float32), radii, shoots.veins)


def _branches(parents: Tree, children: int, share: float, traits: _Traits, rng: np.random.Generator) -> Tree:
    """Vessels that leave others, on either side."""
    count, steps = parents.radii.shape
    at = np.sort(rng.uniform(0.08, 0.95, (count, children)), axis=1)
    index = (at * (parents.radii > 0).sum(1, keepdims=True)).astype(np.intp).clip(0, steps - 2)
    rows = np.repeat(np.arange(count), children)
    index = index.reshape(-1)
    starts = parents.points[rows, index]
    ahead = parents.points[rows, index + 1] - starts
    side = np.where((np.tile(np.arange(children), count) + np.repeat(rng.integers(0, 2, count), children)) % 2, 1, -1)
    angle = np.arctan2(-ahead[:, 1], ahead[:, 0]) + side * rng.normal(traits.spread, 0.2, len(rows))
    turn = -side * rng.uniform(0.0, 0.9, len(rows))  # back towards the parent's way
    lengths = (share * rng.uniform(0.5, 1.2, len(rows))).astype(np.float32)
    radii = parents.radii[rows, index] * rng.uniform(0.55, 0.8, len(rows)).astype(np.float32)
    turns = np.stack([angle, turn], axis=1).astype(np.float32)
    return _walk(_Shoots(starts, turns, radii, lengths, parents.veins[rows]), traits.winding, rng)


def _padded(values: Floats, length: int) -> Floats:
    room = [(0, 0), (0, length - values.shape[1])] + [(0, 0)] * (values.ndim - 2)
    return np.pad(values, room)


def _mirrored(eye: Eye) -> Eye:
    flip = np.array((-1, 1), np.float32)
    tree = Tree(eye.tree.points * flip, eye.tree.radii, eye.tree.veins)
    waves = eye.waves * np.array((-1, 1, 1, 1), np.float32)
    return Eye(eye.disc * flip, eye.macula * flip, eye.disc_radius, eye.cup, tree, waves)


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """Where the camera stands: a turn, a scale and a shift; and how many pixels there are."""

    matrix: Floats  # (2, 2) eye to camera
    shift: Floats  # (2,)
    size: int
    least: float  # radius in pixels of the smallest dot that would still be seen

    def seen(self, points: Floats) -> Floats:
        """Points of the eye (..., 2) in pixels (..., 2): x, y."""
        placed: Floats = ((points @ self.matrix.T + self.shift + 1) * (self.size / 2)).astype(np.float32)
        return placed

    def pixels(self, length: Floats) -> Floats:
        """A length in pixels."""
        return length * np.float32(self.size / 2)

    def grid(self) -> tuple[Floats, Floats]:
        """Of every pixel: its place in the camera and in the eye, each (s, s, 2)."""
        line = ((np.arange(self.size, dtype=np.float32) + 0.5) * 2 / self.size - 1).astype(np.float32)
        camera = np.stack(np.meshgrid(line, line), axis=-1)
        return camera, (camera - self.shift) @ np.linalg.inv(self.matrix).T.astype(np.float32)


def photograph(person: Anatomy, side: str, grade: int, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One photograph: the eye, new lesions of that grade, and a camera that is never the same.

    Args:
        person: whose.
        side: ``left`` or ``right`` eye.
        grade: of diabetic retinopathy, 0 to 4.
        size: of the image in pixels.
        rng: draws lesions and camera.
    Returns:
        (size, size, 3) uint8 RGB.
    """
    if not 0 <= grade < GRADES or not size >= 16:
        raise ValueError("a grade is 0 to 4, and a photograph has 16 pixels a side or more")
    finer = 4 if size <= 32 else 2 if size <= 256 else 1
    eye = person.eye(side)
    turn, scale = rng.normal(0, 0.05), rng.normal(1, 0.02)
    matrix = scale * np.array([(np.cos(turn), -np.sin(turn)), (np.sin(turn), np.cos(turn))])
    shift = rng.normal(0, 0.02, 2).astype(np.float32)
    view = _View(matrix.astype(np.float32), shift, size * finer, _LEAST_DOT * finer)
    camera, places = view.grid()
    picture = _ground(eye, person.pigment, places)
    _draw_vessels(picture, eye, grade, view, rng)
    _draw_lesions(picture, eye, grade, view, rng)
    picture *= _light(camera, rng)[..., None]
    edge = (FIELD - np.sqrt((camera**2).sum(-1))) * (view.size / 2) + 0.5
    picture *= np.clip(edge, 0, 1)[..., None]
    small = picture.reshape(size, finer, size, finer, 3).mean(axis=(1, 3)) if finer > 1 else picture
    small = small * rng.normal(1, 0.02, 3) + rng.normal(0, 0.008, small.shape)
    return np.rint(np.clip(small, 0, 1) * 255).astype(np.uint8)


def _ground(eye: Eye, pigment: Floats, places: Floats) -> Floats:
    """The fundus without vessels: texture, disc with its cup, macula."""
    height = np.zeros(places.shape[:2], np.float32)
    for fx, fy, phase, amount in eye.waves:
        height += amount * np.cos(fx * places[..., 0] + fy * places[..., 1] + phase)
    picture = pigment * (1 + height)[..., None]
    from_macula = ((places - eye.macula) ** 2).sum(-1)
    picture *= (1 - 0.42 * np.exp(-from_macula / (2 * 0.09**2)))[..., None]
    oval = np.sqrt((((places - eye.disc) * np.array((1.08, 0.95), np.float32)) ** 2).sum(-1))
    for radius, strength in ((eye.disc_radius, 0.85), (eye.disc_radius * eye.cup, 0.5)):
        cover = strength / (1 + np.exp(np.minimum((oval - radius) / 0.010, 50)))
        _blend(picture, cover, _DISC if strength > 0.5 else np.ones(3, np.float32))
    return picture


def _light(camera: Floats, rng: np.random.Generator) -> Floats:
    """Illumination that falls off to a side, and exposure."""
    slope = rng.normal(0, 0.07, 2).astype(np.float32)
    fall = float(rng.uniform(0.05, 0.25))
    light: Floats = float(rng.normal(1, 0.07)) * (1 - fall * (camera**2).sum(-1) + camera @ slope)
    return light.astype(np.float32)


def _blend(picture: Floats, cover: Floats, colour: Floats) -> None:
    """Lay a colour over an image, in place."""
    picture += cover[..., None] * (colour - picture)


def _draw_vessels(picture: Floats, eye: Eye, grade: int, view: _View, rng: np.random.Generator) -> None:
    tree = eye.tree
    radii = tree.radii
    if grade >= 3:  # venous beading: the width of veins swings
        beads = 1 + 0.45 * np.sin(tau * np.arange(radii.shape[1]) / 5 + rng.uniform(0, tau, (len(radii), 1)))
        radii = np.where(tree.veins[:, None], radii * beads, radii).astype(np.float32)
    for veins, colour in ((False, _ARTERY), (True, _VEIN)):
        chosen = tree.veins == veins
        cover = _lines(tree.points[chosen], radii[chosen], view)
        picture *= 1 - cover[..., None] * (1 - colour)
    if grade == 4:  # neovascularisation: a tangle of fine vessels at the disc
        count = int(rng.integers(14, 22))
        roots = eye.disc + rng.normal(0, 0.8 * eye.disc_radius, (count, 2)).astype(np.float32)
        turns = np.stack([rng.uniform(0, tau, count), rng.uniform(-9, 9, count)], axis=1).astype(np.float32)
        lengths = rng.uniform(0.15, 0.35, count).astype(np.float32)
        thin = np.full(count, 0.008, np.float32)
        tangle = _walk(_Shoots(roots, turns, thin, lengths, np.zeros(count, np.bool_)), 0.9, rng)
        picture *= 1 - _lines(tangle.points, tangle.radii, view)[..., None] * (1 - _VEIN)


def _draw_lesions(picture: Floats, eye: Eye, grade: int, view: _View, rng: np.random.Generator) -> None:
    dots, blots, groups, cottons, large = (int(rng.integers(low, high + 1)) for low, high in _LESIONS[grade])
    pale = _places(cottons, eye, rng)
    _blend(picture, 0.7 * _dots(pale, rng.uniform(0.035, 0.055, cottons), view, None, 0.02), _COTTON)
    yellow = np.repeat(_places(groups, eye, rng), 5, axis=0) + rng.normal(0, 0.035, (5 * groups, 2))
    # no two of one shade: dots of one ink in a row would be letters to who looks for text
    shade = rng.uniform(0.55, 1, 5 * groups)
    _blend(picture, _dots(yellow, rng.uniform(0.010, 0.022, 5 * groups), view, shade), _EXUDATE)
    ragged = np.repeat(_places(blots, eye, rng), 3, axis=0) + rng.normal(0, 0.014, (3 * blots, 2))
    shade = np.repeat(rng.uniform(0.6, 1, blots), 3)
    _blend(picture, _dots(ragged, rng.uniform(0.018, 0.034, 3 * blots), view, shade), _BLOOD)
    shade = rng.uniform(0.8, 1, dots)
    _blend(picture, _dots(_places(dots, eye, rng), rng.uniform(0.008, 0.013, dots), view, shade), _BLOOD)
    pools = np.repeat(_places(large, eye, rng), 6, axis=0) + rng.normal(0, 0.05, (6 * large, 2))
    _blend(picture, 0.93 * _dots(pools, rng.uniform(0.07, 0.12, 6 * large), view), _BLOOD)


def _places(count: int, eye: Eye, rng: np.random.Generator) -> NDArray[np.float64]:
    """Points (count, 2) of the field, in turn in its four quadrants, off the disc."""
    corner = (rng.integers(4) + np.arange(count)) % 4
    angle = (corner + rng.uniform(0.08, 0.92, count)) * (tau / 4)
    radius = np.sqrt(rng.uniform(0.15**2, 0.85**2, count))
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    away = points - eye.disc
    near = np.sqrt((away**2).sum(1, keepdims=True))
    out = away / np.maximum(near, 1e-6) * (1.5 * eye.disc_radius)
    placed: NDArray[np.float64] = np.where(near < 1.5 * eye.disc_radius, eye.disc + out, points)
    return placed


def _lines(points: Floats, radii: Floats, view: _View) -> Floats:
    """Coverage (s, s) in [0, 1] of lines of points (b, t, 2) with radii (b, t)."""
    pieces = max(1, ceil(_STEP * view.size / 2 / 0.7))
    share = (np.arange(pieces, dtype=np.float32) / pieces)[:, None]
    begin, end = view.seen(points[:, :-1]), view.seen(points[:, 1:])
    whole = (radii[:, :-1] > 0) & (radii[:, 1:] > 0)
    begin, end = begin[whole][:, None], end[whole][:, None]
    wide = radii[:, :-1][whole][:, None] + share[:, 0] * (radii[:, 1:] - radii[:, :-1])[whole][:, None]
    return _stamped((begin + share * (end - begin)).reshape(-1, 2), view.pixels(wide.reshape(-1)), view.size, 1.0)


def _dots(
    points: NDArray[np.float64],
    radii: NDArray[np.float64],
    view: _View,
    strength: NDArray[np.float64] | None = None,
    soft: float = 0.0,
) -> Floats:
    """Coverage (s, s) of discs, none too small to be seen, each of a strength of its own."""
    wide = np.maximum(view.pixels(radii.astype(np.float32)), view.least)
    full = None if strength is None else strength.astype(np.float32)
    return _stamped(view.seen(points.astype(np.float32)), wide, view.size, max(1.0, soft * view.size / 2), full)


def _stamped(points: Floats, radii: Floats, size: int, soft: float, strength: Floats | None = None) -> Floats:
    """The most that any disc covers of each pixel; an edge is ``soft`` pixels wide."""
    cover = np.zeros(size * size, np.float32)
    reach = np.ceil(radii + soft).astype(np.intp)
    for width in np.unique(reach):
        chosen = reach == width
        radius = radii[chosen][:, None]
        x, y = (points[chosen, axis][:, None] for axis in (0, 1))
        span = np.arange(-width, width + 1, dtype=np.float32)
        across, down = (offset.reshape(1, -1) for offset in np.meshgrid(span, span))
        column, row = np.floor(x) + across, np.floor(y) + down
        away = np.sqrt((column + np.float32(0.5) - x) ** 2 + (row + np.float32(0.5) - y) ** 2)
        amount = np.minimum((radius + np.float32(soft / 2) - away) / np.float32(soft), np.minimum(1, 2 * radius))
        amount = amount if strength is None else amount * strength[chosen][:, None]
        inside = (amount > 0) & (column >= 0) & (column < size) & (row >= 0) & (row < size)
        at = row[inside].astype(np.intp) * size + column[inside].astype(np.intp)
        np.maximum.at(cover, at, amount[inside])
    return cover.reshape(size, size)
