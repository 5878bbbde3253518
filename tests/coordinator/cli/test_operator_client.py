"""What an operator types, against a coordinator that serves: the operator's certificate, and the sites' port."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

import coordinator.cli.main as cli
from agent.gateway import enrolment
from agent.storage import site_directory
from coordinator.cli import operator_client
from coordinator.errors import CoordinatorConfigError
from coordinator.federation import run_controller, site_checks
from coordinator.federation.events import SignOfLife
from coordinator.federation.run_manager import RunManager
from coordinator.gateway.run_service import Operations
from policies.review.policy import preset
from protos.identity.certificates import same_fingerprint
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.support.coordinator_runs import Grid, Host, conduct_here, job
from tests.support.federated_sites import FederatedSite, evaluated, federated
from tests.support.federation_world import SETTINGS, Federation
from tests.support.ledger_world import Person
from tests.support.ports import free_port
from tests.support.site_world import MemoryVault


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    """A service on a port that is written in its settings, as an operator's command reads it."""
    for module in (run_controller, site_checks):
        monkeypatch.setattr(module, "conduct", conduct_here)
    port = free_port()
    made = Federation(tmp_path)
    with made:
        made.server.stop(0).wait()
        made.store.close()
    toml = tmp_path / "coordinator" / "coordinator.toml"
    toml.write_text(toml.read_text().replace('"127.0.0.1:0"', f'"127.0.0.1:{port}"'))
    with made:
        yield made


def typed(fed: Federation, *words: str) -> int:
    return cli.main(["--home", str(fed.home.root), *words])


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def err(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_a_hospital_is_invited_shown_approved_and_revoked_with_five_commands(
    fed: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invitation, token = tmp_path / "north.invitation", tmp_path / "north.token"
    assert typed(fed, "invite", "north", "--out", str(invitation), "--token-file", str(token)) == 0
    root = out(capsys).partition("root: ")[2].split(" give both")[0]
    assert "token" not in invitation.read_text()
    home = site_directory.create(
        tmp_path / "north", SETTINGS.format(site="north", listen=f"127.0.0.1:{fed.port}"), preset("internal")
    )
    given = enrolment.Given(invitation.read_bytes(), token.read_text(), root)
    now = dt.datetime.now(dt.UTC)
    progress = enrolment.enrol(home, given, enrolment.over_grpc(), now)
    assert progress.state == "waiting"

    assert typed(fed, "enrolments", "--json") == 0
    (pending,) = json.loads(capsys.readouterr().out)
    assert (pending["site"], pending["state"]) == ("north", "waiting")
    assert same_fingerprint(pending["fingerprint"], progress.fingerprint)
    assert typed(fed, "enrolments") == 0
    assert "north" in out(capsys)

    files = []
    for person, sealed in zip(fed.persons, fed.approvals("north", "enrol-1", pending["digest"]), strict=True):
        files.append(tmp_path / f"{person.name}.json")
        files[-1].write_bytes(sealed)
    assert typed(fed, "approve", "north", str(files[0]), "--serial", "enrol-1") == 1, "one person is not two"
    assert "refused" in err(capsys)
    assert typed(fed, "approve", "north", *map(str, files), "--serial", "enrol-1") == 0
    assert enrolment.enrol(home, None, enrolment.over_grpc(), now).state == "enrolled"

    assert typed(fed, "revoke", "north", "--reason", "left") == 1, "it asks first"
    assert "To confirm: --yes" in err(capsys)
    assert typed(fed, "revoke", "north", "--reason", "Dr Müller left", "--yes") == 1
    assert typed(fed, "revoke", "north", "--reason", "left", "--yes") == 0
    assert "north" in fed.store.state.revoked_sites


def test_a_token_is_shown_when_no_file_is_named_and_a_bad_name_is_refused_in_words(
    fed: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(fed, "invite", "north", "--out", str(tmp_path / "i")) == 0
    assert "30 minutes" in out(capsys)
    assert typed(fed, "invite", "No Name", "--out", str(tmp_path / "j")) == 1
    assert "refused" in err(capsys)
    assert not (tmp_path / "j").exists()


def test_a_sites_certificate_is_no_operators(fed: Federation) -> None:
    site = fed.join("north")
    chain = site.gateway()._credentials.channel_credentials()
    with grpc.secure_channel(f"127.0.0.1:{fed.port}", chain) as channel:
        stub = GatewayStub(channel)
        for call in (
            lambda: stub.Invite(gateway_pb2.InviteRequest(site="x"), timeout=120),
            lambda: stub.Revoke(gateway_pb2.RevokeRequest(site="north", reason="left"), timeout=120),
            lambda: stub.Plan(gateway_pb2.LaunchRequest(run="r"), timeout=120),
            lambda: stub.Stop(gateway_pb2.RunRequest(run="r"), timeout=120),
            lambda: list(stub.Launch(gateway_pb2.LaunchRequest(run="r"), timeout=120)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert not fed.store.state.revoked_sites


def written(tmp_path: Path, **changes: Any) -> Path:
    mechanism = federated(rounds=1)
    made = {
        "mechanism": mechanism.name,
        "config": json.loads(mechanism.to_json()),
        "parameters": mechanism.parameters,
        "sites": ["north", "south"],
        "rounds": 1,
        "min_sites": 2,
        **changes,
    }
    path = tmp_path / "job.json"
    path.write_text(json.dumps(made))
    return path


@pytest.fixture
def conducting(fed: Federation) -> dict[str, FederatedSite]:
    """The service conducts runs over wards of two enrolled sites."""
    wards = {
        name: FederatedSite(fed.root, fed.join(name).hospital, fed.intake, vault=MemoryVault(seed=i), seed=i + 1)
        for i, name in enumerate(("north", "south"))
    }
    for name, ward in wards.items():  # the key it enrolled with
        ward.hospital.key = site_directory.SiteDirectory(fed.root / name).sign_key()
        ward.folder = fed.root / "wards"
        ward.folder.mkdir(exist_ok=True)
        ward.start()
    runs = RunManager(fed.root / "runs", Host(Grid(wards)), fed.intake, fed.shelf, fed.service.at.log)  # type: ignore[arg-type]
    fed.service.at = replace(fed.service.at, conducting=Operations(runs, dict))
    return wards


def test_a_run_is_planned_launched_watched_and_stopped_from_the_command_line(
    fed: Federation, conducting: dict[str, FederatedSite], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path))
    size = fed.store.state.size
    assert typed(fed, "round", "plan", path, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["go"], [s["site"] for s in plan["sites"]]) == (True, ["north", "south"])
    assert all(s["fits"] and float(s["epsilon"]) > 0 for s in plan["sites"])
    assert typed(fed, "round", "plan", path) == 0
    assert "can go" in out(capsys)
    assert fed.store.state.size == size, "a plan holds nothing"

    assert typed(fed, "round", "launch", path, "--run", "run-1", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["state"] for line in lines] == ["granted", "sent", "closed", "finished"]
    assert typed(fed, "round", "launch", path, "--run", "run-1") == 0, "again: followed, not begun anew"
    assert "round 1 of 1: closed north, south" in out(capsys)
    assert typed(fed, "round", "watch", "run-1") == 0
    assert "finished" in out(capsys)
    assert typed(fed, "round", "stop", "run-1") == 1
    assert "run-1: finished" in out(capsys)
    assert [ward.vault.reads for ward in conducting.values()] == [1, 1]


def test_a_canary_is_shown_for_each_site_with_bytes_seconds_and_what_failed(
    fed: Federation,
    conducting: dict[str, FederatedSite],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, size = str(written(tmp_path)), 4 * federated().parameters
    signs = {name: SignOfLife(0.0, 0, 0, 7.0, "", down=2.0, up=0.5) for name in conducting}
    at = fed.service.at.conducting
    fed.service.at = replace(fed.service.at, conducting=Operations(at.runs, lambda: signs))  # type: ignore[union-attr]
    held = fed.store.state.size
    assert typed(fed, "round", "check", path, "--canary", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["go"]
    for one in told["sites"]:
        assert (one["down_bytes"], one["down_seconds"], one["down"]) == (size, 2.0, size / 2)
        assert (one["up_bytes"], one["up_seconds"], one["up"]) == (
            size / 2,
            0.5,
            size,
        )  # bfloat16 where none is named
        assert (one["could"], one["aggregated"]) == (True, True)
        assert one["round_seconds"] == pytest.approx(one["seconds"] + 2.5)
    assert typed(fed, "round", "check", path, "--canary") == 0
    said = out(capsys)
    assert "at most 15 minutes" in said
    assert "north 0.00 2.0 0.00" in said
    assert "south: aggregated; no approval needed" in said
    assert "the round went through at every site" in said
    assert fed.store.state.size == held

    conducting["south"].online = False
    assert typed(fed, "round", "check", path, "--canary") == 1
    said = out(capsys)
    assert "south: not aggregated. The hospital's agent was not connected." in said
    assert "did not go through at every site" in said
    assert typed(fed, "round", "check", path, "--canary", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert [(one["site"], one["code"], one["aggregated"]) for one in told["sites"]] == [
        ("north", "", True), ("south", "offline", False),
    ]  # fmt: skip
    assert typed(fed, "round", "check", path, "--json") == 1
    assert not any(one["down_bytes"] for one in json.loads(capsys.readouterr().out)["sites"])


@pytest.mark.parametrize("secure", [False, True])
def test_a_canarys_figures_stand_on_one_line_of_80_columns_for_sites_of_long_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """The largest model, an hour each way; a masked job's output says what it leaves out."""
    monkeypatch.setattr(operator_client.OUT, "_width", 80)
    names = [f"university-hospital-{n}"[-20:] for n in range(2)]
    figures = {"down_bytes": 4 * 10**8, "down_seconds": 3600.0, "up_bytes": 8 * 10**8, "up_seconds": 3599.9}
    sites = [
        gateway_pb2.CheckedSite(site=name, plan="waiting", seconds=86_400.0, could=True, aggregated=True, **figures)
        for name in names
    ]
    sites += [
        gateway_pb2.CheckedSite(site="slow", plan="approved", could=False, wrong=["labels", "disk"], **figures),
        gateway_pb2.CheckedSite(site="gone", code="offline"),
    ]
    operator_client._show_canary(gateway_pb2.CheckReply(sites=sites), False, secure)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in names:
        (figures_of,) = [line for line in lines if line.startswith(f"{name} ")]
        assert figures_of.split() == [name, "381.47", "3600.0", "0.11", "86400", "762.94", "3599.9", "0.21"]
        assert f"{name}: aggregated; persons decide" in lines
    said = " ".join(lines)
    assert "gone: not aggregated. The hospital's agent was not connected." in said
    assert "slow: not aggregated; approved; the label table of the task is not there" in said
    assert ("exchanges no keys" in said) is secure


def test_a_run_with_looks_shows_what_they_found_as_it_goes(
    fed: Federation, conducting: dict[str, FederatedSite], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(evaluated(rounds=1).to_json())
    path = str(written(tmp_path, config=config, evaluate=[1]))
    assert typed(fed, "round", "launch", path, "--run", "run-1", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["round"], line["state"]) for line in lines if line["state"] in ("closed", "evaluated")] == [
        (1, "closed"), (2, "closed"), (2, "evaluated"),
    ]  # fmt: skip
    assert typed(fed, "round", "launch", path, "--run", "run-1") == 0
    assert "round 2 of 2: evaluated north, south (accuracy " in out(capsys)
    board = operator_client._Board(2)
    board.take(gateway_pb2.RoundEvent(round=2, state="evaluated", sites=["north"], reason="accuracy 0.9"))
    assert board.rows[2][1] == "north: accuracy 0.9"
    for wrong in (["1"], [1.5], [True], [0], [1 << 40], [[1]]):
        with pytest.raises(CoordinatorConfigError, match="evaluate: numbers of rounds"):
            operator_client.read_job(written(tmp_path, evaluate=wrong))


def test_a_run_that_cannot_be_is_refused_with_the_reason_and_exit_1(
    fed: Federation, conducting: dict[str, FederatedSite], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dear = json.loads(federated(rounds=40).to_json())
    path = str(written(tmp_path, config=dear, rounds=40))
    assert typed(fed, "round", "plan", path) == 1
    assert "cannot start" in out(capsys)
    assert typed(fed, "round", "launch", path, "--run", "run-1") == 1
    said = out(capsys)
    assert "the forecast refuses it" in said
    assert "north: " in said
    path = str(written(tmp_path, sites=["north", "nobody"], min_sites=1))
    assert typed(fed, "round", "plan", path) == 1
    assert "not enrolled: nobody" in out(capsys)
    assert typed(fed, "round", "launch", str(written(tmp_path, rounds=0)), "--run", "run-2") == 1
    assert "rounds: 1 to" in out(capsys)
    for what in ("watch", "resume"):
        assert typed(fed, "round", what, "run-9") == 1
        assert "no run of that name" in out(capsys)
    assert typed(fed, "round", "stop", "run-9") == 1
    assert "no run of that name" in out(capsys)
    assert fed.store.state.grants == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"mechanism": 1},
        {"sites": "north"},
        {"rounds": "1"},
        {"rounds": True},
        {"secure": 1},
        {"strategy": "fedavg"},
        {"run": "x"},
        {"min_sites": None},
    ],
    ids=str,
)
def test_a_job_file_with_a_wrong_key_names_the_keys(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CoordinatorConfigError, match=r"job.json: the keys are mechanism \(str\)"):
        operator_client.read_job(written(tmp_path, **changes))


TASK = """
[task]
name = "small"
kind = "classification"
[labels]
classes = ["0", "1", "2"]
[input]
modality = "OT"
size = [8, 8]
[training]
rounds = 1
public_patients = 25
[network]
name = "linear"
"""


def test_a_job_names_a_task_file_beside_it_and_a_price_and_the_plan_tells_the_noise(
    fed: Federation, conducting: dict[str, FederatedSite], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(TASK)
    path = str(written(tmp_path, config={"task": "small.toml", "epsilon": 6.0}))
    assert typed(fed, "round", "plan", path, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["noise_multiplier"] > 0
    for site in plan["sites"]:
        assert 0 < float(site["pld_epsilon"]) < float(site["epsilon"]) <= 6.0
    assert typed(fed, "round", "plan", path) == 0
    said = out(capsys)
    assert f"noise multiplier {plan['noise_multiplier']:g}" in said
    assert "by PLD" in said
    assert typed(fed, "round", "launch", path, "--run", "run-1", "--json") == 0
    capsys.readouterr()
    config = json.loads(json.loads((fed.root / "runs" / "run-1" / "job.json").read_text())["config"])
    assert config["noise_multiplier"] == plan["noise_multiplier"]
    assert typed(fed, "round", "launch", path, "--run", "run-1") == 0, "the same job file follows the run"
    assert [ward.vault.reads for ward in conducting.values()] == [1, 1]
    other = str(written(tmp_path, config={"task": "small.toml", "epsilon": 5.0}))
    assert typed(fed, "round", "launch", other, "--run", "run-1") == 1
    assert "exists with another content" in out(capsys)


def test_a_task_file_that_is_wrong_is_refused_with_its_name_and_every_key(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(TASK.replace('"linear"', '"alexnet"').replace("[8, 8]", "[1]"))
    with pytest.raises(CoordinatorConfigError, match=r"small\.toml: input\.size.*small\.toml: network\.name"):
        operator_client.read_job(written(tmp_path, config={"task": "small.toml", "epsilon": 6.0}))
    with pytest.raises(CoordinatorConfigError, match=r"^absent\.toml: No such file"):
        operator_client.read_job(written(tmp_path, config={"task": "absent.toml", "epsilon": 6.0}))
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(CoordinatorConfigError, match=r"^bytes\.toml: not text"):
        operator_client.read_job(written(tmp_path, config={"task": "bytes.toml", "epsilon": 6.0}))


@pytest.mark.parametrize("text", ["", "nothing", "[]", "1", "null", '"x"'])
def test_a_job_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(CoordinatorConfigError, match=r"job.json"):
        operator_client.read_job(tmp_path / "job.json")


def test_a_job_file_says_what_is_left_out(tmp_path: Path) -> None:
    found = operator_client.read_job(written(tmp_path))
    assert (found["strategy"], found["all_or_none"], found["secure"]) == ('{"name": "fedavg"}', False, False)
    assert operator_client.read_job(written(tmp_path, all_or_none=True))["all_or_none"]
    assert job().strategy == '{"name":"fedavg"}'
    assert Person("dpo-1", "compliance").role == "compliance"
