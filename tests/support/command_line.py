"""A command of the agent, run in this process as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from agent.cli import output
from agent.cli.main import main
from tests.support.federation_world import Site


@dataclass(frozen=True)
class CommandResult:
    status: int
    out: str
    err: str

    @property
    def line(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Typed = Callable[..., CommandResult]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """A command as it is typed, without a site."""
    for console in (output.OUT, output.ERR):
        monkeypatch.setattr(console, "_width", 200)

    def act(*words: object) -> CommandResult:
        capsys.readouterr()
        status = main([str(word) for word in words])
        said = capsys.readouterr()
        return CommandResult(status, said.out, said.err)

    return act


def at(site: Site) -> tuple[object, ...]:
    return ("--home", site.home.root)
