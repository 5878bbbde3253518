"""``train network``: a network that a task may name, on a folder of public pictures with labels."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import CommandError
from agent.models.image_folder import read_labels
from agent.models.networks.public_training import PublicTask, PublicTraining, named_targets
from agent.models.training_loop import TrainingProgress
from policies.tasks.bounds import TaskError
from protos.common.durable_files import replace_file

FOLDERS: Final = "folders"  # in the place of a list: a picture's folder names its label


def order(arguments: argparse.Namespace) -> PublicTask:
    """The task's file, read before a picture is; from it comes what the pictures are fitted to.

    Raises:
        CommandError: it cannot be used; the text names the file and every key.
    """
    path: Path = arguments.task
    try:
        task = PublicTask.read(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as fault:
        raise CommandError(f"{path.name}: {fault.strerror}") from None
    except TaskError as error:
        raise CommandError(f"{path.name}: {error}") from None
    except (ValueError, RecursionError):
        raise CommandError(f"{path.name} is not TOML in UTF-8") from None
    arguments.side, arguments.grey = task.side, task.channels == 1
    return task


def make(
    arguments: argparse.Namespace,
    images: NDArray[np.uint8],
    names: tuple[str, ...],
    steps: int,
    say: Callable[[TrainingProgress], None],
) -> tuple[Path, Mapping[str, Any]]:
    """Train, and write the file."""
    path = None if arguments.labels == FOLDERS else Path(arguments.labels)
    places, labels = read_labels(path, names)
    targets, outputs = named_targets(labels, several=arguments.several)
    training = PublicTraining(order(arguments), images[places], targets, len(outputs), arguments.seed)
    every = max(1, min(500, steps // 20))
    raw = training.run(steps, arguments.out, arguments.device, say, every)
    replace_file(file := arguments.out / "network.safetensors", raw)
    listed = ", ".join(outputs)
    said = f"outputs, in their order: {listed}. A task that begins at this head lists them so"
    return file, {"outputs": list(outputs), "said": said}
