"""Who opts out while a release is being made, or waits for persons, is in nothing that leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Cohort
from agent.errors import ReviewRejectedError
from agent.federation import participant
from agent.federation.service import TaskHandler
from agent.federation.tasks import RoundTask, TaskDeclinedError
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from agent.mechanisms.ksame.mechanism import KSame
from agent.release.approval import submit_approved, withdraw
from agent.release.pipeline import release_synthetic
from agent.release.recovery import recover
from agent.release.unsent import kept_update
from policies.statements import Release
from protos.artifacts.arrays import pack_vector
from protos.secagg.messages import SumStep
from tests.support.federated_sites import START, ErrorLog, SecureRun, federated, federated_site, granted, part
from tests.support.site_world import RNG, MemoryVault, approve, approving, ksame, site_world, waiting

LEAVES = frozenset({"0003"})  # one of the vault's patients


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, mechanism: type[KSame | Federated | FederatedMasked], vault: MemoryVault
) -> None:
    """The patient opts out while the mechanism computes: the console is another process."""
    name = "run" if mechanism is KSame else "run_round"
    make: Callable[..., object] = getattr(mechanism, name)

    def making(self: object, cohort: Cohort, *rest: object, **more: object) -> object:
        assert {p.pseudonym for p in cohort.patients} >= LEAVES
        made = make(self, cohort, *rest, **more)
        vault.out = LEAVES
        return made

    monkeypatch.setattr(mechanism, name, making)


def test_a_synthetic_set_made_while_a_patient_opts_out_does_not_leave_and_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path)
    meanwhile(monkeypatch, KSame, s.vault)
    with pytest.raises(ReviewRejectedError, match="opted_out") as caught:
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert caught.value.where == "site"
    assert s.intake.register.store.state.releases == {}
    assert s.site.ledger.store.state.sent == {}
    assert s.spent("k") == ((0, 1), (0, 1))


def test_a_release_that_waits_is_not_handed_over_once_a_patient_in_it_has_opted_out(tmp_path: Path) -> None:
    s, careful, local = approving(tmp_path)
    release = waiting(s)
    for person in (careful, local):
        approve(s, person, release)
    inside = {p for cluster in s.vault.note("releases")[0]["clusters"] for p in cluster}
    s.vault.out = frozenset({min(inside)})
    for _ in range(2):
        with pytest.raises(ReviewRejectedError, match="opted_out"):
            submit_approved(s.site, release.release)
    assert s.intake.register.store.state.releases == {}
    s.vault.out = frozenset({"another patient"})
    assert submit_approved(s.site, release.release)[1].admitted


def test_a_release_of_which_nobody_knows_who_is_in_it_is_not_handed_over(tmp_path: Path) -> None:
    s, careful, local = approving(tmp_path)
    release = waiting(s)
    for person in (careful, local):
        approve(s, person, release)
    s.vault.write_note("releases", [])
    with pytest.raises(ReviewRejectedError, match="withdraw it"):
        submit_approved(s.site, release.release)
    withdraw(s.site, release.release)
    assert s.spent("k") == ((0, 1), (0, 1))


def test_an_update_made_while_a_patient_opts_out_does_not_leave_and_the_next_is_made_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=2))
    with monkeypatch.context() as patch:
        meanwhile(patch, Federated, w.vault)
        with pytest.raises(ReviewRejectedError, match="opted_out"):
            part(w).train("run-1", 1, START)
    assert (part(w).rounds_trained, part(w).round_in_progress) == (1, False)
    assert part(w).site.ledger.store.state.sent == {}
    seen: list[set[str]] = []
    cohort = MemoryVault.cohort

    def look(self: MemoryVault, *rule: Any) -> Cohort:
        found = cohort(self, *rule)
        seen.append({p.pseudonym for p in found.patients})
        return found

    monkeypatch.setattr(MemoryVault, "cohort", look)
    part(w).train("run-1", 2, START)
    assert len(seen) == 1
    assert not seen[0] & LEAVES
    with pytest.raises(ReviewRejectedError):
        part(w).train("run-1", 3, START)


def test_the_coordinator_hears_the_same_word_as_for_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=2))
    meanwhile(monkeypatch, Federated, w.vault)
    handler = TaskHandler(w.part, threading.Lock(), ErrorLog(), threading.Event())
    with pytest.raises(TaskDeclinedError, match="unavailable"):
        handler._answer(RoundTask("run-1", "train", 0, b"", np.asarray(START.vector)))


@pytest.mark.parametrize("how", ["opt-out", "opt-out, and a start of the site's tidying", "left"])
def test_an_update_does_not_leave_after_its_pause_when_somebody_has_opted_out_or_the_run_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The pause before an answer may last hours, and nobody asks again."""
    w, stop, waits = federated_site(tmp_path), threading.Event(), list[float]()
    granted(w, federated(rounds=2))

    def pause(seconds: float) -> bool:
        waits.append(seconds)
        if how == "left":
            part(w).leave_run("left")
        else:
            w.vault.out = LEAVES
        if "tidying" in how:
            recover(part(w).site)
        return False

    monkeypatch.setattr(stop, "wait", pause)
    handler = TaskHandler(w.part, threading.Lock(), ErrorLog(), stop)
    with pytest.raises(TaskDeclinedError, match="unavailable"):
        handler.handle(RoundTask("run-1", "train", 0, b"", np.asarray(START.vector)))
    assert (len(waits), w.vault.reads, w.vault.blobs) == (1, 1, {})


def test_an_update_that_was_changed_where_it_is_kept_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, stop = federated_site(tmp_path), threading.Event()
    granted(w, federated(rounds=2))

    def pause(_: float) -> bool:
        ((name, raw),) = w.vault.blobs.items()
        w.vault.blobs[name] = raw[:-1] + bytes([raw[-1] ^ 1])
        return False

    monkeypatch.setattr(stop, "wait", pause)
    with pytest.raises(TaskDeclinedError, match="unavailable"):
        TaskHandler(w.part, threading.Lock(), ErrorLog(), stop).handle(
            RoundTask("run-1", "train", 0, b"", np.asarray(START.vector))
        )


def test_who_opts_out_while_an_update_is_read_from_the_vault_is_in_none_that_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read one of 100 million numbers takes seconds."""
    w, stop = federated_site(tmp_path), threading.Event()
    granted(w, federated(rounds=2))
    monkeypatch.setattr(stop, "wait", lambda _: False)

    def read(vault: MemoryVault, release: Release) -> bytes | None:
        found = kept_update(vault, release)
        vault.out = LEAVES
        return found

    monkeypatch.setattr(participant, "kept_update", read)
    with pytest.raises(TaskDeclinedError, match="unavailable"):
        TaskHandler(w.part, threading.Lock(), ErrorLog(), stop).handle(
            RoundTask("run-1", "train", 0, b"", np.asarray(START.vector))
        )
    assert (part(w).last, w.vault.blobs) == (None, {})


def test_an_update_leaves_after_its_pause_as_it_was_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, stop = federated_site(tmp_path), threading.Event()
    granted(w, federated(rounds=2))
    monkeypatch.setattr(stop, "wait", lambda _: False)
    answer = TaskHandler(w.part, threading.Lock(), ErrorLog(), stop).handle(
        RoundTask("run-1", "train", 0, b"", np.asarray(START.vector))
    )
    last = part(w).last
    assert last is not None
    assert answer.vector is not None
    assert (answer.envelope, pack_vector(answer.vector)) == (last.envelope, kept_update(w.vault, last.release))
    assert w.vault.reads == 1


@pytest.mark.parametrize("how", ["in the pause", "asked again", "left"])
def test_a_masked_vector_does_not_leave_after_its_pause_or_again_when_somebody_has_opted_out_or_the_run_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    trial, stop = SecureRun(tmp_path), threading.Event()
    trial.granted()
    request, north = trial.play(until=SumStep.MASK).requests()["north"], trial.wards["north"]
    handler = TaskHandler(north.part, threading.Lock(), ErrorLog(), stop)
    task = RoundTask("run-1", "secure", 0, trial.config, None, "mask", request)

    def go(*_: object) -> bool:
        north.vault.out = LEAVES if how != "left" else frozenset()
        if how == "left":
            north.part.participant.leave_run("left")
        return False

    monkeypatch.setattr(stop, "wait", go if how != "asked again" else lambda _: False)
    if how == "asked again":
        assert handler.handle(task).payload
        go()
    for word in ("unavailable", "policy"):
        with pytest.raises(TaskDeclinedError, match=word):
            handler._answer(task) if how == "asked again" else handler.handle(task)
    assert (north.vault.reads, north.part._answers.keys() & {"mask"}) == (1, set())
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.AGREE, b"")


def test_a_part_of_a_secret_sum_made_while_a_patient_opts_out_is_not_masked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = SecureRun(tmp_path)
    trial.granted()
    hub = trial.play(until=SumStep.MASK)
    north = trial.wards["north"]
    meanwhile(monkeypatch, FederatedMasked, north.vault)
    with pytest.raises(ReviewRejectedError, match="opted_out"):
        trial.step("north", SumStep.MASK, hub.requests()["north"])
    assert not north.part.participant.round_in_progress
    assert north.part.participant.site.ledger.store.state.sent == {}
    with pytest.raises(ReviewRejectedError, match="out of order"):
        trial.step("north", SumStep.MASK, hub.requests()["north"])
