"""Nothing acknowledged is lost at a power cut; the long form is ``python -m tests.crash power``."""

from __future__ import annotations

from random import Random

import pytest

from tests.crash import power
from tests.crash.disk import Disk, File, Loss, PowerCut, Truncate, Write
from tests.crash.workload import LIMIT, LOST, plan


def _total(setting: power.Setting, crashes: int) -> power.Tally:
    *_, total = power.many(setting, crashes)
    return total


def test_no_power_cut_loses_half_does_or_overspends_anything() -> None:
    total = _total(power.PRODUCT, 1500)
    assert not total.wrong, total.seeds
    assert total.crashes >= 1500
    assert set(total.by_loss) == {loss.value for loss in Loss}
    assert total.unready > 50, "the power was not cut while the ledger was being made"


@pytest.mark.parametrize("control", power.CONTROLS, ids=lambda setting: setting.name)
def test_a_weaker_setting_loses_what_it_acknowledged(control: power.Setting) -> None:
    assert _total(control, 300).wrong[LOST] > 10


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = power.Tally(), power.Tally()
    for tally in (first, second):
        for seed in range(20):
            power.run(seed, power.CONTROLS[0], tally)
    assert first == second
    assert first.crashes >= 20


def test_every_plan_reserves_from_several_accounts_settles_and_runs_into_its_limits() -> None:
    plans = [plan(seed) for seed in range(40)]
    drafts = [append for p in plans for step in p.steps for append in step]
    kinds = {type(entry).__name__ for append in drafts for entry in append.draft.entries}
    assert kinds == {"Admitted", "Enrolled", "Expired", "Freed", "Opened", "Refused", "Reserved", "Sent",
                     "Spent", "Issued", "Revoked"}  # fmt: skip
    assert any(append.first is None for append in drafts)
    reserved = [[e.account for e in a.draft.entries if type(e).__name__ == "Reserved"] for a in drafts if a.first]
    assert any(len(set(accounts)) == 2 for accounts in reserved)
    assert any(len(step) > 1 for p in plans for step in p.steps)
    gone = [held + spent for p in plans for balance in p.balances for held, spent in balance.values()]
    assert LIMIT // 2 < max(gone) <= LIMIT


def _disk() -> Disk:
    """A safe file of ones, and then an unsynced write of two sectors, a truncation and two changes of names."""
    old, gone = File(bytearray(b"\x01" * 1024), b"\x01" * 1024), File(bytearray(b"gone"), b"gone")
    disk = Disk(files={"old": old, "gone": gone}, safe={"old": old, "gone": gone})
    old.change(Write(256, b"\x02" * 512))
    old.change(Truncate(900))
    disk.create("new").change(Write(0, b"new"))
    disk.files["new"].sync()
    disk.delete("gone")
    return disk


def test_what_was_synced_stays_and_the_rest_may_be_kept_torn_or_forgotten() -> None:
    nothing = _disk().after(Loss.NOTHING, Random(0))
    assert {name: bytes(file.seen) for name, file in nothing.files.items()} == {
        "old": b"\x01" * 1024,
        "gone": b"gone",
    }
    everything = _disk().after(Loss.EVERYTHING, Random(0))
    kept = (b"\x01" * 256 + b"\x02" * 512 + b"\x01" * 256)[:900]
    assert {name: bytes(file.seen) for name, file in everything.files.items()} == {"old": kept, "new": b"new"}
    seen = [_disk().after(loss, Random(i)) for loss in (Loss.PREFIX, Loss.SUBSET, Loss.GARBAGE) for i in range(60)]
    assert {name for disk in seen for name in disk.files} == {"old", "gone", "new"}
    assert {len(disk.files["old"].seen) for disk in seen} == {900, 1024}
    halves = {(bytes(d.files["old"].seen[256:512]), bytes(d.files["old"].seen[512:768])) for d in seen}
    whole, none = b"\x02" * 256, b"\x01" * 256
    assert {(whole, whole), (whole, none), (none, whole), (none, none)} < halves, "a write is torn at its sectors"
    assert all(disk.files["old"].seen[:256] == none for disk in seen), "noise spoils no neighbour"


def test_nothing_reaches_a_disk_without_power() -> None:
    disk = Disk(cut=2)
    disk.create("file")
    for _ in range(2):
        with pytest.raises(PowerCut):
            disk.delete("file")
    assert "file" in disk.files
