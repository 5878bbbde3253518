"""Studies that live in memory for one prediction, read by the same confined process and rules as what comes in.

A file becomes what the vault would hold of it, so that a network sees what it saw in training. The original's header
is kept beside it, in memory too, because a segmentation has to name the images that it is of. Nothing of either is
written.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import isqrt
from pathlib import Path
from threading import local
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom import config as pydicom_config

from agent.deidentify import nifti
from agent.deidentify.errors import FileRejectedError
from agent.deidentify.record import Record
from agent.domain import Split
from agent.errors import CommandError
from agent.file_access import contents, walk
from agent.ingest.context import IngestContext
from agent.ingest.parser_process import ParserProcess
from agent.storage.instance_index import InstanceRecord, head_of
from agent.storage.pixel_codec import packed, unpacked
from agent.volumes.dicom_series import parsed
from agent.volumes.errors import NotDefacedError

MOST_BYTES: Final = 4 * 2**30  # of the files of one prediction
_FILES_A_START: Final = 40  # whose reading costs as much as to start a reader; a MiB counts as one more
_NONE: Final[frozenset[str]] = frozenset()
_NO_IMAGES: Final = frozenset({"not_dicom", "dicomdir", "not_an_image"})  # of a folder: passed over


@dataclass(frozen=True, slots=True, eq=False)
class MemoryStudies:
    """What was fetched, as an ``ExampleStore``."""

    records: Mapping[str, Record] = field(repr=False)
    headers: Mapping[str, Dataset | str] = field(repr=False)  # of the files as they came, or a code why there is none
    refused: Mapping[str, int]  # a code of ``agent.deidentify.errors.REASONS`` -> files

    def heads(self) -> Iterable[InstanceRecord]:
        """Every instance; a face is no obstacle, since nothing leaves of it."""
        return [replace(head_of(record, "", ""), face=False) for record in self.records.values()]

    def payload(self, name: str) -> bytes:
        """The de-identified file."""
        return self.records[name].payload

    def pixels(self, name: str) -> NDArray[np.float32]:
        """As the vault would give them, by the same codec."""
        pixels = self.records[name].pixels
        if pixels is None:
            raise KeyError(name)
        return unpacked(packed(pixels), pixels.shape)

    def header(self, name: str) -> Dataset:
        """The header of the file as it came.

        Raises:
            NotDefacedError: it cannot be read.
        """
        header = self.headers[name]
        if isinstance(header, str):
            raise NotDefacedError(header)
        return header

    def barred(self) -> Set[str]:
        """Nothing is held back."""
        return _NONE

    def held(self) -> Set[str]:
        """Nothing is held back."""
        return _NONE

    def part_of(self, split: Split, person: str) -> str:
        """No patient here is in a part."""
        raise AssertionError("predictions are of everybody who was asked for")


def folder_files(folder: Path) -> list[bytes]:
    """The files of a folder and of those below it.

    Raises:
        CommandError: there is no such folder, a file cannot be read, or they are too large together.
    """
    if not folder.is_dir():
        raise CommandError(f"{folder.name}: there is no such folder")
    found, left = [], MOST_BYTES
    for name in sorted(walk(folder, ())):
        try:
            found.append(contents(folder / name, left))
        except FileRejectedError as refusal:
            told = (
                f"more than {MOST_BYTES >> 30} GiB" if refusal.code == "too_large" else "a file that cannot be read"
            )
            raise CommandError(f"{folder.name} holds {told}: nothing was predicted") from None
        left -= len(found[-1])
    return found


@contextmanager
def reading(way: IngestContext, files: Sequence[bytes]) -> Iterator[Callable[[], MemoryStudies]]:
    """Read files as ``ingest`` reads them, without keeping any: it begins at once, and goes on beside the caller.

    Args:
        way: of the project whose rules and keys are used.
        files: as they came.
    Yields:
        What waits for all of them. It raises ParserError where the reader does not start on this machine.
    """
    readers = _Readers(way)
    try:
        with ThreadPoolExecutor(_count(files, way.ingestion.reading.workers), "reader") as pool:
            read = [pool.submit(readers.read, body) for body in files]
            try:
                yield partial(_studies, read)
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        readers.close()


def _count(files: Sequence[bytes], most: int) -> int:
    """Readers that pay off: of n, one more saves 1 / n (n + 1) of the time, and has to start.

    Args:
        files: as they came.
        most: that the site allows; 0: one for each processor.
    """
    work = (len(files) + (sum(map(len, files)) >> 20)) / _FILES_A_START
    return max(1, min(most or os.cpu_count() or 1, isqrt(int(work))))


def _studies(read: list[Future[tuple[Record | str, bytes]]]) -> MemoryStudies:
    """What was read; it empties the list, which else would keep every file."""
    records, headers, refused = dict[str, Record](), dict[str, Dataset | str](), Counter[str]()
    read.reverse()
    while read:
        found, body = read.pop().result()
        if isinstance(found, str):
            refused[found] += found not in _NO_IMAGES
        elif found.kind != "mask":
            records[found.name], headers[found.name] = found, _header(body)  # while the next file is read
    return MemoryStudies(records, headers, dict(sorted((+refused).items())))


def _header(body: bytes) -> Dataset | str:
    try:
        with pydicom_config.disable_value_validation():  # its warnings quote values
            header = parsed(body, pixels_too=False)[0]
    except NotDefacedError as refusal:
        return refusal.code
    header.buffer = None  # else the whole file stays in memory with it
    return header


class _Readers:
    """A confined process for each thread that reads.

    They do not look for text in images, which holds nothing back here, and take no NIfTI, which names no patient.
    """

    def __init__(self, way: IngestContext) -> None:
        self._way, self._excluded = way, way.vault.opted_out()
        self._rules = replace(way.ingestion.rules, look_for_text=False, nifti_modality="")
        self._threads, self._all = local(), list[ParserProcess]()

    def read(self, body: bytes) -> tuple[Record | str, bytes]:
        """The record of a file, or a code why there is none; and the file."""
        if nifti.looks_like_nifti(body):
            return "not_dicom", b""
        reader: ParserProcess | None = getattr(self._threads, "reader", None)
        if reader is None:
            reader = self._threads.reader = self._way.reader(self._rules)
            self._all.append(reader)
        try:
            record = reader.read(body, self._way.who.mac("file", body))
        except FileRejectedError as refusal:
            return refusal.code, b""
        return ("opted_out", b"") if record.pseudonym in self._excluded else (record, body)

    def close(self) -> None:
        """End them."""
        for reader in self._all:
            reader.close()
