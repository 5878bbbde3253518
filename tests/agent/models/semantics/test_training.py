"""The semantic query function: learned from labels or without any, frozen, one file, an answer for each picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import normalized_mutual_info_score

from agent.errors import OtherRunError
from agent.models.features.extractors import RandomFeatures, features_bytes, features_from
from agent.models.features.trunk import Trunk, TrunkArchitecture
from agent.models.semantics import training
from agent.models.semantics.classifier import (
    Classifier,
    Nearest,
    SemanticCodebook,
    Semantics,
    semantics_bytes,
    semantics_from,
)
from agent.models.semantics.training import (
    SemanticsConfig,
    TooFewLabelledImagesError,
    TrainedSemantics,
    cluster_semantics,
    split,
    suited,
    train_semantics,
)
from agent.models.training_loop import seeded
from agent.models.weights import Origin, WeightsError, pack, unpack

DIGITS = load_digits()
IMAGES = np.rint(DIGITS.images / 16 * 255).astype(np.uint8)
LABELS = DIGITS.target.astype(np.int64)
UNIT = IMAGES.astype(np.float32) / np.float32(255)
CONFIG = SemanticsConfig(
    "digits", suited(8, 1, width=8), tuple("0123456789"), 60, 64, learning_rate=1e-2, checkpoint_every=20
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedSemantics:
    return train_semantics(IMAGES, LABELS, CONFIG, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def classifier(trained: TrainedSemantics) -> Semantics:
    return semantics_from(trained.file, "public")


@pytest.fixture(scope="module")
def clusters() -> Semantics:
    made = cluster_semantics(RandomFeatures(1, width=8, depth=2), IMAGES[:500], 12, 3)
    assert (sum(made.sizes), len(made.sizes), min(made.sizes) > 0) == (500, 12, True)
    return semantics_from(made.file, "public")


@pytest.fixture(params=["classifier", "clusters"])
def either(request: pytest.FixtureRequest) -> Semantics:
    found: Semantics = request.getfixturevalue(request.param)
    return found


def test_labels_are_learned_and_the_accuracy_is_that_of_pictures_it_did_not_see(
    trained: TrainedSemantics, classifier: Semantics
) -> None:
    _, judge = split(LABELS, CONFIG, len(IMAGES))
    answers = classifier.probabilities(UNIT[judge]).argmax(axis=1)
    assert trained.accuracy.value == pytest.approx(float((answers == LABELS[judge]).mean()), abs=1 / len(judge))
    assert trained.accuracy.low > 0.6 > 3 * trained.guess
    assert classifier.bins == CONFIG.bins
    assert (classifier.shape, classifier.name, classifier.origin.component) == ((8, 8), "digits", "public")


def test_a_share_of_every_label_is_held_out_and_nothing_is_in_both_parts() -> None:
    learn, judge = split(LABELS, CONFIG, len(IMAGES))
    assert sorted([*learn, *judge]) == list(range(len(IMAGES)))
    for label in range(10):
        held, every = int((LABELS[judge] == label).sum()), int((label == LABELS).sum())
        assert held == round(0.1 * every)
    other = split(LABELS, replace(CONFIG, seed=1), len(IMAGES))[1]
    assert not np.array_equal(judge, other)


def test_a_killed_run_ends_with_the_same_file_and_another_run_is_refused(
    trained: TrainedSemantics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = training._Trainer.step, 0

    def killed(self: Any, generator: torch.Generator) -> dict[str, float]:
        nonlocal steps
        steps += 1
        if steps == 45:
            raise KeyboardInterrupt
        return real(self, generator)

    with monkeypatch.context() as patch:
        patch.setattr(training._Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            train_semantics(IMAGES, LABELS, CONFIG, tmp_path)
    assert train_semantics(IMAGES, LABELS, CONFIG, tmp_path).file == trained.file
    with pytest.raises(OtherRunError):
        train_semantics(IMAGES, (LABELS + 1) % 10, CONFIG, tmp_path)


def test_clusters_say_much_of_what_nobody_told_them(clusters: Semantics) -> None:
    found = clusters.most_probable(IMAGES[500:])
    assert normalized_mutual_info_score(LABELS[500:], found) > 0.35
    assert clusters.bins == tuple(f"cluster-{i}" for i in range(12))


def test_probabilities_of_clusters_are_the_softmax_of_minus_squared_distances(clusters: Semantics) -> None:
    assert isinstance(clusters.net, Nearest)
    book = clusters.net.codebook
    with torch.no_grad():
        seen = clusters.net.features.embed(torch.from_numpy(UNIT[:5])[:, None] * 2 - 1).double().numpy()
    points = (seen - book.mean.double().numpy()) / book.spread.double().numpy()
    apart = ((points[:, None] - book.centres.double().numpy()) ** 2).sum(axis=2) / float(book.width)
    expected = np.exp(-apart) / np.exp(-apart).sum(axis=1, keepdims=True)
    assert np.abs(clusters.probabilities(UNIT[:5]) - expected).max() < 1e-6


def test_clusters_of_learned_features_hold_their_features_and_need_no_second_file() -> None:
    with seeded(1):
        raw = features_bytes("made", Trunk(TrunkArchitecture(16, 1, 8, 2)), {})
    made = cluster_semantics(features_from(raw), IMAGES[:200], 5, 0)
    found = semantics_from(made.file)
    assert isinstance(found.net, Nearest)
    assert found.net.features.origin.sha256 == found.origin.sha256
    assert found.origin.component == "private", "nobody vouches for the file"
    assert np.bincount(found.most_probable(IMAGES[:200]), minlength=5).tolist() == list(made.sizes)
    assert unpack(made.file, "semantics").notes["features"] == features_from(raw).origin.sha256


def test_rows_are_probabilities_and_the_same_every_time(either: Semantics) -> None:
    rows = either.probabilities(UNIT[:40])
    assert rows.shape == (40, len(either.bins))
    assert np.abs(rows.sum(axis=1) - 1).max() < 1e-12
    assert rows.min() >= 0
    assert np.array_equal(rows, either.probabilities(UNIT[:40]))
    assert either.probabilities(UNIT[:0]).shape == (0, len(either.bins))
    assert np.array_equal(either.most_probable(IMAGES[:40]), rows.argmax(axis=1))


def test_a_pictures_answer_does_not_depend_on_its_neighbours_but_by_rounding(either: Semantics) -> None:
    whole = either.probabilities(UNIT[:600])
    for places in (slice(3, 4), slice(0, 7), slice(255, 258)):
        assert np.abs(either.probabilities(UNIT[places]) - whole[places]).max() < 1e-5
    beside = np.concatenate([UNIT[:1], np.ones((30, 8, 8), np.float32), np.zeros((30, 8, 8), np.float32)])
    assert np.abs(either.probabilities(beside)[0] - whole[0]).max() < 1e-5


def test_pictures_of_any_size_and_of_colour_are_made_into_its_own(either: Semantics) -> None:
    large = UNIT[:20].repeat(3, axis=1).repeat(3, axis=2)
    assert np.abs(either.probabilities(large) - either.probabilities(UNIT[:20])).max() < 1e-5
    grey = np.repeat(UNIT[:20, ..., None], 3, axis=3)
    assert np.abs(either.probabilities(grey) - either.probabilities(UNIT[:20])).max() < 1e-4


def test_it_is_frozen(either: Semantics) -> None:
    assert not any(p.requires_grad for p in either.parameters())
    assert not either.train().training


def test_making_it_moves_nobodys_generator(tmp_path: Path) -> None:
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    train_semantics(IMAGES[:100], LABELS[:100], replace(CONFIG, steps=1), tmp_path)
    one, two = (cluster_semantics(RandomFeatures(0, 8, 2), IMAGES[:100], 4, 9).file for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert (numpys == np.random.get_state()[1]).all()
    assert one == two


def test_colour_is_seen() -> None:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 60, (60, 8, 8, 3), dtype=np.uint8)
    images[np.arange(60), ..., np.arange(60) % 3] += 150
    found = semantics_from(cluster_semantics(RandomFeatures(0, 8, 2), images, 3, 0).file)
    assert found.shape == (8, 8, 3)
    assert normalized_mutual_info_score(np.arange(60) % 3, found.most_probable(images)) > 0.6


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.full(100, 10), "the number of a bin"),
        (np.full(100, -1), "the number of a bin"),
        (np.zeros(99, np.int64), "one for each image"),
        (np.zeros(100), "one for each image"),
    ],
)
def test_labels_that_are_no_bins_are_refused(labels: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        train_semantics(IMAGES[:100], labels, CONFIG, tmp_path)


def test_what_is_too_few_is_counted(tmp_path: Path) -> None:
    labels = np.r_[np.arange(9).repeat(11), 9]
    with pytest.raises(TooFewLabelledImagesError, match="1 of 10 labels have fewer"):
        train_semantics(IMAGES[:100], labels, CONFIG, tmp_path)
    same = np.repeat(IMAGES[:3], 5, axis=0)
    with pytest.raises(TooFewLabelledImagesError, match="do not make 4 clusters"):
        cluster_semantics(RandomFeatures(0, 8, 2), same, 4, 0)
    alone = semantics_from(cluster_semantics(RandomFeatures(0, 8, 2), same, 3, 0).file)
    assert len(set(alone.most_probable(IMAGES[:3]).tolist())) == 3
    with pytest.raises(ValueError, match="2 to"):
        cluster_semantics(RandomFeatures(0, 8, 2), IMAGES[:9], 1, 0)


@pytest.mark.parametrize("side", [8, 12, 16, 28, 32, 64, 128, 224])
def test_there_is_a_trunk_for_every_usual_size(side: int) -> None:
    assert 4 <= suited(side, 1).left <= 7


@pytest.mark.parametrize("bins", [("a",), ("a", "a"), ("", "b"), ("a" * 65, "b"), ("a\n", "b"), tuple("ab") * 9000])
def test_names_that_name_nothing_are_refused(bins: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"semantic"):
        replace(CONFIG, bins=bins)


def test_a_thousand_names_fit_into_a_file() -> None:
    bins = tuple(f"a semantic of public pictures {i}" for i in range(1000))
    book = SemanticCodebook(4, 1000)
    raw = semantics_bytes("many", Nearest(RandomFeatures(0, 4, 1), book), bins, (8, 8), {})
    assert unpack(raw, "semantics").config["bins"] == list(bins)


def changed(raw: bytes, **config: Any) -> bytes:
    packed = unpack(raw, "semantics")
    told = {k: v for k, v in {**packed.config, **config}.items() if v is not None}
    return pack("semantics", told, packed.notes, packed.state)


def test_a_file_that_describes_no_query_function_is_refused(trained: TrainedSemantics) -> None:
    book = cluster_semantics(RandomFeatures(0, 8, 2), IMAGES[:50], 4, 0).file
    drawn = dict(unpack(book, "semantics").config["random"])
    trunk = dict(unpack(trained.file, "semantics").config["classifier"])
    of_labels: list[dict[str, Any]] = [
        *({"bins": list("012")}, {"bins": ["a"] * 10}, {"shape": [16, 16]}, {"shape": [8, 8, 3]}, {"extra": 1}),
        *({"name": "No Name"}, {"classifier": None}, {"size": 3}, {"classifier": {**trunk, "side": 16}}),
        *({"classifier": {"side": 8}}, {"random": drawn}),
    ]
    of_clusters: list[dict[str, Any]] = [
        *({"size": 7}, {"size": None}, {"size": -1}, {"shape": [8, 4]}, {"shape": [8]}, {"random": {"seed": 0}}),
        *({"random": {**drawn, "width": w}} for w in (16, 1 << 20, 8.0)),
        *({"random": {**drawn, "depth": -1}}, {"random": {**drawn, "most": 1}}),
        {"random": None, "learned": {"architecture": trunk, "name": "x"}},
    ]
    files = [changed(trained.file, **one) for one in of_labels] + [changed(book, **one) for one in of_clusters]
    for bad in (*files, b"", trained.file[:-1]):
        with pytest.raises(WeightsError):
            semantics_from(bad)
    packed = unpack(book, "semantics")
    for name, value in (("width", 0.0), ("spread", 0.0), ("width", -1.0)):
        state = {**packed.state, f"codebook.{name}": torch.full_like(packed.state[f"codebook.{name}"], value)}
        with pytest.raises(WeightsError):
            semantics_from(pack("semantics", packed.config, packed.notes, state))


def test_the_same_form_is_written_that_is_read(either: Semantics) -> None:
    raw = semantics_bytes(either.name, either.net, either.bins, either.shape, {})
    again = semantics_from(raw)
    assert np.array_equal(again.probabilities(UNIT[:9]), either.probabilities(UNIT[:9]))
    with seeded(0), pytest.raises(ValueError, match="squares"):
        Semantics("x", Classifier(suited(8, 1), 2), ("a", "b"), (8, 4), Origin("public", "0" * 64))
