"""``lazaret-agent``: parse what was typed, import the command that it names, and run it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from agent.cli import options
from agent.mechanisms.kanonymous import OPTIONS
from protos.operations.command_line import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 done, 1 refused or failed, 2 usage, 70 internal."""
    words = sys.argv[1:] if argv is None else argv

    def run(arguments: argparse.Namespace) -> int:
        if not getattr(arguments, "detach", False):
            if arguments.command != "jobs priority" and getattr(arguments, "priority", None):
                from agent.errors import CommandError

                raise CommandError("--priority is of a job: add --detach")
            return carry_out(arguments)
        from agent.cli import detach

        return detach.queue(arguments, words, carry_out)

    return run_main(options.build_parser(), run, words)


def carry_out(arguments: argparse.Namespace) -> int:  # noqa: C901, PLR0912, PLR0915 - a case a file of commands
    """Import what carries out the command, and nothing else: help and errors of usage wait for no library."""
    match arguments.command.split():
        case ["setup" | "init" | "enrol"]:
            from agent.cli.setup import run
        case ["doctor" | "status"]:
            from agent.cli.doctor import run
        case ["ingest" | "what-if"]:
            from agent.cli.ingest import run
        case ["quarantine", _]:
            from agent.cli.quarantine import run
        case ["manifest" | "cohort"]:
            from agent.cli.cohort import run
        case ["labels", _]:
            from agent.cli.labels import run
        case ["opt-out" | "project", _] | ["identity" | "token"]:
            from agent.cli.administration import run
        case ["deface"]:
            from agent.cli.deface import run
        case ["release", name] if name in OPTIONS:
            from agent.cli.release_kanonymous import run
        case ["release", "privimage" | "centroids" | "distill" | "distill-dp" | "model"]:
            from agent.cli.release_resumable import run
        case ["release", "remodel"] | ["train", "remodeller"]:
            from agent.cli.release_heads import run
        case ["release", "send" | "inspect" | "withdraw"] | ["ledger", "amend"]:
            from agent.cli.made_release import run
        case ["run", _]:
            from agent.cli.run_plans import run
        case ["jobs", _]:
            from agent.cli.jobs import run
        case ["tune"]:
            from agent.cli.tune import run
        case ["evaluate"] if arguments.labels:
            from agent.cli.evaluate_model import run
        case ["evaluate"]:
            from agent.cli.evaluate import run
        case ["predict"]:
            from agent.cli.predict import run
        case ["train", "codebook"]:
            from agent.cli.codebook import run
        case ["train", "autoencoder" | "verifier" | "aligner"]:
            from agent.cli.train_distillation import run
        case ["train", _]:
            from agent.cli.train import run
        case ["weights", _]:
            from agent.cli.weights import run
        case ["draw"]:
            from agent.cli.sample import run
        case ["audit"]:
            from agent.cli.audit import run
        case ["task", "check"]:
            from agent.cli.task import run
        case ["task", "from-bundle"]:
            from agent.cli.task_bundle import run
        case ["task", "to-bundle"]:
            from agent.cli.task_to_bundle import run
        case ["task", "preview"]:
            from agent.cli.task_preview import run
        case ["serve"]:
            from agent.cli.serve import run
        case ["backup" | "restore" | "recover" | "upgrade"]:
            from agent.cli.backup import run
        case ["console"]:
            from agent.cli.console import run
        case ["login", _]:
            from agent.cli.output import say
            from protos.web import login_cli

            return login_cli.run(arguments, say)
        case ["ledger", "dismiss" | "limit" | "approve"]:
            from agent.cli.ledger_decisions import run
        case ["ledger", _]:
            from agent.cli.ledger import run
        case _:
            raise AssertionError(arguments.command)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
