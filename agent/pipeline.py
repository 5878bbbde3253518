"""The story on one page: price, read, make, seal, leave.

Nothing here knows a file, a socket or a clock: the site's books, its vault and the door are told in
(:class:`Site`). Whatever leaves a hospital leaves through :func:`leave`; whatever is unknown is spent.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agent.mechanisms.federated import Federated, FederatedMasked
from agent.mechanisms.ksame import KSame
from agent.nouns import Clusters, Cohort, Forked, SyntheticSet, Unreachable
from policies.accounting import epsilon_nano
from policies.claims import Claim, Gaussian
from policies.entries import InvalidEntry, Reserved
from policies.register import Register
from policies.review import TERMS, Finding, Verdict
from policies.review import price as price_of
from policies.statement import Release, Reservation, Settlement, Statement, encode, release_id
from protos.artifact import pack_images


class Refused(Exception):
    """A review said no; the verdict says why. Nothing left under it."""

    def __init__(self, where: str, verdict: Verdict) -> None:
        """``where`` is "site" or "coordinator"."""
        super().__init__("; ".join(f"{f.rule}: {f.detail}" for f in verdict.findings))
        self.where, self.verdict = where, verdict


class Waiting(Exception):
    """A release was made, and persons must approve it before it leaves."""

    def __init__(self, goods: Parcel, roles: frozenset[str]) -> None:
        """``roles`` is who must approve."""
        super().__init__(f"{goods.release.release} waits for approval by: {', '.join(sorted(roles))}")
        self.goods, self.roles = goods, roles


class Door(Protocol):
    """The one way out: the coordinator's service over mutual TLS."""

    def reserve(self, key: str, envelope: bytes) -> Verdict:
        """Hold the price at the coordinator."""

    def submit(self, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        """Hand in an artifact for review."""

    def settle(self, key: str, envelope: bytes) -> Verdict:
        """Say what became of a grant."""

    def outcome(self, key: str, envelope: bytes) -> Verdict | None:
        """What a key has led to, with the SHA-256 of the envelope sent; None if the coordinator never heard of it."""

    def amend(self, key: str, envelope: bytes) -> Verdict:
        """Hand in the site's new policy."""

    def present(self, key: str, envelope: bytes) -> Verdict:
        """After a restore: show a receipt, or say that these were all."""


class Vault(Protocol):
    """The site's encrypted store."""

    def cohort(self, modality: str, shape: tuple[int, int], without: Iterable[str] = ()) -> Cohort:
        """The eligible patients."""

    def opted_out(self) -> frozenset[str]:
        """Who wants no part, as of now."""

    def note(self, name: str) -> Any:
        """A private note."""

    def write_note(self, name: str, value: Any) -> None:
        """Store a private note."""


Mechanism = KSame | Federated | FederatedMasked


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


@contextlib.contextmanager
def if_reachable() -> Iterator[None]:
    """What follows can do without the coordinator's answer; but a ledger that forked is no mere silence.

    Raises:
        Forked: people have to look.
    """
    try:
        yield
    except Forked:
        raise
    except Unreachable:
        pass


def hold(site: Site, mechanism: Mechanism, modality: str, run: str = "") -> tuple[Reservation, bytes]:
    """Reserve the mechanism's claim in the site's own ledger. No image has been read.

    Returns:
        What was granted here, and the sealed reservation for the coordinator.
    Raises:
        Refused: by the site; the coordinator is told, and holds nothing.
        Forked: it could not be told.
    """
    reservation = Reservation(
        site.new_id("grant"), site.name, run, mechanism.name, mechanism.claim(), mechanism.components(), modality
    )
    envelope = site.seal(reservation)
    if run and site.books.policy_of(site.name).approvals:
        raise Refused("site", Verdict((Finding("approval", "the policy has persons approve; rounds do not wait"),)))
    site.say("price", f"{mechanism.name}: reserve in the site's ledger, then at the coordinator")
    verdict = site.books.reserve(f"reserve-{reservation.grant}", reservation, envelope)
    if not verdict.admitted:
        declined = settlement(reservation, "declined", verdict.findings[0].rule)
        with if_reachable():  # the refusal stands, whether or not the coordinator hears of it
            site.door.settle(f"settle-{reservation.grant}", site.seal(declined))
        raise Refused("site", verdict)
    return reservation, envelope


def price(site: Site, mechanism: Mechanism, modality: str) -> Reservation:
    """Reserve the mechanism's claim, in the site's ledger and then at the coordinator. No image has been read.

    A site's part in a run is reserved by the coordinator, for all sites at once (:mod:`agent.participant`).

    Returns:
        What was granted.
    Raises:
        Refused: by either ledger; the other one holds nothing.
        Unreachable: the site's grant stays held, and is spent at the next start.
    """
    reservation, envelope = hold(site, mechanism, modality)
    verdict = site.door.reserve(f"reserve-{reservation.grant}", envelope)
    if not verdict.admitted:
        let_go(site, reservation)
        raise Refused("coordinator", verdict)
    return reservation


def let_go(site: Site, reservation: Reservation | Reserved) -> None:
    """The coordinator refused the price: what the site's ledger holds is free again, since nothing was read."""
    site.books.free(reservation.grant, "refused", site.seal(settlement(reservation, "declined", "coordinator")))


def unused(site: Site, reservation: Reservation | Reserved) -> None:
    """Leave a run that was granted and in which nothing was begun: what is held here is free again.

    Only the process that reserved it knows that nothing was read. The coordinator hears the same word, and spends.
    """
    word = site.seal(settlement(reservation, "declined", "unused"))
    site.books.free(reservation.grant, "unused", word)
    with if_reachable():  # there it stays held until the run's end, which is as good as spent
        site.door.settle(f"settle-{reservation.grant}", word)


def give_up(site: Site, reservation: Reservation | Reserved, reason: str) -> None:
    """Close a grant that will see no release: it is spent, and the coordinator is told so.

    Raises:
        Unreachable: the site's own ledger is closed all the same; the coordinator's grant stays held.
    """
    site.books.close(reservation.grant, "expired")
    site.door.settle(f"settle-{reservation.grant}", site.seal(settlement(reservation, "expired", reason)))


def finish(site: Site, name: str, made: Claim | None) -> None:
    """Close a grant under which no more will be made: what was made is spent, and the rest given back here.

    Made, not what left: a round that failed has read images, and its failure was an answer. The coordinator spends
    the whole grant; the stricter of both books binds.
    """
    grant = site.books.store.state.grants[name]
    reserved = grant.reserved
    if grant.state != "held" or not isinstance(reserved, Reserved):
        return
    used = price_of(made, site.books.store.state.accounts[reserved.account]) if made else reserved.amount
    if not grant.sent <= used < reserved.amount:
        site.books.close(name, "finished")
    else:
        word = settlement(reserved, "finished", "finished", used)
        site.books.finish(word, site.seal(word))
    with if_reachable():  # there it stays held, which is as good as spent
        site.door.settle(f"settle-{name}", site.seal(settlement(reserved, "expired", "finished")))


def settlement(reservation: Reservation | Reserved, outcome: str, reason: str, used: int = 0) -> Settlement:
    """The word on a grant that will see no release."""
    r = reservation
    return Settlement(r.grant, r.site, r.run, r.mechanism, outcome, reason, used)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A release ready to leave: statement, envelope, artifact."""

    release: Release
    envelope: bytes
    artifact: bytes
    clear: bytes = b""  # the artifact before it was sealed to a reader, for persons to look at; "": it is in clear


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How an image set is written, and whether to one reader only."""

    pack: Callable[[NDArray[np.uint8], tuple[str, ...]], bytes] = pack_images
    reader: str = ""  # fingerprint of the reader's key
    seal: Callable[[bytes], bytes] | None = None


def parcel(site: Site, draft: Release, artifact: bytes) -> Parcel:
    """Complete the statement with the artifact's digest and the claim's epsilon, and seal it."""
    account, epsilon, delta = site.books.account(site.name, draft.claim), None, None
    if isinstance(draft.claim, Gaussian):
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


def wrapped(site: Site, draft: Release, synthetic: SyntheticSet, wrapping: Wrapping) -> Parcel:
    """A synthetic set as a parcel, sealed to its reader if there is one."""
    clear = wrapping.pack(synthetic.images, synthetic.labels)
    if wrapping.seal is None:
        return parcel(site, draft, clear)
    return replace(parcel(site, replace(draft, reader=wrapping.reader), wrapping.seal(clear)), clear=clear)


def draft_of(site: Site, mechanism: Mechanism, grant: str, modality: str, claim: Claim) -> Release:
    """All but the artifact's digest and the epsilon, which :func:`parcel` fills in."""
    return Release(
        release=release_id(site.name, grant, 0),
        grant=grant,
        site=site.name,
        run="",
        round=0,
        mechanism=mechanism.name,
        artifact_type=TERMS[mechanism.name].artifact_type,
        artifact_sha256="0" * 64,
        artifact_bytes=0,
        claim=claim,
        epsilon_nano=None,
        delta=None,
        components=mechanism.components(),
        # k-Same compares every representative with the patients' images, and refuses a copy (P7)
        vetted_against="private" if isinstance(mechanism, KSame) else "nothing",
        modality=modality,
        reid_rate=None,
        approvals={},
        reader="",
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
        verdict = site.door.outcome(f"submit-{sent.release}", sent.envelope)
        if verdict is None:
            continue
        try:
            site.books.record(f"verdict-{sent.release}", site.read(envelope), envelope, verdict)
        except InvalidEntry:  # a verdict that contradicts an earlier one: the books end here, the grant is spent
            site.books.close(sent.grant, "failed")


def release_synthetic(
    site: Site, mechanism: KSame, modality: str, rng: np.random.Generator, wrapping: Wrapping | None = None
) -> tuple[Parcel, Verdict]:
    """A k-anonymous synthetic set, from price to verdict; as PNG in clear unless ``wrapping`` says otherwise.

    Raises:
        Refused: the price was refused; nothing was read.
        CohortTooSmall: the grant is spent, since images were read.
        Unreachable: no verdict yet.
    """
    grant = price(site, mechanism, modality)
    try:
        record = site.vault.note("releases") or []
        site.say("read", "the eligible patients, from the vault")
        cohort = site.vault.cohort(modality, mechanism.basis.shape, ever_released(record))
        site.say("make", f"{mechanism.name}: latents, clusters of {mechanism.k} patients or more, representatives")
        synthetic, clusters = mechanism.run(cohort, rng)
        goods = wrapped(
            site,
            draft_of(site, mechanism, grant.grant, modality, mechanism.claim()),
            synthetic,
            wrapping or Wrapping(),
        )
        site.vault.write_note("releases", [*record, _remember(goods.release.release, clusters)])
        still_in(site, {person for cluster in clusters.members for person in cluster})
        needed = site.books.policy_of(site.name).approvals
        if needed:
            wait(site, goods)
            raise Waiting(goods, needed)
        site.say("leave", "the site's own review, then submit and wait for the verdict")
        return goods, leave(site, goods)
    except (Unreachable, Waiting):
        raise  # the outcome may be a yes: the next start asks for it; or persons decide
    except Exception:  # whatever it was: the grant is spent, and the fault is passed on
        with if_reachable():  # what went wrong is what the operator must hear
            give_up(site, grant, "failed")
        raise


def still_in(site: Site, persons: Set[str]) -> None:
    """What was made of patients does not leave once one of them has opted out; its price stays spent.

    Raises:
        Refused: one has.
    """
    if not site.vault.opted_out().isdisjoint(persons):
        raise Refused("site", Verdict((Finding("opted_out", "a patient it was made from has opted out since"),)))


def wait(site: Site, goods: Parcel) -> None:
    """Keep a release in the vault until persons have decided; its grant stays held, over restarts too."""
    pending = site.vault.note("pending") or {}
    kept = {
        "grant": goods.release.grant,
        "statement": encode(goods.release).decode(),
        "artifact": base64.b64encode(goods.artifact).decode(),
        "clear": base64.b64encode(goods.clear).decode(),
    }
    site.vault.write_note("pending", {**pending, goods.release.release: kept})


def _remember(release: str, clusters: Clusters) -> dict[str, Any]:
    return {"release": release, "clusters": [list(c) for c in clusters.members]}


def ever_released(record: Sequence[dict[str, Any]]) -> set[str]:
    """Pseudonyms that are in a released cluster already.

    Overlapping clusters of two releases can be intersected (P5), and a cluster made again from newer images can
    be differenced with its older image. So a patient takes part once, ever, as claim level B says.
    """
    return {pseudonym for one in record for cluster in one["clusters"] for pseudonym in cluster}
