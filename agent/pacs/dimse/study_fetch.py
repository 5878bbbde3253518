"""One study, fetched by C-GET into memory: nothing of it is written to a disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from agent.pacs.archive import ArchiveConfig, ArchiveError, ArchiveQuery
from agent.pacs.dimse.find import FoundSeries, Study, find_instances
from agent.pacs.dimse.query_retrieve_scu import CANNOT_UNDERSTAND, GET, OUT_OF_RESOURCES, SUCCESS, QueryRetrieveScu
from agent.pacs.dimse.requestor import storage_contexts

_IMPLICIT: Final = "1.2.840.10008.1.2"


@dataclass(slots=True)
class _Memory:
    """A ``RetrieveSink`` that keeps what it asked for, and no more of it than may be."""

    wanted: frozenset[str]
    most: int
    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    size: int = 0
    full: bool = False

    def offer(self, instance: str) -> int | None:
        if instance not in self.wanted:
            return CANNOT_UNDERSTAND
        return SUCCESS if instance in self.files else None

    def keep(self, instance: str, body: bytes) -> int:
        if self.size + len(body) > self.most:
            self.full = True
            return OUT_OF_RESOURCES
        self.files[instance] = body
        self.size += len(body)
        return SUCCESS

    def refuse(self, instance: str) -> None:
        """Larger than ``max_bytes``: it is missing at the end."""


def fetch_study(remote: ArchiveConfig, uid: str, modality: str, most: int) -> list[bytes]:
    """Every instance of a study that the archive lists, as Part 10 files.

    Args:
        remote: the archive.
        uid: Study Instance UID, which was checked.
        modality: of the series that are wanted; "": all.
        most: bytes, of the whole study.
    Raises:
        ArchiveError: it has no such study, cannot be asked, or did not send all of it.
    """
    tally: Counter[str] = Counter()
    asked = replace(remote, query=ArchiveQuery(modalities=(modality,) if modality else ()))
    series = [one for one in find_instances(asked, Study(uid, -1), tally) if one.instances]
    if not series:
        what = f"no {modality} series of that study" if modality else "no such study"
        raise ArchiveError(f"{remote.name}: it lists {what}. Check the UID, and what this site may query")
    sink = _Memory(frozenset(name for one in series for name in one.instances), most)
    try:
        for one in series:
            _get(remote, uid, one, sink)
    except ArchiveError:
        if not sink.full:  # an archive may hang up where it is told so
            raise
    if sink.full:
        raise ArchiveError(f"{remote.name}: the study has more than {most >> 20} MiB: nothing was predicted")
    missing = len(sink.wanted) - len(sink.files) + tally["unlisted"] + tally["malformed"]
    if missing:
        raise ArchiveError(f"{remote.name}: {missing} instances of the study did not arrive: nothing was predicted")
    return list(sink.files.values())


def _get(remote: ArchiveConfig, uid: str, series: FoundSeries, sink: _Memory) -> None:
    known = sorted(set(series.instances.values()) - {""})
    if not known:
        raise ArchiveError(f"{remote.name}: it does not say of which class the instances are")
    with QueryRetrieveScu(remote, [(GET, _IMPLICIT), *storage_contexts(known)]) as association:
        association.get("SERIES", {"StudyInstanceUID": uid, "SeriesInstanceUID": series.uid}, sink)
