"""Approvers, requests and approvals: the part of the ledger state that counts people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from policies.ledger.ed25519 import is_owned
from policies.ledger.entries import Appointed, Approved, Dismissed, InvalidEntryError, Requested, proposal

ROLES: Final = frozenset({"auditor", "compliance", "hospital", "operator", "researcher"})
APPROVING: Final = frozenset({"compliance", "hospital"})  # who runs the machine, or wants the data, never approves
ASKING: Final = ROLES - {"auditor"}  # who only looks on asks for nothing


# Serials that follow from what is decided: a release's own, a run's plan ("release-run-"), a policy's amendment, a
# refusal. Nobody asks under one,
# or whoever may ask could keep it for other words, and nothing could be decided under it ever again.
FIXED: Final = ("amend-", "refuse-", "release-")
UNASKED: Final = frozenset({"amend", "refuse", "release", "run", "use"})  # what is decided under such a serial
RUN_PLAN: Final = "release-run-"  # a run's plan: then follows the beginning of its SHA-256
MODEL_USE: Final = "release-use-"  # the use of a model that the policy would not have admitted: as above


def refusal(release: str) -> str:
    """The serial under which persons refuse a release that waits: whatever they sign there, it never sets out."""
    return f"refuse-{release}"


@dataclass(slots=True)
class Proposal:
    """What persons have approved under one serial."""

    approvals: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)  # person -> digest, sealed approval
    used: bool = False
    counted: tuple[str, ...] = ()  # once it is used: whose approvals decided it, in the order in which they came


@dataclass(slots=True)
class Approvers:
    """The fold of what persons are and do."""

    persons: dict[str, Appointed] = field(default_factory=dict)
    dismissed: set[str] = field(default_factory=set)  # of the persons
    asked: dict[str, Requested] = field(default_factory=dict)  # by serial
    proposals: dict[str, Proposal] = field(default_factory=dict)  # by serial

    def active_person(self, name: str) -> Appointed | None:
        """The person of this name, of whatever role, unless there is none or they were dismissed."""
        return None if name in self.dismissed else self.persons.get(name)

    def office(self) -> frozenset[str]:
        """The approving roles that somebody holds."""
        return APPROVING & {p.role for name, p in self.persons.items() if name not in self.dismissed}

    def approvals(self, serial: str, action: str, subject: str, value: str) -> dict[str, str]:
        """Who has approved exactly this, so far: role -> SHA-256 of the sealed approval, in hexadecimal."""
        asked = self.proposals.get(serial, Proposal())
        agreeing = self.agreeing(serial, action, subject, value)
        return {self.persons[p].role: asked.approvals[p][1].hex() for p in agreeing}

    def agreeing(self, serial: str, action: str, subject: str, value: str) -> list[str]:
        """The persons who have approved exactly this, so far, in the order in which they did.

        An unused proposal has no approval of a person who was dismissed since. It has none of a person who requested
        the same under another serial that is still open, unless somebody else requested it under this one. A used
        proposal has the approvals that decided it.
        """
        asked, wanted = self.proposals.get(serial, Proposal()), proposal(serial, action, subject, value)
        agreeing = [person for person, (digest, _) in asked.approvals.items() if digest == wanted]
        if asked.used:
            return [person for person in agreeing if person in asked.counted]
        out = self.dismissed | self._own(serial, action, subject, value, agreeing)
        return [person for person in agreeing if person not in out]

    def _own(self, serial: str, action: str, subject: str, value: str, agreeing: list[str]) -> set[str]:
        """Those of them who approve, under a serial that nobody asked under, what they ask for under another one."""
        if serial in self.asked or action in UNASKED:
            return set()
        theirs = (r for r in self.asked.values() if r.person in agreeing)
        still = (r for r in theirs if not self.proposals.get(r.serial, Proposal()).used)
        return {r.person for r in still if r.proposal == proposal(r.serial, action, subject, value)}

    def _appointed(self, e: Appointed) -> None:
        if e.role not in ROLES or not is_owned(e.public):
            raise InvalidEntryError("no such role, or not an Ed25519 key of one owner")
        if e.person in self.persons or any(e.public == known.public for known in self.persons.values()):
            raise InvalidEntryError("the person or the key is appointed already")
        office = self.office()
        if office and e.role not in APPROVING - office:
            self._agree(e.serial, "appoint", e.person, f"{e.role} {e.public.hex()}", len(office))
        elif e.serial:
            raise InvalidEntryError("the first of a role needs no approval")
        self.persons[e.person] = e

    def _dismissed(self, e: Dismissed) -> None:
        person, office = self.active_person(e.person), self.office()
        if person is None:
            raise InvalidEntryError("no active person has that name")
        others = {p.role for n, p in self.persons.items() if n not in self.dismissed and n != e.person}
        if person.role in APPROVING - others:  # else the next one of that role would come in without being approved
            raise InvalidEntryError("the last of an approving role stays until a successor is appointed")
        if office:
            self._agree(e.serial, "dismiss", e.person, person.role, len(office))
        elif e.serial:
            raise InvalidEntryError("if no person may approve, a dismissal has no serial")
        self.dismissed.add(e.person)

    def _requested(self, e: Requested) -> None:
        person = self.active_person(e.person)
        if person is None or person.role not in ASKING:
            raise InvalidEntryError("no person of that name may make requests")
        if not e.serial or e.serial in self.asked or e.serial in self.proposals:
            raise InvalidEntryError("a request has a serial of its own")
        if e.serial.startswith(FIXED):
            raise InvalidEntryError(
                f"no request may have a serial that begins with {', '.join(FIXED)}: choose another"
            )
        self.asked[e.serial] = e

    def _approved(self, e: Approved) -> None:
        person = self.active_person(e.person)
        if person is None or person.role not in APPROVING:
            raise InvalidEntryError("no person of that name may approve")
        if not e.serial:
            raise InvalidEntryError("a proposal has a serial")
        asked, requested = self.proposals.get(e.serial, Proposal()), self.asked.get(e.serial)
        if asked.used or e.person in asked.approvals:
            raise InvalidEntryError("that proposal is closed, or this person has approved it")
        if requested is not None and requested.person == e.person:
            raise InvalidEntryError("a requester does not approve their own request")
        if requested is not None and requested.proposal != e.proposal:
            raise InvalidEntryError("that serial is for something else than what is approved")
        asked.approvals[e.person] = (e.proposal, e.envelope)
        self.proposals[e.serial] = asked

    def _agree(self, serial: str, action: str, subject: str, value: str, roles: int) -> None:
        """Close a proposal that persons of so many different roles have approved, in exactly these words."""
        asked = self.proposals.get(serial, Proposal())
        persons = () if asked.used else tuple(self.agreeing(serial, action, subject, value))
        agreeing = {self.persons[p].role for p in persons}
        if asked.used or not len(agreeing) >= roles:
            own = not asked.used and self._own(serial, action, subject, value, list(asked.approvals))
            why = (
                "; a person who requested it under another serial does not count: let another person make the request"
                if own
                else ""
            )
            raise InvalidEntryError(f"{roles} role(s) must approve this, and {len(agreeing)} did{why}")
        asked.used, asked.counted = True, persons
