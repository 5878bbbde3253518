"""A site opened for work that reads patients: beside the running service, or alone.

Where ``serve`` holds the site's ledger, it keeps it: the process here reads patients and computes, and asks the
service over the control socket to reserve, to spend and to hand in (:class:`OwnerOverSocket`). It follows the ledger
by reading the file. Where nothing runs, the process opens the ledger itself, as every command does. One at a time (a
lock on the home directory): two makings would choose among the same patients.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from agent.errors import CoordinatorUnreachableError, ReviewRejectedError, SiteConfigError
from agent.event_log import open_log
from agent.release.ports import KEY_REUSED, CoordinatorClient
from agent.release.resumable import give_up_earlier
from agent.release.unsent import NotSentError
from agent.runtime import (
    AgentRuntime,
    OpenSite,
    open_runtime,
    recover_at_startup,
    require_current_coordinator,
    require_small_delta,
    site_context,
    with_log,
)
from agent.service.commands import read_verdict
from agent.service.ledger_access import BorrowedLedger
from agent.service.making_lock import making_lock
from agent.storage import projects, site_directory
from agent.storage.read_only_access import check_history
from agent.storage.site_ledger import policy_in_force
from policies.ledger.state import KeyReusedError
from policies.ledger.store import LedgerBusyError, Store
from policies.ledger_service import LedgerService
from policies.review.policy import Policy
from policies.review.rules import Verdict
from policies.statements import Reservation, encode
from protos.common.errors import InvariantError, UnreachableError
from protos.service.control_client import connect

_PATIENCE_S: Final = 10.0  # for a service that starts or ends, or another command that ends


class _FollowedLedger(LedgerService):
    """The ledger as the process that writes it leaves it: looked at anew each time. It appends nothing."""

    __slots__ = ("_ledger",)
    _ledger: BorrowedLedger

    def __init__(self, ledger: BorrowedLedger, policy_of: Callable[[str], Policy]) -> None:
        object.__setattr__(self, "_ledger", ledger)
        object.__setattr__(self, "policy_of", policy_of)

    @property
    def store(self) -> Store:
        return self._ledger.read()


class _NoGateway:
    """The service alone talks to the coordinator."""

    def __getattr__(self, name: str) -> Any:
        raise InvariantError(f"{name}: the running service does this")


class OwnerOverSocket:
    """The :class:`agent.release.ports.LedgerOwner` that a running service is."""

    def __init__(self, root: Path, project: str) -> None:
        """``root``: the home directory. ``project``: whose vault the making reads."""
        self._root, self._project = root, project

    def _ask(self, act: str, fields: dict[str, Any]) -> Any:
        """Over a connection of its own: hours lie between two acts, and the service may be started again meanwhile.

        Raises:
            CoordinatorUnreachableError: no service answers, it ended before it did, or what it needs does not answer
                it now: the coordinator, the ledger, the disk.
        """
        try:
            service = connect(self._root)
            if service is None:
                raise CoordinatorUnreachableError("the service that holds the ledger has ended: start it again")
            with service:
                return service.ask(act, fields)
        except UnreachableError as error:
            raise CoordinatorUnreachableError(str(error)) from None

    def found(self) -> None:
        """The ledger, where this is the first that needs it."""
        self._ask("/ledger/found", {})

    def begin(self) -> None:
        """Before a making: the coordinator answers, and nothing of an earlier making is in the way."""
        self._ask("/makings/begin", {"project": self._project})

    def reserve(self, reservation: Reservation) -> None:
        """The price, in the site's ledger and at the coordinator."""
        told = self._ask("/makings/reserve", {"statement": encode(reservation).decode()})
        if told["refused_by"] == KEY_REUSED:
            raise KeyReusedError("the grant was reserved otherwise")
        if told["refused_by"]:
            raise ReviewRejectedError(told["refused_by"], read_verdict(told["verdict"]))

    def expire(self, grant: str, reason: str) -> None:
        """Spend what will see no release."""
        self._ask("/makings/expire", {"grant": grant, "reason": reason})

    def submit(self, release: str) -> Verdict:
        """What is made and kept leaves."""
        try:
            told = self._ask("/releases/send", {"release": release})
        except CoordinatorUnreachableError as error:
            raise NotSentError(release, str(error)) from None
        verdict = read_verdict(told["verdict"])
        if not told["mechanism"]:
            raise ReviewRejectedError("site", verdict)
        return verdict


@contextlib.contextmanager
def open_making(
    root: Path,
    say: Callable[[str, str], None],
    project: str = site_directory.MAIN,
    *,
    grant: str = "",
    looks: bool = False,
) -> Iterator[OpenSite]:
    """Open the site for one making, search or evaluation.

    Args:
        root: the home directory.
        say: hears of each step and its detail.
        project: whose vault.
        grant: the name of the price that a release is to be reserved under, where a job's record chose it.
        looks: it only says what would be: another one may be at work.
    Raises:
        MakingBusyError: another one is at work.
        LedgerBusyError: another command writes the ledger, and does not end.
        SiteConfigError, VaultError: as :func:`agent.runtime.open_runtime`.
        ServiceRefusedError: the service runs under another user, or is of another version.
    """
    with contextlib.nullcontext() if looks else making_lock(root), contextlib.ExitStack() as stack:
        until = time.monotonic() + _PATIENCE_S
        while True:
            service = connect(root)
            if service is not None:
                with service:  # each act has a connection of its own
                    opened: OpenSite = stack.enter_context(_beside(root, say, project))
                break
            try:
                opened = stack.enter_context(open_runtime(root, say, project))
                break
            except LedgerBusyError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)
        yield replace(opened, site=replace(opened.site, grant=grant)) if grant else opened


@contextlib.contextmanager
def _beside(root: Path, say: Callable[[str, str], None], project: str) -> Iterator[OpenSite]:
    """The site beside the service that holds its ledger."""
    home = site_directory.SiteDirectory(root)
    settings, log, ledger = home.settings(), open_log(root / "agent.log"), BorrowedLedger(home)
    owner = OwnerOverSocket(root, project)
    if not (root / "ledger.db").exists():
        owner.found()
    with contextlib.closing(projects.open_vault(home, project)) as vault:
        try:
            check_history(vault, ledger.read())
        except SiteConfigError:  # the service may have written while the ledger was read
            check_history(vault, ledger.read())
        followed = _FollowedLedger(ledger, policy_in_force(home, ledger.read()))
        require_small_delta(vault, followed.policy_of(settings.site))
        no_gateway = cast("CoordinatorClient", _NoGateway())
        site = site_context(home, settings.site, followed, no_gateway, vault, with_log(say, log))
        yield OpenSite(home, settings, replace(site, owner=owner), vault, log)


def begin_making(opened: OpenSite, anew: bool) -> None:
    """Greet the coordinator, find out how the interrupted ended, and give up what was interrupted, if that is said.

    Raises:
        CoordinatorUnreachableError: see :func:`agent.runtime.require_current_coordinator`.
    """
    if isinstance(opened, AgentRuntime):
        recover_at_startup(opened)
        require_current_coordinator(opened)
    elif isinstance(opened.site.owner, OwnerOverSocket):
        opened.site.owner.begin()
    if anew:
        give_up_earlier(opened.site)
