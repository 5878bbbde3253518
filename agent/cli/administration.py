"""``opt-out``, ``project``, ``identity`` and ``token``: whose images are kept, and who may send some."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from agent.cli.output import ERR, OUT, answered_ingest
from agent.errors import SiteConfigError
from agent.event_log import open_log
from agent.ingest.context import of_files, open_ingest, purge_pending
from agent.pacs.dimse.config import Identity
from agent.pacs.secret_files import make_secret
from agent.release.release_record import MEMBERS, RECORD, taken_part
from agent.storage import projects, read_only_access
from agent.storage.site_directory import MAIN, SiteDirectory


def lines_of(path: Path | None) -> tuple[str, ...]:
    """The lines of a text file that say something; none without a file.

    Raises:
        SiteConfigError: it is not there, is not UTF-8, or names none: that must never be taken for everybody.
    """
    if path is None:
        return ()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SiteConfigError(f"{path.name} cannot be read: file not found") from None
    except (OSError, UnicodeDecodeError):
        raise SiteConfigError(f"{path.name} is not UTF-8 text") from None
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise SiteConfigError(f"{path.name} is empty: write one ID on each line")
    return lines


def opt_out(arguments: argparse.Namespace) -> int:
    """A patient's no, or a change of mind. Patient ids are read from a file: a command line is seen by others."""
    home = SiteDirectory(arguments.home)
    if arguments.what == "list":
        count = len(projects.opted_out(home))
        if arguments.json:
            sys.stdout.write(json.dumps({"patients": count}) + "\n")
        else:
            OUT.print(f"{count} patients have opted out")
        return 0
    with open_ingest(home, MAIN) as way:
        named = [way.who.person(arguments.issuer, one) for one in lines_of(arguments.patients)]
    persons = set(named)
    if arguments.what == "add":
        _of_somebody(home, named, anyway=arguments.anyway)
    gone = 0
    for person in sorted(persons):
        if arguments.what == "add":
            gone += projects.opt_out(home, person)
        else:
            projects.opt_in(home, person)
    for name in projects.names(home) if arguments.what == "add" else ():
        with open_ingest(home, name) as way:
            gone += purge_pending(way, persons)  # what waits, and what was refused
    open_log(home.root / "agent.log").info(f"opt_out_{arguments.what}", count=len(persons))
    if arguments.what == "add":
        for line in (*_deleted(home, persons, gone), *_membership(home, persons)):
            OUT.print(line, markup=False, soft_wrap=True)
    else:
        OUT.print(f"{len(persons)} patients may be kept again from now on. Deleted images do not come back")
    return 0


def _deleted(home: SiteDirectory, persons: set[str], gone: int) -> Iterator[str]:
    """What became of their images, and of what was made of them and has not left."""
    yield f"{len(persons)} patients opted out; {gone} of their instances and waiting files were deleted"
    if waiting := projects.kept_of(home, persons):
        yield (
            f"{waiting} unsent releases contain them and cannot be sent. Each stays here, encrypted, until a command "
            "makes, sends or withdraws a release. It is then deleted, and its grant spent"
        )


def _membership(home: SiteDirectory, persons: set[str]) -> Iterator[str]:
    """What the patients took part in, for the site alone, and what that means."""
    with read_only_access.notes(home) as notes:
        told = taken_part(notes.note(RECORD), notes.note(MEMBERS), persons) if notes is not None else []
    if not told:
        yield "by this site's records they were in no run and in no release"
        return
    yield f"by this site's records they took part in: {', '.join(told)}. For this site alone"
    yield (
        "What has left is not called back: a model stays where it was sent. Its epsilon limits what it tells of each "
        "patient, and that limit stays in force. No later run or release uses them"
    )


def _of_somebody(home: SiteDirectory, named: list[str], *, anyway: bool) -> None:
    """Say which lines name nobody, before anybody is put on the list: a mistyped id protects no one.

    Raises:
        SiteConfigError: of a patient nothing is here, and ``anyway`` was not said.
    """
    here = set(projects.opted_out(home))
    for name in projects.names(home):
        with open_ingest(home, name) as way:
            here |= {head.person for head in way.vault.heads()}
            for one in way.vault.note("releases") or []:  # who was released may be deleted here by now
                here.update(*one["clusters"], *one.get("again", []), one.get("persons", []))
    for name in () if here.issuperset(named) else projects.names(home):
        with open_ingest(home, name) as way:
            here |= of_files(way)
    unknown = [number for number, person in enumerate(named, 1) if person not in here]
    if not unknown:
        return
    lines = ", ".join(map(str, unknown[:20])) + (", ..." if len(unknown) > 20 else "")
    told = f"nothing is here of {len(unknown)} of the {len(named)} ids (id {lines} of the file)"
    if not anyway:
        raise SiteConfigError(
            f"{told}: no patient was opted out. Check how the ids are written, and their issuer (--issuer). To opt "
            "them out before their images arrive, repeat the command with --anyway"
        )
    ERR.print(f"{told}. They are opted out nevertheless", markup=False, soft_wrap=True)


def project(arguments: argparse.Namespace) -> int:
    """Make a project, list them, or end one by destroying its key."""
    home = SiteDirectory(arguments.home)
    home.settings()
    if arguments.what == "list":
        projects.finish(home)
        names = projects.names(home)
        sys.stdout.write(json.dumps(names) + "\n" if arguments.json else "".join(f"{name}\n" for name in names))
        return 0
    log = open_log(home.root / "agent.log")
    if arguments.what == "create":
        projects.create(home, arguments.name)
        OUT.print(f"made the project {arguments.name}: its key is in keys/projects")
    else:
        if arguments.yes != arguments.name:
            raise SiteConfigError(
                f"this destroys the key of all data of {arguments.name}. To confirm: --yes {arguments.name}"
            )
        projects.end(home, arguments.name)
        OUT.print(f"{arguments.name} has ended: its key is destroyed, and so is all data that was encrypted with it")
    log.info(f"project_{arguments.what}", state=arguments.name)
    return 0


def identity(arguments: argparse.Namespace) -> int:
    """A user's line for ``[listener] identities``: the passcode is typed, its digest is written."""
    passcode = getpass.getpass("passcode: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not passcode:
        raise SiteConfigError("no passcode was given")
    made = Identity.of(arguments.name, passcode, os.urandom(16))
    name = json.dumps(made.name)
    OUT.print(f'{{ name = {name}, salt = "{made.salt}", digest = "{made.digest}" }}', markup=False, soft_wrap=True)
    return 0


def token(arguments: argparse.Namespace) -> int:
    """A fresh bearer token for ``[stow] token_file``; nothing is overwritten."""
    make_secret(arguments.out)
    OUT.print(f"wrote {arguments.out.name} (0600): give its contents to the sender over a secure channel")
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands; what it expects to go wrong becomes a sentence and exit status 1."""
    acts = {"opt-out": opt_out, "project": project, "identity": identity, "token": token}
    return answered_ingest(acts[arguments.command.split()[0]], arguments)
