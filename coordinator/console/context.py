"""The context of the coordinator console's pages, and the permissions of roles."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator.daemon import CoordinatorRuntime
from policies.index.search import Index
from protos.web.router import LoggedInPerson

OPERATOR: Final = "operator"
RESEARCHER: Final = "researcher"
COMPLIANCE: Final = "compliance"
HOSPITAL: Final = "hospital"
AUDITOR: Final = "auditor"
READERS: Final = frozenset({OPERATOR, RESEARCHER, COMPLIANCE, HOSPITAL, AUDITOR})
INFORMED: Final = READERS - {RESEARCHER}  # who sees what was refused to any hospital


@dataclass(frozen=True, slots=True)
class CoordinatorConsoleContext(CoordinatorRuntime):
    """The serving coordinator, as its pages see it. The ledger's fold decides; a page only shows and passes on."""

    index: Index
    now: Callable[[], dt.datetime]

    def person(self, name: str) -> LoggedInPerson | None:
        """Who is in office under this name today; None: may do nothing here."""
        known = self.store.state.active_person(name)
        return LoggedInPerson(name, known.role, known.public) if known is not None else None
