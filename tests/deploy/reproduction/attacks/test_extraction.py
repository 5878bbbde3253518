"""Extraction, thresholds and planted patients of a distillation: samplers that copy, and samplers that do not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from scipy.spatial.distance import cdist

from agent.domain import Image, Patient
from agent.models.diffusion.prompts import Conditions, UnknownWordError
from agent.vetting.filter import vet
from agent.vetting.reference import Reference, reference_of
from deploy.reproduction.attacks.extraction import DELTAS, by_threshold, extraction, planted_caught
from tests.support import small_distillation as small

DICE = np.random.default_rng(3)


def scenes(count: int, seed: int) -> np.ndarray:
    """(n, 16, 16) uint8: smooth pictures of nobody in common."""
    noise = np.random.default_rng(seed).normal(size=(count, 16, 16))
    smooth = np.stack([gaussian_filter(one, 1.5) for one in noise])
    return np.clip(128 + 40 * smooth / smooth.std(), 0, 255).astype(np.uint8)


def near(images: np.ndarray, noise: float = 4.0) -> np.ndarray:
    """As a generator would give them back: a little blurred, a little noisy."""
    blurred = np.stack([gaussian_filter(one.astype(np.float64), 0.4) for one in images])
    return np.clip(blurred + DICE.normal(0, noise, images.shape), 0, 255).astype(np.uint8)


def test_extraction_finds_planted_copies_and_no_strangers() -> None:
    known = scenes(120, 0)
    found = extraction(np.concatenate([near(known[:10]), scenes(30, 1)]), known)
    assert found.extracted.tolist() == [True] * 10 + [False] * 30
    assert found.nearest[:10].tolist() == list(range(10))
    assert found.figure.value == 0.25


def test_extraction_is_carlinis_criterion_word_by_word() -> None:
    """A second implementation, one distance at a time: l_2(x, x_1) <= alpha mean_i l_2(x, x_i)."""
    known, made = scenes(70, 2), np.concatenate([near(scenes(70, 2)[:6], 30.0), scenes(6, 3)])
    told = []
    for one in made:
        far = sorted(float(np.sqrt(((one / 255.0 - other / 255.0) ** 2).sum())) for other in known)
        told.append(far[0] / (0.5 * np.mean(far[1:51])))
    found = extraction(made, known)
    assert found.closeness == pytest.approx(told)
    assert found.nearest.tolist() == cdist(made.reshape(12, -1), known.reshape(70, -1)).argmin(axis=1).tolist()


def test_a_set_of_equal_pictures_does_not_divide_by_zero() -> None:
    same = np.repeat(scenes(1, 4), 5, axis=0)
    assert not extraction(scenes(2, 5), same).extracted.any(), "as near to all: nearer to none"
    assert extraction(same[:1], same).extracted.all(), "a copy is a copy, however many there are"


@pytest.mark.parametrize(
    ("samples", "known"),
    [(scenes(2, 0)[:0], scenes(9, 0)), (scenes(2, 0), scenes(2, 0)), (scenes(2, 0)[:, :8], scenes(9, 0))],
)
def test_nothing_to_compare_is_no_result(samples: np.ndarray, known: np.ndarray) -> None:
    with pytest.raises(ValueError, match="samples and three training images"):
        extraction(samples, known)
    with pytest.raises(ValueError, match="alpha between 0 and 1"):
        extraction(scenes(2, 0), scenes(9, 0), alpha=1.0)


def test_more_are_re_identified_the_lower_the_threshold() -> None:
    rates = [one.value for one in by_threshold(np.random.default_rng(0).normal(0, 3, 400))]
    assert len(rates) == len(DELTAS)
    assert all(a >= b for a, b in pairwise(rates)), rates
    assert rates[0] > rates[-1]


def test_a_score_that_is_no_number_counts_as_re_identified() -> None:
    scores = np.array([np.nan, np.nan, -9.0, -9.0])
    assert [one.value for one in by_threshold(scores, (0.05, 0.95))] == [0.5, 0.5]
    assert by_threshold(np.array([np.inf, -np.inf]), (0.5,))[0].value == 0.5


# -- a patient whom the teacher knows by heart


def people(count: int = 30) -> list[Patient]:
    return [
        Patient(
            f"p{who:03d}",
            (
                Image(
                    small.dressed(small.DIGITS[who], who),
                    str(small.TRUTH[who]),
                ),
            ),
        )
        for who in range(count)
    ]


def stranger() -> Patient:
    digit, label = small.DIGITS[400], str(small.TRUTH[400])
    return Patient("canary", tuple(Image(small.dressed(digit, who), label) for who in (900, 901)))


def pixels(patients: list[Patient]) -> np.ndarray:
    return np.stack([np.rint(image.pixels * 255).astype(np.uint8) for one in patients for image in one.images])


def gallery(patients: list[Patient]) -> Reference:
    return reference_of(patients, small.course().vetting)


def made_by_a_teacher(planted: Patient, copies: int) -> np.ndarray:
    """What a teacher draws that knows the planted picture by heart: near copies of it, and pictures of nobody."""
    own = pixels([planted])[:1]
    copied = near(own.repeat(copies, 0)) if copies else own[:0]
    others = pixels([Patient("x", (Image(small.dressed(small.DIGITS[500 + n], 500 + n), ""),)) for n in range(20)])
    return np.concatenate([copied, others])


def test_what_shows_a_planted_patient_is_found_and_dropped() -> None:
    planted, cohort = stranger(), people()
    made = made_by_a_teacher(planted, 12)
    of = gallery([*cohort, planted])
    kept = vet(made, of, small.course().vetting).kept
    found = planted_caught(made, kept, pixels([planted])[0], pixels(cohort))
    assert found.drawn.value == 12 / 32
    assert found.caught is not None
    assert found.caught.value == 1.0
    assert kept[12:].mean() >= 0.8, "a vetting that drops everything would catch it too"


def test_a_vetting_that_does_not_hold_the_planted_patient_is_seen_to_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question, broken on purpose: without the patient in the reference, nothing is dropped."""
    planted, cohort = stranger(), people()
    made = made_by_a_teacher(planted, 12)
    kept = vet(made, gallery(cohort), small.course().vetting).kept
    found = planted_caught(made, kept, pixels([planted])[0], pixels(cohort))
    assert found.caught is not None
    assert found.caught.value < 0.2


def test_a_teacher_that_never_draws_the_planted_patient_gives_no_figure() -> None:
    planted, cohort = stranger(), people()
    made = made_by_a_teacher(planted, 0)
    found = planted_caught(made, np.ones(len(made), np.bool_), pixels([planted])[0], pixels(cohort))
    assert found.drawn.value == 0.0
    assert found.caught is None, "not 1: nothing was there to be caught"


# -- a prompt canary


def test_no_word_of_a_report_can_be_asked_for() -> None:
    """What the paper's prompts memorise (a name, a date, the marks of de-identification) has no token here."""
    conditions = Conditions(("effusion", "none"))
    vocabulary = conditions.vocabulary
    for said in ("effusion in ___ as of ___", "mrs xylophone with effusion", "effusion 12-03-2019"):
        with pytest.raises(UnknownWordError) as told:
            vocabulary.tokens([said], conditions.length)
        assert not {"xylophone", "___", "12-03-2019"} & set(str(told.value).split()), "nor is it repeated"
    with pytest.raises(ValueError, match="32 characters"):
        Conditions(("effusion", "Xylophone, 12 March, seen by Dr. Zebra: no change since the last radiograph"))
