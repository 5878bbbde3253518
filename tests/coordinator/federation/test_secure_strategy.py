"""Secret sums, both ends of the product against each other: what the coordinator may see, and what breaks a round."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import coordinator.cli.main as cli
from agent.domain import LatticePart
from agent.mechanisms.federated.mechanism import FederatedMasked
from agent.storage.site_directory import SiteDirectory
from coordinator.federation import run_controller
from coordinator.storage.directory import create
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from protos.artifacts.arrays import pack_vector, unpack_vector
from protos.common.dsse import key_id
from protos.federation import messages
from protos.secagg import round
from tests.support.coordinator_runs import SITES, Federation, admitting, conduct_here, secret_job
from tests.support.federated_sites import masked
from tests.support.federation_world import Federation as Enrolling
from tests.support.ports import free_port

FOUR = (*SITES, "zulu")


@pytest.fixture(autouse=True)
def trained(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What each site trained, in clear, as a test may look over its shoulder; and the run in this process."""
    seen: list[np.ndarray] = []
    honest = FederatedMasked.run_round

    def watched(self: Any, cohort: Any, start: Any, entropy: Any, *rest: Any) -> LatticePart:
        part = honest(self, cohort, start, entropy, *rest)
        seen.append((part.steps * 2.0**-self.scale).astype(np.float32))
        return part

    monkeypatch.setattr(FederatedMasked, "run_round", watched)
    monkeypatch.setattr(run_controller, "conduct", conduct_here)
    return seen


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.store.close()


def masked_step(message: Message, name: str = "mask") -> bool:
    return message.metadata.message_type == messages.SECURE and message.metadata.group_id.endswith(f"-{name}")


def payload_of(message: Message) -> bytes:
    return message.content[messages.PAYLOAD][messages.DATA].numpy().tobytes()  # type: ignore[index]


def with_payload(message: Message, payload: bytes) -> Message:
    record = ArrayRecord({messages.DATA: Array(np.frombuffer(payload, np.uint8).copy())})
    message.content[messages.PAYLOAD] = record
    return message


def test_the_model_moves_by_the_mean_of_what_the_sites_trained_and_nobody_else_sees_a_part(
    fed: Federation, trained: list[np.ndarray]
) -> None:
    events = list(fed.runs.launch(secret_job()))
    assert [(e.round, e.state) for e in events] == [
        (0, "granted"),
        (1, "sent"),
        (1, "closed"),
        (2, "sent"),
        (2, "closed"),
        (2, "finished"),
    ]
    assert len(trained) == 6
    first = (trained[0].astype(np.float64) + trained[1] + trained[2]) / 3
    assert np.array_equal(fed.model("run-1", 1), first.astype(np.float32))
    second = fed.model("run-1", 1) + (trained[3].astype(np.float64) + trained[4] + trained[5]) / 3
    assert np.allclose(fed.model("run-1", 2), second, atol=1e-6)
    on_disk = b"\n".join(p.read_bytes() for p in fed.folder.rglob("*") if p.is_file() and "hub" not in p.name)
    seen = b"\n".join(fed.grid.traffic) + on_disk + (fed.folder / "hub.db").read_bytes()
    for part in trained:
        lattice = np.rint(part.astype(np.float64) * 2**20)
        for form in (part, lattice.astype(np.int64), lattice.astype(np.int32)):
            assert form.tobytes()[40:72] not in seen
            assert form.tobytes()[-32:] not in seen


def test_the_ledger_and_the_certificate_say_what_is_assumed(fed: Federation) -> None:
    list(fed.runs.launch(secret_job()))
    releases = list(fed.store.state.releases.values())
    assert sorted((r.site, r.round) for r in releases) == [(s, n) for s in SITES for n in (1, 2)]
    assert {(r.mechanism, r.level) for r in releases} == {("federated-masked", "A*")}
    certificate = json.loads((fed.folder / "releases" / "run-1" / "certificate.json").read_text())
    assert certificate["level"] == "A*"
    assert "if the stated number of sites are honest" in certificate["meaning"]
    assert "at least 2 of the 3 sites" in certificate["assumption"]
    assert len(certificate["updates"]) == 6
    fed.store.close()
    verify(export_file(fed.folder / "hub.db", "lazaret/coordinator", fed.key))
    fed.open()


def test_sites_that_name_no_partners_decline_and_a_sum_that_they_were_needed_for_is_none(
    tmp_path: Path, trained: list[np.ndarray]
) -> None:
    fed = Federation(tmp_path, strangers=("west",))
    events = list(fed.runs.launch(secret_job()))
    assert (events[-1].state, events[-1].reason) == ("failed", "not_unmasked")
    assert "west" in events[-1].sites
    assert trained == [], "the others had sealed nothing yet"
    assert fed.store.state.releases == {}
    fed.store.close()


def test_a_site_that_is_gone_before_the_sum_is_left_out_of_it_and_three_of_four_are_enough(
    tmp_path: Path, trained: list[np.ndarray]
) -> None:
    fed = Federation(tmp_path, sites=FOUR)

    def twist(site: str, message: Message, reply: Message) -> list[Message]:
        return [] if site == "zulu" and masked_step(message) and message.metadata.group_id[0] == "0" else [reply]

    fed.grid.twist = twist
    events = list(fed.runs.launch(secret_job(sites=FOUR)))
    assert events[-1].state == "finished"
    assert [e.sites for e in events if e.state == "closed"] == [SITES, FOUR]
    mean = (trained[0].astype(np.float64) + trained[1] + trained[2]) / 3
    assert np.array_equal(fed.model("run-1", 1), mean.astype(np.float32))
    assert {(a.site, a.round) for a in fed.store.state.releases.values()} >= {("zulu", 2)}
    fed.store.close()


@pytest.mark.parametrize("fooled", [("west",), ("north", "south"), SITES])
def test_a_coordinator_that_shows_some_sites_another_model_gets_no_sum(
    fed: Federation, trained: list[np.ndarray], fooled: tuple[str, ...]
) -> None:
    """Pasquini et al. 2022."""
    other = pack_vector(np.full(195, 7, np.float32))

    def lie(site: str, message: Message) -> Message:
        if site in fooled and masked_step(message, "advertise"):
            setup = round.RoundSetup.decode(payload_of(message))
            return with_payload(message, round.RoundSetup(setup.roster, setup.strategy, other).encode())
        return message

    fed.grid.before = lie
    events = list(fed.runs.launch(secret_job()))
    assert (events[-1].state, events[-1].reason) == ("failed", "not_unmasked")
    assert trained == []
    assert not (fed.folder / "runs" / "run-1" / "round-1.safetensors").exists()
    assert not (fed.folder / "releases" / "run-1").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda payload: b"",
        lambda payload: b"\xff" * 8 + payload[8:],
        lambda payload: payload[:-1],
        lambda payload: payload + b"\0",
        lambda payload: round.frame(b"not an envelope", round.unframe(payload)[1]),
        lambda payload: round.frame(round.unframe(payload)[0], b"not a message"),
    ],
    ids=["nothing", "length", "cut", "longer", "envelope", "message"],
)
def test_one_sites_nonsense_in_place_of_its_part_is_that_sites_trouble(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    fed = Federation(tmp_path, sites=FOUR)

    def twist(site: str, message: Message, reply: Message) -> list[Message]:
        if site == "zulu" and masked_step(message):
            with_payload(reply, spoil(payload_of(reply)))
        return [reply]

    fed.grid.twist = twist
    events = list(fed.runs.launch(secret_job(rounds=1, sites=FOUR)))
    assert events[-1].state == "finished"
    assert [e.sites for e in events if e.state == "closed"] == [SITES]
    assert next(e.sites for e in events if e.state == "refused") == ("zulu",)
    fed.store.close()


def test_another_sites_part_in_a_sites_name_is_not_counted(tmp_path: Path) -> None:
    fed = Federation(tmp_path, sites=FOUR)
    kept: list[bytes] = []

    def twist(site: str, message: Message, reply: Message) -> list[Message]:
        if masked_step(message) and site == "west":
            kept.append(payload_of(reply))
        if masked_step(message) and site == "zulu":
            with_payload(reply, kept[-1])
        return [reply]

    fed.grid.twist = twist
    events = list(fed.runs.launch(secret_job(rounds=1, sites=FOUR)))
    refused = {e.sites[0]: e.reason for e in events if e.state == "refused"}
    assert refused == {"zulu": "bad_envelope"}
    assert [e.sites for e in events if e.state == "closed"] == [SITES]
    fed.store.close()


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"note": ConfigRecord({"text": "patient 4711"})},
        {messages.PAYLOAD: ConfigRecord({messages.DATA: b"x"})},
        {messages.PAYLOAD: ArrayRecord({"other": Array(np.zeros(4, np.uint8))})},
        {messages.PAYLOAD: ArrayRecord({messages.DATA: Array(np.zeros(4, np.float32))})},
        {messages.PAYLOAD: ArrayRecord({messages.DATA: Array(np.zeros((2, 2), np.uint8))})},
    ],
    ids=["empty", "text", "no array", "name", "floats", "shape"],
)
def test_a_reply_that_is_not_exactly_some_bytes_is_refused_as_its_schema(
    fed: Federation, records: dict[str, Any]
) -> None:
    def twist(site: str, message: Message, reply: Message) -> list[Message]:
        if site == "west" and masked_step(message, "share"):
            return [Message(RecordDict(records), reply_to=message)]
        return [reply]

    fed.grid.twist = twist
    events = list(fed.runs.launch(secret_job(rounds=1)))
    assert (events[-1].state, events[-1].reason) == ("failed", "not_unmasked")
    assert events[-1].sites == ("west",)
    assert "4711" not in repr(events)


def test_too_few_sites_online_begin_no_sum_and_the_run_waits_for_them(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_controller, "NODE_WAIT_S", 0.0)
    monkeypatch.setattr(run_controller, "_PAUSES_S", (0.1, 0.2))
    west, states = fed.wards["west"], []

    def twist(site: str, message: Message, reply: Message) -> list[Message]:
        if site == "west" and masked_step(message, "reveal"):
            west.online = message.metadata.group_id[0] != "0"
        return [reply]

    fed.grid.twist = twist
    for event in fed.runs.launch(secret_job()):
        states.append(event.state)
        if event.state == "waiting":
            assert event.reason == "too_few_sites_online"
            west.online = True
    assert states[-1] == "finished"
    assert "waiting" in states
    assert [ward.vault.reads for ward in fed.wards.values()] == [2, 2, 2]


def test_a_servers_optimiser_works_on_the_sum_and_weights_do_not(fed: Federation) -> None:
    adam = '{"beta1":0.9,"beta2":0.99,"name":"fedadam","server_lr":0.1,"tau":0.001}'
    events = list(fed.runs.launch(secret_job(strategy=adam)))
    assert events[-1].state == "finished"
    assert (fed.folder / "runs" / "run-1" / "round-2.moments").stat().st_size > 8 * 195
    with pytest.raises(ValueError, match="single updates"):
        secret_job(min_sites=3, strategy='{"name":"trimmed-mean","trim":1}')


def test_a_configuration_may_be_written_with_spaces_and_in_any_order(fed: Federation) -> None:
    """As `round launch` sends it: the job file's own JSON, read and written again."""
    made = secret_job(rounds=1)
    written = json.dumps(dict(reversed(json.loads(made.config).items())))
    assert written != made.config
    assert list(fed.runs.launch(replace(made, config=written)))[-1].state == "finished"


def test_a_stopped_secret_run_goes_on_where_it_was(fed: Federation) -> None:
    def before(site: str, message: Message) -> Message:
        if masked_step(message) and message.metadata.group_id[0] == "0":
            fed.runs.stop("run-1")
        return message

    fed.grid.before = before
    assert list(fed.runs.launch(secret_job()))[-1].state == "stopped"
    assert fed.grants() == ["held"] * 3
    fed.grid.before = lambda _site, message: message
    for ward in fed.wards.values():
        assert ward.crash(), "the agents come back too"
    fed.restart()
    assert list(fed.runs.resume("run-1"))[-1].state == "finished"
    assert [ward.vault.reads for ward in fed.wards.values()] == [2, 2, 2]


def test_the_jobs_of_both_sides_agree_on_who_must_be_honest() -> None:
    with pytest.raises(ValueError, match="min_sites"):
        secret_job(sites=FOUR, min_sites=2)
    with pytest.raises(ValueError, match="secure"):
        replace(secret_job(), secure=False)
    assert masked().claim() == secret_job().claim()


# over Flower: real processes, real TLS


@pytest.mark.slow
def test_three_real_agents_and_a_real_coordinator_make_two_secret_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No site has a patient: each trains on noise alone, as it must, since nobody may learn how few there are."""
    port = free_port()
    folder = tmp_path / "coordinator"
    create(folder, f'listen = "127.0.0.1:{port}"\n', admitting(), dt.datetime.now(dt.UTC))
    with Enrolling(tmp_path) as fed:
        for site in SITES:
            fed.join(site, admitting())
    keys = {site: SiteDirectory(tmp_path / site).sign_key().public_key().public_bytes_raw() for site in SITES}
    for site in SITES:
        partners = [key_id(key) for other, key in keys.items() if other != site]
        with (tmp_path / site / "site.toml").open("a") as toml:
            toml.write(f"partners = {json.dumps(partners)}\nleast_partners = 2\n")
    made = secret_job()
    values = {"mechanism": made.mechanism, "config": json.loads(made.config), "parameters": made.parameters}
    values |= {"sites": list(SITES), "rounds": 2, "min_sites": 3, "secure": True}
    (tmp_path / "job.json").write_text(json.dumps(values))
    with contextlib.ExitStack() as stack:
        stack.enter_context(running("coordinator", folder, "serve"))
        for site in SITES:
            stack.enter_context(running("agent", tmp_path / site, "serve", "--modality", "OT"))
        launch = ["round", "launch", str(tmp_path / "job.json"), "--run", "secret-1", "--json"]
        until = time.monotonic() + 150
        while not answers(port) and time.monotonic() < until:
            time.sleep(0.2)
        assert cli.main(["--home", str(folder), *launch]) == 0, capsys.readouterr()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["sites"] for e in events if e["state"] == "closed"] == [list(SITES)] * 2
    certificate = json.loads((folder / "releases" / "secret-1" / "certificate.json").read_text())
    assert certificate["level"] == "A*"
    assert "at least 2 of the 3 sites" in certificate["assumption"]
    model = unpack_vector((folder / "releases" / "secret-1" / "model.safetensors").read_bytes())
    assert model.shape == (195,)
    assert np.isfinite(model).all()
    assert model.any()
    assert cli.main(["--home", str(folder), "ledger", "export", str(tmp_path / "export")]) == 0
    verify((tmp_path / "export").read_bytes())
    assert cli.main(["--home", str(folder), "ledger", "show", "--json"]) == 0
    shown = capsys.readouterr().out
    assert '"federated-masked"' in shown
    assert '"A*"' in shown


@contextlib.contextmanager
def running(package: str, home: Path, *words: str) -> Iterator[None]:
    """A command of the product as a process of its own, ended gently."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", package, "--home", str(home), *words]
    with (home / "process.out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(port: int) -> bool:
    """Does somebody listen?"""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
