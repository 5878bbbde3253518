"""A coordinator with its console, for tests: real books, shelf, runs, registration desk and TLS; wards as sites."""

from __future__ import annotations

import datetime as dt
import hashlib
import html
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from coordinator.admission import AdmissionService
from coordinator.console.context import CoordinatorConsoleContext
from coordinator.enrolment.authority import Authority
from coordinator.event_log import open_log
from coordinator.federation import run_controller
from coordinator.federation.run_manager import RunManager
from coordinator.gateway.notifications import NotificationStreams
from coordinator.storage import directory as homes
from coordinator.storage.release_store import ReleaseStore
from coordinator.storage.uploads import Uploads
from policies.governance import decisions
from policies.index.search import Index
from policies.ledger_service import ArtifactFindings
from policies.statements import PAYLOAD_TYPE, Release, Request, encode
from protos.artifacts.arrays import pack_images
from protos.common.dsse import seal
from protos.identity.key_files import pem, write_private
from protos.web.client_certificates import PinnedCertificates, make
from protos.web.router import Router
from protos.web.server import ConsoleServer
from protos.web.settings import ConsoleSettings
from tests.support.coordinator_runs import SITES, Federation, Grid, Host, admitting, conduct_here
from tests.support.ledger_world import K5, Person
from tests.support.upload_server import staged

ROLES = {"olga": "operator", "rita": "researcher", "otto": "auditor", "dora": "compliance", "hugo": "hospital"}
TEMPLATES = Path(homes.__file__).parents[1] / "console"


@dataclass
class Hub(Federation):
    """The coordinator; its sites are enrolled before anybody is in office."""

    persons: dict[str, Person] = field(default_factory=dict)

    def open(self) -> None:
        root, now = self.folder / "hub", dt.datetime.now(dt.UTC)
        if not root.exists():
            self.home = homes.create(root, 'listen = "127.0.0.1:0"\n', admitting(), now)
        self.store = homes.open_ledger(self.home)
        self.intake = AdmissionService.over(self.store, self.home.policy())
        self.grid = Grid(self.wards)

    def start(self) -> None:
        self.log = open_log(self.home.root / "coordinator.log")
        host: Any = Host(self.grid)
        self.host, self.shelf = host, ReleaseStore(self.home.releases, self.store)
        self.runs = RunManager(self.home.root / "runs", host, self.intake, self.shelf, self.log)
        self.sessions = NotificationStreams(self.log)
        self.authority = Authority(self.home, self.intake, lambda: dt.datetime.now(dt.UTC))
        self.uploads = Uploads(self.shelf.staging, lambda: 0.0, keep_free=0)
        for name, role in ROLES.items():
            self.appoint(name, role)

    def appoint(self, name: str, role: str) -> None:
        """The first of each role, by the operator alone."""
        if name not in self.store.state.persons:
            person = self.persons[name] = Person(name, role)
            decisions.appoint(self.store, name, role, person.public)

    def approve(self, name: str, serial: str, action: str, subject: str, value: str) -> bytes:
        """A person's sealed approval."""
        return self.persons[name].approval(serial, action, subject, value, self.store.origin)

    def request(self, name: str, serial: str, action: str, subject: str, value: str) -> bytes:
        """A person's sealed request."""
        said = Request(name, self.store.origin, serial, action, subject, value)
        return seal(encode(said), PAYLOAD_TYPE, self.persons[name].key)

    def release(self, site: str, grant: str, count: int = 6, **changes: Any) -> str:
        """A set of synthetic pictures of a site, admitted and on the shelf; its name."""
        hospital = self.hospitals[site]
        body = pictures(count, seed=len(self.store.state.releases))
        claim = changes.get("claim", K5)
        reserved = hospital.reservation(grant, claim, changes.get("mechanism", "ksame"))
        assert self.intake.register.reserve(f"r-{grant}", reserved, hospital.seal(reserved)).admitted
        digest = hashlib.sha256(body).hexdigest()
        values = {"artifact_sha256": digest, "artifact_bytes": len(body), **changes}
        release: Release = hospital.release(grant, **values)
        envelope = hospital.seal(release)
        verdict = self.intake.register.admit(f"s-{grant}", release, envelope, ArtifactFindings(()))
        assert verdict.admitted, verdict
        self.shelf.settle(staged(self.uploads, site, body), release, envelope, verdict)
        return release.release

    def finish(self, run: str) -> None:
        """Until a run is over."""
        list(self.runs.watch(run))

    def close(self) -> None:
        """The end of a test."""
        self.host.stopping.set()
        for feed in list(self.runs._feeds.values()):
            list(feed.follow())
        self.store.close()


def pictures(count: int = 6, seed: int = 0) -> bytes:
    """A set of small pictures that look different from each other."""
    dice = np.random.default_rng(seed)
    y, x = np.mgrid[0:32, 0:32] / 31.0
    made = [np.sin(a * x + b * y) * 110 + 128 for a, b in dice.uniform(2, 12, (count, 2))]
    return pack_images(np.array(made).astype(np.uint8), tuple("012"[i % 3] for i in range(count)))


@dataclass
class Served:
    """A hub whose console is reached over TLS."""

    hub: Hub
    context: CoordinatorConsoleContext
    logins: PinnedCertificates
    home: Path
    base: str = ""
    callers: dict[str, Caller] = field(default_factory=dict)

    def login(self, name: str) -> tuple[Path, Path]:
        """A pinned certificate and its key, PEM files; made once."""
        crt_file, key_file = self.home / f"{name}.crt", self.home / f"{name}.key"
        if not crt_file.exists():
            key, crt, _ = make(name, dt.datetime.now(dt.UTC), "a password")
            write_private(key_file, key)
            crt_file.write_bytes(crt)
            self.logins.trust(name, crt)
        return crt_file, key_file

    def key(self, name: str) -> Path:
        """The file of a person's signing key."""
        path = self.home / f"{name}.signing.key"
        if not path.exists():
            write_private(path, pem(self.hub.persons[name].key))
        return path

    @contextmanager
    def as_(self, name: str) -> Iterator[Caller]:
        """Somebody who is logged in, with a program in a browser's place; logged in once, as logins are counted."""
        if name not in self.callers:
            tls = ssl.create_default_context(cafile=str(self.hub.home.keys / "console.crt"))
            tls.load_cert_chain(*map(str, self.login(name)))
            client = httpx.Client(base_url=self.base, verify=tls, trust_env=False, timeout=30)
            self.callers[name] = Caller(client, {"Origin": self.base, "Sec-Fetch-Site": "same-origin"})
            answer = client.post("/login", data={"to": "/"}, headers=self.callers[name].own)
            assert answer.status_code == 303, words_of(answer)
        yield self.callers[name]

    def close(self) -> None:
        """Everybody leaves."""
        for caller in self.callers.values():
            caller.client.close()


@dataclass
class Caller:
    """What a person does at the console, without a browser."""

    client: httpx.Client
    own: dict[str, str]

    def get(self, path: str, **query: Any) -> httpx.Response:
        return self.client.get(path, params=query or None)

    def text(self, path: str, **query: Any) -> str:
        """A page, that is there."""
        answer = self.get(path, **query)
        assert answer.status_code == 200, words_of(answer)
        return answer.text

    def post(self, path: str, files: Any = None, **fields: str) -> httpx.Response:
        """A form, with the token of this login."""
        found = re.search(r'name="csrf" value="([^"]+)"', self.client.get("/rounds").text)
        assert found is not None
        return self.client.post(path, data={"csrf": found[1], **fields}, files=files, headers=self.own)

    def done(self, path: str, files: Any = None, **fields: str) -> str:
        """A form that does something: the page it leads to, with its message."""
        answer = self.post(path, files, **fields)
        assert answer.status_code == 303, words_of(answer)
        return self.text(answer.headers["location"])


def words_of(answer: httpx.Response) -> str:
    """The sentence of a page that says no."""
    found = re.search(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
    return html.unescape(found[1]) if found else f"{answer.status_code} {answer.text[:2000]}"


@contextmanager
def serving(
    folder: Path,
    monkeypatch: Any,
    adds: tuple[Callable[[Router, CoordinatorConsoleContext], None], ...],
    **options: Any,
) -> Iterator[Served]:
    """A hub with these pages, until the block ends; its sites answer in this process."""
    monkeypatch.setattr(run_controller, "conduct", conduct_here)
    monkeypatch.setattr(run_controller, "NODE_WAIT_S", 0.2)
    monkeypatch.setattr(run_controller, "_PAUSES_S", (0.1, 0.1))
    hub = Hub(folder, options.pop("sites", SITES), **options)
    index = Index(hub.home.root / "search.db", lambda: homes.look_at_ledger(hub.home))
    context = CoordinatorConsoleContext(
        home=hub.home,
        store=hub.store,
        intake=hub.intake,
        runs=hub.runs,
        shelf=hub.shelf,
        sessions=hub.sessions,
        signs=dict,
        authority=hub.authority,
        index=index,
        close_calls=lambda _site: None,
        log=hub.log,
        now=lambda: dt.datetime.now(dt.UTC),
    )
    settings = ConsoleSettings(listen="127.0.0.1:0")
    logins = PinnedCertificates(hub.home.root / "logins")
    made = Router(
        title="Lazaret, test",
        side="coordinator",
        who=context.person,
        templates=TEMPLATES,
        settings=settings,
        log=hub.log,
        logins=logins,
        encode=decisions.statement_bytes,
    )
    for add in adds:
        add(made, context)
    people = folder / "people"
    people.mkdir()
    served = Served(hub, context, logins, people)
    try:
        with ConsoleServer(made.guarded(), settings, logins, hub.home.root) as running:
            served.base = f"https://localhost:{running.port}"
            yield served
    finally:
        served.close()
        hub.close()
        index.close()
