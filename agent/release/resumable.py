"""A release whose making was interrupted, and which goes on under the grant that it had.

A kill or a full disk spends nothing more: the grant stays held, and the same command with the same configuration
resumes. The grant's name is written down before it is asked for, so there is no moment at which a kill would leave a
price held for nobody. Nobody can repeat a release until they like the result. A release with k patients, or of
refaced heads, is made again from the same random seed, of the same patients. A release with noise has no seed that
could be stored (P10), so its draws are stored encrypted in the vault before they are used, and are not drawn again.
If training is killed between two checkpoints the later steps are trained again, and nobody has seen their first
results. One at a time: with another configuration, or in another project, no release starts before this one is
finished or abandoned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agent.errors import ReviewRejectedError
from agent.release.budget import best_effort, expire_grant, reservation_of, reserve
from agent.release.history import forget_releases
from agent.release.ports import SiteContext
from agent.release.unsent import forget, listed
from policies.ledger.entries import Reserved
from policies.ledger.state import KeyReusedError
from policies.statements import Reservation, release_id
from protos.common.errors import RefusedError

if TYPE_CHECKING:  # all mechanisms import torch, which not all releases need
    from agent.mechanisms.registry import Mechanism

_NOTE = "unfinished"
Dice = np.random.Generator


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A making that goes on."""

    grant: Reserved
    persons: frozenset[str] | None  # of whom it is; None: no image had been read


class ReleaseInProgressError(RefusedError, ValueError):
    """Another making was interrupted; the text says how to finish it, or to give it up."""


def hold(
    site: SiteContext, mechanism: Mechanism, modality: str, form: str, begun: Interrupted | None
) -> Reserved | Reservation:
    """The grant of a making: the one that it had; else one that is reserved now, under a name that is kept first.

    Raises:
        ReviewRejectedError, CoordinatorUnreachableError: see :func:`agent.release.budget.reserve`. Where nobody
        answers, the same command goes on under the same grant.
        ReleaseInProgressError: the interrupted reservation was another one.
    """
    if begun is not None and site.grant not in ("", begun.grant.grant):
        raise ReleaseInProgressError(
            f"the same release was begun under {begun.grant.grant} and interrupted: finish it, or begin --anew"
        )
    if begun is not None and begun.persons is not None:
        return begun.grant
    if begun is None and site.grant in site.ledger.store.state.grants:
        raise ReleaseInProgressError(f"{site.grant} has had its release, or was discarded: begin anew")
    reservation = reservation_of(site, mechanism, modality, grant=begun.grant.grant if begun else site.grant)
    if begun is None:
        discard_orphans(site)
        site.vault.write_note(_NOTE, {"grant": reservation.grant})
        site.vault.write_project_note(_NOTE, {"grant": reservation.grant, "form": form})
    try:
        reserve(site, reservation)
    except ReviewRejectedError:
        end(site)
        raise
    except KeyReusedError:
        raise ReleaseInProgressError(
            f"{reservation.grant} was reserved for other components: discard it with --anew; its budget stays spent"
        ) from None
    return reservation


def begin(
    site: SiteContext,
    grant: str,
    form: str,
    persons: Iterable[str],
    places: Iterable[str] = (),
    dice: Dice | None = None,
) -> None:
    """Record the release in progress, its patients, its workspace and its random seed, before any step.

    At a restart its grant stays held.
    """
    discard_orphans(site)
    told: dict[str, Any] = {"grant": grant, "form": form, "persons": sorted(persons), "places": sorted(places)}
    if dice is not None:
        told["dice"] = dice.bit_generator.state
    site.vault.write_project_note(_NOTE, told)
    site.vault.write_note(_NOTE, {"grant": grant})


def same_dice(site: SiteContext, dice: Dice) -> Dice:
    """The dice of what was interrupted, as they lay when it was begun; ``dice`` where nothing goes on."""
    told: dict[str, Any] = site.vault.project_note(_NOTE) or {}
    if "dice" in told:
        dice = np.random.Generator(np.random.PCG64())
        dice.bit_generator.state = told["dice"]
    return dice


def place_of(name: str, grant: str) -> str:
    """Where one grant's training keeps something: no other grant finds it."""
    return f"{name}/{grant}"


def held_for(site: SiteContext) -> str:
    """The grant of what was interrupted; "" when nothing was."""
    return str((site.vault.note(_NOTE) or {}).get("grant", ""))


def find_resumable(site: SiteContext, form: str) -> Interrupted | None:
    """The making of this form that was interrupted; None: begin anew.

    Raises:
        ReleaseInProgressError: what was interrupted was of another configuration or project; or it was made in full,
        and waits or has left: to begin anew is to spend anew, and must be said again.
    """
    name = held_for(site)
    grant = site.ledger.store.state.grants.get(name)
    lasts = grant is not None and grant.state == "held" and isinstance(grant.reserved, Reserved)
    over = bool(name) and (not lasts or _made(site, name))
    try:
        begun = would_go_on(site, form)
    finally:
        if over:
            end(site)
    if begun is not None:  # what it had remembered of a set that was not kept
        forget_releases(site, {release_id(site.name, name, 0)})
    return begun


def would_go_on(site: SiteContext, form: str) -> Interrupted | None:
    """The same, and nothing is written.

    Raises:
        ReleaseInProgressError: as there.
    """
    name = held_for(site)
    if not name:
        return None
    grant = site.ledger.store.state.grants.get(name)
    if _made(site, name):
        made = release_id(site.name, name, 0)
        told = f"what was interrupted had been made in full: it is {made}"
        if made in listed(site.vault):
            raise ReleaseInProgressError(
                f"{told}, and kept here: `release send {made}`, or run the command again to make another"
            )
        raise ReleaseInProgressError(f"{told}. Run the command again to make another")
    if grant is None or grant.state != "held" or not isinstance(grant.reserved, Reserved):
        return None
    told = site.vault.project_note(_NOTE)
    if told is None or (told["grant"], told["form"]) != (name, form):
        raise ReleaseInProgressError(
            f"a training under {name} was interrupted, of another configuration, project or version: "
            "finish it with these, or discard it with --anew; its budget stays spent"
        )
    return Interrupted(grant.reserved, frozenset(told["persons"]) if "persons" in told else None)


def end(site: SiteContext, places: Iterable[str] = ()) -> None:
    """Done, one way or the other: nothing of the making stays, and its grant is not kept any longer.

    ``places`` are cleared whatever the note says: an opt-out may have emptied them, and the note, meanwhile.
    """
    _clear(site)
    for place in places:
        site.vault.place(place).clear()
    site.vault.write_note(_NOTE, None)


def discard_orphans(site: SiteContext) -> None:
    """What a making left in this project is nobody's once its grant is no longer the one that goes on."""
    told = site.vault.project_note(_NOTE)
    if told is not None and told["grant"] != held_for(site):
        _clear(site)


def give_up_earlier(site: SiteContext) -> None:
    """:func:`abandon` what was interrupted, unless it is what goes on now under the name that a job chose."""
    if not site.grant or held_for(site) != site.grant:
        abandon(site)


def abandon(site: SiteContext) -> None:
    """Give up what was interrupted, whatever it was: its grant is spent, unless its release waits or has left.

    Raises:
        LedgerForkError: people have to look.
    """
    name = held_for(site)
    grant = site.ledger.store.state.grants.get(name)
    end(site)
    if grant is None or grant.state != "held" or not isinstance(grant.reserved, Reserved) or _made(site, name):
        return
    left = release_id(site.name, name, 0)  # what a kill left of it before it was listed
    forget(site.vault, left)
    forget_releases(site, {left})
    with best_effort():
        expire_grant(site, grant.reserved, "restart")


def _made(site: SiteContext, grant: str) -> bool:
    """Whether a release was made under it, which is kept or has set out."""
    made = release_id(site.name, grant, 0)
    return made in listed(site.vault) or made in site.ledger.store.state.sent


def _clear(site: SiteContext) -> None:
    """First what was trained, then what names it."""
    told = site.vault.project_note(_NOTE)
    for place in (told or {}).get("places", ()):
        site.vault.place(place).clear()
    if told is not None:
        site.vault.write_project_note(_NOTE, None)
