"""What a network sees of a patient is a function of this patient's picture, the task, and a keyed seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agent.errors import TransformError
from agent.models import transforms
from agent.models.transforms import Augmentation, InputPipeline, view_seed
from policies.tasks.transforms import AUGMENTATION, INPUT, TransformSpec

PICTURE = np.random.default_rng(0).random((1, 20, 30)).astype(np.float32) * 200 - 50
VOLUME = np.random.default_rng(1).random((1, 10, 12, 8)).astype(np.float32)
GIVEN = {
    "Spacing": {"pixdim": [2.0, 2.0, 2.0]},
    "Resize": {"spatial_size": [16, 16]},
    "ScaleIntensityRange": {"a_min": -50, "a_max": 100},
    "CenterSpatialCrop": {"roi_size": [16, 16]},
    "SpatialPad": {"spatial_size": [40, 40]},
    "ResizeWithPadOrCrop": {"spatial_size": [16, 40]},
    "RandFlip": {"spatial_axis": 1, "prob": 1.0},
}
SIZES = {
    "Resize": (16, 16), "CenterSpatialCrop": (16, 16), "SpatialPad": (40, 40), "ResizeWithPadOrCrop": (16, 40),
    "DivisiblePad": (32, 32),
}  # fmt: skip


def _pipeline(size: tuple[int, ...], *specs: tuple[str, dict[str, object]]) -> InputPipeline:
    return InputPipeline(tuple(TransformSpec(name, parameters) for name, parameters in specs), size)


@pytest.mark.parametrize("name", sorted(INPUT.keys() - {"Orientation", "Spacing"}))
def test_every_fixed_transform_gives_the_same_of_the_same_picture(name: str) -> None:
    pipeline = _pipeline(SIZES.get(name, (20, 30)), (name, GIVEN.get(name, {"margin": 0} if "Crop" in name else {})))
    if name == "CropForeground":
        pipeline = _pipeline((20, 30), (name, {"threshold": -60}))
    first, _ = pipeline(PICTURE)
    pipeline(PICTURE * 3 + 1)  # somebody else's, which must not be remembered
    second, _ = pipeline(PICTURE.copy())
    assert first.dtype == np.float32
    assert np.array_equal(first, second)


def test_a_window_and_a_size_are_what_they_say() -> None:
    pipeline = _pipeline(
        (10, 15), ("ScaleIntensityRange", {"a_min": -50, "a_max": 150}), ("Resize", {"spatial_size": [10, 15]})
    )
    flat, _ = pipeline(np.full((1, 20, 30), 50, np.float32))
    assert np.allclose(flat, 0.5)
    low, _ = pipeline(np.full((1, 20, 30), -500, np.float32))
    assert np.array_equal(low, np.zeros((1, 10, 15), np.float32))
    checks = np.indices((20, 30)).sum(axis=0)[None].astype(np.float32) % 2 * 200 - 50
    assert np.allclose(pipeline(checks)[0], 0.5), "areas are averaged"


def test_a_volume_is_turned_and_resampled_by_its_place_in_space() -> None:
    affine = np.diag([-1.0, -1.0, 4.0, 1.0])
    turned = _pipeline(VOLUME.shape[1:], ("Orientation", {"axcodes": "RAS"}))
    assert np.array_equal(turned(VOLUME, affine=affine)[0], VOLUME[:, ::-1, ::-1])
    finer = _pipeline((10, 12, 15), ("Spacing", {"pixdim": [1, 1, 2]}))
    assert finer(VOLUME, affine=np.diag([1.0, 1.0, 4.0, 1.0]))[0].shape == (1, 10, 12, 15)
    with pytest.raises(TransformError, match="knows its place in space"):
        finer(VOLUME)


def test_a_mask_goes_where_its_picture_goes_and_keeps_its_indices() -> None:
    mask = np.zeros((20, 30), np.int64)
    mask[5:15, 10:20] = 3
    picture = mask[None].astype(np.float32)
    pipeline = _pipeline(
        (16, 16),
        ("CropForeground", {"margin": 2}),
        ("Resize", {"spatial_size": [16, 16]}),
        ("ScaleIntensity", {"minv": 0, "maxv": 3}),
    )
    seen, told = pipeline(picture, mask)
    assert told is not None
    assert set(np.unique(told)) == {0, 3}
    assert float(np.abs(seen[0] - told).mean()) < 0.4
    with pytest.raises(TransformError, match="the size of its picture"):
        pipeline(picture, mask[1:])


def test_what_cannot_be_brought_to_the_tasks_size_is_refused_by_its_name() -> None:
    with pytest.raises(TransformError, match="give 20 x 30 pixels, and the task's input has 16 x 16"):
        _pipeline((16, 16))(PICTURE)
    with pytest.raises(TransformError, match=r"CropForeground (leaves nothing|cannot take)"):
        _pipeline((20, 30), ("CropForeground", {"threshold": 1e6}))(PICTURE)
    with pytest.raises(TransformError, match="not finite"):
        _pipeline((20, 30))(np.full((1, 20, 30), np.nan, np.float32))
    with pytest.raises(ValueError, match="fixed transforms alone"):
        _pipeline((20, 30), ("RandFlip", {"spatial_axis": 0}))


def test_memory_that_runs_out_is_no_fault_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(transforms, "_made", lambda *_, **__: full)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        _pipeline((20, 30), ("ScaleIntensity", {}))(PICTURE)


def _augmentation(*names: str) -> Augmentation:
    return Augmentation(tuple(TransformSpec(name, GIVEN.get(name, {"prob": 1.0})) for name in names), (20, 20))


SQUARE = PICTURE[:, :, :20]


@pytest.mark.parametrize("name", AUGMENTATION)
def test_a_view_is_a_function_of_its_seed_and_moves_no_global_generator(name: str) -> None:
    augmentation = _augmentation(name)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    seeds = range(8)
    views = [augmentation(SQUARE, None, seed)[0] for seed in seeds]
    again = [augmentation(SQUARE, None, seed)[0] for seed in reversed(seeds)]
    assert all(np.array_equal(view, other) for view, other in zip(views, reversed(again), strict=True))
    assert not all(np.array_equal(view, SQUARE) for view in views)
    if name != "RandFlip":
        assert len({view.tobytes() for view in views}) > 1
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("name", AUGMENTATION)
def test_every_augmentation_takes_volumes(name: str) -> None:
    spec = TransformSpec(name, GIVEN.get(name, {"prob": 1.0}))
    view, _ = Augmentation((spec,), (10, 10, 8))(VOLUME[:, :, :10], None, 3)
    assert view.shape == (1, 10, 10, 8)


def test_a_mask_is_turned_as_its_picture_is() -> None:
    mask = (np.indices((20, 20))[1] > 12).astype(np.int64)
    every = _augmentation("RandFlip", "RandRotate90", "RandAffine", "RandZoom")
    for seed in range(6):
        view, told = every(mask[None].astype(np.float32), mask, seed)
        assert told is not None
        assert told.dtype == np.int64
        assert set(np.unique(told)) <= {0, 1}
        assert float(np.abs(view[0] - told).mean()) < 0.12
    values, same = _augmentation("RandGaussianNoise", "RandAdjustContrast")(mask[None].astype(np.float32), mask, 1)
    assert np.array_equal(same, mask)
    assert not np.array_equal(values[0], mask)


def test_a_quarter_turn_needs_a_square() -> None:
    spec = TransformSpec("RandRotate90")
    with pytest.raises(TransformError, match="first two sides are equal"):
        Augmentation((spec,), (20, 30))
    with pytest.raises(ValueError, match="random transforms alone"):
        Augmentation((TransformSpec("ScaleIntensity"),), (20, 20))


def test_a_seed_is_of_the_patient_the_step_and_the_view_alone() -> None:
    keys = [
        (b"a", "p1", 1, 0), (b"b", "p1", 1, 0), (b"a", "p2", 1, 0), (b"a", "p1", 2, 0), (b"a", "p1", 1, 1),
        (b"a", "p11", 1, 0), (b"a", "p1", 11, 0),
    ]  # fmt: skip
    seeds = [view_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [view_seed(*key) for key in keys]
    assert all(0 <= seed < 1 << 32 for seed in seeds)
