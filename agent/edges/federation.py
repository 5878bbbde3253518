"""Flower at the agent: the SuperNode's side of the Fleet protocol, run by our own installed code.

All use of Flower's private interfaces at this side is in this file (coordinator/edges/federation.py and
grid.py are the other end), written for flwr 1.41.0 exactly; tests/test_federation_contract.py holds them
to it. What travels is documented in protos/rounds.py:

``query.price``: ConfigRecord ``order`` {run, round, config}  ->  ConfigRecord ``answer`` {envelope}
``train``: the same and ArrayRecord ``parameters`` {flat}  ->  ``answer`` and ``parameters`` {flat}

One outbound TLS 1.3 connection with the site's client certificate, polling; nothing listens here. The
app bundle of a run is never fetched: a message whose run does not carry the pinned stub, or of another
type, is declined before its content is downloaded. What answers is the ``handle`` that the caller gives.

This speaks the protocol through Flower's own client class, not through its SuperNode loop: that loop
sends SIGINT to the process on a 401 and ends it when the node is not registered yet.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from agent.edges.tasks import CODES, Answer, Declined, Task, read_task, records_of
from protos import quiet
from protos import rounds as wire

__all__ = ["CODES", "Answer", "Declined", "LinkConfig", "Task", "serve"]

for _name in ("flwr", "httpx", "httpcore"):  # they log addresses and exception texts
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)

_POLL_S: Final = 0.3
_CALL_S: Final = 30.0
_INTERVAL_S: Final = 10.0  # heartbeat; Flower's minimum. Offline after two missed ones
_BACKOFF_S: Final = (0.5, 15.0)  # first and longest wait before connecting again
_PATIENCE_S: Final = 60.0  # how long one message is kept through connection faults
_PULL_S: Final = 600.0  # how long the parameters of one message may take to arrive
_FEW_OBJECTS: Final = 64
_T = TypeVar("_T")

# What may go wrong with the other side or the way to it; anything else is our own fault and is raised.
_FAULTS: Final = (httpx.HTTPError, ObjectPullError, ObjectPushError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """The way to the coordinator."""

    superlink: str  # host:port of its public listener
    ca: Path  # PEM; issued the coordinator's certificate
    cert: Path  # PEM, this site's client certificate
    key: Path  # PEM
    node_key: Path  # OpenSSH private key, EC P-384, registered at the coordinator
    bundle_digest: str | None  # SHA-256 of the only bundle a run may carry; None: the stub in protos.rounds
    proxy: str | None = None  # the hospital's forward proxy; proxy variables of the environment are ignored


class _FleetClient(FleetHttpClient):
    """Flower's Fleet client with a client certificate, for which Flower has no option."""

    def __init__(self, link: LinkConfig, key: ec.EllipticCurvePrivateKey) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        super().__init__(
            f"https://{link.superlink}",
            interceptors=[version, NodeAuthHttpInterceptor(key, key.public_key())],
        )
        self._client.close()
        self._client = httpx.Client(
            verify=_tls(link), proxy=link.proxy, trust_env=False, timeout=_CALL_S, follow_redirects=False
        )


def _tls(link: LinkConfig) -> ssl.SSLContext:
    """TLS 1.3, the federation's CA and no other, this site's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(link.ca)
    context.load_cert_chain(link.cert, link.key)
    return context


def _node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("the node key must be EC P-384 in OpenSSH format")
    return key


def serve(
    link: LinkConfig, handle: Callable[[Task], Answer], stop: threading.Event, on_state: Callable[[str], None]
) -> None:
    """Take part in rounds until ``stop`` is set. Blocks; may run in any thread.

    A lost connection is opened again with growing waits, for ever: the coordinator may restart, and the
    site may be registered later.

    Args:
        link: the way to the coordinator.
        handle: our installed code. One task at a time, in this thread; what it raises becomes a code.
        stop: ends the service; a task being handled is finished and answered first.
        on_state: hears each change: "online"; "unreachable" (no connection, or a TLS fault); "unregistered"
            (the node key is unknown, or its earlier session has not timed out yet); "stopped".
    Raises:
        NotQuiet: `protos.quiet.hush` was not called before the imports.
        OSError, ssl.SSLError, ValueError: a key or certificate of ``link`` cannot be used.
    """
    quiet.require()
    key = _node_key(link.node_key)
    states = _States(on_state)
    wait = _BACKOFF_S[0]
    with _FleetClient(link, key) as client:
        session = _Session(client, key, link.bundle_digest or wire.STUB_DIGEST, handle)
        with session.heartbeats():
            while not stop.is_set():
                try:
                    node = session.activate()
                    states("online")
                    answered = session.step(node)
                    wait = _BACKOFF_S[0]
                    if not answered:
                        stop.wait(_POLL_S)
                except _FAULTS as fault:
                    states(session.lost(fault))
                    # Jitter, so that many sites do not come back in the same instant.
                    stop.wait(wait * secrets.SystemRandom().uniform(0.5, 1.0))
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

    def __init__(
        self,
        client: _FleetClient,
        key: ec.EllipticCurvePrivateKey,
        digest: str,
        handle: Callable[[Task], Answer],
    ) -> None:
        self.client, self.digest, self.handle = client, digest, handle
        self.public_key = public_key_to_bytes(key.public_key())
        self.node: Node | None = None

    def activate(self) -> Node:
        """Sign on, unless that is done already. A coordinator that restarted still knows the node."""
        if self.node is None:
            request = ActivateNodeRequest(public_key=self.public_key, heartbeat_interval=_INTERVAL_S)
            self.node = Node(node_id=self.client.ActivateNode(request).node_id)
        return self.node

    def leave(self) -> None:
        """Sign off, so that nobody waits for this site; a fault here no longer matters."""
        if self.node is not None:
            with contextlib.suppress(*_FAULTS):
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))

    def lost(self, fault: Exception) -> str:
        """The state that a fault means. A node that is no longer known signs on anew; else it goes on."""
        if not isinstance(fault, httpx.HTTPStatusError) or fault.response.is_server_error:
            return "unreachable"
        if fault.response.status_code == httpx.codes.UNAUTHORIZED:
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

    def step(self, node: Node) -> bool:
        """Fetch one message and answer it; False when there was none."""
        got = self.client.PullMessages(PullMessagesRequest(node=node))
        if not got.messages_list:
            return False
        message = message_from_proto(got.messages_list[0])
        try:
            task, original = self._accept(node, message, got.message_object_trees[0])
            reply = Message(records_of(task, self._handled(task)), reply_to=original)
        except Declined as refusal:
            reply = Message(Error(wire.CODES[refusal.code], refusal.code), reply_to=message)
        self._send(node, reply)
        return True

    def _accept(self, node: Node, message: Message, tree: ObjectTree) -> tuple[Task, Message]:
        """The task of a message. Type and bundle decide first; only then is its content downloaded.

        Raises:
            Declined: "message_type", "bundle" or "malformed".
        """
        kind = message.metadata.message_type
        if kind not in (wire.PRICE, wire.TRAIN):
            raise Declined("message_type")
        run_id = message.metadata.run_id
        run = _patiently(lambda: self.client.GetRun(GetRunRequest(node=node, run_id=run_id))).run
        if not secrets.compare_digest(run.fab_hash.encode(), self.digest.encode()):
            raise Declined("bundle")
        if sum(1 for _ in iterate_object_tree(tree)) > _FEW_OBJECTS:
            raise Declined("malformed")
        try:
            content = self._pull(node, run_id, tree).content
        except httpx.HTTPError:
            raise  # the way failed, not the message
        except Exception:  # noqa: BLE001 - bytes from outside; whatever they break, they are malformed
            raise Declined("malformed") from None
        return read_task(kind, content), message

    def _pull(self, node: Node, run_id: int, tree: ObjectTree) -> Message:
        return pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(lambda part: _patiently(lambda: self.client.PullObject(part)), node, run_id),
            make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, node, run_id),
            return_type=Message,
            initial_backoff=0.1,
            backoff_cap=2.0,
            max_time=_PULL_S,
        )

    def _handled(self, task: Task) -> Answer:
        """What the installed code answers.

        Raises:
            Declined: by that code, or "internal" for anything else it raises. Its text stays here.
        """
        try:
            return self.handle(task)
        except Declined:
            raise
        except Exception:  # noqa: BLE001 - an exception's text may hold patient data
            raise Declined("internal") from None

    def _send(self, node: Node, reply: Message) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        run_id = reply.metadata.run_id
        with no_object_id_recompute():
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree],
                clientapp_runtime_list=[0.0],  # how long training took tells how many patients it met
            )
            pushed = _patiently(lambda: self.client.PushMessages(request))
            push = make_push_object_fn_protobuf(
                lambda part: _patiently(lambda: self.client.PushObject(part)),
                node,
                run_id,
                pushed.session_id,
            )
            push_objects(objects, push, object_ids_to_push=set(pushed.objects_to_push))


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
