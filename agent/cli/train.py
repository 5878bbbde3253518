"""The commands that train the networks of synthesis, and what all commands of synthesis have in common."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.cli import train_network
from agent.cli.output import OUT, as_sentences, progress_columns, require_device
from agent.cli.train_semantics import SemanticsOrder, in_words
from agent.errors import CommandError
from agent.models.features.extractors import RandomFeatures
from agent.models.features.simclr_training import RepresentationConfig, train_features
from agent.models.features.trunk import TrunkArchitecture
from agent.models.image_folder import read_identities, read_image_folder
from agent.models.published.loading import load_official
from agent.models.recognition.recogniser_training import (
    ENOUGH,
    RecognitionConfig,
    TooFewPeopleError,
    split,
    suited,
    train_recogniser,
)
from agent.models.stylegan.network import PRESETS, Generator, StyleGanShape, generator_from
from agent.models.stylegan.restyle_training import FILE as ENCODER
from agent.models.stylegan.restyle_training import InversionConfig, train_encoder
from agent.models.stylegan.training import GENERATOR, GanConfig, auto, train_generator
from agent.models.training_loop import TrainingProgress as Done
from protos.common.durable_files import replace_file

_SMALL: Final = 64  # pixels: up to it, an encoder learns in thousands of steps, at a higher rate
_BATCH: Final = 64  # images from which features are learned at once, if there are so many


@dataclass(frozen=True, slots=True, eq=False)
class PublicTraining:
    """The public training set of a network, and how progress is shown."""

    images: NDArray[np.uint8]  # (n, s, s[, 3])
    names: tuple[str, ...]  # n
    steps: int
    say: Callable[[Done], None]

    @property
    def often(self) -> int:
        """Steps between two checkpoints: what a kill may cost."""
        return max(1, min(500, self.steps // 20))


Trained = tuple[Path, Mapping[str, Any]]  # the file, and what else there is to say; "said": in words


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """How one kind of network is trained: for so many steps if none are typed, after a check of what was typed."""

    steps: int
    check: Callable[[argparse.Namespace], object]
    make: Callable[[argparse.Namespace, PublicTraining, Generator | None], Trained]


def train(arguments: argparse.Namespace, kind: NetworkKind) -> int:
    """Train one network on public images, or go on where an earlier call stopped."""
    generator = _asked(arguments, kind)
    steps = arguments.steps or kind.steps
    found, began = 0, list[int]()
    with progress_columns(arguments.json) as bar:
        reading = bar.add_task("reading", total=None, told="")

        def count(done: int, every: int) -> None:
            nonlocal found
            found = every
            bar.update(reading, completed=done, total=every)

        images, names = read_image_folder(arguments.pictures, arguments.side, arguments.grey, count)
        bar.remove_task(reading)
        task = bar.add_task(arguments.network, total=steps, told="")

        def say(done: Done) -> None:
            if not began:  # what an earlier call did says nothing of this one's pace
                began.append(done.step)
                bar.reset(task, total=steps)
            losses = ", ".join(f"{name} {value:.3g}" for name, value in done.losses.items())
            bar.update(task, completed=done.step, told=losses)

        public = PublicTraining(images, names, steps, say)
        with as_sentences():
            path, more = kind.make(arguments, public, generator)
        bar.update(task, completed=steps)
    told = {"pictures": len(images), "passed_over": found - len(images), "steps": steps, "trained": bool(began)}
    return _trained(arguments, path, {**told, **more})


def _asked(arguments: argparse.Namespace, kind: NetworkKind) -> Generator | None:
    """What was typed can be done, as far as it is known before an image is read; an encoder's generator.

    Raises:
        CommandError, WeightsError: it cannot.
    """
    require_device(arguments.device, "--device cpu, and a small --side")
    if arguments.network == "encoder":
        generator = _drawing(arguments)
        side, grey = generator.architecture.resolution, generator.architecture.channels == 1
        if arguments.side not in (None, side) or (arguments.grey and not grey):
            raise CommandError(f"the generator draws {side} pixels in {'grey' if grey else 'colour'}")
        arguments.side, arguments.grey = side, grey
        return generator
    try:
        kind.check(arguments)
    except ValueError as error:
        raise CommandError(f"{error}") from None
    return None


def _trained(arguments: argparse.Namespace, path: Path, more: Mapping[str, Any]) -> int:
    """Say what there is now, and what makes it public."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if arguments.json:
        line = {"network": arguments.network, "file": path.name, "sha256": digest, **more}
        line.pop("said", None)
        sys.stdout.write(json.dumps(line) + "\n")
        return 0
    if more["passed_over"]:
        told = f"{more['passed_over']} skipped: not readable, or smaller than {arguments.side} pixels a side"
        OUT.print(f"{told} once their dark border is cut", soft_wrap=True)
    done = "trained" if more["trained"] else "nothing to do: the training is complete"
    OUT.print(f"{path}: {done}, on {more['pictures']} images in {more['steps']} steps", markup=False, soft_wrap=True)
    if "judged" in more:
        first, true, false = (more["judged"][name] for name in ("first", "matched", "mistaken"))
        rank = f"rank-1 {first['value']:.3f} [{first['low']:.3f}, {first['high']:.3f}]"
        rates = f"true matches {true['value']:.3f}, false matches {false['value']:.4f}"
        OUT.print(f"on people outside the training: {rank}, {rates}", markup=False, soft_wrap=True)
    if "semantics" in more:
        OUT.print(in_words(more), markup=False, soft_wrap=True)
    if "said" in more:
        OUT.print(more["said"], markup=False, soft_wrap=True)
    OUT.print(
        "if no patient of the cohort is in them, vouch for it in site.toml's public_components:", soft_wrap=True
    )
    OUT.print(digest)
    return 0


def _drawing(arguments: argparse.Namespace) -> Generator:
    """The generator that an encoder is trained for: of `train generator`, or a published one with its digest."""
    kind, _, name = arguments.generator.partition(":")
    if kind == "stylegan2-ada":
        if not arguments.sha256:
            raise CommandError("get the SHA-256 of the generator from its authors, and give it with --sha256")
        net, _origin = load_official(kind, Path(name).read_bytes(), arguments.sha256.lower())
        assert isinstance(net, Generator)
        return net
    generator, _packed = generator_from(Path(arguments.generator).read_bytes())
    return generator.eval()


def _architecture(arguments: argparse.Namespace) -> StyleGanShape:
    known = {p.resolution: p for p in reversed(list(PRESETS.values()))}
    found = PRESETS.get(arguments.preset) if arguments.preset else known.get(arguments.side)
    if found is None or found.resolution != arguments.side:
        raise CommandError(
            f"there is no generator of {arguments.side} pixels; --preset is one of: {', '.join(PRESETS)}"
        )
    return found.with_channels(1 if arguments.grey else 3)


def _generator(arguments: argparse.Namespace, public: PublicTraining, _generator: Generator | None) -> Trained:
    architecture = _architecture(arguments)
    config = GanConfig(architecture, public.steps, arguments.seed)
    if arguments.device != "cpu":
        config = replace(auto(architecture, public.steps, arguments.seed), device=arguments.device)
    config = replace(config, checkpoint_every=public.often, say_every=10)
    train_generator(public.images, config, arguments.out, public.say)
    return arguments.out / GENERATOR, {}


def _encoder(arguments: argparse.Namespace, public: PublicTraining, generator: Generator | None) -> Trained:
    assert generator is not None
    pairs = public.steps // 2
    config = InversionConfig(
        pairs,
        public.steps - pairs,
        rate=1e-3 if generator.architecture.resolution <= _SMALL else 1e-4,
        seed=arguments.seed,
        bf16=arguments.device != "cpu",
        checkpoint_every=public.often,
        say_every=10,
    )
    unit = public.images.astype(np.float32) / np.float32(255)
    train_encoder(generator.to(arguments.device), unit, config, arguments.out, public.say, RandomFeatures())
    return arguments.out / ENCODER, {}


def _trunk(arguments: argparse.Namespace) -> TrunkArchitecture:
    return TrunkArchitecture(arguments.side, 1 if arguments.grey else 3)


def _features(arguments: argparse.Namespace, public: PublicTraining, _generator: Generator | None) -> Trained:
    batch = min(_BATCH, len(public.images))
    config = RepresentationConfig("features", _trunk(arguments), public.steps, batch, seed=arguments.seed)
    config = replace(config, checkpoint_every=public.often)
    raw = train_features(public.images, config, arguments.out, public.say, torch.device(arguments.device))
    replace_file(path := arguments.out / "features.safetensors", raw)
    return path, {}


def _order(arguments: argparse.Namespace) -> SemanticsOrder:
    return SemanticsOrder(**{one.name: getattr(arguments, one.name) for one in fields(SemanticsOrder)})


def _semantics(arguments: argparse.Namespace, public: PublicTraining, _generator: Generator | None) -> Trained:
    return _order(arguments).make(public.images, public.names, public.steps, arguments.out, public.say)


def _network(arguments: argparse.Namespace, public: PublicTraining, _generator: Generator | None) -> Trained:
    return train_network.make(arguments, public.images, public.names, public.steps, public.say)


def _recogniser(arguments: argparse.Namespace, public: PublicTraining, _generator: Generator | None) -> Trained:
    places, whose = read_identities(arguments.identities, public.names)
    name, rate = f"recogniser-{arguments.seed}", arguments.false_match_rate
    config = suited(name, arguments.side, 1 if arguments.grey else 3, public.steps)
    config = replace(config, seed=arguments.seed, false_match_rate=rate, checkpoint_every=public.often)
    images = public.images[places]
    try:
        split(images, whose, config)
    except TooFewPeopleError as error:
        raise TooFewPeopleError(f"{error}; {_needed(whose, config)}") from None
    trained = train_recogniser(images, whose, config, arguments.out, public.say, torch.device(arguments.device))
    replace_file(path := arguments.out / f"{name}.safetensors", trained.file)
    return path, {"judged": asdict(trained.judged)}


def _needed(whose: NDArray[np.int64], config: RecognitionConfig) -> str:
    """How many people it takes. They are public or made, so they may be counted."""
    _, counts = np.unique(whose, return_counts=True)
    pairs = math.ceil(ENOUGH / config.false_match_rate)
    each = max(2.0, float(counts.mean()))
    some = math.ceil((1.0 + math.sqrt(1.0 + 8.0 * pairs / each**2)) / 2.0)  # people whose images make so many pairs
    enough = math.ceil(some / config.held_out)
    return (
        f"the list has {len(counts)} people, {int((counts < 2).sum())} of them with one image. "
        f"A share of {config.held_out:g} of them settles the threshold; at a false match rate of "
        f"{config.false_match_rate:g} that takes {pairs} pairs of two people: "
        f"about {enough} people with {each:.2g} images each"
    )


KINDS: Final[dict[str, NetworkKind]] = {
    "generator": NetworkKind(25_000, _architecture, _generator),
    "encoder": NetworkKind(20_000, _drawing, _encoder),
    "features": NetworkKind(2_000, _trunk, _features),
    "network": NetworkKind(2_000, train_network.order, _network),
    "recogniser": NetworkKind(2_000, _trunk, _recogniser),
    "semantics": NetworkKind(2_000, _order, _semantics),
}


def run(arguments: argparse.Namespace) -> int:
    """Train one of these networks."""
    return train(arguments, KINDS[arguments.network])
