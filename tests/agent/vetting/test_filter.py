"""Vetting: every made picture beside every private one, by an embedder, a verifier and a copy check."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize

from agent.domain import Image, Patient
from agent.errors import CohortTooSmallError
from agent.intervals import Proportion
from agent.models.image_tensors import to_tensor
from agent.models.recognition.recogniser import RecogniserError
from agent.models.recognition.score_tail import Tail, fit_tail
from agent.models.training_loop import torch_generator
from agent.models.weights import Origin
from agent.vetting import filter, nearest_neighbours, reference
from agent.vetting.copy_detection import Copies, thumbnail_vectors
from agent.vetting.filter import REASONS, SINGLE, Power, measured, power
from agent.vetting.nearest_neighbours import Search, exhaustive
from agent.vetting.reference import CEILING, FLOOR, Reference, VerifierView, Vetting, look, reference_of

SIDE = 32
Floats = NDArray[np.float32]


def people(count: int, seed: int, visits: int = 1, noise: float = 0.02) -> Floats:
    """(count * visits, SIDE, SIDE): a chest that all have in common, what is one's own, and a visit's noise."""
    rng = np.random.default_rng(seed)
    common = gaussian_filter(np.random.default_rng(99).normal(size=(SIDE, SIDE)), 5)
    own = gaussian_filter(rng.normal(size=(count, SIDE, SIDE)), (0, 3, 3))
    own = own / own.std(axis=(1, 2), keepdims=True) * 0.12 + common / common.std() * 0.1
    taken = np.repeat(own, visits, axis=0) + rng.normal(0.0, noise, (count * visits, SIDE, SIDE))
    return np.clip(0.5 + taken, 0, 1).astype(np.float32)


def patients(count: int, seed: int = 0, visits: int = 1) -> list[Patient]:
    taken = people(count, seed, visits).reshape(count, visits, SIDE, SIDE)
    return [Patient(f"p{n:04d}", tuple(Image(picture, "") for picture in own)) for n, own in enumerate(taken)]


class Seen(NamedTuple):
    features: Tensor
    embeddings: Tensor


class Synthetic:
    """Knows people by their coarse picture, which way round it is; a law from people of its own."""

    def __init__(self, name: str, cells: int = 8, slope: float = 10.0, tail: Tail | None = None) -> None:
        self.name, self.cells, self.slope = name, cells, slope
        self.origin = Origin("public", hashlib.sha256(name.encode()).hexdigest())
        self.tail = tail or self._law()

    def _law(self) -> Tail:
        features = self.look(to_tensor(people(150, 10_000 + self.cells))).features
        a, b = torch.triu_indices(150, 150, 1)
        scores = torch.zeros(150, 150, dtype=torch.float64)
        scores[a, b] = self.logits(features[a], features[b]).double()
        return fit_tail((scores + scores.T).numpy(), np.arange(150), np.random.default_rng(0))

    def look(self, images: Tensor) -> Seen:
        small = avg_pool2d(images[:, :1], SIDE // self.cells)
        coarse = torch.cat([small + small.flip(3), (small - small.flip(3)).abs()], dim=1).flatten(1)
        unit = normalize(coarse - coarse.mean(dim=1, keepdim=True))
        return Seen(unit, unit)

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        return self.slope * ((a * b).sum(dim=1) - 0.8)


VERIFIER, UNSEEN = Synthetic("filter"), Synthetic("measure", cells=4)
VETTING = Vetting(VERIFIER, UNSEEN)
PATIENTS = patients(60)
REFERENCE = reference_of(PATIENTS, VETTING)


def as_bytes(pictures: Floats) -> NDArray[np.uint8]:
    return np.rint(pictures * 255).astype(np.uint8)


STRANGERS = as_bytes(people(200, 777))


def images_of(some: Reference) -> Floats:
    return np.stack([image.pixels for image in some.images])


def opened(some: Reference, **thresholds: float) -> Reference:
    return replace(some, thresholds=MappingProxyType({**some.thresholds, **thresholds}))


@pytest.mark.parametrize("kind", sorted(filter.KINDS))
def test_near_duplicates_of_every_kind_are_dropped(kind: str) -> None:
    made = filter.KINDS[kind](to_tensor(images_of(REFERENCE)), torch_generator(1))
    made8 = torch.round((made[:, 0] + 1) * 127.5).to(torch.uint8).numpy()
    vetted = filter.vet(made8, REFERENCE, VETTING)
    assert (~vetted.kept).mean() >= 0.95
    assert (vetted.nearest == np.arange(60)).mean() >= 0.95


def test_a_copy_passes_where_nothing_stops_it() -> None:
    copy = as_bytes(images_of(REFERENCE)[:5])
    inf = float("inf")
    assert filter.vet(copy, opened(REFERENCE, verifier=inf, copy=inf, patch=inf, moved=inf), VETTING).kept.all()
    for check in REASONS[1:-1]:  # each of them stops it alone
        others = {name: inf for name in REASONS[1:-1] if name != check}
        assert filter.vet(copy, opened(REFERENCE, **others), VETTING).reasons == (check,) * 5


def test_strangers_are_kept_but_for_the_budget() -> None:
    vetted = filter.vet(STRANGERS, REFERENCE, VETTING)
    assert vetted.kept.mean() >= 0.9  # 1 % is the budget; thresholds err on the low side
    assert set(vetted.reasons) <= set(REASONS)
    loose = Vetting(VERIFIER, UNSEEN, false_matches=0.3)
    assert filter.vet(STRANGERS, reference_of(PATIENTS, loose), loose).kept.sum() < vetted.kept.sum()


def test_the_verifier_on_the_nearest_agrees_with_the_verifier_on_everybody() -> None:
    made = look([to_tensor(STRANGERS.astype(np.float32) / 255)], (VERIFIER,), "cpu")[0][0]
    scores, places = exhaustive(VERIFIER, made, REFERENCE.seen)
    vetted = filter.vet(STRANGERS, REFERENCE, VETTING)
    assert np.allclose(vetted.scores, scores, atol=1e-5)
    kept = vetted.kept
    assert np.array_equal(vetted.nearest[kept], places[kept])


def test_all_pairs_are_what_a_loop_says() -> None:
    made = look([to_tensor(people(7, 5))], (UNSEEN,), "cpu")[0][0]
    scores, places = exhaustive(UNSEEN, made, REFERENCE.unseen)
    for row in range(7):
        own = [float(UNSEEN.logits(made.features[row : row + 1], other[None])) for other in REFERENCE.unseen.features]
        assert scores[row] == pytest.approx(max(own), abs=1e-6)
        assert places[row] == int(np.argmax(own))


def crowd() -> tuple[Tensor, NDArray[np.int64]]:
    """Patient 0 has forty pictures nearer to (1, 0, 0) than the one of each other patient."""
    turn = torch.cat([torch.linspace(0.0, 0.1, 40), torch.linspace(0.2, 1.0, 9)])
    points = torch.stack([turn.cos(), turn.sin(), torch.zeros(49)], dim=1)
    return points, np.concatenate([np.zeros(40, np.int64), np.arange(1, 10)])


@pytest.mark.parametrize("faiss_from", [1, 10**9])
def test_one_patients_many_pictures_do_not_hide_the_next_patient(
    monkeypatch: pytest.MonkeyPatch, faiss_from: int
) -> None:
    monkeypatch.setattr(nearest_neighbours, "FAISS_FROM", faiss_from)
    points, owners = crowd()
    query, none = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([-1])
    for top in (1, 2, 5, 10, 20):
        (found,) = (places[0] for rows, places in Search(points, owners, top).nearest(query, none) if len(rows))
        listed = found[found >= 0].tolist()
        assert len({int(owners[place]) for place in listed}) == min(top, 10)
        assert listed == sorted(listed)  # in the order of likeness, and no picture on the way is passed over
    (found,) = (p[0] for r, p in Search(points, owners, 2).nearest(query, torch.tensor([40])) if len(r))
    assert 40 not in found.tolist()
    assert 41 in found.tolist()


def test_faiss_and_torch_answer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch_generator(3)
    points = normalize(torch.randn(3_000, 16, generator=generator))
    owners = np.sort(torch.randint(0, 700, (3_000,), generator=generator).numpy())
    queries = normalize(torch.randn(50, 16, generator=generator))
    none = torch.full((50,), -1)

    def listed() -> dict[int, list[int]]:
        pieces = Search(points, owners, 10).nearest(queries, none)
        return {int(r): p[p >= 0].tolist() for rows, places in pieces for r, p in zip(rows, places, strict=True)}

    by_torch = listed()
    monkeypatch.setattr(nearest_neighbours, "FAISS_FROM", 1)
    assert listed() == by_torch
    assert sorted(by_torch) == list(range(50))
    by_hand = (queries @ points.T).numpy()
    for row, found in by_torch.items():
        order = np.argsort(-by_hand[row])
        assert found == order[: len(found)].tolist()
        assert len(set(owners[found])) == 10
        assert owners[found[-1]] not in owners[found[:-1]]


def test_no_answer_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filter.vet(STRANGERS, REFERENCE, VETTING)
    monkeypatch.setattr(filter, "BATCH", 7)
    monkeypatch.setattr(reference, "BATCH", 5)
    monkeypatch.setattr(filter, "_BLOCK", 13)
    monkeypatch.setattr(nearest_neighbours, "_PLACES", 64)
    monkeypatch.setattr(reference, "NUMBERS", 300)
    again = reference_of(PATIENTS, VETTING)
    parts = filter.vet(STRANGERS, again, VETTING)
    assert dict(again.thresholds) == pytest.approx(dict(REFERENCE.thresholds), abs=1e-4)
    assert np.allclose(parts.scores, whole.scores, atol=1e-5)
    assert parts.reasons == whole.reasons
    assert np.array_equal(parts.nearest, whole.nearest)
    assert filter.vet(STRANGERS[3:4], REFERENCE, VETTING).reasons == whole.reasons[3:4]


def test_no_answer_depends_on_the_order_of_patients() -> None:
    order = np.random.default_rng(0).permutation(60)
    again = reference_of([PATIENTS[place] for place in order], VETTING)
    assert again.thresholds == REFERENCE.thresholds
    one, other = (filter.vet(STRANGERS, some, VETTING) for some in (REFERENCE, again))
    assert one.reasons == other.reasons
    assert np.array_equal(one.scores, other.scores)
    assert np.array_equal(one.nearest, other.nearest)


class Failing(Synthetic):
    """Gives no number for a picture whose first pixel is white."""

    def __init__(self, value: float, where: str) -> None:
        super().__init__(f"failing {value} {where}", tail=VERIFIER.tail)
        self.value, self.where = value, where

    def look(self, images: Tensor) -> Seen:
        features, embeddings = super().look(images)
        lost = images[:, 0, 0, 0] >= 1.0
        if self.where == "features":
            features = features.masked_fill(lost[:, None], self.value)
        if self.where == "embeddings":
            embeddings = embeddings.masked_fill(lost[:, None], self.value)
        mark = lost[:, None].float()
        return Seen(torch.cat([features, mark], dim=1), embeddings)

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        told = super().logits(a[:, :-1], b[:, :-1])
        lost = (a[:, -1] + b[:, -1]) > 0
        return told.masked_fill(lost, self.value) if self.where == "logits" else told


def marked(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    out = pictures.copy()
    out[:, 0, 0] = 255
    return out


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["features", "embeddings", "logits"])
def test_what_cannot_be_judged_is_dropped_and_its_neighbours_are_not(value: float, where: str) -> None:
    vetting = Vetting(Failing(value, where), UNSEEN)
    some = reference_of(PATIENTS, vetting)
    made = STRANGERS[:20].copy()
    made[4:6] = marked(made[4:6])
    vetted = filter.vet(made, some, vetting)
    assert vetted.reasons[4:6] == ("not a number",) * 2
    assert not vetted.kept[4:6].any()
    assert np.isnan(vetted.scores[4:6]).all()
    assert ((vetted.nearest >= 0) & (vetted.nearest < len(some))).all()
    assert vetted.kept[[*range(4), *range(6, 20)]].sum() >= 15


@pytest.mark.parametrize("where", ["features", "embeddings", "logits"])
def test_a_verifier_that_cannot_judge_the_patients_is_refused(where: str) -> None:
    first = Image(marked(as_bytes(people(1, 5)))[0].astype(np.float32) / 255, "")
    with pytest.raises(RecogniserError):
        reference_of([*PATIENTS, Patient("a", (first,))], Vetting(Failing(float("nan"), where), UNSEEN))
    with pytest.raises(RecogniserError):
        reference_of([*PATIENTS, Patient("a", (first,))], Vetting(UNSEEN, Failing(float("nan"), where)))


def test_what_the_unseen_verifier_cannot_judge_counts_as_found() -> None:
    vetting = Vetting(VERIFIER, Failing(float("nan"), "features"))
    some = reference_of(PATIENTS, vetting)
    fine = measured(STRANGERS, some, vetting)
    assert measured(np.concatenate([STRANGERS[:-40], marked(STRANGERS[-40:])]), some, vetting).value >= 0.2
    assert fine.value < 0.1


@pytest.mark.parametrize("count", [0, 1])
def test_nobody_and_one_patient_are_refused_in_the_same_words(count: int) -> None:
    with pytest.raises(CohortTooSmallError) as refusal:
        reference_of(patients(count, visits=3), VETTING)
    assert str(refusal.value) == str(CohortTooSmallError())
    taken = patients(1, visits=2)[0]
    twice = [Patient("same", taken.images[:1]), Patient("same", taken.images[1:])]
    with pytest.raises(CohortTooSmallError):  # one person under one pseudonym, however often it comes
        reference_of(twice, VETTING)


def test_a_network_may_not_measure_itself() -> None:
    with pytest.raises(ValueError, match="another network"):
        Vetting(VERIFIER, Synthetic("filter"))


@pytest.mark.parametrize("wrong", [{"top": 0}, {"top": 2.0}, {"false_matches": 0.0}, {"false_matches": float("nan")}])
def test_a_vetting_without_sense_cannot_be_built(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each with its own sentence
        Vetting(VERIFIER, UNSEEN, **wrong)  # type: ignore[arg-type]


def test_a_reference_of_another_vetting_or_shape_is_refused() -> None:
    for other in (Vetting(UNSEEN, VERIFIER), Vetting(VERIFIER, UNSEEN, false_matches=0.5)):
        for ask in (filter.vet, measured):
            with pytest.raises(ValueError, match="another vetting"):
                ask(STRANGERS, REFERENCE, other)
        with pytest.raises(ValueError, match="another vetting"):
            power(REFERENCE, other, torch_generator(0))
    for wrong in (STRANGERS[:, :16], STRANGERS.astype(np.float32), np.zeros((3, SIDE, SIDE, 3), np.uint8)):
        with pytest.raises(ValueError, match="shape"):
            filter.vet(wrong, REFERENCE, VETTING)
    odd = Patient("odd", (Image(np.zeros((16, 16), np.float32), ""),))
    with pytest.raises(ValueError, match="one shape"):
        reference_of([*PATIENTS, odd], VETTING)


def test_no_picture_is_vetted_to_nothing_and_not_measured() -> None:
    empty = filter.vet(STRANGERS[:0], REFERENCE, VETTING)
    assert empty.reasons == ()
    assert empty.kept.shape == (0,)
    with pytest.raises(ValueError, match="nothing to measure"):
        measured(STRANGERS[:0], REFERENCE, VETTING)


def test_the_lower_of_the_two_laws_is_the_threshold() -> None:
    shifted = replace(VERIFIER.tail, start=VERIFIER.tail.start + 5.0)
    lax = Vetting(Synthetic("lax", tail=shifted), UNSEEN)
    budget = lax.false_matches / 2
    here = reference_of(PATIENTS, lax)
    # a file that would let this cohort's copies pass is overruled by the cohort's own strangers
    assert here.thresholds["verifier"] < shifted.threshold(60, budget) - 4.0
    assert (~filter.vet(as_bytes(images_of(here)), here, lax).kept).all()
    few = reference_of(PATIENTS[:20], lax)  # too few for a law of their own
    assert few.thresholds["verifier"] == shifted.threshold(20, budget)
    strict = Vetting(Synthetic("strict", tail=replace(shifted, start=shifted.start - 8.0)), UNSEEN)
    assert reference_of(PATIENTS, strict).thresholds["verifier"] == strict.verifier.tail.threshold(60, budget)


def test_a_verifier_lost_in_the_domain_drops_and_does_not_keep() -> None:
    class Lost(Synthetic):
        """Takes all of this hospital's patients for each other: nothing of it was in its public set."""

        def logits(self, a: Tensor, b: Tensor) -> Tensor:
            return super().logits(a, b) + 20.0

    vetting = Vetting(Lost("lost", tail=VERIFIER.tail), UNSEEN)
    assert not filter.vet(STRANGERS, reference_of(PATIENTS, vetting), vetting).kept.any()


def test_a_larger_gallery_has_higher_thresholds() -> None:
    more = reference_of(patients(300, seed=4), VETTING)
    less = reference_of(patients(300, seed=4)[:50], VETTING)
    assert more.thresholds["unseen"] > less.thresholds["unseen"] - 0.5  # each from its own law, too
    tail = VERIFIER.tail
    assert tail.threshold(300, 0.005) > tail.threshold(50, 0.005)
    for some in (more, less):
        assert 0.0 <= some.intervals["verifier"][0] <= 0.005 * 1.01
        assert some.intervals["verifier"][1] >= 0.005 * 0.99


def test_measured_is_the_unseen_verifiers_share_with_wilsons_interval() -> None:
    half = np.concatenate([as_bytes(images_of(REFERENCE)), STRANGERS[:60]])
    share = measured(half, REFERENCE, VETTING)
    assert share.value == pytest.approx(0.5, abs=0.06)
    assert share.low < 0.5 < share.high
    assert (share.high - share.low) < 0.2
    blind = Vetting(Synthetic("no filter", slope=0.0, tail=VERIFIER.tail), UNSEEN)  # it judges without the filter
    assert measured(half, reference_of(PATIENTS, blind), blind) == share


def test_power_finds_what_was_planted_by_kind() -> None:
    found = power(reference_of(patients(40, visits=2), VETTING), VETTING, torch_generator(0))
    assert sorted(found.kinds) == sorted(filter.KINDS)
    assert found.caught.low >= 0.9
    single = [found.kinds[kind].value for kind in filter.KINDS if kind != "combined"]
    assert found.caught.value == pytest.approx(np.mean(single))  # and of nothing that is planted one on the other
    assert found.kinds["exact"].value == 1.0
    assert found.other_visits is not None
    assert found.other_visits.value >= 0.9
    found.demand()
    assert power(REFERENCE, VETTING, torch_generator(0)).other_visits is None


def test_a_verifier_that_finds_nothing_is_refused_whatever_the_copy_check_finds() -> None:
    blind = Vetting(Synthetic("blind", slope=0.0, tail=VERIFIER.tail), UNSEEN)
    found = power(reference_of(PATIENTS, blind), blind, torch_generator(0))
    assert found.verifier.value == 0.0
    assert found.kinds["exact"].value == 1.0  # the copy check's
    with pytest.raises(RecogniserError, match=r"by the verifier 0\.00"):
        found.demand()


@pytest.mark.parametrize(
    ("caught", "alone", "unseen", "worst", "good"),
    [
        (0.91, 0.8, 0.8, 0.95, True),
        (0.89, 0.8, 0.8, 0.95, False),
        (0.99, 0.45, 0.8, 0.95, False),
        (0.99, 0.8, 0.45, 0.95, False),
        (0.99, 0.8, 0.8, 0.89, False),
    ],
)
def test_power_is_demanded_in_all_of_every_kind_and_of_both_verifiers(
    caught: float, alone: float, unseen: float, worst: float, good: bool
) -> None:
    told = [Proportion(min(1.0, low + 0.02), low, 1.0) for low in (caught, alone, unseen)]
    kinds = {kind: Proportion(1.0, 0.9, 1.0) for kind in SINGLE} | {"crop": Proportion(worst, 0.5, 1.0)}
    power_ = Power(*told, kinds, None)
    if good:
        power_.demand()
    else:
        with pytest.raises(RecogniserError) as refusal:
            power_.demand()
        assert "[" not in str(refusal.value), "an interval would tell how many patients there are"


def test_the_unseen_verifier_is_tried_on_the_cohort_too() -> None:
    """A blind one would measure a re-identification rate of nothing."""
    blind = Vetting(VERIFIER, Synthetic("blind", slope=0.0, tail=UNSEEN.tail))
    found = power(reference_of(PATIENTS, blind), blind, torch_generator(0))
    assert (found.unseen.value, found.verifier.value > 0.9) == (0.0, True)
    with pytest.raises(RecogniserError):
        found.demand()


def test_a_patient_with_many_pictures_is_one_trial() -> None:
    few = [Patient(one.pseudonym, one.images * 20) for one in patients(5)]
    found = power(reference_of(few, VETTING), VETTING, torch_generator(0))
    assert found.caught.low < 0.9
    with pytest.raises(RecogniserError):
        found.demand()


def test_the_copy_check_is_blind_to_brightness_and_contrast_and_to_nothing_else() -> None:
    real = images_of(REFERENCE)
    for change in (lambda x: 0.6 * x + 0.2, lambda x: 0.9 * x, lambda x: 0.5 * x):
        found = REFERENCE.copies.alike(thumbnail_vectors(to_tensor(change(real).astype(np.float32))))
        assert np.allclose(found.whole, 1.0, atol=1e-4)
        assert np.array_equal(found.whole_at, np.arange(60))
    mirrored = REFERENCE.copies.alike(thumbnail_vectors(to_tensor(real[:, :, ::-1].copy())))
    assert np.allclose(mirrored.whole, 1.0, atol=1e-4)
    strangers = REFERENCE.copies.alike(thumbnail_vectors(to_tensor(people(60, 777))))
    assert strangers.whole.max() < 0.95


def test_the_correlation_is_pearsons_of_what_differs_from_the_mean() -> None:
    small = thumbnail_vectors(to_tensor(people(20, 1))).whole.flatten(1).double().numpy()
    rest = small - small.mean(axis=0)
    copies = Copies.of(thumbnail_vectors(to_tensor(people(20, 1))))
    made = thumbnail_vectors(to_tensor(people(5, 2)))
    mean = small.mean(axis=0)
    for row in range(5):
        own, turned = (m.whole.flatten(1).double().numpy()[row] - mean for m in (made, made.mirrored()))
        by_hand = [max(np.corrcoef(own, r)[0, 1], np.corrcoef(turned, r)[0, 1]) for r in rest]
        assert copies.alike(made).whole[row] == pytest.approx(max(by_hand), abs=1e-5)
        assert copies.alike(made).whole_at[row] == int(np.argmax(by_hand))


def test_a_part_of_a_patients_picture_in_another_picture_is_found() -> None:
    made = STRANGERS[:30].copy()
    real = as_bytes(images_of(REFERENCE)[:30])
    made[:, 8:28, 4:24] = np.clip(0.8 * real[:, 8:28, 4:24] + 20, 0, 255).astype(np.uint8)
    vetted = filter.vet(made, opened(REFERENCE, verifier=float("inf")), VETTING)
    assert (~vetted.kept).mean() >= 0.95
    assert set(vetted.reasons) <= {"patch", "copy", ""}
    assert (vetted.nearest[~vetted.kept] == np.arange(30)[~vetted.kept]).all()
    alone = filter.vet(STRANGERS[:30], opened(REFERENCE, verifier=float("inf")), VETTING)
    assert alone.kept.mean() >= 0.9


def test_flat_pictures_are_no_copies_of_anything_by_correlation() -> None:
    flat = np.full((2, SIDE, SIDE), 128, np.uint8)
    flat[1, ::2] = 129
    found = REFERENCE.copies.alike(thumbnail_vectors(to_tensor(flat.astype(np.float32) / 255)))
    assert (found.whole <= 0.0).all()
    assert (found.patch <= 0.0).all()


def test_copy_thresholds_stay_between_floor_and_ceiling() -> None:
    for name in ("copy", "patch", "moved"):
        assert FLOOR <= REFERENCE.thresholds[name] <= CEILING
        assert reference_of(PATIENTS[:20], VETTING).thresholds[name] == FLOOR  # too few to settle one by
    twins = [Patient(f"{p.pseudonym}t", p.images) for p in patients(30, seed=8)]
    assert reference_of([*patients(30, seed=8), *twins], VETTING).thresholds["copy"] <= CEILING


def test_whoever_watches_is_told_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    reference_of(PATIENTS[:30], VETTING, lambda done, of: told.append((done, of)))
    assert told[-1] == (30, 30)
    told.clear()
    filter.vet(STRANGERS, REFERENCE, VETTING, lambda done, of: told.append((done, of)))
    assert told[-1] == (200, 200)


def test_coloured_pictures_are_vetted_too() -> None:
    def coloured(pictures: Floats) -> Floats:
        return np.repeat(pictures[..., None], 3, axis=3) * np.array([1.0, 0.8, 0.6], np.float32)

    some = [Patient(p.pseudonym, (Image(coloured(p.images[0].pixels[None])[0], ""),)) for p in PATIENTS]
    seen = reference_of(some, VETTING)
    assert (~filter.vet(as_bytes(coloured(images_of(REFERENCE))), seen, VETTING).kept).all()
    assert seen.image(3).shape == (SIDE, SIDE, 3)


@pytest.mark.parametrize("kind", sorted(filter.KINDS))
def test_planted_copies_are_pictures_and_the_same_for_the_same_generator(kind: str) -> None:
    change: Callable[[Tensor, torch.Generator], Tensor] = filter.KINDS[kind]
    real = to_tensor(people(6, 3))
    one, other = (change(real, torch_generator(5)) for _ in range(2))
    assert torch.equal(one, other)
    assert one.shape == real.shape
    assert bool((one.abs() <= 1.0 + 1e-6).all())
    assert kind == "exact" or not torch.allclose(one, real)


def test_a_rotation_is_five_degrees_and_a_crop_a_tenth() -> None:
    ramp = torch.linspace(-1, 1, 65).expand(1, 1, 65, 65).contiguous()
    turned = filter.rotated(ramp, torch_generator(0))[0, 0]
    slope = torch.stack([turned[32, 40] - turned[32, 24], turned[40, 32] - turned[24, 32]])
    assert abs(float(torch.atan2(slope[1].abs(), slope[0]))) == pytest.approx(np.deg2rad(5.0), abs=1e-3)
    window = filter.cropped(ramp, torch_generator(0))[0, 0]
    assert float(window.max() - window.min()) == pytest.approx(2.0 * 0.9, abs=0.02)


def test_sights_know_what_is_finite() -> None:
    seen = VerifierView(torch.tensor([[1.0, 2.0], [np.nan, 0.0]]), torch.tensor([[1.0], [1.0]]))
    assert seen.finite().tolist() == [True, False]


def test_a_picture_of_one_grey_cannot_be_judged_and_is_dropped() -> None:
    blank = np.stack([np.full((SIDE, SIDE), level, np.uint8) for level in (0, 128, 255)])
    assert set(filter.vet(blank, REFERENCE, VETTING).reasons) == {"not a number"}
