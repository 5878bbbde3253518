"""The command that makes a paper's table again, from a data set's folder to the table."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from agent.edges.atlas import atlas, register
from agent.edges.bids import BadTable, adni, bids, oasis3
from agent.edges.volumes import read
from agent.nets.features import FEATURES
from agent.nets.volume_gan import remodeller_from
from agent.nouns import Volume
from agent.reproduce import anonfaces, deid, deid_heads, distill_sources, distillation, ksalsa, privimage, sources
from agent.reproduce.datasets import LOADERS
from agent.reproduce.experiment import PRESETS, Official, Settings
from agent.reproduce.kept import Say
from agent.reproduce.tables import Table, as_json, as_text
from agent.stages.remodel import around_template
from agent.synthesis_commands import ERR, BadOrder, answered, as_sentences, there

_SIGNS: Final = {  # a file that only this data set has
    "aptos": ("train.csv",),
    "eyepacs": ("trainLabels.csv",),
    "celeba": ("identity_CelebA.txt", "list/identity_CelebA.txt"),
    "rafd": ("Rafd*.jp*g",),
    "cifar10": ("cifar-10-batches-bin", "batches.meta.txt"),
    "camelyon17": ("metadata.csv",),
    "imagenet": ("n0*", "train/n0*"),
    distill_sources.MIMIC: ("mimic-cxr-2.0.0-metadata.csv.gz",),
}
_ROLES: Final = {"style": "VGG19", "content": "MoCo", "judge": "Inception"}  # and the paper's network for it


def run(arguments: argparse.Namespace) -> int:
    """``reproduce``; what it expects to go wrong becomes a sentence and exit status 1."""
    return answered(reproduce, arguments)


def reproduce(arguments: argparse.Namespace) -> int:
    """A paper's table again; exit 0 whatever it shows: whether an order came out is what the table says."""
    if arguments.experiment in privimage.TABLES:
        return _private(arguments)
    if arguments.experiment in distillation.TABLES:
        return _distilled(arguments)
    if arguments.experiment in deid.TABLES:
        return _faces(arguments)
    settings = _settings(arguments)
    if arguments.data is None or arguments.layout in (sources.DIGITS, distill_sources.PHANTOMS):
        raise BadOrder("--data is the folder of a data set")
    layout = _loaded(arguments.layout or layout_of(arguments.data))
    data = LOADERS[layout](arguments.data, settings.side, arguments.limit)
    runner = ksalsa.run if arguments.experiment in ksalsa.TABLES else anonfaces.run
    with as_sentences():
        table = runner(arguments.experiment, data, settings, arguments.out, _say(arguments))
    return _shown(arguments, table)


def _private(arguments: argparse.Namespace) -> int:
    """PrivImage's tables: from two folders, or from handwriting that comes along.

    Raises:
        BadOrder: the folders, the layout and the preset do not go together.
    """
    without = arguments.data is None
    layout = arguments.layout or (sources.DIGITS if without else layout_of(arguments.data))
    if without != (layout == sources.DIGITS):
        raise BadOrder("--data is the folder of a data set; --layout digits needs none")
    if layout != sources.DIGITS:
        _loaded(layout)
    if without == (arguments.public is not None):
        raise BadOrder("--public goes with --data: ImageNet's folder, pictures of nobody in the data set")
    name = arguments.preset or sources.FOR.get(layout, "")
    if name not in sources.PRESETS or without != (name == sources.FOR[sources.DIGITS]):
        raise BadOrder(f"--preset for {layout}: one of {', '.join(sources.PRESETS)}; digits8 goes with digits alone")
    settings = sources.PRESETS[name]
    there(settings.device, "use --layout digits")
    with as_sentences():
        found = (
            sources.digits()
            if without
            else sources.read(arguments.data, arguments.public, layout, settings, arguments.limit)
        )
        told = sources.fitted(settings, found)
        table = privimage.run(arguments.experiment, found, told, arguments.out, _say(arguments))
    return _shown(arguments, table)


def _distilled(arguments: argparse.Namespace) -> int:
    """Privacy Distillation's tables: from MIMIC-CXR-JPG's folder, or from made-up radiographs.

    Raises:
        BadOrder: the folder, the layout and the preset do not go together.
    """
    without, made = arguments.data is None, distill_sources.PHANTOMS
    layout = arguments.layout or (made if without else layout_of(arguments.data))
    if layout not in distill_sources.FOR or without != (layout == made) or arguments.public is not None:
        raise BadOrder(f"--data is MIMIC-CXR-JPG's folder; --layout {made} needs none; --public is of privimage")
    settings = distill_sources.PRESETS.get(arguments.preset or distill_sources.FOR[layout])
    if settings is None:
        raise BadOrder(f"--preset is one of: {', '.join(distill_sources.PRESETS)}")
    there(settings.device, f"use --preset chest32 --layout {made}")
    with as_sentences():
        found = (
            distill_sources.phantoms(settings)
            if without
            else distill_sources.folder(arguments.data, settings, arguments.limit)
        )
        table = distillation.run(arguments.experiment, found, settings, arguments.out, _say(arguments))
    return _shown(arguments, table)


def _faces(arguments: argparse.Namespace) -> int:
    """C-DeID-GAN's figures: from a BIDS folder of heads (OASIS-3, ADNI), or from made-up heads.

    Raises:
        BadOrder: the preset does not go with them.
    """
    name = arguments.preset or ("heads3mm" if arguments.data is None else "folder")
    if name not in deid_heads.PRESETS or (name == "folder") is (arguments.data is None):
        raise BadOrder(f"--preset is one of: {', '.join(deid_heads.PRESETS)}; folder goes with --data")
    if arguments.layout is not None or arguments.public is not None:
        raise BadOrder("--layout and --public are of other tables")
    settings = deid_heads.smaller(deid_heads.PRESETS[name], arguments.limit)
    with as_sentences():
        heads = (
            deid_heads.phantoms(settings, atlas(), register)
            if arguments.data is None
            else deid_heads.Heads(arguments.data.name, _scanned(arguments.data), atlas(), register)
        )
        heads = _drawn(heads, arguments.network)
        table = deid.run(arguments.experiment, heads, settings, arguments.out, _say(arguments))
    return _shown(arguments, table)


def _drawn(heads: deid_heads.Heads, network: Path | None) -> deid_heads.Heads:
    """With what draws the faces of the row "remodel", which the table names."""
    if network is None:
        return replace(heads, name=f"{heads.name}; faces drawn by the mean of other people's heads")
    made = around_template(remodeller_from(network.read_bytes(), "public"), heads.atlas)
    named = f"{heads.name}; faces drawn by {network.name} {made.origin.sha256[:12]}"
    return replace(heads, name=named, remodeller=(made.origin.sha256, made))


def _scanned(folder: Path) -> tuple[deid_heads.Scanned, ...]:
    """The scans of a BIDS folder, read when they are needed; of two of one session the first.

    Raises:
        BadOrder: the folder is none.
    """
    try:
        sessions = {path.name[4:5] for path in folder.glob("sub-*/ses-*")}
        reader = (
            oasis3 if sessions == {"d"} else adni if sessions == {"M"} else bids
        )  # a session names its day or month
        rows = {(scan.person, scan.session): scan for scan in reversed(reader(folder))}
    except (BadTable, OSError) as error:
        raise BadOrder(f"--data: {error}") from None
    found = (rows[key] for key in sorted(rows))
    return tuple(deid_heads.Scanned(s.person, s.session, s.age, partial(_volume, s.path)) for s in found)


def _volume(path: Path) -> Volume:
    return read(path).seen()


def _loaded(layout: str) -> str:
    """A layout that these tables can be made from.

    Raises:
        BadOrder: it is another table's.
    """
    if layout not in LOADERS:
        raise BadOrder(f"{layout} is for other tables; here: {', '.join(LOADERS)}")
    return layout


def _say(arguments: argparse.Namespace) -> Say:
    return lambda line: None if arguments.json else ERR.print(line, markup=False, soft_wrap=True)


def _shown(arguments: argparse.Namespace, table: Table) -> int:
    sys.stdout.write((as_json if arguments.json else as_text)(table) + "\n")
    return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    """Of the preset, with the published networks that were named.

    Raises:
        BadOrder: there is no such preset, or this machine or what was named does not do for it.
    """
    settings = PRESETS.get(arguments.preset or next(iter(PRESETS)))
    if settings is None:
        raise BadOrder(f"--preset is one of: {', '.join(PRESETS)}")
    anywhere = [name for name, preset in PRESETS.items() if preset.device == "cpu"]
    there(settings.device, f"choose --preset {' or '.join(anywhere)}")
    named = {role: Official(*given) for role in _ROLES if (given := getattr(arguments, role))}
    missing = [f"--{role} ({_ROLES[role]})" for role in _ROLES if role not in named]
    asks = arguments.experiment in ksalsa.TABLES and arguments.preset == "paper512"
    if asks and missing and not arguments.random_features:
        raise BadOrder(
            f"the paper's table was made with published networks, and {', '.join(missing)} is not named: see --help. "
            "--random-features goes on without, and the table will say so"
        )
    for role, official in named.items():
        place = arguments.out / "official" / official.kind
        if official.kind not in FEATURES or not place.is_file():
            raise BadOrder(f"--{role}: put the published file of {official.kind} there first: {place}")
    style, content, judge = (named.get(role) for role in _ROLES)
    return replace(settings, style=style, content=content, judge=judge)


def layout_of(folder: Path) -> str:
    """Which data set a folder holds, by the file that lists it.

    Raises:
        BadOrder: none, or several.
    """
    found = [name for name, signs in _SIGNS.items() if any(any(folder.glob(sign)) for sign in signs)]
    if not folder.is_dir():
        raise BadOrder(f"{folder.name} is no folder")
    if len(found) != 1:
        what = "several of" if found else "none of"
        raise BadOrder(f"{folder.name} has {what} the known layouts: name it with --layout {' | '.join(_SIGNS)}")
    return found[0]
