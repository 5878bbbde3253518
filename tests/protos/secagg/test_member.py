"""Secure aggregation gives the exact sum whoever drops out; another implementation agrees to the byte."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from protos.secagg.member import Member
from protos.secagg.messages import SecAggError, SumStep
from protos.secagg.ring import NotEncodableError, Ring
from protos.secagg.server import Server, Total
from protos.secagg.session import Params, Quorum, SumSession, roster_digest, start_context
from protos.secagg.shamir import PRIME, SHARE_BYTES, SharesError, is_share, join, split
from tests.support.secagg import Sites, UnsafeStream, run_round, site_key

VECTORS = Path(__file__).parents[2] / "vectors" / "secagg.json"
TINY = Ring(5, 64, 2.0, 10)


# -- the sum ---------------------------------------------------------------------------------------------------------


def _expected(sites: Sites, survivors: tuple[str, ...], vectors: dict[str, NDArray[np.int64]]) -> list[int]:
    return [sum(int(vectors[name][i]) for name in survivors) for i in range(sites.ring.length)]


def _round(sites: Sites, vectors: dict[str, NDArray[np.int64]], silent: dict[str, SumStep]) -> Total:
    return run_round(sites.members(), Server(sites.session), vectors, silent)


@settings(max_examples=60)
@given(st.data())
def test_whoever_drops_out_at_whatever_step_the_sum_is_that_of_the_survivors(data: st.DataObject) -> None:
    n = data.draw(st.integers(3, 8), "sites")
    corrupt = data.draw(st.integers(1, n - 2), "corrupt")
    ring = Ring(data.draw(st.integers(1, 9)), data.draw(st.sampled_from((32, 64))), 2.0, 12)
    sites = Sites(n, ring, corrupt)
    quorum = sites.params.quorum
    lost = data.draw(st.lists(st.sampled_from(sites.names), unique=True, max_size=n - quorum.min_survivors), "lost")
    silent = {name: data.draw(st.sampled_from(list(SumStep))) for name in lost}
    vectors = sites.vectors(data.draw(st.integers(0, 99)))
    total = _round(sites, vectors, silent)
    late = (SumStep.AGREE, SumStep.REVEAL)  # their vectors were in already
    assert set(total.survivors) == {name for name in sites.names if silent.get(name, SumStep.REVEAL) in late}
    assert set(total.dropped) == set(lost)
    assert total.lattice.tolist() == _expected(sites, total.survivors, vectors)


@pytest.mark.parametrize("step", list(SumStep))
def test_one_dropout_too_many_at_any_step_ends_the_round_without_a_sum(step: SumStep) -> None:
    sites = Sites(5)
    quorum = sites.params.quorum
    allowed = quorum.members - (quorum.threshold if step >= SumStep.AGREE else quorum.min_survivors)
    hub = Server(sites.session)
    silent = dict.fromkeys(sites.names[: allowed + 1], step)
    with pytest.raises(SecAggError, match="are needed"):
        run_round(sites.members(), hub, sites.vectors(), silent)
    with pytest.raises(SecAggError):
        hub.aggregate()


def test_the_largest_sum_does_not_wrap_and_one_member_more_is_refused() -> None:
    ring = Ring(2, 32, 2.0**20, 8)
    assert ring.max_members == (2**31 - 1) // 2**28 == 7
    for sign in (1, -1):
        sites = Sites(7, ring)
        vectors = {name: np.full(2, sign * ring.peak) for name in sites.names}
        total = _round(sites, vectors, {})
        assert total.lattice.tolist() == [sign * 7 * ring.peak] * 2
        assert ring.decode(total.lattice).tolist() == [sign * 7 * 2.0**20] * 2
    with pytest.raises(ValueError, match="wrap"):
        Sites(8, ring)


@settings(max_examples=40)
@given(st.data())
def test_the_decoded_sum_is_within_the_stated_error_of_the_true_sum(data: st.DataObject) -> None:
    bits, scale = data.draw(st.sampled_from((32, 64))), data.draw(st.integers(0, 20))
    ring = Ring(4, bits, 3.0, scale)
    values = st.floats(-3.0, 3.0, width=32)
    rows = [data.draw(st.lists(values, min_size=4, max_size=4)) for _ in range(4)]
    arrays = [np.array(row, data.draw(st.sampled_from((np.float32, np.float64)))) for row in rows]
    sites = Sites(4, ring)
    vectors = {name: ring.quantise(row) for name, row in zip(sites.names, arrays, strict=True)}
    decoded = ring.decode(_round(sites, vectors, {}).lattice)
    for i in range(4):
        true = math.fsum(float(row[i]) for row in arrays)
        assert abs(decoded[i] - true) <= ring.error(4) + 1e-12


def test_what_lies_beyond_the_bound_is_clipped_and_what_is_not_a_number_is_refused() -> None:
    assert TINY.quantise(np.array([9.0, -9.0, 2.0, 1e300, 0.0])).tolist() == [2048, -2048, 2048, 2048, 0]
    assert TINY.quantise(np.array([0.5, 1.5, 2.5, -0.5, -1.5]) / 1024).tolist() == [0, 2, 2, 0, -2]  # ties to even
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(NotEncodableError):
            TINY.quantise(np.array([0.0, 0.0, bad, 0.0, 0.0]))
    for shape_or_type in (np.zeros(4), np.zeros((5, 1)), np.zeros(5, np.int64), np.zeros(5, np.float16), [0.0] * 5):
        with pytest.raises(NotEncodableError):
            TINY.quantise(shape_or_type)  # type: ignore[arg-type]
    for lattice in (np.full(5, 2049), np.full(5, -2049), np.full(5, -(2**63)), np.zeros(5, np.int32), np.zeros(5)):
        with pytest.raises(NotEncodableError):
            TINY.lift(lattice)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "bits", "bound", "scale"),
    [
        (0, 64, 1.0, 8),
        (1 << 29, 64, 1.0, 8),
        (4, 16, 1.0, 8),
        (4, 64, 0.0, 8),
        (4, 64, -1.0, 8),
        (4, 64, math.nan, 8),
        (4, 64, math.inf, 8),
        (4, 64, 0.3, 8),
        (4, 64, 1.0, -1),
        (4, 64, 1.0, 41),
        (4, 64, 2.0**40, 20),
        (4, 64, 1, 8),
        (True, 64, 1.0, 8),
    ],
)
def test_a_ring_that_could_misread_a_sum_cannot_be_built(length: int, bits: int, bound: float, scale: int) -> None:
    with pytest.raises(ValueError, match=r"length|bits|scale|bound"):
        Ring(length, bits, bound, scale)


# -- the quorum ------------------------------------------------------------------------------------------------------


def _quorums(most: int) -> Iterator[Quorum]:
    for numbers in itertools.product(range(most + 1), range(most + 2), *[range(-1, most + 2)] * 3):
        with contextlib.suppress(ValueError):
            yield Quorum(*numbers)


def test_every_quorum_that_can_be_built_hides_a_site_among_enough_honest_ones() -> None:
    seen = 0
    for q in _quorums(6):
        seen += 1
        honest_sites = q.members - q.corrupt
        # no two rolls can both be signed: corrupt members sign both, honest members one of them
        assert not [a for a in range(honest_sites + 1) if min(a, honest_sites - a) + q.corrupt >= q.threshold]
        for alive in range(q.min_survivors, q.members + 1):
            honest_left = alive - q.corrupt
            assert alive >= 3
            assert honest_left >= max(2, q.honest)
            assert honest_left * q.noise_fraction**2 >= 1 - 1e-12
    assert seen > 20


def test_a_sum_of_one_or_two_or_without_a_corrupt_onlooker_cannot_be_asked_for() -> None:
    for numbers in (
        (2, 2, 1, 1, 2),
        (3, 3, 0, 3, 3),
        (3, 3, 1, 1, 3),
        (4, 3, 1, 2, 2),
        (4, 2, 1, 2, 3),
        (5, 4, 2, 3, 4),
    ):
        with pytest.raises(ValueError, match=r"members|corrupt|honest|threshold|min_survivors"):
            Quorum(*numbers)
    assert Quorum.smallest(3, 1, 2) == Quorum(3, 3, 1, 2, 3)
    assert Quorum.smallest(10, 3, 4) == Quorum(10, 7, 3, 4, 7)
    assert Quorum.smallest(10, 3, 6).min_survivors == 9


def test_noise_of_the_least_honest_survivors_has_the_claimed_deviation() -> None:
    quorum = Quorum.smallest(10, 3, 4)
    rng = np.random.default_rng(1)
    shares = rng.normal(0.0, quorum.noise_fraction, (quorum.min_survivors - quorum.corrupt, 200_000))
    assert abs(shares.sum(axis=0).std() - 1.0) < 0.01


def test_a_session_is_another_one_when_anything_in_it_differs() -> None:
    base = Sites(4)
    session = base.session
    others = [
        Sites(4, run="run-2").session,
        base.as_seen(round=1),
        base.as_seen(context=bytes(31) + b"\1"),
        Sites(4, Ring(9, 64, 4.0, 20)).session,
        Sites(4, Ring(8, 64, 4.0, 21)).session,
        Sites(4, Ring(8, 32, 4.0, 20)).session,
        Sites(4, Ring(8, 64, 8.0, 20)).session,
        Sites(4, corrupt=2).session,
        Sites(5).session,
        SumSession(
            "run-1",
            0,
            base.params,
            bytes(32),
            {**base.roster, "site-00": site_key("x").public_key().public_bytes_raw()},
        ),
        SumSession("run-1", 0, Params(base.ring, Quorum(4, 4, 1, 2, 4)), bytes(32), base.roster),
    ]
    assert len({session.digest, *(other.digest for other in others)}) == len(others) + 1
    assert Sites(4).session.digest == session.digest


def test_a_malformed_session_cannot_be_built() -> None:
    base = Sites(4)
    key = site_key("site-00").public_key().public_bytes_raw()
    for changed in (
        {"context": bytes(31)},
        {"round": -1},
        {"round": 1 << 63},
        {"run": ""},
        {"run": "x" * 129},
        {"roster": {**base.roster, "site-09": key}},
        {"roster": {**base.roster, "site-01": key}},
        {"roster": {**base.roster, "site-01": key[:31]}},
    ):
        fields: dict[str, Any] = {
            "run": "r",
            "round": 0,
            "params": base.params,
            "context": bytes(32),
            "roster": base.roster,
        }
        with pytest.raises(ValueError, match=r"context|round|names|roster|number"):
            SumSession(**{**fields, **changed})


def test_a_start_context_tells_other_parameters_and_other_borders_apart() -> None:
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    seen = {start_context(v, p) for v in (zeros, ones, zeros[:2]) for p in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"])}
    assert len(seen) == 9
    with pytest.raises(ValueError, match="float32"):
        start_context(np.zeros(3), [b""])  # type: ignore[arg-type]


# -- Shamir ----------------------------------------------------------------------------------------------------------


def test_the_field_is_the_first_prime_above_two_to_the_256() -> None:
    def composite(n: int) -> bool:  # Miller-Rabin
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 42):
            x = pow(base, odd, n)
            if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
                return True
        return False

    assert not composite(PRIME)
    assert all(composite(n) for n in range((1 << 256) + 1, PRIME, 2))


@given(st.binary(min_size=32, max_size=32), st.data())
def test_any_threshold_of_shares_give_the_secret_back(secret: bytes, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    threshold = data.draw(st.integers(1, n))
    shares = split(secret, threshold, range(1, n + 1), UnsafeStream(str(data.draw(st.integers(0, 9)))))
    chosen = data.draw(st.permutations(range(1, n + 1)))[:threshold]
    assert join({x: shares[x] for x in chosen}, threshold) == secret
    with pytest.raises(SharesError):
        join({x: shares[x] for x in chosen[1:]}, threshold)


def test_one_share_too_few_fits_every_secret() -> None:
    shares = split(bytes(32), 3, (1, 2, 3), UnsafeStream("few"))
    for guess in (0, 1, 77, (1 << 256) - 1):
        # the one polynomial through two shares and any guess has a valid third share
        third = (guess - 3 * int.from_bytes(shares[1], "big") + 3 * int.from_bytes(shares[2], "big")) % PRIME
        made = {1: shares[1], 2: shares[2], 3: third.to_bytes(SHARE_BYTES, "big")}
        assert join(made, 3) == guess.to_bytes(32, "big")


def test_malformed_shares_are_refused() -> None:
    good = split(bytes(32), 2, (1, 2), UnsafeStream("x"))
    assert not is_share(PRIME.to_bytes(SHARE_BYTES, "big"))
    assert is_share((PRIME - 1).to_bytes(SHARE_BYTES, "big"))
    top = ((1 << 256) + 5).to_bytes(SHARE_BYTES, "big")
    for bad in (
        {1: good[1], 2: good[2][:-1]},
        {1: good[1], 2: PRIME.to_bytes(33, "big")},
        {0: good[1], 2: good[2]},
        {1: top, 2: top},
    ):
        with pytest.raises(SharesError):
            join(bad, 2)
    for threshold, points in ((0, (1, 2)), (3, (1, 2)), (1, (1, 1)), (1, (0, 1)), (1, (PRIME, 1))):
        with pytest.raises(ValueError, match="point"):
            split(bytes(32), threshold, points, UnsafeStream("x"))
    with pytest.raises(ValueError, match="32 bytes"):
        split(bytes(31), 1, (1,), UnsafeStream("x"))


# -- a second implementation, from the papers and RFCs, in Python's integers -----------------------------------------

FIELD = 2**255 - 19


def _x25519(scalar: bytes, point: bytes) -> bytes:
    """RFC 7748, section 5: the Montgomery ladder."""
    k = (int.from_bytes(scalar, "little") & ((1 << 254) - 8)) | 1 << 254
    u = int.from_bytes(point, "little") & ((1 << 255) - 1)
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb = d * a, c * b
        x3, z3 = (da + cb) ** 2 % FIELD, u * (da - cb) ** 2 % FIELD
        e = a * a - b * b
        x2, z2 = a * a * b * b % FIELD, e * (a * a + 121665 * e) % FIELD
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, FIELD - 2, FIELD) % FIELD).to_bytes(32, "little")


def _hkdf(salt: bytes, info: bytes, secret: bytes) -> bytes:
    """RFC 5869, one block of SHA-256."""
    key = hmac.new(salt, secret, "sha256").digest()
    return hmac.new(key, info + b"\1", "sha256").digest()


def _chacha20(key: bytes, count: int) -> bytes:
    """RFC 8439, section 2.4: counter and nonce zero."""
    out = b""
    for block in range(-(-count // 64)):
        start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *struct.unpack("<8I", key), block, 0, 0, 0]
        state = list(start)
        for _ in range(10):
            for a, b, c, d in (
                (0, 4, 8, 12),
                (1, 5, 9, 13),
                (2, 6, 10, 14),
                (3, 7, 11, 15),
                (0, 5, 10, 15),
                (1, 6, 11, 12),
                (2, 7, 8, 13),
                (3, 4, 9, 14),
            ):
                for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                    state[x] = (state[x] + state[y]) & 0xFFFFFFFF
                    mixed = state[z] ^ state[x]
                    state[z] = (mixed << turn | mixed >> (32 - turn)) & 0xFFFFFFFF
        out += struct.pack("<16I", *((s + t) & 0xFFFFFFFF for s, t in zip(state, start, strict=True)))
    return out[:count]


def _mask(seed: bytes, length: int, bits: int) -> list[int]:
    return list(struct.unpack(f"<{length}{'I' if bits == 32 else 'Q'}", _chacha20(seed, length * bits // 8)))


def _reference(vector: dict[str, Any]) -> dict[str, bytes]:
    """Each survivor's masked vector, from entropy and inputs alone."""
    params, names = vector["params"], sorted(vector["sites"])
    bits, length = params["bits"], params["length"]
    packed = struct.pack(
        "<QBBQHHHHH",
        length,
        bits,
        params["scale"],
        int(params["bound"] * 2 ** params["scale"]),
        *(params[key] for key in ("members", "threshold", "corrupt", "honest", "min_survivors")),
    )
    tag = b"lazaret secure aggregation v1\n"
    texts = {name: struct.pack("<H", len(name)) + name.encode() for name in [*names, vector["run"]]}
    keys = {name: bytes.fromhex(vector["sites"][name]["public"]) for name in names}
    roster = hashlib.sha256(tag + b"roster\n" + b"".join(texts[name] + keys[name] for name in names)).digest()
    fields = packed + texts[vector["run"]] + struct.pack("<Q", vector["round"]) + roster
    session = hashlib.sha256(tag + b"session\n" + fields + bytes.fromhex(vector["context"])).digest()
    assert session.hex() == vector["session"]
    drawn = {name: bytes.fromhex(vector["sites"][name]["entropy"]) for name in names}
    base = (9).to_bytes(32, "little")
    sharers = [i for i, name in enumerate(names) if "share" in vector["sites"][name]["messages"]]
    masked = {}
    for u in sharers:
        if "lattice" not in vector["sites"][names[u]]:
            continue
        words = list(vector["sites"][names[u]]["lattice"])
        own = _mask(
            _hkdf(session, b"lazaret secagg self" + struct.pack("<H", u), drawn[names[u]][64:96]), length, bits
        )
        words = [a + b for a, b in zip(words, own, strict=True)]
        for v in sharers:
            if v != u:
                theirs = _x25519(drawn[names[v]][32:64], base)
                secret = _x25519(drawn[names[u]][32:64], theirs)
                info = b"lazaret secagg pair" + struct.pack("<HH", min(u, v), max(u, v))
                pair = _mask(_hkdf(session, info, secret), length, bits)
                words = [a + (b if u > v else -b) for a, b in zip(words, pair, strict=True)]
        masked[names[u]] = struct.pack(f"<{length}{'I' if bits == 32 else 'Q'}", *(w % 2**bits for w in words))
    return masked


def _made(bits: int) -> dict[str, Any]:
    """A whole round of four sites, of whom one sends shares and no vector: all that was drawn and sent."""
    sites = Sites(4, Ring(5, bits, 2.0, 10), context=hashlib.sha256(b"start").digest(), seed=f"vector-{bits}")
    hub, vectors, streams, silent = Server(sites.session), sites.vectors(bits), {}, "site-02"
    members: dict[str, Member] = {}
    out: dict[str, Any] = {}
    for name in sites.names:
        streams[name] = UnsafeStream(f"{sites.seed}/{name}")
        members[name] = Member(sites.session, name, sites.keys[name], sites.knows(), streams[name])
        out[name] = {
            "public": sites.roster[name].hex(),
            "sign_seed": sites.keys[name].private_bytes_raw().hex(),
            "messages": {},
        }
        if name != silent:
            out[name]["lattice"] = vectors[name].tolist()
    for step in SumStep:
        for name, request in hub.requests().items():
            if name == silent and step >= SumStep.MASK:
                continue
            answer = members[name].answer(step, request, vectors[name] if step is SumStep.MASK else None)
            out[name]["messages"][step.name.lower()] = answer.hex()
            assert hub.receive(name, answer) is None
        hub.advance()
    for name in sites.names:
        out[name]["entropy"] = UnsafeStream(f"{sites.seed}/{name}").take(streams[name].used).hex()
    quorum = sites.params.quorum
    params = {key: getattr(sites.ring, key) for key in ("length", "bits", "bound", "scale")}
    params |= {key: getattr(quorum, key) for key in ("members", "threshold", "corrupt", "honest", "min_survivors")}
    return {
        "run": sites.run, "round": sites.round, "context": sites.context.hex(), "params": params,
        "roster": roster_digest(sites.roster), "session": sites.session.digest.hex(), "sites": out,
        "sum": hub.aggregate().lattice.tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
def test_the_messages_are_the_ones_of_the_test_vectors(bits: int) -> None:
    assert _made(bits) == json.loads(VECTORS.read_text())[str(bits)]


@pytest.mark.parametrize("bits", [32, 64])
def test_a_second_implementation_masks_to_the_same_bytes_and_sums_to_the_same_sum(bits: int) -> None:
    vector = json.loads(VECTORS.read_text())[str(bits)]
    masked = _reference(vector)
    assert sorted(masked) == ["site-00", "site-01", "site-03"]
    for name, words in masked.items():
        assert bytes.fromhex(vector["sites"][name]["messages"]["mask"])[39:-64] == words
    rows = [site["lattice"] for site in vector["sites"].values() if "lattice" in site]
    assert vector["sum"] == [sum(column) for column in zip(*rows, strict=True)]


@settings(max_examples=15)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(1, 200))
def test_the_second_implementation_computes_what_the_rfcs_say(secret: bytes, other: bytes, count: int) -> None:
    zero_key = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"  # RFC 8439, A.1, vector 1
    assert _chacha20(bytes(32), 32).hex() == zero_key
    stream = Cipher(ChaCha20(secret, bytes(16)), None).encryptor().update(bytes(count))
    assert _chacha20(secret, count) == stream
    private, public = (
        X25519PrivateKey.from_private_bytes(secret),
        X25519PrivateKey.from_private_bytes(other).public_key(),
    )
    assert _x25519(secret, public.public_bytes_raw()) == private.exchange(public)
    assert _hkdf(other, b"info", secret) == HKDF(SHA256(), 32, other, b"info").derive(secret)
