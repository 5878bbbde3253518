"""The audit sees what it looks for: each way to lose, double or invent something is red."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.demo.scene import SITES
from policies.ledger.entries import Admitted, Entry, Expired, Freed, Reserved, RoundClosed, Sent, Spent
from tests.faults.audit import Ledgers
from tests.faults.stage import COORDINATOR

RUN, BODY = "run-1", b"parameters"
Books = dict[str, list[Entry]]


def sound() -> Books:
    """One round of three sites, in which all is well; the run was stopped by its operator afterwards."""
    hub: list[Entry] = []
    ledger: Books = {COORDINATOR: hub}
    for site in SITES:
        grant, release, digest = f"grant-{site}", f"release-{site}", hashlib.sha256(site.encode()).digest()
        reserved = Reserved(grant, site, RUN, "federated", f"{site}/rdp", 100, b"{}", digest)
        sent = Sent(release, grant, site, RUN, 1, "federated", 50, digest, digest)
        admitted = Admitted(release, grant, site, RUN, 1, "federated", "A", 50, b"{}", digest, digest, "")
        ledger[site] = [reserved, sent, admitted, Spent(grant, 50, "finished", b"x" * 32)]
        hub += [reserved, admitted, Expired(grant, "finished")]
    hub.append(RoundClosed(RUN, 1, list(SITES), hashlib.sha256(BODY).digest()))
    return ledger


def changed(ledger: Books, name: str, kind: type, **values: object) -> None:
    """The first entry of a kind in one ledger gets other values."""
    at = next(i for i, entry in enumerate(ledger[name]) if isinstance(entry, kind))
    ledger[name][at] = replace(ledger[name][at], **values)  # type: ignore[arg-type]


def dropped(ledger: Books, name: str, kind: type) -> None:
    """The first entry of a kind is gone."""
    ledger[name].remove(next(entry for entry in ledger[name] if isinstance(entry, kind)))


def again(ledger: Books, kind: type) -> None:
    """The coordinator's first entry of a kind comes twice."""
    ledger[COORDINATOR].append(next(entry for entry in ledger[COORDINATOR] if isinstance(entry, kind)))


def second_price(ledger: Books) -> None:
    """A site pays for the same run under another grant."""
    first = ledger["site-a"][0]
    assert isinstance(first, Reserved)
    ledger["site-a"] += [replace(first, grant="grant-2"), Expired("grant-2", "restart")]
    ledger[COORDINATOR] += [replace(first, grant="grant-2"), Expired("grant-2", "restart")]


def freed_after_all(ledger: Books) -> None:
    """The coordinator gives back what an update has used."""
    ledger[COORDINATOR][2] = Freed("grant-site-a", "refused", b"x" * 32)


WRONG: dict[str, Callable[[Books], None]] = {
    "left under": lambda b: changed(b, "site-a", Spent, used=49),
    "and coordinator has": freed_after_all,
    "of 100": lambda b: changed(b, "site-a", Spent, used=101),
    "still held": lambda b: dropped(b, "site-b", Spent),
    "paid for one run": second_price,
    "never reserved": lambda b: changed(b, "site-c", Reserved, amount=99),
    "admitted twice": lambda b: again(b, Admitted),
    "never sent it": lambda b: dropped(b, "site-a", Sent),
    "believes": lambda b: changed(b, "site-a", Admitted, release="release-x"),
    "closed as [1, 1]": lambda b: again(b, RoundClosed),
    "without a yes": lambda b: dropped(b, COORDINATOR, Admitted),
    "checkpoint": lambda b: changed(b, COORDINATOR, RoundClosed, model=b"y" * 32),
}


def faults(ledger: Books, folder: Path, state: str = "failed") -> list[str]:
    (folder / "round-1.safetensors").write_bytes(BODY)
    return list(Ledgers(ledger).faults(RUN, state, folder))


def test_sound_books_have_no_fault(tmp_path: Path) -> None:
    assert faults(sound(), tmp_path) == []


@pytest.mark.parametrize("said", WRONG)
def test_each_way_to_lose_or_double_is_seen(said: str, tmp_path: Path) -> None:
    ledger = sound()
    WRONG[said](ledger)
    found = faults(ledger, tmp_path)
    assert any(said in fault for fault in found), found


def test_what_is_held_has_a_reason_only_while_a_run_is_stopped(tmp_path: Path) -> None:
    ledger = sound()
    dropped(ledger, "site-b", Spent)
    assert faults(ledger, tmp_path, "stopped") == []
    assert faults(ledger, tmp_path, "failed") != []


def test_a_run_that_calls_itself_finished_has_all_its_rounds(tmp_path: Path) -> None:
    folder = tmp_path / "coordinator" / "runs" / RUN
    folder.mkdir(parents=True)
    (folder / "round-2.safetensors").write_bytes(BODY)
    assert "finished after 1 of 2 rounds" in faults(sound(), folder, "finished")
