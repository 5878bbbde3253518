"""The nouns of one hospital's agent: frozen values, checked when they are built.

Every arrow of the pipeline takes one of these and gives the next; none of them knows a file, a
clock or a network. Pseudonyms (keyed HMACs of the patient's identity) stay inside the site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

_PART: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_TOGETHER: Final = 1 << 20  # numbers that are looked at at once


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One de-identified 2-D image of one patient."""

    pixels: NDArray[np.float32]  # (h, w) grey or (h, w, 3) RGB, intensities in [0, 1]
    label: str  # coarse class given by the hospital; "" when it has none

    def __post_init__(self) -> None:
        """Refuse anything but a finite (h, w) or (h, w, 3) float32 image in [0, 1]."""
        p = self.pixels
        if p.ndim not in (2, 3) or p.shape[2:] not in ((), (3,)) or p.dtype != np.float32 or not p.size:
            raise ValueError("pixels must be a non-empty (h, w) or (h, w, 3) float32 array")
        if not bool(np.isfinite(p).all() and p.min() >= 0 and p.max() <= 1):
            raise ValueError("pixels must be finite and lie in [0, 1]")


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """One scan in three dimensions."""

    values: NDArray[Any]  # (i, j, k), the stored numbers in the file's own type
    affine: NDArray[np.float64]  # (4, 4), index to RAS+ millimetres, as NIfTI has it

    def __post_init__(self) -> None:
        """A grid of real numbers that has a place in space."""
        if self.values.ndim != 3 or 0 in self.values.shape or self.values.dtype.kind not in "iuf":
            raise ValueError("a volume is an (i, j, k) array of integers or floats")
        if self.affine.shape != (4, 4) or not bool(np.isfinite(self.affine).all()):
            raise ValueError("an affine is a finite (4, 4) matrix")
        if not abs(float(np.linalg.det(self.affine[:3, :3]))) > 1e-9:
            raise ValueError("an affine can be inverted")


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """One head of one patient, as the vault has it."""

    pseudonym: str
    volume: Volume
    label: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class VolumeSet:
    """What a mechanism of volumes releases: patients' scans, changed, on one grid of their own."""

    volumes: NDArray[Any]  # (m, i, j, k) int16 or float32, axes towards right, front and up
    labels: tuple[str, ...]  # m
    spacing: tuple[float, ...]  # (3,) mm

    def __post_init__(self) -> None:
        """One label for each volume."""
        if self.volumes.ndim != 4 or self.volumes.dtype not in (np.int16, np.float32):
            raise ValueError("volumes must be (m, i, j, k) int16 or float32")
        if len(self.labels) != len(self.volumes) or len(self.spacing) != 3:
            raise ValueError("one label for each volume, and three spacings")


@dataclass(frozen=True, slots=True, eq=False)
class Patient:
    """The unit of privacy: everything the site holds of one person, under one pseudonym."""

    pseudonym: str
    images: tuple[Image, ...]

    def __post_init__(self) -> None:
        """A patient has a pseudonym and at least one image."""
        if not self.pseudonym or not self.images:
            raise ValueError("a patient needs a pseudonym and an image")


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The patients eligible for one release, each once, in pseudonym order, images of one shape."""

    patients: tuple[Patient, ...]

    def __post_init__(self) -> None:
        """Order and uniqueness make a run deterministic and k countable."""
        if not all(a.pseudonym < b.pseudonym for a, b in pairwise(self.patients)):
            raise ValueError("patients must be distinct and sorted by pseudonym")
        if len({image.pixels.shape for p in self.patients for image in p.images}) > 1:
            raise ValueError("all images of a cohort must have one shape")


@dataclass(frozen=True, slots=True)
class Split:
    """Patients divided among named parts by chance, but for ever: a keyed hash of the pseudonym decides.

    A patient keeps its part whoever comes or goes later, and all its images are in it, so that no image of a
    tested patient was trained on. Two names give two independent divisions.
    """

    name: str
    parts: Mapping[str, int] = field(hash=False)  # part -> its share, in units of the sum of all shares

    def __post_init__(self) -> None:
        """Two parts or more, each of a positive share; the order in which they are written means nothing."""
        if not all(_PART.fullmatch(name) for name in (self.name, *self.parts)):
            raise ValueError("a split and its parts have short lower-case names")
        if len(self.parts) < 2 or not all(type(n) is int and 0 < n <= 1_000_000 for n in self.parts.values()):
            raise ValueError("a split has two parts or more, with whole positive shares")
        object.__setattr__(self, "parts", MappingProxyType(dict(sorted(self.parts.items()))))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which images count for one purpose. The rule is public configuration; what it finds is not."""

    modality: str  # DICOM Modality (0008,0060)
    shape: tuple[int, ...]  # (h, w) pixels, coloured images as luma; or (h, w, 3), coloured images only
    body_part: str = ""  # DICOM Body Part Examined (0018,0015); "": any
    labels: frozenset[str] = frozenset()  # none named: any label, but a label there must be
    split: Split | None = None
    part: str = ""  # of the split: the patients of this part only
    min_instances: int = 1  # a series with fewer is not complete yet, and waits
    fit: bool = False  # images of any size, fitted to the square shape; those too small for it do not count

    def __post_init__(self) -> None:
        """Refuse what could select nothing, or everything by mistake."""
        if len(self.shape) not in (2, 3) or self.shape[2:] not in ((), (3,)):
            raise ValueError("a shape is (h, w) or (h, w, 3) in pixels")
        if not all(type(side) is int and side > 0 for side in self.shape):
            raise ValueError("a shape is (h, w) or (h, w, 3) in pixels")
        if self.fit and self.shape[0] != self.shape[1]:
            raise ValueError("images are fitted to a square")
        if not self.modality or "" in self.labels:
            raise ValueError("a selection has a modality, and selects labelled images only")
        if (self.split is None) is not (self.part == "") or (self.split and self.part not in self.split.parts):
            raise ValueError("a split is selected by one of its parts")
        if not self.min_instances >= 1:
            raise ValueError("a series has one instance or more")


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """What a network sees at once, and what it should say of it."""

    pixels: NDArray[np.float32]  # (channels, *size): (c, h, w) or (c, k, h, w)
    # classification: (1,) int64, which class. Multi-label and regression: (n,) float32 in [0, 1], NaN where it is
    # missing, which costs nothing. Segmentation: (*size) int64, which segment, 0 for none
    target: NDArray[np.int64] | NDArray[np.float32]

    def __post_init__(self) -> None:
        """Refuse what is not finite, and a target that is neither whole numbers nor numbers in [0, 1]."""
        if self.pixels.ndim not in (3, 4) or self.pixels.dtype != np.float32 or not self.pixels.size:
            raise ValueError("pixels must be a non-empty (c, h, w) or (c, k, h, w) float32 array")
        if not bool(np.isfinite(self.pixels).all()):
            raise ValueError("pixels must be finite")
        target = self.target
        if target.dtype not in (np.int64, np.float32) or not target.size:
            raise ValueError("a target is a non-empty array of int64 or float32")
        if target.dtype == np.int64 and target.shape not in ((1,), self.pixels.shape[1:]):
            raise ValueError("a class is (1,), a mask as large as the pixels")
        if target.dtype == np.float32 and target.ndim != 1:
            raise ValueError("findings and numbers are (n,)")
        known = target[~np.isnan(target)]
        if not bool((known >= 0).all() and (target.dtype == np.int64 or (known <= 1).all())):
            raise ValueError("a class is not negative, and findings and numbers lie in [0, 1] or are missing")


@dataclass(frozen=True, slots=True, eq=False)
class TaskPatient:
    """The unit of privacy of a task: all examples of one person."""

    pseudonym: str
    examples: tuple[Example, ...]

    def __post_init__(self) -> None:
        """A patient has a pseudonym and at least one example."""
        if not self.pseudonym or not self.examples:
            raise ValueError("a patient needs a pseudonym and an example")


@dataclass(frozen=True, slots=True, eq=False)
class TaskCohort:
    """The patients that a task trains on, each once, in pseudonym order, all examples of one form."""

    patients: tuple[TaskPatient, ...]

    def __post_init__(self) -> None:
        """Order and uniqueness make a run deterministic and patients countable."""
        if not all(a.pseudonym < b.pseudonym for a, b in pairwise(self.patients)):
            raise ValueError("patients must be distinct and sorted by pseudonym")
        every = [example for patient in self.patients for example in patient.examples]
        if len({(one.pixels.shape, one.target.shape, one.target.dtype) for one in every}) > 1:
            raise ValueError("all examples of a cohort must have one form")


TaskKind = Literal["classification", "multi-label", "regression", "segmentation"]


@dataclass(frozen=True, slots=True)
class ExampleRule:
    """Which images become examples, how they are seen, and what is learned. Public; what it finds is not."""

    kind: TaskKind
    modality: str  # DICOM Modality (0008,0060)
    size: tuple[int, ...]  # (h, w) pixels of images, or (k, h, w) voxels of volumes
    body_part: str = ""  # DICOM Body Part Examined (0018,0015); "": any
    channels: int = 1  # 1: grey; 3: colour. Of a study: so many grey images, one in each channel
    spacing: tuple[float, ...] = ()  # mm along each axis of size; (): fitted to the size as they are
    window: tuple[
        float, ...
    ] = ()  # stored values that become 0 and 1; (): images as ingested, volumes by their range
    per_study: bool = False  # one example for each study; else one for each image
    table: str = ""  # of labels; "": the label that each image came with
    columns: tuple[str, ...] = ()  # of the table, in the order of the outputs
    classes: tuple[str, ...] = ()  # the values, or the segments, in the order of the outputs
    low: tuple[float, ...] = ()  # of a regression: the public bounds of each column
    high: tuple[float, ...] = ()
    split: Split | None = None
    part: str = ""  # of the split: the patients of this part only
    min_instances: int = 1  # a series with fewer is not complete yet, and waits
    run: str = ""  # the federated run that asks: it stays with the version of the table that it began with

    def __post_init__(self) -> None:
        """Refuse what could select nothing, or everything by mistake. What a task may say is checked by the task."""
        if len(self.size) not in (2, 3) or not all(type(side) is int and side > 0 for side in self.size):
            raise ValueError("a size is (h, w) or (k, h, w)")
        if not self.modality or self.channels not in (1, 3):
            raise ValueError("examples have a modality, and 1 or 3 channels")
        if len(self.spacing) not in (0, len(self.size)) or not all(mm > 0 for mm in self.spacing):
            raise ValueError("a spacing has one positive length for each axis of the size")
        if self.window and not (len(self.window) == 2 and self.window[0] < self.window[1]):
            raise ValueError("a window is two numbers, the smaller one first")
        if (self.split is None) is not (self.part == "") or (self.split and self.part not in self.split.parts):
            raise ValueError("a split is selected by one of its parts")
        if len(self.size) == 3 and (self.channels != 1 or self.per_study):
            raise ValueError("a volume has one channel, and is an example by itself")
        if self.kind == "segmentation" and (self.per_study or not self.classes):
            raise ValueError("a segmentation has segments, and a mask is of one image or volume")


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """One latent code per patient: the mean over the patient's images."""

    codes: NDArray[np.float32]  # (n, d)
    patients: tuple[str, ...]  # n pseudonyms, each once

    def __post_init__(self) -> None:
        """One finite code for each distinct patient."""
        if self.codes.ndim != 2 or self.codes.shape[0] != len(self.patients):
            raise ValueError("codes must be (n, d) with one row for each patient")
        if len(set(self.patients)) != len(self.patients):
            raise ValueError("a patient appears twice")
        if not bool(np.isfinite(self.codes).all()):
            raise ValueError("codes must be finite")


@dataclass(frozen=True, slots=True)
class Clusters:
    """A partition of patients: the equivalence classes of k-anonymity."""

    members: tuple[tuple[str, ...], ...]  # pseudonyms; every patient in exactly one cluster

    def __post_init__(self) -> None:
        """No patient in two clusters, none twice in one."""
        flat = [p for cluster in self.members for p in cluster]
        if len(set(flat)) != len(flat):
            raise ValueError("a patient is in two clusters")


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticSet:
    """What a synthesis mechanism releases: representatives with their aggregated labels."""

    images: NDArray[np.uint8]  # (m, h, w) grey or (m, h, w, 3) RGB
    labels: tuple[str, ...]  # m

    def __post_init__(self) -> None:
        """One label for each image."""
        if self.images.ndim not in (3, 4) or self.images.shape[3:] not in ((), (3,)) or self.images.dtype != np.uint8:
            raise ValueError("images must be (m, h, w) or (m, h, w, 3) uint8")
        if len(self.labels) != self.images.shape[0]:
            raise ValueError("one label for each image")


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What one federated round releases: the site's new parameters, packed flat."""

    vector: NDArray[np.float32]  # (p,)
    head: NDArray[np.float32] | None = None  # (h,) of the site's own, which it keeps and never sends; None: no such

    def __post_init__(self) -> None:
        """A finite flat vector."""
        if self.vector.ndim != 1 or self.vector.dtype != np.float32 or not self.vector.size:
            raise ValueError("vector must be a non-empty (p,) float32 array")
        parts = (self.vector[at : at + _TOGETHER] for at in range(0, self.vector.size, _TOGETHER))
        if not all(bool(np.isfinite(part).all()) for part in parts):
            raise ValueError("vector must be finite")


@dataclass(frozen=True, slots=True, eq=False)
class LatticePart:
    """One site's part of a secret sum: whole steps of the lattice that the run's configuration names."""

    steps: NDArray[np.int64]  # (p,)

    def __post_init__(self) -> None:
        """A flat vector of whole numbers."""
        if self.steps.ndim != 1 or self.steps.dtype != np.int64 or not self.steps.size:
            raise ValueError("steps must be a non-empty (p,) int64 array")


class CheckpointStore(Protocol):
    """Where a checkpoint lies: a file, or a sealed row of the vault."""

    def read(self) -> bytes | None:
        """What was written last; None when nothing was."""

    def write(self, data: bytes) -> None:
        """Replace it; durable when this returns, and never a half."""
