"""The vault's index of instances without pixels, and the selection of those that count."""

from __future__ import annotations

import hmac
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agent.deidentify.record import NO_SERIES, Record
from agent.domain import Selection, Split

Target = NDArray[np.int64] | NDArray[np.float32]  # of an example: see agent.domain.Example
State = Literal["eligible", "unlabelled", "face", "volume", "mask", "waiting", "held"]


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """One instance without its pixels and its file. Sealed at rest; for the site's own use."""

    name: str
    digest: str  # keyed, of the source file's bytes
    person: str
    study: str
    series: str
    modality: str
    kind: Literal["image", "volume", "mask"]
    label: str
    face: bool
    shape: tuple[int, ...] | None  # (h, w) or (h, w, 3) of the pixels; None for a volume
    body_part: str
    after: str  # SHA-256 of the file that is kept
    trace: str  # under which name the vault holds its trace; "": there is none
    defaced: bool = False
    uids: tuple[str, ...] = ()  # study, series and instance as the file says them; see Record
    picture: str = ""  # keyed, of the pixels as they are kept; "": there are none, or they show nothing
    masks: str = ""  # of a mask: the patient's series that it is of
    box: str = ""  # under which name pixels and file are sealed, where it is not ``name``: of an older version

    def held(self, back: Set[str]) -> bool:
        """Is it among the studies and series that are held back? An older version held them by their UIDs alone."""
        return not back.isdisjoint((self.study, self.series, *self.uids))

    def encode(self) -> bytes:
        """As JSON; ``masks`` of a mask alone, so that an older program reads a vault without masks."""
        named = (name for name in self.__slots__ if name != "masks" or self.masks)
        return json.dumps({name: getattr(self, name) for name in named}).encode()


def decode(raw: bytes) -> InstanceRecord:
    """Back from :meth:`InstanceRecord.encode`."""
    found = json.loads(raw)
    shape = found.pop("shape")
    found["uids"] = tuple(map(sys.intern, found.get("uids", ())))
    for name in ("person", "study", "series", "modality", "label", "body_part", "trace"):
        found[name] = sys.intern(found[name])  # many instances share them
    return InstanceRecord(shape=None if shape is None else tuple(shape), **found)


def head_of(record: Record, trace: str, picture: str) -> InstanceRecord:
    """The head of a record: the name under which its trace lies, and its image's keyed digest."""
    return InstanceRecord(
        name=record.name,
        digest=record.digest,
        person=record.pseudonym,
        study=record.study,
        series=record.series,
        modality=record.modality,
        kind=record.kind,
        label=record.label,
        face=record.face,
        shape=None if record.pixels is None else record.pixels.shape,
        body_part=record.body_part,
        after=record.after,
        trace=trace,
        uids=record.uids,
        picture=picture,
        masks=record.masks,
    )


class ExampleStore(Protocol):
    """Where examples are read from: the vault, or a study that is in memory for one prediction."""

    def heads(self) -> Iterable[InstanceRecord]:
        """Every instance, without its pixels."""

    def payload(self, name: str) -> bytes:
        """The de-identified file of an instance. Raises: KeyError, there is none."""

    def pixels(self, name: str) -> NDArray[np.float32]:
        """(h, w) or (h, w, 3) in [0, 1] of an image. Raises: KeyError, there is none."""

    def barred(self) -> Set[str]:
        """Series that are held back."""

    def held(self) -> Set[str]:
        """Studies that are held back."""

    def part_of(self, split: Split, person: str) -> str:
        """The part of a split that a patient is in."""


@dataclass(frozen=True, slots=True)
class StateCount:
    """How many instances and patients are in one state. For the site's own console, and nowhere else (P14)."""

    modality: str
    body_part: str
    state: State
    instances: int
    patients: int


def part_of(split: Split, key: bytes, person: str) -> str:
    """The part that a patient is in, by HMAC-SHA256 of its pseudonym: neither order nor number of patients matter.

    Args:
        split: the parts and their shares.
        key: the project's, 32 bytes.
        person: the pseudonym.
    """
    mark = hmac.new(key, json.dumps(["split", split.name, person]).encode(), sha256).digest()
    at = int.from_bytes(mark[:8], "big") * sum(split.parts.values()) >> 64  # uniform but for 2^-44
    for part, share in split.parts.items():
        if at < share:
            return part
        at -= share
    raise AssertionError("the shares fill the whole range")


class SeriesTally:
    """Heads seen one by one: how large each series is, and in which state each instance is."""

    def __init__(self, barred: Set[str], min_instances: int = 1) -> None:
        """``barred``: series and studies held back; ``min_instances``: of a series that is complete enough."""
        self._barred, self._least = barred, min_instances
        self._sizes: Counter[str] = Counter()

    def count(self, head: InstanceRecord) -> None:
        """Count an instance towards its series, eligible or not."""
        if self._least > 1:
            self._sizes[head.series] += 1

    def state(self, head: InstanceRecord) -> State:
        """Of an instance, once all have been counted. The first reason is told."""
        size = 1 if head.series == NO_SERIES else self._sizes[head.series]
        if head.held(self._barred):
            return "held"
        if head.kind != "image":
            return head.kind
        if head.face:
            return "face"
        if self._least > 1 and size < self._least:
            return "waiting"
        return "eligible" if head.label else "unlabelled"


def choose(
    heads: Iterable[InstanceRecord], selection: Selection, tally: SeriesTally, excluded: Set[str], key: bytes
) -> list[tuple[str, str, str]]:
    """The instances that count: pseudonym, name and label, in this order and so sorted.

    Args:
        heads: of everything in the vault, once.
        selection: the public rule.
        tally: new; it sees all the heads.
        excluded: pseudonyms that may not take part.
        key: the project's, for the split.
    """
    split, parts = selection.split, dict[str, str]()
    found = []
    for head in heads:
        tally.count(head)
        if not _fits(head, selection) or head.person in excluded:
            continue
        if split and head.person not in parts:
            parts[head.person] = part_of(split, key, head.person)
        if parts.get(head.person, "") == selection.part:
            found.append(head)
    return sorted((head.person, head.name, head.label) for head in found if tally.state(head) == "eligible")


def _fits(head: InstanceRecord, selection: Selection) -> bool:
    return (
        head.modality == selection.modality
        and _seen_as(head.shape, selection)
        and (not selection.body_part or head.body_part == selection.body_part)
        and (not selection.labels or head.label in selection.labels)
    )


def _seen_as(shape: tuple[int, ...] | None, selection: Selection) -> bool:
    """Can an image of that shape be seen as the selection wants it? Whether it can be fitted, its pixels say too."""
    wanted = selection.shape
    if shape is None or (len(wanted) == 3 and len(shape) != 3):  # grey can be made of colour, and not the reverse
        return False
    return min(shape[:2]) >= wanted[0] if selection.fit else shape[:2] == wanted[:2]


def counts(heads: Callable[[], Iterable[InstanceRecord]], tally: SeriesTally) -> tuple[StateCount, ...]:
    """Instances and patients by modality, body part and state, sorted.

    Args:
        heads: of everything in the vault; called twice, since a series' size is known at the end only.
        tally: new; it sees all the heads.
    """
    for head in heads():
        tally.count(head)
    instances: Counter[tuple[str, str, State]] = Counter()
    persons: dict[tuple[str, str, State], set[str]] = {}
    for head in heads():
        place = (head.modality, head.body_part, tally.state(head))
        instances[place] += 1
        persons.setdefault(place, set()).add(head.person)
    return tuple(StateCount(*place, instances[place], len(persons[place])) for place in sorted(instances))


@dataclass(frozen=True, slots=True, eq=False)
class FoundExample:
    """One example before its pixels are opened; a series may hold several volumes."""

    person: str
    heads: tuple[InstanceRecord, ...]
    target: Target | None  # None of a segmentation: its masks have it
    masks: tuple[str, ...] = ()  # the names of those that are of its series


@dataclass(frozen=True, slots=True, eq=False)
class FaceInstance:
    """An instance from which a face could be rebuilt, as input of defacing."""

    name: str
    kind: Literal["image", "volume", "mask"]
    modality: str
    person: str
    study: str
    series: str
    label: str
    payload: bytes = field(repr=False)  # the de-identified DICOM or NIfTI file


@dataclass(frozen=True, slots=True, eq=False)
class DefacedInstance:
    """An instance without its face."""

    name: str
    payload: bytes = field(repr=False)  # the new DICOM or NIfTI file
    pixels: NDArray[np.float32] | None = None  # (h, w) or (h, w, 3) in [0, 1] of the new file: of an image alone
    before: str = ""  # SHA-256 of the file that it was made of; "": whatever is there
