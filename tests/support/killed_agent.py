"""``lazaret-agent`` with a kill -9 at a chosen moment: ``killed_agent.py MOMENT agent-arguments...``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import agent.cli.main
from agent.gateway.client import GatewayClient
from agent.release import pipeline, unsent
from agent.release.maker_process import MakerProcess
from policies.ledger_service import LedgerService
from protos.artifacts.chunks import manifest, piece
from protos.v1 import gateway_pb2


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def half_sent(gateway: Any, key: str, envelope: bytes, artifact: bytes) -> NoReturn:
    """The announcement and every piece reach the coordinator, durable; what asks for the verdict never does."""
    sealed = gateway._request(key, envelope, gateway._own_head())
    listing = manifest(artifact)
    reply = gateway._stub.Offer(gateway_pb2.OfferRequest(sealed=sealed, chunks=listing.chunks), timeout=30)
    assert reply.upload == listing.sha256
    parts = [gateway_pb2.UploadPart(upload=listing.sha256)]
    for index in range(len(listing.chunks)):
        parts.append(gateway_pb2.UploadPart(chunk=gateway_pb2.Chunk(index=index, data=piece(artifact, index))))
    assert gateway._stub.Upload(iter(parts), timeout=30).accepted == len(listing.chunks)
    die()


def after_verdict(gateway: Any, key: str, envelope: bytes, artifact: bytes) -> NoReturn:
    """The coordinator has decided; its answer is lost."""
    SUBMIT(gateway, key, envelope, artifact)
    die()


SUBMIT = GatewayClient.submit
MOMENTS: dict[str, tuple[Any, str, Any]] = {
    "reserved": (unsent, "begin", die),  # nothing has been read
    "making": (MakerProcess, "__call__", die),
    "keeping": (unsent, "keep", die),
    "before-sent": (LedgerService, "send", die),
    "before-submit": (GatewayClient, "submit", die),
    "half-sent": (GatewayClient, "submit", half_sent),
    "after-verdict": (GatewayClient, "submit", after_verdict),
    "before-forgotten": (unsent, "forget", die),
}
where, name, instead = MOMENTS[sys.argv[1]]
setattr(pipeline if where is unsent else where, name, instead)
sys.exit(agent.cli.main.main(sys.argv[2:]))
