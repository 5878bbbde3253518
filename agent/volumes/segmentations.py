"""Segments of de-identified masks on the grid of the volume that they are of.

highdicom reads the frames into a volume and brings it onto the other grid. It does not compare frames of reference
(0.28.2), and its tolerance is one number for lengths and for the cosines of angles, so both are compared here: two
scans of one patient may have equal grids and show different places, and every corner must lie where it should.
"""

from __future__ import annotations

import io
from typing import Final

import highdicom
import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import Dataset

from agent.deidentify import nifti
from agent.deidentify.attributes import numbers, text
from agent.deidentify.nifti_masks import NEAR, apart, named_segments
from agent.deidentify.segment_list import SEGMENTATION
from agent.volumes.volume_io import VolumeSource, read_bytes
from protos.common.errors import RefusedError

_TO_LPS: Final = np.diag([-1.0, -1.0, 1.0, 1.0])
_TOLERANCE: Final = 1e-3  # of highdicom, so that rounded numbers are matched at all


class MaskMisfitError(RefusedError, ValueError):
    """A mask is not on the grid of its series. ``code`` says in which way."""

    def __init__(self, code: str) -> None:
        """``code``: ``mask_frame`` or ``mask_geometry``."""
        super().__init__(code)
        self.code = code


def segments_on(payload: bytes, source: VolumeSource) -> dict[str, NDArray[np.bool_]]:
    """Every segment of a mask on the grid of a volume, in the volume's own axes.

    Args:
        payload: a de-identified mask, DICOM or NIfTI, as the vault has it.
        source: the series that it is of.
    Returns:
        Name -> (i, j, k); segments of one name are one.
    Raises:
        MaskMisfitError: ``mask_frame``, another frame of reference, or none; ``mask_geometry``, another grid.
    """
    if nifti.looks_like_nifti(payload):
        return _of_nifti(payload, source)
    dataset, frame, names = _opened(payload, source.frame_of_reference)
    grid = highdicom.VolumeGeometry(
        _TO_LPS @ source.volume.affine, source.volume.values.shape, "PATIENT", frame_of_reference_uid=frame
    )
    try:
        _say_distance(dataset, grid.affine)
        mask = highdicom.seg.Segmentation.from_dataset(dataset, copy=False)
        drawn = mask.get_volume(combine_segments=False, dtype=np.uint8, rescale_fractional=False)
        laid = drawn.match_geometry(grid, tol=_TOLERANCE)
    except (ValueError, RuntimeError, IndexError):
        raise MaskMisfitError("mask_geometry") from None
    if not apart(np.asarray(laid.affine), grid.affine, source.volume.values.shape) <= NEAR:
        raise MaskMisfitError("mask_geometry")
    found: dict[str, NDArray[np.bool_]] = {}
    for at, number in enumerate(drawn.get_channel_values("ReferencedSegmentNumber")):
        name = names[int(str(number))]
        found[name] = found.get(name, False) | (laid.array[..., at] > 0)
    return found


def _of_nifti(payload: bytes, source: VolumeSource) -> dict[str, NDArray[np.bool_]]:
    """Of a NIfTI mask: it has no frame of reference, is of a NIfTI volume alone, and is compared by its grid."""
    if source.kind != "nifti":
        raise MaskMisfitError("mask_frame")
    names, mask = named_segments(payload), read_bytes([payload]).volume
    shape = source.volume.values.shape
    if mask.values.shape != shape or not apart(mask.affine, source.volume.affine, shape) <= NEAR:
        raise MaskMisfitError("mask_geometry")
    return {name: mask.values == number for number, name in names.items()}


def _say_distance(mask: Dataset, affine: NDArray[np.float64]) -> None:
    """State the distance of the volume's slices: of those that a mask has, no two may be neighbours."""
    (shared,) = mask.SharedFunctionalGroupsSequence
    row, column = np.array(numbers(shared.PlaneOrientationSequence[0], "ImageOrientationPatient")).reshape(2, 3)
    along = affine[:3, :3].T @ np.cross(row, column)  # of each axis of the volume, in mm along the mask's normal
    shared.PixelMeasuresSequence[0].SpacingBetweenSlices = f"{np.abs(along).max():.10g}"


def segments_of(payload: bytes, header: Dataset) -> dict[str, NDArray[np.bool_]]:
    """Every segment of a mask that was drawn on one image, by the instance that its frames refer to.

    Args:
        payload: a de-identified segmentation object, as the vault has it.
        header: of the de-identified image.
    Returns:
        Name -> (h, w); a segment that was drawn on other images of the series only is empty here.
    Raises:
        MaskMisfitError: ``mask_frame``, another frame of reference, or none; ``mask_geometry``, another size.
    """
    dataset, _, names = _opened(payload, text(header, "FrameOfReferenceUID"))
    size = (int(header.Rows), int(header.Columns))
    if (int(dataset.Rows), int(dataset.Columns)) != size:
        raise MaskMisfitError("mask_geometry")
    found = {name: np.zeros(size, np.bool_) for name in names.values()}
    bits = dataset.pixel_array.reshape(-1, *size)
    for group, drawn in zip(dataset.PerFrameFunctionalGroupsSequence, bits, strict=True):
        sources = [s for d in group.get("DerivationImageSequence") or [] for s in d.SourceImageSequence]
        if any(text(one, "ReferencedSOPInstanceUID") == text(header, "SOPInstanceUID") for one in sources):
            found[names[int(group.SegmentIdentificationSequence[0].ReferencedSegmentNumber)]] |= drawn > 0
    return found


def _opened(payload: bytes, frame: str) -> tuple[Dataset, str, dict[int, str]]:
    """The mask, its frame of reference, which is the wanted one, and its segments' names."""
    dataset = pydicom.dcmread(io.BytesIO(payload))
    own = text(dataset, "FrameOfReferenceUID")
    if text(dataset, "SOPClassUID") != SEGMENTATION or not own or own != frame:
        raise MaskMisfitError("mask_frame")
    return dataset, own, {int(item.SegmentNumber): text(item, "SegmentLabel") for item in dataset.SegmentSequence}
