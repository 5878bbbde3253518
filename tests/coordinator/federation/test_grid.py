"""A reply that was announced and did not arrive is no answer yet; one that cannot be read is a refusal."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from coordinator.federation import superlink
from coordinator.federation.grid import BoundedGrid, _AwayNodes, direct
from coordinator.federation.replies import error_name, pack
from coordinator.federation.strategy import AWAY
from protos.operations.http_relay import read_whole


@pytest.mark.parametrize(
    ("fault", "code"),
    [(ObjectPullError("part", "timeout"), "no_reply"), (ValueError("too many"), "failed"), (TypeError(), "failed")],
)
def test_what_of_a_reply_does_not_arrive_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, code: str
) -> None:
    """An agent that is killed between the announcement and the parts of its reply comes back, and sends it again."""

    def inflate(*_: object) -> None:
        raise fault

    monkeypatch.setattr(BoundedGrid, "_inflate", inflate)
    told = Metadata(
        run_id=1, message_id="a", src_node_id=2, dst_node_id=1, reply_to_message_id="b", message_type="train"
    )
    reply = BoundedGrid._fetch(
        object.__new__(BoundedGrid), ProtoMessage(metadata=told), ObjectTree(), time.monotonic()
    )
    assert (error_name(reply.error.code), reply.metadata.reply_to_message_id) == (code, "b")
    assert (code in AWAY) == (code == "no_reply")


def test_flowers_database_keeps_few_pages_in_memory(tmp_path: Path) -> None:
    """By itself 64 MB for each connection, and 256 MB of the file: as models and updates come and go, all of it."""
    with contextlib.closing(sqlite3.connect(tmp_path / "flower.db")) as connection:
        superlink.sql_mixin._set_sqlite_pragmas(connection, None)
        for name, value in {"cache_size": -4000, "mmap_size": 0, "journal_mode": "wal"}.items():
            assert connection.execute(f"PRAGMA {name}").fetchone() == (value,)


def test_the_bytes_of_an_answer_go_with_it() -> None:
    client = direct(SimpleNamespace(_client=httpx.Client()))._client
    assert client.event_hooks["response"] == [read_whole]


def test_a_piece_of_a_message_is_copied_when_it_leaves_and_not_all_of_them_before_the_first_does() -> None:
    """Flower copies all that is to be sent, and then sends it."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    model = np.random.default_rng(1).standard_normal(6 << 20).astype(np.float32)  # 24 MiB
    sent = list[str]()

    def announce(request: PushAppMessagesRequest) -> PushAppMessagesResponse:
        names = [one.object_id for tree in request.message_object_trees for one in iterate_object_tree(tree)]
        wanted = [name for name in names if name != names[0]]  # the first one is there already
        return PushAppMessagesResponse(message_ids=["it"], objects_to_push=wanted, session_id="s")

    def push(request: PushObjectRequest) -> PushObjectResponse:
        assert hashlib.sha256(request.object_content).hexdigest() == request.object_id
        sent.append(request.object_id)
        return PushObjectResponse(stored=True)

    class Way(BoundedGrid):
        node = Node(node_id=1)
        run = SimpleNamespace(run_id=1)
        _runtime_client = SimpleNamespace(PushMessages=announce, PushObject=push)

    message = Message(RecordDict({"parameters": pack(model)}), 2, "train", ttl=60.0, group_id="0")
    tracemalloc.start()
    try:
        assert object.__new__(Way).push_messages([message]) == ["it"]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20
    assert len(sent) == len(set(sent)) == 25 + 3 - 1 + 1  # 25 pieces, an array, a record, records and the message


def test_a_piece_that_is_not_stored_ends_the_push() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    class Way(BoundedGrid):
        node = Node(node_id=1)
        run = SimpleNamespace(run_id=1)
        _runtime_client = SimpleNamespace(
            PushMessages=lambda request: PushAppMessagesResponse(
                message_ids=["it"], objects_to_push=[request.message_object_trees[0].object_id], session_id="s"
            ),
            PushObject=lambda _: PushObjectResponse(stored=False),
        )

    message = Message(RecordDict(), 2, "train", ttl=60.0, group_id="0")
    with pytest.raises(ObjectPushError):
        object.__new__(Way).push_messages([message])


def test_of_a_site_that_is_away_for_a_while_no_reply_is_asked_for() -> None:
    """Flower would answer in its name, for good."""
    soon = time.time() + 10.0
    away = _AwayNodes(60.0)
    asked = {"a": 1, "b": 2}

    def online(*nodes: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=node, online_until=soon) for node in nodes]

    assert away.without(asked, lambda: online(1, 2), 0.0) == {"a", "b"}
    assert away.without(asked, lambda: online(1), 10.0) == {"a"}
    assert away.without(asked, lambda: online(1), 69.0) == {"a"}
    assert away.without(asked, lambda: online(1, 2), 69.5) == {"a", "b"}, "it is back, and its reply may be there"
    assert away.without(asked, lambda: online(1), 70.0) == {"a"}, "a pause of its own"
    assert away.without(asked, lambda: online(1), 130.0) == {"a", "b"}, "it is gone: Flower may say so"


def test_a_site_that_is_online_for_a_moment_more_is_taken_for_away() -> None:
    node = SimpleNamespace(node_id=1, online_until=time.time() + 0.5)
    assert _AwayNodes(60.0).without({"a": 1}, lambda: [node], 0.0) == set()
