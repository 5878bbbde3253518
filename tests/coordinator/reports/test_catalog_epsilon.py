"""One epsilon reads the same wherever it stands: reports, pages, tables and messages round it up, in one way."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from coordinator.console.budgets import budget_of
from coordinator.console.job_form import costs_of
from coordinator.console.release_facts import epsilon_of as told_on_a_page
from coordinator.console.run_status import _spent
from coordinator.explanations import format_epsilon
from coordinator.federation.job import SiteCost
from coordinator.pools.datasheet import _figure
from coordinator.pools.selection import PoolCost
from coordinator.reports.catalog import REPORTS, make, snapshot
from coordinator.reports.document import ReportError
from policies.accounting.rdp import allowance, epsilon_of
from policies.accounting.rounding import epsilon_text
from policies.audit.display import rows, words
from policies.audit.verify import _summary, verify
from policies.ledger.entries import LimitSet, Opened, Record
from policies.ledger.state import Account, State
from tests.support.report_world import NOW, Stage, page_of, stage

WRITTEN = re.compile(r"(?:epsilon|ε)(?: (?:is|of|takes|spent))?[ =:]+(\d(?:[\d.e+-]*\d)?)", re.IGNORECASE)
_READER = shutil.which("pdftotext")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("hub")) as shown:
        yield shown


@pytest.fixture(scope="module")
def shown_to_people(world: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Everything that people read of this history, as text."""
    folder = tmp_path_factory.mktemp("pdf")
    out: dict[str, str] = {}
    for report in REPORTS.values():
        for form in set(report.forms) & {"html", "md", "yaml", "pdf" if _READER else "html"}:
            for subject in [*world.names.values(), world.run] if report.about else [""]:
                try:
                    body = make(world.home, report.name, form, subject, NOW).body
                except ReportError:
                    continue
                if form == "pdf":
                    (folder / "x.pdf").write_bytes(body)
                    command = [str(_READER), str(folder / "x.pdf"), "-"]
                    body = subprocess.run(command, capture_output=True, check=True).stdout
                out[f"{report.name}.{form} {subject}"] = plain(body.decode(errors="replace"))
    records = [line.record for line in map(world.store.line, range(world.store.state.size))]
    out["report.html"] = plain(page_of(world.store))
    out["lazaret-verify"] = "\n".join(_summary(verify(snapshot(world.home, NOW)[0]), False))
    out["ledger show"] = "\n".join(row[4] for row in rows(records))
    return out


def plain(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_every_epsilon_that_people_read_is_in_the_one_form(shown_to_people: dict[str, str]) -> None:
    seen = set()
    for name, text in shown_to_people.items():
        for shown in WRITTEN.findall(text):
            assert shown == epsilon_text(shown), name
            seen.add(name.partition(" ")[0])
    assert {"burn-down.html", "card.html", "card.md", "report.html", "lazaret-verify", "ledger"} <= seen


def test_the_epsilon_of_a_run_reads_the_same_wherever_it_stands(
    world: Stage, shown_to_people: dict[str, str]
) -> None:
    dearest = snapshot(world.home, NOW)[1].item(world.run).dearest
    value = dearest["epsilon"]["value"]
    shown = epsilon_text(value)
    assert float(shown) > float(value), "it has more than two places"
    where = {
        name.partition(" ")[0]
        for name, text in shown_to_people.items()
        if re.search(rf"(?<![\d.]){re.escape(shown)} at delta", text)
    }
    assert {"card.html", "card.md"} <= where
    drafts = json.loads(make(world.home, "registry", "json", "", NOW).body)
    assert f'"epsilon": {float(shown)}' in json.dumps(drafts)


VALUE, ORDER, DELTA = 3.4567891, 7, "1e-06"
OPENED = Opened("a/rdp", allowance(VALUE, float(DELTA), ORDER), ORDER, repr(VALUE), DELTA)
RAISED = LimitSet("a/rdp", 1, repr(VALUE), "s")
LEDGER = {"unit": "patient", "relation": "add-or-remove-one"}
COST = SiteCost("a", True, "3.456789100", DELTA, 1, 2, "3.456789100", "")
PLACES: dict[str, Callable[[], str]] = {
    "a report's sentence": lambda: format_epsilon(VALUE, {"delta": DELTA, "order": ORDER}, LEDGER),
    "a release's page": lambda: told_on_a_page({"epsilon": VALUE, "delta": DELTA, "order": ORDER}),
    "a budget's page": lambda: budget_of("a/rdp", Account(OPENED)).says,
    "a forecast": lambda: f"epsilon {costs_of([COST])[0].epsilon}",
    "a pool's datasheet": lambda: _figure(PoolCost("a", "rdp", 1, epsilon=VALUE, delta=float(DELTA))),
    "a limit in a report": lambda: words(RAISED, State()),
    "an opened account in a table": lambda: rows([Record(1, "k", OPENED)])[0][4],
}


@pytest.mark.parametrize("place", PLACES)
def test_one_epsilon_reads_the_same_in_every_place(place: str) -> None:
    assert re.search(r"epsilon 3\.46\b", PLACES[place]()), PLACES[place]()
    assert "3.45" not in PLACES[place]()


def test_what_a_seat_has_spent_is_in_the_one_form() -> None:
    amount = allowance(VALUE, float(DELTA), ORDER) // 2
    shown = epsilon_text(epsilon_of(amount, float(DELTA), ORDER))
    assert _spent(amount, DELTA, ORDER).startswith(f"epsilon {shown} at")


def test_what_is_left_is_rounded_down() -> None:
    (cost,) = costs_of([COST])
    assert (cost.epsilon, cost.left) == ("3.46", "3.45")
