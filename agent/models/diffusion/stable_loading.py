"""Reading a weight folder as diffusers writes it: Stable Diffusion 1 and 2, RoentGen. Local, and safetensors only.

Every file is read once, and the same bytes are hashed, checked against the site's list and used, so they cannot be
swapped in between. The safety checker, the image processor and all other files are ignored. Class names in the folder
are compared with the known ones, never imported (P13).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from agent.models.diffusion import stable_diffusion
from agent.models.image_tensors import Shape
from agent.models.published.loading import PublishedWeightsError
from agent.models.weights import Origin, WeightsError

_PIPELINES: Final = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline")
_PARTS: Final = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
_WEIGHTS: Final = {
    "unet": ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"),
    "vae": ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"),
    "text_encoder": ("model.safetensors", "model.fp16.safetensors"),
}
_SMALL: Final = 32 << 20  # bytes of a configuration or a vocabulary
_LARGE: Final = 16 << 30  # of weights
_SIDE: Final = 8 * 64  # px, where the folder does not say for how large latents its denoiser is
# no library asks the network for anything, should a later version want to
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def folder_digest(folder: Path) -> str:
    """What to vouch for: SHA-256 over the names and digests of the files that :func:`load_stable` uses.

    Raises:
        WeightsError: a file is missing, too large, or cannot be read.
    """
    return _digest(_contents(folder))


def load_stable(folder: Path, vouched: Collection[str], shape: Shape | None = None) -> stable_diffusion.Stable:
    """Read a folder that the site vouches for.

    Args:
        folder: with model_index.json, unet/, vae/, text_encoder/, tokenizer/ and scheduler/.
        vouched: SHA-256 in lower-case hexadecimal, by the site's configuration: that of the folder
            (:func:`folder_digest`), or those of every file that is used. There is no way around it.
        shape: of the images, (s, s) grey or (s, s, 3); None for colour at the size of the denoiser's training.
    Returns:
        The networks, on the CPU; their provenance is ``public``, for they are vouched for.
    Raises:
        PublishedWeightsError: nobody vouches for it.
        StableMissingError: diffusers or transformers are not installed.
        WeightsError: files that are missing, are no safetensors, or describe other networks.
    """
    files = _contents(folder)
    digest = _digest(files)
    if digest not in vouched and not all(hashlib.sha256(raw).hexdigest() in vouched for raw in files.values()):
        raise PublishedWeightsError("the folder contains files that are not vouched for")
    os.environ.update(_OFFLINE)
    _known(stable_diffusion.table(files["model_index.json"]))
    origin = Origin("public", digest)
    clip = _clip(files)
    unet = _part(files, "unet")
    denoiser = stable_diffusion.stable_denoiser(unet, _part(files, "text_encoder"), clip)
    vae = _part(files, "vae")
    if vae.config.get("latent_channels", 4) != unet.config.get("in_channels", 4):
        raise WeightsError("autoencoder and denoiser have other latents: they are from different folders")
    autoencoder = stable_diffusion.stable_autoencoder(vae, shape or _usual(unet, vae), origin)
    schedule = stable_diffusion.schedule_of(stable_diffusion.table(files["scheduler/scheduler_config.json"]))
    return stable_diffusion.Stable(autoencoder, denoiser, clip, schedule, origin)


def _contents(folder: Path) -> dict[str, bytes]:
    """The files that are used, by their names below the folder."""
    files = {"model_index.json": b"", "scheduler/scheduler_config.json": b""}
    files = {name: _read(folder, name, _SMALL) for name in files}
    for part, names in _WEIGHTS.items():
        files[f"{part}/config.json"] = _read(folder, f"{part}/config.json", _SMALL)
        found = next((name for name in names if (folder / part / name).is_file()), None)
        if found is None:
            raise WeightsError(f"{part}: no {names[0]}. Weights are one file of safetensors, and never unpickled")
        files[f"{part}/{found}"] = _read(folder, f"{part}/{found}", _LARGE)
    whole = (folder / "tokenizer" / "vocab.json").is_file()
    needed = ["vocab.json", "merges.txt"] if whole else ["tokenizer.json"]
    optional = [n for n in ("special_tokens_map.json",) if (folder / "tokenizer" / n).is_file()]
    for name in (*needed, "tokenizer_config.json", *optional):
        files[f"tokenizer/{name}"] = _read(folder, f"tokenizer/{name}", _SMALL)
    return files


def _read(folder: Path, name: str, most: int) -> bytes:
    try:
        path = folder / name
        if path.stat().st_size > most:
            raise WeightsError(f"{name}: the file is too large for its name")
        return path.read_bytes()
    except OSError:
        raise WeightsError(f"{name}: the file is missing or cannot be read") from None


def _digest(files: dict[str, bytes]) -> str:
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _known(index: dict[str, Any]) -> None:
    if index.get("_class_name") not in _PIPELINES:
        raise WeightsError("model_index.json: the folder is not one of Stable Diffusion's")
    for part, names in _PARTS.items():
        told = index.get(part)
        if not isinstance(told, list) or len(told) != 2 or told[1] not in names:
            raise WeightsError(f"model_index.json: {part} is not {names[0]}")


def _part(files: dict[str, bytes], part: str) -> stable_diffusion.DiffusionPart:
    weights = next(raw for name, raw in files.items() if name.startswith(f"{part}/") and name.endswith("tensors"))
    try:
        return stable_diffusion.part_of(files[f"{part}/config.json"], weights)
    except WeightsError as fault:
        raise WeightsError(f"{part}: {fault}") from fault


def _usual(unet: stable_diffusion.DiffusionPart, vae: stable_diffusion.DiffusionPart) -> Shape:
    """The size that the denoiser was trained at."""
    latent, levels = unet.config.get("sample_size"), vae.config.get("block_out_channels")
    side = latent << (len(levels) - 1) if type(latent) is int and isinstance(levels, list) and levels else _SIDE
    return (side, side, 3)


def _clip(files: dict[str, bytes]) -> stable_diffusion.ClipTokens:
    """The tokenizer, of the two files that it was published with or of the one that is written now."""
    told = stable_diffusion.table(files["tokenizer/tokenizer_config.json"])
    if "tokenizer/vocab.json" in files:
        words: Any = stable_diffusion.table(files["tokenizer/vocab.json"])
        # utf-8 beyond any doubt: merges are written in it whatever the machine's own encoding
        lines = files["tokenizer/merges.txt"].decode("utf-8", "replace").split("\n")
        merges: Any = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
    else:
        model = stable_diffusion.table(files["tokenizer/tokenizer.json"]).get("model")
        model = model if isinstance(model, dict) else {}
        words, merges = model.get("vocab"), model.get("merges")
        merges = [m.split(" ") if isinstance(m, str) else m for m in merges] if isinstance(merges, list) else None
    if not isinstance(words, dict) or merges is None:
        raise WeightsError("tokenizer: no vocabulary")
    if not all(isinstance(m, list) and len(m) == 2 and all(isinstance(half, str) for half in m) for m in merges):
        raise WeightsError("tokenizer: a merge has two halves")
    special = stable_diffusion.table(files.get("tokenizer/special_tokens_map.json", b"{}"))
    pad = special.get("pad_token") or told.get("pad_token") or "<|endoftext|>"
    pad = pad.get("content") if isinstance(pad, dict) else pad
    length = told.get("model_max_length")
    if not isinstance(pad, str) or type(length) is not int:
        raise WeightsError("tokenizer: no filling, or no length")
    return stable_diffusion.clip_tokens(words, [(m[0], m[1]) for m in merges], pad, length)
