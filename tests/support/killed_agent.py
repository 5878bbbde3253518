"""``lazaret-agent`` with a kill -9 at a chosen moment: ``killed_agent.py MOMENT agent-arguments...``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import agent.__main__
from agent import kept, pipeline
from agent.edges.door import GrpcDoor
from agent.mechanisms import KSame
from policies.register import Register
from protos.chunks import manifest, piece
from protos.v1 import gateway_pb2 as pb


def die(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def half_sent(door: Any, key: str, envelope: bytes, artifact: bytes) -> NoReturn:
    """The announcement and every piece reach the coordinator, durable; what asks for the verdict never does."""
    sealed = pb.SealedRequest(key=key, envelope=envelope, seen=door.watch.seen)
    listing = manifest(artifact)
    reply = door._stub.Offer(pb.OfferRequest(sealed=sealed, chunks=listing.chunks), timeout=30)
    assert reply.upload == listing.sha256
    parts = [pb.UploadPart(upload=listing.sha256)]
    for index in range(len(listing.chunks)):
        parts.append(pb.UploadPart(chunk=pb.Chunk(index=index, data=piece(artifact, index))))
    assert door._stub.Upload(iter(parts), timeout=30).accepted == len(listing.chunks)
    die()


def after_verdict(door: Any, key: str, envelope: bytes, artifact: bytes) -> NoReturn:
    """The coordinator has decided; its answer is lost."""
    SUBMIT(door, key, envelope, artifact)
    die()


SUBMIT = GrpcDoor.submit
MOMENTS: dict[str, tuple[Any, str, Any]] = {
    "making": (KSame, "run", die),
    "keeping": (kept, "keep", die),
    "before-sent": (Register, "send", die),
    "before-submit": (GrpcDoor, "submit", die),
    "half-sent": (GrpcDoor, "submit", half_sent),
    "after-verdict": (GrpcDoor, "submit", after_verdict),
    "before-forgotten": (kept, "forget", die),
}
where, name, instead = MOMENTS[sys.argv[1]]
setattr(pipeline if where is kept else where, name, instead)
sys.exit(agent.__main__.main(sys.argv[2:]))
