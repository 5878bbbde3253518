import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from scipy.ndimage import gaussian_filter
from skimage.data import lfw_subset

from agent.models.features.extractors import LearnedFeatures, RandomFeatures, features_bytes, features_from
from agent.models.features.feature_net import FeatureNet
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.image_tensors import to_tensor
from agent.models.training_loop import seeded
from agent.models.weights import Origin, WeightsError, pack

SMALL = TrunkArchitecture(side=16, channels=1, width=8, depth=3)


def learned(architecture=SMALL, seed=1):
    with seeded(seed):
        return features_bytes("made", Trunk(architecture), {})


def embedded(net: FeatureNet, images):
    with torch.no_grad():
        return net.embed(to_tensor(images)).double().numpy()


def frechet(a, b):
    """The distance of two normal laws with the moments of a and b (Dowson & Landau 1982)."""
    product = sqrtm(np.cov(a.T) @ np.cov(b.T))
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * product.real))


def test_random_features_are_a_function_of_their_parameters_and_of_nothing_else():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    a = RandomFeatures(7, width=8, depth=2)
    torch.manual_seed(99)
    after_seeding = torch.get_rng_state()
    b = RandomFeatures(7, width=8, depth=2)
    assert torch.equal(torch.get_rng_state(), after_seeding)
    torch.set_rng_state(before)
    assert (np.random.get_state()[1] == numpy_before).all()
    assert a.origin == b.origin
    assert a.origin.provenance == "random"
    assert a.origin.component == "public"
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_every_parameter_of_random_features_changes_their_digest_and_name_or_size():
    nets = [RandomFeatures(0, 8, 2), RandomFeatures(1, 8, 2), RandomFeatures(0, 16, 2), RandomFeatures(0, 8, 3)]
    nets += [RandomFeatures(0, 8, 2, channels=1), RandomFeatures(0, 8, 2, most=128)]
    assert len({net.origin.sha256 for net in nets}) == len(nets)


def test_the_filters_are_those_that_philox_draws():
    # a second way to the same orthogonal basis: Gram-Schmidt, column by column
    drawn = np.random.Generator(np.random.Philox(5)).standard_normal((27, 8))
    basis = []
    for column in drawn.T:
        left = column.copy()
        for other in basis * 2:  # twice, against rounding
            left -= (left @ other) * other
        basis.append(left / np.linalg.norm(left))
    rows = np.array(basis).reshape(8, 3, 9)
    rows[1:] -= rows[1:].mean(axis=2, keepdims=True)
    expected = rows / np.linalg.norm(rows.reshape(8, 27), axis=1)[:, None, None] * np.sqrt(2)
    first = RandomFeatures(5, width=8, depth=1).filters[0].numpy().reshape(8, 3, 9)
    assert np.abs(first - expected).max() < 1e-6


def test_later_filters_are_orthogonal_and_the_first_but_one_see_no_brightness():
    net = RandomFeatures(0, width=16, depth=3)
    for filters in list(net.filters)[1:]:
        rows = filters.flatten(1).double()
        assert torch.allclose(rows @ rows.T, 2 * torch.eye(len(rows), dtype=torch.float64), atol=1e-5)
    means = net.filters[0].mean(dim=(2, 3))
    assert float(means[1:].abs().max()) < 1e-6
    assert float(means[0].abs().max()) > 1e-3


@pytest.mark.parametrize(("h", "w", "c"), [(8, 8, 1), (32, 32, 3), (24, 40, 3), (300, 300, 1), (1, 1, 3)])
def test_any_size_and_colour_gives_an_embedding_of_one_width(h, w, c):
    net = RandomFeatures(0, width=8, depth=3)
    images = torch.rand(2, c, h, w) * 2 - 1
    assert net.embed(images).shape == (2, 2 * (8 + 16 + 32))
    assert bool(torch.isfinite(net.embed(images)).all())
    assert net.maps(images, 1)[0].shape[1] == 8
    if max(h, w) <= 256:
        assert net.maps(images, 1)[0].shape[2:] == (h, w)


def test_the_first_maps_do_not_depend_on_how_many_follow():
    net, images = RandomFeatures(0, width=8, depth=3), torch.rand(2, 3, 16, 16)
    whole = net.maps(images)
    for depth in (1, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(net.maps(images, depth), whole, strict=False))
        assert len(net.maps(images, depth)) == depth
    for depth in (0, 4):
        with pytest.raises(ValueError, match="depth"):
            net.maps(images, depth)


@pytest.mark.parametrize("net", [RandomFeatures(0, 8, 2), features_from(learned())], ids=["random", "learned"])
def test_gradients_reach_the_picture_and_stay_finite_on_a_constant_one(net):
    images = torch.zeros(1, 3, 16, 16, requires_grad=True)
    net.embed(images).sum().backward()
    assert bool(torch.isfinite(images.grad).all())
    assert all(p.grad is None and not p.requires_grad for p in net.parameters())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(0, 1000))
def test_an_embedding_is_of_one_picture_and_not_of_its_neighbours(n, seed):
    images = torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    for net in NETS:
        together = net.embed(images)
        alone = torch.cat([net.embed(image[None]) for image in images])
        assert torch.allclose(together, alone, atol=1e-4)


NETS = [RandomFeatures(0, 8, 2), features_from(learned())]


@pytest.mark.parametrize("shape", [(16, 16), (2, 2, 16, 16), (2, 3, 0, 16), (1, 2, 3, 16, 16)])
def test_what_is_no_batch_of_pictures_is_refused(shape):
    for net in NETS:
        with pytest.raises(ValueError, match="images"):
            net.embed(torch.zeros(shape))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_features_rank_faces_as_people_do_blurred_below_held_out_and_averages_by_k(seed):
    faces = lfw_subset()[:100].astype(np.float32)  # the faces; the other half is background
    rng = np.random.default_rng(seed)
    faces = faces[rng.permutation(100)]
    known, held = faces[:50], faces[50:]
    net = RandomFeatures(seed, width=16, depth=3, channels=1)
    base = embedded(net, known)
    axes = np.linalg.svd(base - base.mean(0), full_matrices=False)[2][:12]  # 50 pictures: a covariance of 12 numbers

    def score(images):
        return frechet(base @ axes.T, embedded(net, images.astype(np.float32)) @ axes.T)

    def averaged(k):
        return np.stack([held[rng.choice(50, k, replace=False)].mean(0) for _ in range(50)])

    blurred = {s: score(np.stack([gaussian_filter(f, s) for f in held])) for s in (1.0, 2.0)}
    assert score(held) < blurred[1.0] < blurred[2.0]
    assert score(held) < score(averaged(5)) < score(averaged(10)) * 1.05
    assert score(averaged(2)) < score(averaged(5))


def test_learned_features_come_back_from_their_file_with_its_digest():
    raw = learned()
    net = features_from(raw, "public")
    assert isinstance(net, LearnedFeatures)
    assert net.origin == Origin("public", hashlib.sha256(raw).hexdigest())
    assert features_from(raw).origin.component == "private"  # nobody vouches for it
    images = torch.rand(2, 1, 16, 16)
    assert torch.equal(net.embed(images), features_from(raw).embed(images))
    assert net.embed(images).shape == (2, 32)
    assert [tuple(m.shape[1:]) for m in net.maps(images)] == [(8, 16, 16), (16, 8, 8), (32, 4, 4)]


@pytest.mark.parametrize(
    "config",
    [
        {"name": "made"},
        {
            "name": "Made!",
            "architecture": {"side": 16, "channels": 1, "width": 8, "depth": 3, "blocks": 1, "most": 512},
        },
        {"name": "made", "architecture": {"side": 16, "depth": 99}},
        {"name": "made", "architecture": {"side": 16.0}},
        {"name": "made", "architecture": {"sides": 16}},
        {"name": "made", "architecture": [16]},
    ],
)
def test_a_file_that_describes_no_feature_network_is_refused(config):
    with pytest.raises(WeightsError):
        features_from(pack("features", config, {}, Trunk(SMALL).state_dict()))


def test_a_file_whose_weights_are_not_of_its_architecture_is_refused():
    config = {
        "name": "made",
        "architecture": {"side": 16, "channels": 1, "width": 8, "depth": 3, "blocks": 1, "most": 64},
    }
    state = Trunk(SMALL).state_dict()
    assert features_from(pack("features", config, {}, state))
    with pytest.raises(WeightsError):
        features_from(pack("features", config, {}, {n: t for n, t in state.items() if n != "stem.bias"}))
    with pytest.raises(WeightsError):
        features_from(pack("recogniser", config, {}, state))


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"width": 2}, {"depth": 0}, {"depth": 9}, {"channels": 2}, {"most": 4}, {"seed": 1 << 64}]
)
def test_random_features_of_no_size_are_refused(wrong):
    with pytest.raises(ValueError, match="random features"):
        RandomFeatures(**wrong)
