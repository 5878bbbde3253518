"""The exports page: every report to take away, each role that reads, nothing that is not in the ledger."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.console import exports, rounds
from coordinator.reports.catalog import REPORTS
from policies.audit import certificate_check
from policies.audit.certificate import read
from tests.support.browser import chromium, sideways
from tests.support.coordinator_console import ROLES, Served, serving, words_of
from tests.support.coordinator_runs import agents, job


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(tmp_path_factory.mktemp("hub"), patch, (rounds.add, exports.add)) as hub,
    ):
        yield hub


@pytest.fixture(scope="module")
def release(served: Served) -> str:
    site = next(iter(served.hub.hospitals))
    return served.hub.release(site, "g-exports")


def test_every_role_that_reads_is_offered_every_report(served: Served, release: str) -> None:
    for name in ROLES:
        with served.as_(name) as caller:
            page = caller.text("/exports", release=release)
            for report in REPORTS.values():
                for form in report.forms:
                    offered = f"/exports/{report.name}.{form}" in page
                    untold = {"denied", "bundle"} if ROLES[name] == "researcher" else set()
                    assert offered is (report.name not in untold | {"registry-entry"}), (
                        "a release without an epsilon is in no registry, and researchers see no refusals"
                    )


def test_a_researcher_takes_no_report_that_holds_refusals(served: Served, release: str) -> None:
    with served.as_("rita") as rita:
        for path in ("denied.json", "bundle.zip"):
            answer = rita.get(f"/exports/{path}")
            assert answer.status_code == 403
            assert "not shown to researchers" in words_of(answer)
        assert rita.get("/exports/card.md", release=release).status_code == 200


@agents
def test_a_runs_page_leads_to_its_report_for_every_role_that_reads(served: Served) -> None:
    list(served.hub.runs.launch(job(1, run="run-x")))
    for name in ROLES:
        with served.as_(name) as caller:
            page = caller.text("/rounds/run-x")
            for form, begins in (("html", "<!doctype"), ("json", "{")):
                assert f'href="/rounds/run-x/report.{form}"' in page
                answer = caller.get(f"/rounds/run-x/report.{form}")
                assert answer.status_code == 200, words_of(answer)
                assert answer.headers["content-disposition"] == f'attachment; filename="run-run-x.{form}"'
                assert answer.text.startswith(begins)
                assert "all 3 sites are in all 1 rounds" in answer.text


def test_a_run_that_is_not_there_has_no_report(served: Served) -> None:
    with served.as_("otto") as caller:
        for path, why in (
            ("nothing/report.html", "There is no run of that name"),
            ("..%2Fx/report.json", ""),
            ("nothing/report.pdf", "A run's report is a page (html) or JSON."),
        ):
            answer = caller.get(f"/rounds/{path}")
            assert answer.status_code == 404
            assert why in words_of(answer)


def test_a_report_is_a_file_with_a_safe_name(served: Served, release: str) -> None:
    with served.as_("otto") as caller:
        for name, form, begins in (
            ("burn-down", "pdf", b"%PDF-"),
            ("denied", "html", b"<!doctype"),
            ("bundle", "zip", b"PK"),
        ):
            answer = caller.get(f"/exports/{name}.{form}")
            assert answer.headers["content-disposition"] == f'attachment; filename="{name}.{form}"'
            assert answer.content.startswith(begins)
            assert "no-store" in answer.headers["cache-control"]
        signed = caller.get("/exports/certificate.pdf", release=release).content
        certificate_check.check(read(signed))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/exports/nothing.pdf", "There is no report of that name"),
        ("/exports/burn-down.exe", "is made as html or pdf or json"),
        ("/exports/certificate.pdf", "one release: name it"),
        ("/exports/certificate.pdf?release=release-0", "admitted no release of that name"),
        ("/exports/certificate.pdf?release=..%2F..%2Fkeys%2Fledger", "not the name of a release"),
        ("/exports/certificate.pdf?release=%3Cscript%3E", "not the name of a release"),
        ("/exports?release=release-0", "admitted no release of that name"),
    ],
)
def test_what_there_is_not_is_refused_in_a_sentence(served: Served, path: str, says: str) -> None:
    with served.as_("rita") as caller:
        answer = caller.get(path) if "?" not in path else caller.client.get(path)
        assert answer.status_code == 404
        assert says in words_of(answer)
        assert "<script>" not in answer.text


def test_nobody_takes_a_report_without_a_login(served: Served) -> None:
    with served.as_("otto") as caller:
        caller.client.cookies.clear()
        answer = caller.get("/exports/bundle.zip")
        assert answer.status_code in (303, 401)
        assert not answer.content.startswith(b"PK")


def test_a_person_chooses_a_release_and_takes_its_certificate(served: Served, release: str) -> None:
    crt, key = served.login("dora")
    with chromium() as chrome:
        with chrome.visitor(served.base, crt, key) as visitor:
            visitor.log_in("/exports")
            visitor.page.get_by_label("Release or run").select_option(release)
            with visitor.page.expect_navigation():
                visitor.page.get_by_role("button", name="Choose").click()
            visitor.axe()
            visitor.screenshot("exports")
            with visitor.page.expect_download() as taken:
                visitor.page.get_by_role("link", name="Release certificate as PDF").click()
            certificate_check.check(read(taken.value.path().read_bytes()))
            visitor.pdf("exports")
        with chrome.visitor(served.base, crt, key, width=360, dark=True) as visitor:
            visitor.log_in("/exports")
            visitor.screenshot("exports-360")
            assert sideways(visitor.page) == 0
