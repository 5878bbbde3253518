"""``python -m tests.benchmarks NAME [--json]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Final

from tests.benchmarks import clustering, dp_engine
from tests.benchmarks.report import Report, as_json, as_table

BENCHMARKS: Final[dict[str, Callable[[], Report]]] = {
    "clustering": clustering.main,
    "dp_engine": dp_engine.main,
}


def main() -> int:
    """Run one benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS), metavar="NAME", help=", ".join(sorted(BENCHMARKS)))
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    report = BENCHMARKS[arguments.name]()
    print((as_json if arguments.json else as_table)(arguments.name, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
