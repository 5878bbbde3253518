"""``lazaret-verify``: re-derive an exported ledger offline, from its entries alone; or check a release's certificate.

Needs only Python and ``cryptography``. It checks that the text is in its one form (so any changed byte is found), the
Merkle root under the signed checkpoint and under every head that a site cosigned, that every balance folds without an
overspend and no limit was raised by one person alone, that every envelope is signed by the site or person that the
ledger knows and says what its entry says, and it reviews every grant and every admission again under the site's own
signed policy. A certificate (:mod:`policies.certificate`) is checked against the ledger's key, or the whole ledger.
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

from policies import attest, certificate
from policies.audit import Auditor
from policies.claims import UNIT
from policies.export import Export, Unsound
from policies.merkle import BadCheckpoint, Checkpoint, cosigners, open_checkpoint
from policies.office import APPROVING

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
    persons: dict[str, str]  # whoever was appointed -> role and key: who they are is for people to check
    approving: list[str]  # those of them who may approve now
    limits_set: list[str]  # every change of a limit, and who approved it
    loosened: list[str]  # a site's own policy, loosened without the approval of those in office
    granted_twice: list[str]  # grants of a site in a run that it had been granted a part in before
    waived_by_number: list[str]  # waivers whose words do not say which restore of that number they are for
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
    gone = {name: " (dismissed)" for name in state.dismissed}
    persons = {n: f"{p.role}, key {p.public.hex()}{gone.get(n, '')}" for n, p in sorted(state.persons.items())}
    return Findings(
        head.origin,
        head.size,
        head.root.hex(),
        fingerprint,
        accounts,
        *counts,
        witnesses=_witnesses(export.witnessed, auditor.keys),
        persons=persons,
        approving=[name for name in persons if name not in gone and state.persons[name].role in APPROVING],
        limits_set=auditor.limits_set,
        loosened=auditor.loosened,
        granted_twice=auditor.twice,
        waived_by_number=auditor.unbound,
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
    """``lazaret-verify FILE [--from FILE] [--key HEX] [--artifact FILE] [--json]``: 0 sound, 1 not, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="lazaret-verify", description="check an exported ledger, or a release's certificate, offline"
    )
    parser.add_argument(
        "export", type=Path, metavar="FILE", help="a ledger's export, or a release's certificate (JSON or PDF)"
    )
    parser.add_argument(
        "--from",
        dest="since",
        type=Path,
        metavar="FILE",
        help="of an export: an older signed checkpoint that it must extend; of a certificate: the ledger's export",
    )
    parser.add_argument(
        "--key", metavar="HEX", help="the ledger's key, or how it begins, as you know it from elsewhere"
    )
    parser.add_argument(
        "--artifact",
        type=Path,
        metavar="FILE",
        help="is a certificate about this file?",
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.key is not None and not re.fullmatch(r"[0-9a-fA-F]{16,64}", arguments.key):
        parser.error("--key: give at least 16 hexadecimal digits")
    raw = _read(parser, arguments.export)
    gc.disable()  # a million entries are no garbage; a tenth of the time
    try:
        if certificate.is_certificate(raw):
            document, text = _certificate(parser, arguments, raw)
        else:
            document, text = _ledger(parser, arguments, raw)
    except Unsound as error:
        reason = "".join(c if c.isprintable() else "?" for c in str(error))  # it may quote what was signed
        _say(json.dumps({"sound": False, "reason": reason}) if arguments.json else f"NOT SOUND: {reason}")
        return 1
    _say(json.dumps(document, indent=2) if arguments.json else text)
    return 0


def _ledger(parser: argparse.ArgumentParser, arguments: argparse.Namespace, raw: bytes) -> tuple[dict[str, Any], str]:
    """What a sound export says, for machines and for people."""
    if arguments.artifact is not None:
        parser.error("--artifact: a ledger's export is about no single file; give the release's certificate")
    since = _checkpoint(parser, arguments.since) if arguments.since is not None else None
    found = verify(raw, since)
    if arguments.key is not None and not found.key.startswith(arguments.key.lower()):
        raise Unsound("the ledger is signed by another key than the one given")
    document = {"sound": True, **{name: getattr(found, name) for name in Findings.__slots__}}
    document["extends"] = since is not None
    return document, _summary(found, since is not None)


def _certificate(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, raw: bytes
) -> tuple[dict[str, Any], str]:
    """What a sound certificate says. Its key must be known from elsewhere: anybody can make one with their own."""
    found = certificate.read(raw)
    head = attest.check(found)
    if arguments.key is None and arguments.since is None:
        raise Unsound(
            "whose certificate this is cannot be told: give --key with the ledger's key as its owner publishes it, "
            f"or --from with the ledger's export; it is signed by {found.fingerprint}"
        )
    if arguments.key is not None and not found.fingerprint.startswith(arguments.key.lower()):
        raise Unsound("the certificate is signed by another key than the one given")
    revoked = None
    if arguments.since is not None:
        ledger = _read(parser, arguments.since)
        verify(ledger)
        revoked = attest.against(found, Export.parse(ledger))
    same = None if arguments.artifact is None else _sha256(parser, arguments.artifact)
    if same is not None and same != found.facts["artifact_sha256"]:
        raise Unsound("the certificate is about another file than the one given")
    lines = [*attest.summary(found, head, revoked)]
    lines += ["  the export of the ledger holds all of it"] if arguments.since is not None else []
    lines += ["  it is about the file that was given"] if same is not None else []
    document = {
        "sound": True,
        "certificate": dict(found.facts),
        "words": dict(found.words),
        "origin": head.origin,
        "size": head.size,
        "root": head.root.hex(),
        "key": found.fingerprint,
        "revoked": found.facts.get("revoked") if revoked is None else revoked,  # null: its form does not tell
        "in_export": arguments.since is not None,
        "artifact_checked": same is not None,
    }
    return document, "\n".join(lines)


def _sha256(parser: argparse.ArgumentParser, path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        parser.error(f"cannot read {path}: {error.strerror}")


def _checkpoint(parser: argparse.ArgumentParser, path: Path) -> str:
    try:
        return _read(parser, path).decode().rstrip("\n") + "\n"  # an editor may have eaten the last one
    except UnicodeDecodeError:
        parser.error(f"{path}: not a checkpoint")


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
    lines += [f"  may approve: {name}, {found.persons[name]}" for name in found.approving]
    lines += [f"  appointed: {name}, {who}" for name, who in found.persons.items() if name not in found.approving]
    lines += [_of_site(site, facts) for site, facts in found.sites.items()]
    lines += [f"  limit of {change}" for change in found.limits_set]
    lines += [f"  LOOSENED without approval of those in office: {change}" for change in found.loosened]
    lines += [f"  GRANTED AGAIN in one run, which is refused today: {again}" for again in found.granted_twice]
    lines += [f"  WAIVED for any restore of that number, which is refused today: {w}" for w in found.waived_by_number]
    lines += [f"  head at {size} cosigned by {site}" for site, size in sorted(found.witnesses.items())]
    for name, account in found.accounts.items():
        share = 100 * (account["held"] + account["spent"]) / account["limit"] if account["limit"] else 0.0
        budget = f"epsilon {account['epsilon']} at delta {account['delta']} per {UNIT}"
        budget = f"the budget, {budget}," if account["epsilon"] else "the releases of each patient"
        lines.append(f"  {name}: {share:.1f} % of {budget} held or spent")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
