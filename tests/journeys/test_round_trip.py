"""The page round-trip.md, typed beside two hospitals that serve: from a task to the picture, by two programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import highdicom
import nibabel
import numpy as np
import pytest

from agent.mechanisms.federated.task_training import network_of
from policies.tasks.task import task_from_toml
from tests.support.page_reader import ROOT, PageReader, blocks
from tests.support.peers import need
from tests.support.process_world import PATIENTS
from tests.support.task_site import DEPTH, RULES, SIDE, abdomen_series, abdomen_volume, write_abdomens

PAGE: Final = (ROOT / "deploy" / "docs" / "round-trip.md").read_text()
SITES: Final = ("site-a", "site-b")
NEW: Final = 999  # the patient whose study is drawn on


class Reader(PageReader):
    """Who types the page; each hospital has abdomens with masks beside the images that it had before."""

    def prepare(self) -> None:
        """The page's files, the hospitals' images, and one study more."""
        PageReader.prepare(self)
        (self.work / "organs.toml").write_text(blocks(PAGE, "toml")[0])
        (self.work / "job.json").write_text(blocks(PAGE, "json")[0])
        for at, site in enumerate(SITES):
            clinic = self.work / "pacs" / f"{site}-abdomens"
            write_abdomens(clinic, range(1 + PATIENTS * at, 1 + PATIENTS * (at + 1)))
            rules = f'{RULES}\n[[folder]]\npath = "../pacs/{clinic.name}"\n'
            (self.work / site / "ingest.toml").write_text(rules)
        (self.work / "study").mkdir()
        for number, one in enumerate(abdomen_series("A-NEW", NEW, abdomen_volume(NEW)[0])):
            one.save_as(self.work / "study" / f"{number}.dcm", enforce_file_format=True)


def test_the_page_has_the_files_that_it_names() -> None:
    job: dict[str, Any] = json.loads(blocks(PAGE, "json")[0])
    task = task_from_toml(blocks(PAGE, "toml")[0], job["config"]["task"])
    assert job["parameters"] == network_of(task, {}.__getitem__).parameters
    assert job["rounds"] == task.training.rounds


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_study_is_drawn_alike_by_predict_and_by_the_bundle_of_a_run(enrolled: Path, tmp_path: Path) -> None:
    """All `sh` blocks of the page, in order, and its lines of Python."""
    need("dcm2niix")
    check, canary, launch, predicted, bundle = blocks(PAGE, "sh")
    (compare,) = blocks(PAGE, "python")
    with Reader.copied(enrolled, tmp_path / "reader", 3) as reader:
        reader.prepare()
        for site in SITES:
            told = json.loads(reader.run(reader.agent(site, "ingest", "--json")))
            assert told["kept"] == PATIENTS * (DEPTH + 1), told
        reader.serve()
        for site in SITES:
            reader.start(site, reader.agent(site, "serve", "--modality", "MR"), "link: online")
        reader.type(check)
        assert "the round went through at every site" in reader.type(canary)
        reader.type(launch)
        told = next((reader.work / "organs-1-report").glob("*.json")).read_text()
        assert json.loads(told)["state"] == "finished", told[:2000]
        assert "1 predictions" in reader.type(predicted)
        reader.type(bundle)
        (reader.work / "compare.py").write_text(compare)
        command = [sys.executable, "compare.py"]
        said = subprocess.run(command, cwd=reader.work, capture_output=True, text=True, check=True).stdout
        assert re.match(r"0 of [0-9]+ voxels differ", said), said
        seg = highdicom.seg.segread(reader.work / "answers" / "segmentation-0001.dcm")
        drawn = np.bincount(seg.get_volume(combine_segments=True).array.ravel().astype(int), minlength=3)
        mask: Any = nibabel.load(reader.work / "organs" / "eval" / "study_mask.nii.gz")
        theirs = np.asarray(mask.dataobj).ravel().astype(int)
        shares = np.bincount(theirs, minlength=3) / theirs.size
        assert np.count_nonzero(shares > 0.005) >= 2, "an empty picture is like every other"
        np.testing.assert_allclose(drawn[1:] / (DEPTH * SIDE**2), shares[1:], atol=0.03)
