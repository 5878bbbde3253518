"""Short commands beside a running service: asked over its socket, or with a ledger that the command opens itself.

And how many lines each side types, the approvers' among them, until the first image is in the vault. Then images
that come in beside a training (:mod:`tests.benchmarks.beside`). Some seven minutes.
Wall-clock times of whole processes, in turn; a ratio is that of the medians.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

from tests.benchmarks import beside
from tests.benchmarks.report import Report, Row
from tests.support.federation_world import Federation
from tests.support.first_image import first_image
from tests.support.release_site import filled
from tests.support.site_serving import serving

ROUNDS: Final = 11


def main() -> Report:
    """``ledger limit`` with an approval that is missing: all of the command but the last write."""
    with tempfile.TemporaryDirectory() as folder, Federation(Path(folder)) as federation:
        site = filled(federation.join("site-a"), Path(folder))
        words = [sys.executable, "-m", "agent", "--home", str(site.home.root)]
        words += ["ledger", "limit", "site-a/rdp", "2.0", "--serial", "s-1"]
        alone = [_seconds(words) for _ in range(ROUNDS)][1:]
        with serving(site):
            asked = [_seconds(words) for _ in range(ROUNDS)][1:]
        nothing = [_seconds([sys.executable, "-c", "pass"]) for _ in range(ROUNDS)][1:]
        with first_image(Path(folder) / "first") as both:
            lines = {"coordinator": len(both.coordinator.lines), "hospital": len(both.hospital.lines)}
            questions = max(len(both.coordinator.answered), len(both.hospital.answered))
    rows = [
        Row("ledger limit, by itself", median(alone) * 1e3, "ms"),
        Row("ledger limit, asked over the socket", median(asked) * 1e3, "ms"),
        Row("python -c pass", median(nothing) * 1e3, "ms"),
        *(Row(f"typed lines to the first image, {side}", count, "") for side, count in lines.items()),
        Row("questions to the first image, the side with more", questions, ""),
    ]
    ratios = {"socket_vs_start": median(alone) / median(asked), "typed_lines_to_first_image": max(lines.values())}
    both_at_work = beside.main()
    return Report((*rows, *both_at_work.rows), ratios | both_at_work.ratios)


def _seconds(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, check=False, capture_output=True)
    return time.perf_counter() - began
