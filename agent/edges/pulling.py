"""What a pull from an archive works with, and what it tells of itself: counts, and never anything of a patient."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.edges.room import Room


class Journal(Protocol):
    """A sealed note of the project: which studies need not be asked for again. To empty it is always safe."""

    def read(self) -> Mapping[str, Sequence[int]]:
        """As written; empty at first."""

    def write(self, value: Mapping[str, Sequence[int]]) -> None:
        """Keep it instead."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is."""

    studies_done: int
    studies: int
    instances_done: int  # had already or fetched
    expected: int  # in the studies looked into so far


@dataclass(frozen=True, slots=True)
class Ports:
    """What a pull works with. All are called by one thread at a time."""

    room: Room
    already: Callable[[str], bool]  # SOP Instance UID: in the first room, the vault or the quarantine?
    journal: Journal
    now: Callable[[], dt.datetime]  # local time
    sleep: Callable[[float], None]  # seconds; by all threads at once
    progress: Callable[[Progress], None] = lambda _progress: None
    stopping: Callable[[], bool] = lambda: False
    waiting: Callable[[dt.datetime], None] = lambda _until: None  # a wait for the hours begins; when it ends


@dataclass(frozen=True, slots=True)
class PullReport:
    """What became of a pull: counts only, so that it can be shown outside the vault."""

    studies: int
    unchanged: int  # studies complete before, or given up, and not asked for again
    expected: int
    had: int
    fetched: int
    missing: int  # instances that did not come, the too large ones included
    incomplete: int  # studies they belong to
    failed: int  # studies that the archive could not be asked about to the end, or only with failures
    given_up: int  # of the incomplete or failed ones: asked for in as many runs as may be
    unasked: int
    duplicates: int
    too_large: int
    malformed: int  # matches with a UID that is none, not asked for
    foreign: int  # objects of no standard storage class, not asked for
    unfit: int  # matches that are not what the query says, not asked for
    unlisted: int  # instances the archive counts but does not list
    status: int  # the last failure the archive reported for a retrieval (PS3.4 table C.4-2, C.4-3); 0: none
    stopped: bool  # before the end: the hours are over, or somebody asked for it
    asked: bool  # was the archive asked at all? Not outside its hours
    trouble: str  # C-MOVE: a sentence, when the archive delivered nothing and says that it failed; else ""

    @property
    def complete(self) -> bool:
        """Does the site have all that the archive has?"""
        return not (self.stopped or self.missing or self.failed or self.unlisted or self.malformed)
