"""Could this site take part in a run? Looked at without a price, without counting a patient and without an image.

What a round would take is measured on made patients by the very call that trains a round, in the confined process
that would train it, and told for as many patients as the task's public bound. A canary has the same made round begin
at a model that the coordinator sent, and gets its numbers: they are of made patients and of noise.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np

from agent.domain import LatticePart, Update
from agent.dp.compute_device import AUTO, CPU, TaskMemoryError
from agent.errors import ReviewRejectedError
from agent.federation.made_patients import made_cohort
from agent.federation.participant import Participant
from agent.federation.round_making import public_files
from agent.federation.run_findings import findings
from agent.federation.run_mechanism import Made, as_sent
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError, FederatedMasked
from agent.mechanisms.federated.task_training import engine_refusal
from protos.common.errors import LazaretError
from protos.federation.round_times import RoundTerms
from protos.federation.site_check import SiteCheck
from protos.secagg.round import ring_of

FEW: Final = 1  # made patients: what a round takes is a part that all share, and one for each
MORE: Final = 3
MANY: Final = 33  # where a round of few is quick: the start of its process, now fast, now slow, is most of the time
_QUICK_S: Final = 30.0
_LEAST_DAYS: Final = 2 / 24  # a certificate of a day is renewed long before
_LEAST_FREE: Final = 256 << 20  # bytes of the home's file system
Run = Callable[..., Made]  # a call and what it is given, in a confined process
_TABLE: Final = frozenset({"labels"})


@dataclass(frozen=True, slots=True, eq=False)
class SiteMachine:
    """Where the site would compute its part."""

    home: Path  # the site's directory
    certificate_days: float  # until its certificate ends
    make: Run  # of its own: what a check computes is no round's process
    rate: float = 0.0  # bytes a second that arrived of the newest large message; 0: not known


def examine(
    part: Participant,
    mechanism: Federated | FederatedMasked,
    run: str,
    terms: RoundTerms,
    here: SiteMachine,
    start: Update | None = None,
) -> tuple[SiteCheck, bytes]:
    """The report, and the numbers of a made round as they would leave, or none where it could not be made.

    It holds nothing and notes nothing, but the plan for the site's persons where they decide.

    Args:
        part: the site's; it is in no other run's round now.
        mechanism: what the job names.
        run: the job's name, or that of a forecast.
        terms: of the run.
        here: the machine.
        start: what the made round begins at; None: a model of zeros.
    """
    wrong = [*_of_machine(part, here)]
    wrong += ["round_seconds"] if terms.seconds > part.most_round_seconds else []
    plan = _standing(part, mechanism, run, terms)
    rules = {finding.rule for finding in findings(part.site, part.modality, run, mechanism)}
    wrong += ["labels"] if rules & _TABLE else []
    wrong += ["policy"] if rules - _TABLE else []
    wrong += ["engine"] if engine_refusal(mechanism.task, part.compute.plan.engine) else []
    seconds, made = 0.0, b""
    unwanted = start is not None and (plan == "refused" or {"policy", "round_seconds"} & set(wrong))
    if not unwanted and not {"engine", "labels"} & set(wrong):
        start = Update(np.zeros(mechanism.parameters, np.float32)) if start is None else start
        fault, seconds, made = _made_round(part, mechanism, here.make, start)
        wrong += [fault] if fault else []
        wrong += ["time"] if not fault and seconds > terms.seconds else []
    device, told = part.compute.plan.device, tuple(dict.fromkeys(wrong))
    return SiteCheck(version("lazaret"), plan, device, round(seconds, 1), here.rate, told), made


def _standing(part: Participant, mechanism: Federated | FederatedMasked, run: str, terms: RoundTerms) -> str:
    """Where the approval of the site's persons stands; before the launch there is nothing that they could sign."""
    if not part.site.ledger.policy_of(part.site.name).run_approvals:
        return "none"
    if not terms.approve_by:
        return "waiting"
    try:
        part.consider(run, mechanism, terms)
    except ReviewRejectedError as refusal:
        rules = {finding.rule for finding in refusal.verdict.findings}
        return "refused" if rules & {"plan", "approve_by"} else "waiting"
    return "approved"


def _of_machine(part: Participant, here: SiteMachine) -> Iterator[str]:
    try:
        probe = here.home / "jobs" / ".check"
        probe.parent.mkdir(exist_ok=True)
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
        if shutil.disk_usage(here.home).free < _LEAST_FREE:
            yield "disk"
    except OSError:
        yield "disk"
    try:
        memory = os.memfd_create("check", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(memory, 0, 16 << 20)
        finally:
            os.close(memory)
    except OSError:
        yield "shared_memory"
    if here.certificate_days < _LEAST_DAYS:
        yield "certificate"
    if part.compute.wanted == AUTO and part.compute.plan.device == CPU:
        yield "accelerator"


def _made_round(
    part: Participant, mechanism: Federated | FederatedMasked, make: Run, start: Update
) -> tuple[str, float, bytes]:
    """What is wrong with it, how long a round would take in seconds, and its numbers. No patient of the vault's."""
    try:
        files = public_files(part.site, mechanism)
        mechanism.network(files=files)
    except FederatedConfigError:
        missing = any(part.site.public_file(one) is None for one in mechanism.task.network.public_files)
        return "weights" if missing else "mechanism", 0.0, b""

    def timed(patients: int) -> tuple[float, Made]:
        began = part.clock()
        cohort = made_cohort(mechanism.task, patients)
        call: Callable[..., Made] = mechanism.run_round
        made = make(call, cohort, start, part.entropy, Workspace(), files, part.compute.plan)
        return part.clock() - began, made

    try:
        few, _ = timed(FEW)
        patients = MORE if few > _QUICK_S else min(MANY, max(MORE, mechanism.task.training.public_patients))
        more, made = timed(patients)
        numbers = _as_sent(mechanism, made)
    except (MemoryError, TaskMemoryError):
        return "memory", 0.0, b""
    except (LazaretError, ValueError, RuntimeError):  # whatever a library says of it stays here
        return "training", 0.0, b""
    each = max(0.0, (more - few) / (patients - FEW))
    return "", few + each * mechanism.task.training.public_patients, numbers


def _as_sent(mechanism: Federated | FederatedMasked, made: Made) -> bytes:
    """The numbers of a round as they would leave; of a masked run the words of its ring, without masks.

    Raises:
        ArtifactFormatError, NotEncodableError: a number is not finite, or beyond the job's bound.
    """
    if isinstance(made, LatticePart):
        return ring_of(json.loads(mechanism.to_json()), mechanism.parameters).lift(made.steps).tobytes()
    numbers = as_sent(mechanism, made)
    return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes()
