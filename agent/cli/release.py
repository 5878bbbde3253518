"""What the releases of every mechanism share: prices, dry runs, how they are written, and how they end.

None of it imports torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.output import OUT, print_progress, print_verdict
from agent.domain import ExampleRule, Selection
from agent.errors import CommandError, ReviewRejectedError
from agent.release.history import rule_of
from agent.release.packaging import ReleaseFormat
from agent.release.pipeline import made_as
from agent.release.ports import ApprovalPending, SignedRelease
from agent.release.preflight import ReleaseForecast, ReleaseRequest, preflight_review, quote
from agent.release.unsent import listed
from agent.runtime import OpenSite
from agent.service.making import open_making
from agent.service.pending import number_of, of_store
from policies.accounting.accountant import NANO, epsilon_nano, tight_epsilon
from policies.accounting.claims import Claim, Gaussian, KAnonymous
from policies.accounting.rounding import epsilon_text
from policies.ledger.state import Account
from policies.review.rules import Verdict
from policies.statements import claim_json
from protos.artifacts.arrays import ArtifactFormatError
from protos.artifacts.shards import Dicom, Form, Png
from protos.common.durable_files import replace_file
from protos.encryption import hpke

if TYPE_CHECKING:  # all mechanisms import torch, which not all releases need
    from agent.mechanisms.registry import Remodel, Resumable, Synthesis


def open_release(arguments: argparse.Namespace, say: Callable[[str, str], None]) -> AbstractContextManager[OpenSite]:
    """The site, for a release or its dry run; see :func:`agent.service.making.open_making`."""
    home, project = arguments.home, arguments.project
    return open_making(home, say, project, grant=arguments.grant, looks=arguments.dry_run)


def asked_for(
    mechanism: Synthesis | Resumable | Remodel, rule: Selection | ExampleRule | str, anew: bool, vetted: bool = False
) -> ReleaseRequest:
    """What a dry run asks of: the same mechanism, rule and vetting as the release."""
    form = made_as(mechanism, rule if isinstance(rule, str) else rule_of(rule))
    return ReleaseRequest(mechanism, rule, form, vetted, anew)


def dry_run(runtime: OpenSite, foreseen: ReleaseForecast, asked: ReleaseRequest, as_lines: bool) -> int:
    """Print what a release would cost, count and weigh, and what speaks against it; exit 1 if something does.

    The coordinator is not contacted, no image is read, and nothing is spent or written. The number of a k-anonymous
    set follows from this site's patients: it is for this site alone.
    """
    mechanism = asked.mechanism
    quoted = quote(runtime.site, foreseen, mechanism)
    findings = list(preflight_review(runtime.site, asked, foreseen))
    claim, limit = foreseen.draft.claim, runtime.site.ledger.policy_of(runtime.site.name).max_artifact_bytes
    account, free = runtime.site.ledger.account(runtime.site.name, claim), runtime.vault.free_bytes()
    if as_lines:
        line: dict[str, Any] = {"mechanism": mechanism.name, "dry_run": True, "would_go": not findings}
        line["price"] = {"claim": claim_json(claim), "amount": quoted.amount, "left": account.left}
        line["samples"] = {"most": foreseen.samples, "exact": foreseen.public, "shape": list(foreseen.shape)}
        line["bytes"] = {"most": foreseen.size, "admitted": limit}
        line["disk"] = {"needed": foreseen.disk, "free": free}
        line["findings"] = [{"rule": f.rule, "detail": f.detail} for f in findings]
        sys.stdout.write(json.dumps(line) + "\n")
        return 1 if findings else 0
    what = "volumes" if foreseen.draft.artifact_type == "volume-set" else "images"
    number = f"{foreseen.samples} {what} of {' x '.join(map(str, foreseen.shape))}"
    if foreseen.form is None:
        number = "one model"
    elif not foreseen.public:
        number = f"at most {number}: this follows from the number of this site's patients, so keep it here"
    print_progress("price", priced(account, claim), False)
    print_progress("number", number, False)
    print_progress("bytes", f"at most {foreseen.size}; the policies admit {limit}", False)
    print_progress("disk", f"up to {foreseen.disk} bytes until it is sent; {free} are free", False)
    for finding in findings:
        print_progress("no", f"{finding.rule}: {finding.detail}", False)
    OUT.print("the release would be refused" if findings else "no reason for refusal is known now; nothing was spent")
    return 1 if findings else 0


def priced(account: Account, claim: Claim) -> str:
    """What a claim costs, by both accountants: the ledger's is the one that counts."""
    if isinstance(claim, Gaussian):
        delta = float(account.opened.delta)
        charged, tight = epsilon_nano(claim, delta, account.opened.order) / NANO, tight_epsilon([claim], delta)
        told = f"epsilon {epsilon_text(tight)} by loss distributions; the ledger charges {epsilon_text(charged)}"
        return f"{told} (order {account.opened.order}), both at its delta {account.opened.delta}"
    left = f"{account.left} of {account.limit} are left"
    if isinstance(claim, KAnonymous):
        told = f"k = {claim.k} patients and {claim.l_diversity} labels behind every image"
    else:
        told = "level C: there is no guarantee, only measurements"
    return f"{told}. It counts as one of the releases without an epsilon that the policy limits: {left}"


def refuse_files(arguments: argparse.Namespace) -> None:
    """A page or a set is never written over another file, and a folder that is not there takes none.

    Args:
        arguments: ``sheet``, of the page, and ``out``, of the set; None: there is to be none.

    Raises:
        CommandError: either.
    """
    sheet, out = arguments.sheet, arguments.out
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise CommandError(f"{out.name}: name a new file in an existing folder")
    if sheet is not None and (sheet.exists() or not sheet.parent.is_dir()):
        raise CommandError(f"{sheet.name}: name a new file for the sheet in an existing folder")
    if sheet is not None and sheet == out:
        raise CommandError("--sheet and --out are the same file: name two files")


def release_format(arguments: argparse.Namespace, folder: Path, colour: bool = False) -> ReleaseFormat:
    """As PNG or DICOM, in clear or sealed to one reader.

    Raises:
        ArtifactFormatError: DICOM in colour.
    """
    form: Form = Png()
    if arguments.form == "dicom":
        if colour:
            raise ArtifactFormatError("DICOM is written in grey only: use --form png, or a generator of grey images")
        form = Dicom(arguments.modality, (arguments.spacing_um, arguments.spacing_um))
    if arguments.reader is None:
        return ReleaseFormat(form)
    public = hpke.read_reader_public(arguments.reader)

    def sealed(clear: bytes) -> bytes:
        with tempfile.TemporaryDirectory(dir=folder) as place:  # what a crash leaves there is sealed
            hpke.seal_to(public, clear, Path(place) / "sealed")
            return (Path(place) / "sealed").read_bytes()

    return ReleaseFormat(form, hpke.fingerprint(public), sealed)


def run_release(
    runtime: OpenSite,
    arguments: argparse.Namespace,
    name: str,
    make: Callable[[], tuple[SignedRelease, Verdict]],
    told: Callable[[SignedRelease | None, Verdict], None] | None = None,
) -> int:
    """Make a release, say how it ended, and write what has left to ``--out``.

    Args:
        runtime: the site.
        arguments: ``json``, ``out``.
        name: the mechanism's.
        make: from price to verdict.
        told: prints the verdict; else :func:`agent.cli.output.print_verdict` does.
    Returns:
        The exit status, 1 when a review refuses it or persons must approve it first.
    Raises:
        CommandError: it has left, and the disk does not take it.
    """
    signed: SignedRelease | None = None
    try:
        signed, verdict = make()
    except ReviewRejectedError as refusal:
        verdict = refusal.verdict
    except ApprovalPending as waits:
        return print_waiting(runtime, waits, arguments.json)
    release = signed.release.release if signed else ""
    runtime.log.info("verdict", release=release, rules=[f.rule for f in verdict.findings])
    if told is None:
        print_verdict(release, name, verdict, arguments.json)
    else:
        told(signed, verdict)
    if arguments.out is not None and signed is not None and verdict.admitted:
        _write(arguments.out, signed.clear or signed.artifact)
    return 0 if verdict.admitted else 1


def _write(path: Path, data: bytes) -> None:
    """What has left is no secret here either. The verdict was told before: it stands, whatever the disk does.

    Raises:
        CommandError: the disk does not take it.
    """
    try:
        replace_file(path, data)
    except OSError as error:
        raise CommandError(f"{path.name}: {error.strerror}; the set was released all the same") from None


def print_waiting(runtime: OpenSite, waiting: ApprovalPending, as_lines: bool) -> int:
    """What persons must do for a release that waits; the exit status, 1."""
    r = waiting.signed.release
    runtime.log.info("release_waits", release=r.release)
    line = {"release": r.release, "waits_for": sorted(waiting.roles), "artifact_sha256": r.artifact_sha256}
    if as_lines:
        sys.stdout.write(json.dumps(line) + "\n")
    else:
        OUT.print(f"{waiting}", markup=False)
        number = number_of(of_store(runtime.home, runtime.site.ledger.store, listed(runtime.vault)), r.release)
        OUT.print(f"inspect it: release inspect {number} --out FOLDER")
        OUT.print(f"each approver signs: ledger sign {number} --person NAME --key FILE")
        OUT.print(f"then: release send {number}")
    return 1
