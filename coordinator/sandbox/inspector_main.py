"""The program of the sandbox: it knows the readers of artifacts, and nothing of the wire, the ledger or Flower.

This is a wall: see ``coordinator.sandbox.inspector_process``.
"""

from __future__ import annotations

from typing import Any

from protos.artifacts.byte_source import ArtifactFormatError, FileSource
from protos.artifacts.inspection import check
from protos.operations.confinement import serve


def main() -> None:
    """Check one file, as ``coordinator.sandbox.inspector_process`` asks."""
    serve(_checked)


def _checked(source: FileSource, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"facts": check(source, request["type"], request["expected"])}
    except ArtifactFormatError as refusal:
        return {"reason": str(refusal)}
