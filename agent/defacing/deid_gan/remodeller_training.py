"""A remodeller from public heads.

The generator draws a face from a brain, which an attacker would like to have: it must never have seen the patient's
own head. So it is trained on public heads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from agent.defacing.deid_gan.network import remodeller_bytes
from agent.defacing.deid_gan.training import Example, VolumeGanTraining, train_volume_gan
from agent.defacing.head import HeadScan
from agent.defacing.privacy_transform import EXTENT_MM, Coarse, Population, population_of, transform, whole_head
from agent.domain import CheckpointStore
from agent.models.training_loop import TrainingProgress
from protos.common.errors import TrainingError

Say = Callable[[TrainingProgress], None]
Heads = Iterable[tuple[str, HeadScan]]  # person and head; a person may have several


class TooFewHeadsError(TrainingError, ValueError):
    """One person's head, or none: what was learned from it would be that person's face."""


def population_from(heads: Heads, side: int, coarse: Coarse) -> Population:
    """:func:`agent.defacing.privacy_transform.population_of`, with one head in memory at a time.

    Raises:
        TooFewHeadsError: none.
    """
    count, support, skin = 0, np.zeros(coarse.directions), np.zeros((side, side, side))
    for _, head in heads:
        one = population_of([head], side, coarse.directions)
        support += one.support
        skin += one.skin
        count += 1
    if not count:
        raise TooFewHeadsError("a population has heads")
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
        NotDefacedError: a head whose brain does not fit into the cube or the hull.
    """
    made = []
    for person, head in heads:
        gamma = transform(head, side, population, coarse)
        volume = np.where(gamma.brain, gamma.intensities, whole_head(head, side)).astype(np.float32)
        made.append(Example(volume, gamma, person))
    return made


def train_remodeller(
    heads: Heads,
    config: VolumeGanTraining,
    place: Path | CheckpointStore,
    say: Say = lambda _: None,
    coarse: Coarse | None = None,
) -> bytes:
    """One network.

    Args:
        heads: of public persons. A sequence may read its heads from a disk, and one at a time is in memory then.
        config: of the run.
        place: of the checkpoint.
        say: told of the progress.
        coarse: how the hulls are made; by default, with nothing of the head's own outside.
    Returns:
        The file that :func:`agent.defacing.deid_gan.network.remodeller_from` reads.
    Raises:
        TooFewHeadsError: of fewer than two persons.
        NotDefacedError: a head whose brain does not fit into the cube.
        ValueError: the configuration's cube has another edge than gamma's.
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    known = heads if isinstance(heads, Sequence) else list(heads)
    coarse = Coarse() if coarse is None else coarse
    if config.gan.extent_mm != EXTENT_MM:
        raise ValueError(f"gamma's cube measures {EXTENT_MM:g} mm")
    population = population_from(known, config.gan.side, coarse)
    taught = examples(known, config.gan.side, population, coarse)
    if len({example.person for example in taught}) < 2:
        raise TooFewHeadsError("a network learns from two persons or more")
    net = train_volume_gan(taught, config, place, say)
    notes = {"absolute": config.absolute, "seed": config.seed, "steps": config.steps, "training": "volume_gan"}
    return remodeller_bytes(net, population, coarse, notes)
