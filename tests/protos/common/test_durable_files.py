"""Files that survive a power loss: whole or not at all, never through a link, and two writers at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protos.common.durable_files import (
    create_file,
    exclusively,
    fill_folder,
    finish_filling,
    finish_interrupted,
    flush_directory,
    is_half_filled,
    move_durably,
    replace_file,
    write_new,
)


def test_a_new_file_is_never_written_over(tmp_path: Path) -> None:
    write_new(tmp_path / "key", b"one", 0o600)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "key", b"two")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "link", b"two")
    assert (tmp_path / "key").read_bytes() == b"one"
    assert not (tmp_path / "elsewhere").exists()


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    replace_file(path, b"old")
    replace_file(path, iter((b"ne", b"w")))
    assert path.read_bytes() == b"new"

    def pieces() -> object:
        yield b"half"
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        replace_file(path, pieces())  # type: ignore[arg-type]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("refused")))
    with pytest.raises(OSError, match="refused"):
        replace_file(path, b"newest")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_what_a_crash_left_is_overwritten_and_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(b"the first half of something long")
    (tmp_path / "a.part").chmod(0o644)
    replace_file(tmp_path / "a", b"whole", 0o600)
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "b.part").symlink_to(victim)
    (tmp_path / "b").symlink_to(victim)
    replace_file(tmp_path / "b", b"whole")
    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "b").is_symlink()


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    bodies = [bytes([n]) * 20_000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:  # whatever one of them raises is raised here
        list(pool.map(lambda body: replace_file(path, body), bodies * 60))
    assert path.read_bytes() in bodies
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace_file(path, b"old")
    program = (
        "import os, signal, sys; from pathlib import Path; from protos.common.durable_files import replace_file\n"
        "def body():\n    yield b'half'\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "replace_file(Path(sys.argv[1]), body())"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=60)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_move_takes_the_file_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    move_durably(tmp_path / "a", tmp_path / "into" / "b")
    assert (tmp_path / "into" / "b").read_bytes() == b"x"
    assert not (tmp_path / "a").exists()
    with pytest.raises(NotADirectoryError):
        flush_directory(tmp_path / "into" / "b")


def test_a_file_is_created_whole_and_never_over_another_one(tmp_path: Path) -> None:
    create_file(tmp_path / "one", b"first", 0o600)
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "one", b"second")
    assert ((tmp_path / "one").read_bytes(), os.listdir(tmp_path)) == (b"first", ["one"])
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600


def fill(folder: Path) -> None:
    (folder / "keys").mkdir(mode=0o700)
    (folder / "keys" / "a.key").write_bytes(os.urandom(8))
    (folder / "aaa.toml").write_text("last")
    (folder / "zzz.toml").write_text("first")


def test_a_folder_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        fill(folder)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fill_folder(tmp_path, fails, "aaa.toml")
    assert os.listdir(tmp_path) == []
    fill_folder(tmp_path, fill, "aaa.toml")
    assert sorted(os.listdir(tmp_path)) == ["aaa.toml", "keys", "zzz.toml"]


def test_what_a_kill_left_of_a_filled_folder_is_finished_or_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace
    for number in range(1, 5):
        folder, left = tmp_path / str(number), number
        folder.mkdir()

        def dies(source: Path, target: Path) -> None:
            nonlocal left
            left -= 1
            if not left:
                os._exit(9)
            real(source, target)

        if not (child := os.fork()):
            monkeypatch.setattr(os, "replace", dies)
            fill_folder(folder, fill, "aaa.toml")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert not (folder / "aaa.toml").exists(), "what comes last says that all is there"
        assert is_half_filled(folder)
        assert finish_filling(folder, "aaa.toml") is (number > 1)
        assert not is_half_filled(folder)
        assert finish_filling(folder, "aaa.toml") is False
        assert sorted(os.listdir(folder)) == (["aaa.toml", "keys", "zzz.toml"] if number > 1 else [])


def test_what_a_kill_left_is_finished_alone_and_only_where_there_is_something(tmp_path: Path) -> None:
    finish_interrupted(tmp_path / "nothing", "a.toml")
    (tmp_path / ".filled").mkdir()
    (tmp_path / ".filled" / "a.toml").write_text("a")
    with exclusively(tmp_path), pytest.raises(BlockingIOError):
        finish_interrupted(tmp_path, "a.toml")
    finish_interrupted(tmp_path, "a.toml")
    assert os.listdir(tmp_path) == ["a.toml"]


def test_one_at_a_time_is_in_a_folder(tmp_path: Path) -> None:
    with exclusively(tmp_path), pytest.raises(BlockingIOError), exclusively(tmp_path):
        pass
    with exclusively(tmp_path):
        pass
