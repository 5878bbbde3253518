"""The coordinator installs and runs without torch, in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_coordinator_installs_without_torch(tmp_path: Path) -> None:
    # a copy of what git tracks: building inside the repository would leave its traces there
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    source = tmp_path / "source"
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    # without compiling: of all that is installed, what is imported below is compiled then, and that is little
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, f"{source}[coordinator]"], check=True, cwd=tmp_path)
    absent = (
        "import importlib.util as u; assert not any(map(u.find_spec, ('torch', 'torchvision', 'sklearn', 'pydicom')))"
    )
    subprocess.run([python, "-c", absent], check=True, cwd=tmp_path)
    command = [str(tmp_path / "venv" / "bin" / "lazaret-coordinator"), "--home", str(tmp_path / "home")]
    subprocess.run([*command, "init", "--policy", "controlled"], check=True, cwd=tmp_path)
    serving = "import pathlib, protos.quiet as q; q.hush(pathlib.Path('quiet')); import coordinator.edges.server"
    subprocess.run([python, "-c", serving], check=True, cwd=tmp_path)
    subprocess.run([*command, "ledger", "export", "ledger.export"], check=True, cwd=tmp_path)
    subprocess.run([str(tmp_path / "venv" / "bin" / "lazaret-verify"), "ledger.export"], check=True, cwd=tmp_path)
    done = subprocess.run([*command, "init"], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, "nothing was written" in done.stderr) == (1, True)
    assert subprocess.run([*command, "nonsense"], check=False, capture_output=True).returncode == 2
    assert sys.version_info >= (3, 11)


def test_a_command_of_the_coordinators_starts_without_the_accountant_of_record() -> None:
    """A price is confirmed when it is granted; a second for every command would be waited for by a person."""
    loaded = "import sys, coordinator.__main__; sys.exit(bool({'dp_accounting', 'scipy', 'flwr'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", loaded], check=False, cwd=ROOT).returncode == 0
