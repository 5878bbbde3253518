"""Threat S14: whatever fails before a set is kept, the next attempt makes it of what was drawn before.

Of every mechanism that releases: sets without an epsilon are made by the same dice, and noise is drawn once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent import pipeline
from agent.mechanisms import MECHANISMS
from agent.mechanisms.anonfaces import AnonFaces
from agent.mechanisms.bench import Bench
from agent.mechanisms.remodel import Remodel
from agent.nets.siamese import Share
from agent.nouns import Cohort
from agent.pipeline import release_heads
from agent.stages import distil, noise
from agent.stages.noise import SystemEntropy
from agent.stages.plant import SINGLE
from agent.stages.vet import Power
from policies.claims import KAnonymous, NoClaim
from policies.policy import preset
from tests.agent import test_pipeline
from tests.agent.test_distill_commands import every_fourth_dropped, permissive
from tests.agent.test_foreseen import CASES
from tests.agent.test_mechanisms import CENTROIDS, COHORT
from tests.agent.test_pipeline import Stage, stage
from tests.agent.test_remodel_release import ADMITS, examine, scans
from tests.agent.test_remodel_release import mechanism as remodel
from tests.support.books import policy

ROUNDS = {"federated", "federated-masked"}  # no set: an update leaves with its round, or never
PATIENTS = 23
FULL = OSError(28, "No space left on device")


def made_by(name: str) -> tuple[Any, Callable[[Stage], None]]:
    """The mechanism, and its release with fresh dice or the system's entropy."""
    if name == "remodel":
        mechanism = remodel()
        fresh = np.random.default_rng
        return mechanism, lambda s: _quiet(release_heads, s.site, mechanism, "MR", examine, fresh())
    case = CASES[name]
    if case.public:
        release = pipeline.release_resumable
        return case.mechanism, lambda s: _quiet(release, s.site, case.mechanism, case.selection, SystemEntropy())
    made, rule, anew = case.mechanism, case.selection, np.random.default_rng
    return made, lambda s: _quiet(pipeline.release_synthetic, s.site, made, rule, anew())


def _quiet(act: Callable[..., Any], *told: Any) -> None:
    act(*told)


@pytest.mark.parametrize("name", sorted(MECHANISMS.keys() - ROUNDS))
def test_a_full_disk_at_the_end_draws_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mechanism, release = made_by(name)
    admits = policy(**ADMITS) if name == "remodel" else permissive(preset("internal"))
    admits = admits.replace("epsilon = 8.0", "epsilon = 100.0")
    monkeypatch.setattr(test_pipeline, "policy", lambda **_: admits)  # of the site and of the federation
    s = stage(tmp_path, patients=PATIENTS)
    s.vault.heads = scans()[:3]
    if name == "distill":  # an untrained verifier knows nobody, and what it says is no use to this test
        good = Share(0.99, 0.95, 1.0)
        monkeypatch.setattr(distil, "power", lambda *_: Power(good, good, good, dict.fromkeys(SINGLE, good), None))
        monkeypatch.setattr(distil, "measured", lambda *_: Share(0.0, 0.0, 0.01))
        monkeypatch.setattr(distil, "vet", every_fourth_dropped)
    attempts: list[Any] = []

    def full(*_: Any) -> None:
        attempts.append((runs[-1] if runs else None, len(draws)))
        raise FULL

    monkeypatch.setattr(pipeline, "keep", full)
    runs, draws = _watched(monkeypatch, mechanism, full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            release(s)
    assert len(s.site.books.store.state.grants) == 1
    (dice, drawn), (again, drawn_again) = attempts
    claim = mechanism.claim()
    if isinstance(claim, KAnonymous) or isinstance(mechanism, Remodel):
        assert dice is not None
        assert dice == again, "the same dice"
    elif isinstance(claim, NoClaim):
        assert dice == again, "what was made lies sealed"
    else:
        assert (drawn > 0, drawn_again) == (True, drawn), "no noise is drawn a second time under one grant"


def _watched(
    monkeypatch: pytest.MonkeyPatch, mechanism: Any, full: Callable[[], None]
) -> tuple[list[Any], list[int]]:
    """By which dice each run began, or what a distillation made; and how many numbers of noise were drawn."""
    runs: list[Any] = []
    draws: list[int] = []
    run, gaussians = type(mechanism).run, noise.gaussians

    def seen(self: Any, *told: Any, **more: Any) -> Any:
        runs.extend(one.bit_generator.state for one in told if isinstance(one, np.random.Generator))
        if isinstance(mechanism, Remodel | AnonFaces):  # forty heads, or trained recognisers, take minutes: earlier
            full()
        made = run(self, *told, **more)
        if isinstance(mechanism.claim(), NoClaim):
            runs.append((made.made.images.tobytes(), made.made.labels))
        return made

    def counted(entropy: Any, count: int) -> Any:
        draws.append(count)
        return gaussians(entropy, count)

    monkeypatch.setattr(type(mechanism), "run", seen)
    monkeypatch.setattr(noise, "gaussians", counted)
    return runs, draws


def test_centroids_are_kept_with_their_noise_before_a_picture_is_made_of_them() -> None:
    """The second run reads nobody: another cohort and another entropy give the very same set."""
    drawer = Drawer()
    first = CENTROIDS.run(COHORT, SystemEntropy(), Bench(lambda _: drawer))
    raw = drawer.raw
    assert raw is not None
    again = CENTROIDS.run(Cohort(()), SystemEntropy(), Bench(lambda _: drawer))
    assert (again.images == first.images).all()
    assert (again.labels, drawer.raw) == (first.labels, raw)


class Drawer:
    """A place in memory."""

    def __init__(self) -> None:
        self.raw: bytes | None = None

    def read(self) -> bytes | None:
        return self.raw

    def write(self, data: bytes) -> None:
        self.raw = data
