"""P10, S14: a kill between any two writes of a release costs no budget; a start beside it takes nothing away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.dp.noise import SystemEntropy
from agent.release import pipeline
from agent.release.approval import submit_approved
from agent.release.recovery import recover
from agent.release.release_record import RECORD
from agent.release.resumable import abandon, held_for
from agent.release.unsent import listed
from policies.ledger.store import Store
from policies.review.policy import preset
from policies.review.rules import Verdict
from tests.support.site_world import (
    DirectCoordinatorClient,
    MemoryCheckpointStore,
    MemoryVault,
    SiteWorld,
    permissive,
    site_world,
)
from tests.support.small_mechanisms import SET_RELEASES

ADMITS = permissive(preset("internal")).replace("epsilon = 8.0", "epsilon = 100.0")
PATIENTS = 23
WRITES = 18  # of a release that nothing stops, at least
DURABLE: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (MemoryVault, ("write_note",)),
    (MemoryCheckpointStore, ("write", "clear")),
    (Store, ("append",)),
    (DirectCoordinatorClient, ("reserve", "settle", "submit")),
)


@contextmanager
def around_each_write(happens: Callable[[], None]) -> Iterator[None]:
    """``happens`` before and after everything durable that site or coordinator do."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in DURABLE:
            for name in names:
                patch.setattr(owner, name, _between(getattr(owner, name), happens))
        yield


def _between(act: Callable[..., Any], happens: Callable[[], None]) -> Callable[..., Any]:
    def instead(*told: Any, **named: Any) -> Any:
        happens()
        done = act(*told, **named)
        happens()
        return done

    return instead


def released(s: SiteWorld, name: str) -> Verdict:
    """One release, as the command makes it; and what was made in full already leaves as it is."""
    case = SET_RELEASES[name]
    for kept in listed(s.vault):
        return submit_approved(s.site, kept)[1]
    if s.site.ledger.store.state.releases:  # it had left
        return Verdict((), "B")
    if case.public:
        return pipeline.release_resumable(s.site, case.mechanism, case.selection, SystemEntropy())[1]
    return pipeline.release_synthetic(s.site, case.mechanism, case.selection, np.random.default_rng())[1]


def paid_once(s: SiteWorld, name: str) -> None:
    """One grant, spent on both sides; one release; and nothing lies about."""
    ledger = s.site.ledger.store.state
    assert [grant.state for grant in ledger.grants.values()] == ["spent"]
    assert len(ledger.releases) == len(s.intake.register.store.state.releases) == 1
    if not SET_RELEASES[name].public:
        assert s.spent("k") == ((0, 1), (0, 1))
        assert [one["release"] for one in s.vault.note(RECORD)] == list(ledger.releases)
    assert (listed(s.vault), held_for(s.site)) == ({}, "")
    assert not s.vault.site_places("kept/")


@pytest.mark.parametrize(("name", "tries"), [("ksame", 60), ("privimage", 16)])
def test_a_kill_between_any_two_writes_costs_nothing(name: str, tries: int) -> None:
    points = set()

    @settings(max_examples=tries, deadline=None)
    @given(kills=st.lists(st.integers(1, 2 * WRITES), min_size=1, max_size=4))
    def killed_at(kills: list[int]) -> None:
        points.update(kills[:1])
        with TemporaryDirectory() as folder:
            s = site_world(Path(folder), patients=PATIENTS, own=ADMITS, federation=ADMITS)
            left = list(kills)

            def dies() -> None:
                if left:
                    left[0] -= 1
                    if not left[0]:
                        left.pop(0)
                        raise KeyboardInterrupt

            with around_each_write(dies):
                for _ in range(len(kills) + 1):
                    try:
                        recover(s.site)
                        verdict = released(s, name)
                        break
                    except KeyboardInterrupt:
                        continue
            assert verdict.admitted
            left.clear()
            recover(s.site)
            abandon(s.site)  # the note of what was made in full, where the kill came just before it was cleared
            paid_once(s, name)

    killed_at()
    assert len(points) > tries // 4, "kills all along"


@pytest.mark.parametrize("name", ["ksame", "privimage"])
def test_a_service_that_starts_between_any_two_writes_of_a_making_takes_nothing_from_it(
    tmp_path: Path, name: str
) -> None:
    s = site_world(tmp_path, patients=PATIENTS, own=ADMITS, federation=ADMITS)
    starts, recovering = 0, False

    def starts_beside() -> None:
        nonlocal starts, recovering
        if not recovering:
            recovering = True
            recover(s.site)
            starts, recovering = starts + 1, False

    with around_each_write(starts_beside):
        assert released(s, name).admitted
    assert starts > 2 * WRITES
    paid_once(s, name)
