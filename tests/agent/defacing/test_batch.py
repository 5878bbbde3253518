"""The log of a folder's de-facing is no authority: it can be forged, and nothing but our own files may go by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.cli.main import main
from agent.defacing import batch as defaced_files
from agent.defacing.batch import LOG, deface_batch, plan_batch
from agent.defacing.engine import DefacedStudy, DefacingMethod
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from deploy.phantoms.head_files import nifti

TOOLS = DefacingMethod("deface", None, None, "a" * 64)  # type: ignore[arg-type]


class Result:
    reference = 0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever holds a 7 is a fault, an 8 a refusal; anything else comes out with one voxel less."""
    done: list[str] = []

    def take_off(sources: Any, *_: Any, **__: Any) -> DefacedStudy:
        values = sources[0].volume.values
        if (values == 7).any():
            raise ValueError("the voxel of Jane Doe")
        if (values == 8).any():
            raise NotDefacedError("no_head")
        done.append("one")
        bare = values.copy()
        bare[0, 0, 0] = 0
        return DefacedStudy(Result(), (bare,), 1.0, 0, 0, (0.1,))  # type: ignore[arg-type]

    monkeypatch.setattr(defaced_files, "take_off", take_off)
    return done


def folder(root: Path, **filled: int) -> Path:
    for name, value in filled.items():
        nifti(root / "in" / f"{name}.nii", Volume(np.full((4, 4, 4), value, np.int16), np.eye(4)))
    return root / "in"


def states(source: Path, out: Path) -> dict[str, str]:
    return {row.path: row.state for rows in deface_batch(plan_batch(source, out), out, TOOLS) for row in rows}


def test_one_study_that_fails_keeps_no_other_waiting_and_says_nothing_of_it(tmp_path: Path) -> None:
    source, out = folder(tmp_path, a=7, b=8, c=1), tmp_path / "out"
    rows = [row for some in deface_batch(plan_batch(source, out), out, TOOLS) for row in some]
    assert [row.state for row in rows] == ["fault", "no_head", "defaced"]
    assert "Jane" not in json.dumps([row.told() for row in rows])
    assert sorted(path.name for path in out.iterdir()) == ["c.nii", LOG]


def test_what_is_done_is_passed_over_only_while_its_bytes_are_there(tmp_path: Path, quick: list[str]) -> None:
    source, out = folder(tmp_path, a=1), tmp_path / "out"
    assert states(source, out) == {"a.nii": "defaced"}
    assert states(source, out) == {"a.nii": "defaced before"}
    (out / "a.nii").unlink()
    assert states(source, out) == {"a.nii": "defaced"}
    assert len(quick) == 2
    (out / "a.nii").write_bytes(b"another's")
    with pytest.raises(FileExistsError):
        states(source, out)
    assert (out / "a.nii").read_bytes() == b"another's"


@pytest.mark.parametrize("forged", ["done", "begun", "paths", "numbers"])
def test_a_forged_log_deletes_nothing_and_claims_nothing(tmp_path: Path, forged: str) -> None:
    source, out, victim = folder(tmp_path, a=1), tmp_path / "out", tmp_path / "victim"
    states(source, out)
    key = json.loads((out / LOG).read_text().splitlines()[-1])["study"]
    (out / "a.nii").unlink()
    victim.write_bytes(b"mine")
    (out / LOG).unlink()
    lines = {
        "done": {"study": key, "state": "defaced", "digests": []},
        "begun": {"study": key, "state": "begun", "digests": ["0" * 64]},
        "paths": {"study": key, "state": "begun", "files": ["../victim"], "digests": ["../victim"]},
        "numbers": {"study": key, "state": "defaced", "digests": 5},
    }
    (out / LOG).write_text(json.dumps(lines[forged]) + "\n")
    assert states(source, out) == {"a.nii": "defaced"}
    assert victim.read_bytes() == b"mine"


def test_a_file_that_came_between_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Begun, nothing written, and then somebody puts a file there."""
    source, out = folder(tmp_path, a=1), tmp_path / "out"
    states(source, out)
    (out / LOG).write_text((out / LOG).read_text().splitlines()[0] + "\n")  # begun, and no more
    (out / "a.nii").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        states(source, out)
    assert (out / "a.nii").read_bytes() == b"mine"


def test_a_name_that_would_speak_to_the_terminal_is_shown_plain(tmp_path: Path) -> None:
    source = tmp_path / "in"
    nifti(source / "a.nii", Volume(np.ones((4, 4, 4), np.int16), np.eye(4)))
    (source / "a.nii").rename(source / "[x]\x1b[2J.nii")
    assert list(states(source, tmp_path / "out")) == ["[x]?[2J.nii"]


def test_links_in_the_output_are_not_followed(tmp_path: Path) -> None:
    source, out, victim = folder(tmp_path, a=1), tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_bytes(b"mine")
    (out / "a.nii").symlink_to(victim)
    with pytest.raises(FileExistsError):
        states(source, out)
    (out / "a.nii").unlink()
    (out / ".a.nii.part").symlink_to(victim)
    assert states(source, out) == {"a.nii": "defaced"}
    assert victim.read_bytes() == b"mine"


def test_a_fault_that_quotes_a_file_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P14: a parser's own text may hold a name."""
    source = folder(tmp_path, a=1)

    def parser(_: Path) -> Any:
        raise ValueError("PatientName Jane^Doe is no number")

    monkeypatch.setattr(defaced_files, "series_of", parser)
    assert main(["deface", str(source), str(tmp_path / "out"), "--method", "strip"]) == 70
    said = capsys.readouterr()
    assert "Jane" not in said.out + said.err
