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
from agent.desk import Desk, open_desk
from agent.edges.centroids import read_centroids
from agent.edges.distill import read_distill
from agent.edges.privimage import read_privimage
from agent.foreseen import of_configuration, refuse
from agent.mechanisms import Centroids, Distill, DistillDp, PrivImage, Resumable
from agent.nouns import Selection
from agent.pipeline import release_resumable
from agent.site import Parcel, Refused, Waiting
from agent.stages.clipping import UnsuitableModel
from agent.stages.distil import Review
from agent.stages.finetune import best_engine
from agent.stages.noise import SystemEntropy
from agent.stages.select import NothingSelected, SharedPicture, TooFaint
from agent.synthesis_commands import BadOrder, answered
from agent.training.loop import write_whole
from agent.unfinished import Unfinished, abandon
from agent.wrapping import Wrapping
from policies.accounting import NANO, tight_epsilon
from policies.claims import Gaussian
from policies.figures import epsilon_text
from policies.review import Verdict

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
    _refuse_out(arguments)

    def say(step: str, detail: str) -> None:
        commands.tell(step, detail, arguments.json)

    with open_desk(arguments.home, say, arguments.project) as desk:
        mechanism, selection, told = _read(arguments, desk, say)
        if arguments.blank is not None:
            return distill_commands.write_blank(arguments, mechanism)
        arguments.modality = selection.modality
        wrapping = _wrapping(arguments, desk, mechanism)
        claim = mechanism.claim()
        foreseen = of_configuration(desk.site, mechanism, selection, wrapping)
        if arguments.dry_run:
            asked = commands.asked_for(mechanism, selection, arguments.anew)
            return commands.dry_run(desk, foreseen, asked, arguments.json)
        for line in (*told, commands.priced(desk.site.books.account(desk.site.name, claim), claim)):
            say("price", line)
        refuse(desk.site, foreseen)  # before the audit, which takes its time
        commands.start_making(desk, anew=False)
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


def _refuse_out(arguments: argparse.Namespace) -> None:
    """Nothing is written over.

    Raises:
        BadOrder: a file is there, or its folder is not.
    """
    if arguments.out is not None and (arguments.out.exists() or not arguments.out.parent.is_dir()):
        raise BadOrder(f"{arguments.out.name}: name a new file, in a folder that is there")
    distill_commands.refuse_sheet(arguments.sheet, arguments.out)


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
    """How the set is written.

    Raises:
        BadOrder: a model was asked to be written as pictures.
        BadArtifact: the form cannot hold such pictures.
    """
    if isinstance(mechanism, Distill | DistillDp):
        distill_commands.refuse_wrapping(arguments, mechanism.course.output)
    return commands.wrapping(arguments, desk.home.root, colour=len(mechanism.shape) == 3)


def _write(path: Path, data: bytes) -> None:
    """What has left is no secret here either. The verdict was told before: it stands, whatever the disk does.

    Raises:
        BadOrder: the disk does not take it.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        raise BadOrder(f"{path.name}: {error.strerror}; the set has left all the same") from None


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
