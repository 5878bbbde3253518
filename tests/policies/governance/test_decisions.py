"""What one person cannot do: limits, appointments, waivers; and what follows a restore."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policies.accounting.accountant import cost
from policies.accounting.claims import SubsampledGaussian
from policies.audit.verify import main, verify
from policies.governance import amendments, decisions
from policies.ledger.backends.sqlite import export_file, open_sqlite
from policies.ledger.entries import (
    Appointed,
    Approved,
    Freed,
    InvalidEntryError,
    LimitSet,
    Recovered,
    Requested,
    Reserved,
    Waived,
    proposal,
)
from policies.ledger.export import ExportError
from policies.ledger.store import AppendRequest, Store
from policies.ledger_service import LedgerService, digest
from policies.review.policy import parse
from policies.statements import Amendment, Receipts, claim_json
from protos.common.canonical_json import canonical
from tests.support.ledger_world import DP, Clock, Hospital, Person, open_register, policy
from tests.support.rolled_back_ledgers import marked_as_it_is

SMALL = SubsampledGaussian(0.01, 8.0, 1)
CAREFUL, LOCAL, ADMIN = Person("dpo-1", "compliance"), Person("head-1", "hospital"), Person("it-1", "operator")


class Ledger:
    """A register with three persons, and a hospital whose policy allows more than its account."""

    def __init__(self, folder: Path) -> None:
        self.path, self.key, self.amendments = folder / "ledger.db", Ed25519PrivateKey.generate(), 0
        self.site = Hospital("site-a", policy(epsilon="2.0"))
        self.register = open_register(self.path, self.site, key=self.key)
        for person in (CAREFUL, LOCAL, ADMIN):
            serial = "" if person is not ADMIN else "s-admin"
            if serial:
                value = f"{person.role} {person.public.hex()}"
                self.approve(serial, "appoint", person.name, value, CAREFUL, LOCAL)
            decisions.appoint(self.store, person.name, person.role, person.public, serial)

    @property
    def store(self) -> object:
        return self.register.store

    def approve(self, serial: str, action: str, subject: str, value: str, *persons: Person) -> None:
        for person in persons:
            decisions.approve(self.register.store, person.approval(serial, action, subject, value))

    def limit(self, budget: str) -> str:
        """What persons sign for a limit."""
        return decisions.limit_value(self.register.store, "site-a/rdp", budget)[1]

    def raise_to(self, budget: str, serial: str, *persons: Person) -> None:
        self.approve(serial, "limit", "site-a/rdp", self.limit(budget), *persons)
        decisions.set_limit(self.register.store, "site-a/rdp", budget, serial)

    def amend(self, **changes: object) -> None:
        self.amendments += 1
        statement = Amendment("site-a", self.amendments, policy(**changes))
        self.register.amend(f"amend-{self.amendments}", statement, self.site.seal(statement))

    def audit(self) -> object:
        self.register.store.close()
        return verify(export_file(self.path, "lazaret/test", self.key))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


@pytest.mark.parametrize("persons", [(), (CAREFUL,), (LOCAL,)])
def test_a_limit_is_not_raised_by_fewer_than_two_persons(ledger: Ledger, persons: tuple[Person, ...]) -> None:
    before = ledger.register.store.state.accounts["site-a/rdp"].limit
    with pytest.raises(InvalidEntryError, match="2 role"):
        ledger.raise_to("4.0", "s1", *persons)
    assert ledger.register.store.state.accounts["site-a/rdp"].limit == before


def test_two_persons_of_one_role_are_one_voice(ledger: Ledger) -> None:
    second = Person("dpo-2", "compliance")
    ledger.approve("s0", "appoint", "dpo-2", f"compliance {second.public.hex()}", CAREFUL, LOCAL)
    decisions.appoint(ledger.register.store, "dpo-2", "compliance", second.public, "s0")
    with pytest.raises(InvalidEntryError, match="2 role"):
        ledger.raise_to("4.0", "s1", CAREFUL, second)


def test_who_runs_the_machine_never_approves(ledger: Ledger) -> None:
    with pytest.raises(InvalidEntryError, match="may approve"):
        ledger.raise_to("4.0", "s1", CAREFUL, ADMIN)


def test_two_roles_raise_a_limit_and_an_auditor_agrees_once_the_sites_policy_does(ledger: Ledger) -> None:
    asked = ledger.site.reservation("g", DP, "federated", "run")  # epsilon 6.5
    assert not ledger.register.reserve("k1", asked, ledger.site.seal(asked)).admitted
    ledger.amend(epsilon="8.0")
    ledger.raise_to("8.0", "s1", CAREFUL, LOCAL)
    assert ledger.register.store.state.accounts["site-a/rdp"].epsilon == "8.0"
    ledger.audit()


def test_a_limit_above_the_sites_own_policy_gives_nothing_whoever_approved(ledger: Ledger) -> None:
    account = ledger.register.store.state.accounts["site-a/rdp"]
    before = account.limit
    ledger.raise_to("8.0", "s1", CAREFUL, LOCAL)
    dear = next(c for n in range(1, 99) if cost(c := SubsampledGaussian(0.25, 1.8, n), account.opened.order) > before)
    asked = ledger.site.reservation("g", dear, "federated", "run")
    assert {f.rule for f in ledger.register.reserve("k1", asked, ledger.site.seal(asked)).findings} == {"budget"}
    asked = ledger.site.reservation("g2", dear, "federated", "run")
    envelope, amount, claim = ledger.site.seal(asked), cost(dear, account.opened.order), canonical(claim_json(dear))
    assert amount <= account.left
    forged = Reserved("g2", "site-a", "run", "federated", "site-a/rdp", amount, claim, digest(envelope))
    ledger.register.store.append("forged", AppendRequest((forged,), (envelope,)))
    with pytest.raises(ExportError, match="the law does not admit it"):
        ledger.audit()


def test_a_limit_is_lowered_below_a_tightened_policy_and_the_books_stay_sound(ledger: Ledger) -> None:
    ledger.amend(epsilon="1.0")
    ledger.raise_to("1.5", "s1", CAREFUL)
    ledger.audit()


def test_an_older_amendment_does_not_come_back(ledger: Ledger) -> None:
    statement = Amendment("site-a", 1, policy(k_min=3))
    envelope = ledger.site.seal(statement)
    ledger.register.amend("a1", statement, envelope)
    newer = Amendment("site-a", 2, policy(k_min=50))
    ledger.register.amend("a2", newer, ledger.site.seal(newer))
    with pytest.raises(InvalidEntryError, match="not newer"):
        ledger.register.amend("a3", statement, envelope)


def test_one_person_may_lower_a_limit_and_below_what_is_gone_nothing_more_is_granted(ledger: Ledger) -> None:
    asked = ledger.site.reservation("g", SMALL, "federated", "run")
    assert ledger.register.reserve("k1", asked, ledger.site.seal(asked)).admitted
    ledger.raise_to("0.2", "s1", CAREFUL)
    again = ledger.site.reservation("g2", SubsampledGaussian(0.2, 1.0, 30), "federated", "run-2")
    assert {f.rule for f in ledger.register.reserve("k2", again, ledger.site.seal(again)).findings} == {"budget"}
    ledger.audit()


def test_the_auditor_names_who_may_approve_and_who_did_and_nobody_who_had_left(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, second, reader = ledger.register.store, Person("head-2", "hospital"), Person("res-1", "researcher")
    for person in (second, reader):
        serial, value = f"s-{person.name}", f"{person.role} {person.public.hex()}"
        ledger.approve(serial, "appoint", person.name, value, CAREFUL, LOCAL)
        decisions.appoint(store, person.name, person.role, person.public, serial)
    ledger.approve("s-limit", "limit", "site-a/rdp", "4.0", second)
    site = Hospital("site-b", policy())
    request, sealed = site.enrolment()
    ledger.approve("s-site", "enrol", "site-b", digest(sealed).hex(), second)
    ledger.approve("s-gone", "dismiss", "head-2", "hospital", CAREFUL, LOCAL)
    decisions.dismiss(store, "head-2", "s-gone")
    ledger.approve("s-limit", "limit", "site-a/rdp", "4.0", CAREFUL, LOCAL)
    decisions.set_limit(store, "site-a/rdp", "4.0", "s-limit")
    ledger.approve("s-site", "enrol", "site-b", digest(sealed).hex(), CAREFUL, LOCAL)
    ledger.register.enrol(request, sealed, parse(policy(), "site-b"), "s-site")
    found = ledger.audit()
    assert found.limits_set == ["site-a/rdp to 4.0, approved by dpo-1, head-1"]
    assert found.sites["site-b"]["approved_by"] == ["dpo-1 (compliance)", "head-1 (hospital)"]
    assert found.approving == ["dpo-1", "head-1"]
    assert found.persons["head-2"] == f"hospital, key {second.public.hex()} (dismissed)"
    (tmp_path / "ledger.export").write_bytes(export_file(ledger.path, "lazaret/test", ledger.key))
    assert main([str(tmp_path / "ledger.export")]) == 3, "nobody said whose ledger it is"
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split(",")[0] for line in lines if line.startswith("may approve: ")] == [
        "may approve: dpo-1",
        "may approve: head-1",
    ]
    assert f"appointed: head-2, {found.persons['head-2']}" in lines
    assert [line.split(",")[0] for line in lines if line.startswith("appointed: ")][1:] == [
        "appointed: it-1",
        "appointed: res-1",
    ]


def test_nobody_keeps_the_serial_of_a_release_by_asking_for_something_else_under_it(ledger: Ledger) -> None:
    store, release = ledger.register.store, "release-" + "ab" * 16
    for serial in (release, f"refuse-{release}", amendments.amendment_serial(policy(), 0)):
        with pytest.raises(InvalidEntryError, match="begins with amend-, refuse-, release-: choose another"):
            decisions.request(store, ADMIN.request(serial, "limit", "site-a/rdp", "9.9"))
    ledger.approve(release, "release", release, "ab" * 32, CAREFUL, LOCAL)
    assert set(store.state.approvals(release, "release", release, "ab" * 32)) == {"compliance", "hospital"}


def test_who_asked_does_not_decide_it_alone_under_another_serial(ledger: Ledger) -> None:
    store, words = ledger.register.store, ("limit", "site-a/rdp", ledger.limit("1.0"))
    decisions.request(store, CAREFUL.request("s1", *words))
    for serial in ("s2", "amend-s2", "refuse-s2", "release-s2"):
        with pytest.raises(InvalidEntryError, match="0 did; a person who requested it under another serial"):
            ledger.raise_to("1.0", serial, CAREFUL)
    decisions.request(store, ADMIN.request("s3", *words))
    ledger.raise_to("1.0", "s3", CAREFUL)
    assert store.state.accounts["site-a/rdp"].epsilon == "1.0"
    ledger.audit()


def test_an_approval_counts_for_exactly_what_was_signed_and_once(ledger: Ledger) -> None:
    ledger.amend(epsilon="8.0")
    ledger.approve("s1", "limit", "site-a/rdp", ledger.limit("4.0"), CAREFUL, LOCAL)
    with pytest.raises(InvalidEntryError, match="2 role"):
        decisions.set_limit(ledger.register.store, "site-a/rdp", "8.0", "s1")
    decisions.set_limit(ledger.register.store, "site-a/rdp", "4.0", "s1")
    with pytest.raises(InvalidEntryError, match="closed"):
        decisions.approve(ledger.register.store, CAREFUL.approval("s1", "limit", "site-a/rdp", "9.0"))


@pytest.mark.parametrize(
    "envelope",
    [
        CAREFUL.approval("s", "limit", "site-a/rdp", "1 1.0", origin="lazaret/other"),
        ADMIN.approval("s", "limit", "site-a/rdp", "1 1.0", name="dpo-1"),
        Person("stranger", "compliance").approval("s", "limit", "site-a/rdp", "1 1.0"),
        b"{}",
        b"\xff",
    ],
)
def test_an_approval_for_another_ledger_or_by_another_key_is_refused(ledger: Ledger, envelope: bytes) -> None:
    size = ledger.register.store.state.size
    with pytest.raises(InvalidEntryError):
        decisions.approve(ledger.register.store, envelope)
    assert ledger.register.store.state.size == size


def test_an_approval_that_nobody_signed_is_found_by_the_auditor(ledger: Ledger) -> None:
    value = ledger.limit("1.0")
    envelope = ADMIN.approval("s1", "limit", "site-a/rdp", value, name="dpo-1")  # the operator, in another's name
    entry = Approved("dpo-1", "s1", proposal("s1", "limit", "site-a/rdp", value), digest(envelope))
    ledger.register.store.append("forged", AppendRequest((entry,), (envelope,)))
    with pytest.raises(ExportError, match="another key"):
        ledger.audit()


def test_the_fold_itself_refuses_a_raise_without_approvals(ledger: Ledger) -> None:
    limit, epsilon = decisions.limit_value(ledger.register.store, "site-a/rdp", "99.0")
    with pytest.raises(InvalidEntryError, match="2 role"):
        ledger.register.store.append("x", AppendRequest((LimitSet("site-a/rdp", limit, epsilon, "none"),)))


def test_a_limit_is_what_its_epsilon_allows(ledger: Ledger) -> None:
    """Persons sign an epsilon; whoever writes the entry must not put another number beside it."""
    ledger.approve("s1", "limit", "site-a/rdp", "4.0", CAREFUL, LOCAL)
    limit, _ = decisions.limit_value(ledger.register.store, "site-a/rdp", "4.0")
    for wrong in (limit + 1, limit - 1):
        with pytest.raises(InvalidEntryError, match="what its epsilon allows"):
            ledger.register.store.append(f"x{wrong}", AppendRequest((LimitSet("site-a/rdp", wrong, "4.0", "s1"),)))


def test_who_asked_does_not_approve_and_others_do(ledger: Ledger) -> None:
    store, words = ledger.register.store, ("limit", "site-a/rdp", ledger.limit("4.0"))
    assert decisions.request(store, CAREFUL.request("s1", *words)).person == "dpo-1"
    with pytest.raises(InvalidEntryError, match="a requester"):
        ledger.approve("s1", *words, CAREFUL)
    ledger.approve("s1", *words, LOCAL)
    with pytest.raises(InvalidEntryError, match=r"2 role.*1 did"):
        decisions.set_limit(store, "site-a/rdp", "4.0", "s1")
    decisions.request(store, ADMIN.request("s2", *words))  # who runs the machine may ask, and two others decide
    ledger.approve("s2", *words, CAREFUL, LOCAL)
    decisions.set_limit(store, "site-a/rdp", "4.0", "s2")
    ledger.audit()


def test_what_was_asked_for_is_what_is_approved(ledger: Ledger) -> None:
    decisions.request(ledger.register.store, ADMIN.request("s1", "limit", "site-a/rdp", ledger.limit("4.0")))
    with pytest.raises(InvalidEntryError, match="something else"):
        ledger.approve("s1", "limit", "site-a/rdp", ledger.limit("8.0"), CAREFUL)


def test_a_request_is_signed_by_who_asks_for_this_ledger_and_is_no_approval(ledger: Ledger) -> None:
    store, words = ledger.register.store, ("s1", "limit", "site-a/rdp", "4.0")
    with pytest.raises(InvalidEntryError, match="not signed by that person"):
        decisions.request(store, Person("dpo-1", "compliance").request(*words))
    with pytest.raises(InvalidEntryError, match="for another ledger"):
        decisions.request(store, ADMIN.request(*words, origin="lazaret/other"))
    with pytest.raises(InvalidEntryError, match="not an approval"):
        decisions.approve(store, CAREFUL.request(*words))
    with pytest.raises(InvalidEntryError, match="not a request"):
        decisions.request(store, CAREFUL.approval(*words))
    with pytest.raises(InvalidEntryError, match="not a signed statement of a person"):
        decisions.request(store, b"{}")


def test_an_auditor_sees_a_request_that_was_put_into_another_persons_mouth(ledger: Ledger) -> None:
    sealed = ADMIN.request("s1", "limit", "site-a/rdp", "4.0")
    said = Requested("dpo-1", "s1", proposal("s1", "limit", "site-a/rdp", "4.0"), digest(sealed))
    ledger.register.store.append("x", AppendRequest((said,), (sealed,)))
    with pytest.raises(ExportError, match="signed by another key"):
        ledger.audit()


def test_an_auditor_sees_a_request_of_other_words(ledger: Ledger) -> None:
    sealed = ADMIN.request("s1", "limit", "site-a/rdp", "4.0")
    said = Requested("it-1", "s1", proposal("s1", "limit", "site-a/rdp", "8.0"), digest(sealed))
    ledger.register.store.append("x", AppendRequest((said,), (sealed,)))
    with pytest.raises(ExportError, match="something else"):
        ledger.audit()


def test_a_person_leaves_when_both_roles_agree_and_the_last_of_a_role_never(ledger: Ledger) -> None:
    store = ledger.register.store
    with pytest.raises(InvalidEntryError, match="the last of"):
        decisions.dismiss(store, "dpo-1", "s1")
    with pytest.raises(InvalidEntryError, match="2 role"):
        decisions.dismiss(store, "it-1", "s1")
    ledger.approve("s1", "dismiss", "it-1", "operator", CAREFUL, LOCAL)
    decisions.dismiss(store, "it-1", "s1")
    with pytest.raises(InvalidEntryError, match="may make requests"):
        decisions.request(store, ADMIN.request("s2", "limit", "site-a/rdp", "4.0"))
    ledger.audit()


def amended(tmp_path: Path, *persons: Person, new: str) -> object:
    """A site's own ledger in which a new policy was signed that these persons approved; what the auditor tells."""
    site, key = Hospital("site-a"), Ed25519PrivateKey.generate()
    store = Store(open_sqlite(tmp_path / "ledger.db"), "lazaret/site-a", key, Clock())
    register = LedgerService(store, lambda _site: parse(site.policy_text, "own"))
    register.enrol(*site.enrolment(), parse(site.policy_text, "own"))
    for person in (CAREFUL, LOCAL):
        decisions.appoint(store, person.name, person.role, person.public)
    words = (amendments.amendment_serial(new, 0), amendments.ACTION, "site-a", amendments.digest(new))
    for person in persons:
        decisions.approve(store, person.approval(*words, origin="lazaret/site-a"))
    may = True
    try:
        decisions.may_amend(store.state, "site-a", parse(site.policy_text, "own"), parse(new, "new"), new)
    except InvalidEntryError:
        may = False
    statement = Amendment("site-a", 1, new)
    register.amend("amend-1", statement, site.seal(statement))
    store.close()
    return may, verify(export_file(tmp_path / "ledger.db", "lazaret/site-a", key)).loosened


@pytest.mark.parametrize("persons", [(), (CAREFUL,), (LOCAL,)])
def test_a_site_loosens_its_own_policy_only_when_both_roles_have_approved_the_very_text(
    tmp_path: Path, persons: tuple[Person, ...]
) -> None:
    may, told = amended(tmp_path, *persons, new=policy(k_min=2))
    assert not may
    assert told == ["site-a, amendment 1: k_min"]


def test_what_both_approved_and_what_only_tightens_is_signed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert amended(tmp_path / "a", CAREFUL, LOCAL, new=policy(k_min=2)) == (True, [])
    assert amended(tmp_path / "b", new=policy(k_min=50)) == (True, [])


def test_the_third_person_needs_the_first_two(ledger: Ledger) -> None:
    with pytest.raises(InvalidEntryError, match="2 role"):
        decisions.appoint(ledger.register.store, "friend", "hospital", Person("friend", "hospital").public)


def test_a_second_person_of_a_role_needs_the_first_while_the_other_role_is_empty(tmp_path: Path) -> None:
    store = open_register(tmp_path / "ledger.db", Hospital("site-a")).store
    decisions.appoint(store, "dpo-1", "compliance", CAREFUL.public)
    sock = Person("dpo-2", "compliance")
    with pytest.raises(InvalidEntryError, match="1 role"):
        decisions.appoint(store, "dpo-2", "compliance", sock.public)
    decisions.approve(store, CAREFUL.approval("s", "appoint", "dpo-2", f"compliance {sock.public.hex()}"))
    decisions.appoint(store, "dpo-2", "compliance", sock.public, "s")


@pytest.mark.parametrize("budget", ["-3", "1_0", " 2 ", "1e3", "nan", "9" * 30, "0", "101"])
def test_a_budget_that_is_none_is_refused_before_it_is_proposed(ledger: Ledger, budget: str) -> None:
    with pytest.raises(InvalidEntryError):
        decisions.limit_value(ledger.register.store, "site-a/rdp", budget)


class Restored:
    """A ledger whose copy of an earlier day came back: a grant of that site is lost."""

    def __init__(self, folder: Path) -> None:
        self.path, self.key = folder / "ledger.db", Ed25519PrivateKey.generate()
        self.a, self.b = Hospital("site-a"), Hospital("site-b")
        register = open_register(self.path, self.a, self.b, key=self.key)
        self.kept = self.a.reservation("kept", SMALL, "federated", "run")
        register.reserve("k-kept", self.kept, self.a.seal(self.kept))
        backup = folder / "backup.db"
        register.store._disk._db.execute(f"VACUUM INTO '{backup}'")  # type: ignore[attr-defined]
        self.lost = self.a.reservation("lost", DP, "federated", "run-2")
        assert register.reserve("k-lost", self.lost, self.a.seal(self.lost)).admitted
        self.note = register.store.checkpoint()
        register.store.close()
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            (folder / name).unlink(missing_ok=True)
        shutil.move(backup, self.path)
        marked_as_it_is(self.path)
        self.register: LedgerService = open_register(self.path, self.a, self.b, key=self.key)
        self.register.store.restore("nonce-1")

    def show(self) -> None:
        self.register.present("r", self.lost, self.a.seal(self.lost))

    def present(self, site: Hospital, grants: int = 0, nonce: str = "nonce-1", origin: str = "lazaret/test") -> None:
        word = Receipts(site.name, origin, nonce, grants)
        self.register.present(f"p-{site.name}-{nonce}-{grants}", word, site.seal(word))


@pytest.fixture
def restored(tmp_path: Path) -> Restored:
    return Restored(tmp_path)


def test_a_restored_ledger_grants_nothing_before_every_site_has_presented(restored: Restored) -> None:
    tiny = restored.b.reservation("tiny", SMALL, "federated", "run-3")
    verdict = restored.register.reserve("k1", tiny, restored.b.seal(tiny))
    assert {f.rule for f in verdict.findings} == {"frozen"}
    restored.show()
    restored.present(restored.a, 1)
    verdict = restored.register.reserve("k2", tiny, restored.b.seal(tiny))
    assert {f.rule for f in verdict.findings} == {"frozen"}
    restored.present(restored.b)
    assert restored.register.reserve("k3", tiny, restored.b.seal(tiny)).admitted


def test_what_the_backup_had_lost_is_spent_again_and_cannot_be_reserved_twice(restored: Restored) -> None:
    restored.register.present("r", restored.lost, restored.a.seal(restored.lost))
    restored.register.present("r2", restored.lost, restored.a.seal(restored.lost))  # known by now: nothing happens
    account = restored.register.store.state.accounts["site-a/rdp"]
    grant = restored.register.store.state.grants["lost"]
    assert (grant.state, account.spent) == ("spent", grant.reserved.amount)
    restored.present(restored.a, 1)
    restored.present(restored.b)
    verdict = restored.register.reserve("k9", restored.lost, restored.a.seal(restored.lost))
    assert {f.rule for f in verdict.findings} >= {"grant_exists"}
    restored.register.store.close()
    found = verify(export_file(restored.path, "lazaret/test", restored.key))
    assert found.epoch == 2


def test_an_older_checkpoint_shows_the_auditor_that_entries_were_lost(restored: Restored) -> None:
    restored.register.store.close()
    raw = export_file(restored.path, "lazaret/test", restored.key)
    with pytest.raises(ExportError, match="does not extend"):
        verify(raw, since=restored.note)


def test_receipts_of_another_restore_or_ledger_are_refused(restored: Restored) -> None:
    for nonce, origin in (("nonce-0", "lazaret/test"), ("", "lazaret/test"), ("nonce-1", "lazaret/other")):
        with pytest.raises(InvalidEntryError):
            restored.present(restored.a, 0, nonce, origin)
    assert restored.register.store.state.sites_awaited == {"site-a", "site-b"}


def test_receipts_after_the_word_that_these_were_all_are_refused(restored: Restored) -> None:
    restored.present(restored.a)
    with pytest.raises(InvalidEntryError, match="only after a restore"):
        restored.register.present("r", restored.lost, restored.a.seal(restored.lost))


def test_receipts_for_more_grants_than_were_recovered_are_refused(restored: Restored) -> None:
    """Who runs the ledger cannot take the site's word and leave out what it showed."""
    with pytest.raises(InvalidEntryError, match="another number"):
        restored.present(restored.a, 1)
    restored.show()
    with pytest.raises(InvalidEntryError, match="another number"):
        restored.present(restored.a, 0)
    restored.present(restored.a, 1)


def test_the_same_backup_brought_back_twice_needs_new_receipts(restored: Restored) -> None:
    restored.show()
    restored.present(restored.a, 1)
    restored.register.store.restore("nonce-2")
    old = Receipts("site-a", "lazaret/test", "nonce-1", 1)
    with pytest.raises(InvalidEntryError, match="nothing is awaited"):
        restored.register.present("again", old, restored.a.seal(old))
    restored.present(restored.a, 0, "nonce-2")


def test_a_lost_grants_name_cannot_be_taken_by_another_site(restored: Restored) -> None:
    cheap = restored.b.reservation("lost", SMALL, "federated", "run")
    restored.register.present("squat", cheap, restored.b.seal(cheap))
    with pytest.raises(InvalidEntryError, match="another one"):
        restored.show()
    assert restored.register.store.state.frozen("site-a")


def test_what_was_refused_before_a_restore_is_not_recovered_after_it(tmp_path: Path) -> None:
    """Or the ledger's owner could spend a site's budget alone."""
    a = Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a)
    dear = a.reservation("dear", SubsampledGaussian(0.5, 0.5, 100), "federated", "run")
    assert not register.reserve("k", dear, a.seal(dear)).admitted
    register.store.restore("n")
    with pytest.raises(InvalidEntryError, match="was refused"):
        register.present("r", dear, a.seal(dear))


def test_a_site_enrolled_after_a_restore_shows_its_receipts_too(tmp_path: Path) -> None:
    """The backup may be older than its first enrolment."""
    a, b = Hospital("site-a"), Hospital("site-b")
    register = open_register(tmp_path / "ledger.db", a, key=a.key)
    register.store.restore("n")
    word = Receipts("site-a", "lazaret/test", "n", 0)
    register.present("p", word, a.seal(word))
    register.store.close()
    register = open_register(tmp_path / "ledger.db", a, b, key=a.key)
    tiny = b.reservation("tiny", SMALL, "federated", "run")
    assert {f.rule for f in register.reserve("k", tiny, b.seal(tiny)).findings} == {"frozen"}
    own = a.reservation("own", SMALL, "federated", "run")
    assert register.reserve("k-a", own, a.seal(own)).admitted, "it alone waits"
    word = Receipts("site-b", "lazaret/test", "n", 0)
    register.present("p-b", word, b.seal(word))
    assert register.reserve("k2", tiny, b.seal(tiny)).admitted


def test_a_site_that_will_not_come_back_is_waived_by_two_and_its_budget_is_gone(restored: Restored) -> None:
    store = restored.register.store
    decisions.appoint(store, "dpo-1", "compliance", CAREFUL.public)
    decisions.appoint(store, "head-1", "hospital", LOCAL.public)
    decisions.approve(store, CAREFUL.approval("w1", "waive", "site-b", "2-nonce-1"))
    with pytest.raises(InvalidEntryError, match=r"not approved by hospital.*sign waive site-b 2-nonce-1"):
        decisions.waive(store, "site-b", "w1")
    decisions.approve(store, LOCAL.approval("w1", "waive", "site-b", "2-nonce-1"))
    decisions.waive(store, "site-b", "w1")
    assert store.state.sites_awaited == {"site-a"}
    assert all(store.state.accounts[f"site-b/{kind}"].left == 0 for kind in ("rdp", "k"))


def test_a_recovered_grant_at_a_discount_is_found_by_the_auditor(restored: Restored) -> None:
    envelope = restored.a.seal(restored.lost)
    claim = canonical(claim_json(restored.lost.claim))
    entry = Recovered("lost", "site-a", "run-2", "federated", "site-a/rdp", 1, claim, digest(envelope))
    restored.register.store.append("cheap", AppendRequest((entry,), (envelope,)))
    restored.register.store.close()
    with pytest.raises(ExportError, match="another price"):
        verify(export_file(restored.path, "lazaret/test", restored.key))


def test_a_refused_request_is_not_granted_later_under_another_key(tmp_path: Path) -> None:
    """Else a restore to between the two would take the grant for one that was refused, and give its budget back."""
    a = Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", a)
    big = a.reservation("big", DP, "federated", "run")
    hold = a.reservation("hold", DP, "federated", "run-0")
    assert register.reserve("k0", hold, a.seal(hold)).admitted
    assert not register.reserve("k1", big, a.seal(big)).admitted
    register.store.append("free", AppendRequest((Freed("hold", "refused", bytes(32)),)))
    assert {f.rule for f in register.reserve("k2", big, a.seal(big)).findings} == {"replay"}


def _restored_again(r: Restored, nonce: str) -> None:
    """The same backup, brought back once more: its epoch has the same number."""
    backup = r.path.with_name("again.db")
    r.register.store.close()
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        r.path.with_name(name).unlink(missing_ok=True)
    shutil.copy(backup, r.path)
    marked_as_it_is(r.path)
    r.register = open_register(r.path, r.a, r.b, key=r.key)
    r.register.store.restore(nonce)


def test_what_was_signed_to_waive_a_site_after_one_restore_waives_nobody_after_another_of_the_same_backup(
    tmp_path: Path,
) -> None:
    key, a, b = Ed25519PrivateKey.generate(), Hospital("site-a"), Hospital("site-b")
    register = open_register(tmp_path / "ledger.db", a, b, key=key)
    decisions.appoint(register.store, "dpo-1", "compliance", CAREFUL.public)
    decisions.appoint(register.store, "head-1", "hospital", LOCAL.public)
    register.store._disk._db.execute(f"VACUUM INTO '{tmp_path / 'again.db'}'")  # type: ignore[attr-defined]
    shown = Restored.__new__(Restored)
    shown.path, shown.key, shown.a, shown.b, shown.register = tmp_path / "ledger.db", key, a, b, register
    words = [p.approval("w1", "waive", "site-b", "2-first") for p in (CAREFUL, LOCAL)]
    _restored_again(shown, "first")
    for word in words:
        decisions.approve(shown.register.store, word)
    decisions.waive(shown.register.store, "site-b", "w1")
    assert shown.register.store.state.sites_awaited == {"site-a"}
    _restored_again(shown, "second")
    store = shown.register.store
    for word in words:
        decisions.approve(store, word)
    with pytest.raises(InvalidEntryError, match="to be signed: `ledger sign waive site-b 2-second"):
        decisions.waive(store, "site-b", "w1")
    with pytest.raises(InvalidEntryError, match=r"2 role.*0 did"):  # a ledger's owner with a program of their own
        store.append("w", AppendRequest((Waived("site-b", "w1"),)))
    assert store.state.sites_awaited == {"site-a", "site-b"}
    store.close()


def test_a_waiver_of_an_older_ledger_still_folds_and_the_auditor_tells_of_it(restored: Restored) -> None:
    """They signed the number of the epoch alone; nobody writes that any longer."""
    store = restored.register.store
    decisions.appoint(store, "dpo-1", "compliance", CAREFUL.public)
    decisions.appoint(store, "head-1", "hospital", LOCAL.public)
    for person in (CAREFUL, LOCAL):
        envelope = person.approval("old", "waive", "site-b", "2")
        with pytest.raises(InvalidEntryError, match="`ledger waive` prints"):
            decisions.approve(store, envelope)
        words = proposal("old", "waive", "site-b", "2")
        store.append(
            f"old-{person.name}", AppendRequest((Approved(person.name, "old", words, digest(envelope)),), (envelope,))
        )
    with pytest.raises(InvalidEntryError, match="not approved by"):
        decisions.waive(store, "site-b", "old")
    store.append("waived", AppendRequest((Waived("site-b", "old"),)))
    for person in (CAREFUL, LOCAL):
        decisions.approve(store, person.approval("new", "waive", "site-a", "2-nonce-1"))
    decisions.waive(store, "site-a", "new")
    assert not store.state.sites_awaited
    store.close()
    found = verify(export_file(restored.path, "lazaret/test", restored.key))
    assert found.waived_by_number == ["site-b, epoch 2, as old"]


HEX64 = "ab" * 32
TURNED = "\u202e\u2066"


@pytest.mark.parametrize(
    ("action", "subject", "value"),
    [
        ("limit", "site-a/rdp", f"2.0{TURNED} (a lower budget, already approved by head-1)"),
        ("limit", "site-a/rdp", "2.0 already approved by head-1"),
        ("limit", f"site-a/rdp{TURNED}", "2.0"),
        ("limit", "the budget of site-a", "2.0"),
        ("limit", "site-a/rdp", ""),
        ("appoint", f"mary{TURNED}, who leaves, is ", f"compliance {HEX64}"),
        ("appoint", "mary", f"compliance, as agreed {HEX64}"),
        ("appoint", "mary", f"friend {HEX64}"),
        ("dismiss", "mary ", "compliance"),
        ("dismiss", "mary", "compliance\n"),
        ("enrol", "site-b", f"{HEX64}\u200b"),
        ("waive", "site-b", "2-nonce-1 as dpo-1 said"),
        ("waive", "site-b", f"2-{TURNED}"),
        ("release", "rel-1", "the good one"),
        ("refuse", "rel-1", f"{HEX64} it is bad"),
        ("amend", "site-a", "x" * 4000),
        ("praise", "site-a", "much"),
    ],
)
@pytest.mark.parametrize("asked", [True, False], ids=["request", "approval"])
def test_nobody_is_shown_prose_or_marks_that_turn_the_writing_around(
    ledger: Ledger, action: str, subject: str, value: str, asked: bool
) -> None:
    store, size = ledger.register.store, ledger.register.store.state.size
    say, seal = (decisions.request, CAREFUL.request) if asked else (decisions.approve, CAREFUL.approval)
    with pytest.raises(InvalidEntryError, match=r"the value cannot be carried out|subject is|unknown action"):
        say(store, seal("odd", action, subject, value))
    assert store.state.size == size


@pytest.mark.parametrize(
    ("action", "subject", "value"),
    [
        ("limit", "site-a/rdp", "1e-05"), ("limit", "site-a/k", "300"), ("limit", "site-a/rdp", "8.0"),
        ("appoint", "mary", f"researcher {HEX64}"), ("dismiss", "mary", "auditor"), ("enrol", "site-b", HEX64),
        ("waive", "site-b", f"2-{'ab' * 16}"), ("release", "rel-1", HEX64), ("refuse", "rel-1", f"{HEX64} quality"),
        ("amend", "site-a", HEX64),
    ],
)  # fmt: skip
def test_whatever_can_be_carried_out_can_be_approved(ledger: Ledger, action: str, subject: str, value: str) -> None:
    store = ledger.register.store
    decisions.approve(store, CAREFUL.approval("fine", action, subject, value))
    assert set(store.state.proposals["fine"].approvals) == {"dpo-1"}


def test_a_person_whom_an_older_ledger_let_in_under_an_odd_name_can_be_dismissed(ledger: Ledger) -> None:
    store, odd = ledger.register.store, Person(f"mary{TURNED}, who leaves, is ", "operator")
    words = proposal("s", "appoint", odd.name, f"operator {odd.public.hex()}")
    for person in (CAREFUL, LOCAL):
        sealed = person.approval("s", "appoint", odd.name, f"operator {odd.public.hex()}")
        store.append(
            f"old-{person.name}", AppendRequest((Approved(person.name, "s", words, digest(sealed)),), (sealed,))
        )
    store.append("odd", AppendRequest((Appointed(odd.name, odd.role, odd.public, "s"),)))
    ledger.approve("go", "dismiss", odd.name, "operator", CAREFUL, LOCAL)
    decisions.dismiss(store, odd.name, "go")
    assert odd.name in store.state.dismissed
    assert ledger.audit(), "an older ledger folds as it did"


def test_words_that_an_older_ledger_holds_have_their_old_answer_when_they_are_sent_again(ledger: Ledger) -> None:
    """Same key and content, same answer; only what is new has to be of a form that can be carried out."""
    store = ledger.register.store
    for kind, seal, say in (
        ("approve", CAREFUL.approval, decisions.approve), ("request", CAREFUL.request, decisions.request)
    ):  # fmt: skip
        sealed = seal(f"old-{kind}", "limit", "site-a/rdp", "9.0 as agreed by telephone")
        words = proposal(f"old-{kind}", "limit", "site-a/rdp", "9.0 as agreed by telephone")
        entry = (Approved if kind == "approve" else Requested)("dpo-1", f"old-{kind}", words, digest(sealed))
        with pytest.raises(InvalidEntryError, match="the value cannot be carried out"):
            say(store, sealed)
        store.append(f"{kind}-{digest(sealed).hex()}", AppendRequest((entry,), (sealed,)))
        size = store.state.size
        assert say(store, sealed).serial == f"old-{kind}"
        assert store.state.size == size


@pytest.mark.parametrize("name", ["mary\u202e\u2066, who leaves, is ", "Mary", "mary smith", "", "m" * 65, "-mary"])
def test_a_persons_name_is_a_short_opaque_one_whoever_appoints(ledger: Ledger, name: str) -> None:
    with pytest.raises(InvalidEntryError, match="a person's name"):
        decisions.appoint(ledger.register.store, name, "operator", Person("x", "operator").public, "s")
    assert name not in ledger.register.store.state.persons
