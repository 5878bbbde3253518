"""What must hold of the four exported ledgers, whatever was killed, cut or full: no epsilon lost, none doubled.

Everything here is read from exports that ``lazaret-verify`` accepts; no process's word counts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deploy.demo.scene import SITES
from policies.audit.verify import verify
from policies.ledger.entries import (
    Admitted,
    Entry,
    Expired,
    Freed,
    Refused,
    Reserved,
    RoundClosed,
    Sent,
    Spent,
    decode,
)
from policies.ledger.export import Export
from tests.faults.stage import COORDINATOR, ROUNDS, Stage


@dataclass(frozen=True, slots=True)
class Paid:
    """One grant as a ledger has it."""

    reserved: Reserved
    end: str  # held | spent | expired | freed
    spent: int  # what it costs: all of it while it is held

    @property
    def within(self) -> bool:
        """Never more than was reserved."""
        return 0 <= self.spent <= self.reserved.amount


@dataclass(slots=True)
class Auditor:
    """Remembers the ledgers of earlier looks, so that an entry that was lost or rewritten is seen."""

    before: dict[str, tuple[bytes, ...]] = field(default_factory=dict)

    def look(self, stage: Stage) -> Ledgers:
        """Export and verify all four.

        Raises:
            Unsound: one of them does not verify.
            AssertionError: one is not a continuation of what it was.
        """
        found: dict[str, list[Entry]] = {}
        for name in (COORDINATOR, *SITES):
            raw = stage.ledger(name)
            verify(raw)
            entries = Export.parse(raw).entries
            known = self.before.get(name, ())
            assert entries[: len(known)] == known, f"{name}: an entry was lost or rewritten"
            self.before[name] = entries
            found[name] = [decode(raw).entry for raw in entries]
        return Ledgers(found)


@dataclass(frozen=True, slots=True)
class Ledgers:
    """Who -> the entries of the ledger, in order."""

    entries: dict[str, list[Entry]]

    def grants(self, name: str, run: str) -> dict[str, Paid]:
        """The grants of a run in one ledger, by id."""
        found: dict[str, Paid] = {}
        for entry in self.entries[name]:
            if isinstance(entry, Reserved) and entry.run == run:
                found[entry.grant] = Paid(entry, "held", entry.amount)
            elif isinstance(entry, Spent | Expired | Freed) and entry.grant in found:
                reserved = found[entry.grant].reserved
                cost = {Expired: reserved.amount, Freed: 0}.get(type(entry))
                used = entry.used if isinstance(entry, Spent) else cost
                assert used is not None
                found[entry.grant] = Paid(reserved, type(entry).__name__.lower(), used)
        return found

    def held(self, run: str) -> list[str]:
        """Whose ledger has a grant of this run without an end."""
        return [n for n in self.entries if any(paid.end == "held" for paid in self.grants(n, run).values())]

    def of(self, name: str, kind: type, run: str) -> list[Entry]:
        """The entries of one kind that belong to a run."""
        return [e for e in self.entries[name] if isinstance(e, kind) and getattr(e, "run", None) == run]

    def closed(self, run: str) -> list[int]:
        """The rounds that were closed, in the ledger's order."""
        return [e.round for e in self.of(COORDINATOR, RoundClosed, run) if isinstance(e, RoundClosed)]

    def faults(self, run: str, state: str, folder: Path, rounds: int = ROUNDS) -> Iterator[str]:
        """What does not hold of a run that has come to an end (or was stopped).

        Args:
            run: its name.
            state: finished, failed or stopped.
            folder: the coordinator's, of this run.
            rounds: how many its job asked for.
        """
        yield from self._money(run, state)
        yield from self._updates(run)
        yield from self._rounds(run, state, folder, rounds)

    def _money(self, run: str, state: str) -> Iterator[str]:
        hub = self.grants(COORDINATOR, run)
        sites = {site: self.grants(site, run) for site in SITES}
        for name, grants in [(COORDINATOR, hub), *sites.items()]:
            for grant, paid in grants.items():
                if not paid.within:
                    yield f"{name}: {grant} cost {paid.spent} of {paid.reserved.amount}"
                if paid.end == "held" and state != "stopped":
                    yield f"{name}: {grant} is still held, and the run is {state}"
        for site, grants in sites.items():
            if sum(paid.spent > 0 for paid in grants.values()) > 1:
                yield f"{site}: paid for one run under {len(grants)} grants"
            yield from self._covered(site, run, hub)
        for grant, paid in hub.items():
            here = sites[paid.reserved.site].get(grant)
            if here is None or here.reserved.amount != paid.reserved.amount:
                yield f"the coordinator holds {grant}, which {paid.reserved.site} never reserved"

    def _covered(self, site: str, run: str, hub: dict[str, Paid]) -> Iterator[str]:
        """What left is paid for in both ledgers."""
        grants = self.grants(site, run)
        for grant, used in self._left(site, run).items():
            for name, paid in ((site, grants.get(grant)), (COORDINATOR, hub.get(grant))):
                if paid is None or not paid.spent >= used:
                    yield f"{site}: {used} left under {grant}, and {name} has {paid and paid.spent}"

    def _left(self, site: str, run: str) -> dict[str, int]:
        """What has left under each grant: a Sent entry says how much so far, itself included."""
        found: dict[str, int] = {}
        for entry in self.of(site, Sent, run):
            assert isinstance(entry, Sent)
            found[entry.grant] = max(found.get(entry.grant, 0), entry.used)
        return found

    def _updates(self, run: str) -> Iterator[str]:
        admitted = [e for e in self.of(COORDINATOR, Admitted, run) if isinstance(e, Admitted)]
        twice = [key for key, n in Counter((e.round, e.site) for e in admitted).items() if n > 1]
        twice += [(0, name) for name, n in Counter(e.artifact.hex() for e in admitted).items() if n > 1]
        if twice:
            yield f"admitted twice: {twice}"
        sent = {site: {e.release: e for e in self.of(site, Sent, run) if isinstance(e, Sent)} for site in SITES}
        for entry in admitted:
            match = sent[entry.site].get(entry.release)
            if match is None or (match.envelope, match.artifact) != (entry.envelope, entry.artifact):
                yield f"{entry.release} was admitted, and {entry.site} never sent it"
        for site in SITES:
            known = {e.release for e in admitted}
            for entry_ in self.of(site, Admitted, run):
                if isinstance(entry_, Admitted) and entry_.release not in known:
                    yield f"{site} believes that {entry_.release} was admitted"

    def _rounds(self, run: str, state: str, folder: Path, rounds: int) -> Iterator[str]:
        closed = [e for e in self.of(COORDINATOR, RoundClosed, run) if isinstance(e, RoundClosed)]
        numbers = [e.round for e in closed]
        if numbers != list(range(1, len(numbers) + 1)):
            yield f"rounds were closed as {numbers}"
        if state == "finished" and len(numbers) != rounds:
            yield f"finished after {len(numbers)} of {rounds} rounds"
        admitted = {(e.round, e.site) for e in self.of(COORDINATOR, Admitted, run) if isinstance(e, Admitted)}
        for entry in closed:
            path = folder / f"round-{entry.round}.safetensors"
            if not path.exists() or hashlib.sha256(path.read_bytes()).digest() != entry.model:
                yield f"round {entry.round}: the checkpoint is not the one that the ledger names"
            if missing := {(entry.round, site) for site in entry.sites} - admitted:
                yield f"round {entry.round}: aggregated without a yes: {sorted(missing)}"
        if state == "finished":
            shelf = folder.parents[1] / "releases" / run / "certificate.json"
            body = (folder / f"round-{rounds}.safetensors").read_bytes()
            found = json.loads(shelf.read_text()).get("artifact_sha256") if shelf.exists() else None
            if found != hashlib.sha256(body).hexdigest():
                yield "the model on the shelf is not the last round's"

    def refusals(self, run: str) -> list[str]:
        """Every refusal of a run's grants or releases, with its rules."""
        mine = {e.grant for e in self.of(COORDINATOR, Reserved, run) if isinstance(e, Reserved)}
        mine |= {e.release for e in self.of(COORDINATOR, Admitted, run) if isinstance(e, Admitted)}
        found = [e for e in self.entries[COORDINATOR] if isinstance(e, Refused) and e.subject in mine]
        return [f"{e.site} {e.stage}: {', '.join(e.findings)}" for e in found]
