"""The coordinator's memory does not grow with the size of what comes in.

What this does not see: a server without :func:`protos.operations.heap.one_arena`. That makes memory grow with the
threads that took pieces, not with their bytes: measured without it, both growths lie 17 to 60 MB up, in either order,
and their difference says nothing.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from agent.gateway.client import Patience, send
from protos.encryption import hpke
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.benchmarks import network
from tests.support.federation_world import Site

SENDERS = 3
BOUND_MB = 32.0  # windows that did not fill in the small case, and the allocator's pieces; 3 x 48 MB more came in
_names = count()


def _peak_of(served: network.Served, sites: list[Site], artifact: bytes, reader: str) -> float:
    """Megabytes that the coordinator's peak rises by while every site sends the artifact, all at once.

    It is sealed to a reader, so that the coordinator starts no process that looks into it.
    """
    digest, before = hashlib.sha256(artifact).hexdigest(), served.megabytes()
    served.forget_peak()

    def one(site: Site) -> bool:
        grant = f"grant-{site.hospital.name}-{next(_names)}"
        site.reserved(grant)
        release = site.hospital.release(grant, artifact_sha256=digest, artifact_bytes=len(artifact), reader=reader)
        sealed = gateway_pb2.SealedRequest(key=f"submit-{grant}", envelope=site.seal(release))
        with network.dial(site, served.port) as channel:
            return bool(send(GatewayStub(channel), sealed, artifact, Patience(), sha256=digest).admitted)

    with ThreadPoolExecutor(SENDERS) as threads:
        assert all(threads.map(one, sites))
    return served.peak_megabytes() - before


def _sealed(folder: Path, public: bytes, megabytes: int) -> bytes:
    hpke.seal_to(public, bytes(range(256)) * 4096 * megabytes, folder / "sealed")
    return (folder / "sealed").read_bytes()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts peaks of memory")
def test_four_times_as_much_coming_in_takes_no_more_memory(tmp_path: Path) -> None:
    _private, public = hpke.make_reader()
    reader = hpke.fingerprint(public)
    federation, sites = network.found(tmp_path, [f"site-{n}" for n in range(SENDERS)], readers=f'["{reader}"]')
    few, many = (_sealed(tmp_path, public, megabytes) for megabytes in (16, 64))
    with network.coordinator(federation) as served:
        for _ in range(2):
            _peak_of(served, sites, few, reader)  # threads, code and caches that stay
        small = _peak_of(served, sites, few, reader)
        large = _peak_of(served, sites, many, reader)
    assert large <= small + BOUND_MB, f"{large:.0f} MB for 3 x 64 MB, {small:.0f} MB for 3 x 16 MB"
