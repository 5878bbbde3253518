"""The context of the site console's pages: directory, ledger, vaults, and the permissions of roles.

Every page opens the vault for itself and closes it (SQLite keeps connections apart), and reads the ledger's file.
What is written into the ledger is an act of :mod:`agent.service.site`, which the running service carries out; where
none runs, it is carried out here.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent.console.background_task import BackgroundTask
from agent.errors import SiteStorageError
from agent.federation import run_plan
from agent.ingest.context import IngestContext, open_ingest
from agent.release.unsent import clear_of
from agent.service import run_plans
from agent.service.commands import another_writes
from agent.service.ledger_access import BorrowedLedger, Site
from agent.service.process_monitoring import ServiceStatus, read_status
from agent.service.proposal_form import ProposalForm
from agent.service.run_plans import PlanView
from agent.service.site import perform
from agent.storage import label_tables, projects
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.site_directory import MAIN, SiteDirectory
from agent.storage.vault import Vault
from policies.index.search import Index
from policies.review.policy import Policy, strictest
from policies.statements import Release, parse
from protos.common.errors import RefusedError
from protos.service.control_client import ask_or_do
from protos.web.router import LoggedInPerson

OPERATOR: Final = "operator"
RESEARCHER: Final = "researcher"
COMPLIANCE: Final = "compliance"
HOSPITAL: Final = "hospital"
AUDITOR: Final = "auditor"
READERS: Final = frozenset({OPERATOR, RESEARCHER, COMPLIANCE, HOSPITAL, AUDITOR})
DECIDERS: Final = frozenset({COMPLIANCE, HOSPITAL})  # who decides, and alone sees images of patients
KEEPERS: Final = DECIDERS | {OPERATOR}  # who keeps the site running: sources may name patients
LOOKERS: Final = KEEPERS | {AUDITOR}  # counts, reasons and statements, without an image


class NoSuchReleaseError(RefusedError, LookupError):
    """None of that name is kept, or none any more."""

    def __init__(self) -> None:
        """Say it."""
        super().__init__("no release of that name is pending: it was sent or withdrawn")


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """A release that waits for persons."""

    release: Release
    behind: frozenset[str] = field(repr=False)  # the pseudonyms of whom it was made; empty: nobody knows
    approved: Mapping[str, str]  # role -> SHA-256 of the approval
    missing: tuple[str, ...]  # roles that have not approved yet
    gone: bool  # somebody it was made of has opted out: it can never leave


@dataclass(slots=True)
class ConsoleState:
    """What the console remembers while it runs, and nowhere else: patients are in it."""

    shown: dict[str, Any] = field(default_factory=dict, repr=False)  # release -> its images, and what is like them
    looked: dict[str, Any] = field(default_factory=dict, repr=False)  # token -> an opt-out that is being decided
    digests: dict[tuple[str, int, int], str] = field(default_factory=dict)  # of jobs' files, by path, size and time
    forms: tuple[ProposalForm, ...] = ()  # of proposals; described once
    checking: threading.Lock = field(default_factory=threading.Lock)  # one proposal is checked at a time
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(frozen=True, slots=True)
class SiteConsoleContext:
    """One site, opened for its console."""

    home: SiteDirectory
    ledger: BorrowedLedger
    log: Any
    now: Callable[[], dt.datetime]
    memory: ConsoleState = field(default_factory=ConsoleState)
    errand: BackgroundTask = field(default_factory=BackgroundTask)
    index: Index | None = None

    def person(self, name: str) -> LoggedInPerson | None:
        """Who is in office under this name today, by the site's own ledger; None: may do nothing here."""
        known = self.ledger.read().state.active_person(name)
        return LoggedInPerson(name, known.role, known.public) if known is not None else None

    @property
    def site(self) -> str:
        """Its name."""
        return self.home.settings().site

    @contextlib.contextmanager
    def vault(self, project: str = MAIN) -> Iterator[Vault]:
        """A project's vault, for one look."""
        vault = projects.open_vault(self.home, project)
        try:
            yield vault
        finally:
            vault.close()

    @contextlib.contextmanager
    def way(self, project: str = MAIN) -> Iterator[IngestContext]:
        """A project's ingest, for one look or act."""
        with open_ingest(self.home, project) as way:
            yield way

    @property
    def acting(self) -> Site:
        """The site as acts take it in this process, which runs no jobs."""
        return Site(self.home, self.ledger, self.log)

    def act(self, name: str, **fields: Any) -> Any:
        """An act on the site, see :mod:`agent.service.site`: by the running service, or here.

        Raises:
            LazaretError, OSError: it was not done, or nobody knows whether it was; the text says why.
        """

        def here(known: str, **told: Any) -> Any:
            return perform(self.acting, known, told)

        with ask_or_do(self.home.root, here, another_writes) as do:
            return do(name, **fields)

    def record_approval(self, envelope: bytes) -> None:
        """Write a person's sealed approval into the ledger, which checks who may, and the signature.

        Raises:
            LazaretError: see :meth:`act`.
        """
        self.act("ledger/approve", envelope=base64.b64encode(envelope).decode())

    def service(self) -> ServiceStatus:
        """What the running service says of its receivers and of itself; nothing where none runs.

        Raises:
            LazaretError: see :meth:`act`.
        """
        return read_status(self.act("service/show"))

    def projects(self) -> tuple[str, ...]:
        """The projects that have not ended."""
        return projects.names(self.home) or (MAIN,)

    # -- the policy

    def signed_policy(self) -> Policy:
        """The site's own policy as it signed it last: here and at the coordinator."""
        store = self.ledger.read()
        signed = store.state.policies.get(self.site)
        envelope = store.envelope(signed) if signed else (self.home.root / "request.json").read_bytes()
        return self.home.signed_policy(envelope or b"")

    def own_policy(self) -> Policy:
        """The site's own binding policy: the stricter of the file and the last signed policy."""
        return strictest(self.home.policy(), self.signed_policy())

    def policy(self) -> Policy:
        """What binds the site today: see :func:`agent.storage.site_ledger.site_policy`, which commands use."""
        return strictest(self.own_policy(), self.home.federation_policy())

    # -- releases that wait

    def waiting(self) -> tuple[PendingRelease, ...]:
        """All releases that wait for persons, by name; no image of them is opened."""
        with self.vault() as vault:
            pending, record = vault.note("pending") or {}, vault.note("releases") or []
            out = vault.opted_out()
        return tuple(self._waiting(pending[name], record, out) for name in sorted(pending))

    def plans(self) -> list[PlanView]:
        """The plans of federated runs that were asked for, and how each stands."""
        with self.vault() as vault:
            note, used = vault.note(run_plan.NOTE), vault.note(label_tables.USED)
        return run_plans.plans(note, self.ledger.read().state, self.policy(), self.now().timestamp(), used)

    def clear(self, release: str) -> bytes:
        """The artifact of a release that waits, as persons look at it.

        Raises:
            NoSuchReleaseError: it is not kept, or another process has just forgotten it.
        """
        with self.vault() as vault:
            kept = (vault.note("pending") or {}).get(release)
            clear = _clear(vault, release, kept) if kept is not None else b""
        if not clear:
            raise NoSuchReleaseError
        return clear

    def _waiting(self, kept: Mapping[str, Any], record: list[Any], out: frozenset[str]) -> PendingRelease:
        release = parse(kept["statement"].encode())
        assert isinstance(release, Release)
        behind = behind_of(release.release, record) | set(kept.get("persons", ()))
        state = self.ledger.read().state
        given = state.approvals(release.release, "release", release.release, release.artifact_sha256)
        missing = tuple(sorted(self.policy().approvals - set(given)))
        return PendingRelease(release, frozenset(behind), given, missing, not out.isdisjoint(behind))


def _clear(vault: Vault, name: str, kept: Mapping[str, Any]) -> bytes:
    """What persons look at; nothing where it is missing, so that the others can be looked at."""
    try:
        return clear_of(vault, name, kept)
    except VaultError:
        raise
    except SiteStorageError:
        return b""


def behind_of(release: str, record: list[Any]) -> set[str]:
    """Every patient behind a release, by the site's private record: see :func:`agent.release.history.patients_of`."""
    found = [one for one in record if one["release"] == release]
    lists = [[*one["clusters"], *one.get("again", []), one.get("persons", [])] for one in found]
    return {person for clusters in lists for cluster in clusters for person in cluster}
