"""``predict``: what a model says of a study, by the code of training, on the images that it is of."""

from __future__ import annotations

import csv
import datetime as dt
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import highdicom
import numpy as np
import pydicom
import pytest
import torch
from numpy.typing import NDArray

from agent.ingest import retrieval
from agent.ingest.context import open_ingest
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_training import as_seen, example_rule
from agent.models.networks.trainable import TrainableNetwork
from agent.prediction import predictor
from agent.prediction.predictor import Prediction, predict
from agent.prediction.studies import reading
from agent.storage import examples
from agent.storage.site_directory import MAIN, SiteDirectory
from tests.support.coordinator_runs import agents, evaluated_job
from tests.support.exported_models import Exported, appoint, exported_model, exported_run, join
from tests.support.ingest_site import one_reader, told, typed
from tests.support.ledger_world import Person
from tests.support.pacs import orthanc
from tests.support.predicted_study import NAME, PERSON, clean_site, made, site, study, task_of
from tests.support.task_site import (
    DEPTH,
    SIDE,
    abdomen_volume,
    ingest,
    write_abdomens,
    write_chest_clinic,
)

pytestmark = pytest.mark.timeout(1200)  # processes that import torch, on a machine that may be busy

__all__ = ["clean_site", "made", "one_reader", "site", "study"]  # fixtures


def asked(made: Exported, study: Path, out: Path, *words: str) -> list[str]:
    return ["predict", str(made.folder), "--folder", str(study), "--out", str(out), *words]


def copied(made: Exported, tmp_path: Path) -> Exported:
    """The folder, to change."""
    shutil.copytree(made.folder, tmp_path / "changed")
    return Exported(tmp_path / "changed", made.ledger_key, made.policy, made.parameters)


def drawn_in(path: Path) -> tuple[Any, dict[str, NDArray[np.uint8]]]:
    """A segmentation object as highdicom reads it: for each image, by its UID, (h, w) numbers of segments."""
    seg = highdicom.seg.segread(path)
    uids = [uid for _, _, uid in seg.get_source_image_uids()]
    found = seg.get_pixels_by_source_instance(uids, combine_segments=True, assert_missing_frames_are_empty=True)
    return seg, dict(zip(uids, found, strict=True))


def test_a_segmentation_says_what_it_is_of_and_that_it_is_not_for_diagnosis(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, site, *asked(made, study, tmp_path / "out"))
    assert (said["predictions"], said["left_out"], said["sent"]) == (1, [], None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == said["files"]
    digest = hashlib.sha256((made.folder / "model.safetensors").read_bytes()).hexdigest()
    seg, drawn = drawn_in(tmp_path / "out" / "segmentation-0001.dcm")
    first = pydicom.dcmread(sorted(study.iterdir())[0])
    assert (seg.PatientID, seg.StudyInstanceUID) == (PERSON, first.StudyInstanceUID)
    assert seg.FrameOfReferenceUID == first.FrameOfReferenceUID
    assert seg.SeriesInstanceUID != first.SeriesInstanceUID
    assert drawn.keys() == {str(pydicom.dcmread(path).SOPInstanceUID) for path in study.iterdir()}
    assert seg.SeriesDescription == "Research, not for diagnosis: organs"
    assert (seg.ContentLabel, seg.ContentDescription) == ("NOT_DIAGNOSTIC", "Research, not for diagnosis")
    liver, mass = (seg.get_segment_description(number) for number in (1, 2))
    assert (liver.segment_label, liver.segmented_property_type.value) == ("liver", "10200004")
    assert mass.algorithm_identification.parameters == {"model SHA-256": digest}
    assert said["sha256"] == digest
    page = (tmp_path / "out" / "predictions.html").read_text()
    assert "not for diagnosis" in page
    assert PERSON not in page


def test_segments_come_back_to_the_grid_of_the_slices(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In the place of the network stands a threshold, so that the right answer is known of each voxel."""
    monkeypatch.setattr(predictor, "predictions", lambda _task, _network, seen: (seen[:, 0] > 0.6).astype(np.int64))
    told(capsys, site, *asked(made, study, tmp_path / "out"))
    _, drawn = drawn_in(tmp_path / "out" / "segmentation-0001.dcm")
    values, _ = abdomen_volume(1)
    low, high = np.percentile(values, (0.5, 99.5))
    wanted = (np.clip((values - low) / (high - low), 0, 1) > 0.6).astype(np.uint8)
    wanted[:, : (SIDE - 56) // 2], wanted[:, SIDE - (SIDE - 56) // 2 :] = 0, 0  # what the crop left out
    found = np.stack([drawn[f"1.5.1.{place}"] for place in range(DEPTH)])
    assert wanted.any()
    assert (found == wanted).mean() > 0.9999, "but for values at the threshold itself"


def test_a_picture_of_another_size_is_drawn_on_at_its_own(
    site: Path, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shrunk to half, a part of it turned into the network's square and back: every side is where it was."""
    more = 'transforms = [{ name = "CenterSpatialCrop", roi_size = [24, 32] },\n' + (
        '              { name = "Resize", spatial_size = [32, 32] }]'
    )
    task = task_of(tmp_path, size="[32, 32]", more=more, network="unet", options="options = { width = 4 }")
    flat = exported_model(tmp_path / "f", task, monkeypatch)
    join(site, flat)
    monkeypatch.setattr(predictor, "predictions", lambda _task, _network, seen: (seen[:, 0] > 0.5).astype(np.int64))
    assert told(capsys, site, *asked(flat, study, tmp_path / "out"))["predictions"] == DEPTH
    _, drawn = drawn_in(tmp_path / "out" / "segmentation-0001.dcm")
    for place in (2, 5, 9):
        files = [(study / f"a1-{place}.dcm").read_bytes()]
        with open_ingest(SiteDirectory(site), MAIN) as way, reading(way, files) as images:
            kept = images()
        ((record,),) = [kept.records.values()]
        assert record.pixels is not None
        wanted, found = record.pixels > 0.5, drawn[f"1.5.1.{place}"] > 0
        wanted[:8], wanted[-8:] = False, False
        both = 2 * (wanted & found).sum() / max(1, wanted.sum() + found.sum())
        assert both > 0.9, (place, both)


def test_a_network_sees_what_it_saw_in_a_round(site: Path, made: Exported, study: Path, tmp_path: Path) -> None:
    task = task_of(tmp_path)
    network = Federated(task, made.parameters.size, 4.0).network(made.parameters)
    write_abdomens(tmp_path / "input" / "abdomens", [1])
    ingest(site, tmp_path / "input" / "abdomens")
    with open_ingest(SiteDirectory(site), MAIN) as way:
        cohort = examples.task_cohort(way.vault, way.ingestion.rule_here(example_rule(task)))
        with reading(way, [path.read_bytes() for path in sorted(study.iterdir())]) as images:
            (found,) = predict(task, network, images())
    assert isinstance(found, Prediction)
    ((example,),) = [patient.examples for patient in cohort.patients]
    assert np.array_equal(found.pixels, as_seen(task, example)[0])
    assert found.drawn is not None
    outputs = Federated(task, made.parameters.size, 4.0).predict(made.parameters, cohort)
    assert np.array_equal(found.drawn, outputs[0].argmax(axis=0))


def test_of_the_vault_results_bear_pseudonyms_alone(
    site: Path, made: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_abdomens(tmp_path / "input" / "abdomens", [1, 2], masked=False)
    ingest(site, tmp_path / "input" / "abdomens")
    words = ["predict", str(made.folder), "--vault", "--out", str(tmp_path / "out")]
    assert told(capsys, site, *words)["predictions"] == 2
    with open_ingest(SiteDirectory(site), MAIN) as way:
        persons = {head.person for head in way.vault.heads()}
    for path in (tmp_path / "out").iterdir():
        assert b"1.5.1." not in path.read_bytes()
        if path.suffix == ".dcm":
            seg, drawn = drawn_in(path)
            assert seg.PatientID not in ("A-1", "A-2")
            assert len(drawn) == DEPTH
    (tmp_path / "ids.txt").write_text("A-1\n")
    assert typed(capsys, site, "opt-out", "add", "--patients", str(tmp_path / "ids.txt"))[0] == 0
    words[-1] = str(tmp_path / "again")
    assert told(capsys, site, *words)["predictions"] == 1
    assert len(persons) == 2


def test_a_class_is_a_row_with_the_probabilities_of_the_network(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(
        tmp_path, kind="classification", classes='["ill", "well"]', modality="CR", size="[32, 32]", more="",
        network="small-cnn", options="",
    )  # fmt: skip
    made = exported_model(tmp_path / "f", task, monkeypatch)
    join(site, made)
    write_chest_clinic(tmp_path / "chests", 6, 64)
    said = told(capsys, site, *asked(made, tmp_path / "chests", tmp_path / "out"))
    assert said["files"] == ["predictions.csv", "predictions.html"]
    (other,) = said["left_out"]
    assert other["why"] == "it is DX, and the model takes CR"
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    assert len(rows) == said["predictions"] > 0
    files = {
        str(one.SOPInstanceUID): one for one in map(pydicom.dcmread, sorted((tmp_path / "chests").rglob("*.dcm")))
    }
    for row in rows:
        assert row["patient"] == files[row["instance_uid"]].PatientID
        assert float(row["ill"]) + float(row["well"]) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == max(("ill", "well"), key=lambda name: float(row[name]))
        assert row["notice"] == "Research, not for diagnosis"
    assert len({row["ill"] for row in rows}) == len(rows)
    status, _, err = typed(capsys, site, *asked(made, tmp_path / "chests", tmp_path / "o", "--send", "pacs"))
    assert (status, (tmp_path / "o").exists()) == (1, False)
    assert "has no [pacs.pacs]" in err


@agents
def test_the_model_of_a_run_predicts_as_that_of_one_hospital(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported_run(tmp_path / "f", evaluated_job(), monkeypatch)
    join(site, made)
    settings = site / "site.toml"
    settings.write_text(settings.read_text().replace('"CR"', '"CR", "OT"'))
    write_chest_clinic(tmp_path / "chests", 3, 64)
    for path in (tmp_path / "chests").rglob("*.dcm"):
        one = pydicom.dcmread(path)
        one.Modality = "OT"
        one.save_as(path)
    words = asked(made, tmp_path / "chests", tmp_path / "out")
    policy = site / "policy.toml"
    kept = policy.read_text()
    policy.write_text(kept.replace('levels = ["A", "B"]', 'levels = ["B"]'))
    status, _, err = typed(capsys, site, *words)
    assert (status, (tmp_path / "out").exists()) == (1, False)
    assert "this site's policy would not have approved run-1: level" in err
    policy.write_text(kept)
    said = told(capsys, site, *words)
    assert said["model"] == "run-1"
    assert len(list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))) == said["predictions"] > 0


# -- what is refused


@pytest.mark.parametrize("name", ["model.safetensors", "task.json", "ledger-certificate.json", "card.md"])
def test_a_folder_with_a_changed_file_is_refused(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changed = copied(made, tmp_path)
    body = (changed.folder / name).read_bytes()
    (changed.folder / name).write_bytes(body[:-3] + bytes([body[-3] ^ 1]) + body[-2:])
    status, _, err = typed(capsys, site, *asked(changed, study, tmp_path / "out"))
    assert (status, (tmp_path / "out").exists()) == (1, False)
    assert f"{name} is not the file in SHA256SUMS" in err
    if name == "card.md":
        return
    sums = (changed.folder / "SHA256SUMS").read_text().splitlines()
    digest = hashlib.sha256((changed.folder / name).read_bytes()).hexdigest()
    kept = [f"{digest}  {name}" if line.endswith(f"  {name}") else line for line in sums]
    (changed.folder / "SHA256SUMS").write_text("".join(f"{line}\n" for line in kept))
    status, _, err = typed(capsys, site, *asked(changed, study, tmp_path / "out"))
    assert (status, (tmp_path / "out").exists()) == (1, False)
    assert "certificate" in err


def test_a_model_of_another_coordinator_is_refused(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        other = exported_model(tmp_path / "other", task_of(tmp_path), patched)
    status, _, err = typed(capsys, site, *asked(other, study, tmp_path / "out"))
    assert (status, (tmp_path / "out").exists()) == (1, False)
    assert "another key than that of this site's coordinator" in err


def test_a_folder_without_a_model_and_a_place_that_is_taken_are_sentences(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nothing").mkdir()
    empty = Exported(tmp_path / "nothing", b"", "", made.parameters)
    for words, sentence in (
        (asked(empty, study, tmp_path / "out"), "nothing has no SHA256SUMS"),
        (asked(made, tmp_path / "missing", tmp_path / "out"), "there is no such folder"),
        (asked(made, study, study), "name a new folder"),
        (asked(made, study, site / "out"), "this folder is the agent's own"),
        (asked(made, study, tmp_path / "out", "--send", "x"), "has no [pacs.x]"),
    ):
        status, _, err = typed(capsys, site, *words)
        assert (status, sentence in err) == (1, True), err
        assert not (tmp_path / "out").exists()


def test_a_series_with_a_missing_slice_is_left_out_and_nothing_is_written(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (study / "a1-5.dcm").unlink()
    said = told(capsys, site, *asked(made, study, tmp_path / "out"), status=1)
    assert said["predictions"] == 0
    ((why, count),) = [(one["why"], one["images"]) for one in said["left_out"]]
    assert (why.startswith("Slices are missing"), count) == (True, DEPTH - 1)
    assert not (tmp_path / "out").exists()


# -- the officer


def test_a_model_that_the_policy_would_not_have_approved_waits_for_the_officer(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = site / "policy.toml"
    policy.write_text(policy.read_text().replace('levels = ["A", "B"]', 'levels = ["B"]'))
    words = asked(made, study, tmp_path / "out")
    status, _, err = typed(capsys, site, *words)
    assert (status, (tmp_path / "out").exists()) == (1, False)
    assert "level: the policy" in err
    assert "approved by compliance" in err
    appoint(site, Person("dpo", "compliance"))
    sign = [*words, "--person", "dpo", "--key", str(tmp_path / "dpo.key"), "--yes"]
    assert typed(capsys, site, *sign)[0] == 0
    assert (tmp_path / "out").is_dir()
    shutil.rmtree(tmp_path / "out")
    assert typed(capsys, site, *words)[0] == 0, "the decision is in the site's ledger"
    shutil.rmtree(tmp_path / "out")
    policy.write_text(policy.read_text().replace("epsilon = 8.0", "epsilon = 0.1"))
    status, _, err = typed(capsys, site, *words)
    assert (status, "epsilon" in err) == (1, True), "what was signed was in spite of the level alone"


# -- where it is computed


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is of a machine without an accelerator")
def test_where_it_is_computed_is_said_and_an_accelerator_that_fails_is_a_sentence(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    words = asked(made, study, tmp_path / "out")
    for device, said in (("auto", ": this machine has no accelerator that PyTorch can use\n"), ("cpu", "\n")):
        status, out, _ = typed(capsys, site, *words, "--device", device)
        assert (status, f"device  predictions are computed by the processor{said}" in out) == (0, True), out
        shutil.rmtree(tmp_path / "out")
    status, _, err = typed(capsys, site, *words, "--device", "cuda")
    assert (status, (tmp_path / "out").exists()) == (1, False)
    assert '--device "cuda": this machine has no accelerator that PyTorch can use: set device = "auto"' in err

    def gone(*_: object) -> None:
        raise torch.OutOfMemoryError("PLANTED")

    for place, name in ((predictor, "predictions"), (TrainableNetwork, "to")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, gone)
            status, _, err = typed(capsys, site, *words)
        assert (status, "PLANTED" in err, (tmp_path / "out").exists()) == (1, False, False)
        assert "its memory ran out. Nothing was written: type the command with --device cpu" in err


# -- the archive


PACS: Final = """
[pacs.ward]
aet = "TESTPACS"
host = "127.0.0.1"
port = {port}
calling = "LAZARET"

[pacs.mover]
aet = "TESTPACS"
host = "127.0.0.1"
port = {port}
calling = "LAZARET"
mode = "move"

[dicomweb.web]
url = "{0}"
user = "{1}"
password_file = "{2}"

[dicomweb.night]
url = "{0}"
hours = "{3}"
"""


def night() -> str:
    """An hour of the day that is not now."""
    at = dt.datetime.now() + dt.timedelta(hours=6)
    return f"{at:%H:%M}-{at + dt.timedelta(hours=1):%H:%M}"


def test_a_study_is_fetched_from_an_archive_and_its_segmentation_stored_there(
    site: Path, made: Exported, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    settings = (site / "ingest.toml").read_text()
    with orthanc(tmp_path / "orthanc") as pacs:
        pacs.store(sorted(study.iterdir()))
        (tmp_path / "password").write_text(pacs.password)
        (tmp_path / "password").chmod(0o600)
        web = (pacs.dicomweb_url, pacs.user, tmp_path / "password", night())
        (site / "ingest.toml").write_text(settings + PACS.format(*web, port=pacs.dicom_port))
        words = ["predict", str(made.folder), "--study", "1.2.1", "--from", "ward", "--send", "ward"]
        said = told(capsys, site, *words, "--out", str(tmp_path / "out"))
        assert (said["predictions"], said["sent"]) == (1, 1)
        assert pacs.count() == DEPTH + 1
        (sent,) = [one for uid, one in pacs.files().items() if not uid.startswith("1.5.1.")]
        (tmp_path / "sent.dcm").write_bytes(sent)
        seg, drawn = drawn_in(tmp_path / "sent.dcm")
        assert len(drawn) == DEPTH
        assert seg.SeriesDescription == "Research, not for diagnosis: organs"
        for name, uid, sentence in (
            ("ward", "1.2.999", "ward: it lists no MR series of that study"),
            ("web", "1.2.999", "web: it lists no MR series of that study"),
            ("ward", "PLANTED", "a Study Instance UID has digits and dots"),
            ("none", "1.2.1", "no [pacs.none] and no [dicomweb.none]; its archives: mover, night, ward, web"),
            ("mover", "1.2.1", 'mode = "move": what an archive moves comes to the receiver of `serve`'),
            ("night", "1.2.1", "night: it is outside its hours"),
        ):
            words[3], words[5] = uid, name
            status, _, err = typed(capsys, site, *words, "--out", str(tmp_path / "none"))
            assert (status, (tmp_path / "none").exists()) == (1, False)
            assert (sentence in err, uid in err) == (True, False), err
        out = str(tmp_path / "web")
        words[2:] = ["--study", "1.2.1", "--from", "web", "--out", out]
        assert told(capsys, site, *words)["predictions"] == 1
        assert drawn_in(tmp_path / "web" / "segmentation-0001.dcm")[1].keys() == drawn.keys()
        monkeypatch.setattr(retrieval, "MOST_BYTES", 10_000)
        for name in ("web", "ward"):
            words[5], words[-1] = name, str(tmp_path / "none")
            status, _, err = typed(capsys, site, *words)
            assert (status, f"{name}: the study has more than 0 MiB" in err, (tmp_path / "none").exists()) == (
                1,
                True,
                False,
            ), err
    status, _, err = typed(capsys, site, *asked(made, study, tmp_path / "kept", "--send", "ward"))
    assert status == 1
    assert "not sent: ward: nothing answers" in err
    assert "nothing is lost: kept has the segmentations" in err
    assert (tmp_path / "kept" / "segmentation-0001.dcm").is_file()


# -- nothing outlives it


def test_killed_it_leaves_no_identifier_outside_the_results(
    site: Path, made: Exported, study: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "agent", "--home", str(site), *asked(made, study, tmp_path / "out")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().startswith("predict"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = [
        path.relative_to(tmp_path)
        for path in tmp_path.rglob("*")
        if path.is_file() and "study" not in path.parts and not path.is_relative_to(tmp_path / "out")
        if any(planted in path.read_bytes() for planted in (PERSON.encode(), NAME.encode()))
    ]
    assert [path for path in found if path.parts[0] != "out.part"] == []
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["predictions"] == 1
    assert not (tmp_path / "out.part").exists()
