"""Hospitals come and go: an invitation with its token, told once; a revocation, which counts at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from starlette.responses import Response

from coordinator.console.context import OPERATOR, CoordinatorConsoleContext
from policies.statements import ID
from protos.web.router import PageError, RequestContext, Router

_Made = TypeVar("_Made")
WHY: Final = ("lost", "stolen", "left", "key")
_KEPT: Final = 16  # invitations that can still be downloaded; they hold no secret, and end after half an hour


class InvitationStore:
    """The invitations of this process, for the download next to the page that showed the token."""

    def __init__(self) -> None:
        """None yet."""
        self._lock, self._kept = threading.Lock(), dict[str, bytes]()

    def keep(self, site: str, body: bytes) -> None:
        """The newest of a site; the oldest of all goes first."""
        with self._lock:
            self._kept.pop(site, None)
            self._kept[site] = body
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]

    def of(self, site: str) -> bytes | None:
        """A site's."""
        with self._lock:
            return self._kept.get(site)


def add(pages: Router, context: CoordinatorConsoleContext) -> None:
    """The pages; they are reached from "People and keys"."""
    _invite(pages, context, InvitationStore())
    _revoke(pages, context)


def _invite(pages: Router, context: CoordinatorConsoleContext, bodies: InvitationStore) -> None:
    """A hospital may come."""

    @pages.post("/hospitals/invite", {OPERATOR})
    def invite(asked: RequestContext) -> Response:
        site = asked.form["site"].strip()
        made = refusing(lambda: context.authority.invite(site))
        bodies.keep(site, made.body)
        context.log.info("invited", site=site)
        return asked.page("invited.html", site=site, token=made.token, fingerprint=made.fingerprint)

    @pages.get("/hospitals/{site}/invitation", {OPERATOR})
    def invitation(asked: RequestContext, site: str) -> Response:
        body = bodies.of(site)
        if body is None:
            raise PageError(404, "There is no invitation of that hospital to download: invite it again.")
        return asked.download(f"{site}-invitation.json", body, "application/json")


def _revoke(pages: Router, context: CoordinatorConsoleContext) -> None:
    """A hospital, or one of its certificates, ends."""

    @pages.get("/hospitals/{site}/revoke", {OPERATOR})
    def ask(asked: RequestContext, site: str, certificate: str = "") -> Response:
        state = context.store.state
        if site not in state.sites or site in state.revoked_sites:
            raise PageError(404, "No hospital of that name is enrolled.")
        if certificate and certificate not in state.issued:
            raise PageError(404, "No certificate of that number was issued.")
        with context.store.exclusive() as ledger:
            grants = [g for g in ledger.grants.values() if g.reserved.site == site and g.state == "held"]
            runs = sorted({g.reserved.run for g in grants if g.reserved.run})
        return asked.page(
            "revoke.html", site=site, certificate=certificate, reasons=WHY, grants=len(grants), runs=runs
        )

    @pages.post("/hospitals/{site}/revoke", {OPERATOR})
    def revoke(asked: RequestContext, site: str) -> Response:
        number, why = asked.form["certificate"].strip(), asked.form["why"]
        if why not in WHY or not ID.fullmatch(site):
            raise PageError(400, "Choose one of the reasons of the list.")
        if not number and asked.form["again"].strip() != site:
            raise PageError(400, "Type the hospital's name to end its part in the federation. Nothing was done.")
        refusing(lambda: context.authority.revoke(site, number, why))
        context.close_calls(site)  # every new one is refused by itself: the ledger is asked each time
        context.log.warning("revoked", site=site, rule=why)
        what = f"Certificate {number[:12]}… of {site}" if number else site
        return asked.go("/people", f"{what} is revoked. This takes effect now, and is recorded in the ledger.")


def refusing(act: Callable[[], _Made]) -> _Made:
    """What the ledger or the registration authority says against it reaches the person in words."""
    try:
        return act()
    except ValueError as refusal:  # KeyReusedError too
        raise PageError(409, f"It was refused, and nothing was done: {refusal}.") from None
