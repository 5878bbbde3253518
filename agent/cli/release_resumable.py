"""The commands that release under differential privacy, a task's model among them; and both distillations."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from agent.cli import distillation_review
from agent.cli import release as commands
from agent.cli.output import OUT, print_progress, print_verdict
from agent.domain import ExampleRule, Selection
from agent.dp.dpsgd import best_engine
from agent.dp.noise import SystemEntropy
from agent.errors import CommandError
from agent.mechanisms.centroids.config import read_centroids
from agent.mechanisms.distillation.config import read_distill
from agent.mechanisms.distillation.teacher_student import Review
from agent.mechanisms.federated.config import ModelSite, read_model
from agent.mechanisms.federated.task_training import engine_of
from agent.mechanisms.privimage.config import read_privimage
from agent.mechanisms.registry import Centroids, Distill, DistillDp, PrivImage, Resumable, TaskModel
from agent.privacy_audit.gate import gate
from agent.release.packaging import ReleaseFormat
from agent.release.pipeline import release_resumable
from agent.release.ports import SignedRelease
from agent.release.preflight import of_configuration, refuse
from agent.release.resumable import give_up_earlier
from agent.runtime import OpenSite
from agent.service.making import begin_making
from policies.accounting.accountant import NANO, tight_epsilon
from policies.accounting.claims import Gaussian, SubsampledGaussian
from policies.accounting.rounding import epsilon_text
from policies.review.rules import Verdict
from policies.tasks.evaluation import TRAINED

_READERS: dict[str, Any] = {
    PrivImage.name: read_privimage,
    Centroids.name: read_centroids,
    Distill.name: partial(read_distill, name=Distill.name),
    DistillDp.name: partial(read_distill, name=DistillDp.name),
}


def run(arguments: argparse.Namespace) -> int:
    """Make and submit a synthetic set; exit 1 when any review refuses it, or the audit does."""
    name = arguments.mechanism
    commands.refuse_files(arguments)

    def say(step: str, detail: str) -> None:
        print_progress(step, detail, arguments.json)

    with commands.open_release(arguments, say) as runtime:
        mechanism, selection, told = _read(arguments, runtime, say)
        if arguments.blank is not None:
            return distillation_review.write_blank(arguments, mechanism)
        arguments.modality = selection.modality
        wrapping = _wrapping(arguments, runtime, mechanism)
        claim = mechanism.claim()
        foreseen = of_configuration(runtime.site, mechanism, selection, wrapping)
        if arguments.dry_run:
            asked = commands.asked_for(mechanism, selection, arguments.anew)
            return commands.dry_run(runtime, foreseen, asked, arguments.json)
        for line in (*told, commands.priced(runtime.site.ledger.account(runtime.site.name, claim), claim)):
            say("price", line)
        refuse(runtime.site, foreseen)  # before the audit, which takes its time
        begin_making(runtime, anew=False)
        _audit(mechanism, say)
        if arguments.anew:  # after the audit: on a machine that is not fit to draw noise, nothing is given up either
            give_up_earlier(runtime.site)
        shown, entropy = _shown(arguments, mechanism, say), SystemEntropy()
        make = lambda: release_resumable(runtime.site, mechanism, selection, entropy, wrapping, shown)  # noqa: E731
        return commands.run_release(runtime, arguments, name, make, partial(_print, arguments, name))


def _read(
    arguments: argparse.Namespace, runtime: OpenSite, say: Callable[[str, str], None]
) -> tuple[Resumable, Selection | ExampleRule, tuple[str, ...]]:
    if arguments.mechanism == TaskModel.name:
        site = runtime.site
        account = site.ledger.account(site.name, SubsampledGaussian(1.0, 1.0, 1))  # the one of that kind
        model = read_model(arguments.config, ModelSite(account.opened, site.public_file, site.label_misfit), say)
        return model, model.rules()[TRAINED], ()
    made = _READERS[arguments.mechanism](arguments.config, runtime.settings.public_components, say)
    return made.mechanism, made.selection, made.told


def _audit(mechanism: Resumable, say: Callable[[str, str], None]) -> None:
    """Before a release that claims noise.

    Raises:
        NoiseAuditError: this machine does not draw it.
    """
    if isinstance(mechanism, Distill):
        return
    say("audit", "checking that this machine draws the noise that is claimed")
    if isinstance(mechanism, Centroids):
        gate(SystemEntropy(), best_engine("cpu"))
        return
    if isinstance(mechanism, TaskModel):
        training = mechanism.training
        batch = training.task.training.expected_batch
        gate(SystemEntropy(), engine_of(training.network(files=mechanism.files), batch))
        return
    device = (mechanism.model if isinstance(mechanism, PrivImage) else mechanism.course.model).device
    gate(SystemEntropy(), best_engine(device, mechanism.sgd.expected_batch), device)


def _shown(
    arguments: argparse.Namespace, mechanism: Resumable, say: Callable[[str, str], None]
) -> Callable[[Review], None]:
    """What is done with what the site's reviewer must see, before anything leaves."""
    show = distillation_review.shown(arguments, isinstance(mechanism, Distill), say)

    def told(review: Review) -> None:
        show(review)
        if arguments.json:  # a line of its own: it stands whatever the verdict is, or waits for persons
            line = {"mechanism": mechanism.name, "review": distillation_review.as_json(review)}
            sys.stdout.write(json.dumps(line) + "\n")

    return told


def _wrapping(arguments: argparse.Namespace, runtime: OpenSite, mechanism: Resumable) -> ReleaseFormat:
    """How the set is written.

    Raises:
        CommandError: a model was asked to be written as images.
        ArtifactFormatError: the form cannot hold such images.
    """
    if mechanism.untrained() is not None and arguments.form != "png":
        raise CommandError("--form is for images: a model leaves as safetensors")
    return commands.release_format(arguments, runtime.home.root, colour=len(mechanism.shape) == 3)


def _print(arguments: argparse.Namespace, name: str, signed: SignedRelease | None, verdict: Verdict) -> None:
    """The verdict, with what was charged; and what the same claim comes to by the sharper accountant."""
    r = signed.release if signed else None
    if r is None or r.epsilon_nano is None or r.delta is None or not isinstance(r.claim, Gaussian):
        print_verdict(r.release if r else "", name, verdict, arguments.json)
        return
    charged, tight = r.epsilon_nano / NANO, tight_epsilon([r.claim], float(r.delta))
    if arguments.json:
        findings = [{"rule": f.rule, "detail": f.detail} for f in verdict.findings]
        line = {"release": r.release, "mechanism": name, "admitted": verdict.admitted, "level": verdict.level}
        more = {"epsilon": charged, "delta": r.delta, "unit": r.claim.unit, "epsilon_by_loss_distributions": tight}
        sys.stdout.write(json.dumps({**line, **more, "findings": findings}) + "\n")
        return
    print_verdict(r.release, name, verdict, False)
    OUT.print(
        f"epsilon {epsilon_text(charged)} at delta {r.delta} per {r.claim.unit}, as the ledger has it; "
        f"the same claim by loss distributions: {epsilon_text(tight)}",
        soft_wrap=True,
    )
