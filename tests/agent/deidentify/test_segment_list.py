"""Segments come in by the standard's codes, and no outline of a head does."""

from __future__ import annotations

import pytest

from agent.deidentify.admission_rules import AdmissionRules, as_table, rules_from
from agent.deidentify.ps315 import retained_attributes
from agent.deidentify.segment_list import Segment
from tests.support.segmentations import LISTED


def test_a_segment_has_the_standards_words_and_an_older_code_means_the_same() -> None:
    assert Segment("liver", "10200004").meaning == "Liver"
    for inside in ("312501005", "18234004", "12872006", "95324001", "15924003"):  # a node, a nerve, a rib's head, ...
        if retained_attributes.concept("SCT", inside):
            Segment("inside", inside)
    older = Segment("liver", "T-62000", "SRT")
    assert older.meant == ("SCT", "10200004")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("Liver", "10200004"), "short name"),
        (("liver", "1"), "not one of the standard's"),
        (("liver", "10200004", "99LOCAL"), "not one of the standard's"),
        (("liver", "Mr Smith"), "not one of the standard's"),
        (("skin", "39937001"), "shows its face"),
        (("head", "69536005"), "shows its face"),
        (("face", "89545001"), "shows its face"),
        (("neck", "T-D1600", "SRT"), "shows its face"),
        (("skull", "89546000"), "shows its face"),
        (("jaw", "91609006"), "shows its face"),
        (("nose", "113179006"), "shows its face"),
        (("body", "38266002"), "shows its face"),
    ],
)
def test_what_is_no_listed_code_or_outlines_a_head_is_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Segment(*words)


def test_the_list_reaches_the_reader_as_it_is_and_names_each_once() -> None:
    rules = AdmissionRules(frozenset({"MR"}), segments=LISTED)
    assert rules_from(as_table(rules)) == rules
    for twice in ((LISTED[0], Segment("other", "10200004")), (LISTED[0], Segment("liver", "4147007"))):
        with pytest.raises(ValueError, match="two segments"):
            AdmissionRules(frozenset({"MR"}), segments=twice)
