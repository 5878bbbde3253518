"""The tables of the search index (:mod:`policies.index.search`), and how a batch of entries is written into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import apsw

from policies.index.projection import TOKENCHARS, EntryProjection, IndexBatch, RunningBalance
from policies.ledger.merkle import CompactRange

FORM: Final = 1  # another one is thrown away and made again
SCHEMA: Final = f"""
CREATE TABLE place(one INTEGER PRIMARY KEY CHECK(one = 1), form INTEGER NOT NULL, size INTEGER NOT NULL,
  peaks BLOB NOT NULL, today INTEGER NOT NULL) STRICT;
CREATE TABLE line(seq INTEGER PRIMARY KEY, at INTEGER NOT NULL) STRICT;
CREATE TABLE day(day INTEGER PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL) STRICT;
CREATE TABLE tally(day INTEGER, kind TEXT, site TEXT, n INTEGER NOT NULL, PRIMARY KEY(day, kind, site))
  STRICT, WITHOUT ROWID;
CREATE TABLE refusal(day INTEGER, rule TEXT, site TEXT, n INTEGER NOT NULL, PRIMARY KEY(day, rule, site))
  STRICT, WITHOUT ROWID;
CREATE TABLE holding(name TEXT PRIMARY KEY, site TEXT NOT NULL, account TEXT NOT NULL, run TEXT NOT NULL,
  mechanism TEXT NOT NULL, amount INTEGER NOT NULL, open INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX holding_open ON holding(site) WHERE open = 1;
CREATE TABLE share(account TEXT, project TEXT, held INTEGER NOT NULL, spent INTEGER NOT NULL,
  PRIMARY KEY(account, project)) STRICT, WITHOUT ROWID;
CREATE INDEX share_most ON share(account, held + spent);
CREATE TABLE purse(account TEXT PRIMARY KEY, most INTEGER NOT NULL, held INTEGER NOT NULL, spent INTEGER NOT NULL)
  STRICT, WITHOUT ROWID;
CREATE TABLE balance(account TEXT, day INTEGER, most INTEGER NOT NULL, held INTEGER NOT NULL, spent INTEGER NOT NULL,
  PRIMARY KEY(account, day)) STRICT, WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5(said, content='', detail=none, columnsize=0,
  tokenize="ascii tokenchars '{TOKENCHARS}'");
CREATE VIRTUAL TABLE term USING fts5vocab(words, 'row');
INSERT INTO place VALUES(1, {FORM}, 0, x'', 0);
"""
PRAGMAS: Final = ("journal_mode=WAL", "synchronous=NORMAL", "trusted_schema=OFF", "mmap_size=0", "cache_size=-16384")


def store_batch(
    db: apsw.Connection, flow: EntryProjection, taken: CompactRange, purses: Mapping[str, RunningBalance]
) -> None:
    """One batch in one transaction, and the root of everything taken so far with it."""
    batch = flow.batch
    with db:
        db.executemany("INSERT INTO line VALUES(?, ?)", batch.lines)
        db.executemany("INSERT INTO words(rowid, said) VALUES(?, ?)", batch.texts)
        grown = "ON CONFLICT DO UPDATE SET first = min(first, excluded.first), last = max(last, excluded.last)"
        db.executemany(f"INSERT INTO day VALUES(?, ?, ?) {grown}", [(d, *ends) for d, ends in batch.days.items()])
        for table, counts in (("tally", batch.tallies), ("refusal", batch.refusals)):
            rows = [(*key, n) for key, n in counts.items()]
            more = "ON CONFLICT DO UPDATE SET n = n + excluded.n"
            db.executemany(f"INSERT INTO {table} VALUES(?, ?, ?, ?) {more}", rows)
        _keep_money(db, batch)
        money = [(name, p.limit, p.held, p.spent) for name, p in purses.items()]
        db.executemany("INSERT OR REPLACE INTO purse VALUES(?, ?, ?, ?)", money)
        place = (taken.size, b"".join(taken.peaks), flow.today)
        db.execute("UPDATE place SET size = ?, peaks = ?, today = ?", place)


def _keep_money(db: apsw.Connection, batch: IndexBatch) -> None:
    rows: list[tuple[Any, ...]] = [
        (name, g.site, g.account, g.run, g.mechanism, g.amount, int(g.open)) for name, g in batch.grants.items()
    ]
    db.executemany("INSERT OR REPLACE INTO holding VALUES(?, ?, ?, ?, ?, ?, ?)", rows)
    rows = [(*key, batch.held[key], batch.spent[key]) for key in batch.held.keys() | batch.spent.keys()]
    more = "ON CONFLICT DO UPDATE SET held = held + excluded.held, spent = spent + excluded.spent"
    db.executemany(f"INSERT INTO share VALUES(?, ?, ?, ?) {more}", rows)
    rows = [(*key, *purse) for key, purse in batch.balances.items()]
    db.executemany("INSERT OR REPLACE INTO balance VALUES(?, ?, ?, ?, ?)", rows)
