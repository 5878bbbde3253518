"""The dependencies of the release pipeline: the site's context, its ports, and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agent.domain import CheckpointStore, Cohort, ExampleRule, Scan, Selection, TaskCohort
from policies.ledger_service import LedgerService
from policies.review.rules import Verdict
from policies.statements import Release, Reservation, Statement
from protos.common.errors import Signal

KEY_REUSED: Final = "key"  # who refuses a reservation: nobody, it was another one under this name


class ApprovalPending(Signal):
    """A release was made, and persons must approve it before it leaves."""

    def __init__(self, signed: SignedRelease, roles: frozenset[str]) -> None:
        """``roles`` is who must approve."""
        super().__init__(f"{signed.release.release} waits for approval by: {', '.join(sorted(roles))}")
        self.signed, self.roles = signed, roles


class CoordinatorClient(Protocol):
    """The one way out: the coordinator's service over mutual TLS."""

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        """Hold the price at the coordinator."""

    def submit(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        """Hand in an artifact for review."""

    def submit_earlier(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        """Hand in a set that was made before images were compressed."""

    def settle(self, key: str, envelope: bytes) -> Verdict:
        """Say what became of a grant."""

    def outcome(self, key: str, envelope: bytes) -> Verdict | None:
        """What a key has led to, with the SHA-256 of the envelope sent; None if the coordinator never heard of it."""

    def amend(self, key: str, envelope: bytes) -> Verdict:
        """Hand in the site's new policy."""

    def present(self, key: str, envelope: bytes) -> Verdict:
        """After a restore: show a receipt, or say that these were all."""


class ClearableCheckpointStore(CheckpointStore, Protocol):
    """A place in the vault: sealed, and emptied when what it was for is done."""

    def clear(self) -> None:
        """Nothing of it stays."""


class VaultPort(Protocol):
    """The site's encrypted store."""

    def cohort(
        self, modality: str | Selection, shape: tuple[int, ...] | None = None, without: Iterable[str] = ()
    ) -> Cohort:
        """The eligible patients."""

    def alike_ids(self) -> tuple[frozenset[str], ...]:
        """Groups of ids that count as one patient towards k, disjoint."""

    def second_ids(self, selection: Selection, taken: Set[str], among: Set[str] | None = None) -> frozenset[str]:
        """Who is left out of a k-anonymous release, since another id (``among`` these) stands for them."""

    def roster(
        self, selection: Selection, without: Iterable[str] = (), among: Set[str] | None = None
    ) -> tuple[tuple[str, ...], ...]:
        """The labels of every eligible patient's images (``among`` these), without a name; no image is opened."""

    def scans(self, modality: str) -> tuple[Scan, ...]:
        """The finest head of each eligible patient whose face is on."""

    def heads_waiting(self, modality: str) -> tuple[int, bool]:
        """How many patients :meth:`scans` would look at, at most; and may one need float32? No volume is opened."""

    def opted_out(self) -> frozenset[str]:
        """Who wants no part, as of now."""

    def note(self, name: str) -> Any:
        """A private note."""

    def write_note(self, name: str, value: Any) -> None:
        """Store a private note."""

    def change_note(self, name: str, change: Callable[[Any], Any]) -> None:
        """Store what ``change`` makes of a private note; no other process writes it meanwhile."""

    def project_note(self, name: str) -> Any:
        """A private note that ends with the project."""

    def write_project_note(self, name: str, value: Any) -> None:
        """Store a private note that ends with the project."""

    def place(self, name: str) -> ClearableCheckpointStore:
        """Where something long is kept until it is done, such as a training."""

    def places(self, start: str) -> tuple[str, ...]:
        """The names of those that hold something and whose names begin so."""

    def site_place(self, name: str) -> ClearableCheckpointStore:
        """The same of the site: it outlives the project."""

    def site_places(self, start: str) -> tuple[str, ...]:
        """The names of those of the site that hold something and whose names begin so."""

    def free_bytes(self) -> int:
        """What is free on the disk that the vault is on."""


class LedgerOwner(Protocol):
    """The process that writes the site's ledger, where it is not this one: it alone pays, spends and hands in."""

    def reserve(self, reservation: Reservation) -> None:
        """See :func:`agent.release.budget.reserve`."""

    def expire(self, grant: str, reason: str) -> None:
        """See :func:`agent.release.budget.expire_grant`."""

    def submit(self, release: str) -> Verdict:
        """Hand in a release that is kept in the vault; see :func:`agent.release.approval.submit_approved`."""


Run = Callable[..., Any]  # (call, *given): what ``call(*given)`` returns, from a confined process or from here


def run_here(call: Callable[..., Any], *given: Any) -> Any:
    """In this very process."""
    return call(*given)


@dataclass(frozen=True, slots=True)
class SiteContext:
    """One hospital's agent, put together by ``__main__``."""

    name: str
    ledger: LedgerService  # the site's own ledger: the hard gate
    gateway: CoordinatorClient
    vault: VaultPort
    seal: Callable[[Statement], bytes]
    read: Callable[[bytes], Release]  # back from an envelope that this site sealed
    new_id: Callable[[str], str]  # prefix -> fresh opaque id
    say: Callable[[str, str], None]  # step, detail: progress for people
    examples: Callable[[ExampleRule], TaskCohort]  # what a federated task finds here, without those who opted out
    # SHA-256 -> the file of public weights, if it is here and the site vouches for it
    public_file: Callable[[str], bytes | None]
    label_misfit: Callable[[ExampleRule], str]  # why what is declared of labels here is not a task's; "": it is
    owner: LedgerOwner | None = None  # None: this process writes the ledger
    grant: str = ""  # the name under which the next price is reserved; "": a new one
    run: Run = run_here


@dataclass(frozen=True, slots=True)
class SignedRelease:
    """A release ready to leave: statement, envelope, artifact."""

    release: Release
    envelope: bytes
    artifact: bytes
    clear: bytes = b""  # the artifact before it was sealed to a reader, for persons to look at; "": it is in clear
