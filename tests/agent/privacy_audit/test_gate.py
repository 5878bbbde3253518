"""The audit: it passes what is shipped, sees every known fault, and its bounds are another implementation's."""

import itertools
import json
import math
from dataclasses import replace
from functools import lru_cache, partial

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats
from scipy.special import logit
from sklearn.datasets import load_digits
from torch import nn

from agent.cli import audit as audit_command
from agent.cli.main import main
from agent.domain import Image, Patient
from agent.dp import clipping, dpsgd, evaluation_sums, gradient_recorder, noise, per_example_gradients
from agent.dp.clipping import bookkeeping_engine, loop_engine, vmap_engine
from agent.dp.dpsgd import best_engine
from agent.dp.noise import SystemEntropy
from agent.mechanisms.privimage import semantic_query
from agent.privacy_audit import canaries, negative_controls, query_conformance
from agent.privacy_audit import conformance as dp_law
from agent.privacy_audit import gate as dp_audit
from agent.privacy_audit.canaries import (
    epsilon_curved,
    epsilon_guessed,
    gaussian_delta,
    gaussian_mu,
    lower_bound,
    p_value,
)
from agent.privacy_audit.conformance import Conformance, Trial, of_noise, of_sampling
from agent.privacy_audit.gate import (
    NoiseAuditError,
    Sensitivity,
    conformance,
    gate,
    gradient_sum,
    sensitivity,
    toy_sensitivity,
)
from tests.support.entropy import UnsafeSeededEntropy

ENGINE = bookkeeping_engine(64)
FINE = {"noise x 0.97": 5000}  # canaries; all other faults show with 1000
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


# -- the law


@pytest.mark.parametrize("engine", [loop_engine, vmap_engine(64), ENGINE], ids=["looped", "chunked", "bookkept"])
def test_what_is_shipped_follows_its_law(engine):
    assert conformance(UnsafeSeededEntropy(1), engine, canaries=1000).holds


@pytest.mark.parametrize("seed", range(5))
def test_there_is_no_false_alarm(seed):
    assert conformance(UnsafeSeededEntropy(100 + seed), ENGINE).holds


@pytest.mark.slow
def test_there_is_no_false_alarm_in_twenty_runs():
    assert all(conformance(UnsafeSeededEntropy(200 + seed), loop_engine).holds for seed in range(20))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("control", negative_controls.CONTROLS, ids=lambda control: control.what)
def test_every_negative_control_is_seen(control, seed):  # P10 broken on purpose, in each way that is known
    found = control.run(UnsafeSeededEntropy(seed), ENGINE, FINE.get(control.what, 1000))
    assert found.p < dp_law.SURE


def test_the_right_property_is_named():
    what = {c.what: c.run(UnsafeSeededEntropy(0), ENGINE, 1000).worst.what for c in negative_controls.CONTROLS}
    assert what["noise halved"] == "the noise has the claimed size"
    assert what["clipping by image, sold as by patient"] == "a patient who is drawn adds the clip and no more"
    assert what["sampling rate x 1.5"] == "patients are drawn at the claimed rate"
    assert what["the same seed in every run"] == "a second run has noise of its own"


def test_noise_that_repeats_at_every_step_is_seen_though_the_batches_are_fresh(monkeypatch):
    honest, kept = noise.draw_gaussians, {}
    monkeypatch.setattr(noise, "draw_gaussians", lambda e, count: kept.setdefault(count, honest(e, count)))
    found = conformance(UnsafeSeededEntropy(0), ENGINE, canaries=1000)
    assert next(t for t in found.trials if t.what == "the noise of a step is its own").p < 1e-9


def test_noise_that_repeats_along_the_vector_is_seen(monkeypatch):
    honest = noise.draw_gaussians
    monkeypatch.setattr(noise, "draw_gaussians", lambda e, count: np.resize(honest(e, 333), count))
    found = conformance(UnsafeSeededEntropy(0), ENGINE, canaries=1000)
    assert next(t for t in found.trials if t.what == "the noise of a number is its own").p < 1e-9


def test_the_trials_of_noise_have_uniform_p_values():
    rng = np.random.default_rng(3)
    ps = np.array([[t.p for t in of_noise(rng.normal(size=(6, 500)))] for _ in range(300)])
    assert all(0.2 < (column < 0.3).mean() < 0.4 for column in ps.T[[0, 1, 3]])
    assert all((column < 0.05).mean() <= 0.1 for column in ps.T)


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_the_trials_of_sampling_pass_poisson_and_see_fixed_batches_and_epochs(rate):
    rng, n, steps = np.random.default_rng(0), 1000, 20

    def trials(drawn):
        return [t.p for t in of_sampling(drawn.sum(axis=0) * 1.0, drawn.sum(axis=1) * 1.0, rate)]

    poisson = np.array([trials(rng.random((steps, n)) < rate) for _ in range(100)])
    assert ((poisson < 0.01).mean(axis=0) <= 0.05).all()
    fixed = np.array([rng.permutation(n) < n * rate for _ in range(steps)])
    assert trials(fixed)[2] < 1e-6  # every batch of the same size
    shuffled = rng.permutation(n)
    epochs = np.array([(shuffled + n * rate * t) % n < n * rate for t in range(steps)])
    assert trials(epochs)[1] < 1e-6  # everybody equally often


def test_a_rate_of_one_takes_everybody_in_each_step():
    everybody = of_sampling(np.full(5, 3.0), np.full(3, 5.0), 1.0)
    one_missing = of_sampling(np.array([3.0, 3, 3, 3, 2]), np.array([5.0, 5, 4]), 1.0)
    assert (min(t.p for t in everybody), max(t.p for t in one_missing)) == (1.0, 0.0)


def test_what_is_no_number_does_not_hold():
    assert not Conformance(of_noise(np.full((2, 10), math.nan))).holds
    with pytest.raises(ValueError, match="p-value"):
        Trial("the noise has mean zero", math.nan)
    with pytest.raises(ValueError, match="nothing was tried"):
        Conformance(())


def test_canaries_come_in_rows():
    with pytest.raises(ValueError, match="multiple of 50"):
        conformance(UnsafeSeededEntropy(0), canaries=1001)


# -- queries


@pytest.mark.parametrize(
    "query",
    [
        query_conformance.sum_conformance,
        query_conformance.histogram_conformance,
        query_conformance.look_conformance,
        query_conformance.part_conformance,
    ],
)
def test_noisy_queries_follow_their_law(query, monkeypatch):
    assert query(UnsafeSeededEntropy(0)).holds
    honest = noise.draw_gaussians
    monkeypatch.setattr(noise, "draw_gaussians", lambda e, count: 0.9 * honest(e, count))
    assert not query(UnsafeSeededEntropy(0)).holds


def test_a_histogram_that_counts_every_image_of_a_patient_is_seen(monkeypatch):
    honest = semantic_query._averaged
    monkeypatch.setattr(semantic_query, "_averaged", lambda rows, bins, shape: honest(rows, bins, shape) * len(rows))
    assert not query_conformance.histogram_conformance(UnsafeSeededEntropy(0)).holds


def test_a_look_that_counts_every_image_of_a_patient_is_seen(monkeypatch):
    honest = evaluation_sums.patient_part
    monkeypatch.setattr(evaluation_sums, "patient_part", lambda layout, images: honest(layout, images) * len(images))
    assert not query_conformance.look_conformance(UnsafeSeededEntropy(0)).holds


def test_noise_that_is_on_no_lattice_is_seen():
    rng, exact = np.random.default_rng(0), np.zeros(500)
    found = query_conformance.query_conformance(lambda: exact + rng.normal(size=500), exact, 1.0, noise.GRID)
    assert found.worst == Trial("what is released lies on the lattice", 0.0)


def test_a_lattice_that_is_coarser_than_claimed_is_seen():
    rng, exact = np.random.default_rng(0), np.zeros(500)
    for grid, good in ((noise.GRID, True), (2 * noise.GRID, False)):
        found = query_conformance.query_conformance(
            lambda grid=grid: np.rint(rng.normal(size=500) / grid) * grid, exact, 1.0, noise.GRID
        )
        assert found.holds is good
        assert good or found.worst.what == "the lattice is as fine as claimed"


def _whole_batch(units, job, entropy):
    return list(units)


def _unbounded(model, loss, units, job, entropy, box):
    return dpsgd.noisy_part(model, loss, units, job, entropy, dpsgd.SecureSumGrid(box.grid, 1e6))


def _boxed_afterwards(model, loss, units, job, entropy, box):
    whole = dpsgd.noisy_part(model, loss, units, job, entropy, box)
    return np.clip(whole, -box.bound / box.grid, box.bound / box.grid)


def _by_another_share(model, loss, units, job, entropy, box):
    less = replace(job, noise_multiplier=job.noise_multiplier / math.sqrt(2))
    return dpsgd.noisy_part(model, loss, units, less, entropy, box)


@pytest.mark.parametrize(
    ("what", "where", "name", "broken"),
    [
        ("a patient adds what the box lets through", dpsgd, "_batch", _whole_batch),
        ("a patient adds what the box lets through", query_conformance, "noisy_part", _unbounded),
        ("the noise has the claimed size, of a masked part", query_conformance, "noisy_part", _by_another_share),
        ("the noise is Gaussian, of a masked part", query_conformance, "noisy_part", _boxed_afterwards),
    ],
)
def test_a_masked_part_that_is_not_what_is_claimed_is_seen(what, where, name, broken, monkeypatch):
    monkeypatch.setattr(where, name, broken)
    found = query_conformance.part_conformance(UnsafeSeededEntropy(0))
    assert next(t.p for t in found.trials if t.what == what) < 1e-6


@pytest.mark.slow
def test_there_is_no_false_alarm_of_queries_in_forty_runs():
    for query in (
        query_conformance.sum_conformance,
        query_conformance.histogram_conformance,
        query_conformance.look_conformance,
        query_conformance.part_conformance,
    ):
        assert all(query(UnsafeSeededEntropy(300 + seed)).holds for seed in range(40))


# -- the shipped functions, broken themselves: an audit that asks them what to expect sees nothing of it


def _halved(sensitivity, noise_multiplier, size, grid):
    return 0.5 * noise_multiplier * (sensitivity + grid * math.sqrt(size))


def _a_little_less(sensitivity, noise_multiplier, size, grid):
    return 0.97 * noise_multiplier * (sensitivity + grid * math.sqrt(size))


_FAULTS = {
    # the body is replaced: whoever has imported the function, has the broken one
    "every deviation halved": (noise.deviation, "__code__", lambda _: _halved.__code__),
    "every deviation x 0.97": (noise.deviation, "__code__", lambda _: _a_little_less.__code__),
    "the deviation of sums x 0.97": (noise, "deviation", lambda f: lambda *x: 0.97 * f(*x)),
    "the deviation of masked parts x 0.97": (dpsgd, "deviation", lambda f: lambda *x: 0.97 * f(*x)),
    "normals x 0.97": (noise, "draw_gaussians", lambda f: lambda *x: 0.97 * f(*x)),
    "a coarse lattice": (noise, "GRID", lambda _: 2.0**-4),
    "a lattice of a bit less": (noise, "GRID", lambda _: 2.0**-23),
    "too many patients drawn": (dpsgd, "draw_uniforms", lambda f: lambda *x: 0.65 * f(*x)),
    "noise of biased uniforms": (noise, "draw_uniforms", lambda f: lambda *x: 0.8 * f(*x)),
}


@pytest.fixture(params=list(_FAULTS))
def fault(request, monkeypatch):
    where, name, broken = _FAULTS[request.param]
    monkeypatch.setattr(where, name, broken(getattr(where, name)))


def test_the_audit_takes_no_number_from_what_it_audits():
    for audit in (dp_audit, dp_law, query_conformance):
        assert not {"deviation", "GRID", "TAIL", "noise"} & vars(audit).keys()


@pytest.mark.usefixtures("fault")
def test_the_gate_sees_a_fault_in_the_shipped_functions_themselves():
    with pytest.raises(NoiseAuditError, match="in two runs it is not so that"):
        gate(UnsafeSeededEntropy(0), ENGINE, canaries=1000)


@pytest.mark.parametrize("what", ["every deviation x 0.97", "normals x 0.97"])
def test_a_training_alone_shows_such_a_fault_too(what, monkeypatch):
    where, name, broken = _FAULTS[what]
    monkeypatch.setattr(where, name, broken(getattr(where, name)))
    assert conformance(UnsafeSeededEntropy(0), ENGINE).p < dp_law.SURE


@pytest.mark.usefixtures("fault")
def test_the_command_sees_a_fault_in_the_shipped_functions_themselves(monkeypatch, capsys):
    monkeypatch.setattr(audit_command, "_ENGINES", {"bookkept": ENGINE})
    monkeypatch.setattr(audit_command, "conformance", partial(conformance, canaries=1000))  # enough, and faster
    monkeypatch.setattr(audit_command, "SystemEntropy", lambda: UnsafeSeededEntropy(0))
    assert main(["audit"]) == 1
    assert "not so:" in " ".join(capsys.readouterr().out.split())


# -- sensitivity


@pytest.mark.parametrize(
    "engine", [loop_engine, vmap_engine(2), bookkeeping_engine(2)], ids=["looped", "chunked", "bookkept"]
)
def test_no_neighbour_moves_the_sum_by_more_than_the_clip(engine):
    for cohort in dp_audit.toy_cohorts():
        found = sensitivity(gradient_sum(dp_audit.toy_task(), 0.5, engine), cohort, 0.5)
        assert found.holds
        assert found.largest > 0.499  # the clip binds, else this would prove nothing


@pytest.mark.parametrize("what", list(negative_controls.ENGINES))
def test_a_broken_engine_exceeds_its_sensitivity(what):
    assert not toy_sensitivity(negative_controls.ENGINES[what]).holds


def _leaks(rule, many):
    """The rule of a layer that lays a patient's gradient upon the others', where all have few or many images."""

    def broken(module, a, g, batch):
        found = rule(module, a, g, batch)
        if len(batch.counts) > 1 and (batch.width >= per_example_gradients.FEW) == many:
            found = {name: torch.cat([each[:1], each[1:] + each[:1]]) for name, each in found.items()}
        return found

    return broken


_RULES = [(kind, many) for kind in (nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.Embedding) for many in (False, True)]


@pytest.mark.parametrize(("kind", "many"), [*_RULES, (nn.Linear, True)])  # with few, no gradient of it is made
def test_the_gate_sees_an_engine_that_mixes_patients_of_equally_many_images(kind, many, monkeypatch):
    # such a batch goes other ways than one of unequal patients: one convolution of many groups, one product of many
    monkeypatch.setattr(
        per_example_gradients,
        "RULES",
        {**per_example_gradients.RULES, kind: _leaks(per_example_gradients.RULES[kind], many)},
    )
    monkeypatch.setattr(clipping, "PROBES", 0)  # else the engine sees it itself
    with pytest.raises(NoiseAuditError, match=r"one patient moves the sum of gradients by .*nothing was priced"):
        gate(SystemEntropy(), best_engine("cpu"), canaries=1000)


def _anothers_norm(module, a, g, batch):
    return tuple(found.roll(1) for found in per_example_gradients.gram_norms(module, a, g, batch))


def _half_the_norm(module, a, g, batch):
    square, mass = per_example_gradients.gram_norms(module, a, g, batch)
    return square / 4, mass


def _anothers_input(module, a, g, factors, out):
    per_example_gradients.whole_gradient(module, a.roll(1, dims=0), g, factors, out)


@pytest.mark.parametrize("broken", [_anothers_norm, _half_the_norm, _anothers_input])
def test_the_gate_sees_an_engine_whose_norms_without_gradients_are_wrong(broken, monkeypatch):
    monkeypatch.setattr(gradient_recorder, "whole_gradient" if broken is _anothers_input else "gram_norms", broken)
    monkeypatch.setattr(clipping, "PROBES", 0)
    seen = r"(one patient moves the sum of gradients by|could not run \(ValueError\)).*nothing was priced"  # or NaN
    with pytest.raises(NoiseAuditError, match=seen):
        gate(SystemEntropy(), best_engine("cpu"), canaries=1000)


def test_the_gate_sees_an_engine_that_finds_itself_mixing_patients(monkeypatch):
    broken = _leaks(per_example_gradients.RULES[nn.Conv2d], many=False)
    monkeypatch.setattr(per_example_gradients, "RULES", {**per_example_gradients.RULES, nn.Conv2d: broken})
    with pytest.raises(NoiseAuditError, match="UnsuitableModelError"):
        gate(SystemEntropy(), best_engine("cpu"), canaries=1000)


def test_the_gate_sees_an_engine_for_accelerators_that_mixes_patients_of_equally_many_images(monkeypatch):
    honest = torch.func.vmap

    def mixing(*told, **more):
        def found(weights, *rows):
            gradients = honest(*told, **more)(weights, *rows)
            return {name: torch.cat([each[:1], each[1:] + each[:1]]) for name, each in gradients.items()}

        return found

    monkeypatch.setattr(torch.func, "vmap", mixing)
    monkeypatch.setattr(clipping, "PROBES", 0)
    with pytest.raises(NoiseAuditError, match=r"one patient moves the sum of gradients by .*nothing was priced"):
        gate(SystemEntropy(), vmap_engine(64), canaries=1000)


def test_the_semantic_histogram_keeps_its_sensitivity_and_the_bound_is_reached():
    rng, bins = np.random.default_rng(0), 12
    query, pointing = (
        semantic_query.SemanticQuery(votes=2, noise=1.0, keep=1, images=8),
        query_conformance._Pointing(bins),
    )

    def person(name, columns):
        at = [np.full((1, 1), k / bins, np.float32) for k in columns]
        return Patient(name, tuple(Image(pixels, str(i % 2)) for i, pixels in enumerate(at)))

    cohort = [
        person("a", [3] * 9),
        person("b", [5]),
        person("c", rng.integers(0, bins, 20)),
        person("d", range(bins)),
    ]

    def exact(patients):
        total = semantic_query._total(patients, pointing, ("0", "1"), query, UnsafeSeededEntropy(0))
        return total.reshape(-1) / semantic_query._PART

    found = sensitivity(exact, cohort, query.claim().sensitivity)
    assert found.holds
    assert found.largest == pytest.approx(math.sqrt(2))


def test_a_sum_that_is_no_number_exceeds_every_bound():
    def query(patients):
        return np.array([math.nan if len(patients) == 1 else 0.0])

    assert not sensitivity(query, [1, 2, 3], 1.0).holds
    assert not Sensitivity(math.nan, 1.0, 1).holds
    with pytest.raises(ValueError, match="cohort"):
        sensitivity(query, [], 1.0)


# -- the gate


def test_the_gate_lets_the_shipped_code_through():
    assert gate(SystemEntropy(), ENGINE, canaries=1000).worst.p > 0


def test_the_gate_watches_the_code_that_is_shipped_and_says_what_is_wrong(monkeypatch):
    monkeypatch.setattr(noise, "draw_gaussians", lambda entropy, count: np.zeros(count))
    with pytest.raises(NoiseAuditError, match=r"the noise .*nothing was priced"):
        gate(SystemEntropy(), ENGINE, canaries=1000)


def test_the_gate_refuses_an_engine_that_lets_more_than_the_clip_through():
    with pytest.raises(
        NoiseAuditError, match=r"one patient moves the sum of gradients by 1\.747, and the bound is 0\.5"
    ):
        gate(SystemEntropy(), negative_controls.by_layer, canaries=1000)


class _Empty:
    def take(self, count):
        raise OSError("no entropy")


def test_the_gate_refuses_when_it_cannot_run():
    with pytest.raises(NoiseAuditError, match=r"could not run \(OSError\): nothing was priced"):
        gate(_Empty(), canaries=1000)


@pytest.mark.parametrize(("odd", "refused"), [(1, False), (2, True)])
def test_one_odd_run_is_chance_and_two_are_not(monkeypatch, odd, refused):
    seen = iter([Conformance((Trial("the noise has mean zero", 1e-5),))] * odd)
    sound = Conformance((Trial("the noise has mean zero", 0.5),))
    monkeypatch.setattr(dp_audit, "conformance", lambda *_: next(seen, sound))
    if refused:
        with pytest.raises(NoiseAuditError, match="the noise has mean zero"):
            gate(SystemEntropy())
    else:
        gate(SystemEntropy())


# -- the bounds


def _hull(inside, outside):
    """(misses, true negatives) at every threshold of the upper hull: the candidates of jax_privacy."""
    thresholds = np.append(np.union1d(inside, outside), np.inf)
    points = []
    for p in zip(np.searchsorted(inside, thresholds), np.searchsorted(outside, thresholds), strict=True):
        while len(points) >= 2:
            (x1, y1), (x2, y2) = points[-2:]
            if (y2 - y1) * (p[0] - x2) > (p[1] - y2) * (x2 - x1):
                break
            points.pop()
        points.append(tuple(map(int, p)))
    return points


@pytest.mark.parametrize(
    ("shift", "guessed", "curved"), [(1, 1.13346, 2.164749), (2, 2.311945, 4.7218075), (4, 4.395568, 9.133752)]
)
def test_the_bounds_are_those_of_jax_privacy(shift, guessed, curved):
    # google-deepmind/jax_privacy, auditing_test.py, test_epsilon_one_run_close: 10,000 + 10,000 scores, guesses "in"
    # only, significance 0.05 over the hull's thresholds, delta 1e-6
    n, delta = 10_000, 1e-6
    scores = stats.norm.ppf((np.arange(n) + 0.5) / n)
    points = _hull(scores + shift, scores)
    risk, best = 0.05 / len(points), [0.0, 0.0]
    for misses, negatives in points[-2::-1]:
        right, guesses = n - misses, 2 * n - misses - negatives
        trial = [eps + 1e-6 for eps in best]
        if p_value(2 * n, guesses, right, trial[0], delta) < risk:
            best[0] = epsilon_guessed(2 * n, guesses, right, delta, risk)
        if canaries.rules_out(2 * n, guesses, right, gaussian_mu(trial[1], delta), risk):
            best[1] = epsilon_curved(2 * n, guesses, right, delta, risk)
    assert best == pytest.approx([guessed, curved], rel=1e-5)


@pytest.mark.parametrize(("m", "guesses", "wrong"), itertools.product((10, 100, 1000), (1, 10, 100), (0, 1, 10)))
def test_the_p_value_is_the_papers_sum(m, guesses, wrong):
    # Steinke, Nasr & Jagielski 2023, appendix D: the same number, added up term by term
    right = max(0, guesses - wrong)
    for epsilon, delta in itertools.product((0.0, 0.5, 1.0), (0.0, 1e-6, 1e-3, 0.1)):
        q, alpha, total = 1 / (1 + math.exp(-epsilon)), 0.0, 0.0
        for i in range(1, right + 1):
            total += stats.binom.pmf(right - i, guesses, q)
            alpha = max(alpha, total / i)
        expected = min(1.0, stats.binom.sf(right - 1, guesses, q) + alpha * delta * 2 * m)
        assert p_value(m, guesses, right, epsilon, delta) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("m", [10, 100, 1000])
def test_all_guesses_right_prove_no_more_than_the_ceiling(m):
    assert epsilon_guessed(m, m, m, 1e-300, 0.05) == pytest.approx(logit(0.05 ** (1 / m)), abs=1e-5)
    assert epsilon_guessed(m, m, m, 1e-5, 0.05) < min(6.6, logit(0.05 ** (1 / m)) + 1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 1e-5), (1.0, 1e-5), (4.0, 1e-6)])
def test_gaussian_curves_are_those_of_dp_accounting(epsilon, delta):
    assert gaussian_mu(epsilon, delta) == pytest.approx(
        1 / dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-6
    )


def test_a_bound_exceeds_the_truth_no_more_often_than_its_confidence():
    rng, m, runs = np.random.default_rng(7), 200, 80
    too_high = dict.fromkeys(("response", "gaussian"), 0)
    truth = dp_accounting.get_epsilon_gaussian(1.0, canaries.DELTA)
    for _ in range(runs):
        coins = rng.random(m) < 0.5
        told = np.where(rng.random(m) < math.e / (1 + math.e), coins, ~coins)  # epsilon 1, and no more
        too_high["response"] += lower_bound(told + 1e-3 * rng.random(m), coins).guessed > 1.0
        too_high["gaussian"] += lower_bound(coins + rng.normal(size=m), coins).epsilon > truth
    assert all(stats.binom.sf(count - 1, runs, 0.05) > 1e-3 for count in too_high.values())


def test_the_bound_finds_what_is_there():
    rng = np.random.default_rng(0)
    coins = rng.random(2000) < 0.5
    truth = dp_accounting.get_epsilon_gaussian(1.0, canaries.DELTA)
    found = lower_bound(coins + rng.normal(size=2000), coins)
    assert 0.2 * truth < found.epsilon < truth
    assert found.curved > found.guessed > 0.5
    assert lower_bound(rng.normal(size=2000), coins).epsilon < 0.3


def test_the_claims_own_curve_lies_above_the_gaussian_one_that_stands_for_it():
    # so a run that rules out the Gaussian curve rules out the claim: for a subsampled Gaussian, delta(e) is smaller
    job = canaries.JOB
    event = pld.from_gaussian_mechanism(job.noise_multiplier, sampling_prob=job.sampling_rate)
    loss = event.self_compose(job.steps)
    claimed = loss.get_epsilon_for_delta(canaries.DELTA)
    mu = gaussian_mu(claimed, canaries.DELTA)
    at = np.linspace(0.0, 0.999 * claimed, 40)
    assert all(loss.get_delta_for_epsilon(e) <= gaussian_delta(e, mu) * 1.001 for e in at)


@pytest.mark.parametrize("scores", [[0.0, math.nan], [0.0, 1.0, 2.0]])
def test_a_bound_of_no_numbers_is_refused(scores):
    with pytest.raises(ValueError, match="finite score"):
        lower_bound(np.array(scores), np.array([True, False]))


# -- one run with canary patients


@lru_cache
def _digits():
    images, labels = load_digits(return_X_y=True)
    return (images[:200] / 16).astype(np.float32), labels[:200].astype(np.int64)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_real_training_proves_no_more_than_is_claimed(seed):
    found = canaries.one_run_bound(*_digits(), UnsafeSeededEntropy(seed), ENGINE)
    assert 0.9 < found.claimed < 1.1
    assert found.holds


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", negative_controls.LARGE)
def test_a_real_training_shows_large_faults_at_a_claim_of_one(what, seed):
    control = next(control for control in negative_controls.CONTROLS if control.what == what)
    found = negative_controls.proved(control, *_digits(), UnsafeSeededEntropy(seed))
    assert found.bound.epsilon > 1.5 * found.claimed
    assert found.bound.epsilon < 8.0  # at a claim of 8 even absent noise would not be seen


def test_an_audit_at_a_claim_of_eight_is_refused_for_it_would_say_nothing(monkeypatch):
    monkeypatch.setattr(canaries, "tight_epsilon", lambda claims, delta: 8.0)
    with pytest.raises(ValueError, match="cannot even see absent noise there: audit the same code at 2 or less"):
        canaries.one_run_bound(*_digits(), UnsafeSeededEntropy(0))


# -- the command


def test_the_command_says_what_it_saw_and_needs_no_site(capsys):
    assert main(["audit", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is True
    assert {check["part"] for check in told["checks"]} == {"shipped"}
    assert len(told["checks"]) == 10


def test_the_command_fails_when_the_noise_does(capsys, monkeypatch):
    honest = noise.draw_gaussians
    monkeypatch.setattr(noise, "draw_gaussians", lambda e, count: 0.9 * honest(e, count))
    monkeypatch.setattr(audit_command, "_ENGINES", {"bookkept": ENGINE})
    assert main(["audit"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "do not release differentially private data from this machine" in out


def test_a_check_that_cannot_run_has_not_passed():
    def broken():
        raise ArithmeticError("secret 1234")

    (check,) = audit_command._tried([("shipped", "something", broken)], quiet=True)
    assert (check.good, check.told) == (False, "could not run: ArithmeticError")


@pytest.mark.slow
def test_the_full_command_sees_every_fault(capsys):
    assert main(["audit", "--full", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert sum(check["part"] == "broken on purpose" for check in checks) == len(negative_controls.CONTROLS) + 7


@pytest.mark.gpu
def test_the_command_audits_an_accelerator(capsys):
    assert main(["audit", "--full", "--device", "cuda", "--json"]) == 0
