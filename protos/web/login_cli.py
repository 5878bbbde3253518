"""``login``: who may come to the console with which certificate; the same commands on both sides.

A person makes a key and a certificate on a machine of their own (``make``) and hands over the certificate; the
operator pins it (``trust``). The certificate says who is there. What that person may do, the ledger says.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes

from protos.keyfile import write_private
from protos.web.logins import BadLogin, Logins, make

FOLDER = "logins"
_GROUP = 4  # digits that are read aloud together

Say = Callable[[str], None]
Add = Callable[..., argparse.ArgumentParser]


def add_commands(commands: Any, add: Add, say: Say) -> None:
    """Add the group ``login``; ``add(group, name, act, text)`` makes one command, ``say`` prints a line."""
    group = commands.add_parser("login", help="who may come to the console").add_subparsers(
        required=True, metavar="WHAT"
    )
    made = add(group, "make", lambda a: _make(a, say), "on your own machine: a key and a certificate for a browser")
    made.set_defaults(homeless=True)
    made.add_argument("name", help="as the ledger names you")
    made.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    trusted = add(group, "trust", lambda a: _trust(a, say), "let a person in with this certificate, and no other")
    trusted.add_argument("name")
    trusted.add_argument("certificate", type=Path)
    gone = add(group, "forget", lambda a: _forget(a, say), "let a person in no longer, from now on")
    gone.add_argument("name")
    listed = add(group, "list", lambda a: _list(a, say), "whose certificates are pinned, and until when")
    listed.add_argument("--json", action="store_true")


def _read_aloud(digest: str) -> str:
    return " ".join(digest[i : i + _GROUP] for i in range(0, 32, _GROUP))


def _make_private(folder: Path) -> None:
    """A new folder, and those above it that are missing, 0700 each.

    Raises:
        FileExistsError: it is there already.
    """
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o700)
    folder.mkdir(mode=0o700)


def _make(arguments: argparse.Namespace, say: Say) -> int:
    password = secrets.token_urlsafe(12)
    _, crt, p12 = make(arguments.name, dt.datetime.now(dt.UTC), password)
    _make_private(arguments.out)
    write_private(arguments.out / f"{arguments.name}.p12", p12)
    (arguments.out / f"{arguments.name}.crt").write_bytes(crt)
    say(f"import {arguments.name}.p12 into your browser; its password, shown once: {password}")
    say(f"give {arguments.name}.crt to the operator; it holds no secret")
    say(f"and read out, by telephone: {_read_aloud(Logins.fingerprint(crt))} ...")
    return 0


def _trust(arguments: argparse.Namespace, say: Say) -> int:
    try:
        digest = Logins(arguments.home / FOLDER).trust(arguments.name, arguments.certificate.read_bytes())
    except BadLogin as error:
        say(f"refused: {error}")
        return 1
    say(f"{arguments.name} may come in with the certificate {_read_aloud(digest)} ...")
    say("compare this with what they read out; which role they have is what the ledger says")
    return 0


def _forget(arguments: argparse.Namespace, say: Say) -> int:
    if not Logins(arguments.home / FOLDER).forget(arguments.name):
        say(f"refused: nobody of the name {arguments.name} has a certificate here")
        return 1
    say(f"{arguments.name} comes in no longer; whoever is logged in under that name is out")
    return 0


def _list(arguments: argparse.Namespace, say: Say) -> int:
    known = Logins(arguments.home / FOLDER).names()
    rows = [
        {
            "person": name,
            "sha256": crt.fingerprint(hashes.SHA256()).hex(),
            "until": f"{crt.not_valid_after_utc:%Y-%m-%d}",
        }
        for name, crt in sorted(known.items())
    ]
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    for row in rows:
        say(f"{row['person']}  until {row['until']}  {_read_aloud(row['sha256'])} ...")
    if not rows:
        say("nobody may come in by certificate yet: `login make` and `login trust`")
    return 0
