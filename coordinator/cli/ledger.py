"""``ledger``: show, export, copy and restore the coordinator's ledger, and what persons decide about it."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import secrets
import sys

from coordinator.cli import backup
from coordinator.cli.output import ERR, OUT, say
from coordinator.errors import CoordinatorConfigError
from coordinator.operations import pending
from coordinator.operations.control import ledger_acts
from coordinator.storage import directory as homes
from coordinator.storage.ledger_evidence import set_aside
from coordinator.storage.witness_store import Witnesses
from policies.audit import restore_losses
from policies.governance import cli
from policies.ledger.backends.sqlite import backup_file
from policies.ledger.entries import Enrolled, Record
from policies.ledger.store import export, lines
from protos.common import durable_files
from protos.common.dsse import key_id
from protos.identity.certificates import same_fingerprint
from protos.identity.key_files import pem, signing_key, write_private
from protos.operations import questions
from protos.service.control_client import is_serving


def records(home: homes.CoordinatorDirectory) -> list[Record]:
    """Every entry that is durable now, also while the coordinator serves."""
    with contextlib.closing(homes.look_at_ledger(home)) as disk:
        return [line.record for line in lines(disk)]


def _show(arguments: argparse.Namespace) -> int:
    return cli.show(homes.ORIGIN, records(homes.CoordinatorDirectory(arguments.home)), arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    """Works while the coordinator serves: what is durable now, under a fresh checkpoint."""
    home = homes.CoordinatorDirectory(arguments.home)
    seen = Witnesses(home.witnesses).notes()
    with contextlib.closing(homes.look_at_ledger(home)) as disk:
        durable_files.replace_file(arguments.out, export(disk, homes.ORIGIN, home.ledger_key(), seen))
    OUT.print(f"wrote {arguments.out.name}; check it with: lazaret-verify {arguments.out.name} --key FINGERPRINT")
    return 0


def _fingerprint(arguments: argparse.Namespace) -> int:
    """Of this ledger's key, or of a site's, which signs its own ledger: each side can say it of the other one."""
    home = homes.CoordinatorDirectory(arguments.home)
    public = home.ledger_key().public_key().public_bytes_raw()
    if arguments.site:
        entries = (record.entry for record in records(home))
        keys = [e.sign_key for e in entries if isinstance(e, Enrolled) and e.site == arguments.site]
        if not keys:
            raise CoordinatorConfigError(f"site {arguments.site} was never enrolled")
        public = keys[-1]
    sys.stdout.write(f"{key_id(public)}\n")
    return 0


def _restore(arguments: argparse.Namespace) -> int:
    """A new epoch: nothing is granted before every site has shown its receipts."""
    home = homes.CoordinatorDirectory(arguments.home)
    if not arguments.yes:
        ERR.print("this ledger will grant nothing until every site has presented its receipts. To confirm: --yes")
        return 1
    with homes.open_restored_ledger(home) as store:
        until = restore_losses.last_entry(store)
        store.restore(secrets.token_hex(16))
        Witnesses(home.witnesses).forget(store.state.epoch)
        aside = set_aside(store, home.releases)
        waiting = ", ".join(sorted(store.state.sites_awaited)) or "nobody"
        size = store.state.size - 1
        OUT.print(f"epoch {store.state.epoch}, from a backup of {size} entries; waiting for {waiting}")
    for line in (restore_losses.warning(until), *backup.describe_hidden(aside)):
        OUT.print(line, markup=False, soft_wrap=True)
    return 0


def _backup(arguments: argparse.Namespace) -> int:
    """A copy as of one commit, also while the coordinator serves."""
    home = homes.CoordinatorDirectory(arguments.home)
    if home.settings().ledger:
        raise CoordinatorConfigError("the ledger is in PostgreSQL: back it up with the database")
    backup_file(home.ledger, arguments.out)
    OUT.print(f"wrote {arguments.out.name}; to restore it, put it in place of ledger.db and run `ledger restore`")
    return 0


def _install(arguments: argparse.Namespace) -> int:
    homes.install_ledger(arguments.owner, arguments.writer)
    OUT.print(f"the ledger is installed; {arguments.writer} may only append to it")
    return 0


def _waive(arguments: argparse.Namespace) -> int:
    with ledger_acts(arguments) as do:
        told = do("ledger/waive", site=arguments.site, serial=arguments.serial)
    waiting = ", ".join(told["waiting"]) or "nobody"
    OUT.print(f"{arguments.site} is waived and its budget spent; waiting for {waiting}")
    return 0


def _compare(given: str, wanted: str) -> bool:
    """Whether an approver has typed the fingerprint, which nothing has shown before."""
    said = given or questions.ask(
        "--fingerprint", "the request's fingerprint, as the hospital reads it out by phone", str
    )
    return same_fingerprint(said, wanted)


def _next_step(arguments: argparse.Namespace, words: tuple[str, str, str, str]) -> None:
    """Say who has not signed; enrol a site that both roles have approved, or say what carries out what was signed."""
    from coordinator.cli.operator_client import enrol_site  # noqa: PLC0415 - gRPC, which no other command here needs

    home = homes.CoordinatorDirectory(arguments.home)
    for one in TOOLS.waiting(arguments):
        if (one.serial, one.action, one.subject, one.value) != words:
            continue
        if one.action == "enrol" and not one.missing and is_serving(home.root):
            enrol_site(home, one.subject, one.serial, ())
        else:
            name, missing, command = one.next_step(pending.PROGRAM)
            say(f"{name}: {missing}: {command}")


TOOLS = cli.CliContext(
    acts=ledger_acts,
    origin=lambda _arguments: homes.ORIGIN,
    read_key=signing_key,
    write_key=lambda path, key: write_private(path, pem(key)),
    say=say,
    program=pending.PROGRAM,
    waiting=lambda arguments: pending.waiting(homes.CoordinatorDirectory(arguments.home), dt.datetime.now(dt.UTC)),
    confirm=questions.confirm,
    compare=_compare,
    next_step=_next_step,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of the commands ``ledger``."""
    own = {
        "show": _show,
        "export": _export,
        "fingerprint": _fingerprint,
        "restore": _restore,
        "backup": _backup,
        "install": _install,
        "waive": _waive,
    }
    word = arguments.command.partition(" ")[2]
    return own[word](arguments) if word in own else cli.run(arguments, TOOLS)
