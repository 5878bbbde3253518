"""P10: an interrupted round goes on from its own sealed steps, for one price, and from no others."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Update
from agent.dp import dpsgd
from agent.errors import DivergedError, ReviewRejectedError
from agent.federation import round_making
from agent.federation.round_making import MOST_RESTARTS, RoundSteps, UnfinishedRound, digest_of_cohort
from agent.mechanisms.federated.round_training import STEPS
from agent.models.training_loop import load_state, save_state
from agent.release.maker_process import MakerEndedError
from agent.release.recovery import recover
from agent.release.unsent import PART
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.vault import ROUND_STEPS
from protos.federation.round_times import RoundTerms
from tests.support.federated_sites import START, FederatedSite, federated, federated_site, granted, part
from tests.support.site_world import MemoryCheckpointStore, MemoryVault

WHOLE = 8  # steps of a round; each but the last is kept
JOB = federated(rounds=3, steps_per_round=WHOLE, noise_multiplier=4.0)
OTHER = Update(np.full(JOB.parameters, 0.125, np.float32))


@pytest.fixture
def w(tmp_path: Path) -> FederatedSite:
    """A site whose run is granted."""
    made = federated_site(tmp_path)
    granted(made, JOB)
    return made


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each noisy sum: of which draw."""
    seen, draw = list[int](), dpsgd.noisy_sum

    def noisy(*told: Any) -> Any:
        seen.append(len(seen) + 1)
        return draw(*told)

    monkeypatch.setattr(dpsgd, "noisy_sum", noisy)
    return seen


@contextmanager
def ended_in(step: int, fault: BaseException, times: int = 1) -> Iterator[None]:
    """After the noise of a draw, and before the step is kept, the process that trains is gone; so many times."""
    with pytest.MonkeyPatch.context() as patch:
        draw, seen, left = dpsgd.noisy_sum, [0], [times]

        def noisy(*told: Any) -> Any:
            found = draw(*told)
            seen[0] += 1
            if seen[0] >= step and left[0]:
                left[0] -= 1
                raise fault
            return found

        patch.setattr(dpsgd, "noisy_sum", noisy)
        yield


def killed_in(w: FederatedSite, step: int, number: int = 1, start: Update = START) -> None:
    """The service is killed in a step, and starts again."""
    with ended_in(step, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        part(w).train("run-1", number, start)
    assert w.crash()
    recover(part(w).site)


def kept_step(w: FederatedSite) -> int:
    """The step of the checkpoint, by its own header."""
    raw = w.vault.blobs[STEPS]
    name = raw.split(b'\\"run\\": \\"', 1)[1][:64].decode()
    return load_state(raw, name)[0]


@pytest.mark.parametrize("step", [1, 2, 5, WHOLE])
def test_a_killed_round_goes_on_where_it_was_and_is_paid_once(w: FederatedSite, drawn: list[int], step: int) -> None:
    killed_in(w, step)
    assert (STEPS in w.vault.blobs) == (step > 1)
    if step > 1:
        assert kept_step(w) == step - 1
    signed = part(w).train("run-1", 1, START)
    assert len(drawn) == WHOLE + 1, "the step that was not kept is drawn anew, and no other"
    assert (part(w).rounds_trained, signed.release.claim.steps) == (1, WHOLE)  # type: ignore[union-attr]
    assert STEPS not in w.vault.blobs
    for number in (2, 3):
        part(w).train("run-1", number, START)
    with pytest.raises(ReviewRejectedError, match="not covered by a grant"):
        part(w).train("run-1", 4, START)


def test_killed_again_and_again_it_makes_progress_and_is_paid_once(w: FederatedSite, drawn: list[int]) -> None:
    for _ in range(WHOLE - 1):
        killed_in(w, 2)
    assert kept_step(w) == WHOLE - 1
    part(w).train("run-1", 1, START)
    assert (len(drawn), part(w).rounds_trained) == (2 * (WHOLE - 1) + 1, 1)


@pytest.mark.parametrize("times", [1, MOST_RESTARTS, MOST_RESTARTS + 1])
def test_a_killed_process_is_followed_by_another_within_the_same_answer(
    w: FederatedSite, drawn: list[int], times: int
) -> None:
    with ended_in(5, MakerEndedError(signal.SIGKILL), times):
        if times > MOST_RESTARTS:
            with pytest.raises(MakerEndedError):
                part(w).train("run-1", 1, START)
            assert kept_step(w) == 4
        part(w).train("run-1", 1, START)
    assert (len(drawn), part(w).rounds_trained) == (WHOLE + times, 1)


@pytest.mark.parametrize(
    "fault",
    [
        DivergedError("parameters are not finite"),
        MakerEndedError(signal.SIGSEGV),
        MemoryError(),
        ValueError(),
    ],
)
def test_a_fault_of_the_trainings_own_is_an_end_and_the_round_is_paid(w: FederatedSite, fault: Exception) -> None:
    """Whoever hears of it hears what hangs on the draws: other draws at the same price would be a choice."""
    with ended_in(5, fault), pytest.raises(type(fault)):
        part(w).train("run-1", 1, START)
    assert (STEPS in w.vault.blobs, part(w).unfinished) == (False, None)
    assert w.crash()
    part(w).train("run-1", 1, START)
    assert part(w).rounds_trained == 2


def test_the_control_in_which_such_a_fault_is_no_end_makes_a_round_for_nothing(
    w: FederatedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule broken on purpose."""
    monkeypatch.setattr("agent.federation.participant.goes_on", lambda _: True)
    with ended_in(5, DivergedError("")), pytest.raises(DivergedError):
        part(w).train("run-1", 1, START)
    part(w).train("run-1", 1, START)
    assert part(w).rounds_trained == 1


# -- of whom and of which round the steps are


def other_number(w: FederatedSite) -> tuple[int, Update]:
    del w
    return 2, START


def other_start(w: FederatedSite) -> tuple[int, Update]:
    del w
    return 1, OTHER


@pytest.mark.parametrize("asked", [other_number, other_start])
def test_another_round_takes_up_nothing_and_is_paid(
    w: FederatedSite, drawn: list[int], asked: Callable[[FederatedSite], tuple[int, Update]]
) -> None:
    killed_in(w, 5)
    number, start = asked(w)
    part(w).train("run-1", number, start)
    assert (len(drawn), part(w).rounds_trained) == (5 + WHOLE, 2)


def test_of_an_interrupted_round_nothing_stays_once_another_is_begun(w: FederatedSite) -> None:
    killed_in(w, 5)
    with ended_in(1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        part(w).train("run-1", 2, START)
    assert STEPS not in w.vault.blobs


def images_changed(w: FederatedSite) -> None:
    w.vault.seed = 2


def one_came(w: FederatedSite) -> None:
    w.vault.patients += 1


def one_opted_out(w: FederatedSite) -> None:
    w.vault.out = frozenset({"0003"})


def damaged(w: FederatedSite) -> None:
    raw = bytearray(w.vault.blobs[STEPS])
    raw[-3] ^= 1
    w.vault.blobs[STEPS] = bytes(raw)


def cut(w: FederatedSite) -> None:
    w.vault.blobs[STEPS] = w.vault.blobs[STEPS][:-1]


def gone(w: FederatedSite) -> None:
    del w.vault.blobs[STEPS]


@pytest.mark.parametrize("change", [images_changed, one_came, one_opted_out, damaged, cut, gone])
def test_of_other_patients_or_other_bytes_nothing_is_taken_up_and_the_round_begins_anew_at_its_price(
    w: FederatedSite, drawn: list[int], change: Callable[[FederatedSite], None]
) -> None:
    killed_in(w, 5)
    change(w)
    part(w).train("run-1", 1, START)
    assert (len(drawn), part(w).rounds_trained) == (5 + WHOLE, 1)


def test_the_control_that_does_not_look_at_the_patients_trains_on_with_one_who_opted_out(
    w: FederatedSite, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule broken on purpose."""
    monkeypatch.setattr(round_making, "digest_of_cohort", lambda _: "")
    killed_in(w, 5)
    one_opted_out(w)
    part(w).train("run-1", 1, START)
    assert len(drawn) == WHOLE + 1, "four steps are of that patient, too"


def names(w: FederatedSite) -> Iterator[str]:
    """What the steps of a round are called, of it and of others."""
    one, cohort = part(w), part(w).site.examples(JOB.examples("trained", "run-1"))
    one.unfinished = UnfinishedRound.of(1, START)
    held = dict(run=one.run, grant=one.grant, mechanism=one.mechanism, terms=one.terms, unfinished=one.unfinished)
    others = (
        {},
        {"run": "run-2"},
        {"grant": "grant-9"},
        {"mechanism": federated(rounds=4, steps_per_round=WHOLE, noise_multiplier=4.0)},
        {"terms": RoundTerms(7)},
        {"unfinished": UnfinishedRound.of(2, START)},
        {"unfinished": UnfinishedRound.of(1, OTHER)},
        {"unfinished": UnfinishedRound.of(1, Update(START.vector, START.vector[:3]))},
        {"project": "other"},
    )
    for other in others:
        for key, value in {**held, "project": "main", **other}.items():
            setattr(one, key, value)
        yield round_making._name(one, one.unfinished, digest_of_cohort(cohort))
    for key, value in held.items():
        setattr(one, key, value)
    yield round_making._name(one, one.unfinished, digest_of_cohort(replace(cohort, patients=cohort.patients[1:])))


def test_the_steps_are_bound_to_run_grant_plan_number_start_and_patients(w: FederatedSite) -> None:
    found = list(names(w))
    assert len(set(found)) == len(found) == 10


@pytest.mark.parametrize("change", ["run", "bytes"])
def test_what_is_kept_of_another_round_or_is_damaged_is_deleted_when_it_is_read(change: str) -> None:
    place = MemoryVault()
    mine = RoundSteps(place, "a" * 64, WHOLE, frozenset(), lambda: 0.0)  # type: ignore[arg-type]
    mine.write(save_state("a" * 64, 3, {}))
    assert (mine.read() is not None, mine.kept) == (True, 3)
    if change == "bytes":
        place.blobs[STEPS] = place.blobs[STEPS].replace(b"step", b"stop")
    else:
        mine = replace(mine, round="b" * 64)
    assert (mine.read(), mine.kept, place.blobs) == (None, 0, {})


def test_the_cohorts_digest_tells_order_shape_and_every_bit_of_an_example(w: FederatedSite) -> None:
    cohort = w.vault.examples(JOB.examples("trained"))
    first, *rest = cohort.patients
    example, *others = first.examples
    pixels = example.pixels.copy()
    pixels[0, 0, 0] = np.nextafter(pixels[0, 0, 0], np.float32(2.0))

    def with_first(*examples: Any) -> Any:
        return replace(cohort, patients=(replace(first, examples=examples), *rest))

    kinds = [
        cohort,
        with_first(replace(example, pixels=pixels), *others),
        with_first(replace(example, target=example.target + 1), *others),
        with_first(*others),
        with_first(*others, example),
        replace(cohort, patients=tuple(rest)),
    ]
    assert len({digest_of_cohort(one) for one in kinds}) == len(kinds)


# -- the disk, and what stays


def test_a_full_disk_stops_the_round_which_goes_on_at_what_was_kept(
    w: FederatedSite, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a resumable release does. The checkpoint before is whole."""
    write, left = MemoryCheckpointStore.write, [4]

    def full(place: MemoryCheckpointStore, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise VaultError("the disk is full, and nothing was saved")
        write(place, data)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryCheckpointStore, "write", full)
        with pytest.raises(VaultError, match="disk is full"):
            part(w).train("run-1", 1, START)
    assert (kept_step(w), len(drawn)) == (4, 5)
    part(w).train("run-1", 1, START)
    assert (len(drawn), part(w).rounds_trained) == (WHOLE + 1, 1)


def test_while_somebody_opts_out_no_step_is_kept_any_more_and_the_round_is_refused(w: FederatedSite) -> None:
    read = MemoryCheckpointStore.write

    def write(place: MemoryCheckpointStore, data: bytes) -> None:
        read(place, data)
        w.vault.out = frozenset({"0003"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryCheckpointStore, "write", write)
        with ended_in(6, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            part(w).train("run-1", 1, START)
        assert STEPS not in w.vault.blobs
    w.vault.out = frozenset()
    assert w.crash()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryCheckpointStore, "write", write)
        with pytest.raises(ReviewRejectedError, match="opted_out"):
            part(w).train("run-1", 1, START)
    assert (w.vault.blobs, part(w).unfinished, part(w).rounds_trained) == ({}, None, 1)


@pytest.mark.parametrize("how", ["left", "over", "another run", "the ledger was closed", "no note"])
def test_nothing_of_the_steps_stays_where_the_part_has_its_end(w: FederatedSite, how: str) -> None:
    killed_in(w, 5)
    assert STEPS in w.vault.blobs
    if how in ("left", "over"):
        part(w).leave_run(how)  # type: ignore[arg-type]
    elif how == "another run":
        granted(w, JOB, "run-2")
    elif how == "no note":
        w.vault.write_note(PART, None)
        assert not w.crash()
    else:
        part(w).site.ledger.close(part(w).grant, "released")
        assert not w.crash()
    assert STEPS not in w.vault.blobs


def test_the_last_round_of_a_part_is_not_taken_for_made_while_it_is_interrupted(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    granted(w, federated(rounds=1, steps_per_round=WHOLE, noise_multiplier=4.0))
    killed_in(w, 5)
    assert not part(w).follow()
    assert part(w).grant
    signed = part(w).train("run-1", 1, START)
    assert w.gateway.submit(f"submit-{signed.release.release}", signed.envelope, signed.artifact).admitted
    assert part(w).follow()


def test_a_part_of_an_older_version_counts_the_round_that_it_was_in_as_made(w: FederatedSite) -> None:
    killed_in(w, 1)
    w.vault.write_note(PART, {k: v for k, v in w.vault.note(PART).items() if k != "unfinished"})
    assert w.crash()
    part(w).train("run-1", 1, START)
    assert part(w).rounds_trained == 2


def test_what_an_opt_out_deletes_is_the_place_of_the_steps() -> None:
    """Its command is another process, which knows no part."""
    assert ROUND_STEPS == STEPS


def test_the_note_of_a_part_has_an_unfinished_round_back() -> None:
    one = UnfinishedRound.of(3, START)
    assert UnfinishedRound.of_note({"unfinished": dataclasses.asdict(one)}) == one
    assert UnfinishedRound.of_note({}) is None
