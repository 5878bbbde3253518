"""``jobs``: what the running service has to do, does and did."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from agent.cli.output import OUT, print_progress
from agent.errors import CommandError
from agent.service.commands import operator_name, site_acts
from agent.service.jobs import (
    CANCELLED,
    DONE,
    FAILED,
    INTERRUPTED,
    MADE,
    PREDICTION,
    QUEUED,
    REFUSED,
    TRAINING,
    JobStore,
    standing,
)

_EVERY_S: Final = 0.5
_STATUS: Final = {DONE: 0, REFUSED: 1, MADE: 1, CANCELLED: 1, FAILED: 70}


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands."""
    what = arguments.command.split()[1]
    if what == "follow":
        return follow(arguments)
    if what == "fetch":
        return fetch(arguments)
    with site_acts(arguments.home, partial(print_progress, silent=getattr(arguments, "json", False))) as do:
        if what == "list":
            told = do("jobs/list")
        elif what == "show":
            told = do("jobs/show", number=arguments.number)
        elif what == "cancel":
            told = do("jobs/cancel", number=arguments.number, by=operator_name(), spend=arguments.spend)
        elif what == "priority":
            told = do("jobs/priority", number=arguments.number, priority=arguments.priority)
        else:
            told = do("jobs/retry", number=arguments.number, by=operator_name())
    if arguments.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        _PRINT[what](arguments, told)
    return 0


def _print_list(_: argparse.Namespace, told: Mapping[str, Any]) -> None:
    for number in told["broken"]:
        OUT.print(f"jobs/{number}/job.json cannot be read: move the folder away")
    if not told["jobs"]:
        OUT.print("no jobs: `release ... --detach` makes one")
        return
    table = Table("job", "command", "project", "state", "how it stands", "since")
    for one in told["jobs"]:
        state = one["state"] + (f", {one['priority']} priority" if one["priority"] != "normal" else "")
        table.add_row(str(one["number"]), one["command"], one["project"], state, standing(one), _when(one["since"]))
    OUT.print(table)


def _print_show(_: argparse.Namespace, told: Mapping[str, Any]) -> None:
    one = told["job"]
    OUT.print(
        f"job {one['number']}: {one['command']}, project {one['project']}, by {one['proposed_by']}", markup=False
    )
    if one["priority"] != "normal":
        OUT.print(f"priority: {one['priority']}")
    if one["price"]:
        amount, left = one["price"]["amount"], one["price"]["left"]
        OUT.print(f"price: {amount} of the {left} that were left when it was queued", markup=False)
    for event in told["history"]:
        who = f", by {event['by']}" if event["by"] else ""
        why = f": {event['reason']}" if event["reason"] else ""
        OUT.print(f"{_when(event['at'])}  {event['state']}{why}{who}", markup=False, soft_wrap=True)
    if (now := standing(one)) and now != told["history"][-1]["reason"]:
        OUT.print(f"now: {now}", markup=False, soft_wrap=True)
    if one["release"]:
        OUT.print(f"release: {one['release']}", markup=False)
    if one["outputs"]:
        names = ", ".join(one["outputs"])
        OUT.print(f"files: {names}; `jobs fetch {one['number']} --out FOLDER` writes them", markup=False)


def _print_cancel(arguments: argparse.Namespace, told: Mapping[str, Any]) -> None:
    said = "is told to end; `jobs show` says when it has"
    if told["state"] in (QUEUED, INTERRUPTED):  # a part in a run, which no service takes
        said = "is told to end when `serve` runs; `jobs show` says when it has"
    elif told["state"] == CANCELLED:
        said = "is cancelled"
    OUT.print(f"job {arguments.number} {said}")


def _print_retry(_: argparse.Namespace, told: Mapping[str, Any]) -> None:
    OUT.print(f"job {told['number']} is {told['state']}")


def _print_priority(arguments: argparse.Namespace, told: Mapping[str, Any]) -> None:
    OUT.print(f"the priority of job {arguments.number} is {told['priority']}")


_PRINT: Final = {
    "list": _print_list, "show": _print_show, "cancel": _print_cancel, "retry": _print_retry,
    "priority": _print_priority,
}  # fmt: skip


def follow(arguments: argparse.Namespace) -> int:
    """Print what the job prints, as if its command had been typed here; its exit status."""
    store = JobStore(arguments.home)
    said, state, attempt, position = "", "", -1, 0
    while True:
        job = store.read(arguments.number)  # before its output, so that nothing of the end is missed
        if job.attempts != attempt:
            attempt, position = job.attempts, 0
        for text in _grown(store.folder(job.number) / "stdout", position):
            sys.stdout.write(text)
            sys.stdout.flush()
            position += len(text.encode())
        if job.stopped:
            break
        with site_acts(arguments.home, lambda *_: None) as do:
            one = do("jobs/show", number=job.number)["job"]
        now = f"job {job.number}: {one['state']}" + (f", {one['reason']}" if one["reason"] else "")
        if (one["state"], one["reason"]) != (state, said):
            state, said = one["state"], one["reason"]
            print(now, file=sys.stderr)  # noqa: T201 - beside what the command prints
        time.sleep(_EVERY_S)
    for text in _grown(store.folder(job.number) / "stderr", 0):
        sys.stderr.write(text)
    if job.state != DONE:
        more = f"; go on with it: `jobs retry {job.number}`" if job.state == INTERRUPTED else ""
        print(f"job {job.number}: {job.state}: {job.reason}{more}", file=sys.stderr)  # noqa: T201 - as above
    return _STATUS.get(job.state, 1)


def _grown(path: Path, position: int) -> Iterator[str]:
    try:
        with path.open("rb") as stream:
            stream.seek(position)
            raw = stream.read()
    except FileNotFoundError:
        return
    whole = raw[: raw.rfind(b"\n") + 1]
    if whole:
        yield whole.decode(errors="replace")


def fetch(arguments: argparse.Namespace) -> int:
    """Write a job's files, which the vault of its project holds, into a folder; they may show patients."""
    from agent.service.job_outputs import output_names, read_output  # noqa: PLC0415 - the vault: looking needs none
    from agent.storage import projects  # noqa: PLC0415 - as above
    from agent.storage.site_directory import SiteDirectory  # noqa: PLC0415 - as above
    from protos.common.durable_files import write_new  # noqa: PLC0415 - as above

    home, job = SiteDirectory(arguments.home), JobStore(arguments.home).read(arguments.number)
    if job.lane == PREDICTION:
        from agent.cli import predict_job  # noqa: PLC0415 - as above

        return predict_job.fetch(home, job, arguments.out)
    if not output_names(job):
        raise CommandError(f"job {job.number} was told to write no file")
    arguments.out.mkdir(exist_ok=True)
    store, wrote, missing = JobStore(arguments.home), list[str](), list[str]()
    with closing(projects.open_vault(home, job.project)) as vault:
        for name in output_names(job):
            trained = store.folder(job.number) / "out" / name
            if job.lane == TRAINING and trained.is_dir():
                shutil.copytree(trained, arguments.out / name)
            elif (data := read_output(vault, store, job, name)) is not None:
                write_new(arguments.out / name, data, 0o600)
            else:
                missing.append(name)
                continue
            wrote.append(name)
    if wrote:  # the page of a set that waits for its reviewer is there before the set is
        OUT.print(f"wrote {', '.join(wrote)}; keep at this site what shows patients", markup=False)
    if missing:
        raise CommandError(f"job {job.number} is {job.state}: it has not written {', '.join(missing)}")
    return 0


def _when(at: float) -> str:
    return f"{dt.datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M:%S}"
