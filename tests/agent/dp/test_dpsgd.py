"""Patient-level DP-SGD: the emitted noise against its claimed law, sampling, going on after a kill, and bugs."""

import dataclasses
import math
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from agent.dp import dpsgd, noise
from agent.dp.clipping import PrivacyUnit, UnsuitableModelError, bookkeeping_engine, loop_engine, vmap_engine
from agent.dp.dpsgd import (
    CHECKPOINT_EVERY,
    PrivateSgd,
    SecureSumGrid,
    TrainingTask,
    best_engine,
    noisy_part,
    train_privately,
)
from agent.dp.noise import SystemEntropy
from agent.errors import DivergedError, OtherRunError, TrainingCheckpointError
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.families import classified, convolutions

JOB = PrivateSgd(sampling_rate=0.2, noise_multiplier=1.5, steps=3, clip=0.7, images_per_patient=4, expected_batch=4.0)


def _sgd(rate=1.0):
    return partial(torch.optim.SGD, lr=rate)


class _Dirac(nn.Module):
    """A linear score: the gradient of a unit is the mean of its images, so tests can choose gradients."""

    def __init__(self, size):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, images):
        return images @ self.theta


def _score(model, rows):
    return model(rows[0])


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

    def __len__(self):
        return 1

    @property
    def rows(self):
        image = torch.zeros(1, self._size, dtype=torch.float64)
        image[0, self._at] = self._value
        return (image,)


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


def _emitted(job, seed=0, entropy=None, engine=loop_engine, canaries=SIZE // 20):
    """(SIZE,) minus the drift of theta in units of the clip, and which coordinates had a canary."""
    present = np.zeros(SIZE, bool)
    present[np.random.default_rng(seed).permutation(SIZE)[:canaries]] = True
    model = _Dirac(SIZE)
    units = _Canaries(np.flatnonzero(present), SIZE, 3.0 * CLAIM.clip)
    entropy = UnsafeSeededEntropy(seed) if entropy is None else entropy
    train_privately(TrainingTask(model, _score, _sgd()), units, job, entropy, engine)
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
    return loop_engine(model, loss, units, 1e9)


def test_halved_noise_is_caught():  # P10 broken on purpose, here and below
    assert _p_value(*_emitted(dataclasses.replace(CLAIM, noise_multiplier=1.0))) < 1e-3


def test_a_tenth_of_missing_noise_is_caught():
    assert _p_value(*_emitted(dataclasses.replace(CLAIM, noise_multiplier=1.8))) < 1e-3


def test_missing_noise_is_caught(monkeypatch):
    monkeypatch.setattr(noise, "draw_gaussians", lambda entropy, count: np.zeros(count))
    assert _p_value(*_emitted(CLAIM)) < 1e-3


def test_a_missing_clip_is_caught():
    assert _p_value(*_emitted(CLAIM, engine=_no_clip)) < 1e-3


def test_the_same_seed_in_each_step_is_caught():
    assert _p_value(*_emitted(CLAIM, entropy=_SameEveryStep(0))) < 1e-3


def test_skipped_empty_batches_are_caught(monkeypatch):
    honest = dpsgd.noisy_sum
    monkeypatch.setattr(dpsgd, "noisy_sum", lambda total, *told: honest(total, *told) if total.any() else total)
    assert _p_value(*_emitted(CLAIM, canaries=5)) < 1e-3


def test_empty_batches_are_steps_with_noise():
    assert _p_value(*_emitted(CLAIM, canaries=0)) > 1e-3


def _drawn(units, job, entropy):
    """The batches that the engine was given, step by step."""
    seen = []

    def spy(model, loss, batch, clip):
        seen.append(batch)
        return loop_engine(model, loss, batch, clip)

    train_privately(TrainingTask(_Dirac(2), _score, _sgd()), units, job, entropy, spy)
    return seen


def _numbered(count, images=1):
    return [PrivacyUnit((torch.tensor([[i, j] for j in range(images)], dtype=torch.float64),)) for i in range(count)]


def test_patients_are_drawn_independently_with_the_claimed_probability():
    steps, patients, q = 2000, 12, 0.3
    job = dataclasses.replace(JOB, sampling_rate=q, steps=steps)
    batches = _drawn(_numbered(patients), job, UnsafeSeededEntropy(4))
    each = Counter(int(unit.rows[0][0, 0]) for batch in batches for unit in batch)
    assert all(stats.binomtest(each[i], steps, q).pvalue > 1e-4 for i in range(patients))
    sizes = np.bincount([len(batch) for batch in batches], minlength=patients + 1)
    expected = stats.binom.pmf(np.arange(patients + 1), patients, q) * steps
    common = expected > 5
    observed = np.append(sizes[common], sizes[~common].sum())
    assert stats.chisquare(observed, np.append(expected[common], expected[~common].sum())).pvalue > 1e-3


def test_at_most_the_agreed_number_of_images_is_used_and_each_as_often_as_the_others():
    job = dataclasses.replace(JOB, sampling_rate=1.0, steps=1500, images_per_patient=3)
    batches = _drawn(_numbered(1, images=7), job, UnsafeSeededEntropy(4))
    used = Counter(int(j) for (unit,) in batches for j in unit.rows[0][:, 1])
    assert all(len(unit) == len(set(unit.rows[0][:, 1].tolist())) == 3 for (unit,) in batches)
    assert stats.chisquare([used[j] for j in range(7)]).pvalue > 1e-3


def test_the_same_entropy_gives_the_same_weights_and_nothing_but_the_steps_comes_out():
    def run(seed):
        found = convolutions()
        model = found.model
        steps = train_privately(
            TrainingTask(model, classified, _sgd(0.1)), found.units((1, 2, 3)), JOB, UnsafeSeededEntropy(seed)
        )
        assert steps == JOB.steps
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_two_runs_with_the_same_seed_everywhere_have_different_noise():
    def run():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        model = _Dirac(9)
        train_privately(TrainingTask(model, _score, _sgd()), [], JOB, SystemEntropy())
        assert torch.equal(before, torch.get_rng_state())  # nor is it moved
        return model.theta.detach()

    assert not torch.equal(run(), run())


class _Recorder:
    """A follower that keeps what it sees, and an average of it."""

    def __init__(self, model):
        self.model, self.steps, self.seen = model, [], []
        self.mean = torch.zeros_like(next(model.parameters()))

    def after(self, step):
        self.steps.append(step)
        self.seen.append(next(self.model.parameters()).detach().clone())
        self.mean.lerp_(self.seen[-1], 0.1)

    def state(self):
        return {"mean": self.mean}

    def restore(self, state):
        self.mean = state["mean"].clone()


def _increments(entropy, size=4000, steps=4):
    model = _Dirac(size)
    follower = _Recorder(model)
    job = dataclasses.replace(JOB, steps=steps, expected_batch=1.0)
    train_privately(TrainingTask(model, _score, _sgd(), follower=follower), [], job, entropy)
    assert follower.steps == list(range(1, steps + 1))
    return np.diff(np.stack([np.zeros(size), *(seen.numpy() for seen in follower.seen)]), axis=0) / (1.5 * 0.7)


def _dependence(noise):
    """The smallest p-value for no correlation between two steps, Bonferroni over the pairs."""
    pairs = [(i, j) for i in range(len(noise)) for j in range(i)]
    return len(pairs) * min(stats.pearsonr(noise[i], noise[j]).pvalue for i, j in pairs)


def test_the_noise_of_each_step_is_standard_and_independent_of_the_others():
    steps = _increments(SystemEntropy())
    assert min(stats.kstest(x, "norm").pvalue for x in steps) > 1e-6
    assert _dependence(steps) > 1e-6
    assert _dependence(_increments(_SameEveryStep(0)) + 1e-9 * np.random.default_rng(0).normal(size=(4, 4000))) < 1e-6


def _slopes(job_of):
    """The gradient that one patient's 0.1 becomes, in a batch of 1, 2, 40: less noise than counts."""
    slopes = []
    for count in (1, 2, 40):
        model = _Dirac(2)
        unit = PrivacyUnit((torch.tensor([[0.1, 0.0]], dtype=torch.float64),))
        train_privately(TrainingTask(model, _score, _sgd()), [unit] * count, job_of(count), UnsafeSeededEntropy(0))
        slopes.append(round(-float(model.theta.detach()[0]) / count, 5))
    return slopes


def test_the_divisor_is_the_public_constant_whatever_the_number_of_patients():
    # P10: a divisor that follows N tells neighbours apart
    quiet = dataclasses.replace(JOB, sampling_rate=1.0, steps=1, noise_multiplier=1e-9)
    assert _slopes(lambda count: quiet) == [0.025, 0.025, 0.025]
    broken = _slopes(lambda count: dataclasses.replace(quiet, expected_batch=float(count)))
    assert len(set(broken)) == 3


def test_the_optimiser_sees_noisy_gradients_only():
    raw, seen = [], []

    def spy(model, loss, batch, clip):
        raw.append(loop_engine(model, loss, batch, clip))
        return raw[-1].clone()

    class Sees(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(torch.cat([p.grad.reshape(-1) for g in self.param_groups for p in g["params"]]))
            return super().step(closure)

    found = convolutions()
    for p in found.model.parameters():
        p.grad = torch.full_like(p, math.nan)  # left over from another training
    job = dataclasses.replace(JOB, sampling_rate=1.0, steps=4)
    train_privately(
        TrainingTask(found.model, classified, partial(Sees, lr=0.1)),
        found.units((1, 2, 3)),
        job,
        SystemEntropy(),
        spy,
    )
    for clean, noisy in zip(raw, seen, strict=True):
        noise = (noisy.double() * job.expected_batch - clean) / (1.5 * 0.7)
        assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-6


def test_each_unit_is_expanded_by_itself_after_its_images_were_chosen():
    asked = []

    def expand(unit):
        asked.append(len(unit))
        return PrivacyUnit(tuple(row.repeat_interleave(3, dim=0) for row in unit.rows))

    batches = []

    def spy(model, loss, batch, clip):
        assert len(batch) == len(batch[1:]) + 1
        batches.append([len(unit) for unit in batch])
        return loop_engine(model, loss, [], clip)

    job = dataclasses.replace(JOB, sampling_rate=1.0, steps=2, images_per_patient=4)
    task = TrainingTask(_Dirac(2), _score, _sgd(), expand)
    train_privately(task, [*_numbered(1, 7), *_numbered(1, 2)], job, UnsafeSeededEntropy(0), spy)
    assert batches == [[12, 6], [12, 6]]
    assert asked == [4, 2, 4, 2]


def _listed(model, loss, units, clip):
    return loop_engine(model, loss, list(units), clip)


@pytest.mark.parametrize("engine", [loop_engine, vmap_engine(2), bookkeeping_engine(2), _listed])
def test_a_unit_that_cannot_be_expanded_ends_the_training_and_not_the_batch(engine):
    # Sequence.__iter__ takes an IndexError for the end: all patients behind would be left out, and nobody would know
    def expand(unit):
        if unit is units[1]:
            raise IndexError("index 11 is out of bounds")
        return unit

    found = convolutions()
    units = found.units((1, 2, 1))
    job = dataclasses.replace(JOB, sampling_rate=1.0, steps=1)
    with pytest.raises(IndexError, match="index 11"):
        train_privately(
            TrainingTask(found.model, classified, _sgd(), expand), units, job, UnsafeSeededEntropy(0), engine
        )


def test_an_engine_that_gives_another_length_is_not_trained_with():
    with pytest.raises((ValueError, RuntimeError)):
        train_privately(
            TrainingTask(_Dirac(3), _score, _sgd()),
            [],
            JOB,
            SystemEntropy(),
            lambda *_: torch.zeros(2, dtype=torch.float64),
        )


class _Numbered:
    """Entropy whose take number i can be drawn again: a step takes four times here."""

    def __init__(self, begin=0):
        self.next = begin

    def take(self, count):
        self.next += 1
        return np.random.default_rng(self.next).bytes(count)


class _Memory:
    def __init__(self):
        self.data, self.writes = None, 0

    def read(self):
        return self.data

    def write(self, data):
        self.data, self.writes = data, self.writes + 1


class _Killed(BaseException):
    pass


def _killed_after(steps):
    left = [steps]

    def engine(*told):
        left[0] -= 1
        if left[0] < 0:
            raise _Killed
        return loop_engine(*told)

    return engine


LONG = dataclasses.replace(JOB, steps=60, sampling_rate=0.5)


def _long(entropy, engine=loop_engine, place=None, job=LONG, run="r" * 64, say=lambda _: None):
    found = convolutions()
    follower = _Recorder(found.model)
    task = TrainingTask(found.model, classified, partial(torch.optim.Adam, lr=0.01), follower=follower)
    train_privately(task, found.units((1, 2, 3)), job, entropy, engine, place=place, run=run, say=say)
    return torch.cat([p.detach().reshape(-1) for p in found.model.parameters()]), follower


def test_a_job_that_was_killed_goes_on_at_its_checkpoint_to_the_same_end():
    whole, followed = _long(_Numbered())
    place, said = _Memory(), []
    with pytest.raises(_Killed):
        _long(_Numbered(), _killed_after(57), place)
    assert place.writes == 2  # at 25 and 50
    weights, follower = _long(_Numbered(50 * 4), loop_engine, place, say=said.append)
    assert torch.equal(weights, whole)  # moments and weights are those of one unbroken path
    assert follower.steps == list(range(51, 61))
    assert torch.equal(follower.mean, followed.mean)
    assert [(p.step, p.steps, dict(p.losses)) for p in said] == [(60, 60, {})]
    again, _ = _long(_Numbered(), _killed_after(0), place)  # through already: nothing is computed or drawn
    assert torch.equal(again, whole)


def test_the_steps_that_a_kill_lost_are_taken_again_with_fresh_noise():
    place = _Memory()
    with pytest.raises(_Killed):
        _long(SystemEntropy(), _killed_after(30), place)
    kept = place.data
    one, _ = _long(SystemEntropy(), loop_engine, place)
    place.data = kept
    two, _ = _long(SystemEntropy(), loop_engine, place)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("kills", [1, 3])
def test_a_job_that_was_killed_emits_the_noise_of_its_steps_and_no_more(kills):
    job, place, model = dataclasses.replace(JOB, steps=40, expected_batch=1.0), _Memory(), None
    for engine in (*[_killed_after(30)] * kills, loop_engine):
        model = _Dirac(2000)
        task = TrainingTask(model, _score, _sgd())
        try:
            train_privately(task, [], job, SystemEntropy(), engine, place=place, run="x")
        except _Killed:
            continue
    noise = model.theta.detach().numpy() / (1.5 * 0.7 * math.sqrt(40))
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    below = stats.chi2.cdf((noise**2).sum(), 2000)
    assert 1e-6 < below < 1 - 1e-6


@pytest.mark.parametrize("change", [{"noise_multiplier": 1.4}, {"steps": 61}, {"sampling_rate": 0.4}, {"steps": 20}])
def test_a_checkpoint_of_a_job_with_other_constants_is_refused(change):
    # another sigma for the first steps than for the rest is a claim that nobody made
    place = _Memory()
    _long(_Numbered(), loop_engine, place)
    with pytest.raises(OtherRunError):
        _long(_Numbered(), loop_engine, place, dataclasses.replace(LONG, **change))


def test_a_checkpoint_of_another_run_or_model_or_a_damaged_one_is_refused():
    place = _Memory()
    _long(_Numbered(), loop_engine, place)
    with pytest.raises(OtherRunError):
        _long(_Numbered(), loop_engine, place, run="s" * 64)
    with pytest.raises(TrainingCheckpointError):
        train_privately(
            TrainingTask(_Dirac(3), _score, _sgd()), [], LONG, SystemEntropy(), loop_engine, place=place, run="r" * 64
        )
    place.data = place.data[:-1] + b"?"
    with pytest.raises(TrainingCheckpointError):
        _long(_Numbered(), loop_engine, place)
    with pytest.raises(ValueError, match="needs a run"):
        _long(_Numbered(), loop_engine, place, run="")


def test_progress_is_told_at_constant_steps_and_tells_nothing_of_patients():
    said = []
    _long(_Numbered(), say=said.append)
    assert [(p.step, p.steps, dict(p.losses)) for p in said] == [(25, 60, {}), (50, 60, {}), (60, 60, {})]
    assert CHECKPOINT_EVERY == 25


def test_a_training_that_diverges_stops_before_it_is_kept():
    found, place = convolutions(), _Memory()
    job = dataclasses.replace(JOB, expected_batch=1e-3)
    with pytest.raises(DivergedError, match="step 1"):
        train_privately(
            TrainingTask(found.model, classified, _sgd(1e38)), [], job, SystemEntropy(), place=place, run="x"
        )
    assert place.writes == 0


def test_patients_whose_every_loss_is_not_a_number_count_as_nothing_and_the_training_goes_on():
    model = _Dirac(4)
    nan = PrivacyUnit((torch.full((2, 4), math.nan, dtype=torch.float64),))
    job = dataclasses.replace(JOB, sampling_rate=1.0)
    assert train_privately(TrainingTask(model, _score, _sgd()), [nan] * 3, job, SystemEntropy()) == 3
    assert torch.isfinite(model.theta).all()


def test_the_products_engine_is_exact_on_a_processor():
    found = convolutions()
    units = found.units((1, 2, 70, 3, 40, 30))  # more rows than one pass takes
    reference = loop_engine(found.model, found.loss, units, 0.3)
    total = best_engine("cpu")(found.model, found.loss, units, 0.3)
    assert float((total - reference).norm()) <= 1e-5 * float(reference.norm())


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
    with pytest.raises(UnsuitableModelError, match="GroupNorm"):
        train_privately(TrainingTask(nn.Sequential(layer), _score, _sgd()), [], JOB, UnsafeSeededEntropy(0))


class _Remembers(_Dirac):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("seen", torch.zeros(size, dtype=torch.float64))

    def forward(self, images):
        self.seen += images.sum(dim=0)
        return super().forward(images)


def test_a_buffer_that_training_changed_is_refused():
    job = dataclasses.replace(JOB, sampling_rate=1.0)
    with pytest.raises(UnsuitableModelError, match="buffer"):
        train_privately(TrainingTask(_Remembers(2), _score, _sgd()), _numbered(3), job, UnsafeSeededEntropy(0))


def test_a_model_without_parameters_is_refused():
    with pytest.raises(UnsuitableModelError, match="no parameter"):
        train_privately(TrainingTask(nn.Flatten(), _score, _sgd()), [], JOB, UnsafeSeededEntropy(0))


def test_frozen_parameters_stay_and_unused_ones_only_get_noise():
    found = convolutions()
    model = nn.ModuleDict({"used": found.model, "unused": nn.Linear(2, 2)})
    found.model[0].weight.requires_grad_(False)
    frozen, unused = found.model[0].weight.clone(), model["unused"].weight.clone()
    for engine in (loop_engine, vmap_engine(2), bookkeeping_engine(2)):
        task = TrainingTask(model, lambda m, rows: classified(m["used"], rows), _sgd())
        train_privately(task, found.units((2, 1)), JOB, UnsafeSeededEntropy(0), engine)
        assert torch.equal(frozen, found.model[0].weight)
        assert not torch.equal(unused, model["unused"].weight)
        unused = model["unused"].weight.clone()


def test_a_fault_in_the_middle_is_passed_on():
    def broken(model, rows):
        raise ArithmeticError("no loss")

    job = dataclasses.replace(JOB, sampling_rate=1.0)
    with pytest.raises(ArithmeticError):
        train_privately(TrainingTask(_Dirac(2), broken, _sgd()), _numbered(2), job, UnsafeSeededEntropy(0))


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


def test_a_masked_part_is_exact_up_to_the_last_step_that_a_job_may_have():
    """2^52 steps: each is that of the sum and that of the noise, although no step is a power of two."""
    grid, size = 0.7 * 2.0**-52, 4_000
    totals = np.random.default_rng(3).uniform(-0.7, 0.7, size)
    engine = lambda *_: torch.from_numpy(totals)  # noqa: E731 - one line
    job = dataclasses.replace(JOB, noise_multiplier=1e-3)
    part = noisy_part(
        nn.Linear(1, 1), None, [], job, UnsafeSeededEntropy(7), SecureSumGrid(grid, 0.7), clipped_sum=engine
    )
    spread = noise.deviation(job.clip, job.noise_multiplier, size, grid)
    again = UnsafeSeededEntropy(7)
    noise.draw_uniforms(again, 0)  # of the patients of the step: nobody
    drawn = noise.draw_gaussians(again, size) * spread
    exact = [int(np.rint(t / grid)) + int(np.rint(z / grid)) for t, z in zip(totals, drawn, strict=True)]
    assert [int(one) for one in part] == exact
    assert max(map(abs, exact)) > 2**51
    assert any(np.rint(one * grid / grid) != one for one in part), "a red control: by way of the grid some are lost"
