"""Which real picture a made one is most like, and how pictures come to the screen."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from agent.console.image_rendering import HOTTEST, LARGEST, LEAST, heat, png, unpack
from agent.console.nearest_image import SIDE, difference, fetch, image_vector, rms_difference, search
from protos.artifacts.arrays import pack_images
from protos.artifacts.byte_source import ArtifactFormatError
from protos.artifacts.shards import Dicom, Nifti, pack_shard

RNG = np.random.default_rng(0)


def cohort(patients: int = 6, each: int = 3) -> list[tuple[str, NDArray[np.float32]]]:
    return [(f"p{n}", RNG.random((48, 40)).astype(np.float32)) for n in range(patients) for _ in range(each)]


def as_made(picture: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.rint(picture * 255).astype(np.uint8)


def test_a_copy_of_a_patients_picture_is_found_first_and_is_that_patients() -> None:
    real = cohort()
    strange = RNG.integers(0, 256, (3, 48, 40)).astype(np.uint8)
    made = np.concatenate([strange[:1], as_made(real[7][1])[None], strange[1:]])
    found = search(made, real)
    assert (found.nearest[0].made, found.nearest[0].person, found.nearest[0].place) == (1, "p2", 1)
    assert found.nearest[0].distance < 0.6 < found.nearest[1].distance
    assert {one.made for one in found.nearest} == {0, 1, 2, 3}


def test_the_search_says_the_same_as_comparing_every_pair_by_hand() -> None:
    real, made = cohort(), RNG.integers(0, 256, (5, 48, 40)).astype(np.uint8)
    for one in search(made, real).nearest:
        mine = image_vector(made[one.made])
        each = [float(np.sqrt(np.mean((mine - image_vector(picture * 255)) ** 2))) for _, picture in real]
        assert one.distance == pytest.approx(min(each), rel=1e-3)
        assert one.person == real[int(np.argmin(each))][0]


def test_the_picture_that_was_found_is_the_picture_that_is_shown() -> None:
    real = cohort()
    made = np.stack([as_made(picture) for _, picture in real[3:9]])
    wanted = search(made, real).nearest
    only = [one for one in real if one[0] in {w.person for w in wanted}]
    shown = dict(fetch(wanted, only))
    assert all(np.array_equal(shown[one], made[one.made]) for one in wanted)


def test_pictures_of_one_patient_in_two_projects_are_told_apart() -> None:
    real = [*cohort(2, 2), *cohort(2, 2)]
    made = np.stack([as_made(real[-1][1])])
    (one,) = search(made, real).nearest
    assert (one.person, one.place) == ("p1", 3)
    assert np.array_equal(dict(fetch([one], real))[one], made[0])


def test_strangers_are_other_patients_and_without_any_nothing_is_claimed() -> None:
    twin = RNG.random((48, 40)).astype(np.float32)
    other = RNG.random((48, 40)).astype(np.float32)
    near = search(np.stack([as_made(twin)]), [("a", twin), ("a", twin), ("b", other)])
    between = float(np.sqrt(np.mean((image_vector(twin * 255) - image_vector(other * 255)) ** 2)))
    assert near.strangers == pytest.approx(between, rel=1e-3)
    assert np.isnan(search(np.stack([as_made(twin)]), [("a", twin), ("a", other)]).strangers)


def test_an_empty_vault_is_no_distance() -> None:
    found = search(np.zeros((2, 8, 8), np.uint8), [])
    assert (found.nearest, found.real) == ((), 0)
    assert np.isnan(found.strangers)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (33, 31), (512, 512), (64, 64, 3), (7, 500, 3)])
def test_any_picture_is_made_small(shape: tuple[int, ...]) -> None:
    made = image_vector(RNG.integers(0, 256, shape).astype(np.uint8))
    assert 0 < made.size <= SIDE * SIDE
    assert 0 <= made.min() <= made.max() <= 255.01


def test_the_map_is_of_the_difference_and_black_where_there_is_none() -> None:
    a = np.full((4, 4, 3), 100, np.uint8)
    b = a.copy()
    b[1, 2] = (100, 160, 90)
    assert difference(a, b)[1, 2] == 60
    assert rms_difference(a, a) == 0
    colours = heat(difference(a, b))
    assert colours[0, 0].tolist() == [0, 0, 4]
    assert int(colours[1, 2].sum()) > 400
    assert np.array_equal(heat(np.full((1, 1), 1e9, np.float32)), heat(np.full((1, 1), HOTTEST, np.float32)))
    assert np.array_equal(heat(np.full((1, 1), np.nan, np.float32)), heat(np.full((1, 1), HOTTEST, np.float32)))


def test_brighter_is_more_along_the_whole_scale() -> None:
    line = heat(np.linspace(0, HOTTEST, 50, dtype=np.float32)[None])[0].astype(float) @ [0.299, 0.587, 0.114]
    assert (np.diff(line) > 0).all()


@pytest.mark.parametrize("side", [4, 192, 2000])
def test_a_picture_fits_the_screen(side: int) -> None:
    shown = Image.open(io.BytesIO(png(np.zeros((side, side), np.uint8))))
    assert LEAST <= max(shown.size) <= LARGEST


def test_every_form_of_a_set_can_be_looked_at() -> None:
    grey = RNG.integers(0, 256, (2, 9, 8)).astype(np.uint8)
    assert np.array_equal(unpack(pack_images(grey, ("a", "b")))[0], grey)
    colour = RNG.integers(0, 256, (2, 9, 8, 3)).astype(np.uint8)
    assert np.array_equal(unpack(pack_images(colour, ("a", "b")))[0], colour)
    dicom = pack_shard(list(grey), ("a", "b"), Dicom("OT", (1000, 1000)))
    assert np.array_equal(unpack(dicom)[0], grey)
    deep = [np.arange(72, dtype=np.uint16).reshape(9, 8) * 50]
    found, labels = unpack(pack_shard(deep, ("c",), Dicom("OT", (1000, 1000))))
    assert (found.min(), found.max(), labels) == (0, 255, ("c",))


def test_of_a_volume_the_middle_plane_is_shown_with_the_head_up() -> None:
    voxels = np.zeros((5, 4, 6), np.int16)
    voxels[2, 1, 5] = 100  # x in the middle, y 1, z at the top
    shard = pack_shard([voxels], ("",), Nifti((1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)))
    found, _ = unpack(shard)
    assert found.shape == (1, 6, 4)
    assert found[0, 0, 1] == 255


def test_what_is_no_set_is_not_shown() -> None:
    with pytest.raises(ArtifactFormatError):
        unpack(b"a model, or anything else" * 100)
