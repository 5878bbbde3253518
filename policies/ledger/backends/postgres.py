"""A ledger's bytes in PostgreSQL (14 or newer): one function, one round trip, the head row taken ``FOR UPDATE``.

What keeps two coordinators apart, from courtesy to safety: a session advisory lock refuses the second one when it
opens; opening raises the ledger's term, and a commit names the term it was opened in and the head it extends, so that
a writer that was taken over (lost session, failover, a pooler in between) is refused whatever it believes. Its role
may call the two functions and read the tables, nothing else; :func:`install` arranges it.

Durable means what PostgreSQL promises with ``fsync``, ``full_page_writes`` and ``synchronous_commit`` on: all three
are looked at when a ledger is opened and again inside every commit. On a server with synchronous standbys a commit
waits for them, and so does opening: what a crash left committed here alone is not served before a standby has it.
So a standby's head row is the ledger's high-water mark. Where the address names several hosts, each of them is asked
for it when the ledger is opened; a server that was turned back, or a standby that lagged and took over, is refused.

The driver is psycopg 3, imported unchanged (LGPL-3.0, which an Apache-2.0 program may do) and optional (the extra
``postgres``). pg8000 is BSD and a fifth of the size without libpq, but psycopg is kept by a team, typed, and speaks
through libpq: TLS with ``verify-full``, password and service files, several hosts, ``tcp_user_timeout``.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from policies.forms import FORM, TABLE, number, readable, writable
from policies.store import Batch, Head, LedgerBusy, LedgerUnsound

PAGE: Final = 10_000  # entries read at a time
PATIENCE: Final = 60.0  # seconds until an answer is given up; a hung server or an absent standby stops the ledger
_ASKING: Final = 15.0  # seconds for another host's head

_SCHEMA: Final = Path(__file__).with_suffix(".sql")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,50}")  # with the prefix it stays below PostgreSQL's 63 bytes

# libpq's settings, unless the address has its own. A server that is gone is noticed within half a minute.
_CONNECT: Final = {
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "sslmode": "verify-full",  # not for Unix sockets; a man in the middle could say "durable"
    "application_name": "lazaret",
    "client_encoding": "UTF8",
}
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
_MISTYPED: Final = "the address of PostgreSQL cannot be read; write 'host=… dbname=… user=…', or percent-encode a URL"
_ABSENT: Final = "the ledger is not installed here, or not for this role: install it as its owner first"
_NO_HEAD: Final = "the ledger's head is missing or there are two"
_FAILURES: Final[Mapping[str, tuple[type[Exception], str]]] = {  # by SQLSTATE; LZ are those of postgres.sql
    "LZ001": (LedgerBusy, "another coordinator has taken this ledger over; nothing was written"),
    "LZ002": (ValueError, "a commit would not be durable: fsync, full_page_writes, synchronous_commit must be on"),
    "55P03": (LedgerBusy, "another session holds this ledger; nothing was written"),
    **dict.fromkeys(("P0002", "P0003"), (LedgerUnsound, _NO_HEAD)),
    **dict.fromkeys(("XX001", "XX002"), (LedgerUnsound, "PostgreSQL finds its own files damaged; use a backup")),
    **dict.fromkeys(("3F000", "42501", "42883", "42P01"), (ValueError, _ABSENT)),
}
# What libpq says when it cannot connect may quote a mistyped address, password and all: only these are passed on.
_CANNOT_CONNECT: Final = (
    ("password authentication failed", "it refuses the role's password"),
    ("no password supplied", "it wants a password: put it into a password file (PGPASSFILE, mode 0600)"),
    ("no pg_hba.conf entry", "its pg_hba.conf does not let this role in from here"),
    ("certificate", "its certificate could not be verified: set sslrootcert, and use the name in the certificate"),
    ("does not support SSL", "it does not speak TLS: turn ssl on, or write sslmode=disable if this network is safe"),
    ("Connection refused", "nothing listens there: is it running, is the port right?"),
    ("No such file or directory", "there is no such socket: is it running on this machine?"),
    ("starting up", "it is starting up: try again"),
    ("too many", "it has no connection left"),
    ("timeout", "it did not answer in time"),
    ("could not translate host name", "its host name is unknown"),
    ("does not exist", "it has no such role or database"),
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


def connect(dsn: str, *, autocommit: bool = True) -> psycopg.Connection[Any]:
    """A connection with a ledger's settings, unless the address has its own.

    Raises:
        ValueError: the address cannot be read.
        ConnectionError: no connection.
    """
    try:
        address = {**_CONNECT, **{k: v for k, v in conninfo_to_dict(dsn).items() if v is not None}}
    except psycopg.Error:
        raise ValueError(_MISTYPED) from None
    try:
        return psycopg.connect("", autocommit=autocommit, **address)  # type: ignore[arg-type]
    except psycopg.Error as error:
        raise _cannot_connect(error) from None


def hosts_of(dsn: str) -> tuple[str, ...]:
    """An address for each of the hosts that an address names; none where it names one.

    Raises:
        ValueError: the address cannot be read.
    """
    try:
        words = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    except psycopg.Error:
        raise ValueError(_MISTYPED) from None
    named = {name: words[name].split(",") for name in ("host", "hostaddr", "port") if words.get(name)}
    count = max((len(found) for name, found in named.items() if name != "port"), default=1)
    if count == 1:
        return ()
    single = [{name: found[i] if len(found) > 1 else found[0] for name, found in named.items()} for i in range(count)]
    return tuple(make_conninfo(**{**words, **one, "target_session_attrs": "any"}) for one in single)


def _cannot_connect(error: psycopg.Error) -> ConnectionError:
    why = next((said for sign, said in _CANNOT_CONNECT if sign in str(error)), "see its log, check the address")
    return ConnectionError(f"no connection to PostgreSQL: {why}")


def _failed(error: psycopg.Error) -> Exception:
    """What went wrong, in words of ours: a server's text may quote the row that it could not write."""
    state = error.sqlstate or ""
    if state in _FAILURES:
        kind, text = _FAILURES[state]
        return kind(text)
    if not state or state[:2] in {"08", "57"}:  # the connection, or an operator's or a timeout's intervention
        return ConnectionError("PostgreSQL was lost or gave no answer; restart to replay the ledger")
    return RuntimeError(f"PostgreSQL refused (SQLSTATE {state}); its log says more")


class _Link:
    """One connection: one thread at a time, no wait without an end, no warning overlooked."""

    def __init__(self, dsn: str, patience: float) -> None:
        self._db = connect(dsn)
        self.process = self._db.info.backend_pid  # as the server, or what stands before it, says
        self._patience = patience
        self._wire = socket.fromfd(self._db.fileno(), socket.AF_UNSPEC, socket.SOCK_STREAM)  # a copy of our own
        self._one = threading.Lock()
        self._warned = False
        self._db.add_notice_handler(self._heed)

    def _heed(self, said: psycopg.errors.Diagnostic) -> None:
        self._warned |= said.severity_nonlocalized == "WARNING"

    def _sever(self) -> None:
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)

    def ask(self, query: sql.SQL | sql.Composed, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Send one statement, or several without values, as one transaction.

        Raises:
            ConnectionError: no answer within the patience, or the connection is gone.
            LedgerBusy, LedgerUnsound, ValueError, RuntimeError: see :func:`_failed`.
        """
        with self._one:
            self._warned = False
            watch = threading.Timer(self._patience, self._sever)
            watch.daemon = True
            watch.start()
            try:
                cursor = self._db.execute(query, values or None, binary=bool(values))
                rows = cursor.fetchall() if cursor.description else []
            except psycopg.Error as error:
                raise _failed(error) from None
            finally:
                watch.cancel()
            if self._warned:  # a commit that no standby has confirmed is reported as done, with a warning
                self._sever()
                raise ConnectionError("PostgreSQL warned that the commit may not have reached a standby")
            return rows

    def close(self) -> None:
        """End the session."""
        with self._one:
            self._db.close()
            self._wire.close()


class Postgres:
    """The :class:`policies.store.Disk` in one schema of a PostgreSQL database."""

    def __init__(self, schema: str, link: _Link, hosts: Sequence[str] = ()) -> None:
        """Use :func:`open_postgres` or :func:`look_postgres`; ``hosts``: each one's address, if there are more."""
        self._schema, self._link, self._hosts = schema, link, hosts
        self._brought_back = False
        self._term: int | None = None  # None: a reader
        self._last = Head(0, b"", b"")  # what the next commit extends

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._link.ask(sql.SQL(query).format(sql.Identifier(self._schema)), values)

    def form(self) -> int:
        """The form of the ledger's tables: see :mod:`policies.forms`; 0 where there are none for this role.

        Raises:
            LedgerUnsound: they do not say one.
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
                    raise LedgerUnsound(f"entry {at} is missing")
                at += 1
                yield body
            if len(rows) < PAGE:
                return

    def head(self) -> Head | None:
        """The head of the last commit."""
        rows = self._rows("SELECT size, root, seal FROM {}.head")
        if len(rows) != 1:
            raise LedgerUnsound(_NO_HEAD)
        return None if Head(*rows[0]) == Head(0, b"", b"") else Head(*rows[0])

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
            LedgerBusy: another writer has opened the ledger since; nothing was written.
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

    def marks(self) -> Sequence[Head]:
        """The heads that the hosts of the address hold; none where it names one host, or on a standby, which may lag.

        Raises:
            LedgerUnsound: the server waits for standbys, and none of those that the address names answers.
        """
        if not self._hosts or self._brought_back or self._rows("SELECT pg_is_in_recovery()")[0][0]:
            return ()
        found, standbys = list[Head](), 0
        for address in self._hosts:
            with contextlib.suppress(ConnectionError, ValueError), contextlib.ExitStack() as stack:
                there = stack.enter_context(contextlib.closing(Postgres(self._schema, _Link(address, _ASKING))))
                standbys += bool(there._rows("SELECT pg_is_in_recovery()")[0][0])
                if (head := there.head()) is not None:
                    found.append(head)
        if self.synchronous_standbys and not standbys:
            raise LedgerUnsound(
                "PostgreSQL waits for a standby, and none of those in the address answers: nobody can tell whether "
                "this server was turned back: start one, or correct the hosts of `ledger` in coordinator.toml"
            )
        return found

    def mark(self, _head: Head) -> None:
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
            raise ValueError(_ABSENT)
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
        except LedgerBusy:
            raise self._held_by(lock) from None
        rows = self._rows("SELECT term, size, root, seal FROM {}.lazaret_open()")
        self._term, self._last = rows[0][0], Head(*rows[0][1:])

    def _held_by(self, lock: int) -> LedgerBusy:
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
        return LedgerBusy(
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
        return number(form)
    except ValueError:
        raise LedgerUnsound("the ledger's tables do not say their form: they are damaged") from None


def open_postgres(dsn: str, ledger: str = "main", patience: float = PATIENCE) -> Postgres:
    """Open an installed ledger for this process alone to write.

    Args:
        dsn: libpq's address of the database, as the writer's role. Keep the password in a password file or
            ``PGPASSFILE``. TLS is verified in full unless the address sets ``sslmode``.
        ledger: its name; several ledgers may live in one database.
        patience: seconds after which an unanswered commit or read is given up.
    Raises:
        LedgerBusy: another process has it open for writing.
        ValueError: the address, the role, the server's settings or the installation will not do, with what to do.
        WrongForm: an older or a newer program installed it.
        ConnectionError: no connection, or no answer.
    """
    disk = Postgres(schema_of(ledger), _Link(dsn, patience), hosts_of(dsn))
    try:
        disk._set_up(default_transaction_read_only="off")
        disk._check_server()
        writable(disk.form())
        disk._check_role()
        disk._take()
    except BaseException:
        disk.close()
        raise
    return disk


def look_postgres(dsn: str, ledger: str = "main", patience: float = PATIENCE) -> Postgres:
    """Open an installed ledger to read, also while another process is writing it, also on a standby.

    Raises:
        ValueError: the address will not do, or there is no such ledger for this role.
        ConnectionError: no connection, or no answer.
    """
    disk = Postgres(schema_of(ledger), _Link(dsn, patience), hosts_of(dsn))
    try:
        disk._set_up(default_transaction_read_only="on")
        readable(disk.form())
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
        WrongForm: the ledger that is there was installed by an older or a newer program.
        ConnectionError: no connection, or no answer.
    """
    schema = schema_of(ledger)
    with contextlib.closing(_Link(dsn, PATIENCE)) as link:
        role = "SELECT rolsuper OR pg_has_role(oid, current_user, 'MEMBER') FROM pg_roles WHERE rolname = %s"
        rows = link.ask(sql.SQL(role), (writer,))
        if not rows:
            raise ValueError("there is no such role for the writer: CREATE ROLE … LOGIN first")
        if rows[0][0]:
            raise ValueError("the writer must be neither a superuser nor the ledger's owner")
        owned = "SELECT nspowner = current_user::regrole FROM pg_namespace WHERE nspname = %s"
        if link.ask(sql.SQL(owned), (schema,)) == [(False,)]:
            raise ValueError("the ledger belongs to another role; install it as that one")
        writable(form_of(link.ask, schema))
        text, names = sql.SQL(_SCHEMA.read_text()), (sql.Identifier(schema), sql.Identifier(writer))
        link.ask(text.format(schema=names[0], writer=names[1], form=sql.Literal(str(FORM))))
