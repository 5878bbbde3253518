"""Format an epsilon, a delta or a share: a loss is never rounded down. Pure.

Every table, page, report and message writes an epsilon by :func:`epsilon_text`, so that the same one reads the same
wherever it stands; what is left, or proved, by :func:`epsilon_at_least`. JSON for machines and the sealed texts that
persons sign hold it exactly.

``:g`` alone keeps six digits and takes the nearest: a delta of 1.2345644e-06 would read 1.23456e-06, and a limit of
4.0000004 would read 4. All of it is decimal arithmetic: a float
that is scaled, rounded and printed again can come out smaller, or as infinity.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Final

_DIGITS: Final = 6  # as many as ``:g`` shows
_PLACES: Final = 2  # of an epsilon, behind the point
_NOISE: Final = Decimal("1e-12")  # of the value: what sums of floats add; the ledger itself counts in steps of 1e-9
_SMALL: Final = -4  # powers of ten below it are written with an exponent, as ``:g`` does
_EXACT: Final = 40  # digits that are worked with


def rounded_up(value: float, places: int) -> float:
    """Rounded up, so that nothing spent looks smaller than it is: a little is never nothing.

    Raises:
        ValueError: it is no finite number.
    """
    return float(_fitted(_quiet(value, ROUND_CEILING), places, ROUND_CEILING))


def rounded_down(value: float, places: int) -> float:
    """Rounded down, so that nothing promised looks larger than it is.

    Raises:
        ValueError: it is no finite number.
    """
    return float(_fitted(_quiet(value, ROUND_FLOOR), places, ROUND_FLOOR))


def epsilon_text(value: float | str) -> str:
    """An epsilon, rounded up: two places behind the point; below 0.1 two digits that are not zero; at most six.

    Args:
        value: the number, or its decimal text as a ledger keeps it: exact, so nothing of it is noise.
    Raises:
        ValueError: it is no finite number.
    """
    return _written(value, ROUND_CEILING, _PLACES)


def epsilon_at_least(value: float | str) -> str:
    """What is left of an epsilon, or proved of one: like :func:`epsilon_text`, and rounded down.

    Raises:
        ValueError: it is no finite number.
    """
    return _written(value, ROUND_FLOOR, _PLACES)


def format_rounded_up(value: float | str) -> str:
    """A delta as text of at most six digits, rounded up.

    Args:
        value: the number, or its decimal text as a ledger keeps it: exact, so nothing of it is noise.
    Raises:
        ValueError: it is no finite number.
    """
    return _written(value, ROUND_CEILING, None)


def _written(value: float | str, rounding: str, places: int | None) -> str:
    try:
        number = Decimal(value) if isinstance(value, str | int) else _quiet(value, rounding)
        if not number.is_finite():
            raise ValueError("an epsilon or a delta is a finite number")
        if places is not None and number:
            number = _fitted(number, max(places, places - 1 - number.adjusted()), rounding)
        return _text(Context(prec=_DIGITS, rounding=rounding).plus(number))
    except ArithmeticError:
        raise ValueError("an epsilon or a delta is a number") from None


def _quiet(value: float, rounding: str) -> Decimal:
    """A float's own value, without what adding up may have left in it."""
    if not math.isfinite(value):
        raise ValueError("an epsilon or a delta is a finite number")
    exact, context = Decimal(float(value)), Context(prec=_EXACT, rounding=rounding)
    noise = context.multiply(abs(exact), _NOISE)
    return context.subtract(exact, noise) if rounding == ROUND_CEILING else context.add(exact, noise)


def _fitted(number: Decimal, places: int, rounding: str) -> Decimal:
    """With so many digits behind the point."""
    _, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int) or exponent >= -places:
        return number  # no digit lies behind them
    return number.quantize(Decimal(1).scaleb(-places), context=Context(prec=len(digits) + 1, rounding=rounding))


def _text(number: Decimal) -> str:
    """The digits of a decimal as ``:g`` shows them, and all of them: no zeros behind, its exponents."""
    if not number:
        return "0"
    number = number.normalize()
    power = number.adjusted()
    if _SMALL <= power < _DIGITS:
        return f"{number:f}"
    return f"{number.scaleb(-power):f}e{power:+03d}"
