"""The worker that reads one hospital file after another, in a process without keys (``parser_process`` starts it).

This is a wall: whoever takes a parser over by a file finds no key, no file and no socket here.
"""

from __future__ import annotations

import io
import json
import os
from functools import partial
from importlib import import_module
from typing import IO, Any, Final

import imagecodecs
import numpy as np
import pydicom
from pydicom import Dataset
from pydicom import config as pydicom_config
from pydicom.pixels.decoders.base import get_decoder
from pydicom.tag import Tag
from pydicom.uid import UID

from agent.deidentify import admission_rules, dicomdir, masks, nifti, nifti_masks, patient_identity, pixel_redaction
from agent.deidentify.attributes import frames, text
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.face_risk import faces_in, may_show_a_face
from agent.deidentify.identifying_values import identifiers, of_patient
from agent.deidentify.pixels import pixel_data
from agent.deidentify.prescan import DEFLATED_LE, Meta, read_meta, scan, undeflate
from agent.deidentify.ps315 import action_trace, retained_attributes
from agent.deidentify.ps315.options import Pixels, Profile
from agent.deidentify.record import instance_name
from agent.deidentify.residual_check import residual
from agent.errors import ParserError
from agent.ingest.parser_limits import apply_rlimits, cpu_exhausted, extend_cpu_limit
from agent.ingest.parser_process import MOST_NAMES, Asked
from protos.operations import confinement
from protos.operations.pipe_messages import Part, receive, send

_KNOWN: Final = 10_000  # names that a worker remembers

_BODY_PARTS: Final = frozenset(
    t for t in retained_attributes.TERMS[0x00180015] if t.isalnum() and len(t) <= 16
)  # as records hold them


_DEFLATED_REFERENCES: Final = frozenset({"1.2.840.10008.1.2.4.95", "1.2.840.10008.1.2.4.205"})


_WHO: Final = ("SpecificCharacterSet", "IssuerOfPatientID", "PatientID")


_STANDARD: Final = "1.2.840.10008.1.2"


_LEAST_ROOM: Final = 64 * 2**20  # bytes that a worker must be able to allocate to be of any use


def _opened(data: bytes, rules: admission_rules.AdmissionRules, who: Deidentifier) -> tuple[Dataset, Meta]:
    """A data set whose bytes were scanned first; its patient's site-wide pseudonym was asked for."""
    meta = read_meta(data)
    if meta.media_class == admission_rules.MEDIA_DIRECTORY:
        raise FileRejectedError("dicomdir")
    if meta.transfer_syntax == DEFLATED_LE:
        data, meta = undeflate(data, meta, rules.max_bytes)
    if not meta.transfer_syntax.startswith(_STANDARD) or meta.transfer_syntax in _DEFLATED_REFERENCES:
        raise FileRejectedError(
            "unsupported_encoding"
        )  # private, deflated once more, or not said: it cannot be scanned
    scan(data, meta.offset, meta.transfer_syntax)
    dataset = pydicom.dcmread(io.BytesIO(data))
    named = Dataset({t: dataset.get_item(t) for t in map(Tag, _WHO) if t in dataset})  # bytes, not yet asked for
    admission_rules.judge(dataset, meta.transfer_syntax, rules)
    admission_rules.same_instance(meta, dataset)
    if admission_rules.is_report(dataset):
        raise FileRejectedError("not_an_image")  # no place for its text in a record
    who.person_of(named)
    return dataset, meta


def _native(dataset: Dataset, meta: Meta, rules: admission_rules.AdmissionRules) -> tuple[pixel_data.Stored, bool]:
    """The decoded pixels, those blanked that a rule says, and whether there were any."""
    values = pixel_data.decode(dataset, meta.transfer_syntax)
    parts = pixel_redaction.plan(dataset, rules.blanks, us_regions=rules.us_regions)
    if parts:
        values = pixel_redaction.blank(values, parts, text(dataset, "PhotometricInterpretation"))
    return values, bool(parts)


def _read_dicom(
    data: bytes, rules: admission_rules.AdmissionRules, who: Deidentifier
) -> tuple[dict[str, Any], list[Part]]:
    dataset, meta = _opened(data, rules, who)
    if admission_rules.is_mask(dataset):
        return _read_mask(dataset, meta, rules, who)
    needles = identifiers(dataset, who.profile)
    values, blanked = _native(dataset, meta, rules)
    plain, face = pixel_data.native(dataset, values), may_show_a_face(dataset)
    clean = who.clean(plain, Pixels("cleaned" if blanked else "unknown", faces_in(dataset, face=face)))
    steps = (
        [*clean.trace, action_trace.AttributeAction("pixels", "blanked", "clean_pixels")] if blanked else clean.trace
    )
    payload = _written(clean.dataset, needles)
    image: Part = b""
    _ask_names(dataset, who)
    # some write WHOLE BODY, and some WHOLE_BODY
    body_part = "".join(c for c in text(dataset, "BodyPartExamined").upper() if c.isalnum())
    head: dict[str, Any] = {
        "modality": text(dataset, "Modality"),
        "body_part": body_part if body_part in _BODY_PARTS else "",
        "kind": "volume" if frames(dataset) > 1 else "image",
        "face": face,
        "text": rules.look_for_text and _has_text(values),
    }
    if head["kind"] == "image":
        unit = np.ascontiguousarray(pixel_data.unit_range(plain, values), dtype="<f4")
        head["height"], head["width"], head["channels"] = (*unit.shape, 1)[:3]
        image = unit.data.cast("B")
    return head, [image, payload, action_trace.dumps(steps)]


def _has_text(values: pixel_data.Stored) -> bool:
    from agent.deidentify.pixels.burned_in_text import has_burned_in_text  # noqa: PLC0415 - see _import_parsers

    return has_burned_in_text(values)


def _written(clean: Dataset, needles: Any) -> bytes:
    """A de-identified data set as a file, searched for every identifier of the original."""
    out = io.BytesIO()
    clean.save_as(out, enforce_file_format=True)
    payload = out.getvalue()
    if residual(needles, payload):
        raise FileRejectedError("residual_identifier")
    return payload


def _ask_names(dataset: Dataset, who: Deidentifier) -> None:
    """The names of the instance, its study and its series: the agent takes them from these questions."""
    instance = text(dataset, "SOPInstanceUID")
    instance_name(who, instance)
    who.mac("study", text(dataset, "StudyInstanceUID").encode())
    who.mac("series", (text(dataset, "SeriesInstanceUID") or instance).encode())  # one without is a series of its own


def _read_mask(
    dataset: Dataset, meta: Meta, rules: admission_rules.AdmissionRules, who: Deidentifier
) -> tuple[dict[str, Any], list[Part]]:
    """A mask has no pixels that anything is drawn from: they are opened beside those of its series alone."""
    needles = identifiers(dataset, who.profile)
    clean = masks.clean_mask(dataset, meta.transfer_syntax, who, rules.segments)
    payload = _written(clean.dataset, needles)
    _ask_names(dataset, who)
    who.mac("masked", masks.masked_series(dataset).encode())
    head = {"modality": "SEG", "body_part": "", "kind": "mask", "face": False, "text": False}
    return head, [b"", payload, action_trace.dumps(clean.trace)]


def _read_nifti(
    data: bytes, volumes: list[bytes], told: dict[str, Any], rules: admission_rules.AdmissionRules
) -> tuple[dict[str, Any], list[Part]]:
    """A volume; or a mask, with the volume that it is of, whose clean content names both."""
    patient_id = str(told["patient_id"] or "")
    if not patient_id.strip():
        raise FileRejectedError("nifti_without_patient")
    if rules.nifti_modality not in rules.modalities:
        raise FileRejectedError("modality_not_allowed")
    plain = nifti.inflate(data, rules.max_bytes)
    if volumes:
        if not nifti.looks_like_nifti(volumes[0]):
            raise FileRejectedError("mask_without_volume")
        whole = nifti.clean(nifti.inflate(volumes.pop(), rules.max_bytes), rules.max_pixels)
        payload = nifti_masks.clean_mask(plain, whole, rules.segments, str(told["segment"]), rules.max_pixels)
        if residual(of_patient(patient_id), payload):
            raise FileRejectedError("residual_identifier")
        head = {"modality": "SEG", "body_part": "", "kind": "mask", "face": False, "text": False}
        return head, [b"", payload, action_trace.dumps([]), whole]
    payload = nifti.clean(plain, rules.max_pixels)
    if residual(of_patient(patient_id), payload):
        raise FileRejectedError("residual_identifier")
    head = {
        "modality": rules.nifti_modality,
        "body_part": "",
        "kind": "volume",
        "face": True,  # a NIfTI header does not say which part of the body it shows
        "text": False,  # made by programs from the slices of a scan, and never captured from a screen
    }
    return head, [b"", payload, action_trace.dumps([])]


def _answer(
    files: list[bytes], told: dict[str, Any], rules: admission_rules.AdmissionRules, who: Deidentifier
) -> tuple[dict[str, Any], list[Part]]:
    data, *volumes = files
    try:
        if told.get("directory"):
            return {}, [json.dumps(dicomdir.listed(data)).encode()]
        if told.get("whose"):
            whom = patient_identity.person(
                data, who, str(told["patient_id"] or ""), str(told["issuer"]), rules.max_bytes
            )
            return {"named": whom != ""}, []
        if nifti.looks_like_nifti(data):
            return _read_nifti(data, volumes, told, rules)
        return _read_dicom(data, rules, who)
    except FileRejectedError as refusal:
        return {"code": refusal.code}, []
    except MemoryError:
        raise  # the process may be damaged: let it end, the agent starts another
    except Exception:  # noqa: BLE001 - a parser may raise anything, and its text may quote the file
        return {"code": "undecodable"}, []


def main() -> None:
    """Serve files from standard input until it ends."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # whatever a library prints must not get between the answers
        os.dup2(null, descriptor)
    setup, _ = receive(source, 0)
    rules, profile = admission_rules.rules_from(setup["rules"]), Profile(**setup["profile"])
    pydicom_config.settings.reading_validation_mode = pydicom_config.IGNORE
    pydicom_config.settings.writing_validation_mode = pydicom_config.RAISE
    pydicom_config.replace_un_with_known_vr = False  # UN stays opaque: nothing hidden in it is parsed
    seconds = setup["limits"]["cpu_seconds"]
    _import_parsers(rules)
    apply_rlimits(setup["limits"]["memory_bytes"], seconds)
    try:
        _check_room()
        allowed = confinement.Allowed(confinement.INTERPRETER, confinement.interpreter())
        confinement.end_with(setup["parent"])
        confinement.confine(allowed, setup["demand"])
    except (ParserError, confinement.ConfinementError) as fault:
        send(sink, {"fault": str(fault)})
        return
    send(sink, {"ready": True})
    known: dict[Asked, str] = {}
    while True:
        try:
            head, files = receive(source, rules.max_bytes)
        except EOFError:
            return
        extend_cpu_limit(seconds)
        # ids of a series are those of its next file too; whose a file is and what it is called, each file asks anew
        known = {a: name for a, name in known.items() if a[1] in MOST_NAMES} if len(known) < _KNOWN else {}
        who = Deidentifier(b"", setup["issuer"], profile, names=partial(_asked, source, sink, known))
        reply, parts = _answer(files, head, rules, who)
        send(sink, {**reply, "spent": True} if cpu_exhausted(seconds) else reply, parts)


def _import_parsers(rules: admission_rules.AdmissionRules) -> None:
    """Import what costs half of the start, where the rules need it: once confined, no library can start threads."""
    if rules.look_for_text:
        import_module("agent.deidentify.pixels.burned_in_text")  # scipy
    if rules.nifti_modality in rules.modalities:
        import_module("nibabel")


def _check_room() -> None:
    """Find out now what would later be blamed on a file: no decoder, or no memory to decode into."""
    bytearray(_LEAST_ROOM)
    if not imagecodecs.JPEG8.available:
        raise ParserError("imagecodecs is installed without JPEG")
    for syntax, decoder in admission_rules.DECODERS.items():
        if decoder in ("", admission_rules.IMAGECODECS):
            continue
        if decoder not in get_decoder(UID(syntax)).available_plugins:
            raise ParserError(f"no decoder {decoder} is installed")


def _asked(
    source: IO[bytes],
    sink: IO[bytes],
    known: dict[Asked, str],
    key: str,
    purpose: str,
    parts: tuple[bytes, ...],
) -> str:
    """A keyed name, from the side that has the keys; ``known``: those that were asked for before."""
    if (key, purpose, parts) not in known:
        send(sink, {"key": key, "purpose": purpose}, parts)
        reply, _ = receive(source, 0)
        known[key, purpose, parts] = str(reply["name"])
    return known[key, purpose, parts]


if __name__ == "__main__":
    main()
