"""``lazaret-verify``: re-derive an exported ledger offline, from its entries alone; or check a release's certificate.

Needs only Python and ``cryptography``. The check covers: the text is in its one canonical form (so any changed byte
is found); the Merkle root matches the signed checkpoint and every head that a site cosigned; every balance folds
without an overspend, and no limit was raised by one person alone; every envelope is signed with the key that the
ledger has of the site or person, and says what its entry says; every grant and every admission passes the review
again under the site's own signed policy. A certificate (:mod:`policies.audit.certificate`) is checked against the
ledger's key, or the entire ledger.

Anyone can write a consistent ledger and sign it with a key of their own. So the result is SOUND only if you name the
owner: by the full fingerprint of its key, or by the SHA-256 of a signed checkpoint that you kept. Without either it
is CONSISTENT, with exit code 3. A file given with ``--from`` does not count as proof of ownership: the author of the
ledger may have written it, too.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from policies.accounting.claims import UNIT
from policies.accounting.rounding import epsilon_text
from policies.audit import certificate, certificate_check
from policies.audit.auditor import Auditor
from policies.ledger.approvals import APPROVING
from policies.ledger.ed25519 import is_owned
from policies.ledger.export import Export, ExportError
from policies.ledger.merkle import Checkpoint, LedgerCheckpointError, cosigners, open_checkpoint
from policies.statements import HEX, ID
from protos.common.text import printable

MAX_EXPORT: Final = 1 << 33
ANCHORED: Final = 0  # exit codes; 2 is a usage error
UNSOUND: Final = 1
UNANCHORED: Final = 3


@dataclass(frozen=True, slots=True)
class Findings:
    """The contents of an export that is consistent with itself. ``key`` names the claimed owner, which is not
    verified.
    """

    origin: str
    size: int
    root: str
    key: str  # SHA-256 of the public key, to compare with the one that the ledger's owner publishes
    checkpoint: str  # SHA-256 of the signed head: who keeps it can name it later
    accounts: dict[str, dict[str, Any]]
    grants: int
    releases: int
    refusals: int
    envelopes: int
    epoch: int
    witnesses: dict[str, int]  # site -> size of the newest head that it cosigned
    cosigned: list[str]  # the witnesses that cosigned this very head, see :func:`verify`
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
        raise ExportError("the head of an export bears one signature, the ledger's")
    digests = [hashlib.sha256(raw).digest() for raw in export.envelopes]
    if digests != sorted(set(digests)):
        raise ExportError("the envelopes are not in their one order, each once")
    if not is_owned(export.public):
        raise ExportError("the ledger's key is not an Ed25519 key of one owner: others can sign with it, too")
    try:
        head = open_checkpoint(export.checkpoint, export.public)
        witnessed = [open_checkpoint(note, export.public) for note in export.witnessed]
    except LedgerCheckpointError as error:
        raise ExportError(str(error)) from None
    try:
        given = [open_checkpoint(since, export.public)] if since is not None else []
    except LedgerCheckpointError as error:
        raise ExportError(f"the older checkpoint (--from), not the export: {error}") from None
    return head, witnessed + given


def _extended(head: Checkpoint, old: Checkpoint, own: Checkpoint | None) -> None:
    """Is an older head the ledger's own at that size?"""
    if old.size > head.size and old.origin == head.origin:
        raise ExportError(f"the older checkpoint covers {old.size} entries, the export {head.size}: it was cut short")
    if old != own:
        lost = f", or entries were lost before epoch {head.epoch}" if head.epoch > 1 else ""
        raise ExportError(f"the ledger does not extend the older checkpoint: its history was rewritten{lost}")


def verify(
    raw: bytes, since: str | None = None, now: int | None = None, witnesses: Mapping[str, bytes] | None = None
) -> Findings:
    """Check an export; with ``since``, also that it extends an older checkpoint of the same ledger.

    Args:
        raw: the export.
        since: an older signed checkpoint.
        now: seconds since 1970, by the verifier's clock: no entry may be more than ``audit.SKEW`` later, or earlier
            than one that stands before it. None: times are not judged. That is for a site that takes its receipts
            out of an export: a clock that was wrong once must not keep it from them.
        witnesses: name -> Ed25519 public key, raw, of those whose cosignatures of the head count. None: the sites
            that the ledger has enrolled and not revoked, each with its key of today.
    Raises:
        ExportError: it does not hold, with the first reason.
    """
    export = Export.parse(raw)
    head, older = _heads(export, since)
    auditor, heads = Auditor(head.origin, export.envelopes, now), dict[int, Checkpoint]()
    wanted = {old.size for old in older}
    for n, body in enumerate(export.entries):
        if n in wanted:
            heads[n] = auditor.head()
        try:
            auditor.take(body)
        except ValueError as error:
            raise ExportError(f"entry {n}: {error}") from None
    heads[auditor.tree.size] = auditor.head()
    if head != auditor.head():
        raise ExportError("the entries are not the ones under the checkpoint")
    for old in older:
        _extended(head, old, heads.get(old.size))
    if auditor.seen != set(auditor.envelopes):
        raise ExportError("the export holds an envelope that no entry rests on")
    notes = [*export.witnessed, *([] if since is None else [since])]
    over_head = [note for note, old in zip(notes, older, strict=True) if old == head]
    return _findings(export, head, auditor, _cosigned(over_head, export.public, auditor, witnesses))


def _cosigned(
    notes: Sequence[str], public: bytes, auditor: Auditor, witnesses: Mapping[str, bytes] | None
) -> list[str]:
    """Whose valid cosignatures stand under these notes of the head; the ledger is no witness of itself."""
    state = auditor.state
    sites = {site: known.sign_key for site, known in state.sites.items() if site not in state.revoked_sites}
    keys = {name: key for name, key in (sites if witnesses is None else witnesses).items() if key != public}
    return sorted({name for note in notes for name in cosigners(note, keys)})


def _findings(export: Export, head: Checkpoint, auditor: Auditor, cosigned: list[str]) -> Findings:
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
        _digest(export.checkpoint),
        accounts,
        *counts,
        witnesses=_witnesses(export.witnessed, auditor.keys),
        cosigned=cosigned,
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
            "key": state.sites[site].sign_key.hex(),
            "approved_by": auditor.enrolled_by[site],
            "enrolments": len(auditor.keys[site]),
            "revoked": site in state.revoked_sites,
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
            raise ExportError("a witnessed head bears a cosignature that is no enrolled site's, or none")
        for name in names:
            found[name] = max(found.get(name, 0), int(note.split("\n")[1]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Check what is named on the command line.

    Returns:
        0 sound; 1 not sound; 2 usage; 3 consistent with itself, and nobody said whose it is.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    _usable(parser, arguments)
    raw = _read(parser, arguments.export)
    gc.disable()  # a million entries are no garbage; a tenth of the time
    check = _certificate if certificate.is_certificate(raw) else _ledger
    try:
        document, lines, anchors = check(parser, arguments, raw)
    except ExportError as error:
        reason = printable(error)  # it may quote what was signed
        said = {"verdict": "NOT SOUND", "sound": False, "reason": reason}
        _say(json.dumps(said) if arguments.json else f"NOT SOUND: {reason}")
        return UNSOUND
    verdict = "SOUND" if anchors else "CONSISTENT"
    document = {"verdict": verdict, "sound": bool(anchors), "anchors": anchors, **document}
    unknown = (
        f"consistent with itself; signed by {document['key']}, which you have not named: anybody can make one with a "
        "key of their own. Give --key with the whole fingerprint of the ledger's key, as its owner publishes it"
    )
    head, *rest = lines
    text = "\n".join([f"{verdict}: {head}", *([] if anchors else [f"  {unknown}"]), *rest])
    _say(json.dumps(document, indent=2) if arguments.json else text)
    return ANCHORED if anchors else UNANCHORED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lazaret-verify",
        description="check an exported ledger, or a release's certificate, offline",
        epilog="exit codes: 0 SOUND, 1 NOT SOUND, 2 usage, 3 CONSISTENT with itself, but you did not name its key",
    )
    parser.add_argument(
        "export", type=Path, metavar="FILE", help="a ledger's export, or a release's certificate (JSON or PDF)"
    )
    parser.add_argument(
        "--from",
        dest="since",
        type=Path,
        metavar="FILE",
        help="for an export: an older signed checkpoint that it must extend; for a certificate: the ledger's export",
    )
    parser.add_argument(
        "--key", metavar="HEX", help="the whole fingerprint of the ledger's key, as you know it from elsewhere"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="HEX",
        help="the whole SHA-256 of a signed checkpoint that you kept: the one of --from, or the head",
    )
    parser.add_argument("--artifact", type=Path, metavar="FILE", help="check that a certificate is about this file")
    parser.add_argument(
        "--witnesses",
        type=_number,
        metavar="N",
        help="number of witnesses that must have cosigned the ledger's head: its sites, or those of --witness",
    )
    parser.add_argument(
        "--witness",
        type=_witness,
        action="append",
        default=[],
        metavar="NAME=HEX",
        help="a witness and its public key, as you know it from elsewhere; then only named witnesses count",
    )
    parser.add_argument("--json", action="store_true")
    return parser


def _number(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError("give a number from 1")
    return int(text)


def _witness(text: str) -> tuple[str, bytes]:
    name, _, key = text.partition("=")
    if not ID.fullmatch(name) or not HEX.fullmatch(key) or not is_owned(bytes.fromhex(key)):
        raise argparse.ArgumentTypeError(
            "give a short name, an equals sign, and a public key of 64 hexadecimal digits"
        )
    return name, bytes.fromhex(key)


def _usable(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a usage error what cannot be meant. The beginning of a digest is none: somebody can find another."""
    for name in ("key", "checkpoint"):
        value = getattr(arguments, name)
        if value is not None and not HEX.fullmatch(value.lower()):
            parser.error(f"--{name}: give the whole of it, 64 hexadecimal digits")
    if arguments.witness and arguments.witnesses is None:
        parser.error("--witness: also give --witnesses, the number that must have cosigned the head")
    for several in zip(*arguments.witness, strict=True):
        if len(set(several)) != len(several):
            parser.error("--witness: each name and each key once")


_Checked = tuple[dict[str, Any], list[str], list[str]]  # for machines, for people, and what says whose it is


def _ledger(parser: argparse.ArgumentParser, arguments: argparse.Namespace, raw: bytes) -> _Checked:
    """What an export says that holds."""
    if arguments.artifact is not None:
        parser.error("--artifact: a ledger's export is not about a single file; give the release's certificate")
    since = _checkpoint(parser, arguments.since) if arguments.since is not None else None
    found = _verified(arguments, raw, since)
    anchors = _anchors(arguments, found.key, {found.checkpoint, *([] if since is None else [_digest(since)])})
    document = {name: getattr(found, name) for name in Findings.__slots__}
    document["extends"] = since is not None
    return document, _summary(found, since is not None), anchors


def _verified(arguments: argparse.Namespace, raw: bytes, since: str | None = None) -> Findings:
    """An export that holds, under the quorum of witnesses that was demanded."""
    named, wanted = dict(arguments.witness) or None, arguments.witnesses
    found = verify(raw, since, int(time.time()), named)
    if wanted is not None and not len(found.cosigned) >= wanted:
        whose = "of those that you named" if named else "of the sites that it has enrolled and not revoked"
        others = ", ".join(f"{site} at {size}" for site, size in sorted(found.witnesses.items())) or "none"
        raise ExportError(
            f"{wanted} witnesses must have cosigned the head at {found.size}, and {len(found.cosigned)} {whose} did: "
            f"{', '.join(found.cosigned) or 'nobody'} (newest cosigned heads: {others})"
        )
    return found


def _digest(note: str) -> str:
    return hashlib.sha256(note.encode()).hexdigest()


def _anchors(arguments: argparse.Namespace, key: str, checkpoints: Set[str]) -> list[str]:
    """What of that which was named says whose it is: its key, or a checkpoint that this key signed.

    A signed checkpoint stands for the key: no second key can be found under which the same signature verifies, since
    only keys of prime order are taken (Brendel et al., "The provable security of Ed25519", IEEE S&P 2021).

    Raises:
        ExportError: another one was named.
    """
    if arguments.key is not None and key != arguments.key.lower():
        raise ExportError(f"it is signed by another key than the one that you named: by {key}")
    if arguments.checkpoint is not None and arguments.checkpoint.lower() not in checkpoints:
        raise ExportError("neither its head nor what --from gives is the checkpoint that you named")
    return [name for name in ("key", "checkpoint") if getattr(arguments, name) is not None]


def _certificate(parser: argparse.ArgumentParser, arguments: argparse.Namespace, raw: bytes) -> _Checked:
    """What a certificate says that holds, by itself or in the ledger whose export ``--from`` gives."""
    if arguments.witnesses is not None and arguments.since is None:
        parser.error("--witnesses: of a certificate, give the ledger's export with --from")
    found = certificate.read(raw)
    head = certificate_check.check(found, int(time.time()))
    checkpoints, revoked = {_digest(found.checkpoint)}, None
    if arguments.since is not None:
        ledger = _read(parser, arguments.since)
        checkpoints.add(_verified(arguments, ledger).checkpoint)
        revoked = certificate_check.check_against_export(found, Export.parse(ledger))
    anchors = _anchors(arguments, found.fingerprint, checkpoints)
    same = None if arguments.artifact is None else _sha256(parser, arguments.artifact)
    if same is not None and same != found.facts["artifact_sha256"]:
        raise ExportError("the certificate is about another file than the one given")
    lines = [*certificate_check.summary(found, head, revoked)]
    lines += ["  the export of the ledger holds all of it"] if arguments.since is not None else []
    lines += ["  it is about the file that was given"] if same is not None else []
    document = {
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
    return document, lines, anchors


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


def _summary(found: Findings, extends: bool) -> list[str]:
    lines = [
        f"{found.origin}, {found.size} entries",
        f"  root {found.root}",
        f"  key  {found.key}",
        f"  head {found.checkpoint}  (SHA-256 of the signed checkpoint)",
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
    lines += [f"  this head, at {found.size}, cosigned by {', '.join(found.cosigned)}"] if found.cosigned else []
    for name, account in found.accounts.items():
        share = 100 * (account["held"] + account["spent"]) / account["limit"] if account["limit"] else 0.0
        budget = "the releases of each patient"
        if account["epsilon"]:
            budget = f"the budget, epsilon {epsilon_text(account['epsilon'])} at delta {account['delta']} per {UNIT},"
        lines.append(f"  {name}: {share:.1f} % of {budget} held or spent")
    return lines


if __name__ == "__main__":
    sys.exit(main())
