"""The site's vault: everything that derives from a patient, encrypted at rest.

Two SQLite files (:mod:`agent.storage.encrypted_sqlite`). ``vault.db``, under the site's key, holds the records that
outlive every project (:mod:`agent.storage.site_database`). ``projects/NAME.db``, under the project's key, holds its
records; without that key it is noise. An instance is three boxes: what it is, its pixels, its file; to select opens
the first ones only.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from agent.deidentify.errors import FileRejectedError
from agent.deidentify.manifest import InstanceChange
from agent.deidentify.ps315.action_trace import AttributeAction
from agent.deidentify.ps315.options import Pixels
from agent.deidentify.record import NO_SERIES, Record, keyed_name
from agent.domain import Cohort, Image, Patient, Selection, Split
from agent.storage.encrypted_sqlite import EncryptedCheckpointStore, EncryptedDatabase, VaultError, derive
from agent.storage.equal_patients import EqualPatients, group_equal_patients, left_out
from agent.storage.instance_index import (
    InstanceRecord,
    SeriesTally,
    StateCount,
    choose,
    counts,
    decode,
    head_of,
    part_of,
)
from agent.storage.pixel_codec import packed, selection_view
from agent.storage.site_database import SiteDatabase
from agent.storage.withheld_faces import Withheld

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS instance(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL UNIQUE, head BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS body(id INTEGER PRIMARY KEY, pixels BLOB, payload BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS series(name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trace(name TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent(mark TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY(mark, id)) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sent_of ON sent(id);
"""
_MAX_LABEL: Final = 64
JOB_OUTPUTS: Final = "job/"  # begins the names of places with pages that jobs made
ROUND_STEPS: Final = "round/steps"  # the place of agent.mechanisms.federated.round_training


class Vault(Withheld):
    """The records of one project, and the site's notes."""

    def __init__(self, notes: SiteDatabase, path: Path, key: bytes, *, upgrading: bool = False) -> None:
        """Open or create a project's records.

        Args:
            notes: the site's; closed with this vault.
            path: of the project's database.
            key: the project's, 32 bytes: see :func:`agent.storage.projects.keys`.
            upgrading: take an older program's file, for :meth:`name_by_patient`.
        Raises:
            OlderVaultError: an older program made it.
            VaultError: the key does not open it, or the disk failed.
        """
        self._notes, self._path = notes, path
        super().__init__(EncryptedDatabase(path, key, _SCHEMA, upgrading=upgrading))
        self._split_key, self._table_key = derive(key, "vault/split"), derive(key, "vault/label-tables")
        self._claims: dict[str, str] = {}  # series that were let in and are not kept yet -> their studies

    def close(self) -> None:
        """Release the files."""
        self._file.close()
        self._notes.close()

    def note(self, name: str) -> Any:
        """A private note of the site (JSON value), or None."""
        return self._notes.note(name)

    def write_note(self, name: str, value: Any) -> None:
        """Store a private note of the site, durable when this returns."""
        self._notes.write_note(name, value)

    def change_note(self, name: str, change: Callable[[Any], Any]) -> None:
        """Store what ``change`` makes of a private note of the site; no other process writes it meanwhile."""
        self._notes.change_note(name, change)

    def project_note(self, name: str) -> Any:
        """A private note of the project, which ends with it (JSON value), or None."""
        return self._file.note(f"project/{name}")

    def write_project_note(self, name: str, value: Any) -> None:
        """Store a private note of the project, durable when this returns."""
        self._file.write_note(f"project/{name}", value)

    def place(self, name: str) -> EncryptedCheckpointStore:
        """Where something long is kept until it is done, such as a training; it ends with the project."""
        return EncryptedCheckpointStore(self._file, f"project/{name}")

    def places(self, start: str) -> tuple[str, ...]:
        """The names of the project's places that hold something and begin with ``start``, sorted."""
        return tuple(name.removeprefix("project/") for name in self._file.blobs(f"project/{start}"))

    def jobs_with_outputs(self) -> list[int]:
        """The numbers of the jobs that have pages here."""
        return [int(name.removeprefix(JOB_OUTPUTS).partition("/")[0]) for name in self.places(JOB_OUTPUTS)]

    def clear_round_steps(self) -> None:
        """Delete the steps of a federated round that is not sealed yet, whoever is in them: it begins anew."""
        if self.places(ROUND_STEPS):
            self.place(ROUND_STEPS).clear()

    def clear_job_outputs(self) -> None:
        """Delete the pages that jobs made of patients of the project."""
        for name in self._file.blobs(f"project/{JOB_OUTPUTS}"):
            self._file.write_blob(name, None)
        self._file.truncate()

    def site_place(self, name: str) -> EncryptedCheckpointStore:
        """Where something long of the site is kept until it is done, such as a release; it outlives the project."""
        return EncryptedCheckpointStore(self._notes, f"site/{name}")

    def site_places(self, start: str) -> tuple[str, ...]:
        """The names of the places of the site that hold something and begin with ``start``, sorted."""
        return tuple(name.removeprefix("site/") for name in self._notes.blobs(f"site/{start}"))

    def free_bytes(self) -> int:
        """What this user may still write on the disk that the vault is on."""
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize

    def opted_out(self) -> frozenset[str]:
        """Who has opted out, as of now."""
        return self._notes.opted_out()

    # -- coming in

    def has(self, key: str) -> bool:
        """Is there a record of that name, or read from a file of that keyed digest?"""
        return bool(self._file.rows("SELECT 1 FROM instance WHERE name = ? OR digest = ?", (key, key)))

    def was_sent(self, mark: str) -> bool:
        """Has a sender sent an instance that is kept? The mark is of both: see :attr:`Record.sent`."""
        return bool(self._file.rows("SELECT 1 FROM sent WHERE mark = ? LIMIT 1", (mark,)))

    def sent_again(self, marks: Iterable[tuple[str, str]]) -> None:
        """What is kept, by name or digest, came from these senders, too. Durable when this returns."""
        new = [(key, mark) for key, mark in marks if not self.was_sent(mark)]
        if not new:
            return
        query = "INSERT OR IGNORE INTO sent SELECT ?, id FROM instance WHERE name = ? OR digest = ?"
        with self._file.transaction():
            for key, mark in new:
                self._file.rows(query, (mark, key, key))

    def after(self, name: str) -> str | None:
        """SHA-256 of the file that is kept under a name; None when nothing is."""
        found = self._find(name)
        return found[1].after if found else None

    def kept(self, name: str) -> tuple[str, str] | None:
        """SHA-256 of the file that is kept under a name, and whose it is; None when nothing is."""
        found = self._find(name)
        return (found[1].after, found[1].person) if found else None

    def refusal(self, record: Record) -> str | None:
        """Why this record may not be kept: ``opted_out``, ``inconsistent_series`` or None.

        A patient's series belongs to one study. The first instance that contradicts this bars the whole series, by a
        note, until a person lifts it. The series is stored under a name keyed by its patient (:func:`keyed_name`), so
        another patient's file cannot affect it.
        """
        if record.pseudonym in self.opted_out():
            return "opted_out"
        if record.series == NO_SERIES:
            return None
        known = self._study_of(record.series) or self._claims.setdefault(record.series, record.study)
        if known != record.study:
            with self._file.transaction():
                self.bar({record.series})
            return "inconsistent_series"
        return None

    def _study_of(self, series: str) -> str | None:
        name = self._file.mac("series", series.encode())
        for (body,) in self._file.rows("SELECT body FROM series WHERE name = ?", (name,)):
            return str(json.loads(self._file.unseal(f"series:{name}", body))[2])
        return None

    def _write_series(self, series: str, person: str, study: str) -> None:
        name = self._file.mac("series", series.encode())
        body = self._file.seal(f"series:{name}", json.dumps([series, person, study]).encode())
        self._file.rows("INSERT OR REPLACE INTO series VALUES(?, ?)", (name, body))

    def keep(self, record: Record) -> None:
        """Store one instance: :meth:`keep_all` of one."""
        self.keep_all((record,))

    def keep_all(self, records: Iterable[Record]) -> None:
        """Store instances, all or none, durable when this returns. What is kept already, unchanged, is passed over.

        Raises:
            FileRejectedError: ``opted_out``, ``inconsistent_series`` (the series is barred from now on) or
                ``conflicting_instance``; nothing was kept. See :meth:`refusal`, which says so beforehand.
            VaultError: a full or failing disk; nothing was kept.
        """
        coming = list(records)
        contradicted: set[str] = set()
        try:
            with self._file.transaction():
                out = self.opted_out()  # read under the lock: who opts out later is deleted after this
                for record in coming:
                    if record.pseudonym in out:
                        raise FileRejectedError("opted_out")
                    self._put(record, contradicted)
        except FileRejectedError:
            if contradicted:
                with self._file.transaction():
                    self.bar(contradicted)
            raise
        for record in coming:
            self._claims.pop(record.series, None)

    def _put(self, record: Record, contradicted: set[str]) -> None:
        if self._known(record):
            return
        if record.series != NO_SERIES:
            study = self._study_of(record.series)
            if study is None:
                self._write_series(record.series, record.pseudonym, record.study)
            elif study != record.study:
                contradicted.add(record.series)
                raise FileRejectedError("inconsistent_series")
        file, name = self._file, record.name
        raw = None if record.pixels is None else packed(record.pixels)
        picture = "" if raw is None or record.pixels is None else self._picture(raw, record.pixels.shape)
        head = head_of(record, self._put_trace(record.trace), picture).encode()
        row = (name, record.digest, file.seal(f"head:{name}", head))
        ((key,),) = file.rows("INSERT INTO instance(name, digest, head) VALUES(?, ?, ?) RETURNING id", row)
        pixels = None if raw is None else file.seal(f"pixels:{name}", raw)
        file.rows("INSERT INTO body VALUES(?, ?, ?)", (key, pixels, file.seal(f"payload:{name}", record.payload)))
        if record.sent:
            file.rows("INSERT INTO sent VALUES(?, ?)", (record.sent, key))

    def _known(self, record: Record) -> bool:
        before = self.after(record.name)
        if before is None and not self.has(record.digest):
            return False
        if before != record.after:
            raise FileRejectedError("conflicting_instance")
        return True

    def _put_trace(self, trace: tuple[AttributeAction, ...]) -> str:
        """The name of a trace, stored once for all the instances that share it."""
        if not trace:
            return ""
        plain = json.dumps([[step.path, step.action, step.why] for step in trace]).encode()
        name = self._file.mac("trace", plain)
        if not self._file.rows("SELECT 1 FROM trace WHERE name = ?", (name,)):
            self._file.rows("INSERT INTO trace VALUES(?, ?)", (name, self._file.seal(f"trace:{name}", plain)))
        return name

    def _trace(self, name: str) -> tuple[AttributeAction, ...]:
        for (body,) in self._file.rows("SELECT body FROM trace WHERE name = ?", (name,)):
            return tuple(AttributeAction(*step) for step in json.loads(self._file.unseal(f"trace:{name}", body)))
        return ()

    def name_by_patient(self) -> None:
        """Bring a file of form 2 into this one's: there, studies, series and instances were named by UIDs alone.

        All or nothing; a file of this form stays as it is. Pixels and files stay encrypted as they are. Held-back
        data stays held back: its UID is not keyed by a patient, and applies to every file with that UID, until a
        person lifts it. Existing files count as sent by every sender, so no archive has to send all of them again.
        """
        with self._file.transaction():
            if self._file.upgraded():
                return
            last = 0
            while heads := self._file.rows(
                "SELECT id, name, head FROM instance WHERE id > ? ORDER BY id LIMIT 1000", (last,)
            ):
                for last, name, box in heads:
                    head = decode(self._file.unseal(f"head:{name}", box))
                    self._name_by_patient(last, head)
            self._file.rows("DELETE FROM series")
            looked_at = set(self._file.note("looked_at") or ())
            mine = set()
            for head in self.heads():
                if head.series != NO_SERIES:
                    mine.add((head.series, head.person, head.study))
                if head.uids and head.uids[0] in looked_at:
                    looked_at.add(head.study)
            for series, person, study in sorted(mine):
                self._write_series(series, person, study)
            self._file.write_note("looked_at", sorted(looked_at))
            self._file.finish_upgrade()

    def _name_by_patient(self, key: int, head: InstanceRecord) -> None:
        """One instance: other names in its head, and the digest of its image, for which its pixels are opened."""
        picture = ""
        if head.shape is not None:
            ((box,),) = self._file.rows("SELECT pixels FROM body WHERE id = ?", (key,))
            picture = self._picture(self._file.unseal(f"pixels:{head.name}", box), head.shape)
        new = replace(
            head,
            name=keyed_name(head.person, head.name),
            study=keyed_name(head.person, head.study),
            series=head.series if head.series == NO_SERIES else keyed_name(head.person, head.series),
            uids=(head.study, head.series, head.name),
            picture=picture,
            box=head.name,
        )
        sealed = self._file.seal(f"head:{new.name}", new.encode())
        self._file.rows("UPDATE instance SET name = ?, head = ? WHERE id = ?", (new.name, sealed, key))
        self._file.rows("INSERT OR IGNORE INTO sent VALUES(?, ?)", (head.name, key))

    # -- looking

    def images(self, selection: Selection, without: Iterable[str] = ()) -> Iterator[tuple[str, Image]]:
        """The pseudonym and the image of each instance that counts, one at a time, patient after patient.

        Nobody who has opted out is among them. Only heads are read to choose, and only chosen pixels are opened.
        """
        excluded = self.opted_out() | set(without)
        tally = SeriesTally(self.barred() | self.held(), selection.min_instances)
        for person, name, label in choose(self.heads(), selection, tally, excluded, self._split_key):
            try:
                picture = selection_view(self.pixels(name), selection)
            except KeyError:  # it was deleted since
                continue
            if picture is not None:
                yield person, Image(picture, label)

    def roster(
        self, selection: Selection, without: Iterable[str] = (), among: Set[str] | None = None
    ) -> tuple[tuple[str, ...], ...]:
        """The labels of every patient's images that :meth:`images` would try, patient after patient, without a name.

        No image is opened: whether one can be fitted, its pixels say. ``among`` whom; None: all.
        """
        tally = SeriesTally(self.barred() | self.held(), selection.min_instances)
        excluded = self.opted_out() | set(without)
        labels: dict[str, list[str]] = {}
        for person, _, label in choose(self.heads(), selection, tally, excluded, self._split_key):
            if among is None or person in among:
                labels.setdefault(person, []).append(label)
        return tuple(tuple(own) for own in labels.values())

    def cohort(
        self, modality: str | Selection, shape: tuple[int, ...] | None = None, without: Iterable[str] = ()
    ) -> Cohort:
        """The patients with labelled 2-D images that count. The rule is public configuration.

        Args:
            modality: DICOM Modality; or a whole selection.
            shape: (h, w) or (h, w, 3) of the images that count, beside a modality.
            without: pseudonyms that may not take part (released as often as the policy admits).
        """
        if isinstance(modality, str):
            if shape is None:
                raise ValueError("a modality is selected with a shape")
            modality = Selection(modality, shape)
        patients: dict[str, list[Image]] = {}
        for person, image in self.images(modality, without):
            patients.setdefault(person, []).append(image)
        return Cohort(tuple(Patient(p, tuple(images)) for p, images in patients.items()))

    def part_of(self, split: Split, person: str) -> str:
        """The part of a split that a patient is in, for as long as the project lasts."""
        return part_of(split, self._split_key, person)

    def alike(self) -> tuple[EqualPatients, ...]:
        """The patient ids that count as one patient towards k until a person says otherwise, by name."""
        return group_equal_patients(self.heads(), self._notes.apart())

    def alike_ids(self) -> tuple[frozenset[str], ...]:
        """The ids of each of :meth:`alike`: disjoint groups."""
        return tuple(one.persons for one in self.alike())

    def second_ids(self, selection: Selection, taken: Set[str], among: Set[str] | None = None) -> frozenset[str]:
        """Who is left out of a k-anonymous release, since another id stands for the same patient there.

        Of ids that count as one (:func:`agent.storage.equal_patients.group_equal_patients`) the first that the
        selection finds represents all; none does where an earlier release used one. Claims of level A do not use
        this: there, whether a patient takes part is a function of that patient's own files alone.

        ``among``: the patients of a resumed release; newer patients represent nobody. None: all patients.
        """
        tally = SeriesTally(self.barred() | self.held(), selection.min_instances)
        found = {who for who, _, _ in choose(self.heads(), selection, tally, self.opted_out(), self._split_key)}
        return left_out(self.alike_ids(), found if among is None else found & among, taken)

    def tell_apart(self, name: str) -> int:
        """A person has decided: the ids of that name in :meth:`alike` are as many patients. How many they are.

        Raises:
            KeyError: there is none of that name.
        """
        for one in self.alike():
            if one.name == name:
                self._notes.tell_apart(one.persons)
                return len(one.persons)
        raise KeyError("no group of patient ids has that name")

    def patients(self) -> int:
        """How many patients there are: for the site's own checks, never for a message or a log that leaves."""
        return len({head.person for head in self.heads()})

    def counts(self, min_instances: int = 1) -> tuple[StateCount, ...]:
        """Instances and patients by modality, body part and state: for the site's own console alone (P14)."""
        return counts(self.heads, SeriesTally(self.barred() | self.held(), min_instances))

    def studies(self) -> tuple[str, ...]:
        """The pseudonyms of all studies, sorted."""
        return tuple(sorted({head.study for head in self.heads()}))

    def instances(self, study: str) -> tuple[InstanceChange, ...]:
        """What the manifest of a study is made of, by name. ``after`` is keyed: see :meth:`mark`."""
        found = sorted((head for head in self.heads() if head.study == study), key=lambda head: head.name)
        traces = {name: self._trace(name) for name in {head.trace for head in found}}
        return tuple(self._instance(head, traces[head.trace]) for head in found)

    def _instance(self, head: InstanceRecord, trace: tuple[AttributeAction, ...]) -> InstanceChange:
        cleaned = any(step.path == "pixels" and step.why == "clean_pixels" for step in trace)
        pixels = Pixels("cleaned" if cleaned else "unknown", "removed" if head.defaced else "unknown")
        after = self._file.mac("after", bytes.fromhex(head.after))
        return InstanceChange(head.name, head.digest, after, trace, pixels=pixels)

    def mark(self, payload: bytes) -> str:
        """The keyed digest that a manifest states of a file: HMAC-SHA256 of its SHA-256, 32 hex characters."""
        return self._file.mac("after", sha256(payload).digest())

    def version_of(self, table: bytes) -> str:
        """The version of a label table: HMAC-SHA256 of its bytes under the project's key, 64 hex characters.

        It is keyed, since a plain digest of a small table could be found by trying tables.
        """
        return hmac.new(self._table_key, table, sha256).hexdigest()

    # -- changing

    def relabel(self, labels: Mapping[str, str]) -> int:
        """Give instances labels later than they came in; all or none.

        Args:
            labels: keyed SOP Instance UID -> label, whoever's files say it; "" takes a label away. What is not here
                is passed over.
        Returns:
            How many instances have another label now.
        Raises:
            ValueError: a label longer than 64 characters, or with characters that do not print.
        """
        if not all(len(label) <= _MAX_LABEL and label.isprintable() for label in labels.values()):
            raise ValueError(f"a label has at most {_MAX_LABEL} printable characters")
        changed = 0
        with self._file.transaction():
            wrong = [
                replace(head, label=labels[head.uids[2]])
                for head in self.heads()
                if head.uids and labels.get(head.uids[2], head.label) != head.label
            ]
            for head in wrong:
                found = self._find(head.name)
                if found is not None:
                    self._write_head(found[0], head)
                    changed += 1
        return changed

    def purge(self, persons: Set[str]) -> int:
        """Delete all that is here of these patients, so that its ciphertext is neither in the file nor in the log.

        Returns:
            How many instances there were.
        Raises:
            VaultError: all is deleted, but another process reads on, and the log could not be cut: say it again.
        """
        with self._file.transaction():
            gone, traces = [], set()
            for head in self.heads():
                if head.person in persons:
                    gone.append(head.name)
                else:
                    traces.add(head.trace)
            for name in gone:
                self._file.rows("DELETE FROM sent WHERE id = (SELECT id FROM instance WHERE name = ?)", (name,))
                self._file.rows("DELETE FROM body WHERE id = (SELECT id FROM instance WHERE name = ?)", (name,))
                self._file.rows("DELETE FROM instance WHERE name = ?", (name,))
            for (name,) in self._file.rows("SELECT name FROM trace"):
                if name not in traces:
                    self._file.rows("DELETE FROM trace WHERE name = ?", (name,))
            self._disown(persons)
        self._claims.clear()
        if not self._file.truncate():
            raise VaultError(
                "the patient is deleted, but another process still reads the vault: stop it and run the command again"
            )
        return len(gone)

    def _disown(self, persons: Set[str]) -> None:
        """Forget these patients' series, and what of them was barred."""
        barred = set(self.barred())
        for name, body in self._file.rows("SELECT name, body FROM series"):
            series, person, _ = json.loads(self._file.unseal(f"series:{name}", body))
            if person in persons:
                barred.discard(series)
                self._file.rows("DELETE FROM series WHERE name = ?", (name,))
        self._file.write_note("barred", sorted(barred))
