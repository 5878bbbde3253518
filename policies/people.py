"""The commands by which persons decide about a ledger; both sides have them, over their own ledger and keys.

A proposal is a serial, an action, a subject and a value. Each person signs it on a machine of their own (``sign``);
the sealed approvals are handed to whoever runs the ledger (``approve``), and the action then names the serial.
"""

from __future__ import annotations

import argparse
import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies import governance
from policies.entries import InvalidEntry
from policies.keys import is_owned
from policies.office import APPROVING, ROLES
from policies.statement import HEX, ID, Request
from policies.store import Store

_NEEDED: Final[Mapping[str, str]] = MappingProxyType(  # action -> the value that is signed
    {
        "amend": "the SHA-256 of policy.toml",
        "appoint": "ROLE KEY",
        "dismiss": "ROLE",
        "enrol": "the sealed request's SHA-256 in hexadecimal",
        "limit": "BUDGET",
        "refuse": "SHA-256 REASON",
        "release": "SHA-256",
        "waive": "EPOCH-NONCE, as `ledger waive` tells it",
    }
)


@dataclass(frozen=True, slots=True)
class Tools:
    """What the commands need of the side that offers them."""

    open_store: Callable[[argparse.Namespace], AbstractContextManager[Store]]
    origin: Callable[[argparse.Namespace], str]
    seal: Callable[[bytes, Ed25519PrivateKey], bytes]
    read_key: Callable[[Path], Ed25519PrivateKey]
    write_key: Callable[[Path, Ed25519PrivateKey], None]
    say: Callable[[str], None]


def add_commands(group: Any, tools: Tools) -> None:
    """Add the commands by which persons are named, ask, sign, approve and set limits to the ``ledger`` commands."""

    def add(name: str, act: Callable[[argparse.Namespace, Tools], None], text: str) -> argparse.ArgumentParser:
        def done(arguments: argparse.Namespace) -> int:
            act(arguments, tools)
            return 0

        command: argparse.ArgumentParser = group.add_parser(name, help=text, description=text)
        command.set_defaults(act=done)
        return command

    text = "a new one for each ledger: what a key has signed for a pilot holds in every ledger of that name"
    person = add("person", _person, f"make a person's key; the public part is printed, to be appointed ({text})")
    person.set_defaults(homeless=True)
    person.add_argument("out", type=Path, help="the private key's file; it stays with the person")
    appoint = add("appoint", _appoint, "name a person who may approve (an operator never may)")
    appoint.add_argument("person", help="a short opaque name, such as dpo-1")
    appoint.add_argument("role", choices=sorted(ROLES))
    appoint.add_argument("key", help="the public key that `ledger person` printed")
    appoint.add_argument("--serial", default="", help="of the approved proposal; not for the first of each role")
    dismiss = add("dismiss", _dismiss, "a person leaves, as both roles approved; never the last of a role")
    dismiss.add_argument("person")
    dismiss.add_argument("--serial", default="", help="of the approved proposal")
    ask = add("ask", _ask, "as a person: seal a request, to be handed to `ledger approve`; others approve it")
    sign = add("sign", _sign, "as a person: seal an approval of a proposal, to be handed to `ledger approve`")
    for command in (ask, sign):
        command.add_argument("action", choices=sorted(_NEEDED))
        command.add_argument("subject", help="the account, the person's name, the release or the site")
        text = "the budget; a role, and of who is new a key; a SHA-256 of the artifact or the request; or the restore"
        command.add_argument("value", nargs="+", help=text)
        command.add_argument("--person", required=True, help="who signs")
        command.add_argument("--serial", required=True, help="of the proposal, the same for all who sign")
        command.add_argument("--key", type=Path, required=True, help="the person's private key")
        command.add_argument("--ledger", default="", help="its name, as the console shows it; else that of --home")
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(homeless=True)
    propose = add("propose", _propose, "print what has to be signed to change a limit")
    limit = add("limit", _limit, "change a limit as approved: two roles to raise it, one to lower it")
    for command in (propose, limit):
        command.add_argument("account", help="<site>/rdp or <site>/k")
        command.add_argument("budget", help="epsilon, or the number of releases per patient")
    limit.add_argument("--serial", required=True)
    approve = add("approve", _approve, "write sealed requests and approvals into the ledger")
    approve.add_argument("approvals", type=Path, nargs="+")


def _person(arguments: argparse.Namespace, tools: Tools) -> None:
    key = Ed25519PrivateKey.generate()
    tools.write_key(arguments.out, key)
    tools.say(base64.b64encode(key.public_key().public_bytes_raw()).decode())


def _appoint(arguments: argparse.Namespace, tools: Tools) -> None:
    try:
        key = _key(arguments.key)
    except ValueError:
        raise InvalidEntry("the public key is not 32 bytes in base64, as `ledger person` prints it") from None
    if not ID.fullmatch(arguments.person):
        raise InvalidEntry("a person's name is 1 to 64 of a-z, 0-9, - and _")
    with tools.open_store(arguments) as store:
        governance.appoint(store, arguments.person, arguments.role, key, arguments.serial)
    tools.say(f"appointed {arguments.person}, {arguments.role}")


def _dismiss(arguments: argparse.Namespace, tools: Tools) -> None:
    with tools.open_store(arguments) as store:
        governance.dismiss(store, arguments.person, arguments.serial)
    tools.say(f"{arguments.person} is no longer in office")


def _sign(arguments: argparse.Namespace, tools: Tools) -> None:
    _sealed("approval/v1", "approves", arguments, tools)


def _ask(arguments: argparse.Namespace, tools: Tools) -> None:
    _sealed("request/v1", "asks for", arguments, tools)


def _sealed(kind: str, verb: str, a: argparse.Namespace, tools: Tools) -> None:
    """A person's word, signed with the person's own key, in a file."""
    value = _value(a.action, a.subject, a.value)
    if not a.ledger and a.home is None:
        raise InvalidEntry("say which ledger it is for: --ledger NAME, or --home DIR before the command")
    raw = governance.word(kind, (a.person, a.ledger or tools.origin(a), a.serial, a.action, a.subject, value))
    sealed = tools.seal(raw, tools.read_key(a.key))
    with a.out.open("xb") as out:
        out.write(sealed)
    tools.say(f"{a.person} {verb} {a.action} {a.subject} {value}: give {a.out.name} to who runs the ledger")


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
        InvalidEntry: not of the form that the action needs.
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
        raise InvalidEntry(f"to sign {action} {subject} give {_NEEDED[action]}") from None
    return value


def _propose(arguments: argparse.Namespace, tools: Tools) -> None:
    with tools.open_store(arguments) as store:
        limit, epsilon = governance.limit_value(store, arguments.account, arguments.budget)
        more = limit > store.state.accounts[arguments.account].limit
    needed = f"{' and '.join(sorted(APPROVING))}, one of each" if more else f"one of {', '.join(sorted(APPROVING))}"
    tools.say(f"sign: limit {arguments.account} {epsilon or limit}  (needed: {needed})")


def _limit(arguments: argparse.Namespace, tools: Tools) -> None:
    with tools.open_store(arguments) as store:
        governance.set_limit(store, arguments.account, arguments.budget, arguments.serial)
    tools.say(f"the limit of {arguments.account} is {arguments.budget} now; the site's own policy binds all the same")


def _approve(arguments: argparse.Namespace, tools: Tools) -> None:
    envelopes = [path.read_bytes() for path in arguments.approvals]  # all of them, before anything is written
    with tools.open_store(arguments) as store:
        for envelope in envelopes:
            asked = isinstance(governance.said_by(envelope), Request)
            word = (governance.request if asked else governance.approve)(store, envelope)
            tools.say(
                f"{word.person} {'asks for' if asked else 'approves'} {word.action} {word.subject} ({word.serial})"
            )
