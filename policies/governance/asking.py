"""The commands about a ledger that only ask for what persons decided: no key is read, and no entry.

A command that asks a running service waits for no more than this. Whoever carries the acts out checks everything.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from policies.governance.acts import Acts

ActsOf = Callable[[argparse.Namespace], AbstractContextManager["Acts"]]  # done here, or by the running service
Say = Callable[[str], None]


def _dismiss(arguments: argparse.Namespace, acts: ActsOf, say: Say) -> None:
    with acts(arguments) as do:
        do("ledger/dismiss", person=arguments.person, serial=arguments.serial)
    say(f"{arguments.person} is no longer active")


def _limit(arguments: argparse.Namespace, acts: ActsOf, say: Say) -> None:
    with acts(arguments) as do:
        do("ledger/limit", account=arguments.account, budget=arguments.budget, serial=arguments.serial)
    say(f"the limit of {arguments.account} is now {arguments.budget}; the site's own policy still applies")


def _approve(arguments: argparse.Namespace, acts: ActsOf, say: Say) -> None:
    envelopes = [path.read_bytes() for path in arguments.approvals]  # all of them, before anything is written
    with acts(arguments) as do:
        for envelope in envelopes:
            write_down(do, envelope, say)


def write_down(do: Acts, sealed: bytes, say: Say) -> None:
    """Write a person's sealed word into the ledger."""
    word = do("ledger/approve", envelope=base64.b64encode(sealed).decode())
    verb = "asks for" if word["asks"] else "approves"
    say(f"{word['person']} {verb} {word['action']} {word['subject']} ({word['serial']})")


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace, ActsOf, Say], None]]] = MappingProxyType(
    {"dismiss": _dismiss, "limit": _limit, "approve": _approve}
)
