"""Charts: what is drawn is also said, nothing in them is a script or a style, and what is no number is not drawn."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protos.web.charts import Bar, BarPart, ChartFrame, StepCurve, bars, steps
from tests.support.console_kit import charts

NASTY = "</svg><script>alert(1)</script>\"'&"
FRAME = ChartFrame("Left", "epsilon per patient", 0.0, 86_400.0)


def widths(html: str) -> list[float]:
    return [float(w) for w in re.findall(r'<rect class="part-(?:spent|held)" x="[\d.]+" width="([\d.]+)"', html)]


def test_every_chart_is_well_formed_and_has_no_style_or_script() -> None:
    for chart in charts().values():
        ET.fromstring(str(chart))
        assert "style" not in chart
        assert "<script" not in chart.replace("&lt;", "")


def test_texts_are_escaped_wherever_they_stand() -> None:
    frame = ChartFrame(NASTY, NASTY, 0.0, 1.0, 2.0, NASTY)
    made = steps([StepCurve(NASTY, ((0.0, 1.0),))], frame) + bars([Bar(NASTY, (), 1.0, NASTY, NASTY)], NASTY)
    assert "<script>" not in made
    ET.fromstring(f"<a>{made}</a>")


def test_a_bar_is_as_long_as_its_share_and_never_longer_than_the_whole() -> None:
    assert widths(bars([Bar("a", (BarPart("spent", 1.0), BarPart("held", 1.0)), 4.0, "")], "")) == [250.0, 250.0]
    assert widths(bars([Bar("a", (BarPart("spent", 9.0), BarPart("held", 1.0)), 4.0, "")], "")) == [1000.0]


def test_a_little_that_is_spent_is_seen() -> None:
    assert widths(bars([Bar("a", (BarPart("spent", 1e-9),), 4.0, "")], ""))[0] > 0


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_what_is_no_amount_is_not_drawn(amount: float) -> None:
    with pytest.raises(ValueError, match="amount"):
        BarPart("spent", amount)
    with pytest.raises(ValueError, match="whole"):
        Bar("a", (), amount, "")
    with pytest.raises(ValueError, match="known kind"):
        BarPart("pink", 1.0)


def test_a_curve_goes_on_until_the_end_and_says_its_points() -> None:
    made = steps([StepCurve("alpha", ((3600.0, 1.0), (7200.0, 2.5)))], FRAME)
    assert "alpha ends at 2.5" in made
    assert made.count("<tr>") == 3
    path = re.search(r'd="(M[^"]+)"', made)
    assert path is not None
    assert path[1].endswith("H546.0")


def test_what_happened_before_the_frame_is_where_a_curve_begins() -> None:
    made = steps([StepCurve("alpha", ((-9.0, 3.0),))], FRAME)
    assert re.search(r'd="M62\.0 [\d.]+H546\.0"', made)


def test_points_out_of_order_or_without_a_value_are_refused() -> None:
    with pytest.raises(ValueError, match="ordered"):
        StepCurve("a", ((2.0, 1.0), (1.0, 1.0)))
    with pytest.raises(ValueError, match="two numbers"):
        StepCurve("a", ((1.0, math.nan),))
    with pytest.raises(ValueError, match="ends after"):
        ChartFrame("a", "b", 1.0, 1.0)
    with pytest.raises(ValueError, match="told apart"):
        steps([StepCurve(str(n), ()) for n in range(7)], FRAME)


@example([5e-324])
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20))
def test_every_curve_of_amounts_can_be_drawn(values: list[float]) -> None:
    made = steps([StepCurve("a", tuple((float(n), v) for n, v in enumerate(values)))], FRAME)
    ET.fromstring(str(made))
    heights = [float(y) for y in re.findall(r"V([\d.]+)", made)]
    assert all(12.0 <= y <= 216.0 for y in heights)
