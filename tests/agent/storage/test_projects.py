"""A project has its own key, its own records and an end; a patient's no holds over all of them."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agent.deidentify.errors import FileRejectedError
from agent.deidentify.record import Record, keyed_name
from agent.microaggregation.released_clusters import place_of
from agent.storage import projects, site_directory
from agent.storage.encrypted_sqlite import OlderVaultError, VaultError
from agent.storage.projects import ProjectError
from agent.storage.quarantine import Quarantine
from agent.storage.site_directory import SiteDirectory
from agent.storage.spool import ReceivedFile, Spool
from agent.storage.vault import ROUND_STEPS, Vault
from protos.identity.certificates import KeyFileError
from tests.support.ledger_world import policy

SHAPE = (8, 8)
SITE = """
site = "site-a"
coordinator = "127.0.0.1:1"
input = "in"
modalities = ["OT"]
secondary_capture_modalities = []
public_components = []
"""


@pytest.fixture
def home(tmp_path: Path) -> SiteDirectory:
    return site_directory.create(tmp_path / "home", SITE, policy())


def record(number: int, person: int = 1) -> Record:
    pixels = np.full(SHAPE, 1 / (1 + number), np.float32)
    pixels[0] = 0  # a picture of one value is nobody's
    name, who = f"{number:032x}", f"{person:032x}"
    payload = b"PAYLOAD-IN-CLEAR" * 100
    return Record(name, f"{number + 2**90:032x}", who, who, "OT", "image", "7", pixels, payload, False, who)


def who(person: int) -> str:
    return f"{person:032x}"


def stock(home: SiteDirectory, name: str, *records: Record) -> None:
    with contextlib.closing(projects.open_vault(home, name)) as vault:
        vault.keep_all(records)


def kept(home: SiteDirectory, name: str = "main") -> set[str]:
    with contextlib.closing(projects.open_vault(home, name)) as vault:
        return {head.person for head in vault.heads()}


def everything(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file())


# -- keys


def test_a_site_begins_with_the_project_main(home: SiteDirectory) -> None:
    assert projects.names(home) == ("main",)
    assert kept(home) == set()
    key = home.keys / "projects" / "main" / "key"
    modes = [oct(path.stat().st_mode & 0o777) for path in (key, key.parent, key.parent.parent)]
    assert modes == ["0o600", "0o700", "0o700"]
    assert os.listdir(key.parent) == ["key"]


def hkdf_sha256(key: bytes, info: bytes) -> bytes:
    """RFC 5869 section 2, for one block and no salt."""
    extracted = hmac.digest(bytes(32), key, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def test_each_project_has_keys_of_its_own_for_each_purpose(home: SiteDirectory) -> None:
    projects.create(home, "lung")
    main, lung = projects.keys(home, "main"), projects.keys(home, "lung")
    assert len({main.vault, main.pseudonym, main.rooms, lung.vault, lung.pseudonym, lung.rooms}) == 6
    raw = (home.keys / "projects" / "lung" / "key").read_bytes()
    assert len(raw) == 32
    assert lung.vault == hkdf_sha256(raw, b"lazaret/project/vault")
    assert lung.pseudonym == hkdf_sha256(raw, b"lazaret/project/pseudonym")
    assert raw.hex() not in repr(lung)
    assert lung.vault.hex() not in repr(lung)
    assert repr(lung.vault) not in repr(lung)


@pytest.mark.parametrize("name", ["", "..", "../x", "A", "a b", "1a", "-a", "x" * 32, "a/b", "a\n", "ä"])
def test_a_project_has_a_plain_name(home: SiteDirectory, name: str) -> None:
    for act in (projects.create, projects.keys, projects.end, projects.open_vault, projects.project_folders):
        with pytest.raises(ProjectError, match="short name"):
            act(home, name)
    assert projects.names(home) == ("main",)


def test_a_key_is_never_replaced_and_never_made_for_records_that_lost_theirs(home: SiteDirectory) -> None:
    stock(home, "main", record(1))
    key = home.keys / "projects" / "main" / "key"
    before = key.read_bytes()
    with pytest.raises(ProjectError, match="already"):
        projects.create(home, "main")
    assert key.read_bytes() == before
    key.unlink()
    with pytest.raises(ProjectError, match="restore"):
        projects.open_vault(home)
    assert not key.exists()


def test_a_project_that_was_never_made_is_not_opened(home: SiteDirectory) -> None:
    with pytest.raises(ProjectError, match="no project lung"):
        projects.open_vault(home, "lung")
    assert not (home.root / "projects" / "lung.db").exists()


def test_a_key_that_others_can_read_or_that_is_cut_stops_everything(home: SiteDirectory) -> None:
    key = home.keys / "projects" / "main" / "key"
    key.chmod(0o640)
    with pytest.raises(KeyFileError):
        projects.open_vault(home)
    key.chmod(0o600)
    key.write_bytes(bytes(31))
    with pytest.raises(ProjectError, match="damaged"):
        projects.open_vault(home)


def test_projects_hold_different_records_and_share_the_sites_books(home: SiteDirectory) -> None:
    projects.create(home, "lung")
    stock(home, "main", record(1, 1))
    stock(home, "lung", record(1, 1), record(2, 2))
    assert (kept(home), kept(home, "lung")) == ({who(1)}, {who(1), who(2)})
    with contextlib.closing(projects.open_vault(home, "lung")) as vault:
        vault.write_note("releases", [{"release": "r", "clusters": [["someone"]]}])
    with contextlib.closing(projects.open_vault(home)) as vault:
        assert vault.note("releases") == [{"release": "r", "clusters": [["someone"]]}]
    (home.root / "projects" / "main.db").write_bytes((home.root / "projects" / "lung.db").read_bytes())
    with pytest.raises(VaultError, match="key is wrong"):
        projects.open_vault(home)


# -- the end


def full(home: SiteDirectory) -> None:
    """A project with records, an arrival that waits, and one that was refused; and another project beside it."""
    projects.create(home, "lung")
    stock(home, "lung", record(1), record(2))
    stock(home, "main", record(3, 3))
    inbox, quarantine = projects.project_folders(home, "lung")
    key = projects.keys(home, "lung").rooms
    arrival = ReceivedFile("stow", "PACS", b"PAYLOAD-IN-CLEAR")
    Spool(inbox, key).put(arrival)
    Quarantine(quarantine, key).refuse("a" * 32, "truncated", arrival)


def leftovers(home: SiteDirectory) -> list[str]:
    """What on the disk still has to do with the project."""
    mark = home.keys / "projects" / "lung" / "ended"
    found = [p for p in home.root.rglob("*") if "lung" in str(p.relative_to(home.root)) and p.is_file()]
    return [str(path) for path in found if path != mark]


def test_an_ended_project_leaves_neither_key_nor_text_and_a_stolen_copy_is_noise(home: SiteDirectory) -> None:
    full(home)
    file = home.keys / "projects" / "lung" / "key"
    key, keys = file.read_bytes(), projects.keys(home, "lung")
    stolen = (home.root / "projects" / "lung.db").read_bytes()
    with file.open("rb") as held:  # the very bytes on the disk, whatever becomes of the name
        projects.end(home, "lung")
        assert key not in held.read()
    raw = everything(home.root)
    for secret in (key, keys.vault, keys.pseudonym, keys.rooms, b"PAYLOAD-IN-CLEAR", who(1).encode()):
        assert secret not in raw
    assert leftovers(home) == []
    assert projects.names(home) == ("main",)
    assert kept(home) == {who(3)}
    boxes = sqlite_boxes(stolen, home.root.parent / "stolen.db")
    assert boxes
    left = [p.read_bytes() for p in home.root.rglob("*") if p.is_file() and p.stat().st_size == 32]
    assert home.secret("vault") in left
    for candidate in left:
        for name, box in boxes:
            with pytest.raises(Exception):  # noqa: B017, PT011 - InvalidTag, and nothing opens it
                AESGCM(candidate).decrypt(box[:12], box[12:], f"head:{name}".encode())


def sqlite_boxes(raw: bytes, place: Path) -> list[tuple[str, bytes]]:
    place.write_bytes(raw)
    with contextlib.closing(sqlite3.connect(place)) as database:
        return database.execute("SELECT name, head FROM instance").fetchall()


def test_an_end_is_for_good(home: SiteDirectory) -> None:
    full(home)
    projects.end(home, "lung")
    for act in (projects.create, projects.keys, projects.open_vault, projects.end):
        with pytest.raises(ProjectError, match="ended"):
            act(home, "lung")
    projects.end(home, "main")
    with pytest.raises(ProjectError, match="ended"):
        projects.open_vault(home)
    assert projects.names(home) == ()


def test_who_was_released_and_who_opted_out_outlive_the_project(home: SiteDirectory) -> None:
    full(home)
    with contextlib.closing(projects.open_vault(home, "lung")) as vault:
        vault.write_note("releases", [{"release": "r", "clusters": [["someone"]]}])
    projects.opt_out(home, who(7))
    projects.end(home, "lung")
    with contextlib.closing(projects.open_vault(home)) as vault:
        assert vault.note("releases") == [{"release": "r", "clusters": [["someone"]]}]
        assert vault.opted_out() == {who(7)}


def test_a_project_that_another_process_works_with_is_not_ended(home: SiteDirectory) -> None:
    full(home)
    with contextlib.closing(projects.open_vault(home, "lung")) as vault:
        vault._file.rows("PRAGMA busy_timeout=1")
        with pytest.raises(ProjectError, match="another process"):
            projects.end(home, "lung")
        assert vault.patients() == 1
    assert kept(home, "lung") == {who(1)}
    projects.end(home, "lung")


class Gone(BaseException):
    """The process is gone: no handler of ours may know this."""


def killed_at(turn: int, names: tuple[str, ...], act: Callable[[], None]) -> bool:
    """Do something in another process, which ends without a farewell at the n-th call of one of these; did it?"""
    child = os.fork()
    if not child:
        left = [turn]

        def breaking(call: Callable[..., Any]) -> Callable[..., Any]:
            def instead(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return call(*arguments, **options)

            return instead

        for name in names:
            setattr(os, name, breaking(getattr(os, name)))
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    return bool(status)


def test_an_end_that_is_interrupted_anywhere_is_finished_by_the_next_start(tmp_path: Path) -> None:
    turn, killed, begun = 0, True, []
    while killed:
        home = site_directory.create(tmp_path / str(turn), SITE, policy())
        full(home)
        key = (home.keys / "projects" / "lung" / "key").read_bytes()
        calls = ("fsync", "unlink", "rmdir", "write", "open")
        killed = killed_at(turn, calls, lambda home=home: projects.end(home, "lung"))  # type: ignore[misc]
        begun.append((home.keys / "projects" / "lung" / "ended").exists())
        assert kept(home) == {who(3)}  # a start
        if begun[-1]:
            assert key not in everything(home.root)
            assert leftovers(home) == []
            with pytest.raises(ProjectError, match="ended"):
                projects.open_vault(home, "lung")
        else:
            assert kept(home, "lung") == {who(1)}
        turn += 1
    assert begun == sorted(begun)
    assert sum(begun) > 10, "it was killed at many points after the end was decided"
    assert not all(begun)


def test_a_creation_that_is_interrupted_anywhere_can_be_done_again(home: SiteDirectory) -> None:
    turn, killed = 0, True
    while killed:
        name = f"p{turn}"
        calls = ("fsync", "link", "unlink", "open", "mkdir")
        killed = killed_at(turn, calls, lambda name=name: projects.create(home, name))  # type: ignore[misc]
        if name not in projects.names(home):
            projects.create(home, name)
        assert kept(home, name) == set()
        projects.end(home, name)
        assert os.listdir(home.keys / "projects" / name) == ["ended"]
        turn += 1
    assert turn > 5


# -- a patient's no


def test_a_patient_who_opts_out_is_deleted_from_every_project_and_kept_in_none(home: SiteDirectory) -> None:
    projects.create(home, "lung")
    stock(home, "main", record(1, 1), record(2, 2))
    stock(home, "lung", record(1, 1), record(3, 1), record(4, 4))
    assert projects.opt_out(home, who(1)) == 3
    assert projects.opted_out(home) == {who(1)}
    assert (kept(home), kept(home, "lung")) == ({who(2)}, {who(4)})
    for name in ("main", "lung"):
        with pytest.raises(FileRejectedError, match="opted_out"):
            stock(home, name, record(9, 1))
    projects.create(home, "later")
    with pytest.raises(FileRejectedError, match="opted_out"):
        stock(home, "later", record(9, 1))
    assert projects.opt_out(home, who(1)) == 0


def test_an_opt_out_forgets_the_pictures_of_the_patients_clusters_at_once_and_in_every_project(
    home: SiteDirectory,
) -> None:
    """P5, P15: nothing made of a patient is shown again after a no, though the patient says yes later."""
    projects.create(home, "lung")
    record_of = [{"release": "r", "clusters": [[who(1), who(2)], [who(3), who(4)]]}]
    for name in ("main", "lung"):
        with contextlib.closing(projects.open_vault(home, name)) as vault:
            vault.write_note("releases", record_of)
            for index in (0, 1):
                vault.write_project_note(place_of("r", index), {"pictures": index})
    projects.opt_out(home, who(1))
    projects.opt_in(home, who(1))
    for name in ("main", "lung"):
        with contextlib.closing(projects.open_vault(home, name)) as vault:
            assert vault.project_note(place_of("r", 0)) is None
            assert vault.project_note(place_of("r", 1)) == {"pictures": 1}
            assert vault.note("releases") == record_of, "and its other members enter no other cluster"


def test_an_opt_out_of_anybody_deletes_the_steps_of_a_round_that_is_not_sealed(home: SiteDirectory) -> None:
    """P15: they name no patient, so they go whoever it is; the round begins anew."""
    projects.create(home, "lung")
    for name in ("main", "lung"):
        with contextlib.closing(projects.open_vault(home, name)) as vault:
            vault.place(ROUND_STEPS).write(b"of all patients")
    projects.opt_out(home, who(1))
    for name in ("main", "lung"):
        with contextlib.closing(projects.open_vault(home, name)) as vault:
            assert vault.place(ROUND_STEPS).read() is None


def test_who_opts_in_again_finds_nothing_of_before(home: SiteDirectory) -> None:
    stock(home, "main", record(1, 1))
    with contextlib.closing(projects.open_vault(home)) as vault:
        vault.write_note("releases", [{"release": "r", "clusters": [[who(1)]]}])
    projects.opt_out(home, who(1))
    projects.opt_in(home, who(1))
    assert projects.opted_out(home) == frozenset()
    assert kept(home) == set()
    stock(home, "main", record(1, 1))
    with contextlib.closing(projects.open_vault(home)) as vault:
        assert vault.note("releases") == [{"release": "r", "clusters": [[who(1)]]}], "released once, ever"


def test_a_deletion_that_is_interrupted_is_finished_by_the_next_start(
    home: SiteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    projects.create(home, "lung")
    for name in ("main", "lung"):
        stock(home, name, record(1, 1), record(2, 2))
    purge, calls = Vault.purge, [0]

    def gone(self: Vault, persons: Any) -> int:
        calls[0] += 1
        if calls[0] > 1:
            raise Gone
        return purge(self, persons)

    with monkeypatch.context() as patch:
        patch.setattr(Vault, "purge", gone)
        with pytest.raises(Gone):
            projects.opt_out(home, who(1))
    assert projects.opted_out(home) == {who(1)}
    assert kept(home, "main") == kept(home, "lung") == {who(2)}


def test_only_a_pseudonym_can_opt_out(home: SiteDirectory) -> None:
    with pytest.raises(ValueError, match="32 hex"):
        projects.opt_out(home, "Mustermann^Erika")
    assert projects.opted_out(home) == frozenset()


# -- homes from before there were projects


def format_1(home: SiteDirectory, *records: Record) -> list[bytes]:
    """``vault.db`` as it was written before: one box for a record, under the site's key. Returns the boxes."""
    aead, boxes = AESGCM(home.secret("vault")), []
    with contextlib.closing(sqlite3.connect(home.root / "vault.db")) as old:
        old.execute(
            "CREATE TABLE record(name TEXT PRIMARY KEY, digest TEXT NOT NULL UNIQUE, body BLOB NOT NULL) STRICT"
        )
        old.execute("CREATE TABLE note(name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID")
        for r in records:
            shape = None if r.pixels is None else list(r.pixels.shape)
            told = {"pseudonym": r.pseudonym, "modality": r.modality, "kind": r.kind, "label": r.label}
            header = json.dumps({**told, "face": r.face, "shape": shape}).encode()
            pixels = b"" if r.pixels is None else r.pixels.tobytes()
            body = len(header).to_bytes(4, "big") + header + pixels + r.payload
            nonce = os.urandom(12)
            boxes.append(nonce + aead.encrypt(nonce, body, r.name.encode()))
            old.execute("INSERT INTO record VALUES(?, ?, ?)", (r.name, r.digest, boxes[-1]))
        nonce = os.urandom(12)
        note = nonce + aead.encrypt(nonce, b'[{"release": "r", "clusters": [["someone"]]}]', b"note:releases")
        old.execute("INSERT INTO note VALUES('releases', ?)", (note,))
        old.commit()
    (home.root / "vault.db").chmod(0o600)
    return boxes


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_older_home_comes_over_whole(
    home: SiteDirectory, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    (home.keys / "projects" / "main" / "key").unlink()  # such a home had none
    (home.keys / "projects" / "main").rmdir()
    (home.keys / "projects").rmdir()
    records = [record(n, n % 7) for n in range(600)]
    faced = Record("f" * 32, "e" * 32, who(3), "0" * 32, "MR", "volume", "", None, b"VOLUME", True)
    boxes = format_1(home, *records, faced)
    if interrupted:
        keep_all, calls = Vault.keep_all, [0]

        def gone(self: Vault, coming: Any) -> None:
            calls[0] += 1
            if calls[0] > 1:
                raise Gone
            keep_all(self, coming)

        with monkeypatch.context() as patch:
            patch.setattr(Vault, "keep_all", gone)
            with pytest.raises(Gone):
                projects.upgrade(home)
    with pytest.raises(OlderVaultError, match="upgrade"):  # begun or not: nothing is done with a half
        projects.open_vault(home)
    for _ in range(2):
        projects.upgrade(home)
        with contextlib.closing(projects.open_vault(home)) as vault:
            assert vault.note("releases") == [{"release": "r", "clusters": [["someone"]]}]
            assert {head.name for head in vault.heads()} == {
                keyed_name(r.pseudonym, r.name) for r in (*records, faced)
            }
            cohort = vault.cohort("OT", SHAPE).patients
            assert {p.pseudonym for p in cohort} == {who(n) for n in range(7)}
            assert [face.payload for study, _ in vault.faces() for face in vault.faces_of(study)] == [b"VOLUME"]
            for r in records[::50]:
                assert vault.payload(keyed_name(r.pseudonym, r.name)) == r.payload
                assert vault.has(r.digest)
            (first,) = (p for p in cohort if p.pseudonym == who(1))
            shown = sorted((image.pixels[1, 0] for image in first.images), reverse=True)
            assert np.allclose(shown, [1 / (1 + n) for n in range(1, 600, 7)], rtol=0, atol=0.5 / 65535)
    raw = everything(home.root)
    assert not any(box[:64] in raw for box in boxes), "nothing of the old boxes is left under the site's key"
    assert (home.root / "vault.db").stat().st_size < 200_000 < sum(map(len, boxes)), "the books are small again"


def test_an_opted_out_patient_does_not_come_over_from_an_older_file(home: SiteDirectory) -> None:
    projects.opt_out(home, who(1))
    (home.root / "vault.db").rename(home.root / "books.db")
    format_1(home, record(1, 1), record(2, 2))
    with contextlib.closing(sqlite3.connect(home.root / "vault.db")) as old:  # an older program was started meanwhile
        old.execute("ATTACH ? AS books", (str(home.root / "books.db"),))
        old.execute("INSERT OR IGNORE INTO main.note SELECT * FROM books.note")
        old.commit()
    (home.root / "books.db").unlink()
    projects.upgrade(home)
    assert kept(home) == {who(2)}
