"""Tasks and replies as Flower's message records: those of protos/rounds.py, and exact."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from agent.edges.tasks import Declined, Kind, Reply, Task
from protos import rounds as wire

_KINDS: Final[dict[str, Kind]] = {wire.PRICE: "price", wire.TRAIN: "train", wire.SECURE: "secure"}
_RECORDS: Final[dict[Kind, set[str]]] = {
    "price": {wire.ORDER},
    "train": {wire.ORDER, wire.PARAMETERS},
    "secure": {wire.ORDER, wire.PAYLOAD},
}


def read_task(kind: str, content: RecordDict) -> Task:
    """The task in the records of a message of type ``kind``, one of `protos.rounds.KINDS`.

    Raises:
        Declined: "malformed", whatever is wrong with them.
    """
    try:
        return _task(_KINDS[kind], content)
    except Declined:
        raise
    except Exception:  # noqa: BLE001 - bytes from outside; whatever they break, they are malformed
        raise Declined("malformed") from None


def _task(kind: Kind, content: RecordDict) -> Task:
    order = content[wire.ORDER]
    keys = {wire.RUN, wire.ROUND, wire.CONFIG} | ({wire.STEP} if kind == "secure" else set())
    if set(content) != _RECORDS[kind] or not isinstance(order, ConfigRecord) or set(order) != keys:
        raise Declined("malformed")
    run, index, config, step = order[wire.RUN], order[wire.ROUND], order[wire.CONFIG], order.get(wire.STEP, "")
    if type(run) is not str or type(index) is not int or type(config) is not bytes:  # bool is no round
        raise Declined("malformed")
    if type(step) is not str or not step.isascii():
        raise Declined("malformed")
    vector = _array(content, wire.PARAMETERS, wire.FLAT, np.float32) if kind == "train" else None
    payload = _array(content, wire.PAYLOAD, wire.DATA, np.uint8).tobytes() if kind == "secure" else b""
    return Task(run, kind, index, config, vector, step, payload)


def _array(content: RecordDict, name: str, key: str, dtype: type[np.generic]) -> NDArray[Any]:
    record = content[name]
    if not isinstance(record, ArrayRecord) or list(record) != [key]:
        raise Declined("malformed")
    array = record[key].numpy()  # never unpickles
    if array.dtype != dtype or array.ndim != 1:
        raise Declined("malformed")
    array.setflags(write=False)
    return array


def records_of(reply: Reply) -> RecordDict:
    """The records of a reply that answers."""
    assert reply.answer is not None
    if reply.kind == "secure":
        payload = np.frombuffer(reply.answer.payload, np.uint8)
        return RecordDict({wire.PAYLOAD: ArrayRecord({wire.DATA: Array(payload)})})
    records: dict[str, Any] = {wire.ANSWER: ConfigRecord({wire.ENVELOPE: reply.answer.envelope})}
    if reply.answer.vector is not None:
        records[wire.PARAMETERS] = ArrayRecord({wire.FLAT: Array(np.ascontiguousarray(reply.answer.vector))})
    return RecordDict(records)
