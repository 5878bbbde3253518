"""``python -m deploy.demo``: three hospitals and one coordinator, from DICOM to verdicts.

Every participant is a process of its own with its own directory and keys; they talk over TCP with mutual TLS. The
demo only writes the hospitals' folders, types the commands that a person would, and measures beside them. It shows
the main job: k-Same and k-SALSA, a set under differential privacy, federated rounds, a refusal. With ``--full`` it
shows every mechanism. Told to end (SIGTERM, Ctrl-C), it ends all that it started.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from deploy.demo.kept_networks import KeptNetworkError
from deploy.demo.pacs import OrthancError
from deploy.demo.processes import DemoError, ending
from deploy.demo.scale import full, main_job
from deploy.demo.scene import Scene
from policies.accounting.rounding import epsilon_text, format_rounded_up

OUT = Console(highlight=False)
PATIENTS, ROUNDS = 225, 4


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=__doc__)
    parser.add_argument("--full", action="store_true", help="show every mechanism: takes about ten times as long")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="results; replaced")
    parser.add_argument("--work", type=Path, default=Path(".demo"), help="the participants' directories; replaced")
    parser.add_argument("--patients", type=int, default=PATIENTS, help="at each of the three hospitals")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="federated rounds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the whole job; exit 1 when a step failed, with the failing command's own words."""
    os.umask(0o077)
    arguments = _parser().parse_args(argv)
    for folder in (arguments.out, arguments.work):
        if folder.exists() and not (folder / ".lazaret-demo").exists() and any(folder.iterdir()):
            OUT.print(f"{folder} holds something else; name another folder")
            return 2
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / ".lazaret-demo").touch()
    scale = (full if arguments.full else main_job)(arguments.patients, arguments.rounds)
    scene = Scene(arguments.out.resolve(), arguments.work.resolve(), scale)
    try:
        with ending(scene.processes), scene:
            for number, (title, act) in enumerate(scene.story(), start=1):
                _step(scene, f"{number}. {title}", act)
            _summary(scene)
    except (DemoError, KeptNetworkError, OrthancError) as failure:
        OUT.print(f"[red]failed:[/red] {failure}")
        return 1
    return 0


def _step(scene: Scene, title: str, act: Callable[[Callable[[str], None]], str]) -> None:
    began = time.monotonic()
    with OUT.status(title) as status:
        result = act(lambda text: status.update(f"{title}: {text}"))
    seconds = time.monotonic() - began
    scene.steps.append({"name": title.partition(". ")[2], "seconds": round(seconds, 1)})
    OUT.print(f"[green]✓[/green] {title} [dim]({seconds:.1f} s)[/dim]")
    for line in result.splitlines():
        OUT.print(f"    {line}", markup=False)


def _summary(scene: Scene) -> None:
    summary = scene.write_summary()
    table = Table(
        "mechanism",
        "round",
        "who",
        "verdict",
        "level",
        "promise",
        "why not",
        title=f"releases (ε at δ = {format_rounded_up(summary['epsilon']['delta'])}, per patient)",
    )
    for release in summary["releases"]:
        promise = "nothing" if release["epsilon"] is None else f"ε = {epsilon_text(release['epsilon'])}"
        promise = f"k = {release['k']}" if release["k"] else promise
        table.add_row(
            release["mechanism"],
            str(release["round"] or "-"),
            release["site"],
            release["verdict"],
            release["claim_level"] or "-",
            promise,
            ", ".join(release["findings"]),
        )
    OUT.print(table)
    accuracy = summary["accuracy"]
    names = ", ".join(one["mechanism"] for one in summary["left_out"])
    left_out = f" Left out: {names} (`make demo-full`)." if names else ""
    OUT.print(
        Panel(
            f"held-out accuracy {accuracy['private']:.1%} with patient-level DP, "
            f"{accuracy['non_private']:.1%} without (on {accuracy['test_images']} real digits)\n"
            f"{sum(step['seconds'] for step in scene.steps):.0f} s in all.{left_out} "
            f"Look at {scene.out.name}/report.html, and check the ledger with\n"
            f"  lazaret-verify {scene.out.name}/ledger.export --key {summary['ledger']['key']}",
            title="done",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
