"""Sites of a federated run without Flower: real ledgers and the product's own parts, called one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agent.edges.tasks import Answer, Declined, Task
from agent.masked import Sum
from agent.mechanisms.federated import Federated, FederatedMasked
from agent.nouns import Cohort, Image, Patient, Scan, Selection, Unreachable, Update
from agent.participant import Participant, read_mechanism
from agent.site import Refused, Site
from coordinator.intake import Intake, Unwelcome
from policies.policy import parse as parse_policy
from policies.register import Register
from policies.review import Verdict
from policies.sqlite import open_sqlite
from policies.statement import PAYLOAD_TYPE, Release, parse
from policies.store import Store
from protos.envelope import key_id, open_sealed
from protos.secagg_session import Acquaintance
from tests.support.books import Clock, Hospital
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.grids import goods

SHAPE = (8, 8)


def federated(rounds: int = 3, **changes: Any) -> Federated:
    """A small training job."""
    job = Federated(0.25, 1.8, 15, rounds, 0.1, 2, 25, 40.0, ("0", "1", "2"), SHAPE, (0.0,) * 64)
    return replace(job, **changes)


def masked(rounds: int = 2, sites: int = 3, **changes: Any) -> FederatedMasked:
    """A small training job in secret sums."""
    job = FederatedMasked(
        0.25, 1.8, rounds, 0.1, 2, 25, 4.0, ("0", "1", "2"), SHAPE, (0.0,) * 64, sites, 2, 4.0, 20, 32
    )
    return replace(job, **changes)


@dataclass(frozen=True)
class Drawer:
    """One place in the vault, in memory."""

    blobs: dict[str, bytes]
    name: str

    def read(self) -> bytes | None:
        return self.blobs.get(self.name)

    def write(self, data: bytes) -> None:
        self.blobs[self.name] = data

    def clear(self) -> None:
        self.blobs.pop(self.name, None)


@dataclass
class Vault:
    """The vault's port in memory, which notes when patients are read."""

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
            if f"{i:04d}" not in excluded:
                found.append(Patient(f"{i:04d}", images))
        return Cohort(tuple(found))

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

    def place(self, name: str) -> Drawer:
        return Drawer(self.blobs, name)

    def site_place(self, name: str) -> Drawer:
        return Drawer(self.blobs, f"site/{name}")

    def site_places(self, start: str) -> tuple[str, ...]:
        return tuple(name[5:] for name in sorted(self.blobs) if name.startswith(f"site/{start}"))

    def free_bytes(self) -> int:
        return self.free

    def note(self, name: str) -> Any:
        return json.loads(self.notes[name]) if name in self.notes else None

    def write_note(self, name: str, value: Any) -> None:
        if name == self.crash_at and value is not None:
            raise KeyboardInterrupt
        self.notes[name] = json.dumps(value)


@dataclass
class Door:
    """The door's port straight into a real coordinator's intake; it can be slammed."""

    intake: Intake
    site: str
    shut: bool = False

    def _ask(self, act: Any) -> Verdict:
        if self.shut:
            raise Unreachable("slammed")
        try:
            return act()  # type: ignore[no-any-return]
        except Unwelcome as refusal:
            return Verdict((refusal.finding,))

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.reserve(self.site, key, envelope))

    def settle(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.settle(self.site, key, envelope))

    def submit(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        release = self.intake.release(self.site, key, envelope)
        return self._ask(lambda: self.intake.admit(self.site, key, envelope, release, goods(release, artifact)))

    def submit_earlier(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        release = self.intake.release(self.site, key, envelope)
        staged = goods(release, artifact, {"earlier": True})
        return self._ask(lambda: self.intake.admit(self.site, key, envelope, release, staged))

    def amend(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.amend(self.site, key, envelope))

    def present(self, key: str, envelope: bytes) -> Verdict:
        return self._ask(lambda: self.intake.present(self.site, key, envelope))

    def outcome(self, key: str, envelope: bytes) -> Verdict | None:
        if self.shut:
            raise Unreachable("slammed")
        found = self.intake.outcome(self.site, key)
        return found[0] if found else None


def site_of(folder: Path, hospital: Hospital, vault: Vault, door: Door) -> Site:
    """A hospital's agent over its own ledger file; open it again after a crash."""
    store = Store(open_sqlite(folder / f"{hospital.name}.db"), "lazaret/test", hospital.key, Clock())
    own = parse_policy(hospital.policy_text, hospital.name)
    register = Register(store, lambda _site: own)
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

    return Site(hospital.name, register, door, vault, hospital.seal, read, new_id, lambda _step, _detail: None)


@dataclass
class Ward:
    """One site in a run: what its link would hand to its desk comes to :meth:`handle`."""

    folder: Path
    hospital: Hospital
    intake: Intake
    partners: tuple[bytes, ...] = ()  # enrolled keys of the sites that it knows
    vault: Vault = field(default_factory=Vault)
    online: bool = True
    seed: int = 1
    asked: list[tuple[str, int, str]] = field(default_factory=list)  # kind, round, step
    part: Sum = field(init=False)
    door: Door = field(init=False)

    def __post_init__(self) -> None:
        self.door = Door(self.intake, self.hospital.name)
        self.start()

    def start(self) -> bool:
        """The process (again): a ledger file, a vault, and what was in memory is gone."""
        site = site_of(self.folder, self.hospital, self.vault, self.door)
        known = Acquaintance(frozenset(key_id(key) for key in self.partners), 1) if self.partners else None
        participant = Participant(site, "OT", UnsafeSeededEntropy(self.seed))
        self.part = Sum(participant, self.hospital.key, known, UnsafeSeededEntropy(self.seed + 1))
        return participant.resume()

    def crash(self) -> bool:
        """kill -9, and a start; was the part taken up?"""
        self.part.participant.site.books.store.close()
        self.vault.crash_at = ""
        return self.start()

    def handle(self, task: Task) -> Answer:
        """What `agent.edges.rounds` does with a task, without its pauses.

        Raises:
            Declined: with a code.
        """
        self.asked.append((task.kind, task.round_index, task.step))
        part = self.part.participant
        try:
            if task.kind == "price":
                return Answer(part.join(task.run, read_mechanism(task.config.decode())))
            if task.kind == "secure":
                return Answer(
                    payload=self.part.step(task.run, task.round_index + 1, task.step, task.payload, task.config)
                )
            assert task.vector is not None
            sent, update = part.train(task.run, task.round_index + 1, Update(task.vector.copy()))
            return Answer(sent.envelope, update.vector)
        except Refused as refusal:
            rules = {f.rule for f in refusal.verdict.findings}
            raise Declined("budget" if "budget" in rules else "policy") from None

    def account(self, kind: str = "rdp") -> tuple[int, int]:
        """(held, spent) in the site's own ledger."""
        account = self.part.participant.site.books.store.state.accounts[f"{self.hospital.name}/{kind}"]
        return account.held, account.spent
