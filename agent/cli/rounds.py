"""The part of ``serve`` that takes part in federated rounds. It imports torch."""

from __future__ import annotations

import datetime as dt
import threading
import time
from dataclasses import replace

import torch

from agent.cli.output import ERR, OUT, print_progress
from agent.dp.compute_device import CPU, OPACUS, SiteCompute
from agent.dp.dpsgd import best_engine
from agent.dp.noise import SystemEntropy
from agent.errors import CoordinatorUnreachableError, LedgerForkError
from agent.federation.answer_pace import children_seconds
from agent.federation.participant import Participant
from agent.federation.readiness import SiteMachine, examine
from agent.federation.secure_aggregation import SecureAggregationClient
from agent.federation.service import EndedRuns, FederationContext, run_service
from agent.federation.supernode_process import LinkConfig, SuperNodeLink
from agent.gateway.credentials import Credentials
from agent.gateway.notifications import NotificationStream
from agent.mechanisms.federated.task_training import site_engine
from agent.privacy_audit.gate import gate
from agent.release.maker_process import MakerProcess
from agent.runtime import AgentRuntime, close_open_grants, sync_with_coordinator
from agent.service.job_runner import settings_or_default
from agent.service.ledger_access import SharedLedger
from agent.service.round_parts import PartJobs
from policies.ledger.store import LedgerStoppedError
from protos.operations.confinement import REQUIRED
from protos.operations.heap import large_ones_go_back
from protos.secagg.session import KnownPartners

_GREETED_S = 10.0  # for which a call waits that the coordinator takes only from a site that has greeted it


def use_one_thread() -> None:
    """Leave the other cores to what receives images in the same process."""
    torch.set_num_threads(1)


def take_part(runtime: AgentRuntime, project: str, modality: str, stop: threading.Event) -> int:
    """Federated rounds, until told to stop; none at all on a machine that does not draw the noise that is claimed.

    ``project``: whose patients they are of.
    """
    large_ones_go_back()  # models and updates of rounds
    print_progress("audit", "checking that this machine draws the noise that is claimed", False)
    own = runtime.settings
    compute = SiteCompute(own.device, own.confinement == REQUIRED, own.engine)
    device = compute.plan.device
    gate(SystemEntropy(), best_engine(CPU))
    if device != CPU or compute.plan.engine == OPACUS:
        gate(SystemEntropy(), site_engine(compute.plan), device)
    runtime.log.info("device", state=compute.plan.device, reason=compute.why)
    OUT.print(compute.why, markup=False, soft_wrap=True)
    met = False
    try:
        sync_with_coordinator(runtime)
        met = True
    except LedgerForkError:
        raise
    except CoordinatorUnreachableError as error:  # it may come back; until then nothing is asked of it
        ERR.print(f"not yet: {error}", markup=False)
    close_open_grants(runtime)
    keys, settings = runtime.home.keys, runtime.settings
    over, again = EndedRuns(), threading.Event()
    way = LinkConfig(
        settings.coordinator,
        keys,
        keys / "node.key",
        settings.proxy,
        demand=settings.confinement,
        greet=lambda: session.begin_again(_GREETED_S),
    )
    link = SuperNodeLink(way)
    watch = PartJobs(runtime.home, project, SharedLedger(runtime), runtime.log)
    memory = int(settings_or_default(runtime.home).memory_gib * 2**30)
    maker = MakerProcess(settings.confinement, memory, watch.started, keeps=True)
    participant = Participant(
        replace(runtime.site, run=maker),
        modality,
        SystemEntropy(),
        watch=watch,
        now=time.time,
        project=project,
        most_round_seconds=settings.most_round_seconds,
        clock=time.monotonic,
        effort=children_seconds,
        compute=compute,
    )
    if participant.resume():
        runtime.log.info("run_resumed", run=participant.run)
    partners = runtime.settings.partners
    known = KnownPartners(partners, runtime.settings.least_partners) if partners else None
    part = SecureAggregationClient(participant, runtime.home.sign_key(), known, SystemEntropy())
    session = _listen(runtime, link, over, again)
    try:
        station = FederationContext(
            lambda: _keep_in_touch(runtime, link),
            runtime.log,
            OUT.print,
            stop,
            over,
            met,
            again,
            lambda run, mechanism, terms, start: examine(
                participant, mechanism, run, terms, _machine(runtime, memory, link.rate), start
            ),
        )
        return run_service(link, part, station)
    finally:
        session.close()


def _machine(runtime: AgentRuntime, memory: int, rate: float) -> SiteMachine:
    """Where a check computes; ``memory``: bytes that a round may take."""
    days = (Credentials(runtime.home.keys).not_after - dt.datetime.now(dt.UTC)).total_seconds() / 86_400
    return SiteMachine(runtime.home.root, days, MakerProcess(runtime.settings.confinement, memory), rate)


def _listen(
    runtime: AgentRuntime, link: SuperNodeLink, over: EndedRuns, again: threading.Event
) -> NotificationStream:
    """Hear what the coordinator says without being asked.

    Where the stream begins this site shows the head of its own ledger, before which it gets no part in a run: in this
    thread, since a round that is being trained would hold the greeting up. ``again`` asks for the rest of it.
    """

    def heard(kind: str, run: str) -> None:
        link.wake()
        if kind == "hello":
            again.set()
            try:
                runtime.gateway.hello()
            except (
                CoordinatorUnreachableError,
                LedgerStoppedError,
            ):  # met again, and looked into, by the greeting that was asked for
                runtime.log.warning("not_greeted")
        elif kind == "over":
            over.say(run)

    return NotificationStream(runtime.gateway.session, heard)


def _keep_in_touch(runtime: AgentRuntime, link: SuperNodeLink) -> None:
    """Greet the coordinator; the link opens its channel anew when the certificate is another one."""
    before = runtime.gateway.certificate
    try:
        sync_with_coordinator(runtime)
    finally:  # also where the coordinator ended the greeting: the link's channel has the old one
        if runtime.gateway.certificate != before:
            link.renew()
