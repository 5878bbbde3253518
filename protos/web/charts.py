"""Charts as SVG that the server writes: no script, no inline style, every figure also in words or in a table.

What is drawn is told: a reader of screens gets the same numbers, from the words beside a bar or the table below a
curve. All texts are escaped here; callers hand in plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from protos.common.text import DATE, MINUTE, utc

_KINDS: Final = ("spent", "held", "left", "yes", "no", "warn")
_WIDTH: Final = 560.0
_HEIGHT: Final = 250.0
_LEFT: Final = 62.0  # room for the numbers of the vertical axis
_BOTTOM: Final = 34.0
_TOP: Final = 12.0
_RIGHT: Final = 14.0
_COLOURS: Final = 6


@dataclass(frozen=True, slots=True)
class BarPart:
    """A piece of a bar."""

    kind: str  # "spent", "held", "left", "yes", "no", "warn": its colour
    amount: float

    def __post_init__(self) -> None:
        """No piece is negative or not a number."""
        if self.kind not in _KINDS or not (math.isfinite(self.amount) and self.amount >= 0):
            raise ValueError("a part of a bar has a known kind and an amount that is not negative")


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a bar chart. ``words`` say the figures: a bar alone is no statement."""

    label: str
    parts: tuple[BarPart, ...]
    whole: float  # what the full width stands for
    words: str
    href: str = ""  # the label leads there

    def __post_init__(self) -> None:
        """There is something to draw it against."""
        if not (math.isfinite(self.whole) and self.whole > 0):
            raise ValueError("a bar is drawn against a whole that is positive")


@dataclass(frozen=True, slots=True)
class StepCurve:
    """A curve of steps: from each point on, the value is that one."""

    label: str
    points: tuple[tuple[float, float], ...]  # (seconds since 1970, value), by time

    def __post_init__(self) -> None:
        """Points in order, and numbers."""
        if not all(math.isfinite(at) and math.isfinite(value) for at, value in self.points):
            raise ValueError("a point of a curve is two numbers")
        if any(later[0] < earlier[0] for earlier, later in zip(self.points, self.points[1:], strict=False)):
            raise ValueError("the points of a curve are ordered by time")


def bars(rows: Sequence[Bar], title: str, legend: Sequence[tuple[str, str]] = ()) -> Markup:
    """Horizontal bars, a row each, with their words.

    Args:
        rows: from top to bottom.
        title: of the figure.
        legend: (kind, what it means).
    """
    items = Markup("").join(_bar(row) for row in rows)
    return Markup('<figure class="chart"><figcaption>{}</figcaption><ul class="bars">{}</ul>{}</figure>').format(
        title, items, _legend([(f"part-{kind}", words) for kind, words in legend])
    )


def _bar(row: Bar) -> Markup:
    pieces, at = [], 0.0
    for part in row.parts:
        width = min(part.amount / row.whole, 1.0 - at)  # what is over the whole is said in words
        if width > 0:
            shown = max(width, 0.004)  # a little is seen to be something
            pieces.append(
                Markup('<rect class="part-{}" x="{:.3f}" width="{:.3f}" height="20"/>').format(
                    part.kind, 1000 * at, 1000 * shown
                )
            )
            at = min(1.0, at + width)
    label = Markup('<a href="{}">{}</a>').format(row.href, row.label) if row.href else escape(row.label)
    return Markup(
        '<li><span>{}</span><svg class="bar" viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="part-left" width="1000" height="20"/>{}</svg><span class="words">{}</span></li>'
    ).format(label, Markup("").join(pieces), row.words)


def _legend(entries: Sequence[tuple[str, str]]) -> Markup:
    if not entries:
        return Markup("")
    swatch = Markup(
        '<li><svg viewBox="0 0 14 14" aria-hidden="true"><rect class="{}" width="14" height="14"/></svg>{}</li>'
    )
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(swatch.format(*entry) for entry in entries))


def _lines(entries: Sequence[tuple[str, str]]) -> Markup:
    """A legend of lines: each has a pattern of its own beside its colour, so that equal curves show one another."""
    sample = Markup(
        '<li><svg class="sample" viewBox="0 0 34 14" aria-hidden="true">'
        '<line class="{}" x1="0" x2="34" y1="7" y2="7"/></svg>{}</li>'
    )
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(sample.format(*entry) for entry in entries))


@dataclass(frozen=True, slots=True)
class ChartFrame:
    """What a curve is drawn in."""

    title: str
    unit: str  # of the values, such as "ε left per patient"
    begin: float  # seconds since 1970
    end: float
    limit: float | None = None  # a line across, such as the budget
    limit_words: str = ""

    def __post_init__(self) -> None:
        """Time goes on."""
        if not (math.isfinite(self.begin) and math.isfinite(self.end) and self.begin < self.end):
            raise ValueError("a frame ends after it begins")


def steps(series: Sequence[StepCurve], frame: ChartFrame) -> Markup:
    """Curves of steps over time, for what is spent or left; and the same as a table.

    Args:
        series: at most six; their last value is drawn on to the frame's end.
        frame: times, title, unit and limit.
    Raises:
        ValueError: more curves than can be told apart.
    """
    if len(series) > _COLOURS:
        raise ValueError(f"at most {_COLOURS} curves can be told apart")
    top = max([frame.limit or 0.0, *(value for s in series for _, value in s.points)], default=0.0)
    top = top if top >= _LEAST else 1.0
    step = _step(top)
    high = step * math.ceil(top / step - 1e-9)
    drawing = Markup("").join(
        [_grid(high, step, frame), *(_curve(s, number, high, frame) for number, s in enumerate(series))]
    )
    if frame.limit is not None:
        at = _y(frame.limit, high)
        drawing += Markup('<line class="limit" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            _LEFT, _WIDTH - _RIGHT, at, at
        )
    svg = Markup(
        '<svg class="plot" role="img" viewBox="0 0 {:.0f} {:.0f}" aria-label="{}"><title>{}</title><desc>{}</desc>'
        "{}</svg>"
    ).format(_WIDTH, _HEIGHT, frame.title, frame.title, _told(series, frame), drawing)
    legend = [(f"line line-{number}", s.label) for number, s in enumerate(series)]
    if frame.limit is not None and frame.limit_words:
        legend.append(("limit", frame.limit_words))
    return Markup(
        '<figure class="chart"><figcaption>{} <span class="soft">({})</span></figcaption>{}{}{}</figure>'
    ).format(frame.title, frame.unit, svg, _lines(legend), _table(series, frame))


def _told(series: Sequence[StepCurve], frame: ChartFrame) -> str:
    last = "; ".join(f"{s.label} ends at {s.points[-1][1]:g}" for s in series if s.points)
    return (
        f"Steps from {utc(frame.begin, DATE)} to {utc(frame.end, DATE)}, {frame.unit}. {last or 'Nothing happened'}."
    )


def _x(at: float, frame: ChartFrame) -> float:
    share = min(max((at - frame.begin) / (frame.end - frame.begin), 0.0), 1.0)
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share


def _y(value: float, high: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(max(value / high, 0.0), 1.0))


_LEAST: Final = 1e-300  # below it is nothing that a chart could show


def _step(top: float) -> float:
    """A round distance of grid lines: 1, 2 or 5 times a power of ten, at most six of them."""
    power = 10.0 ** math.floor(math.log10(top / 4))
    return next(power * times for times in (1, 2, 5, 10) if top / (power * times) <= 5)


def _grid(high: float, step: float, frame: ChartFrame) -> Markup:
    out = []
    for number in range(round(high / step) + 1):
        y = _y(number * step, high)
        out.append(
            Markup(
                '<line class="grid-line" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
                '<text x="{}" y="{:.1f}" text-anchor="end">{:g}</text>'
            ).format(_LEFT, _WIDTH - _RIGHT, y, y, _LEFT - 8, y + 5, float(f"{number * step:.6g}"))
        )
    for at, anchor in ((frame.begin, "start"), (frame.end, "end")):
        out.append(
            Markup('<text x="{:.1f}" y="{}" text-anchor="{}">{}</text>').format(
                _x(at, frame), _HEIGHT - 8, anchor, utc(at, DATE)
            )
        )
    return Markup("").join(out)


def _curve(series: StepCurve, number: int, high: float, frame: ChartFrame) -> Markup:
    before = [value for at, value in series.points if at <= frame.begin]
    inside = [(at, value) for at, value in series.points if frame.begin < at <= frame.end]
    if before:
        inside.insert(0, (frame.begin, before[-1]))
    if not inside:
        return Markup("")
    path = f"M{_x(inside[0][0], frame):.1f} {_y(inside[0][1], high):.1f}"
    path += "".join(f"H{_x(at, frame):.1f}V{_y(value, high):.1f}" for at, value in inside[1:])
    return Markup('<path class="line line-{}" d="{}H{:.1f}"/>').format(number, path, _x(frame.end, frame))


def _table(series: Sequence[StepCurve], frame: ChartFrame) -> Markup:
    row = Markup('<tr><th scope="row">{}</th><td>{}</td><td class="number">{:g}</td></tr>')
    points = [(s.label, at, value) for s in series for at, value in s.points][-200:]
    rows = Markup("").join(row.format(label, utc(at, MINUTE), value) for label, at, value in points)
    return Markup(
        "<details><summary>As a table</summary><table><thead><tr><th scope='col'>Curve</th><th scope='col'>From</th>"
        "<th scope='col' class='number'>{}</th></tr></thead><tbody>{}</tbody></table></details>"
    ).format(frame.unit, rows)
