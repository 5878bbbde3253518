import argparse
import hashlib
import io
import json
import math
import os
import struct

import pytest
import safetensors.torch
import torch
from torch.nn.functional import conv2d, conv_transpose2d, leaky_relu

from agent.models.features.inception import InceptionV3
from agent.models.features.resnet import ResNet
from agent.models.features.vgg import Vgg19
from agent.models.published.loading import (
    OFFICIAL,
    PublishedWeightsError,
    Restyle,
    decoder_of,
    generator_of,
    load_official,
    tensors,
)
from agent.models.stylegan.network import Generator, generator_bytes
from agent.models.stylegan.restyle import average_code, invert_images
from agent.models.stylegan.restyle_published import EncoderShape, FaceEncoder, ResNetEncoder
from agent.models.weights import Origin, WeightsError
from deploy.reproduction.feature_networks import FEATURES, Source
from tests.support.published_weights import (
    KERNEL,
    decoder_state,
    head_names,
    norm_names,
    random_state,
    resnet34_body_names,
    shapes_of,
    tiny_ada,
    torch_bytes,
)

ORIGIN = Origin("file", "0" * 64)


def digest(raw):
    return hashlib.sha256(raw).hexdigest()


def hollow(shapes):
    """One number in memory for each tensor: right names and shapes for little."""
    return {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}


# --- oracles of names and shapes, written from the papers' tables and the published files, not from our modules ---


def vgg19_names():
    out, place, inputs = {}, 0, 3
    for layer in (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0):  # 0: pooling
        if not layer:
            place += 1
            continue
        out[f"features.{place}.weight"], out[f"features.{place}.bias"] = (layer, inputs, 3, 3), (layer,)
        inputs, place = layer, place + 2
    return out


VGG_CLASSIFIER = {
    "classifier.0.weight": (4096, 25088), "classifier.0.bias": (4096,),
    "classifier.3.weight": (4096, 4096), "classifier.3.bias": (4096,),
    "classifier.6.weight": (1000, 4096), "classifier.6.bias": (1000,),
}  # fmt: skip


def resnet50_names():
    out = {"conv1.weight": (64, 3, 7, 7)} | norm_names("bn1", 64)
    inputs = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(count):
            p = f"layer{stage}.{block}"
            out |= {f"{p}.conv1.weight": (width, inputs, 1, 1), f"{p}.conv2.weight": (width, width, 3, 3)}
            out |= {f"{p}.conv3.weight": (4 * width, width, 1, 1)}
            for i, channels in ((1, width), (2, width), (3, 4 * width)):
                out |= norm_names(f"{p}.bn{i}", channels)
            if block == 0:
                out |= {f"{p}.downsample.0.weight": (4 * width, inputs, 1, 1)}
                out |= norm_names(f"{p}.downsample.1", 4 * width)
            inputs = 4 * width
    return out


def learned(shapes):
    return sum(math.prod(s) for n, s in shapes.items() if not n.endswith(("running_mean", "running_var")))


def test_vgg19_has_the_names_and_the_143_667_240_parameters_of_the_published_network():
    assert shapes_of(lambda: Vgg19(ORIGIN)) == vgg19_names()
    assert learned(vgg19_names() | VGG_CLASSIFIER) == 143_667_240


def test_resnet50_has_the_names_and_the_25_557_032_parameters_of_the_published_network():
    shapes = shapes_of(lambda: ResNet("resnet50", "resnet50", ORIGIN))
    assert shapes == resnet50_names()
    assert learned(shapes) + 2048 * 1000 + 1000 == 25_557_032


@pytest.mark.parametrize(("size", "count"), [("resnet18", 11_689_512), ("resnet34", 21_797_672)])
def test_the_smaller_residual_networks_have_the_published_number_of_parameters(size, count):
    assert learned(shapes_of(lambda: ResNet(size, size, ORIGIN))) + 512 * 1000 + 1000 == count


def test_inception_has_the_published_number_of_parameters_and_names():
    shapes = shapes_of(lambda: InceptionV3(ORIGIN))
    # torchvision's 27,161,264 less its auxiliary classifier's 3,326,696
    assert learned(shapes) + 2048 * 1000 + 1000 == 27_161_264 - 3_326_696
    assert len({n.rsplit(".", 2)[0] for n in shapes}) == 94  # convolutions of the network without the auxiliary one
    told = {
        "Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3),
        "Conv2d_4a_3x3.bn.running_var": (192,),
        "Mixed_5b.branch5x5_2.conv.weight": (64, 48, 5, 5),
        "Mixed_5b.branch_pool.conv.weight": (32, 192, 1, 1),
        "Mixed_6a.branch3x3.conv.weight": (384, 288, 3, 3),
        "Mixed_6c.branch7x7_2.conv.weight": (160, 160, 1, 7),
        "Mixed_6e.branch7x7dbl_4.conv.weight": (192, 192, 7, 1),
        "Mixed_7a.branch7x7x3_4.conv.weight": (192, 192, 3, 3),
        "Mixed_7b.branch3x3_2a.conv.weight": (384, 384, 1, 3),
        "Mixed_7c.branch3x3dbl_3b.conv.weight": (384, 384, 3, 1),
        "Mixed_7c.branch_pool.conv.weight": (192, 2048, 1, 1),
    }
    assert {n: shapes[n] for n in told} == told


def test_the_restyle_encoder_has_the_published_names_and_number_of_parameters():
    shapes = shapes_of(lambda: ResNetEncoder(EncoderShape(512, 16)))
    expected = {"conv1.weight": (64, 6, 7, 7), "relu.weight": (64,)} | norm_names("bn1", 64)
    assert shapes == expected | resnet34_body_names() | head_names(16)
    # ResNet-34 without its classifier, three channels more to begin with, PReLU's 64; and a head a layer
    trunk = (21_797_672 - 513_000) + 7 * 7 * 64 * 3 + 64
    head = 4 * (9 * 512 * 512 + 512) + 512 * 512 + 512
    assert learned(shapes) == trunk + 16 * head


def test_the_face_encoder_has_the_published_names():
    shapes = shapes_of(lambda: FaceEncoder(EncoderShape(1024, 18)))
    told = {
        "input_layer.0.weight": (64, 6, 3, 3), "input_layer.1.running_mean": (64,), "input_layer.2.weight": (64,),
        "body.0.res_layer.1.weight": (64, 64, 3, 3), "body.0.res_layer.5.fc1.weight": (4, 64, 1, 1),
        "body.3.shortcut_layer.0.weight": (128, 64, 1, 1), "body.3.res_layer.0.weight": (64,),
        "body.7.shortcut_layer.1.running_var": (256,), "body.23.res_layer.2.weight": (512,),
        "styles.17.linear.weight": (512, 512),
    }  # fmt: skip
    assert {n: shapes[n] for n in told} == told
    assert not any(n.startswith(("body.0.shortcut_layer", "body.24")) for n in shapes)
    net = FaceEncoder(EncoderShape(32, 2))
    assert net.trunk(torch.zeros(1, 6, 64, 64)).shape == (1, 512, 4, 4)


# --- reading ---


@pytest.fixture(scope="module")
def resnet18():
    state = random_state(shapes_of(lambda: ResNet("resnet18", "resnet18", ORIGIN)))
    extras = {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    return state | extras | {"bn1.num_batches_tracked": torch.tensor(7)}


def forms(state):
    return {
        "safetensors": safetensors.torch.save(state),
        "torch": torch_bytes(state),
        "torch before 1.6": torch_bytes(state, _use_new_zipfile_serialization=False),
        "a checkpoint": torch_bytes({"epoch": 3, "arch": "x", "state_dict": state, "args": argparse.Namespace(lr=1)}),
    }


@pytest.mark.parametrize("form", ["safetensors", "torch", "torch before 1.6", "a checkpoint"])
def test_a_file_in_every_form_gives_its_own_numbers(resnet18, form):
    raw = forms(resnet18)[form]
    net, origin = load_official("resnet18", raw, digest(raw))
    assert origin == Origin("file", digest(raw))
    assert origin.component == "private"  # nobody vouched yet
    own = net.state_dict()
    assert all(torch.equal(own[n], resnet18[n]) for n in own)
    assert not any(p.requires_grad for p in net.parameters())
    assert net.train().training is False


def test_a_residual_network_gives_finite_maps_at_the_published_sizes(resnet18):
    raw = safetensors.torch.save(resnet18)
    net = FEATURES["resnet18"](Source(raw=raw, sha256=digest(raw)))
    images = torch.rand(1, 1, 40, 40).requires_grad_()
    assert [tuple(m.shape[1:]) for m in net.maps(images)] == [(64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7)]
    net.embed(images).sum().backward()
    assert bool(torch.isfinite(images.grad).all())
    assert bool(images.grad.abs().sum() > 0)


def test_frozen_normalisation_is_torchs_in_evaluation(resnet18):
    raw = safetensors.torch.save(resnet18)
    net, _ = load_official("resnet18", raw, digest(raw))
    theirs = torch.nn.BatchNorm2d(64).eval()
    theirs.load_state_dict({n: resnet18[f"bn1.{n}"] for n in ("weight", "bias", "running_mean", "running_var")},
                           strict=False)  # fmt: skip
    x = torch.randn(2, 64, 5, 5)
    assert torch.allclose(net.bn1(x), theirs(x), atol=1e-6)


def test_another_digest_is_refused_before_the_file_is_read(resnet18):
    raw = b"never looked at"
    for wrong in ("", "0" * 64, digest(b"x"), digest(raw).upper()):
        with pytest.raises(PublishedWeightsError):
            load_official("resnet18", raw, wrong)
    with pytest.raises(WeightsError, match="kinds"):
        load_official("resnet19", raw, digest(raw))


@pytest.mark.parametrize("form", ["safetensors", "torch", "torch before 1.6"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(form, share):
    raw = forms({"a.weight": torch.ones(64, 64)})[form]
    raw = raw[: int(share * len(raw))]
    with pytest.raises(WeightsError):
        load_official("resnet18", raw, digest(raw))


def test_missing_unknown_misshapen_and_infinite_tensors_are_named_or_refused():
    resnet18 = hollow(shapes_of(lambda: ResNet("resnet18", "resnet18", ORIGIN)))

    def loaded(state):
        raw = torch_bytes(state)
        return load_official("resnet18", raw, digest(raw))

    assert loaded(resnet18)
    with pytest.raises(WeightsError, match=r"layer4\.1\.bn2\.bias"):
        loaded({n: t for n, t in resnet18.items() if n != "layer4.1.bn2.bias"})
    with pytest.raises(WeightsError, match="layer5"):
        loaded(resnet18 | {"layer5.weight": torch.ones(1)})
    with pytest.raises(WeightsError, match=r"conv1\.weight"):
        loaded(resnet18 | {"conv1.weight": torch.ones(64, 1, 7, 7)})
    with pytest.raises(WeightsError, match=r"conv1\.weight"):
        loaded(resnet18 | {"conv1.weight": torch.ones(64, 3, 7, 7, dtype=torch.float16)})
    with pytest.raises(WeightsError, match="finite"):
        loaded(resnet18 | {"bn1.bias": torch.full((64,), math.nan)})


class Bomb:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}])
@pytest.mark.parametrize("kind", sorted(OFFICIAL))
def test_code_in_a_file_never_runs(tmp_path, kind, how):
    canary = tmp_path / "ran"
    raw = torch_bytes({"state_dict": {"conv1.weight": torch.ones(1)}, "opts": Bomb(canary)}, **how)
    with pytest.raises(WeightsError, match="never run"):
        load_official(kind, raw, digest(raw))
    assert not canary.exists()
    torch.load(io.BytesIO(raw), weights_only=False)  # the bomb is a real one
    assert canary.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_plain_pickle_as_stylegan_publishes_is_refused_with_what_to_do(tmp_path):
    import pickle

    canary = tmp_path / "ran"
    raw = pickle.dumps({"G_ema": Bomb(canary)})
    with pytest.raises(WeightsError, match="state_dict"):
        load_official("stylegan2-ada", raw, digest(raw))
    assert not canary.exists()


def test_a_header_that_lies_about_its_length_is_refused():
    for raw in (struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"{}", b"", b"{" * 100):
        with pytest.raises(WeightsError):
            tensors(raw)


# --- VGG19, MoCo and Inception as their files are ---


def test_vgg19_is_read_with_its_classifier_and_the_first_map_is_relu1_2():
    state = random_state(vgg19_names(), gain=0.1)
    raw = safetensors.torch.save(state | {"classifier.6.bias": torch.zeros(1000)})
    net = FEATURES["vgg19"](Source(raw=raw, sha256=digest(raw)))
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    scaled = ((images + 1) / 2 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)

    def expected(x):
        for n in (0, 2):
            x = conv2d(x, state[f"features.{n}.weight"], state[f"features.{n}.bias"], padding=1).relu()
        return x

    (first,) = net.maps(images, 1)
    assert torch.allclose(first, expected(scaled), atol=1e-5)
    bare = FEATURES["vgg19-unnormalised"](Source(raw=raw, sha256=digest(raw)))
    assert torch.allclose(bare.maps(images, 1)[0], expected(images), atol=1e-5)
    assert bare.name != net.name
    assert [m.shape[1] for m in net.maps(images)] == [64, 128, 256, 512, 512]


def test_moco_takes_the_query_encoder_and_leaves_the_rest():
    state = random_state(resnet50_names(), gain=0.02)
    file = {f"module.encoder_q.{n}": t for n, t in state.items()}
    file |= {"module.encoder_q.fc.0.weight": torch.zeros(2048, 2048), "module.encoder_q.fc.2.bias": torch.zeros(128)}
    file |= {"module.encoder_k.conv1.weight": torch.ones(64, 3, 7, 7), "module.queue": torch.zeros(128, 16)}
    file |= {"module.queue_ptr": torch.zeros(1, dtype=torch.int64)}
    file |= {"module.encoder_q.bn1.num_batches_tracked": torch.tensor(1)}
    raw = torch_bytes({"epoch": 200, "arch": "resnet50", "state_dict": file, "optimizer": {"state": {}}})
    net, _ = load_official("moco", raw, digest(raw))
    assert all(torch.equal(t, state[n]) for n, t in net.state_dict().items())
    with torch.no_grad():
        assert net.embed(torch.zeros(1, 3, 32, 32)).shape == (1, 2048)
    raw = safetensors.torch.save(file | {"module.other": torch.ones(1)})
    with pytest.raises(WeightsError, match=r"module\.other"):
        load_official("moco", raw, digest(raw))


def test_inception_gives_2048_numbers_of_a_picture_at_299():
    state = random_state(shapes_of(lambda: InceptionV3(ORIGIN)), gain=0.05)
    raw = torch_bytes(state | {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)})
    net, _ = load_official("inception", raw, digest(raw))
    with torch.no_grad():
        maps = net.maps(torch.rand(1, 1, 32, 32))
    assert [tuple(m.shape[1:]) for m in maps] == [(64, 73, 73), (192, 35, 35), (768, 17, 17), (2048, 8, 8)]
    x = torch.rand(1, 1, 4, 4)
    assert torch.allclose(net.Mixed_5b.pool(torch.ones_like(x)), torch.ones_like(x))  # the border is not thinned
    assert float(net.Mixed_7c.pool(x).max()) == float(x.max())


# --- generators ---


@pytest.mark.parametrize("prefix", ["", "G_ema."])
def test_a_stylegan2_ada_state_gives_its_pictures_and_its_sizes(prefix):
    g = tiny_ada()
    raw = safetensors.torch.save({prefix + n: t.contiguous() for n, t in g.state_dict().items()})
    read, origin = load_official("stylegan2-ada", raw, digest(raw))
    assert isinstance(read, Generator)
    assert origin.provenance == "file"
    assert read.architecture.num_ws == g.architecture.num_ws
    z = torch.randn(2, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(read(z, truncation=0.7), g(z, truncation=0.7))


def test_a_stylegan2_ada_state_with_classes_or_holes_is_refused():
    state = dict(tiny_ada().state_dict())
    for wrong in (
        state | {"mapping.embed.weight": torch.ones(24, 3)},
        {n: t for n, t in state.items() if n != "synthesis.b8.conv0.affine.bias"},
        {n: t for n, t in state.items() if n != "synthesis.b4.torgb.weight"},
        state | {"synthesis.b2048.torgb.weight": torch.ones(3, 8, 1, 1)},
        {},
    ):
        with pytest.raises(WeightsError):
            generator_of(wrong)
    with pytest.raises(WeightsError, match="embed"):
        generator_of(state | {"mapping.embed.weight": torch.ones(24, 3)})


def reference(state, ws):
    """StyleGAN2's synthesis as its paper says it (weights modulated, picture by picture), from those names."""

    def linear(p, x, rate=1.0):
        w = state[f"{p}.weight"]
        return x @ (w * rate / math.sqrt(w.shape[1])).T + state[f"{p}.bias"] * rate

    def upsampled(x, pad):  # zeros between, then the filter
        wide = torch.zeros(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])
        wide[:, :, ::2, ::2] = x
        wide = torch.nn.functional.pad(wide, pad)
        return conv2d(wide.flatten(0, 1)[:, None], KERNEL[None, None]).unflatten(0, x.shape[:2])[:, :, 0]

    def modulated(p, x, w, up=False, normal=True):
        weight = state[f"{p}.conv.weight"][0]
        weight = weight / math.sqrt(weight[0].numel()) * linear(f"{p}.conv.modulation", w).view(1, -1, 1, 1)
        if normal:
            weight = weight / (weight.square().sum((1, 2, 3), keepdim=True) + 1e-8).sqrt()
        if not up:
            return conv2d(x, weight, padding=weight.shape[-1] // 2)
        y = torch.nn.functional.pad(conv_transpose2d(x, weight.transpose(0, 1), stride=2), (1, 1, 1, 1))
        return conv2d(y.flatten(0, 1)[:, None], KERNEL[None, None]).unflatten(0, y.shape[:2])[:, :, 0]

    def layer(p, index, x, w, up=False):
        y = modulated(p, x, w, up) + state[f"{p}.noise.weight"] * state[f"noises.noise_{index}"]
        return leaky_relu(y + state[f"{p}.activate.bias"].view(1, -1, 1, 1), 0.2) * math.sqrt(2)

    pictures = []
    for code in ws:
        x = layer("conv1", 0, state["input.input"], code[0])
        image = modulated("to_rgb1", x, code[1], normal=False) + state["to_rgb1.bias"]
        for level in range((len(code) - 2) // 2):
            x = layer(f"convs.{2 * level}", 2 * level + 1, x, code[2 * level + 1], up=True)
            x = layer(f"convs.{2 * level + 1}", 2 * level + 2, x, code[2 * level + 2])
            rgb = modulated(f"to_rgbs.{level}", x, code[2 * level + 3], normal=False) + state[f"to_rgbs.{level}.bias"]
            image = upsampled(image, (2, 1, 2, 1)) + rgb
        pictures.append(image)
    return torch.cat(pictures)


def test_a_decoder_of_the_other_implementation_draws_the_same_pictures_here():
    state = decoder_state()
    g = decoder_of(state, torch.zeros(6, 32))
    assert (g.architecture.resolution, g.architecture.num_ws, g.architecture.mapping_layers) == (16, 6, 2)
    ws = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    expected = reference(state, ws)
    assert float(expected.abs().max()) > 0.5
    assert torch.allclose(g.synthesis(ws), expected, atol=2e-4)


def test_a_decoder_that_is_not_one_is_refused():
    state, average = decoder_state(), torch.zeros(32)
    with pytest.raises(WeightsError, match="filter"):
        decoder_of(state | {"convs.0.conv.blur.kernel": KERNEL.flip(0) + 0.1}, average)
    with pytest.raises(WeightsError, match=r"conv9"):
        decoder_of(state | {"conv9.weight": torch.ones(1)}, average)
    with pytest.raises(WeightsError, match="noise_const"):
        decoder_of({n: t for n, t in state.items() if n != "noises.noise_2"}, average)
    with pytest.raises(WeightsError, match="average"):
        decoder_of(state, torch.arange(6.0)[:, None].expand(6, 32))


@pytest.fixture(scope="module")
def restyle_file():
    width = {4: 32, 8: 16}
    decoder = decoder_state(8, width, w_dim=512, layers=1)
    shapes = {"conv1.weight": (64, 6, 7, 7), "relu.weight": (64,)} | norm_names("bn1", 64)
    encoder = random_state(shapes | resnet34_body_names() | head_names(1), seed=2, gain=0.02)
    for i, name in [(i, name) for i in (1, 2, 3) for name in head_names(1)]:  # one head, but for its last numbers
        encoder[name.replace("styles.0", f"styles.{i}")] = encoder[name] + i * name.endswith("linear.bias")
    state = {f"decoder.{n}": t for n, t in decoder.items()} | {f"encoder.{n}": t for n, t in encoder.items()}
    state["encoder.bn1.num_batches_tracked"] = torch.tensor(9)
    average = torch.full((4, 512), 0.25)
    opts = {"device": "cuda:0", "exp_dir": "x", "input_nc": 6}
    return state, average, torch_bytes({"state_dict": state, "latent_avg": average, "opts": opts})


def test_a_restyle_file_gives_an_encoder_and_a_generator_that_invert_together(restyle_file):
    state, average, raw = restyle_file
    pair, origin = load_official("restyle", raw, digest(raw))
    assert isinstance(pair, Restyle)
    assert origin.provenance == "file"
    assert torch.equal(pair.generator.w_avg, average[0])
    own = pair.encoder.state_dict()
    assert all(torch.equal(t, state[f"encoder.{n}"]) for n, t in own.items())
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    ws = invert_images(pair.encoder, pair.generator, images, passes=2)
    assert ws.shape == (2, 4, 512)
    # by hand: w1 = w0 + E(x || G(w0)), w2 = w1 + E(x || G(w1))
    with torch.no_grad():
        w = average_code(pair.generator, 2)
        for _ in range(2):
            w = w + pair.encoder(images, pair.generator.synthesis(w))
    assert torch.allclose(ws, w, atol=1e-5)
    assert not torch.equal(ws[0], ws[1])


def test_a_restyle_file_without_a_part_is_refused():
    decoder = decoder_state(8, {4: 32, 8: 16}, w_dim=512, layers=1)
    shapes = {"conv1.weight": (64, 6, 7, 7), "relu.weight": (64,)} | norm_names("bn1", 64)
    encoder = hollow(shapes | resnet34_body_names() | head_names(4))
    state = {f"decoder.{n}": t for n, t in decoder.items()} | {f"encoder.{n}": t for n, t in encoder.items()}
    average = torch.zeros(512)
    raw = torch_bytes({"state_dict": state, "latent_avg": average})
    assert load_official("restyle", raw, digest(raw))
    for wrong in (
        {"state_dict": state},
        {"state_dict": {n: t for n, t in state.items() if n.startswith("decoder.")}, "latent_avg": average},
        {
            "state_dict": {n: t for n, t in state.items() if n != "encoder.body.15.conv2.weight"},
            "latent_avg": average,
        },
        {"state_dict": state | {"other.weight": torch.ones(1)}, "latent_avg": average},
        {"state_dict": state, "latent_avg": average + math.inf},
    ):
        raw = torch_bytes(wrong)
        with pytest.raises(WeightsError):
            load_official("restyle", raw, digest(raw))


def test_a_file_of_ours_is_not_taken_for_an_official_one():
    raw = generator_bytes(tiny_ada(), {})
    assert json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for kind in ("vgg19", "moco", "inception", "restyle"):
        with pytest.raises(WeightsError):
            load_official(kind, raw, digest(raw))
