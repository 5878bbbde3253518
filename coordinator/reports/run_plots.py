"""The drawings of a run's report, as SVG without script: matplotlib is of the agent's packages, and not here.

Whatever has a colour has a shape or a pattern of its own, too, and stands as a number in the table beside it. Colours
are those of the page (``document.html``), so that they fit its dark form and paper. All texts are escaped here. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from markupsafe import Markup

from coordinator.reports.document import Drawing
from coordinator.reports.run_facts import ASKED, IN, NEVER, OUT, LookFacts, RoundFacts, SiteCharge

_WIDTH: Final = 700.0
_LEFT: Final = 130.0  # room for a site's name
_NAME: Final = 18  # characters of one that fit there
_ROW: Final = 24.0
_SHAPES: Final = (  # of the markers of up to six sites, around (0, 0)
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-4 -4H4V4H-4Z",
    "M0 -5L5 4H-5Z",
    "M0 -5.5L5.5 0L0 5.5L-5.5 0Z",
    "M-4 -4L4 4M-4 4L4 -4",
    "M-5 0H5M0 -5V5",
)
_HATCH: Final = Markup(
    '<defs><pattern id="{}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="hatch" d="M0 0V6"/></pattern></defs>'
)


def _text(x: float, y: float, words: object, anchor: str = "start", kind: str = "") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>').format(
        x, y, anchor, kind, words
    )


def _name(y: float, site: str) -> Markup:
    return _text(_LEFT - 8, y, site if len(site) <= _NAME else f"{site[: _NAME - 1]}…", "end", "name")


def _box(x: float, y: float, size: tuple[float, float], kind: str, fill: str = "") -> Markup:
    filled = Markup(' fill="url(#{})"').format(fill) if fill else Markup("")
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"{}/>').format(
        kind, x, y, *size, filled
    )


def _path(shape: str, kind: str, at: tuple[float, float] = (0.0, 0.0)) -> Markup:
    return Markup('<path class="{}" transform="translate({:.1f} {:.1f})" d="{}"/>').format(kind, *at, shape)


def _svg(height: float, words: str, parts: Iterable[Markup]) -> Markup:
    return Markup('<svg class="plot" role="img" viewBox="0 0 {:.0f} {:.0f}" aria-label="{}">{}</svg>').format(
        _WIDTH, height, words, Markup("").join(parts)
    )


def _axis(low: float, high: float, frame: tuple[float, float], unit: str) -> list[Markup]:
    """Lines across, five numbers and what they are; ``frame``: (top, bottom)."""
    top, bottom = frame
    drawn = [_text(58, top - 10, unit, "start", "unit")]
    for i in range(5):
        y = bottom - (bottom - top) * i / 4
        drawn.append(
            Markup('<line class="rule" x1="58" x2="{:.0f}" y1="{:.1f}" y2="{:.1f}"/>').format(_WIDTH - 10, y, y)
        )
        drawn.append(_text(50, y + 4, f"{low + (high - low) * i / 4:.4g}", "end"))
    return drawn


def _ticks(numbers: Sequence[int], x: Mapping[int, float], y: float) -> list[Markup]:
    """At most some twenty numbers of rounds below an axis."""
    step = max(1, math.ceil(len(numbers) / 20))
    return [_text(x[n], y, n, "middle") for n in numbers[::step]]


def _across(numbers: Sequence[int], left: float = 58.0) -> tuple[dict[int, float], float]:
    """The middle of each round's column, and the width of one."""
    width = (_WIDTH - 10 - left) / max(1, len(numbers))
    return {n: left + width * (i + 0.5) for i, n in enumerate(numbers)}, width


def plot_looks(looks: Sequence[LookFacts], rounds: int, chosen: int) -> Drawing:
    """The figure that rounds are compared by, with its interval, after each round that was looked at."""
    name = next(iter(looks[0].figures))
    found = [(look.after_round, look.figures[name]) for look in looks]
    low: float = math.floor(10 * min(one["low"] for _, one in found)) / 10
    high: float = max(math.ceil(10 * max(one["high"] for _, one in found)) / 10, low + 0.1)
    top, bottom = 30.0, 230.0
    x, _ = _across(range(1, rounds + 1))

    def y(value: float) -> float:
        return bottom - (bottom - top) * (float(value) - low) / (high - low)

    drawn = _axis(low, high, (top, bottom), f"{name}, with its 95 % interval")
    for after, one in found:
        bar = f"M{x[after]:.1f} {y(one['low']):.1f}V{y(one['high']):.1f}"
        bar += "".join(f"M{x[after] - 6:.1f} {y(one[end]):.1f}h12" for end in ("low", "high"))
        drawn.append(_path(bar, "error"))
        if one["value"] is not None:
            drawn.append(_path(_SHAPES[0], "f0", (x[after], y(one["value"]))))
            if after == chosen:
                drawn.append(_path("M-8 0A8 8 0 1 0 8 0A8 8 0 1 0 -8 0Z", "error", (x[after], y(one["value"]))))
                drawn.append(_text(x[after] - 12, y(one["value"]) + 4, "chosen", "end", "name"))
    drawn += [*_ticks(range(1, rounds + 1), x, bottom + 18), _text(_WIDTH - 10, bottom + 36, "after round", "end")]
    told = "; ".join(
        f"after round {after}: {'nothing is known' if one['value'] is None else format(one['value'], '.3f')}, "
        f"{one['low']:.3f} to {one['high']:.3f}"
        for after, one in found
    )
    return Drawing(f"{name[:1].upper()}{name[1:]} at each look", told, _svg(bottom + 44, told, drawn))


def plot_budgets(sites: Mapping[str, SiteCharge]) -> Drawing:
    """The share of each site's budget that this run took, and all others."""
    drawn, told = [_HATCH.format("others")], []
    wide = _WIDTH - _LEFT - 80
    for i, (site, one) in enumerate(sites.items()):
        y = 6 + i * _ROW
        drawn.append(_name(y + 13, site))
        if not one.limit:
            drawn.append(_text(_LEFT, y + 13, "no account"))
            told.append(f"{site}: no account")
            continue
        mine, rest = one.charged / one.limit, one.others / one.limit
        before, run = min(rest, 1.0), min(mine, max(0.0, 1.0 - rest))
        drawn += [
            _box(_LEFT, y, (wide, 16), "left"),
            _box(_LEFT, y, (wide * before, 16), "edge", "others"),
            _box(_LEFT + wide * before, y, (wide * run, 16), "f0"),
            _text(_LEFT + wide + 8, y + 13, f"{_percent(mine)} %", kind="name"),
        ]
        told.append(f"{site}: this run {_percent(mine)} %, all others {_percent(rest)} %")
    words = "; ".join(told)
    keys = (("f0", "", "this run"), ("edge", "others", "all other uses"), ("left", "", "left"))
    return Drawing("What this run took of each budget", words, _keyed(6 + len(sites) * _ROW, words, drawn, keys))


def _percent(share: float) -> str:
    """Rounded up: a little is never nothing."""
    return f"{math.ceil(1000 * share - 1e-9) / 10:g}"


def _keyed(
    height: float, words: str, drawn: Sequence[Markup], keys: Sequence[tuple[str, str, str]], left: float = _LEFT
) -> Markup:
    """With a key below."""
    key, x = list(drawn), left
    for kind, fill, name in keys:
        key += [_box(x, height + 8, (16, 12), kind, fill), _text(x + 22, height + 18, name)]
        x += 44 + 7 * len(name)
    return _svg(height + 28, words, key)


def _cell(state: str, at: tuple[float, float], size: tuple[float, float]) -> Markup:
    """A site in a round: a full box, a box with a cross, a hatched box, or a dash."""
    x, y = at
    wide, high = size
    if state == IN:
        return _box(x, y, size, "f0")
    if state == OUT:
        return _box(x, y, size, "none") + _path(f"M0 0L{wide:.1f} {high:.0f}M0 {high:.0f}L{wide:.1f} 0", "cross", at)
    if state == ASKED:
        return _box(x, y, size, "edge", "asked")
    return _path("M-1.5 0h3", "dot", (x + wide / 2, y + high / 2))


def plot_members(sites: Sequence[str], rounds: Sequence[RoundFacts]) -> Drawing:
    """Who is in which round."""
    numbers = [one.number for one in rounds]
    x, width = _across(numbers, _LEFT)
    wide = width - min(3.0, width / 5)
    drawn, counts = [_HATCH.format("asked")], []
    for i, site in enumerate(sites):
        y = 6 + i * _ROW
        states = [one.state(site) for one in rounds]
        drawn.append(_name(y + 13, site))
        drawn += [_cell(state, (x[n] - wide / 2, y), (wide, 16.0)) for n, state in zip(numbers, states, strict=True)]
        counts.append(f"{site} {states.count(IN)} of {len(rounds)}")
    words = f"Rounds that each hospital is in: {'; '.join(counts)}"
    height = 6 + len(sites) * _ROW
    drawn += _ticks(numbers, x, height + 10)
    if width > 30:
        drawn += [_text(x[one.number], height + 23, "look", "middle") for one in rounds if one.look]
    height, at = height + 36, _LEFT
    for state, name in ((IN, "in it"), (OUT, OUT), (ASKED, "asked, not closed"), (NEVER, NEVER)):
        drawn += [_cell(state, (at, height), (16, 12)), _text(at + 22, height + 10, name)]
        at += 44 + 7 * len(name)
    return Drawing("Who is in which round", words, _svg(height + 20, words, drawn))


def plot_durations(sites: Sequence[str], rounds: Sequence[RoundFacts]) -> Drawing:
    """From sent to closed, as a box for each round; a mark for each site whose answer's time is known."""
    timed = [one for one in rounds if one.seconds]
    unit, by = _unit(max(one.seconds for one in timed))
    longest = max(one.seconds for one in timed) / by
    power = 10.0 ** math.floor(math.log10(longest / 4))
    most = 4 * next(power * times for times in (1, 1.5, 2, 2.5, 5, 10) if 4 * power * times >= longest)
    top, bottom = 30.0, 230.0
    x, width = _across([one.number for one in rounds])
    drawn = _axis(0.0, most, (top, bottom), unit)
    shown = [site for site in sites if any(site in one.site_seconds for one in timed)]
    marked = shown if len(shown) <= len(_SHAPES) else []

    def y(seconds: float) -> float:
        return bottom - (bottom - top) * seconds / by / most

    for one in timed:
        wide = min(46.0, width * 0.7)
        at = x[one.number] - wide / 2
        drawn.append(_box(at, y(one.seconds), (wide, bottom - y(one.seconds)), "whole"))
        for i, site in enumerate(marked):
            if site in one.site_seconds:
                place = at + wide * (i + 0.5) / len(marked)
                drawn.append(_path(_SHAPES[i], f"m m{i}", (place, y(one.site_seconds[site]))))
        for seconds in one.site_seconds.values() if not marked else ():
            drawn.append(_path(f"M{-wide / 2:.1f} 0h{wide:.1f}", "error", (x[one.number], y(seconds))))
    drawn += [
        *_ticks([one.number for one in rounds], x, bottom + 18),
        _text(_WIDTH - 10, bottom + 36, "round", "end"),
    ]
    told = "; ".join(f"round {one.number}: {one.seconds / by:.3g} {unit}" for one in timed[:40])
    key, at = [_box(58, bottom + 46, (16, 12), "whole"), _text(80, bottom + 56, "the round")], 160.0
    for i, site in enumerate(marked):
        name = site if len(site) <= _NAME else f"{site[: _NAME - 1]}…"
        key += [_path(_SHAPES[i], f"m m{i}", (at + 6, bottom + 52)), _text(at + 16, bottom + 56, name)]
        at += 36 + 7 * len(name)
    if shown and not marked:
        key += [_path("M0 0h16", "error", (at, bottom + 52)), _text(at + 22, bottom + 56, "the answer of a hospital")]
    return Drawing("How long each round took", told, _svg(bottom + 66, told, [*drawn, *key]))


def _unit(most: float) -> tuple[str, float]:
    """In which unit a time is drawn, and its seconds."""
    return next(
        ((name, by) for name, by in (("hours", 3600.0), ("minutes", 60.0)) if most >= 2 * by), ("seconds", 1.0)
    )


def plot_traffic(traffic: Mapping[str, tuple[int, int]]) -> Drawing:
    """MiB each way, by site."""
    most = max(max(pair) for pair in traffic.values()) or 1
    drawn, told = [_HATCH.format("down")], []
    wide = _WIDTH - _LEFT - 90
    for i, (site, (up, down)) in enumerate(traffic.items()):
        y = 6 + i * (_ROW + 6)
        drawn += [
            _name(y + 15, site),
            _box(_LEFT, y, (wide * up / most, 10), "f0"),
            _box(_LEFT, y + 11, (wide * down / most, 10), "edge", "down"),
            _text(_LEFT + wide * up / most + 6, y + 9, f"{mib(up)} MiB", kind="small"),
            _text(_LEFT + wide * down / most + 6, y + 20, f"{mib(down)} MiB", kind="small"),
        ]
        told.append(f"{site}: {mib(up)} MiB from it, {mib(down)} MiB to it")
    words = "; ".join(told)
    keys = (("f0", "", "from the hospital"), ("edge", "down", "to the hospital"))
    height = 6 + len(traffic) * (_ROW + 6)
    return Drawing("What the links carried", words, _keyed(height, words, drawn, keys))


def mib(size: int) -> str:
    """Bytes in MiB, with one digit."""
    return f"{size / 2**20:.1f}"


def duration(seconds: float) -> str:
    """For people: 8.4 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
