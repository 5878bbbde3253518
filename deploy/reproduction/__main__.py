"""Reproduce a table or a figure of a paper, from a data set's folder or from phantoms.

For researchers, from a checkout: `python -m deploy.reproduction EXPERIMENT --out FOLDER`. No hospital installs it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from agent.cli.output import ERR, as_sentences, require_device
from agent.defacing.deid_gan.network import remodeller_from
from agent.defacing.remodel import around_template
from agent.defacing.template import atlas, register
from agent.domain import Volume
from agent.errors import CommandError
from agent.volumes.volume_io import read
from deploy.reproduction import (
    anonfaces,
    deid_gan,
    deid_gan_heads,
    distillation,
    distillation_sources,
    ksalsa,
    privimage,
    privimage_sources,
)
from deploy.reproduction.bids import ParticipantsTableError, adni, bids, oasis3
from deploy.reproduction.datasets import LOADERS
from deploy.reproduction.experiment import PRESETS, Official, Settings
from deploy.reproduction.feature_networks import FEATURES
from deploy.reproduction.result_cache import Say
from deploy.reproduction.tables import Table, as_json, as_text
from protos.common.errors import LazaretError

EXPERIMENTS: Final = (
    *ksalsa.TABLES,
    *anonfaces.TABLES,
    *privimage.TABLES,
    *distillation.TABLES,
    *deid_gan.TABLES,
)
_SIGNS: Final = {  # a file that only this data set has
    "aptos": ("train.csv",),
    "eyepacs": ("trainLabels.csv",),
    "celeba": ("identity_CelebA.txt", "list/identity_CelebA.txt"),
    "rafd": ("Rafd*.jp*g",),
    "cifar10": ("cifar-10-batches-bin", "batches.meta.txt"),
    "camelyon17": ("metadata.csv",),
    "imagenet": ("n0*", "train/n0*"),
    distillation_sources.MIMIC: ("mimic-cxr-2.0.0-metadata.csv.gz",),
}
_WITHOUT_FOLDER: Final = (privimage_sources.DIGITS, distillation_sources.PHANTOMS)
_ROLES: Final = {"style": "VGG19", "content": "MoCo", "judge": "Inception"}  # and the paper's network for it
_KINDS: Final = tuple(kind for kind in FEATURES if kind != "random")  # of a file that --style, ... may name


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 done, 1 refused or failed, 2 usage, 70 internal."""
    os.umask(0o077)
    arguments = _parser().parse_args(argv)
    try:
        return reproduce(arguments)
    except LazaretError as error:
        told = f"refused: {error}" if error.exit_code == 1 else f"stopped: internal fault ({type(error).__name__})"
        ERR.print(told, markup=False, soft_wrap=True)
        return error.exit_code
    except OSError as error:
        ERR.print(f"refused: {error.strerror or error}: {Path(str(error.filename or '')).name}", markup=False)
        return 1
    except Exception as error:  # noqa: BLE001 - a data set may be of real patients: no text that may quote it
        ERR.print(f"stopped: internal fault ({type(error).__name__})", markup=False)
        return 70


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.reproduction", description=__doc__)
    add = parser.add_argument
    add("experiment", choices=EXPERIMENTS, metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    add("--data", type=Path, help="the data set's folder, as published; not for the layouts digits and phantoms")
    add("--public", type=Path, help="privimage: ImageNet's folder, the public set")
    layouts = (*_SIGNS, *_WITHOUT_FOLDER)
    add("--layout", choices=layouts, help="the data set's layout (default: recognised by the folder's files)")
    presets = (
        "default: by the layout. ksalsa, anonfaces: cpu32, cpu64 or paper512, which needs an accelerator. privimage: "
        "digits8 (for --layout digits only), or cifar32, celeba32, celeba64, camelyon32, which need an accelerator. "
        "distillation: chest32, or chest64, mimic512, which need an accelerator. deid: heads3mm, heads1mm, or folder "
        "(for --data only)"
    )
    add("--preset", default="", help=presets)
    add("--out", type=Path, required=True, help="folder that keeps networks and results; run again to go on")
    for role, purpose in (
        ("style", "for style alignment, as VGG19: vgg19-unnormalised"),
        ("content", "for content, as MoCo: moco"),
        ("judge", "to measure fidelity, as Inception: inception"),
    ):
        place = f"published network {purpose}. Put its file at OUT/official/KIND; SHA256 is what its authors state"
        add(f"--{role}", type=_official, metavar="KIND:SHA256", help=place)
    text = "deid: a file of `lazaret-agent train remodeller` that draws the faces (default: the mean of other heads)"
    add("--network", type=Path, help=text)
    text = "paper512: use random or learned features in place of each of the three networks that is not named"
    add("--random-features", action="store_true", help=text)
    text = "use at most this many images. All stay in memory: EyePACS at 512 px takes 27.6 GB, training 50 GB more"
    add("--limit", type=_count, help=text)
    add("--json", action="store_true", help="print the table as JSON, and no progress")
    return parser


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError("give a whole number, 1 or more")
    return int(text)


def _official(text: str) -> tuple[str, str]:
    kind, _, digest = text.partition(":")
    if kind not in _KINDS or not re.fullmatch(r"[0-9a-f]{64}", digest.lower()):
        raise argparse.ArgumentTypeError(
            f"give KIND:SHA256, with KIND one of {', '.join(_KINDS)} and 64 hexadecimal digits"
        )
    return kind, digest.lower()


def reproduce(arguments: argparse.Namespace) -> int:
    """Compute and print a table. Exit 0 whatever it shows: the table itself says if the paper's order came out."""
    if arguments.experiment in privimage.TABLES:
        return _private(arguments)
    if arguments.experiment in distillation.TABLES:
        return _distilled(arguments)
    if arguments.experiment in deid_gan.TABLES:
        return _faces(arguments)
    settings = _settings(arguments)
    if arguments.data is None or arguments.layout in _WITHOUT_FOLDER:
        raise CommandError(f"name the folder of a data set with --data: {', '.join(LOADERS)}")
    layout = _loaded(arguments.layout or layout_of(arguments.data))
    data = LOADERS[layout](arguments.data, settings.side, arguments.limit)
    runner = ksalsa.run if arguments.experiment in ksalsa.TABLES else anonfaces.run
    with as_sentences():
        table = runner(arguments.experiment, data, settings, arguments.out, _say(arguments))
    return _shown(arguments, table)


def _private(arguments: argparse.Namespace) -> int:
    """PrivImage's tables: from two folders, or from handwriting that comes along.

    Raises:
        CommandError: the folders, the layout and the preset do not go together.
    """
    without = arguments.data is None
    layout = arguments.layout or (privimage_sources.DIGITS if without else layout_of(arguments.data))
    if without != (layout == privimage_sources.DIGITS):
        raise CommandError("--data is the folder of a data set; --layout digits needs none")
    if layout != privimage_sources.DIGITS:
        _loaded(layout)
    if without == (arguments.public is not None):
        raise CommandError("--public goes with --data: ImageNet's folder, without images of anybody in the data set")
    name = arguments.preset or privimage_sources.FOR.get(layout, "")
    if name not in privimage_sources.PRESETS or without != (name == privimage_sources.FOR[privimage_sources.DIGITS]):
        raise CommandError(
            f"--preset for {layout}: one of {', '.join(privimage_sources.PRESETS)}; digits8 goes with digits alone"
        )
    settings = privimage_sources.PRESETS[name]
    require_device(settings.device, "use --layout digits")
    with as_sentences():
        found = (
            privimage_sources.digits()
            if without
            else privimage_sources.read(arguments.data, arguments.public, layout, settings, arguments.limit)
        )
        told = privimage_sources.fitted(settings, found)
        table = privimage.run(arguments.experiment, found, told, arguments.out, _say(arguments))
    return _shown(arguments, table)


def _distilled(arguments: argparse.Namespace) -> int:
    """Privacy Distillation's tables: from MIMIC-CXR-JPG's folder, or from made-up radiographs.

    Raises:
        CommandError: the folder, the layout and the preset do not go together.
    """
    without, made = arguments.data is None, distillation_sources.PHANTOMS
    layout = arguments.layout or (made if without else layout_of(arguments.data))
    if layout not in distillation_sources.FOR or without != (layout == made) or arguments.public is not None:
        raise CommandError(
            f"--data is MIMIC-CXR-JPG's folder; --layout {made} needs none; --public is for privimage only"
        )
    settings = distillation_sources.PRESETS.get(arguments.preset or distillation_sources.FOR[layout])
    if settings is None:
        raise CommandError(f"--preset is one of: {', '.join(distillation_sources.PRESETS)}")
    require_device(settings.device, f"use --preset chest32 --layout {made}")
    with as_sentences():
        found = (
            distillation_sources.phantoms(settings)
            if without
            else distillation_sources.folder(arguments.data, settings, arguments.limit)
        )
        table = distillation.run(arguments.experiment, found, settings, arguments.out, _say(arguments))
    return _shown(arguments, table)


def _faces(arguments: argparse.Namespace) -> int:
    """C-DeID-GAN's figures: from a BIDS folder of heads (OASIS-3, ADNI), or from made-up heads.

    Raises:
        CommandError: the preset does not go with them.
    """
    name = arguments.preset or ("heads3mm" if arguments.data is None else "folder")
    if name not in deid_gan_heads.PRESETS or (name == "folder") is (arguments.data is None):
        raise CommandError(f"--preset is one of: {', '.join(deid_gan_heads.PRESETS)}; folder goes with --data")
    if arguments.layout is not None or arguments.public is not None:
        raise CommandError("--layout and --public do not apply to the tables of deid")
    settings = deid_gan_heads.smaller(deid_gan_heads.PRESETS[name], arguments.limit)
    with as_sentences():
        heads = (
            deid_gan_heads.phantoms(settings, atlas(), register)
            if arguments.data is None
            else deid_gan_heads.Heads(arguments.data.name, _scanned(arguments.data), atlas(), register)
        )
        heads = _drawn(heads, arguments.network)
        table = deid_gan.run(arguments.experiment, heads, settings, arguments.out, _say(arguments))
    return _shown(arguments, table)


def _drawn(heads: deid_gan_heads.Heads, network: Path | None) -> deid_gan_heads.Heads:
    """With what draws the faces of the row "remodel", which the table names."""
    if network is None:
        return replace(heads, name=f"{heads.name}; faces drawn by the mean of other people's heads")
    made = around_template(remodeller_from(network.read_bytes(), "public"), heads.atlas)
    named = f"{heads.name}; faces drawn by {network.name} {made.origin.sha256[:12]}"
    return replace(heads, name=named, remodeller=(made.origin.sha256, made))


def _scanned(folder: Path) -> tuple[deid_gan_heads.Scanned, ...]:
    """The scans of a BIDS folder, read when they are needed; of two of one session the first.

    Raises:
        CommandError: the folder is none.
    """
    try:
        sessions = {path.name[4:5] for path in folder.glob("sub-*/ses-*")}
        # a session names its day (OASIS-3) or its month (ADNI)
        reader = oasis3 if sessions == {"d"} else adni if sessions == {"M"} else bids
        rows = {(scan.person, scan.session): scan for scan in reversed(reader(folder))}
    except (ParticipantsTableError, OSError) as error:
        told = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"--data: {told}") from None
    found = (rows[key] for key in sorted(rows))
    return tuple(deid_gan_heads.Scanned(s.person, s.session, s.age, partial(_volume, s.path)) for s in found)


def _volume(path: Path) -> Volume:
    return read(path).seen()


def _loaded(layout: str) -> str:
    """A layout that these tables can be made from.

    Raises:
        CommandError: it is another table's.
    """
    if layout not in LOADERS:
        raise CommandError(f"{layout} is for other tables; here: {', '.join(LOADERS)}")
    return layout


def _say(arguments: argparse.Namespace) -> Say:
    return lambda line: None if arguments.json else ERR.print(line, markup=False, soft_wrap=True)


def _shown(arguments: argparse.Namespace, table: Table) -> int:
    sys.stdout.write((as_json if arguments.json else as_text)(table) + "\n")
    return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    """Of the preset, with the published networks that were named.

    Raises:
        CommandError: there is no such preset, or this machine or what was named does not do for it.
    """
    settings = PRESETS.get(arguments.preset or next(iter(PRESETS)))
    if settings is None:
        raise CommandError(f"--preset is one of: {', '.join(PRESETS)}")
    anywhere = [name for name, preset in PRESETS.items() if preset.device == "cpu"]
    require_device(settings.device, f"choose --preset {' or '.join(anywhere)}")
    named = {role: Official(*given) for role in _ROLES if (given := getattr(arguments, role))}
    missing = [f"--{role} ({_ROLES[role]})" for role in _ROLES if role not in named]
    asks = arguments.experiment in ksalsa.TABLES and arguments.preset == "paper512"
    if asks and missing and not arguments.random_features:
        raise CommandError(
            f"the paper's table was made with published networks, and {', '.join(missing)} is not named: see --help. "
            "With --random-features the run goes on without, and the table says so"
        )
    for role, official in named.items():
        place = arguments.out / "official" / official.kind
        if official.kind not in FEATURES or not place.is_file():
            raise CommandError(f"--{role}: put the published file of {official.kind} there first: {place}")
    style, content, judge = (named.get(role) for role in _ROLES)
    return replace(settings, style=style, content=content, judge=judge)


def layout_of(folder: Path) -> str:
    """Which data set a folder holds, by the file that lists it.

    Raises:
        CommandError: none, or several.
    """
    found = [name for name, signs in _SIGNS.items() if any(any(folder.glob(sign)) for sign in signs)]
    if not folder.is_dir():
        raise CommandError(f"--data: {folder.name} is not a folder")
    if len(found) != 1:
        what = "several of" if found else "none of"
        raise CommandError(f"{folder.name} has {what} the known layouts: name it with --layout {' | '.join(_SIGNS)}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
