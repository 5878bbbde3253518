"""The volumes among the instances of a study, as the vault has them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pydicom

from agent.storage.instance_index import FaceInstance
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import spacing
from agent.volumes.series import split
from agent.volumes.volume_io import VolumeSource, read_bytes


def volumes_of(faces: Sequence[FaceInstance]) -> tuple[list[VolumeSource], list[list[FaceInstance]]]:
    """The series of a study that are volumes, each with its instances; the other images stay withheld.

    Raises:
        NotDefacedError: there is none.
    """
    groups: list[list[FaceInstance]] = [[face] for face in faces if face.kind == "volume"]
    slices: dict[str, list[FaceInstance]] = {}
    for face in faces:
        if face.kind == "image":
            slices.setdefault(face.series, []).append(face)
    refused = ""
    for members in slices.values():
        headers = [pydicom.dcmread(io.BytesIO(face.payload), stop_before_pixels=True) for face in members]
        for indices, why in split(headers):
            if why:
                refused = refused or why
            else:
                groups.append([members[n] for n in indices])
    sources, whose = [], []
    for group in groups:
        try:
            sources.append(read_bytes([face.payload for face in group]))
            whose.append(group)
        except NotDefacedError as error:
            refused = refused or error.code
    if not sources:
        raise NotDefacedError(refused or "not_a_volume")
    return sources, whose


def finest(faces: Sequence[FaceInstance]) -> tuple[VolumeSource, list[FaceInstance]] | None:
    """The volume of a study with the smallest voxels, and its instances; None, it has none."""
    try:
        sources, whose = volumes_of(faces)
    except NotDefacedError:
        return None
    best = min(range(len(sources)), key=lambda i: (float(np.prod(spacing(sources[i].volume.affine))), i))
    return sources[best], whose[best]
