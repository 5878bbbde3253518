"""The manifest of a study: removed, replaced and retained attributes, the reasons, and the checks made.

A manifest has no value of any file: attribute paths, actions and reasons of closed lists, keyed digests and
counts. It can be shown to the site's staff and kept beside the study.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pydicom._dicom_dict import DicomDictionary

from agent.deidentify.ps315 import table
from agent.deidentify.ps315.action_trace import WHY, AttributeAction
from agent.deidentify.ps315.options import CODES, UNKNOWN_PIXELS, USUAL, Pixels, Profile

_KEYED: Final = re.compile(r"[0-9a-f]{32}")
_ITEM: Final = re.compile(r"\[\d+\]")
_TAG: Final = re.compile(r"([0-9A-F]{4}),([0-9A-F]{4})(?:\[\d+\])?$")
_FINDING: Final = re.compile(r"(?:name|id|uid|date|text|device)@[0-9A-Za-z,\[\]/]{1,640}")
_SAID: Final = {
    **{"kept": "kept as it was", "replaced": "replaced by a value that says nothing of the patient"},
    **{"emptied": "emptied", "shifted": "moved by the patient's number of days", "removed": "removed"},
    **{"rekeyed": "replaced by a keyed value, the same for the same original", "cleaned": "cleaned"},
    "blanked": "set to zero",
}


@dataclass(frozen=True, slots=True)
class InstanceChange:
    """One instance of a study, before and after."""

    name: str  # keyed
    before: str  # keyed digest of the bytes that came in
    after: str  # keyed digest of the bytes that are kept
    trace: tuple[AttributeAction, ...]
    residual: tuple[str, ...] = ()  # of ``residual.residual``
    pixels: Pixels = UNKNOWN_PIXELS

    def __post_init__(self) -> None:
        """Only keyed names and digests, and findings without values."""
        if not all(_KEYED.fullmatch(v) for v in (self.name, self.before, self.after)):
            raise ValueError("a manifest has keyed names and digests only")
        if not all(_FINDING.fullmatch(f) for f in self.residual):
            raise ValueError("not a finding of the residual scan")


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """One line of ``what-if``."""

    tag: str  # path of the attribute, or of a part of the file
    keyword: str  # of the standard, "" for private and unknown ones
    action: str
    sentence: str


def keyword(path: str) -> str:
    """The standard's keyword of the attribute that a path ends in, ``""`` when it has none."""
    match = _TAG.search(path)
    entry = DicomDictionary.get(int(match[1] + match[2], 16)) if match else None
    return str(entry[4]) if entry is not None else ""


def explain(trace: Iterable[AttributeAction]) -> list[WhatIfRow]:
    """What would be done to one file, attribute by attribute, in words."""
    return [WhatIfRow(s.path, keyword(s.path), s.action, f"{_SAID[s.action]}: {WHY[s.why]}") for s in trace]


def manifest(study: str, instances: Sequence[InstanceChange], profile: Profile = USUAL) -> dict[str, Any]:
    """The manifest of one study: ready for ``json.dumps(..., sort_keys=True)``, the same in any order of instances.

    Attributes of items are counted together under the path without item numbers.

    Args:
        study: the keyed name of the study.
        instances: at least one.
        profile: the policy under which all of them were cleaned.
    Raises:
        ValueError: the study's name is not keyed, no instance, one instance twice.
    """
    names = {i.name for i in instances}
    if not _KEYED.fullmatch(study) or not instances or len(names) != len(instances):
        raise ValueError("a manifest is of one keyed study and of its instances, each once")
    times: Counter[tuple[str, str, str]] = Counter()
    for instance in instances:
        # an attribute may come many times in one instance: instances are counted, not items
        times.update({(_ITEM.sub("", s.path), s.action, s.why) for s in instance.trace})
    codes = sorted({*profile.codes(), *(code for i in instances for code in i.pixels.codes())})
    return {
        "manifest": 1,
        "study": study,
        "table": {"standard": "DICOM PS3.15 Table E.1-1", "edition": table.EDITION, "options": table.OPTIONS_EDITION},
        "profile": asdict(profile),
        "codes": {code: CODES[code] for code in codes},
        "attributes": [
            {"path": path, "keyword": keyword(path), "action": action, "why": why, "instances": count}
            for (path, action, why), count in sorted(times.items())
        ],
        "reasons": {why: WHY[why] for why in sorted({why for _, _, why in times})},
        "instances": [
            {
                "name": i.name,
                "before": i.before,
                "after": i.after,
                "pixels": {"burned_in": i.pixels.burned_in, "faces": i.pixels.faces},
                "residual": list(i.residual),
            }
            for i in sorted(instances, key=lambda i: i.name)
        ],
        "residual": {"scanned": len(instances), "with_findings": sum(bool(i.residual) for i in instances)},
    }
