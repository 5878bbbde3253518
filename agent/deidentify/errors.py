"""Why a file does not come in: a closed list of codes, each with a sentence for the operator.

A refusal carries its code and nothing of the file: no value, no name, no text of a parser (P14).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from protos.common.errors import RefusedError

REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "not_dicom": "Neither DICOM (with its 128-byte preamble) nor NIfTI. If it should be an image,"
        " export it from the PACS again. Otherwise there is nothing to do.",
        "not_a_file": "A link, socket or device. These are never followed. Put the file itself in the folder.",
        "unreadable": "The file could not be opened or read. Check its permissions and the disk.",
        "truncated": "The file ends before its contents do. Copy or export it again.",
        "malformed": "The structure breaks the DICOM or NIfTI standard. Export it again. If that does not help, ask"
        " the vendor of the device.",
        "too_large": "More bytes or pixels than the rules allow. Raise max_bytes or max_pixels if this is"
        " a real image.",
        "too_deep": "More nesting or elements than a real image has. Treat the file as hostile.",
        "incomplete": "An identifier that every image must have (SOP class, instance, study) is missing."
        " Export it again from the PACS.",
        "unsupported_encoding": "The transfer syntax or colour model is not one this agent decodes. Let the"
        " PACS send it uncompressed, as JPEG 2000, JPEG-LS, RLE or baseline JPEG.",
        "dicomdir": "The index of a medium (DICOMDIR), not an image. Nothing to do.",
        "not_an_image": "A report, plan, dose, waveform, document, segmentation or presentation state."
        " Leave such objects out of the export.",
        "no_pixels": "An image object without pixel data. Export it again with its pixels.",
        "sop_class_not_allowed": "This kind of object is not on the site's list. Add its SOP class to the"
        " rules if the protocol covers it.",
        "modality_not_allowed": "This modality is not on the site's list. Add it to the rules if the"
        " protocol covers it.",
        "burned_in_risk": "The image may show the patient's name: ultrasound, a captured screen, a derived"
        " or colour image, or marked as such. Let a person check it, or leave it out.",
        "missing_patient": "No patient identifier, or one that cannot be read as one plain text, so the patient"
        " cannot be counted once. Complete or correct it in the PACS and export again.",
        "undecodable": "The pixel data cannot be decoded or are inconsistent. Export it again, uncompressed.",
        "conflicting_instance": "This instance of the patient was already kept with other bytes. Find out which one"
        " is right, and remove the other.",
        "manufacturer_not_allowed": "The device's manufacturer is not on the site's list. Add it to the rules if"
        " the protocol covers it.",
        "inconsistent_series": "Its series holds instances of another study of the patient. Find out in the PACS"
        " which is right; the patient's whole series is held back until `cohort --lift`.",
        "opted_out": "The patient has opted out. Nothing to do; the file is not kept.",
        "residual_identifier": "An identifier of the patient is still in data that would be kept. Report this: the"
        " de-identification rules must cover it first.",
        "burned_in_text": "Text was found in the image. Let a person check the series, or add a rule that"
        " blanks the region.",
        "instance_mismatch": "The sender announced another object than the one it sent. Ask the vendor of the"
        " sending system.",
        "nifti_without_modality": "A NIfTI file does not say its modality. Set nifti_modality in ingest.toml.",
        "missing_from_medium": "The index of the medium lists this file, but it is missing. Copy the medium again.",
        "segment_not_listed": "A mask has a segment that the site does not list. Add it to [[segment]] in"
        " ingest.toml if the protocol covers it; of a NIfTI mask, its number to nifti_values.",
        "mask_of_probabilities": "A mask holds probabilities, not segments. Export it as BINARY or LABELMAP, or with"
        " whole numbers.",
        "mask_without_volume": "No one volume is found that a NIfTI mask is of. Put the volume in the folder, or name"
        " both: [nifti] in ingest.toml, Sources in the BIDS sidecar, or mask_key of a MONAI list.",
        "mask_of_other_shape": "A NIfTI mask has another number of voxels than its volume. Export it on the volume's"
        " grid.",
        "mask_of_other_place": "A NIfTI mask has another affine than its volume: it lies elsewhere. Export it on the"
        " volume's grid.",
        "mask_without_series": "A mask does not say of which one series it is. Export it again with its references.",
        "parser_stopped": "Reading the file took too long or too much memory, or crashed the reader."
        " Treat the file as hostile.",
        "nifti_without_patient": "A NIfTI file names no patient. Add a line with its file and patient_id to"
        " nifti.csv.",
    }
)


class FileRejectedError(RefusedError):
    """A file is not let in. ``code`` is a key of ``REASONS``; nothing of the file is in the exception."""

    def __init__(self, code: str) -> None:
        """Take a known code only."""
        if code not in REASONS:
            raise ValueError("unknown reason code")
        super().__init__(code)
        self.code = code
