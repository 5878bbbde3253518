from __future__ import annotations

import datetime as dt

from coordinator.federation.events import SignOfLife
from coordinator.gateway.notifications import Presence
from coordinator.operations.attendance import absent_sites
from policies.ledger.entries import Enrolled, Issued
from policies.ledger.state import State

NOW = dt.datetime(2026, 11, 28, 12, tzinfo=dt.UTC)
AT = NOW.timestamp()


def enrolled(**ends: float | None) -> State:
    """Sites, and when the certificate of each ends, in seconds from now; None: it has none."""
    state = State()
    state.sites = {site: Enrolled(site, b"", b"", b"", "") for site in ends}
    state.issued = {site: Issued(site, site, b"", int(AT + end)) for site, end in ends.items() if end is not None}
    return state


def test_who_is_not_here_is_named_with_the_time_and_the_reason() -> None:
    state = enrolled(north=60, old=-60, never=60, bare=None, gone=60, silent=60)
    state.revoked_sites = {"gone"}
    presence = {
        "north": Presence(True, AT - 600),
        "old": Presence(False, AT - 3600),
        "bare": Presence(False, AT - 10),
        "silent": Presence(True, AT - 600),
    }
    signs = {"north": SignOfLife(AT - 5, 0, 0, 0.0, "working"), "silent": SignOfLife(AT - 500, 0, 0, 0.0, "idle")}
    told = {one.site: one for one in absent_sites(state, presence, signs, NOW)}
    assert set(told) == {"old", "never", "bare", "silent"}
    assert told["old"].words == (
        "old is missing since 2026-11-28 11:00 UTC: its agent's connection ended, and its certificate ended at "
        "2026-11-28 11:59 UTC: start its agent, which renews it"
    )
    assert told["never"].words == "never is missing since the coordinator's start: its agent has not connected"
    assert "none of its certificates is valid" in told["bare"].why
    assert (told["silent"].since, "training link" in told["silent"].why) == (AT - 500, True)


def test_an_agent_that_has_just_started_is_given_time_for_its_link() -> None:
    state = enrolled(north=60)
    assert absent_sites(state, {"north": Presence(True, AT - 30)}, {}, NOW) == []
    assert absent_sites(state, {"north": Presence(True, AT - 300)}, {}, NOW)
