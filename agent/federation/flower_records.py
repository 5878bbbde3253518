"""Tasks and replies as Flower's message records: those of protos/federation/messages.py, and exact."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from agent.federation.tasks import Kind, Reply, Task, TaskDeclinedError
from protos.federation import messages

_KINDS: Final[dict[str, Kind]] = {messages.PRICE: "price", messages.TRAIN: "train", messages.SECURE: "secure"}
_RECORDS: Final[dict[Kind, set[str]]] = {
    "price": {messages.ORDER},
    "train": {messages.ORDER, messages.PARAMETERS},
    "secure": {messages.ORDER, messages.PAYLOAD},
}


def read_task(kind: str, content: RecordDict) -> Task:
    """The task in the records of a message of type ``kind``, one of `protos.federation.messages.KINDS`.

    Raises:
        TaskDeclinedError: "malformed", whatever is wrong with them.
    """
    try:
        return _task(_KINDS[kind], content)
    except TaskDeclinedError:
        raise
    except Exception:  # noqa: BLE001 - bytes from outside; whatever they break, they are malformed
        raise TaskDeclinedError("malformed") from None


def _task(kind: Kind, content: RecordDict) -> Task:
    order = content[messages.ORDER]
    keys = {messages.RUN, messages.ROUND, messages.CONFIG} | ({messages.STEP} if kind == "secure" else set())
    if set(content) != _RECORDS[kind] or not isinstance(order, ConfigRecord) or set(order) != keys:
        raise TaskDeclinedError("malformed")
    run, index, config, step = (
        order[messages.RUN],
        order[messages.ROUND],
        order[messages.CONFIG],
        order.get(messages.STEP, ""),
    )
    if type(run) is not str or type(index) is not int or type(config) is not bytes:  # bool is no round
        raise TaskDeclinedError("malformed")
    if type(step) is not str or not step.isascii():
        raise TaskDeclinedError("malformed")
    vector = _array(content, messages.PARAMETERS, messages.FLAT, np.float32) if kind == "train" else None
    payload = _array(content, messages.PAYLOAD, messages.DATA, np.uint8).tobytes() if kind == "secure" else b""
    return Task(run, kind, index, config, vector, step, payload)


def _array(content: RecordDict, name: str, key: str, dtype: type[np.generic]) -> NDArray[Any]:
    record = content[name]
    if not isinstance(record, ArrayRecord) or list(record) != [key]:
        raise TaskDeclinedError("malformed")
    array = record[key].numpy()  # never unpickles
    if array.dtype != dtype or array.ndim != 1:
        raise TaskDeclinedError("malformed")
    array.setflags(write=False)
    return array


def records_of(reply: Reply) -> RecordDict:
    """The records of a reply that answers."""
    assert reply.answer is not None
    if reply.kind == "secure":
        payload = np.frombuffer(reply.answer.payload, np.uint8)
        return RecordDict({messages.PAYLOAD: ArrayRecord({messages.DATA: Array(payload)})})
    records: dict[str, Any] = {messages.ANSWER: ConfigRecord({messages.ENVELOPE: reply.answer.envelope})}
    if reply.answer.vector is not None:
        records[messages.PARAMETERS] = ArrayRecord({messages.FLAT: Array(np.ascontiguousarray(reply.answer.vector))})
    return RecordDict(records)
