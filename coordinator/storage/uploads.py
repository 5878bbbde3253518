"""Artifacts on their way in: announced, checked piece by piece, durable, resumable; and no site sees another's.

How the service calls it, ``uploads = Uploads(shelf.staging, time.time)``::

    Offer    missing = uploads.offer(site, release.artifact_sha256, release.artifact_bytes, request.chunks, quota)
    Upload   uploads.put(site, upload, chunk.index, chunk.data) for each chunk, then uploads.sync(site, upload)
    Submit   staged = uploads.finish(site, upload)              durable before the ledger says anything
             verdict = intake.admit(...)
             shelf.settle(staged, release, envelope, verdict)   if this raises, do not drop: the next start places it
             uploads.drop(site, upload)

Every call may raise :class:`UploadError`, whose ``rule`` and ``detail`` make a finding. ``refusal.lasting`` separates
a refusal of the content from a state that another ``Offer`` may repair (``unknown_upload``, ``incomplete``,
``disk_full``, ``storage``, ``too_many_uploads``): those leave as FAILED_PRECONDITION or RESOURCE_EXHAUSTED, and the
agent offers again. A ``Submit`` whose key has an answer must get that answer before ``finish``. At startup the
release store comes first, then this.

On disk, under the root::

    open/<site>/<sha256>/manifest   size and digests: written last, so an upload without one never began
                         part       the artifact, its blocks reserved from the start
                         bitmap     pieces that are on the disk; replaced whole, after they are
    ready/<site>/<sha256>           whole and verified: the shelf's from here on

A content address is each site's own: whether another hospital holds the same bytes cannot be asked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from policies.statements import HEX, ID
from protos.artifacts.chunks import CHUNK, bitmap, count, indices, length
from protos.common.durable_files import flush_directory, move_durably, replace_file
from protos.common.errors import PeerError

__all__ = ["UploadError", "Uploads", "is_open", "ready"]

KEEP_FREE: Final = 1 << 30  # bytes of the disk that uploads leave alone: the ledger is on it too
MOST_OPEN: Final = 4  # uploads of one site at once
_FLUSH: Final = 8  # pieces between two flushes that go on beside
_HEAD: Final = struct.Struct(">8sQ")  # magic and size; then 32 bytes for each piece
_MAGIC: Final = b"lazaret1"


_PASSING: Final = frozenset({"unknown_upload", "incomplete", "disk_full", "storage", "too_many_uploads"})


class UploadError(PeerError):
    """What was offered or sent is not taken; ``rule`` and ``detail`` are fit for a finding."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail

    @property
    def lasting(self) -> bool:
        """Would the same bytes be refused again?"""
        return self.rule not in _PASSING


def check_offer(sha256: str, size: int, chunks: Sequence[bytes], quota: int) -> None:
    """Everything that can be said about an announcement before a byte is set aside for it.

    Raises:
        UploadError: artifact_size, bad_manifest.
    """
    if not 1 <= size <= quota:
        raise UploadError("artifact_size", f"the artifact must have 1 to {quota} bytes")
    if not HEX.fullmatch(sha256):
        raise UploadError("bad_manifest", "an upload is named by the SHA-256 of its artifact")
    if len(chunks) != count(size) or not all(len(digest) == 32 for digest in chunks):
        raise UploadError("bad_manifest", f"{count(size)} SHA-256 digests belong to {size} bytes")


def check_shape(chunks: Sequence[bytes], size: int, index: int, data: bytes) -> None:
    """Could this be the piece that was announced, by its place and length?

    Raises:
        UploadError: chunk_index, chunk_size.
    """
    if not 0 <= index < len(chunks):
        raise UploadError("chunk_index", f"the artifact has {len(chunks)} pieces")
    if len(data) != length(size, index):
        raise UploadError("chunk_size", f"piece {index} has {length(size, index)} bytes")


def check_digest(chunks: Sequence[bytes], index: int, data: bytes) -> None:
    """Is this the piece that was announced?

    Raises:
        UploadError: chunk_moved, chunk_foreign.
    """
    digest = hashlib.sha256(data).digest()
    if digest != chunks[index]:
        if digest in chunks:
            raise UploadError("chunk_moved", f"what came as piece {index} belongs elsewhere")
        raise UploadError("chunk_foreign", f"what came as piece {index} is not of this artifact")


@contextlib.contextmanager
def disk_faults() -> Iterator[None]:
    """A disk that is full or broken is a refusal, not an incident: other uploads go on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UploadError("disk_full", "the coordinator has no room for it now") from None
        raise UploadError("storage", "the coordinator's disk could not keep it") from None


@dataclass(slots=True, eq=False)
class _Upload:
    """One artifact on its way; ``lock`` guards all but what never changes."""

    folder: Path
    ready: Path
    size: int
    chunks: tuple[bytes, ...]
    touched: float
    lock: threading.RLock = field(default_factory=threading.RLock)
    durable: set[int] = field(default_factory=set)  # on the disk, and the bitmap says so
    written: set[int] = field(default_factory=set)  # handed to the kernel, not yet durable
    handle: int = -1  # open from the first write until what was written is durable: it hears of every write error
    flushing: Future[None] | None = None  # of the handle, so that the disk works while pieces come in
    unflushed: int = 0  # pieces since
    whole: Any = field(default_factory=hashlib.sha256)  # over the first ``hashed`` pieces
    hashed: int = 0
    closed: bool = False

    @property
    def part(self) -> Path:
        return self.folder / "part"

    def missing(self) -> list[int]:
        return [i for i in range(len(self.chunks)) if i not in self.durable and i not in self.written]

    def unallocated(self) -> int:
        """Bytes that the disk has not set aside yet."""
        if self.ready.exists():
            return 0
        try:
            return max(0, self.size - self.part.stat().st_blocks * 512)
        except FileNotFoundError:
            return self.size

    def flushed(self) -> None:
        """Wait for the concurrent flush, and raise its error: the kernel reports a lost page only once.

        Raises:
            OSError: what was written may not be on the disk, and flushing again would not tell.
        """
        flushing, self.flushing = self.flushing, None
        if flushing is not None:
            flushing.result()

    def let_go(self) -> None:
        if self.handle >= 0:
            with contextlib.suppress(OSError):
                self.flushed()  # a number must not be flushed when it is another file's
            os.close(self.handle)
            self.handle, self.unflushed = -1, 0


class Uploads:
    """The uploads of all sites; each method may be called from any thread.

    At most one piece is in hand for each call. One upload is written by one call at a time, different uploads are
    independent of each other.
    """

    def __init__(
        self, root: Path, clock: Callable[[], float], most_open: int = MOST_OPEN, keep_free: int = KEEP_FREE
    ) -> None:
        """Find what a crash left: uploads with a manifest go on, the rest never began and is removed.

        Args:
            root: a directory on the file system of the releases.
            clock: seconds since 1970; it decides only what :meth:`expire` removes.
            most_open: uploads of one site at once.
            keep_free: bytes of the disk that no upload may take.
        """
        self.root, self.clock, self.most_open, self.keep_free = root, clock, most_open, keep_free
        self._mutex = threading.Lock()  # around the dictionary, briefly
        self._turn = threading.Lock()  # one upload begins or ends at a time; pieces of others go on meanwhile
        self._beside = ThreadPoolExecutor(thread_name_prefix="upload-digest")
        self._flushes = ThreadPoolExecutor(thread_name_prefix="upload-flush")
        self._uploads: dict[tuple[str, str], _Upload] = {}
        for place in ("open", "ready"):
            (root / place).mkdir(parents=True, exist_ok=True)
        for folder in sorted((root / "open").glob("*/*")):
            found = _read(folder, root / "ready" / folder.parent.name / folder.name)
            if found is None:
                shutil.rmtree(folder)
            else:
                self._uploads[folder.parent.name, folder.name] = found

    def offer(self, site: str, sha256: str, size: int, chunks: Sequence[bytes], quota: int) -> bytes:
        """Announce an artifact; or ask again, to go on where an upload stopped.

        Args:
            site: the site's name, from its certificate.
            sha256: of the artifact, 64 hexadecimal digits; the upload's name.
            size: of the artifact, bytes.
            chunks: SHA-256 of each MiB; another list than before starts the upload over.
            quota: what the site's statement and the policy allow, bytes.
        Returns:
            A bit for each piece, lowest first; set: send it.
        Raises:
            UploadError: artifact_size, bad_manifest, too_many_uploads, disk_full, storage. Nothing was set aside.
        """
        assert ID.fullmatch(site), "a site's name comes from its certificate"
        check_offer(sha256, size, chunks, quota)
        with self._turn:
            upload = self._find(site, sha256)
            if upload is not None and (upload.size, upload.chunks) != (size, tuple(chunks)):
                self._remove(site, sha256, upload)
                upload = None
            if upload is None:
                upload = self._begin(site, sha256, size, tuple(chunks))
        with self._held(site, sha256) as upload, disk_faults():
            self._touch(upload)
            return bitmap(upload.missing(), len(upload.chunks))

    def _find(self, site: str, sha256: str) -> _Upload | None:
        with self._mutex:
            return self._uploads.get((site, sha256))

    def _begin(self, site: str, sha256: str, size: int, chunks: tuple[bytes, ...]) -> _Upload:
        """Set the disk's blocks aside, then write the manifest; the caller has the turn."""
        with self._mutex:
            others = dict(self._uploads)
        if not sum(name == site for name, _ in others) < self.most_open:
            raise UploadError("too_many_uploads", f"a site may have {self.most_open} uploads open")
        folder = self.root / "open" / site / sha256
        upload = _Upload(folder, self.root / "ready" / site / sha256, size, chunks, self.clock())
        with disk_faults():
            owed = sum(other.unallocated() for other in others.values())
            disk = os.statvfs(self.root)
            if not upload.unallocated() <= disk.f_bavail * disk.f_frsize - owed - self.keep_free:
                raise UploadError("disk_full", "the coordinator has no room for it now")
            try:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                if upload.ready.exists():  # whole and verified before, and its verdict is still to come
                    upload.durable = set(range(len(chunks)))
                else:
                    reserve(upload.part, size)
                replace_file(folder / "manifest", _HEAD.pack(_MAGIC, size) + b"".join(chunks))
                for above in (folder.parent, folder.parent.parent):
                    flush_directory(above)
                self._touch(upload)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        with self._mutex:
            self._uploads[site, sha256] = upload
        return upload

    def put(self, site: str, upload: str, index: int, data: bytes) -> None:
        """Take one piece; it is checked before it is written, and durable only after :meth:`sync`.

        A piece that is there already is harmless.

        Raises:
            UploadError: unknown_upload, chunk_index, chunk_size (cut short or too long), chunk_moved (it belongs
                elsewhere in this artifact), chunk_foreign (it is not of this artifact), disk_full, storage.
        """
        found = self._find(site, upload)
        if found is None:
            raise UploadError("unknown_upload", "nothing of that name was offered")
        check_shape(found.chunks, found.size, index, data)
        with self._held(site, upload, found), disk_faults():
            found.touched = self.clock()
            if index in found.durable or index in found.written:
                check_digest(found.chunks, index, data)
                return
            # The whole's digest goes on beside the piece's own, on a copy: a bad piece leaves no trace in it.
            ahead = self._beside.submit(_extended, found.whole, data) if index == found.hashed else None
            check_digest(found.chunks, index, data)
            if found.handle < 0:
                found.handle = os.open(found.part, os.O_WRONLY | os.O_CLOEXEC)
            write_at(found.handle, data, index * CHUNK)
            found.written.add(index)
            if ahead is not None:
                found.whole = ahead.result()
                found.hashed += 1
            self._start_flush(found)

    def _start_flush(self, upload: _Upload) -> None:
        """Have the disk begin with what was written; whether it is durable is for :meth:`sync` to find out."""
        upload.unflushed += 1
        before = upload.flushing
        free = before is None or (before.done() and before.exception() is None)  # a fault is kept for sync to raise
        if free and upload.unflushed >= _FLUSH:
            upload.flushing, upload.unflushed = self._flushes.submit(os.fdatasync, upload.handle), 0

    def sync(self, site: str, upload: str) -> int:
        """Make every piece that was taken durable, then the bitmap that says so.

        Returns:
            How many pieces of the upload are durable now.
        Raises:
            UploadError: unknown_upload; disk_full, storage: what was not yet durable is missing again.
        """
        with self._held(site, upload) as found:
            self._sync(found)
            return len(found.durable)

    def _sync(self, upload: _Upload) -> None:
        if not upload.written:
            return
        try:
            with disk_faults():
                upload.flushed()
                os.fdatasync(upload.handle)
                durable = upload.durable | upload.written
                replace_file(upload.folder / "bitmap", bitmap(sorted(durable), len(upload.chunks)))
                self._touch(upload)
        except UploadError:
            # After a failed fsync the kernel may drop the pages and call the next one a success: they come again.
            upload.written.clear()
            raise
        finally:
            upload.let_go()
        upload.durable = durable
        upload.written.clear()

    def finish(self, site: str, upload: str) -> Path:
        """Complete the upload: all pieces are there and the SHA-256 matches. Durable and in place before this
        returns.

        Returns:
            The file, which is the shelf's from here on; the same again, until :meth:`drop`.
        Raises:
            UploadError: unknown_upload, incomplete; artifact_changed: the upload is removed; disk_full, storage.
        """
        with self._held(site, upload) as found:
            if found.ready.exists():
                return found.ready
            if missing := found.missing():
                raise UploadError("incomplete", f"{len(missing)} of {len(found.chunks)} pieces are missing")
            self._sync(found)
            there = found.part.exists()
            with disk_faults():
                if there and _hash_rest(found) == upload:
                    move_durably(found.part, found.ready)
                    return found.ready
        self.drop(site, upload)
        if not there:  # a start has put it in its place
            raise UploadError("unknown_upload", "nothing of that name was offered")
        raise UploadError("artifact_changed", "the artifact is not the one in the statement")

    def drop(self, site: str, upload: str) -> None:
        """Forget an upload. A finished file stays: it is the shelf's, which knows whether it was admitted."""
        with self._turn:
            found = self._find(site, upload)
            if found is not None:
                self._remove(site, upload, found)

    def expire(self, older_than_s: float) -> int:
        """Forget uploads that nobody has touched for that long.

        Returns:
            How many.
        """
        with self._turn:
            with self._mutex:
                old = [(key, u) for key, u in self._uploads.items() if u.touched < self.clock() - older_than_s]
            for key, upload in old:
                self._remove(*key, upload)
        return len(old)

    def _remove(self, site: str, sha256: str, upload: _Upload) -> None:
        """The caller has the turn; a call in progress on the upload ends first."""
        with self._mutex:
            del self._uploads[site, sha256]
        with upload.lock:
            upload.closed = True
            upload.let_go()
            with contextlib.suppress(FileNotFoundError):
                (upload.folder / "manifest").unlink()  # first: what is left after a crash is no upload
            shutil.rmtree(upload.folder, ignore_errors=True)

    def _touch(self, upload: _Upload) -> None:
        """Somebody wants it; a restart remembers."""
        upload.touched = self.clock()
        os.utime(upload.folder / "manifest", (upload.touched, upload.touched))

    @contextlib.contextmanager
    def _held(self, site: str, name: str, known: _Upload | None = None) -> Iterator[_Upload]:
        """An upload, for this thread alone; ``known``: it must still be that one."""
        upload = self._find(site, name)
        if upload is None or known not in (None, upload):
            raise UploadError("unknown_upload", "nothing of that name was offered")
        with upload.lock:
            if upload.closed:
                raise UploadError("unknown_upload", "the upload was started over or given up")
            yield upload


def is_open(root: Path, site: str, sha256: str) -> bool:
    """Does an upload of that name go on, or wait for its verdict?"""
    return (root / "open" / site / sha256 / "manifest").exists()


def ready(root: Path) -> Iterator[tuple[str, str, Path]]:
    """The finished files: (site, SHA-256 in hexadecimal, path)."""
    for path in sorted((root / "ready").glob("*/*")):
        yield path.parent.name, path.name, path


def _read(folder: Path, place: Path) -> _Upload | None:
    """The upload in a folder, as far as its bitmap vouches for it; None: it never began, or came to its end."""
    try:
        path = folder / "manifest"
        raw, touched = path.read_bytes(), path.stat().st_mtime
        magic, size = _HEAD.unpack_from(raw)
        chunks = tuple(raw[at : at + 32] for at in range(_HEAD.size, len(raw), 32))
        if magic != _MAGIC or len(chunks) != count(size) or len(raw) != _HEAD.size + 32 * len(chunks):
            return None
        upload = _Upload(folder, place, size, chunks, touched)
        if place.exists():
            upload.durable = set(range(len(chunks)))
            return upload
        if upload.part.stat().st_size != size:
            return None
        kept = folder / "bitmap"
        upload.durable = set(indices(kept.read_bytes(), len(chunks))) if kept.exists() else set()
    except (FileNotFoundError, NotADirectoryError, struct.error, ValueError):
        return None
    return upload


def _extended(whole: Any, data: bytes) -> Any:
    longer = whole.copy()
    longer.update(data)
    return longer


def _hash_rest(upload: _Upload) -> str:
    """The SHA-256 of the whole: what did not arrive in order, or came before a restart, is read from the file."""
    whole = upload.whole.copy()
    with upload.part.open("rb", buffering=0) as stream:
        stream.seek(upload.hashed * CHUNK)
        while data := stream.read(CHUNK):
            whole.update(data)
    return str(whole.hexdigest())


def reserve(path: Path, size: int) -> None:
    """Create a file of ``size`` zero bytes, 0600, with its blocks set aside.

    Raises:
        OSError: it is there already, or there is no room.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_at(handle: int, data: bytes, at: int) -> None:
    """All of ``data`` at the offset ``at``."""
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, at)
        view, at = view[done:], at + done
