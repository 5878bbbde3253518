import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from agent.errors import OtherRunError
from agent.models.augmentations import IDENTITY, SELF_SUPERVISED, Pool, Views, eased, run_digest, view
from agent.models.features import simclr_training
from agent.models.features.extractors import features_bytes, features_from
from agent.models.features.simclr_training import (
    FeaturesCollapsedError,
    RepresentationConfig,
    contrast,
    train_features,
)
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.image_tensors import to_tensor
from agent.models.training_loop import CHECKPOINT, seeded
from tests.support.killed_training import KilledError, killed_at

TRUNK = TrunkArchitecture(side=16, channels=1, width=8, depth=3)
STILL = Views(shift=0.0, turn=0.0, zoom=(1.0, 1.0), light=0.0, noise=0.0)


def config(**changes):
    told = {"name": "tiny", "architecture": TRUNK, "steps": 100, "batch": 48, "projection": 16, "learning_rate": 3e-3,
            "seed": 1, "checkpoint_every": 50}  # fmt: skip
    return RepresentationConfig(**(told | changes))


def digits(count=400):
    images = load_digits().images[:count]
    return (np.kron(images, np.ones((2, 2))) * 15.9).astype(np.uint8), load_digits().target[:count]


def test_nt_xent_is_chen_et_als_formula():
    first, second = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).unbind()
    z = np.concatenate([first.numpy(), second.numpy()]).astype(float)
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    total = 0.0
    for i in range(8):
        j = (i + 4) % 8
        others = sum(math.exp(z[i] @ z[k] / 0.5) for k in range(8) if k != i)
        total -= math.log(math.exp(z[i] @ z[j] / 0.5) / others)
    assert float(contrast(first, second, 0.5)) == pytest.approx(total / 8, abs=1e-5)
    assert float(contrast(first, first, 0.05)) < float(contrast(first, second, 0.05))


def test_training_on_digits_without_labels_brings_equal_digits_together(tmp_path):
    images, labels = digits()
    losses = []
    how = Views(shift=0.08, turn=0.3, zoom=(0.75, 1.0), light=0.3, blur=1.0)  # a mirrored digit is another digit
    raw = train_features(images, config(views=how), tmp_path, lambda p: losses.append(p.losses["nt_xent"]))
    assert losses[-1] < 0.8 * math.log(2 * 48 - 1)  # what guessing costs

    def accuracy(file):
        net = features_from(file)
        x = net.embed(to_tensor((images / 255).astype(np.float32))).numpy()
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        return KNeighborsClassifier(5).fit(x[:200], labels[:200]).score(x[200:], labels[200:])

    with seeded(1):
        untrained = features_bytes("untrained", Trunk(TRUNK), {})
    assert accuracy(raw) > accuracy(untrained) + 0.1


def test_a_run_that_was_killed_ends_with_the_same_file_and_no_global_generator_moves(tmp_path):
    images, _ = digits(60)
    plan = config(steps=6, checkpoint_every=2)
    state = torch.get_rng_state()
    whole = train_features(images, plan, tmp_path / "whole")
    assert torch.equal(state, torch.get_rng_state())

    with pytest.raises(KilledError):
        train_features(images, plan, tmp_path / "killed", killed_at(6))
    assert train_features(images, plan, tmp_path / "killed") == whole
    with pytest.raises(OtherRunError):
        train_features(images, config(steps=6, temperature=0.5), tmp_path / "killed")
    with pytest.raises(OtherRunError):
        train_features(255 - images, plan, tmp_path / "killed")


def test_what_holds_nothing_to_learn_is_refused(tmp_path):
    images, _ = digits(60)
    for wrong in (images[:10], np.zeros_like(images), images.astype(np.float32), images[:, 0], images[:0]):
        with pytest.raises(ValueError, match=r"images"):
            train_features(wrong, config(), tmp_path)
    for change in ({"steps": 0}, {"batch": 1}, {"temperature": math.nan}, {"learning_rate": 0.0}):
        with pytest.raises(ValueError, match=r"steps|rates"):
            config(**change)
    assert not list(tmp_path.iterdir())


def test_a_pool_gives_colour_and_size_as_the_network_sees_them():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 16, 16, 3), np.uint8)
    grey = Pool(images, 8, 1, torch.device("cpu")).take(torch.tensor([3, 1]))
    luma = (images[[3, 1]] @ np.array([0.299, 0.587, 0.114])).reshape(2, 8, 2, 8, 2).mean((2, 4))
    assert np.allclose(grey[:, 0].numpy(), luma / 127.5 - 1, atol=1e-5)
    assert Pool(images[..., 0], 16, 3, torch.device("cpu")).take(torch.tensor([0])).shape == (1, 3, 16, 16)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000), st.sampled_from([1, 3]), st.integers(4, 20), st.sampled_from([IDENTITY, SELF_SUPERVISED])
)
def test_a_view_keeps_shape_and_range_and_comes_from_its_generator_alone(seed, c, side, how):
    images = torch.rand(3, c, side, side + 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    state = torch.get_rng_state()
    a, b = (view(images, how, torch.Generator().manual_seed(seed)) for _ in range(2))
    assert torch.equal(a, b)
    assert torch.equal(state, torch.get_rng_state())
    assert a.shape == images.shape
    assert float(a.abs().max()) <= 1
    assert not torch.equal(a, view(images, how, torch.Generator().manual_seed(seed + 1)))


def test_a_view_that_changes_nothing_changes_nothing():
    images = torch.rand(2, 3, 12, 12) * 2 - 1
    assert torch.allclose(view(images, STILL, torch.Generator()), images, atol=1e-5)


def test_each_amount_does_what_it_is_called():
    ramp = torch.linspace(-0.5, 0.5, 21).expand(64, 1, 21, 21).clone()

    def seen(**how):
        told = {"shift": 0.0, "turn": 0.0, "zoom": (1.0, 1.0), "light": 0.0, "noise": 0.0}
        return view(ramp, Views(**(told | how)), torch.Generator().manual_seed(0))

    middle = seen(shift=0.1)[
        :, 0, 10, 10
    ]  # the ramp's middle is where the shift went: at most 0.1 of its whole height
    assert 0.08 < float(middle.abs().max()) <= 0.1 * 21 * 0.05 + 1e-5
    flipped = seen(flip=True)
    assert all(
        torch.allclose(f, ramp[0], atol=1e-5) or torch.allclose(f, ramp[0].flip(-1), atol=1e-5) for f in flipped
    )
    assert {bool(f[0, 0, 0] > 0) for f in flipped} == {False, True}
    slopes = seen(zoom=(0.5, 0.5))[:, 0, 10, 11] - seen(zoom=(0.5, 0.5))[:, 0, 10, 10]
    assert torch.allclose(slopes, torch.full((64,), 0.025), atol=1e-4)  # half the side on the whole picture
    assert float(seen(noise=0.1).sub(ramp).std()) == pytest.approx(0.1, rel=0.05)
    lit = seen(light=0.2)
    assert 0.1 < float(lit.mean((1, 2, 3)).abs().max()) <= 0.2
    tinted = view(torch.zeros(8, 3, 4, 4), Views(0, 0, (1, 1), light=0.0, tint=0.3, noise=0.0), torch.Generator())
    assert float(tinted.std(dim=1).mean()) > 0.05


def test_blur_is_a_gaussian_of_at_most_its_deviation():
    point = torch.full((40, 2, 25, 25), -1.0)
    point[:, :, 12, 12] = 1.0
    how = Views(0, 0, (1, 1), light=0.0, blur=2.0, noise=0.0)
    out = view(point, how, torch.Generator().manual_seed(0)) + 1.0
    away = torch.arange(25.0) - 12
    deviations = ((out[:, 0].sum(1) * away**2).sum(1) / out[:, 0].sum((1, 2))).sqrt()
    assert 0.3 < float((deviations < 0.05).float().mean()) < 0.7  # half stay sharp
    blurred = out[deviations.argmax(), 1].numpy()
    sigma = float(deviations.max())
    assert 1.0 < sigma <= 2.0
    expected = gaussian_filter(2.0 * (point[0, 0].numpy() > 0), sigma, truncate=7 / sigma)
    assert np.abs(blurred - expected).max() < 2e-3


def test_the_learning_rate_rises_then_falls():
    course = [eased(i, 100) for i in range(100)]
    assert course[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a >= b for a, b in pairwise(course[5:]))
    assert 0.01 <= course[-1] < 0.02
    assert eased(0, 1) == 1.0


def test_a_run_is_called_by_configuration_and_pictures():
    a = np.zeros((2, 3), np.uint8)
    names = {run_digest({"x": 1}, a), run_digest({"x": 2}, a), run_digest({"x": 1}, a + 1)}
    names |= {run_digest({"x": 1}, a.T), run_digest({"x": 1}, a.astype(np.int8)), run_digest({"x": 1}, a, a)}
    assert len(names) == 6
    assert run_digest({"x": 1, "y": 2}, a) == run_digest({"y": 2, "x": 1}, a)


@pytest.mark.parametrize("wrong", [{"shift": -0.1}, {"noise": math.nan}, {"zoom": (0.0, 1.0)}, {"zoom": (1.2, 1.0)}])
def test_views_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="views"):
        Views(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"side": 10}, {"side": 16.0}, {"width": 12}, {"depth": 0}, {"depth": 5}, {"channels": 2}, {"most": 4}]
)
def test_a_trunk_that_cannot_be_built_is_refused(wrong):
    with pytest.raises(ValueError, match="trunk"):
        TrunkArchitecture(**({"side": 16, "channels": 1, "width": 8, "depth": 3} | wrong))


def test_a_trunks_maps_have_the_sizes_and_widths_that_its_architecture_says():
    a = TrunkArchitecture(side=32, channels=3, width=16, depth=4, blocks=2, most=48)
    with seeded(0):
        maps = Trunk(a)(torch.zeros(1, 3, 32, 32))
    assert [m.shape[1] for m in maps] == list(a.widths) == [16, 32, 48, 48]
    assert [m.shape[2] for m in maps] == [32, 16, 8, 4]
    assert a.left == 4


def test_a_network_that_tells_no_picture_from_another_is_refused_and_its_checkpoint_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(simclr_training, "LEAST_APART", 2.0)  # what no network reaches
    with pytest.raises(FeaturesCollapsedError, match="does not distinguish images"):
        train_features(digits(60)[0], config(steps=2, batch=8), tmp_path)
    assert (tmp_path / CHECKPOINT).exists()


def test_apart_is_the_mean_over_pairs_of_one_minus_the_cosine():
    with seeded(3):
        trunk = Trunk(TRUNK).eval()
    images = digits(9)[0]
    pool = Pool(images, 16, 1, torch.device("cpu"))
    seen = trunk(pool.take(torch.arange(9)))[-1].mean(dim=(2, 3)).detach().numpy().astype(float)
    seen /= np.linalg.norm(seen, axis=1, keepdims=True)
    pairs = [1 - seen[i] @ seen[j] for i in range(9) for j in range(9) if i != j]
    assert simclr_training._apart(trunk, pool, 9) == pytest.approx(np.mean(pairs), abs=1e-6)
