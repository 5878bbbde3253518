"""What a site does before anything new: find out how the interrupted ended, and show its receipts after a restore."""

from __future__ import annotations

from agent.errors import ReviewRejectedError
from agent.release.approval import withdraw
from agent.release.budget import expire_grant
from agent.release.history import forget_releases, known_after_start, patients_of, remembered_releases
from agent.release.pipeline import fetch_verdicts
from agent.release.ports import SiteContext
from agent.release.resumable import discard_orphans, held_for
from agent.release.unsent import PART, forget, listed, sweep_kept, updates_of_part, withdraw_update
from policies.ledger.entries import Recovered, Reserved
from policies.review.rules import Verdict
from policies.statements import Receipts, release_id


def recover(site: SiteContext) -> list[str]:
    """At every start: ask for missing verdicts; every grant that is still without an end is spent.

    Exceptions: a release that is made and stored in the vault, pending approval or an answer; an interrupted release
    that resumes, or goes on now in another process; and an open participation in a run. A stored release with a
    patient who has opted out since can never leave: it is withdrawn, and its grant spent. Remains of other
    interrupted releases are deleted.

    Patients of a release that never set out may take part again; those of one that did may not, whatever became
    of it, since its images may have been seen.

    Returns:
        The grants that were closed.
    Raises:
        CoordinatorUnreachableError: the coordinator could not be asked; nothing new is possible before it can.
    """
    # beside it a release may be made: its grant is noted before it is held, and listed before that note is cleared
    held = {reserved.grant for reserved in site.ledger.held()}
    waiting = {held_for(site)}
    kept = listed(site.vault)
    waiting |= {one["grant"] for one in kept.values()}
    waiting |= {(site.vault.note(PART) or {}).get("grant", "")}  # a part in a run goes on where it was
    fetch_verdicts(site)
    for reserved in site.ledger.held():
        if reserved.grant in held - waiting:
            expire_grant(site, reserved, "restart")
    state = site.ledger.store.state
    closed = [grant for grant in sorted(held) if state.grants[grant].state != "held"]
    for name in [name for name, one in kept.items() if not _open(site, one["grant"])]:
        forget(site.vault, name)  # it has its verdict
    closed += _withdraw_opted_out(site)
    tidy(site)
    return closed


def tidy(site: SiteContext) -> None:
    """Delete what makings left that neither go on nor were finished; one that is at work meanwhile loses nothing."""
    discard_orphans(site)
    places, remembered = site.vault.site_places("kept/"), remembered_releases(site)  # first: then what they are of
    unfinished = held_for(site)
    goes_on = {release_id(site.name, unfinished, 0)} if _open(site, unfinished) else set()
    sweep_kept(site.vault, places, goes_on | updates_of_part(site.vault, site.name))
    forget_releases(site, remembered - goes_on - known_after_start(site))


def _withdraw_opted_out(site: SiteContext) -> list[str]:
    """What is kept of patients one of whom has opted out goes, bytes and all (P15); the grants that it had."""
    gone, closed = site.vault.opted_out(), []
    withdraw_update(site.vault, gone)
    for name, one in listed(site.vault).items():
        if not gone.isdisjoint(patients_of(site, name) | set(one.get("persons", ()))):
            site.say(
                "withdraw", f"{name}: a patient in it has opted out: the release is deleted, and its grant is spent"
            )
            withdraw(site, name)
            closed.append(one["grant"])
    return closed


def _open(site: SiteContext, name: str) -> bool:
    grant = site.ledger.store.state.grants.get(name)
    return grant is not None and grant.state == "held"


def present(site: SiteContext, origin: str, nonce: str) -> int:
    """The coordinator's ledger came back from a backup: show it every grant that it has lost, then say that is all.

    The receipts are this site's own sealed reservations; what they held is spent there, whatever became of it.

    Returns:
        How many grants had been lost.
    Raises:
        ReviewRejectedError: by the coordinator.
        CoordinatorUnreachableError: to be done again at the next start; each receipt counts once.
    """
    lost, store = 0, site.ledger.store
    for name, grant in store.state.grants.items():
        if grant.state == "freed" or _known(site, grant.reserved):
            continue
        lost += _taken(site.gateway.present(f"recover-{name}", store.envelope(grant.reserved.envelope) or b""))
    _taken(site.gateway.present(f"present-{nonce}", site.seal(Receipts(site.name, origin, nonce, lost))))
    policy = store.envelope(store.state.policies[site.name]) or b""
    if store.state.amended.get(site.name):  # the backup may hold an older one; a newer or the same is no news
        site.gateway.amend(f"amend-again-{nonce}", policy)
    return lost


def _known(site: SiteContext, held: Reserved | Recovered) -> bool:
    """Does the restored ledger hold this grant? A refusal is no sign of it: it refuses whatever comes early.

    A part in a run was reserved by the coordinator under the run's own key, for all of its sites.
    """
    keys = [f"reserve-{held.grant}", f"recover-{held.grant}"] + ([f"run-{held.run}"] if held.run else [])
    found = (site.gateway.outcome(key, held.envelope) for key in keys)
    return any(verdict is not None and verdict.admitted for verdict in found)


def _taken(verdict: Verdict) -> bool:
    """Was a receipt taken, for a grant that had been lost?

    Three are none to insist on: nobody waits for this site, the request had been refused, or the grant is known.
    """
    if not verdict.admitted and not {f.rule for f in verdict.findings} <= {"not_awaited", "was_refused", "known"}:
        raise ReviewRejectedError("coordinator", verdict)
    return verdict.admitted
