"""The volumes among the instances of a study, as the vault has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from agent.storage.instance_index import FaceInstance
from agent.volumes.dicom_series import all_parsed
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import spacing
from agent.volumes.series import split
from agent.volumes.volume_io import VolumeSource, dicom_source, read_bytes


def volumes_of(faces: Sequence[FaceInstance]) -> tuple[list[VolumeSource], list[list[FaceInstance]]]:
    """The series of a study that are volumes, each with its instances; the other images stay withheld.

    Raises:
        NotDefacedError: there is none.
    """
    sources, whose, slices = list[VolumeSource](), list[list[FaceInstance]](), dict[str, list[FaceInstance]]()
    refused = ""
    for face in faces:
        if face.kind == "image":
            slices.setdefault(face.series, []).append(face)
        elif face.kind == "volume":
            try:
                sources.append(read_bytes([face.payload]))
                whose.append([face])
            except NotDefacedError as error:
                refused = refused or error.code
    for members in slices.values():
        for found in _volumes(members):
            if isinstance(found, str):
                refused = refused or found
            else:
                sources.append(found[0])
                whose.append(found[1])
    if not sources:
        raise NotDefacedError(refused or "not_a_volume")
    return sources, whose


def _volumes(members: list[FaceInstance]) -> Iterator[tuple[VolumeSource, list[FaceInstance]] | str]:
    """Those of one series, whose files are each parsed once; or codes why some of it is none."""
    try:
        read = all_parsed([face.payload for face in members])
    except NotDefacedError as error:
        yield error.code
        return
    for indices, why in split([dataset for dataset, _ in read]):
        if why:
            yield why
            continue
        mine = [members[n] for n in indices]
        try:
            yield dicom_source([face.payload for face in mine], [read[n] for n in indices]), mine
        except NotDefacedError as error:
            yield error.code


def finest(faces: Sequence[FaceInstance]) -> tuple[VolumeSource, list[FaceInstance]] | None:
    """The volume of a study with the smallest voxels, and its instances; None, it has none."""
    try:
        sources, whose = volumes_of(faces)
    except NotDefacedError:
        return None
    best = min(range(len(sources)), key=lambda i: (float(np.prod(spacing(sources[i].volume.affine))), i))
    return sources[best], whose[best]
