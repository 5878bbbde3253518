"""``weights convert`` as it is typed: in a confined process, with a sentence for whatever is refused."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
import torch

from agent.cli.main import main
from protos.artifacts.byte_source import BytesSource
from protos.artifacts.strict_safetensors import Architecture


def _typed(folder: Path, value: object, *more: str) -> int:
    torch.save(value, told := io.BytesIO())
    (folder / "net.pt").write_bytes(told.getvalue())
    return main(["weights", "convert", str(folder / "net.pt"), "--out", str(folder / "net.safetensors"), *more])


def test_a_file_is_converted_and_its_digest_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"state_dict": {"fc.weight": torch.ones(2, 3), "bn.running_mean": torch.ones(3)}}
    assert _typed(tmp_path, value) == 0
    raw = (tmp_path / "net.safetensors").read_bytes()
    assert [t.name for t in Architecture.shown_by(BytesSource(raw)).tensors] == ["fc.weight"]
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == hashlib.sha256(raw).hexdigest()
    assert "1 left out" in said
    assert "state_dict.bn.running_mean" in said
    assert _typed(tmp_path, value, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "file": "net.safetensors", "sha256": hashlib.sha256(raw).hexdigest(), "tensors": 1, "left_out": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "norms"),
    [((), "which group norms do not have"), (("--statistics",), "which the scales and shifts hold now")],
)
def test_what_is_left_out_is_said_as_the_option_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], norms: str
) -> None:
    value = {"bn.weight": torch.ones(3), "bn.running_mean": torch.ones(3), "bn.running_var": torch.ones(3)}
    assert _typed(tmp_path, value, *more) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"2 left out: statistics of batch norms, {norms}," in said
    assert "bn.running_mean, bn.running_var if no patient" in said, "two names of two, and no more"
    many = {"w": torch.ones(2), **{f"bn{n}.running_mean": torch.ones(3) for n in range(7)}}
    assert _typed(tmp_path, many, *more) == 0
    assert "bn4.running_mean, ... if no patient" in " ".join(capsys.readouterr().out.split())


class _Code:
    def __reduce__(self) -> object:
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"w": torch.ones(2), "x": _Code()}, "it asks for code, which is never run: builtins.print"),
        ({"w": torch.ones(1).expand(10**11)}, "its tensors ask for more memory than the file has bytes"),
    ],
)
def test_what_is_refused_is_told_by_one_sentence_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: object, sentence: str
) -> None:
    assert _typed(tmp_path, value) == 1
    assert f"refused: net.pt: {sentence}" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "net.safetensors").exists()


def test_a_file_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "convert", str(tmp_path / "no.pt"), "--out", str(tmp_path / "out")]) == 1
    assert "no.pt: No such file" in capsys.readouterr().err
