"""A ledger's bytes in PostgreSQL (14 or newer): one function, one round trip, the head row taken ``FOR UPDATE``.

Two coordinators are kept apart at three levels. A session advisory lock refuses the second one when it opens. Opening
raises the ledger's term. A commit names the term in which its writer opened the ledger and the head it extends, so
the server refuses a writer that was replaced (lost session, failover, a pooler in between), whatever that writer
believes. The writer's role may only call the two functions and read the tables; :func:`install` arranges this.

Durable means what PostgreSQL promises with ``fsync``, ``full_page_writes`` and ``synchronous_commit`` on. All three
are checked when a ledger is opened and again inside every commit. On a server with synchronous standbys a commit
waits for them, and so does opening: data that a crash left committed on this server alone is not served before a
standby has it. So a standby's head row is the ledger's high-water mark. If the address names several hosts, each of
them is asked for it when the ledger is opened. A server that was turned back, or a lagging standby that took over, is
refused. So is a server whose commits wait for a standby, or whose address names one, if too few standbys answer. An
answer counts if the standby has replayed everything it received (what it acknowledged was received, and perhaps no
more). So many must answer that one of them has acknowledged each commit (:func:`answers_needed`). A single host
without synchronous standbys has no mark.

The driver is psycopg 3, imported unchanged (LGPL-3.0, which an Apache-2.0 program may do) and optional (the extra
``postgres``). pg8000 is BSD and a fifth of the size without libpq, but psycopg is kept by a team, typed, and speaks
through libpq: TLS with ``verify-full``, password and service files, several hosts, ``tcp_user_timeout``.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from psycopg import sql

from policies.ledger.backends.postgres_connection import ABSENT, NO_HEAD, PostgresLink, hosts_of
from policies.ledger.backends.schema_version import FORM, TABLE, parse_version, require_readable, require_writable
from policies.ledger.store import Batch, LedgerBusyError, LedgerUnsoundError, MarkUnknownError, SealedHead

PAGE: Final = 10_000  # entries read at a time
PATIENCE: Final = 60.0  # seconds until an answer is given up; a hung server or an absent standby stops the ledger
_ASKING: Final = 15.0  # seconds for another host's head
_REPLAYING: Final = 5.0  # seconds in which a standby is asked again whether it has replayed what it received

_SCHEMA: Final = Path(__file__).with_suffix(".sql")
# As `synchronous_standby_names` is written: "ANY 1 (a, b)", "FIRST 2 (a, b)", "2 (a, b)" or "a, b".
_WAITED_FOR: Final = re.compile(r"\s*(?:(?:ANY|FIRST)\s+)?(\d+)\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)
_STANDBY: Final = re.compile(r'"(?:[^"]|"")*"|[^\s,"]+')
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,50}")  # with the prefix it stays below PostgreSQL's 63 bytes

# The server's side of the session. It notices within a minute that this host is gone, and then drops the lock.
_SESSION: Final = {
    "synchronous_commit": "on",  # or remote_apply, if that is what the server is set to
    "default_transaction_isolation": "read committed",
    "statement_timeout": "30s",
    "lock_timeout": "2s",  # a predecessor's session may take a moment to end
    "idle_session_timeout": "0",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "search_path": "pg_catalog",
    "row_security": "off",  # an error where a policy would hide rows
}
_ONE_HOST: Final = (
    "PostgreSQL's commits wait for a standby (synchronous_standby_names = '{}'), and the address names one host, so "
    "nobody can tell whether this server was turned back: add the standby's host to `ledger` in coordinator.toml "
    "('host=a,b target_session_attrs=read-write …'), or empty that setting if there is no standby any more"
)
_NO_ANSWER: Final = (
    "the address names several hosts of PostgreSQL, and no other host of the address answers as its standby, so "
    "nobody can tell whether this server was turned back: start one, or let `ledger` in coordinator.toml name the "
    "hosts that there are"
)
_NOT_REPLAYED: Final = (
    "a standby of PostgreSQL has received more than it has replayed, or cannot say how much, so nobody can tell "
    "whether this server was turned back: wait until it has caught up; if it does not, look there whether its replay "
    "is paused (pg_wal_replay_resume()) or delayed (recovery_min_apply_delay)"
)
_TOO_FEW: Final = (
    "with synchronous_standby_names = '{}' a commit may be at some standbys alone; {} of them must answer so that "
    "one has every commit, and {} did, so nobody can tell whether this server was turned back: start the others, and "
    "let `ledger` in coordinator.toml name each of them"
)


def schema_of(ledger: str) -> str:
    """The schema in which the ledger of that name lives.

    Raises:
        ValueError: no fit name.
    """
    if not _NAME.fullmatch(ledger):
        raise ValueError("a ledger's name is 1 to 51 of a-z, 0-9, - and _, beginning with a letter or digit")
    return f"lazaret_{ledger}"


def lock_of(schema: str) -> int:
    """The advisory lock of whoever writes the ledger in that schema."""
    return int.from_bytes(hashlib.sha256(schema.encode()).digest()[:8], "big", signed=True)


def answers_needed(names: str, others: int) -> int:
    """How many standbys must answer so that one of them has every commit.

    A commit waits for k of n standbys. ``ANY`` and ``FIRST`` alike may have had any k of them, so all but k - 1 must
    answer. ``*`` may be any number, so every other host must.

    Args:
        names: the server's ``synchronous_standby_names``; where it is empty, one answer is all that can be asked for.
        others: hosts of the address besides the server itself; where they are more than the names, some share a name
            or are waited for by none, and who is who cannot be seen.
    """
    if not names.strip():
        return 1
    counted = _WAITED_FOR.fullmatch(names)
    acknowledged, listed = (int(counted[1]), counted[2]) if counted else (1, names)
    standbys = _STANDBY.findall(listed)
    if any(name.strip('"') == "*" for name in standbys):
        return max(1, others)
    return max(1, max(others, len(standbys)) - acknowledged + 1)


class Postgres:
    """The :class:`policies.ledger.store.LedgerBackend` in one schema of a PostgreSQL database."""

    def __init__(self, schema: str, link: PostgresLink, hosts: Sequence[str] = ()) -> None:
        """Use :func:`open_postgres` or :func:`open_read_only_postgres`.

        ``hosts`` is the address of each host, if there are several.
        """
        self._schema, self._link, self._hosts = schema, link, hosts
        self._brought_back = False
        self._term: int | None = None  # None: a reader
        self._last = SealedHead(0, b"", b"")  # what the next commit extends

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._link.ask(sql.SQL(query).format(sql.Identifier(self._schema)), values)

    def form(self) -> int:
        """The form of the ledger's tables: see :mod:`policies.ledger.backends.schema_version`; 0 where there are none
        for this role.

        Raises:
            LedgerUnsoundError: they do not say one.
        """
        return form_of(self._link.ask, self._schema)

    def _one_of(self, query: str, value: Any) -> bytes | None:
        rows = self._rows(query, (value,))
        return bytes(rows[0][0]) if rows else None

    def bodies(self, upto: int | None = None) -> Iterator[bytes]:
        """The entries in their order."""
        end, at = (1 << 62) if upto is None else upto, 0
        while at < end:
            query = "SELECT seq, body FROM {}.entry WHERE seq >= %s AND seq < %s ORDER BY seq LIMIT %s"
            rows = self._rows(query, (at, end, PAGE))
            for seq, body in rows:
                if seq != at:
                    raise LedgerUnsoundError(f"entry {at} is missing")
                at += 1
                yield body
            if len(rows) < PAGE:
                return

    def head(self) -> SealedHead | None:
        """The head of the last commit."""
        rows = self._rows("SELECT size, root, seal FROM {}.head")
        if len(rows) != 1:
            raise LedgerUnsoundError(NO_HEAD)
        return None if SealedHead(*rows[0]) == SealedHead(0, b"", b"") else SealedHead(*rows[0])

    def body(self, seq: int) -> bytes | None:
        """One entry."""
        return self._one_of("SELECT body FROM {}.entry WHERE seq = %s::bigint", seq)

    def envelope(self, digest: bytes) -> bytes | None:
        """The envelope with that SHA-256."""
        return self._one_of("SELECT body FROM {}.envelope WHERE digest = %b", digest)

    def envelopes(self) -> Iterator[bytes]:
        """All of them, in the order of their digests."""
        last = b""
        while True:
            query = "SELECT digest, body FROM {}.envelope WHERE digest > %b ORDER BY digest LIMIT %s"
            rows = self._rows(query, (last, PAGE))
            for last, body in rows:  # noqa: B007 - the last digest is where the next page begins
                yield body
            if len(rows) < PAGE:
                return

    def commit(self, batch: Batch) -> None:
        """One call of one function; the server (and its synchronous standbys) synced the log when it returns.

        Raises:
            LedgerBusyError: another writer has opened the ledger since; nothing was written.
            ValueError: the server's settings became unsafe, or this is a reader; nothing was written.
            ConnectionError: no answer; the batch may be durable or not.
        """
        if self._term is None:
            raise ValueError("the ledger was opened to read")
        head, last = batch.head, self._last
        if (batch.first, head.size) != (last.size, last.size + len(batch.bodies)):
            raise ValueError("the batch does not continue the ledger")
        query = "SELECT {}.lazaret_commit(%s::bigint, %s::bigint, %b, %b, %b::bytea[], %b::bytea[], %b, %b)"
        bodies, envelopes = list(batch.bodies), list(batch.envelopes)
        self._rows(query, (self._term, batch.first, last.root, last.seal, bodies, envelopes, head.root, head.seal))
        self._last = head

    def marks(self) -> Sequence[SealedHead]:
        """The heads that the other hosts of the address hold; none on a standby, which may lag.

        None either where the address names one host, and the server's commits wait for no standby.

        Raises:
            MarkUnknownError: there are standbys, by the server's word or by the address, and too few of them answer.
        """
        standby, own = self._identity()
        if self._brought_back or standby:
            return ()
        names = self.synchronous_standbys
        if not self._hosts:
            if names:
                raise MarkUnknownError(_ONE_HOST.format(names))
            return ()
        heads, standbys, replayed, silent = self._others(own)
        needed = answers_needed(names, len(heads) + silent)
        if len(replayed) < needed <= len(standbys):
            raise MarkUnknownError(_NOT_REPLAYED)
        if not standbys:
            raise MarkUnknownError(_NO_ANSWER)
        if len(replayed) < needed:
            raise MarkUnknownError(_TOO_FEW.format(names, needed, len(replayed)))
        return [head for head in heads.values() if head is not None]

    def _others(self, own: str) -> tuple[dict[str, SealedHead | None], set[str], set[str], int]:
        """The other hosts' heads, which of them are standbys, and replayed, each by identity; how many are silent."""
        heads, standbys, replayed, silent = dict[str, SealedHead | None](), set[str](), set[str](), 0
        for address in self._hosts:
            try:
                with contextlib.closing(Postgres(self._schema, PostgresLink(address, _ASKING))) as there:
                    follows, identity = there._identity()
                    if not follows and identity == own:  # this very server
                        continue
                    whole = follows and there._has_replayed()
                    heads[identity] = there.head()  # after that look
                standbys |= {identity} if follows else set()
                replayed |= {identity} if whole else set()
            except (ConnectionError, ValueError):
                silent += 1
        return heads, standbys, replayed, silent

    def _has_replayed(self) -> bool:
        """Of a standby: has it replayed all that it received? It is asked again for :data:`_REPLAYING` seconds.

        One that has not yet asked its primary for more since it was started says null: it may have more on its disk.
        """
        end = time.monotonic() + _REPLAYING
        while self._rows("SELECT pg_last_wal_receive_lsn() <= pg_last_wal_replay_lsn()") != [(True,)]:
            if not time.monotonic() < end:
                return False
            time.sleep(0.1)
        return True

    def unmarked(self) -> str:
        """What the other hosts' heads do not show here, as a sentence; "" where each commit waits for a standby."""
        if self._rows("SELECT pg_is_in_recovery()")[0][0]:
            return "this is a standby, and the primary alone is held against a mark"
        if self.synchronous_standbys:
            return ""
        if not self._hosts:
            return (
                "there is no standby to ask: a server that was turned back is noticed by the cosigned heads and the "
                "shelf alone"
            )
        return (
            "synchronous_standby_names is empty, so commits wait for no standby, and the one that was asked may lag: "
            "set it (ALTER SYSTEM, then pg_reload_conf()), or know that the newest entries have no mark"
        )

    def _identity(self) -> tuple[bool, str]:
        """Is it a standby, and when was the server started? No two servers are at the same microsecond."""
        ((standby, since),) = self._rows(
            "SELECT pg_is_in_recovery(), extract(epoch FROM pg_postmaster_start_time())::text"
        )
        return bool(standby), str(since)

    def mark(self, _head: SealedHead) -> None:
        """Opening wrote a new term, and waited for the standbys to have it with everything before it."""

    def brought_back(self) -> None:
        """For `restore` alone: what a standby of before holds does not bind."""
        self._brought_back = True

    @property
    def synchronous_standbys(self) -> str:
        """The server's ``synchronous_standby_names``: empty if a commit waits for no standby."""
        return str(self._rows("SHOW synchronous_standby_names")[0][0])

    def close(self) -> None:
        """End the session, and with it the lock."""
        if self._term is not None:
            with contextlib.suppress(Exception):  # at once, not when the server comes round to it
                self._rows("SELECT pg_advisory_unlock_all()")
        self._link.close()

    def _set_up(self, **more: str) -> None:
        """The session's settings."""
        settings = {**_SESSION, **more}
        query = """
            SELECT set_config(name, CASE WHEN name = 'synchronous_commit' AND current_setting(name) = 'remote_apply'
                                    THEN 'remote_apply' ELSE value END, false)
            FROM unnest(%s::text[], %s::text[]) AS given(name, value)"""
        self._rows(query, (list(settings), list(settings.values())))

    def _check_server(self) -> None:
        """Refuse a server that would lose, or a connection that is not one session."""
        names = ["fsync", "full_page_writes", "synchronous_commit", "server_version_num"]
        rows = self._rows("SELECT current_setting(name) FROM unnest(%s::text[]) AS name", (names,))
        fsync, pages, synchronous, version = (row[0] for row in rows)
        if not int(version) >= 140_000:
            raise ValueError("PostgreSQL 14 or newer is needed")
        for name, value in (("fsync", fsync), ("full_page_writes", pages)):
            if value != "on":
                raise ValueError(
                    f"PostgreSQL runs with {name} = {value}, so a power cut may lose what it acknowledged: "
                    f"set {name} = on in postgresql.conf and restart it"
                )
        if synchronous not in {"on", "remote_apply"}:
            raise ValueError(f"synchronous_commit stays {synchronous}: something between here and PostgreSQL sets it")
        standby, process = self._rows("SELECT pg_is_in_recovery(), pg_backend_pid()")[0]
        if standby:
            raise ValueError("this PostgreSQL is a standby; give the address of the primary")
        if process != self._link.process:
            raise ValueError("a pooler stands before PostgreSQL; a ledger needs a session: connect to it directly")

    def _check_role(self) -> None:
        """Refuse a role that could write to the tables without the function, and tables that a crash empties."""
        query = """
            SELECT c.relpersistence = 'p',
                   pg_has_role(c.relowner, 'MEMBER') OR has_schema_privilege(n.oid, 'CREATE')
                   OR has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE, TRIGGER')
                   OR has_any_column_privilege(c.oid, 'INSERT, UPDATE')
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = %s AND c.relkind = 'r' AND c.relname IN ('entry', 'envelope', 'head')"""
        rows = self._rows(query, (self._schema,))
        if len(rows) != 3:
            raise ValueError(ABSENT)
        if not all(logged for logged, _ in rows):
            raise ValueError("the ledger's tables are unlogged, a crash empties them: ALTER TABLE … SET LOGGED")
        if any(able for _, able in rows):
            raise ValueError(
                "this role may write to the ledger's tables directly (as a superuser, as their owner, by a grant): "
                "connect as one that may only call the ledger's functions"
            )

    def _take(self) -> None:
        """Become the writer: the lock, then a new term."""
        lock = lock_of(self._schema)
        try:
            self._rows("SELECT pg_advisory_lock(%s)", (lock,))
        except LedgerBusyError:
            raise self._held_by(lock) from None
        rows = self._rows("SELECT term, size, root, seal FROM {}.lazaret_open()")
        self._term, self._last = rows[0][0], SealedHead(*rows[0][1:])

    def _held_by(self, lock: int) -> LedgerBusyError:
        query = """
            SELECT l.pid, coalesce(host(a.client_addr), 'this machine'), a.backend_start::timestamp(0)::text
            FROM pg_locks l JOIN pg_stat_activity a USING (pid)
            WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
              AND (l.classid::bigint << 32 | l.objid::bigint) = %s"""
        rows = self._rows(query, (lock,))
        who = "another coordinator"
        if rows:
            pid, address, since = rows[0]
            who += f" (server process {pid}, from {address}, since {since})"
        return LedgerBusyError(
            f"{who} is writing this ledger; stop it first. If its machine is gone, PostgreSQL ends the session "
            "within a minute; pg_terminate_backend does so at once"
        )


def form_of(ask: Callable[..., Sequence[tuple[Any, ...]]], schema: str) -> int:
    """The form of the tables in a schema, asked through any connection: (query, values) -> rows."""
    there = "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s"
    names = {name for (name,) in ask(sql.SQL(there), (schema,))}
    if TABLE not in names:
        return 1 if "entry" in names else 0
    said = ask(sql.SQL("SELECT version_num FROM {}").format(sql.Identifier(schema, TABLE)))
    try:
        ((form,),) = said
        return parse_version(form)
    except ValueError:
        raise LedgerUnsoundError("the ledger's tables do not say their form: they are damaged") from None


def open_postgres(dsn: str, ledger: str = "main", patience: float = PATIENCE) -> Postgres:
    """Open an installed ledger for this process alone to write.

    Args:
        dsn: libpq's address of the database, as the writer's role. Keep the password in a password file or
            ``PGPASSFILE``. TLS is verified in full unless the address sets ``sslmode``.
        ledger: its name; several ledgers may live in one database.
        patience: seconds after which an unanswered commit or read is given up.
    Raises:
        LedgerBusyError: another process has it open for writing.
        ValueError: the address, the role, the server's settings or the installation will not do, with what to do.
        SchemaVersionError: an older or a newer program installed it.
        ConnectionError: no connection, or no answer.
    """
    disk = Postgres(schema_of(ledger), PostgresLink(dsn, patience), hosts_of(dsn))
    try:
        disk._set_up(default_transaction_read_only="off")
        disk._check_server()
        require_writable(disk.form())
        disk._check_role()
        disk._take()
    except BaseException:
        disk.close()
        raise
    return disk


def open_read_only_postgres(dsn: str, ledger: str = "main", patience: float = PATIENCE) -> Postgres:
    """Open an installed ledger to read, also while another process is writing it, also on a standby.

    Raises:
        ValueError: the address will not do, or there is no such ledger for this role.
        ConnectionError: no connection, or no answer.
    """
    disk = Postgres(schema_of(ledger), PostgresLink(dsn, patience), hosts_of(dsn))
    try:
        disk._set_up(default_transaction_read_only="on")
        require_readable(disk.form())
        disk.head()
    except BaseException:
        disk.close()
        raise
    return disk


def install(dsn: str, writer: str, ledger: str = "main") -> None:
    """Create a ledger's schema, tables and functions, or renew the functions and grants of one that is there.

    Args:
        dsn: address of the database, as the role that shall own the ledger: not a coordinator's.
        writer: an existing role with LOGIN that coordinators use. It may read, and call the function that appends.
        ledger: the ledger's name.
    Raises:
        ValueError: the role does not exist, or could do more than it is granted.
        SchemaVersionError: the ledger that is there was installed by an older or a newer program.
        ConnectionError: no connection, or no answer.
    """
    schema = schema_of(ledger)
    with contextlib.closing(PostgresLink(dsn, PATIENCE)) as link:
        role = "SELECT rolsuper OR pg_has_role(oid, current_user, 'MEMBER') FROM pg_roles WHERE rolname = %s"
        rows = link.ask(sql.SQL(role), (writer,))
        if not rows:
            raise ValueError("there is no such role for the writer: CREATE ROLE … LOGIN first")
        if rows[0][0]:
            raise ValueError("the writer must be neither a superuser nor the ledger's owner")
        owned = "SELECT nspowner = current_user::regrole FROM pg_namespace WHERE nspname = %s"
        if link.ask(sql.SQL(owned), (schema,)) == [(False,)]:
            raise ValueError("the ledger belongs to another role; install it as that one")
        require_writable(form_of(link.ask, schema))
        text, names = sql.SQL(_SCHEMA.read_text()), (sql.Identifier(schema), sql.Identifier(writer))
        link.ask(text.format(schema=names[0], writer=names[1], form=sql.Literal(str(FORM))))
