"""Inputs of every report: one export of the ledger, and the controller's own particulars. Pure.

The facts of a release are those of its certificate: derived from its entries and the site's sealed statement by
:func:`policies.audit.certificate_check.derive`, which recomputes every epsilon (P11). A report is made of nothing
else.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from coordinator.claim_descriptions import describe_claim, evidence
from coordinator.explanations import LEVELS, MECHANISMS, RELATIONS, epsilon_text, format_rounded_up, utc
from coordinator.reports.document import ReportError, ReportSource
from coordinator.reports.ledger_view import LedgerView, Placed
from policies.accounting.claims import RELATION, UNIT
from policies.audit.auditor import open_envelope
from policies.audit.certificate_check import derive, supporting_entries
from policies.ledger.entries import Admitted, InvalidEntryError, Record, RoundClosed, decode
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import open_checkpoint
from policies.ledger.state import State
from policies.review.policy import Policy, PolicyError
from policies.review.policy import parse as parse_policy
from policies.statements import Amendment, Enrolment, parse

UNIT_OF: Final[Mapping[str, str]] = {"unit": UNIT, "relation": RELATION}  # of every epsilon of a ledger
_LONGEST: Final = 2_000
_KINDS: Final = frozenset({"", "Government", "Industry", "Nonprofit"})  # those of the deployments registry's schema
_DAY: Final = re.compile(r"(\d{4}-\d{2}-\d{2})?")


@dataclass(frozen=True, slots=True)
class Particulars:
    """``particulars.toml``: the controller's particulars, which no ledger holds; each is a text, and optional."""

    controller: str = ""
    contact: str = ""
    officer: str = ""  # data-protection officer
    purposes: str = ""
    legal_basis: str = ""
    subjects: str = ""  # categories of data subjects, beyond "patients"
    recipients: str = ""
    transfers: str = ""
    retention: str = ""
    necessity: str = ""
    consultation: str = ""
    residual_risk: str = ""
    intended_use: str = ""
    licence: str = ""
    region: str = ""
    curator_type: str = ""  # Government | Industry | Nonprofit
    authors: str = ""  # of a registry entry
    published: str = ""  # YYYY-MM-DD; left out: the day of the admission
    url: str = ""

    def __post_init__(self) -> None:
        """Short texts."""
        wrong = [f.name for f in fields(self) if len(getattr(self, f.name)) > _LONGEST]
        if wrong:
            raise ReportError(f"{', '.join(wrong)}: each is a text of at most {_LONGEST} characters")
        if self.curator_type not in _KINDS or not _DAY.fullmatch(self.published):
            raise ReportError("curator_type is Government, Industry or Nonprofit; published is a day, 2026-01-31")


@dataclass(frozen=True, slots=True)
class Item:
    """An admitted release, or the model of a federated run."""

    name: str
    facts: Mapping[str, Any]  # as in its certificate

    @property
    def parts(self) -> Sequence[Mapping[str, Any]]:
        """What it is made of: itself, or each site's last update under each of its grants."""
        parts: Sequence[Mapping[str, Any]] = self.facts["parts"]
        return parts

    @property
    def level(self) -> str:
        """Its claim level; of a model the weakest of its updates."""
        return str(self.facts["level"])

    @property
    def sites(self) -> str:
        """Whose patients are behind it."""
        return ", ".join(self.facts["sites"])

    @property
    def meaning(self) -> str:
        """What its level promises, as a sentence."""
        said = str(self.facts["meaning"])
        return f"At least {said}." if said.startswith("k ") else f"{said[0].upper()}{said[1:]}."

    @property
    def method(self) -> str:
        """How it was made, in words."""
        return MECHANISMS.get(self.facts["mechanism"], str(self.facts["mechanism"]))

    @property
    def claim(self) -> str:
        """What is promised, in one sentence; of a model that of the site that gave the most."""
        mine = [p["claim"] for p in self.parts if p["site"] == self.dearest["site"]]
        if len(mine) == 1:
            return describe_claim(mine[0])
        each = "; ".join(f"({n}) {describe_claim(claim)}" for n, claim in enumerate(mine, 1))
        return f"{len(mine)} uses of the same patients, under a grant each: {each}"

    @property
    def dearest(self) -> Mapping[str, Any]:
        """The part with the largest epsilon; the first one where there is none."""
        priced = [p for p in self.parts if p["epsilon"]]
        return max(priced, key=lambda p: float(p["epsilon"]["value"])) if priced else self.parts[0]

    @property
    def k(self) -> int | None:
        """Distinct patients behind each image; None where that is not promised, or void."""
        claim = self.parts[0]["claim"]
        return int(claim["k"]) if self.level == "B" and claim.get("kind") == "k-anonymous" else None

    @property
    def epsilon(self) -> str:
        """The largest epsilon with all that it means nothing without (P1), and what it stands on; "" without one."""
        said, given = format_epsilon(self.dearest["epsilon"]), str(self.facts["assumption"])
        return f"{said}; {given}" if said and given else said

    @property
    def remodelled(self) -> bool:
        """Whether it is patients' own heads with other faces: what leaves is then no synthetic image."""
        return bool(self.facts["mechanism"] == "remodel")

    @property
    def tested(self) -> str:
        """The measurements in the statement; "" if none was requested."""
        part = self.parts[0]
        if self.level != "C" and not (part["reid_rate"] or part["vetting_power"]):
            return ""
        return evidence(part["reid_rate"], part["vetting_power"], part["mechanism"])

    @property
    def strength(self) -> str:
        """One cell of a table: k, or epsilon, or that there is neither."""
        if self.k is not None:
            return f"k = {self.k}; there is no epsilon, and it is not 0"
        return self.epsilon or "no promise and no epsilon: what was tested stands behind it"


def format_epsilon(epsilon: Mapping[str, Any] | None) -> str:
    """An epsilon of a certificate, rounded up, with unit, relation, delta and order; "" without one."""
    if not epsilon:
        return ""
    where = f"delta {format_rounded_up(epsilon['delta'])} {per(epsilon)}"
    said = f"epsilon {epsilon_text(epsilon['value'])} at {where}; Rényi filter of order {epsilon['order']}"
    return said + together(epsilon)


def per(told: Mapping[str, Any]) -> str:
    """The unit and the relation of an epsilon, or of a ledger, in words."""
    return f"per {told['unit']}, {RELATIONS.get(told['relation'], told['relation'])}"


def bound(item: Item) -> str:
    """Behind the caption of a table in which epsilons stand bare; "" where it has none."""
    return f"; an epsilon is {per(item.dearest['epsilon'])}" if item.epsilon else ""


def together(epsilon: Mapping[str, Any]) -> str:
    """Behind an epsilon that several grants of one site in one run add up to; else ""."""
    return f" ({epsilon['grants']} grants together)" if "grants" in epsilon else ""


def level_words(level: str) -> tuple[str, str]:
    """A level's title and what it means for a board."""
    title, _, plain = LEVELS.get(level, ("Unknown level", "no promise", "This report knows no such level."))
    return title, plain


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """One ledger as of one signed head."""

    export: Export
    told: LedgerView  # what its entries say; each part is worked out when a report asks for it
    source: ReportSource
    made: dt.datetime
    federation: Policy | None
    policies: Mapping[str, Policy]  # each site's own, of today
    particulars: Particulars = field(default_factory=Particulars)

    @property
    def records(self) -> tuple[Record, ...]:
        """Every entry, decoded."""
        return self.told.records

    @property
    def state(self) -> State:
        """The fold of every entry.

        Raises:
            ReportError: they do not fold.
        """
        try:
            return self.told.fold.state
        except InvalidEntryError as error:
            raise ReportError(f"the ledger does not fold: {error}") from None

    def items(self) -> Iterator[Item]:
        """Every admitted release and every run's model, oldest first.

        Raises:
            ReportError: the ledger holds one that its own statement contradicts.
        """
        seen: set[str] = set()
        for record in self.records:
            entry = record.entry
            name = entry.run if isinstance(entry, RoundClosed) else ""
            name = entry.release if isinstance(entry, Admitted) and not entry.run else name
            if name and name not in seen:
                seen.add(name)
                yield self._item(name, self._placed(name))

    def item(self, name: str) -> Item:
        """One of them, without a look at what has nothing to do with it.

        Raises:
            ReportError: the ledger has admitted nothing of that name.
        """
        return self._item(name, self.told.about(name))

    def _placed(self, name: str) -> list[Placed]:
        places = self.told.places
        seqs = set(places[f"name {name}"])
        for seq in places[f"name {name}"]:
            entry = self.records[seq].entry
            if isinstance(entry, Admitted):
                seqs |= places[f"grant {entry.grant}"] | places[f"site {entry.site}"]
        return [(seq, self.records[seq]) for seq in sorted(seqs)]

    def _item(self, name: str, near: Sequence[Placed]) -> Item:
        try:
            wanted = supporting_entries(name, near)
            return Item(name, derive(name, wanted, self.behind(wanted)))
        except ExportError as error:
            raise ReportError(f"{name}: {error}") from None

    def behind(self, wanted: Sequence[Placed]) -> list[bytes]:
        """The sealed statements that entries of this kind rest on, in the order of their digests."""
        digests = {r.entry.envelope for _, r in wanted if isinstance(r.entry, Admitted)}
        return [self.told.envelopes[digest] for digest in sorted(digests) if digest in self.told.envelopes]


def books_of(raw: bytes, federation: str, made: dt.datetime, particulars: Particulars | None = None) -> ReportInputs:
    """The ledger of an export; nothing is folded before a report asks for it.

    Args:
        raw: the export, whose checkpoint is verified under its own key.
        federation: the federation's policy, TOML; "" where there is none at hand.
        made: when, for the report's foot.
        particulars: what the controller filled in.
    Raises:
        ExportError, ReportError: the export is not one, or a policy in it is none.
    """
    export = Export.parse(raw)
    head = open_checkpoint(export.checkpoint, export.public)
    told = LedgerView(export.entries, export.envelopes)
    until = utc(decode(export.entries[-1]).at) if export.entries else ""
    key = hashlib.sha256(export.public).hexdigest()
    source = ReportSource(head.origin, head.size, head.root.hex(), key, until, f"{made:%Y-%m-%d %H:%M}")
    policy = parse_policy(federation, "policy.toml") if federation else None
    return ReportInputs(export, told, source, made, policy, _policies(told), particulars or Particulars())


def _policies(told: LedgerView) -> dict[str, Policy]:
    """Each site's policy of today, as it signed it."""
    found: dict[str, Policy] = {}
    for site, digest in sorted(told.policies().items(), key=lambda pair: pair[1]):
        if digest not in told.envelopes:
            continue
        said = parse(open_envelope(told.envelopes[digest], None))  # its signature was verified when it was appended
        try:
            if isinstance(said, Enrolment | Amendment):
                found[site] = parse_policy(said.policy, f"policy of {site}")
        except PolicyError as error:
            raise ReportError(str(error)) from None
    return found
