"""One real round of each kind of task, over a vault that the product's own ingest and label import have filled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.cli.main import main
from agent.domain import Example, ExampleRule, TaskCohort, TaskPatient, Update
from agent.dp.noise import SystemEntropy
from agent.federation.participant import Participant
from agent.ingest.context import open_ingest
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.federated.task_training import network_of
from agent.release.maker_process import MakerProcess
from agent.storage.site_directory import MAIN, SiteDirectory
from policies.tasks.evaluation import TRAINED
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import Input, Labels, Loss, Task, Training
from protos.artifacts.arrays import unpack_vector
from tests.support.federated_sites import FederatedSite, granted, part
from tests.support.ingest_site import ingest_site
from tests.support.labelled_site import table
from tests.support.ledger_world import Hospital, policy
from tests.support.nifti_scans import SETTINGS, SHAPE, drawing, put, scan, take_faces_off
from tests.support.segmentations import abdomen, mask
from tests.support.site_world import admission

PATIENTS: Final = 4
ROWS = ("P-0,1,low,mass,61.5", "P-1,0,high,none,5", "P-2,1,low,mass|nodule,44", "P-3,1,low,NA,71")
SEGMENTS = Labels(classes=("liver", "mass"))
SEGRESNET = NetworkSpec("segresnet", {"width": 8, "levels": 2})
TRAINING = Training(public_patients=PATIENTS, rounds=1, steps_per_round=1, learning_rate=0.1)


def task(kind: str, labels: Labels, seen: Input, network: NetworkSpec | None = None, **changes: Any) -> Task:
    training = replace(TRAINING, **changes)
    return Task("small", kind, labels, seen, Loss(), training, network or NetworkSpec("linear"))


def learned(*columns: str, **more: Any) -> Labels:
    return Labels(table="findings", columns=columns, **more)


VOLUME, PICTURE = Input("MR", (8, 16, 16), body_part="ABDOMEN"), Input("MR", (16, 16))
TASKS: dict[str, tuple[Task, int]] = {  # and how many examples each patient has
    "volume": (task("classification", learned("grade", classes=("low", "high")), VOLUME), 1),
    "volume with a spacing": (
        task("classification", learned("grade", classes=("low", "high")), replace(VOLUME, spacing=(2.0, 2.0, 2.0))),
        1,
    ),
    "study": (
        task(
            "classification",
            learned("effusion", classes=("no", "yes")),
            Input("MR", (16, 16), "", 3, example="study"),
        ),
        1,
    ),
    "category of a table": (task("classification", learned("grade", classes=("low", "high")), PICTURE), 5),
    "several findings": (task("multi-label", learned("findings", classes=("mass", "nodule")), PICTURE), 5),
    "binary findings": (task("multi-label", learned("effusion"), PICTURE), 5),
    "number": (task("regression", learned("age", low=(0.0,), high=(100.0,)), PICTURE), 5),
    "mask of an image": (task("segmentation", SEGMENTS, Input("MR", (32, 32)), SEGRESNET), 5),
    "mask of a volume": (task("segmentation", SEGMENTS, Input("MR", (8, 32, 32)), SEGRESNET), 1),
}


@dataclass(frozen=True)
class Round:
    """What one round at the site did."""

    cohort: TaskCohort
    update: NDArray[np.float32]
    account: tuple[int, int]  # held and spent, before the update has left


@contextmanager
def opened(home: Path, folder: Path, run: Any = None) -> Iterator[FederatedSite]:
    """A site in a run, over a copy of a home that was filled."""
    copy = folder / "copy"
    shutil.copytree(home, copy)
    with open_ingest(SiteDirectory(copy), MAIN) as way:
        hospital = Hospital("site-a", policy())
        books = admission(folder / "hub.db", policy(), hospital)
        site = FederatedSite(folder, hospital, books, vault=way.vault, modality="MR")  # type: ignore[arg-type]
        if run is not None:
            part(site).site = replace(part(site).site, run=run)
        yield site


def mechanism(task: Task) -> Federated:
    return Federated(task, network_of(task, {}.__getitem__).parameters, noise_multiplier=8.0)


def one_round(site: FederatedSite, job: Federated) -> Round:
    """Priced, held, trained, signed and let in by the coordinator."""
    granted(site, job)
    seen = list[TaskCohort]()
    find = part(site).site.examples

    def noted(rule: ExampleRule) -> TaskCohort:
        seen.append(find(rule))
        return seen[-1]

    one: Participant = part(site)
    one.site = replace(one.site, examples=noted)
    start = Update(np.zeros(job.parameters, np.float32)) if job.task.network.name == "linear" else job.initial()
    signed = one.train("run-1", 1, start)
    assert site.gateway.submit(f"submit-{signed.release.release}", signed.envelope, signed.artifact).admitted
    return Round(seen[0], unpack_vector(signed.artifact), site.account())


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a site with four patients: five slices of each, two masks of DICOM and two label maps, a table."""
    folder = tmp_path_factory.mktemp("hospital")
    home = ingest_site(folder)
    (home / "ingest.toml").write_text(SETTINGS.partition("[nifti]")[0] + "[site]\nworkers = 1\n")
    for number in range(PATIENTS):
        series = abdomen(f"P-{number}", number + 1)
        drawn = mask(series, kind="LABELMAP" if number % 2 else "BINARY", sop_instance_uid=f"1.7.{number}")
        for place, one in enumerate((*series, drawn)):
            one.save_as(folder / "input" / f"{number}-{place}.dcm", enforce_file_format=True)
    assert main(["--home", str(home), "ingest"]) == 0
    assert main(["--home", str(home), "labels", "import", str(table(folder, *ROWS)), "--key", "patient-id"]) == 0
    return home


@pytest.mark.parametrize("kind", TASKS)
def test_a_site_takes_part_in_a_round_of_each_kind_of_task(hospital: Path, tmp_path: Path, kind: str) -> None:
    task, examples = TASKS[kind]
    with opened(hospital, tmp_path) as site:
        made = one_round(site, mechanism(task))
    known = [p for p in made.cohort.patients if p.examples]
    assert len(known) == PATIENTS - (kind == "several findings"), "P-3 has no findings"
    assert {len(patient.examples) for patient in known} == {examples}
    assert made.account[0] > 0
    assert np.isfinite(made.update).all()
    assert made.update.any()


@pytest.mark.parametrize("kind", ["volume", "study", "mask of an image", "mask of a volume"])
def test_what_leaves_hangs_on_the_pixels_and_targets_of_the_vault(hospital: Path, tmp_path: Path, kind: str) -> None:
    """Noise alone would have passed the test above: under the same noise, other targets make another update."""
    job = mechanism(TASKS[kind][0])
    with opened(hospital, tmp_path) as site:
        whole = one_round(site, job).update
    (tmp_path / "other").mkdir()
    with opened(hospital, tmp_path / "other") as site:
        find = part(site).site.examples

        def otherwise(rule: ExampleRule) -> TaskCohort:
            found = find(rule).patients
            most = 1 if job.task.kind == "classification" else 0  # the other class; nothing is drawn
            changed = [tuple(Example(e.pixels, most - np.minimum(e.target, most)) for e in p.examples) for p in found]
            patients = zip(found, changed, strict=True)
            return TaskCohort(tuple(TaskPatient(patient.pseudonym, given) for patient, given in patients))

        part(site).site = replace(part(site).site, examples=otherwise)
        other = one_round(site, job).update
    constants = job.task.training
    apart = float(np.linalg.norm(whole.astype(np.float64) - other))
    assert 1e-4 < apart <= 2 * constants.learning_rate * constants.clip, "of all patients, each clipped once"


def test_a_round_of_volumes_with_masks_is_trained_in_the_confined_process_too(hospital: Path, tmp_path: Path) -> None:
    job = mechanism(TASKS["mask of a volume"][0])
    with opened(hospital, tmp_path, MakerProcess()) as site:
        part(site).entropy = SystemEntropy()  # over there is no code of tests
        made = one_round(site, job)
    assert made.update.shape == (job.parameters,)
    assert made.update.any()
    assert np.isfinite(made.update).all()


def test_a_site_takes_part_in_a_round_of_nifti_volumes_with_masks(tmp_path: Path) -> None:
    home = ingest_site(tmp_path)
    (home / "ingest.toml").write_text(SETTINGS + "[site]\nworkers = 1\n")
    rows = ["file,patient_id"]
    for number in (1, 2, 3):
        put(tmp_path / "input", f"imagesTr/{number}.nii.gz", scan(number))
        put(tmp_path / "input", f"labelsTr/{number}.nii.gz", drawing() * (number != 3))
        rows.append(f"imagesTr/{number}.nii.gz,MRN-{number}")
    (tmp_path / "input" / "nifti.csv").write_text("\n".join(rows) + "\n")
    assert main(["--home", str(home), "ingest"]) == 0
    job = mechanism(task("segmentation", SEGMENTS, Input("MR", SHAPE[::-1]), SEGRESNET))
    with opened(home, tmp_path) as site:
        assert part(site).site.examples(job.examples(TRAINED)).patients == (), "heads stay withheld"
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "bare").mkdir()
    take_faces_off(home)
    with opened(home, tmp_path / "bare") as site:
        made = one_round(site, job)
    drawn = [bool(patient.examples[0].target.any()) for patient in made.cohort.patients]
    assert sorted(drawn) == [False, True, True]
    assert made.update.any()
