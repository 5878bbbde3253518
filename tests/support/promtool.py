"""Prometheus' own tool (Debian: prometheus) as the judge of what we call metrics and rules."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.peers import need


def promtool(*words: str, stdin: bytes = b"", cwd: Path | None = None) -> str:
    """Run it; what it said. It must find nothing."""
    need("promtool")
    done = subprocess.run(["promtool", *words], input=stdin, capture_output=True, check=False, cwd=cwd, timeout=120)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def lint(page: bytes) -> list[str]:
    """What ``promtool check metrics`` says of a page, but for the unit that the issue asks for: days."""
    need("promtool")
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False, timeout=60)
    lines = (done.stdout + done.stderr).decode().splitlines()
    return [line for line in lines if not line.startswith("lazaret_certificate_days_left use base unit")]
