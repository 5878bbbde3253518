"""A network namespace that has loopback and no route, for what must do without a network."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest


@cache
def isolation() -> tuple[str, ...]:
    """The command that runs another without a network: as root, or in a user namespace; () where neither works."""
    for command in (("unshare", "-n"), ("unshare", "-r", "-n")):
        done = (
            subprocess.run([*command, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
        )
        if done is not None and done.returncode == 0:
            return command
    return ()


needs_namespace = pytest.mark.skipif(
    not isolation(), reason="no network namespace can be made here: neither as root nor in a user namespace"
)
