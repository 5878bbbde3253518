"""The arithmetic of secure aggregation: real vectors on a lattice, sums modulo 2^32 or 2^64, ChaCha20 masks.

A site's vector is clipped to [-bound, bound], rounded to the nearest multiple of 2^-scale (ties to even) and counted
in that unit: int64 "lattice" numbers. In the ring they are two's complement. The ring is wide enough for the sum of
``max_members`` vectors, so the sum never wraps, and it is read back exactly: all loss is the clipping and at most
2^-(scale+1) of rounding per site and coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from protos.common.errors import RefusedError

MAX_LENGTH: Final = 1 << 28
MAX_SCALE: Final = 40
_EXACT: Final = 1 << 53  # integers up to here are float64 numbers
_PIECE: Final = 1 << 18  # bytes of mask at a time: they stay in the processor's cache
_ZEROS: Final = bytes(_PIECE)

Words = NDArray[np.unsignedinteger[Any]]


class NotEncodableError(RefusedError, ValueError):
    """The vector has another shape or type, is not finite, or leaves the bound."""


@dataclass(frozen=True, slots=True)
class Ring:
    """What vectors look like: the same for every member of a round."""

    length: int  # coordinates
    bits: int  # 32 or 64
    bound: float  # of a coordinate's absolute value, a multiple of 2^-scale
    scale: int  # the lattice's unit is 2^-scale
    peak: int = field(init=False)  # the bound in lattice units
    max_members: int = field(init=False)  # so many vectors cannot wrap, and float64 holds their sum exactly

    def __post_init__(self) -> None:
        """Refuse what could wrap, round twice, or be misread.

        Raises:
            ValueError: naming the field.
        """
        if type(self.length) is not int or not 1 <= self.length <= MAX_LENGTH:
            raise ValueError(f"length lies in [1, {MAX_LENGTH}]")
        if type(self.bits) is not int or self.bits not in (32, 64):
            raise ValueError("bits is 32 or 64")
        if type(self.scale) is not int or not 0 <= self.scale <= MAX_SCALE:
            raise ValueError(f"scale lies in [0, {MAX_SCALE}]")
        if type(self.bound) is not float or not 0.0 < self.bound < math.inf:
            raise ValueError("bound is a finite positive float")
        units = math.ldexp(self.bound, self.scale) if self.bound <= _EXACT else math.inf
        if not units <= _EXACT or units != math.floor(units):
            raise ValueError("bound is a multiple of 2^-scale, and at most 2^53 of them")
        object.__setattr__(self, "peak", int(units))
        object.__setattr__(self, "max_members", min((1 << (self.bits - 1)) - 1, _EXACT) // int(units))

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Little-endian words of the ring."""
        return np.dtype("<u4" if self.bits == 32 else "<u8")

    @property
    def size(self) -> int:
        """Bytes of one vector on the wire."""
        return self.length * self.bits // 8

    def error(self, members: int) -> float:
        """The most that the decoded sum of ``members`` vectors within the bound differs from the true one."""
        return members * math.ldexp(1.0, -self.scale - 1)

    def quantise(self, vector: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
        """Clip and round (length,) float32 or float64 to lattice units, int64.

        Raises:
            NotEncodableError: another type or shape, or a NaN or an infinity.
        """
        if not isinstance(vector, np.ndarray) or vector.dtype not in (np.float32, np.float64):
            raise NotEncodableError("a vector is of float32 or float64")
        if vector.shape != (self.length,) or not bool(np.isfinite(vector).all()):
            raise NotEncodableError(f"a vector has shape ({self.length},) and is finite")
        clipped = np.clip(vector.astype(np.float64), -self.bound, self.bound)
        return np.rint(np.ldexp(clipped, self.scale)).astype(np.int64)  # a power of two: the product is exact

    def lift(self, lattice: NDArray[np.int64]) -> Words:
        """Lattice units (length,) int64 into the ring.

        Raises:
            NotEncodableError: another type or shape, or beyond the bound: such a sum could wrap.
        """
        if not isinstance(lattice, np.ndarray) or lattice.dtype != np.int64 or lattice.shape != (self.length,):
            raise NotEncodableError(f"lattice units are ({self.length},) int64")
        if not (-self.peak <= int(lattice.min()) and int(lattice.max()) <= self.peak):
            raise NotEncodableError("a coordinate leaves the bound")
        return lattice.astype(self.dtype)

    def lower(self, total: Words) -> NDArray[np.int64]:
        """The signed sum, in lattice units, of a ring element without masks."""
        signed = np.int32 if self.bits == 32 else np.int64
        return total.view(signed).astype(np.int64)

    def decode(self, lattice: NDArray[np.int64]) -> NDArray[np.float64]:
        """Lattice units as numbers; exact for every sum of up to ``max_members`` vectors."""
        return np.ldexp(lattice.astype(np.float64), -self.scale)

    def read(self, raw: bytes | memoryview) -> Words:
        """The ring element that ``size`` bytes hold, without a copy.

        Raises:
            NotEncodableError: of another size.
        """
        if len(raw) != self.size:
            raise NotEncodableError("of another size")
        return np.frombuffer(raw, self.dtype)

    def add_mask(self, total: Words, seed: bytes, sign: int) -> None:
        """Add (``sign`` 1) or take away (-1) the mask of a 32-byte seed, in place, modulo 2^bits.

        The mask is the ChaCha20 keystream (RFC 8439; counter and nonce zero) as little-endian words. A seed serves
        one mask only.

        Raises:
            ValueError: a seed of another size, another sign, or a total of another type.
        """
        if len(seed) != 32 or sign not in (1, -1) or total.dtype != self.dtype or total.shape != (self.length,):
            raise ValueError("a mask takes a 32-byte seed, a sign, and a total of this ring")
        stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
        buffer = bytearray(_PIECE)
        words = np.frombuffer(buffer, self.dtype)
        for start in range(0, self.length, len(words)):
            stream.update_into(_ZEROS, buffer)
            part = total[start : start + len(words)]
            if sign > 0:
                part += words[: len(part)]
            else:
                part -= words[: len(part)]
