"""Flower's grid as a run at the coordinator uses it: bounded waits, nothing taken on a sender's word.

With coordinator/federation/superlink.py this is all use of Flower's private interfaces at this side.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Self

import httpx
from flwr.app import Error, Message
from flwr.app.message import make_message
from flwr.common.serde import run_from_proto
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents, pull_objects
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from coordinator.federation.superlink_listeners import KEY_HEADER
from protos.federation.messages import MAX_OBJECTS

_POLL_S: Final = 0.2
CALL_S: Final = 30.0  # one private call
_BEAT_S: Final = 10.0  # Flower takes a task for dead after about a minute without
_NOT_ARRIVED: Final = 4  # Flower's own, "reply unavailable": the strategy calls it "no_reply"
_UNREADABLE: Final = 2001  # our own Error number: the strategy calls it "failed"


class _Key:
    """Client interceptor: the private listener's secret."""

    def __init__(self, key: str) -> None:
        self.key = key

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the header and go on."""
        context.request.headers[KEY_HEADER] = self.key
        return call_next(context)


def direct(client: Any, transport: httpx.BaseTransport | None = None) -> Any:
    """Make a Flower client ignore proxy variables and redirects: the private listener is here or relayed to."""
    client._client.close()
    client._client = httpx.Client(trust_env=False, timeout=CALL_S, follow_redirects=False, transport=transport)
    return client


@dataclass(frozen=True, slots=True)
class LoopbackEndpoint:
    """The endpoint of the private listener: for this process only, and those whose calls it relays."""

    address: str
    key: str = field(repr=False)  # "": who makes the calls adds it
    transport: httpx.BaseTransport | None = None  # of a process without a network

    def args(self, component: str, *more: Any) -> tuple[str, bool, None, list[Any]]:
        """Arguments of a Flower client's ``from_server_address``: plain HTTP on loopback, the secret."""
        version = RuntimeVersionHttpInterceptor(component_name=component)
        return self.address, True, None, [*([_Key(self.key)] if self.key else []), version, *more]


class BoundedGrid(HttpGrid):
    """Flower's grid with bounded waits, and metadata from the server instead of from the sender."""

    def __init__(self, way: LoopbackEndpoint, token: str, stopping: threading.Event) -> None:
        """A grid for the task that ``token`` stands for; ``stopping`` cuts its waits short."""
        self._way, self._stopping = way, stopping
        super().__init__(way.address, insecure=True, token=token)
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="task-heartbeat", daemon=True)

    def _connect(self) -> None:
        # Without Flower's retries: on a 401 they send SIGINT to the whole process.
        args = self._way.args("flwr-serverapp", RuntimeTokenHttpInterceptor(token=self._token))
        self._client = direct(RuntimeHttpClient.from_server_address(*args), self._way.transport)

    def begin(self) -> Self:
        """Take over the task: from now on messages can be made and sent."""
        task = self._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = task.task_id
        TaskIdentity.run_id = task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        self.set_run(run_from_proto(task.run))
        self._beats.start()
        return self

    def end(self, outcome: str) -> None:
        """Report the outcome, "completed" or "failed", without details; close. Never raises."""
        self._ended.set()
        with contextlib.suppress(httpx.HTTPError, ValueError):
            self._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=outcome, details=""))
        self.close()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            with contextlib.suppress(httpx.HTTPError, ValueError, RuntimeError):
                self._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send, then collect replies until all are there, ``timeout`` seconds are over or the host stops.

        Replies that cannot be fetched or read in time come back as Error messages.
        """
        outgoing = list(messages)
        if not outgoing:
            return []
        until = time.monotonic() + (CALL_S if timeout is None else timeout)
        open_ids = {name for name in self.push_messages(outgoing) if name}
        with ThreadPoolExecutor(max_workers=min(4, len(outgoing))) as pool:
            fetched = []
            while open_ids and time.monotonic() < until and not self._stopping.is_set():
                got = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=open_ids))
                for proto, tree in zip(got.messages_list, got.message_object_trees, strict=True):
                    open_ids.discard(proto.metadata.reply_to_message_id)
                    fetched.append(pool.submit(self._fetch, proto, tree, until))
                if open_ids:
                    self._stopping.wait(_POLL_S)
            return [reply.result() for reply in fetched]

    def _fetch(self, proto: ProtoMessage, tree: ObjectTree, until: float) -> Message:
        """One reply with its content.

        The metadata are those that the SuperLink checked and listed. The copy inside the content is
        the sender's own word, and with it a site could have its reply counted as another's.
        """
        metadata = metadata_from_proto(proto.metadata)
        if proto.HasField("error"):
            return make_message(metadata, error=Error(proto.error.code))
        try:
            message = self._inflate(proto, tree, until)
        except ObjectPullError:  # announced, and not all of it came in time: its site was killed on the way, perhaps
            return make_message(metadata, error=Error(_NOT_ARRIVED))
        except Exception:  # noqa: BLE001 - bytes from outside; whatever they break, it is one refusal
            return make_message(metadata, error=Error(_UNREADABLE))
        if message.has_error():
            return make_message(metadata, error=Error(message.error.code))
        return make_message(metadata, content=message.content)

    def _inflate(self, proto: ProtoMessage, tree: ObjectTree, until: float) -> Message:
        run_id, name = proto.metadata.run_id, proto.metadata.message_id
        objects = [branch.object_id for branch in iterate_object_tree(tree)]
        if not len(objects) <= MAX_OBJECTS:
            raise ValueError("too many objects in a reply")
        contents = pull_objects(
            objects,
            make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, run_id),
            initial_backoff=0.1,
            backoff_cap=1.0,
            max_time=max(0.0, until - time.monotonic()),
        )
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run_id, message_object_id=name)
        )
        message = inflate_object_from_contents(name, contents)
        if not isinstance(message, Message):
            raise TypeError("a reply must be a message")
        return message
