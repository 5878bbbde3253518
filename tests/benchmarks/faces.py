"""Faces in head MRI: who is still recognised, what tissues become, and what it costs.

People are made up (``deploy.phantoms.heads``): 60 who are tested, 30 whom the attacker learns from and 10 whose
heads are averaged, two visits each, at 4 mm; their brains are known, so that the figures are of the faces alone.
``remodel`` is the default of ``deface``: all that a rendering shows, drawn by the network of the tests (32
voxels). Beside it the mean of public heads (``deploy.reproduction.average_head``) draws, in both regions. Tissues are
segmented at 2 mm, and the whole way of one head is timed at 1 mm in a process of its own, brain and registration
included; what a network of 64 voxels takes is added, with weights as they are drawn. ``hull_speed_vs_rotations`` is
that of ``python -m tests.benchmarks hull``, where the ratio of the whole transform stands, too.

Three attackers, all of whom learned on other people what the method leaves: one measures the whole surface in
millimetres, one sees photographs, one has the face alone, without forehead, crown and neck, in millimetres.
``identification_5way`` and ``rank1`` are the first one's, who has everything; 0.2 is chance, and ``..._chance_to``
is where 97.5 % of those who guess stay below. The attack is worth nothing unless ``unaltered_5way`` is 0.95 or
more. What is found of ``strip`` is what brain and size give away by themselves, whatever is done to the rest.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
import torch

from agent.defacing.brain_extraction import Brain
from agent.defacing.change import checked
from agent.defacing.deid_gan.network import PRESETS, DeidGanGenerator, remodeller_from
from agent.defacing.deid_gan.network import drawn as drawn_by
from agent.defacing.face_region import Region
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.defacing.privacy_transform import transform
from agent.defacing.quality import examined
from agent.defacing.remodel import HeadGenerator, around_template, remodel
from agent.defacing.template import atlas, register
from deploy.demo.train_networks import kept_network
from deploy.reproduction import deid_gan
from deploy.reproduction.attacks.head_identification import Identification
from deploy.reproduction.average_head import average_of
from deploy.reproduction.deid_gan_heads import (
    BLURRED,
    BRAIN,
    HULL,
    MADE,
    REMODEL,
    UNALTERED,
    DeidSettings,
    DeidWork,
    known_phantoms,
)
from deploy.reproduction.measures.tissue_segmentation import PARTS
from tests.benchmarks import hull
from tests.benchmarks.report import Report, Row
from tests.support.heads import phantoms

Attacks = dict[str, Identification]  # by what the attacker has

TESTED: Final = 60
PUBLIC: Final = 30
AVERAGED: Final = 10
MM: Final = 4.0
TISSUE_MM: Final = 2.0
SEGMENTED: Final = 3
SIDE: Final = 64  # of the head that is timed
CUBE: Final = 32  # of those that are attacked: made of 4 mm voxels
OWN: Final = "remodel, the network shown the patient's brain (the paper)"
MEAN: Final = "remodel by the mean of public heads"
FACE: Final = "remodel by the mean of public heads, region face"
KINDS: Final = {"everything": "", "photographs": deid_gan.PHOTOGRAPHS, "face only": "face"}
KEEPS: Final = ("quickshear", "facemask", "deface")


def main() -> Report:
    """Sixty people at 4 mm."""
    return measured(TESTED, MM)


def measured(people: int, mm: float) -> Report:
    """So many tested people, at so many millimetres."""
    settings = DeidSettings(
        averaged=AVERAGED,
        public=PUBLIC,
        tested=people,
        mm=mm,
        side=CUBE,
        same=False,
        segmented=SEGMENTED,
        region=Region("surface"),
    )
    alone = replace(settings, methods=(REMODEL,))
    net = remodeller_from(kept_network("remodeller"), "public")
    drawn = (net.origin.sha256, around_template(net, atlas()))
    own = (net.origin.sha256 + " own", net)
    with tempfile.TemporaryDirectory() as folder:
        found = _attacked(settings, Path(folder, "net"), drawn)
        found[OWN] = _attacked(alone, Path(folder, "own"), own, (REMODEL,))[REMODEL]
        found[MEAN] = _attacked(alone, Path(folder, "mean"), None, (REMODEL,))[REMODEL]
        face = replace(alone, region=Region("face"))
        found[FACE] = _attacked(face, Path(folder, "face"), None, (REMODEL,))[REMODEL]
        tissues = _tissues(settings, Path(folder, "tissue"), drawn)
        tissues[FACE] = _tissues(face, Path(folder, "tissue of face"), None)[REMODEL]
    whole = _whole()
    rows = [row for name, each in found.items() for row in _rows(name, each)]
    rows += [Row(f"{name}: Dice of {part}, mean", tissues[name][part], "") for name in tissues for part in PARTS]
    change = f"the change of one head at {TISSUE_MM:g} mm"
    rows += [Row(f"{name}: {change}", told["seconds"], "CPU-s") for name, told in tissues.items()]
    rows += [Row(f"one 1 mm head: {name}", value, "CPU-s") for name, value in whole.items() if name != "peak"]
    rows.append(Row("one 1 mm head: peak memory", whole["peak"], "GB"))
    ratios = _ratios(found, tissues)
    ratios["hull_speed_vs_rotations"] = hull.main().ratios["hull_speed_vs_rotations"]
    return Report(tuple(rows), ratios | {"seconds_1mm": whole["whole"], "peak_gb_1mm": whole["peak"]})


def _ratios(found: dict[str, Attacks], tissues: dict[str, dict[str, float]]) -> dict[str, float]:
    parts = ("gm", "wm", "csf", "brain")
    ours = found[REMODEL]["everything"]
    dice = {name: min(tissues[name][part] for part in parts) for name in tissues}
    kept = [tissues[REMODEL][p] - tissues[name][p] for name in KEEPS for p in parts]
    told = {
        "brain_voxels_changed": max(t[deid_gan.CHANGED] for t in tissues.values()),
        "tissue_dice": dice[REMODEL],
        "identification_5way": ours.rate,
        "identification_5way_low": ours.low,
        "identification_5way_high": ours.high,
        "identification_5way_chance_to": ours.five.by_chance.high,
        "rank1": ours.rank1.value,
        "rank1_chance_to": ours.rank1.by_chance.high,
        "at_chance": float(ours.at_chance),
        "unaltered_5way": min(one.rate for one in found[UNALTERED].values()),
        "tissue_dice_minus_removal": min(kept),
        "tissue_dice_strip": dice["strip"],
    }
    for kind in KINDS:
        name = kind.replace(" ", "_")
        told[f"below_removal_{name}"] = min(found[one][kind].rate for one in KEEPS) - found[REMODEL][kind].rate
        for who, row in (("remodel", REMODEL), ("own_brain", OWN), ("mean", MEAN), ("region_face", FACE)):
            told[f"{who}_{name}_5way"] = found[row][kind].rate
            told[f"{who}_{name}_at_chance"] = float(found[row][kind].at_chance)
    return told | {"tissue_dice_region_face": dice[FACE]}


def _attacked(
    settings: DeidSettings,
    folder: Path,
    remodeller: tuple[str, HeadGenerator] | None = None,
    rows: tuple[str, ...] = (UNALTERED, BLURRED, *MADE, HULL, BRAIN),
) -> dict[str, Attacks]:
    """By method: what each attacker finds."""
    folder.mkdir()
    heads = replace(known_phantoms(settings, atlas(), register), remodeller=remodeller)
    work = DeidWork(heads, settings, folder, lambda _: None)
    found = {}
    for row in rows:
        kinds = KINDS if row in (UNALTERED, *MADE) else {"everything": ""}
        found[row] = {name: deid_gan.attack(work, 0, row, kind) for name, kind in kinds.items()}
        print(row, {name: one.line() for name, one in found[row].items()}, file=sys.stderr, flush=True)
    return found


def _rows(name: str, attacks: Attacks) -> list[Row]:
    rows = []
    for kind, one in attacks.items():
        word = "" if one.at_chance else ", above chance"
        told = f"{name}, {kind}"
        rows.append(Row(f"{told}: among five [{one.low:.3f}, {one.high:.3f}]{word}", one.rate, "of 1"))
        rows.append(Row(f"{told}: rank-1 of {one.gallery}", one.rank1.value, "of 1"))
    return rows


def _tissues(
    settings: DeidSettings, folder: Path, remodeller: tuple[str, HeadGenerator] | None
) -> dict[str, dict[str, float]]:
    """By method: the mean Dice of each part, brain voxels changed and seconds, over a few people."""
    folder.mkdir()
    told = replace(settings, mm=TISSUE_MM)
    heads = replace(known_phantoms(told, atlas(), register), remodeller=remodeller)
    work = DeidWork(heads, told, folder, lambda _: None)
    names = work.parts(0).tested[:SEGMENTED]
    found = {name: [] for name in settings.methods if name in MADE}
    for person in names:
        for method, each in found.items():
            each.append(work.told(work.visit(person, 1), method, 0))
    return {method: {key: fmean(one[key] for one in each) for key in each[0]} for method, each in found.items()}


def _whole() -> dict[str, float]:
    """Seconds of each step of one 1 mm head and peak memory, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.faces"]
    done = subprocess.run(
        command, capture_output=True, check=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def _one_head() -> dict[str, float]:
    """Mask, gamma, a 64^3 head and paste at 1 mm. The public heads are prepared before, at 4 mm, and not counted."""
    template = atlas()
    made = phantoms()
    public = []
    for person in range(200, 204):
        scan = made.scan(person, 0, 4.0)
        public.append(HeadScan(scan.volume, head_mask(scan.volume), Brain(scan.brain, 1.0, scan.to_template)))
    draws = average_of(public, SIDE)
    volume = made.scan(0, 0, 1.0).volume
    begun = _seconds()
    head = examined(volume, template, register)
    masked = _seconds()
    rng = np.random.default_rng(0)
    change = remodel(head, draws, Region("surface"), rng)
    config = PRESETS["base64"]
    gamma = torch.from_numpy(transform(head, SIDE, draws.population).stack())[None]
    drawn_by(DeidGanGenerator(config), gamma, torch.Generator().manual_seed(0))
    drawn = _seconds()
    checked(head.volume, head.brain.mask, change.onto(head.volume, head.brain.mask, rng))
    ended = _seconds()
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20
    return {
        "head and brain found": masked - begun,
        "gamma and the drawn head": drawn - masked,
        "laid in": ended - drawn,
        "whole": ended - begun,
        "peak": peak,
    }


def _seconds() -> float:
    """Of this process and of those that it waited for: the registration is a program of its own."""
    child = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + child.ru_utime + child.ru_stime


if __name__ == "__main__":
    print(json.dumps(_one_head()))
