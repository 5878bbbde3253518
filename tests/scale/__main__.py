"""How much one coordinator carries; exit 1 when anything was lost, doubled or refused that should not have been.

python -m tests.scale load --agents 200 --seconds 30 [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.scale.load import Load, run


def _load(arguments: argparse.Namespace) -> int:
    load = Load(arguments.agents, arguments.seconds, arguments.pause)
    with tempfile.TemporaryDirectory(prefix="lazaret-load-") as folder:
        found = run(Path(folder), load, lambda text: print(text, file=sys.stderr))
    if arguments.json:
        print(json.dumps(found))
    else:
        _show(found)
    return 1 if found["unexpected"] or found["disagreements"] or found["coordinator"]["exit"] else 0


def main() -> int:
    """Drive a load, and print what came of it."""
    parser = argparse.ArgumentParser(prog="tests.scale")
    commands = parser.add_subparsers(required=True)
    load = commands.add_parser("load", help="many agents at once against one coordinator")
    load.set_defaults(act=_load)
    load.add_argument("--agents", type=int, default=200)
    load.add_argument("--seconds", type=float, default=30.0)
    load.add_argument("--pause", type=float, default=10.0, help="an agent rests up to so long between its cycles")
    load.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    return int(arguments.act(arguments))


def _show(found: dict[str, object]) -> None:
    for name, value in found.items():
        if name == "calls":
            assert isinstance(value, dict)
            print(f"{'call':10}{'n':>8}{'1/s':>8}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}  not OK")
            for method, row in value.items():
                numbers = f"{row['calls']:8}{row['per_s']:8}{row['p50_ms']:9}{row['p95_ms']:9}{row['p99_ms']:9}"
                print(f"{method:10}{numbers}  {row['not_ok'] or ''}")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    sys.exit(main())
