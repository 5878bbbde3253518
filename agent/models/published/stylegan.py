"""Weights of published StyleGAN2 generators in our own: those of StyleGAN2-ADA, and those inside ReStyle's files.

Ours has StyleGAN2-ADA's names. ReStyle's decoder is the other common implementation; it computes the same function
of the same numbers under other names (weights have a leading axis of 1, noise two), and is translated by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from agent.models.stylegan.network import Architecture, Generator
from agent.models.stylegan.resampling import low_pass
from agent.models.weights import WeightsError, fill

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
        a = Architecture(top, rgb[top].shape[0], first.shape[1], first.shape[0], layers, width * top, most)
    except (KeyError, ValueError, IndexError) as fault:
        raise WeightsError("the tensors are those of no StyleGAN2-ADA generator") from fault
    if first.ndim != 2 or sum(t.numel() for t in state.values()) != _size(a):
        _compare(a, state)
    with torch.device("meta"):  # nothing is drawn, and a wrong file cannot ask for more memory than it brings
        generator = Generator(a)
    generator = generator.to_empty(device="cpu")
    fill(generator, state)
    return generator.requires_grad_(requires_grad=False).eval()


def _size(a: Architecture) -> int:
    with torch.device("meta"):
        return sum(t.numel() for t in Generator(a).state_dict().values())


def _compare(a: Architecture, state: Mapping[str, Tensor]) -> None:
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
