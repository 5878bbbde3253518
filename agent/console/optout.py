"""A patient's no: what follows is shown first, then it is done. Patient ids come in a form and go nowhere else.

What an opt-out will do, before it is done: counts and sentences, of the site's own private records. Pure.

It says no more than :func:`agent.storage.projects.opt_out` does, and no less; a test compares the two.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.responses import Response

from agent.console import review_images
from agent.console.context import DECIDERS, SiteConsoleContext, behind_of
from agent.console.errors import errors_as_pages
from agent.ingest.context import purge_pending
from agent.release.release_record import MEMBERS
from agent.storage import projects
from agent.storage.instance_index import InstanceRecord
from agent.storage.site_directory import MAIN
from policies.ledger.state import State
from protos.web.router import PageError, RequestContext, Router


@dataclass(frozen=True, slots=True)
class Project:
    """What one project holds of the patients."""

    name: str
    instances: int
    studies: int
    patients: int  # of those who were named
    training: bool  # a training that is not finished was made with one of them


@dataclass(frozen=True, slots=True)
class Consequences:
    """What follows from the opt-out of some patients."""

    named: int  # patients
    known: int  # of them, those of whom anything is here or was released
    already: int  # of them, those who had opted out before
    projects: tuple[Project, ...]
    dying: tuple[str, ...]  # releases that wait, and can never leave then
    out: tuple[str, ...]  # releases that have left, and hold them
    retired: int  # released clusters whose images are forgotten, and never shown again
    beside: int  # other patients in these clusters, who are in no later release either
    unrecorded: int  # releases with an epsilon, of which nobody keeps who is in them

    @property
    def instances(self) -> int:
        """In all projects."""
        return sum(project.instances for project in self.projects)


def of_project(
    name: str, heads: Iterable[InstanceRecord], persons: Set[str], unfinished: Mapping[str, Any] | None
) -> Project:
    """What a project holds of them."""
    found = [(head.person, head.study) for head in heads if head.person in persons]
    training = bool(unfinished) and not persons.isdisjoint((unfinished or {}).get("persons", ()))
    return Project(name, len(found), len({study for _, study in found}), len({who for who, _ in found}), training)


@dataclass(frozen=True, slots=True)
class PrivateRecords:
    """The site's private records, as an opt-out changes them."""

    releases: list[Any]  # the note: who is behind which
    pending: Mapping[str, Any]  # the note: what waits for persons
    opted_out: frozenset[str]
    state: State  # of the site's ledger
    # the note: who is behind which run, or release with an epsilon
    members: Mapping[str, Any] = field(default_factory=dict)


def consequences(
    persons: frozenset[str], ledger: PrivateRecords, projects: tuple[Project, ...], here: Set[str]
) -> Consequences:
    """What follows.

    Args:
        persons: the pseudonyms.
        ledger: the site's.
        projects: what each project holds, of :func:`of_project`.
        here: those of the persons of whom a project holds anything.
    """
    left = {*ledger.state.sent, *ledger.state.releases}
    names = [one["release"] for one in ledger.releases]
    behind = {name: behind_of(name, ledger.releases) for name in names}
    waiting = {
        name: behind_of(name, ledger.releases) | set(kept.get("persons", ())) for name, kept in ledger.pending.items()
    }
    clusters = [frozenset(members) for one in ledger.releases for members in one["clusters"]]
    hit = [members for members in clusters if not persons.isdisjoint(members)]
    in_books = {who for members in behind.values() for who in members} | {w for m in waiting.values() for w in m}
    return Consequences(
        named=len(persons),
        known=len(persons & (here | in_books)),
        already=len(persons & ledger.opted_out),
        projects=projects,
        dying=tuple(sorted(name for name, who in waiting.items() if not persons.isdisjoint(who))),
        out=tuple(
            [name for name in names if name in left and not persons.isdisjoint(behind[name])]
            + [name for name, own in ledger.members.items() if not persons.isdisjoint(own)]
        ),
        retired=len(hit),
        beside=len({who for members in hit for who in members} - persons),
        unrecorded=sum(
            name not in behind and name not in ledger.members and one.run not in ledger.members
            for name, one in dict(ledger.state.releases).items()
        ),
    )


def sentences(c: Consequences) -> Iterator[tuple[str, str]]:
    """The effects of an opt-out: ("done" | "stays" | "note", sentence)."""
    if c.already:
        yield "note", f"{_of(c.already, 'patient')} had opted out before: for them this changes nothing."
    if c.known < c.named:
        yield (
            "note",
            f"Nothing is here of {c.named - c.known} of the {c.named}. They are put on the list nevertheless: if "
            "images of them come later, none is kept.",
        )
    places = len([p for p in c.projects if p.instances])
    yield (
        "done",
        f"{_of(c.instances, 'instance')} in {_of(places, 'project')} {_are(c.instances)} deleted and overwritten in "
        "the vault, and what waits or was refused is looked through and deleted, too. The PACS and backups are not "
        "touched.",
    )
    for project in c.projects:
        if project.training:
            yield (
                "done",
                f"An unfinished training of the project {project.name} used one of them: it is "
                "discarded, and its grant is spent.",
            )
    if c.dying:
        yield (
            "done",
            f"Of the releases that are kept here, {len(c.dying)} can never be sent. Refuse each below, or withdraw "
            "it with the command `release withdraw`. Otherwise it is deleted when the agent next makes, sends or "
            "withdraws a release. Its grant is spent then, because images were read.",
        )
    if c.retired:
        yield (
            "done",
            f"They are in {_of(c.retired, 'group')} of patients that released images were made of. This site deletes "
            f"its copies of these images, and no later release shows them. {_of(c.beside, 'other patient')} in the "
            "same groups will be in no later release either: a patient is in one group only, ever.",
        )
    if c.out:
        yield (
            "stays",
            f"{_of(len(c.out), 'release')} that hold{'s' if len(c.out) == 1 else ''} them {_have(len(c.out))} left. "
            "What has left cannot be called back; the recipients may be asked to delete it.",
        )
    if c.unrecorded:
        yield (
            "stays",
            f"{_of(c.unrecorded, 'admitted release')} cannot be searched: who is in it is recorded nowhere. Such a "
            "release has an epsilon, which limits what it can tell of each patient. That limit stays in force.",
        )
    yield "stays", "Budget that was spent stays spent, and what is held stays held until its release has an end."
    yield "stays", "The ledger and the coordinator hear nothing of the patients: neither holds a name or a pseudonym."


def _of(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


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
        members = vault.note(MEMBERS) or {}
    ledger = PrivateRecords(releases, pending, out, context.ledger.read().state, members)
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
