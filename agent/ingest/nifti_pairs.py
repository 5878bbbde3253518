"""Which NIfTI file of a folder is a mask, and of which volume: by its BIDS name, or by a rule of names.

BIDS derivatives (BIDS 1.10, "imaging data types") name a mask as its volume, but for the suffix and a few entities,
so that the same name may fit two volumes: then the sidecar's ``Sources`` says it, or nothing does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

VOLUME: Final = (".nii", ".nii.gz")
_MASKS: Final = frozenset({"dseg", "mask", "probseg"})  # suffixes
_OWN: Final = frozenset({"desc", "label", "seg", "atlas"})  # entities that a mask has besides those of its volume
_MOST_SIDECAR: Final = 2**20  # bytes
_ENTITY: Final = re.compile(r"([A-Za-z0-9]+)-([A-Za-z0-9+]+)")


@dataclass(frozen=True, slots=True)
class MaskOf:
    """What a mask is of."""

    volume: str  # path below the folder; "" where no one volume is found
    segment: str = ""  # the one segment that it is of; "" where its numbers say it


@dataclass(frozen=True, slots=True)
class MaskNames:
    """Masks and volumes by their paths below a folder, in which the one ``*`` stands for the same."""

    masks: str  # such as labelsTr/*.nii.gz
    volumes: str  # such as imagesTr/*.nii.gz

    def __post_init__(self) -> None:
        """Both have one ``*`` and are names of NIfTI files, and they differ."""
        for key, pattern in (("masks", self.masks), ("volumes", self.volumes)):
            if pattern.count("*") != 1 or not pattern.endswith(VOLUME):
                raise ValueError(f"{key}: must be a path below the folder with one *, which ends in .nii or .nii.gz")
        if self.masks == self.volumes:
            raise ValueError("masks and volumes: must differ")

    def pairs(self, paths: Collection[str]) -> dict[str, MaskOf]:
        """The masks among the files of a folder."""
        head, tail = self.masks.split("*")
        found = {}
        for path in paths:
            if path.startswith(head) and path.endswith(tail) and len(path) > len(head) + len(tail):
                volume = self.volumes.replace("*", path[len(head) : len(path) - len(tail)])
                found[path] = MaskOf(volume if volume in paths else "")
        # a rule whose * is wide, such as *.nii.gz, may find a mask of a mask
        return {path: MaskOf("") if one.volume in found else one for path, one in found.items()}


def bids_pairs(
    folder: Path, paths: Iterable[str], volumes: Collection[str], names: Mapping[str, str]
) -> dict[str, MaskOf]:
    """The masks of a BIDS dataset.

    Args:
        folder: the dataset.
        paths: of its NIfTI files, below it.
        volumes: those of which a patient is known.
        names: of the site's segments, by their letters and digits alone in lower case, as BIDS writes them.
    """
    known = {path: _entities(path) for path in volumes if path.endswith(VOLUME) and not _is_mask(path)}
    return {path: _of(folder, path, known, names) for path in paths if _is_mask(path)}


def bids_name(segment: str) -> str:
    """A segment's name as a BIDS entity can have it."""
    return "".join(letter for letter in segment.lower() if letter.isalnum())


def _is_mask(path: str) -> bool:
    return PurePosixPath(path).name.startswith("sub-") and _stem(path)[1] in _MASKS


def _of(folder: Path, path: str, known: Mapping[str, dict[str, str]], names: Mapping[str, str]) -> MaskOf:
    own, segment = _entities(path), ""
    if _stem(path)[1] != "dseg" and (said := own.get("label") or own.get("desc", "")):
        segment = names.get(bids_name(said), said)  # one that is not listed is refused by that name
    candidates = [one for one, entities in known.items() if _same(own, entities, _stem(one)[1])]
    if sources := _sources(folder, path):
        candidates = [one for one in known if one in sources]
    return MaskOf(candidates[0] if len(candidates) == 1 else "", segment)


def _same(mask: dict[str, str], volume: dict[str, str], suffix: str) -> bool:
    wanted = {key: value for key, value in mask.items() if key not in _OWN}
    if "space" not in volume and wanted.get("space") in (suffix, "orig", "individual"):
        del wanted["space"]  # that of the volume itself
    return wanted == {key: value for key, value in volume.items() if key not in _OWN}


def _stem(path: str) -> tuple[list[str], str]:
    name = PurePosixPath(path).name
    *entities, suffix = name.removesuffix(".gz").removesuffix(".nii").split("_")
    return entities, suffix


def _entities(path: str) -> dict[str, str]:
    return {found[1]: found[2] for found in map(_ENTITY.fullmatch, _stem(path)[0]) if found}


def _sources(folder: Path, path: str) -> frozenset[str]:
    """The files that a mask was made of, by its sidecar; none where it does not say."""
    sidecar = folder / (path.removesuffix(".gz").removesuffix(".nii") + ".json")
    try:
        if sidecar.stat().st_size > _MOST_SIDECAR:
            return frozenset()
        told = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return frozenset()
    sources = told.get("Sources") if isinstance(told, dict) else None
    words = sources if isinstance(sources, list) else [sources]
    # bids::PATH is of this dataset, and so is bids:raw:PATH where it lies below the folder
    return frozenset(re.sub(r"^bids:[^:]*:", "", word) for word in words if isinstance(word, str))
