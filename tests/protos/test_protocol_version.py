"""Two sides that are one version apart work together; two that are further apart say which one to upgrade."""

from __future__ import annotations

import itertools

import pytest

from protos.protocol_version import (
    FIRST,
    METADATA,
    NEWEST,
    OLDEST,
    OURS,
    NoCommonVersionError,
    VersionRange,
    agree,
    announced,
    answered,
)


def test_this_program_speaks_the_newest_protocol_and_the_one_before_it() -> None:
    assert (OURS.oldest, OURS.newest) == (NEWEST - 1, NEWEST) == (OLDEST, NEWEST)


def test_an_announcement_reads_back_and_silence_is_the_first_protocol() -> None:
    for spoken in (OURS, VersionRange(7, 9)):
        agent = f"lazaret-protocol/{spoken} grpc-python/1.85.1 grpc-c/52.0.0 (linux; chttp2)"
        assert announced([("user-agent", agent)]) == spoken == answered([(METADATA, str(spoken))])
    assert announced([("user-agent", "grpc-python/1.85.1")]) == FIRST == announced([]) == answered([])


@pytest.mark.parametrize(
    "bad", ["", "2", "2-", "0-1", "3-2", "1-1e9", "-1-2", "1-2-3", "1-2\n", "٢-٣", "1234567-1234568"]
)
def test_what_cannot_be_read_is_no_protocol(bad: str) -> None:
    with pytest.raises(NoCommonVersionError, match="an unreadable protocol"):
        VersionRange.of(bad)


def test_versions_one_apart_agree_on_what_both_speak_and_those_further_apart_never() -> None:
    for ours, theirs in itertools.product(range(2, 8), repeat=2):
        mine, other = VersionRange(ours - 1, ours), VersionRange(theirs - 1, theirs)
        if abs(ours - theirs) <= 1:
            assert agree(other, "agent", mine) == min(ours, theirs) == agree(mine, "coordinator", other)
        else:
            for they in ("agent", "coordinator"):
                with pytest.raises(NoCommonVersionError, match="too old" if theirs < ours else "too new") as told:
                    agree(other, they, mine)
                behind = they if theirs < ours else {"agent": "coordinator", "coordinator": "agent"}[they]
                assert f"upgrade the {behind}" in str(told.value), "the sentence names the side that is behind"


def test_one_single_protocol_that_is_newer_than_ours_is_refused() -> None:
    with pytest.raises(NoCommonVersionError, match="too new"):
        agree(VersionRange(NEWEST + 1, NEWEST + 1), "agent")
    with pytest.raises(NoCommonVersionError, match="too old"):
        agree(VersionRange(1, 1), "agent", VersionRange(2, 3))
