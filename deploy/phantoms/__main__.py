"""Write made or public patients as a folder that ``lazaret-coordinator round simulate --data`` reads.

python -m deploy.phantoms digits FOLDER                      # scikit-learn's 1797 digits, 32 x 32, one a patient
python -m deploy.phantoms chests FOLDER --patients 2000      # radiographs with up to two of five findings, 64 x 64
python -m deploy.phantoms eyes FOLDER --patients 1500        # photographs of retinas with a grade, 64 x 64, colour
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from deploy.phantoms.chest import FINDINGS, chest_patients
from deploy.phantoms.digits import upsample
from deploy.phantoms.fundus import fundus_patients

_SOURCES: Final = {
    "digits": "UCI Optical Recognition of Handwritten Digits, by scikit-learn; CC BY 4.0",
    "chests": "made by deploy.phantoms: nobody's chests",
    "eyes": "made by deploy.phantoms: nobody's eyes",
}
_GRAIN: Final = 0.06  # of a made picture: without it every network is right

Row = tuple[str, NDArray[np.uint8], tuple[str, ...]]  # patient, picture, labels


def _digits(_: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[Row]]:
    found = load_digits()
    pictures = upsample((found.images / 16.0).astype(np.float32))
    names = (f"writing-{number:04d}" for number in range(len(pictures)))
    return ("digit",), ((n, p, (str(t),)) for n, p, t in zip(names, pictures, found.target, strict=True))


def _chests(arguments: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[Row]]:
    rng = np.random.default_rng(arguments.seed)
    patients = chest_patients(arguments.patients, rng, arguments.size, visits=2)
    return tuple(FINDINGS), (
        (f"chest-{p.number:05d}", _grained(picture, rng), tuple(str(int(one in shown)) for one in FINDINGS))
        for p in patients
        for picture, shown in zip(p.radiographs, p.findings, strict=True)
    )


def _eyes(arguments: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[Row]]:
    rng = np.random.default_rng(arguments.seed)
    patients = fundus_patients(arguments.patients, rng, arguments.size)
    return ("grade",), (
        (f"eyes-{p.number:05d}", _grained(photo.pixels, rng), (str(p.grade),))
        for p in patients
        for photo in p.photographs
    )


def _grained(picture: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    noisy = picture / 255.0 + rng.normal(0, _GRAIN, picture.shape)
    levels: NDArray[np.uint8] = np.rint(np.clip(noisy, 0, 1) * 255).astype(np.uint8)
    return levels


_KINDS: Final = {"digits": _digits, "chests": _chests, "eyes": _eyes}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; it must not exist."""
    parser = argparse.ArgumentParser(prog="python -m deploy.phantoms", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=tuple(_KINDS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--patients", type=int, default=1000, help="of chests and eyes (default: 1000)")
    parser.add_argument("--size", type=int, default=64, help="pixels a side, of chests and eyes (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.folder.exists():
        parser.error(f"{arguments.folder}: exists already: name a folder that does not")
    arguments.folder.mkdir(parents=True)
    columns, rows = _KINDS[arguments.kind](arguments)
    written = _write(arguments.folder, columns, rows)
    (arguments.folder / "SOURCE.txt").write_text(_SOURCES[arguments.kind] + "\n")
    sys.stdout.write(f"{written} pictures, columns {', '.join(columns)}: {arguments.folder}\n")
    return 0


def _write(folder: Path, columns: tuple[str, ...], rows: Iterator[Row]) -> int:
    written = 0
    with (folder / "labels.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(("file", "patient", *columns))
        for patient, picture, labels in rows:
            name = f"{written:05d}.png"
            Image.fromarray(picture).save(folder / name)
            table.writerow((name, patient, *labels))
            written += 1
    return written


if __name__ == "__main__":
    sys.exit(main())
