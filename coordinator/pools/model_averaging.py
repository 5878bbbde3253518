"""Models of several admitted runs or releases, merged by a public weighted average; only the result is kept.

Every file is checked against the ledger and against one architecture (:mod:`protos.artifacts.strict_safetensors`),
then all are read side by side in blocks: float64 sums, bounded memory however large the models are. Weights are the
operator's and public. A rule like "by the number of patients" would publish a count, which is a release of its own;
so no site's word about its own size enters here, and no source has more than :data:`MOST` of the sum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.claim_descriptions import evidence
from coordinator.explanations import LEVELS
from coordinator.pools.atomic_directory import atomic_directory
from coordinator.pools.datasheet import OVERLAP
from coordinator.pools.export import as_json, envelope_of
from coordinator.pools.selection import (
    AdmittedRelease,
    PoolBudget,
    PoolLedger,
    PoolRefusedError,
    budget,
    source_of,
    update_of,
    weakest,
)
from coordinator.storage.directory import CoordinatorDirectory
from policies.tasks.released_model import SUMS
from protos.artifacts.byte_source import BLOCK, ArtifactFormatError, FileSource
from protos.artifacts.strict_safetensors import WIDTHS, Architecture, Tensor, check_weights
from protos.common.durable_files import replace_file

MOST: Final = 0.75  # of the weights, for one source
_MODEL: Final = "model.safetensors"
_CERTIFICATE: Final = "certificate.json"
_REALS: Final[Mapping[str, str]] = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Ingredient:
    """One model of a merge."""

    name: str  # of the run or the release
    weight: float  # share of the sum
    sha256: str
    level: str
    sites: tuple[str, ...]
    tested: str = ""  # at level C: what was measured of it


@dataclass(frozen=True, slots=True)
class MergeReport:
    """A merged model, and what it rests on."""

    out: str
    sha256: str
    bytes: int
    tensors: int
    architecture: str  # SHA-256 of the architecture
    level: str  # the weakest
    meaning: str
    ingredients: tuple[Ingredient, ...]
    budget: PoolBudget  # per site, and for a patient of all of them
    overlap: str  # what the second of these is about


def average_runs(
    home: CoordinatorDirectory,
    ledger: PoolLedger,
    out: Path,
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    progress: Progress = lambda _what, _done, _of: None,
) -> MergeReport:
    """Merge the models of finished runs, or admitted single models, into ``OUT/model.safetensors``.

    Args:
        names: of runs or releases, each once, at least two.
        weights: one for each name, positive; equal ones if not given. They are printed in the certificate.
    Raises:
        PoolRefusedError: a model that the ledger does not know, or not with these bytes; weights out of bounds;
            models of different architectures; a full disk. Nothing is left behind at ``out``.
    """
    shares = shares_of(names, weights)
    paid: list[AdmittedRelease] = []
    ingredients = []
    for name in sorted(names):
        sources, digest = _behind(home, ledger, name)
        paid += sources
        level, sites = weakest(s.level for s in sources), tuple(sorted({s.site for s in sources}))
        measured = evidence(sources[0].reid_rate, sources[0].vetting_power) if level == "C" else ""
        ingredients.append(Ingredient(name, shares[name], digest, level, sites, measured))
    paths = [home.releases / i.name / _MODEL for i in ingredients]
    if lost := [path.parent.name for path in paths if not path.is_file()]:
        raise PoolRefusedError(f"{lost[0]}: {_MODEL} is not in the release store")
    plan = hashlib.sha256(json.dumps([asdict(i) for i in ingredients]).encode()).hexdigest()
    with atomic_directory(out, plan) as part:
        done = average_models(paths, [i.weight for i in ingredients], part / _MODEL, progress)
        for ingredient, digest in zip(ingredients, done.sources, strict=True):
            if digest != ingredient.sha256:
                raise PoolRefusedError(f"{ingredient.name}: {_MODEL} is not the one in the ledger; it was changed")
        report = _report(out, done, ingredients, budget(paid))
        replace_file(part / _CERTIFICATE, json.dumps(as_json(report), indent=2, sort_keys=True).encode() + b"\n")
    return report


def export_model(
    home: CoordinatorDirectory, ledger: PoolLedger, out: Path, name: str, cards: Mapping[str, bytes]
) -> dict[str, str]:
    """One model of a finished run, or an admitted single one, with its certificate and its card, into ``OUT``.

    Args:
        home: the coordinator's.
        ledger: what it admitted.
        out: a directory that does not exist yet.
        name: of the run or the release.
        cards: the files of its card, by name.
    Returns:
        The SHA-256 of each file.
    Raises:
        PoolRefusedError: a model that the ledger does not know, or not with these bytes; or ``out`` cannot be made.
    """
    _, digest = _behind(home, ledger, name)
    folder = home.releases / name
    try:
        files = {_MODEL: folder / _MODEL, _CERTIFICATE: folder / _CERTIFICATE}
        with files[_MODEL].open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise PoolRefusedError(f"{name}: {_MODEL} is not in the release store: {error.strerror}") from None
    if found != digest:
        raise PoolRefusedError(f"{name}: {_MODEL} is not the one in the ledger; it was changed")
    plan = hashlib.sha256(json.dumps([name, digest]).encode()).hexdigest()
    with atomic_directory(out, plan) as part:
        shutil.copyfile(files[_MODEL], part / _MODEL)
        for file, body in {_CERTIFICATE: files[_CERTIFICATE].read_bytes(), **cards}.items():
            replace_file(part / file, body)
        sums = {file: _sha256(part / file) for file in sorted([_MODEL, _CERTIFICATE, *cards])}
        if sums[_MODEL] != digest:
            raise PoolRefusedError(f"{name}: {_MODEL} was changed while it was copied")
        replace_file(part / "SHA256SUMS", "".join(f"{one}  {file}\n" for file, one in sums.items()).encode())
    return sums


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _report(out: Path, done: Averaged, ingredients: Sequence[Ingredient], cost: PoolBudget) -> MergeReport:
    level = weakest(i.level for i in ingredients)
    facts = (done.sha256, done.size, done.tensors, done.architecture)
    meaning = LEVELS[level][1] + ("; the merged model itself was not tested" if level == "C" else "")
    return MergeReport(out.name, *facts, level, meaning, tuple(ingredients), cost, OVERLAP)


def shares_of(names: Sequence[str], weights: Sequence[float] | None) -> dict[str, float]:
    """Each source's share of the sum.

    Raises:
        PoolRefusedError: fewer than two sources, one twice, a weight that is not positive and finite, or one too
        large.
    """
    given = [1.0] * len(names) if weights is None else [float(w) for w in weights]
    if len(names) < 2 or len(set(names)) != len(names) or len(given) != len(names):
        raise PoolRefusedError("name two or more models, each once, and one weight for each or none")
    if not all(math.isfinite(w) and w > 0 for w in given):
        raise PoolRefusedError("weights are finite numbers above 0")
    total = math.fsum(given)
    shares = {name: w / total for name, w in zip(names, given, strict=True)}
    if not max(shares.values()) <= MOST:
        raise PoolRefusedError(
            f"one source has {max(shares.values()):.0%} of the weight; at most {MOST:.0%} are allowed"
        )
    return shares


def _behind(home: CoordinatorDirectory, ledger: PoolLedger, name: str) -> tuple[list[AdmittedRelease], str]:
    """Everything that was released into a model, and the model's SHA-256 in the ledger."""
    if name in ledger.models:
        number, digest = ledger.models[name]
        state = ledger.state
        mine = [a for a in state.releases.values() if a.run == name and (name, a.round, a.site) in state.aggregated]
        if not mine or number != state.rounds.get(name):
            raise PoolRefusedError(f"{name}: its rounds are not in order in the ledger")
        return [update_of(ledger, entry) for entry in mine], digest.hex()
    source = source_of(ledger, name, envelope_of(home.releases / name))
    if source.artifact_type != "model":
        raise PoolRefusedError(f"{name}: it is not a model but of the type {source.artifact_type}: see `pool export`")
    if source.reader:
        raise PoolRefusedError(f"{name}: it is encrypted to a recipient who is not the coordinator")
    return [source], source.artifact


@dataclass(frozen=True, slots=True)
class Averaged:
    """The result of :func:`average_models`, and the SHA-256 of every file that it read, in their order."""

    sha256: str
    size: int
    tensors: int
    architecture: str
    sources: tuple[str, ...]


def average_models(
    paths: Sequence[Path], shares: Sequence[float], out: Path, progress: Progress = lambda _what, _done, _of: None
) -> Averaged:
    """The weighted average of strict safetensors files, tensor by tensor.

    Real numbers are summed in float64 in the order given and rounded once, to their own type. Whole numbers and truth
    values have no average: they must be the same in all files. At most a few blocks of 4 MiB are held.

    Args:
        shares: positive, of sum 1.
    Raises:
        PoolRefusedError: names, shapes or types differ, a value is not finite (an average too), or not the strict
        profile. OSError: a file cannot be read or written.
    """
    with ExitStack() as stack:
        files = [FileSource.of(stack.enter_context(path.open("rb")).fileno()) for path in paths]
        with _named(paths[0].parent.name):
            architecture = Architecture.shown_by(files[0])
        if any(tensor.name == SUMS for tensor in architecture.tensors):
            raise PoolRefusedError(
                f"{paths[0].parent.name}: its file holds what a look at that very model found, which is not true of "
                "a mean: merge models that were trained without [evaluate]"
            )
        for done, (path, file) in enumerate(zip(paths, files, strict=True)):
            progress("check", done, len(files))
            with _named(path.parent.name):
                check_weights(file, architecture)
        header = architecture.header()
        read = [hashlib.sha256(file.read(0, len(header))) for file in files]
        made = hashlib.sha256(header)
        target = stack.enter_context(out.open("wb"))
        target.write(header)
        for done, (tensor, start) in enumerate(architecture.placed()):
            progress("average", done, len(architecture.tensors))
            for parts in _side_by_side(files, len(header) + start, tensor.nbytes):
                for hasher, part in zip(read, parts, strict=True):
                    hasher.update(part)
                block = _mean(parts, shares, tensor)
                made.update(block)
                target.write(block)
        target.flush()
        os.fsync(target.fileno())
    size = len(header) + architecture.nbytes
    digests = tuple(hasher.hexdigest() for hasher in read)
    return Averaged(made.hexdigest(), size, len(architecture.tensors), architecture.digest(), digests)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say which model it is about."""
    try:
        yield
    except ArtifactFormatError as error:
        raise PoolRefusedError(f"{name}: {error}") from None


def _side_by_side(files: Sequence[FileSource], start: int, count: int) -> Iterator[list[bytes]]:
    """The same block of every file, one after the other."""
    for offset in range(start, start + count, BLOCK):
        yield [file.read(offset, min(BLOCK, start + count - offset)) for file in files]


def _mean(parts: Sequence[bytes], shares: Sequence[float], tensor: Tensor) -> bytes:
    """The weighted mean of one block, in the tensor's own type."""
    if tensor.dtype not in _REALS and tensor.dtype != "BF16":
        if len(set(parts)) > 1:
            raise PoolRefusedError(
                f"{tensor.name} has the type {tensor.dtype}, which has no average, and the models differ"
            )
        return parts[0]
    total = np.zeros(len(parts[0]) // WIDTHS[tensor.dtype], np.float64)
    for share, part in zip(shares, parts, strict=True):
        total += share * _read(part, tensor.dtype)
    with np.errstate(over="ignore"):
        made = _bf16(total) if tensor.dtype == "BF16" else total.astype(_REALS[tensor.dtype])
    values = _read(made.tobytes(), tensor.dtype)
    if not bool(np.isfinite(values).all()):
        raise PoolRefusedError(f"{tensor.name}: an average is not finite")
    return made.tobytes()


def _read(block: bytes, dtype: str) -> NDArray[np.float64]:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(block, _REALS[dtype]).astype(np.float64)


def _bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Rounded to the nearest bfloat16, to even when two are as near.

    Through float32 rounded to odd, so that rounding twice gives what rounding once does (Boldo & Melquiond 2008).
    """
    single = values.astype("<f4")
    bits = single.view("<u4").astype(np.int64)
    back = single.astype(np.float64)
    away = np.abs(back) > np.abs(values)  # rounded away from zero: step back, then the odd neighbour stands for both
    bits -= away
    bits |= back != values
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).astype("<u2")
