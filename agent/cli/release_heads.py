"""``release remodel``: patients' own head scans with other faces; and ``train remodeller``, which draws them."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import sys
from functools import partial
from typing import Any, Final

import numpy as np

from agent.cli import release as commands
from agent.cli.output import OUT, print_progress, progress_columns, require_device
from agent.defacing import template
from agent.defacing.deid_gan.network import PRESETS
from agent.defacing.deid_gan.remodeller_training import train_remodeller
from agent.defacing.deid_gan.training import VolumeGanTraining
from agent.defacing.quality import examined
from agent.defacing.training_heads import examine, find_heads
from agent.errors import CommandError
from agent.mechanisms.remodel.config import read_remodel
from agent.mechanisms.remodel.mechanism import Remodelled
from agent.models.training_loop import TrainingProgress
from agent.release.pipeline import release_heads
from agent.release.preflight import of_heads
from agent.service.making import begin_making
from agent.volumes.errors import REASONS
from protos.common.durable_files import replace_file

STEPS: Final = 4000
ABSOLUTE: Final = 300.0  # weight of the mean absolute error: at 32 voxels the paper's loss alone did not train


def run(arguments: argparse.Namespace) -> int:
    """Release, or train the network of it."""
    if arguments.command == "train remodeller":
        return _train(arguments)
    return release(arguments)


def release(arguments: argparse.Namespace) -> int:
    """Exit 1 when any review refuses it."""

    def say(step: str, detail: str) -> None:
        print_progress(step, detail, arguments.json)

    commands.refuse_files(arguments)
    with commands.open_release(arguments, say) as runtime:
        mechanism, modality = read_remodel(arguments.config, runtime.settings.public_components)
        say("price", "face removed; the brain itself remains linkable: there is no guarantee (level C)")
        if arguments.dry_run:
            asked = commands.asked_for(mechanism, modality, arguments.anew)
            return commands.dry_run(runtime, of_heads(runtime.site, mechanism, modality), asked, arguments.json)
        begin_making(runtime, arguments.anew)
        examine = partial(examined, atlas=template.atlas(), register=template.register)
        rng = np.random.default_rng(secrets.randbits(128))
        shown = partial(_shown, arguments)
        make = lambda: release_heads(runtime.site, mechanism, modality, examine, rng, shown)  # noqa: E731
        return commands.run_release(runtime, arguments, mechanism.name, make)


def _train(arguments: argparse.Namespace) -> int:
    """Examine public heads, then train on them, or go on where an earlier call stopped."""
    require_device(arguments.device, "--device cpu, and --side 32")
    known = {preset.side: preset for preset in PRESETS.values()}
    if arguments.side not in known:
        raise CommandError(
            f"there is no network of {arguments.side} voxels; --side is one of: {', '.join(map(str, known))}"
        )
    scans = find_heads(arguments.heads)
    config = VolumeGanTraining(
        known[arguments.side],
        arguments.steps or STEPS,
        arguments.seed,
        absolute=ABSOLUTE,
        sparing=arguments.side >= 128,
        precision="float32" if arguments.device == "cpu" else "bfloat16",
        devices=(arguments.device, arguments.device),
        checkpoint_every=max(1, (arguments.steps or STEPS) // 20),
        say_every=10,
    )
    with progress_columns(arguments.json) as bar:
        reading = bar.add_task("examining", total=None, told="")
        told = lambda done, of: bar.update(reading, completed=done, total=of)  # noqa: E731
        heads, left = examine(scans, arguments.out, told)
        task = bar.add_task("remodeller", total=config.steps, told="")

        def say(done: TrainingProgress) -> None:
            losses = ", ".join(f"{name} {value:.3g}" for name, value in done.losses.items())
            bar.update(task, completed=done.step, told=losses)

        raw = train_remodeller(heads, config, arguments.out, say)
        replace_file(path := arguments.out / "remodeller.safetensors", raw)
    digest = hashlib.sha256(raw).hexdigest()
    if arguments.json:
        line = {"network": "remodeller", "file": path.name, "sha256": digest, "heads": len(heads), "left_out": left}
        sys.stdout.write(json.dumps({**line, "steps": config.steps}) + "\n")
        return 0
    OUT.print(f"{path}: trained on {len(heads)} heads in {config.steps} steps", markup=False, soft_wrap=True)
    for why, count in left.items():
        OUT.print(f"{count} left out: {REASONS[why]}", markup=False, soft_wrap=True)
    OUT.print(
        "if no patient of this site is among them, vouch for it in site.toml's public_components:", soft_wrap=True
    )
    OUT.print(digest)
    return 0


def _shown(arguments: argparse.Namespace, made: Remodelled) -> None:
    """The figures, for the site's reviewer: of patients, and so no part of what leaves but for two bounds."""
    figures: dict[str, Any] = {
        "heads": len(made.made.labels),
        "gallery": made.gallery,
        "rank1": {"hits": made.known.hits, "of": made.known.of, "interval": [*_ends(made.known)]},
        "power": {"hits": made.power.hits, "of": made.power.of, "interval": [*_ends(made.power)]},
        "left_out": made.left_out,
    }
    if arguments.json:
        sys.stdout.write(json.dumps({"mechanism": "remodel", "review": figures}) + "\n")
        return
    low, high = _ends(made.known)
    told = f"{made.known.hits:g} of {made.known.of} faces matched with their own [{low:.3f}, {high:.3f}]"
    print_progress("vet", f"{told}; by chance 1 in {made.gallery}", False)
    low, high = _ends(made.power)
    told = (
        f"on unaltered heads the same attack matched {made.power.hits:g} of {made.power.of} [{low:.3f}, {high:.3f}]"
    )
    print_progress("vet", told, False)
    for why, count in made.left_out.items():
        print_progress("vet", f"left out: {count} ({why})", False)


def _ends(found: Any) -> tuple[float, float]:
    return found.interval.low, found.interval.high
