"""Check a release certificate: its entries are in the ledger, and support what it says. Pure.

Its facts are derived from the entries and statements that it rests on, by the same function when it is made and when
it is checked; none can be stronger than what the ledger admitted.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from policies.accounting.claims import RELATION, UNIT, assumption
from policies.accounting.rdp import NANO, cost, epsilon_nano
from policies.audit.auditor import open_envelope, out_of_time
from policies.audit.certificate import FIRST, FORM, Certificate, ProvenEntry
from policies.ledger.ed25519 import is_owned
from policies.ledger.entries import (
    Admitted,
    Enrolled,
    Entry,
    Opened,
    Record,
    Recovered,
    Reserved,
    Revoked,
    RoundClosed,
    decode,
)
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import (
    Checkpoint,
    CompactRange,
    LedgerCheckpointError,
    leaf_hash,
    open_checkpoint,
    verify_inclusion,
)
from policies.review.rules import level_of
from policies.statements import Release, StatementError, claim_from, claim_json, menu_of, parse
from protos.common.canonical_json import canonical
from protos.common.text import printable

# What each level promises, as every certificate prints it, and nothing stronger.
MEANINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "A": "(epsilon, delta)-differential privacy for each patient",
        "A*": "(epsilon, delta)-differential privacy for each patient, if the stated number of sites are honest",
        "B": "k distinct patients behind every image, by components that do not depend on them",
        "C": "empirical only: tested by attacks, without a guarantee",
    }
)


def check(found: Certificate, now: int | None = None) -> Checkpoint:
    """Check that the ledger under the checkpoint holds the certificate's evidence, and that the evidence supports it.

    Args:
        found: the certificate.
        now: seconds since 1970, by the verifier's clock; None: the times of its entries are not judged.
    Returns:
        The ledger's head that the certificate was made under.
    Raises:
        ExportError: with the first reason.
    """
    try:
        head = open_checkpoint(found.checkpoint, found.public)
    except LedgerCheckpointError as error:
        raise ExportError(str(error)) from None
    if head.origin != found.origin:
        raise ExportError("the checkpoint is another ledger's")
    if not is_owned(found.public):
        raise ExportError("the ledger's key is not an Ed25519 key of one owner: others can sign with it, too")
    for s in found.shown:
        if not verify_inclusion(leaf_hash(s.entry), s.seq, head.size, s.proof, head.root):
            raise ExportError(f"entry {s.seq} is not the ledger's: its proof does not lead to the signed root")
    try:
        records = lines(found.shown)
        _in_time(records, now)
        derived = derive(found.facts.get("subject"), records, found.envelopes, found.form)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(str(error) or "the entries do not make a release") from None
    if canonical(dict(derived)) != canonical(dict(found.facts)):
        raise ExportError("the certificate says something else than the entries that it rests on")
    return head


def _in_time(records: Sequence[tuple[int, Record]], now: int | None) -> None:
    latest = 0
    for seq, record in records:
        if now is not None and (fault := out_of_time(record.at, latest, now)):
            raise ExportError(f"entry {seq}: {fault}")
        latest = max(latest, record.at)


def lines(shown: Sequence[ProvenEntry]) -> list[tuple[int, Record]]:
    """The records, in their order.

    Raises:
        ExportError: not in order, each once, or not records.
    """
    if [s.seq for s in shown] != sorted({s.seq for s in shown}):
        raise ExportError("the entries are not in their order, each once")
    return [(s.seq, decode(s.entry)) for s in shown]


def check_against_export(found: Certificate, export: Export) -> list[Mapping[str, Any]]:
    """Is the certificate one of the ledger whose export was verified? Nothing that bears on it may be left out.

    Returns:
        What was revoked of its sites until the end of the export, also after the certificate was made; see
        :func:`revoked_of`. It changes nothing of what the certificate says, and whoever reads it has to know.
    Raises:
        ExportError: another key, other entries or a head that the ledger never had; a stronger level than all of a
            run's updates have.
    """
    if export.public != found.public:
        raise ExportError("the certificate is signed by another key than the ledger's")
    head = open_checkpoint(found.checkpoint, found.public)
    size, has = head.size, len(export.entries)
    if size > has:
        raise ExportError(f"the certificate is of a ledger of {size} entries, the export has {has}: take a newer one")
    tree = CompactRange()
    for raw in export.entries[:size]:
        tree.append(leaf_hash(raw))
    if tree.root() != head.root:
        raise ExportError("the certificate was made under a head that this ledger never had")
    if any(export.entries[s.seq] != s.entry for s in found.shown):
        raise ExportError("the certificate rests on other entries than the ledger's")
    everything = [(seq, decode(raw)) for seq, raw in enumerate(export.entries)]
    records = everything[:size]
    wanted = supporting_entries(found.facts["subject"], records, found.form)
    if [seq for seq, _ in wanted] != [s.seq for s in found.shown]:
        raise ExportError("the certificate leaves out entries that it should rest on")
    if found.facts["kind"] == "model":
        updates = {r.entry.level for _, r in _updates(str(found.facts["subject"]), records)}
        if max(updates) != found.facts["level"]:  # A < A* < B < C
            raise ExportError("an update of the run has a weaker level than the certificate says")
    sites = {r.entry.site: seq for seq, r in reversed(wanted) if isinstance(r.entry, Enrolled)}
    return revoked_of([(seq, r) for seq, r in everything if _ends(r, seq, sites)])


def _ends(record: Record, seq: int, since: Mapping[str, int]) -> bool:
    """Does it revoke one of these sites, or a certificate of it, after the entry that enrolled it?"""
    return isinstance(e := record.entry, Revoked) and seq > since.get(e.site, seq)


def revoked_of(records: Sequence[tuple[int, Record]]) -> list[Mapping[str, Any]]:
    """What was revoked, oldest first: site, number ("" the site itself), why, entry, at in seconds since 1970."""
    return [
        {"site": e.site, "number": e.number, "why": e.why, "entry": seq, "at": r.at}
        for seq, r in records
        if isinstance(e := r.entry, Revoked)
    ]


def revoked_words(one: Mapping[str, Any]) -> str:
    """One of them for people, as a sentence."""
    what = f"the certificate {one['number']} of {one['site']}" if one["number"] else f"the site {one['site']}"
    try:
        when = f"{dt.datetime.fromtimestamp(one['at'], dt.UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        when = f"second {one['at']}"
    why = printable(one["why"])
    return f"{what} was revoked on {when}: {why} (entry {one['entry']})"


def _updates(run: str, records: Sequence[tuple[int, Record]]) -> list[tuple[int, Any]]:
    """The admitted updates that the closed rounds of a run count."""
    counted = {
        (e.round, site)
        for _, r in records
        if isinstance(e := r.entry, RoundClosed) and e.run == run
        for site in e.sites
    }
    return [
        (seq, r)
        for seq, r in records
        if isinstance(e := r.entry, Admitted) and e.run == run and (e.round, e.site) in counted
    ]


def supporting_entries(
    subject: str, records: Sequence[tuple[int, Record]], form: str = FORM
) -> list[tuple[int, Record]]:
    """The entries that a release, or the model of a run, rests on: in a ledger, or in what was shown of one.

    Args:
        subject: the release or run.
        records: in their order, with their places.
        form: of the certificate. The first one left out what was revoked of a site after it was enrolled.
    Raises:
        ExportError: the ledger has not admitted it.
    """
    closed = [(seq, r) for seq, r in records if isinstance(r.entry, RoundClosed) and r.entry.run == subject]
    if closed:
        last: dict[tuple[str, str], tuple[int, Record]] = {}  # a claim covers all before it under the same grant
        for seq, record in _updates(subject, records):
            last[record.entry.site, record.entry.grant] = (seq, record)
        admitted = sorted(last.values(), key=lambda pair: pair[0])
    else:
        admitted = [
            (seq, r)
            for seq, r in records
            if isinstance(e := r.entry, Admitted) and e.release == subject and not e.run
        ]
    if not admitted:
        raise ExportError("the ledger admitted no release of that name, and no run of that name closed a round")
    found = dict(closed)
    grants = {r.entry.grant for _, r in admitted if isinstance(r.entry, Admitted)}
    paid = [(s, r) for s, r in records if isinstance(r.entry, Reserved | Recovered) and r.entry.grant in grants]
    accounts = {r.entry.account for _, r in paid if isinstance(r.entry, Reserved | Recovered)}
    found |= dict(paid) | {s: r for s, r in records if isinstance(r.entry, Opened) and r.entry.account in accounts}
    for seq, record in admitted:
        site = getattr(record.entry, "site", "")
        enrolled = [(s, r) for s, r in records if isinstance(r.entry, Enrolled) and r.entry.site == site and s < seq]
        found |= dict([(seq, record), *enrolled[-1:]])
    if form != FIRST:
        since = {r.entry.site: seq for seq, r in sorted(found.items(), reverse=True) if isinstance(r.entry, Enrolled)}
        found |= {s: r for s, r in records if _ends(r, s, since)}
    if closed:  # every round counts its sites: without all of them an update could be left out
        found |= dict(closed)
    return sorted(found.items())


def derive(
    subject: object, records: Sequence[tuple[int, Record]], envelopes: Sequence[bytes], form: str = FORM
) -> Mapping[str, Any]:
    """Every fact of a certificate of this form, from the entries and statements that it rests on.

    Raises:
        ExportError: they do not make an admitted release.
    """
    if type(subject) is not str:
        raise ExportError("a certificate is about one release or run")
    sealed = {hashlib.sha256(raw).digest(): raw for raw in envelopes}
    wanted = supporting_entries(subject, records, form)
    if [s for s, _ in wanted] != [s for s, _ in records]:
        raise ExportError("the certificate holds an entry that it does not rest on")
    parts = [_part(seq, record, records, sealed) for seq, record in wanted if isinstance(record.entry, Admitted)]
    if {p["statement_sha256"] for p in parts} != {digest.hex() for digest in sealed}:
        raise ExportError("the certificate holds a statement that it does not rest on")
    _compose(parts)
    level = max(p["level"] for p in parts)  # the weakest: A < A* < B < C
    claims = [claim_from(p["claim"]) for p in parts]
    rounds = [(seq, r.entry) for seq, r in wanted if isinstance(r.entry, RoundClosed)]
    newest = {site: closed.round for _, closed in rounds for site in closed.sites}
    taken: dict[str, int] = {}
    for _, r in wanted:
        if isinstance(r.entry, Admitted) and r.entry.run:
            taken[r.entry.site] = max(r.entry.round, taken.get(r.entry.site, 0))
    if newest != taken:
        raise ExportError("the certificate leaves out a site's last update")
    if [closed.round for _, closed in rounds] != list(range(1, len(rounds) + 1)):
        raise ExportError("the certificate leaves out a round")
    if rounds:
        (seq, closed) = rounds[-1]
        made = {"kind": "model", "round": closed.round, "entry": seq, "artifact_sha256": closed.model.hex()}
    else:
        made = {
            "kind": "release",
            "round": 0,
            "entry": parts[0]["entry"],
            "artifact_sha256": parts[0]["artifact_sha256"],
        }
    revoked = {} if form == FIRST else {"revoked": revoked_of(wanted)}
    return {
        **made,
        **revoked,
        "subject": subject,
        "sites": sorted({p["site"] for p in parts}),
        "mechanism": parts[0]["mechanism"],
        "level": level,
        "meaning": MEANINGS[level],
        "assumption": next(filter(None, map(assumption, claims)), ""),
        "parts": parts,
    }


def _compose(parts: Sequence[dict[str, Any]]) -> None:
    """Where one site had several grants in a run, each of its parts states the epsilon of all of them together.

    The ledger refuses a second grant of a site in a run; older ledgers may hold one. The patients are the same, so
    the divergences add up at the account's order (Mironov 2017, proposition 1). Where one has no epsilon, none has.
    """
    for site in {p["site"] for p in parts}:
        mine = [p for p in parts if p["site"] == site]
        if len(mine) == 1:
            continue
        told = [p["epsilon"] for p in mine]
        together: dict[str, Any] | None = None
        if all(told):
            if len({(e["delta"], e["order"]) for e in told}) != 1:
                raise ExportError("one site's part in a run was paid from accounts that do not add up")
            claims, order = [claim_from(p["claim"]) for p in mine], told[0]["order"]
            first = epsilon_nano(claims[0], float(told[0]["delta"]), order)
            nano = first + sum(cost(claim, order) for claim in claims[1:])
            together = {**told[0], "value": _decimal(nano), "grants": len(mine)}
        for part in mine:
            part["epsilon"] = together


def _decimal(nano: int) -> str:
    return f"{nano // NANO}.{nano % NANO:09d}"


def _one(records: Sequence[tuple[int, Record]], what: str, fits: Any) -> tuple[int, Entry]:
    """The newest record of its kind."""
    found = [(seq, r.entry) for seq, r in records if fits(r.entry)]
    if not found:
        raise ExportError(f"the certificate lacks {what}")
    return found[-1]


def _part(
    seq: int, record: Record, records: Sequence[tuple[int, Record]], sealed: Mapping[bytes, bytes]
) -> dict[str, Any]:
    """What one admission says, with the statement behind it and what it cost."""
    entry = record.entry
    assert isinstance(entry, Admitted)
    _, paid = _one(
        records, "the grant that paid", lambda e: isinstance(e, Reserved | Recovered) and e.grant == entry.grant
    )
    assert isinstance(paid, Reserved | Recovered)
    _, opened = _one(records, "the account that paid", lambda e: isinstance(e, Opened) and e.account == paid.account)
    before = [(s, r) for s, r in records if s < seq]
    _, enrolled = _one(before, "the site's enrolment", lambda e: isinstance(e, Enrolled) and e.site == entry.site)
    assert isinstance(opened, Opened)
    assert isinstance(enrolled, Enrolled)
    if (paid.site, paid.run, paid.mechanism) != (entry.site, entry.run, entry.mechanism) or entry.used > paid.amount:
        raise ExportError("the grant is another's, or does not cover the release")
    said = _said(entry, enrolled, sealed)
    return {
        "release": entry.release,
        "site": entry.site,
        "entry": seq,
        "admitted_at": record.at,
        "mechanism": entry.mechanism,
        "level": entry.level,
        "claim": claim_json(said.claim),
        "epsilon": _epsilon(entry, opened, said),
        "artifact_sha256": entry.artifact.hex(),
        "artifact_type": said.artifact_type,
        "statement_sha256": entry.envelope.hex(),
        "modality": said.modality,
        "components": dict(said.components),
        "vetted_against": said.vetted_against,
        "k_tried": list(menu_of(said.menu)),
        "reid_rate": said.reid_rate,
        "vetting_power": said.vetting_power,
        "approvals": dict(said.approvals),
        "reader": entry.reader,
    }


def _said(entry: Admitted, enrolled: Enrolled, sealed: Mapping[bytes, bytes]) -> Release:
    """The site's statement, under the key that the ledger enrolled, found to say what the entry says."""
    raw = sealed.get(entry.envelope)
    if raw is None:
        raise ExportError("the site's sealed statement is missing")
    try:
        said = parse(open_envelope(raw, enrolled.sign_key))
    except StatementError as error:
        raise ExportError(str(error)) from None
    names = ("release", "grant", "site", "run", "round", "mechanism", "reader")
    if not isinstance(said, Release) or any(getattr(said, n) != getattr(entry, n) for n in names):
        raise ExportError("the site's statement is about something else than the entry")
    if canonical(claim_json(said.claim)) != entry.claim or said.artifact_sha256 != entry.artifact.hex():
        raise ExportError("the site's statement makes another claim than the entry, or is about another artifact")
    if entry.level != level_of(said):
        raise ExportError(f"the entry says level {entry.level}, and the site's statement makes it {level_of(said)}")
    return said


def _epsilon(entry: Admitted, opened: Opened, said: Release) -> dict[str, Any] | None:
    """The epsilon of record, recomputed (P11), with what it means nothing without (P1); None where there is none."""
    if entry.level not in ("A", "A*"):
        return None
    nano = epsilon_nano(said.claim, float(opened.delta), opened.order)
    if nano != said.epsilon_nano:
        raise ExportError("the epsilon that the site declared is not the one that its claim gives")
    return {"value": _decimal(nano), "delta": opened.delta, "unit": UNIT, "relation": RELATION, "order": opened.order}


def summary(
    found: Certificate, head: Checkpoint, revoked: Sequence[Mapping[str, Any]] | None = None
) -> Iterator[str]:
    """What a certificate says that holds, for a terminal.

    Args:
        found: the certificate.
        head: the ledger's, that it was made under.
        revoked: of :func:`check_against_export`; None where there is no export: then what the certificate itself
        tells.
    """
    facts = found.facts
    yield f"certificate of {facts['kind']} {facts['subject']}, of {', '.join(facts['sites'])}"
    yield f"  level {facts['level']}: {facts['meaning']}"
    if facts["assumption"]:
        yield f"  {facts['assumption']}"
    for one in facts.get("revoked", ()) if revoked is None else revoked:
        after = "; after this certificate was made" if one["entry"] >= head.size else ""
        yield f"  REVOKED: {revoked_words(one)}{after}"
    if revoked is None and found.form == FIRST:
        yield "  its form is an older one, which does not tell what was revoked: give --from with the ledger's export"
    for part in {p["site"]: p for p in facts["parts"]}.values():
        if part["epsilon"]:
            e = part["epsilon"]
            several = f"; {e['grants']} grants of this run together" if "grants" in e else ""
            yield (
                f"  {part['site']}: epsilon {e['value']} at delta {e['delta']} per {e['unit']}, {e['relation']}; "
                f"Renyi filter of order {e['order']}{several}"
            )
        elif part["claim"]["kind"] == "k-anonymous":
            yield f"  {part['site']}: k = {part['claim']['k']}; there is no epsilon, and it is not 0"
    yield f"  artifact sha256 {facts['artifact_sha256']}"
    yield f"  entry {facts['entry']} of {head.size} of the ledger {head.origin}, root {head.root.hex()}"
    yield f"  key  {found.fingerprint}"
