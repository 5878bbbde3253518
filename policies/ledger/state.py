"""The ledger state: accounts and grants, computed from the entries, and computed again by an auditor.

Pure: no disk, no clock (``at`` is an argument, and no decision depends on it). A reserved grant is held and then has
exactly one end: spent (at least what was released under it), freed (only with the site's signed statement that
nothing was read or released) or expired (all of it is spent). Whatever is unknown counts as spent. Kinds are never
added (design P4).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from policies.accounting.rdp import allowance
from policies.ledger.approvals import Approvers, Proposal, refusal
from policies.ledger.ed25519 import is_owned
from policies.ledger.entries import (
    Admitted,
    Amended,
    Appointed,
    Approved,
    Dismissed,
    Enrolled,
    Entry,
    Expired,
    Freed,
    InvalidEntryError,
    Issued,
    LimitSet,
    Opened,
    Presented,
    Record,
    Recovered,
    Refused,
    Requested,
    Reserved,
    Restored,
    Revoked,
    RoundClosed,
    Sent,
    Spent,
    Waived,
)
from policies.statements import ID
from protos.common.errors import RefusedError

_NUMBER: Final = re.compile(r"[1-9a-f][0-9a-f]{0,39}")  # a certificate's: positive, 20 octets (RFC 5280, 4.1.2.2)


@dataclass(slots=True)
class Account:
    """A lifetime budget of one kind for one site's patients."""

    opened: Opened
    held: int = 0
    spent: int = 0
    changed: LimitSet | None = None  # the limit as persons last set it

    @property
    def limit(self) -> int:
        """What may be held and spent together, ever."""
        return self.changed.limit if self.changed else self.opened.limit

    @property
    def epsilon(self) -> str:
        """The limit as people state it."""
        return self.changed.epsilon if self.changed else self.opened.epsilon

    @property
    def left(self) -> int:
        """The amount that can still be reserved; negative after a limit was lowered below what is spent and held."""
        return self.limit - self.held - self.spent


@dataclass(slots=True)
class Grant:
    """Budget reserved for one release, or for one site's part in one federated run."""

    reserved: Reserved | Recovered
    state: str = "held"  # "held" | "spent" | "freed"
    used: int = 0
    last_round: int = 0
    sent: int = 0  # in a site's own ledger: what set out under it has consumed, answered or not
    claim: bytes = b""  # of the newest release that was admitted under it, canonical JSON


class KeyReusedError(RefusedError, ValueError):
    """An idempotency key came back with other content."""


@dataclass(slots=True)
class State(Approvers):
    """The fold of a ledger's entries."""

    sites: dict[str, Enrolled] = field(default_factory=dict)
    requests: set[bytes] = field(default_factory=set)  # envelopes that were ever enrolled: none is so again
    policies: dict[str, bytes] = field(default_factory=dict)  # site -> envelope that holds its policy of today
    amended: dict[str, int] = field(default_factory=dict)  # site -> number of its newest amendment
    issued: dict[str, Issued] = field(default_factory=dict)  # by the certificate's number
    revoked: set[str] = field(default_factory=set)  # numbers of certificates
    revoked_sites: set[str] = field(default_factory=set)  # sites that are enrolled and may do nothing
    accounts: dict[str, Account] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)
    granted: set[tuple[str, str]] = field(default_factory=set)  # (site, run) that a grant was ever for
    sent: dict[str, Sent] = field(default_factory=dict)
    releases: dict[str, Admitted] = field(default_factory=dict)
    envelopes: set[bytes] = field(default_factory=set)  # of everything reviewed as a release, admitted or not
    rounds: dict[str, int] = field(default_factory=dict)  # run -> last closed round
    updates: set[tuple[str, int, str]] = field(default_factory=set)  # admitted (run, round, site)
    aggregated: set[tuple[str, int, str]] = field(default_factory=set)  # those that a closed round counts
    keys: dict[str, int] = field(default_factory=dict)  # idempotency key -> seq
    epoch: int = 1
    restored_at: int = 0  # seq of the entry that opened it
    nonce: str = ""  # of the restore
    # These sites must present their receipts after a restore; until then all sites are frozen.
    sites_awaited: set[str] = field(default_factory=set)
    # Enrolled after a restore, or revoked at it: each stays frozen until it presents its receipts.
    sites_pending_receipts: set[str] = field(default_factory=set)
    recovered: Counter[str] = field(default_factory=Counter)  # site -> grants recovered in this epoch
    refused: set[bytes] = field(default_factory=set)  # envelopes of reservations that were never granted
    size: int = 0
    latest: int = 0  # the latest time of an entry, seconds since 1970

    def apply(self, record: Record) -> None:
        """Take one more record into the ledger.

        Raises:
            InvalidEntryError: the record breaks a rule. The ledger is as before.
        """
        if record.key in self.keys:
            raise InvalidEntryError("an idempotency key is used twice")
        _APPLY[type(record.entry)](self, record.entry)
        self.keys[record.key] = self.size
        self.size += 1
        self.latest = max(self.latest, record.at)

    def open_grant(self, name: str) -> Grant:
        """The held grant of this name.

        Raises:
            InvalidEntryError: there is none, or it was resolved before.
        """
        grant = self.grants.get(name)
        if grant is None or grant.state != "held":
            raise InvalidEntryError("no open grant of that name")
        return grant

    def frozen(self, site: str) -> bool:
        """After a restore: is nothing granted to this site yet?"""
        return bool(self.sites_awaited) or site in self.sites_pending_receipts

    def admits(self, site: str, number: str) -> bool:
        """May a peer with this certificate speak for this site? Its end is for who has a clock to check."""
        known = self.issued.get(number)
        valid = known is not None and known.site == site and number not in self.revoked
        return valid and site in self.sites and site not in self.revoked_sites

    def _enrolled(self, e: Enrolled) -> None:
        if e.site in self.sites and e.site not in self.revoked_sites:
            raise InvalidEntryError("the site is enrolled already")
        if e.envelope in self.requests:  # approvals of before, used or not, bring nobody back
            raise InvalidEntryError("this very request was enrolled before: a fresh one must be sealed and approved")
        others = {known.sign_key for known in self.sites.values() if known.site != e.site}
        if not is_owned(e.sign_key) or e.sign_key in others:
            raise InvalidEntryError("not an Ed25519 key of one owner, or another site's")
        office = self.office()
        if office:
            self._agree(e.serial, "enrol", e.site, e.envelope.hex(), len(office))
        elif e.serial:
            raise InvalidEntryError("where nobody may approve, an enrolment has no serial")
        if self.epoch > 1 and e.site not in self.sites:  # enrolled before, perhaps, and the backup had lost it
            self.sites_pending_receipts.add(e.site)
        self.sites[e.site] = e
        self.policies[e.site] = e.envelope
        self.requests.add(e.envelope)
        self.revoked_sites.discard(e.site)

    def _issued(self, e: Issued) -> None:
        if e.site not in self.sites or e.site in self.revoked_sites:
            raise InvalidEntryError("a certificate is for a site that is enrolled and not barred")
        if not _NUMBER.fullmatch(e.number) or e.number in self.issued:
            raise InvalidEntryError("not a certificate's number in hexadecimal, or used before")
        if len(e.certificate) != 32 or not e.not_after > 0:
            raise InvalidEntryError("a certificate has a SHA-256 and an end")
        self.issued[e.number] = e

    def _revoked(self, e: Revoked) -> None:
        if not ID.fullmatch(e.why):
            raise InvalidEntryError("why is a short word")
        if e.site not in self.sites or e.site in self.revoked_sites:
            raise InvalidEntryError("the site is not enrolled, or barred already")
        known = self.issued.get(e.number)
        if not e.number:
            self.revoked_sites.add(e.site)
            self.revoked.update(number for number, issued in self.issued.items() if issued.site == e.site)
        elif known is None or known.site != e.site or e.number in self.revoked:
            raise InvalidEntryError("that certificate was not issued to the site, or is revoked already")
        else:
            self.revoked.add(e.number)

    def _amended(self, e: Amended) -> None:
        if e.site not in self.sites or e.site in self.revoked_sites or not e.number > self.amended.get(e.site, 0):
            raise InvalidEntryError(
                "the site is not enrolled or was revoked, or the amendment is not newer than the last"
            )
        self.policies[e.site], self.amended[e.site] = e.envelope, e.number

    def _opened(self, e: Opened) -> None:
        if e.account in self.accounts:
            raise InvalidEntryError("the account is open already")
        kind = e.account.rpartition("/")[2]
        if not ((kind == "rdp" and e.order >= 2) or (kind == "k" and e.order == 0)):
            raise InvalidEntryError("an account is of kind rdp with an order, or of kind k without")
        self.accounts[e.account] = Account(e)

    def _limit_set(self, e: LimitSet) -> None:
        account = self.accounts.get(e.account)
        if account is None:
            raise InvalidEntryError("no such account")
        opened, stated = account.opened, e.epsilon or str(e.limit)  # what persons sign is what they understand
        if not (_says(e, opened) if opened.order else not e.epsilon):
            raise InvalidEntryError("a limit of kind rdp is what its epsilon allows, and one of kind k has none")
        self._agree(e.serial, "limit", e.account, stated, 2 if e.limit > account.limit else 1)
        account.changed = e

    def _reserved(self, e: Reserved) -> None:
        account = self.accounts.get(e.account)
        if account is None or e.account.rpartition("/")[0] != e.site:
            raise InvalidEntryError("no such account of that site")
        if e.grant in self.grants or e.envelope in self.refused:
            raise InvalidEntryError("the grant exists already, or this very request was refused")
        if self.frozen(e.site):
            raise InvalidEntryError("nothing is granted before every site has presented its receipts")
        if e.site in self.revoked_sites:
            raise InvalidEntryError("nothing is granted to a site that was revoked")
        if not 0 < e.amount <= account.left:
            raise InvalidEntryError("the account would be overspent")
        account.held += e.amount
        self._grant(e, Grant(e))

    def _grant(self, e: Reserved | Recovered, grant: Grant) -> None:
        self.grants[e.grant] = grant
        if e.run:
            self.granted.add((e.site, e.run))

    def _refused(self, e: Refused) -> None:
        if not e.findings:
            raise InvalidEntryError("a refusal has a reason")
        if e.stage == "release" and e.envelope:
            self.envelopes.add(e.envelope)
        elif e.stage == "reservation" and not self.frozen(e.site):  # a frozen ledger refuses what it had granted too
            self.refused.add(e.envelope)

    def _sent(self, e: Sent) -> None:
        grant = self.open_grant(e.grant)
        held = grant.reserved
        if (e.site, e.run, e.mechanism) != (held.site, held.run, held.mechanism):
            raise InvalidEntryError("the grant is another's")
        if e.release in self.sent:
            raise InvalidEntryError("the release was sent before")
        if self.proposals.get(refusal(e.release), Proposal()).approvals:
            raise InvalidEntryError("a person has refused the release")
        if not grant.sent < e.used <= held.amount:
            raise InvalidEntryError("the grant does not cover the release")
        self.sent[e.release] = e
        grant.sent = e.used

    def _admitted(self, e: Admitted) -> None:
        grant = self.open_grant(e.grant)
        if bool(e.run) is not (e.round >= 1):
            raise InvalidEntryError("a release of a run has a round, and no other has")
        held = grant.reserved
        if (e.site, e.run, e.mechanism) != (held.site, held.run, held.mechanism):
            raise InvalidEntryError("the grant is another's")
        if e.site in self.revoked_sites:
            raise InvalidEntryError("nothing is admitted of a site that was revoked")
        if e.release in self.releases or e.envelope in self.envelopes:
            raise InvalidEntryError("the release was reviewed before")
        if not grant.used < e.used <= held.amount or (e.run and e.round <= grant.last_round):
            raise InvalidEntryError("the grant does not cover the release")
        grant.used, grant.last_round, grant.claim = e.used, e.round, e.claim
        self.releases[e.release] = e
        self.envelopes.add(e.envelope)
        if e.run:
            self.updates.add((e.run, e.round, e.site))

    def _spent(self, e: Spent) -> None:
        grant = self.open_grant(e.grant)
        if not max(grant.used, grant.sent, 1) <= e.used <= grant.reserved.amount:
            raise InvalidEntryError("what is spent lies between what left and what was reserved")
        if bool(e.envelope) is not (e.used < grant.reserved.amount):
            raise InvalidEntryError("something is given back on the site's signed word, and only then")
        self._close(grant, e.used)

    def _expired(self, e: Expired) -> None:
        grant = self.open_grant(e.grant)
        self._close(grant, grant.reserved.amount)

    def _freed(self, e: Freed) -> None:
        grant = self.open_grant(e.grant)
        if grant.used or grant.sent:
            raise InvalidEntryError("something was released under the grant; it cannot be freed")
        self._close(grant, 0)

    def _close(self, grant: Grant, used: int) -> None:
        account = self.accounts[grant.reserved.account]
        account.held -= grant.reserved.amount
        account.spent += used
        grant.state = "spent" if used else "freed"

    def _round_closed(self, e: RoundClosed) -> None:
        if e.round != self.rounds.get(e.run, 0) + 1:
            raise InvalidEntryError("rounds close one after the other")
        if e.sites != sorted(set(e.sites)) or len(e.model) != 32:
            raise InvalidEntryError("the sites of a round are sorted, each once, and a model has a SHA-256")
        if not e.sites or not all((e.run, e.round, site) in self.updates for site in e.sites):
            raise InvalidEntryError("the round counts a site without an admitted update")
        self.rounds[e.run] = e.round
        self.aggregated.update((e.run, e.round, site) for site in e.sites)

    def _restored(self, e: Restored) -> None:
        if (e.epoch, e.size) != (self.epoch + 1, self.size) or len(e.root) != 32 or not e.nonce:
            raise InvalidEntryError("an epoch follows the one before, where the backup ends")
        self.epoch, self.restored_at, self.nonce = e.epoch, self.size, e.nonce
        self.sites_awaited = set(self.sites) - self.revoked_sites
        self.sites_pending_receipts, self.recovered = set(self.revoked_sites), Counter()

    def _owes_receipts(self, site: str) -> bool:
        return site in (self.sites_awaited | self.sites_pending_receipts) - self.revoked_sites

    def _recovered(self, e: Recovered) -> None:
        account, owner = self.accounts.get(e.account), e.account.rpartition("/")[0]
        if not self._owes_receipts(e.site) or account is None or owner != e.site:
            raise InvalidEntryError("only after a restore, and only into the site's own account")
        if e.grant in self.grants or e.envelope in self.refused or e.amount <= 0:
            raise InvalidEntryError("the grant is known, was refused, or is for nothing")
        account.spent += e.amount  # even beyond the limit: it is what was granted before the restore
        self._grant(e, Grant(e, "spent", e.amount))
        self.recovered[e.site] += 1

    def _presented(self, e: Presented) -> None:
        if not self._owes_receipts(e.site) or e.nonce != self.nonce:
            raise InvalidEntryError("nothing is awaited from that site after this restore")
        if e.grants != self.recovered[e.site]:
            raise InvalidEntryError("another number of lost grants than were recovered")
        self.sites_awaited.discard(e.site)
        self.sites_pending_receipts.discard(e.site)

    def _waived(self, e: Waived) -> None:
        if e.site not in self.sites_awaited:
            raise InvalidEntryError("nothing is awaited from that site")
        restore, before = waiver(self.epoch, self.nonce), str(self.epoch)  # what ledgers of before signed: the number
        new = self.agreeing(e.serial, "waive", e.site, restore) or not self.agreeing(
            e.serial, "waive", e.site, before
        )
        self._agree(e.serial, "waive", e.site, restore if new else before, 2)
        for grant in self.grants.values():
            if grant.state == "held" and grant.reserved.site == e.site:
                self._close(grant, grant.reserved.amount)
        for account in self.accounts.values():  # what it holds receipts of is unknown, so all of it is spent
            if account.opened.account.rpartition("/")[0] == e.site:
                account.spent += max(0, account.left)
        self.sites_awaited.discard(e.site)


def waiver(epoch: int, nonce: str) -> str:
    """Which restore a waiver is for, as persons sign it: a second restore of one backup has the same number."""
    return f"{epoch}-{nonce}"


def _says(e: LimitSet, opened: Opened) -> bool:
    """Is the limit what its epsilon allows at the account's delta and order?"""
    try:
        epsilon = float(e.epsilon)
        return repr(epsilon) == e.epsilon and e.limit == allowance(epsilon, float(opened.delta), opened.order)
    except ValueError:
        return False


_APPLY: Final[Mapping[type[Entry], Callable[[State, Any], None]]] = MappingProxyType(
    {
        Admitted: State._admitted,
        Amended: State._amended,
        Appointed: State._appointed,
        Approved: State._approved,
        Dismissed: State._dismissed,
        Enrolled: State._enrolled,
        Expired: State._expired,
        Freed: State._freed,
        Issued: State._issued,
        LimitSet: State._limit_set,
        Opened: State._opened,
        Presented: State._presented,
        Recovered: State._recovered,
        Refused: State._refused,
        Requested: State._requested,
        Reserved: State._reserved,
        Restored: State._restored,
        Revoked: State._revoked,
        RoundClosed: State._round_closed,
        Sent: State._sent,
        Spent: State._spent,
        Waived: State._waived,
    }
)
