"""The sheet of ``task preview``: a task's inputs as its network sees them, for the site's reviewer, before a price.

It shows patients, so it is for this site only, and says so; examples have numbers on it and no pseudonym. A flat
picture is drawn pixel by pixel; of a volume three slices. One range of grey values holds for the whole sheet, so that
a wrong window is seen and not stretched away.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Picture

from agent.reports.html_page import page_html, table
from agent.storage.example_pixels import VOLUME_PLACES, ImagePlace

LARGEST: Final = 512  # pixels of a side that are drawn one by one; of larger pictures, means of squares
_LEAST: Final = 256  # pixels of a side on the sheet: smaller ones are drawn with larger squares
_BARS: Final = 32  # of a histogram
_FLAT: Final = 0.75  # share of the values at the two ends of the range that a person is told
_COLOURS: Final = (  # of outlines: told apart by every eye, and on grey (Okabe & Ito 2008)
    (240, 228, 66), (86, 180, 233), (230, 97, 0), (0, 200, 140), (230, 140, 190), (255, 255, 255),
)  # fmt: skip
WARNING: Final = (
    "This page shows images of patients, and is not a release: it must not leave the hospital, in whole or in part. "
    "Delete it once the run is decided on."
)
_LOOK: Final = (
    "Is what the label names in the picture at all, or cut off, or too small to see? Does the label fit?",
    "Does the picture lie the right way round? Letters at its edges say the patient's side: R right, L left, "
    "A front, P back, H head, F feet. Where there are none, the file does not say it.",
    "Are the grey values spread out, or is most of it black or white? All pictures share one range.",
    "Is there a name, a number or a face in the picture?",
)
_OUTLINES: Final = "Does each outline lie on what it names?"
_STYLE: Final = """
body{max-width:1320px}ul.look{margin:6px 0;padding-left:1.2em;max-width:90ch}ul.look li{margin:2px 0}
.cards{display:grid;gap:20px;grid-template-columns:repeat(auto-fill,minmax(min(100%,280px),1fr));margin-top:14px}
.cards.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,600px),1fr))}
.card{break-inside:avoid;border:1px solid #d7dfe5;border-top:5px solid #0b6b73;border-radius:6px;padding:10px 12px}
.card.whole{grid-column:1/-1}.card h3{margin:0 0 8px;font-size:1rem;display:flex;flex-wrap:wrap;gap:4px 8px}
.card h3 .n{color:#51616e;font-weight:400}.word{padding:1px 8px;border-radius:10px;background:#edf2f5;font-size:.9rem}
.word.there{background:#0b6b73;color:#fff}.word.absent{color:#51616e;font-weight:400}
.word.unknown{background:#fff;border:1px dashed #51616e;color:#51616e;font-weight:400}
.word i{display:inline-block;width:.8em;height:.8em;border:1px solid #14212b;margin-right:.4em}
.row,.firsts,.views{display:flex;flex-wrap:wrap;gap:10px 14px;align-items:flex-start}
.firsts{flex:3 1 240px}.views{flex:3 1 300px}.firsts .strip{flex:1 1 200px}.views .strip{flex:1 1 90px}
.three .firsts .strip{flex:1 1 100%}.whole .row>*{flex:1 1 480px}.whole .strip{flex:1 1 100%}
.strip{display:grid;gap:4px 10px;align-items:start;grid-template-columns:minmax(0,1fr)}
.strip>b{grid-column:1/-1;font-size:.8rem;font-weight:600;color:#51616e}
.three .strip{grid-template-columns:repeat(3,minmax(0,1fr))}
.plane{display:grid;grid-template:auto auto auto auto/1em minmax(0,1fr) 1em;align-items:center;justify-items:center}
.plane span{font-size:.85rem;font-weight:700;line-height:1.15;color:#14212b}.plane .t{grid-area:1/2}
.plane .l{grid-area:2/1}.plane .r{grid-area:2/3}.plane .b{grid-area:3/2}.plane p{grid-area:4/1/5/4}
.plane img{grid-area:2/2;display:block;image-rendering:pixelated;background:#000;width:100%}
.plane.bare{grid-template:auto auto/minmax(0,1fr)}.plane.bare img{grid-area:1/1}.plane.bare p{grid-area:2/1}
.plane p{margin:1px 0 0;font-size:.78rem;color:#51616e;text-align:center}
.bars{display:block;width:100%;height:26px;margin-top:10px;background:#edf2f5}.bars path{fill:#51616e}
.card p.values{font-size:.82rem;color:#51616e;margin:2px 0 0;max-width:none}
.card p.odd{color:#a32638;font-weight:600}td:nth-child(2):last-child,th:nth-child(2):last-child{text-align:left}
@media print{.word.there,.word i,.bars{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
_Pixels = NDArray[np.float32]
_Range = tuple[float, float]  # the values that are black and white


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """A flat picture of an input, as it is drawn, and where it lies."""

    title: str  # "axial", "image 2: PA"; "" where there is one only
    pixels: _Pixels  # (h, w) or (h, w, 3)
    mask: NDArray[np.int64] | None  # (h, w), 0: none of the segments
    place: ImagePlace
    shrunk: int  # pixels of the input along a side of one that is drawn


@dataclass(frozen=True, slots=True)
class LabelWord:
    """One thing that the network is to learn of an example, in words."""

    text: str
    state: Literal["there", "absent", "unknown"]
    segment: int = 0  # of a mask: its number, whose colour the outline has; 0: none


@dataclass(frozen=True, slots=True, eq=False)
class PreviewCard:
    """One example on the sheet."""

    number: int
    words: tuple[LabelWord, ...]
    planes: tuple[Plane, ...]
    views: tuple[tuple[Plane, ...], ...]
    ends: tuple[float, float]  # the least and the largest value of the whole input


@dataclass(frozen=True, slots=True, eq=False)
class TaskPreview:
    """All that the sheet says."""

    task: str
    facts: tuple[tuple[str, str], ...]
    told: tuple[str, ...]  # how the sample was drawn, in sentences
    cards: tuple[PreviewCard, ...]
    not_shown: tuple[tuple[int, str], ...]  # number of an example that was drawn, and why it is left out
    left_out: tuple[tuple[str, str, str], ...]  # why, images, patients: of all that is left out without being opened
    title: str = "What the network sees"
    warning: str = WARNING
    look: tuple[str, ...] = _LOOK  # what to look for
    figures: tuple[tuple[str, str], ...] = ()  # of a model: what was measured


# -- an input as flat pictures


def planes_of(
    pixels: _Pixels, mask: NDArray[np.int64] | None, places: Sequence[ImagePlace], *, colour: bool
) -> tuple[Plane, ...]:
    """An input as flat pictures.

    Args:
        pixels: (channels, h, w); or (1, k, h, w), feet to head, front to back, the patient's right to left.
        mask: of the same size without channels, of a segmentation.
        places: one for each image that is in the channels; of a volume none.
        colour: the channels are those of one image.
    Returns:
        One, or one for each image of a study; of a volume three slices, through the middle, or where there is a mask,
        through most of it.
    """
    if pixels.ndim == 4:
        return tuple(_slices(pixels[0], mask))
    if colour:
        return (_plane(places[0].view, pixels.transpose(1, 2, 0), mask, places[0]),)
    found = []
    for number, channel in enumerate(pixels):
        place = places[number] if number < len(places) else ImagePlace()
        said = place.view if number < len(places) else "none"
        title = ": ".join(filter(None, (f"image {number + 1}" if len(pixels) > 1 else "", said)))
        found.append(_plane(title, channel, mask, place))
    return tuple(found)


def _slices(values: _Pixels, mask: NDArray[np.int64] | None) -> Iterable[Plane]:
    for axis, (name, place) in enumerate(VOLUME_PLACES.items()):
        at = values.shape[axis] // 2
        if mask is not None and mask.any():
            at = int((mask > 0).sum(axis=tuple(other for other in range(3) if other != axis)).argmax())
        flat, drawn = np.take(values, at, axis), None if mask is None else np.take(mask, at, axis)
        if axis:  # the head up
            flat, drawn = flat[::-1], None if drawn is None else drawn[::-1]
        yield _plane(f"{name}, {at + 1} of {values.shape[axis]}", flat, drawn, place)


def _plane(title: str, pixels: _Pixels, mask: NDArray[np.int64] | None, place: ImagePlace) -> Plane:
    """At most :data:`LARGEST` pixels along each side, whatever the input has: of squares their mean."""
    times = -(-max(pixels.shape[:2]) // LARGEST)
    if times > 1:
        tall, wide = (side - side % times for side in pixels.shape[:2])
        parts = pixels[:tall, :wide].reshape(tall // times, times, wide // times, times, *pixels.shape[2:])
        pixels = parts.mean(axis=(1, 3), dtype=np.float32)
        mask = None if mask is None else mask[:tall:times, :wide:times]
    return Plane(title, np.array(pixels, np.float32), None if mask is None else mask.copy(), place, times)


# -- the page


def render(preview: TaskPreview) -> bytes:
    """The whole page, UTF-8."""
    grey = _range(preview.cards)
    wide = any(card.views or len(card.planes) > 1 or card.planes[0].mask is not None for card in preview.cards)
    look = [*preview.look, *([_OUTLINES] if any(card.planes[0].mask is not None for card in preview.cards) else [])]
    ends = f"Black is {grey[0]:.4g} or less on every picture, white is {grey[1]:.4g} or more."
    parts = [
        *([table("Figures", ("", "value"), preview.figures)] if preview.figures else []),
        f"<p class='choice'>{html.escape(preview.told[0])}</p>",
        f"<ul class='look'>{''.join(f'<li>{html.escape(line)}</li>' for line in look)}</ul>",
        f"<p>{html.escape(ends)}</p><div class='cards{' wide' if wide else ''}'>",
        *(_card(card, grey) for card in preview.cards),
        "</div>",
    ]
    if preview.not_shown:
        rows = [(f"example {number}", why) for number, why in preview.not_shown]
        parts.append(table("Drawn, and left out as in a round", ("", "why"), rows))
    if preview.left_out:
        head = ("why", "images", "patients")
        parts.append(table("Left out by what is known without opening it", head, preview.left_out))
    about = "".join(f"<p>{html.escape(line)}</p>" for line in preview.told[1:])
    parts += [f"<section><h2>About this sheet</h2>{about}</section>", table("The task", ("", ""), preview.facts)]
    return page_html(f"{preview.title}: {preview.task}", preview.warning, parts, _STYLE)


def _range(cards: Sequence[PreviewCard]) -> _Range:
    """The values that are black and white on the whole sheet: 0 and 1 where no input leaves them."""
    if all(card.ends[0] >= 0.0 and card.ends[1] <= 1.0 for card in cards):
        return 0.0, 1.0
    ends = [np.percentile(plane.pixels, (0.5, 99.5)) for card in cards for plane in card.planes]
    low, high = min(float(one[0]) for one in ends), max(float(one[1]) for one in ends)
    return (low, high) if low < high else (low, low + 1.0)


def _card(card: PreviewCard, grey: _Range) -> str:
    words = "".join(map(_word, card.words))
    masked, several = card.planes[0].mask is not None, len(card.planes) > 1
    firsts = [_strip(f"{card.number}, the input", card.planes, grey, outlined=False)]
    if masked:
        firsts.append(_strip(f"{card.number}, with the outlines", card.planes, grey, outlined=True))
    named = ((f"{card.number}, view {at}", view) for at, view in enumerate(card.views, 1))
    views = "".join(_strip(name, view, grey, outlined=masked) for name, view in named)
    form = f"card{' three' if several else ''}{' whole' if several and views else ''}"
    return (
        f"<figure class='{form}'><h3><span class='n'>{card.number}</span>{words}</h3>"
        f"<div class='row'><div class='firsts'>{''.join(firsts)}</div>"
        f"{views and f'<div class=views>{views}</div>'}</div>{_values(card, grey)}</figure>"
    )


def _word(word: LabelWord) -> str:
    swatch = f"<i style='background:rgb{_colour(word.segment)}'></i>" if word.segment else ""
    return f"<span class='word {word.state}'>{swatch}{html.escape(word.text)}</span>"


def _colour(segment: int) -> tuple[int, int, int]:
    return _COLOURS[(segment - 1) % len(_COLOURS)]


def _strip(title: str, planes: Sequence[Plane], grey: _Range, *, outlined: bool) -> str:
    drawn = "".join(_drawn(plane, grey, f"example {title}: {plane.title}", outlined=outlined) for plane in planes)
    return f"<div class='strip'><b>{html.escape(title.partition(', ')[2])}</b>{drawn}</div>"


def _drawn(plane: Plane, grey: _Range, words: str, *, outlined: bool) -> str:
    """A picture with the patient's sides around it, if they are known."""
    place, data = plane.place, _png(plane, grey, outlined=outlined)
    image = f"<img src='data:image/png;base64,{data}' alt='{html.escape(words, quote=True)}'>"
    sides = (("t", place.top), ("l", place.left), ("r", place.right), ("b", place.bottom))
    marks = "".join(f"<span class='{at}'>{html.escape(side)}</span>" for at, side in sides if side)
    title = ", ".join(filter(None, (plane.title, f"drawn at 1/{plane.shrunk}" if plane.shrunk > 1 else "")))
    note = f"<p>{html.escape(title)}</p>" if title else ""
    return f"<div class='plane{'' if marks else ' bare'}'>{marks}{image}{note}</div>"


def _png(plane: Plane, grey: _Range, *, outlined: bool) -> str:
    """As PNG in base64: grey or colour, the outlines in colours."""
    low, high = grey
    values = np.rint(np.clip((plane.pixels - low) / (high - low), 0.0, 1.0) * 255.0).astype(np.uint8)
    if outlined and plane.mask is not None:
        times = max(1, -(-_LEAST // max(values.shape[:2])))
        values = values.repeat(times, 0).repeat(times, 1)
        values = values if values.ndim == 3 else np.repeat(values[..., None], 3, axis=2)
        mask = plane.mask.repeat(times, 0).repeat(times, 1)
        edge = _outline(mask, 2 if times > 1 else 1)
        for segment in np.unique(mask[edge]):
            values[edge & (mask == segment)] = _colour(int(segment))
    out = io.BytesIO()
    Picture.fromarray(values).save(out, format="PNG")
    return base64.b64encode(out.getvalue()).decode()


def _outline(mask: NDArray[np.int64], width: int) -> NDArray[np.bool_]:
    """(h, w): the pixels of segments that have another segment, or none, within ``width`` pixels."""
    padded, found = np.pad(mask, width, mode="edge"), np.zeros(mask.shape, np.bool_)
    for down in range(-width, width + 1):
        for right in range(-width, width + 1):
            top, left = width + down, width + right
            found |= padded[top : top + mask.shape[0], left : left + mask.shape[1]] != mask
    return found & (mask > 0)


def _values(card: PreviewCard, grey: _Range) -> str:
    """A histogram of what is drawn, and what to think of it in words."""
    low, high = grey
    values = np.concatenate([plane.pixels.ravel() for plane in card.planes])
    black, white = float((values <= low).mean()), float((values >= high).mean())
    told = f"values {card.ends[0]:.3g} to {card.ends[1]:.3g}; {black:.0%} black, {white:.0%} white"
    counts = np.histogram(np.clip(values, low, high), _BARS, (low, high))[0]
    tall = np.sqrt(counts / counts.max()) * 10.0  # so that small counts are seen beside a large one
    bars = "".join(f"M{at} 10v-{height:.1f}h.9v{height:.1f}z" for at, height in enumerate(tall) if height > 0)
    odd = " odd" if black + white > _FLAT else ""
    note = f"{told}: is the window right?" if odd else told
    return (
        f"<svg class='bars' viewBox='0 0 {_BARS} 10' preserveAspectRatio='none' role='img' "
        f"aria-label='{html.escape(told)}'><path d='{bars}'></path></svg>"
        f"<p class='values{odd}'>{html.escape(note)}</p>"
    )
