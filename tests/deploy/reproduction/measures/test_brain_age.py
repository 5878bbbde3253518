"""The network of ages: its file, its training, and what de-facing does to a prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agent.errors import OtherRunError
from agent.models.training_loop import TrainingProgress, seeded
from agent.models.weights import Origin, WeightsError, pack
from deploy.reproduction.measures.brain_age_network import (
    PRESETS,
    AgeArchitecture,
    AgeNet,
    BrainAge,
    Scale,
    brain_age_bytes,
    brain_age_from,
    head_cube,
    predicted,
)
from deploy.reproduction.measures.brain_age_training import AgeConfig, Aged, absolute_error, train_brain_age
from tests.support import heads

SMALL = AgeArchitecture(side=16, width=0.125, groups=4)
CONFIG = AgeConfig(SMALL, steps=6, batch=4, checkpoint_every=1)


def toys(count: int, seed: int = 0) -> Aged:
    """Balls, the larger the older."""
    rng = np.random.default_rng(seed)
    years = rng.uniform(20, 90, count)
    away = np.sqrt(((np.indices((16, 16, 16)) - 7.5) ** 2).sum(axis=0))
    cubes = np.clip(3.0 + years[:, None, None, None] / 25 - away, 0, 1) * 0.8
    return Aged((cubes + rng.uniform(0, 0.05, cubes.shape)).astype(np.float32), years)


def network(seed: int = 0) -> BrainAge:
    with seeded(seed):
        return BrainAge(AgeNet(SMALL), Scale(55.0, 20.0), Origin("random", "0" * 64))


def test_the_paper_s_network_can_be_built() -> None:
    with torch.device("meta"):
        net = AgeNet(PRESETS["base128"])
    assert 33e6 < sum(p.numel() for p in net.parameters()) < 34e6  # a 3D ResNet-18 has 33 million


def test_a_prediction_depends_on_no_other_head() -> None:
    cubes = toys(6).cubes
    together = predicted(network(), cubes)
    apart = np.concatenate([predicted(network(), cube[None]) for cube in cubes])
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    assert not any(isinstance(m, torch.nn.BatchNorm3d) for m in network().net.modules())


@pytest.mark.parametrize(
    "told", [{"side": 8}, {"first": 4}, {"width": 0.0}, {"groups": 7}, {"extent_mm": 10.0}, {"stride": 0}]
)
def test_an_architecture_that_cannot_be_built_is_refused(told: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"."):
        replace(SMALL, **told)


def test_a_file_gives_the_same_network_back() -> None:
    net = network()
    raw = brain_age_bytes(net.net, net.scale, {"steps": 0})
    again = brain_age_from(raw, "public")
    cubes = toys(4).cubes
    assert (predicted(net, cubes) == predicted(again, cubes)).all()
    assert again.origin.component == "public"
    assert brain_age_bytes(again.net, again.scale, {"steps": 0}) == raw


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architecture": {"side": 16}, "scale": {"mean": 1.0, "deviation": 1.0}},
        {"architecture": 3, "scale": {"mean": 1.0, "deviation": 1.0}},
    ],
)
def test_another_file_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(WeightsError):
        brain_age_from(pack("brain_age", config, {}, network().net.state_dict()))
    with pytest.raises(WeightsError):
        brain_age_from(b"no network")


def test_heads_of_another_size_or_without_numbers_are_refused() -> None:
    cubes = toys(4).cubes
    with pytest.raises(ValueError, match="cubes are"):
        predicted(network(), cubes[:, :8])
    with pytest.raises(ValueError, match="cubes are"):
        predicted(network(), np.where(cubes > 0.5, np.float32("nan"), cubes))
    with pytest.raises(ValueError, match="not all the same"):
        Aged(cubes, np.full(4, 50.0))
    with pytest.raises(ValueError, match="another side"):
        train_brain_age(toys(4), AgeConfig(), Path("nowhere"))


def test_training_finds_the_age(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=60, batch=8, learning_rate=3e-3, checkpoint_every=60, shift=0)
    trained = brain_age_from(train_brain_age(toys(48), config, tmp_path))
    fresh = toys(24, seed=1)
    guessing = float(np.abs(fresh.years - fresh.years.mean()).mean())
    assert absolute_error(trained, fresh) < 0.5 * guessing
    assert absolute_error(network(), fresh) > 0.8 * guessing  # untrained it knows nothing


def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(progress: TrainingProgress) -> None:
        raise Killed

    whole = train_brain_age(toys(8), CONFIG, tmp_path / "whole")
    with pytest.raises(Killed):  # it is told of the last step, before that is kept
        train_brain_age(toys(8), CONFIG, tmp_path / "killed", kill)
    assert train_brain_age(toys(8), CONFIG, tmp_path / "killed") == whole
    assert train_brain_age(toys(8), replace(CONFIG, seed=1), tmp_path / "other") != whole
    with pytest.raises(OtherRunError):
        train_brain_age(toys(8, seed=3), CONFIG, tmp_path / "killed")


def cube_of(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    head = heads.true_head(0)
    return head_cube(replace(head.volume, values=values), head.brain.mask, head.brain.to_template, PRESETS["tiny32"])


def test_a_head_in_its_cube_keeps_its_brightness_whatever_its_face_does() -> None:
    head = heads.true_head(0)
    cube = cube_of(head.volume.values)
    assert cube.shape == (32, 32, 32)
    assert cube.dtype == np.float32
    assert 0.0 <= cube.min() < 0.05
    assert 0.9 < cube.max() <= 1.0
    # the brain's middle lies in the cube's, a little above
    assert 0.3 < cube[14:18, 14:18, 16:20].mean() < 0.8
    np.testing.assert_allclose(cube_of(head.volume.values * 3), cube, atol=2e-3)
    j = np.arange(head.volume.values.shape[1])[None, :, None]
    blind = np.where((j > 55) & ~head.brain.mask, 0, head.volume.values)
    other = cube_of(blind.astype(np.uint16))
    assert (other != cube).any()
    np.testing.assert_array_equal(other[:, :8], cube[:, :8])
    with pytest.raises(ValueError, match="no brain"):
        head_cube(head.volume, np.zeros_like(head.skin), head.brain.to_template, PRESETS["tiny32"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_age_of_made_heads_is_found_on_people_it_never_saw(tmp_path: Path) -> None:
    def group(numbers: range) -> Aged:
        cubes, years = [], []
        for number in numbers:
            scan = heads.phantoms().scan(number, 0, 4.0)
            cubes.append(head_cube(scan.volume, scan.brain, scan.to_template, PRESETS["tiny32"]))
            years.append(scan.age)
        return Aged(np.array(cubes), np.array(years))

    trained = brain_age_from(train_brain_age(group(range(160)), AgeConfig(steps=400), tmp_path))
    fresh = group(range(1000, 1040))
    guessing = float(np.abs(fresh.years - fresh.years.mean()).mean())
    assert absolute_error(trained, fresh) < 0.5 * guessing
