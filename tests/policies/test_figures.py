"""What is lost is never written smaller than it is, whatever the number and however many digits are shown."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from decimal import Decimal, localcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.figures import never_less, rounded_down, rounded_up

LOST = st.floats(min_value=1e-12, max_value=1e7, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "places", "told"),
    [
        (4.0000004, None, "4.00001"),
        ("4.0000004", None, "4.00001"),
        ("4.000000000001", None, "4.00001"),  # more digits than a float's printing keeps here
        ("4.0000000000000001", 2, "4.01"),  # a ledger's text is exact: nothing of it is noise
        ("1e-400", None, "1e-400"),
        ("1e-400", 2, "0.01"),
        ("1e400", 2, "1e+400"),
        (1.797e308, None, "1.797e+308"),
        (1.797e308, 2, "1.797e+308"),
        (4.4e-323, None, "4.4466e-323"),  # the float behind it is larger than its own printing
        (1.2345644e-06, None, "1.23457e-06"),
        ("1.2345644e-06", None, "1.23457e-06"),
        (4.000000001, 2, "4.01"),  # one step of the books above 4
        (1234567.2, 2, "1.23457e+06"),
        (1234562.2, 2, "1.23457e+06"),
        (1e-15, 2, "0.01"),
        (0.1 + 0.2, 2, "0.3"),  # what adding up left behind is no loss
        (0.1 + 0.2, None, "0.3"),
        (8.0, None, "8"),
        ("8.0", None, "8"),
        ("4e-06", None, "4e-06"),
        (1e-06, None, "1e-06"),
        (0.0001, None, "0.0001"),
        (100000.0, None, "100000"),
        (1e6, None, "1e+06"),
        (0, 2, "0"),
    ],
)
def test_an_epsilon_or_a_delta_is_rounded_up_and_one_that_fits_is_told_as_it_is(
    value: float | str, places: int | None, told: str
) -> None:
    assert never_less(value, places) == told


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_text_is_less_than_its_number_and_none_is_far_above_it(value: float) -> None:
    told, exact = Decimal(never_less(value)), Decimal(value)
    with localcontext(prec=1200):  # the comparison is exact
        assert told >= exact - abs(exact) * Decimal("1e-12")
        assert told - exact <= Decimal(10) ** (exact.adjusted() - 5), "a unit of the sixth digit"
    assert never_less(never_less(value)) == never_less(value)
    assert f"{float(told):g}" == never_less(value) or abs(value) < 1e-300 or abs(value) > 1e308, "it looks as :g"


@given(st.floats(min_value=0, allow_infinity=False), st.integers(0, 9))
def test_places_never_make_a_number_smaller_however_large_it_is(value: float, places: int) -> None:
    exact = Decimal(value)
    with localcontext(prec=1200):
        assert Decimal(never_less(value, places)) >= exact * (1 - Decimal("1e-12"))
        assert Decimal(never_less(repr(value), places)) >= Decimal(repr(value))
    assert rounded_down(value, places) <= rounded_up(value, places) * (1 + 2.1e-12)


@given(LOST, st.integers(0, 6))
def test_rounding_up_and_down_enclose_the_number_and_leave_alone_what_fits(value: float, places: int) -> None:
    low, high = rounded_down(value, places), rounded_up(value, places)
    assert low <= value * (1 + 2e-12)
    assert high >= value * (1 - 2e-12)
    assert high - low <= 1.01 * 10.0**-places + 1e-9 * value
    fits = round(value, places)
    assert math.isclose(rounded_up(fits, places), fits, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(rounded_down(fits, places), fits, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.parametrize("odd", [math.nan, math.inf, "nan", "inf", "sNaN", "four", "", "1e9999999999999999999"])
def test_what_is_no_number_is_not_written_as_one(odd: float | str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - float() says it in its own words
        never_less(odd)
    if isinstance(odd, float):
        for rounded in (rounded_up, rounded_down):
            with pytest.raises(ValueError, match="finite"):
                rounded(odd, 2)


ROOT = Path(__file__).parents[2]
LOSS = re.compile(r"epsilon|delta|claimed|tight|charged|wanted")  # in the name of what is shown
SAYS = re.compile(r"(?:epsilon|delta|alone|claimed|charges|[εδ])[ =]+$")  # before it
NO_LOSS = (
    "agent/reproduce/",  # tables of papers; the names of their rows are compared
    "policies/accounting.py",  # why a noise is out of reach: nothing is spent
)


def sources(ending: str) -> Iterator[tuple[str, str]]:
    for folder in ("agent", "coordinator", "policies"):
        for path in sorted((ROOT / folder).rglob(f"*.{ending}")):
            if not (name := path.relative_to(ROOT).as_posix()).startswith(NO_LOSS):
                yield name, path.read_text()


def smaller(source: str) -> Iterator[str]:
    """What in this Python may show an epsilon or a delta smaller than it is."""
    for text in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr)):
        before = ""
        for part in text.values:
            if not isinstance(part, ast.FormattedValue):
                before = ast.literal_eval(part)
                continue
            shown, spec = ast.unparse(part.value), ast.unparse(part.format_spec)[2:-1] if part.format_spec else ""
            rounded = shown.startswith(("rounded_up(", "rounded_down(")) and spec == ".2f"  # down: left, or proved
            exact = spec == ".9f"  # the books count in steps of 1e-9
            down = shown.startswith("rounded_down(") and spec == "g"  # what is left may not look larger
            lost = re.fullmatch(r"[,.0-9]*[gfe]", spec) and (LOSS.search(shown) or SAYS.search(before))
            if lost and not (rounded or exact or down):
                yield f"{before[-20:]}{{{shown}:{spec}}}"
            before = ""


def smaller_in_page(source: str) -> list[str]:
    """The same in a template."""
    written = re.compile(r"%[.0-9]*[gfe]\b|\|\s*(?:round|float|string)\b|\bround\(")
    shown = re.findall(r"\{\{.*?\}\}", source, re.DOTALL)
    return [one for one in shown if re.search(r"epsilon|delta|budget", one) and written.search(one)]


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('f"{row.epsilon:.2f}"', True),
        ('f"epsilon {x / 2:.4g} of it"', True),
        ('f"the claim alone {x:.2f}"', True),
        ('f"at delta {d:g}"', True),
        ('f"{rounded_up(epsilon, 7):g}"', True),
        (
            'f"{rounded_up(epsilon, 2):.2f} {rounded_down(left_epsilon, 3):g} {nano_epsilon / 1e9:.9f} {share:.1f}"',
            False,
        ),
        ('f"{never_less(epsilon)} at delta {never_less(delta)}"', False),
    ],
)
def test_the_look_at_the_sources_sees_another_way_of_writing(source: str, seen: bool) -> None:
    assert bool(list(smaller(source))) is seen


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('{{ "%g"|format(b.delta) }}', True),
        ('{{ "%.2f"|format(b.epsilon_spent) }}', True),
        ("{{ epsilon.tight|round(2) }}", True),
        ("{{ b.delta|never_less }} {{ figure(epsilon.tight) }} {{ share|round }}", False),
    ],
)
def test_the_look_at_the_templates_sees_another_way_of_writing(source: str, seen: bool) -> None:
    assert bool(smaller_in_page(source)) is seen


def test_nothing_writes_an_epsilon_or_a_delta_in_another_way() -> None:
    found = [f"{name}: {one}" for name, text in sources("py") for one in smaller(text)]
    found += [f"{name}: {one}" for name, text in sources("html") for one in smaller_in_page(text)]
    assert not found
