"""The consoles over ledgers of a million entries: pages by the index, against a scan of the ledger.

Pages are asked for over the console's own TLS by a person who is logged in, in random order: filters of every kind,
pages from the newest to the oldest, searches of words, entries with their proofs, and every page of the menu. A
page's time is wall time from the request to the last byte, on one machine; so the client's share is in it.

Three consoles: the coordinator's over SQLite, the coordinator's over PostgreSQL (a server of its own, where one is
installed), and a site's over its own ledger (:mod:`tests.benchmarks.site_console`). Then the reports of the
coordinator, in processor time: see :func:`reports`.

``page_vs_scan`` is the median page of the ledger over one reading of all entries that finds the same ones: what a
console without an index would do for each page. Enough memory for the fold is needed: about 2 GB.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.admission import AdmissionService
from coordinator.console.app import pages as console_pages
from coordinator.console.context import CoordinatorConsoleContext
from coordinator.enrolment.authority import Authority
from coordinator.event_log import open_log
from coordinator.federation.run_manager import RunManager
from coordinator.gateway.notifications import NotificationStreams
from coordinator.reports.catalog import make
from coordinator.storage import directory as homes
from coordinator.storage.directory import look_at_ledger
from coordinator.storage.release_store import ReleaseStore
from policies.governance import decisions
from policies.index.follower import IndexFollower
from policies.index.search import BATCH, Index
from policies.ledger.backends.postgres import install, open_postgres
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import LedgerBackend, Store
from policies.review.policy import parse
from policies.statements import release_id
from protos.web.client_certificates import PinnedCertificates
from protos.web.server import ConsoleServer
from protos.web.settings import ConsoleSettings
from tests.benchmarks import site_console
from tests.benchmarks.console_ledgers import (
    START,
    Clock,
    Question,
    accounts_of,
    asked,
    entered,
    fill,
    indexed,
    scan,
    told,
)
from tests.benchmarks.report import Report, Row
from tests.benchmarks.stories import SITES, Site
from tests.support.coordinator_runs import Grid, Host
from tests.support.ledger_world import Hospital, policy
from tests.support.postgres import OWNER, WRITER, binaries, throwaway

ENTRIES = 1_000_000
ASKED = 240  # pages
LAX = policy(epsilon=100.0, max_releases_per_patient=1_000_000)
SIGNED = "ksame-site-0-signed"  # a release whose statements are really signed and kept: a certificate is about it


def build(home: homes.CoordinatorDirectory, disk: LedgerBackend, entries: int) -> int:
    """Fill the ledger of a coordinator's directory; the time of its last entry."""
    clock = Clock()
    with Store(disk, homes.ORIGIN, home.ledger_key(), clock) as store:
        intake, signed = AdmissionService.over(store, parse(LAX, "policy")), Hospital("site-0", LAX)
        sites = []
        for real in (signed, *(Hospital(f"site-{n}", LAX) for n in range(1, SITES))):
            intake.enrol(real.enrolment()[1])
            sites.append(accounts_of(store, real))
        for name, role in (("otto", "auditor"), ("dora", "compliance"), ("hugo", "hospital")):
            decisions.appoint(store, name, role, Ed25519PrivateKey.generate().public_key().public_bytes_raw())
        certified = Site(signed, sites[0].accounts)
        for key, draft in (certified.reserve(SIGNED), *certified.release(SIGNED)):
            store.append(key, draft)
        fill(store, sites, entries)
    return clock.now


@contextmanager
def served(
    home: homes.CoordinatorDirectory, now: int, what: str, rows: list[Row]
) -> Iterator[tuple[httpx.Client, CoordinatorConsoleContext]]:
    """The whole console over that ledger, and an auditor who is logged in."""
    with ExitStack() as stack:
        start = time.perf_counter()
        store = stack.enter_context(homes.open_ledger(home))
        rows.append(Row(f"{what}: the ledger is opened: fold and tree", time.perf_counter() - start, "s"))
        index = Index(home.root / "search.db", lambda: look_at_ledger(home))
        stack.enter_context(indexed(index, BATCH, what, rows))  # in batches, as its thread does
        stack.enter_context(IndexFollower(index))
        log = open_log(home.root / "coordinator.log")
        intake, host = AdmissionService.over(store, home.policy()), Host(Grid({}))
        shelf = ReleaseStore(home.releases, store)
        context = CoordinatorConsoleContext(
            home=home,
            store=store,
            intake=intake,
            runs=RunManager(home.root / "runs", host, intake, shelf, log),  # type: ignore[arg-type]
            shelf=shelf,
            sessions=NotificationStreams(log),
            signs=dict,
            authority=Authority(home, intake, lambda: dt.datetime.now(dt.UTC)),
            index=index,
            close_calls=lambda _site: None,
            log=log,
            now=lambda: dt.datetime.fromtimestamp(now, dt.UTC),
        )
        settings, logins = ConsoleSettings(listen="127.0.0.1:0"), PinnedCertificates(home.root / "logins")
        app = console_pages(context, settings, logins).guarded()
        serving = stack.enter_context(ConsoleServer(app, settings, logins, home.root))
        yield stack.enter_context(entered(serving, home.root, logins)), context


def questions(rng: random.Random, size: int, last: int) -> list[Question]:
    """Kind of page, path and query: as people mix them."""
    kinds = ("refused", "admitted", "spent", "reserved", "expired", "sent")
    words = ("min_k", "run-00000*", "site-3 budget", "restart", "rule=l_diversity ksame", "level=a federated")
    found: list[Question] = []
    for n in range(ASKED):
        query: dict[str, Any] = {}
        if n % 3:
            query["kind"] = rng.choice(kinds)
        if n % 4 == 1:
            query["site"] = f"site-{rng.randrange(SITES)}"
        if n % 5 == 2:
            day = dt.datetime.fromtimestamp(rng.randrange(START, last), dt.UTC).date()
            query |= {"since": day.isoformat(), "until": (day + dt.timedelta(days=rng.randrange(60))).isoformat()}
        if n % 7 == 3:
            query["text"] = rng.choice((*words, f"run-{rng.randrange(size // 16):07d}"))
        if n % 2:
            query["before"] = rng.randrange(100, size)
        found.append(("ledger, filtered" if set(query) - {"before"} else "ledger, unfiltered", "/ledger", query))
    for n in range(ASKED // 4):
        found.append(("entry with its proof", f"/ledger/{rng.randrange(size)}", {}))
        found.append(("overview", "/", {}))
        found.append(("refusals", "/refusals", {"days": rng.choice((7, 90, 365))}))
        found.append(("budgets of a site", f"/budgets/site-{n % SITES}", {"days": rng.choice((90, 3650))}))
    for _ in range(ASKED // 16):
        found += [(path[1:], path, {}) for path in ("/releases", "/rounds", "/people", "/policies", "/exports")]
    rng.shuffle(found)
    return found


def coordinator(root: Path, entries: int, what: str, ledger: str = "") -> tuple[list[Row], dict[str, list[float]]]:
    """Build, serve, ask; milliseconds by kind of page.

    Args:
        root: a new directory.
        entries: how many.
        what: the ledger's kind, for the rows.
        ledger: a PostgreSQL address; "" for SQLite.
    """
    settings = 'listen = "127.0.0.1:0"\n' + (f'ledger = "{ledger}"\n' if ledger else "")
    home = homes.create(root, settings, LAX, dt.datetime.now(dt.UTC))
    start = time.perf_counter()
    last = build(home, open_postgres(ledger) if ledger else open_sqlite(home.ledger), entries)
    rows = [Row(f"{what}: a ledger of {entries} entries is written", time.perf_counter() - start, "s")]
    with served(home, last, what, rows) as (client, context):
        times = asked(client, questions(random.Random(0), context.store.state.size, last))
    size = sum(path.stat().st_size for path in root.glob("search.db*")) / (1 << 20)
    rows += [*told(what, times), Row(f"{what}: the index on the disk", size, "MB")]
    return rows, times


def reports(home: homes.CoordinatorDirectory) -> list[Row]:
    """Processor seconds of the reports that need no statement but one: this ledger keeps no others.

    ``denied`` and ``burn-down`` list everything there is, so most of their time is the writing of it.
    """
    rows, now, release = [], dt.datetime(2026, 3, 1, tzinfo=dt.UTC), release_id("site-0", SIGNED, 0)
    for name, form, about in (
        ("certificate", "json", release),
        ("card", "md", release),
        ("denied", "json", ""),
        ("burn-down", "json", ""),
        ("bundle", "zip", ""),
    ):
        busy = time.process_time()
        make(home, name, form, about, now)
        rows.append(Row(f"report: {name}.{form}", time.process_time() - busy, "cpu-s"))
    return rows


def over_postgres(root: Path, entries: int) -> tuple[list[Row], dict[str, float]]:
    """The coordinator's pages where the ledger lies in PostgreSQL; nothing where none is installed."""
    if binaries() is None:
        return [], {}
    with throwaway() as server:
        install(server.dsn(OWNER), WRITER)
        rows, times = coordinator(root, entries, "PostgreSQL", server.dsn(WRITER))
        scanned = scan(look_at_ledger(homes.CoordinatorDirectory(root)), "site-3")
    return [*rows, Row("PostgreSQL: one reading of the whole ledger", scanned, "s")], ratios(
        "postgres_", times, scanned
    )


def ratios(prefix: str, times: dict[str, list[float]], scanned: float) -> dict[str, float]:
    """The pages against a reading of everything, and against the bounds of the issue."""
    page = median(times["ledger, filtered"])
    slowest = max(median(taken) for what, taken in times.items() if what != "overview")
    return {
        f"{prefix}page_vs_scan": page / (1000 * scanned),
        f"{prefix}page_vs_300_ms": page / 300,
        f"{prefix}slowest_page_vs_300_ms": slowest / 300,
        f"{prefix}overview_vs_500_ms": median(times["overview"]) / 500,
    }


def main(entries: int = ENTRIES) -> Report:
    """All three consoles, one after the other, and the reports; a million entries take twenty minutes."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        root = Path(name) / "hub"
        rows, times = coordinator(root, entries, "SQLite")
        scanned = scan(look_at_ledger(homes.CoordinatorDirectory(root)), "site-3")
        rows.append(Row("SQLite: one reading of the whole ledger", scanned, "s"))
        found = ratios("", times, scanned)
        rows += reports(homes.CoordinatorDirectory(root))
        for more, theirs in (
            site_console.measure(Path(name) / "site", entries),
            over_postgres(Path(name) / "database", entries),
        ):
            rows += more
            found |= theirs
    return Report(tuple(rows), found)
