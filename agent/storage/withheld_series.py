"""The volumes among the instances of a study, as the vault has them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pydicom

from agent.edges.volume_series import split
from agent.edges.volumes import Source, read_bytes
from agent.edges.withheld import Face
from agent.heads.grid import spacing
from agent.heads.reasons import NotDefaced


def volumes_of(faces: Sequence[Face]) -> tuple[list[Source], list[list[Face]]]:
    """The series of a study that are volumes, each with its instances; the other pictures stay withheld.

    Raises:
        NotDefaced: there is none.
    """
    groups: list[list[Face]] = [[face] for face in faces if face.kind == "volume"]
    slices: dict[str, list[Face]] = {}
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
        except NotDefaced as error:
            refused = refused or error.code
    if not sources:
        raise NotDefaced(refused or "not_a_volume")
    return sources, whose


def finest(faces: Sequence[Face]) -> tuple[Source, list[Face]] | None:
    """The volume of a study with the smallest voxels, and its instances; None, it has none."""
    try:
        sources, whose = volumes_of(faces)
    except NotDefaced:
        return None
    best = min(range(len(sources)), key=lambda i: (float(np.prod(spacing(sources[i].volume.affine))), i))
    return sources[best], whose[best]
