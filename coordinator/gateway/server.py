"""The one port: mutual TLS, limits that gRPC enforces by itself, and a certificate that renews while it listens."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from coordinator.gateway.calls import Call
from coordinator.gateway.notifications import MOST
from coordinator.gateway.service import MAX_PART, Service
from coordinator.storage.directory import CoordinatorDirectory, own_certificate
from protos.v1.gateway_pb2_grpc import add_GatewayServicer_to_server

HANDSHAKE_MS: Final = 10_000  # then a handshake that is not finished is given up
PINGS_MS: Final = 20_000  # an agent may ping so often, also between calls, however long it trains
THREADS: Final = 2 * MOST  # each open stream holds one; the guard lets no peer have many


KEY: Final = "lazaret-time"  # seconds since 1970, in the answer's initial metadata
_METHOD: Final = "/Hello"


class ServerTimeInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """For :func:`coordinator.gateway.server.start`, behind the guard: a stranger is not told even that."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock``: seconds since 1970."""
        self._clock = clock

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The handler of Hello with the time before its answer; every other one as it is."""
        handler = continuation(details)
        if handler is None or not str(details.method).endswith(_METHOD) or handler.unary_unary is None:
            return handler

        def answer(request: Any, call: Call) -> Any:  # the guard, which is outside, hands on a call
            call.context.send_initial_metadata(((KEY, f"{self._clock():.3f}"),))
            return handler.unary_unary(request, call)

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )


def start(
    home: CoordinatorDirectory, service: Service, more: tuple[grpc.ServerInterceptor, ...] = ()
) -> tuple[grpc.Server, int]:
    """Listen with mutual TLS; the certificate is read again for every handshake, so that it can be renewed.

    Returns:
        The started server and the port it listens on.
    Raises:
        OSError: the address cannot be bound.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_PART),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", 300_000),  # without a call: a silent connection holds a descriptor
        ("grpc.max_connection_age_ms", 3_600_000),  # then a new handshake, with the certificate of that time
        ("grpc.max_connection_age_grace_ms", 300_000),
        ("grpc.http2.min_ping_interval_without_data_ms", PINGS_MS),
        ("grpc.http2.max_ping_strikes", 5),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_metadata_size", 8192),
    ]
    server = grpc.server(ThreadPoolExecutor(THREADS, "grpc"), options=options, interceptors=(service.guard, *more))
    add_GatewayServicer_to_server(service, server)
    address = home.settings().listen
    try:
        port = server.add_secure_port(address, _credentials(home))
    except RuntimeError:
        raise OSError(f"cannot listen on {address}: another process does, or it is not ours") from None
    server.start()
    return server, port


def _credentials(home: CoordinatorDirectory) -> grpc.ServerCredentials:
    root = (home.keys / "root.crt").read_bytes()

    mutex, held = threading.Lock(), own_certificate(home, dt.datetime.now(dt.UTC))

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        # None: as before. Whenever gRPC is given anything else it frees what it had, and a handshake that begins in
        # another of its threads at that moment ends the process (SIGSEGV, seen with 200 sites that connect at once).
        nonlocal held
        with mutex:
            now = own_certificate(home, dt.datetime.now(dt.UTC))
            if now == held:
                return None
            held = now
        return _configuration(now, root)

    first = _configuration(held, root)
    return grpc.dynamic_ssl_server_credentials(first, renewed, require_client_authentication=True)


def _configuration(certificate: tuple[bytes, bytes], root: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([certificate], root_certificates=root)
