"""How it stands with the coordinator, as the site's health, its ``status`` and its console say it.

A process that runs is not a site that takes part: elsewhere one was "healthy" for three
weeks with an old certificate.
"""

from __future__ import annotations

import datetime as dt
from typing import Final

from protos.operations.event_counters import EventCounters

_LINK: Final = {  # states of the training link that are none to be in
    "unmet": "the coordinator has not answered since this service began; see `lazaret-agent doctor`",
    "unreachable": "the coordinator cannot be reached; see `lazaret-agent doctor`, or ask the coordinator",
    "another root": "what answers at the coordinator's address is not of the root that this site joined by; see "
    "`lazaret-agent doctor`, and compare the root's fingerprint by telephone",
    "turned away": "the coordinator does not accept this site's certificate; see `lazaret-agent doctor`",
    "unregistered": "the coordinator does not know this site's node key; ask the coordinator",
    "restarted": "the link's process ended and is started again; see agent.log if it goes on",
    "stopped": "the link has stopped; see link_failed in agent.log",
}


def connection_fault(tally: EventCounters) -> str | None:
    """What parts this site from the coordinator, since when, and what to do; None: it answers, or is not asked."""
    heard = tally.last("link")
    if heard is None or heard[1] not in _LINK:
        return None
    since = f"{dt.datetime.fromtimestamp(heard[0], dt.UTC):%Y-%m-%d %H:%M} UTC"
    return f"no part in rounds since {since}: {_LINK[heard[1]]}"
