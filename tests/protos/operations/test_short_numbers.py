"""A short number stands for one thing as long as that waits, and for nothing else afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.operations.short_numbers import FILE, numbers


def test_a_number_that_is_gone_is_given_to_nothing_else(tmp_path: Path) -> None:
    assert numbers(tmp_path, ["a", "b"]) == {"a": 1, "b": 2}
    assert numbers(tmp_path, ["b", "c"]) == {"b": 2, "c": 3}
    assert numbers(tmp_path, []) == {}
    assert numbers(tmp_path, ["a"]) == {"a": 4}, "what comes back is another thing"
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_where_nothing_changes_nothing_is_written(tmp_path: Path) -> None:
    assert numbers(tmp_path, []) == {}
    assert list(tmp_path.iterdir()) == []
    numbers(tmp_path, ["a"])
    before = (tmp_path / FILE).stat()
    assert numbers(tmp_path, ["a"]) == {"a": 1}
    assert (tmp_path / FILE).stat().st_ino == before.st_ino


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True), max_size=12))
def test_no_number_ever_means_two_things_between_which_it_was_free(turns: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        meant: dict[int, str] = {}
        gone: set[int] = set()
        for names in turns:
            found = numbers(Path(folder), names)
            assert len(set(found.values())) == len(names)
            for name, number in found.items():
                assert number not in gone
                assert meant.setdefault(number, name) == name
            gone |= meant.keys() - set(found.values())


def test_two_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: numbers(tmp_path, ["a", "b", "c"]), range(40)))
    assert found == [{"a": 1, "b": 2, "c": 3}] * 40


@pytest.mark.parametrize("text", ["", "[]", '{"last": "x"}', '{"last": 3, "of": {"a": "b"}}', "\xff"])
def test_a_file_that_cannot_be_read_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    assert numbers(tmp_path, ["a"]) == {"a": 1}
    assert json.loads((tmp_path / FILE).read_text()) == {"last": 1, "of": {"a": 1}}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_who_may_only_read_sees_the_numbers_that_there_are(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    numbers(folder, ["a"])
    folder.chmod(0o755)
    (folder / FILE).chmod(0o644)
    code = (
        "import os, pathlib, sys; from protos.operations.short_numbers import numbers; os.setuid(65534); "
        "print(numbers(pathlib.Path(sys.argv[1]), ['a', 'b']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "{'a': 1, 'b': 0}", done.stderr
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
