"""The commands that work with patients: ingest, release, serve. Apart: torch takes two seconds to import."""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from agent.deidentify.rules import Rules
from agent.deidentify.tags import Deidentifier
from agent.edges import home as homes
from agent.edges.door import GrpcDoor
from agent.edges.files import BadFolder, IngestReport, ingest
from agent.edges.log import open_log
from agent.edges.vault import Vault, VaultError
from agent.edges.watch import Forked, Watch
from agent.mechanisms.ksame import KSame, RepeatsAnInput
from agent.nouns import CohortTooSmall, Unreachable
from agent.participant import Participant
from agent.pipeline import Refused, Site, Waiting, hand_over, release_synthetic, withdraw
from agent.recovery import present, recover
from agent.stages.finetune import SystemEntropy
from agent.stages.invert import BadBasis, Basis, load_basis
from policies.claims import UnsupportedClaim
from policies.policy import Policy, strictest
from policies.register import Register
from policies.review import Verdict
from policies.sqlite import open_sqlite
from policies.statement import (
    PAYLOAD_TYPE,
    Amendment,
    Enrolment,
    MalformedStatement,
    Release,
    Statement,
    encode,
    parse,
)
from policies.store import Store
from protos import quiet
from protos.envelope import open_sealed, seal

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
EXPECTED = (BadBasis, BadFolder, CohortTooSmall, Refused, RepeatsAnInput, UnsupportedClaim, VaultError)


@dataclass(frozen=True, slots=True)
class Desk:
    """What a command works with, opened once."""

    home: homes.Home
    settings: homes.Settings
    site: Site
    vault: Vault
    door: GrpcDoor
    watch: Watch
    log: Any


@contextmanager
def open_desk(root: Path, say: Callable[[str, str], None]) -> Iterator[Desk]:
    """Open the site: ledger (this process alone), vault, door, log."""
    home = homes.Home(root)
    settings, key = home.settings(), home.sign_key()
    log = open_log(root / "agent.log")
    vault = Vault(root / "vault.db", home.secret("vault"))
    with Store(open_sqlite(root / "ledger.db"), homes.origin(settings.site), key, lambda: int(time.time())) as store:
        policy = site_policy(home, store)
        register = Register(store, lambda _site: policy)
        check_history(vault, store)
        watch = Watch(root / "watch", home.coordinator_key())
        epoch, nonce, seen = vault.note("head") or [1, "", 0]
        if watch.memory.epoch < epoch or (watch.memory.restored == nonce and watch.seen < seen):
            raise homes.BadSite("watch/ is missing, or older than this vault: restore it; nothing is sent before")
        door = GrpcDoor(settings.coordinator, home.keys, watch)
        _found(home, register)
        patients = vault.patients()
        if not patients * policy.delta < 1:  # P1; said here, to the site's own operator, and nowhere else
            raise homes.BadSite("policy.toml: delta must be below 1 / the number of this site's patients")

        def step(name: str, detail: str) -> None:
            log.info("step", step=name)
            say(name, detail)

        site = Site(
            name=settings.site,
            books=register,
            door=door,
            vault=vault,
            seal=lambda statement: _seal(statement, key),
            read=lambda envelope: _read(envelope, key),
            new_id=lambda prefix: f"{prefix}-{secrets.token_hex(8)}",
            say=step,
        )
        vault.write_note("ledger", store.state.size)
        try:
            yield Desk(home, settings, site, vault, door, watch, log)
        finally:
            door.close()
            vault.write_note("head", [watch.memory.epoch, watch.memory.restored, watch.seen])
            vault.close()


def site_policy(home: homes.Home, store: Store) -> Policy:
    """The strictest of the site's policy today, the one that it signed last, and the federation's.

    The auditor reviews under the signed one, so loosening takes ``ledger amend``, which signs (P12).
    """
    signed = store.state.policies.get(home.settings().site)
    envelope = store.envelope(signed) if signed else (home.root / "request.json").read_bytes()
    return strictest(strictest(home.policy(), home.signed_policy(envelope or b"")), home.federation_policy())


def check_history(vault: Vault, store: Store) -> None:
    """The vault remembers how long the ledger was: a removed or older one would give spent budget back."""
    known = vault.note("ledger") or 0
    if not store.state.size >= known:
        raise homes.BadSite("ledger.db is older than this vault, or missing: restore it; nothing is released before")


def _found(home: homes.Home, register: Register) -> None:
    """The site's ledger begins with the site itself and its accounts, at the stricter of both policies."""
    if register.store.state.sites:
        return
    envelope = (home.root / "request.json").read_bytes()
    public = home.sign_key().public_key().public_bytes_raw()
    statement = parse(open_sealed(envelope, PAYLOAD_TYPE, {"self": public}).payload)
    assert isinstance(statement, Enrolment)
    register.enrol(statement, envelope, register.policy_of(statement.site))


def _seal(statement: Statement, key: Ed25519PrivateKey) -> bytes:
    """Seal what reads back as it was written, and nothing else: an unreadable signature binds for ever."""
    payload = encode(statement)
    if parse(payload) != statement:
        raise MalformedStatement("the statement does not read back")
    return seal(payload, PAYLOAD_TYPE, key)


def _read(envelope: bytes, key: Ed25519PrivateKey) -> Release:
    """A release statement that this site sealed itself."""
    public = key.public_key().public_bytes_raw()
    statement = parse(open_sealed(envelope, PAYLOAD_TYPE, {"self": public}).payload)
    assert isinstance(statement, Release)
    return statement


def _greet(desk: Desk) -> None:
    """Meet the coordinator: its ledger must extend what was seen; after a restore, show every receipt first.

    Raises:
        Unreachable: it does not answer; or its ledger forked, and nothing goes to it.
        Refused: it does not take the receipts.
    """
    watch, key = desk.watch, desk.home.sign_key()
    desk.door.hello()  # first look, then cosign: what was seen before a restore is not in the ledger
    if watch.must_present:
        desk.log.warning("ledger_restored", epoch=watch.memory.epoch)
        lost = present(desk.site, watch.head.origin, watch.memory.restored)
        watch.presented()
        ERR.print(f"the coordinator's ledger was restored: {lost} grant(s) it had lost were shown to it")
    desk.door.hello(watch.cosigned(desk.settings.site, key, int(time.time())))


def _recover(desk: Desk) -> None:
    _greet(desk)
    _close_interrupted(desk)


def _close_interrupted(desk: Desk) -> None:
    closed = recover(desk.site)
    for grant in closed:
        desk.log.warning("grant_closed_at_start", grant=grant)
    if closed:
        ERR.print(f"{len(closed)} grant(s) of an interrupted run: closed, and their budget is spent")


def ingest_folder(arguments: argparse.Namespace) -> int:
    """Read the input folder into the vault; refused files are listed with their reasons."""
    home = homes.Home(arguments.home)
    settings, log = home.settings(), open_log(arguments.home / "agent.log")
    rules = Rules(modalities=settings.modalities, secondary_capture_modalities=settings.secondary_capture_modalities)
    vault = Vault(arguments.home / "vault.db", home.secret("vault"))
    try:
        with _bar("ingest", arguments.json) as progress:
            report = ingest(
                settings.input,
                rules=rules,
                deidentifier=Deidentifier(home.secret("deidentify")),
                already=vault.has,
                keep=vault.keep,
                quarantine=arguments.home / "quarantine",
                progress=progress,
            )
    finally:
        vault.close()
    refused = sum(report.quarantined.values())
    log.info("ingested", kept=report.kept, duplicates=report.duplicates, quarantined=refused)
    _print_ingest(report, arguments.json)
    return 0


@contextmanager
def _bar(title: str, silent: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=ERR, disable=silent) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _print_ingest(report: IngestReport, as_lines: bool) -> None:
    if as_lines:
        counts = {"files": report.files, "kept": report.kept, "duplicates": report.duplicates}
        sys.stdout.write(json.dumps({**counts, "quarantined": dict(report.quarantined)}) + "\n")
        return
    table = Table("what became of the files", "count", title=f"{report.files} files read")
    table.add_row("kept, de-identified, in the vault", str(report.kept))
    table.add_row("duplicates", str(report.duplicates))
    for reason, count in report.quarantined.items():
        table.add_row(f"quarantined: {reason}", str(count))
    OUT.print(table)


def _basis(path: Path, settings: homes.Settings) -> Basis:
    """A basis from a file; it counts as public only if the site's own configuration vouches for its digest."""
    raw = path.read_bytes()
    basis = load_basis(raw)
    if hashlib.sha256(raw).hexdigest() not in settings.public_components:
        return replace(basis, provenance="private")
    return basis


def release(arguments: argparse.Namespace) -> int:
    """Make and submit a synthetic set; exit 1 when any review refuses it."""
    with open_desk(arguments.home, lambda name, detail: _say(name, detail, arguments.json)) as desk:
        _recover(desk)
        mechanism = KSame(arguments.k, arguments.l_diversity, _basis(arguments.basis, desk.settings))
        try:
            rng = np.random.default_rng(secrets.randbits(256))
            goods, verdict = release_synthetic(desk.site, mechanism, arguments.modality, rng)
            name = goods.release.release
        except Refused as refusal:
            name, verdict = "", refusal.verdict
        except Waiting as waiting:
            return _print_waiting(desk, waiting, arguments.json)
        desk.log.info("verdict", release=name, rules=[f.rule for f in verdict.findings])
        _print_verdict(name, mechanism.name, verdict, arguments.json)
        return 0 if verdict.admitted else 1


def _print_waiting(desk: Desk, waiting: Waiting, as_lines: bool) -> int:
    r = waiting.goods.release
    desk.log.info("release_waits", release=r.release)
    line = {"release": r.release, "waits_for": sorted(waiting.roles), "artifact_sha256": r.artifact_sha256}
    if as_lines:
        sys.stdout.write(json.dumps(line) + "\n")
    else:
        OUT.print(f"{waiting}", markup=False)
        OUT.print(f"each signs: ledger sign release {r.release} {r.artifact_sha256} --serial {r.release} ...")
        OUT.print(f"then: ledger approve FILES, and release send {r.release}")
    return 1


def send(arguments: argparse.Namespace) -> int:
    """Hand over a release that persons have approved; exit 1 when an approval is missing or a review refuses."""
    with open_desk(arguments.home, lambda name, detail: _say(name, detail, arguments.json)) as desk:
        _recover(desk)
        try:
            goods, verdict = hand_over(desk.site, arguments.release)
            mechanism = goods.release.mechanism
        except Refused as refusal:
            mechanism, verdict = "", refusal.verdict
        desk.log.info("verdict", release=arguments.release, rules=[f.rule for f in verdict.findings])
        _print_verdict(arguments.release, mechanism, verdict, arguments.json)
        return 0 if verdict.admitted else 1


def withdraw_release(arguments: argparse.Namespace) -> int:
    """Give up a release that persons did not approve; its grant is spent."""
    with open_desk(arguments.home, lambda name, detail: _say(name, detail, False)) as desk:
        _recover(desk)
        withdraw(desk.site, arguments.release)
        desk.log.info("release_withdrawn", release=arguments.release)
        OUT.print(f"{arguments.release} is withdrawn, and its grant spent")
        return 0


def _say(name: str, detail: str, silent: bool) -> None:
    if not silent:
        OUT.print(f"{name:>6}  {detail}", markup=False)


def _print_verdict(release: str, mechanism: str, verdict: Verdict, as_lines: bool) -> None:
    if as_lines:
        findings = [{"rule": f.rule, "detail": f.detail} for f in verdict.findings]
        line = {"release": release, "mechanism": mechanism, "admitted": verdict.admitted}
        sys.stdout.write(json.dumps({**line, "level": verdict.level, "findings": findings}) + "\n")
        return
    OUT.print(f"admitted at level {verdict.level}: {release}" if verdict.admitted else "refused:")
    for finding in verdict.findings:
        OUT.print(f"  {finding.rule}: {finding.detail}", markup=False)


def serve(arguments: argparse.Namespace) -> int:
    """Take part in federated rounds until told to stop."""
    quiet.hush(arguments.home / "flower")
    from agent.edges.federation import LinkConfig  # noqa: PLC0415 - Flower reads its environment when imported
    from agent.edges.rounds import attend  # noqa: PLC0415

    torch.set_num_threads(1)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with open_desk(arguments.home, lambda name, detail: _say(name, detail, False)) as desk:
        try:
            _greet(desk)
        except Forked:
            raise
        except Unreachable as error:  # it may come back; until then nothing is asked of it
            ERR.print(f"not yet: {error}", markup=False)
        _close_interrupted(desk)
        keys = desk.home.keys
        link = LinkConfig(
            superlink=desk.settings.superlink,
            ca=keys / "ca.crt",
            cert=keys / "tls.crt",
            key=keys / "tls.key",
            node_key=keys / "node.key",
            bundle_digest=None,
        )
        participant = Participant(desk.site, arguments.modality, SystemEntropy())
        return attend(link, participant, lambda: _greet(desk), desk.log, OUT.print, stop)


def amend(arguments: argparse.Namespace) -> int:
    """Sign the site's policy of today: in its own ledger, and then at the coordinator."""
    with open_desk(arguments.home, lambda name, detail: _say(name, detail, False)) as desk:
        _recover(desk)
        state, site = desk.site.books.store.state, desk.settings.site
        number = max(state.amended.get(site, 0) + 1, int(time.time()))  # larger than any before, here and there
        statement = Amendment(site, number, desk.home.policy_text())
        envelope = desk.site.seal(statement)
        key = f"amend-{number}"
        verdict = desk.site.door.amend(key, envelope)
        if verdict.admitted:
            desk.site.books.amend(key, statement, envelope)
        _print_verdict("", "amendment", verdict, False)
        return 0 if verdict.admitted else 1


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "ingest": ingest_folder,
    "amend": amend,
    "release": release,
    "send": send,
    "withdraw": withdraw_release,
    "serve": serve,
}


def run(name: str, arguments: argparse.Namespace) -> int:
    """Run one command; what it expects to go wrong becomes a sentence and exit status 1."""
    try:
        return COMMANDS[name](arguments)
    except EXPECTED as error:
        ERR.print(f"refused: {error}", markup=False)
        return 1
