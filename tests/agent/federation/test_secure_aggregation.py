"""A site's part in a secret sum: five steps in order, one training, answers kept, and nothing for strangers."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.errors import ReviewRejectedError
from agent.federation.part_watch import PartView, PartWatch
from agent.federation.tasks import RoundTask, TaskDeclinedError
from agent.mechanisms.federated.mechanism import FederatedMasked
from agent.mechanisms.federated.task_training import example_rule
from agent.service import jobs
from agent.service.job_rules import JobSettings, Surroundings, choose
from agent.service.jobs import Event, Job
from agent.service.round_parts import _standing
from policies.ledger_service import LedgerService
from policies.review.policy import parse
from protos.artifacts.arrays import pack_vector
from protos.secagg import round
from protos.secagg.member import Member
from protos.secagg.messages import SumStep
from protos.secagg.server import Server
from tests.support.coordinator_runs import admitting
from tests.support.federated_sites import NAMES, SECURE_JOB, STRATEGY, FederatedSite, SecureRun, federated, masked
from tests.support.site_world import MemoryVault

START = SECURE_JOB.initial().vector
CONFIG = SECURE_JOB.to_json().encode()


@pytest.fixture
def trial(tmp_path: Path) -> SecureRun:
    made = SecureRun(tmp_path)
    made.granted()
    return made


def own_delta(ward: FederatedSite, start: np.ndarray = START) -> np.ndarray:
    """What the site will put into the sum, drawn beforehand with its own seed."""
    mechanism = ward.part.participant.mechanism
    assert isinstance(mechanism, FederatedMasked)
    twin = type(ward.part.participant.entropy)(ward.seed)  # type: ignore[call-arg]
    from_vault = MemoryVault(seed=ward.vault.seed).examples(example_rule(mechanism.task))
    made = mechanism.run_round(from_vault, replace(mechanism.initial(), vector=start), twin)
    return np.ldexp(made.steps.astype(np.float64), -mechanism.scale)


def test_the_hub_learns_the_sum_of_what_three_sites_trained_and_each_part_is_written_down_as_masked(
    trial: SecureRun,
) -> None:
    expected = sum(own_delta(ward).astype(np.float64) for ward in trial.wards.values())
    hub = trial.play(until=SumStep.REVEAL)
    trial.once(hub, SumStep.REVEAL)
    total = hub.aggregate()
    assert set(total.survivors) == set(NAMES)
    assert np.array_equal(hub.session.params.ring.decode(total.lattice), expected)
    for ward in trial.wards.values():
        assert ward.vault.reads == 1
        sent = ward.part.participant.site.ledger.store.state.sent
        assert [s.round for s in sent.values()] == [1]
    admitted = trial.intake.register.store.state.releases.values()
    assert {(a.site, a.mechanism, a.level) for a in admitted} == {(n, "federated-masked", "A*") for n in NAMES}


def test_a_reply_that_got_lost_is_sent_again_in_every_step_and_nothing_is_made_twice(trial: SecureRun) -> None:
    hub = Server(trial.session())
    for step in SumStep:
        for site, request in hub.requests().items():
            payload = trial.setup() if step is SumStep.ADVERTISE else request
            answer = trial.step(site, step, payload)
            assert trial.step(site, step, payload) == answer
            assert trial.step(site, step, b"something else") == answer, "what was said is said, whatever is asked"
            message = round.unframe(answer)[1] if step is SumStep.MASK else answer
            assert hub.receive(site, message) is None
        hub.advance()
    assert len(hub.aggregate().survivors) == 3
    assert [ward.vault.reads for ward in trial.wards.values()] == [1, 1, 1]


def test_a_run_is_not_closed_at_the_site_between_the_first_step_of_its_last_round_and_the_masked_one(
    trial: SecureRun,
) -> None:
    """The agent asks for verdicts every second, also while the others still advertise their keys."""
    for index in (0, 1):
        hub = Server(trial.session(index))
        for step in SumStep:
            trial.once(hub, step, index)
            over = [ward.part.participant.follow() for ward in trial.wards.values()]
            assert over == [index == 1 and step is SumStep.MASK] * 3
    assert len(hub.aggregate().survivors) == 3
    for ward in trial.wards.values():
        held, spent = ward.account()
        assert held == 0 < spent


def test_a_site_that_waits_for_the_others_of_a_sum_trains_nothing_and_holds_up_no_work_of_its_own(
    trial: SecureRun,
) -> None:
    """The coordinator may be silent after a step, for good: the site's own releases go on."""
    hub, participant = Server(trial.session()), trial.wards["north"].part.participant
    seen: list[tuple[bool, str]] = []

    class Shown(PartWatch):
        def changed(self, part: PartView) -> None:
            seen.append((part.training, _standing(part)[0]))

    participant.watch = Shown()
    for step in SumStep:
        trial.once(hub, step)
        if step < SumStep.MASK:
            state, reason = _standing(participant)
            assert (state, reason) == (jobs.QUEUED, "round 1 of 2: waits for the others of the sum")
            part = Job(1, ("part", "run-1"), "main", (Event(1.0, state, reason),), grant="grant-1", attempts=1)
            made = Job(2, ("release", "ksalsa"), "main", (Event(1.0, jobs.QUEUED),))
            first, _ = choose([part, made], JobSettings(), lambda _: Surroundings(dt.datetime.now(dt.UTC)))
            assert first == made
    assert seen == [(True, jobs.RUNNING)], "while it is computed, and at no other time"
    assert _standing(participant) == (jobs.QUEUED, "waits for round 2 of 2")


def test_a_site_that_names_no_partners_is_in_no_sum(tmp_path: Path) -> None:
    trial = SecureRun(tmp_path, strangers=("south",))
    trial.granted()
    with pytest.raises(ReviewRejectedError, match="partners"):
        trial.step("south", SumStep.ADVERTISE, trial.setup())
    south = trial.wards["south"]
    assert (south.vault.reads, south.part.participant.rounds_trained) == (0, 0)
    trial.step("north", SumStep.ADVERTISE, trial.setup())


def test_a_roster_of_strangers_under_known_names_gets_no_key(trial: SecureRun) -> None:
    """The coordinator plays the other two sites itself, with keys of its own."""
    false = {name: Ed25519PrivateKey.generate().public_key().public_bytes_raw() for name in ("south", "west")}
    setup = round.RoundSetup({"north": trial.roster["north"], **false}, STRATEGY, pack_vector(START)).encode()
    with pytest.raises(ReviewRejectedError, match="masked"):
        trial.step("north", SumStep.ADVERTISE, setup)
    assert trial.wards["north"].vault.reads == 0


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda t: b"",
        lambda t: t.setup()[:-1],
        lambda t: round.RoundSetup({}, STRATEGY, pack_vector(START)).encode(),
        lambda t: round.RoundSetup({"north": t.roster["north"]}, STRATEGY, pack_vector(START)).encode(),
        lambda t: round.RoundSetup(t.roster, STRATEGY, b"not a vector").encode(),
        lambda t: round.RoundSetup({**t.roster, "south": b"short"}, STRATEGY, pack_vector(START)).encode(),
    ],
    ids=["nothing", "cut", "nobody", "alone", "no vector", "no key"],
)
def test_a_beginning_that_is_none_is_refused_before_anything_is_counted(
    trial: SecureRun, spoilt: Callable[[SecureRun], bytes]
) -> None:
    with pytest.raises(ReviewRejectedError, match="masked"):
        trial.step("north", SumStep.ADVERTISE, spoilt(trial))
    assert trial.wards["north"].part.participant.rounds_trained == 0
    trial.step("north", SumStep.ADVERTISE, trial.setup())


def test_steps_out_of_order_of_another_round_or_run_are_refused(trial: SecureRun) -> None:
    north = trial.wards["north"].part
    for step in list(SumStep)[1:]:
        with pytest.raises(ReviewRejectedError, match="out of order"):
            trial.step("north", step, b"")
    trial.step("north", SumStep.ADVERTISE, trial.setup())
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.SHARE, b"", number=2)
    with pytest.raises(ReviewRejectedError, match="unknown step"):
        north.step("run-1", 1, "unmask", b"", CONFIG)
    with pytest.raises(ReviewRejectedError, match="priced"):
        north.step("run-1", 2, "advertise", trial.setup(), masked(rounds=2, learning_rate=1.0).to_json().encode())
    with pytest.raises(ReviewRejectedError, match="covered"):
        north.step("run-2", 2, "advertise", trial.setup(), CONFIG)


def test_a_step_skipped_ends_the_sum_for_the_site(trial: SecureRun) -> None:
    trial.step("north", SumStep.ADVERTISE, trial.setup())
    with pytest.raises(ReviewRejectedError):
        trial.step("north", SumStep.REVEAL, b"")
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.SHARE, b"")
    assert trial.wards["north"].vault.reads == 0


def test_a_round_that_was_begun_is_not_begun_again_with_fresh_keys(trial: SecureRun) -> None:
    """Another mask over the same round would be a second sum, and a second price."""
    north = trial.wards["north"]
    first = trial.step("north", SumStep.ADVERTISE, trial.setup())
    assert north.crash()
    with pytest.raises(ReviewRejectedError, match="round"):
        trial.step("north", SumStep.ADVERTISE, trial.setup())
    assert north.part.participant.rounds_trained == 1
    assert trial.step("north", SumStep.ADVERTISE, trial.setup(), number=2) != first
    with pytest.raises(ReviewRejectedError):
        trial.step("north", SumStep.ADVERTISE, trial.setup(), number=3)


def test_a_member_whose_training_failed_takes_no_further_step_and_does_not_train_again(
    trial: SecureRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = trial.play(until=SumStep.MASK)
    request, north = hub.requests()["north"], trial.wards["north"]

    def broken(self: MemoryVault, *_: object) -> None:
        self.reads += 1
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(MemoryVault, "cohort", broken)
        with pytest.raises(OSError):  # noqa: PT011 - whatever a vault may raise
            trial.step("north", SumStep.MASK, request)
    assert not north.part.participant.round_in_progress
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.MASK, request)
    assert north.vault.reads == 1


def test_a_site_whose_own_review_refuses_its_part_signs_no_roll_and_reveals_no_share(
    trial: SecureRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = trial.play(until=SumStep.MASK)
    requests = hub.requests()
    tight = parse(admitting(max_artifact_bytes=100), "tight")
    north = trial.wards["north"].part.participant
    north.site = replace(north.site, ledger=LedgerService(north.site.ledger.store, lambda _site: tight))
    with pytest.raises(ReviewRejectedError, match="artifact_size"):
        trial.step("north", SumStep.MASK, requests["north"])
    assert not north.round_in_progress
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.AGREE, b"")


def test_whatever_goes_wrong_in_a_step_ends_the_round_and_a_step_of_another_round_does_not(
    trial: SecureRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = trial.play(until=SumStep.SHARE)
    request, north = hub.requests()["north"], trial.wards["north"].part.participant
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.SHARE, request, number=2)
    assert north.round_in_progress

    def broken(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Member, "answer", broken)
        with pytest.raises(MemoryError):
            trial.step("north", SumStep.SHARE, request)
    assert not north.round_in_progress
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.SHARE, request)


def test_a_site_that_was_shown_another_model_is_in_no_sum_with_the_others(trial: SecureRun) -> None:
    """Pasquini et al. 2022: the odd one out would be the difference of two sums."""
    other = START + np.float32(1)
    hub = Server(trial.session())
    for site in NAMES:
        setup = trial.setup(other if site == "west" else START)
        hub.receive(site, trial.step(site, SumStep.ADVERTISE, setup))
    assert hub.dropped.keys() == {"west"}, "its keys are signed under another session"
    forced = Server(trial.session(start=other))
    assert forced.receive("north", trial.step("north", SumStep.ADVERTISE, b"")), (
        "nor do theirs open under the other one"
    )
    assert trial.wards["west"].vault.reads == 0


def test_a_run_in_the_clear_and_one_in_secret_do_not_mix(trial: SecureRun) -> None:
    north = trial.wards["north"].part.participant
    with pytest.raises(ReviewRejectedError, match="no unencrypted updates"):
        north.train("run-1", 1, SECURE_JOB.initial())
    plain = federated(rounds=1)
    with pytest.raises(ReviewRejectedError):
        north.join("run-2", replace(plain, noise_multiplier=0.9))
    trial.wards["north"].part.participant.leave_run()
    north.join("run-3", plain)
    with pytest.raises(ReviewRejectedError, match="priced"):
        trial.wards["north"].part.step("run-3", 1, "advertise", trial.setup(), plain.to_json().encode())


def strange(count: int) -> dict[str, bytes]:
    return {f"zz-{i}": Ed25519PrivateKey.generate().public_key().public_bytes_raw() for i in range(count)}


def test_a_roster_with_more_sites_than_were_priced_is_refused_before_a_round_is_begun(trial: SecureRun) -> None:
    """Else a coordinator's own sites hold enough shares to take the mask off one vector."""
    trial.roster |= strange(7)
    with pytest.raises(ReviewRejectedError, match="more sites than the claim was priced for"):
        trial.step("north", SumStep.ADVERTISE, trial.setup())
    assert trial.wards["north"].part.participant.rounds_trained == 0
    assert trial.wards["north"].vault.reads == 0


def test_more_strangers_in_the_roster_than_may_be_corrupt_are_refused(tmp_path: Path) -> None:
    job = masked(rounds=2, sites=5)
    trial = SecureRun(tmp_path)
    sealed = {name: ward.part.participant.join("run-1", job) for name, ward in trial.wards.items()}
    assert all(v.admitted for v in trial.intake.reserve_run("run-1", sealed, 3).values())
    honest, config = dict(trial.roster), job.to_json().encode()
    for count, refused in ((2, True), (1, False)):  # one stranger is what the quorum allows for
        trial.roster = honest | strange(count)
        part = trial.wards["north"].part
        if refused:
            with pytest.raises(ReviewRejectedError, match="does not know"):
                part.step("run-1", 1, "advertise", trial.setup(), config)
        else:
            assert part.step("run-1", 1, "advertise", trial.setup(), config)


def test_a_fault_of_the_sites_own_work_is_not_taken_for_one_of_the_protocol(
    trial: SecureRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its people would look for the fault at the coordinator; and a fault for a patient's sake has one word."""

    def fails(*_: object) -> None:
        raise ValueError("the images do not have the configured shape")

    request, north = trial.play(until=SumStep.MASK).requests()["north"], trial.wards["north"]
    told: list[str] = []
    north.part.participant.watch.came_to_nothing = lambda _part, _number, why: told.append(why)  # type: ignore[method-assign]
    monkeypatch.setattr(FederatedMasked, "run_round", fails)
    task = RoundTask("run-1", "secure", 0, CONFIG, None, "mask", request)
    with pytest.raises(TaskDeclinedError, match="unavailable"):
        north.handle(task)
    assert told == ["internal fault (ValueError)"]
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.MASK, request)
    assert not north.part.participant.round_in_progress


def test_what_is_wrong_with_the_protocol_is_still_told_as_that(trial: SecureRun) -> None:
    north, told = trial.wards["north"], list[str]()
    north.part.participant.watch.came_to_nothing = lambda _part, _number, why: told.append(why)  # type: ignore[method-assign]
    trial.play(until=SumStep.MASK)
    with pytest.raises(TaskDeclinedError, match="policy"):
        north.handle(RoundTask("run-1", "secure", 0, CONFIG, None, "mask", b"no message"))
    assert told[0].startswith("masked: ")
