"""A NIfTI mask is made anew: the site's numbers and names on the grid of its volume, and no word of the file."""

from __future__ import annotations

from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray

from agent.deidentify import nifti, nifti_masks
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.identifying_values import of_patient
from agent.deidentify.nifti_masks import clean_mask, named_segments
from agent.deidentify.residual_check import residual
from agent.deidentify.segment_list import Segment

LISTED = (
    Segment("liver", "10200004", nifti_values=(1, 7)),
    Segment("spleen", "78961009"),  # no number: it comes in with DICOM SEG alone
    Segment("mass", "4147007", nifti_values=(2,)),
)
GRID = np.array([[-2.0, 0, 0, 30], [0, 2, 0, -40], [0, 0, 3, 5], [0, 0, 0, 1]])
DRAWN = np.random.default_rng(0).choice([0, 1, 2, 7], (6, 5, 4))
MOST = 10_000


def file(values: NDArray[Any], affine: NDArray[Any] = GRID, kind: Any = nibabel.Nifti1Image, **header: Any) -> bytes:
    image = kind(values, affine)
    image.header["descrip"] = b"PLANTED-DESCRIPTION"
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension(6, b"PLANTED-COMMENT P-77"))
    for key, value in header.items():
        image.header[key] = value
    raw: bytes = image.to_bytes()
    return raw


def volume(shape: tuple[int, ...] = (6, 5, 4), affine: NDArray[Any] = GRID, kind: Any = nibabel.Nifti1Image) -> bytes:
    values = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    return nifti.clean(file(values, affine, kind), MOST)


def cleaned(raw: bytes, only: str = "", of: bytes | None = None) -> bytes:
    return clean_mask(raw, volume() if of is None else of, LISTED, only, MOST)


def read(payload: bytes) -> NDArray[Any]:
    return np.asarray(nibabel.Nifti1Image.from_bytes(payload).dataobj)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, ">f8", ">i4"])
def test_numbers_become_those_of_the_listed_segments_whatever_their_type(dtype: Any) -> None:
    payload = cleaned(file(DRAWN.astype(dtype)))
    assert named_segments(payload) == {1: "liver", 2: "mass"}
    made = read(payload)
    assert made.dtype == np.uint8
    assert np.array_equal(made == 1, (DRAWN == 1) | (DRAWN == 7))
    assert np.array_equal(made == 2, DRAWN == 2)
    assert np.array_equal(nibabel.Nifti1Image.from_bytes(payload).affine, GRID)


def test_a_nifti_2_file_is_read_as_well() -> None:
    payload = cleaned(file(DRAWN.astype(np.uint8), kind=nibabel.Nifti2Image), of=volume(kind=nibabel.Nifti2Image))
    assert named_segments(payload) == {1: "liver", 2: "mass"}
    assert np.array_equal(np.asarray(nibabel.Nifti2Image.from_bytes(payload).dataobj) == 2, DRAWN == 2)


def test_scaled_numbers_are_what_they_mean() -> None:
    raw = file((DRAWN * 100).astype(np.int16), scl_slope=0.01, scl_inter=0)
    assert np.array_equal(read(cleaned(raw)) == 2, DRAWN == 2)


def test_a_mask_whose_name_says_its_segment_has_that_one_as_1() -> None:
    payload = cleaned(file((DRAWN == 2).astype(np.uint8)), "spleen")
    assert named_segments(payload) == {1: "spleen"}
    assert np.array_equal(read(payload) == 1, DRAWN == 2)


def test_a_mask_of_nothing_says_that_nothing_is_there() -> None:
    payload = cleaned(file(np.zeros((6, 5, 4), np.uint8)))
    assert named_segments(payload) == {1: "liver", 2: "mass"}
    assert not read(payload).any()


PLANTED = (b"PLANTED", b"P-77")


def test_no_word_of_the_file_is_in_what_is_kept() -> None:
    raw = file(DRAWN.astype(np.uint8)) + b"PLANTED-TAIL"
    payload = cleaned(raw)
    for word in PLANTED:
        assert word in raw, "it was there to be found"
        assert word not in payload
    assert not residual(of_patient("P-77"), payload)


def test_the_leak_test_sees_a_writer_that_keeps_the_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control."""
    written = nifti.written

    def leaky(grid: nifti.CheckedNifti, stored: Any, scale: Any, words: bytes = b"") -> bytes:
        return written(grid, stored, scale, words + b"PLANTED-COMMENT P-77")

    monkeypatch.setattr(nifti_masks.nifti, "written", leaky)
    payload = cleaned(file(DRAWN.astype(np.uint8)))
    assert b"PLANTED" in payload
    assert residual(of_patient("P-77"), payload)


def moved(axis: int, by: float) -> NDArray[np.float64]:
    other = GRID.copy()
    other[axis, 3] += by
    return other


def turned() -> NDArray[np.float64]:
    other = GRID.copy()
    other[:3, :3] = other[:3, :3] @ [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    return other


SMALL = DRAWN.astype(np.uint8)
REFUSED: dict[str, tuple[str, bytes]] = {
    "fewer slices": ("mask_of_other_shape", file(SMALL[..., :3])),
    "the axes in another order": ("mask_of_other_shape", file(np.swapaxes(SMALL, 0, 1))),
    "several times": ("mask_of_other_shape", file(np.stack([SMALL, SMALL], axis=3))),
    "moved by a third of a millimetre": ("mask_of_other_place", file(SMALL, moved(0, 0.3))),
    "moved by a slice": ("mask_of_other_place", file(SMALL, moved(2, 3))),
    "another distance of voxels": ("mask_of_other_place", file(SMALL, GRID @ np.diag([1, 1, 1.02, 1]))),
    "turned": ("mask_of_other_place", file(SMALL, turned())),
    "left for right": ("mask_of_other_place", file(SMALL, np.diag([-1, 1, 1, 1]) @ GRID)),
    "no affine": ("mask_of_other_place", file(SMALL, np.eye(4))),
    "probabilities": ("mask_of_probabilities", file((DRAWN / 10).astype(np.float32))),
    "scaled to no whole numbers": ("mask_of_probabilities", file(SMALL, scl_slope=0.5, scl_inter=0)),
    "a number that no segment has": ("segment_not_listed", file((DRAWN + 2 * (DRAWN == 7)).astype(np.uint8))),
    "a negative number": ("segment_not_listed", file((DRAWN - 1).astype(np.int16))),
    "a large number": ("segment_not_listed", file((DRAWN * 20_000).astype(np.int32))),
    "not a number": ("undecodable", file(np.where(DRAWN == 7, np.nan, DRAWN).astype(np.float32))),
    "complex numbers": ("undecodable", file(DRAWN.astype(np.complex64))),
    "cut": ("truncated", file(SMALL)[:-1]),
    "no NIfTI": ("not_dicom", b"x" * 1000),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_mask_that_does_not_fit_is_refused_with_a_code(what: str) -> None:
    code, raw = REFUSED[what]
    with pytest.raises(FileRejectedError) as caught:
        cleaned(raw)
    assert caught.value.code == code


def test_a_hundredth_of_a_millimetre_is_the_same_place() -> None:
    cleaned(file(SMALL, moved(1, 0.01)))


def test_one_that_is_not_listed_or_has_no_numbers_stays_out() -> None:
    raw = file((DRAWN == 2).astype(np.uint8))
    for segments, only in ((LISTED, "kidney"), (LISTED[1:2], ""), ((), "")):
        with pytest.raises(FileRejectedError, match="segment_not_listed"):
            clean_mask(raw, volume(), segments, only, MOST)
    with pytest.raises(FileRejectedError, match="segment_not_listed"):
        cleaned(file(SMALL), "mass")  # a mask of one segment has the number 1 alone


def test_more_voxels_than_the_rules_allow_are_too_large() -> None:
    with pytest.raises(FileRejectedError, match="too_large"):
        clean_mask(file(SMALL), volume(), LISTED, "", 119)


@pytest.mark.parametrize("values", [(0,), (65_536,), (-1,)])
def test_a_number_that_no_mask_can_have_is_not_listed(values: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="nifti_values"):
        Segment("liver", "10200004", nifti_values=values)


def test_a_file_of_another_writer_has_no_names() -> None:
    with pytest.raises(ValueError, match="one comment"):
        named_segments(volume())
