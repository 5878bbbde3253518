"""The site's vault: everything that derives from a patient, encrypted at rest, in one SQLite file.

AES-256-GCM for every row, the row's name as associated data; names are keyed HMACs. What a killed process leaves
behind (the database, its write-ahead log) is ciphertext. SQLCipher was rejected: no wheel is kept for it, and
row encryption with ``cryptography`` needs no second cryptographic library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apsw
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agent.deidentify.record import Record
from agent.nouns import Cohort, Image, Patient

_SCHEMA = """
CREATE TABLE IF NOT EXISTS record(name TEXT PRIMARY KEY, digest TEXT NOT NULL UNIQUE, body BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS note(name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""


class VaultError(RuntimeError):
    """The vault's key is another one, or a row was changed."""


class Vault:
    """Encrypted records (one per instance) and notes (private books of the site, such as who was released)."""

    def __init__(self, path: Path, key: bytes) -> None:
        """Open or create.

        Raises:
            VaultError: the key does not open this vault.
        """
        self._aead = AESGCM(key)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._db = apsw.Connection(str(path))
        self._db.execute("PRAGMA journal_mode=WAL").fetchall()
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(_SCHEMA)
        if self.note("opened") is None:
            self.write_note("opened", {"format": 1})

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def _seal(self, name: str, body: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._aead.encrypt(nonce, body, name.encode())

    def _open(self, name: str, body: bytes) -> bytes:
        try:
            return self._aead.decrypt(body[:12], body[12:], name.encode())
        except InvalidTag:
            raise VaultError("the vault's key is another one, or a row was changed") from None

    def has(self, key: str) -> bool:
        """Is there a record of that name, or read from a file of that keyed digest?"""
        query = "SELECT 1 FROM record WHERE name = ? OR digest = ?"
        return bool(self._db.execute(query, (key, key)).fetchall())

    def keep(self, record: Record) -> None:
        """Store one ingested instance, durable when this returns."""
        pixels = b"" if record.pixels is None else record.pixels.astype("<f4").tobytes()
        header = json.dumps(
            {
                "pseudonym": record.pseudonym,
                "modality": record.modality,
                "kind": record.kind,
                "label": record.label,
                "face": record.face,
                "shape": None if record.pixels is None else list(record.pixels.shape),
            }
        ).encode()
        body = len(header).to_bytes(4, "big") + header + pixels + record.payload
        row = (record.name, record.digest, self._seal(record.name, body))
        self._db.execute("INSERT INTO record VALUES(?, ?, ?)", row)

    def _read(self, name: str, body: bytes) -> tuple[dict[str, Any], bytes]:
        plain = self._open(name, body)
        size = int.from_bytes(plain[:4], "big")
        return json.loads(plain[4 : 4 + size]), plain[4 + size :]

    def _images(self, modality: str, shape: tuple[int, int]) -> Iterator[tuple[str, Image]]:
        for name, body in self._db.execute("SELECT name, body FROM record ORDER BY name"):
            header, rest = self._read(name, body)
            if header["modality"] != modality or not header["label"] or header["face"]:
                continue
            if header["shape"] == list(shape):
                pixels = np.frombuffer(rest, "<f4", count=shape[0] * shape[1]).reshape(shape)
                yield header["pseudonym"], Image(pixels.astype(np.float32), header["label"])

    def cohort(self, modality: str, shape: tuple[int, int], without: Iterable[str] = ()) -> Cohort:
        """The patients with labelled 2-D images of one modality and shape. The rule is public configuration.

        Args:
            modality: DICOM Modality.
            shape: (h, w) of the images that count.
            without: pseudonyms that may not take part (released as often as the policy admits).
        """
        excluded = set(without)
        patients: dict[str, list[Image]] = {}
        for pseudonym, image in self._images(modality, shape):
            if pseudonym not in excluded:
                patients.setdefault(pseudonym, []).append(image)
        return Cohort(tuple(Patient(p, tuple(images)) for p, images in sorted(patients.items())))

    def note(self, name: str) -> Any:
        """A private note (JSON value), or None."""
        for (body,) in self._db.execute("SELECT body FROM note WHERE name = ?", (name,)):
            return json.loads(self._open(f"note:{name}", body))
        return None

    def write_note(self, name: str, value: Any) -> None:
        """Store a private note, durable when this returns."""
        sealed = self._seal(f"note:{name}", json.dumps(value).encode())
        self._db.execute("INSERT OR REPLACE INTO note VALUES(?, ?)", (name, sealed))

    def patients(self) -> int:
        """How many patients there are: for the site's own checks, never for a message or a log that leaves."""
        rows = self._db.execute("SELECT name, body FROM record")
        return len({self._read(name, body)[0]["pseudonym"] for name, body in rows})
