"""``python -m tests.crash power | kill``: crash the ledger at will, and see that nothing is lost.

Exit 0: nothing acknowledged was lost, nothing was half done, and every control lost something, so that the harness is
known to see it. Exit 1 otherwise, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.crash import kill, power
from tests.crash.faults import KINDS
from tests.crash.workload import LOST


def _power_row(setting: power.Setting, tally: power.Tally, seconds: float) -> str:
    wrong = ", ".join(f"{count} {what} (seed {tally.seeds[what]})" for what, count in tally.wrong.most_common())
    counts = f"{tally.runs:>8,}{tally.crashes:>10,}{tally.unready:>9,}{tally.crashes / seconds:>8.0f}"
    return f"{setting.name:<27}{counts}  {wrong or 'nothing lost'}"


def _power(arguments: argparse.Namespace) -> int:
    """The command ``power``."""
    settings = (power.PRODUCT, *power.CONTROLS)
    if arguments.seed is not None:
        tally = power.Tally()
        power.run(arguments.seed, next(s for s in settings if arguments.setting in s.name), tally)
        print(tally)
        return int(bool(tally.wrong))
    print(f"{'power loss':<27}{'runs':>8}{'crashes':>10}{'unready':>9}{'per s':>8}  what was found")
    failed = False
    for setting in settings:
        product, began, tally = setting is power.PRODUCT, time.monotonic(), power.Tally()
        wanted = arguments.crashes if product else max(500, arguments.crashes // 50)
        for tally in power.many(setting, wanted, 0, arguments.jobs):
            if sys.stderr.isatty():
                print(f"{tally.crashes:,} of {wanted:,}", end="\r", file=sys.stderr)
        print(_power_row(setting, tally, time.monotonic() - began), flush=True)
        if product:
            print(f"  {'by what the cut left':<25}" + ", ".join(f"{k} {v:,}" for k, v in tally.by_loss.items()))
        failed |= bool(tally.wrong) if product else not tally.wrong[LOST]
    return int(failed)


def _kill_row(name: str, tally: kill.Tally, seconds: float) -> bool:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(tally.ends.items()))
    wrong = "; ".join(f"{len(where)} {what} ({where[0]})" for what, where in tally.wrong.items())
    print(f"{name:<31}{tally.lives:>6}{seconds:>7.0f}  {ends:<44}{wrong or 'nothing lost'}", flush=True)
    return not tally.wrong


def _layer(seed: int, step: int) -> bool:
    """Faults in a layer of ours; whether nothing was lost, and the control was."""
    sound, count = True, kill.operations(seed)
    for kind in (*KINDS, "control: answers first"):
        began, tally, control = time.monotonic(), kill.Tally(), kind not in KINDS
        for at in range(1, count + 1, step):
            kill.by_layer(seed, KINDS[0] if control else kind, at, tally, hasty=control)
        sound &= _kill_row(kind, tally, time.monotonic() - began) is not control
    began, tally = time.monotonic(), kill.Tally()
    for size in range(4096, 30 * 4096, 2048 * step):
        kill.disk_full(seed, size, False, tally)
    for pages in range(6, 30, step):
        kill.disk_full(seed, pages, True, tally)
    return _kill_row("disk full", tally, time.monotonic() - began) and sound


def _kernel(seed: int, step: int) -> bool:
    """Faults in system calls; whether nothing was lost."""
    if reason := kill.strace_missing():
        print(f"system calls were not failed: {reason}")
        return False
    sound = True
    for call, count in kill.calls(seed).items():
        for action in kill.ACTIONS:
            began, tally = time.monotonic(), kill.Tally()
            for at in range(1, count + 1, step):
                kill.by_strace(seed, call, action, at, tally)
            sound &= _kill_row(f"{call} {action}", tally, time.monotonic() - began)
    return sound


def _kill(arguments: argparse.Namespace) -> int:
    """The command ``kill``."""
    print(f"{'one fault in each life':<31}{'lives':>6}{'s':>7}  {'how they ended':<44}what was found")
    layer = _layer(arguments.seed, arguments.step)
    return int(not (_kernel(arguments.seed, arguments.step) and layer))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description="crash the ledger")
    commands = parser.add_subparsers(dest="command", required=True)
    cut = commands.add_parser("power", help="power cuts on a simulated disk")
    cut.add_argument("--crashes", type=int, default=100_000, help="of the product; controls get a fiftieth")
    cut.add_argument("--jobs", type=int, default=2, help="processes")
    cut.add_argument("--seed", type=int, help="replay one run")
    cut.add_argument("--setting", default="as shipped", help="of the replayed run: a part of the row's name")
    cut.set_defaults(run=_power)
    dead = commands.add_parser("kill", help="kill -9, EIO and full disks on real files")
    dead.add_argument("--seed", type=int, default=1, help="of the workload")
    dead.add_argument("--step", type=int, default=1, help="try every so-manieth operation")
    dead.set_defaults(run=_kill)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
