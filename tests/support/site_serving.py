"""The part of an agent's ``serve`` that holds the ledger and answers commands, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from agent.event_log import open_log
from agent.runtime import open_runtime, recover_at_startup
from agent.service.job_runner import JobRunner
from agent.service.ledger_access import BorrowedLedger, SharedLedger
from agent.service.site import site_app
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import LedgerBusyError
from protos.service.control_socket import control_socket
from tests.support.federation_world import Site


@contextmanager
def receiving(site: Site) -> Iterator[None]:
    """The part of ``serve`` without ``--modality`` that answers commands: it opens the ledger for each act."""
    log = open_log(site.home.root / "agent.log")
    with control_socket(site.home.root, site_app(site.home, BorrowedLedger(site.home), log), log):
        yield


@contextmanager
def serving(site: Site, *, jobs: bool = False) -> Iterator[None]:
    """The part of ``serve`` that holds the ledger; with ``jobs``, it runs these, too."""
    with open_runtime(site.home.root, lambda *_: None) as runtime:
        recover_at_startup(runtime)
        log = open_log(site.home.root / "agent.log")
        ledger = SharedLedger(runtime)
        with control_socket(site.home.root, site_app(site.home, ledger, log), log):
            with pytest.raises(LedgerBusyError, match=r"process \d+ is writing the ledger: wait until it has ended"):
                open_sqlite(site.home.root / "ledger.db")
            with JobRunner(site.home, ledger, log) if jobs else nullcontext():
                yield
