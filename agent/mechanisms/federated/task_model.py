"""The network of a task, trained by one hospital alone: the task file, the steps and the looks of a run's rounds.

What a run with this hospital as its only site would make: round after round of :meth:`Federated.run_round`, each from
what the last one made. Nobody sees the rounds, so that one release is priced, and one model leaves. With
``evaluate`` some patients are held out by the same keyed hash as in runs, never trained on, and looked at once, when
the model is trained: the noisy sums leave beside it, under the same price (:mod:`policies.tasks.evaluation`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import ExampleRule, TaskCohort, Update
from agent.dp.noise import Entropy
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.mechanism import (
    Federated,
    FederatedConfigError,
    PublicFiles,
    RoundPlace,
    round_checkpoint_bytes,
)
from agent.models.training_loop import load_state, save_state
from agent.models.weights import pack
from policies.accounting.claims import Evaluated, SubsampledGaussian
from policies.tasks.evaluation import HELD_OUT, TRAINED
from policies.tasks.released_model import KIND, PARAMETERS, SUMS, model_config, model_tensors

ROUNDS: Final = "model/rounds"  # places: the parameters after the newest round that is whole
STEPS: Final = "model/steps"  # the steps of the round in progress
LOOK: Final = "model/look"  # the noisy sums: never drawn twice


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """What was made of the patients: numbers with their noise, and nothing else."""

    parameters: NDArray[np.float32]  # (p,), less their start
    sums: NDArray[np.float32]  # (s,) of the look; (0,): nobody looked


@dataclass(frozen=True, slots=True, eq=False)
class TaskModel:
    """Public configuration of one training alone: constants, none of them derived from patients."""

    training: Federated
    files: PublicFiles = field(default_factory=dict, repr=False)  # of public weights, which the site vouches for

    name: ClassVar[str] = "model"
    drawn: ClassVar[tuple[str, ...]] = ()  # no images, so no labels of any
    pictures: ClassVar[int] = 0
    fewer: ClassVar[str] = "a smaller network"

    def __post_init__(self) -> None:
        """Refuse what cannot be made at once."""
        plan = self.training.evaluate
        if plan is not None and plan.looks != 1:
            raise FederatedConfigError("evaluate.looks: 1, since the model is looked at when it is trained")
        if self.training.task.training.head != "shared":
            raise FederatedConfigError("task: training.head: shared, since one hospital alone shares with nobody")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the images that it takes."""
        return self.training.shape

    @property
    def bins(self) -> int:
        """Of the look's scores; 0: nobody looks."""
        return self.training.evaluate.bins if self.training.evaluate is not None else 0

    @property
    def form(self) -> str:
        """SHA-256 of the whole configuration: an interrupted making goes on only as the same."""
        return hashlib.sha256(f"{self.name} {self.training.form}".encode()).hexdigest()

    @property
    def places(self) -> tuple[str, ...]:
        """Of the checkpoints."""
        return (ROUNDS, STEPS, *([LOOK] if self.bins else []))

    @property
    def max_checkpoint_bytes(self) -> int:
        """Of the steps of a round, or of the sums."""
        lengths = model_tensors(self.training.task, self.training.parameters, self.bins)
        return round_checkpoint_bytes(lengths[PARAMETERS]) + 4 * lengths.get(SUMS, 0)

    @property
    def max_result_bytes(self) -> int:
        """Of the parameters and the sums."""
        return 4 * sum(model_tensors(self.training.task, self.training.parameters, self.bins).values())

    def claim(self) -> SubsampledGaussian | Evaluated:
        """What all steps, and the look, promise together. It is settled before an image is read."""
        return self.training.claim()

    def components(self) -> dict[str, str]:
        """Where the start of the training comes from (P6): a seed, and files that the site vouches for."""
        return {"initial": "public"}

    def rules(self, run: str = "") -> dict[str, ExampleRule]:
        """Whose examples are trained on, and whose are looked at, by the part that they are in.

        ``run``: by this name the site stays with one version of its label table.
        """
        parts = (TRAINED, HELD_OUT) if self.bins else (TRAINED,)
        return {part: self.training.examples(part, run) for part in parts}

    def untrained(self) -> bytes:
        """The model's file before it has learned anything, with sums of nothing."""
        lengths = model_tensors(self.training.task, self.training.parameters, self.bins)
        return self.file(TrainedModel(*(np.zeros(lengths.get(name, 0), np.float32) for name in (PARAMETERS, SUMS))))

    def file(self, made: TrainedModel) -> bytes:
        """The model as it leaves.

        Raises:
            ValueError: it is of another size than was priced, or a number in it is not finite.
        """
        arrays = {PARAMETERS: made.parameters, SUMS: made.sums}
        lengths = model_tensors(self.training.task, self.training.parameters, self.bins)
        if any(array.shape != (lengths.get(name, 0),) for name, array in arrays.items()):
            raise ValueError("what was trained is of another size than was priced")
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise ValueError("what was trained is not all numbers")
        tensors = {name: torch.from_numpy(arrays[name].copy()) for name in lengths}
        return pack(KIND, model_config(self.training.task, self.bins), {}, tensors)

    def run(self, cohort: Mapping[str, TaskCohort], entropy: Entropy, bench: Workspace | None = None) -> TrainedModel:
        """Train every round, then look; interrupted, it goes on from the bench's places.

        No size of the cohort is refused: a refusal would tell.

        Args:
            cohort: the patients in each part of :meth:`rules`.
            entropy: of batches, views and noise; nothing of it is ever saved.
            bench: the places, and who is told how far it is.
        Raises:
            ValueError: the images have another shape than the configuration.
            DivergedError: a parameter is not finite any more. That depends on noisy steps alone.
        """
        bench, training = bench or Workspace(), self.training
        place, steps = bench.place(ROUNDS), bench.place(STEPS)
        made, model = 0, training.initial()
        if (raw := place.read()) is not None:
            made, state = load_state(raw, self.form)
            model = Update(state[PARAMETERS].numpy())
        whole, each = training.rounds * training.steps_per_round, training.steps_per_round
        for number in range(made, training.rounds):
            told = Workspace(say=lambda stage, at, _, before=number * each: bench.say(stage, before + at, whole))  # type: ignore[misc]
            own = RoundPlace(steps, f"{self.form} {number}")
            model = training.run_round(cohort[TRAINED], model, entropy, told, self.files, place=own)
            place.write(save_state(self.form, number + 1, {PARAMETERS: torch.from_numpy(model.vector)}))
        return TrainedModel(model.vector, self._look(cohort, model, entropy, bench))

    def _look(
        self, cohort: Mapping[str, TaskCohort], model: Update, entropy: Entropy, bench: Workspace
    ) -> NDArray[np.float32]:
        """The noisy sums over the held-out patients, kept before anybody sees them."""
        if not self.bins:
            return np.zeros(0, np.float32)
        place = bench.place(LOOK)
        if (raw := place.read()) is not None:
            kept: NDArray[np.float32] = load_state(raw, self.form)[1][SUMS].numpy()
            return kept
        sums = self.training.run_look(cohort[HELD_OUT], model, entropy, self.files).vector
        place.write(save_state(self.form, 0, {SUMS: torch.from_numpy(sums)}))
        return sums
