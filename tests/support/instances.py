"""Real instances for the tests of de-identification, and what is planted into them."""

from __future__ import annotations

import io
from typing import Final

import pydicom
from pydicom import DataElement, Dataset
from pydicom import config as pydicom_config
from pydicom.data import get_testdata_file

from agent.deidentify.deidentifier import Deidentifier

WHO: Final = Deidentifier(bytes(range(32)), "HOSPITAL")


def mr() -> Dataset:
    """A real MR image, 64 x 64."""
    return pydicom.dcmread(get_testdata_file("MR_small.dcm", download=False))


def written(dataset: Dataset) -> bytes:
    """A data set as a DICOM file."""
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def item(*elements: tuple[int, str, object]) -> Dataset:
    """A data set of elements that need not be right."""
    item = Dataset()
    for tag, vr, value in elements:
        item.add(DataElement(tag, vr, value, validation_mode=pydicom_config.IGNORE))
    return item
