"""``backup``, ``restore`` and ``upgrade`` of the coordinator."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from coordinator.edges import backup as backups
from coordinator.edges.home import Home
from policies.forms import FORM, WrongForm
from policies.ledger import waiver
from policies.undone import as_json, moment, told, warning
from protos.backup import BOX, BadBackup
from protos.keybox import BadBox, ask_passphrase, files_of, open_files

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
EXPECTED: Final = (BadBackup, BadBox, WrongForm)


def add_commands(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add them."""
    out = add(commands, "backup", _told(_backup), "copy the ledger as of one moment, and all that lies beside it")
    out.add_argument("out", type=Path, help="a new folder, on another machine's disk")
    out.add_argument("--with-keys", action="store_true", help="put the keys in too, sealed to a passphrase")
    back = add(commands, "restore", _told(_restore), "bring a backup into a new directory: in a new epoch")
    back.add_argument("folder", type=Path, help="the backup")
    back.add_argument("--keys", type=Path, help="a copy of keys/, where the backup holds none")
    back.add_argument(
        "--last", type=Path, help="the last `ledger export` from before: it lists what is to be typed again"
    )
    back.add_argument("--json", action="store_true")
    for command in (out, back):
        command.add_argument("--passphrase-file", type=Path, help="else it is asked for")
    up = add(commands, "upgrade", _told(_upgrade), "bring the ledger to this version's form, after a backup")
    up.add_argument("--check", action="store_true", help="only say whether there is something to do (exit 1)")
    up.add_argument("--owner", default="", help="in PostgreSQL: the address as the role that owns the ledger")
    up.add_argument("--json", action="store_true")


def _say(text: str) -> None:
    """For people; no line is broken, since some are copied."""
    OUT.print(text, markup=False, soft_wrap=True)


def _aside(text: str) -> None:
    """The same, where standard output is for a machine."""
    ERR.print(text, markup=False, soft_wrap=True)


def _told(act: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def told(arguments: argparse.Namespace) -> int:
        try:
            return act(arguments)
        except EXPECTED as error:
            ERR.print(f"refused: {error}", markup=False, soft_wrap=True)
            return 1

    return told


def _backup(arguments: argparse.Namespace) -> int:
    passphrase = ask_passphrase(arguments.passphrase_file, twice=True) if arguments.with_keys else ""
    if arguments.with_keys and not passphrase:
        raise BadBox("keys are sealed to a passphrase, and there is none")
    home = Home(arguments.home)
    made = backups.backup(home, arguments.out, passphrase)
    _say(f"wrote {arguments.out.name}: {made.files} files, a ledger of {made.entries} entries")
    if home.settings().ledger:
        _say("the ledger itself is in PostgreSQL: back it up with the database; here is an export for auditors")
    if made.keys:
        _say("the keys are in it, sealed: keep the passphrase elsewhere. The root's key is on its own medium")
    else:
        _say(f"no key is in it. Keep a copy of keys/ ({len(made.manifest.keys)} files) locked away elsewhere")
    return 0


def _restore(arguments: argparse.Namespace) -> int:
    if arguments.keys:
        keys = backups.private_of(files_of(arguments.keys))
    elif (arguments.folder / BOX).is_file():
        keys = open_files(
            (arguments.folder / BOX).read_bytes(), ask_passphrase(arguments.passphrase_file, twice=False)
        )
    else:
        raise BadBackup("no key is in this backup: give --keys and the folder of a copy of keys/")
    last = arguments.last.read_bytes() if arguments.last else None
    done = backups.restore(arguments.home, arguments.folder, keys, secrets.token_hex(16), last)
    say = _aside if arguments.json else _say
    waiting = ", ".join(done.waiting) or "nobody"
    say(f"restored as of {moment(done.made)}: {done.entries} entries; epoch {done.epoch}; waiting for {waiting}")
    for line in (warning(done.last), *told(done.lost), *hidden(done.aside)):
        say(line)
    if done.waiting:
        say("nothing is granted before they have shown their receipts; start `serve`, and they do by themselves")
        say(f"for a site that will not come back, two persons sign: waive SITE {waiver(done.epoch, done.nonce)}")
    if arguments.json:
        document = {"made": done.made, "entries": done.entries, "epoch": done.epoch, "waiting": done.waiting}
        sys.stdout.write(json.dumps({**document, **as_json(done.last, done.lost)}) + "\n")
    return 0


def hidden(aside: Sequence[str]) -> list[str]:
    """What became of releases on the shelf that the restored ledger does not know."""
    if not aside:
        return []
    return [f"admitted after the backup, and set aside under releases/.NAME.before-…: {', '.join(aside)}"]


def _upgrade(arguments: argparse.Namespace) -> int:
    home = Home(arguments.home)
    found = backups.form(home) if home.settings().ledger or home.ledger.exists() else 0
    if arguments.check or found in {0, FORM}:
        newest = found in {0, FORM}
        if arguments.json:
            sys.stdout.write(json.dumps({"newest": newest, "forms": {"ledger": [found, FORM]}}) + "\n")
        else:
            said = "nothing to do" if newest else "there is something to do: run `upgrade`"
            _say(f"ledger: form {found} of {FORM}; {said}" if found else f"no ledger yet; {said}")
        return 0 if newest else 1
    say = lambda text: ERR.print(text, markup=False)  # noqa: E731 - one line of progress
    size, root = backups.upgrade(home, dt.datetime.now(dt.UTC), say, arguments.owner)
    if arguments.json:
        document = {"newest": True, "forms": {"ledger": [FORM, FORM]}, "entries": size, "root": root.hex()}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _say("upgraded; every head signed before verifies as it did")
    return 0
