"""``lazaret-verify``: re-derive an exported ledger offline, from its entries alone.

Needs only Python and ``cryptography``. It checks that the text is in its one form (so any changed byte is found), the
Merkle root under the signed checkpoint and under every head that a site cosigned, that every balance folds without an
overspend and no limit was raised by one person alone, that every envelope is signed by the site or person that the
ledger knows and says what its entry says, and it reviews every grant and every admission again under the site's own
signed policy.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from policies.audit import Auditor
from policies.claims import UNIT
from policies.export import Export, Unsound
from policies.merkle import BadCheckpoint, Checkpoint, cosigners, open_checkpoint

MAX_EXPORT: Final = 1 << 33


@dataclass(frozen=True, slots=True)
class Findings:
    """What a sound export says."""

    origin: str
    size: int
    root: str
    key: str  # SHA-256 of the public key, to compare with the one that the ledger's owner publishes
    accounts: dict[str, dict[str, Any]]
    grants: int
    releases: int
    refusals: int
    envelopes: int
    epoch: int
    witnesses: dict[str, int]  # site -> size of the newest head that it cosigned
    persons: dict[str, str]  # who may approve -> role and key: who they are is for people to check
    limits_set: list[str]  # every change of a limit, and who approved it
    sites: dict[str, dict[str, Any]]  # who approved the enrolment, and what became of the site and its certificates


def _heads(export: Export, since: str | None) -> tuple[Checkpoint, list[Checkpoint]]:
    """The signed head of an export, and the older ones that its entries must extend."""
    if export.checkpoint.partition("\n\n")[2].count("\n") != 1:
        raise Unsound("the head of an export bears one signature, the ledger's")
    digests = [hashlib.sha256(raw).digest() for raw in export.envelopes]
    if digests != sorted(set(digests)):
        raise Unsound("the envelopes are not in their one order, each once")
    try:
        head = open_checkpoint(export.checkpoint, export.public)
        witnessed = [open_checkpoint(note, export.public) for note in export.witnessed]
    except BadCheckpoint as error:
        raise Unsound(str(error)) from None
    try:
        given = [open_checkpoint(since, export.public)] if since is not None else []
    except BadCheckpoint as error:
        raise Unsound(f"the older checkpoint (--from), not the export: {error}") from None
    return head, witnessed + given


def _extended(head: Checkpoint, old: Checkpoint, own: Checkpoint | None) -> None:
    """Is an older head the ledger's own at that size?"""
    if old.size > head.size and old.origin == head.origin:
        raise Unsound(f"the older checkpoint covers {old.size} entries, the export {head.size}: it was cut short")
    if old != own:
        lost = f", or entries were lost before epoch {head.epoch}" if head.epoch > 1 else ""
        raise Unsound(f"the ledger does not extend the older checkpoint: its history was rewritten{lost}")


def verify(raw: bytes, since: str | None = None) -> Findings:
    """Check an export; with ``since``, also that it extends an older checkpoint of the same ledger.

    Raises:
        Unsound: it does not hold, with the first reason.
    """
    export = Export.parse(raw)
    head, older = _heads(export, since)
    auditor, heads = Auditor(head.origin, export.envelopes), dict[int, Checkpoint]()
    wanted = {old.size for old in older}
    for n, body in enumerate(export.entries):
        if n in wanted:
            heads[n] = auditor.head()
        try:
            auditor.take(body)
        except ValueError as error:
            raise Unsound(f"entry {n}: {error}") from None
    heads[auditor.tree.size] = auditor.head()
    if head != auditor.head():
        raise Unsound("the entries are not the ones under the checkpoint")
    for old in older:
        _extended(head, old, heads.get(old.size))
    if auditor.seen != set(auditor.envelopes):
        raise Unsound("the export holds an envelope that no entry rests on")
    return _findings(export, head, auditor)


def _findings(export: Export, head: Checkpoint, auditor: Auditor) -> Findings:
    state = auditor.state
    accounts = {
        name: {
            "limit": a.limit,
            "held": a.held,
            "spent": a.spent,
            "epsilon": a.epsilon or None,
            "delta": a.opened.delta or None,
        }
        for name, a in sorted(state.accounts.items())
    }
    fingerprint = hashlib.sha256(export.public).hexdigest()
    counts = (len(state.grants), len(state.releases), auditor.refusals, len(export.envelopes), state.epoch)
    persons = {name: f"{p.role}, key {p.public.hex()}" for name, p in sorted(state.persons.items())}
    return Findings(
        head.origin,
        head.size,
        head.root.hex(),
        fingerprint,
        accounts,
        *counts,
        witnesses=_witnesses(export.witnessed, auditor.keys),
        persons=persons,
        limits_set=auditor.limits_set,
        sites=_members(auditor),
    )


def _members(auditor: Auditor) -> dict[str, dict[str, Any]]:
    """Each site's enrolment and certificates, for people to compare with what they know."""
    state = auditor.state
    issued = Counter(certificate.site for certificate in state.issued.values())
    revoked = Counter(state.issued[number].site for number in state.revoked)
    return {
        site: {
            "approved_by": auditor.enrolled_by[site],
            "enrolments": len(auditor.keys[site]),
            "revoked": site in state.barred,
            "certificates_issued": issued[site],
            "certificates_revoked": revoked[site],
        }
        for site in sorted(state.sites)
    }


def _witnesses(notes: Sequence[str], keys: Mapping[str, Sequence[bytes]]) -> dict[str, int]:
    """The newest head that each site cosigned, with any key it was enrolled with; anybody else is no witness."""
    found: dict[str, int] = {}
    for note in notes:
        names = {name for site, own in keys.items() for key in own for name in cosigners(note, {site: key})}
        if not names or len(names) != note.partition("\n\n")[2].count("\n") - 1:
            raise Unsound("a witnessed head bears a cosignature that is no enrolled site's, or none")
        for name in names:
            found[name] = max(found.get(name, 0), int(note.split("\n")[1]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """``lazaret-verify EXPORT [--from CHECKPOINT] [--key HEX] [--json]``: exit 0 sound, 1 not, 2 usage, 70 mute."""
    parser = argparse.ArgumentParser(prog="lazaret-verify", description="check an exported ledger offline")
    parser.add_argument("export", type=Path, metavar="EXPORT")
    parser.add_argument(
        "--from", dest="since", type=Path, metavar="CHECKPOINT", help="an older signed checkpoint that it must extend"
    )
    parser.add_argument(
        "--key", metavar="HEX", help="the ledger's key, or how it begins, as you know it from elsewhere"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.key is not None and not re.fullmatch(r"[0-9a-fA-F]{16,64}", arguments.key):
        parser.error("--key: give at least 16 hexadecimal digits")
    raw, since = _read(parser, arguments.export), None
    if arguments.since is not None:
        try:
            since = (
                _read(parser, arguments.since).decode().rstrip("\n") + "\n"
            )  # an editor may have eaten the last one
        except UnicodeDecodeError:
            parser.error(f"{arguments.since}: not a checkpoint")
    gc.disable()  # a million entries are no garbage; a tenth of the time
    try:
        found = verify(raw, since)
        if arguments.key is not None and not found.key.startswith(arguments.key.lower()):
            raise Unsound("the ledger is signed by another key than the one given")
    except Unsound as error:
        reason = "".join(c if c.isprintable() else "?" for c in str(error))  # it may quote what was signed
        _say(json.dumps({"sound": False, "reason": reason}) if arguments.json else f"NOT SOUND: {reason}")
        return 1
    document = {"sound": True, **{name: getattr(found, name) for name in Findings.__slots__}}
    document["extends"] = arguments.since is not None
    _say(json.dumps(document, indent=2) if arguments.json else _summary(found, arguments.since is not None))
    return 0


def _read(parser: argparse.ArgumentParser, path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_EXPORT:
            parser.error(f"{path} is larger than {MAX_EXPORT >> 30} GiB")
        return path.read_bytes()
    except OSError as error:
        parser.error(f"cannot read {path}: {error.strerror}")


def _say(text: str) -> None:
    """Print, whatever the terminal can show; a failure to print is no finding."""
    try:
        sys.stdout.write(text.encode("ascii", "backslashreplace").decode() + "\n")
        sys.stdout.flush()
    except OSError:
        raise SystemExit(70) from None


def _of_site(name: str, facts: Mapping[str, Any]) -> str:
    by = ", ".join(facts["approved_by"])
    said = f"enrolment approved by {by}" if by else "enrolled when nobody could approve it"
    again = f", enrolled {facts['enrolments']} times" if facts["enrolments"] > 1 else ""
    state = ", REVOKED" if facts["revoked"] else ""
    issued, revoked = facts["certificates_issued"], facts["certificates_revoked"]
    return f"  {name}: {said}{again}; {issued} certificates issued, {revoked} of them revoked{state}"


def _summary(found: Findings, extends: bool) -> str:
    lines = [
        f"SOUND: {found.origin}, {found.size} entries",
        f"  root {found.root}",
        f"  key  {found.key}  (compare it with the one you know, or give --key)",
        f"  {found.grants} grants, {found.releases} releases admitted, {found.refusals} refusals, "
        f"{found.envelopes} signed envelopes, epoch {found.epoch}",
    ]
    if extends:
        lines.append("  it extends the older checkpoint")
    lines += [f"  may approve: {name}, {who}" for name, who in found.persons.items()]
    lines += [_of_site(site, facts) for site, facts in found.sites.items()]
    lines += [f"  limit of {change}" for change in found.limits_set]
    lines += [f"  head at {size} cosigned by {site}" for site, size in sorted(found.witnesses.items())]
    for name, account in found.accounts.items():
        share = 100 * (account["held"] + account["spent"]) / account["limit"] if account["limit"] else 0.0
        budget = f"epsilon {account['epsilon']} at delta {account['delta']} per {UNIT}"
        budget = f"the budget, {budget}," if account["epsilon"] else "the releases of each patient"
        lines.append(f"  {name}: {share:.1f} % of {budget} held or spent")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
