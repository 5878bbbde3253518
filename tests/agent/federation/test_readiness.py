from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Update
from agent.dp.compute_device import AUTO, SiteCompute
from agent.federation import readiness
from agent.federation.readiness import SiteMachine, examine
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from policies.tasks.evaluation import TRAINED
from protos.artifacts.bfloat16 import BFLOAT16, widened
from protos.federation.round_times import RoundTerms
from protos.federation.site_check import SiteCheck
from tests.support.federated_sites import FederatedSite, federated, federated_site, masked, part
from tests.support.site_world import MemoryVault

TERMS = RoundTerms(3600, 0)


HALF = replace(federated(), update_precision=BFLOAT16)


def examined(
    w: FederatedSite,
    tmp_path: Path,
    mechanism: Any = None,
    terms: RoundTerms = TERMS,
    days: float = 30.0,
    start: Update | None = None,
) -> tuple[SiteCheck, bytes]:
    here = SiteMachine(tmp_path, days, part(w).site.run)
    return examine(part(w), mechanism or federated(), "run-1", terms, here, start)


def checked(*asked: Any, **more: Any) -> SiteCheck:
    return examined(*asked, **more)[0]


def starting_at(value: float) -> Update:
    return Update(np.full(federated().parameters, value, np.float32))


def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on whoever reads or counts a patient of a vault is found out."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("a patient was read or counted")

    readers = [
        name for name in ("cohort", "examples", "roster", "scans", "task_cohort") if hasattr(MemoryVault, name)
    ]
    assert "cohort" in readers
    for name in readers:
        monkeypatch.setattr(MemoryVault, name, read)


@pytest.mark.parametrize("start", [None, starting_at(0.0)], ids=["check", "canary"])
@pytest.mark.parametrize("mechanism", [federated(), masked()], ids=["plain", "masked"])
def test_a_check_holds_nothing_and_reads_no_patient(
    tmp_path: Path, mechanism: Federated | FederatedMasked, start: Update | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = federated_site(tmp_path)
    unreadable(monkeypatch)
    store = part(w).site.ledger.store
    before = store.state.size
    found = checked(w, tmp_path, mechanism, start=start)
    assert found.could, found
    assert (found.plan, found.device) == ("none", "cpu")
    assert store.state.size == before
    assert (part(w).run, part(w).grant, w.account()) == ("", "", (0, 0))


def test_a_canary_of_the_sites_own_patients_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red control: the made cohort becomes the vault's."""
    w = federated_site(tmp_path)
    examples = part(w).site.examples
    monkeypatch.setattr(readiness, "made_cohort", lambda *_: examples(federated().examples(TRAINED, "run-1")))
    assert checked(w, tmp_path, start=starting_at(0.0)).could
    unreadable(monkeypatch)
    with pytest.raises(AssertionError, match="read or counted"):
        checked(w, tmp_path, start=starting_at(0.0))


@pytest.mark.parametrize(
    ("mechanism", "each", "moves"),
    [(federated(), "<f4", True), (HALF, "<u2", True), (masked(), "<u4", False)],
    ids=["plain", "half", "masked"],
)
def test_a_canarys_numbers_are_as_many_and_as_wide_as_a_rounds_and_begin_at_the_model(
    tmp_path: Path, mechanism: Federated | FederatedMasked, each: str, moves: bool
) -> None:
    w = federated_site(tmp_path)
    parts = [examined(w, tmp_path, mechanism, start=starting_at(at))[1] for at in (0.0, 1024.0)]
    assert {len(one) for one in parts} == {np.dtype(each).itemsize * mechanism.parameters}
    if moves:
        first, second = (widened(np.frombuffer(one, each)) for one in parts)
        assert 512 < np.median(second - first) < 2048
    else:  # a masked part is the change alone, in steps of 2^-20
        lattice = np.frombuffer(parts[0], "<i4")
        assert np.any(lattice)
        assert np.abs(lattice).max() <= 4 << 20


def test_a_site_sends_no_canary_to_a_run_that_it_would_refuse(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    seen = replace(federated().task.input, modality="CT")
    other = replace(federated(), task=replace(federated().task, input=seen))
    found, numbers = examined(w, tmp_path, other, start=starting_at(0.0))
    assert ("policy" in found.wrong, found.could, numbers) == (True, False, b"")
    part(w).most_round_seconds = 60
    found, numbers = examined(w, tmp_path, federated(), start=starting_at(0.0))
    assert ("round_seconds" in found.wrong, found.could, numbers) == (True, False, b"")


def test_a_canary_whose_round_is_not_finite_sends_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = federated_site(tmp_path)
    far = Update(np.full(federated().parameters, 3.4e38, np.float32))
    monkeypatch.setattr(Federated, "run_round", lambda *_, **__: far)
    found, numbers = examined(w, tmp_path, HALF, start=starting_at(0.0))
    assert (found.wrong, found.could, numbers) == (("training",), False, b"")


def test_two_sites_with_other_patients_say_the_same_but_for_the_clock(tmp_path: Path) -> None:
    """Red control: the vaults differ, and a report that depended on them would, too."""
    told = []
    for seed in (1, 2):
        w = federated_site(tmp_path / f"{seed}") if (tmp_path / f"{seed}").mkdir() is None else None
        assert w is not None
        w.vault = MemoryVault(seed=seed)
        told.append(replace(checked(w, tmp_path), seconds=0.0))
    assert told[0] == told[1]


def test_what_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = federated_site(tmp_path)
    assert "certificate" in checked(w, tmp_path, days=0.05).wrong
    seen = replace(federated().task.input, modality="CT")
    assert "policy" in checked(w, tmp_path, replace(federated(), task=replace(federated().task, input=seen))).wrong
    part(w).most_round_seconds = 60
    assert "round_seconds" in checked(w, tmp_path).wrong
    part(w).most_round_seconds = 86_400
    part(w).compute = SiteCompute(AUTO, available=lambda: False)
    found = checked(w, tmp_path)
    assert (found.wrong, found.could) == (("accelerator",), True)
    ticks = iter(range(0, 10_000, 100))
    part(w).clock = lambda: float(next(ticks))
    assert "time" in checked(w, tmp_path, terms=RoundTerms(60, 0)).wrong
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder is wanted")
    assert "disk" in checked(w, blocked).wrong

    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Federated, "run_round", exhausted)
    assert "memory" in checked(w, tmp_path).wrong

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("patient 4711")

    monkeypatch.setattr(Federated, "run_round", broken)
    found = checked(w, tmp_path)
    assert "training" in found.wrong
    assert b"4711" not in found.to_bytes()


def test_another_number_of_parameters_is_seen_before_anything_runs(tmp_path: Path) -> None:
    w = federated_site(tmp_path)
    assert "mechanism" in checked(w, tmp_path, replace(federated(), parameters=7)).wrong
