"""The report at a run's end: how it ended, whether the model may leave, what each site was charged, for all ends."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.federation.events import RunEvent
from coordinator.federation.job import job_from
from coordinator.federation.run_journal import JOURNAL, keep_event
from coordinator.reports.catalog import REPORTS, make, make_run_report
from coordinator.reports.document import ReportError
from coordinator.reports.run_report import _merged
from policies.accounting.rdp import epsilon_of
from policies.accounting.rounding import epsilon_text
from tests.support.coordinator_runs import configuration, written
from tests.support.report_world import NOW, Stage, keep_run, stage


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        yield shown


@pytest.fixture(autouse=True)
def alone(world: Stage) -> Iterator[None]:
    yield
    shutil.rmtree(world.home.root / "runs", ignore_errors=True)


def made(world: Stage, run: str = "trial", now: dt.datetime = NOW) -> tuple[str, dict[str, Any], str]:
    """The page, the JSON, and the state in a few words."""
    report = make_run_report(world.home, run, now)
    return report.files["html"].body.decode(), json.loads(report.files["json"].body), report.told


def test_a_finished_run_tells_its_end_its_promise_and_the_way_to_the_certificate(world: Stage) -> None:
    keep_run(world)
    page, told, words = made(world)
    assert words == "Finished: all 2 rounds are closed"
    assert "south is in 1 of 2 rounds; the other sites are in all" in page
    assert "It may leave: the ledger admitted it under the policies of the federation and of north, south" in page
    assert "report certificate certificate-trial.pdf --release trial" in page
    assert told["satre_3_3_07"]["may_leave"] is True
    assert told["certificate"]["certificate"].endswith("--release trial")
    assert (told["state"], told["ended"], told["ended_at"]) == ("finished", True, 210.0)
    assert told["rounds"][1]["states"] == {"north": "in", "south": "not in"}
    assert told["rounds"][1]["site_seconds"] == {"north": 10.0}


def test_every_control_is_told_with_what_was_done(world: Stage) -> None:
    keep_run(world)
    page, told, _ = made(world)
    applied = told["satre_3_3_07"]["applied"]
    assert applied["Budget"] == "held before the first round at north, south"
    assert applied["Review"] == "3 answers admitted by the ledger, of which closed rounds count 3"
    assert applied["Looks"] == "none was priced, and none was made"
    assert "SATRE 2.0, 3.3.07" in page
    for name in (*applied, *told["satre_3_3_07"]["controls"]):
        assert name in page


def test_what_each_site_was_charged_is_the_ledgers_amount_rounded_up(world: Stage) -> None:
    keep_run(world)
    page, told, _ = made(world)
    for site, one in zip(("north", "south"), told["sites"], strict=True):
        opened = world.store.state.accounts[f"{site}/rdp"].opened
        amount = world.store.state.grants[f"g-{site}"].reserved.amount
        charged = epsilon_text(epsilon_of(amount, float(opened.delta), opened.order))
        assert one["epsilon"]["charged"] == charged
        assert (one["epsilon"]["unit"], one["epsilon"]["order"]) == ("patient", opened.order)
        assert f"epsilon {charged} at delta" in page
    assert "per patient, neighbours differ by one patient added or removed" in page


@pytest.mark.parametrize("state", ["failed", "stopped", "open"])
def test_a_run_that_did_not_finish_has_no_model_that_may_leave(world: Stage, state: str) -> None:
    """The sentence that a trusted research environment asks for is a no, whatever rounds are closed."""
    folder = keep_run(world, state)
    if state == "stopped":
        (folder / "stop").touch()
        keep_event(folder, RunEvent("trial", 2, "stopped", (), "by an operator"), 300.0, {}, {})
    page, told, words = made(world)
    assert told["satre_3_3_07"]["may_leave"] is False
    assert told["certificate"] is None
    assert "It may leave" not in page
    assert "No model may leave: " in page
    assert words.startswith(
        {"failed": "Failed: ", "stopped": "Stopped, and not ended: ", "open": "Not ended: "}[state]
    )
    assert told["ended"] is (state == "failed")
    why = {"failed": "The updates could not be combined to a sound model.", "stopped": "It was stopped by a person."}
    assert why.get(state, "The run goes on, or waits.") in page
    assert ("round resume trial" in page) is (state == "stopped")


def test_the_codes_are_told_in_words_and_marked_as_not_to_be_handed_on(world: Stage) -> None:
    """Why a site is not in a round is not exported with a model; what is handed on with one has none of it."""
    keep_run(world)
    page, told, _ = made(world)
    assert "The hospital&#39;s agent was asked and did not answer in time" in page
    assert "do not hand it on with the model" in page
    assert "do not hand it on with the model" in told["handling"]
    assert told["rounds"][1]["out"]["south"]["code"] == "no_reply"
    for name, report in REPORTS.items():
        if report.about:
            for form in set(report.forms) & {"json", "html", "md"} - ({"json"} if name == "croissant" else set()):
                handed = make(world.home, name, form, "trial", NOW).body
                assert b"no_reply" not in handed
                assert b"did not answer in time" not in handed


def test_the_private_figures_are_drawn_with_their_intervals_and_the_chosen_look_is_named(world: Stage) -> None:
    folder = keep_run(world)
    plan = {"looks": 1, "noise": 1.0, "held_out": 25, "bins": 4}
    kept = json.loads((folder / "job.json").read_text())
    kept |= {"rounds": 1, "evaluate": [1], "config": written({**configuration(1), "evaluate": plan})}
    (folder / "job.json").write_text(json.dumps(kept))
    asked = job_from((folder / "job.json").read_text())
    table = [400.0 * (i % 4 == 0) + 50.0 for i in range(asked.layout().size)]  # mostly right, in each class
    (folder / "round-2.look").write_text(json.dumps({"sites": ["north"], "sums": table}))
    page, told, _ = made(world)
    (look,) = told["looks"]
    first = look["figures"]["accuracy"]
    assert first["low"] < first["value"] < first["high"]
    assert told["chosen_round"] == 1
    assert told["rounds"][1]["kind"] == "look"
    assert f"after round 1: {first['value']:.3f}, {first['low']:.3f} to {first['high']:.3f}" in page
    assert "1 of 1 made, in sums with noise" in page
    assert "The model is the one of round 1, which looked best." in page
    (folder / "round-2.look").unlink()
    with pytest.raises(ReportError, match="a file of the run is damaged or missing"):
        made(world)


def test_what_was_waited_for_is_told_with_how_long(world: Stage) -> None:
    keep_run(world)
    page, told, _ = made(world)
    assert [(one["from"], one["until"], one["code"]) for one in told["waited"]] == [(112.0, 140.0, "too_few_updates")]
    assert "28.0 s" in page


def test_a_run_of_an_earlier_version_says_what_was_not_kept(world: Stage) -> None:
    folder = keep_run(world)
    (folder / JOURNAL).unlink()
    (folder / "round-2.sites").unlink()
    page, told, _ = made(world)
    assert "a version that kept no times" in page
    assert "kept no counts of this run" in page
    assert "why was not kept" in page
    assert told["rounds"][0]["seconds"] is None
    assert told["ended_at"] is None


def test_the_page_is_one_file_without_script_that_loads_nothing_and_says_what_it_draws(world: Stage) -> None:
    keep_run(world)
    page, _, _ = made(world)
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=\"(?!#)", page)
    drawings = re.findall(r'<svg class="plot" role="img"[^>]* aria-label="([^"]+)"', page)
    assert len(drawings) == 4, "budgets, members, durations, links; nobody looked"


def test_rounds_in_a_row_of_which_the_same_is_said_are_one_line() -> None:
    said = [("2", "b", "why", "do"), ("1", "a", "why", "do"), ("price", "b", "no", ""), ("3", "b", "why", "do"),
            ("5", "b", "why", "do"), ("6", "b", "other", "do")]  # fmt: skip
    ordered = sorted(said, key=lambda row: (row[0] != "price", row[0]))
    assert _merged(ordered, ("b", "a")) == (
        ("b", "price", "no", ""), ("b", "2 to 3", "why", "do"), ("b", "5", "why", "do"), ("b", "6", "other", "do"),
        ("a", "1", "why", "do"),
    )  # fmt: skip
