"""Releases that wait for persons: what they look at, how an approved one leaves, how a disapproved one ends."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import replace

from agent.grants import give_up
from agent.pipeline import leave, parcel, still_in
from agent.released import made_of, note_search, retire, shows_retired
from agent.site import Parcel, Refused, Site
from policies.claims import KAnonymous
from policies.entries import Reserved
from policies.office import refusal
from policies.review import Finding, Verdict
from policies.statement import Release, parse


def hand_over(site: Site, release: str) -> tuple[Parcel, Verdict]:
    """A release that waited, with the approvals that persons gave it since.

    Raises:
        Refused: it is not one that waits, a patient in it has opted out since, a picture that it shows again was
            retired since, or an approval is missing; it waits on. Or by the site's own review.
        Unreachable: no verdict yet.
    """
    pending = site.vault.note("pending") or {}
    if release not in pending:
        raise Refused("site", Verdict((Finding("approval", "no release of that name waits for approval"),)))
    draft = parse(pending[release]["statement"].encode())
    assert isinstance(draft, Release)
    _still_in(site, release, pending[release].get("persons", ()))
    if shows_retired(site, release):  # P5: found like somebody by a later vetting
        told = "a picture of an earlier release in it was retired since, and is never shown again: withdraw it"
        raise Refused("site", Verdict((Finding("retired", told),)))
    refused = site.books.store.state.proposals.get(refusal(release))
    if refused is not None and refused.approvals:
        raise Refused("site", Verdict((Finding("approval", "a person has refused it: withdraw it"),)))
    given = site.books.store.state.approvals(release, "release", release, draft.artifact_sha256)
    missing = site.books.policy_of(site.name).approvals - set(given)
    if missing:
        raise Refused("site", Verdict((Finding("approval", f"not yet approved by: {', '.join(sorted(missing))}"),)))
    goods = parcel(site, replace(draft, approvals=given), base64.b64decode(pending[release]["artifact"]))
    try:
        return goods, leave(site, goods)
    finally:  # refused, unanswered or admitted: it waits no longer, and its grant has an end at the next start
        _forget(site, release)


def _still_in(site: Site, release: str, named: Iterable[str]) -> None:
    persons = made_of(site, release) | set(named)
    if not persons:  # nobody can say who is in it
        raise Refused("site", Verdict((Finding("opted_out", "the vault does not know this release: withdraw it"),)))
    still_in(site, persons)


def waiting(site: Site, release: str) -> tuple[Release, bytes]:
    """A release that waits, for persons to look at: its statement, and the artifact in clear.

    Raises:
        Refused: no release of that name waits.
    """
    pending = site.vault.note("pending") or {}
    if release not in pending:
        raise Refused("site", Verdict((Finding("approval", "no release of that name waits for approval"),)))
    kept = pending[release]
    draft = parse(kept["statement"].encode())
    assert isinstance(draft, Release)
    return draft, base64.b64decode(kept.get("clear") or kept["artifact"])


def withdraw(site: Site, release: str) -> None:
    """A release that persons will not approve: its grant is spent, since images were read; the artifact is gone.

    Raises:
        Refused: no release of that name waits.
    """
    draft, _ = waiting(site, release)
    grant = site.books.store.state.grants[draft.grant].reserved
    if isinstance(draft.claim, KAnonymous):  # it was looked at: another k after it is a choice from what was seen
        note_search(site, draft.modality, (draft.claim.k,))
    _forget(site, release)
    retire(site, release)  # persons did not want these pictures out: no later release shows them either
    if isinstance(grant, Reserved):
        give_up(site, grant, "withdrawn")


def _forget(site: Site, release: str) -> None:
    pending = site.vault.note("pending") or {}
    site.vault.write_note("pending", {name: kept for name, kept in pending.items() if name != release})
