"""A site's part in a secret sum: five steps in order, one training, answers kept, and nothing for strangers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.mechanisms.federated import FederatedMasked
from agent.site import Refused
from coordinator.edges.conductor import InHand
from coordinator.intake import Intake
from policies.policy import parse
from policies.register import Register
from policies.sqlite import open_sqlite
from policies.statement import PAYLOAD_TYPE, Release
from policies.statement import parse as parse_statement
from policies.store import Store
from protos import secret
from protos.artifact import pack_vector
from protos.envelope import open_sealed
from protos.secagg import Member
from protos.secagg_hub import Hub
from protos.secagg_session import Quorum, Session
from protos.secagg_wire import Step
from protos.weights import pack_ring
from tests.support.books import Clock, Hospital
from tests.support.grids import admitting
from tests.support.wards import Vault, Ward, federated, masked

NAMES = ("north", "south", "west")
STRATEGY = '{"name":"fedavg"}'
JOB = masked(rounds=2)
START = JOB.initial().vector
CONFIG = JOB.to_json().encode()


@dataclass
class Trial:
    """Three sites that know each other, a coordinator's books, and a hub that plays by hand."""

    folder: Path
    strangers: tuple[str, ...] = ()  # sites that name no partners
    wards: dict[str, Ward] = field(default_factory=dict)
    hub: Hub | None = None

    def __post_init__(self) -> None:
        hospitals = {name: Hospital(name, admitting()) for name in NAMES}
        store = Store(
            open_sqlite(self.folder / "hub.db"), "lazaret/coordinator", Ed25519PrivateKey.generate(), Clock()
        )
        self.intake = Intake.over(store, parse(admitting(), "federation"))
        self.roster = {name: hospital.public for name, hospital in hospitals.items()}
        for i, (name, hospital) in enumerate(hospitals.items()):
            self.intake.enrol(hospital.enrolment()[1])
            others = tuple(key for other, key in self.roster.items() if other != name)
            partners = () if name in self.strangers else others
            vault = Vault(seed=i)
            self.wards[name] = Ward(self.folder, hospital, self.intake, partners, vault, seed=10 * i + 1)

    def granted(self, job: FederatedMasked = JOB, run: str = "run-1") -> None:
        sealed = {name: ward.part.participant.join(run, job) for name, ward in self.wards.items()}
        assert all(v.admitted for v in self.intake.reserve_run(run, sealed, 3).values())

    def session(self, index: int = 0, start: np.ndarray = START, run: str = "run-1") -> Session:
        quorum = Quorum.smallest(3, secret.CORRUPT, JOB.honest)
        return secret.session(secret.Terms(run, index, CONFIG, STRATEGY), start, self.roster, quorum)

    def setup(self, start: np.ndarray = START) -> bytes:
        return secret.Setup(self.roster, STRATEGY, pack_vector(start)).encode()

    def step(self, site: str, step: Step, payload: bytes, number: int = 1) -> bytes:
        return self.wards[site].part.step("run-1", number, step.name.lower(), payload, CONFIG)

    def play(self, until: Step, index: int = 0) -> Hub:
        """Honestly up to, and not into, ``until``; each masked vector is admitted at the coordinator."""
        hub = Hub(self.session(index))
        for step in Step:
            if step is until:
                break
            self.once(hub, step, index)
        return hub

    def once(self, hub: Hub, step: Step, index: int = 0) -> None:
        for site, request in hub.requests().items():
            payload = self.setup() if step is Step.ADVERTISE else request
            answer = self.step(site, step, payload, index + 1)
            if step is Step.MASK:
                envelope, answer = secret.unframe(answer)
                self.admit(site, envelope, pack_ring(secret.masked_vector(hub.session, answer)))
            assert hub.receive(site, answer) is None
        hub.advance()

    def admit(self, site: str, envelope: bytes, artifact: bytes) -> Release:
        raw = open_sealed(envelope, PAYLOAD_TYPE, {site: self.roster[site]}).payload
        release = parse_statement(raw)
        assert isinstance(release, Release)
        in_hand = InHand(artifact, JOB.parameters, masked=True)
        key = f"submit-{release.release}"
        assert self.intake.admit(site, key, envelope, release, in_hand).admitted
        return release


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    made = Trial(tmp_path)
    made.granted()
    return made


def own_delta(ward: Ward, start: np.ndarray = START) -> np.ndarray:
    """What the site will put into the sum, drawn beforehand with its own seed."""
    mechanism = ward.part.participant.mechanism
    assert isinstance(mechanism, FederatedMasked)
    twin = type(ward.part.participant.entropy)(ward.seed)  # type: ignore[call-arg]
    from_vault = Vault(seed=ward.vault.seed).cohort("OT", mechanism.shape)
    return np.asarray(mechanism.run_round(from_vault, replace(mechanism.initial(), vector=start), twin).vector)


def test_the_hub_learns_the_sum_of_what_three_sites_trained_and_each_part_is_written_down_as_masked(
    trial: Trial,
) -> None:
    expected = sum(own_delta(ward).astype(np.float64) for ward in trial.wards.values())
    hub = trial.play(until=Step.REVEAL)
    trial.once(hub, Step.REVEAL)
    total = hub.aggregate()
    assert set(total.survivors) == set(NAMES)
    assert np.array_equal(hub.session.params.ring.decode(total.lattice), expected)
    for ward in trial.wards.values():
        assert ward.vault.reads == 1
        sent = ward.part.participant.site.books.store.state.sent
        assert [s.round for s in sent.values()] == [1]
    admitted = trial.intake.register.store.state.releases.values()
    assert {(a.site, a.mechanism, a.level) for a in admitted} == {(n, "federated-masked", "A*") for n in NAMES}


def test_a_reply_that_got_lost_is_sent_again_in_every_step_and_nothing_is_made_twice(trial: Trial) -> None:
    hub = Hub(trial.session())
    for step in Step:
        for site, request in hub.requests().items():
            payload = trial.setup() if step is Step.ADVERTISE else request
            answer = trial.step(site, step, payload)
            assert trial.step(site, step, payload) == answer
            assert trial.step(site, step, b"something else") == answer, "what was said is said, whatever is asked"
            message = secret.unframe(answer)[1] if step is Step.MASK else answer
            assert hub.receive(site, message) is None
        hub.advance()
    assert len(hub.aggregate().survivors) == 3
    assert [ward.vault.reads for ward in trial.wards.values()] == [1, 1, 1]


def test_a_run_is_not_closed_at_the_site_between_the_first_step_of_its_last_round_and_the_masked_one(
    trial: Trial,
) -> None:
    """The agent asks for verdicts every second, also while the others still advertise their keys."""
    for index in (0, 1):
        hub = Hub(trial.session(index))
        for step in Step:
            trial.once(hub, step, index)
            over = [ward.part.participant.follow() for ward in trial.wards.values()]
            assert over == [index == 1 and step is Step.MASK] * 3
    assert len(hub.aggregate().survivors) == 3
    for ward in trial.wards.values():
        held, spent = ward.account()
        assert held == 0 < spent


def test_a_site_that_names_no_partners_is_in_no_sum(tmp_path: Path) -> None:
    trial = Trial(tmp_path, strangers=("south",))
    trial.granted()
    with pytest.raises(Refused, match="partners"):
        trial.step("south", Step.ADVERTISE, trial.setup())
    south = trial.wards["south"]
    assert (south.vault.reads, south.part.participant.rounds_trained) == (0, 0)
    trial.step("north", Step.ADVERTISE, trial.setup())


def test_a_roster_of_strangers_under_known_names_gets_no_key(trial: Trial) -> None:
    """The coordinator plays the other two sites itself, with keys of its own."""
    false = {name: Ed25519PrivateKey.generate().public_key().public_bytes_raw() for name in ("south", "west")}
    setup = secret.Setup({"north": trial.roster["north"], **false}, STRATEGY, pack_vector(START)).encode()
    with pytest.raises(Refused, match="masked"):
        trial.step("north", Step.ADVERTISE, setup)
    assert trial.wards["north"].vault.reads == 0


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda t: b"",
        lambda t: t.setup()[:-1],
        lambda t: secret.Setup({}, STRATEGY, pack_vector(START)).encode(),
        lambda t: secret.Setup({"north": t.roster["north"]}, STRATEGY, pack_vector(START)).encode(),
        lambda t: secret.Setup(t.roster, STRATEGY, b"not a vector").encode(),
        lambda t: secret.Setup({**t.roster, "south": b"short"}, STRATEGY, pack_vector(START)).encode(),
    ],
    ids=["nothing", "cut", "nobody", "alone", "no vector", "no key"],
)
def test_a_beginning_that_is_none_is_refused_before_anything_is_counted(
    trial: Trial, spoilt: Callable[[Trial], bytes]
) -> None:
    with pytest.raises(Refused, match="masked"):
        trial.step("north", Step.ADVERTISE, spoilt(trial))
    assert trial.wards["north"].part.participant.rounds_trained == 0
    trial.step("north", Step.ADVERTISE, trial.setup())


def test_steps_out_of_order_of_another_round_or_run_are_refused(trial: Trial) -> None:
    north = trial.wards["north"].part
    for step in list(Step)[1:]:
        with pytest.raises(Refused, match="out of order"):
            trial.step("north", step, b"")
    trial.step("north", Step.ADVERTISE, trial.setup())
    with pytest.raises(Refused, match="out of order"):
        trial.step("north", Step.SHARE, b"", number=2)
    with pytest.raises(Refused, match="no such step"):
        north.step("run-1", 1, "unmask", b"", CONFIG)
    with pytest.raises(Refused, match="priced"):
        north.step("run-1", 2, "advertise", trial.setup(), masked(rounds=2, learning_rate=1.0).to_json().encode())
    with pytest.raises(Refused, match="covered"):
        north.step("run-2", 2, "advertise", trial.setup(), CONFIG)


def test_a_step_skipped_ends_the_sum_for_the_site(trial: Trial) -> None:
    trial.step("north", Step.ADVERTISE, trial.setup())
    with pytest.raises(Refused):
        trial.step("north", Step.REVEAL, b"")
    with pytest.raises(Refused, match="out of order"):
        trial.step("north", Step.SHARE, b"")
    assert trial.wards["north"].vault.reads == 0


def test_a_round_that_was_begun_is_not_begun_again_with_fresh_keys(trial: Trial) -> None:
    """Another mask over the same round would be a second sum, and a second price."""
    north = trial.wards["north"]
    first = trial.step("north", Step.ADVERTISE, trial.setup())
    assert north.crash()
    with pytest.raises(Refused, match="round"):
        trial.step("north", Step.ADVERTISE, trial.setup())
    assert north.part.participant.rounds_trained == 1
    assert trial.step("north", Step.ADVERTISE, trial.setup(), number=2) != first
    with pytest.raises(Refused):
        trial.step("north", Step.ADVERTISE, trial.setup(), number=3)


def test_a_member_whose_training_failed_takes_no_further_step_and_does_not_train_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = trial.play(until=Step.MASK)
    request, north = hub.requests()["north"], trial.wards["north"]

    def broken(self: Vault, *_: object) -> None:
        self.reads += 1
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(Vault, "cohort", broken)
        with pytest.raises(OSError):  # noqa: PT011 - whatever a vault may raise
            trial.step("north", Step.MASK, request)
    assert not north.part.participant.under_way
    with pytest.raises(Refused, match="out of order"):
        trial.step("north", Step.MASK, request)
    assert north.vault.reads == 1


def test_a_site_whose_own_review_refuses_its_part_signs_no_roll_and_reveals_no_share(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = trial.play(until=Step.MASK)
    requests = hub.requests()
    tight = parse(admitting(max_artifact_bytes=100), "tight")
    north = trial.wards["north"].part.participant
    north.site = replace(north.site, books=Register(north.site.books.store, lambda _site: tight))
    with pytest.raises(Refused, match="artifact_size"):
        trial.step("north", Step.MASK, requests["north"])
    assert not north.under_way
    with pytest.raises(Refused, match="out of order"):
        trial.step("north", Step.AGREE, b"")


def test_whatever_goes_wrong_in_a_step_ends_the_round_and_a_step_of_another_round_does_not(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = trial.play(until=Step.SHARE)
    request, north = hub.requests()["north"], trial.wards["north"].part.participant
    with pytest.raises(Refused, match="out of order"):
        trial.step("north", Step.SHARE, request, number=2)
    assert north.under_way

    def broken(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Member, "answer", broken)
        with pytest.raises(MemoryError):
            trial.step("north", Step.SHARE, request)
    assert not north.under_way
    with pytest.raises(Refused, match="out of order"):
        trial.step("north", Step.SHARE, request)


def test_a_site_that_was_shown_another_model_is_in_no_sum_with_the_others(trial: Trial) -> None:
    """Pasquini et al. 2022: the odd one out would be the difference of two sums."""
    other = START + np.float32(1)
    hub = Hub(trial.session())
    for site in NAMES:
        setup = trial.setup(other if site == "west" else START)
        hub.receive(site, trial.step(site, Step.ADVERTISE, setup))
    assert hub.dropped.keys() == {"west"}, "its keys are signed under another session"
    forced = Hub(trial.session(start=other))
    assert forced.receive("north", trial.step("north", Step.ADVERTISE, b"")), "nor do theirs open under the other one"
    assert trial.wards["west"].vault.reads == 0


def test_a_run_in_the_clear_and_one_in_secret_do_not_mix(trial: Trial) -> None:
    north = trial.wards["north"].part.participant
    with pytest.raises(Refused, match="in the clear"):
        north.train("run-1", 1, JOB.initial())
    plain = federated(rounds=1)
    with pytest.raises(Refused):
        north.join("run-2", replace(plain, noise_multiplier=0.9))
    trial.wards["north"].part.participant.part()
    north.join("run-3", plain)
    with pytest.raises(Refused, match="priced"):
        trial.wards["north"].part.step("run-3", 1, "advertise", trial.setup(), plain.to_json().encode())


def strange(count: int) -> dict[str, bytes]:
    return {f"zz-{i}": Ed25519PrivateKey.generate().public_key().public_bytes_raw() for i in range(count)}


def test_a_roster_with_more_sites_than_were_priced_is_refused_before_a_round_is_begun(trial: Trial) -> None:
    """Else a coordinator's own sites hold enough shares to take the mask off one vector."""
    trial.roster |= strange(7)
    with pytest.raises(Refused, match="more sites than the claim was priced for"):
        trial.step("north", Step.ADVERTISE, trial.setup())
    assert trial.wards["north"].part.participant.rounds_trained == 0
    assert trial.wards["north"].vault.reads == 0


def test_more_strangers_in_the_roster_than_may_be_corrupt_are_refused(tmp_path: Path) -> None:
    job = masked(rounds=2, sites=5)
    trial = Trial(tmp_path)
    sealed = {name: ward.part.participant.join("run-1", job) for name, ward in trial.wards.items()}
    assert all(v.admitted for v in trial.intake.reserve_run("run-1", sealed, 3).values())
    honest, config = dict(trial.roster), job.to_json().encode()
    for count, refused in ((2, True), (1, False)):  # one stranger is what the quorum allows for
        trial.roster = honest | strange(count)
        part = trial.wards["north"].part
        if refused:
            with pytest.raises(Refused, match="does not know"):
                part.step("run-1", 1, "advertise", trial.setup(), config)
        else:
            assert part.step("run-1", 1, "advertise", trial.setup(), config)
