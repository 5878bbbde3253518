"""The real head and the persons made of it, shared by the tests of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import nibabel
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.brain_extraction import Brain
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import head_mask
from agent.defacing.quality import examined
from agent.defacing.template import atlas, register
from agent.domain import Volume
from deploy.phantoms.head_malformed import bad_heads
from deploy.phantoms.heads import HeadPhantoms, Scan
from deploy.phantoms.scanner_files import find_head
from tests.support.peers import HEAD, need

__all__ = ["bad", "examined_scan", "phantoms", "real_head", "scan", "true_head"]


def _files() -> tuple[Path, Path]:
    head = find_head()
    if head is None or not head.with_name("ch2bet.nii.gz").exists():
        need(HEAD)
    assert head is not None, "the real head is where Debian puts it"
    return head, head.with_name("ch2bet.nii.gz")


@cache
def real_head(mm: float = 1.0) -> tuple[Volume, NDArray[np.bool_]]:
    """The real head ch2 and its brain (its largest piece), every ``mm``-th voxel in each direction."""
    step = round(mm)
    if step != mm or step < 1:
        raise ValueError("whole millimetres")
    head, bet = (nibabel.load(path) for path in _files())
    pieces, _ = ndimage.label(np.asarray(bet.dataobj) > 0)
    brain = pieces == 1 + int(np.argmax(np.bincount(pieces.ravel())[1:]))
    affine = np.asarray(head.affine, dtype=np.float64) @ np.diag((step, step, step, 1))
    values = np.asarray(head.dataobj)[::step, ::step, ::step]
    return Volume(np.ascontiguousarray(values), affine), brain[::step, ::step, ::step]


@cache
def phantoms(seed: int = 0) -> HeadPhantoms:
    """Made-up persons."""
    return HeadPhantoms(*real_head()) if seed == 0 else phantoms().reseeded(seed)


@cache
def scan(number: int, visit: int = 0, mm: float = 4.0) -> Scan:
    """One T1 of one person."""
    return phantoms().scan(number, visit, mm)


@cache
def true_head(number: int, visit: int = 0, mm: float = 4.0) -> HeadScan:
    """The same with what the phantom knows of itself: brain, and place of the template. Nothing was searched."""
    made = scan(number, visit, mm)
    brain = Brain(made.brain, 1.0, made.to_template, made.brain)
    return HeadScan(made.volume, head_mask(made.volume), brain)


@cache
def examined_scan(number: int, visit: int = 0, mm: float = 2.0) -> HeadScan:
    """The same as a hospital gets it: brain and template found in the picture. Takes seconds."""
    return examined(scan(number, visit, mm).volume, atlas(), register)


@cache
def bad(mm: float = 4.0) -> dict[str, Volume]:
    """What is no whole head, by name."""
    return bad_heads(phantoms(), mm)
