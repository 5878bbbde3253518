"""Flower's grid as a run at the coordinator uses it: bounded waits, nothing taken on a sender's word.

With coordinator/federation/superlink.py and protos/federation/flower_arrays.py this is all use of Flower's private
interfaces at this side.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Self

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto, run_from_proto
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from coordinator.federation.fleet_proxy import NOT_ARRIVED
from coordinator.federation.superlink_listeners import KEY_HEADER
from protos.federation.flower_arrays import put_together
from protos.federation.messages import MAX_OBJECTS
from protos.operations.http_relay import HOOKS

_POLL_S: Final = 0.2
_LONGEST_POLL_S: Final = 2.0
_QUICK_S: Final = 60.0  # so long after a question answers are looked for at every poll
_SURELY_S: Final = 2.0  # a site counts as online that will still be so by then
CALL_S: Final = 30.0  # one private call
_PUSHED_AT_ONCE: Final = 4  # pieces of messages
_BEAT_S: Final = 10.0  # Flower takes a task for dead after about a minute without
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
    client._client = httpx.Client(
        trust_env=False, timeout=CALL_S, follow_redirects=False, transport=transport, event_hooks=HOOKS
    )
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


class _AwayNodes:
    """Sites that were asked and are not online: for a while nobody asks for their replies.

    Flower answers in the name of a site whose replies are asked for while it is not online, for good, also where it
    comes back a second later and its reply, of hours of work, is there already.
    """

    def __init__(self, silence: float) -> None:
        """All are online; ``silence``: for how many seconds one may be away."""
        self._silence, self._since = silence, dict[int, float]()

    def without(self, asked: Mapping[str, int], online: Callable[[], Iterable[Any]], now: float) -> set[str]:
        """The messages that may be asked for: to a site that is online, or is away for too long.

        Args:
            asked: a message's name to its node.
            online: the nodes that are.
            now: seconds.
        """
        soon = time.time() + _SURELY_S
        here = {node.node_id for node in online() if node.online_until > soon}
        for node in asked.values():
            if node in here:
                self._since.pop(node, None)
            else:
                self._since.setdefault(node, now)
        return {
            name for name, node in asked.items() if now - self._since.get(node, now) >= self._silence or node in here
        }


class BoundedGrid(HttpGrid):
    """Flower's grid with bounded waits, and metadata from the server instead of from the sender."""

    def __init__(self, way: LoopbackEndpoint, token: str, stopping: threading.Event, silence: float = 0.0) -> None:
        """A grid for the task that ``token`` stands for; ``stopping`` cuts its waits short.

        ``silence``: for so many seconds more than Flower a site that was asked may be away before it counts as gone.
        """
        self._way, self._stopping, self._silence = way, stopping, silence
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

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """As Flower's, but a piece is copied when it leaves: not all of them before the first does.

        Returns:
            The name of each message; "" for one that the SuperLink does not take.
        Raises:
            httpx.HTTPError, ObjectPushError: the SuperLink does not take the call, or a piece.
        """
        announced, trees, objects = [], [], dict[str, InflatableObject]()
        with no_object_id_recompute():
            for message in messages:
                message.metadata.__dict__["_message_id"] = message.object_id
                announced.append(message_to_proto(remove_content_from_message(message)))
                objects |= get_all_nested_objects(message)
                trees.append(get_object_tree(message))
        told = self._runtime_client.PushMessages(
            PushAppMessagesRequest(messages_list=announced, message_object_trees=trees)
        )
        push = make_push_object_fn_protobuf(
            self._runtime_client.PushObject, self.node, self.run.run_id, session_id=told.session_id
        )
        missing = set(told.objects_to_push)
        with ThreadPoolExecutor(_PUSHED_AT_ONCE) as pool:
            for _ in pool.map(lambda name: push(name, objects[name].deflate()), [n for n in objects if n in missing]):
                pass
        return list(told.message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send, then collect replies until all are there, ``timeout`` seconds are over or the host stops.

        Replies that cannot be fetched or read in time come back as Error messages.
        """
        outgoing = list(messages)
        if not outgoing:
            return []
        began = time.monotonic()
        until = began + (CALL_S if timeout is None else timeout)
        nodes = [message.metadata.dst_node_id for message in outgoing]
        # fewer names, or none in a place, where a message could not be pushed
        asked = {name: node for name, node in zip(self.push_messages(outgoing), nodes, strict=False) if name}
        for message in outgoing:  # it is at the SuperLink by now: whose answer it is, is all that is asked of it
            message.content = RecordDict()
        away = _AwayNodes(self._silence)
        with ThreadPoolExecutor(max_workers=min(4, len(outgoing))) as pool:
            fetched = []
            while asked and (now := time.monotonic()) < until and not self._stopping.is_set():
                here = away.without(asked, self.get_nodes, now) if self._silence else set(asked)
                got = self._pull(here)
                for proto, tree in zip(got.messages_list, got.message_object_trees, strict=True):
                    asked.pop(proto.metadata.reply_to_message_id, None)
                    fetched.append(pool.submit(self._fetch, proto, tree, until))
                if asked:
                    self._stopping.wait(_POLL_S if now < began + _QUICK_S else _LONGEST_POLL_S)
            return [reply.result() for reply in fetched]

    def _pull(self, names: set[str]) -> PullAppMessagesResponse:
        """The replies to these messages that are there."""
        if not names:
            return PullAppMessagesResponse()
        return self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=names))

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
            return make_message(metadata, error=Error(NOT_ARRIVED))
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
            max_tries_per_object=None,  # a slow line takes its time, a cut one comes back
        )
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run_id, message_object_id=name)
        )
        message = put_together(name, contents)
        if not isinstance(message, Message):
            raise TypeError("a reply must be a message")
        return message
