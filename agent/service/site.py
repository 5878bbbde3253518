"""Short work on a site, as acts with named fields; the running service and a command alone do the same.

See :mod:`agent.service.commands` for which of the two does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from agent.errors import CoordinatorUnreachableError, LedgerForkError, ReviewRejectedError
from agent.event_log import open_log
from agent.microaggregation.released_clusters import place_of
from agent.release.ports import KEY_REUSED
from agent.service import job_acts
from agent.service.job_outputs import keep_released
from agent.service.ledger_access import BorrowedLedger, Site, SiteLedger
from agent.storage import projects
from agent.storage.site_directory import MAIN, SiteDirectory
from agent.storage.site_ledger import initialise_ledger
from policies.governance import acts
from policies.ledger.entries import Reserved
from policies.ledger.state import KeyReusedError
from policies.review.rules import Verdict
from policies.statements import Reservation, parse
from protos.common.errors import LazaretError, RefusedError
from protos.identity.key_files import replace_private

if TYPE_CHECKING:
    from fastapi import FastAPI


class NotOurReservationError(RefusedError):
    """What was asked of the ledger's owner is not of a release that is being made here."""


def send(site: Site, release: str) -> dict[str, Any]:
    """Hand over a release that is kept: approved, or not answered yet.

    Returns:
        ``mechanism`` ("" where the site itself refuses) and ``verdict``, as
        :func:`agent.service.commands.read_verdict` reads it.
    Raises:
        CoordinatorUnreachableError: no verdict yet; it is kept.
    """
    from agent.release.approval import submit_approved  # noqa: PLC0415 - a service that only receives never needs it
    from agent.runtime import require_current_coordinator  # noqa: PLC0415 - as above

    with site.ledger.work(project_of(site.home, release)) as runtime:
        require_current_coordinator(runtime)
        opted_out = runtime.vault.opted_out()
        try:
            signed, verdict = submit_approved(runtime.site, release)
            mechanism = signed.release.mechanism
            if verdict.admitted:
                with suppress(LazaretError):  # a full disk or an ended project changes no verdict
                    keep_released(site.home, release, signed.clear or signed.artifact, opted_out)
        except ReviewRejectedError as refusal:
            mechanism, verdict = "", refusal.verdict
    site.log.info("verdict", release=release, rules=[f.rule for f in verdict.findings])
    return {"mechanism": mechanism, "verdict": _verdict(verdict)}


def withdraw(site: Site, release: str, refused: bool = False) -> dict[str, Any]:
    """Give up a release that persons did not approve; its grant is spent.

    Args:
        site: where.
        release: its name.
        refused: a person's refusal is in the ledger, so it ends here even while the coordinator is away.
    Returns:
        ``informed``: the coordinator has spent the grant, too.
    Raises:
        CoordinatorUnreachableError: it does not answer; without ``refused``, nothing was done.
    """
    from agent.release import approval  # noqa: PLC0415 - as in :func:`send`

    with site.ledger.work(project_of(site.home, release), greeted=not refused) as runtime:
        try:
            approval.withdraw(runtime.site, release)
        except CoordinatorUnreachableError as silence:
            if not refused or isinstance(silence, LedgerForkError):
                raise
            site.log.warning("release_withdrawn", release=release, state="coordinator not informed")
            return {"informed": False}
    site.log.info("release_withdrawn", release=release)
    return {"informed": True}


def amend(site: Site, policy: str = "") -> dict[str, Any]:
    """Put a policy in force: here, and at the coordinator.

    Args:
        site: where.
        policy: its text, which replaces ``policy.toml`` when the coordinator admits it; "": that file's text.
    Returns:
        ``verdict``, see :func:`agent.service.commands.read_verdict`.
    """
    from agent import runtime as runtimes  # noqa: PLC0415 - as in :func:`send`

    with site.ledger.work() as runtime:
        verdict = runtimes.amend(runtime, policy or runtime.home.policy_text())
        if policy and verdict.admitted:  # until then the stricter of both binds
            replace_private(site.home.root / "policy.toml", policy.encode())
    return {"verdict": _verdict(verdict)}


def found(site: Site) -> dict[str, Any]:
    """Begin the site's ledger, if there is none: it comes into being with the first that needs it."""
    with site.ledger.write() as store:
        initialise_ledger(site.home, store)
    return {}


def begin_making(site: Site, project: str) -> dict[str, Any]:
    """Before a release is made by another process: the coordinator answers, and what was left unfinished is gone."""
    from agent.release.recovery import tidy  # noqa: PLC0415 - as in :func:`send`
    from agent.runtime import require_current_coordinator  # noqa: PLC0415 - as in :func:`send`

    with site.ledger.work(project) as runtime:
        require_current_coordinator(runtime)
        tidy(runtime.site)
    return {}


def reserve(site: Site, statement: str) -> dict[str, Any]:
    """Hold the price of a release that another process makes. It has noted the grant's name before (P10).

    Returns:
        ``refused_by`` ("" where it is held, "site", "coordinator" or ``KEY_REUSED``), and ``verdict`` as
        :func:`send` has it.
    """
    from agent.release import budget  # noqa: PLC0415 - as in :func:`send`
    from agent.release.resumable import held_for  # noqa: PLC0415 - as in :func:`send`

    asked = parse(statement.encode())
    with site.ledger.work() as runtime:
        if not isinstance(asked, Reservation) or asked.run or asked.site != runtime.site.name:
            raise NotOurReservationError("this is no reservation of a release of this site")
        if asked.grant != held_for(runtime.site):
            raise NotOurReservationError("the grant's name must be noted in the vault before it is reserved")
        try:
            budget.reserve(runtime.site, asked)
        except ReviewRejectedError as refusal:
            return {"refused_by": refusal.where, "verdict": _verdict(refusal.verdict)}
        except KeyReusedError:
            return {"refused_by": KEY_REUSED, "verdict": _verdict(Verdict(()))}
    return {"refused_by": "", "verdict": _verdict(Verdict(()))}


def expire(site: Site, grant: str, reason: str) -> dict[str, Any]:
    """Spend the grant of a release that another process failed to make, or gave up."""
    from agent.release.budget import best_effort, expire_grant  # noqa: PLC0415 - as in :func:`send`

    with site.ledger.work(greeted=False) as runtime:
        known = runtime.site.ledger.store.state.grants.get(grant)
        if known is not None and known.state == "held" and isinstance(known.reserved, Reserved):
            if known.reserved.run:
                raise NotOurReservationError("this grant is of a part in a run")
            with best_effort():
                expire_grant(runtime.site, known.reserved, reason)
    return {}


def shown(site: Site) -> dict[str, Any]:
    """What the service runs.

    Returns:
        ``processes`` and ``received``, as :class:`agent.service.process_monitoring.ServiceStatus` has them.
    """
    return site.told()


ACTS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "service/show": shown,
        "releases/send": send,
        "releases/withdraw": withdraw,
        "ledger/amend": amend,
        "ledger/found": found,
        "makings/begin": begin_making,
        "makings/reserve": reserve,
        "makings/expire": expire,
        **job_acts.ACTS,
    }
)
_LOOKS: Final = frozenset({"service/show", "jobs/list", "jobs/show"})  # which change nothing


def carry_out(root: Path, say: Callable[[str, str], None], act: str, fields: Mapping[str, Any]) -> Any:
    """One act, in a process that opens the site's ledger for it.

    Raises:
        LedgerBusyError: another process has the ledger.
    """
    home = SiteDirectory(root)
    return perform(Site(home, BorrowedLedger(home, say), open_log(root / "agent.log")), act, fields)


def perform(site: Site, act: str, fields: Mapping[str, Any]) -> Any:
    """One act, in this process.

    Raises:
        LedgerBusyError: another process has the ledger.
    """
    if act in acts.ACTS:
        return decide(site, acts.ACTS[act], fields)
    return ACTS[act](site, **fields)


def decide(site: Site, act: acts.Act, fields: Mapping[str, Any]) -> dict[str, Any]:
    """An act of people on the ledger."""
    with site.ledger.write() as store:
        initialise_ledger(site.home, store)
        return acts.carry_out(store, act, fields)


def site_app(
    home: SiteDirectory, ledger: SiteLedger, log: Any, told: Callable[[], dict[str, Any]] | None = None
) -> FastAPI:
    """What answers at the control socket of a service, which holds the ledger or opens it for each act.

    Args:
        home: the site's directory.
        ledger: the site's.
        log: hears of each act that changes something.
        told: of :func:`agent.service.process_monitoring.tell_status`.
    """
    from protos.service.control_app import add_act, control_app  # noqa: PLC0415 - a web framework: commands need none

    app, site = control_app("agent", version("lazaret"), log), Site(home, ledger, log, runs_jobs=True)
    site = site if told is None else replace(site, told=told)
    for name, act in acts.ACTS.items():
        add_act(app, name, act, lambda act, fields: decide(site, act, fields))
    for name, act in ACTS.items():
        add_act(app, name, act, lambda act, fields: act(site, **fields), looks=name in _LOOKS)
    return app


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"level": verdict.level, "findings": [{"rule": f.rule, "detail": f.detail} for f in verdict.findings]}


def project_of(home: SiteDirectory, release: str) -> str:
    """The project whose vault holds the images of a release's clusters; main, where none does."""
    for name in projects.names(home):
        with closing(projects.open_vault(home, name)) as vault:
            if vault.project_note(place_of(release, 0)) is not None:
                return name
    return MAIN
