"""A look at a set: counted before a patient is read, at nobody who was trained on, for the site alone."""

from __future__ import annotations

import base64
import html
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent.domain import Cohort, Image, Patient, Selection, Split, SyntheticSet
from agent.evaluation.released_set import Effort, Evaluation, SemanticsQuery, Subject, TooFewPatientsError, evaluate
from agent.evaluation.utility import Recipe
from agent.release.held_out_evaluation import NotHeldOutError, held_out, look, looks_at, subject_of
from agent.reports.evaluation import WARNING, render
from tests.support.site_world import MemoryVault, site_world
from tests.support.small_privimage import public as publics
from tests.support.small_privimage import semantics, tiny

CLASSES = ("dark", "bright", "striped")
SPLIT = Split("study", {"release": 4, "held-out": 1})
RELEASED = Selection("OT", (8, 8), split=SPLIT, part="release")
QUICK = Effort(Recipe(epochs=12, side=8, width=4), (0, 1), 20)


def pictures(labels: list[str], seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    dice = np.random.default_rng(seed)
    bases = {"dark": np.full((8, 8), 40), "bright": np.full((8, 8), 180), "striped": np.tile([30, 190], (8, 4))}
    return np.stack([bases[label] + dice.integers(0, 50, (8, 8)) for label in labels]).astype(np.uint8)


@cache
def released(seed: int = 1, count: int = 60, shuffled: bool = False) -> SyntheticSet:
    labels = [CLASSES[i % 3] for i in range(count)]
    shown = pictures(labels, seed)
    if shuffled:  # pictures that have nothing to do with their labels
        shown = shown[np.random.default_rng(0).permutation(count)]
    return SyntheticSet(shown, tuple(labels))


@cache
def people(count: int = 30, seed: int = 2, each: int = 2) -> Cohort:
    labels = [CLASSES[i % 3] for i in range(count)]
    shots = [pictures(labels, seed + n).astype(np.float32) / np.float32(255) for n in range(each)]
    own = [tuple(Image(shot[i], labels[i]) for shot in shots) for i in range(count)]
    return Cohort(tuple(Patient(f"secretname{i:03d}", images) for i, images in enumerate(own)))


def judged(
    made: SyntheticSet | None = None, cohort: Cohort | None = None, asked: SemanticsQuery | None = None
) -> Evaluation:
    subject = Subject(made or released(), CLASSES, CLASSES, asked)
    return evaluate(subject, cohort or people(), np.random.default_rng(0), effort=QUICK)


@cache
def whole() -> Evaluation:
    """With everything there is to measure."""
    mechanism = tiny()
    return judged(asked=SemanticsQuery(semantics(), publics(), mechanism.public.bins, mechanism.query))


# -- figures


@pytest.mark.slow
def test_a_set_that_shows_its_labels_teaches_them_and_one_that_does_not_is_near_chance() -> None:
    good, bad = whole(), judged(released(shuffled=True))
    assert isinstance(good.taught, tuple)
    assert isinstance(bad.taught, tuple)
    assert [one.name for one in good.taught] == ["LR", "MLP", "CNN"]
    assert [one.seeds for one in good.taught] == [1, 2, 2]
    assert min(one.accuracy.value for one in good.taught) > 0.9
    assert max(one.accuracy.value for one in bad.taught) < 0.75
    assert good.taught[0].accuracy.chance == pytest.approx(1 / 3), "the commonest label for everybody"
    assert [recall.name for recall in good.taught[0].recalls] == list(CLASSES)


def test_an_accuracy_of_one_is_not_certain() -> None:
    """A bootstrap of answers that are all right has no width; Wilson's interval of so many patients has."""
    found = whole().taught
    assert isinstance(found, tuple)
    perfect = [one.accuracy for one in found if one.accuracy.value == 1.0]
    assert perfect
    for figure in perfect:
        assert 0.85 < figure.interval.low < 0.9, "30 / (30 + 1.96^2)"
        assert figure.trials == 30, "patients, and not their 60 pictures"


def test_the_distance_names_its_network_and_stands_beside_other_held_out_patients() -> None:
    near, far = whole().fidelity, judged(SyntheticSet(255 - released().images, released().labels)).fidelity
    assert not isinstance(near, str)
    assert not isinstance(far, str)
    assert near.extractor.startswith("random-1x16x3")
    assert near.origin.provenance == "random"
    first, other = near.figures[0], near.baseline[0]
    assert first.name == "Fréchet distance"
    assert first.interval.low <= first.value <= first.interval.high
    assert first.chance == other.value, "held-out halves against each other"
    assert far.figures[0].value > 2 * first.value


@pytest.mark.slow
def test_semantics_are_those_of_the_set_of_all_public_pictures_and_of_a_selection_without_noise() -> None:
    found = whole().semantics
    assert isinstance(found, tuple)
    names = ["the patients themselves", "the set", "all public images"]
    assert [one.name for one in found] == [*names, "those that a histogram without noise would select"]
    assert found[0].value > 0
    assert judged().semantics == "the configuration has no semantics"


def test_the_same_dice_give_the_same_figures() -> None:
    mechanism = tiny()
    again = judged(asked=SemanticsQuery(semantics(), publics(), mechanism.public.bins, mechanism.query))
    assert (again.taught, again.semantics) == (whole().taught, whole().semantics)
    assert again.fidelity.figures == whole().fidelity.figures  # type: ignore[union-attr]


def test_what_cannot_be_measured_is_said_and_the_rest_is_measured() -> None:
    one = SyntheticSet(released().images, ("any",) * 60)
    pooled = evaluate(Subject(one, ("any",), CLASSES), people(), np.random.default_rng(0), effort=QUICK)
    assert pooled.taught == "all images of the set are of one class: there is nothing to learn"
    assert not isinstance(pooled.fidelity, str)
    few = SyntheticSet(released().images[:9], released().labels[:9])
    assert judged(few).fidelity == "the set has too few images for a Fréchet distance"
    same = SyntheticSet(released().images, ("dark",) * 60)
    assert "of one class" in str(judged(same).taught)


def test_fewer_than_twenty_patients_are_no_measure_and_the_text_counts_nobody() -> None:
    with pytest.raises(TooFewPatientsError) as caught:
        judged(cohort=people(19, each=5))
    assert not any(character.isdigit() for character in str(caught.value))
    unknown = Cohort(tuple(Patient(p.pseudonym, (Image(p.images[0].pixels, "other"),)) for p in people().patients))
    with pytest.raises(TooFewPatientsError):
        judged(cohort=unknown)


def test_a_set_of_another_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="labels that the configuration does not draw"):
        Subject(released(), ("dark", "bright"), ("dark", "bright"))
    with pytest.raises(ValueError, match="no images"):
        Subject(SyntheticSet(np.zeros((0, 8, 8), np.uint8), ()), CLASSES, CLASSES)
    with pytest.raises(ValueError, match="size"):
        subject_of(tiny(), SyntheticSet(np.zeros((3, 9, 9), np.uint8), ("any",) * 3))
    made = SyntheticSet(np.zeros((3, 8, 8), np.uint8), ("any",) * 3)
    assert subject_of(tiny(), made).asked is not None
    assert (subject_of(tiny(), made).classes, subject_of(tiny(), made).labels) == (("any",), ("0", "1", "2"))


# -- who is looked at, and when it is said


def test_only_patients_of_another_part_of_the_split_are_looked_at() -> None:
    assert held_out(RELEASED, "held-out") == replace(RELEASED, part="held-out")
    for selection, part in ((Selection("OT", (8, 8)), "held-out"), (RELEASED, "release")):
        with pytest.raises(NotHeldOutError, match="evaluating on training patients would select a model by them"):
            held_out(selection, part)
    with pytest.raises(NotHeldOutError, match=r"no such part; the configuration's split has held-out, release"):
        held_out(RELEASED, "test")


def test_a_look_is_counted_before_a_patient_is_read_and_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, seen = site_world(tmp_path), list[int]()

    def read(self: MemoryVault, *_asked: Any, **_more: Any) -> Cohort:
        seen.append(looks_at(s.site, "OT"))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return people()

    monkeypatch.setattr(MemoryVault, "cohort", read)
    subject, where, dice = (
        Subject(released(), CLASSES, CLASSES),
        held_out(RELEASED, "held-out"),
        np.random.default_rng,
    )
    found, looks = look(s.site, subject, where, dice(0), QUICK)
    assert (looks, found.patients) == (1, 30)
    with pytest.raises(KeyboardInterrupt):
        look(s.site, subject, where, dice(0), QUICK)
    assert seen == [1, 2]
    assert looks_at(s.site, "OT") == 2, "that it came to nothing makes it no less a look"
    assert looks_at(s.site, "CT") == 0


def test_nothing_is_priced_or_sent_and_no_global_generator_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path)
    monkeypatch.setattr(MemoryVault, "cohort", lambda *_a, **_m: people())
    ledger = (s.site.ledger.store, s.intake.register.store)
    size, before = [book.state.size for book in ledger], torch.get_rng_state()
    legacy = np.random.get_state()[1].copy()  # type: ignore[index]
    look(
        s.site, Subject(released(), CLASSES, CLASSES), held_out(RELEASED, "held-out"), np.random.default_rng(0), QUICK
    )
    assert [book.state.size for book in ledger] == size
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], legacy)  # type: ignore[index]


# -- the page


def drawings(page: bytes) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(rb"base64,([A-Za-z0-9+/=]+)", page)]


def test_the_page_says_what_it_is_and_shows_no_patient() -> None:
    page = render(whole(), released(), "privimage: <set>, part held-out", 3)
    text = html.unescape(re.sub(r"<[^>]+>", " ", page.decode()))
    assert "FOR THIS SITE ONLY" in text
    assert WARNING in text
    assert "look number 3" in text
    assert b"<set>" not in page
    for word in ("LR", "MLP", "CNN", "Fréchet distance", "random-1x16x3-s0", "SDS", "chance", *CLASSES):
        assert word in text
    assert not any(b"secretname" in part for part in (page, *drawings(page)))
    pngs = [drawing for drawing in drawings(page) if drawing.startswith(b"\x89PNG")]
    assert len(pngs) == len(CLASSES), "a sheet of each class, all of the set"
    assert b"<script" not in page
    assert b"default-src 'none'" in page
    assert all(source.startswith("data:image/") for source in re.findall(r"src='([^']*)'", page.decode()))


def test_a_sheet_holds_the_sets_own_pictures_and_a_class_without_one_is_said() -> None:
    few = SyntheticSet(released().images[:2], ("dark", "bright"))
    page = render(whole(), few, "", 1)
    assert b"Class striped" in page
    assert b"the set has no image of it" in page
    assert b"This is the first look" in page


def test_what_was_not_measured_is_said_on_the_page() -> None:
    nothing = replace(whole(), fidelity="for a reason", taught="for another", semantics="for a third")
    text = render(nothing, released(), "", 1).decode()
    assert [text.count(f"Not measured: for {why}.") for why in ("a reason", "another", "a third")] == [1, 1, 1]
