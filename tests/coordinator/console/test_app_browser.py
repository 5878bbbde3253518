"""Rounds, releases, policies and people in a real browser: signed there, read by screen readers, printed, narrow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.console import people, policies, releases, rounds
from tests.support.browser import Visitor, chromium, sideways
from tests.support.coordinator_console import Served, serving
from tests.support.coordinator_runs import agents, job

ADDS = (rounds.add, releases.add, policies.add, people.add)


def press(visitor: Visitor, name: str | re.Pattern[str]) -> None:
    """A button that leads to another page, which is there when this returns."""
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("button", name=name).click()


def sign(visitor: Visitor, served: Served, name: str) -> None:
    """With the person's own key file, in the page."""
    visitor.page.get_by_label("Your key file").set_input_files(served.key(name))
    press(visitor, re.compile("^Sign the "))


@pytest.mark.slow  # the end-to-end test does it on a running federation
@agents
def test_persons_ask_approve_and_launch_with_nothing_but_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch, ADDS) as served, chromium() as chrome:
        release = served.hub.release("north", "g-1", 12)
        list(served.hub.runs.launch(job(rounds=1, run="run-0")))
        with chrome.visitor(served.base, *served.login("rita")) as rita:
            rita.log_in("/ask/limit")
            rita.page.get_by_label("Account").select_option("north/rdp")
            rita.page.get_by_label("New budget").fill("8.5")
            press(rita, "Continue to the signature")
            rita.axe()
            sign(rita, served, "rita")
            where = rita.page.url.removeprefix(served.base)
            assert "Other persons decide now" in rita.page.locator(".flash").inner_text()
            for name, path in (
                ("releases", "/releases"),
                ("release", f"/releases/{release}"),
                ("model", "/releases/run-0"),
                ("policy", "/policies/north"),
                ("run", "/rounds/run-0"),
            ):
                rita.go(path)
                rita.axe()
                rita.screenshot(f"coordinator-{name}")
            rita.go("/plan?like=run-0")
            rita.axe()
            rita.page.get_by_label("Name", exact=True).fill("run-1")
            press(rita, "Show the cost")
            rita.axe()
            rita.screenshot("coordinator-forecast")
            press(rita, "Launch it at this cost")
            rita.page.get_by_text("finished", exact=True).wait_for(timeout=200_000)  # by itself, without a reload
            rita.screenshot("coordinator-run-over")
        for name in ("dora", "hugo"):
            with chrome.visitor(served.base, *served.login(name), width=360) as approver:
                approver.log_in(where)
                approver.axe()
                sign(approver, served, name)
                assert sideways(approver.page) == 0
                approver.screenshot(f"coordinator-proposal-{name}")
        with chrome.visitor(served.base, *served.login("olga"), dark=True) as olga:
            olga.log_in("/people")
            olga.axe()
            olga.screenshot("coordinator-people")
            olga.go(where)
            press(olga, "Carry it out")
            assert "Done, and recorded" in olga.page.locator(".flash").inner_text()
            assert olga.pdf("coordinator-proposal").stat().st_size > 5_000
        assert served.hub.store.state.accounts["north/rdp"].epsilon == "8.5"
