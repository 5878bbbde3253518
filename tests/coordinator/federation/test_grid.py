"""A reply that was announced and did not arrive is no answer yet; one that cannot be read is a refusal."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

from coordinator.federation.grid import BoundedGrid, _AwayNodes
from coordinator.federation.replies import error_name
from coordinator.federation.strategy import AWAY


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
