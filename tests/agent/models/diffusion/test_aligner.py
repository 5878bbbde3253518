import json
import math
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from sklearn.metrics import roc_auc_score

from agent.errors import OtherRunError
from agent.intervals import Proportion
from agent.models.augmentations import Pool
from agent.models.diffusion.aligner import (
    AlignerArchitecture,
    AlignerError,
    AlignerNet,
    AlignerQuality,
    OtherConditionsError,
    aligner_bytes,
    aligner_from,
)
from agent.models.diffusion.aligner_training import (
    AlignmentConfig,
    Labelled,
    TooFewPairsError,
    contrast,
    judge,
    split,
    suited,
    train_aligner_of,
)
from agent.models.diffusion.prompts import Conditions
from agent.models.features.trunk import TrunkArchitecture
from agent.models.training_loop import seeded
from agent.models.weights import HEADER, WeightsError
from deploy.phantoms.chest import conditions as chest_conditions
from deploy.phantoms.chest import label_of
from tests.support.aligners import (
    CHESTS,
    SMALL,
    chests,
    trained,
    trained_file,
    unsafe_fitness,
    untrained,
    untrained_file,
)
from tests.support.killed_training import KilledError, killed_at


def config(**changes):
    told = {"steps": 6, "batch": 12, "learning_rate": 4e-3, "checkpoint_every": 2}
    return AlignmentConfig("tiny", SMALL, **(told | changes))


def train_aligner(images, labels, *rest):
    """Where every picture is of another person."""
    return train_aligner_of(Labelled(images, labels, np.arange(len(images))), *rest)


def pictures(images):
    return torch.from_numpy(images)[:, None].float() / 127.5 - 1.0


def unit(*shape, seed=0):
    return torch.nn.functional.normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_with_all_conditions_different_the_loss_is_clips():
    images, prompts, labels = unit(5, 8), unit(5, 8, seed=1), torch.arange(5)
    x = (images @ prompts.T / 0.1).double().numpy()
    total = 0.0
    for i in range(5):  # Radford et al. 2021, Fig. 3: cross-entropy of rows and of columns with the diagonal
        total += math.log(np.exp(x[i]).sum()) - x[i, i] + math.log(np.exp(x[:, i]).sum()) - x[i, i]
    found = float(contrast(images, prompts, labels, torch.tensor(0.1)))
    assert found == pytest.approx(total / 10, abs=1e-5)


def test_all_prompts_of_a_pictures_own_condition_are_right_for_it():
    images, prompts, labels = unit(6, 8), unit(6, 8, seed=1), torch.tensor([0, 1, 0, 2, 1, 0])
    x = (images @ prompts.T / 0.1).double().numpy()
    total = 0.0
    for i in range(6):
        same = [j for j in range(6) if labels[j] == labels[i]]
        total -= np.mean([x[i, j] - math.log(np.exp(x[i]).sum()) for j in same])
        total -= np.mean([x[j, i] - math.log(np.exp(x[:, i]).sum()) for j in same])
    found = float(contrast(images, prompts, labels, torch.tensor(0.1)))
    assert found == pytest.approx(total / 12, abs=1e-5)


def test_an_aligner_finds_the_condition_of_people_it_never_saw():
    aligner = trained()
    aligner.demand()
    aligner.fits(CHESTS)
    images, labels = chests(240, 1)
    fit = torch.stack([
        aligner.scores(pictures(images), CHESTS.tokens(torch.full((240,), label))) for label in range(CHESTS.count)
    ])  # fmt: skip
    right = float((fit.argmax(dim=0).numpy() == labels).mean())
    assert right > 0.8
    assert right == pytest.approx(aligner.fitness.right.value, abs=0.1)  # what its file says of others holds of these
    assert float(fit.abs().max()) <= 1 + 1e-5
    own = torch.eye(CHESTS.count, dtype=torch.bool)[:, labels]
    assert float(fit[own].mean()) > float(fit[~own].mean()) + 0.2
    assert min(aligner.fitness.findings) > 0.9
    assert aligner.fitness.chance == pytest.approx(1 / 6, abs=0.02)


def test_what_shows_half_of_a_prompt_lies_nearer_to_it_than_what_shows_nothing_of_it(tmp_path):
    names = ("none", "cardiomegaly", "edema", "effusion", "cardiomegaly+effusion", "edema+effusion")
    conditions = Conditions(names)
    rng = np.random.default_rng(3)
    told = zip(*chests(900, 2, Conditions(all_pairs()), most=2), strict=True)
    chosen = [(image, names.index(all_pairs()[label])) for image, label in told if all_pairs()[label] in names]
    order = rng.permutation(len(chosen))
    images, labels = np.stack([chosen[i][0] for i in order]), np.array([chosen[i][1] for i in order])
    raw = train_aligner(images[60:], labels[60:], conditions, config(steps=80, batch=32), tmp_path)
    aligner = aligner_from(raw)

    def near(shown, asked):
        some = pictures(images[:60][labels[:60] == names.index(shown)])
        tokens = conditions.tokens(torch.full((len(some),), names.index(asked)))
        return float(aligner.scores(some, tokens).mean())

    assert near("edema+effusion", "edema+effusion") > near("edema+effusion", "edema") > near("edema+effusion", "none")
    assert near("edema+effusion", "edema") > near("edema+effusion", "cardiomegaly")
    assert near("cardiomegaly+effusion", "cardiomegaly") > near("cardiomegaly+effusion", "edema")


def all_pairs():
    return tuple(label_of(found) for found in chest_conditions(2))


def test_labels_that_mean_nothing_give_an_aligner_that_is_refused(tmp_path):
    images, labels = chests(240, 0)
    shuffled = np.random.default_rng(0).permutation(labels)
    aligner = aligner_from(train_aligner(images, shuffled, CHESTS, config(steps=40, batch=48), tmp_path))
    with pytest.raises(AlignerError, match="train it longer"):
        aligner.demand()


def test_an_aligner_that_answers_the_commonest_condition_knows_nothing():
    poor = replace(unsafe_fitness(CHESTS), right=Proportion(0.7, 0.6, 0.8), chance=0.6)
    aligner = untrained()
    for fitness, refused in ((poor, True), (replace(poor, chance=0.59), False)):
        aligner.fitness = fitness
        if refused:
            with pytest.raises(AlignerError):
                aligner.demand()
        else:
            aligner.demand()


def test_an_aligner_used_with_other_conditions_is_refused():
    for other in (
        Conditions(CHESTS.names[::-1]),
        Conditions(CHESTS.names[:5]),
        Conditions(CHESTS.names, ("{}",)),
        Conditions(CHESTS.names, CHESTS.templates, 12),
    ):
        with pytest.raises(OtherConditionsError):
            untrained().fits(other)
    untrained().fits(Conditions(CHESTS.names))


def test_a_run_that_was_killed_ends_with_the_same_file(tmp_path):
    images, labels = chests(60, 0)
    state = torch.get_rng_state()
    whole = train_aligner(images, labels, CHESTS, config(), tmp_path / "whole")
    assert torch.equal(state, torch.get_rng_state())

    with pytest.raises(KilledError):
        train_aligner(images, labels, CHESTS, config(), tmp_path / "killed", killed_at(6))
    assert train_aligner(images, labels, CHESTS, config(), tmp_path / "killed") == whole
    others = Conditions(CHESTS.names, ("{}",))
    for change in ((images, labels, others), (images, labels[::-1].copy(), CHESTS), (255 - images, labels, CHESTS)):
        with pytest.raises(OtherRunError):
            train_aligner(*change, config(), tmp_path / "killed")


def test_nobody_is_learned_from_and_judged_by_and_every_condition_is_both():
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(80), 3)
    labels = rng.integers(-1, 6, 240)
    labelled = Labelled(np.zeros((240, 16, 16), np.uint8), labels, owners)
    learn, judged = split(labelled, CHESTS, config())
    assert not set(owners[learn]) & set(owners[judged])
    assert sorted([*learn, *judged]) == list(np.flatnonzero(labels >= 0))
    assert set(labels[learn]) == set(labels[judged]) == set(range(6))
    assert 0.15 < len(judged) / (len(learn) + len(judged)) < 0.4
    other = split(labelled, CHESTS, config(seed=1))[1]
    assert set(other) != set(judged)


def test_a_condition_that_nobody_can_judge_is_refused(tmp_path):
    images, labels = chests(60, 0)
    few = np.where(labels == 3, 0, labels)
    one = few.copy()
    one[7] = 3  # one picture of it: to learn from, or to judge by
    for wrong in (few, one):
        with pytest.raises(TooFewPairsError, match="several people"):
            train_aligner(images, wrong, CHESTS, config(), tmp_path)
    everybody = Labelled(images, labels, np.zeros(60, np.int64))
    with pytest.raises(TooFewPairsError, match="several people"):
        train_aligner_of(everybody, CHESTS, config(), tmp_path)
    for wrong in (labels + 1, labels - 2, labels[:-1], labels.astype(float), labels[:0]):
        with pytest.raises(ValueError, match="label"):
            train_aligner(images, wrong, CHESTS, config(), tmp_path)
    with pytest.raises(ValueError, match="label"):
        train_aligner(images[:0], labels[:0], CHESTS, config(), tmp_path)
    with pytest.raises(ValueError, match="do not differ"):
        train_aligner(np.zeros_like(images), labels, CHESTS, config(), tmp_path)
    with pytest.raises(ValueError, match="two at least"):
        train_aligner(images, np.zeros(60, np.int64), Conditions(("none",)), config(), tmp_path)
    many = Conditions(tuple("+".join(f"{a:03x}{b}" for b in range(5)) for a in range(1300)))
    with pytest.raises(ValueError, match="too many"):
        train_aligner(images, np.zeros(60, np.int64), many, config(), tmp_path)
    assert not list(tmp_path.iterdir())
    for change in ({"steps": 0}, {"batch": 1}, {"learning_rate": math.nan}, {"held_out": 1.0}, {"batch": 2.0}):
        with pytest.raises(ValueError, match=r"steps|rates"):
            config(**change)


def test_a_judgement_is_what_its_words_say():
    images, labels = chests(120, 5, Conditions(all_pairs()), most=2)
    conditions = Conditions(all_pairs())
    with seeded(1):
        net = AlignerNet(SMALL, conditions.vocabulary.size, conditions.length).eval()
    labelled = Labelled(images, labels, np.arange(120) // 2)
    places = np.arange(0, 120)
    fitness = judge(net, Pool(images, 16, 1, torch.device("cpu")), labelled, places, conditions)
    with torch.no_grad():
        cosines = (net.images(pictures(images)) @ net.prompts(conditions.tokens(torch.arange(16))).T).numpy()
    assert fitness.right.value == pytest.approx((cosines.argmax(1) == labels).mean())
    assert fitness.right.high - fitness.right.low > 0
    assert fitness.chance == pytest.approx(np.bincount(labels).max() / 120)
    assert fitness.own == pytest.approx(np.mean([cosines[i, labels[i]] for i in range(120)]), abs=1e-6)
    for finding, auc in zip(conditions.findings, fitness.findings, strict=True):
        shows = np.array([finding in name.split("+") for name in conditions.names])
        leaning = cosines[:, shows].mean(axis=1) - cosines[:, ~shows].mean(axis=1)
        assert auc == pytest.approx(roc_auc_score(shows[labels], leaning), abs=1e-4)


def test_every_picture_has_a_score_by_itself():
    aligner, (images, labels) = untrained(), chests(300, 1, side=16)
    seen, tokens = pictures(images), CHESTS.tokens(torch.from_numpy(labels))
    together = aligner.scores(seen, tokens)
    assert together.shape == (300,)
    assert together.dtype == torch.float32
    alone = torch.cat([aligner.scores(seen[i : i + 1], tokens[i : i + 1]) for i in (0, 255, 256, 299)])
    assert torch.allclose(together[[0, 255, 256, 299]], alone, atol=1e-5)
    assert aligner.scores(seen[:0], tokens[:0]).shape == (0,)
    expected = (aligner.embed(seen) * aligner.net.prompts(tokens)).sum(dim=1)
    assert torch.allclose(together, expected, atol=1e-5)


def test_a_picture_that_is_not_finite_scores_nan_and_no_other_does():
    images, labels = chests(6, 1)
    seen, tokens = pictures(images), CHESTS.tokens(torch.from_numpy(labels))
    seen[2, 0, 3, 3] = math.nan
    assert torch.isnan(untrained().scores(seen, tokens)).tolist() == [i == 2 for i in range(6)]


def test_pictures_of_any_size_and_colour_are_seen():
    tokens = CHESTS.tokens(torch.tensor([1, 2]))
    for shape in ((2, 1, 16, 16), (2, 3, 16, 16), (2, 1, 40, 40)):
        assert untrained().scores(torch.zeros(shape), tokens).shape == (2,)
        assert untrained(channels=3).scores(torch.zeros(shape), tokens).shape == (2,)


def test_prompts_that_are_none_of_its_conditions_are_refused():
    aligner, images = untrained(), torch.zeros(2, 1, 16, 16)
    good = CHESTS.tokens(torch.tensor([1, 2]))
    unknown = good.clone()
    unknown[0, 3] = CHESTS.vocabulary.size
    for wrong in (good[:1], good[:, :5], good.int(), good - 1, unknown, CHESTS.tokens(torch.tensor([1, -1]))):
        with pytest.raises(ValueError, match="prompt"):
            aligner.scores(images, wrong)


def test_what_is_no_word_changes_no_prompt():
    net = untrained().net
    tokens = CHESTS.tokens(torch.arange(6))
    before = net.prompts(tokens)
    with torch.no_grad():
        net.words.table.weight[0] += 5.0
        net.words.places[int((tokens > 0).sum(dim=1).max()) :] -= 3.0
    assert torch.allclose(net.prompts(tokens), before, atol=1e-6)
    with torch.no_grad():
        net.words.places[0] -= torch.linspace(-1, 1, 64)
    assert not torch.allclose(net.prompts(tokens), before, atol=1e-3)


def test_a_file_holds_the_aligner_its_conditions_and_what_it_knows():
    raw = trained_file()
    aligner = aligner_from(raw)
    assert aligner.origin.component == "private"  # nobody vouches for it
    assert aligner_from(raw, "public").origin.component == "public"
    assert aligner.conditions == CHESTS
    assert aligner.fitness == trained().fitness
    told = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"][HEADER])
    again = aligner_bytes("chests", aligner.net, CHESTS, aligner.fitness, told["notes"])
    assert again == raw
    assert not any(p.requires_grad for p in aligner.parameters())
    assert not aligner.train().training


def told_otherwise(change):
    raw = untrained_file()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"][HEADER]
    told = json.loads(header)
    change(told["config"])
    return safetensors.torch.save(safetensors.torch.load(raw), {HEADER: json.dumps(told)})


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("fitness"),
        lambda c: c.update(more=1),
        lambda c: c.update(name="A name"),
        lambda c: c["conditions"]["names"].append("nodule"),  # another vocabulary than the weights'
        lambda c: c["conditions"].update(length=15),
        lambda c: c["conditions"].update(names="none"),
        lambda c: c["fitness"].update(chance=float("nan")),
        lambda c: c["fitness"].update(right={"value": 0.9}),
        lambda c: c["fitness"]["findings"].pop(),
        lambda c: c["fitness"].update(findings=["0.9"] * 6),
        lambda c: c["architecture"].update(grid=99),
        lambda c: c["architecture"].update(width=1 << 30),
        lambda c: c["architecture"]["trunk"].update(width=16),
        lambda c: c["architecture"].pop("embedding"),
    ],
)
def test_a_file_that_describes_no_aligner_is_refused(change):
    with pytest.raises(WeightsError):
        aligner_from(told_otherwise(change))


def test_a_file_of_something_else_is_refused():
    for wrong in (b"", b"{}", untrained_file()[:-3], safetensors.torch.save({"a": torch.zeros(1)})):
        with pytest.raises(WeightsError):
            aligner_from(wrong)


def test_no_judgement_is_made_of_nan():
    good = unsafe_fitness(CHESTS)
    for change in ({"chance": math.nan}, {"own": 2.0}, {"findings": ()}, {"findings": (math.nan,)}, {"right": 0.9}):
        with pytest.raises(ValueError, match=r"fitness|share|finding"):
            replace(good, **change)
    assert AlignerQuality(good.right, 0.5, 0.0, 0.0, (0.5,)).chance == 0.5


def test_an_architecture_that_is_none_is_refused():
    trunk = TrunkArchitecture(16, 1, 8, 2)
    for change in ({"grid": 9}, {"grid": 0}, {"embedding": 1}, {"width": 5}, {"width": 4.0}):
        with pytest.raises(ValueError, match=r"embedding|grid"):
            AlignerArchitecture(trunk, **change)


@pytest.mark.parametrize("side", [16, 32, 64, 256, 512, 40])
def test_a_suited_aligner_can_be_built_for_any_size(side):
    made = suited(side, 1, 300)
    assert made.steps == 300
    assert made.architecture.trunk.side == side
    AlignerNet(made.architecture, 10, 16)
