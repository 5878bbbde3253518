"""The study of accuracy does what a run does: the same steps of the model, and the same round of a site."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Update
from agent.federation.run_mechanism import as_sent
from agent.models.networks import build
from coordinator.federation import run_controller
from coordinator.federation.job import MASKED, PLAIN, with_precision
from coordinator.federation.vectors import Moments
from policies.accounting.rdp import epsilon_nano
from policies.tasks.networks import NetworkSpec
from protos.artifacts.bfloat16 import widened
from protos.artifacts.strict_safetensors import pack_weights
from tests.benchmarks import federated as benchmark
from tests.support.coordinator_runs import Federation, conduct_here, job, secret_job
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.federated_study import Prepared, Setting, cohort, mechanism_of, standing, stepped, trained
from tests.support.small_tasks import classification


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    monkeypatch.setattr(run_controller, "conduct", conduct_here)
    made = Federation(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize("asked", [job(2, min_sites=3), secret_job(2)], ids=["plain", "masked"])
def test_a_run_over_messages_makes_the_same_model_of_the_sites_parts(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    asked = with_precision(asked)  # as a launch does
    kind, seen = type(mechanism_of(asked)), []
    honest = kind.run_round
    monkeypatch.setattr(kind, "run_round", lambda *given, **more: seen.append(honest(*given, **more)) or seen[-1])
    assert [one.state for one in fed.runs.launch(asked)][-1] == "finished"
    model = np.zeros(asked.parameters, np.float32), Moments()
    for number in (1, 2):
        parts = dict(zip(asked.sites, seen[3 * number - 3 : 3 * number], strict=True))
        model = stepped(asked, mechanism_of(asked), model, parts)
        assert np.array_equal(fed.model("run-1", number), model[0])
    assert np.any(model[0])


def _frozen() -> tuple[NetworkSpec, dict[str, bytes]]:
    """A public network with weights of a seed, and its file."""
    spec = NetworkSpec("small-cnn", {"width": 8, "convolutions": 2, "pooled": 1})
    state = build(spec, 1, (8, 8), 3, 5, lambda _: b"").module.net.state_dict()
    raw = pack_weights({name: tensor.numpy() for name, tensor in state.items()})
    part = NetworkSpec(spec.name, spec.options, weights=(digest := hashlib.sha256(raw).hexdigest()))
    return NetworkSpec("frozen-features", {"head": 1}, parts=(part,)), {digest: raw}


def _persons(seed: int) -> Any:
    dice = np.random.default_rng(seed)
    pictures = dice.random((20, 2, 1, 8, 8)).astype(np.float32)
    return cohort(list(pictures), list(dice.integers(0, 3, (20, 2, 1))))


def test_features_that_are_kept_change_no_bit_of_a_round() -> None:
    network, files = _frozen()
    task = classification(network=network, steps_per_round=4, clip=0.3, learning_rate=1.0)
    prepared, persons = Prepared.of(task, files), _persons(0)
    asked = Setting(task, 8.0).job(prepared.network.parameters, ("site-a",))
    mechanism, entropy = mechanism_of(asked), UnsafeSeededEntropy(3)
    model = np.zeros(asked.parameters, np.float32)
    for _ in range(asked.rounds):  # of one site: its update is the next model
        model = widened(as_sent(mechanism, mechanism.run_round(persons, Update(model), entropy, files=files)))
    kept = trained(asked, {"site-a": persons}, prepared, UnsafeSeededEntropy(3))
    assert np.array_equal(kept, model)
    assert np.any(model)


@pytest.mark.parametrize("mechanism", [PLAIN, MASKED])
def test_the_price_is_what_the_account_is_charged_for_rounds_and_looks(mechanism: str) -> None:
    steps = 1 if mechanism == MASKED else 5
    momentum = 0.0 if mechanism == MASKED else 0.9
    task = classification(rounds=12, steps_per_round=steps, momentum=momentum, sampling_rate=1.0, public_patients=500)
    for epsilon in (8.0, 3.0, 1.0):
        asked, account = Setting(task, epsilon, mechanism).job(195), standing("site-a", epsilon).account
        assert account is not None
        claim, delta, order = asked.claim(), float(account.opened.delta), account.opened.order
        assert claim.looks == 2
        assert delta == 4e-6
        assert 0.99 * epsilon < epsilon_nano(claim, delta, order) / 1e9 <= epsilon


TASKS = {
    "chests": (benchmark.chest_task(NetworkSpec("linear")), benchmark.CHESTS, 2245),
    "digits": (benchmark.digit_task(NetworkSpec("linear")), benchmark.BY_RULE, 10_890),
    "logistic regression": (benchmark.chest_task(NetworkSpec("linear")), benchmark.BY_RULE, 325),
}


@pytest.mark.parametrize("kind", ["local", "central", "alone"])
@pytest.mark.parametrize("name", TASKS)
def test_a_site_takes_every_job_of_the_benchmark(name: str, kind: str) -> None:
    task, chosen, parameters = TASKS[name]
    sites = benchmark.SITES if kind != "alone" else benchmark.SITES[:1]
    rates = []
    for epsilon in benchmark.EPSILONS:
        mechanism = mechanism_of(benchmark.setting(task, chosen, kind, epsilon).job(parameters, sites))
        rates.append(mechanism.learning_rate)
    assert rates == sorted(rates, reverse=True)
    assert 0.0 < rates[-1] < rates[0]


@pytest.mark.parametrize(("kind", "sites"), [("local", benchmark.SITES), ("alone", benchmark.SITES[:1])])
def test_a_site_takes_the_job_of_livers(kind: str, sites: tuple[str, ...]) -> None:
    how = benchmark.Livers()
    task = benchmark.liver_task(replace(benchmark.LIVER_NETWORK, trained="head"), how.patients)
    parameters = Prepared.of(task, {}).network.parameters
    assert parameters == 2 * 8 + 3 * 8 + 3
    mechanism = mechanism_of(benchmark.setting(task, benchmark.LIVERS, kind, 8.0).job(parameters, sites))
    assert mechanism.public_patients == how.patients
    assert mechanism.learning_rate > 0.0


def test_dice_is_of_the_segments_and_of_patients_who_have_them() -> None:
    shown = np.zeros((3, 2, 2, 2), np.int64)
    said = shown.copy()
    shown[0, 0], said[0, 0, 0] = 1, 1  # half of four voxels: 2 * 2 / (2 + 4); the others have no liver
    shown[1, 1], said[1] = 2, 2  # twice as much: 2 * 4 / (4 + 8)
    shown[2, 1], said[2, 1] = 2, 2
    assert benchmark.dice_of(said, shown) == pytest.approx((2 / 3 + (2 / 3 + 1) / 2) / 2)


LIVER_FIGURES = {"local 8": 0.8, "plain whole": 0.9, "untouched": 0.6, "threshold": 0.3, "site alone 8": 0.7}


def test_shares_are_beside_the_best_network_and_digits_beside_their_own() -> None:
    kinds = [f"{kind} {epsilon:g}" for kind in ("local", "central", "site alone") for epsilon in (8, 3, 1)]
    chests = {**dict.fromkeys(kinds, 0.85), "untouched": 0.8, "logistic local 8": 0.7, "plain a": 0.6, "plain b": 0.9}
    chests |= {"local 3": 0.86}
    digits = {**dict.fromkeys(kinds, 0.95), "plain 0": 0.9, "plain 1": 0.99}
    told = [LIVER_FIGURES, {**LIVER_FIGURES, "plain whole": 0.8}]
    ratios, errors = benchmark.ratios_of([chests, {**chests, "plain b": 0.95}], [digits], told)
    assert ratios["dice_vs_nonprivate"] == pytest.approx((0.8 / 0.9 + 1.0) / 2)
    assert ratios["dice_threshold_vs_nonprivate"] == pytest.approx((0.3 / 0.9 + 0.3 / 0.8) / 2)
    assert ratios["chests_share_eps8_local"] == pytest.approx((0.35 / 0.4 + 0.35 / 0.45) / 2)
    assert ratios["chests_over_best_site_eps3"] == pytest.approx(0.01)
    assert ratios["chests_over_untouched_eps1"] == pytest.approx(0.05)
    assert ratios["dp_vs_nonprivate_digits"] == pytest.approx(0.95 / 0.99)
    named = {row.what: row.value for row in errors}
    assert named["chests_share_eps8_local, standard error"] == pytest.approx((0.35 / 0.4 - 0.35 / 0.45) / 2)


@pytest.mark.slow
def test_a_small_form_of_the_benchmark_gives_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(of: Any, patients: int) -> Any:
        test = replace(of.test, patients=of.test.patients[:30])
        return replace(of.first(patients), test=test)

    monkeypatch.setattr(benchmark, "GLYPHS", 1)
    monkeypatch.setattr(benchmark, "PUBLIC_CHESTS", 20)
    monkeypatch.setattr(benchmark, "TEST", 14)
    for name in ("CHEST_NETWORKS", "DIGIT_NETWORKS"):
        monkeypatch.setattr(benchmark, name, tuple(replace(one, steps=2) for one in getattr(benchmark, name)))
    honest, made = benchmark.digit_persons, benchmark.chest_persons
    monkeypatch.setattr(benchmark, "digit_persons", lambda seed: first(honest(seed), 10))
    monkeypatch.setattr(benchmark, "chest_persons", lambda seed: made(seed, 8))
    with ThreadPoolExecutor(1) as pool:
        digits = benchmark.digit_figures(benchmark.digit_start(tmp_path / "digits", pool), 1)
        chests = benchmark.chest_figures(benchmark.chest_start(tmp_path / "chests", pool), 1)
    ratios, _ = benchmark.ratios_of([chests], [digits], [LIVER_FIGURES])
    assert all(np.isfinite(value) for value in ratios.values())
    assert {"dp_vs_nonprivate_digits", "dp_vs_nonprivate_digits_eps3", "chests_over_best_site_eps3"} <= ratios.keys()
    assert {f"chests_share_eps{n}_local" for n in (8, 3, 1)} | {"chests_share_eps8_central"} <= ratios.keys()


@pytest.mark.slow
def test_a_small_form_of_the_livers_gives_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SEEDS", (1,))
    for name in ("PUBLIC_LIVERS", "WHOLE_LIVERS"):
        monkeypatch.setattr(benchmark, name, replace(getattr(benchmark, name), epochs=1))
    few = benchmark.Livers(patients=2, test=1, public=2)
    with ThreadPoolExecutor(1) as pool:
        (found,) = benchmark.liver_rows(pool, pool.submit(benchmark.liver_start, few), few)
    assert found.keys() == LIVER_FIGURES.keys()
    assert all(0.0 <= value <= 1.0 for value in found.values())
    assert found["threshold"] > 0.0
