"""Pulling, against a real Orthanc."""

from __future__ import annotations

import datetime as dt
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from pydicom import dcmread
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset

from agent.pacs.archive import ArchiveConfig, ArchiveError, ArchiveQuery
from agent.pacs.dimse.config import Caller, ListenerSettings
from agent.pacs.dimse.listener_process import Listener
from agent.pacs.dimse.retrieve import RetrievalProgress, Retriever
from agent.pacs.schedule import Hours
from agent.pacs.tls import Tls
from agent.storage.spool import ReceivedFile
from tests.support.archives import rogue_move
from tests.support.pacs import Pacs, make_instances, orthanc, uid_of
from tests.support.pki import Authority
from tests.support.ports import free_port
from tests.support.pulling import KEY, Note, Site, data_set, killed_after, pulled, pulling

COUNT = 60


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """60 instances of 5 patients, MR and CT in every study."""
    return make_instances(tmp_path_factory.mktemp("files"), COUNT, patients=5, modalities=("MR", "CT"))


@pytest.fixture(scope="module")
def listener_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def pacs(tmp_path_factory: pytest.TempPathFactory, files: list[Path], listener_port: int) -> Iterator[Pacs]:
    """An Orthanc which holds them."""
    with orthanc(tmp_path_factory.mktemp("orthanc"), modalities={"LAZARET": ("127.0.0.1", listener_port)}) as running:
        running.store(files)
        assert running.count() == COUNT
        yield running


def remote_of(pacs: Pacs) -> ArchiveConfig:
    return ArchiveConfig(
        "pacs", pacs.aet, pacs.host, pacs.dicom_port, "LAZARET", connect_seconds=30.0, answer_seconds=30.0
    )


def pushed(files: Sequence[Path]) -> dict[str, bytes]:
    return {str(dcmread(path).SOPInstanceUID): data_set(path.read_bytes()) for path in files}


# --- finding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        (ArchiveQuery(), lambda ds: True),
        (ArchiveQuery(modalities=("MR",)), lambda ds: ds.Modality == "MR"),
        (ArchiveQuery(modalities=("MR", "CT")), lambda ds: True),
        (ArchiveQuery(modalities=("US",)), lambda ds: False),
        (ArchiveQuery(patients=("PAT-1", "PAT-3")), lambda ds: ds.PatientID in ("PAT-1", "PAT-3")),
        (ArchiveQuery(patients=("PAT",)), lambda ds: False),
        (
            ArchiveQuery(accessions=("ACC-2",), modalities=("CT",)),
            lambda ds: ds.AccessionNumber == "ACC-2" and ds.Modality == "CT",
        ),
        (ArchiveQuery(patients=("PAT-0",), accessions=("ACC-4",)), lambda ds: ds.PatientID in ("PAT-0", "PAT-4")),
        (ArchiveQuery(until=dt.date(2024, 1, 14)), lambda ds: ds.StudyDate <= "20240114"),
        (ArchiveQuery(since=dt.date(2024, 1, 15)), lambda ds: ds.StudyDate >= "20240115"),
        (ArchiveQuery(since=dt.date(2025, 1, 1)), lambda ds: False),
        (ArchiveQuery(body_part="HEAD"), lambda ds: True),
        (ArchiveQuery(body_part="KNEE"), lambda ds: False),
    ],
)
def test_exactly_what_the_query_says_is_fetched(
    pacs: Pacs, files: list[Path], tmp_path: Path, query: ArchiveQuery, wanted: Callable[[Dataset], bool]
) -> None:
    report = pulled(replace(remote_of(pacs), query=query), site := Site(tmp_path))
    expected = {str(ds.SOPInstanceUID) for ds in map(dcmread, files) if wanted(ds)}
    assert set(site.bodies()) == expected
    assert report.fetched == report.expected == len(expected)


def test_more_matches_than_allowed_are_an_error_and_not_a_part_of_them(pacs: Pacs, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="max_matches"):
        pulled(replace(remote_of(pacs), max_matches=3), site := Site(tmp_path))
    assert site.room.names() == []


# --- fetching -------------------------------------------------------------------------------------


def test_what_comes_by_c_get_is_what_was_pushed_byte_for_byte(pacs: Pacs, files: list[Path], tmp_path: Path) -> None:
    seen: list[RetrievalProgress] = []
    site = Site(tmp_path)
    report = Retriever(remote_of(pacs), site.ports(seen.append)).run()
    assert {uid: data_set(body) for uid, body in site.bodies().items()} == pushed(files)
    assert (report.studies, report.fetched, report.missing, report.unasked) == (5, COUNT, 0, 0)
    assert report.complete
    assert seen[-1] == RetrievalProgress(5, 5, COUNT, COUNT)
    told = [(arrival.road, arrival.source) for arrival in map(site.room.open, site.room.names())]
    assert set(told) == {("pull", "pacs")}


def test_compressed_images_come_as_they_are_stored(tmp_path: Path) -> None:
    names = ("693_J2KI.dcm", "MR_small_RLE.dcm", "MR_small_jp2klossless.dcm", "MR_small_jpeg_ls_lossless.dcm")
    names += ("JPGExtended.dcm", "MR_small_implicit.dcm", "SC_rgb_jpeg_dcmtk.dcm")
    paths = []
    for i, name in enumerate(names):  # several of them are the same object in other clothes
        ds = dcmread(str(get_testdata_file(name)))
        ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uid_of(name)
        ds.SeriesInstanceUID, ds.PatientID = uid_of("series", ds.Modality), f"PAT-{i}"
        ds.StudyInstanceUID = uid_of("study", ds.Modality)
        ds.save_as(tmp_path / name)
        paths.append(tmp_path / name)
    with orthanc(tmp_path / "o") as pacs:
        pacs.store(paths)
        pulled(remote_of(pacs), site := Site(tmp_path / "site"))
    bodies = site.bodies()
    for name, path in zip(names, paths, strict=True):
        (tmp_path / "got.dcm").write_bytes(bodies[uid_of(name)])
        sent, got = dcmread(path), dcmread(tmp_path / "got.dcm")
        assert got.file_meta.TransferSyntaxUID == sent.file_meta.TransferSyntaxUID, name
        assert got.PixelData == sent.PixelData, name


def listening(site: Site, port: int) -> Listener:
    """The agent's own listener, in front of the same room."""
    callers = (Caller("TESTPACS", ("127.0.0.1",)),)
    settings = ListenerSettings("LAZARET", callers, plain_tcp=True, port=port, workers=1)
    return Listener(replace(settings, full_at=1.0, least_free_bytes=0), site.room.folder, KEY)


def test_what_comes_by_c_move_is_what_was_pushed_byte_for_byte(
    pacs: Pacs, files: list[Path], tmp_path: Path, listener_port: int
) -> None:
    site = Site(tmp_path)
    with listening(site, listener_port):
        report = pulled(replace(remote_of(pacs), mode="move"), site)
        assert {uid: data_set(body) for uid, body in site.bodies().items()} == pushed(files)
        assert (report.fetched, report.missing) == (COUNT, 0)
        site.note = Note()
        assert (again := pulled(replace(remote_of(pacs), mode="move"), site)).had == COUNT
        assert again.fetched == 0
        assert again.trouble == report.trouble == ""


def test_a_move_nobody_receives_is_counted_as_missing(pacs: Pacs, tmp_path: Path) -> None:
    remote = replace(
        remote_of(pacs), mode="move", retries=1, query=ArchiveQuery(patients=("PAT-1",), modalities=("CT",))
    )
    report = pulled(remote, Site(tmp_path))
    assert (report.fetched, report.missing, report.incomplete, report.complete) == (0, 6, 1, False)
    assert "could not deliver to our listener LAZARET" in report.trouble


def test_a_destination_the_archive_does_not_know_is_reported(pacs: Pacs, tmp_path: Path) -> None:
    remote = replace(remote_of(pacs), mode="move", destination="NOWHERE", retries=1)
    report = pulled(remote, Site(tmp_path))
    assert (report.fetched, report.missing) == (0, COUNT)
    assert report.status == 0xC000  # what Orthanc says to it; others say A801, which ends the run
    with rogue_move(0xA801) as port, pytest.raises(ArchiveError, match="destination of C-MOVE"):
        pulled(replace(remote, aet="ROGUE", port=port), Site(tmp_path / "2"))


def test_four_associations_fetch_each_instance_once(pacs: Pacs, files: list[Path], tmp_path: Path) -> None:
    report = pulled(replace(remote_of(pacs), associations=4), site := Site(tmp_path))
    assert set(site.bodies()) == set(pushed(files))
    assert report.fetched == COUNT


def test_only_what_is_missing_is_fetched(pacs: Pacs, files: list[Path], tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.elsewhere = set(list(pushed(files))[::2])
    report = pulled(remote_of(pacs), site)
    assert (report.had, report.fetched, report.unasked, report.duplicates) == (30, 30, 0, 0)
    assert set(site.bodies()) == set(pushed(files)) - site.elsewhere


def test_a_complete_study_is_asked_for_again_only_when_it_has_grown(tmp_path: Path) -> None:
    made = make_instances(tmp_path / "f", 22, patients=2)
    with orthanc(tmp_path / "o") as pacs:
        pacs.store(made[:20])
        site = Site(tmp_path / "site")
        assert pulled(remote_of(pacs), site).fetched == 20
        report = pulled(remote_of(pacs), site)
        assert (report.studies, report.unchanged, report.expected) == (2, 2, 0)
        pacs.store(made[20:21])
        report = pulled(remote_of(pacs), site)
        assert (report.unchanged, report.expected, report.had, report.fetched) == (1, 11, 10, 1)
        site.note = Note()
        assert pulled(remote_of(pacs), site).had == 21
    assert len(site.bodies()) == 21


def test_another_query_does_not_take_over_what_was_complete_for_the_first(pacs: Pacs, tmp_path: Path) -> None:
    site = Site(tmp_path)
    pulled(replace(remote_of(pacs), query=ArchiveQuery(modalities=("MR",))), site)
    assert pulled(remote_of(pacs), site).fetched == COUNT // 2


def test_one_study_that_cannot_be_asked_about_does_not_hold_up_the_others(tmp_path: Path) -> None:
    many = make_instances(tmp_path / "f", 12, patients=1, seed="many")
    few = make_instances(tmp_path / "f", 6, patients=3, seed="few")
    with orthanc(tmp_path / "o") as pacs:
        pacs.store([*many, *few])
        report = pulled(replace(remote_of(pacs), max_matches=10), site := Site(tmp_path / "site"))
        again = pulled(replace(remote_of(pacs), max_matches=10, runs=2), site)
        last = pulled(replace(remote_of(pacs), max_matches=10, runs=2), site)
    assert set(site.bodies()) == set(pushed(few))
    assert (report.failed, report.fetched, report.complete) == (1, 6, False)
    assert (again.failed, again.unchanged) == (1, 3)
    assert (last.given_up, last.unchanged, last.complete) == (1, 4, False)


@pytest.mark.parametrize("mode", ["get", "move"])
def test_an_archive_that_lost_two_files_sends_all_others_and_is_not_asked_for_ever(
    files: list[Path], tmp_path: Path, listener_port: int, mode: Literal["get", "move"]
) -> None:
    lost = {str(dcmread(files[i]).SOPInstanceUID) for i in (10, 21)}  # of two studies
    whole = {"PAT-2", "PAT-3", "PAT-4"}
    site = Site(tmp_path / "site")
    with orthanc(tmp_path / "o", modalities={"LAZARET": ("127.0.0.1", listener_port)}) as pacs:
        pacs.store(files)
        pacs.lose(lost)
        with listening(site, listener_port):
            remote = replace(remote_of(pacs), mode=mode, runs=2)
            report = pulled(remote, site)
            assert set(site.bodies()) == set(pushed(files)) - lost
            assert (report.fetched, report.missing, report.incomplete, report.failed) == (58, 2, 2, 2)
            assert (report.status, report.complete) == (0xC000, False)
            again = pulled(remote, site)  # the failing studies are all that is left: no error of the archive
            assert (again.unchanged, again.failed, again.missing) == (len(whole), 2, 2)
            after = pulled(remote, site)
    assert (after.unchanged, after.given_up, after.missing, after.failed, after.complete) == (5, 2, 2, 0, False)


def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    certificate, key = authority.agent("site-1")
    made = make_instances(tmp_path / "f", 5)
    with orthanc(tmp_path / "o", authority=authority) as pacs:
        pacs.store(made)
        good = replace(remote_of(pacs), tls=Tls(certificate, key, authority.ca))
        pulled(good, site := Site(tmp_path / "site"))
        assert {uid: data_set(body) for uid, body in site.bodies().items()} == pushed(made)
        with pytest.raises(ArchiveError, match="certificate"):
            pulled(replace(good, tls=Tls(certificate, key, stranger.ca)), Site(tmp_path / "2"))
        with pytest.raises(ArchiveError, match="cannot be read"):
            pulled(replace(good, tls=Tls(tmp_path / "none", key, authority.ca)), Site(tmp_path / "3"))


# --- refusals of the archive ----------------------------------------------------------------------


def test_each_refusal_says_what_to_do(pacs: Pacs, tmp_path: Path) -> None:
    good = remote_of(pacs)
    for wrong, sentence in (
        (replace(good, calling="ROGUE"), "does not know this site's AE title"),
        (replace(good, aet="OTHER"), "its AE title is not the one"),
        (replace(good, port=free_port()), "nothing answers"),
        (
            replace(good, port=pacs.http_port, answer_seconds=5.0),
            "answers too slowly|bytes that are not DICOM|connection ended|not answer",
        ),
    ):
        with pytest.raises(ArchiveError, match=sentence):
            pulled(wrong, Site(tmp_path))


def test_a_disk_that_is_too_full_ends_the_pull_and_says_so(pacs: Pacs, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="disk"):
        pulled(replace(remote_of(pacs), least_free_bytes=2**62), site := Site(tmp_path))
    assert site.room.names() == []


# --- kills ----------------------------------------------------------------------------------------


def test_a_puller_killed_again_and_again_loses_and_doubles_nothing(
    pacs: Pacs, files: list[Path], tmp_path: Path
) -> None:
    command, had = pulling(tmp_path, pacs.aet, pacs.dicom_port), -1
    for steps, wait in ((1, 0.0), (4, 0.001), (9, 0.002), (14, 0.003), (20, 0.0)):
        killed_after(steps, command, lambda wait=wait: time.sleep(wait))  # type: ignore[misc]
        have = len(Site(tmp_path).bodies())
        assert had <= have < COUNT
        had = have
    assert had > 20
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("ended\n")
    assert {uid: data_set(body) for uid, body in Site(tmp_path).bodies().items()} == pushed(files)


def test_an_archive_killed_midway_and_restarted_is_pulled_to_the_end(files: list[Path], tmp_path: Path) -> None:
    with orthanc(tmp_path / "o") as pacs:
        pacs.store(files)
        site = Site(tmp_path / "site")
        kills: list[int] = []

        def kill(progress: RetrievalProgress) -> None:
            if progress.instances_done in (5, 30) and progress.instances_done not in kills:
                kills.append(progress.instances_done)
                pacs.kill()

        def rest(_seconds: float) -> None:
            if not pacs.running():
                pacs.restart()

        ports = replace(site.ports(kill), sleep=rest)
        report = Retriever(remote_of(pacs), ports).run()
        assert kills == [5, 30]
    assert report.complete
    assert {uid: data_set(body) for uid, body in site.bodies().items()} == pushed(files)


def test_an_archive_that_stays_away_ends_the_run_and_the_next_fetches_the_rest(
    files: list[Path], tmp_path: Path
) -> None:
    with orthanc(tmp_path / "o") as pacs:
        pacs.store(files)
        site = Site(tmp_path / "site")

        def kill(progress: RetrievalProgress) -> None:
            if progress.instances_done == 20:
                pacs.kill()

        with pytest.raises(ArchiveError, match="nothing answers"):
            Retriever(remote_of(pacs), site.ports(kill)).run()
        came = len(site.bodies())
        assert 20 <= came < COUNT
        pacs.restart()
        report = pulled(remote_of(pacs), site)
    assert report.fetched == COUNT - came
    assert {uid: data_set(body) for uid, body in site.bodies().items()} == pushed(files)


# --- hours and rate -------------------------------------------------------------------------------


def at(hour: int, minute: int = 0, second: int = 0) -> dt.datetime:
    return dt.datetime(2026, 3, 2, hour, minute, second)


def test_outside_its_hours_the_archive_is_not_even_called(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.clock.at = at(21)
    nobody = ArchiveConfig(
        "pacs", "X", "127.0.0.1", free_port(), "LAZARET", hours="22:00-06:00", outside_hours="stop"
    )
    report = pulled(nobody, site)
    assert (report.stopped, report.studies, report.complete, report.asked) == (True, 0, False, False)
    assert site.clock.slept == 0


def test_a_pull_waits_for_its_hours(pacs: Pacs, tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.clock.at = at(21, 30)
    told: list[dt.datetime] = []
    remote = replace(remote_of(pacs), hours="22:00-06:00")
    report = Retriever(remote, replace(site.ports(), waiting=told.append)).run()
    assert told == [at(22)]
    assert report.asked
    assert report.complete
    assert 1800 <= site.clock.slept <= 1810


def test_when_the_hours_end_midway_the_rest_comes_the_next_night(
    pacs: Pacs, files: list[Path], tmp_path: Path
) -> None:
    site = Site(tmp_path)
    site.clock.at = at(5, 59, 30)
    remote = replace(remote_of(pacs), hours="22:00-06:00", per_minute=60)  # one a second: thirty are left this night
    when: list[dt.datetime] = []
    report = Retriever(remote, site.ports(lambda _progress: when.append(site.clock.at))).run()
    assert report.complete
    assert set(site.bodies()) == set(pushed(files))
    hours = Hours.parse("22:00-06:00")
    second = dt.timedelta(seconds=1)  # the one that an instance waits for its turn
    assert all(hours.hold(moment) or hours.hold(moment - second) for moment in when)
    assert min(when) < at(6) < at(22) <= max(when)
    stopped = Site(tmp_path / "stop")
    stopped.clock.at = at(5, 59, 30)
    report = pulled(replace(remote, outside_hours="stop"), stopped)
    assert report.stopped
    assert 0 < len(stopped.bodies()) < COUNT


@pytest.mark.parametrize("associations", [1, 3])
def test_no_minute_sees_more_instances_than_the_cap(pacs: Pacs, tmp_path: Path, associations: int) -> None:
    site = Site(tmp_path)
    moments: list[dt.datetime] = []
    put = site.room.put

    def noted(arrival: ReceivedFile) -> str:
        moments.append(site.clock.at)
        return put(arrival)

    site.room.put = noted  # type: ignore[method-assign]
    report = pulled(replace(remote_of(pacs), per_minute=20, associations=associations), site)
    assert report.complete
    assert moments[-1] - moments[0] >= dt.timedelta(minutes=60 / 20) - dt.timedelta(seconds=10)
