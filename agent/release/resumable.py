"""A release whose making was interrupted, and which goes on under the grant that it had.

A kill or a full disk in the middle spends nothing more: the grant stays held, and the same command with the same
configuration goes on. Nobody can make a set until it pleases: what promises k patients, or other faces, is made again
by the same dice, of the same patients; what has noise has no dice that could be kept (P10), so what was drawn of it
lies sealed in the vault before anything is made of it, and is not drawn again. Of a training that is killed between
two checkpoints the steps since are trained again, and nobody has seen what they made. One at a time:
with another configuration, or in another project, nothing is made before it is finished or given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from agent.grants import give_up, if_reachable
from agent.kept import forget, listed
from agent.site import Site
from policies.entries import Reserved
from policies.statement import release_id

_NOTE = "unfinished"
Dice = np.random.Generator


class Unfinished(ValueError):
    """Another making was interrupted; the text says how to finish it, or to give it up."""


def begin(
    site: Site, grant: str, form: str, persons: Iterable[str], places: Iterable[str] = (), dice: Dice | None = None
) -> None:
    """Write down what is being made, of whom, where and by which dice, before a step of it.

    At a restart its grant stays held.
    """
    sweep(site)
    told: dict[str, Any] = {"grant": grant, "form": form, "persons": sorted(persons), "places": sorted(places)}
    if dice is not None:
        told["dice"] = dice.bit_generator.state
    site.vault.write_project_note(_NOTE, told)
    site.vault.write_note(_NOTE, {"grant": grant})


def same_dice(site: Site, dice: Dice) -> Dice:
    """The dice of what was interrupted, as they lay when it was begun; ``dice`` where nothing goes on."""
    told: dict[str, Any] = site.vault.project_note(_NOTE) or {}
    if "dice" in told:
        dice = np.random.Generator(np.random.PCG64())
        dice.bit_generator.state = told["dice"]
    return dice


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
    grant = site.books.store.state.grants.get(name)
    lasts = grant is not None and grant.state == "held" and isinstance(grant.reserved, Reserved)
    over = bool(name) and (not lasts or _made(site, name))
    try:
        return would_go_on(site, form)
    finally:
        if over:
            end(site)


def would_go_on(site: Site, form: str) -> tuple[Reserved, frozenset[str]] | None:
    """The same, and nothing is written.

    Raises:
        Unfinished: as there.
    """
    name = held_for(site)
    if not name:
        return None
    grant = site.books.store.state.grants.get(name)
    if _made(site, name):
        made = release_id(site.name, name, 0)
        told = f"what was interrupted had been made in full: it is {made}"
        if made in listed(site.vault):
            raise Unfinished(f"{told}, and kept here: `release send {made}`, or say it again to make another")
        raise Unfinished(f"{told}. Say it again to make another")
    if grant is None or grant.state != "held" or not isinstance(grant.reserved, Reserved):
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
    forget(site, release_id(site.name, name, 0))  # what a kill left of it before it was listed
    with if_reachable():
        give_up(site, grant.reserved, "restart")


def _made(site: Site, grant: str) -> bool:
    """Whether a release was made under it, which is kept or has set out."""
    made = release_id(site.name, grant, 0)
    return made in listed(site.vault) or made in site.books.store.state.sent


def _clear(site: Site) -> None:
    """First what was trained, then what names it."""
    told = site.vault.project_note(_NOTE)
    for place in (told or {}).get("places", ()):
        site.vault.place(place).clear()
    if told is not None:
        site.vault.write_project_note(_NOTE, None)
