"""A mask is laid on the volume that it is of, voxel by voxel, or refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import highdicom
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom import Dataset

from agent.deidentify.masks import clean_mask
from agent.deidentify.prescan import EXPLICIT_LE
from agent.volumes.segmentations import MaskMisfitError, segments_of, segments_on
from agent.volumes.volume_io import VolumeSource, read_bytes
from tests.support.instances import WHO, written
from tests.support.segmentations import LISTED, abdomen, drawing, mask


def kept(source: Dataset) -> bytes:
    out = io.BytesIO()
    clean_mask(source, EXPLICIT_LE, WHO, LISTED).dataset.save_as(out, enforce_file_format=True)
    return out.getvalue()


def volume(series: list[Dataset]) -> VolumeSource:
    return read_bytes([written(WHO.apply(one)) for one in series])


def as_volume(drawn: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(slices, rows, columns) in the axes of a volume's file: columns, rows, slices."""
    return drawn.transpose(2, 1, 0)


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
def test_segments_lie_where_they_were_drawn_on_slices_without_any_too(kind: str) -> None:
    found = segments_on(kept(mask(abdomen(), kind=kind)), volume(abdomen()))
    assert set(found) == {"liver", "mass"}
    assert np.array_equal(found["liver"], as_volume(drawing()) == 1)
    assert np.array_equal(found["mass"], as_volume(drawing()) == 2)


def test_the_order_of_the_slices_and_of_the_frames_says_nothing() -> None:
    found = segments_on(kept(mask(abdomen()[::-1], drawing()[::-1])), volume(abdomen()[2:] + abdomen()[:2]))
    assert np.array_equal(found["liver"], as_volume(drawing()) == 1)


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
@pytest.mark.parametrize("places", [[1, 3], [0, 4], [2]])
def test_segments_on_slices_that_are_no_neighbours_lie_where_they_were_drawn(places: list[int], kind: str) -> None:
    drawn = np.zeros((5, 64, 64), np.uint8)
    drawn[places, 10:20, 30:50] = 1
    found = segments_on(kept(mask(abdomen(), drawn, kind=kind)), volume(abdomen()))
    assert np.array_equal(found["liver"], as_volume(drawn) == 1)


def test_segments_that_overlap_are_both_there() -> None:
    drawn = np.zeros((5, 64, 64, 2), np.uint8)
    drawn[2, 10:20, 10:20, 0] = 1
    drawn[2, 15:25, 15:25, 1] = 1
    found = segments_on(kept(mask(abdomen(), drawn)), volume(abdomen()))
    assert (found["liver"] & found["mass"]).sum() == 25


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
def test_a_mask_of_another_frame_of_reference_is_refused_although_its_grid_is_the_same(kind: str) -> None:
    other = abdomen(frame="1.4.2")
    with pytest.raises(MaskMisfitError, match="mask_frame"):
        segments_on(kept(mask(other, kind=kind)), volume(abdomen()))
    with pytest.raises(MaskMisfitError, match="mask_frame"):
        segments_of(kept(mask(other, kind=kind)), WHO.apply(abdomen()[1]))


def test_the_library_alone_would_take_it() -> None:
    """Red control: what our comparison is for (highdicom 0.28.2)."""
    loaded = highdicom.get_volume_from_series(abdomen())
    foreign = highdicom.seg.Segmentation.from_dataset(mask(abdomen(frame="1.4.2")))
    foreign.get_volume(combine_segments=True).match_geometry(loaded)


CHANGES: dict[str, Callable[[Dataset, int], Any]] = {
    "moved by a third of a millimetre": lambda s, n: setattr(s, "ImagePositionPatient", [0.3, 0, 3.0 * n]),
    "of another distance of slices": lambda s, n: setattr(s, "ImagePositionPatient", [0, 0, 2.0 * n]),
    "of another distance of pixels": lambda s, n: setattr(s, "PixelSpacing", [0.4, 0.4]),
    "turned by six degrees": lambda s, n: setattr(
        s, "ImageOrientationPatient", [0.995, 0.0999, 0, -0.0999, 0.995, 0]
    ),
    "turned by a tenth of a degree": lambda s, n: setattr(
        s, "ImageOrientationPatient", [0.999998, 0.001745, 0, -0.001745, 0.999998, 0]
    ),
}


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_mask_on_another_grid_is_refused(what: str, kind: str) -> None:
    other = abdomen()
    for number, one in enumerate(other):
        CHANGES[what](one, number)
        if "slices" in what:
            one.SliceThickness = 2
    with pytest.raises(MaskMisfitError, match="mask_geometry"):
        segments_on(kept(mask(other, kind=kind)), volume(abdomen()))


def test_what_is_no_mask_is_refused() -> None:
    with pytest.raises(MaskMisfitError, match="mask_frame"):
        segments_on(written(WHO.apply(abdomen()[0])), volume(abdomen()))


# -- on one image


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
def test_the_frames_of_an_image_are_those_that_refer_to_it(kind: str) -> None:
    payload = kept(mask(abdomen(), kind=kind))
    for number, one in enumerate(abdomen()):
        found = segments_of(payload, WHO.apply(one))
        assert np.array_equal(found["liver"], drawing()[number] == 1)
        assert np.array_equal(found["mass"], drawing()[number] == 2)


def test_an_image_of_another_size_is_refused() -> None:
    header = WHO.apply(abdomen()[1])
    header.Rows = 32
    with pytest.raises(MaskMisfitError, match="mask_geometry"):
        segments_of(kept(mask(abdomen())), header)


def test_what_is_read_is_the_vaults_own_file() -> None:
    assert pydicom.dcmread(io.BytesIO(kept(mask(abdomen())))).PatientIdentityRemoved == "YES"
