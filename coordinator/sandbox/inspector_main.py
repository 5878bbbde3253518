"""The program of the sandbox: it knows the readers of artifacts, and nothing of the wire, the books or Flower."""

from __future__ import annotations

from typing import Any

from protos.blocks import BadArtifact, Opened
from protos.inspection import check
from protos.operations.confinement import serve


def main() -> None:
    """Check one file, as ``coordinator.edges.sandbox`` asks."""
    serve(_checked)


def _checked(source: Opened, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"facts": check(source, request["type"], request["expected"])}
    except BadArtifact as refusal:
        return {"reason": str(refusal)}
