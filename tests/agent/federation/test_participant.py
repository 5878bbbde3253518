"""A site's part in a run outlives its process: no round trains twice under one count, and no epsilon gets lost."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.mechanisms.federated import Federated
from agent.nouns import Unreachable, Update
from agent.participant import NOTE, Participant
from agent.recovery import recover
from agent.site import Refused
from coordinator.intake import Intake
from policies.policy import parse
from policies.register import Register
from policies.sqlite import export_file, open_sqlite
from policies.store import Store
from policies.verify import verify
from tests.support.books import Clock, Hospital, policy
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.wards import Vault, Ward, federated

START = federated().initial()


def ward(tmp_path: Path) -> Ward:
    """One site and one coordinator, with real ledgers."""
    hospital = Hospital("site-a")
    store = Store(open_sqlite(tmp_path / "hub.db"), "lazaret/coordinator", Ed25519PrivateKey.generate(), Clock())
    intake = Intake.over(store, parse(policy(), "federation"))
    intake.enrol(hospital.enrolment()[1])
    return Ward(tmp_path, hospital, intake)


def part(w: Ward) -> Participant:
    return w.part.participant


def granted(w: Ward, job: Federated, run: str = "run-1") -> bytes:
    envelope = part(w).join(run, job)
    assert w.intake.reserve_run(run, {"site-a": envelope}, 1)["site-a"].admitted
    return envelope


def gone(*_: object, **__: object) -> None:
    """The process is gone: nothing after this line runs."""
    raise KeyboardInterrupt


def read_and_gone(vault: Vault, *_: object) -> None:
    vault.reads += 1
    raise KeyboardInterrupt


def after(method: Callable[..., object]) -> Callable[..., object]:
    def crash(*arguments: object) -> None:
        method(*arguments)
        raise KeyboardInterrupt

    return crash


def _before_the_note(w: Ward, _patch: pytest.MonkeyPatch) -> None:
    w.vault.crash_at = NOTE


def _in_training(_: Ward, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Vault, "cohort", read_and_gone)


def _before_it_set_out(_: Ward, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Register, "send", gone)


def _when_it_had_set_out(_: Ward, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Register, "send", after(Register.send))


def _before_the_ledgers_size_was_noted(w: Ward, _patch: pytest.MonkeyPatch) -> None:
    w.vault.crash_at = "ledger"


MOMENTS = [
    _before_the_note,
    _in_training,
    _before_it_set_out,
    _when_it_had_set_out,
    _before_the_ledgers_size_was_noted,
]


def killed(w: Ward, number: int, moment: Callable[[Ward, pytest.MonkeyPatch], None], start: Update = START) -> bool:
    """The process dies while it is asked for a round; was its part taken up by the next one?"""
    with pytest.MonkeyPatch.context() as patch:
        moment(w, patch)
        with pytest.raises(KeyboardInterrupt):
            part(w).train("run-1", number, start)
    return w.crash()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_agent_goes_on_with_its_part_and_what_it_had_begun_counts(
    tmp_path: Path, moment: Callable[[Ward, pytest.MonkeyPatch], None]
) -> None:
    w = ward(tmp_path)
    granted(w, federated(rounds=3))
    whole = w.account()[0]
    assert killed(w, 1, moment)
    assert w.account() == (whole, 0), "the grant is held, all of it"
    assert w.vault.reads <= part(w).rounds_trained
    assert recover(part(w).site) == [], "a part that is open is not spent at the start"
    set_out = moment in (_when_it_had_set_out, _before_the_ledgers_size_was_noted)
    if set_out:
        with pytest.raises(Refused, match="round"):
            part(w).train("run-1", 1, START)
    else:
        part(w).train("run-1", 1, START)
    for number in (2, 3):
        if part(w).rounds_trained < 3:
            part(w).train("run-1", number, START)
    with pytest.raises(Refused, match="round"):
        part(w).train("run-1", 4, START)
    assert w.vault.reads <= 3 == part(w).rounds_trained


@pytest.mark.parametrize("seed", range(3))
def test_whatever_kills_it_and_whenever_no_round_is_trained_beyond_what_was_priced(tmp_path: Path, seed: int) -> None:
    w, dice = ward(tmp_path), random.Random(seed)
    granted(w, federated(rounds=4, noise_multiplier=2.5))
    whole, number = w.account()[0], 1
    for _ in range(10):
        number += dice.randrange(2)
        if dice.random() < 0.5:
            moment = dice.choice(MOMENTS)
            with pytest.MonkeyPatch.context() as patch:
                moment(w, patch)
                with contextlib.suppress(KeyboardInterrupt, Refused):
                    part(w).train("run-1", number, START)
            assert w.crash()
        else:
            with contextlib.suppress(Refused):
                part(w).train("run-1", number, START)
        assert w.vault.reads <= part(w).rounds_trained <= 4
        assert w.account() == (whole, 0)
    reads = w.vault.reads
    part(w).part()
    held, spent = w.account()
    assert held == 0
    assert spent >= whole * reads // 4, "what was read is paid for"
    part(w).site.books.store.close()
    verify(export_file(tmp_path / "site-a.db", "lazaret/test", w.hospital.key))


def test_a_price_whose_note_was_not_written_is_spent_at_the_next_start(tmp_path: Path) -> None:
    w = ward(tmp_path)
    w.vault.crash_at = NOTE
    with pytest.raises(KeyboardInterrupt):
        part(w).join("run-1", federated())
    assert not w.crash()
    assert recover(part(w).site) == ["grant-site-a-0"]
    held, spent = w.account()
    assert held == 0 < spent
    with pytest.raises(Refused, match="priced before"):
        part(w).join("run-1", federated())


def test_a_price_that_was_noted_is_given_again_as_it_was(tmp_path: Path) -> None:
    w = ward(tmp_path)
    envelope = part(w).join("run-1", federated())
    assert w.crash()
    assert part(w).join("run-1", federated()) == envelope
    assert w.intake.reserve_run("run-1", {"site-a": envelope}, 1)["site-a"].admitted
    part(w).train("run-1", 1, START)


def test_nothing_is_read_before_the_coordinators_ledger_shows_the_grant_and_never_while_that_is_unknown(
    tmp_path: Path,
) -> None:
    w = ward(tmp_path)
    envelope = part(w).join("run-1", federated())
    with pytest.raises(Refused, match="not_granted"):
        part(w).train("run-1", 1, START)
    assert w.intake.reserve_run("run-1", {"site-a": envelope}, 1)["site-a"].admitted
    w.door.shut = True
    with pytest.raises(Unreachable):
        part(w).train("run-1", 1, START)
    assert (w.vault.reads, part(w).rounds_trained) == (0, 0)
    w.door.shut = False
    part(w).train("run-1", 1, START)
    assert w.crash()
    w.door.shut = True
    with pytest.raises(Unreachable):
        part(w).train("run-1", 2, START)
    assert w.vault.reads == 1


def test_a_no_of_the_coordinator_frees_what_the_site_holds_and_ends_its_part(tmp_path: Path) -> None:
    w = ward(tmp_path)
    envelope = part(w).join("run-1", federated())
    verdicts = w.intake.reserve_run("run-1", {"site-a": envelope}, 2)
    assert not verdicts["site-a"].admitted
    with pytest.raises(Refused, match="not_granted"):
        part(w).train("run-1", 1, START)
    assert w.account() == (0, 0)
    assert w.vault.reads == 0
    assert not w.crash()
    with pytest.raises(Refused, match="priced before"):
        part(w).join("run-1", federated())


def test_a_part_in_which_nothing_was_trained_is_freed_when_it_is_left_and_one_with_a_round_is_paid(
    tmp_path: Path,
) -> None:
    w = ward(tmp_path)
    granted(w, federated(rounds=1))
    part(w).part()
    assert w.account() == (0, 0)
    granted(w, federated(rounds=1), "run-2")
    part(w).train("run-2", 1, START)
    part(w).part()
    held, spent = w.account()
    assert held == 0 < spent
    assert w.vault.note(NOTE) is None


def test_a_note_of_another_modality_or_of_a_grant_that_is_closed_is_not_taken_up(tmp_path: Path) -> None:
    w = ward(tmp_path)
    granted(w, federated())
    site = part(w).site
    assert not Participant(site, "CT", UnsafeSeededEntropy(1)).resume()
    site.books.close(part(w).grant, "finished")
    assert not Participant(site, "OT", UnsafeSeededEntropy(1)).resume()
    assert not w.crash()
    with pytest.raises(Refused, match="round"):
        part(w).train("run-1", 1, START)


def test_a_run_that_was_followed_to_its_end_is_closed_and_leaves_no_note(tmp_path: Path) -> None:
    w = ward(tmp_path)
    granted(w, federated(rounds=1))
    sent, _ = part(w).train("run-1", 1, START)
    assert w.crash(), "after the last round, and before its verdict is known"
    assert w.door.submit(f"submit-{sent.release.release}", sent.envelope, sent.artifact).admitted
    assert part(w).follow()
    held, spent = w.account()
    assert held == 0 < spent
    assert w.vault.note(NOTE) is None
    assert not w.crash()
