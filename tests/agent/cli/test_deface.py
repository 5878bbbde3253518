"""``deface`` as it is typed: a file, a folder with what must be refused, a killed run, a hospital's vault."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest

from agent.cli import deface as deface_module
from agent.cli.main import main
from agent.defacing import batch as defaced_files
from agent.defacing.batch import LOG
from agent.deidentify.pixels.pixel_data import decode, unit_range
from agent.ingest.context import IngestContext, open_ingest
from agent.ingest.service import DefacingThread
from agent.storage.pixel_codec import unpacked
from agent.storage.site_directory import SiteDirectory
from deploy.phantoms.head_files import Series, nifti, study
from deploy.phantoms.heads import axial
from protos.common.errors import ArtifactError
from tests.support.heads import bad, phantoms, scan

pytestmark = pytest.mark.timeout(900)  # brains are looked for, and heads drawn: a busy machine takes its time

MM = 2.0
DONE: dict[Any, Any] = {}
SAYS = "a part of the face removed: people were still recognised by the rest, and the brain itself remains linkable"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it lies about: one head, a bottle, a study of two series with its localiser, and a text."""
    root = tmp_path_factory.mktemp("heads")
    nifti(root / "nifti" / "head.nii.gz", scan(0, 0, MM).volume, "LPS")
    nifti(root / "nifti" / "bottle.nii", bad(MM)["bottle"])
    made = (Series("MPRAGE", "T1", "PIL", mm=MM), Series("FLAIR", "FLAIR", "LPS", axial(4.0, 5.0)))
    study(root / "study", phantoms(), 1, 0, np.random.default_rng(1), made)
    (root / "README.txt").write_text("nothing")
    return root


@pytest.fixture(autouse=True)
def remembered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files, a study that was de-faced once comes out the same again: finding a brain takes long."""
    if "site" in request.fixturenames:
        return
    take_off = defaced_files.take_off

    def again(sources: Any, with_: Any, mask: Any = None, *, picture: bool = False) -> Any:
        key = (with_.made_of, picture, *(source.volume.values.tobytes() for source in sources))
        if key not in DONE:
            DONE[key] = take_off(sources, with_, mask, picture=picture)
        return DONE[key]

    monkeypatch.setattr(defaced_files, "take_off", again)


def typed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code = main([str(word) for word in (*words, "--json")])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out.strip() else said.err


def test_one_file_loses_its_face_and_nothing_else(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, page = folder / "nifti" / "head.nii.gz", tmp_path / "bare.nii.gz", tmp_path / "page.html"
    code, told = typed(capsys, "deface", source, out, "--method", "deface", "--report", page)
    assert (code, told["says"]) == (0, SAYS)
    (row,) = told["volumes"]
    assert (row["state"], row["brain_voxels_changed"], row["outside_voxels_changed"]) == ("defaced", 0, 0)
    before, after = nibabel.load(source), nibabel.load(out)
    assert before.header.binaryblock == after.header.binaryblock
    differs = np.asarray(before.dataobj) != np.asarray(after.dataobj)
    brain = scan(0, 0, MM).brain[::-1, ::-1]  # by the truth, and not by the mask that the method went by; LAS
    assert not (differs & brain).any()
    assert 0.02 < differs.mean() < 0.4
    text = page.read_text()
    assert SAYS in text
    assert "script" not in text
    assert "FOR THIS SITE ONLY" in text
    assert text.count("data:image/png;base64,") == 1
    assert page.stat().st_mode & 0o077 == 0


@pytest.mark.slow  # three brains are looked for; what a folder is otherwise, test_defaced_files.py asks
def test_a_folder_is_de_faced_study_by_study_and_what_keeps_its_face_is_not_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, told = typed(capsys, "deface", folder, out, "--method", "deface")
    assert code == 1
    states = {row["path"]: row["state"] for row in told["volumes"]}
    assert states["nifti/head.nii.gz"] == "defaced"
    assert states["nifti/bottle.nii"] == "no_head"
    done = [row for row in told["volumes"] if row["state"] == "defaced" and row["path"].startswith("study")]
    assert {row["path"].split("/")[1] for row in done} >= {"2_MPRAGE", "3_FLAIR"}
    assert [row["reference"] for row in done].count(True) == 1
    assert not (out / "nifti" / "bottle.nii").exists()
    planes = [row for row in told["volumes"] if "LOCALISER" in row["path"]]  # three small volumes, in one place
    written = {path.name for path in out.rglob("*LOCALISER*/*.dcm")}
    assert len(planes) == 3
    assert len(written) == sum(row["files"] for row in planes if row["state"] == "defaced")
    for row in done:
        for path in sorted((folder / row["path"]).glob("*.dcm")):
            if not (out / path.relative_to(folder)).exists():  # of another plane
                continue
            old, new = pydicom.dcmread(path), pydicom.dcmread(out / path.relative_to(folder))
            assert (old.ImagePositionPatient, old.Rows) == (new.ImagePositionPatient, new.Rows)
            assert new.RecognizableVisualFeatures == "NO"
    once = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    code, told = typed(capsys, "deface", folder, out, "--method", "deface")  # again: what is done is done
    assert [row["state"] for row in told["volumes"]].count("defaced before") == 1 + len(done)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == once


@pytest.mark.slow
def test_a_run_that_was_killed_in_the_middle_of_a_study_makes_it_anew(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    source, out = folder / "study", tmp_path / "out"
    write = defaced_files.VolumeSource.write

    def torn(self: Any, values: Any, where: Path, *rest: Any) -> Any:
        paths = write(self, values, where, *rest)
        for path in paths[1:]:
            path.unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(defaced_files.VolumeSource, "write", torn)
        with pytest.raises(Killed):
            main(["deface", str(source), str(out), "--method", "deface", "--json"])
    assert len(list(out.rglob("*.dcm"))) == 1
    (out / LOG).write_bytes((out / LOG).read_bytes() + b'{"study": "torn')
    code, told = typed(capsys, "deface", source, out, "--method", "deface")
    done = [row for row in told["volumes"] if row["state"] == "defaced"]
    assert code == 1 - (len(done) == len(told["volumes"]))
    assert len(list(out.rglob("*.dcm"))) == sum(row["files"] for row in done)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["IN", "OUT"], "remodel needs --network"),
        (["IN", "OUT", "--network", "none.safetensors"], "file not found: none.safetensors"),
        (["IN", "OUT", "--method", "strip", "--network", "IN"], "by no other method"),
        (["IN", "OUT.nii", "--method", "strip"], "must be named .nii.gz"),
        (["none.nii", "OUT", "--method", "strip"], "file or folder not found"),
        (["IN"], "needs IN and OUT"),
        (["IN", "OUT", "--vault"], "--vault takes no files"),
        (["--vault"], "--vault needs --home"),
        (["FOLDER", "FOLDER/out", "--method", "strip"], "must be outside the input folder"),
        (["FOLDER", "OUT", "--method", "strip", "--mask", "IN"], "--mask works with one file only"),
        (["IN", "THERE", "--method", "deface"], "an output file already exists"),
    ],
)
def test_a_wrong_order_is_a_sentence_and_leaves_nothing(
    words: list[str], said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there.nii.gz"
    there.write_bytes(b"mine")
    named = {
        "IN": folder / "nifti" / "head.nii.gz",
        "OUT": tmp_path / "out",
        "FOLDER": folder,
        "THERE": there,
        "OUT.nii": tmp_path / "out.nii",
    }
    named["FOLDER/out"] = folder / "out"
    code, told = typed(capsys, "deface", *[named.get(word, word) for word in words])
    assert code == 1
    assert said in told
    assert there.read_bytes() == b"mine"
    assert not (tmp_path / "out").exists()


# -- in the vault


@pytest.fixture
def site(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A site whose folder holds the study and a bottle that says it is a head."""
    lying = tmp_path / "input"
    shutil.copytree(folder / "study", lying / "study")
    shutil.copy(folder / "nifti" / "bottle.nii", lying / "bottle.nii")
    (lying / "nifti.csv").write_text("file,patient_id\nbottle.nii,P2\n")
    home = tmp_path / "home"
    assert main(["--home", str(home), "init", "--site", "site-a", "--input", "../input", "--modality", "MR"]) == 0
    (home / "ingest.toml").write_text(
        '[site]\nissuer = "H"\n[rules]\nnifti_modality = "MR"\n[faces]\nmethod = "strip"\n'
    )
    capsys.readouterr()
    return home


def pictures(way: IngestContext) -> list[tuple[str, Any]]:
    file = way.vault._file
    heads = [head for head in way.vault.heads() if head.kind == "image"]
    return [
        (head.name, unpacked(file.unseal(f"pixels:{head.name}", box), head.shape))
        for head in heads
        for (box,) in file.rows("SELECT pixels FROM body JOIN instance USING (id) WHERE name = ?", (head.name,))
    ]


def test_what_comes_in_is_de_faced_by_policy_and_what_cannot_be_stays_withheld(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = typed(capsys, "--home", site, "ingest")
    assert code == 0
    assert told["faces"]["defaced"] == 1
    withheld = told["faces"]["withheld"]
    assert withheld["no_head"] == 1
    with open_ingest(SiteDirectory(site), "main") as way:
        heads = list(way.vault.heads())
        bare = [head for head in heads if head.defaced]
        assert not any(head.face for head in bare)
        left = [head for head in heads if head.face]
        assert [head.kind for head in left].count("volume") == 1  # the bottle
        assert not any(head.defaced for head in left)
        for head in bare[:3]:
            dataset = pydicom.dcmread(io.BytesIO(way.vault.payload(head.name)))
            assert dataset.RecognizableVisualFeatures == "NO"
            shown = unit_range(dataset, decode(dataset, str(dataset.file_meta.TransferSyntaxUID)))
            (image,) = (i for n, i in pictures(way) if n == head.name)
            assert np.abs(image - shown).max() <= 1 / 65535  # what releases draw from is what the new file shows
    code, again = typed(capsys, "--home", site, "deface", "--vault")
    assert code == 1
    assert again["defaced"] == 0
    assert again["withheld"]["no_head"] == 1
    log = (site / "agent.log").read_text()
    assert "P2" not in log


def test_without_the_table_heads_stay_withheld(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "ingest.toml").write_text('[site]\nissuer = "H"\n[rules]\nnifti_modality = "MR"\n')
    code, told = typed(capsys, "--home", site, "ingest")
    assert (code, "faces" in told) == (0, False)
    with open_ingest(SiteDirectory(site), "main") as way:
        assert all(head.face for head in way.vault.heads())
    code, said = typed(capsys, "--home", site, "deface", "--vault")
    assert code == 1
    assert "no table [faces]" in said


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('method = "blur"', "method is one of"),
        ('method = "remodel"', "a network is needed by remodel"),
        ('method = "deface"\nnetwork = "x"\nnetwork_sha256 = "00"', "by no other method"),
        ('method = "remodel"\nnetwork = "x"\nnetwork_sha256 = "00"', "64 hexadecimal"),
        ('method = "deface"', "people were still recognised"),
        ('method = "facemask"', "people were still recognised"),
        (f'method = "remodel"\nparts = "face"\nnetwork = "x"\nnetwork_sha256 = "{"0" * 64}"', "still recognised"),
        ('method = "strip"\nparts = "nose"', "parts is one of"),
        ('method = "strip"\nsettle_minutes = 0.0', "settle_minutes"),
        ('method = "strip"\nmore = 1', "unknown keys"),
    ],
)
def test_a_wrong_table_is_told(table: str, said: str, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "ingest.toml").write_text(f"[faces]\n{table}\n")
    assert main(["--home", str(site), "deface", "--vault"]) == 1
    assert said in capsys.readouterr().err.replace("\n", " ")


class Log:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, _level: str) -> Any:
        return lambda event, **more: self.said.append((event, more))


@pytest.mark.slow
def test_serve_sweeps_once_nothing_has_come_for_a_while(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock, log = [0.0], Log()
    (site.parent / "input" / "study").rename(site.parent / "elsewhere")
    table = (site / "ingest.toml").read_text()
    (site / "ingest.toml").write_text(table.split("[faces]")[0])
    assert main(["--home", str(site), "ingest"]) == 0  # before there was a table: the bottle waits
    (site / "ingest.toml").write_text(table)
    sweeping = DefacingThread(SiteDirectory(site), "main", log, 60.0, lambda: clock[0])
    sweeping.look()
    assert log.said == []
    clock[0] = 61.0
    sweeping.look()
    sweeping._thread.join()
    assert log.said == [("defaced", {"count": 0, "kept": 1}), ("face_withheld", {"reason": "no_head", "count": 1})]
    clock[0] = 200.0
    sweeping.look()
    sweeping._thread.join()
    assert len(log.said) == 2, "nothing has come since"
    (site / "ingest.toml").write_text("[faces]\nmethod = 7\n")
    sweeping = DefacingThread(SiteDirectory(site), "main", log, 60.0, lambda: clock[0])
    for _ in range(2):  # a fault is written down, and tried again
        clock[0] += 61.0
        sweeping.look()
        sweeping._thread.join()
    assert log.said[2:] == [("defacing_failed", {"reason": "SiteConfigError"})] * 2


def test_a_text_that_may_quote_a_file_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quoting(_: object) -> int:
        raise ArtifactError("Mustermann^Max")

    monkeypatch.setattr(deface_module, "_files", quoting)
    assert deface_module.run(SimpleNamespace(vault=False)) == 1  # type: ignore[arg-type]
    said = capsys.readouterr()
    assert "refused: ArtifactError" in said.err
    assert "Mustermann" not in said.out + said.err
