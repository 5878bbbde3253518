"""Three hospitals and a coordinator as real processes, whose services are killed and started again.

``site-a`` makes a PrivImage release and takes part in a run; ``site-b``, where a person must approve what leaves,
makes its one k-SALSA release. Both receive images by C-STORE. ``site-c`` takes part in the run, and nobody kills it.
The run needs both sites in every round. A round that a kill ends while it is trained counts as made, so more rounds
are priced than the run has. Each killed service is started again at once, as a service manager does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agent.ingest.context import open_ingest
from agent.service import jobs
from agent.service.jobs import Job, JobStore
from agent.service.ledger_access import BorrowedLedger
from agent.storage import projects
from agent.storage.site_directory import SiteDirectory
from deploy.demo import eyes, letters
from deploy.demo.own_policies import SITES, amended
from deploy.demo.scale import Scale
from deploy.demo.scene import K, L
from deploy.phantoms import digits
from policies.ledger.store import Store
from tests.support.command_server import python
from tests.support.ended_demo import processes
from tests.support.ports import free_port
from tests.support.process_world import PATIENTS, ProcessWorld, write_setting
from tests.support.small_tasks import changed
from tests.support.steady_sender import CALLER, TITLE
from tests.support.tcp_proxy import TcpProxy, wait_until

ROOT = Path(__file__).parents[2]
PRIVATE, REVIEWED, STEADY = "site-a", "site-b", "site-c"
APPROVER, RUN = "head-b", "killed-1"
PATIENCE_S = 400.0  # for one thing to come true on a machine that is busy
SPARE_ROUNDS = 40  # that are priced beyond those of the run
PRETRAINING = 150  # steps of PrivImage: some seconds, with checkpoints
_CHILDREN = {"supervisor": "service.supervisor", "console": "agent.console.console_main"}  # of the service
CLOSED, OPEN = 'hours = "{:02d}:00-{:02d}:00"\n', ""
_RECEIVER = """
[site]
look_seconds = 1.0

[listener]
ae_title = "{title}"
host = "127.0.0.1"
port = {port}
callers = [{{ ae_title = "{caller}", addresses = ["127.0.0.1"] }}]
plain_tcp = true
full_at = 1.0
"""


@dataclass(slots=True, eq=False)
class ManagedProcess:
    """A process that is started again whenever it ends."""

    words: list[str]
    out: Path
    ready: str  # what it says when it is
    starts: int = 0
    ended: list[int] = field(default_factory=list)  # how, each time
    process: subprocess.Popen[bytes] | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Now, and again and again."""
        self._thread = threading.Thread(target=self._manage, daemon=True)
        self._thread.start()

    def _manage(self) -> None:
        while not self._over.is_set():
            with self.out.open("wb") as out:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
                self.process = subprocess.Popen(self.words, cwd=ROOT, stdout=out, stderr=out, env=environment)
            self.starts += 1
            self.ended.append(self.process.wait())
            if self.ended[-1] != -signal.SIGKILL and not self._over.is_set():
                (self.out.parent / f"{self.out.name}.{self.starts}").write_bytes(self.out.read_bytes())
            self._over.wait(0.2)

    @property
    def pid(self) -> int:
        """Of the process that runs; 0: none."""
        return self.process.pid if self.process is not None and self.process.poll() is None else 0

    @property
    def is_ready(self) -> bool:
        """Whether the process that runs has said so."""
        return bool(self.pid) and self.ready in self.out.read_text(errors="replace")

    def wait(self) -> None:
        """Until it is ready."""
        assert wait_until(lambda: self.is_ready, PATIENCE_S), self.out.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """End it, in good order."""
        self._over.set()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
        if self._thread is not None:
            self._thread.join(120)


@dataclass(slots=True, eq=False)
class KilledSite:
    """A hospital whose processes are killed."""

    name: str
    home: SiteDirectory
    service: ManagedProcess
    port: int  # of C-STORE

    @property
    def store(self) -> JobStore:
        """Its jobs."""
        return JobStore(self.home.root)

    def job(self) -> Job | None:
        """The release."""
        return next((job for job in self.store.all() if job.lane != jobs.ROUND), None)

    def part(self) -> Job | None:
        """Its part in the run."""
        return next((job for job in self.store.all() if job.lane == jobs.ROUND), None)

    def pid(self, target: str) -> int:
        """Of a process that may be killed; 0: it does not run."""
        service, known = self.service.pid, processes()
        if target == "service":
            return service
        if target in _CHILDREN:
            found = [n for n, (parent, line) in known.items() if parent == service and _CHILDREN[target] in line]
        else:
            found = [n for n, (_, line) in known.items() if "agent.cli.job_process" in line and self._is_mine(line)]
        return found[0] if found and service else 0

    def _is_mine(self, line: str) -> bool:
        return f" {self.home.root.resolve()} " in line

    def ledger(self) -> Store:
        """As its file has it."""
        return BorrowedLedger(self.home).read()


@dataclass(frozen=True, slots=True)
class Kill:
    """One of them, and where it came."""

    state: str  # in which it was meant to come
    site: str
    target: str  # whom it hit
    stood: str  # how the jobs stood

    def __str__(self) -> str:
        return f"{self.state:<8} {self.site} {self.target:<10} {self.stood}"


@dataclass(slots=True, eq=False)
class KilledWorld(ProcessWorld):
    """All of it."""

    kills: list[Kill] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)  # what people were asked to try again
    sites: dict[str, KilledSite] = field(default_factory=dict)
    proxy: TcpProxy = field(init=False)  # the line of ``PRIVATE`` to the coordinator

    @classmethod
    def enrolled(cls, folder: Path, rounds: int) -> KilledWorld:
        """Enrolled hospitals with their cohorts; nothing runs."""
        (folder / "out").mkdir(parents=True)
        (folder / "work").mkdir()
        scale = Scale(PATIENTS, rounds, ("ksalsa", "privimage", "federated"), PRETRAINING)
        world = cls(folder / "out", folder / "work", scale)
        priced = rounds + SPARE_ROUNDS
        world.mechanism = changed(world.mechanism, noise_multiplier=30.0, steps_per_round=3, rounds=priced)
        say: Callable[[str], None] = lambda _text: None  # noqa: E731 - nobody listens
        for step in (world.folders, world.public, world.found, world.enrol, world.ingest):
            step(say)
        return world

    @contextmanager
    def running(self, images: int) -> Iterator[None]:
        """Everybody serves, a run is under way, and PACS send so many images to each site that is killed."""
        with ExitStack() as stack:
            listen = next(
                line.split('"')[1]
                for line in (self.work / "coordinator" / "coordinator.toml").read_text().splitlines()
                if line.startswith("listen = ")
            )
            self.proxy = stack.enter_context(TcpProxy(listen))
            write_setting(self.work / PRIVATE / "site.toml", "coordinator", self.proxy.address)
            self._approved_by_a_person()
            for name in (PRIVATE, REVIEWED):
                self.sites[name] = self._killed_site(name, images)
            self.start(STEADY, self.agent(STEADY, "serve", "--modality", "OT"), "link: online")
            for site in self.sites.values():
                site.service.start()
                stack.callback(site.service.stop)
            self.sites[REVIEWED].service.wait()
            self.sites[PRIVATE].service.wait()
            over = threading.Event()
            people = threading.Thread(target=self._people, args=(over,), daemon=True)
            people.start()
            stack.callback(people.join)
            stack.callback(over.set)
            for site in self.sites.values():
                stack.enter_context(self._sending(site))
            yield

    def _approved_by_a_person(self) -> None:
        """One hospital's policy has a person approve every release, before its service first starts."""
        policy = self.work / REVIEWED / "policy.toml"
        policy.write_text(amended(policy.read_text(), {"approvals": '["hospital"]'}))
        self.run(self.agent(REVIEWED, "ledger", "amend"))
        self.run(self.agent(REVIEWED, "ledger", "appoint", APPROVER, "hospital", self.public_key(APPROVER)))

    def public_key(self, person: str) -> str:
        """Of a person whose private key is made now."""
        return self.run(self.agent(REVIEWED, "ledger", "person", str(self.key(person)))).strip()

    def _killed_site(self, name: str, images: int) -> KilledSite:
        home, port = self.work / name, free_port()
        with (home / "ingest.toml").open("a") as settings:
            settings.write(_RECEIVER.format(title=TITLE, caller=CALLER, port=port))
        self._new_patients(name, images)
        self.hours(name, CLOSED)
        (home / "console.toml").write_text(f'listen = "127.0.0.1:{free_port()}"\n')
        service = ManagedProcess(
            [sys.executable, *self.agent(name, "serve", "--modality", "OT")[1:]],
            self.work / f"{name}.out",
            "link: online",
        )
        return KilledSite(name, SiteDirectory(home), service, port)

    def _new_patients(self, name: str, images: int) -> None:
        first = images * (PRIVATE, REVIEWED).index(name)
        held = self.split.held_out
        chosen = digits.Digits(held.images[first : first + images].copy(), held.labels[first : first + images].copy())
        rows = digits.write_new_patients(
            self.work / f"new-{name}", SITES.index(name), chosen, np.random.default_rng(first)
        )
        with (self.work / "pacs" / name / "labels.csv").open("a") as labels:
            labels.writelines(f"{uid},{label}\n" for uid, label in rows)

    def hours(self, name: str, text: str) -> None:
        """Jobs start, or they do not; from the service's next start on."""
        hour = (time.localtime().tm_hour + 12) % 24
        (self.work / name / "jobs.toml").write_text(text.format(hour, (hour + 1) % 24))

    @contextmanager
    def _sending(self, site: KilledSite) -> Iterator[None]:
        words = [sys.executable, "-m", "tests.support.steady_sender", str(self.work / f"new-{site.name}")]
        words += [str(site.port), str(self.notes(site)), "2.0"]
        process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def notes(self, site: KilledSite) -> Path:
        """What the PACS wrote down as answered."""
        return self.work / f"answered-{site.name}"

    # -- what people do

    def _people(self, over: threading.Event) -> None:
        """Whoever sees that a job waits for a person types ``jobs retry``."""
        while not over.wait(1.0):
            for site in self.sites.values():
                for job in site.store.all():
                    waits = job.state == jobs.INTERRUPTED and job.not_before != 0.0 and not job.wanted
                    if waits and job.lane != jobs.ROUND:
                        time.sleep(1.0)
                        if site.store.read(job.number) == job and site.service.pid:
                            self.retries[f"{site.name}: {job.reason}"] += 1
                            self.typed(site, "jobs", "retry", str(job.number)).wait()

    def typed(self, site: KilledSite, *words: str) -> subprocess.Popen[bytes]:
        """A command that a person types."""
        command = [python(), *self.agent(site.name, *words)[1:]]
        with (self.work / "typed").open("ab") as out:
            out.write(f"$ {' '.join(words)}\n".encode())
            out.flush()
            return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)

    def queue(self, site: KilledSite, mechanism: str, config: Path) -> None:
        """A release becomes a job."""
        assert self.typed(site, "release", mechanism, "--config", str(config), "--detach").wait() == 0, self.said()
        assert site.job() is not None

    def said(self) -> str:
        """To people, last."""
        return (self.work / "typed").read_text()[-3000:]

    def ksalsa(self) -> Path:
        """The configuration of the k release."""
        path = eyes.configure("ksalsa", self.work, K, L)
        path.write_text(path.read_text() + "\n[alignment]\nsteps = 25\n")
        return path

    def privimage(self) -> Path:
        """The configuration of the private one."""
        return letters.configure(self.work, 250, PRETRAINING)

    # -- kills

    def stood(self) -> str:
        """How the jobs stand now, with their steps."""
        found = []
        for site in self.sites.values():
            for job in site.store.all():
                said = jobs.progress_of(site.store.folder(job.number))
                step = (
                    f" ({said.step} {said.detail}".rstrip() + ")" if job.state == jobs.RUNNING and said.step else ""
                )
                found.append(f"{job.kind} {job.state}{step}")
        return f"{', '.join(found)}, round {self.round()}"

    def round(self) -> int:
        """The newest round that has begun."""
        if not (self.work / "run.out").exists():
            return 0
        lines = (self.work / "run.out").read_text().splitlines()
        return max((json.loads(line)["round"] for line in lines if line.endswith("}")), default=0)

    def kill(self, state: str, site: KilledSite, target: str, more: str = "") -> bool:
        """kill -9; False: there is no such process now."""
        pid, stood = site.pid(target), self.stood()
        if not pid:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills.append(Kill(state, site.name, target, f"{stood}{more}"))
            print(f"kill {len(self.kills):>2}: {self.kills[-1]}", flush=True)
            return True
        return False

    # -- the end

    def images_of(self, name: str) -> Counter[str]:
        """How many images of digits each patient has in the vault."""
        with closing(projects.open_vault(SiteDirectory(self.work / name), "main")) as vault:
            return Counter(head.person for head in vault.heads() if head.modality == "OT")

    def spooled(self, site: KilledSite) -> int:
        """Files that wait to be read."""
        with open_ingest(site.home, "main") as way:
            return len(way.inbox.names())


def launched(world: KilledWorld) -> subprocess.Popen[bytes]:
    """The run of both sites that take part, followed to its end."""
    mechanism = world.mechanism
    job: dict[str, Any] = {
        "mechanism": mechanism.name,
        "parameters": int(mechanism.initial().vector.size),
        "sites": [PRIVATE, STEADY],
        "rounds": mechanism.rounds - SPARE_ROUNDS,
        "min_sites": 2,
        "config": json.loads(mechanism.to_json()),
    }
    (world.work / "job.json").write_text(json.dumps(job))
    words = world.coordinator("round", "launch", str(world.work / "job.json"), "--run", RUN, "--json")
    with (world.work / "run.out").open("wb") as out:
        return subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out)
