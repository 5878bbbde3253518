"""The words of the commands by which persons decide about a ledger; argparse alone.

:mod:`policies.governance.cli` carries them out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
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
    sign = add(group, "sign", "as a person: sign an approval of a proposal for `ledger approve`")
    for command in (ask, sign):
        _add_signing(command)
    propose = add(group, "propose", "print what must be signed to change a limit")
    limit = add(group, "limit", "change a limit as approved: two roles to raise it, one to lower it")
    for command in (propose, limit):
        command.add_argument("account", help="<site>/rdp or <site>/k")
        command.add_argument("budget", help="epsilon, or the number of releases per patient")
    limit.add_argument("--serial", required=True)
    approve = add(group, "approve", "write signed requests and approvals into the ledger")
    approve.add_argument("approvals", type=Path, nargs="+")


def _add_signing(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=sorted(VALUES))
    command.add_argument("subject", help="the account, the person's name, the release or the site")
    text = "the budget; a role, with the key of a new person; the SHA-256 of the artifact or request; or the restore"
    command.add_argument("value", nargs="+", help=text)
    command.add_argument("--person", required=True, help="who signs")
    command.add_argument("--serial", required=True, help="ID of the proposal, the same for all who sign")
    command.add_argument("--key", type=Path, required=True, help="the person's private key")
    command.add_argument(
        "--ledger", default="", help="the ledger's name, as the console shows it (default: that of --home)"
    )
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(homeless=True)
