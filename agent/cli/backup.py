"""``backup``, ``restore``, ``recover`` and ``upgrade`` of a site."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import secrets
import sys
from collections.abc import Callable
from functools import partial

from agent.cli.output import print_stderr, say
from agent.errors import SiteConfigError
from agent.operations import backup as backups
from agent.operations import restore, upgrade
from agent.service.job_outputs import clear_outputs
from agent.service.jobs import JobStore
from agent.service.making_lock import making_lock
from agent.storage.encrypted_sqlite import FORMAT
from agent.storage.site_directory import SiteDirectory
from policies.audit.restore_losses import as_json, describe_losses, format_time, warning
from policies.ledger.backends.schema_version import FORM
from protos.operations.backup import new_passphrase, private_keys


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands."""
    acts = {"backup": _backup, "restore": _restore, "recover": _recover, "upgrade": _upgrade}
    return acts[arguments.command](arguments)


def _backup(arguments: argparse.Namespace) -> int:
    made = backups.backup(SiteDirectory(arguments.home), arguments.out, new_passphrase(arguments))
    say(f"wrote {arguments.out.name}: {made.files} files, a ledger of {made.entries} entries")
    if made.keys:
        say("it contains the keys, encrypted: keep the passphrase elsewhere")
        named = sorted(found.group(1) for n in made.manifest.keys if (found := backups.PROJECT_KEY.fullmatch(n)))
        say(f"when one of these projects ends, destroy this backup, because it can undo the end: {', '.join(named)}")
    else:
        say(f"it contains no keys. Keep a copy of keys/ ({len(made.manifest.keys)} files) locked away elsewhere:")
        say("without them this backup cannot be read; both together are the whole site")
    return 0


def _restore(arguments: argparse.Namespace) -> int:
    last = arguments.last.read_bytes() if arguments.last else None
    keys = private_keys(arguments, backups.private_of)
    done = restore.restore(arguments.home, arguments.folder, keys, secrets.token_hex(16), last)
    JobStore(arguments.home).after_restore(partial(clear_outputs, SiteDirectory(arguments.home)))
    tell, made = print_stderr if arguments.json else say, format_time(done.made)
    tell(f"restored as of {made}: {done.entries} entries, epoch {done.epoch} of this site's ledger")
    tell(f"{done.closed} grant(s) that were open then are spent; releases that waited for approval are lost")
    for name in done.gone:
        tell(f"project {name}: its key is missing, so its records cannot be read: ingest again into another project")
    for line in (warning(done.last), *describe_losses(done.lost)):
        tell(line)
    tell(f"enter again every opt-out since {made}: `lazaret-agent opt-out add`")
    if restore.missing_passing(SiteDirectory(arguments.home)):
        tell("the backup contains no certificate: ask for an invitation, and run `enrol` with it")
    if arguments.json:
        document = {"made": done.made, "entries": done.entries, "epoch": done.epoch, "closed": done.closed}
        more = {"gone": done.gone, **as_json(done.last, done.lost)}
        sys.stdout.write(json.dumps({**document, **more}) + "\n")
    if arguments.shared or arguments.spend_everything:
        return _recover(arguments, tell)
    tell("nothing is granted yet: ask the coordinator for `ledger export`, and run `recover --shared FILE`")
    return 0


def _recover(arguments: argparse.Namespace, tell: Callable[[str], None] = say) -> int:
    home = SiteDirectory(arguments.home)
    with making_lock(home.root):
        if arguments.spend_everything:
            done = restore.spend_all_grants(home)
        else:
            done = restore.recover(home, arguments.shared.read_bytes())
    tell(f"{done.lost} grant(s) that the backup lacked are spent; this ledger grants the remaining budget again")
    for account in done.full:
        tell(f"{account}: everything is spent")
    if done.amended:
        tell("a newer policy that this site had signed is in force again: compare policy.toml with it")
    return 0


def _upgrade(arguments: argparse.Namespace) -> int:
    home = SiteDirectory(arguments.home)
    found = upgrade.forms(home)
    table = {"ledger": [found.ledger, FORM], "vault": [found.vault, FORMAT]}
    if arguments.check or found.newest:
        if arguments.json:
            sys.stdout.write(json.dumps({"newest": found.newest, "forms": table}) + "\n")
        else:
            said = "nothing to do" if found.newest else "an upgrade is needed: run `upgrade`"
            say(f"{found.words}; {said}")
        return 0 if found.newest else 1
    with making_lock(home.root):
        done = upgrade.upgrade(home, dt.datetime.now(dt.UTC), print_stderr)
    if done.backup is None or not done.after.newest:
        raise SiteConfigError("the upgrade is not complete: run it again")
    if arguments.json:
        after = {"ledger": [done.after.ledger, FORM], "vault": [done.after.vault, FORMAT]}
        document = {"newest": True, "forms": after, "entries": done.entries, "root": done.root.hex()}
        sys.stdout.write(json.dumps({**document, "backup": done.backup.name}) + "\n")
    else:
        say(f"upgraded; earlier signed heads still verify. The state before is in backups/{done.backup.name}")
    return 0
