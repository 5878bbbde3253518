"""Names, certificates, fingerprints, tokens and key files; real handshakes where the wire decides."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import os
import subprocess
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st

from protos.identity import certificates, join_token, key_files

NOW = dt.datetime.now(dt.UTC).replace(microsecond=0)
NAME = certificates.agent_name("a")
DAY = dt.timedelta(days=1)
BORN = NOW - 5 * DAY
ROOT = certificates.make_root(BORN)
CA = certificates.make_intermediate(ROOT, BORN)


def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def pair(name: str = NAME, ca: certificates.CA = CA, **more: Any) -> tuple[bytes, bytes]:
    """A fresh key and its chain."""
    own = key()
    return key_files.pem(own), certificates.certify(own.public_key(), name, ca, **{"now": NOW, **more})


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Says whom it takes the caller for."""

    def service(self, _details: Any) -> Any:
        def say(_request: bytes, context: Any) -> bytes:
            auth = context.auth_context()
            return b" ".join([*auth.get("peer_spiffe_id", [b"nobody"]), *auth["ssl_tls_version"]])

        return grpc.unary_unary_rpc_method_handler(say)


@contextmanager
def serving(own: tuple[bytes, bytes], root: bytes = ROOT[1]) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Echo()])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([own], root, True))
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


def called(port: int, own: tuple[bytes, bytes], root: bytes = ROOT[1]) -> bytes:
    """What the server says to a caller with these credentials; empty when there is no handshake."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(root, *own), options) as channel:
        try:
            return bytes(channel.unary_unary("/any/thing")(b"", timeout=120))
        except grpc.RpcError as error:
            return b"" if error.code() is grpc.StatusCode.UNAVAILABLE else b"another failure"


SERVER = pair(certificates.COORDINATOR, hosts=("localhost", "127.0.0.1"))


def test_a_chain_from_the_offline_root_is_accepted_by_grpc_on_both_sides() -> None:
    with serving(SERVER) as port:
        assert called(port, pair()) == NAME.encode() + b" TLSv1.3"


def test_grpc_refuses_what_leads_to_another_root_has_ended_or_lacks_the_intermediate() -> None:
    other = certificates.make_root(NOW)
    own = pair()
    bare = own[1][: own[1].index(b"-----END CERTIFICATE-----")] + b"-----END CERTIFICATE-----\n"
    late = pair(now=NOW - 2 * DAY, life=DAY)
    with serving(SERVER) as port:
        assert called(port, pair(ca=certificates.make_intermediate(other, NOW))) == b""
        assert called(port, (own[0], bare)) == b""
        assert called(port, late) == b""
        assert called(port, own, root=other[1]) == b""
        assert called(port, own).startswith(NAME.encode())


def test_a_sites_certificate_serves_nothing() -> None:
    own = key()
    usual = certificates.certify(own.public_key(), NAME, CA, NOW)
    with serving((key_files.pem(own), usual)) as port:
        assert called(port, pair()) == b""


@pytest.mark.parametrize("name", ["spiffe://elsewhere/hospital/a/agent", "spiffe://lazaret.example/hospital/a/agent"])
def test_the_intermediates_name_constraint_holds_in_grpc_and_in_openssl(tmp_path: Path, name: str) -> None:
    with serving(SERVER) as port:
        assert called(port, pair(name)) == b""
    for stem, body in (("root", ROOT[1]), ("ca", CA[1]), ("good", pair()[1]), ("bad", pair(name)[1])):
        (tmp_path / stem).write_bytes(body)

    def verified(leaf: str) -> bool:
        command = ["openssl", "verify", "-CAfile", "root", "-untrusted", "ca", leaf]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0

    assert verified("good")
    assert not verified("bad")


def test_the_intermediate_can_make_no_authority_below_itself() -> None:
    below = ec.generate_private_key(ec.SECP384R1())
    ca_key, ca_crt = load_pem_private_key(CA[0], None), x509.load_pem_x509_certificate(CA[1])
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    forged = (
        certificates._authority(
            certificates._builder(certificates._name("x"), ca_crt.subject, below.public_key(), NOW, NOW + DAY),
            below,
            0,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    sub = key_files.pem(below), forged.public_bytes(Encoding.PEM)
    own_key, chain = pair(ca=sub)
    with serving(SERVER) as port:
        assert called(port, (own_key, chain + CA[1])) == b""
    public = load_pem_private_key(own_key, None).public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    for body in (chain, chain + CA[1]):
        with pytest.raises(certificates.CertificateError):
            certificates.checked_chain(body, ROOT[1], NAME, public, NOW)


def test_a_leaf_lives_a_day_and_its_authorities_a_year_and_ten() -> None:
    leaf = certificates.leaf_of(pair()[1])
    ca, root = (x509.load_pem_x509_certificate(body) for body in (CA[1], ROOT[1]))
    back = dt.timedelta(minutes=5)
    assert [c.not_valid_before_utc + back for c in (leaf, ca, root)] == [NOW, BORN, BORN]
    assert [c.not_valid_after_utc for c in (leaf, ca, root)] == [NOW + DAY, BORN + 365 * DAY, BORN + 3650 * DAY]


def test_a_leaf_never_outlives_its_authority_and_an_ended_one_issues_nothing() -> None:
    end = BORN + 365 * DAY
    assert certificates.leaf_of(pair(now=end - DAY / 2)[1]).not_valid_after_utc == end
    for when in (end, BORN - DAY):
        with pytest.raises(certificates.CertificateError, match="renew"):
            pair(now=when)
    with pytest.raises(certificates.CertificateError, match="renew"):
        certificates.make_intermediate(ROOT, NOW + 3651 * DAY)


def signing_request(*names: x509.GeneralName, own: Any = None) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True) if names else builder
    algorithm = None if isinstance(own, Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(own or key(), algorithm).public_bytes(Encoding.PEM)


URI, OTHER = x509.UniformResourceIdentifier(NAME), x509.UniformResourceIdentifier(certificates.agent_name("b"))


@pytest.mark.parametrize(
    "csr",
    [
        signing_request(URI, OTHER),
        signing_request(URI, URI),
        signing_request(OTHER),
        signing_request(URI, x509.DNSName("localhost")),
        signing_request(x509.DNSName("localhost")),
        signing_request(),
        signing_request(URI, own=Ed25519PrivateKey.generate()),
        signing_request(URI, own=ec.generate_private_key(ec.SECP256K1())),
        b"",
        b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
        CA[1],
    ],
    ids=["two", "twice", "another", "host too", "host", "none", "ed25519", "k1", "empty", "junk", "certificate"],
)
def test_nothing_is_issued_for_a_request_that_is_not_for_the_one_name_alone(csr: bytes) -> None:
    with pytest.raises(certificates.CertificateError):
        certificates.issue(csr, NAME, CA, NOW)


def test_nothing_is_issued_for_a_key_whose_possession_is_not_proved() -> None:
    good = certificates.request(key(), NAME)
    der = bytearray(x509.load_pem_x509_csr(good).public_bytes(Encoding.DER))
    der[-1] ^= 1
    bent = x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM)
    with pytest.raises(certificates.CertificateError, match="possession"):
        certificates.issue(bent, NAME, CA, NOW)
    assert certificates.uri_of(certificates.leaf_of(certificates.issue(good, NAME, CA, NOW))) == NAME


def test_an_authority_with_another_ones_certificate_issues_nothing() -> None:
    other = certificates.make_intermediate(ROOT, NOW)
    with pytest.raises(certificates.CertificateError, match="together"):
        pair(ca=(CA[0], other[1]))


def test_a_chain_is_believed_for_its_name_and_key_under_its_root_at_its_time_only() -> None:
    own = key()
    chain = certificates.certify(own.public_key(), NAME, CA, NOW)
    leaf, ca = (chain[: chain.index(b"-----END", 9) + 26], CA[1])
    good = (chain, ROOT[1], NAME, own.public_key(), NOW)
    assert certificates.number_of(certificates.checked_chain(*good)) == certificates.number_of(
        certificates.leaf_of(chain)
    )
    foreign = certificates.make_root(NOW)
    foreign_ca = certificates.make_intermediate(foreign, NOW)
    for i, bad in [
        (0, leaf),
        (0, ca + leaf),
        (0, chain + ROOT[1]),
        (0, leaf + foreign_ca[1]),
        (0, b""),
        (0, b"junk"),
        (1, foreign[1]),
        (1, CA[1]),
        (1, b"junk"),
        (2, certificates.agent_name("b")),
        (2, certificates.joining_name("a")),
        (3, key().public_key()),
        (4, NOW + 2 * DAY),
        (4, NOW - DAY),
        (4, BORN - DAY),
        (4, NOW + 4000 * DAY),
    ]:
        with pytest.raises(certificates.CertificateError):
            certificates.checked_chain(*good[:i], bad, *good[i + 1 :])  # type: ignore[arg-type, call-arg]


def test_a_leaf_that_the_root_or_another_leaf_signed_is_not_believed() -> None:
    own, other = key(), key()
    straight = certificates.certify(own.public_key(), NAME, ROOT, NOW)
    between = certificates.certify(other.public_key(), NAME, CA, NOW)
    first = between[: between.index(b"-----END", 9) + 26]
    below = certificates.certify(own.public_key(), NAME, (key_files.pem(other), first), NOW)
    for chain in (straight, below, below + CA[1]):
        with pytest.raises(certificates.CertificateError):
            certificates.checked_chain(chain, ROOT[1], NAME, own.public_key(), NOW)


def test_two_uri_names_are_no_name() -> None:
    ca_key, ca_crt = load_pem_private_key(CA[0], None), x509.load_pem_x509_certificate(CA[1])
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    own = key()
    builder = certificates._builder(x509.Name([]), ca_crt.subject, own.public_key(), NOW, NOW + DAY)
    basic = x509.BasicConstraints(ca=False, path_length=None)
    builder = builder.add_extension(x509.SubjectAlternativeName([URI, OTHER]), critical=True)
    builder = builder.add_extension(basic, critical=True).add_extension(certificates._usage(sign=True), critical=True)
    leaf = builder.sign(ca_key, hashes.SHA384()).public_bytes(Encoding.PEM)
    with pytest.raises(certificates.CertificateError, match="exactly one"):
        certificates.checked_chain(leaf + CA[1], ROOT[1], NAME, own.public_key(), NOW)


@pytest.mark.parametrize("site", ["a", "hospital-7", "0", "a" * 63])
def test_names_lead_back_to_their_site_and_to_no_other_role(site: str) -> None:
    agent, joining = certificates.agent_name(site), certificates.joining_name(site)
    assert (certificates.site_of(agent), certificates.joining_site_of(joining)) == (site, site)
    assert certificates.site_of(joining) is None
    assert certificates.joining_site_of(agent) is None


@pytest.mark.parametrize("site", ["", "A", "a/b", "a b", "-a", "a" * 64, "a\n", "ä"])
def test_what_is_no_sites_name_leads_to_no_site(site: str) -> None:
    assert certificates.site_of(certificates.agent_name(site)) is None
    assert certificates.joining_site_of(certificates.joining_name(site)) is None


def test_a_fingerprint_is_128_bits_in_groups_and_compared_whole() -> None:
    said = certificates.fingerprint(b"abc")
    assert said == "ba78 16bf 8f01 cfea 4141 40de 5dae 2223"  # FIPS 180-4, SHA-256 of "abc"
    assert certificates.same_fingerprint("BA7816BF-8f01cfea:4141 40de5dae2223\n", said)
    for wrong in ("", "ba78", said[:-1], said[:-1] + "4", said + " 0", "g" * 32):
        assert not certificates.same_fingerprint(wrong, said)
    assert not certificates.same_fingerprint("", "")


def test_the_roots_fingerprint_is_of_every_byte_of_it() -> None:
    again = certificates.make_root(NOW)
    assert certificates.root_fingerprint(ROOT[1]) == certificates.root_fingerprint(b"comment\n" + ROOT[1])
    assert certificates.root_fingerprint(ROOT[1]) != certificates.root_fingerprint(again[1])
    for bad in (b"", b"junk", ROOT[1] + again[1]):
        with pytest.raises(certificates.CertificateError):
            certificates.root_fingerprint(bad)


@given(st.binary(min_size=16, max_size=16))
def test_a_token_reads_back_however_it_is_typed(raw: bytes) -> None:
    text = join_token.new_token(lambda count: raw[:count])
    assert [len(group) for group in text.split("-")] == [4] * 8
    assert join_token.read_token(text) == join_token.read_token(text.lower().replace("-", " ") + "\n") == raw


@given(st.binary(min_size=16, max_size=16), st.integers(0, 31), st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
def test_a_slip_in_a_token_is_found(raw: bytes, at: int, letter: str) -> None:
    text = join_token.new_token(lambda _count: raw).replace("-", "")
    bent = text[:at] + letter + text[at + 1 :]
    if bent != text:
        with pytest.raises(join_token.TokenError):
            join_token.read_token(bent)


@pytest.mark.parametrize("text", ["", "Q", "AAAA-AAAA", "1" * 32, "é" * 32, "A" * 33, "=" * 32])
def test_what_is_no_token_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(join_token.TokenError) as refusal:
        join_token.read_token(text)
    assert not text or text not in str(refusal.value)


def test_a_poor_source_of_tokens_is_refused() -> None:
    with pytest.raises(join_token.TokenError):
        join_token.new_token(lambda count: b"x" * (count - 1))
    with pytest.raises(join_token.TokenError):
        join_token.token_key(b"short")


def test_the_key_of_a_token_is_hkdf_of_it_by_a_second_implementation() -> None:
    raw = bytes(range(16))
    secret = hmac.digest(bytes(32), raw, "sha256")  # RFC 5869: extract without a salt,
    block = hmac.digest(secret, b"lazaret join key/1/0\x01", "sha256")  # and the first block of expand
    assert join_token.token_key(raw).private_numbers().private_value == int.from_bytes(block)
    assert join_token.token_key(raw).curve.name == "secp256r1"
    assert hashlib.sha256(key_files.pem(join_token.token_key(raw))) != hashlib.sha256(
        key_files.pem(join_token.token_key(raw[::-1]))
    )


def test_a_draw_outside_the_group_is_thrown_away_and_not_reduced() -> None:
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    bad = [n.to_bytes(32) for n in (0, order, order + 1, (1 << 256) - 1)]
    for good in (1, order - 1, 77):
        assert join_token.scalar([*bad, good.to_bytes(32), (5).to_bytes(32)]) == good
    ec.derive_private_key(
        order - 1, ec.SECP256R1()
    )  # the bound is the curve's own: one more is refused by the library
    with pytest.raises(ValueError, match="out of range"):
        ec.derive_private_key(order, ec.SECP256R1())


def private(folder: Path, mode: int = 0o600) -> Path:
    path = folder / "x.key"
    key_files.write_private(path, key_files.pem(Ed25519PrivateKey.generate()))
    path.chmod(mode)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "keys").mkdir(mode=0o700)
    return tmp_path / "keys"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o601, 0o620, 0o660, 0o666, 0o644])
def test_a_key_that_others_may_touch_is_not_read(folder: Path, mode: int) -> None:
    with pytest.raises(key_files.KeyFileError, match="chmod 600"):
        key_files.signing_key(private(folder, mode))


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o701, 0o770, 0o777, 0o1777, 0o755])
def test_a_key_in_a_directory_that_others_may_enter_is_not_read(folder: Path, mode: int) -> None:
    path = private(folder)
    folder.chmod(mode)
    with pytest.raises(key_files.KeyFileError, match="chmod 700"):
        key_files.signing_key(path)


def test_a_key_that_is_a_symbolic_link_or_under_one_is_not_read(folder: Path) -> None:
    path = private(folder)
    (folder / "link.key").symlink_to(path)
    folder.with_name("other").symlink_to(folder, target_is_directory=True)
    for bad in (folder / "link.key", folder.with_name("other") / "x.key"):
        with pytest.raises(key_files.KeyFileError, match="symbolic link"):
            key_files.signing_key(bad)
    assert key_files.signing_key(path)


def test_what_is_no_file_is_not_read_and_nobody_waits_for_it(folder: Path) -> None:
    os.mkfifo(folder / "pipe.key", 0o600)
    (folder / "dir.key").mkdir(mode=0o700)
    for name in ("pipe.key", "dir.key", "none.key"):
        with pytest.raises(key_files.KeyFileError):
            key_files.read_private(folder / name)
    with pytest.raises(key_files.KeyFileError):
        key_files.read_private(folder / "nowhere" / "x.key")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("what", ["x.key", ""])
def test_a_key_of_another_user_is_not_read(folder: Path, what: str) -> None:
    path = private(folder)
    os.chown(folder / what, 12_345, -1)
    with pytest.raises(key_files.KeyFileError, match="another user"):
        key_files.read_private(path)


def test_a_key_of_another_kind_is_none(folder: Path) -> None:
    key_files.write_private(folder / "ec.key", key_files.pem(key()))
    key_files.write_private(folder / "junk.key", b"junk")
    assert key_files.ec_key(folder / "ec.key")
    for read, name in (
        (key_files.signing_key, "ec.key"),
        (key_files.signing_key, "junk.key"),
        (key_files.ec_key, "junk.key"),
    ):
        with pytest.raises(key_files.KeyFileError):
            read(folder / name)
    with pytest.raises(key_files.KeyFileError):
        key_files.ec_key(private(folder))


def test_a_private_file_is_made_private_never_over_another_and_replaced_whole(folder: Path) -> None:
    os.umask(0o022)
    path = private(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        key_files.write_private(path, b"new")
    path.chmod(0o644)
    key_files.replace_private(path, b"new")
    assert (key_files.read_private(path), path.stat().st_mode & 0o777) == (b"new", 0o600)
    assert [p.name for p in folder.iterdir()] == ["x.key"]


def test_a_link_is_replaced_and_what_it_leads_to_stays(folder: Path) -> None:
    target = folder.parent / "precious"
    target.write_bytes(b"old")
    (folder / "x.key").symlink_to(target)
    with pytest.raises(FileExistsError):
        key_files.write_private(folder / "x.key", b"new")
    key_files.replace_private(folder / "x.key", b"new")
    assert (target.read_bytes(), key_files.read_private(folder / "x.key")) == (b"old", b"new")


def test_many_threads_that_replace_a_private_file_leave_one_whole_body(folder: Path) -> None:
    path, bodies = folder / "x.key", [bytes([i]) * 50_000 for i in range(8)]
    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda body: key_files.replace_private(path, body), bodies * 4))
    assert key_files.read_private(path) in bodies
    assert [p.name for p in folder.iterdir()] == ["x.key"]
