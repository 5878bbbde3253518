"""``task from-bundle``: a MONAI bundle as the draft of a task. ``task to-bundle``: a finished model as a bundle."""

from __future__ import annotations

import argparse
import json
import sys

from agent.cli.output import say
from agent.cli.weights import convert
from agent.errors import CommandError
from agent.models.bundles.configuration import BundleFolder, read_bundle
from agent.models.bundles.draft import Answers, TaskDraft, draft_of
from protos.common.durable_files import replace_file


def run(arguments: argparse.Namespace) -> int:
    """Read the bundle as data, convert its weights where that is asked for, and write the draft last."""
    a = arguments
    if a.out.exists() or (a.weights is not None and a.weights.exists()):
        raise CommandError("--out and --weights must not exist yet: nothing is overwritten")
    bundle = read_bundle(a.folder)
    draft = draft_of(bundle, _answers(a, ""), a.config)  # before a file is made
    digest = ""
    if a.weights is not None:
        if bundle.weights is None:
            raise CommandError("--weights: the bundle has no models/model.pt and no models/model.safetensors")
        converted, digest = convert(bundle.weights, "", statistics=draft.batch_norms)
        draft = draft_of(bundle, _answers(a, digest), a.config)
        replace_file(a.weights, converted.file)
    replace_file(a.out, draft.text.encode())
    _tell(a, bundle, draft, digest)
    return 0


def _answers(a: argparse.Namespace, weights: str) -> Answers:
    return Answers(
        name=a.name,
        kind=a.kind,
        modality=a.modality,
        size=tuple(a.size or ()),
        classes=tuple(a.classes or ()),
        table=a.table,
        columns=tuple(a.columns or ()),
        public_patients=a.public_patients or 0,
        weights=weights,
    )


def _tell(a: argparse.Namespace, bundle: BundleFolder, draft: TaskDraft, digest: str) -> None:
    if a.json:
        told = {
            "file": a.out.name,
            "open": draft.open_keys,
            "notes": draft.notes,
            "left_out": draft.left_out,
            "weights": digest or None,
        }
        sys.stdout.write(json.dumps(told) + "\n")
        return
    say(f"{a.out}: a draft; read it before you use it")
    for head, lines in (
        ("to fill in, since a bundle cannot say it:", draft.open_keys),
        ("a task does otherwise:", draft.notes),
        ("left out:", draft.left_out),
    ):
        if lines:
            say(head)
            for line in lines:
                say(f"  {line}")
    if digest:
        say(f"{a.weights}: public weights, sha256 {digest}")
        say("if no patient of the cohort is in them, vouch for them in site.toml's public_components")
    elif bundle.weights is not None:
        statistics = " --statistics" if draft.batch_norms else ""
        say("its weights were not taken. To begin at them, give --weights FILE here, or type")
        say(f"  lazaret-agent weights convert {a.folder}/models/{bundle.weights.name} --out FILE{statistics}")
        say("and write the SHA-256 that it prints as weights in [network]")
    given = f" --weights {a.weights}" if digest else ""
    say(f"next: lazaret-agent task check {a.out}{given}")
