"""Virtual sites for a simulated run: made patients, their own keys, a small private training, sealed statements.

A small version of an agent's part in a round, on synthetic data, so that the strategy and the ledger have real work:
the task's network ``linear`` (a multinomial logistic regression of pooled pixels) under ``federated``, trained by
patient-level DP-SGD (Abadi et al. 2016, algorithm 1, with patients for examples), and the statements that a site
signs. The agent's own mechanism is not used, since the coordinator has neither torch nor the agent. The noise comes
from a seeded generator: no real patient depends on it, and a simulation can be repeated.

Ray carries these objects between processes of this machine, in its own way; nothing of it comes from outside.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from coordinator.federation.job import Job, JobError
from policies.accounting.claims import SubsampledGaussian, training_of
from policies.accounting.rdp import epsilon_nano
from policies.ledger_service import open_accounts
from policies.review.policy import parse as parse_policy
from policies.review.rules import TERMS
from policies.statements import PAYLOAD_TYPE, Enrolment, Release, Reservation, Statement, encode, release_id
from policies.tasks.task import CLASSIFICATION
from protos.artifacts.arrays import pack_vector
from protos.common.dsse import seal
from protos.federation import messages
from protos.identity.certificates import agent_name, node_public, request

ROLL: Final = "query.roll"  # which of the virtual sites a node is
_SPREAD: Final = (0.2, 0.6)  # of the classes' centres, and of patients around them, in units of a pixel's range
_POISON: Final = -10.0  # times what honest training would have changed

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scenario:
    """How many sites there are, and how many of them are out of the ordinary, counted from the last one."""

    sites: int
    seed: int
    poisoned: int = 0  # send ten times the opposite of what they should
    poor: int = 0  # their own policy leaves too little of a budget
    away: int = 0  # do not answer when they are asked to train

    def __post_init__(self) -> None:
        """Refuse what makes no sense, all problems at once."""
        odd = (self.poisoned, self.poor, self.away)
        wrong = [
            text
            for text, right in {
                "sites: 1 to 10,000": 1 <= self.sites <= 10_000,
                "seed: not negative": self.seed >= 0,
                "poisoned, poor, away: none negative, together at most the sites": min(odd) >= 0
                and sum(odd) <= self.sites,
            }.items()
            if not right
        ]
        if wrong:
            raise ValueError("the simulation needs " + "; ".join(wrong))

    def part(self, index: int) -> str:
        """What a site does: honest, or one of the three."""
        back = self.sites - 1 - index
        for name, many in (("poisoned", self.poisoned), ("poor", self.poor), ("away", self.away)):
            if back < many:
                return name
            back -= many
        return "honest"


def name_of(index: int) -> str:
    """The name of a virtual site, counted from 0."""
    return f"virtual-{index:04d}"


@dataclass(frozen=True, slots=True)
class Training:
    """The numbers of the mechanism's public configuration that a virtual site trains by."""

    sampling_rate: float
    noise_multiplier: float
    steps_per_round: int
    clip: float
    images_per_patient: int
    public_patients: int
    learning_rate: float
    momentum: float
    proximal: float
    classes: int
    features: int  # pooled pixels of an image

    @staticmethod
    def of(job: Job) -> Training:
        """Of a job of the mechanism ``federated`` whose noise is settled.

        Raises:
            JobError: its task is no classification by the network ``linear``: no other is simulated.
        """
        task, noise = job.task(), float(json.loads(job.config)["noise_multiplier"])
        if task.kind != CLASSIFICATION or task.network.name != "linear":
            raise JobError("only the classification of a task with the network linear can be simulated")
        features = task.input.channels * task.network.options["pooled"] ** len(task.input.size)
        constants = task.training
        return Training(
            sampling_rate=constants.sampling_rate,
            noise_multiplier=noise,
            steps_per_round=constants.steps_per_round,
            clip=constants.clip,
            images_per_patient=constants.images_per_patient,
            public_patients=constants.public_patients,
            learning_rate=task.rate(job.parameters, noise),
            momentum=constants.momentum,
            proximal=constants.proximal,
            classes=task.outputs,
            features=features,
        )

    def train(
        self, start: NDArray[np.float32], site: SyntheticCohort, rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """One round's private steps from ``start`` (p,): the new parameters (p,)."""
        theta, pace = start.astype(np.float64), np.zeros(start.size)
        for _ in range(self.steps_per_round):
            picked = rng.random(len(site.labels)) < self.sampling_rate
            gradients = self._gradients(theta, site.images[picked], site.labels[picked])
            norms = np.linalg.norm(gradients, axis=1, keepdims=True)
            clipped = gradients * np.minimum(1.0, self.clip / np.maximum(norms, 1e-12))
            noise = rng.normal(0.0, self.noise_multiplier * self.clip, theta.size)
            mean = (clipped.sum(axis=0) + noise) / (self.sampling_rate * self.public_patients)
            pace = self.momentum * pace + mean + self.proximal * (theta - start)
            theta -= self.learning_rate * pace
        return theta.astype(np.float32)

    def _gradients(self, theta: Floats, images: Floats, labels: NDArray[np.int64]) -> Floats:
        """One gradient for each patient, the mean over the patient's images: (n, p)."""
        wrong = self.chances(theta, images)  # (n, m, c)
        wrong[np.arange(len(labels)), :, labels] -= 1.0
        weight = np.einsum("nmc,nmf->ncf", wrong, images) / self.images_per_patient
        return np.concatenate([weight.reshape(len(labels), -1), wrong.mean(axis=1)], axis=1)

    def chances(self, theta: Floats, images: Floats) -> Floats:
        """The model's probabilities of each class: (n, m, features) to (n, m, c)."""
        weight, bias = theta[: -self.classes].reshape(self.classes, self.features), theta[-self.classes :]
        logits = images @ weight.T + bias
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        chances: Floats = powers / powers.sum(axis=-1, keepdims=True)
        return chances

    def accuracy(self, vector: NDArray[np.float32], held_out: SyntheticCohort) -> float:
        """The share of images whose class is the model's first choice."""
        best = self.chances(vector.astype(np.float64), held_out.images).argmax(axis=-1)
        return float((best == held_out.labels[:, None]).mean())


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticCohort:
    """Made patients: everyone's classes look alike, and each site has its own mixture of them."""

    images: Floats  # (n, m, features), pooled pixels about their centre
    labels: NDArray[np.int64]  # (n,)

    @staticmethod
    def make(training: Training, seed: int, site: int, even: bool = False) -> SyntheticCohort:
        """As many patients as the public bound says; the same ones for the same numbers.

        Args:
            training: shapes and sizes.
            seed: of the whole simulation.
            site: of the patients; -1 for held-out ones.
            even: every class as often as any other, instead of a mixture drawn from a flat Dirichlet law.
        """
        centres = np.random.default_rng([seed, 0]).normal(0, _SPREAD[0], (training.classes, training.features))
        rng = np.random.default_rng([seed, 1, site + 1])
        n, m = training.public_patients, training.images_per_patient
        mixture = None if even else rng.dirichlet(np.ones(training.classes))
        labels = rng.choice(training.classes, size=n, p=mixture)
        patients = centres[labels] + rng.normal(0, _SPREAD[1], (n, training.features))
        return SyntheticCohort(
            patients[:, None, :] + rng.normal(0, _SPREAD[1] / 2, (n, m, training.features)), labels
        )


@dataclass(frozen=True)
class VirtualSite:
    """One virtual site of a job: its key, its policy, and what it seals."""

    job: Job
    players: Scenario
    index: int
    policy: str  # TOML, the site's own

    @cached_property
    def name(self) -> str:
        """In the ledger."""
        return name_of(self.index)

    @cached_property
    def key(self) -> Ed25519PrivateKey:
        """Of the seed: the hub enrols the site and a worker seals for it, and nobody else ever trusts it."""
        return Ed25519PrivateKey.from_private_bytes(
            hashlib.sha256(f"virtual site {self.players.seed} {self.index}".encode()).digest()
        )

    def seal(self, statement: Statement) -> bytes:
        """A statement in the site's name."""
        return seal(encode(statement), PAYLOAD_TYPE, self.key)

    def enrolment(self) -> bytes:
        """The sealed request to take part, with keys that are used for nothing else."""
        public = base64.b64encode(self.key.public_key().public_bytes_raw()).decode()
        csr = request(ec.generate_private_key(ec.SECP256R1()), agent_name(self.name)).decode()
        node = node_public(ec.generate_private_key(ec.SECP384R1())).decode()
        return self.seal(Enrolment(self.name, public, csr, node, self.policy))

    def reservation(self) -> bytes:
        """The sealed answer to the price."""
        mechanism = self.job.mechanism
        return self.seal(
            Reservation(
                grant=f"grant-{self.name}",
                site=self.name,
                run=self.job.run,
                mechanism=mechanism,
                claim=self.job.claim(),
                components=self._components(),
                modality=self._modality(),
            )
        )

    def update(self, round_index: int, vector: NDArray[np.float32]) -> bytes:
        """The sealed statement on what was trained in a round, counted from 0: it claims all rounds so far."""
        whole, number, artifact = training_of(self.job.claim()), round_index + 1, pack_vector(vector)
        assert isinstance(whole, SubsampledGaussian), "the job's mechanism is the plain one"
        steps = Training.of(self.job).steps_per_round * number
        claim = SubsampledGaussian(whole.sampling_rate, whole.noise_multiplier, steps)
        account = open_accounts(self.name, parse_policy(self.policy, self.name))[0]
        grant = f"grant-{self.name}"
        return self.seal(
            Release(
                release=release_id(self.name, grant, number),
                grant=grant,
                site=self.name,
                run=self.job.run,
                round=number,
                mechanism=self.job.mechanism,
                artifact_type=TERMS[self.job.mechanism].artifact_type,
                artifact_sha256=hashlib.sha256(artifact).hexdigest(),
                artifact_bytes=len(artifact),
                claim=claim,
                epsilon_nano=epsilon_nano(claim, float(account.delta), account.order),
                delta=account.delta,
                components=self._components(),
                modality=self._modality(),
                vetted_against="nothing",
                reid_rate=None,
                approvals={},
                reader="",
            )
        )

    def _components(self) -> dict[str, str]:
        return dict.fromkeys(sorted(TERMS[self.job.mechanism].components), "public")

    def _modality(self) -> str:
        return min(parse_policy(self.policy, self.name).modalities)


@dataclass(frozen=True, slots=True)
class VirtualClientApp:
    """The virtual sites' replies to a message; a Flower ClientApp that Ray's workers run."""

    job: Job
    players: Scenario
    policies: tuple[str, str]  # the sites' own, TOML: of the poor ones, and of all others

    def site(self, index: int) -> VirtualSite:
        """One of them."""
        return VirtualSite(self.job, self.players, index, self.policies[self.players.part(index) != "poor"])

    def app(self) -> ClientApp:
        """The same app for every site: Flower tells it which one it is."""
        app = ClientApp()
        app.query("roll")(self.roll)
        app.query("price")(self.price)
        app.train()(self.train)
        return app

    def roll(self, message: Message, context: Context) -> Message:
        """Which site this node is."""
        return _reply(message, str(_index(context)).encode())

    def price(self, message: Message, context: Context) -> Message:
        """The sealed reservation."""
        return _reply(message, self.site(_index(context)).reservation())

    def train(self, message: Message, context: Context) -> Message:
        """One round's training and its sealed statement."""
        index = _index(context)
        site, part = self.site(index), self.players.part(index)
        if part == "away":
            return Message(Error(messages.CODES["unavailable"], "unavailable"), reply_to=message)
        number = cast(int, message.content.config_records[messages.ORDER][messages.ROUND])
        start = message.content.array_records[messages.PARAMETERS][messages.FLAT].numpy()
        training = Training.of(self.job)
        rng = np.random.default_rng([self.players.seed, 2, index, number])
        vector = training.train(start, SyntheticCohort.make(training, self.players.seed, index), rng)
        if part == "poisoned":
            vector = (start + _POISON * (vector - start)).astype(np.float32)
        return _reply(message, site.update(number, vector), vector)


def _index(context: Context) -> int:
    """Which of the virtual sites a node is, by the simulation engine."""
    config: Mapping[str, Any] = context.node_config
    return int(config["partition-id"])


def _reply(message: Message, envelope: bytes, vector: NDArray[np.float32] | None = None) -> Message:
    content = RecordDict({messages.ANSWER: ConfigRecord({messages.ENVELOPE: envelope})})
    if vector is not None:
        content[messages.PARAMETERS] = ArrayRecord({messages.FLAT: Array(vector)})
    return Message(content, reply_to=message)
