"""Stable Diffusion's parts behind our own faces: autoencoder, text encoder, denoiser; also RoentGen, which is one.

Rombach et al. 2022 (arXiv 2112.10752); Chambon et al. 2022 (RoentGen, arXiv 2211.12737); Privacy Distillation,
section 2.1: only the denoiser learns, autoencoder and text encoder stay as they were published. Nothing here reads a
file: :mod:`agent.models.diffusion.stable_loading` does.

The networks are diffusers' and transformers' own, an extra that few sites install. They are built from their
configuration and filled with tensors by name, on our side: ``from_pretrained``, which looks for files on the network,
unpickles, and takes class names from a file, is never called.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from agent.models.features.feature_net import FrozenNetwork
from agent.models.image_tensors import Shape, with_channels
from agent.models.weights import Origin, WeightsError, built
from protos.common.errors import ConfigError

Prediction = Literal["v", "epsilon"]
_PREDICTIONS: Final[Mapping[str, Prediction]] = {"epsilon": "epsilon", "v_prediction": "v"}
_TEXT: Final = (  # of a text encoder's configuration: what shapes it; the rest is about files and versions
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "hidden_act", "layer_norm_eps", "projection_dim", "bos_token_id", "eos_token_id",
)  # fmt: skip
# a denoiser with one of these wants to be told more than a time and a prompt
_MORE: Final = ("addition_embed_type", "class_embed_type", "encoder_hid_dim", "encoder_hid_dim_type",
                "num_class_embeds", "time_cond_proj_dim")  # fmt: skip
_OLD: Final = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}  # before diffusers 0.13
_LONGEST: Final = 1 << 20  # of a number in a configuration
_DEEPEST: Final = 128  # layers


class StableMissingError(ConfigError, RuntimeError):
    """The libraries that hold these networks are not installed."""

    def __init__(self) -> None:
        """Say what to install."""
        super().__init__(
            "weight folders of Stable Diffusion are read with diffusers and transformers, which are not installed: "
            "install lazaret[stable]"
        )


@dataclass(frozen=True, slots=True, eq=False)
class DiffusionPart:
    """One network of a folder: its configuration, and its tensors by name, in float32."""

    config: Mapping[str, Any]
    state: Mapping[str, Tensor] = field(repr=False)


def part_of(config: bytes, weights: bytes) -> DiffusionPart:
    """Read a part.

    Args:
        config: JSON; keys that begin with "_" are about files and versions, and are left out.
        weights: safetensors; half precision becomes float32.
    Raises:
        WeightsError: neither, or a value that is not finite.
    """
    try:
        state = safetensors.torch.load(weights)
    except (safetensors.SafetensorError, KeyError, ValueError) as fault:
        raise WeightsError("the weights are not safetensors of known types") from fault
    told = {key: value for key, value in table(config).items() if not key.startswith("_")}
    numbers = [n for value in told.values() for n in (value if isinstance(value, list) else [value])]
    if not all(-_LONGEST <= n <= _LONGEST for n in numbers if isinstance(n, int | float)):
        raise WeightsError("a number of the configuration is not usable")
    if not all(bool(torch.isfinite(t).all()) for t in state.values() if t.is_floating_point()):
        raise WeightsError("a weight is not finite")
    return DiffusionPart(told, {n: t.float() if t.is_floating_point() else t for n, t in state.items()})


def table(raw: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        WeightsError: it is none.
    """
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as fault:
        raise WeightsError("a configuration is not JSON") from fault
    if not isinstance(told, dict):
        raise WeightsError("a configuration is a JSON object")
    return told


@dataclass(frozen=True, slots=True)
class Schedule:
    """The noise that a denoiser was trained with: sqrt(beta) is linear in time ("scaled linear"), or beta is."""

    prediction: Prediction
    times: int  # T
    first: float  # beta of the first time
    final: float
    scaled: bool  # sqrt(beta) is linear

    def __post_init__(self) -> None:
        """Refuse what is no schedule."""
        if self.prediction not in get_args(Prediction):
            raise ValueError("a schedule predicts v or epsilon")
        if type(self.times) is not int or not 2 <= self.times <= 10_000:
            raise ValueError("a schedule has 2 to 10000 times")
        if not 0.0 < self.first <= self.final < 1.0:
            raise ValueError("the noise of a schedule rises, between 0 and 1")

    @property
    def kept(self) -> Tensor:
        """(T,) float64: abar, the share of the latents' variance that is left at every time (DDPM, Eq. 4)."""
        power = 2.0 if self.scaled else 1.0
        ends = self.first ** (1.0 / power), self.final ** (1.0 / power)
        betas = torch.linspace(*ends, self.times, dtype=torch.float64) ** power
        return (1.0 - betas).cumprod(dim=0)


def schedule_of(told: Mapping[str, Any]) -> Schedule:
    """The schedule of a folder's ``scheduler_config.json``; which sampler stands there is left out.

    Raises:
        WeightsError: one that is not known.
    """
    kinds = {"scaled_linear": True, "linear": False}
    prediction = _PREDICTIONS.get(str(told.get("prediction_type", "epsilon")))
    scaled = kinds.get(str(told.get("beta_schedule")))
    if prediction is None or scaled is None or told.get("trained_betas") or told.get("rescale_betas_zero_snr"):
        raise WeightsError("the scheduler's noise is not one of Stable Diffusion's")
    try:
        return Schedule(prediction, told["num_train_timesteps"], told["beta_start"], told["beta_end"], scaled)
    except (KeyError, TypeError, ValueError) as fault:
        raise WeightsError("the scheduler's configuration describes no schedule") from fault


class StableAutoencoder(FrozenNetwork):
    """A published autoencoder with the face of :class:`agent.models.diffusion.autoencoder.Autoencoder`."""

    def __init__(self, net: Any, shape: Shape, origin: Origin) -> None:
        """Freeze diffusers' AutoencoderKL for images of this shape, (s, s) grey or (s, s, 3).

        It sees colour: a grey image is shown to it three times, and of what it decodes the luma is taken.

        Raises:
            ValueError: a side that it cannot halve so often.
        """
        super().__init__("stable-autoencoder", origin, 1 if len(shape) == 2 else 3)
        self.net: Any = net
        self.shape = shape
        self.scale = float(net.config.scaling_factor)
        factor = 1 << (len(net.config.block_out_channels) - 1)
        if shape[0] != shape[1] or shape[0] % factor or shape[0] < factor:
            raise ValueError(f"this autoencoder's images are squares, their side a multiple of {factor}")
        self.latent = (int(net.config.latent_channels), shape[0] // factor, shape[0] // factor)
        self.freeze()

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """As :meth:`agent.models.diffusion.autoencoder.Autoencoder.encode`."""
        self._fit(x, (self.channels, *self.shape[:2]), "images")
        told = self.net.encode(with_channels(x, 3)).latent_dist
        z: Tensor = told.mean.float()
        if generator is not None:
            noise = torch.randn(z.shape, generator=generator, device=generator.device)
            z = z + told.std.float() * noise.to(z.device)
        return z * self.scale

    def decode(self, z: Tensor) -> Tensor:
        """As :meth:`agent.models.diffusion.autoencoder.Autoencoder.decode`."""
        self._fit(z, self.latent, "latents")
        drawn: Tensor = self.net.decode(z / self.scale).sample
        return with_channels(drawn.float(), self.channels).clamp(-1.0, 1.0)

    def maps(self, images: Tensor, depth: int | None = None) -> list[Tensor]:
        """The scaled latents of images (n, 1 | 3, h, w) of any size: the one map that there is."""
        del depth
        return [self.encode(self.prepared(images, exactly=self.shape[0]))]

    def _fit(self, given: Tensor, shape: tuple[int, ...], what: str) -> None:
        if tuple(given.shape[1:]) != shape:
            raise ValueError(f"this autoencoder's {what} are (n, {', '.join(map(str, shape))})")
        if next(self.parameters()).device != given.device:
            self.to(given.device)


class ClipTokens:
    """Prompts as CLIP's tokens."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        """Take transformers' tokenizer; every prompt has ``length`` tokens."""
        self._tokenizer, self.length = tokenizer, length

    def tokens(self, texts: Sequence[str], length: int | None = None) -> Tensor:
        """Public texts as (n, length) int64, filled up as the text encoder learned it. A row is never all 0.

        Raises:
            ValueError: a text is longer. It would be cut, and its end not be heard.
        """
        length = self.length if length is None else length
        rows = self._tokenizer(list(texts))["input_ids"] if texts else []
        if length > self.length or any(len(row) > length for row in rows):
            raise ValueError(f"a prompt has {self.length - 2} tokens of CLIP at most")
        pad = int(self._tokenizer.pad_token_id)
        return torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows]).reshape(-1, length).long()


class StableDenoiser(nn.Module):
    """A published UNet and its text encoder with the face of ``LatentDenoiser``. Only the UNet learns."""

    def __init__(self, unet: nn.Module, text: nn.Module, clip: ClipTokens) -> None:
        """Take both; the text encoder is frozen."""
        super().__init__()
        self.unet: Any = unet
        self.text: Any = text.requires_grad_(requires_grad=False).train(mode=False)
        self.register_buffer("nothing", clip.tokens([""])[0], persistent=False)

    nothing: Tensor

    def train(self, mode: bool = True) -> StableDenoiser:
        """The text encoder stays in evaluation."""
        super().train(mode)
        self.text.train(mode=False)
        return self

    def forward(self, z: Tensor, t: Tensor, tokens: Tensor) -> Tensor:
        """Predict the noise, or v: the :class:`Schedule` of the folder says which, and the noise level of ``t``.

        Args:
            z: (n, c, h, w) noisy latents.
            t: (n,) int64, 0 .. T - 1.
            tokens: (n, L) int64 of :class:`ClipTokens`; a row of 0 is no condition, the empty prompt.
        Returns:
            (n, c, h, w) float32.
        """
        out: Tensor = self.unet(z, t, encoder_hidden_states=self.context(tokens)).sample
        return out.float()

    @torch.no_grad()
    def context(self, tokens: Tensor) -> Tensor:
        """(n, L, d): what the text encoder says; equal prompts of a batch are read once."""
        empty = self.nothing[: tokens.shape[1]].expand_as(tokens)
        told = torch.where((tokens == 0).all(dim=1, keepdim=True), empty, tokens)
        rows, place = torch.unique(told, dim=0, return_inverse=True)
        read: Tensor = self.text(input_ids=rows).last_hidden_state
        return read[place]


@dataclass(frozen=True, slots=True, eq=False)
class Stable:
    """A whole folder."""

    autoencoder: StableAutoencoder
    denoiser: StableDenoiser
    clip: ClipTokens
    schedule: Schedule
    origin: Origin


def stable_autoencoder(part: DiffusionPart, shape: Shape, origin: Origin) -> StableAutoencoder:
    """Build the autoencoder of a folder.

    Raises:
        StableMissingError: diffusers is not installed.
        WeightsError: it is no autoencoder of Stable Diffusion's, or its tensors do not fit.
    """
    try:
        from diffusers import AutoencoderKL  # noqa: PLC0415 - an extra, and it costs ten seconds
    except ImportError as fault:
        raise StableMissingError from fault
    told = part.config
    scale = told.get("scaling_factor", 0.18215)  # the folders of version 1 do not say it
    if not (type(scale) is float and math.isfinite(scale) and scale > 0.0):
        raise WeightsError("the scale of latents is positive and finite")
    shifted = any(told.get(key) for key in ("shift_factor", "latents_mean", "latents_std"))
    if shifted or told.get("in_channels", 3) != 3:
        raise WeightsError(
            "the autoencoder is of another family: its latents are shifted, or its images are not in colour"
        )
    state = {_renamed(name): tensor for name, tensor in part.state.items()}
    net = _made(lambda: AutoencoderKL(**told), state)
    try:
        return StableAutoencoder(net, shape, origin)
    except ValueError as fault:
        raise WeightsError(str(fault)) from fault


def stable_denoiser(unet: DiffusionPart, text: DiffusionPart, clip: ClipTokens) -> StableDenoiser:
    """Build the denoiser and the text encoder of a folder.

    Raises:
        StableMissingError: diffusers or transformers are not installed.
        WeightsError: other networks, tensors that do not fit, or parts that do not fit together.
    """
    try:
        from diffusers import UNet2DConditionModel  # noqa: PLC0415 - an extra, and it costs ten seconds
        from transformers import CLIPTextConfig, CLIPTextModel  # noqa: PLC0415
    except ImportError as fault:
        raise StableMissingError from fault
    if any(unet.config.get(key) is not None for key in _MORE):
        raise WeightsError("the denoiser needs more inputs than a time and a prompt: it is of another family")
    told = {key: text.config[key] for key in _TEXT if key in text.config}
    layers = told.get("num_hidden_layers")
    if type(layers) is not int or not 1 <= layers <= _DEEPEST:
        raise WeightsError("the text encoder's configuration is not one of a text encoder")
    if told.get("hidden_size") != unet.config.get("cross_attention_dim"):
        raise WeightsError("the denoiser does not fit this text encoder: they are from different folders")
    # published files name the network's outer module, and list the places, which are no weights
    state = {name.removeprefix("text_model."): tensor for name, tensor in text.state.items()}
    state.pop("embeddings.position_ids", None)
    reader = _made(lambda: CLIPTextModel(CLIPTextConfig(**told)), state)
    net = _made(lambda: UNet2DConditionModel(**unet.config), dict(unet.state))
    if clip.length > told.get("max_position_embeddings", 0) or int(clip.tokens([""]).max()) >= told["vocab_size"]:
        raise WeightsError("the text encoder does not know these tokens: they are from different folders")
    return StableDenoiser(net.requires_grad_(requires_grad=True), reader, clip)


def clip_tokens(words: Mapping[str, int], merges: Sequence[tuple[str, str]], pad: str, length: int) -> ClipTokens:
    """Build CLIP's tokenizer (Radford et al. 2021) from its vocabulary and merges.

    Raises:
        StableMissingError: transformers is not installed.
        WeightsError: no vocabulary, or one that numbers a token twice or does not know the marks.
    """
    try:
        from transformers import CLIPTokenizer  # noqa: PLC0415 - an extra, and it costs ten seconds
    except ImportError as fault:
        raise StableMissingError from fault
    marks = {"<|startoftext|>", "<|endoftext|>", pad}
    if not (marks <= words.keys() and all(type(n) is int for n in words.values()) and 3 <= length <= 1024):
        raise WeightsError("the vocabulary has no beginning, end or filling, or prompts have no length")
    if sorted(words.values()) != list(range(len(words))):
        raise WeightsError("the vocabulary does not number its tokens from 0")
    try:
        made = CLIPTokenizer(vocab=dict(words), merges=list(merges), pad_token=pad, model_max_length=length)
    except Exception as fault:  # the reader is not Python: it raises what it likes
        raise WeightsError("the vocabulary and its merges do not fit together") from fault
    return ClipTokens(made, length)


def _made(make: Callable[[], nn.Module], state: Mapping[str, Tensor]) -> Any:
    """As ``built``; what is no weight and not in a file is made anew: places, and nothing else."""
    net = built(make, state)
    saved = net.state_dict().keys()
    for name, buffer in net.named_buffers():
        if name in saved:
            continue
        if not name.endswith("position_ids"):
            raise WeightsError(f"a number is in no file: {name}")
        buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
    return net


def _renamed(name: str) -> str:
    """The names of attention that folders of 2022 have, as they are now."""
    parts = name.split(".")
    if "attentions" in parts and len(parts) >= 2 and parts[-2] in _OLD:
        parts[-2] = _OLD[parts[-2]]
    return ".".join(parts)
