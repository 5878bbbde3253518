"""Search an archive level by level (PS3.4 section C.6.2), and check the responses against the query."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from agent.deidentify.prescan import IMPLICIT_LE
from agent.pacs.archive import ArchiveConfig, ArchiveError, ArchiveQuery, ArchiveQueryError
from agent.pacs.dimse.acceptor import STORAGE
from agent.pacs.dimse.messages import UID
from agent.pacs.dimse.query_retrieve_scu import FIND, QueryRetrieveScu

QUERY: Final = (FIND, IMPLICIT_LE)
LIST: Final = 100  # UIDs of one request
_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class Study:
    """A study that was found. The UID identifies a patient."""

    uid: str
    count: int  # of its instances, in the archive's words; -1 when it does not say


@dataclass(frozen=True, slots=True)
class FoundSeries:
    """A series to retrieve."""

    uid: str
    instances: Mapping[str, str]  # SOP Instance UID -> SOP Class UID, "" when the archive does not say


def find_studies(remote: ArchiveConfig, tally: Counter[str]) -> list[Study]:
    """The studies of the site's query, each once, in the order of their UIDs.

    Args:
        remote: whom to ask.
        tally: counts ``malformed`` (a UID that is none) and ``unfit`` (not what was asked for).
    Raises:
        ArchiveError: no association, a failure, or more than ``max_matches``.
    """
    found: dict[str, Study] = {}
    with QueryRetrieveScu(remote, [QUERY]) as asked:
        for wanted in _criteria(remote.query):
            keys = dict.fromkeys(("StudyInstanceUID", "ModalitiesInStudy", "NumberOfStudyRelatedInstances"), "")
            for match in asked.find("STUDY", keys | {"StudyDate": remote.query.dates} | wanted):
                if not UID.fullmatch(match["StudyInstanceUID"]):
                    tally["malformed"] += 1
                elif not _fits(match, wanted, remote.query):
                    tally["unfit"] += 1
                else:
                    uid = match["StudyInstanceUID"]
                    found[uid] = Study(uid, _count(match["NumberOfStudyRelatedInstances"]))
            if len(found) > remote.max_matches:
                raise ArchiveError(f"{remote.name}: more studies than max_matches. Narrow the query.")
    return [found[uid] for uid in sorted(found)]


def _criteria(query: ArchiveQuery) -> Iterator[dict[str, str]]:
    """One C-FIND each: matching by a list is defined for UIDs only."""
    people = [{"PatientID": v} for v in query.patients] + [{"AccessionNumber": v} for v in query.accessions]
    kinds = [{"ModalitiesInStudy": v} for v in query.modalities]
    for person, kind in itertools.product(people or [{}], kinds or [{}]):
        yield person | kind


def _fits(match: Mapping[str, str], wanted: Mapping[str, str], query: ArchiveQuery) -> bool:
    """Is it what was asked for? An archive may leave out the modalities, not the patient, the number or the date."""
    same = all(match[key] == value for key, value in wanted.items() if key != "ModalitiesInStudy")
    kinds = set(match["ModalitiesInStudy"].split("\\"))
    right = not query.modalities or kinds == {""} or bool(kinds & set(query.modalities))
    return same and right and query.in_range(match["StudyDate"])


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else _UNKNOWN


def find_instances(remote: ArchiveConfig, study: Study, tally: Counter[str]) -> list[FoundSeries]:
    """The series of a study that the query wants, with their instances.

    Args:
        remote: whom to ask.
        study: which.
        tally: counts ``malformed``, ``unfit`` (instances outside the query's series are not asked for at all),
            ``foreign`` (no storage class of the standard), ``unlisted`` (counted by the archive, but not listed).
    Raises:
        ArchiveError: no association, a failure, or more than ``max_matches``.
    """
    query, listed, found = remote.query, 0, []
    more = {"NumberOfSeriesRelatedInstances": ""} | ({} if query.body_part else {"BodyPartExamined": ""})
    keys = {"StudyInstanceUID": study.uid, "SeriesInstanceUID": "", "Modality": ""}
    keys |= {"BodyPartExamined": query.body_part} if query.body_part else {}
    if len(query.modalities) == 1:
        keys["Modality"] = query.modalities[0]
    with QueryRetrieveScu(remote, [QUERY]) as asked:
        for match in _find(asked, "SERIES", keys, more):
            if not UID.fullmatch(match["SeriesInstanceUID"]):
                tally["malformed"] += 1
            elif not _wanted(match, query):
                tally["unfit"] += 1
            else:
                series, count = _series(asked, study, match, tally), _count(match["NumberOfSeriesRelatedInstances"])
                listed += len(series.instances)
                if listed > remote.max_matches:
                    raise ArchiveError(f"{remote.name}: a study of more instances than max_matches.")
                tally["unlisted"] += max(0, count - len(series.instances))
                found.append(series)
    return found


def _find(
    asked: QueryRetrieveScu, level: str, keys: Mapping[str, str], more: Mapping[str, str]
) -> list[dict[str, str]]:
    """Ask for ``keys`` and ``more``, and where the archive fails at that, for ``keys`` alone.

    An archive may have to read each file for what its database lacks: Orthanc fails at a whole series for one file
    that its disk has lost.
    """
    try:
        return asked.find(level, {**keys, **more})
    except ArchiveQueryError:
        return [{**more, **match} for match in asked.find(level, keys)]


def _wanted(match: Mapping[str, str], query: ArchiveQuery) -> bool:
    """A series that does not say its modality or body part is not wanted when the query names one."""
    kind = not query.modalities or match["Modality"] in query.modalities
    return kind and (not query.body_part or match["BodyPartExamined"].upper() == query.body_part)


def _series(asked: QueryRetrieveScu, study: Study, of: Mapping[str, str], tally: Counter[str]) -> FoundSeries:
    """One series; with none of its instances when the archive cannot list it."""
    uid = of["SeriesInstanceUID"]
    keys = {"StudyInstanceUID": study.uid, "SeriesInstanceUID": uid, "SOPInstanceUID": ""}
    instances: dict[str, str] = {}
    try:
        matches = _find(asked, "IMAGE", keys, {"SOPClassUID": ""})
    except ArchiveQueryError:
        matches = []
        tally["unlisted"] += int(_count(of["NumberOfSeriesRelatedInstances"]) < 1)  # else counted by who asks
    for match in matches:
        if not UID.fullmatch(match["SOPInstanceUID"]):
            tally["malformed"] += 1
        elif match["SOPClassUID"] and match["SOPClassUID"] not in STORAGE:
            tally["foreign"] += 1
        else:
            instances[match["SOPInstanceUID"]] = match["SOPClassUID"]
    return FoundSeries(uid, instances)


@dataclass(frozen=True, slots=True)
class RetrievalUnit:
    """One retrieval."""

    level: str
    keys: Mapping[str, str]
    instances: frozenset[str]


def units(study: Study, series: FoundSeries, missing: Set[str], size: int) -> Iterator[RetrievalUnit]:
    """What to ask for, to get what is missing of a series.

    Args:
        study: the series'.
        series: which.
        missing: SOP Instance UIDs, perhaps of other series too.
        size: 0 for the whole series when all of it is missing; else at most so many instances of one request, as a
            list of UIDs (PS3.4 section C.2.2.2.2).
    """
    wanted = [uid for uid in series.instances if uid in missing]
    keys = {"StudyInstanceUID": study.uid, "SeriesInstanceUID": series.uid}
    if wanted and len(wanted) == len(series.instances) and not size:
        yield RetrievalUnit("SERIES", keys, frozenset(wanted))
        return
    for part in _parts(wanted, size or LIST):
        yield RetrievalUnit("IMAGE", keys | {"SOPInstanceUID": "\\".join(part)}, frozenset(part))


def _parts(values: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (values[start : start + size] for start in range(0, len(values), size))
