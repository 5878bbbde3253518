"""Before minutes of work, `make try` says what is in its way; what it prints can be typed on any machine."""

from __future__ import annotations

import contextlib
import csv
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pydicom
import pytest

from deploy.demo import __main__ as demo
from deploy.demo import tryout
from deploy.demo.own_policies import SITES, policies
from deploy.demo.processes import DemoError, Interrupted
from deploy.demo.scale import MAIN, Scale
from deploy.demo.scene import Scene
from deploy.demo.tryout import SAMPLES, SENT, SITE, SPARE, Login, Ports, PortTakenError, Tryout
from deploy.phantoms import digits
from policies.review.policy import parse
from tests.support.ports import free_port


@pytest.fixture
def stage(tmp_path: Path) -> Tryout:
    """Nothing runs; the logs say what the consoles say at their start."""
    work = tmp_path / "work"
    for name in ("coordinator", SITE):
        (work / name).mkdir(parents=True)
        (work / f"{name}.out").write_text(f"console: https://127.0.0.1:1, certificate {name[0] * 64}\n")
    (work / "pacs" / SITE).mkdir(parents=True)
    (work / "pacs" / SITE / "labels.csv").write_text("sop_instance_uid,label\n1.2,3\n")
    made = Tryout(Scene(tmp_path, work, Scale(5, 1)), Ports(11112))
    for side in ("hospital", "coordinator"):
        made.logins[side] = [Login(f"{role}-x", role, "a-password") for role in ("hospital", "auditor")]
    return made


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_of_the_three_ports_must_be_free_and_the_sentence_names_others(place: int) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            PortTakenError, match=rf"port {port} of 127.0.0.1 is taken: .* --port \d+ \(make try PORT="
        ):
            Ports(port - place).require_free()


@pytest.mark.parametrize("first", [0, 80, 65_534, 70_000])
def test_ports_that_there_are_not_are_refused(first: int) -> None:
    with pytest.raises(PortTakenError, match="1024 to 65533"):
        Ports(first).require_free()


def test_nothing_is_touched_when_a_port_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        words = ["--serve", "--port", str(taken.getsockname()[1]), "--out", str(tmp_path / "out")]
        assert demo.main([*words, "--work", str(tmp_path / "work")]) == 2
    assert "is taken" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_demo_that_runs_is_not_exclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    with demo._exclusive(work):
        (work / "file").touch()
        assert demo.main(["--out", str(out), "--work", str(work)]) == 2
        assert (work / "file").exists()
    assert f"a demo runs in {work}: end it first" in capsys.readouterr().out.replace("\n", "")
    with demo._exclusive(work):
        assert not (work / "file").exists()


def test_a_folder_that_is_no_demos_is_not_exclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert demo.main(["--out", str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    assert "holds something else" in capsys.readouterr().out
    assert (tmp_path / "file").exists()


def test_the_policy_leaves_releases_for_whoever_tries_and_changes_nothing_else() -> None:
    usual, spare = policies(MAIN), policies(MAIN, {SITE: SPARE})
    for name, text in spare.items():
        before, after = parse(usual[name], name), parse(text, name)
        more = SPARE if name in (SITE, "federation") else 0
        assert after.max_releases_per_patient == before.max_releases_per_patient + more
        assert text.replace(
            f"max_releases_per_patient = {after.max_releases_per_patient} ",
            f"max_releases_per_patient = {before.max_releases_per_patient} ",
        ) == usual[name]  # fmt: skip


def test_new_patients_are_at_no_hospital_and_their_labels_are_listed(stage: Tryout) -> None:
    first = sorted(stage._new_patients().iterdir())
    samples = sorted((stage.scene.work / "samples").iterdir())
    assert (len(first), len(samples)) == (SENT, SAMPLES)
    read = [pydicom.dcmread(path) for path in (*samples, *first)]
    assert len({image.PatientID for image in read}) == SENT + SAMPLES
    with (stage.scene.work / "pacs" / SITE / "labels.csv").open(newline="") as stream:
        listed = {row["sop_instance_uid"]: row["label"] for row in csv.DictReader(stream)}
    assert {image.SOPInstanceUID for image in read} == listed.keys() - {"1.2"}
    assert len({listed[image.SOPInstanceUID] for image in read[SAMPLES:]}) > 1, "labels for two clusters at least"
    theirs = {p.tobytes() for site in stage.scene.split.sites for p in digits.upsample(site.images)}
    assert not any(image.pixel_array.tobytes() in theirs for image in read)
    assert SITES.index(SITE) == 1


def test_without_dcmtk_the_printed_sender_is_one_that_is_installed(
    stage: Tryout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    (line,) = [one for one in stage.instructions() if "new-01.dcm" in one]
    assert " -m pynetdicom storescu -aec LAZARET 127.0.0.1 11112 " in line
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (line,) = [one for one in stage.instructions() if "new-01.dcm" in one]
    assert line.split()[0] == "storescu"


def test_what_is_printed_names_every_login_and_the_keys_of_those_who_sign(stage: Tryout) -> None:
    said = "\n".join(stage.instructions())
    logins = stage.scene.work / "logins"
    for name in ("hospital-x", "auditor-x"):
        assert said.count(f"{logins / name / name}.p12  password a-password\n") == 2
    assert said.count("signs with") == 2
    assert f"signs with {stage.scene.key('hospital-x')}" in said
    assert f"{'c' * 32}  at https://localhost:11114" in said
    assert f"{'s' * 32}  at https://localhost:11113" in said
    assert all(one == one.rstrip() for one in said.splitlines())


def test_a_path_below_the_current_folder_is_printed_as_it_is_typed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tryout._as_typed(tmp_path / ".demo" / "persons") == ".demo/persons"
    assert tryout._as_typed(tmp_path / "a folder") == "'a folder'"
    assert tryout._as_typed(Path("/elsewhere")) == "/elsewhere"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_is_the_usual_end_and_other_signals_are_told_on(
    stage: Tryout, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_self: Tryout) -> None:
        raise Interrupted(128 + number)

    monkeypatch.setattr(Tryout, "prepare", lambda _self, _say: "")
    monkeypatch.setattr(Tryout, "watch", interrupted)
    with contextlib.nullcontext() if number == signal.SIGINT else pytest.raises(Interrupted):
        demo._serve(stage)


def test_who_ends_by_itself_ends_the_demo_with_its_own_words(stage: Tryout) -> None:
    class Ended:
        def poll(self) -> int:
            return 70

    staying: list[Any] = [Ended(), Ended()]
    stage.scene.processes.staying.extend(staying)
    with pytest.raises(DemoError, match=r"coordinator ended by itself:\nconsole: https"):
        stage.watch()
