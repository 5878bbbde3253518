"""What the benchmarks of both consoles share: a ledger of a million entries, a person who asks, and a reading of all.

The ledger is a real one: every entry went through :meth:`policies.ledger.store.Store.append` and its fold. Its
statements are not signed, since no page of a list opens them, and a million signatures take a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from policies.index.search import Index
from policies.ledger.entries import Refused, decode
from policies.ledger.export import ExportError
from policies.ledger.store import LedgerBackend, Store
from policies.statements import Statement, encode
from protos.identity.key_files import write_private
from protos.web.client_certificates import PinnedCertificates, make
from protos.web.server import ConsoleServer
from tests.benchmarks.report import Row
from tests.benchmarks.stories import Site, World
from tests.support.ledger_world import Hospital

STEP_S = 60  # between two calls: a million entries are a year and a half
START = 1_700_000_000
Question = tuple[str, str, dict[str, Any]]  # kind of page, path, query


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


def accounts_of(store: Store, real: Hospital) -> Site:
    """An enrolled hospital, as the stories want it."""
    accounts = {kind: store.state.accounts[f"{real.name}/{kind}"] for kind in ("rdp", "k")}
    return Site(Quick(real.name, real.policy_text, real.key, real.node_key, real.csr), accounts)


def fill(store: Store, sites: Sequence[Site], entries: int) -> None:
    """Append stories until there are so many entries, 2,048 to a commit."""
    stories = World(store, tuple(sites)).stories()
    while store.state.size < entries:
        with store.exclusive() as state:
            until = min(state.size + 2048, entries)
            while state.size < until:
                key, draft = next(stories)
                store.append(key, replace(draft, entries=draft.entries[: until - state.size], envelopes=()))


@contextmanager
def indexed(index: Index, most: int | None, what: str, rows: list[Row]) -> Iterator[Index]:
    """The index once it holds everything; how long that took."""
    with index:
        start, busy = time.perf_counter(), time.process_time()
        while not index.follow(most):
            pass
        rows.append(Row(f"{what}: the index is made, once", time.perf_counter() - start, "s"))
        rows.append(Row(f"{what}:   of the processor", time.process_time() - busy, "cpu-s"))
        yield index


@contextmanager
def entered(serving: ConsoleServer, root: Path, logins: PinnedCertificates) -> Iterator[httpx.Client]:
    """The auditor ``otto``, with a certificate that is pinned, logged in."""
    key, crt, _ = make("otto", dt.datetime.now(dt.UTC), "a password")
    logins.trust("otto", crt)
    write_private(root / "otto.key", key)
    (root / "otto.crt").write_bytes(crt)
    tls = ssl.create_default_context(cafile=str(root / "keys" / "console.crt"))
    tls.load_cert_chain(str(root / "otto.crt"), str(root / "otto.key"))
    base = f"https://localhost:{serving.port}"
    with httpx.Client(base_url=base, verify=tls, trust_env=False, timeout=600) as client:
        own = {"Origin": base, "Sec-Fetch-Site": "same-origin"}
        assert client.post("/login", data={"to": "/"}, headers=own).status_code == 303
        yield client


def asked(client: httpx.Client, questions: Sequence[Question]) -> dict[str, list[float]]:
    """Milliseconds of every answer, by the kind of page."""
    times: dict[str, list[float]] = {}
    for what, path, query in questions:
        start = time.perf_counter()
        answer = client.get(path, params=query)
        times.setdefault(what, []).append(1000 * (time.perf_counter() - start))
        assert answer.status_code == 200, (path, query, answer.text[:2000])
    return times


def told(whose: str, times: dict[str, list[float]]) -> list[Row]:
    """Medians, and what 95 of 100 stay within."""
    rows = []
    for what, taken in sorted(times.items()):
        rows.append(Row(f"{whose}, {what}: median", median(taken), "ms"))
        rows.append(Row(f"{whose}, {what}: 95 of 100 within", quantiles(taken, n=20)[-1], "ms"))
    return rows


def scan(disk: LedgerBackend, site: str) -> float:
    """Seconds for one reading of everything, for a site's newest refusals: what a page without an index would do.

    Raises:
        ExportError: there are none; the measurement is none either.
    """
    start, found = time.perf_counter(), []
    with contextlib.closing(disk):
        for seq, body in enumerate(disk.bodies()):
            entry = decode(body).entry
            if isinstance(entry, Refused) and entry.site == site:
                found.append(seq)
    if not found[-50:]:
        raise ExportError("the ledger holds no refusal of that site")
    return time.perf_counter() - start
