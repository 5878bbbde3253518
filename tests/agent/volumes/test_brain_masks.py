"""Masks of other programs are taken for what they hold; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from agent.domain import Volume
from agent.volumes.brain_masks import mask_from
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import oriented
from tests.support.heads import real_head

Values = NDArray[np.generic]


def written(tmp_path: Path, values: Values, affine: NDArray[np.float64]) -> Path:
    nibabel.save(nibabel.Nifti1Image(values, affine), tmp_path / "mask.nii.gz")
    return tmp_path / "mask.nii.gz"


def distance(mask: NDArray[np.bool_], mm: float) -> NDArray[np.float32]:
    """Signed, negative inside, as SynthStrip gives it."""
    outside = ndimage.distance_transform_edt(~mask, sampling=mm)
    return (outside - ndimage.distance_transform_edt(mask, sampling=mm)).astype(np.float32)


@pytest.mark.parametrize("value", [1, 255, 0.5])
def test_a_mask_of_two_numbers_is_taken(tmp_path: Path, value: float) -> None:
    volume, true = real_head(3.0)
    path = written(tmp_path, true.astype(np.float32) * value, volume.affine)
    assert np.array_equal(mask_from(path, volume), true)


def test_a_mask_with_other_axes_is_turned(tmp_path: Path) -> None:
    volume, true = real_head(3.0)
    shape = np.array(true.shape)
    turn = np.zeros((4, 4))
    turn[[0, 1, 2, 3], [1, 0, 2, 3]] = (1, -1, 1, 1)  # the mask's first axis runs along y, its second against x
    turn[1, 3] = 0
    turned = np.flip(true.transpose(1, 0, 2), axis=1)
    to = np.zeros((4, 4))
    to[1, 0], to[0, 1], to[2, 2], to[3, 3], to[0, 3] = 1, -1, 1, 1, shape[0] - 1
    path = written(tmp_path, turned.astype(np.uint8), volume.affine @ to)
    assert np.array_equal(mask_from(path, volume), true)


def test_the_mask_lies_on_the_oriented_grid_of_a_volume_that_does_not(tmp_path: Path) -> None:
    volume, true = real_head(3.0)
    flip = np.diag([-1.0, 1.0, 1.0, 1.0])
    flip[0, 3] = true.shape[0] - 1
    mirrored = Volume(volume.values[::-1], volume.affine @ flip)
    path = written(tmp_path, true[::-1].astype(np.uint8), mirrored.affine)
    assert np.array_equal(mask_from(path, mirrored), true)
    assert np.array_equal(oriented(mirrored).values, volume.values)


@pytest.mark.parametrize("scale", [(1.0, 0.0), (2.5, 0.0)])
def test_a_stripped_image_gives_the_brain_that_it_shows(tmp_path: Path, scale: tuple[float, float]) -> None:
    volume, true = real_head(3.0)
    shown = np.where(true, volume.values * scale[0] + scale[1], 0).astype(np.float32)
    found = mask_from(written(tmp_path, shown, volume.affine), volume)
    assert not (true & ~found & (shown != 0)).any()
    assert (found & ~true).sum() < 0.02 * true.sum()  # folds are closed, holes filled


def test_a_distance_map_is_cut_at_synthstrips_border(tmp_path: Path) -> None:
    volume, true = real_head(3.0)
    found = mask_from(written(tmp_path, distance(true, 3.0), volume.affine), volume)
    assert np.array_equal(found, distance(true, 3.0) < 1.0)


def test_a_fourth_axis_of_one_is_nothing(tmp_path: Path) -> None:
    volume, true = real_head(3.0)
    path = written(tmp_path, true.astype(np.uint8)[..., None], volume.affine)
    assert np.array_equal(mask_from(path, volume), true)


def _moved(true: NDArray[np.bool_], volume: Volume) -> tuple[Values, NDArray[np.float64]]:
    affine = volume.affine.copy()
    affine[0, 3] += 0.5
    return true.astype(np.uint8), affine


BAD = {
    "empty": lambda true, volume: (np.zeros(true.shape, np.uint8), volume.affine),
    "full": lambda true, volume: (np.ones(true.shape, np.uint8), volume.affine),
    "another grid": lambda true, volume: (true[:-1].astype(np.uint8), volume.affine),
    "half a millimetre away": _moved,
    "tissue labels": lambda true, volume: (true.astype(np.uint8) * (1 + volume.values % 3), volume.affine),
    "a stripped image of somebody else": lambda true, volume: (
        np.where(true, volume.values[::-1], 0).astype(np.uint8),
        volume.affine,
    ),
    "no numbers": lambda true, volume: (np.where(true, np.nan, 0.0), volume.affine),
    "a map that is no distance": lambda true, volume: (distance(true, 3.0) ** 3 / 100, volume.affine),
    "the volume itself": lambda true, volume: (np.maximum(volume.values, 1), volume.affine),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    volume, true = real_head(3.0)
    with pytest.raises(NotDefacedError, match="mask_does_not_fit"):
        mask_from(written(tmp_path, *BAD[name](true, volume)), volume)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    volume, _ = real_head(3.0)
    (tmp_path / "mask.nii.gz").write_bytes(b"nothing")
    for path in (tmp_path / "mask.nii.gz", tmp_path / "nowhere.nii.gz"):
        with pytest.raises(NotDefacedError, match="mask_does_not_fit"):
            mask_from(path, volume)
