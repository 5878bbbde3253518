"""The words of the commands by which persons decide about a ledger; argparse alone.

:mod:`policies.governance.cli` carries them out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

ROLES: Final = ("auditor", "compliance", "hospital", "operator", "researcher")  # policies.ledger.approvals.ROLES
VALUES: Final[Mapping[str, str]] = MappingProxyType(  # action -> the value that is signed
    {
        "amend": "the SHA-256 of policy.toml",
        "appoint": "ROLE KEY",
        "dismiss": "ROLE",
        "enrol": "the signed request's SHA-256 in hexadecimal",
        "limit": "BUDGET",
        "refuse": "SHA-256 REASON",
        "release": "SHA-256",
        "run": "the plan's SHA-256, as `run show` prints it",
        "use": "the SHA-256 that `predict` prints for a model",
        "waive": "EPOCH-NONCE, as `ledger waive` prints it",
    }
)


def add_commands(group: Any, add: Callable[[Any, str, str], argparse.ArgumentParser]) -> None:
    """Add the commands by which persons are named, ask, sign, approve and set limits to the ``ledger`` commands.

    Args:
        group: the subparsers of ``ledger``.
        add: ``add(group, name, help)`` makes the parser of one command.
    """
    text = "a new one for each ledger: what a key has signed for a pilot holds in every ledger of that name"
    person = add(group, "person", f"make a person's key; the public part is printed, to be appointed ({text})")
    person.set_defaults(homeless=True)
    person.add_argument("out", type=Path, help="file for the private key; it stays with the person")
    appoint = add(group, "appoint", "appoint a person who may approve (an operator never may)")
    appoint.add_argument("person", help="a short opaque name, such as dpo-1")
    appoint.add_argument("role", choices=ROLES)
    appoint.add_argument("key", help="the public key that `ledger person` printed")
    appoint.add_argument("--serial", default="", help="ID of the approved proposal; not for the first of each role")
    dismiss = add(group, "dismiss", "dismiss a person, as both roles approved; never the last of a role")
    dismiss.add_argument("person")
    dismiss.add_argument("--serial", default="", help="ID of the approved proposal")
    ask = add(group, "ask", "as a person: sign a request for `ledger approve`; others approve it")
    sign = add(group, "sign", "as a person: sign an approval of what waits, by its number, or of a proposal in words")
    _add_signing(ask, "")
    _add_signing(sign, "the number that `status` shows; or, also on another machine, ")
    text = "an enrolment's fingerprint, as the hospital read it out by telephone (default: it is asked for)"
    sign.add_argument("--fingerprint", default="", help=text)
    sign.add_argument("--yes", action="store_true", help="sign what the number stands for without being asked")
    propose = add(group, "propose", "print what must be signed to change a limit")
    limit = add(group, "limit", "change a limit as approved: two roles to raise it, one to lower it")
    for command in (propose, limit):
        command.add_argument("account", help="<site>/rdp or <site>/k")
        command.add_argument("budget", help="epsilon, or the number of releases per patient")
    limit.add_argument("--serial", required=True)
    approve = add(group, "approve", "write signed requests and approvals into the ledger")
    approve.add_argument("approvals", type=Path, nargs="+")


def _add_signing(command: argparse.ArgumentParser, words: str) -> None:
    """What both ways to sign have in common; ``words``: the help of what is signed."""
    actions = ", ".join(sorted(VALUES))
    command.add_argument(
        "words", nargs="+", metavar="WORD", help=f"{words}ACTION SUBJECT VALUE; ACTION is one of {actions}"
    )
    command.add_argument("--person", required=True, help="who signs")
    command.add_argument("--serial", default="", help="ID of the proposal, the same for all who sign")
    command.add_argument("--key", type=Path, required=True, help="the person's private key")
    command.add_argument(
        "--ledger", default="", help="the ledger's name, as the console shows it (default: that of --home)"
    )
    command.add_argument("--out", type=Path, help="write a file for `ledger approve` (default: hand it in at once)")
    command.set_defaults(homeless=True, usage_check=_of_signing(command))


def _of_signing(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """What goes with a number, and what with words; what is left out is in the home directory."""

    def check(arguments: argparse.Namespace) -> None:
        words: list[str] = arguments.words
        if by_number(words) and parser.prog.endswith("sign"):
            if arguments.serial or arguments.ledger:
                parser.error("a number stands for all of it: leave out --serial and --ledger")
            if arguments.home is None:
                parser.error("a number is known in its directory alone: give --home before the command, or all words")
            return
        if len(words) < 3 or words[0] not in VALUES:
            parser.error(f"sign what? A number of `status`, or ACTION SUBJECT VALUE: {', '.join(sorted(VALUES))}")
        needed = ["--serial"] * (not arguments.serial) + ["--out"] * (
            arguments.out is None and arguments.home is None
        )
        if needed:
            parser.error(f"the following arguments are required: {', '.join(needed)}")

    return check


def by_number(words: Sequence[str]) -> bool:
    """Whether these words are a short number."""
    return len(words) == 1 and words[0].isascii() and words[0].isdigit()
