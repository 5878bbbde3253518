"""Threat S14: whatever fails before a set is kept, the next attempt makes it of what was drawn before.

Of every mechanism that releases: sets without an epsilon are made by the same dice, and noise is drawn once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Cohort
from agent.dp import noise
from agent.dp.noise import SystemEntropy
from agent.mechanisms.anonfaces.mechanism import AnonFaces
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.registry import MECHANISMS
from agent.mechanisms.remodel.mechanism import Remodel
from agent.release import pipeline
from agent.release.pipeline import release_heads
from policies.accounting.claims import KAnonymous, NoClaim
from policies.review.policy import preset
from tests.support.ledger_world import policy
from tests.support.memory_place import MemoryPlace
from tests.support.remodelled_heads import ADMITS, examine, remodel, scans
from tests.support.site_world import SiteWorld, permissive, site_world
from tests.support.small_distillation import believe_the_vetting
from tests.support.small_mechanisms import CENTROIDS, COHORT, SET_RELEASES

ROUNDS = {"federated", "federated-masked"}  # no set: an update leaves with its round, or never
PATIENTS = 23
FULL = OSError(28, "No space left on device")


def made_by(name: str) -> tuple[Any, Callable[[SiteWorld], None]]:
    """The mechanism, and its release with fresh dice or the system's entropy."""
    if name == "remodel":
        mechanism = remodel()
        fresh = np.random.default_rng
        return mechanism, lambda s: _quiet(release_heads, s.site, mechanism, "MR", examine, fresh())
    case = SET_RELEASES[name]
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
    s = site_world(tmp_path, patients=PATIENTS, own=admits, federation=admits)
    s.vault.heads = scans()[:3]
    if name == "distill":  # an untrained verifier knows nobody, and what it says is no use to this test
        believe_the_vetting(monkeypatch)
    attempts: list[Any] = []

    def full(*_: Any) -> None:
        attempts.append((runs[-1] if runs else None, len(draws)))
        raise FULL

    monkeypatch.setattr(pipeline, "keep", full)
    runs, draws = _watched(monkeypatch, mechanism, full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            release(s)
    assert len(s.site.ledger.store.state.grants) == 1
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
    run, gaussians = type(mechanism).run, noise.draw_gaussians

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
    monkeypatch.setattr(noise, "draw_gaussians", counted)
    return runs, draws


def test_centroids_are_kept_with_their_noise_before_a_picture_is_made_of_them() -> None:
    """The second run reads nobody: another cohort and another entropy give the very same set."""
    place = MemoryPlace()
    first = CENTROIDS.run(COHORT, SystemEntropy(), Workspace(lambda _: place))
    raw = place.data
    assert raw is not None
    again = CENTROIDS.run(Cohort(()), SystemEntropy(), Workspace(lambda _: place))
    assert (again.images == first.images).all()
    assert (again.labels, place.data) == (first.labels, raw)
