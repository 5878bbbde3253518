import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from agent.errors import DivergedError
from agent.evaluation.utility import Recipe
from deploy.phantoms.chest import FINDINGS, chest_patients, stacked
from deploy.reproduction.measures.chest_findings import area, auc, train_findings

QUICK = Recipe(epochs=8, side=32, width=8)


def chests(count, seed, visits=1):
    images, owners, findings = stacked(chest_patients(count, np.random.default_rng(seed), 32, visits))
    return images, findings, owners


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
def test_the_area_is_scikit_learns(rows):
    scores, shown = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows])
    if shown.all() or not shown.any():
        assert math.isnan(area(scores, shown))
    else:
        assert area(scores, shown) == pytest.approx(roc_auc_score(shown, scores))


def test_findings_learned_from_some_patients_are_told_of_others_and_shuffled_ones_are_not():
    images, findings, _ = chests(300, 0)
    held = chests(60, 1, visits=2)
    state = torch.get_rng_state()
    learned = train_findings(images, findings, QUICK, 0)
    assert torch.equal(state, torch.get_rng_state())
    figures = auc(learned, *held, np.random.default_rng(0), FINDINGS)
    assert [f.name for f in figures] == ["mean AUC", *(f"AUC of {name}" for name in FINDINGS)]
    mean = figures[0]
    assert mean.interval.low <= mean.value <= mean.interval.high
    assert mean.interval.low > 0.6
    assert (mean.chance, mean.trials) == (0.5, 60)  # patients, not pictures
    assert mean.value == pytest.approx(roc_auc_score(held[1], learned(held[0]), average="macro"))
    shuffled = np.random.default_rng(0).permutation(findings)
    nothing = auc(train_findings(images, shuffled, QUICK, 0), *held, np.random.default_rng(0), FINDINGS)
    assert nothing[0].value < 0.62 < mean.value
    both = auc([learned, learned], *held, np.random.default_rng(0), FINDINGS)
    assert both == figures


def test_the_same_seed_gives_the_same_predictor_whatever_the_batch_it_is_asked():
    images, findings, _ = chests(40, 0)
    few = Recipe(epochs=1, side=16, width=4)
    first, again, other = (train_findings(images, findings, few, seed)(images) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)
    many = np.concatenate([images] * 7)
    assert np.allclose(train_findings(images, findings, few, 3)(many), np.concatenate([first] * 7), atol=1e-5)


def test_a_patients_pictures_are_drawn_together():
    rng = np.random.default_rng(0)
    images, shown = rng.random((8, 16, 16), np.float32), np.array([[True], [False]] * 4)

    def known(pictures):
        del pictures
        return np.array([[1.0], [0.0], [1.0], [0.0], [0.0], [1.0], [0.0], [1.0]])

    narrow = auc(known, images, shown, np.zeros(8, np.int64), rng)[0]
    wide = auc(known, images, shown, np.arange(8) // 4, rng)[0]
    assert narrow.value == wide.value == 0.5
    assert (narrow.interval.low, narrow.interval.high) == (0.5, 0.5)
    assert (wide.interval.low, wide.interval.high) == (0.0, 1.0)


def test_what_cannot_be_told_is_refused():
    images, findings, owners = chests(30, 0)
    for wrong in (
        (images[:0], findings[:0]), (images.astype(float), findings), (images, findings[:-1]), (images, owners),
        (images, findings.astype(int)), (images, findings[:, :0]), (images * np.float32("nan"), findings),
        (images, np.ones_like(findings)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"images|findings"):
            train_findings(*wrong, QUICK, 0)
    rng = np.random.default_rng(0)

    def zeros(pictures):
        return np.zeros((len(pictures), 5))

    never = findings.copy()
    never[:, 2] = False
    with pytest.raises(ValueError, match="all or none"):
        auc(zeros, images, never, owners, rng)
    for wrong in ((zeros, images, findings, owners[1:]), ([], images, findings, owners)):
        with pytest.raises(ValueError, match="one owner"):
            auc(*wrong, rng)
    with pytest.raises(ValueError, match="other findings"):
        auc(zeros, images, findings[:, :2], owners, rng)
    steep = train_findings(images, findings, Recipe(epochs=2, rate=1e30, side=16, width=4), 0)
    with pytest.raises(DivergedError):
        steep(images)
