"""The coordinator's one port, with nothing but the method ``Fleet``: real mutual TLS, the real `Fleet`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from coordinator.federation.fleet_proxy import Fleet
from protos.v1.gateway_pb2_grpc import GatewayServicer, add_GatewayServicer_to_server


class Port(GatewayServicer):
    """Whoever has a certificate of the federation may call; its SPIFFE name says for which site."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.turned_away = fleet, set[str]()

    def Fleet(self, parts: Iterator[Any], context: Any) -> Iterator[Any]:
        """One call; a stream that says nothing for long is cut."""
        certificate = x509.load_pem_x509_certificate(context.auth_context()["x509_pem_cert"][0])
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        site = uri.split("/")[-2]
        if f"{certificate.serial_number:x}" in self.turned_away:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "revoked")
        patience = threading.Timer(60, context.cancel)
        patience.start()
        try:
            yield from self.fleet.handle(site, parts)
        finally:
            patience.cancel()


@contextlib.contextmanager
def serve(fleet: Fleet, ca: Path, cert: Path, key: Path, port: int) -> Iterator[tuple[int, Port]]:
    """Listen on loopback; the port's number, and the servicer."""
    servicer = Port(fleet)
    server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", 4 << 20)])
    add_GatewayServicer_to_server(servicer, server)
    pairs = [(key.read_bytes(), cert.read_bytes())]
    credentials = grpc.ssl_server_credentials(pairs, ca.read_bytes(), require_client_auth=True)
    bound = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    server.start()
    try:
        yield bound, servicer
    finally:
        server.stop(1).wait()
