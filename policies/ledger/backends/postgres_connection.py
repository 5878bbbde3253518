"""A connection to PostgreSQL for a ledger: its settings, one statement at a time, and errors in words of ours."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from policies.ledger.store import LedgerBusyError, LedgerUnsoundError

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
_MISTYPED: Final = "the address of PostgreSQL cannot be read; write 'host=… dbname=… user=…', or percent-encode a URL"
ABSENT: Final = "the ledger is not installed here, or not for this role: install it as its owner first"
NO_HEAD: Final = "the ledger's head is missing or there are two"
_FAILURES: Final[Mapping[str, tuple[type[Exception], str]]] = {  # by SQLSTATE; LZ are those of postgres.sql
    "LZ001": (LedgerBusyError, "another coordinator has taken this ledger over; nothing was written"),
    "LZ002": (ValueError, "a commit would not be durable: fsync, full_page_writes, synchronous_commit must be on"),
    "55P03": (LedgerBusyError, "another session uses this ledger; nothing was written"),
    **dict.fromkeys(("P0002", "P0003"), (LedgerUnsoundError, NO_HEAD)),
    **dict.fromkeys(
        ("XX001", "XX002"), (LedgerUnsoundError, "PostgreSQL reports that its files are damaged: restore a backup")
    ),
    **dict.fromkeys(("3F000", "42501", "42883", "42P01"), (ValueError, ABSENT)),
}
# What libpq says when it cannot connect may quote a mistyped address, password and all: only these are passed on.
_CANNOT_CONNECT: Final = (
    ("password authentication failed", "it refuses the role's password"),
    ("no password supplied", "it needs a password: put it into a password file (PGPASSFILE, mode 0600)"),
    ("no pg_hba.conf entry", "its pg_hba.conf does not permit this role from this host"),
    ("certificate", "its certificate could not be verified: set sslrootcert, and use the name in the certificate"),
    ("does not support SSL", "it does not use TLS: turn ssl on, or write sslmode=disable if this network is safe"),
    ("Connection refused", "nothing listens there: check that it runs, and the port"),
    ("No such file or directory", "the socket does not exist: check that it runs on this machine"),
    ("starting up", "it is starting up: try again"),
    ("too many", "it has no free connection"),
    ("timeout", "it did not answer in time"),
    ("could not translate host name", "its host name is unknown"),
    ("does not exist", "it has no such role or database"),
)


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
        why = next((said for sign, said in _CANNOT_CONNECT if sign in str(error)), "see its log, check the address")
        raise ConnectionError(f"no connection to PostgreSQL: {why}") from None


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


def _failed(error: psycopg.Error) -> Exception:
    """What went wrong, in words of ours: a server's text may quote the row that it could not write."""
    state = error.sqlstate or ""
    if state in _FAILURES:
        kind, text = _FAILURES[state]
        return kind(text)
    if not state or state[:2] in {"08", "57"}:  # the connection, or an operator's or a timeout's intervention
        return ConnectionError("the connection to PostgreSQL was lost: restart to replay the ledger")
    return RuntimeError(f"PostgreSQL refused (SQLSTATE {state}); see its log")


class PostgresLink:
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
            LedgerBusyError, LedgerUnsoundError, ValueError, RuntimeError: see :func:`_failed`.
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
