"""``backup``, ``restore`` and ``upgrade`` of the coordinator."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from coordinator.cli.output import print_stderr, say
from coordinator.operations import backup as backups
from coordinator.storage.directory import CoordinatorDirectory
from policies.audit.restore_losses import as_json, describe_losses, format_time, warning
from policies.ledger.backends.schema_version import FORM
from policies.ledger.state import waiver
from protos.operations.backup import new_passphrase, private_keys


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands."""
    return _COMMANDS[arguments.command](arguments)


def _backup(arguments: argparse.Namespace) -> int:
    home = CoordinatorDirectory(arguments.home)
    made = backups.backup(home, arguments.out, new_passphrase(arguments))
    say(f"wrote {arguments.out.name}: {made.files} files, a ledger of {made.entries} entries")
    if home.settings().ledger:
        say("the ledger itself is in PostgreSQL: back it up with the database; here is an export for auditors")
    if made.keys:
        say("it contains the keys, encrypted: keep the passphrase elsewhere. The root's key is on its own medium")
    else:
        say(f"it contains no keys. Keep a copy of keys/ ({len(made.manifest.keys)} files) locked away elsewhere")
    return 0


def _restore(arguments: argparse.Namespace) -> int:
    keys = private_keys(arguments, backups.private_of)
    last = arguments.last.read_bytes() if arguments.last else None
    done = backups.restore(arguments.home, arguments.folder, keys, secrets.token_hex(16), last)
    tell = print_stderr if arguments.json else say
    waiting = ", ".join(done.waiting) or "nobody"
    tell(
        f"restored as of {format_time(done.made)}: {done.entries} entries; epoch {done.epoch}; waiting for {waiting}"
    )
    for line in (warning(done.last), *describe_losses(done.lost), *describe_hidden(done.aside)):
        tell(line)
    if done.waiting:
        tell(
            "no budget is granted until they have shown their receipts. Start `serve`: sites show them automatically"
        )
        tell(f"for a site that will not come back, two persons sign: waive SITE {waiver(done.epoch, done.nonce)}")
    if arguments.json:
        document = {"made": done.made, "entries": done.entries, "epoch": done.epoch, "waiting": done.waiting}
        sys.stdout.write(json.dumps({**document, **as_json(done.last, done.lost)}) + "\n")
    return 0


def describe_hidden(names: Sequence[str]) -> list[str]:
    """What became of releases on the shelf that the restored ledger does not know."""
    if not names:
        return []
    return [f"admitted after the backup, and set aside under releases/.NAME.before-…: {', '.join(names)}"]


def _upgrade(arguments: argparse.Namespace) -> int:
    home = CoordinatorDirectory(arguments.home)
    found = backups.form(home) if home.settings().ledger or home.ledger.exists() else 0
    if arguments.check or found in {0, FORM}:
        newest = found in {0, FORM}
        if arguments.json:
            sys.stdout.write(json.dumps({"newest": newest, "forms": {"ledger": [found, FORM]}}) + "\n")
        else:
            said = "nothing to do" if newest else "an upgrade is needed: run `upgrade`"
            say(f"ledger: form {found} of {FORM}; {said}" if found else f"no ledger yet; {said}")
        return 0 if newest else 1
    size, root = backups.upgrade(home, dt.datetime.now(dt.UTC), print_stderr, arguments.owner)
    if arguments.json:
        document = {"newest": True, "forms": {"ledger": [FORM, FORM]}, "entries": size, "root": root.hex()}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        say("upgraded; earlier signed heads still verify")
    return 0


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = MappingProxyType(
    {"backup": _backup, "restore": _restore, "upgrade": _upgrade}
)
