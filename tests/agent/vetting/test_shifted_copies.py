"""The copy check for moved pictures: views that undo a movement, correlated over what they know."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from agent.models.training_loop import torch_generator
from agent.vetting import filter, shifted_copies
from agent.vetting.copy_detection import FINE, SIDE, thumbnail_vectors
from agent.vetting.shifted_copies import ZOOM, ShiftedCopies, looked_through, movements


def pictures(count: int, seed: int) -> Tensor:
    """(count, 1, FINE, FINE) in [-1, 1]: what all have in common, and what is one's own."""
    rng = np.random.default_rng(seed)
    common = gaussian_filter(np.random.default_rng(99).normal(size=(FINE, FINE)), 5)
    own = gaussian_filter(rng.normal(size=(count, FINE, FINE)), (0, 3, 3))
    taken = own / own.std(axis=(1, 2), keepdims=True) * 0.2 + common / common.std() * 0.2
    return torch.from_numpy(np.clip(taken, -1, 1).astype(np.float32))[:, None]


REAL = pictures(40, 0)
REFERENCE = ShiftedCopies.of(REAL[:, 0])
EVERYBODY = torch.arange(40).expand(40, -1)


def found(made: Tensor, candidates: Tensor = EVERYBODY) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    values, places = REFERENCE.best(thumbnail_vectors(made).fine, candidates[: len(made)])
    return values.numpy(), places.numpy()


@pytest.mark.parametrize("kind", ["exact", "contrast", "crop", "flip", "rotation"])
def test_a_moved_copy_is_found_and_whose_it_is(kind: str) -> None:
    values, places = found(filter.KINDS[kind](REAL, torch_generator(1)))
    assert (values > 0.97).all()
    assert np.array_equal(places, np.arange(40))
    assert found(pictures(40, 7))[0].max() < 0.95  # strangers, by the same movements


def test_a_crop_that_is_turned_and_mirrored_too_is_found() -> None:
    generator = torch_generator(3)
    made = filter.flipped(filter.cropped(filter.rotated(REAL, generator), generator), generator)
    values, places = found(made)
    assert (values > 0.93).all()
    assert np.array_equal(places, np.arange(40))


def test_without_the_movements_or_with_borders_for_what_is_missing_a_crop_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = filter.cropped(REAL, torch_generator(1))
    good = found(made)[0]
    whole = shifted_copies.movements()[:5]
    assert (whole[:, 0] == 1.0).all()
    monkeypatch.setattr(shifted_copies, "movements", lambda: whole)
    still = ShiftedCopies.of(REAL[:, 0]).best(made[:, 0], EVERYBODY)[0]
    assert float(still.mean()) < good.mean() - 0.05
    monkeypatch.undo()
    real = shifted_copies.looked_through
    monkeypatch.setattr(
        shifted_copies, "looked_through", lambda every: (real(every)[0], torch.ones_like(real(every)[1]))
    )
    unmasked = ShiftedCopies.of(REAL[:, 0]).best(made[:, 0], EVERYBODY)[0]
    assert float(1.0 - unmasked.mean()) > 10 * (1.0 - good.mean())


def by_hand(picture: Tensor, place: int, view: Tensor) -> float:
    """One view of one picture with one candidate: partial correlation by least squares, over the known pixels."""
    zoom, turn, x, y = (float(v) for v in view)
    turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) * zoom
    back = np.linalg.inv(turned)
    theta = torch.from_numpy(np.hstack([back, -back @ np.array([[x], [y]])])).float()[None]
    grid = affine_grid(theta, [1, 1, FINE, FINE], align_corners=False)
    seen = avg_pool2d(grid_sample(picture[None], grid, align_corners=False, padding_mode="border"), FINE // SIDE)
    inside = avg_pool2d((grid.abs() <= 1).all(dim=3).float()[:, None], FINE // SIDE).flatten().numpy() > 0.999
    a, b, mean = (v.double().flatten().numpy()[inside] for v in (seen, REFERENCE.pictures[place], REFERENCE.mean))
    explained = np.stack([np.ones_like(mean), mean], axis=1)
    rest = [v - explained @ np.linalg.lstsq(explained, v, rcond=None)[0] for v in (a, b)]
    return float(np.corrcoef(*rest)[0, 1])


def test_the_correlation_is_partial_pearson_over_what_the_view_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifted_copies, "CLOSER", (0.0,))
    some = movements()[[0, 7, 60, 129]]
    monkeypatch.setattr(shifted_copies, "movements", lambda: some)
    reference = ShiftedCopies.of(REAL[:, 0])
    made = pictures(3, 5)
    told = reference.every(made[:, 0], torch.tensor([4, 9]))
    for row in range(3):
        for column, place in enumerate((4, 9)):
            sides = (made[row], made[row].flip(2))
            best = max(by_hand(side, place, view) for side in sides for view in some)
            assert float(told[row, column]) == pytest.approx(best, abs=1e-4)


def test_a_view_knows_what_the_window_showed_and_no_more() -> None:
    grid, known = looked_through(torch.tensor([(1.0, 0.0, 0.0, 0.0), (ZOOM, 0.0, 0.1, 0.0)]))
    assert grid.shape == (2, FINE, FINE, 2)
    assert bool((known[0] == 1.0).all())
    shown = known[1].reshape(SIDE, SIDE)
    assert shown[:, -1].sum() == SIDE - 2  # the window lies at the right: its edge is in it
    assert not shown[:, 0].any()
    assert not shown[0].any()


def test_flat_pictures_correlate_with_nobody_and_nan_is_told() -> None:
    made = torch.zeros(3, 1, FINE, FINE)
    made[1] += torch.arange(FINE) % 2 / 300
    made[2, 0, 3, 3] = torch.nan
    values, places = found(made)
    assert values[:2].tolist() == [0.0, 0.0]
    assert np.isnan(values[2])
    assert ((places >= 0) & (places < 40)).all()
    flat = ShiftedCopies.of(torch.cat([REAL[:, 0], torch.zeros(1, FINE, FINE)]))
    assert float(flat.best(REAL[:1, 0], torch.tensor([[40]]))[0]) == 0.0


def test_only_candidates_count() -> None:
    values, places = found(REAL[:3], torch.tensor([[5, -1], [-1, -1], [-1, 7]]))
    assert places[0] == 5
    assert values[0] < 0.95
    assert values[1] == -1.0
    assert values[2] < 0.95
    empty, at = REFERENCE.best(REAL[:2, 0], torch.zeros(2, 0, dtype=torch.int64))
    assert empty.tolist() == [-1.0, -1.0]
    assert at.tolist() == [0, 0]


def test_no_answer_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pictures(9, 8)
    whole, places = found(made)
    monkeypatch.setattr(shifted_copies, "_BLOCK", 2)
    monkeypatch.setattr(shifted_copies, "_PICTURES", 7)
    again = ShiftedCopies.of(REAL[:, 0])
    parts, at = again.best(made[:, 0], EVERYBODY[:9])
    assert np.allclose(parts.numpy(), whole, atol=1e-5)
    assert np.array_equal(at.numpy(), places)
    assert float(again.best(made[4:5, 0], EVERYBODY[:1])[0]) == pytest.approx(float(whole[4]), abs=1e-5)


def test_colour_is_seen_as_luma() -> None:
    coloured = REAL.expand(-1, 3, -1, -1) * torch.tensor([1.0, 0.8, 0.6])[:, None, None]
    assert (found(coloured)[0] > 0.999).all()
