"""What a round or a look makes of a site's patients in a confined process; a round that is interrupted goes on.

The steps of a round in clear are kept sealed in the vault (:mod:`agent.mechanisms.federated.round_training`). Where
its process is ended from outside, or an accelerator is lost, the same answer goes on at the newest step. Where the
service itself was ended, the round goes on when it is asked for again, and is not paid again: nothing of it has left.
A fault of the training's own is an end, and what was begun is paid.

The steps are bound to run, plan, grant, number and start of the round, and to the very examples. Where patients or
images came or went meanwhile, or a patient opted out, what was kept is deleted, and the round begins anew at the
price that its grant has paid. Which of the two happens hangs on no draw of noise.

Answers leave by the time since their question (:mod:`agent.federation.answer_pace`). What a resumed round has taken
is scaled to a whole one before a time is chosen by it. That is an estimate: where steps take unequal time, its own
answer and the later ones may leave at another time than those of a round that was never interrupted.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, Self

import numpy as np

from agent.domain import TaskCohort, Update
from agent.dp.compute_device import CPU, AcceleratorLostError, SiteCompute
from agent.dp.noise import Entropy
from agent.errors import OtherRunError, ReviewRejectedError, SiteStorageError, TrainingCheckpointError
from agent.federation import own_heads
from agent.federation.answer_pace import RoundWork, RunPaces
from agent.federation.part_watch import PartView, PartWatch
from agent.federation.run_mechanism import Made, patients_bound
from agent.federation.run_plan import RunPlan
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError, FederatedMasked, PublicFiles
from agent.mechanisms.federated.round_training import STEPS, RoundTraining
from agent.models.training_loop import load_state
from agent.release.maker_process import MakerEndedError
from agent.release.pipeline import check_opt_outs
from agent.release.ports import ClearableCheckpointStore, SiteContext, VaultPort
from policies.review.rules import Finding, Verdict
from policies.tasks.evaluation import HELD_OUT
from protos.common.canonical_json import canonical
from protos.federation.round_times import RoundTerms

MOST_RESTARTS: Final = 3  # within one answer; then whoever asked hears that the site cannot
_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM})  # any other signal is the process's own fault


def digest_of_model(model: Update) -> str:
    """SHA-256 of parameters, and of a head of the site's own beside them."""
    told = hashlib.sha256()
    for part in [model.vector] if model.head is None else [model.vector, model.head]:
        told.update(len(part).to_bytes(8, "big"))
        told.update(np.ascontiguousarray(part, "<f4").data)
    return told.hexdigest()


@dataclass(frozen=True, slots=True)
class UnfinishedRound:
    """A round that was begun and has no end yet: if it is asked for again, it is paid already."""

    number: int
    start: str  # SHA-256 of the parameters that it starts from, and of a head of the site's own

    @classmethod
    def of(cls, number: int, start: Update) -> Self:
        """A round by its number and its start."""
        return cls(number, digest_of_model(start))

    @classmethod
    def of_note(cls, note: Mapping[str, Any]) -> Self | None:
        """As the part's note has it; None: every round that was begun has an end."""
        return cls(**note["unfinished"]) if note.get("unfinished") else None


class RoundPart(PartView, Protocol):
    """What is needed of a :class:`agent.federation.participant.Participant`."""

    site: SiteContext
    entropy: Entropy
    mechanism: Federated | FederatedMasked | None
    unfinished: UnfinishedRound | None
    terms: RoundTerms
    watch: PartWatch
    paces: RunPaces
    compute: SiteCompute

    def clock(self) -> float:
        """Seconds."""

    def effort(self) -> float:
        """Seconds of work in trainings so far."""

    def plan_of(self, run: str, mechanism: Federated | FederatedMasked, terms: RoundTerms) -> RunPlan:
        """What the run does here."""


def goes_on(fault: Exception) -> bool:
    """Whether a round that ended so was interrupted: by what is none of the training's, and tells nothing of it.

    A disk that is full is one: nothing could have been sealed either.
    """
    if isinstance(fault, MakerEndedError):
        return fault.number in _FROM_OUTSIDE
    return isinstance(fault, (AcceleratorLostError, SiteStorageError, OSError))


def forget_steps(vault: VaultPort) -> None:
    """Nothing stays of the steps of a round."""
    if STEPS in vault.places(STEPS):
        vault.place(STEPS).clear()


def public_files(site: SiteContext, mechanism: Federated | FederatedMasked) -> PublicFiles:
    """The files of public weights that a task begins at, of those that the site vouches for.

    Raises:
        FederatedConfigError: one is not here.
    """
    found = {digest: site.public_file(digest) for digest in mechanism.task.network.public_files}
    if missing := [digest for digest, raw in found.items() if raw is None]:
        raise FederatedConfigError(
            f"task: public weights that this site does not have, or does not vouch for: {', '.join(missing)}"
        )
    return {digest: raw for digest, raw in found.items() if raw is not None}


def make(part: RoundPart, whom: str, model: Update) -> tuple[Made, frozenset[str]]:
    """What a confined process makes of the patients ``whom``, and of whom it is.

    Args:
        part: its round or look was begun.
        whom: those who are trained on, or those held out for a look.
        model: the global parameters.
    Raises:
        ReviewRejectedError: a patient in it has opted out meanwhile, or a person here has the site leave the run.
        AcceleratorLostError, MakerEndedError, SiteStorageError: the round may go on, see :func:`goes_on`.
    """
    assert part.mechanism is not None
    part.training = True
    part.paces.begun(look=whom == HELD_OUT)
    part.watch.changed(part)
    began = part.clock()
    try:
        cohort = part.site.examples(part.mechanism.examples(whom, part.run))
        held = digest_of_cohort(cohort) if part.unfinished is not None else ""
        read = part.clock()
        asked = _Asked.of(part, whom, cohort, own_heads.beside(part.site.vault, part.run, model), held)
        made = asked.made(part, read - began, part.clock() - read)
    finally:
        part.training = False
    persons = frozenset(patient.pseudonym for patient in cohort.patients)
    check_opt_outs(part.site, persons)
    return made, persons


@dataclass(slots=True)
class RoundSteps:
    """Where a round's steps are kept while it is trained, on this side of the wall: a workspace's place."""

    vault: VaultPort
    round: str  # of which round they are
    steps: int  # of the whole round
    persons: frozenset[str]  # of whom they are
    clock: Callable[[], float]
    kept: int = 0  # of the steps, when the newest process began
    began: float = 0.0  # when it began to step: all before it took as long as in a round that nothing interrupted
    keeping: float = 0.0  # seconds since then in which steps were sealed, which hang on no patient

    @property
    def _place(self) -> ClearableCheckpointStore:
        return self.vault.place(STEPS)

    def read(self) -> bytes | None:
        """The newest checkpoint of this very round; another's, and one that is damaged, is deleted.

        Raises:
            SiteStorageError: the vault cannot be read, or was changed.
        """
        raw, self.kept = self._place.read(), 0
        if raw is not None:
            try:
                self.kept, _ = load_state(raw, self.round)
            except (OtherRunError, TrainingCheckpointError):
                self._place.clear()
                raw = None
        self.began, self.keeping = self.clock(), 0.0
        return raw

    def write(self, data: bytes) -> None:
        """Replace it, all or nothing. Nothing is kept any more of a patient who has opted out meanwhile.

        Raises:
            SiteStorageError: the vault failed; the one before is still there.
        """
        began = self.clock()
        if self.vault.opted_out().isdisjoint(self.persons):
            self._place.write(data)
        else:
            self._place.clear()
        self.keeping += self.clock() - began

    def whole_round(self, begun: float, now: float) -> tuple[float, float]:
        """What a whole round takes by what the newest process took since ``begun``: seconds of it, and of keeping."""
        more = self.steps / max(self.steps - self.kept, 1)
        stepping = max(now - self.began, 0.0)
        return now - begun + stepping * (more - 1.0), self.keeping * more


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A call for a confined process, again and again."""

    call: Callable[..., Made]
    cohort: TaskCohort
    model: Update
    files: PublicFiles
    bench: tuple[Workspace, ...]  # one, or none
    whom: str
    steps: RoundSteps | None  # None: it begins anew, or not at all

    @classmethod
    def of(cls, part: RoundPart, whom: str, cohort: TaskCohort, model: Update, held: str) -> Self:
        """The round or the look that was begun; ``held``: the digest of the cohort, where steps are kept."""
        mechanism = part.mechanism
        assert mechanism is not None
        files = public_files(part.site, mechanism)
        if whom == HELD_OUT:
            return cls(mechanism.run_look, cohort, model, files, (), whom, None)
        if not isinstance(mechanism, Federated) or part.unfinished is None:
            return cls(mechanism.run_round, cohort, model, files, (Workspace(say=part.watch.trains),), whom, None)
        persons = frozenset(patient.pseudonym for patient in cohort.patients)
        name = _name(part, part.unfinished, held)
        steps = RoundSteps(part.site.vault, name, mechanism.steps_per_round, persons, part.clock)
        own = mechanism.network(files=files).own_head() if mechanism.task.training.head == "own" else None
        training = RoundTraining(mechanism, name, 0 if own is None else len(own))
        bench = Workspace(lambda _: steps, part.watch.trains)
        return cls(training.run_round, cohort, model, files, (bench,), whom, steps)

    def made(self, part: RoundPart, reading: float, ready: float) -> Made:
        """Ask a process, and another one where it was interrupted.

        Args:
            part: whose round or look it is.
            reading: seconds that it took to read the patients.
            ready: seconds after it, in which files were read and nothing of a patient.
        """
        again = MOST_RESTARTS if self.steps is not None else 0
        while True:
            _check_leaving(part)
            begun, before = part.clock(), part.effort()
            try:
                last = self.files, part.compute.plan
                made: Made = part.site.run(self.call, self.cohort, self.model, part.entropy, *self.bench, *last)
            except (AcceleratorLostError, MakerEndedError) as fault:
                told = self._interrupted(part, fault, again)
                again -= 1
                part.site.say("round", f"{part.begun}: {told}; it goes on at its newest step that is kept")
                continue
            _check_leaving(part)
            self._paced(part, (reading, ready), begun, before)
            return made

    def _interrupted(self, part: RoundPart, fault: AcceleratorLostError | MakerEndedError, again: int) -> str:
        """What happened, where another process goes on.

        Raises:
            AcceleratorLostError, MakerEndedError: none does.
        """
        if isinstance(fault, MakerEndedError):
            if not again or not goes_on(fault):
                raise fault
            return f"the process that trains it was ended by signal {fault.number}"
        part.paces.choose_anew = True
        told = part.compute.lost()
        if not again or part.compute.plan.device != CPU:
            raise AcceleratorLostError(told) from None
        part.paces.begun(look=False)  # on this machine, as it is from here on
        return told

    def _paced(self, part: RoundPart, before_it: tuple[float, float], begun: float, before: float) -> None:
        """By what was taken, and by a round of nobody, the answer's time is chosen."""
        assert part.mechanism is not None
        (reading, ready), now, effort = before_it, part.clock(), part.effort() - before
        whole, keeping = self.steps.whole_round(begun, now) if self.steps is not None else (now - begun, 0.0)
        effort *= whole / (now - begun) if now > begun else 1.0
        bound = patients_bound(part.mechanism, self.whom)
        patients = len(self.cohort.patients)
        work = RoundWork(reading, whole - keeping, effort, patients, bound, ready + keeping)
        silent = [Workspace() for _ in self.bench]  # a round of nobody is no step of the run: nobody sees or keeps it
        last = self.files, part.compute.plan
        nobody = replace(self.cohort, patients=()), self.model, part.entropy, *silent, *last
        part.paces.made(part.run, work, partial(part.site.run, self.call, *nobody))


def _name(part: RoundPart, unfinished: UnfinishedRound, held: str) -> str:
    """SHA-256 of everything that a round's steps hang on, but for what computes them and for their noise."""
    assert part.mechanism is not None
    plan = part.plan_of(part.run, part.mechanism, part.terms).digest
    told = [part.run, plan, part.grant, unfinished.number, unfinished.start, held]
    return hashlib.sha256(canonical(told)).hexdigest()


def digest_of_cohort(cohort: TaskCohort) -> str:
    """SHA-256 of patients and examples. It stays sealed."""
    told = hashlib.sha256()
    for patient in cohort.patients:
        told.update(canonical([patient.pseudonym, len(patient.examples)]))
        for example in patient.examples:
            for array in (example.pixels, example.target):
                told.update(canonical([array.dtype.str, list(array.shape)]))
                told.update(array.tobytes())
    return told.hexdigest()


def _check_leaving(part: RoundPart) -> None:
    if part.watch.wants_to_leave(part):
        raise ReviewRejectedError("site", Verdict((Finding("left", "the site leaves this run"),)))
