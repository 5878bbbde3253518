"""The ten actions of the MIDI-B challenge on the torture set, and dciodvfy's errors before and after.

The actions are those of the challenge's validation script (Clunie, Rutherford et al., MIDI-B 2024), the answer key is
ours and follows the standard instead of a curator's taste:

* ``tag_retained``: attributes of types 1 and 2 of the patient, study, series and SOP common modules (PS3.3 C.7 and
  C.12.1) that were there are still there, with or without a value; ``text_notnull``: those of type 1 have one.
* ``text_retained``: an attribute that Table E.1-1 does not list, that the standard defines, that was in the real
  header and in which nothing was planted must be as it was, because the Basic Profile keeps it (PS3.15 E.2: what is
  not in the table is kept); and a harmless description ("AX T1 SE"), which TCIA keeps.
* ``text_removed``, ``date_shifted``, ``uid_changed``: nothing of the plant is left anywhere in the output file.
* ``uid_consistent``, ``patid_consistent``: what was one study or patient in several files still is one; two stay two.
* ``pixels_hidden``: the burned-in text cannot be seen; ``pixels_retained``: other pictures keep their stored values.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.datadict import dictionary_has_tag
from pydicom.pixels.utils import pixel_array

from tests.torture.plants import Made, unchecked
from tests.torture.residues import parsed, residues
from tests.torture.sower import Plant
from tests.torture.tagplants import TABLE

ACTIONS: Final = (
    *("tag_retained", "text_notnull", "text_retained", "text_removed", "date_shifted", "uid_changed"),
    *("uid_consistent", "patid_consistent", "pixels_hidden", "pixels_retained"),
)
_TYPE_1: Final = (
    *("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "Modality", "PatientID"),
    *("ImageType", "Rows", "Columns", "BitsAllocated", "SamplesPerPixel", "PhotometricInterpretation"),
)
_TYPE_2: Final = (
    *("PatientName", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "AccessionNumber"),
    *("ReferringPhysicianName", "StudyID", "SeriesNumber", "InstanceNumber"),
)
_NO_TEXT: Final = ("SQ", "OB", "OW", "UN", "OB or OW", "UI", "OF", "OD", "PN")
# what decoding changes, and rightly: the pictures are compared by their values
_CODING: Final = (
    *("LossyImageCompression", "PlanarConfiguration", "PhotometricInterpretation", "PixelRepresentation"),
    *("SpecificCharacterSet", "HighBit", "BurnedInAnnotation"),
)


@dataclass(slots=True)
class Score:
    """Right and required per action, and what leaked."""

    right: Counter[str] = field(default_factory=Counter)
    required: Counter[str] = field(default_factory=Counter)
    leaks: list[Plant] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  # files whose burned-in text is still to be seen
    lost: Counter[str] = field(default_factory=Counter)  # attribute or file -> how often over-removed
    errors_in: int = 0
    errors_out: int = 0
    out: int = 0

    def add(self, action: str, right: bool, what: str = "") -> None:
        """One requirement, met or not."""
        self.required[action] += 1
        self.right[action] += right
        if not right and what:
            self.lost[what] += 1

    def percent(self, action: str) -> float | None:
        """Right of required, None when nothing was required."""
        return 100 * self.right[action] / self.required[action] if self.required[action] else None


def score(made: Iterable[Made], outputs: Mapping[str, bytes], *, errors: bool = True) -> Score:
    """Score the files that came out, by name; those that were refused count nowhere but in ``out``."""
    result, groups = Score(), _Groups()
    for file in made:
        data = outputs.get(file.name)
        if data is None:
            continue
        result.out += 1
        before, after = parsed(file.data), parsed(data)
        left = residues(data, file.plants)
        result.leaks += left
        _removals(result, file, set(left))
        if before is None or after is None or "SOPClassUID" not in before:
            continue
        _attributes(result, before, after, file.plants)
        _pictures(result, file, before, after)
        groups.add(before, after)
        if errors:
            result.errors_in += dciodvfy_errors(file.data)
            result.errors_out += dciodvfy_errors(data)
    groups.into(result)
    return result


def _removals(result: Score, file: Made, left: set[Plant]) -> None:
    actions = {"removed": "text_removed", "shifted": "date_shifted", "rekeyed": "uid_changed"}
    for plant in file.plants:
        if plant.treatment in actions:
            result.add(actions[plant.treatment], plant not in left)


def _attributes(result: Score, before: Dataset, after: Dataset, plants: Iterable[Plant]) -> None:
    for keyword in (*_TYPE_1, *_TYPE_2):
        if keyword in before:
            result.add("tag_retained", keyword in after, f"no {keyword}")
    for keyword in _TYPE_1:
        if str(before.get(keyword) or ""):
            result.add("text_notnull", str(after.get(keyword) or "") != "", f"empty {keyword}")
    planted = [plant.sentinel.casefold() for plant in plants]
    for tag, keyword, value in useful(before):
        if not any(sentinel in value.casefold() for sentinel in planted):
            now = _text(after, tag)
            result.add("text_retained", now == value, f"changed {keyword}")


def useful(dataset: Dataset) -> list[tuple[int, str, str]]:
    """The attributes (tag, keyword, value as text) that a Basic Profile keeps as they are, at the top level."""
    found = []
    for tag in sorted(map(int, dataset.keys())):
        group = tag >> 16
        standard = group % 2 == 0 and dictionary_has_tag(tag) and group not in (0x0002, 0x7FE0, 0xFFFC, 0x4008)
        if not standard or 0x5000 <= group <= 0x60FF or (tag & 0xFFFF) == 0:
            continue
        with contextlib.suppress(Exception):  # a value that nobody can read is not useful
            element = dataset[tag]
            listed = f"{tag:08X}" in TABLE and _text(dataset, tag) != "AX T1 SE"
            if not listed and not element.is_empty and element.VR not in _NO_TEXT and element.keyword not in _CODING:
                found.append((tag, element.keyword, _text(dataset, tag)))
    return found


def _text(dataset: Dataset, tag: int) -> str:
    """A value in a form that does not depend on how numbers are written."""
    with contextlib.suppress(Exception):
        value = dataset[tag].value
        many = [value] if isinstance(value, str | bytes) or not hasattr(value, "__iter__") else list(value)
        return "\\".join(_one(v) for v in many)
    return ""


def _one(value: object) -> str:
    text = str(value).strip("\0 ")
    with contextlib.suppress(ValueError):
        return f"{float(text):.6g}"
    return text


@dataclass(slots=True)
class _Groups:
    """Original identifier -> what became of it, file by file."""

    found: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, before: Dataset, after: Dataset) -> None:
        for keyword in ("StudyInstanceUID", "PatientID"):
            if before.get(keyword):
                self.found[keyword, str(before.get(keyword))].append(str(after.get(keyword) or ""))
        inside = [d.ReferencedImageSequence for d in (before, after) if d.get("ReferencedImageSequence")]
        if (
            len(inside) == 2
            and before.ReferencedImageSequence[0].get("ReferencedSOPInstanceUID") == before.SOPInstanceUID
        ):
            new = after.ReferencedImageSequence[0].get("ReferencedSOPInstanceUID", "")
            self.found["StudyInstanceUID", str(before.SOPInstanceUID)] += [
                str(after.get("SOPInstanceUID", "")),
                str(new),
            ]

    def into(self, result: Score) -> None:
        """One for each file: it has what most of its group have, and no other group has that."""
        names = {key: Counter(values).most_common(1)[0][0] for key, values in self.found.items()}
        for (keyword, was), values in self.found.items():
            usual = names[keyword, was]
            shared = sum(name == usual and key[0] == keyword for key, name in names.items()) > 1
            action = "uid_consistent" if keyword == "StudyInstanceUID" else "patid_consistent"
            for value in values:
                result.add(action, value == usual and value != "" and not shared, f"inconsistent {keyword}")


# ------------------------------------------------------------------ pixels


def picture(dataset: Dataset) -> NDArray[np.float64] | None:
    """Stored values as numbers, unused high bits cleared; None when there are none or they cannot be decoded."""
    with unchecked():
        try:
            values = pixel_array(dataset)
        except Exception:  # noqa: BLE001 - a decoder may raise anything
            return None
    spare = dataset.BitsAllocated - dataset.BitsStored
    if spare and values.dtype.kind == "u":
        values = values & values.dtype.type((1 << dataset.BitsStored) - 1)
    return values.astype(np.float64)


def _pictures(result: Score, file: Made, before: Dataset, after: Dataset) -> None:
    old = picture(before)
    if old is None:
        return
    new = picture(after)
    if file.box is not None:
        hidden = new is None or not legible(old, new, file.box)
        result.add("pixels_hidden", hidden)
        if not hidden:
            result.seen.append(file.name)
    elif file.image:
        same = new is not None and new.shape == old.shape and bool(np.array_equal(new, old))
        result.add("pixels_retained", same, f"pixels of {file.name}")


def legible(old: NDArray[np.float64], new: NDArray[np.float64], box: tuple[int, int, int, int]) -> bool:
    """Does the region of the text still look like it did? A constant region, or another picture, does not."""
    if new.shape != old.shape:
        return True  # cannot be told: counted against the tool
    top, left, bottom, right = box
    was, now = (p[top:bottom, left:right].ravel() for p in (old, new))
    if float(now.std()) == 0:
        return False
    return not abs(float(np.corrcoef(was, now)[0, 1])) < 0.3


# ------------------------------------------------------------------ dciodvfy


@cache
def dciodvfy_errors(data: bytes) -> int:
    """Lines that David Clunie's validator calls errors (package dicom3tools)."""
    with tempfile.NamedTemporaryFile(suffix=".dcm") as file:
        file.write(data)
        file.flush()
        done = subprocess.run(["dciodvfy", file.name], capture_output=True, text=True, errors="replace", check=False)
    return sum(line.startswith("Error") for line in (done.stderr + done.stdout).splitlines())


def as_json(result: Score) -> str:
    """A score, for a file."""
    actions = {a: [result.right[a], result.required[a]] for a in ACTIONS}
    leaks = [plant.id for plant in result.leaks]
    rest = {"out": result.out, "errors_in": result.errors_in, "errors_out": result.errors_out}
    text = io.StringIO()
    json.dump({"actions": actions, "leaks": leaks, "seen": result.seen, "lost": result.lost, **rest}, text, indent=1)
    return text.getvalue()


def write(path: Path, result: Score) -> None:
    """Keep a score."""
    path.write_text(as_json(result))
