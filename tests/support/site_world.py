"""One site with a real ledger and a vault in memory, and the coordinator's admission, called without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.domain import Cohort, Example, ExampleRule, Image, Patient, Scan, Selection, TaskCohort, TaskPatient
from agent.errors import CoordinatorUnreachableError
from agent.federation.participant import Participant
from agent.mechanisms.common.linear_codec import Basis, fit_basis
from agent.mechanisms.federated.mechanism import Federated
from agent.mechanisms.ksame.mechanism import KSame
from agent.release.pipeline import release_synthetic
from agent.release.ports import ApprovalPending, SignedRelease, SiteContext
from agent.storage.examples import label_misfit, task_cohort
from agent.storage.instance_index import part_of
from agent.storage.vault import Vault
from coordinator.admission import AdmissionService, RequestRejectedError
from policies.governance import decisions
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import Store
from policies.ledger_service import LedgerService
from policies.review.policy import parse as parse_policy
from policies.review.rules import Verdict
from policies.statements import PAYLOAD_TYPE, Release, parse
from protos.common.dsse import open_sealed
from tests.support.coordinator_runs import signed
from tests.support.ledger_world import Clock, Hospital, Person, policy

SHAPE = (8, 8)
RNG = np.random.default_rng(5)


@dataclass(frozen=True)
class MemoryCheckpointStore:
    """One place in the vault, in memory."""

    blobs: dict[str, bytes]
    name: str

    def read(self) -> bytes | None:
        return self.blobs.get(self.name)

    def write(self, data: bytes) -> None:
        self.blobs[self.name] = data

    def clear(self) -> None:
        self.blobs.pop(self.name, None)


def in_part(selection: str | Selection, person: str) -> bool:
    """Whether a patient is in the part of a split that is selected, by a key that a vault would have."""
    if isinstance(selection, str) or selection.split is None:
        return True
    return part_of(selection.split, bytes(32), person) == selection.part


@dataclass
class MemoryVault:
    """The vault's port in memory. It counts how often patients are read."""

    patients: int = 12
    notes: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    reads: int = 0
    out: frozenset[str] = frozenset()  # who has opted out
    crash_at: str = ""  # a note's name: the process is gone before it is written
    seed: int = 1
    heads: tuple[Scan, ...] = ()
    free: int = 1 << 40  # bytes of the disk
    wide: bool = False  # by their list, the heads may need float32
    unreadable: int = 0  # of the last patients, no image can be used: what only their pixels show

    def cohort(
        self, modality: str | Selection, shape: tuple[int, ...] | None = None, without: Iterable[str] = ()
    ) -> Cohort:
        self.reads += 1
        shape = modality.shape if isinstance(modality, Selection) else shape
        excluded = set(without) | self.out
        dice = np.random.default_rng(self.seed)
        found = []
        for i in range(self.patients - self.unreadable):
            images = tuple(Image(dice.random(shape).astype(np.float32), str(i % 3)) for _ in range(2))
            if f"{i:04d}" not in excluded and in_part(modality, f"{i:04d}"):
                found.append(Patient(f"{i:04d}", images))
        return Cohort(tuple(found))

    def examples(self, rule: ExampleRule) -> TaskCohort:
        """The images whose label is a class of the rule."""
        places = {name: place for place, name in enumerate(rule.classes)}
        found = []
        whom: str | Selection = rule.modality
        if rule.split is not None:
            whom = Selection(rule.modality, rule.size, split=rule.split, part=rule.part)
        for patient in self.cohort(whom, rule.size).patients:
            known = [image for image in patient.images if image.label in places]
            made = tuple(Example(image.pixels[None], np.array([places[image.label]])) for image in known)
            found += [TaskPatient(patient.pseudonym, made)] if made else []
        return TaskCohort(tuple(found))

    def alike_ids(self) -> tuple[frozenset[str], ...]:
        return ()

    def second_ids(self, selection: Selection, taken: Set[str], among: Set[str] | None = None) -> frozenset[str]:
        return frozenset()

    def roster(
        self, selection: Selection, without: Iterable[str] = (), among: Set[str] | None = None
    ) -> tuple[tuple[str, ...], ...]:
        excluded = set(without) | self.out
        names = (f"{i:04d}" for i in range(self.patients))
        found = (i for i, name in enumerate(names) if name not in excluded and (among is None or name in among))
        return tuple((str(i % 3),) * 2 for i in found)

    def scans(self, modality: str) -> tuple[Scan, ...]:
        self.reads += 1
        return tuple(scan for scan in self.heads if scan.pseudonym not in self.out)

    def heads_waiting(self, modality: str) -> tuple[int, bool]:
        free = [scan for scan in self.heads if scan.pseudonym not in self.out]
        return len(free), self.wide

    def opted_out(self) -> frozenset[str]:
        return self.out

    def project_note(self, name: str) -> Any:
        return self.note(f"project/{name}")

    def write_project_note(self, name: str, value: Any) -> None:
        self.write_note(f"project/{name}", value)

    def place(self, name: str) -> MemoryCheckpointStore:
        return MemoryCheckpointStore(self.blobs, name)

    def places(self, start: str) -> tuple[str, ...]:
        return tuple(name for name in sorted(self.blobs) if name.startswith(start))

    def site_place(self, name: str) -> MemoryCheckpointStore:
        return MemoryCheckpointStore(self.blobs, f"site/{name}")

    def site_places(self, start: str) -> tuple[str, ...]:
        return tuple(name[5:] for name in sorted(self.blobs) if name.startswith(f"site/{start}"))

    def free_bytes(self) -> int:
        return self.free

    def note(self, name: str) -> Any:
        return json.loads(self.notes[name]) if name in self.notes else None

    def change_note(self, name: str, change: Callable[[Any], Any]) -> None:
        self.write_note(name, change(self.note(name)))

    def write_note(self, name: str, value: Any) -> None:
        if name == self.crash_at and value is not None:
            raise KeyboardInterrupt
        self.notes[name] = json.dumps(value)


@dataclass
class DirectCoordinatorClient:
    """The client's port, with calls straight into a real coordinator's admission; ``shut``: it cannot be reached."""

    intake: AdmissionService
    site: str
    shut: bool = False

    def _ask(self, act: Any) -> Verdict:
        if self.shut:
            raise CoordinatorUnreachableError("no answer")
        try:
            return act()  # type: ignore[no-any-return]
        except RequestRejectedError as refusal:
            return Verdict((refusal.finding,))

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.reserve(self.site, key, envelope))

    def settle(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.settle(self.site, key, envelope))

    def submit(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        release = self.intake.release(self.site, key, envelope)
        return self._ask(lambda: self.intake.admit(self.site, key, envelope, release, signed(release, artifact)))

    def submit_earlier(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        release = self.intake.release(self.site, key, envelope)
        staged = signed(release, artifact, {"earlier": True})
        return self._ask(lambda: self.intake.admit(self.site, key, envelope, release, staged))

    def amend(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.amend(self.site, key, envelope))

    def present(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.present(self.site, key, envelope))

    def outcome(self, key: str, envelope: bytes) -> Verdict | None:
        if self.shut:
            raise CoordinatorUnreachableError("no answer")
        found = self.intake.outcome(self.site, key)
        return found[0] if found else None


def site_of(folder: Path, hospital: Hospital, vault: MemoryVault, gateway: DirectCoordinatorClient) -> SiteContext:
    """A hospital's agent over its own ledger file; open it again after a crash."""
    store = Store(open_sqlite(folder / f"{hospital.name}.db"), "lazaret/test", hospital.key, Clock())
    own = parse_policy(hospital.policy_text, hospital.name)
    register = LedgerService(store, lambda _site: own)
    if hospital.name not in store.state.sites:
        register.enrol(*hospital.enrolment(), own)
    made = iter(range(1000))

    def read(envelope: bytes) -> Release:
        statement = parse(open_sealed(envelope, PAYLOAD_TYPE, {"self": hospital.public}).payload)
        assert isinstance(statement, Release)
        return statement

    def new_id(prefix: str) -> str:
        return next(
            name for i in made if (name := f"{prefix}-{hospital.name}-{i}") not in register.store.state.grants
        )

    of_files = partial(task_cohort, vault) if isinstance(vault, Vault) else None
    find: Callable[[ExampleRule], TaskCohort] = of_files or vault.examples
    nothing: Callable[[str, str], None] = lambda _step, _detail: None  # noqa: E731 - nobody listens
    fits = partial(label_misfit, vault) if isinstance(vault, Vault) else lambda _rule: ""
    said = hospital.seal, read, new_id, nothing
    return SiteContext(hospital.name, register, gateway, vault, *said, find, lambda _digest: None, fits)


@dataclass
class SiteWorld:
    """One site and one coordinator, with real ledgers."""

    site: SiteContext
    vault: MemoryVault
    gateway: DirectCoordinatorClient
    hospital: Hospital
    intake: AdmissionService

    def spent(self, kind: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """(held, spent) of an account, at the site and at the coordinator."""
        ledger = (self.site.ledger.store.state, self.intake.register.store.state)
        accounts = [b.accounts[f"site-a/{kind}"] for b in ledger]
        return (accounts[0].held, accounts[0].spent), (accounts[1].held, accounts[1].spent)

    def join(self, p: Participant, mechanism: Federated, run: str = "run-1") -> None:
        """The site prices the run, and the coordinator holds that price."""
        assert self.intake.reserve_run(run, {"site-a": p.join(run, mechanism)}, 1)["site-a"].admitted

    def arrives(self, sent: SignedRelease) -> None:
        """An update comes in with the link, and is admitted."""
        assert self.gateway.submit(f"submit-{sent.release.release}", sent.envelope, sent.artifact).admitted


def admission(ledger: Path, federation: str, *hospitals: Hospital) -> AdmissionService:
    """The coordinator's admission over a ledger file, by the policy ``federation``, with these hospitals enrolled."""
    store = Store(open_sqlite(ledger), "lazaret/coordinator", Ed25519PrivateKey.generate(), Clock())
    intake = AdmissionService.over(store, parse_policy(federation, "federation"))
    for hospital in hospitals:
        intake.enrol(hospital.enrolment()[1])
    return intake


def site_world(
    folder: Path,
    patients: int = 12,
    *,
    vault: MemoryVault | None = None,
    own: str = "",
    federation: str = "",
    **changes: object,
) -> SiteWorld:
    """A site that is enrolled, with a vault of ``patients`` or the one that is given.

    ``own`` and ``federation`` are the texts of both policies; without them they are those of the tests, the site's
    with ``changes``.
    """
    hospital = Hospital("site-a", own or policy(**changes))
    intake = admission(folder / "coordinator.db", federation or policy(max_releases_per_patient=9), hospital)
    vault = MemoryVault(patients) if vault is None else vault
    gateway = DirectCoordinatorClient(intake, "site-a")
    return SiteWorld(site_of(folder, hospital, vault, gateway), vault, gateway, hospital, intake)


def public_basis(provenance: str = "public") -> Basis:
    """A PCA basis of random images."""
    return fit_basis(np.random.default_rng(9).random((40, *SHAPE)).astype(np.float32), 8, provenance)  # type: ignore[arg-type]


def ksame(k: int = 5, provenance: str = "public") -> KSame:
    """k-Same-PCA of the images in :class:`MemoryVault`."""
    return KSame(k, 2, public_basis(provenance))


def approving(tmp_path: Path) -> tuple[SiteWorld, Person, Person]:
    """A site whose policy has two persons approve, and both of them appointed."""
    s = site_world(tmp_path, approvals='["compliance", "hospital"]')
    persons = Person("dpo-1", "compliance"), Person("head-1", "hospital")
    for person in persons:
        decisions.appoint(s.site.ledger.store, person.name, person.role, person.public)
    return s, *persons


def approve(s: SiteWorld, person: Person, release: Release, digest: str = "") -> None:
    """A person approves the release, or other bytes of the same name."""
    value = digest or release.artifact_sha256
    sealed = person.approval(release.release, "release", release.release, value, origin=s.site.ledger.store.origin)
    decisions.approve(s.site.ledger.store, sealed)


def waiting(s: SiteWorld) -> Release:
    """A release that waits for persons."""
    with pytest.raises(ApprovalPending) as caught:
        release_synthetic(s.site, ksame(), "OT", RNG)
    return caught.value.signed.release


def permissive(text: str) -> str:
    """A policy that admits level C, and what is of no public origin."""
    for key, value in (("levels", '["A", "B", "C"]'), ("components", '["public", "private"]')):
        text, found = re.subn(rf"^{key} = [^\n#]*", f"{key} = {value} ", text, flags=re.MULTILINE)
        assert found == 1
    return text
