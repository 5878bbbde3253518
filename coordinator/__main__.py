"""``lazaret-coordinator``: enrols hospitals, serves their agents, conducts rounds, shows the ledger."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from coordinator import report_commands
from coordinator.edges import backup_commands, doctor, remote, simulation_commands
from coordinator.edges import home as homes
from coordinator.edges.ledger_evidence import set_aside
from coordinator.edges.witnesses import Witnesses
from coordinator.report import render, views
from coordinator.reports.document import NoReport
from policies import governance, undone
from policies.entries import Enrolled, InvalidEntry, Record
from policies.export import Unsound
from policies.forms import WrongForm
from policies.ledger import KeyReused
from policies.people import Tools, add_commands
from policies.policy import PolicyError, preset
from policies.sqlite import backup_file
from policies.statement import PAYLOAD_TYPE, MalformedStatement
from policies.store import LedgerBusy, LedgerStopped, LedgerUnsound, export, lines
from policies.view import as_json, rows
from protos import quiet
from protos.envelope import BadEnvelope, key_id, seal
from protos.identity import BadCertificate
from protos.keyfile import BadKeyFile, pem, signing_key, write_private
from protos.web import login_command
from protos.web.settings import BadConsole

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
EXPECTED = (
    homes.BadCoordinator,
    BadConsole,
    PolicyError,
    BadCertificate,
    BadKeyFile,
    BadEnvelope,
    MalformedStatement,
    NoReport,
    WrongForm,
    Unsound,
    InvalidEntry,
    KeyReused,
    LedgerBusy,
)


def _policy(name: str) -> str:
    path = Path(name)
    return path.read_text() if path.suffix == ".toml" else preset(name)


def _init(arguments: argparse.Namespace) -> int:
    settings = f"listen = {json.dumps(arguments.listen)}\n"
    for name in ("superlink", "address"):
        value = getattr(arguments, name)
        settings += f"{name} = {json.dumps(value)}\n" if value else ""
    settings += f"ledger = {json.dumps(arguments.ledger)}\n" if arguments.ledger else ""
    home = homes.create(arguments.home, settings, _policy(arguments.policy), dt.datetime.now(dt.UTC))
    with homes.open_ledger(home):
        pass
    OUT.print(f"made {home.root.name}: keys, an intermediate CA, an empty ledger")
    OUT.print("move offline/ to a medium that is locked away: it holds the root's key, which serving never needs")
    return 0


def _renew_ca(arguments: argparse.Namespace) -> int:
    """With the root's medium at hand: a new intermediate CA. Sites need not do anything."""
    home = homes.Home(arguments.home)
    homes.renew_intermediate(home, arguments.root, dt.datetime.now(dt.UTC))
    OUT.print(f"the intermediate CA is good until {home.ca_ends():%Y-%m-%d}; lock the root away again")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; exit 70 when the ledger cannot be written."""
    home = homes.Home(arguments.home)
    quiet.hush(home.root / "flower")
    from coordinator.console.app import beside  # noqa: PLC0415 - Flower reads its environment while it is imported
    from coordinator.edges.server import serve  # noqa: PLC0415 - as above

    return serve(home, lambda text: OUT.print(text, markup=False, soft_wrap=True), beside)


def _records(home: homes.Home) -> list[Record]:
    with contextlib.closing(homes.look_at_ledger(home)) as disk:
        return [line.record for line in lines(disk)]


def _ledger_show(arguments: argparse.Namespace) -> int:
    records = _records(homes.Home(arguments.home))
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(homes.ORIGIN, records), indent=2) + "\n")
        return 0
    table = Table("#", "time (UTC)", "entry", "who", "what", title=f"ledger of {homes.ORIGIN}")
    for row in rows(records):
        table.add_row(*row)
    OUT.print(table)
    return 0


def _ledger_export(arguments: argparse.Namespace) -> int:
    """Works while the coordinator serves: what is durable now, under a fresh checkpoint."""
    home = homes.Home(arguments.home)
    seen = Witnesses(home.witnesses).notes()
    with contextlib.closing(homes.look_at_ledger(home)) as disk:
        homes.write_durably(arguments.out, export(disk, homes.ORIGIN, home.ledger_key(), seen))
    OUT.print(f"wrote {arguments.out.name}; check it with: lazaret-verify {arguments.out.name} --key FINGERPRINT")
    return 0


def _ledger_fingerprint(arguments: argparse.Namespace) -> int:
    """Of this ledger's key, or of a site's, which signs its own ledger: each side can say it of the other one."""
    home = homes.Home(arguments.home)
    public = home.ledger_key().public_key().public_bytes_raw()
    if arguments.site:
        entries = (record.entry for record in _records(home))
        keys = [e.sign_key for e in entries if isinstance(e, Enrolled) and e.site == arguments.site]
        if not keys:
            raise homes.BadCoordinator(f"no site {arguments.site} was ever enrolled")
        public = keys[-1]
    sys.stdout.write(f"{key_id(public)}\n")
    return 0


def _ledger_restore(arguments: argparse.Namespace) -> int:
    """A new epoch: nothing is granted before every site has shown its receipts."""
    home = homes.Home(arguments.home)
    if not arguments.yes:
        ERR.print("this ledger will grant nothing before every site has presented its receipts: say --yes")
        return 1
    with homes.open_restored_ledger(home) as store:
        until = undone.last_entry(store)
        store.restore(secrets.token_hex(16))
        Witnesses(home.witnesses).forget(store.state.epoch)
        aside = set_aside(store, home.releases)
        waiting = ", ".join(sorted(store.state.waiting)) or "nobody"
        size = store.state.size - 1
        OUT.print(f"epoch {store.state.epoch}, from a backup of {size} entries; waiting for {waiting}")
    for line in (undone.warning(until), *backup_commands.hidden(aside)):
        OUT.print(line, markup=False, soft_wrap=True)
    return 0


def _ledger_backup(arguments: argparse.Namespace) -> int:
    """A copy as of one commit, also while the coordinator serves."""
    home = homes.Home(arguments.home)
    if home.settings().ledger:
        raise homes.BadCoordinator("the ledger is in PostgreSQL: back it up with the database")
    backup_file(home.ledger, arguments.out)
    OUT.print(f"wrote {arguments.out.name}; to bring it back, put it in ledger.db's place and run `ledger restore`")
    return 0


def _ledger_install(arguments: argparse.Namespace) -> int:
    homes.install_ledger(arguments.owner, arguments.writer)
    OUT.print(f"the ledger is installed; {arguments.writer} may append to it, and change nothing")
    return 0


def _ledger_waive(arguments: argparse.Namespace) -> int:
    with homes.open_ledger(homes.Home(arguments.home)) as store:
        governance.waive(store, arguments.site, arguments.serial)
        waiting = ", ".join(sorted(store.state.waiting)) or "nobody"
    OUT.print(f"{arguments.site} is waived and its budget spent; waiting for {waiting}")
    return 0


TOOLS = Tools(
    open_store=lambda arguments: homes.open_ledger(homes.Home(arguments.home)),
    origin=lambda _arguments: homes.ORIGIN,
    seal=lambda raw, key: seal(raw, PAYLOAD_TYPE, key),
    read_key=signing_key,
    write_key=lambda path, key: write_private(path, pem(key)),
    say=lambda text: OUT.print(text, markup=False, soft_wrap=True),
)


def _report(arguments: argparse.Namespace) -> int:
    home = homes.Home(arguments.home)
    records = _records(home)
    measured = json.loads(arguments.measured.read_text()) if arguments.measured else None
    page = render(as_json(homes.ORIGIN, records), views(home.releases), measured)
    homes.write_durably(arguments.out, page.encode())
    OUT.print(f"wrote {arguments.out.name}")
    return 0


def _pool(name: str) -> Callable[[argparse.Namespace], int]:
    """A command of :mod:`coordinator.edges.pool_commands`, which is imported only when one of them is typed."""

    def act(arguments: argparse.Namespace) -> int:
        from coordinator.edges import pool_commands  # noqa: PLC0415 - a second that the others need not wait

        return pool_commands.run(name, arguments)

    return act


def _add_pool(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    pool = commands.add_parser("pool", help="what was admitted, for training").add_subparsers(
        required=True, metavar="WHAT"
    )
    listing = add(pool, "list", _pool("list"), "what lies on the shelf, and what of it a pool can hold")
    export = add(pool, "export", _pool("export"), "WebDataset shards, a Croissant description and a datasheet")
    average = add(pool, "average", _pool("average"), "merge the models of finished runs")
    shape = add(pool, "architecture", _pool("architecture"), "show a model file's architecture, and approve it")
    for one in (export, average):
        one.add_argument("out", type=Path, help="a directory that does not exist yet")
    for one in (listing, export, average, shape):
        one.add_argument("--json", action="store_true")
    shape.add_argument("file", type=Path, help="a model (.safetensors), or an architecture that a site sent (.json)")
    shape.add_argument("--approve", default="", metavar="NAME", help="admit models of exactly this architecture")
    for name in ("site", "mechanism", "modality", "without"):
        export.add_argument(f"--{name}", action="append", default=[], help="may be repeated")
    export.add_argument("--level", choices=("A", "A*", "B", "C"), default="C", help="the weakest one that is let in")
    export.add_argument("--k", type=int, help="of k-anonymous releases, at least")
    export.add_argument("--epsilon", type=float, help="of differentially private releases, at most")
    export.add_argument("--mixed", action="append", default=[], choices=("modality", "shape"))
    export.add_argument("--seed", type=int, default=0, help="of the shuffle; public")
    export.add_argument("--license", default="", help="of the pool, for its description")
    average.add_argument("runs", nargs="+")
    average.add_argument("--weights", default="", help="one for each, such as 2,1; left out: equal")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lazaret-coordinator", description=__doc__)
    parser.add_argument("--home", type=Path, help="the coordinator's directory; `login make` needs none")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(group: Any, name: str, act: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = group.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        return command

    init = add(commands, "init", _init, "make the directory, keys, CA and an empty ledger")
    init.add_argument("--listen", default="127.0.0.1:7443", help="host:port for agents: the one port they need")
    init.add_argument("--address", default="", help="host:port at which sites reach it, where that is another one")
    init.add_argument("--superlink", default="", help="host:port of a second listener, for stock Flower supernodes")
    init.add_argument("--ledger", default="", help="PostgreSQL's address (see `ledger install`); else a file here")
    init.add_argument("--policy", default="controlled", help="a preset or a .toml file")
    add(commands, "serve", _serve, "serve agents and conduct runs; resumes what a crash left")
    renew = add(commands, "renew-ca", _renew_ca, "once a year, with the offline root: a new intermediate CA")
    renew.add_argument("root", type=Path, help="the folder of the medium that holds root.key and root.crt")
    simulation_commands.add_command(remote.add_commands(commands, add), add)
    _add_pool(commands, add)
    login_command.add_commands(commands, add, TOOLS.say)
    doctor.add_command(commands, add)
    backup_commands.add_commands(commands, add)
    ledger = commands.add_parser("ledger", help="the ledger").add_subparsers(required=True, metavar="WHAT")
    show = add(ledger, "show", _ledger_show, "print the ledger")
    show.add_argument("--json", action="store_true")
    add_commands(ledger, TOOLS)
    backup = add(ledger, "backup", _ledger_backup, "copy the ledger as of one commit, also while it is in use")
    backup.add_argument("out", type=Path)
    install = add(ledger, "install", _ledger_install, "make the ledger's tables in PostgreSQL; then init --ledger")
    install.add_argument("owner", help="the database's address, as the role that shall own the ledger")
    install.add_argument("--writer", required=True, help="an existing role, which the coordinator uses")
    restore = add(ledger, "restore", _ledger_restore, "after bringing back a backup: open a new epoch")
    restore.add_argument("--yes", action="store_true", help="entries after the backup are lost; sites show receipts")
    waive = add(ledger, "waive", _ledger_waive, "after a restore: go on without a site that will not come back")
    waive.add_argument("site")
    waive.add_argument("--serial", required=True, help="of the proposal that two persons approved")
    out = add(ledger, "export", _ledger_export, "write the ledger for lazaret-verify")
    out.add_argument("out", type=Path)
    text = "print the fingerprint of the ledger's key, which auditors give to lazaret-verify --key"
    key = add(ledger, "fingerprint", _ledger_fingerprint, text)
    key.add_argument("--site", default="", help="of this site's own ledger, by the key that it was enrolled with")
    report_commands.add_command(commands, add, _report)
    return parser


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
        ERR.print(f"refused: {error}", markup=False)
        return 1
    except grpc.RpcError as error:
        ERR.print(f"refused: {error.details()}", markup=False)
        return 1
    except (LedgerUnsound, LedgerStopped) as error:
        ERR.print(f"stopped: {error}", markup=False, soft_wrap=True)
        return 70
    except Exception as error:  # noqa: BLE001 - whatever it is: stop, and say no text that may hold data
        ERR.print(f"stopped: internal fault ({type(error).__name__})", markup=False)
        return 70


if __name__ == "__main__":
    sys.exit(main())
