"""The coordinator console over a ledger of a million entries: pages by the index, against a scan of the ledger.

The ledger is a real one: every entry went through :meth:`policies.store.Store.append` and its fold. Its statements
are not signed, since no page of a list opens them, and a million signatures take a quarter of an hour. Pages are
asked for over the console's own TLS by a person who is logged in, in random order: filters of every kind, pages from
the newest to the oldest, searches of words, entries with their proofs. A page's time is wall time from the request to
the last byte, on one machine; so the client's share is in it.

``page_vs_scan`` is the median page of the ledger over one reading of all entries that finds the same ones: what a
console without an index would do for each page. Enough memory for the fold is needed: about 2 GB.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.console.app import pages as console_pages
from coordinator.console.desk import Desk
from coordinator.edges import home as homes
from coordinator.edges.authority import Authority
from coordinator.edges.log import open_log
from coordinator.edges.runs import Runs
from coordinator.edges.sessions import Sessions
from coordinator.edges.shelf import Shelf
from coordinator.intake import Intake
from policies import governance
from policies.entries import Refused, decode
from policies.policy import parse
from policies.search import Index
from policies.sqlite import look, open_sqlite
from policies.statement import Statement, encode
from policies.store import Store
from protos.keyfile import write_private
from protos.web.logins import Logins, make
from protos.web.serving import Serving
from protos.web.settings import ConsoleSettings
from tests.benchmarks.report import Report, Row
from tests.benchmarks.stories import SITES, Site, World
from tests.support.books import Hospital, policy
from tests.support.wards import Grid, Host

ENTRIES = 1_000_000
ASKED = 240  # pages
STEP_S = 60  # between two calls: a million entries are a year and a half
START = 1_700_000_000


@dataclass
class Quick(Hospital):
    """A hospital whose statements are not signed."""

    def seal(self, statement: Statement) -> bytes:
        return encode(statement)


class Clock:
    """Goes on by a minute whenever it is asked."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        self.now += STEP_S
        return self.now


def build(home: homes.Home, entries: int) -> int:
    """Fill the ledger of a coordinator's directory; the time of its last entry."""
    clock, text = Clock(), policy(epsilon=100.0, max_releases_per_patient=1_000_000)
    with Store(open_sqlite(home.ledger), homes.ORIGIN, home.ledger_key(), clock) as store:
        intake, sites = Intake.over(store, parse(text, "policy")), []
        for n in range(SITES):
            real = Hospital(f"site-{n}", text)
            intake.enrol(real.enrolment()[1])
            accounts = {kind: store.state.accounts[f"site-{n}/{kind}"] for kind in ("rdp", "k")}
            sites.append(Site(Quick(real.name, text, real.key, real.node_key, real.csr), accounts))
        for name, role in (("otto", "auditor"), ("dora", "compliance"), ("hugo", "hospital")):
            governance.appoint(store, name, role, Ed25519PrivateKey.generate().public_key().public_bytes_raw())
        stories = World(store, tuple(sites)).stories()
        while store.state.size < entries:
            with store.exclusive() as state:
                until = min(state.size + 2048, entries)
                while state.size < until:
                    key, draft = next(stories)
                    fit = draft.entries[: until - state.size]
                    store.append(key, replace(draft, entries=fit, envelopes=()))
    return clock.now


@contextmanager
def served(home: homes.Home, now: int, rows: list[Row]) -> Iterator[tuple[httpx.Client, Desk]]:
    """The whole console over that ledger, and an auditor who is logged in."""
    with ExitStack() as stack:
        start = time.perf_counter()
        store = stack.enter_context(homes.open_ledger(home))
        rows.append(Row("the coordinator opens the ledger: fold and tree", time.perf_counter() - start, "s"))
        start = time.perf_counter()
        index = stack.enter_context(Index(home.root / "search.db", lambda: look(home.ledger)))
        while not index.follow():
            pass
        rows.append(Row("the index is made, once", time.perf_counter() - start, "s"))
        log = open_log(home.root / "coordinator.log")
        intake, host = Intake.over(store, home.policy()), Host(Grid({}))
        shelf = Shelf(home.releases, store)
        desk = Desk(
            home=home,
            store=store,
            intake=intake,
            runs=Runs(home.root / "runs", host, intake, shelf, log),  # type: ignore[arg-type]
            shelf=shelf,
            sessions=Sessions(log),
            authority=Authority(home, intake, lambda: dt.datetime.now(dt.UTC)),
            index=index,
            expel=lambda _site: None,
            log=log,
            now=lambda: dt.datetime.fromtimestamp(now, dt.UTC),
        )
        settings, logins = ConsoleSettings(listen="127.0.0.1:0"), Logins(home.root / "logins")
        key, crt, _ = make("otto", dt.datetime.now(dt.UTC), "a password")
        logins.trust("otto", crt)
        write_private(home.root / "otto.key", key)
        (home.root / "otto.crt").write_bytes(crt)
        app = console_pages(desk, settings, logins).guarded()
        serving = stack.enter_context(Serving(app, settings, logins, home.root))
        tls = ssl.create_default_context(cafile=str(home.keys / "console.crt"))
        tls.load_cert_chain(str(home.root / "otto.crt"), str(home.root / "otto.key"))
        base = f"https://localhost:{serving.port}"
        client = stack.enter_context(httpx.Client(base_url=base, verify=tls, trust_env=False, timeout=120))
        own = {"Origin": base, "Sec-Fetch-Site": "same-origin"}
        assert client.post("/login", data={"to": "/"}, headers=own).status_code == 303
        yield client, desk


def questions(rng: random.Random, size: int, last: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Kind of page, path and query: as people mix them."""
    kinds = ("refused", "admitted", "spent", "reserved", "expired", "sent")
    words = ("min_k", "run-00000*", "site-3 budget", "restart", "rule=l_diversity ksame", "level=a federated")
    asked: list[tuple[str, str, dict[str, Any]]] = []
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
        asked.append(("ledger, filtered" if set(query) - {"before"} else "ledger, unfiltered", "/ledger", query))
    for n in range(ASKED // 4):
        asked.append(("entry with its proof", f"/ledger/{rng.randrange(size)}", {}))
        asked.append(("overview", "/", {}))
        asked.append(("refusals", "/refusals", {"days": rng.choice((7, 90, 365))}))
        asked.append(("budgets of a site", f"/budgets/site-{n % SITES}", {"days": rng.choice((90, 3650))}))
    rng.shuffle(asked)
    return asked


def scan(home: homes.Home) -> float:
    """Seconds for one reading of everything, for a site's newest refusals: what a page without an index would do."""
    start = time.perf_counter()
    disk, found = look(home.ledger), []
    for seq, body in enumerate(disk.bodies()):
        entry = decode(body).entry
        if isinstance(entry, Refused) and entry.site == "site-3":
            found.append(seq)
    disk.close()
    assert found[-50:]
    return time.perf_counter() - start


def main(entries: int = ENTRIES) -> Report:
    """Build, serve, ask."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        root = Path(name) / "hub"
        text = policy(epsilon=100.0, max_releases_per_patient=1_000_000)
        home = homes.create(root, 'listen = "127.0.0.1:0"\n', text, dt.datetime.now(dt.UTC))
        start = time.perf_counter()
        last = build(home, entries)
        rows.append(Row(f"a ledger of {entries} entries is written", time.perf_counter() - start, "s"))
        times: dict[str, list[float]] = {}
        with served(home, last, rows) as (client, desk):
            for what, path, query in questions(random.Random(0), desk.store.state.size, last):
                start = time.perf_counter()
                answer = client.get(path, params=query)
                times.setdefault(what, []).append(1000 * (time.perf_counter() - start))
                assert answer.status_code == 200, (path, query, answer.text[:2000])
        for what, taken in sorted(times.items()):
            rows.append(Row(f"{what}: median", median(taken), "ms"))
            rows.append(Row(f"{what}: 95 of 100 within", quantiles(taken, n=20)[-1], "ms"))
        size = sum(path.stat().st_size for path in root.glob("search.db*")) / (1 << 20)
        rows.append(Row("the index on the disk", size, "MB"))
        scanned = scan(home)
        rows.append(Row("one reading of the whole ledger", scanned, "s"))
    page = median(times["ledger, filtered"])
    rows.append(
        Row("ledger pages, all: median", median(times["ledger, filtered"] + times["ledger, unfiltered"]), "ms")
    )
    return Report(
        tuple(rows),
        {
            "page_vs_scan": page / (1000 * scanned),
            "page_vs_300_ms": page / 300,
            "overview_vs_500_ms": median(times["overview"]) / 500,
        },
    )
