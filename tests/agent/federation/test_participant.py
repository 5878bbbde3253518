"""A site's part in a run outlives its process: no round trains twice under one count, and no epsilon gets lost."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agent.domain import ExampleRule, TaskCohort, Update
from agent.errors import CoordinatorUnreachableError, ReviewRejectedError
from agent.federation.participant import Participant
from agent.federation.tasks import RoundTask, TaskDeclinedError
from agent.release.recovery import recover
from agent.release.unsent import PART
from policies.audit.verify import verify
from policies.ledger.backends.sqlite import export_file
from protos.common.errors import WorkerError
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.federated_sites import (
    START,
    FederatedSite,
    before_it_set_out,
    federated,
    federated_site,
    granted,
    in_training,
    part,
    when_it_had_set_out,
)


def test_what_a_run_reads_is_asked_for_in_the_name_of_the_run(tmp_path: Path) -> None:
    """So that the vault knows which version of a label table it stays with, whichever process asks."""
    w, asked = federated_site(tmp_path), list[str]()
    granted(w, federated())
    find = part(w).site.examples

    def noted(rule: ExampleRule) -> TaskCohort:
        asked.append(rule.run)
        return find(rule)

    part(w).site = replace(part(w).site, examples=noted)
    part(w).train("run-1", 1, START)
    assert asked == ["run-1"]


def _before_the_note(w: FederatedSite, _patch: pytest.MonkeyPatch) -> None:
    w.vault.crash_at = PART


def _before_the_ledgers_size_was_noted(w: FederatedSite, _patch: pytest.MonkeyPatch) -> None:
    w.vault.crash_at = "ledger"


MOMENTS = [
    _before_the_note,
    in_training,
    before_it_set_out,
    when_it_had_set_out,
    _before_the_ledgers_size_was_noted,
]


def killed(
    w: FederatedSite, number: int, moment: Callable[[FederatedSite, pytest.MonkeyPatch], None], start: Update = START
) -> bool:
    """The process dies while it is asked for a round; was its part taken up by the next one?"""
    with pytest.MonkeyPatch.context() as patch:
        moment(w, patch)
        with pytest.raises(KeyboardInterrupt):
            part(w).train("run-1", number, start)
    return w.crash()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_agent_goes_on_with_its_part_and_what_it_had_begun_counts(
    tmp_path: Path, moment: Callable[[FederatedSite, pytest.MonkeyPatch], None]
) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=3))
    whole = w.account()[0]
    assert killed(w, 1, moment)
    assert w.account() == (whole, 0), "the grant is held, all of it"
    assert w.vault.reads <= part(w).rounds_trained
    assert recover(part(w).site) == [], "a part that is open is not spent at the start"
    sealed = moment not in (_before_the_note, in_training)
    reads = w.vault.reads
    signed = part(w).train("run-1", 1, START)
    assert w.vault.reads == reads + (not sealed), "what was sealed is sent, and not made again"
    assert w.gateway.submit(f"submit-{signed.release.release}", signed.envelope, signed.artifact).admitted
    for number in (2, 3):
        if part(w).rounds_trained < 3:
            part(w).train("run-1", number, START)
    with pytest.raises(ReviewRejectedError, match="round"):
        part(w).train("run-1", 4, START)
    assert w.vault.reads - (moment is in_training) <= 3 == part(w).rounds_trained, "an interrupted round counts once"


def test_a_part_that_comes_back_as_something_else_does_not_leave_and_is_paid(tmp_path: Path) -> None:
    """It comes from a confined process, whose word is no word to rely on."""
    w = federated_site(tmp_path)
    granted(w, federated(rounds=2))
    one = part(w)
    one.site = replace(one.site, run=lambda *_: Update(np.zeros(START.vector.size + 1, np.float32)))
    with pytest.raises(WorkerError, match="with other parameters than it was given"):
        one.train("run-1", 1, START)
    assert (one.rounds_trained, one.site.ledger.store.state.sent) == (1, {})


@pytest.mark.parametrize("seed", range(3))
def test_whatever_kills_it_and_whenever_no_round_is_trained_beyond_what_was_priced(tmp_path: Path, seed: int) -> None:
    w, dice = federated_site(tmp_path), random.Random(seed)
    granted(w, federated(rounds=4, noise_multiplier=2.5))
    whole, number, asked = w.account()[0], 1, set[int]()
    for _ in range(10):
        number += dice.randrange(2)
        asked |= {number} if part(w).rounds_trained < 4 else set()
        if dice.random() < 0.5:
            moment = dice.choice(MOMENTS)
            with pytest.MonkeyPatch.context() as patch:
                moment(w, patch)
                with contextlib.suppress(KeyboardInterrupt, ReviewRejectedError):
                    part(w).train("run-1", number, START)
            assert w.crash()
        else:
            with contextlib.suppress(ReviewRejectedError):
                part(w).train("run-1", number, START)
        assert part(w).rounds_trained <= min(len(asked), 4), "an interrupted round counts once"
        assert w.account() == (whole, 0)
    trained = part(w).rounds_trained
    assert {sent.round for sent in part(w).site.ledger.store.state.sent.values()} <= asked
    part(w).leave_run()
    held, spent = w.account()
    assert held == 0
    assert spent >= whole * trained // 4, "what was begun is paid for"
    part(w).site.ledger.store.close()
    verify(export_file(tmp_path / "site-a.db", "lazaret/test", w.hospital.key))


def test_a_price_whose_note_was_not_written_is_spent_at_the_next_start(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    w.vault.crash_at = PART
    with pytest.raises(KeyboardInterrupt):
        part(w).join("run-1", federated())
    assert not w.crash()
    assert recover(part(w).site) == ["grant-site-a-0"]
    held, spent = w.account()
    assert held == 0 < spent
    with pytest.raises(ReviewRejectedError, match="priced before"):
        part(w).join("run-1", federated())


def test_a_price_that_was_noted_is_given_again_as_it_was(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    envelope = part(w).join("run-1", federated())
    assert w.crash()
    assert part(w).join("run-1", federated()) == envelope
    assert w.intake.reserve_run("run-1", {"site-a": envelope}, 1)["site-a"].admitted
    part(w).train("run-1", 1, START)


def test_nothing_is_read_before_the_coordinators_ledger_shows_the_grant_and_never_while_that_is_unknown(
    tmp_path: Path,
) -> None:
    w = federated_site(tmp_path)
    envelope = part(w).join("run-1", federated())
    with pytest.raises(ReviewRejectedError, match="not_granted"):
        part(w).train("run-1", 1, START)
    assert w.intake.reserve_run("run-1", {"site-a": envelope}, 1)["site-a"].admitted
    w.gateway.shut = True
    with pytest.raises(CoordinatorUnreachableError):
        part(w).train("run-1", 1, START)
    assert (w.vault.reads, part(w).rounds_trained) == (0, 0)
    w.gateway.shut = False
    part(w).train("run-1", 1, START)
    assert w.crash()
    w.gateway.shut = True
    with pytest.raises(CoordinatorUnreachableError):
        part(w).train("run-1", 2, START)
    assert w.vault.reads == 1


def test_a_no_of_the_coordinator_frees_what_the_site_holds_and_ends_its_part(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    envelope = part(w).join("run-1", federated())
    verdicts = w.intake.reserve_run("run-1", {"site-a": envelope}, 2)
    assert not verdicts["site-a"].admitted
    with pytest.raises(ReviewRejectedError, match="not_granted"):
        part(w).train("run-1", 1, START)
    assert w.account() == (0, 0)
    assert w.vault.reads == 0
    assert not w.crash()
    with pytest.raises(ReviewRejectedError, match="priced before"):
        part(w).join("run-1", federated())


def test_a_part_in_which_nothing_was_trained_is_freed_when_it_is_left_and_one_with_a_round_is_paid(
    tmp_path: Path,
) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=1))
    part(w).leave_run()
    assert w.account() == (0, 0)
    granted(w, federated(rounds=1), "run-2")
    part(w).train("run-2", 1, START)
    part(w).leave_run()
    held, spent = w.account()
    assert held == 0 < spent
    assert w.vault.note(PART) is None


def test_a_note_of_another_modality_or_project_or_of_a_grant_that_is_closed_is_not_taken_up(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated())
    site = part(w).site
    assert not Participant(site, "CT", UnsafeSeededEntropy(1)).resume()
    assert not Participant(site, "OT", UnsafeSeededEntropy(1), project="other").resume()
    site.ledger.close(part(w).grant, "finished")
    assert not Participant(site, "OT", UnsafeSeededEntropy(1)).resume()
    assert not w.crash()
    with pytest.raises(ReviewRejectedError, match="round"):
        part(w).train("run-1", 1, START)


def test_a_run_that_was_followed_to_its_end_is_closed_and_its_last_update_stays_until_the_run_is_over(
    tmp_path: Path,
) -> None:
    """Another site may be away: then the last round is asked again. A coordinator that was killed asks the price."""
    w = federated_site(tmp_path)
    envelope = granted(w, federated(rounds=1))
    sent = part(w).train("run-1", 1, START)
    assert w.crash(), "after the last round, and before its verdict is known"
    assert w.gateway.submit(f"submit-{sent.release.release}", sent.envelope, sent.artifact).admitted
    assert part(w).follow()
    held, spent = w.account()
    assert held == 0 < spent
    for _ in range(2):
        assert part(w).join("run-1", federated(rounds=1)) == envelope
        assert part(w).train("run-1", 1, START) == sent
        with pytest.raises(ReviewRejectedError, match="round"):
            part(w).train("run-1", 2, START)
        assert not w.crash()
    part(w).leave_run()
    assert (w.vault.note(PART), w.vault.blobs, w.account()) == (None, {}, (held, spent))
    with pytest.raises(ReviewRejectedError, match="priced before"):
        part(w).join("run-1", federated(rounds=1))


def test_the_last_update_of_a_run_whose_end_nobody_heard_of_goes_after_a_month(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=1))
    sent = part(w).train("run-1", 1, START)
    assert w.gateway.submit(f"submit-{sent.release.release}", sent.envelope, sent.artifact).admitted
    begun = 1.8e9
    part(w).now = lambda: begun
    assert part(w).follow()
    for days, kept in ((1, True), (29, True), (31, False)):
        assert not w.crash()
        part(w).now = partial(float, begun + 86_400 * days)
        part(w).follow()
        assert (w.vault.note(PART) is not None, bool(w.vault.blobs)) == (kept, kept)
    with pytest.raises(ReviewRejectedError, match="round"):
        part(w).train("run-1", 1, START)
    assert not w.crash()


def test_what_was_sealed_goes_with_the_next_one_and_when_the_site_leaves(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=3))
    for number in (1, 2):
        sent = part(w).train("run-1", number, START)
        assert list(w.vault.blobs) == [f"site/kept/{sent.release.release}/artifact"]
        recover(part(w).site)  # beside it
    part(w).leave_run()
    assert (w.vault.note(PART), w.vault.blobs) == (None, {})


@pytest.mark.parametrize("moment", [before_it_set_out, when_it_had_set_out])
@pytest.mark.parametrize("start", [False, True])
def test_what_was_sealed_of_a_patient_who_opts_out_is_not_sent_and_its_round_not_made_again(
    tmp_path: Path, moment: Callable[[FederatedSite, pytest.MonkeyPatch], None], start: bool
) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=3))
    assert killed(w, 1, moment)
    w.vault.out = frozenset({"0003"})
    if start:
        recover(part(w).site)
        assert w.crash()
    for rule in ("round" if start else "opted_out", "round"):
        with pytest.raises(ReviewRejectedError, match=rule):
            part(w).train("run-1", 1, START)
        assert w.vault.blobs == {}
    assert (w.vault.reads, w.crash()) == (1, True)
    with pytest.raises(ReviewRejectedError, match="round"):
        part(w).train("run-1", 1, START)
    part(w).train("run-1", 2, START)


def test_only_what_has_left_is_told_a_coordinator_that_asks_for_an_earlier_round(tmp_path: Path) -> None:
    """It has, or had, each of those updates. That one was sealed and withheld would tell it of an opt-out."""
    w = federated_site(tmp_path)
    granted(w, federated(rounds=4))
    part(w).train("run-1", 1, START)
    assert killed(w, 2, before_it_set_out)
    w.vault.out = frozenset({"0003"})
    for _ in range(2):
        with pytest.raises(ReviewRejectedError, match=r"opted_out|round"):
            part(w).train("run-1", 2, START)
    with pytest.raises(ReviewRejectedError, match="round"):
        part(w).train("run-1", 1, START)
    w.vault.out = frozenset()
    part(w).train("run-1", 3, START)
    for number in (1, 2):
        with pytest.raises(TaskDeclinedError, match="behind"):
            w.handle(RoundTask("run-1", "train", number - 1, federated(rounds=4).to_json().encode(), START.vector))
    reads = w.vault.reads
    part(w).leave_run()
    with pytest.raises(TaskDeclinedError, match="run_spent"):
        w.handle(RoundTask("run-1", "price", 0, federated(rounds=4).to_json().encode()))
    assert w.vault.reads == reads


def test_a_round_whose_sealed_bytes_are_gone_or_are_others_is_refused_and_not_made_again(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=3))
    assert killed(w, 1, before_it_set_out)
    (name,) = w.vault.blobs
    for damaged in ({}, {name: b"other bytes"}):
        w.vault.blobs = damaged
        assert w.crash()
        with pytest.raises(ReviewRejectedError, match="round"):
            part(w).train("run-1", 1, START)
    assert w.vault.reads == 1


def test_a_part_is_not_closed_while_its_last_update_is_sealed_and_has_not_set_out(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=1))
    assert killed(w, 1, before_it_set_out)
    assert not part(w).follow()
    part(w).train("run-1", 1, START)
    part(w).leave_run()
    held, spent = w.account()
    assert held == 0 < spent
