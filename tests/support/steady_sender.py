"""A PACS that sends each image until it is answered: ``steady_sender.py FOLDER PORT NOTES PAUSE``.

Every image that was answered with success (0x0000) is noted by its name, and sent no more. It ends when told to
(SIGTERM), or with the last image.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pydicom import Dataset, dcmread
from pynetdicom import AE

TITLE = "LAZARET"
CALLER = "PYNETDICOM"
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


def send(image: Dataset, port: int, title: str = TITLE, caller: str = CALLER) -> None:
    """One image, again and again until it is answered, as a PACS does: on a busy machine a request may come too late.

    Raises:
        TimeoutError: not within two minutes.
    """
    until = time.monotonic() + _PATIENCE_S
    while not sent(image, port, title, caller):
        if time.monotonic() > until:
            raise TimeoutError(f"nobody at {port} took an image from {caller}")
        time.sleep(0.2)


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
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
