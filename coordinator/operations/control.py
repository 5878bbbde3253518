"""People's decisions on the coordinator's ledger, done here or by the coordinator that is serving."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from coordinator.storage import directory as homes
from policies.governance import acts, decisions
from policies.ledger.store import LedgerBusyError, Store
from protos.service.control_client import API, ask_or_do

if TYPE_CHECKING:
    from fastapi import FastAPI


ABSENT: Final = "sites/absent"  # GET: a line for each enrolled site that is not here, or null


def waive(store: Store, site: str, serial: str) -> dict[str, Any]:
    """See :func:`policies.governance.decisions.waive`.

    Returns:
        ``waiting``: the sites that have not shown their receipts yet.
    """
    decisions.waive(store, site, serial)
    return {"waiting": sorted(store.state.sites_awaited)}


ACTS: Final[Mapping[str, acts.Act]] = MappingProxyType({**acts.ACTS, "ledger/waive": waive})


@contextmanager
def ledger_acts(arguments: argparse.Namespace) -> Iterator[acts.Acts]:
    """The acts, by the coordinator that serves from ``arguments.home``, or here where none serves."""
    home = homes.CoordinatorDirectory(arguments.home)

    def here(act: str, **fields: Any) -> Any:
        with homes.open_ledger(home) as store:
            return acts.carry_out(store, ACTS[act], fields)

    with ask_or_do(home.root, here, lambda error: isinstance(error, LedgerBusyError)) as do:
        yield do


def coordinator_app(store: Store, log: Any) -> FastAPI:
    """What answers at the control socket of a coordinator that serves; ``state.absent``: which sites are not here."""
    from protos.service.control_app import add_act, control_app  # noqa: PLC0415 - a web framework: commands need none

    app = control_app("coordinator", version("lazaret"), log)
    app.state.absent = lambda: None

    @app.get(f"/v{API}/{ABSENT}")
    def absent() -> dict[str, str | None]:
        return {"absent": app.state.absent()}

    for name, act in ACTS.items():
        add_act(app, name, act, lambda act, fields: acts.carry_out(store, act, fields))
    return app
