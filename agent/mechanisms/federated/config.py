"""``model.toml``: the task file that one hospital trains alone, at which price, and whether the model is looked at.

The task file is the one of the rounds, unchanged. The price is what the site's ledger charges, at the order and the
delta of its account, with the look: the noise is found for it as ``round plan`` finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.domain import ExampleRule
from agent.mechanisms.common.config import needed
from agent.mechanisms.common.dp_config import PrivateFile, no_progress
from agent.mechanisms.federated.mechanism import Federated, PublicFiles, training_claim
from agent.mechanisms.federated.task_model import TaskModel
from agent.mechanisms.federated.task_training import network_of
from agent.toml_config import names_files
from policies.accounting.claims import Claim
from policies.accounting.rdp import least_noise
from policies.accounting.rounding import epsilon_text
from policies.ledger.entries import Opened
from policies.tasks.evaluation import TRAINED, USUAL_BINS, EvaluationPlan
from policies.tasks.task import Task, read_task

_TABLES: Final = ("mechanism", "task", "privacy", "evaluate")
MOST_EPSILON: Final = 100.0


@dataclass(frozen=True, slots=True)
class PriceTable:
    """``[privacy]``: what the model may cost each patient; how it is trained says the task."""

    epsilon: float | None = None  # as the site's ledger charges it, the look included: the noise follows
    noise_multiplier: float | None = None  # instead of it: sigma, in units of the task's clip

    def __post_init__(self) -> None:
        """One of the two."""
        if (self.epsilon is None) is (self.noise_multiplier is None):
            raise ValueError("write epsilon, from which the noise follows, or noise_multiplier; not both")
        if self.epsilon is not None and not 0.0 < self.epsilon <= MOST_EPSILON:
            raise ValueError("epsilon: above 0, and at most 100")


@dataclass(frozen=True, slots=True)
class LookTable:
    """``[evaluate]``: one look at the trained model, on patients who are held out of the training."""

    noise: float  # standard deviation, where one patient moves all sums together by at most 1
    held_out: int  # per cent of the patients, by a keyed hash and for ever
    bins: int = USUAL_BINS  # of scores, an even number

    def __post_init__(self) -> None:
        """Refuse what cannot be priced."""
        self.plan()

    def plan(self) -> EvaluationPlan:
        """As a job has it."""
        return EvaluationPlan(1, self.noise, self.held_out, self.bins)


@dataclass(frozen=True, slots=True)
class ModelSite:
    """What the site says of a model that is configured: its account, its files and its label tables."""

    account: Opened
    public_file: Callable[[str], bytes | None]  # by SHA-256, if it is here and vouched for
    label_misfit: Callable[[ExampleRule], str]  # why what is declared of labels here is not a task's; "": it is


def read_model(path: Path, site: ModelSite, say: Callable[[str, str], None] = no_progress) -> TaskModel:
    """Read what is trained alone: the task file beside the configuration, its public weights, and the noise.

    Args:
        path: of the TOML file.
        site: the account that pays, the public weights, the labels that are declared.
        say: told what takes some time: a step, and a detail of it.
    Raises:
        SiteConfigError: not TOML, with missing, unknown or senseless keys, all at once; no task; public weights that
            are not here; labels of another kind; or no noise for such a price.
    """
    file = PrivateFile.of(path, _TABLES, TaskModel.name)
    tables = file.tables
    named = tables.raw.get("task")
    if not isinstance(named, str) or not named:
        tables.problems.append('task: the name of a task file beside this one: task = "chest-triage.toml"')
    privacy = needed(tables, "privacy", PriceTable)
    look = tables.table("evaluate", LookTable) if "evaluate" in tables.raw else None
    file.refuse()
    assert isinstance(named, str)
    assert privacy is not None
    with file.in_words(frozenset()) as shelf:
        names_files(task=named)
        task = read_task(shelf.folder / named)
        if not float(site.account.delta) * task.training.public_patients < 1:
            raise ValueError(
                f"{named}: training.public_patients: below 1 / {site.account.delta}, the delta of the account (P1)"
            )
        files = _files(task, site.public_file)
        parameters, plan = network_of(task, files.__getitem__).parameters, look.plan() if look is not None else None
        made = TaskModel(Federated(task, parameters, _noise(task, plan, privacy, site.account, say), plan), files)
        if misfit := site.label_misfit(made.rules()[TRAINED]):
            raise ValueError(f"{named}: {misfit}")
    return made


def _files(task: Task, public_file: Callable[[str], bytes | None]) -> PublicFiles:
    found = {digest: public_file(digest) for digest in task.network.public_files}
    if missing := [digest for digest, raw in found.items() if raw is None]:
        raise ValueError(
            "network.weights: public weights that are not in the folder weights, or not among public_components of "
            f"site.toml: {', '.join(missing)}"
        )
    return {digest: raw for digest, raw in found.items() if raw is not None}


def _noise(
    task: Task,
    plan: EvaluationPlan | None,
    privacy: PriceTable,
    account: Opened,
    say: Callable[[str, str], None],
) -> float:
    """Written down; or the least for which the ledger charges no more than the price, the look included."""
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.epsilon is not None
    say("price", f"finding the noise for epsilon {epsilon_text(privacy.epsilon)} at delta {account.delta}")

    def claim(noise_multiplier: float) -> Claim:
        training = training_claim(task, noise_multiplier)
        return training if plan is None else plan.claim(training)

    return least_noise(claim, privacy.epsilon, [(float(account.delta), account.order)])
