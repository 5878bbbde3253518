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

from policies.accounting.rounding import epsilon_at_least, epsilon_text, format_rounded_up, rounded_down, rounded_up

LOST = st.floats(min_value=1e-12, max_value=1e7, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (4.0000004, "4.01"),
        ("4.0000004", "4.01"),
        ("4.0000000000000001", "4.01"),  # a ledger's text is exact: nothing of it is noise
        (4.000000001, "4.01"),  # one step of the books above 4
        (0.1 + 0.2, "0.3"),  # what adding up left behind is no loss
        (7.934, "7.94"),
        (7.93, "7.93"),
        (8.0, "8"),
        ("8.0", "8"),
        (0.3047, "0.31"),
        (0.0996, "0.1"),
        (0.0347, "0.035"),  # not 0.04: a small one keeps two digits
        (0.00041, "0.00041"),
        ("1e-400", "1e-400"),
        (1234567.2, "1.23457e+06"),
        ("1e400", "1e+400"),
        (1.797e308, "1.797e+308"),
        (0, "0"),
    ],
)
def test_an_epsilon_is_rounded_up_to_two_places(value: float | str, told: str) -> None:
    assert epsilon_text(value) == told


@pytest.mark.parametrize(
    ("value", "told"), [(7.939, "7.93"), (8.0, "8"), (0.0347, "0.034"), (0.1 + 0.2, "0.3"), ("3.999999999", "3.99")]
)
def test_what_is_left_or_proved_is_rounded_down(value: float | str, told: str) -> None:
    assert epsilon_at_least(value) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (4.0000004, "4.00001"),
        ("4.0000004", "4.00001"),
        ("4.000000000001", "4.00001"),  # more digits than a float's printing keeps here
        ("1e-400", "1e-400"),
        (1.797e308, "1.797e+308"),
        (4.4e-323, "4.4466e-323"),  # the float behind it is larger than its own printing
        (1.2345644e-06, "1.23457e-06"),
        ("1.2345644e-06", "1.23457e-06"),
        (1234562.2, "1.23457e+06"),
        (0.1 + 0.2, "0.3"),
        (8.0, "8"),
        ("4e-06", "4e-06"),
        (1e-06, "1e-06"),
        (0.0001, "0.0001"),
        (100000.0, "100000"),
        (1e6, "1e+06"),
    ],
)
def test_a_delta_is_rounded_up_and_one_that_fits_is_told_as_it_is(value: float | str, told: str) -> None:
    assert format_rounded_up(value) == told


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_text_is_less_than_its_number_and_none_is_far_above_it(value: float) -> None:
    told, exact = Decimal(format_rounded_up(value)), Decimal(value)
    with localcontext(prec=1200):  # the comparison is exact
        assert told >= exact - abs(exact) * Decimal("1e-12")
        assert told - exact <= Decimal(10) ** (exact.adjusted() - 5), "a unit of the sixth digit"
    assert format_rounded_up(format_rounded_up(value)) == format_rounded_up(value)
    assert f"{float(told):g}" == format_rounded_up(value) or abs(value) < 1e-300 or abs(value) > 1e308, (
        "it looks as :g"
    )


@given(st.floats(min_value=0, allow_infinity=False))
def test_an_epsilon_is_between_what_it_is_told_to_be_at_least_and_at_most(value: float) -> None:
    exact = Decimal(value)
    step = max(Decimal(10) ** min(-2, exact.adjusted() - 1), Decimal(10) ** (exact.adjusted() - 5)) if exact else 0
    with localcontext(prec=1200):
        low, high = Decimal(epsilon_at_least(value)), Decimal(epsilon_text(value))
        assert low <= exact * (1 + Decimal("1e-12"))
        assert high >= exact * (1 - Decimal("1e-12"))
        assert high - exact <= step
        assert exact - low <= step + exact * Decimal("1e-12")
        assert Decimal(epsilon_text(repr(value))) >= Decimal(repr(value))
    assert epsilon_text(epsilon_text(value)) == epsilon_text(value)


@given(st.floats(min_value=0, allow_infinity=False), st.integers(0, 9))
def test_places_never_make_a_number_smaller_however_large_it_is(value: float, places: int) -> None:
    assert rounded_up(value, places) >= value * (1 - 2.1e-12)
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
    for written in (format_rounded_up, epsilon_text, epsilon_at_least):
        with pytest.raises(ValueError):  # noqa: PT011 - float() says it in its own words
            written(odd)
    if isinstance(odd, float):
        for rounded in (rounded_up, rounded_down):
            with pytest.raises(ValueError, match="finite"):
                rounded(odd, 2)


ROOT = Path(__file__).parents[3]
EPSILON = re.compile(r"epsilon|claimed|tight|charged|alone", re.IGNORECASE)  # in the name of what is shown
SAYS = re.compile(r"(?:epsilon|ε)(?: (?:is|of|takes|charges|to))?[ =:]*$", re.IGNORECASE)  # before it
DELTA = re.compile(r"delta", re.IGNORECASE)
SAYS_DELTA = re.compile(r"(?:delta|δ)[ =:]*$", re.IGNORECASE)
NOT_SHOWN = (
    "policies/accounting/rounding.py",  # the functions themselves
    "protos/v1/",  # generated
)
EXACT = "the exact text, beside the words that persons sign: they compare it"
NO_LOSS = "no epsilon, but a part of what is said of one"
KEY = "in the name under which an experiment keeps its numbers: nobody reads it"
EXCEPTIONS = {
    ("coordinator/cli/simulate.py", "'best site alone':>18"): "text of a price, by epsilon_text",
    ("coordinator/cli/simulate.py", "'each site alone':>18"): "text of a price, by epsilon_text",
    ("coordinator/cli/simulate.py", "'epsilon ' + row['epsilon']"): "text of a price, by epsilon_text",
    (
        "coordinator/cli/simulate.py",
        "'epsilon ' + row['epsilon']:22",
    ): "text of a price, by epsilon_text",
    ("coordinator/cli/simulate.py", "row['epsilon']"): "text of a price, by epsilon_text",
    ("coordinator/cli/simulate.py", "seen.epsilon"): "text of a price, by epsilon_text",
    ("coordinator/cli/simulate.py", "t.epsilon"): "text of a price, by epsilon_text",
    ("coordinator/reports/simulation_plots.py", "epsilon"): "text of a price, by epsilon_text",
    ("coordinator/reports/overview.py", "alone"): "how many releases are of one hospital",
    ("coordinator/reports/overview.py", "head['with_epsilon']"): "how many releases an epsilon covers",
    ("coordinator/reports/overview.py", "format_rounded_up(epsilon['order'])"): "the order of the filter",
    ("agent/privacy_audit/canaries.py", "MOST_CLAIMED:g"): "a constant of the program",
    ("agent/mechanisms/centroids/mechanism.py", "TIGHT_LIMIT:g"): "a constant of the program",
    ("policies/accounting/accountant.py", "TIGHT_LIMIT"): "a constant of the program",
    ("coordinator/federation/job.py", "MOST_EPSILON:g"): "a constant of the program",
    ("deploy/reproduction/distillation.py", "d:g"): "a verifier's threshold: no delta of a claim",
    ("deploy/reproduction/privimage_experiment.py", "release.epsilon:g"): KEY,
    ("deploy/reproduction/privimage_experiment.py", "self.epsilon:g"): KEY,
    ("deploy/reproduction/privimage.py", "epsilon:g"): "the paper's own round epsilon, by which a column is named",
    (
        "agent/models/diffusion/stable_diffusion.py",
        "str(told.get('prediction_type', 'epsilon'))",
    ): "the kind of a network, no loss",
    ("coordinator/console/proposals.py", "value"): EXACT,
    ("coordinator/console/proposals.py", "known.epsilon"): EXACT,
    ("policies/audit/auditor.py", "entry.epsilon or entry.limit"): EXACT,
    ("policies/governance/cli.py", "epsilon or limit"): EXACT,
    ("policies/governance/decisions.py", "repr(epsilon)"): "what an entry holds",
    ("policies/ledger/state.py", "repr(epsilon)"): "what an entry holds",
    ("policies/ledger_service.py", "repr(policy.epsilon)"): "what an entry holds",
    (
        "policies/audit/certificate_check.py",
        "e['value']",
    ): "all nine digits, as the certificate that is checked has them",
    (
        "policies/review/rules.py",
        "release.epsilon_nano / 1000000000.0:.9f",
    ): "in steps of the books: two that differ there",
    (
        "deploy/demo/eyes.py",
        "_CENTROIDS.format(patients=SCREENING, epsilon=EPSILON, delta=DELTA, share=COUNT_SHARE)",
    ): "a configuration for the program to read",
    ("coordinator/reports/report_inputs.py", "per(epsilon)"): NO_LOSS,
    ("coordinator/reports/report_inputs.py", "per(item.dearest['epsilon'])"): NO_LOSS,
    ("coordinator/reports/report_inputs.py", "epsilon['order']"): NO_LOSS,
    ("coordinator/reports/report_inputs.py", "epsilon['grants']"): NO_LOSS,
    ("coordinator/reports/model_cards.py", "together(p['epsilon'])"): NO_LOSS,
    ("coordinator/reports/certificates.py", "together(epsilon)"): NO_LOSS,
    ("coordinator/reports/dp_registry.py", "str(epsilon['unit']).capitalize()"): NO_LOSS,
    ("coordinator/reports/dp_registry.py", "str(epsilon['unit'])"): NO_LOSS,
    ("coordinator/reports/dp_registry.py", "epsilon['unit']"): NO_LOSS,
    ("coordinator/reports/dp_registry.py", "epsilon['order']"): NO_LOSS,
}
FORMATTING = frozenset(
    {"format_rounded_up", "rounded_up", "rounded_down", "round", "str", "repr", "format", "add_row"}
)
ONE = ("epsilon_text(", "epsilon_at_least(")


def sources(ending: str) -> Iterator[tuple[str, str]]:
    for folder in ("agent", "coordinator", "policies", "protos", "deploy"):
        for path in sorted((ROOT / folder).rglob(f"*.{ending}")):
            if not (name := path.relative_to(ROOT).as_posix()).startswith(NOT_SHOWN):
                yield name, path.read_text()


def _shown(part: ast.FormattedValue) -> tuple[str, str]:
    spec = ast.unparse(part.format_spec)[2:-1] if part.format_spec else ""
    return ast.unparse(part.value), spec


def _pieces(text: ast.JoinedStr) -> Iterator[tuple[str, str, str]]:
    """What stands before each value of an f-string, the value, and how it is formatted."""
    before = ""
    for part in text.values:
        if isinstance(part, ast.FormattedValue):
            yield before, *_shown(part)
            before = ""
        else:
            before = str(ast.literal_eval(part))


def _odd_call(call: ast.Call) -> bool:
    """A call that makes a text or a rounded number of an epsilon, and is not the one that should."""
    name = ast.unparse(call.func).rpartition(".")[2]
    given = [ast.unparse(a) for a in (*call.args, *(k.value for k in call.keywords))]
    lost = [one for one in given if EPSILON.search(one) and not DELTA.search(one) and not any(f in one for f in ONE)]
    return name in FORMATTING and bool(lost)


def other_ways(source: str) -> Iterator[str]:
    """How else this Python writes an epsilon, or a delta so that it could look smaller than it is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for before, shown, spec in _pieces(node):
                delta = (DELTA.search(shown) and not shown.startswith("epsilon")) or SAYS_DELTA.search(before)
                if delta and re.fullmatch(r"[,.0-9]*[gfe]", spec):
                    yield f"{shown}:{spec}"
                lost = not delta and (EPSILON.search(shown) or SAYS.search(before))
                if lost and (spec or not shown.startswith(ONE)):
                    yield f"{shown}:{spec}" if spec else shown
        elif isinstance(node, ast.Call) and _odd_call(node):
            yield ast.unparse(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            right, said = ast.unparse(node.right), node.left.value
            percent = isinstance(node.op, ast.Mod) and EPSILON.search(right)
            joined = isinstance(node.op, ast.Add) and SAYS.search(said)
            if (percent or joined) and not right.startswith(ONE):
                yield ast.unparse(node)


def other_ways_in_page(source: str) -> list[str]:
    """The same in a template: a text that was made in Python stands as it is, a number goes through one function."""
    written = re.compile(r"%[.0-9]*[gfe]\b|\|\s*(?:round|float|string|format|format_rounded_up)\b|\bround\(")
    shown = re.findall(r"\{\{.*?\}\}", source, re.DOTALL)
    told = [(one, re.sub(r"\bepsilon\.(?:delta|order)\b|\bdelta\b", "", one)) for one in shown]
    lost = [one for one, rest in told if re.search(r"epsilon|budget", rest) and written.search(one)]
    return lost + [one for one in shown if "delta" in one and re.search(r"%[.0-9]*[gfe]\b|\bround\b", one)]


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('f"{row.epsilon:.2f}"', True),
        ('f"{row.epsilon}"', True),
        ('f"epsilon {x / 2:.4g} of it"', True),
        ('f"epsilon {x}"', True),
        ('f"ε = {x:.2f}"', True),
        ('f"the claim alone {alone:.2f}"', True),
        ('f"at delta {d:g}"', True),
        ('f"{rounded_up(epsilon, 7):g}"', True),
        ('f"epsilon {format_rounded_up(epsilon)}"', True),
        ('f"{epsilon_text(epsilon):>9}"', True),
        ("format_rounded_up(row.epsilon, 2)", True),
        ("str(epsilon)", True),
        ("round(row.epsilon, 2)", True),
        ("table.add_row(row.site, row.epsilon)", True),
        ('"epsilon %.2f" % epsilon', True),
        ('"epsilon {}".format(epsilon)', True),
        ('"epsilon " + text', True),
        ('f"{epsilon_text(epsilon)} at delta {format_rounded_up(delta)}, {share:.1f} % of it"', False),
        ('f"left {epsilon_at_least(left_epsilon)}"', False),
        ('"epsilon " + epsilon_text(epsilon)', False),
        ("str(epsilon_text(epsilon))", False),
    ],
)
def test_the_look_at_the_sources_sees_another_way_of_writing(source: str, seen: bool) -> None:
    assert bool(list(other_ways(source))) is seen


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ('{{ "%g"|format(b.delta) }}', True),
        ('{{ "%.2f"|format(b.epsilon_spent) }}', True),
        ("{{ epsilon.tight|round(2) }}", True),
        ("{{ plot.budget.epsilon|format_rounded_up }}", True),
        ("{{ b.delta|format_rounded_up }} {{ epsilon.delta|format_rounded_up }} {{ epsilon_text(epsilon.tight) }} "
         "{{ part|round }}", False),
    ],
)  # fmt: skip
def test_the_look_at_the_templates_sees_another_way_of_writing(source: str, seen: bool) -> None:
    assert bool(other_ways_in_page(source)) is seen


def test_nothing_writes_an_epsilon_in_another_way() -> None:
    found = {(name, one) for name, text in sources("py") for one in other_ways(text)}
    found |= {(name, one) for name, text in sources("html") for one in other_ways_in_page(text)}
    assert found - set(EXCEPTIONS) == set()
    assert set(EXCEPTIONS) - found == set(), "an exception that nothing needs any longer"
