"""WADO-RS of one series from a real Orthanc into the spool, beside curl of the same URL to disk and to nothing.

In turn, several times, so that whatever else the machine does is shared; the best of each counts. Also the archive's
own client library on the same URL, which is what our reader stands instead of.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import requests
from dicomweb_client.web import DICOMwebClient

from agent.pacs.archive import ArchiveQuery
from agent.pacs.dicomweb.config import DicomWebArchive
from agent.pacs.dicomweb.qido import ArchiveSession, QidoClient, QidoSeries
from agent.pacs.dicomweb.wado import InstanceSink, WadoRetriever
from agent.storage.spool import Spool
from tests.benchmarks.report import Report, Row
from tests.support.pacs import Pacs, make_instances, orthanc, uid_of

INSTANCES: Final = 300
SIZE: Final = 512
TURNS: Final = 5
SEED: Final = "bench"


def main() -> Report:
    """Measure."""
    folder = Path(tempfile.mkdtemp(prefix="wado-"))
    try:
        with orthanc(folder / "orthanc") as pacs:
            pacs.store(make_instances(folder / "files", INSTANCES, patients=1, size=SIZE, seed=SEED))
            shutil.rmtree(folder / "files")
            return _measure(pacs, folder)
    finally:
        shutil.rmtree(folder)


def _measure(pacs: Pacs, folder: Path) -> Report:
    study, series = uid_of("study", f"{SEED}0"), uid_of("series", f"{SEED}0", "MR")
    url = f"{pacs.dicomweb_url}/studies/{study}/series/{series}"
    session = requests.Session()
    session.auth = (pacs.user, pacs.password)
    client = DICOMwebClient(pacs.dicomweb_url, session=session)
    web = _web(pacs, folder)
    with ArchiveSession(web) as own:
        found = list(QidoClient(web, own, time.sleep).series(ArchiveQuery()))
    peers: dict[str, Callable[[], object]] = {
        "curl to disk": lambda: _curl(pacs, url, folder / "curl"),
        "curl to nothing": lambda: _curl(pacs, url, Path("/dev/null")),
        "dicomweb-client, retrieve_series, nothing kept": lambda: client.retrieve_series(study, series),
        "this, into the room": lambda: _pull(web, folder, found),
        "this, into the room, every instance synced": lambda: _pull(web, folder, found, durable=True),
        "this, into the room, with the queries for what there is": lambda: _pull(web, folder),
    }
    best = dict.fromkeys(peers, float("inf"))
    for _ in range(TURNS):
        for name, act in peers.items():
            best[name] = min(best[name], _seconds(act))
            shutil.rmtree(folder / "inbox", ignore_errors=True)
    rates = {name: INSTANCES / seconds for name, seconds in best.items()}
    ours, durable = rates["this, into the room"], rates["this, into the room, every instance synced"]
    ratios = {f"WADO-RS into the room / {name}": ours / rates[name] for name in list(peers)[:3]}
    ratios["the same, synced / curl to disk"] = durable / rates["curl to disk"]
    return Report(tuple(Row(name, rate, "inst/s") for name, rate in rates.items()), ratios)


def _seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def _curl(pacs: Pacs, url: str, out: Path) -> None:
    accept = 'Accept: multipart/related; type="application/dicom"; transfer-syntax=*'
    command = ["curl", "-sSf", "-u", f"{pacs.user}:{pacs.password}", "-H", accept, "-o", str(out), url]
    subprocess.run(command, check=True, timeout=300)


def _web(pacs: Pacs, folder: Path) -> DicomWebArchive:
    password = folder / "password"
    password.touch(mode=0o600)
    password.write_text(pacs.password)
    return DicomWebArchive("bench", pacs.dicomweb_url, user=pacs.user, password_file=password, least_free_bytes=0)


def _pull(
    web: DicomWebArchive, folder: Path, found: list[QidoSeries] | None = None, *, durable: bool = False
) -> None:
    """One file each, sealed."""
    room = Spool(folder / "inbox", bytes(32), durable=durable)
    puller = WadoRetriever(web, InstanceSink(room, lambda _uid: False))
    done = puller.bring(found) if found else puller.run(ArchiveQuery())
    assert done.brought == INSTANCES == len(room.names())
