"""Masks from a folder into the vault: through the confined reader, beside their series, and only where listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.domain import ExampleRule
from agent.ingest.context import open_ingest
from agent.storage.examples import task_cohort
from agent.storage.instance_index import InstanceRecord
from agent.storage.site_directory import MAIN, SiteDirectory
from tests.support.ingest_site import ingest_site, one_reader, told, typed
from tests.support.segmentations import PLANTED, abdomen, drawing, mask

__all__ = ["one_reader"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_reader")
LISTED = """
[[segment]]
name = "liver"
code = "10200004"

[[segment]]
name = "mass"
code = "4147007"
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A hospital whose folder has a series of an abdomen, and a mask of it."""
    home = ingest_site(tmp_path)
    for number, one in enumerate(abdomen()):
        one.save_as(tmp_path / "input" / f"{number}.dcm", enforce_file_format=True)
    mask(abdomen()).save_as(tmp_path / "input" / "mask.dcm", enforce_file_format=True)
    return home


def heads(site: Path) -> list[InstanceRecord]:
    with open_ingest(SiteDirectory(site), MAIN) as way:
        return list(way.vault.heads())


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
def test_a_mask_comes_in_with_its_series_and_is_a_tasks_target(
    site: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    mask(abdomen(), kind=kind).save_as(site.parent / "input" / "mask.dcm", enforce_file_format=True)
    (site / "ingest.toml").write_text(LISTED)
    assert told(capsys, site, "ingest")["kept"] == 6
    (found,) = (head for head in heads(site) if head.kind == "mask")
    slices = [head for head in heads(site) if head.kind == "image"]
    assert {head.series for head in slices} == {found.masks}
    assert (found.modality, found.face, found.shape, found.person) == ("SEG", False, None, slices[0].person)
    with open_ingest(SiteDirectory(site), MAIN) as way:
        raw = way.vault.payload(found.name)
        rule = ExampleRule("segmentation", "MR", (5, 64, 64), classes=("liver", "mass"))
        (patient,) = task_cohort(way.vault, rule).patients
    assert (patient.examples[0].target == drawing()).all()
    assert not [word for word in PLANTED if word.encode() in raw]
    found = told(capsys, site, "cohort", "--segment", "liver", "--modality", "MR", "--size", "5,64,64")
    assert (found["patients"], found["outputs"]) == (1, [{"output": "liver", "patients": 1}])
    states = {(one["modality"], one["state"]): one["instances"] for one in told(capsys, site, "cohort")}
    assert states == {("MR", "unlabelled"): 5, ("SEG", "mask"): 1}


def test_without_a_list_of_segments_masks_stay_out_as_before(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, site, "ingest")
    assert (found["kept"], found["quarantined"]) == (5, {"not_an_image": 1})


def test_a_segment_that_is_not_listed_keeps_the_mask_out_and_what_to_do_is_said(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "ingest.toml").write_text(LISTED.partition('\n[[segment]]\nname = "mass"')[0])
    assert told(capsys, site, "ingest")["quarantined"] == {"segment_not_listed": 1}
    _, out, _ = typed(capsys, site, "quarantine", "list")
    assert "segment_not_listed" in out
    assert "PLANTED" not in out
    (site / "ingest.toml").write_text(LISTED)
    assert told(capsys, site, "quarantine", "retry")["kept"] == 1


def test_a_list_that_cannot_be_is_a_sentence_with_its_key(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, why in (
        (LISTED.replace("10200004", "39937001"), "segment[0]: code: the outline of a head"),
        (LISTED.replace("4147007", "10200004"), "segment: rules: two segments"),
        ("[rules]\nsegments = []\n", "rules.segments: written as [[segment]]"),
    ):
        (site / "ingest.toml").write_text(text)
        status, _, err = typed(capsys, site, "ingest")
        assert status == 1
        assert why in err.replace("\n", " ")


def test_a_mask_without_its_series_is_kept_and_waits_for_it(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "ingest.toml").write_text(LISTED)
    elsewhere = site.parent / "elsewhere"
    elsewhere.mkdir()
    for path in (site.parent / "input").glob("[0-4].dcm"):
        path.rename(elsewhere / path.name)
    assert told(capsys, site, "ingest")["kept"] == 1
    for path in elsewhere.iterdir():
        path.rename(site.parent / "input" / path.name)
    assert told(capsys, site, "ingest")["kept"] == 5
    assert len({head.masks for head in heads(site) if head.kind == "mask"} & {h.series for h in heads(site)}) == 1
