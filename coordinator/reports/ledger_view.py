"""The ledger's entries as inputs of reports, each part computed once, and only when a report uses it. Pure.

Reports over everything need the state of all entries, computed in one pass: balances, their history, the time of each
grant. A report on one release needs a handful of entries. They are found by their bytes, without decoding the others:
a name in an entry is literal (CBOR text), and an entry ends with its kind. The index is not used: it is an unsigned
cache, and a certificate must not miss an entry.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from policies.audit.display import accounts_json, entry_json
from policies.ledger import cbor
from policies.ledger.entries import (
    Admitted,
    Amended,
    Enrolled,
    Entry,
    Opened,
    Record,
    Recovered,
    Reserved,
    Revoked,
    RoundClosed,
    Waived,
    decode,
)
from policies.ledger.state import State

Moment = tuple[int, int, int, int]  # time, spent, held, limit
Placed = tuple[int, Record]  # a record and its number


def _tails(*kinds: str) -> tuple[bytes, ...]:
    """How entries of these kinds end (:func:`policies.ledger.entries.encode`)."""
    return tuple(cbor.encode("type") + cbor.encode(kind) for kind in kinds)


_PAID: Final = _tails("reserved", "recovered")
_BEGUN: Final = _tails("enrolled", "opened", "revoked")  # and what ended
_SIGNED: Final = _tails("enrolled", "amended")
_REFUSED: Final = _tails("refused")


@dataclass(slots=True)
class LedgerHistory:
    """The ledger state, the history of each account, and the time of each grant."""

    state: State = field(default_factory=State)
    history: defaultdict[str, list[Moment]] = field(default_factory=lambda: defaultdict(list))
    asked: dict[str, int] = field(default_factory=dict)  # grant -> seconds since 1970

    def take(self, record: Record) -> None:
        """One more record.

        Raises:
            InvalidEntryError: it breaks the ledger.
        """
        self.state.apply(record)
        entry = record.entry
        if isinstance(entry, Reserved | Recovered):
            self.asked[entry.grant] = record.at
        for name in self._touched(entry):
            account, so_far = self.state.accounts[name], self.history[name]
            now = (account.spent, account.held, account.limit)
            if not so_far or so_far[-1][1:] != now:
                so_far.append((record.at, *now))

    def _touched(self, entry: Entry) -> list[str]:
        """The accounts that an entry may change."""
        if isinstance(entry, Waived):
            return [name for name in self.state.accounts if name.rpartition("/")[0] == entry.site]
        grant = self.state.grants.get(getattr(entry, "grant", ""))
        name = getattr(entry, "account", "") or (grant.reserved.account if grant else "")
        return [name] if name in self.state.accounts else []


class LedgerView:
    """The entries of one ledger as of one head, and what follows from them."""

    def __init__(self, entries: Sequence[bytes], envelopes: Sequence[bytes]) -> None:
        """Nothing is decoded yet."""
        self.entries, self._envelopes = entries, envelopes

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """All of them."""
        return tuple(decode(body) for body in self.entries)

    @cached_property
    def fold(self) -> LedgerHistory:
        """Of all of them.

        Raises:
            InvalidEntryError: they do not fold.
        """
        fold = LedgerHistory()
        for record in self.records:
            fold.take(record)
        return fold

    @cached_property
    def accounts(self) -> list[dict[str, Any]]:
        """Each account as it is now."""
        return accounts_json(self.fold.state)

    @cached_property
    def grants(self) -> Mapping[str, list[tuple[int, Any]]]:
        """Account -> when each of its grants was asked for, and the grant, in their order."""
        found: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        for name, grant in self.fold.state.grants.items():
            found[grant.reserved.account].append((self.fold.asked[name], grant))
        return found

    @cached_property
    def refused(self) -> list[dict[str, Any]]:
        """Every refusal, oldest first; no other entry is decoded."""
        return [entry_json(seq, record) for seq, record in self._ending(_REFUSED)]

    @cached_property
    def places(self) -> Mapping[str, set[int]]:
        """Where the entries are that releases rest on: by the release or run, the grant, the site."""
        places: defaultdict[str, set[int]] = defaultdict(set)
        for seq, record in enumerate(self.records):
            entry = record.entry
            if isinstance(entry, Admitted):
                places[f"name {entry.run or entry.release}"].add(seq)
            elif isinstance(entry, RoundClosed):
                places[f"name {entry.run}"].add(seq)
            elif isinstance(entry, Reserved | Recovered):
                places[f"grant {entry.grant}"].add(seq)
            elif isinstance(entry, Enrolled | Revoked):
                places[f"site {entry.site}"].add(seq)
            elif isinstance(entry, Opened):
                places[f"site {entry.account.rpartition('/')[0]}"].add(seq)
        return places

    def about(self, name: str) -> list[Placed]:
        """All that may bear on one release or run, in order: more than it rests on, and nothing is missing."""
        letters = name.encode()
        found = {seq: decode(body) for seq, body in enumerate(self.entries) if letters in body}
        grants = {r.entry.grant.encode() for r in found.values() if isinstance(r.entry, Admitted)}
        for seq, body in enumerate(self.entries):
            paid = body.endswith(_PAID) and any(grant in body for grant in grants)
            if seq not in found and (paid or body.endswith(_BEGUN)):
                found[seq] = decode(body)
        return sorted(found.items())

    def policies(self) -> dict[str, bytes]:
        """Site -> the SHA-256 of the envelope with its policy of today."""
        newest: dict[str, bytes] = {}
        for _, record in self._ending(_SIGNED):
            if isinstance(record.entry, Enrolled | Amended):
                newest[record.entry.site] = record.entry.envelope
        return newest

    def _ending(self, tails: tuple[bytes, ...]) -> Iterator[Placed]:
        return ((seq, decode(body)) for seq, body in enumerate(self.entries) if body.endswith(tails))

    @cached_property
    def envelopes(self) -> Mapping[bytes, bytes]:
        """SHA-256 -> sealed statement."""
        return {hashlib.sha256(raw).digest(): raw for raw in self._envelopes}
