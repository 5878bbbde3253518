"""``lazaret-coordinator``: parse what was typed, import the command that it names, and run it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from coordinator.cli import options
from protos.operations.command_line import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 done, 1 refused or failed, 2 usage, 70 internal."""
    return run_main(options.build_parser(), carry_out, argv)


def carry_out(arguments: argparse.Namespace) -> int:  # noqa: C901 - a case a file of commands
    """Import what carries out the command, and nothing else: help and errors of usage wait for no library."""
    match arguments.command.split():
        case ["setup" | "init" | "renew-ca" | "serve"]:
            from coordinator.cli.setup import run
        case ["round", "simulate"]:
            from coordinator.cli.simulate import run
        case ["round", "report"]:
            from coordinator.cli.report import run_report as run
        case ["invite" | "enrolments" | "approve" | "revoke"] | ["round", _]:
            from coordinator.cli.operator_client import run
        case ["pool", _]:
            from coordinator.cli.pool import run
        case ["login", _]:
            from coordinator.cli.output import say
            from protos.web import login_cli

            return login_cli.run(arguments, say)
        case ["doctor"]:
            from coordinator.operations.doctor import doctor as run
        case ["status"]:
            from coordinator.operations.status import run
        case ["backup" | "restore" | "upgrade"]:
            from coordinator.cli.backup import run
        case ["ledger", _]:
            from coordinator.cli.ledger import run
        case ["report"]:
            from coordinator.cli.report import run
        case _:
            raise AssertionError(arguments.command)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
