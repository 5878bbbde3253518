"""Hostile texts in everything that a person can send to a site's console: found, tried, and only text."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from agent.console import app, proposals
from agent.console import policy as policy_pages
from agent.console.context import SiteConsoleContext
from agent.console.proposal_process import CheckedProposal
from agent.console.releases import REFUSE, refusal_serial
from agent.event_log import open_log
from agent.federation import run_plan
from agent.ingest.context import open_ingest
from agent.runtime import open_runtime, recover_at_startup
from agent.service.jobs import FAILED, INTERRUPTED, PROPOSED, QUEUED, Event, Job, JobStore
from agent.service.ledger_access import BorrowedLedger
from agent.service.proposal_form import FormField, FormGroup, ProposalForm
from agent.storage import projects
from agent.storage.site_directory import MAIN
from agent.storage.spool import ReceivedFile
from agent.storage.vault import JOB_OUTPUTS
from policies.governance import amendments, decisions
from policies.index.search import Index
from policies.ledger.approvals import refusal
from policies.statements import Release, parse
from protos.web.client_certificates import PinnedCertificates
from protos.web.login_cli import FOLDER
from protos.web.settings import ConsoleSettings
from tests.agent.console.hospital import BOTH, PLAN, ROLES, Hospital, hospital
from tests.support.console_attack import Trial
from tests.support.corpus import CORPUS, Form, Heard, Side
from tests.support.ledger_world import policy

INGEST = '[pacs.main]\naet = "MAINPACS"\nhost = "127.0.0.1"\nport = 9\ncalling = "LAZARET"\n[site]\npull = ["main"]\n'


OUT = ("POST /logout", "POST /login")
REFUSED = {
    "POST /pacs/{kind}/{name}/ask": [409],  # nobody listens there
    "POST /jobs/{number}/refuse": [409],  # a text of the corpus was a reason
    "POST /jobs/{number}/cancel": [303, 409],  # the release of one is made: it is refused under Releases
    "POST /releases/{release}/send": [409],  # somebody has refused it
    "POST /releases/{release}/withdraw": [404],  # the refusal before has done so
}


FORM = ProposalForm(
    ("release", "ksame"),
    "a form with every kind of field",
    (
        FormGroup(
            "", "", (FormField("--basis", "file", choices=("random",), prefixes=("vgg",)), FormField("--k", "int"))
        ),
        FormGroup("cohort", "", (FormField("cohort.labels", "text", many=True), FormField("cohort.fit", "bool"))),
        FormGroup(
            "public", "", (FormField("public.pictures", "folder"), FormField("public.how", "choice", choices=("a",)))
        ),
        FormGroup("vetting", "", (FormField("vetting.top", "float"), FormField("vetting.file_sha256", "text")), True),
    ),
    config="--config",
    mechanism="ksame",
)


class Clerk:
    """Types what a person would type, and signs what is asked for."""

    def __init__(self, place: Hospital, context: SiteConsoleContext) -> None:
        self.place, self.context = place, context

    def fill(self, form: Form, name: str) -> Mapping[str, Any]:
        """What is to be typed into a form, or chosen."""
        head, _, tail = form.path.rpartition("/")
        if head.startswith("/releases") and tail in ("approve", "refuse"):
            return self._signed(form, self.of_release(name, head.rpartition("/")[2], tail))
        if form.path == "/policy/approve":
            text = (self.place.home.root / policy_pages.FILE).read_text()
            serial = amendments.amendment_serial(text, self.context.ledger.read().state.amended.get("site-a", 0))
            words = (serial, amendments.ACTION, "site-a", amendments.digest(text))
            return self._signed(form, self.place.approval(name, *words))
        if tail in ("retry", "drop") and head.startswith("/quarantine"):
            with open_ingest(self.place.home, MAIN) as way:
                return {"name": (way.quarantine.entries()[0].name,), "sure": ("yes",) if tail == "drop" else ()}
        if form.path == "/opt-out/do":
            looked = [token for token, one in self.context.memory.looked.items() if one.who == name]
            return {"token": (looked[-1] if looked else "none",)}
        if head == "/jobs/propose":
            basis, eyes = ("networks/basis.safetensors",), ("networks/eyes",)
            return {"--basis": basis, "public.pictures": eyes, "public.how": ("a",), "propose": ("yes",)}
        if head.startswith("/plans/"):
            return self._signed(form, self.place.approval(name, *self.of_plan(tail)))
        if head.startswith("/jobs/"):
            return {"why": ("the purpose is over",)} if tail == "refuse" else {}
        typed: dict[str, dict[str, Any]] = {
            "/opt-out/look": {"patients": (self.place.patient_id(99),)},
            "/opt-out/undo": {"patients": (self.place.patient_id(99),)},
        }
        return typed.get(form.path, {})

    @staticmethod
    def of_plan(act: str) -> tuple[str, str, str, str]:
        if act == "approve":
            return PLAN.serial, *PLAN.words()
        return refusal(PLAN.serial), REFUSE, PLAN.run, f"{PLAN.digest} purpose"

    def of_release(self, name: str, release: str, act: str) -> bytes:
        with self.context.vault() as vault:
            kept = (vault.note("pending") or {})[release]
        made = parse(kept["statement"].encode())
        digest = made.artifact_sha256  # type: ignore[union-attr]
        if act == "approve":
            return self.place.approval(name, release, "release", release, digest)
        return self.place.approval(name, refusal_serial(release), REFUSE, release, f"{digest} other")

    @staticmethod
    def _signed(form: Form, envelope: bytes) -> dict[str, Any]:
        return {"envelope": envelope if "envelope" in form.files else (envelope.decode(),)}


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """All of it, once."""
    with (
        pytest.MonkeyPatch.context() as patch,
        hospital(tmp_path_factory.mktemp("place"), run_approvals=BOTH) as place,
    ):
        heard = Heard.listening(patch)
        patch.setattr(proposals, "read_all_forms", lambda: (FORM,))
        patch.setattr(proposals, "check_proposal", lambda *_: CheckedProposal())  # the reader has tests of its own
        (place.home.root / "ingest.toml").write_text(INGEST)
        release = place.release()
        place.refuse(2, source=CORPUS[0])
        has_jobs(place, release)
        with closing(projects.open_vault(place.home)) as vault:
            run_plan.keep(vault, PLAN)
        for name in ROLES:
            place.login(name)
        with open_runtime(place.home.root, lambda *_: None) as opened:
            recover_at_startup(opened)  # the coordinator's own note of this site is there before anything is tried
        ledger, log = BorrowedLedger(place.home), open_log(place.home.root / "agent.log")
        with Index(place.home.root / app.INDEX, ledger.disk) as index:
            context = SiteConsoleContext(place.home, ledger, log, lambda: dt.datetime.now(dt.UTC), index=index)
            made = Trial(_side(place, context), heard)
            _happens(place, context, made, release)
            yield made


def has_jobs(place: Hospital, release: str) -> None:
    """Four jobs: one that is proposed, one queued, one that failed with a hostile text, and one with a paid price."""
    (place.home.root / "networks" / "eyes").mkdir(parents=True)
    (place.home.root / "networks" / "basis.safetensors").write_bytes(b"a basis")
    with closing(projects.open_vault(place.home)) as vault:
        made = parse((vault.note("pending") or {})[release]["statement"].encode())
        assert isinstance(made, Release)
        vault.place(f"{JOB_OUTPUTS}4/sheet.html").write(b"<html>a sheet</html>")
    store, words = (
        JobStore(place.home.root),
        ("release", "ksame", "--k=5", "--sheet=out/sheet.html", f"--modality={CORPUS[0]}"),
    )
    for state, grant in ((PROPOSED, ""), (QUEUED, ""), (FAILED, ""), (INTERRUPTED, made.grant)):
        events = (
            Event(1.0, PROPOSED if state == PROPOSED else QUEUED, "", CORPUS[0][:60]),
            Event(2.0, state, CORPUS[0]),
        )
        number = store.add(Job(0, words, MAIN, events[: 1 if state == PROPOSED else 2], grant=grant)).number
        (store.folder(number) / "stdout").write_text(f"{CORPUS[0]}\n")
        (store.folder(number) / "in" / "0-some.toml").write_text(f"# {CORPUS[0]}\n")


def _side(place: Hospital, context: SiteConsoleContext) -> Side:
    crts: dict[str, bytes] = {}

    def certificate(name: str) -> bytes:
        if name not in crts:
            pem = place.login(name)[0].read_bytes()
            crts[name] = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
        return crts[name]

    def settle() -> None:
        while not context.errand.told().over:
            time.sleep(0.005)

    clerk = Clerk(place, context)
    return Side(
        pages=app.pages(context, ConsoleSettings(listen="127.0.0.1:0"), PinnedCertificates(place.home.root / FOLDER)),
        folder=place.root,
        home=place.home.root,
        log=place.home.root / "agent.log",
        source=Path(app.__file__).parent,
        people=lambda: {name: role for name, role in ROLES.items() if context.person(name)},
        certificate=certificate,
        size=lambda: context.ledger.read().state.size,
        fill=clerk.fill,
        settle=settle,
        late=(
            "POST /opt-out/do",  # it forgets what was compared
            "POST /releases/{release}/send",
            "POST /releases/{release}/refuse",
            "POST /releases/{release}/withdraw",
            *OUT,
        ),
    )


def _happens(place: Hospital, context: SiteConsoleContext, trial: Trial, release: str) -> None:
    """A site's days: after each of them, whatever was not there before is tried."""
    clerk, draft = Clerk(place, context), place.home.root / policy_pages.FILE
    tighter = policy(approvals=BOTH, run_approvals=BOTH, k_min=7)
    looser = policy(approvals='["compliance"]', run_approvals=BOTH)
    with open_ingest(place.home, MAIN) as way:
        way.inbox.put(ReceivedFile("dimse", "PACS1", b"no image either"))
    draft.write_text(looser)
    for _ in range(2):
        trial.look()
        trial.attack()
    draft.write_text(tighter)
    for act in ("approve", "refuse"):  # the other person's word: it may be sent, and then it may not
        with context.ledger.write() as store:
            for name in ("dora", "hugo") if act == "approve" else ("hugo",):
                decisions.approve(store, clerk.of_release(name, release, act))
        trial.look()
        trial.attack()
    draft.write_text(tighter)
    trial.refuse_all()
    trial.finish()


def test_every_field_of_every_page_was_tried_and_every_form_carried_out_as_it_should_be(trial: Trial) -> None:
    assert not trial.untried(), "\n".join(trial.untried())
    assert {key: sorted(set(told)) for key, told in trial.done.items() if max(told) >= 400} == REFUSED
    assert trial.shown > 20, "texts of the corpus are shown, as texts"


def test_no_text_becomes_more_than_a_text_and_what_is_refused_leaves_nothing_behind(trial: Trial) -> None:
    assert not trial.faults, "\n".join(trial.faults)
