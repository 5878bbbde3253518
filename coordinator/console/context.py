"""The context of the coordinator console's pages, and the permissions of roles."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from coordinator.admission import AdmissionService
from coordinator.enrolment.authority import Authority
from coordinator.federation.run_manager import RunManager
from coordinator.gateway.notifications import Sessions
from coordinator.storage.directory import CoordinatorDirectory
from coordinator.storage.release_store import ReleaseStore
from policies.index.search import Index
from policies.ledger.store import Store
from protos.web.router import LoggedInPerson

OPERATOR: Final = "operator"
RESEARCHER: Final = "researcher"
COMPLIANCE: Final = "compliance"
HOSPITAL: Final = "hospital"
AUDITOR: Final = "auditor"
READERS: Final = frozenset({OPERATOR, RESEARCHER, COMPLIANCE, HOSPITAL, AUDITOR})
INFORMED: Final = READERS - {RESEARCHER}  # who sees what was refused to any hospital


@dataclass(frozen=True, slots=True)
class CoordinatorConsoleContext:
    """The serving coordinator, as its pages see it. The ledger's fold decides; a page only shows and passes on."""

    home: CoordinatorDirectory
    store: Store
    intake: AdmissionService
    runs: RunManager
    shelf: ReleaseStore
    sessions: Sessions
    authority: Authority
    index: Index
    close_calls: Callable[[str], object]  # end a site's open calls
    log: Any
    now: Callable[[], dt.datetime]

    def person(self, name: str) -> LoggedInPerson | None:
        """Who is in office under this name today; None: may do nothing here."""
        known = self.store.state.active_person(name)
        return LoggedInPerson(name, known.role, known.public) if known is not None else None
