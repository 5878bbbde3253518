"""The papers' tables as they are typed: what is printed, what is refused, and with which words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agent.mechanisms.ksalsa.style_alignment import Alignment
from agent.models.stylegan.network import PRESETS
from deploy.phantoms.fundus import fundus_patients, write_aptos, write_eyepacs
from deploy.reproduction import (
    __main__,
    anonfaces,
    deid_gan,
    deid_gan_heads,
    distillation,
    distillation_sources,
    ksalsa,
    privimage,
    privimage_sources,
)
from deploy.reproduction.datasets import LOADERS
from deploy.reproduction.experiment import PRESETS as EXPERIMENTS
from deploy.reproduction.experiment import Settings
from deploy.reproduction.feature_networks import FEATURES
from deploy.reproduction.result_cache import BusyError, CellError
from tests.support.command_line import Typed, typing

ROOT = Path(__file__).parents[3]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """The command as it is typed."""
    return typing(__main__.main, capsys, monkeypatch)


TINY = Settings(
    generator=PRESETS["tiny32"],
    seeds=(0,),
    ks=(2,),
    generator_steps=2,
    generator_batch=4,
    pair_steps=2,
    image_steps=1,
    encoder_batch=2,
    passes=1,
    feature_steps=2,
    recogniser_steps=2,
    false_match_rate=0.2,
    basis=4,
    alignment=Alignment(steps=2),
    epochs=1,
    attack_steps=2,
    views=2,
)


@pytest.fixture
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "PRESETS", {"tiny": TINY})


@pytest.mark.usefixtures("tiny_preset")
def test_a_papers_table_is_one_command_on_a_folder_in_the_published_layout(typed: Typed, tmp_path: Path) -> None:
    write_aptos(tmp_path / "aptos", fundus_patients(40, np.random.default_rng(0), 32, eyes=("right",)))
    order = ["ksalsa-table2", "--data", tmp_path / "aptos", "--out", tmp_path / "kept"]
    said = typed(*order, "--preset", "tiny")
    assert said.status == 0, said.err
    assert all(row in said.out for row in ("ksalsa-table2", "k-Same-Pixel", "k-Centroid", "k-SALSA"))
    assert "aptos, 32 px; networks trained on D0" in said.out
    assert re.search("came out|DID NOT COME OUT", said.out), "the paper's order, and whether it is there"
    assert "encoder: step" in said.err, "what is being computed is said beside the table"
    again = typed(*order, "--preset", "tiny", "--json")
    assert {cell["row"] for cell in again.line["cells"]} >= {"k-SALSA", "k-Centroid", "k-Same-Pixel"}
    assert again.err == ""


@pytest.mark.usefixtures("tiny_preset")
def test_what_an_experiment_cannot_be_done_with_is_a_sentence(typed: Typed, tmp_path: Path) -> None:
    write_aptos(tmp_path / "aptos", fundus_patients(3, np.random.default_rng(0), 32))
    (tmp_path / "none").mkdir()

    def asked(experiment: str, folder: str, *more: object) -> str:
        order = [experiment, "--data", tmp_path / folder, "--out", tmp_path / "o", "--preset", "tiny"]
        said = typed(*order, *more)
        assert said.status == 1
        assert said.out == ""
        return said.err

    assert "--data: gone is not a folder" in asked("ksalsa-table1", "gone")
    assert "none of the known layouts" in asked("ksalsa-table1", "none")
    without = typed("ksalsa-table1", "--out", tmp_path / "o", "--preset", "tiny")
    assert (without.status, "name the folder of a data set with --data: aptos, eyepacs" in without.err) == (1, True)
    assert "--preset is one of: tiny" in asked("ksalsa-table1", "aptos", "--preset", "huge")
    assert "trainLabels.csv is missing" in asked("ksalsa-table1", "aptos", "--layout", "eyepacs")
    assert "too few patients" in asked("ksalsa-table1", "aptos", "--limit", 2)
    assert "two images" in asked("anonfaces-table1", "aptos")
    (tmp_path / "aptos" / "trainLabels.csv").write_text("image,level\n")
    assert "several of the known layouts" in asked("ksalsa-table1", "aptos")


def test_every_layout_is_known_by_its_own_list(tmp_path: Path) -> None:
    people = fundus_patients(2, np.random.default_rng(0), 32)
    write_aptos(tmp_path / "aptos", people)
    write_eyepacs(tmp_path / "eyepacs", people)
    for name in ("celeba", "celeba/list", "celeba2", "rafd", "cifar10", "camelyon17", "imagenet"):
        (tmp_path / name).mkdir()
    (tmp_path / "cifar10" / "cifar-10-batches-bin").mkdir()
    (tmp_path / "camelyon17" / "metadata.csv").write_text("")
    (tmp_path / "imagenet" / "n01440764").mkdir()
    (tmp_path / "celeba" / "list" / "identity_CelebA.txt").write_text("")
    (tmp_path / "celeba2" / "identity_CelebA.txt").write_text("")
    (tmp_path / "rafd" / "Rafd090_01_Caucasian_female_angry_frontal.jpg").write_bytes(b"")
    for folder, layout in (*zip(LOADERS, LOADERS, strict=True), ("celeba2", "celeba")):
        assert __main__.layout_of(tmp_path / folder) == layout


def test_the_help_names_every_table_layout_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        __main__.main(["--help"])
    assert caught.value.code == 0
    said = re.sub(r"-\s+", "-", capsys.readouterr().out)
    tables = {*ksalsa.TABLES, *anonfaces.TABLES, *privimage.TABLES, *distillation.TABLES, *deid_gan.TABLES}
    presets = {*EXPERIMENTS, *privimage_sources.PRESETS, *distillation_sources.PRESETS, *deid_gan_heads.PRESETS}
    layouts = {*LOADERS, distillation_sources.MIMIC, privimage_sources.DIGITS, distillation_sources.PHANTOMS}
    assert {*tables, *presets, *layouts} <= set(re.findall(r"[\w-]+", said))
    assert list(EXPERIMENTS) == ["cpu32", "cpu64", "paper512"]
    assert {*__main__._KINDS, "random"} == set(FEATURES)


def test_it_starts_from_a_checkout_and_refuses_a_table_that_there_is_not() -> None:
    words = [sys.executable, "-m", "deploy.reproduction", "ksalsa-table99", "--out", "o"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ksalsa-table1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_of_the_program_says_its_kind_and_no_text(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set may be of real patients."""

    def broken(*_: object) -> None:
        raise RuntimeError("Jane Doe")

    monkeypatch.setattr(__main__, "layout_of", broken)
    said = typed("ksalsa-table1", "--data", tmp_path, "--out", tmp_path / "o")
    assert (said.status, said.out) == (70, "")
    assert said.err == "stopped: internal fault (RuntimeError)\n"


def test_two_runs_in_one_folder_and_a_damaged_result_are_sentences(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault in (
        BusyError("another run works in this folder"),
        CellError("numbers/x.json is damaged"),
    ):

        def refuse(*_: object, fault: Exception = fault) -> None:
            raise fault

        monkeypatch.setattr(privimage, "run", refuse)
        said = typed("privimage-fig6", "--out", tmp_path / "o")
        assert (said.status, said.out) == (1, "")
        assert said.err == f"refused: {fault}\n"


def test_a_folder_that_cannot_be_written_is_a_sentence(typed: Typed, tmp_path: Path) -> None:
    write_aptos(tmp_path / "aptos", fundus_patients(40, np.random.default_rng(0), 32, eyes=("right",)))
    (tmp_path / "file").write_text("no folder")
    said = typed("ksalsa-table2", "--data", tmp_path / "aptos", "--out", tmp_path / "file" / "kept")
    assert (said.status, said.out) == (1, "")
    assert said.err.startswith("refused: Not a directory: ")


def test_the_agents_command_no_longer_has_it_and_no_hospital_installs_it() -> None:
    probe = (
        "import sys, agent.cli.main, agent.cli.options as command\n"
        "words = command.build_parser().format_help()\n"
        "sys.exit('reproduce' in words or any(name.startswith('deploy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=False).returncode == 0
