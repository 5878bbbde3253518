"""The research projects that a site works for: each has its own key, its own records, and an end.

``keys/projects/NAME/key`` is 32 random bytes, from which HKDF-SHA256 (RFC 5869) derives the keys of the project's
records, pseudonyms and spool. Ending a project destroys that key: all copies of its data are then noise (NIST SP
800-88 rev. 1, section 2.6, cryptographic erase). A copy of the *key* in a backup undoes that, so ``keys/projects``
belongs in no backup that outlives a project. The key's bytes are overwritten before the file is deleted. A
journalling or copying file system, or a flash disk, may keep them: for that case, encrypt the disk too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import apsw
import numpy as np

from agent.deidentify.record import Record, keyed_name
from agent.errors import SiteConfigError
from agent.microaggregation.released_clusters import place_of
from agent.storage.encrypted_sqlite import OlderVaultError, VaultError, derive, faults
from agent.storage.label_tables import forget_patients
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import MAIN, SiteDirectory, new_key
from agent.storage.vault import Vault
from protos.common.durable_files import flush_directory
from protos.identity.key_files import read_private, write_private

NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,30}")
_KEY_BYTES: Final = 32
_BATCH: Final = 256
_UNKNOWN: Final = "0" * 32


class ProjectError(SiteConfigError):
    """There is no such project, or the request cannot be carried out; the text says what to do."""


@dataclass(frozen=True, slots=True)
class ProjectKeys:
    """The keys derived from a project's key, 32 bytes each. They end with it."""

    vault: bytes = field(repr=False)  # seals its records
    pseudonym: bytes = field(repr=False)  # what is written into its files: patient ids, UIDs, shifts of dates
    rooms: bytes = field(repr=False)  # seals what waits for it, and what was refused


def _folder(home: SiteDirectory, name: str) -> Path:
    if not NAME.fullmatch(name):
        raise ProjectError("a project has a short name of a-z, 0-9 and -, which begins with a letter")
    return home.project_keys / name


def _ended(home: SiteDirectory, name: str) -> bool:
    return (_folder(home, name) / "ended").exists()


def _database(home: SiteDirectory, name: str) -> Path:
    return home.root / "projects" / f"{name}.db"


def project_folders(home: SiteDirectory, name: str) -> tuple[Path, Path]:
    """Where a project's arrivals wait, and where its refused files are: spool and quarantine."""
    _folder(home, name)
    return home.root / "inbox" / name, home.root / "quarantine" / name


def names(home: SiteDirectory) -> tuple[str, ...]:
    """All projects that have not ended, sorted."""
    try:
        found = sorted(os.listdir(home.project_keys))
    except FileNotFoundError:
        return ()
    named = (name for name in found if NAME.fullmatch(name) and not _ended(home, name))
    return tuple(name for name in named if (_folder(home, name) / "key").exists())


def create(home: SiteDirectory, name: str) -> None:
    """A new project with a fresh key, durable when this returns.

    Raises:
        ProjectError: an unfit name, one that is taken, or one of a project that has ended: no name is used twice.
    """
    if _ended(home, name):
        raise ProjectError(f"the project {name} has ended, and its name is not used again: choose another")
    if _database(home, name).exists() and not (_folder(home, name) / "key").exists():
        raise ProjectError(f"the key of the project {name} is missing: restore keys/projects/{name}")
    home.project_keys.mkdir(mode=0o700, exist_ok=True)
    try:
        new_key(_folder(home, name))
    except FileExistsError:
        raise ProjectError(f"there is a project {name} already") from None


def keys(home: SiteDirectory, name: str) -> ProjectKeys:
    """What a project works with.

    Raises:
        ProjectError: there is no such project, or it has ended.
        KeyFileError: its key is open to others, or cannot be read.
    """
    if _ended(home, name):
        raise ProjectError(f"the project {name} has ended, and its data are destroyed")
    if not (_folder(home, name) / "key").exists():
        raise ProjectError(f"there is no project {name}: `lazaret-agent project create {name}` makes it")
    key = read_private(_folder(home, name) / "key")
    if len(key) != _KEY_BYTES:
        raise ProjectError(f"keys/projects/{name}/key is damaged: restore it")
    return ProjectKeys(*(derive(key, f"project/{purpose}") for purpose in ("vault", "pseudonym", "rooms")))


def open_vault(home: SiteDirectory, name: str = MAIN) -> Vault:
    """A project's vault, after whatever an earlier process left undone: endings, deletions.

    Raises:
        ProjectError: there is no such project, or it has ended.
        OlderVaultError: an older program made it: see :func:`upgrade`.
        VaultError: a key does not open its file, or the disk failed.
    """
    finish(home)
    with _opened(home) as notes:
        if _older_records(notes):
            raise OlderVaultError
        _purge(home, notes)
    if name == MAIN:
        _make_main(home)
    return _open(home, name)


def _open(home: SiteDirectory, name: str, *, upgrading: bool = False) -> Vault:
    key = keys(home, name).vault
    _database(home, name).parent.mkdir(mode=0o700, exist_ok=True)
    notes = _notes(home, upgrading=upgrading)
    try:
        return Vault(notes, _database(home, name), key, upgrading=upgrading)
    except BaseException:
        notes.close()
        raise


def _notes(home: SiteDirectory, *, upgrading: bool = False) -> SiteDatabase:
    return SiteDatabase(home.root / "vault.db", home.secret("vault"), upgrading=upgrading)


@contextlib.contextmanager
def _opened(home: SiteDirectory) -> Iterator[SiteDatabase]:
    notes = _notes(home)
    try:
        yield notes
    finally:
        notes.close()


def upgrade(home: SiteDirectory) -> None:
    """Bring the vault of an older program into this one's form; interrupted, it goes on when it is said again.

    Raises:
        VaultError: a newer program made it, a key does not open it, or the disk failed.
    """
    finish(home)
    notes = _notes(home, upgrading=True)
    try:
        for name in names(home):
            vault = _open(home, name, upgrading=True)
            try:
                vault.name_by_patient()
            finally:
                vault.close()
        _migrate(home, notes)
        notes.finish_upgrade()
    finally:
        notes.close()


def _make_main(home: SiteDirectory) -> None:
    """Homes from before there were projects have no key for this one."""
    if not (_ended(home, MAIN) or (_folder(home, MAIN) / "key").exists()):
        create(home, MAIN)


def _older_records(notes: SiteDatabase) -> bool:
    return bool(notes.rows("SELECT 1 FROM sqlite_schema WHERE name = 'record'"))


def _migrate(home: SiteDirectory, notes: SiteDatabase) -> None:
    """Records of format 1 lie in ``vault.db``: they come into the project main, and then leave there at once.

    Interrupted, it begins again, and what came already is passed over; until all have come, none is removed.
    """
    if not _older_records(notes):
        return
    _make_main(home)
    if _ended(home, MAIN):
        raise VaultError("vault.db holds records of an older version, and the project main has ended: remove them")
    vault = _open(home, MAIN, upgrading=True)
    try:
        gone, batch = notes.opted_out(), list[Record]()
        for name, digest, box in notes.stream("SELECT name, digest, body FROM record ORDER BY name"):
            record = _older(name, digest, notes.unseal(name, box))
            if record.pseudonym not in gone:
                batch.append(record)
            if len(batch) >= _BATCH:
                vault.keep_all(batch)
                batch.clear()
        vault.keep_all(batch)
    finally:
        vault.close()
    with notes.transaction():
        notes.rows("DROP TABLE record")
    notes.truncate()  # what is free is overwritten in the file before the file gets shorter
    notes.rows("VACUUM")
    notes.truncate()


def _older(name: str, digest: str, plain: bytes) -> Record:
    """A record as format 1 wrote it, which said neither study nor series.

    Its name is of its UID alone, so that it gets the patient's own.
    """
    size = int.from_bytes(plain[:4], "big")
    header, rest, pixels = json.loads(plain[4 : 4 + size]), plain[4 + size :], None
    if header["shape"] is not None:
        count = header["shape"][0] * header["shape"][1]
        pixels = np.frombuffer(rest, "<f4", count).reshape(header["shape"]).astype(np.float32)
        rest = rest[4 * count :]
    said = (header["modality"], header["kind"], header["label"])
    person, uids = header["pseudonym"], (_UNKNOWN, _UNKNOWN, name)
    named, study = keyed_name(person, name), keyed_name(person, _UNKNOWN)
    return Record(named, digest, person, study, *said, pixels, rest, header["face"], uids=uids, sent=name)


# -- a patient's no


def opt_out(home: SiteDirectory, person: str) -> int:
    """A patient wants no part: nothing of it is kept, from now on and in no project, and all that was is deleted.

    Budget that was spent stays spent. Interrupted, it goes on with the next :func:`open_vault`.

    Args:
        home: the site.
        person: the patient's site-wide pseudonym.
    Returns:
        How many instances were deleted.
    Raises:
        ValueError: not a pseudonym.
        VaultError: the patient is on the list, and not yet deleted everywhere: the text says what to do.
    """
    finish(home)
    with _opened(home) as notes:
        notes.opt_out(person)
        return _purge(home, notes)


def opt_in(home: SiteDirectory, person: str) -> None:
    """Withdraw an opt-out: data that arrives from now on may be kept. Deleted data does not come back.

    Raises:
        VaultError: the deletion is not complete yet, and the text says what to do.
    """
    with _opened(home) as notes:
        _purge(home, notes)
        notes.opt_in(person)


def opted_out(home: SiteDirectory) -> frozenset[str]:
    """The pseudonyms on the list. They stay inside the site."""
    with _opened(home) as notes:
        return notes.opted_out()


def kept_of(home: SiteDirectory, persons: Set[str]) -> int:
    """How many releases that are made and kept have one of them in: deleted at the next start
    (agent.release.recovery).
    """
    with _opened(home) as notes:
        kept, record = notes.note("pending") or {}, notes.note("releases") or []
    behind = {name: set(one.get("persons", ())) for name, one in kept.items()}
    for one in record:
        if one["release"] in behind:
            behind[one["release"]].update(*one["clusters"], *one.get("again", []), one.get("persons", []))
    return sum(not own.isdisjoint(persons) for own in behind.values())


def _purge(home: SiteDirectory, notes: SiteDatabase) -> int:
    persons = notes.purging()
    if not persons:
        return 0
    gone = 0
    for name in names(home):
        vault = _open(home, name)
        try:
            _retire(vault, persons)
            _give_up(vault, persons)
            vault.clear_round_steps()
            vault.clear_job_outputs()
            forget_patients(vault, persons)
            gone += vault.purge(persons)
        finally:
            vault.close()
    notes.purged(persons)
    return gone


def _retire(vault: Vault, persons: Set[str]) -> None:
    """Forget the images of every released cluster that one of them is behind, whole: see
    ``agent.release.history``.
    """
    for one in vault.note("releases") or []:
        for index, members in enumerate(one["clusters"]):
            place = place_of(one["release"], index)
            if not persons.isdisjoint(members) and vault.project_note(place) is not None:
                vault.write_project_note(place, None)


def _give_up(vault: Vault, persons: Set[str]) -> None:
    """Forget a training that one of them is in: its grant is closed at the next start, see
    ``agent.release.resumable``.
    """
    told = vault.project_note("unfinished")
    if told is None or persons.isdisjoint(told.get("persons", ())):
        return
    for place in told.get("places", ()):
        vault.place(place).clear()
    vault.write_project_note("unfinished", None)
    if (vault.note("unfinished") or {}).get("grant") == told["grant"]:
        vault.write_note("unfinished", None)


# -- an end


def end(home: SiteDirectory, name: str) -> None:
    """Destroy a project's key and then all that it sealed. For good: the name is not used again.

    Released budget, and who was released, stay in vault.db. Interrupted, it goes on with :func:`finish`.

    Raises:
        ProjectError: there is no such project, it has ended, or another process works with it; nothing was destroyed.
    """
    keys(home, name)
    _alone(_database(home, name), name)
    write_private(_folder(home, name) / "ended", b"")
    flush_directory(_folder(home, name))
    _destroy(home, name)


def finish(home: SiteDirectory) -> None:
    """Destroy what is left of every project whose end an earlier process had begun."""
    for name in os.listdir(home.project_keys) if home.project_keys.exists() else ():
        if NAME.fullmatch(name) and _ended(home, name):
            _destroy(home, name)


def _alone(path: Path, name: str) -> None:
    """Only the last connection can leave SQLite's write-ahead log, so this fails while another process has one."""
    if not path.exists():
        return
    with faults():
        database = apsw.Connection(str(path))
    try:
        database.execute("PRAGMA journal_mode=DELETE").fetchall()
    except apsw.BusyError:
        raise ProjectError(
            f"another process uses the project {name}: stop it first; the project was not ended"
        ) from None
    except apsw.Error:
        pass  # damaged: it goes all the same
    finally:
        database.close()


def _destroy(home: SiteDirectory, name: str) -> None:
    """The key first: from there on the rest is noise."""
    for path in (*_folder(home, name).glob("key*.part"), _folder(home, name) / "key"):
        with contextlib.suppress(FileNotFoundError):
            _overwrite(path)
            path.unlink()
            flush_directory(_folder(home, name))
    database = _database(home, name)
    for suffix in ("-wal", "-shm", "-journal", ""):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    for room in project_folders(home, name):
        if room.is_symlink():
            room.unlink()
        elif room.exists():
            shutil.rmtree(room)
    for place in (database.parent, home.root):
        if place.exists():
            flush_directory(place)


def _overwrite(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        os.write(descriptor, secrets.token_bytes(os.fstat(descriptor).st_size or _KEY_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
