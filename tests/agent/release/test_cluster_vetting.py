"""Vetting of representatives: what is like somebody stays with its cluster, and what is left is measured."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agent.cli.vetting_review import as_json, in_words
from agent.domain import Clusters, Cohort, Image, Patient, Selection, Split, SyntheticSet
from agent.errors import ReviewRejectedError, SiteStorageError
from agent.intervals import bounds
from agent.mechanisms.common.linear_codec import fit_basis
from agent.mechanisms.ksame.mechanism import KSame
from agent.microaggregation.aggregation import aggregate_labels
from agent.microaggregation.released_clusters import ReleasedCluster
from agent.models.image_tensors import to_bytes, to_tensor, to_unit
from agent.models.recognition.recogniser import RecogniserError
from agent.models.recognition.score_tail import Tail
from agent.models.recognition.verifier import VerifierFeatures
from agent.models.training_loop import torch_generator
from agent.models.weights import Origin
from agent.release.approval import submit_approved, withdraw
from agent.release.cluster_vetting import Findings, NoneLeftError, Vetter, VettingRequest
from agent.release.history import kept_clusters
from agent.release.maker_process import MakerEndedError
from agent.release.pipeline import release_synthetic
from agent.release.ports import ApprovalPending, SignedRelease
from agent.release.vetting_statement import (
    TooFewToVetError,
    VettingReport,
    VettingResult,
    compared,
    round_down_coarse,
    round_up_coarse,
)
from agent.reports.vetting import render
from agent.vetting.filter import KINDS
from agent.vetting.reference import Vetting
from agent.vetting.requirements import CAUGHT, PLANTED, has_statistical_power
from coordinator.admission import AdmissionService
from policies.governance import decisions
from policies.review.policy import PRESETS, parse, preset
from policies.statements import decimal
from protos.artifacts.arrays import unpack_images
from protos.common.errors import WorkerError
from tests.support.ledger_world import Person, policy
from tests.support.site_world import DirectCoordinatorClient, MemoryVault, SiteWorld, approve, site_world
from tests.support.vault_records import open_vault, record
from tests.support.verifiers import chests
from tests.support.verifiers import demo_vetting as vetting

SIDE, K, EVERYBODY = 32, 5, 44
Pictures = NDArray[np.uint8]


@cache
def patients() -> tuple[Patient, ...]:
    pictures = (chests(EVERYBODY, 5, side=SIDE, visits=1)[0] / 255).astype(np.float32)
    return tuple(Patient(f"{n:04d}", (Image(one, "ab"[n % 2]),)) for n, one in enumerate(pictures))


@cache
def strangers() -> Pictures:
    return chests(24, 77, side=SIDE, visits=1)[0]


def near(place: int) -> Pictures:
    """(1, s, s) A near-duplicate of a patient's picture, in another light: no check for equal bytes sees it."""
    own = patients()[place].images[0].pixels[None]
    made = to_bytes(to_unit(KINDS["contrast"](to_tensor(own), torch_generator(3))))
    assert not np.array_equal(made, to_bytes(own))
    return made


@dataclass
class Ward(MemoryVault):
    """The vault in memory, with the first of these patients."""

    patients: int = EVERYBODY

    def cohort(
        self, modality: str | Selection, shape: tuple[int, ...] | None = None, without: Iterable[str] = ()
    ) -> Cohort:
        self.reads += 1
        return Cohort(self._here(without))

    def roster(
        self, selection: Selection, without: Iterable[str] = (), among: Set[str] | None = None
    ) -> tuple[tuple[str, ...], ...]:
        here = self._here(without)
        return tuple((one.images[0].label,) for one in here if among is None or one.pseudonym in among)

    def _here(self, without: Iterable[str]) -> tuple[Patient, ...]:
        gone = {*without, *self.out}
        return tuple(one for one in patients()[: self.patients] if one.pseudonym not in gone)


@dataclass(frozen=True, slots=True, eq=False)
class Handed(KSame):
    """k-Same that shows strangers; and of the first clusters, pictures that somebody planted: as a generator that
    learned the patients by heart would."""

    planted: tuple[int, ...] = ()  # patients
    first: int = 0  # of the strangers

    def run(
        self, cohort: Cohort, rng: np.random.Generator, others: tuple[Patient, ...] = ()
    ) -> tuple[SyntheticSet, Clusters]:
        _, clusters = KSame.run(self, cohort, rng, others)
        images = strangers()[self.first : self.first + len(clusters.members)].copy()
        for place, patient in enumerate(self.planted):
            images[place] = near(patient)[0]
        return SyntheticSet(images, aggregate_labels(cohort, clusters)), clusters


def handed(*planted: int, provenance: str = "public", first: int = 0) -> Handed:
    basis = fit_basis(strangers()[:20].astype(np.float32) / np.float32(255), 4, provenance)  # type: ignore[arg-type]
    return Handed(K, 2, basis, planted, first)


def ready(folder: Path, patients: int = EVERYBODY, **changes: object) -> SiteWorld:
    told = {"max_reid_rate": 0.5, "max_releases_per_patient": 9, **changes}
    s = site_world(folder, 12, **told)
    s.intake = AdmissionService.over(s.intake.register.store, parse(policy(**told), "federation"))
    s.vault, s.gateway = Ward(patients), DirectCoordinatorClient(s.intake, "site-a")
    s.site = replace(s.site, vault=s.vault, gateway=s.gateway)
    return s


def shown(artifact: bytes) -> set[bytes]:
    return {picture.tobytes() for picture in unpack_images(artifact)[0]}


def behind(s: SiteWorld, number: int, key: str = "clusters") -> list[set[str]]:
    return [set(cluster) for cluster in s.vault.note("releases")[number][key]]


@pytest.fixture(scope="module")
def examiner() -> Vetter:
    return VettingRequest(vetting(), pictures=True).over(patients(), np.random.default_rng(0))


def nothing(_gone: Sequence[ReleasedCluster]) -> None:
    """Nobody keeps these clusters: there is nothing to retire."""


def frozen(*pictures: Pictures) -> list[ReleasedCluster]:
    return [
        ReleasedCluster(tuple(f"{place}-{n}" for n in range(K)), picture, "a", K, 2, "form")
        for place, picture in enumerate(pictures)
    ]


def test_what_is_planted_passes_without_a_vetting_and_with_one_it_goes_with_its_cluster_for_good(
    tmp_path: Path,
) -> None:
    """P7: byte for byte it is nobody's picture, so that nothing but the vetting sees it; P5: never shown again."""
    s = ready(tmp_path, patients=22)
    first, verdict = release_synthetic(s.site, handed(3), "OT", np.random.default_rng(1))
    assert verdict.admitted
    assert near(3).tobytes() in shown(first.artifact)
    assert (first.release.reid_rate, first.release.vetting_power) == (None, None)

    s.vault.patients, seen, told = EVERYBODY, list[VettingReport](), list[str]()
    s.site = replace(s.site, say=lambda _step, detail: told.append(detail))
    inspection = VettingRequest(vetting(), seen.append)
    second, verdict = release_synthetic(s.site, handed(30, first=6), "OT", np.random.default_rng(2), None, inspection)
    assert (verdict.admitted, verdict.level, second.release.vetted_against) == (True, "B", "private")
    left = shown(second.artifact)
    assert not {near(3).tobytes(), near(30).tobytes()} & left
    assert shown(first.artifact) - {near(3).tobytes()} < left, "the rest is shown again as it was"

    assert [line for line in told if "or dropped as like somebody (by chance, too)" in line]
    mine = behind(s, 1)
    free = {one.pseudonym for one in patients()} - set().union(*behind(s, 0), *mine)
    assert len(free) >= K, "nobody of the dropped cluster is behind anything; nobody takes its place"
    assert len(left) == len(mine) + len(behind(s, 1, "again"))
    (found,) = seen
    assert (found.left, found.clusters, sum(found.dropped.values())) == (len(left), len(left) + 2, 2)
    assert found.after
    assert second.release.reid_rate == round_up_coarse(found.after.high)
    assert second.release.vetting_power == round_down_coarse(found.power.caught.low)
    assert found.before.value > found.after.value

    third, _ = release_synthetic(s.site, replace(handed(first=12)), "OT", np.random.default_rng(3))
    assert near(3).tobytes() not in shown(third.artifact), "forgotten, whatever vets the next release"
    again = set().union(*behind(s, 2))
    assert free & again, "who was behind nothing may take part, as those of suppressed clusters may"


@pytest.mark.parametrize("looked", [True, False])
def test_by_private_networks_it_is_admitted_for_the_two_figures_and_no_less(tmp_path: Path, looked: bool) -> None:
    """P6: a private network makes it level C, and a policy that admits that asks how it was vetted."""
    s = ready(tmp_path, levels='["A", "B", "C"]', components='["public", "private"]')
    inspection = VettingRequest(vetting()) if looked else None
    mechanism = handed(provenance="private")
    if looked:
        signed, verdict = release_synthetic(s.site, mechanism, "OT", np.random.default_rng(1), None, inspection)
        assert (verdict.admitted, verdict.level) == (True, "C"), verdict.findings
        assert decimal(signed.release.vetting_power) >= 0.9
        return
    with pytest.raises(ReviewRejectedError) as caught:
        release_synthetic(s.site, mechanism, "OT", np.random.default_rng(1))
    assert {finding.rule for finding in caught.value.verdict.findings} == {"reid_rate", "vetting_power"}


def test_where_nothing_new_is_left_nothing_leaves_and_the_reviewer_sees_why(examiner: Vetter) -> None:
    seen = list[VettingReport]()
    watched = replace(examiner, inspection=replace(examiner.inspection, shown=seen.append))
    with pytest.raises(NoneLeftError) as caught:
        watched.examine(frozen(near(1), near(2)), frozen(strangers()[:1]), nothing)
    assert not any(character.isdigit() for character in str(caught.value))
    (found,) = seen
    assert (found.left, found.after, found.lost, len(found.exhibits)) == (0, None, ("a",), 3)
    page, lines = render(found, "ksalsa").decode(), in_words(found)
    assert "They do not leave either, since no new image passed." in page
    assert "They leave, as they are." not in page
    assert "nothing leaves: no new image passed" in lines
    assert as_json(found)["reidentified"]["after"] is None


@pytest.mark.parametrize("fault", [NoneLeftError, SiteStorageError])
def test_what_was_found_is_never_shown_again_though_the_making_did_not_end_well(
    tmp_path: Path, fault: type[BaseException]
) -> None:
    """P5: that nothing new passed, or a full disk under the page, undoes no finding; nor would a kill there."""
    s, seen = ready(tmp_path, patients=22), list[VettingReport]()
    first, _ = release_synthetic(s.site, handed(3), "OT", np.random.default_rng(1))
    assert near(3).tobytes() in shown(first.artifact)

    def look(found: VettingReport) -> None:
        seen.append(found)
        if fault is not NoneLeftError:
            raise fault("no page")

    s.vault.patients, new = EVERYBODY, handed(*((30, 31, 32, 33) if fault is NoneLeftError else ()), first=6)
    with pytest.raises(fault):
        release_synthetic(s.site, new, "OT", np.random.default_rng(2), None, VettingRequest(vetting(), look))
    assert seen
    again, _ = kept_clusters(s.site, new, Selection("OT", new.shape))
    assert {one.images.tobytes() for one in again} == shown(first.artifact) - {near(3).tobytes()}


def test_a_release_that_waits_does_not_send_what_a_later_vetting_retired(tmp_path: Path) -> None:
    """P5: it was made and sealed before the picture was found."""
    s = ready(tmp_path, patients=22, approvals='["compliance"]')
    person = Person("dpo-1", "compliance")
    decisions.appoint(s.site.ledger.store, person.name, person.role, person.public)

    def waits(many: int, first: int, *planted: int, looked: VettingRequest | None = None) -> SignedRelease:
        s.vault.patients = many
        with pytest.raises(ApprovalPending) as caught:
            release_synthetic(s.site, handed(*planted, first=first), "OT", np.random.default_rng(1), None, looked)
        approve(s, person, caught.value.signed.release)
        return caught.value.signed

    one = waits(18, 0, 3)
    assert submit_approved(s.site, one.release.release)[1].admitted
    two = waits(30, 6)
    three = waits(EVERYBODY, 12, looked=VettingRequest(vetting()))
    assert near(3).tobytes() in shown(two.artifact)
    with pytest.raises(ReviewRejectedError, match="retired since: withdraw it"):
        submit_approved(s.site, two.release.release)
    signed, verdict = submit_approved(s.site, three.release.release)
    assert verdict.admitted, "what was looked at has lost nothing since"
    assert near(3).tobytes() not in shown(signed.artifact)
    withdraw(s.site, two.release.release)


def test_more_views_of_a_cluster_make_no_rate_surer(examiner: Vetter) -> None:
    """They are no trials of their own: a configuration's count of views would buy an admission."""
    for views in (1, 20):
        passed = examiner.examine(
            frozen(*(np.repeat(one[None], views, axis=0) for one in strangers()[:8])), (), nothing
        )
        assert passed.found
        assert passed.found.after
        assert (passed.found.pictures, passed.found.left) == (8 * views, 8)
        assert (passed.found.after.low, passed.found.after.high) == bounds(0, 8)


def test_a_cluster_is_re_identified_if_one_of_its_pictures_is(examiner: Vetter) -> None:
    found = examiner.examine(frozen(strangers()[2:3], np.concatenate([strangers()[3:6], near(7)])), (), nothing).found
    assert found
    assert found.after
    assert (found.before.value, found.before.high, found.after.value) == (0.5, bounds(1, 2)[1], 0.0)


def test_who_is_of_another_part_or_label_than_the_selection_is_compared_with_too(tmp_path: Path) -> None:
    """Whoever is like a picture is like it, whatever the release was made of."""
    s = ready(tmp_path, max_reid_rate=0.9)  # a part of so few makes few clusters, and an interval is wide
    with closing(open_vault(tmp_path)) as vault:
        for n, one in enumerate(patients()):
            pixels = np.asarray(one.images[0].pixels)
            vault.keep(replace(record(n, n, "c" if n >= 36 else "ab"[n % 2]), pixels=pixels))
        s.site = replace(s.site, vault=vault)
        selection = Selection(
            "OT", (SIDE, SIDE), labels=frozenset("ab"), split=Split("s", {"in": 3, "out": 1}), part="in"
        )
        whole = [one.pseudonym for one in vault.cohort("OT", (SIDE, SIDE)).patients]
        mine = {one.pseudonym for one in vault.cohort(selection).patients}
        others = [n for n, name in enumerate(whole) if name not in mine]
        assert len(whole) == EVERYBODY
        planted = (others[0], others[-1])
        assert planted[0] < 36 <= planted[1], "one of the other part, one of another label"
        looked = VettingRequest(vetting())
        signed, verdict = release_synthetic(
            s.site, handed(*planted), selection, np.random.default_rng(1), None, looked
        )
        assert verdict.admitted
        assert not {near(n).tobytes() for n in planted} & shown(signed.artifact)
        assert compared(selection) == Selection("OT", (SIDE, SIDE))


def test_a_label_of_which_no_cluster_is_left_is_told_to_the_site_and_not_stated(examiner: Vetter) -> None:
    fresh = frozen(strangers()[2:3], near(7), strangers()[5:6], near(8))
    named = [replace(one, label=label) for one, label in zip(fresh, ("a", "rare", "b", "b"), strict=True)]
    passed = examiner.examine(named, (), nothing)
    assert passed.found
    assert passed.found.lost == ("rare",)
    assert "labels of which no cluster is left: rare" in in_words(passed.found)
    assert as_json(passed.found)["lost"] == ["rare"]
    assert "No cluster is left with these labels: rare." in render(passed.found, "ksalsa").decode()


def test_the_stated_rate_is_so_coarse_that_it_does_not_tell_the_number_of_clusters() -> None:
    """Design section 5: of level B a figure is coarse. Every limit of a preset can be met exactly."""
    told = [round_up_coarse(bounds(0, n)[1]) for n in range(1, 400)]
    assert all(told.count(one) >= K for one in set(told) if decimal(one) <= 0.2), "what any preset admits is below"
    assert {round_up_coarse(bounds(0, n)[1]) for n in (35, 72)} == {"0.1"}
    assert [round_up_coarse(bounds(0, n)[1]) for n in (34, 73, 188, 189, 380, 381)] == [
        "0.15",
        "0.05",
        "0.05",
        "0.02",
        "0.02",
        "0.01",
    ]
    for share in np.linspace(0, 1, 501).tolist():
        assert share <= decimal(round_up_coarse(share)) <= share + 0.05
    for name in (path.stem for path in PRESETS.glob("*.toml")):
        limit = parse(preset(name), "federation").max_reid_rate
        assert decimal(round_up_coarse(limit)) == limit
    with pytest.raises(ValueError, match="empty"):
        round_up_coarse(float("nan"))


def test_a_cluster_goes_whole_though_one_of_its_pictures_alone_is_like_somebody(examiner: Vetter) -> None:
    views = np.concatenate([strangers()[:1], near(7), strangers()[1:2]])
    fresh = frozen(strangers()[2:5], views, np.full((3, SIDE, SIDE), 90, np.uint8))  # the last: nothing can be said
    passed = examiner.examine(fresh, (), nothing)
    assert [one.members for one in passed.fresh] == [fresh[0].members]
    assert passed.found
    assert (passed.found.pictures, passed.found.clusters, passed.found.left) == (9, 3, 1)
    assert passed.found.dropped["not a number"] == 3


def test_what_the_reviewer_sees_shows_patients_and_names_nobody(examiner: Vetter) -> None:
    passed = examiner.examine(frozen(strangers()[2:3], near(7)), (), nothing)
    assert passed.found
    kept, dropped = sorted(passed.found.exhibits, key=lambda one: one.reason)
    assert (kept.reason, np.array_equal(kept.made, strangers()[2])) == ("", True)
    assert np.array_equal(dropped.nearest, np.rint(patients()[7].images[0].pixels * 255).astype(np.uint8))
    page = render(passed.found, "ksalsa").decode()
    assert page.count("<figure class='exhibit ") == 2
    assert "FOR THIS SITE ONLY" in page
    assert "alignment" not in page
    lines = "\n".join(in_words(passed.found))
    assert "2 images of 2 clusters compared with every comparable image, 1 too similar to a patient; " in lines
    assert passed.found.after
    assert as_json(passed.found)["reidentified"]["after"]["high"] == passed.found.after.high
    for one in (*passed.fresh, *frozen(near(7))):
        assert not [member for member in one.members if member in page + lines]


def test_too_few_patients_to_show_anything_are_known_before_a_price_is_held(tmp_path: Path) -> None:
    s = ready(tmp_path, patients=30)
    with pytest.raises(TooFewToVetError) as caught:
        release_synthetic(s.site, handed(), "OT", np.random.default_rng(1), None, VettingRequest(vetting()))
    assert not any(character.isdigit() for character in str(caught.value))
    assert (s.vault.reads, s.spent("k")) == (0, ((0, 0), (0, 0)))


def test_so_many_patients_suffice_as_the_interval_says() -> None:
    least = next(n for n in range(1, PLANTED) if has_statistical_power(n))
    assert bounds(least - 1, least - 1)[0] < CAUGHT <= bounds(least, least)[0]
    assert has_statistical_power(100_000)
    assert not has_statistical_power(0)


@dataclass(frozen=True)
class Blind:
    """A verifier to whom every picture is somebody else, and of whom nobody told."""

    tail: Tail
    origin: Origin
    name: str = "blind"

    def look(self, images: torch.Tensor) -> VerifierFeatures:
        some = torch.randn(len(images), 16)
        return VerifierFeatures(some, some / some.norm(dim=1, keepdim=True))

    def logits(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.full((len(a),), -9.0) + 0.01 * (a * b).sum(dim=1)


def test_a_vetting_that_misses_copies_lets_nothing_leave(tmp_path: Path) -> None:
    """That a verifier finds nothing proves nothing where it finds no copy either."""
    s = ready(tmp_path)
    blind = Vetting(Blind(vetting().verifier.tail, Origin("public", "0" * 64)), vetting().unseen)
    with pytest.raises(RecogniserError, match="near-duplicates that were planted"):
        release_synthetic(s.site, handed(), "OT", np.random.default_rng(1), None, VettingRequest(blind))
    assert s.spent("k") == ((0, 1), (0, 1))
    assert s.vault.note("releases") is None


def test_a_vetting_that_is_killed_keeps_its_grant_and_goes_on(tmp_path: Path) -> None:
    s, looked = ready(tmp_path), VettingRequest(vetting())

    def killed(call: Any, *given: Any) -> Any:
        if call.__name__ == "compare":
            raise MakerEndedError(signal.SIGKILL)
        return call(*given)

    with pytest.raises(MakerEndedError, match="signal 9, perhaps since memory ran out"):
        release_synthetic(replace(s.site, run=killed), handed(), "OT", np.random.default_rng(1), None, looked)
    assert s.spent("k")[0] == (1, 0)
    _, verdict = release_synthetic(s.site, handed(), "OT", np.random.default_rng(1), None, looked)
    assert (verdict.admitted, s.spent("k")) == (True, ((0, 1), (0, 1)))


def test_a_vetting_that_answers_of_something_else_is_refused(examiner: Vetter) -> None:
    """It comes from a confined process, whose word is no word to rely on."""
    other = replace(examiner.power, kinds={**examiner.power.kinds, "other": examiner.power.caught})
    with pytest.raises(WorkerError, match="of other copies"):
        VettingRequest(vetting()).over(patients(), np.random.default_rng(1), lambda *_: other)
    for reasons, taken in ((("",), (True, True)), (("", ""), (True,)), (("", "", ""), (True, True))):
        lies = replace(examiner, run=lambda *_, told=(reasons, taken): Findings(*told, {}, {}, ()))
        with pytest.raises(WorkerError, match="of other images"):
            lies.examine(frozen(*strangers()[:2, None]), (), nothing)


@pytest.mark.parametrize(
    "lie", [{"reasons": ("\x1b[2J",)}, {"thresholds": {"other": 1.0}}, {"intervals": {"other": (0.0, 1.0)}}]
)
def test_what_is_printed_of_a_finding_has_the_names_that_there_are(lie: dict[str, Any]) -> None:
    good = Findings(("", "copy"), (False, True), {"unseen": 0.5}, {"verifier": (0.0, 1.0)}, ())
    with pytest.raises(ValueError, match="unknown reason or threshold"):
        replace(good, **lie)


def test_without_a_vetting_everything_passes_and_no_figure_is_stated(examiner: Vetter) -> None:
    fresh = tuple(frozen(near(1)))
    passed = VettingResult(fresh, ())
    assert (passed.fresh, passed.gone, passed.found) == (fresh, (), None)
