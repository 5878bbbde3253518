"""The exact schema of a site's reply to a Flower message; any reading error is a schema error."""

from __future__ import annotations

from typing import Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from protos.artifacts.bfloat16 import BFLOAT16, FLOAT32, Numbers, is_finite
from protos.common.errors import PeerError
from protos.federation import flat_arrays, messages
from protos.federation.flower_arrays import STYPE, sent_from

_CARRIED: Final = {FLOAT32: "<f4", BFLOAT16: "<u2"}  # numpy has no type for bfloat16: its bits travel
_NPY_HEADER: Final = 4096  # bytes that numpy's header may take in front of the values
# Flower's own numbers (3 and 4: message or reply unavailable, 5: node unavailable), then the sites'.
_ERRORS: Final = {3: "no_reply", 4: "no_reply", 5: "offline"} | {n: name for name, n in messages.CODES.items()}


class InvalidReplyError(PeerError):
    """A reply is not usable; the argument is the code."""


def pack(vector: NDArray[np.float32]) -> ArrayRecord:
    """(p,) float32 as the one flat tensor of a message."""
    return sent_from(messages.FLAT, vector)


def pack_payload(data: bytes | NDArray[np.float32]) -> ArrayRecord:
    """Bytes, or those of numbers, as what a message carries."""
    return sent_from(messages.DATA, np.frombuffer(data, np.uint8))


def error_name(code: int) -> str:
    """The refusal code for an Error's number; its text is not read."""
    return _ERRORS.get(code, "failed")


def read(content: RecordDict, size: int | None, precision: str = FLOAT32) -> tuple[bytes, Numbers | None]:
    """Envelope and, when ``size`` is given, the (size,) numbers of a reply: float32, or the bits of bfloat16.

    Raises:
        InvalidReplyError: "schema" or "not_finite". The records are exact: nothing is missing, nothing extra.
    """
    try:
        return _envelope(content, size), None if size is None else _numbers(content, size, precision)
    except InvalidReplyError:
        raise
    except Exception:  # noqa: BLE001 - bytes from outside; whatever they break is a wrong schema
        raise InvalidReplyError("schema") from None


def payload(content: RecordDict, most: int) -> bytes:
    """The bytes of a reply that carries bytes, at most ``most``.

    Raises:
        InvalidReplyError: "schema".
    """
    try:
        record = content[messages.PAYLOAD]
        if (
            set(content) != {messages.PAYLOAD}
            or not isinstance(record, ArrayRecord)
            or list(record) != [messages.DATA]
        ):
            raise InvalidReplyError("schema")
        array = record[messages.DATA]
        if array.dtype != "uint8" or not len(array.data) <= most + _NPY_HEADER:
            raise InvalidReplyError("schema")
        return array.numpy().tobytes()  # never unpickles
    except InvalidReplyError:
        raise
    except Exception:  # noqa: BLE001 - bytes from outside; whatever they break is a wrong schema
        raise InvalidReplyError("schema") from None


def _envelope(content: RecordDict, size: int | None) -> bytes:
    answer = content[messages.ANSWER]
    records = {messages.ANSWER} if size is None else {messages.ANSWER, messages.PARAMETERS}
    if set(content) != records or not isinstance(answer, ConfigRecord) or list(answer) != [messages.ENVELOPE]:
        raise InvalidReplyError("schema")
    envelope = answer[messages.ENVELOPE]
    if not isinstance(envelope, bytes) or not len(envelope) <= messages.MAX_ENVELOPE:
        raise InvalidReplyError("schema")
    return envelope


def _numbers(content: RecordDict, size: int, precision: str) -> Numbers:
    parameters, dtype = content[messages.PARAMETERS], np.dtype(_CARRIED[precision])
    if not isinstance(parameters, ArrayRecord) or list(parameters) != [messages.FLAT]:
        raise InvalidReplyError("schema")
    array, least = parameters[messages.FLAT], dtype.itemsize * size
    # Declared first, so that no foreign header makes numpy allocate; what was decoded counts, below.
    declared = (array.dtype, tuple(array.shape)) == (dtype.name, (size,))
    if not declared or not least <= len(array.data) <= least + _NPY_HEADER:
        raise InvalidReplyError("schema")
    found = flat_arrays.view(array.data, size, dtype) if array.stype == STYPE else None
    numbers: Numbers = array.numpy() if found is None else found  # never unpickles
    if numbers.dtype != dtype or numbers.shape != (size,):
        raise InvalidReplyError("schema")
    if not is_finite(numbers):
        raise InvalidReplyError("not_finite")
    return numbers
