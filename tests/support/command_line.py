"""A command, run in this process as it is typed: of the agent, or of another program that tests give."""

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


def typing(
    run: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Typed:
    """What types the words of a command for ``run`` and says how it ended, on lines of 200 characters."""
    for console in (output.OUT, output.ERR):
        monkeypatch.setattr(console, "_width", 200)

    def act(*words: object) -> CommandResult:
        capsys.readouterr()
        status = run([str(word) for word in words])
        said = capsys.readouterr()
        return CommandResult(status, said.out, said.err)

    return act


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """A command as it is typed, without a site."""
    return typing(main, capsys, monkeypatch)


def at(site: Site) -> tuple[object, ...]:
    return ("--home", site.home.root)
