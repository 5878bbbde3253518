"""The ingest of one project, opened: its keys and rules, the spool, the vault and the quarantine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.record import Record, instance_name
from agent.errors import SiteConfigError
from agent.file_access import contents
from agent.ingest.config import Ingestion, read_ingestion
from agent.ingest.folders import DICOMDIR, Folder, FolderFile, MissingFile, in_folder, listed_and_missing
from agent.ingest.ocr import Ocr
from agent.ingest.parser_process import ParserProcess
from agent.ingest.patient_lists import Lists, read_lists
from agent.ingest.pending import PendingFile, QuarantinedFile, in_room
from agent.ingest.pipeline import IngestDependencies, IngestPipeline, IngestReport, sender_mark
from agent.storage import projects
from agent.storage.quarantine import Quarantine
from agent.storage.site_directory import MAIN, SiteDirectory
from agent.storage.spool import ReceivedFile, Spool, SpoolError
from agent.storage.vault import Vault

Progress = Callable[[int], None]
_MOST_INDEXES: Final = 64  # DICOMDIRs of one folder that are compared with what is there


@dataclass(frozen=True, slots=True)
class IngestContext:
    """What the commands of ingest work with."""

    home: SiteDirectory
    ingestion: Ingestion
    project: str
    who: Deidentifier
    vault: Vault
    inbox: Spool
    quarantine: Quarantine
    room_key: bytes = field(repr=False)  # of both rooms: a listener holds no other

    def known(self, senders: Sequence[tuple[str, str]]) -> Callable[[str], bool]:
        """Has an instance (by its SOP Instance UID) come before?

        True if one of these (road, source) sent it, and it is pending, in the vault, or was rejected for its content.
        Files of other senders with the same UID do not count, so no sender can keep a patient's image out, by junk or
        by an image. If one sender has two patients under one UID, the second counts as received with the first: an
        archive is assumed to have unique UIDs. Records of an older version count for every sender.
        """

        def known(uid: str) -> bool:
            if self.inbox.holds(uid, senders) or self.quarantine.holds(uid, senders):
                return True
            marks = (self.name_of(uid), *(sender_mark(self.who, uid, road, source) for road, source in senders))
            return any(self.vault.was_sent(mark) for mark in marks)

        return known

    def name_of(self, uid: str) -> str:
        """The keyed name of a SOP Instance UID: see :func:`agent.deidentify.record.keyed_name`."""
        return instance_name(self.who, uid)

    def usual(self) -> Folder:
        """The folder that ``site.toml`` names."""
        return Folder(self.home.settings().input)

    def lists(self, folder: Folder) -> Lists:
        """The hospital's lists in a folder."""
        segments = [segment.name for segment in self.ingestion.rules.segments]
        return read_lists(folder.path, folder.columns, self.ingestion.mask_names, segments)

    def lying(self, folder: Folder, lists: Lists) -> list[FolderFile]:
        """What lies in a folder now, but for the site's own directories."""
        return in_folder(folder.path, lists, (self.home.root,), self.ingestion.rules.max_bytes)

    def missing(self, folder: Folder, lying: Sequence[FolderFile]) -> list[MissingFile]:
        """What the index of a medium lists and is not there."""
        indexes = [one for one in lying if os.path.basename(one.path).upper() == DICOMDIR][:_MOST_INDEXES]
        if not indexes:
            return []
        with self.reader() as reader:
            listed = ((index.path, reader.directory(index.load().body)) for index in indexes)
            return [m for path, files in listed for m in listed_and_missing(folder.path, path, files)]

    def waiting(self) -> Iterator[PendingFile]:
        """What waits in the spool."""
        return iter(in_room(self.inbox))

    def refused(self, names: Iterable[str]) -> Iterator[PendingFile]:
        """Files of the quarantine, to be tried once more."""
        lists: dict[Path, Lists] = {}
        return (
            QuarantinedFile(self.quarantine, name, lambda arrival: self.lying_at(Path(arrival.source), lists))
            for name in names
        )

    def lying_at(self, path: Path, known: dict[Path, Lists] | None = None) -> ReceivedFile:
        """One file, where it lies, with what the lists of its folder say of it.

        Args:
            path: of the file.
            known: lists that were read already, by folder; more are added.
        Raises:
            FileRejectedError: it cannot be read, or it is a mask without its volume.
            PatientListError: see :meth:`lists`.
        """
        known, most = {} if known is None else known, self.ingestion.rules.max_bytes
        place = path.parent.resolve() / path.name  # a link is not followed
        for folder in (self.usual(), *self.ingestion.folders):
            top = folder.path.resolve()
            if not place.is_relative_to(top):
                continue
            if folder.path not in known:
                known[folder.path] = self.lists(folder)
            return FolderFile(folder.path, str(place.relative_to(top)), known[folder.path], most).load()
        return ReceivedFile("folder", str(path), contents(path, most))

    def named_labels(self, lists: Lists | None) -> dict[str, str]:
        """Keyed SOP Instance UID -> label."""
        by_uid = lists.labels_of_instances if lists else {}
        return {self.name_of(uid): label for uid, label in by_uid.items()}

    def ports(self, labels: Lists | None = None, ocr: Ocr | None = None) -> IngestDependencies:
        """What an :class:`IngestPipeline` works with."""
        return IngestDependencies(
            rules=self.ingestion.rules,
            deidentifier=self.who,
            shelf=self.vault,
            quarantine=self.quarantine,
            labels=self.named_labels(labels),
            alarm=ocr.alarm if ocr else _silent,
            demand=self.home.settings().confinement,
        )

    def reader(self, rules: AdmissionRules | None = None) -> ParserProcess:
        """A reader of files, for this project and confined as this site demands; by the site's rules, or others."""
        return ParserProcess(rules or self.ingestion.rules, self.who, demand=self.home.settings().confinement)

    def labels(self) -> Lists | None:
        """The hospital's lists in its usual folder, which label what comes by other roads, too."""
        return self.lists(self.usual()) if self.usual().path.is_dir() else None

    def intake(self, labels: Lists | None = None) -> IngestPipeline:
        """The ingest pipeline, ready to run."""
        key = self.who.mac("ocr").encode()
        ocr = Ocr(self.ingestion.ocr, key) if self.ingestion.ocr else None
        return IngestPipeline(self.ports(labels, ocr), self.ingestion.reading.workers or None)


def purge_pending(way: IngestContext, persons: Set[str]) -> int:
    """Delete pending and rejected files of these patients, and return how many. Files without a patient stay.

    Args:
        way: of one project.
        persons: site-wide pseudonyms.
    """
    gone = 0
    for room, name, person in _in_rooms(way):
        if person in persons:
            room.remove(name)
            gone += 1
    return gone


def of_files(way: IngestContext) -> set[str]:
    """The patients of whom a file waits or was refused."""
    return {person for _, _, person in _in_rooms(way)}


def _in_rooms(way: IngestContext) -> Iterator[tuple[Spool, str, str]]:
    """What waits or was refused, by room and name, and whose it is; what names no patient is passed over."""
    with way.reader() as reader:
        for room, names in (
            (way.inbox, way.inbox.names()),
            (way.quarantine, [entry.name for entry in way.quarantine.entries()]),
        ):
            for name in names:
                try:
                    arrival = room.open(name)
                    person = (
                        reader.patient_of(arrival.body, arrival.patient_id, arrival.issuer) if arrival.body else ""
                    )
                except (FileRejectedError, SpoolError, FileNotFoundError):
                    continue
                if person:
                    yield room, name, person


def _pinned(vault: Vault, issuer: str) -> None:
    """The issuer of ids that name none is part of every pseudonym: another one would count each patient twice.

    Raises:
        SiteConfigError: it was another one when the vault was first used.
    """
    before = vault.note("issuer")
    if before is None:
        vault.write_note("issuer", issuer)
    elif before != issuer:
        said = "ingest.toml: issuer was different when this vault was first used: restore that value"
        raise SiteConfigError(f"{said}. With another issuer, patients would be counted twice")


def _silent(_record: Record) -> str | None:
    return None


@contextmanager
def open_ingest(home: SiteDirectory, project: str) -> Iterator[IngestContext]:
    """Open a project's ingest.

    Raises:
        SiteConfigError: a setting, or the project, is not in order.
        VaultError: a key does not open its file.
    """
    ingestion = read_ingestion(home)
    keys = projects.keys(home, project) if project != MAIN else None
    vault = projects.open_vault(home, project)  # it makes the project main, where an older home has none
    try:
        keys = keys or projects.keys(home, project)
        _pinned(vault, ingestion.reading.issuer)
        inbox, quarantine = projects.project_folders(home, project)
        yield IngestContext(
            home=home,
            ingestion=ingestion,
            project=project,
            who=Deidentifier(
                keys.pseudonym, ingestion.reading.issuer, ingestion.profile, people=home.secret("deidentify")
            ),
            vault=vault,
            inbox=Spool(inbox, keys.rooms),
            quarantine=Quarantine(quarantine, keys.rooms, attempts=ingestion.reading.attempts),
            room_key=keys.rooms,
        )
    finally:
        vault.close()


def total(reports: Iterable[IngestReport]) -> IngestReport:
    """Several reports as one."""
    files = kept = duplicates = 0
    codes: dict[str, int] = {}
    for report in reports:
        files, kept, duplicates = files + report.files, kept + report.kept, duplicates + report.duplicates
        for code, count in report.quarantined.items():
            codes[code] = codes.get(code, 0) + count
    return IngestReport(files, kept, duplicates, dict(sorted(codes.items())))
