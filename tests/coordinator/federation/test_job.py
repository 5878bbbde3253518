"""A job is checked as a whole, its claim is the agent's own, and the forecast is the real review's word."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.mechanisms.federated.mechanism import Federated, FederatedConfigError, FederatedMasked
from coordinator.federation.job import (
    KEYS,
    Job,
    JobError,
    LaunchDecision,
    SiteCost,
    claim_of,
    decide,
    forecast,
    job_from,
    quorum,
    with_noise,
    with_precision,
)
from policies.accounting.accountant import epsilon_of, order_for
from policies.accounting.claims import DistributedGaussian, Evaluated, SubsampledGaussian
from policies.accounting.rdp import NANO, allowance, cost, epsilon_nano
from policies.ledger.entries import Opened
from policies.ledger.state import Account
from policies.review.policy import parse, preset
from policies.review.rules import TERMS, AccountContext, review_reservation
from policies.statements import Reservation
from policies.tasks.evaluation import EvaluationPlan
from protos.common.canonical_json import canonical
from protos.secagg.ring import Ring
from protos.secagg.session import Quorum
from tests.support.small_tasks import changed, classification

SHARED = {"rounds": 4, "public_patients": 225, "learning_rate": 4.0}
PLAIN = Federated(classification(("0", "1"), (32, 32), **SHARED), 130, noise_multiplier=1.8)
MASKED = FederatedMasked(
    classification(("0", "1"), (32, 32), **SHARED, steps_per_round=1),
    130,
    1.8,
    3,
    2,
    value_bound=8.0,
    scale=20,
    ring_bits=32,
)
SITES = ("site-a", "site-b", "site-c")
POLICY = parse(preset("controlled"), "controlled.toml")


def _job(**changes):
    values = {
        "run": "run-1",
        "mechanism": "federated",
        "config": PLAIN.to_json(),
        "parameters": 130,
        "sites": SITES,
        "rounds": 4,
        "min_sites": 2,
    }
    return Job(**{**values, **changes})


def _secure(**changes):
    return _job(
        **{"mechanism": "federated-masked", "config": MASKED.to_json(), "min_sites": 3, "secure": True, **changes}
    )


def _account(epsilon=8.0, delta="4e-06", order=4, held=0, spent=0):
    opened = Opened("site-a/rdp", allowance(epsilon, float(delta), order), order, repr(epsilon), delta)
    return Account(opened, held, spent)


def _policy(**changes):
    values = {"mechanisms": POLICY.mechanisms | set(KEYS), "epsilon": 8.0, "delta": 1e-5}
    return dataclasses.replace(POLICY, **{**values, **changes})


# --- the job


def test_a_job_survives_its_json():
    job = _job(strategy='{"name":"krum","byzantine":1,"multi":1}', sites=("a", "b", "c", "d", "e"), min_sites=5)
    assert job_from(job.to_json()) == job
    assert job_from(_secure().to_json()).to_json() == _secure().to_json()


def test_the_default_is_a_uniform_mean_that_drops_sites_and_hides_nothing():
    job = _job()
    assert (job.aggregator().to_json(), job.all_or_none, job.secure) == ('{"name":"fedavg"}', False, False)


def test_all_problems_of_a_job_are_told_at_once():
    with pytest.raises(JobError) as refusal:
        _job(
            run="Release", parameters=0, sites=("a", "a"), rounds=9, min_sites=3, strategy='{"name":"x"}', secure=True
        )
    for name in ("run:", "parameters:", "sites:", "rounds:", "min_sites:", "strategy:", "secure:"):
        assert name in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run": "release-1"}, "run:"),
        ({"mechanism": "ksame"}, "mechanism:"),
        ({"config": "{}"}, "config:"),
        ({"parameters": 131}, "parameters: those of the configuration"),
        ({"config": MASKED.to_json()}, "config: .*honest"),
        ({"config": PLAIN.to_json()[:-1] + ',"parameters":130}'}, "distinct"),
        ({"config": "[" * 100_000}, "config:"),
        ({"rounds": 5}, "at most the 4"),
        ({"sites": ("site-a", "../b")}, "a site's name"),
        ({"min_sites": 4}, "min_sites:"),
        ({"strategy": '{"name":"trimmed-mean","trim":1}'}, "min_sites: at least 3"),
        ({"strategy": '{"name":"krum","byzantine":1,"multi":1}', "min_sites": 3}, "min_sites: at least 5"),
        ({"strategy": '{"name":"fedavg","weights":{"site-a":1,"site-b":1}}'}, "every site"),
        (
            {"strategy": '{"name":"fedavg","weights":{"site-a":1,"site-b":1,"site-c":1}}', "min_sites": 1},
            "at least 2",
        ),
        ({"strategy": '{"name":"fedprox","mu":0.1}'}, "training.proximal"),
        ({"secure": True}, "secure:"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused_with_its_reason(changes, why):
    with pytest.raises(JobError, match=why):
        _job(**changes)


def test_fedprox_runs_where_the_sites_apply_the_same_mu():
    config = changed(PLAIN, proximal=0.1).to_json()
    assert _job(config=config, strategy='{"name":"fedprox","mu":0.1}').aggregator().mu == 0.1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secure": False}, "secure:"),
        ({"min_sites": 2}, "min_sites: at least 3"),
        ({"sites": (*SITES, "site-d"), "min_sites": 4}, "the 3 that the configuration names"),
        ({"strategy": '{"name":"trimmed-mean","trim":1}'}, "single updates"),
        ({"strategy": '{"name":"fedprox","mu":0.0}'}, "single updates"),
        ({"strategy": '{"name":"fedavg","weights":{"site-a":1,"site-b":1,"site-c":1}}'}, "single updates"),
        ({"config": changed(MASKED, honest=1).to_json()}, "min_sites: at least 3"),
    ],
)
def test_a_secure_job_that_cannot_keep_its_promise_is_refused(changes, why):
    with pytest.raises(JobError, match=why):
        _secure(**changes)


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "fedyogi"])
def test_a_secure_job_takes_the_strategies_that_need_the_sum_alone(strategy):
    momentum = {"server_lr": 0.1, "beta1": 0.9}
    keys = {"fedavg": {}, "fedavgm": momentum}.get(strategy, {**momentum, "beta2": 0.99, "tau": 1e-3})
    job = _secure(strategy=json.dumps({"name": strategy, **keys}))
    assert hasattr(job.aggregator(), "advance")


@given(st.integers(3, 40), st.integers(2, 40))
def test_the_quorum_is_that_of_the_secure_aggregation(sites, honest):
    if honest < sites:
        assert quorum(sites, honest) == Quorum.smallest(sites, 1, honest).min_survivors


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        _job().to_json()[:-1] + ',"run":"run-2"}',
        json.dumps({**json.loads(_job().to_json()), "seed": 1}),
        json.dumps({k: v for k, v in json.loads(_job().to_json()).items() if k != "secure"}),
        json.dumps({**json.loads(_job().to_json()), "secure": 0}),
        json.dumps({**json.loads(_job().to_json()), "rounds": 4.0}),
        json.dumps({**json.loads(_job().to_json()), "sites": [1, 2]}),
        json.dumps({**json.loads(_job().to_json()), "sites": "abc"}),
        json.dumps({**json.loads(_job().to_json()), "min_sites": math.nan}),
    ],
)
def test_a_job_file_that_is_not_exactly_one_is_refused(text):
    with pytest.raises(JobError):
        job_from(text)


# --- the claim


_plain = st.builds(
    lambda q, sigma, steps, rounds: changed(
        PLAIN, sampling_rate=q, noise_multiplier=sigma, steps_per_round=steps, rounds=rounds
    ),
    st.floats(0.001, 1.0),
    st.floats(0.01, 100.0),
    st.integers(1, 10_000),
    st.integers(1, 1000),
)
_looked = st.builds(
    lambda job, looks, noise: dataclasses.replace(job, evaluate=EvaluationPlan(looks, noise, 20, 10)),
    _plain,
    st.integers(1, 1000),
    st.floats(1.0, 1e4),
)
_masked = st.builds(
    lambda q, sigma, rounds, sites, honest: changed(
        MASKED, sampling_rate=q, noise_multiplier=sigma, rounds=rounds, sites=sites, honest=min(sites, honest)
    ),
    st.floats(0.1, 1.0),
    st.floats(0.5, 4.0),
    st.integers(1, 1000),
    st.integers(2, 100),
    st.integers(1, 100),
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(_plain, _looked, _masked))
def test_the_coordinator_reads_the_claim_that_the_agent_makes(mechanism):
    assert claim_of(mechanism.name, mechanism.to_json()) == mechanism.claim()


def test_the_keys_of_a_configuration_are_those_of_the_mechanism():
    for mechanism in (PLAIN, MASKED):
        assert KEYS[mechanism.name].keys() == {f.name for f in dataclasses.fields(mechanism)} - {"evaluate"}
        values = json.loads(mechanism.to_json())
        if mechanism is PLAIN:  # float32, as before there was a choice: it is left out
            values |= json.loads(dataclasses.replace(mechanism, update_precision="bfloat16").to_json())
        assert all(type(values[key]) is kind for key, kind in KEYS[mechanism.name].items())
        assert TERMS[mechanism.name].claim is type(mechanism.claim())


@pytest.mark.parametrize(
    ("key", "value"),
    [("sampling_rate", 2.0), ("noise_multiplier", 0.0), ("rounds", 0), ("rounds", -1), ("steps_per_round", -4)],
)
def test_what_the_agent_would_not_price_the_coordinator_does_not_either(key, value):
    values = json.loads(PLAIN.to_json())
    (values if key in values else values["task"]["training"])[key] = value
    text = json.dumps(values)
    with pytest.raises(FederatedConfigError):
        Federated.from_json(text)
    with pytest.raises(JobError, match="config"):
        claim_of("federated", text)


def test_two_negative_counts_do_not_make_a_positive_one():
    values = json.loads(PLAIN.to_json())
    values["task"]["training"] |= {"rounds": -2, "steps_per_round": -3}
    with pytest.raises(JobError, match=r"training\.rounds: must be a whole number .*training\.steps_per_round"):
        claim_of("federated", json.dumps(values))


def test_a_configuration_of_before_tasks_is_refused_with_what_to_do():
    old = json.dumps({"noise_multiplier": 1.8, "classes": ["0", "1"], "shape": [8, 8], "centre": [0.0] * 64})
    with pytest.raises(JobError, match=r"write a task file .* `lazaret-agent task check FILE`"):
        _job(config=old)
    with pytest.raises(FederatedConfigError, match=r"write a task file .* `lazaret-agent task check FILE`"):
        Federated.from_json(old)


# --- the precision of updates


def test_a_job_that_names_no_precision_gets_bfloat16_and_one_that_does_keeps_it():
    assert with_precision(_job()).update_precision == "bfloat16"
    named = _job(config=canonical({**json.loads(PLAIN.to_json()), "update_precision": "float32"}).decode())
    assert with_precision(named) == named
    assert with_noise(named, {}) == named
    assert Federated.from_json(named.config_for_sites) == PLAIN
    assert "update_precision" not in named.config_for_sites, "an earlier agent would refuse the key"
    half = with_precision(_job())
    assert half.config_for_sites == half.config
    assert with_noise(_job(), {}).update_precision == "bfloat16"


def test_a_run_of_before_there_was_a_choice_and_a_masked_one_stay_as_they_are():
    assert _job().update_precision == "float32"
    assert with_precision(_secure()) == _secure()


@pytest.mark.parametrize("word", ["float16", "", 16, None])
def test_another_precision_is_refused_on_both_sides(word):
    config = json.dumps({**json.loads(PLAIN.to_json()), "update_precision": word})
    with pytest.raises(JobError, match="update_precision"):
        _job(config=config)
    with pytest.raises(FederatedConfigError, match="update_precision"):
        Federated.from_json(config)


def test_a_masked_run_has_no_precision():
    config = json.dumps({**json.loads(MASKED.to_json()), "update_precision": "bfloat16"})
    with pytest.raises(JobError, match="update_precision: unknown"):
        _secure(config=config)
    with pytest.raises(FederatedConfigError, match="update_precision"):
        FederatedMasked.from_json(config)


# --- the noise for an epsilon


def _asking(epsilon, mechanism=PLAIN, **changes):
    values = {**json.loads(mechanism.to_json()), "epsilon": epsilon}
    del values["noise_multiplier"]
    make = _secure if mechanism.name == "federated-masked" else _job
    return make(config=json.dumps(values), **changes)


@pytest.mark.parametrize("mechanism", [PLAIN, MASKED])
@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0])
def test_the_noise_is_the_least_for_which_the_account_is_charged_no_more_than_the_epsilon(mechanism, epsilon):
    job, account = _asking(epsilon, mechanism), _account(epsilon, order=order_for(epsilon, 4e-6))
    found = with_noise(job, {site: AccountContext(account) for site in SITES})
    claim, order = found.claim(), account.opened.order
    quieter = dataclasses.replace(claim, noise_multiplier=round(claim.noise_multiplier - 0.001, 3))
    assert epsilon_nano(claim, 4e-6, order) <= epsilon * NANO < epsilon_nano(quieter, 4e-6, order)
    assert "epsilon" not in json.loads(found.config)
    assert with_noise(found, {}) == found


def test_the_strictest_account_says_the_noise_and_a_site_without_one_says_nothing():
    standings = {
        "site-a": AccountContext(_account(delta="1e-05", order=8)),
        "site-b": AccountContext(_account(delta="4e-06", order=16)),
        "site-c": AccountContext(None),
    }
    found = with_noise(_asking(3.0), standings).claim()
    alone = [with_noise(_asking(3.0), {name: one}).claim() for name, one in standings.items() if one.account]
    assert found.noise_multiplier == max(claim.noise_multiplier for claim in alone)
    with pytest.raises(JobError, match="no site of the job has an account"):
        with_noise(_asking(3.0), {"site-c": AccountContext(None)})


@pytest.mark.parametrize("epsilon", [4, True, "4.0", None])
def test_a_price_without_a_point_is_refused_with_what_to_write(epsilon):
    with pytest.raises(JobError, match=r"config: epsilon: a number with a point, such as 4\.0$"):
        _asking(epsilon)


def test_a_count_with_a_point_and_a_task_that_is_none_are_refused_with_what_to_write():
    values = {**json.loads(PLAIN.to_json()), "parameters": 130.0, "task": "chest.toml"}
    with pytest.raises(JobError, match=r"parameters: a whole number .*; task: a JSON object; in a job file"):
        claim_of("federated", json.dumps(values))


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 101.0])
def test_an_epsilon_that_no_run_can_have_is_refused(epsilon):
    with pytest.raises(JobError, match="epsilon: above 0"):
        _asking(epsilon)


def test_an_epsilon_below_what_the_accounts_order_alone_costs_has_no_noise():
    with pytest.raises(JobError, match=r"no noise keeps it under epsilon 3: .* worth 3\.4, "):
        with_noise(_asking(3.0), {site: AccountContext(_account()) for site in SITES})


@pytest.mark.parametrize("mechanism", [PLAIN, MASKED])
def test_the_noise_of_a_job_with_looks_is_found_for_the_training_and_the_looks_together(mechanism):
    asking = _asking(8.0, mechanism)
    looks = {"looks": 2, "noise": 5.0, "held_out": 20, "bins": 10}
    config = json.dumps({**json.loads(asking.config), "evaluate": looks})
    job = dataclasses.replace(asking, config=config, evaluate=(asking.rounds,))
    account = AccountContext(_account())
    opened = account.account.opened
    found = with_noise(job, {"site-a": account}).claim()
    assert isinstance(found, Evaluated)
    price = epsilon_nano(found, float(opened.delta), opened.order)
    assert price <= 8 * NANO
    alone = with_noise(asking, {"site-a": account}).claim()
    assert found.training.noise_multiplier > alone.noise_multiplier


def test_a_job_without_its_noise_has_no_claim_yet():
    job = _asking(3.0)
    assert (job.priced, _job().priced) == (False, True)
    with pytest.raises(JobError, match="`round plan`"):
        job.claim()
    assert job_from(job.to_json()) == job


def test_the_parts_of_a_masked_run_fit_the_ring_of_the_secure_aggregation():
    ring = Ring(MASKED.parameters, MASKED.ring_bits, MASKED.value_bound, MASKED.scale)
    assert ring.max_members >= MASKED.sites


# --- the forecast


def test_the_forecast_is_what_the_real_reservation_is_charged():
    job, account = _job(), _account()
    (a, b, c) = forecast(
        job, dict.fromkeys(SITES, AccountContext(account)), dict.fromkeys(SITES, _policy()), job.claim()
    )
    real = Reservation(
        "grant-1", "site-a", "run-1", "federated", PLAIN.claim(), PLAIN.components(), min(_policy().modalities)
    )
    verdict = review_reservation(real, AccountContext(account), _policy())
    assert verdict.admitted
    assert (a.fits, a.amount, a.reason) == (True, verdict.amount, "")
    assert a.left == account.left
    assert float(a.epsilon) == pytest.approx(epsilon_nano(PLAIN.claim(), 4e-6, 4) / NANO, abs=1e-9)
    assert float(a.left_epsilon) == pytest.approx(epsilon_of(account.left, 4e-6, 4), abs=1e-8)
    assert float(a.left_epsilon) <= 8.0
    assert [cost_.site for cost_ in (a, b, c)] == list(SITES)


def test_a_masked_run_is_priced_like_the_sum_that_it_protects():
    job = _secure()
    policy = _policy(levels=_policy().levels | {"A*"})
    (a, *_) = forecast(
        job, dict.fromkeys(SITES, AccountContext(_account())), dict.fromkeys(SITES, policy), job.claim()
    )
    assert a.fits, a.reason
    assert a.amount == cost(SubsampledGaussian(0.25, 1.8, 4), 4)
    assert isinstance(job.claim(), DistributedGaussian)


def test_every_way_not_to_fit_is_told():
    job = _job(sites=("full", "none", "lawless", "strict", "frozen", "tight", "kind", "asks", "ok"), min_sites=1)
    account = _account()
    standings = {site: AccountContext(account) for site in job.sites if site != "none"}
    standings["full"] = AccountContext(_account(spent=account.limit - 5))
    standings["frozen"] = AccountContext(account, frozen=True)
    standings["kind"] = AccountContext(Account(Opened("kind/k", 1, 0, "", "")))
    policies = {site: _policy() for site in job.sites if site != "lawless"}
    policies["strict"] = _policy(mechanisms=frozenset({"ksame"}))
    policies["tight"] = _policy(epsilon=5.0)  # P12: opened for 8, tightened since
    policies["asks"] = _policy(approvals=frozenset({"compliance", "hospital"}))
    said = {one.site: one for one in forecast(job, standings, policies, job.claim())}
    assert {site for site, one in said.items() if one.fits} == {"ok"}
    wanted = {"full": "budget", "none": "account", "lawless": "policy", "strict": "admit", "frozen": "restored"}
    for site, word in {**wanted, "tight": "budget", "kind": "priced"}.items():
        assert word in said[site].reason, site
    wants = (
        "asks's policy wants compliance and hospital to approve each release, and a part in a run leaves by itself"
    )
    assert said["asks"].reason == wants
    assert said["full"].left == 5
    assert said["tight"].left < said["ok"].left


def test_an_overdrawn_account_has_nothing_left():
    job, account = _job(), _account()
    over = AccountContext(_account(spent=account.limit + 5))
    (a, *_) = forecast(job, dict.fromkeys(SITES, over), dict.fromkeys(SITES, _policy()), job.claim())
    assert (a.fits, a.left, float(a.left_epsilon)) == (False, 0, 0.0)


def test_a_delta_that_the_public_bound_outgrows_does_not_fit():
    job = _job(config=changed(PLAIN, public_patients=250_000).to_json())
    (a, *_) = forecast(
        job, dict.fromkeys(SITES, AccountContext(_account())), dict.fromkeys(SITES, _policy()), job.claim()
    )
    assert not a.fits
    assert "1 / patients" in a.reason


def test_a_claim_that_no_account_can_hold_is_no_fit_and_no_fault():
    job = _job(config=changed(PLAIN, noise_multiplier=0.0011, steps_per_round=10_000).to_json())
    (a, *_) = forecast(
        job, dict.fromkeys(SITES, AccountContext(_account())), dict.fromkeys(SITES, _policy()), job.claim()
    )
    assert not a.fits
    assert a.reason


# --- the decision


def _costs(*fits):
    return [SiteCost(s, f, "1.0", "1e-6", 1, 1, "1.0", "" if f else "no") for s, f in zip(SITES, fits, strict=False)]


def test_all_that_fit_are_launched():
    assert decide(_job(), _costs(True, True, True)) == LaunchDecision(True, SITES, {}, "")


def test_a_site_that_does_not_fit_is_dropped_down_to_the_smallest_number():
    decision = decide(_job(), _costs(True, False, True))
    assert (decision.go, decision.sites, dict(decision.dropped)) == (True, ("site-a", "site-c"), {"site-b": "no"})
    refused = decide(_job(), _costs(True, False, False))
    assert (refused.go, refused.sites) == (False, ())
    assert "2 sites are needed" in refused.reason


def test_all_or_none_drops_nobody():
    decision = decide(_job(all_or_none=True), _costs(True, False, True))
    assert (decision.go, decision.sites) == (False, ())
    assert "site-b" in decision.reason
    assert decide(_job(all_or_none=True), _costs(True, True, True)).go


def test_a_site_without_exactly_one_forecast_does_not_fit():
    assert decide(_job(), _costs(True, True)).dropped.keys() == {"site-c"}
    twice = [*_costs(True, True, True), *_costs(False)]
    assert decide(_job(), twice).dropped.keys() == {"site-a"}


def test_forecasts_of_other_sites_count_for_nothing():
    others = [SiteCost(f"other-{i}", True, "1", "1", 1, 1, "1", "") for i in range(9)]
    assert not decide(_job(), others).go


# --- times


@pytest.mark.parametrize(("key", "values"), [("round_seconds", (59, 86_401)), ("approval_days", (0, 181))])
def test_a_job_names_its_times_within_bounds(key, values):
    for value in values:
        with pytest.raises(JobError, match=f"{key}: "):
            _job(**{key: value})
    assert _job().round_seconds == 3_600
    assert job_from(_job(round_seconds=86_400).to_json()).round_seconds == 86_400


def test_a_job_of_before_jobs_named_their_times_has_those_of_then():
    values = json.loads(_job().to_json())
    for key in ("round_seconds", "approval_days"):
        del values[key]
    assert job_from(json.dumps(values)).round_seconds == 150
    with pytest.raises(JobError, match="approval_days: unknown or missing"):
        job_from(json.dumps({**values, "round_seconds": 60}))
