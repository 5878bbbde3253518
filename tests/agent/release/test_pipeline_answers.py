"""What a resumable making answers is what was configured, or nothing leaves and its grant stays held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import SyntheticSet
from agent.dp.noise import SystemEntropy
from agent.intervals import Proportion
from agent.mechanisms.distillation.teacher_student import Distilled, Output, Review, Tally
from agent.release.pipeline import release_resumable
from agent.vetting.filter import SINGLE, Power
from policies.review.policy import preset
from protos.common.errors import WorkerError
from tests.support.site_world import permissive, site_world
from tests.support.small_distillation import distill
from tests.support.small_mechanisms import SET_RELEASES

GOOD = Proportion(0.99, 0.95, 1.0)
MODEL = distill(output=Output("model"))


def review(names: tuple[str, ...]) -> Review:
    tallies = tuple(Tally(name, 1, {}, 1, 0) for name in names)
    power = Power(GOOD, GOOD, GOOD, dict.fromkeys(SINGLE, GOOD), None)
    return Review(tallies, tallies[0], GOOD, GOOD, power, {}, {}, np.zeros(1), 0.5, ())


def images(mechanism: Any, count: int, label: str) -> SyntheticSet:
    return SyntheticSet(np.zeros((count, *mechanism.shape), np.uint8), (label,) * count)


def refused(tmp_path: Path, mechanism: Any, answer: object, shown: Callable[[Review], None] = lambda _: None) -> None:
    """It is made elsewhere, and this is what comes back."""
    admits = permissive(preset("internal")).replace("epsilon = 8.0", "epsilon = 100.0")
    s = site_world(tmp_path, patients=23, own=admits, federation=admits)
    site = replace(s.site, run=lambda *_: answer)
    with pytest.raises(WorkerError, match="nothing left"):
        release_resumable(site, mechanism, SET_RELEASES["distill"].selection, SystemEntropy(), shown=shown)
    held = [grant for grant in site.ledger.store.state.grants.values() if grant.state == "held"]
    assert (len(held), s.intake.register.store.state.releases) == (1, {})


@pytest.mark.parametrize("name", ["privimage", "centroids", "distill", "distill-dp"])
@pytest.mark.parametrize("what", ["label", "many", "none", "shape"])
def test_a_set_that_is_not_as_configured_does_not_leave(tmp_path: Path, name: str, what: str) -> None:
    mechanism = SET_RELEASES[name].mechanism
    label = mechanism.drawn[0]
    made = {
        "label": lambda: images(mechanism, 1, "SMITH^JOHN 19500101"),
        "many": lambda: images(mechanism, mechanism.pictures + 1, label),
        "none": lambda: images(mechanism, 0, label),
        "shape": lambda: SyntheticSet(np.zeros((1, *mechanism.shape, 3), np.uint8), (label,)),
    }[what]()
    refused(tmp_path, mechanism, Distilled(made, review(mechanism.drawn)) if "distill" in name else made)


def test_a_model_of_another_form_does_not_leave(tmp_path: Path) -> None:
    blank = MODEL.untrained()
    assert blank is not None
    for number, raw in enumerate((blank + b"x", blank[:-1], b"MRN000001", b"")):
        (folder := tmp_path / str(number)).mkdir()
        refused(folder, MODEL, Distilled(raw, review(MODEL.drawn)))


def test_figures_of_other_conditions_or_that_cannot_be_shown_do_not_leave(tmp_path: Path) -> None:
    mechanism = SET_RELEASES["distill"].mechanism
    made = images(mechanism, 1, mechanism.drawn[0])
    (tmp_path / "a").mkdir()
    refused(tmp_path / "a", mechanism, Distilled(made, review(("SMITH^JOHN",))))

    def fails(_: Review) -> None:
        raise ZeroDivisionError

    (tmp_path / "b").mkdir()
    refused(tmp_path / "b", mechanism, Distilled(made, review(mechanism.drawn)), fails)


def test_a_review_has_the_names_that_there_are() -> None:
    one = review(("a",))
    for wrong in ({"thresholds": {"SMITH": 1.0}}, {"intervals": {"SMITH": (0.0, 1.0)}}):
        with pytest.raises(ValueError, match="unknown"):
            replace(one, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown"):
        replace(one, power=replace(one.power, kinds={"SMITH": GOOD}))
    for told in ({"SMITH": 1}, {"copy": 2}, {"copy": -1}):
        with pytest.raises(ValueError, match="unknown reason, or more"):
            Tally("a", 1, told, 0, 0)
