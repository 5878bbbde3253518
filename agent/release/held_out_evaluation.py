"""A look at what a released set is worth, on held-out patients: counted before one is read, for the site alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from agent.domain import Cohort, Selection, SyntheticSet
from agent.evaluation.released_set import Effort, Evaluation, SemanticsQuery, Subject, evaluate
from agent.mechanisms.centroids.mechanism import Centroids
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.privimage.mechanism import PrivImage
from agent.release.ports import SiteContext, VaultPort
from protos.common.errors import RefusedError

_LOOKS = "looks"


class NotHeldOutError(RefusedError, ValueError):
    """These patients may have been trained on; the text says how to hold others out."""


def held_out(selection: Selection, part: str) -> Selection:
    """The patients of another part of a configuration's split.

    Raises:
        NotHeldOutError: there is no split, no such part, or it is the part that is released.
    """
    parts = ", ".join(selection.split.parts) if selection.split else ""
    told = "evaluating on training patients would select a model by them: hold a part out"
    if selection.split is None:
        raise NotHeldOutError(f"{told}: [cohort] of the configuration needs split, parts and part")
    if part == selection.part:
        raise NotHeldOutError(f"{told}: {part} is the part that the configuration releases, of {parts}")
    if part not in selection.split.parts:
        raise NotHeldOutError(f"there is no such part; the configuration's split has {parts}")
    return replace(selection, part=part)


def subject_of(mechanism: PrivImage | Centroids, made: SyntheticSet) -> Subject:
    """What is judged, by the configuration that it was made with.

    Raises:
        ValueError: the set is none of this configuration.
    """
    if made.images.shape[1:] != mechanism.shape:
        raise ValueError(
            "the set's images do not have the configuration's size: the set was made with another configuration"
        )
    if not isinstance(mechanism, PrivImage):
        return Subject(made, mechanism.classes, mechanism.classes)
    public = mechanism.public
    asked = SemanticsQuery(mechanism.semantics, public.images, public.bins, mechanism.query)
    return Subject(made, mechanism.drawn, mechanism.classes, asked)


def look(
    site: SiteContext, subject: Subject, others: Selection, rng: np.random.Generator, effort: Effort | None = None
) -> tuple[Evaluation, int]:
    """Evaluate a set on held-out patients. Nothing leaves, so nothing is priced; the evaluation is counted
    permanently.

    Args:
        site: its vault.
        subject: what is judged.
        others: of :func:`held_out`.
        rng: of halves, samples and intervals.
        effort: how much is computed.
    Returns:
        The figures, and how many looks there were at patients of this modality, this one included.
    Raises:
        TooFewPatientsError: too few are held out. That was a look as well.
    """
    count_look(site.vault, others.modality)  # before a patient is read: whatever comes of it, it was asked for
    looks = looks_at(site, others.modality)
    site.say("read", "the held-out patients, from the vault")
    cohort = site.vault.cohort(others)
    bench = Workspace(say=lambda told, _step, _of: site.say("look", told))
    return site.run(partial(_evaluated, subject, effort), cohort, rng, bench), looks


def _evaluated(
    subject: Subject, effort: Effort | None, cohort: Cohort, rng: np.random.Generator, bench: Workspace
) -> Evaluation:
    """The part of :func:`look` that sees patients: in a confined process."""
    return evaluate(subject, cohort, rng, lambda told: bench.say(told, 0, 0), effort)


def looks_at(site: SiteContext, modality: str) -> int:
    """How often figures of held-out patients of a modality were looked at, in all projects."""
    return int((site.vault.note(_LOOKS) or {}).get(modality, 0))


def count_look(vault: VaultPort, modality: str) -> int:
    """Count a look, in a note of the site: its patients are the same in every project, and nothing takes one away.

    Returns:
        How many there were at patients of this modality, this one included.
    """
    vault.change_note(_LOOKS, lambda looks: {**(looks or {}), modality: (looks or {}).get(modality, 0) + 1})
    return int(vault.note(_LOOKS)[modality])
