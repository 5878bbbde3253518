"""``ledger``: show and export the site's ledger, and what persons decide about it."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from agent.cli.output import OUT, print_progress, say
from agent.service.commands import PROGRAM, site_acts
from agent.storage import site_directory
from policies.governance import cli
from policies.ledger.backends.sqlite import export_file, read_lines
from protos.common.dsse import key_id
from protos.identity.certificates import same_fingerprint
from protos.identity.key_files import pem, signing_key, write_private
from protos.operations import questions

if TYPE_CHECKING:
    from policies.governance.pending import Pending


def _show(arguments: argparse.Namespace) -> int:
    records = [line.record for line in read_lines(arguments.home / "ledger.db")]
    return cli.show(TOOLS.origin(arguments), records, arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    home = site_directory.SiteDirectory(arguments.home)
    raw = export_file(arguments.home / "ledger.db", site_directory.origin(home.settings().site), home.sign_key())
    arguments.out.write_bytes(raw)
    OUT.print(f"wrote {arguments.out.name}; check it with: lazaret-verify {arguments.out.name} --key FINGERPRINT")
    return 0


def _fingerprint(arguments: argparse.Namespace) -> int:
    home = site_directory.SiteDirectory(arguments.home)
    public = home.coordinator_key() if arguments.coordinator else home.sign_key().public_key().public_bytes_raw()
    sys.stdout.write(f"{key_id(public)}\n")
    return 0


def _waiting(arguments: argparse.Namespace) -> list[Pending]:
    from agent.service.pending import waiting  # noqa: PLC0415 - who only asks the service waits for none of this

    return waiting(site_directory.SiteDirectory(arguments.home))


def _next_step(arguments: argparse.Namespace, words: tuple[str, str, str, str]) -> None:
    """Say who has not signed, or what carries out what was signed."""
    serial, *rest = words
    for one in _waiting(arguments):
        if [one.serial, one.action, one.subject, one.value] == [serial, *rest]:
            name, missing, command = one.next_step(PROGRAM)
            say(f"{name}: {missing}: {command}")


TOOLS = cli.CliContext(
    acts=lambda arguments: site_acts(arguments.home, partial(print_progress, silent=False)),
    origin=lambda arguments: site_directory.origin(site_directory.SiteDirectory(arguments.home).settings().site),
    read_key=signing_key,
    write_key=lambda path, key: write_private(path, pem(key)),
    say=say,
    program=PROGRAM,
    waiting=_waiting,
    confirm=questions.confirm,
    compare=same_fingerprint,
    next_step=_next_step,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of the commands ``ledger``, but for ``ledger amend``, which asks the coordinator."""
    own = {"show": _show, "export": _export, "fingerprint": _fingerprint}
    word = arguments.command.partition(" ")[2]
    return own[word](arguments) if word in own else cli.run(arguments, TOOLS)
