"""The way between a real PACS and the spool, as CI runs it: pushed, pulled, both sides killed."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pydicom import dcmread

from agent.pacs.archive import ArchiveConfig, ArchiveError
from agent.pacs.dimse.config import Caller, ListenerSettings
from agent.pacs.dimse.listener_process import Listener
from agent.pacs.dimse.retrieve import RetrievalProgress, Retriever
from tests.support.pacs import make_instances, orthanc, run
from tests.support.ports import free_port
from tests.support.pulling import KEY, Note, Site, data_set, killed_after, pulled, pulling


def pushed(files: Sequence[Path]) -> dict[str, bytes]:
    return {str(dcmread(path).SOPInstanceUID): data_set(path.read_bytes()) for path in files}


def pulled_by(site: Site) -> dict[str, bytes]:
    return {uid: data_set(body) for uid, body in site.bodies().items()}


def test_five_hundred_with_both_sides_killed_none_is_lost_and_none_doubled(tmp_path: Path) -> None:
    files = make_instances(tmp_path / "files", 500, patients=25, modalities=("MR", "CT"))
    folder, chance, had = tmp_path / "site", random.Random(7), -1
    with orthanc(tmp_path / "orthanc") as pacs:
        pacs.store(files)
        assert pacs.count() == 500
        command = pulling(folder, pacs.aet, pacs.dicom_port)
        for turn in range(6):
            steps = chance.randrange(5, 70)
            if turn % 2:
                killed_after(steps, command, pacs.kill)
                pacs.restart()
                assert pacs.count() == 500
            else:
                killed_after(steps, command, lambda: time.sleep(chance.random() / 200))
            have = len(Site(folder).bodies())
            assert had <= have < 500
            had = have
        assert had > 0
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        assert ended.stdout.endswith("ended\n")
    assert pulled_by(Site(folder)) == pushed(files)


def test_five_hundred_are_pulled_by_either_service_and_a_second_run_asks_for_nothing(tmp_path: Path) -> None:
    files = make_instances(tmp_path / "files", 500, patients=10, modalities=("MR", "CT"))
    want, port = pushed(files), free_port()
    with orthanc(tmp_path / "orthanc", modalities={"LAZARET": ("127.0.0.1", port)}) as pacs:
        pacs.store(files)
        remote = ArchiveConfig("pacs", pacs.aet, pacs.host, pacs.dicom_port, "LAZARET", associations=2)
        got, moved = Site(tmp_path / "got"), Site(tmp_path / "moved")
        assert pulled(remote, got).complete
        callers = (Caller(pacs.aet, ("127.0.0.1",)),)
        settings = ListenerSettings("LAZARET", callers, plain_tcp=True, port=port, workers=1)
        with Listener(replace(settings, full_at=1.0, least_free_bytes=0), moved.room.folder, KEY):
            assert pulled(replace(remote, mode="move"), moved).complete
        for site in (got, moved):
            assert pulled_by(site) == want
            report = pulled(remote, site)
            assert (report.unchanged, report.expected, report.fetched) == (10, 0, 0)
            site.note = Note()
            report = pulled(remote, site)
            assert (report.had, report.fetched) == (500, 0)


def test_what_is_pushed_to_the_listener_is_not_pulled_again(tmp_path: Path) -> None:
    files = make_instances(tmp_path / "files", 40, patients=4)
    site = Site(tmp_path / "site")
    with orthanc(tmp_path / "orthanc") as pacs:
        caller = Caller(pacs.aet, ("127.0.0.1",))
        settings = ListenerSettings("LAZARET", (caller,), plain_tcp=True, port=0, workers=1)
        pacs.store(files)
        with Listener(replace(settings, full_at=1.0, least_free_bytes=0), site.room.folder, KEY) as listener:
            command = ["storescu", "-aet", pacs.aet, "-aec", "LAZARET", "127.0.0.1", str(listener.port)]
            run([*command, *(str(path) for path in files[::2])])
        remote = ArchiveConfig("pacs", pacs.aet, pacs.host, pacs.dicom_port, "LAZARET")
        report = pulled(remote, site)
    assert (report.had, report.fetched) == (20, 20)
    assert pulled_by(site) == pushed(files)


def test_an_archive_killed_while_it_moves_is_asked_for_the_rest(tmp_path: Path) -> None:
    files, port = make_instances(tmp_path / "files", 60, patients=6), free_port()
    site = Site(tmp_path / "site")
    with orthanc(tmp_path / "orthanc", modalities={"LAZARET": ("127.0.0.1", port)}) as pacs:
        pacs.store(files)
        remote = ArchiveConfig("pacs", pacs.aet, pacs.host, pacs.dicom_port, "LAZARET", mode="move", retries=1)
        settings = ListenerSettings(
            "LAZARET", (Caller(pacs.aet, ("127.0.0.1",)),), plain_tcp=True, port=port, workers=1
        )

        def kill(progress: RetrievalProgress) -> None:
            if progress.instances_done == 25:
                pacs.kill()

        with Listener(replace(settings, full_at=1.0, least_free_bytes=0), site.room.folder, KEY):
            with pytest.raises(ArchiveError):
                Retriever(remote, site.ports(kill)).run()
            assert 25 <= len(site.bodies()) < 60
            pacs.restart()
            assert pulled(remote, site).complete
    assert pulled_by(site) == pushed(files)
