"""Published weight files, when a site has them: by their authors' names, with a pinned digest, and never as code.

A file is safetensors, or a torch file that holds tensors and plain values only. The digest comes from the caller, who
vouches for the file; the file's own statements are ignored. If tensors are missing, unknown or of another shape, the
error names them and the file is refused.
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
from agent.models.published.stylegan import decoder_of, generator_of
from agent.models.stylegan.network import Generator
from agent.models.stylegan.restyle_published import EncoderShape, FaceEncoder, ResNetEncoder, RestyleEncoder
from agent.models.weights import Origin, WeightsError, fill

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
