"""The GAN: what DP-SGD trains of it, what follows, and what may never reach the generator."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from agent.dp.clipping import PrivacyUnit, UnsuitableModelError, bookkeeping_engine, loop_engine, vmap_engine
from agent.dp.dpsgd import PrivateSgd, train_privately
from agent.errors import OtherRunError
from agent.models.training_loop import FileCheckpointStore, seeded
from agent.models.weights import WeightsError
from deploy.reproduction.conditional_gan.model import Adversarial, AdversarialConfig, Fine
from deploy.reproduction.conditional_gan.network import (
    PRESETS,
    AdversarialArchitecture,
    AdversarialDiscriminator,
    AdversarialGenerator,
)
from deploy.reproduction.conditional_gan.training import Descent, Pretraining, row_losses
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.killed_training import KilledError
from tests.support.memory_place import MemoryPlace

LEAVES = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.Embedding)
SMALL = AdversarialArchitecture(8, 1, 2, (16, 16), (8, 16), latent=8)
CONFIG = AdversarialConfig(
    SMALL,
    seed=3,
    pretraining=Pretraining(Descent(16, 2e-3, 0.9), batch=16, learning_rate=2e-3, update_ratio=2, r1=0.1, r1_every=2),
    fine=Fine(Descent(8, 1e-3), update_ratio=2, fakes=2, pool=4),
    checkpoint_every=3,
)
JOB = PrivateSgd(sampling_rate=0.5, noise_multiplier=1.0, steps=6, clip=0.5, images_per_patient=3, expected_batch=4.0)


def pictures(count, seed=0):
    """Two classes: a bright half at the left, or at the top."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    images = rng.integers(0, 40, (count, 8, 8))
    images[labels == 0, :, :4] += 200
    images[labels == 1, :4] += 200
    return images.astype(np.uint8), labels.astype(np.int64)


def patients(counts=(1, 3, 2, 1, 2, 1), seed=1):
    images, labels = pictures(sum(counts), seed)
    parts = zip(torch.from_numpy(images).split(counts), torch.from_numpy(labels).split(counts), strict=True)
    return [PrivacyUnit((own, classes)) for own, classes in parts]


def rows_of(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    real, fake = torch.randn(2, count, 1, 8, 8, generator=draw)
    labels = torch.randint(-1, 2, (count,), generator=draw)
    return real, labels, fake, labels


def discriminator(norm="group"):
    with seeded(1):
        return AdversarialDiscriminator(replace(SMALL, norm=norm))


def tensors_of(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- the networks


@pytest.mark.parametrize("name", ["tiny8", "tiny16", "small32", "small64"])
def test_a_preset_draws_its_pictures_and_judges_them_with_one_number_each(name):
    own = PRESETS[name]
    generator, judge = AdversarialGenerator(own), AdversarialDiscriminator(own)
    drawn = generator(torch.randn(3, own.latent), torch.tensor([0, own.classes - 1, -1]))
    assert drawn.shape == (3, own.channels, own.side, own.side)
    assert drawn.abs().max() <= 1.0
    assert judge(drawn, torch.tensor([0, -1, -1])).shape == (3,)


@pytest.mark.parametrize(("name", "sizes"), [("paper32", (9.42e6, 2.37e6)), ("paper64", (11.3e6, 19.6e6))])
def test_the_papers_presets_have_about_the_sizes_of_its_table_6(name, sizes):
    networks = AdversarialGenerator(PRESETS[name]), AdversarialDiscriminator(PRESETS[name])
    for network, size in zip(networks, sizes, strict=True):
        assert sum(p.numel() for p in network.parameters()) == pytest.approx(size, rel=0.03)


@pytest.mark.parametrize("norm", ["group", "none"])
def test_weights_lie_in_plain_layers_only_and_nothing_is_a_buffer(norm):
    own = replace(SMALL, norm=norm)
    for network in (AdversarialGenerator(own), AdversarialDiscriminator(own)):
        assert not list(network.buffers())
        holders = [m for m in network.modules() if next(m.parameters(recurse=False), None) is not None]
        assert all(type(module) in LEAVES for module in holders)


@pytest.mark.parametrize(
    "wrong",
    [{"side": 12}, {"channels": 2}, {"norm": "batch"}, {"generator": (16,)}, {"discriminator": (8, 12)},
     {"classes": 0}, {"latent": 0}, {"side": 16}, {"latent": 8.0}],
)  # fmt: skip
def test_what_is_no_network_is_refused(wrong):
    with pytest.raises(ValueError, match=r"whole|px|widths|classes"):
        replace(SMALL, **wrong)


# ---- the losses of a row


@pytest.mark.parametrize("norm", ["group", "none"])
def test_a_rows_loss_is_one_number_that_no_other_row_moves(norm):
    judge, rows = discriminator(norm), rows_of(5)
    losses = row_losses(judge, rows)
    assert losses.shape == (5,)
    alone = torch.cat([row_losses(judge, tuple(row[i : i + 1] for row in rows)) for i in range(5)])
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)


def test_a_rows_loss_is_equation_3():
    judge, (real, labels, fake, _) = discriminator(), rows_of(4)
    likely = torch.sigmoid(judge(real, labels)), torch.sigmoid(judge(fake, labels))
    expected = -(likely[0].log() + (1 - likely[1]).log())
    torch.testing.assert_close(row_losses(judge, (real, labels, fake, labels)), expected)


def test_the_engines_agree_on_the_discriminator():
    judge = discriminator()
    units = [PrivacyUnit(rows_of(count, seed)) for seed, count in enumerate((2, 2, 1, 3, 2))]
    expected = loop_engine(judge, row_losses, units, 0.3)
    for engine in (vmap_engine(2), bookkeeping_engine(3)):
        torch.testing.assert_close(engine(judge, row_losses, units, 0.3), expected, rtol=1e-5, atol=1e-6)


def test_a_loss_of_n_by_1_is_refused_by_every_engine():
    def trap(model, rows):
        return row_losses(model, rows)[:, None]

    for engine in (loop_engine, vmap_engine(2), bookkeeping_engine(2)):
        with pytest.raises(UnsuitableModelError):
            engine(discriminator(), trap, [PrivacyUnit(rows_of(2)), PrivacyUnit(rows_of(2, 1))], 1.0)


# ---- the privacy of the step


def _sum(units, clip, entropy_of):
    """The clipped sum of units that are expanded, each with the entropy that ``entropy_of`` gives its number."""
    model = Adversarial(CONFIG)
    task = model.task()
    expanded = []
    for number, unit in units:
        model._entropy = entropy_of(number)
        expanded.append(task.expand(unit))
    return loop_engine(task.model, task.loss, expanded, clip)


def test_no_patient_added_or_removed_moves_the_sum_by_more_than_the_clip():
    clip, cohort = 0.01, list(enumerate(patients()))
    norms = [torch.linalg.vector_norm(_sum([one], 1e9, UnsafeSeededEntropy)).item() for one in cohort]
    assert min(norms) > clip  # every unit is cut, or the bound would hold by itself
    whole = _sum(cohort, clip, UnsafeSeededEntropy)
    for left in range(len(cohort)):
        others = [one for number, one in enumerate(cohort) if number != left]
        moved = torch.linalg.vector_norm(whole - _sum(others, clip, UnsafeSeededEntropy)).item()
        assert moved <= clip * (1 + 1e-5)


def test_one_shared_stream_for_all_patients_breaks_that_bound():
    # the negative control: who stands after the added patient is compared with other made pictures
    clip, cohort = 0.01, list(enumerate(patients((1,) * 24)))

    def shared(units):
        stream = UnsafeSeededEntropy(0)
        return _sum(units, clip, lambda _: stream)

    assert torch.linalg.vector_norm(shared(cohort) - shared(cohort[1:])).item() > clip * (1 + 1e-5)


def test_a_patient_meets_made_pictures_of_its_own_class_and_its_rows_are_its_own():
    model = Adversarial(CONFIG, UnsafeSeededEntropy(0))
    task = model.task()
    unit = patients()[1]
    real, label, fake, fake_label = task.expand(unit).rows
    assert len(real) == len(fake) == 3 * CONFIG.fine.fakes
    assert torch.equal(label, fake_label)
    assert torch.equal(label, unit.rows[1].repeat_interleave(CONFIG.fine.fakes))
    torch.testing.assert_close(real[::2], unit.rows[0][:, None].float() / 127.5 - 1.0)
    for picture, own in zip(fake, label, strict=True):
        assert any(torch.equal(picture, made) for made in task.follower.pool[own])


def test_only_the_discriminator_is_trained_by_dp_sgd():
    model = Adversarial(CONFIG)
    task = model.task()
    assert isinstance(task.model, AdversarialDiscriminator)
    trained = {id(p) for p in task.model.parameters()}
    assert not trained & {id(p) for p in task.follower._side.generator.parameters()}
    assert task is not model.task()
    assert model.task().model is task.model
    assert model.task().follower is task.follower


def noise_only(seed):
    """An engine that gives the same sums whatever the patients are, and looks at each as the real ones do."""
    draw = torch.Generator().manual_seed(seed)

    def clipped_sum(model, loss, units, clip):
        for unit in units:
            loss(model, unit.rows)
        return torch.randn(sum(p.numel() for p in model.parameters()), generator=draw, dtype=torch.float64) * clip

    return clipped_sum


class FixedNoise:
    """Entropy whose bytes for noise are the same however many units were drawn or expanded before."""

    def __init__(self, size):
        self._size = size
        self._noise, self._rest = UnsafeSeededEntropy(1), UnsafeSeededEntropy(2)

    def take(self, count):
        return (self._noise if count >= self._size else self._rest).take(count)


def test_the_generator_is_a_function_of_the_noisy_gradients_and_of_no_patient():
    def trained(units, engine_seed=0):
        model = Adversarial(CONFIG, UnsafeSeededEntropy(5))
        task = model.task()
        size = sum(p.numel() for p in task.model.parameters())
        train_privately(task, units, JOB, FixedNoise(4 * size), noise_only(engine_seed))
        return tensors_of(task.follower.state()), tensors_of(model.state())

    one, other = trained(patients()), trained(patients((3,) * 9, seed=8))
    nobody = trained([])
    assert equal(one[0], other[0])
    assert equal(one[0], nobody[0])
    assert equal(one[1], nobody[1])
    assert not equal(one[0], trained(patients(), engine_seed=1)[0])  # but it does follow the discriminator
    begun = tensors_of(Adversarial(CONFIG).task().follower.state())
    assert not equal({k: v for k, v in one[0].items() if k.startswith("generator.")},
                     {k: v for k, v in begun.items() if k.startswith("generator.")})  # fmt: skip


def test_the_generators_own_stream_does_not_move_with_the_batch():
    def position(units):
        model = Adversarial(CONFIG, UnsafeSeededEntropy(0))
        task = model.task()
        train_privately(task, units, JOB, UnsafeSeededEntropy(7))
        return task.follower.state()["draw"]

    assert torch.equal(position([]), position(patients((2,) * 12)))


def test_a_label_of_no_class_is_refused():
    task = Adversarial(CONFIG).task()
    for label in (-1, 2):
        with pytest.raises(ValueError, match="labels are 0 to 1"):
            task.expand(PrivacyUnit((torch.zeros(1, 8, 8, dtype=torch.uint8), torch.tensor([label]))))


# ---- interruption


def test_a_pretraining_that_was_interrupted_ends_with_the_same_bytes(tmp_path):
    images, labels = pictures(60)

    def state(model):
        return tensors_of(model.state())

    whole, half, resumed = (Adversarial(CONFIG) for _ in range(3))
    place = FileCheckpointStore(tmp_path / "half")
    before = torch.get_rng_state()
    whole.pretrain(images, labels, 7, FileCheckpointStore(tmp_path / "whole"))
    half.pretrain(images, labels, 4, place)
    resumed.pretrain(images, labels, 7, place)
    assert equal(state(whole), state(resumed))
    assert not equal(state(whole), state(half))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(OtherRunError):
        Adversarial(CONFIG).pretrain(images[1:], labels[1:], 7, place)


def test_a_private_job_that_was_killed_goes_on_with_generator_average_pool_and_stream(monkeypatch):
    monkeypatch.setattr("agent.dp.dpsgd.CHECKPOINT_EVERY", 3)

    def job(place, kill=None):
        model = Adversarial(CONFIG, UnsafeSeededEntropy(5))
        task = model.task()
        first = 4 if place.data is not None else 1
        done = iter(range(first, JOB.steps + 1))

        def engine(network, loss, units, clip):
            step = next(done)
            if step == kill:
                raise KilledError
            list(units)
            draw = torch.Generator().manual_seed(step)
            return torch.randn(sum(p.numel() for p in network.parameters()), generator=draw, dtype=torch.float64)

        quiet = replace(JOB, noise_multiplier=1e-9)
        train_privately(task, patients(), quiet, UnsafeSeededEntropy(9), engine, place=place, run="r")
        return task.follower.state() | model.state()

    whole, place = job(MemoryPlace()), MemoryPlace()
    with pytest.raises(KilledError):
        job(place, kill=5)
    resumed = job(place)
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name].float(), tensor.float(), rtol=1e-3, atol=1e-5, msg=name)
    assert torch.equal(whole["draw"], resumed["draw"])
    assert whole["g_count"] == resumed["g_count"] == JOB.steps // CONFIG.fine.update_ratio


def test_a_state_of_another_follower_is_refused():
    state = Adversarial(CONFIG).task().follower.state()
    other = Adversarial(replace(CONFIG, fine=replace(CONFIG.fine, pool=5))).task().follower
    with pytest.raises(RuntimeError):
        other.restore(state)


# ---- the whole model


def right_half(images):
    """For each picture, whether it is of class 0: brighter at the left than at the top right."""
    left, top = images[:, 4:, :4].mean(axis=(1, 2)), images[:, :4, 4:].mean(axis=(1, 2))
    return (left < top).astype(np.int64)


def test_a_model_trained_on_public_pictures_draws_the_class_it_is_asked_for(tmp_path):
    images, labels = pictures(200)
    model = Adversarial(CONFIG)
    model.pretrain(images, labels, 160, FileCheckpointStore(tmp_path / "c"))
    asked = np.repeat(np.array([0, 1]), 50)
    drawn = model.sample(asked, torch.Generator().manual_seed(0))
    assert drawn.shape == (100, 8, 8)
    assert drawn.dtype == np.uint8
    assert (right_half(drawn) == asked).mean() > 0.95
    assert np.array_equal(drawn, model.sample(asked, torch.Generator().manual_seed(0)))
    assert not np.array_equal(drawn, model.sample(asked, torch.Generator().manual_seed(1)))


def test_without_pretraining_it_is_dpgan_and_with_none_noise_it_learns_the_patients():
    # no privacy here: the noise is all but off, to see that the private way trains at all
    config = replace(CONFIG, fine=Fine(Descent(32, 4e-3), learning_rate=4e-3, update_ratio=1, pool=16))
    model = Adversarial(config, UnsafeSeededEntropy(0))
    images, labels = pictures(64)
    units = [
        PrivacyUnit((torch.from_numpy(images[i : i + 1]), torch.from_numpy(labels[i : i + 1]))) for i in range(64)
    ]
    job = PrivateSgd(0.5, 1e-6, 120, 10.0, 1, 32.0)
    train_privately(model.task(), units, job, UnsafeSeededEntropy(1), bookkeeping_engine(64))
    asked = np.repeat(np.array([0, 1]), 50)
    assert (right_half(model.sample(asked, torch.Generator().manual_seed(0))) == asked).mean() > 0.9


def test_a_class_that_the_public_pictures_lack_begins_as_the_null_class(tmp_path):
    images, labels = pictures(40)
    model = Adversarial(CONFIG)
    model.pretrain(images, np.where(labels == 0, 0, -1), 2, FileCheckpointStore(tmp_path / "c"))
    draw = partial(model.sample, generator=torch.Generator())
    asked = [np.full(3, label) for label in (-1, 0, 1)]
    none, first, second = (model.sample(one, torch.Generator().manual_seed(0)) for one in asked)
    assert np.array_equal(none, second)
    assert not np.array_equal(none, first)
    assert draw(np.zeros(0, np.int64)).shape == (0, 8, 8)


def test_a_state_is_taken_by_the_same_configuration_and_refused_by_another(tmp_path):
    model = Adversarial(CONFIG)
    model.pretrain(*pictures(40), 2, FileCheckpointStore(tmp_path / "c"))
    again = Adversarial(CONFIG)
    again.restore(model.state())
    asked = np.array([0, 1, 1])
    drawn = (m.sample(asked, torch.Generator().manual_seed(0)) for m in (model, again))
    assert np.array_equal(*drawn)
    with pytest.raises(WeightsError):
        Adversarial(replace(CONFIG, architecture=replace(SMALL, generator=(24, 16)))).restore(model.state())
    with pytest.raises(WeightsError):
        again.restore(model.state() | {"more": torch.zeros(1)})


def test_the_fingerprint_is_of_everything_but_where_it_runs():
    elsewhere = replace(CONFIG, device="meta", checkpoint_every=9)
    assert Adversarial(elsewhere).fingerprint == Adversarial(CONFIG).fingerprint
    for other in (
        replace(CONFIG, seed=4),
        replace(CONFIG, fine=replace(CONFIG.fine, update_ratio=3)),
        replace(CONFIG, architecture=replace(SMALL, norm="none")),
    ):
        assert Adversarial(other).fingerprint != Adversarial(CONFIG).fingerprint


def test_after_the_fine_tuning_has_begun_nothing_is_pretrained_or_restored(tmp_path):
    model = Adversarial(CONFIG)
    state = model.state()
    model.task()
    with pytest.raises(ValueError, match="has begun"):
        model.pretrain(*pictures(40), 1, FileCheckpointStore(tmp_path / "c"))
    with pytest.raises(ValueError, match="has begun"):
        model.restore(state)


@pytest.mark.parametrize(
    ("change", "told"),
    [(lambda i, y: (i[:, :4], y), "shape"), (lambda i, y: (i, y[1:]), "one label"),
     (lambda i, y: (i, y.astype(np.int32)), "int64"), (lambda i, y: (i, y + 1), "labels are"),
     (lambda i, y: (i * 0, y), "do not differ")],
)  # fmt: skip
def test_pictures_that_cannot_be_learned_are_refused(change, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        Adversarial(CONFIG).pretrain(*change(*pictures(20)), 1, FileCheckpointStore(tmp_path / "c"))


@pytest.mark.parametrize(
    "wrong",
    [partial(Descent, 0, 1e-3), partial(Descent, 8, 2.0), partial(Descent, 8, 1e-3, 1.0), partial(Fine, pool=0),
     partial(Fine, fakes=0), partial(Fine, learning_rate=0.0), partial(Pretraining, r1=-1.0),
     partial(Pretraining, update_ratio=0), partial(AdversarialConfig, SMALL, seed=-1)],
)  # fmt: skip
def test_settings_that_train_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=r"batch|rate|lies|whole|seed"):
        wrong()
