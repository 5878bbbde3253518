"""Proposals at the console: the form is the configuration's, the reader the command's, and nothing typed is lost."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from agent.console import proposal_process, proposals
from agent.console.proposal_process import CheckedProposal
from agent.mechanisms.common.linear_codec import save_basis
from agent.service.jobs import ENDED, JobStore
from tests.agent.console.hospital import Client, Hospital, eyes, hospital, in_service, public_basis, serving, words
from tests.support.release_site import vouch_for

KSAME = {"--k": "5", "--l-diversity": "2", "--modality": "OT", "--form": "png", "--spacing-um": "1000"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospital]:
    """A hospital whose IT offers a basis, and vouches for it."""
    with hospital(tmp_path_factory.mktemp("place")) as made:
        offer_basis(made)
        with serving(made):
            yield made


def offer_basis(made: Hospital) -> str:
    raw = save_basis(public_basis())
    (made.home.root / "networks").mkdir(exist_ok=True)
    (made.home.root / "networks" / "basis.safetensors").write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    vouch_for(made, digest)  # type: ignore[arg-type] # it needs the home directory alone
    return digest


def ask(client: Client, path: str, **typed: str) -> tuple[int, str]:
    answer = client.post(path, **{"project": "main", "key": "", **typed})
    return answer.status_code, words(answer)


def numbers(place: Hospital) -> list[int]:
    return [job.number for job in JobStore(place.home.root).all()]


def test_only_who_wants_data_or_runs_the_machine_proposes(place: Hospital) -> None:
    for name in ("rita", "olga", "otto", "dora", "hugo"):
        with place.client(name) as person:
            wanted = 200 if name in ("rita", "olga") else 403
            assert person.get("/jobs/propose").status_code == wanted, name
            assert person.get("/jobs/propose/release-ksame").status_code == wanted
            assert ("Propose a release" in words(person.get("/jobs"))) is (wanted == 200)
            if wanted == 403:
                assert person.post("/jobs/propose/release-ksame", propose="yes").status_code == 403


def test_every_mechanism_and_every_training_has_a_form_with_its_defaults(place: Hospital) -> None:
    with place.client("rita") as rita:
        found = re.findall(r'href="(/jobs/propose/[a-z-]+)"', rita.get("/jobs/propose").text)
        assert len(found) == 20
        assert "/jobs/propose/release-distill-dp" in found
        assert "/jobs/propose/train-codebook" in found
        for path in found:
            assert rita.get(path).status_code == 200, path
        page = rita.get("/jobs/propose/release-ksalsa").text
        assert re.search(r'name="clusters.k" type="text" value="11"', page)
        assert "DICOM modality of the images" in page
        assert '<option value="networks/basis.safetensors">' in page
        assert re.search(r'<option value="random" selected>', page)
        assert rita.get("/jobs/propose/release-send").status_code == 404
        assert rita.get("/jobs/propose/..%2fserve").status_code == 404


def test_the_price_is_shown_before_anything_is_proposed(place: Hospital) -> None:
    with place.client("rita") as rita:
        status, told = ask(rita, "/jobs/propose/release-ksame", **KSAME, **{"--basis": "networks/basis.safetensors"})
        assert status == 200
        assert (
            "1 of the 1 releases without an epsilon that each patient may still be in; 0 of 1 would be left" in told
        )
        assert "compliance and hospital must approve it" in told
        assert numbers(place) == []
        assert [one.name for one in (place.home.root / "jobs").iterdir()] == [], "what was looked at is gone"


def test_all_problems_stand_beside_the_form_and_nothing_typed_is_lost(place: Hospital) -> None:
    typed = {"cohort.modality": "OP", "clusters.k": "many", "clusters.l_diversity": "3", "views.count": "7"}
    typed |= {"networks.generator": "networks/basis.safetensors", "alignment.betas": "0.9", "alignment.rate": "nan"}
    with place.client("rita") as rita:
        answer = rita.post("/jobs/propose/release-ksalsa", project="main", key="", **typed)
        told = words(answer)
        assert answer.status_code == 422
        assert "clusters.k: must be a int" in told
        assert "alignment.betas: must be a list of 2" in told
        assert "networks: the generator needs an encoder" in told
        for value in ("many", "OP", "7", "nan"):
            assert f'value="{value}"' in answer.text
        assert numbers(place) == []


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ({"clusters.kk": "5"}, "clusters.kk: there is no such key"),
        ({"--basis": "networks/gone.safetensors"}, "networks/gone.safetensors is not there any more"),
        ({"--basis": "../../etc/passwd"}, "../../etc/passwd is not there any more"),
        ({"--basis": "job 1/encoder.safetensors"}, "is not there any more"),
        ({"--k": "1"}, "k"),
        ({"--k": "x"}, "argument --k: invalid int value: 'x'"),
        ({"--modality": ""}, "the following arguments are required: --modality"),
        ({"--modality": "--home=/tmp"}, "modality"),
    ],
)
def test_what_cannot_be_is_one_sentence(place: Hospital, typed: dict[str, str], sentence: str) -> None:
    with place.client("rita") as rita:
        given = {**KSAME, "--basis": "networks/basis.safetensors", **typed}
        status, told = ask(rita, "/jobs/propose/release-ksame", propose="yes", **given)
        assert status == 422
        assert sentence in told
        assert numbers(place) == []


def test_a_training_is_checked_by_its_own_words_and_its_folder_is_chosen(place: Hospital) -> None:
    (place.home.root / "networks" / "public-eyes").mkdir()
    with place.client("rita") as rita:
        assert '<option value="networks/public-eyes">' in rita.get("/jobs/propose/train-features").text
        status, told = ask(
            rita, "/jobs/propose/train-features", **{"--pictures": "networks/public-eyes", "--side": "0"}
        )
        assert (status, "argument --side: give a whole number, 1 or more" in told) == (422, True)
        status, told = ask(
            rita, "/jobs/propose/train-features", **{"--pictures": "networks/public-eyes", "--side": "32"}
        )
        assert (status, "It costs no budget" in told) == (200, True)
    (place.home.root / "networks" / "public-eyes").rmdir()


def test_a_proposal_is_a_job_with_files_of_its_own_and_the_same_form_makes_one(tmp_path: Path) -> None:
    with hospital(tmp_path) as made:
        digest = offer_basis(made)
        with serving(made), made.client("rita") as rita:
            page = rita.get("/jobs/propose/release-ksame").text
            key = re.search(r'name="key" value="([0-9a-f]{16})"', page)
            assert key is not None
            typed = {
                **KSAME,
                "--basis": "networks/basis.safetensors",
                "project": "main",
                "key": key[1],
                "propose": "yes",
            }
            wrong = rita.post("/jobs/propose/release-ksame", **{**typed, "priority": "at once"})
            assert (wrong.status_code, "one of high, normal, low" in wrong.text) == (404, True)
            told = rita.told("/jobs/propose/release-ksame", **{**typed, "priority": "high"})
            assert "Proposed as job 1" in told
            assert "waits for approval by compliance and hospital" in told
            assert "1 of the 1 releases without an epsilon" in told
            assert digest in told
            rita.told("/jobs/propose/release-ksame", **typed)
            assert numbers(made) == [1], "the button was pressed twice"
        job = JobStore(made.home.root).read(1)
        assert (job.state, job.history[0].by, job.project) == ("proposed", "rita", "main")
        assert job.priority == "high"
        assert job.words == (
            "release", "ksame", "--basis=in/1-basis.safetensors", "--k=5", "--l-diversity=2", "--modality=OT",
            "--form=png", "--spacing-um=1000", "--project=main",
        )  # fmt: skip
        frozen = JobStore(made.home.root).folder(1) / "in" / "1-basis.safetensors"
        assert not frozen.is_symlink()
        shutil.rmtree(made.home.root / "networks")
        assert hashlib.sha256(frozen.read_bytes()).hexdigest() == digest


def test_a_release_that_would_be_refused_is_not_proposed_and_the_reasons_are_told(tmp_path: Path) -> None:
    with hospital(tmp_path, k_min=7) as made:
        offer_basis(made)
        with serving(made), made.client("rita") as rita:
            given = {**KSAME, "--basis": "networks/basis.safetensors"}
            status, told = ask(rita, "/jobs/propose/release-ksame", propose="yes", **given)
            assert (status, "It would be refused" in told) == (422, True)
            assert "min_k: k = 5 is below the policy's 7" in told
            assert numbers(made) == []


def test_how_large_a_set_would_be_is_told_to_those_who_see_counts(
    place: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a k-anonymous set follows from the number of patients."""
    found = CheckedProposal(findings=(("artifact_size", "up to 123456 bytes"), ("min_k", "k = 5 is below")))
    monkeypatch.setattr(proposals, "check_proposal", lambda *_: found)
    given = {**KSAME, "--basis": "networks/basis.safetensors"}
    for name, sees in (("rita", False), ("olga", True)):
        with place.client(name) as person:
            _, told = ask(person, "/jobs/propose/release-ksame", **given)
            assert ("123456" in told) is sees
            assert "artifact_size" in told
            assert "min_k: k = 5 is below" in told


def test_a_check_that_takes_too_long_or_fails_is_a_sentence_and_nothing_is_proposed(
    place: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**KSAME, "--basis": "networks/basis.safetensors"}
    with place.client("rita") as rita:
        monkeypatch.setattr(proposal_process, "_PATIENCE_S", 0.01)
        status, told = ask(rita, "/jobs/propose/release-ksame", propose="yes", **given)
        assert (status, "was not checked within" in told) == (503, True)
        monkeypatch.undo()
        monkeypatch.setattr(proposal_process, "_MODULE", "agent.no_such_module")
        status, told = ask(rita, "/jobs/propose/release-ksame", propose="yes", **given)
        assert (status, "the process that reads it ended" in told) == (503, True)
        assert "agent.no_such_module" not in told, "no text of a fault is shown"
    assert numbers(place) == []


def test_the_console_imports_no_torch_to_show_forms_and_prices() -> None:
    import subprocess
    import sys

    code = "import sys, agent.console.app\nprint([m for m in ('torch', 'monai', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_training_that_was_proposed_runs_and_its_network_can_be_chosen_by_the_next_proposal(tmp_path: Path) -> None:
    with hospital(tmp_path, patients=1, approvals="[]") as made:
        folder = made.home.root / "networks" / "public-eyes"
        folder.mkdir(parents=True)
        for number, one in enumerate(eyes(6, 5)):
            Image.fromarray(one.photographs[0].pixels).save(folder / f"{number}.png")
        with in_service(made), made.client("rita") as rita:
            typed = {"--pictures": "networks/public-eyes", "--side": "32", "--steps": "2", "--grey": "yes"}
            told = rita.told("/jobs/propose/train-features", project="main", key="", propose="yes", **typed)
            assert "Proposed as job 1" in told
            for _ in range(600):
                if JobStore(made.home.root).read(1).state in ENDED:
                    break
                time.sleep(0.1)
            told = words(rita.get("/jobs/1"))
            assert JobStore(made.home.root).read(1).state == "done", told
            assert "features/features.safetensors" in told
            assert "on 6 images in 2 steps" in told, "of public images its proposer may read what it printed"
            assert (
                '<option value="job 1/features/features.safetensors">'
                in rita.get("/jobs/propose/release-ksalsa").text
            )
