"""A model as the coordinator exported it: every file is checked before anything of it is loaded.

The ledger's key has signed the certificate that comes with the model. It names the model's SHA-256 and the digest of
the task whose network it is, so a folder with another file, another task or another coordinator's signature is
refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.deidentify.errors import FileRejectedError
from agent.file_access import contents
from policies.audit.certificate import TASK, Certificate, read
from policies.audit.certificate_check import check
from policies.ledger.export import ExportError
from policies.statements import PAYLOAD_TYPE, Release, StatementError, parse
from policies.tasks.bounds import TaskError
from policies.tasks.released_model import (
    KIND,
    MODEL_FILE,
    PARAMETERS,
    SIGNED,
    SUMS_FILE,
    TASK_FILE,
    model_config,
    model_tensors,
)
from policies.tasks.task import Task, task_from_json
from protos.artifacts.arrays import unpack_vector
from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.strict_safetensors import Architecture, canonical, unpack_weights
from protos.common.dsse import EnvelopeError, read_envelope
from protos.common.errors import ArtifactError

if TYPE_CHECKING:
    from agent.models.networks.trainable import TrainableNetwork

_MOST: Final = 1 << 30  # bytes of a model: more than a hundred million numbers take
_MOST_TEXT: Final = 1 << 27  # of any other file of the folder
_EXPORTED: Final = "export it again: `lazaret-coordinator pool export MODEL --model NAME`"
PublicFile = Callable[[str], bytes | None]  # by SHA-256, if it is here and vouched for


class ModelFolderError(ArtifactError, ValueError):
    """The folder holds no model that may be used; the text says why, and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportedModel:
    """A model whose files are what the coordinator's ledger admitted."""

    name: str  # of the run or the release
    sha256: str  # of the model's file
    task: Task
    certificate: Certificate
    statements: tuple[Release, ...]  # of the hospitals, which the certificate rests on
    parameters: NDArray[np.float32] = field(repr=False)  # (p,), less their start
    papers: Mapping[str, bytes] = field(repr=False)  # every file of the folder but the model, by its name

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of its certificate."""
        return self.certificate.facts

    def network(self, public_file: PublicFile) -> TrainableNetwork:
        """The task's network at the released parameters.

        Raises:
            ModelFolderError: public weights are not here, or the network has another number of parameters.
        """
        if self.task.training.head == "own":
            raise ModelFolderError(
                f"{self.name}: each hospital of this run kept a head of its own (training.head), which is not in "
                "the file: nobody else can use such a model yet"
            )
        from agent.mechanisms.federated.task_training import trained_network_of  # noqa: PLC0415 - torch: seconds

        found = {digest: public_file(digest) for digest in self.task.network.public_files}
        if missing := [digest for digest, raw in found.items() if raw is None]:
            raise ModelFolderError(
                f"{self.name}: its network begins at public weights that are not in the folder weights, or not among "
                f"public_components of site.toml: {', '.join(missing)}"
            )
        given = {digest: raw for digest, raw in found.items() if raw is not None}
        network = trained_network_of(self.task, given.__getitem__)
        try:
            network.load(self.parameters)
        except ValueError:
            told = f"the file does not have the {network.parameters} finite numbers of the task's network"
            raise ModelFolderError(f"{self.name}: {told}") from None
        network.module.eval()
        return network


def read_model_folder(folder: Path, ledger_key: bytes | None, given: Task | None = None) -> ExportedModel:
    """Check a folder that ``pool export --model`` wrote, and read it.

    Args:
        folder: with the model, its task, the signed certificate and SHA256SUMS.
        ledger_key: the public key of this site's coordinator; None: any, and a person compares its fingerprint.
        given: its task, where the folder has none.
    Raises:
        ModelFolderError: a file is missing, is not the one in SHA256SUMS or in the certificate, or is no model.
    """
    files = _summed(folder, (MODEL_FILE, SIGNED, *(() if given else (TASK_FILE,))))
    signed = _certificate(files[SIGNED], ledger_key)
    facts, digest = signed.facts, hashlib.sha256(files[MODEL_FILE]).hexdigest()
    name = str(facts["subject"])
    if facts["artifact_sha256"] != digest:
        raise ModelFolderError(f"{MODEL_FILE} is not the file of the certificate of {name}: {_EXPORTED}")
    told, named = given.to_json().encode() if given else files[TASK_FILE], signed.words.get(TASK)
    in_the_file = given is not None and named is None and facts["kind"] != "model"  # then _parameters compares it
    if not in_the_file and named != hashlib.sha256(told).hexdigest():
        which = "the task that was given" if given else TASK_FILE
        raise ModelFolderError(f"{which} is not the task that the certificate of {name} names: {_EXPORTED}")
    task = given or _task(told, name)
    said = tuple(_statement(raw) for raw in signed.envelopes)
    parameters = _parameters(files.pop(MODEL_FILE), task, facts)
    return ExportedModel(name, digest, task, signed, said, parameters, files)


def _task(raw: bytes, name: str) -> Task:
    try:
        return task_from_json(raw.decode())
    except (TaskError, UnicodeDecodeError):
        raise ModelFolderError(
            f"{TASK_FILE}: this version cannot read the task of {name}: upgrade the agent"
        ) from None


def _statement(envelope: bytes) -> Release:
    """What a hospital said: :func:`check` has verified its signature."""
    try:
        said = parse(read_envelope(envelope, PAYLOAD_TYPE).payload)
    except (EnvelopeError, StatementError) as error:
        raise ModelFolderError(f"{SIGNED}: {error}") from None
    assert isinstance(said, Release), "the certificate was checked"
    return said


def _summed(folder: Path, needed: Sequence[str]) -> dict[str, bytes]:
    """Every file that SHA256SUMS names, each as it has it; those that are needed are among them."""
    lines = _file(folder, SUMS_FILE, _MOST_TEXT).decode("utf-8", "replace").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if missing := [name for name in needed if name not in sums]:
        raise ModelFolderError(f"{folder.name} has no {missing[0]}: {_EXPORTED}, with a coordinator of this version")
    found = {}
    for name, digest in sums.items():
        if not name or Path(name).name != name:
            raise ModelFolderError(f"{SUMS_FILE} names a file that is not in the folder: {_EXPORTED}")
        body = _file(folder, name, _MOST if name == MODEL_FILE else _MOST_TEXT)
        if hashlib.sha256(body).hexdigest() != digest:
            raise ModelFolderError(f"{name} is not the file in {SUMS_FILE}; it was changed: {_EXPORTED}")
        found[name] = body
    return found


def _file(folder: Path, name: str, most: int) -> bytes:
    try:
        return contents(folder / name, most)
    except FileRejectedError:
        raise ModelFolderError(f"{folder.name} has no {name} that can be read: {_EXPORTED}") from None


def _certificate(raw: bytes, ledger_key: bytes | None) -> Certificate:
    try:
        found = read(raw)
        if ledger_key is not None and found.public != ledger_key:
            raise ModelFolderError(f"{SIGNED} is signed by another key than that of this site's coordinator")
        check(found)
    except ExportError as error:
        raise ModelFolderError(f"{SIGNED}: {error}") from None
    return found


def _parameters(raw: bytes, task: Task, facts: Mapping[str, Any]) -> NDArray[np.float32]:
    """What the file holds of the network: a run's one vector, or a hospital's own beside the sums of a look."""
    part = facts["parts"][0]
    try:
        if facts["kind"] == "model":
            return unpack_vector(raw)
        if part["artifact_type"] != "model" or part["mechanism"] != "model" or part["reader"]:
            raise ModelFolderError("only models of tasks can be used: of a run, or of `release model`, not encrypted")
        shown = Architecture.shown_by(BytesSource(raw))
        (length,) = next(one.shape for one in shown.tensors if one.name == PARAMETERS)
        bins = json.loads(shown.told)["config"]["bins"]
        told = canonical({"kind": KIND, "config": model_config(task, bins), "notes": {}})
        lengths = model_tensors(task, length, bins)
        wanted = Architecture.of({name: ("F32", (count,)) for name, count in lengths.items()}, told)
        return unpack_weights(raw, wanted)[PARAMETERS]
    except (ArtifactFormatError, ValueError, KeyError, TypeError, StopIteration) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(f"{MODEL_FILE} is not a model of the task {task.name}: {_EXPORTED}") from None
