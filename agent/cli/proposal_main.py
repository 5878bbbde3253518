"""The process in which the console has proposals described and priced: ``python -m agent.cli.proposal_main WHAT``.

``forms`` prints every form as JSON. ``check HOME WORD...`` reads a command's configuration with the command's own
reader; of a release it also makes the dry run, whose JSON it prints. Nothing is read of patients, spent or written.
The console's process stays without torch, and what this one needs is given back when it ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from agent.cli import main as command_line
from agent.cli import options
from agent.cli.output import require_device
from protos.operations.command_line import run_main
from protos.operations.process_bounds import bound


def main(words: Sequence[str]) -> int:
    """Exit as the command would: 0 fine, 1 refused, 2 usage."""
    bound(0)
    if words[0] == "forms":
        from agent.cli.proposal_forms import forms  # noqa: PLC0415 - torch, which a price of k-Same does without

        sys.stdout.write(json.dumps([dataclasses.asdict(form) for form in forms()]) + "\n")
        return 0
    home, *command = words[1:]
    if command[0] == "release":
        command = [word for word in command if not word.startswith("--sheet=")] + ["--dry-run", "--json"]
        return run_main(options.build_parser(), command_line.carry_out, ["--home", home, *command])
    return run_main(options.build_parser(), _trained, ["--home", home, *command])


def _trained(arguments: argparse.Namespace) -> int:
    """Of a training, what can be known without an image: the words, and the device."""
    if getattr(arguments, "device", "cpu") != "cpu":
        require_device(arguments.device, "the device cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
