"""Identities on the wire: SPIFFE names, their certificates, and the fingerprints that people compare.

Keys are born where they are used and never travel; a certificate carries exactly one URI name. The root signs once a
year, off line; the intermediate, bound by a name constraint to this trust domain, signs leaves that live a day.
Certificates are made with ``cryptography``'s own builders; a CA product (step-ca, cfssl) would be a second server at
every federation, and enrolment by ledger entry is ours to define.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protos.common.errors import ArtifactError
from protos.identity.key_files import KeyFileError, pem, read_private, signing_key, write_private

__all__ = ["KeyFileError", "pem", "read_private", "signing_key", "write_private"]  # who needs a name needs its key
DOMAIN: Final = "lazaret"
COORDINATOR: Final = f"spiffe://{DOMAIN}/coordinator"
OPERATOR: Final = f"spiffe://{DOMAIN}/person/operator"
SITE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_AGENT: Final = re.compile(rf"spiffe://{DOMAIN}/hospital/({SITE_NAME.pattern})/agent")
_JOINING: Final = re.compile(rf"spiffe://{DOMAIN}/joining/({SITE_NAME.pattern})")
_RETURNING: Final = re.compile(rf"spiffe://{DOMAIN}/returning/({SITE_NAME.pattern})")
ROOT_LIFE: Final = dt.timedelta(days=3650)
INTERMEDIATE_LIFE: Final = dt.timedelta(days=365)
LEAF_LIFE: Final = dt.timedelta(hours=24)
RETURN_LIFE: Final = dt.timedelta(days=30)  # after a site's certificate has ended
CONSOLE_LIFE: Final = dt.timedelta(days=397)  # as long as browsers take one
BACKDATE: Final = dt.timedelta(minutes=5)  # for clocks that are a little behind
_UNREADABLE: Final = (  # what reading a certificate or a request from a stranger can raise
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
_CURVES: Final = ("secp256r1", "secp384r1")
CA = tuple[bytes, bytes]  # private key PEM, certificate PEM


def end_of(path: Path) -> dt.datetime | None:
    """When the first certificate of a PEM file ends, UTC; None where there is none, or none that can be read."""
    try:
        return leaf_of(path.read_bytes()).not_valid_after_utc
    except (OSError, CertificateError):
        return None


def days_left(end: dt.datetime, now: dt.datetime) -> float:
    """Days until then; negative afterwards."""
    return (end - now) / dt.timedelta(days=1)


class CertificateError(ArtifactError, ValueError):
    """A certificate, a chain or a signing request is invalid; the text says why."""


def agent_name(site: str) -> str:
    """The SPIFFE name of a site's agent."""
    return f"spiffe://{DOMAIN}/hospital/{site}/agent"


def site_of(name: str) -> str | None:
    """The site whose agent bears this name, or None."""
    match = _AGENT.fullmatch(name)
    return match.group(1) if match else None


def returning_name(site: str) -> str:
    """The name under which a site whose certificate has ended may ask for another; nothing else."""
    return f"spiffe://{DOMAIN}/returning/{site}"


def returning_site_of(name: str) -> str | None:
    """The site that returns under this name, or None."""
    match = _RETURNING.fullmatch(name)
    return match.group(1) if match else None


def joining_name(site: str) -> str:
    """The name under which a site that is not enrolled yet may hand in its request, and ask; nothing else."""
    return f"spiffe://{DOMAIN}/joining/{site}"


def joining_site_of(name: str) -> str | None:
    """The site that wants to join under this name, or None."""
    match = _JOINING.fullmatch(name)
    return match.group(1) if match else None


def fingerprint(body: bytes) -> str:
    """128 bits of SHA-256, in eight groups of four, to be read aloud over the telephone."""
    digits = hashlib.sha256(body).hexdigest()[:32]
    return " ".join(digits[i : i + 4] for i in range(0, 32, 4))


def root_fingerprint(crt_pem: bytes) -> str:
    """The fingerprint of a whole certificate (its DER), so that nothing in it can be exchanged.

    Raises:
        CertificateError: it cannot be read.
    """
    return fingerprint(_certificate(crt_pem).public_bytes(Encoding.DER))


def same_fingerprint(one: str, other: str) -> bool:
    """Are these the same fingerprint, as people type it? All of it, in any grouping and case."""
    typed = [re.sub(r"[\s:.-]", "", text).lower() for text in (one, other)]
    return bool(re.fullmatch(r"[0-9a-f]{32}", typed[0])) and hmac.compare_digest(typed[0], typed[1])


def request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """A certificate signing request for one SPIFFE name (proof of possession), PEM."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    builder = builder.add_extension(
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name)]), critical=True
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def requested_key(csr_pem: bytes, name: str) -> ec.EllipticCurvePublicKey:
    """The key that a signing request proves possession of.

    Raises:
        CertificateError: it is malformed, not signed by an EC key of its own, or not for ``name`` alone.
    """
    try:
        csr = x509.load_pem_x509_csr(csr_pem)
        public, valid = csr.public_key(), csr.is_signature_valid
        asked = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _UNREADABLE:
        raise CertificateError("the signing request cannot be read") from None
    if not valid or not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name not in _CURVES:
        raise CertificateError("the signing request does not prove possession of a P-256 or P-384 key")
    if [(type(n), n.value) for n in asked] != [(x509.UniformResourceIdentifier, name)]:
        raise CertificateError(f"the signing request is not for {name} alone")
    return public


def make_root(now: dt.datetime) -> CA:
    """A federation's root, for ten years; it signs intermediates and is kept off line."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("Lazaret federation root")
    builder = _builder(name, name, key.public_key(), now, now + ROOT_LIFE)
    return pem(key), _authority(builder, key, 1).sign(key, hashes.SHA384()).public_bytes(Encoding.PEM)


def make_intermediate(root: CA, now: dt.datetime) -> CA:
    """The authority that issues leaves, for a year: no further authority below it, no name outside this domain.

    The critical URI name constraint (RFC 5280, section 4.2.1.10: the host part) is enforced by BoringSSL, which is
    gRPC's, and by OpenSSL.

    Raises:
        CertificateError: the root cannot be used, or has ended.
    """
    root_key, root_crt = _signer(root, now)
    key = ec.generate_private_key(ec.SECP384R1())
    end = min(now + INTERMEDIATE_LIFE, root_crt.not_valid_after_utc)
    builder = _builder(_name("Lazaret federation CA"), root_crt.subject, key.public_key(), now, end)
    builder = _authority(builder, key, 0).add_extension(
        x509.NameConstraints([x509.UniformResourceIdentifier(DOMAIN)], None), critical=True
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key())
    certificate = builder.add_extension(issuer, critical=False).sign(root_key, hashes.SHA384())
    return pem(key), certificate.public_bytes(Encoding.PEM)


def issue(
    csr_pem: bytes, name: str, ca: CA, now: dt.datetime, hosts: tuple[str, ...] = (), life: dt.timedelta = LEAF_LIFE
) -> bytes:
    """The chain for the key of a signing request: leaf and intermediate, PEM; see :func:`certify`.

    Args:
        csr_pem: signed by the key it asks for; the name it asks for must be ``name``.
        name: the one URI name the certificate carries.
        ca: the intermediate.
        now: the time of issue, UTC.
        hosts: DNS names and addresses, for a server.
        life: how long it is valid.
    Raises:
        CertificateError: the request is malformed, not self-signed, or for another name; or the intermediate has
        ended.
    """
    return certify(requested_key(csr_pem, name), name, ca, now, hosts, life)


def certify(
    public: ec.EllipticCurvePublicKey,
    name: str,
    ca: CA,
    now: dt.datetime,
    hosts: tuple[str, ...] = (),
    life: dt.timedelta = LEAF_LIFE,
) -> bytes:
    """The chain for a key whose possession is proved already: valid from five minutes ago, never longer than its CA.

    Raises:
        CertificateError: the intermediate cannot be used, or has ended.
    """
    ca_key, ca_crt = _signer(ca, now)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(name), *map(_host, hosts)]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    leaf = (
        _builder(x509.Name([]), ca_crt.subject, public, now, min(now + life, ca_crt.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=True), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return leaf.public_bytes(Encoding.PEM) + ca_crt.public_bytes(Encoding.PEM)


def self_signed(
    key: ec.EllipticCurvePrivateKey,
    common: str,
    use: x509.ObjectIdentifier,
    now: dt.datetime,
    hosts: tuple[str, ...] = (),
) -> x509.Certificate:
    """A certificate of a console or of one of its people, who is known by this name: it vouches for itself alone.

    It is for one ``use``, client or server; ``hosts`` are a server's DNS names and addresses.
    """
    name, public = _name(common), key.public_key()
    builder = _builder(name, name, public, now, now + CONSOLE_LIFE)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([*map(_host, hosts)]), critical=False)
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def leaf_of(chain_pem: bytes) -> x509.Certificate:
    """The first certificate of a chain.

    Raises:
        CertificateError: there is none.
    """
    return _certificates(chain_pem)[0]


def number_of(leaf: x509.Certificate) -> str:
    """A certificate's serial number as the ledger writes it: hexadecimal, lower case."""
    return f"{leaf.serial_number:x}"


def checked_chain(
    chain_pem: bytes, root_pem: bytes, name: str, public: ec.EllipticCurvePublicKey, now: dt.datetime
) -> x509.Certificate:
    """The leaf of a chain that leads to the root at this moment, and is for this name and key.

    Checked by hand, since ``cryptography.x509.verification`` (50.0) refuses every chain with a URI name constraint.

    Args:
        chain_pem: leaf and intermediate, in this order.
        root_pem: the trust anchor.
        name: the one URI name that the leaf must bear.
        public: the key it must be for.
        now: UTC.
    Raises:
        CertificateError: it is anything else; the text says what.
    """
    found, root = _certificates(chain_pem), _certificate(root_pem)
    if len(found) != 2:
        raise CertificateError("a chain is a leaf and the intermediate that issued it")
    leaf, intermediate = found
    try:
        for below, above in ((leaf, intermediate), (intermediate, root), (root, root)):
            below.verify_directly_issued_by(above)
        lengths = [_path_length(c) for c in (leaf, intermediate, root)]
    except (*_UNREADABLE, InvalidSignature):
        raise CertificateError("the chain does not lead to the root") from None
    if lengths[0] is not None or lengths[1] != 0 or lengths[2] is None:
        raise CertificateError("the chain is not leaf, intermediate and root")
    if not all(c.not_valid_before_utc <= now <= c.not_valid_after_utc for c in (leaf, intermediate, root)):
        raise CertificateError("a certificate of the chain is not valid now: check the clock")
    if uri_of(leaf) != name:
        raise CertificateError(f"the certificate is not for {name} alone")
    if leaf.public_key() != public:
        raise CertificateError("the certificate is for another key")
    return leaf


def uri_of(leaf: x509.Certificate) -> str:
    """The one URI name that a certificate bears.

    Raises:
        CertificateError: none, or several.
    """
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _UNREADABLE:
        raise CertificateError("the certificate has no name") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise CertificateError("the certificate must bear exactly one URI name")
    return uris[0]


def bears(leaf: x509.Certificate, hosts: Iterable[str]) -> bool:
    """Whether a server's certificate is for all of these DNS names and addresses."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _UNREADABLE:
        return False
    return set(map(_host, hosts)) <= set(names)


def _path_length(certificate: x509.Certificate) -> int | None:
    """How many authorities may follow below this one; None: it is none that may sign."""
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    return constraints.path_length if constraints.ca and usage.key_cert_sign else None


def _certificates(chain_pem: bytes) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(chain_pem)
        for certificate in found:
            certificate.extensions  # noqa: B018 - parsed late, and only here may it fail
    except _UNREADABLE:
        raise CertificateError("a certificate cannot be read") from None
    return found


def _certificate(crt_pem: bytes) -> x509.Certificate:
    found = _certificates(crt_pem)
    if len(found) != 1:
        raise CertificateError("one certificate is wanted, and no chain")
    return found[0]


def _signer(ca: CA, now: dt.datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """An authority's key and certificate, which belong together and are valid."""
    try:
        key = load_pem_private_key(ca[0], None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CertificateError("the authority's key cannot be read") from None
    certificate = _certificate(ca[1])
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise CertificateError("the authority's key and certificate do not belong together")
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        raise CertificateError("the authority's certificate is not valid now: renew it with the root's key")
    return key, certificate


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: dt.datetime, end: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(end)
    )


def _authority(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, below: int
) -> x509.CertificateBuilder:
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=below), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, sign: bool) -> x509.KeyUsage:
    """Of a leaf: to sign handshakes; of an authority: to sign certificates."""
    return x509.KeyUsage(sign, False, False, False, False, not sign, not sign, False, False)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def node_public(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A Flower node key's public half, OpenSSH."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
