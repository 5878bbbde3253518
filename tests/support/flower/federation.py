"""One coordinator and three agents that speak Flower: real processes that may reach loopback only, real TLS."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cryptography import x509

from protos.identity.key_files import replace_private
from tests.support.pki import Authority, node_key

ROOT = Path(__file__).parents[3]

SITES = ("north", "south", "west")
ADD = {"north": 1.0, "south": 2.0, "west": 6.0}


class Process:
    """A started program; its output lines arrive in a queue."""

    def __init__(self, module: str, home: Path, settings: dict[str, Any]) -> None:
        self.home, self.module = home, module
        home.mkdir(parents=True, exist_ok=True)
        self.settings = home / "settings.json"
        self.settings.write_text(json.dumps({"home": str(home), **settings}))
        self.lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        # A proxy in the environment must not be used, by either side.
        nowhere = "http://192.0.2.1:3128"
        names = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "grpc_proxy", "ALL_PROXY")
        env = {**os.environ, **dict.fromkeys(names, nowhere)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.support.flower.{module}", str(self.settings)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(home / "stderr.txt").open("w"),
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def hear(self, seconds: float = 240.0) -> str:
        """The next line."""
        until = time.monotonic() + seconds
        try:
            while self.lines.empty() and self.process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            line = self.lines.get(timeout=0.5)
        except queue.Empty:
            raise AssertionError(f"{self.module} is silent: {self.errors()[-2000:]}") from None
        self.said.append(line)
        return line

    def wait_for(self, state: str, seconds: float = 240.0) -> None:
        """Until that line was said."""
        until = time.monotonic() + seconds
        while (line := self.hear(max(0.1, until - time.monotonic()))) != state:
            assert not line.startswith("failed"), line

    def tell(self, **command: Any) -> None:
        """One command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def say(self, line: str) -> None:
        """One line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> Any:
        """One command, one answer."""
        self.tell(**command)
        return json.loads(self.hear(280.0))

    def errors(self) -> str:
        """What it wrote to standard error."""
        return (self.home / "stderr.txt").read_text()

    def left_loopback(self) -> str:
        """What it tried to reach outside this machine."""
        notes = self.home / "network.txt"
        return notes.read_text() if notes.exists() else ""

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        """End in an orderly way."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()


class FlowerFederation:
    """One coordinator, three agents, their certificates and keys."""

    def __init__(self, folder: Path, **coordinator: Any) -> None:
        self.folder = folder
        self.authority = Authority(folder / "pki")
        cert, key = self.authority.server()
        self.node_keys = {site: node_key(self._private(site), site) for site in SITES}
        self.settings = {
            "state": str(folder / "state"),
            "ca": str(self.authority.ca),
            "cert": str(cert),
            "key": str(key),
            "nodes": {site: str(public) for site, (_, public) in self.node_keys.items()},
            **coordinator,
        }
        self.coordinator = Process("coordinator_process", folder / "coordinator", self.settings)
        self.ready = json.loads(self.coordinator.hear())
        self.agents: dict[str, Process] = {}

    def restart(self) -> None:
        """The coordinator again, on the same state and ports."""
        again = {**self.settings, **{name: self.ready[name] for name in ("port", "private")}}
        self.coordinator = Process("coordinator_process", self.folder / "again", again)
        self.ready = json.loads(self.coordinator.hear())

    def _private(self, site: str) -> Path:
        folder = self.folder / "keys" / site
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        return folder

    def keys(self, site: str) -> Path:
        """The site's key directory, with a fresh certificate."""
        folder = self._private(site)
        cert, key = self.authority.agent(site)
        replace_private(folder / "tls.pem", key.read_bytes() + cert.read_bytes())
        (folder / "root.crt").write_bytes(self.authority.ca.read_bytes())
        return folder

    def serial(self, site: str) -> str:
        """Of the certificate in the site's key directory, hexadecimal."""
        pem = (self.folder / "keys" / site / "tls.pem").read_bytes()
        return f"{x509.load_pem_x509_certificates(pem)[0].serial_number:x}"

    def start_agent(
        self, site: str, digest: str | None = None, folder: str | None = None, proxy: str = "", target: str = ""
    ) -> Process:
        """An agent of ``site``; a replaced one gets a folder of its own. ``target``: another way to the port."""
        self.agents[site] = Process(
            "agent_process",
            self.folder / (folder or site),
            {
                "site": site,
                "target": target or f"127.0.0.1:{self.ready['port']}",
                "keys": str(self.keys(site)),
                "proxy": proxy,
                "node_key": str(self.node_keys[site][0]),
                "digest": digest,
            },
        )
        return self.agents[site]

    def conduct(self, run: str, config: dict[str, Any] | None = None, **plan: Any) -> dict[str, Any]:
        """Conduct a run and return the coordinator's report."""
        plan = {"sites": SITES, "rounds": 2, "min_sites": 2, **plan}
        report: dict[str, Any] = self.coordinator.ask(
            do="conduct", run=run, config={"add": ADD, **(config or {})}, **plan
        )
        return report

    def conduct_without(self, run: str, config: dict[str, Any] | None = None, **plan: Any) -> dict[str, Any]:
        """Conduct a run in which one site falls silent, and report.

        It is missed after two heartbeats (20 s). The round's timeout is far beyond that: only a safety net, so that a
        busy machine does not make it the deadline of the healthy sites, too.
        """
        plan = {"sites": SITES, "rounds": 2, "min_sites": 2, "round_timeout_s": 200.0, "node_wait_s": 100.0, **plan}
        self.coordinator.tell(do="conduct", run=run, config={"add": ADD, **(config or {})}, **plan)
        report: dict[str, Any] = json.loads(self.coordinator.hear(280.0))
        return report

    def close(self) -> None:
        """End everything."""
        for process in (*self.agents.values(), self.coordinator):
            process.stop()
