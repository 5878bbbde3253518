"""The demo's three hospitals and coordinator with their consoles open: real processes, for tests with a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.hazmat.primitives.serialization.pkcs12 import load_pkcs12

from deploy.demo.scene import PERSONS, SITES, Scale
from protos.keyfile import write_private
from tests.support.forked_scene import ForkedScene
from tests.support.ports import free_port

ROLES = {
    "olga": "operator",
    "rita": "researcher",
    "otto": "auditor",
    "dpo-1": "compliance",
    "physician-1": "hospital",
}
AT_SITE = {"head-1": "hospital", "dpo-a": "compliance", "it-1": "operator", "otto-a": "auditor"}
REVIEWED = "site-c"  # where persons look at everything before it leaves; it has no part in rounds
PATIENTS, ROUNDS = 60, 2


@dataclass(slots=True, eq=False)
class Stage(ForkedScene):
    """The scene of the demo, as far as people need it who look at it with a browser."""

    ports: dict[str, int] = field(default_factory=dict)

    def consoles(self, say: Any) -> None:
        """Before anything serves: who is who, who may come in, and where the consoles listen."""
        say("persons")
        for name, role in ROLES.items():
            if name not in PERSONS:
                self._appoint(self.coordinator, name, role, "dpo-1", "physician-1")
        for name in ROLES:
            self._pinned("coordinator", self.coordinator, name)
        self._console("coordinator")
        self._remade()

    def _remade(self) -> None:
        """The first hospital's own policy: a person there looks at every release before it leaves."""
        home, own = self.work / REVIEWED, self.work / "reviewed.toml"
        settings = (home / "site.toml").read_text()
        kept = (home / "ingest.toml").read_text() if (home / "ingest.toml").exists() else ""
        poor = (self.work / "poor.toml").read_text()
        own.write_text(poor.replace("approvals = []", 'approvals = ["hospital"]'))
        shutil.rmtree(home)
        told = re.findall(r'"([0-9a-f]{64})"', settings)
        where = re.search(r'coordinator = "(.*?)"', settings)
        assert where is not None
        words = ["init", "--site", REVIEWED, "--policy", str(own), "--input", f"../pacs/{REVIEWED}"]
        words += ["--coordinator", where[1], "--secondary-capture-modality", "OT"]
        words += [word for digest in told for word in ("--public-component", digest)]
        words += [word for modality in ("OT", "CT", "MR", "CR", "OP") for word in ("--modality", modality)]
        self.run(self.agent(REVIEWED, *words))
        if kept:
            (home / "ingest.toml").write_text(kept)

    def site_console(self, say: Any) -> None:
        """The same at the first hospital, once it is enrolled."""
        say("persons of the hospital")
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

    def key(self, person: str) -> Path:
        """Where a person keeps the key that signs."""
        return self._key(person)

    def login(self, person: str) -> tuple[Path, Path]:
        """A person's certificate and its key, as files for a browser."""
        folder = self.work / "logins" / person
        return folder / f"{person}.crt", folder / f"{person}.key"

    def address(self, where: str) -> str:
        """Where a console is."""
        return f"https://localhost:{self.ports[where]}"

    def job(self) -> dict[str, Any]:
        """The demo's own federated job."""
        return {
            "mechanism": "federated",
            "parameters": int(self.mechanism.initial().vector.size),
            "sites": list(SITES),
            "rounds": self.scale.rounds,
            "min_sites": 2,
            "config": json.loads(self.mechanism.to_json()),
        }


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """Three hospitals and a coordinator that serve; at the first hospital a release waits for a person."""
    quiet = lambda _text: None  # noqa: E731 - nobody watches
    (folder / "out").mkdir(parents=True)
    (folder / "work").mkdir()
    with Stage(folder / "out", folder / "work", Scale(PATIENTS, ROUNDS)) as made:
        made.folders(quiet)
        made.found(quiet)
        made.consoles(quiet)
        made.enrol(quiet)
        made.ingest(quiet)
        made.site_console(quiet)
        words = ["release", "ksame", "--basis", str(made.work / "basis.safetensors"), "--modality", "OT"]
        made.run(made.agent(REVIEWED, *words, "--k", "5", "--l-diversity", "2", "--json"), may_refuse=True)
        for site in SITES:
            made.start(site, made.agent(site, "serve", "--modality", "OT"), "link: online")
        yield made
