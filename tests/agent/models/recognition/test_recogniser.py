import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_curve

from agent.errors import OtherRunError
from agent.intervals import Proportion
from agent.models.augmentations import Views
from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition.recogniser import (
    APART,
    KNOWN,
    AngularMargin,
    Calibration,
    IdentityNet,
    RecogniserArchitecture,
    RecogniserError,
    RecogniserQuality,
    distances,
    recogniser_bytes,
    recogniser_from,
)
from agent.models.recognition.recogniser_training import (
    RecognitionConfig,
    TooFewPeopleError,
    calibrated,
    compared,
    fit_recogniser,
    judge,
    second_opinion,
    split,
    suited,
    train_recogniser,
)
from agent.models.training_loop import seeded
from agent.models.weights import WeightsError, unpack
from tests.support.killed_training import KilledError, killed_at
from tests.support.networks import pattern_pictures, unsafe_calibration

TINY = RecogniserArchitecture(TrunkArchitecture(side=16, channels=1, width=8, depth=2), embedding=16, grid=4)
CALIBRATION = unsafe_calibration(0.5)
LIE = {"value": 0.5, "low": 0.6, "high": 0.7}


def config(**changes):
    told = {
        "name": "tiny",
        "architecture": TINY,
        "steps": 180,
        "people": 16,
        "pictures": 4,
        "views": Views(shift=0.15, noise=0.1),
        "learning_rate": 3e-3,
        "seed": 1,
        "false_match_rate": 0.05,
        "checkpoint_every": 90,
    }
    return RecognitionConfig(**(told | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    images, who = pattern_pictures(people=100)
    return train_recogniser(images, who, config(), tmp_path_factory.mktemp("run"))


def recogniser(seed=0, architecture=TINY):
    with seeded(seed):
        return recogniser_bytes("drawn", IdentityNet(architecture), CALIBRATION, {})


def test_it_knows_people_it_never_saw_far_better_than_chance(trained):
    images, who = pattern_pictures(
        people=30, pictures=4, seed=77
    )  # others again, and nobody of the set it was trained on
    net = recogniser_from(trained.file, "public")
    vectors = net.embed(torch.from_numpy(images[:, None].astype(np.float32)) / 127.5 - 1)
    found = judge(vectors, who, net.threshold)
    assert found.first.low > 5 / 30  # chance is 1 / 30
    assert found.equal_error < 0.2
    assert found.matched.low > found.mistaken.high
    # the rate that was asked for holds for people of neither training nor calibration, but for chance
    assert trained.judged.mistaken.low < 0.05 * 1.6


def test_training_beats_the_same_network_untrained(trained):
    images, who = pattern_pictures(people=30, pictures=4, seed=77)
    pictures = torch.from_numpy(images[:, None].astype(np.float32)) / 127.5 - 1
    errors = [
        judge(recogniser_from(raw).embed(pictures), who, 0.5).equal_error for raw in (recogniser(1), trained.file)
    ]
    assert errors[1] < 0.75 * errors[0]


def test_a_recogniser_comes_back_from_its_file_with_threshold_and_digest(trained):
    net = recogniser_from(trained.file, "public")
    packed = unpack(trained.file, "recogniser")
    assert net.threshold == packed.config["calibration"]["threshold"]
    assert net.origin.sha256 == hashlib.sha256(trained.file).hexdigest()
    assert net.origin.component == "public"
    assert recogniser_from(trained.file).origin.component == "private"
    assert net.name == "tiny"
    assert packed.config["calibration"]["false_match_rate"] == 0.05
    calibration = net.calibration
    assert calibration.low <= calibration.false_match_rate
    assert 0 < net.threshold < 2


def test_a_run_that_was_killed_ends_with_the_same_file(tmp_path):
    images, who = pattern_pictures(people=20, pictures=3)
    plan = config(steps=6, checkpoint_every=2, false_match_rate=0.2)
    whole = fit_recogniser(images, who, plan, tmp_path / "whole").file

    with pytest.raises(KilledError):
        fit_recogniser(images, who, plan, tmp_path / "killed", killed_at(6))
    assert fit_recogniser(images, who, plan, tmp_path / "killed").file == whole
    with pytest.raises(OtherRunError):
        fit_recogniser(images, who, config(steps=6, false_match_rate=0.2, seed=2), tmp_path / "killed")
    with pytest.raises(OtherRunError):
        fit_recogniser(255 - images, who, plan, tmp_path / "killed")


def test_two_seeds_or_architectures_are_two_opinions(tmp_path):
    images, who = pattern_pictures(people=20, pictures=3)
    other = RecogniserArchitecture(TrunkArchitecture(side=16, channels=1, width=8, depth=3), embedding=12, grid=2)
    plans = [config(steps=2, false_match_rate=0.2)]
    plans += [config(steps=2, false_match_rate=0.2, seed=5)]
    plans += [config(steps=2, false_match_rate=0.2, architecture=other, name="other")]
    plans += [second_opinion(plans[0])]
    assert plans[3].seed != plans[0].seed
    assert plans[3].architecture.trunk != plans[0].architecture.trunk
    state = torch.get_rng_state()
    files = [fit_recogniser(images, who, plan, tmp_path / str(i)).file for i, plan in enumerate(plans)]
    assert torch.equal(state, torch.get_rng_state())
    nets = [recogniser_from(raw) for raw in files]
    assert len({net.origin.sha256 for net in nets}) == 4
    pictures = torch.from_numpy(images[:, None].astype(np.float32)) / 127.5 - 1
    a, b, c, d = (distances(v, v) for v in (net.embed(pictures) for net in nets))
    assert not torch.allclose(a, b, atol=1e-2)
    assert not torch.allclose(a, c, atol=1e-2)
    assert not torch.allclose(a, d, atol=1e-2)


@settings(max_examples=15, deadline=None)
@given(st.integers(5, 40), st.integers(5, 40), st.sampled_from([1, 3]), st.integers(0, 99))
def test_embeddings_have_unit_length_at_any_size_and_do_not_depend_on_their_batch(h, w, c, seed):
    images = torch.rand(3, c, h, w, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    net = DRAWN
    vectors = net.embed(images)
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)
    assert torch.allclose(vectors, torch.cat([net.embed(i[None]) for i in images]), atol=1e-4)
    apart = distances(vectors, vectors)
    assert torch.allclose(apart, torch.cdist(vectors.double(), vectors.double()), atol=1e-3)
    assert bool((apart <= 2 + 1e-9).all())


DRAWN = recogniser_from(recogniser())


def test_colour_networks_see_colour_pictures_and_grey_ones(tmp_path):
    images, who = pattern_pictures(people=20, pictures=3, channels=3)
    trunk = TrunkArchitecture(side=8, channels=3, width=8, depth=2)
    plan = config(steps=2, false_match_rate=0.2, architecture=RecogniserArchitecture(trunk, 8, 2))
    net = recogniser_from(fit_recogniser(images, who, plan, tmp_path).file)
    assert net.embed(torch.rand(2, 3, 16, 16)).shape == net.embed(torch.rand(2, 1, 40, 30)).shape == (2, 8)


def test_the_margin_is_deng_et_als_formula():
    with seeded(0):
        loss = AngularMargin(8, 5, scale=7.0)
    x, labels = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 4, 0])
    expected = 0.0
    for vector, label in zip(x.double().numpy(), labels, strict=True):
        cos = [float(vector @ w / np.linalg.norm(vector) / np.linalg.norm(w)) for w in loss.weight.detach().numpy()]
        theta = math.acos(cos[label])
        assert theta + 0.3 < math.pi
        logits = [7.0 * (math.cos(theta + 0.3) if j == label else c) for j, c in enumerate(cos)]
        expected += -math.log(math.exp(logits[label]) / sum(math.exp(v) for v in logits)) / 6
    assert float(loss(x, labels, 0.3).detach()) == pytest.approx(expected, abs=1e-5)
    plain = torch.nn.functional.cross_entropy(
        7.0 * torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(loss.weight).T, labels
    )
    assert float(loss(x, labels, 0.0).detach()) == pytest.approx(float(plain.detach()), abs=1e-5)


def test_the_margin_never_helps_however_far_the_angle():
    loss = AngularMargin(2, 2, scale=1.0)
    loss.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    angles = torch.linspace(0.0, math.pi, 50)
    points = torch.stack([angles.cos(), -angles.sin()], 1)
    values = [float(loss(p[None], torch.tensor([0]), 0.5).detach()) for p in points]
    assert all(v > float(loss(p[None], torch.tensor([0]), 0.0).detach()) for v, p in zip(values, points, strict=True))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.02, 0.05, 0.1, 0.3]))
def test_the_threshold_is_the_largest_that_keeps_the_rate(seed, rate):
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(12), 2)
    vectors = torch.nn.functional.normalize(torch.from_numpy(rng.standard_normal((24, 3))), dim=1)
    found = calibrated((vectors, who), (vectors, who), rate)
    assert found.judged == judge(vectors, who, found.threshold)
    apart = np.linalg.norm(vectors.numpy()[:, None] - vectors.numpy(), axis=2)
    impostors = sorted(apart[i, j] for i in range(24) for j in range(i) if who[i] != who[j])
    assert found.impostors == len(impostors)
    below = sum(d < found.threshold - 1e-9 for d in impostors)
    assert below <= rate * len(impostors) < below + 1
    assert found.low <= below / len(impostors) <= found.high


def test_the_judgement_agrees_with_sklearns_roc_and_with_counting():
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(10), 3)
    centres = rng.standard_normal((10, 4))
    vectors = torch.nn.functional.normalize(
        torch.from_numpy(centres[who] + 0.8 * rng.standard_normal((30, 4))), dim=1
    )
    genuine, impostors = compared(vectors, who)
    assert (len(genuine), len(impostors)) == (30, 30 * 29 // 2 - 30)
    labels = np.r_[np.ones(len(genuine)), np.zeros(len(impostors))]
    fpr, tpr, _ = roc_curve(labels, -np.r_[genuine, impostors], drop_intermediate=False)
    found = judge(vectors, who, 0.7)
    at = int(np.abs(1 - tpr - fpr).argmin())
    assert found.equal_error == pytest.approx((1 - tpr[at] + fpr[at]) / 2, abs=0.02)
    assert found.matched.value == (genuine < 0.7).mean()
    assert found.mistaken.value == (impostors < 0.7).mean()
    v = vectors.numpy()
    hits = [
        int(np.argmin([np.linalg.norm(v[i] - v[3 * p]) for p in range(10)])) == who[i] for i in range(30) if i % 3
    ]
    assert found.first.value == np.mean(hits)


def test_nobody_is_in_two_parts_and_all_pictures_of_one_person_are_in_one():
    images, who = pattern_pictures(people=30, pictures=3)
    parts = split(images, who, config())
    people = [set(who[part]) for part in parts]
    assert set.union(*people) == set(who)
    assert sum(len(p) for p in people) == 30
    assert sorted(np.concatenate(parts)) == list(range(90))
    again = split(images, who, config())
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))
    assert any(
        len(a) != len(b) or (a != b).any() for a, b in zip(parts, split(images, who, config(seed=9)), strict=True)
    )


def test_what_cannot_train_or_calibrate_is_refused_without_saying_how_many(tmp_path):
    images, who = pattern_pictures(people=20, pictures=3)
    single = who.copy()
    single[0] = 999
    for wrong, plan in (
        (single, config()),
        (np.zeros(60, int), config()),
        (np.repeat(np.arange(2), 30), config()),
        (who, config(false_match_rate=1e-4)),
    ):
        with pytest.raises(TooFewPeopleError) as told:
            train_recogniser(images, wrong, plan, tmp_path)
        assert not any(c.isdigit() for c in str(told.value))
    for images_, who_ in (
        (images.astype(np.float32), who), (images, who[:-1]), (images, who.astype(float)), (images[:, 0], who),
        (np.zeros_like(images), who), (images[..., None].repeat(2, axis=3), who),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"images|identity"):
            train_recogniser(images_, who_, config(), tmp_path)
    assert not list(tmp_path.iterdir())  # before anything was begun


def test_vectors_that_are_all_alike_get_no_threshold():
    seen = (torch.ones(24, 1), np.repeat(np.arange(12), 2))
    with pytest.raises(RecogniserError, match="distinguish people"):
        calibrated(seen, seen, 0.1)


@pytest.mark.parametrize("threshold", [0.0, -1.0, 2.5, math.nan, math.inf, 1])
def test_a_threshold_that_means_nothing_cannot_be_built(threshold):
    with pytest.raises(ValueError, match="threshold"):
        Calibration(threshold, 0.01, 10, 0.0, 0.1, CALIBRATION.judged)


def test_a_file_that_describes_no_recogniser_is_refused():
    from agent.models.weights import pack

    packed = unpack(recogniser(), "recogniser")
    good = dict(packed.config)
    told = good["calibration"]["judged"]
    assert recogniser_from(pack("recogniser", good, {}, packed.state))
    for wrong in (
        {**good, "extra": 1},
        {**good, "name": "No Name"},
        {**good, "calibration": {**good["calibration"], "threshold": 9.0}},
        {**good, "calibration": {"threshold": 0.5}},
        {**good, "calibration": {k: v for k, v in good["calibration"].items() if k != "judged"}},
        {**good, "calibration": {**good["calibration"], "judged": None}},
        {**good, "calibration": {**good["calibration"], "judged": {"matched": 1.0}}},
        {
            **good,
            "calibration": {**good["calibration"], "judged": {**told, "matched": {**told["first"], "low": 2.0}}},
        },
        {**good, "calibration": {**good["calibration"], "judged": {**told, "matched": 0.9}}},
        {**good, "calibration": {**good["calibration"], "judged": {**told, "equal_error": "low"}}},
        {**good, "architecture": {**good["architecture"], "embedding": 8.0}},
        {**good, "architecture": {**good["architecture"], "trunk": {"side": 16}}},
        {**good, "architecture": []},
    ):
        with pytest.raises(WeightsError):
            recogniser_from(pack("recogniser", wrong, {}, packed.state))
    with pytest.raises(WeightsError):
        recogniser_from(pack("recogniser", good, {}, {n: t for n, t in packed.state.items() if n != "project.bias"}))


@pytest.mark.parametrize(
    ("side", "depth", "width", "grid"), [(16, 2, 8, 4), (64, 4, 32, 4), (32, 3, 16, 8), (4, 2, 8, 2), (3, 1, 8, 1)]
)
def test_a_second_opinion_can_be_built_from_any_first(side, depth, width, grid):
    first = config(
        architecture=RecogniserArchitecture(TrunkArchitecture(side, 1, width, depth), 8, grid), name="a" * 32
    )
    second = second_opinion(first)
    with torch.device("meta"):
        IdentityNet(second.architecture)
    assert second.architecture.trunk.width > width
    assert second.architecture.trunk.depth < depth or depth == 1
    assert len(second.name) <= 32


@pytest.mark.parametrize(
    "wrong", [{"people": 1}, {"steps": 0}, {"margin": math.nan}, {"false_match_rate": 0.0}, {"held_out": 0.5}]
)
def test_a_configuration_that_cannot_train_is_refused(wrong):
    with pytest.raises(ValueError, match=r"steps|margin|rate"):
        config(**wrong)


@pytest.mark.parametrize("side", [3, 8, 15, 16, 24, 32, 33, 64, 100, 300, 512, 1024])
def test_what_is_suited_keeps_eight_pixels_a_side_apart_where_there_are_so_many(side):
    suits = suited("some", side, 1, 10)
    trunk, grid = suits.architecture.trunk, suits.architecture.grid
    assert grid == min(8, trunk.left)
    assert trunk.left >= 8 or trunk.depth == 1
    with torch.device("meta"):
        IdentityNet(suits.architecture)


def judged(matched, mistaken=(0.01, 0.0, 0.05)):
    return RecogniserQuality(0.1, Proportion(*matched), Proportion(*mistaken), Proportion(0.5, 0.4, 0.6))


@pytest.mark.parametrize(
    ("true", "false", "enough"),
    [
        ((0.9, 0.8, 0.95), (0.01, 0.0, 0.05), True),
        ((0.6, KNOWN + 1e-9, 0.7), (0.01, 0.0, 0.05), True),
        ((0.6, KNOWN, 0.7), (0.01, 0.0, 0.05), False),
        ((0.9, 0.8, 0.95), (0.5, 0.4, 0.8 - APART), False),
        ((0.9, 0.8, 0.95), (0.5, 0.4, 0.8 - APART - 1e-9), True),
        ((0.95, 0.3, 1.0), (0.0, 0.0, 0.01), False),  # of a few people: cannot tell
        ((0.033, 0.01, 0.08), (0.005, 0.0, 0.04), False),  # collapsed
        ((1.0, 0.99, 1.0), (1.0, 0.99, 1.0), False),  # takes everybody for everybody
    ],
)
def test_what_is_demanded_is_the_worse_end_of_both_intervals(true, false, enough):
    calibration = replace(CALIBRATION, judged=judged(true, false))
    if enough:
        calibration.demand()
        return
    with pytest.raises(RecogniserError, match=r"train it longer, in a new folder, or on more people"):
        calibration.demand()


def test_a_recogniser_that_knows_nobody_is_not_given_out_and_its_checkpoint_stays(tmp_path):
    images, who = pattern_pictures(people=40)
    plan = config(steps=2, false_match_rate=0.1)
    reached = fit_recogniser(images, who, plan, tmp_path / "fitted").judged.matched
    assert not reached.low > KNOWN
    for _ in range(2):  # the second time there is nothing left to train, and the answer is the same
        with pytest.raises(RecogniserError, match=f"matches {reached.value:.3f}"):
            train_recogniser(images, who, plan, tmp_path / "run")
        assert [path.is_file() for path in (tmp_path / "run").iterdir()] == [True]


def test_people_who_cannot_be_told_apart_give_no_recogniser_however_long_it_trains(tmp_path):
    images, _ = pattern_pictures(people=40)
    anybody = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 4))  # whose pictures, by lot
    with pytest.raises(RecogniserError):
        train_recogniser(images, anybody, config(steps=40, false_match_rate=0.1), tmp_path)


def test_more_pictures_of_the_same_few_people_make_no_figure_surer():
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((5, 8))
    for pictures in (3, 30):
        who = np.repeat(np.arange(5), pictures)
        near = torch.from_numpy(centres[who] + 1e-3 * rng.standard_normal((len(who), 8)))
        found = judge(torch.nn.functional.normalize(near, dim=1), who, 0.1).matched
        assert (found.value, found.high) == (1.0, 1.0)
        assert found.low == pytest.approx(5 / (5 + 1.959964**2), abs=1e-6)  # Wilson's, of five of five


@pytest.mark.parametrize(
    "wrong",
    [(math.nan, 0.0, 1.0), (0.5, 0.6, 0.7), (0.5, 0.1, 0.4), (1.1, 1.0, 1.2), (-0.1, -0.2, 0.0), (1, 0.5, 1.0)],
)
def test_a_share_that_is_none_cannot_be_built(wrong):
    with pytest.raises(ValueError, match="share"):
        Proportion(*wrong)


def test_the_judgement_is_in_the_file_and_comes_back(trained):
    net = recogniser_from(trained.file)
    assert net.calibration == trained.calibration
    assert net.calibration.judged == trained.judged
    net.calibration.demand()
