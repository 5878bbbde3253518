"""Looks in a run: turns of their own, figures from noisy sums alone, and an end with the model that looked best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message

from agent.domain import TaskCohort
from agent.dp.noise import SystemEntropy
from agent.errors import ReviewRejectedError
from agent.mechanisms.federated.mechanism import FederatedMasked
from coordinator.federation import run_controller
from coordinator.federation.job import JobError, job_from
from policies.accounting.claims import Evaluated
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.ledger.entries import RoundClosed
from protos.artifacts.arrays import pack_vector
from protos.federation import messages as wire
from protos.secagg import round
from tests.support.coordinator_runs import (
    LOOKS,
    SITES,
    Federation,
    admitting,
    agents,
    conduct_here,
    configuration,
    evaluated_job,
    job,
    secret_configuration,
    secret_job,
    written,
)
from tests.support.small_tasks import classification, masked_config


@pytest.fixture(autouse=True)
def _no_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's strategy is in this process, and the sites too; tests/test_federation_contract.py has them apart."""
    monkeypatch.setattr(run_controller, "conduct", conduct_here)


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    for ward in made.wards.values():
        ward.vault.patients = 60
    yield made
    made.host.stopping.set()
    for feed in made.runs._feeds.values():
        list(feed.follow())
    made.store.close()


def certificate(fed: Federation) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((fed.folder / "releases" / "run-1" / "certificate.json").read_text())
    return read


def sums(fed: Federation, turn: int) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((fed.folder / "runs" / "run-1" / f"round-{turn}.look").read_text())
    return read


# --- the job


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"evaluate": ()}, "the rounds after which the priced looks are made"),
        ({"evaluate": (1,)}, "the last of them 2"),
        ({"evaluate": (2, 1)}, "rising"), ({"evaluate": (0, 2)}, "rising"),
        ({"evaluate": (1, 1, 2)}, "rising"), ({"evaluate": (1, 2, 3)}, "rising"),
        ({"config": written(configuration(2))}, "config: evaluate, which prices"),
        ({"config": written({**configuration(2), "evaluate": {**LOOKS, "looks": 1}})}, "at most the 1 looks"),
        ({"config": written({**configuration(2), "evaluate": {**LOOKS, "noise": 0.0}})}, "evaluate.noise"),
        ({"config": written({**configuration(2), "evaluate": 3})}, "must be an object"),
    ],
)  # fmt: skip
def test_a_job_whose_looks_make_no_sense_is_refused_with_the_key(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        evaluated_job(**changes)


def test_secret_sums_whose_steps_would_show_are_refused_with_the_key() -> None:
    config = {**secret_configuration(2, 3), "evaluate": LOOKS}
    crowd = classification(rounds=2, steps_per_round=1, learning_rate=4.0, public_patients=9_000_000)
    many = masked_config(crowd, value_bound=32.0, scale=24)
    assert secret_job(config=written(config), evaluate=(1, 2)).look_lattice() is not None
    with pytest.raises(JobError, match="public_patients is too large"):
        secret_job(config=written({**many, "evaluate": LOOKS}), evaluate=(1, 2))


def test_a_job_is_written_and_read_and_one_of_before_has_no_looks() -> None:
    made = evaluated_job()
    assert job_from(made.to_json()) == made
    assert made.looks == {2: 1, 4: 2}
    assert (made.turns, job().turns, isinstance(made.claim(), Evaluated)) == (4, 3, True)
    older = {k: v for k, v in json.loads(job().to_json()).items() if k != "evaluate"}
    assert job_from(json.dumps(older)) == job()
    with pytest.raises(JobError, match="numbers of rounds"):
        job_from(json.dumps({**json.loads(made.to_json()), "evaluate": [1, "2"]}))


# --- the run


@agents
def test_a_run_takes_turns_and_its_certificate_shows_what_the_looks_found(fed: Federation) -> None:
    events = list(fed.runs.launch(evaluated_job()))
    assert [(e.round, e.state) for e in events] == [
        (0, "granted"), (1, "sent"), (1, "closed"), (2, "sent"), (2, "closed"), (2, "evaluated"), (3, "sent"),
        (3, "closed"), (4, "sent"), (4, "closed"), (4, "evaluated"), (4, "finished"),
    ]  # fmt: skip
    told = [e.reason for e in events if e.state == "evaluated"]
    assert all(reason.startswith("accuracy ") and " to " in reason for reason in told)
    kinds = [[kind for kind, *_ in ward.asked] for ward in fed.wards.values()]
    assert kinds == [["price", "train", "evaluate", "train", "evaluate"]] * 3
    shown = certificate(fed)["evaluation"]
    assert [look["after_round"] for look in shown["looks"]] == [1, 2]
    assert {"accuracy", "balanced accuracy", "calibration", "patients"} <= shown["looks"][0]["figures"].keys()
    assert shown["chosen"]["after_round"] in (1, 2)
    assert certificate(fed)["claim"]["kind"] == "evaluated"
    assert len(certificate(fed)["updates"]) == 12
    fed.store.close()
    verify(export_file(fed.folder / "hub.db", "lazaret/coordinator", fed.key))
    fed.open()


@agents
def test_the_sums_of_a_look_are_those_of_the_sites_that_were_admitted(fed: Federation) -> None:
    seen: dict[str, np.ndarray] = {}

    def heard(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == wire.EVALUATE and message.metadata.group_id == "1":
            seen[site] = reply.content[wire.PARAMETERS][wire.FLAT].numpy()  # type: ignore[index]
        return [reply]

    fed.grid.twist = heard
    list(fed.runs.launch(evaluated_job()))
    assert sums(fed, 2)["sites"] == list(SITES)
    np.testing.assert_allclose(sums(fed, 2)["sums"], sum(v.astype(np.float64) for v in seen.values()))


@agents
def test_a_run_ends_with_the_model_that_looked_best(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its noisy figure: here the first look is made to say that nearly everybody was right."""
    real = run_controller.RunController._look

    def first_is_better(self: Any, number: int) -> Any:
        look = real(self, number)
        vector = np.zeros(look.layout.size)
        right = 9 + 4 + 2  # a bin of those who were right
        vector[right], vector[9] = (9000.0, 1000.0) if number == 2 else (1000.0, 9000.0)
        return replace(look, vector=vector)

    monkeypatch.setattr(run_controller.RunController, "_look", first_is_better)
    list(fed.runs.launch(evaluated_job()))
    released = (fed.folder / "releases" / "run-1" / "model.safetensors").read_bytes()
    rounds = [(fed.folder / "runs" / "run-1" / f"round-{n}.safetensors").read_bytes() for n in (1, 2, 3, 4)]
    assert rounds[0] == rounds[1] == rounds[3] == released != rounds[2], "a look leaves the model as it is"
    assert certificate(fed)["evaluation"]["chosen"]["after_round"] == 1
    with fed.store.exclusive():
        closed = [line.record.entry for n in (3, 4) if (line := (fed.store.answer(f"round-run-1-{n}") or [None])[0])]
    assert all(isinstance(entry, RoundClosed) for entry in closed)
    assert certificate(fed)["artifact_sha256"] == closed[-1].model.hex() != closed[0].model.hex()  # type: ignore[union-attr]


@agents
def test_a_look_that_is_answered_with_an_update_or_with_other_sums_counts_for_nothing(fed: Federation) -> None:
    def longer(site: str, message: Message, reply: Message) -> list[Message]:
        if site == "north" and message.metadata.message_type == wire.EVALUATE:
            reply.content[wire.PARAMETERS] = ArrayRecord({wire.FLAT: Array(np.zeros(195, np.float32))})
        return [reply]

    fed.grid.twist = longer
    events = list(fed.runs.launch(evaluated_job()))
    assert [(e.round, e.sites, e.reason) for e in events if e.state == "refused"] == [
        (2, ("north",), "schema"), (4, ("north",), "schema")
    ]  # fmt: skip
    assert [e.sites for e in events if e.state == "evaluated"] == [("south", "west")] * 2
    assert sums(fed, 2)["sites"] == ["south", "west"]


@agents
def test_a_training_turn_takes_no_evaluation_and_a_look_no_update(fed: Federation) -> None:
    """The statement says what the artifact is, and the turn says what it must be."""
    controller = run_controller.RunController(fed.runs._context, evaluated_job(), run_controller.EventStream())
    ward = fed.wards["north"]
    one = ward.part.participant
    from tests.support.federated_sites import START, evaluated

    envelope = one.join("run-1", evaluated(2))
    assert fed.intake.reserve_run("run-1", {"north": envelope}, 1)["north"].admitted
    first = one.train("run-1", 1, START)
    assert controller.admit("north", 0, first.envelope, first.artifact) is None
    update = one.train("run-1", 2, START)
    assert controller.admit("north", 1, update.envelope, update.artifact) == "artifact_type"
    looked = one.look("run-1", 3, START)
    assert controller.admit("north", 2, looked.envelope, looked.artifact) == "artifact_type"


@agents
def test_a_coordinator_killed_between_turns_goes_on_with_its_looks(fed: Federation) -> None:
    def before(site: str, message: Message) -> Message:
        if message.metadata.message_type == wire.EVALUATE and message.metadata.group_id == "1":
            assert fed.runs.stop("run-1") == "stopping"
        return message

    fed.grid.before = before
    assert [e.state for e in fed.runs.launch(evaluated_job())][-2:] == ["evaluated", "stopped"]
    fed.grid.before = lambda _, message: message
    fed.restart()
    assert [e.state for e in fed.runs.resume("run-1")][-1] == "finished"
    assert [look["after_round"] for look in certificate(fed)["evaluation"]["looks"]] == [1, 2]


@agents
def test_a_look_for_which_too_few_are_there_waits_and_the_sites_that_answered_read_nobody_again(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_controller, "_PAUSES_S", (0.01, 0.01))
    away = {"south", "west"}

    def silent(site: str, message: Message, reply: Message) -> list[Message]:
        if site in away and message.metadata.message_type == wire.EVALUATE:
            away.discard(site)
            return []
        return [reply]

    fed.grid.twist = silent
    events = list(fed.runs.launch(evaluated_job()))
    assert events[-1].state == "finished"
    assert [(e.state, e.reason) for e in events if e.state == "waiting"] == [("waiting", "too_few_updates")]
    assert [ward.vault.reads for ward in fed.wards.values()] == [4, 4, 4], "two rounds and two looks, none twice"


@agents
def test_a_site_whose_policy_names_no_evaluations_does_not_fit(tmp_path: Path) -> None:
    old = admitting(artifact_types='["image-set", "model", "update", "masked-update"]')
    fed = Federation(tmp_path, policies={"west": old})
    costs, decision = fed.runs.plan(evaluated_job())
    assert {c.site: c.fits for c in costs} == {"north": True, "south": True, "west": False}
    assert "does not admit evaluation" in decision.dropped["west"]
    assert all(c.fits for c in fed.runs.plan(job(rounds=2))[0])
    fed.store.close()


# --- in secret sums


def secret(**changes: Any) -> Any:
    config = {**secret_configuration(2, 3), "evaluate": {**LOOKS, **changes}}
    return secret_job(config=written(config), evaluate=(1, 2))


@agents
def test_a_masked_run_sums_its_looks_under_the_masks(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that comes out is that of the parts that the sites made, and no part of it was ever on the way."""
    parts: list[np.ndarray] = []
    honest = FederatedMasked.run_look

    def watched(self: Any, *rest: Any) -> Any:
        part = honest(self, *rest)
        parts.append(part.steps * 2.0 ** -self.look_ring()[1].scale)
        return part

    monkeypatch.setattr(FederatedMasked, "run_look", watched)
    events = list(fed.runs.launch(secret()))
    assert [(e.round, e.state) for e in events if e.state in ("closed", "evaluated", "finished")] == [
        (1, "closed"), (2, "closed"), (2, "evaluated"), (3, "closed"), (4, "closed"), (4, "evaluated"),
        (4, "finished"),
    ]  # fmt: skip
    np.testing.assert_array_equal(sums(fed, 2)["sums"], sum(parts[:3]))
    np.testing.assert_array_equal(sums(fed, 4)["sums"], sum(parts[3:]))
    traffic = b"".join(fed.grid.traffic)
    lattice = secret().look_lattice()
    for part in parts:
        whole = np.rint(np.ldexp(part, lattice.scale)).astype("<i8")
        assert part.astype("<f4").tobytes() not in traffic
        assert whole.tobytes() not in traffic
    shown = certificate(fed)
    assert shown["claim"]["training"]["kind"] == "distributed-gaussian"
    assert (shown["level"], "at least 2 of the 3 sites" in shown["assumption"]) == ("A*", True)
    assert [look["after_round"] for look in shown["evaluation"]["looks"]] == [1, 2]
    fed.store.close()
    verify(export_file(fed.folder / "hub.db", "lazaret/coordinator", fed.key))
    fed.open()


@agents
def test_a_masked_part_has_its_share_of_the_noise_and_stays_within_the_ring() -> None:
    mechanism = FederatedMasked.from_json(secret(noise=40.0).config)
    size, lattice = mechanism.look_ring()
    looks = [mechanism.run_look(TaskCohort(()), mechanism.initial(), SystemEntropy()).steps for _ in range(150)]
    drawn = np.stack(looks) * 2.0**-lattice.scale
    assert drawn.shape == (150, size)
    assert float(drawn.std()) == pytest.approx(40.0 / np.sqrt(2), rel=0.04)
    assert float(np.abs(drawn).max()) <= lattice.bound
    assert mechanism.claim().share == pytest.approx(40.0 / np.sqrt(2))  # type: ignore[union-attr]


@agents
def test_a_site_takes_no_look_for_a_round_and_no_round_for_a_look(fed: Federation) -> None:
    """What a sum is for is in the session: a site that is told something else shares no mask with the others."""
    north = fed.wards["north"].part
    job = secret()
    part = north.participant
    envelope = part.join("run-1", FederatedMasked.from_json(job.config))
    assert fed.intake.reserve_run("run-1", {"north": envelope}, 1)["north"].admitted
    roster = {site: hospital.public for site, hospital in fed.hospitals.items()}
    start = pack_vector(np.zeros(195, np.float32))

    def begin(purpose: str, number: int) -> None:
        setup = round.RoundSetup(roster, purpose, start).encode()
        north.step("run-1", number, "advertise", setup, job.config.encode())

    with pytest.raises(ReviewRejectedError, match="not covered"):
        begin(round.LOOK, 1)
    begin(job.strategy, 1)
    begin(round.LOOK, 2)
    assert (part.rounds_trained, part.looks) == (1, 1)
    begin(round.LOOK, 3)
    with pytest.raises(ReviewRejectedError, match="not covered"):
        begin(round.LOOK, 4)
