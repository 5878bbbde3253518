"""The commands about the site's way in itself: opt-outs, projects, credentials of listeners, the doctor's part."""

from __future__ import annotations

import argparse
import errno
import getpass
import json
import os
import shutil
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from agent.deidentify.reasons import REASONS, Refused
from agent.edges import projects
from agent.edges.archives import reach
from agent.edges.association import Identity
from agent.edges.dicomweb import WebError
from agent.edges.files import Folder
from agent.edges.home import BadSite, Home
from agent.edges.ingestion import Ingestion, read_ingestion
from agent.edges.listener import ListenerFailed
from agent.edges.lists import BadFolder, read_lists
from agent.edges.log import open_log
from agent.edges.ocr import Ocr, OcrMissing, OcrSettings
from agent.edges.reader import ReaderFailed
from agent.edges.remote import PacsError
from agent.edges.room import RoomError
from agent.edges.secret import SecretError, make_secret, read_secret
from agent.edges.stow import StowError, StowSettings
from agent.edges.vault import VaultError
from agent.edges.way import forget, of_files, open_way
from protos.keyfile import BadKeyFile

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
EXPECTED: Final = (
    BadFolder,
    BadSite,
    ListenerFailed,
    OcrMissing,
    PacsError,
    ReaderFailed,
    Refused,
    RoomError,
    SecretError,
    StowError,
    VaultError,
    WebError,
)
_LEAST_FREE: Final = 2 * 2**30


def sentence(error: BaseException) -> str:
    """What is wrong, for the operator: of a refusal what to do about it, of a fault of the system no path."""
    if isinstance(error, Refused):
        return f"{error.code}: {REASONS[error.code]}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)


def lines_of(path: Path | None) -> tuple[str, ...]:
    """The lines of a text file that say something; none without a file.

    Raises:
        BadSite: it cannot be read as UTF-8, or it names none: that must never be taken for everybody.
    """
    if path is None:
        return ()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        raise BadSite(f"{path.name} cannot be read as UTF-8") from None
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise BadSite(f"{path.name} names none: one is needed on each line")
    return lines


def opt_out(arguments: argparse.Namespace) -> int:
    """A patient's no, or a change of mind. Patient ids are read from a file: a command line is seen by others."""
    home = Home(arguments.home)
    if arguments.what == "list":
        count = len(projects.opted_out(home))
        if arguments.json:
            sys.stdout.write(json.dumps({"patients": count}) + "\n")
        else:
            OUT.print(f"{count} patients have opted out")
        return 0
    with open_way(home, projects.MAIN) as way:
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
        with open_way(home, name) as way:
            gone += forget(way, persons)  # what waits, and what was refused
    open_log(home.root / "agent.log").info(f"opt_out_{arguments.what}", count=len(persons))
    if arguments.what == "add":
        OUT.print(f"{len(persons)} patients opted out; {gone} of their instances and waiting files were deleted")
        if waiting := projects.kept_of(home, persons):
            OUT.print(f"{waiting} made releases with them in can never leave: each lies sealed here until the next")
            OUT.print("command that makes, sends or withdraws a release; it is deleted then, and its grant spent")
    else:
        OUT.print(f"{len(persons)} patients may be kept again from now on; nothing that was deleted comes back")
    return 0


def _of_somebody(home: Home, named: list[str], *, anyway: bool) -> None:
    """Say which lines name nobody, before anybody is put on the list: a mistyped id protects no one.

    Raises:
        BadSite: of a patient nothing is here, and ``anyway`` was not said.
    """
    here = set(projects.opted_out(home))
    for name in projects.names(home):
        with open_way(home, name) as way:
            here |= {head.person for head in way.vault.heads()}
            for one in way.vault.note("releases") or []:  # who was released may be deleted here by now
                here.update(*one["clusters"], *one.get("again", []), one.get("persons", []))
    for name in () if here.issuperset(named) else projects.names(home):
        with open_way(home, name) as way:
            here |= of_files(way)
    unknown = [number for number, person in enumerate(named, 1) if person not in here]
    if not unknown:
        return
    lines = ", ".join(map(str, unknown[:20])) + (", ..." if len(unknown) > 20 else "")
    told = f"of {len(unknown)} of the {len(named)} ids nothing is here (id {lines} of the file)"
    if not anyway:
        raise BadSite(
            f"{told}: nobody was opted out. Check how the ids are written, and their issuer (--issuer). To put them "
            "on the list before anything of them comes, say --anyway"
        )
    ERR.print(f"{told}: they are put on the list all the same", markup=False, soft_wrap=True)


def project(arguments: argparse.Namespace) -> int:
    """Make a project, list them, or end one by destroying its key."""
    home = Home(arguments.home)
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
            raise BadSite(f"this destroys the key of all that {arguments.name} kept: say --yes {arguments.name}")
        projects.end(home, arguments.name)
        OUT.print(f"{arguments.name} has ended: its key is destroyed, and what it sealed with it")
    log.info(f"project_{arguments.what}", state=arguments.name)
    return 0


def doctor(home: Home) -> dict[str, str | None]:
    """What is wrong with the way in, by check; None where nothing is."""
    found: dict[str, str | None] = {"ingest.toml": None}
    try:
        ingestion = read_ingestion(home)
    except (BadSite, BadKeyFile) as error:
        return {"ingest.toml": str(error)}
    if ingestion.ocr is not None:
        found["tesseract"] = _tried(lambda: Ocr(ingestion.ocr or OcrSettings(), b""))
    free = shutil.disk_usage(home.root).free
    found["room on the disk"] = None if free > _LEAST_FREE else "less than 2 GiB are free: listeners refuse images"
    found |= _of_listeners(ingestion) | _of_folders(home, ingestion)
    for name, archive in {**ingestion.pacs, **ingestion.webs}.items():
        found[f"archive {name} answers"] = _tried(lambda archive=archive: reach(archive))  # type: ignore[misc]
    return found


def _of_listeners(ingestion: Ingestion) -> dict[str, str | None]:
    """Can what the listeners need be read, does it fit together, and are their ports to be had?"""
    found: dict[str, str | None] = {}
    listener, stow = ingestion.listener, ingestion.stow
    if listener is not None:
        if listener.tls is not None:
            found["[listener] tls"] = _fitting(listener.tls.context)
        found |= _port("listener", listener.host, listener.port)
    if stow is not None:
        if stow.certificate is not None:
            found["[stow] certificate and key"] = _fitting(lambda: _stow_context(stow))
        if stow.token_file is not None:
            found["[stow] token_file"] = _tried(lambda: read_secret(stow.token_file or Path(), "token_file"))
        found |= _port("stow", stow.host, stow.port)
    return found


def _stow_context(settings: StowSettings) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # a key that wants a passphrase is refused: nobody can type it for `serve`
    context.load_cert_chain(str(settings.certificate), str(settings.key), password="")
    if settings.client_ca is not None:
        context.load_verify_locations(str(settings.client_ca))


def _fitting(build: Callable[[], object]) -> str | None:
    try:
        build()
    except OSError as error:  # ssl.SSLError is one
        why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        return f"a file cannot be read, is no PEM, or certificate and key do not fit: {why or type(error).__name__}"
    return None


def _port(table: str, host: str, port: int) -> dict[str, str | None]:
    """Could it be listened on? That it is taken is no fault: the agent's own serve may have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return {f"[{table}] port {port} is free": None}
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return {f"[{table}] port {port} is in use: by this agent's own serve, or something else": None}
        why = error.strerror or "host is no address of this machine"
        return {f"[{table}] port {port} is free": f"cannot listen there: {why}"}


def _of_folders(home: Home, ingestion: Ingestion) -> dict[str, str | None]:
    """Are the folders there, and can their lists be read?"""
    usual = Folder(home.settings().input)
    known = [("folder of site.toml", usual)] if usual.path.is_dir() else []
    known += [(f"[[folder]] {number}", folder) for number, folder in enumerate(ingestion.folders, 1)]
    return {what: _tried(lambda one=one: read_lists(one.path, one.columns)) for what, one in known}  # type: ignore[misc]


def _tried(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (*EXPECTED, OSError) as error:
        return sentence(error)
    return None


def identity(arguments: argparse.Namespace) -> int:
    """A user's line for ``[listener] identities``: the passcode is typed, its digest is written."""
    passcode = getpass.getpass("passcode: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if not passcode:
        raise BadSite("no passcode was given")
    made = Identity.of(arguments.name, passcode, os.urandom(16))
    name = json.dumps(made.name)
    OUT.print(f'{{ name = {name}, salt = "{made.salt}", digest = "{made.digest}" }}', markup=False, soft_wrap=True)
    return 0


def token(arguments: argparse.Namespace) -> int:
    """A fresh bearer token for ``[stow] token_file``; nothing is overwritten."""
    make_secret(arguments.out)
    OUT.print(f"wrote {arguments.out.name} (0600): give its contents to the sender by a safe way")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "opt-out": opt_out,
    "project": project,
    "identity": identity,
    "token": token,
}
