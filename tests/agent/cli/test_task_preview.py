"""``task preview``: the sheet is what a round trains on, of the same patients, and stays at the site."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from agent import runtime
from agent.cli import task_preview
from agent.cli.main import main
from agent.federation import run_plan
from agent.federation.run_plan import RunPlan
from agent.ingest.context import open_ingest
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_training import as_seen, example_rule
from agent.storage import example_pixels, projects
from agent.storage.label_tables import LabelColumn, LabelTable, keep_table
from agent.storage.site_directory import MAIN, SiteDirectory
from policies.statements import claim_json
from policies.tasks.evaluation import EvaluationPlan
from policies.tasks.task import Task, read_task
from protos.common import durable_files
from protos.federation.round_times import RoundTerms
from tests.support.ingest_site import one_reader, told, typed
from tests.support.labelled_site import image, labelled_site
from tests.support.task_site import (
    DEPTH,
    SIDE,
    ingest,
    task_site,
    write_abdomens,
    write_chest_clinic,
    write_eye_clinic,
)

__all__ = ["one_reader"]  # a fixture

FINDINGS: Final = '["atelectasis", "cardiomegaly", "consolidation", "edema", "effusion"]'
FILE: Final = """
[task]
name = "looked-at"
kind = "{kind}"
[labels]
{labels}
[input]
modality = "{modality}"
size = {size}
{more}
[training]
public_patients = 100
{training}
[network]
name = "{network}"
"""
EYES: Final = 'classes = ["0", "1", "2", "3", "4"]'
ORGANS: Final = 'classes = ["liver", "mass"]'
VOLUME: Final = f"[{DEPTH}, {SIDE}, {SIDE}]"
TASKS: Final[dict[str, dict[str, str]]] = {
    "own labels": {"labels": 'classes = ["none", "edema", "effusion", "cardiomegaly"]', "modality": "DX"},
    "a column": {
        "labels": 'table = "findings"\ncolumns = ["effusion"]\nclasses = ["no", "yes"]',
        "more": 'transforms = [{ name = "ScaleIntensity" }]',
    },
    "findings": {
        "kind": "multi-label",
        "labels": f'table = "findings"\ncolumns = {FINDINGS}',
        "network": "small-cnn",
    },
    "a number": {
        "kind": "regression",
        "labels": 'table = "findings"\ncolumns = ["age"]\nlow = [0]\nhigh = [100]',
        "more": "window = [0, 200]\nspacing = [8.0, 8.0]",
        "modality": "DX",
    },
    "colour": {"labels": EYES, "modality": "OP", "more": "channels = 3"},
    "a study": {"labels": EYES, "modality": "OP", "more": 'channels = 3\nexample = "study"'},
    "a volume": {
        "labels": 'table = "organs"\ncolumns = ["state"]\nclasses = ["ill", "well"]',
        "modality": "MR",
        "size": VOLUME,
    },
    "masks": {"kind": "segmentation", "labels": ORGANS, "modality": "MR", "size": "[64, 64]", "network": "unet"},
    "masks of volumes": {
        "kind": "segmentation",
        "labels": ORGANS,
        "modality": "MR",
        "size": "[16, 64, 64]",
        "more": "spacing = [5.0, 1.5, 1.5]\n"
        'transforms = [{ name = "CenterSpatialCrop", roi_size = [12, 56, 64] },\n'
        '              { name = "SpatialPad", spatial_size = [16, 64, 64] }]',
        "network": "segresnet",
    },
}
VIEWS: Final = 'views = 4\naugmentation = [{ name = "RandFlip", prob = 1.0, spatial_axis = 1 }]'


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital with chests, retinas and abdomens with masks, as ``ingest`` and ``labels import`` bring them in."""
    folder = tmp_path_factory.mktemp("clinic")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.cpu_count", lambda: 1)
        home = task_site(folder)
        table = write_chest_clinic(folder / "input" / "chests", 8, 64)
        write_eye_clinic(folder / "input" / "eyes", 3, 32)
        write_abdomens(folder / "input" / "abdomens", (1, 2))
        for name in ("chests", "eyes", "abdomens"):
            ingest(home, folder / "input" / name)
    organs = folder / "organs.csv"
    organs.write_text("id,state\nA-1,ill\nA-2,well\n")
    organs.with_suffix(".toml").write_text(
        '[table]\nkey_column = "id"\n[columns.state]\nkind = "category"\nvalues = ["ill", "well"]\n'
    )
    for one, key in ((table, "accession"), (organs, "patient-id")):
        assert main(["--home", str(home), "labels", "import", str(one), "--key", key]) == 0
    return home


@pytest.fixture
def site(clinic: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    shutil.copytree(clinic, tmp_path / "site")
    (tmp_path / "input").mkdir()
    return tmp_path / "site"


def task_file(folder: Path, name: str, **changed: str) -> Path:
    usual = {"kind": "classification", "modality": "CR", "size": "[32, 32]", "more": "", "network": "linear"}
    path = folder / "looked-at.toml"
    path.write_text(FILE.format(**{**usual, "training": "", **TASKS[name], **changed}))
    return path


def previewed(
    capsys: pytest.CaptureFixture[str], home: Path, task: Path, *words: str, status: int = 0
) -> tuple[Any, str]:
    """What the command says as JSON, and the page; "" where none was written."""
    out = task.with_name("sheet.html")
    out.unlink(missing_ok=True)
    said = told(capsys, home, "task", "preview", str(task), "--out", str(out), *words, status=status)
    return said, out.read_text() if out.exists() else ""


def pictures(page: str, strip: str = "the input") -> list[NDArray[np.uint8]]:
    """The pictures of a kind of strip, as they are drawn."""
    found = re.findall(rf"base64,(\S+?)' alt='example \d+, {strip}: ", page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(one)))) for one in found]


def in_a_round(home: Path, task: Task) -> list[tuple[str, NDArray[np.float32], NDArray[Any]]]:
    """What the service would give a round: the patient, the pixels after the transforms, and the target."""
    nobody = cast("Any", None)
    with contextlib.closing(projects.open_vault(SiteDirectory(home))) as vault:
        context = runtime.site_context(SiteDirectory(home), "site-a", nobody, nobody, vault, lambda *_: None)
        cohort = context.examples(example_rule(task))
    return [(one.pseudonym, *as_seen(task, example)) for one in cohort.patients for example in one.examples]


def flat(pixels: NDArray[np.float32], target: NDArray[Any], task: Task) -> list[NDArray[np.float32]]:
    """An input as pictures, by hand: each image, or three slices with the head up."""
    if pixels.ndim == 3:
        colour = task.input.channels == 3 and task.input.example == "image"
        return [pixels.transpose(1, 2, 0)] if colour else list(pixels)
    values, places = pixels[0], [side // 2 for side in pixels.shape[1:]]
    if task.kind == "segmentation":
        places = [int((np.moveaxis(target, axis, 0) > 0).sum(axis=(1, 2)).argmax()) for axis in range(3)]
    return [values[places[0]], values[::-1, places[1]], values[::-1, :, places[2]]]


def drawn(picture: NDArray[np.float32]) -> bytes:
    return np.rint(np.clip(picture, 0, 1) * 255).astype(np.uint8).tobytes()


@pytest.mark.parametrize("name", TASKS)
def test_the_sheet_shows_the_very_pixels_that_a_round_trains_on(
    clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = task_file(tmp_path, name)
    said, page = previewed(capsys, clinic, path, "--count", "48")
    found, task = in_a_round(clinic, read_task(path)), read_task(path)
    assert len(found) == said["shown"] == said["possible"] > 1
    assert said["patients"] == len({person for person, _, _ in found})
    wanted = [flat(pixels, target, task) for _, pixels, target in found]
    assert "Black is 0 or less on every picture, white is 1 or more." in page
    assert Counter(one.tobytes() for one in pictures(page)) == Counter(drawn(p) for one in wanted for p in one)
    outlined = pictures(page, "with the outlines")
    assert len(outlined) == (len(pictures(page)) if task.kind == "segmentation" else 0)


def words_of(page: str) -> list[list[str]]:
    """What is to be learned of each example."""
    cards = re.findall(r"<figure class='card.*?</h3>", page)
    return [[re.sub("<.*?>", "", one) for one in re.findall(r"<span class='word.*?</span>", card)] for card in cards]


def test_labels_are_told_in_words(clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, page = previewed(capsys, clinic, task_file(tmp_path, "own labels"))
    own = {one for (one,) in words_of(page)}
    assert own <= {"none", "edema", "effusion", "cardiomegaly"}
    _, page = previewed(capsys, clinic, task_file(tmp_path, "a number"))
    assert all(re.fullmatch(r"age: \d+ a", one) for (one,) in words_of(page))
    path = task_file(tmp_path, "findings")
    said, page = previewed(capsys, clinic, path)
    names = FINDINGS.strip("[]").replace('"', "").split(", ")
    told_as = {"1.0": "", "0.0": ": no", "nan": ": not known"}
    targets = [
        [f"{n}{told_as[str(v)]}" for n, v in zip(names, t, strict=True)]
        for _, _, t in in_a_round(clinic, read_task(path))
    ]
    assert sorted(words_of(page)) == sorted(targets)
    assert said["shown"] == len(targets)
    _, page = previewed(capsys, clinic, task_file(tmp_path, "masks"), "--count", "24")
    shares = [one for card in words_of(page) for one in card]
    assert "mass: none" in shares
    assert any(re.fullmatch(r"liver \d+\.\d%", one) for one in shares)


def test_letters_say_on_which_side_of_a_picture_the_patients_sides_are(
    clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The spine is at the back, the liver on the right and towards the head: see ``abdomen_volume``."""
    _, page = previewed(capsys, clinic, task_file(tmp_path, "a volume"))
    sides = re.findall(r"<div class='plane'>(.*?)<img.*?<p>(\w+),", page)
    letters = {name: re.findall(r"class='(\w)'>(\w+)<", marks) for marks, name in sides}
    assert letters == {
        "axial": [("t", "A"), ("l", "R"), ("r", "L"), ("b", "P")],
        "coronal": [("t", "H"), ("l", "R"), ("r", "L"), ("b", "F")],
        "sagittal": [("t", "H"), ("l", "A"), ("r", "P"), ("b", "F")],
    }
    axial, coronal, sagittal = pictures(page)[:3]
    rows, columns = (np.flatnonzero((axial > 240).any(axis=axis)).mean() for axis in (1, 0))
    assert (rows > 0.6 * SIDE, abs(columns - SIDE / 2) < 3) == (True, True), "the spine is at the edge of P"
    assert axial[:, : SIDE // 2].mean() > axial[:, SIDE // 2 :].mean(), "the liver is at the edge of R"
    bright = coronal[:, : SIDE // 2].mean(axis=1)
    assert bright[:5].mean() > bright[-5:].mean(), "the liver is at the edge of H"
    assert sagittal[:, SIDE // 2 :].mean() > sagittal[:, : SIDE // 2].mean(), "the spine is at the edge of P"
    _, page = previewed(capsys, clinic, task_file(tmp_path, "own labels"))
    chest = re.findall(r"<div class='plane'>(.*?)<img.*?<p>(.*?)</p>", page)
    assert {marks for marks, _ in chest} == {
        "<span class='t'>H</span><span class='l'>R</span><span class='r'>L</span><span class='b'>F</span>"
    }
    assert {view for _, view in chest} == {"PA"}
    _, page = previewed(capsys, clinic, task_file(tmp_path, "a study"))
    assert re.findall(r"<div class='plane bare'>.*?<p>(.*?)</p>", page)[:3] == [
        "image 1: L",
        "image 2: R",
        "image 3: none",
    ]


def test_random_views_are_beside_the_input_without_letters(
    clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, page = previewed(capsys, clinic, task_file(tmp_path, "own labels", training=VIEWS))
    inputs, views = pictures(page), pictures(page, "view 1")
    assert len(inputs) == len(views) == len(pictures(page, "view 3"))
    assert all(np.array_equal(one[:, ::-1], view) for one, view in zip(inputs, views, strict=True))
    assert page.count("class='l'") == len(inputs), "a mirrored view has no letters"
    assert "A round sees 4 random views of each example" in page
    _, page = previewed(capsys, clinic, task_file(tmp_path, "masks of volumes", training=VIEWS))
    assert len(pictures(page, "view 2")) == len(pictures(page)) > 0


@pytest.mark.parametrize(("least", "patients"), [(1, 4), (2, 1)])
def test_short_series_wait_in_the_preview_as_in_a_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], least: int, patients: int
) -> None:
    with labelled_site(tmp_path) as way:
        first = image(way, "P-3", 6)
        for number in (20, 21):
            way.vault.keep(replace(image(way, "P-3", number), series=first.series, study=first.study))
        rows: dict[tuple[str, str], Any] = {(h.person, h.person): (0,) for h in way.vault.heads()}
        keep_table(way.vault, LabelTable("t", "patient-id", "patient", (LabelColumn("effusion", "binary"),), rows))
    home = tmp_path / "site"
    (home / "ingest.toml").write_text(f"[rules]\nmin_instances_per_series = {least}\n")
    labels = 'table = "t"\ncolumns = ["effusion"]\nclasses = ["no", "yes"]'
    path = task_file(tmp_path, "a column", labels=labels, modality="MR", size="[8, 8]", more="")
    said, page = previewed(capsys, home, path, "--count", "48")
    found = in_a_round(home, read_task(path))
    assert said["patients"] == len({person for person, _, _ in found}) == patients
    assert Counter(one.tobytes() for one in pictures(page)) == Counter(drawn(pixels[0]) for _, pixels, _ in found)
    assert [one["reason"] for one in said["left_out"]] == (["waiting"] if least > 1 else [])


def test_nothing_that_names_a_patient_is_on_the_page_or_in_the_json(
    clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_ingest(SiteDirectory(clinic), MAIN) as way:
        heads = list(way.vault.heads())
    names = {value for h in heads for value in (h.person, h.study, h.series, h.name, h.digest, *h.uids, h.picture)}
    for name in ("own labels", "masks of volumes"):
        said, page = previewed(capsys, clinic, task_file(tmp_path, name))
        assert not [one for one in names - {""} if one in page or one in json.dumps(said)]
        assert "FOR THIS SITE ONLY" in page
        assert "<script" not in page
        words = re.sub(r"base64,[^']*'", "", page)  # a picture may spell anything
        assert "http" not in words.replace("http-equiv", "")
        assert (tmp_path / "sheet.html").stat().st_mode & 0o077 == 0
    assert set(said) == {
        *("task", "digest", "patients", "possible", "shown", "not_shown", "left_out", "seed", "sheet"),
    }  # fmt: skip


def when_rendered(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, while the sheet is drawn."""
    render, acts = task_preview.render, [act]

    def rendered(preview: Any) -> bytes:
        if acts:
            acts.pop()()
        return render(preview)

    monkeypatch.setattr(task_preview, "render", rendered)


def test_who_opts_out_while_the_sheet_is_drawn_is_not_on_it(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = task_file(tmp_path, "own labels")
    whole, before = previewed(capsys, site, path)
    (person, pixels, _), *others = in_a_round(site, read_task(path))
    when_rendered(monkeypatch, lambda: projects.opt_out(SiteDirectory(site), person))
    said, page = previewed(capsys, site, path)
    assert said["shown"] == whole["shown"] - 1 == len(others)
    gone = drawn(pixels[0])
    assert gone in {one.tobytes() for one in pictures(before)}
    assert gone not in {one.tobytes() for one in pictures(page)}


def test_when_all_opt_out_there_is_no_sheet(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = task_file(tmp_path, "a volume")
    persons = {person for person, _, _ in in_a_round(site, read_task(path))}
    when_rendered(monkeypatch, lambda: [projects.opt_out(SiteDirectory(site), one) for one in persons])
    said, page = previewed(capsys, site, path, status=1)
    assert (said["shown"], said["sheet"], page) == (0, None, "")


def test_a_task_that_finds_nothing_writes_nothing_and_says_where_to_look(
    clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = task_file(tmp_path, "own labels", modality="US")
    out = tmp_path / "sheet.html"
    status, said, _ = typed(capsys, clinic, "task", "preview", str(path), "--out", str(out))
    assert (status, out.exists()) == (1, False)
    assert "no sheet was written: `cohort TASK.toml` shows what is left out" in said


def test_a_picture_that_cannot_be_read_is_told_and_left_out_as_in_a_round(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = task_file(tmp_path, "a number")
    with open_ingest(SiteDirectory(site), MAIN) as way:
        head = next(h for h in way.vault.heads() if h.modality == "DX")
        record = image(way, "P-9", 900)
        way.vault.keep(replace(record, modality="DX", payload=b"cut short", pseudonym=head.person, study=head.study))
    out = tmp_path / "out.html"
    status, said, _ = typed(capsys, site, "task", "preview", str(path), "--out", str(out), "--count", "48")
    assert status == 0
    assert f"left out: its file, or that of a mask of it, cannot be read; study {head.study}" in said
    page = out.read_text()
    assert "cannot be read" in page
    assert head.study not in page
    assert len(pictures(page)) == len(in_a_round(site, read_task(path)))


def test_a_picture_that_the_transforms_cannot_take_is_told_with_the_transform(
    clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = in_a_round(clinic, read_task(task_file(tmp_path, "own labels")))
    brightest = sorted(float(pixels.max()) for _, pixels, _ in plain)
    least = (brightest[0] + brightest[1]) / 2
    steps = f'{{ name = "CropForeground", threshold = {least} }}, {{ name = "Resize", spatial_size = [32, 32] }}'
    said, page = previewed(capsys, clinic, task_file(tmp_path, "own labels", more=f"transforms = [{steps}]"))
    assert said["shown"] == len(plain) - 1
    assert [(("CropForeground" in why), count) for why, count in said["not_shown"].items()] == [(True, 1)]
    assert page.count("CropForeground cannot take") + page.count("CropForeground leaves") == 1


@pytest.mark.parametrize("where", ["site", "site/spool", "input", "input/chests", "watched", "link"])
def test_a_sheet_is_not_written_where_the_agent_reads_or_keeps(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    (tmp_path / "input" / "chests").mkdir()
    (tmp_path / "watched").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "site" / "keys")
    (site / "spool").mkdir(exist_ok=True)
    text = (site / "ingest.toml").read_text()
    (site / "ingest.toml").write_text(f'{text}\n[[folder]]\npath = "../watched"\n')
    before = sorted((tmp_path / where).iterdir())
    out = tmp_path / where / "sheet.html"
    status, _, err = typed(capsys, site, "task", "preview", str(task_file(tmp_path, "colour")), "--out", str(out))
    assert status == 1
    assert "sheet.html: this folder is the agent's own, or `ingest` reads it" in " ".join(err.split())
    assert sorted((tmp_path / where).iterdir()) == before


def test_no_file_is_written_over_and_a_full_disk_leaves_none(
    clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = str(task_file(tmp_path, "colour"))
    out = tmp_path / "sheet.html"
    out.write_text("mine")
    status, _, err = typed(capsys, clinic, "task", "preview", task, "--out", str(out))
    assert (status, out.read_text()) == (1, "mine")
    assert "sheet.html: name a new file" in " ".join(err.split())
    out.unlink()
    when_rendered(monkeypatch, lambda: out.write_text("another's"))
    status, _, err = typed(capsys, clinic, "task", "preview", task, "--out", str(out))
    assert (status, out.read_text()) == (1, "another's")
    out.unlink()

    def full(path: Path, body: bytes, _mode: int) -> None:
        path.write_bytes(body[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable_files, "write_new", full)
    status, _, err = typed(capsys, clinic, "task", "preview", task, "--out", str(out))
    assert status == 1
    assert "No space left on device" in err
    assert {path.name for path in tmp_path.iterdir()} == {"looked-at.toml"}


def test_as_many_pictures_are_opened_as_are_asked_for_and_the_seed_says_which(
    clinic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, as_seen_by = [], example_pixels.as_seen
    monkeypatch.setattr(
        example_pixels, "as_seen", lambda *given: opened.append(given[2].person) or as_seen_by(*given)
    )
    path = task_file(tmp_path, "masks")
    said, first = previewed(capsys, clinic, path, "--count", "3")
    assert (said["shown"], said["possible"], len(opened)) == (3, 2 * DEPTH, 3)
    assert len(set(opened[:2])) == 2, "nobody comes twice before everybody came once"
    assert "3 of at most 24 examples of 2 patients, drawn by seed 0." in first
    assert previewed(capsys, clinic, path, "--count", "3")[1] == first
    other = previewed(capsys, clinic, path, "--count", "3", "--seed", "5")[1]
    assert [one.tobytes() for one in pictures(other)] != [one.tobytes() for one in pictures(first)]
    status, _, err = typed(
        capsys, clinic, "task", "preview", str(path), "--out", str(tmp_path / "x"), "--count", "49"
    )
    assert (status, "--count: at most 48" in err) == (1, True)


# -- of a run


@contextlib.contextmanager
def asked_for(site: Path, task: Task, project: str = MAIN, *, looks: bool = False) -> Iterator[RunPlan]:
    """The plan of a run of this task waits for persons."""
    evaluate = EvaluationPlan(looks=1, noise=20.0, held_out=20, bins=4) if looks else None
    features = task.outputs * (64 + 1)
    mechanism = Federated(task, features, 1.8, evaluate)
    plan = RunPlan(
        *("run-1", "federated", mechanism.to_json(), claim_json(mechanism.claim()), 3, "DX", project),
        RoundTerms(600, 4_000_000_000),
    )
    vault = projects.open_vault(SiteDirectory(site))
    vault.change_note(run_plan.NOTE, lambda note: run_plan.with_plan(note, plan))
    vault.close()
    yield plan


def test_the_task_of_a_plan_is_shown_before_persons_decide(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = task_file(tmp_path, "own labels"), tmp_path / "run-1.html"
    said, page = previewed(capsys, site, path)
    words = ("task", "preview", "--run", "run-1", "--out", str(out))
    with asked_for(site, read_task(path), looks=True):
        of_run = told(capsys, site, *words)
        assert {**of_run, "sheet": ""} == {**said, "sheet": ""}
        assert [one.tobytes() for one in pictures(out.read_text())] == [one.tobytes() for one in pictures(page)]
        assert "patients that it does not train on" in out.read_text()
        assert "patients that it does not train on" not in page
        status, _, err = typed(capsys, site, *words[:2], "--run", "run-2", "--out", str(tmp_path / "x.html"))
        assert (status, "those that were: run-1" in err) == (1, True)
        status, _, err = typed(capsys, site, *words, "--project", "other")
        assert (status, "is of the project main" in err) == (1, True)


def test_the_plans_own_project_is_looked_at(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    projects.create(SiteDirectory(site), "empty")
    with asked_for(site, read_task(task_file(tmp_path, "own labels")), "empty"):
        found = told(capsys, site, "task", "preview", "--run", "run-1", "--out", str(tmp_path / "x.html"), status=1)
    assert (found["possible"], found["shown"]) == (0, 0)
