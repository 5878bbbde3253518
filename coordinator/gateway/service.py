"""The coordinator's gRPC service: one method for each call of ``protos/v1/gateway.proto``.

Who may call is :class:`coordinator.gateway.guard.Guard`'s business, what they decide is
:class:`coordinator.admission.AdmissionService`'s. Here requests become calls, and verdicts become replies with their
proofs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from grpc import StatusCode

from coordinator.admission import LedgerRollbackError, RequestRejectedError
from coordinator.enrolment.authority import JoinError
from coordinator.errors import CoordinatorConfigError
from coordinator.gateway.calls import Call, CallRejectedError
from coordinator.gateway.context import GatewayContext
from coordinator.gateway.guard import Guard
from coordinator.gateway.notifications import NotificationStreams
from coordinator.gateway.quotas import IdleTimeout, SiteQuota
from coordinator.sandbox.inspector_process import inspect
from coordinator.storage.site_heads import BadHeadError, HeadNotShownError, ShownHead, SiteTurnedBackError, to_show
from coordinator.storage.uploads import UploadError
from policies.accounting.claims import UnsupportedClaimError
from policies.ledger.entries import InvalidEntryError
from policies.ledger.state import KeyReusedError
from policies.review.policy import PolicyError
from policies.review.rules import Finding, Verdict
from policies.statements import ID, Release, StatementError
from protos.artifacts.byte_source import ArtifactFormatError
from protos.artifacts.chunks import CHUNK
from protos.artifacts.strict_safetensors import Architecture
from protos.common.dsse import EnvelopeError
from protos.encryption.hpke import SealedFileError, check_form
from protos.identity.certificates import CertificateError
from protos.identity.key_files import KeyFileError
from protos.protocol_version import COMPRESSED, HEADS, announced
from protos.v1 import gateway_pb2
from protos.v1.gateway_pb2_grpc import GatewayServicer

MAX_PART: Final = CHUNK + 4096
MOST_UPLOADS: Final = 2  # streams of one site at once
UPLOAD_S: Final = 120.0  # without a chunk, a stream gives its place back
FLEET_S: Final = 60.0  # without a part, either way, a call of Flower's ends
# The errors whose texts are written for whoever asked. Any other's text may hold anything, and stays here.
_IN_WORDS: Final = (
    JoinError,
    EnvelopeError,
    CertificateError,
    StatementError,
    UnsupportedClaimError,
    PolicyError,
    InvalidEntryError,
)
_TO_OPERATORS: Final = (CoordinatorConfigError, KeyFileError, KeyReusedError)


class Service(GatewayServicer):
    """One method for each call. In place of gRPC's context each gets the guard's :class:`Call`."""

    def __init__(self, counter: GatewayContext, sessions: NotificationStreams) -> None:
        """Nothing is open yet."""
        self.at, self.store = counter, counter.intake.register.store
        self.sessions, self._patience, self._places = sessions, IdleTimeout(), SiteQuota(MOST_UPLOADS)
        self.guard = Guard(self._admits, counter.intake.report, counter.log, self._patience)

    def _admits(self, site: str, number: str) -> bool:
        """By the ledger of this moment: the store may replace its state, so none is held on to."""
        return self.store.state.admits(site, number)

    def Hello(self, request: Any, call: Call) -> Any:
        """The federation's policy and the ledger's head; and what the site has cosigned is kept."""
        if request.cosigned:
            self._witnessed(call.peer.site, request.cosigned)
        self._greeted(call, request)
        shown = self.store.prove(request.seen)
        return gateway_pb2.HelloReply(
            policy=self.at.policy,
            checkpoint=shown.checkpoint,
            ledger_key=self.store.public,
            proof=shown.proof,
            epoch=shown.epoch,
            restored=shown.restored,
            restored_at=shown.restored_at,
            restored_proof=shown.restored_proof,
            own_seen=self._compared(lambda key: self.at.site_heads.seen(call.peer.site, key), call.peer.site),
        )

    def _greeted(self, call: Call, request: Any) -> None:
        """Keep the head that a greeting shows; the reply says from where, so one that says nothing is shown again."""
        site = call.peer.site
        if request.HasField("own"):
            try:
                self._own_head(site, request.own)
            except HeadNotShownError:
                self.at.log.warning("site_head_not_shown", site=site)
        elif not request.looks:
            self._compared(lambda key: self.at.site_heads.unshown(site, key), site)
            self._shows_heads(call)

    def _shows_heads(self, call: Call) -> None:
        """An agent of before heads is good for a site that never showed one.

        Raises:
            CallRejectedError: it has: the machine may have been turned back, older program and all.
        """
        site = call.peer.site
        seen = self._compared(lambda key: self.at.site_heads.seen(site, key), site)
        if seen and announced(call.context.invocation_metadata()).newest < HEADS:
            raise CallRejectedError(
                StatusCode.FAILED_PRECONDITION,
                "this site has shown the head of its own ledger, and this agent is too old to show it: "
                "upgrade this site's agent",
                "protocol",
            )

    def _own_head(self, site: str, own: Any) -> None:
        """Keep the head of a site's own ledger.

        Raises:
            CallRejectedError: the ledger went back.
            HeadNotShownError: nothing can be said of it.
        """
        shown = ShownHead(
            own.checkpoint, own.since, own.proof, own.restored, own.restored_at, tuple(own.restored_proof)
        )
        self._compared(lambda key: self.at.site_heads.take(site, key, shown), site)
        self.sessions.shows_head(site)

    def _compared(self, act: Callable[[bytes], Any], site: str) -> Any:
        try:
            return act(self.store.state.sites[site].sign_key)
        except BadHeadError as error:
            raise CallRejectedError(StatusCode.PERMISSION_DENIED, str(error), "bad_head") from None
        except SiteTurnedBackError as error:
            raise self._behind(site, str(error)) from None

    def _behind(self, site: str, why: str) -> CallRejectedError:
        self.at.log.error("site_turned_back", site=site)
        key = self.store.state.sites[site].sign_key
        self.at.site_heads.tell(site, key, lambda: self.guard.report(site, "turned_back"))
        return CallRejectedError(StatusCode.PERMISSION_DENIED, why, "turned_back")

    def _judged(self, call: Call, request: Any) -> None:
        """Each call that could release a patient brings the head along, and is judged by it, once one is kept.

        A greeting of before is no proof: the machine may have been turned back since.

        Args:
            call: the site's.
            request: a sealed one, perhaps with the head of the site's own ledger, which is kept.
        Raises:
            CallRejectedError: the ledger went back; or a head has to be shown first.
        """
        if not request.HasField("own"):
            self._not_behind(call, shown=False)
            return
        try:
            self._own_head(call.peer.site, request.own)
        except HeadNotShownError as error:
            raise _to_be_shown(str(error)) from None
        self._not_behind(call, shown=True)

    def _not_behind(self, call: Call, *, shown: bool) -> None:
        """From a site whose own ledger went back nothing is taken that could release a patient again.

        Args:
            call: the site's.
            shown: nothing more has to be known of the head than what is kept of it.
        Raises:
            CallRejectedError: it did; or it has shown a head before, and none since that could be compared.
        """
        site, heads = call.peer.site, self.at.site_heads
        if not shown:
            self._shows_heads(call)
        if why := heads.refused(site, self.store.state.sites[site].sign_key):
            raise self._behind(site, why)
        size = self._compared(lambda key: (heads.to_show if shown else heads.seen)(site, key), site)
        if size:
            raise _to_be_shown(to_show(size))

    def _witnessed(self, site: str, note: str) -> None:
        """Keep a head that a site cosigned; one that this ledger signed and does not hold proves a rollback."""
        try:
            if self.at.intake.witness(site, note):
                self.at.witnesses.keep(site, note)
        except LedgerRollbackError:
            self.store.stop()
            self.at.log.error("rolled_back", site=site)
            raise CallRejectedError(
                StatusCode.UNAVAILABLE, "the ledger is behind what this site has seen", "rolled_back"
            ) from None

    def Reserve(self, request: Any, call: Call) -> Any:
        """Price first."""
        self._judged(call, request)
        return self._sealed("reserve", self.at.intake.reserve, request, call)

    def Settle(self, request: Any, call: Call) -> Any:
        """A grant that will see no release. It only spends, so it is taken from a site that went back, too."""
        return self._sealed("settle", self.at.intake.settle, request, call)

    def Amend(self, request: Any, call: Call) -> Any:
        """A site's new policy; each is kept for ever, so they are counted like refusals."""
        self._judged(call, request)
        self.guard.count_violation(call.peer.site)
        return self._sealed("amend", self.at.intake.amend, request, call)

    def Present(self, request: Any, call: Call) -> Any:
        """After a restore: a receipt, or the word that these were all."""
        self._judged(call, request)
        return self._sealed("present", self.at.intake.present, request, call)

    def _sealed(self, name: str, act: Callable[[str, str, bytes], Verdict], request: Any, call: Call) -> Any:
        site = call.peer.site
        verdict = self._decide(site, lambda: act(site, request.key, request.envelope))
        return self._reply(name, site, request, verdict)

    def Outcome(self, request: Any, call: Call) -> Any:
        """What a key has led to."""
        found = self.at.intake.outcome(call.peer.site, request.key)
        if found is None:
            shown = self.store.prove(request.seen)
            return gateway_pb2.VerdictReply(known=False, seq=-1, checkpoint=shown.checkpoint, proof=shown.proof)
        return self._reply("outcome", call.peer.site, request, found[0])

    def Offer(self, request: Any, call: Call) -> Any:
        """Before a byte: is it a release that could be admitted, and is there room? Then which chunks are missing."""
        site, sealed = call.peer.site, request.sealed
        self._judged(call, sealed)

        def offer() -> Any:
            intake = self.at.intake
            release = intake.release(site, sealed.key, sealed.envelope)
            known = intake.answered(site, sealed.key, sealed.envelope)
            if known is not None:
                return gateway_pb2.OfferReply(decided=self._reply("offer", site, sealed, known))
            verdict = intake.preview_verdict(site, sealed.key, sealed.envelope, release)
            if not verdict.admitted:
                self.guard.count_violation(site)
                return gateway_pb2.OfferReply(decided=self._reply("offer", site, sealed, verdict))
            quota = intake.register.policy_of(site).max_artifact_bytes
            try:
                missing = self.at.uploads.offer(
                    site, release.artifact_sha256, release.artifact_bytes, tuple(request.chunks), quota
                )
            except UploadError as refusal:
                raise self._not_taken(site, sealed.key, refusal) from None
            return gateway_pb2.OfferReply(upload=release.artifact_sha256, missing=missing)

        try:
            return offer()
        except RequestRejectedError as refusal:
            self.guard.count_violation(site)
            return gateway_pb2.OfferReply(decided=self._reply("offer", site, sealed, Verdict((refusal.finding,))))

    def _not_taken(self, site: str, key: str, refusal: UploadError) -> Exception:
        """A refusal of the bytes themselves is written down; one that passes only asks for another try."""
        if refusal.lasting:
            return self.at.intake.unwelcome(site, key, Finding(refusal.rule, refusal.detail))
        return _passing(refusal)

    def Upload(self, parts: Iterator[Any], call: Call) -> Any:
        """Chunks of what was offered; those that are counted in the reply are durable.

        The head came with the offer, and comes again with :meth:`Submit`: without it chunks release nothing.
        """
        site, accepted = call.peer.site, 0
        self._not_behind(call, shown=True)
        with self._places.take(site), self._patience.over(call, UPLOAD_S) as go_on:
            first = next(parts, None)
            if first is None and self._patience.ended(call):
                return gateway_pb2.UploadReply()  # to nobody: a slow line is no offence
            if first is None or first.WhichOneof("part") != "upload":
                raise CallRejectedError(StatusCode.INVALID_ARGUMENT, "the first part names the upload", "bad_upload")
            try:
                for part in parts:
                    go_on()
                    if part.WhichOneof("part") != "chunk":
                        raise CallRejectedError(StatusCode.INVALID_ARGUMENT, "a chunk was expected", "bad_upload")
                    self.at.uploads.put(site, first.upload, part.chunk.index, part.chunk.data)
                    accepted += 1
                self.at.uploads.sync(site, first.upload)
            except UploadError as refusal:
                if not refusal.lasting:
                    raise _passing(refusal) from None
                raise CallRejectedError(StatusCode.INVALID_ARGUMENT, refusal.detail, refusal.rule) from None
        return gateway_pb2.UploadReply(accepted=accepted)

    def Submit(self, request: Any, call: Call) -> Any:
        """All chunks are there, whole and durable: look inside in a sandbox, review, write down, put on the shelf."""
        site = call.peer.site
        self._judged(call, request)
        return self._reply("submit", site, request, self._decide(site, lambda: self._submit(call, request)))

    def _look(self, call: Call, staged: Path, release: Release) -> list[Finding]:
        """Inside, in a sandbox, which takes its time: so whether the site is still welcome is asked once more.

        Raises:
            CallRejectedError: this machine is too busy; a set is made once, so the site sends it again.
        """
        earlier = announced(call.context.invocation_metadata()).newest < COMPRESSED
        found = inspect_artifact(staged, release, self.at.architectures, earlier=earlier)
        # it was not the processor's time that ran out: no file's fault, and no verdict
        if Finding("sandbox", "wall time") in found:
            raise CallRejectedError(
                StatusCode.FAILED_PRECONDITION, "the coordinator is too busy to look into it", "busy"
            )
        if not self._admits(call.peer.site, call.peer.number):
            found.append(Finding("revoked", "the certificate was revoked meanwhile"))
        return found

    def _submit(self, call: Call, request: Any) -> Verdict:
        intake, site = self.at.intake, call.peer.site
        release = intake.release(site, request.key, request.envelope)
        known = intake.answered(site, request.key, request.envelope)
        if known is not None:
            self.at.uploads.drop(site, release.artifact_sha256)  # left by a crash after the verdict
            return known
        try:
            staged = self.at.uploads.finish(site, release.artifact_sha256)
        except UploadError as refusal:
            raise self._not_taken(site, request.key, refusal) from None
        look = functools.partial(self._look, call, staged, release)
        staged_artifact = StagedArtifact(release.artifact_sha256, staged.stat().st_size, look)
        verdict = intake.admit(site, request.key, request.envelope, release, staged_artifact)
        self.at.shelf.settle(staged, release, request.envelope, verdict)
        self.at.uploads.drop(site, release.artifact_sha256)
        return verdict

    def Session(self, request: Any, call: Call) -> Iterator[Any]:
        """One long-lived stream for each site; a new one takes the old one's place."""
        del request
        yield from self.sessions.hold(call, lambda: self.at.intake.parted(call.peer.site))

    def Fleet(self, parts: Iterator[Any], call: Call) -> Iterator[Any]:
        """One call of Flower's Fleet API. It brings no head: the site has shown one since its session began."""
        self._not_behind(call, shown=self.sessions.head_shown(call.peer.site))
        with self._patience.over(call, FLEET_S) as go_on:
            for reply in self.at.fleet.handle(call.peer.site, self._heard(call, parts, go_on)):
                go_on()
                yield reply

    def _heard(self, call: Call, parts: Iterator[Any], go_on: Callable[[], None]) -> Iterator[Any]:
        """The parts of a call of Flower's; one that says nothing is none.

        Raises:
            CallRejectedError: nothing came for :data:`FLEET_S`; half a body is not taken for a whole one.
        """
        said = False
        for part in parts:
            said = True
            if part.path or part.data:
                go_on()
            yield part
        if said and self._patience.ended(call):  # a slow line is no offence
            raise CallRejectedError(StatusCode.DEADLINE_EXCEEDED, "the call's parts did not come in time", "silent")

    def Join(self, request: Any, call: Call) -> Any:
        """A hospital's signed request to take part, or a query for its state."""
        try:
            state = self.at.authority.join(call.peer.site, call.peer.leaf, request.envelope)
        except _IN_WORDS as refusal:
            self.at.log.warning("join_refused", site=call.peer.site, fault=type(refusal).__name__)
            raise CallRejectedError(StatusCode.FAILED_PRECONDITION, str(refusal)[:500], "join") from None
        self.at.log.info("join", site=call.peer.site, state=state.state)
        return gateway_pb2.JoinReply(**asdict(state))

    def Renew(self, request: Any, call: Call) -> Any:
        """A fresh certificate for a fresh key."""
        return self._certified(
            call, "renew", lambda: self.at.authority.renew(call.peer.site, call.peer.leaf, request.csr)
        )

    def Return(self, request: Any, call: Call) -> Any:
        """The same, after the certificate has ended: the site's signing key asks for it."""
        ask = lambda: self.at.authority.come_back(call.peer.site, call.peer.leaf, request.envelope)  # noqa: E731
        return self._certified(call, "return", ask)

    def _certified(self, call: Call, rule: str, ask: Callable[[], tuple[bytes, bytes]]) -> Any:
        try:
            chain, returning = ask()
        except _IN_WORDS as refusal:
            raise CallRejectedError(StatusCode.FAILED_PRECONDITION, str(refusal)[:500], rule) from None
        self.at.log.info("renewed", site=call.peer.site)
        return gateway_pb2.RenewReply(certificate=chain, returning_certificate=returning)

    def Launch(self, request: Any, call: Call) -> Iterator[Any]:
        """Operators: start, or follow, a federated run and stream what happens."""
        yield from _while(call, self.at.conducting.launch(request))

    def Plan(self, request: Any, call: Call) -> Any:
        """Operators: what a run would cost each site."""
        return self.at.conducting.plan(request)

    def Check(self, request: Any, call: Call) -> Any:
        """Operators: could each site of a job take part now?"""
        return self.at.conducting.check(request)

    def Watch(self, request: Any, call: Call) -> Iterator[Any]:
        """Operators: the events of a run, from the first."""
        yield from _while(call, self.at.conducting.watch(request.run))

    def Resume(self, request: Any, call: Call) -> Iterator[Any]:
        """Operators: go on with a stopped run."""
        yield from _while(call, self.at.conducting.resume(request.run))

    def Stop(self, request: Any, call: Call) -> Any:
        """Operators: no further round."""
        return gateway_pb2.StopReply(state=self.at.conducting.stop(request.run))

    def Invite(self, request: Any, call: Call) -> Any:
        """Operators: a one-use invitation for a site."""
        made = self._managed(lambda: self.at.authority.invite(request.site))
        self.at.log.info("invited", site=request.site)
        return gateway_pb2.InviteReply(invitation=made.body, token=made.token, fingerprint=made.fingerprint)

    def Enrolments(self, request: Any, call: Call) -> Any:
        """Operators: list invitations and pending approvals."""
        found = self._managed(self.at.authority.enrolments)
        return gateway_pb2.EnrolmentsReply(pending=[gateway_pb2.Pending(**asdict(p)) for p in found])

    def Approve(self, request: Any, call: Call) -> Any:
        """Operators: hand in persons' sealed approvals; when two roles agree, the site is enrolled."""
        self._managed(lambda: self.at.authority.enrol(request.site, request.serial, tuple(request.approvals)))
        self.at.enrolled(request.site)
        self.at.log.info("enrolled", site=request.site)
        return gateway_pb2.VerdictReply(admitted=True, seq=-1)

    def Revoke(self, request: Any, call: Call) -> Any:
        """Operators: put a certificate, or a whole site, on the deny-list; its open calls end at once."""
        if not ID.fullmatch(request.reason):
            raise CallRejectedError(StatusCode.INVALID_ARGUMENT, "a reason is one short word", "bad_reason")
        self._managed(lambda: self.at.authority.revoke(request.site, request.certificate, request.reason))
        ended = self.guard.close_calls(request.site)
        self.at.log.warning("revoked", site=request.site, rule=request.reason, seq=ended)
        return gateway_pb2.VerdictReply(admitted=True, seq=-1)

    def _managed(self, act: Callable[[], Any]) -> Any:
        """What an operator asks for; what speaks against it reaches the operator in words."""
        try:
            return act()
        except (*_IN_WORDS, *_TO_OPERATORS) as refusal:
            raise CallRejectedError(StatusCode.FAILED_PRECONDITION, str(refusal)[:500], "managed") from None

    def _decide(self, site: str, act: Callable[[], Verdict]) -> Verdict:
        """However it is refused, the peer's refusals are counted: each is an entry, and must not flood the ledger."""
        try:
            verdict = act()
        except RequestRejectedError as refusal:
            verdict = Verdict((refusal.finding,))
        if not verdict.admitted:
            self.guard.count_violation(site)
        return verdict

    def _reply(self, name: str, site: str, request: Any, verdict: Verdict) -> Any:
        found = self.at.intake.outcome(site, request.key)
        seq = found[1] if found else -1
        rules = [f.rule for f in verdict.findings]
        self.at.log.info("verdict", call=name, site=site, admitted=verdict.admitted, rules=rules)
        shown = self.store.prove(request.seen, seq)
        return gateway_pb2.VerdictReply(
            admitted=verdict.admitted,
            findings=[gateway_pb2.Finding(rule=f.rule, detail=f.detail) for f in verdict.findings],
            level=verdict.level,
            seq=seq,
            checkpoint=shown.checkpoint,
            known=True,
            proof=shown.proof,
            entry=shown.entry,
            inclusion=shown.included,
        )


def _to_be_shown(why: str) -> CallRejectedError:
    """A greeting says what is kept, and shows it; then the call is made again. The status is this refusal's alone."""
    return CallRejectedError(StatusCode.OUT_OF_RANGE, why, "not_shown")


def _passing(refusal: UploadError) -> CallRejectedError:
    """Offer it again: what was there is gone, not complete, or there is no room now."""
    return CallRejectedError(StatusCode.FAILED_PRECONDITION, refusal.detail, "busy")


@dataclass(frozen=True, slots=True)
class StagedArtifact:
    """A whole artifact on disk, for :meth:`coordinator.admission.AdmissionService.admit`."""

    sha256: str
    size: int
    look: Callable[[], list[Finding]]


def inspect_artifact(path: Path, release: Release, architectures: Path, *, earlier: bool = False) -> list[Finding]:
    """What a sandboxed reader says of an artifact; of one for a reader, only whether it has the form of sealed bytes.

    A model is one of the architectures that the operator has put into that folder (`pool architecture`), each as
    :meth:`protos.artifacts.strict_safetensors.Architecture.encode` writes it: names, shapes, types and what the file
    says of itself are theirs, or it is refused. ``earlier``: the site's agent is of before images were compressed,
    and so is its set.
    """
    if release.reader:
        return _sealed_form(path, release.reader)
    if release.artifact_type == "model":
        return _network(path, architectures)
    of_before = {"earlier": True} if earlier and release.artifact_type == "image-set" else {}
    found = inspect(path, release.artifact_type, of_before)
    return [] if found.ok else [Finding(found.rule, found.reason)]


def _network(path: Path, architectures: Path) -> list[Finding]:
    """A network's file is of an approved architecture, whose header it has byte for byte, and sound."""
    fitting, unread = _fitting(path.stat().st_size, architectures)
    if not fitting:
        damaged = f"; {unread} of the coordinator's files cannot be read" if unread else ""
        return [Finding("architecture", f"no approved architecture has this size: {_APPROVE}{damaged}")]
    with path.open("rb") as raw:
        approved = next((a for a in fitting if os.pread(raw.fileno(), len(a.header()), 0) == a.header()), None)
    found = inspect(path, "model", {"architecture": (approved or fitting[0]).encode().decode()})
    if approved is None and found.rule != "sandbox":  # the reason is a difference to one of this size
        return [Finding("architecture", f"{found.reason}; {_APPROVE}")]
    return [] if found.ok else [Finding(found.rule, found.reason)]


_APPROVE: Final = "the coordinator's operator approves one with `pool architecture`, before a release is made"


def _fitting(size: int, architectures: Path) -> tuple[list[Architecture], int]:
    """The approved architectures whose files have so many bytes; and how many files of the folder are none."""
    fitting, unread = [], 0
    for known in sorted(architectures.glob("*.json")):
        try:
            approved = Architecture.parse(known.read_bytes().removesuffix(b"\n"))
        except (ArtifactFormatError, OSError):
            unread += 1  # what cannot be read approves nothing
            continue
        if len(approved.header()) + approved.nbytes == size:
            fitting.append(approved)
    return fitting, unread


def _sealed_form(path: Path, reader: str) -> list[Finding]:
    """All that the coordinator can see of what is sealed to somebody else: its public head and its length."""
    try:
        check_form(path, reader)
    except SealedFileError as refusal:
        return [Finding("not_sealed", str(refusal))]
    return []


def _while(call: Call, events: Iterator[Any]) -> Iterator[Any]:
    """Pass events on while somebody listens."""
    for event in events:
        if not call.alive:
            return
        yield event
