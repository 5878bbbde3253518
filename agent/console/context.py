"""What the pages of the site console work with: the site's directory, its ledger, its vaults, and who may see what.

Every page opens the vault for itself and closes it (SQLite keeps connections apart); what is written goes through
:class:`agent.console.books.Books`, one act at a time.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent.console.books import Books
from agent.console.errand import Errand
from agent.edges import projects
from agent.edges.home import MAIN, Home
from agent.edges.reception import Reception
from agent.edges.sealed import VaultError
from agent.edges.vault import Vault
from agent.edges.way import Way, open_way
from agent.kept import clear_of
from agent.nouns import NotKept
from agent.stages.freeze import place_of
from policies.policy import Policy, strictest
from policies.search import Index
from policies.statement import Release, parse
from protos.web.pages import Person

OPERATOR: Final = "operator"
RESEARCHER: Final = "researcher"
COMPLIANCE: Final = "compliance"
HOSPITAL: Final = "hospital"
AUDITOR: Final = "auditor"
READERS: Final = frozenset({OPERATOR, RESEARCHER, COMPLIANCE, HOSPITAL, AUDITOR})
DECIDERS: Final = frozenset({COMPLIANCE, HOSPITAL})  # who decides, and alone sees pictures of patients
KEEPERS: Final = DECIDERS | {OPERATOR}  # who keeps the site running: sources may name patients
LOOKERS: Final = KEEPERS | {AUDITOR}  # counts, reasons and statements, without a picture


class NoSuchReleaseError(LookupError):
    """None of that name is kept, or none any more."""

    def __init__(self) -> None:
        """Say it."""
        super().__init__("no release of that name waits: it was handed over or withdrawn")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A release that waits for persons."""

    release: Release
    behind: frozenset[str] = field(repr=False)  # the pseudonyms of whom it was made; empty: nobody knows
    approved: Mapping[str, str]  # role -> SHA-256 of the approval
    missing: tuple[str, ...]  # roles that have not approved yet
    gone: bool  # somebody it was made of has opted out: it can never leave


@dataclass(slots=True)
class Memory:
    """What the console remembers while it runs, and nowhere else: patients are in it."""

    shown: dict[str, Any] = field(default_factory=dict, repr=False)  # release -> its pictures, and what is like them
    looked: dict[str, Any] = field(default_factory=dict, repr=False)  # token -> an opt-out that is being decided
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(frozen=True, slots=True)
class Desk:
    """One site, opened for its console."""

    home: Home
    books: Books
    log: Any
    now: Callable[[], dt.datetime]
    reception: Reception | None = None  # where `serve` runs in this very process
    memory: Memory = field(default_factory=Memory)
    errand: Errand = field(default_factory=Errand)
    index: Index | None = None

    def person(self, name: str) -> Person | None:
        """Who is in office under this name today, by the site's own ledger; None: may do nothing here."""
        known = self.books.read().state.in_office(name)
        return Person(name, known.role, known.public) if known is not None else None

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
    def way(self, project: str = MAIN) -> Iterator[Way]:
        """A project's way in, for one look or act."""
        with open_way(self.home, project) as way:
            yield way

    def projects(self) -> tuple[str, ...]:
        """The projects that have not ended."""
        return projects.names(self.home) or (MAIN,)

    # -- the policy

    def signed_policy(self) -> Policy:
        """The site's own policy as it signed it last: here and at the coordinator."""
        store = self.books.read()
        signed = store.state.policies.get(self.site)
        envelope = store.envelope(signed) if signed else (self.home.root / "request.json").read_bytes()
        return self.home.signed_policy(envelope or b"")

    def own_policy(self) -> Policy:
        """What binds by the site's own word: the file, and what was signed last, the stricter of both."""
        return strictest(self.home.policy(), self.signed_policy())

    def policy(self) -> Policy:
        """What binds the site today: see :func:`agent.desk.site_policy`, which the commands use."""
        return strictest(self.own_policy(), self.home.federation_policy())

    # -- releases that wait

    def waiting(self) -> tuple[Waiting, ...]:
        """All releases that wait for persons, by name; no picture of them is opened."""
        with self.vault() as vault:
            pending, record = vault.note("pending") or {}, vault.note("releases") or []
            out = vault.opted_out()
        return tuple(self._waiting(pending[name], record, out) for name in sorted(pending))

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

    def _waiting(self, kept: Mapping[str, Any], record: list[Any], out: frozenset[str]) -> Waiting:
        release = parse(kept["statement"].encode())
        assert isinstance(release, Release)
        behind = behind_of(release.release, record) | set(kept.get("persons", ()))
        state = self.books.read().state
        given = state.approvals(release.release, "release", release.release, release.artifact_sha256)
        missing = tuple(sorted(self.policy().approvals - set(given)))
        return Waiting(release, frozenset(behind), given, missing, not out.isdisjoint(behind))

    def project_of(self, release: str) -> str:
        """The project whose vault holds the pictures of a release's clusters; main, where none does."""
        for name in self.projects():
            with self.vault(name) as vault:
                if vault.project_note(place_of(release, 0)) is not None:
                    return name
        return MAIN


def _clear(vault: Vault, name: str, kept: Mapping[str, Any]) -> bytes:
    """What persons look at; nothing where it is missing, so that the others can be looked at."""
    try:
        return clear_of(vault, name, kept)
    except VaultError:
        raise
    except NotKept:
        return b""


def behind_of(release: str, record: list[Any]) -> set[str]:
    """Every patient behind a release, by the site's private record: see :func:`agent.released.made_of`."""
    found = [one for one in record if one["release"] == release]
    lists = [[*one["clusters"], *one.get("again", []), one.get("persons", [])] for one in found]
    return {person for clusters in lists for cluster in clusters for person in cluster}
