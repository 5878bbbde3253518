"""Training shards in the WebDataset form: USTAR archives whose members share a stem, the same bytes everywhere."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from coordinator.pools.atomic_directory import digest_of
from coordinator.pools.datasheet import File, as_plain
from coordinator.pools.deduplication import PoolImage, Sample, shuffled
from coordinator.pools.selection import AdmittedRelease, PoolRefusedError, weakest
from protos.common.canonical_json import canonical

SHARD_BYTES: Final = 256 << 20
SETS: Final = "images.tar"
_RECORD: Final = 10_240  # tarfile fills an archive up to a multiple of this
Progress = Callable[[str, int, int], None]  # what is done, how many of them, of how many


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    """Everything that an export's bytes follow from."""

    samples: tuple[tuple[str, Sample], ...]  # key, sample; in order
    classes: dict[str, int]  # label -> number
    sources: Mapping[str, AdmittedRelease]
    archives: Mapping[str, Path]
    shards: tuple[tuple[str, int, int], ...]  # name, first and last sample (exclusive)

    def text(self, place: int) -> bytes:
        """The JSON of one sample."""
        key, sample = self.samples[place]
        places = [{"index": p.index, **as_plain(self.sources[p.release])} for p in sample.pictures]
        level = weakest(str(p["level"]) for p in places)
        whole = {
            "key": key, "label": sample.first.label, "pixels_sha256": sample.first.pixels.hex(),
            "shape": sample.first.shape, **places[0], "level": level, "sources": places,
        }  # fmt: skip
        return canonical(whole)

    def digest(self) -> str:
        """SHA-256 of what the shards will hold."""
        total = hashlib.sha256()
        for place, (_, sample) in enumerate(self.samples):
            total.update(self.text(place) + sample.first.png + b"\n")
        return hashlib.sha256(canonical([total.hexdigest(), self.classes, self.shards])).hexdigest()


def plan_shards(
    kept: Sequence[AdmittedRelease], archives: Mapping[str, Path], samples: Sequence[Sample], seed: int, most: int
) -> DatasetPlan:
    """Shuffle by the public seed, name, number the labels, and cut into shards of at most ``most`` bytes.

    Raises:
        PoolRefusedError: a single image is larger than that.
    """
    order = tuple((f"s{i:08d}", s) for i, s in enumerate(shuffled(samples, seed)))
    classes = {label: i for i, label in enumerate(sorted({s.first.label for s in samples}))}
    whole = DatasetPlan(order, classes, {s.release: s for s in kept}, archives, ())
    shards: list[tuple[str, int, int]] = []
    first, size = 0, 0
    for place, (_, sample) in enumerate(order):
        more = sum(512 + -(-n // 512) * 512 for n in (sample.first.size, len(whole.text(place)), 8))
        if more + 2 * _RECORD > most:
            raise PoolRefusedError(f"an image does not fit into a shard of {most} bytes")
        if size + more + _RECORD > most:
            shards.append((f"pool-{len(shards):06d}.tar", first, place))
            first, size = place, 0
        size += more
    shards.append((f"pool-{len(shards):06d}.tar", first, len(order)))
    return replace(whole, shards=tuple(shards))


def write_shards(part: Path, plan: DatasetPlan, progress: Progress) -> tuple[File, ...]:
    """The shards, each durable before the next; one that a killed export has finished is kept."""
    out = []
    for done, (name, first, last) in enumerate(plan.shards):
        progress("shard", done, len(plan.shards))
        path, mark = part / name, part / f"{name}.done"
        digest = digest_of(path) if path.exists() and mark.exists() else ""
        if not digest or mark.read_text() != digest:
            _write_shard(path, plan, first, last)
            digest = digest_of(path)
            mark.write_text(digest)
        out.append(File(name, path.stat().st_size, digest, last - first))
    return tuple(out)


def _write_shard(path: Path, plan: DatasetPlan, first: int, last: int) -> None:
    with path.open("wb") as raw:
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for place in range(first, last):
                key, sample = plan.samples[place]
                number = str(plan.classes[sample.first.label]).encode()
                for kind, body in (("cls", number), ("json", plan.text(place)), ("png", _png(plan, sample.first))):
                    info = tarfile.TarInfo(f"{key}.{kind}")
                    info.size, info.mode = len(body), 0o644
                    archive.addfile(info, io.BytesIO(body))
        raw.flush()
        os.fsync(raw.fileno())


def _png(plan: DatasetPlan, picture: PoolImage) -> bytes:
    with plan.archives[picture.release].open("rb") as archive:
        archive.seek(picture.start)
        body = archive.read(picture.size)
    if hashlib.sha256(body).digest() != picture.png:
        raise PoolRefusedError(f"{picture.release}: {SETS} was changed while the pool was written")
    return body
