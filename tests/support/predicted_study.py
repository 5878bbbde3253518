"""A model of organs in volumes, a hospital of its coordinator, and the study of one patient who is easily found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pydicom
import pytest

from policies.tasks.task import Task, read_task
from tests.support.exported_models import Exported, exported_model, join
from tests.support.task_site import task_site, write_abdomens

FILE: Final = """
[task]
name = "organs"
kind = "{kind}"
[labels]
classes = {classes}
[input]
modality = "{modality}"
size = {size}
{more}
[training]
public_patients = 25
[network]
name = "{network}"
{options}
"""
PLACED: Final = (
    "spacing = [5.0, 1.5, 1.5]\n"
    'transforms = [{ name = "CenterSpatialCrop", roi_size = [12, 56, 64] },\n'
    '              { name = "SpatialPad", spatial_size = [16, 64, 64] }]'
)


def task_of(folder: Path, **changed: str) -> Task:
    usual = {
        "kind": "segmentation", "classes": '["liver", "mass"]', "modality": "MR", "size": "[16, 64, 64]",
        "more": PLACED, "network": "segresnet", "options": "options = { width = 8, levels = 3 }",
    }  # fmt: skip
    path = folder / "organs.toml"
    path.write_text(FILE.format(**{**usual, **changed}))
    return read_task(path)


NAME: Final = "PLANTED^NAME"
PERSON: Final = "PLANTED-PATIENT-7"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    """A model that draws organs in volumes."""
    folder = tmp_path_factory.mktemp("organs")
    with pytest.MonkeyPatch.context() as patched:
        yield exported_model(folder / "federation", task_of(folder), patched)


@pytest.fixture(scope="module")
def clean_site(tmp_path_factory: pytest.TempPathFactory, made: Exported) -> Path:
    folder = tmp_path_factory.mktemp("hospital")
    home = task_site(folder)
    join(home, made)
    return home


@pytest.fixture
def site(clean_site: Path, tmp_path: Path) -> Path:
    shutil.copytree(clean_site, tmp_path / "site")
    (tmp_path / "input").mkdir()
    return tmp_path / "site"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """One abdomen of a patient whose name and id are easily found."""
    write_abdomens(tmp_path / "study", [1], masked=False)
    for path in (tmp_path / "study").iterdir():
        one = pydicom.dcmread(path)
        one.PatientName, one.PatientID = NAME, PERSON
        one.save_as(path)
    return tmp_path / "study"
