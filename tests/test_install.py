"""What a command loads before it does anything; that both sides install is tests/journeys/test_bundle.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_command_of_the_coordinators_starts_without_the_accountant_of_record() -> None:
    """A price is confirmed when it is granted; a second for every command would be waited for by a person."""
    slow = {"dp_accounting", "scipy", "flwr", "fastapi", "fpdf", "alembic", "sqlalchemy"}
    loaded = f"import sys, coordinator.cli.main; sys.exit(bool({slow!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", loaded], check=False, cwd=ROOT).returncode == 0
