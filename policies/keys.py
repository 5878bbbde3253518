"""Which Ed25519 public keys may stand for somebody.

A key of small order belongs to nobody: for such a key everybody can make a signature that verifies, without a secret.
RFC 8032 does not refuse them, and neither does the library, so they are refused where a key gets an owner.
"""

from __future__ import annotations

from typing import Final

# Every encoding that reads as one of the eight points of small order: their own eight, and the six that are not in
# their one form, with y + p instead of y, or with a sign for x = 0. Chalkias, Garillot and Nikolaenko, "Taming the
# many EdDSAs" (SSR 2020), section 3 and table 1.
SMALL_ORDER: Final = frozenset(
    bytes.fromhex(key)
    for key in (
        "01" + "00" * 31,  # the neutral point
        "ec" + "ff" * 30 + "7f",  # order 2
        "00" * 32,  # order 4
        "00" * 31 + "80",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",  # order 8
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
        "01" + "00" * 30 + "80",  # the neutral point, written otherwise
        "ee" + "ff" * 30 + "7f",
        "ee" + "ff" * 31,
        "ec" + "ff" * 31,  # order 2
        "ed" + "ff" * 30 + "7f",  # order 4
        "ed" + "ff" * 31,
    )
)


def is_owned(public: bytes) -> bool:
    """Can this be somebody's Ed25519 key (raw)? 32 bytes, and not a key that everybody can sign for."""
    return len(public) == 32 and public not in SMALL_ORDER
