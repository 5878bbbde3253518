"""The search for k, at the site: said in the ledger before a patient is read, and shown to the site alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Clusters, Cohort, Latents, Selection
from agent.errors import CohortTooSmallError
from agent.evaluation.k_selection import Curves, Menu, Probe, tune
from agent.mechanisms.anonfaces.mechanism import AnonFaces
from agent.mechanisms.common.linear_codec import invert
from agent.mechanisms.common.stylegan_codec import StyledCodec
from agent.mechanisms.ksalsa.mechanism import KSalsa
from agent.microaggregation.aggregation import average, majority, patient_label
from agent.microaggregation.partition import is_feasible, partition
from agent.models.image_tensors import to_tensor
from agent.models.recognition.recogniser import Recogniser
from agent.release.history import kept_clusters, note_search, out_of_it
from agent.release.ports import SiteContext

_BATCH = 256


def search(
    site: SiteContext,
    mechanism: KSalsa | AnonFaces,
    selection: Selection,
    menu: Menu,
    rng: np.random.Generator,
    judge: Recogniser | None = None,
) -> tuple[Curves, NDArray[np.uint8] | None]:
    """Measure every k of a menu on the patients whom no release has shown yet (001, sections 3.5 and 4.4).

    The search is recorded before a patient is read, whatever its result, and every later release of this modality
    declares what was tried. Nothing leaves, so nothing is priced.

    Args:
        site: its ledger and vault.
        mechanism: what a release would be made by; its own k is not looked at.
        selection: whose images.
        menu: every k to try.
        rng: of the clustering.
        judge: a recogniser that is asked whom it finds in their own representative; None: nobody is asked.
    Returns:
        The curves, and the representatives (m, h, w[, 3]) of the recommended k, plain means without alignment or
        adjustment; None when no k is recommended.
    Raises:
        CohortTooSmallError: no k of the menu gives a partition.
    """
    note_search(site, selection.modality, menu.ks)  # before labels too: that no k is possible is an answer
    _, taken = kept_clusters(site, mechanism, selection)
    taken = out_of_it(site, selection, taken)
    labels = [majority(own) for own in site.vault.roster(selection, taken)]
    if not any(is_feasible(labels, k, menu.l_diversity) for k in menu.ks):
        raise CohortTooSmallError
    site.say("read", "the eligible patients, from the vault")
    cohort = site.vault.cohort(selection, without=taken)
    site.say("tune", f"k of {', '.join(map(str, menu.ks))}")
    curves, shown = site.run(partial(measure, mechanism, menu, judge), cohort, rng)
    return replace(curves, menu=menu), shown


def measure(
    mechanism: KSalsa | AnonFaces, menu: Menu, judge: Recogniser | None, cohort: Cohort, rng: np.random.Generator
) -> tuple[Curves, NDArray[np.uint8] | None]:
    """The part of :func:`search` that sees patients: in a confined process."""
    latents = invert(cohort, mechanism.codec)
    seen = Latents(mechanism.embeddings(cohort), latents.patients) if isinstance(mechanism, AnonFaces) else latents
    own = [patient_label(patient) for patient in cohort.patients]
    curves = tune(seen, own, menu, rng, {"label": own}, _probe(mechanism.codec, judge, cohort, latents))
    if curves.recommended is None:
        return curves, None
    clusters = partition(seen, own, curves.recommended, menu.l_diversity, rng)
    return curves, mechanism.codec.decode(average(latents, clusters))


def _probe(codec: StyledCodec, judge: Recogniser | None, cohort: Cohort, latents: Latents) -> Probe | None:
    """How near each patient's nearest image is to the patient's representative, as a recogniser sees it."""
    if judge is None:
        return None
    own = [_seen(judge, np.stack([image.pixels for image in patient.images])) for patient in cohort.patients]
    place = {patient: i for i, patient in enumerate(latents.patients)}

    def distances(clusters: Clusters) -> tuple[NDArray[np.float64], float]:
        drawn = codec.decode(average(latents, clusters)).astype(np.float32) / np.float32(255)
        far = np.full(len(own), np.nan)
        for representative, members in zip(_seen(judge, drawn), clusters.members, strict=True):
            for i in (place[patient] for patient in members):
                far[i] = np.sqrt(((own[i] - representative) ** 2).sum(axis=1)).min()
        return far, judge.threshold

    return distances


def _seen(judge: Recogniser, images: NDArray[np.float32]) -> NDArray[np.float64]:
    with torch.no_grad():
        parts = [judge.embed(to_tensor(images[a : a + _BATCH])) for a in range(0, len(images), _BATCH)]
    out: NDArray[np.float64] = torch.cat(parts).double().cpu().numpy()
    return out
