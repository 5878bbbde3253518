"""Who is in which round of a run, and who is not and why. It is durable before the round is closed.

The ledger knows whose update is in a model. Who was asked and gave none, it does not know: such a site has sent
nothing. A model of a part of the sites must be seen to be one, in its certificate, on its card and on the run's page.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.common.durable_files import replace_file


@dataclass(frozen=True, slots=True)
class RoundMembers:
    """One closed round, or one look."""

    number: int  # from 1, looks counted
    look: bool
    sites: tuple[str, ...]  # whose update or sums are in it
    missing: Mapping[str, str]  # site -> code

    def keep(self, folder: Path) -> None:
        """Write it into the run's folder."""
        told = {**self.to_table(), "missing": dict(self.missing)}
        replace_file(folder / f"round-{self.number}.sites", json.dumps(told).encode())

    def to_table(self) -> dict[str, Any]:
        """For the certificate: who is in it and who is not. Why stays on the coordinator's own pages."""
        kind = "look" if self.look else "training"
        return {"round": self.number, "kind": kind, "sites": [*self.sites], "missing": sorted(self.missing)}


def members(folder: Path, closed: int) -> list[RoundMembers]:
    """Those of the first ``closed`` rounds; a round of a version before they were kept is left out."""
    found = []
    for number in range(1, closed + 1):
        path = folder / f"round-{number}.sites"
        if path.exists():
            told = json.loads(path.read_bytes())
            found.append(RoundMembers(number, told["kind"] == "look", tuple(told["sites"]), told["missing"]))
    return found


def sentence(sites: Sequence[str], rounds: Sequence[Collection[str]]) -> str:
    """Who took part, in words. ``rounds``: the sites of each.

    >>> sentence(("a", "b"), [("a", "b"), ("a", "b")])
    'all 2 sites are in all 2 rounds'
    >>> sentence(("a", "b", "c"), [("a", "b"), ("a",)])
    'b is in 1 of 2 rounds, c in none; the other sites are in all'
    """
    counts = {site: sum(site in there for there in rounds) for site in sites}
    partly = {site: count for site, count in counts.items() if count < len(rounds)}
    if not partly:
        return f"all {len(sites)} sites are in all {len(rounds)} rounds"
    told: list[str] = []
    for site, count in partly.items():
        verb = "" if told else "is "
        told.append(f"{site} {verb}in {f'{count} of {len(rounds)} rounds' if count else 'none'}")
    others = "; the other sites are in all" if len(partly) < len(sites) else ""
    return ", ".join(told) + others
