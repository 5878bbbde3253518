"""``setup``, ``init`` and ``enrol``: make a site's directory, join the federation, and let images come in.

``setup`` does everything that is missing, one step after the other, and asks for what no option says. Each step looks
at what is there and never writes over it, so the same command goes on after a wait, a mistake or a kill. ``init`` and
``enrol`` are two of its steps.
"""

from __future__ import annotations

import argparse
import datetime as dt
import ipaddress
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from agent.cli.output import say
from agent.errors import SiteConfigError
from agent.gateway import enrolment
from agent.gateway.credentials import Credentials, way_back
from agent.ingest import config as ingest
from agent.service import status
from agent.service.commands import PROGRAM, site_acts
from agent.storage import site_directory
from agent.storage.site_directory import SiteDirectory
from agent.storage.site_ledger import site_policy
from policies.accounting.rounding import epsilon_text
from policies.governance.cli import read_person
from policies.ledger.approvals import APPROVING
from policies.ledger.backends.sqlite import open_read_only
from policies.ledger.read_only import read_store
from policies.review.policy import named, preset
from policies.review.policy import parse as parse_policy
from protos.common.dsse import key_id
from protos.common.durable_files import create_file, finish_interrupted
from protos.operations import questions
from protos.operations.next_steps import SetupReport, as_owner
from protos.web import login_cli

_PRESETS: Final = ("internal", "controlled", "public")


def init(arguments: argparse.Namespace) -> int:
    """Make the site's directory, its keys and its request to take part."""
    _make(arguments, SetupReport(False))
    say("ask the coordinator for an invitation, and run `enrol` with it")
    return 0


def enrol(arguments: argparse.Namespace) -> int:
    """Hand in this site's request with an invitation, or ask what became of it; exit 1 while it waits."""
    home = SiteDirectory(arguments.home)
    given = None
    if arguments.invitation is not None:
        if not arguments.fingerprint:
            raise SiteConfigError("compare the root's fingerprint by phone, and enter it: --fingerprint")
        given = enrolment.Given(arguments.invitation.read_bytes(), _token(arguments, str), arguments.fingerprint)
    return 0 if _join(home, given, arguments.wait, SetupReport(False)) else 1


def setup(arguments: argparse.Namespace) -> int:
    """Go on with everything that is missing; exit 1 until the site is enrolled."""
    report, home = SetupReport(arguments.json), SiteDirectory(arguments.home)
    with as_owner(PROGRAM):
        finish_interrupted(home.root, "site.toml")
        given = _directory(home, arguments, report)
        _ways_in(home, arguments, report)
        login_cli.open_console(home.root, arguments.console, arguments.login, report)
        enrolled = _enrolled(home, given, arguments, report)
        if enrolled:
            _people(home, arguments, report)
        report.end(status.steps(home, dt.datetime.now(dt.UTC)))
    return 0 if enrolled else 1


# -- the directory


def _make(arguments: argparse.Namespace, report: SetupReport) -> None:
    """The one way in which a site's directory is made; ``arguments`` has the options of ``init``."""
    listed = json.dumps(arguments.secondary_capture_modality)
    settings = (
        f"site = {json.dumps(arguments.site)}\n"
        f"coordinator = {json.dumps(arguments.coordinator)}\n"
        f"input = {json.dumps(str(arguments.input))}  # the folder that `ingest` reads, relative to this one\n"
        f"modalities = {json.dumps(arguments.modality)}\n"
        f"secondary_capture_modalities = {listed}  # captures may show names: vouch for each\n"
        f"public_components = {json.dumps(arguments.public_component)}  # SHA-256 of bases you vouch to be public\n"
    )
    settings += f"proxy = {json.dumps(arguments.proxy)}\n" if arguments.proxy else ""
    site_directory.create(arguments.home, settings, named(arguments.policy))
    report.written += ["site.toml", "policy.toml", "request.json"]
    report.say(f"made the directory {arguments.home.name}: site.toml, policy.toml, and keys, which never leave it")


def _directory(home: SiteDirectory, arguments: argparse.Namespace, report: SetupReport) -> enrolment.Given | None:
    """Make the directory, unless it is there; an invitation that was asked for, too, is checked before.

    Raises:
        SiteConfigError: there is another site's, or neither an invitation nor a name for the site.
    """
    if (home.root / "site.toml").exists():
        site = home.settings().site
        if arguments.site not in ("", site):
            raise SiteConfigError(f"{home.root.name} is the directory of {site}: give another --home")
        return None
    given = None
    if not (arguments.site and arguments.coordinator) or arguments.invitation is not None:
        given = _invitation(arguments)
        if given is None:
            raise SiteConfigError(
                "ask the coordinator's operator for an invitation, then type `lazaret-agent setup` again; to make "
                "the directory before: --site NAME --coordinator HOST:PORT"
            )
        invitation = enrolment.read_invitation(given.invitation)
        if arguments.site not in ("", invitation.site):
            raise SiteConfigError("the invitation is for another site than this one")
        arguments.site, arguments.coordinator = invitation.site, arguments.coordinator or invitation.coordinator
    question = "what may come in, such as CT or CT,MR"
    arguments.modality = questions.ask_or_take("--modality", ",".join(arguments.modality), question, _modalities)
    question = f"policy: {'; '.join(map(_described, _PRESETS))}; or a .toml file"
    arguments.policy = questions.ask_or_take("--policy", arguments.policy, question, _policy, "controlled")
    _make(arguments, report)
    return given


def _modalities(text: str) -> list[str]:
    found = text.replace(",", " ").upper().split()
    if not found or not all(one.isascii() and one.isalnum() and len(one) <= 16 for one in found):
        raise ValueError("DICOM modalities, such as CT,MR")
    return found


def _policy(text: str) -> str:
    named(text)
    return text


def _described(name: str) -> str:
    policy = parse_policy(preset(name), name)
    approve = " and ".join(sorted(policy.approvals)) or "nobody"
    return f"{name} (k {policy.k_min}, epsilon {epsilon_text(policy.epsilon)}, approved by {approve})"


# -- images


def _ways_in(home: SiteDirectory, arguments: argparse.Namespace, report: SetupReport) -> None:
    """Write ``ingest.toml`` with a listener for the PACS, unless there is one, or no PACS is named."""
    if (home.root / ingest.FILE).exists():
        return
    question = "the PACS that sends images, as AE-TITLE@ADDRESS (Enter: none yet)"
    callers = [questions.ask_or_take("--pacs", text, question, _caller) for text in arguments.pacs]
    if not callers:
        callers = questions.ask("--pacs", question, lambda text: [_caller(text)] if text else [], "")
    if not callers:
        return
    question = "AE title by which the PACS calls this server"
    title = questions.ask_or_take("--ae-title", arguments.ae_title, question, str, "LAZARET")
    question = "TLS from the PACS: the files CERTIFICATE,KEY,CA; or plain, if another measure protects that network"
    secure = questions.ask_or_take("--dicom-tls", arguments.dicom_tls, question, _tls)
    host, _, port = arguments.listen.rpartition(":")
    text = (
        "[listener]  # C-STORE\n"
        f"ae_title = {json.dumps(title)}\n"
        f"host = {json.dumps(host.strip('[]'))}\n"
        f"port = {port if port.isdigit() else json.dumps(port)}\n"
        f"callers = [{', '.join(callers)}]\n"
        f"{secure}\n"
    )
    ingest.parse_ingestion(home.root, home.settings(), text)
    create_file(home.root / ingest.FILE, text.encode())
    report.wrote(ingest.FILE, f"`serve` receives images as {title} on port {port} from those senders alone")


def _caller(text: str) -> str:
    """A sender, as TOML."""
    title, _, address = text.partition("@")
    try:
        ipaddress.ip_network(address)
    except ValueError:
        raise ValueError("an AE title and an address or network, such as HOSPITALPACS@10.20.0.5") from None
    return f"{{ ae_title = {json.dumps(title)}, addresses = [{json.dumps(address)}] }}"


def _tls(text: str) -> str:
    if text == "plain":
        return "plain_tcp = true  # another measure protects this network"
    names = [name.strip() for name in text.split(",")]
    if len(names) != 3 or not all(names):
        raise ValueError("three files, CERTIFICATE,KEY,CA; or the word plain")
    pairs = zip(("certificate", "key", "authorities"), names, strict=True)
    return f"tls = {{ {', '.join(f'{key} = {json.dumps(name)}' for key, name in pairs)} }}"


# -- joining


def _invitation(arguments: argparse.Namespace) -> enrolment.Given | None:
    """The invitation, the fingerprint as heard by phone and the token as typed; each is checked, nothing is sent.

    Returns:
        None: a person says that there is none yet.
    """
    question = "file of the invitation, which the coordinator's operator sent (Enter: not there yet)"
    named_file, later = str(arguments.invitation or ""), "" if questions.can_ask() else None
    body = questions.ask_or_take("--invitation", named_file, question, _body, later)
    if not body:
        return None
    invitation = enrolment.read_invitation(body)
    question = "the root's fingerprint, as you hear it from the operator by phone"
    check = partial(enrolment.check_fingerprint, invitation)
    heard = questions.ask_or_take("--fingerprint", arguments.fingerprint, question, check)
    token = _token(arguments, lambda text: enrolment.check_token(invitation, text, dt.datetime.now(dt.UTC)))
    return enrolment.Given(body, token, heard)


def _body(name: str) -> bytes:
    """An invitation's file; b"" for no name."""
    if not name:
        return b""
    try:
        body = Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"{Path(name).name}: {error.strerror}") from None
    enrolment.read_invitation(body)
    return body


def _token(arguments: argparse.Namespace, read: Callable[[str], str]) -> str:
    """The token: from a file, the terminal, unseen, or a line of standard input."""
    if arguments.token_file:
        return read(arguments.token_file.read_text())
    return questions.ask_secret("--token-file", "token, as you hear it from the operator by phone", read)


def _enrolled(
    home: SiteDirectory, given: enrolment.Given | None, arguments: argparse.Namespace, report: SetupReport
) -> bool:
    """Go on with joining, from wherever it stands; whether the site is enrolled.

    A script names its invitation every time: one that has ended, or that is not needed any more, is left aside.
    """
    now, asked = dt.datetime.now(dt.UTC), (home.keys / "request.key").exists()
    waits = (home.keys / enrolment.WAITING).exists()
    if given is None and asked and not waits:
        if _is_enrolled(home, now):
            report.say("this site is enrolled")
            return True
        if way_back(home.keys, now) is not None:
            return _join(home, None, arguments.wait, report)
    if given is None and (not waits or (arguments.invitation is not None and _holds(arguments.invitation, now))):
        given = _invitation(arguments)
    return (waits or given is not None) and _join(home, given, arguments.wait, report)


def _holds(invitation: Path, now: dt.datetime) -> bool:
    """Whether a file is an invitation that can be used now."""
    try:
        return now.timestamp() < enrolment.read_invitation(invitation.read_bytes()).until
    except (OSError, SiteConfigError):
        return False


def _is_enrolled(home: SiteDirectory, now: dt.datetime) -> bool:
    """Whether there is a certificate that is good now."""
    return (home.keys / "tls.pem").exists() and now < Credentials(home.keys).not_after


def _join(home: SiteDirectory, given: enrolment.Given | None, wait: float, report: SetupReport) -> bool:
    """Hand the request in, or ask what became of it; whether the site is enrolled."""
    if given is None and not (home.keys / enrolment.WAITING).exists():
        ask = enrolment.return_over_grpc(home.settings().proxy)
        if enrolment.come_back(home, ask, dt.datetime.now(dt.UTC)):
            report.say("the certificate had ended: there is a new one")
            return True
    until, told = time.monotonic() + wait, ""
    while True:
        progress = enrolment.enrol(home, given, enrolment.over_grpc(home.settings().proxy), dt.datetime.now(dt.UTC))
        given = None
        if progress.fingerprint != told:
            told = progress.fingerprint
            report.tell("fingerprint of this site's request", told)
        if progress.state == "enrolled":
            report.say("enrolled; `doctor` checks the connection to the coordinator")
            public = home.sign_key().public_key().public_bytes_raw()
            report.say(f"this site's key id, for partners that know it: {key_id(public)}")
            return True
        if progress.state == "declined" or not time.monotonic() < until:
            break
        time.sleep(min(5.0, max(0.2, until - time.monotonic())))
    if progress.state == "declined":
        report.say("the coordinator has declined the request: ask for a new invitation")
    else:
        report.say("waiting for approval by two people: tell them the fingerprint by phone, then run this again")
    return False


def _people(home: SiteDirectory, arguments: argparse.Namespace, report: SetupReport) -> None:
    """Appoint the first person of each role that the policy wants to approve releases, or that an option names."""
    wanted = {role for role in APPROVING if getattr(arguments, role)} | (home.policy().approvals & APPROVING)
    if (home.root / "ledger.db").exists():
        disk, origin = open_read_only(home.root / "ledger.db"), site_directory.origin(home.settings().site)
        with read_store(disk, origin, home.sign_key()) as store:
            wanted = (wanted | (site_policy(home, store).approvals & APPROVING)) - store.state.office()
    for role in sorted(wanted):
        question = f"first person of {role}: NAME and PUBLIC-KEY, as `ledger person` printed it (Enter: later)"
        person = questions.ask_pair(f"--{role}", getattr(arguments, role), question, read_person)
        if person is not None:
            with site_acts(home.root, lambda *_: None) as do:
                do("ledger/appoint", person=person[0], role=role, key=person[1].hex())
            report.say(f"appointed {person[0]}, {role}")


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands."""
    return {"init": init, "enrol": enrol, "setup": setup}[arguments.command](arguments)
