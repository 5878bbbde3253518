"""``python -m deploy.demo``: three hospitals and one coordinator, from DICOM to verdicts.

Every participant is a process of its own with its own directory and keys; they talk over TCP with mutual TLS. The
demo only writes the hospitals' folders, types the commands that a person would, and measures beside them. It shows
the main job: k-Same and k-SALSA, a set under differential privacy, federated rounds, a refusal. With ``--full`` it
shows every mechanism. With ``--serve`` the coordinator and one hospital go on running afterwards, to be tried in a
browser, until Ctrl-C (:mod:`deploy.demo.tryout`). Told to end (SIGTERM, Ctrl-C), it ends all that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from deploy.demo.finished_run import looked
from deploy.demo.kept_networks import KeptNetworkError
from deploy.demo.pacs import OrthancError
from deploy.demo.processes import DemoError, Interrupted, ending
from deploy.demo.scale import full, main_job
from deploy.demo.scene import Scene
from deploy.demo.tryout import FIRST_PORT, SITE, SPARE, Ports, PortTakenError, Tryout
from policies.accounting.rounding import epsilon_text, format_rounded_up
from protos.common.errors import RefusedError

OUT = Console(highlight=False)
PATIENTS, ROUNDS = 225, 4
MARK = ".lazaret-demo"  # in a folder that a demo may replace; locked while one uses it


class FolderInUseError(RefusedError):
    """A folder of the demo's holds what is not to be replaced."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=__doc__)
    parser.add_argument("--full", action="store_true", help="show every mechanism: takes about ten times as long")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="results; replaced")
    parser.add_argument("--work", type=Path, default=Path(".demo"), help="the participants' directories; replaced")
    parser.add_argument("--patients", type=int, default=PATIENTS, help="at each of the three hospitals")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="federated rounds")
    parser.add_argument("--serve", action="store_true", help="go on running afterwards, to be tried in a browser")
    text = "with --serve: the receiver's, on the loopback; the consoles take the two after it"
    parser.add_argument("--port", type=int, default=FIRST_PORT, help=f"{text} ({FIRST_PORT})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the whole job; exit 1 when a step failed, with the failing command's own words."""
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts behind with it ignored
    arguments = _parser().parse_args(argv)
    scale = (full if arguments.full else main_job)(arguments.patients, arguments.rounds)
    ports = Ports(arguments.port)
    try:
        with contextlib.ExitStack() as stack:
            if arguments.serve:
                ports.require_free()
                scale = replace(scale, spare={SITE: SPARE})
            for folder in (arguments.out, arguments.work):
                stack.enter_context(_exclusive(folder))
            scene = Scene(arguments.out.resolve(), arguments.work.resolve(), scale)
            stack.enter_context(ending(scene.processes))
            stack.enter_context(scene)
            for number, (title, act) in enumerate(scene.story(), start=1):
                _step(scene, f"{number}. {title}", act)
            _summary(scene)
            if arguments.serve:
                _serve(Tryout(scene, ports))
    except (FolderInUseError, PortTakenError) as refused:
        OUT.print(str(refused), markup=False, soft_wrap=True)
        return 2
    except (DemoError, KeptNetworkError, OrthancError) as failure:
        OUT.print(f"[red]failed:[/red] {failure}")
        return 1
    return 0


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """A new folder in the place of an earlier demo's, this demo's alone until the context is left.

    Raises:
        FolderInUseError: it is no demo's, or that of one that runs.
    """
    if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise FolderInUseError(f"{folder} holds something else; name another folder")
    with contextlib.ExitStack() as stack:
        if (folder / MARK).exists():
            _lock(stack, folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARK).touch()
        _lock(stack, folder)
        yield


def _lock(stack: contextlib.ExitStack, folder: Path) -> None:
    mark = stack.enter_context((folder / MARK).open("rb"))
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderInUseError(
            f"a demo runs in {folder}: end it first (Ctrl-C in its terminal), or name others by --out and --work"
        ) from None


def _serve(tryout: Tryout) -> None:
    """Go on running until told to end: Ctrl-C is the usual way, and no failure."""
    _step(
        tryout.scene,
        "the coordinator and one hospital stay: persons, logins, a receiver, two consoles",
        tryout.prepare,
    )
    try:
        for line in tryout.instructions():
            OUT.print(line, markup=False, soft_wrap=True)
        tryout.watch()
    except Interrupted as interrupted:
        OUT.print("ending everything: up to half a minute")
        if interrupted.code != 128 + signal.SIGINT:
            raise


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
    accuracy, network = summary["accuracy"], summary["network"]
    names = ", ".join(one["mechanism"] for one in summary["left_out"])
    left_out = f" Left out: {names} (`make demo-full`)." if names else ""
    OUT.print(
        Panel(
            f"held-out accuracy {accuracy['private']:.1%} with patient-level DP, "
            f"{accuracy['non_private']:.1%} without (on {accuracy['test_images']} real digits), "
            f"{accuracy['public_start']:.1%} before the first round\n"
            f"{network['name']}, {network['parameters']} trained parameters; {looked(summary['evaluation'])}\n"
            f"{sum(step['seconds'] for step in scene.steps):.0f} s in all.{left_out} "
            f"Look at {scene.out.name}/report.html, and check the ledger with\n"
            f"  lazaret-verify {scene.out.name}/ledger.export --key {summary['ledger']['key']}",
            title="done",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
