"""NIfTI scans of patients and masks of them, as a researcher's folder has them, with an identifier in each header."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

from agent.ingest.context import open_ingest
from agent.storage.instance_index import DefacedInstance
from agent.storage.site_directory import MAIN, SiteDirectory

SETTINGS = """
[[segment]]
name = "liver"
code = "10200004"
nifti_values = [1]

[[segment]]
name = "mass"
code = "4147007"
nifti_values = [2, 3]

[nifti]
masks = "labelsTr/*.nii.gz"
volumes = "imagesTr/*.nii.gz"
"""
GRID = np.array([[-2.0, 0, 0, 30], [0, -2, 0, 40], [0, 0, 3, 5], [0, 0, 0, 1]])
SHAPE = (12, 10, 8)


def scan(number: int) -> NDArray[np.int16]:
    return np.random.default_rng(number).integers(0, 500, SHAPE).astype(np.int16)


def drawing() -> NDArray[np.uint8]:
    drawn = np.zeros(SHAPE, np.uint8)
    drawn[2:6, 3:7, 1:4], drawn[8:10, 1:3, 5] = 1, 3
    return drawn


def put(folder: Path, name: str, values: NDArray[Any], affine: NDArray[Any] = GRID) -> None:
    image = nibabel.Nifti1Image(values, affine)
    image.header["descrip"] = b"PLANTED-NAME MRN-1"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(image.to_bytes(), mtime=0))


def take_faces_off(site: Path) -> None:
    """As the defacing of a study replaces its volumes: other voxels on the same grid."""
    with open_ingest(SiteDirectory(site), MAIN) as way:
        for study, _ in way.vault.faces():
            found = way.vault.faces_of(study)
            images = [nibabel.Nifti1Image.from_bytes(one.payload) for one in found]
            for one, image in zip(found, images, strict=True):
                bare = np.asarray(image.dataobj).copy()
                bare[:, 8:, :] = 0
                new = nibabel.Nifti1Image(bare, image.affine, image.header).to_bytes()
                assert way.vault.defaced([DefacedInstance(one.name, new)])
