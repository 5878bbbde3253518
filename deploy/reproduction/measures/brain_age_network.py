"""Age in years from a whole head: a three-dimensional ResNet-18, as the paper judges de-faced heads by (Fig. 4b).

C-DeID-GAN, section 4.2: a 3D adaptation of ResNet-18 (He et al. 2016) with an L2 loss, trained on whole heads, so
that it may read cues outside the brain too, those that de-facing changes. It is a measure, not a doctor: trained on
made heads it knows what their maker made of age, and nothing of anybody's health.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agent.domain import Volume
from agent.models.weights import Origin, Provenance, WeightsError, built, pack, unpack
from agent.volumes.grid import averaged, cube_at

KIND: Final = "brain_age"
WHITEST: Final = 1.5  # of the 99th percentile inside the brain: what is brighter is clipped, as in gamma
_AT_ONCE: Final = 1 << 21  # voxels that are looked at together
_PLANES: Final = (64, 128, 256, 512)  # channels of ResNet-18


@dataclass(frozen=True, slots=True)
class AgeArchitecture:
    """The public shape of the network."""

    side: int = 32  # voxels
    extent_mm: float = 256.0  # of the cube
    width: float = 0.25  # of ResNet-18's 64 to 512 channels
    first: int = 3  # voxels: the first filter; the paper's field has 7
    stride: int = 1  # of the first filter
    groups: int = 8

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        whole = (self.side, self.first, self.stride, self.groups)
        if not all(type(n) is int and n >= 1 for n in whole) or not 16 <= self.side <= 256 or self.first % 2 == 0:
            raise ValueError("sizes are whole numbers, the side is 16 to 256 and the first filter is odd")
        if not (0.0 < self.width <= 4.0 and 100.0 <= self.extent_mm <= 1000.0):
            raise ValueError("a width lies between 0 and 4, and a cube is 100 to 1000 mm wide")
        if any(int(planes * self.width) % self.groups or not int(planes * self.width) for planes in _PLANES):
            raise ValueError("the groups divide the channels of every block")


PRESETS: Final[Mapping[str, AgeArchitecture]] = MappingProxyType(
    {
        "tiny32": AgeArchitecture(),
        "small64": AgeArchitecture(64, width=0.5),
        "base128": AgeArchitecture(128, width=1.0, first=7, stride=2),
    }
)


@dataclass(frozen=True, slots=True)
class Scale:
    """What a network's numbers mean: ``mean + deviation * number`` years."""

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        """Finite, and ages that differ."""
        if not (math.isfinite(self.mean) and math.isfinite(self.deviation) and self.deviation > 0.0):
            raise ValueError("ages have a finite mean and a positive deviation")


class AgeNet(nn.Module):
    """What is trained: (n, 1, s, s, s) in [0, 1] to (n,), in deviations from the mean age."""

    def __init__(self, architecture: AgeArchitecture) -> None:
        """Make the layers; call inside ``seeded``."""
        # MONAI takes two seconds to import, and every process of an agent would pay them
        from monai.networks.nets.resnet import resnet18  # noqa: PLC0415

        super().__init__()
        self.architecture = architecture
        net = resnet18(
            spatial_dims=3,
            n_input_channels=1,
            num_classes=1,
            conv1_t_size=architecture.first,
            conv1_t_stride=architecture.stride,
            widen_factor=architecture.width,
        )
        # MONAI 1.6.1 takes a norm but hands it to the first layer only; a head's age may depend on no other head's
        _without_batches(net, architecture.groups)
        self.net: Any = net

    def forward(self, x: Tensor) -> Tensor:
        """Ages in deviations from the mean."""
        out: Tensor = self.net(x)
        return out[:, 0]


def _without_batches(module: nn.Module, groups: int) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm3d):
            setattr(module, name, nn.GroupNorm(groups, child.num_features))
        else:
            _without_batches(child, groups)


class BrainAge:
    """A trained network, frozen, with its scale and origin."""

    def __init__(self, net: AgeNet, scale: Scale, origin: Origin) -> None:
        """Freeze the network."""
        self.net = net.train(mode=False).requires_grad_(requires_grad=False)
        self.scale, self.origin = scale, origin

    @property
    def architecture(self) -> AgeArchitecture:
        """The public shape of the network."""
        return self.net.architecture


def head_cube(
    volume: Volume, brain: NDArray[np.bool_], to_template: NDArray[np.float64], architecture: AgeArchitecture
) -> NDArray[np.float32]:
    """A whole head as the network sees it: (s, s, s) in [0, 1].

    Args:
        volume: RAS+ oriented.
        brain: (i, j, k) of its grid; its 99th percentile sets the brightness, so that a changed face does not.
        to_template: of the head; give that of the original for a de-faced one too: the brain has not moved.
        architecture: of the network.
    Raises:
        ValueError: no brain, or one without a signal.
    """
    inside = volume.values[brain]
    level = float(np.quantile(inside, 0.99)) if len(inside) else 0.0
    if not level > 0.0:
        raise ValueError("there is no brain with a signal to set the brightness by")
    cube = cube_at(to_template, architecture.side, architecture.extent_mm)
    least = float(min(volume.values.min(), 0))  # a CT's air lies below 0, and is clipped
    seen = averaged(volume.values, volume.affine, cube.shape, cube.affine, least)
    bright: NDArray[np.float32] = np.clip(seen / np.float32(level * WHITEST), np.float32(0), np.float32(1))
    return bright


@torch.no_grad()
def predicted(brain_age: BrainAge, cubes: NDArray[np.float32]) -> NDArray[np.float64]:
    """Ages in years, each head's on its own.

    Args:
        brain_age: trained.
        cubes: (n, s, s, s) of :func:`head_cube`.
    Returns:
        (n,) float64, years.
    Raises:
        ValueError: another shape, or values that are not finite.
    """
    side = brain_age.architecture.side
    if cubes.shape[1:] != (side, side, side) or not len(cubes) or not bool(np.isfinite(cubes).all()):
        raise ValueError(f"cubes are (n, {side}, {side}, {side}) finite numbers")
    device = next(brain_age.net.parameters()).device
    count = max(1, _AT_ONCE // side**3)
    parts = [
        brain_age.net(torch.from_numpy(np.array(cubes[at : at + count], np.float32))[:, None].to(device))
        for at in range(0, len(cubes), count)
    ]
    told = torch.cat(parts).double().cpu().numpy()
    years: NDArray[np.float64] = brain_age.scale.mean + brain_age.scale.deviation * told
    return years


def brain_age_bytes(net: AgeNet, scale: Scale, notes: Mapping[str, Any]) -> bytes:
    """A network as one file; ``notes`` say how it was trained."""
    config = {"architecture": asdict(net.architecture), "scale": asdict(scale)}
    return pack(KIND, config, notes, net.state_dict())


def brain_age_from(raw: bytes, provenance: Provenance = "file") -> BrainAge:
    """Read what :func:`brain_age_bytes` wrote.

    Raises:
        WeightsError: not such a file, or its configuration describes no such network.
    """
    packed = unpack(raw, KIND)
    try:
        if packed.config.keys() != {"architecture", "scale"}:
            raise ValueError("a network of ages has an architecture and a scale")
        told, scale = packed.config["architecture"], packed.config["scale"]
        if told.keys() != {f.name for f in fields(AgeArchitecture)} or scale.keys() != {"mean", "deviation"}:
            raise ValueError("unknown or missing keys")
        architecture, years = AgeArchitecture(**told), Scale(**scale)
    except (TypeError, ValueError, AttributeError) as fault:
        raise WeightsError("the file's configuration describes no network of ages") from fault
    net = built(lambda: AgeNet(architecture), packed.state)
    return BrainAge(net, years, Origin(provenance, packed.sha256))
