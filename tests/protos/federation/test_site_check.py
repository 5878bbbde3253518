from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from protos.federation.site_check import NOTES, WRONG, SiteCheck, SiteCheckError

GOOD = SiteCheck("0.1.0", "approved", "cpu", 12.5, 5e5, ("accelerator",))


def test_a_report_comes_back_as_it_was() -> None:
    assert SiteCheck.of_bytes(GOOD.to_bytes()) == GOOD


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "patient 4711"},
        {"plan": "soon"},
        {"device": "a name"},
        {"seconds": -1.0},
        {"seconds": "12"},
        {"rate": 1e13},
        {"seconds": int("1" + "0" * 400)},
        {"wrong": ["patient 4711"]},
        {"wrong": ["disk", "disk"]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_site_cannot_say_anything_else(wrong: dict[str, Any]) -> None:
    with pytest.raises(SiteCheckError):
        SiteCheck.of_bytes(json.dumps({**asdict(GOOD), **wrong}).encode())


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"{}", b'{"seconds": NaN}', b"x" * (1 << 15)])
def test_what_is_no_report_is_refused(raw: bytes) -> None:
    with pytest.raises(SiteCheckError):
        SiteCheck.of_bytes(raw)


def test_whatever_is_wrong_but_notes_speaks_against_a_part() -> None:
    assert GOOD.could
    assert not replace(GOOD, plan="refused").could
    for code in WRONG.keys() - NOTES:
        assert not replace(GOOD, wrong=(code,)).could
