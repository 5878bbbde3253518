"""The reviewer's contact sheet: everything to look at, nothing that runs, and whom it shows said on top."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from agent.intervals import Proportion, bounds
from agent.mechanisms.distillation.teacher_student import Review, Tally
from agent.reports.contact_sheet import PATIENTS, PUBLIC, format_odds, overlay, render
from agent.vetting.exhibits import Exhibit
from agent.vetting.filter import REASONS, Power
from tests.support.html_pages import HtmlPage

SIDE = 32


def share(hits: int, of: int) -> Proportion:
    return Proportion(hits / of, *bounds(hits, of))


def picture(seed: int, colour: bool = False) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Something that an eye can tell from the next: a bright ellipse in the dark."""
    dice = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE - 0.5
    a, b, tilt = dice.uniform(0.15, 0.4), dice.uniform(0.1, 0.3), dice.uniform(-1, 1)
    grey = 210 * np.exp(-((((x + tilt * y) / a) ** 2 + (y / b) ** 2) ** 2)) + dice.uniform(0, 30, (SIDE, SIDE))
    shown = np.clip(grey, 0, 255).astype(np.uint8)
    return np.stack([shown, shown // 2, shown // 3], axis=-1) if colour else shown


def exhibit(number: int, probability: float, reason: str = "", colour: bool = False) -> Exhibit:
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    heat = np.exp(-((x - 0.3) ** 2 + (y - 0.6) ** 2) / 0.05).astype(np.float32)
    made, nearest = picture(number, colour), picture(number if reason == "copy" else number + 500, colour)
    return Exhibit(
        made, nearest, probability, 0.3 + number / 100, ("none", "edema", "a<b>")[number % 3], reason, heat
    )


def review(exhibits: Sequence[Exhibit] | None = None) -> Review:
    """Of three conditions, one of them with nothing left."""
    kept = [exhibit(n, p) for n, p in enumerate((0.31, 0.92, 0.001, 0.64))]
    gone = [exhibit(n, p, r) for n, (p, r) in enumerate(((0.999, "verifier"), (0.2, "copy"), (0.97, "patch")), 10)]
    scores = np.random.default_rng(0).normal(-6.0, 4.0, 600)
    scores[:5] = math.nan
    return Review(
        conditions=(
            Tally("none", 200, {"verifier": 9, "copy": 2}, 19, 1),
            Tally("edema", 200, {"verifier": 90, "not a number": 5}, 15, 5),
            Tally("a<b>", 200, {"verifier": 200}, 0, 20),
        ),
        leaving=Tally("", 100, {"verifier": 3, "moved": 1}, 96, 0),
        before=share(31, 600),
        after=share(2, 600),
        power=Power(
            share(690, 700),
            share(650, 700),
            share(640, 700),
            {"exact": share(100, 100), "crop": share(97, 100)},
            None,
        ),
        thresholds={"verifier": 2.5, "unseen": 3.1, "copy": 0.93, "patch": 0.97},
        intervals={"verifier": (0.001, 0.00612), "unseen": (0.002, math.nan)},
        scores=scores,
        alignment=0.612,
        exhibits=tuple(exhibits if exhibits is not None else (*kept, *gone, exhibit(20, math.nan, "not a number"))),
    )


def words(page: bytes) -> str:
    return HtmlPage(page).text


def drawn(page: bytes) -> list[Image.Image]:
    found = re.findall(rb'src="data:image/png;base64,([A-Za-z0-9+/=]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


def test_the_sheet_says_on_top_whose_pictures_it_shows_and_that_it_stays() -> None:
    assert f"FOR THIS SITE ONLY. {PATIENTS}" in words(render(review(), "distill."))
    public = words(render(review(), "distill-dp.", patients=False))
    assert f"FOR THIS SITE ONLY. {PUBLIC}" in public
    assert "nearest patient" not in public


def test_the_sheet_is_one_file_without_a_script_or_an_address() -> None:
    reader = HtmlPage(render(review(), "distill."))
    policies = [a["content"] for _, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe", "object", "form", "base"}
    assert all((a.get("src") or "").startswith("data:image/") for tag, a in reader.tags if tag == "img")
    assert not [a for _, a in reader.tags if "href" in a or any(key.startswith("on") for key in a)]


def test_what_was_kept_comes_first_and_in_both_parts_the_most_alike() -> None:
    page = render(review(), "distill.").decode()
    order = [float(p) for p in re.findall(r"probability (\d\.\d+)", page)]
    assert order == [0.92, 0.64, 0.31, 0.001, 0.999, 0.97, 0.2]
    assert page.index("does any of these show the patient beside it?") < page.index("Dropped, and why")
    assert page.index("probability not known") > page.index("probability 0.2000"), "what has no number comes last"
    assert page.count("<figure class='exhibit kept'>") == 4
    assert page.count("<figure class='exhibit dropped'>") == 4


def test_each_exhibit_is_the_sample_the_nearest_picture_and_where_they_are_alike() -> None:
    one = exhibit(3, 0.5)
    made, nearest, heat = drawn(render(review([one]), "distill."))
    assert np.array_equal(np.asarray(made), one.made), "pixel for pixel"
    assert np.array_equal(np.asarray(nearest), one.nearest)
    expected = overlay(one.made, one.heat)
    assert expected is not None
    assert np.array_equal(np.asarray(heat), expected)
    assert (made.mode, heat.mode) == ("L", "RGB")
    colour = exhibit(3, 0.5, colour=True)
    assert [one.mode for one in drawn(render(review([colour]), "distill."))] == ["RGB"] * 3


def test_the_heat_is_bright_where_it_is_hot_and_leaves_the_rest_as_it_was() -> None:
    made, heat = np.full((4, 4), 100, np.uint8), np.zeros((4, 4), np.float32)
    heat[0, 0] = 1.0
    shown = overlay(made, heat)
    assert shown is not None
    assert (shown[1:] == 100).all()
    assert shown[0, 0, 0] > 180
    for none in (None, np.full((4, 4), np.nan, np.float32), np.zeros((2, 2), np.float32)):
        assert overlay(made, none) is None
    page = render(review([replace(exhibit(1, 0.5), heat=None)]), "distill.")
    assert len(drawn(page)) == 2
    assert "no map" in words(page)


def test_every_count_and_share_of_the_review_is_on_the_page_with_its_interval() -> None:
    told = words(render(review(), "distill, as x.toml has it."))
    assert "distill, as x.toml has it. Of 600 samples of the teacher 294 were kept and 306 dropped;" in told
    assert "the student learned 34 of them. The student's own" in told
    assert "100 drawn, 1 a copy, cropped or turned, 3 too similar to a patient; 96 leave, or stand for" in told
    assert "of the teacher's samples 5.17% (3.66% to 7.24%)" in told
    assert "Re-identified after: of what leaves 0.33% (0.09% to 1.21%)" in told
    assert "caught: all 98.57%" in told
    assert "caught: crop 97.00%" in told
    assert "caught: by the second verifier, which measures 91.43%" in told
    assert "other visits, not counted in all every person has one image" in told
    assert "edema 200 105 0 5 90 15 5" in told, "drawn, kept, by reason, learned, groups left empty"
    assert "The vetting dropped all of a<b>: the student learned no such image." in told
    assert "Threshold: verifier odds of 12.2:1 0.100% to 0.612%" in told
    assert "Threshold: unseen odds of 22.2:1 0.200% to not known" in told
    assert "Threshold: copy correlation 0.93 - Threshold" in told


def test_what_has_an_interval_is_said_to_have_one_and_nothing_else() -> None:
    page = render(review(), "distill.").decode()
    figures, thresholds = page.index("(95 %)"), page.index("reached by chance (95 %)")
    assert figures < page.index("Re-identified before") < page.index("Planted near-duplicates") < thresholds
    assert thresholds < page.index("Threshold: copy") < page.index("Mean alignment")


def test_the_sheet_says_which_pictures_leave_and_that_of_a_model_nothing_is_held_back() -> None:
    told = words(render(review(), "distill."))
    kept, dropped = (
        told.index("images of the student: they leave"),
        told.index("samples of the last teacher."),
    )
    assert told.index("Kept: does any") < kept < told.index("Dropped, and why") < dropped
    model = replace(review(), leaving=Tally("", 100, {"verifier": 4}, 100, 0))
    told = words(render(model, "distill."))
    assert "100 drawn, 4 too similar to a patient; the model leaves, and draws such images again" in told


def test_a_bar_is_as_long_as_the_share_that_was_kept() -> None:
    page = render(review(), "distill.").decode()
    assert re.findall(r"<rect class='kept' width='([\d.]+)'", page) == ["94.50", "52.50", "0.00"]
    assert re.findall(r"<rect class='dropped' x='[\d.]+' width='([\d.]+)'", page) == ["5.50", "47.50", "100.00"]


def test_the_distribution_before_filtering_is_drawn_with_the_threshold_and_told_in_words() -> None:
    shown = review()
    above = int((shown.scores[5:] >= 2.5).sum())
    page = render(shown, "distill.").decode()
    assert f"{above} reach the threshold of 12.2:1, and were dropped for it. 5 could not be checked" in page
    svg = base64.b64decode(re.findall(r"svg\+xml;base64,([A-Za-z0-9+/=]+)", page)[0]).decode()
    assert svg.count("<path") > 20


@pytest.mark.parametrize("scores", [[math.nan] * 3, [0.0], [1e9, -1e9], [math.inf, -math.inf, 0.0], []])
def test_scores_of_any_kind_make_a_page(scores: list[float]) -> None:
    page = render(replace(review(), scores=np.array(scores)), "distill.")
    assert b"svg+xml" in page


@pytest.mark.parametrize("delta", [math.inf, 80.0, -80.0])
def test_a_threshold_beyond_the_drawing_makes_a_page_too(delta: float) -> None:
    shown = review()
    render(replace(shown, thresholds={**shown.thresholds, "verifier": delta}), "distill.")


def test_nothing_kept_or_nothing_dropped_is_said() -> None:
    assert "No sample was kept." in words(render(review([exhibit(1, 0.9, "verifier")]), "distill."))
    assert "Nothing was dropped." in words(render(review([exhibit(1, 0.1)]), "distill."))


def test_a_condition_cannot_write_markup() -> None:
    page = render(review(), "distill <i>.")
    assert b"<b>" not in page
    assert b"<i>" not in page
    assert b"a&lt;b&gt;" in page


def test_every_drawing_has_words_for_who_cannot_see_it() -> None:
    alts = [a.get("alt") or "" for tag, a in HtmlPage(render(review(), "distill.")).tags if tag == "img"]
    assert len(alts) == 1 + 3 * 8
    assert all(len(alt) > 30 for alt in alts)


def test_every_reason_of_the_vetting_has_words() -> None:
    gone = [exhibit(n, 0.5, reason) for n, reason in enumerate(REASONS) if reason]
    told = words(render(review(gone), "distill."))
    for text in ("too similar to a patient", "a copy", "a part is a copy", "a copy, cropped or turned", "not judged"):
        assert f"dropped, {text}" in told


@pytest.mark.parametrize(
    ("log_odds", "told"),
    [(0.0, "even"), (math.log(20), "20:1"), (-math.log(3), "1:3"), (23.03, "10^10.0:1"), (math.nan, "not known")],
)
def test_odds_are_said_as_people_say_them(log_odds: float, told: str) -> None:
    assert format_odds(log_odds) == told
