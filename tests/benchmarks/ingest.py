"""Ingest: receiving beside storescp and a stock pynetdicom SCP, WADO-RS beside curl, and reading into the vault.

Every ratio is taken in one run against a peer on the same files. Senders and peers run with TCP_NODELAY=1, or a stall
of 46 ms for every instance is all that is measured.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.ingest.folders import in_folder
from agent.ingest.patient_lists import Lists
from agent.ingest.pipeline import IngestDependencies, IngestPipeline
from agent.storage.quarantine import Quarantine
from agent.storage.site_database import SiteDatabase
from agent.storage.vault import Vault
from tests.benchmarks import receive, wado
from tests.benchmarks.report import Report, Row
from tests.support.pacs import make_instances

SIDE = 512
COUNT = 400
MANY = 20_000
# as the design names them; the other ratios keep the names that their own part gives them
_KEYS = {
    "one_vs_pynetdicom": "one_association_vs_pynetdicom",
    "four_vs_storescp": "four_senders_vs_storescp",
    "WADO-RS into the room / curl to disk": "wado_vs_curl_to_disk",
}
RULES = AdmissionRules(modalities=frozenset({"CT"}))


def _read(folder: Path, work: Path, jobs: int, progress: Callable[[int], None] = lambda _done: None) -> float:
    """Seconds to read, de-identify and keep a folder's files in a new vault."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    vault = Vault(SiteDatabase(work / "vault.db", b"n" * 32), work / "main.db", b"v" * 32)
    ports = IngestDependencies(RULES, Deidentifier(b"k" * 32), vault, Quarantine(work / "quarantine", b"q" * 32))
    found = in_folder(folder, Lists(), (), RULES.max_bytes)
    try:
        with IngestPipeline(ports, jobs) as intake:
            intake.run(found[:jobs])  # the workers start, and import their parsers, outside of what is measured
            began = time.perf_counter()
            report = intake.run(found[jobs:], progress)
            seconds = time.perf_counter() - began
    finally:
        vault.close()
    if report.kept != len(found) - jobs:
        raise RuntimeError(f"not all were kept: {dict(report.quarantined)}")
    return seconds / report.kept


def _memory(folder: Path, work: Path) -> tuple[float, float]:
    """Resident megabytes of the agent's process after a tenth and after all of many small instances."""
    peaks: list[float] = []

    def look(done: int) -> None:
        if done % (MANY // 10) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])  # now, not the most that ever was
            peaks.append(pages * resource.getpagesize() / 2**20)

    _read(folder, work, 2, look)
    return peaks[0], peaks[-1]


def reading(work: Path) -> tuple[list[Row], dict[str, float]]:
    """Reading with one and with two workers, uncompressed and JPEG 2000."""
    raw = work / "raw"
    raw.mkdir()
    make_instances(raw, COUNT, patients=4, modalities=("CT",), size=SIDE)
    packed = work / "j2k"
    packed.mkdir()
    for path in sorted(raw.iterdir())[:100]:
        subprocess.run(["gdcmconv", "--j2k", str(path), str(packed / path.name)], check=True)
    rows, rate = [], {}
    for name, folder in (("uncompressed", raw), ("JPEG 2000", packed)):
        for jobs in (1, 2):
            rate[name, jobs] = 1 / min(_read(folder, work / "vault", jobs) for _ in range(3))
            rows.append(Row(f"read + de-identify + keep, {name}, {jobs} worker(s)", rate[name, jobs], "inst/s"))
    scales = rate["JPEG 2000", 2] / rate["JPEG 2000", 1]
    shutil.rmtree(raw)
    shutil.rmtree(packed)
    return rows, {"jpeg2000_two_workers_vs_one": scales}


def many(work: Path) -> tuple[list[Row], dict[str, float]]:
    """Is memory flat over many instances?"""
    small = work / "small"
    small.mkdir()
    make_instances(small, MANY, patients=200, modalities=("CT",), size=32)
    first, last = _memory(small, work / "vault")
    shutil.rmtree(small)
    return [Row(f"resident after {MANY // 10}", first, "MB"), Row(f"resident after {MANY}", last, "MB")], {
        "memory_last_vs_first_tenth": last / first
    }


def main() -> Report:
    """All of it: some minutes."""
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for peer in (receive.main, wado.main):
            report = peer()
            rows += report.rows
            ratios |= {_KEYS.get(key, key): value for key, value in report.ratios.items()}
        for part in (reading, many):
            work = Path(place) / part.__name__
            work.mkdir()
            more, given = part(work)
            rows += more
            ratios |= given
            shutil.rmtree(work)
    return Report(tuple(rows), ratios)
