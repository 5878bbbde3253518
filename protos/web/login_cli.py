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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cryptography.hazmat.primitives import hashes

from protos.common.durable_files import create_file
from protos.identity.key_files import write_private
from protos.operations.next_steps import SetupReport
from protos.operations.questions import ask_or_take
from protos.web import settings
from protos.web.client_certificates import LoginConfigError, PinnedCertificates, make

FOLDER = "logins"
_GROUP = 4  # digits that are read aloud together

Say = Callable[[str], None]


def open_console(home: Path, name: str, login: Sequence[str], report: SetupReport) -> None:
    """For ``setup``: write ``console.toml`` and pin the first person's certificate; what is there already stays.

    Args:
        home: the directory of a side.
        name: that browsers reach the console by, from its option; "": it is asked for.
        login: a person's name and a certificate's file; empty: none.
        report: hears what was done.
    Raises:
        LoginConfigError, BadAnswerError: the name or the certificate cannot be used.
    """
    if not (home / settings.FILE).exists():
        question = "name by which browsers reach the console, NAME or NAME:PORT (Enter: no console yet)"
        text = ask_or_take("--console", name, question, lambda typed: settings.draft(typed) if typed else "", "")
        if text:
            settings.parse(text, home)
            create_file(home / settings.FILE, text.encode())
            report.wrote(settings.FILE, "`serve` opens the console; `login make` and `login trust` let people in")
    if login and login[0] not in PinnedCertificates(home / FOLDER).names():
        digest = PinnedCertificates(home / FOLDER).trust(login[0], Path(login[1]).read_bytes())
        report.written.append(f"{FOLDER}/{login[0]}.crt")
        report.tell(
            f"{login[0]} may log in, if these are the digits that they read out by phone", _read_aloud(digest)
        )


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
