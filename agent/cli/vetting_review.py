"""What is shown of a vetting of representatives before anything leaves: figures, and the reviewer's page.

Representatives are compared with the patients who have comparable images
(:func:`agent.release.vetting_statement.compared`). The shares are shares of clusters.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.errors import SiteStorageError
from agent.release.cluster_vetting import VettingRequest
from agent.release.vetting_statement import VettingReport
from agent.reports.contact_sheet import by_chance, caught, explain_drop, span, threshold
from agent.reports.html_page import write
from agent.reports.vetting import labels, render
from agent.vetting.filter import Power
from agent.vetting.reference import Vetting


@dataclass(frozen=True, slots=True)
class VettingOutput:
    """How it is said, and where the page goes."""

    mechanism: str
    say: Callable[[str, str], None]  # a line of progress for people
    as_lines: bool  # as JSON: a line of its own before the verdict's
    sheet: Path | None = None


def inspection(vetting: Vetting | None, telling: VettingOutput) -> VettingRequest | None:
    """A vetting that is told as ``telling`` says; None where nothing is vetted."""
    if vetting is None:
        return None

    def shown(found: VettingReport) -> None:
        """Write the page, print the figures.

        Raises:
            SiteStorageError: the page cannot be written; nothing leaves then.
        """
        if telling.sheet is not None:
            _keep(telling.sheet, render(found, telling.mechanism))
            kept = f"wrote {telling.sheet.name}: it shows patients, so it stays at this site; delete it when decided"
            telling.say("sheet", kept)
        for line in in_words(found):
            telling.say("review", line)
        if telling.as_lines:
            sys.stdout.write(json.dumps({"mechanism": telling.mechanism, "review": as_json(found)}) + "\n")

    return VettingRequest(vetting, shown, telling.sheet is not None)


def _keep(path: Path, page: bytes) -> None:
    try:
        write(path, page)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            with suppress(OSError):  # half of a page is none
                path.unlink()
        raise SiteStorageError(f"{path.name}: {error.strerror}: nothing has left, and the price is spent") from None


def in_words(found: VettingReport) -> list[str]:
    """The figures in lines."""
    gone = "".join(f", {count} {explain_drop(reason)}" for reason, count in sorted(found.dropped.items()))
    lines = [
        f"{found.pictures} images of {found.clusters} clusters compared with every comparable image{gone}; "
        f"{found.left} clusters leave",
        f"clusters re-identified by the second verifier: {span(found.before)} of what would leave",
        f"clusters re-identified by the second verifier: {span(found.after)} of what leaves"
        if found.after
        else "nothing leaves: no new image passed",
    ]
    if found.lost:
        lines.append(f"labels of which no cluster is left: {labels(found)}")
    lines += [f"planted near-duplicates that were caught, {name}: {text}" for name, text in caught(found.power)]
    for name, value in sorted(found.thresholds.items()):
        told = by_chance(found.intervals, name)
        chance = f"; {told} of images without a similar patient reach it (95 %)" if told else ""
        lines.append(f"threshold, {name}: {threshold(name, value)}{chance}")
    return lines


def as_json(found: VettingReport) -> dict[str, Any]:
    """The same as data; a number that is none is null."""
    return {
        "pictures": found.pictures,
        "clusters": found.clusters,
        "dropped": dict(found.dropped),
        "lost": list(found.lost),
        "left": found.left,
        "reidentified": {
            "before": asdict(found.before),
            "after": asdict(found.after) if found.after else None,
        },
        "power": power_json(found.power),
        "thresholds": {name: finite(value) for name, value in found.thresholds.items()},
        "intervals": {name: [finite(end) for end in ends] for name, ends in found.intervals.items()},
    }


def power_json(power: Power) -> dict[str, Any]:
    """What of planted near-duplicates was caught, as data."""
    return {
        "caught": asdict(power.caught),
        "verifier": asdict(power.verifier),
        "unseen": asdict(power.unseen),
        "kinds": {kind: asdict(share) for kind, share in power.kinds.items()},
        "other_visits": asdict(power.other_visits) if power.other_visits else None,
    }


def finite(value: float) -> float | None:
    """A number, or null."""
    return value if math.isfinite(value) else None
