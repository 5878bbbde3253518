"""What the command lines of both sides have in common.

It imports argparse and our errors alone: ``--help`` waits for nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from protos.common.errors import InvariantError, LazaretError, LedgerIntegrityError, out_of_memory

_CONTROLS: Final = dict.fromkeys((7, 8, 11, 12, 13))  # what moves a terminal's cursor, or rings


def print_line(text: str, *, error: bool = False) -> None:
    """Print a line for people, as it is, on standard output or standard error."""
    print(text.translate(_CONTROLS), file=sys.stderr if error else sys.stdout)


def add(group: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command to a group of subparsers; ``command`` becomes the words by which it is typed: "ledger show"."""
    command: argparse.ArgumentParser = group.add_parser(name, help=text, description=text)
    command.set_defaults(command=command.prog.partition(" ")[2])
    return command


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments as typed. Files that the command makes are for its user alone.

    Raises:
        SystemExit: the usage is wrong, or help was asked for.
    """
    os.umask(0o077)
    arguments = parser.parse_args(words)
    if arguments.home is None and not getattr(arguments, "homeless", False):
        parser.error("the following arguments are required: --home")
    if check := getattr(arguments, "usage_check", None):  # of a command whose options do not all go together
        check(arguments)
    return arguments


def run_main(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Parse what was typed and run it; whatever goes wrong becomes one line on standard error.

    Args:
        parser: of all commands.
        run: imports and carries out the command.
        argv: the words; None: those of this process.
    Returns:
        0 done, 1 refused or failed, 2 usage, 70 internal.
    """
    arguments = parse(parser, argv)
    say = partial(print_line, error=True)
    try:
        return run(arguments)
    except OSError as error:
        say(f"refused: {error.strerror or error}: {Path(str(error.filename or '')).name}")
        return 1
    except InvariantError as error:
        say(f"stopped: internal fault ({type(error).__name__})")
        return error.exit_code
    except LazaretError as error:
        say(f"{'stopped' if isinstance(error, LedgerIntegrityError) else 'refused'}: {error}")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - whatever it is: stop, and say no text that may hold patient data
        if out_of_memory(error):
            say("refused: memory ran out: free some or take smaller batches, and give the same command again")
            return 1
        say(f"stopped: internal fault ({type(error).__name__})")
        return 70


def add_backup_commands(commands: Any, texts: Mapping[str, str]) -> Mapping[str, argparse.ArgumentParser]:
    """Add ``backup``, ``restore`` and ``upgrade``; a side adds its own options to what this returns.

    :func:`protos.operations.backup.new_passphrase` and ``private_keys`` hold what both sides do with them.

    Args:
        commands: the group of all commands.
        texts: the help of each, and of the option ``--last``.
    """
    parsers = {name: add(commands, name, texts[name]) for name in ("backup", "restore", "upgrade")}
    out, back, up = parsers.values()
    out.add_argument("out", type=Path, help="a new folder, on another machine's disk")
    out.add_argument("--with-keys", action="store_true", help="include the keys, encrypted with a passphrase")
    back.add_argument("folder", type=Path, help="the backup")
    back.add_argument("--keys", type=Path, help="a copy of keys/, if the backup has no keys")
    back.add_argument("--last", type=Path, help=texts["--last"])
    for command in (out, back):
        command.add_argument("--passphrase-file", type=Path, help="else it is asked for")
    up.add_argument("--check", action="store_true", help="only check: exit 1 if an upgrade is needed")
    for command in (back, up):
        command.add_argument("--json", action="store_true")
    return parsers


def add_login_commands(commands: Any) -> None:
    """Add the group ``login``, the same on both sides; :mod:`protos.web.login_cli` carries it out."""
    group = commands.add_parser("login", help="manage logins to the console").add_subparsers(
        required=True, metavar="WHAT"
    )
    made = add(group, "make", "on your own machine: make a key and a certificate for your browser")
    made.set_defaults(homeless=True)
    made.add_argument("name", help="your name in the ledger")
    made.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    trusted = add(group, "trust", "permit a person's login with this certificate only")
    trusted.add_argument("name")
    trusted.add_argument("certificate", type=Path)
    gone = add(group, "forget", "end a person's login, from now on")
    gone.add_argument("name")
    listed = add(group, "list", "list the pinned certificates and their end")
    listed.add_argument("--json", action="store_true")


def add_setup_options(command: argparse.ArgumentParser) -> None:
    """What ``setup`` of both sides can be told: the console, a login, and the first two persons."""
    console = "by which browsers reach the console, NAME or NAME:PORT"
    command.add_argument("--console", default="", metavar="NAME", help=console)
    login = "pin the first login: a person's name, and the certificate that `login make` wrote"
    command.add_argument("--login", nargs=2, default=(), metavar=("NAME", "FILE"), help=login)
    for role in ("compliance", "hospital"):
        person = f"first person of {role}: a name, and the public key that `ledger person` printed"
        command.add_argument(f"--{role}", nargs=2, default=(), metavar=("NAME", "KEY"), help=person)
