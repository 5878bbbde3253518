"""The rounds: a price before a launch, nothing launched that was not seen, progress, stop and resume."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator

import pytest

from coordinator.console import job_form, rounds
from coordinator.federation.run_journal import JOURNAL
from tests.support.coordinator_console import Caller, Served, serving, words_of
from tests.support.coordinator_runs import SITES, agents, job

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(tmp_path_factory.mktemp("hub"), patch, (rounds.add,), strangers=()) as made,
    ):
        yield made


def hidden(page: str, name: str) -> str:
    found = re.search(rf'name="{name}" value="([^"]*)"', page)
    assert found is not None, name
    return html.unescape(found[1])


def forecast(person: Caller, run: str, **changes: str) -> str:
    answer = person.post("/plan", **{**job_form.from_job(job(rounds=1)), "run": run, **changes})
    assert answer.status_code == 200, words_of(answer)
    return answer.text


def launch(served: Served, person: Caller, run: str) -> None:
    page = forecast(person, run)
    person.done("/plan/launch", job=hidden(page, "job"), seen=hidden(page, "seen"))
    served.hub.finish(run)


@agents
def test_a_run_is_priced_then_launched_and_its_board_says_how_it_went(served: Served) -> None:
    with served.as_("rita") as researcher:
        size = served.hub.store.state.size
        page = forecast(researcher, "run-a")
        assert "It can start" in page
        assert page.count("fits</span>") == 3
        assert "one patient added or removed" in page
        assert served.hub.store.state.size == size, "a forecast holds nothing"
        page = researcher.done("/plan/launch", job=hidden(page, "job"), seen=hidden(page, "seen"))
        assert "The run is launched." in page
        served.hub.finish("run-a")
        page = researcher.text("/rounds/run-a")
        assert "finished" in page
        assert "rita, researcher" in page
        assert all(site in page for site in SITES)
        assert "data-live" not in page.split("<main")[1], "what is over does not ask again"
        assert "run-a" in researcher.text("/rounds")


def test_nothing_is_launched_at_another_price_than_was_seen(served: Served) -> None:
    with served.as_("olga") as operator:
        page = forecast(operator, "run-b")
        answer = operator.post("/plan/launch", job=hidden(page, "job"), seen="0" * 64)
        assert answer.status_code == 422
        assert "The forecast has changed since" in html.unescape(answer.text)
        changed = json.loads(hidden(page, "job")) | {"rounds": 2, "config": json.loads(hidden(page, "job"))["config"]}
        answer = operator.post("/plan/launch", job=json.dumps(changed), seen=hidden(page, "seen"))
        assert answer.status_code in (409, 422)
        for bad in ("", "{}", "[]", '{"run": "../../x"}', hidden(page, "job").replace("run-b", "../x")):
            assert operator.post("/plan/launch", job=bad, seen=hidden(page, "seen")).status_code == 409
        assert not (served.hub.runs.root / "run-b").exists()


def test_what_is_wrong_with_the_form_is_said_at_once_and_what_was_typed_stays(served: Served) -> None:
    with served.as_("olga") as operator:
        form = {
            **job_form.from_job(job()),
            "rounds": EVIL,
            "min_sites": "x",
            "config.noise_multiplier": "much",
            "site.nowhere": "on",
        }
        answer = operator.post("/plan", **form)
        assert answer.status_code == 422
        said = html.unescape(answer.text)
        assert "4 things are wrong" in said
        assert "nowhere is not enrolled" in said
        assert EVIL not in answer.text
        assert "&lt;img src=x" in answer.text
        assert operator.post("/plan", mechanism="teleport").status_code == 400


def test_a_price_that_cannot_be_paid_is_shown_with_its_reason_and_offers_no_launch(served: Served) -> None:
    with served.as_("olga") as operator:
        config = {"config.noise_multiplier": "0.05"}
        page = forecast(operator, "run-c", **config)
        assert "It cannot start" in page
        assert "does not fit" in page
        assert "/plan/launch" not in page


@agents
def test_a_job_file_fills_the_form_and_a_wrong_one_says_why(served: Served) -> None:
    made = job()
    body = {k: getattr(made, k) for k in ("mechanism", "parameters", "rounds", "min_sites")}
    body |= {"config": json.loads(made.config), "sites": list(SITES)}
    with served.as_("rita") as researcher:
        answer = researcher.post("/plan/file", {"job": ("job.json", json.dumps(body))})
        assert answer.status_code == 200
        assert 'value="195"' in answer.text
        answer = researcher.post("/plan/file", {"job": ("job.json", b"no json")})
        assert answer.status_code == 422
        assert "the job file lacks" in answer.text
        assert 'value="195"' in researcher.text("/plan", like="run-a")


@agents
def test_a_stop_holds_and_a_resume_goes_on(served: Served) -> None:
    west = served.hub.wards["west"]
    west.online = False
    with served.as_("olga") as operator:
        values = {"run": "run-d", "min_sites": "3", "all_or_none": "on"}
        page = forecast(operator, **values)
        page = operator.done("/plan/launch", job=hidden(page, "job"), seen=hidden(page, "seen"))
        assert "data-live" in page.split("<main")[1]
        feed = served.hub.runs._feeds["run-d"]
        with feed.changed:
            assert feed.changed.wait_for(lambda: any(e.state == "waiting" for e in feed.events), 240)
        page = operator.text("/rounds/run-d")
        assert "waits for sites" in page
        assert "was not connected" in html.unescape(page)
        assert "stops after the round in progress" in html.unescape(operator.done("/rounds/run-d/stop"))
        served.hub.finish("run-d")
        page = operator.text("/rounds/run-d")
        assert ">stopped<" in page
        west.online = True
        operator.done("/rounds/run-d/resume")
        served.hub.finish("run-d")
        assert "finished" in operator.text("/rounds/run-d")
        assert "Only a run that was stopped" in words_of(operator.post("/rounds/run-d/resume"))
        operator.done("/rounds/run-d/stop")


@agents
def test_a_page_after_a_restart_shows_what_was_before_it_and_names_a_damaged_journal(served: Served) -> None:
    """Another process has no feed of the run: the journal alone tells who was asked, what it carried, and when."""
    with served.as_("olga") as operator:
        launch(served, operator, "run-f")
        folder = served.hub.runs.root / "run-f"
        lines = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
        for n, line in enumerate(lines):
            if line["links"] or line["state"] in ("granted", "sent", "closed"):
                line["links"] = {SITES[0]: [n * 2**20, 3 * n * 2**20, line["at"]]}
        (folder / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
        del served.hub.runs._feeds["run-f"]
        page = operator.text("/rounds/run-f")
        table = page.split("<caption>Hospitals")[1].split("</table>")[0]
        assert "answered, " in table.split(SITES[0])[1].split("<tr>")[0]
        assert re.search(r">\d+\.0, \d+\.0<", table), "bytes of the run"
        assert "none in this run" in table.split(SITES[1])[1]
        assert "not kept" not in page
        (folder / JOURNAL).write_bytes(b"{}\n")
        page = operator.text("/rounds/run-f")
        assert "is damaged" in page
        assert "finished" in page
        assert "not kept" in page


@pytest.mark.parametrize("name", ["otto", "dora", "hugo"])
def test_who_only_reads_or_approves_conducts_nothing(served: Served, name: str) -> None:
    with served.as_(name) as person:
        assert "Plan a run" not in person.text("/rounds")
        for path in ("/plan", "/plan/launch", "/plan/file", "/rounds/run-a/stop", "/rounds/run-a/resume"):
            assert person.post(path, job="{}", seen="").status_code == 403, path
        assert person.get("/plan").status_code == 403


@agents
def test_no_run_of_that_name_is_a_sentence_and_a_name_is_used_once(served: Served) -> None:
    with served.as_("olga") as operator:
        for name in ("nothing", "..%2f..%2fkeys", "%3Cscript%3E", "x" * 300):
            assert operator.get(f"/rounds/{name}").status_code == 404
            assert operator.post(f"/rounds/{name}/stop").status_code == 404
        launch(served, operator, "run-e")
        answer = operator.post("/plan", **{**job_form.from_job(job(rounds=1)), "run": "run-e"})
        assert "that name is taken" in answer.text
