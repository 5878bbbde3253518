"""How a job stands, in the words that commands and pages share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def standing(one: Mapping[str, Any]) -> str:
    """A sentence on how a job stands: its step and what is left of it, or why it waits or ended.

    ``one``: see :func:`agent.service.job_runner.show`.
    """
    at = one["progress"]
    if not at["step"]:
        return str(one["reason"])
    part = f", {100 * at['done'] // at['of']} %" if at["of"] else ""
    left = f", about {duration(at['left_s'])} left of this stage" if at["left_s"] is not None else ""
    memory = f", {one['memory_bytes'] / 2**30:.1f} GiB" if one["memory_bytes"] else ""
    return f"{at['step']}: {at['detail']}{part}{left}{memory}".replace(": ,", ",")


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there are two or more."""
    return next((f"{seconds // unit:.0f} {name}" for unit, name in _UNITS if seconds >= 2 * unit), f"{seconds:.0f} s")
