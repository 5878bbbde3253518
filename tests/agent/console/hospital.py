"""A hospital with its console, for tests: a real coordinator, real ledgers, vault, rooms and TLS; made patients."""

from __future__ import annotations

import datetime as dt
import html
import json
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from agent.cli.serve import _beside as beside
from agent.console.app import console_server
from agent.console.context import SiteConsoleContext
from agent.deidentify.record import Record
from agent.event_log import open_log
from agent.federation.run_plan import RunPlan
from agent.ingest.context import open_ingest
from agent.ingest.service import IngestService
from agent.mechanisms.common.linear_codec import Basis, fit_basis
from agent.mechanisms.ksame.mechanism import KSame
from agent.release.pipeline import release_synthetic
from agent.release.ports import ApprovalPending
from agent.runtime import open_runtime
from agent.storage import projects
from agent.storage.site_directory import MAIN, SiteDirectory
from agent.storage.spool import ReceivedFile
from deploy.phantoms.fundus import FundusPatient, fundus_patients
from policies.accounting.claims import SubsampledGaussian
from policies.governance import decisions
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import Store
from policies.statements import claim_json
from protos.federation.round_times import RoundTerms
from protos.identity.key_files import pem, write_private
from protos.web.client_certificates import PinnedCertificates, make
from protos.web.login_cli import FOLDER
from tests.support.federation_world import Federation
from tests.support.ledger_world import Person, policy

ROLES = {"olga": "operator", "rita": "researcher", "otto": "auditor", "dora": "compliance", "hugo": "hospital"}
SIDE = 32  # pixels
BOTH = '["compliance", "hospital"]'


@cache
def eyes(count: int, seed: int) -> tuple[FundusPatient, ...]:
    """Made people, drawn once."""
    return tuple(fundus_patients(count, np.random.default_rng(seed), SIDE))


def public_basis() -> Basis:
    """Fitted on other people's eyes."""
    public = [p.pixels.mean(axis=2).astype(np.float32) for one in eyes(10, 9) for p in one.photographs]
    return fit_basis((np.stack(public) / 255.0).astype(np.float32), 8, "public")


@dataclass
class Hospital:
    """A site, its people, and its console when it runs."""

    root: Path
    federation: Federation
    home: SiteDirectory
    persons: dict[str, Person] = field(default_factory=dict)
    base: str = ""
    runtime: SiteConsoleContext | None = None

    def patient_id(self, number: int) -> str:
        """As the PACS knows them."""
        return f"PAT-{number:04d}"

    def fill(self, patients: int = 12) -> None:
        """Two eyes of each made patient come into the vault, in grey."""
        people = eyes(patients, 3)
        with open_ingest(self.home, MAIN) as way:
            records = []
            for one in people:
                person = way.who.person("", self.patient_id(one.number))
                for n, photo in enumerate(one.photographs):
                    grey = (photo.pixels.mean(axis=2) / 255.0).astype(np.float32)
                    names = [f"{kind:08x}{one.number:012x}{n:012x}" for kind in range(4)]
                    label, body = "01"[one.number % 2], b"made file " + names[0].encode()
                    which = (names[0], names[1], person, names[2])
                    records.append(Record(*which, "OT", "image", label, grey, body, False, names[3], "EYE"))
            way.vault.keep_all(records)

    def refuse(self, count: int = 3, source: str = "export/DOE^JOHN.dcm") -> list[str]:
        """So many files are in quarantine, for what they are."""
        with open_ingest(self.home, MAIN) as way:
            for n in range(count):
                name = f"{n:032x}"
                way.quarantine.refuse(name, "not_dicom", ReceivedFile("folder", source, b"no image %d" % n), f"d{n}")
            return [entry.name for entry in way.quarantine.entries()]

    def appoint(self) -> None:
        """One person of each role, with a key file and a pinned certificate."""
        folder = self.root / "people"
        folder.mkdir(mode=0o700, exist_ok=True)
        store = Store(open_sqlite(self.home.root / "ledger.db"), "lazaret/site-a", self.home.sign_key(), lambda: 1)
        with store:
            for name, role in ROLES.items():
                self.persons[name] = Person(name, role)
                write_private(folder / f"{name}.key", pem(self.persons[name].key))
                decisions.appoint(store, name, role, self.persons[name].public)

    def release(self) -> str:
        """A k-anonymous set is made, and waits for both persons."""
        rng = np.random.default_rng(4)
        with open_runtime(self.home.root, lambda *_: None) as runtime:
            try:
                release_synthetic(runtime.site, KSame(5, 2, public_basis()), "OT", rng)
            except ApprovalPending as waiting:
                return waiting.signed.release.release
        raise AssertionError("it should wait")

    def login(self, name: str) -> tuple[Path, Path]:
        """A pinned certificate and its key, PEM files; made once."""
        crt_file, key_file = self.root / f"{name}-login.crt", self.root / f"{name}-login.key"
        if not crt_file.exists():
            key, crt, _ = make(name, dt.datetime.now(dt.UTC), "a password")
            write_private(key_file, key)
            crt_file.write_bytes(crt)
            PinnedCertificates(self.home.root / FOLDER).trust(name, crt)
        return crt_file, key_file

    def key(self, name: str) -> Path:
        """A person's signing key."""
        return self.root / "people" / f"{name}.key"

    @contextmanager
    def client(self, name: str) -> Iterator[Client]:
        """A program with a person's certificate, logged in."""
        tls = ssl.create_default_context(cafile=str(self.home.root / "keys" / "console.crt"))
        tls.load_cert_chain(*self.login(name))
        with httpx.Client(base_url=self.base, verify=tls, trust_env=False, timeout=240) as http:
            client = Client(http, self)
            answer = http.post("/login", data={"to": "/"}, headers=client.own)
            assert answer.status_code == 303, answer.text
            yield client

    def approval(self, name: str, serial: str, action: str, subject: str, value: str) -> bytes:
        """A person's sealed word."""
        return self.persons[name].approval(serial, action, subject, value, "lazaret/site-a")


@dataclass
class Client:
    """Somebody who is logged in."""

    http: httpx.Client
    hospital: Hospital

    @property
    def own(self) -> dict[str, str]:
        """What a browser says with a form of the console's own page."""
        return {"Origin": self.hospital.base, "Sec-Fetch-Site": "same-origin"}

    def get(self, path: str) -> httpx.Response:
        """A page."""
        return self.http.get(path)

    def post(self, path: str, files: dict[str, bytes] | None = None, **fields: str | list[str]) -> httpx.Response:
        """A form with this login's own token."""
        page = self.http.get("/")
        found = re.search(r'name="csrf" value="([^"]+)"', page.text)
        assert found is not None, page.text
        data = {"csrf": found[1], **fields}
        sent = {name: (f"{name}.json", body) for name, body in (files or {}).items()}
        return self.http.post(path, data=data, files=sent or None, headers=self.own)

    def told(self, path: str, **given: object) -> str:
        """Post, and what the next page says of it."""
        answer = self.post(path, **given)  # type: ignore[arg-type]
        assert answer.status_code == 303, words(answer)
        return words(self.get(answer.headers["location"]))


def words(answer: httpx.Response) -> str:
    """What a page says to people."""
    body = answer.text.partition("<main")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


@contextmanager
def hospital(root: Path, *, patients: int = 12, **changes: object) -> Iterator[Hospital]:
    """A site that is enrolled and has people and patients; its policy wants both approvals unless told otherwise."""
    with Federation(root) as federation:
        text = policy(**{"approvals": BOTH, **changes})
        site = federation.join("site-a", text)
        made = Hospital(root, federation, site.home)
        with open_runtime(site.home.root, lambda *_: None):
            pass  # the ledger begins with the site and its accounts
        made.appoint()
        made.fill(patients)
        yield made


@contextmanager
def serving(made: Hospital) -> Iterator[Hospital]:
    """Its console alone, as ``lazaret-agent console`` has it: it borrows the ledger for each act."""
    with console_server(made.home, with_console(made)) as served:
        yield at(made, served.told)


@contextmanager
def in_service(made: Hospital) -> Iterator[Hospital]:
    """Its console as ``serve`` keeps it: a process beside reception, runner of jobs and control socket."""
    log = with_console(made)
    with IngestService(made.home, MAIN, log) as reception, beside(made.home, None, log, reception) as told:
        yield at(made, told[0])


@contextmanager
def held(made: Hospital) -> Iterator[Hospital]:
    """The same beside a process that holds the ledger, as ``serve`` with a modality does."""
    log = with_console(made)
    with (
        open_runtime(made.home.root, lambda *_: None) as runtime,
        IngestService(made.home, MAIN, log) as reception,
        beside(made.home, runtime, log, reception) as told,
    ):
        yield at(made, told[0])


def with_console(made: Hospital) -> Any:
    """Its log; it has a ``console.toml`` now."""
    (made.home.root / "console.toml").write_text('listen = "127.0.0.1:0"\n')
    return open_log(made.home.root / "agent.log")


def at(made: Hospital, told: str) -> Hospital:
    """Where its console is, by the line that the operator reads."""
    found = re.search(r"https://[^,]+", told)
    assert found is not None
    made.base = found[0].replace("127.0.0.1", "localhost")
    return made


def sha(made: Hospital, release: str) -> str:
    """The artifact of a release that waits, by its statement."""
    vault = projects.open_vault(made.home)
    try:
        pending = vault.note("pending") or {}
        return str(json.loads(pending[release]["statement"])["predicate"]["artifact_sha256"])
    finally:
        vault.close()


def settled(client: Client) -> str:
    """What the releases' page says once nothing is under way."""
    for _ in range(200):
        told = words(client.get("/releases"))
        if "Running" not in told:
            return told
        time.sleep(0.1)
    raise AssertionError(told)


def approve(client: Client, name: str, release: str, value: str, action: str = "release", serial: str = "") -> str:
    """Hand a signed approval in, and what the next page says of it."""
    sealed = client.hospital.approval(name, serial or release, action, release, value)
    answer = client.post(f"/releases/{release}/approve", files={"envelope": sealed})
    return words(client.get(answer.headers["location"])) if answer.status_code == 303 else words(answer)


PLAN = RunPlan(
    "run-1",
    "federated",
    '{"classes":["0","1"],"rounds":3}',
    claim_json(SubsampledGaussian(0.25, 1.8, 45)),
    3,
    "OT",
    "main",
    RoundTerms(600, 4_000_000_000),
)
