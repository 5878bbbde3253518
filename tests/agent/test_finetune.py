"""Patient-level DP-SGD: sensitivity, the emitted noise against its claimed law, and bugs it must catch."""

import dataclasses
import math
import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy

from agent.stages import finetune
from agent.stages.finetune import (
    PrivateSgd,
    SystemEntropy,
    Task,
    Unit,
    UnsuitableModel,
    chunked,
    gaussians,
    looped,
    train_privately,
    uniforms,
)
from tests.support.entropy import UnsafeSeededEntropy

JOB = PrivateSgd(sampling_rate=0.2, noise_multiplier=1.5, steps=3, clip=0.7, images_per_patient=4, expected_batch=4.0)


def _sgd(rate=1.0):
    return partial(torch.optim.SGD, lr=rate)


def _network(seed=0, padding_mode="reflect"):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, padding_mode=padding_mode),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.Conv2d(6, 4, 3, stride=2),
            nn.Flatten(),
            nn.Linear(36, 3),
        )


def _units(counts, seed=0, scale=10.0):
    rng = np.random.default_rng(seed)
    return [
        Unit(
            torch.tensor(rng.normal(size=(n, 1, 8, 8)) * scale, dtype=torch.float32),
            torch.tensor(rng.integers(0, 3, n)),
        )
        for n in counts
    ]


@pytest.mark.parametrize("engine", [looped, chunked(2)])
def test_removing_any_patient_moves_the_sum_by_at_most_the_clip(engine):
    # P2: ragged patients, explicit reflection, one patient with infinite pixels, one hugely scaled
    model, units = _network(), _units((1, 3, 9, 2, 5))
    units[3] = Unit(torch.full_like(units[3].images, math.inf), units[3].targets)
    units[4] = Unit(units[4].images * 1e12, units[4].targets)
    full = engine(model, cross_entropy, units, 0.7)
    assert torch.isfinite(full).all()
    moves = [float((full - engine(model, cross_entropy, units[:i] + units[i + 1 :], 0.7)).norm()) for i in range(5)]
    assert all(move <= 0.7 for move in moves)
    assert moves[3] == 0.0
    assert max(moves) > 0.69  # the clip binds, else this would prove nothing


def test_per_image_clipping_would_be_seen_red_by_that_test():
    # P2 broken on purpose: every image clipped by itself, sold as one patient
    model, (unit,) = _network(), _units((9,), scale=100.0)
    images = [Unit(unit.images[i : i + 1], unit.targets[:1]) for i in range(9)]
    assert float(looped(model, cross_entropy, images, 0.7).norm()) > 0.7


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=7), st.integers(0, 1000), st.sampled_from([0.1, 10.0, 1e4]))
def test_the_gpu_engine_equals_the_reference(counts, seed, scale):
    model, units = _network(seed, "zeros"), _units(counts, seed, scale)
    reference = looped(model, cross_entropy, units, 0.5)
    difference = (chunked(3)(model, cross_entropy, units, 0.5) - reference).abs().max()
    assert float(difference) <= 1e-5


def test_with_one_image_for_each_patient_the_sum_is_that_of_opacus():
    model, units = _network(1, "zeros"), _units([1] * 12, 1)
    ours = looped(model, cross_entropy, units, 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = GradSampleModule(model, loss_reduction="sum")
        images, targets = torch.cat([u.images for u in units]), torch.cat([u.targets for u in units])
        cross_entropy(wrapped(images), targets, reduction="sum").backward()
    rows = torch.cat([p.grad_sample.reshape(12, -1) for p in wrapped.parameters()], dim=1).double()
    factor = (0.3 / rows.norm(dim=1)).clamp(max=1.0)
    assert float(((rows * factor[:, None]).sum(dim=0) - ours).abs().max()) <= 1e-5
    assert float(rows.norm(dim=1).max()) > 0.3


class _Dirac(nn.Module):
    """A linear score: the gradient of a unit is the mean of its images, so tests can choose gradients."""

    def __init__(self, size):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, images):
        return images @ self.theta


def _mean(output, _):
    return output.mean()


class _Canaries:
    """Units on demand: canary i has gradient 3 C e_i. A list of them would not fit."""

    def __init__(self, coordinates, size, value):
        self._coordinates, self._size, self._value = coordinates, size, value

    def __len__(self):
        return len(self._coordinates)

    def __iter__(self):
        return (_Lazy(c, self._size, self._value) for c in self._coordinates)


class _Lazy:
    def __init__(self, coordinate, size, value):
        self._at, self._size, self._value = coordinate, size, value

    @property
    def images(self):
        image = torch.zeros(1, self._size, dtype=torch.float64)
        image[0, self._at] = self._value
        return image

    @property
    def targets(self):
        return torch.zeros(1)


SIZE, CLAIM = (
    5000,
    dataclasses.replace(
        JOB,
        sampling_rate=0.2,
        noise_multiplier=2.0,
        steps=12,
        clip=0.5,
        images_per_patient=1,
        expected_batch=100.0,
    ),
)


def _emitted(job, seed=0, entropy=None, engine=looped, canaries=SIZE // 20):
    """(SIZE,) minus the drift of theta in units of the clip, and which coordinates had a canary."""
    present = np.zeros(SIZE, bool)
    present[np.random.default_rng(seed).permutation(SIZE)[:canaries]] = True
    model = _Dirac(SIZE)
    units = _Canaries(np.flatnonzero(present), SIZE, 3.0 * CLAIM.clip)
    entropy = UnsafeSeededEntropy(seed) if entropy is None else entropy
    train_privately(Task(model, _mean, _sgd()), units, job, entropy, engine)
    return -model.theta.detach().numpy() * CLAIM.expected_batch / CLAIM.clip, present


def _p_value(x, present):
    """Two-sided test of the exact law: out N(0, T s^2), in Bin(T, q) + N(0, T s^2); Bonferroni over four."""
    q, steps, sigma = CLAIM.sampling_rate, CLAIM.steps, CLAIM.noise_multiplier
    variance = steps * sigma**2
    inside, outside = x[present], x[~present]
    p = [stats.kstest(outside / math.sqrt(variance), "norm").pvalue]
    below = stats.chi2.cdf((outside**2).sum() / variance, len(outside))
    p.append(2 * min(below, 1 - below))
    p.append(2 * stats.norm.sf(abs(outside.mean()) / math.sqrt(variance / len(outside))))
    if len(inside):
        spread = math.sqrt((variance + steps * q * (1 - q)) / len(inside))
        p.append(2 * stats.norm.sf(abs(inside.mean() - steps * q) / spread))
    return min(1.0, 4 * min(p))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_emitted_noise_obeys_the_claimed_law(seed):
    assert _p_value(*_emitted(CLAIM, seed)) > 1e-3


def test_the_emitted_noise_of_the_systems_generator_obeys_the_claimed_law():
    # a correct engine fails one time in a million
    assert _p_value(*_emitted(CLAIM, 1, SystemEntropy())) > 1e-6


class _SameEveryStep(UnsafeSeededEntropy):
    def take(self, count):
        return np.random.default_rng(count).bytes(count)


def _no_clip(model, loss, units, clip):
    return looped(model, loss, units, 1e9)


def test_halved_noise_is_caught():  # P10 broken on purpose, here and below
    assert _p_value(*_emitted(dataclasses.replace(CLAIM, noise_multiplier=1.0))) < 1e-3


def test_a_tenth_of_missing_noise_is_caught():
    assert _p_value(*_emitted(dataclasses.replace(CLAIM, noise_multiplier=1.8))) < 1e-3


def test_missing_noise_is_caught(monkeypatch):
    monkeypatch.setattr(finetune, "gaussians", lambda entropy, count: np.zeros(count))
    assert _p_value(*_emitted(CLAIM)) < 1e-3


def test_a_missing_clip_is_caught():
    assert _p_value(*_emitted(CLAIM, engine=_no_clip)) < 1e-3


def test_the_same_seed_in_each_step_is_caught():
    assert _p_value(*_emitted(CLAIM, entropy=_SameEveryStep(0))) < 1e-3


def test_skipped_empty_batches_are_caught(monkeypatch):
    honest = finetune._noisy
    monkeypatch.setattr(finetune, "_noisy", lambda total, job, e: honest(total, job, e) if total.any() else total)
    assert _p_value(*_emitted(CLAIM, canaries=5)) < 1e-3


def test_empty_batches_are_steps_with_noise():
    assert _p_value(*_emitted(CLAIM, canaries=0)) > 1e-3


def test_the_released_sum_lies_on_the_lattice():
    total = np.random.default_rng(0).normal(size=4001)
    noisy, grid = finetune._noisy(total, JOB, UnsafeSeededEntropy(0)), JOB.clip * finetune.GRID
    assert np.array_equal(noisy, np.rint(noisy / grid) * grid)


def test_the_noise_covers_what_rounding_adds_to_the_sensitivity(monkeypatch):
    monkeypatch.setattr(finetune, "gaussians", lambda entropy, count: np.ones(count))
    grid, d = JOB.clip * finetune.GRID, 40_000
    (deviation,) = set(finetune._noisy(np.zeros(d), JOB, UnsafeSeededEntropy(0)).tolist())
    assert deviation >= JOB.noise_multiplier * (JOB.clip + grid * math.sqrt(d)) - grid
    assert deviation > JOB.noise_multiplier * JOB.clip


def test_normals_have_tails_and_no_memory():
    z = gaussians(UnsafeSeededEntropy(0), 200_001)
    assert z.shape == (200_001,)
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(z[:100_000], z[100_001:])[0, 1]) < 0.015  # the two halves of Box-Muller


class _Zeros:
    def take(self, count):
        return bytes(count)


class _Ones:
    def take(self, count):
        return b"\xff" * count


@pytest.mark.parametrize("entropy", [_Zeros(), _Ones()])
def test_the_extreme_uniforms_give_finite_normals(entropy):
    assert np.isfinite(gaussians(entropy, 6)).all()
    assert (uniforms(entropy, 3) < 1).all()


def _drawn(units, job, entropy):
    """The batches that the engine was given, step by step."""
    seen = []

    def spy(model, loss, batch, clip):
        seen.append(batch)
        return looped(model, loss, batch, clip)

    train_privately(Task(_Dirac(2), _mean, _sgd()), units, job, entropy, spy)
    return seen


def _numbered(count, images=1):
    return [
        Unit(torch.tensor([[i, j] for j in range(images)], dtype=torch.float64), torch.zeros(images))
        for i in range(count)
    ]


def test_patients_are_drawn_independently_with_the_claimed_probability():
    steps, patients, q = 2000, 12, 0.3
    job = dataclasses.replace(JOB, sampling_rate=q, steps=steps)
    batches = _drawn(_numbered(patients), job, UnsafeSeededEntropy(4))
    each = Counter(int(unit.images[0, 0]) for batch in batches for unit in batch)
    assert all(stats.binomtest(each[i], steps, q).pvalue > 1e-4 for i in range(patients))
    sizes = np.bincount([len(batch) for batch in batches], minlength=patients + 1)
    expected = stats.binom.pmf(np.arange(patients + 1), patients, q) * steps
    common = expected > 5
    observed = np.append(sizes[common], sizes[~common].sum())
    assert stats.chisquare(observed, np.append(expected[common], expected[~common].sum())).pvalue > 1e-3


def test_at_most_the_agreed_number_of_images_is_used_and_each_as_often_as_the_others():
    job = dataclasses.replace(JOB, sampling_rate=1.0, steps=1500, images_per_patient=3)
    batches = _drawn(_numbered(1, images=7), job, UnsafeSeededEntropy(4))
    used = Counter(int(j) for (unit,) in batches for j in unit.images[:, 1])
    assert all(len(unit.images) == len(set(unit.images[:, 1].tolist())) == 3 for (unit,) in batches)
    assert stats.chisquare([used[j] for j in range(7)]).pvalue > 1e-3


def test_the_divisor_is_the_public_constant_whatever_the_number_of_patients():
    # P10: a divisor that follows N tells neighbours apart
    def step(count):
        model = _Dirac(2)
        unit = Unit(torch.tensor([[0.1, 0.0]], dtype=torch.float64), torch.zeros(1))
        job = dataclasses.replace(JOB, sampling_rate=1.0, steps=1, noise_multiplier=1e-9)
        train_privately(Task(model, _mean, _sgd()), [unit] * count, job, UnsafeSeededEntropy(0))
        return -float(model.theta.detach()[0])

    assert [round(step(n), 5) for n in (1, 2, 40)] == [0.025, 0.05, 1.0]


def test_the_same_entropy_gives_the_same_weights_and_nothing_but_the_steps_comes_out():
    def run(seed):
        model = _network(0)
        steps = train_privately(
            Task(model, cross_entropy, _sgd(0.1)), _units((1, 2, 3)), JOB, UnsafeSeededEntropy(seed)
        )
        assert steps == JOB.steps
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_torchs_global_seed_is_neither_used_nor_moved():
    def run():
        model = _Dirac(9)
        train_privately(Task(model, _mean, _sgd()), [], JOB, SystemEntropy())
        return model.theta.detach()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = run()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)
    assert not torch.equal(first, run())


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4),
        nn.LazyBatchNorm1d(),
        nn.SyncBatchNorm(4),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, track_running_stats=True),
    ],
)
def test_layers_that_mix_or_remember_patients_are_refused(layer):
    with pytest.raises(UnsuitableModel, match="GroupNorm"):
        train_privately(Task(nn.Sequential(layer), _mean, _sgd()), [], JOB, UnsafeSeededEntropy(0))


def test_instance_norm_without_memory_is_allowed():
    finetune.refuse_batch_statistics(nn.Sequential(nn.InstanceNorm2d(4), nn.GroupNorm(2, 4)))


class _Remembers(_Dirac):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("seen", torch.zeros(size, dtype=torch.float64))

    def forward(self, images):
        self.seen += images.sum(dim=0)
        return super().forward(images)


def test_a_buffer_that_training_changed_is_refused():
    job = dataclasses.replace(JOB, sampling_rate=1.0)
    with pytest.raises(UnsuitableModel, match="buffer"):
        train_privately(Task(_Remembers(2), _mean, _sgd()), _numbered(3), job, UnsafeSeededEntropy(0))


def test_a_model_without_parameters_is_refused():
    with pytest.raises(UnsuitableModel, match="no parameter"):
        train_privately(Task(nn.Flatten(), _mean, _sgd()), [], JOB, UnsafeSeededEntropy(0))


def test_frozen_parameters_stay_and_unused_ones_only_get_noise():
    model = _network(0)
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    train_privately(Task(model, cross_entropy, _sgd()), _units((2, 1)), JOB, UnsafeSeededEntropy(0))
    assert torch.equal(frozen, model[0].weight)


def test_a_fault_in_the_middle_is_passed_on():
    def broken(output, targets):
        raise ArithmeticError("no loss")

    job = dataclasses.replace(JOB, sampling_rate=1.0)
    with pytest.raises(ArithmeticError):
        train_privately(Task(_Dirac(2), broken, _sgd()), _numbered(2), job, UnsafeSeededEntropy(0))


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"clip": math.nan},
        {"clip": 0.0},
        {"sampling_rate": 1.1},
        {"sampling_rate": math.nan},
        {"steps": 0},
        {"images_per_patient": 0},
        {"expected_batch": math.inf},
    ],
)
def test_a_job_without_noise_or_bound_can_not_be_built(change):
    with pytest.raises(ValueError, match="must"):
        dataclasses.replace(JOB, **change)
