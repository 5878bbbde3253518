"""Federated learning with patient-level DP-SGD at every site: a small classifier of coarse image classes.

``Federated``: in each round the coordinator sends the global parameters, each site trains them privately and
releases its new ones. A site's account is charged for its own steps alone; averaging the sites' releases is
post-processing. ``FederatedMasked``: in each round every site takes one step with a share of the noise, and
only the sum of all steps is ever seen. The model is a multinomial logistic regression on average-pooled
pixels: convex, zero at the start, and its 650 parameters (ten classes) keep the noise small.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Self, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from agent.domain import Cohort, Patient, Update
from agent.dp.clipping import PrivacyUnit
from agent.dp.dpsgd import PrivateSgd, SecureSumGrid, TrainingTask, noisy_part, train_privately
from agent.dp.evaluation_sums import ScoredExample, masked_look, private_look
from agent.dp.noise import TAIL, Entropy, deviation
from agent.mechanisms.common.workspace import Workspace
from policies.accounting.claims import DistributedGaussian, Evaluated, SubsampledGaussian
from policies.tasks.evaluation import EvaluationPlan, SumLattice, SumLayout, plan_from
from protos.common.canonical_json import canonical, json_object
from protos.common.errors import ConfigError

POOLED: Final = 8  # images are averaged down to 8 x 8
FEATURES: Final = POOLED * POOLED
MOST_CLASSES: Final = 1000
MOST_ROUNDS: Final = 1000
MOST_STEPS: Final = 10_000  # of one round: a job must not hold a site for hours
MOST_PIXELS: Final = 1 << 15  # along a side
MOST_STEPS_OF_VALUE: Final = 1 << 24  # whole numbers up to it are exact in float32
MOST_WIDENING: Final = 0.01  # of the noise, to cover the rounding to the lattice
_NO_BENCH: Final = Workspace()
LEAST_NOISE_STEPS: Final = 16.0  # of the lattice: rounded noises then add up like noise, to a part in e^5000


class FederatedConfigError(ConfigError, ValueError):
    """The configuration is not one of this mechanism. The text names keys, never values."""


class LinearSoftmax(nn.Module):
    """Logits (n, c) of pooled features (n, 64); zero at the start, so no seed is ever needed."""

    def __init__(self, classes: int) -> None:
        """Make ``classes`` rows of zeros."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(classes, FEATURES))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        """(n, 64) -> (n, c)."""
        return features @ self.weight.T + self.bias


def row_losses(model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy of each row: features (n, 64) and class numbers (n,) -> (n,)."""
    features, targets = rows
    return cross_entropy(model(features), targets, reduction="none")


class ProximalSgd(torch.optim.SGD):
    """Plain steps on h(w) = F(w) + mu / 2 |w - w_start|^2: Li et al. 2020 (arXiv 1812.06127), equation 2.

    The term's gradient, mu (w - w_start), depends on released numbers alone: the round's start and noisy steps. It is
    added after clipping and noise, so that no patient's contribution changes and it costs nothing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, mu: float) -> None:
        """Remember where the round starts."""
        listed = list(parameters)
        super().__init__(listed, lr=lr)
        self._pairs = [(parameter, parameter.detach().clone()) for parameter in listed]
        self._mu = mu

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the noisy gradient and the proximal one."""
        for parameter, start in self._pairs:
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=self._mu)
        loss: float | None = super().step(closure)
        return loss


class _Classifier:
    """What both mechanisms share: the model, its features and the form of the configuration."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    sampling_rate: float
    rounds: int
    clip: float
    images_per_patient: int
    public_patients: int
    learning_rate: float
    classes: tuple[str, ...]
    shape: tuple[int, int]
    centre: tuple[float, ...]
    evaluate: EvaluationPlan | None

    @property
    def turns(self) -> int:
        """Rounds and looks together: as often a site may be asked for something of its patients."""
        return self.rounds + (self.evaluate.looks if self.evaluate is not None else 0)

    def layout(self) -> SumLayout:
        """The sums of one look.

        Raises:
            EvaluationError: there are none for so many classes.
        """
        assert self.evaluate is not None, "a look is priced"
        return SumLayout("classification", len(self.classes), self.evaluate.bins)

    @property
    def parameters(self) -> int:
        """Length of the flat model."""
        return len(self.classes) * (FEATURES + 1)

    def components(self) -> dict[str, str]:
        """Where every component of the released model comes from (P6)."""
        return {"initial": "public", "centre": "public"}

    def initial(self) -> Update:
        """The parameters before the first round: zeros, the same everywhere."""
        return Update(np.zeros(self.parameters, np.float32))

    def unit(self, patient: Patient) -> PrivacyUnit | None:
        """The patient's features and class numbers; None when no image is of a known class."""
        images = [image for image in patient.images if image.label in self.classes]
        if not images:
            return None
        features = self.features(np.stack([image.pixels for image in images]))
        targets = [self.classes.index(image.label) for image in images]
        return PrivacyUnit((torch.from_numpy(features), torch.tensor(targets)))

    def features(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Average-pool images (n, h, w) to 8 x 8 and subtract the centre: (n, 64) float32.

        Raises:
            ValueError: the images do not have the configured shape.
        """
        if images.shape[1:] != self.shape:
            raise ValueError("the images do not have the configured shape")
        h, w = self.shape
        tiles = images.reshape(len(images), POOLED, h // POOLED, POOLED, w // POOLED)
        pooled = tiles.mean(axis=(2, 4), dtype=np.float64).reshape(len(images), FEATURES)
        features: NDArray[np.float32] = (pooled - np.array(self.centre)).astype(np.float32)
        return features

    def predict(self, vector: NDArray[np.float32], images: NDArray[np.float32]) -> tuple[str, ...]:
        """Name the class of each image (n, h, w) by the parameters ``vector``; no torch is used."""
        weight, bias = self._unpack(vector)
        best = (self.features(images) @ weight.T + bias).argmax(axis=1)
        return tuple(self.classes[i] for i in best)

    def scored(self, vector: NDArray[np.float32], patient: Patient) -> list[ScoredExample]:
        """What the parameters ``vector`` say of a patient's images of known classes, beside what is true."""
        images = [image for image in patient.images if image.label in self.classes]
        if not images:
            return []
        weight, bias = self._unpack(vector)
        logits = self.features(np.stack([image.pixels for image in images])) @ weight.T + bias
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        true = [np.array([self.classes.index(image.label)]) for image in images]
        return [ScoredExample(*one) for one in zip(shares, true, strict=True)]

    def to_json(self) -> str:
        """The configuration as JSON: sorted keys, no spaces, floats that read back exactly.

        Without looks there is no key ``evaluate``: such a configuration has the bytes that it always had.
        """
        values = dataclasses.asdict(self)
        return canonical({k: v for k, v in values.items() if k != "evaluate" or v is not None}).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote, strictly: every key, none unknown or twice, every type exact.

        Raises:
            FederatedConfigError: anything else. The keys at fault are named, all at once.
        """
        try:
            values = json_object(text)
        except ValueError as fault:
            raise FederatedConfigError("not a JSON object of distinct keys and finite numbers") from fault
        hints = get_type_hints(cls)
        kinds = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
        looks = {"evaluate": values.pop("evaluate")} if kinds.pop("evaluate", None) and "evaluate" in values else {}
        if wrong := sorted(kinds.keys() ^ values.keys()):
            raise FederatedConfigError("unknown or missing keys: " + ", ".join(wrong))
        if wrong := sorted(key for key, kind in kinds.items() if not _is(values[key], kind)):
            raise FederatedConfigError("keys of the wrong type: " + ", ".join(wrong))
        arguments: dict[str, Any] = {key: tuple(v) if type(v) is list else v for key, v in values.items()}
        try:
            return cls(**arguments, **{key: plan_from(value) for key, value in looks.items()})
        except FederatedConfigError:
            raise
        except ValueError as fault:
            raise FederatedConfigError(str(fault)) from fault

    def _check(self) -> None:
        """Refuse what cannot be trained or compared."""
        if not 2 <= len(self.classes) == len(set(self.classes)) <= MOST_CLASSES or "" in self.classes:
            raise FederatedConfigError("classes: at least two, distinct, none of them empty")
        if len(self.shape) != 2 or not all(0 < s <= MOST_PIXELS and s % POOLED == 0 for s in self.shape):
            raise FederatedConfigError("shape: two multiples of 8")
        if len(self.centre) != FEATURES or not all(-1.0 <= value <= 1.0 for value in self.centre):
            raise FederatedConfigError("centre: 64 numbers in [-1, 1]")
        if not 0.0 < self.learning_rate < math.inf:
            raise FederatedConfigError("learning_rate: finite and positive")
        if not self.public_patients >= 1:
            raise FederatedConfigError("public_patients: at least 1")
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise FederatedConfigError(f"rounds: 1 to {MOST_ROUNDS}")

    def _units(self, cohort: Cohort) -> list[PrivacyUnit]:
        return [unit for patient in cohort.patients if (unit := self.unit(patient)) is not None]

    def _model(self, vector: NDArray[np.float32]) -> LinearSoftmax:
        weight, bias = self._unpack(vector)
        model = LinearSoftmax(len(self.classes))
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(weight.copy()))
            model.bias.copy_(torch.from_numpy(bias.copy()))
        return model

    def _sgd(self, noise_multiplier: float, steps: int) -> PrivateSgd:
        return PrivateSgd(
            sampling_rate=self.sampling_rate,
            noise_multiplier=noise_multiplier,
            steps=steps,
            clip=self.clip,
            images_per_patient=self.images_per_patient,
            expected_batch=self.sampling_rate * self.public_patients,
        )

    def _unpack(self, vector: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        c = len(self.classes)
        if vector.shape != (self.parameters,):
            raise ValueError("the parameters do not fit the configured model")
        return vector[: c * FEATURES].reshape(c, FEATURES), vector[c * FEATURES :]


@dataclass(frozen=True, slots=True)
class Federated(_Classifier):
    """Public configuration of one federated training: constants, none of them derived from patients."""

    sampling_rate: float  # q, the chance of each patient in each step
    noise_multiplier: float  # sigma, in units of ``clip``
    steps_per_round: int
    rounds: int
    clip: float  # L2 bound of one patient's gradient
    images_per_patient: int  # used in one step
    public_patients: int  # a public bound; times sampling_rate it is the divisor of every sum
    learning_rate: float
    classes: tuple[str, ...]  # coarse classes, in the order of the model's outputs
    shape: tuple[int, int]  # (h, w) of the images, multiples of 8
    centre: tuple[float, ...]  # (64,) subtracted from the pooled pixels; from public images or constant
    proximal: float = 0.0  # FedProx's mu, 0: plain steps; required in JSON like every other key
    evaluate: EvaluationPlan | None = None  # None: nobody looks at how good the model is

    name: ClassVar[str] = "federated"

    def __post_init__(self) -> None:
        """Refuse what cannot be priced, trained or compared."""
        self._check()
        if not 1 <= self.steps_per_round <= MOST_STEPS:
            raise FederatedConfigError(f"steps_per_round: 1 to {MOST_STEPS}")
        if not (self.proximal >= 0.0 and self.proximal * self.learning_rate <= 1.0):
            raise FederatedConfigError(
                "proximal: not negative, and at most 1 / learning_rate, else its steps overshoot"
            )
        self._job()
        self.claim()
        if self.evaluate is not None:
            self.layout()

    def claim(self) -> SubsampledGaussian | Evaluated:
        """What all rounds and looks together promise. It is settled before an image is read."""
        steps = self.steps_per_round * self.rounds
        training = SubsampledGaussian(self.sampling_rate, self.noise_multiplier, steps)
        return training if self.evaluate is None else self.evaluate.claim(training)

    def run_look(self, cohort: Cohort, update: Update, entropy: Entropy) -> Update:
        """The noisy sums of one look at the global parameters ``update``: how good they are on ``cohort``.

        The patients are those held out. Of an empty cohort there is as much noise: a refusal would reveal whether
        there is a single patient.

        Returns:
            (layout.size,) sums, see :mod:`policies.tasks.evaluation`.
        Raises:
            ValueError: the update or the images have another shape than the configuration.
        """
        plan = self.evaluate
        assert plan is not None, "a look is priced"
        patients = (self.scored(update.vector, patient) for patient in cohort.patients)
        return Update(private_look(self.layout(), patients, plan.noise, entropy))

    def run_round(self, cohort: Cohort, update: Update, entropy: Entropy, bench: Workspace = _NO_BENCH) -> Update:
        """Train ``steps_per_round`` private steps from the global parameters ``update``.

        Gradient steps, plain or proximal: no optimiser state is carried from round to round. Images of a class that
        is not in the configuration are left out, and so is a patient with no others; both depend on that patient's
        own record alone, so the claim holds. An empty cohort trains on noise like any other: a refusal would reveal
        whether there is a single patient.

        Returns:
            The new parameters, flat: weight (c, 64) row by row, then bias (c).
        Raises:
            ValueError: the update or the images have another shape than the configuration.
        """
        model = self._model(update.vector)
        task = TrainingTask(model, row_losses, partial(ProximalSgd, lr=self.learning_rate, mu=self.proximal))
        say = lambda at: bench.say("train", at.step, at.steps)  # noqa: E731 - one line
        train_privately(task, self._units(cohort), self._job(), entropy, say=say)
        return Update(np.concatenate([model.weight.detach().numpy().ravel(), model.bias.detach().numpy()]))

    def _job(self) -> PrivateSgd:
        return self._sgd(self.noise_multiplier, self.steps_per_round)


@dataclass(frozen=True, slots=True)
class FederatedMasked(_Classifier):
    """Public configuration of a federated training whose updates are visible only as a secure sum.

    Every round is one step: between two steps a site's model would follow its own part, which bears a share of
    the noise alone. A part is a vector of whole steps of 2^-scale, none above ``value_bound``, so that
    ``sites`` of them add up in the ring of ``ring_bits`` without wrapping, and quantising it again is exact.
    """

    sampling_rate: float  # q, the chance of each patient in each step
    noise_multiplier: float  # sigma of the sum, in units of ``clip``
    rounds: int
    clip: float  # L2 bound of one patient's gradient
    images_per_patient: int  # used in one step
    public_patients: int  # a public bound of each site; times sampling_rate it is the divisor of every sum
    learning_rate: float
    classes: tuple[str, ...]  # coarse classes, in the order of the model's outputs
    shape: tuple[int, int]  # (h, w) of the images, multiples of 8
    centre: tuple[float, ...]  # (64,) subtracted from the pooled pixels; from public images or constant
    sites: int  # asked for a part of each sum
    honest: int  # of them, at least, that keep to the protocol in every sum: their noise alone must do
    value_bound: float  # of each coordinate of a part; a multiple of 2^-scale
    scale: int  # a part is in steps of 2^-scale
    ring_bits: int  # sums are modulo 2^ring_bits
    evaluate: EvaluationPlan | None = None  # None: nobody looks at how good the model is

    name: ClassVar[str] = "federated-masked"
    steps_per_round: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be priced, trained, compared or added up."""
        self._check()
        self.claim()
        self._job()
        if not (0 <= self.scale <= 30 and self.ring_bits in (32, 64)):
            raise FederatedConfigError("scale: 0 to 30; ring_bits: 32 or 64")
        whole = self.value_bound * 2.0**self.scale
        if not (0.0 < whole <= MOST_STEPS_OF_VALUE and whole == math.floor(whole)):
            raise FederatedConfigError("value_bound: a positive multiple of 2^-scale, at most 2^24 of them")
        if not self.sites * whole < 2.0 ** (self.ring_bits - 1):
            raise FederatedConfigError("ring_bits: too few for the sum of all sites")
        noise, grid = self._noise(), self._grid()
        widened = grid * math.sqrt(self.parameters)
        if not (noise >= LEAST_NOISE_STEPS * grid and widened <= MOST_WIDENING * self.clip):
            raise FederatedConfigError("scale: too small, the steps of 2^-scale are not small beside noise and clip")
        if not self._room() >= self.clip + grid:
            raise FederatedConfigError("value_bound: too small for the noise and one patient's gradient")
        if self.evaluate is not None:
            self.look_ring()

    def claim(self) -> DistributedGaussian | Evaluated:
        """What all rounds and looks together promise of the sums. It is settled before an image is read."""
        training = self._training()
        return training if self.evaluate is None else self.evaluate.claim(training)

    def _training(self) -> DistributedGaussian:
        return DistributedGaussian(self.sampling_rate, self.noise_multiplier, self.rounds, self.sites, self.honest)

    def look_ring(self) -> tuple[int, SumLattice]:
        """How many sums a look has, and the lattice that they are on.

        Raises:
            EvaluationError: there are none for so many classes, or the noise is too small.
        """
        assert self.evaluate is not None, "a look is priced"
        size = self.layout().size
        return size, SumLattice.of(self.evaluate.claim(self._training()), self.public_patients, size)

    def run_look(self, cohort: Cohort, update: Update, entropy: Entropy) -> Update:
        """As ``Federated.run_look``, of a secret sum: *this site's part*, with its share of the noise.

        Each number is in steps of 2^-scale, and exact.
        """
        _, lattice = self.look_ring()
        assert self.evaluate is not None
        share = self.evaluate.claim(self._training()).share
        patients = (self.scored(update.vector, patient) for patient in cohort.patients)
        box = float(self.public_patients), lattice.scale
        return Update(masked_look(self.layout(), patients, share, box, entropy))

    def run_round(self, cohort: Cohort, update: Update, entropy: Entropy, bench: Workspace = _NO_BENCH) -> Update:
        """One private step from the global parameters ``update``: the change, *this site's part of a sum*.

        It bears noise_multiplier / sqrt(honest) of the noise and must leave masked only. Each coordinate of the
        clipped sum is boxed *before* the noise is added, so that with the noise, whose generator has an end, it stays
        within ``value_bound``: nothing is cut afterwards, and the noise of the sum is the sum of the noises. A sum of
        gradients beyond the box is understated; no neighbours come further apart by it. Rounding moves each
        coordinate by at most 2^-scale (half for the clipped sum, half for the noise), and so the mean of
        the parts; it is made here, once, and the part is exact in float32 and in the ring.

        Returns:
            Change of the parameters, flat: weight (c, 64) row by row, then bias (c).
        Raises:
            ValueError: the update or the images have another shape than the configuration.
        """
        bench.say("train", 0, 1)
        box = SecureSumGrid(self._grid(), self._room())
        whole = noisy_part(self._model(update.vector), row_losses, self._units(cohort), self._job(), entropy, box)
        return Update((-whole * 2.0**-self.scale).astype(np.float32))

    def _job(self) -> PrivateSgd:
        return self._sgd(self._training().share, 1)

    def _grid(self) -> float:
        """A step of 2^-scale of the change, in units of the clipped sum."""
        return float(2.0**-self.scale * self._job().expected_batch / self.learning_rate)

    def _noise(self) -> float:
        """Standard deviation of this site's noise, in units of the clipped sum."""
        job = self._job()
        return deviation(job.clip, job.noise_multiplier, self.parameters, self._grid())

    def _room(self) -> float:
        """What ``value_bound`` leaves to the clipped sum beside the noise's largest number and the rounding."""
        return self.value_bound * 2.0**self.scale * self._grid() - TAIL * self._noise() - self._grid()


def _is(value: object, kind: object) -> bool:
    """Whether a JSON value has exactly the type of a field; a JSON list stands for a tuple."""
    if kind in (int, float):
        return type(value) is kind
    inners: dict[object, type] = {tuple[str, ...]: str, tuple[float, ...]: float, tuple[int, int]: int}
    inner = inners[kind]
    return type(value) is list and all(type(item) is inner for item in value)
