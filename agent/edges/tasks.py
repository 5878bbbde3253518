"""One task of a federated round at the agent: what is asked, what is answered, when it is declined.

Flower's public message records only. The records are those of protos/rounds.py, and exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from protos import rounds as wire

CODES: Final = frozenset(wire.CODES)


class Declined(Exception):
    """The site does not do this. Raised by ``handle``; only ``code`` leaves the site."""

    def __init__(self, code: str) -> None:
        """``code`` is one of `CODES`; whatever depends on patients is "unavailable".

        Raises:
            ValueError: an unknown code.
        """
        if code not in CODES:
            raise ValueError(f"a task is declined with one of {', '.join(sorted(CODES))}")
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What the coordinator asks for."""

    run: str
    kind: Literal["price", "train"]
    round_index: int  # from 0
    config: bytes  # the mechanism's public configuration
    vector: NDArray[np.float32] | None  # (p,) finite global parameters, read-only; None at the price


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What leaves the site: already reviewed, charged and sealed by the caller."""

    envelope: bytes
    vector: NDArray[np.float32] | None  # (p,) as long as the task's; None at the price


def read_task(kind: str, content: RecordDict) -> Task:
    """The task in the records of a message of type ``kind``, `protos.rounds.PRICE` or ``TRAIN``.

    Raises:
        Declined: "malformed", whatever is wrong with them.
    """
    try:
        run, index, config = _order(content, kind)
        if kind == wire.PRICE:
            return Task(run, "price", index, config, None)
        return Task(run, "train", index, config, _vector(content))
    except Declined:
        raise
    except Exception:  # noqa: BLE001 - bytes from outside; whatever they break, they are malformed
        raise Declined("malformed") from None


def _order(content: RecordDict, kind: str) -> tuple[str, int, bytes]:
    order = content[wire.ORDER]
    records = {wire.ORDER} if kind == wire.PRICE else {wire.ORDER, wire.PARAMETERS}
    if set(content) != records or not isinstance(order, ConfigRecord):
        raise Declined("malformed")
    if set(order) != {wire.RUN, wire.ROUND, wire.CONFIG}:
        raise Declined("malformed")
    run, index, config = order[wire.RUN], order[wire.ROUND], order[wire.CONFIG]
    if type(run) is not str or type(index) is not int or type(config) is not bytes:  # bool is no round
        raise Declined("malformed")
    if not (0 < len(run) <= wire.MAX_RUN and index >= 0 and len(config) <= wire.MAX_CONFIG):
        raise Declined("malformed")
    return run, index, config


def _vector(content: RecordDict) -> NDArray[np.float32]:
    record = content[wire.PARAMETERS]
    if not isinstance(record, ArrayRecord) or list(record) != [wire.FLAT]:
        raise Declined("malformed")
    vector = record[wire.FLAT].numpy()  # never unpickles
    if vector.dtype != np.float32 or vector.ndim != 1 or not vector.size:
        raise Declined("malformed")
    if not bool(np.isfinite(vector).all()):
        raise Declined("malformed")
    vector.setflags(write=False)
    return vector


def records_of(task: Task, answer: Answer) -> RecordDict:
    """The reply's records.

    Raises:
        Declined: "internal" when the installed code's answer does not fit the task.
    """
    if type(answer.envelope) is not bytes or len(answer.envelope) > wire.MAX_ENVELOPE:
        raise Declined("internal")
    records: dict[str, Any] = {wire.ANSWER: ConfigRecord({wire.ENVELOPE: answer.envelope})}
    if (task.vector is None) != (answer.vector is None):
        raise Declined("internal")
    if task.vector is not None and answer.vector is not None:
        fits = answer.vector.dtype == np.float32 and answer.vector.shape == task.vector.shape
        if not fits or not bool(np.isfinite(answer.vector).all()):
            raise Declined("internal")
        records[wire.PARAMETERS] = ArrayRecord({wire.FLAT: Array(np.ascontiguousarray(answer.vector))})
    return RecordDict(records)
