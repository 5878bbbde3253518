"""What a doctor asks of the machine itself: clock, disk, graphics processor, SQLite, and that nothing calls home."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import apsw

from protos.federation import flower_environment
from protos.operations.checks import CheckResult, failed, note, passed
from protos.operations.confinement import DEMANDED, REQUIRED

_SQLITE: Final = (3, 51, 3)  # older ones may lose a commit when a write-ahead log is reset
_FLOWER: Final = "1.41.0"  # whose switches protos.federation.flower_environment knows
_TIME_ERROR: Final = 5  # of adjtimex(2): the clock is not synchronised
_GIB: Final = 2**30
_MODULE: Final = Path("/proc/driver/nvidia/version")
CONFINED: Final = "what reads foreign bytes is confined"
_PATIENCE_S: Final = 60.0
_UNCONFINED: Final = {"landlock": "files of this service's user", "seccomp": "network, programs and processes"}


def clock() -> Iterator[CheckResult]:
    """Does the kernel say that somebody keeps the clock right (NTP, PTP)? adjtimex(2); in containers too."""
    name = "the clock is kept right"
    try:
        library = ctypes.CDLL(None, use_errno=True)
        state = library.adjtimex(ctypes.create_string_buffer(512))  # struct timex, modes = 0: only asked
    except (OSError, AttributeError):
        state = -1
    if 0 <= state < _TIME_ERROR:
        yield passed(name, "the system reports that it is synchronised")
    else:
        yield note(
            name, "the system does not report that it is synchronised: check that NTP (chrony, timesyncd) runs"
        )


def disk(folder: Path, watermark: int, names: str) -> Iterator[CheckResult]:
    """Is there more room than the watermark, and twice of it?

    Args:
        folder: on the file system that counts.
        watermark: bytes free, below which something is refused.
        names: what is refused then, as a sentence's beginning: "the receivers refuse images".
    """
    free = shutil.disk_usage(folder).free
    said = f"{free / _GIB:.1f} GiB are free; below {watermark / _GIB:.1f} GiB {names}"
    fix = "free some space, or enlarge the disk: nothing is deleted automatically"
    if not free > watermark:
        yield failed("room on the disk", said, fix)
    elif not free > 2 * watermark:
        yield note("room on the disk", f"{said}: soon")
    else:
        yield passed("room on the disk", said)


def sqlite() -> Iterator[CheckResult]:
    """Is SQLite new enough for the ledger?"""
    found = apsw.sqlite_lib_version()
    if tuple(int(part) for part in found.split(".")[:3]) >= _SQLITE:
        yield passed("SQLite", found)
    else:
        least = ".".join(map(str, _SQLITE))
        yield failed("SQLite", f"{found} may lose a commit; {least} does not", "install apsw>=3.51.3 from the bundle")


def confinement(demand: str) -> Iterator[CheckResult]:
    """Which layers confine the readers here? A process confines itself as they do, and tries what is forbidden.

    Args:
        demand: of :data:`protos.operations.confinement.DEMANDS`.
    """
    root = str(Path(__file__).resolve().parents[2])
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-B", "-m", "protos.operations.confinement", demand],
            env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=True,
        )
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        yield failed(CONFINED, "the test process does not answer", "run `doctor` as the service's user")
        return
    if "fault" in told:
        yield failed(CONFINED, told["fault"])
        return
    missing = [layer for layer in DEMANDED if layer not in told["bound"]]
    if told["reached"] and not missing:
        yield failed(CONFINED, f"it reaches {', '.join(told['reached'])} although every layer is set: report it")
    elif missing:
        open_to = " and ".join(_UNCONFINED[layer] for layer in missing)
        said = f"this kernel has no {' and no '.join(missing)}: an attacker who takes a parser over reaches {open_to}"
        yield note(CONFINED, f'{said}; `confinement = "{REQUIRED}"` in site.toml refuses to run without')
    else:
        yield passed(CONFINED, ", ".join(told["bound"]))


def telemetry() -> Iterator[CheckResult]:
    """Is Flower the version whose switches are known? `serve` sets them before it is imported."""
    name = "telemetry is off"
    try:
        found = version("flwr")
    except PackageNotFoundError:
        yield passed(name, "Flower is not installed")
        return
    loud = sorted(key for key, value in flower_environment.SETTINGS.items() if os.environ.get(key, value) != value)
    if found != _FLOWER:
        said = f"Flower {found} is installed, and only the switches of {_FLOWER} are known"
        yield failed(name, said, f"install flwr=={_FLOWER}, as the bundle does")
    elif loud:
        said = f"the environment sets {', '.join(loud)}; the service overrides it"
        yield note(name, said)
    else:
        yield passed(name, "no reports, no update checks, no installs at run time")


def descriptors(least: int) -> Iterator[CheckResult]:
    """May so many files and connections be open at once?"""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or most >= least:
        yield passed("open files", "no limit" if most == resource.RLIM_INFINITY else f"up to {most}")
    else:
        yield failed("open files", f"at most {most}; each connection is one", f"LimitNOFILE={least} in the unit")


def private(folder: Path, names: Iterable[str] = ()) -> Iterator[CheckResult]:
    """Can nobody else read the home directory, nor its key files? All that are open are named at once."""
    wrong = [] if _closed(folder) else ["the home directory itself"]
    here = [folder / name for name in names]
    here += [path for path in (folder / "keys").rglob("*") if path.suffix in (".key", ".pem", ".p12")]
    wrong += sorted({path.name for path in here if path.exists() and not _closed(path)})
    if wrong:
        fix = "as their owner, chmod 700 the directories and 600 the files, and find out who could read them"
        yield failed(
            "nobody else can read it", f"readable by others, or owned by another user: {', '.join(wrong)}", fix
        )
    else:
        yield passed("nobody else can read it")


def _closed(path: Path) -> bool:
    found = path.lstat()
    return not found.st_mode & 0o077 and found.st_uid == os.geteuid()


def graphics(name_of_library: str = "libnvidia-ml.so.1", module: Path = _MODULE) -> Iterator[CheckResult]:
    """The graphics processors, by NVIDIA's own management library: no torch is imported for it.

    Args:
        name_of_library: as the loader finds it.
        module: is there when the kernel has the driver.
    """
    name = "GPU and driver"
    try:
        library = ctypes.CDLL(name_of_library)
    except OSError:
        if module.exists():
            said = "the kernel has NVIDIA's driver, and its library is missing"
            yield failed(
                name, said, "install the driver's libraries of the same version (in a container: its toolkit)"
            )
        else:
            yield note(name, "none: networks run on the processor, which takes longer")
        return
    if library.nvmlInit_v2() != 0:
        fix = "restart after a driver update; see that the service's user may open /dev/nvidia*"
        yield failed(name, "the driver does not answer, or is of another version than its library", fix)
        return
    try:
        yield _described(name, library)
    finally:
        library.nvmlShutdown()


def _described(name: str, library: Any) -> CheckResult:
    text, count, devices = ctypes.create_string_buffer(96), ctypes.c_uint(), []
    library.nvmlSystemGetDriverVersion(text, 96)
    driver = text.value.decode("ascii", "replace")
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for number in range(count.value):
        handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
        if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0:
            library.nvmlDeviceGetName(handle, text, 96)
            library.nvmlDeviceGetMemoryInfo(handle, memory)
            devices.append(f"{text.value.decode('ascii', 'replace')}, {memory[0] / _GIB:.0f} GiB")
    if not devices:
        return failed(name, f"driver {driver}, and no device that this user may use", "let the unit see /dev/nvidia*")
    built = ""
    with contextlib.suppress(PackageNotFoundError):
        built = version("torch").partition("+")[2]
    if built == "cpu":
        said = f"{'; '.join(devices)}, and torch is built without CUDA"
        return note(name, f"{said}: install the bundle's CUDA wheels to use it")
    return passed(name, f"{'; '.join(devices)}; driver {driver}")
