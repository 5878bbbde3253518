"""How long certificates are still good: the same reading for metrics, doctors and consoles."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from protos.identity import BadCertificate, leaf_of


def end_of(path: Path) -> dt.datetime | None:
    """When the first certificate of a PEM file ends, UTC; None where there is none, or none that can be read."""
    try:
        return leaf_of(path.read_bytes()).not_valid_after_utc
    except (OSError, BadCertificate):
        return None


def days_left(end: dt.datetime, now: dt.datetime) -> float:
    """Days until then; negative afterwards."""
    return (end - now) / dt.timedelta(days=1)
