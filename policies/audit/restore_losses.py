"""List what a restore undoes: decisions after the backup that made the ledger stricter. Nothing brings them back.

Grants come back as receipts (:class:`policies.ledger.entries.Recovered`). A revocation, a dismissal, a lowered limit
and a stricter policy are in nobody's hands but the ledger's: people have to decide them again. The last export from
before lists them, when it is the restored ledger grown longer.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from policies.audit.auditor import open_envelope
from policies.audit.verify import verify
from policies.governance import amendments
from policies.ledger.approvals import APPROVING
from policies.ledger.entries import Amended, Appointed, Dismissed, Enrolled, LimitSet, Record, Revoked, decode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import Checkpoint, CompactRange, LedgerCheckpointError, leaf_hash, open_checkpoint
from policies.ledger.state import State
from policies.ledger.store import Store
from policies.review.policy import Policy
from policies.review.policy import parse as parse_policy
from policies.statements import Amendment, Enrolment, parse
from protos.common.text import MINUTE, printable, utc

_OPERATOR: Final = "who ran the ledger"


@dataclass(frozen=True, slots=True)
class LostDecision:
    """One decision that the restored ledger does not know any more."""

    at: int  # seconds since 1970: when it was written down
    what: str
    by: tuple[str, ...]  # persons whose approvals decided it, or the site that signed it
    again: tuple[str, ...]  # what to type, one after the other

    def json(self) -> dict[str, Any]:
        """For machines."""
        return {"at": self.at, "what": self.what, "by": list(self.by), "again": list(self.again)}

    def line(self) -> str:
        """For people."""
        by, again = ", ".join(self.by) or _OPERATOR, "; ".join(self.again)
        return printable(f"{format_time(self.at)}  {self.what}, by {by}: {again}")  # old ledgers may hold any name


@dataclass(frozen=True, slots=True)
class RestoreLosses:
    """The decisions in an older export that were made after the backup."""

    until: int  # seconds since 1970: the export's last entry
    undone: tuple[LostDecision, ...]


def format_time(at: int) -> str:
    """A time in words, UTC."""
    return f"{utc(at, MINUTE)} UTC"


def warning(last: int) -> str:
    """The warning for the operator of a restore. ``last``: time of the backup's last entry; 0 for an empty backup."""
    since = f"after {format_time(last)}, the backup's last entry," if last else "ever, since the backup has no entry,"
    return (
        f"every revocation, dismissal, lowered limit and stricter policy that was decided {since} is lost on this "
        "side. Enter each again before any person approves anything"
    )


def describe_losses(lost: RestoreLosses | None) -> list[str]:
    """The lines that follow :func:`warning`."""
    if lost is None:
        return ["the last export (`restore --last EXPORT`) would have listed them; ask the persons who decided them"]
    if not lost.undone:
        return [f"according to the export, which ends at {format_time(lost.until)}, there is none"]
    lines = [one.line() for one in lost.undone]
    return [f"according to the export, which ends at {format_time(lost.until)}, these are lost; enter again:", *lines]


def as_json(last: int, lost: RestoreLosses | None) -> dict[str, Any]:
    """The same for machines; ``undone`` is null where no export told it."""
    undone = None if lost is None else [one.json() for one in lost.undone]
    return {"last_entry": last, "until": lost.until if lost else None, "undone": undone}


def last_entry(store: Store) -> int:
    """When a ledger's last entry was written, in seconds since 1970; 0 where there is none."""
    return store.line(store.state.size - 1).record.at if store.state.size else 0


def losses_since(store: Store, raw: bytes, size: int) -> RestoreLosses:
    """List the decisions in an export that made the ledger stricter, were still in force, and are missing after a
    restore.

    Args:
        store: the ledger, before its new epoch is opened.
        raw: the export. Everything in it is checked first: see :mod:`policies.audit.verify`.
        size: how many entries the backup had; the export must begin with exactly these (RFC 6962: the same root).
    Raises:
        ExportError: the export does not hold, is another ledger's, or another history.
    """
    export = _checked(store, raw, size)
    after, lost = State(), list[Record]()
    for n, body in enumerate(export.entries):
        record = decode(body)
        after.apply(record)
        if n >= size:
            lost.append(record)
    found = _Found(store.state, after, {hashlib.sha256(e).digest(): e for e in export.envelopes})
    for record in lost:
        found.take(record)
    until = decode(export.entries[-1]).at if export.entries else 0
    return RestoreLosses(until, tuple(found.kept.values()))


def _checked(store: Store, raw: bytes, size: int) -> Export:
    export = Export.parse(raw)
    try:
        head = open_checkpoint(export.checkpoint, store.public)
    except LedgerCheckpointError:
        raise ExportError("its head is not signed by the key of the ledger that is restored") from None
    if export.public != store.public or head.origin != store.origin:
        raise ExportError("it is of another ledger than the one that is restored")
    verify(raw)
    if len(export.entries) < size:
        raise ExportError(f"it has {len(export.entries)} entries and the backup {size}: it is older than the backup")
    tree = CompactRange()
    for body in export.entries[:size]:
        tree.append(leaf_hash(body))
    if not store.holds(Checkpoint(store.origin, size, tree.root())):
        raise ExportError("it does not begin with the backup's entries: the two have different histories")
    return export


class _Found:
    """The lost entries, one by one: of each subject the last that counted when the export was made."""

    def __init__(self, before: State, after: State, envelopes: Mapping[bytes, bytes]) -> None:
        self.before, self.after, self.envelopes = before, after, envelopes
        self.kept: dict[tuple[str, str], LostDecision] = {}
        self.came: dict[str, list[bytes]] = {}  # site -> the requests with which it was enrolled after the backup
        self.named: set[str] = set()  # successors whose appointment stands before a dismissal already

    def take(self, record: Record) -> None:
        match record.entry:
            case Revoked() as e:
                self._revoked(record.at, e)
            case Dismissed() as e:
                self._dismissed(record.at, e)
            case LimitSet() as e:
                self._limit(record.at, e)
            case Enrolled() as e:
                self.came.setdefault(e.site, []).append(e.envelope)
                self._policy(record.at, e)
            case Amended() as e:
                self._policy(record.at, e)
            case Appointed() as e:
                self._first(record.at, e)
            case _:
                pass

    def _keep(self, key: tuple[str, str], one: LostDecision) -> None:
        self.kept.pop(key, None)  # in the order of the last ones
        self.kept[key] = one

    def _by(self, serial: str) -> tuple[str, ...]:
        decided = self.after.proposals.get(serial)
        return tuple(f"{name} ({self.after.persons[name].role})" for name in decided.counted) if decided else ()

    def _revoked(self, at: int, e: Revoked) -> None:
        again = f"lazaret-coordinator revoke {e.site}"
        if e.number:
            if e.number in self.before.issued and e.number not in self.before.revoked:  # others are unknown: refused
                again += f" --certificate {e.number} --reason {e.why}"
                self._keep(
                    ("revoked", e.number),
                    LostDecision(at, f"certificate {e.number} of {e.site} revoked", (), (again,)),
                )
            return
        back = self._is_in(e.site)
        words: tuple[str, ...] = (f"{again} --reason {e.why}",) if back else ()
        if e.site in self.came or not back:  # what enrolled it in between is unknown again, and would be taken again
            words += (f"never enrol {e.site} with a request, or approvals, of before this",)
        self._keep(("revoked", e.site), LostDecision(at, f"{e.site} revoked ({e.why})", (), words))

    def _is_in(self, site: str) -> bool:
        """Has the restored ledger that site, and has it not been revoked there?"""
        return site in self.before.sites and site not in self.before.revoked_sites

    def _dismissed(self, at: int, e: Dismissed) -> None:
        known = self.before.active_person(e.person)
        words: tuple[str, ...] = (f"never appoint {e.person} with that key",)
        if known:
            words = (*self._successor(known.role), *_agreed("dismiss", e.person, known.role))
        self._keep(("dismissed", e.person), LostDecision(at, f"{e.person} dismissed", self._by(e.serial), words))

    def _successor(self, role: str) -> tuple[str, ...]:
        """The last of a role cannot go: where all who are in it again went, one who came since has to come first."""
        then = [p for p in self.after.persons.values() if p.role == role and self.after.active_person(p.person)]
        if role not in APPROVING or any(self.before.active_person(p.person) for p in then) or not then:
            return ()
        new = min(then, key=lambda p: p.person)
        if new.person in self.named:
            return ()
        self.named.add(new.person)
        return _agreed("appoint", new.person, f"{role} {new.public.hex()}")

    def _limit(self, at: int, e: LimitSet) -> None:
        here = self.before.accounts.get(e.account)
        least = here.limit if here else self.after.accounts[e.account].opened.limit  # as it opens, enrolled again
        self.kept.pop(("limit", e.account), None)
        stated = e.epsilon or str(e.limit)
        if e.limit < least:
            what, again = f"limit of {e.account} lowered to {stated}", _agreed("limit", e.account, stated)
            self._keep(("limit", e.account), LostDecision(at, what, self._by(e.serial), again))

    def _policy(self, at: int, e: Amended | Enrolled) -> None:
        self.kept.pop(("policy", e.site), None)
        here, now = self.before.policies.get(e.site), self._policy_in(e.envelope)
        again = [*([here] if here else []), *self.came.get(e.site, [])]  # what may bind it again
        keys = {key: None for one in again for key in amendments.loosened_keys(now, self._policy_in(one))}
        if keys:
            when = "" if self._is_in(e.site) else f"once {e.site} is enrolled again: "
            words = (f"at {e.site}: restore the policy.toml of that time", f"{when}lazaret-agent ledger amend")
            what = f"{e.site} has a stricter policy: {', '.join(keys)}"
            self._keep(("policy", e.site), LostDecision(at, what, (e.site,), words))

    def _policy_in(self, digest: bytes) -> Policy:
        said = parse(open_envelope(self.envelopes[digest], None))
        assert isinstance(said, Amendment | Enrolment), "the export was audited"
        return parse_policy(said.policy, f"policy of {said.site}")

    def _first(self, at: int, e: Appointed) -> None:
        """Where a role is empty again, whoever comes first has it: so the one who had it is named, key and all."""
        if e.role in APPROVING - self.before.office() and not e.serial:
            again = f"ledger appoint {shlex.quote(e.person)} {e.role} {e.public.hex()}"
            self._keep(
                ("first", e.role), LostDecision(at, f"{e.person} appointed as the first {e.role}", (), (again,))
            )


def _agreed(action: str, subject: str, value: str) -> tuple[str, ...]:
    """What persons sign, and what is typed then."""
    name = shlex.quote(subject)
    end = "" if action == "dismiss" else f" {value}"
    sign = f"ledger sign {action} {name} {value} --serial SERIAL --person NAME --key KEY --out FILE"
    return sign, "ledger approve FILES", f"ledger {action} {name}{end} --serial SERIAL"
