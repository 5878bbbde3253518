"""The story on one page: price, read, make, seal, leave.

This module uses no file, socket or clock directly: ledger, vault and gateway client come in :class:`SiteContext`.
Everything that leaves a hospital goes through :func:`submit`; whatever is unknown counts as spent.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from agent.domain import (
    Clusters,
    Cohort,
    ExampleRule,
    Patient,
    Selection,
    SyntheticSet,
    TaskCohort,
    TaskPatient,
    VolumeSet,
)
from agent.dp.noise import Entropy
from agent.errors import (
    CohortTooSmallError,
    CoordinatorUnreachableError,
    LedgerForkError,
    OtherRunError,
    ReviewRejectedError,
    SiteConfigError,
    SiteStorageError,
)
from agent.mechanisms.common.workspace import Say, Workspace, in_twentieths
from agent.microaggregation.aggregation import aggregate_labels, patient_label
from agent.release.budget import best_effort, expire_grant
from agent.release.history import (
    combine_shuffled,
    freeze,
    kept_clusters,
    out_of_it,
    remember,
    remember_persons,
    retire_clusters,
    rule_of,
    searched,
    still_enough,
)
from agent.release.maker_process import MakerEndedError
from agent.release.packaging import ReleaseFormat, draft_of
from agent.release.ports import ApprovalPending, SignedRelease, SiteContext
from agent.release.preflight import (
    RefusedBeforehandError,
    of_clusters,
    of_configuration,
    of_heads,
    of_labels,
    of_patients,
    refuse,
)
from agent.release.release_record import RECORD, older_vault, remember_members
from agent.release.resumable import (
    Interrupted,
    ReleaseInProgressError,
    begin,
    end,
    find_resumable,
    hold,
    place_of,
    same_dice,
)
from agent.release.unsent import NotSentError, forget, keep
from agent.release.vetting_statement import VettingResult, compared, round_down_coarse, round_up, stated
from agent.vetting.exact_copies import refuse_copies
from policies.accounting.accountant import epsilon_nano
from policies.accounting.claims import Gaussian
from policies.ledger.entries import InvalidEntryError, Reserved
from policies.review.rules import Finding, Verdict
from policies.statements import Release, Reservation, claim_json
from protos.artifacts.byte_source import ArtifactFormatError, BytesSource
from protos.artifacts.shards import Nifti, pack_shard
from protos.artifacts.strict_safetensors import Architecture, check_weights
from protos.common.errors import LazaretError, TrainingError, WorkerError, out_of_memory

if TYPE_CHECKING:  # what learns imports torch: a release that learns nothing does without it
    from agent.defacing.deface import Examine
    from agent.mechanisms.distillation.teacher_student import Distilled, Review
    from agent.mechanisms.federated.task_model import TrainedModel
    from agent.mechanisms.registry import Remodel, Resumable, Synthesis, TaskModel
    from agent.mechanisms.remodel.mechanism import Remodelled
    from agent.release.cluster_vetting import VettingRequest

HandIn = Callable[[str, bytes, bytes], Verdict]  # of the gateway: key, envelope, artifact
_NO_SET: Final = (
    "what makes the release made other images than were configured, or named them otherwise: nothing left"
)
_UNSHOWN: Final = "suppressed, or dropped as like somebody (by chance, too) or as not to be judged"


def sign_release(site: SiteContext, draft: Release, artifact: bytes) -> SignedRelease:
    """Complete the statement with the artifact's digest and the claim's epsilon, and seal it."""
    account, epsilon, delta = site.ledger.account(site.name, draft.claim), None, None
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
    return SignedRelease(release, site.seal(release), artifact)


def package_images(
    site: SiteContext, draft: Release, synthetic: SyntheticSet, wrapping: ReleaseFormat
) -> SignedRelease:
    """A synthetic set as a parcel, sealed to its reader if there is one."""
    return package_artifact(site, draft, wrapping.pack(synthetic.images, synthetic.labels), wrapping)


def package_artifact(site: SiteContext, draft: Release, clear: bytes, wrapping: ReleaseFormat) -> SignedRelease:
    """An artifact as a parcel, sealed to its reader if there is one."""
    if wrapping.seal is None:
        return sign_release(site, draft, clear)
    return replace(sign_release(site, replace(draft, reader=wrapping.reader), wrapping.seal(clear)), clear=clear)


def record_submission(site: SiteContext, release: Release, envelope: bytes) -> None:
    """The site's own review of a finished parcel, and the entry that it leaves; durable before a byte of it does.

    This is a wall: the coordinator reviews the same again, but what the site refuses never leaves the site.

    Raises:
        ReviewRejectedError: by the site; the refusal is in its ledger, and the coordinator never sees the parcel.
    """
    verdict = site.ledger.dry_run_review(release, envelope)
    older = older_vault(site.vault.note(RECORD), site.ledger.store.state, release.mechanism)
    verdict = replace(
        verdict, findings=(*verdict.findings, *older)
    )  # brought back since the price, or while it waited
    if not verdict.admitted:
        site.ledger.record(f"verdict-{release.release}", release, envelope, verdict)
        raise ReviewRejectedError("site", verdict)
    site.ledger.send(release, envelope)
    site.vault.write_note("ledger", site.ledger.store.state.size)  # so that an older ledger is noticed


def submit(site: SiteContext, signed: SignedRelease, hand_in: HandIn | None = None) -> Verdict:
    """The one way out: hand the sealed release in, and write the coordinator's verdict into the site's own ledger.

    Raises:
        ReviewRejectedError: by the site's own review; its grant is spent, and nothing of it is kept.
        NotSentError: the outcome is unknown; it is sent again, or :func:`agent.release.recovery.recover` hears of it.
    """
    try:
        record_submission(site, signed.release, signed.envelope)
    except ReviewRejectedError:
        held = site.ledger.store.state.grants.get(signed.release.grant)
        if held is not None and isinstance(held.reserved, Reserved):
            with best_effort():
                expire_grant(site, held.reserved, "failed")
        forget(site.vault, signed.release.release)
        raise
    return deliver(site, signed, hand_in or site.gateway.submit)


def deliver(site: SiteContext, signed: SignedRelease, hand_in: HandIn) -> Verdict:
    """Hand in what has set out, for the first time or again: the coordinator takes it once.

    Raises:
        NotSentError: the outcome is unknown; what is kept stays kept.
    """
    name = signed.release.release
    try:
        verdict = hand_in(f"submit-{name}", signed.envelope, signed.artifact)
    except LedgerForkError:
        raise
    except CoordinatorUnreachableError as error:
        raise NotSentError(name, str(error)) from error
    site.ledger.record(f"verdict-{name}", signed.release, signed.envelope, verdict)
    with contextlib.suppress(SiteStorageError):  # a full disk changes no verdict: the next start forgets it
        forget(site.vault, name)
    return verdict


def fetch_verdicts(site: SiteContext) -> None:
    """Write down the coordinator's verdict on everything that set out and has none here yet.

    Raises:
        CoordinatorUnreachableError: no answer; what is known by then is written.
    """
    for sent, envelope in site.ledger.unanswered():
        verdict = site.gateway.outcome(f"submit-{sent.release}", sent.envelope)
        if verdict is None:
            continue
        try:
            site.ledger.record(f"verdict-{sent.release}", site.read(envelope), envelope, verdict)
        except InvalidEntryError:  # a verdict contradicts an earlier one: the ledger ends here, the grant is spent
            site.ledger.close(sent.grant, "failed")


def release_synthetic(
    site: SiteContext,
    mechanism: Synthesis,
    modality: str | Selection,
    rng: np.random.Generator,
    wrapping: ReleaseFormat | None = None,
    inspection: VettingRequest | None = None,
) -> tuple[SignedRelease, Verdict]:
    """A k-anonymous synthetic set, from price to verdict; as PNG in clear unless ``wrapping`` says otherwise.

    Clusters of an earlier release are shown again unchanged, or never again
    (:mod:`agent.microaggregation.released_clusters`). The mechanism sees only patients of no earlier release, and of
    ids that may be one patient's only one (:mod:`agent.storage.equal_patients`). With an ``inspection`` everything
    that would leave is compared with all comparable images (:mod:`agent.release.cluster_vetting`), and the statement
    says what was found and what remained. If the process is killed before the set is complete, or a full disk stops
    it, it is made again from the same random seed under its grant.

    Raises:
        RefusedBeforehandError: policy or disk could not take it; nothing was read.
        ReviewRejectedError: k is none of those that were searched, or the price was refused; nothing was read.
        CohortTooSmallError: nothing was priced; or, where only the images show it, the grant is spent.
        RecogniserError: the vetting misses copies that were planted; the grant is spent.
        ReleaseInProgressError: another making was interrupted; or too few of this one's patients count by now.
        SiteStorageError: the vault failed; say it again when it can be written.
        NotSentError: it is made and kept; no verdict yet.
    """
    selection = Selection(modality, mechanism.shape) if isinstance(modality, str) else modality
    wrapping = wrapping or ReleaseFormat()
    begun = find_resumable(site, form := made_as(mechanism, rule_of(selection)))
    again, taken = kept_clusters(site, mechanism, selection)
    tried, wide = searched(site, selection.modality), compared(selection)
    among = begun.persons if begun else None  # who came since it was begun is in the next one
    for fault in of_patients(site, mechanism, selection, taken, among, inspection is not None):
        raise fault  # nothing is priced, and nobody outside hears of it
    refuse(site, of_clusters(site, mechanism, selection, wrapping, among))
    grant = hold(site, mechanism, selection.modality, form, begun)
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
        examiner = inspection.over(known, rng, site.run) if inspection else None
        site.say("make", f"{mechanism.name}: latents, clusters of {mechanism.k} patients or more, representatives")
        made, clusters = site.run(mechanism.run, cohort, rng, others)
        with _answered():
            check_clusters(made, clusters, cohort, mechanism)
            refuse_copies(made.images, (*cohort.patients, *others))
            fresh = freeze(made, clusters, mechanism, selection)
            passed = (
                examiner.examine(fresh, again, partial(retire_clusters, site))
                if examiner
                else VettingResult(fresh, again)
            )
        if missing := len(cohort.patients) - sum(len(cluster.members) for cluster in passed.fresh):
            # said to the site's own operator, and to nobody else
            site.say("make", f"{missing} patients are behind no image: their clusters were {_UNSHOWN}")
        draft = draft_of(site, mechanism, grant.grant, selection.modality, mechanism.claim())
        draft = passed.stated(replace(draft, menu=",".join(map(str, tried))))
        leaving = [*passed.fresh, *passed.again]
        signed = package_images(site, draft, combine_shuffled(leaving, rng), wrapping)
        remember(site, signed.release.release, passed.fresh, passed.again)
        check_opt_outs(site, {person for cluster in leaving for person in cluster.members})
        keep(site.vault, signed.release, signed.artifact, signed.clear, frozenset())
    end(site)
    return signed, submit_or_await_approval(site, signed)


def check_clusters(made: SyntheticSet, clusters: Clusters, cohort: Cohort, mechanism: Synthesis) -> None:
    """Whoever made a set, it is what the statement says of it.

    Its clusters are of patients whom it was given, k or more in each, with as many labels as are claimed. An image is
    of the mechanism's size, each cluster has as many as it promises, and their label is the majority of its patients.

    Raises:
        WorkerError: it is not; nothing of it is kept, and its grant stays held.
    """
    own = {patient.pseudonym: patient_label(patient) for patient in cohort.patients}
    if not all(len(members) >= mechanism.k and own.keys() >= {*members} for members in clusters.members):
        raise WorkerError(
            "what makes the release named other patients than it was given, or fewer than k: nothing left"
        )
    labels = [label for label in aggregate_labels(cohort, clusters) for _ in range(mechanism.per_cluster)]
    shape, diverse = (len(labels), *mechanism.shape), mechanism.l_diversity
    several = all(len({own[one] for one in members} - {""}) >= diverse for members in clusters.members)
    if not labels or made.images.shape != shape or list(made.labels) != labels or not (diverse == 1 or several):
        raise WorkerError(_NO_SET)


def check_set(made: SyntheticSet, mechanism: Resumable) -> None:
    """Whoever made a set, its images are of the mechanism's size, no more than it promises, and of its labels.

    Raises:
        WorkerError: they are not; nothing of it is kept, and its grant stays held.
    """
    many = 1 <= len(made.images) <= mechanism.pictures and made.images.shape[1:] == mechanism.shape
    if not many or not {*made.labels} <= {*mechanism.drawn}:
        raise WorkerError(_NO_SET)


def check_distilled(made: Distilled, mechanism: Resumable) -> None:
    """Whoever distilled, it is a set, or a model in the very form that was priced; and its figures are of it.

    Raises:
        WorkerError: it is not; nothing of it is kept, and its grant stays held.
        RecogniserError: by its own word, the vetting misses copies that were planted.
    """
    if isinstance(made.made, SyntheticSet):
        check_set(made.made, mechanism)
    else:
        priced = Architecture.shown_by(BytesSource(mechanism.untrained() or b""))
        try:
            check_weights(BytesSource(made.made), priced)
        except ArtifactFormatError:
            raise WorkerError(_NO_SET) from None
    if tuple(tally.name for tally in made.review.conditions) != mechanism.drawn:
        raise WorkerError(_NO_SET)
    made.review.power.demand()


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Of what another process answered: whatever goes wrong with it is that one's fault, and the grant stays held.

    Raises:
        WorkerError: something that is no error of ours.
    """
    try:
        yield
    except (LazaretError, OSError):
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise WorkerError(
            f"what makes the release answered what cannot be used ({type(error).__name__}): nothing left"
        ) from error


class MemoryExhaustedError(TrainingError):
    """There is too little memory for the making; its grant stays held."""

    def __init__(self) -> None:
        """Say how it goes on."""
        super().__init__(
            "memory ran out: free some or take smaller batches; the same command goes on under its grant"
        )


@contextlib.contextmanager
def spent_unless_kept(site: SiteContext, grant: Reserved | Reservation, places: Iterable[str] = ()) -> Iterator[None]:
    """Wraps the making of a release until it is stored: on any failure its grant is spent, and the error is raised.

    But for a fault of the site's store, disk or memory, or of the process that makes it, which is none of the
    making's: its grant stays held, and it goes on.
    """
    try:
        yield
    except (SiteStorageError, OSError, RefusedBeforehandError, MakerEndedError, WorkerError, ReleaseInProgressError):
        raise
    except OtherRunError:  # nor is an image that came or went meanwhile
        raise ReleaseInProgressError(
            "the patients' images have changed since it began: discard it with --anew; its budget stays spent"
        ) from None
    except Exception as error:  # and nothing of what was drawn stays
        if out_of_memory(error):  # nor is a machine that is too small
            raise MemoryExhaustedError from None
        end(site, places)
        with best_effort():  # what went wrong is what the operator must hear
            expire_grant(site, grant, "failed")
        raise


def release_resumable(
    site: SiteContext,
    mechanism: Resumable,
    selection: Selection | ExampleRule,
    entropy: Entropy,
    wrapping: ReleaseFormat | None = None,
    shown: Callable[[Review], None] = lambda _: None,
) -> tuple[SignedRelease, Verdict]:
    """What takes long to make, from price to verdict: sets and models under differential privacy, and distillation.

    A killed run, or one stopped by a full disk, resumes under its grant (:mod:`agent.release.resumable`); nothing is
    spent twice. A set with an epsilon is compared with no patient (P7), and only the set leaves: no loss, figure or
    size of the cohort. A distilled set is ``shown`` to the site's reviewer first. Without an epsilon, the statement
    says how many of its images an unseen verifier matches with a patient, and the power of the vetting.

    Raises:
        RefusedBeforehandError: policy or disk could not take it; nothing was read.
        ReviewRejectedError: the price, or somebody who takes part has opted out since it was begun.
        ReleaseInProgressError: another making was interrupted; or the images of this one's patients, or the label
        table that it learns from, have changed meanwhile.
        SiteStorageError: the vault failed; say it again when it can be written.
        NotSentError: it is made and kept; no verdict yet.
    """
    wrapping = wrapping or ReleaseFormat()
    begun = find_resumable(site, form := made_as(mechanism, rule_of(selection)))
    refuse(site, of_configuration(site, mechanism, selection, wrapping))
    for finding in of_labels(site, selection):
        raise RefusedBeforehandError(finding.detail)
    grant = hold(site, mechanism, selection.modality, form, begun)
    places = [place_of(name, grant.grant) for name in mechanism.places]
    with spent_unless_kept(site, grant, places):
        site.say("read", "the eligible patients, from the vault")
        cohort, persons = _read(site, mechanism, selection, grant.grant, begun)
        check_opt_outs(site, persons)  # who opts out of half a training is in the other half for ever
        begin(site, grant.grant, form, persons, places)
        site.say("make", f"{mechanism.name}: {'go on where it was interrupted' if begun else 'from the start'}")
        bench = Workspace(lambda name: site.vault.place(place_of(name, grant.grant)), _told(site))
        made = site.run(mechanism.run, cohort, entropy, bench)
        draft = draft_of(site, mechanism, grant.grant, selection.modality, mechanism.claim())
        with _answered():
            if isinstance(made, SyntheticSet):
                check_set(made, mechanism)
                signed = package_images(site, draft, made, wrapping)
            elif isinstance(selection, ExampleRule):
                signed = package_artifact(site, draft, _model_file(made, mechanism), wrapping)
            else:
                check_distilled(made, mechanism)
                shown(made.review)
                signed = distilled(site, draft, made, wrapping)
        if not isinstance(made, SyntheticSet) and signed.release.epsilon_nano is None:
            remember_persons(site, signed.release.release, persons)
        elif signed.release.epsilon_nano is not None:
            remember_members(site.vault, signed.release.release, persons)
        check_opt_outs(site, persons)
        keep(site.vault, signed.release, signed.artifact, signed.clear, persons)
    end(site, places)
    return signed, submit_or_await_approval(site, signed)


def _read(
    site: SiteContext, mechanism: Resumable, selection: Selection | ExampleRule, grant: str, begun: Interrupted | None
) -> tuple[Cohort | dict[str, TaskCohort], frozenset[str]]:
    """Who takes part: of what goes on, those who did when it was begun. Who came meanwhile is in the next one.

    A task's examples come in the parts of the division. From the first reading on, the site stays with that version
    of its label table, by the name of the grant.

    Raises:
        ReleaseInProgressError: the label table was replaced since; the grant stays held.
    """
    among = begun.persons if begun else None
    if isinstance(selection, Selection):
        found = site.vault.cohort(selection).patients
        kept = tuple(patient for patient in found if among is None or patient.pseudonym in among)
        return Cohort(kept), _persons(kept, among)
    parts = dict[str, TaskCohort]()
    try:
        for part, rule in cast("TaskModel", mechanism).rules(grant).items():
            patients = site.examples(rule).patients
            parts[part] = TaskCohort(tuple(one for one in patients if among is None or one.pseudonym in among))
    except SiteConfigError:
        if begun is None:
            raise
        raise ReleaseInProgressError(
            "the label table was replaced since it began: import the former version again, or discard it with "
            "--anew; its budget stays spent"
        ) from None
    return parts, _persons((one for cohort in parts.values() for one in cohort.patients), among)


def _persons(patients: Iterable[Patient | TaskPatient], among: frozenset[str] | None) -> frozenset[str]:
    return among if among is not None else frozenset(patient.pseudonym for patient in patients)


def _model_file(made: TrainedModel, mechanism: Resumable) -> bytes:
    """What was trained, as the file of the very architecture that was priced.

    Raises:
        WorkerError: it is of another size, or not all numbers; nothing of it is kept, and its grant stays held.
    """
    try:
        return cast("TaskModel", mechanism).file(made)
    except ValueError:
        raise WorkerError("what trains answered with another model than was priced: nothing left") from None


def distilled(site: SiteContext, draft: Release, made: Distilled, wrapping: ReleaseFormat) -> SignedRelease:
    """Images of the student, or the student itself; with the figures on which a release of level C rests (P7)."""
    if draft.vetted_against == "private":  # of public references they would be no figures of the patients
        draft = stated(draft, made.review.after, made.review.power.caught)
    if isinstance(made.made, SyntheticSet):
        return package_images(site, draft, made.made, wrapping)
    return package_artifact(site, replace(draft, artifact_type="model"), made.made, wrapping)


def release_heads(
    site: SiteContext,
    mechanism: Remodel,
    modality: str,
    examine: Examine,
    rng: np.random.Generator,
    shown: Callable[[Remodelled], None] = lambda _: None,
) -> tuple[SignedRelease, Verdict]:
    """Patients' own head scans with other faces, from price to verdict; the brain in them remains linkable.

    Killed before it was made, or stopped by a full disk, it is made again by the same dice under its grant.

    Raises:
        RefusedBeforehandError: policy or disk could not take it; nothing was made, and a grant stays held.
        ReviewRejectedError: the price, or a patient who takes part has opted out.
        CohortTooSmallError: too few heads for the attack to be shown; the grant is spent.
        ReleaseInProgressError: another making was interrupted.
        SiteStorageError: the vault failed; say it again when it can be written.
        NotSentError: it is made and kept; no verdict yet.
    """
    begun = find_resumable(site, form := made_as(mechanism, modality))
    refuse(site, foreseen := of_heads(site, mechanism, modality))
    if not begun and not foreseen.samples:
        raise CohortTooSmallError  # no head at all is known beforehand
    grant, among = hold(site, mechanism, modality, form, begun), begun.persons if begun else None
    with spent_unless_kept(site, grant):
        site.say("read", "the heads that wait with their faces on, from the vault")
        scans = tuple(scan for scan in site.vault.scans(modality) if among is None or scan.pseudonym in among)
        rng = same_dice(site, rng) if begun else rng
        begin(site, grant.grant, form, (scan.pseudonym for scan in scans), dice=rng)
        refuse(site, of_heads(site, mechanism, modality, scans))
        site.say("make", f"{mechanism.name}: another face for every head, and an attack on all of them")
        told = _told(site)
        made = mechanism.run(scans, examine, rng, lambda done, of: told("heads", done, of))
        shown(made)
        draft = draft_of(site, mechanism, grant.grant, modality, mechanism.claim())
        draft = replace(
            draft,
            reid_rate=round_up(made.known.interval.high),
            vetting_power=round_down_coarse(made.power.interval.low),
        )
        signed = sign_release(site, draft, pack_volumes(made.made))
        remember_persons(site, signed.release.release, made.persons)
        check_opt_outs(site, made.persons)
        keep(site.vault, signed.release, signed.artifact, signed.clear, made.persons)
    end(site)
    return signed, submit_or_await_approval(site, signed)


def pack_volumes(made: VolumeSet) -> bytes:
    """A shard of NIfTI files: of the scanner's space nothing is left but the spacing.

    Raises:
        ArtifactFormatError: more than a shard holds.
    """
    x, y, z = (float(np.float32(edge)) for edge in made.spacing)
    return pack_shard(list(made.volumes), made.labels, Nifti((x, 0.0, 0.0, 0.0, 0.0, y, 0.0, 0.0, 0.0, 0.0, z, 0.0)))


def made_as(mechanism: Synthesis | Resumable | Remodel, rule: object) -> str:
    """The identity of a resumable release: its claim, its mechanism, and the rule that selects patients."""
    told = f"{mechanism.form} {claim_json(mechanism.claim())} {rule}"
    return hashlib.sha256(told.encode()).hexdigest()


def _told(site: SiteContext) -> Say:
    """Progress of a long making."""
    return in_twentieths(lambda stage, step, of: site.say("make", f"{stage}: {step} of {of}"))


def submit_or_await_approval(site: SiteContext, signed: SignedRelease) -> Verdict:
    """What was made and kept leaves; or waits in the vault, where persons must approve it first.

    Raises:
        ReviewRejectedError: by the site's own review; or ids in it were found to be alike while it was made, and it
        stays kept. NotSentError: the outcome is unknown.
        ApprovalPending: for persons.
    """
    needed = site.ledger.policy_of(site.name).approvals
    if needed:
        raise ApprovalPending(signed, needed)
    still_enough(site, signed.release)
    site.say("leave", "the site's own review, then submit and wait for the verdict")
    if site.owner is not None:
        return site.owner.submit(signed.release.release)
    return submit(site, signed)


def check_opt_outs(site: SiteContext, persons: Set[str]) -> None:
    """A release of a patient who has opted out does not leave; its price stays spent.

    Raises:
        ReviewRejectedError: one has.
    """
    if not site.vault.opted_out().isdisjoint(persons):
        raise ReviewRejectedError(
            "site", Verdict((Finding("opted_out", "a patient from whose images it was made has opted out since"),))
        )
