"""``train autoencoder``, ``train verifier`` and ``train aligner``: the public networks of ``release distill``."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.cli.train import NetworkKind, PublicTraining, Trained, train
from agent.intervals import Proportion
from agent.models.diffusion.aligner import aligner_from
from agent.models.diffusion.aligner_training import Labelled, train_aligner_of
from agent.models.diffusion.aligner_training import suited as suited_aligner
from agent.models.diffusion.autoencoder import PRESETS, AutoencoderArchitecture, autoencoder_from
from agent.models.diffusion.autoencoder_training import AutoencoderTraining, train_autoencoder
from agent.models.diffusion.prompts import TEMPLATES, Conditions
from agent.models.features.extractors import features_from
from agent.models.image_folder import ImageFolderError, read_identities, read_labels
from agent.models.recognition.verifier_training import NearDuplicates, near_duplicates, second_opinion, train_verifier
from agent.models.recognition.verifier_training import suited as suited_verifier
from agent.models.stylegan.network import Generator
from protos.common.durable_files import replace_file

FOLDERS: Final = "folders"  # in the place of a list: an image's folder names its condition


def run(arguments: argparse.Namespace) -> int:
    """Train one of these networks."""
    return train(arguments, KINDS[arguments.network])


# -- train


def _channels(arguments: argparse.Namespace) -> int:
    return 1 if arguments.grey else 3


def _architecture(arguments: argparse.Namespace) -> AutoencoderArchitecture:
    """The preset's, or the one for the size.

    Raises:
        ValueError: there is none of this size, or no such file of features.
    """
    known = {preset.side: preset for preset in reversed(list(PRESETS.values()))}
    found = PRESETS.get(arguments.preset) if arguments.preset else known.get(arguments.side)
    if found is None or found.side != arguments.side:
        raise ValueError(
            f"there is no autoencoder of {arguments.side} pixels; --preset is one of: {', '.join(PRESETS)}"
        )
    if arguments.features is not None and not arguments.features.is_file():
        raise ValueError(f"--features: file not found: {arguments.features.name}")
    return found.fitted(_channels(arguments))


def _autoencoder(arguments: argparse.Namespace, public: PublicTraining, _generator: Generator | None) -> Trained:
    config = AutoencoderTraining(
        _architecture(arguments),
        public.steps,
        arguments.seed,
        device=arguments.device,
        precision="float32" if arguments.device == "cpu" else "bfloat16",
        checkpoint_every=public.often,
        say_every=10,
    )
    # their digest stands in the autoencoder's file: who vouches for the one vouches for the other
    features = features_from(arguments.features.read_bytes(), "public") if arguments.features else None
    raw = train_autoencoder(public.images, config, arguments.out, public.say, features)
    replace_file(path := arguments.out / "autoencoder.safetensors", raw)
    return path, {}


def _verifier(arguments: argparse.Namespace, public: PublicTraining, _generator: Generator | None) -> Trained:
    places, whose = read_identities(arguments.identities, public.names)
    config = suited_verifier(f"verifier-{arguments.seed}", arguments.side, _channels(arguments), public.steps)
    config = replace(config, seed=arguments.seed, checkpoint_every=public.often, device=arguments.device)
    if arguments.second:
        config = second_opinion(config)
    # what it makes of every image counts into the run's digest: with another autoencoder it is another run
    near = _near(arguments)
    trained = train_verifier(public.images[places], whose, config, arguments.out, public.say, near)
    name = "unseen" if arguments.second else "verifier"
    replace_file(path := arguments.out / f"{name}-{arguments.seed}.safetensors", trained.file)
    judged = trained.judged
    least = min(judged.caught, key=lambda kind: judged.caught[kind].value)
    said = (
        f"on people outside the training: area under the curve {_said(judged.auc)}, nearest is the same person "
        f"{_said(judged.precision_at_1)}, near-duplicates caught {_said(judged.caught[least])} at the least ({least})"
    )
    return path, {"second": arguments.second, "verified": asdict(judged), "said": said}


def _near(arguments: argparse.Namespace) -> NearDuplicates | None:
    """What makes near-duplicates by the autoencoder that was named; None where none was.

    Raises:
        ValueError: there is no such file, or it is of images of another shape.
        WeightsError: it is no autoencoder.
    """
    if arguments.autoencoder is None:
        return None
    path = arguments.autoencoder
    if not path.is_file():
        raise ValueError(f"--autoencoder: file not found: {path.name}")
    through = autoencoder_from(path.read_bytes()).to(arguments.device)
    if through.shape != ((arguments.side, arguments.side) if arguments.grey else (arguments.side, arguments.side, 3)):
        kind = "grey" if len(through.shape) == 2 else "colour"
        raise ValueError(f"--autoencoder: {path.name} is of {kind} images of {through.shape[0]} pixels")
    return near_duplicates(through)


def _said(share: Proportion) -> str:
    return f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"


def _aligner(arguments: argparse.Namespace, public: PublicTraining, _generator: Generator | None) -> Trained:
    labelled, conditions = _labelled(arguments, public)
    config = suited_aligner(arguments.side, _channels(arguments), public.steps)
    config = replace(config, seed=arguments.seed, checkpoint_every=public.often, device=arguments.device)
    raw = train_aligner_of(labelled, conditions, config, arguments.out, public.say)
    aligner = aligner_from(raw)
    aligner.demand()
    replace_file(path := arguments.out / "aligner.safetensors", raw)
    right, chance = aligner.fitness.right, aligner.fitness.chance
    said = (
        f"on images outside the training it finds the condition of {_said(right)}; "
        f"always the commonest one would be right for {chance:.3f}. In the configuration: "
        f"conditions = {list(conditions.names)}, templates = {list(conditions.templates)}".replace("'", '"')
    )
    return path, {**conditions.told(), "right": asdict(right), "chance": chance, "said": said}


def _labelled(arguments: argparse.Namespace, public: PublicTraining) -> tuple[Labelled, Conditions]:
    """The images that have a condition, whose each is, and the conditions in the order of their names."""
    where = None if arguments.labels == FOLDERS else Path(arguments.labels)
    places, shown = read_labels(where, public.names)
    names, labels = np.unique(shown, return_inverse=True)
    conditions = Conditions(tuple(map(str, names)), _templates(arguments.templates))
    owners = _owners(arguments.identities, public.names)[places]
    return Labelled(public.images[places], labels.astype(np.int64), owners), conditions


def _owners(path: Path | None, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Whose each image is; one that is on no list is its own person's."""
    owners = np.arange(len(names), dtype=np.int64)
    if path is not None:
        places, whose = read_identities(path, names)
        owners[places] = len(names) + whose
    return owners


def _templates(path: Path | None) -> tuple[str, ...]:
    """Prompts, one in each line.

    Raises:
        ImageFolderError: the file cannot be read.
    """
    if path is None:
        return TEMPLATES
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise ImageFolderError(f"{path.name} is not UTF-8 text") from None
    return tuple(line.strip() for line in lines if line.strip())


def _sized(arguments: argparse.Namespace) -> object:
    """Both networks have a trunk of this size, and the verifier's autoencoder is one of such images.

    Raises:
        ValueError: they have none, or it is not.
    """
    if arguments.network == "verifier":
        _near(arguments)
    suited = suited_verifier("checked", arguments.side, _channels(arguments), 1)
    return suited, suited_aligner(arguments.side, _channels(arguments), 1)


KINDS: Final[dict[str, NetworkKind]] = {
    "autoencoder": NetworkKind(10_000, _architecture, _autoencoder),
    "verifier": NetworkKind(2_000, _sized, _verifier),
    "aligner": NetworkKind(1_000, _sized, _aligner),
}
