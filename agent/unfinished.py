"""A release whose making was interrupted, and which goes on under the grant that it had.

Training under differential privacy takes hours. A kill in the middle spends nothing more and loses little: the grant
stays held, what was drawn lies sealed in the vault, and the same command with the same configuration goes on. One at
a time; with another configuration, or in another project, nothing is made before it is finished or given up.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.grants import give_up, if_reachable
from agent.site import Site
from policies.entries import Reserved
from policies.statement import release_id

_NOTE = "unfinished"


class Unfinished(ValueError):
    """Another making was interrupted; the text says how to finish it, or to give it up."""


def begin(site: Site, grant: str, form: str, persons: Iterable[str], places: Iterable[str]) -> None:
    """Write down what is being made, of whom and where, before a step of it: at a restart its grant stays held."""
    sweep(site)
    told = {"grant": grant, "form": form, "persons": sorted(persons), "places": sorted(places)}
    site.vault.write_project_note(_NOTE, told)
    site.vault.write_note(_NOTE, {"grant": grant})


def place_of(name: str, grant: str) -> str:
    """Where one grant's training keeps something: no other grant finds it."""
    return f"{name}/{grant}"


def held_for(site: Site) -> str:
    """The grant of what was interrupted; "" when nothing was."""
    return str((site.vault.note(_NOTE) or {}).get("grant", ""))


def going_on(site: Site, form: str) -> tuple[Reserved, frozenset[str]] | None:
    """The grant under which a making of this form was interrupted, and of whom it was; None: begin anew.

    Raises:
        Unfinished: what was interrupted was of another configuration or project; or it was made in full, and waits or
            has left: to begin anew is to spend anew, and must be said again.
    """
    name = held_for(site)
    if not name:
        return None
    grant = site.books.store.state.grants.get(name)
    if _made(site, name):
        end(site)
        made = release_id(site.name, name, 0)
        raise Unfinished(f"what was interrupted had been made in full: it is {made}. Say it again to make another")
    if grant is None or grant.state != "held" or not isinstance(grant.reserved, Reserved):
        end(site)
        return None
    told = site.vault.project_note(_NOTE)
    if told is None or (told["grant"], told["form"]) != (name, form):
        raise Unfinished(
            f"a training under {name} was interrupted, of another configuration, project or version: "
            "finish it as it was begun, or give it up with --anew, and its budget stays spent"
        )
    return grant.reserved, frozenset(told["persons"])


def end(site: Site, places: Iterable[str] = ()) -> None:
    """Done, one way or the other: nothing of the making stays, and its grant is not kept any longer.

    ``places`` are cleared whatever the note says: an opt-out may have emptied them, and the note, meanwhile.
    """
    _clear(site)
    for place in places:
        site.vault.place(place).clear()
    site.vault.write_note(_NOTE, None)


def sweep(site: Site) -> None:
    """What a making left in this project is nobody's once its grant is no longer the one that goes on."""
    told = site.vault.project_note(_NOTE)
    if told is not None and told["grant"] != held_for(site):
        _clear(site)


def abandon(site: Site) -> None:
    """Give up what was interrupted, whatever it was: its grant is spent, unless its release waits or has left.

    Raises:
        Forked: people have to look.
    """
    name = held_for(site)
    grant = site.books.store.state.grants.get(name)
    end(site)
    if grant is None or grant.state != "held" or not isinstance(grant.reserved, Reserved) or _made(site, name):
        return
    with if_reachable():
        give_up(site, grant.reserved, "restart")


def _made(site: Site, grant: str) -> bool:
    """Whether a release was made under it, which waits for persons or has set out."""
    made = release_id(site.name, grant, 0)
    return made in (site.vault.note("pending") or {}) or made in site.books.store.state.sent


def _clear(site: Site) -> None:
    """First what was trained, then what names it."""
    told = site.vault.project_note(_NOTE)
    for place in (told or {}).get("places", ()):
        site.vault.place(place).clear()
    if told is not None:
        site.vault.write_project_note(_NOTE, None)
