"""Privacy Distillation's tables in small: that they run, are kept, and measure what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.evaluation.utility import Recipe
from agent.mechanisms.distillation.latent_model import LatentConfig
from agent.mechanisms.distillation.teacher_student import Sampling
from agent.models.diffusion.aligner import Aligner
from agent.models.diffusion.latent import LatentArchitecture
from agent.models.image_tensors import to_tensor
from agent.models.training_loop import torch_generator
from deploy.phantoms.chest import FINDINGS
from deploy.reproduction import distillation, distillation_sources
from deploy.reproduction.__main__ import main
from deploy.reproduction.distillation import (
    AUC,
    D_DISTILL,
    D_FILTERED,
    D_REAL,
    D_SYNTH,
    OWN,
    RE_ID,
    RELEASED,
    S_ALIGN,
    STRANGERS,
    TABLES,
)
from deploy.reproduction.distillation_experiment import (
    DistillSettings,
    DistillWork,
    Lengths,
    Radiographs,
    aligner,
    autoencoder,
    near_duplicates,
    opened,
    verifier,
)
from deploy.reproduction.distillation_models import (
    Made,
    Teacher,
    cohort_rows,
    distilled,
    drawn,
    planted,
    real,
    reference,
    shown,
)
from deploy.reproduction.mimic_cxr import Chests, parted
from deploy.reproduction.tables import Table, as_json, as_text
from tests.support import small_distillation as small
from tests.support.aligners import untrained
from tests.support.latents import tiny_autoencoder

TINY = DistillSettings(
    side=16,
    autoencoder="tiny16",
    model=LatentConfig(
        LatentArchitecture((2, 8, 8), (8, 8), 1, (False, True), 8, 4, 64, 16, 8), 0, batch=8, sampling_steps=4
    ),
    steps=Lengths(autoencoder=2, verifier=2, aligner=2, teacher=3, student=3, pretraining=3, canary=3),
    sampling=Sampling(candidates=2, groups=2),
    pictures=18,
    recipe=Recipe(epochs=1, side=16, width=4),
    people=(40, 40),
    shares=(0.1, 1.0),
    classifiers=1,
    seeds=(0, 1),
)


def chests(first: int, count: int = 80) -> Chests:
    """Two pictures of each person: who it is shows, and a digit 0 to 5 stands for none or a finding."""
    places = [place for place in range(first, first + 400) if small.TRUTH[place] < 6][: 2 * count]
    owners = np.arange(2 * count, dtype=np.int64) // 2
    pictures = [small.dressed(small.DIGITS[p], first + who) for p, who in zip(places, owners, strict=True)]
    shows = np.array([[small.TRUTH[p] == 1 + one for one in range(5)] for p in places])
    images = np.rint(np.stack(pictures) * 255).astype(np.uint8)
    return Chests(images, owners, shows, np.zeros(len(images), np.int64))


@pytest.fixture(scope="module")
def sources() -> Radiographs:
    cohorts = {seed: parted(chests(200 + 400 * seed), 0.5, np.random.default_rng(seed)) for seed in (0, 1)}
    return Radiographs(chests(1000), cohorts, "faint digits")


@contextmanager
def working(sources: Radiographs, settings: DistillSettings, folder: Path) -> Iterator[DistillWork]:
    """With networks that need no training."""
    told: list[str] = []
    with opened(sources, settings, folder, told.append) as work:
        judges = {
            "verifier": small.CoarseImages("filter", 8),
            "unseen": small.CoarseImages("unseen", 4),
            "autoencoder": tiny_autoencoder(),
            "aligner": untrained(settings.conditions),
        }
        for name, judge in judges.items():
            work.held(name, lambda judge=judge: judge)
        work.held("told", lambda: told)
        yield work


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def tables(sources: Radiographs, folder: Path) -> dict[str, Table]:
    with working(sources, TINY, folder) as work:
        found = {name: TABLES[name](work) for name in ("distillation-table2", "distillation-fig2")}
        work.settings = replace(TINY, seeds=(0,))  # one seed is enough to see them run
        found |= {name: TABLES[name](work) for name in ("distillation-table1", "distillation-fig3")}
    return found


@pytest.fixture
def work(sources: Radiographs, folder: Path, tables: dict[str, Table]) -> Iterator[DistillWork]:
    """Where all tables were made already."""
    with working(sources, TINY, folder) as found:
        yield found


def test_table_2_has_the_papers_rows_and_what_is_released(tables: dict[str, Table]) -> None:
    two = tables["distillation-table2"]
    assert two.rows == (D_REAL, STRANGERS, D_SYNTH, D_FILTERED, D_DISTILL, RELEASED)
    assert two.columns[:3] == (AUC, S_ALIGN, RE_ID)
    assert (D_REAL, RE_ID) not in two.cells, "the cohort is not compared with itself"
    assert (STRANGERS, AUC) not in two.cells, "and what is tested on teaches nothing"
    assert all(len(cell.values) == 2 for cell in two.cells.values())
    text = as_text(two)
    assert "40 patients learned, 40 to test on" in text
    assert "a verifier that filtered nothing" in text
    assert text.count("came out") + text.count("DID NOT COME OUT") == len(two.verdicts) == 6
    assert json.loads(as_json(two))["name"] == "distillation-table2"


def test_after_filtering_the_filters_own_verifier_finds_nobody_among_all_pairs(tables: dict[str, Table]) -> None:
    two = tables["distillation-table2"]
    for row in (D_FILTERED, RELEASED):
        assert two.of(row, OWN).values == (0.0, 0.0), row


def test_the_other_tables_have_their_rows(tables: dict[str, Table]) -> None:
    assert tables["distillation-table1"].rows == (
        *("from scratch, unconditional", "from scratch, conditional"),
        *("pre-trained, unconditional", "pre-trained, conditional"),
    )
    assert tables["distillation-fig3"].rows == ("10% of the patients", "100% of the patients")
    two = tables["distillation-fig2"]
    assert two.rows[0] == "δ = 0.05"
    assert two.rows[-2:] == ("calibrated", "its δ")
    for column in two.columns:
        rates = [two.of(row, column).mean for row in two.rows[:-2]]
        assert rates == sorted(rates, reverse=True), column


def test_figure_2_at_the_calibrated_threshold_is_table_2(tables: dict[str, Table]) -> None:
    two, figure = tables["distillation-table2"], tables["distillation-fig2"]
    for row in (STRANGERS, D_SYNTH, D_FILTERED, D_DISTILL):
        assert figure.of("calibrated", f"{row}, unseen").values == two.of(row, RE_ID).values
        assert figure.of("calibrated", f"{row}, own").values == two.of(row, OWN).values


def test_a_second_run_computes_nothing(sources: Radiographs, folder: Path, tables: dict[str, Table]) -> None:
    with working(sources, TINY, folder) as work:
        again = TABLES["distillation-table2"](work)
        assert work.held("told", list) == []
    assert again.cells == tables["distillation-table2"].cells


def test_other_settings_or_pictures_are_another_experiment(sources: Radiographs, tmp_path: Path) -> None:
    def digest(settings: DistillSettings, of: Radiographs) -> tuple[str, str]:
        return (found := DistillWork(of, settings, tmp_path, lambda _: None)).digest, found.public_digest

    base = digest(TINY, sources)
    assert digest(replace(TINY, device="cuda"), sources) == base
    longer = digest(replace(TINY, steps=replace(TINY.steps, teacher=4)), sources)
    assert (longer[0] != base[0], longer[1]) == (True, base[1]), "the public networks are the same"
    assert digest(TINY, replace(sources, public=chests(900)))[1] != base[1]
    assert digest(replace(TINY, model=replace(TINY.model, guidance=2.0)), sources)[0] != base[0]


def test_more_seeds_keep_what_there_is_and_another_cohort_does_not(sources: Radiographs, tmp_path: Path) -> None:
    def keyed(of: Radiographs, settings: DistillSettings) -> str:
        work = DistillWork(of, settings, tmp_path, lambda _: None)
        return work.digest + work.keyed("teacher", 0)

    base = keyed(sources, TINY)
    assert keyed(sources, replace(TINY, seeds=(0,))) == base
    assert keyed(replace(sources, cohorts={0: sources.cohorts[0]}), replace(TINY, seeds=(0,))) == base
    assert keyed(replace(sources, cohorts={0: sources.cohorts[1]}), replace(TINY, seeds=(0,))) != base


def test_public_networks_are_trained_once_on_the_public_part_alone(sources: Radiographs, tmp_path: Path) -> None:
    """They know nothing after two steps; what is asked is where they come from, and that they are kept."""
    few = replace(distillation_sources.CHEST32, side=16, public=210, people=(2, 2), visits=1, seeds=(0,))
    public = distillation_sources.phantoms(few).public
    settings = replace(TINY, steps=replace(TINY.steps, autoencoder=8))
    told: list[str] = []
    digests = []
    for _ in range(2):
        with opened(replace(sources, public=public), settings, tmp_path, told.append) as work:
            judges = (verifier(work), verifier(work, unseen=True))
            assert {judge.origin.provenance for judge in judges} == {"public"}
            assert aligner(work).conditions.names == settings.conditions.names
            digests.append([judge.origin.sha256 for judge in (*judges, autoencoder(work), aligner(work))])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4, "the unseen verifier is another network"
    assert told == ["public verifier", "public autoencoder", "public unseen", "public aligner"]


def test_near_duplicates_went_through_the_autoencoder_and_differ_by_noise() -> None:
    images = to_tensor(np.stack([small.dressed(small.DIGITS[n], n) for n in range(12)]))
    make = near_duplicates(tiny_autoencoder())
    first, again, other = (make(images, torch_generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first.shape, float(first.abs().max()) <= 1.0) == (images.shape, True)
    through = tiny_autoencoder().decode(tiny_autoencoder().encode(images)).clamp(-1, 1)
    exact = (first - through).abs().flatten(1).amax(dim=1) < 1e-5
    assert 0 < int(exact.sum()) < 12, "some without noise, some with"


def test_nobody_to_test_on_was_learned(work: DistillWork, sources: Radiographs) -> None:
    for seed in TINY.seeds:
        rows = cohort_rows(work, seed)
        owners = sources.cohorts[seed].owners
        assert not set(owners[rows]) & set(real(work, seed, test=True).owners)
        assert len(reference(work, seed)) == len(rows), "the reference is all that is learned"


def test_a_share_of_the_patients_is_whole_patients(work: DistillWork) -> None:
    """A teacher of a tenth is another model, measured against everybody all the same."""
    few, all_of_them = (drawn(work, Teacher(0, share=share)) for share in (0.1, 1.0))
    assert not np.array_equal(few.images, all_of_them.images)
    assert np.array_equal(few.labels, all_of_them.labels)


def test_an_unconditional_teacher_is_asked_for_nothing(work: DistillWork) -> None:
    assert set(drawn(work, Teacher(0, conditional=False)).labels.tolist()) == {-1}
    assert set(drawn(work, Teacher(0)).labels.tolist()) == set(range(6))


def test_d_distill_is_not_yet_vetted_and_the_student_saw_only_what_was_kept(work: DistillWork) -> None:
    learned, made = distilled(work, 0)
    assert len(made.images) == TINY.pictures, "all of the student's pictures"
    assert len(learned.images) <= 6 * TINY.sampling.groups
    released = distillation._row(work, 0, RELEASED)
    assert len(released.images) <= len(made.images)
    assert {picture.tobytes() for picture in released.images} <= {picture.tobytes() for picture in made.images}


def test_a_copy_of_a_patient_is_re_identified_and_strangers_are_not(work: DistillWork) -> None:
    known = real(work, 0).images[:10]
    told = distillation.re_identified(work, reference(work, 0), known)
    assert told == {RE_ID: 1.0, OWN: 1.0}
    strangers = distillation._row(work, 0, STRANGERS).images
    assert distillation.re_identified(work, reference(work, 0), strangers)[RE_ID] < 0.2


def test_a_number_that_is_none_counts_as_re_identified(work: DistillWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "scores", lambda *_: np.array([np.nan, -100.0]))
    assert distillation.re_identified(work, reference(work, 0), np.zeros((2, 16, 16), np.uint8))[RE_ID] == 0.5


def test_findings_of_a_condition_are_the_classifiers_truth(work: DistillWork) -> None:
    told = shown(work, np.arange(6))
    assert told.sum(axis=1).tolist() == [0, 1, 1, 1, 1, 1]
    names = work.conditions.names
    assert [FINDINGS[int(row.argmax())] for row in told[1:]] == list(names[1:])


def test_a_classifier_that_learned_the_test_pictures_beats_one_that_learned_noise(work: DistillWork) -> None:
    """That the AUC is of the real test part, and of what was learned."""
    test = real(work, 0, test=True)
    noise = np.random.default_rng(0).integers(0, 255, test.images.shape, np.uint8)
    slow = replace(TINY, recipe=Recipe(epochs=25, side=16, width=8))
    work.settings = slow
    cheat = distillation.utility(work, 0, test.images, test.findings)
    assert cheat > distillation.utility(work, 0, noise, test.findings) + 0.1
    same = np.zeros((4, 5), np.bool_)
    assert distillation.utility(work, 0, test.images[:4], same) == 0.5


def test_a_planted_stranger_is_asked_for_in_the_teachers_pictures(work: DistillWork) -> None:
    stranger = planted(work, 0)
    with_it = reference(work, 0, stranger)
    assert len(with_it) == len(reference(work, 0)) + 1
    found, told = distillation.caught(work, 0, times=20)
    assert told["pictures"] == TINY.pictures
    assert found.drawn.value == told["drawn"]


def test_an_aligner_that_is_not_there_yet_can_be_trained_when_it_is_first_asked(
    work: DistillWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for without gradients, its training would fail."""
    asked: list[bool] = []

    def first(of: DistillWork) -> Aligner:
        asked.append(torch.is_grad_enabled())
        return aligner(of)

    monkeypatch.setattr(distillation, "aligner", first)
    distillation.aligned(work, Made(chests(200).images[:4], np.zeros(4, np.int64)))
    assert asked == [True]


def test_alignment_is_of_the_condition_that_was_asked_for(work: DistillWork) -> None:
    made = drawn(work, Teacher(0))
    other = Made(made.images, (made.labels + 1) % 6)
    assert distillation.aligned(work, made) != distillation.aligned(work, other)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seeds": ()}, "seeds"),
        ({"pictures": 0}, "images"),
        ({"shares": (0.5, 0.1, 1.0)}, "rise"),
        ({"shares": (0.1, 0.5)}, "rise"),
        ({"shares": (0.0, 1.0)}, "rise"),
    ],
)
def test_what_is_no_experiment_cannot_be_built(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(TINY, **change)  # type: ignore[arg-type]


def test_a_seed_without_a_cohort_is_refused(sources: Radiographs, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="every seed has a cohort"),
        opened(sources, replace(TINY, seeds=(7,)), tmp_path, lambda _: None),
    ):
        pass


def test_made_up_cohorts_share_nobody_with_the_public_part() -> None:
    few = replace(distillation_sources.CHEST32, public=8, people=(4, 3), visits=2, seeds=(0, 1))
    found = distillation_sources.phantoms(few)
    public = {picture.tobytes() for picture in found.public.images}
    assert len(found.public) == 16
    for seed in (0, 1):
        cohort = found.cohorts[seed]
        assert (len(np.unique(cohort.owners[cohort.rows("train")])), len(cohort)) == (4, 14)
        assert not public & {picture.tobytes() for picture in cohort.images}
    assert not np.array_equal(found.cohorts[0].images, found.cohorts[1].images)


def test_of_a_folder_the_public_part_is_a_third_of_the_patients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation_sources, "mimic_cxr", lambda *_: chests(200, 90))
    found = distillation_sources.folder(Path(), replace(TINY, moved=0.5), None)
    public = set(found.public.owners.tolist())
    assert len(public) == 30
    for cohort in found.cohorts.values():
        assert not public & set(cohort.owners.tolist())
        both = set(cohort.owners[cohort.rows("train")]) & set(cohort.owners[cohort.rows("test")])
        assert both, "half of the pictures of some of those to test on are learned (section 4.1)"


def test_every_preset_fits_together() -> None:
    for name, preset in distillation_sources.PRESETS.items():
        assert preset.sampling.groups * preset.sampling.candidates * preset.conditions.count <= 1_000_000, name


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--layout", "mimic-cxr"), "--layout phantoms needs none"),
        (("--data", "d", "--layout", "phantoms"), "--layout phantoms needs none"),
        (("--data", "d", "--layout", "cifar10"), "--layout phantoms needs none"),
        (("--public", "p"), "--public is for privimage only"),
        (("--preset", "digits8"), "--preset is one of: chest32, chest64, mimic512"),
    ],
)
def test_what_does_not_go_together_is_a_sentence(
    more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["distillation-table2", "--out", str(tmp_path), *more]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_these_layouts_are_for_these_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for experiment in ("ksalsa-table1", "privimage-table2"):
        more = ("--data", str(tmp_path), "--public", str(tmp_path)) if experiment.startswith("p") else ("--data", "d")
        assert main([experiment, "--out", str(tmp_path), "--layout", "mimic-cxr", *more]) == 1
        assert "is for other tables" in " ".join(capsys.readouterr().err.split())


def test_the_command_prints_the_table(
    sources: Radiographs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = Table("distillation-fig3", "R_re-id", (), (), {})
    asked: list[object] = []

    def run(*told: object) -> Table:
        asked.extend(told)
        return empty

    monkeypatch.setattr(distillation_sources, "phantoms", lambda _: sources)
    monkeypatch.setattr(distillation, "run", run)
    assert main(["distillation-fig3", "--out", str(tmp_path / "o")]) == 0
    assert "distillation-fig3: R_re-id" in capsys.readouterr().out
    assert asked[0] == "distillation-fig3"
    assert asked[1] is sources
    assert asked[2] == distillation_sources.CHEST32
