"""The Flower link in a process of its own: the agent's end of the pipe. The other is
agent/federation/supernode_main.py.

The child parses data from the coordinator, and decides on run, message type and bundle before anything is downloaded.
It has no vault, no ledger, no key, no torch and no network, and is confined (protos/operations/confinement.py) before
it reads anything. The parent makes its calls at one method of the coordinator's one port
(protos/operations/http_relay.py), and signs them with the node's key. It receives tasks as frames
(agent/federation/tasks.py), checks every field of them again, and answers. An attacker who controls the child can act
as this site's node, and do nothing else.

Neither outlives the other for long: the child ends when the pipe does, or when it has another parent. A child that
died or spoke nonsense is started again, with growing waits; the new one goes on as the same node, and the reply to a
task that the old one had fetched goes out through it, since the task's ticket came to the parent with it.

This is a wall: a pipe without keys. Flower parses what the coordinator sends on the other side; each frame is read
again on this one, which has the vault and the ledger.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from agent.federation import tasks
from agent.federation.fleet_transport import FleetTransport
from agent.gateway.channel import open_channel
from agent.gateway.credentials import Credentials
from protos.common.errors import WorkerError
from protos.federation import flower_environment, messages
from protos.identity.key_files import read_private
from protos.operations.child_process import end, start
from protos.operations.confinement import AVAILABLE, ConfinementError
from protos.operations.http_relay import HOOKS, Relay

MODULE: Final = "agent.federation.supernode_main"
STATES: Final = frozenset({"online", "unreachable", "another root", "turned away", "unregistered", "stopped"})
_BACKOFF_S: Final = (0.5, 15.0)
_STEADY_S: Final = 60.0  # a child that lived this long starts the backoff anew
_LEAVE_S: Final = 25.0  # for a last reply and the sign-off
_POLL_S: Final = 0.2
_FAULT: Final = re.compile(r"[A-Za-z]{1,64}")
KEPT: Final = ["FLWR_HOME", *flower_environment.SETTINGS]  # of the environment, for Flower


class LinkError(WorkerError, RuntimeError):
    """The link cannot work: a key or certificate cannot be used. The argument is the kind of fault."""


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """The way to the coordinator, and who goes it."""

    target: str  # host:port of the coordinator's one port
    keys: Path  # the site's key directory; read again whenever a connection is opened
    node_key: Path  # OpenSSH private key, EC P-384, enrolled at the coordinator
    proxy: str = ""  # host:port of the hospital's forward proxy; proxy variables of the environment are ignored
    bundle_digest: str = messages.STUB_DIGEST  # SHA-256 of the only bundle a run may carry
    demand: str = AVAILABLE  # which layers of the child's confinement must be in force
    greet: Callable[[], None] = lambda: None  # opens the session anew, see `FleetTransport`

    def transport(self) -> FleetTransport:
        """The way itself. Its credentials are read anew whenever it is renewed: another process replaces them.

        Raises:
            OSError, ValueError: they cannot be used.
        """
        return FleetTransport(
            lambda: open_channel(self.target, Credentials(self.keys).channel_credentials(), self.proxy), self.greet
        )


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """The child's configuration: all it has of its site."""

    node_public: str  # PEM
    bundle_digest: str
    demand: str
    node: int = 0  # the node id of an earlier child that did not sign off

    def words(self) -> str:
        """As JSON, for the child's command line."""
        return json.dumps([self.node_public, self.bundle_digest, self.demand, self.node])

    @classmethod
    def of(cls, words: str) -> LinkSetup:
        """The reverse."""
        return cls(*json.loads(words))


class _NodeKey:
    """What proves that a call is this node's, as Flower's own interceptor proves it: a signed time of day."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises: OSError, ValueError, it cannot be used."""
        key = load_ssh_private_key(read_private(path), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
            raise ValueError("the node key must be EC P-384 in OpenSSH format")
        self._key = key
        self.public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def proof(self) -> Mapping[str, str]:
        """The headers of one call."""
        now = datetime.now(UTC).isoformat()
        signature = self._key.sign(now.encode("ascii"), ec.ECDSA(SHA256()))
        return {
            "flwr-public-key": b64encode(self.public).decode("ascii"),
            "flwr-timestamp": now,
            "flwr-signature": b64encode(signature).decode("ascii"),
        }


class SuperNodeLink:
    """The parent's end: starts the child, hands its tasks to ``handle``, starts it again when it dies."""

    def __init__(self, config: LinkConfig) -> None:
        """Nothing is started yet."""
        self.config = config
        self.pid = 0  # of the child, while there is one
        self._wake = threading.Event()
        self._transport: FleetTransport | None = None
        self._node = 0
        self._unsent: tasks.Reply | None = None  # made, and perhaps not sent by the child that asked for it

    @property
    def rate(self) -> float:
        """Bytes a second that arrived of the newest large message; 0: not known."""
        return self._transport.rate if self._transport is not None else 0.0

    def wake(self) -> None:
        """A run is about to ask something: let the child look often. Any thread."""
        self._wake.set()

    def renew(self) -> None:
        """The credentials on disk were replaced: let the next call use them. Any thread."""
        if self._transport is not None:
            self._transport.renew()

    def run(
        self,
        handle: Callable[[tasks.RoundTask], tasks.RoundAnswer],
        stop: threading.Event,
        on_state: Callable[[str], None],
    ) -> None:
        """Take part in rounds until ``stop`` is set. Blocks; may run in any thread.

        Args:
            handle: our installed code. One task at a time, in this thread; what it raises becomes a code.
            stop: ends the service; a task being handled is finished and answered first.
            on_state: hears each change: one of `STATES`, and "restarted" when the child had died.
        Raises:
            LinkError: a key or certificate cannot be used, the environment is not configured
                (`protos.federation.flower_environment`), or the child cannot be confined as the settings demand.
        """
        try:
            key, self._transport = _NodeKey(self.config.node_key), self.config.transport()
        except (OSError, ValueError) as fault:
            raise LinkError(type(fault).__name__) from None
        client = httpx.Client(
            transport=self._transport,
            base_url="http://coordinator",
            timeout=None,  # noqa: S113 - the transport has limits
            event_hooks=HOOKS,
        )
        with client:
            self._serve(client, key, handle, stop, on_state)

    def _serve(
        self,
        client: httpx.Client,
        key: _NodeKey,
        handle: Callable[[tasks.RoundTask], tasks.RoundAnswer],
        stop: threading.Event,
        on_state: Callable[[str], None],
    ) -> None:
        wait, told = _BACKOFF_S[0], ""

        def tell(state: str) -> None:
            nonlocal told
            if state != told:
                told = state
                on_state(state)

        while not stop.is_set():
            began = time.monotonic()
            setup = LinkSetup(key.public.decode(), self.config.bundle_digest, self.config.demand, self._node)
            with _Child(setup, client, key) as child:
                self.pid = child.process.pid
                # dead, or nonsense: both mean a new one
                with contextlib.suppress(tasks.FrameError, OSError, EOFError):
                    self._converse(child, handle, stop, tell)
            self.pid = 0
            if stop.is_set():
                break
            if time.monotonic() - began > _STEADY_S:
                wait = _BACKOFF_S[0]
            stop.wait(wait)
            wait = min(2 * wait, _BACKOFF_S[1])
            tell("restarted")
        tell("stopped")

    def _converse(
        self,
        child: _Child,
        handle: Callable[[tasks.RoundTask], tasks.RoundAnswer],
        stop: threading.Event,
        tell: Callable[[str], None],
    ) -> None:
        """Until the child ends, which it does in an orderly way only when told to stop."""
        if self._unsent is not None:
            child.send(tasks.reply_frame(self._unsent))
        told_to_stop = 0.0
        while True:
            if self._wake.is_set():
                self._wake.clear()
                child.send(tasks.frame_parts("wake"))
            if stop.is_set() and not told_to_stop:
                told_to_stop = time.monotonic()
                child.send(tasks.frame_parts("stop"))
            if told_to_stop and time.monotonic() - told_to_stop > _LEAVE_S:
                return
            if not child.pipe.poll(_POLL_S):
                continue
            word, fields = tasks.unframe(tasks.receive_frame(child.pipe.fileno()))
            if word == "task":
                self._unsent = None  # it asks for more, so it has sent the last one
                assert self._transport is not None
                self._transport.stage = "working"
                self._unsent = _handled(*tasks.read_task_frame(fields), handle)
                child.send(tasks.reply_frame(self._unsent))
            else:
                self._note(word, fields, tell)

    def _note(self, word: str, fields: list[memoryview], tell: Callable[[str], None]) -> None:
        """What is not a task.

        Raises:
            FrameError: nothing that a link says.
            LinkError: it cannot work.
        """
        if word == "node":
            self._node = int.from_bytes(fields[0], "big")
            return
        text = bytes(fields[0]).decode("ascii", "replace") if fields else ""
        if word == "state" and text in STATES:
            if text != "stopped":  # it is this end that says so
                tell(text)
        elif word == "fault" and _FAULT.fullmatch(text):
            raise LinkError(f"{text}: see `lazaret-agent doctor`" if text == ConfinementError.__name__ else text)
        else:
            raise tasks.FrameError("not what a link says")


def _handled(
    ticket: bytes, task: tasks.RoundTask, handle: Callable[[tasks.RoundTask], tasks.RoundAnswer]
) -> tasks.Reply:
    """What the installed code answers; "internal" for anything but a refusal that it raises. Its text stays here."""
    try:
        answer = handle(task)
    except tasks.TaskDeclinedError as refusal:
        return tasks.Reply(ticket, task.kind, None, refusal.code)
    except Exception:  # noqa: BLE001 - an exception's text may hold patient data
        return tasks.Reply(ticket, task.kind, None, "internal")
    if not answer.fits(task):
        return tasks.Reply(ticket, task.kind, None, "internal")
    return tasks.Reply(ticket, task.kind, answer)


class _Child:
    """The child, our end of its pipe, and who makes its calls: a context manager that leaves nothing behind."""

    def __init__(self, setup: LinkSetup, client: httpx.Client, key: _NodeKey) -> None:
        ours, theirs = socket.socketpair()
        relay, calls = socket.socketpair()
        with theirs, calls:
            self.process = start(MODULE, [setup.words()], [theirs.fileno(), calls.fileno()], KEPT, gives_back=True)
        self.pipe = Connection(ours.detach())
        self._relay = Relay(relay, client, messages.FLEET_BODY, key.proof)

    def __enter__(self) -> _Child:
        return self

    def send(self, parts: tasks.Parts) -> None:
        """One frame. Raises: OSError, it is gone."""
        tasks.send_frame(self.pipe.fileno(), parts)

    def __exit__(self, *_: object) -> None:
        """The end of the pipe is the child's end; one that does not see that is killed."""
        self.pipe.close()
        self._relay.close()
        end(self.process)
