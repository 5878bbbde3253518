"""Messages of secure aggregation: fixed layouts, one encoding each, signed with the site's enrolled key.

A message is ``magic(4) kind(1) session(32) sender(2)``, a body and an Ed25519 signature (64) over the DSSE PAE of
`PAYLOAD_TYPE` and the SHA-256 of all before it. A sender is its place among the sorted sites. All sizes follow from
the session, so a message's size is checked before a byte of it is read; integers are little-endian.

| kind | body |
|---|---|
| 1 advertise | X25519 for shares (32), X25519 for masks (32), commitment to the self mask's seed (32) |
| 2 share | SHA-256 of all advertisements (32), commitments to the shares kept (2 x 32), one parcel for each other |
| 3 mask | the masked vector, ring words |
| 4 agree | bitmap of survivors, bitmap of those who dropped out |
| 5 reveal | for each site of the roster: kind (0 none, 1 of the self mask's seed, 2 of the mask key), share (33) |
| 6 parcel | SHA-256 of all advertisements (32), addressee (2), commitments (2 x 32), sealed shares (66 + 16) |

What the coordinator sends are such messages end to end, ascending by sender, and before step 4 the unsigned *roll*:
an agree message's body.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protos.common.dsse import pae
from protos.common.errors import PeerError
from protos.secagg.session import SumSession
from protos.secagg.shamir import SHARE_BYTES, is_share

PAYLOAD_TYPE: Final = "application/vnd.lazaret.secagg.v1"
MAGIC: Final = b"LSA1"
_HEAD: Final = struct.Struct("<4sB32sH")
SIGNATURE_BYTES: Final = 64
FRAME: Final = _HEAD.size + SIGNATURE_BYTES
_SEALED: Final = 2 * SHARE_BYTES + 16
_PARCEL_BODY: Final = 32 + 2 + 64 + _SEALED
PARCEL_BYTES: Final = FRAME + _PARCEL_BODY
PARCEL: Final = 6
NO_SHARE, SEED_SHARE, KEY_SHARE = 0, 1, 2


class SumStep(IntEnum):
    """The five exchanges of a round, in order; also the kinds of a member's messages."""

    ADVERTISE = 1
    SHARE = 2
    MASK = 3
    AGREE = 4
    REVEAL = 5


class SecAggError(PeerError, ValueError):
    """A member or the coordinator goes no further: the reason, and no secret, is in the text."""


class SecAggMessageError(SecAggError):
    """Malformed, oversized, of another session, step or sender, or not validly signed."""


def sign(session: SumSession, kind: int, sender: int, body: bytes, key: Ed25519PrivateKey) -> bytes:
    """A message's bytes."""
    message = _HEAD.pack(MAGIC, kind, session.digest, sender) + body
    return message + key.sign(pae(PAYLOAD_TYPE, hashlib.sha256(message).digest()))


def open_message(session: SumSession, kind: int, raw: bytes | memoryview, body_bytes: int) -> tuple[int, memoryview]:
    """Check size, frame and signature; then (sender, body).

    Raises:
        SecAggMessageError: for anything but this kind of message of this session.
    """
    if len(raw) != FRAME + body_bytes:
        raise SecAggMessageError(f"a message of kind {kind} has {FRAME + body_bytes} bytes")
    view = memoryview(raw)
    magic, found, digest, sender = _HEAD.unpack(view[: _HEAD.size])
    if magic != MAGIC or found != kind:
        raise SecAggMessageError("a message of another kind or version")
    if digest != session.digest:
        raise SecAggMessageError("of another session: run, round, parameters, roster or start vector differ")
    if not sender < len(session.sites):
        raise SecAggMessageError("the sender is not in the roster")
    signed, signature = view[:-SIGNATURE_BYTES], bytes(view[-SIGNATURE_BYTES:])
    public = session.roster[session.sites[sender]]
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(
            signature, pae(PAYLOAD_TYPE, hashlib.sha256(signed).digest())
        )
    except (InvalidSignature, ValueError):
        raise SecAggMessageError(f"not signed by the enrolled key of {session.sites[sender]}") from None
    return sender, view[_HEAD.size : -SIGNATURE_BYTES]


def split_messages(session: SumSession, raw: bytes, size: int) -> list[bytes]:
    """The messages of ``size`` bytes that the coordinator sent end to end.

    Raises:
        SecAggMessageError: no whole number of them, or more than there are sites.
    """
    if len(raw) % size or len(raw) > size * len(session.sites):
        raise SecAggMessageError("not a whole number of messages, or too many")
    return [raw[start : start + size] for start in range(0, len(raw), size)]


# -- sets of sites ---------------------------------------------------------------------------------------------------


def pack_set(session: SumSession, members: Iterable[int]) -> bytes:
    """A set of sites as a bitmap, lowest bit of the first byte first."""
    return sum(1 << i for i in set(members)).to_bytes(_set_bytes(session), "little")


def _set_bytes(session: SumSession) -> int:
    return -(-len(session.sites) // 8)


@dataclass(frozen=True, slots=True)
class SurvivorList:
    """The survivors when the masked vectors were in, and the dropouts."""

    alive: frozenset[int]
    dead: frozenset[int]

    def encode(self, session: SumSession) -> bytes:
        """The two bitmaps."""
        return pack_set(session, self.alive) + pack_set(session, self.dead)

    @staticmethod
    def size(session: SumSession) -> int:
        """Bytes of a roll."""
        return 2 * _set_bytes(session)


def read_roll(session: SumSession, raw: bytes | memoryview) -> SurvivorList:
    """Read two bitmaps; nothing is said yet about whether they make sense.

    Raises:
        SecAggMessageError: of another size, or with bits for sites that do not exist.
    """
    half = _set_bytes(session)
    if len(raw) != 2 * half:
        raise SecAggMessageError("a roll is two bitmaps")
    sets = [int.from_bytes(raw[start : start + half], "little") for start in (0, half)]
    if any(bits >> len(session.sites) for bits in sets):
        raise SecAggMessageError("a roll names sites that are not in the roster")
    alive, dead = (frozenset(i for i in range(len(session.sites)) if bits >> i & 1) for bits in sets)
    return SurvivorList(alive, dead)


# -- keys ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advert:
    """A member's public keys for this session."""

    sender: int
    share_key: bytes  # X25519: seals shares (the paper's c^PK)
    mask_key: bytes  # X25519: pairwise masks (the paper's s^PK)
    commitment: bytes  # to the self mask's seed (the paper's b)


def read_advert(session: SumSession, raw: bytes) -> Advert:
    """Check and read an advertisement.

    Raises:
        SecAggMessageError: malformed, badly signed, or with a key of small order.
    """
    sender, body = open_message(session, SumStep.ADVERTISE, raw, 96)
    share_key, mask_key, commitment = (bytes(body[start : start + 32]) for start in (0, 32, 64))
    probe = X25519PrivateKey.from_private_bytes(bytes([1]) * 32)
    for public in (share_key, mask_key):
        _exchange(probe, public)  # a point of small order gives zero with every private key
    return Advert(sender, share_key, mask_key, commitment)


ADVERT_BYTES: Final = FRAME + 96


def _exchange(mine: X25519PrivateKey, theirs: bytes) -> bytes:
    try:
        return mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise SecAggMessageError("a public key of small order") from None


def derive(session: SumSession, label: bytes, numbers: tuple[int, ...], secret: bytes) -> bytes:
    """A 32-byte key for one use: HKDF-SHA256 (RFC 5869), salt: the session, info: label and members' numbers."""
    info = b"lazaret secagg " + label + struct.pack(f"<{len(numbers)}H", *numbers)
    return HKDF(SHA256(), 32, session.digest, info).derive(secret)


def pair_seed(session: SumSession, mine: X25519PrivateKey, own: int, theirs: Advert) -> bytes:
    """The seed of the mask that members ``own`` and ``theirs.sender`` share, the same from both sides."""
    numbers = (min(own, theirs.sender), max(own, theirs.sender))
    return derive(session, b"pair", numbers, _exchange(mine, theirs.mask_key))


def self_seed(session: SumSession, own: int, secret: bytes) -> bytes:
    """The seed of member ``own``'s self mask."""
    return derive(session, b"self", (own,), secret)


def commit(session: SumSession, label: bytes, numbers: tuple[int, ...], value: bytes) -> bytes:
    """SHA-256 commitment to a uniformly random value of at least 32 bytes: it hides because the value does."""
    head = b"lazaret secagg commit " + label + struct.pack(f"<{len(numbers)}H", *numbers)
    return hashlib.sha256(head + session.digest + value).digest()


def commit_shares(session: SumSession, dealer: int, holder: int, shares: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Commitments to ``holder``'s shares of ``dealer``'s self seed and mask key."""
    seed, key = shares
    return commit(session, b"seed", (dealer, holder), seed), commit(session, b"key", (dealer, holder), key)


# -- parcels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SealedShares:
    """Two shares from ``dealer`` to ``holder``, sealed."""

    dealer: int
    holder: int
    commitments: tuple[bytes, bytes]
    sealed: bytes


def _parcel_key(
    session: SumSession, mine: X25519PrivateKey, theirs: bytes, dealer: int, holder: int
) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive(session, b"parcel", (dealer, holder), _exchange(mine, theirs)))


def _parcel_data(session: SumSession, adverts: bytes, dealer: int, holder: int) -> bytes:
    return _HEAD.pack(MAGIC, PARCEL, session.digest, dealer) + adverts + struct.pack("<H", holder)


@dataclass(frozen=True, slots=True)
class Dealer:
    """One member's means to seal and open parcels after all advertisements are known."""

    session: SumSession
    own: int
    secret: X25519PrivateKey
    adverts: bytes  # SHA-256 of all advertisements, ascending

    def seal(self, to: Advert, shares: tuple[bytes, bytes], key: Ed25519PrivateKey) -> bytes:
        """A signed parcel. Its key serves this dealer, holder and session alone: one nonce, zero, is enough."""
        holder = to.sender
        first, second = commit_shares(self.session, self.own, holder, shares)
        cipher = _parcel_key(self.session, self.secret, to.share_key, self.own, holder)
        data = _parcel_data(self.session, self.adverts, self.own, holder)
        sealed = cipher.encrypt(bytes(12), b"".join(shares), data)
        body = self.adverts + struct.pack("<H", holder) + first + second + sealed
        return sign(self.session, PARCEL, self.own, body, key)

    def open(self, parcel: SealedShares, by: Advert) -> tuple[bytes, bytes] | None:
        """The two shares, or None where the dealer (who signed this) sealed something else than it committed to."""
        cipher = _parcel_key(self.session, self.secret, by.share_key, parcel.dealer, parcel.holder)
        data = _parcel_data(self.session, self.adverts, parcel.dealer, parcel.holder)
        try:
            plain = cipher.decrypt(bytes(12), parcel.sealed, data)
        except InvalidTag:
            return None
        shares = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
        if not all(map(is_share, shares)):
            return None
        wanted = commit_shares(self.session, parcel.dealer, parcel.holder, shares)
        return shares if wanted == parcel.commitments else None


def read_parcel(session: SumSession, raw: bytes | memoryview, adverts: bytes) -> SealedShares:
    """Check a parcel's frame, signature and the set of advertisements that it answers.

    Raises:
        SecAggMessageError: malformed, badly signed, or made for other advertisements.
    """
    dealer, body = open_message(session, PARCEL, raw, _PARCEL_BODY)
    (holder,) = struct.unpack("<H", body[32:34])
    if body[:32] != adverts:
        raise SecAggMessageError("a parcel was made for other advertisements than these")
    if not (holder < len(session.sites) and holder != dealer):
        raise SecAggMessageError("a parcel has no such addressee")
    return SealedShares(dealer, holder, (bytes(body[34:66]), bytes(body[66:98])), bytes(body[98:]))


# -- reveals ---------------------------------------------------------------------------------------------------------


def pack_reveal(session: SumSession, shares: dict[int, tuple[int, bytes]]) -> bytes:
    """The body of a reveal: member's number -> (kind, share); who is not named has none."""
    nothing = (NO_SHARE, bytes(SHARE_BYTES))
    rows = (shares.get(i, nothing) for i in range(len(session.sites)))
    return b"".join(bytes([kind]) + share for kind, share in rows)


def read_reveal(session: SumSession, raw: bytes, roll: SurvivorList) -> tuple[int, dict[int, bytes]]:
    """Check a reveal against the roll: (sender, member's number -> share).

    Raises:
        SecAggMessageError: malformed, badly signed, or with a share of a kind that the roll does not ask for.
    """
    row = 1 + SHARE_BYTES
    sender, body = open_message(session, SumStep.REVEAL, raw, row * len(session.sites))
    shares: dict[int, bytes] = {}
    for i in range(len(session.sites)):
        kind, share = body[row * i], bytes(body[row * i + 1 : row * (i + 1)])
        if kind == NO_SHARE and not any(share):
            continue
        asked = SEED_SHARE if i in roll.alive else KEY_SHARE if i in roll.dead else NO_SHARE
        if kind == NO_SHARE or kind != asked or not is_share(share):
            raise SecAggMessageError("a reveal holds what nobody asked for")
        shares[i] = share
    return sender, shares
