"""Receiving: our C-STORE receiver beside a stock pynetdicom SCP and DCMTK's ``storescp``, in one run.

The sender is DCMTK's ``storescu`` in every case, with units of 128 KB and ``TCP_NODELAY=1`` (without it, a stall of
40 ms per instance is all one measures): 512 x 512 pixels of 16 bits, random, every instance its own. The pynetdicom
SCP is what its documentation shows: ``event.encoded_dataset()`` into a file, one process. ``storescp`` forks for
every association. Receivers take turns on the same disk, that of ``TMPDIR``, else of ``/var/tmp``; a ratio is the
median over rounds of rates. All of it shares the machine with the senders.

Ours does more: it seals what it takes (AES-256-GCM), and, when ``durable``, has it on the disk before it answers, as
neither peer does. ``one_vs_pynetdicom``, ``four_vs_storescp`` and ``sixteen_vs_four`` (ours, sixteen overlapping
senders over four: below 1 means that more senders are slower) are without that wait, the same with ``_durable`` with
it. Needs DCMTK; Linux only.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import pydicom
from pydicom.data import get_testdata_file
from pydicom.uid import ExplicitVRLittleEndian, generate_uid
from pynetdicom import AE, AllStoragePresentationContexts, evt

from agent.pacs.dimse.config import Caller, ListenerSettings
from agent.pacs.dimse.listener_process import Listener
from tests.benchmarks.report import Report, Row

FOLDERS, EACH, SIZE = 16, 25, 512  # 210 MB are sent by every sixteen senders
REPEATS: Final = 5
_PDU: Final = "131072"
_ENVIRONMENT: Final = {**os.environ, "TCP_NODELAY": "1"}
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where to send, the processes whose time counts, and where the files go."""

    port: int
    pids: Callable[[], Sequence[int]]
    folder: Path


def instances(folder: Path, rng: np.random.Generator) -> list[Path]:
    """``FOLDERS`` folders of ``EACH`` CT instances."""
    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm"))
    dataset.Rows = dataset.Columns = SIZE
    for number in range(FOLDERS):
        place = folder / f"{number:02}"
        place.mkdir(parents=True)
        for one in range(EACH):
            dataset.PixelData = rng.integers(0, 4096, (SIZE, SIZE), dtype=np.uint16).tobytes()
            dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid(
                entropy_srcs=[f"{number}/{one}"]
            )
            dataset.save_as(place / f"{one}.dcm")
    return sorted(folder.iterdir())


def processor_seconds(pids: Sequence[int]) -> float:
    """Of these processes and their children that ended."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(value) for value in fields[11:15])
    return total / _TICKS


def send(receiver: Receiver, folders: Sequence[Sequence[Path]]) -> tuple[float, float]:
    """Instances per second, and the receiver's processor milliseconds per instance: one sender for each item.

    Raises:
        AssertionError: a sender failed, or instances are missing.
    """
    address = ["-aet", "PACS", "-aec", "LAZARET", "127.0.0.1", str(receiver.port)]
    cpu, start = processor_seconds(receiver.pids()), time.perf_counter()
    senders = [
        subprocess.Popen(["storescu", "-pdu", _PDU, "+sd", *address, *map(str, some)], env=_ENVIRONMENT)
        for some in folders
    ]
    failed = [sender.wait() for sender in senders if sender.wait() != 0]
    seconds = time.perf_counter() - start
    cpu = processor_seconds(receiver.pids()) - cpu
    count = EACH * sum(len(some) for some in folders)
    found = list(receiver.folder.iterdir())
    if failed or len(found) != count:
        raise AssertionError(f"{len(failed)} senders failed, {len(found)} of {count} instances came")
    for path in found:
        path.unlink()
    return count / seconds, 1000 * cpu / count


@contextmanager
def ours(folder: Path, *, durable: bool) -> Iterator[Receiver]:
    """The product's receiver with its default of workers."""
    settings = ListenerSettings(
        "LAZARET", (Caller("PACS", ("127.0.0.1",)),), plain_tcp=True, port=0, full_at=1.0, durable=durable
    )
    with Listener(settings, folder, os.urandom(32)) as listener:
        yield Receiver(listener.port, listener.pids, folder)


@contextmanager
def peer(folder: Path, command: Callable[[int], Sequence[str]]) -> Iterator[Receiver]:
    """Another receiver, on a free port."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(command(port), env=_ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(port)
        yield Receiver(port, lambda: [process.pid], folder)
    finally:
        process.kill()
        process.wait()


def _await(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def stock(port: int, folder: Path) -> None:
    """A pynetdicom SCP as its documentation writes one, until it is killed."""

    def keep(event: evt.Event) -> int:
        (folder / f"{event.request.AffectedSOPInstanceUID}.dcm").write_bytes(event.encoded_dataset())
        return 0

    entity = AE("LAZARET")
    entity.maximum_pdu_size = int(_PDU)
    entity.maximum_associations = 100
    for context in AllStoragePresentationContexts:
        entity.add_supported_context(str(context.abstract_syntax), ExplicitVRLittleEndian)
    entity.start_server(("127.0.0.1", port), evt_handlers=[(evt.EVT_C_STORE, keep)])


def main() -> Report:
    """Measure; about a minute, and half a gigabyte of disk."""
    if shutil.which("storescu") is None or shutil.which("storescp") is None:
        raise RuntimeError("install dcmtk for this benchmark")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        folder = Path(name)
        files = instances(folder / "files", np.random.default_rng(1))
        loads = {"one": [files[:4]], "four": [files[n::4] for n in range(4)], "sixteen": [[f] for f in files]}
        module = [sys.executable, "-m", "tests.benchmarks.receive"]
        with (
            ours(folder / "ours", durable=False) as quick,
            ours(folder / "durable", durable=True) as durable,
            peer(folder / "stock", lambda port: [*module, str(port), str(folder / "stock")]) as plain,
            peer(
                folder / "dcmtk",
                lambda port: ["storescp", "-pdu", _PDU, "--fork", "-od", str(folder / "dcmtk"), str(port)],
            ) as dcmtk,
        ):
            receivers = {"ours": quick, "ours, durable": durable, "pynetdicom": plain, "storescp": dcmtk}
            return _report(receivers, loads)


def _report(receivers: dict[str, Receiver], loads: dict[str, list[list[Path]]]) -> Report:
    tasks = [(who, load) for load in loads for who in receivers if who != "pynetdicom" or load == "one"]
    rates: dict[tuple[str, str], list[float]] = {task: [] for task in tasks}
    costs: dict[tuple[str, str], list[float]] = {task: [] for task in tasks}
    for turn in range(REPEATS + 1):
        for who, load in tasks if turn % 2 else tasks[::-1]:
            rate, cost = send(receivers[who], loads[load])
            if turn:  # the first one warms up
                rates[who, load].append(rate)
                costs[who, load].append(cost)

    def over(a: tuple[str, str], b: tuple[str, str]) -> float:
        return median(x / y for x, y in zip(rates[a], rates[b], strict=True))

    rows = [Row(f"{who}: {load} at once", median(rates[who, load]), "per s") for who, load in tasks]
    rows += [
        Row(f"{who}: {load} at once, its processor time", median(costs[t]), "cpu-ms")
        for t in tasks
        for who, load in [t]
    ]
    ratios = {}
    for who, name in (("ours", ""), ("ours, durable", "_durable")):
        ratios[f"one_vs_pynetdicom{name}"] = over((who, "one"), ("pynetdicom", "one"))
        ratios[f"four_vs_storescp{name}"] = over((who, "four"), ("storescp", "four"))
        ratios[f"sixteen_vs_storescp{name}"] = over((who, "sixteen"), ("storescp", "sixteen"))
        ratios[f"sixteen_vs_four{name}"] = over((who, "sixteen"), (who, "four"))
    return Report(tuple(rows), ratios)


if __name__ == "__main__":
    stock(int(sys.argv[1]), Path(sys.argv[2]))
