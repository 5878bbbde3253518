"""A reply that was announced and did not arrive is no answer yet; one that cannot be read is a refusal."""

from __future__ import annotations

import time

import pytest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

from coordinator.federation.grid import BoundedGrid
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
