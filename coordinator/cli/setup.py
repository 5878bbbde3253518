"""``init``, ``renew-ca`` and ``serve``: make the coordinator's directory, renew its CA, and serve from it."""

from __future__ import annotations

import argparse
import datetime as dt
import json
from pathlib import Path

from coordinator.cli.output import OUT, say
from coordinator.storage import directory as homes
from policies.review.policy import preset
from protos.federation import flower_environment


def init(arguments: argparse.Namespace) -> int:
    """Make the directory, keys, CA and an empty ledger."""
    settings = f"listen = {json.dumps(arguments.listen)}\n"
    settings += f"address = {json.dumps(arguments.address)}\n" if arguments.address else ""
    settings += f"ledger = {json.dumps(arguments.ledger)}\n" if arguments.ledger else ""
    path = Path(arguments.policy)
    policy = path.read_text() if path.suffix == ".toml" else preset(arguments.policy)
    home = homes.create(arguments.home, settings, policy, dt.datetime.now(dt.UTC))
    with homes.open_ledger(home):
        pass
    OUT.print(f"made the directory {home.root.name}: keys, an intermediate CA, an empty ledger")
    OUT.print("move offline/ to a medium that you lock away: it contains the root's key, which `serve` does not need")
    return 0


def renew_ca(arguments: argparse.Namespace) -> int:
    """With the root's medium at hand: a new intermediate CA. Sites need not do anything."""
    home = homes.CoordinatorDirectory(arguments.home)
    homes.renew_intermediate(home, arguments.root, dt.datetime.now(dt.UTC))
    OUT.print(f"the intermediate CA is valid until {home.ca_ends():%Y-%m-%d}; lock the root away again")
    return 0


def serve(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; exit 70 when the ledger cannot be written."""
    home = homes.CoordinatorDirectory(arguments.home)
    flower_environment.configure_environment(home.root / "flower")
    from coordinator.console.app import beside  # noqa: PLC0415 - Flower reads its environment while it is imported
    from coordinator.daemon import serve  # noqa: PLC0415 - as above

    return serve(home, say, beside)


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands."""
    acts = {"init": init, "renew-ca": renew_ca, "serve": serve}
    return acts[arguments.command](arguments)
