"""Federated learning with patient-level DP-SGD at every site: a small classifier of coarse image classes.

One round: the coordinator sends the global parameters, each site trains them privately and releases its
new ones. A site's account is charged for its own steps alone; averaging the sites' releases is
post-processing. The model is a multinomial logistic regression on average-pooled pixels: convex, zero at
the start, and its 650 parameters (ten classes) keep the noise small.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from agent.nouns import Cohort, Patient, Update
from agent.stages.finetune import Entropy, PrivateSgd, Task, Unit, train_privately
from policies.claims import SubsampledGaussian

POOLED: Final = 8  # images are averaged down to 8 x 8
FEATURES: Final = POOLED * POOLED
MOST_CLASSES: Final = 1000
MOST_ROUNDS: Final = 1000
MOST_STEPS: Final = 10_000  # of one round: a job must not hold a site for hours
MOST_PIXELS: Final = 1 << 15  # along a side


class BadConfiguration(ValueError):
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


@dataclass(frozen=True, slots=True)
class Federated:
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

    name: ClassVar[str] = "federated"

    def __post_init__(self) -> None:
        """Refuse what cannot be priced, trained or compared."""
        if not 2 <= len(self.classes) == len(set(self.classes)) <= MOST_CLASSES or "" in self.classes:
            raise BadConfiguration("classes: at least two, distinct, none of them empty")
        if len(self.shape) != 2 or not all(0 < s <= MOST_PIXELS and s % POOLED == 0 for s in self.shape):
            raise BadConfiguration("shape: two multiples of 8")
        if len(self.centre) != FEATURES or not all(-1.0 <= value <= 1.0 for value in self.centre):
            raise BadConfiguration("centre: 64 numbers in [-1, 1]")
        if not 0.0 < self.learning_rate < math.inf:
            raise BadConfiguration("learning_rate: finite and positive")
        if not self.public_patients >= 1:
            raise BadConfiguration("public_patients: at least 1")
        if not (1 <= self.rounds <= MOST_ROUNDS and 1 <= self.steps_per_round <= MOST_STEPS):
            raise BadConfiguration(f"rounds, steps_per_round: 1 to {MOST_ROUNDS} and {MOST_STEPS}")
        self._job()
        self.claim()

    def claim(self) -> SubsampledGaussian:
        """What all rounds together promise. It is settled before an image is read."""
        return SubsampledGaussian(self.sampling_rate, self.noise_multiplier, self.steps_per_round * self.rounds)

    def components(self) -> dict[str, str]:
        """Where every component of the released model comes from (P6)."""
        return {"initial": "public", "centre": "public"}

    def initial(self) -> Update:
        """The parameters before the first round: zeros, the same everywhere."""
        return Update(np.zeros(len(self.classes) * (FEATURES + 1), np.float32))

    def run_round(self, cohort: Cohort, update: Update, entropy: Entropy) -> Update:
        """Train ``steps_per_round`` private steps from the global parameters ``update``.

        Plain gradient steps: there is no optimiser state to carry from round to round. Images of a class
        that is not in the configuration are left out, and so is a patient who has no other; both depend
        on that patient's own record alone, so that the claim stands. Nobody at all trains on noise like anybody:
        a refusal would tell whether there is a single patient.

        Returns:
            The new parameters, flat: weight (c, 64) row by row, then bias (c).
        Raises:
            ValueError: the update or the images have another shape than the configuration.
        """
        weight, bias = self._unpack(update.vector)
        model = LinearSoftmax(len(self.classes))
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(weight.copy()))
            model.bias.copy_(torch.from_numpy(bias.copy()))
        units = [unit for patient in cohort.patients if (unit := self.unit(patient)) is not None]
        task = Task(model, cross_entropy, partial(torch.optim.SGD, lr=self.learning_rate))
        train_privately(task, units, self._job(), entropy)
        return Update(np.concatenate([model.weight.detach().numpy().ravel(), model.bias.detach().numpy()]))

    def unit(self, patient: Patient) -> Unit | None:
        """The patient's features and class numbers; None when no image is of a known class."""
        images = [image for image in patient.images if image.label in self.classes]
        if not images:
            return None
        features = self.features(np.stack([image.pixels for image in images]))
        targets = [self.classes.index(image.label) for image in images]
        return Unit(torch.from_numpy(features), torch.tensor(targets))

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

    def to_json(self) -> str:
        """The configuration as JSON: sorted keys, no spaces, floats that read back exactly."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Federated:
        """Read what ``to_json`` wrote, strictly: every key, none unknown or twice, every type exact.

        Raises:
            BadConfiguration: anything else. The keys at fault are named, all at once.
        """
        try:
            values = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
        except (ValueError, RecursionError) as fault:
            raise BadConfiguration("not a JSON object of distinct keys and finite numbers") from fault
        if type(values) is not dict:
            raise BadConfiguration("not a JSON object")
        kinds = {field.name: get_type_hints(cls)[field.name] for field in dataclasses.fields(cls)}
        if wrong := sorted(kinds.keys() ^ values.keys()):
            raise BadConfiguration("unknown or missing keys: " + ", ".join(wrong))
        if wrong := sorted(key for key, kind in kinds.items() if not _is(values[key], kind)):
            raise BadConfiguration("keys of the wrong type: " + ", ".join(wrong))
        arguments: dict[str, Any] = {key: tuple(v) if type(v) is list else v for key, v in values.items()}
        try:
            return cls(**arguments)
        except BadConfiguration:
            raise
        except ValueError as fault:
            raise BadConfiguration(str(fault)) from fault

    def _job(self) -> PrivateSgd:
        return PrivateSgd(
            sampling_rate=self.sampling_rate,
            noise_multiplier=self.noise_multiplier,
            steps=self.steps_per_round,
            clip=self.clip,
            images_per_patient=self.images_per_patient,
            expected_batch=self.sampling_rate * self.public_patients,
        )

    def _unpack(self, vector: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        c = len(self.classes)
        if vector.shape != (c * (FEATURES + 1),):
            raise ValueError("the parameters do not fit the configured model")
        return vector[: c * FEATURES].reshape(c, FEATURES), vector[c * FEATURES :]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _no_constant(_: str) -> float:
    raise ValueError("not a number")


def _is(value: object, kind: object) -> bool:
    """Whether a JSON value has exactly the type of a field; a JSON list stands for a tuple."""
    if kind in (int, float):
        return type(value) is kind
    inners: dict[object, type] = {tuple[str, ...]: str, tuple[float, ...]: float, tuple[int, int]: int}
    inner = inners[kind]
    return type(value) is list and all(type(item) is inner for item in value)
