"""The Clean Structured Content Option: the retained parts of a report's content tree (PS3.3 section C.17.3).

Coded entries of the standard, numbers, coordinates and references stay; UIDs are keyed and dates shifted by
the ordinary rules; every text and every person's name becomes a fixed word. A content item whose concept is
not one of the standard's goes with all that is below it. Items are cleaned by the same recursive walk as any
other sequence, so this module is only its lists.
"""

from __future__ import annotations

from typing import Final

from pydicom import Dataset
from pydicom.datadict import tag_for_keyword

from agent.deidentify.ps315.value_encoding import UNREADABLE

REPORTS: Final = "1.2.840.10008.5.1.4.1.1.88."
CONTENT: Final = 0x0040A730
CONCEPT_NAME: Final = 0x0040A043
VALUE_CONCEPT: Final = 0x0040A168


def _tags(*keywords: str) -> frozenset[int]:
    found = [tag_for_keyword(keyword) for keyword in keywords]
    if None in found:
        raise ValueError("not in the DICOM dictionary")
    return frozenset(tag for tag in found if tag is not None)


SEQUENCES: Final = _tags(
    *("ContentSequence", "ConceptNameCodeSequence", "ConceptCodeSequence", "MeasuredValueSequence"),
    *("MeasurementUnitsCodeSequence", "ContentTemplateSequence", "ReferencedSOPSequence"),
    *("CurrentRequestedProcedureEvidenceSequence", "PertinentOtherEvidenceSequence", "ReferencedSeriesSequence"),
    *("PerformedProcedureCodeSequence", "ReferencedRequestSequence", "PredecessorDocumentsSequence"),
    *("IdenticalDocumentsSequence", "AcquisitionContextSequence", "VerifyingObserverSequence"),
)
TERMS: Final = _tags(
    *("ValueType", "RelationshipType", "ContinuityOfContent", "CompletionFlag", "VerificationFlag"),
    *("TemporalRangeType", "GraphicType", "PreliminaryFlag", "MappingResource"),
)
WORDS: Final = _tags("TextValue", "PersonName", "VerifyingObserverName", "VerifyingOrganization")
# those of them that PS3.15 Table E.1-1 lists: without the option its action holds
LISTED: Final = _tags(
    *("ContentSequence", "AcquisitionContextSequence", "VerifyingObserverSequence", "TextValue", "PersonName"),
    *("VerifyingObserverName", "VerifyingOrganization"),
)


def named(report: Dataset) -> bool:
    """Whether a report has a content tree with a title: one that is not understood is not cleaned."""
    try:
        return CONCEPT_NAME in report and len(report[CONCEPT_NAME].value) == 1 and CONTENT in report
    except UNREADABLE:
        return False
