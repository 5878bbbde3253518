"""``init`` and ``enrol``: make a site's directory, and join the federation."""

from __future__ import annotations

import argparse
import datetime as dt
import getpass
import json
import sys
import time
from pathlib import Path

from agent.cli.output import OUT
from agent.errors import SiteConfigError
from agent.gateway import enrolment
from agent.storage import site_directory
from policies.review.policy import preset
from protos.common.dsse import key_id


def init(arguments: argparse.Namespace) -> int:
    """Make the site's directory, its keys and its request to take part."""
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
    policy = Path(arguments.policy)
    text = policy.read_text() if policy.suffix == ".toml" else preset(arguments.policy)
    site_directory.create(arguments.home, settings, text)
    OUT.print(f"made the directory {arguments.home.name}: site.toml, policy.toml, and keys, which never leave it")
    OUT.print("ask the coordinator for an invitation, and run `enrol` with it")
    return 0


def enrol(arguments: argparse.Namespace) -> int:
    """Hand in this site's request with an invitation, or ask what became of it; exit 1 while it waits."""
    home = site_directory.SiteDirectory(arguments.home)
    given = None
    if arguments.invitation is None and _has_come_back(home):
        OUT.print("the certificate had ended: there is a new one")
        return 0
    if arguments.invitation is not None:
        if not arguments.fingerprint:
            raise SiteConfigError("compare the root's fingerprint by phone, and enter it: --fingerprint")
        token = arguments.token_file.read_text() if arguments.token_file else _typed("token: ")
        given = enrolment.Given(arguments.invitation.read_bytes(), token, arguments.fingerprint)
    until, told = time.monotonic() + arguments.wait, ""
    while True:
        progress = enrolment.enrol(home, given, enrolment.over_grpc(home.settings().proxy), dt.datetime.now(dt.UTC))
        given = None
        if progress.fingerprint != told:
            told = progress.fingerprint
            OUT.print(f"fingerprint of this site's request: {told}", soft_wrap=True)
        if progress.state == "enrolled":
            OUT.print("enrolled; `doctor` checks the connection to the coordinator")
            public = home.sign_key().public_key().public_bytes_raw()
            OUT.print(f"this site's key id, for partners that know it: {key_id(public)}", soft_wrap=True)
            return 0
        if progress.state == "declined" or not time.monotonic() < until:
            break
        time.sleep(min(5.0, max(0.2, until - time.monotonic())))
    if progress.state == "declined":
        OUT.print("the coordinator has declined the request: ask for a new invitation")
    else:
        OUT.print("waiting for approval by two people: tell them the fingerprint by phone, then run `enrol` again")
    return 1


def _has_come_back(home: site_directory.SiteDirectory) -> bool:
    """A site whose certificate has ended, and that asks for nothing else, gets another one."""
    if (home.keys / enrolment.WAITING).exists():
        return False
    return enrolment.come_back(home, enrolment.return_over_grpc(home.settings().proxy), dt.datetime.now(dt.UTC))


def _typed(prompt: str) -> str:
    """A secret from the terminal, unseen, or a line of standard input."""
    return getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline()


def run(arguments: argparse.Namespace) -> int:
    """Carry out one of these commands."""
    return init(arguments) if arguments.command == "init" else enrol(arguments)
