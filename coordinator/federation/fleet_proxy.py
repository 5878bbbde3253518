"""An agent's calls to Flower, bound to the site that makes them.

Flower identifies a node by a signature over a timestamp, gives any object to any caller with its digest, and lets any
node confirm, and so delete, another node's message. Here every call comes from a site that the gRPC port has
authenticated, and that site may act only as the node enrolled with it: the key in its header, the node that it names,
the messages that were listed to it, their objects, its own replies and their objects. Only then does the call reach
the SuperLink, which makes its own checks again.

A site that signs on anew (its process was started again) has lost what was listed to the one before. That is answered
in its name, as not arrived: a round may last a day, and would wait to its end.

A call in another site's name gets 403, and bytes that are not a message get 400; both are reported. A call that names
something unknown (after a restart of this process, say) gets 401 or 404, as Flower's own client expects.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from google.protobuf.message import DecodeError

from coordinator.federation.events import SignOfLife
from protos.common.errors import PeerError
from protos.federation.messages import (
    FLEET_BODY,
    FLEET_CALLS,
    FLEET_HEADERS,
    FLEET_PART,
    MAX_OBJECTS,
    STAGE,
    STAGES,
)
from protos.v1 import gateway_pb2

_CALL_S: Final = 25.0  # below an agent's 30 s
_AT_ONCE: Final = 4  # calls of one site: its work, its heartbeat, and one each that it has given up
_MAIL: Final = 8  # messages of a site that are remembered; it handles one at a time
_LARGE: Final = 1 << 19  # bytes: of less, the way there and back is most of the time
_VALUE: Final = 1024  # characters of a header
_KIND: Final = "application/protobuf"
NOT_ARRIVED: Final = 4  # Flower's own, "reply unavailable": the strategy calls it "no_reply"

_REQUESTS: Final[Mapping[str, type[Any]]] = {
    "/v1/fleet/activate-node": ActivateNodeRequest,
    "/v1/fleet/deactivate-node": DeactivateNodeRequest,
    "/v1/fleet/send-node-heartbeat": SendNodeHeartbeatRequest,
    "/v1/fleet/pull-messages": PullMessagesRequest,
    "/v1/fleet/push-messages": PushMessagesRequest,
    "/v1/fleet/get-run": GetRunRequest,
    "/v1/fleet/pull-object": PullObjectRequest,
    "/v1/fleet/push-object": PushObjectRequest,
    "/v1/fleet/confirm-message-received": ConfirmMessageReceivedRequest,
}
assert _REQUESTS.keys() == FLEET_CALLS
_ANSWERS: Final = frozenset({"/v1/fleet/push-messages", "/v1/fleet/push-object"})  # by which one comes, in pieces


class SuperLink(Protocol):
    """What is needed of `coordinator.federation.superlink.FlowerHost`."""

    def fleet(self, path: str, headers: Mapping[str, str], body: bytes, seconds: float) -> tuple[int, bytes]:
        """One call, to its end."""

    def node_id(self, public_key: bytes) -> int | None:
        """The node of a key."""


class _TurnedError(PeerError):
    """The call goes no further: an HTTP status, and what to report of it, if anything."""

    def __init__(self, status: int, report: str = "") -> None:
        super().__init__(status)
        self.status, self.report = status, report


@dataclass(slots=True, eq=False)
class _Mail:
    """One message that was listed to a site, and the reply to it."""

    message: str
    run: int
    objects: frozenset[str]
    listed: Any = None  # the message itself, without content
    session: str = ""  # of the reply
    reply: frozenset[str] = field(default_factory=frozenset)  # its objects that are missing
    began: float = 0.0  # seconds, when its first piece was found, and when the reply was announced
    answered: float = 0.0
    down: float = 0.0  # seconds until the site had all of it, and until all of the reply was here
    up: float = 0.0


class Fleet:
    """The Fleet calls of all sites. Any thread."""

    def __init__(
        self,
        host: SuperLink,
        node_keys: Mapping[str, str],
        report: Callable[[str, str], object],
        seconds: float = _CALL_S,
    ) -> None:
        """Nothing is called yet.

        Args:
            host: the embedded SuperLink.
            node_keys: site to its enrolled node key, OpenSSH; looked up anew for every call.
            report: hears the site that spoke in another's name, and as what: "node_key", "node", "source",
                "message", "run", "object" or "session"; or that sent no message at all: "bad_message".
            seconds: for one call.
        """
        self._host, self._node_keys, self._report, self._seconds = host, node_keys, report, seconds
        self._mutex = threading.Lock()
        self._mail: dict[str, deque[_Mail]] = {}
        self._signs: dict[str, SignOfLife] = {}
        self._rates: dict[str, float] = {}
        self._received, self._sent = Counter[str](), Counter[str]()  # bytes, by site
        self._busy: Counter[str] = Counter()

    def handle(self, site: str, parts: Iterator[Any]) -> Iterator[Any]:
        """One call of the gRPC method ``Fleet``, by an authenticated ``site``: parts in, parts out.

        The caller closes an idle stream. Nothing beyond the allowed size of a body is stored.
        """
        with self._place(site) as free:
            status, body = self._read_and_call(site, parts) if free else (503, b"")
        yield gateway_pb2.FleetPart(status=status, headers={"content-type": _KIND})
        for at in range(0, len(body), FLEET_PART):
            yield gateway_pb2.FleetPart(data=body[at : at + FLEET_PART])

    def signs(self) -> Mapping[str, SignOfLife]:
        """The last sign of life of each site since this process started."""
        with self._mutex:
            return dict(self._signs)

    @contextlib.contextmanager
    def _place(self, site: str) -> Iterator[bool]:
        """Whether the site may have one more call in flight: each may hold a whole body."""
        with self._mutex:
            free = self._busy[site] < _AT_ONCE
            self._busy[site] += 1
        try:
            yield free
        finally:
            with self._mutex:
                self._busy[site] -= 1

    def _read_and_call(self, site: str, parts: Iterator[Any]) -> tuple[int, bytes]:
        first = next(parts, None)
        if first is None or first.path not in FLEET_CALLS:
            return 404, b""
        body, began = bytearray(), time.monotonic()
        for part in parts:
            if not len(part.data) <= FLEET_PART or not len(body) + len(part.data) <= FLEET_BODY:
                return 413, b""
            body += part.data
        if len(body) > _LARGE:
            self._rates[site] = len(body) / max(time.monotonic() - began, 1e-3)
        return self.call(site, first.path, dict(first.headers), bytes(body))

    def call(self, site: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """One Fleet call by an authenticated ``site``.

        Returns:
            HTTP status, and the body when it is 200: Flower's texts about errors stay here.
        """
        if path not in FLEET_CALLS:
            return 404, b""
        if len(body) > FLEET_BODY:
            return 413, b""
        try:
            mail = self._bind(site, path, headers, _parsed(path, body))
        except _TurnedError as turned:
            if turned.report:
                self._report(site, turned.report)
            return turned.status, b""
        passed = {name: value for name, value in headers.items() if name in FLEET_HEADERS and _plain(value)}
        status, answer = self._host.fleet(path, {**passed, "content-type": _KIND}, body, self._seconds)
        if status != 200:
            return status, b""
        self._note(site, path, mail, answer)
        stage, now = headers.get(STAGE, ""), time.time()
        with self._mutex:
            self._received[site] += len(body)
            self._sent[site] += len(answer)
            told = (self._received[site], self._sent[site], self._rates.get(site, 0.0))
            before = self._signs[site].answered if site in self._signs else 0.0
            answered = now if path in _ANSWERS else before
            newest = self._mail[site][-1] if self._mail.get(site) else _Mail("", 0, frozenset())
            said = stage if stage in STAGES else ""
            self._signs[site] = SignOfLife(now, *told, said, answered, newest.down, newest.up)
        if path == "/v1/fleet/activate-node":
            self._answer_lost(site, passed)
        return status, answer

    def _bind(self, site: str, path: str, headers: Mapping[str, str], request: Any) -> _Mail | None:
        """Is this call in the site's own name? The message that it is about, if it is about one.

        Raises:
            _TurnedError: it is not, or nobody can tell.
        """
        key = self._key(site)
        if _decoded(headers.get("flwr-public-key", "")) != key:
            raise _TurnedError(403, "node_key")
        if path == "/v1/fleet/activate-node":
            if request.public_key != key:
                raise _TurnedError(403, "node_key")
            return None
        named = request.node_id if path == "/v1/fleet/deactivate-node" else request.node.node_id
        if named != self._host.node_id(key):
            others = [other for other in list(self._node_keys) if other != site]
            another = any(self._host.node_id(self._key(other)) == named for other in others)
            raise _TurnedError(403, "node") if another else _TurnedError(401)
        return self._about(site, path, request, named)

    def _about(self, site: str, path: str, request: Any, node: int) -> _Mail | None:
        """The message of this site that the call is about.

        Raises:
            _TurnedError: it is about another's, or about none.
        """
        if path == "/v1/fleet/get-run":
            return self._find(site, "run", lambda mail: mail.run == request.run_id)
        if path == "/v1/fleet/pull-object":
            return self._find(
                site, "object", lambda mail: mail.run == request.run_id and request.object_id in mail.objects
            )
        if path == "/v1/fleet/confirm-message-received":
            return self._find(site, "message", lambda mail: mail.message == request.message_object_id)
        if path == "/v1/fleet/push-object":
            mail = self._find(site, "session", lambda mail: bool(mail.session) and mail.session == request.session_id)
            if mail.run != request.run_id or request.object_id not in mail.reply:
                raise _TurnedError(403, "object")
            return mail
        if path == "/v1/fleet/push-messages":
            return self._reply(site, request, node)
        return None

    def _reply(self, site: str, request: Any, node: int) -> _Mail:
        """The message that is answered: one reply, from the site's own node, of bounded size."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise _TurnedError(400, "bad_message")
        metadata = request.messages_list[0].metadata
        if metadata.src_node_id != node:
            raise _TurnedError(403, "source")
        branches = islice(iterate_object_tree(request.message_object_trees[0]), MAX_OBJECTS + 1)
        if not len(list(branches)) <= MAX_OBJECTS:
            raise _TurnedError(413)
        to, run = metadata.reply_to_message_id, metadata.run_id
        return self._find(site, "message", lambda mail: mail.message == to and mail.run == run)

    def _find(self, site: str, what: str, right: Callable[[_Mail], bool]) -> _Mail:
        """The newest message listed to ``site`` for which ``right`` holds.

        Raises:
            _TurnedError: only another site's is like that, or none.
        """
        with self._mutex:
            mine = [mail for mail in self._mail.get(site, ()) if right(mail)]
            others = any(right(mail) for other, box in self._mail.items() if other != site for mail in box)
        if mine:
            return mine[-1]
        raise _TurnedError(403, what) if others else _TurnedError(404)

    def _note(self, site: str, path: str, mail: _Mail | None, answer: bytes) -> None:
        """Remember what was listed to the site, what it was asked to push, and when either was on its way."""
        now = time.monotonic()
        if path == "/v1/fleet/pull-messages":
            listed = PullMessagesResponse.FromString(answer)
            with self._mutex:
                box = self._mail.setdefault(site, deque(maxlen=_MAIL))
                for message, tree in zip(listed.messages_list, listed.message_object_trees, strict=True):
                    box.append(
                        _Mail(
                            message.metadata.message_id,
                            message.metadata.run_id,
                            frozenset(branch.object_id for branch in iterate_object_tree(tree)),
                            message,
                        )
                    )
        elif path == "/v1/fleet/push-messages" and mail is not None:
            pushed = PushMessagesResponse.FromString(answer)
            mail.session, mail.reply = pushed.session_id, frozenset(pushed.objects_to_push)
            mail.answered = now
        elif path == "/v1/fleet/pull-object" and mail is not None:
            mail.began = mail.began or now
        elif path == "/v1/fleet/confirm-message-received" and mail is not None:
            mail.down = now - mail.began
        elif path == "/v1/fleet/push-object" and mail is not None:
            mail.up = now - mail.answered

    def _answer_lost(self, site: str, headers: Mapping[str, str]) -> None:
        """Answer what was listed to this site before it signed on anew, and is not answered.

        ``headers``: of the call by which it did so. They prove that the node is its, and nothing of the call itself.
        """
        with self._mutex:
            lost = [mail for mail in self._mail.get(site, ()) if not mail.session]
            self._mail[site] = deque((mail for mail in self._mail.get(site, ()) if mail.session), maxlen=_MAIL)
        node = self._host.node_id(self._key(site))
        if node is None:
            return

        def call(path: str, request: Any) -> bytes:
            full = {**headers, "content-type": _KIND}
            return self._host.fleet(path, full, request.SerializeToString(), self._seconds)[1]

        for mail in lost:
            # a run that is over, or a message that has expired, waits for nothing
            with contextlib.suppress(ValueError, DecodeError):
                _push_lost(mail.listed, node, call)

    def _key(self, site: str) -> bytes:
        """The enrolled key of ``site``.

        Raises:
            _TurnedError: it has none.
        """
        try:
            return flower_key(self._node_keys[site].encode())
        except (KeyError, ValueError):
            raise _TurnedError(401) from None


def _push_lost(listed: ProtoMessage, node: int, call: Callable[[str, Any], bytes]) -> None:
    """Reply to a message that its node will not answer, as Flower's own client replies with an error."""
    reply = Message(Error(NOT_ARRIVED), reply_to=message_from_proto(listed))
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[0.0],
        )
        objects = {name: found.deflate() for name, found in get_all_nested_objects(reply).items()}
    pushed = PushMessagesResponse.FromString(call("/v1/fleet/push-messages", request))
    for name in pushed.objects_to_push:
        part = PushObjectRequest(
            node=Node(node_id=node),
            run_id=listed.metadata.run_id,
            object_id=name,
            object_content=objects[name],
            session_id=pushed.session_id,
        )
        call("/v1/fleet/push-object", part)


def flower_key(node_key: bytes) -> bytes:
    """An OpenSSH public key, EC P-384, in the form in which Flower names nodes by it.

    Raises:
        ValueError: it is no such key (Flower refuses Ed25519 for nodes).
    """
    try:
        key = load_ssh_public_key(node_key)
    except UnsupportedAlgorithm:
        raise ValueError("a node key must be EC P-384 in OpenSSH format") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("a node key must be EC P-384 in OpenSSH format")
    return public_key_to_bytes(key)


def _parsed(path: str, body: bytes) -> Any:
    """The request in a body.

    Raises:
        _TurnedError: it is no message of that call.
    """
    try:
        return _REQUESTS[path].FromString(body)
    except DecodeError:
        raise _TurnedError(400, "bad_message") from None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _plain(value: str) -> bool:
    return len(value) <= _VALUE and value.isascii() and value.isprintable()
