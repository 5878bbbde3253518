"""``run``: plans of federated runs that wait for persons, and what persons decide about them."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from agent.cli.output import say
from agent.errors import CommandError
from agent.federation import run_plan
from agent.service import run_plans
from agent.service.commands import PROGRAM
from agent.service.run_plans import LOOK, PlanView
from agent.storage import label_tables, read_only_access
from agent.storage.label_tables import TableUse
from agent.storage.site_directory import SiteDirectory, origin
from agent.storage.site_ledger import site_policy
from policies.governance import cli
from policies.ledger.approvals import refusal
from policies.ledger.backends.sqlite import open_read_only
from policies.ledger.read_only import read_store
from policies.statements import ID
from protos.operations.questions import confirm

if TYPE_CHECKING:
    from policies.ledger.state import State

_DIGITS = 3  # of an array of numbers, as many are printed


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands."""
    home = SiteDirectory(arguments.home)
    disk = open_read_only(home.root / "ledger.db")
    with (
        read_store(disk, origin(home.settings().site), home.sign_key()) as store,
        read_only_access.notes(home) as notes,
    ):
        note, used = (notes.note(name) if notes is not None else None for name in (run_plan.NOTE, label_tables.USED))
        views, state = run_plans.plans(note, store.state, site_policy(home, store), used=used), store.state
    if arguments.command == "run list":
        return _list(views, arguments.json)
    learned = label_tables.tables_used(used).get(arguments.run)
    kept = any(view.plan.run == arguments.run for view in views)
    if arguments.command == "run show" and learned is not None and not kept:
        return _show_labels(learned, arguments.json)
    view = run_plans.plan_named(views, arguments.run)
    if arguments.command == "run show" and arguments.json:
        sys.stdout.write(json.dumps({**run_plans.told(view), "config": json.loads(view.plan.config)}) + "\n")
        return 0
    _show(view, state, home.settings().site)
    if arguments.command == "run show":
        _next_step(view)
        return 0
    return _decide(view, arguments)


def _list(views: list[PlanView], as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps([run_plans.told(view) for view in views]) + "\n")
        return 0
    for view in views:
        standing = f"waits for {' and '.join(view.missing)}" if view.standing == "waiting" else view.standing
        late = ", and its day is over" if view.late and view.standing == "waiting" else ""
        say(f"{view.plan.run}: {standing}{late}: {PROGRAM} run show {view.plan.run}")
    if not views:
        say("no plan waits: the coordinator has asked for none, or the policy wants no approval of runs")
    return 0


def _show(view: PlanView, state: State, site: str) -> None:
    for line in view.lines(state, site):
        say(line)
    say("configuration:")
    for key, value in sorted(json.loads(view.plan.config).items()):
        long = isinstance(value, list) and len(value) > 2 * _DIGITS and not isinstance(value[0], str)
        shown = f"{json.dumps(value[:_DIGITS])[:-1]}, … {len(value)} numbers]" if long else json.dumps(value)
        say(f"  {key} = {shown}")


def _show_labels(used: TableUse, as_json: bool) -> int:
    """Of a run without a plan: it is over, or nobody was asked to approve it."""
    if as_json:
        sys.stdout.write(json.dumps({"run": used.run, "labels": run_plans.labels_told(used)}) + "\n")
        return 0
    say(f"run {used.run}: no plan of it is kept, since it is over, or the policy wants no approval of runs")
    say(f"it learned from the {used.words()}; this stays here")
    return 0


def _next_step(view: PlanView) -> None:
    say(f"before you decide, {LOOK} {view.preview}")
    if view.open:
        name, words = view.plan.run, "--person NAME --key FILE"
        say(f"to decide: {PROGRAM} run approve {name} {words}; or: run refuse {name} REASON {words}")


def _decide(view: PlanView, arguments: argparse.Namespace) -> int:
    """Sign, with the person's own key, exactly what was shown; the ledger counts who may."""
    plan = view.plan
    if view.standing == "refused":
        raise CommandError(f"the plan of {plan.run} was refused: that is final. Another plan needs another run")
    if arguments.command == "run approve":
        if view.late:
            told = f"the day by which {plan.run} was to be approved is over"
            raise CommandError(f"{told}: ask the operator to launch another run")
        words, serial, question = [*plan.words()], plan.serial, "approve exactly this?"
    else:
        if not ID.fullmatch(arguments.reason):
            raise CommandError("a reason is one short word in lower case, such as purpose or quality")
        words = ["refuse", plan.run, plan.digest, arguments.reason]
        serial, question = refusal(plan.serial), "refuse it for good?"
    if not confirm(arguments.yes, question):
        say("nothing was signed")
        return 1
    from agent.cli.ledger import TOOLS  # noqa: PLC0415 - who only looks needs none of it

    signing = {"command": "ledger sign", "words": words, "serial": serial, "ledger": "", "out": None}
    return cli.run(argparse.Namespace(**{**vars(arguments), **signing}), TOOLS)
