"""Ingest when things go wrong: two processes, faults, junk under a real UID, corrections, a patient's no."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest

from agent.errors import SiteConfigError
from agent.ingest.context import IngestContext, open_ingest, purge_pending
from agent.ingest.folders import Folder, FolderWatcher
from agent.ingest.pipeline import IngestReport
from agent.storage import projects
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.site_directory import SiteDirectory
from agent.storage.spool import ReceivedFile
from tests.support.ingest_site import ingest_site
from tests.support.pacs import make_instances


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return ingest_site(tmp_path)


@pytest.fixture
def way(site: Path) -> Iterator[IngestContext]:
    with open_ingest(SiteDirectory(site), "main") as opened:
        yield opened


def instances(tmp_path: Path, count: int, seed: str = "") -> list[tuple[str, bytes]]:
    """SOP Instance UID and bytes."""
    made = make_instances(tmp_path / f"made{seed}", count, modalities=("CT",), seed=seed)
    return [(str(pydicom.dcmread(path).SOPInstanceUID), path.read_bytes()) for path in made]


def let_in(way: IngestContext) -> IngestReport:
    with way.intake() as intake:
        return intake.run(way.waiting())


def changed(data: bytes) -> bytes:
    """The same instance with another picture."""
    return data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]


def test_two_processes_share_what_waits_and_nothing_is_lost_or_counted_twice(
    way: IngestContext, tmp_path: Path
) -> None:
    for uid, data in instances(tmp_path, 12):
        way.inbox.put(ReceivedFile("dimse", "PACS", data, instance=uid))
    names = way.inbox.names()
    descriptors = [way.inbox.claim(name)[1] for name in names[:4]]  # another process works with these
    (way.inbox.folder / names[4]).unlink()  # and has finished with this one
    assert let_in(way) == IngestReport(7, 7, 0, {})
    for descriptor in descriptors:
        os.close(descriptor)
    assert let_in(way) == IngestReport(4, 4, 0, {})
    assert way.inbox.names() == []


def test_after_a_fault_of_the_vault_the_next_run_begins_with_nothing_of_the_last(
    way: IngestContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uid, data in instances(tmp_path, 12):
        way.inbox.put(ReceivedFile("dimse", "PACS", data, instance=uid))

    def full(_records: object) -> None:
        raise VaultError("the disk is full")

    with way.intake() as intake:
        with monkeypatch.context() as patched:
            patched.setattr(way.vault, "keep_all", full)
            with pytest.raises(VaultError):
                intake.run(way.waiting())
        assert len(way.inbox.names()) == 12
        assert intake.run(way.waiting()) == IngestReport(12, 12, 0, {})
    assert way.inbox.names() == []


def test_what_was_refused_stays_whatever_is_sent_under_its_uid_later(way: IngestContext, tmp_path: Path) -> None:
    ((uid, data),) = instances(tmp_path, 1)
    for body in (data, changed(data), data, changed(data)):
        way.inbox.put(ReceivedFile("dimse", "PACS", body, instance=uid))
        let_in(way)
    (entry,) = way.quarantine.entries()
    assert (entry.code, entry.attempts) == ("conflicting_instance", 2)
    assert way.quarantine.open(entry.name).body == changed(data)
    way.inbox.put(ReceivedFile("dimse", "EVIL", b"junk" * 100, instance=uid))
    let_in(way)
    assert way.quarantine.counts() == {"conflicting_instance": 1, "not_dicom": 1}
    assert way.quarantine.open(entry.name).body == changed(data)


def test_junk_under_a_real_uid_keeps_nobodys_image_out(way: IngestContext, tmp_path: Path) -> None:
    ((uid, data),) = instances(tmp_path, 1)
    known = way.known([("pull", "main"), ("dimse", "PACS")])
    for source in ("EVIL", "PACS"):
        way.inbox.put(ReceivedFile("dimse", source, data[:400], instance=uid))
        let_in(way)
        assert not known(uid), "neither another sender nor a transfer that was cut counts as the image"
    way.inbox.put(ReceivedFile("pull", "main", data, instance=uid))
    assert known(uid)
    assert let_in(way).kept == 1
    assert known(uid)


def test_another_patients_picture_under_a_real_uid_keeps_nobodys_image_out(
    way: IngestContext, tmp_path: Path
) -> None:
    ((uid, data),) = instances(tmp_path, 1)
    other = pydicom.dcmread(io.BytesIO(data))
    other.PatientID, stream = "SOMEBODY-ELSE", io.BytesIO()
    other.save_as(stream, enforce_file_format=True)
    known = way.known([("pull", "main"), ("dimse", "PACS")])
    way.inbox.put(ReceivedFile("dimse", "EVIL", stream.getvalue(), instance=uid))
    assert let_in(way).kept == 1
    assert not known(uid), "the archive is still asked for the patient's own"
    way.inbox.put(ReceivedFile("pull", "main", data, instance=uid))
    assert let_in(way).kept == 1
    assert known(uid)
    assert len({head.person for head in way.vault.heads()}) == 2


def test_one_uid_of_two_patients_in_one_archive_is_asked_for_once(way: IngestContext, tmp_path: Path) -> None:
    """The limit: whatever became of the one, the other does not come from there, and from elsewhere it does."""
    here, elsewhere = way.known([("pull", "main"), ("dimse", "PACS")]), way.known([("wado", "archive")])
    for (uid, data), modality, refused in zip(instances(tmp_path, 2), ("CT", "US"), (0, 1), strict=True):
        other = pydicom.dcmread(io.BytesIO(data))
        other.PatientID, other.Modality, stream = "SOMEBODY-ELSE", modality, io.BytesIO()
        other.save_as(stream, enforce_file_format=True)
        assert not here(uid)
        way.inbox.put(ReceivedFile("pull", "main", stream.getvalue(), instance=uid))
        assert here(uid), "it waits"
        assert sum(let_in(way).quarantined.values()) == refused
        assert here(uid), "it is in the vault, or refused for what it is"
        assert not elsewhere(uid)


def test_what_came_by_another_road_is_asked_for_once_and_then_known(way: IngestContext, tmp_path: Path) -> None:
    ((uid, data), (second, more)) = instances(tmp_path, 2)
    known = way.known([("pull", "main")])
    for one, body in ((uid, data), (second, more)):
        way.inbox.put(ReceivedFile("stow", "SENDER", body, instance=one))
    assert let_in(way).kept == 2
    assert not known(uid)
    way.inbox.put(ReceivedFile("pull", "main", data, instance=uid))
    way.inbox.put(
        ReceivedFile("pull", "main", more[:-2] + b"\0\0", instance=second)
    )  # another file of the same instance
    report = let_in(way)
    assert (report.duplicates, report.quarantined) == (1, {"conflicting_instance": 1})
    assert known(uid)
    assert not known(second), "what was refused for a conflict may come better"
    projects.opt_out(way.home, way.who.person("", "PAT-0"))
    assert not known(uid), "and nothing of a patient who has opted out is noted"


def test_the_same_bytes_twice_are_known_only_when_the_first_one_came_in(site: Path, way: IngestContext) -> None:
    folder = site.parent / "input"
    image = nibabel.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4)).to_bytes()
    for name in ("a.nii", "b.nii"):
        (folder / name).write_bytes(image)
    (folder / "nifti.csv").write_text("file,patient_id\nb.nii,P-1\n")
    with way.intake() as intake:
        report = intake.run(way.lying(way.usual(), way.lists(way.usual())))
    assert (report.kept, report.quarantined) == (1, {"nifti_without_patient": 1})


def test_a_file_that_nobody_knows_and_that_comes_three_times_is_refused_three_times(way: IngestContext) -> None:
    for source in ("A", "B", "C"):
        way.inbox.put(ReceivedFile("stow", source, b"the same bytes"))
    assert let_in(way).quarantined == {"not_dicom": 3}
    (entry,) = way.quarantine.entries()
    assert entry.attempts == 3


def test_a_run_that_is_told_to_stop_leaves_the_rest_waiting(way: IngestContext, tmp_path: Path) -> None:
    for uid, data in instances(tmp_path, 6):
        way.inbox.put(ReceivedFile("dimse", "PACS", data, instance=uid))
    asked = iter([False, False, True])
    with way.intake() as intake:
        assert intake.run(way.waiting(), stopping=lambda: next(asked)).kept == 2
    assert len(way.inbox.names()) == 4


def test_a_watched_file_is_given_again_until_it_was_taken(tmp_path: Path, way: IngestContext) -> None:
    drop = tmp_path / "drop"
    make_instances(drop, 3, modalities=("CT",))
    now = 1e12
    watched = FolderWatcher(Folder(drop, watch=True, settle_s=0.1), lambda: now)
    lists = way.lists(watched.folder)
    assert watched.rested(lists, (), 2**20) == []
    ready = watched.rested(lists, (), 2**20)
    assert len(ready) == len(watched.rested(lists, (), 2**20)) == 3
    watched.taken(ready)
    assert watched.rested(lists, (), 2**20) == []


def test_a_file_whose_name_is_not_utf_8_can_be_tried_again(site: Path, way: IngestContext, tmp_path: Path) -> None:
    ((_, data),) = instances(tmp_path, 1)
    path = os.fsencode(site.parent / "input") + b"/M\xfcller.dcm"
    Path(os.fsdecode(path)).write_bytes(data[:500])
    lists = way.lists(way.usual())
    with way.intake() as intake:
        assert sum(intake.run(way.lying(way.usual(), lists)).quarantined.values()) == 1
        Path(os.fsdecode(path)).write_bytes(data)
        assert intake.run(way.refused([e.name for e in way.quarantine.entries()])).kept == 1


def test_a_patient_who_says_no_is_gone_from_the_rooms_and_nothing_of_it_is_sealed_again(
    way: IngestContext, tmp_path: Path
) -> None:
    (uid, data), (other_uid, other) = instances(tmp_path, 2)
    person = way.who.person("", "PAT-0")
    way.inbox.put(ReceivedFile("dimse", "PACS", data, instance=uid))
    way.inbox.put(ReceivedFile("dimse", "PACS", other, instance=other_uid))
    way.quarantine.refuse("a" * 32, "burned_in_risk", ReceivedFile("dimse", "PACS", changed(data)), "d" * 32)
    way.quarantine.refuse("b" * 32, "burned_in_risk", ReceivedFile("dimse", "PACS", changed(other)), "e" * 32)
    projects.opt_out(way.home, person)
    assert purge_pending(way, {person}) == 2
    assert [e.name for e in way.quarantine.entries()] == ["b" * 32]
    assert let_in(way).kept == 1
    way.inbox.put(ReceivedFile("dimse", "PACS", data, instance=uid))
    assert let_in(way).quarantined == {"opted_out": 1}
    assert way.inbox.names() == []
    assert [e.name for e in way.quarantine.entries()] == ["b" * 32]


def test_the_issuer_cannot_change_once_patients_were_counted_by_it(site: Path) -> None:
    with open_ingest(SiteDirectory(site), "main"):
        pass
    (site / "ingest.toml").write_text('[site]\nissuer = "Elsewhere"\n')
    with pytest.raises(SiteConfigError, match="counted twice"), open_ingest(SiteDirectory(site), "main"):
        pass


def test_a_corrected_list_gives_a_volume_to_its_patient(site: Path, way: IngestContext) -> None:
    folder = site.parent / "input"
    image = nibabel.Nifti1Image(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4))
    (folder / "head.nii").write_bytes(image.to_bytes())
    shutil.copy(folder / "head.nii", folder / "x.bin")
    persons = []
    for patient in ("WRONG-1", "RIGHT-2"):
        (folder / "nifti.csv").write_text(f"file,patient_id\nhead.nii,{patient}\n")
        with way.intake() as intake:
            report = intake.run(
                [one for one in way.lying(way.usual(), way.lists(way.usual())) if one.path == "head.nii"]
            )
        persons.append((report.kept, report.quarantined))
    assert persons == [(1, {}), (1, {})], "neither patient's volume decides on the other's"
    (alike,) = way.vault.alike()
    assert (len(alike.persons), alike.why) == (2, ("study", "series", "instance")), "whose it is, a person settles"
