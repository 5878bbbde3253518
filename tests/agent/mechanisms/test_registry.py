"""The conformance suite of every mechanism, and what k-Same-PCA and federated training promise on top."""

import ast
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import agent
from agent.domain import Cohort, Image, Latents, LatticePart, Patient, SyntheticSet, Update
from agent.dp import clipping, dpsgd, noise
from agent.dp.clipping import loop_engine
from agent.dp.dpsgd import SecureSumGrid, noisy_part, train_privately
from agent.dp.noise import TAIL
from agent.errors import CohortTooSmallError
from agent.mechanisms.anonfaces import mechanism as anonfaces
from agent.mechanisms.centroids import mechanism as centroids
from agent.mechanisms.common.linear_codec import Basis, fit_basis
from agent.mechanisms.distillation import mechanism as distill
from agent.mechanisms.distillation import teacher_student
from agent.mechanisms.distillation.mechanism import DistillDp
from agent.mechanisms.distillation.teacher_student import Distilled
from agent.mechanisms.federated import mechanism as federated
from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError, FederatedMasked
from agent.mechanisms.federated.task_model import TaskModel, TrainedModel
from agent.mechanisms.federated.task_training import labelled_examples, row_losses, units
from agent.mechanisms.kanonymous import OPTIONS
from agent.mechanisms.ksalsa import mechanism as ksalsa
from agent.mechanisms.ksame import mechanism as ksame
from agent.mechanisms.ksame.mechanism import KSame
from agent.mechanisms.privimage import mechanism as privimage
from agent.mechanisms.privimage.semantic_query import DrownedHistogramError
from agent.mechanisms.registry import MECHANISMS, Mechanism
from agent.microaggregation.partition import partition
from agent.vetting.exact_copies import RepeatedInputError
from deploy.demo.twin import non_private_twin
from policies.accounting.claims import (
    DistributedGaussian,
    Evaluated,
    KAnonymous,
    SubsampledGaussian,
    UnsupportedClaimError,
)
from policies.review.policy import parse, preset
from policies.review.rules import TERMS, AccountContext, review_reservation
from policies.statements import Reservation
from policies.tasks.networks import NetworkSpec
from protos.secagg.ring import Ring
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.networks import codec, seen_again
from tests.support.small_distillation import dressed, measured_once
from tests.support.small_mechanisms import (
    ANONFACES,
    CENTROIDS,
    COHORT,
    DATA,
    DIGITS,
    DISTILL,
    DISTILL_DP,
    FEDERATED,
    KSALSA,
    KSAME,
    LARGE,
    MASKED,
    MODEL,
    PRIVATE,
    PRIVIMAGE,
    digit_patients,
    in_parts,
)
from tests.support.small_tasks import changed

__all__ = ["measured_once"]  # a fixture


def _eighth(cohort):
    """The digits as they were scanned, 8 x 8."""
    return Cohort(
        tuple(
            Patient(p.pseudonym, tuple(Image(i.pixels[::4, ::4].copy(), i.label) for i in p.images))
            for p in cohort.patients
        )
    )


def _worn(cohort):
    """The digits at 16 x 16, with something of each patient's own; of another shape they stay as they are."""
    return Cohort(
        tuple(
            Patient(
                p.pseudonym,
                tuple(
                    Image(dressed(i.pixels[::2, ::2], n) if i.pixels.shape == (32, 32) else i.pixels, i.label)
                    for i in p.images
                ),
            )
            for n, p in enumerate(cohort.patients)
        )
    )


def _round(mechanism, cohort, seed, start=None):
    """One round on the images that came with a label; ``seed``: of its randomness, or that itself."""
    entropy = UnsafeSeededEntropy(seed) if isinstance(seed, int) else seed
    return mechanism.run_round(labelled_examples(mechanism.task, cohort), start or mechanism.initial(), entropy)


def _units(mechanism, cohort):
    examples = labelled_examples(mechanism.task, cohort)
    return units(mechanism.task, mechanism.network(), examples, UnsafeSeededEntropy(0))


class Case(NamedTuple):
    mechanism: Mechanism
    run: Callable[[Cohort, int], object]  # cohort, seed
    too_small: Cohort
    breaks: tuple[object, str]  # a module and its function: what fails in the middle of a run


CASES = {
    "ksame": Case(
        KSAME,
        lambda cohort, seed: KSAME.run(cohort, np.random.default_rng(seed)),
        Cohort(COHORT.patients[:4]),
        (ksame, "average"),
    ),
    "ksalsa": Case(
        KSALSA,
        lambda cohort, seed: KSALSA.run(cohort, np.random.default_rng(seed)),
        Cohort(COHORT.patients[:4]),
        (ksalsa, "average"),
    ),
    "anonfaces": Case(
        ANONFACES,
        lambda cohort, seed: ANONFACES.run(seen_again(cohort), np.random.default_rng(seed)),
        Cohort(COHORT.patients[:4]),
        (anonfaces, "mix"),
    ),
    "privimage": Case(
        PRIVIMAGE,
        lambda cohort, seed: PRIVIMAGE.run(_eighth(cohort), UnsafeSeededEntropy(seed)),
        Cohort(()),
        (privimage, "train_privately"),
    ),
    "centroids": Case(
        CENTROIDS,
        lambda cohort, seed: CENTROIDS.run(cohort, UnsafeSeededEntropy(seed)),
        Cohort(COHORT.patients[:4]),
        (centroids, "noisy_sum"),
    ),
    "distill": Case(
        DISTILL,
        lambda cohort, seed: DISTILL.run(_worn(cohort), UnsafeSeededEntropy(seed)),
        Cohort(COHORT.patients[:1]),
        (teacher_student, "best_of"),
    ),
    "distill-dp": Case(
        DISTILL_DP,
        lambda cohort, seed: DISTILL_DP.run(_worn(cohort), UnsafeSeededEntropy(seed)),
        Cohort(()),
        (distill, "train_privately"),
    ),
    "federated": Case(
        FEDERATED,
        lambda cohort, seed: _round(FEDERATED, cohort, seed),
        Cohort(()),
        (federated, "row_losses"),
    ),
    "model": Case(
        MODEL,
        lambda cohort, seed: MODEL.run(in_parts(cohort), UnsafeSeededEntropy(seed)),
        Cohort(()),
        (federated, "row_losses"),
    ),
    "federated-masked": Case(
        MASKED,
        lambda cohort, seed: _round(MASKED, cohort, seed),
        Cohort(()),
        (federated, "row_losses"),
    ),
}


def _numbers(release):
    if isinstance(release, TrainedModel):
        return np.concatenate([release.parameters, release.sums])
    return release.vector if isinstance(release, Update) else release.steps


OF_SCANS = {"remodel"}  # takes scans and no images: the same is asked of it in test_remodel_release.py


def _bytes(release):
    if isinstance(release, Update | LatticePart | TrainedModel):
        return _numbers(release).tobytes()
    if isinstance(release, SyntheticSet):
        return release.images.tobytes() + repr(release.labels).encode()
    if isinstance(release, Distilled):
        return _bytes(release.made)
    synthetic, clusters = release
    return synthetic.images.tobytes() + repr((synthetic.labels, clusters.members)).encode()


def test_every_mechanism_has_a_case_in_this_suite():
    assert CASES.keys() == MECHANISMS.keys() - OF_SCANS
    assert all(type(case.mechanism) is MECHANISMS[name] for name, case in CASES.items())
    assert all(kind.name == name for name, kind in MECHANISMS.items())


class Ran(NamedTuple):
    """One run of a case, and what was seen before and after it."""

    release: object
    claims: tuple[object, object]
    generators: tuple[tuple[object, object], tuple[object, object]]  # torch's and numpy's global ones


RUNS = {}


def _ran(case):
    """The run whose release several tests look at: a distillation takes seconds."""
    if case.run not in RUNS:
        claim, generators = case.mechanism.claim(), _generators()
        release = case.run(COHORT, 1)
        RUNS[case.run] = Ran(release, (claim, case.mechanism.claim()), (generators, _generators()))
    return RUNS[case.run]


def _generators():
    return torch.get_rng_state(), np.random.get_state()[1].copy()


@pytest.mark.usefixtures("measured_once")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
class TestConformance:
    def test_it_is_frozen_public_configuration(self, case):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(case.mechanism, dataclasses.fields(case.mechanism)[0].name, 7)

    def test_the_claim_needs_no_data_and_does_not_change(self, case):
        assert not inspect.signature(case.mechanism.claim).parameters
        before, after = _ran(case).claims
        assert after == before == case.mechanism.claim()

    def test_the_origin_of_every_component_is_told(self, case):
        components = case.mechanism.components()
        assert components
        assert all(re.fullmatch(r"public|private|dp\(.+\)", origin) for origin in components.values())

    def test_the_same_randomness_gives_the_same_release_and_other_randomness_another(self, case):
        assert _bytes(_ran(case).release) == _bytes(case.run(COHORT, 1))
        assert _bytes(_ran(case).release) != _bytes(case.run(COHORT, 2))

    def test_no_output_equals_an_input(self, case):
        release = _ran(case).release
        release = release.made if isinstance(release, Distilled) else release
        if isinstance(release, tuple | SyntheticSet):
            made = release[0] if isinstance(release, tuple) else release
            shown = {(8, 8): _eighth, (16, 16): _worn}.get(made.images.shape[1:])
            cohort = shown(COHORT) if shown else COHORT
            real = {np.rint(i.pixels * 255).tobytes() for p in cohort.patients for i in p.images}
            assert not any(image.astype(np.float32).tobytes() in real for image in made.images)
        else:
            assert not np.array_equal(_numbers(release), FEDERATED.initial().vector)

    def test_a_cohort_that_is_too_small_is_refused_without_numbers(self, case):
        if isinstance(
            case.mechanism, Federated | FederatedMasked | TaskModel
        ):  # a refusal would tell whether there is a single patient
            assert np.isfinite(_numbers(case.run(case.too_small, 0))).all()
            return
        if isinstance(case.mechanism, DistillDp):  # here too
            assert len(case.run(case.too_small, 0).made.images)
            return
        with pytest.raises(
            (CohortTooSmallError, DrownedHistogramError)
        ) as refusal:  # of differential privacy: by noisy counts alone
            case.run(case.too_small, 0)
        assert not any(character.isdigit() for character in str(refusal.value))

    def test_a_fault_in_the_middle_is_passed_on_and_nothing_is_returned(self, case, monkeypatch):
        def broken(*_, **__):
            raise ArithmeticError("broken")

        monkeypatch.setattr(*case.breaks, broken)
        with pytest.raises(ArithmeticError):
            case.run(COHORT, 0)

    def test_images_of_another_shape_are_refused(self, case):
        with pytest.raises(ValueError, match="shape"):
            case.run(digit_patients(PRIVATE[:120], DIGITS), 0)

    def test_the_global_generators_are_not_moved(self, case):
        (state, words), (state_then, words_then) = _ran(case).generators
        assert torch.equal(state, state_then)
        assert np.array_equal(words, words_then)


# --- k-Same-PCA


def test_k_counts_patients_not_images():
    # P3 broken on purpose: nine patients with ten images each are no cluster of eleven
    many = Cohort(
        tuple(Patient(f"p{n}", tuple(Image(LARGE[10 * n + j], "ab"[j % 2]) for j in range(10))) for n in range(9))
    )
    with pytest.raises(CohortTooSmallError):
        KSame(11, 1, KSAME.basis).run(many, np.random.default_rng(0))


SYNTHESES = {name: CASES[name].mechanism for name in OPTIONS}


def _twins(people, images=2):
    """Patients with near-identical images: every image's nearest neighbour is the same patient's."""
    noise = np.random.default_rng(3)
    pairs = []
    for n in range(people):
        base = LARGE[PRIVATE[n]]
        own = [np.clip(base + noise.normal(0, 0.004, base.shape), 0, 1).astype(np.float32) for _ in range(images)]
        pairs.append(Patient(f"p{n:03d}", tuple(Image(image, "ab"[n % 2]) for image in own)))
    return Cohort(tuple(pairs))


@pytest.mark.parametrize("name", SYNTHESES)
def test_two_near_identical_images_of_each_patient_leave_k_a_k_of_patients(name):
    """P3: counting images would make every cluster of k = 2 one patient; a control does just that, and sees red."""
    cohort = _twins(24)
    _, clusters = SYNTHESES[name].run(cohort, np.random.default_rng(0))
    assert all(len(set(members)) >= 5 for members in clusters.members)
    assert sorted(p for c in clusters.members for p in c) == [p.pseudonym for p in cohort.patients]


def test_images_counted_as_patients_would_leave_a_k_of_one():
    """The control: the same clustering over images, as the published code does it."""
    cohort = _twins(24)
    stacked = np.stack([image.pixels for patient in cohort.patients for image in patient.images])
    owners = [f"{patient.pseudonym}/{i}" for patient in cohort.patients for i in range(2)]
    codes = Latents(KSAME.basis.encode(stacked), tuple(owners))
    clusters = partition(codes, ["a"] * 48, 2, 1, np.random.default_rng(0))
    assert all(len({name.split("/")[0] for name in members}) == 1 for members in clusters.members)


@pytest.mark.parametrize("name", ["internal", "controlled", "public"])
@pytest.mark.parametrize("made", ["ksalsa", "anonfaces"])
def test_a_generator_that_nobody_vouches_for_is_refused_by_every_preset(name, made):
    """P6 broken on purpose: for all anybody knows, it was trained on the cohort."""
    own = dataclasses.replace(SYNTHESES[made], codec=codec(vouched=False))
    assert own.components()["generator"] == own.components()["encoder"] == "private"
    for mechanism, allowed in ((own, False), (SYNTHESES[made], True)):
        components = mechanism.components()
        asked = Reservation("grant-1", "site-a", "", made, KAnonymous(11, 2, 1), components, "OP")
        found = review_reservation(asked, AccountContext(None), parse(preset(name), name))
        assert ("provenance" not in {finding.rule for finding in found.findings}) is allowed


def test_the_views_of_a_cluster_stand_side_by_side_for_the_record():
    synthetic, clusters = KSALSA.run(COHORT, np.random.default_rng(0))
    assert len(synthetic.images) == 2 * len(clusters.members)
    assert synthetic.labels[0::2] == synthetic.labels[1::2]
    pairs = [
        np.abs(a.astype(int) - b).mean() for a, b in zip(synthetic.images[0::2], synthetic.images[1::2], strict=True)
    ]
    assert all(pair > 0 for pair in pairs)


def test_two_releases_of_anonfaces_use_other_weights_and_so_other_pictures():
    """The parrot's question: does doing it again give the same picture? Not even with the same clusters."""
    known = seen_again(COHORT)
    once, first = ANONFACES.run(known, np.random.default_rng(1))
    twice, second = ANONFACES.run(known, np.random.default_rng(2))
    shared = set(first.members) & set(second.members)
    pictures = [
        {m: image.tobytes() for m, image in zip(c.members, s.images, strict=True)}
        for s, c in ((once, first), (twice, second))
    ]
    assert shared
    assert all(pictures[0][members] != pictures[1][members] for members in shared)


def test_every_patient_is_behind_exactly_one_representative():
    synthetic, clusters = KSAME.run(COHORT, np.random.default_rng(0))
    assert isinstance(synthetic, SyntheticSet)
    assert len(synthetic.images) == len(synthetic.labels) == len(clusters.members)
    assert sorted(p for c in clusters.members for p in c) == [p.pseudonym for p in COHORT.patients]
    assert all(5 <= len(c) <= 9 for c in clusters.members)


def test_each_image_and_label_is_that_of_the_cluster_at_its_place():
    synthetic, clusters = KSAME.run(COHORT, np.random.default_rng(0))
    patients = {p.pseudonym: p for p in COHORT.patients}
    for image, label, members in zip(synthetic.images, synthetic.labels, clusters.members, strict=True):
        mean = np.mean([np.mean([i.pixels for i in patients[p].images], axis=0) for p in members], axis=0)
        projected = (mean.ravel() - KSAME.basis.mean) @ KSAME.basis.axes.T @ KSAME.basis.axes
        expected = np.clip(KSAME.basis.mean + projected, 0, 1).reshape(32, 32) * 255
        assert np.abs(image - expected).max() <= 0.51
        votes = [patients[p].images[0].label for p in members]
        assert votes.count(label) == max(votes.count(v) for v in votes)


def test_the_order_of_the_images_tells_nothing_about_the_clusters():
    first = [KSAME.run(COHORT, np.random.default_rng(s))[1].members[0] for s in range(12)]
    assert len(set(first)) > 6


def test_a_private_basis_is_called_private():
    # P6: the review refuses what says so; it must never be dressed up
    private = KSame(5, 2, fit_basis(LARGE[PRIVATE[:99]], 9, "private"))
    assert set(private.components().values()) == {"private"}


def test_a_representative_that_is_a_real_image_is_refused():
    # identical patients: their mean is each of them, and the basis holds it exactly
    flat = np.full((8, 8), 0.5, np.float32)
    same = Cohort(tuple(Patient(f"p{n:02d}", (Image(flat, "ab"[n % 2]),)) for n in range(12)))
    basis = Basis(flat.ravel(), np.eye(1, 64, dtype=np.float32), (8, 8), "public")
    with pytest.raises(RepeatedInputError) as refusal:
        KSame(5, 2, basis).run(same, np.random.default_rng(0))
    assert not any(character.isdigit() for character in str(refusal.value))


def test_the_labels_of_a_homogeneous_cohort_are_not_released():
    # P8 broken on purpose
    ill = Cohort(tuple(Patient(p.pseudonym, (Image(p.images[0].pixels, "ill"),)) for p in COHORT.patients))
    with pytest.raises(CohortTooSmallError):
        KSAME.run(ill, np.random.default_rng(0))
    assert set(KSame(5, 1, KSAME.basis).run(ill, np.random.default_rng(0))[0].labels) == {"ill"}


def test_the_claim_of_k_same_counts_one_release():
    assert KSame(11, 3, KSAME.basis).claim() == KAnonymous(11, 3, 1)


@pytest.mark.parametrize(("k", "ell"), [(1, 1), (5, 6), (5, 0), (True, 1), (5.0, 1)])
def test_a_k_same_that_can_not_be_claimed_can_not_be_built(k, ell):
    with pytest.raises(ValueError, match=r"k|l_diversity"):
        KSame(k, ell, KSAME.basis)


# --- federated


def test_the_claim_is_that_of_all_rounds_and_a_rounds_is_its_own():
    assert FEDERATED.claim() == SubsampledGaussian(0.25, 1.8, 60)


def test_the_start_is_the_same_everywhere_and_zero():
    assert FEDERATED.initial().vector.shape == (650,)
    assert not FEDERATED.initial().vector.any()


def test_a_rounds_divisor_does_not_follow_the_cohort(monkeypatch):
    # P10: q, sigma, steps and the divisor that reach the engine are constants
    jobs = []
    monkeypatch.setattr(federated, "train_privately", lambda task, units, job, *_, **__: jobs.append(job))
    for size in (1, 7, 60):
        _round(FEDERATED, Cohort(COHORT.patients[:size]), 0)
    assert len(set(jobs)) == 1
    assert jobs[0].expected_batch == 0.25 * 225


def test_images_of_an_unknown_class_change_nothing():
    odd = Patient("q", (Image(np.ones((32, 32), np.float32), "unknown"),))
    with_odd = Cohort((*COHORT.patients, odd))
    runs = [_round(FEDERATED, cohort, 3).vector for cohort in (COHORT, with_odd)]
    assert not labelled_examples(FEDERATED.task, Cohort((odd,))).patients
    assert np.array_equal(*runs)


def test_a_cohort_of_unknown_classes_alone_is_noise_and_not_a_refusal():
    odd = Cohort((Patient("q", (Image(np.ones((32, 32), np.float32), "unknown"),)),))
    update = _round(FEDERATED, odd, 3)
    # 15 steps of noise of standard deviation lr * sigma * C / (q * patients), plain SGD
    expected = 40 * 1.8 * 0.1 / (0.25 * 225) * np.sqrt(15)
    assert update.vector.std() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("size", [0, 649, 651])
def test_parameters_of_another_model_are_refused(size):
    with pytest.raises(ValueError, match="fit"):
        FEDERATED.network(np.zeros(size, np.float32))
    with pytest.raises(ValueError, match=r"fit|non-empty"):
        _round(FEDERATED, COHORT, 0, Update(np.zeros(size, np.float32)))


def test_the_configuration_survives_its_json():
    assert Federated.from_json(FEDERATED.to_json()) == FEDERATED
    assert Federated.from_json(FEDERATED.to_json()).to_json() == FEDERATED.to_json()


def _with(**changes):
    """The configuration with other values of its own, or of its task by their section and key."""
    values = json.loads(FEDERATED.to_json())
    for key, value in changes.items():
        *sections, last = key.split("__")
        table = values["task"][sections[0]] if sections else values
        table[last] = value
        if value == "remove":
            del table[last]
    return json.dumps(values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        _with(seed=0),
        _with(task="remove"),
        _with(task=None),
        _with(task="small.toml"),
        _with(parameters="remove"),
        _with(parameters=650.0),
        _with(parameters=0),
        _with(parameters=10**9),
        _with(noise_multiplier="remove"),
        _with(noise_multiplier=2),
        _with(noise_multiplier=0.0),
        _with(noise_multiplier=float("nan")),
        _with(epsilon=3.0),
        _with(training__clip="0.1"),
        _with(training__clip=-0.1),
        _with(training__clip=float("inf")),
        _with(training__rounds=4.0),
        _with(training__rounds=True),
        _with(training__rounds=0),
        _with(training__public_patients=0),
        _with(training__steps_per_round=10**9),
        _with(training__sampling_rate=1.5),
        _with(training__proximal=-0.01),
        _with(training__proximal=0.026),  # times a learning rate of 40: beyond the start
        _with(training__optimizer="adam"),
        _with(labels__classes=["a"]),
        _with(labels__classes=["a", "a"]),
        _with(labels__classes="0123456789"),
        _with(input__size=[32]),
        _with(input__size=[32, 10**9]),
        _with(network__name="torch.nn.Linear"),
        FEDERATED.to_json()[:-1] + ',"parameters":650}',
        FEDERATED.to_json() + " x",
    ],
)
def test_a_configuration_that_is_not_exactly_one_is_refused(text):
    with pytest.raises(FederatedConfigError):
        Federated.from_json(text)


def test_a_proximal_term_that_a_found_rate_would_overshoot_with_is_refused():
    with pytest.raises(FederatedConfigError, match="proximal"):
        changed(FEDERATED, learning_rate=0.0, proximal=1e5)


def test_a_network_that_trains_another_number_of_parameters_is_refused():
    with pytest.raises(FederatedConfigError, match="trains 650"):
        changed(FEDERATED, parameters=651).network()


def test_a_public_file_that_is_not_here_is_named():
    spec = NetworkSpec("small-cnn", weights="ab" * 32)
    mechanism = Federated(dataclasses.replace(FEDERATED.task, network=spec), 10, 1.8)
    with pytest.raises(FederatedConfigError, match="ab" * 32):
        mechanism.network()


def test_all_keys_at_fault_are_named_at_once_and_no_value():
    with pytest.raises(FederatedConfigError) as refusal:
        Federated.from_json(_with(parameters="remove", seed=12345))
    assert "parameters" in str(refusal.value)
    assert "seed" in str(refusal.value)
    assert "12345" not in str(refusal.value)
    with pytest.raises(FederatedConfigError, match=r"task: training\.clip: .*task: network\.name: "):
        Federated.from_json(_with(training__clip=-1.0, network__name="x"))


def test_what_can_not_be_priced_can_not_be_built():
    with pytest.raises((UnsupportedClaimError, ValueError)):
        changed(FEDERATED, rounds=2_000_000)


# --- FedProx: the term that pulls towards the round's start

PROXIMAL = changed(FEDERATED, proximal=0.02)


def _watched(monkeypatch, mechanism, cohort, seed=0):
    """One round; by step: the parameters, the units drawn, and the total that went to the noise."""
    seen = []

    def spy(model, loss, batch, clip):
        total = loop_engine(model, loss, batch, clip)
        seen.append(([p.detach().clone() for p in model.parameters()], list(batch), total.clone()))
        return total

    monkeypatch.setattr(
        federated,
        "train_privately",
        lambda task, units, job, e, _engine, say, **_: train_privately(task, units, job, e, spy, say=say),
    )
    return _round(mechanism, cohort, seed).vector, seen


def test_the_proximal_term_leaves_each_patients_reach_at_the_clip(monkeypatch):
    _, seen = _watched(monkeypatch, PROXIMAL, COHORT)
    moves = []
    for parameters, batch, total in seen:
        model = PROXIMAL.network(torch.nn.utils.parameters_to_vector(parameters).numpy()).trained
        for i in range(0, len(batch), 5):
            rest = batch[:i] + batch[i + 1 :]
            without = loop_engine(model, row_losses(PROXIMAL.task), rest, PROXIMAL.task.training.clip)
            moves.append(float((total - without).norm()))
    assert len(seen) == 15
    assert any(bool(parameters[0].any()) for parameters, _, _ in seen)  # away from the start, where the term acts
    assert max(moves) <= PROXIMAL.task.training.clip
    assert max(moves) > 0.99 * PROXIMAL.task.training.clip  # the clip binds, else this would prove nothing


def test_the_first_step_is_the_same_with_and_without_the_term_and_the_others_are_pulled_back(monkeypatch):
    (far, plain), (near, pulled) = (_watched(monkeypatch, m, COHORT) for m in (FEDERATED, PROXIMAL))
    assert torch.equal(plain[0][2], pulled[0][2])
    assert torch.equal(plain[1][0][0], pulled[1][0][0])
    assert not torch.equal(plain[2][0][0], pulled[2][0][0])
    assert np.linalg.norm(near) < np.linalg.norm(far)


def test_each_step_is_the_noisy_gradient_and_the_pull_and_nothing_else(monkeypatch):
    noisy, honest = [], dpsgd.noisy_sum
    monkeypatch.setattr(dpsgd, "noisy_sum", lambda *told: noisy.append(honest(*told)) or noisy[-1])
    start = Update(np.random.default_rng(0).normal(size=650).astype(np.float32))
    vector = _round(PROXIMAL, COHORT, 1, start).vector
    weights, divisor = start.vector.astype(np.float64), 0.25 * 225
    for gradient in noisy:
        weights = weights - 40.0 * (gradient / divisor + 0.02 * (weights - start.vector))
    assert np.allclose(vector, weights, atol=1e-4)


def test_the_noise_of_a_proximal_round_is_drawn_in_full():
    # without patients w(t + 1) = (1 - lr mu) w(t) + noise; a pull before the noise would be clipped or cheaper
    update = _round(PROXIMAL, Cohort(()), 3).vector
    variance = (40 * 1.8 * 0.1 / (0.25 * 225)) ** 2 * sum((1 - 40 * 0.02) ** (2 * t) for t in range(15))
    assert stats.kstest(update / math.sqrt(variance), "norm").pvalue > 1e-3
    plain = _round(FEDERATED, Cohort(()), 3).vector
    assert stats.kstest(plain / math.sqrt(variance), "norm").pvalue < 1e-3


def test_the_proximal_term_costs_nothing():
    assert PROXIMAL.claim() == FEDERATED.claim()


# --- one site's part of a secure sum


def _sum(mechanism, members, seed, cohort):
    """The sum of the members' parts in units of the clip, (p,): what alone is seen."""
    entropy = [UnsafeSeededEntropy(1000 * seed + i) for i in range(members)]
    parts = [_change(mechanism, _round(mechanism, cohort, e)) for e in entropy]
    constants = mechanism.task.training
    return -np.sum(parts, axis=0) * constants.expected_batch / mechanism.learning_rate / constants.clip


def _change(mechanism, made):
    """What a round would do to the parameters, (p,) float64."""
    if isinstance(made, Update):
        return made.vector.astype(np.float64)
    return made.steps * 2.0**-mechanism.scale


def _law(mechanism, members, sigma, runs=8):
    """Two-sided p-value of the sums' noise against N(0, sigma^2); Bonferroni over distribution and variance."""
    noise = np.concatenate([_sum(mechanism, members, seed, Cohort(())) for seed in range(runs)])
    below = stats.chi2.cdf((noise**2).sum() / sigma**2, len(noise))
    return min(1.0, 2 * min(stats.kstest(noise / sigma, "norm").pvalue, 2 * min(below, 1 - below)))


@pytest.mark.parametrize(("sites", "honest"), [(2, 2), (3, 3), (10, 7)])
def test_the_honest_sites_together_bear_exactly_the_noise_of_plain_dp_sgd(sites, honest):
    mechanism = changed(MASKED, sites=sites, honest=honest, value_bound=2.0)
    assert _law(mechanism, honest, 1.8) > 1e-3
    plain = changed(FEDERATED, rounds=1, steps_per_round=1)
    assert _law(plain, 1, 1.8) > 1e-3  # the law is plain DP-SGD's own


def test_more_sites_than_needed_only_add_noise():
    assert _law(MASKED, 3, 1.8 * math.sqrt(3 / 2)) > 1e-3


def test_a_share_by_all_sites_instead_of_the_honest_ones_would_be_caught():
    # P10 broken on purpose: with one of three corrupt, a third of the variance would be known to the coordinator
    assert _law(changed(MASKED, honest=3), 2, 1.8) < 1e-3


def test_a_tenth_of_missing_noise_in_a_sum_is_caught():
    assert _law(changed(MASKED, noise_multiplier=1.62), 2, 1.8) < 1e-3


def test_the_claim_of_a_masked_run_is_one_step_a_round():
    assert MASKED.claim() == DistributedGaussian(0.25, 1.8, 30, 3, 2)
    assert MASKED.steps_per_round == 1
    with pytest.raises(FederatedConfigError, match="steps_per_round: 1"):
        changed(MASKED, steps_per_round=2)


def test_a_part_is_whole_steps_within_the_bound_and_the_ring_takes_it_as_it_is():
    ring = Ring(MASKED.parameters, MASKED.ring_bits, MASKED.value_bound, MASKED.scale)
    for cohort in (COHORT, Cohort(())):
        steps = _round(MASKED, cohort, 0).steps
        assert np.array_equal(ring.lower(ring.lift(steps)), steps)
        assert np.abs(steps * 2.0**-20).max() <= MASKED.value_bound


class _Extreme:
    """The largest normals that the generator can give, of either sign."""

    def __init__(self, byte):
        self._byte = byte

    def take(self, count):
        return bytes([self._byte]) * count


@pytest.mark.parametrize("value", [1e9, -1e9])
@pytest.mark.parametrize("byte", [0, 255])
def test_nothing_leaves_the_bound_whatever_the_patients_and_the_noise_are(monkeypatch, value, byte):
    # huge gradient sums are boxed before the noise; the noise's end is known; so nothing is ever cut after it
    huge = torch.full((650,), value, dtype=torch.float64)
    monkeypatch.setattr(federated, "fitted_engine", lambda *_: lambda *_: huge)
    assert 8.6 < np.abs(noise.draw_gaussians(_Extreme(0), 4)).max() <= TAIL
    vector = _round(MASKED, COHORT, _Extreme(byte)).steps * 2.0**-20
    assert np.abs(vector).max() <= MASKED.value_bound
    assert np.abs(vector).max() > 0.5 * MASKED.value_bound


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.3, 5.0]), st.sampled_from([1e-6, 1e-3]))
def test_boxing_and_rounding_bring_no_neighbours_further_apart_than_the_noise_covers(seed, spread, grid):
    rng = np.random.default_rng(seed)
    one = rng.normal(size=40) * spread
    patient = rng.normal(size=40)
    two = one + 0.1 * patient / np.linalg.norm(patient)
    job, box = MASKED._job(), SecureSumGrid(grid, 0.5)
    model = torch.nn.Linear(39, 1)
    parts = []
    for total in (one, two):
        engine = lambda *_, total=total: torch.from_numpy(total)  # noqa: E731 - one line
        parts.append(noisy_part(model, None, [], job, UnsafeSeededEntropy(seed), box, clipped_sum=engine) * grid)
    apart = float(np.linalg.norm(parts[0] - parts[1]))
    assert apart <= 0.1 + grid * math.sqrt(40) + 1e-12
    assert noise.deviation(job.clip, job.noise_multiplier, 40, grid) >= job.noise_multiplier * (
        0.1 + grid * math.sqrt(40)
    )


def test_the_mean_of_the_parts_is_the_mean_of_plain_steps_up_to_the_rounding():
    # the same patients drawn, the same noise: one masked step is one plain step
    masked = changed(MASKED, honest=1)
    plain = changed(FEDERATED, steps_per_round=1)
    part = _change(masked, _round(masked, COHORT, 5))
    update = _round(plain, COHORT, 5).vector
    covered = masked._noise() / (1.8 * 0.1) - 1  # a little more noise
    assert np.abs(part - update).max() <= 2.0**-20 + TAIL * covered * 40 * 0.18 / 56.25 + 1e-6
    assert np.abs(part).max() > 0.1


def test_a_part_changes_no_model_and_refuses_batch_statistics():
    model, patients = MASKED.network().trained, _units(MASKED, COHORT)
    loss, box = row_losses(MASKED.task), SecureSumGrid(1e-6, 1.0)
    noisy_part(model, loss, patients, MASKED._job(), UnsafeSeededEntropy(0), box)
    assert not any(bool(p.any()) for p in model.parameters())
    with pytest.raises(clipping.UnsuitableModelError):
        noisy_part(torch.nn.BatchNorm1d(3), None, [], MASKED._job(), UnsafeSeededEntropy(0), SecureSumGrid(1e-6, 1.0))


@pytest.mark.parametrize(
    ("grid", "bound"), [(0.0, 1.0), (1.0, 1.0), (1.0, math.inf), (math.nan, 1.0), (0.1, math.nan)]
)
def test_a_box_that_holds_nothing_cannot_be_built(grid, bound):
    with pytest.raises(ValueError, match="grid"):
        SecureSumGrid(grid, bound)


def test_a_masked_configuration_survives_its_json():
    assert FederatedMasked.from_json(MASKED.to_json()) == MASKED
    with pytest.raises(FederatedConfigError):
        Federated.from_json(MASKED.to_json())
    with pytest.raises(FederatedConfigError):
        FederatedMasked.from_json(FEDERATED.to_json())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"honest": 4}, "honest"),
        ({"honest": 0}, "honest"),
        ({"sites": 0}, "sites"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"ring_bits": 16}, "ring_bits"),
        ({"scale": 41}, "scale"),
        ({"scale": -1}, "scale"),
        ({"scale": 2}, "not small beside"),
        ({"scale": 14}, "not small beside"),
        ({"value_bound": 0.0}, "value_bound"),
        ({"value_bound": -1.0}, "value_bound"),
        ({"value_bound": math.inf}, "value_bound"),
        ({"value_bound": math.nan}, "value_bound"),
        ({"value_bound": 1.1}, "multiple"),
        ({"value_bound": 2.0**33}, "value_bound"),
        ({"value_bound": 0.5}, "too small"),
        ({"sites": 600}, "ring_bits"),
        ({"rounds": 0}, "rounds"),
        ({"momentum": 0.9}, "momentum"),
        ({"ema": 0.5}, "ema"),
        ({"proximal": 0.01}, "proximal"),
        ({"steps_per_round": 2}, "steps_per_round"),
        ({"parameters": 0}, "parameters"),
        ({"clip": 0.0}, "clip"),
    ],
)
def test_a_masked_run_that_could_wrap_cut_or_coarsen_its_noise_can_not_be_built(changes, why):
    with pytest.raises(ValueError, match=why):
        changed(MASKED, **changes)


HELD_OUT = PRIVATE[-297:]
SITES = [digit_patients(PRIVATE[:-297][s::3]) for s in range(2)]


def _accuracy(vector):
    tested = Cohort((Patient("p", tuple(Image(LARGE[i], str(DATA.target[i])) for i in HELD_OUT)),))
    predicted = FEDERATED.predict(vector, labelled_examples(FEDERATED.task, tested)).argmax(axis=1)
    return np.mean(predicted == DATA.target[HELD_OUT])


def test_two_sites_learn_the_digits_under_noise():
    vector = FEDERATED.initial().vector
    entropy = UnsafeSeededEntropy(0)
    for _ in range(FEDERATED.rounds):
        updates = [_round(FEDERATED, site, entropy, Update(vector)).vector for site in SITES]
        vector = np.mean(updates, axis=0, dtype=np.float64).astype(np.float32)
    assert _accuracy(vector) > 0.88


def test_two_sites_learn_the_digits_from_the_sums_alone():
    vector, entropy = MASKED.initial().vector, UnsafeSeededEntropy(0)
    for _ in range(MASKED.rounds):
        parts = [_change(MASKED, _round(MASKED, site, entropy, Update(vector))) for site in SITES]
        vector = (vector + np.mean(parts, axis=0, dtype=np.float64)).astype(np.float32)
    assert _accuracy(vector) > 0.85


def test_that_training_costs_less_than_eight_by_the_filter_of_order_four():
    claim, delta, order = FEDERATED.claim(), 4e-6, 4
    accountant = RdpAccountant(orders=[order])
    step = PoissonSampledDpEvent(claim.sampling_rate, GaussianDpEvent(claim.noise_multiplier))
    accountant.compose(step, claim.steps)
    (rho,) = accountant._rdp
    epsilon = rho + math.log((order - 1) / order) - math.log(delta * order) / (order - 1)
    assert epsilon == pytest.approx(6.51, abs=0.01)


def test_the_twin_without_privacy_learns_too_and_lives_outside_the_agent():
    cohorts = [labelled_examples(FEDERATED.task, site) for site in SITES]
    vector = non_private_twin(FEDERATED, cohorts, np.random.default_rng(0)).vector
    assert _accuracy(vector) > 0.9
    assert "agent" not in inspect.getmodule(non_private_twin).__name__


def _imported_and_called(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


@pytest.mark.parametrize("folder", ["mechanisms", "dp", "microaggregation", "vetting"])
def test_the_core_can_neither_seed_nor_unpickle_nor_reach_the_tests_or_the_twin(folder):
    forbidden = re.compile(
        r"manual_seed|default_rng|RandomState|Unsafe|pickle|eval|exec|tests|deploy|open|socket|time|logging"
    )
    for path in sorted((Path(agent.__file__).parent / folder).rglob("*.py")):
        if path.name.endswith("config.py"):  # reads what a person wrote, and computes nothing
            continue
        found = [name for name in _imported_and_called(path) if forbidden.fullmatch(name.split(".")[0])]
        assert not found, f"{path.name}: {found}"


def test_the_law_has_terms_for_exactly_the_mechanisms_that_the_agent_has():
    cases = {name: case.mechanism for name, case in CASES.items()}
    assert set(TERMS) == set(MECHANISMS) == set(cases) | OF_SCANS
    for name, terms in ((name, TERMS[name]) for name in cases):
        claim = cases[name].claim()
        assert type(claim.training if isinstance(claim, Evaluated) else claim) is terms.claim
        assert set(cases[name].components()) == terms.components
