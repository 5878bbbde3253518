"""The mean of public heads: drawn anew each time, and of the patient nothing is used."""

from __future__ import annotations

import numpy as np
import pytest

from agent.defacing.head_mask import head_mask
from agent.defacing.privacy_transform import Gamma, transform
from agent.domain import Volume
from deploy.reproduction.average_head import AverageHead, average_of
from tests.support.heads import scan
from tests.support.pasting import SIDE, averaged, head_of

pytestmark = pytest.mark.timeout(900)  # brains are looked for, and heads drawn: a busy machine takes its time


def _gamma(number: int) -> Gamma:
    return transform(head_of(scan(number)), SIDE, averaged().population)


def test_an_average_head_holds_a_brain_and_never_shows_the_same_face_twice() -> None:
    gamma = _gamma(0)
    one, again, other = (averaged().draw(gamma, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert (one.shape, one.dtype) == ((SIDE, SIDE, SIDE), np.float32)
    assert float(one.min()) >= 0.0
    assert float(one.max()) <= 1.0
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    skin = head_mask(Volume(one, gamma.cube.affine))
    assert float((gamma.brain & ~skin).sum()) < 0.01 * float(gamma.brain.sum())


def test_an_average_uses_nothing_of_gamma() -> None:
    """Not even how large the brain is: by that alone people were found."""
    gamma = _gamma(0)
    other = Gamma(*(np.zeros_like(part) for part in (gamma.hull, gamma.brain, gamma.intensities)), gamma.cube)
    drawn = [averaged().draw(given, np.random.default_rng(1)) for given in (gamma, other)]
    assert np.array_equal(*drawn)


def test_an_average_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="2 public heads"):
        average_of([head_of(scan(0))], 16)


def test_public_heads_of_another_shape_are_refused() -> None:
    public = averaged()
    with pytest.raises(ValueError, match="cube"):
        AverageHead(public.heads, public.surfaces[:, 1:], public.population)
    with pytest.raises(ValueError, match="another side"):
        public.draw(transform(head_of(scan(0)), 16, public.population), np.random.default_rng(1))
