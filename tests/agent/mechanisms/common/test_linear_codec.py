"""Invert, average, decode: the linear generator and the aggregation of a cluster."""

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from agent.domain import Clusters, Cohort, Image, Latents, Patient
from agent.mechanisms.common.linear_codec import Basis, LinearBasisError, fit_basis, invert, load_basis, save_basis
from agent.microaggregation.aggregation import aggregate_labels, average, patient_label

DIGITS = (load_digits().images / 16).astype(np.float32)


def _cohort(*images_of_each):
    return Cohort(
        tuple(
            Patient(f"p{i:03d}", tuple(Image(pixels, label) for pixels, label in images))
            for i, images in enumerate(images_of_each)
        )
    )


def test_the_basis_is_that_of_scikit_learn_up_to_signs():
    basis = fit_basis(DIGITS[:300], 10, "public")
    oracle = PCA(10, svd_solver="full").fit(DIGITS[:300].reshape(300, 64))
    assert np.allclose(np.abs(np.sum(basis.axes * oracle.components_, axis=1)), 1, atol=1e-4)
    assert np.allclose(basis.mean, oracle.mean_, atol=1e-6)


def test_fitting_twice_gives_the_same_bytes():
    assert save_basis(fit_basis(DIGITS[:99], 9, "public")) == save_basis(fit_basis(DIGITS[:99], 9, "public"))


def test_a_full_basis_brings_every_image_back():
    basis = fit_basis(DIGITS, 60, "public")
    cohort = _cohort(*[[(DIGITS[i], "")] for i in range(20)])
    back = basis.decode(invert(cohort, basis).codes)
    assert np.abs(back - np.rint(DIGITS[:20] * 255.0)).max() <= 8


def test_a_patient_with_many_images_has_one_code_the_mean_of_theirs():
    basis = fit_basis(DIGITS, 12, "public")
    apart = invert(_cohort(*[[(DIGITS[i], "")] for i in range(3)]), basis).codes
    together = invert(_cohort([(DIGITS[i], "") for i in range(3)]), basis)
    assert together.codes.shape == (1, 12)
    assert np.allclose(together.codes[0], apart.mean(axis=0), atol=1e-5)


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="shape"):
        invert(_cohort([(np.zeros((4, 16), np.float32), "")]), fit_basis(DIGITS, 4, "public"))


def test_decoded_intensities_are_clipped_not_wrapped():
    basis = fit_basis(DIGITS, 4, "public")
    assert set(np.unique(basis.decode(np.full((2, 4), 1e6, np.float32)))) <= {0, 255} | set(
        np.rint(basis.mean * 255).astype(np.uint8)
    )


@given(st.integers(1, 40), st.sampled_from(["public", "private"]), st.integers(0, 99))
def test_a_basis_survives_its_bytes(d, provenance, seed):
    images = np.random.default_rng(seed).random((50, 7, 9), np.float32)
    basis = fit_basis(images, d, provenance)
    back = load_basis(save_basis(basis))
    assert (back.shape, back.provenance) == (basis.shape, provenance)
    assert np.array_equal(back.mean, basis.mean)
    assert np.array_equal(back.axes, basis.axes)


def _changed(**changes):
    arrays = safetensors.numpy.load(save_basis(fit_basis(DIGITS[:50], 3, "public")))
    arrays.update(changes)
    return safetensors.numpy.save({name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        save_basis(fit_basis(DIGITS[:50], 3, "public"))[:-1],
        save_basis(fit_basis(DIGITS[:50], 3, "public")) + b"\0",
        _changed(mean=None),
        _changed(more=np.zeros(1, np.float32)),
        _changed(mean=np.full(64, np.nan, np.float32)),
        _changed(mean=np.zeros(64, np.float64)),
        _changed(mean=np.zeros(63, np.float32)),
        _changed(components=np.zeros((3, 64), np.float32)),
        _changed(shape=np.array([64, 1, 1])),
        _changed(shape=np.array([-8, -8])),
        _changed(provenance=np.frombuffer(b"certified", np.uint8)),
        _changed(provenance=np.frombuffer(b"", np.uint8)),
    ],
)
def test_bytes_that_are_no_basis_are_refused(data):
    with pytest.raises(LinearBasisError):
        load_basis(data)


def test_an_origin_that_is_not_said_is_refused():
    basis = fit_basis(DIGITS[:50], 3, "private")
    with pytest.raises(LinearBasisError, match="provenance"):
        Basis(basis.mean, basis.axes, basis.shape, "")


@pytest.mark.parametrize(("n", "d"), [(5, 5), (5, 0), (100, 65)])
def test_too_few_images_for_the_components_are_refused(n, d):
    with pytest.raises(ValueError, match="components"):
        fit_basis(DIGITS[:n], d, "public")


def test_every_patient_weighs_the_same_in_the_average():
    latents = Latents(np.array([[0, 0], [2, 4], [10, 20]], np.float32), ("a", "b", "c"))
    codes = average(latents, Clusters((("b", "a"), ("c",))))
    assert codes.tolist() == [[1, 2], [10, 20]]


@pytest.mark.parametrize("members", [(("a", "zz"),), ((),)])
def test_a_cluster_that_names_a_stranger_or_nobody_is_refused(members):
    latents = Latents(np.zeros((1, 2), np.float32), ("a",))
    blank = Image(np.zeros((2, 2), np.float32), "x")
    with pytest.raises(ValueError, match="every cluster"):
        average(latents, Clusters(members))
    with pytest.raises(ValueError, match="every cluster"):
        aggregate_labels(Cohort((Patient("a", (blank,)),)), Clusters(members))


def test_a_patient_with_many_images_has_one_vote():
    blank = np.zeros((2, 2), np.float32)
    cohort = _cohort([(blank, "ill")] * 9, [(blank, "well")], [(blank, "well")])
    assert aggregate_labels(cohort, Clusters((("p000", "p001", "p002"),))) == ("well",)


@given(st.permutations(["b", "a", "b", "a", "c"]))
def test_ties_do_not_depend_on_who_holds_which_label(order):
    blank = np.zeros((2, 2), np.float32)
    cohort = _cohort(*[[(blank, label)] for label in order])
    assert aggregate_labels(cohort, Clusters((tuple(f"p{i:03d}" for i in range(5)),))) == ("a",)


def test_a_patients_label_is_that_of_most_of_their_images():
    blank = np.zeros((2, 2), np.float32)
    (patient,) = _cohort([(blank, "b"), (blank, "a"), (blank, "b")]).patients
    assert patient_label(patient) == "b"
