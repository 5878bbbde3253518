"""The remodelling network that tests vouch for: what it learns, and the command that wrote it.

``python -m tests.support.head_networks [FOLDER]`` trains it on phantoms of 4 mm and writes it again: some minutes of
a processor. With a folder, a run that was interrupted goes on.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.heads.brain import Brain
from agent.heads.head import Head
from agent.heads.skin import head_mask
from agent.nets.volume_gan import PRESETS
from agent.training.loop import Progress
from agent.training.remodelling import train_remodeller
from agent.training.volume_gan import VolumeGanTraining
from tests.support.heads import phantoms

KEPT: Final = Path(__file__).parents[1] / "vectors" / "networks"
NAME: Final = "remodeller.safetensors"
PEOPLE: Final = 32
FIRST: Final = 1_000  # persons from here on: no test de-faces one of them
# the paper has no absolute error: without it the volumes leave [0, 1] after a hundred steps, and do not come back
CONFIG: Final = VolumeGanTraining(
    PRESETS["small32"], steps=800, ema=0.995, absolute=300.0, checkpoint_every=100, say_every=25
)


def heads(people: int = PEOPLE, mm: float = 4.0, first: int = FIRST) -> Iterator[tuple[str, Head]]:
    """Phantoms, with the brains and places that they were made with."""
    for number in range(first, first + people):
        scan = phantoms().scan(number, 0, mm)
        brain = Brain(scan.brain, 1.0, scan.to_template)
        yield f"phantom-{number}", Head(scan.volume, head_mask(scan.volume), brain)


def train(
    folder: Path, steps: int = CONFIG.steps, people: int = PEOPLE, say: Callable[[Progress], None] = lambda _: None
) -> bytes:
    """The network's file."""
    return train_remodeller(heads(people), replace(CONFIG, steps=steps), folder, say)


def _told(progress: Progress) -> None:
    losses = ", ".join(f"{name} {value:.3f}" for name, value in sorted(progress.losses.items()))
    print(f"{progress.step} of {progress.steps}: {losses}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as bare:
        made = train(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(bare), say=_told)
    (KEPT / NAME).write_bytes(made)
