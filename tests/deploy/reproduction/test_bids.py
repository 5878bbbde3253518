"""Collections of heads: whoever has no age, no line or two of them is told by line, and never by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.reproduction.bids import HeadScan, ParticipantsTableError, adni, bids, oasis3

TABLE = "participant_id\tage\tsex\nsub-ZZ1\t70.5\tF\nsub-ZZ2\t61\tM\nsub-ZZ3\tn/a\tF\n"


def laid(folder: Path, table: str | bytes, *files: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "participants.tsv").write_bytes(table.encode() if isinstance(table, str) else table)
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


def told(scans: list[HeadScan]) -> list[tuple[str, str, str, float | None]]:
    return [(s.person, s.session, s.path.name, s.age) for s in scans]


def test_heads_are_found_with_and_without_sessions(tmp_path: Path) -> None:
    folder = laid(
        tmp_path / "set",
        TABLE,
        "sub-ZZ1/ses-b/anat/sub-ZZ1_ses-b_T1w.nii.gz",
        "sub-ZZ1/ses-a/anat/sub-ZZ1_ses-a_run-1_T1w.nii",
        "sub-ZZ1/ses-a/anat/sub-ZZ1_ses-a_T2w.nii",
        "sub-ZZ1/ses-a/func/sub-ZZ1_ses-a_T1w.nii",
        "sub-ZZ2/anat/sub-ZZ2_T1w.nii.gz",
        "sub-ZZ2/anat/sub-ZZ2_T1w.json",
        "sub-ZZ3/anat/sub-ZZ3_T1w.nii",
        "derivatives/sub-ZZ9/anat/sub-ZZ9_T1w.nii",
    )
    assert told(bids(folder)) == [
        ("sub-ZZ1", "ses-a", "sub-ZZ1_ses-a_run-1_T1w.nii", 70.5),
        ("sub-ZZ1", "ses-b", "sub-ZZ1_ses-b_T1w.nii.gz", 70.5),
        ("sub-ZZ2", "", "sub-ZZ2_T1w.nii.gz", 61.0),
        ("sub-ZZ3", "", "sub-ZZ3_T1w.nii", None),
    ]
    assert "ZZ" not in repr(bids(folder))


def test_a_session_of_oasis_is_so_many_days_later_and_of_adni_so_many_months(tmp_path: Path) -> None:
    names = [f"sub-ZZ1/{session}/anat/sub-ZZ1_T1w.nii" for session in ("ses-d0000", "ses-d0731")]
    folder = laid(tmp_path / "oasis", TABLE.replace("age", "AgeatEntry"), *names)
    assert [round(s.age or 0, 2) for s in oasis3(folder)] == [70.5, 72.5]
    names = [f"sub-ZZ2/{session}/anat/sub-ZZ2_T1w.nii" for session in ("ses-M000", "ses-M018")]
    folder = laid(tmp_path / "adni", TABLE.replace("age", "age_bl"), *names)
    assert [s.age for s in adni(folder)] == [61.0, 62.5]
    (folder / "sub-ZZ2/sub-ZZ2_sessions.tsv").write_text("session_id\tage\nses-M018\t62.9\n")
    assert [s.age for s in adni(folder)] == [61.0, 62.9]


def test_a_session_that_does_not_say_when_it_was_has_no_age(tmp_path: Path) -> None:
    folder = laid(tmp_path / "set", TABLE, "sub-ZZ1/ses-late/anat/sub-ZZ1_T1w.nii")
    assert bids(folder)[0].age == 70.5
    with pytest.raises(ParticipantsTableError, match="does not state the time since"):
        oasis3(folder)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("who\tage\nsub-ZZ1\t70\n", "no column, or two, participant_id"),
        ("participant_id\tparticipant_id\tage\nsub-ZZ1\tsub-ZZ1\t70\n", "participant_id"),
        ("participant_id\tsex\nsub-ZZ1\tF\n", "no column age"),
        ("participant_id\tage\nsub-ZZ1\tseventy\n", "line 2: age: not an age"),
        ("participant_id\tage\nsub-ZZ1\tnan\n", "line 2: age: not an age"),
        ("participant_id\tage\nsub-ZZ1\t-1\n", "line 2: age: not an age"),
        ("participant_id\tage\nsub-ZZ1\t7000\n", "line 2: age: not an age"),
        ("participant_id\tage\nsub-ZZ1\t70\nsub-ZZ1\t71\n", "line 3: participant_id: appears twice"),
        ("participant_id\tage\n\t70\n", "line 2: participant_id: empty"),
        ("participant_id\tage\n../ZZ\t70\nsub-ZZ1\t70\n", "line 2: participant_id: not sub-"),
        ("participant_id\tage\nsub-ZZ2\t70\n", "a folder of a participant has no line"),
        ("participant_id\tage\nsub-ZZ1\n", "line 2: another number of columns"),
        ("participant_id\tage\nsub-ZZ1\t70\tF\n", "line 2: another number of columns"),
        ('participant_id\tage\nsub-ZZ1\t"70', "not a table"),
        (b"participant_id\tage\nsub-ZZ1\t\xff\n", "not UTF-8"),
    ],
)
def test_a_bad_table_is_told_by_line_and_column(tmp_path: Path, table: str | bytes, said: str) -> None:
    folder = laid(tmp_path / "set", table, "sub-ZZ1/anat/sub-ZZ1_T1w.nii")
    with pytest.raises(ParticipantsTableError, match=said) as failure:
        bids(folder)
    assert "ZZ" not in str(failure.value)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    table = "participant_id\tage\nsub-ZZ1\told\nsub-ZZ2\tolder\n"
    folder = laid(tmp_path / "set", table, "sub-ZZ1/anat/sub-ZZ1_T1w.nii", "sub-ZZ2/anat/sub-ZZ2_T1w.nii")
    with pytest.raises(ParticipantsTableError, match=r"line 2.*line 3"):
        bids(folder)


def test_a_folder_without_a_table_or_without_heads_is_no_collection(tmp_path: Path) -> None:
    with pytest.raises(ParticipantsTableError, match=r"no sub-\*"):
        bids(laid(tmp_path / "set", TABLE, "sub-ZZ1/anat/sub-ZZ1_T2w.nii"))
    (tmp_path / "set/participants.tsv").unlink()
    with pytest.raises(ParticipantsTableError, match="cannot be read"):
        bids(tmp_path / "set")


def test_a_scan_has_an_age_that_somebody_can_have() -> None:
    for age in (-1.0, 121.0, float("nan")):
        with pytest.raises(ValueError, match="age"):
            HeadScan("sub-1", "", Path(), age)
