"""The story on one page: price, read, make, seal, leave.

Nothing here knows a file, a socket or a clock: the site's books, its vault and the door are told in
(:class:`Site`). Whatever leaves a hospital leaves through :func:`leave`; whatever is unknown is spent.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from agent.mechanisms.federated import Federated
from agent.mechanisms.ksame import KSame
from agent.nouns import Clusters, Cohort, Unreachable, Update
from agent.stages.finetune import Entropy
from policies.accounting import epsilon_nano
from policies.claims import Claim, SubsampledGaussian
from policies.ledger import InvalidEntry, Reserved
from policies.register import Register
from policies.review import Finding, Verdict
from policies.statement import ID, Release, Reservation, Settlement, Statement, release_id
from protos.artifact import pack_images, pack_vector


class Refused(Exception):
    """A review said no; the verdict says why. Nothing left under it."""

    def __init__(self, where: str, verdict: Verdict) -> None:
        """``where`` is "site" or "coordinator"."""
        super().__init__("; ".join(f"{f.rule}: {f.detail}" for f in verdict.findings))
        self.where, self.verdict = where, verdict


class Door(Protocol):
    """The one way out: the coordinator's service over mutual TLS."""

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        """Hold the price at the coordinator."""

    def submit(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        """Hand in an artifact for review."""

    def settle(self, key: str, envelope: bytes) -> Verdict:
        """Say what became of a grant."""

    def outcome(self, key: str) -> Verdict | None:
        """What a key has led to; None if the coordinator never heard of it."""


class Vault(Protocol):
    """The site's encrypted store."""

    def cohort(self, modality: str, shape: tuple[int, int], without: Iterable[str] = ()) -> Cohort:
        """The eligible patients."""

    def note(self, name: str) -> Any:
        """A private note."""

    def write_note(self, name: str, value: Any) -> None:
        """Store a private note."""


@dataclass(frozen=True, slots=True)
class Site:
    """One hospital's agent, put together by ``__main__``."""

    name: str
    books: Register  # the site's own ledger: the hard gate
    door: Door
    vault: Vault
    seal: Callable[[Statement], bytes]
    read: Callable[[bytes], Release]  # back from an envelope that this site sealed
    new_id: Callable[[str], str]  # prefix -> fresh opaque id
    say: Callable[[str, str], None]  # step, detail: progress for people


def price(site: Site, mechanism: KSame | Federated, run: str = "") -> Reservation:
    """Reserve the mechanism's claim, in the site's ledger and then at the coordinator. No image has been read.

    Returns:
        What was granted.
    Raises:
        Refused: by either ledger; the other one holds nothing.
        Unreachable: the site's grant stays held, and is spent at the next start.
    """
    reservation = Reservation(
        site.new_id("grant"), site.name, run, mechanism.name, mechanism.claim(), mechanism.components()
    )
    envelope = site.seal(reservation)
    site.say("price", f"{mechanism.name}: reserve in the site's ledger, then at the coordinator")
    verdict = site.books.reserve(f"reserve-{reservation.grant}", reservation, envelope)
    if not verdict.admitted:
        declined = settlement(reservation, "declined", verdict.findings[0].rule)
        with contextlib.suppress(Unreachable):  # the refusal stands, whether or not the coordinator hears of it
            site.door.settle(f"settle-{reservation.grant}", site.seal(declined))
        raise Refused("site", verdict)
    verdict = site.door.reserve(f"reserve-{reservation.grant}", envelope)
    if not verdict.admitted:
        site.books.free(reservation.grant, site.seal(settlement(reservation, "declined", "coordinator")))
        raise Refused("coordinator", verdict)
    return reservation


def give_up(site: Site, reservation: Reservation | Reserved, reason: str) -> None:
    """Close a grant that will see no release: it is spent, and the coordinator is told so.

    Raises:
        Unreachable: the site's own ledger is closed all the same; the coordinator's grant stays held.
    """
    site.books.close(reservation.grant, "expired")
    site.door.settle(f"settle-{reservation.grant}", site.seal(settlement(reservation, "expired", reason)))


def settlement(reservation: Reservation | Reserved, outcome: str, reason: str) -> Settlement:
    """The word on a grant that will see no release."""
    r = reservation
    return Settlement(r.grant, r.site, r.run, r.mechanism, outcome, reason)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A release ready to leave: statement, envelope, artifact."""

    release: Release
    envelope: bytes
    artifact: bytes


def parcel(site: Site, draft: Release, artifact: bytes) -> Parcel:
    """Complete the statement with the artifact's digest and the claim's epsilon, and seal it."""
    account, epsilon, delta = site.books.account(site.name, draft.claim), None, None
    if isinstance(draft.claim, SubsampledGaussian):
        delta = account.opened.delta
        epsilon = epsilon_nano(draft.claim, float(delta), account.opened.order)
    release = replace(
        draft,
        artifact_sha256=hashlib.sha256(artifact).hexdigest(),
        artifact_bytes=len(artifact),
        epsilon_nano=epsilon,
        delta=delta,
    )
    return Parcel(release, site.seal(release), artifact)


def _draft(site: Site, mechanism: KSame | Federated, grant: str, artifact_type: str, claim: Claim) -> Release:
    return Release(
        release=release_id(site.name, grant, 0),
        grant=grant,
        site=site.name,
        run="",
        round=0,
        mechanism=mechanism.name,
        artifact_type=artifact_type,
        artifact_sha256="0" * 64,
        artifact_bytes=0,
        claim=claim,
        epsilon_nano=None,
        delta=None,
        components=mechanism.components(),
        # k-Same compares every representative with the patients' images, and refuses a copy (P7)
        vetted_against="private" if isinstance(mechanism, KSame) else "nothing",
    )


def set_out(site: Site, goods: Parcel) -> None:
    """The site's own review of a finished parcel, and the entry that it leaves; durable before a byte of it does.

    Raises:
        Refused: by the site; the refusal is in its ledger, and the coordinator never sees the parcel.
    """
    verdict = site.books.examine(goods.release, goods.envelope)
    if not verdict.admitted:
        site.books.record(f"verdict-{goods.release.release}", goods.release, goods.envelope, verdict)
        raise Refused("site", verdict)
    site.books.send(goods.release, goods.envelope)
    site.vault.write_note("ledger", site.books.store.state.size)  # so that an older ledger is noticed


def leave(site: Site, goods: Parcel) -> Verdict:
    """The one door: hand the parcel in, and write the coordinator's verdict into the site's own ledger.

    Raises:
        Refused: by the site's own review.
        Unreachable: the outcome is unknown; :func:`recover` asks for it at the next start.
    """
    set_out(site, goods)
    verdict = site.door.submit(f"submit-{goods.release.release}", goods.envelope, goods.artifact)
    site.books.record(f"verdict-{goods.release.release}", goods.release, goods.envelope, verdict)
    return verdict


def ask(site: Site) -> None:
    """Write down the coordinator's verdict on everything that set out and has none here yet.

    Raises:
        Unreachable: no answer; what is known by then is written.
    """
    for sent, envelope in site.books.unanswered():
        verdict = site.door.outcome(f"submit-{sent.release}")
        if verdict is None:
            continue
        try:
            site.books.record(f"verdict-{sent.release}", site.read(envelope), envelope, verdict)
        except InvalidEntry:  # a verdict that contradicts an earlier one: the books end here, the grant is spent
            site.books.close(sent.grant, "failed")


def release_synthetic(
    site: Site, mechanism: KSame, modality: str, rng: np.random.Generator
) -> tuple[Parcel, Verdict]:
    """A k-anonymous synthetic set, from price to verdict.

    Raises:
        Refused: the price was refused; nothing was read.
        CohortTooSmall: the grant is spent, since images were read.
        Unreachable: no verdict yet.
    """
    grant = price(site, mechanism)
    try:
        record = site.vault.note("releases") or []
        site.say("read", "the eligible patients, from the vault")
        cohort = site.vault.cohort(modality, mechanism.basis.shape, ever_released(record))
        site.say("make", f"{mechanism.name}: latents, clusters of {mechanism.k} patients or more, representatives")
        synthetic, clusters = mechanism.run(cohort, rng)
        goods = parcel(
            site,
            _draft(site, mechanism, grant.grant, "image-set", mechanism.claim()),
            pack_images(synthetic.images, synthetic.labels),
        )
        site.vault.write_note("releases", [*record, _remember(goods.release.release, clusters)])
        site.say("leave", "the site's own review, then submit and wait for the verdict")
        return goods, leave(site, goods)
    except Unreachable:
        raise  # the outcome may be a yes: the next start asks for it
    except Exception:  # whatever it was: the grant is spent, and the fault is passed on
        with contextlib.suppress(Unreachable):  # what went wrong is what the operator must hear
            give_up(site, grant, "failed")
        raise


def _remember(release: str, clusters: Clusters) -> dict[str, Any]:
    return {"release": release, "clusters": [list(c) for c in clusters.members]}


def ever_released(record: Sequence[dict[str, Any]]) -> set[str]:
    """Pseudonyms that are in a released cluster already.

    Overlapping clusters of two releases can be intersected (P5), and a cluster made again from newer images can
    be differenced with its older image. So a patient takes part once, ever, as claim level B says.
    """
    return {pseudonym for one in record for cluster in one["clusters"] for pseudonym in cluster}


def recover(site: Site) -> list[str]:
    """At every start: ask for missing verdicts; every grant that is still without an end is spent.

    Patients of a release that never set out may take part again; those of one that did may not, whatever became
    of it, since its images may have been seen.

    Returns:
        The grants that were closed.
    Raises:
        Unreachable: the coordinator could not be asked; nothing new is possible before it can.
    """
    held = site.books.held()
    ask(site)
    for reserved in site.books.held():
        give_up(site, reserved, "restart")
    known = {*site.books.store.state.sent, *site.books.store.state.releases}
    record = site.vault.note("releases") or []
    site.vault.write_note("releases", [one for one in record if one["release"] in known])
    return [reserved.grant for reserved in held]


@dataclass(slots=True)
class Participant:
    """A site's part in one federated run: one grant, one update a round, each update made once."""

    site: Site
    modality: str
    entropy: Entropy
    run: str = ""
    grant: str = ""
    mechanism: Federated | None = None
    rounds_trained: int = 0
    last: tuple[int, Parcel, Update] | None = None  # the newest round's update, sent again if asked again

    def join(self, run: str, mechanism: Federated) -> None:
        """Price the whole run. Asked again for the run it is in, it says yes again and reserves nothing.

        Raises:
            Refused: by either ledger, or because the run was priced before a restart and is spent, has no proper
                name, or is for more patients than delta allows (P1).
        """
        if run == self.run and mechanism == self.mechanism:
            return
        delta = float(self.site.books.account(self.site.name, mechanism.claim()).opened.delta)
        findings = []
        if not ID.fullmatch(run):
            findings.append(Finding("run", "a run's name is a short lower-case identifier"))
        if run in self.site.books.runs():
            findings.append(Finding("run_spent", "this run was priced before; its grant is spent"))
        if not delta * mechanism.public_patients < 1:
            findings.append(Finding("delta", "delta must be below 1 / patients, by the job's public bound"))
        if findings:
            raise Refused("site", Verdict(tuple(findings)))
        self.part()
        self.grant = price(self.site, mechanism, run).grant
        self.run, self.mechanism, self.rounds_trained, self.last = run, mechanism, 0, None

    def part(self) -> None:
        """Leave the run this site is in: write down what is known of it, and spend its grant."""
        if self.grant:
            with contextlib.suppress(Unreachable):
                ask(self.site)
            self.site.books.close(self.grant, "expired")
        self.run, self.grant, self.mechanism, self.rounds_trained, self.last = "", "", None, 0, None

    def train(self, run: str, round_index: int, start: Update) -> tuple[Parcel, Update]:
        """One round: train on the site's patients from ``start``, and seal the new parameters.

        Raises:
            Refused: not the run that was priced, or a round out of order.
        """
        if self.last is not None and run == self.run and self.last[0] == round_index:
            return self.last[1:]
        mechanism = self.mechanism
        in_order = self.last is None or round_index > self.last[0]
        if mechanism is None or run != self.run or not in_order or not self.rounds_trained < mechanism.rounds:
            raise Refused("site", Verdict((Finding("round", "this round is not covered by a grant"),)))
        self.rounds_trained += 1  # before an image is read: a failure in the middle counts as released
        cohort = self.site.vault.cohort(self.modality, mechanism.shape)
        update = mechanism.run_round(cohort, start, self.entropy)
        claim = replace(mechanism.claim(), steps=mechanism.steps_per_round * self.rounds_trained)
        draft = replace(
            _draft(self.site, mechanism, self.grant, "update", claim),
            release=release_id(self.site.name, self.grant, round_index),
            run=run,
            round=round_index,
        )
        goods = parcel(self.site, draft, pack_vector(update.vector))
        set_out(self.site, goods)
        self.last = (round_index, goods, update)
        self.site.say("round", f"{round_index} of {mechanism.rounds}: update sealed and handed to the link")
        return goods, update

    def follow(self) -> bool:
        """Ask for the verdicts on updates that went out with the link; True when the run's grant is closed.

        Raises:
            Unreachable: not now; ask again later.
        """
        ask(self.site)
        waiting = any(sent.grant == self.grant for sent, _ in self.site.books.unanswered())
        if self.mechanism is None or self.rounds_trained < self.mechanism.rounds or waiting:
            return False
        self.site.books.close(self.grant, "released")
        self.mechanism, self.grant = None, ""
        return True
