"""The site's doctor: the machine, the path to the coordinator, and the PACS connections in both directions.

What ``doctor`` asks of the ways in: listeners, folders, receivers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from agent.errors import CoordinatorUnreachableError, SiteConfigError
from agent.gateway.channel import open_channel
from agent.gateway.client import GatewayClient
from agent.gateway.credentials import Credentials, way_back
from agent.gateway.witness import LedgerWitness
from agent.ingest import errors as ingest_errors
from agent.ingest.config import Ingestion, read_ingestion
from agent.ingest.folders import Folder
from agent.ingest.ocr import Ocr, OcrSettings
from agent.ingest.patient_lists import read_lists
from agent.ingest.retrieval import check_reachable
from agent.operations.metrics import certificates, watermark
from agent.operations.upgrade import forms
from agent.pacs.archive import ArchiveConfig, ArchiveError
from agent.pacs.dicomweb.config import DicomWebError
from agent.pacs.dicomweb.stow_process import StowSettings
from agent.pacs.dimse.query_retrieve_scu import echo, knows_us
from agent.pacs.dimse.storage_scp import EVENTS
from agent.pacs.secret_files import read_secret
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.site_directory import SiteDirectory
from policies.ledger.backends.schema_version import SchemaVersionError
from policies.ledger.store import LedgerUnsoundError
from policies.review.policy import PolicyError
from protos.identity.certificates import days_left, end_of
from protos.identity.key_files import KeyFileError
from protos.operations import machine_checks, network_checks
from protos.operations.checks import CheckResult, failed, note, of_days, passed, works
from protos.operations.confinement import AVAILABLE
from protos.operations.event_log import LogConfigError
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from protos.web.console_checks import service
from protos.web.settings import ConsoleConfigError

_LEAST_FREE: Final = 2 * 2**30


def ingest_checks(home: SiteDirectory) -> dict[str, str | None]:
    """What is wrong with ingest, by check; None where nothing is."""
    found: dict[str, str | None] = {"ingest.toml": None}
    try:
        ingestion = read_ingestion(home)
    except (SiteConfigError, KeyFileError) as error:
        return {"ingest.toml": str(error)}
    if ingestion.ocr is not None:
        found["tesseract"] = _tried(lambda: Ocr(ingestion.ocr or OcrSettings(), b""))
    free = shutil.disk_usage(home.root).free
    found["room on the disk"] = None if free > _LEAST_FREE else "less than 2 GiB are free: listeners refuse images"
    found |= _of_listeners(ingestion) | _of_folders(home, ingestion)
    for name, archive in {**ingestion.pacs, **ingestion.webs}.items():
        found[f"archive {name} answers"] = _tried(lambda archive=archive: check_reachable(archive))  # type: ignore[misc]
    return found


def _of_listeners(ingestion: Ingestion) -> dict[str, str | None]:
    """Can what the listeners need be read, does it fit together, and are their ports to be had?"""
    found: dict[str, str | None] = {}
    listener, stow = ingestion.listener, ingestion.stow
    if listener is not None:
        if listener.tls is not None:
            found["[listener] tls"] = _fitting(listener.tls.context)
        found |= _port("listener", listener.host, listener.port)
    if stow is not None:
        if stow.certificate is not None:
            found["[stow] certificate and key"] = _fitting(lambda: _stow_context(stow))
        if stow.token_file is not None:
            found["[stow] token_file"] = _tried(lambda: read_secret(stow.token_file or Path(), "token_file"))
        found |= _port("stow", stow.host, stow.port)
    return found


def _stow_context(settings: StowSettings) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # a key that wants a passphrase is refused: nobody can type it for `serve`
    context.load_cert_chain(str(settings.certificate), str(settings.key), password="")
    if settings.client_ca is not None:
        context.load_verify_locations(str(settings.client_ca))


def _fitting(build: Callable[[], object]) -> str | None:
    try:
        build()
    except OSError as error:  # ssl.SSLError is one
        why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        return f"a file cannot be read, is no PEM, or certificate and key do not fit: {why or type(error).__name__}"
    return None


def _port(table: str, host: str, port: int) -> dict[str, str | None]:
    """Could it be listened on? That it is taken is no fault: the agent's own serve may have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return {f"[{table}] port {port} is free": None}
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return {f"[{table}] port {port} is in use: by this agent's own serve, or something else": None}
        why = error.strerror or "host is not an address of this machine"
        return {f"[{table}] port {port} is free": f"cannot listen there: {why}"}


def _of_folders(home: SiteDirectory, ingestion: Ingestion) -> dict[str, str | None]:
    """Are the folders there, and can their lists be read?"""
    usual = Folder(home.settings().input)
    known = [("folder of site.toml", usual)] if usual.path.is_dir() else []
    known += [(f"[[folder]] {number}", folder) for number, folder in enumerate(ingestion.folders, 1)]
    names = ingestion.mask_names
    return {what: _tried(partial(read_lists, one.path, one.columns, names)) for what, one in known}


def _tried(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (*ingest_errors.EXPECTED, OSError) as error:
        return ingest_errors.sentence(error)
    return None


EXPECTED: Final = (
    ConsoleConfigError,
    KeyFileError,
    LogConfigError,
    SiteConfigError,
    LedgerUnsoundError,
    ArchiveError,
    PolicyError,
    CoordinatorUnreachableError,
    VaultError,
    DicomWebError,
    SchemaVersionError,
)
AGREES: Final = "the clock agrees with the coordinator's"
TIME_KEY: Final = "lazaret-time"  # of the answer's initial metadata; coordinator/gateway/server.py
_TAIL: Final = 4 << 20  # bytes of the log that are read from its end
_RENEWED: Final = 0.25  # days: the agent renews after two thirds of a day
_SOON: Final = 30.0
_PATIENCE: Final = 10.0  # seconds
_IN: Final = "the PACS reaches us"
_STALE: Final = dt.timedelta(days=7)  # who was heard so long ago may have lost the way since
_CROWDED: Final = frozenset({"rejected_limit"})  # it did reach us, and tries again


def way_of(home: SiteDirectory) -> network_checks.Endpoint:
    """From this site to its coordinator."""
    settings, root = home.settings(), home.keys / "root.crt"
    return network_checks.Endpoint(settings.coordinator, settings.proxy, root if root.exists() else None)


def confined(home: SiteDirectory) -> Iterator[CheckResult]:
    """Which layers confine what reads foreign bytes, and does ``site.toml`` demand more?"""
    try:
        demand = home.settings().confinement
    except SiteConfigError:  # said where it is looked at
        demand = AVAILABLE
    yield from machine_checks.confinement(demand)


def keys(home: SiteDirectory) -> Iterator[CheckResult]:
    """Those that a release needs, and every other one that lies there."""
    home.sign_key()
    for name in ("vault", "deidentify"):
        home.secret(name)
    yield passed("keys are private")
    yield from machine_checks.private(home.root, ("ledger.db", "vault.db", "agent.log"))


def databases(home: SiteDirectory) -> Iterator[CheckResult]:
    """Would `serve` open them, or send the operator to `upgrade`? A newer form is told by what reads it."""
    name, found = "forms of the databases", forms(home)
    if not found.newest:
        fix = "stop `serve`, and run `upgrade`, which makes a backup first"
        yield failed(name, f"{found.words}: `serve` refuses what is older", fix)
    elif not (found.ledger and found.vault):  # whether there should be one, the vault's own records tell
        yield note(name, found.words)
    else:
        yield passed(name, found.words)


def certificate(home: SiteDirectory, now: dt.datetime) -> Iterator[CheckResult]:
    """Is the certificate good for a while yet? `serve` renews it every day."""
    if not (home.keys / "root.crt").exists():
        yield note("the certificate is good", "there is none before enrolment")
        return
    end = Credentials(home.keys).not_after
    fix = "ask for an invitation, and run `enrol`"
    if not now < end and way_back(home.keys, now) is not None:
        fix = "run `enrol` without an invitation, or let `serve` run: the site's key asks for a new one"
    if not now < end:
        yield failed("the certificate is good", f"it expired at {end:%Y-%m-%d %H:%M} UTC:  {fix}", fix)
    else:
        soon = "let `serve` run: it renews the certificate when the coordinator answers"
        yield of_days("the certificate is good", days_left(end, now), _RENEWED, soon)


def others(home: SiteDirectory, ingestion: Ingestion, now: dt.datetime) -> Iterator[CheckResult]:
    """The end of every other certificate: federation's root, receivers. The console's: see ``console``."""
    for which, path in certificates(home, ingestion).items():
        end = end_of(path)
        left = days_left(end, now) if end is not None else float("nan")
        fix = {
            "root": "the federation needs a new root, and every site must enrol again: plan it with the coordinator",
        }.get(which, f"have the hospital's PKI renew the certificate that ingest.toml names in [{which}]")
        if which not in ("tls", "console"):
            yield of_days(f"the certificate of {which}", left, _SOON, fix)


def check_connection(home: SiteDirectory, way: network_checks.Endpoint) -> Iterator[CheckResult]:
    """The whole way, as a release goes it. Where not even a connection can be had, it is not tried twice."""
    if not (home.keys / "root.crt").exists():
        yield note("coordinator answers over mutual TLS", "it answers after enrolment")
        return
    watch = LedgerWitness(home.root / "watch", home.coordinator_key(), forgetful=True)
    patience = _PATIENCE if any(finding.state == "pass" for finding in network_checks.is_open(way)) else 0.0
    with contextlib.closing(GatewayClient(way.target, Credentials(home.keys), watch, patience, way.proxy)) as gateway:
        gateway.hello(looks=True)
    yield passed("coordinator answers over mutual TLS", way.target)


def clocks(home: SiteDirectory, way: network_checks.Endpoint) -> Iterator[CheckResult]:
    """How far apart are the clocks here and there? A proxy's own word is second best."""
    try:
        connection, theirs = network_checks.connect(way)
        connection.close()
    except network_checks.CheckFailedError:
        yield note(AGREES, "unknown while the outbound connection is closed")
        return
    with contextlib.suppress(grpc.RpcError, SiteConfigError, KeyFileError):
        channel = open_channel(way.target, Credentials(home.keys).channel_credentials(), way.proxy)
        with channel:
            before = time.time()
            _, call = GatewayStub(channel).Hello.with_call(gateway_pb2.HelloRequest(), timeout=10)
            told = {key: value for key, value in call.initial_metadata()}.get(TIME_KEY, "")
            if told:
                yield network_checks.skew(AGREES, (before + time.time()) / 2, float(told), "the coordinator")
                return
    yield network_checks.skew(AGREES, time.time(), theirs, "the proxy" if way.proxy else "the coordinator")


def disk_space(home: SiteDirectory, ingestion: Ingestion) -> Iterator[CheckResult]:
    """The disk, and its watermark."""
    least = watermark(ingestion, shutil.disk_usage(home.root).total)
    yield from machine_checks.disk(home.root, least, "listeners refuse images")


def archive(remote: ArchiveConfig, ingestion: Ingestion) -> Iterator[CheckResult]:
    """C-ECHO there; and where images come by C-MOVE, whether it knows where to send them."""
    name = f"C-ECHO to {remote.name}"
    try:
        echo(remote)
        yield passed(name)
    except ArchiveError as error:
        yield failed(name, str(error), "the request form for the PACS team says what has to be entered there")
        return
    if remote.mode != "move":
        return
    title, name = remote.destination or remote.calling, f"{remote.name} knows the destination of C-MOVE"
    if ingestion.listener is None:
        yield failed(name, "no listener here accepts what it would send", "give ingest.toml a [listener]")
        return
    place = f"{title} at this machine, port {ingestion.listener.port}"
    known = knows_us(remote)
    if known is None:
        yield note(name, f"its answer does not show it; the first retrieval will. It must know {place}")
    elif known:
        yield passed(name, place)
    else:
        yield failed(name, f"it does not know {title}", f"have the PACS team enter {place}")


def inbound(home: SiteDirectory, ingestion: Ingestion, now: dt.datetime) -> Iterator[CheckResult]:
    """Did the PACS reach our receiver, the last time that it tried? The log of `serve` tells."""
    if ingestion.listener is None:
        return
    ask = f"have the PACS team send a C-ECHO to {ingestion.listener.ae_title}, port {ingestion.listener.port}"
    heard = heard_by_listener(home.root / "agent.log")
    good = max((heard[state] for state in ("echoed", "stored") if state in heard), default=None)
    said = f"last C-ECHO or C-STORE recorded at {good:%Y-%m-%d %H:%M:%S} UTC" if good else ""
    turned = [state for state in heard if state.startswith("rejected_") or state in ("tls_failed", "turned_away")]
    since = [state for state in turned if good is None or (heard[state] > good and state not in _CROWDED)]
    if since:
        why = " ".join(EVENTS[state] for state in since)
        yield failed(_IN, f"{said}; since then: {why}" if good else why, ask)
    elif good is None:
        yield note(_IN, f"not yet seen: start `serve`, and {ask}; the log has it within a minute")
    elif not now - good <= _STALE:
        yield note(_IN, f"{said}, more than {_STALE.days} days ago: {ask}")
    else:
        yield passed(_IN, said)


def heard_by_listener(log: Path) -> dict[str, dt.datetime]:
    """Each event of the receiver in the end of the log, and when it was last written down (UTC)."""
    found: dict[str, dt.datetime] = {}
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _TAIL))
            lines = stream.read(_TAIL).splitlines()
    except OSError:
        return found
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            told = json.loads(line)
            if told.get("event") == "listener" and told.get("state") in EVENTS:
                at = dt.datetime.fromisoformat(told["timestamp"]).astimezone(dt.UTC)
                found[told["state"]] = max(at, found.get(told["state"], at))
    return found


Checks = list[tuple[str, Callable[[], Iterator[CheckResult]]]]


def before_the_way_in(home: SiteDirectory, now: dt.datetime) -> Checks:
    """The checks that need no ``ingest.toml``, by name; the way is looked at where ``site.toml`` says which."""
    checks: Checks = [
        ("site.toml", lambda: works("site.toml", home.settings)),
        ("policy.toml", lambda: works("policy.toml", home.policy)),
        ("keys are private", lambda: keys(home)),
        ("enrolled", lambda: works("enrolled", home.federation_policy)),
        ("forms of the databases", lambda: databases(home)),
        ("the certificate is good", lambda: certificate(home, now)),
    ]
    with contextlib.suppress(SiteConfigError):
        way = way_of(home)
        checks += [
            (network_checks.NAME, lambda: network_checks.resolves(way)),
            (network_checks.WAY, lambda: network_checks.is_open(way)),
            (network_checks.INSPECTED, lambda: network_checks.tls_is_direct(way)),
            ("coordinator answers over mutual TLS", lambda: check_connection(home, way)),
            (AGREES, lambda: clocks(home, way)),
        ]
    return [
        *checks,
        ("the clock is kept right", machine_checks.clock),
        ("SQLite", machine_checks.sqlite),
        ("GPU and driver", machine_checks.graphics),
        (machine_checks.CONFINED, lambda: confined(home)),
        *service(home.root, home.keys, now),
    ]


def of_the_way_in(home: SiteDirectory, now: dt.datetime) -> Checks:
    """The checks that need it.

    Raises:
        SiteConfigError, KeyFileError: it cannot be read; then there are none.
    """
    ingestion = read_ingestion(home)
    checks: Checks = [
        ("room on the disk", lambda: disk_space(home, ingestion)),
        ("certificates", lambda: others(home, ingestion, now)),
        (_IN, lambda: inbound(home, ingestion, now)),
    ]
    for remote in ingestion.pacs.values():
        checks.append((f"C-ECHO to {remote.name}", lambda remote=remote: archive(remote, ingestion)))  # type: ignore[misc]
    return checks
