"""Training of an encoder: on the generator's own pairs, then on pictures; killed and resumed."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image as Picture

from agent.errors import OtherRunError
from agent.models.features.extractors import RandomFeatures
from agent.models.image_tensors import to_unit
from agent.models.stylegan.network import PRESETS as GENERATORS
from agent.models.stylegan.network import Generator, StyleGanShape
from agent.models.stylegan.restyle import (
    Encoder,
    EncoderArchitecture,
    encoder_from,
    fingerprint,
    invert_recorded,
    scatter,
)
from agent.models.stylegan.restyle_training import (
    InversionConfig,
    InversionTrainer,
    Losses,
    draw_codes,
    train_encoder,
)
from agent.models.training_loop import seeded

SMALL = StyleGanShape(16, 1, 16, 16, 2, 256, 16)
SMALL_ENCODER = EncoderArchitecture(16, 1, SMALL.num_ws, 16, 16, (16, 24, 32), (1, 1, 1), 32)
QUICK = InversionConfig(
    pair_steps=3,
    image_steps=3,
    batch=4,
    passes=2,
    rate=1e-3,
    checkpoint_every=3,
    architecture=SMALL_ENCODER,
    flip=True,
)


def _generator(architecture, seed=0):
    with seeded(seed):
        generator = Generator(architecture)
        with torch.no_grad():
            w = generator.mapping(torch.randn(512, architecture.z_dim))[:, 0]
            generator.mapping.w_avg.copy_(w.mean(dim=0))
            for r in architecture.resolutions:  # random weights draw far beyond [-1, 1]
                getattr(generator.synthesis, f"b{r}").torgb.weight.mul_(0.25)
    return generator


def _pairs(generator, n, seed=99):
    with torch.no_grad():
        z = torch.randn(n, generator.architecture.z_dim, generator=torch.Generator().manual_seed(seed))
        ws = generator.mapping(z)
        return ws, generator.synthesis(ws, noise="const")


def _images(generator, n):
    return to_unit(_pairs(generator, n)[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    generator = _generator(GENERATORS["tiny32"].with_channels(1))
    a = generator.architecture
    small = EncoderArchitecture(32, 1, a.num_ws, a.w_dim, 32, (32, 48, 64), (1, 1, 1), 128, stem=2)
    config = InversionConfig(pair_steps=40, image_steps=0, batch=8, passes=2, rate=2e-3, architecture=small)
    folder = tmp_path_factory.mktemp("run")
    encoder, packed = encoder_from(train_encoder(generator, None, config, folder).read_bytes())
    _, images = _pairs(generator, 64)
    _, seen = invert_recorded(encoder, generator, images, 3)
    return generator, encoder, packed, folder, [float((picture - images).square().mean()) for picture in seen]


def test_an_encoder_trained_on_pairs_alone_beats_the_average_latent_on_pairs_it_never_saw(trained):
    errors = trained[4]
    assert errors[2] < 0.25 * errors[0]


def test_it_finds_the_codes_themselves_and_not_only_pictures_like_them(tmp_path):
    generator = _generator(SMALL)
    config = dataclasses.replace(QUICK, pair_steps=60, image_steps=0, batch=16, rate=3e-3, checkpoint_every=60)
    encoder, _ = encoder_from(train_encoder(generator, None, config, tmp_path).read_bytes())
    ws, images = _pairs(generator, 128)
    codes, _ = invert_recorded(encoder, generator, images, 2)
    assert float((codes - ws).square().mean()) < 0.75 * float((generator.w_avg - ws).square().mean())


def test_more_passes_reduce_the_error(trained):
    errors = trained[4]
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.9 * errors[1]
    assert errors[3] < errors[2]


def test_a_run_leaves_a_grid_of_sources_above_reconstructions(trained):
    (path,) = sorted((trained[3] / "pictures").iterdir())
    assert (path.name, Picture.open(path).size) == ("0000040.png", (8 * 32, 2 * 32))


def test_the_file_says_what_it_is_a_function_of(trained):
    generator, encoder, packed, *_ = trained
    assert packed.notes["generator"] == fingerprint(generator)
    assert packed.notes["images"] == ""  # of nobody's picture
    assert packed.notes["config"]["pair_steps"] == 40
    assert encoder.architecture.passes == 2


class _Killed(Exception):
    pass


def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(tmp_path):
    generator, features = _generator(SMALL), RandomFeatures(0, 8, 2, 1)
    images = _images(generator, 6)
    # five steps a stage: killed once in the first stage, once in the second, each time past a checkpoint
    config = dataclasses.replace(QUICK, pair_steps=5, image_steps=5, say_every=1)
    whole = train_encoder(generator, images, config, tmp_path / "whole", features=features).read_bytes()

    for last in (4, 8):

        def say(progress, last=last):
            if progress.step == last:
                raise _Killed

        with pytest.raises(_Killed):
            train_encoder(generator, images, config, tmp_path / "killed", say, features)
    steps = []
    again = train_encoder(
        generator, images, config, tmp_path / "killed", lambda progress: steps.append(progress.step), features
    )
    assert steps[0] == 7  # it did go on, and did not begin anew
    assert again.read_bytes() == whole


def test_another_seed_or_another_generator_is_another_run(tmp_path):
    generator = _generator(SMALL)
    config = dataclasses.replace(QUICK, image_steps=0)
    first = train_encoder(generator, None, config, tmp_path).read_bytes()
    with pytest.raises(OtherRunError):
        train_encoder(_generator(SMALL, seed=1), None, config, tmp_path)
    with pytest.raises(OtherRunError):
        train_encoder(generator, None, dataclasses.replace(config, seed=1), tmp_path)
    assert (tmp_path / "encoder.safetensors").read_bytes() == first


def test_training_moves_no_global_generator_and_leaves_the_callers_network_as_it_is(tmp_path):
    generator = _generator(SMALL).train()
    before = fingerprint(generator), torch.get_rng_state(), np.random.get_state()[1].copy()
    train_encoder(generator, _images(generator, 4), QUICK, tmp_path)
    assert fingerprint(generator) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])
    assert generator.training
    assert all(p.requires_grad and p.grad is None for p in generator.parameters())


def test_the_second_stage_learns_the_pictures_with_pixels_and_features():
    generator = _generator(SMALL)
    images = _images(generator, 8)
    config = InversionConfig(
        pair_steps=0,
        image_steps=60,
        batch=8,
        passes=2,
        rate=3e-3,
        architecture=SMALL_ENCODER,
        losses=Losses(norm=0.01),
    )
    with seeded(0):
        trainer = InversionTrainer(Encoder(SMALL_ENCODER), generator, config, images, RandomFeatures(0, 8, 2, 1))
    rng = torch.Generator().manual_seed(0)
    told = [trainer.step(rng) for _ in range(40)]
    assert told[0].keys() == {"pixel", "maps", "embed", "norm"}
    for name in ("pixel", "maps", "embed"):
        first, last = (np.mean([losses[name] for losses in part]) for part in (told[:5], told[-5:]))
        assert last < 0.7 * first, name


def _gradient(trainer):
    return torch.cat([p.grad.flatten() for p in trainer.encoder.parameters()])


def _cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def test_the_gradient_is_the_sum_over_passes_each_for_itself_and_not_that_through_all_of_them():
    generator = _generator(SMALL)
    config = dataclasses.replace(QUICK, pair_steps=1, image_steps=0, passes=3, losses=Losses(code=0.0))
    with seeded(0):
        encoder = Encoder(SMALL_ENCODER)
        torch.nn.init.normal_(encoder.layers.weight, std=0.05)
    trainer = InversionTrainer(encoder, generator, config)
    with torch.no_grad():  # the batch that the trainer will draw
        drawn = draw_codes(generator, config, encoder.spread.item(), torch.Generator().manual_seed(3))
        x = generator.synthesis(drawn)
    oracle = {}
    for through in (False, True):
        losses, w = [], generator.w_avg.repeat(4, SMALL.num_ws, 1)
        y = generator.synthesis(w)
        for _ in range(3):
            w = w + encoder(x, y) if through else w.detach() + encoder(x, y.detach())
            y = generator.synthesis(w)
            losses.append((y - x).square().mean())
        grads = torch.autograd.grad(sum(losses), list(encoder.parameters()))
        oracle[through] = torch.cat([g.flatten() for g in grads])
    trainer.step(torch.Generator().manual_seed(3))
    assert _cosine(_gradient(trainer), oracle[False]) > 0.9999
    assert _cosine(_gradient(trainer), oracle[True]) < 0.999


def test_pairs_are_draws_mixed_by_layer():
    generator = _generator(SMALL)
    plain = dataclasses.replace(QUICK, batch=64, mixing=1, perturbation=0.0)
    codes = draw_codes(generator, plain, 1.0, torch.Generator().manual_seed(0))
    assert torch.equal(codes, codes[:, :1].expand_as(codes))  # one draw: one w for all layers
    mixed = draw_codes(generator, dataclasses.replace(plain, mixing=3), 1.0, torch.Generator().manual_seed(0))
    kinds = torch.tensor([len(torch.unique(code, dim=0)) for code in mixed])
    assert set(kinds.tolist()) == {1, 2, 3}
    away = draw_codes(generator, dataclasses.replace(plain, perturbation=0.5), 2.0, torch.Generator().manual_seed(0))
    sizes = (away - codes).square().mean(dim=(1, 2)).sqrt()
    assert 0.0 < float(sizes.min()) < 0.3
    assert 0.7 < float(sizes.max()) < 1.2  # 0.5 * 2.0 at most, in standard deviation


def test_the_unit_of_codes_is_their_distance_from_the_average():
    generator = _generator(SMALL)
    with torch.no_grad():
        ws = generator.mapping(torch.randn(8000, 16, generator=torch.Generator().manual_seed(4)))
    expected = float(ws[:, 0].var(dim=0, unbiased=False).mean().sqrt())
    assert float(scatter(generator, 0)) == pytest.approx(expected, rel=0.05)


def test_a_generator_without_scatter_is_refused():
    generator = _generator(SMALL)
    with torch.no_grad():
        generator.mapping.fc1.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="train it first"):
        scatter(generator, 0)


def test_bf16_trains_float32_weights(tmp_path):
    config = dataclasses.replace(QUICK, image_steps=0, bf16=True)
    encoder, _ = encoder_from(train_encoder(_generator(SMALL), None, config, tmp_path).read_bytes())
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    assert float(encoder.layers.weight.detach().abs().max()) > 0


@pytest.mark.parametrize(
    "images",
    [None, np.zeros((0, 16, 16), np.float32), np.zeros((3, 32, 32), np.float32), np.zeros((3, 16, 16, 3), "f4")],
)
def test_a_second_stage_without_fitting_pictures_is_refused(images, tmp_path):
    with pytest.raises(ValueError, match="images"):
        train_encoder(_generator(SMALL), images, QUICK, tmp_path)
    assert not (tmp_path / "encoder.safetensors").exists()


def test_pictures_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(ValueError, match="finite"):
        train_encoder(_generator(SMALL), np.full((3, 16, 16), np.nan, np.float32), QUICK, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"pair_steps": 0, "image_steps": 0},
        {"pair_steps": -1},
        {"passes": 0},
        {"batch": 0},
        {"rate": float("nan")},
        {"decay": 2.0},
        {"perturbation": -1.0},
    ],
)
def test_runs_that_cannot_be_run_are_refused(change):
    with pytest.raises(ValueError):  # noqa: PT011 - each has a sentence of its own
        dataclasses.replace(QUICK, **change)


@pytest.mark.parametrize("change", [{"pixel": 0.0}, {"maps": -1.0}, {"code": float("nan")}, {"norm": float("inf")}])
def test_weights_of_losses_that_are_none_are_refused(change):
    with pytest.raises(ValueError, match="loss"):
        Losses(**change)
