"""What a claim promises, in one sentence for a compliance officer; of an unknown one, that nothing is promised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from policies.claims import UnsupportedClaim, assumption
from policies.statement import claim_from

UNKNOWN: Final = "no promise that this report knows"


def promise(claim: object) -> str:
    """A claim's JSON (:func:`policies.statement.claim_json`) in one sentence."""
    claim = claim if isinstance(claim, Mapping) else {}
    if claim.get("kind") == "k-anonymous":
        return (
            f"at least {claim.get('k')} different patients behind every image, with {claim.get('l_diversity')} or "
            f"more different labels; each patient in at most {claim.get('releases_per_patient')} image set(s)"
        )
    if claim.get("kind") == "subsampled-gaussian":
        return _steps(claim)
    if claim.get("kind") == "distributed-gaussian":
        return f"{_steps(claim)}; {_shared(claim)}"
    if claim.get("kind") == "gaussian-query":
        return (
            f"one set of counts, each with Gaussian noise of {claim.get('noise')} votes; a {_unit(claim)} counts as "
            f"at most {claim.get('contribution')} image(s), and an image has at most {claim.get('votes')} vote(s)"
        )
    return _composed(claim) if claim.get("kind") == "composed" else UNKNOWN


def _steps(claim: Mapping[str, Any]) -> str:
    """What is done at every step, to the sum of the patients' parts."""
    return (
        f"{claim.get('steps')} step{'' if claim.get('steps') == 1 else 's'}, each with Gaussian noise of "
        f"{claim.get('noise_multiplier')} times the bound on one {_unit(claim)}'s part; a {_unit(claim)} is in a "
        f"step with probability {claim.get('sampling_rate')}"
    )


def _unit(claim: Mapping[str, Any]) -> str:
    """Whose privacy it is: the patient's, or, of a claim that no preset admits, an image's."""
    return str(claim.get("unit", "unit"))


def _shared(claim: Mapping[str, Any]) -> str:
    """Whose noise it is in a sum over sites, and on what the promise stands."""
    try:
        given = assumption(claim_from(dict(claim)))
    except UnsupportedClaim:
        return UNKNOWN
    return given or "every site adds the whole noise to its own part"


def _composed(claim: Mapping[str, Any]) -> str:
    """Everything that one release takes from the same patients; when a part is not known, nothing is promised."""
    try:
        claim_from(dict(claim))
    except UnsupportedClaim:
        return UNKNOWN
    parts = [f"({n}) {promise(part)}" for n, part in enumerate(claim["parts"], 1)]
    return f"{len(parts)} uses of the same patients, paid for together: {'; '.join(parts)}"
