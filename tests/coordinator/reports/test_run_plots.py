"""The drawings of a run's report: each figure stands in its words, too, and nothing is told by a colour alone."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from coordinator.reports import html_renderer
from coordinator.reports.document import Drawing
from coordinator.reports.run_facts import LookFacts, RoundFacts, SiteCharge
from coordinator.reports.run_plots import plot_budgets, plot_durations, plot_looks, plot_members, plot_traffic

EVIL = '<script>alert("1")</script>&'
MANY = tuple(f"site-{i}" for i in range(40))


def a_round(number: int, sites: tuple[str, ...], closed: bool = True, seconds: float = 90.0) -> RoundFacts:
    out = {} if closed else {sites[0]: "offline"}
    there = sites if closed else ()
    return RoundFacts(
        number, number % 3 == 0, closed, there, out, sites, 50.0, 50.0 + seconds if closed else 0.0,
        {site: seconds / 2 for site in there},
    )  # fmt: skip


def look(after: int, value: float | None, low: float, high: float) -> LookFacts:
    return LookFacts(after, {"accuracy": {"value": value, "low": low, "high": high}})


def charge(charged: int, limit: int = 100, others: int = 0) -> SiteCharge:
    return SiteCharge("held", charged, 0, limit, others, "8", "1e-05", 7)


def drawings(sites: tuple[str, ...]) -> list[Drawing]:
    rounds = [*(a_round(n, sites) for n in range(1, 6)), a_round(6, sites, closed=False)]
    rounds.append(RoundFacts(7, False, False, (), {}, (), 0.0, 0.0, {}))
    return [
        plot_looks([look(1, 0.5, 0.41, 0.62), look(3, None, -1.0, 1.0)], 5, 1),
        plot_budgets({site: charge(31, others=20) for site in sites}),
        plot_members(sites, rounds),
        plot_durations(sites, rounds),
        plot_traffic({site: (3 << 20, 9 << 20) for site in sites}),
    ]


@pytest.mark.parametrize("sites", [("north",), ("north", EVIL), MANY, ("a-hospital-with-a-very-long-name-1", "b")])
def test_a_drawing_is_sound_xml_within_its_frame_and_escapes_what_it_prints(sites: tuple[str, ...]) -> None:
    for drawing in drawings(sites):
        root = ET.fromstring(str(drawing.svg))
        assert root.tag == "svg"
        assert root.attrib["aria-label"] == drawing.words
        assert "nan" not in str(drawing.svg)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for rect in root.iter("rect"):
            x, y, wide, high = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width + 0.1
            assert 0 <= y <= y + high <= height + 0.1


def test_the_words_say_what_is_drawn() -> None:
    looks, budgets, members, durations, traffic = (drawing.words for drawing in drawings(("north", "south")))
    assert looks == "after round 1: 0.500, 0.410 to 0.620; after round 3: nothing is known, -1.000 to 1.000"
    assert budgets == "north: this run 31 %, all others 20 %; south: this run 31 %, all others 20 %"
    assert members == "Rounds that each hospital is in: north 5 of 7; south 5 of 7"
    assert durations.startswith("round 1: 90 seconds; round 2")
    assert traffic == "north: 3.0 MiB from it, 9.0 MiB to it; south: 3.0 MiB from it, 9.0 MiB to it"


def test_a_share_of_a_budget_is_never_drawn_or_told_smaller_than_it_is() -> None:
    drawing = plot_budgets({"north": charge(1, 1_000_000), "south": charge(90, 100, 60), "west": charge(0, 0)})
    assert drawing.words == (
        "north: this run 0.1 %, all others 0 %; south: this run 90 %, all others 60 %; west: no account"
    )


def test_nothing_is_told_by_a_colour_alone() -> None:
    """A site in a round, and one that is not, differ without any colour: a full box, a cross, a hatch, a dash."""
    rounds = [a_round(1, ("north", "south")), a_round(2, ("north", "south"), closed=False)]
    rounds.append(RoundFacts(3, False, False, (), {}, (), 0.0, 0.0, {}))
    svg = str(plot_members(("north", "south"), rounds).svg)
    cells = [
        len(re.findall(pattern, svg)) for pattern in ('class="f0"', 'class="cross"', "url.#asked", 'class="dot"')
    ]
    assert cells == [2 + 1, 1 + 1, 1 + 1, 2 + 1], "one of each is the key's"
    few = str(plot_durations(("a", "b", "c", "d", "e", "f"), [a_round(1, ("a", "b", "c", "d", "e", "f"))]).svg)
    shapes = re.findall(r'class="m m\d" transform="[^"]*" d="([^"]*)"', few)
    assert len(set(shapes)) == 6


def test_every_class_of_a_drawing_is_styled_by_the_page() -> None:
    page = (Path(html_renderer.__file__).parent / "document.html").read_text()
    used = {name for d in drawings(("north", "south")) for names in re.findall(r'class="([^"]+)"', str(d.svg))
            for name in names.split()}  # fmt: skip
    assert {name for name in used if f".{name}" not in page} == set()
