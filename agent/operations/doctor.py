"""The site's doctor: the machine, the way to the coordinator, and what stands towards the PACS, both ways."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc

from agent.edges.channel import open_channel
from agent.edges.credentials import Credentials
from agent.edges.dicomweb import WebError
from agent.edges.dimse import EVENTS
from agent.edges.door import GrpcDoor
from agent.edges.echo import echo, knows_us
from agent.edges.home import BadSite, Home
from agent.edges.ingestion import Ingestion, read_ingestion
from agent.edges.metrics import certificates, watermark
from agent.edges.remote import PacsError, Remote
from agent.edges.sealed import VaultError
from agent.edges.upgrading import forms
from agent.edges.watch import Watch
from agent.nouns import Unreachable
from policies.forms import WrongForm
from policies.policy import PolicyError
from policies.store import LedgerUnsound
from protos import machine
from protos.doctor import Finding, failed, noted, of_days, passed
from protos.expiry import days_left, end_of
from protos.journal import BadLog, read_settings
from protos.keyfile import BadKeyFile
from protos.operations.confinement import AVAILABLE
from protos.passage import INSPECTED, NAME, WAY, Blocked, Way, is_open, opened, resolves, skew, uninspected
from protos.v1 import gateway_pb2 as pb
from protos.v1.gateway_pb2_grpc import GatewayStub
from protos.web.examined import console
from protos.web.settings import BadConsole

EXPECTED: Final = (
    BadConsole,
    BadKeyFile,
    BadLog,
    BadSite,
    LedgerUnsound,
    PacsError,
    PolicyError,
    Unreachable,
    VaultError,
    WebError,
    WrongForm,
)
AGREES: Final = "the clock agrees with the coordinator's"
TIME_KEY: Final = "lazaret-time"  # of the answer's initial metadata; coordinator/edges/dated.py
_TAIL: Final = 4 << 20  # bytes of the log that are read from its end
_RENEWED: Final = 0.25  # days: the agent renews after two thirds of a day
_SOON: Final = 30.0
_PATIENCE: Final = 10.0  # seconds
_IN: Final = "the PACS reaches us"
_STALE: Final = dt.timedelta(days=7)  # who was heard so long ago may have lost the way since
_CROWDED: Final = frozenset({"rejected_limit"})  # it did reach us, and tries again


def way_of(home: Home) -> Way:
    """From this site to its coordinator."""
    settings, root = home.settings(), home.keys / "root.crt"
    return Way(settings.coordinator, settings.proxy, root if root.exists() else None)


def settings(home: Home) -> Iterator[Finding]:
    """``site.toml``."""
    home.settings()
    yield passed("site.toml")


def policy(home: Home) -> Iterator[Finding]:
    """``policy.toml``."""
    home.policy()
    yield passed("policy.toml")


def confined(home: Home) -> Iterator[Finding]:
    """Which layers confine what reads foreign bytes, and does ``site.toml`` demand more?"""
    try:
        demand = home.settings().confinement
    except BadSite:  # said where it is looked at
        demand = AVAILABLE
    yield from machine.confinement(demand)


def keys(home: Home) -> Iterator[Finding]:
    """Those that a release needs, and every other one that lies there."""
    home.sign_key()
    for name in ("vault", "deidentify"):
        home.secret(name)
    yield passed("keys are private")
    yield from machine.private(home.root, ("ledger.db", "vault.db", "agent.log"))


def enrolled(home: Home) -> Iterator[Finding]:
    """Has the site the federation's policy?"""
    home.federation_policy()
    yield passed("enrolled")


def databases(home: Home) -> Iterator[Finding]:
    """Would `serve` open them, or send the operator to `upgrade`? A newer form is told by what reads it."""
    name, found = "forms of the databases", forms(home)
    if not found.newest:
        fix = "stop `serve`, and run `upgrade`, which makes a backup first"
        yield failed(name, f"{found.words}: `serve` refuses what is older", fix)
    elif not (found.ledger and found.vault):  # whether there should be one, the vault's own books tell
        yield noted(name, found.words)
    else:
        yield passed(name, found.words)


def certificate(home: Home, now: dt.datetime) -> Iterator[Finding]:
    """Is the certificate good for a while yet? `serve` renews it every day."""
    if not (home.keys / "root.crt").exists():
        yield noted("the certificate is good", "there is none before enrolment")
        return
    end = Credentials(home.keys).not_after
    fix = "ask for an invitation, and run `enrol`"
    if not now < end:
        yield failed("the certificate is good", f"it ended at {end:%Y-%m-%d %H:%M} UTC: {fix}", fix)
    else:
        soon = "let `serve` run: it renews it, when the coordinator answers"
        yield of_days("the certificate is good", days_left(end, now), _RENEWED, soon)


def others(home: Home, ingestion: Ingestion, now: dt.datetime) -> Iterator[Finding]:
    """The end of every other certificate: federation's root, receivers. The console's: see ``console``."""
    for which, path in certificates(home, ingestion).items():
        end = end_of(path)
        left = days_left(end, now) if end is not None else float("nan")
        fix = {
            "root": "the federation gets a new root, and every site enrols anew: plan it with the coordinator",
        }.get(which, f"have the hospital's PKI renew the certificate that ingest.toml names in [{which}]")
        if which not in ("tls", "console"):
            yield of_days(f"the certificate of {which}", left, _SOON, fix)


def knock(home: Home, way: Way) -> Iterator[Finding]:
    """The whole way, as a release goes it. Where not even a connection can be had, it is not tried twice."""
    if not (home.keys / "root.crt").exists():
        yield noted("coordinator answers over mutual TLS", "it answers after enrolment")
        return
    watch = Watch(home.root / "watch", home.coordinator_key(), forgetful=True)
    patience = _PATIENCE if any(finding.state == "pass" for finding in is_open(way)) else 0.0
    with contextlib.closing(GrpcDoor(way.target, Credentials(home.keys), watch, patience, way.proxy)) as door:
        door.hello()
    yield passed("coordinator answers over mutual TLS", way.target)


def clocks(home: Home, way: Way) -> Iterator[Finding]:
    """How far apart are the clocks here and there? A proxy's own word is second best."""
    try:
        connection, theirs = opened(way)
        connection.close()
    except Blocked:
        yield noted(AGREES, "cannot be told while the way out is closed")
        return
    with contextlib.suppress(grpc.RpcError, BadSite, BadKeyFile):
        channel = open_channel(way.target, Credentials(home.keys).channel_credentials(), way.proxy)
        with channel:
            before = time.time()
            _, call = GatewayStub(channel).Hello.with_call(pb.HelloRequest(), timeout=10)
            told = {key: value for key, value in call.initial_metadata()}.get(TIME_KEY, "")
            if told:
                yield skew(AGREES, (before + time.time()) / 2, float(told), "the coordinator")
                return
    yield skew(AGREES, time.time(), theirs, "the proxy" if way.proxy else "the coordinator")


def room(home: Home, ingestion: Ingestion) -> Iterator[Finding]:
    """The disk, and its watermark."""
    least = watermark(ingestion, shutil.disk_usage(home.root).total)
    yield from machine.disk(home.root, least, "listeners refuse images")


def archive(remote: Remote, ingestion: Ingestion) -> Iterator[Finding]:
    """C-ECHO there; and where images come by C-MOVE, whether it knows where to send them."""
    name = f"C-ECHO to {remote.name}"
    try:
        echo(remote)
        yield passed(name)
    except PacsError as error:
        yield failed(name, str(error), "the request form for the PACS team says what has to be entered there")
        return
    if remote.mode != "move":
        return
    title, name = remote.destination or remote.calling, f"{remote.name} knows the destination of C-MOVE"
    if ingestion.listener is None:
        yield failed(name, "nothing listens here for what it would send", "give ingest.toml a [listener]")
        return
    place = f"{title} at this machine, port {ingestion.listener.port}"
    known = knows_us(remote)
    if known is None:
        yield noted(name, f"its answer does not tell; the first pull will. It must know {place}")
    elif known:
        yield passed(name, place)
    else:
        yield failed(name, f"it does not know {title}", f"have the PACS team enter {place}")


def inbound(home: Home, ingestion: Ingestion, now: dt.datetime) -> Iterator[Finding]:
    """Did the PACS reach our receiver, the last time that it tried? The log of `serve` tells."""
    if ingestion.listener is None:
        return
    ask = f"have the PACS team send a C-ECHO to {ingestion.listener.ae_title}, port {ingestion.listener.port}"
    heard = heard_by_listener(home.root / "agent.log")
    good = max((heard[state] for state in ("echoed", "stored") if state in heard), default=None)
    said = f"last C-ECHO or C-STORE written down at {good:%Y-%m-%d %H:%M:%S} UTC" if good else ""
    turned = [state for state in heard if state.startswith("rejected_") or state in ("tls_failed", "turned_away")]
    since = [state for state in turned if good is None or (heard[state] > good and state not in _CROWDED)]
    if since:
        why = " ".join(EVENTS[state] for state in since)
        yield failed(_IN, f"{said}; since then: {why}" if good else why, ask)
    elif good is None:
        yield noted(_IN, f"not yet seen: start `serve`, and {ask}")
    elif not now - good <= _STALE:
        yield noted(_IN, f"{said}, more than {_STALE.days} days ago: {ask}")
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


def collector(home: Home) -> Iterator[Finding]:
    """``log.toml``, and whether the collector takes a connection."""
    found = read_settings(home.root).syslog
    if found is None:
        return
    try:
        found.connected().close()
        yield passed("the log's collector answers", found.to)
    except OSError as error:
        fix = "see to, ca and the firewall; what is logged stays in the file meanwhile"
        yield failed("the log's collector answers", f"{found.to}: {error.strerror or type(error).__name__}", fix)


Checks = list[tuple[str, Callable[[], Iterator[Finding]]]]


def before_the_way_in(home: Home, now: dt.datetime) -> Checks:
    """The checks that need no ``ingest.toml``, by name; the way is looked at where ``site.toml`` says which."""
    checks: Checks = [
        ("site.toml", lambda: settings(home)),
        ("policy.toml", lambda: policy(home)),
        ("keys are private", lambda: keys(home)),
        ("enrolled", lambda: enrolled(home)),
        ("forms of the databases", lambda: databases(home)),
        ("the certificate is good", lambda: certificate(home, now)),
    ]
    with contextlib.suppress(BadSite):
        way = way_of(home)
        checks += [
            (NAME, lambda: resolves(way)),
            (WAY, lambda: is_open(way)),
            (INSPECTED, lambda: uninspected(way)),
            ("coordinator answers over mutual TLS", lambda: knock(home, way)),
            (AGREES, lambda: clocks(home, way)),
        ]
    return [
        *checks,
        ("the clock is kept right", machine.clock),
        ("SQLite", machine.sqlite),
        ("GPU and driver", machine.graphics),
        (machine.CONFINED, lambda: confined(home)),
        ("telemetry is off", machine.telemetry),
        ("console.toml", lambda: console(home.root, home.keys, now)),
        ("the log's collector answers", lambda: collector(home)),
    ]


def of_the_way_in(home: Home, now: dt.datetime) -> Checks:
    """The checks that need it.

    Raises:
        BadSite, BadKeyFile: it cannot be read; then there are none.
    """
    ingestion = read_ingestion(home)
    checks: Checks = [
        ("room on the disk", lambda: room(home, ingestion)),
        ("certificates", lambda: others(home, ingestion, now)),
        (_IN, lambda: inbound(home, ingestion, now)),
    ]
    for remote in ingestion.pacs.values():
        checks.append((f"C-ECHO to {remote.name}", lambda remote=remote: archive(remote, ingestion)))  # type: ignore[misc]
    return checks
