"""P10: a kill between any two writes of a site's part takes it out of no round, and none is noised or paid twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Update
from agent.dp import dpsgd
from agent.errors import ReviewRejectedError
from agent.federation.participant import Participant
from agent.mechanisms.federated.mechanism import Federated
from agent.release.recovery import recover
from agent.release.unsent import PART
from policies.ledger.store import Store
from tests.support.federated_sites import FederatedSite, federated, federated_site, granted, part
from tests.support.site_world import MemoryCheckpointStore, MemoryVault

ROUNDS, SPARE = 3, 2
STEPS_PER_ROUND = 4  # each is kept, but for the last one
WRITES = 20  # of such a part that nothing stops, at least


def start_of(number: int) -> Update:
    """Each round starts elsewhere, which tells the rounds apart."""
    return Update(np.full(federated().parameters, number / 8, np.float32))


class Kills:
    """The site's process is gone before some of its durable writes."""

    def __init__(self, patch: pytest.MonkeyPatch, w: FederatedSite, moments: set[int]) -> None:
        self.w, self.moments, self.writes, self.noised, self.sealed = w, moments, 0, list[int](), set[int]()
        self.drawn = 0  # noisy sums
        places = (MemoryVault, "write_note"), (MemoryCheckpointStore, "write"), (MemoryCheckpointStore, "clear")
        for owner, name in (*places, (Store, "append")):
            patch.setattr(owner, name, self._before(getattr(owner, name)))
        patch.setattr(Federated, "run_round", self._noisy(Federated.run_round))
        patch.setattr(dpsgd, "noisy_sum", self._drawing(dpsgd.noisy_sum))

    def _before(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def instead(owner: Any, *told: Any) -> Any:
            if owner is not self.w.intake.register.store:
                self.writes += 1
                if self.writes in self.moments:
                    raise KeyboardInterrupt
            done = write(owner, *told)
            self.sealed.add(((self.w.vault.note(PART) or {}).get("sealed") or {"round": 0})["round"])
            return done

        return instead

    def _noisy(self, run: Callable[..., Update]) -> Callable[..., Update]:
        def instead(job: Federated, cohort: Any, start: Update, *rest: Any, **more: Any) -> Update:
            number = round(float(start.vector[0]) * 8)
            assert number not in self.sealed, "a sealed round is noised twice"
            self.noised.append(number)
            return run(job, cohort, start, *rest, **more)

        return instead

    def _drawing(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*told: Any) -> Any:
            self.drawn += 1
            return draw(*told)

        return instead


def asked(w: FederatedSite, kills: Kills, act: Callable[[], Any]) -> Any:
    """As a coordinator that needs this site asks: again after each kill. Another process has other randomness."""
    while True:
        try:
            return act()
        except KeyboardInterrupt:
            w.seed += 100
            while True:
                try:
                    w.crash()
                    recover(part(w).site)
                    break
                except KeyboardInterrupt:
                    continue


def taken_part(folder: Path, moments: set[int]) -> Kills:
    """A run that needs this site in every round, and kills."""
    folder.mkdir()
    w = federated_site(folder)
    granted(w, federated(rounds=ROUNDS + SPARE, noise_multiplier=2.5, steps_per_round=STEPS_PER_ROUND))
    whole = w.account()[0]
    with pytest.MonkeyPatch.context() as patch:
        kills = Kills(patch, w, moments)
        for number in range(1, ROUNDS + 1):
            first = asked(w, kills, lambda n=number: part(w).train("run-1", n, start_of(n)))
            assert w.gateway.submit(f"submit-{first.release.release}", first.envelope, first.artifact).admitted
            for _ in range(2):  # another site was away
                again = asked(w, kills, lambda n=number: part(w).train("run-1", n, start_of(n)))
                assert (again.envelope, again.artifact) == (first.envelope, first.artifact)
                asked(w, kills, lambda: part(w).follow())
        assert len(kills.noised) <= ROUNDS + len(moments)
        assert kills.drawn <= (ROUNDS * STEPS_PER_ROUND) + len(moments), "a kill costs a step, and not a round"
        assert part(w).rounds_trained == ROUNDS, "no round counts twice"
        asked(w, kills, lambda: part(w).leave_run())
    held, spent = w.account()
    assert held == 0
    assert spent == whole * ROUNDS // (ROUNDS + SPARE), "one price for a round, however often it was begun"
    assert (w.vault.note(PART), w.crash()) == (None, False)
    recover(part(w).site)
    assert w.vault.blobs == {}, "and nothing of it stays"
    part(w).site.ledger.store.close()
    return kills


def test_a_kill_before_any_write_takes_the_site_out_of_no_round(tmp_path: Path) -> None:
    writes = taken_part(tmp_path / "whole", set()).writes
    assert writes >= WRITES
    for moment in range(1, writes + 1):
        assert taken_part(tmp_path / f"{moment}", {moment}).writes >= moment


@pytest.mark.parametrize("seed", range(4))
def test_two_kills_do_not_either(tmp_path: Path, seed: int) -> None:
    moments = set(random.Random(seed).sample(range(1, 2 * WRITES + 2 * SPARE), SPARE))
    taken_part(tmp_path / "world", moments)


def test_a_kill_while_the_site_leaves_its_run_keeps_nothing_of_it_once_its_grant_is_closed(tmp_path: Path) -> None:
    """Nobody asks again: the next start is all that follows (P15)."""
    closed, moment, done = list[int](), 0, False
    while not done:
        moment += 1
        (tmp_path / f"{moment}").mkdir()
        w = federated_site(tmp_path / f"{moment}")
        granted(w, federated(rounds=ROUNDS))
        part(w).train("run-1", 1, start_of(1))
        grant = part(w).grant
        with pytest.MonkeyPatch.context() as patch:
            Kills(patch, w, {moment})
            try:
                part(w).leave_run()
                done = True
            except KeyboardInterrupt:
                pass
        noted = w.vault.note(PART) is not None
        recover(part(w).site)
        if not w.crash():
            closed += [moment] * noted
            recover(part(w).site)  # of bytes that nobody lists any more
            assert (w.vault.note(PART), w.vault.blobs) == (None, {})
            assert part(w).site.ledger.store.state.grants[grant].state == "spent"
        part(w).site.ledger.store.close()
    assert closed, "a kill between the ledger and the note"


def test_without_what_the_vault_keeps_a_sealed_round_would_be_noised_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule broken on purpose."""
    monkeypatch.setattr(Participant, "_take_up", lambda *_: None)
    seen = []
    for moment in range(1, WRITES):
        try:
            taken_part(tmp_path / f"{moment}", {moment})
        except (AssertionError, ReviewRejectedError) as red:
            seen.append(str(red))
    assert any("noised twice" in text for text in seen)
    assert any("not covered by a grant" in text for text in seen), "and after it had set out, the site is out"
