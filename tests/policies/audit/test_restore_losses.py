"""A restore undoes what made the ledger stricter; the last export of before lists it, and no other one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.audit.restore_losses import (
    RestoreLosses,
    describe_losses,
    format_time,
    last_entry,
    losses_since,
    warning,
)
from policies.governance import decisions
from policies.ledger.backends.sqlite import export_file
from policies.ledger.export import Export, ExportError
from policies.ledger_service import LedgerService, digest
from policies.review.policy import parse as parse_policy
from policies.statements import Amendment
from tests.support.ledger_world import Hospital, Person, open_register, policy
from tests.support.rolled_back_ledgers import marked_as_it_is

COMPLIANCE, SECOND = Person("dpo-1", "compliance"), Person("dpo-2", "compliance")
LOCAL = Person("head-1", "hospital")


class Ledger:
    """A ledger, and copies of its file."""

    def __init__(self, folder: Path, *, office: bool = True) -> None:
        self.folder, self.path, self.key = folder, folder / "ledger.db", Ed25519PrivateKey.generate()
        self.sites = [Hospital("site-a"), Hospital("site-b"), Hospital("site-c")]
        self.register: LedgerService = open_register(self.path, *self.sites[:2], key=self.key)
        for person in (COMPLIANCE, LOCAL) if office else ():
            decisions.appoint(self.register.store, person.name, person.role, person.public)
        if office:
            self.decide("new", "appoint", "dpo-2", f"compliance {SECOND.public.hex()}")
            decisions.appoint(self.register.store, "dpo-2", "compliance", SECOND.public, "new")

    def decide(self, serial: str, action: str, subject: str, value: str, *persons: Person) -> None:
        for person in persons or (COMPLIANCE, LOCAL):
            decisions.approve(self.register.store, person.approval(serial, action, subject, value))

    def limit(self, serial: str, account: str, budget: str, *persons: Person) -> None:
        value = decisions.limit_value(self.register.store, account, budget)[1] or budget
        self.decide(serial, "limit", account, value, *persons)
        decisions.set_limit(self.register.store, account, budget, serial)

    def amend(self, number: int, **changes: object) -> None:
        site = self.sites[0]
        statement = Amendment("site-a", number, policy(**changes))
        assert self.register.amend(f"amend-{number}", statement, site.seal(statement)).admitted

    def enrol(self, site: Hospital, serial: str) -> None:
        statement, envelope = site.enrolment()
        self.decide(serial, "enrol", site.name, digest(envelope).hex())
        self.register.enrol(statement, envelope, parse_policy(statement.policy, site.name), serial)

    def dismiss(self) -> None:
        self.decide("go", "dismiss", "dpo-2", "compliance")
        decisions.dismiss(self.register.store, "dpo-2", "go")

    def export(self) -> bytes:
        return export_file(self.path, "lazaret/test", self.key)

    def copy(self) -> Path:
        out = self.folder / "backup.db"
        self.register.store._disk._db.execute(f"VACUUM INTO '{out}'")  # type: ignore[attr-defined]
        return out

    def back(self, backup: Path) -> None:
        self.register.store.close()
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.copy(backup, self.path)
        marked_as_it_is(self.path)
        self.register = open_register(self.path, *self.sites[:2], key=self.key)

    def lost(self, last: bytes) -> RestoreLosses:
        return losses_since(self.register.store, last, self.register.store.state.size)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path)
    yield made
    made.register.store.close()


def test_everything_stricter_that_a_backup_lost_is_listed_once_with_who_when_and_what_to_type(ledger: Ledger) -> None:
    backup = ledger.copy()
    until = last_entry(ledger.register.store)
    ledger.limit("low", "site-a/rdp", "0.5", COMPLIANCE)
    ledger.dismiss()
    ledger.register.revoke("site-b", "", "stolen")
    ledger.amend(1, k_min=50)
    last = ledger.export()
    ledger.back(backup)
    state = ledger.register.store.state
    assert (state.dismissed, state.revoked_sites, state.accounts["site-a/rdp"].epsilon) == (set(), set(), "8.0"), (
        "undone"
    )
    found = ledger.lost(last)
    assert [one.what for one in found.undone] == [
        "limit of site-a/rdp lowered to 0.5",
        "dpo-2 dismissed",
        "site-b revoked (stolen)",
        "site-a has a stricter policy: k_min",
    ]
    assert [one.by for one in found.undone] == [
        ("dpo-1 (compliance)",), ("dpo-1 (compliance)", "head-1 (hospital)"), (), ("site-a",)
    ]  # fmt: skip
    assert [one.again[-1] for one in found.undone] == [
        "ledger limit site-a/rdp 0.5 --serial SERIAL",
        "ledger dismiss dpo-2 --serial SERIAL",
        "lazaret-coordinator revoke site-b --reason stolen",
        "lazaret-agent ledger amend",
    ]
    assert found.undone[0].again[0].startswith("ledger sign limit site-a/rdp 0.5 --serial SERIAL")
    assert until < found.undone[0].at < found.undone[-1].at == found.until
    text = "\n".join((warning(until), *describe_losses(found)))
    assert format_time(until) in text
    assert "before any person approves" in text
    assert text.count("site-b") == 2


def test_what_was_undone_again_or_made_looser_is_not_listed(ledger: Ledger) -> None:
    """Only what still held when the export was made: of each account and each site's policy the last word."""
    ledger.limit("first", "site-a/rdp", "4.0", COMPLIANCE)
    backup = ledger.copy()
    ledger.limit("low", "site-a/rdp", "0.5", COMPLIANCE)
    ledger.limit("high", "site-a/rdp", "6.0")
    ledger.limit("k", "site-b/k", "0", LOCAL)
    ledger.amend(1, k_min=50)
    ledger.amend(2)
    ledger.amend(3, epsilon="9.0")
    last = ledger.export()
    ledger.back(backup)
    assert [one.what for one in ledger.lost(last).undone] == ["limit of site-b/k lowered to 0"]


def test_a_limit_of_a_site_that_has_to_enrol_again_is_compared_with_what_it_opens_at(tmp_path: Path) -> None:
    """And of a site or person that came and went since the backup, nobody is brought back by old approvals."""
    ledger = Ledger(tmp_path)
    backup = ledger.copy()
    statement, envelope = ledger.sites[2].enrolment()
    ledger.decide("in", "enrol", "site-c", digest(envelope).hex())
    ledger.register.enrol(statement, envelope, parse_policy(statement.policy, "site-c"), "in")
    ledger.limit("low", "site-c/rdp", "0.5", LOCAL)
    last = ledger.export()
    ledger.back(backup)
    assert [one.what for one in ledger.lost(last).undone] == ["limit of site-c/rdp lowered to 0.5"]
    ledger.register.store.close()


def test_a_site_and_a_person_that_came_and_went_are_not_brought_back(ledger: Ledger) -> None:
    backup = ledger.copy()
    third = Person("dpo-3", "compliance")
    ledger.decide("in", "appoint", "dpo-3", f"compliance {third.public.hex()}")
    decisions.appoint(ledger.register.store, "dpo-3", "compliance", third.public, "in")
    ledger.decide("out", "dismiss", "dpo-3", "compliance")
    decisions.dismiss(ledger.register.store, "dpo-3", "out")
    last = ledger.export()
    ledger.back(backup)
    ((one),) = ledger.lost(last).undone
    assert (one.what, one.again) == ("dpo-3 dismissed", ("never appoint dpo-3 with that key",))


@pytest.mark.parametrize("barred", [True, False], ids=["revoked before the backup", "revoked after it"])
def test_a_site_that_came_back_with_another_key_and_went_again_is_not_brought_back_by_that_request(
    ledger: Ledger, barred: bool
) -> None:
    if barred:
        ledger.register.revoke("site-b", "", "stolen")
    backup = ledger.copy()
    if not barred:
        ledger.register.revoke("site-b", "", "stolen")
    again = Hospital("site-b")
    ledger.enrol(again, "in")
    ledger.register.revoke("site-b", "", "again")
    last = ledger.export()
    ledger.back(backup)
    ((one),) = ledger.lost(last).undone
    never = "never enrol site-b with a request, or approvals, of before this"
    assert one.again == ((never,) if barred else ("lazaret-coordinator revoke site-b --reason again", never))
    if not barred:
        ledger.register.revoke("site-b", "", "again")
    ledger.enrol(again, "in")
    assert ledger.register.store.state.sites["site-b"].sign_key == again.public, "why people have to be told"


def test_a_stricter_policy_of_a_site_that_the_backup_does_not_know_is_listed(ledger: Ledger) -> None:
    backup, third = ledger.copy(), ledger.sites[2]
    ledger.enrol(third, "in")
    statement = Amendment("site-c", 1, policy(k_min=50))
    assert ledger.register.amend("amend-c", statement, third.seal(statement)).admitted
    last = ledger.export()
    ledger.back(backup)
    ((one),) = ledger.lost(last).undone
    assert one.what == "site-c has a stricter policy: k_min"
    assert one.again[-1] == "once site-c is enrolled again: lazaret-agent ledger amend"


def test_before_the_last_of_a_role_is_dismissed_again_the_one_who_followed_is_appointed(tmp_path: Path) -> None:
    """What is listed can be typed, one after the other."""
    ledger = Ledger(tmp_path, office=False)
    for person in (COMPLIANCE, LOCAL):
        decisions.appoint(ledger.register.store, person.name, person.role, person.public)
    backup = ledger.copy()

    def typed() -> None:
        ledger.decide("new", "appoint", "dpo-2", f"compliance {SECOND.public.hex()}")
        decisions.appoint(ledger.register.store, "dpo-2", "compliance", SECOND.public, "new")
        ledger.decide("go", "dismiss", "dpo-1", "compliance", SECOND, LOCAL)
        decisions.dismiss(ledger.register.store, "dpo-1", "go")

    typed()
    last = ledger.export()
    ledger.back(backup)
    ((one),) = ledger.lost(last).undone
    key = f"compliance {SECOND.public.hex()}"
    assert [words.split(" --")[0] for words in one.again] == [
        f"ledger sign appoint dpo-2 {key}", "ledger approve FILES", f"ledger appoint dpo-2 {key}",
        "ledger sign dismiss dpo-1 compliance", "ledger approve FILES", "ledger dismiss dpo-1",
    ]  # fmt: skip
    typed()
    ledger.register.store.close()


def test_a_certificate_is_listed_only_when_the_backup_knows_it(ledger: Ledger) -> None:
    ledger.register.issue("site-a", "1a", bytes([3]) * 32, 1 << 40)
    backup = ledger.copy()
    ledger.register.issue("site-a", "1b", bytes([4]) * 32, 1 << 40)
    ledger.register.revoke("site-a", "1a", "lost")
    ledger.register.revoke("site-a", "1b", "lost")
    last = ledger.export()
    ledger.back(backup)
    ((one),) = ledger.lost(last).undone
    assert one.again == ("lazaret-coordinator revoke site-a --certificate 1a --reason lost",)
    assert not ledger.register.store.state.admits("site-a", "1b"), "what it does not know speaks for nobody"


def test_the_first_of_a_role_is_named_where_the_role_is_empty_again(tmp_path: Path) -> None:
    """Or whoever comes first would be in office without an approval."""
    ledger = Ledger(tmp_path, office=False)
    backup = ledger.copy()
    for person in (COMPLIANCE, LOCAL):
        decisions.appoint(ledger.register.store, person.name, person.role, person.public)
    last = ledger.export()
    ledger.back(backup)
    first, second = ledger.lost(last).undone
    assert first.again == (f"ledger appoint dpo-1 compliance {COMPLIANCE.public.hex()}",)
    assert second.what == "head-1 appointed as the first hospital"
    ledger.register.store.close()


def test_an_export_of_today_with_nothing_stricter_says_so_and_without_one_nobody_is_told_that_there_is_none(
    ledger: Ledger,
) -> None:
    backup, last = ledger.copy(), ledger.export()
    ledger.back(backup)
    found = ledger.lost(last)
    assert found.undone == ()
    assert "there is none" in describe_losses(found)[0]
    assert "--last" in describe_losses(None)[0]
    assert "has no entry" in warning(0)


def test_an_export_of_another_ledger_key_history_or_day_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    early = ledger.export()
    ledger.register.revoke("site-b", "", "left")
    backup, size = ledger.copy(), ledger.register.store.state.size
    last = ledger.export()
    (tmp_path / "other").mkdir()
    other = Ledger(tmp_path / "other")
    refused = {
        "is not signed": other.export(),
        f"older than the backup|backup {size}": early,
        "head is not signed by the key": last[:-40],
        "cut short": last[:200],
    }
    ledger.back(backup)
    for words, raw in refused.items():
        with pytest.raises(ExportError, match=words):
            ledger.lost(raw)
    other.register.store.close()


def test_an_export_of_the_same_key_that_went_another_way_is_refused(ledger: Ledger) -> None:
    """The same key, longer than the backup, sound, and not what the backup grew into."""
    fork = ledger.copy()
    ledger.register.revoke("site-b", "", "left")
    backup = ledger.folder / "one.db"
    ledger.register.store._disk._db.execute(f"VACUUM INTO '{backup}'")  # type: ignore[attr-defined]
    ledger.back(fork)
    for n in range(3):
        ledger.amend(n + 1, k_min=50 + n)
    last = ledger.export()
    ledger.back(backup)
    with pytest.raises(ExportError, match="different histories"):
        ledger.lost(last)


def test_an_export_from_which_an_entry_was_left_out_is_refused(ledger: Ledger) -> None:
    backup = ledger.copy()
    ledger.register.revoke("site-b", "", "left")
    ledger.amend(1)
    whole = Export.parse(ledger.export())
    ledger.back(backup)
    for kept in (whole.entries[:-1], (*whole.entries[:-2], whole.entries[-1])):
        with pytest.raises(ExportError):
            ledger.lost(replace(whole, entries=kept).encode())
    assert len(ledger.lost(whole.encode()).undone) == 1


def test_a_line_for_people_holds_no_character_that_is_not_shown(ledger: Ledger) -> None:
    backup = ledger.copy()
    ledger.register.revoke("site-b", "", "left")
    last = ledger.export()
    ledger.back(backup)
    ((one),) = ledger.lost(last).undone
    odd = type(one)(one.at, "x\u202e revoked", ("a\x1b[2J",), one.again)
    assert odd.line().isprintable()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC  .*", one.line())
    assert one.json()["again"] == list(one.again)
