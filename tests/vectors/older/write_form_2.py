"""Run with an older commit's tree on the path: writes a site's home whose vault has form 2.

Eight patients of two pictures, one study and one series each. Then come: a picture of a ninth with the first one's
SeriesInstanceUID (the older version barred that series) and one with the second's SOPInstanceUID (it was refused).
The study of the third is held as after an alarm, that of the fourth was looked at, the fifth has opted out; the
seventh and the eighth have equal pictures.
"""

import io
import shutil
import sys
from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

from agent.cli.main import main as agent
from agent.ingest.context import open_ingest
from agent.storage import projects
from agent.storage.site_directory import SiteDirectory
from agent.storage.spool import ReceivedFile

ROOT = "1.2.826.0.1.3680043.8.498"


def picture(patient: int, study: int, series: int, instance: int, pixels: int) -> tuple[str, bytes]:
    """SOPInstanceUID and file of a CT picture of random numbers, which ``pixels`` seeds."""
    one = FileDataset("", Dataset(), preamble=bytes(128), file_meta=FileMetaDataset())
    one.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    one.file_meta.MediaStorageSOPClassUID = one.SOPClassUID = CTImageStorage
    one.file_meta.MediaStorageSOPInstanceUID = one.SOPInstanceUID = f"{ROOT}.3.{instance}"
    one.StudyInstanceUID, one.SeriesInstanceUID = f"{ROOT}.1.{study}", f"{ROOT}.2.{series}"
    one.PatientID, one.PatientName, one.Modality, one.Manufacturer = f"PAT-{patient}", "", "CT", "ACME"
    one.ImageType, one.BodyPartExamined = ["ORIGINAL", "PRIMARY", "AXIAL"], "CHEST"
    one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 12, 11, 0
    one.RescaleIntercept, one.RescaleSlope = -1024, 1
    one.Rows = one.Columns = 16
    one.PixelData = np.random.default_rng(pixels).integers(0, 4096, 256, dtype=np.uint16).tobytes()
    stream = io.BytesIO()
    one.save_as(stream, enforce_file_format=True)
    return one.SOPInstanceUID, stream.getvalue()


def main(out: Path) -> None:
    """Everything below a folder that is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "input").mkdir(parents=True)
    site = out / "site"
    words = ["init", "--site", "site-a", "--policy", "internal", "--input", "../input", "--modality", "CT"]
    assert agent(["--home", str(site), *words]) == 0
    home = SiteDirectory(site)
    files = [(p, p, p, 2 * p + i, 12 + i if p == 7 else 2 * p + i) for p in range(8) for i in range(2)]
    files += [(8, 8, 0, 90, 90), (8, 8, 8, 2, 91)]
    with open_ingest(home, "main") as way:
        for one in files:
            uid, data = picture(*one)
            way.inbox.put(ReceivedFile("dimse", "PACS", data, label=str(one[0] % 2), instance=uid))
        with way.intake() as intake:
            report = intake.run(way.waiting())
        assert (report.kept, dict(report.quarantined)) == (16, {"conflicting_instance": 1, "inconsistent_series": 1})
        heads = {head.person: head.study for head in way.vault.heads()}
        named = {p: way.who.person("", f"PAT-{p}") for p in range(9)}
        way.vault.hold(heads[named[2]])
        way.vault.hold(heads[named[3]])
        way.vault.lift(heads[named[3]])
        way.vault.write_note("releases", [{"release": "r", "clusters": [[named[5]]], "again": []}])
    projects.opt_out(home, named[4])
    for path in [*site.rglob("*.log"), *site.rglob("*-wal"), *site.rglob("*-shm")]:
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
