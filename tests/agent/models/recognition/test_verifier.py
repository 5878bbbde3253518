"""The verifier: symmetric, blind to mirrors and light, judged on strangers, and read from a file only when whole."""

import hashlib
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from agent.errors import OtherRunError
from agent.intervals import Proportion
from agent.models.features.trunk import TrunkArchitecture
from agent.models.recognition.recogniser import RecogniserError
from agent.models.recognition.recogniser_training import TooFewPeopleError
from agent.models.recognition.score_tail import Tail
from agent.models.recognition.score_tail import TooFewScoresError as NoTail
from agent.models.recognition.verifier import (
    CHANGES,
    FALSE_MATCHES,
    GALLERY,
    KNOWN,
    MADE,
    Fusion,
    VerifierArchitecture,
    VerifierNet,
    verifier_bytes,
    verifier_from,
)
from agent.models.recognition.verifier_training import (
    PLANTED,
    VISITS,
    VerificationConfig,
    all_logits,
    balanced,
    contrastive,
    fit_verifier,
    judge,
    retrieved,
    second_opinion,
    split,
    suited,
    tail_of,
    train_verifier,
)
from agent.models.training_loop import seeded, torch_generator
from agent.models.weights import Origin, WeightsError, pack, unpack
from tests.support.killed_training import KilledError, killed_at
from tests.support.verifiers import (
    TINY,
    chests,
    drawn_verifier_file,
    tiny_verifier,
    tiny_verifier_file,
    unsafe_judged,
    unsafe_tail,
)

SMALL = VerifierArchitecture(TrunkArchitecture(16, 1, 8, 1), grid=4, features=8, hidden=4, embedding=8)
DRAWN = verifier_from(drawn_verifier_file(0))


def config(**changes):
    told = {"name": "small", "architecture": SMALL, "steps": 4, "people": 8, "checkpoint_every": 2, "seed": 3}
    return VerificationConfig(**(told | changes))


def tensor(images):
    return torch.from_numpy(images[:, None].astype(np.float32)) / 127.5 - 1


@pytest.fixture(scope="module")
def people():
    return chests(130, seed=5)


@pytest.fixture(scope="module")
def strangers():
    images, whose = chests(60, seed=77)
    return tensor(images), whose


# -- what it is


@settings(max_examples=15, deadline=None)
@given(st.integers(5, 40), st.integers(5, 40), st.sampled_from([1, 3]), st.integers(0, 99))
def test_both_heads_give_unit_vectors_at_any_size_whatever_else_is_in_the_batch(h, w, c, seed):
    images = torch.rand(3, c, h, w, generator=torch_generator(seed)) * 2 - 1
    seen = DRAWN.look(images)
    for vectors in seen:
        assert vectors.dtype == torch.float32
        assert torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)
    alone = [DRAWN.look(one[None]) for one in images]
    assert torch.allclose(seen.features, torch.cat([one.features for one in alone]), atol=1e-4)
    assert torch.allclose(seen.embeddings, torch.cat([one.embeddings for one in alone]), atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999))
def test_the_logits_are_the_same_in_either_order_and_not_squashed(seed):
    a, b = torch.randn(2, 7, 16, generator=torch_generator(seed))
    logits = DRAWN.logits(a, b)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, DRAWN.logits(b, a))
    assert torch.allclose(DRAWN.probability(a, b), 1 / (1 + torch.exp(-logits)))
    assert DRAWN.logits(a.double(), b.double()).dtype == torch.float32


def test_a_sigmoid_would_call_alike_what_the_logits_tell_apart():
    a = torch.nn.functional.normalize(torch.randn(2, 16, generator=torch_generator(1)), dim=1)
    with torch.no_grad():
        DRAWN.net.fusion.line.bias.add_(100.0)
        try:
            logits, squashed = DRAWN.logits(a, -a.flip(0)), DRAWN.probability(a, -a.flip(0))
            same, one = DRAWN.logits(a, a), DRAWN.probability(a, a)
        finally:
            DRAWN.net.fusion.line.bias.sub_(100.0)
    assert bool((same > logits + 1).all())
    assert torch.equal(one, squashed)


def test_a_copy_has_the_same_score_whoever_is_copied():
    a = torch.nn.functional.normalize(torch.randn(9, 16, generator=torch_generator(2)), dim=1)
    copied = DRAWN.logits(a, a)
    assert torch.allclose(copied, copied[:1].expand(9))
    with seeded(0):
        line = Fusion(16, 4)
    torch.nn.init.zeros_(line.out.weight), torch.nn.init.zeros_(line.out.bias)
    cosine = (a[:1] * a).sum(dim=1)
    assert torch.allclose(line(a[:1].expand(9, 16), a), 10 * cosine - 5, atol=1e-5)  # where training starts


def test_a_mirror_image_and_another_exposure_are_seen_alike(strangers):
    images = strangers[0][:8] * 0.5
    for vectors, flipped, lit in zip(
        DRAWN.look(images), DRAWN.look(images.flip(3)), DRAWN.look(images * 1.4 + 0.2), strict=True
    ):
        assert torch.allclose(vectors, flipped, atol=1e-4)
        assert torch.allclose(vectors, lit, atol=0.05)
    other = DRAWN.look(images.flip(2)).features  # upside down is another picture
    assert not torch.allclose(DRAWN.look(images).features, other, atol=0.05)


def test_an_empty_picture_is_seen_with_finite_numbers():
    seen = DRAWN.look(torch.zeros(2, 1, 16, 16))
    assert bool(torch.isfinite(seen.features).all())
    assert bool(torch.isfinite(DRAWN.logits(seen.features, seen.features)).all())


def test_the_maps_lie_over_the_picture_and_bear_gradients():
    images = torch.rand(2, 1, 16, 16, generator=torch_generator(0)) * 2 - 1
    maps = DRAWN.maps(images.requires_grad_())
    assert [tuple(m.shape) for m in maps] == [(2, 16, 16, 16), (2, 32, 8, 8)]
    seen = DRAWN.seen(maps[-1])
    assert torch.equal(seen.features, DRAWN.look(images).features)
    maps[-1].retain_grad()
    DRAWN.logits(seen.features[:1], seen.features[1:]).sum().backward()
    assert float(images.grad.abs().max()) > 0
    assert float(maps[-1].grad.abs().max()) > 0
    for there, mirrored in zip(maps, DRAWN.maps(images.flip(3)), strict=True):
        one, other = there.chunk(2, dim=1)
        assert torch.allclose(mirrored, torch.cat([other.flip(3), one.flip(3)], dim=1), atol=1e-4)


def test_features_of_another_size_or_number_are_refused():
    for a, b in ((torch.zeros(2, 16), torch.zeros(3, 16)), (torch.zeros(2, 8),) * 2, (torch.zeros(16),) * 2):
        with pytest.raises(ValueError, match="features"):
            DRAWN.logits(a, b)


@pytest.mark.parametrize(
    "wrong", [{"grid": 0}, {"grid": 9}, {"features": 1}, {"hidden": 4.0}, {"embedding": 5000}, {"grid": True}]
)
def test_what_is_no_verifier_is_not_built(wrong):
    with pytest.raises(ValueError, match=r"grid|between"):
        replace(TINY, **wrong)


# -- what it learns


def test_some_seconds_of_training_know_strangers_apart_at_visits_with_changed_findings(strangers):
    images, whose = strangers
    found, untrained = (
        judge(v.net, images, whose, v.tail) for v in (tiny_verifier(), verifier_from(drawn_verifier_file(0)))
    )
    assert found.auc.value > 0.95
    assert found.precision_at_1.low > 5 / 60
    assert untrained.auc.value < found.auc.low
    assert untrained.precision_at_1.value < found.precision_at_1.value


def test_the_tail_is_of_strangers_and_the_file_says_what_it_catches():
    verifier = tiny_verifier()
    assert verifier.tail.people == 60
    assert verifier.tail.pairs == 120 * 119 // 2 - 60
    caught = verifier.judged.caught
    assert caught.keys() == set(CHANGES) == set(PLANTED)
    assert caught["flip"].value == 1.0
    assert caught["contrast"].value > caught["noise"].value  # a picture of the same light, or of much noise


def test_people_the_tail_never_saw_are_mistaken_as_often_as_it_says(strangers):
    verifier, (images, whose) = tiny_verifier(), strangers
    with torch.no_grad():
        scores = all_logits(verifier.net, verifier.look(images).features).double().numpy()
    others = scores[whose[:, None] != whose]
    for comparisons in (10, 30):
        threshold = verifier.tail.threshold(comparisons, 0.1)
        low, high = verifier.tail.interval(comparisons, threshold)
        found = 1 - (1 - (others >= threshold).mean()) ** comparisons
        assert low / 3 < found < high * 3  # an order of size; the benchmark looks closer


def test_two_opinions_are_two_networks_of_other_people(tmp_path, people):
    plans = [config(steps=2), second_opinion(config(steps=2))]
    first, second = (verifier_from(fit_verifier(*people, plan, tmp_path / plan.name).file) for plan in plans)
    assert first.origin.sha256 != second.origin.sha256
    assert first.net.architecture.features != second.net.architecture.features
    assert second.name == "small-b"
    learnt = [set(people[1][split(*people, plan)[0]]) for plan in plans]
    assert learnt[0] != learnt[1]


@pytest.mark.parametrize(("side", "depth", "grid"), [(16, 2, 8), (64, 4, 8), (32, 3, 8), (4, 2, 2), (3, 1, 1)])
def test_a_second_opinion_can_be_built_from_any_first(side, depth, grid):
    first = VerificationConfig("a" * 32, VerifierArchitecture(TrunkArchitecture(side, 1, 8, depth), grid))
    second = second_opinion(first)
    with torch.device("meta"):
        VerifierNet(second.architecture)
    assert second.architecture.features > first.architecture.features
    assert second.architecture.grid < grid or grid == 1
    assert (second.seed, len(second.name)) == (1, 32)


@pytest.mark.parametrize("side", [3, 8, 16, 24, 32, 64, 100, 256, 512])
@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_suited_can_be_built(side, channels):
    chosen = suited("some", side, channels, 10)
    assert chosen.architecture.grid == min(8, chosen.architecture.trunk.left)
    with torch.device("meta"):
        VerifierNet(chosen.architecture)


def test_a_run_that_was_killed_ends_with_the_same_file(tmp_path, people):
    def near(pictures, generator):
        return pictures + 0.1 * torch.randn(pictures.shape, generator=generator)

    whole = fit_verifier(*people, config(), tmp_path / "whole", near=near).file
    with pytest.raises(KilledError):
        fit_verifier(*people, config(), tmp_path / "killed", killed_at(4), near)
    assert fit_verifier(*people, config(), tmp_path / "killed", near=near).file == whole
    for plan, maker in ((config(seed=4), near), (config(), None)):
        with pytest.raises(OtherRunError):
            fit_verifier(*people, plan, tmp_path / "killed", near=maker)
    with pytest.raises(OtherRunError):
        fit_verifier(255 - people[0], people[1], config(), tmp_path / "killed", near=near)


def test_a_generators_near_duplicates_are_the_same_person_in_training_and_judgement(tmp_path, people):
    shown = []

    def near(pictures, _generator):
        shown.append(len(pictures))
        return pictures

    trained = fit_verifier(*people, config(), tmp_path, near=near)
    learn, _, judge_by = split(*people, config())
    assert sum(shown) == len(learn) + len(judge_by)
    assert trained.judged.caught[MADE] == trained.judged.caught["flip"]  # both are seen as the picture itself
    assert MADE in verifier_from(trained.file).judged.caught
    assert MADE not in fit_verifier(*people, config(), tmp_path / "none").judged.caught


@pytest.mark.parametrize("wrong", [lambda x, _: x[:1], lambda x, _: x * torch.nan, lambda x, _: x[..., :8]])
def test_near_duplicates_that_are_none_are_refused(tmp_path, people, wrong):
    with pytest.raises(ValueError, match="near-duplicates are finite"):
        fit_verifier(*people, config(), tmp_path, near=wrong)
    assert not list(tmp_path.iterdir())


def test_nobody_is_in_two_parts_and_all_pictures_of_one_person_are_in_one(people):
    parts = split(*people, config())
    owners = [set(people[1][part]) for part in parts]
    assert set.union(*owners) == set(people[1])
    assert sum(map(len, owners)) == 130
    assert sorted(np.concatenate(parts)) == list(range(260))


def test_what_cannot_train_or_calibrate_is_refused_before_anything_begins(tmp_path, people):
    images, whose = people
    single = whose.copy()
    single[0] = 999
    for some, wrong in ((images, single), (images[:200], whose[:200]), (images[:0], whose[:0])):
        with pytest.raises(TooFewPeopleError) as told:
            fit_verifier(some, wrong, config(), tmp_path)
        assert "130" not in str(told.value)
        assert "100" not in str(told.value)
    for wrong_images, wrong_whose in (
        (images.astype(np.float32), whose), (images, whose[:-1]), (images, whose.astype(float)),
        (np.zeros_like(images), whose), (images[..., None].repeat(2, axis=3), whose),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"images|identity"):
            fit_verifier(wrong_images, wrong_whose, config(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_verifier_that_knows_too_little_is_not_given_out(tmp_path, people):
    with pytest.raises(RecogniserError, match="train it longer"):
        train_verifier(*people, config(), tmp_path)
    shuffled = np.random.default_rng(0).permutation(people[1])
    with pytest.raises(RecogniserError):
        train_verifier(people[0], shuffled, config(), tmp_path / "shuffled")


def test_people_without_differences_have_no_tail():
    with pytest.raises(NoTail):
        tail_of(DRAWN.net, torch.zeros(80, 1, 16, 16), np.repeat(np.arange(40), 2), 0)


@pytest.mark.parametrize(
    "wrong",
    [{"people": 1}, {"pictures": 1}, {"steps": 0}, {"temperature": 0.0}, {"balanced": math.nan}, {"held_out": 0.5},
     {"learning_rate": math.nan}],
)  # fmt: skip
def test_a_configuration_that_cannot_train_is_refused(wrong):
    with pytest.raises(ValueError, match=r"steps|temperature|rates"):
        config(**wrong)


# -- the losses and the measures, against others'


def test_the_contrastive_loss_is_khosla_et_als_formula():
    z = torch.nn.functional.normalize(torch.randn(7, 5, generator=torch_generator(0)), dim=1).double()
    whose = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    expected = 0.0
    for i in range(7):
        others = [a for a in range(7) if a != i]
        below = sum(math.exp(float(z[i] @ z[a]) / 0.2) for a in others)
        own = [p for p in others if whose[p] == whose[i]]
        expected -= sum(math.log(math.exp(float(z[i] @ z[p]) / 0.2) / below) for p in own) / len(own) / 7
    assert float(contrastive(z @ z.T / 0.2, whose)) == pytest.approx(expected)


def test_the_balanced_loss_takes_as_many_pairs_of_two_persons_and_half_of_them_the_hardest():
    whose = torch.arange(6).repeat_interleave(2)
    logits = torch.full((12, 12), -3.0)
    logits[whose[:, None] == whose] = 2.0
    hardest = [(0, 5), (1, 7), (2, 9)]
    for i, j in hardest:
        logits[i, j] = logits[j, i] = 1.0
    calm, hard = math.log1p(math.exp(-3.0)), math.log1p(math.exp(1.0))
    losses = {round(float(balanced(logits, whose, torch_generator(seed))), 5) for seed in range(30)}
    own = math.log1p(math.exp(-2.0))
    assert min(losses) == pytest.approx(own + (3 * hard + 3 * calm) / 6, abs=1e-4)
    assert losses <= {round(own + ((3 + n) * hard + (3 - n) * calm) / 6, 5) for n in range(4)}


def test_the_area_is_sklearns_and_the_intervals_count_people(strangers):
    images, whose = strangers
    verifier = tiny_verifier()
    found = judge(verifier.net, images, whose, verifier.tail)
    with torch.no_grad():
        scores = all_logits(verifier.net, verifier.look(images).features)
    assert torch.equal(scores, scores.T)
    a, b = np.triu_indices(len(whose), 1)
    assert found.auc.value == pytest.approx(roc_auc_score(whose[a] == whose[b], scores.numpy()[a, b]), abs=1e-6)
    threshold = verifier.tail.threshold(GALLERY, FALSE_MATCHES)
    own = scores.numpy()[a, b][whose[a] == whose[b]]
    assert found.matched.value == pytest.approx((own >= threshold).mean())
    twice = judge(verifier.net, images.repeat(2, 1, 1, 1), np.tile(whose, 2), verifier.tail)
    assert twice.matched.high - twice.matched.low > 0.9 * (found.matched.high - found.matched.low)


def test_precision_and_map_at_r_are_those_of_a_plain_count():
    rng = np.random.default_rng(0)
    whose = np.repeat(np.arange(8), [2, 3, 4, 2, 3, 4, 2, 5])
    likeness = rng.standard_normal((25, 25))
    likeness += likeness.T + 2 * (whose[:, None] == whose)
    first, average = [], []
    for i in range(25):
        order = sorted((j for j in range(25) if j != i), key=lambda j: -likeness[i, j])
        right = [whose[j] == whose[i] for j in order]
        r = sum(right)
        first.append(right[0])
        average.append(sum(sum(right[: k + 1]) / (k + 1) for k in range(r) if right[k]) / r)
    assert retrieved(likeness, whose) == (pytest.approx(np.mean(first)), pytest.approx(np.mean(average)))
    apart = np.where(whose[:, None] == whose, 1.0, 0.0) + 0.01 * rng.standard_normal((25, 25))
    assert retrieved(apart, whose) == (1.0, 1.0)
    rest = np.arange(1, 25)
    assert average_precision_score(whose[rest] == 0, apart[0, 1:]) == 1.0


def test_what_is_planted_is_within_what_is_taught():
    for kind, how in PLANTED.items():
        assert how.turn <= VISITS.turn, kind
        assert how.zoom[0] >= VISITS.zoom[0], kind
        assert how.light <= VISITS.light, kind
        assert how.noise <= VISITS.noise, kind


# -- the file


def test_a_verifier_comes_back_from_its_file_with_tail_judgement_and_digest():
    raw = tiny_verifier_file()
    verifier, images = verifier_from(raw, "public"), tensor(chests(3, seed=1)[0])
    assert verifier.origin == Origin("public", hashlib.sha256(raw).hexdigest())
    assert verifier_from(raw).origin.component == "private"
    again = verifier_from(verifier_bytes(verifier.name, verifier.net, verifier.tail, verifier.judged, {}))
    assert (again.tail, again.judged, again.name) == (verifier.tail, verifier.judged, "tiny")
    assert type(again.tail) is Tail
    assert torch.equal(again.look(images).features, verifier.look(images).features)
    assert not any(p.requires_grad for p in verifier.train().parameters())


def wrong_files():
    packed = unpack(drawn_verifier_file(0), "verifier")
    good, state = dict(packed.config), dict(packed.state)
    tail, judged, built = good["tail"], good["judged"], good["architecture"]
    share = judged["auc"]
    configs = {
        "an unknown key": {**good, "extra": 1},
        "no tail": {k: v for k, v in good.items() if k != "tail"},
        "a name that is none": {**good, "name": "No Name"},
        "a name that is a number": {**good, "name": 7},
        "a tail of no people": {**good, "tail": {**tail, "people": 0}},
        "a tail that rises": {**good, "tail": {**tail, "scale": -1.0}},
        "a heavy tail": {**good, "tail": {**tail, "shape": 0.5}},
        "a tail without replicates": {**good, "tail": {**tail, "replicates": []}},
        "a tail whose share is none": {**good, "tail": {**tail, "share": 2.0}},
        "a tail with another key": {**good, "tail": {**tail, "threshold": 0.5}},
        "a tail that is a number": {**good, "tail": 0.5},
        "a share above 1": {**good, "judged": {**judged, "auc": {**share, "high": 1.5}}},
        "a share outside its interval": {**good, "judged": {**judged, "auc": {**share, "low": 0.99}}},
        "a share that is a number": {**good, "judged": {**judged, "auc": 0.99}},
        "nothing caught": {**good, "judged": {**judged, "caught": {}}},
        "an unknown change": {**good, "judged": {**judged, "caught": {**judged["caught"], "tears": share}}},
        "no judgement": {**good, "judged": None},
        "a size that is no number": {**good, "architecture": {**built, "features": "16"}},
        "an unknown part": {**good, "architecture": {**built, "sigmoid": True}},
        "no trunk": {**good, "architecture": {**built, "trunk": {"side": 16}}},
        "another size": {**good, "architecture": {**built, "features": 8}},
        "a list": {**good, "architecture": []},
    }
    files = {what: pack("verifier", config, {}, state) for what, config in configs.items()}
    first = next(iter(state))
    files["another kind"] = pack("recogniser", good, {}, state)
    files["a weight that is missing"] = pack("verifier", good, {}, {k: v for k, v in state.items() if k != first})
    files["a weight too many"] = pack("verifier", good, {}, {**state, "more": state[first].clone()})
    files["a weight that is not finite"] = pack("verifier", good, {}, {**state, first: state[first] * math.nan})
    files["half of it"] = drawn_verifier_file(0)[:-20]
    return files


def test_a_file_that_describes_no_verifier_is_refused():
    for what, raw in wrong_files().items():
        try:
            verifier_from(raw)
        except WeightsError:
            continue
        pytest.fail(f"read: {what}")


def test_the_file_from_which_the_wrong_ones_are_made_is_read():
    packed = unpack(drawn_verifier_file(0), "verifier")
    assert verifier_from(pack("verifier", packed.config, {}, packed.state)).tail == unsafe_tail()


def judged(auc=(0.95, 0.9, 1.0), caught=(0.9, 0.8, 1.0)):
    return replace(unsafe_judged(), auc=Proportion(*auc), caught=dict.fromkeys(CHANGES, Proportion(*caught)))


@pytest.mark.parametrize(
    ("found", "enough"),
    [
        (judged(), True),
        (judged(auc=(0.95, KNOWN, 1.0)), False),
        (judged(auc=(0.95, KNOWN + 1e-6, 1.0)), True),
        (judged(caught=(0.9, 0.5, 1.0)), False),
        (judged(caught=(0.9, 0.5 + 1e-6, 1.0)), True),
        (judged(auc=(0.5, 0.4, 0.6)), False),
        (judged(caught=(0.0, 0.0, 0.1)), False),  # strangers apart, but its threshold finds no copy
    ],
)
def test_what_is_demanded_is_the_worse_end_of_the_intervals(found, enough):
    verifier = verifier_from(verifier_bytes("some", DRAWN.net, unsafe_tail(), found, {}))
    if enough:
        verifier.demand()
        return
    with pytest.raises(RecogniserError, match="train it longer"):
        verifier.demand()


def test_a_judgement_is_made_of_shares():
    good = unsafe_judged()
    for wrong in ({"auc": 0.9}, {"caught": {**good.caught, "flip": 0.9}}, {"caught": {}}, {"caught": ()}):
        with pytest.raises(ValueError, match=r"shares|every change"):
            replace(good, **wrong)
    assert asdict(good)["caught"]["flip"] == asdict(good.auc)
