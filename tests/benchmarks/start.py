"""How long help takes: the commands of both sides beside ``python -c pass``, paired, as processes of their own.

Times are processor seconds of the child, user and system; a ratio is that of the medians.
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median
from typing import Final

from tests.benchmarks.report import Report, Row

ROUNDS: Final = 15
NOTHING: Final = ("-c", "pass")
HELP: Final = {
    "agent_help_vs_python": ("-m", "agent", "--help"),
    "coordinator_help_vs_python": ("-m", "coordinator", "--help"),
    "verify_help_vs_python": ("-m", "policies.audit.verify", "--help"),
    "reader_help_vs_python": ("-m", "protos.encryption.reader_cli", "--help"),
}
SUBCOMMAND: Final = ("-m", "agent", "release", "ksalsa", "--help")


def main() -> Report:
    """Every command once in each round, beside the bare interpreter in the same round."""
    commands = {"nothing": NOTHING, **HELP, "subcommand": SUBCOMMAND}
    for words in commands.values():  # compiled and in memory before anything is timed
        _seconds(words)
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, words in commands.items():
            times[name].append(_seconds(words))
    found = {name: median(seconds) for name, seconds in times.items()}
    rows = [Row(f"python {' '.join(words)}", found[name] * 1e3, "CPU-ms") for name, words in commands.items()]
    return Report(tuple(rows), {name: found[name] / found["nothing"] for name in HELP})


def _seconds(words: tuple[str, ...]) -> float:
    """Processor seconds of one process."""
    child = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise AssertionError(f"{' '.join(words)}: exit {child.returncode}")
    return used.ru_utime + used.ru_stime
