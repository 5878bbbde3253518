"""The story on one page: price, read, make, seal, leave.

Nothing here knows a file, a socket or a clock: the site's books, its vault and the door are told in
(:class:`Site`). Whatever leaves a hospital leaves through :func:`leave`; whatever is unknown is spent.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from agent.foreseen import RefusedBeforehandError, of_clusters, of_configuration, of_heads, refuse
from agent.grants import give_up, if_reachable, price
from agent.kept import NotSentError, forget, keep
from agent.mechanisms import Remodel, Resumable, Synthesis
from agent.mechanisms.bench import Bench
from agent.mechanisms.remodel import Remodelled
from agent.nouns import Cohort, CohortTooSmall, Forked, NotKept, Selection, SyntheticSet, Unreachable, VolumeSet
from agent.release_record import RECORD, older_vault
from agent.released import (
    freeze,
    kept_clusters,
    out_of_it,
    remember,
    remember_persons,
    retire_clusters,
    rule_of,
    searched,
    still_enough,
    together,
    unmake,
)
from agent.site import Parcel, Refused, Site, Waiting
from agent.stages.average import majority
from agent.stages.cluster import possible
from agent.stages.deface import Examine
from agent.stages.distil import Distilled, Review
from agent.stages.noise import Entropy
from agent.stages.vet import could_show
from agent.training.loop import OtherRun
from agent.unfinished import Unfinished, begin, end, going_on, place_of, same_dice
from agent.vetted import Examiner, Inspection, Passed, TooFewToVet, compared, down, stated, up
from agent.wrapping import Wrapping, draft_of
from policies.accounting import epsilon_nano
from policies.claims import Gaussian
from policies.entries import InvalidEntry, Reserved
from policies.review import Finding, Verdict
from policies.statement import Release, Reservation, claim_json, release_id
from protos.shards import Nifti, pack_shard

HandIn = Callable[[str, bytes, bytes], Verdict]  # of the door: key, envelope, artifact
_UNSHOWN: Final = "suppressed, or dropped as like somebody (by chance, too) or as not to be judged"


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
    return enclosed(site, draft, wrapping.pack(synthetic.images, synthetic.labels), wrapping)


def enclosed(site: Site, draft: Release, clear: bytes, wrapping: Wrapping) -> Parcel:
    """An artifact as a parcel, sealed to its reader if there is one."""
    if wrapping.seal is None:
        return parcel(site, draft, clear)
    return replace(parcel(site, replace(draft, reader=wrapping.reader), wrapping.seal(clear)), clear=clear)


def set_out(site: Site, goods: Parcel) -> None:
    """The site's own review of a finished parcel, and the entry that it leaves; durable before a byte of it does.

    Raises:
        Refused: by the site; the refusal is in its ledger, and the coordinator never sees the parcel.
    """
    verdict = site.books.examine(goods.release, goods.envelope)
    older = older_vault(site.vault.note(RECORD), site.books.store.state, goods.release.mechanism)
    verdict = replace(
        verdict, findings=(*verdict.findings, *older)
    )  # brought back since the price, or while it waited
    if not verdict.admitted:
        site.books.record(f"verdict-{goods.release.release}", goods.release, goods.envelope, verdict)
        raise Refused("site", verdict)
    site.books.send(goods.release, goods.envelope)
    site.vault.write_note("ledger", site.books.store.state.size)  # so that an older ledger is noticed


def leave(site: Site, goods: Parcel, hand_in: HandIn | None = None) -> Verdict:
    """The one door: hand the parcel in, and write the coordinator's verdict into the site's own ledger.

    Raises:
        Refused: by the site's own review; its grant is spent, and nothing of it is kept.
        NotSentError: the outcome is unknown; it is sent again, or :func:`agent.recovery.recover` hears of it.
    """
    try:
        set_out(site, goods)
    except Refused:
        held = site.books.store.state.grants.get(goods.release.grant)
        if held is not None and isinstance(held.reserved, Reserved):
            with if_reachable():
                give_up(site, held.reserved, "failed")
        forget(site, goods.release.release)
        raise
    return submit(site, goods, hand_in or site.door.submit)


def submit(site: Site, goods: Parcel, hand_in: HandIn) -> Verdict:
    """Hand in what has set out, for the first time or again: the coordinator takes it once.

    Raises:
        NotSentError: the outcome is unknown; what is kept stays kept.
    """
    name = goods.release.release
    try:
        verdict = hand_in(f"submit-{name}", goods.envelope, goods.artifact)
    except Forked:
        raise
    except Unreachable as error:
        raise NotSentError(name, str(error)) from error
    site.books.record(f"verdict-{name}", goods.release, goods.envelope, verdict)
    with contextlib.suppress(NotKept):  # a full disk changes no verdict: the next start forgets it
        forget(site, name)
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
    site: Site,
    mechanism: Synthesis,
    modality: str | Selection,
    rng: np.random.Generator,
    wrapping: Wrapping | None = None,
    inspection: Inspection | None = None,
) -> tuple[Parcel, Verdict]:
    """A k-anonymous synthetic set, from price to verdict; as PNG in clear unless ``wrapping`` says otherwise.

    What an earlier release showed of a cluster is shown again as it was, or never again (:mod:`agent.stages.freeze`);
    the mechanism sees only patients whom no release has shown, and of ids that may be one patient's only one
    (:mod:`agent.edges.alike`). With an ``inspection`` everything that would leave is compared with whatever is
    comparable (:mod:`agent.vetted`), and the statement says what that left, and found. Killed before it was made, or
    stopped by a full disk, it is made again by the same dice under its grant.

    Raises:
        RefusedBeforehandError: policy or disk could not take it; nothing was read.
        Refused: k is none of those that were searched, or the price was refused; nothing was read.
        CohortTooSmall: nothing was priced; or, where only the images show it, the grant is spent.
        KnowsNobody: the vetting misses copies that were planted; the grant is spent.
        Unfinished: another making was interrupted; or too few of this one's patients count by now.
        NotKept: the vault failed; say it again when it can be written.
        NotSentError: it is made and kept; no verdict yet.
    """
    selection = Selection(modality, mechanism.shape) if isinstance(modality, str) else modality
    wrapping = wrapping or Wrapping()
    begun = going_on(site, form := made_as(mechanism, rule_of(selection)))
    if begun:  # what it had remembered of a set that was not kept
        unmake(site, release_id(site.name, begun[0].grant, 0))
    again, taken = kept_clusters(site, mechanism, selection)
    tried, wide = searched(site, selection.modality), compared(selection)
    among = begun[1] if begun else None  # who came since it was begun is in the next one
    _possible(site, mechanism, selection, taken, among)
    if inspection and not could_show(len(site.vault.roster(wide))):
        raise TooFewToVet  # known beforehand, too
    refuse(site, of_clusters(site, mechanism, selection, wrapping, among))
    grant = begun[0] if begun else price(site, mechanism, selection.modality)
    with spent_unless_kept(site, grant):
        site.say("read", "the eligible patients, from the vault")
        everybody = site.vault.cohort(selection).patients
        out = out_of_it(site, selection, taken, among)  # asked again: more may have come since
        free = tuple(patient for patient in everybody if patient.pseudonym not in out)
        cohort = Cohort(tuple(patient for patient in free if among is None or patient.pseudonym in among))
        others = tuple(patient for patient in everybody if patient.pseudonym in out)
        rng = same_dice(site, rng) if begun else rng
        begin(site, grant.grant, form, (patient.pseudonym for patient in cohort.patients), dice=rng)
        known = everybody if not inspection or wide == selection else site.vault.cohort(wide).patients
        examiner = Examiner.of(known, inspection, rng) if inspection else None
        site.say("make", f"{mechanism.name}: latents, clusters of {mechanism.k} patients or more, representatives")
        made, clusters = mechanism.run(cohort, rng, others)
        fresh = freeze(made, clusters, mechanism, selection)
        passed = examiner.examine(fresh, again, partial(retire_clusters, site)) if examiner else Passed(fresh, again)
        if missing := len(cohort.patients) - sum(len(cluster.members) for cluster in passed.fresh):
            # said to the site's own operator, and to nobody else
            site.say("make", f"{missing} patients are behind no picture: their clusters were {_UNSHOWN}")
        draft = draft_of(site, mechanism, grant.grant, selection.modality, mechanism.claim())
        draft = passed.stated(replace(draft, menu=",".join(map(str, tried))))
        leaving = [*passed.fresh, *passed.again]
        goods = wrapped(site, draft, together(leaving, rng), wrapping)
        remember(site, goods.release.release, passed.fresh, passed.again)
        still_in(site, {person for cluster in leaving for person in cluster.members})
        keep(site.vault, goods.release, goods.artifact, goods.clear, frozenset())
    end(site)
    return goods, depart(site, goods)


def _possible(
    site: Site, mechanism: Synthesis, selection: Selection, taken: frozenset[str], among: Set[str] | None
) -> None:
    """What forbids it is known from labels alone: nothing is priced, and nobody outside hears of it.

    Raises:
        Refused: k is none of those that were searched.
        CohortTooSmall: no cluster can be made.
        Unfinished: nor of those ``among`` whom a making goes on: its grant stays held until a person decides.
    """
    tried = searched(site, selection.modality)
    if tried and mechanism.k not in tried:
        raise Refused("site", Verdict((Finding("menu", "k is none of those that were tried: tune with it first"),)))
    labels = [majority(own) for own in site.vault.roster(selection, out_of_it(site, selection, taken, among), among)]
    if not possible(labels, mechanism.k, mechanism.l_diversity):
        if among is None:
            raise CohortTooSmall
        raise Unfinished(
            "too few patients of what was interrupted count by now, since ids were found to be alike or studies are "
            "held: decide (`cohort --apart`, `cohort --lift`) and say it again, or give it up with --anew, and its "
            "budget stays spent"
        )


@contextlib.contextmanager
def spent_unless_kept(site: Site, grant: Reserved | Reservation, places: Iterable[str] = ()) -> Iterator[None]:
    """Around a making, until what was made is kept: whatever goes wrong, its grant is spent, and the fault told.

    But for a fault of the site's store or disk, which is none of the making's: its grant stays held, and it goes on.
    """
    try:
        yield
    except (NotKept, OSError, RefusedBeforehandError):
        raise
    except OtherRun:  # nor is a picture that came or went meanwhile
        raise Unfinished(
            "the patients' pictures have changed since it was begun: give it up with --anew; its budget stays spent"
        ) from None
    except Exception:  # and nothing of what was drawn stays
        end(site, places)
        with if_reachable():  # what went wrong is what the operator must hear
            give_up(site, grant, "failed")
        raise


def release_resumable(
    site: Site,
    mechanism: Resumable,
    selection: Selection,
    entropy: Entropy,
    wrapping: Wrapping | None = None,
    shown: Callable[[Review], None] = lambda _: None,
) -> tuple[Parcel, Verdict]:
    """What takes long to make, from price to verdict: sets under differential privacy, and distillation.

    Killed in the middle, or stopped by a full disk, it goes on under the grant that it had (:mod:`agent.unfinished`);
    nothing is spent twice.
    A set with an epsilon is compared with no patient (P7), and nothing but the set leaves: no loss, figure or size of
    the cohort. What was distilled is ``shown`` to the site's reviewer first; what has no epsilon says how much of it
    an unseen verifier takes for a patient, and of which power the vetting was.

    Raises:
        RefusedBeforehandError: policy or disk could not take it; nothing was read.
        Refused: the price, or somebody who takes part has opted out since it was begun.
        Unfinished: another making was interrupted; or the pictures of this one's patients have changed meanwhile.
        NotKept: the vault failed; say it again when it can be written.
        NotSentError: it is made and kept; no verdict yet.
    """
    wrapping = wrapping or Wrapping()
    begun = going_on(site, form := made_as(mechanism, rule_of(selection)))
    refuse(site, of_configuration(site, mechanism, selection, wrapping))
    grant = begun[0] if begun else price(site, mechanism, selection.modality)
    places = [place_of(name, grant.grant) for name in mechanism.places]
    with spent_unless_kept(site, grant, places):
        site.say("read", "the eligible patients, from the vault")
        cohort = site.vault.cohort(selection)
        if begun:  # who came meanwhile is in the next one
            cohort = Cohort(tuple(patient for patient in cohort.patients if patient.pseudonym in begun[1]))
        persons = begun[1] if begun else frozenset(patient.pseudonym for patient in cohort.patients)
        still_in(site, persons)  # who opts out of half a training is in the other half for ever
        begin(site, grant.grant, form, persons, places)
        site.say("make", f"{mechanism.name}: {'go on where it was interrupted' if begun else 'from the start'}")
        bench = Bench(lambda name: site.vault.place(place_of(name, grant.grant)), _told(site))
        made = mechanism.run(cohort, entropy, bench)
        draft = draft_of(site, mechanism, grant.grant, selection.modality, mechanism.claim())
        if isinstance(made, Distilled):
            shown(made.review)
            goods = distilled(site, draft, made, wrapping)
            if goods.release.epsilon_nano is None:
                remember_persons(site, goods.release.release, persons)
        else:
            goods = wrapped(site, draft, made, wrapping)
        still_in(site, persons)
        keep(site.vault, goods.release, goods.artifact, goods.clear, persons)
    end(site, places)
    return goods, depart(site, goods)


def distilled(site: Site, draft: Release, made: Distilled, wrapping: Wrapping) -> Parcel:
    """Pictures of the student, or the student itself; with the figures on which a release of level C rests (P7)."""
    if draft.vetted_against == "private":  # of public references they would be no figures of the patients
        draft = stated(draft, made.review.after, made.review.power.caught)
    if isinstance(made.made, SyntheticSet):
        return wrapped(site, draft, made.made, wrapping)
    return enclosed(site, replace(draft, artifact_type="model"), made.made, wrapping)


def release_heads(
    site: Site,
    mechanism: Remodel,
    modality: str,
    examine: Examine,
    rng: np.random.Generator,
    shown: Callable[[Remodelled], None] = lambda _: None,
) -> tuple[Parcel, Verdict]:
    """Patients' own head scans with other faces, from price to verdict; the brain in them remains linkable.

    Killed before it was made, or stopped by a full disk, it is made again by the same dice under its grant.

    Raises:
        RefusedBeforehandError: policy or disk could not take it; nothing was made, and a grant stays held.
        Refused: the price, or a patient who takes part has opted out.
        CohortTooSmall: too few heads for the attack to be shown; the grant is spent.
        Unfinished: another making was interrupted.
        NotKept: the vault failed; say it again when it can be written.
        NotSentError: it is made and kept; no verdict yet.
    """
    begun = going_on(site, form := made_as(mechanism, modality))
    refuse(site, foreseen := of_heads(site, mechanism, modality))
    if not begun and not foreseen.samples:
        raise CohortTooSmall  # no head at all is known beforehand
    grant = begun[0] if begun else price(site, mechanism, modality)
    with spent_unless_kept(site, grant):
        site.say("read", "the heads that wait with their faces on, from the vault")
        scans = tuple(scan for scan in site.vault.scans(modality) if not begun or scan.pseudonym in begun[1])
        rng = same_dice(site, rng) if begun else rng
        begin(site, grant.grant, form, (scan.pseudonym for scan in scans), dice=rng)
        refuse(site, of_heads(site, mechanism, modality, scans))
        site.say("make", f"{mechanism.name}: another face for every head, and an attack on all of them")
        told = _told(site)
        made = mechanism.run(scans, examine, rng, lambda done, of: told("heads", done, of))
        shown(made)
        draft = draft_of(site, mechanism, grant.grant, modality, mechanism.claim())
        draft = replace(draft, reid_rate=up(made.known.interval.high), vetting_power=down(made.power.interval.low))
        goods = parcel(site, draft, pack_volumes(made.made))
        remember_persons(site, goods.release.release, made.persons)
        still_in(site, made.persons)
        keep(site.vault, goods.release, goods.artifact, goods.clear, made.persons)
    end(site)
    return goods, depart(site, goods)


def pack_volumes(made: VolumeSet) -> bytes:
    """A shard of NIfTI files: of the scanner's space nothing is left but the spacing.

    Raises:
        BadArtifact: more than a shard holds.
    """
    x, y, z = (float(np.float32(edge)) for edge in made.spacing)
    return pack_shard(list(made.volumes), made.labels, Nifti((x, 0.0, 0.0, 0.0, 0.0, y, 0.0, 0.0, 0.0, 0.0, z, 0.0)))


def made_as(mechanism: Synthesis | Resumable | Remodel, rule: object) -> str:
    """What a making goes on as: whatever is promised, what it is made by, and the rule that chooses patients."""
    told = f"{mechanism.form} {claim_json(mechanism.claim())} {rule}"
    return hashlib.sha256(told.encode()).hexdigest()


def _told(site: Site) -> Callable[[str, int, int], None]:
    """Progress of a long making, twenty times in each stage."""
    last: dict[str, int] = {}

    def say(stage: str, step: int, of: int) -> None:
        part = 20 * step // max(of, 1)
        if last.get(stage) != part:
            last[stage] = part
            site.say("make", f"{stage}: {step} of {of}")

    return say


def depart(site: Site, goods: Parcel) -> Verdict:
    """What was made and kept leaves; or waits in the vault, where persons must approve it first.

    Raises:
        Refused: by the site's own review; or ids in it were found to be alike while it was made, and it stays kept.
        NotSentError: the outcome is unknown.
        Waiting: for persons.
    """
    needed = site.books.policy_of(site.name).approvals
    if needed:
        raise Waiting(goods, needed)
    still_enough(site, goods.release)
    site.say("leave", "the site's own review, then submit and wait for the verdict")
    return leave(site, goods)


def still_in(site: Site, persons: Set[str]) -> None:
    """What was made of patients does not leave once one of them has opted out; its price stays spent.

    Raises:
        Refused: one has.
    """
    if not site.vault.opted_out().isdisjoint(persons):
        raise Refused("site", Verdict((Finding("opted_out", "a patient it was made from has opted out since"),)))
