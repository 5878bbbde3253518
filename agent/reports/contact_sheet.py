"""The contact sheet of a distillation: what the site's reviewer looks at before anything leaves.

It shows samples beside the images that they are most like. Of ``distill`` those are patients' images, so the page
is for this site only, and says so; of ``distill-dp`` they are public ones. It holds no pseudonym.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image as Picture

from agent.intervals import Proportion
from agent.mechanisms.distillation.teacher_student import Review, Tally
from agent.reports.html_page import ACCENT, INK, WARN, block, page_html, plot
from agent.vetting.exhibits import Exhibit
from agent.vetting.filter import Power

_SMALL: Final = 256  # pixels: what is smaller is drawn pixel by pixel, and two exhibits go beside each other
_BINS: Final = 48
_FARTHEST: Final = 40.0  # log-odds: what is farther out is drawn there
_OPAQUE: Final = 0.6  # of the heat, where it is hottest
_WHY: Final = {  # of agent.vetting.filter.REASONS
    "verifier": "too similar to a patient",
    "copy": "a copy",
    "patch": "a part is a copy",
    "moved": "a copy, cropped or turned",
    "not a number": "not judged",
}
_LOG_ODDS: Final = ("verifier", "unseen")  # thresholds; the others are correlations
STYLE: Final = """
.bar{display:block;width:180px;height:14px}.bar .kept{fill:#0b6b73}.bar .dropped{fill:#a32638}
.exhibits{display:grid;gap:18px 26px;grid-template-columns:repeat(auto-fit,minmax(min(100%,900px),1fr))}
.exhibits.small{grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr))}
.exhibit{break-inside:avoid;border:1px solid #d7dfe5;border-left:5px solid #0b6b73;border-radius:6px;padding:10px}
.exhibit.dropped{border-left-color:#a32638}
.three{display:grid;grid-template-columns:repeat(3,1fr);gap:8px}.three p{margin:0;font-size:.8rem;color:#51616e}
.three img{display:block}.small .three img{image-rendering:pixelated}
.exhibit figcaption{margin-top:6px;color:#14212b}
.none{display:grid;place-items:center;aspect-ratio:1;background:#edf2f5;color:#51616e;font-size:.8rem}
td.left,th.left{text-align:left}
@media print{.exhibits.small{grid-template-columns:1fr 1fr}.exhibits{grid-template-columns:1fr}
.ahead{break-after:avoid}.bar,.none{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
PATIENTS: Final = (
    "This page shows images of patients, and is not a release: it must not leave the hospital, in whole or in "
    "part. Delete it once the release is decided on."
)
PUBLIC: Final = (
    "No patient is on this page: its samples come from a model that was trained with noise, and were compared with "
    "public images. Do not pass it on: it is not a release, and nobody has reviewed the samples that were dropped."
)


def render(review: Review, told: str, patients: bool = True) -> bytes:
    """The whole page, UTF-8.

    Args:
        review: of :meth:`agent.mechanisms.distillation.mechanism.Distill.run`.
        told: what was made, in a sentence: mechanism, file.
        patients: the samples were compared with patients' images, and not with public ones.
    """
    other = "patient" if patients else "public image"
    parts = [
        f"<p class='choice'>{html.escape(told)} {html.escape(_counts(review))}</p>",
        _figures(review, patients),
        _conditions(review.conditions),
        block("Similarity of the samples to real images", *_likeness(review, other)),
        *_exhibits(review.exhibits, other),
    ]
    return page_html("Samples beside the most similar real image", PATIENTS if patients else PUBLIC, parts, STYLE)


def kept_of(tally: Tally) -> int:
    """Samples of a condition that nothing was held against."""
    return tally.drawn - sum(tally.dropped.values())


def span(share: Proportion) -> str:
    """A share with its interval."""
    return f"{share.value:.2%} ({share.low:.2%} to {share.high:.2%})"


def _counts(review: Review) -> str:
    drawn, kept = sum(t.drawn for t in review.conditions), sum(map(kept_of, review.conditions))
    learned = sum(t.learned for t in review.conditions)
    return (
        f"Of {drawn} samples of the teacher {kept} were kept and {drawn - kept} dropped; the student learned "
        f"{learned} of them. The student's own images: {left_of(review.leaving)}."
    )


def _figures(review: Review, patients: bool) -> str:
    whose = "of the patients" if patients else "of the public images"
    rows = [
        ("Re-identified before: of the teacher's samples", span(review.before)),
        ("Re-identified after: of what leaves", span(review.after)),
        *((f"Planted near-duplicates {whose}, caught: {name}", text) for name, text in caught(review.power)),
    ]
    note = (
        "Shares with Wilson's 95 % interval. Both re-identification rates are by the second verifier, which chose "
        "nothing. Near-duplicates were planted on purpose: a vetting that misses them may have missed others, and "
        "the fewer were caught, the more closely the images below must be looked at."
    )
    lines = [[html.escape(name), html.escape(value)] for name, value in rows]
    return _table("Figures", ["", "(95 %)"], lines) + f"<p>{html.escape(note)}</p>" + _thresholds(review)


def _thresholds(review: Review) -> str:
    """Where each check says no, and how often it says so of nobody, where that is known with an interval."""
    rows = [
        [f"Threshold: {name}", threshold(name, value), by_chance(review.intervals, name) or "-"]
        for name, value in sorted(review.thresholds.items())
    ]
    rows.append(["Mean alignment of what leaves", number(review.alignment, ".3f"), "-"])
    note = (
        "On the right: of samples that show no patient, the share that reach the threshold by chance, compared with "
        "as many images as here. It was measured on pairs of different people, and holds for samples that differ as "
        "much."
    )
    lines = [[html.escape(cell) for cell in row] for row in rows]
    head = ["", "", "reached by chance (95 %)"]
    return _table("Thresholds, and alignment", head, lines) + f"<p>{html.escape(note)}</p>"


def by_chance(intervals: Mapping[str, tuple[float, float]], name: str) -> str:
    """The 95 % interval of the probability of a false match at a verifier's threshold; "" where there is none."""
    if name not in intervals:
        return ""
    low, high = intervals[name]
    return f"{number(low, '.3%')} to {number(high, '.3%')}"


def left_of(tally: Tally) -> str:
    """What became of the student's own images. Of a model none is taken away: it draws what it draws."""
    gone = "".join(f", {count} {explain_drop(reason)}" for reason, count in sorted(tally.dropped.items()))
    if tally.learned > kept_of(tally):
        return f"{tally.drawn} drawn{gone}; the model leaves, and draws such images again"
    return f"{tally.drawn} drawn{gone}; {tally.learned} leave, or stand for the model that leaves"


def caught(power: Power) -> Iterator[tuple[str, str]]:
    """What of planted near-duplicates was caught: of all, by either verifier alone, of each kind, of other visits."""
    yield "all", span(power.caught)
    yield "by the verifier alone", span(power.verifier)
    yield "by the second verifier, which measures", span(power.unseen)
    for name, share in power.kinds.items():
        yield name, span(share)
    other = "every person has one image" if power.other_visits is None else span(power.other_visits)
    yield "other visits, not counted in all", other


def explain_drop(reason: str) -> str:
    """A reason for dropping, in words."""
    return _WHY.get(reason, reason)


def threshold(name: str, value: float) -> str:
    """A threshold in its unit."""
    return f"odds of {format_odds(value)}" if name in _LOG_ODDS else f"correlation {number(value, '.4g')}"


def number(value: float, form: str) -> str:
    """A figure, or that there is none."""
    return f"{value:{form}}" if math.isfinite(value) else "not known"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Cells are HTML already; the first ``left`` columns begin at the left."""
    sides = [" class='left'" if i < left else "" for i in range(len(head))]
    titles = "".join(f"<th scope='col'{side}>{html.escape(h)}</th>" for side, h in zip(sides, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{side}>{cell}</td>" for side, cell in zip(sides, row, strict=True)) + "</tr>"
        for row in rows
    )
    name = html.escape(title)
    return (
        f'<section><h2>{name}</h2><div class="wide" tabindex="0" role="region" aria-label="{name}">'
        f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _conditions(tallies: tuple[Tally, ...]) -> str:
    reasons = sorted({reason for tally in tallies for reason in tally.dropped})
    head = [
        "condition",
        "kept, dropped",
        "drawn",
        "kept",
        *map(explain_drop, reasons),
        "learned",
        "groups left empty",
    ]
    rows = []
    for tally in tallies:
        kept = kept_of(tally)
        counts = [tally.drawn, kept, *(tally.dropped.get(r, 0) for r in reasons), tally.learned, tally.empty]
        rows.append([html.escape(tally.name), _bar(kept, tally.drawn), *map(str, counts)])
    note = (
        "In the last round. Of each group the best aligned of the samples that were kept is learned; an empty one "
        "is not filled up with what was dropped, so such a condition is learned from fewer samples."
    )
    gone = [tally.name for tally in tallies if not tally.learned]
    if gone:
        note += f" The vetting dropped all of {', '.join(gone)}: the student learned no such image."
    return _table("Conditions", head, rows, left=2) + f"<p>{html.escape(note)}</p>"


def _bar(kept: int, drawn: int) -> str:
    """Kept and dropped side by side, as long as their shares."""
    cut = 100.0 * kept / drawn if drawn else 0.0
    rest = 100.0 - cut if drawn else 0.0
    return (
        f"<svg class='bar' viewBox='0 0 100 8' preserveAspectRatio='none' role='img' "
        f"aria-label='{kept} of {drawn} kept'>"
        f"<rect class='kept' width='{cut:.2f}' height='8'></rect>"
        f"<rect class='dropped' x='{cut:.2f}' width='{rest:.2f}' height='8'></rect></svg>"
    )


def _likeness(review: Review, other: str) -> tuple[Figure, str]:
    """The distribution of the scores before filtering, with the threshold (the paper's Fig. 4, top)."""
    finite = review.scores[~np.isnan(review.scores)]
    delta = review.thresholds["verifier"]
    figure, axes = plot("odds that the sample and the most similar image show one person", "samples", (9.0, 3.4))
    note = _likeness_told(review.scores, delta, other)
    if not len(finite):
        return figure, note
    shown = np.clip(finite, -_FARTHEST, _FARTHEST)
    around = [*shown, *([delta] if abs(delta) <= _FARTHEST else [])]
    low, high = min(around), max(around)
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    below = finite < delta
    labels = ["below the threshold", "not below: dropped"]
    axes.hist([shown[below], shown[~below]], edges.tolist(), stacked=True, color=[ACCENT, WARN], label=labels)
    axes.set_axisbelow(True)
    if abs(delta) <= _FARTHEST:
        axes.axvline(delta, color=INK, linestyle="--", label=f"threshold δ: {format_odds(delta)}")
    _odds_below(axes, float(edges[0]), float(edges[-1]))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure, note


def _likeness_told(scores: NDArray[np.float64], delta: float, other: str) -> str:
    """What is drawn, for who cannot see it."""
    finite = scores[~np.isnan(scores)]
    told = f"Of {len(scores)} samples of the first teacher, each at the {other} that it is most like: "
    if len(finite):
        half, most = (format_odds(float(value)) for value in (np.median(finite), finite.max()))
        told += f"the middle one has odds of {half}, the highest {most}. "
    above = int((~(finite < delta)).sum())
    told += f"{above} reach the threshold of {format_odds(delta)}, and were dropped for it. "
    if len(finite) < len(scores):
        told += f"{len(scores) - len(finite)} could not be checked, and were dropped. "
    return told + (
        "Use the odds to rank samples only: the verifier gives them as if every second image showed that person. "
        "Whether a score is too high is decided by the threshold, which was measured on pairs of different people."
    )


def format_odds(log_odds: float) -> str:
    """Natural log-odds as people say them: "1:120", "even", "35:1"."""
    if math.isnan(log_odds):
        return "not known"
    size = abs(log_odds)
    if size < 0.05:
        return "even"
    power = size / math.log(10.0)
    told = f"10^{power:.1f}" if power > 5 else f"{math.exp(size):.3g}"
    return f"{told}:1" if log_odds > 0 else f"1:{told}"


def _odds_below(axes: Axes, low: float, high: float) -> None:
    """Ticks at powers of ten, six to twelve of them, written as odds."""
    ten = math.log(10.0)
    first, last = math.floor(low / ten), math.ceil(high / ten)
    step = max(1, math.ceil((last - first) / 10))
    powers = [k for k in range(-20, 21) if k % step == 0 and first <= k <= last]
    names = [f"$10^{{{k}}}$:1" if k > 0 else f"1:$10^{{{-k}}}$" if k < 0 else "even" for k in powers]
    axes.set_xticks([k * ten for k in powers], names)


def _exhibits(exhibits: tuple[Exhibit, ...], other: str) -> Iterator[str]:
    """First what was kept, then what was dropped, each from the most alike on."""
    kept = [one for one in exhibits if not one.reason]
    dropped = [one for one in exhibits if one.reason]
    look = f"Kept: does any of these show the {other} beside it?"
    leave = "These are images of the student: they leave, or stand for those that the model draws."
    gone = (
        "These are samples of the last teacher. The student did not learn them, and they do not leave. If a model "
        "leaves, some of these images are its own: it can draw such images again, and nothing holds them back."
    )
    yield side_by_side(look, leave, "No sample was kept.", kept, other)
    yield side_by_side("Dropped, and why", gone, "Nothing was dropped.", dropped, other)


def side_by_side(title: str, whose: str, nothing: str, exhibits: Sequence[Exhibit], other: str) -> str:
    """Exhibits as a part of a page: their title, ``whose`` they are, and each next to its nearest image."""
    head = f"<section class='ahead'><h2>{html.escape(title)}</h2>"
    if not exhibits:
        return f"{head}<p>{html.escape(nothing)}</p></section>"
    told = f"{whose} The {len(exhibits)} that are most alike, of all conditions; the most alike first."
    head += f"<p>{html.escape(told)}</p>"
    ranked = sorted(exhibits, key=lambda one: -one.probability if math.isfinite(one.probability) else math.inf)
    small = " small" if max(ranked[0].made.shape[:2]) < _SMALL else ""
    every = "".join(_exhibit(one, other) for one in ranked)
    return f"{head}</section><div class='exhibits{small}'>{every}</div>"


def _exhibit(one: Exhibit, other: str) -> str:
    """Three images in a row, and what was found."""
    condition = html.escape(one.condition)
    made = _image(one.made, f"A sample made for {one.condition}, as it was drawn")
    beside = _image(one.nearest, f"The {other} that the sample made for {one.condition} is most like")
    heat = overlay(one.made, one.heat)
    words = f"Where the sample made for {one.condition} is like the {other}: the brighter, the more"
    third = "<div class='none'>no map</div>" if heat is None else _image(heat, words)
    found = f"probability {number(one.probability, '.4f')}"
    found += "" if one.alignment is None else f", alignment {number(one.alignment, '.3f')}"
    fate = f"dropped, {html.escape(explain_drop(one.reason))}" if one.reason else "kept"
    return (
        f"<figure class='exhibit {'dropped' if one.reason else 'kept'}'><div class='three'>"
        f"<div><p>made</p>{made}</div><div><p>nearest {other}</p>{beside}</div><div><p>alike where</p>{third}</div>"
        f"</div><figcaption><strong>{condition}</strong>: {fate}; {found}</figcaption></figure>"
    )


def overlay(made: NDArray[np.uint8], heat: NDArray[np.float32] | None) -> NDArray[np.uint8] | None:
    """The sample (h, w[, 3]) in grey under its heat (h, w) in [0, 1], as RGB; None where there is no heat to draw."""
    if heat is None or heat.shape != made.shape[:2] or not np.isfinite(heat).all():
        return None
    grey = made if made.ndim == 2 else made.mean(axis=2)
    part = np.clip(heat, 0.0, 1.0)[..., None]
    colours = mpl.colormaps["inferno"](part[..., 0])[..., :3] * 255.0
    mixed = (1.0 - _OPAQUE * part) * grey[..., None] + _OPAQUE * part * colours
    return np.rint(mixed).astype(np.uint8)


def _image(pixels: NDArray[np.uint8], words: str) -> str:
    out = io.BytesIO()
    Picture.fromarray(pixels).save(out, format="PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(words)}">'
