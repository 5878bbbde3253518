"""The console of a site over its own ledger of a million entries, which it borrows: the console alone, or ``serve``.

Everything is as at the coordinator (:mod:`tests.benchmarks.console`): real pages over TLS, in random order. Beside
that: the first page, which folds the ledger, and the first one after another process has written to it, as
``release`` does. The site has one vault, which is empty.
"""

from __future__ import annotations

import datetime as dt
import random
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.console.app import INDEX, pages
from agent.console.context import SiteConsoleContext
from agent.event_log import open_log
from agent.service.ledger_access import BorrowedLedger
from agent.storage import site_directory
from policies.governance import decisions
from policies.index.follower import IndexFollower
from policies.index.search import Index
from policies.ledger.backends.sqlite import open_read_only, open_sqlite
from policies.ledger.entries import Refused
from policies.ledger.store import AppendRequest, Store
from policies.ledger_service import LedgerService
from policies.review.policy import parse
from protos.web.client_certificates import PinnedCertificates
from protos.web.login_cli import FOLDER
from protos.web.server import ConsoleServer
from protos.web.settings import ConsoleSettings
from tests.benchmarks.console_ledgers import Clock, Question, accounts_of, asked, entered, fill, scan, told
from tests.benchmarks.report import Row
from tests.support.ledger_world import Hospital, policy

SITE = "site-0"
ASKED = 240  # pages
SETTINGS = f"""\
site = "{SITE}"
coordinator = "localhost:7443"
input = "in"
modalities = ["OT"]
secondary_capture_modalities = []
public_components = []
"""


def build(root: Path, entries: int) -> int:
    """A site's directory with a ledger of so many entries; the time of its last."""
    text, clock = policy(epsilon=100.0, max_releases_per_patient=1_000_000), Clock()
    home, law = site_directory.create(root, SETTINGS, text), parse(text, "policy")
    with Store(open_sqlite(root / "ledger.db"), site_directory.origin(SITE), home.sign_key(), clock) as store:
        real = Hospital(SITE, text, home.sign_key())
        LedgerService(store, lambda _site: law).enrol(*real.enrolment(), law)
        for name, role in (("otto", "auditor"), ("dora", "compliance"), ("hugo", "hospital")):
            decisions.appoint(store, name, role, Ed25519PrivateKey.generate().public_key().public_bytes_raw())
        fill(store, [accounts_of(store, real)], entries)
    return clock.now


def questions(rng: random.Random, size: int) -> list[Question]:
    """As people mix them."""
    kinds = ("refused", "admitted", "spent", "reserved", "expired", "sent")
    words = ("min_k", "run-00000*", "restart", "ksame", "level=a federated")
    found: list[Question] = []
    for n in range(ASKED):
        query: dict[str, object] = {}
        if n % 3:
            query["kind"] = rng.choice(kinds)
        if n % 7 == 3:
            query["text"] = rng.choice((*words, f"run-{rng.randrange(size // 16):07d}"))
        if n % 2:
            query["before"] = str(rng.randrange(100, size))
        found.append(("ledger, filtered" if set(query) - {"before"} else "ledger, unfiltered", "/ledger", query))
    for _ in range(ASKED // 8):
        found.append(("entry with its proof", f"/ledger/{rng.randrange(size)}", {}))
        found += [("overview", "/", {}), ("budget", "/budget", {}), ("releases", "/releases", {})]
        found.append(("people", "/people", {}))
    rng.shuffle(found)
    return found


def measure(root: Path, entries: int) -> tuple[list[Row], dict[str, float]]:
    """Build, serve, ask."""
    start = time.perf_counter()
    last = build(root, entries)
    rows = [Row(f"site: a ledger of {entries} entries is written", time.perf_counter() - start, "s")]
    return serve(root, last, rows)


def serve(root: Path, last: int, rows: list[Row]) -> tuple[list[Row], dict[str, float]]:
    """Pages over a ledger that is there."""
    home, logins = site_directory.SiteDirectory(root), PinnedCertificates(root / FOLDER)
    with ExitStack() as stack:
        ledger = BorrowedLedger(home)
        index, begun = stack.enter_context(Index(root / INDEX, ledger.disk)), time.perf_counter()
        stack.enter_context(IndexFollower(index))  # as beside every console
        log = open_log(root / "agent.log")
        context = SiteConsoleContext(home, ledger, log, lambda: dt.datetime.fromtimestamp(last, dt.UTC), index=index)
        settings = ConsoleSettings(listen="127.0.0.1:0")
        serving = stack.enter_context(
            ConsoleServer(pages(context, settings, logins).guarded(), settings, logins, root)
        )
        start = time.perf_counter()
        client = stack.enter_context(entered(serving, root, logins))
        rows.append(Row("site: somebody logs in, first of all: the fold", time.perf_counter() - start, "s"))
        size = ledger.read().state.size
        (taken,) = asked(client, [("", "/ledger", {})]).values()
        rows.append(Row("site: a page of the ledger while the index is made", taken[0] / 1000, "s"))
        while index.size < size:
            time.sleep(0.05)
        rows.append(Row("site: the index is made, once, in the background", time.perf_counter() - begun, "s"))
        times = asked(client, questions(random.Random(1), size))
        rows += told("site", times)
        with ledger.write() as store:  # as another process does
            late = Refused("late", SITE, "ksame", "reservation", ["min_k"], b"\0" * 32)
            store.append("late", AppendRequest((late,)))
        (taken,) = asked(client, [("", "/ledger", {})]).values()
        rows.append(Row("site: the first page after another process wrote", taken[0] / 1000, "s"))
    scanned = scan(open_read_only(root / "ledger.db"), SITE)
    rows.append(Row("site: one reading of the whole ledger", scanned, "s"))
    page = median(times["ledger, filtered"])
    slowest = max(median(taken) for what, taken in times.items() if what != "overview")
    return rows, {
        "site_page_vs_scan": page / (1000 * scanned),
        "site_page_vs_300_ms": page / 300,
        "site_slowest_page_vs_300_ms": slowest / 300,
        "site_overview_vs_500_ms": median(times["overview"]) / 500,
    }
