"""The overview and the ledger in a real browser: as an auditor reads them, at a desk, on a telephone and on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.console import ledger, overview, rounds
from policies.accounting.claims import KAnonymous
from policies.governance import decisions
from tests.support.browser import chromium, sideways
from tests.support.coordinator_console import serving
from tests.support.coordinator_runs import job


@pytest.mark.slow  # the end-to-end test does it on a running federation
def test_an_auditor_finds_an_entry_checks_it_and_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, monkeypatch, (overview.add, ledger.add, rounds.add)) as served:
        hub = served.hub
        list(hub.runs.launch(job(rounds=2)))
        hub.finish("run-1")
        north = hub.hospitals["north"]
        for n in range(4):
            thin = north.reservation(f"thin-{n}", KAnonymous(k=2, l_diversity=1, releases_per_patient=1))
            hub.intake.register.reserve(f"t{n}", thin, north.seal(thin))
        decisions.request(hub.store, hub.request("rita", "limit-1", "limit", "north/rdp", "9.0"))
        with chromium() as chrome:
            with chrome.visitor(served.base, *served.login("otto")) as otto:
                page = otto.page
                otto.log_in("/")
                otto.axe()
                otto.screenshot("coordinator-overview")
                page.get_by_role("link", name="Ledger", exact=True).click()
                page.get_by_label("Words").fill("thin-2")
                page.get_by_label("Kind").select_option("refused")
                page.keyboard.press("Enter")  # no mouse is needed
                page.get_by_text("1 entry found.").wait_for()
                otto.axe()
                otto.screenshot("coordinator-ledger")
                page.get_by_role("link", name="Entry").focus()
                page.keyboard.press("Enter")
                page.get_by_text("✓ proof checked").wait_for()
                otto.axe()
                otto.screenshot("coordinator-entry")
                with page.expect_download() as saved:
                    page.get_by_role("link", name="Download the entry with its proof").click()
                assert saved.value.suggested_filename.endswith("-proof.json")
                assert otto.pdf("coordinator-entry").stat().st_size > 5_000
            with chrome.visitor(served.base, *served.login("dora"), width=360, dark=True, script=False) as dora:
                dora.log_in("/")
                for path in ("/", "/ledger", f"/ledger/{hub.store.state.size - 2}", "/refusals", "/budgets/north"):
                    dora.go(path)
                    assert sideways(dora.page) == 0, path
                    dora.screenshot(f"coordinator-narrow-{path.strip('/').replace('/', '-') or 'overview'}")
                assert dora.page.get_by_text("Budgets of north").first.is_visible(), "without any script"
