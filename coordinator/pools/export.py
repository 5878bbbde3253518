"""Pools on disk: read admitted sets from the shelf, export them for training, all or nothing.

An export is built in ``OUT.part`` and renamed when all of it is durable. What a killed export left there is used
again, shard by shard, if it was for the same pool; any error removes it. One image is held at a time.

For the command line: :func:`read_books`, :func:`list_releases`, :func:`export_pool`; every result is a dataclass of
plain values, so ``json.dumps(as_json(result))`` is the ``--json`` form.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.pools.atomic_directory import atomic_directory
from coordinator.pools.datasheet import Card, File, PoolReport, SourceSummary, croissant, readme, size_of
from coordinator.pools.deduplication import (
    MergedSamples,
    PoolImage,
    merge,
    near_duplicates,
    perceptual_hash,
    pixel_digest,
)
from coordinator.pools.selection import (
    AdmittedRelease,
    LeftOut,
    PoolLedger,
    PoolRefusedError,
    SelectionCriteria,
    books_of,
    budget,
    select,
    source_of,
    weakest,
)
from coordinator.pools.webdataset import SETS, SHARD_BYTES, DatasetPlan, Progress, plan_shards, write_shards
from coordinator.storage.directory import CoordinatorDirectory, look_at_ledger
from policies.ledger.entries import decode
from policies.statements import claim_json
from protos.artifacts.byte_source import ArtifactFormatError, BytesSource, FileSource, Window
from protos.artifacts.shards import check_kept_shard, read_kept_png
from protos.common.canonical_json import canonical
from protos.common.durable_files import replace_file

# What else a release's folder may hold, and why it cannot be pooled.
_OTHERS: Final[Mapping[str, tuple[str, str]]] = {
    "artifact.hpke": (
        "encrypted",
        "it is encrypted to a recipient who is not the coordinator: only that recipient can use it",
    ),
    "volumes.tar": ("volumes", "it holds volumes; a pool holds images"),
    "artifact": ("other", "it is neither images nor a model"),
    "model.safetensors": ("model", "it is a model, which stays in the release store; `pool average` merges several"),
}


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """A release or a run's model, as ``pool list`` shows it."""

    id: str
    site: str
    mechanism: str
    level: str
    modality: str
    claim: dict[str, Any]
    k: int | None
    epsilon: float | None
    delta: float | None
    at: int
    holds: str  # "images" | "volumes" | "model" | "encrypted" | "missing" | "refused"
    why: str = ""  # it cannot be pooled


def read_books(home: CoordinatorDirectory) -> PoolLedger:
    """The coordinator's ledger, also while another process writes it."""
    disk = look_at_ledger(home)
    try:
        return books_of(decode(raw) for raw in disk.bodies())
    finally:
        disk.close()


def as_json(value: Any) -> Any:
    """A result as JSON values: claims in their written form, no sets, no paths."""
    if isinstance(value, AdmittedRelease):
        plain = {name: as_json(part) for name, part in asdict(value).items() if name != "claim"}
        return {**plain, "claim": claim_json(value.claim)}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: as_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    return [as_json(v) for v in value] if isinstance(value, tuple | list) else value


def list_releases(home: CoordinatorDirectory, ledger: PoolLedger) -> list[ReleaseRow]:
    """Every image set, volume set and model that the ledger admitted, or that stands on the shelf, by its name.

    Artifacts are not hashed here; an export does it.
    """
    alone = {name for name, entry in ledger.state.releases.items() if not entry.run}
    there = {path.name for path in home.releases.glob("[!.]*") if path.is_dir()}
    return [_row(home.releases / name, ledger) for name in sorted(alone | there)]


def _row(folder: Path, ledger: PoolLedger) -> ReleaseRow:
    name = folder.name
    if name in ledger.models and (folder / "model.safetensors").exists():
        mine = [a for a in ledger.state.releases.values() if a.run == name]
        last = max((ledger.at.get(a.release, 0) for a in mine), default=0)
        level, sites = weakest(a.level for a in mine), ", ".join(sorted({a.site for a in mine}))
        return ReleaseRow(name, sites, mine[0].mechanism, level, "", {}, None, None, None, last, "model")
    try:
        source = source_of(ledger, name, envelope_of(folder))
    except PoolRefusedError as refusal:
        gone = "missing", "the ledger admitted it, but its file is missing"
        found = ("refused", str(refusal)) if folder.exists() else gone
        return ReleaseRow(name, "", "", "", "", {}, None, None, None, 0, *found)
    holds, why = _holds(folder, source)
    return ReleaseRow(
        name, source.site, source.mechanism, source.level, source.modality, claim_json(source.claim), source.k,
        source.epsilon, source.delta, source.at, holds, why,
    )  # fmt: skip


def _holds(folder: Path, source: AdmittedRelease) -> tuple[str, str]:
    """What a folder holds, and why it cannot be in a pool; "" if it can."""
    if source.reader:
        return _OTHERS["artifact.hpke"]
    for name, answer in _OTHERS.items():
        if (folder / name).exists():
            return answer
    return ("images", "") if (folder / SETS).exists() else ("missing", "its artifact is not in the release store")


def envelope_of(folder: Path) -> bytes:
    """The sealed statement beside an artifact; nothing if there is none."""
    try:
        return (folder / "envelope.json").read_bytes()
    except OSError:
        return b""


def gather(
    home: CoordinatorDirectory, ledger: PoolLedger, wanted: SelectionCriteria
) -> tuple[list[AdmittedRelease], list[LeftOut]]:
    """The admitted sets that a pool shall hold, and what is left out.

    Raises:
        PoolRefusedError: a folder is not what the ledger admitted; leave it out by name, once somebody has looked at
        it.
    """
    sources, left = [], []
    for name in sorted({path.name for path in home.releases.glob("[!.]*") if path.is_dir()} - set(ledger.models)):
        if name in wanted.without:
            left.append(LeftOut(name, "excluded", "left out by name"))
            continue
        source = source_of(ledger, name, envelope_of(home.releases / name))
        holds, why = _holds(home.releases / name, source)
        if why:
            left.append(LeftOut(name, holds, why))
        else:
            sources.append(source)
    known = {s.release for s in sources} | {x.release for x in left}
    lost = [n for n, entry in ledger.state.releases.items() if not entry.run and n not in known]
    left += [LeftOut(n, "missing", "the ledger admitted it, but its file is missing") for n in sorted(lost)]
    kept, unwanted = select(sources, wanted)
    return kept, sorted([*left, *unwanted], key=lambda x: x.release)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How a pool is written."""

    seed: int = 0  # of the shuffle; public
    shard_bytes: int = SHARD_BYTES  # at most
    card: Card = field(default_factory=Card)


def export_pool(
    home: CoordinatorDirectory,
    ledger: PoolLedger,
    out: Path,
    wanted: SelectionCriteria,
    options: ExportOptions | None = None,
    progress: Progress = lambda _what, _done, _of: None,
) -> PoolReport:
    """Write the pool of the admitted sets that are wanted; the same pool has the same bytes everywhere.

    Args:
        out: a directory that does not exist yet.
    Raises:
        PoolRefusedError: nothing to pool, a tampered release, modalities or shapes that differ and were not asked
            for, a directory in the way, a full disk. Nothing is left behind at ``out``.
    """
    options = options or ExportOptions()
    if out.exists():  # before an hour of reading; looked at again when it is made
        raise PoolRefusedError(f"{out.name} exists already: name a new directory")
    kept, left = gather(home, ledger, wanted)
    if not kept:
        reasons = ", ".join(f"{n} x {rule}" for rule, n in sorted(Counter(x.rule for x in left).items()))
        raise PoolRefusedError(f"no admitted release fits: {reasons or 'the release store is empty'}")
    _same("modality", {s.modality for s in kept}, wanted)
    kept, pictures, odd = _read(home, kept, progress)
    left += odd
    _same("shape", {size_of(p.shape) for p in pictures}, wanted)
    merged = merge(pictures)
    if not merged.samples:
        raise PoolRefusedError("no image is left: the sets hold none, or hospitals label the same pixels differently")
    archives = {s.release: home.releases / s.release / SETS for s in kept}
    plan = plan_shards(kept, archives, merged.samples, options.seed, options.shard_bytes)
    with atomic_directory(out, plan.digest()) as part:
        shards = write_shards(part, plan, progress)
        report = _report(out, plan, merged, options.seed, (kept, pictures, left), shards)
        _write_card(part, plan, report, options.card)
        for mark in part.glob("*.done"):
            mark.unlink()
    progress("done", len(shards), len(shards))
    return report


def _read(
    home: CoordinatorDirectory, wanted: Sequence[AdmittedRelease], progress: Progress
) -> tuple[list[AdmittedRelease], list[PoolImage], list[LeftOut]]:
    """The sets that hold images, their images, and the other sets."""
    kept: list[AdmittedRelease] = []
    pictures: list[PoolImage] = []
    left: list[LeftOut] = []
    for done, source in enumerate(wanted):
        progress("read", done, len(wanted))
        found = read_pool_images(home.releases / source.release / SETS, source)
        if isinstance(found, LeftOut):
            left.append(found)
        else:
            kept.append(source)
            pictures += found
    return kept, pictures, left


def _same(what: str, values: set[str], wanted: SelectionCriteria) -> None:
    if len(values) > 1 and what not in wanted.mixed:
        found = ", ".join(sorted(values))
        raise PoolRefusedError(
            f"more than one {what} ({found}): filter, or ask for mixed {what}s; nothing is resized"
        )


def read_pool_images(archive: Path, source: AdmittedRelease) -> list[PoolImage] | LeftOut:
    """The images of an admitted set, each with the place of its file; one image is held at a time.

    Raises:
        PoolRefusedError: the archive is not the one that the ledger admitted, or cannot be read.
    """
    out: list[tuple[Any, ...]] = []

    def take(sample: Window) -> None:
        raw = sample.read(0, sample.size)
        if raw[:4] == b"\x89PNG":  # of another form: said below
            image = read_kept_png(BytesSource(raw))
            at = (sample.start, sample.size, hashlib.sha256(raw).digest())
            out.append((pixel_digest(image), image.shape, perceptual_hash(image), *at))

    try:
        with archive.open("rb") as raw:
            if hashlib.file_digest(raw, "sha256").hexdigest() != source.artifact:
                raise PoolRefusedError(
                    f"{source.release}: {archive.name} is not the one in the ledger; it was changed"
                )
            labels = check_kept_shard(FileSource.of(raw.fileno()), take).labels
    except (ArtifactFormatError, OSError) as error:
        raise PoolRefusedError(f"{source.release}: its images cannot be read: {error}") from None
    if len(out) != len(labels):
        return LeftOut(source.release, "form", "it holds other samples than PNG; a pool holds images")
    return [
        PoolImage(source.release, i, pixels, shape, label, seen, *at)
        for i, ((pixels, shape, seen, *at), label) in enumerate(zip(out, labels, strict=True))
    ]


def _report(
    out: Path,
    plan: DatasetPlan,
    merged: MergedSamples,
    seed: int,
    found: tuple[Sequence[AdmittedRelease], Sequence[PoolImage], Sequence[LeftOut]],
    shards: tuple[File, ...],
) -> PoolReport:
    kept, pictures, left = found
    sites = {s.release: s.site for s in kept}
    labels = Counter(sample.first.label for _, sample in plan.samples)
    near = near_duplicates([s.first.look for _, s in plan.samples], [sites[s.first.release] for _, s in plan.samples])
    many = Counter(p.release for p in pictures)
    shared = Counter(p.release for s in merged.samples if len(s.pictures) > 1 for p in s.pictures)
    modalities = tuple(sorted({s.modality for s in kept}))
    return PoolReport(
        out=out.name,
        seed=seed,
        level=weakest(s.level for s in kept),
        samples=len(plan.samples),
        duplicates=merged.duplicates,
        contradictions=len(merged.contradictions),
        classes={label: labels[label] for label in plan.classes},
        modalities=modalities,
        shapes=tuple(sorted({s.first.shape for _, s in plan.samples})),
        near=near,
        parts=tuple(SourceSummary(s, many[s.release], shared[s.release]) for s in kept),
        left_out=tuple(left),
        budgets=(budget(kept), *(budget(kept, m) for m in modalities if len(modalities) > 1)),
        shards=shards,
    )


def _write_card(part: Path, plan: DatasetPlan, report: PoolReport, card: Card) -> None:
    """What stands beside the shards; the sums come last."""
    names = ("key", "label", "site", "release", "mechanism", "level", "modality", "pixels_sha256")
    samples = ((json.loads(plan.text(i)), s.first.label) for i, (_, s) in enumerate(plan.samples))
    entries = ({**{name: said[name] for name in names}, "cls": plan.classes[label]} for said, label in samples)
    index = b"".join(canonical(entry) + b"\n" for entry in entries)
    listed = File("index.jsonl", len(index), hashlib.sha256(index).hexdigest())
    described = croissant(report, card, listed)
    texts = {
        "index.jsonl": index,
        "classes.json": canonical(plan.classes) + b"\n",
        "croissant.json": json.dumps(described, indent=2, sort_keys=True).encode() + b"\n",
        "README.md": readme(report, card).encode(),
    }
    sums = {shard.name: shard.sha256 for shard in report.shards}
    for name, body in texts.items():
        sums[name] = hashlib.sha256(body).hexdigest()
        replace_file(part / name, body)
    replace_file(part / "SHA256SUMS", "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode())
