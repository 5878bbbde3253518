"""``task to-bundle``: the folder of a finished model becomes an inference bundle of MONAI, whole or not at all."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from agent.cli.output import say
from agent.cli.task import files_given
from agent.errors import CommandError
from agent.models.bundles.inference import inference, metadata, plain_network
from agent.prediction.model_folder import ExportedModel, read_model_folder
from policies.tasks.bounds import TaskError
from policies.tasks.released_model import SIGNED, TASK_FILE
from policies.tasks.task import Task, read_task, task_from_json
from protos.common.durable_files import create_file, fill_folder
from protos.common.text import count

_CERTIFICATE, _CARD, _TEXT = "certificate.json", "card.json", "card.md"
_PACKAGES: Final = {
    "monai": "monai",
    "pytorch": "torch",
    "numpy": "numpy",
    "nibabel": "nibabel",
    "pillow": "pillow",
    "ignite": "pytorch-ignite",
}
_IGNITE: Final = "0.4.11"  # MONAI 1.6.1 asks for this one or a later one
_NO_LICENCE: Final = "No licence is stated: ask before you share this model."
_NO_USE: Final = "not stated; not for diagnosis or treatment, for which it was not tested"


def run(arguments: argparse.Namespace) -> int:
    """Check the folder as ``predict`` does, build the trained network, and write the bundle."""
    a = arguments
    if a.out.exists():
        raise CommandError(f"{a.out.name}: exists already: nothing is overwritten")
    model = read_model_folder(a.model, None, None if a.task is None else _task(a.task))
    task, card = model.task, _json(model, _CARD)
    if _json(model, _CERTIFICATE).get("artifact_sha256") != model.sha256:
        raise CommandError(f"{_CERTIFICATE}: missing, or of another model")
    public = files_given(task, a.weights)
    plain = plain_network(task, model.network(lambda digest: public[digest].read_bytes()))
    configs = {
        "inference": inference(task, plain),
        "metadata": metadata(task, _versions(), _said(model, card)),
    }
    buffer = io.BytesIO()
    torch.save(dict(plain.state), buffer)
    written = {
        **{f"configs/{name}.json": (json.dumps(one, indent=2) + "\n").encode() for name, one in configs.items()},
        "models/model.pt": buffer.getvalue(),
        "docs/README.md": model.papers.get(_TEXT, b"# No card came with this model\n"),
        **{f"docs/{name}": model.papers[name] for name in (_CERTIFICATE, SIGNED)},
        f"docs/{TASK_FILE}": task.to_json().encode(),
        "LICENSE": (_licence(card, task) or _NO_LICENCE).encode() + b"\n",
    }
    _write(a.out, written)
    _tell(a, model, written)
    return 0


def _task(given: Path) -> Task:
    if given.suffix != ".json":
        return read_task(given)
    try:
        return task_from_json(given.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise CommandError("--task: cannot be read") from None
    except TaskError as error:
        raise CommandError(f"--task: {error}") from None


def _json(model: ExportedModel, name: str) -> dict[str, Any]:
    try:
        told = json.loads(model.papers.get(name, b"{}"))
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise CommandError(f"{name}: not JSON")
    return told


def _said(model: ExportedModel, card: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model, for its metadata; nothing stronger than its signed certificate says."""
    told, task, facts = _of_model(card), model.task, model.facts
    promise = {key: facts[key] for key in ("level", "meaning", "assumption")}
    hospitals = [{key: part[key] for key in ("site", "level", "claim", "epsilon")} for part in facts["parts"]]
    return {
        "hospitals": count(len(facts["sites"]), "hospital"),
        "intended_use": task.card.intended_use or told.get("intended_use") or _NO_USE,
        "licence": _licence(card, task) or _NO_LICENCE,
        "evaluation": {"private_evaluation": told.get("evaluation") or []},
        "lazaret": {
            "promise": {**promise, "hospitals": hospitals},
            "task_sha256": task.digest,
            "model_sha256": model.sha256,
            "ledger": {"origin": model.certificate.origin, "key_sha256": model.certificate.fingerprint},
            "public_weights_sha256": list(task.network.public_files),
        },
    }


def _licence(card: Mapping[str, Any], task: Task) -> str:
    return task.card.licence or str(_of_model(card).get("licence") or "")


def _of_model(card: Mapping[str, Any]) -> dict[str, Any]:
    told = card.get("model")
    return told if isinstance(told, dict) else {}


def _versions() -> dict[str, str]:
    found = {}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[name] = _IGNITE
    return found


def _write(out: Path, files: Mapping[str, bytes]) -> None:
    def fill(folder: Path) -> None:
        for name, body in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            create_file(folder / name, body)

    try:
        out.mkdir()
        try:
            fill_folder(out, fill, "LICENSE")
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
    except OSError as error:
        raise CommandError(f"{out.name}: {error.strerror}") from None


def _tell(a: argparse.Namespace, model: ExportedModel, files: Mapping[str, bytes]) -> None:
    task, signer = model.task, model.certificate.fingerprint
    if a.json:
        digests = {name: hashlib.sha256(body).hexdigest() for name, body in files.items()}
        told = {"task": task.digest, "ledger_key_sha256": signer, "files": digests}
        sys.stdout.write(json.dumps(told) + "\n")
        return
    images = "PNG pictures" if len(task.input.size) == 2 else "NIfTI volumes"
    say(f"{a.out}: a bundle of MONAI, without a word of Lazaret's code; its expressions are run by whoever runs it")
    say(f"its certificate is signed by the key {signer}: compare it with the coordinator's own")
    say(f"put {images} into {a.out}/images, and type (MONAI with pytorch-ignite and fire):")
    say(f"  python -m monai.bundle run --config_file {a.out}/configs/inference.json --bundle_root {a.out}")
