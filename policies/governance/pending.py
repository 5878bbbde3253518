"""What waits for people's signatures: in which words, under which serial, and who has not signed yet.

Both sides list it with short numbers (:mod:`protos.operations.short_numbers`), and ``ledger sign`` takes a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from policies.governance import decisions
from policies.ledger.approvals import Proposal
from policies.ledger.entries import InvalidEntryError, proposal
from policies.ledger.state import State
from policies.ledger.store import Store
from policies.statements import Approval, Request

OF_OTHERS = frozenset(
    {"amend", "enrol", "refuse", "release", "run"}
)  # what waits for these is more than an open proposal


@dataclass(frozen=True, slots=True)
class Pending:
    """One thing that waits. All texts are for the operator: no patient and no secret is in them."""

    action: str  # these four are what a person signs
    subject: str
    value: str
    serial: str
    name: str  # what it is, in a few words; here and in commands NUMBER stands for the number
    missing: tuple[str, ...]  # roles that have not approved; nothing: it can be carried out
    command: str  # what carries it out then
    look: str = ""  # what shows it to a person; "": the words are all
    details: tuple[str, ...] = ()  # what a person reads before signing
    fingerprint: str = ""  # what an approver compares by telephone, and types; "": nothing
    number: int = 0  # 0: it has none

    @property
    def key(self) -> str:
        """What its number belongs to: exactly these words."""
        return f"{self.action} {self.subject} {self.value}" + (f" {self.serial}" if self.action != "enrol" else "")

    def shown(self, text: str) -> str:
        """One of its texts, with the number."""
        return text.replace("NUMBER", str(self.number))

    def next_step(self, program: str) -> tuple[str, str, str]:
        """What ``status`` says of it: a name, what is missing, and what to type."""
        name = self.shown(self.name)
        if not self.missing:
            return name, "it is approved, and can be carried out", self.shown(self.command)
        words = f"{program} ledger sign {self.number} --person NAME --key FILE"
        look = f"{self.shown(self.look)}; then each of them: " if self.look else ""
        return name, f"{' and '.join(self.missing)} must approve it", f"{look}{words}"


def numbered(found: Sequence[Pending], numbers: Callable[[Sequence[str]], dict[str, int]]) -> list[Pending]:
    """The same with their numbers, in the order of these; ``numbers``: by key."""
    of = numbers([one.key for one in found])
    return sorted((replace(one, number=of[one.key]) for one in found), key=lambda one: one.number)


def choose(found: Sequence[Pending], word: str, program: str, action: str = "") -> Pending:
    """The one thing that a number stands for.

    Args:
        found: what waits.
        word: the number, as typed.
        program: whose ``status`` prints numbers, for the sentence.
        action: of which kind it must be; "": any.
    Raises:
        InvalidEntryError: nothing waits under that number, or something of another kind.
    """
    some = [one for one in found if one.number and str(one.number) == word.lstrip("0")]
    if not some:
        raise InvalidEntryError(
            f"nothing waits under the number {word} (any more): `{program} status` shows what waits"
        )
    if action and some[0].action != action:
        raise InvalidEntryError(f"{word} is {some[0].shown(some[0].name)}: `{program} status` shows what waits")
    return some[0]


def open_proposals(store: Store, program: str) -> Iterator[Pending]:
    """What was asked for, or approved by somebody, and is not carried out; the oldest first.

    Args:
        store: the ledger, to read.
        program: whose commands carry it out.
    """
    state = store.state
    for serial in dict.fromkeys([*state.asked, *state.proposals]):
        said = words_of(state, store.envelope, serial)
        if said is None or state.proposals.get(serial, Proposal()).used or said.action in OF_OTHERS:
            continue
        given = state.approvals(serial, said.action, said.subject, said.value)
        asked = state.asked.get(serial)
        typed = [said.subject, said.value] if said.action in ("appoint", "limit") else [said.subject]
        by = f"asked for by {asked.person}" if asked else "nobody asked for it here: it was signed at once"
        yield Pending(
            said.action,
            said.subject,
            said.value,
            serial,
            f"proposal NUMBER, {said.action} {said.subject}",
            missing_roles(state, said, given),
            f"{program} ledger {said.action} {' '.join(typed)} --serial {serial}",
            details=(by, f"approved by: {', '.join(sorted(given)) or 'nobody yet'}"),
        )


def words_of(state: State, envelope: Callable[[bytes], bytes | None], serial: str) -> Approval | Request | None:
    """The words of a proposal: of the request, or of the first approval where nobody asked for it here."""
    asked, kept = state.asked.get(serial), state.proposals.get(serial)
    digests = [asked.envelope] if asked is not None else []
    digests += [digest for _, digest in kept.approvals.values()] if kept is not None else []
    for digest in digests:
        try:
            return decisions.said_by(envelope(digest) or b"")
        except InvalidEntryError:
            continue
    return None


def missing_roles(state: State, said: Approval | Request, given: Collection[str]) -> tuple[str, ...]:
    """Who must approve these words still: every role in office; or, of a limit that is lowered, any one of them.

    ``given``: the roles that have.
    """
    office = state.office()
    if said.action == "limit" and lowers(state, said.subject, said.value):
        return () if given else (" or ".join(sorted(office)),)
    return tuple(sorted(office - set(given)))


def lowers(state: State, account: str, value: str) -> bool:
    """Whether a budget as signed is not above the account's limit of today."""
    known = state.accounts.get(account)
    if known is None:
        return False
    try:
        return float(value) <= (float(known.epsilon) if known.opened.order else known.limit)
    except ValueError:
        return False


def serial_for(state: State, words: tuple[str, str, str], stem: str) -> str:
    """The serial under which people sign these words: the one that has most approvals of them, else a free one.

    Args:
        state: the fold.
        words: action, subject, value.
        stem: of a free one.
    """
    asked = {serial: entry.proposal for serial, entry in state.asked.items()}
    begun = {serial for serial, kept in state.proposals.items() if not kept.used}
    fits = [
        serial
        for serial in dict.fromkeys([*asked, *state.proposals])
        if asked.get(serial, proposal(serial, *words)) == proposal(serial, *words)
        and (serial in begun or serial not in state.proposals)
        and (serial in asked or state.agreeing(serial, *words))
    ]
    if fits:
        return max(fits, key=lambda serial: len(state.agreeing(serial, *words)))
    free = (stem if not again else f"{stem}-{again}" for again in itertools.count())
    return next(serial for serial in free if serial not in asked and serial not in state.proposals)
