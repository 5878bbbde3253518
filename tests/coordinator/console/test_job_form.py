"""A run as a form: what was typed makes the job of a job file, all that is wrong is said at once."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.console import job_form
from coordinator.console.job_form import JobFormError
from coordinator.federation.job import KEYS, MASKED, PLAIN, Job, SiteCost, decide
from tests.support.coordinator_runs import SITES, evaluated_job, job, secret_job

COST = SiteCost("north", True, "1.000100000", "4e-06", 10, 40, "2.999900000", "")


@pytest.mark.parametrize("made", [job(), secret_job(), job(all_or_none=True, sites=SITES[:2]), evaluated_job()])
def test_a_jobs_form_makes_the_same_job(made: Job) -> None:
    form = job_form.from_job(made)
    again = job_form.job_of(form)
    plain = [{**asdict(one), "config": json.loads(one.config)} for one in (again, made)]
    assert plain[0] == plain[1]
    assert again.claim() == made.claim()


def test_a_job_file_fills_the_form_that_makes_its_job() -> None:
    made = job()
    text = {
        "mechanism": made.mechanism,
        "config": json.loads(made.config),
        "parameters": made.parameters,
        "sites": list(made.sites),
        "rounds": made.rounds,
        "min_sites": made.min_sites,
    }
    form = job_form.from_file(json.dumps(text).encode(), "run-1")
    assert job_form.job_of(form).claim() == made.claim()
    looked = evaluated_job()
    more = {"rounds": 2, "config": json.loads(looked.config), "evaluate": [1, 2]}
    again = job_form.job_of(job_form.from_file(json.dumps({**text, **more}).encode(), "run-1"))
    assert (again.evaluate, again.claim()) == ((1, 2), looked.claim())
    for key in text:
        with pytest.raises(JobFormError, match=key):
            job_form.from_file(json.dumps({k: v for k, v in text.items() if k != key}).encode())
    for bad in (b"", b"\xff", b"[]", b"{" * 100_000, json.dumps({**text, "mechanism": "teleport"}).encode()):
        with pytest.raises(JobFormError):
            job_form.from_file(bad)
    with pytest.raises(JobFormError, match="unknown"):
        job_form.from_file(json.dumps({**text, "import": "os"}).encode())


def test_all_that_is_wrong_is_said_at_once_and_nan_is_no_number() -> None:
    task = "[training]\nclip = nan\nrounds = -1\npublic_patients = 5"
    wrong = {"config.noise_multiplier": "nan", "config.task": task, "rounds": "-1"}
    with pytest.raises(JobFormError) as fault:
        job_form.job_of({**job_form.from_job(job()), **wrong, "strategy": "fedavg"})
    told = " ".join(fault.value.problems)
    for words in (
        "Noise multiplier: a number",
        "Task: training.clip: ",
        "Task: training.rounds: ",
        "Task: task.kind",
        "Rounds: a whole",
    ):
        assert words in told
    assert "strategy: a JSON object" in told
    with pytest.raises(JobFormError) as fault:
        job_form.job_of({**job_form.from_job(job()), "rounds": "9999", "min_sites": "7", "run": "Not A Name"})
    assert len(fault.value.problems) == 3
    with pytest.raises(JobFormError, match="mechanism"):
        job_form.job_of({})


def test_a_price_stands_in_the_place_of_the_noise_and_not_beside_it() -> None:
    form = {**job_form.from_job(job()), "config.epsilon": "4.5"}
    with pytest.raises(JobFormError, match="leave the noise multiplier empty"):
        job_form.job_of(form)
    made = job_form.job_of({**form, "config.noise_multiplier": ""})
    assert (json.loads(made.config)["epsilon"], made.priced) == (4.5, False)
    assert job_form.job_of(job_form.from_job(made)) == made


def test_a_task_may_be_typed_as_its_file_and_a_job_file_that_names_one_says_so() -> None:
    made = job()
    text = """
[task]
name = "small"
kind = "classification"
[labels]
classes = ["0", "1", "2"]
[input]
modality = "OT"
size = [8, 8]
[training]
public_patients = 25
[network]
name = "linear"
"""
    typed = job_form.job_of({**job_form.from_job(made), "config.task": text})
    assert typed.task().training.rounds == 12
    body = {k: getattr(made, k) for k in ("mechanism", "parameters", "rounds", "min_sites")}
    body |= {"config": {"task": "small.toml", "epsilon": 3.0}, "sites": list(made.sites)}
    with pytest.raises(JobFormError, match=r"names the task file small\.toml"):
        job_form.from_file(json.dumps(body).encode())


@given(st.dictionaries(st.sampled_from(sorted(job_form.from_job(evaluated_job()))), st.text(max_size=30)))
@settings(max_examples=60, deadline=None)
def test_whatever_is_typed_is_a_job_or_a_sentence(typed: dict[str, str]) -> None:
    problems: tuple[str, ...] = ("none",)
    try:
        job_form.job_of({**job_form.from_job(evaluated_job()), **typed})
    except JobFormError as fault:
        problems = fault.problems
    assert all(problems)


@pytest.mark.parametrize("mechanism", [PLAIN, MASKED])
def test_every_key_of_a_mechanism_has_an_input_with_words(mechanism: str) -> None:
    found = job_form.inputs(job_form.blank(mechanism, SITES))
    keys = {*KEYS[mechanism], "epsilon", "evaluate"} - {"parameters"}  # a price or a noise; the length is the job's
    assert {field.name for field in found} == {f"config.{key}" for key in keys} | {"evaluate"}
    assert all(field.label and field.help for field in found)


def test_a_price_is_rounded_up_and_what_is_left_down() -> None:
    (cost,) = job_form.costs_of([COST])
    assert (cost.epsilon, cost.left, cost.share) == ("1.01", "2.99", 25.0)
    (none,) = job_form.costs_of([replace(COST, left=0, left_epsilon="", epsilon="", fits=False)])
    assert (none.share, none.left, none.epsilon) == (None, "", "")


@pytest.mark.parametrize("change", [{"amount": 11}, {"fits": False}, {"epsilon": "2.0"}, {"site": "south"}])
def test_another_price_is_another_forecast(change: dict[str, Any]) -> None:
    made = job(sites=("north", "south"), min_sites=1)
    costs, others = [COST], [replace(COST, **change)]
    assert job_form.forecast_digest(costs, decide(made, costs)) == job_form.forecast_digest(
        [replace(COST, left=41)], decide(made, costs)
    )
    assert job_form.forecast_digest(costs, decide(made, costs)) != job_form.forecast_digest(
        others, decide(made, others)
    )
