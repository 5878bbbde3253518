"""Public heads for a training: found in a folder, examined once, and kept beside the training so that it goes on.

They are nobody's patients here, and so lie in the clear.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, overload

import numpy as np

from agent.edges import atlas as atlases
from agent.edges.bids import bids
from agent.edges.volume_series import series_of
from agent.edges.volumes import read
from agent.heads.brain import Brain
from agent.heads.head import Head, examined
from agent.heads.reasons import NotDefaced
from agent.nouns import Volume
from agent.training.loop import write_whole

_KEPT: Final = "heads"


@dataclass(frozen=True, slots=True)
class Kept(Sequence[tuple[str, Head]]):
    """Examined heads in files; one at a time is in memory."""

    persons: tuple[str, ...]
    files: tuple[Path, ...]

    def __len__(self) -> int:
        """Heads."""
        return len(self.files)

    @overload
    def __getitem__(self, at: int) -> tuple[str, Head]: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[str, Head]]: ...

    def __getitem__(self, at: int | slice) -> tuple[str, Head] | Sequence[tuple[str, Head]]:
        """One head, read; or some of them."""
        if isinstance(at, slice):
            return Kept(self.persons[at], self.files[at])
        return self.persons[at], _read(self.files[at])

    def __iter__(self) -> Iterator[tuple[str, Head]]:
        """One after the other."""
        return (self[n] for n in range(len(self)))


@dataclass(frozen=True, slots=True)
class Public:
    """One head and its files."""

    person: str
    paths: tuple[Path, ...]


def found(folder: Path) -> list[Public]:
    """The heads of a BIDS folder; of any other, each volume as somebody of its own.

    Raises:
        BadTable: of a BIDS folder.
    """
    if (folder / "participants.tsv").exists():
        return [Public(scan.person, (scan.path,)) for scan in bids(folder)]
    groups = [group for group in series_of(folder) if not group.why]
    named = ((sha256(os.fspath(group.paths[0].relative_to(folder)).encode()).hexdigest(), group) for group in groups)
    return [Public(name[:16], group.paths) for name, group in named]


def examine(
    scans: Sequence[Public], out: Path, say: Callable[[int, int], None] = lambda _done, _of: None
) -> tuple[Kept, dict[str, int]]:
    """Examine heads, or take what an earlier call made of them.

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
        except NotDefaced as error:
            left[error.code] = left.get(error.code, 0) + 1
        say(number + 1, len(scans))
    return Kept(tuple(persons), tuple(files)), dict(sorted(left.items()))


def _keep(path: Path, head: Head) -> None:
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
    write_whole(path, box.getvalue())


def _read(path: Path) -> Head:
    with np.load(path, allow_pickle=False) as kept:
        agreement, likeness = (float(n) for n in kept["told"])
        brain = Brain(kept["mask"], agreement, kept["to_template"], kept["tight"], likeness)
        return Head(Volume(kept["values"], kept["affine"]), kept["skin"], brain)
