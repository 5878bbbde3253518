"""The site console in a real browser: every page looked at, a release approved with a key file and handed over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.console.hospital import Hospital, hospital, serving
from tests.support.browser import Chrome, Visitor, chromium, sideways

PAGES: tuple[str, ...] = (
    "/",
    "/releases",
    "/ingest",
    "/quarantine?code=not_dicom",
    "/pacs",
    "/budget",
    "/ledger",
    "/ledger/3",
)
PAGES += ("/people", "/policy", "/policy/edit", "/opt-out")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hospital]:
    with hospital(tmp_path) as one:
        one.refuse(2)
        yield one


def look(visitor: Visitor, name: str, path: str = "") -> None:
    if path:
        assert visitor.go(path).status == 200
    visitor.axe()
    assert sideways(visitor.page) == 0, path
    visitor.screenshot(f"site-{name}")


def sign(visitor: Visitor, made: Hospital, name: str, button: str) -> None:
    visitor.page.locator("input.key").set_input_files(made.key(name))
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("button", name=button).click()


def until(visitor: Visitor, path: str, text: str) -> None:
    for _ in range(100):
        visitor.go(path)
        if text in visitor.page.inner_text("main"):
            return
        time.sleep(0.1)
    raise AssertionError(visitor.page.inner_text("main"))


@pytest.mark.slow  # the end-to-end test does it on a running federation
def test_two_people_review_and_sign_in_their_browsers_and_the_operator_sends(made: Hospital, chrome: Chrome) -> None:
    release = made.release()
    path = f"/releases/{release}"
    with serving(made):
        with chrome.visitor(made.base, *made.login("dora")) as dora:
            dora.log_in("/")
            for page in PAGES:
                look(dora, f"{page.strip('/').replace('/', '-').partition('?')[0] or 'overview'}", page)
            dora.go(path)
            dora.page.get_by_role("button", name="Compare with the vault").click()
            until(dora, path, "Compared with 24 images")
            loaded = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"
            dora.page.wait_for_function(loaded)
            look(dora, "release")
            dora.pdf("site-release")
            sign(dora, made, "dora", "Approve with my signature")
            assert "Your approval is in the ledger." in dora.page.inner_text("main")
            dora.go("/opt-out")
            dora.page.get_by_label("Patient ids").first.fill(made.patient_id(2))
            dora.page.get_by_role("button", name="Show the consequences").click()
            look(dora, "opt-out-look")
        with chrome.visitor(made.base, *made.login("hugo"), width=360, dark=True) as hugo:
            hugo.log_in(path)
            hugo.page.locator("input.key").set_input_files(made.key("dora"))  # another's key: nothing is sent
            hugo.page.get_by_role("button", name="Approve with my signature").click()
            hugo.page.locator("form.by-key [role=alert]").wait_for(state="visible")
            hugo.go(path)
            look(hugo, "release-narrow")
            sign(hugo, made, "hugo", "Approve with my signature")
            assert "Your approval is in the ledger." in hugo.page.inner_text("main")
        with chrome.visitor(made.base, *made.login("olga")) as olga:
            olga.log_in(path)
            assert not olga.page.locator("main img").count(), "no picture for who does not decide"
            olga.page.get_by_role("button", name="Send it").click()
            until(olga, "/releases", "has left")
            look(olga, "releases-left")
    assert release in made.federation.store.state.releases


@pytest.mark.slow
def test_a_policy_is_loosened_in_the_browser_by_two_signatures_and_a_release_refused_by_one(
    made: Hospital, chrome: Chrome
) -> None:
    release = made.release()
    with serving(made):
        with chrome.visitor(made.base, *made.login("dora")) as dora:
            dora.log_in("/policy/edit")
            box = dora.page.get_by_label("policy.toml")
            text = box.input_value()
            box.fill(text.replace("k_min = 5", "k_min = 0").replace("epsilon = 8.0", "epsilon = -1"))
            dora.page.get_by_role("button", name="Check", exact=True).click()
            look(dora, "policy-problems")
            dora.page.get_by_label("policy.toml").fill(text.replace("k_min = 5", "k_min = 4"))
            dora.page.get_by_role("button", name="Check and keep").click()
            look(dora, "policy-draft")
            sign(dora, made, "dora", "Approve this text")
        with chrome.visitor(made.base, *made.login("hugo")) as hugo:
            hugo.log_in("/policy/draft")
            sign(hugo, made, "hugo", "Approve this text")
            hugo.page.get_by_role("button", name="Put it in force").click()
            hugo.page.wait_for_load_state()
            assert "in force" in hugo.page.inner_text("main")
            hugo.go(f"/releases/{release}/refuse?why=quality")
            look(hugo, "refuse")
            sign(hugo, made, "hugo", "Refuse with my signature")
            until(hugo, "/releases", "Refused and withdrawn")
    assert "k_min = 4" in made.home.policy_text()


@pytest.mark.slow
def test_without_scripts_every_page_still_works(made: Hospital, chrome: Chrome, tmp_path: Path) -> None:
    from agent.storage import projects
    from policies.statements import parse

    release = made.release()
    vault = projects.open_vault(made.home)
    value = parse(vault.note("pending")[release]["statement"].encode()).artifact_sha256  # type: ignore[union-attr]
    vault.close()
    sealed = tmp_path / "approval.json"
    sealed.write_bytes(made.approval("dora", release, "release", release, value))
    with serving(made), chrome.visitor(made.base, *made.login("dora"), script=False) as dora:
        dora.log_in(f"/releases/{release}")
        button = dora.page.get_by_role("button", name="Hand it in")
        if not button.is_visible():
            dora.page.get_by_text("Sign on another machine").click()
        dora.page.locator('input[name="envelope"][type="file"]').set_input_files(sealed)
        button.click()
        dora.page.wait_for_load_state()
        assert "Your approval is in the ledger." in dora.page.inner_text("main")
