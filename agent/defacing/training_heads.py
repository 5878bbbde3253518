"""Public heads for a training: found in a folder, examined once, and kept beside the training so that it goes on.

They are nobody's patients here, and so lie in the clear.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, overload

import numpy as np

from agent.defacing import template as atlases
from agent.defacing.brain_extraction import Brain
from agent.defacing.head import HeadScan
from agent.defacing.quality import examined
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.series import SESSION, SUBJECT, series_of
from agent.volumes.volume_io import read
from protos.common.durable_files import replace_file

_KEPT: Final = "heads"
_T1: Final = re.compile(r"sub-.*_T1w\.nii(\.gz)?")


@dataclass(frozen=True, slots=True)
class ExaminedHeads(Sequence[tuple[str, HeadScan]]):
    """Examined heads in files; one at a time is in memory."""

    persons: tuple[str, ...]
    files: tuple[Path, ...]

    def __len__(self) -> int:
        """Heads."""
        return len(self.files)

    @overload
    def __getitem__(self, at: int) -> tuple[str, HeadScan]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[str, HeadScan]]: ...

    def __getitem__(self, at: int | slice) -> tuple[str, HeadScan] | Sequence[tuple[str, HeadScan]]:
        """One head, read; or some of them."""
        if isinstance(at, slice):
            return ExaminedHeads(self.persons[at], self.files[at])
        return self.persons[at], _read(self.files[at])

    def __iter__(self) -> Iterator[tuple[str, HeadScan]]:
        """One after the other."""
        return (self[n] for n in range(len(self)))


@dataclass(frozen=True, slots=True)
class Public:
    """One head and its files."""

    person: str
    paths: tuple[Path, ...]


def find_heads(folder: Path) -> list[Public]:
    """The T1-weighted heads of a BIDS folder; of any other folder, each volume as somebody of its own."""
    if (folder / "participants.tsv").exists():
        return [Public(person, (path,)) for person, _session, path in bids_heads(folder)]
    groups = [group for group in series_of(folder) if not group.why]
    named = ((sha256(os.fspath(group.paths[0].relative_to(folder)).encode()).hexdigest(), group) for group in groups)
    return [Public(name[:16], group.paths) for name, group in named]


def bids_heads(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Person, session and file of every ``sub-*/[ses-*/]anat/*T1w.nii[.gz]`` (BIDS 1.10), in this order."""
    for person in sorted(p for p in folder.iterdir() if p.is_dir() and SUBJECT.fullmatch(p.name)):
        sessions = sorted(p for p in person.iterdir() if p.is_dir() and SESSION.fullmatch(p.name))
        for place in sessions or [person]:
            session, files = place.name if sessions else "", sorted((place / "anat").glob("*"))
            yield from ((person.name, session, path) for path in files if _T1.fullmatch(path.name))


def examine(
    scans: Sequence[Public], out: Path, say: Callable[[int, int], None] = lambda _done, _of: None
) -> tuple[ExaminedHeads, dict[str, int]]:
    """Examine heads, or load the results of an earlier call.

    Returns:
        The heads; and why others were left out: code -> how many.
    """
    template, left = atlases.atlas(), dict[str, int]()
    persons, files = list[str](), list[Path]()
    (out / _KEPT).mkdir(parents=True, exist_ok=True)
    for number, scan in enumerate(scans):
        known = ((path, path.stat()) for path in scan.paths)
        told = "".join(f"{path.absolute()} {one.st_size} {one.st_mtime_ns} " for path, one in known)
        kept = out / _KEPT / f"{sha256(os.fsencode(told)).hexdigest()[:32]}.npz"
        try:
            if not kept.exists():
                source = read(list(scan.paths))
                _keep(kept, examined(source.seen(), template, atlases.register))
            persons.append(scan.person)
            files.append(kept)
        except NotDefacedError as error:
            left[error.code] = left.get(error.code, 0) + 1
        say(number + 1, len(scans))
    return ExaminedHeads(tuple(persons), tuple(files)), dict(sorted(left.items()))


def _keep(path: Path, head: HeadScan) -> None:
    box, brain = io.BytesIO(), head.brain
    np.savez_compressed(
        box,
        values=head.volume.values,
        affine=head.volume.affine,
        skin=head.skin,
        mask=brain.mask,
        tight=brain.tight,
        to_template=brain.to_template,
        told=np.array([brain.agreement, brain.likeness]),
    )
    replace_file(path, box.getvalue())


def _read(path: Path) -> HeadScan:
    with np.load(path, allow_pickle=False) as kept:
        agreement, likeness = (float(n) for n in kept["told"])
        brain = Brain(kept["mask"], agreement, kept["to_template"], kept["tight"], likeness)
        return HeadScan(Volume(kept["values"], kept["affine"]), kept["skin"], brain)
