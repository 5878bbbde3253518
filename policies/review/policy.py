"""A site's or a federation's policy: flat TOML, every key but one required, the strictest of two wins.

Default deny: no policy, no release. The coordinator may only tighten what a site admits (design P12). A policy that
was signed before runs were approved has no ``run_approvals``, and is read as it was meant then: nobody approves them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from protos.common.errors import ConfigError

PRESETS: Final = Path(__file__).parent / "presets"


class PolicyError(ConfigError, ValueError):
    """The policy cannot be used; the text names the file and every key that is wrong."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy: what may leave a site, and the privacy budget over the lifetime of the site's data."""

    name: str  # of the policy, for reports
    epsilon: float  # lifetime budget of the site's patients, for all DP releases together
    delta: float  # must stay below 1 / patients
    k_min: int  # smallest cluster, in distinct patients
    l_diversity: int  # distinct labels in each released cluster
    max_releases_per_patient: int  # releases without an epsilon that a patient may be part of, ever (P5)
    max_artifact_bytes: int  # largest file of a release
    max_reid_rate: float  # largest share of synthetic images that vetting may re-identify, upper confidence bound
    mechanisms: frozenset[str]  # that may release
    modalities: frozenset[str]  # DICOM codes, (0008,0060)
    artifact_types: frozenset[
        str
    ]  # that may leave: image-set, model, update, masked-update, evaluation, masked-evaluation
    components: frozenset[str]  # provenance admitted of generators, encoders, ... (P6)
    levels: frozenset[str]  # claim levels admitted: "A", "A*", "B", "C"
    approvals: frozenset[str]  # roles of the persons who must have approved a release before it leaves
    readers: frozenset[
        str
    ]  # SHA-256 of the HPKE keys that a release may be encrypted to, past the coordinator's eyes
    run_approvals: frozenset[str] = frozenset()  # roles that must approve a federated run's plan before its price


_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "epsilon": (0.0, 100.0),
    "delta": (0.0, 0.01),
    "max_reid_rate": (0.0, 1.0),
    "k_min": (2, 1_000_000),
    "l_diversity": (1, 1_000_000),
    "max_releases_per_patient": (1, 1_000_000),
    "max_artifact_bytes": (1, 1 << 40),
}
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
_REALS: Final = ("epsilon", "delta", "max_reid_rate")
_CHOICES: Final[Mapping[str, frozenset[str]]] = {
    "components": frozenset({"public", "dp", "private"}),
    "levels": frozenset({"A", "A*", "B", "C"}),
    "approvals": frozenset({"compliance", "hospital"}),
    "run_approvals": frozenset({"compliance", "hospital"}),
}
_OF_LATER: Final[Mapping[str, list[str]]] = {"run_approvals": []}  # keys that a policy of before does not have


def _problem(key: str, value: object) -> str | None:
    """What is wrong with one key's value, or None."""
    if key == "name":
        return None if isinstance(value, str) and value else "must be a non-empty text"
    if key in _REALS:
        low, high = _BOUNDS[key]
        good = type(value) in (int, float) and low < value <= high  # type: ignore[operator]
        return None if good else f"must be a number in ({low:g}, {high:g}]"
    if key in _BOUNDS:
        low, high = _BOUNDS[key]
        good = type(value) is int and low <= value <= high
        return None if good else f"must be a whole number in [{low:g}, {high:g}]"
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        return "must be a list of texts"
    if key in _CHOICES and not set(value) <= _CHOICES[key]:
        return f"may hold only {', '.join(sorted(_CHOICES[key]))}"
    if key == "readers" and not all(_FINGERPRINT.fullmatch(v) for v in value):
        return "must hold SHA-256 fingerprints of 64 lower-case hexadecimal digits"
    return None


def parse(text: str, source: str) -> Policy:
    """Parse policy TOML; all problems are reported at once.

    Args:
        text: the TOML document.
        source: the file's name, for the message.
    Raises:
        PolicyError: not TOML, a missing or unknown key, or a value out of its range.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{source}: not TOML: {error}") from None
    table = {**_OF_LATER, **table}
    names = {f.name for f in fields(Policy)}
    problems = [f"{key}: missing" for key in sorted(names - set(table))]
    problems += [f"{key}: unknown key" for key in sorted(set(table) - names)]
    for key in sorted(names & set(table)):
        wrong = _problem(key, table[key])
        if wrong:
            problems.append(f"{key}: {wrong}")
    if problems:
        raise PolicyError(f"{source}: " + "; ".join(problems))
    values: dict[str, Any] = {key: frozenset(v) if isinstance(v, list) else v for key, v in table.items()}
    return Policy(**{**values, **{key: float(values[key]) for key in _REALS}})


def preset(name: str) -> str:
    """The TOML text of a preset: internal, controlled or public.

    Raises:
        PolicyError: there is no such preset.
    """
    known = {path.stem: path for path in PRESETS.glob("*.toml")}
    if name not in known:
        raise PolicyError(f"no preset {name!r}; there are {', '.join(sorted(known))}")
    return known[name].read_text()


def named(name: str) -> str:
    """The TOML text of a preset, or of a file whose name ends in ``.toml``; it can be read as a policy.

    Raises:
        PolicyError: there is no such preset or file, or with every problem in it.
    """
    try:
        text = Path(name).read_text(encoding="utf-8") if name.endswith(".toml") else preset(name)
    except (OSError, UnicodeDecodeError):
        raise PolicyError(f"{Path(name).name} cannot be read") from None
    parse(text, Path(name).name)
    return text


def strictest(a: Policy, b: Policy) -> Policy:
    """What both policies admit, and nothing else. Commutes, and ``strictest(a, a) == a``."""
    return Policy(
        name=a.name if a.name == b.name else " + ".join(sorted({*a.name.split(" + "), *b.name.split(" + ")})),
        epsilon=min(a.epsilon, b.epsilon),
        delta=min(a.delta, b.delta),
        k_min=max(a.k_min, b.k_min),
        l_diversity=max(a.l_diversity, b.l_diversity),
        max_releases_per_patient=min(a.max_releases_per_patient, b.max_releases_per_patient),
        max_artifact_bytes=min(a.max_artifact_bytes, b.max_artifact_bytes),
        max_reid_rate=min(a.max_reid_rate, b.max_reid_rate),
        mechanisms=a.mechanisms & b.mechanisms,
        modalities=a.modalities & b.modalities,
        artifact_types=a.artifact_types & b.artifact_types,
        components=a.components & b.components,
        levels=a.levels & b.levels,
        approvals=a.approvals | b.approvals,
        readers=a.readers & b.readers,
        run_approvals=a.run_approvals | b.run_approvals,
    )
