from __future__ import annotations

import base64
import io
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agent.domain import Latents
from agent.evaluation.k_selection import Curves, Menu, tune
from agent.reports.html_page import write
from agent.reports.k_selection import render
from tests.support.html_pages import HtmlPage


def curves(probe: bool = True, attributes: bool = True) -> Curves:
    rng = np.random.default_rng(0)
    n = 80
    latents = Latents(rng.normal(size=(n, 4)).astype(np.float32), tuple(f"secretname{i:03d}" for i in range(n)))
    told = {"<age>": [str(i % 2) for i in range(n)], "sex": [str(i % 3) for i in range(n)]} if attributes else None
    distances = np.linspace(0.9, 3.0, n)
    return tune(
        latents,
        [""] * n,
        Menu((2, 4, 6, 8, 10, 200), 4),
        rng,
        told,
        (lambda _: (distances, 1.0)) if probe else None,
    )


def drawings(page: bytes) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(rb"base64,([A-Za-z0-9+/=]+)", page)]


def test_the_page_says_that_it_must_not_leave_and_holds_no_pseudonym() -> None:
    page = render(curves())
    assert b"FOR THIS SITE ONLY" in page
    assert b"secretname" not in page
    assert not any(b"secretname" in drawing for drawing in drawings(page))


def test_the_page_is_one_file_without_a_script_or_an_address() -> None:
    page = render(curves(), np.zeros((3, 8, 8, 3), np.uint8))
    reader = HtmlPage(page)
    policies = [a["content"] for tag, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe", "object", "form", "base"}
    sources = [a.get("src") or "" for _, a in reader.tags if "src" in a]
    assert sources
    assert all(s.startswith("data:image/") for s in sources)
    assert not [a for _, a in reader.tags if "href" in a or any(k.startswith("on") for k in a)]


def test_every_drawing_has_words_for_who_cannot_see_it() -> None:
    reader = HtmlPage(render(curves(), np.zeros((3, 8, 8, 3), np.uint8)))
    alts = [a.get("alt") or "" for tag, a in reader.tags if tag == "img"]
    assert len(alts) == 6
    assert all(len(alt) > 30 for alt in alts)


def test_what_was_not_tried_is_not_drawn() -> None:
    with_all, without = render(curves()), render(curves(probe=False, attributes=False))
    assert len(drawings(with_all)) == 5
    assert len(drawings(without)) == 3
    assert b"not tried" in without


def test_an_attributes_name_cannot_write_markup() -> None:
    page = render(curves())
    assert b"<age>" not in page
    assert b"&lt;age&gt;" in page


def test_the_choice_and_every_refusal_are_told() -> None:
    found = curves()
    text = HtmlPage(render(found)).text
    assert f"k = {found.recommended}" in text
    assert {r.k for r in found.refused} >= {2, 200}
    for refused in found.refused:
        assert f"k = {refused.k}: {refused.reason}" in text


def test_the_drawings_show_something() -> None:
    for drawing in drawings(render(curves())):
        assert drawing.startswith(b"<?xml")
        assert drawing.count(b"<path") > 10


def test_the_contact_sheet_holds_the_representatives_in_their_order() -> None:
    made = np.random.default_rng(0).integers(0, 256, (9, 6, 7, 3)).astype(np.uint8)
    png = next(d for d in drawings(render(curves(), made)) if d.startswith(b"\x89PNG"))
    sheet = np.asarray(Image.open(io.BytesIO(png)))
    assert sheet.shape == (12, 56, 3)
    assert np.array_equal(sheet[:6, 7:14], made[1])
    assert np.array_equal(sheet[6:, :7], made[8])
    assert (sheet[6:, 7:] == 255).all()
    grey = np.zeros((2, 6, 7), np.uint8)
    assert any(d.startswith(b"\x89PNG") for d in drawings(render(curves(), grey)))


def test_the_same_curves_give_the_same_words() -> None:
    one, two = (HtmlPage(render(curves())).text for _ in range(2))
    assert one == two


def test_the_file_is_the_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "k.html"
    write(path, b"page")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write(path, b"other")
    assert path.read_bytes() == b"page"
