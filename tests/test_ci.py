"""What CI installs and which Python it takes: the script's own words, run with interpreters made for the test."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import conftest
from tests.support import peers

ROOT = Path(__file__).parents[1]
CHOOSE = ROOT / ".ci" / "choose-python"


def packages() -> set[str]:
    """The Debian packages of .ci/run."""
    (listed,) = re.findall(r"^packages=\((.*?)^\)", (ROOT / ".ci" / "run").read_text(), re.M | re.S)
    return set(listed.split())


def test_ci_installs_every_peer_that_a_test_may_want() -> None:
    assert set(peers.PACKAGES.values()) <= packages()


def test_a_peer_that_this_debian_lacks_skips_with_that_reason_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv(peers.LEFT_OUT, "spin golang-go")
    with pytest.raises(pytest.skip.Exception, match="this Debian has no package spin"):
        peers.need("spin")
    with pytest.raises(pytest.fail.Exception, match="apt install strace"):
        peers.need("spin", "strace")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="apt install strace"):
        peers.need("strace")
    (tmp_path / "strace").touch(0o755)
    assert peers.lacking("strace") == []


def closure(wanted: list[str]) -> set[str]:
    """The names of all packages that the requirements ``wanted`` bring along here, as far as they are installed."""
    found: set[tuple[str, str]] = set()
    left = [(Requirement(text), "") for text in wanted]
    while left:
        requirement, extra = left.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wish in {"", *requirement.extras}:
            if (name, wish) not in found:
                found.add((name, wish))
                try:
                    left += [(Requirement(text), wish) for text in requires(name) or []]
                except PackageNotFoundError:
                    continue
    return {name for name, _ in found}


def test_no_package_that_the_coordinators_side_installs_brings_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = closure([*project["dependencies"], *extras["coordinator"], *extras["postgres"], *extras["dev"]])
    assert {"grpcio", "pytest", "scipy"} <= installed  # found through others too
    assert not installed & {"torch", "pytorch-optimizer", "torchvision"}
    assert "torch" in closure(extras["oracles"])


def interpreter(folder: Path, name: str, version: str, body: str = "") -> None:
    """A program that says that it is a Python of ``version``; ``body`` answers everything else."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\ncase "$1" in -c) echo {version}; exit 0;; esac\n{body or "exit 1"}\n')
    path.chmod(0o755)


def with_pip(torch: str) -> str:
    """A shell body that makes a "virtual environment" whose pip describes a torch with these requirements."""
    report = f'{{"install": [{{"metadata": {{"requires_dist": [{torch}]}}}}]}}'
    return f"""mkdir -p "$3/bin"
cat > "$3/bin/python" <<'PY'
#!/bin/sh
if [ "$1" = - ]; then shift; exec {sys.executable} - "$@"; fi
while [ "$1" != --report ]; do shift; done
printf '%s' '{report}' > "$2"
PY
chmod +x "$3/bin/python"
"""


def choose(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a path of ``folder`` and the system's tools."""
    script = folder / "choose-python"
    system = CHOOSE.read_text().replace("/usr/bin/python3", str(folder / "python3"))
    (folder / ".ci").mkdir(exist_ok=True)
    script = folder / ".ci" / "choose-python"
    script.write_text(system)
    (folder / "constraints.txt").write_text("torch==9.9.9\n")
    environment = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", str(script), *options], capture_output=True, text=True, check=False, env=environment, timeout=60
    )


def test_debians_own_python_is_taken_where_a_cpu_build_can_be_had(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", "3.11.2", with_pip('"sympy"'))
    interpreter(tmp_path, "python3.12", "3.12.1", with_pip('"sympy"'))
    done = choose(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/python3\n")
    assert "Python 3.11.2" in done.stderr
    assert "CPU build of torch 9.9.9" in done.stderr


def test_the_first_with_a_cpu_build_is_taken_where_debians_own_has_only_cuda(tmp_path: Path) -> None:
    interpreter(
        tmp_path, "python3", "3.13.5", with_pip("\"nvidia-cublas==13; platform_system == 'Linux'\"".replace("'", ""))
    )
    interpreter(tmp_path, "python3.11", "3.11.9", with_pip('"sympy"'))
    done = choose(tmp_path)
    assert (done.returncode, done.stdout) == (0, "python3.11\n")
    assert f"{tmp_path}/python3 is 3.13.5: no CPU build" in done.stderr


@pytest.mark.parametrize(("version", "reason"), [("3.10.9", "outside"), ("3.14.0", "outside"), ("3.12.0", "cannot")])
def test_no_python_of_the_range_is_an_error_that_says_so(version: str, reason: str, tmp_path: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        interpreter(tmp_path, name, version)
    done = choose(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr


def test_a_stand_in_that_does_not_start_is_no_newest_python(tmp_path: Path) -> None:
    (tmp_path / "python3.13").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python3.13").chmod(0o755)
    if not Path("/usr/bin/python3.13").exists():
        assert choose(tmp_path, "--newest").returncode == 1
    interpreter(tmp_path, "python3.13", "3.13.5")
    assert choose(tmp_path, "--newest").stdout.strip().endswith("python3.13")


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0"])
def test_a_python_outside_the_range_is_refused_before_anything_is_downloaded(version: str, tmp_path: Path) -> None:
    major, minor, _ = version.split(".")
    body = f'import sys; sys.version_info = ({major}, {minor}, 0, "final", 0)'
    (tmp_path / "python").write_text(f"#!/bin/sh\nshift\nexec {sys.executable} -c '{body}\n'\"$1\"\n")
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["make", "-B", f"PYTHON={tmp_path}/python", f"VENV={tmp_path}/venv", f"STAMP={tmp_path}/stamp", "check"],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "3.11 to 3.13" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(("folder", "skipped"), [("agent", "cattrs"), ("tests", "cattrs"), ("coordinator", "")])
def test_a_missing_package_of_the_agent_skips_nothing_that_the_coordinator_wants(
    folder: str, skipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "_ROOT", tmp_path)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "wants.py").write_text("raise ModuleNotFoundError('no', name='cattrs.gen')\n")
    with pytest.raises(ModuleNotFoundError) as fault:
        runpy.run_path(str(tmp_path / folder / "wants.py"))
    assert conftest.needed_of_the_agent(fault.value) == skipped
