"""A PostgreSQL server of a test's own: a Unix socket, no TCP, ``fsync=on``; killed, restarted, thrown away."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from tests.support.peers import need

OWNER, WRITER, GUARDED = "lazaret_owner", "lazaret_writer", "lazaret_guarded"
PASSWORD = "correct-horse-battery"
_CONF = """
listen_addresses = ''
fsync = on
recovery_init_sync_method = syncfs
max_connections = 30
shared_buffers = 16MB
wal_level = replica
max_wal_senders = 6
logging_collector = off
"""


def binaries() -> Path | None:
    """The newest installed PostgreSQL's programs (Debian's layout, or the path)."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Cluster:
    """One server in a folder of its own, as a child of this process."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self.folder, self.data = programs, folder, folder / "data"
        self.user = "postgres" if os.getuid() == 0 else None  # initdb and the server refuse root
        if self.user:
            shutil.chown(folder, self.user)
        self._server: subprocess.Popen[bytes] | None = None

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [str(self.programs / program), "-D", str(self.data), *arguments],
                user=self.user,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        """The end of what the server wrote."""
        return (self.folder / "log").read_text()[-2000:]

    def create(self) -> None:
        """``initdb``."""
        initdb = self._spawn("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        if initdb.wait(200):
            raise RuntimeError(f"initdb failed: {self.log}")
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(f"{_CONF}unix_socket_directories = '{self.folder}'\n")
        rights = f"local all {GUARDED} scram-sha-256\nlocal all all trust\nlocal replication all trust\n"
        (self.data / "pg_hba.conf").write_text(rights)

    def follow(self, primary: Cluster) -> None:
        """``pg_basebackup``, to be started as a standby of a server that runs."""
        words = ("-h", str(primary.folder), "-U", "postgres", "-R", "-X", "stream", "-c", "fast")
        if self._spawn("pg_basebackup", *words).wait(200):
            raise RuntimeError(f"pg_basebackup failed: {self.log}")
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(f"unix_socket_directories = '{self.folder}'\n")

    def start(self) -> None:
        """Start it and wait until it answers; after a crash it first replays its log."""
        deadline = time.monotonic() + 200
        server = self._server = self._spawn("postgres")
        while time.monotonic() < deadline:
            with contextlib.suppress(psycopg.OperationalError):
                self.admin("SELECT 1")
                return
            if server.poll() is not None:  # a killed server's children may still hold its shared memory
                server = self._server = self._spawn("postgres")
            time.sleep(0.05)
        raise RuntimeError(f"the server does not start: {self.log}")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT as ``pg_ctl -m fast``, SIGQUIT as ``-m immediate``, which leaves a log to replay."""
        if self._server is not None:
            self._server.send_signal(how)
            self._server.wait(200)

    def kill(self) -> None:
        """``kill -9`` the postmaster and every process that it started: nobody tidies up."""
        assert self._server is not None
        family = [self._server.pid, *_children(self._server.pid)]
        for process in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._server.wait(200)

    def dsn(self, role: str, **more: str) -> str:
        """The address, for one of the roles."""
        return " ".join([f"host={self.folder} dbname=postgres user={role}", *(f"{k}={v}" for k, v in more.items())])

    def admin(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Run something as the superuser."""
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            cursor = connection.execute(query.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def set(self, **settings: str) -> None:
        """Change settings that a reload brings into force, and wait until it has; an empty value resets."""
        for name, value in settings.items():
            self.admin(f"ALTER SYSTEM SET {name} = '{value}'" if value else f"ALTER SYSTEM RESET {name}")
        before = self.admin("SELECT pg_conf_load_time()")
        self.admin("SELECT pg_sleep(0.01), pg_reload_conf()")
        while self.admin("SELECT pg_conf_load_time()") == before:
            time.sleep(0.02)


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


@contextlib.contextmanager
def standby_of(primary: Cluster) -> Iterator[Cluster]:
    """A hot standby of a throwaway cluster; streaming, and synchronous when the primary is set to wait for it."""
    folder = Path(tempfile.mkdtemp(prefix="lazaret-pg-"))
    cluster = Cluster(primary.programs, folder)
    try:
        cluster.follow(primary)
        cluster.start()
        yield cluster
    finally:
        cluster.stop(signal.SIGQUIT)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def throwaway() -> Iterator[Cluster]:
    """A new cluster with an owner's and a writer's role; skips where PostgreSQL is not installed, but not in CI."""
    programs = binaries()
    if programs is None:
        need("initdb")
    assert programs is not None, "initdb is on the path"
    folder = Path(tempfile.mkdtemp(prefix="lazaret-pg-"))  # a socket's path is short, and pytest's folders are root's
    cluster = Cluster(programs, folder)
    try:
        cluster.create()
        cluster.start()
        cluster.admin(f"CREATE ROLE {OWNER} LOGIN")
        cluster.admin(f"CREATE ROLE {WRITER} LOGIN")
        cluster.admin(f"CREATE ROLE {GUARDED} LOGIN PASSWORD '{PASSWORD}'")
        cluster.admin(f"GRANT CREATE ON DATABASE postgres TO {OWNER}")
        yield cluster
    finally:
        cluster.stop(signal.SIGQUIT)
        shutil.rmtree(folder, ignore_errors=True)
