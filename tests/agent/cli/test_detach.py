"""What of a typed command becomes a job: copies of its files, under names that its configuration then has."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agent.cli import detach, options
from agent.errors import CommandError
from tests.support.mechanism_documents import toml


def words(folder: Path, *typed: object) -> tuple[list[str], detach._Files]:
    """The words of the job, with its files in ``folder``."""
    told = [str(word) for word in typed]
    (folder / "job" / "in").mkdir(parents=True)
    files = detach._Files(folder / "job")
    arguments: argparse.Namespace = options.build_parser().parse_args(["--home", "x", *told])
    return detach._words(arguments, detach._of_command(["--home", "x", *told]), files), files


def test_files_are_copied_and_named_from_the_jobs_folder(tmp_path: Path) -> None:
    (tmp_path / "basis.safetensors").write_bytes(b"basis")
    basis = tmp_path / "basis.safetensors"
    found, _ = words(
        tmp_path, "release", "ksame", "--basis", basis, "--k=5", "--modality", "OT", "--sheet", "s.html", "--detach"
    )
    assert found == [
        *("release", "ksame", "--basis", "in/0-basis.safetensors", "--k=5", "--modality", "OT"),
        *("--sheet", "out/s.html"),
    ]
    assert (tmp_path / "job" / "in" / "0-basis.safetensors").read_bytes() == b"basis"


@pytest.mark.parametrize(
    "more", [["--detach", "--priority", "high"], ["--priority=high", "--detach"], ["--det", "--prio", "low"]]
)
def test_what_is_of_the_job_is_not_of_its_command(more: list[str]) -> None:
    command = ["tune", "--menu", "5,6", "--project", "main"]
    assert detach._of_command(["--home", "x", *command[:3], *more, *command[3:]]) == command


def test_a_word_that_equals_a_files_name_by_chance_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("OT").write_bytes(b"")
    found, _ = words(tmp_path, "release", "ksame", "--basis=OT", "--k", "5", "--modality", "OT", "--project", "OT")
    assert found[2:] == ["--basis=in/0-OT", "--k", "5", "--modality", "OT", "--project", "OT"]


@pytest.mark.parametrize(("network", "option"), [("features", "--pictures"), ("remodeller", "--heads")])
def test_a_folder_to_learn_from_is_seen_where_it_lies(tmp_path: Path, network: str, option: str) -> None:
    (tmp_path / "public").mkdir()
    found, _ = words(tmp_path, "train", network, option, tmp_path / "public", "--out", "nets", "--detach")
    assert found == ["train", network, option, str(tmp_path / "public"), "--out", "out/nets"]


def test_a_list_of_labels_comes_along_and_the_word_for_folders_stays(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text("[network]\nname = 'linear'\n")
    (tmp_path / "labels.csv").write_text("file,label\n")
    typed = [
        "train",
        "network",
        "--task",
        tmp_path / "task.toml",
        "--pictures",
        tmp_path,
        "--out",
        "nets",
        "--labels",
    ]
    found, _ = words(tmp_path, *typed, tmp_path / "labels.csv", "--detach")
    assert found[3::2] == ["in/0-task.toml", str(tmp_path), "out/nets", "in/1-labels.csv"]
    found, _ = words(tmp_path / "other", *typed, "folders", "--detach")
    assert found[-1] == "folders"


def test_what_a_configuration_names_comes_along_and_folders_are_seen_where_they_lie(tmp_path: Path) -> None:
    for name in ("net.safetensors", "sub/other.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    for name in ("pictures", "CT", "sub/more"):
        (tmp_path / name).mkdir(exist_ok=True)
    told: dict[str, Any] = {
        "mechanism": "privimage",
        "modality": "CT",
        "public": {"pictures": "pictures", "more": "sub/more"},
        "networks": {"file": "net.safetensors", "others": ["sub/other.safetensors", "none.safetensors"]},
        "model": {"device": "cuda"},
    }
    (tmp_path / "c.toml").write_text(toml(told))
    found, files = words(tmp_path, "release", "ksalsa", "--config", tmp_path / "c.toml", "--json")
    assert (found, files.cuda) == (["release", "ksalsa", "--config", "in/0-c.toml", "--json"], True)
    copied = tmp_path / "job" / "in"
    read = tomllib.loads((copied / "0-c.toml").read_text())
    assert read == {
        **told,
        "public": {"pictures": "pictures", "more": str((tmp_path / "sub" / "more").resolve())},
        "networks": {"file": "1-net.safetensors", "others": ["2-other.safetensors", "none.safetensors"]},
    }
    assert (copied / "1-net.safetensors").read_bytes() == b"net.safetensors"
    assert (copied / "pictures").resolve() == tmp_path / "pictures"
    (tmp_path / "c.toml").unlink()
    assert (copied / "0-c.toml").exists()


@pytest.mark.parametrize(("text", "told"), [("[", "c.toml: not TOML"), (None, "c.toml: no such file")])
def test_what_cannot_be_copied_is_a_sentence(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "c.toml").write_text(text)
    with pytest.raises(CommandError, match=told):
        words(tmp_path, "release", "ksalsa", "--config", tmp_path / "c.toml")


def test_a_name_that_cannot_be_replaced_in_the_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").write_bytes(b"")
    (tmp_path / "c.toml").write_text('file = "\\u006eet.safetensors"\n')
    with pytest.raises(CommandError, match="write the names of files as plain strings"):
        words(tmp_path, "release", "ksalsa", "--config", tmp_path / "c.toml")


@pytest.mark.parametrize("shortened", ["--detach", "--detac", "--det"])
def test_detach_may_be_shortened_as_argparse_lets_people(tmp_path: Path, shortened: str) -> None:
    assert detach._of_command(["--home=x", "tune", shortened, "--json"]) == ["tune", "--json"]
