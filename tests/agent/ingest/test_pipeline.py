"""Ingest as hospital IT uses it: the commands, typed, on real files; and what a crash leaves."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file

from agent.cli.main import main
from agent.ingest.context import open_ingest
from agent.ingest.service import IngestService
from agent.storage.site_directory import SiteDirectory
from agent.storage.spool import ReceivedFile
from deploy.phantoms import digits
from tests.support.ingest_site import ingest_site, one_reader, told
from tests.support.pacs import make_instances, run
from tests.support.peers import need
from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]


__all__ = ["one_reader"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_reader")


def bundled(name: str) -> Path:
    path = get_testdata_file(name, download=False)
    assert isinstance(path, str)
    return Path(path)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A hospital's agent, and an empty folder beside it."""
    return ingest_site(tmp_path)


def test_a_folder_comes_in_and_again_nothing_new(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits.write_hospital(site.parent / "input", 0, 1, 3, 2, np.random.default_rng(1))
    found = told(capsys, site, "ingest")
    assert found == {"files": 6, "kept": 6, "duplicates": 0, "quarantined": {}}
    assert told(capsys, site, "ingest") == {"files": 6, "kept": 0, "duplicates": 6, "quarantined": {}}
    (count,) = told(capsys, site, "cohort")
    assert (count["modality"], count["state"], count["instances"], count["patients"]) == ("OT", "eligible", 6, 3)


def test_what_if_says_what_would_be_done_and_does_nothing(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.read_bytes() for p in site.rglob("*") if p.is_file() and p.suffix in (".db", ".toml")}
    good, bad = told(capsys, site, "what-if", str(bundled("CT_small.dcm")), str(bundled("rtplan.dcm")), status=1)
    steps = {step["tag"]: step["action"] for step in good["steps"]}
    assert steps["0010,0010"] in ("emptied", "replaced", "removed")
    assert steps["0010,0020"] in ("rekeyed", "replaced")
    assert steps["0008,0060"] == "kept"
    assert bad["refused"] == "not_an_image"
    values = pydicom.dcmread(bundled("CT_small.dcm"))
    assert str(values.PatientName) not in json.dumps(good)
    assert str(values.PatientID) not in json.dumps(good)
    assert told(capsys, site, "cohort") == []
    after = {p: p.read_bytes() for p in before}
    assert {p for p in before if before[p] != after[p] and p.suffix == ".toml"} == set()


def test_a_refused_file_is_listed_tried_again_shown_and_given_up(
    site: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(bundled("examples_rgb_color.dcm"), site.parent / "input" / "us.dcm")
    assert told(capsys, site, "ingest")["quarantined"] == {"burned_in_risk": 1}
    listed = told(capsys, site, "quarantine", "list")
    assert listed["counts"] == {"burned_in_risk": 1}
    (file,) = listed["files"]
    assert (file["attempts"], file["road"]) == (1, "folder")
    assert file["source"].endswith("input/us.dcm")
    assert told(capsys, site, "quarantine", "retry", status=1)["quarantined"] == {"burned_in_risk": 1}
    assert told(capsys, site, "quarantine", "retry", status=1)["quarantined"] == {"burned_in_risk": 1}
    assert told(capsys, site, "quarantine", "retry")["files"] == 0  # tried three times: only a person may go on
    assert told(capsys, site, "quarantine", "retry", "--once-more", status=1)["files"] == 1
    out = tmp_path / "look.dcm"
    assert main(["--home", str(site), "quarantine", "show", file["name"], "--out", str(out)]) == 0
    assert out.read_bytes() == bundled("examples_rgb_color.dcm").read_bytes()
    assert main(["--home", str(site), "quarantine", "drop", file["name"]]) == 1
    assert main(["--home", str(site), "quarantine", "drop", file["name"], "--yes"]) == 0
    assert told(capsys, site, "quarantine", "list")["files"] == []


def test_a_rule_lets_a_refused_picture_in_and_text_beside_its_region_holds_the_study_until_a_person_looked(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(bundled("examples_rgb_color.dcm"), site.parent / "input" / "us.dcm")
    told(capsys, site, "ingest")
    (site / "site.toml").write_text((site / "site.toml").read_text().replace('["CT",', '["US", "CT",'))
    size = pydicom.dcmread(bundled("examples_rgb_color.dcm"), stop_before_pixels=True)
    rule = f'[[blank]]\nmodality = "US"\nrows = {size.Rows}\ncolumns = {size.Columns}\n'
    rule += f"rectangles = [{{ top = 0, left = 0, bottom = 80, right = {size.Columns} }}]\n"
    allowed = f'[rules]\ncolour_modalities = ["US"]\nsop_classes = ["{size.SOPClassUID}"]\n'
    (site / "ingest.toml").write_text(allowed + rule)
    assert told(capsys, site, "quarantine", "retry", status=1)["quarantined"] == {"burned_in_text": 1}
    capsys.readouterr()
    assert main(["--home", str(site), "cohort", "--held"]) == 0
    study = capsys.readouterr().out.strip()
    assert main(["--home", str(site), "cohort", "--lift", "0" * 32]) == 1
    assert main(["--home", str(site), "cohort", "--lift", study]) == 0
    assert told(capsys, site, "quarantine", "retry")["kept"] == 1
    with open_ingest(SiteDirectory(site), "main") as way:
        (head,) = way.vault.heads()
        payload = pydicom.dcmread(io.BytesIO(way.vault.payload(head.name)))
    assert not payload.pixel_array[:80].any()
    assert payload.BurnedInAnnotation == "NO"


def test_a_manifest_says_what_was_done_and_names_nobody(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(bundled("CT_small.dcm"), site.parent / "input")
    told(capsys, site, "ingest")
    found = told(capsys, site, "manifest")
    original = pydicom.dcmread(bundled("CT_small.dcm"))
    assert len(found["instances"]) == 1
    assert found["residual"] == {"scanned": 1, "with_findings": 0}
    actions = {row["path"]: row["action"] for row in found["attributes"]}
    assert actions["0010,0020"] in ("rekeyed", "replaced")
    assert str(original.PatientID) not in json.dumps(found)


def test_a_patient_who_says_no_is_deleted_and_never_comes_in_again(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = digits.write_hospital(site.parent / "input", 0, 1, 3, 2, np.random.default_rng(1))
    (site / "ingest.toml").write_text(f'[site]\nissuer = "{digits.ISSUER}"\n')
    told(capsys, site, "ingest")
    ids = site.parent / "ids.txt"
    ids.write_text(planted.patients[0].patient_id + "\n")
    assert main(["--home", str(site), "opt-out", "add", "--patients", str(ids), "--issuer", digits.ISSUER]) == 0
    assert told(capsys, site, "cohort")[0]["patients"] == 2
    assert told(capsys, site, "ingest")["quarantined"] == {"opted_out": 2}
    assert planted.patients[0].patient_id not in (site / "agent.log").read_text()
    assert main(["--home", str(site), "opt-out", "remove", "--patients", str(ids), "--issuer", digits.ISSUER]) == 0
    assert told(capsys, site, "ingest")["kept"] == 2


def test_a_project_has_its_own_pseudonyms_and_an_end(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(bundled("CT_small.dcm"), site.parent / "input")
    assert main(["--home", str(site), "project", "create", "study-1"]) == 0
    for project in ("main", "study-1"):
        assert told(capsys, site, "ingest", "--project", project)["kept"] == 1
    files, persons = set(), set()
    for project in ("main", "study-1"):
        with open_ingest(SiteDirectory(site), project) as way:
            (head,) = way.vault.heads()
            persons.add(head.person)
            files.add(str(pydicom.dcmread(io.BytesIO(way.vault.payload(head.name))).PatientID))
    assert len(persons) == 1  # k and budgets are counted by the site's own pseudonym
    assert len(files) == 2  # what is in the files cannot be joined
    assert main(["--home", str(site), "project", "end", "study-1"]) == 1
    assert main(["--home", str(site), "project", "end", "study-1", "--yes", "study-1"]) == 0
    assert main(["--home", str(site), "ingest", "--project", "study-1"]) == 1
    assert told(capsys, site, "cohort")[0]["instances"] == 1


def test_a_medium_whose_index_lists_what_is_not_there_says_so(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = site.parent / "input" / "medium"
    shutil.copytree(bundled("dicomdirtests/DICOMDIR").parent / "TINY_ALPHA", target)
    found = told(capsys, site, "ingest")["quarantined"]
    assert found["dicomdir"] == 1
    assert "missing_from_medium" not in found
    next(p for p in sorted((target / "PT000000").rglob("IM*")) if p.is_file()).unlink()
    assert told(capsys, site, "ingest")["quarantined"]["missing_from_medium"] == 1


def test_a_bids_dataset_comes_in_by_its_participants(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = site.parent / "bids"
    (folder / "sub-01" / "anat").mkdir(parents=True)
    (folder / "dataset_description.json").write_text('{"Name": "x", "BIDSVersion": "1.10.0"}')
    (folder / "participants.tsv").write_text("participant_id\tmrn\nsub-01\tP-1\n")
    image = nibabel.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4))
    image.to_filename(folder / "sub-01" / "anat" / "sub-01_T1w.nii.gz")
    (folder / "sub-01" / "anat" / "sub-01_T1w.json").write_text("{}")
    (site / "ingest.toml").write_text('[[folder]]\npath = "../bids"\npatient_key = "mrn"\n')
    assert told(capsys, site, "ingest") == {"files": 1, "kept": 1, "duplicates": 0, "quarantined": {}}


def test_what_waits_in_the_first_room_is_kept_or_refused_and_leaves_it(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_ingest(SiteDirectory(site), "main") as way:
        way.inbox.put(ReceivedFile("dimse", "PACS", bundled("CT_small.dcm").read_bytes(), instance="1.2.3"))
        way.inbox.put(ReceivedFile("stow", "stow", b"no image"))
        way.inbox.put(ReceivedFile("stow", "stow", b"no image"))
        torn = way.inbox.folder / way.inbox.put(ReceivedFile("stow", "stow", b"cut"))
        torn.write_bytes(torn.read_bytes()[:-1])
    found = told(capsys, site, "ingest")
    assert (found["kept"], found["quarantined"]) == (1, {"not_dicom": 2, "unreadable": 1})
    with open_ingest(SiteDirectory(site), "main") as way:
        assert way.inbox.names() == []
        assert {e.code: e.attempts for e in way.quarantine.entries()} == {"not_dicom": 2, "unreadable": 1}


def test_a_killed_ingest_loses_nothing_and_doubles_nothing(site: Path, tmp_path: Path) -> None:
    make_instances(site.parent / "input", 60, modalities=("CT",))
    command = [sys.executable, "-m", "agent", "--home", str(site), "ingest", "--json"]
    for wait in (1.6, 2.2):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    assert found["files"] == found["kept"] + found["duplicates"] == 60
    with open_ingest(SiteDirectory(site), "main") as way:
        assert len(list(way.vault.heads())) == 60


class Log:
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **words: Any) -> None:
        self.events.append((event, words))

    error = warning = info


@pytest.fixture
def listening(site: Path) -> tuple[Path, int]:
    port = free_port()
    caller = '{ ae_title = "PACS", addresses = ["127.0.0.1"] }'
    (site / "ingest.toml").write_text(
        f'[site]\nlook_seconds = 0.2\n[listener]\nae_title = "LAZARET"\nport = {port}\nplain_tcp = true\n'
        f"callers = [{caller}]\nworkers = 1\n"
        f'[[folder]]\npath = "../drop"\nwatch = true\nsettle_seconds = 0.5\n'
    )
    (site.parent / "drop").mkdir()
    return site, port


def _until(done: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_what_a_pacs_sends_and_what_lies_in_a_watched_folder_is_in_the_vault_soon_after(
    listening: tuple[Path, int], tmp_path: Path
) -> None:
    need("storescu")
    site, port = listening
    sent = make_instances(tmp_path / "sent", 5, modalities=("CT",), seed="a")
    dropped = make_instances(site.parent / "drop", 3, modalities=("CT",), seed="b")
    log = Log()
    with IngestService(SiteDirectory(site), "main", log) as reception:
        assert any("plain TCP" in line for line in reception.told())
        run(["storescu", "-aet", "PACS", "-aec", "LAZARET", "127.0.0.1", str(port), *map(str, sent)])
        with open_ingest(SiteDirectory(site), "main") as way:
            _until(lambda: len(list(way.vault.heads())) == len(sent) + len(dropped))
    assert sum(words["kept"] for event, words in log.events if event == "ingested") == 8
    assert not any("PAT-" in repr(words) for _, words in log.events)


def test_a_fault_of_one_look_is_logged_and_the_next_one_goes_on(listening: tuple[Path, int]) -> None:
    site, _ = listening
    log = Log()
    drop = site.parent / "drop"
    (drop / "nifti.csv").write_text("not a list\n")
    with IngestService(SiteDirectory(site), "main", log):
        _until(lambda: any(event == "intake_failed" for event, _ in log.events))
        (drop / "nifti.csv").unlink()
        make_instances(drop, 1, modalities=("CT",))
        _until(lambda: any(event == "ingested" for event, _ in log.events))


def test_serve_without_a_modality_receives_and_ends_when_it_is_told(listening: tuple[Path, int]) -> None:
    site, port = listening
    need("echoscu")
    command = [sys.executable, "-m", "agent", "--home", str(site), "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listening for C-STORE as LAZARET" in line
        run(["echoscu", "-aet", "PACS", "-aec", "LAZARET", "127.0.0.1", str(port)])
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_a_token_and_an_identity_are_made_for_the_settings(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--home", str(site), "token", "--out", str(site / "stow.token")]) == 0
    assert (site / "stow.token").stat().st_mode & 0o777 == 0o600
    assert main(["--home", str(site), "token", "--out", str(site / "stow.token")]) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("s3cret\n"))
    capsys.readouterr()
    assert main(["--home", str(site), "identity", "pacs"]) == 0
    line = capsys.readouterr().out.strip()
    assert "s3cret" not in line
    tls = 'tls = { certificate = "a.pem", key = "a.key", authorities = "ca.pem" }'
    callers = 'callers = [{ ae_title = "P", addresses = ["10.0.0.1"] }]'
    (site / "ingest.toml").write_text(f'[listener]\nae_title = "L"\n{callers}\n{tls}\nidentities = [{line}]\n')
    with open_ingest(SiteDirectory(site), "main") as way:
        assert way.ingestion.listener is not None
        assert way.ingestion.listener.identities[0].shown(b"pacs", b"s3cret")
