"""PrivImage's tables in small: that they run, are kept, cost what they say, and compare like with like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.evaluation.utility import Recipe
from agent.mechanisms.privimage.semantic_query import SemanticQuery, SharedImageError
from agent.models.diffusion.edm import DiffusionArchitecture
from deploy.reproduction import privimage, privimage_sources
from deploy.reproduction.__main__ import main
from deploy.reproduction.experiment import Samples
from deploy.reproduction.privimage import DPDM, METHODS, NONPRIV_D, PDP, PRIVIMAGE_D, PRIVIMAGE_G, TABLES
from deploy.reproduction.privimage_experiment import (
    Job,
    PrivateSettings,
    PrivateWork,
    Release,
    Sources,
    _built,
    _units,
    asked,
    opened,
    price,
    released,
    selected,
)
from deploy.reproduction.tables import Table, as_json, as_text
from policies.accounting.accountant import tight_epsilon
from policies.accounting.claims import Gaussian, GaussianQuery, SubsampledGaussian

TINY = replace(
    privimage_sources.DIGITS8,
    diffusion=replace(
        privimage_sources.DIGITS8.diffusion,
        architecture=DiffusionArchitecture(8, 1, 10, (8,), 1, (False,), 8, 8),
        draws=1,
        sampling_steps=2,
    ),
    diffusion_job=Job(0.2, 3, 0.05),
    adversarial_job=Job(0.2, 3, 0.05),
    patients=110,
    delta=1e-3,
    epsilons=(1.0,),
    seeds=(0,),
    semantics_steps=10,
    diffusion_pretraining=3,
    adversarial_pretraining=3,
    synthetic=60,
    recipe=Recipe(epochs=1, side=8, width=4),
    keeps=(1, 2),
    widths=((16,),),
)


def _part(samples: Samples, rows: Any, owners: Any = None) -> Samples:
    owners = samples.owners[rows] if owners is None else owners
    return Samples(samples.images[rows], owners, tuple(samples.labels[row] for row in rows), samples.name)


def _quick(
    epsilon: float, delta: float, q: float, steps: int, also: tuple[Gaussian, ...], unit: str
) -> SubsampledGaussian:
    """Some noise, without the seconds that the right one takes."""
    return SubsampledGaussian(q, 1.5, steps, unit)


@pytest.fixture
def unpriced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.reproduction.privimage_experiment.calibrate", _quick)
    monkeypatch.setattr("deploy.reproduction.privimage_experiment.tight_epsilon", lambda *_: 0.9991)


@pytest.fixture(scope="module")
def small() -> Sources:
    """150 digits, and six of each made-up character."""
    found = privimage_sources.digits()
    return Sources(_part(found.sensitive, np.arange(150)), _part(found.public, np.arange(0, 7440, 20)))


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("privimage")


@pytest.fixture(scope="module")
def tables(small: Sources, folder: Path, told: list[str]) -> dict[str, Table]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.reproduction.privimage_experiment.calibrate", _quick)
        patch.setattr("deploy.reproduction.privimage_experiment.tight_epsilon", lambda *_: 0.9991)
        found = {
            name: privimage.run(name, small, privimage_sources.fitted(TINY, small), folder, told.append)
            for name in TABLES
        }
    return found


@pytest.fixture
def work(small: Sources, tmp_path: Path) -> Iterator[PrivateWork]:
    with opened(small, privimage_sources.fitted(TINY, small), tmp_path, lambda _: None) as found:
        yield found


def test_every_table_has_its_rows_and_says_what_an_epsilon_is(tables: dict[str, Table]) -> None:
    two = tables["privimage-table2"]
    assert set(two.rows) == {method.name for method in METHODS}
    assert two.columns == ("ε=1 LR", "ε=1 MLP", "ε=1 CNN", "ε=1 FD")
    for name in ("privimage-table2", "privimage-table3", "privimage-fig7"):
        text = as_text(tables[name])
        assert "epsilon by PLD at delta 0.001, of one patient added or removed" in text
        assert "query of noise 8: q 0.2, T 3, sigma 1.500: epsilon 1\n" in f"{text}\n", "0.9991, rounded up"
        as_json(tables[name])
    assert tables["privimage-table3"].rows[:2] == (privimage.REAL, privimage.PUBLIC)
    assert tables["privimage-fig7"].rows == ("16% selected", "32% selected", "100%", "widths 16")
    assert tables["privimage-fig6"].of("the whole public set", "share").mean == 1.0
    assert {v.claim for v in two.verdicts} >= {
        "ε=1 CNN: DPDM < PDP-Diffusion < PrivImage+D",
        "ε=1 CNN: DPGAN < DPGAN-p < PrivImage+G",
    }


def test_what_was_computed_is_not_computed_again(
    tables: dict[str, Table], small: Sources, folder: Path, told: list[str]
) -> None:
    before = len(told)
    for name, table in tables.items():
        again = privimage.run(name, small, privimage_sources.fitted(TINY, small), folder, told.append)
        assert as_json(again) == as_json(table)
    assert len(told) == before
    assert not list((folder / "networks").glob("*.checkpoint"))  # of trainings that are through, but the semantics'


@pytest.mark.usefixtures("unpriced")
def test_all_methods_of_a_model_have_one_architecture_one_job_and_one_pretraining(work: PrivateWork) -> None:
    for family in "DG":
        own = [Release(method, 0) for method in METHODS if method.family == family]
        assert len({_built(work, release).fingerprint for release in own}) == 1  # type: ignore[attr-defined]
        jobs = {
            (claim.sampling_rate, claim.steps) for claim, _, _ in (price(work, replace(r, epsilon=1.0)) for r in own)
        }
        assert len(jobs) == 1


@pytest.mark.slow
def test_a_selection_is_paid_for_out_of_the_same_epsilon(work: PrivateWork) -> None:
    work.settings = replace(
        work.settings, diffusion_job=Job(0.1, 100, 0.05)
    )  # few quiet steps take a minute to price
    alone, parts, epsilon = price(work, Release(PDP, 0, 1.0))
    assert parts == (alone,)
    with_query, both, total = price(work, Release(PRIVIMAGE_D, 0, 1.0))
    assert both == (with_query, GaussianQuery(8.0, 1, 1))
    assert with_query.noise_multiplier > alone.noise_multiplier
    for claims, said in ((parts, epsilon), (both, total)):
        assert 0.99 < said <= 1.0
        assert tight_epsilon(claims, TINY.delta) == pytest.approx(said, abs=1e-12)


def test_without_noise_nothing_is_claimed(work: PrivateWork) -> None:
    claim, parts, epsilon = price(work, Release(NONPRIV_D, 0))
    assert epsilon == float("inf")
    assert parts == ()
    assert isinstance(claim, SubsampledGaussian)


def test_a_selection_has_pictures_of_the_chosen_semantics_only_and_the_class_that_chose_them(
    work: PrivateWork,
) -> None:
    rows, labels = selected(work, 0, 1)
    owner = dict[int, int]()
    for row, label in zip(rows, labels, strict=True):
        assert owner.setdefault(int(work.public_bins[row]), int(label)) == label
    assert len(owner) == 10
    assert sorted(owner.values()) == list(range(10))
    assert len(selected(work, 0, 2)[0]) == 2 * len(rows)
    assert np.array_equal(asked(work, 0), asked(work, 0))  # drawn once
    assert not np.array_equal(asked(work, 0), np.rint(asked(work, 0)))


@pytest.mark.usefixtures("unpriced")
def test_two_runs_with_the_same_seed_have_other_noise(small: Sources, tmp_path: Path) -> None:
    settings = privimage_sources.fitted(TINY, small)
    drawn = []
    for name in ("a", "b"):
        with opened(small, settings, tmp_path / name, lambda _: None) as work:
            drawn.append((asked(work, 0), released(work, Release(DPDM, 0, 1.0))[0]))
    assert not np.array_equal(drawn[0][0], drawn[1][0])
    assert not np.array_equal(drawn[0][1], drawn[1][1])


@pytest.mark.usefixtures("unpriced")
def test_cohort_and_test_part_share_nobody_and_a_patient_is_one_unit(small: Sources, tmp_path: Path) -> None:
    pairs = Sources(_part(small.sensitive, np.arange(150), np.arange(150) // 2), small.public)
    for per_picture in (False, True):
        settings = privimage_sources.fitted(replace(TINY, per_picture=per_picture), pairs)
        with opened(pairs, settings, tmp_path / str(per_picture), lambda _: None) as work:
            halves = work.halves(0)
            people = pairs.sensitive.owners
            assert not np.intersect1d(people[halves.cohort], people[halves.test]).size
            assert len(halves.cohort) + len(halves.test) == 150
            units = _units(work, 0)
            assert {len(unit) for unit in units} == ({1} if per_picture else {2})
            _, parts, _ = price(work, Release(PRIVIMAGE_G, 0, 1.0))
            assert {one.unit for one in parts} == {"image" if per_picture else "patient"}


def test_a_published_split_is_kept(small: Sources, tmp_path: Path) -> None:
    part = {"part": ("train",) * 100 + ("test",) * 50}
    split = Sources(replace(small.sensitive, attributes=part), small.public)
    with opened(split, privimage_sources.fitted(TINY, split), tmp_path, lambda _: None) as work:
        assert work.halves(0).test.tolist() == list(range(100, 150))


def test_a_public_set_with_a_sensitive_picture_is_refused(small: Sources, tmp_path: Path) -> None:
    images = small.public.images.copy()
    images[3] = small.sensitive.images[140]
    shared = Sources(small.sensitive, replace(small.public, images=images))
    with (
        pytest.raises(SharedImageError, match="1 of 372"),
        opened(shared, privimage_sources.fitted(TINY, shared), tmp_path, lambda _: None),
    ):
        pass


@pytest.mark.usefixtures("unpriced")
def test_an_interrupted_release_goes_on(small: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = privimage_sources.fitted(TINY, small)
    release = Release(PRIVIMAGE_D, 0, 1.0)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("deploy.reproduction.privimage_experiment.train_privately", killed)
        with opened(small, settings, tmp_path, lambda _: None) as work, pytest.raises(KeyboardInterrupt):
            released(work, release)
    told: list[str] = []
    with opened(small, settings, tmp_path, told.append) as work:
        images, labels = released(work, release)
    assert images.shape == (60, 8, 8)
    assert np.array_equal(np.bincount(labels), np.full(10, 6))
    assert not [line for line in told if line.startswith(("semantics", "histogram", "pre-trained"))]


def test_settings_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="below one in as many as there are patients"):
        replace(TINY, delta=0.01)
    with pytest.raises(ValueError, match="seeds, epsilons"):
        replace(TINY, seeds=())


@pytest.mark.parametrize("name", privimage_sources.PRESETS)
def test_every_preset_can_be_built_and_its_query_is_of_the_smallest_class(name: str) -> None:
    settings: PrivateSettings = privimage_sources.PRESETS[name]
    assert settings.diffusion.architecture.side == settings.adversarial.architecture.side
    assert settings.delta * settings.patients < 1.0
    assert isinstance(settings.query, SemanticQuery)


def test_the_command_needs_no_folder_for_digits(
    small: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(privimage_sources, "digits", lambda: small)
    monkeypatch.setattr(privimage_sources, "PRESETS", {**privimage_sources.PRESETS, "digits8": TINY})
    assert main(["privimage-fig6", "--out", str(tmp_path)]) == 0
    assert "privimage-fig6: before fine-tuning" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--layout", "cifar10"), "--layout digits needs none"),
        (("--public", "p"), "--public goes with --data"),
        (("--data", "d", "--layout", "cifar10"), "--public goes with --data"),
        (("--data", "d", "--layout", "digits"), "--layout digits needs none"),
        (("--preset", "cifar32"), "digits8 goes with digits alone"),
        (("--data", "d", "--public", "p", "--layout", "rafd"), "--preset for rafd: one of digits8, cifar32"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(
    more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["privimage-table2", "--out", str(tmp_path), *more]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
