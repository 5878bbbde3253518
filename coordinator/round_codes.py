"""The codes of a run's rounds in words: why a site is not in one, why a run waits or has ended, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from coordinator.explanations import RULES, explain

_SAME: Final = "Bring both sides to the same version."
_SITE: Final = "See the agent's log at the site."
_BESIDE: Final = "See beside each hospital why."
# codes of a round that are no rules of a review: why, and what to do
_CODES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "offline": ("The hospital's agent was not connected.", "Nothing, if it comes back. Otherwise call the site."),
        "no_reply": (
            "The hospital's agent was asked and did not answer in time.",
            "See the agent's log at the site.",
        ),
        "internal": ("Something failed at the hospital, or here.", "See the log of that side."),
        "bundle": ("The agent found another bundle than the one it knows.", _SAME),
        "message_type": ("The agent received an unknown request.", "Bring both sides to the same version."),
        "no_canary": (
            "The agent is of a version that knows no canary, or could not read the message.",
            "Upgrade it. `round check` without --canary asks it, too.",
        ),
        "policy": ("The hospital's own policy forbids it.", "Change the job, or agree on another policy."),
        "mechanism": (
            "The agent does not know this method or its settings.",
            "Bring both sides to the same version.",
        ),
        "unavailable": ("The hospital cannot take part. It gives no reason, by design.", "Ask the site's IT."),
        "schema": ("The answer was not of the agreed form.", _SAME),
        "not_finite": ("The update contained a value that is not a number.", "Train with a smaller learning rate."),
        "size": ("The update had another length than the model.", _SAME),
        "wrong_source": ("The answer came from another hospital than was asked.", "Treat it as an attack."),
        "another_round": ("The update was made for another round.", "Nothing: the next round asks again."),
        "not_selected": ("The strategy left the update out: too far from the others.", "Nothing, if once."),
        "failed": ("The hospital's agent failed in an unknown way.", _SITE),
        "behind": (
            "A later round of this run has left the hospital: this coordinator came back from a backup of before it. "
            "No round is trained twice.",
            "Launch the job under another name; it has a price of its own.",
        ),
        "too_few_sites_online": (
            "Too few hospitals were connected.",
            "The coordinator tries for two hours, then stops the run.",
        ),
        "too_few_updates": ("Too few updates could be used.", _BESIDE),
        "required_site_missing": (
            "A hospital that the job requires is not there.",
            "See beside it why. The coordinator tries for two hours, then stops the run.",
        ),
        "required_site_lost": (
            "A hospital that the job requires left in the middle of a masked sum, which is not begun again.",
            "Launch the job under another name.",
        ),
        "too_few_grants": (
            "Too few hospitals had the budget, or agreed to take part.",
            "See beside each hospital why.",
        ),
        "no_aggregate": ("The updates could not be combined to a sound model.", "Choose another strategy."),
        "not_unmasked": ("The masked sum could not be opened: too many hospitals left.", "Launch it again."),
        "run_process_lost": ("The process of the run ended; another one continues.", "Nothing."),
        "storage": ("The coordinator could not write to its disk.", "Free some space, then resume the run."),
        "by an operator": ("It was stopped by a person.", "Resume it when you are ready."),
        "waiting": (
            "Persons at the hospital have not approved the run.",
            "Ask them. They have the days that the job gives.",
        ),
        "not_approved_yet": (
            "Persons at a hospital have not approved the run yet.",
            "Wait, or ask them. After the job's days the run begins without that hospital.",
        ),
        "not_granted": (
            "The coordinator's ledger holds no budget of this hospital for the run.",
            "If it was refused, see the rule under Refusals.",
        ),
        "stopped": ("The coordinator was stopped.", "The run goes on when it is started again."),
        "resume it with `round resume`": ("It was stopped.", "Resume it when you are ready."),
    }
)


def explain_code(code: str) -> tuple[str, str]:
    """A code of a round in words, and what to do; an unknown one is named as it is."""
    known = _CODES.get(code)
    if known is None and code not in RULES and not code:
        return "", ""
    return known or explain(code)
