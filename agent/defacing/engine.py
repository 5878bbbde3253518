"""Deface files, folders and pending studies of the vault: read, deface, check, write.

The method, the atlas and the network are put together once (:class:`DefacingMethod`); a study goes through
:func:`agent.defacing.deface.deface`, and comes out whole or keeps its faces.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.defacing import removal_methods
from agent.defacing import template as atlases
from agent.defacing.config import FacesSettings
from agent.defacing.deface import HeadSeries, Method, Result, deface
from agent.defacing.deid_gan.network import Remodeller, remodeller_from
from agent.defacing.face_region import Region
from agent.defacing.head import HeadScan
from agent.defacing.head_mask import threshold
from agent.defacing.quality import examined
from agent.defacing.reidentification.rendering import before_after, camera_at, surface
from agent.defacing.remodel import around_template, remodel
from agent.domain import Volume
from agent.errors import SiteConfigError
from agent.models.weights import WeightsError
from agent.volumes.errors import NotDefacedError
from agent.volumes.volume_io import VolumeSource

ML: Final = 1000.0  # cubic millimetres in a millilitre
PICTURE: Final = 160  # pixels along each edge of a rendering on the report


class NetworkConfigError(SiteConfigError):
    """The network of `remodel` is missing, is none, or is another one than the configuration says."""


@dataclass(frozen=True, slots=True, eq=False)
class DefacingMethod:
    """A method ready to be used."""

    name: str
    method: Method
    atlas: Any = field(repr=False)
    made_of: str = ""  # a digest of all that decides what comes out, but for chance

    def examine(self, volume: Volume, mask: NDArray[np.bool_] | None = None) -> HeadScan:
        """Skin and brain, or the reason why not."""
        return examined(volume, self.atlas, atlases.register, mask)


@dataclass(frozen=True, slots=True, eq=False)
class DefacedStudy:
    """A study without its faces."""

    result: Result
    values: tuple[NDArray[Any], ...]  # stored numbers of each series
    brain_ml: float
    brain_changed: int  # voxels of all series; 0, or nothing would have been given out
    outside_changed: int  # the same, outside the changed masks
    shares: tuple[float, ...]  # of each series' voxels, how many may differ
    picture: bytes = field(default=b"", repr=False)  # PNG of the reference: before above, after below


def network(path: Path, sha256: str = "") -> Remodeller:
    """The network of `remodel`.

    Raises:
        NetworkConfigError: see there.
    """
    try:
        raw = path.read_bytes()
    except OSError:
        raise NetworkConfigError(
            f"file not found: {path.name}. `train remodeller` makes one from public head scans"
        ) from None
    if sha256 and hashlib.sha256(raw).hexdigest() != sha256:
        raise NetworkConfigError(f"{path.name} does not have the SHA-256 of the configuration")
    try:
        return remodeller_from(raw, "public")
    except WeightsError as error:
        raise NetworkConfigError(f"{path.name}: {error}") from None


def tools(settings: FacesSettings) -> DefacingMethod:
    """What a configuration asks for.

    Raises:
        NetworkConfigError: of `remodel`.
    """
    template = atlases.atlas()
    digest = hashlib.sha256(template.values.tobytes()).hexdigest()
    said = f"{version('lazaret')} {digest} {settings.method} {settings.parts}"
    if settings.network is not None:
        made = around_template(network(settings.network, settings.network_sha256), template)
        region = Region(parts="face" if settings.parts == "face" else "surface")
        method: Method = lambda head, rng: remodel(head, made, region, rng, made.coarse)  # noqa: E731 - closes over the network
        return DefacingMethod(settings.method, method, template, _digest(said + made.origin.sha256))
    return DefacingMethod(settings.method, removal_methods.METHODS[settings.method], template, _digest(said))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def take_off(
    study: Sequence[VolumeSource],
    with_: DefacingMethod,
    mask: NDArray[np.bool_] | None = None,
    *,
    picture: bool = False,
) -> DefacedStudy:
    """Take the faces off one study, by chance of the operating system: the same scan gets another face each time.

    Args:
        study: its series.
        with_: the method.
        mask: a brain mask of the operator's own, on the oriented grid of the one series that there is.
        picture: also render the reference before and after. The upper row shows the person's face.

    Raises:
        NotDefacedError: the faces stay where they are.
    """
    seen = [source.seen() for source in study]
    rng = np.random.default_rng(secrets.randbits(128))
    series = [HeadSeries(volume, source.frame_of_reference) for volume, source in zip(seen, study, strict=True)]
    result = deface(series, partial(with_.examine, mask=mask), with_.method, rng, atlases.rigid)
    values = tuple(source.unseen(made) for source, made in zip(study, result.values, strict=True))
    brain = outside = 0
    for source, made, changed, kept in zip(study, values, result.changed, result.kept, strict=True):
        differs = _bits(made) != _bits(source.volume.values)
        brain += int((differs & kept).sum())
        outside += int((differs & ~changed).sum())
    if brain:  # of what is written, after rounding and scales
        raise NotDefacedError("brain_changed")
    if outside:
        raise ValueError("a voxel outside the changed mask differs")
    head = result.head
    edge = float(abs(np.linalg.det(head.volume.affine[:3, :3])))
    shown = _picture(head, seen[result.reference], result.values[result.reference]) if picture else b""
    shares = tuple(float(changed.mean()) for changed in result.changed)
    return DefacedStudy(result, values, float(head.brain.tight.sum()) * edge / ML, brain, outside, shares, shown)


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _picture(head: HeadScan, before: Volume, after: NDArray[Any]) -> bytes:
    level = threshold(before.values)
    camera = camera_at(head.brain.to_template, PICTURE)
    bare = replace(before, values=after)
    return before_after(surface(before, level), surface(bare, level), camera)
