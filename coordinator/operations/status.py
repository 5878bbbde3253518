"""What is missing at the coordinator until sites can join and rounds can run; and what waits for people."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
from collections.abc import Iterator
from functools import partial
from typing import Final

from coordinator.operations import pending
from coordinator.operations.control import ABSENT
from coordinator.storage.directory import ORIGIN, CoordinatorDirectory, look_at_ledger
from policies.ledger.approvals import APPROVING
from policies.ledger.read_only import read_store
from policies.ledger.store import LedgerUnsoundError
from policies.review.policy import PolicyError
from protos.common.errors import ConfigError, RefusedError, UnreachableError
from protos.identity.key_files import KeyFileError
from protos.operations.next_steps import Step, answered, collect, disk
from protos.service.control_client import connect

JOIN: Final = "until sites can join"
ROUNDS: Final = "until rounds can run"
WAITS: Final = "waiting for people"
PARTS: Final = {
    "ledger": ("ledger.db*", "ledger.mark"),
    "releases": ("releases",),
    "runs": ("runs", "flower"),
    "logs": ("coordinator.log*",),
    "search index": ("search.db*",),
}
_EXPECTED: Final = (ConfigError, KeyFileError, LedgerUnsoundError, PolicyError, RefusedError, UnreachableError)


def steps(home: CoordinatorDirectory, now: dt.datetime) -> list[Step]:
    """Everything that has to be there, in the order in which it is done; nothing but short numbers is written.

    Args:
        home: the coordinator's directory, which may be empty.
        now: UTC, for requests that have ended.
    """
    looks = [
        (JOIN, "directory", partial(_directory, home)),
        (JOIN, "service", partial(_service, home)),
        (JOIN, "people and sites", partial(_ledger, home, now)),
    ]
    return collect(looks if (home.root / "coordinator.toml").exists() else looks[:1], _EXPECTED)


def _directory(home: CoordinatorDirectory) -> Iterator[Step]:
    if not (home.root / "coordinator.toml").exists():
        words = "lazaret-coordinator --home DIR setup"
        yield Step(JOIN, "directory", "there is none yet", words)
        return
    home.policy()
    yield Step(JOIN, "directory", said=f"sites reach it at {home.settings().reached_at}")
    if (home.root / "offline").exists():
        yield Step(JOIN, "root key", "the root's key lies in offline/", "move offline/ to a medium, and lock it away")


def _service(home: CoordinatorDirectory) -> Iterator[Step]:
    with contextlib.ExitStack() as stack:
        service = connect(home.root)
        if service is None:
            yield Step(JOIN, "service", "nothing serves from this directory", "lazaret-coordinator serve")
            return
        stack.enter_context(service)
        yield Step(JOIN, "service", said=f"process {service.about['pid']} serves")
        for line in (service.ask(f"/{ABSENT}")["absent"] or "").splitlines():
            yield Step(ROUNDS, "sites that are here", line, "its hospital sees why: lazaret-agent status")


def _ledger(home: CoordinatorDirectory, now: dt.datetime) -> Iterator[Step]:
    with read_store(look_at_ledger(home), ORIGIN, home.ledger_key()) as store:
        state = store.state
        for role in sorted(APPROVING - state.office()):
            words = "the person types: lazaret-coordinator ledger person FILE; then: lazaret-coordinator setup"
            yield Step(JOIN, f"a person of {role}", "two people of different roles approve each site", words)
        joined = sorted(set(state.sites) - set(state.revoked_sites))
        if joined:
            yield Step(ROUNDS, "sites", said=", ".join(joined))
        else:
            words = "lazaret-coordinator setup --invite SITE"
            yield Step(ROUNDS, "sites", "no site is enrolled", words)
        for site in sorted(state.sites_awaited):
            told = "after a restore nothing is granted before it has presented them"
            words = "its agent does so by itself; or: lazaret-coordinator ledger waive"
            yield Step(ROUNDS, f"receipts of {site}", told, words)
        for one in pending.of_store(home, store, now):
            name, missing, command = one.next_step(pending.PROGRAM)
            told = ", who hear its fingerprint by phone, and type it" if one.fingerprint and one.missing else ""
            yield Step(WAITS, name, missing + told, command)


def run(arguments: argparse.Namespace) -> int:
    """Print them, and what fills the disk; exit 1 when something is missing."""
    home = CoordinatorDirectory(arguments.home)
    return answered(steps(home, dt.datetime.now(dt.UTC)), disk(home.root, PARTS), arguments.json)
