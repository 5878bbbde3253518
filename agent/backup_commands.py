"""``backup``, ``restore``, ``recover`` and ``upgrade`` of a site."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from agent.edges import backup as backups
from agent.edges import recover as recovering
from agent.edges import restore as restoring
from agent.edges import upgrading
from agent.edges.home import BadSite, Home
from agent.edges.sealed import FORMAT, VaultError
from policies.forms import FORM, WrongForm
from policies.undone import as_json, moment, told, warning
from protos.backup import BOX, BadBackup
from protos.keybox import BadBox, ask_passphrase, files_of, open_files

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
EXPECTED: Final = (BadBackup, BadBox, VaultError, WrongForm)


def run(name: str, arguments: argparse.Namespace) -> int:
    """One of the commands; what is refused here is told, and the rest is for ``__main__``."""
    try:
        return {"backup": _backup, "restore": _restore, "recover": _recover, "upgrade": _upgrade}[name](arguments)
    except EXPECTED as error:
        ERR.print(f"refused: {error}", markup=False, soft_wrap=True)
        return 1


def add_commands(
    commands: Any,
    add: Callable[..., argparse.ArgumentParser],
    act: Callable[[str], Callable[[argparse.Namespace], int]],
) -> None:
    """Add them; ``act`` gives what is called for each name, so that a caller may import :func:`run` late."""
    out = add(
        commands, "backup", act("backup"), "copy ledger, vault and settings as of one moment, also while in use"
    )
    out.add_argument("out", type=Path, help="a new folder, on another machine's disk")
    out.add_argument("--with-keys", action="store_true", help="put the keys in too, sealed to a passphrase")
    _passphrase(out)
    back = add(commands, "restore", act("restore"), "bring a backup into a new directory: in a new epoch")
    back.add_argument("folder", type=Path, help="the backup")
    back.add_argument("--keys", type=Path, help="a copy of keys/, where the backup holds none")
    text = "the last `ledger export` of this site from before: it lists what is to be typed again"
    back.add_argument("--last", type=Path, help=text)
    back.add_argument("--json", action="store_true")
    _passphrase(back)
    _lost(back, required=False)
    lost = add(commands, "recover", act("recover"), "after a restore: spend what was granted since the backup")
    _lost(lost, required=True)
    up = add(commands, "upgrade", act("upgrade"), "bring ledger and vault to this version's form, after a backup")
    up.add_argument("--check", action="store_true", help="only say whether there is something to do (exit 1)")
    up.add_argument("--json", action="store_true")


def _say(text: str) -> None:
    """For people; no line is broken, since some are copied."""
    OUT.print(text, markup=False, soft_wrap=True)


def _aside(text: str) -> None:
    """The same, where standard output is for a machine."""
    ERR.print(text, markup=False, soft_wrap=True)


def _passphrase(command: argparse.ArgumentParser) -> None:
    command.add_argument("--passphrase-file", type=Path, help="else it is asked for")


def _lost(command: argparse.ArgumentParser, required: bool) -> None:
    how = command.add_mutually_exclusive_group(required=required)
    how.add_argument(
        "--shared", type=Path, help="an export of the coordinator's ledger, made after this site stopped"
    )
    how.add_argument("--spend-everything", action="store_true", help="no export will come: all budget left is spent")


def _backup(arguments: argparse.Namespace) -> int:
    passphrase = ask_passphrase(arguments.passphrase_file, twice=True) if arguments.with_keys else ""
    if arguments.with_keys and not passphrase:
        raise BadBox("keys are sealed to a passphrase, and there is none")
    home = Home(arguments.home)
    made = backups.backup(home, arguments.out, passphrase)
    _say(f"wrote {arguments.out.name}: {made.files} files, a ledger of {made.entries} entries")
    if made.keys:
        _say("the keys are in it, sealed: keep the passphrase elsewhere")
        named = sorted(found.group(1) for n in made.manifest.keys if (found := backups.PROJECT_KEY.fullmatch(n)))
        _say(f"when one of these projects ends, destroy this backup, or its end is undone: {', '.join(named)}")
    else:
        _say(f"no key is in it. Keep a copy of keys/ ({len(made.manifest.keys)} files) locked away elsewhere:")
        _say("without it this backup is noise, and together they are the site")
    return 0


def _secrets(arguments: argparse.Namespace) -> dict[str, bytes]:
    """The private files of the key directory: from a folder, or from the backup's own box.

    Raises:
        BadBox, BadBackup: there are none, or the passphrase is another one.
    """
    if arguments.keys:
        return {
            n: b for n, b in files_of(arguments.keys).items() if n not in backups.PUBLIC and not n.endswith("ended")
        }
    box = arguments.folder / BOX
    if not box.is_file():
        raise BadBackup("no key is in this backup: give --keys and the folder of a copy of keys/")
    return open_files(box.read_bytes(), ask_passphrase(arguments.passphrase_file, twice=False))


def _restore(arguments: argparse.Namespace) -> int:
    last = arguments.last.read_bytes() if arguments.last else None
    done = restoring.restore(arguments.home, arguments.folder, _secrets(arguments), secrets.token_hex(16), last)
    say, made = _aside if arguments.json else _say, moment(done.made)
    say(f"restored as of {made}: {done.entries} entries, epoch {done.epoch} of this site's ledger")
    say(f"{done.closed} grant(s) that were open then are spent; what waited for approval is gone")
    for name in done.gone:
        say(f"project {name}: its key is not there, so its records are gone; ingest again into another project")
    for line in (warning(done.last), *told(done.lost)):
        say(line)
    say(f"type again every opt-out since {made}: `lazaret-agent opt-out add`")
    if restoring.missing_passing(Home(arguments.home)):
        say("no certificate came back: ask for an invitation, and run `enrol` with it")
    if arguments.json:
        document = {"made": done.made, "entries": done.entries, "epoch": done.epoch, "closed": done.closed}
        more = {"gone": done.gone, **as_json(done.last, done.lost)}
        sys.stdout.write(json.dumps({**document, **more}) + "\n")
    if arguments.shared or arguments.spend_everything:
        return _recover(arguments, say)
    say("nothing is granted yet: ask the coordinator for `ledger export`, and run `recover --shared FILE`")
    return 0


def _recover(arguments: argparse.Namespace, say: Callable[[str], None] = _say) -> int:
    home = Home(arguments.home)
    if arguments.spend_everything:
        done = recovering.spend_everything(home)
    else:
        done = recovering.recover(home, arguments.shared.read_bytes())
    say(f"{done.lost} grant(s) that the backup had lost are spent; this ledger grants again what is left")
    for account in done.full:
        say(f"{account}: everything is spent")
    if done.amended:
        say("a newer policy that this site had signed binds again: compare policy.toml with it")
    return 0


def _upgrade(arguments: argparse.Namespace) -> int:
    home = Home(arguments.home)
    found = upgrading.forms(home)
    table = {"ledger": [found.ledger, FORM], "vault": [found.vault, FORMAT]}
    if arguments.check or found.newest:
        if arguments.json:
            sys.stdout.write(json.dumps({"newest": found.newest, "forms": table}) + "\n")
        else:
            said = "nothing to do" if found.newest else "there is something to do: run `upgrade`"
            _say(f"{found.words}; {said}")
        return 0 if found.newest else 1
    done = upgrading.upgrade(home, dt.datetime.now(dt.UTC), lambda text: ERR.print(text, markup=False))
    if done.backup is None or not done.after.newest:
        raise BadSite("the upgrade is not complete: run it again")
    if arguments.json:
        after = {"ledger": [done.after.ledger, FORM], "vault": [done.after.vault, FORMAT]}
        document = {"newest": True, "forms": after, "entries": done.entries, "root": done.root.hex()}
        sys.stdout.write(json.dumps({**document, "backup": done.backup.name}) + "\n")
    else:
        _say(f"upgraded; every head signed before verifies as it did. Before: backups/{done.backup.name}")
    return 0
