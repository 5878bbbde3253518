"""Grants: budget held for one release, and each of its ends. Whatever is unknown is spent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from agent.errors import CoordinatorUnreachableError, LedgerForkError, ReviewRejectedError
from agent.release.ports import SiteContext
from agent.release.release_record import RECORD, older_vault
from policies.accounting.claims import Claim
from policies.ledger.entries import Reserved
from policies.review.rules import Finding, Verdict
from policies.review.rules import price as price_of
from policies.statements import Reservation, Settlement

if TYPE_CHECKING:
    from agent.mechanisms.registry import Mechanism


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """What follows can do without the coordinator's answer; but a ledger that forked is no mere silence.

    Raises:
        LedgerForkError: people have to look.
    """
    try:
        yield
    except LedgerForkError:
        raise
    except CoordinatorUnreachableError:
        pass


def reservation_of(
    site: SiteContext, mechanism: Mechanism, modality: str, run: str = "", grant: str = ""
) -> Reservation:
    """What a site asks for; under a new name, unless ``grant`` is one."""
    grant = grant or site.new_id("grant")
    return Reservation(grant, site.name, run, mechanism.name, mechanism.claim(), mechanism.components(), modality)


def reserve_locally(site: SiteContext, reservation: Reservation) -> bytes:
    """Reserve a claim in the site's own ledger. No image has been read.

    Returns:
        The sealed reservation for the coordinator.
    Raises:
        ReviewRejectedError: by the site; the coordinator is told, and holds nothing.
        LedgerForkError: it could not be told.
    """
    envelope = site.seal(reservation)
    if reservation.run and site.ledger.policy_of(site.name).approvals:
        raise ReviewRejectedError(
            "site", Verdict((Finding("approval", "the policy has persons approve; rounds do not wait"),))
        )
    verdict = site.ledger.reserve(f"reserve-{reservation.grant}", reservation, envelope)
    if not verdict.admitted:
        declined = settlement(reservation, "declined", verdict.findings[0].rule)
        with best_effort():  # the refusal stands, whether or not the coordinator hears of it
            site.gateway.settle(f"settle-{reservation.grant}", site.seal(declined))
        raise ReviewRejectedError("site", verdict)
    return envelope


def reserve(site: SiteContext, reservation: Reservation) -> None:
    """Reserve a claim, in the site's ledger and then at the coordinator. No image has been read.

    This is a wall: two ledgers pay, and neither believes the other.

    Nothing is asked for where the vault does not know every release without an epsilon, and this is one more.

    A site's part in a run is reserved by the coordinator, for all sites at once
    (:mod:`agent.federation.participant`). Asked again, the same is granted.

    Raises:
        ReviewRejectedError: by either ledger, and the other one holds nothing; or the vault is older than the site's
        ledger. CoordinatorUnreachableError: the site's grant stays held.
    """
    site.say("price", f"{reservation.mechanism}: reserve in the site's ledger, then at the coordinator")
    if site.owner is not None:
        site.owner.reserve(reservation)
        return
    older = tuple(older_vault(site.vault.note(RECORD), site.ledger.store.state, reservation.mechanism))
    if older:
        raise ReviewRejectedError("site", Verdict(older))
    envelope = reserve_locally(site, reservation)
    verdict = site.gateway.reserve(f"reserve-{reservation.grant}", envelope)
    if not verdict.admitted:
        release_grant(site, reservation)
        raise ReviewRejectedError("coordinator", verdict)


def release_grant(site: SiteContext, reservation: Reservation | Reserved) -> None:
    """The coordinator refused the price: what the site's ledger holds is free again, since nothing was read."""
    site.ledger.free(reservation.grant, "refused", site.seal(settlement(reservation, "declined", "coordinator")))


def return_unused_grant(site: SiteContext, reservation: Reservation | Reserved) -> None:
    """Leave a run that was granted and in which nothing was begun: what is held here is free again.

    Only the process that reserved it knows that nothing was read. The coordinator hears the same word, and spends.
    """
    word = site.seal(settlement(reservation, "declined", "unused"))
    site.ledger.free(reservation.grant, "unused", word)
    with best_effort():  # there it stays held until the run's end, which is as good as spent
        site.gateway.settle(f"settle-{reservation.grant}", word)


def expire_grant(site: SiteContext, reservation: Reservation | Reserved, reason: str) -> None:
    """Close a grant that will see no release: it is spent, and the coordinator is told so.

    Raises:
        CoordinatorUnreachableError: the site's own ledger is closed all the same; the coordinator's grant stays held.
    """
    if site.owner is not None:
        site.owner.expire(reservation.grant, reason)
        return
    site.ledger.close(reservation.grant, "expired")
    site.gateway.settle(f"settle-{reservation.grant}", site.seal(settlement(reservation, "expired", reason)))


def settle_grant(site: SiteContext, name: str, made: Claim | None) -> None:
    """Close a finished grant: spend what was made, and return the rest here.

    Made, not what left: a round that failed has read images, and its failure was an answer. The coordinator spends
    the whole grant; the stricter of both ledgers binds.
    """
    grant = site.ledger.store.state.grants[name]
    reserved = grant.reserved
    if grant.state != "held" or not isinstance(reserved, Reserved):
        return
    used = price_of(made, site.ledger.store.state.accounts[reserved.account]) if made else reserved.amount
    if not grant.sent <= used < reserved.amount:
        site.ledger.close(name, "finished")
    else:
        word = settlement(reserved, "finished", "finished", used)
        site.ledger.finish(word, site.seal(word))
    with best_effort():  # there it stays held, which is as good as spent
        site.gateway.settle(f"settle-{name}", site.seal(settlement(reserved, "expired", "finished")))


def settlement(reservation: Reservation | Reserved, outcome: str, reason: str, used: int = 0) -> Settlement:
    """The word on a grant that will see no release."""
    r = reservation
    return Settlement(r.grant, r.site, r.run, r.mechanism, outcome, reason, used)
