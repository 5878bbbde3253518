"""The commands that release under differential privacy, PrivImage and centroids; and both distillations."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from agent import commands, distill_commands
from agent.attacks.dp_audit import AuditFailed, gate
from agent.desk import Desk, open_desk, start_anew
from agent.edges.centroids import read_centroids
from agent.edges.distill import read_distill
from agent.edges.privimage import read_privimage
from agent.mechanisms import Centroids, Distill, DistillDp, PrivImage, Resumable
from agent.nouns import Selection
from agent.pipeline import Wrapping, release_resumable
from agent.site import Parcel, Refused, Waiting
from agent.stages.clipping import UnsuitableModel
from agent.stages.distil import Review
from agent.stages.finetune import best_engine
from agent.stages.noise import SystemEntropy
from agent.stages.select import NothingSelected, SharedPicture, TooFaint
from agent.synthesis_commands import BadOrder, answered
from agent.training.loop import write_whole
from agent.unfinished import Unfinished, abandon
from policies.accounting import NANO, epsilon_nano, tight_epsilon
from policies.claims import Gaussian
from policies.figures import epsilon_text
from policies.review import Verdict
from protos import hpke
from protos.shards import Dicom, Png, room

EXPECTED = (
    *distill_commands.EXPECTED,
    *(AuditFailed, NothingSelected, SharedPicture, TooFaint, Unfinished, UnsuitableModel),
)
_READERS: dict[str, Any] = {
    PrivImage.name: read_privimage,
    Centroids.name: read_centroids,
    Distill.name: partial(read_distill, name=Distill.name),
    DistillDp.name: partial(read_distill, name=DistillDp.name),
}


def run(arguments: argparse.Namespace) -> int:
    """``release privimage``, ``centroids``, ``distill`` or ``distill-dp``; what they expect becomes a sentence."""
    return answered(release, arguments, EXPECTED)


def release(arguments: argparse.Namespace) -> int:
    """Make and submit a synthetic set; exit 1 when any review refuses it, or the audit does."""
    name = arguments.mechanism
    if arguments.out is not None and (arguments.out.exists() or not arguments.out.parent.is_dir()):
        raise BadOrder(f"{arguments.out.name}: name a new file, in a folder that is there")
    distill_commands.refuse_sheet(arguments.sheet, arguments.out)

    def say(step: str, detail: str) -> None:
        commands.tell(step, detail, arguments.json)

    with open_desk(arguments.home, say, arguments.project) as desk:
        mechanism, selection, told = _read(arguments, desk, say)
        if arguments.blank is not None:
            return distill_commands.write_blank(arguments, mechanism)
        arguments.modality = selection.modality
        wrapping = _wrapping(arguments, desk, mechanism)
        for line in (*told, _both(desk, mechanism)):
            say("price", line)
        start_anew(desk)
        _audit(mechanism, say)
        if arguments.anew:  # after the audit: on a machine that is not fit to draw noise, nothing is given up either
            abandon(desk.site)
        goods: Parcel | None = None
        shown = _shown(arguments, mechanism, say)
        try:
            goods, verdict = release_resumable(desk.site, mechanism, selection, SystemEntropy(), wrapping, shown)
        except Refused as refusal:
            verdict = refusal.verdict
        except Waiting as waiting:
            return commands.print_waiting(desk, waiting, arguments.json)
        release = goods.release.release if goods else ""
        desk.log.info("verdict", release=release, rules=[f.rule for f in verdict.findings])
        _print(arguments, name, goods, verdict)
        if arguments.out is not None and goods is not None and verdict.admitted:
            _write(arguments.out, goods.clear or goods.artifact)
        return 0 if verdict.admitted else 1


def _read(
    arguments: argparse.Namespace, desk: Desk, say: Callable[[str, str], None]
) -> tuple[Resumable, Selection, tuple[str, ...]]:
    made = _READERS[arguments.mechanism](arguments.config, desk.settings.public_components, say)
    return made.mechanism, made.selection, made.told


def _audit(mechanism: Resumable, say: Callable[[str, str], None]) -> None:
    """Before a release that claims noise.

    Raises:
        AuditFailed: this machine does not draw it.
    """
    if isinstance(mechanism, Distill):
        return
    say("audit", "does this machine draw the noise that is claimed?")
    device = "cpu"
    if not isinstance(mechanism, Centroids):
        device = (mechanism.model if isinstance(mechanism, PrivImage) else mechanism.course.model).device
    gate(SystemEntropy(), best_engine(device), device)


def _shown(
    arguments: argparse.Namespace, mechanism: Resumable, say: Callable[[str, str], None]
) -> Callable[[Review], None]:
    """What is done with what the site's reviewer must see, before anything leaves."""
    show = distill_commands.shown(arguments, isinstance(mechanism, Distill), say)

    def told(review: Review) -> None:
        show(review)
        if arguments.json:  # a line of its own: it stands whatever the verdict is, or waits for persons
            line = {"mechanism": mechanism.name, "review": distill_commands.as_json(review)}
            sys.stdout.write(json.dumps(line) + "\n")

    return told


def _wrapping(arguments: argparse.Namespace, desk: Desk, mechanism: Resumable) -> Wrapping:
    """How the set is written; what the site's policy would refuse of it, whatever it shows, is refused now.

    Raises:
        BadOrder: more pictures than an artifact may hold, or a reader whom the policy does not name.
        BadArtifact: the form cannot hold such pictures.
    """
    if isinstance(mechanism, Distill | DistillDp):
        distill_commands.refuse_wrapping(arguments, mechanism.course.output)
    wrapping = commands.wrapping(arguments, desk.home.root, colour=len(mechanism.shape) == 3)
    policy = desk.site.books.policy_of(desk.site.name)
    most = policy.max_artifact_bytes
    if wrapping.reader:
        if wrapping.reader not in policy.readers:
            raise BadOrder("policy.toml does not name this reader: add the key's fingerprint to its readers")
        most -= hpke.sealed_bytes(most) - most
    if isinstance(mechanism, Distill | DistillDp) and mechanism.course.output.release == "model":
        distill_commands.refuse_size(mechanism.course, most)
        return wrapping
    spacing = (arguments.spacing_um, arguments.spacing_um)
    form = Dicom(arguments.modality, spacing) if arguments.form == "dicom" else Png()
    fitting = room(most, mechanism.shape, form)
    if isinstance(mechanism, Centroids):
        pictures, change = mechanism.codebook.cells, "take a codebook of so many cells"
    elif isinstance(mechanism, PrivImage):
        pictures, change = mechanism.synthetic.pictures, "write so many into [synthetic] pictures"
    else:
        pictures, change = mechanism.course.output.pictures, "write so many into [output] pictures"
    if pictures > fitting:
        told = f"{pictures} pictures of this size may take more than the policy's max_artifact_bytes"
        raise BadOrder(f"{told}, {policy.max_artifact_bytes}: {fitting} would fit; {change}")
    return wrapping


def _write(path: Path, data: bytes) -> None:
    """What has left is no secret here either. The verdict was told before: it stands, whatever the disk does.

    Raises:
        BadOrder: the disk does not take it.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        raise BadOrder(f"{path.name}: {error.strerror}; the set has left all the same") from None


def _both(desk: Desk, mechanism: Resumable) -> str:
    """What the release costs, by both accountants, before anything is spent: the ledger's is the one that counts."""
    claim = mechanism.claim()
    if not isinstance(claim, Gaussian):
        return (
            "level C: nothing is promised; what stands behind it is measured. It counts as one of the releases "
            "without an epsilon that the policy's max_releases_per_patient bounds"
        )
    opened = desk.site.books.account(desk.site.name, claim).opened
    charged = epsilon_nano(claim, float(opened.delta), opened.order) / NANO
    tight = tight_epsilon([claim], float(opened.delta))
    told = f"epsilon {epsilon_text(tight)} by loss distributions; the ledger charges {epsilon_text(charged)}"
    return f"{told} (order {opened.order}), both at its delta {opened.delta}"


def _print(arguments: argparse.Namespace, name: str, goods: Parcel | None, verdict: Verdict) -> None:
    """The verdict, with what was charged; and what the same claim comes to by the sharper accountant."""
    r = goods.release if goods else None
    if r is None or r.epsilon_nano is None or r.delta is None or not isinstance(r.claim, Gaussian):
        commands.print_verdict(r.release if r else "", name, verdict, arguments.json)
        return
    charged, tight = r.epsilon_nano / NANO, tight_epsilon([r.claim], float(r.delta))
    if arguments.json:
        findings = [{"rule": f.rule, "detail": f.detail} for f in verdict.findings]
        line = {"release": r.release, "mechanism": name, "admitted": verdict.admitted, "level": verdict.level}
        more = {"epsilon": charged, "delta": r.delta, "unit": r.claim.unit, "epsilon_by_loss_distributions": tight}
        sys.stdout.write(json.dumps({**line, **more, "findings": findings}) + "\n")
        return
    commands.print_verdict(r.release, name, verdict, False)
    commands.OUT.print(
        f"epsilon {epsilon_text(charged)} at delta {r.delta} per {r.claim.unit}, as the ledger has it; "
        f"the same claim by loss distributions: {epsilon_text(tight)}",
        soft_wrap=True,
    )
