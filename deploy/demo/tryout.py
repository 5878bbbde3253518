"""After the demo: the coordinator and one hospital go on running, for a newcomer to try them in a browser.

The hospital receives images by C-STORE, both consoles are open, and persons of every role have a login and a key.
What is prepared here is typed as commands, as in the demo itself. It is good for this machine alone: the keys of all
persons lie in one folder, and the receiver takes plain TCP from the loopback.
"""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from deploy.demo.own_policies import SITES, amended
from deploy.demo.processes import DemoError
from deploy.demo.scene import PERSONS, K, L, Say, Scene
from deploy.phantoms import digits
from protos.common.errors import RefusedError

SITE: Final = "site-b"  # not the one whose PACS has ended, nor the one with a small budget
SPARE: Final = 3  # releases that its policy admits beyond the demo's
SENT: Final = 10  # images of new patients that arrive at once: no release may use those of the demo's again
SAMPLES: Final = 12  # that are left to send, each of another new patient: enough for a second release
AE_TITLE: Final = "LAZARET"
CALLERS: Final = ("STORESCU", "DCMSEND", "ORTHANC", "PYNETDICOM")  # what senders call themselves if nobody says more
FIRST_PORT: Final = 11112  # the receiver's, as DICOM's examples have it; the consoles take the two after it

_RECEIVER: Final = """
[listener]
ae_title = "{title}"
host = "127.0.0.1"
port = {port}
callers = [{callers}]
plain_tcp = true   # nothing leaves this machine
full_at = 1.0      # a laptop's disk is often nearly full; 2 GiB stay free all the same
"""
_MAY: Final[Mapping[str, Mapping[str, str]]] = {
    "hospital": {
        "operator": "reads queues, retries, drops files, sends what was approved",
        "researcher": "sees overview, budget, ledger and policy, and no image of a patient",
        "auditor": "sees counts, statements, reasons and the ledger, and no image",
        "compliance": "looks at images, approves or refuses releases, edits the policy, opts patients out",
        "hospital": "looks at images, approves or refuses releases",
    },
    "coordinator": {
        "operator": "plans and stops trainings, invites hospitals, asks for changes and carries out approved ones",
        "researcher": "plans trainings, asks for changes, downloads releases",
        "auditor": "reads everything, refusals too, and changes nothing",
        "compliance": "approves what others ask for, reads everything",
        "hospital": "approves too: two roles are needed",
    },
}
_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {  # who asks or approves there
    "hospital": ("compliance", "hospital"),
    "coordinator": ("operator", "researcher", "compliance", "hospital"),
}


class PortTakenError(RefusedError):
    """Something else listens where the demo would."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Three in a row on the loopback."""

    first: int

    @property
    def receiver(self) -> int:
        """C-STORE at the hospital."""
        return self.first

    @property
    def hospital(self) -> int:
        """The hospital's console."""
        return self.first + 1

    @property
    def coordinator(self) -> int:
        """The coordinator's console."""
        return self.first + 2

    def require_free(self) -> None:
        """Find out before minutes of work.

        Raises:
            PortTakenError: somebody listens on one of them.
        """
        if not 1024 <= self.first <= 65533:
            raise PortTakenError("--port must be 1024 to 65533: the consoles take the two ports after it")
        for port in (self.receiver, self.hospital, self.coordinator):
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                other = self.first + 1000 if self.first < 60_000 else FIRST_PORT
                raise PortTakenError(
                    f"port {port} of 127.0.0.1 is taken: end what listens there, or name the first of three other "
                    f"ports in a row, such as --port {other} (make try PORT={other})"
                ) from None


@dataclass(frozen=True, slots=True)
class Login:
    """A person with a role at one of the two consoles."""

    name: str
    role: str
    password: str  # of the file that a browser imports; no other secret of the demo is shown


@dataclass(slots=True, eq=False)
class Tryout:
    """What goes on running after the demo."""

    scene: Scene
    ports: Ports
    logins: dict[str, list[Login]] = field(default_factory=dict)  # of "hospital" and "coordinator"

    def prepare(self, say: Say) -> str:
        """Write the new patients' images, configure both sides, name persons of every role, and start both."""
        say("images of new patients")
        new = self._new_patients()
        self._configure()
        say("the coordinator")
        scene = self.scene
        scene.start("coordinator", scene.coordinator("serve"), "serving")
        say("persons of every role, with a key and a login each")
        with ThreadPoolExecutor(2) as pool:
            found = {"hospital": pool.submit(self._hospital), "coordinator": pool.submit(self._coordinator)}
            self.logins = {side: one.result() for side, one in found.items()}
        say(SITE)
        scene.start(SITE, scene.agent(SITE, "serve", "--modality", "OT"), "link: online")
        say("the first images of new patients arrive")
        sender = [sys.executable, "-m", "pynetdicom", "storescu", "-aec", AE_TITLE]
        scene.run([*sender, "127.0.0.1", str(self.ports.receiver), str(new)])
        return f"the coordinator and {SITE} serve; {SENT} images of new patients were sent to {SITE}"

    def _new_patients(self) -> Path:
        """Digits of nobody who is at a hospital, as DICOM; the hospital's list has their labels already.

        Returns:
            The folder of those that are sent at once; the others lie in ``samples``.
        """
        held, count, work = self.scene.split.held_out, SENT + SAMPLES, self.scene.work
        chosen = digits.Digits(held.images[:count].copy(), held.labels[:count].copy())
        rows = digits.write_new_patients(work / "samples", SITES.index(SITE), chosen, np.random.default_rng(2))
        with (work / "pacs" / SITE / "labels.csv").open("a", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(rows)
        first = work / "pacs" / f"{SITE}-new"
        first.mkdir()
        for path in sorted((work / "samples").iterdir())[SAMPLES:]:
            path.rename(first / path.name)
        return first

    def _configure(self) -> None:
        """The receiver's table, and a console on each side."""
        home = self.scene.work / SITE
        callers = ", ".join(f'{{ ae_title = "{title}", addresses = ["127.0.0.1"] }}' for title in CALLERS)
        with (home / "ingest.toml").open("a") as settings:
            settings.write(_RECEIVER.format(title=AE_TITLE, port=self.ports.receiver, callers=callers))
        (home / "networks").mkdir(mode=0o700)  # what a proposal may choose from
        shutil.copy(self.scene.work / "basis.safetensors", home / "networks")
        (home / "console.toml").write_text(f'listen = "127.0.0.1:{self.ports.hospital}"\n')
        console = f'listen = "127.0.0.1:{self.ports.coordinator}"\n'
        (self.scene.work / "coordinator" / "console.toml").write_text(console)

    def _hospital(self) -> list[Login]:
        """A policy by which a physician approves each release; then the persons: while nobody approves, freely."""
        scene = self.scene
        policy = scene.work / SITE / "policy.toml"
        policy.write_text(amended(policy.read_text(), {"approvals": '["hospital"]'}))
        side: Callable[..., list[str]] = lambda *words: scene.agent(SITE, *words)  # noqa: E731 - one command line
        scene.run(side("ledger", "amend"))
        found = []
        for role, name in _names("b").items():
            scene.run(side("ledger", "appoint", name, role, self._key(side, name)))
            found.append(self._login(side, name, role))
        return found

    def _coordinator(self) -> list[Login]:
        """The two who approve are in office: both sign each further appointment."""
        scene = self.scene
        roles = {name: role for role, name in _names("1").items() if role not in PERSONS.values()}
        keys = {name: self._key(scene.coordinator, name) for name in roles}
        signed = []
        for name, role in roles.items():
            for person in PERSONS:
                signed.append(str(scene.work / f"appoint-{name}.{person}.json"))
                words = ["ledger", "sign", "appoint", name, role, keys[name], "--serial", f"appoint-{name}"]
                words += ["--person", person, "--key", str(scene.key(person)), "--out", signed[-1]]
                scene.run(scene.coordinator(*words))
        scene.run(scene.coordinator("ledger", "approve", *signed))
        for name, role in roles.items():
            scene.run(scene.coordinator("ledger", "appoint", name, role, keys[name], "--serial", f"appoint-{name}"))
        return [self._login(scene.coordinator, name, role) for name, role in (roles | PERSONS).items()]

    def _key(self, side: Callable[..., list[str]], name: str) -> str:
        """A person's new signing key; the public part."""
        return self.scene.run(side("ledger", "person", str(self.scene.key(name)))).strip()

    def _login(self, side: Callable[..., list[str]], name: str, role: str) -> Login:
        """A certificate for a browser, pinned at the console."""
        folder = self.scene.work / "logins" / name
        said = self.scene.run(side("login", "make", name, "--out", str(folder)))
        self.scene.run(side("login", "trust", name, str(folder / f"{name}.crt")))
        return Login(name, role, said.partition("shown once: ")[2].split()[0])

    def watch(self) -> None:
        """Wait until the demo is told to end.

        Raises:
            DemoError: one of the two ended by itself.
            Interrupted: it was told.
        """
        while True:
            for name, process in zip(("coordinator", SITE), self.scene.processes.staying, strict=True):
                if process.poll() is not None:
                    raise DemoError(
                        f"{name} ended by itself:\n{(self.scene.work / f'{name}.out').read_text()[-2000:]}"
                    )
            time.sleep(0.5)

    def instructions(self) -> Iterator[str]:
        """Where everything is, and what to do first, for the terminal."""
        yield f"{SITE} receives DICOM (C-STORE): {AE_TITLE} at 127.0.0.1:{self.ports.receiver}, plain TCP"
        yield from self._persons("hospital", f"{SITE}'s console", self._hospital_address)
        yield from self._persons("coordinator", "the coordinator's console", self._coordinator_address)
        yield from self._how_to_log_in()
        yield from self._first_steps()
        yield ""
        yield "Ctrl-C ends everything. The next demo begins anew."

    @property
    def _hospital_address(self) -> str:
        return f"https://localhost:{self.ports.hospital}"

    @property
    def _coordinator_address(self) -> str:
        return f"https://localhost:{self.ports.coordinator}"

    def _persons(self, side: str, title: str, address: str) -> Iterator[str]:
        """Each person's login on one line, and on the next what this person may do."""
        yield ""
        yield f"{title}: {address}"
        for one in self.logins[side]:
            file = _as_typed(self.scene.work / "logins" / one.name / f"{one.name}.p12")
            key = f"; signs with {_as_typed(self.scene.key(one.name))}" if one.role in _SIGNS[side] else ""
            yield f"  {one.name:<13} {file}  password {one.password}"
            yield f"  {'':<13} {one.role}: {_MAY[side][one.role]}{key}"

    def _how_to_log_in(self) -> Iterator[str]:
        work = self.scene.work
        yield ""
        yield "To log in, import a person's .p12 file with its password into your browser: in Firefox at Settings,"
        yield "Privacy & Security, View Certificates, Your Certificates; in Chrome at chrome://settings/certificates."
        yield "Type the path into the file dialog, which may hide the folder. Open the console's address, choose the"
        yield "person, and press Log in. To be somebody else, close all private windows and open a new one."
        yield "The browser does not know the certificates that the demo made for the consoles, and warns: go on if"
        yield "the SHA-256 of the certificate that it shows begins with"
        yield f"  {_fingerprint(work / f'{SITE}.out')}  at {self._hospital_address}"
        yield f"  {_fingerprint(work / 'coordinator.out')}  at {self._coordinator_address}"

    def _first_steps(self) -> Iterator[str]:
        """A walk in the browser; the cohort may be counted, and a set made, by command, too."""
        work, hospital, coordinator = self.scene.work, self._hospital_address, self._coordinator_address
        agent = f"{_program('lazaret-agent')} --home {_as_typed(work / SITE)}"
        ours, theirs = _names("b"), _names("1")
        key = _as_typed(self.scene.key(ours["hospital"]))
        entry = {AE_TITLE.lower(): {"AET": AE_TITLE, "Host": "127.0.0.1", "Port": self.ports.receiver}}
        release = ["release", "ksame", "--modality", "OT", "--k", str(K), "--l-diversity", str(L)]
        yield ""
        yield "1. Send the image of a new patient:"
        yield f"     {_storescu(self.ports.receiver, work / 'samples' / 'new-01.dcm')}"
        yield "   or from an Orthanc on this machine, with this in its settings:"
        yield f'     "DicomModalities": {json.dumps(entry)}'
        yield f"   {_as_typed(work / 'samples')} has {SAMPLES} images, each of another patient."
        yield f"2. See it counted, some seconds later: {hospital}/ingest as {ours['hospital']}. Or type"
        yield f"     {agent} cohort"
        yield f"3. Propose a set: {hospital}/jobs/propose as {ours['researcher']}. Choose ksame, its basis, modality"
        yield f"   OT, k {K} and {L} labels. {ours['hospital']} approves at {hospital}/jobs, and the job runs."
        yield "   Or type it, beside the running service:"
        yield f"     {agent} {shlex.join(release)} --basis {_as_typed(work / 'basis.safetensors')}"
        yield f"   It waits for {ours['hospital']}. Before you make another, send all samples: each set needs {K}"
        yield "   patients or more who are in none yet."
        yield f"4. Look, and let it leave: {hospital}/releases as {ours['hospital']}."
        yield f"   Compare it, approve it with the key file {key}, and send it."
        yield f"5. See what arrived: {coordinator}/releases as {theirs['researcher']}."
        yield f"6. Propose another budget: {coordinator}/ask/limit as {theirs['researcher']}."
        yield f"   {theirs['compliance']} and {theirs['hospital']} approve it at {coordinator}/people,"
        yield f"   and {theirs['operator']} carries it out there."


def _names(of: str) -> dict[str, str]:
    """Role -> name. Those who approve come last: before them, persons are appointed freely."""
    names = {role: f"{role}-{of}" for role in ("operator", "researcher", "auditor")}
    return names | {"compliance": f"dpo-{of}", "hospital": f"physician-{of}"}


def _as_typed(path: Path) -> str:
    """A path as it is typed from here."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _program(name: str) -> str:
    """A command of this installation, as it is typed from here."""
    found = Path(sys.executable).parent / name
    return (
        _as_typed(found)
        if found.exists()
        else f"{_as_typed(Path(sys.executable))} -m {name.removeprefix('lazaret-')}"
    )


def _storescu(port: int, path: Path) -> str:
    """DCMTK's sender, or the one of a package that is installed with the agent: they take the same words."""
    program = "storescu" if shutil.which("storescu") else f"{_as_typed(Path(sys.executable))} -m pynetdicom storescu"
    return f"{program} -aec {AE_TITLE} 127.0.0.1 {port} {_as_typed(path)}"


def _fingerprint(log: Path) -> str:
    """The first half of that of a console's certificate, as the console says it at its start."""
    return log.read_text().partition(", certificate ")[2][:32]
