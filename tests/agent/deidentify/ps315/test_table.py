"""PS3.15 Table E.1-1 as frozen data: its rows, the columns of the options, where both come from."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from agent.deidentify.ps315 import table


def _counts() -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in table.ATTRIBUTES.values():
        counts[row.action] = counts.get(row.action, 0) + 1
    return counts


def test_the_table_has_the_rows_of_edition_2026c() -> None:
    assert table.EDITION == "2026c"
    assert _counts() == {
        **{"D": 93, "Z": 42, "X": 412, "U": 55, "Z/D": 6},
        **{"X/Z": 11, "X/D": 23, "X/Z/D": 8, "X/Z/U*": 2},
    }
    assert len(table.ATTRIBUTES) == 652
    assert len(table.REPEATING) == 3
    assert all(row.name for row in table.ATTRIBUTES.values())


@pytest.mark.parametrize(
    ("tag", "action"),
    [
        *((0x00100010, "Z"), (0x00100020, "Z/D"), (0x00080018, "U"), (0x00081030, "X"), (0x0020000D, "U")),
        *((0x00080020, "Z"), (0x0040A730, "D"), (0x00081140, "X/Z/U*"), (0x50F00010, "X"), (0x60023000, "X")),
    ],
)
def test_the_table_says_what_the_standard_says(tag: int, action: str) -> None:
    row = table.row(tag)
    assert row is not None
    assert row.action == action


def test_an_attribute_that_the_table_does_not_list_has_no_row() -> None:
    assert table.row(0x00280010) is None


def test_the_columns_of_the_options_have_the_rows_of_their_source() -> None:
    assert table.OPTIONS_EDITION == "older than 2024e"
    raw = json.loads(files("agent.deidentify.ps315").joinpath("ps315_options.json").read_text(encoding="utf-8"))
    counts = {name: len(column) for name, column in raw["options"].items()}
    assert raw["rows_in_source"] == 460
    assert counts == raw["rows"]
    assert counts == {
        **{"rtnDevIdOpt": 36, "rtnInstIdOpt": 9, "rtnPatCharsOpt": 12, "rtnLongModifDatesOpt": 56},
        **{"cleanDescOpt": 106, "cleanStructContOpt": 3, "cleanGraphOpt": 4, "rtnSafePrivOpt": 1, "rtnUIDsOpt": 54},
    }
    assert "innolitics/dicom-standard at 0d01bf11dfc1d0b73b6df85bbf6e1764d3c558a3" in raw["source"]
    # what is known of the licence, and no more: the repository has no copyright line
    assert raw["licence"].startswith("MIT")
    assert "copyright" not in raw


def test_a_row_that_is_newer_than_the_options_has_none() -> None:
    """Name to Use, Ethnic Groups: in 2026c, not among the 460 rows."""
    for tag in (0x00100012, 0x00102162):
        assert table.row(tag) is not None
        assert not any(tag in column for column in table.OPTIONS.values())


def test_every_option_is_about_an_attribute_that_the_table_lists() -> None:
    for column in table.OPTIONS.values():
        assert [f"{tag:08X}" for tag in column if table.row(tag) is None] == []


@pytest.mark.parametrize(
    ("option", "tag", "action"),
    [
        *(("retain_device", 0x00181000, "K"), ("retain_device", 0x00081010, "K")),
        *(("retain_patient_characteristics", 0x00101010, "K"), ("retain_patient_characteristics", 0x00102110, "C")),
        *(("clean_descriptors", 0x00081030, "C"), ("clean_descriptors", 0x0008103E, "C")),
        *(("clean_structured_content", 0x0040A730, "C"), ("retain_longitudinal", 0x00080020, "C")),
    ],
)
def test_the_options_say_what_the_standard_says(option: str, tag: int, action: str) -> None:
    assert table.OPTIONS[option][tag] == action


def test_who_and_where_the_patient_is_has_no_option_that_keeps_it() -> None:
    kept = {tag for column in table.OPTIONS.values() for tag, action in column.items() if action == "K"}
    identities = {0x00100010, 0x00100020, 0x00100030, 0x00101040, 0x00102154, 0x00080050, 0x00080090, 0x00080080}
    assert not kept & identities


def test_an_action_that_the_engine_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown action"):
        table.AttributeRow("K", "x")
