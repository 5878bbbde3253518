"""How good networks are that three hospitals trained together with privacy: faint chests, written digits, livers.

Three sites of 500 patients train by real rounds of the product (:mod:`tests.support.federated_study`: the price as
the ledger charges it, looks included, each site's noisy steps, masks' whole numbers, the strategy; no Flower, no
seals). Held-out patients would come on top of the 500; the looks are paid and not used, the last round counts. Every
figure is a mean over seeds, each with patients, sites and noise of its own; the public networks are the same for all.
"share" is what lies above chance, AUC - 0.5, beside that of the best network here that was trained on all patients
together without privacy. Rates, rounds and clip were chosen on other made persons and on letters, never on those that
are tested here.

Livers are volumes, and a pass through a network costs so much that the default form has 50 patients a site, and
``--full`` 200. Privately the last layer is trained, 43 numbers on features that are computed once; beside it stands
the whole network, trained on all patients together without privacy. Dice is as a look sums it.

Two processes at a time, each of one thread.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor

from agent.domain import TaskCohort
from agent.dp.evaluation_sums import ScoredExample, look_sums
from agent.dp.noise import SystemEntropy
from agent.mechanisms.federated.mechanism import NO_FILES, PublicFiles
from agent.mechanisms.federated.task_training import as_seen
from agent.models.networks.public_training import PublicTask, PublicTraining
from coordinator.federation.job import MASKED, PLAIN
from deploy.phantoms.chest import FINDINGS
from deploy.phantoms.handwriting import CHARACTERS, glyphs
from deploy.reproduction.measures.chest_findings import area
from policies.tasks.evaluation import SumLayout
from policies.tasks.networks import NetworkSpec
from policies.tasks.task import Input, Labels, Loss, Task, Training
from policies.tasks.transforms import TransformSpec
from protos.artifacts.strict_safetensors import pack_weights
from tests.benchmarks import dp_networks, round_size
from tests.benchmarks.report import Report, Row
from tests.support import liver_phantoms as volumes
from tests.support.faint_chests import MACHINES, SIDE, Chests, hospital, public_chests
from tests.support.federated_study import SITES, Plain, Prepared, Setting, cohort, nonprivate, scored, trained

SEEDS: Final = (11, 12, 13, 14, 15)
PATIENTS: Final = 500  # of a site
TEST: Final = 134  # of each site's kind
EPSILONS: Final = (8.0, 3.0, 1.0)
PUBLIC_CHESTS: Final = 2000
GLYPHS: Final = 150  # of each of 62 characters
_PUBLIC_SEED: Final = 7
_PROCESSES: Final = 2
Figures = dict[str, float]
Quality = Callable[[NDArray[np.float32], NDArray[Any]], float]

# -- public starts


@dataclass(frozen=True, slots=True)
class PublicNetwork:
    """One network that is trained on public pictures."""

    name: str
    options: Mapping[str, int]
    steps: int
    seed: int

    @property
    def spec(self) -> NetworkSpec:
        return NetworkSpec(self.name, self.options)


CHEST_NETWORKS: Final = (
    PublicNetwork("small-cnn", {"width": 24, "convolutions": 4, "pooled": 3}, 400, 5),
    PublicNetwork("resnet18", {"width": 24, "stride": 2}, 400, 3),
)
DIGIT_NETWORKS: Final = (
    PublicNetwork("small-cnn", {"width": 32, "convolutions": 3, "pooled": 2}, 1500, 1),
    PublicNetwork("small-cnn", {"width": 32, "convolutions": 2, "pooled": 3}, 1500, 2),
)
_NORMAL: Final = (TransformSpec("NormalizeIntensity"),)


@dataclass(frozen=True, slots=True)
class Start:
    """Public networks: files by digest, and what each is of."""

    networks: tuple[NetworkSpec, ...]  # with its weights, and its head where the outputs are the task's
    files: PublicFiles

    def side_by_side(self, evened: int) -> NetworkSpec:
        """One linear layer on all of them, which begins at their heads where they have the task's outputs."""
        heads = {one.options["head"] for one in self.networks}
        parts = tuple(replace(one, options={**one.options, "head": 0}) for one in self.networks)
        return NetworkSpec("frozen-features", {"head": min(heads), "centred": 1, "evened": evened}, parts=parts)


def public_start(
    networks: Sequence[PublicNetwork],
    pictures: NDArray[np.uint8],
    targets: NDArray[Any],
    folder: Path,
    pool: Executor,
    *,
    head: bool,
) -> Start:
    """Train networks on public pictures, by the product's own training; ``head``: their outputs are the task's."""
    where = [folder / f"{network.name}-{network.seed}" for network in networks]
    found = list(pool.map(partial(_public, pictures, targets), networks, where))
    digests = [hashlib.sha256(raw).hexdigest() for raw in found]
    specs = tuple(
        NetworkSpec(one.name, {**one.options, "head": int(head)}, weights=digest)
        for one, digest in zip(networks, digests, strict=True)
    )
    return Start(specs, dict(zip(digests, found, strict=True)))


def _public(pictures: NDArray[np.uint8], targets: NDArray[Any], network: PublicNetwork, where: Path) -> bytes:
    torch.set_num_threads(1)
    where.mkdir(parents=True, exist_ok=True)
    side = pictures.shape[1]
    task = PublicTask(network.spec, side, 1, _NORMAL, ())
    outputs = targets.shape[1] if targets.ndim == 2 else int(targets.max()) + 1
    return PublicTraining(task, pictures, targets, outputs, network.seed).run(
        network.steps, where, "cpu", lambda _: None, 200
    )


# -- tasks, and what was chosen for them on others


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rates of a step, by epsilon in the order of EPSILONS, and what goes with them."""

    local: tuple[float, float, float]
    central: tuple[float, float, float]  # 60 rounds of one
    alone: tuple[float, float, float]
    clip: float
    reach: float = 0.0  # of the product's own rule, where no rate is given; 0.0: the usual one
    rounds: int = 12  # of local steps
    steps: int = 5

    def rate(self, kind: str, epsilon: float) -> float:
        """Of "local", "central" or "alone"."""
        rates: tuple[float, float, float] = getattr(self, kind)
        return rates[EPSILONS.index(epsilon)]


CHESTS: Final = Chosen(local=(2.0, 0.7, 0.25), central=(6.0, 3.0, 0.8), alone=(1.0, 0.4, 0.12), clip=0.3)
# the product's own rule: policies.tasks.task.Training.rate, whose reach was chosen on written letters
BY_RULE: Final = Chosen(local=(0.0,) * 3, central=(0.0,) * 3, alone=(0.0,) * 3, clip=1.0)
DIGITS: Final = replace(BY_RULE, reach=12.0)  # on printed digits, blurred and noisy


def chest_task(network: NetworkSpec) -> Task:
    """Five findings of a picture, each there or not."""
    seen = Input("DX", (SIDE, SIDE), transforms=_NORMAL)
    labels = Labels(table="findings", columns=FINDINGS)
    return Task("chests", "multi-label", labels, seen, Loss(), Training(PATIENTS), network)


def digit_task(network: NetworkSpec) -> Task:
    """Ten digits of 16 x 16 pixels."""
    seen = Input("OT", (16, 16), transforms=_NORMAL)
    labels = Labels(classes=tuple(map(str, range(10))))
    return Task("digits", "classification", labels, seen, Loss(), Training(PATIENTS), network)


def halved(task: Task) -> Task:
    """The task for sites of half as many patients."""
    return replace(task, training=replace(task.training, public_patients=PATIENTS // 2))


def setting(task: Task, chosen: Chosen, kind: str, epsilon: float) -> Setting:
    """What is launched: local noise and several local steps, or one step a round and one noise on the sum."""
    masked = kind == "central"
    constants = replace(
        task.training,
        rounds=60 if masked else chosen.rounds,
        steps_per_round=1 if masked else chosen.steps,
        clip=chosen.clip,
        learning_rate=chosen.rate(kind, epsilon),
        reach=chosen.reach,
        momentum=0.0 if masked else 0.9,
    )
    return Setting(replace(task, training=constants), epsilon, MASKED if masked else PLAIN)


# -- one set of patients


@dataclass(frozen=True, slots=True, eq=False)
class Persons:
    """What the sites have, and who is tested."""

    sites: Mapping[str, TaskCohort]
    test: TaskCohort

    def first(self, patients: int) -> Persons:
        """With so many patients at each site, and the same test."""
        return replace(self, sites={site: TaskCohort(of.patients[:patients]) for site, of in self.sites.items()})


def rows_of(task: Task, cohorts: Sequence[TaskCohort]) -> tuple[Tensor, Tensor]:
    """All examples of all patients, as a network sees them: inputs and targets."""
    seen = [as_seen(task, example) for one in cohorts for patient in one.patients for example in patient.examples]
    inputs, targets = (torch.from_numpy(np.stack(parts)) for parts in zip(*seen, strict=True))
    return inputs, targets


def mean_area(said: NDArray[np.float32], shown: NDArray[Any]) -> float:
    """Mean over the findings of the area under the ROC curve."""
    return mean(area(said[:, k].astype(np.float64), shown[:, k] > 0.5) for k in range(shown.shape[1]))


def accuracy(said: NDArray[np.float32], shown: NDArray[Any]) -> float:
    """Share of pictures whose class comes first."""
    return float((said.argmax(axis=1) == shown[:, 0]).mean())


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """Private trainings of one task on one set of patients."""

    task: Task
    chosen: Chosen
    persons: Persons
    prepared: Prepared
    quality: Quality

    def run(self, kind: str, epsilon: float, sites: Sequence[str] = SITES) -> float:
        """How good it is on those that are tested."""
        launched = setting(self.task, self.chosen, kind, epsilon)
        job = launched.job(self.prepared.network.parameters, sites)
        vector = trained(job, self.persons.sites, self.prepared, SystemEntropy())
        return self.at(vector)

    def at(self, vector: NDArray[np.float32]) -> float:
        """How good the network is at a vector."""
        return self.quality(*self.prepared.answers(self.task, vector, self.persons.test))

    def untouched(self) -> float:
        """How good the start is."""
        return self.at(np.zeros(self.prepared.network.parameters, np.float32))

    def plain(self, spec: NetworkSpec, how: Plain, seed: int) -> float:
        """How good a network is that was trained on all patients together without privacy."""
        net = nonprivate(
            spec, self.task, how, rows_of(self.task, list(self.persons.sites.values())), self.prepared.files, seed
        )
        inputs, targets = rows_of(self.task, [self.persons.test])
        return self.quality(scored(net, inputs), targets.numpy())


def chest_persons(seed: int, patients: int = PATIENTS) -> Persons:
    """Three hospitals' patients, and others of each."""
    found = {}
    tested: list[Chests] = []
    for number, (site, machine) in enumerate(zip(SITES, MACHINES, strict=True)):
        rng = np.random.default_rng([seed, number])
        found[site] = _cohort(hospital(machine, patients, rng))
        tested.append(hospital(machine, TEST, np.random.default_rng([seed, 10 + number])))
    pictures = np.concatenate([one.pictures for one in tested])
    return Persons(found, _cohort(Chests(pictures, np.concatenate([one.findings for one in tested]))))


def _cohort(chests: Chests) -> TaskCohort:
    pictures = chests.pictures[:, :, None].astype(np.float32) / np.float32(255)
    return cohort(list(pictures), list(chests.findings.astype(np.float32)))


def digit_persons(seed: int) -> Persons:
    """Scikit-learn's digits: one picture of a patient; 1,500 at three sites, the others are tested."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    seen = np.kron(images.reshape(-1, 8, 8), np.ones((2, 2))).astype(np.float32)[order] / np.float32(16)
    told = labels.astype(np.int64)[order]
    parts = [
        cohort(list(seen[a:b, None, None]), list(told[a:b, None, None]))
        for a, b in ((0, 500), (500, 1000), (1000, 1500), (1500, len(seen)))
    ]
    return Persons(dict(zip(SITES, parts[:3], strict=True)), parts[3])


WHOLE: Final = Plain(epochs=6)


def chest_figures(start: Start, seed: int) -> Figures:
    """All trainings of one seed on chests, AUC."""
    torch.set_num_threads(1)
    persons, task = chest_persons(seed), chest_task(start.side_by_side(evened=1))
    study = Study(task, CHESTS, persons, Prepared.of(task, start.files), mean_area)
    found = {"untouched": study.untouched()}
    resnet = next(one for one in start.networks if one.name == "resnet18")
    found["plain resnet18"] = study.plain(resnet, WHOLE, seed)
    for epsilon in EPSILONS:
        found[f"local {epsilon:g}"] = study.run("local", epsilon)
        found[f"central {epsilon:g}"] = study.run("central", epsilon)
        found[f"site alone {epsilon:g}"] = max(study.run("alone", epsilon, (site,)) for site in SITES)
    half = replace(study, persons=persons.first(PATIENTS // 2), task=halved(task))
    for epsilon in EPSILONS:
        found[f"{PATIENTS // 2} patients, local {epsilon:g}"] = half.run("local", epsilon)
    logistic = chest_task(NetworkSpec("linear"))
    simple = Study(logistic, BY_RULE, persons, Prepared.of(logistic, NO_FILES), mean_area)
    for epsilon in EPSILONS:
        found[f"logistic local {epsilon:g}"] = simple.run("local", epsilon)
    return found


SMALL: Final = {"width": 16, "convolutions": 4, "pooled": 2}
PARTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "head": {"trained": "head"},
    "LoRA": {"trained": "lora", "blocks": 2, "rank": 4},
    "last block": {"trained": "last-blocks", "blocks": 1},
    "whole": {"trained": "all"},
}


def more_figures(start: Start, letters: Start, seed: int) -> Figures:
    """What the default form leaves out, AUC: parts of one small network, no public start, letters, half the patients.

    Rates of networks that are not linear are the product's own rule (``policies.tasks.task.Training.rate``).
    """
    torch.set_num_threads(1)
    persons = chest_persons(seed)
    public = next(one for one in start.networks if one.name == "small-cnn")
    found = {}
    for name, part in PARTS.items():
        task = chest_task(replace(public, **part))
        study = Study(task, BY_RULE, persons, Prepared.of(task, start.files), mean_area)
        for epsilon in EPSILONS:
            found[f"{name} {epsilon:g}"] = study.run("local", epsilon)
    study = Study(chest_task(public), BY_RULE, persons, Prepared.of(chest_task(public), start.files), mean_area)
    found["plain small-cnn"] = study.plain(public, WHOLE, seed)
    scratch = chest_task(NetworkSpec("small-cnn", SMALL))
    found["from scratch 8"] = Study(scratch, BY_RULE, persons, Prepared.of(scratch, NO_FILES), mean_area).run(
        "local", 8.0
    )
    found["plain from scratch"] = Study(scratch, BY_RULE, persons, Prepared.of(scratch, NO_FILES), mean_area).plain(
        scratch.network, WHOLE, seed
    )
    task = chest_task(letters.side_by_side(evened=1))
    found["letters 8"] = Study(task, CHESTS, persons, Prepared.of(task, letters.files), mean_area).run("local", 8.0)
    return found


def digit_figures(start: Start, seed: int) -> Figures:
    """All trainings of one seed on digits, accuracy."""
    torch.set_num_threads(1)
    task = digit_task(start.side_by_side(evened=0))
    study = Study(task, DIGITS, digit_persons(seed), Prepared.of(task, start.files), accuracy)
    found = {}
    for number, network in enumerate(start.networks):
        found[f"plain {number}"] = study.plain(network, Plain(epochs=30, shift=1), seed)
    for epsilon in EPSILONS:
        found[f"local {epsilon:g}"] = study.run("local", epsilon)
        found[f"central {epsilon:g}"] = study.run("central", epsilon)
    return found


# -- livers


@dataclass(frozen=True, slots=True)
class Livers:
    """How many volumes of 48 x 48 x 48 there are; the processor's time sets the bound."""

    patients: int = 50  # of a site
    test: int = 12  # of each site's kind
    public: int = 200


MANY_LIVERS: Final = Livers(patients=200, test=40)
LIVER_NETWORK: Final = NetworkSpec("segresnet", {"width": 8, "levels": 3})
LIVERS: Final = replace(BY_RULE, rounds=3, steps=3)  # 3 x 4 at a rate of 0.5, or clip 0.3: the same to 0.002
# without privacy, on others: after one epoch the same to 0.002 at rates of 3e-3 and 6e-3
PUBLIC_LIVERS: Final = Plain(epochs=3, rate=3e-3, batch=2, shift=0)
WHOLE_LIVERS: Final = Plain(epochs=2, rate=3e-3, batch=2, shift=0)


def liver_task(network: NetworkSpec, patients: int) -> Task:
    """Of each voxel whether it is of the liver, of a mass in it, or of neither."""
    seen = Input("CT", (volumes.SIDE,) * 3, transforms=_NORMAL)
    constants = Training(patients, images_per_patient=1)
    return Task("livers", "segmentation", Labels(classes=volumes.SEGMENTS), seen, Loss(), constants, network)


def liver_start(how: Livers) -> Start:
    """Of public volumes, from elsewhere: the whole network, its last layer too."""
    torch.set_num_threads(1)
    public = _liver_cohort(volumes.abdomens(volumes.PUBLIC, how.public, np.random.default_rng([_PUBLIC_SEED, 0])))
    task = liver_task(LIVER_NETWORK, how.public)
    net: Any = nonprivate(LIVER_NETWORK, task, PUBLIC_LIVERS, rows_of(task, [public]), NO_FILES, 1)
    raw = pack_weights({name: tensor.numpy() for name, tensor in net.net.state_dict().items()})
    digest = hashlib.sha256(raw).hexdigest()
    whole = replace(LIVER_NETWORK, options={**LIVER_NETWORK.options, "head": 1}, weights=digest)
    return Start((whole,), {digest: raw})


def liver_persons(seed: int, how: Livers) -> Persons:
    """Three hospitals' patients, one volume each, and others of each."""
    found, tested = {}, list[volumes.Abdomens]()
    for number, (site, scanner) in enumerate(zip(SITES, volumes.SCANNERS, strict=True)):
        found[site] = _liver_cohort(volumes.abdomens(scanner, how.patients, np.random.default_rng([seed, number])))
        tested.append(volumes.abdomens(scanner, how.test, np.random.default_rng([seed, 10 + number])))
    both = (np.concatenate(parts) for parts in zip(*((one.volumes, one.masks) for one in tested), strict=True))
    return Persons(found, _liver_cohort(volumes.Abdomens(*both)))


def _liver_cohort(of: volumes.Abdomens) -> TaskCohort:
    return cohort(list(of.volumes[:, None, None]), list(of.masks[:, None].astype(np.int64)))


def dice_of(said: NDArray[Any], shown: NDArray[Any]) -> float:
    """Mean over the segments of the mean over patients of Dice, as a look sums it: (n, *size) classes, both."""
    layout = SumLayout("segmentation", 1 + len(volumes.SEGMENTS), 2)
    sums = look_sums(layout, [[ScoredExample(one, true)] for one, true in zip(said, shown, strict=True)])
    parts = [sums[block.start : block.start + block.size] for block in layout.blocks]
    return mean(float(part[0] / part.sum()) for part in parts)


def dice_of_scores(said: NDArray[np.float32], shown: NDArray[Any]) -> float:
    """Of scores (n, classes, *size)."""
    return dice_of(said.argmax(axis=1), shown)


def threshold_dice(task: Task, persons: Persons, most: int = 20) -> float:
    """A voxel between two grey values is of a segment; they are those that do best on some who are trained on."""
    cut = np.linspace(-2.0, 3.0, 26)
    inputs, targets = rows_of(task, [TaskCohort(of.patients[:most]) for of in persons.sites.values()])
    bins, found = np.digitize(inputs[:, 0].numpy(), cut), []
    test, shown = (rows.numpy() for rows in rows_of(task, [persons.test]))
    tested = np.digitize(test[:, 0], cut)
    for segment in range(1, 1 + len(volumes.SEGMENTS)):
        both, all_of = (
            np.stack(
                [np.bincount(one[where], minlength=len(cut) + 1) for one, where in zip(bins, chosen, strict=True)]
            )
            for chosen in (targets.numpy() == segment, np.ones(bins.shape, np.bool_))
        )
        bands = [(low, high) for low in range(len(cut) + 1) for high in range(low + 1, len(cut) + 2)]
        overlaps = [
            (2 * both[:, a:b].sum(axis=1) / (all_of[:, a:b].sum(axis=1) + both.sum(axis=1))).mean() for a, b in bands
        ]
        low, high = bands[int(np.argmax(overlaps))]
        said, true = (tested >= low) & (tested < high), shown == segment
        sizes = said.sum(axis=(1, 2, 3)) + true.sum(axis=(1, 2, 3))
        found.append(float((2 * (said & true).sum(axis=(1, 2, 3)) / sizes).mean()))
    return mean(found)


def liver_rows(pool: Executor, public: Future[Start], how: Livers) -> Iterator[Figures]:
    """Of each seed, from one public start."""
    return pool.map(partial(liver_figures, public.result(), how), SEEDS)


def liver_figures(start: Start, how: Livers, seed: int) -> Figures:
    """All trainings of one seed on livers, Dice: the last layer privately, and the whole network without privacy."""
    torch.set_num_threads(1)
    (whole,), persons = start.networks, liver_persons(seed, how)
    task = liver_task(replace(whole, trained="head"), how.patients)
    study = Study(task, LIVERS, persons, Prepared.of(task, start.files), dice_of_scores)
    return {
        "threshold": threshold_dice(task, persons),
        "untouched": study.untouched(),
        "local 8": study.run("local", 8.0),
        "site alone 8": study.run("alone", 8.0, SITES[:1]),
        "plain whole": study.plain(whole, WHOLE_LIVERS, seed),
    }


# -- the whole


def pool_of() -> ProcessPoolExecutor:
    """Fresh processes of one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    return ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn"))


def chest_start(folder: Path, pool: Executor) -> Start:
    """Of public chests, from elsewhere."""
    pictures, shown = public_chests(PUBLIC_CHESTS, np.random.default_rng([_PUBLIC_SEED, 0]))
    return public_start(CHEST_NETWORKS, pictures, shown, folder, pool, head=True)


def digit_start(folder: Path, pool: Executor) -> Start:
    """Of letters and digits that nobody wrote."""
    pictures, labels, _ = glyphs(GLYPHS, 16, np.random.default_rng([_PUBLIC_SEED, 1]), "".join(CHARACTERS))
    return public_start(DIGIT_NETWORKS, pictures, labels, folder, pool, head=False)


def summary(prefix: str, unit: str, seeds: Sequence[Figures]) -> list[Row]:
    """Mean and standard error of each figure."""
    rows = []
    for what in seeds[0]:
        told = [one[what] for one in seeds]
        rows.append(Row(f"{prefix}: {what}", mean(told), unit))
        rows.append(Row(f"{prefix}: {what}, standard error", standard_error(told), unit))
    return rows


def standard_error(told: Sequence[float]) -> float:
    """Of a mean; 0 of a single figure."""
    return stdev(told) / len(told) ** 0.5 if len(told) > 1 else 0.0


def best_plain(seeds: Sequence[Figures]) -> str:
    """The network without privacy that is best by its mean."""
    return max((what for what in seeds[0] if what.startswith("plain")), key=lambda what: mean(s[what] for s in seeds))


def ratios_of(
    chests: Sequence[Figures], digits: Sequence[Figures], livers: Sequence[Figures]
) -> tuple[dict[str, float], list[Row]]:
    """The ratios of the benchmark, each the mean of the seeds' own, and their standard errors."""
    best = best_plain(digits)
    told = {
        "dp_vs_nonprivate_digits": [one["local 8"] / one[best] for one in digits],
        "dp_vs_nonprivate_digits_eps3": [one["local 3"] / one[best] for one in digits],
        "dp_vs_nonprivate_digits_eps1": [one["local 1"] / one[best] for one in digits],
    }
    best = best_plain(chests)
    for kind in ("local", "central"):
        for epsilon in EPSILONS:
            key = f"{kind} {epsilon:g}"
            told[f"chests_share_eps{epsilon:g}_{kind}"] = [(one[key] - 0.5) / (one[best] - 0.5) for one in chests]
    told["chests_share_logistic_eps8"] = [(one["logistic local 8"] - 0.5) / (one[best] - 0.5) for one in chests]
    for epsilon in EPSILONS:
        key = f"local {epsilon:g}"
        told[f"chests_over_best_site_eps{epsilon:g}"] = [one[key] - one[f"site alone {epsilon:g}"] for one in chests]
        told[f"chests_over_untouched_eps{epsilon:g}"] = [one[key] - one["untouched"] for one in chests]
    told["dice_vs_nonprivate"] = [one["local 8"] / one["plain whole"] for one in livers]
    for name in ("untouched", "threshold", "site alone 8"):
        told[f"dice_{name.replace(' ', '_')}_vs_nonprivate"] = [one[name] / one["plain whole"] for one in livers]
    errors = [Row(f"{key}, standard error", standard_error(values), "") for key, values in told.items()]
    return {key: mean(values) for key, values in told.items()}, errors


def letter_start(folder: Path, pool: Executor) -> Start:
    """Of letters, as large as the chests."""
    pictures, labels, _ = glyphs(40, SIDE, np.random.default_rng([_PUBLIC_SEED, 2]), "".join(CHARACTERS))
    return public_start((PublicNetwork("small-cnn", SMALL, 700, 5),), pictures, labels, folder, pool, head=False)


def full() -> Report:
    """What :func:`main` prints, and networks that are trained in part or whole; some hours on two cores."""
    with tempfile.TemporaryDirectory() as name, pool_of() as pool:
        chests, letters = chest_start(Path(name) / "chests", pool), letter_start(Path(name) / "letters", pool)
        more = list(pool.map(partial(more_figures, chests, letters), SEEDS))
        livers = list(liver_rows(pool, pool.submit(liver_start, MANY_LIVERS), MANY_LIVERS))
    report = main()
    rows = summary("chests", "AUC", more) + summary(f"livers, {MANY_LIVERS.patients} a site", "Dice", livers)
    return Report((*report.rows, *rows), report.ratios)


def main() -> Report:
    """Some fifty minutes on two cores, and a quarter of an hour for the livers."""
    with tempfile.TemporaryDirectory() as name, pool_of() as pool:
        folder, public = Path(name), pool.submit(liver_start, Livers())  # while the other process has digits
        digits = list(pool.map(partial(digit_figures, digit_start(folder / "digits", pool)), SEEDS))
        chest_seeds = pool.map(partial(chest_figures, chest_start(folder / "chests", pool)), SEEDS)
        liver_seeds = liver_rows(pool, public, Livers())  # nobody waits for the last of the chests
        chests, livers = list(chest_seeds), list(liver_seeds)
    ratios, errors = ratios_of(chests, digits, livers)
    rows = summary("digits", "accuracy", digits) + summary("chests", "AUC", chests)
    rows += summary("livers", "Dice", livers) + errors
    steps, size = dp_networks.main(), round_size.main()
    ratios |= {key: value for key, value in steps.ratios.items() if key.startswith(("step_", "memory_"))}
    ratios["governed_vs_bare_11m"] = size.ratios["governed_vs_bare_11m"]
    return Report((*rows, *steps.rows, *size.rows), ratios)
