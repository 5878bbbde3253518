"""PrivImage as a mechanism and as a release: one price for both queries, nothing twice, nothing after a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Cohort, Image, Patient, Selection
from agent.dp.noise import SystemEntropy
from agent.errors import CoordinatorUnreachableError, DivergedError, ReviewRejectedError
from agent.mechanisms.common.generative_model import PublicImages
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.privimage import mechanism as privimage
from agent.mechanisms.privimage.mechanism import PrivImage, Synthetic
from agent.mechanisms.privimage.semantic_query import DrownedHistogramError, SemanticQuery, SharedImageError, _total
from agent.release.approval import submit_approved
from agent.release.pipeline import ReleaseFormat, draft_of, package_images, release_resumable, submit
from agent.release.ports import ApprovalPending
from agent.release.recovery import recover
from agent.release.resumable import ReleaseInProgressError, abandon, find_resumable, hold, place_of
from agent.storage.encrypted_sqlite import VaultError
from policies.accounting.accountant import NANO, epsilon, tight_epsilon
from policies.accounting.claims import Composed, GaussianQuery, SubsampledGaussian
from protos.artifacts.arrays import unpack_images
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.site_world import MemoryCheckpointStore, MemoryVault, SiteWorld, site_of, site_world
from tests.support.small_privimage import public, tiny

PATIENTS = 60
WHERE = Selection("OT", (8, 8))


def cohort(patients: int = PATIENTS) -> Cohort:
    return MemoryVault(patients).cohort(WHERE)


def make(s: SiteWorld, mechanism: PrivImage | None = None) -> Any:
    return release_resumable(s.site, mechanism or tiny(), WHERE, SystemEntropy())


def test_one_claim_covers_the_histogram_and_every_step() -> None:
    """Theorem E.2."""
    claim = tiny().claim()
    assert claim == Composed((GaussianQuery(2.5, 1, 1), SubsampledGaussian(0.25, 4.0, 6)))
    assert epsilon([claim], 1e-5, 4) > epsilon([claim.parts[1]], 1e-5, 4)


def test_the_set_has_the_asked_size_and_labels_of_the_configuration_alone() -> None:
    made = tiny().run(cohort(), UnsafeSeededEntropy(1))
    assert (made.images.shape, set(made.labels)) == ((9, 8, 8), {"any"})
    nobody = tiny(classes=("9",))
    with pytest.raises(DrownedHistogramError, match="any"):  # by the noisy counts, not by a count of patients
        nobody.run(cohort(), UnsafeSeededEntropy(1))


def test_two_runs_with_every_seed_equal_have_different_noise() -> None:
    first, second = (tiny().run(cohort(), SystemEntropy()) for _ in range(2))
    assert not np.array_equal(first.images, second.images)
    repeated = [tiny().run(cohort(), UnsafeSeededEntropy(4)) for _ in range(2)]
    assert np.array_equal(*(made.images for made in repeated)), "but for the noise, nothing differs"


def test_a_public_picture_that_is_a_patients_stops_the_release() -> None:
    theirs = Image((public()[5] / np.float32(255)).astype(np.float32), "1")
    mixed = Cohort((Patient("0", (theirs,)), *cohort().patients))
    with pytest.raises(SharedImageError, match="1 of 60"):
        tiny().run(mixed, SystemEntropy())


def test_classes_are_drawn_evenly_or_by_the_noisy_totals() -> None:
    architecture = replace(tiny().model.architecture, classes=3)
    each = tiny(pooled="", model=replace(tiny().model, architecture=architecture), query=SemanticQuery(1, 0.3, 1))
    made = each.run(cohort(120), UnsafeSeededEntropy(1))
    assert sorted(made.labels) == sorted(["0", "1", "2"] * 3)
    dice = np.random.default_rng(2)
    of = ["0"] * 80 + ["1"] * 30 + ["2"] * 30
    skew = Cohort(
        tuple(
            Patient(f"{n:03d}", (Image(dice.random((8, 8)).astype(np.float32), label),)) for n, label in enumerate(of)
        )
    )
    noisy = replace(each, synthetic=Synthetic(9, "noisy")).run(skew, UnsafeSeededEntropy(1))
    assert Counter(noisy.labels)["0"] in (5, 6), "80 of 140, but for the noise"
    assert Counter(each.run(skew, UnsafeSeededEntropy(1)).labels)["0"] == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"classes": ()}, "classes"),
        ({"classes": ("1", "1")}, "classes"),
        ({"pooled": ""}, "conditions"),
        ({"pretraining_steps": 0}, "pretraining"),
        ({"query": SemanticQuery(1, 40.0, 1)}, "drown"),
        ({"public": PublicImages(public(), np.full(60, 3))}, "semantic"),
        ({"public": PublicImages(np.repeat(np.repeat(public(), 2, 1), 2, 2), np.zeros(60, np.int64))}, "size"),
    ],
)
def test_what_does_not_fit_together_cannot_be_built(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tiny(**change)


def test_a_patient_with_a_thousand_pictures_moves_the_histogram_no_further_than_one() -> None:
    """Bad input of the issue: bounded, not refused; the claim is of the patient, however many pictures there are."""
    heavy = Patient("heavy", tuple(cohort(1).patients[0].images[:1]) * 1000)
    many = Cohort((*cohort().patients, heavy))
    asked = tiny()
    kept = [asked._counted(c) for c in (cohort(), many)]
    counts = [_total(k, asked.semantics, asked.drawn, asked.query, UnsafeSeededEntropy(1)) for k in kept]
    moved = np.linalg.norm(counts[1].astype(float) - counts[0].astype(float)) / (1 << 30)
    assert 0.5 < moved <= asked.query.claim().sensitivity
    assert len(asked.run(many, UnsafeSeededEntropy(1)).labels) == 9


# -- as a release


def test_epsilon_is_one_number_in_the_statement_in_both_ledgers_and_recomputed(tmp_path: Path) -> None:
    s = site_world(tmp_path, PATIENTS)
    signed, verdict = make(s)
    assert (verdict.admitted, verdict.level) == (True, "A")
    account = s.site.ledger.account("site-a", signed.release.claim)
    again = epsilon([tiny().claim()], float(account.opened.delta), account.opened.order)
    assert signed.release.epsilon_nano == pytest.approx(again * NANO, rel=1e-9)
    assert s.spent("rdp")[0] == s.spent("rdp")[1] == (0, verdict.amount)
    assert tight_epsilon([tiny().claim()], float(account.opened.delta)) <= again
    images, labels = unpack_images(signed.artifact)
    assert (images.shape, set(labels)) == ((9, 8, 8), {"any"})
    assert s.vault.blobs == {}, "nothing of the training stays"


def test_a_query_function_for_which_nobody_vouches_is_not_even_priced(tmp_path: Path) -> None:
    s = site_world(tmp_path, PATIENTS)
    with pytest.raises(ReviewRejectedError, match="provenance"):
        make(s, tiny("file"))
    assert (s.vault.reads, s.spent("rdp")) == (0, ((0, 0), (0, 0)))


def test_a_failure_in_the_middle_spends_the_grant_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path, PATIENTS)

    def fails(*_: object, **__: object) -> None:
        raise DivergedError("after step 3: a parameter is no number")

    monkeypatch.setattr(privimage, "train_privately", fails)
    with pytest.raises(DivergedError):
        make(s)
    (held, spent), _ = s.spent("rdp")
    assert (held, spent > 0, s.vault.blobs, s.vault.note("unfinished")) == (0, True, {}, None)
    assert not s.site.ledger.store.state.sent


class Cable(MemoryCheckpointStore):
    """A place that is pulled out at its n-th writing."""

    left: list[int] = []  # noqa: RUF012 - shared by all places of one test

    def write(self, data: bytes) -> None:
        if self.left:
            self.left[0] -= 1
            if self.left[0] < 0:
                raise KeyboardInterrupt
        super().write(data)


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The process is gone at the n-th checkpoint; the next one works."""
    monkeypatch.setattr(MemoryVault, "place", lambda self, name: Cable(self.blobs, name))

    def after(writings: int) -> None:
        Cable.left[:] = [writings]

    monkeypatch.setattr(Cable, "left", [])
    return after


def reopened(s: SiteWorld, tmp_path: Path) -> SiteWorld:
    s.site.ledger.store.close()
    return replace(s, site=site_of(tmp_path, s.hospital, s.vault, s.gateway))


@pytest.mark.parametrize("writings", [0, 1, 2])
def test_what_was_interrupted_goes_on_under_its_grant_and_is_paid_once(
    tmp_path: Path, pulled: Callable[[int], None], writings: int
) -> None:
    s = site_world(tmp_path, PATIENTS)
    pulled(writings)
    with pytest.raises(KeyboardInterrupt):
        make(s)
    Cable.left[:] = []
    s = reopened(s, tmp_path)
    assert recover(s.site) == [], "the grant stays held"
    signed, verdict = make(s)
    assert verdict.admitted
    assert list(s.site.ledger.store.state.grants) == [signed.release.grant]
    assert s.spent("rdp")[0] == (0, verdict.amount)
    assert s.vault.blobs == {}


def test_a_full_disk_stops_a_training_which_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path, PATIENTS)
    full = [True]

    def write(self: MemoryCheckpointStore, data: bytes) -> None:
        if full[0] and "finetuning" in self.name:
            raise VaultError("the disk is full")
        self.blobs[self.name] = data

    monkeypatch.setattr(MemoryCheckpointStore, "write", write)
    with pytest.raises(VaultError):
        make(s)
    held = s.spent("rdp")[0]
    assert held[0] > 0
    assert recover(s.site) == []
    full[0] = False
    assert make(s)[1].admitted
    assert s.spent("rdp")[0] == (0, held[0])


def test_the_histogram_that_was_drawn_is_not_drawn_again(tmp_path: Path, pulled: Callable[[int], None]) -> None:
    s = site_world(tmp_path, PATIENTS)
    pulled(1)
    with pytest.raises(KeyboardInterrupt):
        make(s)
    Cable.left[:] = []
    (name,) = s.vault.blobs
    before = s.vault.blobs[name]
    bench = Workspace(lambda place: s.vault.place(place_of(place, name.rpartition("/")[2])))
    tiny().run(s.vault.cohort(WHERE), SystemEntropy(), bench)
    assert s.vault.blobs[name] == before


def test_another_configuration_does_not_go_on_with_it_and_giving_up_spends(
    tmp_path: Path, pulled: Callable[[int], None]
) -> None:
    s = site_world(tmp_path, PATIENTS)
    pulled(1)
    with pytest.raises(KeyboardInterrupt):
        make(s)
    Cable.left[:] = []
    s = reopened(s, tmp_path)
    other = tiny(synthetic=Synthetic(8))
    with pytest.raises(ReleaseInProgressError, match="--anew"):
        make(s, other)
    held = s.spent("rdp")[0][0]
    abandon(s.site)
    assert s.spent("rdp")[0] == (0, held)
    assert s.vault.blobs == {}
    assert make(s, other)[1].admitted


def test_whoever_opts_out_during_the_training_is_in_no_release(tmp_path: Path, pulled: Callable[[int], None]) -> None:
    s = site_world(tmp_path, PATIENTS)
    pulled(2)
    with pytest.raises(KeyboardInterrupt):
        make(s)
    Cable.left[:] = []
    s = reopened(s, tmp_path)
    s.vault.out = frozenset({"0003"})
    with pytest.raises(ReviewRejectedError, match="opted_out"):
        make(s)
    assert s.spent("rdp")[0][0] == 0, "the grant is spent"
    assert (s.vault.blobs, s.vault.note("unfinished")) == ({}, None)


def test_an_interruption_after_it_left_does_not_buy_a_second_one_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path, PATIENTS)
    with monkeypatch.context() as patch:
        patch.setattr("agent.release.pipeline.end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(s)
    spent = s.spent("rdp")
    with pytest.raises(ReleaseInProgressError, match="in full"):
        make(s)
    assert s.spent("rdp") == spent
    assert make(s)[1].admitted, "said again, it is another one, with another price"


def of_training(s: SiteWorld) -> dict[str, bytes]:
    """What lies in the vault but for made sets."""
    return {name: raw for name, raw in s.vault.blobs.items() if not name.startswith("site/kept/")}


def test_a_coordinator_that_falls_silent_at_the_end_ends_the_training_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = site_world(tmp_path, PATIENTS)
    honest = PrivImage.run

    def last(self: PrivImage, *given: Any) -> Any:
        made = honest(self, *given)
        s.gateway.shut = True
        return made

    monkeypatch.setattr(PrivImage, "run", last)
    with pytest.raises(CoordinatorUnreachableError):
        make(s)
    assert (of_training(s), s.vault.note("unfinished")) == ({}, None)
    assert s.spent("rdp")[0][0] > 0, "the outcome is unknown: held"
    s.gateway.shut = False
    assert recover(s.site) == [], "the coordinator never heard of it: it is kept"
    ((name, _),) = s.vault.note("pending").items()
    assert submit_approved(s.site, name)[1].admitted
    assert (s.spent("rdp")[0][0], s.vault.blobs) == (0, {})


def test_persons_who_must_approve_end_the_training_too(tmp_path: Path) -> None:
    s = site_world(tmp_path, PATIENTS, approvals='["compliance"]')
    with pytest.raises(ApprovalPending) as caught:
        make(s)
    assert caught.value.signed.release.release in s.vault.note("pending")
    assert of_training(s) == {}
    recover(s.site)
    assert s.spent("rdp")[0][0] > 0, "it waits for persons, and its grant with it"


def test_an_approved_release_leaves_and_not_with_somebody_who_has_opted_out(tmp_path: Path) -> None:
    """The site's record of clusters knows nothing of it: what waits says of whom it was made."""
    s = site_world(tmp_path, PATIENTS, approvals='["compliance"]')
    with pytest.raises(ApprovalPending) as caught:
        make(s)
    release = caught.value.signed.release.release
    with pytest.raises(ReviewRejectedError, match="not yet approved"):
        submit_approved(s.site, release)
    s.vault.out = frozenset({"0001"})
    with pytest.raises(ReviewRejectedError, match="opted out since"):
        submit_approved(s.site, release)


def test_what_a_kill_left_behind_is_in_no_later_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when the set was made and kept: the next release, with its own price, begins from nothing."""
    s = site_world(tmp_path, PATIENTS)
    with monkeypatch.context() as patch:
        patch.setattr("agent.release.pipeline.end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(s)
    assert len(of_training(s)) == 3
    with pytest.raises(ReleaseInProgressError, match=r"in full.*release send"):
        make(s)
    assert of_training(s) == {}
    trained: list[int] = []
    honest = privimage.train_privately

    def watched(*given: Any, **named: Any) -> int:
        trained.append(0 if named["place"].read() is None else 1)
        return honest(*given, **named)

    monkeypatch.setattr(privimage, "train_privately", watched)
    assert make(s)[1].admitted
    assert trained == [0]


def test_giving_up_by_another_mechanism_or_in_another_project_leaves_nothing(
    tmp_path: Path, pulled: Callable[[int], None]
) -> None:
    s = site_world(tmp_path, PATIENTS)
    pulled(2)
    with pytest.raises(KeyboardInterrupt):
        make(s)
    Cable.left[:] = []
    elsewhere = replace(s.vault, notes=s.vault.notes.copy(), blobs={})
    del elsewhere.notes["project/unfinished"]
    abandon(replace(s.site, vault=elsewhere))
    assert s.vault.blobs, "another project's file is not open here"
    s.vault.notes.update({k: v for k, v in elsewhere.notes.items() if not k.startswith("project/")})
    recover(s.site)
    assert s.vault.blobs == {}, "swept when its own project is opened"
    assert find_resumable(s.site, "another") is None


def test_who_came_during_an_interruption_is_not_in_it(tmp_path: Path, pulled: Callable[[int], None]) -> None:
    s = site_world(tmp_path, PATIENTS)
    pulled(2)
    with pytest.raises(KeyboardInterrupt):
        make(s)
    Cable.left[:] = []
    s.vault.patients = PATIENTS + 1
    newcomer = f"{PATIENTS:04d}"
    honest = PrivImage.run

    def looked(self: PrivImage, cohort: Cohort, *given: Any) -> Any:
        assert len(cohort.patients) == PATIENTS
        assert newcomer not in {patient.pseudonym for patient in cohort.patients}
        s.vault.out = frozenset({newcomer})  # and may opt out, which stops nothing that was made of others
        return honest(self, cohort, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivImage, "run", looked)
        _, verdict = make(s)
    assert verdict.admitted
    assert s.vault.blobs == {}


def test_pictures_for_which_nobody_vouches_are_not_even_priced(tmp_path: Path) -> None:
    """P6: what is pre-trained on gets no noise."""
    s = site_world(tmp_path, PATIENTS)
    with pytest.raises(ReviewRejectedError, match="the pretraining is private"):
        make(s, tiny(public=PublicImages(public(), tiny().public.bins)))
    assert s.spent("rdp") == ((0, 0), (0, 0))


def test_nothing_is_read_while_the_coordinator_is_silent(tmp_path: Path) -> None:
    s = site_world(tmp_path, PATIENTS)
    s.gateway.shut = True
    with pytest.raises(CoordinatorUnreachableError):
        make(s)
    assert s.vault.reads == 0


def test_a_release_that_was_compared_with_patients_is_never_level_a(tmp_path: Path) -> None:
    """P7: broken on purpose."""
    s = site_world(tmp_path, PATIENTS)
    mechanism = tiny()
    grant = hold(s.site, mechanism, "OT", "form", None)
    made = mechanism.run(s.vault.cohort(WHERE), SystemEntropy())
    draft = replace(draft_of(s.site, mechanism, grant.grant, "OT", mechanism.claim()), vetted_against="private")
    with pytest.raises(ReviewRejectedError, match="level"):
        submit(s.site, package_images(s.site, draft, made, ReleaseFormat()))


def test_half_of_a_composed_claim_is_not_what_was_granted(tmp_path: Path) -> None:
    """P11: a statement that leaves the histogram out is refused."""
    s = site_world(tmp_path, PATIENTS)
    mechanism = tiny()
    grant = hold(s.site, mechanism, "OT", "form", None)
    made = mechanism.run(s.vault.cohort(WHERE), SystemEntropy())
    less = Composed((GaussianQuery(50.0, 1, 1), mechanism.claim().parts[1]))
    with pytest.raises(ReviewRejectedError, match="claim_not_granted"):
        submit(
            s.site,
            package_images(s.site, draft_of(s.site, mechanism, grant.grant, "OT", less), made, ReleaseFormat()),
        )
