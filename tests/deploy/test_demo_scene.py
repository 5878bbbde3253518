"""The demo says in a command's own words why it failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.demo.scene import DemoFailed, Scale, Scene

SAYS = "import sys; print({answer!r}); print('every cluster is at risk', file=sys.stderr); sys.exit({status})"


def command(answer: str, status: int) -> list[str]:
    return [sys.executable, "-c", SAYS.format(answer=answer, status=status)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, tmp_path, Scale(5, 1))


def test_a_verdict_that_refuses_is_part_of_the_story(scene: Scene) -> None:
    assert scene.run(command('{"admitted": false}', 1), may_refuse=True) == '{"admitted": false}\n'
    with pytest.raises(DemoFailed, match="exit 1"):
        scene.run(command('{"admitted": false}', 1))


@pytest.mark.parametrize(("answer", "status"), [("", 1), ("", 70), ("{}", 70), ("{}", 2)])
def test_a_release_that_never_came_to_a_verdict_ends_the_demo_with_its_reason(
    scene: Scene, answer: str, status: int
) -> None:
    with pytest.raises(DemoFailed, match="every cluster is at risk"):
        scene.run(command(answer, status), may_refuse=True)
