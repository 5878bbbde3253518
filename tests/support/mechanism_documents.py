"""Configurations of mechanisms as documents, the TOML text of them, and the networks that they name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from agent.mechanisms.centroids.config import make_codebook
from agent.mechanisms.common.stylegan_codec import StyledCodec
from agent.mechanisms.distillation.config import PARTS
from tests.support.distillation_networks import CONDITIONS, network_files
from tests.support.networks import codec, files, recogniser_file

DOCS = Path(__file__).parents[2] / "deploy" / "docs"
KSALSA: Mapping[str, Any] = {
    "mechanism": "ksalsa",
    "cohort": {"modality": "OP"},
    "clusters": {"k": 5, "l_diversity": 2},
    "networks": {"generator": "generator.safetensors", "encoder": "encoder.safetensors"},
    "alignment": {"steps": 2},
}
ANONFACES: Mapping[str, Any] = {
    "mechanism": "anonfaces",
    "cohort": {"modality": "OP"},
    "clusters": {"k": 5, "l_diversity": 2},
    "networks": {
        "generator": "generator.safetensors",
        "encoder": "encoder.safetensors",
        "recognisers": ["recogniser-0.safetensors", "recogniser-1.safetensors"],
    },
}


def toml(document: Mapping[str, Any]) -> str:
    plain = [f"{key} = {value(one)}" for key, one in document.items() if not isinstance(one, Mapping)]
    for key, one in document.items():
        if isinstance(one, Mapping):
            plain += [f"[{key}]", *(f"{name} = {value(inner)}" for name, inner in one.items())]
    return "\n".join(plain) + "\n"


def value(one: Any) -> str:
    if isinstance(one, Mapping):
        return "{" + ", ".join(f"{key} = {value(inner)}" for key, inner in one.items()) + "}"
    return json.dumps(one)


def changed(document: Mapping[str, Any], **tables: Any) -> dict[str, Any]:
    """With other keys in a table; a table that is None is left out, a key that is None too."""
    out = dict(document)
    for name, keys in tables.items():
        told = {**out.get(name, {}), **keys} if isinstance(keys, Mapping) else keys
        out[name] = {k: v for k, v in told.items() if v is not None} if isinstance(told, Mapping) else told
    return {name: told for name, told in out.items() if told is not None}


def sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def lay_networks(folder: Path, channels: int = 3) -> frozenset[str]:
    """Every network that ``KSALSA`` and ``ANONFACES`` name; the digests are returned."""
    named = dict(zip(("generator.safetensors", "encoder.safetensors"), files(channels), strict=True))
    named |= {f"recogniser-{seed}.safetensors": recogniser_file(seed, channels=channels) for seed in (0, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in named.items():
        (folder / name).write_bytes(raw)
    return frozenset(map(sha, named.values()))


DISTILL: Mapping[str, Any] = {
    "mechanism": "distill",
    "conditions": list(CONDITIONS.names),
    "templates": list(CONDITIONS.templates),
    "cohort": {"modality": "CR"},
    "teacher": {"steps": 3, "preset": "tiny", "batch": 4, "sampling_steps": 2, "sampling_batch": 8},
    "student": {"steps": 2},
    "sampling": {"candidates": 2, "groups": 2},
    "output": {"pictures": 6},
}
DISTILL_DP: Mapping[str, Any] = {
    **DISTILL,
    "mechanism": "distill-dp",
    "privacy": {"noise_multiplier": 4.0, "steps": 3, "sampling_rate": 0.25, "public_patients": 200},
    "public": {"pictures": "pictures", "labels": "labels.csv"},
}


def pinned() -> dict[str, str]:
    """``[networks]`` as it is written for the files of the shelf."""
    names = {part: f"{part}.safetensors" for part in PARTS}
    digests = {f"{part}_sha256": hashlib.sha256(raw).hexdigest() for part, raw in network_files().items()}
    return {**names, **digests}


CENTROIDS = """
mechanism = "centroids"
[cohort]
modality = "OP"
[networks]
generator = "generator.safetensors"
encoder = "encoder.safetensors"
codebook = "codebook.safetensors"
[privacy]
count_noise = 7
noise_multiplier = 4.5
[cells]
classes = ["0", "1", "2"]
public_patients = 900
"""


@cache
def centroids_codebook() -> bytes:
    """A codebook of sixty digits and three flat images, for the codec of these networks."""
    digits = (load_digits().images / 16).astype(np.float32)[np.random.default_rng(7).permutation(1797)[:60]]
    large = np.rint(digits.repeat(4, axis=1).repeat(4, axis=2) * 255).astype(np.uint8)
    flat = np.full((3, 32, 32), 90, np.uint8)
    return make_codebook(codec_as_read(), np.concatenate([flat, large]), (3, 4), np.random.default_rng(0))


def codec_as_read() -> StyledCodec:
    """The test codec as a configuration without passes reads it."""
    return replace(codec(), passes=codec().encoder.architecture.passes)
