"""A console of the kit alone, for tests: real TLS, real certificates, and a few pages that do little."""

from __future__ import annotations

import base64
import datetime as dt
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.responses import Response

from policies.governance import decisions
from protos.identity.key_files import pem, write_private
from protos.web.charts import Bar, BarPart, ChartFrame, StepCurve, bars, steps
from protos.web.client_certificates import PinnedCertificates, make
from protos.web.router import LoggedInPerson, PageError, RequestContext, Router
from protos.web.server import ConsoleServer
from protos.web.settings import ConsoleSettings

PAGES = {
    "first.html": """{% extends "base.html" %}{% block title %}First{% endblock %}{% block main %}
<h1>First page</h1>{{ ui.definition([("Unit", "patient"), ("Delta", "1e-06")]) }}
<p>{{ ui.level("A") }} {{ ui.level("B") }} {{ ui.level("C") }} {{ ui.level("?") }}</p>
<p>{{ ui.when(0) }} {{ ui.digest("ab" * 32) }} {{ ui.badge("admitted", "yes") }}
{{ ui.badge("refused", "no") }} {{ ui.badge("waits", "warn") }} {{ ui.badge("plain") }}</p>
{{ ui.table("Sites", ["Site", "Images#"], [["alpha", 12], ["beta", 3]]) }}
{{ ui.table("Nothing", ["Site"], []) }}{{ ui.pager("", "/?before=3", "entries 3 to 9") }}
<section class="panel"><h2>Budget</h2>{{ bars }}{{ steps }}</section>
<p id="beat" data-live="1">{{ beat }}</p>{% endblock %}""",
    "form.html": """{% extends "base.html" %}{% block title %}Form{% endblock %}{% block main %}
<h1>Form</h1><form method="post" action="/told">{{ ui.csrf() }}
{{ ui.field("Reason", "reason", told, help="In a sentence.", error=wrong) }}
{{ ui.field("Words", "words", "a", kind="textarea") }}
{{ ui.field("Site", "site", "b", kind="select", options=[("a", "Alpha"), ("b", "Beta")]) }}
{{ ui.field("Sure", "sure", kind="checkbox") }}<button>Tell</button></form>{% endblock %}""",
    "sign.html": """{% extends "base.html" %}{% block title %}Sign{% endblock %}{% block main %}
<h1>Approvals</h1>{{ ui.sign_panel(signing, "/signed") }}{% endblock %}""",
}


@dataclass
class Log:
    """What was logged."""

    lines: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def _keep(self, event: str, **keys: Any) -> None:
        self.lines.append((event, keys))

    info = warning = error = _keep

    def rules(self) -> list[str]:
        """The rules by which something was refused."""
        return [keys["rule"] for event, keys in self.lines if event == "console_refused"]


@dataclass
class Clock:
    """A clock that tests turn."""

    at: float = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.at


@dataclass
class Console:
    """A console that runs."""

    home: Path
    settings: ConsoleSettings
    logins: PinnedCertificates
    log: Log
    clock: Clock
    persons: dict[str, LoggedInPerson]
    pages: Router
    base: str = ""
    serving: Any = None
    envelopes: list[bytes] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)  # the page /wait waits for it

    def login(self, name: str) -> tuple[Path, Path]:
        """A pinned certificate and its key, PEM files; made once."""
        crt_file, key_file = self.home / f"{name}-login.crt", self.home / f"{name}-login.key"
        if not crt_file.exists():
            key, crt, _ = make(name, dt.datetime.now(dt.UTC), "a password")
            write_private(key_file, key)
            crt_file.write_bytes(crt)
            self.logins.trust(name, crt)
        return crt_file, key_file

    @contextmanager
    def client(self, name: str = "", *, entered: bool = True) -> Iterator[httpx.Client]:
        """A program that speaks to the console; with a person's certificate, and logged in."""
        tls = ssl.create_default_context(cafile=str(self.home / "keys" / "console.crt"))
        if name:
            tls.load_cert_chain(*self.login(name))
        with httpx.Client(base_url=self.base, verify=tls, trust_env=False, timeout=240) as client:
            if name and entered:
                answer = client.post("/login", data={"to": "/"}, headers=self.own)
                assert answer.status_code == 303, answer.text
            yield client

    @property
    def own(self) -> dict[str, str]:
        """What a browser says with a form of the console's own page."""
        return {"Origin": self.base, "Sec-Fetch-Site": "same-origin"}

    def key(self, name: str) -> Path:
        """The file of a person's signing key."""
        return self.home / "people" / f"{name}.key"

    def post(self, client: httpx.Client, path: str, **fields: str) -> httpx.Response:
        """A form sent as the page sends it."""
        found = re.search(r'name="csrf" value="([^"]+)"', client.get("/form").text)
        assert found is not None
        return client.post(path, data={"csrf": found[1], **fields}, headers=self.own)


def words_of(answer: httpx.Response) -> str:
    """The sentence of a page that says no."""
    found = re.search(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
    return found[1] if found else answer.text


@contextmanager
def console(home: Path, **settings: Any) -> Iterator[Console]:
    """A console with an operator ``ada``, an auditor ``otto``, and a person ``nemo`` who is in no ledger."""
    home.mkdir(parents=True, exist_ok=True)
    persons = {}
    (home / "people").mkdir(mode=0o700)
    for name, role in (("ada", "operator"), ("otto", "auditor")):
        key = Ed25519PrivateKey.generate()
        write_private(home / "people" / f"{name}.key", pem(key))
        persons[name] = LoggedInPerson(name, role, key.public_key().public_bytes_raw())
    templates = home / "templates"
    templates.mkdir()
    for name, text in PAGES.items():
        (templates / name).write_text(text)
    parsed = ConsoleSettings(**{"listen": "127.0.0.1:0", **settings})
    logins, log, clock = PinnedCertificates(home / "logins"), Log(), Clock()
    pages = Router(
        title="Lazaret, test",
        side="coordinator",
        who=persons.get,
        templates=templates,
        settings=parsed,
        log=log,
        logins=logins,
        encode=decisions.statement_bytes,
        clock=clock,
    )
    made = Console(home, parsed, logins, log, clock, persons, pages)
    _add(made)
    with ConsoleServer(pages.guarded(), parsed, logins, home) as serving:
        made.base, made.serving = f"https://localhost:{serving.port}", serving
        yield made


def _add(made: Console) -> None:
    pages, everybody = made.pages, {"operator", "auditor"}
    pages.menu("First", "/", everybody)
    pages.menu("Form", "/form", everybody)
    pages.menu("Signatures", "/sign", {"operator"})
    beats = iter(range(1_000_000))

    @pages.get("/", everybody)
    def first(asked: RequestContext) -> Response:
        return asked.page("first.html", beat=f"beat {next(beats)}", **charts())

    @pages.get("/form", everybody)
    def form(asked: RequestContext, told: str = "") -> Response:
        return asked.page("form.html", told=told, wrong="")

    @pages.get("/entry/{seq}", everybody)
    def entry(asked: RequestContext, seq: int) -> Response:
        if seq == 13:
            raise ValueError("the patient's name is Doe")
        raise PageError(404, f"There is no entry {seq}.")

    @pages.post("/told", {"operator"})
    def told(asked: RequestContext) -> Response:
        made.told.append(asked.form["reason"])
        if not asked.form["reason"]:
            return asked.again("form.html", told="", wrong="Say why.")
        return asked.go("/form", f"Told: {asked.form['reason']}")

    @pages.post("/kept", {"operator"})
    def kept(asked: RequestContext) -> Response:
        return asked.download(asked.form["name"], asked.uploads.get("file", b"nothing"), "application/octet-stream")

    _add_watched(made)
    _add_signing(made)


def _add_watched(made: Console) -> None:
    pages, everybody = made.pages, {"operator", "auditor"}

    @pages.get("/wait", everybody)
    def wait(asked: RequestContext) -> Response:
        made.told.append(asked.person.name)
        made.gate.wait(60)
        return asked.page("form.html", told="", wrong="")

    @pages.get("/seen/{number}", everybody, told=True)
    def seen(asked: RequestContext, number: int) -> Response:
        return asked.page("form.html", told=str(number), wrong="")


def _add_signing(made: Console) -> None:
    pages = made.pages

    @pages.get("/sign", {"operator"})
    def sign(asked: RequestContext) -> Response:
        signing = asked.signing("lazaret/test", "limit-1", "limit", "alpha/rdp", "4.0")
        return asked.page("sign.html", signing=signing)

    @pages.post("/signed", {"operator"})
    def signed(asked: RequestContext) -> Response:
        made.envelopes.append(asked.envelope())
        return asked.go("/sign", "Handed in.")


def charts() -> dict[str, Any]:
    """One of each."""
    day, start = 86_400.0, 1.7e9
    points = tuple((start + n * day, float(n) / 10) for n in range(0, 30, 3))
    frame = ChartFrame("Spent", "epsilon per patient", start, start + 30 * day, 4.0, "the budget")
    return {
        "bars": bars(
            [
                Bar(
                    "alpha",
                    (BarPart("spent", 1.0), BarPart("held", 0.5)),
                    4.0,
                    "1 spent, 0.5 held, 2.5 left of 4",
                    "/",
                ),
                Bar("beta <script>", (BarPart("spent", 5.0),), 4.0, "5 of 4"),
            ],
            "Budget by site",
            (("spent", "spent"), ("held", "held"), ("left", "left")),
        ),
        "steps": steps([StepCurve("alpha", points), StepCurve("beta", points[:3])], frame),
    }


def statement_of(envelope: bytes) -> bytes:
    """The payload of an envelope, nothing verified."""
    import json

    return base64.b64decode(json.loads(envelope)["payload"])


def wait_for(what: Callable[[], bool]) -> None:
    """Until it is so; at most a minute."""
    for _ in range(6_000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")
