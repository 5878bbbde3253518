"""The words of ``lazaret-coordinator``. It imports argparse alone, so that ``--help`` waits for nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from policies.governance import options as governance_options
from protos.operations.command_line import add, add_backup_commands, add_login_commands, add_setup_options

_LINES = "one JSON object per line"


_HOME: Final = (
    "the coordinator's directory. These commands need none: login make, ledger person, ledger ask, ledger sign"
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. ``command`` in what it returns is the command as typed: "round launch"."""
    parser = argparse.ArgumentParser(
        prog="lazaret-coordinator",
        description="Enrols hospitals, serves their agents, conducts rounds, and shows the ledger.",
    )
    parser.add_argument("--home", type=Path, help=_HOME)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_setup(commands)
    _add_members(commands)
    _add_rounds(commands)
    _add_pool(commands)
    add_login_commands(commands)
    _json(add(commands, "doctor", "check configuration, keys, certificates, ledger, port and machine"))
    _json(add(commands, "status", "show what is missing until sites can join and rounds can run, and what to type"))
    _add_backup(commands)
    _add_ledger(commands)
    report = add(commands, "report", "write a report: the overview, or one by its name")
    report.add_argument("what", nargs="+", metavar="[NAME] OUT", help="`list` shows the names")
    report.add_argument("--release", default="", metavar="NAME", help="the release or run of the report")
    report.add_argument("--measured", type=Path, help="JSON with accuracy, ingest counts and times to add")
    return parser


def _json(command: argparse.ArgumentParser, text: str | None = None) -> None:
    command.add_argument("--json", action="store_true", help=text)


def _add_setup(commands: Any) -> None:
    text = "set the coordinator up, step by step: directory, console, persons, an invitation; again: what is missing"
    whole = add(commands, "setup", text)
    _directory(whole, listen="", policy="")
    add_setup_options(whole)
    whole.add_argument("--invite", default="", metavar="SITE", help="invite this hospital, unless it was invited")
    text = "file for the invitation; it contains no secret (default: SITE.invitation)"
    whole.add_argument("--out", type=Path, help=text)
    whole.add_argument("--token-file", type=Path, help="write the token here instead of showing it")
    _json(whole)
    init = add(commands, "init", "one step of `setup`: make the directory, keys, CA and an empty ledger")
    _directory(init, listen="127.0.0.1:7443", policy="controlled")
    add(commands, "serve", "serve agents and run federated rounds; resumes after a crash")
    renew = add(commands, "renew-ca", "make a new intermediate CA with the offline root, once a year")
    renew.add_argument("root", type=Path, help="the folder with root.key and root.crt on the offline medium")


def _directory(command: argparse.ArgumentParser, *, listen: str, policy: str) -> None:
    """What the coordinator's directory is made of."""
    command.add_argument("--listen", default=listen, help="host:port for agents; they need no other port")
    command.add_argument("--address", default="", help="host:port at which sites reach it, if different")
    command.add_argument(
        "--ledger", default="", help="PostgreSQL's address, see `ledger install` (default: a file here)"
    )
    command.add_argument("--policy", default=policy, help="a preset or a .toml file")


def _add_members(commands: Any) -> None:
    invite = add(commands, "invite", "invite a hospital: makes a file, and a token to give by phone")
    invite.add_argument("site", help="short lower-case name")
    invite.add_argument("--out", type=Path, required=True, help="file for the invitation; it contains no secret")
    invite.add_argument("--token-file", type=Path, help="write the token here instead of showing it")
    _json(add(commands, "enrolments", "list invitations, and requests waiting for approval"))
    approve = add(commands, "approve", "enrol a site that two people have approved")
    approve.add_argument("site", help="its name, or the number that `status` shows")
    approve.add_argument("approvals", type=Path, nargs="*", help="files that `ledger sign enrol` wrote")
    approve.add_argument("--serial", default="", help="the proposal ID that they signed (default: found out)")
    revoke = add(commands, "revoke", "end a certificate, or a site's part in the federation, now")
    revoke.add_argument("site")
    revoke.add_argument("--certificate", default="", help="its serial number (default: the whole site)")
    revoke.add_argument("--reason", required=True, help="one short word for the ledger: lost, stolen, left ...")
    revoke.add_argument("--yes", action="store_true")


def _add_rounds(commands: Any) -> None:
    rounds = commands.add_parser("round", help="federated runs").add_subparsers(required=True, metavar="WHAT")
    plan = add(rounds, "plan", "show what a run would cost each site; reserves nothing")
    check = add(rounds, "check", "ask all its sites at once whether they could take part; no price, no patient")
    launch = add(rounds, "launch", "start a run, or follow it if it exists")
    for one in (plan, check, launch):
        one.add_argument("job", type=Path, help="JSON: mechanism, parameters, sites, rounds, min_sites, config ...")
        _json(one, _LINES)
    launch.add_argument("--run", required=True, help="the run's name")
    check.add_argument("--canary", action="store_true", help="one round on made patients over the whole way, too")
    check.add_argument("--run", default="", help="of a run that was launched and waits for approval")
    for name, text in (
        ("watch", "follow a run"),
        ("resume", "resume a stopped run"),
        ("stop", "stop a run after the round in progress; `resume` continues it"),
    ):
        one = add(rounds, name, text)
        one.add_argument("run")
        _json(one, _LINES)
    text = "write what became of a run, for those who did not watch it: report.html and report.json"
    report = add(rounds, "report", text)
    report.add_argument("run")
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder; made if it is not there")
    _add_simulate(add(rounds, "simulate", "show what a run would come to, on public data and on this machine"))


def _add_simulate(tried: Any) -> None:
    tried.add_argument("job", type=Path, help="as for `round launch`")
    text = "public images with labels.csv and SOURCE.txt (deploy/docs/rounds.md)"
    tried.add_argument("--data", type=Path, required=True, metavar="FOLDER", help=text)
    tried.add_argument("--out", type=Path, default=Path("simulation"), help="results; goes on with what is there")
    tried.add_argument("--patients", default="", metavar="N[,N]", help="of each site (default: public_patients)")
    text = "prices to compare, such as 1,3,8 (default: the job's own)"
    tried.add_argument("--epsilons", default="", metavar="E[,E]", help=text)
    tried.add_argument("--seeds", type=int, default=3, help="how often, with other patients and noise (default: 3)")
    tried.add_argument("--alone", type=int, default=3, metavar="N", help="sites that train alone, too (default: 3)")
    tried.add_argument("--sites", type=int, default=0, help="so many virtual sites in the place of the job's")
    tried.add_argument("--rounds", type=int, default=0, help="fewer rounds than the job has, with the same noise")
    tried.add_argument(
        "--poisoned", type=int, default=0, help="number of sites that send minus ten times their update"
    )
    tried.add_argument("--away", type=int, default=0, help="number of sites that do not answer")
    text = "a file of public weights that the task names by its SHA-256; may be repeated"
    tried.add_argument("--weights", type=Path, action="append", default=[], metavar="FILE", help=text)
    tried.add_argument("--cpus", type=int, default=2, help="processes that train (default: 2)")
    _json(tried, f"{_LINES}, the last one the whole")


def _add_pool(commands: Any) -> None:
    pool = commands.add_parser("pool", help="use admitted releases for training").add_subparsers(
        required=True, metavar="WHAT"
    )
    listing = add(pool, "list", "list the stored releases, and which of them a pool can use")
    export = add(pool, "export", "write WebDataset shards, a Croissant description and a datasheet")
    average = add(pool, "average", "merge the models of finished runs")
    shape = add(pool, "architecture", "show a model file's architecture and approve it")
    for one in (export, average):
        one.add_argument("out", type=Path, help="a directory that does not exist yet")
    for one in (listing, export, average, shape):
        _json(one)
    shape.add_argument(
        "file", type=Path, nargs="?", help="a model (.safetensors), or an architecture that a site sent (.json)"
    )
    shape.add_argument("--task", type=Path, help="instead of a file: a task file, whose models a site may release")
    shape.add_argument("--parameters", type=int, help="with --task: as `lazaret-agent task check` prints them")
    shape.add_argument("--bins", type=int, default=0, help="with --task: of a look at the model (default: no look)")
    shape.add_argument("--approve", default="", metavar="NAME", help="admit models of exactly this architecture")
    export.add_argument("--model", default="", help="instead of images: this run's or release's model, with its card")
    for name in ("site", "mechanism", "modality", "without"):
        export.add_argument(f"--{name}", action="append", default=[], help="may be repeated")
    export.add_argument(
        "--level", choices=("A", "A*", "B", "C"), default="C", help="the weakest claim level to include"
    )
    export.add_argument("--k", type=int, help="minimum k of k-anonymous releases")
    export.add_argument("--epsilon", type=float, help="maximum epsilon of differentially private releases")
    export.add_argument("--mixed", action="append", default=[], choices=("modality", "shape"))
    export.add_argument("--seed", type=int, default=0, help="public seed of the shuffle")
    export.add_argument("--license", default="", help="version of the pool, for its description")
    average.add_argument("runs", nargs="+")
    average.add_argument("--weights", default="", help="one weight for each, such as 2,1 (default: equal)")


def _add_backup(commands: Any) -> None:
    texts = {
        "backup": "copy the ledger and all files beside it, consistently, also while in use",
        "restore": "restore a backup into a new directory, in a new epoch",
        "--last": "the last `ledger export`: with it, the command lists what you must enter again",
        "upgrade": "back up, then convert the ledger to this version's format",
    }
    up = add_backup_commands(commands, texts)["upgrade"]
    up.add_argument("--owner", default="", help="in PostgreSQL: the address as the role that owns the ledger")


def _add_ledger(commands: Any) -> None:
    ledger = commands.add_parser("ledger", help="the ledger").add_subparsers(required=True, metavar="WHAT")
    _json(add(ledger, "show", "print the ledger"))
    governance_options.add_commands(ledger, add)
    backup = add(ledger, "backup", "copy the ledger consistently, also while it is in use")
    backup.add_argument("out", type=Path)
    install = add(ledger, "install", "make the ledger's tables in PostgreSQL; then init --ledger")
    install.add_argument("owner", help="the database's address, as the role that will own the ledger")
    install.add_argument("--writer", required=True, help="an existing role, which the coordinator uses")
    restore = add(ledger, "restore", "open a new epoch after you have restored a backup")
    restore.add_argument("--yes", action="store_true", help="entries after the backup are lost; sites show receipts")
    waive = add(ledger, "waive", "after a restore, go on without a site that will not come back")
    waive.add_argument("site")
    waive.add_argument("--serial", required=True, help="ID of the proposal that two persons approved")
    out = add(ledger, "export", "write the ledger for lazaret-verify")
    out.add_argument("out", type=Path)
    text = "print the fingerprint of the ledger's key, which auditors give to lazaret-verify --key"
    key = add(ledger, "fingerprint", text)
    key.add_argument("--site", default="", help="of this site's own ledger, from the key at its enrolment")
