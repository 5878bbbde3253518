"""What the demo leaves: verdicts, a refusal with its reason, sound books, and no byte of a patient's identity."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import pydicom
import pytest
from jsonschema import Draft202012Validator
from PIL import Image

from agent.domain import Selection
from agent.mechanisms.registry import MECHANISMS
from agent.storage.examples import task_cohort
from agent.storage.projects import open_vault
from agent.storage.site_directory import SiteDirectory
from deploy.demo import chests, eyes, heads
from deploy.demo.finished_run import trained_on
from deploy.demo.jobs import federated_job
from deploy.demo.scale import MAIN, NOT_SHOWN
from deploy.demo.scene import RUN, SITES
from deploy.phantoms import digits
from deploy.phantoms.chest import FINDINGS
from policies.accounting.accountant import epsilon
from policies.accounting.claims import training_of
from policies.ledger.export import Export
from policies.statements import claim_json
from policies.tasks.evaluation import HELD_OUT
from protos.artifacts.arrays import unpack_images, unpack_vector
from tests.journeys.conftest import NONET, PATIENTS, ROUNDS, Demo
from tests.support.flower.loopback import LeftLoopback, guarded
from tests.support.leak_scan import Scan, identities
from tests.support.peers import HEAD, need
from tests.support.short_releases import SHORT, short_release

pytestmark = pytest.mark.timeout(3600)  # the first test of each form waits for the whole demo
SCHEMA = json.loads((Path(__file__).parents[2] / "deploy" / "demo" / "summary.schema.json").read_text())


def summary(demo: Demo) -> dict:  # type: ignore[type-arg]
    return json.loads((demo.out / "summary.json").read_text())  # type: ignore[no-any-return]


def shown(demo: Demo) -> set[str]:
    """Which mechanisms the demo should show."""
    if demo.form == "main":
        return set(MAIN)
    return set(MECHANISMS) - NOT_SHOWN.keys() - (set() if heads.there() else {"remodel"})


def test_the_summary_has_one_form_and_names_what_is_left_out(demo: Demo) -> None:
    found = summary(demo)
    assert [error.message for error in Draft202012Validator(SCHEMA).iter_errors(found)] == []
    assert set(SCHEMA["$defs"]["mechanism"]["enum"]) == MECHANISMS.keys()
    assert found["form"] == demo.form
    assert {one["mechanism"] for one in found["left_out"]} == MECHANISMS.keys() - shown(demo)
    admitted = {release["mechanism"] for release in found["releases"] if release["verdict"] == "admitted"}
    assert admitted == shown(demo), "what is not left out is shown, to an admitted release"


@pytest.mark.parametrize("wrong", ["form", "left_out", "releases", "epsilon"])
def test_a_summary_of_another_form_is_noticed(main_demo: Demo, wrong: str) -> None:
    found = summary(main_demo)
    del found[wrong]
    assert not Draft202012Validator(SCHEMA).is_valid(found)
    unexplained = summary(main_demo)
    unexplained["releases"][0] |= {"verdict": "refused", "findings": []}
    assert not Draft202012Validator(SCHEMA).is_valid(unexplained)


def test_the_summary_holds_what_others_rely_on(demo: Demo) -> None:
    found = summary(demo)
    assert found["sites"] == list(SITES)
    for site in SITES:
        counts = found["ingest"][site]
        assert counts["files"] == counts["kept"] + counts["duplicates"] + sum(counts["quarantined"].values())
        assert counts["kept"] >= 2 * PATIENTS
        assert {"too_deep", "burned_in_risk", "conflicting_instance", "not_an_image"} <= counts["quarantined"].keys()
    keys = {"id", "mechanism", "claim", "claim_level", "epsilon", "delta", "k", "verdict", "findings"}
    assert all(keys <= release.keys() for release in found["releases"])
    assert 0 < found["accuracy"]["private"] <= 1
    assert 0 < found["accuracy"]["non_private"] <= 1
    assert found["accuracy"]["public_start"] > 0.5, "the start has seen digits; chance is a tenth"
    assert all(step["seconds"] >= 0 for step in found["steps"])


def test_three_sets_and_every_round_are_admitted_and_the_poor_site_is_refused(demo: Demo) -> None:
    releases = summary(demo)["releases"]
    sets = [r for r in releases if r["mechanism"] == "ksame"]
    assert sorted((r["site"], r["verdict"], r["claim_level"], r["k"]) for r in sets) == [
        (site, "admitted", "B", 5) for site in SITES
    ]
    eyes = [r for r in releases if r["mechanism"] in ("ksalsa", "anonfaces")]
    assert sorted((r["mechanism"], r["site"], r["verdict"], r["claim_level"], r["k"]) for r in eyes) == [
        (mechanism, "site-b", "admitted", "B", 5) for mechanism in ("anonfaces", "ksalsa") if mechanism in shown(demo)
    ]
    assert all(r["epsilon"] is None for r in (*sets, *eyes))
    updates = [r for r in releases if r["mechanism"] == "federated" and r["verdict"] == "admitted"]
    kinds = [*["subsampled-gaussian"] * ROUNDS, "evaluated"]  # the look comes last
    made = [(site, number, kind) for number, kind in enumerate(kinds, 1) for site in ("site-a", "site-b")]
    assert sorted((r["site"], r["round"], r["claim"]["kind"]) for r in updates) == sorted(made)
    assert {r["claim_level"] for r in updates} == {"A"}
    (refused,) = [r for r in releases if r["verdict"] == "refused"]
    assert (refused["site"], refused["mechanism"], refused["findings"]) == ("site-c", "federated", ["budget"])


def test_the_rounds_train_a_network_from_a_public_start_and_pay_for_the_look_at_it(demo: Demo) -> None:
    found, job = summary(demo), federated_job(ROUNDS)
    claim = job.claim()
    order, delta = found["epsilon"]["order"], found["epsilon"]["delta"]
    assert found["network"] == {"name": "small-cnn", "trained": "bias-and-norms", "parameters": job.parameters}
    assert found["epsilon"]["filter"] == found["rounds"][-1]["epsilon"] == epsilon([claim], delta, order)
    assert found["epsilon"]["filter"] > epsilon([training_of(claim)], delta, order), "the look costs something"
    model = unpack_vector((demo.out / "releases" / RUN / "model.safetensors").read_bytes())
    assert model.shape == (job.parameters,)
    assert model.any(), "it is not the start"
    for site in ("site-a", "site-b"):  # each site read the very file that its policy vouches for
        (start,) = (demo.work / site / "weights").iterdir()
        assert job.task.network.public_files == (start.stem,)


def test_the_private_evaluation_is_in_certificate_summary_and_report(demo: Demo) -> None:
    look, page = summary(demo)["evaluation"], (demo.out / "report.html").read_text()
    certificate = json.loads((demo.out / "releases" / RUN / "certificate.json").read_text())
    (certified,) = certificate["evaluation"]["looks"]
    assert certified["after_round"] == look["after_round"] == ROUNDS
    assert certified["figures"]["accuracy"] == {key: look[key] for key in ("value", "low", "high")}
    assert 0 <= look["low"] < look["high"] <= 1
    for told in (
        "Private evaluation",
        f"{100 * look['low']:.1f}",
        f"{100 * look['high']:.1f}",
        "1,458 trained parameters",
    ):
        assert told in page


def test_the_twin_trains_on_the_very_patients_that_the_rounds_trained_on(main_demo: Demo) -> None:
    job = federated_job(ROUNDS)
    for site in ("site-a", "site-b"):
        home = SiteDirectory(main_demo.work / site)
        vault = open_vault(home, "main")
        try:
            held_out = {p.pseudonym for p in task_cohort(vault, job.examples(HELD_OUT)).patients}
            everybody = {p.pseudonym for p in vault.cohort("OT", job.shape).patients}
        finally:
            vault.close()
        trained = {p.pseudonym for p in trained_on(home.root, job).patients}
        assert trained
        assert held_out
        assert not trained & held_out
        assert trained | held_out == everybody


def test_a_set_under_differential_privacy_goes_from_the_cohort_to_a_verdict_at_level_a(demo: Demo) -> None:
    (release,) = [r for r in summary(demo)["releases"] if r["mechanism"] == "privimage"]
    assert (release["site"], release["verdict"], release["claim_level"]) == ("site-a", "admitted", "A")
    kinds = [part["kind"] for part in release["claim"]["parts"]]
    assert kinds == ["gaussian-query", "subsampled-gaussian"]
    statement = json.loads(
        base64.b64decode(json.loads((demo.out / "releases" / release["id"] / "envelope.json").read_text())["payload"])
    )
    declared = statement["predicate"]["epsilon_nano"] / 1e9
    assert 0 < release["epsilon"] == pytest.approx(declared, rel=1e-6), "one number, declared and recomputed"
    images, labels = unpack_images((demo.out / "releases" / release["id"] / "images.tar").read_bytes())
    assert (images.shape, set(labels)) == ((200, 8, 8), {"digit"})


def test_the_books_balance_and_the_poor_site_spent_nothing(demo: Demo) -> None:
    accounts = {a["account"]: a for a in summary(demo)["ledger"]["accounts"]}
    for site in ("site-a", "site-b"):
        assert accounts[f"{site}/rdp"]["spent"] > 0
        assert accounts[f"{site}/rdp"]["held"] == 0
    assert accounts["site-c/rdp"]["held"] == 0
    if demo.form == "main":  # in the full form it took part in secret sums, which its budget does cover
        assert accounts["site-c/rdp"]["spent"] == 0
    no_epsilon = {"ksame": SITES, "ksalsa": ["site-b"], "anonfaces": ["site-b"]}
    no_epsilon |= {"distill": ["site-c"], "remodel": ["site-c"]}
    counts = [sum(site in no_epsilon.get(name, ()) for name in shown(demo)) for site in SITES]
    assert [accounts[f"{site}/k"]["spent"] for site in SITES] == counts


@pytest.mark.slow
def test_a_distilled_set_goes_from_dicom_to_a_verdict_at_level_c_with_its_two_figures(full_demo: Demo) -> None:
    (release,) = [r for r in summary(full_demo)["releases"] if r["mechanism"] == "distill"]
    assert (release["site"], release["verdict"], release["claim_level"]) == ("site-c", "admitted", "C")
    assert (release["claim"]["kind"], release["epsilon"], release["k"]) == ("no-claim", None, None)
    left = full_demo.out / "releases" / release["id"]
    statement = json.loads(base64.b64decode(json.loads((left / "envelope.json").read_text())["payload"]))["predicate"]
    assert 0 < float(statement["reid_rate"]) <= 0.1
    assert 0.9 <= float(statement["vetting_power"]) < 1
    assert (statement["vetted_against"], statement["components"]["teacher"]) == ("private", "private")
    images, labels = unpack_images((left / "images.tar").read_bytes())
    assert images.shape[1:] == (32, 32)
    assert set(labels) <= {"none", *FINDINGS}
    assert (images.astype(float).std(axis=(1, 2)) > 10).all(), "pictures, not blanks"


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "site"), [("distill-dp", "site-b"), ("centroids", "site-a")])
def test_the_other_private_sets_are_of_level_a(full_demo: Demo, mechanism: str, site: str) -> None:
    (release,) = [r for r in summary(full_demo)["releases"] if r["mechanism"] == mechanism]
    assert (release["site"], release["verdict"], release["claim_level"]) == (site, "admitted", "A")
    assert release["epsilon"] > 0
    asked = {"distill-dp": chests.private_claim(), "centroids": eyes.centroids_claim()}
    assert release["claim"] == claim_json(asked[mechanism]), "what a refusal would show"
    left = full_demo.out / "releases" / release["id"]
    statement = json.loads(base64.b64decode(json.loads((left / "envelope.json").read_text())["payload"]))["predicate"]
    assert set(statement["components"].values()) == {"public"}, "noise is nowhere but where the claim says"


@pytest.fixture(scope="session")
def real_head() -> None:
    """What the clinic of heads is made of."""
    need(HEAD)


@pytest.mark.slow
@pytest.mark.usefixtures("real_head")  # asked for before the whole demo runs
def test_heads_with_other_faces_are_of_level_c_and_say_how_often_an_attacker_was_right(full_demo: Demo) -> None:
    (release,) = [r for r in summary(full_demo)["releases"] if r["mechanism"] == "remodel"]
    assert (release["site"], release["verdict"], release["claim_level"]) == ("site-c", "admitted", "C")
    left = full_demo.out / "releases" / release["id"]
    statement = json.loads(base64.b64decode(json.loads((left / "envelope.json").read_text())["payload"]))["predicate"]
    assert 0 < float(statement["reid_rate"]) <= 0.4
    assert 0.9 <= float(statement["vetting_power"]) < 1


@pytest.mark.slow
def test_of_the_secret_sums_every_site_has_a_part_and_the_assumption_is_written_down(full_demo: Demo) -> None:
    parts = [r for r in summary(full_demo)["releases"] if r["mechanism"] == "federated-masked"]
    assert {(r["site"], r["verdict"], r["claim_level"]) for r in parts} == {(s, "admitted", "A*") for s in SITES}
    assert {r["round"] for r in parts} == {1, 2}


@pytest.mark.slow
def test_the_reviewers_sheet_is_a_page_without_a_network_and_stays_at_the_hospital(full_demo: Demo) -> None:
    page = (full_demo.work / "site-c-contact-sheet.html").read_text()
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert "FOR THIS SITE ONLY" in page
    assert not list(full_demo.out.rglob("*contact-sheet*"))


@pytest.mark.parametrize("name", ["ledger.export", *(f"ledger-{site}.export" for site in SITES)])
def test_every_ledger_verifies_and_a_changed_byte_does_not(demo: Demo, name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "policies.audit.verify"]
    assert subprocess.run([*command, str(demo.out / name)], capture_output=True, check=False).returncode == 3
    key = hashlib.sha256(Export.parse((demo.out / name).read_bytes()).public).hexdigest()
    assert (key == summary(demo)["ledger"]["key"]) == (name == "ledger.export")
    command += ["--key", key]
    assert subprocess.run([*command, str(demo.out / name)], capture_output=True, check=False).returncode == 0
    raw = bytearray((demo.out / name).read_bytes())
    raw[len(raw) // 3] ^= 1
    (tmp_path / name).write_bytes(raw)
    assert subprocess.run([*command, str(tmp_path / name)], capture_output=True, check=False).returncode == 1


def test_the_report_is_one_file_without_a_network(demo: Demo) -> None:
    page = (demo.out / "report.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", page)
    assert "<script" not in page
    for word in ("site-a", "site-c", "budget", "data:image/png;base64,"):
        assert word in page


def test_no_released_image_is_a_patients_image(demo: Demo) -> None:
    split = digits.split(len(SITES), PATIENTS, 2)
    real = {image.tobytes() for site in split.sites for image in digits.upsample(site.images)}
    for release in summary(demo)["releases"]:
        if release["mechanism"] == "ksame":
            made, labels = unpack_images((demo.out / "releases" / release["id"] / "images.tar").read_bytes())
            assert len(labels) == PATIENTS // 5
            assert not any(image.tobytes() in real for image in made)


def test_behind_every_picture_of_an_eye_are_k_patients_and_nobody_is_behind_two(demo: Demo) -> None:
    """The site's own record, opened with its own keys, beside what left."""
    home = SiteDirectory(demo.work / "site-b")
    vault = open_vault(home, "main")
    try:
        record = {one["release"]: one["clusters"] for one in vault.note("releases")}
        cohort = {p.pseudonym: p for p in vault.cohort(Selection("OP", (32, 32, 3), fit=True)).patients}
    finally:
        vault.close()
    eyes = {r["id"]: r["k"] for r in summary(demo)["releases"] if r["mechanism"] in ("ksalsa", "anonfaces")}
    assert len(eyes) == len({"ksalsa", "anonfaces"} & shown(demo)) >= 1
    for release, k in eyes.items():
        made = read_images(demo.out / "releases" / release / "images.tar")
        assert len(made) == len(record[release]) >= 1  # AnonFACES leaves out whom a recogniser still finds
        assert all(len(set(cluster)) >= k for cluster in record[release])
        assert all(image.shape == (32, 32, 3) for image in made)
        assert any(np.ptp(image) > 0 for image in made), "pictures, and not one grey"
        real = {np.rint(i.pixels * 255).astype(np.uint8).tobytes() for p in cohort.values() for i in p.images}
        assert not any(image.tobytes() in real for image in made)
    everybody = [p for clusters in record.values() for cluster in clusters for p in cluster]
    assert len(everybody) == len(set(everybody))
    assert {p for release in eyes for cluster in record[release] for p in cluster} <= cohort.keys()


def read_images(path: Path) -> list[np.ndarray]:  # type: ignore[type-arg]
    with tarfile.open(path) as archive:
        names = sorted(name for name in archive.getnames() if name.endswith(".png"))
        return [np.asarray(Image.open(io.BytesIO(archive.extractfile(n).read()))) for n in names]  # type: ignore[union-attr]


def test_nobody_left_this_machine_or_tried_to(demo: Demo) -> None:
    """Telemetry, update checks and installs are off: no Python code of any process reaches past loopback.

    gRPC's own core dials outside Python; it dials the one address in ``site.toml``.
    """
    assert demo.connections.read_text() == "started\n"


def test_an_attempt_to_leave_would_have_been_seen(demo: Demo, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    environment = {**os.environ, "PYTHONPATH": str(NONET), "LAZARET_TEST_CONNECTIONS": str(notes)}
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False).returncode
    assert "192.0.2.1" in notes.read_text()


def test_only_admitted_sets_and_the_runs_model_are_on_the_shelf(demo: Demo) -> None:
    releases = summary(demo)["releases"]
    sets = {r["id"] for r in releases if r["verdict"] == "admitted" and r["round"] == 0}
    runs = {RUN, *(["digits-masked"] if "federated-masked" in shown(demo) else [])}
    assert {path.name for path in (demo.out / "releases").iterdir()} == {*sets, *runs}
    updates = {r["id"] for r in releases if r["verdict"] == "admitted" and r["mechanism"] == "federated"}
    sealed = {path.name for path in (demo.out / "releases" / "digits-1" / "updates").iterdir()}
    assert sealed == {f"{name}.envelope.json" for name in updates}
    certificate = json.loads((demo.out / "releases" / "digits-1" / "certificate.json").read_text())
    assert (certificate["level"], certificate["unit"], certificate["delta"]) == ("A", "patient", 4e-6)
    assert certificate["epsilon"] == pytest.approx(summary(demo)["epsilon"]["filter"], abs=1e-6)


# ---------------------------------------------------------------- the leak scan


@cache
def scan_of(work: Path) -> Scan:
    words, dates = identities(work / "pacs")
    assert len(words) > 1000, "the scan must have something to look for"
    assert len(dates) > 100
    return Scan(words, dates)


@pytest.fixture(scope="module")
def scan(demo: Demo) -> Scan:
    return scan_of(demo.work)


def test_the_scan_sees_what_it_looks_for_however_it_is_packed(demo: Demo, scan: Scan) -> None:
    """A control: the same scan over the hospitals' own files, and over packed copies, must be red."""
    path = next((demo.work / "pacs" / "site-b").rglob("IM*.dcm"))
    some, dataset = path.read_bytes(), pydicom.dcmread(path)
    name = str(dataset.PatientName).encode()
    picture = io.BytesIO()
    hidden = np.frombuffer(name.ljust(64, b"."), np.uint8)[:64].reshape(1, 64)
    Image.fromarray(hidden).save(picture, "PNG")
    padded = b"............................................" + name
    for packed in (
        some,
        b'{"x": "' + base64.b64encode(some) + b'"}',
        base64.b64encode(base64.b64encode(some)),
        padded.hex().encode(),
        picture.getvalue(),
        base64.b64encode(picture.getvalue()),
        json.dumps({"x": str(dataset.PatientName)}).encode(),
        f"born {dataset.PatientBirthDate}.".encode(),
    ):
        assert scan(packed)


def test_no_identity_of_a_patient_is_anywhere_outside_the_hospitals_folders(demo: Demo, scan: Scan) -> None:
    """All of demo-out, all logs, all that the coordinator holds (Flower's database too), the sites' own stores."""
    scanned = 0
    places = [demo.out, demo.work / "coordinator", *(demo.work / site for site in SITES), *demo.work.glob("*.out")]
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            twin = (
                path.parent.name == "projects" and place.name != SITES[0]
            )  # ten megabytes of ciphertext: one will do
            if path.is_file() and not twin:
                scanned += 1
                assert not scan(path.read_bytes()), f"{path.relative_to(demo.work.parent)} holds an identity"
    assert not scan(demo.said.encode())
    assert scanned > 60


def test_no_pixel_of_a_patient_lies_unencrypted_in_a_site(demo: Demo) -> None:
    split = digits.split(len(SITES), PATIENTS, 2)
    rows = [image.astype(np.uint8)[10:14].tobytes() for image in digits.upsample(split.sites[0].images)]
    rows += [(image / 255).astype("<f4")[10:14].tobytes() for image in digits.upsample(split.sites[0].images)]
    rows += [(image.astype("<u2") * 257)[10:14].tobytes() for image in digits.upsample(split.sites[0].images)]
    for name in ("vault.db", "vault.db-wal", "projects/main.db", "projects/main.db-wal"):
        path = demo.work / "site-a" / name
        raw = path.read_bytes() if path.exists() else b""
        assert not any(row in raw for row in rows if len(set(row)) > 3)


# ---------------------------------------------------------------- the same of what only the long form shows


def test_every_mechanism_of_the_long_form_has_a_short_release_to_look_at() -> None:
    """Heads have theirs in ``tests/agent/mechanisms/remodel/test_mechanism.py``, where they are made.

    A hospital's own model has its in ``tests/agent/cli/test_release_model.py``.
    """
    assert {*MAIN, *SHORT, "remodel", *NOT_SHOWN} == MECHANISMS.keys()


@pytest.mark.parametrize("name", SHORT)
def test_what_leaves_by_a_mechanism_of_the_long_form_holds_no_patient_and_nobody_else_is_called(
    main_demo: Demo, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (notes := tmp_path / "connections").touch()
    (folder := tmp_path / "made").mkdir()
    with guarded(notes):
        left = short_release(name, main_demo.work, PATIENTS, folder, monkeypatch)
        assert notes.read_text() == ""
        with pytest.raises(LeftLoopback):  # a control
            socket.create_connection(("192.0.2.1", 80), 1)
    assert "192.0.2.1" in notes.read_text()
    known, pseudonyms = scan_of(main_demo.work), Scan(set(left.names), set())
    assert (
        len(left.names) >= 15
    )  # there is something to look for; of sixty, how many is chance: fewer, once in 50,000
    assert len(left.parts) > 3
    for part in left.parts:
        assert not known(part)
        assert not pseudonyms(part)
    assert pseudonyms(left.parts[0] + min(left.names).encode()), "a control"
    middle = left.patients.shape[1] // 2
    rows = [row for image in left.patients if len(set((row := image[middle - 2 : middle + 2]).tobytes())) > 3]
    assert len(rows) > 30
    forms = [form for row in rows for form in (row.tobytes(), (row / 255).astype("<f4").tobytes())]
    shown = (*left.parts, *(image.tobytes() for image in left.made))
    assert not any(form in one for form in forms for one in shown)


def test_two_successive_releases_without_an_epsilon_share_nobody(
    main_demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AnonFACES after k-SALSA, of one clinic's eyes, and after k-Same, as the long form releases them."""
    left = short_release("anonfaces", main_demo.work, PATIENTS, tmp_path, monkeypatch)
    assert len(left.clusters) == 3
    assert all(clusters and all(len(set(cluster)) >= 5 for cluster in clusters) for clusters in left.clusters)
    everybody = [person for clusters in left.clusters for cluster in clusters for person in cluster]
    assert len(everybody) == len(set(everybody))
