"""The first hospital's PACS: a real Orthanc, when one is installed. The demo's agent asks it as any other archive."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deploy.demo.processes import Processes
from protos.common.errors import WorkerError

AET = "DEMOPACS"
CALLER = "LAZARET"


class OrthancError(WorkerError, RuntimeError):
    """Orthanc did not take an image."""


def installed() -> bool:
    """Is there an Orthanc on this machine?"""
    return shutil.which("Orthanc") is not None


def _free_ports() -> tuple[int, int]:
    """Two that are free at once, and so are not the same."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])


@dataclass(slots=True)
class Orthanc:
    """One running Orthanc with a folder of its own."""

    folder: Path
    dicom_port: int
    http_port: int
    password: str

    @classmethod
    def start(cls, folder: Path, processes: Processes) -> Orthanc:
        """Start it on free ports of the loopback, and wait until it answers.

        Args:
            folder: a new one, of its own.
            processes: which end it, when the demo ends.
        Raises:
            DemoError: it ended, or said nothing for three minutes.
        """
        folder.mkdir(parents=True)
        (dicom, http), password = _free_ports(), secrets.token_urlsafe(12)
        caller = {"AET": CALLER, "Host": "127.0.0.1", "Port": 11112, "AllowStore": True}
        caller |= {"AllowEcho": True, "AllowFind": True, "AllowGet": True, "AllowMove": True}
        config = {
            "Name": AET,
            "StorageDirectory": str(folder / "db"),
            "IndexDirectory": str(folder / "db"),
            "HttpPort": http,
            "RemoteAccessAllowed": False,
            "AuthenticationEnabled": True,
            "RegisteredUsers": {"demo": password},
            "HttpCompressionEnabled": False,
            "DicomAet": AET,
            "DicomPort": dicom,
            "DicomCheckCalledAet": True,
            "DicomCheckModalityHost": True,
            "DicomModalities": {"agent": caller},
        }
        (folder / "orthanc.json").write_text(json.dumps(config))
        # without it every answer of Debian's DCMTK waits 46 ms for Nagle's algorithm
        command = ["env", "TCP_NODELAY=1", "Orthanc", str(folder / "orthanc.json")]
        found = cls(folder, dicom, http, password)
        processes.start("Orthanc", command, found._answers, folder / "orthanc.log")
        return found

    def _request(self, path: str, body: bytes | None = None) -> bytes:
        key = base64.b64encode(f"demo:{self.password}".encode()).decode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}{path}", data=body, headers={"Authorization": f"Basic {key}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return bytes(answer.read())

    def _answers(self) -> bool:
        try:
            self._request("/system")
        except OSError:
            return False
        return True

    def load(self, files: Iterable[Path]) -> int:
        """Put images in, as modalities would; how many.

        Raises:
            OrthancError: it did not take one.
        """
        count = 0
        for path in files:
            try:
                self._request("/instances", path.read_bytes())
            except urllib.error.HTTPError:
                raise OrthancError(f"Orthanc did not take {path.name}") from None
            count += 1
        return count

    def table(self) -> str:
        """Its table of ``ingest.toml``."""
        return (
            f'[pacs.orthanc]\naet = "{AET}"\nhost = "127.0.0.1"\nport = {self.dicom_port}\ncalling = "{CALLER}"\n'
            'mode = "get"\n'
        )
