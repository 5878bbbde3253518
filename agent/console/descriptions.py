"""Sentences of the site console: claims, figures, decisions. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from policies.accounting.claims import (
    RELATION,
    UNIT,
    Claim,
    Composed,
    Evaluated,
    Gaussian,
    KAnonymous,
    NoClaim,
    assumption,
)
from policies.accounting.rdp import epsilon_of
from policies.accounting.rounding import epsilon_text, rounded_up
from policies.ledger.state import Account
from policies.review.mechanism_terms import TEXTS
from policies.review.rules import level_of
from policies.statements import Release, decimal

LEVELS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "A": (
            "Mathematical guarantee for each patient",
            "Whether one patient took part changes what can be learned by no more than the stated epsilon allows.",
        ),
        "A*": (
            "Mathematical guarantee for each patient, if enough hospitals are honest",
            "As level A, as long as the stated number of hospitals add their noise and keep it to themselves.",
        ),
        "B": (
            "A crowd behind each image",
            "Each image is made from at least k patients, with components that were not trained on them. This is not "
            "differential privacy, and it has no epsilon.",
        ),
        "C": (
            "Tested, not proved",
            "Nothing is guaranteed. Attacks were tried, and the figures below say how well they did.",
        ),
    }
)
BRAIN: Final = "face removed; the brain itself remains linkable"
MECHANISMS: Final = TEXTS
# Why a person refuses a release: a closed list, since the ledger holds no free text and the signature covers it.
REFUSALS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "recognised": "An image shows, or may show, a patient whom I recognise.",
        "too_alike": "An image is too similar to the real one beside it.",
        "text": "An image shows text or a mark that could identify a person.",
        "figures": "The figures of the attacks are not good enough for this purpose.",
        "content": "The labels or what the images show is wrong.",
        "quality": "The images are of no use for the purpose.",
        "purpose": "The purpose does not, or no longer, justify this release.",
        "opted_out": "A patient from whose images it was made has opted out since.",
        "other": "Another reason, which I keep in my own records.",
    }
)
PLAN_REFUSALS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "purpose": "The purpose does not justify this run.",
        "patients": "The run would use patients or images that it should not.",
        "price": "It costs more of the patients' budget than it is worth.",
        "task": "I do not understand, or do not agree with, what is trained.",
        "other": "Another reason, which I keep in my own records.",
    }
)
# What the two figures of a statement are, and what they mean.
_MEASURED: Final = {
    "pictures": (
        (
            "Re-identified",
            "The share that a verifier which did not vet took for a patient: the upper end of a 95 % interval.",
        ),
        (
            "Planted copies caught",
            "Copies of patients' images were planted on purpose: the lower end of a 95 % interval of the share "
            "that vetting caught. A low one means that the rate above says little.",
        ),
    ),
    "heads": (
        (
            "Faces matched",
            "The share of the new faces that an attacker matched with the patient's own head: the upper end of a "
            f"95 % interval. Of the faces alone: {BRAIN}.",
        ),
        (
            "Unaltered faces matched",
            "The same attacker, on heads that kept their faces: the lower end of a 95 % interval of the share that "
            "it matched. A low one means that the rate above says little.",
        ),
    ),
}
_KINDS: Final = {
    "image-set": "a set of images",
    "volume-set": "a set of volumes",
    "model": "a model",
    "update": "an update of a model",
    "masked-update": "a masked update of a model",
    "evaluation": "how good a model is on held-out patients, in sums with noise",
    "masked-evaluation": "a masked part of how good a model is on held-out patients",
}


def promise(claim: Claim) -> str:
    """What a claim says, in a sentence."""
    if isinstance(claim, KAnonymous):
        return (
            f"At least {claim.k} different {claim.unit}s are behind every image, with {claim.l_diversity} or more "
            f"different labels; each {claim.unit} is in at most {claim.releases_per_patient} such release(s). "
            "It has no epsilon."
        )
    if isinstance(claim, NoClaim):
        return "The method gives no guarantee. There are only measurements."
    if isinstance(claim, Composed):
        return f"{len(claim.parts)} uses of the same {UNIT}s with noise, charged together."
    told = assumption(claim) if isinstance(claim, Gaussian) else ""
    hidden = "Noise hides whether one patient took part" + (f"; {told}." if told else ".")
    if isinstance(claim, Evaluated):
        looks = f"{claim.looks} look{'' if claim.looks == 1 else 's'}"
        return f"{hidden} Charged together: the training, and {looks} at how good it is on held-out {UNIT}s."
    return hidden


def loss(release: Release) -> str:
    """The privacy loss of a release with its unit, relation and delta; "" where it has none."""
    if release.epsilon_nano is None or release.delta is None or level_of(release) not in ("A", "A*"):
        return ""
    return stated(release.epsilon_nano / 1e9, release.delta)


def stated(epsilon: float, delta: str) -> str:
    """An epsilon as it may be printed: rounded up, per unit, relation, delta (P1)."""
    return f"ε = {epsilon_text(epsilon)} at δ = {delta}, per {UNIT} ({_relation()})"


def _relation() -> str:
    return str(RELATION).replace("-", " ").replace("_", " ")


def attacks(release: Release) -> tuple[tuple[str, str, str], ...]:
    """What was measured on a release: name, value, what it means. Nothing was measured: no row."""
    rows = []
    rate, power = _MEASURED["heads" if release.mechanism == "remodel" else "pictures"]
    if release.reid_rate is not None:
        rows.append((rate[0], f"at most {_percent(release.reid_rate)}", rate[1]))
    if release.vetting_power is not None:
        rows.append((power[0], f"at least {_percent(release.vetting_power)}", power[1]))
    if release.menu:
        tried = release.menu.replace(",", ", ")
        rows.append(("k that were tried", tried, "All were tried on the patients before one was chosen."))
    return tuple(rows)


def _percent(text: str) -> str:
    try:
        number = decimal(text)
    except ValueError:
        return "a figure that cannot be read"
    return f"{100 * number:.4g} %" if math.isfinite(number) else "a figure that cannot be read"


def facts(release: Release) -> Iterator[tuple[str, str]]:
    """A statement, line by line."""
    yield "Release", release.release
    yield "Method", MECHANISMS.get(release.mechanism, release.mechanism)
    yield "What leaves", f"{_KINDS.get(release.artifact_type, release.artifact_type)}, {size(release.artifact_bytes)}"
    yield "Modality", release.modality
    yield "Promise", promise(release.claim)
    yield "Privacy loss", loss(release) or "no epsilon is stated for this release"
    parts = ", ".join(f"{name}: {where}" for name, where in sorted(release.components.items()))
    yield "Made with", parts or "nothing was declared"
    yield (
        "Compared with",
        {"nothing": "nothing", "public": "public images", "private": "patients' images"}.get(
            release.vetted_against, "unknown"
        ),
    )
    yield "Sealed to", release.reader[:16] + " …" if release.reader else "none: the coordinator can see the content"
    yield "SHA-256 of the artifact", release.artifact_sha256


def size(count: int) -> str:
    """Bytes, for people."""
    number, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.3g} {units[0]}"


def budget(account: Account) -> dict[str, object]:
    """An account for display; spent amounts are rounded up, remaining ones down."""
    opened, gone = account.opened, account.held + account.spent
    if not opened.order:
        return {
            "name": "Releases without an epsilon",
            "limit": f"{account.limit} per {UNIT}",
            "spent": str(account.spent),
            "held": str(account.held),
            "left": str(max(0, account.left)),
        }
    delta = float(opened.delta)
    used = epsilon_of(account.spent, delta, opened.order)
    bound = epsilon_of(gone, delta, opened.order)
    limit = float(account.epsilon)
    return {
        "name": "Releases with noise (differential privacy)",
        "limit": stated(limit, opened.delta),
        "spent": stated(used, opened.delta) if account.spent else "nothing yet",
        "held": f"spent and held together: {stated(bound, opened.delta)}" if account.held else "nothing",
        "left": f"{share(account)['left']:g} % of the budget",
    }


def share(account: Account) -> dict[str, float]:
    """Percent of the limit."""
    if not account.limit:
        return {"spent": 100.0, "held": 0.0, "left": 0.0}
    spent, held = (rounded_up(100 * part / account.limit, 1) for part in (account.spent, account.held))
    return {"spent": spent, "held": held, "left": max(0.0, math.floor(1000 - 10 * spent - 10 * held) / 10)}
