"""What waits for persons at a site, signed and carried out by its short number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.service.pending import waiting
from protos.identity.key_files import pem, write_private
from tests.support.command_line import CommandResult, Typed, at, typed
from tests.support.federation_world import Site
from tests.support.ledger_world import Person
from tests.support.release_site import kept, ksame_words, site
from tests.support.site_serving import serving

__all__ = ["site", "typed"]  # fixtures

DPO, HEAD = Person("dpo-1", "compliance"), Person("head-1", "hospital")


@pytest.fixture
def staffed(site: Site, typed: Typed, tmp_path: Path) -> Site:
    """The site with persons in office, whose keys lie in ``keys``."""
    (tmp_path / "keys").mkdir(mode=0o700)
    for person in (DPO, HEAD):
        write_private(tmp_path / "keys" / person.name, pem(person.key))
        words = ("ledger", "appoint", person.name, person.role, person.public.hex())
        assert typed(*at(site), *words).status == 0
    return site


def sign(typed: Typed, staffed: Site, number: object, person: Person, *more: object) -> CommandResult:
    key = staffed.home.root.parent / "keys" / person.name
    return typed(*at(staffed), "ledger", "sign", number, "--person", person.name, "--key", key, *more)


def amended(staffed: Site, key: str, value: str) -> None:
    policy = staffed.home.root / "policy.toml"
    policy.write_text(re.sub(rf"^{key} = .*", f"{key} = {value}", policy.read_text(), flags=re.MULTILINE))


def test_a_release_is_looked_at_signed_and_sent_by_its_number(staffed: Site, typed: Typed, tmp_path: Path) -> None:
    amended(staffed, "approvals", '["hospital"]')
    made = typed(*at(staffed), *ksame_words(tmp_path))
    assert (made.status, "each approver signs: ledger sign 1 --person" in made.out) == (1, True), made.err
    (name,) = kept(staffed)
    status = typed(*at(staffed), "status").out
    assert "release 1, ksame: hospital must approve it" in status
    assert "lazaret-agent release inspect 1 --out FOLDER" in status
    looked = typed(*at(staffed), "release", "inspect", 1, "--out", tmp_path / "look")
    assert (looked.status, "ledger sign 1 --person NAME" in looked.out) == (0, True)
    assert f"ledger sign release {name}" in looked.out, "and how on another machine"
    refused = typed(*at(staffed), "release", "send", 1)
    assert (refused.status, "not yet approved by: hospital" in refused.out + refused.err) == (1, True)
    with pytest.raises(SystemExit) as usage:  # nobody can be asked
        sign(typed, staffed, 1, HEAD)
    assert usage.value.code == 2
    with pytest.raises(SystemExit):  # what a number stands for is shown before it is given up
        typed(*at(staffed), "release", "withdraw", 1)
    signed = sign(typed, staffed, 1, HEAD, "--yes")
    assert f"head-1 signs: approve release {name}" in signed.out
    assert "release 1, ksame: it is approved, and can be carried out: lazaret-agent release send 1" in signed.out
    sent = typed(*at(staffed), "release", "send", 1)
    assert (sent.status, name in sent.out) == (0, True)
    for words in (("release", "send", 1), ("release", "withdraw", 1), ("release", "inspect", 1, "--out", "x")):
        gone = typed(*at(staffed), *words)
        assert (gone.status, "nothing waits under the number 1 (any more): `lazaret-agent status`" in gone.err) == (
            1,
            True,
        )


def test_a_budget_and_a_policy_are_signed_by_number_beside_a_service_too(staffed: Site, typed: Typed) -> None:
    key = staffed.home.root.parent / "keys" / "dpo-1"
    words = ("ledger", "sign", "limit", "site-a/k", "3", "--serial", "more-1", "--person", "dpo-1", "--key", key)
    first = typed(*at(staffed), *words)
    assert (first.status, "proposal 1, limit site-a/k: hospital must approve it" in first.out) == (0, True)
    amended(staffed, "max_releases_per_patient", "3")
    with serving(staffed):
        assert "policy 2, policy.toml: compliance and hospital must approve it" in typed(*at(staffed), "status").out
        wrong = typed(*at(staffed), "release", "send", 2)
        assert (wrong.status, "2 is policy 2, policy.toml" in wrong.err) == (1, True)
        assert "lazaret-agent ledger limit site-a/k 3 --serial more-1" in sign(typed, staffed, 1, HEAD, "--yes").out
        assert sign(typed, staffed, 2, DPO, "--yes").status == 0
        assert "lazaret-agent ledger amend" in sign(typed, staffed, "2", HEAD, "--yes").out
    again = sign(typed, staffed, 2, HEAD, "--yes")
    assert again.status == 0, "the same signature again is the same entry"
    assert typed(*at(staffed), "ledger", "limit", "site-a/k", "3", "--serial", "more-1").status == 0
    assert [one.number for one in waiting(staffed.home)] == [2]
    amended(staffed, "max_releases_per_patient", "4")
    assert [one.number for one in waiting(staffed.home)] == [3], "another text is another thing"
    assert "nothing waits under the number 2" in sign(typed, staffed, 2, DPO, "--yes").err


def test_words_are_signed_without_the_sites_directory_as_before(typed: Typed, staffed: Site, tmp_path: Path) -> None:
    words = ["ledger", "sign", "limit", "site-a/k", "2", "--person", "dpo-1", "--key", tmp_path / "keys" / "dpo-1"]
    for more in ((), ("--serial", "s"), ("--out", tmp_path / "o"), ("--serial", "s", "--out", tmp_path / "o")):
        if len(more) < 4:
            with pytest.raises(SystemExit):
                typed(*words, *more)
        else:
            assert "name the ledger" in typed(*words, *more).err
    whole = typed(*words, "--serial", "s", "--out", tmp_path / "o", "--ledger", "lazaret/site-a")
    assert (whole.status, (tmp_path / "o").exists()) == (0, True)
    with pytest.raises(SystemExit):
        typed("ledger", "sign", 1, "--person", "dpo-1", "--key", "k")  # a number is of a directory
    assert typed(*at(staffed), "ledger", "approve", tmp_path / "o").status == 0
    assert "hospital must approve" in typed(*at(staffed), "status").out
