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

from agent import commands
from agent.desk import open_desk
from agent.edges import atlas as atlases
from agent.edges.bids import BadTable
from agent.edges.public_heads import examine, found
from agent.edges.remodel import read_remodel
from agent.foreseen import of_heads
from agent.heads.head import examined
from agent.heads.reasons import REASONS
from agent.mechanisms.remodel import Remodelled
from agent.nets.volume_gan import PRESETS
from agent.pipeline import release_heads
from agent.site import Parcel, Refused, Waiting
from agent.synthesis_commands import OUT, BadOrder, answered, shown, there
from agent.training.loop import Progress, write_whole
from agent.training.remodelling import TooFewHeads, train_remodeller
from agent.training.volume_gan import VolumeGanTraining

STEPS: Final = 4000
ABSOLUTE: Final = 300.0  # weight of the mean absolute error: at 32 voxels the paper's loss alone did not train


def run(arguments: argparse.Namespace) -> int:
    """What it expects to go wrong becomes a sentence."""
    return answered(release, arguments)


def release(arguments: argparse.Namespace) -> int:
    """Exit 1 when any review refuses it."""

    def say(step: str, detail: str) -> None:
        commands.tell(step, detail, arguments.json)

    with open_desk(arguments.home, say, arguments.project) as desk:
        mechanism, modality = read_remodel(arguments.config, desk.settings.public_components)
        say("price", "face removed; the brain itself remains linkable: nothing is promised (level C)")
        if arguments.dry_run:
            asked = commands.asked_for(mechanism, modality, arguments.anew)
            return commands.dry_run(desk, of_heads(desk.site, mechanism, modality), asked, arguments.json)
        commands.start_making(desk, arguments.anew)
        examine = partial(examined, atlas=atlases.atlas(), register=atlases.register)
        rng = np.random.default_rng(secrets.randbits(128))
        goods: Parcel | None = None
        try:
            shown = partial(_shown, arguments)
            goods, verdict = release_heads(desk.site, mechanism, modality, examine, rng, shown)
        except Refused as refusal:
            verdict = refusal.verdict
        except Waiting as waiting:
            return commands.print_waiting(desk, waiting, arguments.json)
        name = goods.release.release if goods else ""
        desk.log.info("verdict", release=name, rules=[f.rule for f in verdict.findings])
        commands.print_verdict(name, mechanism.name, verdict, arguments.json)
        return 0 if verdict.admitted else 1


def train(arguments: argparse.Namespace) -> int:
    """``train remodeller``; what it expects to go wrong becomes a sentence."""
    return answered(_train, arguments, (BadTable, TooFewHeads))


def _train(arguments: argparse.Namespace) -> int:
    """Examine public heads, then train on them, or go on where an earlier call stopped."""
    there(arguments.device, "--device cpu, and --side 32")
    known = {preset.side: preset for preset in PRESETS.values()}
    if arguments.side not in known:
        raise BadOrder(f"no network of {arguments.side} voxels; there is one of: {', '.join(map(str, known))}")
    scans = found(arguments.heads)
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
    with shown(arguments.json) as bar:
        reading = bar.add_task("examining", total=None, told="")
        told = lambda done, of: bar.update(reading, completed=done, total=of)  # noqa: E731
        heads, left = examine(scans, arguments.out, told)
        task = bar.add_task("remodeller", total=config.steps, told="")

        def say(done: Progress) -> None:
            losses = ", ".join(f"{name} {value:.3g}" for name, value in done.losses.items())
            bar.update(task, completed=done.step, told=losses)

        raw = train_remodeller(heads, config, arguments.out, say)
        write_whole(path := arguments.out / "remodeller.safetensors", raw)
    digest = hashlib.sha256(raw).hexdigest()
    if arguments.json:
        line = {"network": "remodeller", "file": path.name, "sha256": digest, "heads": len(heads), "left_out": left}
        sys.stdout.write(json.dumps({**line, "steps": config.steps}) + "\n")
        return 0
    OUT.print(f"{path}: trained on {len(heads)} heads in {config.steps} steps", markup=False, soft_wrap=True)
    for why, count in left.items():
        OUT.print(f"{count} left out: {REASONS[why]}", markup=False, soft_wrap=True)
    OUT.print("if nobody of this site is among them, vouch for it in site.toml's public_components:", soft_wrap=True)
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
    commands.tell("vet", f"{told}; by chance 1 in {made.gallery}", False)
    low, high = _ends(made.power)
    told = f"of unaltered heads the same attack knew {made.power.hits:g} of {made.power.of} [{low:.3f}, {high:.3f}]"
    commands.tell("vet", told, False)
    for why, count in made.left_out.items():
        commands.tell("vet", f"left out: {count} ({why})", False)


def _ends(found: Any) -> tuple[float, float]:
    return found.interval.low, found.interval.high
