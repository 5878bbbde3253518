"""Federated learning with patient-level DP-SGD at every site, of what a task says.

``Federated``: in each round the coordinator sends the global parameters, each site trains them privately and
releases its new ones. A site's account is charged for its own steps alone; averaging the sites' releases is
post-processing. ``FederatedMasked``: in each round every site takes one step with a share of the noise, and
only the sum of all steps is ever seen. Network, labels, loss and every constant of the steps are the task's
(:mod:`policies.tasks.task`), and the parameters that travel are those that it trains, less their start: zeros at
every site before the first round.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Self, get_type_hints

import numpy as np
from numpy.typing import NDArray

from agent.domain import CheckpointStore, ExampleRule, LatticePart, Split, TaskCohort, Update
from agent.dp.compute_device import ComputePlan
from agent.dp.dpsgd import PrivateSgd, SecureSumGrid, TrainingTask, noisy_part, train_privately
from agent.dp.evaluation_sums import masked_look, private_look
from agent.dp.noise import TAIL, Entropy, deviation
from agent.errors import OtherRunError
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.task_training import (
    RoundSgd,
    example_rule,
    fitted_engine,
    network_of,
    row_losses,
    scored,
    scores,
    told_by_task,
    units,
)
from agent.models.diffusion.edm_training import Average
from agent.models.networks.trainable import TrainableNetwork
from agent.models.training_loop import HEADER_BYTES, load_state
from policies.accounting.claims import DistributedGaussian, Evaluated, SubsampledGaussian
from policies.tasks.bounds import TaskError
from policies.tasks.evaluation import SPLIT, EvaluationPlan, SumLattice, SumLayout, plan_from
from policies.tasks.task import BFLOAT16, FLOAT32, MOST_PARAMETERS, WRITE_A_TASK, Task, task_from_table
from protos.common.canonical_json import canonical, json_object
from protos.common.errors import ConfigError

MOST_STEPS_OF_VALUE: Final = 1 << 52  # whole numbers up to it, and their sums of a few, are exact in float64
MOST_WIDENING: Final = 0.01  # of the noise, to cover the rounding to the lattice
_NO_BENCH: Final = Workspace()
_HERE: Final = ComputePlan()  # the processor
LEAST_NOISE_STEPS: Final = 16.0  # of the lattice: rounded noises then add up like noise, to a part in e^5000

PublicFiles = Mapping[str, bytes]
"""SHA-256 of a file of public weights, which the site vouches for -> its bytes."""

NO_FILES: Final[PublicFiles] = {}
_PRECISION: Final = "update_precision"
_STATES: Final = 3  # of a checkpoint, each of the parameters' size: themselves, their momentum and their average
_CONSTANTS: Final = 64  # bytes of the job's, beside them


def round_checkpoint_bytes(trained: int) -> int:
    """The most that a checkpoint of a round's steps takes where so many numbers are trained."""
    return 4 * _STATES * trained + _CONSTANTS + HEADER_BYTES


class FederatedConfigError(ConfigError, ValueError):
    """The configuration is not one of this mechanism. The text names keys, never values."""


@dataclass(frozen=True, slots=True)
class RoundPlace:
    """Where the steps of one round are kept, which others had before it: what those left is no checkpoint of it."""

    place: CheckpointStore
    run: str  # tells the round from every other
    every: int = 0  # steps from one to the next; 0: as :func:`agent.dp.dpsgd.train_privately` has it

    def read(self) -> bytes | None:
        """This round's checkpoint, if it has one."""
        raw = self.place.read()
        try:
            if raw is not None:
                load_state(raw, self.run)
        except OtherRunError:
            return None
        return raw

    def write(self, data: bytes) -> None:
        """In the place of what is there."""
        self.place.write(data)


class _OfTask:
    """What both mechanisms share: the task, and the form of the configuration."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    task: Task
    parameters: int  # p, that the task trains: whoever has no networks learns it here, and a site checks it
    evaluate: EvaluationPlan | None

    @property
    def turns(self) -> int:
        """Rounds and looks together: as often a site may be asked for something of its patients."""
        return self.rounds + (self.evaluate.looks if self.evaluate is not None else 0)

    def layout(self) -> SumLayout:
        """The sums of one look.

        Raises:
            EvaluationError: there are none for so many outputs.
        """
        assert self.evaluate is not None, "a look is priced"
        return SumLayout(self.task.kind, self.task.outputs, self.evaluate.bins)

    def examples(self, part: str, run: str = "") -> ExampleRule:
        """Whom is trained on, or whom a look is at: other patients, by a keyed hash and for ever.

        The division has one name, so that every run with the same share holds out the same patients. Without looks
        all are trained on.
        """
        rule, plan = dataclasses.replace(example_rule(self.task), run=run), self.evaluate
        return rule if plan is None else dataclasses.replace(rule, split=Split(SPLIT, plan.shares), part=part)

    @property
    def rounds(self) -> int:
        """That are priced."""
        return self.task.training.rounds

    @property
    def public_patients(self) -> int:
        """A public bound on the patients of each site."""
        return self.task.training.public_patients

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w) of the images, or (h, w, 3) of coloured ones."""
        colours = (3,) if self.task.input.channels == 3 else ()
        return (*self.task.input.size, *colours)

    def components(self) -> dict[str, str]:
        """Where every component of the released model comes from (P6)."""
        return {"initial": "public", "centre": "public"}

    @property
    def max_result_bytes(self) -> int:
        """Of what a confined process answers: a part of a secret sum has 64 bits for each parameter."""
        return 8 * self.parameters

    def initial(self) -> Update:
        """The parameters before the first round: zeros, the same everywhere."""
        return Update(np.zeros(self.parameters, np.float32))

    @property
    def drawn(self) -> tuple[str, ...]:
        """The words that an error of a confined process may name: see :class:`agent.release.maker_process`."""
        return (self.task.name,)

    def network(
        self,
        vector: NDArray[np.float32] | None = None,
        files: PublicFiles = NO_FILES,
        head: NDArray[np.float32] | None = None,
    ) -> TrainableNetwork:
        """The task's network, at a vector of parameters if there is one, and with a head of the site's own.

        Raises:
            FederatedConfigError: it trains another number of parameters than the configuration says, or a file of
            public weights is not there.
            ValueError: the vector is of another length.
        """
        missing = [digest for digest in self.task.network.public_files if digest not in files]
        if missing:
            raise FederatedConfigError(f"task: public weights that are not here: {', '.join(missing)}")
        network = network_of(self.task, files.__getitem__)
        if network.parameters != self.parameters:
            raise FederatedConfigError(f"parameters: the task's network trains {network.parameters}")
        if vector is not None:
            if vector.shape != (self.parameters,):
                raise ValueError("the parameters do not fit the configured model")
            network.load(vector, head)
        return network

    def predict(
        self, vector: NDArray[np.float32], cohort: TaskCohort, files: PublicFiles = NO_FILES
    ) -> NDArray[np.float32]:
        """What the network says of every example by ``vector``, patient after patient: (n, outputs)."""
        return scores(self.task, self.network(vector, files), cohort)

    def to_json(self) -> str:
        """The configuration as JSON: sorted keys, no spaces, floats that read back exactly. No looks, no key."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"task": self.task.to_table(), "evaluate": self.evaluate and self.evaluate.to_table()}
        if values.get(_PRECISION) == FLOAT32:  # as before updates had another one
            del values[_PRECISION]
        return canonical({key: value for key, value in values.items() if value is not None}).decode()

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
        if "task" not in values and {"classes", "shape", "centre"} & values.keys():
            raise FederatedConfigError(WRITE_A_TASK)
        hints = get_type_hints(cls)
        kinds = {field.name: hints[field.name] for field in dataclasses.fields(cls)} | {"task": dict}
        del kinds["evaluate"]
        if _PRECISION not in values:
            kinds.pop(_PRECISION, None)
        looks = {"evaluate": values.pop("evaluate")} if "evaluate" in values else {}
        if wrong := sorted(kinds.keys() ^ values.keys()):
            raise FederatedConfigError("unknown or missing keys: " + ", ".join(wrong))
        if wrong := sorted(key for key, kind in kinds.items() if type(values[key]) is not kind):
            raise FederatedConfigError("keys of the wrong type: " + ", ".join(wrong))
        try:
            plan = {key: plan_from(value) for key, value in looks.items()}
            return cls(**{**values, "task": task_from_table(values["task"]), **plan})
        except FederatedConfigError:
            raise
        except TaskError as fault:
            raise FederatedConfigError("; ".join(f"task: {problem}" for problem in fault.problems)) from None
        except ValueError as fault:
            raise FederatedConfigError(str(fault)) from fault

    def _check(self) -> None:
        """Refuse what cannot be trained."""
        if not 1 <= self.parameters <= MOST_PARAMETERS:
            raise FederatedConfigError(f"parameters: 1 to {MOST_PARAMETERS}")

    def _sgd(self, noise_multiplier: float, steps: int) -> PrivateSgd:
        constants = self.task.training
        return PrivateSgd(
            sampling_rate=constants.sampling_rate,
            noise_multiplier=noise_multiplier,
            steps=steps,
            clip=constants.clip,
            images_per_patient=constants.images_per_patient * constants.views,
            expected_batch=constants.expected_batch,
        )


def training_claim(task: Task, noise_multiplier: float) -> SubsampledGaussian:
    """What all steps of a task's training at one site promise together."""
    constants = task.training
    return SubsampledGaussian(constants.sampling_rate, noise_multiplier, constants.steps_per_round * constants.rounds)


@dataclass(frozen=True, slots=True)
class Federated(_OfTask):
    """Public configuration of one federated training: constants, none of them derived from patients."""

    task: Task
    parameters: int  # p, that the task trains
    noise_multiplier: float  # sigma of a step at each site, in units of the task's clip
    evaluate: EvaluationPlan | None = None  # None: nobody looks at how good the model is
    update_precision: str = FLOAT32  # of the numbers that leave in a round: FLOAT32 or BFLOAT16

    name: ClassVar[str] = "federated"

    def __post_init__(self) -> None:
        """Refuse what cannot be priced, trained or compared."""
        self._check()
        if self.update_precision not in (BFLOAT16, FLOAT32):
            raise FederatedConfigError(f"{_PRECISION}: {BFLOAT16} or {FLOAT32}")
        self._job()
        self.claim()
        if not self.task.training.proximal * self.learning_rate <= 1.0:
            raise FederatedConfigError("task: training.proximal: at most 1 / learning_rate, else its steps overshoot")
        if self.evaluate is not None:
            self.layout()

    @property
    def steps_per_round(self) -> int:
        """Private steps of each round."""
        return self.task.training.steps_per_round

    @property
    def learning_rate(self) -> float:
        """Of each step: written in the task, or found for the noise."""
        return self.task.rate(self.parameters, self.noise_multiplier)

    @property
    def form(self) -> str:
        """SHA-256 of the whole configuration."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def claim(self) -> SubsampledGaussian | Evaluated:
        """What all rounds and looks together promise. It is settled before an image is read."""
        training = training_claim(self.task, self.noise_multiplier)
        return training if self.evaluate is None else self.evaluate.claim(training)

    def run_look(
        self,
        cohort: TaskCohort,
        update: Update,
        entropy: Entropy,
        files: PublicFiles = NO_FILES,
        plan: ComputePlan = _HERE,
    ) -> Update:
        """The noisy sums of one look at the global parameters ``update``: how good they are on ``cohort``.

        The patients are those held out. Of an empty cohort there is as much noise: a refusal would reveal whether
        there is a single patient.

        Returns:
            (layout.size,) sums, see :mod:`policies.tasks.evaluation`.
        Raises:
            ValueError: the update or the images have another shape than the configuration.
        """
        assert self.evaluate is not None, "a look is priced"
        with told_by_task(self.task, plan):
            network = self.network(update.vector, files, update.head).to(plan.device)
            return Update(
                private_look(self.layout(), scored(self.task, network, cohort), self.evaluate.noise, entropy)
            )

    def run_round(  # noqa: PLR0913 - the last four are how and where it is computed
        self,
        cohort: TaskCohort,
        update: Update,
        entropy: Entropy,
        bench: Workspace = _NO_BENCH,
        files: PublicFiles = NO_FILES,
        plan: ComputePlan = _HERE,
        *,
        place: RoundPlace | None = None,
    ) -> Update:
        """Train ``steps_per_round`` private steps from the global parameters ``update``.

        Momentum, the proximal term and the moving average see noisy gradients and the parameters that these made,
        and begin anew in each round: they are post-processing. Examples without a target that the task knows are
        left out, and so is a patient with no others; both depend on that patient's own record alone, so the claim
        holds. An empty cohort trains on noise like any other: a refusal would reveal whether there is a single
        patient. A round that was interrupted goes on from its checkpoint in ``place``.

        A head of the site's own is part of what is clipped and gets the same noise: all p + h numbers together are
        what the claim releases, and that the site sends only p of them is post-processing. A head that trained
        without noise would carry patients into every later gradient of the p, beyond any clip of one of them.

        Returns:
            The new parameters (p,), and the site's own head (h,) if the task has such.
        Raises:
            ValueError: the update or the images have another shape than the configuration.
        """
        with told_by_task(self.task, plan):
            network = self.network(update.vector, files, update.head).to(plan.device)
            return self._trained(network, cohort, entropy, bench, plan, place)

    def _trained(
        self,
        network: TrainableNetwork,
        cohort: TaskCohort,
        entropy: Entropy,
        bench: Workspace,
        plan: ComputePlan,
        place: RoundPlace | None,
    ) -> Update:
        constants = self.task.training
        sgd = partial(RoundSgd, lr=self.learning_rate, momentum=constants.momentum, mu=constants.proximal)
        average = Average(network.trained, constants.ema)
        task = TrainingTask(network.trained, row_losses(self.task), sgd, follower=average)
        engine = fitted_engine(self.task, network, plan)
        patients = units(self.task, network, cohort, entropy)
        say = lambda at: bench.say("train", at.step, at.steps)  # noqa: E731 - one line
        run, every = ("", 0) if place is None else (place.run, place.every)
        train_privately(task, patients, self._job(), entropy, engine, place=place, run=run, every=every, say=say)
        average.give(network.trained)
        return Update(network.vector(), network.own_head())

    def _job(self) -> PrivateSgd:
        return self._sgd(self.noise_multiplier, self.steps_per_round)


@dataclass(frozen=True, slots=True)
class FederatedMasked(_OfTask):
    """Public configuration of a federated training whose updates are visible only as a secure sum.

    Every round is one step: between two steps a site's model would follow its own part, which bears a share of
    the noise alone. A part is a vector of whole steps of 2^-scale, none above ``value_bound``, so that
    ``sites`` of them add up in the ring of ``ring_bits`` without wrapping.
    """

    task: Task
    parameters: int  # p, that the task trains
    noise_multiplier: float  # sigma of the sum, in units of the task's clip
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
        self._check_steps()
        if not (0 <= self.scale <= 40 and self.ring_bits in (32, 64)):
            raise FederatedConfigError("scale: 0 to 40; ring_bits: 32 or 64")
        whole = self.value_bound * 2.0**self.scale
        if not (0.0 < whole <= MOST_STEPS_OF_VALUE and whole == math.floor(whole)):
            raise FederatedConfigError("value_bound: a positive multiple of 2^-scale, at most 2^52 of them")
        if not self.sites * whole < 2.0 ** (min(self.ring_bits, 54) - 1):
            raise FederatedConfigError("ring_bits: too few for the sum of all sites")
        noise, grid = self._noise(), self._grid()
        widened = grid * math.sqrt(self.parameters)
        if not (noise >= LEAST_NOISE_STEPS * grid and widened <= MOST_WIDENING * self.task.training.clip):
            raise FederatedConfigError("scale: too small, the steps of 2^-scale are not small beside noise and clip")
        if not self._room() >= self.task.training.clip + grid:
            raise FederatedConfigError("value_bound: too small for the noise and one patient's gradient")
        if self.evaluate is not None:
            self.look_ring()

    def _check_steps(self) -> None:
        """A round is one step of what all sites share."""
        constants = self.task.training
        if constants.steps_per_round != 1:
            raise FederatedConfigError("task: training.steps_per_round: 1, since a part bears a share of the noise")
        if constants.head == "own":
            raise FederatedConfigError(
                "task: training.head: shared in a masked run, since a head of its own would bear a share of the noise"
            )
        if constants.momentum or constants.ema or constants.proximal:
            raise FederatedConfigError(
                "task: training.momentum, ema, proximal: 0.0 with one step in a round; the strategy has a momentum"
            )

    def claim(self) -> DistributedGaussian | Evaluated:
        """What all rounds and looks together promise of the sums. It is settled before an image is read."""
        training = self._training()
        return training if self.evaluate is None else self.evaluate.claim(training)

    def _training(self) -> DistributedGaussian:
        rate = self.task.training.sampling_rate
        return DistributedGaussian(rate, self.noise_multiplier, self.rounds, self.sites, self.honest)

    def look_ring(self) -> tuple[int, SumLattice]:
        """How many sums a look has, and the lattice that they are on.

        Raises:
            EvaluationError: there are none for so many outputs, or the noise is too small.
        """
        assert self.evaluate is not None, "a look is priced"
        size = self.layout().size
        return size, SumLattice.of(self.evaluate.claim(self._training()), self.public_patients, size)

    def run_look(
        self,
        cohort: TaskCohort,
        update: Update,
        entropy: Entropy,
        files: PublicFiles = NO_FILES,
        plan: ComputePlan = _HERE,
    ) -> LatticePart:
        """As ``Federated.run_look``, of a secret sum: *this site's part*, with its share of the noise.

        Each number is in steps of 2^-scale, and exact.
        """
        _, lattice = self.look_ring()
        assert self.evaluate is not None
        share = self.evaluate.claim(self._training()).share
        box = float(self.public_patients), lattice.scale
        with told_by_task(self.task, plan):
            patients = scored(self.task, self.network(update.vector, files).to(plan.device), cohort)
            return LatticePart(masked_look(self.layout(), patients, share, box, entropy))

    @property
    def learning_rate(self) -> float:
        """Of each step: written in the task, or found for the noise of the mean of all parts."""
        return self.task.rate(self.parameters, self._training().share / math.sqrt(self.sites))

    def run_round(
        self,
        cohort: TaskCohort,
        update: Update,
        entropy: Entropy,
        bench: Workspace = _NO_BENCH,
        files: PublicFiles = NO_FILES,
        plan: ComputePlan = _HERE,
    ) -> LatticePart:
        """One private step from the global parameters ``update``: the change, *this site's part of a sum*.

        It bears noise_multiplier / sqrt(honest) of the noise and must leave masked only. Each coordinate of the
        clipped sum is boxed *before* the noise is added, so that with the noise, whose generator has an end, it stays
        within ``value_bound``: nothing is cut afterwards, and the noise of the sum is the sum of the noises. A sum of
        gradients beyond the box is understated; no neighbours come further apart by it. Rounding moves each
        coordinate by at most 2^-scale (half for the clipped sum, half for the noise), and so the mean of
        the parts; it is made here, once, and the part is whole numbers from here to the sum.

        Returns:
            Change of the parameters (p,), in steps of 2^-scale.
        Raises:
            ValueError: the update or the images have another shape than the configuration.
        """
        bench.say("train", 0, 1)
        box, loss = SecureSumGrid(self._grid(), self._room()), row_losses(self.task)
        with told_by_task(self.task, plan):
            network = self.network(update.vector, files).to(plan.device)
            engine = fitted_engine(self.task, network, plan)
            patients = units(self.task, network, cohort, entropy)
            whole = noisy_part(network.trained, loss, patients, self._job(), entropy, box, clipped_sum=engine)
        return LatticePart(-whole.astype(np.int64))

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
