"""What the link keeps of a transfer, against a SuperLink written by hand: as Flower's, it takes a piece once."""

from __future__ import annotations

import queue
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from agent.federation import supernode
from agent.federation.supernode import TaskQueue, _Departure, _Session, records_of
from agent.federation.supernode_process import LinkSetup
from agent.federation.tasks import Reply, RoundAnswer
from protos.federation import messages
from protos.federation.flat_arrays import header

NODE = Node(node_id=7)


class SuperLink:
    """Takes each piece once, and loses the answers to some."""

    def __init__(self, lost: set[int], known: bool = True) -> None:
        self.lost, self.known, self.calls, self.has = lost, known, 0, set[str]()
        self.announced = 0

    def PushMessages(self, request: Any) -> Any:
        self.announced += 1
        names = sorted({one.object_id for one in supernode.iterate_object_tree(request.message_object_trees[0])})
        return type("Pushed", (), {"session_id": "s", "objects_to_push": names})

    def PushObject(self, request: Any) -> PushObjectResponse:
        self.calls += 1
        stored = self.known and request.object_id not in self.has
        self.has.add(request.object_id)
        if self.calls in self.lost:
            raise httpx.ReadError("the line")
        return PushObjectResponse(stored=stored)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "_PATIENCE_S", 0.0)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def session(link: SuperLink) -> _Session:
    never = lambda *_: None  # noqa: E731 - nobody listens
    tasks = TaskQueue(never, never, never, queue.SimpleQueue(), threading.Event(), threading.Event())
    return _Session(link, LinkSetup("key", "digest", "available"), tasks)  # type: ignore[arg-type]


def departure() -> _Departure:
    asked = Message(RecordDict({"order": ConfigRecord({})}), 7, messages.TRAIN)
    asked.metadata.__dict__["_message_id"] = "asked"
    numbers = np.random.default_rng(0).standard_normal(1_000_000, np.float32)
    assert header(numbers.size, numbers.dtype)
    reply = Reply(b"ticket", "train", RoundAnswer(b"envelope", numbers))
    return _Departure(Message(records_of(reply), reply_to=asked), b"ticket")


def test_a_piece_whose_answer_was_lost_is_not_taken_for_refused() -> None:
    link = SuperLink({2, 5})
    one, going = session(link), departure()
    cuts = 0
    while True:
        try:
            one._send(NODE, going)
            break
        except httpx.TransportError:
            cuts += 1
            assert one.going is going
    assert (cuts, link.announced, one.going) == (2, 1, None)
    assert link.calls == len(link.has) + 2  # each piece once, and the two whose answer was lost again
    assert going.missing == []


def test_a_piece_that_is_refused_without_a_cut_ends_the_answer() -> None:
    one, going = session(SuperLink(set(), known=False)), departure()
    with pytest.raises(ObjectPushError):
        one._send(NODE, going)
    assert one.going is None
