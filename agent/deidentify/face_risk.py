"""Faces: which files may show one.

A record that may show a face keeps ``face = True`` until the face is off (:mod:`agent.ingest.vault_defacing`), and
such records are not eligible for any release: what cannot be de-faced withholds images and never lets one through.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

from pydicom import Dataset
from pydicom.sequence import Sequence

from agent.deidentify.attributes import frames, text
from agent.deidentify.ps315.options import Faces

_FLAT: Final = frozenset({"CR", "DX", "MG", "OP", "OPT", "OT", "NM", "XA", "RF"})
_NEVER_A_FACE: Final = frozenset({"MG", "OP", "OPT"})
_VOLUMETRIC: Final = frozenset({"CT", "MR", "PT", "NM"})
_STORAGE: Final = "1.2.840.10008.5.1.4.1.1."
_VOLUMETRIC_CLASSES: Final = frozenset(
    _STORAGE + c for c in ("2", "2.1", "2.2", "4", "4.1", "4.2", "4.3", "4.4", "20", "128", "128.1", "130")
)
_SLICES: Final = _VOLUMETRIC_CLASSES - {_STORAGE + "20"}  # a nuclear image of one frame is mostly a planar one
_TRUNK: Final = ("BREAST", "CHEST", "HEART", "LUNG", "ABDOMEN", "LIVER", "KIDNEY", "PELVIS", "PROSTATE", "HIP")
# Body Part Examined to the part of the body that it lies in; a joint lies in both that it joins
_ELSEWHERE: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys((*_TRUNK, "LSPINE", "TSPINE"), frozenset({"trunk"})),
    **dict.fromkeys(("KNEE", "ANKLE", "FOOT", "LEG"), frozenset({"leg"})),
    **dict.fromkeys(("ELBOW", "WRIST", "HAND", "ARM"), frozenset({"arm"})),
    "HIP": frozenset({"trunk", "leg"}),
    "SHOULDER": frozenset({"trunk", "arm"}),
}
# PS3.16 CID 4, 4030 and 4031 in SNOMED CT, and as older files have them in SNOMED RT
CODES: Final[dict[str, str]] = {
    **{"76752008": "BREAST", "816094009": "CHEST", "51185008": "CHEST", "80891009": "HEART", "39607008": "LUNG"},
    **{"818981001": "ABDOMEN", "113345001": "ABDOMEN", "10200004": "LIVER", "64033007": "KIDNEY"},
    **{"816092008": "PELVIS", "12921003": "PELVIS", "41216001": "PROSTATE", "29836001": "HIP", "24136001": "HIP"},
    **{"72696002": "KNEE", "70258002": "ANKLE", "56459004": "FOOT", "16982005": "SHOULDER", "16953009": "ELBOW"},
    **{"74670003": "WRIST", "85562004": "HAND", "30021000": "LEG", "40983000": "ARM"},
    **{"122496007": "LSPINE", "122495006": "TSPINE"},
    **{"T-04000": "BREAST", "T-D3000": "CHEST", "T-32000": "HEART", "T-28000": "LUNG", "T-D4000": "ABDOMEN"},
    **{"T-62000": "LIVER", "T-71000": "KIDNEY", "T-D6000": "PELVIS", "T-92000": "PROSTATE", "T-D2500": "HIP"},
    **{"T-15710": "HIP", "T-D9200": "KNEE", "T-15750": "ANKLE", "T-D9700": "FOOT", "T-D2220": "SHOULDER"},
    **{"T-15430": "ELBOW", "T-15460": "WRIST", "T-D8700": "HAND", "T-D9400": "LEG", "T-D8200": "ARM"},
    **{"T-11503": "LSPINE", "T-11502": "TSPINE"},
}
_SNOMED: Final = frozenset({"SCT", "SRT", "SNM3", "99SDM"})
_REGIONS: Final = ("AnatomicRegionSequence", "PrimaryAnatomicStructureSequence")
_GROUPS: Final = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_DESCRIPTIONS: Final = (
    *("StudyDescription", "SeriesDescription", "ProtocolName", "RequestedProcedureDescription"),
    *("PerformedProcedureStepDescription", "AcquisitionProtocolName"),
)
_PROCEDURES: Final = ("ProcedureCodeSequence", "RequestedProcedureCodeSequence", "PerformedProtocolCodeSequence")
# English, German, French, Italian, Spanish; without accents, parts of words where they are long enough
_HEAD: Final = re.compile(
    r"HEAD|BRAIN|SKULL|FACE|FACIAL|NECK|ORBIT|SINUS|TEMPOR|CRAN|CEREB|CEPHAL|ENCEF|DENTAL|MANDIB|MAXILL"
    r"|PITUIT|HYPOPHYS|PETROUS|CAROTI|CERVI|STROKE|NEURO|WHOLE.?BODY|TOTAL.?BODY|FULL.?BODY|VERTEX|TRAUMA"
    r"|SCH.{0,3}DEL|KOPF|HALS|HIRN|GESICHT|KIEFER|FELSENBEIN|NASEN|GANZK"
    r"|TETE|VISAGE|CERVEAU|CORPS.?ENTIER|TESTA|COLLO|CERVELLO|VOLTO|CABEZA|CUELLO|CUERPO.?ENTERO|CARA\b"
    r"|(?<![A-Z])(?:EYES?|EARS?|NOSE|NASAL|JAW|TMJ|IAC|ENT|HNO|ORL|COU|C.?SPINE|HWS|NNH|CCT|WB)(?![A-Z])"
)


def may_show_a_face(dataset: Dataset) -> bool:
    """True unless the data set says that no face can be rebuilt from it, or from a stack of its like.

    For a volume every anatomic statement is checked, also in functional groups (PS3.3 sections C.7.6.16.2.8 and
    10.5): there must be one, all must be from closed lists, and all must name the same part of the body. Then its
    descriptions may not mention the head, the neck, or the whole body. A file in which all statements are wrong is
    not detected; a person must look.
    """
    modality = text(dataset, "Modality")
    flat = modality in _NEVER_A_FACE or (modality in _FLAT and frames(dataset) == 1)
    if flat and text(dataset, "SOPClassUID") not in _SLICES:  # a slice is one, whatever its modality says
        return False
    parts = [part for place in _places(dataset) for part in _stated(place)]
    if not parts or not frozenset.intersection(*parts):
        return True
    return any(_HEAD.search(words) for words in _words(dataset))


def faces_in(dataset: Dataset, *, face: bool) -> Faces:
    """What may be stamped into Recognizable Visual Features (0028,0302), given ``may_show_a_face``.

    Of a volume nothing: that it shows no face is only the file's own word.
    """
    volumetric = text(dataset, "Modality") in _VOLUMETRIC or text(dataset, "SOPClassUID") in _VOLUMETRIC_CLASSES
    return "unknown" if face or volumetric else "none"


def _items(dataset: Dataset, keyword: str) -> list[Dataset] | None:
    """The items of a sequence, none when it is absent or empty; None when it is not a sequence."""
    value = dataset.get(keyword)
    if value is None or value == b"":
        return []
    return list(value) if isinstance(value, Sequence) else None


def _places(dataset: Dataset) -> Iterator[Dataset | None]:
    """The data set, its functional groups and the frames' anatomy in them; None, something cannot be read."""
    yield dataset
    for keyword in _GROUPS:
        for group in _items(dataset, keyword) or _unread(dataset, keyword):
            yield group
            if group is not None:
                yield from _items(group, "FrameAnatomySequence") or _unread(group, "FrameAnatomySequence")


def _unread(dataset: Dataset, keyword: str) -> list[None]:
    return [None] if _items(dataset, keyword) is None else []


def _stated(place: Dataset | None) -> Iterator[frozenset[str]]:
    """The part of the body by each statement; an empty set, it may be the head."""
    if place is None:
        yield frozenset()
        return
    if place.get("BodyPartExamined"):
        yield _ELSEWHERE.get(text(place, "BodyPartExamined").upper(), frozenset())
    for keyword in _REGIONS:
        for item in _items(place, keyword) or _unread(place, keyword):
            yield frozenset() if item is None else _region(item)


def _region(item: Dataset) -> frozenset[str]:
    known = text(item, "CodingSchemeDesignator") in _SNOMED
    if not known or _HEAD.search(_plain(item.get("CodeMeaning"))):
        return frozenset()
    return _ELSEWHERE.get(CODES.get(text(item, "CodeValue"), ""), frozenset())


def _words(dataset: Dataset) -> Iterator[str]:
    requests = _items(dataset, "RequestAttributesSequence") or []
    for place in (dataset, *requests):
        for keyword in _DESCRIPTIONS:
            yield _plain(place.get(keyword))
        for keyword in _PROCEDURES:
            for item in _items(place, keyword) or []:
                yield _plain(item.get("CodeMeaning"))


def _plain(value: object) -> str:
    """Upper case without accents, whatever the VR, one word like the other."""
    found = value.decode("latin-1") if isinstance(value, bytes) else str(value or "")
    bare = "".join(c for c in unicodedata.normalize("NFKD", found) if not unicodedata.combining(c))
    return " ".join(bare.upper().replace("_", " ").split())
