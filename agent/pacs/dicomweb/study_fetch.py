"""One study, retrieved by WADO-RS into memory: nothing of it is written to a disk."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from agent.pacs.archive import ArchiveQuery
from agent.pacs.dicomweb.config import DicomWebArchive, DicomWebError
from agent.pacs.dicomweb.wado import WadoRetriever


@dataclass(slots=True)
class _Memory:
    """A ``WadoSink`` that keeps no more than may be."""

    most: int
    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    size: int = 0
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def has(self, instance: str, source: str) -> bool:
        return instance in self.files

    def full(self, least_free: int) -> bool:
        """Nothing is written to a disk; :meth:`keep` refuses what is too much."""
        return False

    def keep(self, instance: str, source: str, body: bytes) -> None:
        with self.mutex:
            if self.size + len(body) > self.most:
                raise DicomWebError(f"{source}: the study has more than {self.most >> 20} MiB: nothing was predicted")
            self.files[instance] = body
            self.size += len(body)


def fetch_study(web: DicomWebArchive, uid: str, modality: str, most: int) -> list[bytes]:
    """Every instance of a study that the archive lists, as Part 10 files.

    Args:
        web: the archive.
        uid: Study Instance UID, which was checked.
        modality: of the series that are wanted; "": all.
        most: bytes, of the whole study.
    Raises:
        DicomWebError: it has no such study, cannot be asked, or did not send all of it.
    """
    sink = _Memory(most)
    done = WadoRetriever(web, sink).run(ArchiveQuery(modalities=(modality,) if modality else ()), uid)
    if done.paused:
        raise DicomWebError(f"{web.name}: it is outside its hours: nothing was predicted")
    if missing := sum(done.left.values()):
        raise DicomWebError(f"{web.name}: {missing} instances of the study did not arrive: nothing was predicted")
    if not sink.files:
        what = f"no {modality} series of that study" if modality else "no such study"
        raise DicomWebError(f"{web.name}: it lists {what}. Check the UID, and what this site may query")
    return list(sink.files.values())
