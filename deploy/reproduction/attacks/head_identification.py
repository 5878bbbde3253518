"""Is the face gone? An attacker who holds unaltered heads picks the de-faced one of the same person (Fig. 3).

The paper asked people to pick one of five renderings; here a program picks, that had other people's heads before and
after the same method to learn what it leaves. Reported are the rate among five (chance 20 %) and the rank-1 rate over
the whole gallery (chance 1/N), each with its interval and with what chance itself spans, and beside them the *power*:
what the same attacker reaches on heads that nobody de-faced. Without power, failing says nothing. Heads are compared
across two visits, so that neither noise nor pose gives a person away, and within one visit (the strongest attacker).

The surface is all that is judged here. The brain, which every method leaves as it was, is linked separately
(:func:`agent.attacks.face_looks.brain_look`): "face removed; the brain itself remains linkable".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.attacks.face_icp import Fit
from agent.attacks.face_looks import Eye, Look, Values, only, pixels_of
from agent.attacks.face_matching import CHOICES, Choice, Learn, People, chosen, first, five_way, matchers
from agent.measures.intervals import Interval, wilson

CHANCE: Final = 1.0 / CHOICES
WORKS: Final = 0.95  # an attack that finds fewer unaltered heads is too weak to clear a method
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


@dataclass(frozen=True, slots=True, eq=False)
class Attacker:
    """Who attacks: with what, and how long chance is drawn."""

    fit: Fit = field(default_factory=Fit)
    only: tuple[str, ...] = ()  # names of matchers; (): all
    permutations: int = _PERMUTATIONS

    def __post_init__(self) -> None:
        """Too few permutations have no tails."""
        if not self.permutations >= 200:
            raise ValueError("chance is drawn 200 times or more")

    def learned(self, public: People) -> Choice:
        """The matcher that this attacker relies on, from people who are not tested.

        Raises:
            ValueError: too few people, or no matcher is left.
        """
        offered: Mapping[str, Learn] = matchers(public.known[0], len(public.known), self.fit)
        offered = {name: one for name, one in offered.items() if not self.only or name in self.only}
        if not offered:
            raise ValueError("an attacker has a matcher")
        return chosen(public, offered)


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
        five=_measured(five_way(scores), CHANCE, who.permutations, rng),
        rank1=_measured(first(scores), 1.0 / len(scores), who.permutations, rng),
        matcher=choice.name,
        learned_from=len(public.known),
        power=power,
    )


def by_zone(
    zones: Sequence[str], public: People, tested: People, eye: Eye, rng: np.random.Generator
) -> dict[str, Identification]:
    """The attack on one part of the surface after the other: where a method leaks.

    Args:
        zones: of ``agent.attacks.face_looks.ZONES``.
        public: of :func:`attacked`; where a zone lies is seen on their unaltered heads.
        tested: of :func:`attacked`.
        eye: that all looks were taken with.
        rng: of :func:`attacked`.

    Returns:
        By zone; a zone that no pixel shows is left out.
    """
    found = dict[str, Identification]()
    for zone in zones:
        pixels = pixels_of(public.known, eye, zone)
        if pixels.any():
            sides = [
                People(*(tuple(only(look, pixels) for look in side) for side in (group.known, group.made)))
                for group in (public, tested)
            ]
            found[zone] = attacked(zone, sides[0], sides[1], rng)
    return found


def strongest(found: Sequence[Identification]) -> Identification:
    """The attack that found most: what a method is judged by.

    Raises:
        ValueError: none.
    """
    if not found:
        raise ValueError("no attack")
    return max(found, key=lambda one: (one.five.value, one.rank1.value))


def looks_of(pairs: Sequence[tuple[Look, Look]]) -> People:
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
