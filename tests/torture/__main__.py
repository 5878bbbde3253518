"""``python -m tests.torture make|score|compare``: make the files, score the product, and the same for its peers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.torture import peers
from tests.torture.plants import torture, write
from tests.torture.product import look, through
from tests.torture.score import ACTIONS, as_json, score


def _score(out: Path | None) -> int:
    made = torture()
    passed = through(made)
    look(passed)
    result = score(made, passed.outputs)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in passed.outputs.items():
            (out / name).write_bytes(data)
        (out.parent / f"{out.name}-score.json").write_text(as_json(result))
    for name, code in passed.refused.items():
        print(f"refused  {name}: {code}")
    for plant in result.leaks:
        print(f"LEAK     {plant.id}: {plant.sentinel}")
    for name in result.seen:
        print(f"LEGIBLE  {name}")
    print("over-removed:", ", ".join(f"{what} {count}" for what, count in result.lost.most_common(40)))
    for action in ACTIONS:
        print(f"{action:<18}{result.right[action]:>6} of {result.required[action]}")
    print(f"dciodvfy errors {result.errors_in} in, {result.errors_out} out; {result.out} of {len(made)} files out")
    return int(bool(result.leaks or result.seen))


def main() -> int:
    """The command; 1 when something leaked."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="write the files")
    made.add_argument("--out", type=Path, required=True)
    scored = commands.add_parser("score", help="the product alone")
    scored.add_argument("--out", type=Path, help="keep what came out")
    compared = commands.add_parser("compare", help="the product beside other anonymisers, a markdown table")
    compared.add_argument("--work", type=Path, required=True, help="virtual environments, files and results")
    compared.add_argument("--only", nargs="*", default=None, metavar="PEER", help=f"of {', '.join(peers.PEERS)}")
    arguments = parser.parse_args()
    if arguments.command == "make":
        write(arguments.out, torture())
        return 0
    if arguments.command == "score":
        return _score(arguments.out)
    peers.compare(arguments.work, arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
