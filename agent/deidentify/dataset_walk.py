"""One walk over one instance: every attribute of it, however deep, gets its one fate and its one step."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pydicom import DataElement, Dataset
from pydicom._uid_dict import UID_dictionary
from pydicom.dataelem import RawDataElement
from pydicom.sequence import Sequence
from pydicom.tag import BaseTag

from agent.deidentify.admission_rules import text
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import MAX_DEPTH, MAX_ELEMENTS
from agent.deidentify.ps315 import (
    numeric_bounds,
    retained_attributes,
    safe_private,
    structured_content,
    value_encoding,
)
from agent.deidentify.ps315.action_trace import AttributeAction, step
from agent.deidentify.ps315.actions import DUMMIES, AttributeDecision, decide
from agent.deidentify.ps315.options import Profile
from agent.deidentify.ps315.value_encoding import Element, NotOneOfError, padded, texts

_WORD: Final = re.compile(r"[^\W_]+")
_DEVICE: Final = re.compile(r"[A-Za-z0-9 ._/+()#:,-]{1,64}")
_NAMES: Final = ("PatientName", "OtherPatientNames", "PatientBirthName", "PatientMotherBirthName", "PatientID")
_OTHER_NAMES: Final = ("ReferringPhysicianName", "PerformingPhysicianName", "OperatorsName", "AccessionNumber")
_IDS: Final = ("PatientID", "OtherPatientIDs", "AccessionNumber", "StudyID")
_LETTERS: Final = re.compile(r"[^\W\d_]{3,}")
_MOST_TERM_DIGITS: Final = 5  # of terms that are nothing but digits, all values together
_LEAST_ID: Final = 5  # characters without separators: below, chance writes it


@dataclass(frozen=True, slots=True)
class KeyedReplacements:
    """The project's keyed replacements, for one patient."""

    uid: Callable[[str], str]
    identifier: Callable[[str], str]
    days: int  # by which the patient's dates move


def raw(tag: int, vr: str, value: bytes) -> RawDataElement:
    """An element as bytes of Explicit VR Little Endian: written as it is, parsed only when somebody asks."""
    return RawDataElement(BaseTag(tag), vr, len(value), value, 0, False, True)


def own_words(dataset: Dataset) -> frozenset[str]:
    """Folded words of the patient's and the physicians' names and numbers: never words of a description.

    Numbers also without their separators, and their digits alone: "CT-12 345" is "ct12345" and "12345".
    """
    joined = " ".join(str(dataset.get(keyword)) for keyword in (*_NAMES, *_OTHER_NAMES) if keyword in dataset)
    ids = ["".join(_WORD.findall(str(dataset.get(k)).casefold())) for k in _IDS if k in dataset]
    forms = {
        f
        for i in ids
        for f in (i, retained_attributes.digits(i), retained_attributes.digits(i).lstrip("0"))
        if len(f) >= _LEAST_ID
    }
    return frozenset(w for w in _WORD.findall(joined.casefold()) if len(w) > 1) | forms


@dataclass(slots=True)
class DatasetWalker:
    """The state of one walk."""

    keyed: KeyedReplacements
    profile: Profile
    own: frozenset[str]
    signed: bool
    palette: bool = False  # the pixels are indexes of a colour palette
    steps: list[AttributeAction] = field(default_factory=list)
    count: int = 0

    def dataset(self, source: Dataset, depth: int = 0, path: str = "") -> dict[BaseTag, Element]:
        """The attributes of one data set, or of one item, that stay.

        Raises:
            FileRejectedError: ``too_deep``.
        """
        if depth > MAX_DEPTH:
            raise FileRejectedError("too_deep")
        target: dict[BaseTag, Element] = {}
        steps, profile = self.steps, self.profile
        self.count += len(source)
        if self.count > MAX_ELEMENTS:
            raise FileRejectedError("too_deep")
        for tag in sorted(source.keys()):
            decision = decide(profile, int(tag))
            if decision.kind in ("stamped", "pixels") and not depth:
                continue  # ``tags`` writes these
            here = f"{path}{tag >> 16:04X},{tag & 0xFFFF:04X}"
            if decision.kind == "removed":
                steps.append(step(here, "removed", decision.why))
                continue
            mark = len(steps)
            element, fate = self._fate(source, tag, decision, depth, here)
            if element is not None:
                target[tag] = element
            elif decision.kind == "sequence":
                del steps[mark:]  # removed with all that is in it
            steps.insert(mark, fate)
        return target

    def _fate(
        self, source: Dataset, tag: BaseTag, decision: AttributeDecision, depth: int, path: str
    ) -> tuple[Element | None, AttributeAction]:
        """``_one``, where a value that is not what it should be does not stay."""
        try:
            return self._one(source, tag, decision, depth, path)
        except NotOneOfError:
            why = _NOT_ONE_OF.get(decision.kind, "no_term")
            if tag in retained_attributes.NEEDED:
                raise FileRejectedError("undecodable") from None
            if (
                decision.kind in ("term", "maker") and tag not in retained_attributes.NEVER_EMPTY
            ) or tag in retained_attributes.TYPE_2:
                # may have to be there, empty
                return raw(tag, decision.vr, b""), step(path, "emptied", why)
            return None, step(path, "removed", why)
        except value_encoding.UNREADABLE:
            if tag in retained_attributes.NEEDED:
                raise FileRejectedError("undecodable") from None
            return None, step(path, "removed", "unreadable")

    def _one(
        self, source: Dataset, tag: BaseTag, decision: AttributeDecision, depth: int, path: str
    ) -> tuple[Element | None, AttributeAction]:
        """What stays of one attribute, and its step."""
        kind, vr = decision.kind, decision.vr
        if kind == "sequence":
            return self._sequence(source, tag, decision, depth, path)
        if kind == "private":
            return self._private(source, tag, path)
        if kind in ("stamped", "pixels"):
            return None, step(path, "removed", "profile" if kind == "stamped" else "not_listed")
        if kind == "emptied":
            return DataElement(tag, vr, []) if vr == "SQ" else raw(tag, vr, b""), step(path, "emptied", decision.why)
        if tag in retained_attributes.PALETTES and not self.palette:
            return None, step(path, "removed", "not_listed")
        vr = ("SS" if self.signed else "US") if vr == "US or SS" else vr
        element = source.get_item(tag)
        action: str | None = None
        if kind == "lut":
            vr, value = "OW", value_encoding.lookup_table(source, element, retained_attributes.LOOKUP_TABLES[tag])
        elif kind == "number" and vr not in ("DS", "IS"):
            value, rounded = value_encoding.packed(source, element, vr, numeric_bounds.bound_of(tag))
            action = "cleaned" if rounded else None
        else:
            value, action = _HANDLERS[kind](self, source, element, decision)
        if not value and tag in retained_attributes.NEVER_EMPTY:
            return None, step(path, "removed", "empty")
        return raw(tag, vr, value), step(path, action or decision.action, decision.why)

    def _private(self, source: Dataset, tag: BaseTag, path: str) -> tuple[Element | None, AttributeAction]:
        found = safe_private.safe(source, tag)
        if found is None:
            return None, step(path, "removed", "private")
        return found[0], step(path, "cleaned" if found[1] else "kept", "retain_safe_private")

    def _sequence(
        self, source: Dataset, tag: BaseTag, decision: AttributeDecision, depth: int, path: str
    ) -> tuple[Element | None, AttributeAction]:
        """A sequence whose items are cleaned in turn; one in which nothing is left is removed."""
        items = source[tag].value
        if not isinstance(items, Sequence):
            raise TypeError("not a sequence")
        stays = []
        for number, item in enumerate(items):
            mark = len(self.steps)
            below = f"{path}[{number}]/"
            kept = self.dataset(item, depth + 1, below)
            if kept and _understood(item, kept):
                stays.append(_Item(kept))
            elif len(item):
                del self.steps[mark:]
                self.steps.append(step(f"{path}[{number}]", "removed", "no_code" if kept else "empty"))
        if len(items) and not stays:
            return None, step(path, "removed", "empty")
        return DataElement(tag, "SQ", stays), step(path, decision.action, decision.why)

    # -------------------------------------------------- one function for each kind of value

    def _number(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, str]:
        write = value_encoding.decimals if decision.vr == "DS" else value_encoding.integers
        value, rounded = write(source, element, numeric_bounds.bound_of(element.tag))
        return value, "cleaned" if rounded else ""

    def _term(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, str]:
        given = [v.upper() for v in texts(source, element)]
        allowed = retained_attributes.TERMS.get(element.tag, retained_attributes.VOCABULARY["terms"])
        replacement = retained_attributes.REPLACE_UNKNOWN.get(element.tag)
        stays: list[str | None] = [v if not v or v in allowed else replacement for v in given]
        if len("".join(v for v in given if v.isdigit())) > _MOST_TERM_DIGITS:
            raise NotOneOfError
        if None in stays and not (
            element.tag in retained_attributes.ORIENTATIONS
            and all(map(retained_attributes.DIRECTION.fullmatch, given))
        ):
            raise NotOneOfError
        stays = [*given] if None in stays else stays
        changed = "cleaned" if stays != given else ""
        return padded("\\".join(v or "" for v in stays).encode("ascii")), changed

    def _date(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, str]:
        moved = value_encoding.dates(source, element, self.keyed.days, times=self.profile.times)
        return moved, "" if moved.strip(b"\\ ") else "emptied"

    def _clock(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, None]:
        return value_encoding.clock(source, element), None

    def _age(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, None]:
        return value_encoding.age(source, element), None

    def _uid(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, str]:
        given = texts(source, element)
        new = [v if v in UID_dictionary else self.keyed.uid(v) for v in given]
        return padded("\\".join(new).encode("ascii"), b"\0"), "kept" if new == given else ""

    def _class_uid(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, None]:
        given = texts(source, element)
        if len(given) != 1 or given[0] not in UID_dictionary:
            raise NotOneOfError
        return padded(given[0].encode("ascii"), b"\0"), None

    def _keyed_id(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, str]:
        given = texts(source, source[element.tag])
        new = self.keyed.identifier("\\".join(given))
        return new.encode("ascii"), "" if new else "emptied"

    def _dummy(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, None]:
        return DUMMIES[decision.vr], None

    def _known(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, None]:
        given = texts(source, element)
        known = {
            "maker": retained_attributes.maker,
            "model": retained_attributes.model,
            "version": retained_attributes.version,
            "short": retained_attributes.short_text,
        }
        few = decision.kind == "maker" or retained_attributes.few_digits(decision.kind, given)
        if not few or self._mine(given) or not all(not v or known[decision.kind](v) for v in given):
            raise NotOneOfError
        return padded("\\".join(given).encode("ascii")), None

    def _device(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, None]:
        given = texts(source, element)
        if self._mine(given) or not all(not v or _DEVICE.fullmatch(v) for v in given):
            raise NotOneOfError
        return padded("\\".join(given).encode("ascii")), None

    def _words(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, str]:
        left = retained_attributes.technical_words(" ".join(texts(source, element)), self.own)
        return padded(left[:64].rstrip().encode("ascii")), "" if left else "emptied"

    def _code(self, source: Dataset, element: Element, decision: AttributeDecision) -> tuple[bytes, str]:
        """One part of a coded entry (PS3.3 section 8.8): the meaning is ours, whatever the file says."""
        value, scheme = (text(source, k) for k in ("CodeValue", "CodingSchemeDesignator"))
        meaning = retained_attributes.concept(scheme, value)
        if meaning is None:
            raise NotOneOfError
        given = texts(source, element)[0] if texts(source, element) else ""
        if element.tag == retained_attributes.CODE_VERSION and not retained_attributes.CODE_VERSION_FORM.fullmatch(
            given
        ):
            raise NotOneOfError
        stays = meaning if element.tag == retained_attributes.CODE_MEANING else given
        ascii_only = stays.encode("ascii", "ignore")[: 64 if element.tag == retained_attributes.CODE_MEANING else 16]
        return padded(ascii_only.strip()), "" if stays == given else "replaced"

    def _mine(self, given: list[str]) -> bool:
        """Whether a word is the patient's own, beside digits too, or all values together hold a number of theirs."""
        folded = " ".join(given).casefold()
        words = {*_WORD.findall(folded), *_LETTERS.findall(folded)}
        joined, numbers = "".join(_WORD.findall(folded)), retained_attributes.digits(folded)
        long = [w for w in self.own if len(w) >= _LEAST_ID and retained_attributes.digits(w)]
        return not words.isdisjoint(self.own) or any(w in (numbers if w.isdigit() else joined) for w in long)


def _understood(item: Dataset, kept: dict[BaseTag, Element]) -> bool:
    """Whether an item that is, or needs, a coded concept still has it."""
    coded = retained_attributes.CODE_VALUE in item or 0x00080119 in item or 0x00080120 in item
    if coded and retained_attributes.CODE_VALUE not in kept:
        return False
    # a content item of a report says nothing without the concept that names or fills it
    return all(
        tag in kept for tag in (structured_content.CONCEPT_NAME, structured_content.VALUE_CONCEPT) if tag in item
    )


class _Item(Dataset):
    """An item made of elements that are right already."""

    def __init__(self, elements: dict[BaseTag, Element]) -> None:
        super().__init__(elements)  # raw elements are parsed when asked for
        self.set_original_encoding(False, True)


Handler = Callable[[DatasetWalker, Dataset, Element, AttributeDecision], tuple[bytes, str | None]]
_HANDLERS: Final[dict[str, Handler]] = {
    **{
        "number": DatasetWalker._number,
        "term": DatasetWalker._term,
        "date": DatasetWalker._date,
        "clock": DatasetWalker._clock,
    },
    **{
        "age": DatasetWalker._age,
        "uid": DatasetWalker._uid,
        "class_uid": DatasetWalker._class_uid,
        "keyed_id": DatasetWalker._keyed_id,
    },
    **{
        "dummy": DatasetWalker._dummy,
        "maker": DatasetWalker._known,
        "model": DatasetWalker._known,
        "version": DatasetWalker._known,
    },
    **{
        "short": DatasetWalker._known,
        "device": DatasetWalker._device,
        "words": DatasetWalker._words,
        "code": DatasetWalker._code,
    },
}
_NOT_ONE_OF: Final = {
    **{"number": "no_number", "lut": "no_number", "code": "no_code", "age": "no_number", "clock": "no_number"},
    **{"maker": "no_product", "model": "no_product", "version": "no_product", "device": "no_product"},
    "short": "no_word",
    "private": "no_number",
}
