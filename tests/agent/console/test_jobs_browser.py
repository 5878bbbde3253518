"""From a proposal to a certificate without a command line, as three people at three browsers, with real jobs."""

from __future__ import annotations

import datetime as dt
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.mechanisms.common.linear_codec import save_basis
from agent.service.jobs import JobStore
from coordinator.reports.catalog import certificate
from coordinator.reports.report_inputs import books_of
from policies.ledger.store import export
from tests.agent.console.hospital import Hospital, hospital, in_service, public_basis
from tests.support.browser import PATIENCE_MS, Chrome, Visitor, chromium, sideways
from tests.support.release_site import vouch_for


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Hospital]:
    """A hospital whose IT has put a basis into ``networks``, and vouches for it."""
    with hospital(tmp_path, patients=24) as one:
        raw = save_basis(public_basis())
        (one.home.root / "networks").mkdir()
        (one.home.root / "networks" / "basis.safetensors").write_bytes(raw)
        vouch_for(one, hashlib.sha256(raw).hexdigest())  # type: ignore[arg-type] # it needs the home directory alone
        yield one


def look(visitor: Visitor, name: str) -> None:
    visitor.axe()
    assert sideways(visitor.page) == 0, name
    visitor.screenshot(f"site-{name}")


def press(visitor: Visitor, name: str, link: bool = False) -> None:
    with visitor.page.expect_navigation(timeout=PATIENCE_MS):
        visitor.page.get_by_role("link" if link else "button", name=name).first.click()


def sign(visitor: Visitor, made: Hospital, name: str) -> None:
    visitor.page.locator("input.key").set_input_files(made.key(name))
    press(visitor, "Approve with my signature")
    assert "Your approval is in the ledger." in visitor.page.inner_text("main")


def shows(visitor: Visitor, text: str) -> None:
    """The page says so by itself, without being loaded again."""
    visitor.page.locator("main").get_by_text(text).first.wait_for(timeout=PATIENCE_MS)


def test_a_researcher_proposes_two_approve_a_job_runs_and_its_release_leaves_with_a_certificate(
    made: Hospital, chrome: Chrome, tmp_path: Path
) -> None:
    with (
        in_service(made),
        chrome.visitor(made.base, *made.login("rita")) as rita,
        chrome.visitor(made.base, *made.login("dora")) as dora,
        chrome.visitor(made.base, *made.login("hugo")) as hugo,
    ):
        propose(rita)
        approve(dora, hugo)
        shows(rita, "made, waits for the reviewers")
        assert "Review the release" not in rita.page.inner_text("main"), "it is for those who see images"
        release = review(made, dora, hugo)
        rita.go("/jobs")
        shows(rita, "done")
        look(rita, "jobs")
    job = JobStore(made.home.root).read(1)
    assert [event.state for event in job.history] == [
        "proposed", "proposed", "proposed", "queued", "running", "made", "done",
    ]  # fmt: skip
    assert release in made.federation.store.state.releases
    verified(made, release, tmp_path / "certificate.pdf")


def propose(rita: Visitor) -> None:
    rita.log_in("/jobs")
    look(rita, "jobs-none")
    press(rita, "Propose a release or a training", link=True)
    look(rita, "propose")
    press(rita, "ksame", link=True)
    rita.page.get_by_label("k", exact=True).fill("five")
    rita.page.get_by_label("modality (required)").fill("OT")
    rita.page.get_by_label("basis (required)").select_option("networks/basis.safetensors")
    press(rita, "Show the price")
    assert "invalid int value" in rita.page.inner_text("main")
    assert rita.page.get_by_label("modality (required)").input_value() == "OT"
    look(rita, "proposal-problem")
    rita.page.get_by_label("k", exact=True).fill("5")
    press(rita, "Show the price")
    assert "0 of 1 would be left" in rita.page.inner_text("main")
    look(rita, "proposal")
    press(rita, "Propose it")
    assert "Proposed as job 1" in rita.page.inner_text("main")
    look(rita, "job-proposed")


def approve(dora: Visitor, hugo: Visitor) -> None:
    dora.log_in("/")
    press(dora, "proposals waiting for approval", link=True)
    press(dora, "1", link=True)
    look(dora, "job-to-approve")
    press(dora, "Approve as compliance")
    assert "it waits for hospital" in dora.page.inner_text("main")
    hugo.log_in("/jobs/1")
    press(hugo, "Approve as hospital")
    assert "it is queued" in hugo.page.inner_text("main")
    shows(dora, "made, waits for the reviewers")
    dora.page.get_by_role("button", name="Refuse it").wait_for(state="detached")
    dora.page.locator("#history").get_by_text("made", exact=True).wait_for()  # each part of the page asks by itself
    look(dora, "job-made")


def review(made: Hospital, dora: Visitor, hugo: Visitor) -> str:
    """Two people look at the images and sign; one of them sends. The release's name."""
    press(dora, "Review the release", link=True)
    path = dora.page.url.removeprefix(made.base)
    press(dora, "Compare with the vault")
    shows(dora, "Compared with 48 real images, ")
    shows(dora, "Last: comparing")
    dora.page.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    look(dora, "release-of-job")
    sign(dora, made, "dora")
    hugo.go(path)
    sign(hugo, made, "hugo")
    press(hugo, "Send it to the coordinator")
    shows(hugo, "has left")
    look(hugo, "release-left")
    hugo.go("/jobs/1")
    shows(hugo, "done")
    look(hugo, "job-done")
    return path.rpartition("/")[2]


def verified(made: Hospital, release: str, path: Path) -> None:
    """The coordinator's certificate of the release is sound to a recipient who knows the ledger's key."""
    store = made.federation.store
    inputs = books_of(export(store._disk, store.origin, store._key), "", dt.datetime.now(dt.UTC))
    path.write_bytes(certificate(inputs, inputs.item(release), "pdf", store._key))
    fingerprint = hashlib.sha256(store.public).hexdigest()
    words = [sys.executable, "-m", "policies.audit.verify", str(path), "--key", fingerprint]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ksame" in done.stdout or release in done.stdout


def test_without_scripts_a_job_is_cancelled_and_says_so(made: Hospital, chrome: Chrome) -> None:
    with in_service(made), chrome.visitor(made.base, *made.login("rita"), script=False) as rita:
        rita.log_in("/jobs")
        press(rita, "Propose a release or a training", link=True)  # a process that imports torch describes the forms
        press(rita, "ksame", link=True)
        rita.page.get_by_label("modality (required)").fill("OT")
        rita.page.get_by_label("basis (required)").select_option("networks/basis.safetensors")
        rita.page.get_by_label("k", exact=True).fill("5")
        press(rita, "Propose it")
        press(rita, "Cancel …", link=True)
        assert "No budget is spent" in rita.page.inner_text("main")
        press(rita, "Cancel it")
        assert "It is cancelled" in rita.page.inner_text("main")
        assert JobStore(made.home.root).read(1).state == "cancelled"
