"""``train remodeller``: public heads are examined once, kept beside the training, and what is no head is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.cli.main import main
from agent.defacing import training_heads
from agent.defacing.deid_gan.network import remodeller_from
from agent.defacing.head import HeadScan
from agent.defacing.training_heads import ExaminedHeads, examine, find_heads
from agent.volumes.errors import NotDefacedError
from deploy.phantoms.head_files import bids, nifti
from tests.support.heads import bad, phantoms, scan, true_head

PERSONS = (0, 1, 2)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public")
    bids(folder, phantoms(), PERSONS, visits=1, mm=4.0)
    return folder


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Heads are known by the phantom's own truth, and how often one is examined is counted."""
    asked: list[int] = []

    def look(volume: Any, *_: Any) -> HeadScan:
        for n in PERSONS:
            if np.array_equal(np.asarray(volume.values, np.uint16), scan(n).volume.values):
                asked.append(n)
                return true_head(n)
        raise NotDefacedError("no_head")

    monkeypatch.setattr(training_heads, "examined", look)
    return asked


def test_a_bids_folder_trains_a_network_and_goes_on(
    public: Path, known: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "remodeller", "--heads", str(public), "--out", str(tmp_path / "net"), "--side", "32"]
    assert main([*words, "--steps", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["heads"], told["left_out"], told["steps"]) == (3, {}, 1)
    net = remodeller_from((tmp_path / "net" / "remodeller.safetensors").read_bytes(), "public")
    assert net.side == 32
    assert sorted(known) == list(PERSONS)
    assert main([*words, "--steps", "2"]) == 0
    assert sorted(known) == list(PERSONS), "a head is examined once"
    said = " ".join(capsys.readouterr().out.split())
    assert "3 heads in 2 steps" in said
    assert "vouch for it" in said


def test_of_a_bids_folder_only_the_t1_weighted_heads_of_its_subjects_are_found(tmp_path: Path) -> None:
    (tmp_path / "participants.tsv").write_text("participant_id\nsub-1\n")  # a training needs no age
    for name in (
        "sub-1/ses-b/anat/sub-1_ses-b_T1w.nii.gz",
        "sub-1/ses-a/anat/sub-1_ses-a_T1w.nii",
        "sub-1/ses-a/anat/sub-1_ses-a_T2w.nii",
        "sub-1/ses-a/func/sub-1_ses-a_T1w.nii",
        "sub-2/anat/sub-2_T1w.nii.gz",
        "sub-2/anat/sub-2_T1w.json",
        "derivatives/sub-9/anat/sub-9_T1w.nii",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [(head.person, *(path.name for path in head.paths)) for head in find_heads(tmp_path)]
    assert found == [
        ("sub-1", "sub-1_ses-a_T1w.nii"), ("sub-1", "sub-1_ses-b_T1w.nii.gz"), ("sub-2", "sub-2_T1w.nii.gz"),
    ]  # fmt: skip


def test_kept_heads_are_what_was_examined(public: Path, known: list[int], tmp_path: Path) -> None:
    heads, left = examine(find_heads(public), tmp_path)
    assert left == {}
    assert isinstance(heads, ExaminedHeads)
    assert len({person for person, _ in heads}) == 3
    for (_, head), n in zip(heads, PERSONS, strict=True):
        truth = true_head(n)
        assert np.array_equal(head.volume.values, truth.volume.values)
        assert np.array_equal(head.brain.mask, truth.brain.mask)
        assert np.array_equal(head.skin, truth.skin)
        assert np.allclose(head.brain.to_template, truth.brain.to_template)
    assert len(heads[1:]) == 2


def test_what_is_no_head_is_left_out_and_told(known: list[int], tmp_path: Path) -> None:
    folder = tmp_path / "any"
    nifti(folder / "a.nii.gz", scan(0).volume)
    nifti(folder / "b.nii.gz", bad()["bottle"])
    heads, left = examine(find_heads(folder), tmp_path / "out")
    assert (len(heads), left) == (1, {"no_head": 1})


def test_one_person_is_too_few(known: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nifti(tmp_path / "any" / "a.nii.gz", scan(0).volume)
    words = ["train", "remodeller", "--heads", str(tmp_path / "any"), "--out", str(tmp_path / "net")]
    assert main([*words, "--side", "32"]) == 1
    assert "refused" in capsys.readouterr().err
    assert not (tmp_path / "net" / "remodeller.safetensors").exists()
    assert main([*words, "--side", "48"]) == 1
    assert "no network of 48" in " ".join(capsys.readouterr().err.split())
