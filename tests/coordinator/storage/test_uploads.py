"""Uploads: what is announced, what is taken, and what is on the disk after the worst."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator.storage import uploads as module
from coordinator.storage.uploads import UploadError, Uploads, is_open, ready
from protos.artifacts.chunks import CHUNK, ArtifactManifest, indices, manifest, piece
from tests.support.upload_server import staged

QUOTA = 64 << 20


def artifact(mib: float = 2.5, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(int(mib * CHUNK))


class Hand:
    """A clock that stands still until it is moved."""

    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
def uploads(tmp_path: Path, clock: Hand) -> Uploads:
    return Uploads(tmp_path / "staging", clock, keep_free=0)


def offer(uploads: Uploads, listing: ArtifactManifest, site: str = "site-a", quota: int = QUOTA) -> tuple[int, ...]:
    raw = uploads.offer(site, listing.sha256, listing.size, listing.chunks, quota)
    return indices(raw, len(listing.chunks))


def refusal(call: object, *words: object) -> str:
    with pytest.raises(UploadError) as caught:
        call(*words)  # type: ignore[operator]
    assert caught.value.detail
    return caught.value.rule


# ---------------------------------------------------------------- the announcement


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"size": 0}, "artifact_size"),
        ({"size": -1}, "artifact_size"),
        ({"size": QUOTA + 1}, "artifact_size"),
        ({"size": 10 << 30}, "artifact_size"),
        ({"size": 2 * CHUNK}, "bad_manifest"),
        ({"chunks": (b"x" * 31,) * 3}, "bad_manifest"),
        ({"chunks": ()}, "bad_manifest"),
        ({"sha256": "../../../etc"}, "bad_manifest"),
        ({"sha256": "A" * 64}, "bad_manifest"),
    ],
)
def test_a_wrong_announcement_leaves_nothing_on_the_disk(
    uploads: Uploads, tmp_path: Path, changes: dict[str, object], rule: str
) -> None:
    listing = manifest(artifact())
    words = {"sha256": listing.sha256, "size": listing.size, "chunks": listing.chunks, **changes}
    assert refusal(uploads.offer, "site-a", words["sha256"], words["size"], words["chunks"], QUOTA) == rule
    assert [p for p in tmp_path.rglob("*") if p.name not in ("staging", "open", "ready")] == []


def test_more_than_the_disk_has_is_refused_before_a_block_is_set_aside(uploads: Uploads, tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    size = 2 * free.f_blocks * free.f_frsize  # never there, whatever others free meanwhile
    chunks = (bytes(32),) * -(-size // CHUNK)
    assert refusal(uploads.offer, "site-a", "a" * 64, size, chunks, 1 << 60) == "disk_full"
    assert list((tmp_path / "staging/open").glob("*/*")) == []


def test_an_accepted_announcement_has_its_blocks(uploads: Uploads, tmp_path: Path) -> None:
    listing = manifest(artifact())
    assert offer(uploads, listing) == (0, 1, 2)
    part = tmp_path / "staging/open/site-a" / listing.sha256 / "part"
    assert part.stat().st_size == listing.size
    assert part.stat().st_blocks * 512 >= listing.size


def test_a_site_has_only_so_many_uploads_and_the_others_still_have_theirs(uploads: Uploads) -> None:
    for seed in range(4):
        offer(uploads, manifest(artifact(0.1, seed)))
    assert refusal(offer, uploads, manifest(artifact(0.1, 9))) == "too_many_uploads"
    assert offer(uploads, manifest(artifact(0.1, 0))) == (0,)
    assert offer(uploads, manifest(artifact(0.1, 9)), "site-b") == (0,)


# ---------------------------------------------------------------- pieces


def test_what_was_sent_is_what_is_ready(uploads: Uploads) -> None:
    body = artifact()
    path = staged(uploads, "site-a", body)
    assert path.read_bytes() == body
    assert [(site, name) for site, name, _ in ready(uploads.root)] == [("site-a", hashlib.sha256(body).hexdigest())]


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1, 1, 0)])
def test_any_order_and_repetition_makes_the_same_file(uploads: Uploads, order: tuple[int, ...]) -> None:
    body = artifact()
    listing = manifest(body)
    offer(uploads, listing)
    for index in order:
        uploads.put("site-a", listing.sha256, index, piece(body, index))
    assert uploads.finish("site-a", listing.sha256).read_bytes() == body


def test_a_piece_that_is_not_the_announced_one_changes_nothing(uploads: Uploads) -> None:
    body, other = artifact(), artifact(seed=1)
    listing = manifest(body)
    offer(uploads, listing)

    def put(index: int, data: bytes) -> str:
        return refusal(uploads.put, "site-a", listing.sha256, index, data)

    assert put(0, piece(body, 1)) == "chunk_moved"
    assert put(0, piece(other, 0)) == "chunk_foreign"
    assert put(0, piece(body, 0)[:-1]) == "chunk_size"
    assert put(2, piece(body, 2)[:-1]) == "chunk_size"
    assert put(0, piece(body, 0) + b"x") == "chunk_size"
    assert put(0, b"") == "chunk_size"
    assert put(3, b"") == "chunk_index"
    assert put(-1, piece(body, 0)) == "chunk_index"
    assert refusal(uploads.put, "site-a", "b" * 64, 0, piece(body, 0)) == "unknown_upload"
    assert uploads.sync("site-a", listing.sha256) == 0
    assert offer(uploads, listing) == (0, 1, 2)
    assert staged(uploads, "site-a", body).read_bytes() == body


def test_a_site_cannot_touch_or_notice_the_upload_of_another(uploads: Uploads) -> None:
    body = artifact()
    listing = manifest(body)
    staged(uploads, "site-a", body)
    assert refusal(uploads.put, "site-b", listing.sha256, 0, piece(body, 0)) == "unknown_upload"
    assert refusal(uploads.finish, "site-b", listing.sha256) == "unknown_upload"
    assert offer(uploads, listing, "site-b") == (0, 1, 2)  # the same bytes are there, and it is not said


def test_nothing_is_finished_before_every_piece_is_there(uploads: Uploads) -> None:
    body = artifact()
    listing = manifest(body)
    offer(uploads, listing)
    for index in (0, 2):
        uploads.put("site-a", listing.sha256, index, piece(body, index))
    assert refusal(uploads.finish, "site-a", listing.sha256) == "incomplete"
    assert list(ready(uploads.root)) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_pieces_of_another_artifact_under_a_name_are_found_and_removed(
    uploads: Uploads, order: tuple[int, ...]
) -> None:
    """The list of digests is not signed: honest pieces of other bytes than the statement names."""
    body, named = artifact(), hashlib.sha256(b"something else").hexdigest()
    listing = manifest(body)
    uploads.offer("site-a", named, listing.size, listing.chunks, QUOTA)
    for index in order:
        uploads.put("site-a", named, index, piece(body, index))
    assert refusal(uploads.finish, "site-a", named) == "artifact_changed"
    assert list(ready(uploads.root)) == []
    assert not is_open(uploads.root, "site-a", named)


def test_another_list_of_digests_starts_an_upload_over(uploads: Uploads) -> None:
    body = artifact()
    right = manifest(body)
    wrong = ArtifactManifest(right.sha256, right.size, (bytes(32), *right.chunks[1:]))
    offer(uploads, wrong)
    uploads.put("site-a", right.sha256, 1, piece(body, 1))
    uploads.sync("site-a", right.sha256)
    assert offer(uploads, right) == (0, 1, 2)
    assert staged(uploads, "site-a", body).read_bytes() == body


def test_a_finished_upload_answers_the_same_until_it_is_dropped(uploads: Uploads) -> None:
    body = artifact()
    listing = manifest(body)
    first = staged(uploads, "site-a", body)
    assert uploads.finish("site-a", listing.sha256) == first
    assert offer(uploads, listing) == ()
    uploads.drop("site-a", listing.sha256)
    assert first.read_bytes() == body  # the shelf's now
    assert refusal(uploads.finish, "site-a", listing.sha256) == "unknown_upload"


def test_what_is_whole_and_waits_for_its_verdict_is_not_sent_twice(uploads: Uploads) -> None:
    body = artifact()
    listing = manifest(body)
    path = staged(uploads, "site-a", body)
    uploads.drop("site-a", listing.sha256)
    assert offer(uploads, listing) == ()
    assert uploads.finish("site-a", listing.sha256) == path


def test_many_streams_at_once_make_whole_files(uploads: Uploads) -> None:
    bodies = {f"site-{n}": artifact(6, n) for n in range(3)}
    listings = {site: manifest(body) for site, body in bodies.items()}
    for site, listing in listings.items():
        offer(uploads, listing, site)
    faults: list[BaseException] = []

    def send(site: str, seed: int) -> None:
        order = list(range(6))
        random.Random(seed).shuffle(order)
        try:
            for index in order:
                uploads.put(site, listings[site].sha256, index, piece(bodies[site], index))
                uploads.sync(site, listings[site].sha256)
        except BaseException as fault:  # noqa: BLE001
            faults.append(fault)

    threads = [threading.Thread(target=send, args=(site, seed)) for site in bodies for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    for site, body in bodies.items():
        assert uploads.finish(site, listings[site].sha256).read_bytes() == body


# ---------------------------------------------------------------- crashes and disks


def test_what_was_synced_is_there_after_a_crash_and_what_was_not_is_asked_for_again(
    uploads: Uploads, clock: Hand
) -> None:
    body = artifact(3.5)
    listing = manifest(body)
    offer(uploads, listing)
    uploads.put("site-a", listing.sha256, 1, piece(body, 1))
    uploads.sync("site-a", listing.sha256)
    uploads.put("site-a", listing.sha256, 0, piece(body, 0))  # taken, and the crash comes
    again = Uploads(uploads.root, clock, keep_free=0)
    assert offer(again, listing) == (0, 2, 3)
    for index in (0, 2, 3):
        again.put("site-a", listing.sha256, index, piece(body, index))
    assert again.finish("site-a", listing.sha256).read_bytes() == body


def test_a_bitmap_is_written_only_after_the_pieces_are_on_the_disk(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = artifact()
    listing = manifest(body)
    offer(uploads, listing)
    steps: list[str] = []
    fdatasync, write = os.fdatasync, module.replace_file
    monkeypatch.setattr(os, "fdatasync", lambda handle: (steps.append("pieces"), fdatasync(handle))[1])
    monkeypatch.setattr(module, "replace_file", lambda p, b: (steps.append(p.name), write(p, b))[1])
    uploads.put("site-a", listing.sha256, 0, piece(body, 0))
    assert steps == []
    assert uploads.sync("site-a", listing.sha256) == 1
    assert steps == ["pieces", "bitmap"]


def test_pieces_that_a_failed_flush_may_have_lost_are_asked_for_again(
    uploads: Uploads, clock: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = artifact()
    listing = manifest(body)
    offer(uploads, listing)
    uploads.put("site-a", listing.sha256, 0, piece(body, 0))
    uploads.sync("site-a", listing.sha256)
    uploads.put("site-a", listing.sha256, 1, piece(body, 1))

    def broken(_handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fdatasync", broken)
        assert refusal(uploads.sync, "site-a", listing.sha256) == "storage"
    assert offer(uploads, listing) == (1, 2)
    assert offer(Uploads(uploads.root, clock, keep_free=0), listing) == (1, 2)
    for index in (1, 2):
        uploads.put("site-a", listing.sha256, index, piece(body, index))
    assert uploads.finish("site-a", listing.sha256).read_bytes() == body


@pytest.mark.parametrize("harm", ["no manifest", "short manifest", "no part", "short part", "a file"])
def test_an_upload_that_a_crash_left_without_sense_never_began(uploads: Uploads, clock: Hand, harm: str) -> None:
    listing = manifest(artifact())
    offer(uploads, listing)
    folder = uploads.root / "open/site-a" / listing.sha256
    if harm == "no manifest":
        (folder / "manifest").unlink()
    elif harm == "short manifest":
        os.truncate(folder / "manifest", 50)
    elif harm == "no part":
        (folder / "part").unlink()
    elif harm == "short part":
        os.truncate(folder / "part", 5)
    else:
        (folder / "manifest").unlink()
        (folder / "part").rename(folder / "manifest")
    again = Uploads(uploads.root, clock, keep_free=0)
    assert not folder.exists()
    assert refusal(again.sync, "site-a", listing.sha256) == "unknown_upload"
    assert offer(again, listing) == (0, 1, 2)


def test_a_crash_after_the_last_piece_costs_no_second_transfer(uploads: Uploads, clock: Hand) -> None:
    body = artifact()
    listing = manifest(body)
    path = staged(uploads, "site-a", body)
    again = Uploads(uploads.root, clock, keep_free=0)
    assert offer(again, listing) == ()
    assert again.finish("site-a", listing.sha256) == path
    path.unlink()  # the shelf has moved it
    third = Uploads(uploads.root, clock, keep_free=0)
    assert refusal(third.finish, "site-a", listing.sha256) == "unknown_upload"
    assert offer(third, listing) == (0, 1, 2)


def test_a_file_that_the_shelf_took_meanwhile_is_not_claimed(uploads: Uploads) -> None:
    body = artifact()
    listing = manifest(body)
    staged(uploads, "site-a", body).unlink()
    assert refusal(uploads.finish, "site-a", listing.sha256) == "unknown_upload"
    assert offer(uploads, listing) == (0, 1, 2)


def test_orphans_expire_by_the_clock_and_not_by_a_restart(uploads: Uploads, clock: Hand) -> None:
    old, young = manifest(artifact(seed=1)), manifest(artifact(seed=2))
    offer(uploads, old)
    clock.now += 100
    again = Uploads(uploads.root, clock, keep_free=0)
    offer(again, young)
    clock.now += 50
    assert again.expire(120) == 1
    assert not is_open(again.root, "site-a", old.sha256)
    assert refusal(again.sync, "site-a", old.sha256) == "unknown_upload"
    assert offer(again, young) == (0, 1, 2)


_LIMITED = """
import resource, sys
from pathlib import Path
from coordinator.storage.uploads import Uploads, UploadError
from protos.artifacts.chunks import manifest
from tests.support.upload_server import staged
uploads = Uploads(Path(sys.argv[1]), lambda: 0.0, keep_free=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
try:
    staged(uploads, "site-a", b"x" * (3 << 20))
except UploadError as refusal:
    print(refusal.rule)
print(staged(uploads, "site-a", b"y" * (1 << 20)).stat().st_size)
print(len(list((uploads.root / "open").glob("*/*"))))
"""


def test_a_file_that_the_system_does_not_let_grow_is_a_refusal_and_others_go_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "staging")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["disk_full", str(1 << 20), "1"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield place  # type: ignore[misc]
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_refuses_one_upload_and_finishes_those_that_were_promised(small_disk: Path, clock: Hand) -> None:
    uploads = Uploads(small_disk / "staging", clock, keep_free=0)
    body = artifact(5)
    listing = manifest(body)
    offer(uploads, listing)
    assert refusal(offer, uploads, manifest(artifact(4, 1)), "site-b") == "disk_full"
    assert not (small_disk / "staging/open/site-b").exists()
    with (small_disk / "another program").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while True:
            other.write(bytes(4096))
    for index in range(5):
        uploads.put("site-a", listing.sha256, index, piece(body, index))
    assert refusal(uploads.sync, "site-a", listing.sha256) == "disk_full"  # no room for the bitmap
    assert offer(uploads, listing) == (0, 1, 2, 3, 4)
    (small_disk / "another program").unlink()
    assert staged(uploads, "site-a", body).read_bytes() == body


def test_what_other_uploads_were_promised_is_not_promised_again(
    small_disk: Path, clock: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system does not set blocks aside, the books do."""
    monkeypatch.setattr(module, "reserve", lambda path, size: (path.touch(), os.truncate(path, size)))
    uploads = Uploads(small_disk / "staging", clock, keep_free=0)
    offer(uploads, manifest(artifact(5)))
    assert refusal(offer, uploads, manifest(artifact(4, 1))) == "disk_full"
    assert offer(uploads, manifest(artifact(2, 2))) == (0, 1)


_TAKE = """
import sys, time
from pathlib import Path
from coordinator.storage.uploads import Uploads
from protos.artifacts.chunks import manifest, piece
source = Path(sys.argv[2])
peak = lambda: int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])
uploads = Uploads(Path(sys.argv[1]), time.time, keep_free=0)
listing = manifest(source)
before = peak()
uploads.offer("site-a", listing.sha256, listing.size, listing.chunks, 1 << 40)
started = time.perf_counter()
for index in range(len(listing.chunks)):
    uploads.put("site-a", listing.sha256, index, piece(source, index))
    if index % 8 == 7:
        uploads.sync("site-a", listing.sha256)
uploads.finish("site-a", listing.sha256)
seconds = time.perf_counter() - started
print(peak() - before, listing.size / seconds / 1e6, peak())
"""


@pytest.mark.parametrize("mib", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_artifact(tmp_path: Path, mib: int) -> None:
    source = tmp_path / "source"
    with source.open("wb") as out:
        for _ in range(mib):
            out.write(os.urandom(CHUNK))
    done = subprocess.run(
        [sys.executable, "-c", _TAKE, str(tmp_path / "staging"), str(source)],
        capture_output=True,
        text=True,
        check=True,
    )
    grown_kib = int(done.stdout.split()[0])
    assert grown_kib < 4 * 1024
