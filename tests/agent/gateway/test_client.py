"""The log keeps to its list, and the site's directory tells all its problems at once."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path

import pytest

import coordinator.event_log as coordinator_log
from agent import errors as agent_errors
from agent.event_log import open_log
from agent.federation.service import response_delay
from agent.gateway.enrolment import Given, enrol
from agent.storage import site_directory
from agent.storage.read_only_access import check_history
from agent.storage.site_database import SiteDatabase
from agent.storage.site_ledger import initialise_ledger, site_policy
from agent.storage.vault import Vault
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import Store
from policies.review.policy import PolicyError, preset
from protos.federation.round_times import FIRST_S
from protos.identity.certificates import KeyFileError
from protos.operations.event_log import UnlistedKeyError
from tests.support.ledger_world import Clock, Hospital, open_register, policy

KEY = bytes(range(32))


@pytest.mark.parametrize("opened", [open_log, coordinator_log.open_log])
def test_an_unlisted_key_cannot_be_logged(tmp_path: Path, opened: object) -> None:
    """P14: the list decides, not the caller's care."""
    log = opened(tmp_path / "x.log")  # type: ignore[operator]
    log.info("release_refused", release="release-1", rule="min_k")
    for secret in ({"patient": "x"}, {"path": "y"}, {"exc_info": True}, {"rule": "long" * 200}):
        with pytest.raises((UnlistedKeyError, coordinator_log.UnlistedKeyError)):
            log.info("event", **secret)
    lines = [json.loads(line) for line in (tmp_path / "x.log").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["release_refused"]


def test_a_line_break_in_a_value_cannot_forge_a_log_line(tmp_path: Path) -> None:
    log = open_log(tmp_path / "x.log")
    log.info("step", step='x"}\n{"event": "forged"}')
    assert len((tmp_path / "x.log").read_text().splitlines()) == 1


GOOD = (
    'site = "site-a"\ncoordinator = "127.0.0.1:1"\ninput = "../input"\n'
    'modalities = ["OT"]\nsecondary_capture_modalities = []\npublic_components = []\n'
)


def test_all_problems_of_site_toml_are_told_at_once(tmp_path: Path) -> None:
    home = site_directory.create(tmp_path / "site", GOOD, preset("internal"))
    (tmp_path / "site" / "site.toml").write_text(GOOD.replace("coordinator", "coordinatr").replace('["OT"]', '"OT"'))
    with pytest.raises(agent_errors.SiteConfigError) as caught:
        home.settings()
    for part in ("coordinator: missing", "coordinatr: unknown key", "modalities: must be a list"):
        assert part in str(caught.value)


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(agent_errors.SiteConfigError, match="nothing was written"):
        site_directory.create(tmp_path, GOOD, preset("internal"))
    assert os.listdir(tmp_path) == ["precious"]


def test_a_bad_policy_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        site_directory.create(tmp_path / "site", GOOD, "name = 1")
    assert not (tmp_path / "site").exists()


def test_keys_that_others_can_read_stop_everything(tmp_path: Path) -> None:
    home = site_directory.create(tmp_path / "site", GOOD, preset("internal"))
    (home.keys / "vault.key").chmod(0o644)
    with pytest.raises(KeyFileError):
        home.secret("vault")


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"site": "site-a"}'])
def test_an_invitation_that_is_none_is_refused_before_anybody_is_called(tmp_path: Path, body: bytes) -> None:
    home = site_directory.create(tmp_path / "site", GOOD, preset("internal"))
    before = sorted(os.listdir(home.keys))
    called: list[str] = []
    with pytest.raises(agent_errors.SiteConfigError, match="invitation"):
        enrol(
            home,
            Given(body, "token", "0" * 32),
            lambda *call: called.append(call[1]),
            dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        )
    assert (called, sorted(os.listdir(home.keys))) == ([], before)


def test_an_older_or_missing_ledger_is_noticed_by_the_vault(tmp_path: Path) -> None:
    """Removing ledger.db would give spent budget back."""
    vault = Vault(SiteDatabase(tmp_path / "vault.db", KEY), tmp_path / "main.db", KEY)
    hospital = Hospital("site-a")
    register = open_register(tmp_path / "ledger.db", hospital)
    check_history(vault, register.store)
    vault.write_note("ledger", register.store.state.size)
    check_history(vault, register.store)
    register.store.close()
    fresh = Store(open_sqlite(tmp_path / "another.db"), "lazaret/site-a", hospital.key, Clock())
    with pytest.raises(agent_errors.SiteConfigError, match="restore it"):
        check_history(vault, fresh)


def test_the_agent_holds_to_the_stricter_of_both_policies(tmp_path: Path) -> None:
    """P12, as the agent puts itself together."""
    home = site_directory.create(tmp_path / "site", GOOD, policy(epsilon="2.0"))
    (home.keys / "federation.toml").write_text(policy(k_min=17, epsilon="50.0"))
    site_directory.enrolment(home)
    store = Store(open_sqlite(tmp_path / "ledger.db"), "lazaret/site-a", home.sign_key(), Clock())
    held = site_policy(home, store)
    assert (held.epsilon, held.k_min) == (2.0, 17)
    (tmp_path / "site" / "policy.toml").write_text(policy(epsilon="99.0", l_diversity=4))
    held = site_policy(home, store)
    assert (held.epsilon, held.l_diversity) == (2.0, 4), "loosening takes an amendment, tightening does not"


def test_a_site_is_in_its_own_ledger_before_anybody_is_appointed_there(tmp_path: Path) -> None:
    """Else the first two persons would have to approve their own hospital to itself, and nothing could be done."""
    home = site_directory.create(tmp_path / "site", GOOD, policy())
    store = Store(open_sqlite(tmp_path / "ledger.db"), "lazaret/site-a", home.sign_key(), Clock())
    with pytest.raises(agent_errors.SiteConfigError, match="not enrolled"):
        initialise_ledger(home, store)
    assert store.state.size == 0
    (home.keys / "federation.toml").write_text(policy())
    initialise_ledger(home, store)
    assert set(store.state.sites) == {"site-a"}
    assert set(store.state.accounts) == {"site-a/rdp", "site-a/k"}
    size = store.state.size
    initialise_ledger(home, store)
    assert store.state.size == size


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.9])
def test_quick_answers_all_take_the_same_time(seconds: float) -> None:
    assert seconds + response_delay(seconds) == FIRST_S


def test_slow_answers_take_one_of_few_times() -> None:
    assert {round(s / 10 + response_delay(s / 10), 6) for s in range(1, 160)} == {2.0, 4.0, 8.0, 16.0}
