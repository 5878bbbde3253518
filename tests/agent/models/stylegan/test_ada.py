"""Augmentations: nothing at p = 0, exact at their exact moves, differentiable twice, undone in distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from agent.models.stylegan.ada import AugmentationControl, augmented, colours, geometry, sampled


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(channels: int = 3, n: int = 6, seed: int = 7) -> Tensor:
    return torch.rand(n, channels, 16, 16, generator=stream(seed)) * 2 - 1


@pytest.mark.parametrize("channels", [1, 3])
def test_at_p_zero_pictures_are_themselves(channels: int) -> None:
    images = pictures(channels)
    assert augmented(images, 0.0, stream()) is images
    eye = torch.eye(3).expand(6, 3, 3)
    assert torch.equal(geometry(6, 16, 0.0, stream()), eye)
    torch.testing.assert_close(colours(6, 0.0, stream()), torch.eye(4).expand(6, 4, 4), atol=1e-6, rtol=0)
    grid = affine_grid(eye[:, :2], [6, channels, 16, 16], align_corners=False)
    torch.testing.assert_close(sampled(images, grid), images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_flow_to_the_pictures_in_both_orders(channels: int) -> None:
    images = pictures(channels).requires_grad_(True)
    out = augmented(images, 0.7, stream())
    assert out.shape == images.shape
    (grad,) = torch.autograd.grad(out.sin().sum(), images, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), images)
    assert (grad.flatten(1).abs().sum(dim=1) > 0).all()
    assert (second.flatten(1).abs().sum(dim=1) > 0).all()


def test_sampling_has_the_derivatives_that_finite_differences_find() -> None:
    images = torch.randn(1, 1, 4, 4, generator=stream(), dtype=torch.float64).requires_grad_(True)
    grid = (torch.rand(1, 4, 4, 2, generator=stream(1), dtype=torch.float64) * 2.6 - 1.3).requires_grad_(False)
    assert torch.autograd.gradcheck(lambda x: sampled(x, grid), images)
    assert torch.autograd.gradgradcheck(lambda x: sampled(x, grid).sin(), images)
    theirs = grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    assert torch.equal(sampled(images, grid), theirs)


def test_the_stream_decides_and_the_global_one_does_not_move() -> None:
    images = pictures()
    before = torch.get_rng_state()
    assert torch.equal(augmented(images, 0.5, stream(3)), augmented(images, 0.5, stream(3)))
    assert not torch.equal(augmented(images, 0.5, stream(3)), augmented(images, 0.5, stream(4)))
    assert torch.equal(before, torch.get_rng_state())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 1.0))
def test_colours_keep_what_they_must(seed: int, p: float) -> None:
    matrices = colours(32, p, stream(seed)).double()
    assert torch.equal(matrices[:, 3], torch.tensor([0.0, 0.0, 0.0, 1.0]).double().expand(32, 4))
    # the grey axis is an eigenvector of contrast, luma flip, hue and saturation: grey pictures stay grey
    out = matrices[:, :3, :3].sum(dim=2)
    torch.testing.assert_close(out, out[:, :1].expand(32, 3), atol=2e-5, rtol=1e-4)
    offset = matrices[:, :3, 3]
    torch.testing.assert_close(offset, offset[:, :1].expand(32, 3), atol=2e-5, rtol=1e-4)


def test_hue_turns_red_into_green_and_blue() -> None:
    found = [m[:3, :3] @ torch.tensor([1.0, 0.0, 0.0]) for m in colours(4000, 1.0, stream())]
    strongest = torch.stack(found).argmax(dim=1).bincount(minlength=3)
    assert (strongest > 1000).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_each_augmentation_is_applied_with_probability_p(seed: int) -> None:
    p, n = 0.3, 2000
    # flips and quarter turns do nothing in 1/2 and 1/4 of the cases in which they are applied
    nothing = (1 - p / 2) * (1 - 3 * p / 4) * (1 - p) ** 2 * (1 - p) * (1 - p) * (1 - p) ** 2 * (1 - p)
    theta = geometry(n, 10_000, p, stream(seed))
    still = (theta - torch.eye(3)).abs().amax(dim=(1, 2)) < 1e-7
    deviation = np.sqrt(nothing * (1 - nothing) / n)
    assert abs(still.float().mean().item() - nothing) < 5 * deviation
    same = (colours(n, p, stream(seed)) - torch.eye(4)).abs().amax(dim=(1, 2)) < 1e-6
    quiet = (1 - p) ** 2 * (1 - p / 2) * (1 - p) ** 2
    assert abs(same.float().mean().item() - quiet) < 5 * np.sqrt(quiet * (1 - quiet) / n)


def test_moves_by_whole_pixels_and_quarter_turns_lose_nothing() -> None:
    images = pictures(1, n=1)
    quarter = torch.tensor([[[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]])
    turned = sampled(images, affine_grid(quarter, [1, 1, 16, 16], align_corners=False))
    assert min((turned - torch.rot90(images, k, (2, 3))).abs().max().item() for k in (1, 3)) < 1e-5
    moved = torch.tensor([[[1.0, 0.0, 3 * 2 / 16], [0.0, 1.0, 0.0]]])
    shifted = sampled(images, affine_grid(moved, [1, 1, 16, 16], align_corners=False))
    torch.testing.assert_close(shifted[..., :13], images[..., 3:], atol=1e-5, rtol=0)
    torch.testing.assert_close(shifted[..., 13:], images[..., 13:].flip(3), atol=1e-5, rtol=0)  # mirrored at the edge


def mean_image(images: Tensor, p: float, seed: int) -> Tensor:
    return augmented(images, p, stream(seed)).mean(dim=(0, 1))


def test_augmentation_does_not_leak_below_p_one_for_pictures_that_point_somewhere() -> None:
    # section 2.2: the upright picture stays the most frequent, so that the corner which is brightest stays so
    images = torch.full((3000, 1, 8, 8), -1.0)
    images[:, :, :4, :4] = 1.0
    corner = mean_image(images, 0.5, 0).reshape(2, 4, 2, 4).mean(dim=(1, 3)).flatten()
    assert corner.argmax().item() == 0
    assert corner[0] - corner[1:].max() > 0.05


def test_two_distributions_stay_apart_when_augmented_alike() -> None:
    bright, dark = torch.full((2000, 1, 8, 8), 0.5), torch.full((2000, 1, 8, 8), 0.1)
    apart = [mean_image(x, 0.6, s).mean().item() for s, x in enumerate((bright, dark, bright))]
    assert apart[0] - apart[1] > 0.1
    assert abs(apart[0] - apart[2]) < 0.06


def overfitting(p: float) -> float:
    # what a discriminator does: less sure of its reals the more they are augmented
    return float(np.clip(1.0 - p, -1.0, 1.0))


@pytest.mark.parametrize("start", [0.0, 0.8])
def test_the_controller_finds_the_p_that_gives_its_target_from_below_and_above(start: float) -> None:
    control, p = AugmentationControl(target=0.6, kimg=10.0), start
    for _ in range(300):
        p = control.moved(p, overfitting(p), 64)
    assert p == pytest.approx(0.4, abs=0.01)


def test_the_controller_has_the_published_speed_and_keeps_its_limits() -> None:
    control = AugmentationControl(target=0.6, kimg=500.0)
    assert control.moved(0.2, 0.9, 64) == pytest.approx(0.2 + 64 / 500_000)
    assert control.moved(0.2, 0.1, 64) == pytest.approx(0.2 - 64 / 500_000)
    assert control.moved(0.2, 0.6, 64) == 0.2
    assert control.moved(0.0, -1.0, 64) == 0.0
    assert control.moved(0.8, 1.0, 10**9) == 0.8


def test_what_is_no_sign_no_probability_and_no_picture_is_refused() -> None:
    nan = float("nan")
    for call in (
        lambda: AugmentationControl().moved(0.1, nan, 64),
        lambda: AugmentationControl(target=nan),
        lambda: AugmentationControl(kimg=0.0),
        lambda: AugmentationControl(most=1.5),
        lambda: augmented(pictures(), nan, stream()),
        lambda: augmented(pictures(), 1.1, stream()),
        lambda: augmented(pictures()[0], 0.5, stream()),
        lambda: augmented(torch.zeros(1, 2, 8, 8), 0.5, stream()),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()
