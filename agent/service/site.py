"""Short work on a site, as acts with named fields: done here, or by the service that runs on this machine.

One process writes a site's ledger. Where ``serve`` holds it, a command asks it over the control socket
(:mod:`protos.service`); where nothing runs, the command opens the ledger for as long as its act takes. Both run the
same functions of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from agent.errors import ReviewRejectedError
from agent.event_log import open_log
from agent.microaggregation.released_clusters import place_of
from agent.service.ledger_access import BorrowedLedger, SharedLedger, SiteLedger
from agent.storage import projects
from agent.storage.site_directory import MAIN, SiteDirectory
from agent.storage.site_ledger import initialise_ledger
from policies.governance import acts
from policies.ledger.store import LedgerBusyError
from policies.review.rules import Finding, Verdict
from protos.service.control_client import ask_or_do

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True, slots=True)
class Site:
    """What an act works with."""

    home: SiteDirectory
    ledger: SiteLedger
    log: Any


def send(site: Site, release: str) -> dict[str, Any]:
    """Hand over a release that is kept: approved, or not answered yet.

    Returns:
        ``mechanism`` ("" where the site itself refuses) and ``verdict``, see :func:`read_verdict`.
    Raises:
        CoordinatorUnreachableError: no verdict yet; it is kept.
    """
    from agent.release.approval import submit_approved  # noqa: PLC0415 - a service that only receives never needs it
    from agent.runtime import require_current_coordinator  # noqa: PLC0415 - as above

    with site.ledger.work(project_of(site.home, release)) as runtime:
        require_current_coordinator(runtime)
        try:
            signed, verdict = submit_approved(runtime.site, release)
            mechanism = signed.release.mechanism
        except ReviewRejectedError as refusal:
            mechanism, verdict = "", refusal.verdict
    site.log.info("verdict", release=release, rules=[f.rule for f in verdict.findings])
    return {"mechanism": mechanism, "verdict": _verdict(verdict)}


def withdraw(site: Site, release: str) -> dict[str, Any]:
    """Give up a release that persons did not approve; its grant is spent."""
    from agent.release import approval  # noqa: PLC0415 - as in :func:`send`

    with site.ledger.work(project_of(site.home, release)) as runtime:
        approval.withdraw(runtime.site, release)
    site.log.info("release_withdrawn", release=release)
    return {}


def amend(site: Site) -> dict[str, Any]:
    """Put ``policy.toml`` of the home directory in force: here, and at the coordinator.

    Returns:
        ``verdict``, see :func:`read_verdict`.
    """
    from agent import runtime as runtimes  # noqa: PLC0415 - as in :func:`send`

    with site.ledger.work() as runtime:
        return {"verdict": _verdict(runtimes.amend(runtime, runtime.home.policy_text()))}


ACTS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "releases/send": send,
        "releases/withdraw": withdraw,
        "ledger/amend": amend,
    }
)


@contextmanager
def site_acts(root: Path, say: Callable[[str, str], None]) -> Iterator[acts.Acts]:
    """The acts on a site: through the service that runs in its directory, or here where none runs.

    ``say``: hears of the steps of what is done here: also of what an interrupted command left.

    Raises:
        ServiceRefusedError: the service runs under another user, or is of another version.
    """
    home = SiteDirectory(root)

    def here(act: str, **fields: Any) -> Any:
        ledger = BorrowedLedger(home, say)
        if act in acts.ACTS:
            with ledger.write() as store:
                initialise_ledger(home, store)
                return acts.carry_out(store, acts.ACTS[act], fields)
        return ACTS[act](Site(home, ledger, open_log(root / "agent.log")), **fields)

    with ask_or_do(root, here, LedgerBusyError) as one:
        yield one


def site_app(home: SiteDirectory, ledger: SharedLedger, log: Any) -> FastAPI:
    """What answers at the control socket of a service that holds the ledger."""
    from protos.service.control_app import add_act, control_app  # noqa: PLC0415 - a web framework: commands need none

    app, site = control_app("agent", version("lazaret")), Site(home, ledger, log)
    for name, act in acts.ACTS.items():
        add_act(app, name, act, lambda act, fields: acts.carry_out(ledger.read(), act, fields))
    for name, act in ACTS.items():
        add_act(app, name, act, lambda act, fields: act(site, **fields))
    return app


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"level": verdict.level, "findings": [{"rule": f.rule, "detail": f.detail} for f in verdict.findings]}


def read_verdict(told: Mapping[str, Any]) -> Verdict:
    """A verdict as the acts tell it."""
    return Verdict(tuple(Finding(f["rule"], f["detail"]) for f in told["findings"]), told["level"])


def project_of(home: SiteDirectory, release: str) -> str:
    """The project whose vault holds the images of a release's clusters; main, where none does."""
    for name in projects.names(home):
        with closing(projects.open_vault(home, name)) as vault:
            if vault.project_note(place_of(release, 0)) is not None:
                return name
    return MAIN
