from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.Image import Resampling

from agent.models.features.extractors import features_bytes
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.image_tensors import to_tensor
from agent.models.published.loading import PublishedWeightsError
from agent.models.recognition.recogniser import RecogniserError
from agent.models.recognition.recogniser_training import TooFewPeopleError
from agent.models.training_loop import seeded
from deploy.phantoms.fundus import APTOS_SHARES, FundusPatient, fundus_patients
from deploy.reproduction import __main__ as command
from deploy.reproduction import anonfaces, ksalsa, networks
from deploy.reproduction.__main__ import main
from deploy.reproduction.anonfaces_experiment import clustered
from deploy.reproduction.anonfaces_experiment import people as people_of
from deploy.reproduction.averaging_methods import ORIGINAL, PIXEL, SALSA, group, released
from deploy.reproduction.datasets import aptos, eyepacs
from deploy.reproduction.experiment import (
    PRESETS,
    Official,
    Samples,
    Settings,
    Work,
    opened,
    samples_of,
    sizes,
    split,
)
from deploy.reproduction.networks import codec, judge, knowledge, recogniser
from deploy.reproduction.requirements import Needs, TooFewPatientsError, classes, ready
from deploy.reproduction.result_cache import BusyError, CellError
from deploy.reproduction.tables import Cell, Table, as_json, as_text, order
from tests.support.tiny_ksalsa import LONGER, TINY

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def people() -> list[FundusPatient]:
    return fundus_patients(80, np.random.default_rng(0), 32, 2, ("right",), APTOS_SHARES)


@pytest.fixture(scope="session")
def aptos_folder(people: list[FundusPatient], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aptos")
    (folder / "train_images").mkdir()
    for one in people:
        Image.fromarray(one.photographs[0].pixels).save(folder / "train_images" / f"{one.number:012x}.png")
    lines = ["id_code,diagnosis", *(f"{one.number:012x},{one.grade}" for one in people)]
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def eyepacs_folder(people: list[FundusPatient], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eyepacs")
    (folder / "train").mkdir()
    lines = ["image,level"]
    for one in people[:60]:
        for photo, eye in zip(one.photographs, ("left", "right"), strict=True):
            name = f"{one.number + 10}_{eye}"
            Image.fromarray(photo.pixels).save(folder / "train" / f"{name}.jpeg", quality=95)
            lines.append(f"{name},{one.grade}")
    (folder / "trainLabels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks that several tests share."""
    return tmp_path_factory.mktemp("kept")


# ------------------------------------------------------------------ end to end


@pytest.mark.slow
def test_a_folder_in_aptos_layout_gives_table_1_with_its_verdicts(aptos_folder: Path, kept: Path) -> None:
    said: list[str] = []
    table = ksalsa.run("ksalsa-table1", aptos(aptos_folder, 32), TINY, kept, said.append)
    assert table.rows == ("real, held out", "GAN-Inverted", "k-Same-Pixel", "k-Same-PCA", "k-Centroid", "k-SALSA")
    assert all(len(cell.values) == 2 and np.isfinite(cell.values).all() for cell in table.cells.values())
    assert len({table.of(row, "k=2 FD").values for row in table.rows}) == 6  # every row is measured on its own
    held_out, inverted = (table.of(row, "k=2 FD").mean for row in ("real, held out", "GAN-Inverted"))
    assert held_out < inverted  # two steps draw no retina
    for claim in ("GAN-Inverted < k-SALSA", "k-SALSA < k-Centroid", "k-Centroid << k-Same-Pixel"):
        assert f"k=2 FD: {claim}" in as_text(table)
    assert "networks trained on D0" in as_text(table)
    told = json.loads(as_json(table))
    assert {(c["row"], c["column"]) for c in told["cells"]} == set(table.cells)
    assert any(line.startswith("encoder: step") for line in said)
    assert any(line == "aligning styles: 18 clusters of 36 patients, k 2, seed 0, k-SALSA" for line in said)
    assert not [line for line in said if re.search(r"Alignment\(|[0-9a-f]{16}", line)]  # lines are for people
    assert "judge: random-3x32x4-s101, in place of Inception" in as_text(table)

    said.clear()
    again = ksalsa.run("ksalsa-table1", aptos(aptos_folder, 32), TINY, kept, said.append)
    assert again == table
    assert said == []  # nothing was computed a second time
    with opened(samples_of(aptos(aptos_folder, 32)), TINY, kept, said.append) as work:
        for method in (PIXEL, SALSA):
            assert_overlap(work, table, method)


# One table of each paper in every run of the suite; the others, which differ in their rows, in `make test-slow`.
SHORT = {"ksalsa-table3", "anonfaces-fig10"}


def tables(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow]) for name in sorted(names)]


@pytest.mark.parametrize("name", tables(ksalsa.TABLES))
def test_every_table_of_ksalsa_is_filled(name: str, aptos_folder: Path, kept: Path) -> None:
    table = ksalsa.run(name, aptos(aptos_folder, 32), replace(TINY, seeds=(0,), ks=(2, 3)), kept, lambda _: None)
    assert table.cells
    assert table.verdicts
    assert all(np.isfinite(cell.values).all() for cell in table.cells.values())
    if name == "ksalsa-table3":
        # two of a cluster among the twenty candidates
        assert table.of("k-Same-Pixel", "k=2 chance").mean == pytest.approx(2 / 20, rel=0.11)
        assert table.of("k-Same-Pixel", "k=2 AUC, best").mean > 0.9  # a mean of two pictures gives both away


@pytest.mark.parametrize("name", tables(anonfaces.TABLES))
def test_every_figure_of_anonfaces_is_filled(name: str, eyepacs_folder: Path, kept: Path) -> None:
    settings = replace(TINY, seeds=(0,), ks=(2, 4))
    table = anonfaces.run(name, eyepacs(eyepacs_folder, 32), settings, kept / "faces", lambda _: None)
    assert table.cells
    assert table.verdicts
    if name == "anonfaces-fig10":  # two steps teach nothing, and nobody shall take "0 found" for safety
        assert "identity-2 KNOWS TOO FEW PEOPLE AGAIN to judge a release" in as_text(table)
    for (_, column), cell in table.cells.items():
        assert all(np.isnan(v) or -1 <= v <= 2 for v in cell.values), column


def assert_overlap(work: Work, table: Table, method: str) -> None:
    """KID, precision and recall of the first seed against loops over the definitions."""
    rows = work.parts(0).cohort
    made = released(work, 0, 2, method)[0].astype(np.float32) / 255
    with torch.no_grad():
        real, fake = (judge(work).embed(to_tensor(x)).double().numpy() for x in (work.samples.unit(rows), made))
    kernel = lambda x, y: (float(x @ y) / len(x) + 1) ** 3  # noqa: E731
    inside = [
        np.mean([kernel(x, y) for i, x in enumerate(a) for j, y in enumerate(a) if i != j]) for a in (real, fake)
    ]
    between = np.mean([kernel(x, y) for x in real for y in fake])
    assert table.of(method, "k=2 1000 KID").values[0] == pytest.approx(1000 * (sum(inside) - 2 * between), rel=1e-4)
    for name, balls, points in (("precision", real, fake), ("recall", fake, real)):
        reach = [
            sorted(float(np.linalg.norm(x - y)) for y in balls)[5] for x in balls
        ]  # its own distance is the first
        share = np.mean([any(np.linalg.norm(p - x) <= r for x, r in zip(balls, reach, strict=True)) for p in points])
        assert table.of(method, f"k=2 {name}").values[0] == pytest.approx(share)


def test_rank_1_needs_a_second_picture_of_everybody(aptos_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two images"):
        anonfaces.run("anonfaces-table1", aptos(aptos_folder, 32), TINY, tmp_path, lambda _: None)


# ------------------------------------------------------------------ too small, and known before


def graded(people: int, each: int = 2) -> Samples:
    """Pictures of noise, ``each`` of everybody, with grades that every part has."""
    images = np.random.default_rng(0).integers(0, 256, (people * each, 32, 32, 3)).astype(np.uint8)
    labels = tuple(str(i % 5) for i in range(people * each))
    return Samples(images, np.arange(people * each) // each, labels, "made-up")


def refused(samples: Samples, settings: Settings, folder: Path, name: str, needs: Needs) -> str:
    """What is said, "" for nothing; and nothing was trained."""
    with opened(samples, settings, folder, lambda _: None) as work:
        try:
            ready(work, name, needs)
            said = ""
        except (TooFewPatientsError, TooFewPeopleError) as error:
            said = str(error)
    assert not (folder / "networks").exists()
    return said


def test_every_experiment_says_what_it_needs() -> None:
    assert set(ksalsa.NEEDS) == set(ksalsa.TABLES)
    assert set(anonfaces.NEEDS) == set(anonfaces.TABLES)


@pytest.mark.parametrize("name", [*ksalsa.TABLES, *anonfaces.TABLES])
def test_an_experiment_says_how_many_patients_would_do_and_takes_exactly_these(name: str, tmp_path: Path) -> None:
    settings = replace(TINY, ks=(2, 5, 10))
    needs = replace({**ksalsa.NEEDS, **anonfaces.NEEDS}[name], recognisers=())
    told = re.search(
        r"has 9 patients in 18 images; (\d+) patients", refused(graded(9), settings, tmp_path, name, needs)
    )
    assert told
    enough = int(told[1])
    assert refused(graded(enough), settings, tmp_path, name, needs) == ""
    assert "too few patients" in refused(graded(enough - 1), settings, tmp_path, name, needs)
    assert sizes(enough, settings)[1] >= (5 if needs.middle else 10) * needs.clusters


@pytest.mark.parametrize("rate", [0.2, 0.02, 0.001])
def test_recognisers_get_the_people_that_they_need_or_nothing_is_trained(rate: float, tmp_path: Path) -> None:
    settings, needs = replace(TINY, false_match_rate=rate), Needs(recognisers=(0, 1, 2))
    said = refused(graded(13), settings, tmp_path, "anonfaces-fig10", needs)
    told = re.search(r"has 4 people with two images or more, 8 images .* of (\d+) in the data set", said)
    assert told
    enough = int(told[1])
    assert refused(graded(enough), settings, tmp_path, "anonfaces-fig10", needs) == ""
    assert "too few people" in refused(graded(enough - 1), settings, tmp_path, "anonfaces-fig10", needs)
    assert "has 0 people" in refused(graded(enough, 1), settings, tmp_path, "anonfaces-fig10", needs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ksalsa-table1", "ksalsa-table3"])
def test_a_run_refuses_first_and_runs_to_its_end_where_there_is_just_enough(
    name: str, aptos_folder: Path, tmp_path: Path
) -> None:
    settings = replace(TINY, seeds=(0,))
    with pytest.raises(TooFewPatientsError) as error:
        ksalsa.run(name, aptos(aptos_folder, 32, 10), settings, tmp_path, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    enough = int(re.findall(r"(\d+) patients would do", str(error.value))[0])
    table = ksalsa.run(name, aptos(aptos_folder, 32, enough), settings, tmp_path, lambda _: None)
    assert all(np.isfinite(cell.values).all() for cell in table.cells.values())


def test_a_test_part_of_one_grade_is_refused_where_something_is_graded(tmp_path: Path) -> None:
    alike = replace(graded(60), labels=("0",) * 120)
    assert "of one grade" in refused(alike, TINY, tmp_path, "ksalsa-table2", ksalsa.NEEDS["ksalsa-table2"])
    assert refused(alike, TINY, tmp_path, "ksalsa-table3", ksalsa.NEEDS["ksalsa-table3"]) == ""


def test_a_recogniser_that_tells_nobody_apart_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = graded(60)
    same = np.repeat(some.images[:1], len(some.images), axis=0)
    one = split(some, TINY, 0).public[0]
    same[one] = some.images[one]  # pictures that do not differ at all are refused sooner
    with opened(replace(some, images=same), TINY, tmp_path, lambda _: None) as work:
        # equal pictures lie at a distance of 0, or of a rounding error: no threshold, or one that knows nobody
        try:
            said = knowledge(work, 0)
        except RecogniserError as error:
            said = str(error)
        assert re.search("KNOWS TOO FEW PEOPLE AGAIN|tells nobody apart after 2 steps", said)

        def collapsed(*_: object) -> None:
            raise RecogniserError("no threshold")

        monkeypatch.setattr(networks, "fit_recogniser", collapsed)  # whichever of the two rounding gave above
        with pytest.raises(RecogniserError, match=r"identity-1, .* tells nobody apart after 2 steps: take more of"):
            recogniser(work, 0, 1)


# ------------------------------------------------------------------ what is graded, and what is kept by name


def test_eyepacs_is_graded_as_normal_or_not_and_aptos_in_five_grades(
    eyepacs_folder: Path, aptos_folder: Path, kept: Path
) -> None:
    data = samples_of(eyepacs(eyepacs_folder, 32))
    assert set(data.labels) > {"0", "1"}
    with opened(data, replace(TINY, seeds=(0,)), kept / "faces", lambda _: None) as work:
        pictures, labels = released(work, 0, 2, ORIGINAL)
        grade = {data.images[row].tobytes(): int(data.labels[row]) for row in work.parts(0).cohort}
        assert [label == "1" for label in labels] == [grade[picture.tobytes()] > 0 for picture in pictures]
        of = group(work, 0, work.parts(0).cohort, 2)
        worst = {}  # both eyes of a phantom have one grade
        for patient in of.cohort.patients:
            worst[patient.pseudonym] = int(patient.images[0].label) > 0
        votes = [sum(worst[name] for name in cluster) / len(cluster) for cluster in of.clusters.members]
        assert of.labels == tuple("1" if share > 0.5 else "0" for share in votes)
    table = ksalsa.run("ksalsa-table2", eyepacs(eyepacs_folder, 32), replace(TINY, seeds=(0,)), kept / "faces", str)
    assert "normal (0) or retinopathy (1 to 4)" in as_text(table)
    five = samples_of(aptos(aptos_folder, 32))
    assert classes(five) == five.labels


def test_partitions_of_one_space_are_not_taken_for_those_of_another(eyepacs_folder: Path, kept: Path) -> None:
    settings = replace(TINY, seeds=(0,))
    with opened(samples_of(eyepacs(eyepacs_folder, 32)), settings, kept / "faces", lambda _: None) as work:
        of = people_of(work, 0)
        found = {space: clustered(of, space, "anonfaces-ward", 2) for space in ("PCA", "recogniser", "W+")}
        assert len({each.members for each in found.values()}) == 3
        assert clustered(of, "PCA", "anonfaces-ward", 2) is found["PCA"]


# ------------------------------------------------------------------ killed and resumed

_CHILD = """
import sys
from pathlib import Path
from typing import Any
import torch
from deploy.reproduction import ksalsa
from deploy.reproduction.datasets import aptos
from tests.support.tiny_ksalsa import LONGER
ksalsa.run("ksalsa-table2", aptos(Path(sys.argv[1]), 32, 40), LONGER, Path(sys.argv[2]), lambda line: None)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_same_numbers(aptos_folder: Path, tmp_path: Path) -> None:
    killed, data = tmp_path / "killed", aptos(aptos_folder, 32, 40)
    command = [sys.executable, "-c", _CHILD, str(aptos_folder), str(killed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    deadline = time.monotonic() + 120
    while not list(killed.glob("networks/encoder-*/checkpoint.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(killed.glob("networks/encoder-*/encoder.safetensors"))  # it was in the middle
    (generator,) = killed.glob("networks/generator-*/generator.safetensors")
    before = generator.stat().st_mtime_ns
    resumed = ksalsa.run("ksalsa-table2", data, LONGER, killed, lambda _: None)
    assert generator.stat().st_mtime_ns == before  # what was trained is not trained again
    assert resumed == ksalsa.run("ksalsa-table2", data, LONGER, tmp_path / "whole", lambda _: None)


def test_two_runs_do_not_work_in_one_folder(aptos_folder: Path, tmp_path: Path) -> None:
    samples = samples_of(aptos(aptos_folder, 32, 20))
    with (
        opened(samples, TINY, tmp_path, lambda _: None),
        pytest.raises(BusyError),
        opened(samples, TINY, tmp_path, lambda _: None),
    ):
        pass


def made_up(n: int = 12) -> Samples:
    images = np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3)).astype(np.uint8)
    return Samples(images, np.arange(n) // 2, ("0",) * n, "made-up")


def test_a_number_is_computed_once_and_a_damaged_one_is_not_believed(tmp_path: Path) -> None:
    with opened(made_up(), TINY, tmp_path, lambda _: None) as work:
        assert work.numbers("a", lambda: {"x": 0.1, "y": float("nan")})["x"] == 0.1
        kept_ = work.numbers("a", lambda: {"x": 2.0})
        assert kept_["x"] == 0.1
        assert np.isnan(kept_["y"])
        (path,) = (tmp_path / "numbers").iterdir()
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(CellError):
            work.numbers("a", lambda: {"x": 2.0})


def test_other_settings_or_pictures_never_find_kept_numbers(tmp_path: Path) -> None:
    other = made_up()
    other.images[0, 0, 0, 0] ^= 1
    for count, (samples, settings) in enumerate(
        [(made_up(), TINY), (made_up(), replace(TINY, epochs=2)), (other, TINY)], 1
    ):
        with opened(samples, settings, tmp_path, lambda _: None) as work:
            work.numbers("a", lambda: {"x": 0.0})
        assert len(list((tmp_path / "numbers").iterdir())) == count


# ------------------------------------------------------------------ the split


@pytest.mark.parametrize("seed", range(4))
def test_the_split_is_by_patient_and_nobody_is_in_two_parts(seed: int) -> None:
    samples = made_up(60)
    parts = split(samples, TINY, seed)
    owners = [set(samples.owners[rows].tolist()) for rows in (parts.public, parts.cohort, parts.test)]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 30
    assert all(owners)


def test_seeds_share_the_public_part_as_far_as_they_share_networks() -> None:
    samples = made_up(60)
    one, two = (split(samples, TINY, seed) for seed in (0, 1))
    assert np.array_equal(one.public, two.public)
    assert not np.array_equal(one.cohort, two.cohort)
    two_nets = replace(TINY, net_seeds=2)
    assert not np.array_equal(split(samples, two_nets, 0).public, split(samples, two_nets, 1).public)


def test_as_published_trains_on_the_cohort_and_calls_its_components_private(
    aptos_folder: Path, tmp_path: Path
) -> None:
    samples = samples_of(aptos(aptos_folder, 32))
    for settings, told in ((TINY, "public"), (replace(TINY, as_published=True), "private")):
        with opened(samples, settings, tmp_path, lambda _: None) as work:
            parts = work.parts(0)
            expected = parts.cohort if told == "private" else parts.public
            assert np.array_equal(work.trained_on(0), expected)
            assert codec(work, 0).components() == {"encoder": told, "generator": told}


def test_the_presets_are_of_rising_size() -> None:
    assert [PRESETS[name].side for name in ("cpu32", "cpu64", "paper512")] == [32, 64, 512]
    assert PRESETS["paper512"].generator_steps * PRESETS["paper512"].generator_batch == 5_000_000
    assert PRESETS["paper512"].ks == (2, 5, 10)


# ------------------------------------------------------------------ tables


def table(**values: tuple[float, ...]) -> Table:
    return Table("t", "t", tuple(values), ("c",), {(row, "c"): Cell(v) for row, v in values.items()})


def test_an_order_that_is_there_comes_out_and_one_that_is_not_does_not() -> None:
    made = table(a=(1.0, 1.2), b=(1.5, 1.1), c=(4.0, 4.0))
    good = order(made, "c", ("a", "<", "b", "<<", "c"))
    assert (good.held, good.seeds) == (True, (1, 2))  # in the mean; the second seed says otherwise
    assert good.line().startswith("came out (in 1 of 2 seeds)")
    bad = order(made, "c", ("b", "<=", "a"))
    assert (bad.held, bad.seeds) == (False, (1, 2))
    assert bad.line().startswith("DID NOT COME OUT")
    assert "b 1.3 ± 0.28, a 1.1 ± 0.14" in bad.line()


def test_much_less_is_at_most_a_half() -> None:
    made = table(a=(1.0,), b=(1.99,), c=(2.0,))
    assert not order(made, "c", ("a", "<<", "b")).held
    assert order(made, "c", ("a", "<<", "c")).held


def test_a_tie_keeps_the_weak_order_only() -> None:
    made = table(a=(1.0,), b=(1.0,))
    assert order(made, "c", ("a", "<=", "b")).held
    assert not order(made, "c", ("a", "<", "b")).held


@pytest.mark.parametrize("relation", ["<", "<=", "<<"])
def test_what_is_no_number_keeps_no_order(relation: str) -> None:
    made = table(a=(float("nan"),), b=(1.0,))
    assert not order(made, "c", ("a", relation, "b")).held
    assert not order(made, "c", ("b", relation, "a")).held
    assert json.loads(as_json(made))["cells"][0]["mean"] is None


def test_a_chain_that_is_none_is_refused() -> None:
    for chain in (("a",), ("a", ">", "b"), ("a", "<")):
        with pytest.raises(ValueError, match="chain"):
            order(table(a=(1.0,), b=(2.0,)), "c", chain)


def test_the_spread_is_that_of_a_sample() -> None:
    assert Cell((1.0, 2.0, 3.0)).spread == pytest.approx(1.0)
    assert Cell((1.0,)).spread == 0.0
    assert "2.000 ± 1.000" in as_text(table(a=(1.0, 2.0, 3.0)))


def test_pictures_of_another_size_are_refused(tmp_path: Path) -> None:
    big = np.stack([np.asarray(Image.fromarray(i).resize((64, 64), Resampling.BILINEAR)) for i in made_up(4).images])
    samples = Samples(big, np.arange(4), ("0",) * 4, "big")
    with pytest.raises(ValueError, match="32 pixels"), opened(samples, TINY, tmp_path, lambda _: None):
        pass


def test_a_published_network_is_taken_from_its_place_with_its_digest_or_not_at_all(tmp_path: Path) -> None:
    pinned = hashlib.sha256(b"right").hexdigest()
    with opened(made_up(), replace(TINY, judge=Official("inception", pinned)), tmp_path, lambda _: None) as work:
        with pytest.raises(ValueError, match="official/inception"):
            judge(work)
        (tmp_path / "official").mkdir()
        (tmp_path / "official" / "inception").write_bytes(b"wrong")
        with pytest.raises(PublishedWeightsError):
            judge(work)


# ------------------------------------------------------------------ as it is typed


def typed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(word) for word in words])
    said = capsys.readouterr()
    return status, said.out, " ".join(said.err.split())


def features_file(folder: Path, name: str) -> str:
    """A real network of features, as ``--judge`` finds it; its digest."""
    with seeded(0):
        raw = features_bytes(name, Trunk(TrunkArchitecture(32)), {})
    (folder / "official").mkdir(parents=True, exist_ok=True)
    (folder / "official" / "learned").write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


@pytest.mark.slow
def test_published_networks_are_named_as_they_are_typed_and_the_table_says_which(
    aptos_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PRESETS", {"paper512": replace(TINY, seeds=(0,))})
    words = ["ksalsa-table1", "--data", aptos_folder, "--out", tmp_path, "--preset", "paper512"]
    digest = features_file(tmp_path, "looks")
    status, _, err = typed(capsys, *words, "--judge", f"learned:{digest}")
    assert status == 1
    assert "--style (VGG19), --content (MoCo) is not named" in err
    assert "--random-features" in err
    status, _, err = typed(capsys, *words, "--random-features", "--judge", f"inception:{digest}")
    assert (status, "put the published file of inception there first" in err) == (1, True)
    status, _, err = typed(capsys, *words, "--random-features", "--judge", f"learned:{'0' * 64}")
    assert (status, "SHA-256" in err) == (1, True)
    assert not (tmp_path / "networks").exists()  # a wrong file is known before anything is trained
    status, out, _ = typed(capsys, *words, "--random-features", "--judge", f"learned:{digest}")
    assert status == 0
    assert "style: random-3x32x4-s1, in place of VGG19" in out
    assert f"judge: looks ({digest[:12]})" in out
    assert "do not compare with the paper's" in out
    three = [word for role in ("--style", "--content", "--judge") for word in (role, f"learned:{digest}")]
    status, out, _ = typed(capsys, *words, *three, "--json")
    assert status == 0
    notes = " ".join(json.loads(out)["notes"])
    assert notes.count(digest[:12]) == 3
    assert "in place of" not in notes


@pytest.mark.parametrize("text", ["inception", "inception:12", f"unknown:{'0' * 64}", f"random:{'0' * 64}"])
def test_what_names_no_published_network_is_refused_as_it_is_typed(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["ksalsa-table1", "--data", "d", "--out", "o", "--judge", text])
    assert "KIND:SHA256" in capsys.readouterr().err


def test_without_an_accelerator_the_largest_preset_names_the_others(
    aptos_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["ksalsa-table1", "--data", aptos_folder, "--out", tmp_path, "--preset", "paper512"]
    assert typed(capsys, *words)[2] == "refused: this machine has no accelerator: choose --preset cpu32 or cpu64"


def test_help_says_what_memory_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{35_126 * 512 * 512 * 3 / 1e9:.1f} GB" in said
    assert "--limit" in said


def test_a_wide_table_is_printed_in_blocks_and_every_column_once() -> None:
    columns = tuple(f"k={k} a long name of a number" for k in range(2, 12))
    cells = {(row, column): Cell((1.0, 2.0)) for row in ("a", "b") for column in columns}
    said = as_text(Table("t", "t", ("a", "b"), columns, cells))
    assert all(len(line) <= 118 for line in said.splitlines())
    assert all(said.count(f"  {column}") == 1 for column in columns)
    assert said.count("1.500 ± 0.707") == 20
