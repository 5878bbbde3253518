"""Who a network learned from, without naming them: keyed digests, and folds by a keyed hash.

A person's fold is a function of the person and the site's key, whoever comes or goes later. The network of fold f
learned from everybody but the persons of fold f, so it may be used on all of them, also on those who come later. A
file says by a code over its own content which key it goes by: another site's key finds other folds in it, and a file
that somebody made up has none.
"""

from __future__ import annotations

import hmac
import json
from hashlib import sha256
from typing import Final

KEY: Final = 32  # bytes
MARK: Final = 16  # bytes of a person's digest
MOST_FOLDS: Final = 32


def fold_of(person: str, key: bytes, folds: int) -> int:
    """The fold that a person is in, 0 to ``folds`` - 1.

    Args:
        person: the pseudonym.
        key: the site's, 32 bytes.
        folds: how many.
    """
    if not 2 <= folds <= MOST_FOLDS:
        raise ValueError(f"there are 2 to {MOST_FOLDS} folds")
    return int.from_bytes(_keyed(key, "fold", person)[:8], "big") * folds >> 64  # uniform but for 2^-59


def mark_of(person: str, key: bytes) -> bytes:
    """What stands for a person in the list of those whom a network saw: 16 bytes."""
    return _keyed(key, "seen", person)[:MARK]


def code_of(content: str, key: bytes) -> str:
    """What proves that whoever wrote this content had the key."""
    return _keyed(key, "content", content).hex()


def goes_by(code: str, content: str, key: bytes) -> bool:
    """Whether the code is that of the content under this key."""
    return hmac.compare_digest(code, code_of(content, key))


def _keyed(key: bytes, use: str, what: str) -> bytes:
    if len(key) != KEY:
        raise ValueError(f"a key has {KEY} bytes")
    return hmac.new(key, json.dumps(["remodeller", use, what]).encode(), sha256).digest()
