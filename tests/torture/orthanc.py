"""A real Orthanc for the comparison: started on free ports of this machine, asked to anonymise patient by patient."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.ports import free_port


def _ask(url: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(work: Path) -> Iterator[tuple[str, int]]:
    """An Orthanc's address and process id.

    Raises:
        FileNotFoundError: Debian's package orthanc is not installed.
    """
    program = shutil.which("Orthanc") or "/usr/sbin/Orthanc"
    port = free_port()
    settings = {
        **{"Name": "TORTURE", "StorageDirectory": str(work / "db"), "IndexDirectory": str(work / "db")},
        **{"HttpPort": port, "RemoteAccessAllowed": False, "AuthenticationEnabled": False, "TcpNoDelay": True},
        **{"DicomServerEnabled": False, "HttpCompressionEnabled": False, "Plugins": [], "SaveJobs": False},
    }
    shutil.rmtree(work, ignore_errors=True)
    (work / "db").mkdir(parents=True)
    (work / "orthanc.json").write_text(json.dumps(settings))
    environment = {**os.environ, "TCP_NODELAY": "1"}
    with (work / "orthanc.log").open("wb") as log:
        process = subprocess.Popen([program, str(work / "orthanc.json")], stdout=log, stderr=log, env=environment)
    try:
        for _ in range(100):
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                _ask(f"http://127.0.0.1:{port}/system")
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(30)


def anonymise(source: Path, target: Path, work: Path) -> tuple[float, int]:
    """Send a folder, have every patient anonymised, fetch what came of each file; (CPU seconds, files)."""
    with running(work) as (url, pid):
        names: dict[str, str] = {}
        files = sorted(source.iterdir())
        for path in files:
            with contextlib.suppress(urllib.error.HTTPError):
                told: Any = json.loads(_ask(f"{url}/instances", path.read_bytes(), "application/dicom"))
                names[told["ID"]] = path.name
        before = _cpu(pid)
        for patient in json.loads(_ask(f"{url}/patients")):
            new: Any = json.loads(_ask(f"{url}/patients/{patient}/anonymize", b'{"Synchronous": true}'))
            for instance in json.loads(_ask(f"{url}/patients/{new['ID']}/instances")):
                origin = _ask(f"{url}/instances/{instance['ID']}/metadata/AnonymizedFrom").decode()
                if origin in names:
                    (target / names[origin]).write_bytes(_ask(f"{url}/instances/{instance['ID']}/file"))
        return _cpu(pid) - before, len(files)
