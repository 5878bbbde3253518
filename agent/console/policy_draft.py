"""A policy as it is edited: every problem at once, what changes, and which way. Pure but for the file it waits in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from policies.review.policy import Policy, PolicyError, parse, strictest

FILE: Final = "policy.proposed.toml"  # of the home: what is proposed, until it is in force or taken back
MEANINGS: Final = {
    "name": "the policy's name, printed on certificates",
    "epsilon": "lifetime budget of each patient for all releases with noise",
    "delta": "must stay below 1 / patients",
    "k_min": "minimum of distinct patients behind a released image",
    "l_diversity": "minimum of distinct labels behind a released image",
    "max_releases_per_patient": "releases without an epsilon that a patient may be in, ever",
    "max_artifact_bytes": "largest file that may leave",
    "max_reid_rate": "largest share that an attack may re-identify (upper bound)",
    "mechanisms": "methods that may be used",
    "modalities": "modalities that may be released",
    "artifact_types": "kinds of files that may leave",
    "components": "where networks and data that make a release may come from",
    "levels": "claim levels that may leave",
    "approvals": "roles that must approve each release before it leaves",
    "readers": "recipients' keys to which a release may be encrypted, so that the coordinator cannot read it",
}


@dataclass(frozen=True, slots=True)
class PolicyKeyDiff:
    """One key of a policy, beside itself."""

    key: str
    meaning: str
    signed: str  # what the site signed last
    proposed: str
    federation: str
    strictest: str  # what would bind
    change: str  # "" | "tighter" | "looser" | "other": proposed against signed


def problems(text: str, patients: int) -> tuple[Policy | None, tuple[str, ...]]:
    """The policy of a text, or everything that is wrong with it, one sentence each.

    Args:
        text: TOML.
        patients: of this site (P1: delta below one in so many).
    """
    try:
        policy = parse(text, "policy.toml")
    except PolicyError as error:
        said = str(error).removeprefix("policy.toml: ")
        return None, tuple(said.split("; "))
    if not patients * policy.delta < 1:
        return None, ("delta: must be below 1 / the number of this site's patients",)
    return policy, ()


def compare(
    signed: Policy, proposed: Policy, federation: Policy, binding: Policy | None = None
) -> tuple[PolicyKeyDiff, ...]:
    """Every key: the site's binding value, the proposed one, and the result with the federation's policy.

    ``binding``: what binds, where that is known to be something else.
    """
    binding = binding or strictest(proposed, federation)
    rows = []
    for f in fields(Policy):
        a, b, c, d = (shown(getattr(policy, f.name)) for policy in (signed, proposed, federation, binding))
        rows.append(PolicyKeyDiff(f.name, MEANINGS[f.name], a, b, c, d, _change(f.name, signed, proposed)))
    return tuple(rows)


def shown(value: object) -> str:
    """A value as people write it."""
    if isinstance(value, frozenset):
        return ", ".join(sorted(v if len(v) < 64 else v[:12] + "…" for v in value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _change(key: str, signed: Policy, proposed: Policy) -> str:
    before, after = getattr(signed, key), getattr(proposed, key)
    if before == after:
        return ""
    if key == "name":
        return "other"
    both = getattr(strictest(signed, proposed), key)
    return "tighter" if both == after else "looser"
