"""A patient's no: what follows is shown first, then it is done. Patient ids come in a form and go nowhere else."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from starlette.responses import Response

from agent.console import exhibits
from agent.console.consequences import Books, Consequences, Project, consequences, of_project, sentences
from agent.console.desk import DECIDERS, Desk
from agent.console.said import said
from agent.edges import projects
from agent.edges.home import MAIN
from agent.edges.way import forget
from protos.web.pages import Asked, Pages, Refusal

MOST: Final = 1000  # patients in one form
KEPT_S: Final = 900.0  # how long a look at the consequences may be decided on
_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class Looked:
    """An opt-out whose consequences somebody looks at."""

    who: str  # the person who looked
    until: float  # monotonic seconds
    persons: frozenset[str] = field(repr=False)


def add(pages: Pages, desk: Desk) -> None:
    """The pages of the opt-out."""
    pages.menu("Opt-out", "/opt-out", DECIDERS)

    @pages.get("/opt-out", DECIDERS)
    def opt_out(asked: Asked) -> Response:
        with said():
            count = len(projects.opted_out(desk.home))
        return asked.page("optout.html", count=count, most=MOST)

    @pages.post("/opt-out/look", DECIDERS)
    def look(asked: Asked) -> Response:
        with said():
            persons = named(desk, asked.form["patients"], asked.form.get("issuer", ""))
            found = foresee(desk, persons)
        token = keep(desk, asked.person.name, persons)
        return asked.page(
            "optout_look.html",
            token=token,
            found=found,
            told=tuple(sentences(found)),
            minutes=int(KEPT_S / 60),
        )

    @pages.post("/opt-out/do", DECIDERS)
    def do(asked: Asked) -> Response:
        if asked.form.get("sure", "") != "yes":
            raise Refusal(400, "Confirm that what is here of the patients is to be deleted. Nothing was done.")
        persons = taken(desk, asked.person.name, asked.form["token"])
        with said():
            gone = carry_out(desk, persons)
        return asked.go(
            "/opt-out",
            f"{len(persons)} patient(s) have opted out; {gone} of their instances and waiting files were deleted.",
        )

    @pages.post("/opt-out/undo", DECIDERS)
    def undo(asked: Asked) -> Response:
        with said():
            persons = named(desk, asked.form["patients"], asked.form.get("issuer", ""))
            for person in sorted(persons):
                projects.opt_in(desk.home, person)
        desk.log.info("opt_out_remove", count=len(persons))
        return asked.go(
            "/opt-out",
            f"{len(persons)} patient(s) may be kept again from now on. Nothing that was deleted comes back.",
        )


def named(desk: Desk, text: str, issuer: str) -> frozenset[str]:
    """The pseudonyms of the patient ids in a text, one on each line.

    Raises:
        Refusal: it names none, or too many.
    """
    lines = tuple(dict.fromkeys(line.strip() for line in text.split("\n") if line.strip()))
    if not lines:
        raise Refusal(400, "Give one patient id on each line. Nothing was done.")
    if len(lines) > MOST or max(map(len, lines)) > 64:  # PS3.5 section 6.2: LO has 64 characters
        raise Refusal(400, f"At most {MOST} patient ids of at most 64 characters at once. Nothing was done.")
    with desk.way(MAIN) as way:
        return frozenset(way.who.person(issuer.strip(), line) for line in lines)


def foresee(desk: Desk, persons: frozenset[str]) -> Consequences:
    """What would follow, by the site's own books and vaults."""
    found: list[Project] = []
    here: set[str] = set()
    for name in desk.projects():
        with desk.vault(name) as vault:
            heads = list(vault.heads())
            found.append(of_project(name, heads, persons, vault.project_note("unfinished")))
            here |= {head.person for head in heads if head.person in persons}
    with desk.vault() as vault:
        releases, pending, out = vault.note("releases") or [], vault.note("pending") or {}, vault.opted_out()
    books = Books(releases, pending, out, desk.books.read().state)
    return consequences(persons, books, tuple(found), here)


def keep(desk: Desk, who: str, persons: frozenset[str]) -> str:
    """Remember what somebody looks at, under a token that says nothing."""
    token, now = secrets.token_urlsafe(24), time.monotonic()
    with desk.memory.lock:
        live = {t: one for t, one in desk.memory.looked.items() if one.until > now}
        desk.memory.looked.clear()
        desk.memory.looked.update(list(live.items())[-_LOOKS + 1 :])
        desk.memory.looked[token] = Looked(who, now + KEPT_S, persons)
    return token


def taken(desk: Desk, who: str, token: str) -> frozenset[str]:
    """What that person looked at under the token, once.

    Raises:
        Refusal: nothing, or too long ago.
    """
    with desk.memory.lock:
        one: Looked | None = desk.memory.looked.get(token)
        if one is None or one.who != who or time.monotonic() > one.until:
            raise Refusal(409, "Look at the consequences again: it is too long ago. Nothing was done.")
        del desk.memory.looked[token]
        return one.persons


def carry_out(desk: Desk, persons: frozenset[str]) -> int:
    """As `opt-out add` does: the list first, then every vault and every room; how much was deleted."""
    exhibits.forget(desk)
    gone = sum(projects.opt_out(desk.home, person) for person in sorted(persons))
    for name in desk.projects():
        with desk.way(name) as way:
            gone += forget(way, persons)
    exhibits.forget(desk)
    desk.log.info("opt_out_add", count=len(persons))
    return gone
