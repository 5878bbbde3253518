"""``python -m tests.fuzz [TARGET ...] --seconds N``: the parsers of the law and of ingest, with atheris.

libFuzzer runs the targets one at a time.

Each target runs in a process of its own, from the committed corpus, the made seeds and the out folder's corpus of
earlier runs. A finding does not end a run: every distinct one (error type and the line that raised it) is kept once,
as the shortest input seen, under ``OUT/TARGET/findings/``. Exit 0 nothing found, 1 a finding, 2 usage.

atheris is no dependency of the project: ``pip install atheris``.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import atheris  # type: ignore[import-untyped]  # not a dependency: see above

_FUZZED: Final = [
    "policies",
    "protos.common.dsse",
    "tomllib",
    "agent.deidentify",
    "agent.ingest",
    "agent.pacs",
    "agent.volumes",
]
with atheris.instrument_imports(include=_FUZZED):
    from tests.fuzz.mutate import mutated
    from tests.fuzz.seeds import made
    from tests.fuzz.targets import TARGETS, Target

ROOT: Final = Path(__file__).parent.parent.parent
CORPUS: Final = Path(__file__).parent / "corpus"
MAX_BYTES: Final = 1 << 17
KEPT_BYTES: Final = 2048  # of a corpus input worth committing
CANDIDATES: Final = 2000


@dataclass(frozen=True, slots=True)
class Place:
    """Where one target's run leaves what it finds."""

    corpus: Path
    findings: Path

    @staticmethod
    def under(out: Path, target: str) -> Place:
        """Make the folders of a target."""
        place = Place(out / target / "corpus", out / target / "findings")
        for folder in (place.corpus, place.findings):
            folder.mkdir(parents=True, exist_ok=True)
        return place


def signature(error: BaseException) -> str:
    """What makes two failures one finding: the error's type, and the innermost line of ours that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if ROOT in Path(f.filename).parents and f.name != "_promise"]
    last = (ours or list(frames))[-1]
    where = f"{Path(last.filename).stem}-{last.lineno}"
    return re.sub(r"[^\w-]", "_", f"{type(error).__name__}-{where}")


def keep(place: Place, error: BaseException, data: bytes) -> None:
    """Write a finding down; the shortest input for each signature stays."""
    path = place.findings / signature(error)
    if not path.exists() or len(data) < path.stat().st_size:
        path.write_bytes(data)
        path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))


def child(name: str, out: Path, libfuzzer: list[str]) -> None:
    """Fuzz one target in this process; libFuzzer ends it."""
    target, place = TARGETS[name], Place.under(out, name)

    def one(data: bytes) -> None:
        try:
            target.check(data)
        except Exception as error:  # noqa: BLE001 - whatever comes out is a finding, and the run goes on
            keep(place, error, data)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        return mutation(target, data, max_size, seed)

    atheris.Setup([sys.argv[0], *libfuzzer], one, custom_mutator=mutator)
    atheris.Fuzz()


def mutation(target: Target, data: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's own mutation or one that knows the format, at a coin's fall."""
    dice = random.Random(seed)
    if dice.random() < 0.4:
        return bytes(atheris.Mutate(data, max_size))
    return mutated(data, target.kind, dice)[:max_size]


@dataclass(frozen=True, slots=True)
class Row:
    """What one target's run came to."""

    target: str
    executions: int
    per_second: int
    coverage: str  # edges / features, as libFuzzer counts them
    findings: tuple[str, ...]


def fuzz(name: str, out: Path, seconds: int) -> Row:
    """Run one target in a child process for about so many seconds."""
    place = Place.under(out, name)
    for i, seed in enumerate(made(name)):
        (place.corpus / f"made-{i}").write_bytes(seed)
    committed = CORPUS / name
    folders = [str(place.corpus), *([str(committed)] if committed.is_dir() else [])]
    limits = [f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", "-timeout=30", "-rss_limit_mb=2048"]
    crashes = [f"-artifact_prefix={place.findings}/", "-print_final_stats=1", "-verbosity=1", "-len_control=20"]
    text, code = _run(name, out, [*limits, *crashes, *folders])
    (out / name / "log.txt").write_text(text)
    counted = re.search(r"stat::number_of_executed_units:\s*(\d+)", text)
    seen = re.findall(r"cov: (\d+) ft: (\d+)", text)
    executions = int(counted[1]) if counted else 0
    found = {p.name for p in place.findings.iterdir() if p.suffix != ".txt"}
    if code or not executions:
        found.add(f"the run ended with {code}: see log.txt")
    coverage = "/".join(seen[-1]) if seen else "-"
    return Row(name, executions, executions // max(seconds, 1), coverage, tuple(sorted(found)))


def _run(name: str, out: Path, libfuzzer: list[str]) -> tuple[str, int]:
    command = [sys.executable, "-m", "tests.fuzz", "--out", str(out), "--child", name, *libfuzzer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout + done.stderr, done.returncode


def reached(target: Target, data: bytes) -> set[tuple[str, int, int]]:
    """The jumps from line to line, in the law and the envelopes, that an input leads through."""
    jumps: set[tuple[str, int, int]] = set()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        path = frame.f_code.co_filename
        if not {"policies", "protos", "tomllib", "deidentify", "ingest", "pacs", "volumes"} & set(Path(path).parts):
            return None
        jumps.add((path, last.get(frame, 0), frame.f_lineno))
        last[frame] = frame.f_lineno
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        target.check(data)
    except Exception:  # noqa: BLE001 - a finding is kept as one, not as a seed
        return set()
    finally:
        sys.settrace(before)
    return jumps


def distil(name: str, out: Path, most: int) -> int:
    """Add to the committed corpus up to ``most`` short inputs that lead where the seeds do not; how many."""
    base, target = CORPUS / name, TARGETS[name]
    base.mkdir(parents=True, exist_ok=True)
    seen: set[tuple[str, int, int]] = set()
    for seed in (*made(name), *(path.read_bytes() for path in base.iterdir())):
        seen |= reached(target, seed)
    short = [p for p in (out / name / "corpus").iterdir() if p.stat().st_size <= KEPT_BYTES]
    kept = 0
    for path in sorted(short, key=lambda p: (p.stat().st_size, p.name))[:CANDIDATES]:
        fresh = reached(target, path.read_bytes()) - seen
        if fresh and kept < most:
            shutil.copyfile(path, base / path.name[:16])
            seen |= fresh
            kept += 1
    return kept


def show(rows: list[Row]) -> None:
    """The table."""
    print(f"{'target':<11}{'executions':>12}{'exec/s':>9}{'edges/features':>17}  findings")
    for row in rows:
        found = ", ".join(row.findings) or "none"
        print(f"{row.target:<11}{row.executions:>12,}{row.per_second:>9,}{row.coverage:>17}  {found}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="fuzz the parsers of the law and of ingest"
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all without one")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz", help="findings, corpora and logs")
    parser.add_argument(
        "--keep", type=int, default=0, help="new inputs of each target to add to the committed corpus"
    )
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # TARGET, libFuzzer's arguments
    arguments = parser.parse_args()
    names: list[str] = arguments.targets
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target is named {', '.join(unknown)}")
    out = arguments.out.resolve()
    if arguments.child:
        child(arguments.child[0], out, arguments.child[1:])
        return 0
    rows = []
    for name in names or list(TARGETS):
        rows.append(fuzz(name, out, arguments.seconds))
        show(rows[-1:])
        if arguments.keep:
            print(f"{distil(name, out, arguments.keep)} inputs kept in {CORPUS / name}")
    show(rows)
    print(f"findings are under {out}")
    return int(any(row.findings for row in rows))


if __name__ == "__main__":
    sys.exit(main())
