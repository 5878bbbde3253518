"""A patient's no: what follows is shown first, then it is done. Patient ids come in a form and go nowhere else."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from starlette.responses import Response

from agent.console import review_images
from agent.console.context import DECIDERS, SiteConsoleContext
from agent.console.errors import errors_as_pages
from agent.console.optout_preview import Consequences, PrivateRecords, Project, consequences, of_project, sentences
from agent.ingest.context import purge_pending
from agent.storage import projects
from agent.storage.site_directory import MAIN
from protos.web.router import PageError, RequestContext, Router

MOST: Final = 1000  # patients in one form
KEPT_S: Final = 900.0  # how long a look at the consequences may be decided on
_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class OptOutPreview:
    """An opt-out with its preview, shown to a user."""

    who: str  # the person who looked
    until: float  # monotonic seconds
    persons: frozenset[str] = field(repr=False)


def add(pages: Router, context: SiteConsoleContext) -> None:
    """The pages of the opt-out."""
    pages.menu("Opt-out", "/opt-out", DECIDERS)

    @pages.get("/opt-out", DECIDERS)
    def opt_out(asked: RequestContext) -> Response:
        with errors_as_pages():
            count = len(projects.opted_out(context.home))
        return asked.page("optout.html", count=count, most=MOST)

    @pages.post("/opt-out/look", DECIDERS)
    def look(asked: RequestContext) -> Response:
        with errors_as_pages():
            persons = pseudonyms_in(context, asked.form["patients"], asked.form.get("issuer", ""))
            found = preview(context, persons)
        token = store_preview(context, asked.person.name, persons)
        return asked.page(
            "optout_look.html",
            token=token,
            found=found,
            told=tuple(sentences(found)),
            minutes=int(KEPT_S / 60),
        )

    @pages.post("/opt-out/do", DECIDERS)
    def do(asked: RequestContext) -> Response:
        if asked.form.get("sure", "") != "yes":
            raise PageError(400, "Confirm that the data of these patients will be deleted. Nothing was done.")
        persons = take_preview(context, asked.person.name, asked.form["token"])
        with errors_as_pages():
            gone = apply(context, persons)
        return asked.go(
            "/opt-out",
            f"{len(persons)} patient(s) have opted out; {gone} of their instances and waiting files were deleted.",
        )

    @pages.post("/opt-out/undo", DECIDERS)
    def undo(asked: RequestContext) -> Response:
        with errors_as_pages():
            persons = pseudonyms_in(context, asked.form["patients"], asked.form.get("issuer", ""))
            for person in sorted(persons):
                projects.opt_in(context.home, person)
        context.log.info("opt_out_remove", count=len(persons))
        return asked.go(
            "/opt-out",
            f"{len(persons)} patient(s) may be kept again from now on. Deleted images do not come back.",
        )


def pseudonyms_in(context: SiteConsoleContext, text: str, issuer: str) -> frozenset[str]:
    """The pseudonyms of the patient ids in a text, one on each line.

    Raises:
        PageError: it names none, or too many.
    """
    lines = tuple(dict.fromkeys(line.strip() for line in text.split("\n") if line.strip()))
    if not lines:
        raise PageError(400, "Give one patient id on each line. Nothing was done.")
    if len(lines) > MOST or max(map(len, lines)) > 64:  # PS3.5 section 6.2: LO has 64 characters
        raise PageError(400, f"At most {MOST} patient ids of at most 64 characters at once. Nothing was done.")
    with context.way(MAIN) as way:
        return frozenset(way.who.person(issuer.strip(), line) for line in lines)


def preview(context: SiteConsoleContext, persons: frozenset[str]) -> Consequences:
    """What would follow, by the site's own records and vaults."""
    found: list[Project] = []
    here: set[str] = set()
    for name in context.projects():
        with context.vault(name) as vault:
            heads = list(vault.heads())
            found.append(of_project(name, heads, persons, vault.project_note("unfinished")))
            here |= {head.person for head in heads if head.person in persons}
    with context.vault() as vault:
        releases, pending, out = vault.note("releases") or [], vault.note("pending") or {}, vault.opted_out()
    ledger = PrivateRecords(releases, pending, out, context.ledger.read().state)
    return consequences(persons, ledger, tuple(found), here)


def store_preview(context: SiteConsoleContext, who: str, persons: frozenset[str]) -> str:
    """Store a preview under a random token."""
    token, now = secrets.token_urlsafe(24), time.monotonic()
    with context.memory.lock:
        live = {t: one for t, one in context.memory.looked.items() if one.until > now}
        context.memory.looked.clear()
        context.memory.looked.update(list(live.items())[-_LOOKS + 1 :])
        context.memory.looked[token] = OptOutPreview(who, now + KEPT_S, persons)
    return token


def take_preview(context: SiteConsoleContext, who: str, token: str) -> frozenset[str]:
    """What that person looked at under the token, once.

    Raises:
        PageError: nothing, or too long ago.
    """
    with context.memory.lock:
        one: OptOutPreview | None = context.memory.looked.get(token)
        if one is None or one.who != who or time.monotonic() > one.until:
            raise PageError(409, "The preview has expired: look at the consequences again. Nothing was done.")
        del context.memory.looked[token]
        return one.persons


def apply(context: SiteConsoleContext, persons: frozenset[str]) -> int:
    """As `opt-out add` does: the list first, then every vault and every room; how much was deleted."""
    review_images.forget(context)
    gone = sum(projects.opt_out(context.home, person) for person in sorted(persons))
    for name in context.projects():
        with context.way(name) as way:
            gone += purge_pending(way, persons)
    review_images.forget(context)
    context.log.info("opt_out_add", count=len(persons))
    return gone
