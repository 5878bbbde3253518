"""The exact schema of a site's reply to a Flower message; any reading error is a schema error."""

from __future__ import annotations

from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from coordinator.federation.aggregation import vector_problem
from protos.common.errors import PeerError
from protos.federation import flat_arrays, messages

_STYPE: Final = "numpy.ndarray"  # Flower's word for numpy's file form
_NPY_HEADER: Final = 4096  # bytes that numpy's header may take in front of the values
# Flower's own numbers (3 and 4: message or reply unavailable, 5: node unavailable), then the sites'.
_ERRORS: Final = {3: "no_reply", 4: "no_reply", 5: "offline"} | {n: name for name, n in messages.CODES.items()}


class InvalidReplyError(PeerError):
    """A reply is not usable; the argument is the code."""


def pack(vector: NDArray[np.float32]) -> ArrayRecord:
    """(p,) float32 as the one flat tensor of a message."""
    array = Array("float32", (int(vector.size),), _STYPE, flat_arrays.packed(vector))
    return ArrayRecord({messages.FLAT: array})


def error_name(code: int) -> str:
    """The refusal code for an Error's number; its text is not read."""
    return _ERRORS.get(code, "failed")


def read(content: RecordDict, size: int | None) -> tuple[bytes, NDArray[np.float32] | None]:
    """Envelope and, when ``size`` is given, the (size,) float32 vector of a reply.

    Raises:
        InvalidReplyError: "schema" or "not_finite". The records are exact: nothing is missing, nothing extra.
    """
    try:
        return _envelope(content, size), None if size is None else _vector(content, size)
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


def _vector(content: RecordDict, size: int) -> NDArray[np.float32]:
    parameters = content[messages.PARAMETERS]
    if not isinstance(parameters, ArrayRecord) or list(parameters) != [messages.FLAT]:
        raise InvalidReplyError("schema")
    array = parameters[messages.FLAT]
    # Declared first, so that no foreign header makes numpy allocate; what was decoded counts, below.
    declared = (array.dtype, tuple(array.shape)) == ("float32", (size,))
    if not declared or not 4 * size <= len(array.data) <= 4 * size + _NPY_HEADER:
        raise InvalidReplyError("schema")
    found = flat_arrays.view(array.data, size, np.dtype(np.float32)) if array.stype == _STYPE else None
    vector = array.numpy() if found is None else found  # never unpickles
    fault = vector_problem(vector, size)
    if fault is not None:
        raise InvalidReplyError(fault)
    return vector
