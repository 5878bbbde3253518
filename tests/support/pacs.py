"""A real PACS for tests: Debian's Orthanc with its DICOMweb plug-in, DCMTK's tools, and small files to put in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import requests
from pydicom import FileDataset, dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import UID, CTImageStorage, ExplicitVRLittleEndian, MRImageStorage, SecondaryCaptureImageStorage

from tests.support.peers import PLUGIN, need
from tests.support.pki import Authority
from tests.support.ports import free_port

# DCMTK's tools are meant by their names, and not pynetdicom's of the same names where these tests' Python is; and
# without the variable every answer of Debian's DCMTK waits 46 ms for Nagle's algorithm
_HERE = str(Path(sys.executable).parent)
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join(p for p in os.environ.get("PATH", os.defpath).split(os.pathsep) if p != _HERE),
    "TCP_NODELAY": "1",
}
SENDER = "SENDER"  # the modality that DCMTK's tools play
# What storescu must be told so that it proposes the transfer syntax of a file, and sends it as it is
_PROPOSE = {
    "1.2.840.10008.1.2": "-xi",
    "1.2.840.10008.1.2.1": "-xe",
    "1.2.840.10008.1.2.2": "-xb",
    "1.2.840.10008.1.2.1.99": "-xd",
    "1.2.840.10008.1.2.5": "-xr",
    "1.2.840.10008.1.2.4.50": "-xy",
    "1.2.840.10008.1.2.4.51": "-xx",
    "1.2.840.10008.1.2.4.57": "-xs",
    "1.2.840.10008.1.2.4.70": "-xs",
    "1.2.840.10008.1.2.4.80": "-xt",
    "1.2.840.10008.1.2.4.81": "-xu",
    "1.2.840.10008.1.2.4.90": "-xv",
    "1.2.840.10008.1.2.4.91": "-xw",
}
_CLASSES = {"CT": CTImageStorage, "MR": MRImageStorage, "OT": SecondaryCaptureImageStorage}


@dataclass(slots=True)
class Pacs:
    """One Orthanc, its database in ``folder``."""

    folder: Path
    aet: str
    host: str
    dicom_port: int
    http_port: int
    user: str
    password: str
    settings: Mapping[str, object]
    authority: Authority | None = None  # who certifies its TLS, and DCMTK's
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def url(self) -> str:
        """Of its REST interface."""
        return f"http://{self.host}:{self.http_port}"

    @property
    def dicomweb_url(self) -> str:
        """Of its DICOMweb services."""
        return f"{self.url}/dicom-web"

    @property
    def log(self) -> str:
        """What it said so far."""
        return (self.folder / "orthanc.log").read_text(errors="replace")

    def request(self, path: str, method: str = "GET", body: bytes | None = None) -> requests.Response:
        """One request to its REST interface."""
        who = (self.user, self.password)
        answer = requests.request(method, self.url + path, data=body, auth=who, timeout=30)
        answer.raise_for_status()
        return answer

    def count(self) -> int:
        """Instances that it holds."""
        return int(self.request("/statistics").json()["CountInstances"])

    def files(self) -> dict[str, bytes]:
        """Every instance it holds as a Part 10 file, by SOP Instance UID."""
        found = {}
        for name in self.request("/instances").json():
            uid = self.request(f"/instances/{name}/simplified-tags").json()["SOPInstanceUID"]
            found[uid] = self.request(f"/instances/{name}/file").content
        return found

    def lose(self, uids: Collection[str]) -> None:
        """Delete their files from its storage, as a failing disk would, and restart it: its database has them yet."""
        lost = 0
        for name in self.request("/instances").json():
            if self.request(f"/instances/{name}/simplified-tags").json()["SOPInstanceUID"] in uids:
                uuid = self.request(f"/instances/{name}/attachments/dicom/info").json()["Uuid"]
                (self.folder / "db" / uuid[:2] / uuid[2:4] / uuid).unlink()
                lost += 1
        assert lost == len(uids)
        self.restart()

    def store(self, paths: Sequence[Path]) -> None:
        """Send files by C-STORE with DCMTK's storescu, each in the transfer syntax it has."""
        by_syntax = defaultdict(list)
        for path in paths:
            by_syntax[str(dcmread(path, stop_before_pixels=True).file_meta.TransferSyntaxUID)].append(str(path))
        for syntax, group in by_syntax.items():
            command = ["storescu", "-R", _PROPOSE[syntax], "-aet", SENDER, "-aec", self.aet, *self._tls_options()]
            for start in range(0, len(group), 500):
                run([*command, self.host, str(self.dicom_port), *group[start : start + 500]])

    def get(self, folder: Path, *keys: str) -> list[Path]:
        """Fetch by C-GET with DCMTK's getscu, e.g. ``get(folder, "StudyInstanceUID=1.2.3")``; the files."""
        folder.mkdir(parents=True, exist_ok=True)
        asked = [part for key in ("QueryRetrieveLevel=STUDY", *keys) for part in ("-k", key)]
        command = ["getscu", "-S", "-B", "-aet", SENDER, "-aec", self.aet, "-od", str(folder), *asked]
        run([*command, self.host, str(self.dicom_port)])
        return sorted(folder.iterdir())

    def _tls_options(self) -> list[str]:
        if self.authority is None:
            return []
        certificate, key = self.authority.agent("dcmtk")
        return ["+tls", str(key), str(certificate), "+cf", str(self.authority.ca), "-rc"]

    def start(self) -> None:
        """Start it on its database, and wait until it answers."""
        config = self.folder / "orthanc.json"
        config.write_text(json.dumps(self.settings))
        with (self.folder / "orthanc.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["Orthanc", str(config)], stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT, cwd=self.folder
            )
        until = time.monotonic() + 200
        while not self._ready():
            assert self._process.poll() is None, f"ended with {self._process.returncode}\n{self.log[-4000:]}"
            assert time.monotonic() < until, "Orthanc does not answer\n" + self.log[-4000:]
            time.sleep(0.05)

    def _ready(self) -> bool:
        """Does HTTP answer? It starts after DIMSE."""
        try:
            self.request("/dicom-web/studies?limit=1")
        except requests.RequestException:
            return False
        return True

    def running(self) -> bool:
        """Is its process there?"""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def restart(self) -> None:
        """Start again on the same database and the same ports, after ``kill`` or while it runs."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End it as a service manager would; harmless when it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None


@contextlib.contextmanager
def orthanc(
    folder: Path,
    *,
    modalities: Mapping[str, tuple[str, int]] | None = None,
    aet: str = "TESTPACS",
    authority: Authority | None = None,
    settings: Mapping[str, object] | None = None,
) -> Iterator[Pacs]:
    """A running Orthanc on free ports of the loopback.

    Args:
        folder: of this one alone: its configuration, database and log.
        modalities: who may query, retrieve and store: AE title -> where it listens (for C-MOVE).
        aet: its own title.
        authority: with one, DIMSE speaks TLS and wants a client certificate. (HTTP stays plain.)
        settings: more of Orthanc's own settings.
    """
    need("Orthanc", "storescu")
    folder.mkdir(parents=True, exist_ok=True)
    known = {SENDER: ("127.0.0.1", 11112), **(modalities or {"LAZARET": ("127.0.0.1", 11112)})}
    for attempt in range(3):  # a program that is no test may take a free port before Orthanc has it
        dicom, http = free_port(), free_port()
        config = _settings(folder, aet, dicom, http)
        config["DicomModalities"] = {
            title: _modality(title, *place, tls=authority is not None) for title, place in known.items()
        }
        if authority is not None:
            config |= _tls(authority)
        config |= dict(settings or {})
        pacs = Pacs(folder, aet, "127.0.0.1", dicom, http, "tester", "correct-horse", config, authority)
        try:
            pacs.start()
            break
        except AssertionError:
            pacs.stop()
            if attempt == 2:
                raise
    try:
        yield pacs
    finally:
        pacs.kill()  # its folder is for the test alone, and a gentle end takes two seconds


def _settings(folder: Path, aet: str, dicom: int, http: int) -> dict[str, object]:
    return {
        "Name": aet,
        "StorageDirectory": str(folder / "db"),
        "IndexDirectory": str(folder / "db"),
        "Plugins": [str(PLUGIN)],
        "HttpPort": http,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": True,
        "RegisteredUsers": {"tester": "correct-horse"},
        "WebDavEnabled": False,
        "HttpCompressionEnabled": False,
        "TcpNoDelay": True,
        "DicomAet": aet,
        "DicomPort": dicom,
        "DicomCheckCalledAet": True,
        "DicomCheckModalityHost": True,
        "DicomAlwaysAllowEcho": False,
        "DicomAlwaysAllowStore": False,
        "DicomScuTimeout": 10,
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/", "EnableWado": True, "WadoRoot": "/wado", "Ssl": False},
    }


def _modality(title: str, host: str, port: int, *, tls: bool) -> dict[str, object]:
    may = dict.fromkeys(("AllowEcho", "AllowFind", "AllowMove", "AllowGet", "AllowStore"), True)
    return {"AET": title, "Host": host, "Port": port, "UseDicomTls": tls, **may}


def _tls(authority: Authority) -> dict[str, object]:
    # DIMSE alone: Debian's Orthanc 1.10.1 crashes in the handshake of its own HTTPS server
    certificate, key = authority.server("orthanc")
    return {
        "DicomTlsEnabled": True,
        "DicomTlsCertificate": str(certificate),
        "DicomTlsPrivateKey": str(key),
        "DicomTlsTrustedCertificates": str(authority.ca),
        "DicomTlsRemoteCertificateRequired": True,
    }


def run(command: Sequence[str]) -> str:
    """Run one of DCMTK's tools; what it said. It must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def uid_of(*parts: object) -> str:
    """A valid UID, the same for the same parts (PS3.5 annex B.2: 2.25 and a number)."""
    return f"2.25.{int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:16])}"


def make_instances(
    folder: Path,
    count: int,
    *,
    patients: int = 5,
    modalities: Sequence[str] = ("MR",),
    size: int = 16,
    seed: str = "",
) -> list[Path]:
    """``count`` distinct DICOM files, dealt out to ``patients`` patients: one study each, a series per modality.

    Args:
        modalities: of CT, MR, OT (secondary capture).
        size: rows and columns; 16 bits each.
        seed: another one gives other patients and instances.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]))
    made = []
    for i in range(count):
        patient, modality = i % patients, modalities[(i // patients) % len(modalities)]
        dataset = _instance(f"{seed}{patient}", modality, i // patients)
        dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = UID(uid_of("i", seed, i))
        dataset.Rows = dataset.Columns = size
        dataset.PixelData = numbers.integers(0, 4096, size * size, dtype=np.uint16).tobytes()
        path = folder / f"{seed}{i:06d}.dcm"
        dataset.save_as(path, enforce_file_format=True)
        made.append(path)
    return made


def _instance(patient: str, modality: str, number: int) -> FileDataset:
    dataset = FileDataset("", Dataset(), preamble=bytes(128), file_meta=FileMetaDataset())
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = _CLASSES[modality]
    dataset.PatientName, dataset.PatientID = f"Muster^{patient}", f"PAT-{patient}"
    dataset.PatientBirthDate, dataset.PatientSex = "19700102", "O"
    dataset.StudyInstanceUID = uid_of("study", patient)
    dataset.SeriesInstanceUID = uid_of("series", patient, modality)
    day = int(hashlib.sha256(patient.encode()).hexdigest(), 16) % 28 + 1
    dataset.StudyDate, dataset.StudyTime, dataset.StudyID = f"202401{day:02d}", "101112", "1"
    dataset.AccessionNumber, dataset.ReferringPhysicianName = f"ACC-{patient}", "Arzt^Anna"
    dataset.Modality, dataset.SeriesNumber, dataset.InstanceNumber = modality, 1, number + 1
    dataset.Manufacturer, dataset.BodyPartExamined = "ACME", "HEAD"
    dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 12, 11, 0
    dataset.PixelSpacing, dataset.SliceThickness = [1, 1], 1
    dataset.ImagePositionPatient = [0, 0, number]
    dataset.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    dataset.FrameOfReferenceUID = uid_of("frame", patient)
    if modality == "CT":
        dataset.RescaleIntercept, dataset.RescaleSlope = -1024, 1
    return dataset
