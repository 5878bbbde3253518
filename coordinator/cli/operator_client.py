"""What an operator types against the coordinator that serves: enrolment, revocation, and federated runs.

Over the same gRPC port as the sites, with the operator's own certificate, so that nobody has to stop a coordinator.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import grpc
from rich.live import Live
from rich.table import Column, Table

from coordinator import errors as coordinator_errors
from coordinator.admission import AdmissionService
from coordinator.cli.output import ERR, OUT, say
from coordinator.enrolment.authority import Authority, Invitation
from coordinator.federation.job import APPROVAL_DAYS
from coordinator.operations.pending import request_named, waiting
from coordinator.round_codes import explain_code
from coordinator.storage import directory as homes
from policies.accounting.rounding import epsilon_text
from policies.governance.decisions import said_by
from policies.tasks.bounds import TaskError
from policies.tasks.task import read_task
from protos.common import durable_files
from protos.common.text import MINUTE, utc
from protos.federation import round_times
from protos.federation.site_check import PLANS, WRONG
from protos.operations.next_steps import SetupReport
from protos.protocol_version import USER_AGENT
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayStub

CALL_S = 30.0
CHECK_S = 300.0  # beyond the check itself: its sites may be asked something else
PLAN_S = 180.0  # the figure by privacy loss distributions may take a minute
_KINDS = {"mechanism": str, "config": dict, "parameters": int, "sites": list, "rounds": int, "min_sites": int}
# may be left out of a job file
_MORE = {"strategy": dict, "all_or_none": bool, "secure": bool, "evaluate": list}
_MORE |= {"round_seconds": int, "approval_days": int, "required_sites": list, "wait_seconds": int}
_UNSAID = {"strategy": {"name": "fedavg"}, "round_seconds": round_times.DEFAULT_S, "approval_days": APPROVAL_DAYS}


@contextlib.contextmanager
def _stub(home: homes.CoordinatorDirectory) -> Iterator[Any]:
    key, chain = homes.operator_certificate(home, dt.datetime.now(dt.UTC))
    credentials = grpc.ssl_channel_credentials(home.root_crt(), key, chain)
    options = [("grpc.enable_http_proxy", 0), ("grpc.primary_user_agent", USER_AGENT)]
    with grpc.secure_channel(home.settings().listen, credentials, options) as channel:
        yield GatewayStub(channel)


def _invite(arguments: argparse.Namespace) -> int:
    """Make a one-use invitation: a file without secrets, and a token to be told another way."""
    invite(homes.CoordinatorDirectory(arguments.home), arguments, SetupReport(False))
    return 0


def invite(home: homes.CoordinatorDirectory, arguments: argparse.Namespace, report: SetupReport) -> None:
    """The same for ``setup``, too: by the coordinator that serves, or here where none serves.

    Raises:
        CoordinatorConfigError: the coordinator refuses, in its words.
    """
    try:
        with _stub(home) as stub:
            reply = stub.Invite(gateway_pb2.InviteRequest(site=arguments.site), timeout=CALL_S)
        made = Invitation(reply.invitation, reply.token, reply.fingerprint)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise coordinator_errors.CoordinatorConfigError(str(error.details())) from None
        with homes.open_ledger(home) as store:  # which nobody else can have open then
            intake = AdmissionService.over(store, home.policy())
            made = Authority(home, intake, lambda: dt.datetime.now(dt.UTC)).invite(arguments.site)
    _hand_out(made, arguments, report)


def _hand_out(made: Invitation, arguments: argparse.Namespace, report: SetupReport) -> None:
    """Write an invitation to its file, and say what goes by phone."""
    if arguments.token_file:  # first: an invitation that is there has a token that is known
        durable_files.replace_file(arguments.token_file, made.token.encode() + b"\n", 0o600)
    durable_files.replace_file(arguments.out, made.body)
    report.wrote(arguments.out.name, f"send it to {arguments.site}; it contains no secret")
    if not arguments.token_file:
        report.tell("token, valid for one request within 30 minutes", made.token)
    report.tell("fingerprint of the federation's root", made.fingerprint)
    report.say("give both by phone; never send the token together with the file")


def _enrolments(arguments: argparse.Namespace) -> int:
    """Who was invited, and who waits for approval."""
    with _stub(homes.CoordinatorDirectory(arguments.home)) as stub:
        pending = stub.Enrolments(gateway_pb2.EnrolmentsRequest(), timeout=CALL_S).pending
    if arguments.json:
        names = ("site", "state", "fingerprint", "digest", "until")
        sys.stdout.write(json.dumps([{n: getattr(p, n) for n in names} for p in pending], indent=2) + "\n")
        return 0
    digest = Column("digest: what persons approve", overflow="fold")  # all of it, on a narrow terminal too
    table = Table("#", "site", "state", "fingerprint of its request", "until (UTC)", digest)
    home = homes.CoordinatorDirectory(arguments.home)
    of = {one.value: str(one.number) for one in waiting(home, dt.datetime.now(dt.UTC)) if one.action == "enrol"}
    for p in pending:
        until = utc(p.until, MINUTE) if p.until else ""
        table.add_row(of.get(p.digest, ""), p.site, p.state, p.fingerprint, until, p.digest)
    OUT.print(table)
    OUT.print("each approver compares the fingerprint with the hospital by phone, and signs:")
    OUT.print("  ledger sign # --person NAME --key FILE; the second one enrols the site. Or on another machine:")
    OUT.print("  ledger sign enrol SITE DIGEST --serial NAME ...   then: approve SITE FILES")
    return 0


def _approve(arguments: argparse.Namespace) -> int:
    """Hand in persons' approvals of a request; with those of both roles the site is enrolled."""
    home = homes.CoordinatorDirectory(arguments.home)
    sealed = tuple(path.read_bytes() for path in arguments.approvals)
    if arguments.serial and not arguments.site.isdigit():
        enrol_site(home, arguments.site, arguments.serial, sealed)
        return 0
    one = request_named(home, arguments.site, dt.datetime.now(dt.UTC))
    serial = arguments.serial or (said_by(sealed[0]).serial if sealed else one.serial)
    enrol_site(home, one.subject, serial, sealed)
    return 0


def enrol_site(home: homes.CoordinatorDirectory, site: str, serial: str, approvals: Sequence[bytes]) -> None:
    """Have the coordinator that serves enrol a site, once both roles have approved its request under that serial.

    Raises:
        CoordinatorConfigError: it does not, in its words.
    """
    request = gateway_pb2.ApproveRequest(site=site, serial=serial, approvals=approvals)
    try:
        with _stub(home) as stub:
            stub.Approve(request, timeout=CALL_S)
    except grpc.RpcError as error:
        raise coordinator_errors.CoordinatorConfigError(_sentence(error)) from None
    say(f"{site} is enrolled; its agent notices this by itself, or with `lazaret-agent setup`")


def _revoke(arguments: argparse.Namespace) -> int:
    """Put a certificate, or a whole site, on the deny-list, now."""
    if not arguments.certificate and not arguments.yes:
        ERR.print(
            f"this ends {arguments.site}'s part in the federation until it is enrolled again. To confirm: --yes"
        )
        return 1
    request = gateway_pb2.RevokeRequest(
        site=arguments.site, certificate=arguments.certificate, reason=arguments.reason
    )
    with _stub(homes.CoordinatorDirectory(arguments.home)) as stub:
        stub.Revoke(request, timeout=CALL_S)
    what = f"certificate {arguments.certificate} of {arguments.site}" if arguments.certificate else arguments.site
    OUT.print(f"{what} is revoked: its open calls are closed, and new ones are refused")
    return 0


def read_job(path: Path) -> dict[str, Any]:
    """A job file's content, its two objects as JSON; what it means is the mechanism's business.

    A configuration whose ``task`` is a text names a task file beside the job file, which is read here. Its length is
    the job's, and stands in the configuration, too.

    Raises:
        CoordinatorConfigError: not JSON, without exactly its keys, or its task file is none.
    """
    try:
        job = json.loads(path.read_text())
    except ValueError:
        raise coordinator_errors.CoordinatorConfigError(f"{path.name}: not JSON") from None
    given = {k: type(v) for k, v in job.items()} if isinstance(job, dict) else {}
    if {k: t for k, t in given.items() if k not in _MORE} != _KINDS or not given.items() <= (_KINDS | _MORE).items():
        wanted = ", ".join(f"{k} ({t.__name__})" for k, t in _KINDS.items())
        more = ", ".join(f"{k} ({t.__name__})" for k, t in _MORE.items())
        raise coordinator_errors.CoordinatorConfigError(f"{path.name}: the keys are {wanted}; and if need be {more}")
    if not all(type(number) is int and 0 < number < 1 << 31 for number in job.get("evaluate", [])):
        raise coordinator_errors.CoordinatorConfigError(f"{path.name}: evaluate: numbers of rounds, such as [4, 8]")
    whole = {**_UNSAID, "all_or_none": False, "secure": False, "evaluate": [], **job}
    if "task" in whole["config"]:
        named = whole["config"]["task"]
        task = _task(path, named) if isinstance(named, str) else named
        whole["config"] = {"parameters": job["parameters"], **whole["config"], "task": task}
    return {**whole, "config": json.dumps(whole["config"]), "strategy": json.dumps(whole["strategy"])}


def _task(job: Path, named: str) -> dict[str, Any]:
    """The task file that a job file names, as the tables of its canonical JSON.

    Raises:
        CoordinatorConfigError: it cannot be read, or is none; every problem at once.
    """
    path = job.parent / named
    try:
        return read_task(path).to_table()
    except TaskError as error:
        raise coordinator_errors.CoordinatorConfigError(str(error)) from None


def _request(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    job = read_job(arguments.job)
    run, config = getattr(arguments, "run", "") or "forecast", job["config"].encode()
    return gateway_pb2.LaunchRequest(**{**job, "run": run, "config": config}), job


def _turns(job: dict[str, Any]) -> int:
    """Rounds and looks together."""
    return int(job["rounds"]) + len(job["evaluate"])


def _plan(arguments: argparse.Namespace) -> int:
    """What a run would cost each site; exit 1 when it could not go. Nothing is held."""
    request, job = _request(arguments)
    with _stub(homes.CoordinatorDirectory(arguments.home)) as stub:
        reply = stub.Plan(request, timeout=PLAN_S)
    if arguments.json:
        names = ("site", "fits", "epsilon", "pld_epsilon", "delta", "amount", "left", "reason")
        sites = [{n: getattr(c, n) for n in names} for c in reply.sites]
        told = {"go": not reply.refused, "reason": reply.refused, "noise_multiplier": reply.noise_multiplier}
        sys.stdout.write(json.dumps({**told, "sites": sites}) + "\n")
        return 1 if reply.refused else 0
    title = f"{_turns(job)} round(s), noise multiplier {reply.noise_multiplier:g}"
    table = Table("site", "epsilon of the run", "by PLD", "delta", "of what is left", "", title=title)
    for c in reply.sites:
        share = f"{100 * c.amount / c.left:.0f} %" if c.left > 0 else "no budget left"
        shown = [epsilon_text(e) if e else "" for e in (c.epsilon, c.pld_epsilon)]  # "": it cannot be told
        table.add_row(c.site, *shown, c.delta, share, "fits" if c.fits else c.reason)
    OUT.print(table)
    OUT.print(f"cannot start: {reply.refused}" if reply.refused else "can go", markup=False)
    return 1 if reply.refused else 0


def _check(arguments: argparse.Namespace) -> int:
    """Whether each site could take part now; exit 1 when one could not. Nothing is priced, and no patient is read."""
    request, job = _request(arguments)
    request.canary = canary = arguments.canary
    longest = round_times.check_timeout(request.parameters)
    if canary and not arguments.json:
        OUT.print(f"a round on made patients, at all sites at once: at most {longest / 60:.0f} minutes")
    with _stub(homes.CoordinatorDirectory(arguments.home)) as stub:
        reply = stub.Check(request, timeout=longest + CHECK_S)
    could = bool(reply.sites) and all(one.could and (one.aggregated or not canary) for one in reply.sites)
    if arguments.json:
        told = [{field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields} for one in reply.sites]
        told = [{**one, "wrong": list(one["wrong"])} for one in told]
        sys.stdout.write(json.dumps({"go": could, "reason": reply.refused, "sites": told}) + "\n")
        return 0 if could else 1
    if reply.refused:
        OUT.print(f"nobody was asked: {reply.refused}", markup=False)
        return 1
    if canary:
        _show_canary(reply, could, request.secure)
        return 0 if could else 1
    table = Table("site", "agent", "its people", "computes by", "line, down and up", "a round", "")
    for one in reply.sites:
        if one.code:
            table.add_row(one.site, *[""] * 5, explain_code(one.code)[0])
            continue
        line = " and ".join(f"{8 * rate / 1e6:.1f} Mbit/s" if rate else "?" for rate in (one.down, one.up))
        took = f"about {one.round_seconds:.0f} s of {job['round_seconds']}" if one.seconds else "?"
        said = "; ".join(WRONG[code] for code in one.wrong) or "could take part"
        table.add_row(one.site, one.version, PLANS[one.plan], one.device, line, took, said)
    OUT.print(table)
    OUT.print("all of them could take part" if could else "not all of them could take part", markup=False)
    return 0 if could else 1


def _show_canary(reply: Any, could: bool, secure: bool) -> None:
    """Each site's round on made patients: figures in a table, and a line for each site on what became of it."""
    table = Table(Column("site", overflow="fold"), box=None, pad_edge=False)
    for name in ("down MiB", "s", "MiB/s", "round s", "up MiB", "s", "MiB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in reply.sites:
        if not one.code:
            ways = (_way(one.down_bytes, one.down_seconds), _way(one.up_bytes, one.up_seconds))
            table.add_row(one.site, *ways[0], f"{one.seconds:.0f}" if one.seconds else "?", *ways[1])
    if table.row_count:
        OUT.print(table)
    for one in reply.sites:
        OUT.print(f"{one.site}: {_told_of(one)}", markup=False)
    if secure:
        OUT.print("a canary of a masked job exchanges no keys: whether the sites know each other shows in its rounds")
    through = all(one.aggregated for one in reply.sites)
    OUT.print("the round went through at every site" if through else "the round did not go through at every site")
    if through and not could:
        OUT.print("not all of them could take part", markup=False)


def _told_of(one: Any) -> str:
    """What became of a site's numbers, and what is wrong."""
    if one.code:
        return f"not aggregated. {' '.join(explain_code(one.code))}"
    wrong = [WRONG[code] for code in one.wrong]
    if one.could and not one.aggregated:
        wrong.append(explain_code("no_aggregate")[0])
    return "; ".join(["aggregated" if one.aggregated else "not aggregated", PLANS[one.plan], *wrong])


def _way(carried: int, seconds: float) -> tuple[str, str, str]:
    """MiB, seconds and rate of one way."""
    mib = carried / 2**20
    return (f"{mib:.2f}", f"{seconds:.1f}", f"{mib / seconds:.2f}") if seconds else (f"{mib:.2f}", "?", "?")


def _launch(arguments: argparse.Namespace) -> int:
    """Start a run, or follow the one of that name; exit 1 when it failed or was stopped."""
    request, job = _request(arguments)
    with _stub(homes.CoordinatorDirectory(arguments.home)) as stub:
        return _show(stub.Launch(request), arguments.json, _turns(job))


def _watch(arguments: argparse.Namespace) -> int:
    """Follow a run; exit 1 when it failed or was stopped."""
    with _stub(homes.CoordinatorDirectory(arguments.home)) as stub:
        return _show(stub.Watch(gateway_pb2.RunRequest(run=arguments.run)), arguments.json, 0)


def _resume(arguments: argparse.Namespace) -> int:
    """Go on with a stopped run, and follow it."""
    with _stub(homes.CoordinatorDirectory(arguments.home)) as stub:
        return _show(stub.Resume(gateway_pb2.RunRequest(run=arguments.run)), arguments.json, 0)


def _stop(arguments: argparse.Namespace) -> int:
    """Stop a run after the round in progress; its grants stay held."""
    with _stub(homes.CoordinatorDirectory(arguments.home)) as stub:
        state = stub.Stop(gateway_pb2.RunRequest(run=arguments.run), timeout=CALL_S).state
    OUT.print({"unknown": "there is no run of that name"}.get(state, f"{arguments.run}: {state}"))
    return 0 if state == "stopping" else 1


def _show(events: Iterator[Any], as_lines: bool, rounds: int) -> int:
    """Events as they come: JSON lines, a live table on a terminal, or plain lines."""
    state, board = "failed", _Board(rounds)
    live = OUT.is_terminal and not as_lines
    with Live(board.table(), console=OUT, transient=False) if live else contextlib.nullcontext() as display:
        for event in events:
            state = event.state
            board.take(event)
            if as_lines:
                line = {"round": event.round, "state": state, "sites": list(event.sites), "reason": event.reason}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
            elif display is not None:
                display.update(board.table())
            else:
                OUT.print(board.line(event), markup=False)
    return 0 if state == "finished" else 1


class _Board:
    """A run as a table: what became of each site in each round."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.rows, self.end = rounds, dict[int, list[str]](), ""

    def take(self, event: Any) -> None:
        """One more event."""
        cells = self.rows.setdefault(event.round, [""] * 3)
        names, at = ", ".join(event.sites), {"granted": 0, "sent": 0, "closed": 1}.get(event.state)
        if at is not None:
            cells[at] = names
        elif event.state == "evaluated":
            cells[1] = f"{names}: {event.reason}"
        elif event.state in ("declined", "refused", "waiting"):
            cells[2] = "; ".join(filter(None, (cells[2], f"{names} ({event.reason})")))
        if event.state in ("finished", "failed", "stopped"):
            self.end = f"{event.state}{f': {event.reason}' if event.reason else ''}"

    def line(self, event: Any) -> str:
        """One event as a line of text."""
        of = f" of {self.rounds}" if self.rounds else ""
        where = f"round {event.round}{of}" if event.round else "price"
        reason = f" ({event.reason})" if event.reason else ""
        return f"{where}: {event.state} {', '.join(event.sites)}{reason}"

    def table(self) -> Table:
        """The whole board."""
        table = Table("round", "asked", "aggregated", "without", title=self.end or "running")
        for number, cells in sorted(self.rows.items()):
            if any(cells):
                table.add_row(str(number) if number else "price", *cells)
        return table


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = MappingProxyType(
    {
        "invite": _invite,
        "enrolments": _enrolments,
        "approve": _approve,
        "revoke": _revoke,
        "round plan": _plan,
        "round check": _check,
        "round launch": _launch,
        "round watch": _watch,
        "round resume": _resume,
        "round stop": _stop,
    }
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands; what the coordinator refuses becomes a sentence and exit status 1."""
    try:
        return _COMMANDS[arguments.command](arguments)
    except grpc.RpcError as error:
        ERR.print(f"refused: {_sentence(error)}", markup=False)
        return 1


def _sentence(error: Any) -> str:
    """What a failed call means to the operator."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return "the coordinator does not serve from this directory: lazaret-coordinator serve"
    return str(error.details())
