"""What the pages of the coordinator console work with, and who may see what."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from coordinator.edges.authority import Authority
from coordinator.edges.home import Home
from coordinator.edges.runs import Runs
from coordinator.edges.sessions import Sessions
from coordinator.edges.shelf import Shelf
from coordinator.intake import Intake
from policies.search import Index
from policies.store import Store
from protos.web.pages import Person

OPERATOR: Final = "operator"
RESEARCHER: Final = "researcher"
COMPLIANCE: Final = "compliance"
HOSPITAL: Final = "hospital"
AUDITOR: Final = "auditor"
READERS: Final = frozenset({OPERATOR, RESEARCHER, COMPLIANCE, HOSPITAL, AUDITOR})
INFORMED: Final = READERS - {RESEARCHER}  # who sees what was refused to any hospital


@dataclass(frozen=True, slots=True)
class Desk:
    """The serving coordinator, as its pages see it. The ledger's fold decides; a page only shows and passes on."""

    home: Home
    store: Store
    intake: Intake
    runs: Runs
    shelf: Shelf
    sessions: Sessions
    authority: Authority
    index: Index
    expel: Callable[[str], object]  # end a site's open calls
    log: Any
    now: Callable[[], dt.datetime]

    def person(self, name: str) -> Person | None:
        """Who is in office under this name today; None: may do nothing here."""
        known = self.store.state.in_office(name)
        return Person(name, known.role, known.public) if known is not None else None
