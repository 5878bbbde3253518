"""The sandbox: artifacts pass, attacks are refused, and the limits bind a program that wants out.

Hostile programs are started exactly as the product's own one, by ``run_confined``, from a folder of the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.sandbox import inspector_process
from coordinator.sandbox.inspector_process import ConfinedResult, InspectionLimits, inspect, run_confined
from protos.artifacts.arrays import pack_images, pack_vector
from protos.artifacts.shards import Nifti, pack_shard
from protos.artifacts.strict_safetensors import Architecture, pack_ring, pack_weights
from tests.support.ended_demo import processes
from tests.support.tcp_proxy import wait_until

AFFINE = (1.0, 0.0, 0.0, -5.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0)
MODEL: dict[str, np.ndarray[Any, Any]] = {"conv.weight": np.ones((4, 3), np.float32), "steps": np.array(7, np.int64)}
SHAPES = Architecture.of({"conv.weight": ("F32", (4, 3)), "steps": ("I64", ())})
LAYERS = {"namespaces", "no_new_privs", "no_capabilities", "limits", "landlock", "seccomp"}
Probe = Callable[..., ConfinedResult]


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    """Run the body of a function as the work of a confined process; it sees ``source`` and ``request``."""

    def run(body: str, limits: InspectionLimits | None = None, **request: Any) -> ConfinedResult:
        name = f"probe_{len(list(tmp_path.iterdir()))}"
        lines = textwrap.indent(textwrap.dedent(body), "    ")
        imports = "import ctypes, os, socket, signal, sys, time\nimport numpy as np\n"
        head = "from protos.operations.confinement import serve\n\ndef work(source, request):\n"
        (tmp_path / f"{name}.py").write_text(f"{imports}{head}{lines}\n\ndef main():\n    serve(work)\n")
        descriptor = os.open(__file__, os.O_RDONLY)
        try:
            return run_confined(name, request, descriptor, limits or InspectionLimits(), (str(tmp_path),))
        finally:
            os.close(descriptor)

    return run


def answer(ran: ConfinedResult) -> dict[str, Any]:
    assert ran.answer is not None, ran
    return ran.answer


@pytest.mark.parametrize(
    ("artifact_type", "raw", "expected", "facts"),
    [
        ("update", pack_vector(np.ones(9, np.float32)), {"size": 9}, {"size": 9}),
        ("update", pack_vector(np.ones(9, np.float32)), {}, {"size": 9}),
        ("masked-update", pack_ring(np.arange(5, dtype=np.uint64)), {"size": 5}, {"size": 5, "dtype": "U64"}),
        (
            "model",
            pack_weights(MODEL),
            {"architecture": SHAPES.encode().decode()},
            {"digest": SHAPES.digest(), "size": 56},
        ),
        (
            "image-set",
            pack_images(np.zeros((3, 8, 9), np.uint8), ("0", "1", "1")),
            {},
            {"form": "png", "count": 3, "shape": [8, 9], "labels": {"0": 1, "1": 2}},
        ),
        (
            "volume-set",
            pack_shard([np.zeros((4, 5, 6), np.int16)], [""], Nifti(AFFINE)),
            {},
            {"form": "nifti-int16", "count": 1, "shape": [4, 5, 6], "labels": {"": 1}},
        ),
    ],
)
def test_an_artifact_in_its_form_passes_with_its_facts(
    tmp_path: Path, artifact_type: str, raw: bytes, expected: dict[str, Any], facts: dict[str, Any]
) -> None:
    (tmp_path / "artifact").write_bytes(raw)
    found = inspect(tmp_path / "artifact", artifact_type, expected)
    assert (found.ok, found.rule, found.reason, dict(found.facts)) == (True, "", "", facts)
    assert {"limits", "no_new_privs"} <= set(found.bound) <= LAYERS
    (tmp_path / "artifact").write_bytes(raw[:-1])
    short = inspect(tmp_path / "artifact", artifact_type, expected)
    assert (short.ok, short.rule, dict(short.facts)) == (False, "artifact_malformed", {})


def test_what_is_not_expected_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "artifact"
    path.write_bytes(pack_vector(np.ones(9, np.float32)))
    assert inspect(path, "update", {"size": 10}).reason == "the vector must have 10 values, not 9"
    assert inspect(path, "model", {}).reason == "no architecture was approved for this model"
    assert inspect(path, "update", {"sise": 9}).rule == "artifact_malformed"
    assert inspect(path, "pickle", {}).rule == "artifact_type"
    path.write_bytes(pack_images(np.zeros((1, 4, 4), np.uint8), ("",)))
    assert inspect(path, "volume-set", {}).reason == "a volume set holds volumes, not images"
    path.write_bytes(pack_images(np.zeros((300, 1, 1), np.uint8), [str(i) for i in range(300)]))
    assert inspect(path, "image-set", {}).reason == "a set has at most 256 different labels"


BUSY = """
import os, sys, threading
from coordinator.sandbox.inspector_process import InspectionLimits, run_confined
descriptor = os.open(os.devnull, os.O_RDONLY)
limits = InspectionLimits(cpu_seconds=900, wall_seconds=900.0)
threading.Thread(target=run_confined, args=("busy", {}, descriptor, limits, sys.argv[1:])).start()
"""


def test_an_inspection_ends_with_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    """By the kernel: it is in a session of its own, computes, and looks at no pipe. Its own time is 900 seconds."""
    work = "from protos.operations.confinement import serve\n\ndef work(*_):\n    while True:\n        pass\n\n"
    (tmp_path / "busy.py").write_text(f"{work}def main():\n    serve(work)\n")
    coordinator = subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path)])

    def confined() -> list[int]:
        """Its children whose filter is in force: nothing of their confinement is still to come."""
        ours = [number for number, (parent, _) in processes().items() if parent == coordinator.pid]
        return [one for one in ours if "\nSeccomp:\t2" in Path(f"/proc/{one}/status").read_text()]

    try:
        assert wait_until(lambda: bool(confined()))
        (inspection,) = confined()
    finally:
        coordinator.kill()
        coordinator.wait()
    try:
        assert wait_until(lambda: inspection not in processes(), 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(inspection, signal.SIGKILL)


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "artifact").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic"):
        inspect(tmp_path / "artifact", "update", {})


def test_no_file_can_be_opened_nor_a_socket_nor_a_process(probe: Probe) -> None:
    found = answer(
        probe(
            """
            def outcome(act):
                try:
                    act()
                    return "done"
                except OSError as error:
                    return error.errno
            return {
                "file": outcome(lambda: os.open("/etc/hostname", os.O_RDONLY)),
                "tcp": outcome(lambda: socket.socket(socket.AF_INET)),
                "unix": outcome(lambda: socket.socket(socket.AF_UNIX)),
                "fork": outcome(os.fork),
                "exec": outcome(lambda: os.execv("/bin/true", ["true"])),
                "pipe": outcome(os.pipe),
                "kill": outcome(lambda: os.kill(os.getppid(), 0)),
                "unlink": outcome(lambda: os.unlink("/nonexistent")),
                "write": outcome(lambda: os.write(source.descriptor, b"x")),
                "read": source.read(0, 3).decode(),
            }
            """
        )
    )
    assert found.pop("read") == '"""'
    assert "done" not in found.values()
    if "seccomp" in found["bound"]:
        assert {found[k] for k in ("file", "tcp", "unix", "fork", "exec", "pipe", "kill", "unlink")} == {1}  # EPERM


def test_without_the_filter_of_system_calls_the_other_layers_still_bind(tmp_path: Path) -> None:
    (tmp_path / "loose.py").write_text(
        textwrap.dedent(
            """
            import os, socket
            from protos.operations import confinement

            def outcome(act):
                try:
                    act()
                    return "done"
                except OSError as error:
                    return error.errno

            def work(source, request):
                return {
                    "file": outcome(lambda: os.open("/etc/hostname", os.O_RDONLY)),
                    "tcp": outcome(lambda: socket.socket(socket.AF_INET)),
                    "network": os.readlink("/proc/self/ns/net"),
                }

            confinement._seccomp = lambda libc, calls: False

            def main():
                confinement.serve(work)
            """
        )
    )
    descriptor = os.open(__file__, os.O_RDONLY)
    loose = answer(run_confined("loose", {}, descriptor, InspectionLimits(), (str(tmp_path),)))
    os.close(descriptor)
    assert "seccomp" not in loose["bound"]
    assert {loose["file"], loose["tcp"]} == {24}  # EMFILE
    assert (loose["network"] != os.readlink("/proc/self/ns/net")) == ("namespaces" in loose["bound"])


def test_a_process_that_asks_for_memory_without_end_is_refused(probe: Probe) -> None:
    assert probe("held = [bytearray(1 << 24) for _ in range(1 << 10)]").limit == "memory"
    assert probe("return {'n': len(np.ones(1 << 30))}").limit == "memory"


def test_a_process_that_never_ends_is_killed(probe: Probe) -> None:
    assert probe("while True: pass", InspectionLimits(cpu_seconds=1, wall_seconds=120)).limit == "processor time"
    start = time.monotonic()
    assert probe("time.sleep(250)", InspectionLimits(wall_seconds=1.5)).limit == "wall time"
    assert time.monotonic() - start < 240  # before it would have ended by itself


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ("ctypes.string_at(0)", "crash"),
        ("raise RuntimeError('Jane Doe, 1970-01-01')", "crash"),
        ("os.write(1, b'x' * 70_000)\ntime.sleep(60)", "answer too long"),
        ("os.write(1, b'not an answer')\nos._exit(0)", "not an answer"),
        ("os._exit(0)", "not an answer"),
        ("os.write(1, b'[' * 60_000)\nos._exit(0)", "not an answer"),
        ("os.write(1, b'{}\\n{}\\n')\nos._exit(0)", "not an answer"),
        ("os.write(1, b'[]\\n')\nos._exit(0)", "not an answer"),
    ],
)
def test_whatever_is_not_an_answer_is_a_refusal_that_names_its_cause(probe: Probe, body: str, limit: str) -> None:
    ran = probe(body)
    assert (ran.answer, ran.limit) == (None, limit)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"bound": []},
        {"bound": [], "facts": {}},
        {"bound": [], "facts": {"size": -1}},
        {"bound": [], "facts": {"size": 1.5}},
        {"bound": [], "facts": {"size": True}},
        {"bound": [], "facts": {"size": 3, "more": "Jane Doe"}},
        {"bound": [], "facts": {"size": 3}, "reason": "both"},
        {"bound": [], "reason": "a line\nand another"},
        {"bound": [], "reason": "x" * 301},
        {"bound": "all", "facts": {"size": 3}},
        {"bound": ["x" * 400], "facts": {"size": 3}},
    ],
)
def test_an_answer_that_is_not_in_its_form_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    """The process may be taken over: what it says goes over the same pipe, and is read field by field."""
    (tmp_path / "liar.py").write_text(
        f"import os\ndef main():\n    os.write(1, {json.dumps(said).encode()!r} + b'\\n')"
    )
    (tmp_path / "artifact").write_bytes(pack_vector(np.ones(3, np.float32)))
    monkeypatch.setattr(
        inspector_process, "_BOOT", f"import sys; sys.path.append({str(tmp_path)!r}); from liar import main; main()"
    )
    found = inspect(tmp_path / "artifact", "update", {})
    assert (found.ok, found.rule, found.reason) == (False, "sandbox", "not an answer")


def test_nothing_of_the_coordinator_is_in_the_process(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "secret")
    found = answer(
        probe(
            """
            return {
                "environment": sorted(os.environ),
                "modules": sorted(m for m in sys.modules if m.split(".")[0] in ("grpc", "flwr", "policies", "PIL")),
            }
            """
        )
    )
    assert set(found["environment"]) <= {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "LC_CTYPE"}
    assert found["modules"] == []


def test_a_file_of_a_gigabyte_is_checked_within_the_limits(tmp_path: Path) -> None:
    """A sparse file: only its header is on disk. A NaN in its last value is still found."""
    size = 1 << 28
    head = Architecture.of({"flat": ("F32", (size,))}).header()
    path = tmp_path / "artifact"
    with path.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + 4 * size)
    found = inspect(path, "update", {"size": size}, InspectionLimits(memory_bytes=1 << 20, cpu_seconds=60))
    assert not found.ok  # so that this limit is known to bind,
    assert inspect(
        path, "update", {"size": size}, InspectionLimits(memory_bytes=256 << 20)
    ).ok  # and this one to be enough
    with path.open("r+b") as out:
        out.seek(-4, os.SEEK_END)
        out.write(np.array([np.nan], "<f4").tobytes())
    assert inspect(path, "update", {}).reason == "a value is not finite"
