"""A site that takes images in from a folder beside it, and its commands as they are typed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent.cli.main import main

MODALITIES = ("CT", "MR", "OT")


def ingest_site(folder: Path, *modalities: str) -> Path:
    """The home of a hospital's agent, and an empty folder ``input`` beside it."""
    (folder / "input").mkdir()
    words = ["init", "--site", "site-a", "--policy", "internal", "--input", "../input"]
    words += [word for modality in modalities or MODALITIES for word in ("--modality", modality)]
    assert main(["--home", str(folder / "site"), *words, "--secondary-capture-modality", "OT"]) == 0
    return folder / "site"


def typed(capsys: pytest.CaptureFixture[str], site: Path, *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    capsys.readouterr()
    status = main(["--home", str(site), *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def told(capsys: pytest.CaptureFixture[str], site: Path, *words: str, status: int = 0) -> Any:
    """What a command says as JSON."""
    ended, out, err = typed(capsys, site, *words, "--json")
    assert ended == status, err
    return json.loads(out)


@pytest.fixture
def one_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that reads files, and not one for each processor: each costs half a second to start."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
