"""The search for k: said before a patient is read, of nobody who was released, never below the policy's k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent.domain import Clusters, Cohort, Selection
from agent.errors import CohortTooSmallError
from agent.evaluation.k_selection import Menu, tune
from agent.mechanisms.anonfaces.identity_mixing import Mixing
from agent.mechanisms.common.linear_codec import invert
from agent.mechanisms.ksalsa.style_alignment import Alignment
from agent.mechanisms.registry import AnonFaces, KSalsa
from agent.microaggregation.aggregation import average
from agent.models.features.extractors import RandomFeatures
from agent.models.image_tensors import to_tensor
from agent.release.history import searched
from agent.release.k_search import _probe, search
from agent.release.pipeline import release_synthetic
from agent.reports.k_selection import render
from tests.support.networks import NEVER, codec, recogniser
from tests.support.site_world import MemoryVault, SiteWorld, site_world

OT = Selection("OT", (32, 32))


def ksalsa(k: int = 5) -> KSalsa:
    return KSalsa(k, 2, codec(1), RandomFeatures(), RandomFeatures(), Alignment(steps=2))


def anonfaces(k: int = 5, threshold: float = NEVER) -> AnonFaces:
    return AnonFaces(k, 2, codec(1), tuple(recogniser(seed, threshold) for seed in (0, 1)), Mixing(k))


def rng() -> np.random.Generator:
    return np.random.default_rng(4)


def tried(s: SiteWorld, menu: Menu, mechanism: KSalsa | AnonFaces | None = None) -> tuple[Any, Any]:
    judge = mechanism.recognisers[0] if isinstance(mechanism, AnonFaces) else None
    return search(s.site, mechanism or ksalsa(), OT, menu, rng(), judge)


def test_the_search_is_noted_before_a_patient_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = site_world(tmp_path, patients=24)
    seen: list[tuple[int, ...]] = []
    whole = MemoryVault.cohort

    def look(self: MemoryVault, *asked: Any, **more: Any) -> Cohort:
        seen.append(searched(s.site, "OT"))
        return whole(self, *asked, **more)

    monkeypatch.setattr(MemoryVault, "cohort", look)
    tried(s, Menu((5, 8, 11), 5, 2))
    assert seen == [(5, 8, 11)]


def test_a_search_that_fails_afterwards_was_a_search_and_every_later_release_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path, patients=24)

    def gone(*_asked: Any, **_more: Any) -> Cohort:
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryVault, "cohort", gone)
    with pytest.raises(KeyboardInterrupt):
        tried(s, Menu((5, 7), 5, 2))
    monkeypatch.undo()
    assert searched(s.site, "OT") == (5, 7)
    signed, verdict = release_synthetic(s.site, ksalsa(5), OT, rng())
    assert verdict.admitted
    assert signed.release.menu == "5,7"


@pytest.mark.parametrize("patients", [0, 1, 4])
def test_a_cohort_of_which_no_k_is_possible_is_refused_before_anything_is_read_and_the_search_is_noted(
    tmp_path: Path, patients: int
) -> None:
    s = site_world(tmp_path, patients=patients)
    with pytest.raises(CohortTooSmallError) as caught:
        tried(s, Menu((5, 8), 5, 2))
    assert not any(character.isdigit() for character in str(caught.value))
    assert s.vault.reads == 0
    assert searched(s.site, "OT") == (5, 8), "that no k is possible is an answer too"


def test_a_k_that_is_too_large_for_the_cohort_does_not_stop_the_others(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=20)
    curves, _ = tried(s, Menu((5, 8, 400), 5, 2))
    assert [point.k for point in curves.points] == [5, 8]
    assert 400 in {refused.k for refused in curves.refused}
    assert searched(s.site, "OT") == (5, 8, 400), "that it was asked for is said too"


def test_a_k_below_the_policys_is_measured_and_not_recommended(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=40)
    curves, shown = tried(s, Menu((2, 3, 5, 8, 11), 5, 2))
    assert [point.k for point in curves.points] == [2, 3, 5, 8, 11]
    assert {refused.k for refused in curves.refused} >= {2, 3}
    assert curves.recommended >= 5
    assert shown is not None
    assert shown.shape == (40 // curves.recommended, 32, 32)
    only_small, none = tried(s, Menu((2, 3), 5, 2))
    assert (only_small.recommended, none) == (None, None)


def test_nobody_whom_a_release_has_shown_is_searched_through(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3)
    release_synthetic(s.site, ksalsa(), OT, rng())
    reads = s.vault.reads
    with pytest.raises(CohortTooSmallError):
        tried(s, Menu((5, 8), 5, 2))
    assert s.vault.reads == reads
    s.vault.patients = 36
    curves, _ = tried(s, Menu((5, 8), 5, 2))
    assert max(point.clusters for point in curves.points) == 24 // 5


def test_nothing_is_priced_or_sent(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=24)
    size = (s.site.ledger.store.state.size, s.intake.register.store.state.size)
    tried(s, Menu((5, 8), 5, 2), anonfaces())
    assert (s.site.ledger.store.state.size, s.intake.register.store.state.size) == size


def test_the_search_moves_no_global_generator(tmp_path: Path) -> None:
    before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    tried(site_world(tmp_path, patients=24), Menu((5, 8), 5, 2), anonfaces())
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], legacy)  # type: ignore[index]


# -- what a recogniser says of a k


def test_who_is_found_at_every_k_gets_no_recommendation_and_who_is_never_found_gets_one(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=40)
    menu = Menu((5, 8), 5, 2, max_reid_rate=0.2)
    found, none = tried(s, menu, anonfaces(threshold=2.0))
    assert [(p.reid.hits, p.reid.tries) for p in found.points] == [(40, 40), (40, 40)]
    assert (found.recommended, none) == (None, None)
    never, shown = tried(s, menu, anonfaces(threshold=NEVER))
    assert [p.reid.hits for p in never.points] == [0, 0]
    assert never.recommended == 5
    assert shown is not None


def probed(people: int = 12) -> tuple[AnonFaces, Cohort, Any, Clusters]:
    mechanism = anonfaces()
    cohort = MemoryVault(people).cohort(OT)
    latents = invert(cohort, mechanism.codec)
    return mechanism, cohort, latents, Clusters((latents.patients[: people // 2], latents.patients[people // 2 :]))


def test_a_patients_distance_is_that_of_the_nearest_image_to_the_own_representative() -> None:
    mechanism, cohort, latents, clusters = probed()
    probe = _probe(mechanism.codec, mechanism.recognisers[0], cohort, latents)
    assert probe is not None
    far, threshold = probe(clusters)
    judge = mechanism.recognisers[0]
    drawn = mechanism.codec.decode(average(latents, clusters)).astype(np.float32) / np.float32(255)
    for i, patient in enumerate(cohort.patients):
        own = drawn[0 if patient.pseudonym in clusters.members[0] else 1]
        with torch.no_grad():
            centre = judge.embed(to_tensor(own[None]))[0]
            each = [
                float((judge.embed(to_tensor(image.pixels[None]))[0] - centre).norm()) for image in patient.images
            ]
        assert far[i] == pytest.approx(min(each), abs=1e-5)
    assert threshold == judge.threshold
    assert _probe(mechanism.codec, None, cohort, latents) is None


def test_a_distance_that_is_no_number_counts_as_found() -> None:
    """Fail closed: a recogniser that breaks is no proof that nobody is found."""
    mechanism, cohort, latents, _ = probed(24)
    labels = [patient.images[0].label for patient in cohort.patients]
    broken = recogniser(5)
    with torch.no_grad():
        next(broken.net.parameters()).fill_(float("nan"))
    probe = _probe(mechanism.codec, broken, cohort, latents)
    curves = tune(latents, labels, Menu((5, 8), 5, 2), rng(), {"label": labels}, probe)
    assert [point.reid.value for point in curves.points if point.reid] == [1.0, 1.0]
    assert curves.recommended is None
    assert b"No k is recommended" in render(curves)
