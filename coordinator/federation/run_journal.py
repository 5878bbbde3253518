"""What happened in a run, and when, a line for each event in the run's folder: a report is made of it afterwards.

Times are of the coordinator's clock, and bytes what its end of each site's link has counted. Nothing here is said by
a site, and nothing is signed: the ledger decides what a round is made of, and the journal tells how it came about.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from coordinator.federation.events import RunEvent, SignOfLife
from protos.common.durable_files import flush_directory
from protos.common.errors import ArtifactError

JOURNAL: Final = "events.jsonl"  # of a run's folder
END: Final = "end.json"  # the same: of a run that has finished or failed
_WITH_LINKS: Final = frozenset({"granted", "sent", "closed", "waiting", "stopped", "finished", "failed"})
_PAUSES: Final = frozenset({"waiting", "stopped"})


class JournalError(ArtifactError, ValueError):
    """A line of the journal is none."""


@dataclass(frozen=True, slots=True)
class LinkCount:
    """What a site's link has carried since the coordinator's process started."""

    received: int  # bytes from the site
    sent: int  # bytes to it
    answered: float  # when the newest piece of an answer came, seconds since 1970; 0: none has


@dataclass(frozen=True, slots=True)
class KeptEvent:
    """One line."""

    at: float  # seconds since 1970
    round: int  # 0: the price
    state: str
    sites: tuple[str, ...]
    reason: str
    missing: Mapping[str, str] = field(default_factory=dict)  # site -> code, of a round that came to nothing
    links: Mapping[str, LinkCount] = field(default_factory=dict)  # by site, at that time


def keep_event(
    folder: Path, event: RunEvent, at: float, signs: Mapping[str, SignOfLife], missing: Mapping[str, str]
) -> None:
    """Add an event, durable. A line that a crash has cut short is taken away first.

    Raises:
        OSError: it cannot be written.
    """
    links = {}
    if event.state in _WITH_LINKS:
        links = {site: [one.received, one.sent, round(one.answered, 2)] for site, one in signs.items()}
    told = {"at": round(at, 2), "round": event.round, "state": event.state, "sites": list(event.sites)}
    line = json.dumps({**told, "reason": event.reason, "missing": dict(missing), "links": links})
    fresh = not (folder / JOURNAL).exists()
    with (folder / JOURNAL).open("a+b") as out:
        if size := out.seek(0, os.SEEK_END):
            out.seek(size - 1)
            if out.read() != b"\n":
                out.seek(0)
                out.truncate(out.read().rfind(b"\n") + 1)
        out.write(line.encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())
    if fresh:
        flush_directory(folder)


def read_events(folder: Path) -> list[KeptEvent]:
    """All of them, oldest first; none for a run of a version that kept none.

    Raises:
        JournalError: a line is none. The last one may be cut short.
    """
    path = folder / JOURNAL
    if not path.exists():
        return []
    *lines, _cut = path.read_bytes().split(b"\n")
    return [_read(number, line) for number, line in enumerate(lines, 1)]


def _read(number: int, line: bytes) -> KeptEvent:
    try:
        told = json.loads(line)
        links = {site: LinkCount(int(up), int(down), float(at)) for site, (up, down, at) in told["links"].items()}
        at, index, missing = float(told["at"]), told["round"], dict(told["missing"])
        texts = [told["state"], told["reason"], *told["sites"], *missing, *missing.values()]
        if not math.isfinite(at) or type(index) is not int or not all(type(text) is str for text in texts):
            raise ValueError("a value of another type")
        return KeptEvent(at, index, told["state"], tuple(told["sites"]), told["reason"], missing, links)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise JournalError(f"{JOURNAL}: line {number} cannot be read") from None


def placed(events: Sequence[KeptEvent]) -> list[KeptEvent]:
    """A run that goes on asks for its prices again: after a closed round, what is said then is of the next one."""
    found, closed = [], 0
    for event in events:
        closed = event.round if event.state == "closed" else closed
        if event.round == 0 and closed:
            state = "refused" if event.state == "declined" else event.state
            found.append(replace(event, round=closed + 1, state=state))
        else:
            found.append(event)
    return found


def bytes_of(events: Sequence[KeptEvent]) -> dict[str, tuple[int, int]]:
    """Bytes (from each site, to it) from the price to the last event.

    Counters begin anew with the coordinator's process: one that is smaller than before counts from nothing. While a
    run is stopped or waits for persons, its sites may be in others: what is carried then is not counted.
    """
    total: dict[str, tuple[int, int]] = {}
    before: dict[str, LinkCount] = {}
    begins = True  # the counters of this event are where counting begins
    for event in events:
        if event.state not in _WITH_LINKS:
            continue
        for site, link in event.links.items():
            last = link if begins else before.get(site, LinkCount(0, 0, 0.0))
            if link.received < last.received or link.sent < last.sent:
                last = LinkCount(0, 0, 0.0)
            up, down = total.get(site, (0, 0))
            total[site] = up + link.received - last.received, down + link.sent - last.sent
            before[site] = link
        begins = event.state in _PAUSES
    return total


def answers_of(events: Sequence[KeptEvent]) -> dict[str, float]:
    """When the newest piece of an answer came from each site, within the run; seconds since 1970."""
    begun = events[0].at if events else 0.0
    newest = {site: link.answered for event in events for site, link in event.links.items()}
    return {site: at for site, at in newest.items() if at >= begun}


def state_of(folder: Path) -> str:
    """How a run stands, by the files of its folder: finished, failed, stopped (or asked to stop), or open.

    Raises:
        ValueError, KeyError, TypeError: the file of its end is damaged.
    """
    if (folder / END).exists():
        state = str(json.loads((folder / END).read_bytes())["state"])
        if state not in ("finished", "failed"):
            raise ValueError(f"{END}: an unknown state")
        return state
    return "stopped" if (folder / "stop").exists() else "open"
