"""The public start of the demo's rounds: a small CNN that has seen printed digits, and nobody's handwriting.

The digits of fonts are thinned, bent and written again with a round pen (:mod:`deploy.phantoms.handwriting`). No
person wrote them, and it shows: the network that learned them recognises about three quarters of what persons wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from deploy.phantoms import digits, handwriting

NETWORK: Final = "printed-digits"
CLASSES: Final = "0123456789"
SIZE: Final = (32, 32)  # pixels (h, w) that the network sees
OPTIONS: Final = "width = 8, convolutions = 3"  # of small-cnn
PARAMETERS: Final = 1458  # of the 7,290 of the network: the last layer, all biases, all scales of group norms
STEPS: Final = {NETWORK: 1500}
_TASK: Final = f"""\
[input]
size = {list(SIZE)}
[network]
name = "small-cnn"
options = {{ {OPTIONS} }}
"""
PUBLIC: Final[Mapping[str, Any]] = {"each": 300, "seed": 4, "size": 8, "task": _TASK}  # so many images of each digit


def write_public(folder: Path) -> None:
    """The task's network and input, and public images as PNG, in a folder for each digit."""
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(PUBLIC["task"])
    dice = np.random.default_rng(PUBLIC["seed"])
    images, labels, names = handwriting.glyphs(PUBLIC["each"], PUBLIC["size"], dice, CLASSES)
    pictures = digits.upsample((images / np.float32(255)).astype(np.float32))
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        path = folder / "pictures" / names[label] / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)


def training(network: str, public: Path, networks: Path) -> list[str]:
    """What follows ``train`` to make the network, of what :func:`write_public` wrote."""
    del networks  # it builds on none
    words = ["network", "--task", str(public / "task.toml"), "--pictures", str(public / "pictures")]
    return [*words, "--labels", "folders", "--steps", str(STEPS[network])]
