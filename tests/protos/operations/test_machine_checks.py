"""What the doctors ask of the machine, and the form of what they say."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from protos.federation import flower_environment
from protos.operations import machine_checks
from protos.operations.checks import CheckResult, as_json, as_lines, examine, failed, healthy, note, of_days, passed
from tests.support.peers import need


def one(found: object) -> CheckResult:
    (finding,) = found  # type: ignore[misc]
    return finding  # type: ignore[no-any-return]


def test_no_check_keeps_another_from_being_made_and_a_foreign_text_is_not_repeated() -> None:
    def broken() -> list[CheckResult]:
        raise RuntimeError("SECRET-7")

    def sentence() -> list[CheckResult]:
        raise ValueError("site.toml is missing: run init")

    found = examine([("a", broken), ("b", sentence), ("c", lambda: [passed("c")])], (ValueError,))
    assert [f.state for f in found] == ["fail", "fail", "pass"]
    assert found[1].wrong == "site.toml is missing: run init"
    assert "SECRET" not in as_json(found)
    assert not healthy(found)


def test_a_line_for_each_and_what_to_do_below_a_failure() -> None:
    found = [passed("a", "fine"), note("b", "hm"), failed("c", "wrong", "mend it"), failed("d", "wrong: mend it")]
    assert list(as_lines(found)) == [
        "ok    a: fine",
        "note  b: hm",
        "FAIL  c: wrong",
        "      fix: mend it",
        "FAIL  d: wrong: mend it",
        "4 checks: 1 passed, 2 failed, 1 to note",
    ]
    told = {"a": None, "c": "wrong [fix: mend it]", "d": "wrong: mend it", "notes": {"b": "hm"}}
    assert json.loads(as_json(found)) == told, "what is noted is no pass"
    assert json.loads(as_json([failed("a", "wrong"), passed("a")])) == {"a": "wrong", "notes": {}}
    with pytest.raises(ValueError, match="has a name"):
        CheckResult("notes", "pass")
    with pytest.raises(ValueError, match="says what is wrong"):
        CheckResult("x", "fail")


def test_a_certificate_is_told_in_days_and_an_end_that_nobody_knows_is_none() -> None:
    assert of_days("x", 100, 30, "renew").state == "pass"
    assert "ends in 29.5 days" in of_days("x", 29.5, 30, "renew").said
    assert of_days("x", -1, 30, "renew").said == "it has expired"
    assert of_days("x", float("nan"), 30, "renew").state == "fail"


def test_the_disk_fails_at_the_watermark_and_is_noted_before(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    states = [one(machine_checks.disk(tmp_path, mark, "x")).state for mark in (free * 2, int(free / 1.5), free // 10)]
    assert states == ["fail", "note", "pass"]


def test_every_file_that_others_can_read_is_named_at_once(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "keys" / "projects" / "main").mkdir(parents=True)
    home.chmod(0o700)
    for name in ("keys/a.key", "keys/b.pem", "keys/projects/main/c.key", "keys/root.crt", "agent.log"):
        (home / name).write_text("x")
        (home / name).chmod(0o600)
    assert one(machine_checks.private(home, ["agent.log", "missing"])).state == "pass"
    for name in ("keys/a.key", "keys/projects/main/c.key", "keys/root.crt", "agent.log"):
        (home / name).chmod(0o644)
    said = one(machine_checks.private(home, ["agent.log"])).said
    assert said.endswith("a.key, agent.log, c.key")
    home.chmod(0o750)
    assert "home directory" in one(machine_checks.private(home)).said


def test_telemetry_that_the_environment_asks_for_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in flower_environment.SETTINGS.items():
        monkeypatch.setenv(name, value)
    assert one(machine_checks.telemetry()).state == "pass"
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert "FLWR_TELEMETRY_ENABLED" in one(machine_checks.telemetry()).said
    monkeypatch.setattr(machine_checks, "_FLOWER", "1.40.0")
    assert one(machine_checks.telemetry()).state == "fail", "another version has other switches"


def test_the_version_of_sqlite_is_the_one_that_the_ledger_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(machine_checks.sqlite()).state == "pass"
    monkeypatch.setattr(machine_checks, "_SQLITE", (99, 0, 0))
    assert one(machine_checks.sqlite()).state == "fail"


def test_open_files_and_the_clock_are_told() -> None:
    assert one(machine_checks.descriptors(1)).state == "pass"
    assert one(machine_checks.descriptors(10**9)).state in ("fail", "pass")
    assert one(machine_checks.clock()).state in ("pass", "note")


_NVML = """
#include <string.h>
int nvmlInit_v2(void) { return %(init)d; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, "570.1", length); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = %(count)d; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle) { *handle = (void *)1; return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned length) { strncpy(text, "Test GPU", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) { memory[0] = 16ULL << 30; return 0; }
"""


def library(folder: Path, **values: int) -> str:
    need("gcc")
    name = "-".join(map(str, values.values()))
    source, made = folder / f"{name}.c", folder / f"lib{name}.so"
    source.write_text(_NVML % values)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return str(made)


def test_graphics_processors_are_named_and_a_driver_that_does_not_answer_is_a_fault(tmp_path: Path) -> None:
    """Against a library of NVIDIA's interface that we compile: there is no GPU where this runs."""
    nowhere = tmp_path / "none"
    assert one(machine_checks.graphics("libnone-of-that-name.so", nowhere)).state == "note"
    nowhere.write_text("driver")
    assert one(machine_checks.graphics("libnone-of-that-name.so", nowhere)).state == "fail"
    good = one(machine_checks.graphics(library(tmp_path, init=0, count=2), nowhere))
    assert "Test GPU, 16 GiB; Test GPU, 16 GiB" in good.said
    assert good.state in ("pass", "note")  # a note where torch has no CUDA
    assert one(machine_checks.graphics(library(tmp_path, init=18, count=0), nowhere)).state == "fail"
    assert one(machine_checks.graphics(library(tmp_path, init=0, count=0), nowhere)).state == "fail"


def test_the_lines_stay_lines_on_a_narrow_terminal() -> None:
    out = Console(file=io.StringIO(), width=40, highlight=False)
    for line in as_lines([passed("a name of a check", "and a long text after it " * 3)]):
        out.print(line, markup=False, soft_wrap=True)
    assert len(out.file.getvalue().splitlines()) == 2  # type: ignore[attr-defined]
