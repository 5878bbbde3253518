"""Why a volume is not de-faced: a closed list of codes, each with a sentence for the operator.

A refusal carries its code and nothing of the volume: no value, no name (P14). Whatever is refused keeps its face and
stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from protos.common.errors import RefusedError

REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "unreadable": "The file is broken, cut short or written in a way this agent does not decode. Export it again,"
        " uncompressed.",
        "too_large": "More voxels or bytes than any scan of a head has.",
        "not_a_volume": "Not one three-dimensional grid of numbers. Give a NIfTI file or the DICOM slices of one"
        " series.",
        "four_dimensional": "A time series or several volumes in one file. Split it, and give one volume at a time.",
        "bad_affine": "Its grid has no valid position: a singular, sheared or missing affine, or orientation codes"
        " that make no sense. Export it again.",
        "not_finite": "It contains values that are not numbers. Export it again.",
        "too_coarse": "Its slices are too thick or too far apart to find a face. Deface it together with a"
        " three-dimensional series of the same study.",
        "missing_slices": "Slices are missing, doubled or not evenly spaced. Copy the whole series again.",
        "mixed_series": "Its slices do not belong to one volume: other sizes, orientations or spacings.",
        "no_head": "No head was found in it: a phantom, another part of the body, or nothing.",
        "part_of_head": "Only a part of the head is in the image, so the position of the face is unknown.",
        "brain_extracted": "The skull was removed before, so there is no face. Nothing was changed.",
        "no_face": "The face is outside the image. Nothing was changed.",
        "brain_volume": "The brain that was found is smaller or larger than any brain. Give a mask of your own.",
        "brain_disagreement": "The two ways to find the brain do not agree. Give a mask of your own.",
        "brain_asymmetric": "The brain that was found is not symmetric. Give a mask of your own.",
        "brain_at_skin": "The brain that was found reaches the skin. Give a mask of your own.",
        "mask_does_not_fit": "The mask of the brain has another grid than the volume, or is empty.",
        "no_reference": "No series of the study is fine enough to find the face by. Have a three-dimensional series"
        " sent with it.",
        "not_registered": "It could not be laid onto the template: niimath is missing, failed, or found no head in"
        " it.",
        "other_frame": "A series of the study has another frame of reference, and could not be aligned.",
        "nothing_changed": "The method changed nothing, so the face may still be there.",
        "fault": "The program failed on it, and the face was not removed. Report this, with the kind of scanner.",
        "brain_changed": "The method would have changed the brain. This is a bug: report it.",
        "seen_in_training": "Nobody vouches that this network saw no patient of yours. Name its SHA-256 in "
        "public_components of site.toml.",
    }
)


class NotDefacedError(RefusedError, ValueError):
    """A volume keeps its face. ``code`` is a key of ``REASONS``; nothing of the volume is in the exception."""

    def __init__(self, code: str) -> None:
        """Take a known code only."""
        if code not in REASONS:
            raise ValueError("unknown reason code")
        super().__init__(f"{code}: {REASONS[code]}")
        self.code = code
