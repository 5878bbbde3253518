"""Policies side by side: which policy binds, key by key, and what an amendment tightened or loosened. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

from policies.review.policy import Policy, strictest

# key -> what it is to a person
KEYS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "epsilon": (
            "Epsilon, lifetime",
            "for all differentially private releases of a patient together; neighbours differ by one patient added "
            "or removed, at the delta below",
        ),
        "delta": ("Delta", "per patient; must stay below 1 / patients"),
        "k_min": ("Smallest group", "different patients behind every image of a k-anonymous release"),
        "l_diversity": ("Different labels in a group", "so that a group does not give a diagnosis away"),
        "max_releases_per_patient": ("Releases of a patient", "those without an epsilon, ever"),
        "max_reid_rate": ("Re-identified, at most", "share of synthetic images, upper end of a 95 % interval"),
        "max_artifact_bytes": ("Largest file", "bytes of one release"),
        "mechanisms": ("Methods", ""),
        "modalities": ("Modalities", "DICOM codes"),
        "artifact_types": ("Kinds of release", ""),
        "components": ("Origin of components", "generators, encoders and what else made the release"),
        "levels": ("Claim levels", ""),
        "approvals": ("Persons who must approve", "roles at the hospital, before a release leaves"),
        "run_approvals": ("Persons who must approve runs", "roles at the hospital, before a run's first round"),
        "readers": ("Readers", "fingerprints of keys that a release may be encrypted to"),
    }
)


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One key of the policies."""

    key: str
    label: str
    help: str
    federation: str
    own: str
    binding: str
    binds: str  # federation | site | both | neither: only what the two have in common is left


@dataclass(frozen=True, slots=True)
class AmendedKey:
    """One key that an amendment changed."""

    key: str
    label: str
    before: str
    after: str
    way: str  # tighter | looser | other: neither is contained in the other


@dataclass(frozen=True, slots=True)
class Version:
    """A policy that a site has signed."""

    seq: int  # of its entry
    at: int  # seconds since 1970
    number: int  # of the amendment; 0 for an enrolment
    digest: str  # SHA-256 of the sealed statement, hexadecimal
    text: str  # TOML, as the site wrote it
    policy: Policy
    changes: tuple[AmendedKey, ...]  # against the version before
    in_force: bool


def shown(key: str, value: object) -> str:
    """A value as people read it."""
    if isinstance(value, frozenset):
        return ", ".join(sorted(value)) or "none"
    if key == "max_reid_rate":
        return f"{100 * float(str(value)):g} %"
    if key == "max_artifact_bytes":
        return size_of(int(str(value)))
    return f"{value:g}" if isinstance(value, float) else str(value)


def size_of(count: int) -> str:
    """Bytes in the largest unit that keeps a whole number before the point."""
    for unit, each in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= each:
            return f"{count / each:.4g} {unit}"
    return f"{count} bytes"


def compare(federation: Policy, own: Policy) -> list[PolicyRow]:
    """The federation's policy, a site's, and what binds: key by key."""
    both = strictest(federation, own)
    return [_row(key, federation, own, both) for key in KEYS]


def _row(key: str, federation: Policy, own: Policy, both: Policy) -> PolicyRow:
    f, o, b = (getattr(p, key) for p in (federation, own, both))
    binds = "both" if f == o else "federation" if b == f else "site" if b == o else "neither"
    return PolicyRow(key, *KEYS[key], shown(key, f), shown(key, o), shown(key, b), binds)


def changes(before: Policy, after: Policy) -> tuple[AmendedKey, ...]:
    """What an amendment changed, and which way: towards less that may leave, or towards more."""
    both, out = strictest(before, after), []
    for f in fields(Policy):
        old, new, strict = (getattr(p, f.name) for p in (before, after, both))
        if old != new and f.name in KEYS:
            way = "tighter" if strict == new else "looser" if strict == old else "other"
            out.append(AmendedKey(f.name, KEYS[f.name][0], shown(f.name, old), shown(f.name, new), way))
    return tuple(out)
