"""The commands that make releases and take part in rounds. Apart: torch takes two seconds to import."""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from agent import site_commands
from agent.approval import hand_over, waiting, withdraw
from agent.attacks.dp_audit import AuditFailed, gate
from agent.desk import Desk, close_interrupted, greet, open_desk, start_anew
from agent.desk import amend as put_in_force
from agent.edges import home as homes
from agent.edges import projects
from agent.edges.ingestion import read_ingestion
from agent.edges.link import Link, LinkConfig
from agent.edges.log import open_log
from agent.edges.reception import Reception
from agent.edges.rounds import Over, Station, attend
from agent.edges.session import Session
from agent.edges.showing import show
from agent.edges.vault import VaultError
from agent.foreseen import Asked, Foreseen, RefusedBeforehandError, beforehand, of_clusters, quote
from agent.masked import Sum
from agent.mechanisms import Remodel, Resumable, Synthesis
from agent.mechanisms.ksame import KSame
from agent.nets.siamese import KnowsNobody
from agent.nets.weights import BadWeights
from agent.nouns import CohortTooSmall, Forked, NotKept, Selection, Unreachable
from agent.participant import Participant
from agent.pipeline import made_as, release_synthetic
from agent.released import TooManySearches, known_after_start, rule_of
from agent.site import Refused, Waiting
from agent.stages.freeze import BadRecord, place_of
from agent.stages.invert import BadBasis, Basis, load_basis
from agent.stages.noise import SystemEntropy
from agent.stages.vet import RepeatsAnInput
from agent.unfinished import Unfinished, abandon
from agent.vetted import Inspection
from agent.wrapping import Wrapping
from policies.accounting import NANO, epsilon_nano, tight_epsilon
from policies.accounts import Account
from policies.claims import Claim, Gaussian, KAnonymous, UnsupportedClaim
from policies.figures import epsilon_text
from policies.review import Verdict
from policies.statement import claim_json
from protos import hpke, quiet
from protos.artifact import BadArtifact
from protos.secagg_session import Acquaintance
from protos.shards import Dicom, Form, Png
from protos.versions import COMPRESSED
from protos.web import settings as console_settings
from protos.web.settings import BadConsole

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
EXPECTED = (
    hpke.BadReaderKey,
    AuditFailed,
    BadArtifact,
    BadBasis,
    BadConsole,
    BadRecord,
    BadWeights,
    CohortTooSmall,
    KnowsNobody,
    NotKept,
    Refused,
    RepeatsAnInput,
    RefusedBeforehandError,
    TooManySearches,
    Unfinished,
    UnsupportedClaim,
    VaultError,
)


def _basis(path: Path, settings: homes.Settings) -> Basis:
    """A basis from a file; it counts as public only if the site's own configuration vouches for its digest."""
    raw = path.read_bytes()
    basis = load_basis(raw)
    if hashlib.sha256(raw).hexdigest() not in settings.public_components:
        return replace(basis, provenance="private")
    return basis


def release(arguments: argparse.Namespace) -> int:
    """Make and submit a synthetic set; exit 1 when any review refuses it."""
    say = lambda name, detail: tell(name, detail, arguments.json)  # noqa: E731 - one line of progress
    with open_desk(arguments.home, say, arguments.project) as desk:
        mechanism = KSame(arguments.k, arguments.l_diversity, _basis(arguments.basis, desk.settings))
        looked = _inspection(arguments, desk, say)
        packed = wrapping(arguments, desk.home.root)
        if arguments.dry_run:
            selection = Selection(arguments.modality, mechanism.shape)
            foreseen = of_clusters(desk.site, mechanism, selection, packed, known=known_after_start(desk.site))
            asked = asked_for(mechanism, selection, arguments.anew, looked is not None)
            return dry_run(desk, foreseen, asked, arguments.json)
        start_making(desk, arguments.anew)
        try:
            rng = np.random.default_rng(secrets.randbits(256))
            goods, verdict = release_synthetic(desk.site, mechanism, arguments.modality, rng, packed, looked)
            name = goods.release.release
        except Refused as refusal:
            name, verdict = "", refusal.verdict
        except Waiting as waiting:
            return print_waiting(desk, waiting, arguments.json)
        desk.log.info("verdict", release=name, rules=[f.rule for f in verdict.findings])
        print_verdict(name, mechanism.name, verdict, arguments.json)
        return 0 if verdict.admitted else 1


def start_making(desk: Desk, anew: bool) -> None:
    """Greet the coordinator, find out how the interrupted ended, and give up what was interrupted, if that is said.

    Raises:
        Unreachable: the coordinator knows no compressed pictures: a set would be refused, and its price spent.
    """
    start_anew(desk)
    if desk.door.protocol < COMPRESSED:
        raise Unreachable("the coordinator is too old for compressed pictures: upgrade the coordinator first")
    if anew:
        abandon(desk.site)


def asked_for(
    mechanism: Synthesis | Resumable | Remodel, rule: Selection | str, anew: bool, vetted: bool = False
) -> Asked:
    """What a dry run asks of: the same mechanism, rule and vetting as the release."""
    form = made_as(mechanism, rule if isinstance(rule, str) else rule_of(rule))
    return Asked(mechanism, rule, form, vetted, anew)


def dry_run(desk: Desk, foreseen: Foreseen, asked: Asked, as_lines: bool) -> int:
    """Print what a release would cost, count and weigh, and what speaks against it; exit 1 if something does.

    Nobody outside hears of it, no picture is read, and nothing is spent or written. The number of a k-anonymous set
    follows from this site's patients: it is for this site alone.
    """
    mechanism = asked.mechanism
    quoted = quote(desk.site, foreseen, mechanism)
    findings = list(beforehand(desk.site, asked, foreseen))
    claim, limit = foreseen.draft.claim, desk.site.books.policy_of(desk.site.name).max_artifact_bytes
    account, free = desk.site.books.account(desk.site.name, claim), desk.vault.free_bytes()
    if as_lines:
        line: dict[str, Any] = {"mechanism": mechanism.name, "dry_run": True, "would_go": not findings}
        line["price"] = {"claim": claim_json(claim), "amount": quoted.amount, "left": account.left}
        line["samples"] = {"most": foreseen.samples, "exact": foreseen.public, "shape": list(foreseen.shape)}
        line["bytes"] = {"most": foreseen.size, "admitted": limit}
        line["disk"] = {"needed": foreseen.disk, "free": free}
        line["findings"] = [{"rule": f.rule, "detail": f.detail} for f in findings]
        sys.stdout.write(json.dumps(line) + "\n")
        return 1 if findings else 0
    what = "volumes" if foreseen.draft.artifact_type == "volume-set" else "pictures"
    number = f"{foreseen.samples} {what} of {' x '.join(map(str, foreseen.shape))}"
    if foreseen.form is None:
        number = "one model"
    elif not foreseen.public:
        number = f"at most {number}: by the number of this site's patients, so keep it here"
    tell("price", priced(account, claim), False)
    tell("number", number, False)
    tell("bytes", f"at most {foreseen.size}; the policies admit {limit}", False)
    tell("disk", f"up to {foreseen.disk} bytes until it has left; {free} are free", False)
    for finding in findings:
        tell("no", f"{finding.rule}: {finding.detail}", False)
    OUT.print("it would be refused" if findings else "nothing known now speaks against it; nothing was spent")
    return 1 if findings else 0


def priced(account: Account, claim: Claim) -> str:
    """What a claim costs, by both accountants: the ledger's is the one that counts."""
    if isinstance(claim, Gaussian):
        delta = float(account.opened.delta)
        charged, tight = epsilon_nano(claim, delta, account.opened.order) / NANO, tight_epsilon([claim], delta)
        told = f"epsilon {epsilon_text(tight)} by loss distributions; the ledger charges {epsilon_text(charged)}"
        return f"{told} (order {account.opened.order}), both at its delta {account.opened.delta}"
    left = f"{account.left} of {account.limit} are left"
    if isinstance(claim, KAnonymous):
        told = f"k = {claim.k} patients and {claim.l_diversity} labels behind every picture"
    else:
        told = "level C: nothing is promised; what stands behind it is measured"
    return f"{told}. It counts as one of the releases without an epsilon that the policy bounds: {left}"


def _inspection(arguments: argparse.Namespace, desk: Desk, say: Callable[[str, str], None]) -> Inspection | None:
    """Who vets, as a file of its own says; nobody where none is typed."""
    if arguments.vetting is None:
        return None
    from agent.edges.synthesis import read_vetting  # noqa: PLC0415 - and matplotlib with the next: few need it
    from agent.vetting_words import Telling, inspection  # noqa: PLC0415 - as above

    vetting = read_vetting(arguments.vetting, desk.settings.public_components)
    return inspection(vetting, Telling(KSame.name, say, arguments.json))


def wrapping(arguments: argparse.Namespace, folder: Path, colour: bool = False) -> Wrapping:
    """As PNG or DICOM, in clear or sealed to one reader.

    Raises:
        BadArtifact: DICOM in colour.
    """
    form: Form = Png()
    if arguments.form == "dicom":
        if colour:
            raise BadArtifact("DICOM is written in grey only: take --form png, or a generator of grey pictures")
        form = Dicom(arguments.modality, (arguments.spacing_um, arguments.spacing_um))
    if arguments.reader is None:
        return Wrapping(form)
    public = hpke.read_reader_public(arguments.reader)

    def sealed(clear: bytes) -> bytes:
        with tempfile.TemporaryDirectory(dir=folder) as place:  # what a crash leaves there is sealed
            hpke.seal_to(public, clear, Path(place) / "sealed")
            return (Path(place) / "sealed").read_bytes()

    return Wrapping(form, hpke.fingerprint(public), sealed)


def inspect(arguments: argparse.Namespace) -> int:
    """Show persons what they are asked to approve: files to look at, and what exactly to sign."""
    with open_desk(arguments.home, lambda name, detail: tell(name, detail, False)) as desk:
        draft, artifact = waiting(desk.site, arguments.release)
        files = show(draft, artifact, arguments.out)
        given = desk.site.books.store.state.approvals(draft.release, "release", draft.release, draft.artifact_sha256)
        missing = sorted(desk.site.books.policy_of(desk.site.name).approvals - set(given))
        OUT.print(f"wrote {arguments.out.name}: {', '.join(files)}; not released yet, so keep it where it is")
        OUT.print(f"{draft.mechanism}, {draft.modality}, {draft.artifact_type} of {draft.artifact_bytes} bytes")
        if draft.menu:
            OUT.print(f"k was chosen from {draft.menu.replace(',', ', ')}, which were tried on the patients")
        if draft.reid_rate is not None:
            OUT.print(f"at most {draft.reid_rate} of it were taken for a patient by an unseen verifier")
        if draft.vetting_power is not None:
            OUT.print(f"of planted copies, the vetting found {draft.vetting_power} or more")
        OUT.print(
            f"approved by: {', '.join(sorted(given)) or 'nobody yet'}; missing: {', '.join(missing) or 'nobody'}"
        )
        line = f"ledger sign release {draft.release} {draft.artifact_sha256} --serial {draft.release}"
        OUT.print(f"to approve: {line} --person NAME --key FILE --out FILE", soft_wrap=True)
        return 0


def print_waiting(desk: Desk, waiting: Waiting, as_lines: bool) -> int:
    """What persons must do for a release that waits; the exit status, 1."""
    r = waiting.goods.release
    desk.log.info("release_waits", release=r.release)
    line = {"release": r.release, "waits_for": sorted(waiting.roles), "artifact_sha256": r.artifact_sha256}
    if as_lines:
        sys.stdout.write(json.dumps(line) + "\n")
    else:
        OUT.print(f"{waiting}", markup=False)
        OUT.print(f"look at it: release inspect {r.release} --out FOLDER")
        OUT.print(f"each signs: ledger sign release {r.release} {r.artifact_sha256} --serial {r.release} ...")
        OUT.print(f"then: ledger approve FILES, and release send {r.release}")
    return 1


def send(arguments: argparse.Namespace) -> int:
    """Hand over a release that persons have approved; exit 1 when an approval is missing or a review refuses."""
    say = lambda step, detail: tell(step, detail, arguments.json)  # noqa: E731 - one line of progress
    with open_desk(arguments.home, say, project_of(arguments.home, arguments.release)) as desk:
        start_making(desk, anew=False)
        try:
            goods, verdict = hand_over(desk.site, arguments.release)
            mechanism = goods.release.mechanism
        except Refused as refusal:
            mechanism, verdict = "", refusal.verdict
        desk.log.info("verdict", release=arguments.release, rules=[f.rule for f in verdict.findings])
        print_verdict(arguments.release, mechanism, verdict, arguments.json)
        return 0 if verdict.admitted else 1


def withdraw_release(arguments: argparse.Namespace) -> int:
    """Give up a release that persons did not approve; its grant is spent."""
    say = lambda step, detail: tell(step, detail, False)  # noqa: E731 - one line of progress
    with open_desk(arguments.home, say, project_of(arguments.home, arguments.release)) as desk:
        start_anew(desk)
        withdraw(desk.site, arguments.release)
        desk.log.info("release_withdrawn", release=arguments.release)
        OUT.print(f"{arguments.release} is withdrawn, and its grant spent")
        return 0


def project_of(root: Path, release: str) -> str:
    """The project whose vault holds the pictures of a release's clusters; main, where none does."""
    home = homes.Home(root)
    for name in projects.names(home):
        with closing(projects.open_vault(home, name)) as vault:
            if vault.project_note(place_of(release, 0)) is not None:
                return name
    return homes.MAIN


def tell(name: str, detail: str, silent: bool) -> None:
    """One line of progress."""
    if not silent:
        OUT.print(f"{name:>6}  {detail}", markup=False, soft_wrap=True)


def print_verdict(release: str, mechanism: str, verdict: Verdict, as_lines: bool) -> None:
    """A verdict, for people or as JSON."""
    if as_lines:
        findings = [{"rule": f.rule, "detail": f.detail} for f in verdict.findings]
        line = {"release": release, "mechanism": mechanism, "admitted": verdict.admitted}
        sys.stdout.write(json.dumps({**line, "level": verdict.level, "findings": findings}) + "\n")
        return
    OUT.print(f"admitted at level {verdict.level}: {release}" if verdict.admitted else "refused:")
    for finding in verdict.findings:
        OUT.print(f"  {finding.rule}: {finding.detail}", markup=False)


def serve(arguments: argparse.Namespace) -> int:
    """Receive images beside the PACS, and take part in federated rounds, until told to stop."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        home = homes.Home(arguments.home)
        desk = None
        if arguments.modality:
            quiet.hush(arguments.home / "flower")  # the link's process inherits it
            torch.set_num_threads(1)
            say = lambda name, detail: tell(name, detail, False)  # noqa: E731 - one line of progress
            desk = stack.enter_context(open_desk(arguments.home, say, arguments.project))
        log = desk.log if desk else open_log(arguments.home / "agent.log")
        reception = stack.enter_context(Reception(home, arguments.project, log))
        for line in reception.told():
            OUT.print(line, markup=False)
        for line in stack.enter_context(_beside(home, desk, log, reception)):
            OUT.print(line, markup=False, soft_wrap=True)
        if desk is None:
            OUT.print("receiving; without --modality no part is taken in rounds")
            stop.wait()
            return 0
        return _take_part(desk, arguments.modality, stop)


@contextmanager
def _beside(home: homes.Home, desk: Desk | None, log: Any, reception: Reception) -> Iterator[tuple[str, ...]]:
    """The console and metrics while this serves, as ``console.toml`` says; and systemd is told."""
    from agent.console.app import Held, Lent, beside  # noqa: PLC0415 - a web framework, which releases never need
    from agent.edges import metrics  # noqa: PLC0415 - as above
    from protos.watching import watched_over  # noqa: PLC0415 - as above

    store, now = desk.site.books.store if desk else None, lambda: dt.datetime.now(dt.UTC)
    watched = metrics.Watched(home, read_ingestion(home), now, store, lambda: reception.listener)
    with ExitStack() as stack:
        console = stack.enter_context(beside(home, Held(desk) if desk else Lent(home), log, reception))
        page, live, ready = metrics.metrics(watched), metrics.live(watched), metrics.ready(watched)
        port = stack.enter_context(watched_over(console_settings.read(home.root), page, live, ready))
        yield (*([console] if console else []), *([f"metrics and health: port {port}"] if port else []))


def _take_part(desk: Desk, modality: str, stop: threading.Event) -> int:
    """Federated rounds, until told to stop; none at all on a machine that does not draw the noise that is claimed."""
    tell("audit", "does this machine draw the noise that is claimed?", False)
    gate(SystemEntropy())  # with the engine of both federated mechanisms
    try:
        greet(desk)
    except Forked:
        raise
    except Unreachable as error:  # it may come back; until then nothing is asked of it
        ERR.print(f"not yet: {error}", markup=False)
    close_interrupted(desk)
    keys, settings = desk.home.keys, desk.settings
    way = LinkConfig(settings.coordinator, keys, keys / "node.key", settings.proxy, demand=settings.confinement)
    link = Link(way)
    participant = Participant(desk.site, modality, SystemEntropy())
    if participant.resume():
        desk.log.info("run_resumed", run=participant.run)
    partners = desk.settings.partners
    known = Acquaintance(partners, desk.settings.least_partners) if partners else None
    part = Sum(participant, desk.home.sign_key(), known, SystemEntropy())
    over = Over()

    def heard(kind: str, run: str) -> None:
        link.wake()
        if kind == "over":
            over.say(run)

    session = Session(desk.door.session, heard)
    try:
        station = Station(lambda: _keep_in_touch(desk, link), desk.log, OUT.print, stop, over)
        return attend(link, part, station)
    finally:
        session.close()


def _keep_in_touch(desk: Desk, link: Link) -> None:
    """Greet the coordinator; the link opens its channel anew when the certificate is another one."""
    if greet(desk):
        link.renew()


def amend(arguments: argparse.Namespace) -> int:
    """Sign the site's policy of today: in its own ledger, and then at the coordinator."""
    with open_desk(arguments.home, lambda name, detail: tell(name, detail, False)) as desk:
        start_anew(desk)
        verdict = put_in_force(desk, desk.home.policy_text())
        print_verdict("", "amendment", verdict, False)
        return 0 if verdict.admitted else 1


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "amend": amend,
    "release": release,
    "send": send,
    "withdraw": withdraw_release,
    "inspect": inspect,
    "serve": serve,
}


def run(name: str, arguments: argparse.Namespace) -> int:
    """Run one command; what it expects to go wrong becomes a sentence and exit status 1."""
    try:
        return COMMANDS[name](arguments)
    except EXPECTED as error:
        ERR.print(f"refused: {error}", markup=False, soft_wrap=True)
        return 1
    except site_commands.EXPECTED as error:  # of the way in, which `serve` opens
        ERR.print(f"refused: {site_commands.sentence(error)}", markup=False, soft_wrap=True)
        return 1
