"""``lazaret-agent``: one hospital's side. Ingest, price, release, take part in rounds, show the ledger."""

from __future__ import annotations

import argparse
import datetime as dt
import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agent import backup_commands, synthesis_parser
from agent.edges import enrol as joining
from agent.edges import home as homes
from agent.edges import looking
from agent.edges.faces import METHODS, PARTS
from agent.edges.own_ledger import found
from agent.nouns import Unreachable
from policies.entries import InvalidEntry
from policies.forms import WrongForm
from policies.ledger import KeyReused
from policies.people import Tools, add_commands
from policies.policy import PolicyError, preset
from policies.sqlite import export_file, open_sqlite, read_lines
from policies.statement import PAYLOAD_TYPE, MalformedStatement
from policies.store import LedgerBusy, LedgerStopped, LedgerUnsound, Store
from policies.view import as_json, rows
from protos.envelope import key_id, seal
from protos.keyfile import BadKeyFile, pem, signing_key, write_private
from protos.web import login_command
from protos.web.settings import BadConsole

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
EXPECTED = (
    homes.BadSite,
    BadConsole,
    BadKeyFile,
    InvalidEntry,
    KeyReused,
    LedgerBusy,
    MalformedStatement,
    PolicyError,
    Unreachable,
    WrongForm,
)


def _init(arguments: argparse.Namespace) -> int:
    listed = json.dumps(arguments.secondary_capture_modality)
    settings = (
        f"site = {json.dumps(arguments.site)}\n"
        f"coordinator = {json.dumps(arguments.coordinator)}\n"
        f"input = {json.dumps(str(arguments.input))}  # the folder that `ingest` reads, relative to this one\n"
        f"modalities = {json.dumps(arguments.modality)}\n"
        f"secondary_capture_modalities = {listed}  # captures may show names: vouch for each\n"
        f"public_components = {json.dumps(arguments.public_component)}  # SHA-256 of bases you vouch to be public\n"
    )
    settings += f"proxy = {json.dumps(arguments.proxy)}\n" if arguments.proxy else ""
    policy = Path(arguments.policy)
    text = policy.read_text() if policy.suffix == ".toml" else preset(arguments.policy)
    homes.create(arguments.home, settings, text)
    OUT.print(f"made {arguments.home.name}: keys (they never leave it), site.toml, policy.toml")
    OUT.print("ask the coordinator for an invitation, and run `enrol` with it")
    return 0


def _enrol(arguments: argparse.Namespace) -> int:
    """Hand in this site's request with an invitation, or ask what became of it; exit 1 while it waits."""
    home = homes.Home(arguments.home)
    given = None
    if arguments.invitation is not None:
        if not arguments.fingerprint:
            raise homes.BadSite("compare the root's fingerprint by telephone, and type it: --fingerprint")
        token = arguments.token_file.read_text() if arguments.token_file else _typed("token: ")
        given = joining.Given(arguments.invitation.read_bytes(), token, arguments.fingerprint)
    until, told = time.monotonic() + arguments.wait, ""
    while True:
        progress = joining.enrol(home, given, joining.over_grpc(home.settings().proxy), dt.datetime.now(dt.UTC))
        given = None
        if progress.fingerprint != told:
            told = progress.fingerprint
            OUT.print(f"fingerprint of this site's request: {told}", soft_wrap=True)
        if progress.state == "enrolled":
            OUT.print("enrolled; `doctor` checks the way to the coordinator")
            public = home.sign_key().public_key().public_bytes_raw()
            OUT.print(f"this site's key id, for partners that know it: {key_id(public)}", soft_wrap=True)
            return 0
        if progress.state == "declined" or not time.monotonic() < until:
            break
        time.sleep(min(5.0, max(0.2, until - time.monotonic())))
    if progress.state == "declined":
        OUT.print("the coordinator has declined the request: ask for a new invitation")
    else:
        OUT.print("it waits for two persons: tell them the fingerprint by telephone; then run `enrol` again")
    return 1


def _typed(prompt: str) -> str:
    """A secret from the terminal, unseen, or a line of standard input."""
    return getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline()


def _doctor(arguments: argparse.Namespace) -> int:
    """Of :mod:`agent.doctor_command`, imported when it is typed: it looks at the parsers too."""
    from agent import doctor_command  # noqa: PLC0415 - see above

    return doctor_command.run(arguments)


def _kept(name: str) -> Callable[[argparse.Namespace], int]:
    """A command of :mod:`agent.backup_commands`."""
    return lambda arguments: backup_commands.run(name, arguments)


def _console(arguments: argparse.Namespace) -> int:
    """Of :mod:`agent.console.command`, imported when it is typed."""
    from agent.console import command  # noqa: PLC0415 - the pages take a second

    return command.run(arguments)


def _ledger_show(arguments: argparse.Namespace) -> int:
    site = homes.Home(arguments.home).settings().site
    records = [line.record for line in read_lines(arguments.home / "ledger.db")]
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(homes.origin(site), records), indent=2) + "\n")
        return 0
    table = Table("#", "time (UTC)", "entry", "who", "what", title=f"ledger of {homes.origin(site)}")
    for row in rows(records):
        table.add_row(*row)
    OUT.print(table)
    return 0


def _ledger_export(arguments: argparse.Namespace) -> int:
    home = homes.Home(arguments.home)
    raw = export_file(arguments.home / "ledger.db", homes.origin(home.settings().site), home.sign_key())
    arguments.out.write_bytes(raw)
    OUT.print(f"wrote {arguments.out.name}; check it with: lazaret-verify {arguments.out.name} --key FINGERPRINT")
    return 0


def _ledger_fingerprint(arguments: argparse.Namespace) -> int:
    home = homes.Home(arguments.home)
    public = home.coordinator_key() if arguments.coordinator else home.sign_key().public_key().public_bytes_raw()
    sys.stdout.write(f"{key_id(public)}\n")
    return 0


def _open(arguments: argparse.Namespace) -> Store:
    home = homes.Home(arguments.home)
    disk, key = open_sqlite(arguments.home / "ledger.db"), home.sign_key()
    store = Store(disk, homes.origin(home.settings().site), key, lambda: int(time.time()))
    try:
        looking.compare(home, store)  # in place of a lost ledger no other one is begun
        found(home, store)
    except (homes.BadSite, BadKeyFile):
        store.close()
        raise
    return store


TOOLS = Tools(
    open_store=_open,
    origin=lambda arguments: homes.origin(homes.Home(arguments.home).settings().site),
    seal=lambda raw, key: seal(raw, PAYLOAD_TYPE, key),
    read_key=signing_key,
    write_key=lambda path, key: write_private(path, pem(key)),
    say=lambda text: OUT.print(text, markup=False, soft_wrap=True),
)


def _with_patients(name: str) -> Callable[[argparse.Namespace], int]:
    """A command of :mod:`agent.commands`, which is imported only when one of them is typed."""

    def act(arguments: argparse.Namespace) -> int:
        from agent import commands  # noqa: PLC0415 - torch: two seconds that init, doctor and ledger need not wait

        return commands.run(name, arguments)

    return act


def _on_the_way_in(name: str) -> Callable[[argparse.Namespace], int]:
    """A command of :mod:`agent.intake_commands`, imported when it is typed: the parsers take half a second."""

    def act(arguments: argparse.Namespace) -> int:
        from agent import intake_commands  # noqa: PLC0415 - see above

        return intake_commands.run(name, arguments)

    return act


def _ingest(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """What narrows a question is a mistake where nobody is asked."""
    of_archives = ("modality", "since", "until", "patients", "accessions")

    def act(arguments: argparse.Namespace) -> int:
        given = [f"--{name}" for name in of_archives if getattr(arguments, name)]
        if given and not (arguments.pacs or arguments.dicomweb):
            parser.error(f"{', '.join(given)}: of an archive only, with --pacs or --dicomweb")
        return _on_the_way_in("ingest")(arguments)

    return act


def _add_intake(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    into = add(commands, "ingest", _on_the_way_in("ingest"), "let images in: from folders, or from an archive")
    road = into.add_mutually_exclusive_group()
    road.add_argument("--folder", type=Path, help="this folder only; else site.toml's, ingest.toml's and what waits")
    road.add_argument("--pacs", help="an archive of ingest.toml, asked by C-FIND and C-GET or C-MOVE")
    road.add_argument("--dicomweb", help="an archive of ingest.toml, asked by QIDO-RS and WADO-RS")
    into.add_argument("--modality", action="append", default=[], help="of an archive: these only")
    into.add_argument("--since", type=dt.date.fromisoformat, help="study date, YYYY-MM-DD")
    into.add_argument("--until", type=dt.date.fromisoformat, help="study date, YYYY-MM-DD")
    into.add_argument("--patients", type=Path, help="a file with a patient id on each line")
    into.add_argument("--accessions", type=Path, help="a file with an accession number on each line")
    _of_project(into)
    into.set_defaults(act=_ingest(into))
    would = add(commands, "what-if", _on_the_way_in("what-if"), "what would be done to files, and why")
    would.add_argument("files", type=Path, nargs="+")
    would.add_argument("--patient-list", type=Path, help="file,patient_id: whose the NIfTI files are")
    _of_project(would)
    held = commands.add_parser("quarantine", help="what was refused").add_subparsers(required=True, dest="what")
    listed = add(held, "list", _on_the_way_in("quarantine"), "reasons and counts, and what to do")
    listed.add_argument("--files", action="store_true", help="each file: names may name patients")
    again = add(held, "retry", _on_the_way_in("quarantine"), "read refused files again, under the rules of today")
    again.add_argument("--code", help="of this reason only")
    again.add_argument("--once-more", action="store_true", help="also those that were tried as often as may be")
    again.add_argument("names", nargs="*")
    shown = add(held, "show", _on_the_way_in("quarantine"), "write a refused file as it came, to look at it")
    shown.add_argument("names", nargs=1)
    shown.add_argument("--out", type=Path, required=True)
    given_up = add(held, "drop", _on_the_way_in("quarantine"), "forget refused files for good")
    given_up.add_argument("names", nargs="+")
    given_up.add_argument("--yes", action="store_true")
    for command in (listed, again, shown, given_up):
        _of_project(command)
    _add_people(commands, add)
    named = add(commands, "identity", _on_the_way_in("identity"), "a user for ingest.toml's [listener] identities")
    named.add_argument("name")
    fresh = add(commands, "token", _on_the_way_in("token"), "a bearer token for ingest.toml's [stow]")
    fresh.add_argument("--out", type=Path, required=True)


def _deface(arguments: argparse.Namespace) -> int:
    """Of :mod:`agent.deface_command`, imported when it is typed: torch takes two seconds."""
    from agent import deface_command  # noqa: PLC0415 - see above

    return deface_command.run(arguments)


def _add_deface(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    bare = add(commands, "deface", _deface, "take the faces off head MRI and CT: in files, or in the vault")
    bare.set_defaults(homeless=True)
    bare.add_argument("source", type=Path, nargs="?", metavar="IN", help="a NIfTI or DICOM file; or a folder of them")
    bare.add_argument("out", type=Path, nargs="?", metavar="OUT", help="a new file, or a folder: nothing is replaced")
    bare.add_argument("--method", choices=METHODS, default="remodel", help="another face; or a way to take it away")
    bare.add_argument("--network", type=Path, help="of remodel: a file of `train remodeller`, of public heads")
    bare.add_argument("--parts", choices=PARTS, default="surface", help="of remodel: all that is seen, or the face")
    bare.add_argument("--mask", type=Path, help="of one file: its brain, by HD-BET, SynthStrip or by hand (NIfTI)")
    bare.add_argument("--report", type=Path, help="a page with each head before and after, for this site only")
    bare.add_argument("--vault", action="store_true", help="what is in the vault, as ingest.toml's [faces] says")
    bare.add_argument("--once-more", action="store_true", help="of the vault: also what was refused before")
    _of_project(bare)


def _add_people(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    told = add(commands, "manifest", _on_the_way_in("manifest"), "what was removed, replaced and kept, and why")
    told.add_argument("--study", help="one study's pseudonym")
    told.add_argument("--out", type=Path, help="a folder; else standard output")
    _of_project(told)
    counted = add(commands, "cohort", _on_the_way_in("cohort"), "patients by modality, body part and state")
    counted.add_argument("--held", action="store_true", help="list the studies and series that are held back")
    counted.add_argument("--lift", metavar="NAME", help="a person has looked at this study or series: use it")
    counted.add_argument("--same", action="store_true", help="list patient ids that count as one patient towards k")
    counted.add_argument("--apart", metavar="NAME", help="a person has decided: these ids are as many patients")
    counted.add_argument("--labels", type=Path, help="sop_instance_uid,label: give labels later than they came in")
    _of_project(counted)
    out = commands.add_parser("opt-out", help="patients who want no part").add_subparsers(required=True, dest="what")
    for what, text in (("add", "keep nothing of these patients, and delete what there is"), ("remove", "undo it")):
        command = add(out, what, _on_the_way_in("opt-out"), text)
        command.add_argument("--patients", type=Path, required=True, help="a file with a patient id on each line")
        command.add_argument("--issuer", default="", help="who gave out these ids; else ingest.toml's issuer")
        if what == "add":
            command.add_argument("--anyway", action="store_true", help="also ids of whom nothing is here yet")
    counted_out = add(out, "list", _on_the_way_in("opt-out"), "how many there are")
    counted_out.add_argument("--json", action="store_true")
    project = commands.add_parser("project", help="research projects").add_subparsers(required=True, dest="what")
    add(project, "create", _on_the_way_in("project"), "make a project with a key of its own").add_argument("name")
    there = add(project, "list", _on_the_way_in("project"), "those that have not ended")
    there.add_argument("--json", action="store_true")
    end = add(project, "end", _on_the_way_in("project"), "destroy a project's key, and with it all that it kept")
    end.add_argument("name")
    end.add_argument("--yes", default="", metavar="NAME", help="the name once more")


def _of_project(command: argparse.ArgumentParser) -> None:
    command.add_argument("--project", default=homes.MAIN, help="whose vault; else the project main")
    command.add_argument("--json", action="store_true")


def _add_releases(parser: argparse.ArgumentParser, add: Callable[..., argparse.ArgumentParser]) -> None:
    release = parser.add_subparsers(required=True, metavar="MECHANISM")
    ksame = add(release, "ksame", _with_patients("release"), "a k-anonymous synthetic set (k-Same-PCA)")
    ksame.add_argument("--basis", type=Path, required=True, help="PCA basis fitted on public images")
    ksame.add_argument("--k", type=int, default=11, help="distinct patients behind every image")
    ksame.add_argument("--l-diversity", type=int, default=2, help="distinct labels behind every image")
    ksame.add_argument("--modality", required=True, help="DICOM modality of the cohort")
    ksame.add_argument("--project", default=homes.MAIN, help="whose vault; else the project main")
    ksame.add_argument("--form", choices=("png", "dicom"), default="png", help="how the images are written")
    ksame.add_argument("--spacing-um", type=int, default=1000, help="of DICOM: a pixel's side in micrometres")
    ksame.add_argument(
        "--reader", type=Path, help="seal it to this reader's public key: the coordinator sees no image"
    )
    ksame.add_argument("--vetting", type=Path, help="TOML: the table [vetting]; else it refuses copies alone")
    synthesis_parser.add_making(ksame)
    ksame.add_argument("--json", action="store_true")
    synthesis_parser.add_release(release, add)
    send = add(
        release, "send", _with_patients("send"), "hand over a release that is kept here: approved, or not answered"
    )
    send.add_argument("release", help="its id, as `release` printed it")
    send.add_argument("--json", action="store_true")
    inspect = add(release, "inspect", _with_patients("inspect"), "show persons what they are asked to approve")
    inspect.add_argument("release")
    inspect.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    withdraw = add(release, "withdraw", _with_patients("withdraw"), "give up a release that was not approved")
    withdraw.add_argument("release")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lazaret-agent", description=__doc__)
    parser.add_argument("--home", type=Path, help="the site's directory; `train`, `audit` and `reproduce` need none")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(group: Any, name: str, act: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = group.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        return command

    init = add(commands, "init", _init, "make the site's directory, its keys and its request to take part")
    init.add_argument("--site", required=True, help="short lower-case name")
    init.add_argument("--coordinator", default="127.0.0.1:7443", help="host:port")
    init.add_argument("--proxy", default="", help="host:port of an HTTP proxy to go through")
    init.add_argument("--input", type=Path, default=Path("../input"), help="the folder that `ingest` reads")
    init.add_argument("--policy", default="controlled", help="a preset or a .toml file")
    init.add_argument("--modality", action="append", required=True, help="let in; may be repeated")
    init.add_argument("--secondary-capture-modality", action="append", default=[], help="see site.toml")
    init.add_argument("--public-component", action="append", default=[], help="SHA-256; see site.toml")
    enrol = add(commands, "enrol", _enrol, "join the federation by invitation; again without one: ask for the answer")
    enrol.add_argument("invitation", type=Path, nargs="?", help="the file that the coordinator's operator sent")
    enrol.add_argument("--fingerprint", default="", help="of the federation's root, as told by telephone")
    enrol.add_argument("--token-file", type=Path, help="holds the token; else it is read from standard input")
    enrol.add_argument("--wait", type=float, default=0.0, help="seconds to go on asking while it waits for approval")
    doctor = add(commands, "doctor", _doctor, "check configuration, keys and the way to the coordinator")
    doctor.add_argument("--json", action="store_true")
    _add_intake(commands, add)
    _add_deface(commands, add)
    _add_releases(commands.add_parser("release", help="make a release"), add)
    synthesis_parser.add_commands(commands, add)
    serve = add(commands, "serve", _with_patients("serve"), "receive images, and take part in federated rounds")
    serve.add_argument("--modality", help="DICOM modality of the cohort; without it, serve receives only")
    serve.add_argument("--project", default=homes.MAIN, help="whose vault; else the project main")
    backup_commands.add_commands(commands, add, _kept)
    add(commands, "console", _console, "the site console alone, as console.toml says; `serve` opens it too")
    login_command.add_commands(commands, add, TOOLS.say)
    _add_ledger(commands, add)
    return parser


def _add_ledger(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    ledger = commands.add_parser("ledger", help="the site's ledger").add_subparsers(required=True, metavar="WHAT")
    show = add(ledger, "show", _ledger_show, "print the ledger")
    show.add_argument("--json", action="store_true")
    add_commands(ledger, TOOLS)
    add(ledger, "amend", _with_patients("amend"), "put policy.toml in force: here, and at the coordinator")
    export = add(ledger, "export", _ledger_export, "write the ledger for lazaret-verify")
    export.add_argument("out", type=Path)
    text = "print the fingerprint of the ledger's key, which auditors give to lazaret-verify --key"
    key = add(ledger, "fingerprint", _ledger_fingerprint, text)
    key.add_argument("--coordinator", action="store_true", help="of the coordinator's, as received at enrolment")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 done, 1 refused or failed, 2 usage, 70 internal."""
    os.umask(0o077)
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.home is None and not getattr(arguments, "homeless", False):
        parser.error("the following arguments are required: --home")
    try:
        return int(arguments.act(arguments))
    except OSError as error:
        ERR.print(f"refused: {error.strerror or error}: {Path(str(error.filename or '')).name}", markup=False)
        return 1
    except EXPECTED as error:
        ERR.print(f"refused: {error}", markup=False, soft_wrap=True)
        return 1
    except (LedgerUnsound, LedgerStopped) as error:
        ERR.print(f"stopped: {error}", markup=False)
        return 70
    except Exception as error:  # noqa: BLE001 - whatever it is: stop, and say no text that may hold patient data
        ERR.print(f"stopped: internal fault ({type(error).__name__})", markup=False)
        return 70


if __name__ == "__main__":
    sys.exit(main())
