"""A task is taken only from records and frames that are exactly as agreed; an answer leaves only if it fits it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from agent.federation.supernode import read_task, records_of
from agent.federation.tasks import (
    FrameError,
    Reply,
    RoundAnswer,
    RoundTask,
    TaskDeclinedError,
    frame,
    read_reply_frame,
    read_task_frame,
    receive_frame,
    reply_frame,
    send_frame,
    task_frame,
    unframe,
)
from protos.artifacts.bfloat16 import rounded
from protos.federation import messages

ORDER: dict[str, Any] = {"run": "r1", "round": 3, "config": b"{}"}
SECONDS = (3_600).to_bytes(8, "big")
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
    with pytest.raises(TaskDeclinedError, match="malformed"):
        read_task(kind, RecordDict(records))


@pytest.mark.parametrize(
    "answer",
    [
        RoundAnswer(b"e", None),
        RoundAnswer(b"e", np.ones(4, np.float32)),
        RoundAnswer(b"e", np.ones(3)),  # type: ignore[arg-type]
        RoundAnswer(b"e", np.array([1, np.inf, 1], np.float32)),
        RoundAnswer("text", np.ones(3, np.float32)),  # type: ignore[arg-type]
    ],
    ids=["no vector", "longer", "float64", "infinite", "text"],
)
def test_an_answer_that_does_not_fit_the_task_stays_at_the_site(answer: RoundAnswer) -> None:
    assert not answer.fits(RoundTask("r1", "train", 0, b"", VECTOR))


def test_each_kind_of_task_has_an_answer_of_its_own() -> None:
    price, train = RoundTask("r1", "price", 0, b""), RoundTask("r1", "train", 0, b"", VECTOR)
    secure = RoundTask("r1", "secure", 0, b"", None, "keys", b"p")
    answers = [RoundAnswer(b"e"), RoundAnswer(b"e", VECTOR), RoundAnswer(payload=b"p")]
    fitting = [[answer.fits(task) for answer in answers] for task in (price, train, secure)]
    assert fitting == [[True, False, False], [False, True, False], [False, False, True]]


def test_a_secure_step_carries_its_name_and_bytes_both_ways() -> None:
    order, payload = _order(step="keys"), ArrayRecord({"data": Array(np.frombuffer(b"abc", np.uint8))})
    task = read_task("query.secure", RecordDict({"order": order, "payload": payload}))
    assert (task.kind, task.step, task.payload) == ("secure", "keys", b"abc")
    records = records_of(Reply(b"", "secure", RoundAnswer(payload=b"xyz")))
    assert list(records) == ["payload"]
    assert records["payload"]["data"].numpy().tobytes() == b"xyz"  # type: ignore[index]


def test_a_check_may_be_a_canary_and_has_no_other_step() -> None:
    payload = ArrayRecord({"data": Array(np.frombuffer(b"abc", np.uint8))})
    for order, step in ((_order(), ""), (_order(step="canary"), "canary")):
        task = read_task("query.check", RecordDict({"order": order, "payload": payload}))
        assert (task.kind, task.step, task.payload) == ("check", step, b"abc")
        assert read_task_frame(unframe(b"".join(task_frame(b"t", task)))[1])[1].step == step
    for step in ("mask", "keys", "Canary"):
        with pytest.raises(TaskDeclinedError, match="malformed"):
            read_task("query.check", RecordDict({"order": _order(step=step), "payload": payload}))
    with pytest.raises(TaskDeclinedError, match="malformed"):
        read_task("train", RecordDict({"order": _order(step="canary"), "parameters": _flat(VECTOR)}))


@pytest.mark.parametrize(
    "records",
    [
        {"order": _order(), "payload": _flat(np.zeros(1, np.uint8), "data")},
        {"order": _order(step=""), "payload": _flat(np.zeros(1, np.uint8), "data")},
        {"order": _order(step="s" * 65), "payload": _flat(np.zeros(1, np.uint8), "data")},
        {"order": _order(step="keys"), "payload": _flat(np.zeros(1, np.float32), "data")},
        {"order": _order(step="keys"), "payload": _flat(np.zeros((1, 1), np.uint8), "data")},
        {"order": _order(step="keys"), "payload": _flat(np.zeros(1, np.uint8))},
        {"order": _order(step="keys")},
    ],
)
def test_a_secure_step_of_another_shape_is_malformed(records: dict[str, Any]) -> None:
    with pytest.raises(TaskDeclinedError, match="malformed"):
        read_task("query.secure", RecordDict(records))


@pytest.mark.parametrize(
    "task",
    [
        RoundTask("r1", "price", 0, b"{}"),
        RoundTask("r\u00fc", "train", 7, b"{}", VECTOR),
        RoundTask("r1", "secure", 2, b"", None, "keys", b"\x00\xff"),
    ],
    ids=["price", "train", "secure"],
)
def test_a_task_comes_out_of_the_pipe_as_it_went_in(task: RoundTask) -> None:
    word, fields = unframe(b"".join(task_frame(b"ticket", task)))
    ticket, read = read_task_frame(fields)
    assert (word, ticket) == ("task", b"ticket")
    assert (read.run, read.kind, read.round_index, read.config) == (
        task.run,
        task.kind,
        task.round_index,
        task.config,
    )
    assert (read.step, read.payload) == (task.step, task.payload)
    assert (read.vector is None) == (task.vector is None)
    if task.vector is not None and read.vector is not None:
        assert read.vector.tolist() == task.vector.tolist()
        assert not read.vector.flags.writeable


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"t", "train", RoundAnswer(b"e", VECTOR)),
        Reply(b"t", "train", RoundAnswer(b"e", rounded(VECTOR))),
        Reply(b"t", "price", None, "budget"),
    ],
)
def test_a_reply_comes_out_of_the_pipe_as_it_went_in(reply: Reply) -> None:
    read = read_reply_frame(*unframe(b"".join(reply_frame(reply))))
    assert (read.ticket, read.code) == (reply.ticket, reply.code)
    if reply.answer is None:
        assert read.answer is None
    else:
        assert read.kind == reply.kind
        assert read.answer is not None
        assert read.answer.envelope == b"e"
        assert read.answer.vector is not None
        assert reply.answer.vector is not None
        assert read.answer.vector.dtype == reply.answer.vector.dtype
        assert read.answer.vector.tolist() == reply.answer.vector.tolist()


GOOD = b"".join(task_frame(b"t", RoundTask("r1", "train", 0, b"{}", VECTOR)))


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x04task",
        b"\x05other",
        b"\xff" * 100,
        GOOD[:-1],
        GOOD + b"\x00",
        frame("state", b"s" * 65),
        frame("task", b"t"),
    ],
)
def test_garbage_in_the_pipe_is_no_frame(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        unframe(garbage)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (1, b"exec"),
        (1, b"price"),
        (1, b"secure"),
        (2, b""),
        (2, b"r" * 200),
        (2, b"\xff\xfe"),
        (3, b"\xff" * 8),
        (5, b"keys"),
        (6, b"payload"),
        (7, b""),
        (7, b"123"),
        (7, np.array([np.nan], np.float32).tobytes()),
        (8, bytes(8)),
        (8, (86_401).to_bytes(8, "big")),
        (9, b"\xff" * 8),
    ],
)
def test_a_frame_of_a_link_gone_bad_is_no_task(place: int, value: bytes) -> None:
    fields = [b"t", b"train", b"r1", bytes(8), b"{}", b"", b"", VECTOR.tobytes(), SECONDS, bytes(8)]
    read_task_frame([memoryview(field) for field in fields])
    fields[place] = value
    with pytest.raises(FrameError):
        read_task_frame([memoryview(field) for field in fields])


def test_a_frame_crosses_the_pipe_in_pieces_and_none_is_too_long_to_be_refused_unread() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        task = RoundTask("r1", "train", 0, b"{}", np.arange(100_000, dtype=np.float32))
        sender = threading.Thread(target=send_frame, args=(ours.fileno(), task_frame(b"t", task)))
        sender.start()
        _, fields = unframe(receive_frame(theirs.fileno()))
        sender.join()
        read = read_task_frame(fields)[1].vector
        assert read is not None
        assert read.tolist() == list(range(100_000))
        ours.sendall((1 << 40).to_bytes(8, "big"))
        with pytest.raises(FrameError, match="too long"):
            receive_frame(theirs.fileno())
        ours.close()
        with pytest.raises(EOFError):
            receive_frame(theirs.fileno())


def test_no_vector_is_longer_than_what_a_job_may_have() -> None:
    with pytest.raises(FrameError):
        unframe(
            b"\x04task" + b"".join(bytes(4) for _ in range(7)) + (4 * messages.MAX_PARAMETERS + 1).to_bytes(4, "big")
        )


def test_a_site_can_decline_only_with_a_known_code() -> None:
    assert TaskDeclinedError("unavailable").code == "unavailable"
    with pytest.raises(ValueError, match="declined with one of"):
        TaskDeclinedError("only 7 patients")
