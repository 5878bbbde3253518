"""A look at what a released set is worth, on held-out patients: counted before one is read, for the site alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agent.measures.evaluation import Asked, Effort, Evaluation, Subject, evaluate
from agent.mechanisms import Centroids, PrivImage
from agent.nouns import Selection, SyntheticSet
from agent.site import Site

_LOOKS = "looks"


class NotHeldOut(ValueError):
    """These patients may have been trained on; the text says how to hold others out."""


def held_out(selection: Selection, part: str) -> Selection:
    """The patients of another part of a configuration's split.

    Raises:
        NotHeldOut: there is no split, no such part, or it is the part that is released.
    """
    parts = ", ".join(selection.split.parts) if selection.split else ""
    told = "figures of patients that were trained on choose a model by them; hold a part out"
    if selection.split is None:
        raise NotHeldOut(f"{told}: [cohort] of the configuration needs split, parts and part")
    if part == selection.part:
        raise NotHeldOut(f"{told}: {part} is the part that the configuration releases, of {parts}")
    if part not in selection.split.parts:
        raise NotHeldOut(f"there is no such part; the configuration's split has {parts}")
    return replace(selection, part=part)


def subject_of(mechanism: PrivImage | Centroids, made: SyntheticSet) -> Subject:
    """What is judged, by the configuration that it was made with.

    Raises:
        ValueError: the set is none of this configuration.
    """
    if made.images.shape[1:] != mechanism.shape:
        raise ValueError("the set's pictures do not have the configuration's size: it is another one's")
    if not isinstance(mechanism, PrivImage):
        return Subject(made, mechanism.classes, mechanism.classes)
    public = mechanism.public
    asked = Asked(mechanism.semantics, public.images, public.bins, mechanism.query)
    return Subject(made, mechanism.drawn, mechanism.classes, asked)


def look(
    site: Site, subject: Subject, others: Selection, rng: np.random.Generator, effort: Effort | None = None
) -> tuple[Evaluation, int]:
    """Judge a set by held-out patients. Nothing leaves, so nothing is priced; the look is counted for ever.

    Args:
        site: its vault.
        subject: what is judged.
        others: of :func:`held_out`.
        rng: of halves, samples and intervals.
        effort: how much is computed.
    Returns:
        The figures, and how many looks there were at patients of this modality, this one included.
    Raises:
        TooFewPatients: too few are held out. That was a look as well.
    """
    looks = _counted(site, others.modality)  # before a patient is read: whatever comes of it, it was asked for
    site.say("read", "the held-out patients, from the vault")
    cohort = site.vault.cohort(others)
    say = lambda told: site.say("look", told)  # noqa: E731 - one line of progress
    return evaluate(subject, cohort, rng, say, effort), looks


def looks_at(site: Site, modality: str) -> int:
    """How often figures of held-out patients of a modality were looked at, in all projects."""
    return int((site.vault.note(_LOOKS) or {}).get(modality, 0))


def _counted(site: Site, modality: str) -> int:
    """Count a look, in a note of the site: its patients are the same in every project, and nothing takes one away."""
    count = looks_at(site, modality) + 1
    site.vault.write_note(_LOOKS, {**(site.vault.note(_LOOKS) or {}), modality: count})
    return count
