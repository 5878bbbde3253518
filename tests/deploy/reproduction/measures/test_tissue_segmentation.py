"""The segmenter: against the truth of made heads, against itself, and that de-facing can upset it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.defacing.brain_extraction import Atlas
from agent.defacing.removal_methods import METHODS
from agent.domain import Volume
from deploy.reproduction.measures import tissue_segmentation
from deploy.reproduction.measures.tissue_segmentation import (
    CSF,
    GM,
    PARTS,
    WM,
    Tissues,
    by_skull,
    classified,
    compared,
    dice,
    segment,
)
from tests.support import heads

RNG = np.random.default_rng(0)
EDGES = np.full(3, 4.0)


@cache
def template() -> Atlas:
    """The real head's brain, which lies in the template's space: what the true registration of a phantom leads to."""
    volume, brain = heads.real_head(2)
    return Atlas(np.where(brain, volume.values, 0), brain, volume.affine)


def truly(_: Volume, __: Atlas) -> NDArray[np.float64]:
    """The place that the phantom knows of itself, in the place of niimath, which takes seconds."""
    return heads.scan(0).to_template


@cache
def defaced(method: str) -> Volume:
    head = heads.true_head(0)
    made = METHODS[method](head, RNG).onto(head.volume, head.brain.mask, RNG)
    return Volume(made.values, head.volume.affine)


def labels_of(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    return classified(values, heads.scan(0).brain, EDGES)


def test_made_heads_are_segmented_as_they_are() -> None:
    scan = heads.scan(0, 0, 2.0)
    found = classified(scan.volume.values, scan.brain, np.full(3, 2.0))
    scores = [dice(found == label, scan.tissues == label) for label in (CSF, GM, WM)]
    assert (np.array(scores) > (0.70, 0.72, 0.82)).all(), scores
    for label in (CSF, GM, WM):
        assert np.count_nonzero(found == label) == pytest.approx(np.count_nonzero(scan.tissues == label), rel=0.35)
    assert (found[~scan.brain] == 0).all()
    assert (found[scan.brain] > 0).all()


def test_a_segmentation_that_is_off_by_two_voxels_is_not_that_good() -> None:
    scan = heads.scan(0, 0, 2.0)
    moved = np.roll(scan.tissues, 2, axis=0)
    assert max(dice(moved == label, scan.tissues == label) for label in (CSF, GM, WM)) < 0.72


def test_the_same_image_gives_the_same_labels_and_its_unit_does_not_matter() -> None:
    values = heads.scan(0).volume.values
    once = labels_of(values)
    assert (once == labels_of(values.copy())).all()
    assert (once == labels_of(values.astype(np.float64) * 0.25)).mean() > 0.9999
    assert (once == labels_of(values.astype(np.uint16) * 4)).mean() > 0.9999


def test_a_bias_field_changes_little_and_would_change_much_without_the_correction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = heads.scan(0).volume.values.astype(np.float32)
    slope = np.linspace(0.75, 1.25, values.shape[1], dtype=np.float32)[None, :, None]
    inside = heads.scan(0).brain
    once = labels_of(values)
    corrected = float((once == labels_of(values * slope))[inside].mean())
    monkeypatch.setattr(tissue_segmentation, "STIFF", 1e9)  # a field that may not bend
    bare = float((labels_of(values) == labels_of(values * slope))[inside].mean())
    assert corrected > 0.93
    assert bare < corrected - 0.1


def test_a_little_noise_decides_little() -> None:
    values = heads.scan(0).volume.values.astype(np.float32)
    noise = np.random.default_rng(1).normal(0, 0.005 * float(values.max()), values.shape).astype(np.float32)
    one, other = labels_of(values), labels_of(values + noise)
    assert min(dice(one == label, other == label) for label in (CSF, GM, WM)) > 0.93


def test_no_brain_no_labels_and_a_constant_brain_does_not_break_it() -> None:
    brain = np.zeros((20, 20, 20), bool)
    values = np.full(brain.shape, 7, np.int16)
    assert not classified(values, brain, EDGES).any()
    brain[5:15, 5:15, 5:15] = True
    assert (classified(values, brain, EDGES) > 0).sum() == brain.sum()


def test_dice_is_that_of_the_paper() -> None:
    a, b = np.zeros((4, 4, 4), bool), np.zeros((4, 4, 4), bool)
    assert dice(a, b) == 1.0
    a[0], b[:2] = True, True
    assert dice(a, b) == pytest.approx(2 * 16 / (16 + 32))
    with pytest.raises(ValueError, match="one grid"):
        dice(a, b[:3])


def test_parts_and_volumes() -> None:
    labels = np.array([[[0, 1, 2, 3, 3]]], np.uint8)
    inside = np.array([[[False, True, False, False, False]]])
    found = Tissues(labels, labels > 0, inside, 0.5)
    assert found.volumes == {"gm": 0.5, "wm": 1.0, "csf": 0.5, "vcsf": 0.5, "brain": 1.5}
    assert compared(found, found) == dict.fromkeys(PARTS, 1.0)
    other = replace(found, labels=np.array([[[0, 1, 3, 3, 3]]], np.uint8))
    assert compared(found, other)["gm"] == 0.0
    assert compared(found, other)["brain"] == 1.0


def size(volume: Volume) -> float:
    return float(np.linalg.det(by_skull(volume, template(), truly(volume, template()))[:3, :3]) ** (1 / 3))


def test_the_size_of_the_head_is_read_from_its_vault() -> None:
    whole = heads.scan(0).volume
    true = float(np.linalg.det(heads.scan(0).to_template[:3, :3]) ** (1 / 3))
    assert size(whole) == pytest.approx(true, rel=0.05)
    for method in ("quickshear", "facemask", "deface"):
        assert size(defaced(method)) == pytest.approx(size(whole), rel=0.01)
    assert size(defaced("strip")) > 1.1 * size(whole)  # a smaller head, as it seems


def test_a_larger_head_is_larger() -> None:
    whole = heads.scan(0).volume
    grown = Volume(whole.values, np.diag([1.1, 1.1, 1.1, 1.0]) @ whole.affine)
    assert size(whole) / size(grown) == pytest.approx(1.1, rel=0.05)  # the same registration was told


def test_a_face_taken_off_changes_little_and_a_skull_much() -> None:
    once = segment(heads.scan(0).volume, template(), truly)
    assert 0.9 < dice(once.brain, heads.scan(0).brain) <= 1.0
    assert 5.0 < once.volumes["vcsf"] < 120.0
    less = compared(once, segment(defaced("deface"), template(), truly))
    assert min(less[name] for name in ("gm", "wm", "vcsf", "brain")) > 0.95, less  # at 2 mm it is 0.99
    bare = compared(once, segment(defaced("strip"), template(), truly))
    assert max(bare[name] for name in ("gm", "wm", "brain")) < 0.9, bare
