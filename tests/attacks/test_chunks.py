"""An artifact on its way: chunks out of order, cut short, of something else, twice, and lists that lie."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from protos.artifacts.chunks import CHUNK, bitmap, manifest, piece
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub
from tests.attacks.artifacts import sha256
from tests.attacks.ground import Code, Ground, refusal
from tests.support.federation_world import Site, pictures

NOISE = np.random.default_rng(5).integers(0, 256, 2 * CHUNK + 1000).astype(np.uint8).tobytes()  # three chunks


def send(stub: object, upload: str, chunks: Iterable[tuple[int, bytes]]) -> object:
    """One stream of chunks under a name."""
    parts = [
        gateway_pb2.UploadPart(upload=upload),
        *(gateway_pb2.UploadPart(chunk=gateway_pb2.Chunk(index=i, data=d)) for i, d in chunks),
    ]
    return stub.Upload(iter(parts), timeout=20)  # type: ignore[attr-defined]


def offered(ground: Ground, stub: object, site: Site, chunks: tuple[bytes, ...] = ()) -> tuple[str, object]:
    """The noise, announced by an honest grant; its name, and the reply."""
    if "grant-1" not in ground.federation.store.state.grants:
        site.reserved("grant-1")
    reply = ground.offer(stub, site, site.release("grant-1", NOISE), NOISE, "k", chunks)
    assert reply.upload == manifest(NOISE).sha256, reply
    return reply.upload, reply


@pytest.mark.parametrize(
    ("chunk", "rule"),
    [
        ((1, piece(NOISE, 0)), "chunk_moved"),
        ((0, piece(NOISE, 1)), "chunk_moved"),
        ((0, piece(NOISE, 0)[:-1]), "chunk_size"),
        ((0, piece(NOISE, 0) + b"x"), "chunk_size"),
        ((2, piece(NOISE, 2)[:-1]), "chunk_size"),
        ((2, piece(NOISE, 0)), "chunk_size"),
        ((0, bytes(CHUNK)), "chunk_foreign"),
        ((3, piece(NOISE, 0)), "chunk_index"),
        ((-1, piece(NOISE, 0)), "chunk_index"),
        ((1 << 62, b""), "chunk_index"),
        ((0, b""), "chunk_size"),
    ],
)
def test_a_chunk_that_is_not_the_announced_one_is_refused_on_arrival(
    ground: Ground, site: Site, chunk: tuple[int, bytes], rule: str
) -> None:
    with ground.as_site(site) as channel:
        stub = GatewayStub(channel)
        upload, _ = offered(ground, stub, site)
        with ground.refused(rule):
            assert refusal(lambda: send(stub, upload, [chunk])).code() == Code.INVALID_ARGUMENT
        again = ground.offer(stub, site, site.release("grant-1", NOISE), NOISE)
        assert again.missing == bitmap([0, 1, 2], 3), "not one piece was taken"


def test_order_and_repetition_do_not_matter_and_what_lacks_a_chunk_is_not_submitted(
    ground: Ground, site: Site
) -> None:
    with ground.as_site(site) as channel:
        stub = GatewayStub(channel)
        upload, _ = offered(ground, stub, site)
        twice = [(2, piece(NOISE, 2)), (0, piece(NOISE, 0)), (2, piece(NOISE, 2))]
        assert send(stub, upload, twice).accepted == 3  # type: ignore[attr-defined]
        sealed = gateway_pb2.SealedRequest(key="k", envelope=site.seal(site.release("grant-1", NOISE)))
        with ground.refused():  # passing: it may still come
            error = refusal(lambda: stub.Submit(sealed, timeout=20))
        assert (error.code(), error.details()) == (Code.FAILED_PRECONDITION, "1 of 3 pieces are missing")
        assert ground.offer(stub, site, site.release("grant-1", NOISE), NOISE).missing == bitmap([1], 3)
        send(stub, upload, [(1, piece(NOISE, 1))])
        with ground.refused("artifact_malformed", spends="grant-1"):  # whole, and noise
            assert [f.rule for f in stub.Submit(sealed, timeout=20).findings] == ["artifact_malformed"]


def test_a_list_of_chunks_that_lies_is_found_by_the_digest_of_the_whole(ground: Ground, site: Site) -> None:
    """Every chunk is as it was announced, and together they are not what the site signed."""
    evil = [bytes([7]) * CHUNK, piece(NOISE, 1), piece(NOISE, 2)]
    with ground.as_site(site) as channel:
        stub = GatewayStub(channel)
        upload, _ = offered(ground, stub, site, tuple(sha256(body) for body in evil))
        assert send(stub, upload, list(enumerate(evil))).accepted == 3  # type: ignore[attr-defined]
        sealed = gateway_pb2.SealedRequest(key="k", envelope=site.seal(site.release("grant-1", NOISE)))
        with ground.refused("artifact_changed"):
            assert [f.rule for f in stub.Submit(sealed, timeout=20).findings] == ["artifact_changed"]
    assert not list((ground.federation.uploads.root).glob("*/*/*")), "nothing of it is kept"


def test_a_list_with_digests_of_another_length_is_refused(ground: Ground, site: Site) -> None:
    site.reserved("grant-1")
    with ground.as_site(site) as channel, ground.refused("bad_manifest"):
        short = (bytes(31), bytes(32), bytes(33))
        ground.offer(GatewayStub(channel), site, site.release("grant-1", NOISE), NOISE, "k", short)


def test_nothing_is_uploaded_that_was_not_offered_nor_to_another_sites_offer(
    ground: Ground, site: Site, other: Site
) -> None:
    with ground.as_site(site) as mine, ground.as_site(other) as theirs:
        upload, _ = offered(ground, GatewayStub(mine), site)
        stub = GatewayStub(theirs)
        names = (upload, "0" * 64, "../../../etc/passwd", "", "a" * 4000)
        with ground.refused():  # an unknown upload asks for another offer: it is no finding
            for name in names:
                error = refusal(lambda name=name: send(stub, name, [(0, piece(NOISE, 0))]))
                assert (error.code(), error.details()) == (
                    Code.FAILED_PRECONDITION,
                    "nothing of that name was offered",
                )
        assert ground.offer(GatewayStub(mine), site, site.release("grant-1", NOISE), NOISE).missing == bitmap(
            [0, 1, 2], 3
        )


def test_a_stream_that_does_not_begin_with_its_name_or_names_another_later_is_refused(
    ground: Ground, site: Site
) -> None:
    with ground.as_site(site) as channel:
        stub = GatewayStub(channel)
        upload, _ = offered(ground, stub, site)
        chunk, name = (
            gateway_pb2.UploadPart(chunk=gateway_pb2.Chunk(index=0, data=piece(NOISE, 0))),
            gateway_pb2.UploadPart(upload=upload),
        )
        for parts in (
            [],
            [chunk],
            [gateway_pb2.UploadPart(), chunk],
            [name, name],
            [name, gateway_pb2.UploadPart(), chunk],
        ):
            with ground.refused("bad_upload"):
                error = refusal(lambda parts=parts: stub.Upload(iter(parts), timeout=20))
            assert error.code() == Code.INVALID_ARGUMENT


def test_a_site_opens_so_many_uploads_and_no_more(ground: Ground, site: Site, other: Site) -> None:
    site.reserved("grant-1")
    other.reserved("grant-2")
    most = ground.federation.uploads.most_open
    with ground.as_site(site) as channel, ground.as_site(other) as theirs:
        stub = GatewayStub(channel)
        for seed in range(most):
            artifact = pictures(seed)
            assert ground.offer(stub, site, site.release("grant-1", artifact), artifact, f"k{seed}").upload
        artifact = pictures(99)
        with ground.refused():  # passing
            error = refusal(lambda: ground.offer(stub, site, site.release("grant-1", artifact), artifact, "k99"))
        assert (error.code(), f"{most} uploads" in error.details()) == (Code.FAILED_PRECONDITION, True)
        assert ground.offer(GatewayStub(theirs), other, other.release("grant-2", artifact), artifact).upload
