"""A site opened for work: ledger, vault, gateway client and log; and recovery before any new work."""

from __future__ import annotations

import datetime as dt
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from agent import errors as agent_errors
from agent.domain import ExampleRule
from agent.event_log import open_log
from agent.gateway.client import GatewayClient
from agent.gateway.credentials import Credentials
from agent.gateway.enrolment import come_back, return_over_grpc
from agent.gateway.witness import LedgerWitness
from agent.ingest.config import read_ingestion
from agent.release.maker_process import MakerProcess
from agent.release.ports import CoordinatorClient, SiteContext
from agent.release.recovery import present, recover
from agent.release.unsent import listed
from agent.storage import projects, site_directory
from agent.storage.examples import label_misfit, task_cohort
from agent.storage.read_only_access import HEAD, check_history
from agent.storage.site_ledger import initialise_ledger, policy_in_force
from agent.storage.vault import Vault
from policies.governance import decisions
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.merkle import open_checkpoint
from policies.ledger.store import Store
from policies.ledger_service import LedgerService
from policies.review.policy import Policy, strictest
from policies.review.policy import parse as parse_policy
from policies.review.rules import Verdict
from policies.statements import PAYLOAD_TYPE, Amendment, Release, Statement, StatementError, encode, parse
from protos.common.dsse import open_sealed, seal
from protos.identity.key_files import KeyFileError
from protos.protocol_version import COMPRESSED

WEIGHTS: Final = "weights"  # folder: files of public weights, each named by its SHA-256
ERR = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class OpenSite:
    """What a command works with that reads patients: opened once."""

    home: site_directory.SiteDirectory
    settings: site_directory.SiteSettings
    site: SiteContext
    vault: Vault
    log: Any


@dataclass(frozen=True, slots=True)
class AgentRuntime(OpenSite):
    """The same in the process that writes the site's ledger, and that talks to the coordinator."""

    gateway: GatewayClient
    watch: LedgerWitness


@contextmanager
def open_runtime(
    root: Path, say: Callable[[str, str], None], project: str = site_directory.MAIN
) -> Iterator[AgentRuntime]:
    """Open the site: ledger (this process alone), a project's vault, gateway, log."""
    home = site_directory.SiteDirectory(root)
    settings, key = home.settings(), home.sign_key()
    log = open_log(root / "agent.log")
    vault = projects.open_vault(home, project)
    with Store(
        open_sqlite(root / "ledger.db"), site_directory.origin(settings.site), key, lambda: int(time.time())
    ) as store:
        check_history(vault, store)  # before anything is written: in place of a lost ledger no other one is begun
        initialise_ledger(home, store)
        register = LedgerService(store, policy_in_force(home, store))
        policy = register.policy_of(settings.site)
        watch = LedgerWitness(root / "watch", home.coordinator_key())
        epoch, nonce, seen = vault.note("head") or [1, "", 0]
        if watch.memory.epoch < epoch or (watch.memory.restored == nonce and watch.seen < seen):
            raise agent_errors.SiteConfigError(
                "watch/ is missing, or older than this vault: restore it; nothing is sent before"
            )
        gateway = GatewayClient(settings.coordinator, Credentials(home.keys), watch, proxy=settings.proxy)
        gateway.own = store.prove
        require_small_delta(vault, policy)
        site = site_context(home, settings.site, register, gateway, vault, with_log(say, log))
        record_ledger_head(vault, store)
        try:
            yield AgentRuntime(home, settings, site, vault, log, gateway, watch)
        finally:
            gateway.close()
            if not store.stopped:  # else what is durable is unknown
                record_ledger_head(vault, store)
            _note(vault, "head", [watch.memory.epoch, watch.memory.restored, watch.seen])
            vault.close()


def require_small_delta(vault: Vault, policy: Policy) -> None:
    """P1; said here, to the site's own operator, and nowhere else.

    Raises:
        SiteConfigError: the policy's delta is too large for so many patients.
    """
    if not vault.patients() * policy.delta < 1:
        raise agent_errors.SiteConfigError("policy.toml: delta must be below 1 / the number of this site's patients")


def with_log(say: Callable[[str, str], None], log: Any) -> Callable[[str, str], None]:
    """Progress for people, of which the log has each step's name."""

    def step(name: str, detail: str) -> None:
        log.info("step", step=name)
        say(name, detail)

    return step


def site_context(
    home: site_directory.SiteDirectory,
    name: str,
    ledger: LedgerService,
    gateway: CoordinatorClient,
    vault: Vault,
    say: Callable[[str, str], None],
) -> SiteContext:
    """The site's parts put together, with its signing key."""
    key = home.sign_key()
    return SiteContext(
        name=name,
        ledger=ledger,
        gateway=gateway,
        vault=vault,
        seal=lambda statement: _seal(statement, key),
        read=lambda envelope: _read(envelope, key),
        new_id=lambda prefix: f"{prefix}-{secrets.token_hex(8)}",
        say=say,
        examples=lambda rule: task_cohort(vault, read_ingestion(home).rule_here(rule)),
        public_file=partial(public_file, home),
        label_misfit=partial(_label_misfit, home, vault),
        run=MakerProcess(home.settings().confinement),
    )


def _label_misfit(home: site_directory.SiteDirectory, vault: Vault, rule: ExampleRule) -> str:
    """Why a task would find no examples here, as far as that can be told before anybody is read."""
    try:
        return label_misfit(vault, read_ingestion(home).rule_here(rule))
    except agent_errors.SiteConfigError as fault:
        return str(fault)


def public_file(home: site_directory.SiteDirectory, digest: str) -> bytes | None:
    """A file of public weights in the folder ``weights``; whether it is the right one is for its reader to check."""
    path = home.root / WEIGHTS / f"{digest}.safetensors"
    if digest not in home.settings().public_components or not path.is_file():
        return None
    return path.read_bytes()


def record_ledger_head(vault: Vault, store: Store) -> None:
    """Have the vault remember the ledger as it is now."""
    head = open_checkpoint(store.checkpoint(), store.public)
    _note(vault, HEAD, [head.size, head.root.hex()])
    _note(vault, "ledger", head.size)


def _note(vault: Vault, name: str, value: Any) -> None:
    """Write what is not there yet: who only asks leaves every byte as it is."""
    if vault.note(name) != value:
        vault.write_note(name, value)


def _seal(statement: Statement, key: Ed25519PrivateKey) -> bytes:
    """Seal what reads back as it was written, and nothing else: an unreadable signature binds for ever."""
    payload = encode(statement)
    if parse(payload) != statement:
        raise StatementError("the statement does not read back")
    return seal(payload, PAYLOAD_TYPE, key)


def _read(envelope: bytes, key: Ed25519PrivateKey) -> Release:
    """A release statement that this site sealed itself."""
    public = key.public_key().public_bytes_raw()
    statement = parse(open_sealed(envelope, PAYLOAD_TYPE, {"self": public}).payload)
    assert isinstance(statement, Release)
    return statement


def sync_with_coordinator(runtime: AgentRuntime) -> None:
    """Meet the coordinator: its ledger must extend what was seen; after a restore, show every receipt first.

    Then the certificate is renewed, if two thirds of its life are over. One that has ended is replaced first.

    Raises:
        CoordinatorUnreachableError: it does not answer; or its ledger forked, and nothing goes to it; or this site's
            own ledger is behind what it showed there before.
        Refused: it does not take the receipts.
    """
    watch, key, now = runtime.watch, runtime.home.sign_key(), dt.datetime.now(dt.UTC)
    _take_up_certificate(runtime, now)
    runtime.gateway.hello()  # first look, then cosign: what was seen before a restore is not in the ledger
    if watch.must_present and runtime.settings.site in runtime.site.ledger.store.state.sites_awaited:
        # what it would show is not all there was; its certificate is renewed all the same
        runtime.log.warning("recover_first", epoch=watch.memory.epoch)
        ERR.print("this site was restored from a backup: run `recover`, so that it can show its receipts")
    elif watch.must_present:
        runtime.log.warning("ledger_restored", epoch=watch.memory.epoch)
        # with the head of this site's own ledger: one that went back has not all its receipts
        runtime.gateway.hello()
        lost = present(runtime.site, watch.head.origin, watch.memory.restored)
        watch.presented()
        ERR.print(f"the coordinator's ledger was restored: {lost} grant(s) it had lost were shown to it")
    runtime.gateway.hello(watch.cosigned(runtime.settings.site, key, int(time.time())))
    if runtime.gateway.renew(now, random.SystemRandom().uniform(-0.05, 0.05)):
        runtime.log.info("certificate_renewed")


def _take_up_certificate(runtime: AgentRuntime, now: dt.datetime) -> None:
    """Replace a certificate that has ended; and go on with one that another process has got meanwhile.

    Raises:
        CoordinatorUnreachableError: the coordinator gives none, or the files of the certificate cannot be used.
    """
    try:
        if come_back(runtime.home, return_over_grpc(runtime.settings.proxy), now):
            runtime.log.info("certificate_renewed")
        credentials = Credentials(runtime.home.keys)
    except (agent_errors.SiteConfigError, KeyFileError) as error:
        raise agent_errors.CoordinatorUnreachableError(str(error)) from None
    if credentials.number != runtime.gateway.certificate:
        runtime.gateway.take_up(credentials)


def require_current_coordinator(runtime: AgentRuntime) -> None:
    """Hand nothing over to a coordinator that would refuse it.

    Raises:
        CoordinatorUnreachableError: the coordinator knows no compressed images: a set would be refused, and its
            price spent. Or it does not answer.
    """
    if not runtime.gateway.protocol:
        sync_with_coordinator(runtime)
    if runtime.gateway.protocol < COMPRESSED:
        raise agent_errors.CoordinatorUnreachableError(
            "the coordinator is too old for compressed images: upgrade the coordinator first"
        )


def recover_at_startup(runtime: AgentRuntime) -> None:
    """Greet the coordinator, and find out how the interrupted ended."""
    sync_with_coordinator(runtime)
    close_open_grants(runtime)


def close_open_grants(runtime: AgentRuntime) -> None:
    """Every grant that an earlier process left without an end has one now."""
    closed = recover(runtime.site)
    for grant in closed:
        runtime.log.warning("grant_closed_at_start", grant=grant)
    if closed:
        ERR.print(f"{len(closed)} grant(s) of an interrupted run: closed, and their budget is spent")
    for name in listed(runtime.vault):
        if (
            name in runtime.site.ledger.store.state.sent
            or not runtime.site.ledger.policy_of(runtime.site.name).approvals
        ):
            ERR.print(f"{name} is made and kept here, under its grant: `release send {name}`", soft_wrap=True)


def amend(runtime: AgentRuntime, text: str) -> Verdict:
    """Sign a new policy of this site: at the coordinator, and then in the site's own ledger.

    Raises:
        InvalidEntryError: it loosens something, and not everybody in office has approved this very text.
        PolicyError: it is no policy.
        CoordinatorUnreachableError: the coordinator does not answer; nothing has changed.
    """
    ledger, name = runtime.site.ledger, runtime.settings.site
    state = ledger.store.state
    signed = runtime.home.signed_policy(ledger.store.envelope(state.policies[name]) or b"")
    before = strictest(
        runtime.home.policy(), signed
    )  # what binds by this site's word: the file may be the tighter one
    decisions.may_amend(state, name, before, parse_policy(text, "policy.toml"), text)
    number = max(state.amended.get(name, 0) + 1, int(time.time()))  # larger than any before, here and there
    statement = Amendment(name, number, text)
    envelope = runtime.site.seal(statement)
    verdict = runtime.site.gateway.amend(f"amend-{number}", envelope)
    if verdict.admitted:
        ledger.amend(f"amend-{number}", statement, envelope)
    return verdict
