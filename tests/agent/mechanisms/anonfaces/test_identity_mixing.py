"""Identity mixing: bounds of the weights, what the gallery catches, what becomes of a cluster that stays at risk."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from agent.domain import Clusters, Cohort, Image, Latents, Patient
from agent.errors import CohortTooSmallError
from agent.mechanisms.anonfaces.gallery import Gallery, gallery_of
from agent.mechanisms.anonfaces.identity_mixing import (
    MixedIdentities,
    Mixing,
    Published,
    Setting,
    bounded,
    lowered,
    mix,
    mix_published,
    secret_weights,
)
from agent.mechanisms.common.linear_codec import fit_basis, invert
from agent.microaggregation.partition import partition
from agent.models.features.extractors import RandomFeatures

DIGITS = (load_digits().images / 16).astype(np.float32)
BASIS = fit_basis(DIGITS[-400:], 40, "public")


class Pixels:
    """A recogniser of pixels: Euclidean distance of whole pictures."""

    name = "pixels"

    def __init__(self, threshold):
        self.threshold = threshold

    def embed(self, images):
        return images.flatten(1) / 2


class Textures:
    """A recogniser of random features, of unit length."""

    name = "textures"

    def __init__(self, threshold):
        self.threshold = threshold
        self.net = RandomFeatures(3, width=8, depth=2, channels=1)

    def embed(self, images):
        return torch.nn.functional.normalize(self.net.embed(images), dim=1)


def _cohort(pictures, each=1):
    people = [pictures[i : i + each] for i in range(0, len(pictures), each)]
    return Cohort(tuple(Patient(f"p{i:03d}", tuple(Image(x, "") for x in own)) for i, own in enumerate(people)))


def _anything(members):
    return len(members) > 0


def _setting(cohort, pixels=1e-9, textures=1e-9, allowed=_anything):
    return Setting(BASIS, gallery_of(cohort, (Pixels(pixels), Textures(textures))), allowed)


def _clusters(*groups):
    return Clusters(tuple(tuple(f"p{i:03d}" for i in group) for group in groups))


def _like(picture, cohort, thresholds):
    """Patients for whom any recogniser takes a picture, one pair at a time."""
    found = set()
    for judge in (Pixels(thresholds[0]), Textures(thresholds[1])):
        mine = judge.embed(torch.from_numpy(picture[None, None].astype(np.float32) / 255) * 2 - 1)
        for patient in cohort.patients:
            for image in patient.images:
                theirs = judge.embed(torch.from_numpy(image.pixels[None, None]) * 2 - 1)
                if not float((mine.double() - theirs.double()).norm()) >= judge.threshold:
                    found.add(patient.pseudonym)
    return found


# --- weights ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1, 5), min_size=2, max_size=30))
def test_bounded_weights_sum_to_one_and_nobody_has_twice_or_half_the_mean(values):
    w = bounded(np.array(values))
    n = len(values)
    assert w.sum() == pytest.approx(1)
    assert w.min() >= 0.5 / n
    assert w.max() <= 2 / n
    assert np.allclose(bounded(w), w, atol=1e-12)
    order = np.argsort(values)
    assert (np.diff(w[order]) >= -1e-12).all()


@given(st.integers(2, 25), st.floats(0.01, 0.5), st.integers(0, 99))
def test_secret_weights_lie_in_the_bounds_around_the_mean(n, delta, seed):
    w = secret_weights(n, delta, np.random.default_rng(seed))
    assert w.sum() == pytest.approx(1)
    assert 0.5 / n <= w.min() <= w.max() <= 2 / n
    assert w.max() / w.min() <= (1 + delta) / (1 - delta) + 1e-9


@given(st.integers(2, 12), st.lists(st.integers(0, 11), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_lowering_again_and_again_never_leaves_the_bounds(n, hits, beta):
    w = np.full(n, 1 / n)
    for hit in hits:
        risk = np.arange(n) == hit % n
        new = lowered(w, risk, beta)
        assert 0.5 / n <= new.min() <= new.max() <= 2 / n
        assert new.sum() == pytest.approx(1)
        assert new[hit % n] <= w[hit % n] + 1e-12
        w = new


def test_of_two_people_neither_ever_becomes_the_only_one():
    w = np.array([0.5, 0.5])
    for _ in range(100):
        w = lowered(w, np.array([True, False]), 1.0)
    assert w.tolist() == pytest.approx([0.25, 0.75])


# --- the gallery --------------------------------------------------------------------------------------------------


def test_risk_is_that_of_every_pair_compared_alone():
    cohort = _cohort(DIGITS[:12], each=2)
    gallery = gallery_of(cohort, (Pixels(2.5), Textures(0.1)), batch=5)
    made = BASIS.decode(BASIS.encode(DIGITS[10:20]))
    risk = gallery.at_risk(made)
    assert [{p for p, r in zip(gallery.patients, row, strict=True) if r} for row in risk] == [
        _like(picture, cohort, (2.5, 0.1)) for picture in made
    ]
    assert 0 < risk.mean() < 1


def test_a_patient_is_at_risk_through_any_image_and_any_recogniser():
    cohort = _cohort(DIGITS[:4], each=2)
    made = np.rint(DIGITS[1:2] * 255).astype(np.uint8)
    assert gallery_of(cohort, (Pixels(0.1), Textures(1e-9))).at_risk(made).tolist() == [[True, False]]
    assert gallery_of(cohort, (Pixels(1e-9), Textures(1e-3))).at_risk(made).tolist() == [[True, False]]
    assert gallery_of(cohort, (Textures(1e-9), Pixels(0.1))).at_risk(made, judges=1).tolist() == [[False, False]]


def test_one_recogniser_is_not_enough_even_twice():
    cohort = _cohort(DIGITS[:4])
    for judges in ((Pixels(1.0),), (Pixels(1.0), Pixels(2.0)), ()):
        with pytest.raises(ValueError, match="two different"):
            gallery_of(cohort, judges)
    with pytest.raises(ValueError, match="threshold"):
        gallery_of(cohort, (Pixels(float("nan")), Textures(1.0)))


class Lost(Pixels):
    """A recogniser that finds no number for made pictures."""

    name = "lost"

    def embed(self, images):
        return images.flatten(1) * float("nan")


def test_a_distance_that_is_no_number_is_a_match():
    cohort = _cohort(DIGITS[:8])
    gallery = gallery_of(cohort, (Pixels(1e-9), Lost(1e-9)))
    assert gallery.at_risk(np.rint(DIGITS[:2] * 255).astype(np.uint8)).all()
    latents = invert(cohort, BASIS)
    with pytest.raises(CohortTooSmallError):
        mix(
            latents,
            _clusters(range(4), range(4, 8)),
            Setting(BASIS, gallery, _anything),
            Mixing(4),
            np.random.default_rng(0),
        )


def test_the_gallery_is_that_of_the_cohort():
    setting = _setting(_cohort(DIGITS[:6]))
    latents = Latents(np.zeros((2, 40), np.float32), ("p001", "p000"))
    with pytest.raises(ValueError, match="another cohort"):
        mix(latents, _clusters(range(2)), setting, Mixing(2), np.random.default_rng(0))


# --- mixing -------------------------------------------------------------------------------------------------------


def _digits(n=60, k=5, seed=0):
    cohort = _cohort(DIGITS[:n])
    latents = invert(cohort, BASIS)
    return cohort, latents, partition(latents, [""] * n, k, 1, np.random.default_rng(seed))


def test_where_nobody_is_at_risk_every_cluster_is_mixed_once():
    cohort, latents, clusters = _digits()
    mixed = mix(latents, clusters, _setting(cohort), Mixing(5), np.random.default_rng(1))
    assert sorted(mixed.clusters.members) == sorted(clusters.members)
    assert (mixed.rounds, mixed.suppressed, mixed.members_before, mixed.members_after) == (1, (), 0.0, 0.0)
    assert mixed.images.dtype == np.uint8
    assert np.array_equal(mixed.images, BASIS.decode(mixed.codes))
    row = {p: i for i, p in enumerate(latents.patients)}
    for code, members in zip(mixed.codes, mixed.clusters.members, strict=True):
        mean = latents.codes[[row[p] for p in members]].mean(axis=0)
        assert 0 < np.linalg.norm(code - mean) < 0.3 * np.linalg.norm(latents.codes, axis=1).max()


def test_what_is_made_is_like_nobody_whatever_it_costs():
    cohort, latents, clusters = _digits()
    thresholds = (1.4, 0.085)
    mixed = mix(latents, clusters, _setting(cohort, *thresholds), Mixing(5), np.random.default_rng(1))
    assert mixed.members_before > 0
    assert mixed.strangers_before > 0
    assert mixed.rounds > 1
    assert (mixed.members_after, mixed.strangers_after) == (0.0, 0.0)
    assert len(mixed.images) == len(mixed.clusters.members) > 0
    assert all(not _like(picture, cohort, thresholds) for picture in mixed.images)
    named = [p for cluster in (*mixed.clusters.members, *mixed.suppressed) for p in cluster]
    assert sorted(named) == list(latents.patients)
    assert all(5 <= len(cluster) <= 9 for cluster in mixed.clusters.members)


def test_two_runs_mix_with_other_weights_and_one_generator_gives_the_same_bytes():
    cohort, latents, clusters = _digits(20)
    setting = _setting(cohort)
    one, again, other = (mix(latents, clusters, setting, Mixing(5), np.random.default_rng(s)) for s in (1, 1, 2))
    assert one.images.tobytes() == again.images.tobytes()
    by_members = dict(zip(other.clusters.members, other.codes, strict=True))
    for members, code in zip(one.clusters.members, one.codes, strict=True):
        assert not np.allclose(code, by_members[members], atol=1e-3)


def test_no_weight_leaves():
    assert not any("weight" in field.name for field in fields(MixedIdentities))


def _between(a, b):
    return ((a + b) / 2).astype(np.float32)


def test_a_picture_like_a_patient_of_another_cluster_is_caught_and_the_published_rule_misses_it():
    # the mean of p000 and p001 is p002, who is in the other cluster
    pictures = np.stack([DIGITS[0], DIGITS[1], _between(DIGITS[0], DIGITS[1]), DIGITS[5], DIGITS[6], DIGITS[7]])
    cohort = _cohort(pictures)
    latents = invert(cohort, BASIS)
    clusters = _clusters((0, 1), (2, 3, 4, 5))
    near = float(np.linalg.norm(BASIS.decode(latents.codes[2:3])[0] / 255 - pictures[2])) + 0.05
    setting = _setting(cohort, near)
    published = mix_published(latents, clusters, setting, Published(), np.random.default_rng(0))
    assert published.strangers_after == 0.5
    assert "p002" in _like(published.images[0], cohort, (near, 1e-9))
    mixed = mix(latents, clusters, setting, Mixing(2), np.random.default_rng(0))
    assert all(not _like(picture, cohort, (near, 1e-9)) for picture in mixed.images)


def test_a_picture_like_somebody_of_an_earlier_release_is_caught_too():
    # the mean of p000 and p001 is a patient of whom nothing is made now
    pictures = np.stack([DIGITS[0], DIGITS[1], DIGITS[5], DIGITS[6], DIGITS[7]])
    cohort, before = _cohort(pictures), _cohort(_between(DIGITS[0], DIGITS[1])[None])
    latents = invert(cohort, BASIS)
    mean = BASIS.decode(latents.codes[:2].mean(axis=0, keepdims=True))[0] / 255
    near = float(np.linalg.norm(mean - before.patients[0].images[0].pixels)) + 0.05
    others = (Patient("z", before.patients[0].images),)
    for known, caught in (((), False), (others, True)):
        gallery = gallery_of(cohort, (Pixels(near), Textures(1e-9)), known)
        risk = gallery.at_risk(np.rint(mean[None] * 255).astype(np.uint8))
        assert bool(risk[0, len(cohort.patients) :].any()) is caught
        setting = Setting(BASIS, gallery, _anything)
        mixed = mix(latents, _clusters((0, 1), (2, 3, 4)), setting, Mixing(2, delta=1e-6), np.random.default_rng(0))
        assert (mixed.strangers_before > 0) is caught


def _twins():
    """Two pairs of twins, twin beside twin: no weights make a mixture of twins unlike them."""
    noise = np.random.default_rng(0).random((4, 8, 8), np.float32) * 0.01
    pictures = np.stack([DIGITS[0], DIGITS[0], DIGITS[1], DIGITS[1], DIGITS[2], DIGITS[15]])
    pictures[:4] = np.clip(pictures[:4] + noise, 0, 1)
    cohort = _cohort(pictures)
    return cohort, invert(cohort, BASIS), _clusters((0, 1), (2, 3), (4, 5))


def test_a_cluster_that_stays_at_risk_is_dealt_anew_with_its_neighbour():
    cohort, latents, clusters = _twins()
    mixed = mix(latents, clusters, _setting(cohort, 1.0), Mixing(2, deals=5), np.random.default_rng(0))
    assert mixed.suppressed == ()
    assert all(set(c) not in ({"p000", "p001"}, {"p002", "p003"}) for c in mixed.clusters.members)
    assert mixed.members_before == pytest.approx(2 / 3)
    assert all(not _like(picture, cohort, (1.0, 1e-9)) for picture in mixed.images)


def test_a_suppressed_cluster_has_no_picture():
    cohort, latents, clusters = _twins()
    plan = Mixing(2, deals=0)
    mixed = mix(latents, clusters, _setting(cohort, 1.0), plan, np.random.default_rng(0))
    assert set(mixed.suppressed) == {("p000", "p001"), ("p002", "p003")}
    assert mixed.clusters.members == (("p004", "p005"),)
    assert len(mixed.images) == len(mixed.codes) == 1


def test_a_deal_that_breaks_a_rule_does_not_count():
    cohort, latents, clusters = _twins()
    setting = _setting(cohort, 1.0, allowed=lambda members: not {"p000", "p002"} <= set(members))
    for seed in range(5):
        mixed = mix(latents, clusters, setting, Mixing(2, deals=5), np.random.default_rng(seed))
        assert not any({"p000", "p002"} <= set(c) for c in mixed.clusters.members)
    setting = _setting(cohort, 1.0, allowed=lambda _: False)
    assert len(mix(latents, clusters, setting, Mixing(2), np.random.default_rng(0)).suppressed) == 2


def test_a_neighbour_that_was_safe_never_pays():
    # one pair of twins among people, and a rule under which every deal breaks
    cohort, latents, clusters = _digits(20)
    twins = DIGITS[50]
    pictures = np.concatenate([DIGITS[:20], np.repeat(twins[None], 5, axis=0)])
    cohort = _cohort(pictures)
    latents = invert(cohort, BASIS)
    clusters = Clusters((*clusters.members, tuple(f"p{i:03d}" for i in range(20, 25))))
    setting = _setting(cohort, 1.0, allowed=lambda _: False)
    mixed = mix(latents, clusters, setting, Mixing(5), np.random.default_rng(0))
    assert mixed.suppressed == (tuple(f"p{i:03d}" for i in range(20, 25)),)
    assert len(mixed.images) == 4


def test_a_cluster_of_2k_or_more_is_split():
    cohort, latents, clusters = _twins()
    clusters = _clusters((0, 1, 2, 3, 4, 5))
    centre = BASIS.decode(latents.codes.mean(axis=0, keepdims=True))[0] / 255
    pictures = np.concatenate([np.stack([p.images[0].pixels for p in cohort.patients]), [centre, centre + 0.0]])
    cohort = _cohort(pictures.astype(np.float32).clip(0, 1))
    latents = invert(cohort, BASIS)
    clusters = _clusters((0, 1, 2, 3, 4, 5), (6, 7))
    mixed = mix(latents, clusters, _setting(cohort, 0.8), Mixing(2, delta=0.01, deals=9), np.random.default_rng(4))
    assert all(2 <= len(c) <= 3 for c in mixed.clusters.members)
    assert not any({"p000", "p001"} == set(c) for c in mixed.clusters.members)


def test_when_everything_is_at_risk_nothing_is_made_and_nothing_told():
    cohort, latents, clusters = _digits(20)
    with pytest.raises(CohortTooSmallError) as told:
        mix(latents, clusters, _setting(cohort, 1e6), Mixing(5, rounds=2), np.random.default_rng(0))
    assert not any(c.isdigit() for c in str(told.value))


def test_clusters_below_k_and_strangers_are_refused():
    cohort, latents, _ = _digits(20)
    for wrong in (_clusters(range(4), range(4, 20)), _clusters(range(5), (5, 6, 7, 8, 99)), Clusters(())):
        with pytest.raises(ValueError, match="every cluster"):
            mix(latents, wrong, _setting(cohort), Mixing(5), np.random.default_rng(0))


def test_the_published_rule_is_the_mean_until_somebody_is_at_risk():
    cohort, latents, clusters = _digits(20)
    mixed = mix_published(latents, clusters, _setting(cohort), Published(), np.random.default_rng(0))
    row = {p: i for i, p in enumerate(latents.patients)}
    means = [latents.codes[[row[p] for p in c]].mean(axis=0) for c in clusters.members]
    assert np.allclose(mixed.codes, means, atol=1e-5)
    assert mixed.rounds == 1


def test_the_published_rule_moves_a_pair_to_the_other_person():
    # the known picture of p000 lies between the mean and p001: the weights flee past it, until p001 is nearly alone
    latents = invert(_cohort(DIGITS[:2]), BASIS)
    shown = BASIS.decode(0.3 * latents.codes[:1] + 0.7 * latents.codes[1:])[0] / 255
    cohort = _cohort(np.stack([shown.astype(np.float32), DIGITS[2]]))
    near = 1.1 * float(np.linalg.norm(shown - BASIS.decode(latents.codes.mean(axis=0, keepdims=True))[0] / 255))
    setting = _setting(cohort, near)
    published = mix_published(latents, _clusters((0, 1)), setting, Published(0.15), np.random.default_rng(0))
    weight = np.linalg.lstsq(latents.codes.T, published.codes[0], rcond=None)[0]
    assert weight[1] > 0.9
    mixed = mix(latents, _clusters((0, 1)), setting, Mixing(2), np.random.default_rng(0))
    weight = np.linalg.lstsq(latents.codes.T, mixed.codes[0], rcond=None)[0]
    assert 0.25 - 1e-4 <= weight.min() <= weight.max() <= 0.75 + 1e-4


@pytest.mark.parametrize(
    "wrong",
    [{"k": 1}, {"delta": 0.0}, {"delta": 0.6}, {"delta": float("nan")}, {"beta": 0.0}, {"beta": float("nan")},
     {"rounds": 0}, {"deals": -1}, {"batch": 0}],
)  # fmt: skip
def test_a_mixing_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=r"mixing|delta"):
        Mixing(**({"k": 5} | wrong))


def test_a_gallery_holds_what_its_judges_saw():
    gallery = gallery_of(_cohort(DIGITS[:4]), (Pixels(1.0), Textures(1.0)))
    with pytest.raises(ValueError, match="recognisers"):
        Gallery(gallery.judges, gallery.embeddings[:1], gallery.starts, gallery.patients)
