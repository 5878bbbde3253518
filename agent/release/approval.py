"""Releases that are kept: what persons look at, how one leaves, how a disapproved one ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from agent.grants import give_up
from agent.kept import artifact_of, clear_of, forget, is_as_stated, listed, of_before, statement_of
from agent.pipeline import leave, parcel, still_in, submit
from agent.released import made_of, note_search, retire, shows_retired, still_enough
from agent.site import Parcel, Refused, Site
from policies.claims import KAnonymous
from policies.entries import Reserved
from policies.office import refusal
from policies.review import Finding, Verdict
from policies.statement import Release


def hand_over(site: Site, release: str) -> tuple[Parcel, Verdict]:
    """A release that was kept: with the approvals that persons gave it since; or the same again, if it had set out.

    Raises:
        Refused: it is not one that is kept, a patient in it has opted out since, a picture that it shows again was
            retired since, ids in it were found to be alike since, its bytes are other ones, or an approval is
            missing: it is kept. Or by the site's own review: that is its end.
        NotKept: its bytes are missing; it stays listed.
        NotSentError: no verdict yet; it is kept.
    """
    one = _kept(site, release)
    draft = statement_of(one)
    _still_in(site, release, one.get("persons", ()))
    if shows_retired(site, release):  # P5: found like somebody by a later vetting
        told = "a picture of an earlier release in it was retired since, and is never shown again: withdraw it"
        raise Refused("site", Verdict((Finding("retired", told),)))
    still_enough(site, draft)
    refused = site.books.store.state.proposals.get(refusal(release))
    if refused is not None and refused.approvals:
        raise Refused("site", Verdict((Finding("approval", "a person has refused it: withdraw it"),)))
    artifact = artifact_of(site.vault, release, one)
    if not is_as_stated(artifact, draft):
        told = "the bytes that are kept are not those that the statement names: withdraw it, or bring the vault back"
        raise Refused("site", Verdict((Finding("artifact", told),)))
    hand_in = site.door.submit_earlier if of_before(one) else site.door.submit
    sent = site.books.store.state.sent.get(release)
    if sent is not None:  # what has set out is what the ledger holds: no other word and no other byte goes under it
        envelope = site.books.store.envelope(sent.envelope) or b""
        goods = Parcel(site.read(envelope), envelope, artifact)
        again = site.books.examine(goods.release, envelope)
        if not again.admitted:  # the policy of today binds (P12): it is kept until it is withdrawn
            raise Refused("site", again)
        return goods, submit(site, goods, hand_in)
    given = site.books.store.state.approvals(release, "release", release, draft.artifact_sha256)
    missing = site.books.policy_of(site.name).approvals - set(given)
    if missing:
        raise Refused("site", Verdict((Finding("approval", f"not yet approved by: {', '.join(sorted(missing))}"),)))
    goods = parcel(site, replace(draft, approvals=given), artifact)
    return goods, leave(site, goods, hand_in)


def _kept(site: Site, release: str) -> Mapping[str, Any]:
    kept = listed(site.vault)
    if release not in kept:
        raise Refused("site", Verdict((Finding("approval", "no release of that name is kept here"),)))
    return kept[release]


def _still_in(site: Site, release: str, named: Iterable[str]) -> None:
    persons = made_of(site, release) | set(named)
    if not persons:  # nobody can say who is in it
        raise Refused("site", Verdict((Finding("opted_out", "the vault does not know this release: withdraw it"),)))
    still_in(site, persons)


def waiting(site: Site, release: str) -> tuple[Release, bytes]:
    """A release that is kept, for persons to look at: its statement, and the artifact in clear.

    Raises:
        Refused: no release of that name is kept.
    """
    one = _kept(site, release)
    return statement_of(one), clear_of(site.vault, release, one)


def withdraw(site: Site, release: str) -> None:
    """A release that persons will not approve: its grant is spent, since images were read; the artifact is gone.

    Raises:
        Refused: no release of that name is kept.
    """
    draft = statement_of(_kept(site, release))
    grant = site.books.store.state.grants[draft.grant].reserved
    if isinstance(draft.claim, KAnonymous):  # it was looked at: another k after it is a choice from what was seen
        note_search(site, draft.modality, (draft.claim.k,))
    forget(site, release)
    retire(site, release)  # persons did not want these pictures out: no later release shows them either
    if isinstance(grant, Reserved):
        give_up(site, grant, "withdrawn")
