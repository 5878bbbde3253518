"""Which enrolled hospitals are not here, since when, and why as far as it can be told: for the console and health."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.federation.events import SignOfLife
from coordinator.gateway.notifications import Presence
from policies.ledger.state import State
from protos.common.text import MINUTE, utc

_QUIET_S: Final = 120.0  # an agent that starts checks its noise before it opens its training link


@dataclass(frozen=True, slots=True)
class AbsentSite:
    """A hospital that is expected and not there."""

    site: str
    since: float | None  # seconds since 1970; None: before this process began
    why: str

    @property
    def words(self) -> str:
        """In a line."""
        since = "the coordinator's start" if self.since is None else f"{utc(int(self.since), MINUTE)} UTC"
        return f"{self.site} is missing since {since}: {self.why}"


def newest_certificates(state: State) -> dict[str, int | None]:
    """By site that is enrolled: when its newest certificate that is not revoked ends; None without any."""
    found: dict[str, int | None] = dict.fromkeys(state.sites)
    for number, issued in state.issued.items():
        if number not in state.revoked:
            found[issued.site] = max(found.get(issued.site) or 0, issued.not_after)
    return found


def absent_sites(
    state: State, presence: Mapping[str, Presence], signs: Mapping[str, SignOfLife], now: dt.datetime
) -> list[AbsentSite]:
    """Every enrolled hospital that is not revoked and could not be asked for a round now, by name.

    Args:
        state: of the ledger, under its lock.
        presence: how each site's session stands.
        signs: the last sign of life of each site's training link.
        now: UTC.
    """
    at, ends, found = now.timestamp(), newest_certificates(state), []
    for site in sorted(set(state.sites) - state.revoked_sites):
        there, end = presence.get(site), ends.get(site)
        if there is None or not there.online:
            why = "its agent has not connected" if there is None else "its agent's connection ended"
            if end is None:
                why += ", and none of its certificates is valid: invite it again"
            elif end <= at:
                why += f", and its certificate ended at {utc(end, MINUTE)} UTC: start its agent, which renews it"
            found.append(AbsentSite(site, None if there is None else there.since, why))
        elif at - there.since > _QUIET_S and not (site in signs and at - signs[site].at < _QUIET_S):
            heard = signs[site].at if site in signs else there.since
            found.append(
                AbsentSite(site, heard, "its agent is connected, and its training link is not: see agent.log")
            )
    return found
