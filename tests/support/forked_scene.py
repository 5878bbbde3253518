"""The demo's federation for tests: what is run to its end is forked, what stays is started as a user starts it."""

from __future__ import annotations

from deploy.demo.scene import Scene
from tests.support.command_server import python


class ForkedScene(Scene):
    """The scene of the demo; see :mod:`tests.support.command_server`."""

    def run(self, command: list[str], may_refuse: bool = False) -> str:
        """As the demo types it."""
        return super().run([python(), *command[1:]], may_refuse)
