"""The ceremony without pain: from nothing to the first image in at most six typed lines and ten questions a side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.first_image import first_image
from tests.support.terminal import lines_of

pytestmark = pytest.mark.timeout(600)


def test_the_first_image_takes_six_lines_and_ten_questions_a_side(tmp_path: Path) -> None:
    with first_image(tmp_path) as both:
        assert both.patients() == 1
        for side in (both.coordinator, both.hospital):
            assert len(side.lines) <= 6, side.lines
            assert len(side.answered) <= 10, side.answered
        (token,) = {answer for asked, answer in both.hospital.answered if asked == "token"}
        assert token not in "".join(both.hospital.shown), "a secret is typed unseen"
        status = both.coordinator.type("lazaret-coordinator --home hub status", status=1)  # the root lies there still
        assert "ok  sites: site-a" in status
        assert "request" not in status
        both.hospital.type("lazaret-agent --home site doctor")
        assert "ok" in both.hospital.said
        assert (
            lines_of(both.hospital.type("lazaret-agent --home site status", status=1), "images: ") == "there are some"
        )
