"""A claim's guarantee, in one sentence for a compliance officer, and the tests behind a release without one."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from coordinator.explanations import rounded_down, rounded_up
from policies.accounting.claims import GaussianQuery, UnsupportedClaimError, assumption, looks_of
from policies.statements import Release, claim_from, decimal, menu_of, parse

UNKNOWN: Final = "no promise that this report knows"
BRAIN: Final = "face removed; the brain itself remains linkable"
NOTHING: Final = "there is no guarantee, only the tests that are listed"
UNTESTED: Final = "empirical only: the statement does not say what was measured"


def evidence(reid_rate: object, vetting_power: object, mechanism: object = "") -> str:
    """What stands behind a release of level C: the figures of its statement, rounded to its disadvantage."""
    try:
        rate, power = decimal(reid_rate), decimal(vetting_power)
    except UnsupportedClaimError:
        return UNTESTED
    if not (0 <= rate <= 1 and 0 <= power <= 1):
        return UNTESTED
    if mechanism == "remodel":
        return (
            f"{BRAIN}. Empirical only: at most {rounded_up(100 * rate, 1):g} % (upper end of a 95 % interval) of the "
            f"faces were matched with the patient's own; {rounded_down(100 * power, 1):g} % or more (lower end of "
            "one) of unaltered ones were, so the test works"
        )
    return (
        f"empirical only: at most {rounded_up(100 * rate, 1):g} % (upper end of a 95 % interval) re-identified by an "
        f"unseen verifier; {rounded_down(100 * power, 1):g} % or more (lower end of one) of planted copies caught"
    )


def is_kanonymous(level: str, claim: object) -> bool:
    """Whether a release is k-anonymous: at level C such a claim is without a guarantee, as everything there."""
    return level == "B" and isinstance(claim, Mapping) and claim.get("kind") == "k-anonymous"


def without_epsilon(crowds: int, nothing: int) -> str:
    """The releases without an epsilon, k-anonymous ones and those that promise nothing apart; "" without any."""
    told = [f"{crowds} {'is' if crowds == 1 else 'are'} k-anonymous"] if crowds else []
    told += [f"{nothing} {'promises' if nothing == 1 else 'promise'} nothing"] if nothing else []
    return "; ".join(told)


def release_in(envelope: bytes) -> Release | None:
    """The statement in a sealed envelope, whose signature was verified when it was admitted; None if it has none."""
    said = parse(base64.b64decode(json.loads(envelope)["payload"])) if envelope else None
    return said if isinstance(said, Release) else None


def figures(said: Release | None) -> dict[str, Any]:
    """The figures of a statement besides its claim: every k that was tried, the figures of its vetting; empty if
    none.
    """
    if said is None:
        return {}
    facts = {"k_tried": list(menu_of(said.menu)), "reid_rate": said.reid_rate, "vetting_power": said.vetting_power}
    return {name: fact for name, fact in facts.items() if fact}


def describe_claim(claim: object) -> str:
    """A claim's JSON (:func:`policies.statements.claim_json`) in one sentence."""
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
    if claim == {"kind": "no-claim"}:
        return NOTHING
    if claim.get("kind") == "evaluated":
        return _evaluated(claim)
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
    except UnsupportedClaimError:
        return UNKNOWN
    return given or "every site adds the whole noise to its own part"


def looks_in(claim: object) -> int:
    """How many looks a claim's JSON counts; 0 for what is no claim."""
    try:
        return looks_of(claim_from(dict(claim))) if isinstance(claim, Mapping) else 0
    except UnsupportedClaimError:
        return 0


def _evaluated(claim: Mapping[str, Any]) -> str:
    """A training and the looks at it; when it is not known, nothing is promised."""
    try:
        looks = looks_of(claim_from(dict(claim)))
    except UnsupportedClaimError:
        return UNKNOWN
    many = f"{looks} look{'' if looks == 1 else 's'} at how good it is"
    query = claim["query"]
    return (
        f"a training, and {many}, paid for together: {describe_claim(claim['training'])}; each look is sums over "
        f"held-out {_unit(query)}s with Gaussian noise of {query['noise']} on each, where one {_unit(query)} moves "
        f"all sums together by at most {rounded_up(_sensitivity(query), 3):g}"
    )


def _sensitivity(query: Mapping[str, Any]) -> float:
    found = claim_from(dict(query))
    assert isinstance(found, GaussianQuery)
    return found.sensitivity


def _composed(claim: Mapping[str, Any]) -> str:
    """Everything that one release takes from the same patients; when a part is not known, nothing is promised."""
    try:
        claim_from(dict(claim))
    except UnsupportedClaimError:
        return UNKNOWN
    parts = [f"({n}) {describe_claim(part)}" for n, part in enumerate(claim["parts"], 1)]
    return f"{len(parts)} uses of the same patients, paid for together: {'; '.join(parts)}"
