"""Hostile texts in everything that a person can send to the coordinator's console: found, tried, and only text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from agent.storage import site_directory
from coordinator.console import app, job_form
from policies.governance import decisions
from policies.ledger.entries import Refused
from policies.ledger.store import AppendRequest
from policies.review.policy import preset
from policies.statements import PAYLOAD_TYPE, Request, encode
from protos.common.dsse import seal
from protos.identity import certificates
from protos.web.settings import ConsoleSettings
from tests.support import coordinator_console as hubs
from tests.support.console_attack import Trial
from tests.support.coordinator_console import ROLES, Hub, Served, serving
from tests.support.coordinator_runs import SITES, agents, job, secret_job
from tests.support.corpus import CORPUS, Form, Heard, Side
from tests.support.ledger_world import Person

FIRST = {name: role for name, role in ROLES.items() if role != "hospital"}
REFUSED: dict[str, list[int]] = {}
LOWER = ("limit", "north/rdp", "7.0")


class Clerk:
    """Types what a person would type."""

    def __init__(self, served: Served) -> None:
        self.served, self.serials, self.waits = served, itertools.count(), {"live"}
        served.hub.persons["hugo"] = Person("hugo", "hospital")

    def fill(self, form: Form, name: str) -> Mapping[str, Any]:
        """What is to be typed into a form, or chosen."""
        hub, path = self.served.hub, form.path
        if path in ("/plan", "/plan/change"):
            secret = form.fields["mechanism"] != ("federated",)
            return {k: (v,) for k, v in job_form.from_job(secret_job() if secret else job(rounds=1)).items()} | {
                "run": (f"run-{next(self.serials)}",)
            }
        if path.endswith("/approve") or path == "/people/approvals":
            who, at = ("dora", "approval") if path == "/people/approvals" else (name, "envelope")
            serial = "s-1" if who != name else path.split("/")[3]
            return {at: self._sealed(form, at, hub.approve(who, serial, *LOWER))}
        if path == "/people/requests":
            return {"envelope": self._sealed(form, "envelope", hub.request(name, f"q-{next(self.serials)}", *LOWER))}
        typed: dict[str, dict[str, Any]] = {
            "/ask/limit": {"subject": ("north/rdp",), "budget": ("7.5",)},
            "/ask/appoint": {
                "subject": ("hugo",),
                "role": ("hospital",),
                "key": (hub.persons["hugo"].public.hex(),),
            },
            "/ask/dismiss": {"subject": ("dora",)},
            "/ask/enrol": {"subject": ("east",)},
            "/plan/file": {"job": self._job()},
            "/hospitals/invite": {"site": ("wild",)},
        }
        if path.endswith("/revoke"):
            return {"again": (path.split("/")[2],)} if "again" in form.fields else {}
        return typed.get(path, {})

    @staticmethod
    def _sealed(form: Form, name: str, envelope: bytes) -> Any:
        return envelope if name in form.files else (envelope.decode(),)

    @staticmethod
    def _job() -> bytes:
        made = job()
        body = {k: getattr(made, k) for k in ("mechanism", "parameters", "rounds", "min_sites")}
        return json.dumps(body | {"config": json.loads(made.config), "sites": list(SITES)}).encode()


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """All of it, once."""
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        heard = Heard.listening(patch)
        patch.setattr(hubs, "ROLES", FIRST)  # nobody is in office as the hospitals' person: the first needs nobody
        with serving(folder, patch, ()) as served:
            clerk = Clerk(served)
            made = Trial(_side(served, clerk), heard)
            _happens(served, made, clerk)
            yield made


def _side(served: Served, clerk: Clerk) -> Side:
    hub = served.hub
    crts: dict[str, bytes] = {}

    def certificate(name: str) -> bytes:
        if name not in crts:
            pem = served.login(name)[0].read_bytes()
            crts[name] = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
        return crts[name]

    def people() -> dict[str, str]:
        state = hub.store.state
        return {name: role for name, role in ROLES.items() if state.active_person(name)}

    def settle() -> None:
        for run, state in [(one.run, state) for one, state in hub.runs.known()]:
            if state != "stopped" and run not in clerk.waits:
                hub.finish(run)

    return Side(
        pages=app.pages(served.context, ConsoleSettings(listen="127.0.0.1:0"), served.logins),
        folder=hub.folder,
        home=hub.home.root,
        log=hub.home.root / "coordinator.log",
        source=hubs.TEMPLATES,
        people=people,
        certificate=certificate,
        size=lambda: hub.store.state.size,
        fill=clerk.fill,
        settle=settle,
        late=("POST /hospitals/{site}/revoke", "POST /logout", "POST /login"),
        each=frozenset({"/ask/{action}", "/people/proposals/{serial}"}),
    )


def _happens(served: Served, trial: Trial, clerk: Clerk) -> None:
    """A coordinator's days: after each of them, whatever was not there before is tried."""
    hub = served.hub
    for name in ROLES:
        served.login(name)
    for n, text in enumerate(CORPUS[:6]):  # a hospital's own words, as far as any reach the books
        hub.store.append(f"odd-{n}", AppendRequest((Refused(text, "west", text, text, [text, "bad_envelope"], b""),)))
    hub.release("north", "g1")
    _join(served, "east")
    decisions.request(hub.store, hub.request("rita", "s-1", *LOWER))
    for _ in range(2):
        trial.look()
        trial.attack()
    for text in CORPUS:  # what the books would take of a person who signs such a request
        for place in range(1, 5):
            trial.post("rita", "/people/requests", {"envelope": _request(hub, place, text)})
    hub.wards["west"].online = False
    hub.runs.launch(job(rounds=1, run="live", min_sites=3, all_or_none=True))  # it waits for west
    trial.look()
    trial.attack()
    hub.finish("live")
    hub.wards["west"].online = True
    clerk.waits.clear()
    trial.look()
    trial.attack()
    trial.refuse_all()
    trial.finish()


def _request(hub: Hub, place: int, text: str) -> bytes:
    """A request with a hostile word, sealed by its person's own key; written by hand, as ours would not write it."""
    words = ["origin-1", "serial-1", "limit", "subject-1", "value-1"]
    raw = encode(Request("rita", hub.store.origin, *words[1:]))
    return seal(
        raw.replace(words[place].encode(), json.dumps(text)[1:-1].encode()), PAYLOAD_TYPE, hub.persons["rita"].key
    )


def _join(served: Served, site: str) -> None:
    """A hospital asks to take part."""
    text = f'site = "{site}"\ncoordinator = "127.0.0.1:1"\ninput = "in"\nmodalities = ["OT"]\n'
    text += "secondary_capture_modalities = []\npublic_components = []\n"
    made = site_directory.create(served.hub.folder / site, text, preset("internal"))
    body = json.loads(served.hub.authority.invite(site).body)
    leaf = certificates.leaf_of(body["certificate"].encode())
    served.hub.authority.join(site, leaf, (made.root / "request.json").read_bytes())


@agents
def test_every_field_of_every_page_was_tried_and_every_form_carried_out_as_it_should_be(trial: Trial) -> None:
    assert not trial.untried(), "\n".join(trial.untried())
    assert {key: sorted(set(told)) for key, told in trial.done.items() if max(told) >= 400} == REFUSED
    assert trial.shown > 20, "texts of the corpus are shown, as texts"


@agents
def test_no_text_becomes_more_than_a_text_and_what_is_refused_leaves_nothing_behind(trial: Trial) -> None:
    assert not trial.faults, "\n".join(trial.faults)
