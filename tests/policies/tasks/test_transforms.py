from __future__ import annotations

import pickle
from typing import Any

import pytest

from policies.tasks.bounds import TaskError
from policies.tasks.transforms import AUGMENTATION, INPUT, TransformSpec, read_transforms

GIVEN: dict[str, dict[str, Any]] = {  # what has no default
    "Spacing": {"pixdim": [1, 1, 2.5]},
    "Resize": {"spatial_size": [64, 64]},
    "ScaleIntensityRange": {"a_min": -1000, "a_max": 400},
    "CenterSpatialCrop": {"roi_size": [32, 32]},
    "SpatialPad": {"spatial_size": [32, 32]},
    "ResizeWithPadOrCrop": {"spatial_size": [32, 32]},
    "RandFlip": {"spatial_axis": 1},
}


@pytest.mark.parametrize("name", [*INPUT, *AUGMENTATION])
def test_a_transform_reads_back_from_its_canonical_json_and_from_a_pickle(name: str) -> None:
    spec = TransformSpec(name, GIVEN.get(name, {}))
    assert TransformSpec.from_json(spec.to_json()) == spec
    assert TransformSpec.from_table(spec.to_table()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.random is (name in AUGMENTATION)


def test_a_whole_number_and_the_same_float_are_one_task() -> None:
    whole, real = ({"name": "ScaleIntensityRange", "a_min": low, "a_max": 400} for low in (-1000, -1000.0))
    assert TransformSpec.from_table(whole).to_json() == TransformSpec.from_table(real).to_json()


@pytest.mark.parametrize(
    ("table", "problems"),
    [
        ({"name": "Lambda", "func": "x"}, ["t.0.name: must be one of"]),
        ({"name": "LoadImage"}, ["t.0.name: must be one of"]),
        ({"name": ["Resize"]}, ["t.0.name: must be one of"]),
        ({}, ["t.0.name: must be one of"]),
        (3, ["t.0: must be a table"]),
        ({"name": "Resize"}, ["t.0.spatial_size: missing"]),
        ({"name": "Resize", "spatial_size": [0, 8]}, ["t.0.spatial_size: must be a whole number"]),
        ({"name": "Resize", "spatial_size": [8, 8, 8]}, ["t.0.spatial_size: must have 2 numbers for 2-D"]),
        ({"name": "Resize", "spatial_size": [8, 8], "mode": "area"}, ["t.0.mode: unknown key"]),
        ({"name": "ScaleIntensityRange", "a_min": 3, "a_max": 3}, ["t.0.a_min: must be below a_max"]),
        (
            {"name": "ScaleIntensityRange", "a_min": "x", "clip": 1},
            ["a_max: missing", "a_min: must", "clip: must be"],
        ),
        ({"name": "ScaleIntensityRange", "a_min": float("nan"), "a_max": 1}, ["t.0.a_min: must be a number"]),
        ({"name": "Orientation", "axcodes": "ABC"}, ["t.0.axcodes: must be one of RAS, LPS"]),
        ({"name": "Orientation"}, ["t.0.name: Orientation is of volumes"]),
        ({"name": "RandFlip", "spatial_axis": 1}, ["t.0.name: RandFlip draws numbers"]),
    ],
)
def test_what_is_not_on_the_list_is_refused_with_every_key(table: Any, problems: list[str]) -> None:
    with pytest.raises(TaskError) as refused:
        read_transforms([table], "t", 2, random=False)
    for problem in problems:
        assert problem in str(refused.value)


def test_an_augmentation_is_no_place_for_what_is_fixed_and_fits_the_axes() -> None:
    with pytest.raises(TaskError, match=r"t\.0\.name: Resize draws no numbers.*t\.1\.spatial_axis: must be below 2"):
        read_transforms(
            [{"name": "Resize", "spatial_size": [8, 8]}, {"name": "RandFlip", "spatial_axis": 2}], "t", 2, random=True
        )
    with pytest.raises(TaskError, match=r"t\.0\.sigma: must be a low and a high number"):
        read_transforms([{"name": "RandGaussianSmooth", "sigma": [2, 1]}], "t", 2, random=True)


def test_one_list_is_bounded_and_all_its_problems_are_told_at_once() -> None:
    with pytest.raises(TaskError, match="t: must be a list of at most 16 tables"):
        read_transforms([{"name": "ScaleIntensity"}] * 17, "t", 2, random=False)
    with pytest.raises(TaskError, match="t: must be a list"):
        read_transforms("Resize", "t", 2, random=False)
    with pytest.raises(TaskError, match=r"t\.0\.name.*t\.1\.name"):
        read_transforms([{"name": "x"}, {"name": "y"}], "t", 2, random=False)


def test_a_default_fits_pictures_and_volumes() -> None:
    spec = TransformSpec("RandAffine")
    assert spec.misfits(2) == spec.misfits(3) == []
    assert spec.for_axes("rotate_range", 3) == (0.1, 0.1, 0.1)
    assert spec.for_axes("shear_range", 3) == (0.0,) * 6
    assert TransformSpec("RandAffine", {"translate_range": [1, 2]}).misfits(3)
