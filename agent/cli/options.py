"""The words of ``lazaret-agent``. It imports argparse alone, so that ``--help`` waits for nothing else.

What belongs to one mechanism is in ``options.py`` of the mechanism's folder. Names that another module defines, too,
are written twice, since that module imports torch; tests compare them.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agent.cli import bundle_options
from agent.defacing.config import METHODS, PARTS
from agent.mechanisms.centroids import options as centroids
from agent.mechanisms.common.option_types import count, menu, rate, seed, sizes
from agent.mechanisms.distillation import options as distillation
from agent.mechanisms.federated import options as federated
from agent.mechanisms.kanonymous import OPTIONS
from agent.mechanisms.privimage import options as privimage
from agent.mechanisms.remodel import options as remodel
from agent.prediction import options as prediction
from policies.governance import options as governance_options
from protos.operations.command_line import add, add_backup_commands, add_login_commands, add_setup_options

MAIN: Final = "main"  # agent.storage.site_directory.MAIN
NETWORKS: Final = ("generator", "encoder", "features", "network", "recogniser", "semantics")
KEYS: Final = ("patient-id", "accession", "study", "series", "instance")  # agent.ingest.label_import.KEYS
_WHOSE: Final = {"network": "public start of a task's network"}
PRIORITIES: Final = ("high", "normal", "low")  # agent.service.jobs.PRIORITIES
SIZES: Final = ("tiny32", "small64", "small128", "auto128", "auto256", "auto512", "auto1024")


_RELEASE: Final = "its number, as `status` shows it, or its id"
_HOME: Final = (
    "the site's directory. These commands need none: train, weights, draw, deface IN OUT, audit, task check, "
    "task from-bundle, task to-bundle, login make, ledger person, ledger ask, ledger sign"
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. ``command`` in what it returns is the command as typed: "release ksalsa"."""
    parser = argparse.ArgumentParser(
        prog="lazaret-agent",
        description="One hospital's side: ingest, price, release, take part in rounds, show the ledger.",
    )
    parser.add_argument("--home", type=Path, help=_HOME)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_setup(commands)
    _add_ingest(commands)
    _add_quarantine(commands)
    _add_labels(commands)
    _add_patients(commands)
    _add_deface(commands)
    _add_releases(commands.add_parser("release", help="make a release"))
    _add_search(commands)
    _add_training(commands)
    _add_noise_audit(commands)
    _add_tasks(commands)
    serve = add(commands, "serve", "receive images, and take part in federated rounds")
    serve.add_argument("--modality", help="DICOM modality of the cohort; without it, serve only receives")
    _project(serve)
    _add_runs(commands)
    _add_jobs(commands)
    _add_backup(commands)
    add(commands, "console", "run only the site console (console.toml); `serve` runs it too")
    add_login_commands(commands)
    _add_ledger(commands)
    return parser


# -- what several commands share


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true")


def _project(command: argparse.ArgumentParser) -> None:
    command.add_argument("--project", default=MAIN, help="project whose vault to use (default: main)")


def _project_json(command: argparse.ArgumentParser) -> None:
    _project(command)
    _json(command)


def _device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    _json(command)


def _seed_device(command: argparse.ArgumentParser, text: str | None = None) -> None:
    """Of what needs no site: it works on public images, or on a model that was released."""
    command.add_argument("--seed", type=seed, default=0, help=text)
    command.set_defaults(homeless=True)
    _device(command)


def _page(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, help="the page, for this site only")


def _making(command: argparse.ArgumentParser) -> None:
    """What every release of a mechanism can be told."""
    dry = "show cost, number, size and known reasons for refusal; nothing is read, spent or written"
    command.add_argument("--dry-run", action="store_true", help=dry)
    anew = "discard an interrupted release; its budget stays spent"
    command.add_argument("--anew", action="store_true", help=anew)
    command.set_defaults(grant="")  # a job's record names it
    command.add_argument("--out", type=Path, help="also write the admitted release to this new file")
    _detach(command)
    _project_json(command)


def _detach(command: argparse.ArgumentParser) -> None:
    command.add_argument("--detach", action="store_true", help="queue it as a job of the running service; see `jobs`")
    first = "with --detach: jobs of higher priority start before others of their kind (default: normal)"
    command.add_argument("--priority", choices=PRIORITIES, help=first)


def _form(command: argparse.ArgumentParser) -> None:
    """How images are written, and for whom."""
    command.add_argument("--form", choices=("png", "dicom"), default="png", help="how the images are written")
    command.add_argument("--spacing-um", type=int, default=1000, help="for DICOM: a pixel's side in micrometres")
    command.add_argument("--reader", type=Path, help="encrypt to this recipient's public key")


def _sheet(command: argparse.ArgumentParser, needs: str = "") -> None:
    text = "write the reviewer's contact sheet to this new HTML file before anything leaves; for this site only"
    command.add_argument("--sheet", type=Path, help=text + needs)


# -- the site, and what comes in


def _add_setup(commands: Any) -> None:
    text = "set the site up, step by step: directory, PACS, console, enrolment; again: go on with what is missing"
    whole = add(commands, "setup", text)
    _site(whole, required=False)
    whole.add_argument("--invitation", type=Path, help="the file that the coordinator's operator sent")
    whole.add_argument("--pacs", action="append", default=[], metavar="AE@ADDRESS", help="who sends; may be repeated")
    whole.add_argument("--ae-title", default="", help="by which the PACS calls this server (LAZARET)")
    whole.add_argument("--listen", default="0.0.0.0:11112", help="host:port for the PACS")
    tls = "CERTIFICATE,KEY,CA; or `plain`, if another measure protects the network to the PACS"
    whole.add_argument("--dicom-tls", default="", metavar="FILES", help=tls)
    add_setup_options(whole)
    _joining(whole)
    _json(whole)
    init = add(commands, "init", "one step of `setup`: make the site's directory, its keys and its request to join")
    _site(init, required=True)
    enrol = add(commands, "enrol", "one step of `setup`: join by invitation; without one: ask for the answer")
    enrol.add_argument("invitation", type=Path, nargs="?", help="the file that the coordinator's operator sent")
    _joining(enrol)
    _json(add(commands, "doctor", "check configuration, keys and the connection to the coordinator"))
    _json(add(commands, "status", "show what is missing until images flow and a release can leave, and what to type"))


def _site(command: argparse.ArgumentParser, *, required: bool) -> None:
    """What a site's directory is made of. ``setup`` asks for what is not there, and an invitation says much of it."""
    command.add_argument("--site", required=required, default="", help="short lower-case name")
    address = "127.0.0.1:7443" if required else ""
    command.add_argument("--coordinator", default=address, help="host:port")
    command.add_argument("--proxy", default="", help="host:port of an HTTP proxy")
    command.add_argument("--input", type=Path, default=Path("../input"), help="the folder that `ingest` reads")
    command.add_argument("--policy", default="controlled" if required else "", help="a preset or a .toml file")
    text = "accepted modality; may be repeated"
    command.add_argument("--modality", action="append", required=required, default=[], help=text)
    command.add_argument("--secondary-capture-modality", action="append", default=[], help="see site.toml")
    command.add_argument("--public-component", action="append", default=[], help="SHA-256; see site.toml")


def _joining(command: argparse.ArgumentParser) -> None:
    """What goes with an invitation. The token is never the value of an option."""
    command.add_argument("--fingerprint", default="", help="the root's fingerprint, as you heard it by phone")
    command.add_argument("--token-file", type=Path, help="file with the token (default: standard input)")
    command.add_argument("--wait", type=float, default=0.0, help="seconds to wait for approval")


def _add_ingest(commands: Any) -> None:
    into = add(commands, "ingest", "ingest images from folders or from an archive")
    road = into.add_mutually_exclusive_group()
    road.add_argument(
        "--folder", type=Path, help="only this folder (default: those of site.toml, ingest.toml and the spool)"
    )
    road.add_argument("--pacs", help="an archive of ingest.toml, by C-FIND and C-GET or C-MOVE")
    road.add_argument("--dicomweb", help="an archive of ingest.toml, by QIDO-RS and WADO-RS")
    into.add_argument(
        "--modality", action="append", default=[], help="with an archive: only this modality; may be repeated"
    )
    into.add_argument("--since", type=dt.date.fromisoformat, help="study date, YYYY-MM-DD")
    into.add_argument("--until", type=dt.date.fromisoformat, help="study date, YYYY-MM-DD")
    into.add_argument("--patients", type=Path, help="a file with a patient id on each line")
    into.add_argument("--accessions", type=Path, help="a file with an accession number on each line")
    into.set_defaults(usage_check=_of_archives(into))
    _detach(into)
    would = add(commands, "what-if", "show what would be done to files, and why")
    would.add_argument("files", type=Path, nargs="+")
    would.add_argument("--patient-list", type=Path, help="CSV with file,patient_id of the NIfTI files")
    for command in (into, would):
        _project_json(command)


def _of_archives(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """What narrows a question is a mistake where nobody is asked."""

    def check(arguments: argparse.Namespace) -> None:
        names = ("modality", "since", "until", "patients", "accessions")
        given = [f"--{name}" for name in names if getattr(arguments, name)]
        if given and not (arguments.pacs or arguments.dicomweb):
            parser.error(f"{', '.join(given)}: only for an archive, with --pacs or --dicomweb")

    return check


def _add_quarantine(commands: Any) -> None:
    held = commands.add_parser("quarantine", help="rejected files").add_subparsers(required=True, dest="what")
    listed = add(held, "list", "show reasons, counts and what to do")
    listed.add_argument("--files", action="store_true", help="list each file; file names may identify patients")
    again = add(held, "retry", "process rejected files again, by the present rules")
    again.add_argument("--code", help="only files rejected for this reason")
    again.add_argument("--once-more", action="store_true", help="also files that reached the maximum of tries")
    again.add_argument("names", nargs="*")
    shown = add(held, "show", "write a rejected file, unchanged")
    shown.add_argument("names", nargs=1)
    shown.add_argument("--out", type=Path, required=True)
    given_up = add(held, "drop", "delete rejected files permanently")
    given_up.add_argument("names", nargs="+")
    given_up.add_argument("--yes", action="store_true")
    for command in (listed, again, shown, given_up):
        _project_json(command)


def _add_labels(commands: Any) -> None:
    tables = commands.add_parser("labels", help="tables of labels").add_subparsers(required=True, dest="what")
    into = add(tables, "import", "import a table, or replace its older version: all rows, or none")
    into.add_argument("table", type=Path, metavar="FILE.csv")
    into.add_argument("--key", choices=KEYS, required=True, help="what the key of a row is")
    text = "the TOML that declares the kind of each column (default: FILE.toml beside it)"
    into.add_argument("--columns", type=Path, metavar="FILE.toml", help=text)
    into.add_argument("--name", default="", help="of the table (default: the file's name)")
    into.add_argument("--dry-run", action="store_true", help="show what would be imported and what is wrong")
    listed = add(tables, "list", "list the tables, each with its version")
    shown = add(tables, "show", "show a table's columns, and how many patients have each value")
    gone = add(tables, "remove", "delete a table")
    for command in (shown, gone):
        command.add_argument("name")
    for command in (into, listed, shown, gone):
        _project_json(command)


def _add_patients(commands: Any) -> None:
    told = add(commands, "manifest", "show what was removed, replaced and kept, and why")
    told.add_argument("--study", help="one study's pseudonym")
    told.add_argument("--out", type=Path, help="a folder (default: standard output)")
    counted = add(commands, "cohort", "count patients by modality, body part and state")
    text = "show what this task file would find here, and what it would leave out and why"
    counted.add_argument("task", type=Path, nargs="?", metavar="TASK.toml", help=text)
    counted.add_argument("--held", action="store_true", help="list the studies and series that are held back")
    counted.add_argument("--lift", metavar="NAME", help="use this study or series: a person has checked it")
    counted.add_argument("--same", action="store_true", help="list patient ids that count as one patient towards k")
    counted.add_argument("--apart", metavar="NAME", help="a person's decision: these ids are different patients")
    counted.add_argument("--labels", type=Path, help="CSV sop_instance_uid,label: add labels to kept images")
    text = "show what a task of this label table would find here, and what it would leave out and why"
    counted.add_argument("--table", default="", metavar="NAME", help=text)
    counted.add_argument("--column", action="append", default=[], help="with --table: a column; may be repeated")
    text = "the same of a task that learns this segment of masks; may be repeated"
    counted.add_argument("--segment", action="append", default=[], metavar="NAME", help=text)
    counted.add_argument("--modality", default="", help="with --table or --segment: of the images, such as DX")
    text = "with them: pixels, such as 64,64; three numbers for volumes (default: 64,64)"
    counted.add_argument("--size", type=sizes, default=(64, 64), help=text)
    counted.add_argument("--body-part", default="", help="with them: of the images, such as CHEST")
    counted.add_argument("--per-study", action="store_true", help="with --table: one example for each study")
    counted.set_defaults(usage_check=_of_table(counted))
    for command in (told, counted):
        _project_json(command)
    out = commands.add_parser("opt-out", help="patients who have opted out").add_subparsers(
        required=True, dest="what"
    )
    for what, text in (
        ("add", "keep no data of these patients, and delete existing data"),
        ("remove", "undo an opt-out"),
    ):
        command = add(out, what, text)
        command.add_argument("--patients", type=Path, required=True, help="a file with a patient id on each line")
        command.add_argument("--issuer", default="", help="the issuer of these ids (default: ingest.toml's issuer)")
        if what == "add":
            command.add_argument("--anyway", action="store_true", help="also ids without data here")
    _json(add(out, "list", "count the patients who have opted out"))
    project = commands.add_parser("project", help="research projects").add_subparsers(required=True, dest="what")
    add(project, "create", "make a project with a key of its own").add_argument("name")
    _json(add(project, "list", "list the projects that have not ended"))
    end = add(project, "end", "destroy a project's key, and with it all its data")
    end.add_argument("name")
    end.add_argument("--yes", default="", metavar="NAME", help="confirm with the name")
    add(commands, "identity", "make a user for ingest.toml's [listener] identities").add_argument("name")
    fresh = add(commands, "token", "make a bearer token for ingest.toml's [stow]")
    fresh.add_argument("--out", type=Path, required=True)


def _of_table(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """What a table would give depends on the column and the images."""

    def check(arguments: argparse.Namespace) -> None:
        if arguments.task and (arguments.table or arguments.segment or arguments.column or arguments.modality):
            parser.error("TASK.toml: it says all of --table, --column, --segment and --modality itself")
        if arguments.table and not (arguments.column and arguments.modality):
            parser.error("--table: say --column and --modality, too")
        if arguments.segment and (arguments.table or arguments.per_study or not arguments.modality):
            parser.error("--segment: say --modality, too, and neither --table nor --per-study")
        if not arguments.table and (arguments.column or arguments.per_study):
            parser.error("--column and --per-study: only with --table")
        if arguments.modality and not (arguments.table or arguments.segment):
            parser.error("--modality: only with --table or --segment")

    return check


def _add_deface(commands: Any) -> None:
    bare = add(commands, "deface", "remove faces from head MRI and CT, in files or the vault")
    bare.set_defaults(homeless=True)
    bare.add_argument("source", type=Path, nargs="?", metavar="IN", help="a NIfTI or DICOM file, or a folder of them")
    bare.add_argument("out", type=Path, nargs="?", metavar="OUT", help="a new file or folder; nothing is overwritten")
    bare.add_argument("--method", choices=METHODS, default="remodel", help="how to replace or remove the face")
    bare.add_argument("--network", type=Path, help="for remodel: a file of `train remodeller`, of public heads")
    bare.add_argument(
        "--parts", choices=PARTS, default="surface", help="for remodel: the whole visible surface, or the face"
    )
    bare.add_argument("--mask", type=Path, help="for one file: its brain mask (NIfTI), by HD-BET, SynthStrip, hand")
    bare.add_argument("--report", type=Path, help="a page with each head before and after, for this site only")
    bare.add_argument("--vault", action="store_true", help="process the vault, as ingest.toml's [faces] says")
    bare.add_argument("--once-more", action="store_true", help="with --vault: also studies that were rejected before")
    _detach(bare)
    _project_json(bare)


# -- releases


def _add_releases(parser: argparse.ArgumentParser) -> None:
    release = parser.add_subparsers(required=True, metavar="MECHANISM")
    for name, own in OPTIONS.items():
        command = add(release, name, own.HELP)
        own.add_release_options(command)
        vetting = "--vetting" if "--vetting" in command.format_usage() else "[vetting] in the configuration"
        _sheet(command, f"; needs {vetting}")
        _form(command)
        _making(command)
    for name, dp in (("privimage", privimage), ("centroids", centroids)):
        command = add(release, name, dp.HELP)
        dp.add_release_options(command)
        command.set_defaults(sheet=None, blank=None)
        _form(command)
        _making(command)
    for name, text in distillation.HELP.items():
        command = add(release, name, text)
        distillation.add_release_options(command, name)
        _sheet(command)
        _form(command)
        _making(command)
    command = add(release, "model", federated.HELP)
    federated.add_release_options(command)
    command.add_argument("--reader", type=Path, help="encrypt to this recipient's public key")
    command.set_defaults(sheet=None, form="png")
    _making(command)
    command = add(release, "remodel", remodel.HELP)
    remodel.add_release_options(command)
    command.set_defaults(sheet=None)
    _making(command)
    for name, one in release.choices.items():
        one.set_defaults(mechanism=name)
    send = add(release, "send", "hand over a release that is kept here: approved, or not answered yet")
    send.add_argument("release", help=_RELEASE)
    _json(send)
    inspect = add(release, "inspect", "show what the approvers are asked to approve")
    inspect.add_argument("release", help=_RELEASE)
    inspect.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    withdraw = add(release, "withdraw", "withdraw a release that was not approved")
    withdraw.add_argument("release", help=_RELEASE)
    withdraw.add_argument("--yes", action="store_true", help="do not ask whether the number stands for the right one")


def _add_search(commands: Any) -> None:
    tune = add(commands, "tune", "try several k on the cohort and compare the results")
    tune.add_argument("--config", type=Path, required=True, help="as for `release`")
    tune.add_argument("--menu", type=menu, required=True, help="all k to try, for example 11,15,20")
    judge = add(commands, "evaluate", "evaluate a private release's set, or a pooled model on the site's own labels")
    prediction.add_evaluation(judge)
    for command in (tune, judge):
        _page(command)
        _detach(command)
        _project_json(command)
    guess = add(commands, "predict", prediction.HELP)
    prediction.add_options(guess)
    _detach(guess)
    _project_json(guess)


# -- plans of federated runs


def _add_runs(commands: Any) -> None:
    text = "plans of federated runs that persons at this site approve"
    group = commands.add_parser("run", help=text).add_subparsers(required=True, metavar="WHAT")
    _json(add(group, "list", "list the plans that were asked for, and how each stands"))
    for name, text in (
        ("show", "show everything that a run may do here, and the digest that a person signs"),
        ("approve", "as a person: approve the plan of a run with your own key"),
        ("refuse", "as a person: refuse the plan of a run; that is final"),
    ):
        command = add(group, name, text)
        command.add_argument("run", help="the run's name, as `run list` shows it")
        if name == "show":
            _json(command)
            continue
        if name == "refuse":
            command.add_argument("reason", help="one short word, such as purpose; it is in the ledger for good")
        command.add_argument("--person", required=True, help="who signs")
        command.add_argument("--key", type=Path, required=True, help="the person's private key")
        command.add_argument("--yes", action="store_true", help="sign without being asked")


# -- jobs


def _add_jobs(commands: Any) -> None:
    group = commands.add_parser("jobs", help="work that the running service does").add_subparsers(
        required=True, metavar="WHAT"
    )
    _json(add(group, "list", "list jobs: state, reason, step, time left"))
    for name, text in (
        ("show", "show one job: history, price, progress"),
        ("follow", "print what a job says until it ends, and end as it does"),
        ("fetch", "write the files that a job made into a folder"),
        ("cancel", "end a job"),
        ("retry", "go on with an interrupted job now, or begin a failed one anew"),
        ("priority", "let a job that waits go before or after others"),
    ):
        command = add(group, name, text)
        command.add_argument("number", type=count, help="as `jobs list` shows it")
        if name == "priority":
            command.add_argument("priority", choices=PRIORITIES)
        if name in ("show", "cancel", "retry", "priority"):
            _json(command)
        if name == "fetch":
            command.add_argument("--out", type=Path, required=True, help="a folder; no file in it is overwritten")
        if name == "cancel":
            command.add_argument("--spend", action="store_true", help="also where its price has been paid")


# -- networks, and what needs no site


def _add_training(commands: Any) -> None:
    train = commands.add_parser("train", help="train networks on public images").add_subparsers(
        required=True, metavar="NETWORK"
    )
    for name in (*NETWORKS, *distillation.NETWORKS):
        whose = _WHOSE.get(name, name if name in NETWORKS else f"{name} of `release distill`")
        command = add(train, name, f"train the {whose} on public images; run again to resume")
        command.set_defaults(network=name)
        _add_network(command, name)
    remodeller = add(train, "remodeller", remodel.REMODELLER_HELP)
    remodel.add_remodeller_options(remodeller)
    codebook = add(train, "codebook", centroids.CODEBOOK_HELP)
    centroids.add_codebook_options(codebook)
    for command in (remodeller, codebook):
        _seed_device(command)
        _detach(command)
    weights = commands.add_parser("weights", help="files of public weights").add_subparsers(
        required=True, metavar="WHAT"
    )
    convert = add(
        weights, "convert", "turn a published .pt file into one that a task can name, in a confined process"
    )
    convert.add_argument("file", type=Path, help="of tensors; code in it is never run")
    convert.add_argument("--out", type=Path, required=True, help="the file, safetensors")
    convert.add_argument("--prefix", default="", help="of the names that are wanted, such as model.; it is taken off")
    text = "keep batch norms as fixed scales and shifts, for a network with fixed_norms = 1"
    convert.add_argument("--statistics", action="store_true", help=text)
    convert.set_defaults(homeless=True)
    _json(convert)
    draw = add(commands, "draw", distillation.DRAW_HELP)
    distillation.add_draw_options(draw)
    _seed_device(draw, "the same seed gives the same images")


def _add_network(command: argparse.ArgumentParser, network: str) -> None:
    command.add_argument(
        "--pictures", type=Path, required=True, help="a folder of PNG or JPEG, without any patient of yours"
    )
    command.add_argument("--out", type=Path, required=True, help="folder for checkpoint, network and progress images")
    command.add_argument("--steps", type=count, help="number of steps (default: the preset's)")
    _seed_device(command)
    _detach(command)
    if network == "encoder":
        command.add_argument("--generator", required=True, help="a file of `train generator`, or stylegan2-ada:FILE")
        command.add_argument("--sha256", default="", help="SHA-256 of a published generator, as its authors give it")
        command.add_argument("--side", type=count, help="pixels; must be the generator's (default)")
        command.add_argument("--grey", action="store_true", help="for a generator of grey images; optional")
        return
    if network == "network":
        text = "a TOML file with the task's [network] and [input]; a task's file will do"
        command.add_argument("--task", type=Path, required=True, help=text)
        text = 'CSV: file,label; or "folders": a picture\'s folder is its label'
        command.add_argument("--labels", required=True, help=text)
        command.add_argument("--several", action="store_true", help="a label names several findings, joined by +")
        return
    command.add_argument("--side", type=count, default=64, help="pixels")
    command.add_argument("--grey", action="store_true", help="one channel instead of three")
    if network == "generator":
        command.add_argument("--preset", default="", help=f"{', '.join(SIZES)} (default: the first for --side)")
    elif network == "semantics":
        privimage.add_semantics_options(command)
    elif network == "recogniser":
        command.add_argument("--identities", type=Path, required=True, help="CSV: file,identity")
        text = "the rate that sets the threshold; a smaller one needs more people"
        command.add_argument("--false-match-rate", type=rate, default=0.01, help=text)
    elif network in distillation.NETWORKS:
        distillation.add_training_options(command, network)


def _add_noise_audit(commands: Any) -> None:
    audit = add(commands, "audit", "check that this machine draws the noise that is claimed")
    audit.add_argument(
        "--full", action="store_true", help="also break the training on purpose, and check that each fault is found"
    )
    audit.set_defaults(homeless=True)
    _device(audit)


def _add_tasks(commands: Any) -> None:
    tasks = commands.add_parser("task", help="task files of federated runs").add_subparsers(
        required=True, dest="what"
    )
    check = add(tasks, "check", "read a task file, build its network, and take one step on made input")
    check.add_argument("file", type=Path, metavar="FILE", help="TOML; see rounds.md")
    text = "a file of public weights that the task names by its SHA-256; may be repeated"
    check.add_argument("--weights", type=Path, action="append", default=[], metavar="FILE", help=text)
    check.set_defaults(homeless=True)
    _json(check)
    bundle_options.add_from_bundle(tasks)
    bundle_options.add_to_bundle(tasks)
    shown = add(tasks, "preview", "write a sheet of examples as the task's network sees them, for this site only")
    which = shown.add_mutually_exclusive_group(required=True)
    which.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a task file")
    which.add_argument("--run", default="", metavar="NAME", help="the task of this run's plan; see `run list`")
    _page(shown)
    shown.add_argument("--count", type=count, default=12, help="examples on the sheet, at most 48 (default: 12)")
    shown.add_argument("--seed", type=seed, default=0, help="another seed draws other examples (default: 0)")
    shown.add_argument("--project", help="project whose vault to use (default: main, or the plan's)")
    _json(shown)


# -- backup, and the ledger


def _add_backup(commands: Any) -> None:
    texts = {
        "backup": "copy ledger, vault and settings, consistently, also while in use",
        "restore": "restore a backup into a new directory, in a new epoch",
        "--last": "the last `ledger export` of this site: with it, the command lists what you must enter again",
        "upgrade": "back up, then convert ledger and vault to this version's format",
    }
    back = add_backup_commands(commands, texts)["restore"]
    lost = add(commands, "recover", "after a restore: spend what was granted since the backup")
    for command in (back, lost):
        how = command.add_mutually_exclusive_group(required=command is lost)
        text = "an export of the coordinator's ledger, made after this site stopped"
        how.add_argument("--shared", type=Path, help=text)
        text = "there is no export: spend all remaining budget"
        how.add_argument("--spend-everything", action="store_true", help=text)


def _add_ledger(commands: Any) -> None:
    ledger = commands.add_parser("ledger", help="the site's ledger").add_subparsers(required=True, metavar="WHAT")
    _json(add(ledger, "show", "print the ledger"))
    governance_options.add_commands(ledger, add)
    add(ledger, "amend", "put policy.toml in force: here, and at the coordinator")
    export = add(ledger, "export", "write the ledger for lazaret-verify")
    export.add_argument("out", type=Path)
    text = "print the fingerprint of the ledger's key, which auditors give to lazaret-verify --key"
    key = add(ledger, "fingerprint", text)
    key.add_argument("--coordinator", action="store_true", help="the coordinator's key, as received at enrolment")
