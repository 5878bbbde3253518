"""Recognition: real faces, real attacks; what pixelation loses to a parrot, averaging with k people does not."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from skimage.data import lfw_subset

from agent.microaggregation.partition import greedy
from deploy.reproduction.attacks.membership import Pool, Published
from deploy.reproduction.attacks.recognition import (
    naive,
    naive_open_set,
    open_set,
    parrot,
    rank_one,
    reverse,
    vectors,
)


class Pixels:
    """Recognition by pixels about their mean, at unit length: on near copies of a picture a perfect recogniser."""

    name = "pixels"

    def __init__(self, threshold=0.25):
        self.threshold = threshold

    def embed(self, images):
        flat = images.flatten(1) - images.flatten(1).mean(dim=1, keepdim=True)
        return flat / flat.norm(dim=1, keepdim=True)


@pytest.fixture(scope="module")
def faces():
    """One picture each of 100 people, and another of the same with a little noise of the camera."""
    first = lfw_subset()[:100].astype(np.float32)
    again = np.clip(first + np.random.default_rng(0).normal(0, 0.02, first.shape), 0, 1).astype(np.float32)
    return Pool(first, np.arange(100)), Pool(again, np.arange(100))


def _clusters(pool, k):
    assignment = greedy(pool.images.reshape(len(pool.images), -1).astype(np.float64), k)
    return [np.flatnonzero(assignment == j) for j in range(assignment.max() + 1)]


def _averaged(pool, k):
    groups = _clusters(pool, k)
    images = np.stack([pool.images[g].mean(axis=0) for g in groups])
    return Published(images, tuple(tuple(int(p) for p in pool.owners[g]) for g in groups))


def _released_as_they_are(pool):
    return Published(pool.images, tuple((int(p),) for p in pool.owners))


def _replaced(k):
    """Every image replaced by the average of its cluster: k-Same with no secret (AnonFACES, section 3)."""

    def deidentify(pool):
        out = np.empty_like(pool.images)
        for group in _clusters(pool, k):
            out[group] = pool.images[group].mean(axis=0)
        return out

    return deidentify


def _pixelated(pool):
    small = pool.images[:, :25, :25].reshape(-1, 5, 5, 5, 5).mean(axis=(2, 4))
    return np.repeat(np.repeat(small, 5, axis=1), 5, axis=2).astype(np.float32)


def test_the_recogniser_knows_people_again_before_anything_is_done(faces):
    gallery, probes = faces
    before = rank_one(Pixels(), gallery, probes)
    assert before.value == 1.0
    assert before.chance == 0.01


def test_pictures_released_as_they_are_are_recognised_both_ways(faces):
    gallery, probes = faces
    published = _released_as_they_are(probes)
    exact, any_member, database, above = naive(Pixels(), gallery, published, 5).figures
    assert (exact.value, any_member.value, database.value) == (1.0, 1.0, 1.0)
    assert exact.interval.low > exact.limit == 0.2
    assert above.value == 1.0
    found = reverse(Pixels(), gallery, published, 5).figures
    assert found[0].value == 1.0
    assert found[1].interval.low > found[1].limit


@pytest.mark.parametrize("k", [2, 4, 10])
def test_of_averages_at_most_one_in_k_is_named(faces, k):
    gallery, probes = faces
    published = _averaged(probes, k)
    assert min(len(c) for c in published.members) >= k
    found = naive(Pixels(), gallery, published, k)
    exact, any_member, _, _ = found.figures
    assert exact.value <= 1 / k
    assert exact.value <= any_member.value / k + 1e-9
    back = reverse(Pixels(), gallery, published, k).figures
    assert back[1].value <= 1 / k
    assert f"{1 / k:.4f}" in found.table()
    assert "naive recognition by pixels" in found.table()


def test_within_the_threshold_are_fewer_the_more_are_averaged(faces):
    gallery, probes = faces
    rates = [naive(Pixels(0.5), gallery, _averaged(probes, k), k).figures[2] for k in (2, 4, 10)]
    assert all(a.value >= b.value for a, b in pairwise(rates))
    assert rates[0].value > rates[2].value
    own, wide = rates[0], naive(Pixels(2.1), gallery, _averaged(probes, 2), 2).figures[2]
    assert own.chance < own.value
    assert (wide.value, wide.chance) == (1.0, 1.0)  # a threshold that takes everybody for everybody says nothing


def test_a_parrot_recognises_pixelation_and_is_held_to_one_in_k_by_averaging(faces):
    gallery, probes = faces
    simple = parrot(Pixels(), gallery, probes, _pixelated, 5).figures[0]
    assert simple.value == 1.0
    for k in (5, 10):
        ours = parrot(Pixels(), gallery, probes, _replaced(k), k).figures[0]
        assert ours.value <= 1 / k + 1e-9
        assert ours.limit == pytest.approx(1 / k)
        assert simple.interval.low > ours.interval.high


def test_a_tie_between_people_is_shared_and_copies_of_one_person_are_no_tie(faces):
    gallery, _ = faces
    same = np.repeat(gallery.images[:1], 4, axis=0)
    known = Pool(same, np.array([0, 0, 1, 2]))
    assert rank_one(Pixels(), known, Pool(same[:1], np.array([0]))).value == pytest.approx(1 / 3)
    assert rank_one(Pixels(), Pool(same, np.zeros(4, np.int64)), Pool(same[:1], np.array([0]))).value == 1.0


def test_an_open_set_counts_only_whom_a_threshold_set_by_strangers_lets_in():
    mated = np.array([[0.1, 0.9], [0.6, 0.7], [0.8, 0.2]])
    correct = np.array([[True, False], [True, False], [True, False]])
    strangers = np.array([[0.5, 0.9], [0.4, 0.8]])
    strict, loose = open_set(mated, correct, strangers, 0.0), open_set(mated, correct, strangers + 0.3, 0.0)
    assert strict.value == pytest.approx(1 / 3)  # only 0.1 < 0.4; 0.2 is the wrong person
    assert loose.value == pytest.approx(2 / 3)  # 0.6 < 0.7 too
    assert open_set(mated, correct, strangers, 0.5).value == pytest.approx(1 / 3)


def test_an_open_set_of_random_distances_is_at_its_chance():
    rng = np.random.default_rng(0)
    mated, strangers = rng.uniform(size=(4000, 5)), rng.uniform(size=(300, 5))
    correct = np.zeros((4000, 5), bool)
    correct[np.arange(4000), rng.integers(0, 5, 4000)] = True
    values = [open_set(mated, correct, rng.uniform(size=(300, 5)), 0.1) for _ in range(20)]
    assert np.mean([v.value for v in values]) == pytest.approx(values[0].chance, rel=0.15)
    assert open_set(mated, correct, strangers, 0.1).chance == pytest.approx(31 / 301 / 5)


def test_released_copies_are_found_in_an_open_set_and_averages_of_ten_hardly(faces):
    gallery, probes = faces
    known = gallery.of(np.arange(60))
    strangers = probes.of(np.arange(60, 100))
    copies = naive_open_set(Pixels(), known, _released_as_they_are(probes.of(np.arange(60))), strangers.images, 0.01)
    averaged = _averaged(probes.of(np.arange(60)), 10)
    ours = naive_open_set(Pixels(), known, averaged, _averaged(strangers, 10).representatives, 0.01)
    assert copies.value == 1.0
    assert ours.value < copies.interval.low


def test_vectors_that_are_not_of_length_one_and_nan_are_refused(faces):
    gallery, probes = faces

    class Long(Pixels):
        def embed(self, images):
            return 2 * super().embed(images)

    class Nan(Pixels):
        def embed(self, images):
            return super().embed(images) * torch.nan

    for broken in (Long(), Nan()):
        with pytest.raises(ValueError, match="length 1"):
            vectors(broken, gallery.images)
    with pytest.raises(ValueError, match="in the gallery"):
        naive(Pixels(), gallery.of(np.arange(50)), _averaged(probes, 5), 5)
    with pytest.raises(ValueError, match="in the gallery"):
        parrot(Pixels(), gallery.of(np.arange(50)), probes, _pixelated, 5)
    with pytest.raises(ValueError, match="replaced by one"):
        parrot(Pixels(), gallery, probes, lambda pool: pool.images[1:], 5)
    with pytest.raises(ValueError, match="finite"):
        open_set(np.full((2, 2), np.nan), np.ones((2, 2), bool), np.ones((1, 2)), 0.1)
