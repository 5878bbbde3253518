"""What is known of a release before its price: its size at most, and whether policy and disk could take it.

Nothing here reads a picture, spends or writes. How many pictures a k-anonymous set has follows from how many patients
may take part, so that number is for the site's own operator alone; every other one is public configuration. Sizes are
those of the worst pictures that there could be (:func:`protos.shards.plain_bytes`): what passes here passes when it
is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from agent.grants import reservation_of
from agent.mechanisms import Centroids, Distill, DistillDp, Mechanism, PrivImage, Remodel, Resumable, Synthesis
from agent.nouns import CohortTooSmall, Scan, Selection
from agent.release_record import RECORD, older_vault
from agent.released import frozen_clusters, known_after_start, out_of_it, searched
from agent.site import Site
from agent.stages.average import majority
from agent.stages.cluster import possible
from agent.stages.distil import Course
from agent.stages.latent import LatentDiffusion
from agent.stages.vet import could_show
from agent.unfinished import Unfinished, would_go_on
from agent.vetted import TooFewToVet, compared
from agent.wrapping import Wrapping, draft_of
from policies.claims import NoClaim
from policies.review import Finding, Verdict
from policies.statement import Release
from protos.hpke import sealed_bytes
from protos.shards import MAX_SHARD, Form, Nifti, plain_bytes, room

AT_THE_DISK: Final = 6  # times the bytes of a set: sealed, remembered and in the vault's log, and sealed to a reader
_MARGIN: Final = 64 << 20  # bytes for the ledger and all else
_ASKED: Final = frozenset({"artifact_type", "artifact_type_not_allowed", "level"})  # by no price
_LATER: Final = frozenset({"artifact_size", "reader", "no_grant", "approval", "reid_rate", "vetting_power"})
_GRID: Final = Nifti((1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0))


class RefusedBeforehandError(ValueError):
    """What was asked for could not leave, or not be kept until it has; nothing was made."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a release is, at most."""

    draft: Release  # its statement as far as it is known, with the most bytes that it can have
    reader: str  # whom it is sealed to
    samples: int  # pictures or volumes at most; of a model: 0
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
    site: Site,
    mechanism: Synthesis,
    selection: Selection,
    wrapping: Wrapping,
    among: Set[str] | None = None,
    known: Set[str] | None = None,
) -> Foreseen:
    """Of a k-anonymous set: as many clusters as there are times k patients, and those that are shown again.

    ``among`` whom a making goes on; None: all who may take part. ``known`` says which releases of before count, where
    not all do: see :func:`agent.released.known_after_start`.
    """
    again, taken = frozen_clusters(site, mechanism, selection, known)
    patients = len(site.vault.roster(selection, taken, among))
    shown = sum(len(one.images) for one in again)
    count = patients // mechanism.k * mechanism.per_cluster + shown
    change = "take a larger k, smaller pictures, or a selection of fewer patients"
    return _set(site, mechanism, selection.modality, wrapping, (count, False, change))


def of_configuration(site: Site, mechanism: Resumable, selection: Selection, wrapping: Wrapping) -> Foreseen:
    """Of a set whose number of pictures is configured, or of a model."""
    if isinstance(mechanism, Centroids):
        count, change = mechanism.codebook.cells, "take a codebook of so many cells"
    elif isinstance(mechanism, PrivImage):
        count, change = mechanism.synthetic.pictures, "write so many into [synthetic] pictures"
    else:
        count, change = mechanism.course.output.pictures, "write so many into [output] pictures"
    if isinstance(mechanism, Distill | DistillDp) and mechanism.course.output.release == "model":
        draft = _draft(site, mechanism, selection.modality, wrapping, len(untrained(mechanism.course)))
        change = 'a smaller preset, or [output] release = "samples"'
        return Foreseen(replace(draft, artifact_type="model"), wrapping.reader, 0, (), None, True, change)
    return _set(site, mechanism, selection.modality, wrapping, (count, True, change))


def of_heads(site: Site, mechanism: Remodel, modality: str, scans: Sequence[Scan] | None = None) -> Foreseen:
    """Of head scans, one of each patient whose face waits to be taken off: of int16, where nothing says otherwise.

    Once they have been read, ``scans`` say it.
    """
    if scans is None:
        count, wide = site.vault.heads_waiting(modality)
    else:
        count, wide = len(scans), any(scan.volume.values.dtype.kind == "f" for scan in scans)
    size = plain_bytes(count, mechanism.shape, _GRID, np.float32 if wide else np.int16)
    draft = _draft(site, mechanism, modality, Wrapping(), size)
    change = "a coarser grid, or fewer heads"
    return Foreseen(draft, "", count, mechanism.shape, _GRID, False, change, np.float32 if wide else np.int16)


def untrained(course: Course) -> bytes:
    """A student's file before it has learned anything: a function of the public configuration alone."""
    return LatentDiffusion(course.model, course.autoencoder, course.conditions).file({})


def quote(site: Site, foreseen: Foreseen, mechanism: Mechanism) -> Verdict:
    """What the site's own ledger would say to the price now; nothing is written."""
    return site.books.quote(reservation_of(site, mechanism, foreseen.draft.modality))


def against(site: Site, foreseen: Foreseen) -> Iterator[Finding]:
    """Whatever speaks against it and is known now: the policies of site and federation, and the site's disk.

    What the price itself is refused for is not among it: that is written down (:func:`agent.grants.price`).
    """
    policy = site.books.policy_of(site.name)
    most, size = policy.max_artifact_bytes, foreseen.size
    later = _LATER | {"level"} if isinstance(foreseen.draft.claim, NoClaim) else _LATER
    said = [finding for finding in site.books.examine(foreseen.draft, b"").findings if finding.rule not in later]
    if {finding.rule for finding in said} <= _ASKED:
        yield from said  # else the price is refused, and that is written down
    if foreseen.reader and foreseen.reader not in policy.readers:
        told = "policy.toml does not name this reader: add the key's fingerprint to its readers"
        yield Finding("reader", told)
    if not size <= most:
        yield Finding("artifact_size", _too_large(foreseen, f"the policy's max_artifact_bytes, {most}", most))
    elif foreseen.form is not None and not foreseen.samples <= room(MAX_SHARD, *_each(foreseen)):
        yield Finding("artifact_size", _too_large(foreseen, "one set may hold", MAX_SHARD))
    free = site.vault.free_bytes()
    if not foreseen.disk <= free:
        told = f"what is made is kept here until it has left: that may take {foreseen.disk} bytes of the site's disk"
        yield Finding("disk_full", f"{told}, and {free} are free: make room")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a release was asked for with."""

    mechanism: Mechanism
    rule: Selection | str  # the rule that chooses patients, or a modality
    form: str  # what a making goes on as: :func:`agent.pipeline.made_as`
    vetted: bool = False  # k-anonymous representatives are compared with patients
    anew: bool = False  # what was interrupted would be given up


def beforehand(site: Site, asked: Asked, foreseen: Foreseen) -> Iterator[Finding]:
    """Whatever a release is refused for before its price, and the price itself unless it is held already.

    Nothing is written. It asks what the release asks, as it would stand after a start of the agent. The release
    itself asks step by step, so that each refusal is of its kind.
    """
    begun = None
    if not asked.anew:
        try:
            begun = would_go_on(site, asked.form)
        except Unfinished as error:
            yield Finding("unfinished", str(error))
    if not begun:
        yield from quote(site, foreseen, asked.mechanism).findings
    yield from older_vault(site.vault.note(RECORD), site.books.store.state, asked.mechanism.name)
    if isinstance(asked.mechanism, Synthesis) and isinstance(asked.rule, Selection):
        among = begun[1] if begun else None
        yield from _of_patients(site, asked.mechanism, asked.rule, asked.vetted, among)
    elif not foreseen.samples and foreseen.form is not None:
        yield Finding("cohort", "there is nothing to make it of")
    yield from against(site, foreseen)


def _of_patients(
    site: Site, mechanism: Synthesis, selection: Selection, vetted: bool, among: Set[str] | None
) -> Iterator[Finding]:
    """What is known from labels alone, as :func:`agent.pipeline.release_synthetic` asks it; no number of patients."""
    tried = searched(site, selection.modality)
    if tried and mechanism.k not in tried:
        yield Finding("menu", "k is none of those that were tried: tune with it first")
    _, taken = frozen_clusters(site, mechanism, selection, known_after_start(site))
    out = out_of_it(site, selection, taken, among)
    labels = [majority(own) for own in site.vault.roster(selection, out, among)]
    if not possible(labels, mechanism.k, mechanism.l_diversity):
        yield Finding("cohort", str(CohortTooSmall()))
    if vetted and not could_show(len(site.vault.roster(compared(selection)))):
        yield Finding("cohort", str(TooFewToVet()))


def refuse(site: Site, foreseen: Foreseen) -> None:
    """Before a price.

    Raises:
        RefusedBeforehandError: something speaks against it.
    """
    found = list(against(site, foreseen))
    if found:
        raise RefusedBeforehandError("; ".join(finding.detail for finding in found))


def _too_large(foreseen: Foreseen, bound: str, most: int) -> str:
    if foreseen.form is None:
        return f"the model takes {foreseen.size} bytes, and that is more than {bound}: {foreseen.change}"
    most -= sealed_bytes(most) - most if foreseen.reader else 0
    fitting = room(most, *_each(foreseen))
    what = f"{foreseen.samples} {'volumes' if isinstance(foreseen.form, Nifti) else 'pictures'} of this size"
    return f"{what} may take more than {bound}: {fitting} would fit; {foreseen.change}"


def _each(foreseen: Foreseen) -> tuple[tuple[int, ...], Form, type[np.generic]]:
    assert foreseen.form is not None
    return foreseen.shape, foreseen.form, foreseen.dtype


def _set(
    site: Site,
    mechanism: Synthesis | Resumable,
    modality: str,
    wrapping: Wrapping,
    told: tuple[int, bool, str],
) -> Foreseen:
    """``told``: how many pictures, whether that is public, and what makes them fewer."""
    draft = _draft(site, mechanism, modality, wrapping, plain_bytes(told[0], mechanism.shape, wrapping.form))
    return Foreseen(draft, wrapping.reader, told[0], mechanism.shape, wrapping.form, *told[1:])


def _draft(site: Site, mechanism: Mechanism, modality: str, wrapping: Wrapping, size: int) -> Release:
    draft = draft_of(site, mechanism, "grant-foreseen", modality, mechanism.claim())
    whole = sealed_bytes(size) if wrapping.reader else size
    return replace(draft, artifact_bytes=whole, reader=wrapping.reader)
