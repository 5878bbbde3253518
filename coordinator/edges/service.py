"""The coordinator's gRPC service: mutual TLS, and on every call the checks that Python gRPC does not make.

After the handshake gRPC never looks at a certificate again, has no revocation lists, and sends exception texts
to the peer. So every RPC passes through :class:`_Desk`: TLS 1.3, exactly one SPIFFE name, certificate still valid,
the right role; and whatever goes wrong inside leaves as a code and an incident number.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from cryptography import x509

from coordinator.edges.home import Home
from coordinator.edges.shelf import Shelf
from coordinator.edges.witnesses import Witnesses
from coordinator.intake import Intake, RolledBack, Unwelcome
from policies.review import Verdict
from protos.identity import OPERATOR, read_private, site_of
from protos.v1 import gateway_pb2 as pb
from protos.v1.gateway_pb2_grpc import GatewayServicer, add_GatewayServicer_to_server

MAX_PART = (1 << 20) + 4096
SUBMIT_S = 120.0  # for one artifact, of 16 MiB by the presets
STREAMS = 2  # submissions of one site at once
Launcher = Callable[[Any], Iterator[Any]]


class Turned(Exception):
    """The call is over: a status and a text that the peer may read."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def peer_name(auth: dict[str, list[bytes]], now: dt.datetime) -> str:
    """The one SPIFFE name of a peer whose connection is acceptable at this moment.

    Raises:
        Turned: older TLS, no or several names, or a certificate that is not valid now.
    """
    if auth.get("ssl_tls_version") != [b"TLSv1.3"]:
        raise Turned(grpc.StatusCode.UNAUTHENTICATED, "TLS 1.3 is required")
    try:
        certificate = x509.load_pem_x509_certificate(auth["x509_pem_cert"][0])
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (KeyError, ValueError, x509.ExtensionNotFound):
        raise Turned(grpc.StatusCode.UNAUTHENTICATED, "a client certificate with a name is required") from None
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise Turned(grpc.StatusCode.UNAUTHENTICATED, "the certificate is not valid now")
    if len(uris) != 1:
        raise Turned(grpc.StatusCode.UNAUTHENTICATED, "the certificate must bear exactly one URI name")
    return uris[0]


class Service(GatewayServicer):
    """One method for each call; what they decide is :class:`coordinator.intake.Intake`'s."""

    def __init__(
        self, intake: Intake, shelf: Shelf, witnesses: Witnesses, policy: str, log: Any, launcher: Launcher
    ) -> None:
        """``policy`` is the federation's TOML text; ``launcher`` conducts a run and yields its events."""
        self.intake, self.shelf, self.policy, self.log, self.launcher = intake, shelf, policy, log, launcher
        self.store, self.witnesses = intake.register.store, witnesses
        self._mutex, self._streams = threading.Lock(), Counter[str]()

    def Hello(self, request: Any, context: Any) -> Any:
        """The federation's policy and the ledger's head; and what the site has cosigned is kept."""
        with self._call(context, "hello") as peer:
            if request.cosigned:
                self._witnessed(peer, request.cosigned)
            shown = self.store.prove(request.seen)
            return pb.HelloReply(
                policy=self.policy,
                checkpoint=shown.checkpoint,
                ledger_key=self.store.public,
                proof=shown.proof,
                epoch=shown.epoch,
                restored=shown.restored,
                restored_at=shown.restored_at,
                restored_proof=shown.restored_proof,
            )

    def _witnessed(self, peer: str, note: str) -> None:
        """Keep a head that a site cosigned; one that this ledger signed and does not hold proves a rollback."""
        try:
            if self.intake.witness(peer, note):
                self.witnesses.keep(peer, note)
        except RolledBack:
            self.store.stop()
            self.log.error("rolled_back", site=peer)
            raise Turned(grpc.StatusCode.UNAVAILABLE, "the ledger is behind what this site has seen") from None

    def Reserve(self, request: Any, context: Any) -> Any:
        """Price first."""
        with self._call(context, "reserve") as peer:
            verdict = self._decide(lambda: self.intake.reserve(peer, request.key, request.envelope))
            return self._reply("reserve", peer, request, verdict)

    def Settle(self, request: Any, context: Any) -> Any:
        """A grant that will see no release."""
        with self._call(context, "settle") as peer:
            verdict = self._decide(lambda: self.intake.settle(peer, request.key, request.envelope))
            return self._reply("settle", peer, request, verdict)

    def Amend(self, request: Any, context: Any) -> Any:
        """A site's new policy."""
        with self._call(context, "amend") as peer:
            verdict = self._decide(lambda: self.intake.amend(peer, request.key, request.envelope))
            return self._reply("amend", peer, request, verdict)

    def Present(self, request: Any, context: Any) -> Any:
        """After a restore: a receipt, or the word that these were all."""
        with self._call(context, "present") as peer:
            verdict = self._decide(lambda: self.intake.present(peer, request.key, request.envelope))
            return self._reply("present", peer, request, verdict)

    def Outcome(self, request: Any, context: Any) -> Any:
        """What a key has led to."""
        with self._call(context, "outcome") as peer:
            found = self.intake.outcome(peer, request.key)
            if found is None:
                shown = self.store.prove(request.seen)
                return pb.VerdictReply(known=False, seq=-1, checkpoint=shown.checkpoint, proof=shown.proof)
            return self._reply("outcome", peer, request, found[0])

    def Submit(self, parts: Iterator[Any], context: Any) -> Any:
        """An artifact with its sealed statement; durable on the shelf before the ledger admits it."""
        with self._call(context, "submit") as peer, self._one_of_few(peer):
            patience = threading.Timer(SUBMIT_S, context.cancel)  # a stream that says nothing must not hold a place
            patience.start()
            try:
                first = next(parts, None)
                if first is None or first.WhichOneof("part") != "header":
                    raise Turned(grpc.StatusCode.INVALID_ARGUMENT, "the first part must be the header")
                verdict = self._decide(lambda: self._submit(peer, first.header, parts, context.is_active))
            finally:
                patience.cancel()
            return self._reply("submit", peer, first.header, verdict)

    @contextlib.contextmanager
    def _one_of_few(self, peer: str) -> Iterator[None]:
        """A site holds at most :data:`STREAMS` places, so that none can take them all."""
        with self._mutex:
            if not self._streams[peer] < STREAMS:
                raise Turned(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many submissions of this site at once")
            self._streams[peer] += 1
        try:
            yield
        finally:
            with self._mutex:
                self._streams[peer] -= 1

    def _submit(self, peer: str, header: Any, parts: Iterator[Any], alive: Callable[[], bool]) -> Verdict:
        key, envelope = header.key, header.envelope
        release = self.intake.release(peer, key, envelope)
        quota = min(release.artifact_bytes, self.intake.federation.max_artifact_bytes)
        artifact = bytearray()
        for part in parts:
            artifact += part.data
            if part.WhichOneof("part") != "data" or len(artifact) > quota:
                raise Turned(grpc.StatusCode.RESOURCE_EXHAUSTED, "more bytes than the statement or policy allows")
        if not alive():  # the peer is gone: half an artifact is no submission, and gets no verdict
            raise Turned(grpc.StatusCode.CANCELLED, "the stream broke off")
        body = bytes(artifact)
        whole = len(body) == release.artifact_bytes and not release.run  # updates are aggregated, not shelved
        whole = whole and hashlib.sha256(body).hexdigest() == release.artifact_sha256
        staged = self.shelf.stage(release.artifact_sha256, body) if whole else None
        verdict = self.intake.admit(peer, key, envelope, release, body)
        if staged is not None:
            self.shelf.settle(staged, release, envelope, verdict)
        return verdict

    def Launch(self, request: Any, context: Any) -> Iterator[Any]:
        """Operators only: conduct a federated run and stream what happens."""
        with self._call(context, "launch", operator=True):
            yield from self.launcher(request)

    def _decide(self, act: Callable[[], Verdict]) -> Verdict:
        try:
            return act()
        except Unwelcome as refusal:
            return Verdict((refusal.finding,))

    def _reply(self, call: str, peer: str, request: Any, verdict: Verdict) -> Any:
        found = self.intake.outcome(peer, request.key)
        seq = found[1] if found else -1
        self.log.info(
            "verdict", call=call, site=peer, admitted=verdict.admitted, rules=[f.rule for f in verdict.findings]
        )
        shown = self.store.prove(request.seen, seq)
        return pb.VerdictReply(
            admitted=verdict.admitted,
            findings=[pb.Finding(rule=f.rule, detail=f.detail) for f in verdict.findings],
            level=verdict.level,
            seq=seq,
            checkpoint=shown.checkpoint,
            known=True,
            proof=shown.proof,
            entry=shown.entry,
            inclusion=shown.included,
        )

    def _call(self, context: Any, call: str, operator: bool = False) -> _Desk:
        return _Desk(self, context, call, operator)


class _Desk:
    """Around every call: who is it, may they, and no exception text to the peer."""

    def __init__(self, service: Service, context: Any, call: str, operator: bool) -> None:
        self.service, self.context, self.call, self.operator = service, context, call, operator

    def __enter__(self) -> str:
        try:
            name = peer_name(dict(self.context.auth_context()), dt.datetime.now(dt.UTC))
            site = site_of(name)
            allowed = name == OPERATOR if self.operator else site is not None
            if not allowed:
                raise Turned(grpc.StatusCode.PERMISSION_DENIED, "this certificate may not make this call")
        except Turned as turned:
            self.service.log.warning("turned_away", call=self.call, fault=turned.text)
            self.context.abort(turned.code, turned.text)
        return site or ""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or kind is GeneratorExit:
            return
        if isinstance(error, Turned):
            self.context.abort(error.code, error.text)
        incident = secrets.token_hex(4)
        self.service.log.error("incident", call=self.call, incident=incident, fault=kind.__name__)
        self.context.abort(grpc.StatusCode.INTERNAL, f"incident {incident}: see the coordinator's log")


def start(
    home: Home, service: Service, interceptors: tuple[grpc.ServerInterceptor, ...] = ()
) -> tuple[grpc.Server, int]:
    """Listen with mutual TLS.

    Returns:
        The started server and the port it listens on.
    Raises:
        OSError: the address cannot be bound.
    """
    credentials = grpc.ssl_server_credentials(
        [(read_private(home.keys / "tls.key"), (home.keys / "tls.crt").read_bytes())],
        root_certificates=(home.keys / "ca.crt").read_bytes(),
        require_client_auth=True,
    )
    options = [
        ("grpc.max_receive_message_length", MAX_PART),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 64),
    ]
    server = grpc.server(ThreadPoolExecutor(max_workers=16), options=options, interceptors=interceptors)
    add_GatewayServicer_to_server(service, server)
    address = home.settings().listen
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise OSError(f"cannot listen on {address}: another process does, or it is not ours") from None
    server.start()
    return server, port
