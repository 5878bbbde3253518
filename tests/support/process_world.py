"""The demo's three hospitals and its coordinator as real processes, with consoles where a browser looks at them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.hazmat.primitives.serialization.pkcs12 import load_pkcs12

from deploy.demo.jobs import job_file
from deploy.demo.scale import Scale
from deploy.demo.scene import PERSONS, SITES, Scene
from protos.identity.key_files import write_private
from tests.support.command_server import python
from tests.support.ports import free_port
from tests.support.small_mechanisms import FEDERATED
from tests.support.small_tasks import changed

ROLES = {
    "olga": "operator",
    "rita": "researcher",
    "otto": "auditor",
    "dpo-1": "compliance",
    "physician-1": "hospital",
}
AT_SITE = {"head-1": "hospital", "dpo-a": "compliance", "it-1": "operator", "otto-a": "auditor"}
REVIEWED = "site-c"  # where persons look at everything before it leaves; it has no part in rounds
PATIENTS = 30  # of each hospital


@dataclass(slots=True, eq=False)
class ProcessWorld(Scene):
    """The federation of the demo: what is run to its end is forked, what stays is started as a user starts it.

    Its rounds train the smallest network that there is: they are about processes.
    """

    def __post_init__(self) -> None:
        """Another job than the demo's."""
        Scene.__post_init__(self)
        self.mechanism = changed(FEDERATED, rounds=self.scale.rounds)

    @classmethod
    def copied(cls, enrolled: Path, folder: Path, rounds: int) -> Self:
        """A copy of the enrolled federation on a port of its own, for jobs of so many rounds; nothing runs."""
        (folder / "out").mkdir(parents=True)
        shutil.copytree(enrolled, folder / "work")
        dial(folder / "work", f"127.0.0.1:{free_port()}")
        return cls(folder / "out", folder / "work", Scale(PATIENTS, rounds))

    def _into_orthanc(self, folder: Path, say: Any) -> int:
        """No PACS is started: the first hospital's images stay in its folder."""
        return 0

    def serve(self) -> None:
        """Start the coordinator."""
        self.start("coordinator", self.coordinator("serve"), "serving")

    def run(self, command: list[str], may_refuse: bool = False) -> str:
        """As the demo types it; see :mod:`tests.support.command_server`."""
        return Scene.run(self, [python(), *command[1:]], may_refuse)


def enrol_all(folder: Path) -> Path:
    """Three enrolled hospitals with their cohorts in the vault, and a coordinator; nothing runs. To be copied."""
    (folder / "out").mkdir(parents=True)
    (folder / "work").mkdir()
    with ProcessWorld(folder / "out", folder / "work", Scale(PATIENTS, 1)) as world:
        for step in (world.folders, world.found, world.enrol, world.ingest):
            step(lambda _text: None)
    return folder / "work"


@pytest.fixture(scope="session")
def enrolled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The federation that every journey copies: made once, by the worker that needs it first."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with (shared / "enrolled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "enrolled").exists():
            enrol_all(tmp_path_factory.mktemp("enrolling") / "it").rename(shared / "enrolled")
    return shared / "enrolled"


def dial(work: Path, address: str) -> None:
    """Have the coordinator listen there, and every site call it there, from their next start on."""
    write_setting(work / "coordinator" / "coordinator.toml", "listen", address)
    for site in SITES:
        write_setting(work / site / "site.toml", "coordinator", address)


def write_setting(path: Path, key: str, value: str) -> None:
    """Change one line of a settings file."""
    lines = path.read_text().splitlines()
    found = [f"{key} = {json.dumps(value)}" if line.startswith(f"{key} = ") else line for line in lines]
    assert found != lines or f"{key} = {json.dumps(value)}" in lines, f"{path.name} has no {key}"
    path.write_text("\n".join(found) + "\n")


def ledger(world: Scene) -> dict[str, Any]:
    """The coordinator's ledger, as its command shows it."""
    return json.loads(world.run(world.coordinator("ledger", "show", "--json")))  # type: ignore[no-any-return]


def site_ledger(world: Scene, site: str) -> dict[str, Any]:
    """A site's own ledger, as its command shows it."""
    return json.loads(world.run(world.agent(site, "ledger", "show", "--json")))  # type: ignore[no-any-return]


def spent(shown: dict[str, Any], account: str) -> tuple[int, int]:
    """What an account of a ledger that was shown holds back, and what it has spent."""
    (found,) = [a for a in shown["accounts"] if a["account"] == account]
    return found["held"], found["spent"]


@dataclass(slots=True, eq=False)
class ConsoleWorld(ProcessWorld):
    """The same, with persons in office, their logins pinned, and the consoles of both sides open."""

    ports: dict[str, int] = field(default_factory=dict)

    def consoles(self, say: Any) -> None:
        """Appoint the coordinator's persons, pin their logins and open its console, before it serves."""
        say("persons")
        for name, role in ROLES.items():
            if name not in PERSONS:
                self._appoint(self.coordinator, name, role, "dpo-1", "physician-1")
        for name in ROLES:
            self._pinned("coordinator", self.coordinator, name)
        self._console("coordinator")

    def site_console(self, say: Any) -> None:
        """The same at one hospital, whose new policy has a person look at every release before it leaves."""
        say("persons of the hospital")
        policy = self.work / REVIEWED / "policy.toml"
        policy.write_text(policy.read_text().replace("approvals = []", 'approvals = ["hospital"]'))
        self.run(self.agent(REVIEWED, "ledger", "amend"))
        for name, role in AT_SITE.items():
            approvers = () if role in ("hospital", "compliance") else ("head-1", "dpo-a")
            self._appoint(lambda *words: self.agent(REVIEWED, *words), name, role, *approvers)
            self._pinned(REVIEWED, lambda *words: self.agent(REVIEWED, *words), name)
        self._console(REVIEWED)

    def _appoint(self, side: Any, name: str, role: str, *approvers: str) -> None:
        public = self.run(side("ledger", "person", str(self.key(name)))).strip()
        serial, files = f"appoint-{name}", []
        for who in approvers:
            files.append(str(self.work / f"{serial}.{who}.json"))
            words = ["ledger", "sign", "appoint", name, role, public, "--person", who, "--serial", serial]
            self.run(side(*words, "--key", str(self.key(who)), "--out", files[-1]))
        if files:
            self.run(side("ledger", "approve", *files))
        self.run(side("ledger", "appoint", name, role, public, *(["--serial", serial] if files else [])))

    def _pinned(self, where: str, side: Any, name: str) -> None:
        folder = self.work / "logins" / name
        folder.parent.mkdir(exist_ok=True)
        password = self.run(side("login", "make", name, "--out", str(folder))).partition("once: ")[2].split()[0]
        self.run(side("login", "trust", name, str(folder / f"{name}.crt")))
        opened = load_pkcs12((folder / f"{name}.p12").read_bytes(), password.encode())
        assert opened.key is not None
        pem = opened.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_private(folder / f"{name}.key", pem)
        del where

    def _console(self, where: str) -> None:
        self.ports[where], watched = free_port(), free_port()
        self.ports[f"{where} metrics"] = watched
        text = f'listen = "127.0.0.1:{self.ports[where]}"\nnames = ["localhost"]\nmetrics = "127.0.0.1:{watched}"\n'
        (self.work / where / "console.toml").write_text(text)

    def login(self, person: str) -> tuple[Path, Path]:
        """A person's certificate and its key, as files for a browser."""
        folder = self.work / "logins" / person
        return folder / f"{person}.crt", folder / f"{person}.key"

    def address(self, where: str) -> str:
        """Where a console is."""
        return f"https://localhost:{self.ports[where]}"

    def job(self) -> dict[str, Any]:
        """A federated job of all three hospitals."""
        return job_file(self.mechanism, 2)


@contextmanager
def console_world(enrolled: Path, folder: Path) -> Iterator[ConsoleWorld]:
    """Three hospitals and a coordinator that serve; at one of them a release waits for a person."""
    quiet = lambda _text: None  # noqa: E731 - nobody watches
    with ConsoleWorld.copied(enrolled, folder, 2) as made:
        made.consoles(quiet)
        made.serve()
        made.site_console(quiet)
        words = ["release", "ksame", "--basis", str(made.work / "basis.safetensors"), "--modality", "OT"]
        made.run(made.agent(REVIEWED, *words, "--k", "5", "--l-diversity", "2", "--json"), may_refuse=True)
        for site in SITES:
            made.start(site, made.agent(site, "serve", "--modality", "OT"), "link: online")
        yield made
