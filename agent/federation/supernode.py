"""Flower at the agent: the SuperNode's side of the Fleet protocol, run by our own installed code.

All use of Flower's private interfaces at this side is in this file (coordinator/federation/superlink.py and
grid.py are the other end) and in protos/federation/flower_arrays.py, which both ends share. They are written for flwr
1.41.0 exactly; tests/test_federation_contract.py holds them to it. What travels is documented in
protos/federation/messages.py.

The agent makes the calls at the coordinator's one port (agent/federation/fleet_transport.py) and signs them with the
node's key; this process has neither network nor key. It polls; nothing listens here. The app bundle of a run is never
fetched: a message whose run does not carry the pinned stub, or of another type, is declined before its content is
downloaded. Tasks go to the caller, and its results are sent back.

This runs in a process of its own (agent/federation/supernode_process.py), for two reasons: it parses foreign bytes,
and that process is confined and holds no vault, no ledger and no key; and Flower's classes may end or signal the
process they are in. It speaks the protocol through Flower's own client class, not
through its SuperNode loop, which sends SIGINT on a 401 and exits when the node is not registered yet.

Tasks and replies as Flower's message records: those of protos/federation/messages.py, and exact.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import httpx
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from numpy.typing import NDArray

from agent.federation.fleet_transport import AnotherRoot, TurnedAway
from agent.federation.supernode_process import LinkSetup
from agent.federation.tasks import CARRYING, MAX_TICKET, Kind, Reply, RoundTask, TaskDeclinedError
from protos.federation import flat_arrays, flower_environment, messages
from protos.federation.flower_arrays import STYPE, put_together, sent_from
from protos.federation.round_times import RoundTerms
from protos.operations.http_relay import HOOKS

_KINDS: Final[dict[str, Kind]] = {
    messages.PLAN: "plan",
    messages.PRICE: "price",
    messages.TRAIN: "train",
    messages.EVALUATE: "evaluate",
    messages.SECURE: "secure",
    messages.CHECK: "check",
}
_TIMES: Final = {messages.SECONDS, messages.APPROVE_BY}
_RECORDS: Final[dict[Kind, set[str]]] = {
    "plan": {messages.ORDER},
    "price": {messages.ORDER},
    "train": {messages.ORDER, messages.PARAMETERS},
    "evaluate": {messages.ORDER, messages.PARAMETERS},
    "secure": {messages.ORDER, messages.PAYLOAD},
    "check": {messages.ORDER, messages.PAYLOAD},
}


def read_task(kind: str, content: RecordDict) -> RoundTask:
    """The task in the records of a message of type ``kind``, one of `protos.federation.messages.KINDS`.

    Raises:
        TaskDeclinedError: "malformed", whatever is wrong with them.
    """
    try:
        return _task(_KINDS[kind], content)
    except TaskDeclinedError:
        raise
    except Exception:  # noqa: BLE001 - bytes from outside; whatever they break, they are malformed
        raise TaskDeclinedError("malformed") from None


def _task(kind: Kind, content: RecordDict) -> RoundTask:
    order = content[messages.ORDER]
    stepped = kind == "secure" or (kind == "check" and messages.STEP in order)
    keys = {messages.RUN, messages.ROUND, messages.CONFIG} | ({messages.STEP} if stepped else set())
    if set(content) != _RECORDS[kind] or not isinstance(order, ConfigRecord) or set(order) - _TIMES != keys:
        raise TaskDeclinedError("malformed")
    if given := set(order) & _TIMES:  # both or, of a version before jobs named their times, none
        if given != _TIMES:
            raise TaskDeclinedError("malformed")
        seconds, approve_by = order[messages.SECONDS], order[messages.APPROVE_BY]
        if type(seconds) is not int or type(approve_by) is not int:
            raise TaskDeclinedError("malformed")
        terms = RoundTerms(seconds, approve_by)
    else:
        terms = RoundTerms()
    run, index, config, step = (
        order[messages.RUN],
        order[messages.ROUND],
        order[messages.CONFIG],
        order.get(messages.STEP, ""),
    )
    if type(run) is not str or type(index) is not int or type(config) is not bytes:  # bool is no round
        raise TaskDeclinedError("malformed")
    if type(step) is not str or not step.isascii():
        raise TaskDeclinedError("malformed")
    sent = messages.PARAMETERS in _RECORDS[kind]
    vector = _array(content, messages.PARAMETERS, messages.FLAT, np.float32) if sent else None
    payload = _array(content, messages.PAYLOAD, messages.DATA, np.uint8).tobytes() if kind in CARRYING else b""
    return RoundTask(run, kind, index, config, vector, step, payload, terms)


def _array(content: RecordDict, name: str, key: str, dtype: type[np.generic]) -> NDArray[Any]:
    record = content[name]
    if not isinstance(record, ArrayRecord) or list(record) != [key]:
        raise TaskDeclinedError("malformed")
    carried = record[key]
    size = int(carried.shape[0]) if len(carried.shape) == 1 and carried.stype == STYPE else -1
    found = flat_arrays.view(carried.data, size, np.dtype(dtype)) if size >= 0 else None
    array = carried.numpy() if found is None else found  # never unpickles
    if array.dtype != dtype or array.ndim != 1:
        raise TaskDeclinedError("malformed")
    array.setflags(write=False)
    return array


def records_of(reply: Reply) -> RecordDict:
    """The records of a reply that answers."""
    assert reply.answer is not None
    if reply.kind in CARRYING:
        payload = np.frombuffer(reply.answer.payload, np.uint8)
        return RecordDict({messages.PAYLOAD: sent_from(messages.DATA, payload)})
    records: dict[str, Any] = {messages.ANSWER: ConfigRecord({messages.ENVELOPE: reply.answer.envelope})}
    if reply.answer.vector is not None:
        vector = reply.answer.vector
        records[messages.PARAMETERS] = sent_from(messages.FLAT, vector)
    return RecordDict(records)


for _name in ("flwr", "httpx", "httpcore"):  # they log addresses and exception texts
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)

_POLL_S: Final = 0.3  # while a run is on
_IDLE_S: Final = 3.0  # otherwise; the coordinator's session wakes us
_FIRST_S: Final = 5.0  # after signing on
_BUSY_S: Final = 60.0  # a run is taken to be on for so long after a message or a wake-up
_CALL_S: Final = 30.0
_INTERVAL_S: Final = 10.0  # heartbeat; Flower's minimum. Offline after two missed ones
_BACKOFF_S: Final = (0.5, 15.0)  # first and longest wait before connecting again
_PATIENCE_S: Final = 60.0  # how long one message is kept through connection faults
_PULL_S: Final = 600.0  # how long the parameters of one message may take to arrive
_T = TypeVar("_T")

# What may go wrong with the other side or the way to it; anything else is our own fault and is raised.
_FAULTS: Final = (httpx.HTTPError, ObjectPullError, ObjectPushError, OSError, ValueError)


@dataclass(slots=True, eq=False)
class TaskQueue:
    """Where the link meets the one who handles tasks; the methods are called from the link's thread."""

    task: Callable[[bytes, RoundTask], None]  # take this; a `Reply` with the same ticket is expected in ``replies``
    state: Callable[[str], None]  # hears each change, see `serve`
    node: Callable[[int], None]  # hears the node id, for a link that is started again
    replies: queue.SimpleQueue[Reply]
    wake: threading.Event  # set: something is about to come, look often
    stop: threading.Event


class _FleetClient(FleetHttpClient):
    """Flower's Fleet client over our transport. Who makes its calls signs them, not Flower's interceptor."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        super().__init__("http://coordinator", interceptors=[version])
        self._client.close()
        self._client = httpx.Client(transport=transport, trust_env=False, follow_redirects=False, event_hooks=HOOKS)


def serve(link: LinkSetup, transport: httpx.BaseTransport, queue: TaskQueue) -> None:
    """Take part in rounds until ``queue.stop`` is set. Blocks; may run in any thread.

    A lost connection is opened again with growing waits, for ever: the coordinator may restart, and the
    site may be registered later. The states that the queue hears: "online"; "unreachable" (no connection);
    "another root" (of the certificate that answers); "turned away" (ours is not accepted); "unregistered" (the node
    key is unknown, or its earlier session has not timed out yet); "stopped".

    Args:
        link: who this node is.
        transport: the way to the coordinator.
        queue: takes the tasks, gives the replies; one task at a time.
    Raises:
        FlowerEnvironmentError: `protos.federation.flower_environment.configure_environment` was not called before the
        imports.
    """
    flower_environment.require_configured()
    states = _States(queue.state)
    wait = _BACKOFF_S[0]
    with _FleetClient(transport) as client:
        session = _Session(client, link, queue)
        with session.heartbeats():
            while not queue.stop.is_set() or not queue.replies.empty():
                try:
                    node = session.activate()
                    session.step(node)
                    states("online")
                    wait = _BACKOFF_S[0]
                except _FAULTS as fault:
                    states(session.lost(fault))
                    # Jitter, so that many sites do not come back in the same instant.
                    queue.stop.wait(wait * secrets.SystemRandom().uniform(0.5, 1.0))
                    wait = min(2 * wait, _BACKOFF_S[1])
        session.leave()
    states("stopped")


class _States:
    """Pass on changes of state only."""

    def __init__(self, on_state: Callable[[str], None]) -> None:
        self.on_state, self.last = on_state, ""

    def __call__(self, state: str) -> None:
        if state != self.last:
            self.last = state
            self.on_state(state)


class _Session:
    """One node's conversation with the SuperLink."""

    def __init__(self, client: _FleetClient, link: LinkSetup, queue: TaskQueue) -> None:
        self.client, self.digest, self.queue = client, link.bundle_digest, queue
        self.public_key = link.node_public.encode()
        self.node: Node | None = Node(node_id=link.node) if link.node else None
        self.out = 0  # tasks that wait for their reply
        self.coming: _Arrival | None = None  # listed to us once, so it must not be lost with the line
        self.going: _Departure | None = None
        self.busy_until = time.monotonic() + _FIRST_S  # monotonic seconds: look often until then

    def activate(self) -> Node:
        """Sign on, unless that is done already. A coordinator that restarted still knows the node."""
        if self.node is None:
            self.coming = self.going = None  # answered in our name when we signed on anew
            request = ActivateNodeRequest(public_key=self.public_key, heartbeat_interval=_INTERVAL_S)
            self.node = Node(node_id=self.client.ActivateNode(request).node_id)
            self.queue.node(self.node.node_id)
        return self.node

    def leave(self) -> None:
        """Sign off, so that nobody waits for this site; a fault here no longer matters."""
        if self.node is not None:
            with contextlib.suppress(*_FAULTS):
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))

    def lost(self, fault: Exception) -> str:
        """The state that a fault means. A node that is no longer known signs on anew; else it goes on."""
        if isinstance(fault, TurnedAway):
            return "turned away"
        if isinstance(fault, AnotherRoot):
            return "another root"
        if not isinstance(fault, httpx.HTTPStatusError) or fault.response.is_server_error:
            return "unreachable"
        if fault.response.status_code == httpx.codes.UNAUTHORIZED:  # 403: a run that has ended
            self.node = None
        # With a node the link is sound: the SuperLink refused one call, say for a run that has ended.
        return "unregistered" if self.node is None else "online"

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Tell the SuperLink every few seconds that this node lives, while a task is handled too."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(0.8 * _INTERVAL_S):
                node = self.node
                if node is not None:
                    with contextlib.suppress(*_FAULTS):  # the main loop meets the same fault and says so
                        self.client.SendNodeHeartbeat(
                            SendNodeHeartbeatRequest(node=node, heartbeat_interval=_INTERVAL_S)
                        )

        thread = threading.Thread(target=beat, name="node-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_CALL_S)

    def step(self, node: Node) -> None:
        """Send a reply that is there; else fetch a message, unless one is being handled; else wait a moment."""
        if self.going is not None and not self.going.ticket:
            self._send(node, self.going)  # a refusal, whose way was cut
        try:
            reply = self.queue.replies.get(timeout=_POLL_S if self.out else 0.0)
        except queue.Empty:
            if not self.out:
                self._rest(self._fetch(node))
            return
        self.out = 0
        message = message_from_proto(ProtoMessage.FromString(reply.ticket))
        try:
            if self.going is not None and self.going.ticket == reply.ticket:
                self._send(node, self.going)  # from the piece at which the line was cut
            elif reply.answer is None:
                self._decline(node, message, reply.code)
            else:
                self._send(node, _Departure(Message(records_of(reply), reply_to=message), reply.ticket))
        except httpx.TransportError:
            if not self.queue.stop.is_set():
                self.queue.replies.put(reply)  # it was paid for; the SuperLink says when it is too late
            raise

    def _rest(self, fetched: bool) -> None:
        """Wait a moment, longer while nothing is on."""
        now = time.monotonic()
        if fetched:
            self.busy_until = now + _BUSY_S
            return
        if self.queue.wake.wait(
            _POLL_S if now < self.busy_until else _IDLE_S * secrets.SystemRandom().uniform(0.7, 1.0)
        ):
            self.queue.wake.clear()
            self.busy_until = time.monotonic() + _BUSY_S

    def _fetch(self, node: Node) -> bool:
        """Fetch one message and hand its task over, or decline it; False when there was none."""
        if self.coming is None:
            got = self.client.PullMessages(PullMessagesRequest(node=node))
            if not got.messages_list:
                return False
            self.coming = _Arrival(got.messages_list[0], got.message_object_trees[0])
        coming = self.coming
        ticket, message = coming.proto.SerializeToString(), message_from_proto(coming.proto)
        try:
            if len(ticket) > MAX_TICKET:
                raise TaskDeclinedError("malformed")
            task = self._accept(node, message, coming)
        except TaskDeclinedError as refusal:
            self.coming = None
            self._decline(node, message, refusal.code)
        except httpx.TransportError:
            raise  # the line is cut: what has arrived stays here
        except httpx.HTTPError:
            self.coming = None  # the SuperLink refuses: the run has ended, say
            raise
        else:
            self.coming = None
            self.out = 1
            self.queue.task(ticket, task)
        return True

    def _decline(self, node: Node, message: Message, code: str) -> None:
        self._send(node, _Departure(Message(Error(messages.CODES[code], code), reply_to=message)))

    def _accept(self, node: Node, message: Message, coming: _Arrival) -> RoundTask:
        """The task of a message. Type and bundle decide first; only then is its content downloaded.

        Raises:
            TaskDeclinedError: "message_type", "bundle" or "malformed".
        """
        kind = message.metadata.message_type
        if kind not in messages.KINDS:
            raise TaskDeclinedError("message_type")
        run_id = message.metadata.run_id
        run = _patiently(lambda: self.client.GetRun(GetRunRequest(node=node, run_id=run_id))).run
        if not secrets.compare_digest(run.fab_hash.encode(), self.digest.encode()):
            raise TaskDeclinedError("bundle")
        if sum(1 for _ in iterate_object_tree(coming.tree)) > messages.MAX_OBJECTS:
            raise TaskDeclinedError("malformed")
        try:
            content = self._pull(node, run_id, coming).content
        except httpx.HTTPError:
            raise  # the way failed, not the message
        except Exception:  # noqa: BLE001 - bytes from outside; whatever they break, they are malformed
            raise TaskDeclinedError("malformed") from None
        return read_task(kind, content)

    def _pull(self, node: Node, run_id: int, coming: _Arrival) -> Message:
        def call(part: PullObjectRequest) -> PullObjectResponse:
            return _patiently(lambda: self.client.PullObject(part))

        pull = make_pull_object_fn_protobuf(call, node, run_id)

        def piece(name: str) -> bytes:
            if name not in coming.pieces:
                found = pull(name)
                if get_object_id(found) != name:
                    raise ValueError("a piece is another one than was asked for")
                coming.pieces[name] = found
            return coming.pieces[name]

        whole = pull_objects(
            [branch.object_id for branch in iterate_object_tree(coming.tree)],
            piece,
            initial_backoff=0.1,
            backoff_cap=2.0,
            max_time=_PULL_S,
        )
        request = ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=coming.tree.object_id)
        _patiently(lambda: self.client.ConfirmMessageReceived(request))
        coming.pieces.clear()  # so that each is let go of
        message = put_together(coming.tree.object_id, whole)
        if not isinstance(message, Message):
            raise TypeError("a task must be a message")
        return message

    def _send(self, node: Node, going: _Departure) -> None:
        """Send what is left of it. What is stored at the other end is not sent again, however long the line was cut.

        Raises:
            httpx.HTTPError, ObjectPushError: not all of it.
        """
        self.going = going
        try:
            if not going.session:
                pushed = _patiently(lambda: self.client.PushMessages(going.request(node)))
                going.session, going.missing = pushed.session_id, list(pushed.objects_to_push)
            with no_object_id_recompute():
                while going.missing:
                    _patiently(lambda: self._push(node, going, going.missing[0]))
                    del going.objects[going.missing.pop(0)]
        except httpx.TransportError:
            raise
        except Exception:
            self.going = None  # refused: the round is over, or the other end has started again
            raise
        self.going = None

    def _push(self, node: Node, going: _Departure, name: str) -> None:
        """One piece. Flower refuses one that it has: where an earlier answer was lost with the line, that is a yes.

        Raises:
            httpx.HTTPError: not known.
            ObjectPushError: it does not take it.
        """
        run_id = going.reply.metadata.run_id
        push = make_push_object_fn_protobuf(self.client.PushObject, node, run_id, going.session)
        try:
            push(name, going.objects[name].deflate())
        except httpx.TransportError:
            going.doubtful.add(name)
            raise
        except ObjectPushError:
            if name not in going.doubtful:
                raise


@dataclass(slots=True, eq=False)
class _Arrival:
    """A message that was listed to us, and what of it has arrived: Flower lists it once."""

    proto: ProtoMessage
    tree: ObjectTree
    pieces: dict[str, bytes] = field(default_factory=dict)


class _Departure:
    """A reply on its way, and what of it is not there yet."""

    def __init__(self, reply: Message, ticket: bytes = b"") -> None:
        """Nothing is sent; ``ticket``: of the task that it answers."""
        self.reply, self.ticket = reply, ticket
        self.session, self.missing = "", list[str]()
        self.doubtful = set[str]()  # pieces that were sent once, and whose answer was lost
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            self.tree = get_object_tree(reply)
            self.objects = get_all_nested_objects(reply)

    def request(self, node: Node) -> PushMessagesRequest:
        """The announcement."""
        return PushMessagesRequest(
            node=node,
            messages_list=[message_to_proto(remove_content_from_message(self.reply))],
            message_object_trees=[self.tree],
            clientapp_runtime_list=[0.0],  # how long training took tells how many patients it met
        )


def _patiently(call: Callable[[], _T]) -> _T:
    """Call again through short connection faults: a message is delivered once, its answer paid for once.

    Raises:
        httpx.HTTPError: the SuperLink refused, or the connection did not come back in time.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return call()
        except httpx.TransportError:
            if not time.monotonic() < until:
                raise
            time.sleep(_POLL_S)
