"""Pixel averages: of patients and not of pictures."""

import numpy as np
import pytest

from agent.domain import Clusters, Cohort, Image, Patient
from deploy.reproduction.averaging_methods import pixel_average


def _cohort(*images_of_each):
    return Cohort(
        tuple(Patient(f"p{i:03d}", tuple(Image(x, "") for x in own)) for i, own in enumerate(images_of_each))
    )


def _flat(*values, shape=(2, 3)):
    return [np.full(shape, v, np.float32) for v in values]


def test_the_pixel_average_is_the_mean_of_the_patients_mean_pictures():
    rng = np.random.default_rng(0)
    own = [[rng.random((4, 5), np.float32) for _ in range(n)] for n in (1, 3, 2, 1)]
    found = pixel_average(_cohort(*own), Clusters((("p002", "p000", "p001"), ("p003",))))
    wanted = (sum(own[0]) / 1 + sum(own[1]) / 3 + sum(own[2]) / 2) / 3
    assert np.array_equal(found[0], np.rint(wanted * 255).astype(np.uint8))
    assert np.array_equal(found[1], np.rint(own[3][0] * 255).astype(np.uint8))
    assert found.dtype == np.uint8


def test_a_patient_with_many_images_does_not_outweigh_the_others():
    found = pixel_average(_cohort(_flat(*[1.0] * 9), _flat(0.0)), Clusters((("p000", "p001"),)))
    assert set(np.unique(found)) == {128}  # 127.5, rounded to even


def test_colour_is_averaged_too():
    found = pixel_average(
        _cohort(_flat(0.2, shape=(2, 2, 3)), _flat(0.6, shape=(2, 2, 3))), Clusters((("p000", "p001"),))
    )
    assert found.shape == (1, 2, 2, 3)
    assert set(np.unique(found)) == {102}


@pytest.mark.parametrize("members", [(("p000", "zz"),), ((),), ()])
def test_a_stranger_nobody_and_no_cluster_have_no_pixel_average(members):
    with pytest.raises(ValueError, match="cluster"):
        pixel_average(_cohort(_flat(0.5)), Clusters(members))
