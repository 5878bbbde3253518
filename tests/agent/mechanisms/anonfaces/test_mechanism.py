"""AnonFACES' judges: one that knows nobody, on the public set or on this cohort, is refused."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.domain import Cohort, Image, Patient
from agent.intervals import Proportion, bounds
from agent.mechanisms.anonfaces.gallery import ABOVE_CHANCE, Gallery, refuse_blind
from agent.mechanisms.anonfaces.identity_mixing import Mixing
from agent.mechanisms.anonfaces.mechanism import AnonFaces
from agent.models.recognition.recogniser import IdentityNet, Recogniser, RecogniserError, RecogniserQuality
from agent.models.training_loop import seeded
from tests.support.networks import LITTLE, codec, recogniser, seen_again, unsafe_calibration

LOW = RecogniserQuality(0.35, Proportion(0.033, 0.01, 0.08), Proportion(0.005, 0.0, 0.04), Proportion(0.1, 0.05, 0.2))


def judges(threshold=LITTLE):
    return (recogniser(0, threshold), recogniser(1, threshold))


def anonfaces(*some):
    return AnonFaces(5, 2, codec(1), some or judges(), Mixing(5))


def cohort(people=12, images=1):
    """Patients of blocky pictures, every picture of its own."""
    dice = np.random.default_rng(5)
    return Cohort(
        tuple(
            Patient(
                f"p{n:03d}",
                tuple(
                    Image(np.kron(dice.random((8, 8)), np.ones((4, 4))).astype(np.float32), "ab"[n % 2])
                    for _ in range(images)
                ),
            )
            for n in range(people)
        )
    )


def run(mechanism, patients):
    return mechanism.run(patients, np.random.default_rng(0))


def judged(one, figures):
    return Recogniser(one.name, one.net, replace(one.calibration, judged=figures), one.origin)


# -- what the files say


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_file_that_says_that_its_recogniser_knows_nobody_is_refused_before_anything_is_priced(place):
    some = [*judges(), recogniser(2, LITTLE)]
    anonfaces(*some)
    some[place] = judged(some[place], LOW)
    with pytest.raises(RecogniserError, match=r"matches 0\.033 \[0\.010, 0\.080\] and mistakes 0\.005"):
        anonfaces(*some)


def test_a_refusal_for_what_a_recogniser_is_worth_is_a_value_error_as_every_other_of_a_configuration():
    with pytest.raises(ValueError, match="train it longer"):
        dataclasses.replace(anonfaces(), recognisers=(judges()[0], judged(judges()[1], LOW)))


# -- what the cohort shows


def test_recognisers_that_know_the_cohorts_patients_again_release():
    synthetic, clusters = run(anonfaces(), seen_again(cohort()))
    assert len(synthetic.images) == len(clusters.members) == 2


def test_recognisers_that_do_not_are_refused_and_nobody_is_counted():
    """Broken on purpose: a second image of everybody that looks like another person's."""
    with pytest.raises(RecogniserError, match="same patient in this cohort") as refusal:
        run(anonfaces(), cohort(images=2))
    assert not any(character.isdigit() for character in str(refusal.value))


def test_one_blind_recogniser_among_others_is_enough_for_a_refusal():
    for place in range(3):
        some = [*judges(), recogniser(2, LITTLE)]
        some[place] = recogniser(place, 1e-6)
        with pytest.raises(RecogniserError):
            run(anonfaces(*some), seen_again(cohort()))


def test_where_no_patient_has_two_images_there_is_nothing_to_look_at():
    assert len(run(anonfaces(*judges(1e-6)), cohort())[0].images) == 2


def test_the_same_image_twice_is_one_image():
    """Else every collapsed network would know everybody who was exported twice."""
    twice = Cohort(tuple(Patient(p.pseudonym, p.images * 2) for p in cohort().patients))
    assert len(run(anonfaces(*judges(1e-6)), twice)[0].images) == 2
    pairs = zip(twice.patients, cohort(24).patients[12:], strict=True)
    third = Cohort(tuple(Patient(p.pseudonym, (*p.images, *other.images)) for p, other in pairs))
    with pytest.raises(RecogniserError):
        run(anonfaces(), third)


def test_a_recogniser_that_takes_everybody_for_everybody_knows_nobody():
    with pytest.raises(RecogniserError):
        run(anonfaces(*judges(2.0)), seen_again(cohort()))


def test_a_network_that_gives_no_numbers_knows_nobody():
    broken = recogniser(3, LITTLE)
    with torch.no_grad():
        next(broken.net.parameters()).fill_(float("nan"))
    with pytest.raises(RecogniserError):
        run(anonfaces(recogniser(0, LITTLE), broken), seen_again(cohort()))


def test_patients_of_earlier_releases_are_looked_at_too():
    """What is made is compared with them: a recogniser that is blind for them is blind."""
    some = cohort(12)
    others = tuple(replace(p, pseudonym=f"q{p.pseudonym}") for p in cohort(60, 2).patients)
    assert run(anonfaces(), some)
    with pytest.raises(RecogniserError):
        anonfaces().run(some, np.random.default_rng(0), others)


# -- the rule, against counting by hand


class Eye:
    """A judge by name and threshold; its embeddings are given."""

    def __init__(self, name, threshold):
        self.name, self.threshold = name, threshold

    def embed(self, images):
        raise AssertionError("nothing is embedded again")


def seen(counts, vectors, threshold=0.5):
    """Patients with so many different images, as two judges see them alike."""
    dice = np.random.default_rng(0)
    patients = tuple(
        Patient(f"p{n:04d}", tuple(Image(dice.random((2, 2)).astype(np.float32), "") for _ in range(count)))
        for n, count in enumerate(counts)
    )
    starts = np.cumsum([0, *counts])[:-1]
    eyes = (Eye("a", threshold), Eye("b", threshold))
    return Gallery(eyes, (vectors, vectors), starts, tuple(p.pseudonym for p in patients)), patients


def by_hand(counts, vectors, threshold):
    """Whether it is refused, one image at a time."""
    owners = np.repeat(np.arange(len(counts)), counts)
    again, luck = [], []
    for patient in range(len(counts)):
        if counts[patient] < 2:
            continue
        hits, chances = [], []
        for i in np.flatnonzero(owners == patient):
            far = [math.dist(vectors[i], v) for v in vectors]
            own = [far[j] < threshold for j in range(len(far)) if owners[j] == patient and j != i]
            others = [far[j] < threshold for j in range(len(far)) if owners[j] != patient]
            hits.append(any(own))
            chances.append(1 - (1 - np.mean(others)) ** len(own))
        again.append(np.mean(hits))
        luck.append(np.mean(chances))
    if not again:
        return False
    return not bounds(sum(again), len(again))[0] > np.mean(luck) + ABOVE_CHANCE


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=14), st.floats(0.0, 2.0), st.integers(0, 9999))
def test_the_rule_is_that_of_counting_by_hand(counts, spread, seed):
    dice = np.random.default_rng(seed)
    centres = dice.standard_normal((len(counts), 3))
    vectors = np.repeat(centres, counts, axis=0) + spread * dice.standard_normal((sum(counts), 3))
    gallery, patients = seen(counts, vectors)
    try:
        refuse_blind(gallery, patients)
        refused = False
    except RecogniserError:
        refused = True
    assert refused == by_hand(counts, vectors, 0.5)


def test_recognition_by_chance_alone_is_refused_whatever_the_threshold():
    """Vectors that have nothing to do with patients: few images each, or many."""
    dice, refusals = np.random.default_rng(1), 0
    trials = [(n, images, t) for n in (3, 10, 300) for images in (2, 6) for t in (0.05, 0.3, 0.8, 1.5, 3.0)]
    for people, images, threshold in trials:
        vectors = dice.standard_normal((people * images, 2))
        try:
            refuse_blind(*seen([images] * people, vectors, threshold))
        except RecogniserError:
            refusals += 1
    assert refusals == len(trials)


def test_a_cohort_of_many_views_is_known_by_the_pairs_that_show_the_same_thing():
    """Two eyes, two visits: an eye's other visit is near, the other eye is not."""
    dice = np.random.default_rng(2)
    eyes = dice.standard_normal((80, 8))
    vectors = np.repeat(eyes, 2, axis=0) + 0.01 * dice.standard_normal((160, 8))
    refuse_blind(*seen([4] * 40, vectors))
    with pytest.raises(RecogniserError):
        refuse_blind(*seen([2] * 40, eyes))  # one visit: nothing that could be known again


def test_one_patient_is_enough_to_see_that_a_recogniser_is_blind_and_one_is_enough_to_clear_it():
    apart = np.eye(12)
    with pytest.raises(RecogniserError):
        refuse_blind(*seen([2, *[1] * 10], apart))
    near = apart.copy()
    near[1] = near[0] + 1e-3
    refuse_blind(*seen([2, *[1] * 10], near))
    with pytest.raises(RecogniserError):
        refuse_blind(*seen([2], near[:2]))  # nobody to be told from


def test_a_second_architecture_changes_nothing_of_what_is_asked():
    first = recogniser(0, LITTLE)
    with seeded(9):
        net = IdentityNet(replace(first.net.architecture, embedding=24)).eval()
    other = Recogniser("other", net, unsafe_calibration(LITTLE), replace(first.origin, sha256="1" * 64))
    assert len(run(anonfaces(first, other), seen_again(cohort()))[0].images) == 2
