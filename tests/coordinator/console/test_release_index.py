"""The list of releases: exact whatever is asked for, and no page of it looks at all releases."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from coordinator.console.release_index import Listed
from policies.ledger.entries import Admitted
from policies.ledger.state import State

MOST = 7
BY = ("site", "level", "mechanism")


class Watched(dict[str, Admitted]):
    """Releases that count how many of them are looked at through the dictionary."""

    seen = 0

    def values(self) -> Any:
        watched, whole = self, super().values()

        class View:
            def __iter__(self) -> Iterator[Admitted]:
                for one in whole:
                    watched.seen += 1
                    yield one

            def __reversed__(self) -> Iterator[Admitted]:
                for one in reversed(whole):
                    watched.seen += 1
                    yield one

        return View()


def release(n: int, rng: random.Random) -> Admitted:
    site, level, way = rng.choice("abc"), rng.choice(["A", "B", "C"]), rng.choice(["ksame", "ksalsa", "distill"])
    run = f"run-{rng.randrange(3)}" if n % 3 == 0 else ""
    name = f"{rng.choice(['heart', 'eye'])}-{n}"
    return Admitted(name, f"g{n}", site, run, 1, way, level, 1, b"{}", bytes(32), n.to_bytes(32), "")


def grown(state: State, first: int, end: int, rng: random.Random) -> None:
    for n in range(first, end):
        entry = release(n, rng)
        state.releases[entry.release] = entry


def scan(state: State, wanted: Mapping[str, str]) -> list[Admitted]:
    """What a reading of everything finds."""
    fits = (a for a in state.releases.values() if not a.run)
    same = (a for a in fits if all(wanted.get(name, "") in ("", getattr(a, name)) for name in BY))
    return [a for a in same if wanted.get("text", "").strip().lower() in a.release][::-1]


@pytest.mark.parametrize("seed", range(4))
def test_every_page_of_any_filter_is_what_a_reading_of_all_finds(seed: int) -> None:
    rng, state, listed, size = random.Random(seed), State(), Listed(), 0
    for _ in range(60):
        grown(state, size, size + rng.randrange(8), rng)
        size = len(state.releases)
        wanted = {name: rng.choice(["", "", "a", "B", "ksame", "nothing"]) for name in BY if rng.random() < 0.5}
        wanted["text"] = rng.choice(["", "", " Eye", "art-1", "%", "no such"])
        found, page = scan(state, wanted), rng.randrange(-1, 12)
        sheet = listed.sheet(state, wanted, page, MOST)
        assert (sheet.total, sheet.last) == (len(found), max(1, -(-len(found) // MOST)))
        assert sheet.page == min(max(1, page), sheet.last)
        assert list(sheet.entries) == found[(sheet.page - 1) * MOST : sheet.page * MOST]
        alone = scan(state, {})
        assert sheet.every == len(alone)
        assert sheet.choices == {name: sorted({getattr(a, name) for a in alone}) for name in BY}
        run = f"run-{rng.randrange(4)}"
        assert list(listed.of_run(state, run)) == [a for a in state.releases.values() if a.run == run]


def test_a_page_looks_at_what_is_new_and_not_at_all_releases_again() -> None:
    rng, state, listed = random.Random(5), State(), Listed()
    state.releases = releases = Watched()
    grown(state, 0, 500, rng)
    listed.sheet(state, {}, 1, MOST)
    assert releases.seen == 500
    for wanted in ({}, {"site": "a"}, {"text": "eye"}):
        listed.sheet(state, wanted, 3, MOST)
    listed.of_run(state, "run-1")
    grown(state, 500, 503, rng)
    assert [a.release for a in listed.sheet(state, {}, 1, MOST).entries] == [
        a.release for a in [*dict.values(releases)][::-1] if not a.run
    ][:MOST]
    assert releases.seen == 503, "each once"


def test_a_fold_that_was_made_again_is_taken_anew() -> None:
    rng, listed, first, second = random.Random(6), Listed(), State(), State()
    grown(first, 0, 40, rng)
    grown(second, 0, 40, rng)
    listed.sheet(first, {}, 1, MOST)
    assert list(listed.sheet(second, {}, 1, 100).entries) == scan(second, {})
