"""The encoder, its refinement passes, and the polish of a code."""

import dataclasses

import pytest
import torch

from agent.models.stylegan.network import PRESETS, Generator, StyleGanShape
from agent.models.stylegan.restyle import (
    Encoder,
    EncoderArchitecture,
    Polish,
    architecture_for,
    average_code,
    average_image,
    encoder_bytes,
    encoder_from,
    fingerprint,
    invert_images,
    invert_recorded,
    polish,
)
from agent.models.training_loop import seeded
from agent.models.weights import WeightsError, pack, unpack

GREY = StyleGanShape(16, 1, 16, 16, 2, 256, 16)
COLOUR = GREY.with_channels(3)


def _generator(architecture, seed=0):
    with seeded(seed):
        generator = Generator(architecture)
        with torch.no_grad():
            w = generator.mapping(torch.randn(256, architecture.z_dim))[:, 0]
            generator.mapping.w_avg.copy_(w.mean(dim=0))
            for r in architecture.resolutions:  # random weights draw far beyond [-1, 1]
                getattr(generator.synthesis, f"b{r}").torgb.weight.mul_(0.25)
    return generator.eval()


def _encoder(generator, seed=0):
    """With a last layer that is not zero: an encoder that answers something, as a trained one does."""
    with seeded(seed):
        encoder = Encoder(architecture_for(generator.architecture))
        torch.nn.init.normal_(encoder.layers.weight, std=0.05)
    return encoder.eval()


def _pictures(generator, n, seed=5):
    z = torch.randn(n, generator.architecture.z_dim, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return generator(z)


@pytest.mark.parametrize("resolution", [8, 16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_generator_has_an_encoder_of_its_shape(resolution, channels):
    generator = StyleGanShape(resolution, channels)
    with torch.device("meta"):
        encoder = Encoder(architecture_for(generator))
        pictures = torch.zeros(2, channels, resolution, resolution)
        assert encoder(pictures, pictures).shape == (2, generator.num_ws, 512)


def test_the_largest_trunk_has_the_convolutions_of_resnet_34_and_a_fifth_of_the_published_encoder():
    with torch.device("meta"):
        encoder = Encoder(architecture_for(PRESETS["auto512"]))
    convolutions = sum(m.weight.numel() for m in encoder.trunk.modules() if isinstance(m, torch.nn.Conv2d))
    # ResNet-34 has 21 797 672 parameters: less its classifier, its first convolution and its batch norms
    assert convolutions == 21_797_672 - 513_000 - 9_408 - 17_024
    assert encoder.architecture.last == 16
    assert sum(p.numel() for p in encoder.parameters()) < 172e6 / 4  # of which 151e6 are separate heads


@pytest.mark.parametrize("architecture", [GREY, COLOUR, PRESETS["tiny32"]])
def test_an_untrained_encoder_answers_the_average_latent(architecture):
    generator = _generator(architecture)
    with seeded(1):
        encoder = Encoder(architecture_for(architecture))
    ws = invert_images(encoder, generator, _pictures(generator, 2), 3)
    assert torch.equal(ws, average_code(generator, 2))


@pytest.mark.parametrize("architecture", [GREY, COLOUR])
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_inversion_is_the_formula_of_the_paper_written_out(architecture, passes):
    generator, x = _generator(architecture), _pictures(_generator(architecture), 3)
    encoder = _encoder(generator)
    with torch.no_grad():
        w = generator.w_avg.repeat(3, architecture.num_ws, 1)
        y = generator.synthesis(w, noise="const")
        for _ in range(passes):
            w = w + encoder(x, y)
            y = generator.synthesis(w, noise="const")
    ws, seen = invert_recorded(encoder, generator, x, passes)
    assert torch.allclose(ws, w, atol=1e-5)
    assert torch.equal(ws, invert_images(encoder, generator, x, passes))
    assert len(seen) == passes + 1
    assert torch.allclose(seen[0][:1], average_image(generator), atol=1e-6)
    assert torch.allclose(seen[-1], y, atol=1e-5)
    assert not ws.requires_grad


def test_the_last_reconstruction_is_not_drawn_when_only_codes_are_wanted():
    generator = _generator(GREY)
    sizes = []
    generator.synthesis.register_forward_hook(lambda _, entering, __: sizes.append(len(entering[0])))
    invert_images(_encoder(generator), generator, torch.zeros(4, 1, 16, 16), 5)
    assert sizes == [1, 4, 4, 4, 4]  # the average once, for all


def test_a_code_does_not_depend_on_the_other_pictures_of_its_batch():
    generator = _generator(GREY)
    encoder, x = _encoder(generator), _pictures(generator, 6)
    together = invert_images(encoder, generator, x, 4)
    others = torch.cat([x[2:3], torch.full((3, 1, 16, 16), 0.9)])
    assert torch.allclose(invert_images(encoder, generator, others, 4)[0], together[2], atol=1e-5)
    assert not torch.allclose(together[2], together[3], atol=1e-2)


def test_brightness_reaches_the_code_though_groups_are_normalised():
    generator = _generator(GREY)
    flat = torch.tensor([-0.8, 0.0, 0.8]).reshape(3, 1, 1, 1).expand(3, 1, 16, 16)
    ws = invert_images(_encoder(generator), generator, flat, 1)
    assert (ws[0] - ws[2]).abs().max() > 0.01


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 1, 32, 32), (2, 1, 16, 8), (1, 16, 16)])
def test_pictures_of_another_shape_are_refused(shape):
    generator = _generator(GREY)
    with pytest.raises(ValueError, match="shape"):
        invert_images(_encoder(generator), generator, torch.zeros(shape), 2)


def test_no_pass_and_another_generators_shape_are_refused():
    generator = _generator(GREY)
    with pytest.raises(ValueError, match="pass"):
        invert_images(_encoder(generator), generator, torch.zeros(1, 1, 16, 16), 0)
    with pytest.raises(ValueError, match="differ"):
        invert_images(_encoder(_generator(COLOUR)), generator, torch.zeros(1, 1, 16, 16), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"side": 24},
        {"side": 64},
        {"channels": 2},
        {"stem": 3},
        {"widths": (32, 64, 96)},
        {"widths": (30, 64, 96, 128)},
        {"blocks": (0, 1, 1, 1)},
        {"blocks": (1, 1, 1, 65)},
        {"head": 0},
        {"head": 1.5},
        {"side": 16},
    ],
)
def test_sizes_of_no_encoder_are_refused(change):
    whole = dataclasses.asdict(architecture_for(PRESETS["tiny32"]))
    with pytest.raises(ValueError):  # noqa: PT011 - each has a sentence of its own
        EncoderArchitecture(**(whole | change))


def test_an_encoder_comes_back_from_its_file_and_nobodys_generator_moves():
    generator = _generator(COLOUR)
    encoder = _encoder(generator)
    raw = encoder_bytes(encoder, {"steps": 3})
    before = torch.get_rng_state()
    back, packed = encoder_from(raw)
    assert torch.equal(torch.get_rng_state(), before)
    assert (back.architecture, packed.notes) == (encoder.architecture, {"steps": 3})
    assert fingerprint(back) == fingerprint(encoder)
    assert not any(p.requires_grad for p in back.parameters())
    x = _pictures(generator, 2)
    assert torch.equal(invert_images(back, generator, x, 2), invert_images(encoder, generator, x, 2))
    assert encoder_bytes(back, {"steps": 3}) == raw


@pytest.mark.parametrize(
    "change", [{"head": 16384}, {"head": 64}, {"resolution": "32"}, {"unknown": 1}, {"widths": 3}, {"channels": 1.0}]
)
def test_a_file_whose_sizes_are_not_those_of_its_weights_is_refused_before_memory_is_taken(change):
    packed = unpack(encoder_bytes(_encoder(_generator(GREY)), {}), "encoder")
    raw = pack("encoder", dict(packed.config) | change, {}, packed.state)
    with pytest.raises(WeightsError):
        encoder_from(raw)


@pytest.mark.parametrize("raw", [b"", b"\x80\x04K\x01.", b"\xff" * 64])
def test_what_is_no_file_of_ours_is_refused(raw):
    with pytest.raises(WeightsError):
        encoder_from(raw)


def test_polish_draws_every_picture_better_and_touches_no_weight():
    generator = _generator(GREY)
    x = _pictures(generator, 3)
    ws = average_code(generator, 3)
    better = polish(generator, x, ws, 0.5, Polish(steps=25, rate=0.1, stay=0.0))
    with torch.no_grad():
        errors = [(generator.synthesis(w) - x).square().mean(dim=(1, 2, 3)) for w in (ws, better)]
    assert bool((errors[1] < 0.3 * errors[0]).all())
    assert all(p.grad is None for p in generator.parameters())
    assert not better.requires_grad


def test_polish_of_one_picture_does_not_depend_on_its_batch_and_can_be_held_back():
    generator = _generator(GREY)
    x, ws = _pictures(generator, 3), average_code(generator, 3)
    plan = Polish(steps=5, rate=0.05, stay=0.1)
    alone = polish(generator, x[1:2], ws[1:2], 0.5, plan)
    assert torch.allclose(polish(generator, x, ws, 0.5, plan)[1], alone[0], atol=1e-4)
    free = polish(generator, x, ws, 0.5, Polish(30, 0.05, 0.0))
    held = polish(generator, x, ws, 0.5, Polish(30, 0.05, 100.0))
    assert (held - ws).norm() < 0.3 * (free - ws).norm()


@pytest.mark.parametrize("plan", [(0, 0.1, 0.1), (5, 0.0, 0.1), (5, float("nan"), 0.1), (5, 0.1, -1.0)])
def test_a_polish_of_no_size_is_refused(plan):
    with pytest.raises(ValueError, match="polish"):
        Polish(*plan)
