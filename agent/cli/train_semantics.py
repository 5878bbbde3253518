"""``train semantics``: a semantic query function of a folder of public images, by their labels or without any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.models.features.extractors import RandomFeatures, features_from
from agent.models.image_folder import read_labels
from agent.models.semantics.training import SemanticsConfig, cluster_semantics, suited, train_semantics
from agent.models.training_loop import TrainingProgress
from protos.common.durable_files import replace_file

FOLDERS: Final = "folders"  # in the place of a list: an image's folder names its label
FILE: Final = "semantics.safetensors"


@dataclass(frozen=True, slots=True)
class SemanticsOrder:
    """What was typed."""

    side: int
    grey: bool
    labels: str | None  # a CSV, or ``FOLDERS``
    clusters: int | None
    features: Path | None  # of clusters; none: random ones
    device: str
    seed: int

    def __post_init__(self) -> None:
        """Refuse an order that cannot be carried out, before an image is read.

        Raises:
            ValueError: it cannot; the text says what to type.
        """
        suited(self.side, self.channels)
        if (self.labels is None) is (self.clusters is None):
            raise ValueError("semantics need --labels or --clusters")
        if self.labels is not None and self.features is not None:
            raise ValueError("--features works with --clusters only: with --labels a separate network is trained")
        if self.features is not None and not self.features.is_file():
            raise ValueError(f"--features: file not found: {self.features.name}")
        if self.clusters is not None and self.clusters < 2:
            raise ValueError("--clusters: give 2 or more")

    @property
    def channels(self) -> int:
        """Of the images."""
        return 1 if self.grey else 3

    def make(
        self,
        images: NDArray[np.uint8],
        names: tuple[str, ...],
        steps: int,
        out: Path,
        say: Callable[[TrainingProgress], None],
    ) -> tuple[Path, Mapping[str, Any]]:
        """Train or cluster, and write the file.

        Args:
            images: (n, s, s) or (n, s, s, 3): nobody's patients.
            names: (n,) relative to their folder.
            steps: of a training; clusters take as many as they take.
            out: the folder of checkpoint and file.
            say: told of the progress.
        Returns:
            The file, and what there is to say of it.
        Raises:
            ImageFolderError: labels that cannot be read.
            ValueError: images that make no semantics; see :mod:`agent.models.semantics.training`.
        """
        if self.labels is None:
            return self._clustered(images, out, say)
        places, shown = read_labels(None if self.labels == FOLDERS else Path(self.labels), names)
        bins, labels = np.unique(shown, return_inverse=True)
        often = max(1, min(500, steps // 20))
        trunk = suited(self.side, self.channels)
        config = SemanticsConfig(
            "semantics", trunk, tuple(map(str, bins)), steps, seed=self.seed, checkpoint_every=often
        )
        trained = train_semantics(
            images[places], labels.astype(np.int64), config, out, say, torch.device(self.device)
        )
        replace_file(path := out / FILE, trained.file)
        judged = {"accuracy": asdict(trained.accuracy), "guess": trained.guess, "pictures": len(places)}
        return path, {"semantics": len(bins), **judged}

    def _clustered(
        self, images: NDArray[np.uint8], out: Path, say: Callable[[TrainingProgress], None]
    ) -> tuple[Path, Mapping[str, Any]]:
        """As :meth:`make`, of images without labels."""
        assert self.clusters is not None
        features = features_from(self.features.read_bytes()) if self.features else RandomFeatures()
        made = cluster_semantics(features, images, self.clusters, self.seed, torch.device(self.device))
        say(TrainingProgress(made.iterations, made.iterations, {}))
        out.mkdir(parents=True, exist_ok=True)
        replace_file(path := out / FILE, made.file)
        return path, {"semantics": self.clusters, "sizes": list(made.sizes), "steps": made.iterations}


def in_words(more: Mapping[str, Any]) -> str:
    """What :meth:`SemanticsOrder.make` says, for people."""
    if "sizes" in more:
        return f"{more['semantics']} clusters of {min(more['sizes'])} to {max(more['sizes'])} images"
    right, guess = more["accuracy"], more["guess"]
    told = f"on images outside the training it names {right['value']:.3f} [{right['low']:.3f}, {right['high']:.3f}]"
    told += f", of {more['semantics']} labels; always the commonest label would be right for {guess:.3f}"
    if not right["low"] > guess:
        told += ". That is no better than guessing: train it longer, or on more images"
    return told
