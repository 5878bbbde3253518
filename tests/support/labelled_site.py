"""A site with images whose identifiers are known, and tables of labels as a hospital exports them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydicom import Dataset

from agent.deidentify.record import Record, instance_name, keyed_name
from agent.ingest.context import IngestContext, open_ingest
from agent.storage.site_directory import MAIN, SiteDirectory
from tests.support.ingest_site import ingest_site
from tests.support.instances import mr, written

DECLARATION = """
[table]
key_column = "key"
missing = ["NA"]

[columns.effusion]
kind = "binary"

[columns.grade]
kind = "category"
values = ["low", "high"]

[columns.findings]
kind = "several"
values = ["mass", "nodule"]

[columns.age]
kind = "number"
unit = "a"
low = 0
high = 120
"""
TITLES = "key,effusion,grade,findings,age"


def image(
    way: IngestContext, patient: str, number: int, *, study: str = "", accession: str = "", side: int = 8
) -> Record:
    """One image of a patient as the reader makes it: named by the project's keys, its file de-identified by them."""
    source: Dataset = mr()
    source.PatientID, source.AccessionNumber = patient, accession
    source.StudyInstanceUID = study or f"1.2.3.{number}"
    source.SeriesInstanceUID, source.SOPInstanceUID = f"1.2.4.{number}", f"1.2.5.{number}"
    source.file_meta.MediaStorageSOPInstanceUID = source.SOPInstanceUID
    who = way.who
    person = who.person_of(source)
    said = (
        who.mac("study", source.StudyInstanceUID.encode()),
        who.mac("series", source.SeriesInstanceUID.encode()),
        instance_name(who, source.SOPInstanceUID),
    )
    named_study, series, name = (keyed_name(person, uid) for uid in said)
    pixels = np.random.default_rng(number).random((side, side), dtype=np.float32)
    return Record(
        name=name,
        digest=f"{number + 2**90:032x}",
        pseudonym=person,
        study=named_study,
        modality="MR",
        kind="image",
        label="",
        pixels=pixels,
        payload=written(who.apply(source)),
        face=False,
        series=series,
        uids=said,
    )


@contextlib.contextmanager
def labelled_site(folder: Path) -> Iterator[IngestContext]:
    """Patients P-0 to P-3: P-n has n + 1 images, each in a study and series of its own; accession A-n is P-n's."""
    home = ingest_site(folder)
    with open_ingest(SiteDirectory(home), MAIN) as way:
        number = 0
        for patient in range(4):
            for _ in range(patient + 1):
                way.vault.keep(image(way, f"P-{patient}", number, accession=f"A-{number}"))
                number += 1
        yield way


def table(folder: Path, *rows: str, declaration: str = DECLARATION, titles: str = TITLES) -> Path:
    """A CSV and its TOML beside each other."""
    path = folder / "findings.csv"
    path.write_text("\n".join([titles, *rows]) + "\n", encoding="utf-8")
    path.with_suffix(".toml").write_text(declaration, encoding="utf-8")
    return path
