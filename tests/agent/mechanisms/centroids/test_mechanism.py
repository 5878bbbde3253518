"""DP centroids: what one patient moves, what is drawn of noisy numbers, what is refused before anything is spent."""

import ast
import contextlib
import dataclasses
import hashlib
import inspect
import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image as Picture
from scipy import stats
from sklearn.datasets import load_digits

from agent.cli.main import main
from agent.domain import Cohort, Image, Latents, Patient
from agent.dp.noise import SystemEntropy, draw_gaussians
from agent.errors import CohortTooSmallError, SiteConfigError
from agent.mechanisms.centroids import codebook
from agent.mechanisms.centroids import mechanism as centroids
from agent.mechanisms.centroids.codebook import (
    Codebook,
    Placed,
    codebook_from,
    codec_digest,
    fitted,
    quantise,
    vector_sums,
    votes,
)
from agent.mechanisms.centroids.config import FILE, read_centroids
from agent.mechanisms.centroids.mechanism import (
    Centroids,
    DrownedCountsError,
    Forecast,
    NoCellError,
    margin_for,
    noises_for,
)
from agent.mechanisms.common.linear_codec import Basis, fit_basis, save_basis
from agent.models.weights import Origin, WeightsError
from policies.accounting.accountant import tight_epsilon
from policies.accounting.claims import Composed, GaussianQuery, SubsampledGaussian, UnsupportedClaimError
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.mechanism_documents import CENTROIDS, centroids_codebook, codec_as_read
from tests.support.networks import codec, files

ROOT = Path(__file__).parents[4]
DATA = load_digits()
DIGITS = (DATA.images / 16).astype(np.float32)  # (1797, 8, 8)
PUBLIC, PRIVATE = np.split(np.random.default_rng(7).permutation(1797), [300])
BASIS = fit_basis(DIGITS[PUBLIC], 40, "public")
CLASSES = tuple("0123456789")
DIMS, CELLS = 8, 6


@cache
def book(cells=CELLS, dims=DIMS):
    raw = fitted(BASIS.encode(DIGITS[PUBLIC]), (cells, dims), codec_digest(BASIS), {}, np.random.default_rng(0))
    return codebook_from(raw, "public")


def made(**changes):
    settings = {
        "codec": BASIS,
        "codebook": book(),
        "classes": CLASSES,
        "count_noise": 6.8,
        "noise_multiplier": 4.5,
        "k": 11,
        "margin": margin_for(CELLS, 10, 6.8),
        "images_per_patient": 4,
    }
    return Centroids(**{**settings, **changes})


def patients(count, images=1):
    """Each of some digits of one class."""
    rows = [row for c in range(10) for row in _grouped([i for i in PRIVATE if DATA.target[i] == c], images)]
    chosen = [rows[i] for i in np.random.default_rng(5).permutation(len(rows))[:count]]
    return Cohort(
        tuple(
            Patient(f"p{n:05d}", tuple(Image(DIGITS[i], str(DATA.target[i])) for i in row))
            for n, row in enumerate(chosen)
        )
    )


def _grouped(rows, size):
    return [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]


def odd_ones():
    """Patients who try to move more than they may: far out, of many images, of many labels, of none."""
    rng = np.random.default_rng(3)
    far = [np.clip(rng.normal(0.5, 2.0, (8, 8)), 0, 1).astype(np.float32) for _ in range(6)]
    corners = [np.indices((8, 8)).sum(axis=0) % 2, np.arange(64).reshape(8, 8) > 31]
    wild = [(Image(p, "3"),) for p in (*far, *(c.astype(np.float32) for c in corners))]
    many = [tuple(Image(DIGITS[i], str(DATA.target[i])) for i in PRIVATE[s : s + 40]) for s in (0, 40, 80)]
    flat, unknown = Image(np.full((8, 8), 0.5, np.float32), "3"), Image(DIGITS[PRIVATE[0]], "unknown")
    everybody = [
        *wild,
        *many,
        (flat,),
        (unknown,),
        (flat, unknown),
        (far_image := Image(far[0], "3"), flat, far_image),
    ]
    return tuple(Patient(f"odd{n:03d}", images) for n, images in enumerate(everybody))


def queries(mechanism, cohort):
    """Both queries before their noise: counts (m, c), sums (m, q) in units of the radius."""
    latents, labels = mechanism._read(cohort, UnsafeSeededEntropy(0))
    placed = quantise(latents, mechanism.codebook)
    m = mechanism.codebook.cells
    return votes(placed, labels, m, len(mechanism.classes)), vector_sums(placed, m)


def farthest(ask, everybody):
    """The largest L2 distance, of counts and of sums, between the cohort and any of its neighbours."""
    whole = ask(Cohort(everybody))
    moved = []
    for i in range(len(everybody)):
        other = ask(Cohort(everybody[:i] + everybody[i + 1 :]))
        moved.append([float(np.linalg.norm(a - b)) for a, b in zip(whole, other, strict=True)])
    return np.max(moved, axis=0)


def must_be_bounded(ask, everybody):
    assert (farthest(ask, everybody) <= 1.0 + 1e-9).all()


EVERYBODY = (*odd_ones(), *patients(40, 3).patients)


# --- what one patient moves


def test_no_patient_moves_counts_or_sums_by_more_than_one_and_some_by_nearly_that():
    mechanism = made(images_per_patient=99)
    must_be_bounded(lambda cohort: queries(mechanism, cohort), EVERYBODY)
    counts, sums = farthest(lambda cohort: queries(mechanism, cohort), EVERYBODY)
    assert counts == 1.0
    assert 0.999 < sums <= 1.0
    joint = math.hypot(counts, sums)
    assert joint <= math.sqrt(2)


def test_a_patient_touches_one_cell_and_one_bin():
    mechanism = made(images_per_patient=99)
    whole = queries(mechanism, Cohort(EVERYBODY))
    for i in range(len(EVERYBODY)):
        other = queries(mechanism, Cohort(EVERYBODY[:i] + EVERYBODY[i + 1 :]))
        touched = np.flatnonzero(np.abs(whole[0] - other[0]).sum(axis=1))
        moved = np.flatnonzero(np.abs(whole[1] - other[1]).sum(axis=1) > 1e-12)
        assert len(touched) <= 1
        assert set(moved) <= set(touched)


def test_a_residual_that_is_not_clipped_is_seen(monkeypatch):
    monkeypatch.setattr(codebook, "_clipped", lambda residuals, radius: residuals / radius)
    mechanism = made(images_per_patient=99)
    with pytest.raises(AssertionError):
        must_be_bounded(lambda cohort: queries(mechanism, cohort), EVERYBODY)


def by_image(cohort):
    """Broken on purpose: every image a patient of its own."""
    return Cohort(
        tuple(
            Patient(f"{p.pseudonym}/{i:03d}", (image,)) for p in cohort.patients for i, image in enumerate(p.images)
        )
    )


@pytest.mark.parametrize("which", [0, 1], ids=["labels and cells counted by image", "vectors added by image"])
def test_images_that_count_as_patients_are_seen(which):
    mechanism = made()
    with pytest.raises(AssertionError):
        must_be_bounded(lambda cohort: (queries(mechanism, by_image(cohort))[which],), EVERYBODY)


def test_labels_counted_by_image_are_seen_even_where_cells_are_of_patients():
    mechanism = made(images_per_patient=99)

    def ask(cohort):
        latents, _ = mechanism._read(cohort, UnsafeSeededEntropy(0))
        cells = dict(zip(latents.patients, quantise(latents, mechanism.codebook).cells, strict=True))
        counts = np.zeros((CELLS, 10))
        for patient in cohort.patients:
            for image in patient.images:
                if patient.pseudonym in cells and image.label in CLASSES:
                    counts[cells[patient.pseudonym], CLASSES.index(image.label)] += 1.0
        return (counts,)

    with pytest.raises(AssertionError):
        must_be_bounded(ask, EVERYBODY)


class Crowded(Basis):
    """A codec whose codes depend on the images beside them, as a network's last digits do; here grossly."""

    def encode(self, images):
        return Basis.encode(self, images) + np.float32(len(images))


def test_the_codes_of_a_patient_do_not_depend_on_who_else_is_there():
    crowded = Crowded(BASIS.mean, BASIS.axes, BASIS.shape, "public")
    mechanism = made(codec=crowded, images_per_patient=99)
    must_be_bounded(lambda cohort: queries(mechanism, cohort), EVERYBODY)

    def together(cohort):  # broken on purpose: all images in one batch
        images = [image for patient in cohort.patients for image in patient.images]
        codes = crowded.encode(np.stack([image.pixels for image in images]))
        latents = Latents(codes, tuple(str(i) for i in range(len(images))))
        placed = quantise(latents, mechanism.codebook)
        return votes(placed, np.zeros(len(images), np.int64), CELLS, 10), vector_sums(placed, CELLS)

    singles = tuple(dataclasses.replace(p, images=p.images[:1]) for p in patients(60).patients)
    with pytest.raises(AssertionError):
        must_be_bounded(together, singles)


class Failing(Basis):
    """A codec that cannot invert one picture."""

    def encode(self, images):
        if any(np.array_equal(image, DIGITS[PRIVATE[0]]) for image in images):
            raise ValueError("the encoder gave a code that is not finite")
        return Basis.encode(self, images)


class Overflowing(Basis):
    def encode(self, images):
        codes = Basis.encode(self, images)
        return np.full_like(codes, np.inf) if np.array_equal(images[0], DIGITS[PRIVATE[0]]) else codes


@pytest.mark.parametrize("kind", [Failing, Overflowing])
def test_a_patient_who_cannot_be_inverted_adds_nothing_and_stops_nothing(kind):
    mechanism = made(codec=kind(BASIS.mean, BASIS.axes, BASIS.shape, "public"))
    bad = Patient("zz", (Image(DIGITS[PRIVATE[0]], "3"),))
    good = tuple(p for p in patients(50).patients if not np.array_equal(p.images[0].pixels, bad.images[0].pixels))
    with_, without = queries(mechanism, Cohort((*good, bad))), queries(mechanism, Cohort(good))
    assert all(np.array_equal(a, b) for a, b in zip(with_, without, strict=True))


def test_a_label_is_the_patients_majority_ties_by_the_order_of_the_classes():
    mechanism = made(classes=("b", "a"))
    pictures = [DIGITS[i] for i in PRIVATE[:6]]

    def label(*names):
        images = tuple(Image(pictures[n], name) for n, name in enumerate(names))
        return mechanism._images(Patient("p", images))

    assert label("a", "a", "b")[0] == 1
    assert label("a", "b")[0] == 0
    assert label("x", "x", "a")[0] == 1
    assert label("x", "x")[1] == []
    assert [image.label for image in label("a", "a", "b", "x")[1]] == ["a", "a"]


def test_of_many_images_so_many_are_drawn_at_random_and_each_as_often():
    mechanism = made(images_per_patient=2)
    images = [Image(DIGITS[i], "3") for i in PRIVATE[:6]]
    drawn = Counter()
    for seed in range(600):
        chosen = centroids._bounded(images, mechanism.images_per_patient, UnsafeSeededEntropy(seed))
        assert len(chosen) == len({id(image) for image in chosen}) == 2
        drawn.update(id(image) for image in chosen)
    assert stats.chisquare(list(drawn.values())).pvalue > 1e-4
    assert len(drawn) == 6


# --- the claim


def test_the_claim_is_of_both_queries_and_needs_no_data():
    mechanism = made()
    before = mechanism.claim()
    assert before == Composed((GaussianQuery(6.8, 1, 1), SubsampledGaussian(1.0, 4.5, 1)))
    assert not inspect.signature(mechanism.claim).parameters
    for cohort in (patients(900), patients(3)):
        with contextlib.suppress(NoCellError):
            mechanism.run(cohort, UnsafeSeededEntropy(0))
        assert mechanism.claim() == before


def test_the_noise_that_is_claimed_is_asked_for(monkeypatch):
    """P10: of the noise's own law test_noise knows; here, how much, on what, and nothing beside it."""
    asked = []

    def exact(total, sensitivity, noise_multiplier, entropy):
        asked.append((len(total), sensitivity, noise_multiplier))
        return total

    monkeypatch.setattr(centroids, "noisy_sum", exact)
    mechanism, cohort = made(k=11, margin=0.0), patients(900)
    synthetic = mechanism.run(cohort, UnsafeSeededEntropy(0))
    first, second = mechanism.claim().parts
    assert asked == [(CELLS * 10, 1.0, first.noise), (CELLS * DIMS, 1.0, second.noise_multiplier)]
    assert sorted(image.tobytes() for image in synthetic.images) == sorted(
        i.tobytes() for i in exact_means(cohort)[0]
    )


def exact_means(cohort):
    """Without the mechanism's code: pictures of the clipped means of all cells, and the cells' patients."""
    b = book()
    codes = np.stack([BASIS.encode(np.stack([i.pixels for i in p.images])).mean(axis=0) for p in cohort.patients])
    points = (codes.astype(np.float64) - b.mean) @ b.axes.T.astype(np.float64)
    far = ((points[:, None] - b.centres[None].astype(np.float64)) ** 2).sum(axis=2)
    cells = far.argmin(axis=1)
    residuals = points - b.centres[cells]
    norms = np.linalg.norm(residuals, axis=1, keepdims=True)
    residuals = residuals * np.minimum(1.0, b.radius / norms)
    counts = np.bincount(cells, minlength=b.cells)
    means = np.stack([b.centres[j] + residuals[cells == j].mean(axis=0) for j in range(b.cells)])
    return BASIS.decode((b.mean + means @ b.axes).astype(np.float32)), counts


@cache
def calibrated():
    return noises_for(1.0, 1e-5, 0.3)


def test_the_noises_for_an_epsilon_are_the_least_that_keep_to_it():
    counts, sums = calibrated()
    assert [1000 * noise == round(1000 * noise) for noise in (counts, sums)] == [True, True]
    claim = made(count_noise=counts, noise_multiplier=sums).claim()
    assert 0.999 < tight_epsilon([*claim.parts], 1e-5) <= 1.0
    sharper = made(count_noise=counts, noise_multiplier=sums - 0.001).claim()
    assert tight_epsilon([*sharper.parts], 1e-5) > 1.0
    assert (1 / counts**2) / (1 / counts**2 + 1 / sums**2) == pytest.approx(0.3, abs=0.002)


def test_the_closed_form_is_that_of_the_accountant_of_record():
    found = centroids._least_noise(0.5, 1e-5)
    assert 0.5 <= tight_epsilon([SubsampledGaussian(1.0, found, 1)], 1e-5) < 0.5003
    assert centroids._least_noise(1.0, 1e-5) == pytest.approx(3.73063, abs=1e-5)  # Balle & Wang 2018, algorithm 1


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (33.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_an_epsilon_or_delta_out_of_range_is_refused(epsilon, delta):
    with pytest.raises(ValueError, match="epsilon"):
        noises_for(epsilon, delta, 0.3)


def test_the_epsilons_of_the_note_come_out_again():
    for sigma, epsilon in ((4.0, 0.93), (5.0, 0.73)):
        each = sigma * math.sqrt(2)
        claim = made(count_noise=each, noise_multiplier=each).claim()
        assert tight_epsilon([*claim.parts], 1e-5) == pytest.approx(epsilon, abs=0.01)


@pytest.mark.parametrize("share", [0.0, 1.0, math.nan, -0.1])
def test_a_share_of_nothing_or_all_is_refused(share):
    with pytest.raises(ValueError, match="count_share"):
        noises_for(1.0, 1e-5, share)


# --- what is drawn


def test_the_same_randomness_gives_the_same_set_and_the_systems_another():
    mechanism, cohort = made(count_noise=1.0, margin=5.0), patients(600)
    once, again = (mechanism.run(cohort, UnsafeSeededEntropy(1)) for _ in range(2))
    assert once.images.tobytes() == again.images.tobytes()
    assert once.labels == again.labels
    system = [mechanism.run(cohort, SystemEntropy()).images.tobytes() for _ in range(2)]
    assert system[0] != system[1]
    assert (
        len({mechanism.run(cohort, UnsafeSeededEntropy(s)).labels for s in range(8)}) > 2
    )  # the order tells nothing


def test_a_mean_of_many_patients_comes_within_the_predicted_error_of_the_noise_free_one():
    """Axes are orthonormal: a picture is as far from its noise-free twin as their codes, but for clipping at 0, 1."""
    counts, sums = calibrated()
    mechanism = made(count_noise=counts, noise_multiplier=sums, classes=CLASSES, margin=0.0)
    cohort = patients(1497)
    exact, people = exact_means(cohort)
    b, errors, predicted = book(), [], []
    for seed in range(6):
        synthetic = mechanism.run(cohort, UnsafeSeededEntropy(seed))
        for image in synthetic.images:
            apart = np.linalg.norm((exact.astype(float) - image).reshape(len(exact), -1) / 255, axis=1)
            j = int(apart.argmin())
            errors.append(apart[j])
            predicted.append(Forecast(int(people[j]), 1, DIMS, sums, 0.0).error * b.radius)
    assert len(errors) == 6 * CELLS
    ratio = math.sqrt(np.mean(np.square(errors)) / np.mean(np.square(predicted)))
    assert 0.6 < ratio < 1.15  # some of it is cut off where pixels are black
    assert max(errors) < 2.32 * max(predicted)  # sqrt(chi^2_8's quantile at 1 - 1e-6, over 8)
    assert 2 * max(predicted) < b.radius / 3
    untouched = BASIS.decode(b.restored(b.centres.astype(np.float64)))
    far = np.linalg.norm((exact.astype(float) - untouched).reshape(CELLS, -1) / 255, axis=1)
    assert np.mean(errors) < np.mean(far)  # it tells more of the patients than the public centre does


def test_most_labels_are_those_of_most_of_the_cells_patients():
    mechanism, cohort = made(count_noise=2.0, margin=0.0), patients(1497)
    counts, _ = queries(mechanism, cohort)
    best = sorted(CLASSES[i] for i in counts.argmax(axis=1))
    found = Counter(mechanism.run(cohort, UnsafeSeededEntropy(0)).labels)
    assert sum((found & Counter(best)).values()) >= CELLS - 1


def test_whatever_the_noise_a_mean_stays_within_the_radius_of_its_centre():
    mechanism = made(count_noise=50.0, noise_multiplier=900.0, margin=0.0)
    seen = []

    class Watching(Basis):
        def decode(self, codes):
            seen.append(codes)
            return Basis.decode(self, codes)

    watched = dataclasses.replace(mechanism, codec=Watching(BASIS.mean, BASIS.axes, BASIS.shape, "public"))
    watched.run(patients(900), UnsafeSeededEntropy(0))
    b = book()
    points = (seen[0].astype(float) - b.mean) @ b.axes.T.astype(float)
    near = np.linalg.norm(points[:, None] - b.centres[None], axis=2).min(axis=1)
    assert near.max() <= b.radius * 1.001


def test_a_cell_of_fewer_than_k_patients_passes_at_most_one_time_in_a_hundred():
    k, cells, classes, noise, times = 11, 20, 3, 6.8, 4000
    margin = margin_for(cells, classes, noise)
    assert margin == math.ceil(stats.norm.isf(0.01 / cells) * noise * math.sqrt(classes)) == 39.0
    drawn = draw_gaussians(UnsafeSeededEntropy(0), times * cells * classes).reshape(times, cells, classes) * noise
    totals = (k - 1) + drawn.sum(axis=2)  # every cell as bad as can be
    missed = float((totals >= k + margin).any(axis=1).mean())
    assert missed <= 0.01 + 3 * math.sqrt(0.01 / times)
    assert missed > 0.003  # and the margin is not needlessly wide
    assert float((totals >= k).any(axis=1).mean()) > 0.99  # broken on purpose: no margin


def test_k_and_the_margin_decide_together(monkeypatch):
    monkeypatch.setattr(centroids, "noisy_sum", lambda total, *_: total)
    cohort = patients(900)
    counts, _ = queries(made(), cohort)
    sizes = sorted(counts.sum(axis=1))
    for least in (sizes[0], sizes[0] + 1, sizes[3], sizes[-1]):
        made_of = made(k=11, margin=float(least - 11)).run(cohort, UnsafeSeededEntropy(0))
        assert len(made_of.images) == sum(size >= least for size in sizes)
    with pytest.raises(NoCellError):
        made(k=11, margin=float(sizes[-1] - 10)).run(cohort, UnsafeSeededEntropy(0))


def test_a_cohort_of_nobody_and_one_of_a_few_are_refused_alike_and_without_numbers():
    said = set()
    for cohort in (Cohort(()), patients(1), patients(30)):
        with pytest.raises(CohortTooSmallError) as refusal:
            made().run(cohort, UnsafeSeededEntropy(0))
        said.add((type(refusal.value), str(refusal.value)))
    assert len(said) == 1
    assert not any(character.isdigit() for character in said.pop()[1])


def test_it_is_refused_by_noisy_counts_alone_so_nobody_at_all_may_pass():
    """A rule on the true number would tell whether there is a single patient."""
    passed = 0
    mechanism = made(margin=0.0, k=2)
    for seed in range(20):
        with contextlib.suppress(NoCellError):
            mechanism.run(Cohort(()), UnsafeSeededEntropy(seed))
            passed += 1
    assert passed > 0


def test_nothing_compares_pictures_with_patients():
    """P7: that reads patients again, and the claim covers two queries."""
    tree = ast.parse(Path(centroids.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {
        "agent.vetting.filter",
        "agent.mechanisms.anonfaces.gallery",
        "deploy.reproduction.attacks",
        "agent.evaluation",
    }
    names = {arg.arg for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for arg in node.args.args}
    drawn = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_drawn")
    assert "cohort" in names
    assert [arg.arg for arg in drawn.args.args] == ["self", "counts", "sums", "order"]


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="shape"):
        made().run(Cohort((Patient("p", (Image(np.eye(9, dtype=np.float32), "3"),)),)), UnsafeSeededEntropy(0))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"classes": ()}, "classes"),
        ({"classes": ("a", "a")}, "classes"),
        ({"classes": ("a", "")}, "classes"),
        ({"count_noise": 0.0}, "noise"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"k": 1}, "k"),
        ({"k": 11.0}, "k"),
        ({"margin": -1.0}, "margin"),
        ({"margin": math.nan}, "margin"),
        ({"margin": math.inf}, "margin"),
        ({"images_per_patient": 0}, "images_per_patient"),
        ({"codec": fit_basis(DIGITS[PUBLIC], 39, "public")}, "another encoder"),
    ],
)
def test_what_can_not_be_claimed_or_drawn_can_not_be_built(changes, why):
    with pytest.raises((ValueError, UnsupportedClaimError), match=why):
        made(**changes)


def test_it_is_frozen_and_its_form_is_of_everything_that_it_is():
    mechanism = made()
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.k = 7
    others = (
        *({"k": 12}, {"margin": 3.0}, {"count_noise": 7.0}, {"noise_multiplier": 5.0}, {"classes": CLASSES[:5]}),
        *({"images_per_patient": 1}, {"codebook": book(5)}),
    )
    forms = {mechanism.form, *(made(**changes).form for changes in others)}
    assert len(forms) == 1 + len(others)
    assert mechanism.form == made().form


# --- before anything is spent


def test_a_forecast_refuses_what_noise_would_drown_and_says_what_would_do():
    faint = Forecast(patients=2000, cells=40, dims=32, noise_multiplier=4.5, least=11.0)
    assert faint.cell == 50
    assert faint.error == pytest.approx(4.5 * math.sqrt(32) / 50)
    with pytest.raises(DrownedCountsError) as refusal:
        faint.demand()
    people, cells, dims = map(
        int, re.search(r"(\d+) patients, or (\d+) cells, or (\d+) dim", str(refusal.value)).groups()
    )
    for better, worse in (
        ({"patients": people}, {"patients": people - 1}),
        ({"cells": cells}, {"cells": cells + 1}),
        ({"dims": dims}, {"dims": dims + 1}),
    ):
        dataclasses.replace(faint, **better).demand()
        with pytest.raises(DrownedCountsError):
            dataclasses.replace(faint, **worse).demand()


def test_a_forecast_refuses_cells_that_an_average_one_would_not_pass():
    few = Forecast(patients=400, cells=10, dims=4, noise_multiplier=4.5, least=50.0)
    with pytest.raises(DrownedCountsError, match="k and the margin") as refusal:
        few.demand()
    people, cells = map(int, re.search(r"(\d+) patients, or (\d+) cells", str(refusal.value)).groups())
    assert (people, cells) == (500, 8)
    dataclasses.replace(few, patients=people).demand()
    dataclasses.replace(few, cells=cells).demand()


def test_the_forecast_knows_the_codebook_and_no_patient():
    forecast = made(margin=40.0).forecast(1200)
    assert forecast == Forecast(1200, CELLS, DIMS, 4.5, 51.0)
    assert list(inspect.signature(Centroids.forecast).parameters) == ["self", "public_patients"]


# --- the codebook


def test_a_codebook_survives_its_file_and_is_of_what_the_site_says():
    raw = fitted(BASIS.encode(DIGITS[PUBLIC]), (5, 4), codec_digest(BASIS), {}, np.random.default_rng(0))
    assert raw == fitted(BASIS.encode(DIGITS[PUBLIC]), (5, 4), codec_digest(BASIS), {}, np.random.default_rng(0))
    known, unknown = codebook_from(raw, "public"), codebook_from(raw, "file")
    assert known.origin == Origin("public", hashlib.sha256(raw).hexdigest())
    assert (known.cells, known.dims, known.mean.shape) == (5, 4, (40,))
    assert made(codebook=known).components() == {"encoder": "public", "generator": "public", "codebook": "public"}
    assert made(codebook=unknown).components()["codebook"] == "private"


def test_a_cell_is_the_nearest_centre_and_the_radius_holds_most_of_the_public():
    b, codes = book(), BASIS.encode(DIGITS[PUBLIC])
    placed = quantise(Latents(codes, tuple(str(i) for i in range(len(codes)))), b)
    points = (codes.astype(float) - b.mean) @ b.axes.T.astype(float)
    far = np.linalg.norm(points[:, None] - b.centres[None], axis=2)
    assert np.array_equal(placed.cells, far.argmin(axis=1))
    assert np.mean(far.min(axis=1) <= b.radius) == pytest.approx(0.95, abs=0.01)
    norms = np.linalg.norm(placed.residuals, axis=1)
    assert norms.max() <= 1.0
    inside = far.min(axis=1) < 0.99 * b.radius
    assert np.allclose(placed.residuals[inside] * b.radius, (points - b.centres[placed.cells])[inside], rtol=1e-5)
    assert np.allclose(b.projected(b.restored(points[:9])), points[:9], atol=1e-4)


def test_of_two_nearest_centres_the_first_is_taken_and_sums_are_plain_sums():
    eye = np.eye(2, dtype=np.float32)
    b = Codebook(np.zeros(2, np.float32), eye, np.array([[1, 0], [-1, 0]], np.float32), 2.0, "0" * 64, book().origin)
    codes = np.array([[0, 0], [0, 0], [9, 0], [-1, 1]], np.float32)
    placed = quantise(Latents(codes, tuple("abcd")), b)
    assert placed.cells.tolist() == [0, 0, 0, 1]
    assert np.allclose(placed.residuals, [[-0.5, 0], [-0.5, 0], [1, 0], [0, 0.5]], atol=1e-5)
    assert np.allclose(vector_sums(placed, 2), [[0, 0], [0, 0.5]], atol=1e-5)
    assert votes(placed, np.array([0, 1, 1, 0]), 2, 2).tolist() == [[1, 2], [1, 0]]
    nobody = Placed(np.empty(0, np.int64), np.empty((0, 2)))
    assert not vector_sums(nobody, 2).any()
    assert not votes(nobody, np.empty(0, np.int64), 2, 2).any()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mean": np.zeros(3, np.float32)}, "mean must be"),
        ({"axes": np.ones((2, 2), np.float32)}, "orthonormal"),
        ({"centres": np.zeros((1, 3), np.float32)}, "mean must be"),
        ({"centres": np.zeros((0, 2), np.float32)}, "cells"),
        ({"centres": np.zeros(2, np.float32)}, "mean must be"),
        ({"centres": np.full((1, 2), np.nan, np.float32)}, "finite"),
        ({"mean": np.zeros(2)}, "float32"),
        ({"radius": 0.0}, "radius"),
        ({"radius": math.nan}, "radius"),
        ({"codec": "x"}, "SHA-256"),
        ({"mean": np.zeros(40, np.float32), "axes": np.eye(40, dtype=np.float32)}, "mean must be"),
    ],
)
def test_arrays_that_are_no_codebook_are_refused(change, why):
    eye, centres = np.eye(2, dtype=np.float32), np.zeros((1, 2), np.float32)
    good = {"mean": np.zeros(2, np.float32), "axes": eye, "centres": centres, "radius": 1.0, "codec": "0" * 64}
    Codebook(**good, origin=book().origin)
    with pytest.raises(ValueError, match=why):
        Codebook(**{**good, **change}, origin=book().origin)


@pytest.mark.parametrize("sizes", [(31, 8), (0, 8), (5, 33), (5, 0), (5, 41)])
def test_sizes_that_the_pictures_do_not_bear_are_refused(sizes):
    with pytest.raises(ValueError, match="cells"):
        fitted(BASIS.encode(DIGITS[PUBLIC]), sizes, codec_digest(BASIS), {}, np.random.default_rng(0))


def test_public_codes_that_are_all_alike_or_broken_make_no_codebook():
    with pytest.raises(ValueError, match="all equal"):
        fitted(np.ones((50, 4), np.float32), (1, 2), "0" * 64, {}, np.random.default_rng(0))
    with pytest.raises(ValueError, match="finite"):
        fitted(np.full((50, 4), np.nan, np.float32), (1, 2), "0" * 64, {}, np.random.default_rng(0))


def test_a_file_that_is_no_codebook_is_refused():
    with pytest.raises(WeightsError):
        codebook_from(b"nothing", "public")
    with pytest.raises(WeightsError, match="codebook"):
        codebook_from(files()[0], "public")
    pack = codebook.pack
    tensors = {name: torch.from_numpy(getattr(book(), name).copy()) for name in ("mean", "axes", "centres")}
    config = {"radius": 1.0, "codec": "0" * 64}
    codebook_from(pack("codebook", config, {}, tensors), "public")
    for wrong in ({**config, "radius": "1"}, {**config, "more": 1}, {"radius": 1.0}, {**config, "radius": -1.0}):
        with pytest.raises(WeightsError):
            codebook_from(pack("codebook", wrong, {}, tensors), "public")
    for state in ({**tensors, "more": torch.zeros(1)}, {**tensors, "axes": torch.ones(2, 40)}):
        with pytest.raises(WeightsError):
            codebook_from(pack("codebook", config, {}, state), "public")


def test_a_codec_has_another_digest_when_anything_that_decides_a_code_is_another():
    other = dataclasses.replace(codec(), origins={**codec().origins, "encoder": Origin("public", "0" * 64)})
    digests = [codec_digest(c) for c in (codec(), other, dataclasses.replace(codec(), passes=3), BASIS)]
    assert len(set(digests)) == 4
    assert codec_digest(codec(vouched=False)) == digests[0]  # who vouches decides no code
    assert digests[3] == hashlib.sha256(save_basis(BASIS)).hexdigest()
    with pytest.raises(ValueError, match="without a digest"):
        codec_digest(object())


# --- configuration and command


@pytest.fixture
def folder(tmp_path):
    for name, raw in zip(("generator", "encoder", "codebook"), (*files(), centroids_codebook()), strict=True):
        (tmp_path / f"{name}.safetensors").write_bytes(raw)
    return tmp_path


def read(folder, text=CENTROIDS, vouch=True):
    (folder / "centroids.toml").write_text(text)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")]
    return read_centroids(folder / "centroids.toml", frozenset(digests if vouch else ()))


def test_a_configuration_is_read_with_its_networks_and_runs(folder):
    prepared = read(folder)
    mechanism = prepared.mechanism
    assert mechanism.claim() == Composed((GaussianQuery(7.0, 1, 1), SubsampledGaussian(1.0, 4.5, 1)))
    assert (mechanism.k, mechanism.margin, mechanism.shape) == (11, margin_for(3, 3, 7.0), (32, 32))
    assert set(mechanism.components().values()) == {"public"}
    assert prepared.selection.labels == {"0", "1", "2"}
    assert prepared.selection.fit
    assert mechanism.forecast(900).cell == 300
    assert all(isinstance(line, str) and line for line in prepared.told)
    assert set(read(folder, vouch=False).mechanism.components().values()) == {"private"}
    large = DIGITS.repeat(4, axis=1).repeat(4, axis=2)
    people = tuple(Patient(f"p{n:02d}", (Image(large[i], "1"),)) for n, i in enumerate(PRIVATE[:12]))
    quiet = dataclasses.replace(mechanism, count_noise=0.1, noise_multiplier=0.1, k=2, margin=0.0)
    synthetic = quiet.run(Cohort(people), UnsafeSeededEntropy(0))
    assert synthetic.images.shape[1:] == (32, 32)
    assert set(synthetic.labels) == {"1"}


def test_the_example_is_a_configuration(folder):
    text = (ROOT / "deploy/docs/centroids.example.toml").read_text()
    prepared = read(folder, text)
    told = [*prepared.mechanism.claim().parts]
    assert 0.99 < tight_epsilon(told, 1e-5) <= 1.0
    assert (told[0].noise, told[1].noise_multiplier) == calibrated()
    assert "epsilon 1 at delta 1e-05" in prepared.told[0]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("count_noise = 7\n", "", "either epsilon"),
        ("count_noise = 7\n", "count_noise = 7\nepsilon = 1\n", "either epsilon"),
        ("count_noise = 7\nnoise_multiplier = 4.5", "epsilon = 1", "either epsilon"),
        ("count_noise = 7\nnoise_multiplier = 4.5", "epsilon = 1\ndelta = 1e-2", "smaller than 1"),
        ("count_noise = 7\nnoise_multiplier = 4.5", "epsilon = 99\ndelta = 1e-5", "epsilon"),
        ("count_noise = 7", "count_noise = 0", "noise"),
        ("public_patients = 900", "public_patients = 50", "of the cells' radius"),
        ("public_patients = 900", "public_patients = 100", "k and the margin"),
        ("public_patients = 900", "public_patients = 0", "public_patients"),
        ("public_patients = 900", "", "public_patients: missing|cells: missing"),
        ('modality = "OP"', 'modality = "OP"\nlabels = ["7"]', "cohort.labels"),
        ('["0", "1", "2"]', '["0", "Ödem"]', "cells.classes: a label of the set is at most 32 plain characters"),
        ('["0", "1", "2"]', f'["{"x" * 33}"]', "cells.classes: a label of the set is at most 32 plain characters"),
        ('["0", "1", "2"]', f"{[str(n) for n in range(257)]}", "cells.classes: a set has at most 256"),
        ('"codebook.safetensors"', '""', "networks: codebook: must name"),
        ('"generator.safetensors"', r'"a\u0000b"', "networks: generator: must name"),
        ('mechanism = "centroids"', 'mechanism = "ksalsa"', "mechanism"),
        ('"generator.safetensors"', '"generator.safetensors"\npasses = 1', "number of passes"),
        ("[cells]", "[cells]\nmargin = -1", "margin"),
        ("[cells]", "[cells]\nunknown = 1", "unknown"),
        ("[cells]", "[more]\n[cells]", "unknown table: more"),
        ('encoder = "encoder.safetensors"\n', "", "encoder"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_is_priced(folder, old, new, why):
    assert old in CENTROIDS
    with pytest.raises(SiteConfigError, match=why):
        read(folder, CENTROIDS.replace(old, new))


def test_all_problems_are_told_at_once(folder):
    text = (
        CENTROIDS.replace("noise_multiplier = 4.5", "")
        .replace('modality = "OP"', "")
        .replace("[cells]", "[more]\n[cells]")
    )
    with pytest.raises(SiteConfigError) as refusal:
        read(folder, text)
    assert all(word in str(refusal.value) for word in ("unknown table: more", "modality", "either epsilon"))


def test_a_codebook_of_another_codec_or_none_is_refused(folder):
    raw = fitted(
        np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32),
        (2, 2),
        "0" * 64,
        {},
        np.random.default_rng(0),
    )
    (folder / FILE).write_bytes(raw)
    with pytest.raises(SiteConfigError, match="another encoder"):
        read(folder)
    (folder / FILE).write_bytes(files()[0])
    with pytest.raises(WeightsError, match="codebook"):
        read(folder)
    (folder / FILE).unlink()
    with pytest.raises(WeightsError, match=FILE):
        read(folder)


@pytest.fixture
def pictures(tmp_path):
    (tmp_path / "public").mkdir()
    for n, i in enumerate(PUBLIC[:40]):
        large = np.rint(DIGITS[i].repeat(4, axis=0).repeat(4, axis=1) * 255).astype(np.uint8)
        Picture.fromarray(large).save(tmp_path / "public" / f"{n:03d}.png")
    return tmp_path / "public"


def typed(capsys, folder, pictures, *more):
    order = ["train", "codebook", "--pictures", pictures, "--out", folder / "out"]
    networks = ["--generator", folder / "generator.safetensors", "--encoder", folder / "encoder.safetensors"]
    status = main([str(word) for word in (*order, *networks, *more)])
    return status, capsys.readouterr()


def test_a_codebook_is_made_of_a_folder_of_pictures_and_read_back(folder, pictures, capsys):
    status, said = typed(capsys, folder, pictures, "--cells", 3, "--dims", 3, "--json")
    assert status == 0
    raw = (folder / "out" / FILE).read_bytes()
    told = json.loads(said.out)
    expected = {"network": "codebook", "file": FILE, "sha256": hashlib.sha256(raw).hexdigest()}
    assert told == {**expected, "pictures": 40 - told["passed_over"], "passed_over": told["passed_over"]}
    assert said.err == ""
    found = codebook_from(raw, "file")
    assert (found.cells, found.dims, found.codec) == (3, 3, codec_digest(codec_as_read()))
    (folder / FILE).write_bytes(raw)
    assert read(folder).mechanism.codebook.cells == 3
    assert "__metadata__" in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert set(safetensors.torch.load(raw)) == {"mean", "axes", "centres"}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--cells", 5, "--dims", 3), "need 50 images, and there are"),
        (("--cells", 2, "--dims", 33), "1 to 32 dimensions"),
        (("--cells", 2, "--generator", "stylegan2-ada:nothing.pkl"), "get the SHA-256"),
        (("--cells", 2, "--encoder", ""), "needs an encoder"),
        (("--cells", 2, "--pictures", "nowhere"), "not a folder"),
    ],
)
def test_a_codebook_that_cannot_be_made_is_refused_with_what_to_change(folder, pictures, capsys, more, why):
    status, said = typed(capsys, folder, pictures, *more)
    assert status == 1
    assert why in re.sub(r"\s+", " ", said.err)
    assert not (folder / "out" / FILE).exists()
