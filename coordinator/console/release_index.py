"""A searchable list of the admitted releases, updated with the ledger state, so that a page need not read all of
them.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from policies.ledger.entries import Admitted
from policies.ledger.state import State

_NAMES: Final = ("site", "level", "mechanism")


@dataclass(frozen=True, slots=True)
class ReleasePage:
    """One page of the releases that were asked for, newest first."""

    entries: tuple[Admitted, ...]
    total: int  # that fit
    every: int  # there are
    page: int
    last: int
    choices: Mapping[str, list[str]]  # what can be chosen from, as far as there are releases of it


class Listed:
    """Releases of one hospital, and the updates of each run, in the order of the ledger. It grows with the fold."""

    def __init__(self) -> None:
        """Nothing is taken yet."""
        self._lock = threading.Lock()
        self._begin()

    def _begin(self, state: State | None = None) -> None:
        self._state, self._taken = state, 0
        self._alone: list[Admitted] = []
        self._groups: dict[tuple[str, str, str], list[int]] = {}  # site, level, mechanism -> places in `alone`
        self._runs: dict[str, list[Admitted]] = {}

    def _take(self, state: State) -> None:
        """What was admitted since; everything, where the fold was made again."""
        if state is not self._state or len(state.releases) < self._taken:
            self._begin(state)
        new = islice(reversed(state.releases.values()), len(state.releases) - self._taken)
        for entry in reversed(list(new)):
            if entry.run:
                self._runs.setdefault(entry.run, []).append(entry)
            else:
                group = (entry.site, entry.level, entry.mechanism)
                self._groups.setdefault(group, []).append(len(self._alone))
                self._alone.append(entry)
            self._taken += 1

    def of_run(self, state: State, run: str) -> Sequence[Admitted]:
        """The updates of a run, oldest first.

        Args:
            state: the fold, under its lock.
            run: its name.
        """
        with self._lock:
            self._take(state)
            return tuple(self._runs.get(run, ()))

    def sheet(self, state: State, wanted: Mapping[str, str], page: int, most: int) -> ReleasePage:
        """A page of those that were asked for: site, level and method exactly, and a part of the name.

        Args:
            state: the fold, under its lock.
            wanted: ``site``, ``level``, ``mechanism``, ``text``; "" for any.
            page: the first is 1; one that is not there becomes the nearest that is.
            most: releases on a page.
        """
        text = wanted.get("text", "").strip().lower()
        with self._lock:
            self._take(state)
            chosen = [
                places
                for group, places in self._groups.items()
                if all(wanted.get(name, "") in ("", of) for name, of in zip(_NAMES, group, strict=True))
            ]
            if text:
                chosen = [[n for n in places if text in self._alone[n].release] for places in chosen]
            total = sum(map(len, chosen))
            last = max(1, -(-total // most))
            page = min(max(1, page), last)
            whole = range(len(self._alone) - 1, -1, -1)
            newest = whole if total == len(whole) else heapq.merge(*map(reversed, chosen), reverse=True)
            cut = islice(newest, (page - 1) * most, page * most)
            choices = {name: sorted({group[at] for group in self._groups}) for at, name in enumerate(_NAMES)}
            return ReleasePage(tuple(self._alone[n] for n in cut), total, len(self._alone), page, last, choices)
