"""Augmented views of a representative."""

import inspect

import numpy as np
import pytest
import torch

from agent.mechanisms.ksalsa.augmentation import KSalsaViews, augmented, public_spread
from agent.models.stylegan.network import PRESETS, Generator
from agent.models.training_loop import seeded

CODES = np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32)


def test_views_begin_with_the_representative_and_spread_as_they_were_asked_to():
    spread = np.linspace(0.1, 2, 8).astype(np.float32)
    made, of = augmented(CODES, spread, KSalsaViews(1000, 0.1), np.random.default_rng(0))
    assert made.dtype == np.float32
    assert of.tolist() == [0] * 1000 + [1] * 1000 + [2] * 1000
    assert np.array_equal(made[::1000], CODES)
    noise = (made - CODES[of]).reshape(3, 1000, 8)[:, 1:].reshape(-1, 8)
    assert np.allclose(noise.std(axis=0), 0.1 * spread, rtol=0.08)
    assert np.allclose(noise.mean(axis=0), 0, atol=0.012 * spread)


def test_given_the_representative_views_do_not_depend_on_anything_private():
    # no argument could carry a patient, and what is added does not depend on the code
    assert set(inspect.signature(augmented).parameters) == {"codes", "spread", "views", "rng"}
    one, _ = augmented(CODES, 1.0, KSalsaViews(), np.random.default_rng(7))
    two, _ = augmented(CODES + 5, 1.0, KSalsaViews(), np.random.default_rng(7))
    assert np.allclose(two - one, 5, atol=1e-5)


def test_one_view_is_the_representative():
    made, of = augmented(CODES, 1.0, KSalsaViews(1), np.random.default_rng(0))
    assert np.array_equal(made, CODES)
    assert of.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("count", "sigma"), [(0, 1.0), (2000, 1.0), (5, 0.0), (5, float("nan")), (5, float("inf"))])
def test_views_that_are_none_are_refused(count, sigma):
    with pytest.raises(ValueError, match="views"):
        KSalsaViews(count, sigma)


def test_codes_that_are_no_numbers_have_no_views():
    for codes, spread in ((CODES * np.nan, 1.0), (CODES, float("nan")), (CODES[0], 1.0)):
        with pytest.raises(ValueError, match="finite"):
            augmented(codes, spread, KSalsaViews(), np.random.default_rng(0))


def test_the_public_spread_is_that_of_the_generators_own_codes():
    with seeded(1):
        generator = Generator(PRESETS["tiny32"])
    found = public_spread(generator, 500, np.random.default_rng(0))
    z = torch.from_numpy(np.random.default_rng(0).standard_normal((500, 64), np.float32))
    with torch.no_grad():
        wanted = generator.mapping(z).numpy().reshape(500, -1).std(axis=0)
    assert found.shape == (generator.architecture.num_ws * 64,)
    assert np.allclose(found, wanted, rtol=1e-4)
    made, _ = augmented(np.zeros((2, found.size), np.float32), found, KSalsaViews(3), np.random.default_rng(0))
    assert made.shape == (6, found.size)
