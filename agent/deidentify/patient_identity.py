"""The patient of a file, accepted or not, so that an opt-out also finds rejected files."""

from __future__ import annotations

import io

import pydicom

from agent.deidentify import nifti
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.prescan import DEFLATED_LE, read_meta, scan, undeflate


def person(data: bytes, who: Deidentifier, patient_id: str, issuer: str, max_bytes: int) -> str:
    """The site-wide pseudonym of a file's patient; "" when it names none.

    Args:
        data: a DICOM or NIfTI file.
        who: the site's keys.
        patient_id: of a NIfTI file, by the hospital's list.
        issuer: of that id.
        max_bytes: of a deflated file, inflated.
    Raises:
        Refused: it cannot be told; pydicom raises errors of its own.
    """
    if nifti.looks_like_nifti(data):
        return who.person(issuer, patient_id) if patient_id.strip() else ""
    meta = read_meta(data)
    if meta.transfer_syntax == DEFLATED_LE:
        data, meta = undeflate(data, meta, max_bytes)
    scan(data, meta.offset, meta.transfer_syntax)
    return who.person_of(pydicom.dcmread(io.BytesIO(data), stop_before_pixels=True))
