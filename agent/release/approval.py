"""Releases that are kept: what persons look at, how one leaves, how a disapproved one ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from agent.errors import ReviewRejectedError
from agent.release.budget import expire_grant
from agent.release.history import note_search, patients_of, retire, shows_retired, still_enough
from agent.release.pipeline import check_opt_outs, deliver, sign_release, submit
from agent.release.ports import SignedRelease, SiteContext, VaultPort
from agent.release.unsent import artifact_of, clear_of, forget, is_as_stated, listed, of_before, statement_of
from policies.accounting.claims import KAnonymous
from policies.ledger.approvals import refusal
from policies.ledger.entries import Reserved
from policies.review.rules import Finding, Verdict
from policies.statements import Release


def submit_approved(site: SiteContext, release: str) -> tuple[SignedRelease, Verdict]:
    """A release that was kept: with the approvals that persons gave it since; or the same again, if it had set out.

    Raises:
        ReviewRejectedError: it is not one that is kept, a patient in it has opted out since, an image that it shows
        again was
            retired since, ids in it were found to be alike since, its bytes are other ones, or an approval is
            missing: it is kept. Or by the site's own review: that is its end.
        SiteStorageError: its bytes are missing; it stays listed.
        NotSentError: no verdict yet; it is kept.
    """
    one = _kept(site.vault, release)
    draft = statement_of(one)
    _still_in(site, release, one.get("persons", ()))
    if shows_retired(site, release):  # P5: found like somebody by a later vetting
        told = "it contains an image of an earlier release that was retired since: withdraw it"
        raise ReviewRejectedError("site", Verdict((Finding("retired", told),)))
    still_enough(site, draft)
    refused = site.ledger.store.state.proposals.get(refusal(release))
    if refused is not None and refused.approvals:
        raise ReviewRejectedError("site", Verdict((Finding("approval", "an approver has refused it: withdraw it"),)))
    artifact = artifact_of(site.vault, release, one)
    clear = clear_of(site.vault, release, one) if draft.reader else b""
    if not is_as_stated(artifact, draft):
        told = "the kept bytes are not those that the statement names: withdraw it, or restore the vault"
        raise ReviewRejectedError("site", Verdict((Finding("artifact", told),)))
    hand_in = site.gateway.submit_earlier if of_before(one) else site.gateway.submit
    sent = site.ledger.store.state.sent.get(release)
    if sent is not None:  # what has set out is what the ledger holds: no other word and no other byte goes under it
        envelope = site.ledger.store.envelope(sent.envelope) or b""
        signed = SignedRelease(site.read(envelope), envelope, artifact, clear)
        again = site.ledger.dry_run_review(signed.release, envelope)
        if not again.admitted:  # the policy of today binds (P12): it is kept until it is withdrawn
            raise ReviewRejectedError("site", again)
        return signed, deliver(site, signed, hand_in)
    given = site.ledger.store.state.approvals(release, "release", release, draft.artifact_sha256)
    missing = site.ledger.policy_of(site.name).approvals - set(given)
    if missing:
        raise ReviewRejectedError(
            "site", Verdict((Finding("approval", f"not yet approved by: {', '.join(sorted(missing))}"),))
        )
    signed = replace(sign_release(site, replace(draft, approvals=given), artifact), clear=clear)
    return signed, submit(site, signed, hand_in)


def _kept(vault: VaultPort, release: str) -> Mapping[str, Any]:
    kept = listed(vault)
    if release not in kept:
        raise ReviewRejectedError("site", Verdict((Finding("approval", "no release of that name is kept here"),)))
    return kept[release]


def _still_in(site: SiteContext, release: str, named: Iterable[str]) -> None:
    persons = patients_of(site, release) | set(named)
    if not persons:  # nobody can say who is in it
        raise ReviewRejectedError(
            "site", Verdict((Finding("opted_out", "the vault does not know this release: withdraw it"),))
        )
    check_opt_outs(site, persons)


def waiting(vault: VaultPort, release: str) -> tuple[Release, bytes]:
    """A release that is kept, for persons to look at: its statement, and the artifact in clear.

    Raises:
        ReviewRejectedError: no release of that name is kept.
    """
    one = _kept(vault, release)
    return statement_of(one), clear_of(vault, release, one)


def withdraw(site: SiteContext, release: str) -> None:
    """A release that persons will not approve: its grant is spent, since images were read; the artifact is gone.

    Raises:
        ReviewRejectedError: no release of that name is kept.
    """
    draft = statement_of(_kept(site.vault, release))
    grant = site.ledger.store.state.grants[draft.grant].reserved
    if isinstance(draft.claim, KAnonymous):  # it was looked at: another k after it is a choice from what was seen
        note_search(site, draft.modality, (draft.claim.k,))
    forget(site.vault, release)
    retire(site, release)  # persons did not want these images out: no later release shows them either
    if isinstance(grant, Reserved):
        expire_grant(site, grant, "withdrawn")
