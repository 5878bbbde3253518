"""``make try``, as a newcomer uses it: what is printed is typed and opened; then Ctrl-C, and nothing is left."""

from __future__ import annotations

import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.hazmat.primitives.serialization.pkcs12 import load_pkcs12

from deploy.demo.tryout import SAMPLES, SENT, SITE
from protos.identity.key_files import write_private
from tests.support import ended_demo, short_demo
from tests.support.peers import missing
from tests.support.ports import claimed, free_port
from tests.support.steady_sender import send
from tests.support.tcp_proxy import wait_until

pytestmark = pytest.mark.timeout(1800)
ROOT = Path(__file__).parents[2]
ROLES = {"operator", "researcher", "auditor", "compliance", "hospital"}
_LOGIN = re.compile(r"^  (\S+) +(\S+\.p12)  password (\S+)\n +(\w+): .+$", re.MULTILINE)


@dataclass(frozen=True)
class Person:
    console: str  # https://localhost:PORT
    role: str
    file: Path  # .p12
    password: str


@dataclass
class Tried:
    """A demo that goes on running, and what it has printed."""

    process: subprocess.Popen[bytes]
    folder: Path
    said: str = ""

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def persons(self) -> dict[str, Person]:
        """Everybody whose login was printed, by name."""
        found = {}
        for address, block in re.findall(r"^.* console: (https://\S+)\n((?:  .*\n)+)", self.said, re.MULTILINE):
            for name, file, password, role in _LOGIN.findall(block):
                found[name] = Person(address, role, ROOT / file, password)
        return found

    def line(self, *words: str) -> list[str]:
        """The printed command line that has these words."""
        (found,) = [one for one in self.said.splitlines() if one.startswith("     ") and all(w in one for w in words)]
        return shlex.split(found)

    @contextmanager
    def at(self, name: str, home: str) -> Iterator[httpx.Client]:
        """A person's browser, logged in: it has imported the file, and trusts the console's certificate."""
        person = self.persons()[name]
        opened = load_pkcs12(person.file.read_bytes(), person.password.encode())
        assert opened.key is not None
        assert opened.cert is not None
        key, crt = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        key.unlink(missing_ok=True)
        write_private(key, opened.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        crt.write_bytes(opened.cert.certificate.public_bytes(Encoding.PEM))
        tls = ssl.create_default_context(cafile=str(self.work / home / "keys" / "console.crt"))
        tls.load_cert_chain(crt, key)
        with httpx.Client(base_url=person.console, verify=tls, trust_env=False, timeout=120) as client:
            own = {"Origin": person.console, "Sec-Fetch-Site": "same-origin"}
            assert f"Log in as {name}" in client.get("/login").text
            assert client.post("/login", data={"to": "/"}, headers=own).status_code == 303
            yield client


def typed(words: list[str], status: int = 0) -> str:
    """What a command prints that is typed in the root of the checkout, without its line breaks."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def three_ports() -> int:
    """The first of three free ports in a row, which no other test takes meanwhile."""
    while True:
        first = free_port()
        claims = [claimed(first + 1), claimed(first + 2)]
        if all(claims):
            _held.extend(claims)
            return first
        for claim in claims:
            if claim is not None:
                claim.close()


_held: list[object] = []


@contextmanager
def running_demo(folder: Path, command: list[str], marker: str) -> Iterator[Tried]:
    """The demo, once it has printed all; whatever happens, it is gone afterwards."""
    words = [*command, "--serve", "--port", str(three_ports())]
    words += ["--out", str(folder / "out"), "--work", str(folder / "work")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LAZARET_TEST_MARKER": marker}
    log = folder / "said"
    with log.open("wb") as out:
        process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out, env=environment)
    made = Tried(process, folder)
    try:
        assert wait_until(lambda: "Ctrl-C ends" in log.read_text() or process.poll() is not None, 1500)
        made.said = log.read_text()
        assert process.poll() is None, made.said[-4000:]
        yield made
        made.said = log.read_text()
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, short_demo.__file__, "--patients", "12"],
        [sys.executable, "-m", "deploy.demo", "--patients", "60", "--rounds", "2"],
    ],
    ids=["short", "main"],
)
@pytest.mark.slow
def test_a_newcomer_sends_looks_approves_and_ends_it(command: list[str], tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    with running_demo(tmp_path, command, marker) as demo:
        an_image_that_is_sent_is_counted(demo, int(command[command.index("--patients") + 1]) + SENT)
        everybody_logs_in(demo)
        a_set_waits_is_approved_and_arrives(demo)
        ran = ended_demo.below(demo.process.pid)
        assert any("coordinator serve" in line for line in ran.values())
        assert any("listener_main" in line for line in ran.values())
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait() == 0
        left = {number: line for number, (_, line) in ended_demo.processes().items() if ran.get(number) == line}
        assert left == {}
        assert ended_demo.marked(marker) == set()
    assert "ending everything" in demo.said.splitlines()[-1]


def an_image_that_is_sent_is_counted(demo: Tried, before: int) -> None:
    """By the printed line, DCMTK's sender where it is installed, and by pynetdicom; ``before``: so many patients."""
    with demo.at("physician-b", SITE) as browser:
        assert wait_until(lambda: counted(browser) == before)
        two_samples_are_sent(demo)
        assert wait_until(lambda: counted(browser) == before + 2)
    (eligible,) = re.findall(r"│ OT │ - │ eligible │ \d+ │ (\d+) │", typed(demo.line(" cohort")))
    assert int(eligible) == before + 2


def counted(browser: httpx.Client) -> int:
    """How many patients with digits the console's page of ingest counts as eligible."""
    text = " ".join(re.sub(r"<[^>]*>", " ", browser.get("/ingest").text).split())
    (found,) = re.findall(r"\bOT – eligible for releases \d+ (\d+)", text)
    return int(found)


def two_samples_are_sent(demo: Tried) -> None:
    samples = sorted((demo.work / "samples").iterdir())
    assert len(samples) == SAMPLES
    line = demo.line("storescu", "-aec")
    assert Path(line[-1]) == samples[0]
    assert (line[0] == "storescu") is not missing("storescu")
    typed(line)
    title, port = line[line.index("-aec") + 1], int(line[-2])
    send(samples[1], port, title, caller="STORESCU")


def everybody_logs_in(demo: Tried) -> None:
    persons = demo.persons()
    assert len({person.console for person in persons.values()}) == 2
    for console in {person.console for person in persons.values()}:
        assert {person.role for person in persons.values() if person.console == console} == ROLES
    for name, person in persons.items():
        with demo.at(name, SITE if name.endswith("-b") else "coordinator") as browser:
            page = browser.get("/")
            assert page.status_code == 200
            assert name in page.text
            assert person.role in page.text


def a_set_waits_is_approved_and_arrives(demo: Tried) -> None:
    """Typed beside the running service; the signature is made by the key file that was printed."""
    waits = typed(demo.line("release", "ksame"), status=1)
    (release,) = re.findall(r"(release-[0-9a-f]{32}) waits for approval by: hospital", waits)
    (number,) = re.findall(r"ledger sign (\d+) --person NAME", waits)
    (key,) = re.findall(r"approve it with the key file (\S+),", demo.said)
    agent = demo.line(" cohort")[:-1]
    with demo.at("physician-b", SITE) as browser:
        assert release in browser.get("/releases").text
    typed([*agent, "ledger", "sign", number, "--person", "physician-b", "--key", key, "--yes"])
    assert f"admitted at level B: {release}" in typed([*agent, "release", "send", release])
    with demo.at("researcher-1", "coordinator") as browser:
        assert browser.get(f"/releases/{release}").status_code == 200
