"""What an opt-out will do, before it is done: counts and sentences, of the site's own private records. Pure.

It says no more than :func:`agent.storage.projects.opt_out` does, and no less; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from agent.console.context import behind_of
from agent.storage.instance_index import InstanceRecord
from policies.ledger.state import State


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
        out=tuple(name for name in names if name in left and not persons.isdisjoint(behind[name])),
        retired=len(hit),
        beside=len({who for members in hit for who in members} - persons),
        unrecorded=sum(name not in behind for name in tuple(ledger.state.releases)),
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
