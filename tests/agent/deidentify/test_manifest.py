"""The manifest of a study: closed lists, keyed values and counts, the same in any order; no value of a file."""

from __future__ import annotations

import json

import pydicom
import pytest
from pydicom.data import get_testdata_file

from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.manifest import InstanceChange, explain, manifest
from agent.deidentify.ps315.options import Pixels, Profile

WHO = Deidentifier(bytes(range(32)), "H")
STUDY = "0" * 32


def _instances() -> list[InstanceChange]:
    names = ("CT_small.dcm", "MR_small.dcm")
    sets = [pydicom.dcmread(get_testdata_file(name, download=False)) for name in names]
    digits = [f"{n:032x}" for n in range(2)]
    traces = [WHO.clean(ds).trace for ds in sets]
    return [InstanceChange(d, d, d, t, pixels=Pixels("vouched")) for d, t in zip(digits, traces, strict=True)]


def test_a_manifest_is_json_and_does_not_depend_on_the_order_of_instances() -> None:
    one, two = _instances()
    first, second = (json.dumps(manifest(STUDY, order), sort_keys=True) for order in ([one, two], [two, one]))
    assert first == second


def test_a_manifest_counts_the_instances_of_each_fate() -> None:
    whole = manifest(STUDY, _instances())
    rows = {(row["path"], row["action"]): row for row in whole["attributes"]}
    assert rows["0010,0010", "emptied"] == {
        **{"path": "0010,0010", "keyword": "PatientName", "action": "emptied", "why": "profile", "instances": 2},
    }
    assert rows["0018,0060", "kept"]["instances"] == 1  # the tube voltage of the CT
    assert set(whole["reasons"]) == {row["why"] for row in whole["attributes"]}
    assert whole["codes"].keys() == {"113100", "113107"}
    assert whole["table"]["edition"] == "2026c"
    assert whole["residual"] == {"scanned": 2, "with_findings": 0}


def test_no_value_of_the_original_is_in_a_manifest_or_an_explanation() -> None:
    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm", download=False))
    trace = WHO.clean(dataset).trace
    told = json.dumps(manifest(STUDY, _instances())) + repr(explain(trace))
    for keyword in ("PatientName", "PatientID", "StudyDate", "InstitutionName", "StudyInstanceUID", "StationName"):
        assert str(dataset[keyword].value) not in told


def test_an_explanation_has_one_sentence_for_each_step() -> None:
    trace = WHO.clean(pydicom.dcmread(get_testdata_file("MR_small.dcm", download=False))).trace
    rows = explain(trace)
    assert len(rows) == len(trace)
    name = next(row for row in rows if row.tag == "0010,0010")
    assert (name.keyword, name.action) == ("PatientName", "emptied")
    assert name.sentence == "emptied: PS3.15 Table E.1-1, Basic Profile"
    assert all(row.sentence for row in rows)


def test_what_was_done_to_the_pixels_is_among_the_codes() -> None:
    one = _instances()[0]
    cleaned = InstanceChange(one.name, one.before, one.after, one.trace, pixels=Pixels("cleaned"))
    assert "113101" in manifest(STUDY, [cleaned], Profile())["codes"]


@pytest.mark.parametrize("bad", ["CT1", "", "g" * 32])
def test_names_that_are_not_keyed_are_refused(bad: str) -> None:
    one = _instances()[0]
    with pytest.raises(ValueError, match="keyed"):
        InstanceChange(bad, one.before, one.after, one.trace)
    with pytest.raises(ValueError, match="keyed"):
        manifest(bad, [one])


def test_an_empty_study_an_instance_twice_and_a_finding_with_a_value_are_refused() -> None:
    one = _instances()[0]
    with pytest.raises(ValueError, match="each once"):
        manifest(STUDY, [])
    with pytest.raises(ValueError, match="each once"):
        manifest(STUDY, [one, one])
    with pytest.raises(ValueError, match="finding"):
        InstanceChange(one.name, one.before, one.after, one.trace, ("name: Smith",))
