"""Where two pictures are alike: a pasted part is found, what is only bright is not, and numbers whatever comes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d

from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition.occlusion import PairVerifier, heat
from agent.models.recognition.verifier import VerifierArchitecture, VerifierNet
from agent.models.training_loop import seeded
from tests.support.verifiers import chests, tiny_verifier


class Seen(NamedTuple):
    features: Tensor


class Cells:
    """The truth is known: two pictures are the less alike the more the brightness of their 8 x 8 cells differs."""

    def look(self, images: Tensor) -> Seen:
        return Seen(avg_pool2d((images.mean(dim=1, keepdim=True) + 1) / 2, images.shape[-1] // 8).flatten(1))

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        return 5.0 - (a - b).abs().sum(dim=1)


class Product:
    """The product's own network, untrained."""

    def __init__(self) -> None:
        with seeded(0):
            self.net = VerifierNet(VerifierArchitecture(TrunkArchitecture(64, 1, 8, 3), grid=4)).train(mode=False)

    def look(self, images: Tensor) -> Seen:
        return Seen(self.net(images).features)

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.net.fusion(a, b)
        return out


def noise(seed: int, side: int = 32) -> NDArray[np.float32]:
    """Blocks of one cell each, black or white."""
    cells = np.random.default_rng(seed).integers(0, 2, (8, 8)).astype(np.float32)
    return np.kron(cells, np.ones((side // 8, side // 8), np.float32))


def pasted(whole: NDArray[np.float32], part: NDArray[np.float32], at: tuple[slice, slice]) -> NDArray[np.float32]:
    out = whole.copy()
    out[at] = part[at]
    return out


@pytest.mark.parametrize("at", [(slice(8, 24), slice(8, 24)), (slice(0, 16), slice(16, 32))])
def test_a_pasted_part_is_where_the_heat_is(at: tuple[slice, slice]) -> None:
    real, other = noise(1), 1.0 - noise(1)  # elsewhere nothing is alike
    found = heat(Cells(), pasted(other, real, at), real)
    assert found.shape == (32, 32)
    assert found.dtype == np.float32
    assert found[at].sum() / found.sum() > 0.8  # a quarter of the picture
    assert found[at].max() == found.max() > 0.9


@pytest.mark.parametrize(("at", "least"), [((slice(4, 12), slice(4, 12)), 0.4), ((slice(0, 8), slice(0, 8)), 0.33)])
def test_a_trained_verifier_shows_the_part_that_is_the_patients(at: tuple[slice, slice], least: float) -> None:
    """The part is a quarter of the picture: a map that knows nothing gives it a quarter of the heat."""
    pictures = chests(40, 9)[0][::2].astype(np.float32) / 255
    verifier, shares = tiny_verifier(), []
    for number in range(24):
        found = heat(verifier, pasted(pictures[number + 1], pictures[number], at), pictures[number])
        shares.append(found[at].sum() / found.sum() if found.any() else 0.0)
    assert np.mean(shares) > least


def test_what_matters_to_the_verifier_and_is_not_alike_stays_cold() -> None:
    real, other = noise(1), 1.0 - noise(1)
    assert not heat(Cells(), other, real).any()


def test_a_mirrored_copy_is_seen_as_a_copy() -> None:
    class Either(Cells):
        def logits(self, a: Tensor, b: Tensor) -> Tensor:
            mirrored = b.reshape(-1, 8, 8).flip(2).flatten(1)
            return torch.maximum(super().logits(a, b), super().logits(a, mirrored))

    real = noise(1)
    found = heat(Either(), real[:, ::-1].copy(), real)
    assert found.mean() > 0.5


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("verifier", [Cells(), Product()])
def test_constant_pictures_give_finite_maps(verifier: PairVerifier, value: float) -> None:
    flat = np.full((64, 64), value, np.float32)
    assert not heat(verifier, flat, flat).any()
    found = heat(verifier, flat, noise(2, 64))
    assert np.isfinite(found).all()
    assert 0.0 <= float(found.min()) <= float(found.max()) <= 1.0


def test_a_verifier_without_numbers_gives_an_empty_map() -> None:
    class Lost(Cells):
        def logits(self, a: Tensor, b: Tensor) -> Tensor:
            return super().logits(a, b) * float("nan")

    class SometimesLost(Cells):
        def logits(self, a: Tensor, b: Tensor) -> Tensor:
            out = super().logits(a, b)
            out[-1] = float("inf")
            return out

    for lost in (Lost(), SometimesLost()):
        assert not heat(lost, noise(1), noise(1)).any()


def test_the_map_has_the_made_pictures_size_and_colour_does_not_matter() -> None:
    grey = heat(Cells(), noise(1), noise(1))
    in_colour = np.repeat(noise(1)[..., None], 3, axis=2)
    assert grey.shape == (32, 32)
    assert grey.any()
    for made, real in ((in_colour, noise(1)), (noise(1), in_colour), (in_colour, in_colour)):
        assert np.allclose(heat(Cells(), made, real), grey, atol=1e-5)


def test_a_patients_picture_of_another_size_is_laid_over() -> None:
    assert heat(tiny_verifier(), noise(1, 32), noise(1, 64)).shape == (32, 32)
