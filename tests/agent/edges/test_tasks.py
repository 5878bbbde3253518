"""A task is taken only from records that are exactly as agreed; an answer leaves only if it fits the task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from agent.edges.tasks import Answer, Declined, Task, read_task, records_of

ORDER: dict[str, Any] = {"run": "r1", "round": 3, "config": b"{}"}
VECTOR = np.arange(3, dtype=np.float32)


def _flat(vector: NDArray[Any], name: str = "flat") -> ArrayRecord:
    return ArrayRecord({name: Array(vector)})


def _order(**changed: Any) -> ConfigRecord:
    return ConfigRecord({**ORDER, **changed})


def test_a_training_task_carries_a_vector_that_nobody_can_change() -> None:
    task = read_task("train", RecordDict({"order": _order(), "parameters": _flat(VECTOR)}))
    assert (task.run, task.kind, task.round_index, task.config) == ("r1", "train", 3, b"{}")
    assert task.vector is not None
    assert task.vector.tolist() == VECTOR.tolist()
    assert not task.vector.flags.writeable


def test_a_price_carries_none() -> None:
    assert read_task("query.price", RecordDict({"order": _order()})).vector is None


@pytest.mark.parametrize(
    ("kind", "records"),
    [
        ("train", {}),
        ("query.price", {}),
        ("train", {"order": _order()}),
        ("query.price", {"order": _order(), "parameters": _flat(VECTOR)}),
        ("train", {"order": _order(), "parameters": _flat(VECTOR), "more": MetricRecord({"n": 1})}),
        ("query.price", {"order": _order(run="")}),
        ("query.price", {"order": _order(run="r" * 200)}),
        ("query.price", {"order": _order(run=b"r1")}),
        ("query.price", {"order": _order(round=-1)}),
        ("query.price", {"order": _order(round=True)}),
        ("query.price", {"order": _order(config="text")}),
        ("query.price", {"order": _order(config=bytes(1 << 21))}),
        ("query.price", {"order": _order(extra=1)}),
        ("query.price", {"order": ConfigRecord({"run": "r1", "round": 0})}),
        ("query.price", {"order": MetricRecord({"round": 0})}),
        ("train", {"order": _order(), "parameters": _flat(VECTOR, "weights")}),
        ("train", {"order": _order(), "parameters": _flat(VECTOR.astype(np.float64))}),
        ("train", {"order": _order(), "parameters": _flat(VECTOR.reshape(1, 3))}),
        ("train", {"order": _order(), "parameters": _flat(np.array([np.nan], np.float32))}),
        ("train", {"order": _order(), "parameters": _flat(np.empty(0, np.float32))}),
    ],
)
def test_anything_else_is_declined_as_malformed(kind: str, records: dict[str, Any]) -> None:
    with pytest.raises(Declined, match="malformed"):
        read_task(kind, RecordDict(records))


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"e", None),
        Answer(b"e", np.ones(4, np.float32)),
        Answer(b"e", np.ones(3)),  # type: ignore[arg-type]
        Answer(b"e", np.array([1, np.inf, 1], np.float32)),
        Answer("text", np.ones(3, np.float32)),  # type: ignore[arg-type]
    ],
    ids=["no vector", "longer", "float64", "infinite", "text"],
)
def test_an_answer_that_does_not_fit_the_task_stays_at_the_site(answer: Answer) -> None:
    with pytest.raises(Declined, match="internal"):
        records_of(Task("r1", "train", 0, b"", VECTOR), answer)


def test_a_price_is_not_answered_with_parameters() -> None:
    with pytest.raises(Declined, match="internal"):
        records_of(Task("r1", "price", 0, b"", None), Answer(b"e", VECTOR))


def test_a_site_can_decline_only_with_a_known_code() -> None:
    assert Declined("unavailable").code == "unavailable"
    with pytest.raises(ValueError, match="declined with one of"):
        Declined("only 7 patients")
