"""The ledger against the disk it stands on, and the auditor against a million entries.

``commit_vs_fdatasync`` pairs every durable single append (a grant with its sealed reservation, of the mix below)
with one raw ``write`` of as many bytes to the end of a growing file in the same directory, and ``fdatasync``. The
bytes are those that SQLite hands to the kernel for the median such commit (``wchar`` of ``/proc/self/io``): whole
pages of the write-ahead log, with their frame headers. Any ledger that appends as much before it answers must do at
least that, so the ratio shows what SQLite, the fold, the tree and the MAC add. Both are wall time, one after the
other in one process, and they take turns in going first; the figure is the median of the pairs' ratios. The log
grows, is copied into the database at 1,000 pages (those commits are among the pairs) and is then overwritten from
its beginning, which is cheaper than growing on most file systems: hence a row against an overwrite in place, too.

The entries are those of :mod:`tests.benchmarks.stories`. ``verify_entries_per_s`` is the entries' part of an audit:
decode, fold (balances, two-person rules), RFC 6962 root, in processor seconds. The rate with every signature checked
and every review repeated has its own row.

The files lie in ``TMPDIR``, else in ``/var/tmp``: not in ``/tmp``, which is often memory. Linux only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median, quantiles

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.accounting.claims import Gaussian, GaussianQuery, SubsampledGaussian
from policies.accounting.rdp import cost
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file, open_read_only, open_sqlite
from policies.ledger.entries import Reserved, decode, kind_of
from policies.ledger.export import Export
from policies.ledger.merkle import CompactRange, leaf_hash
from policies.ledger.state import Grant, State
from policies.ledger.store import Store
from policies.review.policy import parse
from policies.review.rules import AccountContext, review, review_reservation
from tests.benchmarks.report import Report, Row
from tests.benchmarks.stories import ORIGIN, SITES, TRAINING, Named, fill, open_world
from tests.support.ledger_world import K5, Clock

PAIRS, BATCH, ROUNDS, CLAIMS = 400, 64, 9, 10_000


def audit_entries(bodies: Iterable[bytes]) -> bytes:
    """The entries' part of an audit: decode each, fold it with every rule of the books, and the root of all.

    The verifier does this, and besides checks each envelope's signature and reviews each grant and release again;
    that is the next row, and is bound by Ed25519.
    """
    state, tree = State(), CompactRange()
    for body in bodies:
        state.apply(decode(body))
        tree.append(leaf_hash(body))
    return tree.root()


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """One call's time."""
    start = clock()
    action()
    return clock() - start


def written() -> int:
    """Bytes that this process has handed to the kernel to write."""
    lines = (line.split() for line in Path("/proc/self/io").read_text().splitlines())
    return int(next(value for name, value in lines if name == "wchar:"))


def peak_megabytes() -> float:
    """Peak memory of this process; not getrusage, where Linux hands the parent's maximum down."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


@dataclass(frozen=True, slots=True)
class Raw:
    """The peer: a file, and the bytes of a commit."""

    file: int
    page: bytes

    def append(self) -> None:
        """Write at the end, durable when this returns."""
        os.write(self.file, self.page)
        os.fdatasync(self.file)

    def overwrite(self) -> None:
        """Write over the beginning, durable when this returns."""
        os.pwrite(self.file, self.page, 0)
        os.fdatasync(self.file)


def open_raw(path: Path, size: int) -> Raw:
    """An empty file for as many bytes at a time as a commit writes."""
    return Raw(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), random.Random(0).randbytes(size))


def commits(folder: Path) -> tuple[list[Row], dict[str, float]]:
    """Single commits beside the raw peer."""
    world = open_world(folder / "commits.db", Ed25519PrivateKey.generate())
    drafts = [world.sites[n % SITES].reserve(f"grant-{n:07d}", TRAINING, f"run-{n}") for n in range(PAIRS + 64)]
    sizes = []
    for named in drafts[PAIRS:]:
        before = written()
        world.store.append(*named)
        sizes.append(written() - before)
    raws = [open_raw(folder / name, int(median(sizes))) for name in ("growing", "fixed")]
    times: dict[str, list[float]] = {"ours": [], "growing": [], "fixed": []}
    busy = []
    for n, named in enumerate(drafts[:PAIRS]):
        ours: Callable[[], object] = partial(world.store.append, *named)
        actions = {"ours": ours, "growing": raws[0].append, "fixed": raws[1].overwrite}
        for name in ("ours", "growing", "fixed") if n % 2 else ("fixed", "growing", "ours"):
            start = time.thread_time()
            times[name].append(seconds(actions[name]))
            if name == "ours":
                busy.append(time.thread_time() - start)
    world.store.close()
    for raw in raws:
        os.close(raw.file)
    mine, growing, fixed = (times[name] for name in ("ours", "growing", "fixed"))
    ratios = [a / b for a, b in zip(mine, growing, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    over = median(a / b for a, b in zip(mine, fixed, strict=True))
    rows = [
        Row("one grant with its envelope, durable", median(mine) * 1e6, "us"),
        Row("raw append of as many bytes + fdatasync, paired with it", median(growing) * 1e6, "us"),
        Row("what it writes: pages of the write-ahead log with their headers", median(sizes), "bytes"),
        Row("the ratio's lower quartile", low, "x"),
        Row("the ratio's upper quartile", high, "x"),
        Row("the ratio of the sums, checkpoints of the log included", sum(mine) / sum(growing), "x"),
        Row("the ratio against a raw overwrite in place + fdatasync", over, "x"),
        Row("processor time of one commit, the kernel's included", median(busy) * 1e6, "cpu-us"),
    ]
    return rows, {"commit_vs_fdatasync": middle}


def batches(folder: Path) -> tuple[list[Row], dict[str, float]]:
    """Entries per second one by one, 64 in one block, and by 64 threads at once; the three take turns."""
    world = open_world(folder / "batches.db", Ed25519PrivateKey.generate())
    many = 4 * BATCH
    stock = iter([world.sites[n % SITES].reserve(f"grant-{n:07d}") for n in range(ROUNDS * (2 * BATCH + many))])
    rates: dict[str, list[float]] = {"single": [], "block": [], "threads": []}
    with ThreadPoolExecutor(BATCH) as threads:

        def one(named: Named) -> None:
            world.store.append(*named)

        def singles(drafts: list[Named]) -> None:
            for named in drafts:
                one(named)

        def block(drafts: list[Named]) -> None:
            with world.store.exclusive():
                singles(drafts)

        def at_once(drafts: list[Named]) -> None:
            for done in threads.map(one, drafts):
                assert done is None

        for _ in range(ROUNDS):
            for name, action, count in (
                ("single", singles, BATCH),
                ("block", block, BATCH),
                ("threads", at_once, many),
            ):
                rates[name].append(count / seconds(partial(action, list(islice(stock, count)))))
    world.store.close()
    faster = {n: median(a / b for a, b in zip(rates[n], rates["single"], strict=True)) for n in ("block", "threads")}
    rows = [Row(f"commits: {name}", median(rates[name]), "per s") for name in ("single", "block", "threads")]
    rows.append(Row("64 threads over singles", faster["threads"], "x"))
    return rows, {"batch64_vs_single": faster["block"]}


def audits(folder: Path, entries: int = 12_000, times: int = 9) -> tuple[list[Row], dict[str, float]]:
    """The entries alone, and everything with its signatures and reviews."""
    path, key = folder / "audits.db", Ed25519PrivateKey.generate()
    world = open_world(path, key)
    fill(world, entries, 1024)
    world.store.close()
    raw = export_file(path, ORIGIN, key)
    bodies = Export.parse(raw).entries
    if verify(raw).root != audit_entries(bodies).hex():
        raise AssertionError("the audit of the entries found another root than the whole one")
    alone = len(bodies) / median(seconds(lambda: audit_entries(bodies), time.process_time) for _ in range(times))
    whole = len(bodies) / median(seconds(lambda: verify(raw), time.process_time) for _ in range(3))
    kinds = Counter(kind_of(decode(body).entry) for body in bodies)
    mix = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    rows = [
        Row(f"audit of the entries: {mix}", alone, "per s"),
        Row("audit of everything: each envelope's signature, and each review again", whole, "per s"),
        Row("mean entry", sum(map(len, bodies)) / len(bodies), "bytes"),
        Row("the export, envelopes included", len(raw) / len(bodies), "bytes each"),
    ]
    return rows, {"verify_entries_per_s": alone}


def reviews(folder: Path, times: int = 300) -> list[Row]:
    """Pure reviews of statements, in microseconds of the processor."""
    world = open_world(folder / "reviews.db", Ed25519PrivateKey.generate())
    world.store.close()
    site, law = world.sites[0], parse(world.sites[0].hospital.policy_text, "policy")
    cases: dict[str, Callable[[], object]] = {}
    for name, claim, run in (("k-anonymous", K5, ""), ("subsampled Gaussian", TRAINING, "run-1")):
        account = site.accounts["rdp" if run else "k"]
        asked = site.reservation("grant", claim, run)[0]
        (entry,) = site.reserve("grant", claim, run)[1].entries
        assert isinstance(entry, Reserved)
        free, held = AccountContext(account), AccountContext(account, Grant(entry))
        release = site.statement("grant", run, 3 if run else 0)
        if not (review_reservation(asked, free, law).admitted and review(release, held, law).admitted):
            raise AssertionError(f"the law does not admit {name}")
        cases[f"review_reservation, {name}"] = partial(review_reservation, asked, free, law)
        cases[f"review of a release, {name}"] = partial(review, release, held, law)
    return [
        Row(what, median(seconds(case, time.process_time) for _ in range(times)) * 1e6, "cpu-us")
        for what, case in cases.items()
    ]


def claims(seed: int = 1) -> list[Gaussian]:
    """Distinct claims of both kinds and all sizes."""
    dice = random.Random(seed)
    runs: list[Gaussian] = [
        SubsampledGaussian(dice.uniform(0.001, 0.3), dice.uniform(0.5, 20.0), dice.randint(1, 10_000))
        for _ in range(CLAIMS * 4 // 5)
    ]
    queries = [
        GaussianQuery(dice.uniform(10.0, 3000.0), dice.randint(1, 8), dice.randint(1, 5)) for _ in range(CLAIMS // 5)
    ]
    return runs + queries


def pricing() -> list[Row]:
    """A running total over 10,000 claims, each priced when it comes and never again."""
    stock = claims()
    if len(set(stock)) != CLAIMS:
        raise AssertionError("the claims are not distinct")

    def total(order: int) -> int:
        spent = 0
        for claim in stock:
            spent += cost(claim, order)
        return spent

    return [
        Row(f"{CLAIMS:,} distinct claims priced one after the other at order {order}", best, "cpu-s")
        for order in (4, 7, 32)
        for best in [median(seconds(partial(total, order), time.process_time) for _ in range(3))]
    ]


def main() -> Report:
    """Measure; about a minute."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        folder = Path(name)
        rows, ratios = commits(folder)
        for more, found in (batches(folder), audits(folder)):
            rows += more
            ratios |= found
        rows += [*reviews(folder), *pricing()]
    return Report(tuple(rows), ratios)


# A ledger of any size: every step in a fresh process, so that its peak memory is its own.


@dataclass(frozen=True, slots=True)
class Place:
    """Where a large ledger lies; it may go to another process."""

    path: Path
    key: bytes  # Ed25519, raw
    entries: int

    @property
    def private(self) -> Ed25519PrivateKey:
        """The ledger's key."""
        return Ed25519PrivateKey.from_private_bytes(self.key)

    def nothing(self) -> None:
        """What a process of this benchmark holds before it does anything."""

    def build(self) -> None:
        """Append all entries, 1,024 to a commit; every statement is signed."""
        world = open_world(self.path, self.private)
        fill(world, self.entries, 1024)
        world.store.close()

    def reopen(self) -> None:
        """What a restart does: fold every entry, make the tree, compare the head's MAC."""
        with Store(open_sqlite(self.path), ORIGIN, self.private, Clock()) as store:
            self.agree(store.state.size == self.entries)

    def audit(self) -> None:
        """The entries' part of an audit, read from the database."""
        with contextlib.closing(open_read_only(self.path)) as disk:
            head = disk.head()
            self.agree(head is not None and audit_entries(disk.bodies()) == head.root)

    def export(self) -> None:
        """The text for an auditor."""
        self.path.with_suffix(".export").write_bytes(export_file(self.path, ORIGIN, self.private))

    def verify(self) -> None:
        """All of ``lazaret-verify``: every signature checked, every grant and release reviewed again."""
        found = verify(self.path.with_suffix(".export").read_bytes())
        self.agree(found.size == self.entries)

    def agree(self, same: bool) -> None:
        """A benchmark of something that went wrong is none."""
        if not same:
            raise AssertionError("the ledger is not the one that was built")


def _measured(step: Callable[[], None]) -> tuple[float, float, float]:
    """Seconds, processor seconds and the peak memory of this fresh process in megabytes."""
    start, busy = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start, time.process_time() - busy, peak_megabytes()


def large(entries: int) -> Report:
    """Build a ledger of so many entries, reopen it and verify it again.

    A million takes a quarter of an hour, most of it for a million signatures made and checked, and 4 GB of disk.
    """
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        place = Place(Path(name) / "large.db", Ed25519PrivateKey.generate().private_bytes_raw(), entries)
        steps: dict[str, Callable[[], None]] = {
            "a process that does nothing": place.nothing,
            "build: sign every statement, 1,024 entries to a commit": place.build,
            "reopen: fold, tree, MAC of the head": place.reopen,
            "audit of the entries": place.audit,
            "export": place.export,
            "audit of everything: signatures, and each review again": place.verify,
        }
        for what, step in steps.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                wall, busy, peak = fresh.submit(_measured, step).result()
            rows += [Row(what, wall, "s"), Row("  its peak memory", peak, "MB")]
            if step == place.reopen:
                ratios["reopen_entries_per_s"] = entries / busy
            elif step == place.audit:
                ratios["verify_entries_per_s"] = entries / busy
            elif step == place.verify:
                ratios["verify_everything_entries_per_s"] = entries / busy
        for path in (place.path, place.path.with_suffix(".export")):
            rows.append(Row(f"size of the {path.suffix[1:]} file", path.stat().st_size / (1 << 20), "MB"))
    return Report(tuple(rows), ratios)
