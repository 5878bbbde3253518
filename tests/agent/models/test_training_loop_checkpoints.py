"""Checkpoints of older releases: every family's tensors keep their names, and a training goes on from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

from tests.support.trainers import TRAINERS

# the names that every trainer wrote after six steps, before they shared one base
WRITTEN: Final = json.loads((Path(__file__).parents[2] / "vectors/training_checkpoints.json").read_text())


def names(family: str) -> set[str]:
    """All of a checkpoint's names."""
    moments = {
        f"{prefix}.{number}.{moment}"
        for prefix, told in WRITTEN[family]["optimizers"].items()
        for number in told["parameters"]
        for moment in told["moments"]
    }
    return moments | set(WRITTEN[family]["tensors"])


def checkpoint(family: str) -> tuple[dict[str, Tensor], torch.Generator]:
    """What a training of this family holds after four steps."""
    trainer, draw = TRAINERS[family](), torch.Generator().manual_seed(0)
    for _ in range(4):
        trainer.step(draw)
    return {name: tensor.clone() for name, tensor in trainer.state().items()}, draw


def test_every_family_is_held_against_what_it_wrote() -> None:
    assert TRAINERS.keys() == WRITTEN.keys()


@pytest.mark.parametrize("family", sorted(TRAINERS))
def test_a_checkpoint_has_the_names_of_older_releases_and_a_training_goes_on_from_it(family: str) -> None:
    state, draw = checkpoint(family)
    assert state.keys() == names(family)
    whole, cut = TRAINERS[family](), TRAINERS[family]()
    one, other = torch.Generator().manual_seed(0), torch.Generator()
    other.set_state(draw.get_state())
    cut.restore({name: state[name].clone() for name in sorted(names(family))})
    told = [whole.step(one) for _ in range(6)][4:]
    assert [cut.step(other) for _ in range(2)] == told
    after = cut.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in whole.state().items())


@pytest.mark.parametrize("family", sorted(TRAINERS))
def test_a_checkpoint_that_lacks_a_tensor_is_refused(family: str) -> None:
    state, _ = checkpoint(family)
    lost = next(name for name in WRITTEN[family]["tensors"] if state[name].ndim > 1)
    with pytest.raises((KeyError, RuntimeError)):
        TRAINERS[family]().restore({name: tensor for name, tensor in state.items() if name != lost})
