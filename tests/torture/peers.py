"""The torture set through other anonymisers, each in a virtual environment of its own, and the table of all.

Needs pip, Debian's ``orthanc`` and ``libgdcm-tools`` for two rows, ``dicom3tools`` for dciodvfy. A tool that is not
there has a row that says so. None of them is a dependency of the product.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.torture import orthanc, product
from tests.torture.plants import Made, torture
from tests.torture.score import ACTIONS, Score, score, write

RUNNER: Final = Path(__file__).with_name("peer_runner.py")
Run = Callable[[Path, Path, Path], tuple[float, int]]  # files in, files out, own folder -> CPU seconds, files


class NotHere(RuntimeError):
    """The tool cannot be installed or started on this machine."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tool's line of the table."""

    name: str
    result: Score
    cpu_ms: float
    files: int
    plants: int
    pictures: int


def _python(requirement: str, name: str) -> Run:
    """A Python package, installed at a pinned version into a virtual environment that is made for it."""

    def run(source: Path, target: Path, work: Path) -> tuple[float, int]:
        home = work.parent / f"venv-{requirement.replace('==', '-')}"
        python = home / "bin" / "python"
        if not python.exists():
            venv.create(home, with_pip=True)
            install = [str(python), "-m", "pip", "install", "-q", requirement]
            if subprocess.run(install, check=False, capture_output=True).returncode:
                shutil.rmtree(home)
                raise NotHere(f"pip cannot install {requirement}")
        command = [str(part) for part in (python, RUNNER, name, source, target)]
        with (work / "log.txt").open("wb") as log:
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=log)
        if done.returncode:
            raise NotHere(f"{requirement} does not run")
        seconds, files = done.stdout.decode(errors="replace").splitlines()[-1].split()
        return float(seconds), int(files)

    return run


def _orthanc(source: Path, target: Path, work: Path) -> tuple[float, int]:
    try:
        return orthanc.anonymise(source, target, work / "server")
    except OSError as error:
        raise NotHere(f"Orthanc does not run: {type(error).__name__}") from None


def _gdcmanon(source: Path, target: Path, work: Path) -> tuple[float, int]:
    """One process for each file: with a folder it stops at the first file that it cannot read. Its start counts."""
    program = shutil.which("gdcmanon")
    if program is None:
        raise NotHere("gdcmanon is not installed")
    certificate = work / "certificate.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=torture", "-days", "2"]
    subprocess.run(
        [*request, "-keyout", str(work / "key.pem"), "-out", str(certificate)], check=True, capture_output=True
    )
    files = sorted(source.iterdir())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for path in files:
        command = [program, "-e", "-c", str(certificate), "-i", str(path), "-o", str(target / path.name)]
        done = subprocess.run(command, check=False, capture_output=True, timeout=60)
        if done.returncode:
            (target / path.name).unlink(missing_ok=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, len(files)


PEERS: Final[Mapping[str, Run]] = MappingProxyType(
    {
        "dicom-anonymizer 2.1.0": _python("dicom-anonymizer==2.1.0", "dicom-anonymizer"),
        "dicom-anonymizer 2.1.0, 2026c": _python("dicom-anonymizer==2.1.0", "dicom-anonymizer-2026c"),
        "dicognito 0.19.0": _python("dicognito==0.19.0", "dicognito"),
        "deid 0.4.13": _python("deid==0.4.13", "deid"),
        "Orthanc 1.10.1 /anonymize": _orthanc,
        "gdcmanon 3.0.21 -e": _gdcmanon,
    }
)


def _row(name: str, made: tuple[Made, ...], outputs: Mapping[str, bytes], cpu: float, work: Path) -> Row:
    result = score(made, outputs)
    write(work / "score.json", result)
    plants = sum(len([p for p in file.plants if p.treatment != "pixels"]) for file in made)
    return Row(name, result, 1000 * cpu / len(made), len(made), plants, sum(file.box is not None for file in made))


def _ours(made: tuple[Made, ...], work: Path) -> Row:
    product.through(made[:1])  # the first start of a worker reads the packages from the disk
    passed = product.through(made)
    product.look(passed)
    return _row("Lazaret", made, passed.outputs, passed.cpu_seconds, work)


def _peer(name: str, made: tuple[Made, ...], source: Path, work: Path) -> Row:
    target = work / "out"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    cpu, _ = PEERS[name](source, target, work)
    return _row(name, made, {p.name: p.read_bytes() for p in target.iterdir()}, cpu, work)


def table(rows: list[Row], missing: Mapping[str, str]) -> str:
    """The rows as markdown."""
    head = ["", "files out", "leaks", "burned-in", *ACTIONS, "dciodvfy errors in → out", "CPU ms"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        r = row.result
        marks = [r.percent(action) for action in ACTIONS]
        cells = [
            row.name,
            f"{r.out}/{row.files}",
            f"**{len(r.leaks)}**/{row.plants}",
            f"**{len(r.seen)}**/{row.pictures}",
        ]
        cells += ["-" if mark is None else f"{mark:.1f}" for mark in marks]
        cells += [f"{r.errors_in} → {r.errors_out}", f"{row.cpu_ms:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\n{name}: {why}" for name, why in missing.items())])


def compare(work: Path, only: list[str] | None = None) -> str:
    """Run all, print and keep the table. Files that are no DICOM (NIfTI) are left out: no peer reads them."""
    work = work.resolve()
    made = tuple(file for file in torture() if not file.name.startswith("volume"))
    source = work / "in"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for file in made:
        (source / file.name).write_bytes(file.data)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows, missing = [], {}
    for name in only or ["Lazaret", *PEERS]:
        own = work / name.replace(" ", "_").replace("/", "")
        own.mkdir(exist_ok=True)
        try:
            rows.append(_ours(made, own) if name == "Lazaret" else _peer(name, made, source, own))
        except NotHere as reason:
            missing[name] = str(reason)
        print(name, "done", file=sys.stderr)
    text = table(rows, missing)
    (work / "table.md").write_text(text + "\n")
    print(text)
    return text
