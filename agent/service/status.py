"""What is missing at a site until images flow, and until a release can leave; and what waits for people."""

from __future__ import annotations

import datetime as dt
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

from agent.gateway.credentials import Credentials, way_back
from agent.gateway.enrolment import WAITING
from agent.ingest import errors as ingest_errors
from agent.ingest.config import read_ingestion
from agent.service import pending
from agent.service.commands import PROGRAM
from agent.service.job_monitoring import of_people
from agent.service.process_monitoring import AGAIN, ask_status
from agent.storage import projects, read_only_access
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.site_ledger import site_policy
from policies.ledger.backends.sqlite import open_read_only
from policies.ledger.read_only import read_store
from policies.ledger.store import LedgerUnsoundError, Store
from policies.review.policy import PolicyError
from protos.common.errors import ConfigError
from protos.identity.certificates import fingerprint
from protos.identity.key_files import KeyFileError
from protos.operations.next_steps import Step, collect
from protos.service.control_client import ServiceAnswerError, ServiceHinderedError, ServiceRefusedError

IMAGES: Final = "until images flow"
RELEASE: Final = "until a release can leave"
WAITS: Final = "waiting for people"
SERVES: Final = "while it serves"
PARTS: Final = {
    "patients' records": ("vault.db*", "projects"),
    "ledger": ("ledger.db*", "ledger.mark"),
    "received, not read yet": ("inbox",),
    "rejected files": ("quarantine",),
    "logs": ("agent.log*",),
    "search index": ("search.db*",),
    "rounds": ("flower",),
    "jobs": ("jobs",),
}
_INVITED: Final = "ask the coordinator for an invitation, then: lazaret-agent setup"
_EXPECTED: Final = (
    *ingest_errors.EXPECTED,
    ConfigError,
    KeyFileError,
    LedgerUnsoundError,
    PolicyError,
    ServiceAnswerError,
    ServiceHinderedError,
    ServiceRefusedError,
    VaultError,
)


def steps(home: SiteDirectory, now: dt.datetime) -> list[Step]:
    """Everything that has to be there, in the order in which a hospital does it; nothing but short numbers
    is written.

    Args:
        home: the site's directory, which may be empty.
        now: UTC, for the certificate.
    """
    looks = [
        (IMAGES, "directory", partial(_directory, home)),
        (IMAGES, "enrolment", partial(_enrolment, home, now)),
        (IMAGES, "ingest.toml", partial(_roads, home)),
        (IMAGES, "images", partial(_images, home)),
        (RELEASE, "policy and people", partial(_people, home)),
        (WAITS, "jobs", partial(_jobs, home)),
        (SERVES, "processes", partial(_processes, home)),
    ]
    return collect(looks if (home.root / "site.toml").exists() else looks[:1], _EXPECTED)


def _directory(home: SiteDirectory) -> Iterator[Step]:
    if not (home.root / "site.toml").exists():
        words = "ask the coordinator for an invitation, then: lazaret-agent --home DIR setup"
        yield Step(IMAGES, "directory", "there is none yet", words)
        return
    settings = home.settings()
    yield Step(IMAGES, "directory", said=f"site {settings.site}, for {', '.join(settings.modalities)}")


def _enrolment(home: SiteDirectory, now: dt.datetime) -> Iterator[Step]:
    if not (home.keys / "tls.pem").exists():
        request = home.root / "request.json"
        if (home.keys / WAITING).exists():
            told = f"the request waits for two people; its fingerprint: {fingerprint(request.read_bytes())}"
            yield Step(IMAGES, "enrolment", told, "tell them the fingerprint by phone, then: lazaret-agent setup")
        else:
            yield Step(IMAGES, "enrolment", "this site is not enrolled", _INVITED)
        return
    end = Credentials(home.keys).not_after
    if now < end:
        yield Step(IMAGES, "enrolment", said=f"certificate valid until {end:%Y-%m-%d %H:%M} UTC; `serve` renews it")
    else:
        words = _INVITED if way_back(home.keys, now) is None else "lazaret-agent enrol, or let `serve` run"
        yield Step(IMAGES, "enrolment", f"the certificate ended at {end:%Y-%m-%d %H:%M} UTC", words)


def _roads(home: SiteDirectory) -> Iterator[Step]:
    found = read_ingestion(home)
    roads = [
        *(["C-STORE"] if found.listener else []),
        *(["STOW-RS"] if found.stow else []),
        *(f"folder {folder.path.name}" for folder in found.folders),
        *found.pacs,
        *found.webs,
    ]
    yield Step(IMAGES, "ways in", said=", ".join(roads) or "the input folder of site.toml alone")


def _images(home: SiteDirectory) -> Iterator[Step]:
    waiting, rejected = Counter[str](), Counter[str]()
    for name in projects.names(home):
        inbox, quarantine = projects.project_folders(home, name)
        waiting[name] = sum(not file.startswith(".") for file in _files(inbox))
        rejected[name] = sum(file.count(".") == 2 for file in _files(quarantine))
    more = f"{waiting.total()} received files wait to be read" if waiting.total() else ""
    if read_only_access.records(home).most:  # how many patients is not said
        yield Step(IMAGES, "images", said="; ".join(filter(None, ("there are some", more))))
    else:
        words = "lazaret-agent serve, which receives them; or from a folder: lazaret-agent ingest"
        if waiting.total():
            words = f"lazaret-agent ingest --project {waiting.most_common(1)[0][0]}"
        yield Step(IMAGES, "images", "; ".join(filter(None, ("there are none yet", more))), words)
    for name, count in sorted(rejected.items()):
        if count:
            words = f"lazaret-agent quarantine list --project {name}"
            yield Step(IMAGES, f"rejected files of {name}", f"{count} files were rejected", words)


def _files(folder: os.PathLike[str]) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _people(home: SiteDirectory) -> Iterator[Step]:
    """Policy, persons, budget, cohort; and what was made already."""
    if not (home.root / "ledger.db").exists() or not (home.keys / "federation.toml").exists():
        yield Step(RELEASE, "ledger", "it begins with enrolment", "see above")
        return
    with read_store(open_read_only(home.root / "ledger.db"), origin(home.settings().site), home.sign_key()) as store:
        yield from _ready(home, store)
    for one in pending.waiting(home):
        yield Step(WAITS, *one.next_step(PROGRAM))


def _ready(home: SiteDirectory, store: Store) -> Iterator[Step]:
    policy, state = site_policy(home, store), store.state
    if state.frozen(home.settings().site):
        told = "this site was restored from a backup, and is granted nothing before it has shown what it lost"
        yield Step(RELEASE, "recovery", told, "lazaret-agent recover --shared EXPORT, see deploy/docs/restore.md")
    for role in sorted(policy.approvals - state.office()):
        words = "the person types: lazaret-agent ledger person FILE; then: lazaret-agent setup"
        yield Step(RELEASE, f"a person of {role}", "the policy wants one to approve, and nobody is appointed", words)
    if not policy.approvals - state.office():
        wanted = ", ".join(sorted(policy.approvals)) or "nobody"
        yield Step(RELEASE, "people", said=f"a release is approved by {wanted}")
    for role in sorted(policy.run_approvals - policy.approvals - state.office()):  # `setup` asks for nobody of them
        words = f"the person types: lazaret-agent ledger person FILE; then: lazaret-agent setup --{role} NAME KEY"
        yield Step(RELEASE, f"a person of {role} for runs", "the policy wants one to approve federated runs", words)
    patients = read_only_access.records(home).most
    if patients < policy.k_min:
        told = f"a k-anonymous release needs {policy.k_min} patients, and no project has so many"
        yield Step(RELEASE, "cohort", told, "ingest more images; `lazaret-agent cohort` counts them")
    for name, account in sorted(state.accounts.items()):
        if account.left > 0:
            yield Step(RELEASE, f"budget {name}", said=f"{100 * account.left // account.limit} % is left")
        else:
            words = f"lazaret-agent ledger propose {name} BUDGET, which two people approve"
            yield Step(RELEASE, f"budget {name}", "it is used up", words)


def _jobs(home: SiteDirectory) -> Iterator[Step]:
    for job, why, command in of_people(home):
        yield Step(WAITS, f"job {job.number}, {job.kind}", why, command)


def _processes(home: SiteDirectory) -> Iterator[Step]:
    service = ask_status(home.root)
    if service.unjoined:
        yield Step(SERVES, "coordinator", service.unjoined, "lazaret-agent doctor")
    for one in service.processes:
        if one.running:
            yield Step(SERVES, f"process {one.name}", said=one.words)
        else:
            yield Step(SERVES, f"process {one.name}", one.words, AGAIN)
