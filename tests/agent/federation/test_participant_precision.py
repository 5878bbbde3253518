"""An update that leaves as bfloat16: rounding is post-processing of what is noised, and the rounded bytes are signed.

Differential privacy holds for any function of what is released (Dwork & Roth 2014, proposition 2.1), as long as it
sees nothing else. Here the noised numbers are held still, and everything else that the rounding could see is changed:
patients, images, the start, the randomness. No bit of the artifact may change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import TaskCohort, Update
from agent.errors import ReviewRejectedError
from agent.federation import participant, round_making
from agent.federation.run_mechanism import update_bytes
from agent.mechanisms.federated.mechanism import Federated
from agent.release.ports import SignedRelease
from protos.artifacts.arrays import pack_update, unpack_update, unpack_vector
from protos.artifacts.bfloat16 import BFLOAT16, Numbers, rounded, widened
from tests.support.federated_sites import PLAN, START, evaluated, federated, federated_site, granted, part

HALF = federated(2, update_precision=BFLOAT16)
NOISED = np.random.default_rng(5).standard_normal(HALF.parameters).astype(np.float32)
OTHER_START = Update(np.full(HALF.parameters, 0.5, np.float32))


def sealed(folder: Path, made: np.ndarray, patients: int, start: Update, seed: int) -> SignedRelease:
    """What leaves a site where the noised numbers of a round are these, and all else is as it is said."""
    folder.mkdir()
    w = federated_site(folder)
    w.seed = seed
    w.crash()
    granted(w, HALF)
    found = part(w).site.examples

    def some(rule: Any) -> TaskCohort:
        whole = found(rule)
        return replace(whole, patients=whole.patients[:patients])

    def run(call: Callable[..., Any], cohort: TaskCohort, *_: Any) -> Update:
        assert len(cohort.patients) == patients
        return Update(made.copy())

    part(w).site = replace(part(w).site, examples=some, run=run)
    return part(w).train("run-1", 1, start)


def leaves_equal(tmp_path: Path) -> bool:
    """Whether the bytes that leave hang on the noised numbers alone."""
    ways = [(0, START, 1), (2, START, 1), (5, START, 1), (5, OTHER_START, 1), (5, START, 2)]
    found = [sealed(tmp_path / str(at), NOISED, *way).artifact for at, way in enumerate(ways)]
    return len(set(found)) == 1


def test_what_leaves_hangs_on_the_noised_numbers_alone(tmp_path: Path) -> None:
    assert leaves_equal(tmp_path)


def test_rounding_by_patients_or_by_the_start_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The red controls: a rounding that looks at who was trained on, or at what was before the noise."""
    seen = {"patients": 0, "start": 0}

    make = round_making.make

    def spied(one: Any, whom: str, model: Update) -> Any:
        made, persons = make(one, whom, model)
        seen.update(patients=len(persons), start=int(model.vector.any()))
        return made, persons

    monkeypatch.setattr(participant, "make", spied)
    for peeks in ("patients", "start"):

        def as_sent(_: Any, update: Update, peeks: str = peeks) -> Numbers:
            bits = rounded(update.vector)
            bits[0] += seen[peeks] > (2 if peeks == "patients" else 0)  # rounded up, where there are many
            return bits

        monkeypatch.setattr(participant, "as_sent", as_sent)
        folder = tmp_path / peeks
        folder.mkdir()
        assert not leaves_equal(folder)


def test_the_signed_bytes_are_the_rounded_ones_and_half_as_many(tmp_path: Path) -> None:
    signed = sealed(tmp_path / "one", NOISED, 5, START, 1)
    assert signed.artifact == pack_update(rounded(NOISED))
    assert signed.release.artifact_bytes == len(signed.artifact) == update_bytes(HALF)
    assert len(signed.artifact) <= 0.52 * update_bytes(federated(2)) + 60  # the header of so small a model
    numbers = unpack_update(signed.artifact)
    assert (np.abs(widened(numbers) - NOISED) <= 2.0**-8 * np.abs(NOISED)).all()


def test_rounding_comes_after_clip_noise_and_momentum_and_leaves_the_price_as_it_is(tmp_path: Path) -> None:
    assert HALF.claim() == federated(2).claim()
    full, half = tmp_path / "full", tmp_path / "half"
    found = []
    for folder, job in ((full, federated(2)), (half, HALF)):
        folder.mkdir()
        w = federated_site(folder)
        granted(w, job)
        found.append(part(w).train("run-1", 1, START))
    exact, short = unpack_vector(found[0].artifact), unpack_update(found[1].artifact)
    np.testing.assert_array_equal(short, rounded(exact))
    assert found[0].release.claim == found[1].release.claim


def test_a_look_is_never_rounded(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, evaluated(2, update_precision=BFLOAT16))
    part(w).train("run-1", 1, START)
    assert len(unpack_vector(part(w).look("run-1", 2, START).artifact)) == evaluated(2).layout().size
    assert PLAN.looks


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3.4e38], ids=["not a number", "infinite", "beyond bfloat16"])
def test_an_update_that_is_not_finite_when_rounded_does_not_leave(tmp_path: Path, odd: float) -> None:
    made = NOISED.copy()
    made[7] = odd
    with pytest.raises(ValueError, match=r"finite|too large"):  # by what holds an update, or by the rounding
        sealed(tmp_path / "one", made, 5, START, 1)


def test_persons_approve_the_precision_with_the_plan(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    plans = [part(w).plan_of("run-1", job, part(w).terms) for job in (federated(2), HALF)]
    assert plans[0].digest != plans[1].digest
    granted(w, HALF)
    with pytest.raises(ReviewRejectedError):
        part(w).join("run-1", federated(2))


def test_a_configuration_reads_back_and_one_of_before_is_float32() -> None:
    assert Federated.from_json(HALF.to_json()) == HALF
    before = federated(2)
    assert "update_precision" not in before.to_json()
    assert Federated.from_json(before.to_json()).update_precision == "float32"
