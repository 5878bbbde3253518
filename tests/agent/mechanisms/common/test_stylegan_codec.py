"""A generator and its encoder as the codec of the pipeline, and what it says of where they come from."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.domain import Cohort, Image, Patient
from agent.mechanisms.common.linear_codec import Codec, invert
from agent.mechanisms.common.stylegan_codec import StyledCodec, codec_from
from agent.models.image_tensors import to_bytes, to_unit
from agent.models.stylegan.network import Generator, StyleGanShape, generator_bytes
from agent.models.stylegan.restyle import Encoder, Polish, architecture_for, encoder_bytes, fingerprint
from agent.models.stylegan.restyle_published import EncoderShape, ResNetEncoder
from agent.models.training_loop import seeded
from agent.models.weights import Origin, WeightsError

GREY = StyleGanShape(16, 1, 16, 16, 2, 256, 16)
PUBLIC = {name: Origin("public", "0" * 64) for name in ("encoder", "generator")}


def _networks(architecture=GREY, seed=0):
    with seeded(seed):
        generator, encoder = Generator(architecture), Encoder(architecture_for(architecture))
        torch.nn.init.normal_(encoder.layers.weight, std=0.05)  # untrained, but not silent
        with torch.no_grad():
            w = generator.mapping(torch.randn(256, architecture.z_dim))[:, 0]
            generator.mapping.w_avg.copy_(w.mean(dim=0))
            for r in architecture.resolutions:
                getattr(generator.synthesis, f"b{r}").torgb.weight.mul_(0.25)
    return generator.eval(), encoder.eval()


def _codec(architecture=GREY, batch=3, **more):
    return StyledCodec(*_networks(architecture), 3, batch, PUBLIC, **more)


def _images(codec, n, seed=1):
    return np.random.default_rng(seed).random((n, *codec.shape)).astype(np.float32)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_become_flat_codes_and_codes_become_images(channels):
    codec: Codec = _codec(GREY.with_channels(channels))
    shape = (16, 16) if channels == 1 else (16, 16, 3)
    assert codec.shape == shape
    codes = codec.encode(_images(codec, 7))
    assert (codes.shape, codes.dtype) == ((7, GREY.num_ws * GREY.w_dim), np.float32)
    images = codec.decode(codes)
    assert (images.shape, images.dtype) == ((7, *shape), np.uint8)
    assert codec.encode(_images(codec, 0)).shape == (0, codes.shape[1])
    assert codec.decode(codes[:0]).shape == (0, *shape)


def test_a_code_is_the_w_plus_code_laid_flat_layer_after_layer():
    codec = _codec()
    codes = np.arange(2 * codec.width, dtype=np.float32).reshape(2, -1) / 100
    ws = codec.ws(codes)
    assert np.array_equal(ws[1, 2].numpy(), codes[1, 2 * GREY.w_dim : 3 * GREY.w_dim])
    with torch.no_grad():
        drawn = codec.generator.synthesis(ws, noise="const")
    assert np.array_equal(codec.decode(codes), to_bytes(to_unit(drawn)))
    ws.add_(1.0)
    assert codes[0, 0] == 0  # the caller's codes are not what was changed


def test_the_latent_average_decodes_to_the_picture_where_inversion_begins():
    codec = _codec()
    average = codec.latent_average
    assert average.shape == (codec.width,)
    assert np.array_equal(average.reshape(GREY.num_ws, -1), np.tile(codec.generator.w_avg.numpy(), (GREY.num_ws, 1)))
    codec.encoder.layers.weight.data.zero_()
    assert np.allclose(codec.encode(_images(codec, 2)), average, atol=1e-6)


CODEC = _codec()


@settings(max_examples=12, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 7))
def test_the_code_of_an_image_is_the_same_in_any_company(order, batch):
    images = _images(CODEC, 6)
    shuffled = dataclasses.replace(CODEC, batch=batch).encode(images[list(order)])
    assert np.allclose(shuffled, dataclasses.replace(CODEC, batch=1).encode(images)[list(order)], atol=1e-4)


def test_encoding_twice_gives_the_same_numbers_and_moves_no_global_generator():
    codec = _codec(polish=Polish(steps=2))
    images, before, legacy = _images(codec, 4), torch.get_rng_state(), np.random.get_state()[1].copy()
    first = codec.encode(images)
    assert np.array_equal(first, codec.encode(images))
    assert np.array_equal(codec.decode(first), codec.decode(first))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], legacy)


def test_polish_comes_after_the_encoder_and_only_where_it_is_asked_for():
    plain, polished = _codec(), _codec(polish=Polish(steps=30, rate=0.1, stay=0.0))
    images = _images(plain, 3)

    def error(codec):
        return float(np.square(codec.decode(codec.encode(images)) / 255.0 - images).mean())

    assert plain.polish is None
    assert error(polished) < 0.9 * error(plain)


def test_a_patient_has_one_code_the_mean_over_their_images():
    codec = _codec()
    images = _images(codec, 3)
    cohort = Cohort((Patient("a", tuple(Image(x, "") for x in images[:2])), Patient("b", (Image(images[2], ""),))))
    latents = invert(cohort, codec)
    codes = codec.encode(images)
    assert latents.patients == ("a", "b")
    assert np.allclose(latents.codes, [codes[:2].mean(axis=0), codes[2]], atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 32, 32), (2, 16, 16, 3), (16, 16), (2, 16, 15)])
def test_images_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        _codec().encode(np.zeros(shape, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.01, 1.01, 255.0])
def test_intensities_that_are_none_are_refused(value):
    images = np.zeros((2, 16, 16), np.float32)
    images[1, 3, 3] = value
    with pytest.raises(ValueError, match="intensities"):
        _codec().encode(images)


@pytest.mark.parametrize("shape", [(2, 5), (96,), (2, 6, 16)])
def test_codes_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match="width"):
        _codec().decode(np.zeros(shape, np.float32))


def test_numbers_that_are_not_finite_go_no_further():
    codec = _codec()
    codes = np.tile(codec.latent_average, (2, 1))
    broken = codes.copy()
    broken[1, 7] = np.nan
    with pytest.raises(ValueError, match="finite"):
        codec.decode(broken)
    codec.encoder.layers.bias.data[0] = np.inf
    with pytest.raises(ValueError, match="finite"):
        codec.encode(_images(codec, 2))
    codec.generator.synthesis.b16.torgb.bias.data[0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        codec.decode(codes)


def test_parts_that_do_not_fit_together_are_refused():
    generator, encoder = _networks()
    with pytest.raises(ValueError, match="differ"):
        StyledCodec(generator, _networks(GREY.with_channels(3))[1], 3, 2, PUBLIC)
    with pytest.raises(ValueError, match="come from"):
        StyledCodec(generator, encoder, 3, 2, {"encoder": PUBLIC["encoder"]})
    for passes, batch in ((0, 2), (2, 0)):
        with pytest.raises(ValueError, match="at least"):
            StyledCodec(generator, encoder, passes, batch, PUBLIC)


def _files(seed=0, claims=None):
    generator, encoder = _networks(seed=seed)
    told = {"provenance": "public"} if claims is None else claims
    return generator_bytes(generator, told), encoder_bytes(encoder, told | {"generator": fingerprint(generator)})


def _digest(raw):
    return hashlib.sha256(raw).hexdigest()


def test_a_generator_that_nobody_vouches_for_is_private_whatever_it_says_of_itself():
    generator, encoder = _files(claims={"provenance": "public"})
    codec = codec_from(generator, encoder, frozenset({_digest(encoder)}))
    assert codec.components() == {"encoder": "public", "generator": "private"}
    assert codec.origins["generator"] == Origin("file", _digest(generator))


def test_only_the_exact_bytes_that_the_site_vouches_for_are_public():
    generator, encoder = _files()
    both = frozenset({_digest(generator), _digest(encoder)})
    assert codec_from(generator, encoder, both).components() == {"encoder": "public", "generator": "public"}
    assert codec_from(generator, encoder, frozenset()).components() == {"encoder": "private", "generator": "private"}
    same_weights_other_notes, _ = _files(claims={})
    assert codec_from(same_weights_other_notes, encoder, both).components()["generator"] == "private"


@pytest.mark.parametrize("provenance", ["private", "file"])
def test_a_network_trained_on_patients_is_a_private_component(provenance):
    codec = StyledCodec(*_networks(), 2, 2, PUBLIC | {"generator": Origin(provenance, "1" * 64)})
    assert codec.components() == {"encoder": "public", "generator": "private"}


def test_an_encoder_makes_the_passes_that_it_was_trained_with_unless_told_otherwise():
    generator, _ = _networks()
    encoder = Encoder(dataclasses.replace(architecture_for(GREY), passes=2))
    files = generator_bytes(generator, {}), encoder_bytes(encoder, {})
    assert codec_from(*files, frozenset()).passes == 2
    assert codec_from(*files, frozenset(), passes=4).passes == 4


def test_a_published_encoder_takes_the_same_place():
    architecture = StyleGanShape(32, 3, 512, 512, 2, 1024, 16)
    with seeded(0):
        generator = Generator(architecture)
        encoder = ResNetEncoder(EncoderShape(32, architecture.num_ws)).eval()
    codec = StyledCodec(generator, encoder, 1, 2, PUBLIC, Polish(steps=1))
    assert codec.encode(_images(codec, 1)).shape == (1, architecture.num_ws * 512)


def test_the_codec_of_two_files_is_frozen_and_gives_the_same_codes():
    generator, encoder = _files()
    before = torch.get_rng_state()
    codec = codec_from(generator, encoder, frozenset(), passes=3, batch=3)
    assert torch.equal(torch.get_rng_state(), before)
    images = _images(codec, 4)
    assert np.array_equal(codec.encode(images), _codec().encode(images))
    assert not any(p.requires_grad for net in (codec.generator, codec.encoder) for p in net.parameters())


def test_an_encoder_of_another_generator_is_refused_though_its_shape_fits():
    with pytest.raises(ValueError, match="another generator"):
        codec_from(_files(seed=1)[0], _files(seed=0)[1], frozenset())


def test_files_in_each_others_place_are_refused():
    generator, encoder = _files()
    with pytest.raises(WeightsError):
        codec_from(encoder, generator, frozenset())
