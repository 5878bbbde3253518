"""``setup``, ``init``, ``renew-ca`` and ``serve``: make the coordinator's directory, renew its CA, and serve from it.

``setup`` does everything that is missing, one step after the other, and asks for what no option says. Each step looks
at what is there and never writes over it, so the same command goes on after a mistake or a kill. ``init`` is one of
its steps.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
from pathlib import Path

from coordinator.cli.operator_client import invite
from coordinator.cli.output import OUT, say
from coordinator.enrolment.enrolment_requests import Enrolments
from coordinator.operations import status
from coordinator.operations.control import ledger_acts
from coordinator.operations.pending import PROGRAM
from coordinator.storage import directory as homes
from policies.governance.cli import read_person
from policies.ledger.approvals import APPROVING
from policies.ledger.read_only import read_store
from policies.ledger.state import State
from policies.review.policy import named
from protos.common.durable_files import finish_interrupted
from protos.federation import flower_environment
from protos.identity.certificates import SITE_NAME
from protos.operations import questions
from protos.operations.next_steps import SetupReport, as_owner
from protos.web import login_cli


def setup(arguments: argparse.Namespace) -> int:
    """Go on with everything that is missing."""
    report, home = SetupReport(arguments.json), homes.CoordinatorDirectory(arguments.home)
    with as_owner(PROGRAM):
        finish_interrupted(home.root, "coordinator.toml")
        _directory(home, arguments, report)
        login_cli.open_console(home.root, arguments.console, arguments.login, report)
        _people(home, arguments, report)
        _invitation(home, arguments, report)
        report.end(status.steps(home, dt.datetime.now(dt.UTC)))
    return 0


def init(arguments: argparse.Namespace) -> int:
    """Make the directory, keys, CA and an empty ledger."""
    _make(arguments, SetupReport(False))
    return 0


def _make(arguments: argparse.Namespace, report: SetupReport) -> None:
    """The one way in which the directory is made; ``arguments`` has the options of ``init``."""
    settings = f"listen = {json.dumps(arguments.listen)}\n"
    settings += f"address = {json.dumps(arguments.address)}\n" if arguments.address else ""
    settings += f"ledger = {json.dumps(arguments.ledger)}\n" if arguments.ledger else ""
    home = homes.create(arguments.home, settings, named(arguments.policy), dt.datetime.now(dt.UTC))
    with homes.open_ledger(home):
        pass
    report.written += ["coordinator.toml", "policy.toml"]
    report.say(f"made the directory {home.root.name}: keys, an intermediate CA, an empty ledger")
    report.say(
        "move offline/ to a medium that you lock away: it contains the root's key, which `serve` does not need"
    )


def _directory(home: homes.CoordinatorDirectory, arguments: argparse.Namespace, report: SetupReport) -> None:
    """Make the directory, unless it is there; without ``--listen`` the port of the address, on every interface."""
    if (home.root / "coordinator.toml").exists():
        if not home.settings().ledger and not home.ledger.exists():  # killed before it was begun
            with homes.open_ledger(home):
                pass
        return
    if not arguments.address and not arguments.listen:
        question = "host:port at which hospitals reach this coordinator, such as gateway.example.org:7443"
        arguments.address = questions.ask("--address", question, _address)
    host, _, port = arguments.address.rpartition(":")
    local = host in ("127.0.0.1", "localhost")
    arguments.listen = arguments.listen or (arguments.address if local else f"0.0.0.0:{port}")
    question = "policy of the federation: internal, controlled, public, or a .toml file"
    arguments.policy = questions.ask_or_take("--policy", arguments.policy, question, _policy, "controlled")
    _make(arguments, report)


def _address(text: str) -> str:
    homes.CoordinatorSettings(text)
    return text


def _policy(text: str) -> str:
    named(text)
    return text


def _people(home: homes.CoordinatorDirectory, arguments: argparse.Namespace, report: SetupReport) -> None:
    """Appoint the first person of each approving role."""
    for role in sorted(APPROVING - _state(home).office()):
        question = f"first person of {role}: NAME and PUBLIC-KEY, as `ledger person` printed it (Enter: later)"
        person = questions.ask_pair(f"--{role}", getattr(arguments, role), question, read_person)
        if person is not None:
            with ledger_acts(arguments) as do:
                do("ledger/appoint", person=person[0], role=role, key=person[1].hex())
            report.say(f"appointed {person[0]}, {role}")


def _state(home: homes.CoordinatorDirectory) -> State:
    """The ledger as it is now, also while another process writes it."""
    with read_store(homes.look_at_ledger(home), homes.ORIGIN, home.ledger_key()) as store:
        return store.state


def _invitation(home: homes.CoordinatorDirectory, arguments: argparse.Namespace, report: SetupReport) -> None:
    """Invite the hospital of ``--invite``, or the first one; not one that was invited and has not answered."""
    now, state = dt.datetime.now(dt.UTC), _state(home)
    busy = set(state.sites) - set(state.revoked_sites)
    for one in Enrolments(home.enrolments).all():
        waits = one.asked is not None and one.asked.state != "declined" and now < one.asked.ends
        if waits or (now.timestamp() < one.until and _file(arguments, one.site).exists()):
            busy.add(one.site)
    if not busy:
        question = "short name of the hospital to invite now (Enter: later)"
        arguments.invite = questions.ask_or_take("--invite", arguments.invite, question, _site, "")
    if not arguments.invite or arguments.invite in busy:
        return
    if arguments.json and not arguments.token_file:
        questions.missing("--token-file")
    arguments.site, arguments.out = arguments.invite, _file(arguments, arguments.invite)
    invite(home, arguments, report)


def _file(arguments: argparse.Namespace, site: str) -> Path:
    """Where the invitation of a site is written."""
    return arguments.out or Path(f"{site}.invitation")


def _site(text: str) -> str:
    if text and not SITE_NAME.fullmatch(text):
        raise ValueError("a hospital's name is 1 to 63 of a-z, 0-9 and -")
    return text


def renew_ca(arguments: argparse.Namespace) -> int:
    """With the root's medium at hand: a new intermediate CA. Sites need not do anything."""
    home = homes.CoordinatorDirectory(arguments.home)
    homes.renew_intermediate(home, arguments.root, dt.datetime.now(dt.UTC))
    OUT.print(f"the intermediate CA is valid until {home.ca_ends():%Y-%m-%d}; lock the root away again")
    return 0


def serve(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; exit 70 when the ledger cannot be written."""
    home = homes.CoordinatorDirectory(arguments.home)
    flower_environment.configure_environment(home.root / "flower")
    from coordinator.console.app import beside  # noqa: PLC0415 - Flower reads its environment while it is imported
    from coordinator.daemon import serve  # noqa: PLC0415 - as above

    return serve(home, say, beside)


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands."""
    acts = {"setup": setup, "init": init, "renew-ca": renew_ca, "serve": serve}
    return acts[arguments.command](arguments)
