"""The site's private record of the patients behind releases, and which representatives may be shown again (P5).

Who is in a released cluster is a note of the site and outlives every project: a patient is in one cluster, ever. The
representatives themselves are notes of the project and end with it (P15).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from agent.domain import Clusters, ExampleRule, Selection, SyntheticSet
from agent.errors import ReviewRejectedError
from agent.microaggregation.released_clusters import ReleasedCluster, from_note, place_of, plan, to_note
from agent.release.ports import SiteContext
from agent.release.release_record import RECORD
from agent.release.unsent import listed
from policies.accounting.claims import KAnonymous
from policies.review.rules import Finding, Verdict
from policies.statements import Release, StatementError, menu_of
from protos.common.errors import RefusedError

if TYPE_CHECKING:  # all mechanisms import torch, which not all releases need
    from agent.mechanisms.registry import Synthesis

_SEARCHED = "searched"


class TooManySearchesError(RefusedError, ValueError):
    """More k than a statement can say: 64 at most, below a million, over all searches of a modality."""

    def __init__(self) -> None:
        """Say the limits."""
        super().__init__("a statement lists at most 64 tried k, each below 1000000, over all searches of a modality")


def form_of(mechanism: Synthesis, selection: Selection) -> str:
    """What a representative is comparable with: whatever draws it, and the rule by which patients are chosen."""
    return hashlib.sha256(json.dumps([mechanism.form, rule_of(selection)], sort_keys=True).encode()).hexdigest()


def rule_of(selection: Selection | ExampleRule) -> list[Any]:
    """The rule by which patients are chosen, as JSON; of a task, whose form holds it, the modality alone."""
    if isinstance(selection, ExampleRule):
        return [selection.modality]
    s, split = selection, selection.split
    shares = [split.name, dict(split.parts)] if split else None
    return [s.modality, list(s.shape), s.body_part, sorted(s.labels), shares, s.part, s.min_instances, s.fit]


def freeze(
    made: SyntheticSet, clusters: Clusters, mechanism: Synthesis, selection: Selection
) -> tuple[ReleasedCluster, ...]:
    """What was just made, cluster by cluster, as it will be shown for ever."""
    per = len(made.images) // len(clusters.members)  # views of each representative
    if per * len(clusters.members) != len(made.images):
        raise RuntimeError("a set does not fit its clusters")  # never released: fail closed
    form = form_of(mechanism, selection)
    return tuple(
        ReleasedCluster(
            members,
            made.images[i * per : (i + 1) * per],
            made.labels[i * per],
            mechanism.k,
            mechanism.l_diversity,
            form,
        )
        for i, members in enumerate(clusters.members)
    )


def combine_shuffled(clusters: Sequence[ReleasedCluster], rng: np.random.Generator) -> SyntheticSet:
    """One set of all representatives, in random order: neither age nor cluster can be told from a place."""
    images = np.concatenate([cluster.images for cluster in clusters])
    labels = [cluster.label for cluster in clusters for _ in cluster.images]
    order = rng.permutation(len(images))
    return SyntheticSet(images[order], tuple(labels[i] for i in order))


def kept_clusters(
    site: SiteContext, mechanism: Synthesis, selection: Selection
) -> tuple[tuple[ReleasedCluster, ...], frozenset[str]]:
    """The clusters of earlier releases that this one shows again, and every patient who is in any of them.

    Clusters of submitted releases are shown again. A release that is pending approval may still be withdrawn: its
    clusters only exclude their patients. A cluster with a patient who has opted out is retired: its images are
    deleted here, if the opt-out itself could not (:func:`agent.storage.projects.opt_out`). A cluster that has fewer
    than k patients, by what is now known of ids, is not shown again either.
    """
    gone = site.vault.opted_out()
    for one in site.vault.note(RECORD) or []:
        for index, members in enumerate(one["clusters"]):
            place = place_of(one["release"], index)
            if not gone.isdisjoint(members) and site.vault.project_note(place) is not None:
                site.vault.write_project_note(place, None)
    return frozen_clusters(site, mechanism, selection)


def frozen_clusters(
    site: SiteContext, mechanism: Synthesis, selection: Selection, known: Set[str] | None = None
) -> tuple[tuple[ReleasedCluster, ...], frozenset[str]]:
    """The same, and nothing is written: images of a retired cluster are passed over.

    With ``known``, of these releases alone, as after the next start (:func:`known_after_start`).
    """
    old: list[ReleasedCluster] = []
    gone, state = site.vault.opted_out(), site.ledger.store.state
    for one in site.vault.note(RECORD) or []:
        if known is not None and one["release"] not in known:
            continue
        set_out = one["release"] in state.sent or one["release"] in state.releases
        for index, members in enumerate(one["clusters"]):
            shown = set_out and gone.isdisjoint(members)
            kept = site.vault.project_note(place_of(one["release"], index)) if shown else None
            old.append(from_note(members, kept))
    again, taken = plan(old, gone, mechanism.k, mechanism.l_diversity, form_of(mechanism, selection))
    return still_k_anonymous(again, mechanism.k, site.vault.alike_ids()), taken


def still_k_anonymous(
    clusters: Sequence[ReleasedCluster], k: int, alike: Iterable[frozenset[str]]
) -> tuple[ReleasedCluster, ...]:
    """Those clusters with k patients or more, though groups of their ids were found to be alike since they were made.

    Args:
        clusters: of earlier releases.
        k: patients.
        alike: disjoint groups of ids that count as one patient.
    """
    groups = tuple(alike)
    return tuple(one for one in clusters if _patients(one.members, groups) >= k)


def _patients(members: Iterable[str], alike: Iterable[frozenset[str]]) -> int:
    """How many patients stand behind these ids, by what is known of ids now."""
    own = set(members)
    return len(own) - sum(max(0, len(group & own) - 1) for group in alike)


def still_enough(site: SiteContext, release: Release) -> None:
    """Every cluster that a kept release shows, anew or again, still has as many patients as the release claims (P3).

    Ids that were found to be alike since it was made count as one. Where nothing claims a k, nobody asks.

    Raises:
        ReviewRejectedError: one has fewer; nothing is spent, and it stays kept.
    """
    if not isinstance(release.claim, KAnonymous):
        return
    alike, k = site.vault.alike_ids(), release.claim.k
    behind = [one for one in site.vault.note(RECORD) or [] if one["release"] == release.release]
    if any(_patients(own, alike) < k for one in behind for own in (*one["clusters"], *one.get("again", []))):
        told = (
            "IDs in it now count as one patient, so an image has fewer patients than k; it is "
            f"kept: withdraw it, or record that they differ (`cohort --apart`), and `release send {release.release}`"
        )
        raise ReviewRejectedError("site", Verdict((Finding("alike", told),)))


def out_of_it(
    site: SiteContext, selection: Selection, taken: frozenset[str], among: Set[str] | None = None
) -> frozenset[str]:
    """Who is in no new cluster: who is taken, and every id but one of those that may be one patient's (P3).

    ``among``: the patients of a resumed release; no others represent a patient. None: all patients.
    """
    return taken | site.vault.second_ids(selection, taken, among)


def remember(
    site: SiteContext, release: str, fresh: Sequence[ReleasedCluster], again: Sequence[ReleasedCluster]
) -> None:
    """Write down who is behind a release, before a byte of it leaves; first the images, then who."""
    for index, cluster in enumerate(fresh):
        site.vault.write_project_note(place_of(release, index), to_note(cluster))
    one = {
        "release": release,
        "clusters": [list(cluster.members) for cluster in fresh],
        "again": [list(cluster.members) for cluster in again],
    }
    site.vault.change_note(RECORD, lambda record: [*(record or []), one])


def remember_persons(site: SiteContext, release: str, persons: Iterable[str]) -> None:
    """Write down whose images a release without clusters and without an epsilon was made from, before it leaves."""
    one = {"release": release, "clusters": [], "again": [], "persons": sorted(persons)}
    site.vault.change_note(RECORD, lambda record: [*(record or []), one])


def retire(site: SiteContext, release: str) -> None:
    """No later release shows these representatives again; their patients stay out of others all the same."""
    for one in site.vault.note(RECORD) or []:
        if one["release"] == release:
            for index in range(len(one["clusters"])):
                site.vault.write_project_note(place_of(release, index), None)


def retire_clusters(site: SiteContext, gone: Sequence[ReleasedCluster]) -> None:
    """The same of single clusters, whichever releases have shown them."""
    members = {cluster.members for cluster in gone}
    for one in site.vault.note(RECORD) or []:
        for index, behind in enumerate(one["clusters"]):
            if tuple(sorted(behind)) in members:
                site.vault.write_project_note(place_of(one["release"], index), None)


def shows_retired(site: SiteContext, release: str) -> bool:
    """Whether a release that waits shows a cluster again that was retired since: its images are forgotten here."""
    record = site.vault.note(RECORD) or []
    again = {tuple(sorted(own)) for one in record if one["release"] == release for own in one.get("again", [])}
    kept = {
        tuple(sorted(own))
        for one in record
        for index, own in enumerate(one["clusters"])
        if site.vault.project_note(place_of(one["release"], index)) is not None
    }
    return not again <= kept


def known_after_start(site: SiteContext) -> frozenset[str]:
    """The releases that a start does not forget: those that set out, and those that are kept."""
    kept = listed(site.vault)  # first: what leaves the list meanwhile is in the ledger by then
    state = site.ledger.store.state
    return frozenset({*state.sent, *state.releases, *kept})


def remembered_releases(site: SiteContext) -> frozenset[str]:
    """The releases of which the site's record says who is in them."""
    return frozenset(one["release"] for one in site.vault.note(RECORD) or [])


def forget_releases(site: SiteContext, gone: Set[str]) -> None:
    """Forget releases that never set out, images and all: their patients may take part again."""
    for release in gone:
        retire(site, release)
    site.vault.change_note(RECORD, lambda record: [one for one in record or [] if one["release"] not in gone])


def patients_of(site: SiteContext, release: str) -> set[str]:
    """Every patient behind a release; nobody, when it is not known."""
    found = [one for one in site.vault.note(RECORD) or [] if one["release"] == release]
    behind = [[*one["clusters"], *one.get("again", []), one.get("persons", [])] for one in found]
    return {person for clusters in behind for cluster in clusters for person in cluster}


def searched(site: SiteContext, modality: str) -> tuple[int, ...]:
    """Every k that was ever tried on this site's patients of a modality, smallest first (001, section 3.5)."""
    return tuple(sorted(set((site.vault.note(_SEARCHED) or {}).get(modality, []))))


def note_search(site: SiteContext, modality: str, menu: Iterable[int]) -> None:
    """Write down that these k are about to be tried: before a patient is read, so that no search goes unsaid.

    A note of the site, since its patients are the same in every project; nothing takes one away.

    Raises:
        TooManySearchesError: a statement could not say them all; nothing was written.
    """

    def with_these(before: dict[str, list[int]] | None) -> dict[str, list[int]]:
        every = sorted({*(before or {}).get(modality, []), *menu})
        try:
            menu_of(",".join(map(str, every)))
        except StatementError:
            raise TooManySearchesError from None
        return {**(before or {}), modality: every}

    site.vault.change_note(_SEARCHED, with_these)
