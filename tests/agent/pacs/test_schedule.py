"""Quiet hours, the rate, and the settings of an archive."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pynetdicom import AllStoragePresentationContexts

from agent.pacs.archive import ArchiveConfig, ArchiveQuery
from agent.pacs.dimse.requestor import storage_contexts
from agent.pacs.schedule import Clock, Hours, RateLimiter


def at(hour: int, minute: int = 0, second: int = 0) -> dt.datetime:
    return dt.datetime(2026, 3, 2, hour, minute, second)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(6, 600))
def test_the_turns_of_a_pace_are_never_closer_than_the_rate(counts: list[int], per_minute: int) -> None:
    now = [at(12)]

    def sleep(seconds: float) -> None:
        now[0] += dt.timedelta(seconds=seconds)

    pace = RateLimiter("", True, per_minute, Clock(lambda: now[0], sleep))
    for count in counts:
        pace.take(count)
    elapsed = (now[0] - at(12)).total_seconds()
    assert elapsed >= sum(counts[:-1]) * 60 / per_minute - 1e-3


times = st.times().map(lambda t: t.replace(second=0, microsecond=0))


@given(times, times, st.datetimes(dt.datetime(2020, 1, 1), dt.datetime(2030, 1, 1)))
def test_after_waiting_the_hours_hold_and_not_a_second_before(
    start: dt.time, end: dt.time, when: dt.datetime
) -> None:
    if start == end:
        with pytest.raises(ValueError, match="22:00-06:00"):
            Hours.parse(f"{start:%H:%M}-{end:%H:%M}")
        return
    hours = Hours.parse(f"{start:%H:%M}-{end:%H:%M}")
    inverse = Hours(end, start)
    assert hours.hold(when) is not inverse.hold(when)
    wait = hours.opens_in(when)
    assert 0 <= wait < 86400
    assert hours.hold(when + dt.timedelta(seconds=wait))
    assert wait == 0 or not hours.hold(when + dt.timedelta(seconds=wait, microseconds=-1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"aet": ""}, {"aet": "A" * 17}, {"calling": "A\\B"}, {"port": 0}, {"port": 65536}, {"hours": "22-06"},
        {"host": ""}, {"associations": 0}, {"associations": 17}, {"per_minute": 5}, {"per_minute": -1},
        {"retries": 0}, {"max_bytes": 0}, {"answer_seconds": float("nan")}, {"connect_seconds": 0.0},
        {"user": "x"}, {"name": "a b"}, {"least_free_bytes": -1},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    good = ArchiveConfig("pacs", "AET", "127.0.0.1", 104, "LAZARET")
    with pytest.raises(ValueError, match=r"pacs|hours"):
        replace(good, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"patients": ("PAT*",)}, {"patients": ("",)}, {"patients": ("a\\b",)}, {"accessions": ("?",)},
        {"modalities": ("mr",)}, {"modalities": ("*",)}, {"body_part": "*"},
        {"since": dt.date(2024, 2, 1), "until": dt.date(2024, 1, 1)},
    ],
)  # fmt: skip
def test_a_query_with_wildcards_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="query"):
        ArchiveQuery(**wrong)  # type: ignore[arg-type]


@given(
    st.sets(
        st.sampled_from([str(c.abstract_syntax) for c in AllStoragePresentationContexts]), min_size=1, max_size=12
    )
)
def test_contexts_fit_one_association_and_every_class_has_the_plain_syntaxes(classes: set[str]) -> None:
    contexts = storage_contexts(classes)
    assert len(contexts) <= 127
    assert len(set(contexts)) == len(contexts)
    assert {(name, plain) for name in classes for plain in ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1")} <= set(
        contexts
    )
