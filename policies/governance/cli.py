"""The commands by which persons decide about a ledger; both sides have them, over their own ledger and keys.

A proposal is a serial, an action, a subject and a value. Each person signs it with their own key (``sign``): on a
machine of their own, and then whoever runs the ledger hands the sealed approvals in (``approve``); or beside the
ledger, where a short number stands for what waits. The action then names the serial.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.table import Table

from policies.audit.display import as_json, rows
from policies.governance import asking, decisions
from policies.governance.options import VALUES, by_number
from policies.governance.pending import Pending, choose
from policies.ledger.approvals import APPROVING
from policies.ledger.ed25519 import is_owned
from policies.ledger.entries import InvalidEntryError, Record
from policies.statements import HEX, ID, PAYLOAD_TYPE
from protos.common.dsse import seal


@dataclass(frozen=True, slots=True)
class CliContext:
    """What the commands need of the side that offers them."""

    acts: asking.ActsOf
    origin: Callable[[argparse.Namespace], str]
    read_key: Callable[[Path], Ed25519PrivateKey]
    write_key: Callable[[Path, Ed25519PrivateKey], None]
    say: Callable[[str], None]
    program: str  # the command of this side
    waiting: Callable[[argparse.Namespace], Sequence[Pending]]  # what can be signed by its number
    confirm: Callable[[bool, str], bool]  # --yes, or a person's answer
    compare: Callable[[str, str], bool]  # a fingerprint as given, or asked for, and the one that it must be
    # after something was signed: carry it out, or say what comes next; serial, action, subject, value
    next_step: Callable[[argparse.Namespace, tuple[str, str, str, str]], None]


def run(arguments: argparse.Namespace, tools: CliContext) -> int:
    """Carry out one of the commands of :mod:`policies.governance.options`; it is the last word of ``command``."""
    name = arguments.command.rpartition(" ")[2]
    if name in asking.COMMANDS:
        asking.COMMANDS[name](arguments, tools.acts, tools.say)
    else:
        _COMMANDS[name](arguments, tools)
    return 0


def show(origin: str, records: Sequence[Record], as_lines: bool) -> int:
    """Print a whole ledger, as a table or as JSON; the exit status."""
    if as_lines:
        sys.stdout.write(json.dumps(as_json(origin, records), indent=2) + "\n")
        return 0
    table = Table("#", "time (UTC)", "entry", "who", "what", title=f"ledger of {origin}")
    for row in rows(records):
        table.add_row(*row)
    Console(highlight=False).print(table)
    return 0


def _person(arguments: argparse.Namespace, tools: CliContext) -> None:
    key = Ed25519PrivateKey.generate()
    tools.write_key(arguments.out, key)
    tools.say(base64.b64encode(key.public_key().public_bytes_raw()).decode())


def read_person(name: str, key: str) -> tuple[str, bytes]:
    """A person's name and public key, as people type them.

    Raises:
        InvalidEntryError: one of them is none.
    """
    try:
        public = _key(key)
    except ValueError:
        raise InvalidEntryError("the public key is not 32 bytes in base64, as `ledger person` prints it") from None
    if not ID.fullmatch(name):
        raise InvalidEntryError("a person's name is 1 to 64 of a-z, 0-9, - and _")
    return name, public


def _appoint(arguments: argparse.Namespace, tools: CliContext) -> None:
    person, key = read_person(arguments.person, arguments.key)
    with tools.acts(arguments) as do:
        do("ledger/appoint", person=person, role=arguments.role, key=key.hex(), serial=arguments.serial)
    tools.say(f"appointed {person}, {arguments.role}")


def _ask(a: argparse.Namespace, tools: CliContext) -> None:
    """A person's request."""
    _in_words("request/v1", "asks for", a, tools)


def _sign(a: argparse.Namespace, tools: CliContext) -> None:
    """A person's approval: of what waits under a number, or of words."""
    if not by_number(a.words):
        _in_words("approval/v1", "approves", a, tools)
        return
    one = choose(tools.waiting(a), a.words[0], tools.program)
    key = tools.read_key(a.key)
    tools.say(one.shown(one.name))
    for line in (*one.details, *([f"to look at it first: {one.shown(one.look)}"] if one.look else [])):
        tools.say(f"  {line}")
    if one.fingerprint and not tools.compare(a.fingerprint, one.fingerprint):
        raise InvalidEntryError(
            "that is not the fingerprint of this request; nothing was signed. Compare it again by telephone; if it "
            "differs, somebody else sent this request: revoke it, and invite the hospital again"
        )
    words = f"approve {one.action} {one.subject} {one.value}, serial {one.serial}, ledger {tools.origin(a)}"
    tools.say(f"{a.person} signs: {words}")
    if not tools.confirm(a.yes, "sign exactly this?"):
        raise InvalidEntryError(f"nothing was signed; `{tools.program} status` shows what waits")
    _hand_over("approval/v1", key, (one.serial, one.action, one.subject, one.value), a, tools)


def _in_words(kind: str, verb: str, a: argparse.Namespace, tools: CliContext) -> None:
    """A person's word, signed as it was typed."""
    action, subject, *rest = a.words
    value = _value(action, subject, rest)
    if not a.ledger and a.home is None:
        raise InvalidEntryError(
            "name the ledger: --ledger lazaret/coordinator, --ledger lazaret/SITE, or --home DIR before the command"
        )
    _hand_over(kind, tools.read_key(a.key), (a.serial, action, subject, value), a, tools)
    if a.out:
        tools.say(f"{a.person} {verb} {action} {subject} {value}: give {a.out.name} to the operator of the ledger")


def _hand_over(
    kind: str, key: Ed25519PrivateKey, words: tuple[str, str, str, str], a: argparse.Namespace, tools: CliContext
) -> None:
    """Sign serial, action, subject and value with the person's own key: into a file, or into the ledger at once."""
    raw = decisions.statement_bytes(kind, (a.person, a.ledger or tools.origin(a), *words))
    sealed = seal(raw, PAYLOAD_TYPE, key)
    if a.out:
        with a.out.open("xb") as out:
            out.write(sealed)
        return
    with tools.acts(a) as do:
        asking.write_down(do, sealed, tools.say)
    tools.next_step(a, words)


def _key(text: str) -> bytes:
    """A public key: in base64, as ``ledger person`` prints it, or in hexadecimal, as statements hold it.

    Raises:
        ValueError: neither, not of 32 bytes (64 hexadecimal digits are base64 too, of 48), or one that everybody can
            sign for.
    """
    key = bytes.fromhex(text) if HEX.fullmatch(text) else base64.b64decode(text, validate=True)
    if not is_owned(key):
        raise ValueError("a public key has 32 bytes, and an owner")
    return key


def _value(action: str, subject: str, words: Sequence[str]) -> str:
    """What is signed, from what people type.

    Raises:
        InvalidEntryError: not of the form that the action needs.
    """
    try:
        if action == "limit":
            (budget,) = words
            return budget if subject.endswith("/k") else repr(float(budget))
        if action == "appoint":
            role, key = words
            return f"{role} {_key(key).hex()}"
        if action == "refuse":
            digest, reason = words
            return f"{digest} {reason}"
        (value,) = words
        if action == "enrol" and not HEX.fullmatch(value):
            raise ValueError(value)
    except ValueError:
        raise InvalidEntryError(f"to sign {action} {subject} give {VALUES[action]}") from None
    return value


def _propose(arguments: argparse.Namespace, tools: CliContext) -> None:
    with tools.acts(arguments) as do:
        meant = do("ledger/propose", account=arguments.account, budget=arguments.budget)
    roles = sorted(APPROVING)
    needed = f"{' and '.join(roles)}, one of each" if meant["more"] else f"one of {', '.join(roles)}"
    epsilon, limit = meant["epsilon"], meant["limit"]
    tools.say(f"sign: limit {arguments.account} {epsilon or limit}  (needed: {needed})")


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace, CliContext], None]]] = MappingProxyType(
    {
        "person": _person,
        "appoint": _appoint,
        "ask": _ask,
        "sign": _sign,
        "propose": _propose,
    }
)
