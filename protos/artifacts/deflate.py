"""A zlib stream that is a function of its data alone: one block of literals under their own Huffman code.

Compressors may produce different streams for the same data, and so may two versions of one compressor. That choice
could carry a message, and a check by recompressing would depend on the version. This encoder has no such choice (RFC
1951, section 3.2.7):

- one block, the last, of type 2 (dynamic codes), with 257 literal codes, 2 distance codes and 19 code length codes;
- the code length code gives each of 0 to 15 four bits, and 16 to 18 none: every length is written out, in four bits;
- both distance codes have length 1 and are never used: nothing is copied, a stream holds at most eight times itself;
- the lengths of literals and of the end are Huffman's, merging the two least first: of equal weights a symbol before
  a merged pair, symbols by their number, pairs by their age. Where one would exceed 15 bits, all counts are halved,
  rounded up, and it is done again.

Any inflater reads it.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

_END: Final = 256  # the symbol after the last byte
_LONGEST: Final = 15  # bits of a code
_AT_ONCE: Final = 1 << 18  # symbols: what is held beside the data does not depend on its length
_HEAD: Final = b"\x78\x01"
Words = NDArray[np.uint64]


def compressed(data: bytes) -> bytes:
    """A zlib stream (RFC 1950) of ``data``, which is not empty."""
    symbols = np.frombuffer(data, np.uint8)
    counts = np.append(np.bincount(symbols, minlength=256), 1)
    lengths = code_lengths(counts.tolist())
    codes = _codes(lengths)
    head = _block_head(lengths)
    size = len(head) + int((counts * lengths).sum())
    out: Words = np.zeros(-(-size // 64) + 1, np.uint64)
    at = _put(out, 0, np.array(head, np.uint64), np.ones(len(head), np.uint64))
    for start in range(0, len(symbols), _AT_ONCE):
        part = symbols[start : start + _AT_ONCE]
        at = _put(out, at, codes[part], lengths[part].astype(np.uint64))
    _put(out, at, codes[[_END]], lengths[[_END]].astype(np.uint64))
    body = out.astype("<u8").tobytes()[: -(-size // 8)]
    return _HEAD + body + struct.pack(">I", zlib.adler32(data))


def code_lengths(counts: list[int]) -> NDArray[np.int64]:
    """The bits of each symbol's code, 1 to 15; 0 for one that does not occur. At least two of them do."""
    while True:
        lengths = _huffman(counts)
        if lengths.max() <= _LONGEST:
            return lengths
        counts = [-(-count // 2) for count in counts]


def _huffman(counts: list[int]) -> NDArray[np.int64]:
    """The depth of each leaf, by two queues: symbols by count and number, and pairs in the order of their making."""
    symbols = sorted((count, number) for number, count in enumerate(counts) if count)
    leaves = len(symbols)
    weights = [count for count, _ in symbols]
    parent = [0] * (2 * leaves - 1)
    leaf, pair = 0, leaves
    for made in range(leaves, 2 * leaves - 1):
        total = 0
        for _ in range(2):
            if pair >= made or (leaf < leaves and weights[leaf] <= weights[pair]):
                taken, leaf = leaf, leaf + 1
            else:
                taken, pair = pair, pair + 1
            parent[taken] = made
            total += weights[taken]
        weights.append(total)
    depth = [0] * (2 * leaves - 1)
    for node in range(2 * leaves - 3, -1, -1):
        depth[node] = depth[parent[node]] + 1
    lengths = np.zeros(len(counts), np.int64)
    lengths[[number for _, number in symbols]] = depth[:leaves]
    return lengths


def _codes(lengths: NDArray[np.int64]) -> Words:
    """The canonical codes (RFC 1951, section 3.2.2), their first bit lowest, as the stream has them."""
    codes: Words = np.zeros(len(lengths), np.uint64)
    code, before = 0, 0
    for length, symbol in sorted((int(length), symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - before
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, before = code + 1, length
    return codes


def _block_head(lengths: NDArray[np.int64]) -> list[int]:
    """The block's head as bits: type, sizes, the code for lengths (in the order of section 3.2.7), the lengths."""
    bits = [1, 0, 1]
    for value, width in ((0, 5), (1, 5), (15, 4), *((0, 3),) * 3, *((4, 3),) * 16):
        bits += [value >> place & 1 for place in range(width)]
    for length in (*lengths.tolist(), 1, 1):
        bits += [length >> place & 1 for place in (3, 2, 1, 0)]  # a code: its first bit is its highest
    return bits


def _put(out: Words, at: int, values: Words, lengths: Words) -> int:
    """Or values of at most 15 bits into the stream from bit ``at``; where it goes on."""
    for _ in range(2):  # two and two: four codes are at most 60 bits
        if len(values) % 2:
            values, lengths = np.append(values, np.uint64(0)), np.append(lengths, np.uint64(0))
        values = values[::2] | values[1::2] << lengths[::2]
        lengths = lengths[::2] + lengths[1::2]
    ends = np.cumsum(lengths) + np.uint64(at)
    starts = ends - lengths
    words, shifts = (starts >> np.uint64(6)).astype(np.int64), starts & np.uint64(63)
    firsts = np.flatnonzero(np.diff(words, prepend=-1))
    lasts = np.append(firsts[1:], len(words)) - 1
    out[words[firsts]] |= np.bitwise_or.reduceat(values << shifts, firsts)
    out[words[lasts] + 1] |= values[lasts] >> np.uint64(1) >> (np.uint64(63) - shifts[lasts])
    return int(ends[-1])
