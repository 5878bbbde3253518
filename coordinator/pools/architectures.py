"""Which networks a site may release: an architecture is read from a file, shown, and approved by the operator.

A model whose architecture is not approved is refused, and its grant is spent; so a site has its architecture approved
before it makes the release. It follows from public configuration alone: any model of the same configuration shows it,
one that was trained on synthetic images, or not at all.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from coordinator.pools.selection import PoolRefusedError
from coordinator.sandbox.inspector_process import inspect
from coordinator.storage.directory import CoordinatorDirectory
from policies.statements import ID
from protos.artifacts.byte_source import ArtifactFormatError, FileSource
from protos.artifacts.strict_safetensors import Architecture
from protos.common.durable_files import replace_file

FOLDER: Final = "architectures"  # in the coordinator's directory
_MOST: Final = 1 << 23  # bytes of an architecture's own file


def architecture_of(file: Path) -> Architecture:
    """The architecture of a model file in its strict form, or the one that a JSON file holds.

    The header alone is parsed here; the values are looked at in the sandbox.

    Raises:
        PoolRefusedError: neither; or a value is not finite, or the file holds anything beside its tensors.
        OSError: it cannot be read.
    """
    try:
        with file.open("rb") as raw:
            if file.suffix == ".json":
                return Architecture.parse(raw.read(_MOST).removesuffix(b"\n"))
            shown = Architecture.shown_by(FileSource.of(raw.fileno()))
    except ArtifactFormatError as refusal:
        raise PoolRefusedError(f"{file.name}: {refusal}") from None
    found = inspect(file, "model", {"architecture": shown.encode().decode()})
    if not found.ok:
        raise PoolRefusedError(f"{file.name}: {found.reason}")
    return shown


def approve_architecture(home: CoordinatorDirectory, name: str, shown: Architecture) -> Path:
    """From now on models of exactly this architecture are admitted; approved twice under one name, written once.

    Raises:
        PoolRefusedError: the name is not a short word, or another architecture has it.
    """
    if not ID.fullmatch(name):
        raise PoolRefusedError("a name is one short word of lower-case letters, digits, _ and -")
    path, body = home.root / FOLDER / f"{name}.json", shown.encode()
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() != body:
            raise PoolRefusedError(
                f"{path.name} is another architecture: choose another name, or remove that file first"
            )
        return path
    path.parent.mkdir(exist_ok=True)
    replace_file(path, body)
    return path
