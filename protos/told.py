"""What a network's file says of itself in its header: which kind it is and how it is built, and not a word more.

Safetensors has room for texts of any length beside the tensors. Of a file that leaves a site they are one text: the
canonical JSON of ``kind``, ``config`` and empty ``notes``. It belongs to the approved architecture and is compared
byte for byte, so that nothing can be told in it that the operator has not read. How a release was made stands in its
sealed statement.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from protos.blocks import BadArtifact

KEY: Final = "lazaret"  # of the one text, in the header's ``__metadata__``
MOST: Final = 16_384  # characters: a person is to read it
_KIND: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def canonical(told: object) -> str:
    """The text of a JSON value: sorted keys, no spaces, ASCII.

    Raises:
        BadArtifact: it is no JSON, or a number in it is not finite.
    """
    try:
        return json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise BadArtifact("what the file says of itself is not JSON") from None


def check_told(text: str) -> None:
    """Refuse everything but a kind, a configuration and empty notes, in the one form.

    Raises:
        BadArtifact: with the first reason found.
    """
    if type(text) is not str or len(text) > MOST:
        raise BadArtifact(f"what a file says of itself has at most {MOST} characters")
    try:
        told: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise BadArtifact("what the file says of itself is not JSON") from None
    if not isinstance(told, dict) or set(told) != {"kind", "config", "notes"} or canonical(told) != text:
        raise BadArtifact("a file says of itself its kind, its config and empty notes, in canonical JSON")
    if type(told["kind"]) is not str or not _KIND.fullmatch(told["kind"]) or not isinstance(told["config"], dict):
        raise BadArtifact("a kind is a short word of lower-case letters, and a config an object")
    if told["notes"] != {}:
        raise BadArtifact("a network that leaves a site has no notes: how it was made stands in its statement")
