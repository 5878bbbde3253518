"""A search index for a ledger: find entries among millions, and balances by day. A cache; the ledger decides.

The ledger is authoritative. The index follows the ledger's bytes and keeps the root of what it has read. If that root
differs from the ledger's root at the same size, the index belongs to another history and is rebuilt from the first
entry. Queries return entry numbers; the caller reads the entries themselves.

Words are kept in SQLite's FTS5 without the texts: one list of entry numbers for each word, so that any mix of words,
kinds and sites is found by walking short lists from the newest entry on, and the page behind the thousandth is as
near as the first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import apsw

from policies.index import schema
from policies.index.projection import (
    CUT,
    LATEST,
    LEAST_HEX,
    EntryProjection,
    HeldGrant,
    RunningBalance,
    day_of,
    tokens,
)
from policies.ledger.entries import decode
from policies.ledger.merkle import CompactRange, leaf_hash
from policies.ledger.store import LedgerBackend, LedgerUnsoundError
from protos.common.errors import RefusedError

BATCH: Final = 2_000  # entries in one transaction
NEAR, FAR = 64, 400  # new entries that are read one by one: so many, or one in so many of all; else all are walked
PATIENCE: Final = 0.5  # seconds that a page waits while another thread indexes
COUNTED: Final = 10_000  # of more hits it is said that there are more
MOST_WORDS, MOST_TERMS = 12, 2_000  # of a query; that a beginning may stand for
LEAST_STEM: Final = 3  # letters before a star
_LARGEST: Final = 1 << 62  # SQLite's integers have 64 bits, and one is added to some


class QueryTooWideError(RefusedError, ValueError):
    """The prefix matches too many words; the text says what to type instead."""


@dataclass(frozen=True, slots=True)
class EntryQuery:
    """What is looked for; everything given must hold. Newest first."""

    kinds: tuple[str, ...] = ()  # one of these
    site: str = ""
    since: int | None = None  # seconds since 1970, by the records' own times
    until: int | None = None  # exclusive
    text: str = ""  # words; eight or more hexadecimal digits are the beginning of a digest, a star ends a beginning
    before: int | None = None  # entries before this number: the next page
    after: int | None = None  # or after this one: the page before
    most: int = 50

    def __post_init__(self) -> None:
        """One direction, numbers that SQLite can compare, and a page of a size that can be shown."""
        if self.before is not None and self.after is not None:
            raise ValueError("a page is either before an entry or after one")
        if any(abs(n) > _LARGEST for n in (self.since, self.until, self.before, self.after) if n is not None):
            raise ValueError("the entry number or the time is out of range")
        if not 0 < self.most <= 1000:
            raise ValueError("a page has 1 to 1000 entries")


@dataclass(frozen=True, slots=True)
class EntryPage:
    """A page of entry numbers, newest first, and whether there are others on either side."""

    seqs: tuple[int, ...]
    older: bool
    newer: bool


@dataclass(frozen=True, slots=True)
class Balance:
    """An account at the end of a day on which it moved, in its own unit."""

    day: int  # since 1970, UTC
    limit: int
    held: int
    spent: int


@dataclass(frozen=True, slots=True)
class ProjectShare:
    """What one project has of an account: a run, or the mechanism of single releases."""

    project: str
    held: int
    spent: int


@dataclass(frozen=True, slots=True)
class RuleRefusals:
    """How often a rule refused something of a site."""

    rule: str
    site: str
    times: int


class Index:
    """The index in one file, for one process."""

    def __init__(self, path: Path, look: Callable[[], LedgerBackend]) -> None:
        """Open or make it; nothing is indexed before :meth:`follow`.

        Args:
            path: the cache's file. It may be deleted whenever nothing uses it.
            look: opens the ledger to read, also while another thread or process writes it.
        """
        self._path, self._disk = path, look()
        self._ahead: Iterator[bytes] | None = None  # a walk through the ledger that goes on from batch to batch
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._open()

    def _open(self) -> None:
        """Two connections, so that a page waits for no batch; a file that is not this form's is made again."""
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            self._connect()
            place: Any = self._db.execute("SELECT form, size, peaks, today FROM place").fetchall()
            ((form, size, peaks, self._today),) = place
            if form != schema.FORM or len(peaks) != 32 * int(size).bit_count():
                raise LedgerUnsoundError("another form")
        except (apsw.Error, LedgerUnsoundError, ValueError):
            self._discard()
            self._connect()
            self._db.execute(f"BEGIN; {schema.SCHEMA} COMMIT")
            size, peaks, self._today = 0, b"", 0
        self._broken = False  # then the next that follows makes it anew
        self._range = CompactRange(size, [peaks[at : at + 32] for at in range(0, len(peaks), 32)])
        self._purses = self._balanced()

    def _connect(self) -> None:
        self._db = apsw.Connection(str(self._path))
        self._reader = apsw.Connection(str(self._path))
        for connection in (self._db, self._reader):
            connection.set_busy_timeout(2_000)
            for pragma in schema.PRAGMAS:
                connection.execute(f"PRAGMA {pragma}").fetchall()
        self._reader.execute("PRAGMA query_only=1")

    def _discard(self) -> None:
        for name in ("_reader", "_db"):
            if (connection := getattr(self, name, None)) is not None:
                connection.close(True)
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))

    def close(self) -> None:
        """Let go of the files."""
        with self._writing, self._reading:
            self._reader.close(True)
            self._db.close(True)
            self._disk.close()

    def __enter__(self) -> Index:
        """Use as a context."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close at the end of the context."""
        self.close()

    @property
    def size(self) -> int:
        """How many entries are indexed."""
        return self._range.size

    def follow(self, most: int | None = None) -> bool:
        """Take the ledger's new entries; a page calls this before it looks.

        Args:
            most: so many at a time; None: all there are.
        Returns:
            Whether the index holds everything that was durable when this was called. Not so when there are more than
            ``most``, or while another thread is taking them.
        Raises:
            LedgerUnsoundError: the ledger's entries are not those of its own last commit, or the index cannot be
            written.
        """
        if not self._writing.acquire(timeout=PATIENCE):
            return False
        try:
            return self._level(most)
        except apsw.Error as error:
            raise self._unreadable(error) from None
        finally:
            self._writing.release()

    def _level(self, most: int | None) -> bool:
        head = self._disk.head()
        size, root = (head.size, head.root) if head else (0, CompactRange().root())
        if self._broken or size < self.size:
            self._again()
        self._take(size if most is None else min(size, self.size + most), size)
        if self.size == size and self._range.root() != root:  # a history that agreed in its length alone
            self._again()
            self._take(size if most is None else min(size, most), size)
            if self.size == size and self._range.root() != root:
                raise LedgerUnsoundError("the entries are not the ones of the last commit")
        return self.size == size

    def _unreadable(self, error: apsw.Error) -> LedgerUnsoundError:
        self._broken = True
        kind = type(error).__name__
        return LedgerUnsoundError(f"the search index cannot be used ({kind}); it is rebuilt")

    def _again(self) -> None:
        """The ledger is another one than was indexed, or was brought back from a backup: begin anew."""
        self._ahead = None
        with self._reading:
            self._discard()
            self._open()

    def _take(self, end: int, size: int) -> None:
        """Index up to ``end`` of ``size``, a batch in a transaction."""
        new = self._bodies(size)
        while self.size < end:
            before, peaks, today = self.size, list(self._range.peaks), self._today
            flow = EntryProjection(self._purses, self._holding, self._open_of, today)
            try:
                for seq in range(before, min(end, before + BATCH)):
                    body = next(new)
                    flow.take(seq, decode(body))
                    self._range.append(leaf_hash(body))
                schema.store_batch(self._db, flow, self._range, self._purses)
            except BaseException:
                self._ahead = None
                self._range = CompactRange(before, peaks)
                self._purses = self._balanced()
                raise
            self._today = flow.today
        self._ahead = self._ahead if self.size < size else None

    def _bodies(self, size: int) -> Iterator[bytes]:
        """The entries from here on: few by their number, each a call; for many the whole ledger is walked."""
        if self._ahead is None and size - self.size > max(NEAR, size // FAR):
            self._ahead = islice(self._disk.bodies(size), self.size, None)
        while True:
            one = next(self._ahead, None) if self._ahead is not None else None
            if one is None:  # the walk ends where the ledger ended when it began
                self._ahead, one = None, self._disk.body(self.size)
            if one is None:
                raise LedgerUnsoundError(f"entry {self.size} is missing")
            yield one

    def _balanced(self) -> dict[str, RunningBalance]:
        rows: Any = self._db.execute("SELECT account, most, held, spent FROM purse")
        return {name: RunningBalance(*purse) for name, *purse in rows}

    def _holding(self, name: str) -> HeldGrant | None:
        query = "SELECT site, account, run, mechanism, amount, open FROM holding WHERE name = ?"
        rows: Any = self._db.execute(query, (name,)).fetchall()
        if not rows:
            return None
        site, account, run, mechanism, amount, is_open = rows[0]
        return HeldGrant(site, account, run, mechanism, amount, bool(is_open))

    def _open_of(self, site: str) -> Iterator[tuple[str, HeldGrant]]:
        query = "SELECT name, site, account, run, mechanism, amount FROM holding WHERE site = ? AND open = 1"
        rows: Any = self._db.execute(query, (site,)).fetchall()
        for name, owner, account, run, mechanism, amount in rows:
            yield name, HeldGrant(owner, account, run, mechanism, amount, True)

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with self._reading:
                return self._reader.execute(query, tuple(values)).fetchall()
        except apsw.Error as error:
            raise self._unreadable(error) from None

    def find(self, query: EntryQuery) -> EntryPage:
        """A page of entries.

        Raises:
            QueryTooWideError: the beginning of a word stands for too many.
        """
        low, high = self._between(query)
        if query.before is not None:
            high = min(high, query.before)
        if query.after is not None:
            low = max(low, query.after + 1)
        upward = query.after is not None
        rows = [row[0] for row in self._hits(query, (low, high), query.most + 1, upward)]
        more, seqs = len(rows) > query.most, rows[: query.most]
        if upward:
            return EntryPage(tuple(reversed(seqs)), bool(self._beside(query, seqs, -1)), more)
        return EntryPage(tuple(seqs), more, bool(self._beside(query, seqs, 1)))

    def count(self, query: EntryQuery) -> int:
        """How many there are in all, counted up to :data:`COUNTED` + 1."""
        return len(self._hits(query, self._between(query), COUNTED + 1, False))

    def _beside(self, query: EntryQuery, seqs: Sequence[int], side: int) -> list[Any]:
        """Something on the other side of a page: above its first entry, or below its last."""
        low, high = self._between(query)
        edge = max(seqs, default=query.before or 0) if side > 0 else min(seqs, default=query.after or 0)
        if side > 0:
            low = edge + 1 if seqs else edge
        else:
            high = edge if seqs else edge + 1
        return self._hits(query, (low, high), 1, side > 0)

    def _hits(self, query: EntryQuery, bounds: tuple[int, int], most: int, upward: bool) -> list[Any]:
        match, order = self._match(query), "ASC" if upward else "DESC"
        if match is None or bounds[0] >= bounds[1]:
            return []
        timed = query.since is not None or query.until is not None
        time = [query.since or 0, LATEST + 1 if query.until is None else query.until] if timed else []
        if not match:
            also = "AND at >= ? AND at < ?" if timed else ""
            sql = f"SELECT seq FROM line WHERE seq >= ? AND seq < ? {also} ORDER BY seq {order} LIMIT ?"  # noqa: S608
            return self._rows(sql, [*bounds, *time, most])
        join = "CROSS JOIN line ON line.seq = words.rowid" if timed else ""
        also = "AND line.at >= ? AND line.at < ?" if timed else ""
        found = "words MATCH ? AND words.rowid >= ? AND words.rowid < ?"
        sql = f"SELECT words.rowid FROM words {join} WHERE {found} {also} ORDER BY words.rowid {order} LIMIT ?"  # noqa: S608
        return self._rows(sql, [match, *bounds, *time, most])

    def _between(self, query: EntryQuery) -> tuple[int, int]:
        """The entries of the days that are asked for: [first, end)."""
        if query.since is None and query.until is None:
            return 0, self.size
        first = 0 if query.since is None else day_of(query.since)
        last = LATEST if query.until is None else day_of(query.until - 1)
        ((low, high),) = self._rows("SELECT min(first), max(last) FROM day WHERE day BETWEEN ? AND ?", (first, last))
        return (0, 0) if low is None else (low, high + 1)

    def _match(self, query: EntryQuery) -> str | None:
        """What FTS5 is asked; "" for everything, None for what nothing can be."""
        parts = []
        if query.kinds:
            parts.append("(" + " OR ".join(f'"kind={_plain(kind)}"' for kind in query.kinds) + ")")
        if query.site:
            parts.append(f'"site={_plain(query.site)}"')
        words = query.text.split()[:MOST_WORDS]
        for word in words:
            stem, starred = word.rstrip("*"), word.endswith("*")
            found = tokens(stem)
            if not found:
                return None
            parts += [f'"{part}"' for part in found[:-1]]
            parts.append(f'"{found[-1]}"{self._star(found[-1], starred)}')
        return " AND ".join(parts)

    def _star(self, stem: str, starred: bool) -> str:
        """Does a word stand for all that begin like it? A digest's beginning does by itself."""
        digest = LEAST_HEX <= len(stem) < CUT and not set(stem) - set("0123456789abcdef")
        if not starred:
            return "*" if digest else ""
        if len(stem) < LEAST_STEM:
            raise QueryTooWideError(f"type {LEAST_STEM} letters or more before the star")
        end = stem[:-1] + chr(ord(stem[-1]) + 1)
        asked = "SELECT count(*) FROM (SELECT 1 FROM term WHERE term >= ? AND term < ? LIMIT ?)"
        ((terms,),) = self._rows(asked, (stem, end, MOST_TERMS + 1))
        if terms > MOST_TERMS:
            raise QueryTooWideError(f"more than {MOST_TERMS} names begin like this: type more before the star")
        return "*"

    def time_of(self, seq: int) -> int | None:
        """When an entry was written, by its own record: seconds since 1970; None if it is not indexed."""
        rows = self._rows("SELECT at FROM line WHERE seq = ?", (seq,))
        return rows[0][0] if rows else None

    def refusals(self, since: int, until: int) -> list[RuleRefusals]:
        """What was refused on the days from ``since`` until before ``until`` (seconds), the most frequent first."""
        query = (
            "SELECT rule, site, sum(n) FROM refusal WHERE day BETWEEN ? AND ? GROUP BY rule, site "
            "ORDER BY sum(n) DESC, rule, site"
        )
        return [RuleRefusals(*row) for row in self._rows(query, (day_of(since), day_of(until - 1)))]

    def tally(self, since: int, until: int) -> dict[str, int]:
        """How many entries of each kind were written on those days."""
        query = "SELECT kind, sum(n) FROM tally WHERE day BETWEEN ? AND ? GROUP BY kind ORDER BY kind"
        return dict(self._rows(query, (day_of(since), day_of(until - 1))))

    def balances(self, account: str, since: int = 0) -> list[Balance]:
        """An account on the days on which it moved, from ``since`` (seconds) on; the last day before comes first."""
        first = day_of(since)
        before = "SELECT max(day) FROM balance WHERE account = ? AND day < ?"
        query = f"SELECT day, most, held, spent FROM balance WHERE account = ? AND day >= ifnull(({before}), 0)"  # noqa: S608
        return [Balance(*row) for row in self._rows(f"{query} ORDER BY day", (account, account, first))]

    def shares(self, account: str, most: int) -> list[ProjectShare]:
        """The projects that have most of an account, held and spent together."""
        query = (
            "SELECT project, held, spent FROM share WHERE account = ? AND held + spent > 0 "
            "ORDER BY held + spent DESC, project LIMIT ?"
        )
        return [ProjectShare(*row) for row in self._rows(query, (account, most))]


def _plain(word: str) -> str:
    """A name between FTS5's quotes, with nothing that ends them."""
    return "".join(tokens(word)) or "-"
