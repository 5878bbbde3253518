"""The data sets of differentially private synthesis: CIFAR-10, ImageNet and Camelyon17, from their folders.

PrivImage (section 4.1) makes CIFAR-10 and CelebA (:func:`deploy.reproduction.datasets.celeba`) again, with ImageNet
as its public set; its successors added Camelyon17 (Gong et al. 2025, DPImageBench). Only layouts that are read
without running anything: of CIFAR-10 the binary version, since the other one is pickled (design P13).
"""

from __future__ import annotations

import csv
import re
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.reproduction.file_lists import Dataset, DatasetError, Listed, dataset, lines_of, none_bad, there

_BATCHES: Final = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_RECORD: Final = 1 + 3 * 32 * 32  # bytes: the class, then 32 x 32 red, green and blue values
_SYNSET: Final = re.compile(r"n\d{8}")
_PATCH: Final = ("patient", "node", "x_coord", "y_coord", "tumor", "center")


def cifar10(folder: Path, side: int = 32, limit: int | None = None) -> Dataset:
    """CIFAR-10's binary version: ``data_batch_1.bin`` .. ``5``, ``test_batch.bin`` and ``batches.meta.txt``.

    Args:
        folder: with these in it, or above it (``cifar-10-batches-bin``).
        side: of the images handed out, at most 32.
        limit: the most images, the first of the files in their order.
    Raises:
        DatasetError: the layout is another, or a label is none of the names'.
    """
    inner = folder / "cifar-10-batches-bin"
    where = inner if inner.is_dir() else there(folder)
    if not (where / _BATCHES[0]).exists() and any(folder.rglob("data_batch_1")):
        raise DatasetError("this is CIFAR-10's pickled version, which is not read: take the binary version")
    names = [line.strip() for line in lines_of(where / "batches.meta.txt")]
    paths, records, labels, parts = list[Path](), list[int](), list[str](), list[str]()
    for batch in _BATCHES:
        told = _labels(where / batch)
        none_bad(
            batch, "a label has no name in batches.meta.txt", [n for n, k in enumerate(told, 1) if k >= len(names)]
        )
        take = len(told) if limit is None else min(len(told), max(0, limit - len(paths)))
        paths += [where / batch] * take
        records += range(take)
        labels += [names[k] for k in told[:take]]
        parts += ["test" if batch.startswith("test") else "train"] * take
    note = "CIFAR-10 is of objects and nobody's: every image counts as a patient of its own, as in the paper."
    numbers = tuple(f"{index:05d}" for index in range(len(paths)))
    columns = {"part": tuple(parts)}
    return Dataset("cifar10", side, tuple(paths), numbers, tuple(labels), columns, note, tuple(records), _record)


def _labels(path: Path) -> list[int]:
    """The classes of one batch; the images stay where they are."""
    try:
        raw = np.fromfile(path, np.uint8)
    except OSError:
        raise DatasetError(f"{path.name} is missing or cannot be read") from None
    if not len(raw) or len(raw) % _RECORD:
        raise DatasetError(f"{path.name}: it is not of records of {_RECORD} bytes")
    labels: list[int] = raw[::_RECORD].tolist()
    return labels


def _record(path: Path, number: int) -> NDArray[np.uint8]:
    planes = np.fromfile(path, np.uint8, _RECORD - 1, offset=number * _RECORD + 1)
    pixels: NDArray[np.uint8] = planes.reshape(3, 32, 32).transpose(1, 2, 0)
    return pixels


def imagenet(folder: Path, side: int = 32, limit: int | None = None) -> Dataset:
    """ImageNet (ILSVRC 2012, the training part): ``n01440764/*.JPEG``, or the same below ``train``.

    Args:
        folder: with a folder for each synset, which is the label.
        side: of the images handed out.
        limit: the most images: the first of every synset, then the second, and so on.
    Raises:
        DatasetError: there is no synset.
    """
    inner = folder / "train"
    where = inner if inner.is_dir() else there(folder)
    found = list[tuple[int, str, Path]]()
    for synset in sorted(one.name for one in where.iterdir() if _SYNSET.fullmatch(one.name)):
        files = sorted(path for path in (where / synset).iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
        found += [(rank, synset, path) for rank, path in enumerate(files)]
    found.sort(key=lambda one: one[:2])
    listed = Listed(
        [path for *_, path in found],
        [f"{synset}/{rank:05d}" for rank, synset, _ in found],
        [synset for _, synset, _ in found],
        {},
    )
    note = "ImageNet is public: every image stands for itself."
    return dataset("imagenet", side, listed, note, limit)


def camelyon17(folder: Path, side: int = 32, limit: int | None = None) -> Dataset:
    """Camelyon17 as WILDS lays it out: ``metadata.csv`` and ``patches/patient_004_node_4/patch_patient_004_...png``.

    The label is ``tumor``, "0" or "1"; the patient is the patient, of whom there are 50 with thousands of patches. An
    epsilon of one patient and one of one patch are worlds apart: published figures are of the patch.

    Args:
        folder: with these in it.
        side: of the images handed out, at most 96.
        limit: the most images: the first patch of every patient, then the second, and so on.
    Raises:
        DatasetError: the layout is another.
    """
    rows = list(csv.DictReader(lines_of(folder / "metadata.csv")))
    missing = [name for name in _PATCH if not rows or name not in rows[0]]
    if missing:
        raise DatasetError(f"metadata.csv: missing columns: {', '.join(missing)}")
    wrong = partial(none_bad, "metadata.csv")
    numeric = [all((row[name] or "").isdecimal() for name in _PATCH) for row in rows]
    wrong("a cell is not a whole number", [n for n, whole in enumerate(numeric, 1) if not whole])
    wrong("tumor is not 0 or 1", [n for n, row in enumerate(rows, 1) if row["tumor"] not in ("0", "1")])
    rank, ranked = dict[str, int](), list[tuple[int, str, dict[str, str]]]()
    for row in rows:
        who = row["patient"].zfill(3)
        rank[who] = rank.get(who, -1) + 1
        ranked.append((rank[who], who, row))
    ranked.sort(key=lambda one: one[:2])
    kept = ranked if limit is None else ranked[:limit]
    listed = Listed(
        [folder / "patches" / _patch(who, row) for _, who, row in kept],
        [who for _, who, _ in kept],
        [row["tumor"] for *_, row in kept],
        {"center": [row["center"] for *_, row in kept]},
    )
    return dataset("camelyon17", side, listed, "A patient is a patient of metadata.csv, with all patches read.", None)


def _patch(who: str, row: dict[str, str]) -> Path:
    place = f"patient_{who}_node_{row['node']}"
    return Path(place) / f"patch_{place}_x_{row['x_coord']}_y_{row['y_coord']}.png"
