"""A simulation of a job with looks is of its rounds alone, at the price of all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from coordinator.cli.simulate import _job
from tests.support.coordinator_runs import evaluated_job


@pytest.mark.parametrize(("rounds", "looks"), [(0, (1, 2)), (1, (1,)), (2, (1, 2)), (9, (1, 2))])
def test_fewer_rounds_have_the_looks_that_come_in_them_and_one_at_the_end(
    tmp_path: Path, rounds: int, looks: tuple[int, ...]
) -> None:
    made = evaluated_job()
    text = {key: value for key, value in asdict(made).items() if key != "run"}
    text |= {"config": json.loads(made.config), "strategy": json.loads(made.strategy)}
    (tmp_path / "job.json").write_text(json.dumps(text))
    found = _job(tmp_path / "job.json", rounds)
    assert (found.evaluate, found.claim()) == (looks, made.claim())
