"""``ledger dismiss``, ``limit`` and ``approve``: what only asks the running service, and waits for no library."""

from __future__ import annotations

import argparse

from agent.service.commands import site_acts
from policies.governance.asking import COMMANDS
from protos.operations.command_line import print_line


def run(arguments: argparse.Namespace) -> int:
    """Ask the service, or do it here where none runs."""
    act = COMMANDS[arguments.command.rpartition(" ")[2]]
    act(arguments, lambda told: site_acts(told.home, _step), print_line)
    return 0


def _step(name: str, detail: str) -> None:
    """Of what is done here."""
    from agent.cli.output import print_progress  # noqa: PLC0415 - who only asks the service waits for none of this

    print_progress(name, detail, silent=False)
