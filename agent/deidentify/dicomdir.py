"""The index of a medium (DICOMDIR, PS3.3 F.3 and PS3.10 section 8): which files it lists."""

from __future__ import annotations

import io
from typing import Final

import pydicom

from agent.deidentify.errors import FileRejectedError
from agent.deidentify.prescan import read_meta, scan

MOST_FILES: Final = 100_000
_MOST_PARTS: Final = 8  # components of a File ID, PS3.10 section 8.2


def listed(data: bytes) -> list[list[str]]:
    """The components of each Referenced File ID (0004,1500), in the order of the index; what they say is not checked.

    Raises:
        FileRejectedError: it is not DICOM, is cut, or has more records than a medium holds; pydicom raises errors of
        its own.
    """
    meta = read_meta(data)
    scan(data, meta.offset, meta.transfer_syntax)
    index = pydicom.dcmread(io.BytesIO(data))
    files = []
    for record in index.get("DirectoryRecordSequence") or ():
        value = record.get("ReferencedFileID")
        if value:
            files.append([str(part) for part in ([value] if isinstance(value, str) else value)][:_MOST_PARTS])
        if len(files) > MOST_FILES:
            raise FileRejectedError("too_large")
    return files
