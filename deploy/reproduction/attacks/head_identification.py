"""Is the face gone? An attacker who holds unaltered heads picks the de-faced one of the same person (Fig. 3).

The paper (C-DeID-GAN) asked people to pick one of five renderings; here a program picks
(:mod:`agent.defacing.reidentification.matching`), that had other people's heads before and after the same method to
learn what it leaves. Reported are the rate among five (chance 20 %) and the rank-1 rate over the whole gallery
(chance 1/N), each with its interval and with what chance itself spans, and beside them the *power*: what the same
attacker reaches on heads that nobody de-faced. Without power, failing says nothing. Heads are compared across two
visits, so that neither noise nor pose gives a person away, and within one visit (the strongest attacker).

The surface is all that is judged here. The brain, which every method leaves as it was, is linked separately
(:func:`brain_look`): "face removed; the brain itself remains linkable".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.reidentification.features import BEHIND, Cloud, Eye, ScanFeatures, Values, in_zone
from agent.defacing.reidentification.matching import CHOICES, Attacker, People, first, five_way
from agent.defacing.reidentification.rendering import VIEWS, Surface, axes_of, render, renderings
from agent.intervals import Interval, wilson

CHANCE: Final = 1.0 / CHOICES
WORKS: Final = 0.95  # an attack that finds fewer unaltered heads is too weak to clear a method
PHOTOGRAPHS: Final = "photographs"
_CROWN: Final = (0.2, 0.5)  # rows of an image in which a head's width is measured: above the ears
_WIDTH_MM: Final = 155.0
_PERMUTATIONS: Final = 2000


@dataclass(frozen=True, slots=True)
class Rate:
    """How often the right one was picked."""

    value: float
    interval: Interval  # Wilson's, over people
    chance: float
    by_chance: Interval  # where 95 % of attackers who guess end up, with as many people

    @property
    def at_chance(self) -> bool:
        """No more than guessing: the interval reaches down to chance, and guessing often does as well. NaN is not."""
        return self.interval.low <= self.chance and self.value <= self.by_chance.high


@dataclass(frozen=True, slots=True)
class Identification:
    """What one attack on one method found."""

    method: str
    trials: int  # people: each is asked for once
    gallery: int  # people to choose from for rank-1
    five: Rate
    rank1: Rate
    matcher: str  # that the attacker chose on other people
    learned_from: int  # other people
    power: float  # 5-way on unaltered heads of the same people; NaN: not measured

    @property
    def hits(self) -> float:
        """Of the 5-way test; a draw of four others counts by its chance."""
        return self.five.value * self.trials

    @property
    def rate(self) -> float:
        """5-way."""
        return self.five.value

    @property
    def low(self) -> float:
        """Of the 95 % interval of the 5-way rate."""
        return self.five.interval.low

    @property
    def high(self) -> float:
        """Of the 95 % interval of the 5-way rate."""
        return self.five.interval.high

    @property
    def works(self) -> bool:
        """Whether failing means anything; an unknown power does not."""
        return self.power >= WORKS

    @property
    def at_chance(self) -> bool:
        """5-way and rank-1 both."""
        return self.five.at_chance and self.rank1.at_chance

    def line(self) -> str:
        """One line of print."""
        ways = (("5-way", self.five), ("rank-1", self.rank1))
        told = (
            f"{name} {r.value:.3f} [{r.interval.low:.3f}, {r.interval.high:.3f}] "
            f"(chance {r.chance:.3f}, to {r.by_chance.high:.3f})"
            for name, r in ways
        )
        word = "at chance" if self.at_chance else "ABOVE CHANCE"
        return f"{self.method}: {', '.join(told)}, {self.trials} people, {word}; {self.matcher}"


def attacked(
    method: str,
    public: People,
    tested: People,
    rng: np.random.Generator,
    power: float = float("nan"),
    attacker: Attacker | None = None,
) -> Identification:
    """One method under attack.

    Args:
        method: for the table.
        public: people of whom the attacker has everything; nobody of them is tested.
        tested: the people to be found.
        rng: draws what chance spans, and nothing else.
        power: the 5-way rate on the same people unaltered.
        attacker: who.

    Raises:
        ValueError: fewer than 10 public or 5 tested people, or scores that are no numbers.
    """
    who = attacker or Attacker()
    choice = who.learned(public)
    scores = choice.matcher(tested)
    return Identification(
        method=method,
        trials=len(scores),
        gallery=len(scores),
        five=_measured(five_way(scores), CHANCE, _PERMUTATIONS, rng),
        rank1=_measured(first(scores), 1.0 / len(scores), _PERMUTATIONS, rng),
        matcher=choice.name,
        learned_from=len(public.known),
        power=power,
    )


def looks_of(pairs: Sequence[tuple[ScanFeatures, ScanFeatures]]) -> People:
    """People of (known, de-faced) pairs."""
    return People(tuple(k for k, _ in pairs), tuple(m for _, m in pairs))


def _measured(credit: Values, chance: float, permutations: int, rng: np.random.Generator) -> Rate:
    """The mean credit of the right columns, with Wilson's interval over people and what columns at random reach."""
    p = len(credit)
    value = float(np.diag(credit).mean())
    rows = np.arange(p)
    drawn = np.array([credit[rows, rng.permutation(p)].mean() for _ in range(permutations)])
    low, high = (float(q) for q in np.quantile(drawn, [0.025, 0.975]))
    return Rate(value, wilson(min(max(value, 0.0), 1.0) * p, p), chance, Interval(low, max(low, high)))


def photographed(seen: Surface, to_template: Values, eye: Eye) -> ScanFeatures:
    """A head as on photographs: light and shade, and every head as wide as all others, since an image has no mm.

    The size of a brain tells that of its head, and no method may change the brain; so who measures in millimetres
    gains a little from any head. Args: as of :func:`agent.defacing.reidentification.features.extract_features`.
    """
    camera = eye.camera(to_template)
    front = np.isfinite(render(seen, camera).depth)
    middle = slice(round(eye.side * _CROWN[0]), round(eye.side * _CROWN[1]))
    widths = front[middle].sum(axis=1) * camera.pitch_mm
    wide = float(np.quantile(widths, 0.9)) if widths.any() else _WIDTH_MM
    zoom = float(np.clip(wide / _WIDTH_MM, 0.5, 1.5))
    fitted = replace(camera, extent_mm=camera.extent_mm * zoom)
    taken = renderings(seen, fitted, eye.views)
    return ScanFeatures({PHOTOGRAPHS: np.stack([one.shade for one in taken.values()]).ravel()}, {})


def out_of_focus(look: ScanFeatures, eye: Eye, blur_mm: float) -> ScanFeatures:
    """The control BLURRED of Fig. 3: who has blurred images only has neither depth nor points."""
    pitch, side = eye.extent_mm / eye.side, eye.side
    pictures = look.channels["shade"].reshape(-1, side, side)
    return ScanFeatures({"shade": np.stack([blurred(one, pitch, blur_mm) for one in pictures]).ravel()}, {})


def hull_look(hull: NDArray[np.bool_]) -> ScanFeatures:
    """What gamma gives away by itself: the coarsened hull in the common cube, as distances to its surface.

    Args:
        hull: (S, S, S) of :class:`agent.defacing.privacy_transform.Gamma`.
    """
    far = ndimage.distance_transform_edt(hull) - ndimage.distance_transform_edt(~hull)
    return ScanFeatures({"hull": np.clip(far, -8.0, 8.0).astype(np.float32).ravel()}, {})


def brain_look(brain: NDArray[np.bool_], intensities: NDArray[np.float32]) -> ScanFeatures:
    """What every method leaves: the brain, its shape and its values in the common cube, both (S, S, S)."""
    far = ndimage.distance_transform_edt(brain) - ndimage.distance_transform_edt(~brain)
    shape = np.clip(far, -3.0, 3.0).astype(np.float32).ravel()
    return ScanFeatures(
        {"brain": np.where(brain, intensities, 0.0).astype(np.float32).ravel(), "brain shape": shape}, {}
    )


def pixels_of(looks: Sequence[ScanFeatures], eye: Eye, zone: str) -> NDArray[np.bool_]:
    """(views, side, side): the pixels that show a part of the surface, on the mean of some heads.

    Raises:
        KeyError: not one of ``ZONES``.
    """
    mean = np.mean([one.channels["depth"] for one in looks], axis=0).reshape(-1, eye.side, eye.side)
    pitch, half = eye.extent_mm / eye.side, (eye.side - 1) / 2
    rows, columns = np.indices((eye.side, eye.side))
    shown = []
    for name, depth in zip(eye.views, mean, strict=True):
        view = np.stack([(columns - half) * pitch, (half - rows) * pitch, depth], axis=-1).reshape(-1, 3)
        there = in_zone(view @ axes_of(VIEWS[name]).T, zone).reshape(depth.shape)
        shown.append(there & (depth > BEHIND + 1.0))
    return np.stack(shown)


def only(look: ScanFeatures, pixels: NDArray[np.bool_], points: str = "") -> ScanFeatures:
    """A look at one part of the surface.

    Args:
        look: at the whole.
        pixels: (views, side, side) of :func:`pixels_of`.
        points: the name of the zone, to keep its points of the clouds as well; "": no cloud.
    """
    clouds = {}
    for name, cloud in look.clouds.items() if points else ():
        here = in_zone(cloud.points, points)
        clouds[name] = Cloud(cloud.points[here], cloud.normals[here])
    return ScanFeatures({name: channel[pixels.ravel()] for name, channel in look.channels.items()}, clouds)


def blurred(shade: NDArray[np.float32], pitch_mm: float, blur_mm: float) -> NDArray[np.float32]:
    """An image out of focus: the control BLURRED of Fig. 3.

    Args:
        shade: (h, w), or a depth map without NaN.
        pitch_mm: from one pixel to the next.
        blur_mm: standard deviation of the Gaussian.
    """
    return np.asarray(ndimage.gaussian_filter(shade, blur_mm / pitch_mm, mode="nearest"), np.float32)
