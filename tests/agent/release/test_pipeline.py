"""The story's promises: price before reading, spent when in doubt, one way out, each update made once."""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Clusters, Cohort, Selection, Split, SyntheticSet, Update
from agent.errors import CohortTooSmallError, CoordinatorUnreachableError, ReviewRejectedError
from agent.federation.participant import Participant
from agent.mechanisms.common.linear_codec import Basis, fit_basis
from agent.microaggregation.aggregation import patient_label
from agent.release import budget, pipeline
from agent.release.approval import submit_approved, withdraw
from agent.release.history import TooManySearchesError, form_of, note_search, searched
from agent.release.packaging import ReleaseFormat
from agent.release.pipeline import release_synthetic
from agent.release.ports import ApprovalPending, SignedRelease, SiteContext
from agent.release.preflight import RefusedBeforehandError
from agent.release.recovery import recover
from agent.release.unsent import artifact_of, clear_of, listed, statement_of
from agent.vetting.exact_copies import RepeatedInputError
from policies.audit.verify import verify
from policies.governance import decisions
from policies.ledger.backends.sqlite import export_file
from policies.ledger.export import ExportError
from policies.ledger_service import LedgerService
from policies.review.policy import parse
from policies.review.rules import Verdict
from policies.statements import encode
from protos.artifacts.arrays import unpack_images
from protos.artifacts.png import pack_earlier_png
from protos.common.errors import WorkerError
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.federated_sites import federated
from tests.support.image_sets import shard_of
from tests.support.ledger_world import Person, policy
from tests.support.site_world import (
    RNG,
    SHAPE,
    DirectCoordinatorClient,
    approve,
    approving,
    ksame,
    site_world,
    waiting,
)

ROOT = Path(__file__).parents[3]


def test_a_release_is_priced_made_reviewed_and_spent_on_both_sides(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    signed, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert verdict.admitted
    assert s.spent("k") == ((0, 1), (0, 1))
    assert signed.release.release in s.site.ledger.store.state.releases
    assert signed.release.release in s.intake.register.store.state.releases


def test_no_image_is_read_when_the_sites_own_ledger_refuses(tmp_path: Path) -> None:
    s = site_world(tmp_path, k_min=11)
    with pytest.raises(ReviewRejectedError) as caught:
        release_synthetic(s.site, ksame(5), "OT", RNG)
    assert caught.value.where == "site"
    assert s.vault.reads == 0
    assert s.spent("k") == ((0, 0), (0, 0))
    stages = [e.stage for e in _refusals(s.intake.register)]
    assert stages == ["declined"], "the coordinator's ledger knows that the site declined"


def test_no_image_is_read_when_the_coordinator_refuses_and_the_sites_grant_is_freed(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    s.gateway.site = "site-unknown"
    with pytest.raises(ReviewRejectedError) as caught:
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert caught.value.where == "coordinator"
    assert s.vault.reads == 0
    assert s.spent("k")[0] == (0, 0)


def test_a_silent_coordinator_costs_nothing_the_grant_stays_held_and_the_same_release_goes_on_under_it(
    tmp_path: Path,
) -> None:
    s = site_world(tmp_path)
    s.gateway.shut = True
    with pytest.raises(CoordinatorUnreachableError):
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert s.vault.reads == 0
    assert s.spent("k")[0] == (1, 0)
    s.gateway.shut = False
    assert recover(s.site) == []
    assert s.spent("k")[0] == (1, 0)
    signed, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert (verdict.admitted, signed.release.grant) == (True, "grant-site-a-0")
    assert s.spent("k") == ((0, 1), (0, 1))


@pytest.mark.parametrize("named", ["of another", "fewer than k"])
def test_a_making_that_names_other_patients_or_fewer_than_k_releases_nothing(tmp_path: Path, named: str) -> None:
    """What a confined process answers is no word to rely on; its grant stays held, and the release goes on."""
    s = site_world(tmp_path)

    def lies(call: Any, *given: Any) -> Any:
        made, clusters = call(*given)
        first = clusters.members[0]
        lie = ("somebody", *first[1:]) if named == "of another" else first[: call.__self__.k - 1]
        return made, replace(clusters, members=(lie, *clusters.members[1:]))

    with pytest.raises(WorkerError, match="other patients than it was given, or fewer than k"):
        release_synthetic(replace(s.site, run=lies), ksame(), "OT", RNG)
    assert (s.spent("k")[0], listed(s.vault), s.intake.register.store.state.releases) == ((1, 0), {}, {})
    _, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert (verdict.admitted, s.spent("k")) == (True, ((0, 1), (0, 1)))


def _alike(made: SyntheticSet, _: Clusters, cohort: Cohort) -> tuple[SyntheticSet, Clusters]:
    """A cluster of patients of one label, where two are promised."""
    labels = Counter(patient_label(patient) for patient in cohort.patients)
    one = labels.most_common(1)[0][0]
    alike = tuple(p.pseudonym for p in cohort.patients if patient_label(p) == one)
    return SyntheticSet(made.images[:1], (one,)), Clusters((alike[:5],))


def _other_label(made: SyntheticSet, clusters: Clusters, cohort: Cohort) -> tuple[SyntheticSet, Clusters]:
    """A label of a cluster's patients that is not the one of most of them."""
    own = {patient.pseudonym: patient_label(patient) for patient in cohort.patients}
    rare = [
        {own[one] for one in members} - {label} for members, label in zip(clusters.members, made.labels, strict=True)
    ]
    return SyntheticSet(made.images, tuple(sorted(labels)[0] for labels in rare)), clusters


@pytest.mark.parametrize(
    "lie",
    [
        lambda m, c, _: (
            SyntheticSet(m.images, tuple(f"SMITH^JOHN 19500101 MRN{n:06d}" for n in range(len(m.labels)))),
            c,
        ),
        lambda m, c, _: (SyntheticSet(m.images, tuple("x" * 33 for _ in m.labels)), c),
        lambda m, c, _: (SyntheticSet(m.images, tuple(range(len(m.labels)))), c),  # type: ignore[arg-type]
        _other_label,
        _alike,
        lambda m, c, _: (
            SyntheticSet(np.repeat(m.images, 40, axis=0), tuple(x for x in m.labels for _ in range(40))),
            c,
        ),
        lambda m, c, _: (SyntheticSet(m.images[:-1], m.labels[:-1]), c),
        lambda m, _, __: (SyntheticSet(m.images[:0], ()), Clusters(())),
        lambda m, c, _: (SyntheticSet(m.images[:, :-1], m.labels), c),
        lambda m, c, _: (SyntheticSet(np.repeat(m.images[..., None], 3, axis=3), m.labels), c),
    ],
)
def test_a_making_whose_images_or_labels_are_not_those_of_its_clusters_releases_nothing(
    tmp_path: Path, lie: Any
) -> None:
    s = site_world(tmp_path)

    def lies(call: Any, *given: Any) -> Any:
        return lie(*call(*given), given[0])

    with pytest.raises(WorkerError, match="nothing left"):
        release_synthetic(replace(s.site, run=lies), ksame(), "OT", RNG)
    assert (s.spent("k")[0], listed(s.vault), s.intake.register.store.state.releases) == ((1, 0), {}, {})


def test_that_no_image_is_a_patients_is_no_word_of_the_making(tmp_path: Path) -> None:
    s = site_world(tmp_path)

    def lies(call: Any, *given: Any) -> Any:
        made, clusters = call(*given)
        raw = np.rint(given[0].patients[0].images[0].pixels * 255).astype(np.uint8)
        return SyntheticSet(np.concatenate([raw[None], made.images[1:]]), made.labels), clusters

    with pytest.raises(RepeatedInputError):
        release_synthetic(replace(s.site, run=lies), ksame(), "OT", RNG)
    assert (s.spent("k")[0], s.intake.register.store.state.releases) == ((0, 1), {})


def test_a_private_component_is_not_even_priced(tmp_path: Path) -> None:
    """P6: a basis fitted on patients is a function of every one of them."""
    s = site_world(tmp_path)
    with pytest.raises(ReviewRejectedError, match="provenance"):
        release_synthetic(s.site, ksame(provenance="private"), "OT", RNG)
    assert s.vault.reads == 0
    assert s.spent("k") == ((0, 0), (0, 0))


def test_what_the_site_would_refuse_the_coordinator_never_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's policy is the upper bound, also of what is merely handed in for review."""
    s = site_world(tmp_path, max_artifact_bytes=1000)
    sent: list[str] = []
    monkeypatch.setattr(DirectCoordinatorClient, "submit", lambda self, key, envelope, artifact: sent.append(key))
    with pytest.raises(RefusedBeforehandError, match="max_artifact_bytes, 1000"):
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert (sent, s.vault.reads) == ([], 0)
    assert s.spent("k") == ((0, 0), (0, 0)), "the size was known before the price: the patients' only release is left"
    tiny = site_world(_fresh(tmp_path), max_artifact_bytes=50)
    p = Participant(tiny.site, "OT", UnsafeSeededEntropy(1))
    with pytest.raises(ReviewRejectedError, match="artifact_size"):
        p.join("run-1", federated())
    assert not tiny.site.ledger.store.state.grants


@pytest.mark.parametrize("patients", [0, 1, 3, 4])
def test_too_few_patients_are_refused_before_a_price_is_held_and_nobody_outside_hears_of_it(
    tmp_path: Path, patients: int
) -> None:
    s = site_world(tmp_path, patients=patients)
    before = s.intake.register.store.state.size
    with pytest.raises(CohortTooSmallError) as caught:
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert not any(character.isdigit() for character in str(caught.value))
    assert s.vault.reads == 0
    assert s.spent("k") == ((0, 0), (0, 0))
    assert s.intake.register.store.state.size == before


def test_labels_that_allow_no_cluster_are_refused_before_a_price_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path)
    for labels in (("",), ("ill",)):  # none given; the same for everybody
        monkeypatch.setattr(type(s.vault), "roster", lambda *_, own=labels: (own,) * 12)
        with pytest.raises(CohortTooSmallError):
            release_synthetic(s.site, ksame(), "OT", RNG)
    assert (s.vault.reads, s.spent("k")) == (0, ((0, 0), (0, 0)))


def test_what_only_the_images_show_spends_the_grant_and_says_nothing_of_their_number(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=12)
    s.vault.unreadable = 9
    with pytest.raises(CohortTooSmallError) as caught:
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert not any(character.isdigit() for character in str(caught.value))
    assert s.spent("k") == ((0, 1), (0, 1))


def _shown(signed: SignedRelease) -> Counter[tuple[bytes, str]]:
    images, labels = unpack_images(signed.artifact)
    return Counter(zip((image.tobytes() for image in images), labels, strict=True))


def _behind(site: SiteContext) -> list[set[str]]:
    return [set(cluster) for one in site.vault.note("releases") for cluster in one["clusters"]]


def test_a_grown_cohort_shows_old_clusters_as_they_were_and_new_ones_of_new_patients(tmp_path: Path) -> None:
    """P5: what two releases have in common is the same to the last byte, so nothing can be differenced."""
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3)
    first, _ = release_synthetic(s.site, ksame(), "OT", RNG)
    s.vault.patients, s.vault.seed = 24, 2  # and the old patients have other images now
    second, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert verdict.admitted
    assert _shown(first) < _shown(second)
    behind = _behind(s.site)
    assert sum(map(len, behind)) == len(set().union(*behind)) == 24
    assert all(len(cluster) >= 5 for cluster in behind)


def test_a_partition_drawn_anew_would_mix_old_patients_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5 broken on purpose: without the record, clusters of two releases overlap and can be intersected."""
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3)
    release_synthetic(s.site, ksame(), "OT", RNG)
    old = _behind(s.site)
    s.vault.write_note("releases", [])
    s.vault.patients = 24
    with monkeypatch.context() as patched:
        for module in (budget, pipeline):
            patched.setattr(module, "older_vault", lambda *_: ())
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert any(a & b and a != b for a in old for b in _behind(s.site))


def test_beside_an_older_vault_no_patient_is_released_again_and_nothing_is_priced(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3)
    older = copy.deepcopy(s.vault.notes)
    first, _ = release_synthetic(s.site, ksame(), "OT", RNG)
    newer, s.vault.notes = s.vault.notes, older
    spent, reads, size = s.spent("k"), s.vault.reads, s.site.ledger.store.state.size
    with pytest.raises(
        ReviewRejectedError, match=rf"does not know the patients of {first.release.release}: an older vault"
    ):
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert (s.spent("k"), s.vault.reads, s.site.ledger.store.state.size) == (spent, reads, size)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    s.join(p, federated())  # what has an epsilon has no such record
    s.vault.notes, s.vault.patients = newer, 24
    assert release_synthetic(s.site, ksame(), "OT", RNG)[1].admitted


def test_a_release_that_waited_while_an_older_vault_was_brought_back_does_not_leave(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3, approvals='["compliance"]')
    person = Person("dpo-1", "compliance")
    decisions.appoint(s.site.ledger.store, person.name, person.role, person.public)

    def approved(signed: SignedRelease) -> None:
        name, value = signed.release.release, signed.release.artifact_sha256
        word = person.approval(name, "release", name, value, origin=s.site.ledger.store.origin)
        decisions.approve(s.site.ledger.store, word)

    with pytest.raises(ApprovalPending) as first:
        release_synthetic(s.site, ksame(), "OT", RNG)
    s.vault.patients = 24
    older = copy.deepcopy(s.vault.notes)
    with pytest.raises(ApprovalPending) as second:
        release_synthetic(s.site, ksame(), "OT", RNG)
    approved(second.value.signed)
    assert submit_approved(s.site, second.value.signed.release.release)[1].admitted
    s.vault.notes = older
    approved(first.value.signed)
    with pytest.raises(ReviewRejectedError, match="older_vault"):
        submit_approved(s.site, first.value.signed.release.release)
    assert first.value.signed.release.release not in s.site.ledger.store.state.sent


def test_a_cluster_of_somebody_who_opted_out_is_retired_whole_even_if_they_come_back(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=12, max_releases_per_patient=4)
    first, _ = release_synthetic(s.site, ksame(), "OT", RNG)
    gone = next(iter(_behind(s.site)[0]))
    s.vault.out, s.vault.patients = frozenset({gone}), 24
    second, _ = release_synthetic(s.site, ksame(), "OT", RNG)
    assert sum((_shown(first) & _shown(second)).values()) == sum(_shown(first).values()) - 1
    s.vault.out, s.vault.patients = frozenset(), 36
    third, _ = release_synthetic(s.site, ksame(), "OT", RNG)
    assert not (_shown(first) - _shown(second)) & _shown(third), "the picture is forgotten"
    behind = _behind(s.site)
    assert sum(map(len, behind)) == len(set().union(*behind)), "and the others entered no second cluster"


def test_old_clusters_are_not_shown_among_pictures_of_another_kind(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3)
    first, _ = release_synthetic(s.site, ksame(), "OT", RNG)
    s.vault.patients = 24
    other = Selection("OT", SHAPE, labels=frozenset({"0", "1", "2"}))
    second, _ = release_synthetic(s.site, ksame(), other, RNG)
    assert not _shown(first) & _shown(second)
    behind = _behind(s.site)
    assert sum(map(len, behind)) == len(set().union(*behind)) == 24


def test_a_form_is_the_same_in_every_process_and_another_for_every_rule() -> None:
    """Were it not, a second release would show no old cluster: sets have another order in every process."""
    code = (
        "from agent.domain import Selection; from agent.release.history import form_of;"
        "from tests.support.site_world import ksame;"
        "print(form_of(ksame(), Selection('OT', (8, 8), labels=frozenset('abcdefgh'))))"
    )
    said = set()
    for seed in ("1", "2"):
        told = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=told, cwd=ROOT, capture_output=True, check=True)
        said.add(done.stdout)
    assert len(said) == 1
    base = Selection("OT", SHAPE)
    split = Split("s", {"a": 1, "b": 2})
    rules = [
        *(base, replace(base, modality="CT"), replace(base, shape=(4, 4)), replace(base, body_part="EYE")),
        *(replace(base, labels=frozenset("a")), replace(base, min_instances=2), replace(base, fit=True)),
        *(replace(base, split=split, part="a"), replace(base, split=split, part="b")),
    ]
    assert len({form_of(ksame(), rule) for rule in rules}) == len(rules)
    assert form_of(ksame(), base) != form_of(replace(ksame(), basis=other_basis()), base)


def other_basis() -> Basis:
    return fit_basis(np.random.default_rng(10).random((40, *SHAPE)).astype(np.float32), 8, "public")


def test_a_release_that_persons_did_not_want_is_not_shown_by_a_later_one(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3, approvals='["compliance"]')
    with pytest.raises(ApprovalPending) as caught:
        release_synthetic(s.site, ksame(), "OT", RNG)
    unwanted = _shown(caught.value.signed)
    withdraw(s.site, caught.value.signed.release.release)
    s.vault.patients = 24
    with pytest.raises(ApprovalPending) as again:
        release_synthetic(s.site, ksame(), "OT", RNG)
    assert not unwanted & _shown(again.value.signed)


def test_every_k_that_was_tried_is_in_the_statement_and_a_k_of_another_menu_is_refused(tmp_path: Path) -> None:
    """Tuning reads patients (001, section 3.5): what was tried is told, and k comes from it."""
    s = site_world(tmp_path, patients=24, max_releases_per_patient=3)
    note_search(s.site, "OT", (5, 8))
    note_search(s.site, "OT", (5, 11))
    signed, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert verdict.admitted
    assert signed.release.menu == "5,8,11"
    s.vault.patients, before, reads = 48, s.spent("k"), s.vault.reads
    with pytest.raises(ReviewRejectedError, match="menu"):
        release_synthetic(s.site, ksame(6), "OT", RNG)
    assert (s.spent("k"), s.vault.reads) == (before, reads), "one mistyped k costs nothing"


def test_a_search_that_no_statement_could_say_is_refused_before_it_is_noted(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    note_search(s.site, "OT", range(5, 60))
    for menu in (range(60, 80), (1_000_000,)):
        with pytest.raises(TooManySearchesError):
            note_search(s.site, "OT", menu)
    assert searched(s.site, "OT") == tuple(range(5, 60))
    assert release_synthetic(s.site, ksame(), "OT", RNG)[1].admitted


def test_what_waits_for_persons_is_shown_by_no_other_release_and_nobody_enters_two_clusters(tmp_path: Path) -> None:
    """A waits, B is made beside it, A is withdrawn: what B shows stays excluded, whatever comes of A (P5)."""
    s = site_world(tmp_path, patients=12, max_releases_per_patient=9, approvals='["compliance"]')
    person = Person("dpo-1", "compliance")
    decisions.appoint(s.site.ledger.store, person.name, person.role, person.public)
    waits: list[SignedRelease] = []
    for patients in (12, 24):
        s.vault.patients = patients
        with pytest.raises(ApprovalPending) as caught:
            release_synthetic(s.site, ksame(), "OT", RNG)
        waits.append(caught.value.signed)
    assert not _shown(waits[0]) & _shown(waits[1])
    approve(s, person, waits[1].release)
    assert submit_approved(s.site, waits[1].release.release)[1].admitted
    withdraw(s.site, waits[0].release.release)
    recover(s.site)
    s.vault.patients = 36
    with pytest.raises(ApprovalPending) as caught:
        release_synthetic(s.site, ksame(), "OT", RNG)
    behind = [set(c) for one in s.vault.note("releases") for c in one["clusters"]]
    assert sum(map(len, behind)) == len(set().union(*behind))
    assert _shown(waits[1]) < _shown(caught.value.signed), "what set out is shown again"
    assert not _shown(waits[0]) & _shown(caught.value.signed)


def test_a_k_that_persons_looked_at_and_did_not_want_is_a_k_that_was_tried(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=24, max_releases_per_patient=9, approvals='["compliance"]')
    with pytest.raises(ApprovalPending) as caught:
        release_synthetic(s.site, ksame(6), "OT", RNG)
    withdraw(s.site, caught.value.signed.release.release)
    with pytest.raises(ReviewRejectedError, match="menu"):
        release_synthetic(s.site, ksame(5), "OT", RNG)


def test_what_is_made_is_compared_with_patients_of_earlier_releases_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: a representative of newcomers that is the picture of somebody released before does not leave."""
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3)
    release_synthetic(s.site, ksame(), "OT", RNG)
    old = np.rint(s.vault.cohort("OT", SHAPE).patients[0].images[0].pixels * 255).astype(np.uint8)
    s.vault.patients = 24
    monkeypatch.setattr(Basis, "decode", lambda self, codes: np.stack([old] * len(codes)))
    with pytest.raises(RepeatedInputError):
        release_synthetic(s.site, ksame(), "OT", RNG)


def test_after_a_crash_before_anything_set_out_the_same_patients_can_be_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path, max_releases_per_patient=2)
    monkeypatch.setattr(LedgerService, "send", _crash)
    with pytest.raises(KeyboardInterrupt):
        release_synthetic(s.site, ksame(), "OT", RNG)
    monkeypatch.undo()
    assert recover(s.site) == []
    ((made, _),) = s.vault.note("pending").items()
    assert submit_approved(s.site, made)[1].admitted
    assert (s.spent("k"), s.vault.note("pending"), s.vault.blobs) == (((0, 1), (0, 1)), {}, {})


def test_after_a_crash_when_it_had_set_out_its_patients_never_take_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it may have been seen. What is kept can be sent again, and the next release is of other patients."""
    s = site_world(tmp_path, max_releases_per_patient=3)
    monkeypatch.setattr(DirectCoordinatorClient, "submit", _crash)
    with pytest.raises(KeyboardInterrupt):
        release_synthetic(s.site, ksame(), "OT", RNG)
    monkeypatch.undo()
    assert recover(s.site) == [], "its grant is held: it is made, and only the answer is missing"
    ((made, _),) = s.vault.note("pending").items()
    withdraw(s.site, made)
    assert s.spent("k") == ((0, 1), (0, 1))
    with pytest.raises(CohortTooSmallError):
        release_synthetic(s.site, ksame(), "OT", RNG)
    s.vault.patients = 24
    _, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert verdict.admitted


def test_what_is_sent_again_is_reviewed_by_the_policy_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: it had set out under a policy that admitted it, and nobody has it yet."""
    s = site_world(tmp_path)
    monkeypatch.setattr(DirectCoordinatorClient, "submit", _crash)
    with pytest.raises(KeyboardInterrupt):
        release_synthetic(s.site, ksame(), "OT", RNG)
    monkeypatch.undo()
    ((made, _),) = s.vault.note("pending").items()
    tight = parse(policy(k_min=11), "tight")
    s.site = replace(s.site, ledger=LedgerService(s.site.ledger.store, lambda _site: tight))
    with pytest.raises(ReviewRejectedError, match="min_k"):
        submit_approved(s.site, made)
    assert made in s.vault.note("pending")
    assert s.intake.register.store.state.releases == {}


def test_a_policy_that_was_tightened_binds_an_account_that_was_opened_before(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    tight = parse(policy(epsilon="4.0"), "tight")
    loose = s.site.ledger
    s.site = replace(s.site, ledger=LedgerService(loose.store, lambda _site: tight))
    with pytest.raises(ReviewRejectedError, match="budget"):
        Participant(s.site, "OT", UnsafeSeededEntropy(1)).join("run-1", federated(rounds=4))
    s.site = replace(s.site, ledger=loose)
    Participant(s.site, "OT", UnsafeSeededEntropy(1)).join("run-2", federated(rounds=4))


def test_a_job_for_more_patients_than_delta_allows_is_not_priced(tmp_path: Path) -> None:
    """P1: delta < 1 / patients, by the public bound that the job itself names."""
    s = site_world(tmp_path)
    job = federated(public_patients=1_000_000)
    with pytest.raises(ReviewRejectedError, match="delta"):
        Participant(s.site, "OT", UnsafeSeededEntropy(1)).join("run-1", job)
    assert not s.site.ledger.store.state.grants


@pytest.mark.parametrize("run", ["Dr Müller was here", "a b", "", "x" * 65, "../run"])
def test_a_run_without_a_proper_name_is_not_priced(tmp_path: Path, run: str) -> None:
    s = site_world(tmp_path)
    with pytest.raises(ReviewRejectedError, match="run"):
        Participant(s.site, "OT", UnsafeSeededEntropy(1)).join(run, federated())
    assert not s.site.ledger.store.state.grants


def test_what_sets_out_is_in_the_sites_ledger_before_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path)
    seen: list[int] = []
    submit = DirectCoordinatorClient.submit

    def look(self: DirectCoordinatorClient, key: str, envelope: bytes, artifact: bytes) -> Verdict:
        seen.append(len(s.site.ledger.store.state.sent))
        return submit(self, key, envelope, artifact)

    monkeypatch.setattr(DirectCoordinatorClient, "submit", look)
    release_synthetic(s.site, ksame(), "OT", RNG)
    assert seen == [1]
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    s.join(p, federated())
    p.train("run-1", 1, federated().initial())
    assert len(s.site.ledger.store.state.sent) == 2


def test_leaving_a_run_for_another_writes_its_last_verdict_down_first(tmp_path: Path) -> None:
    s = site_world(tmp_path, epsilon="8.0")
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    small = replace(federated(rounds=1), noise_multiplier=8.0)
    s.join(p, small)
    sent = p.train("run-1", 1, small.initial())
    s.arrives(sent)
    s.join(p, small, "run-2")
    assert sent.release.release in s.site.ledger.store.state.releases
    with pytest.raises(ReviewRejectedError):
        p.join("run-3", federated(rounds=40))
    reads = s.vault.reads
    with pytest.raises(ReviewRejectedError):
        p.train("run-2", 1, small.initial())
    assert s.vault.reads == reads, "no patient is read under a grant that is gone"


def test_contradictory_answers_of_a_coordinator_do_not_stop_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    s.join(p, federated(rounds=3))
    first = p.train("run-1", 1, federated().initial())
    p.train("run-1", 2, federated().initial())
    answers = {f"submit-{first.release.release}": None}
    monkeypatch.setattr(
        DirectCoordinatorClient, "outcome", lambda self, key, _envelope: answers.get(key, Verdict((), "A"))
    )
    p.follow()
    answers[f"submit-{first.release.release}"] = Verdict((), "A")  # a round before one that is in the books
    p.follow()
    assert recover(s.site) == []
    assert s.spent("rdp")[0][0] == 0


def test_one_lost_update_does_not_keep_later_verdicts_out_of_the_books(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    s.join(p, federated(rounds=2))
    p.train("run-1", 1, federated().initial())  # never arrives
    sent = p.train("run-1", 2, federated().initial())
    s.arrives(sent)
    assert not p.follow()
    assert sent.release.release in s.site.ledger.store.state.releases


def test_an_update_is_made_once_and_sent_again_when_asked_again(tmp_path: Path) -> None:
    """A coordinator that restarts asks the same round again; other parameters must not buy a second update."""
    s = site_world(tmp_path)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    s.join(p, federated())
    start = federated().initial()
    sent = p.train("run-1", 1, start)
    reads = s.vault.reads
    other = Update(np.ones_like(start.vector))
    with pytest.raises(ReviewRejectedError, match="behind: this round was made from another model"):
        p.train("run-1", 1, other)
    again = p.train("run-1", 1, start)
    assert (again.envelope, s.vault.reads) == (sent.envelope, reads)
    assert again.artifact == sent.artifact


def test_rounds_out_of_order_beyond_the_grant_or_of_another_run_are_refused(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    start = federated().initial()
    with pytest.raises(ReviewRejectedError):
        p.train("run-1", 1, start)
    s.join(p, federated(rounds=2))
    with pytest.raises(ReviewRejectedError):
        p.train("run-2", 1, start)
    p.train("run-1", 5, start)
    with pytest.raises(ReviewRejectedError):
        p.train("run-1", 4, start)
    p.train("run-1", 6, start)
    with pytest.raises(ReviewRejectedError):
        p.train("run-1", 7, start)


def test_a_run_is_priced_once_and_a_part_that_a_restart_does_not_take_up_is_spent(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    first = p.join("run-1", federated())
    assert p.join("run-1", federated()) == first
    assert len(s.site.ledger.store.state.grants) == 1
    with pytest.raises(ReviewRejectedError, match="priced before"):
        p.join("run-1", federated(rounds=2))
    assert recover(s.site) == [], "the part is open, by its note"
    s.vault.write_note("run", None)
    assert recover(s.site) == [p.grant]
    (held, spent), _ = s.spent("rdp")
    assert held == 0 < spent
    with pytest.raises(ReviewRejectedError, match="priced before"):
        Participant(s.site, "OT", UnsafeSeededEntropy(1)).join("run-1", federated())


def test_a_failure_in_the_middle_of_training_counts_as_trained(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    s.join(p, federated(rounds=1))
    with pytest.raises(ValueError, match="parameters"):
        p.train("run-1", 1, Update(np.zeros(7, np.float32)))
    with pytest.raises(ReviewRejectedError):
        p.train("run-1", 2, federated().initial())


def test_the_verdicts_on_updates_are_written_into_the_sites_ledger(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    s.join(p, federated(rounds=1))
    sent = p.train("run-1", 1, federated().initial())
    assert not p.follow(), "no verdict yet"
    s.arrives(sent)
    assert p.follow()
    assert s.spent("rdp")[0][0] == 0
    assert sent.release.release in s.site.ledger.store.state.releases


def _crash(*_: object) -> None:
    """The process is gone: nothing after this line runs."""
    raise KeyboardInterrupt


def _refusals(register: LedgerService) -> list[Any]:
    entries = [register.store.line(i).record.entry for i in range(register.store.state.size)]
    return [e for e in entries if type(e).__name__ == "Refused"]


def _fresh(tmp_path: Path) -> Path:
    (tmp_path / "second").mkdir()
    return tmp_path / "second"


def test_a_release_waits_for_persons_over_restarts_and_leaves_when_all_have_approved(tmp_path: Path) -> None:
    s, careful, local = approving(tmp_path)
    release = waiting(s)
    assert s.intake.register.store.state.releases == {}
    assert recover(s.site) == []
    approve(s, careful, release)
    with pytest.raises(ReviewRejectedError, match="hospital"):
        submit_approved(s.site, release.release)
    approve(s, local, release)
    signed, verdict = submit_approved(s.site, release.release)
    assert verdict.admitted
    assert set(signed.release.approvals) == {"compliance", "hospital"}
    assert s.spent("k") == ((0, 1), (0, 1))
    with pytest.raises(ReviewRejectedError):
        submit_approved(s.site, release.release)


def test_what_a_person_has_refused_never_leaves_whoever_approved_it(tmp_path: Path) -> None:
    s, careful, local = approving(tmp_path)
    release = waiting(s)
    words = (f"refuse-{release.release}", "refuse", release.release, f"{release.artifact_sha256} likeness")
    decisions.approve(s.site.ledger.store, careful.approval(*words, origin=s.site.ledger.store.origin))
    approve(s, careful, release)
    approve(s, local, release)
    with pytest.raises(ReviewRejectedError, match="refused it"):
        submit_approved(s.site, release.release)
    assert s.intake.register.store.state.releases == {}


def test_an_approval_of_other_bytes_is_none(tmp_path: Path) -> None:
    s, careful, local = approving(tmp_path)
    release = waiting(s)
    approve(s, careful, release)
    approve(s, local, release, digest="0" * 64)
    with pytest.raises(ReviewRejectedError, match="hospital"):
        submit_approved(s.site, release.release)
    assert s.intake.register.store.state.releases == {}


def test_rounds_are_refused_at_their_price_where_persons_must_approve(tmp_path: Path) -> None:
    s, *_ = approving(tmp_path)
    with pytest.raises(ReviewRejectedError, match="approve"):
        Participant(s.site, "OT", UnsafeSeededEntropy(1)).join("run-1", federated())
    assert s.spent("rdp") == ((0, 0), (0, 0))


def test_an_auditor_finds_an_approval_that_nobody_gave(tmp_path: Path) -> None:
    s, *_ = approving(tmp_path)
    release = waiting(s)
    lied = replace(release, approvals={"compliance": "ab" * 32, "hospital": "cd" * 32})
    s.site.ledger.send(lied, s.site.seal(lied))
    s.site.ledger.store.close()
    with pytest.raises(ExportError, match="an approval that it names is not in the ledger"):
        verify(export_file(tmp_path / "site-a.db", "lazaret/test", s.hospital.key))


def test_a_run_that_ends_early_gives_back_what_was_not_used_at_the_site(tmp_path: Path) -> None:
    s = site_world(tmp_path)
    p = Participant(s.site, "OT", UnsafeSeededEntropy(1))
    s.join(p, federated(rounds=3))
    whole = s.spent("rdp")[0][0]
    sent = p.train("run-1", 1, federated().initial())
    s.arrives(sent)
    p.leave_run()
    (held, spent), (hub_held, hub_spent) = s.spent("rdp")
    assert held == hub_held == 0
    assert 0 < spent < whole == hub_spent
    s.site.ledger.store.close()
    verify(export_file(tmp_path / "site-a.db", "lazaret/test", s.hospital.key))


def test_what_waited_since_before_pictures_were_compressed_leaves_as_persons_approved_it(tmp_path: Path) -> None:
    """In another form the coordinator would refuse it at the end, or its persons would have approved other bytes."""
    s, careful, local = approving(tmp_path)
    release = waiting(s)
    old = shard_of([pack_earlier_png(np.arange(64 * 64, dtype=np.uint8).reshape(64, 64) // 16)])
    before = replace(release, artifact_sha256=hashlib.sha256(old).hexdigest(), artifact_bytes=len(old))
    told = {"grant": release.grant, "statement": encode(before).decode(), "persons": []}
    told |= {"artifact": base64.b64encode(old).decode(), "clear": ""}
    s.vault.write_note("pending", {release.release: told})
    for person in (careful, local):
        approve(s, person, before)
    assert recover(s.site) == []
    signed, verdict = submit_approved(s.site, release.release)
    assert (verdict.admitted, signed.artifact) == (True, old)


def test_what_leaves_sealed_to_a_reader_is_given_back_in_clear(tmp_path: Path) -> None:
    reader = "a" * 64
    readers = f'["{reader}"]'
    federation = policy(max_releases_per_patient=9, readers=readers)
    s = site_world(tmp_path, approvals='["compliance"]', readers=readers, federation=federation)
    officer = Person("dpo-1", "compliance")
    decisions.appoint(s.site.ledger.store, officer.name, officer.role, officer.public)
    with pytest.raises(ApprovalPending) as caught:
        release_synthetic(s.site, ksame(), "OT", RNG, ReleaseFormat(reader=reader, seal=lambda raw: raw[::-1]))
    made = caught.value.signed
    approve(s, officer, made.release)
    signed, _ = submit_approved(s.site, made.release.release)
    assert (signed.artifact, signed.clear) == (made.artifact, made.artifact[::-1])
    assert unpack_images(signed.clear)[0].shape[1:] == (8, 8)


def test_what_waits_sealed_to_a_reader_is_shown_in_clear(tmp_path: Path) -> None:
    s, *_ = approving(tmp_path)
    release = waiting(s)
    sealed = replace(
        release, reader="a" * 64, artifact_sha256=hashlib.sha256(b"sealed").hexdigest(), artifact_bytes=6
    )
    told = {"grant": release.grant, "statement": encode(sealed).decode(), "persons": []}
    told |= {"artifact": base64.b64encode(b"sealed").decode(), "clear": base64.b64encode(b"clear").decode()}
    s.vault.write_note("pending", {release.release: told})
    recover(s.site)
    one = listed(s.vault)[release.release]
    assert statement_of(one) == sealed
    assert artifact_of(s.vault, release.release, one) == b"sealed"
    assert clear_of(s.vault, release.release, one) == b"clear"
