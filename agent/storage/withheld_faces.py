"""Records that are withheld because a face may be rebuilt from them, and the one way in which they stop being so.

Series and studies of a project that are held back: series that belong to two studies, studies with burned-in text.

Both are stored under keyed names of one patient (:func:`agent.deidentify.record.keyed_name`), so one patient's file
cannot hold back another patient's data. Holds by UID alone, of older versions, last until a person lifts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent.deidentify.record import Record
from agent.domain import Scan
from agent.storage.encrypted_sqlite import EncryptedDatabase
from agent.storage.instance_index import DefacedInstance, FaceInstance, InstanceRecord, decode
from agent.storage.pixel_codec import packed, unpacked


class StudyHolds:
    """Sealed notes of one project's file."""

    def __init__(self, file: EncryptedDatabase) -> None:
        """``file``: the project's."""
        self._file = file

    def hold(self, study: str) -> None:
        """Hold a study back: text was read in one of its images, so that nothing is drawn from any of them."""
        with self._file.transaction():
            self._file.write_note("held", sorted(self.held() | {study}))

    def looked_at(self, study: str) -> bool:
        """Has a person looked at the study's images?"""
        return study in (self._file.note("looked_at") or ())

    def held(self) -> frozenset[str]:
        """The studies that are held back until a person has looked."""
        return frozenset(self._file.note("held") or ())

    def barred(self) -> frozenset[str]:
        """The series that are held back, since they hold instances of two studies."""
        return frozenset(self._file.note("barred") or ())

    def bar(self, series: set[str]) -> None:
        """Hold series back: within a transaction."""
        self._file.write_note("barred", sorted(self.barred() | series))

    def let_go(self, name: str, looked_at: Iterable[str]) -> None:
        """A study or series is held back no more; no alert is raised again for the studies that were looked at."""
        with self._file.transaction():
            self._file.write_note("held", sorted(self.held() - {name}))
            self._file.write_note("barred", sorted(self.barred() - {name}))
            self._file.write_note("looked_at", sorted({*(self._file.note("looked_at") or ()), *looked_at}))


class Withheld(StudyHolds):
    """Heads and files of one project's records, and the faces among them."""

    def heads(self) -> Iterator[InstanceRecord]:
        """What is known of every instance without its pixels, by name. Write nothing before the last one."""
        for name, box in self._file.stream("SELECT name, head FROM instance ORDER BY id"):
            yield decode(self._file.unseal(f"head:{name}", box))

    def _find(self, name: str) -> tuple[int, InstanceRecord] | None:
        for key, box in self._file.rows("SELECT id, head FROM instance WHERE name = ?", (name,)):
            return key, decode(self._file.unseal(f"head:{name}", box))
        return None

    def payload(self, name: str) -> bytes:
        """The de-identified file of an instance.

        Raises:
            KeyError: there is none of that name.
            VaultError: it was changed.
        """
        query = "SELECT head, payload FROM body JOIN instance USING (id) WHERE name = ?"
        for head, box in self._file.rows(query, (name,)):
            sealed_as = decode(self._file.unseal(f"head:{name}", head)).box or name
            return self._file.unseal(f"payload:{sealed_as}", box)
        raise KeyError("no instance of that name")

    def pixels(self, name: str) -> NDArray[np.float32]:
        """The pixels of an image, (h, w) or (h, w, 3) in [0, 1], as ingest made them.

        Raises:
            KeyError: there is none of that name, or it is a volume.
            VaultError: they were changed.
        """
        query = "SELECT head, pixels FROM body JOIN instance USING (id) WHERE name = ? AND pixels IS NOT NULL"
        for raw, box in self._file.rows(query, (name,)):
            head = decode(self._file.unseal(f"head:{name}", raw))
            return unpacked(self._file.unseal(f"pixels:{head.box or name}", box), head.shape or ())
        raise KeyError("no image of that name")

    def _write_head(self, key: int, head: InstanceRecord) -> None:
        box = self._file.seal(f"head:{head.name}", head.encode())
        self._file.rows("UPDATE instance SET head = ? WHERE id = ?", (box, key))

    def faces(self) -> list[tuple[str, int]]:
        """The studies in which a face waits to be taken off, each with the number of its instances that may show one.

        Who has opted out, and what is barred or held for another reason, is passed over.
        """
        counts: dict[str, int] = {}
        out, barred = self.opted_out(), self.barred() | self.held()
        for head in self.heads():
            if head.face and head.person not in out and not head.held(barred):
                counts[head.study] = counts.get(head.study, 0) + 1
        return sorted(counts.items())

    def faces_of(self, study: str) -> list[FaceInstance]:
        """The same of one study, by name."""
        out, barred = self.opted_out(), self.barred() | self.held()
        of_it = (head for head in self.heads() if head.study == study and head.face and head.person not in out)
        free = (head for head in of_it if not head.held(barred))
        found = sorted(free, key=lambda head: head.name)
        if len({head.person for head in found}) > 1:  # a study's name holds its patient: this is no such name
            return []
        kept = ((h.name, h.kind, h.modality, h.person, h.study, h.series, h.label) for h in found)
        return [FaceInstance(*one, self.payload(one[0])) for one in kept]

    def heads_waiting(self, modality: str) -> tuple[int, bool]:
        """How many patients :meth:`scans` would look at, at most; and may one need float32? No file is opened.

        CT is looked at in Hounsfield units, and a whole volume (NIfTI) may hold any numbers.
        """
        out, barred = self.opted_out(), self.barred() | self.held()
        faces = (head for head in self.heads() if head.face and head.modality == modality and head.person not in out)
        free = [head for head in faces if barred.isdisjoint((head.series, head.study))]
        return len({head.person for head in free}), modality == "CT" or any(head.kind == "volume" for head in free)

    def scans(self, modality: str) -> tuple[Scan, ...]:
        """The finest volume of each patient whose face is on, by pseudonym; of several studies the first one's."""
        from agent.storage.withheld_series import finest  # noqa: PLC0415 - the parsers take half a second

        found: dict[str, Scan] = {}
        for study, _ in self.faces():
            faces = [face for face in self.faces_of(study) if face.modality == modality]
            best = finest(faces) if faces and faces[0].person not in found else None
            if best is not None:
                source, members = best
                volume = source.seen()
                labels = {face.label for face in members}
                label = labels.pop() if len(labels) == 1 else ""
                found[members[0].person] = Scan(members[0].person, volume, label)
        return tuple(found[person] for person in sorted(found))

    def opted_out(self) -> frozenset[str]:
        """Who has opted out, as of now."""
        raise NotImplementedError  # abstract: the site's notes know, and the vault holds them

    def defaced(self, bare: Iterable[DefacedInstance]) -> bool:
        """Replace files by those without a face and clear their flags, all or none.

        Returns:
            Whether the old bytes are overwritten: not while another process reads; then say :meth:`overwrite` later.
        Raises:
            KeyError: there is none of that name, or it is another file by now; nothing was replaced.
            ValueError: pixels for a volume, none for an image, or of another shape; nothing was replaced.
        """
        with self._file.transaction():
            for one in bare:
                found = self._find(one.name)
                if found is None or one.before not in ("", found[1].after):
                    raise KeyError("no such file of that name")
                key, head = found
                if (None if one.pixels is None else one.pixels.shape) != head.shape or not one.payload:
                    raise ValueError("an image is replaced with pixels of its shape, a volume without any")
                record = self._record(head, one.payload, one.pixels)
                box = None
                picture = ""
                if one.pixels is not None:
                    raw = packed(one.pixels)
                    box, picture = self._file.seal(f"pixels:{one.name}", raw), self._picture(raw, one.pixels.shape)
                bared = replace(head, face=False, defaced=True, after=record.after, picture=picture, box="")
                self._write_head(key, bared)
                values = (box, self._file.seal(f"payload:{one.name}", one.payload), key)
                self._file.rows("UPDATE body SET pixels = ?, payload = ? WHERE id = ?", values)
        return self.overwrite()

    def lift(self, name: str) -> None:
        """A person has looked at this study, or series: it is as eligible as any, and raises no alert again.

        A name of an older version may be of several patients' studies: whoever has looked has looked at all of them.
        """
        self.let_go(name, {head.study for head in self.heads() if name in (head.study, *head.uids[:1])} | {name})

    def _picture(self, raw: bytes, shape: tuple[int, ...]) -> str:
        """The keyed digest of packed pixels, by which equal ones are found; "" of an image of one value.

        They are packed once more: an older version packed all of them in 65,536 levels.
        """
        pixels = unpacked(raw, shape)
        if not bool(np.ptp(pixels) > 0):
            return ""
        return self._file.mac("picture", f"{shape}".encode() + packed(pixels))

    def overwrite(self) -> bool:
        """Cut the log in which old bytes may stand, sealed; False while another process reads."""
        return self._file.truncate()

    @staticmethod
    def _record(head: InstanceRecord, payload: bytes, pixels: NDArray[np.float32] | None) -> Record:
        """Checked as what came in was: finite pixels in [0, 1]."""
        kept = (head.name, head.digest, head.person, head.study, head.modality, head.kind, head.label)
        return Record(*kept, pixels, payload, False, head.series, head.body_part)
