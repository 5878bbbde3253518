"""The page for notebooks tells the truth: its blocks run in order beside a serving agent, and print what it shows."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos.identity.key_files import pem, write_private
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Site
from tests.support.ledger_world import Person
from tests.support.picture_folders import write_pictures
from tests.support.release_site import site
from tests.support.site_serving import serving

__all__ = ["site", "typed"]  # fixtures

PAGE = Path(__file__).parents[2] / "deploy" / "docs" / "notebook.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_page_for_notebooks_runs_as_written(
    site: Site, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dice, officer = np.random.default_rng(3), Person("dpo-1", "compliance")
    pictures = {f"{n}.png": dice.integers(0, 256, (16, 16), np.uint8) for n in range(24)}
    write_pictures(tmp_path, pictures).joinpath("pictures").rename("public")
    write_private(tmp_path / "dpo-1.key", pem(officer.key))
    assert typed(*at(site), "ledger", "appoint", officer.name, officer.role, officer.public.hex()).status == 0
    policy = site.home.root / "policy.toml"
    policy.write_text(policy.read_text().replace("approvals = []", 'approvals = ["compliance"]'))
    notebook: dict[str, Any] = {}
    with serving(site, jobs=True):
        assert typed(*at(site), "ledger", "amend").status == 0
        said = ""
        for language, text in BLOCK.findall(PAGE.read_text()):
            if language == "text":
                assert said == text
            elif language == "sh":
                approved(typed, text, notebook["status"].release)
            else:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(text, notebook)
                said = out.getvalue()


def approved(typed: Typed, lines: str, release: str) -> None:
    """What the approver and the operator type; the digest is what ``inspect`` printed."""
    digest = ""
    for line in lines.splitlines():
        program, *words = shlex.split(line.replace("$RELEASE", release).replace("$DIGEST", digest))
        said = typed(*words)
        assert (program, said.status) == ("lazaret-agent", 0), said.err
        if "inspect" in words:
            digest = re.findall(r"[0-9a-f]{64}", said.out)[-1]
