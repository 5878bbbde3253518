"""``python -m tests.quick``, or ``make quick``: the tests of the rooms that you changed.

A room is a folder of a package, such as ``agent/storage``; its tests are in the folder of the same name in ``tests``.
Changed is what differs from where this branch left ``main``, committed or not. What imports a changed room is not
run: ``make test`` does that. Of the files that ``tests/conftest.py`` lists as the longest, only those run whose own
module changed. Other arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from tests.conftest import LONGEST

ROOT: Final = Path(__file__).resolve().parents[1]
MIRRORED: Final = ("agent", "coordinator", "policies", "protos", "deploy")
NOT_SLOW: Final = "not slow and not gpu"


def changed_files(root: Path, main: str = "main") -> list[str]:
    """Files that differ from where ``HEAD`` left ``main``, and new ones that git does not ignore; sorted.

    On ``main`` itself, or in a clone without it, these are the files that are not committed yet.

    Raises:
        subprocess.CalledProcessError: this is no git repository.
    """

    def git(*words: str, check: bool = True) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=check)
        return [name for name in done.stdout.split("\0") if name]

    base = "".join(git("merge-base", "HEAD", main, check=False)).strip() or "HEAD"
    new = git("ls-files", "-z", "--others", "--exclude-standard")
    return sorted({*git("diff", "-z", "--name-only", "--no-renames", base), *new})


def covering(name: str, root: Path) -> tuple[str, ...]:
    """The folder or files with the tests of one file; none: it belongs to no room.

    A room is two folders deep (``agent/storage``); a file that lies loose in a package has the tests of its own name.
    A test that mirrors nothing stands for itself.
    """
    path = PurePosixPath(name)
    own = path.parts[0] == "tests"
    parts = path.parts[1:] if own else path.parts
    if len(parts) < 2 or parts[0] not in MIRRORED:
        return (name,) if own and path.name.startswith("test_") and (root / name).is_file() else ()
    folder = root / "tests" / parts[0]
    if len(parts) > 2 and (folder / parts[1]).is_dir():
        return (f"tests/{parts[0]}/{parts[1]}",)
    stem = PurePosixPath(parts[1]).stem.removeprefix("test_")
    return tuple(str(test.relative_to(root)) for test in sorted(folder.glob(f"test_{stem}*.py")))


def selection(names: Iterable[str], root: Path) -> tuple[list[str], list[str]]:
    """What pytest is given, each once and none inside another; and the files that no room has tests for."""
    of = {name: covering(name, root) for name in names}
    wanted = sorted({test for tests in of.values() for test in tests})
    outer = [test for test in wanted if not any(test.startswith(f"{other}/") for other in wanted)]
    return outer, [name for name, tests in of.items() if not tests]


def too_long(names: Iterable[str], tests: Iterable[str], longest: Iterable[str]) -> list[str]:
    """The longest files inside the rooms to run whose own module, or themselves, did not change."""
    changed = [PurePosixPath(name) for name in names]
    stems = {(path.parent, path.stem) for path in changed if path.suffix == ".py"}
    rooms = tuple(f"{test}/" for test in tests)
    found = []
    for name in longest:
        file = PurePosixPath(name)
        words = file.stem.removeprefix("test_").split("_")
        modules = {(file.parent, "_".join(words[:end])) for end in range(1, len(words) + 1)}
        own = {*modules, (PurePosixPath("tests") / file.parent, file.stem)}
        if f"tests/{file}".startswith(rooms) and not own & stems:
            found.append(f"tests/{file}")
    return found


def main(argv: Sequence[str]) -> int:
    """Pytest's own exit status; 0 where nothing is to be run."""
    names = changed_files(ROOT)
    tests, other = selection(names, ROOT)
    if other:
        print(f"no room's tests cover {len(other)} changed files, {', '.join(other[:5])} ...: `make test` does")
    if not tests:
        print("nothing to run: no room differs from main")
        return 0
    left_out = too_long(names, tests, LONGEST)
    print("running", *tests, "- but not the rooms that import them", flush=True)
    if left_out:
        print("left out, as long and of modules that did not change:", *left_out, flush=True)
    workers = ["-n", str(os.cpu_count() or 1), "--dist", "loadfile", "--no-loadscope-reorder"]
    words = [sys.executable, "-m", "pytest", "-q", "-m", NOT_SLOW, *workers, *argv, *tests]
    words += [f"--ignore={name}" for name in left_out]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
