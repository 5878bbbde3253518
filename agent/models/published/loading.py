"""Published weight files, when a site has them: by their authors' names, with a pinned digest, and never as code.

A file is safetensors, or a torch file that holds tensors and plain values only. The digest comes from the caller, who
vouches for the file; the file's own statements are ignored. If tensors are missing, unknown or of another shape, the
error names them and the file is refused.

Weights of published StyleGAN2 generators in our own: those of StyleGAN2-ADA, and those inside ReStyle's files.

Ours has StyleGAN2-ADA's names. ReStyle's decoder is the other common implementation; it computes the same function
of the same numbers under other names (weights have a leading axis of 1, noise two), and is translated by them.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from agent.models.features.inception import InceptionV3
from agent.models.features.resnet import ResNet, Size
from agent.models.features.vgg import Vgg19
from agent.models.stylegan.network import Generator, StyleGanShape
from agent.models.stylegan.resampling import low_pass
from agent.models.stylegan.restyle_published import EncoderShape, FaceEncoder, ResNetEncoder, RestyleEncoder
from agent.models.weights import Origin, WeightsError, fill

_BLOCK: Final = re.compile(r"synthesis\.b(\d{1,4})\.torgb\.weight")
_FULL: Final = re.compile(r"mapping\.fc(\d{1,2})\.weight")
_FIXED: Final = re.compile(r"(?:convs\.\d+\.conv\.blur|to_rgbs\.\d+\.upsample)\.kernel")


def generator_of(state: Mapping[str, Tensor]) -> Generator:
    """A generator from StyleGAN2-ADA's own state (``G_ema``); its sizes are read from the shapes.

    Raises:
        WeightsError: no such generator (one with classes has more tensors), or tensors that do not fit.
    """
    try:
        rgb = {int(m[1]): state[name] for name in state if (m := _BLOCK.fullmatch(name))}
        first = state["mapping.fc0.weight"]
        top, most = max(rgb), rgb[4].shape[1]
        width = rgb[top].shape[1]
        layers = sum(1 for name in state if _FULL.fullmatch(name))
        # a top as wide as the bottom says only that the base is at least this
        a = StyleGanShape(top, rgb[top].shape[0], first.shape[1], first.shape[0], layers, width * top, most)
    except (KeyError, ValueError, IndexError) as fault:
        raise WeightsError("the tensors are those of no StyleGAN2-ADA generator") from fault
    if first.ndim != 2 or sum(t.numel() for t in state.values()) != _size(a):
        _compare(a, state)
    with torch.device("meta"):  # nothing is drawn, and a wrong file cannot ask for more memory than it brings
        generator = Generator(a)
    generator = generator.to_empty(device="cpu")
    fill(generator, state)
    return generator.requires_grad_(requires_grad=False).eval()


def _size(a: StyleGanShape) -> int:
    with torch.device("meta"):
        return sum(t.numel() for t in Generator(a).state_dict().values())


def _compare(a: StyleGanShape, state: Mapping[str, Tensor]) -> None:
    """Name what does not fit, before memory is taken for it."""
    with torch.device("meta"):
        own = Generator(a).state_dict()
    wrong = sorted(own.keys() ^ state.keys())
    wrong += [n for n in own if n in state and own[n].shape != state[n].shape]
    raise WeightsError(f"{len(wrong)} tensor(s) missing, unknown or of another shape: {', '.join(wrong[:5])}")


def decoder_of(state: Mapping[str, Tensor], average: Tensor) -> Generator:
    """A generator from the decoder of a ReStyle or pSp file.

    Args:
        state: its tensors, without ``decoder.``.
        average: (512,) or (num_ws, 512), the latent average, the same for every layer.
    Raises:
        WeightsError: names or shapes of no such decoder, another resampling filter, or an average that differs
        between
            layers.
    """
    if average.ndim == 2 and len(average) and bool((average == average[:1]).all()):
        average = average[0]
    if average.ndim != 1:
        raise WeightsError("the latent average is not one style for all layers")
    out: dict[str, Tensor] = {"mapping.w_avg": average.float()}
    unknown = []
    for name, tensor in state.items():
        if _FIXED.fullmatch(name):
            if tensor.shape != (4, 4) or not torch.allclose(tensor.float(), 4.0 * low_pass()):
                raise WeightsError(f"{name} is not the filter 1, 3, 3, 1")
            continue
        own = _renamed(name)
        if own is None:
            unknown.append(name)
        else:
            out[own] = _reshaped(own, tensor)
    if unknown:
        raise WeightsError(f"{len(unknown)} unknown tensor(s): {', '.join(sorted(unknown)[:5])}")
    for name in [n for n in out if n.endswith((".conv0.weight", ".conv1.weight"))]:
        out[name.replace(".weight", ".resample_filter")] = low_pass()
        out[name.rsplit(".", 2)[0] + ".resample_filter"] = low_pass()
    return generator_of(out)


_PARTS: Final = {
    "conv.weight": "weight",
    "conv.modulation.weight": "affine.weight",
    "conv.modulation.bias": "affine.bias",
    "noise.weight": "noise_strength",
    "activate.bias": "bias",
    "bias": "bias",
}


def _renamed(name: str) -> str | None:
    """Our name of a decoder's tensor. Layers are counted upwards: two convolutions and one colour a resolution."""
    if name == "input.input":
        return "synthesis.b4.const"
    if m := re.fullmatch(r"style\.([1-9]\d?)\.(weight|bias)", name):
        return f"mapping.fc{int(m[1]) - 1}.{m[2]}"
    if m := re.fullmatch(r"noises\.noise_(\d{1,2})", name):
        return f"synthesis.{_layer(int(m[1]))}.noise_const"
    if m := re.fullmatch(r"(conv1|to_rgb1|convs\.\d{1,2}|to_rgbs\.\d{1,2})\.(.+)", name):
        place, part = m[1], _PARTS.get(m[2])
        if part is None or (part == "bias" and (m[2] == "bias") is not place.startswith("to_rgb")):
            return None
        if place.startswith("to_rgb"):
            level = 0 if place == "to_rgb1" else int(place.split(".")[1]) + 1
            return f"synthesis.b{4 << level}.torgb.{part}"
        return f"synthesis.{_layer(0 if place == 'conv1' else int(place.split('.')[1]) + 1)}.{part}"
    return None


def _layer(index: int) -> str:
    """The convolution of a number: 0 is the only one at 4 pixels."""
    return f"b{4 << ((index + 1) // 2)}.conv{(index + 1) % 2}"


def _reshaped(own: str, tensor: Tensor) -> Tensor:
    """Without the axes of size 1 that the other implementation keeps."""
    if own.endswith(("torgb.weight", "conv0.weight", "conv1.weight", ".const")) and tensor.shape[:1] == (1,):
        return tensor[0]
    if own.endswith("noise_const") and tensor.shape[:2] == (1, 1):
        return tensor[0, 0]
    if own.endswith("noise_strength") and tensor.shape == (1,):
        return tensor[0]
    if own.endswith("torgb.bias") and tensor.ndim == 4:
        return tensor.flatten()
    return tensor


_Net = TypeVar("_Net", bound=nn.Module)
_DEEP: Final = 6  # dictionaries in one another
_CODE: Final = (
    "the file is neither safetensors nor a torch file of tensors alone: it is damaged, or it holds code, which is "
    "never run. Load it with its authors' program on a machine without patients' data, and save its state_dict (of "
    "StyleGAN2-ADA: that of G_ema) as safetensors"
)


class PublishedWeightsError(WeightsError):
    """The bytes do not have the digest that was pinned."""


class Restyle(nn.Module):
    """What is in a ReStyle file: an encoder and the generator that it was trained for."""

    def __init__(self, encoder: RestyleEncoder, generator: Generator) -> None:
        """Hold both, frozen."""
        super().__init__()
        self.encoder, self.generator = encoder, generator
        self.requires_grad_(requires_grad=False).eval()


def load_official(kind: str, raw: bytes, sha256: str) -> tuple[nn.Module, Origin]:
    """Read a published weight file.

    Args:
        kind: one of :data:`OFFICIAL`.
        raw: the file.
        sha256: its digest in lower-case hexadecimal, from whoever vouches for it; there is no way around it.
    Returns:
        The network, frozen, and its origin, ``file``: the site's configuration may vouch for it as public.
    Raises:
        PublishedWeightsError: another digest.
        WeightsError: an unknown kind, code, a damaged file, or tensors that do not fit.
    """
    if kind not in OFFICIAL:
        raise WeightsError(f"official files are of one of the kinds {', '.join(sorted(OFFICIAL))}")
    found = hashlib.sha256(raw).hexdigest()
    if not hmac.compare_digest(found, sha256):
        raise PublishedWeightsError("the file does not have the SHA-256 that was pinned for it")
    origin = Origin("file", found)
    return OFFICIAL[kind](tensors(raw), origin), origin


def tensors(raw: bytes) -> dict[str, Tensor]:
    """Every tensor of a file; names of nested dictionaries are joined by dots. Anything else in it is left out.

    Raises:
        WeightsError: neither safetensors nor a torch file of plain values, or no tensor in it.
    """
    length = int.from_bytes(raw[:8], "little")
    if raw[8:9] == b"{" and length <= len(raw) - 8:
        try:
            out: dict[str, Tensor] = dict(safetensors.torch.load(raw))
        except (safetensors.SafetensorError, KeyError, ValueError) as fault:
            raise WeightsError("the file is not safetensors of known types") from fault
    else:
        out = _plain(raw)
    if not out:
        raise WeightsError("the file holds no tensor")
    return out


def _plain(raw: bytes) -> dict[str, Tensor]:
    """The tensors of a torch file."""
    try:
        # old checkpoints carry their command line: a bag of plain values, and the one class let through
        with torch.serialization.safe_globals([argparse.Namespace]):
            told = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as fault:  # whatever a strange file makes the reader say, the file is refused
        raise WeightsError(_CODE) from fault
    out: dict[str, Tensor] = {}
    _flatten(told, "", _DEEP, out)
    return out


def _flatten(value: Any, name: str, depth: int, out: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        out[name] = value.detach()
    elif isinstance(value, Mapping) and depth:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else str(key), depth - 1, out)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a network lies in its file."""

    prefixes: tuple[str, ...]  # the first that any name begins with is taken off; "" is the file itself
    unused: str  # regular expression: names, after the prefix, that are known and not needed
    others: str = r"(?!)"  # regular expression: names without the prefix that are known and not needed


_COUNTS: Final = r"(?:.+\.)?num_batches_tracked"
_VGG: Final = _Layout(("state_dict.", ""), r"classifier\.[036]\.(?:weight|bias)")
_RESNET: Final = _Layout(("state_dict.", ""), rf"fc\.(?:weight|bias)|{_COUNTS}")
_MOCO: Final = _Layout(
    tuple(f"{a}{b}encoder_q." for a in ("state_dict.", "") for b in ("module.", "")),
    rf"fc\.(?:[02]\.)?(?:weight|bias)|{_COUNTS}",
    r"(?:state_dict\.)?(?:module\.)?(?:encoder_k\..+|queue|queue_ptr)|optimizer\..+",
)


def _taken(state: Mapping[str, Tensor], layout: _Layout) -> dict[str, Tensor]:
    """The tensors of a network, by its own names."""
    prefix = next((p for p in layout.prefixes if any(name.startswith(p) for name in state)), None)
    if prefix is None:
        raise WeightsError(f"the file has no tensor named {layout.prefixes[0]}*")
    unknown = [n for n in state if not n.startswith(prefix) and not re.fullmatch(layout.others, n)]
    if unknown:
        raise WeightsError(f"{len(unknown)} unknown tensor(s): {', '.join(sorted(unknown)[:5])}")
    own = {n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)}
    return {n: t for n, t in own.items() if not re.fullmatch(layout.unused, n)}


def _filled(module: _Net, state: Mapping[str, Tensor]) -> _Net:
    """A module that was made on the meta device, with its weights."""
    if not all(bool(torch.isfinite(t).all()) for t in state.values() if t.is_floating_point()):
        raise WeightsError("a weight is not finite")
    own = {n: t.shape for n, t in module.state_dict().items()}
    if own.keys() == state.keys() and all(state[n].shape == shape for n, shape in own.items()):
        module = module.to_empty(device="cpu")  # no memory is taken for a file that does not fit
    fill(module, state)
    return module


def _vgg19(normalised: bool) -> Callable[[Mapping[str, Tensor], Origin], Vgg19]:
    def build(state: Mapping[str, Tensor], origin: Origin) -> Vgg19:
        with torch.device("meta"):
            net = Vgg19(origin, normalised)
        return _filled(net, _taken(state, _VGG))

    return build


def _resnet(size: Size) -> Callable[[Mapping[str, Tensor], Origin], ResNet]:
    def build(state: Mapping[str, Tensor], origin: Origin) -> ResNet:
        with torch.device("meta"):
            net = ResNet(size, size, origin)
        return _filled(net, _taken(state, _RESNET))

    return build


def _moco(state: Mapping[str, Tensor], origin: Origin) -> ResNet:
    with torch.device("meta"):
        net = ResNet("moco-resnet50", "resnet50", origin)
    return _filled(net, _taken(state, _MOCO))


def _inception(state: Mapping[str, Tensor], origin: Origin) -> InceptionV3:
    with torch.device("meta"):
        net = InceptionV3(origin)
    return _filled(net, _taken(state, _RESNET))


def _stylegan2_ada(state: Mapping[str, Tensor], origin: Origin) -> Generator:
    del origin
    own = _taken(state, _Layout(("G_ema.", ""), r"(?!)", r"(?:G|D)\..+"))
    if not all(bool(torch.isfinite(t).all()) for t in own.values() if t.is_floating_point()):
        raise WeightsError("a weight is not finite")
    return generator_of(own)


def _restyle(state: Mapping[str, Tensor], origin: Origin) -> Restyle:
    del origin
    state = {n.removeprefix("state_dict."): t for n, t in state.items()}
    parts: dict[str, dict[str, Tensor]] = {"encoder": {}, "decoder": {}}
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        if part in parts:
            parts[part][rest] = tensor
        elif name != "latent_avg" and part not in ("optimizer", "opts", "discriminator_state_dict"):
            raise WeightsError(f"unknown tensor: {name}")
    if "latent_avg" not in state or not all(parts.values()):
        raise WeightsError("a ReStyle file holds encoder.*, decoder.* and latent_avg")
    if not all(bool(torch.isfinite(t).all()) for t in state.values() if t.is_floating_point()):
        raise WeightsError("a weight is not finite")
    generator = decoder_of(parts["decoder"], state["latent_avg"])
    a = generator.architecture
    if a.w_dim != 512 or a.channels != 3:
        raise WeightsError("ReStyle's encoders answer styles of 512 numbers for colour images")
    fit = EncoderShape(a.resolution, a.num_ws)
    with torch.device("meta"):
        encoder = FaceEncoder(fit) if "input_layer.0.weight" in parts["encoder"] else ResNetEncoder(fit)
    own = {n: t for n, t in parts["encoder"].items() if not re.fullmatch(_COUNTS, n)}
    return Restyle(_filled(encoder, own), generator)


OFFICIAL: Final[Mapping[str, Callable[[Mapping[str, Tensor], Origin], nn.Module]]] = {
    "vgg19": _vgg19(normalised=True),  # torchvision's vgg19
    "vgg19-unnormalised": _vgg19(normalised=False),  # the same file, fed as k-SALSA's published code does
    "resnet18": _resnet("resnet18"),  # torchvision's
    "resnet34": _resnet("resnet34"),
    "resnet50": _resnet("resnet50"),
    "moco": _moco,  # MoCo v1 or v2, ResNet-50
    "inception": _inception,  # pytorch-fid's pt_inception-2015-12-05
    "stylegan2-ada": _stylegan2_ada,  # the state_dict of G_ema
    "restyle": _restyle,  # ReStyle (pSp), over ResNet-34 or IR-SE-50, with its decoder
}
