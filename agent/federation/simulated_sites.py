"""Simulated sites over a folder of public images: what a hospital's agent would train and release, and two controls.

A round and a look are the mechanisms' own (:mod:`agent.mechanisms.federated.mechanism`), with their noise. Beside
them stand two things that no site does: training without clipping and noise, and exact figures on patients whom
nobody trains on. Both show what they read, so they read a public folder and nothing else: there is no vault here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import LatticePart, TaskCohort, Update
from agent.dp.clipping import PrivacyUnit, RowLosses, trainable
from agent.dp.evaluation_sums import look_sums
from agent.dp.noise import SystemEntropy
from agent.errors import DivergedError
from agent.federation.public_folder import PublicFolder, PublicFolderError
from agent.federation.run_mechanism import as_sent
from agent.mechanisms.federated.mechanism import NO_FILES, Federated, FederatedMasked, PublicFiles
from agent.mechanisms.federated.task_training import RoundSgd, network_of, row_losses, scored, units
from agent.models.diffusion.edm_training import Average
from agent.models.networks.trainable import TrainableNetwork
from policies.tasks.evaluation import HELD_OUT, MOST_BINS, TRAINED, SumLayout
from policies.tasks.task import Training
from protos.artifacts.bfloat16 import widened

CHOOSING: Final = "choosing"  # patients on whom the learning rate without privacy is chosen
TEST: Final = "test"  # patients on whom everything is compared
LEAST_SPARE: Final = 20  # of both together
_TOGETHER: Final = 32  # patients of one backward pass
_MOST_KEPT: Final = 1 << 14  # numbers of one picture's features
_FEATURES: Final[dict[str, dict[bytes, Tensor]]] = {}  # digest of a task -> what is remembered of its pictures


@dataclass(frozen=True, slots=True, eq=False)
class _Remembering(TrainableNetwork):
    """A network that runs its frozen stages once for each picture: a real site does so anew in each round."""

    # digest of a picture -> what the frozen stages make of it, (1, ...)
    kept: dict[bytes, Tensor] = field(default_factory=dict)

    def prepare(self, inputs: Tensor) -> Tensor:
        """As ever, but from memory where it can be."""
        if not self.trained.first:
            return inputs
        return torch.cat([self._of(row) for row in torch.split(inputs, 1)])

    def _of(self, row: Tensor) -> Tensor:
        key = hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest()
        if key in self.kept:
            return self.kept[key]
        found = TrainableNetwork.prepare(self, row)
        if found.numel() <= _MOST_KEPT:
            self.kept[key] = found
        return found


class _OnThisMachine:
    """What a simulated site's mechanism does otherwise than a real one's: it remembers features."""

    __slots__ = ()

    def network(
        self,
        vector: NDArray[np.float32] | None = None,
        files: PublicFiles = NO_FILES,
        head: NDArray[np.float32] | None = None,
    ) -> TrainableNetwork:
        """The task's network; views that are drawn anew in each round are not remembered."""
        made: TrainableNetwork = super().network(vector, files, head)  # type: ignore[misc] # of the mechanism behind it
        if self.task.training.augmentation:  # type: ignore[attr-defined] # the same
            return made
        kept = _FEATURES.setdefault(self.task.digest, {})  # type: ignore[attr-defined] # the same
        return _Remembering(made.module, made.trained, made._start, made._own, kept)


class SimulatedPlain(_OnThisMachine, Federated):
    """``federated`` at a simulated site."""

    __slots__ = ()


class SimulatedMasked(_OnThisMachine, FederatedMasked):
    """``federated-masked`` at a simulated site."""

    __slots__ = ()


Simulated = SimulatedPlain | SimulatedMasked


def simulated_mechanism(config: str) -> Simulated:
    """The mechanism of a public configuration: only one has this key.

    Raises:
        FederatedConfigError: it is neither's.
    """
    return (SimulatedMasked if '"ring_bits"' in config else SimulatedPlain).from_json(config)


@dataclass(frozen=True, slots=True)
class Deal:
    """Who is where: sites' patients, those to choose on and those to test on, each patient once."""

    sites: Mapping[str, tuple[str, ...]]
    parts: Mapping[str, tuple[str, ...]]  # CHOOSING and TEST

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[str]], sizes: Mapping[str, int], seed: int) -> Deal:
        """Deal the patients out.

        Args:
            groups: the table's site, or "" -> its patients. Where the table names every site of the job, each gets
                patients of its own; else all are drawn from together.
            sizes: site -> how many.
            seed: whom the sites get and who is left to test on. Those to choose on are the same for every seed.
        Raises:
            PublicFolderError: there are too few.
        """
        own = sizes.keys() <= groups.keys()
        pools = groups if own else {"": sorted(name for group in groups.values() for name in group)}
        wanted = {name: {name: sizes[name]} if name in sizes else {} for name in pools} if own else {"": dict(sizes)}
        sites: dict[str, tuple[str, ...]] = {}
        choosing: list[str] = []
        test: list[str] = []
        for name, group in pools.items():
            there, needed = [group[at] for at in np.random.default_rng(0).permutation(len(group))], wanted[name]
            spare = len(there) - sum(needed.values())
            if spare < 0:
                of = f" of {name}" if own else ""
                raise PublicFolderError(
                    f"labels.csv: {len(there)} patients{of}, and the simulated sites need {sum(needed.values())}: "
                    "give a larger folder, or fewer --patients"
                )
            choosing += there[: spare // 3]
            rest = there[spare // 3 :]
            rest = [rest[at] for at in np.random.default_rng([seed, 1]).permutation(len(rest))]
            for site, count in needed.items():
                sites[site], rest = tuple(sorted(rest[:count])), rest[count:]
            test += rest
        if len(choosing) + len(test) < LEAST_SPARE:
            raise PublicFolderError(
                f"labels.csv: {len(choosing) + len(test)} patients are left to test on, and {LEAST_SPARE} are needed"
                ": give a larger folder, or fewer --patients"
            )
        return cls(sites, {CHOOSING: tuple(sorted(choosing)), TEST: tuple(sorted(test))})

    def part(self, site: str, part: str, held_out: int) -> tuple[str, ...]:
        """A site's patients who are trained on, or held out; so many per cent are, by the site's own choice."""
        patients = self.sites[site]
        order = np.random.default_rng([2, len(patients)]).permutation(len(patients))
        kept = frozenset(order[: math.floor(len(patients) * held_out / 100)].tolist())
        return tuple(name for at, name in enumerate(patients) if (at in kept) is (part == HELD_OUT))


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedSites:
    """Sites that all lie on this machine, and what they are asked."""

    folder: PublicFolder
    files: PublicFiles  # of public weights
    sizes: Mapping[str, int]  # site -> patients
    _deals: dict[int, Deal] = field(default_factory=dict, repr=False)

    def deal(self, seed: int) -> Deal:
        """Who is where, for one seed.

        Raises:
            PublicFolderError: there are too few.
        """
        if seed not in self._deals:
            self._deals[seed] = Deal.of(self.folder.groups, self.sizes, seed)
        return self._deals[seed]

    def round(
        self, mechanism: Simulated, site: tuple[str, int], start: NDArray[np.float32]
    ) -> NDArray[np.float32] | NDArray[np.int64]:
        """What a site releases in a round, as in a run: parameters (p,), or its part (p,) of a secret sum.

        Args:
            mechanism: of the run.
            site: its name, and the seed of the deal.
            start: (p,), the global parameters.
        Raises:
            DivergedError: a parameter is not finite any more.
        """
        cohort = self._cohort(self._patients(mechanism, site, TRAINED))
        made = mechanism.run_round(cohort, Update(start), SystemEntropy(), files=self.files)
        return widened(as_sent(mechanism, made)) if isinstance(made, Update) else made.steps

    def look(
        self, mechanism: Simulated, site: tuple[str, int], start: NDArray[np.float32]
    ) -> NDArray[np.float32] | NDArray[np.int64]:
        """The noisy sums of a site's held-out patients, as in a run. Arguments as for :meth:`round`."""
        cohort = self._cohort(self._patients(mechanism, site, HELD_OUT))
        return _numbers(mechanism.run_look(cohort, Update(start), SystemEntropy(), self.files))

    def round_without_privacy(
        self, mechanism: Simulated, site: tuple[str, int], start: NDArray[np.float32], rate: float
    ) -> NDArray[np.float32]:
        """The same steps on the same patients with another learning rate, and without clipping and noise: (p,).

        Raises:
            DivergedError: a parameter is not finite any more.
        """
        network, constants = mechanism.network(start, self.files), mechanism.task.training
        cohort = self._cohort(self._patients(mechanism, site, TRAINED))
        patients = units(mechanism.task, network, cohort, SystemEntropy())
        steps = OpenSteps(constants, rate, np.random.default_rng())
        steps.take(network.trained, row_losses(mechanism.task), patients)
        return network.vector()

    def exact_sums(
        self, mechanism: Simulated, part: tuple[str, int, int, int], vector: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """The sums of a look without noise, over patients whom no site has: (layout.size,).

        Args:
            mechanism: of the run.
            part: CHOOSING or TEST; the seed of the deal; which of how many shares of these patients.
            vector: (p,), the model.
        """
        name, seed, share, shares = part
        task = mechanism.task
        cohort = self._cohort(self.deal(seed).parts[name][share::shares])
        network = mechanism.network(vector, self.files)
        return look_sums(SumLayout(task.kind, task.outputs, MOST_BINS), scored(task, network, cohort))

    def parameters(self) -> int:
        """How many the task trains.

        Raises:
            PublicFolderError: a file of public weights is not there.
        """
        task = self.folder.task
        if lacking := [digest for digest in task.network.public_files if digest not in self.files]:
            raise PublicFolderError(
                f"network.weights: give the file of each digest by --weights: {', '.join(lacking)}"
            )
        return network_of(task, self.files.__getitem__).parameters

    def _patients(self, mechanism: Simulated, site: tuple[str, int], part: str) -> tuple[str, ...]:
        plan = mechanism.evaluate
        return self.deal(site[1]).part(site[0], part, 0 if plan is None else plan.held_out)

    def _cohort(self, names: Sequence[str]) -> TaskCohort:
        found = (self.folder.patient(name) for name in names)
        return TaskCohort(tuple(patient for patient in found if patient is not None))


def _numbers(made: Update | LatticePart) -> NDArray[np.float32] | NDArray[np.int64]:
    return made.vector if isinstance(made, Update) else made.steps


@dataclass(frozen=True, slots=True, eq=False)
class OpenSteps:
    """The steps of a round without privacy: of public patients alone, since what they make shows them."""

    constants: Training
    rate: float
    rng: np.random.Generator

    def take(self, model: nn.Module, loss: RowLosses, patients: Sequence[PrivacyUnit]) -> None:
        """Train ``model`` in place.

        A step draws patients as a private one does, and follows the mean gradient of those that it drew.

        Raises:
            DivergedError: a parameter is not finite any more.
        """
        c = self.constants
        parameters = trainable(model)
        optimizer = RoundSgd(parameters, lr=self.rate, momentum=c.momentum, mu=c.proximal)
        average = Average(model, c.ema)
        for step in range(1, c.steps_per_round + 1):
            drawn = [unit for unit in patients if self.rng.random() < c.sampling_rate]
            optimizer.zero_grad()
            for at in range(0, len(drawn), _TOGETHER):
                rows, weights = self._rows(drawn[at : at + _TOGETHER], len(drawn))
                (loss(model, rows) * weights.to(parameters[0])).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            average.after(step)
            if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
                raise DivergedError(f"at step {step}: parameters are not finite")
        average.give(model)

    def _rows(self, drawn: Sequence[PrivacyUnit], patients: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The rows of some patients in one batch, each weighted so that every patient of the step counts alike."""
        most = self.constants.images_per_patient * self.constants.views
        chosen = [torch.from_numpy(np.sort(self.rng.permutation(len(unit))[:most])) for unit in drawn]
        pairs = list(zip(drawn, chosen, strict=True))
        rows = tuple(torch.cat([unit.rows[i][rows] for unit, rows in pairs]) for i in range(len(drawn[0].rows)))
        return rows, torch.cat([torch.full((len(rows),), 1.0 / (len(rows) * patients)) for rows in chosen])
