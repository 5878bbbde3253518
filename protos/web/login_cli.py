"""``login``: who may come to the console with which certificate; the same commands on both sides.

A person makes a key and a certificate on their own machine (``make``) and hands over the certificate; the operator
pins it (``trust``). The certificate proves identity. The ledger decides what that person may do.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cryptography.hazmat.primitives import hashes

from protos.identity.key_files import write_private
from protos.web.client_certificates import LoginConfigError, PinnedCertificates, make

FOLDER = "logins"
_GROUP = 4  # digits that are read aloud together

Say = Callable[[str], None]


def run(arguments: argparse.Namespace, say: Say) -> int:
    """Carry out one of the commands ``login``; ``say`` prints a line."""
    return _COMMANDS[arguments.command.rpartition(" ")[2]](arguments, say)


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
    say(f"give {arguments.name}.crt to the operator; it contains no secret")
    say(f"and read out by phone: {_read_aloud(PinnedCertificates.fingerprint(crt))} ...")
    return 0


def _trust(arguments: argparse.Namespace, say: Say) -> int:
    try:
        digest = PinnedCertificates(arguments.home / FOLDER).trust(arguments.name, arguments.certificate.read_bytes())
    except LoginConfigError as error:
        say(f"refused: {error}")
        return 1
    say(f"{arguments.name} may log in with the certificate {_read_aloud(digest)} ...")
    say("compare this with what they read out; their role comes from the ledger")
    return 0


def _forget(arguments: argparse.Namespace, say: Say) -> int:
    if not PinnedCertificates(arguments.home / FOLDER).forget(arguments.name):
        say(f"refused: {arguments.name} has no certificate here")
        return 1
    say(f"{arguments.name} may no longer log in, and is logged out")
    return 0


def _list(arguments: argparse.Namespace, say: Say) -> int:
    known = PinnedCertificates(arguments.home / FOLDER).names()
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
        say("no person may log in by certificate yet: `login make` and `login trust`")
    return 0


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace, Say], int]]] = MappingProxyType(
    {"make": _make, "trust": _trust, "forget": _forget, "list": _list}
)
