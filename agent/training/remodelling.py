"""A remodeller from heads: one network of public heads, or one for each fold of patients.

The generator draws a face from a brain, which is what an attacker would like to have: it must never have seen the
person's own. So it learns from public heads; or it is cross-fitted, and each person is given the network of their
fold, which learned from all the others; or it names its persons by keyed digests, and is refused for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from agent.heads.average import whole
from agent.heads.gamma import EXTENT_MM, Coarse, Population, population_of, transform
from agent.heads.head import Head
from agent.nets.folds import KEY, MOST_FOLDS, fold_of
from agent.nets.volume_gan import Part, remodeller_bytes
from agent.training.loop import Place, Progress
from agent.training.volume_gan import Example, VolumeGanTraining, train_volume_gan

Say = Callable[[Progress], None]
Heads = Iterable[tuple[str, Head]]  # person and head; a person may have several


class TooFewHeads(ValueError):
    """One person's head, or none: what was learned from it would be that person's face."""


@dataclass(frozen=True, slots=True)
class Folds:
    """How patients are divided, for ever: a keyed hash of the person decides."""

    count: int
    key: bytes  # the site's, 32 bytes

    def __post_init__(self) -> None:
        """Two folds or more, under a whole key."""
        if not (2 <= self.count <= MOST_FOLDS and len(self.key) == KEY):
            raise ValueError(f"2 to {MOST_FOLDS} folds go by a key of {KEY} bytes")


def population_from(heads: Heads, side: int, coarse: Coarse) -> Population:
    """:func:`agent.heads.gamma.population_of`, with one head in memory at a time.

    Raises:
        TooFewHeads: none.
    """
    count, support, skin = 0, np.zeros(coarse.directions), np.zeros((side, side, side))
    for _, head in heads:
        one = population_of([head], side, coarse.directions)
        support += one.support
        skin += one.skin
        count += 1
    if not count:
        raise TooFewHeads("a population has heads")
    shares = np.clip(skin / count, 0.0, 1.0)
    return Population((support / count).astype(np.float32), shares.astype(np.float32), count)


def examples(heads: Heads, side: int, population: Population, coarse: Coarse) -> list[Example]:
    """Each head in its cube, with its gamma.

    Args:
        heads: examined.
        side: S.
        population: of the same heads, or of other public ones.
        coarse: how the hulls are made.
    Raises:
        NotDefaced: a head whose brain does not fit into the cube or the hull.
    """
    made = []
    for person, head in heads:
        gamma = transform(head, side, population, coarse)
        volume = np.where(gamma.brain, gamma.intensities, whole(head, side)).astype(np.float32)
        made.append(Example(volume, gamma, person))
    return made


def train_remodeller(
    heads: Heads,
    config: VolumeGanTraining,
    place: Path | Place,
    say: Say = lambda _: None,
    coarse: Coarse | None = None,
    key: bytes | None = None,
) -> bytes:
    """One network.

    Args:
        heads: of public persons; or of patients, with a key. A sequence may read its heads from a disk, and one at a
            time is in memory then.
        config: of the run.
        place: of the checkpoint. Of patients it is a row of the vault.
        say: told of the progress.
        coarse: how the hulls are made; by default, with nothing of the head's own outside.
        key: of the site, where the heads are patients': they are named by keyed digests in the file, and the network
            is refused for them.
    Returns:
        The file that :func:`agent.nets.volume_gan.remodeller_from` reads.
    Raises:
        TooFewHeads: of fewer than two persons.
        NotDefaced: a head whose brain does not fit into the cube.
        ValueError: the configuration's cube has another edge than gamma's.
        OtherRun, BadCheckpoint, Diverged: see :func:`agent.training.loop.train`.
    """
    known = heads if isinstance(heads, Sequence) else list(heads)
    coarse = Coarse() if coarse is None else coarse
    part, persons, notes = _fitted(known, config, place, say, coarse)
    return remodeller_bytes([part], coarse, notes, key, persons if key is not None else ())


def cross_fitted(
    heads: Heads,
    config: VolumeGanTraining,
    folds: Folds,
    place: Callable[[int], Path | Place],
    say: Callable[[int, Progress], None] = lambda *_: None,
    coarse: Coarse | None = None,
) -> bytes:
    """One network for each fold, of the persons of all the other folds; populations too.

    Args:
        heads: of patients.
        config: of each run.
        folds: how they are divided.
        place: of the checkpoint of each fold.
        say: told of the fold and its progress.
        coarse: how the hulls are made.
    Returns, raises:
        As :func:`train_remodeller`.
    """
    known = heads if isinstance(heads, Sequence) else list(heads)
    coarse = Coarse() if coarse is None else coarse
    parts, notes = list[Part](), dict[str, object]()
    for fold in range(folds.count):
        others = _Some(known, [fold_of(person, folds.key, folds.count) != fold for person, _ in known])
        part, _, notes = _fitted(others, config, place(fold), partial(say, fold), coarse)
        parts.append(part)
    return remodeller_bytes(parts, coarse, notes, folds.key)


class _Some(Sequence[tuple[str, Head]]):
    """Some of the heads; each is asked for when it is needed."""

    def __init__(self, heads: Sequence[tuple[str, Head]], taken: Sequence[bool]) -> None:
        self.heads, self.places = heads, [i for i, mine in enumerate(taken) if mine]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[str, Head]:  # type: ignore[override]  # a slice is nobody's need
        return self.heads[self.places[index]]


def _fitted(
    heads: Sequence[tuple[str, Head]], config: VolumeGanTraining, place: Path | Place, say: Say, coarse: Coarse
) -> tuple[Part, list[str], dict[str, object]]:
    if config.gan.extent_mm != EXTENT_MM:
        raise ValueError(f"gamma's cube measures {EXTENT_MM:g} mm")
    population = population_from(heads, config.gan.side, coarse)
    taught = examples(heads, config.gan.side, population, coarse)
    persons = sorted({example.person for example in taught})
    if len(persons) < 2:
        raise TooFewHeads("a network learns from two persons or more")
    net = train_volume_gan(taught, config, place, say)
    notes = {"absolute": config.absolute, "seed": config.seed, "steps": config.steps, "training": "volume_gan"}
    return Part(net, population), persons, notes
