"""Checks of a release before its price: its maximum size, and whether policy and disk admit it.

Nothing here reads an image, spends or writes. The number of images of a k-anonymous set depends on the number of
eligible patients, so it is for the site's own operator alone; every other number is public configuration. Sizes are
those of the worst possible images (:func:`protos.artifacts.shards.plain_bytes`): a release that passes here also
passes when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from agent.domain import ExampleRule, Scan, Selection
from agent.errors import CohortTooSmallError, ReviewRejectedError
from agent.microaggregation.aggregation import majority
from agent.microaggregation.partition import is_feasible
from agent.release.budget import reservation_of
from agent.release.history import frozen_clusters, known_after_start, out_of_it, searched
from agent.release.packaging import ReleaseFormat, draft_of
from agent.release.ports import SiteContext
from agent.release.release_record import RECORD, older_vault
from agent.release.resumable import ReleaseInProgressError, would_go_on
from agent.release.vetting_statement import TooFewToVetError, compared
from agent.vetting.requirements import has_statistical_power
from policies.accounting.claims import KAnonymous, NoClaim
from policies.review.rules import Finding, Verdict
from policies.statements import Release
from protos.artifacts.shards import MAX_SHARD, Form, Nifti, capacity, plain_bytes
from protos.common.errors import RefusedError
from protos.encryption.hpke import sealed_bytes

if TYPE_CHECKING:  # all mechanisms import torch, which not all releases need
    from agent.mechanisms.registry import Mechanism, Remodel, Resumable, Synthesis

AT_THE_DISK: Final = 6  # times the bytes of a set: sealed, remembered and in the vault's log, and sealed to a reader
_MARGIN: Final = 64 << 20  # bytes for the ledger and all else
_ASKED: Final = frozenset({"artifact_type", "artifact_type_not_allowed", "level"})  # by no price
_LATER: Final = frozenset({"artifact_size", "reader", "no_grant", "approval", "reid_rate", "vetting_power"})
_FEWER: Final = (
    "too few patients of the interrupted release count now, because ids count as one patient or studies are "
    "held: decide (`cohort --apart`, `cohort --lift`) and run it again, or discard it with --anew; its "
    "budget stays spent"
)
_GRID: Final = Nifti((1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0))


class RefusedBeforehandError(RefusedError, ValueError):
    """The requested release could not leave, or not be stored until then; nothing was made."""


@dataclass(frozen=True, slots=True)
class ReleaseForecast:
    """What a release is, at most."""

    draft: Release  # its statement as far as it is known, with the most bytes that it can have
    reader: str  # whom it is sealed to
    samples: int  # images or volumes at most; of a model: 0
    shape: tuple[int, ...]  # of each
    form: Form | None  # of each; of a model: None
    public: bool  # the number follows from the configuration alone, and is the exact one
    change: str  # what makes it smaller
    dtype: type[np.generic] = np.uint8  # of the values

    @property
    def size(self) -> int:
        """Bytes of the artifact, at most."""
        return self.draft.artifact_bytes

    @property
    def disk(self) -> int:
        """Bytes that the site's disk must have free, so that what was made can be kept until it has left."""
        return AT_THE_DISK * self.size + _MARGIN


def of_clusters(
    site: SiteContext,
    mechanism: Synthesis,
    selection: Selection,
    wrapping: ReleaseFormat,
    among: Set[str] | None = None,
    known: Set[str] | None = None,
) -> ReleaseForecast:
    """Of a k-anonymous set: as many clusters as there are times k patients, and those that are shown again.

    ``among``: the patients of a resumed release; None: all eligible ones. ``known``: the earlier releases that count,
    if not all do: see :func:`agent.release.history.known_after_start`.
    """
    again, taken = frozen_clusters(site, mechanism, selection, known)
    patients = len(site.vault.roster(selection, taken, among))
    shown = sum(len(one.images) for one in again)
    count = patients // mechanism.k * mechanism.per_cluster + shown
    change = "take a larger k, smaller images, or a selection of fewer patients"
    return _set(site, mechanism, selection.modality, wrapping, (count, False, change))


def of_configuration(
    site: SiteContext, mechanism: Resumable, selection: Selection | ExampleRule, wrapping: ReleaseFormat
) -> ReleaseForecast:
    """Of a set whose number of images is configured, or of a model."""
    untrained = mechanism.untrained()
    if untrained is not None:
        draft = _draft(site, mechanism, selection.modality, wrapping, len(untrained))
        distilled = 'a smaller preset, or [output] release = "samples"'
        change = mechanism.fewer if isinstance(selection, ExampleRule) else distilled
        return ReleaseForecast(replace(draft, artifact_type="model"), wrapping.reader, 0, (), None, True, change)
    return _set(site, mechanism, selection.modality, wrapping, (mechanism.pictures, True, mechanism.fewer))


def of_heads(
    site: SiteContext, mechanism: Remodel, modality: str, scans: Sequence[Scan] | None = None
) -> ReleaseForecast:
    """Of head scans, one of each patient whose face waits to be taken off: of int16, where nothing says otherwise.

    Once they have been read, ``scans`` say it.
    """
    if scans is None:
        count, wide = site.vault.heads_waiting(modality)
    else:
        count, wide = len(scans), any(scan.volume.values.dtype.kind == "f" for scan in scans)
    size = plain_bytes(count, mechanism.shape, _GRID, np.float32 if wide else np.int16)
    draft = _draft(site, mechanism, modality, ReleaseFormat(), size)
    change = "a coarser grid, or fewer heads"
    return ReleaseForecast(draft, "", count, mechanism.shape, _GRID, False, change, np.float32 if wide else np.int16)


def quote(site: SiteContext, foreseen: ReleaseForecast, mechanism: Mechanism) -> Verdict:
    """What the site's own ledger would say to the price now; nothing is written."""
    return site.ledger.quote(reservation_of(site, mechanism, foreseen.draft.modality))


def known_objections(site: SiteContext, foreseen: ReleaseForecast) -> Iterator[Finding]:
    """Whatever speaks against it and is known now: the policies of site and federation, and the site's disk.

    What the price itself is refused for is not among it: that is written down (:func:`agent.release.budget.reserve`).
    """
    policy = site.ledger.policy_of(site.name)
    most, size = policy.max_artifact_bytes, foreseen.size
    later = _LATER | {"level"} if isinstance(foreseen.draft.claim, NoClaim) else _LATER
    said = [
        finding for finding in site.ledger.dry_run_review(foreseen.draft, b"").findings if finding.rule not in later
    ]
    if {finding.rule for finding in said} <= _ASKED:
        yield from said  # else the price is refused, and that is written down
    if foreseen.reader and foreseen.reader not in policy.readers:
        told = "policy.toml does not name this recipient: add the key's fingerprint to its readers"
        yield Finding("reader", told)
    if not size <= most:
        yield Finding("artifact_size", _too_large(foreseen, f"the policy's max_artifact_bytes, {most}", most))
    elif foreseen.form is not None and not foreseen.samples <= capacity(MAX_SHARD, *_each(foreseen)):
        yield Finding("artifact_size", _too_large(foreseen, "one set may hold", MAX_SHARD))
    free = site.vault.free_bytes()
    if not foreseen.disk <= free:
        told = f"what is made is kept here until it has left: that may take {foreseen.disk} bytes of the site's disk"
        yield Finding("disk_full", f"{told}, and {free} are free: free some space")


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """The arguments of a release."""

    mechanism: Mechanism
    rule: Selection | ExampleRule | str  # the rule that chooses patients, or a modality
    form: str  # what a making goes on as: :func:`agent.release.pipeline.made_as`
    vetted: bool = False  # k-anonymous representatives are compared with patients
    anew: bool = False  # what was interrupted would be given up


def preflight_review(site: SiteContext, asked: ReleaseRequest, foreseen: ReleaseForecast) -> Iterator[Finding]:
    """Whatever a release is refused for before its price, and the price itself unless it is held already.

    Nothing is written. It makes the same checks as the release, for the state after a start of the agent. The release
    itself checks step by step, so that each refusal is of its kind.
    """
    begun = None
    if not asked.anew:
        try:
            begun = would_go_on(site, asked.form)
        except ReleaseInProgressError as error:
            yield Finding("unfinished", str(error))
    if not begun:
        yield from quote(site, foreseen, asked.mechanism).findings
    yield from older_vault(site.vault.note(RECORD), site.ledger.store.state, asked.mechanism.name)
    if isinstance(asked.mechanism.claim(), KAnonymous) and isinstance(asked.rule, Selection):
        mechanism = cast("Synthesis", asked.mechanism)  # which alone claims it
        among = begun.persons if begun else None
        _, taken = frozen_clusters(site, mechanism, asked.rule, known_after_start(site))
        for fault in of_patients(site, mechanism, asked.rule, taken, among, asked.vetted):
            rule = "unfinished" if isinstance(fault, ReleaseInProgressError) else "cohort"
            yield from (
                fault.verdict.findings if isinstance(fault, ReviewRejectedError) else (Finding(rule, str(fault)),)
            )
    elif not foreseen.samples and foreseen.form is not None:
        yield Finding("cohort", "there are no eligible patients")
    yield from of_labels(site, asked.rule)
    yield from known_objections(site, foreseen)


def of_patients(
    site: SiteContext,
    mechanism: Synthesis,
    selection: Selection,
    taken: frozenset[str],
    among: Set[str] | None,
    vetted: bool,
) -> Iterator[ReviewRejectedError | CohortTooSmallError | ReleaseInProgressError]:
    """Objections to a k-anonymous set that follow from labels alone; none reveals the number of patients.

    ``taken``: the patients behind released clusters; ``among``: the patients of a resumed release; None: all eligible
    ones.
    """
    tried = searched(site, selection.modality)
    if tried and mechanism.k not in tried:
        yield ReviewRejectedError(
            "site", Verdict((Finding("menu", "this k was not tried: run `tune` with it first"),))
        )
    labels = [majority(own) for own in site.vault.roster(selection, out_of_it(site, selection, taken, among), among)]
    if not is_feasible(labels, mechanism.k, mechanism.l_diversity):
        yield CohortTooSmallError() if among is None else ReleaseInProgressError(_FEWER)
    if vetted and not has_statistical_power(len(site.vault.roster(compared(selection)))):
        yield TooFewToVetError()


def of_labels(site: SiteContext, rule: Selection | ExampleRule | str) -> Iterator[Finding]:
    """What is declared of labels here, and no row of them: it must be what a task learns."""
    if isinstance(rule, ExampleRule) and (misfit := site.label_misfit(rule)):
        yield Finding("labels", misfit)


def refuse(site: SiteContext, foreseen: ReleaseForecast) -> None:
    """Before a price.

    Raises:
        RefusedBeforehandError: something speaks against it.
    """
    found = list(known_objections(site, foreseen))
    if found:
        raise RefusedBeforehandError("; ".join(finding.detail for finding in found))


def _too_large(foreseen: ReleaseForecast, bound: str, most: int) -> str:
    if foreseen.form is None:
        return f"the model takes {foreseen.size} bytes, and that is more than {bound}: {foreseen.change}"
    most -= sealed_bytes(most) - most if foreseen.reader else 0
    fitting = capacity(most, *_each(foreseen))
    what = f"{foreseen.samples} {'volumes' if isinstance(foreseen.form, Nifti) else 'images'} of this size"
    return f"{what} may take more than {bound}: {fitting} would fit; {foreseen.change}"


def _each(foreseen: ReleaseForecast) -> tuple[tuple[int, ...], Form, type[np.generic]]:
    assert foreseen.form is not None
    return foreseen.shape, foreseen.form, foreseen.dtype


def _set(
    site: SiteContext,
    mechanism: Synthesis | Resumable,
    modality: str,
    wrapping: ReleaseFormat,
    told: tuple[int, bool, str],
) -> ReleaseForecast:
    """``told``: how many images, whether that is public, and what makes them fewer."""
    draft = _draft(site, mechanism, modality, wrapping, plain_bytes(told[0], mechanism.shape, wrapping.form))
    return ReleaseForecast(draft, wrapping.reader, told[0], mechanism.shape, wrapping.form, *told[1:])


def _draft(site: SiteContext, mechanism: Mechanism, modality: str, wrapping: ReleaseFormat, size: int) -> Release:
    draft = draft_of(site, mechanism, "grant-foreseen", modality, mechanism.claim())
    whole = sealed_bytes(size) if wrapping.reader else size
    return replace(draft, artifact_bytes=whole, reader=wrapping.reader)
