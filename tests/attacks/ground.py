"""A federation under attack: certificates of every kind, channels of every kind, and the books before and after."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from agent.gateway.credentials import Credentials
from coordinator.federation.fleet_proxy import Fleet
from coordinator.storage.directory import operator_certificate
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from policies.statements import Release
from protos.artifacts.chunks import manifest
from protos.identity.certificates import CA, certify, leaf_of, number_of
from protos.identity.key_files import pem
from protos.protocol_version import USER_AGENT
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.support.federation_world import Federation, Site

SERVICE: Final = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"]
Code = grpc.StatusCode


def now() -> dt.datetime:
    """UTC."""
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True, slots=True)
class Pass:
    """A key and the chain for it: what somebody shows at the door."""

    key: ec.EllipticCurvePrivateKey
    chain: bytes

    @property
    def pair(self) -> tuple[bytes, bytes]:
        """Key and chain, PEM."""
        return pem(self.key), self.chain

    @property
    def leaf(self) -> x509.Certificate:
        """The certificate itself."""
        return leaf_of(self.chain)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a forged certificate is, beside its names."""

    authority: bool = False
    subject: str = ""
    left: dt.timedelta = dt.timedelta(hours=1)  # of its life


LEAF: Final = Kind()


class Unreached:
    """A SuperLink to which no call comes."""

    def fleet(self, path: str, headers: Mapping[str, str], body: bytes, seconds: float) -> tuple[int, bytes]:
        """Nobody may call."""
        raise AssertionError(path)

    def node_id(self, public_key: bytes) -> int | None:
        """It knows no node."""
        return None


@dataclass
class Ground:
    """A real coordinator, and everything an attacker may do around it."""

    federation: Federation
    honest: set[str] = field(default_factory=set)  # releases that a test lets through on purpose
    updates: set[str] = field(default_factory=set)  # and those of runs, which do not go on the shelf

    @property
    def target(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.federation.port}"

    def channel(self, key: bytes, chain: bytes, root: bytes = b"") -> grpc.Channel:
        """A channel under any certificate; no retries, a connection of its own."""
        options = [("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        options += [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        options += [("grpc.primary_user_agent", USER_AGENT)]  # it lies about everything but what it speaks
        credentials = grpc.ssl_channel_credentials(root or self.federation.home.root_crt(), key, chain)
        return grpc.secure_channel(self.target, credentials, options)

    def as_site(self, site: Site) -> grpc.Channel:
        """Under the site's own certificate, but saying whatever it likes."""
        held = Credentials(site.home.keys)
        return self.channel(held.key(), held.chain())

    def as_operator(self) -> grpc.Channel:
        """Under the operator's own certificate."""
        return self.channel(*operator_certificate(self.federation.home, now()))

    def issued(self, site: str, name: str, life: dt.timedelta) -> Pass:
        """A certificate that the authority signed and the ledger knows."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = Pass(key, certify(key.public_key(), name, self.federation.home.ca(), now(), life=life))
        end = int(made.leaf.not_valid_after_utc.timestamp())
        self.federation.intake.register.issue(site, number_of(made.leaf), made.leaf.fingerprint(SHA256()), end)
        return made

    def with_fleet(self) -> None:
        """Bind the sites' Fleet calls as the coordinator does; no call may get as far as Flower."""
        service = self.federation.service
        fleet = Fleet(Unreached(), self.federation.intake.node_keys, service.guard.report)
        object.__setattr__(service.at, "fleet", fleet)

    def log(self) -> str:
        """The coordinator's log so far."""
        return (self.federation.home.root / "coordinator.log").read_text()

    @contextlib.contextmanager
    def refused(self, *rules: str, spends: str = "", perhaps: str = "") -> Iterator[None]:
        """What happens inside comes to nothing, and is in the ledger under exactly these rules, an entry for each.

        Args:
            rules: several of one entry with + between them.
            spends: the grant that a refused release spends by the law, since what it covered was made from patients.
            perhaps: a rule of one more entry that may be there or not, where gRPC itself refuses a message: whether
                the guard then hears that no message came, or that the peer has hung up, is chance.
        """
        state, found = self.federation.store.state, self.federation.findings()
        before, money = self._ledger(), self._money()
        if spends:
            reserved = state.grants[spends].reserved
            held, spent = money[reserved.account]
            money[reserved.account] = (held - reserved.amount, spent + reserved.amount)
        yield
        written = ["+".join(entry) for entry in self.federation.findings()[len(found) :]]
        assert written == list(rules) or (perhaps and written == [*rules, perhaps]), written
        assert self._ledger() == before
        assert self._money() == money
        if spends:
            assert self.federation.store.state.grants[spends].state == "spent"

    def _money(self) -> dict[str, tuple[int, int]]:
        return {name: (a.held, a.spent) for name, a in self.federation.store.state.accounts.items()}

    def _ledger(self) -> tuple[Any, ...]:
        state = self.federation.store.state
        limits = {name: a.limit for name, a in state.accounts.items()}
        return limits, dict(state.releases), set(state.grants), set(state.sites), dict(state.policies), self.shelved()

    def shelved(self) -> set[str]:
        """What lies on the shelf."""
        return {path.name for path in self.federation.home.releases.iterdir()}

    def audit(self) -> None:
        """Nothing got through that the test did not let through; an auditor finds the ledger sound."""
        federation = self.federation
        assert set(federation.store.state.releases) == self.honest | self.updates
        assert self.shelved() == self.honest
        verify(export_file(federation.home.ledger, "lazaret/coordinator", federation.home.ledger_key()))
        assert "Traceback" not in self.log()

    def works(self, site: Site) -> None:
        """An honest call goes through at its first try, on a connection of its own.

        How long it takes is the machine's: a test asserts that its attack still goes on when this returns.
        """
        with self.as_site(site) as channel:
            assert call(channel, "Hello", gateway_pb2.HelloRequest(looks=True), timeout=200).policy

    def moment(self, site: Site) -> dt.timedelta:
        """A life that is short, and long enough for a first call on this machine, however busy it is."""
        began = time.monotonic()
        self.works(site)
        return dt.timedelta(seconds=3 + math.ceil(20 * (time.monotonic() - began)))

    def offer(
        self, stub: Any, site: Site, release: Release, artifact: bytes, key: str = "k", chunks: Sequence[bytes] = ()
    ) -> Any:
        """Announce an artifact, with any list of chunks."""
        listed = chunks or manifest(artifact).chunks
        sealed = gateway_pb2.SealedRequest(key=key, envelope=site.seal(release))
        return stub.Offer(gateway_pb2.OfferRequest(sealed=sealed, chunks=listed), timeout=120)


def refusal(act: Callable[[], Any]) -> grpc.RpcError:
    """The error with which a call ends; it must."""
    try:
        reply = act()
        list(reply) if hasattr(reply, "__next__") else None
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call went through")


def call(channel: grpc.Channel, method: str, request: Any = None, timeout: float = 120.0) -> Any:
    """One call of a method by its name, with an empty request unless it is given; streams are read to their end."""
    described = SERVICE.methods_by_name[method]
    made = request if request is not None else getattr(gateway_pb2, described.input_type.name)()
    stub = getattr(GatewayStub(channel), method)
    reply = stub(iter([made]) if described.client_streaming else made, timeout=timeout)
    return list(reply) if described.server_streaming else reply


def forged_leaf(
    issuer: x509.Certificate, signer: ec.EllipticCurvePrivateKey, names: Sequence[str], kind: Kind = LEAF
) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """A certificate such as no authority of ours makes: any issuer, any names, an authority or not."""
    key, ca = ec.generate_private_key(ec.SECP256R1()), kind.authority
    called = [x509.NameAttribute(x509.NameOID.COMMON_NAME, kind.subject)] if kind.subject else []
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(called))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - dt.timedelta(hours=2))
        .not_valid_after(now() + kind.left)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(
            x509.KeyUsage(True, False, False, False, False, ca, ca, False, False),
            critical=True,
        )
    )
    if ca:
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    if names:
        uris = [x509.UniformResourceIdentifier(name) for name in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(uris), critical=True)
    return key, builder.sign(signer, SHA256()).public_bytes(Encoding.PEM)


def signer_of(ca: CA) -> ec.EllipticCurvePrivateKey:
    """An authority's key, in the wrong hands."""
    key = load_pem_private_key(ca[0], None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _there(source: socket.socket) -> bytes:
    """All that has come, which of TLS may be nothing: its own messages are no data."""
    found, data = b"", b"-"
    source.setblocking(False)
    with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
        while data:
            found += (data := source.recv(65_536))
    source.setblocking(True)
    if not data and not found:
        raise EOFError
    return found


class Relay:
    """Plain HTTP/2 in, TLS of a chosen version out: so that gRPC's own client speaks over any TLS."""

    def __init__(self, port: int, key: Path, root: Path, version: ssl.TLSVersion) -> None:
        self._port, self._context = port, ssl.create_default_context(cafile=str(root))
        self._context.minimum_version = self._context.maximum_version = version
        self._context.load_cert_chain(key)
        self._context.set_alpn_protocols(["h2"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.spoken: list[str | None] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                plain = socket.create_connection(("127.0.0.1", self._port))
                line = self._context.wrap_socket(plain, server_hostname="127.0.0.1")
                self.spoken.append(line.version())
                threading.Thread(target=self._carry, args=(client, line), daemon=True).start()

    @staticmethod
    def _carry(client: socket.socket, line: ssl.SSLSocket) -> None:
        """Both ways in one thread: a TLS connection that one thread writes while another reads it is torn."""
        with contextlib.suppress(OSError, EOFError):
            while ready := select.select([client, line], [], [])[0]:
                for source, sink in ((client, line), (line, client)):
                    if source in ready:
                        sink.sendall(_there(source))
        for end in (client, line):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """No further connection."""
        self._listener.close()
