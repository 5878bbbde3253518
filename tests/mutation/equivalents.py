"""Mutants that no test can kill, because they decide nothing else; each by its whole name, with the reason.

One that is killed, or that the code no longer has, is an error of the run: the list stays as short as it is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_FALSE: Final = "what it gives is only asked whether it is true, and None is not, like False"
_NEGATIVE: Final = "an account of negative order is refused whatever its kind: `sane` is false for it"

EQUIVALENT: Final[Mapping[str, str]] = {
    "state _says: return False -> return None": _FALSE,
    "state _says: return False -> pass": _FALSE,
    "rules review_reservation: findings or account is None -> findings": (
        "without an account there is a finding already; the words are for the type checker"
    ),
    "rules _place: isinstance(claim, DistributedGaussian) and assumption(claim) and (not claim.steps + looks <= "
    "statement.round) -> assumption(claim) and (not claim.steps + looks <= statement.round)": (
        "no other claim takes anything for granted; the words are for the type checker"
    ),
    "rules _within: return False -> return None": _FALSE,
    "rules _within: return False -> return None #2": _FALSE,
    "rules _covered: granted is not None and _within(claim, granted) -> _within(claim, granted)": (
        "nothing is within a grant that cannot be read; the words are for the type checker"
    ),
    "rules _within: not isinstance(steps, Stepwise) or not isinstance(of, Stepwise) -> "
    "not isinstance(of, Stepwise)": (
        "what is made in rounds claims nothing else, or the review has ended; the words are for the type checker"
    ),
    "rules _payable: opened.order == 0 -> opened.order <= 0": _NEGATIVE,
    "rules _shortage: opened.order == 0 -> opened.order <= 0": _NEGATIVE,
    "rules _ceiling: account.opened.order == 0 -> account.opened.order <= 0": _NEGATIVE,
    "rules _payable: sane = False -> pass": "it is false already: the order here is at least 2, not 0",
    "rules _granted: return None -> pass": "the same at the end of a function",
    "rules _vetted: level == 'C' -> level >= 'C'": "there is no level above C",
    "rules review: findings += [*_covered(release, grant, account), *_epsilon(release, account, policy)] -> "
    "findings = [*_covered(release, grant, account), *_epsilon(release, account, policy)]": (
        "there are no findings so far: with any, the review has ended"
    ),
}
