"""The federation that every test here copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.stage import build


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enrolled sites with cohorts; nothing runs."""
    return build(tmp_path_factory.mktemp("faults") / "template")
