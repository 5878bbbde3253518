"""Grants: budget held for one release, and each of its ends. Whatever is unknown is spent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agent.nouns import Forked, Unreachable
from agent.release_record import RECORD, older_vault
from agent.site import Refused, Site
from policies.claims import Claim
from policies.entries import Reserved
from policies.review import Finding, Verdict
from policies.review import price as price_of
from policies.statement import Reservation, Settlement

if TYPE_CHECKING:
    from agent.mechanisms import Mechanism


@contextlib.contextmanager
def if_reachable() -> Iterator[None]:
    """What follows can do without the coordinator's answer; but a ledger that forked is no mere silence.

    Raises:
        Forked: people have to look.
    """
    try:
        yield
    except Forked:
        raise
    except Unreachable:
        pass


def reservation_of(site: Site, mechanism: Mechanism, modality: str, run: str = "") -> Reservation:
    """What a site asks for, under a new name."""
    grant = site.new_id("grant")
    return Reservation(grant, site.name, run, mechanism.name, mechanism.claim(), mechanism.components(), modality)


def hold(site: Site, mechanism: Mechanism, modality: str, run: str = "") -> tuple[Reservation, bytes]:
    """Reserve the mechanism's claim in the site's own ledger. No image has been read.

    Returns:
        What was granted here, and the sealed reservation for the coordinator.
    Raises:
        Refused: by the site; the coordinator is told, and holds nothing.
        Forked: it could not be told.
    """
    reservation = reservation_of(site, mechanism, modality, run)
    envelope = site.seal(reservation)
    if run and site.books.policy_of(site.name).approvals:
        raise Refused("site", Verdict((Finding("approval", "the policy has persons approve; rounds do not wait"),)))
    site.say("price", f"{mechanism.name}: reserve in the site's ledger, then at the coordinator")
    verdict = site.books.reserve(f"reserve-{reservation.grant}", reservation, envelope)
    if not verdict.admitted:
        declined = settlement(reservation, "declined", verdict.findings[0].rule)
        with if_reachable():  # the refusal stands, whether or not the coordinator hears of it
            site.door.settle(f"settle-{reservation.grant}", site.seal(declined))
        raise Refused("site", verdict)
    return reservation, envelope


def price(site: Site, mechanism: Mechanism, modality: str) -> Reservation:
    """Reserve the mechanism's claim, in the site's ledger and then at the coordinator. No image has been read.

    Nothing is asked for where the vault does not know every release without an epsilon, and this is one more.

    A site's part in a run is reserved by the coordinator, for all sites at once (:mod:`agent.participant`).

    Returns:
        What was granted.
    Raises:
        Refused: by either ledger, and the other one holds nothing; or the vault is older than the site's ledger.
        Unreachable: the site's grant stays held, and is spent at the next start.
    """
    older = tuple(older_vault(site.vault.note(RECORD), site.books.store.state, mechanism.name))
    if older:
        raise Refused("site", Verdict(older))
    reservation, envelope = hold(site, mechanism, modality)
    verdict = site.door.reserve(f"reserve-{reservation.grant}", envelope)
    if not verdict.admitted:
        let_go(site, reservation)
        raise Refused("coordinator", verdict)
    return reservation


def let_go(site: Site, reservation: Reservation | Reserved) -> None:
    """The coordinator refused the price: what the site's ledger holds is free again, since nothing was read."""
    site.books.free(reservation.grant, "refused", site.seal(settlement(reservation, "declined", "coordinator")))


def unused(site: Site, reservation: Reservation | Reserved) -> None:
    """Leave a run that was granted and in which nothing was begun: what is held here is free again.

    Only the process that reserved it knows that nothing was read. The coordinator hears the same word, and spends.
    """
    word = site.seal(settlement(reservation, "declined", "unused"))
    site.books.free(reservation.grant, "unused", word)
    with if_reachable():  # there it stays held until the run's end, which is as good as spent
        site.door.settle(f"settle-{reservation.grant}", word)


def give_up(site: Site, reservation: Reservation | Reserved, reason: str) -> None:
    """Close a grant that will see no release: it is spent, and the coordinator is told so.

    Raises:
        Unreachable: the site's own ledger is closed all the same; the coordinator's grant stays held.
    """
    site.books.close(reservation.grant, "expired")
    site.door.settle(f"settle-{reservation.grant}", site.seal(settlement(reservation, "expired", reason)))


def finish(site: Site, name: str, made: Claim | None) -> None:
    """Close a grant under which no more will be made: what was made is spent, and the rest given back here.

    Made, not what left: a round that failed has read images, and its failure was an answer. The coordinator spends
    the whole grant; the stricter of both books binds.
    """
    grant = site.books.store.state.grants[name]
    reserved = grant.reserved
    if grant.state != "held" or not isinstance(reserved, Reserved):
        return
    used = price_of(made, site.books.store.state.accounts[reserved.account]) if made else reserved.amount
    if not grant.sent <= used < reserved.amount:
        site.books.close(name, "finished")
    else:
        word = settlement(reserved, "finished", "finished", used)
        site.books.finish(word, site.seal(word))
    with if_reachable():  # there it stays held, which is as good as spent
        site.door.settle(f"settle-{name}", site.seal(settlement(reserved, "expired", "finished")))


def settlement(reservation: Reservation | Reserved, outcome: str, reason: str, used: int = 0) -> Settlement:
    """The word on a grant that will see no release."""
    r = reservation
    return Settlement(r.grant, r.site, r.run, r.mechanism, outcome, reason, used)
