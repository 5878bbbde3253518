"""Flower at the coordinator: the embedded SuperLink, and runs over it, each in a process of its own.

All use of Flower's private interfaces at this side is here, in grid.py and in protos/federation/flower_arrays.py
(agent/federation/supernode.py is the other end). It is written for flwr 1.41.0 exactly;
tests/test_federation_contract.py holds it to that. What travels is documented in protos/federation/messages.py.

One SuperLink state, and two ways to it:

- *fleet*: what agents say. It comes through the coordinator's one gRPC port, is bound to the enrolled site by
  coordinator/federation/fleet_proxy.py, and handed over in process: no socket.
- *private*: loopback, everything, but only with this process's random secret in a header: Flower's
  Control API has no login of its own, so without it any local user could register nodes or start runs. The process
  of a run has a secret of its own, which opens a task's calls only.

Flower's own log is switched off: it holds addresses and exception texts. Callers hear of progress and
results as values, and log what their own allow-list permits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, Final, Self

import httpx
import uvicorn
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore import sql_mixin
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from coordinator.federation.fleet_proxy import flower_key
from coordinator.federation.grid import BoundedGrid, LoopbackEndpoint, direct
from coordinator.federation.run_messages import RunSpec
from coordinator.federation.run_process import RunProcess, RunRequestHandler
from coordinator.federation.strategy import RoundPlan, RunGate
from coordinator.federation.superlink_listeners import HostConfig, PrivateGate, exchange, listen
from protos.common.errors import WorkerError
from protos.federation import flower_environment, round_times
from protos.federation.messages import STUB_BUNDLE, STUB_DIGEST

# A reply that is on its way when the line is cut is kept as long as a round may last, and not for three minutes: what
# of it has arrived is not sent again.
for _state in (in_memory_corestate, sql_corestate):
    _state.OBJECT_PUSH_SESSION_TTL_SECONDS = round_times.MOST_S  # type: ignore[attr-defined]

# Flower gives each connection to its database 64 MB for pages, and maps 256 MB of the file beside them. What lies
# there are models and updates, which are read once for each site: the system's own cache is enough.
_SMALL: Final = {"cache_size": "-4000", "mmap_size": "0"}
sql_mixin.SQLITE_PRAGMAS = tuple(  # type: ignore[assignment, attr-defined]
    (name, _SMALL.get(name, value))
    for name, value in sql_mixin.SQLITE_PRAGMAS  # type: ignore[attr-defined]
)

for _name in ("flwr", "httpx", "httpcore", "uvicorn"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)

_POLL_S: Final = 0.2
_START_S: Final = 60.0
_CLAIM_S: Final = 30.0


class FlowerHostError(WorkerError, RuntimeError):
    """The embedded SuperLink did not start or does not answer as it must."""


class FlowerHost:
    """The embedded SuperLink, as a context manager. Registrations survive restarts on the same state."""

    def __init__(self, config: HostConfig) -> None:
        """Check the process; nothing listens yet.

        Raises:
            FlowerEnvironmentError: `protos.federation.flower_environment.configure_environment` was not called before
            the imports.
        """
        flower_environment.require_configured()
        self.config = config
        self.stopping = threading.Event()
        self._secret = secrets.token_bytes(32)
        self._key = secrets.token_hex(32)
        self._server: uvicorn.Server | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task_keys: set[str] = set()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="superlink", daemon=True)

    def __enter__(self) -> Self:
        """Listen, and end whatever runs an earlier process left open.

        Raises:
            FlowerHostError: the SuperLink did not come up.
            OSError: an address is in use.
        """
        self.config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.config.state.chmod(0o700)  # Flower's files in it are readable by all
        self._socket = listen(self.config.private)
        self._server = self._make_server()
        self._thread.start()
        until = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or not time.monotonic() < until:
                self.__exit__()
                raise FlowerHostError("the SuperLink did not start")
            time.sleep(0.05)
        self._control = direct(ControlHttpClient.from_server_address(*self._way().args("flwr CLI")))
        self._end_open_runs()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Stop listening. A run that is being conducted ends with `RoundFailedError`."""
        self.stopping.set()
        if self._server is not None:
            self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(15)
        if self._socket is not None:
            self._socket.close()

    @property
    def private(self) -> tuple[str, int]:
        """Address and port of the private listener, once it is open."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def register(self, site: str, node_key: bytes) -> None:
        """Let the agent that holds ``node_key`` take part as ``site``. Again with the same key: no change.

        Args:
            site: the name by which a `RoundPlan` asks for it.
            node_key: OpenSSH public key, EC P-384 (Flower refuses Ed25519 for nodes). A new key for a
                known site replaces the old one.
        Raises:
            ValueError: no such key, or another site already has it.
        """
        wanted = flower_key(node_key)
        if not site:
            raise ValueError("a site needs a name")
        nodes = self._nodes()
        if any(node.public_key == wanted and node.name != site for node in nodes):
            raise ValueError(f"the node key of {site} belongs to another site already")
        for node in nodes:
            if node.name == site and node.public_key != wanted:
                self._control.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
        if not any(node.public_key == wanted for node in nodes):
            self._control.RegisterNode(RegisterNodeRequest(public_key=wanted, name=site))

    def online(self) -> set[str]:
        """The sites whose agents are connected now (or were within the last two heartbeats)."""
        return {node.name for node in self._nodes() if node.status == NodeStatus.ONLINE}

    def node_id(self, public_key: bytes) -> int | None:
        """The node id under which Flower knows a key, as `flower_key` gives it; None: it does not."""
        found: int | None = self._app.state.linkstate_factory.state().get_node_id_by_public_key(public_key)
        return found

    def fleet(self, path: str, headers: Mapping[str, str], body: bytes, seconds: float) -> tuple[int, bytes]:
        """Hand one Fleet call to the SuperLink in this process. Any thread but its own.

        Returns:
            HTTP status and body; 503 when it is stopping or did not answer in time.
        """
        if self._loop is None or self.stopping.is_set():
            return 503, b""
        coroutine = exchange(self._app, path, headers, body)
        try:
            call = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop has ended
            coroutine.close()
            return 503, b""
        try:
            return call.result(seconds)
        except (TimeoutError, CancelledError):
            call.cancel()
            return 503, b""
        except Exception:  # noqa: BLE001 - Flower's texts must not reach the site
            return 500, b""

    def _nodes(self) -> list[NodeInfo]:
        listed = self._control.ListNodes(ListNodesRequest()).nodes_info
        return [node for node in listed if node.status != NodeStatus.UNREGISTERED]

    def _end_open_runs(self, only: int | None = None) -> None:
        """A run of a process that is gone is never resumed by Flower: its caller starts a new one."""
        asked = ListRunsRequest(limit=1000) if only is None else ListRunsRequest(run_id=only)
        for run_id, run in self._control.ListRuns(asked).run_dict.items():
            if run.status.status != "finished":
                self._control.StopRun(StopRunRequest(run_id=run_id))
                with contextlib.suppress(httpx.HTTPError, ValueError):  # listed, what is left of it is dropped
                    self._control.ListRuns(ListRunsRequest(run_id=run_id))

    def _way(self) -> LoopbackEndpoint:
        host, port = self.private
        return LoopbackEndpoint(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", self._key)

    def _make_server(self) -> uvicorn.Server:
        host, port = self.private
        self._app: Any = create_app(
            SuperLinkLifespanConfig(
                control_address="",
                health_server_address=None,
                host=host,
                port=port,
                insecure=True,  # of the old gRPC listeners, which stay off
                certificates=None,
                superexec_auth_secret=self._secret,
                authn_plugin=NoOpControlAuthnPlugin(),
                event_log_plugin=None,
                fleet_event_log_plugin=None,
                enable_event_log=False,
                artifact_provider=None,
                enable_supernode_auth=True,
                fleet_api_type="grpc-rere",
                fleet_api_address=None,
                simulation=False,
                ssl_ca_certfile=None,
                ssl_certfile=None,
                ssl_keyfile=None,
                database=str(self.config.state.absolute() / "flower.db"),
                isolation="process",  # Flower starts no process of its own
                runtime_dependency_install=False,
            ),
            SuperLinkLifespan,
        )
        return uvicorn.Server(
            uvicorn.Config(
                PrivateGate(self._app, self._key, self._task_keys),
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=3,
            )
        )

    def _serve(self) -> None:
        async def served() -> None:
            assert self._server is not None
            assert self._socket is not None
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        with contextlib.suppress(SystemExit):  # uvicorn's way to say that it could not start
            asyncio.run(served())

    @contextlib.contextmanager
    def task(self) -> Iterator[tuple[LoopbackEndpoint, str]]:
        """Start a run with the stub bundle; for whoever stands in for the ServerApp that Flower would execute.

        Yields:
            The way to that task's calls, open as long as this lasts, and the task's token.
        Raises:
            FlowerHostError: the SuperLink gives no task.
        """
        way = replace(self._way(), key=secrets.token_hex(32))
        with self._starting:  # the one task that nobody has claimed is ours
            fab = fab_to_proto(Fab(STUB_DIGEST, STUB_BUNDLE, {}))
            run_id = self._control.StartRun(StartRunRequest(fab=fab, federation="")).run_id
            token = self._claim(run_id)
        self._task_keys.add(way.key)
        try:
            yield way, token
        finally:
            self._task_keys.discard(way.key)
            self._drop(run_id)

    def _drop(self, run_id: int) -> None:
        """A run is over, also when its process did not say so; nothing that was sent in it stays."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            self._end_open_runs(run_id)

    def _claim(self, run_id: int) -> str:
        """The token of the run's ServerApp task. Tasks of other runs, if any, are ended unexecuted."""
        signer = SuperExecAuthHttpInterceptor(
            master_secret=self._secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
        )
        args = self._way().args("SuperExec", signer)
        with direct(RuntimeHttpClient.from_server_address(*args)) as runtime:
            until = time.monotonic() + _CLAIM_S
            while time.monotonic() < until:
                got = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
                if got.token and got.task.run_id == run_id:
                    return str(got.token)
                if got.token:
                    BoundedGrid(self._way(), got.token, self.stopping).end("failed")
                time.sleep(_POLL_S)
        raise FlowerHostError("the SuperLink has no task for the run that it just started")


def conduct(host: FlowerHost, plan: RoundPlan, gate: RunGate) -> None:
    """Conduct one federated run to its end: price, then the rounds from ``plan.first_round`` on.

    Blocks; Flower's part runs in a separate process for this run. ``gate`` and ``progress`` are called in this
    thread, ``gate.round_done`` after each round, before the next begins, so that an interrupted run resumes as a new
    call with the last durable vector and round. The caller must ensure that a site takes part in one run at a time
    (`coordinator.federation.run_manager.RunManager.turn`): a site would leave one run for the other.

    Raises:
        RoundFailedError: too few usable sites at the price or in a round, or the host is stopping.
        RunLostError: the run's process is gone; what it had closed is closed.
        FlowerHostError: the SuperLink does not answer.
    """
    try:
        with RunProcess(plan) as child, host.task() as (way, token):
            order, plan = RunSpec(plan, token), plan.without_numbers()
            try:
                child.conduct(order, way, RunRequestHandler(plan, gate), host.stopping)
            finally:
                child.end()
    except httpx.HTTPError:  # its text may quote what came over the wire
        raise FlowerHostError("the SuperLink does not answer") from None
