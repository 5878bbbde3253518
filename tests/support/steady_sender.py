"""A PACS that sends each image until it is answered: ``steady_sender.py FOLDER PORT NOTES PAUSE``.

Every image that was answered with success (0x0000) is noted by its name, and sent no more. It ends when told to
(SIGTERM), or with the last image.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from pydicom import Dataset, dcmread
from pynetdicom import AE
from pynetdicom.sop_class import Verification

TITLE = "LAZARET"
CALLER = "PYNETDICOM"
ROOT = Path(__file__).parents[2]
_PATIENCE_S = 120.0


def sent(image: Dataset, port: int, title: str = TITLE, caller: str = CALLER) -> bool:
    """Whether the receiver, which is called ``title``, said that it has the image of the PACS ``caller``."""
    entity = AE(caller)
    entity.add_requested_context(image.SOPClassUID, image.file_meta.TransferSyntaxUID)
    entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = 15
    association = entity.associate("127.0.0.1", port, ae_title=title)
    if not association.is_established:
        return False
    try:
        answer = association.send_c_store(image)
    except (RuntimeError, ValueError):  # it went away before it was asked
        return False
    association.release()
    return bool("Status" in answer and answer.Status == 0)


def send(path: Path, port: int, title: str = TITLE, caller: str = CALLER) -> None:
    """One image, until it is answered, as a PACS does, and from a process of its own.

    pynetdicom waits by select(2), which takes no descriptor above 1023. A process that runs tests for an hour has
    more of them open, and every association fails there.
    """
    assert _beside("one", str(path), str(port), title, caller), f"nobody at {port} took an image from {caller}"


def echoes(port: int, title: str, caller: str) -> bool:
    """Whether C-ECHO is answered; from a process of its own, too."""
    return _beside("echo", str(port), title, caller)


def _beside(*words: str) -> bool:
    command = [sys.executable, "-m", "tests.support.steady_sender", *words]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=_PATIENCE_S + 60).returncode == 0


def _one(path: Path, port: int, title: str, caller: str) -> bool:
    image, until = dcmread(path), time.monotonic() + _PATIENCE_S
    while not (done := sent(image, port, title, caller)) and time.monotonic() < until:
        time.sleep(0.2)
    return done


def _echo(port: int, title: str, caller: str) -> bool:
    entity = AE(ae_title=caller)
    entity.add_requested_context(Verification)
    association = entity.associate("127.0.0.1", port, ae_title=title)
    if not association.is_established:
        return False
    status = association.send_c_echo()
    association.release()
    return bool(status and status.Status == 0)


def main(folder: Path, port: int, notes: Path, pause_s: float) -> None:
    """Send the folder's images in the order of their names."""
    with notes.open("a", buffering=1) as said:
        for path in sorted(folder.iterdir()):
            image = dcmread(path)
            while not sent(image, port):
                time.sleep(0.2)
            said.write(f"{path.name}\n")
            time.sleep(pause_s)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["one", path, port, title, caller]:
            sys.exit(not _one(Path(path), int(port), title, caller))
        case ["echo", port, title, caller]:
            sys.exit(not _echo(int(port), title, caller))
        case [folder, port, notes, pause]:
            main(Path(folder), int(port), Path(notes), float(pause))
