"""A task's transforms as MONAI's: the fixed ones of the input, and views of it that are drawn anew for each step.

What a network sees of a patient must hang on this patient's record, the task and randomness that no patient is in,
whoever else is there. So every fixed transform looks at one picture alone, and the seed of a view is a keyed hash of
the patient's pseudonym, the step and the view: neither the place in a batch nor the number of patients is in it.
A mask goes through the same turns and crops as its picture, by its nearest index, and through no change of values.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from monai.data.meta_tensor import MetaTensor
from monai.transforms.compose import Compose
from monai.transforms.croppad.dictionary import (
    CenterSpatialCropd,
    CropForegroundd,
    DivisiblePadd,
    ResizeWithPadOrCropd,
    SpatialPadd,
)
from monai.transforms.intensity.dictionary import (
    NormalizeIntensityd,
    RandAdjustContrastd,
    RandGaussianNoised,
    RandGaussianSmoothd,
    RandScaleIntensityd,
    RandShiftIntensityd,
    ScaleIntensityd,
    ScaleIntensityRanged,
    ScaleIntensityRangePercentilesd,
)
from monai.transforms.spatial.dictionary import (
    Orientationd,
    RandAffined,
    RandFlipd,
    RandRotate90d,
    RandZoomd,
    Resized,
    Spacingd,
)
from numpy.typing import NDArray
from torch import Tensor

from agent.errors import TransformError
from policies.tasks.transforms import TransformSpec
from protos.common.errors import out_of_memory

_PICTURE, _MASK = "pixels", "mask"
_VALUES: Final[Mapping[str, type[Any]]] = {  # of the picture alone, by the parameters of the task
    "ScaleIntensity": ScaleIntensityd,
    "ScaleIntensityRange": ScaleIntensityRanged,
    "ScaleIntensityRangePercentiles": ScaleIntensityRangePercentilesd,
    "NormalizeIntensity": NormalizeIntensityd,
    "RandGaussianNoise": RandGaussianNoised,
    "RandAdjustContrast": RandAdjustContrastd,
    "RandScaleIntensity": RandScaleIntensityd,
    "RandShiftIntensity": RandShiftIntensityd,
}
_PLACES: Final[Mapping[str, type[Any]]] = {  # of picture and mask alike
    "Orientation": Orientationd,
    "CenterSpatialCrop": CenterSpatialCropd,
    "SpatialPad": SpatialPadd,
    "ResizeWithPadOrCrop": ResizeWithPadOrCropd,
    "DivisiblePad": DivisiblePadd,
    "RandFlip": RandFlipd,
    "RandRotate90": RandRotate90d,
}
_BETWEEN: Final[Mapping[str, tuple[type[Any], str]]] = {  # and how values between pixels of a picture are found
    "Resize": (Resized, "area"),
    "Spacing": (Spacingd, "bilinear"),
    "RandAffine": (RandAffined, "bilinear"),
    "RandZoom": (RandZoomd, "area"),
}
_AXES: Final = (("L", "R"), ("P", "A"), ("I", "S"))
_IN_SPACE: Final = ("Orientation", "Spacing")  # that need to know where the picture lies

Picture = NDArray[np.float32]  # (channels, *size)
Mask = NDArray[np.int64]  # (*size)


@dataclass(frozen=True, slots=True, eq=False)
class InputPipeline:
    """The fixed transforms of a task: the same picture gives the same input, on every site of the same versions."""

    specs: tuple[TransformSpec, ...]
    size: tuple[int, ...]  # of the network's input

    def __post_init__(self) -> None:
        """Refuse what draws numbers."""
        if any(spec.random for spec in self.specs):
            raise ValueError("an input takes fixed transforms alone")

    def __call__(
        self, pixels: Picture, mask: Mask | None = None, affine: NDArray[np.float64] | None = None
    ) -> tuple[Picture, Mask | None]:
        """The picture as the network sees it, and its mask.

        Args:
            pixels: (channels, *any size).
            mask: (*the same size), whole numbers.
            affine: (4, 4) of a volume, voxel to RAS+ millimetres; what turns and resamples by it needs one.
        Raises:
            TransformError: a transform cannot take this picture, or the last one gives another size.
        """
        return _settled(self._transformed(pixels, mask, affine), self.size)

    def placed(self, pixels: Picture) -> tuple[Picture, NDArray[np.float64]]:
        """The picture as the network sees it, by the same transforms, and where each of its pixels came from.

        Args:
            pixels: (channels, *any size), in d dimensions.
        Returns:
            The picture; (d + 1, d + 1), from an index of it to one of ``pixels``.
        Raises:
            TransformError: as above.
        """
        held = self._transformed(pixels, None, None)
        whole = np.asarray(getattr(held[_PICTURE], "affine", torch.eye(4)), np.float64)
        count = len(self.size)
        place = np.eye(count + 1)
        place[:count, :count], place[:count, count] = whole[:count, :count], whole[:count, -1]
        return _settled(held, self.size)[0], place

    def _transformed(
        self, pixels: Picture, mask: Mask | None, affine: NDArray[np.float64] | None
    ) -> dict[str, Tensor]:
        held = _held(pixels, mask, affine)
        for spec in self.specs:
            if spec.name in _IN_SPACE and affine is None:
                raise TransformError(f"{spec.name} needs a picture that knows its place in space")
            held = _applied(_made(spec, len(self.size), with_mask=mask is not None), held, spec.name)
        return held


@dataclass(frozen=True, slots=True, eq=False)
class Augmentation:
    """The random transforms of a task. None of them changes the size."""

    specs: tuple[TransformSpec, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what draws nothing, and a quarter turn of what is not square."""
        if not all(spec.random for spec in self.specs):
            raise ValueError("an augmentation takes random transforms alone")
        if any(spec.name == "RandRotate90" for spec in self.specs) and self.size[0] != self.size[1]:
            raise TransformError("RandRotate90 needs pictures whose first two sides are equal")

    def __call__(self, pixels: Picture, mask: Mask | None, seed: int) -> tuple[Picture, Mask | None]:
        """One view of a picture and its mask; ``seed`` is of :func:`view_seed`. No global generator is touched."""
        made = [_made(spec, len(self.size), with_mask=mask is not None) for spec in self.specs]
        every = Compose(made).set_random_state(seed=seed)
        return _settled(_applied(every, _held(pixels, mask, None), "the augmentation"), self.size)


def view_seed(secret: bytes, pseudonym: str, step: int, view: int) -> int:
    """The seed of one view of one patient's pictures in one step, below 2^32.

    Of this patient and of the site's secret or the task's public seed: whoever else is in the batch, and in which
    order, does not change it.
    """
    told = f"lazaret view\0{pseudonym}\0{step}\0{view}".encode()
    return int.from_bytes(hmac.digest(secret, told, hashlib.sha256)[:4], "big")


def monai_class(name: str) -> type[Any]:
    """MONAI's class of a transform that a task may name."""
    own: dict[str, type[Any]] = {"CropForeground": CropForegroundd, "RandGaussianSmooth": RandGaussianSmoothd}
    found: type[Any] = {**_VALUES, **_PLACES, **{one: kind for one, (kind, _) in _BETWEEN.items()}, **own}[name]
    return found


def moves_pixels(name: str) -> bool:
    """Whether it moves pixels, of picture and mask alike; else it changes their values."""
    return name in _PLACES or name in _BETWEEN or name == "CropForeground"


def monai_arguments(spec: TransformSpec, dimensions: int, *, with_mask: bool) -> dict[str, Any]:
    """What its class in MONAI gets beside its keys; of ``CropForeground`` without its function."""
    given = dict(spec.parameters)
    for key in ("rotate_range", "shear_range", "translate_range", "scale_range"):
        if key in given:
            given[key] = spec.for_axes(key, dimensions)
    if spec.name == "Orientation":
        given["labels"] = _AXES
    if spec.name in _BETWEEN:
        modes = [_BETWEEN[spec.name][1], "nearest"]
        given["mode"] = modes[: 1 + with_mask]
    if spec.name == "RandAffine":
        given["padding_mode"] = "border"
    if spec.name == "RandGaussianSmooth":
        sigma = given.pop("sigma")
        given |= {"sigma_x": sigma, "sigma_y": sigma, "sigma_z": sigma}
    return given


def _made(spec: TransformSpec, dimensions: int, *, with_mask: bool) -> Callable[..., Any]:
    """MONAI's transform of a task's."""
    keys = [_PICTURE, _MASK] if with_mask and moves_pixels(spec.name) else [_PICTURE]
    given = monai_arguments(spec, dimensions, with_mask=len(keys) == 2)
    if spec.name == "CropForeground":
        above = partial(torch.gt, other=given.pop("threshold"))
        given |= {"source_key": _PICTURE, "select_fn": above}
    return monai_class(spec.name)(keys, **given)  # type: ignore[no-any-return]


def _held(pixels: Picture, mask: Mask | None, affine: NDArray[np.float64] | None) -> dict[str, Tensor]:
    """As MONAI's dictionary transforms take them: channels first, copies, with their place in space."""
    place = torch.eye(4, dtype=torch.float64) if affine is None else torch.from_numpy(affine.astype(np.float64))
    held = {_PICTURE: MetaTensor(torch.from_numpy(pixels.astype(np.float32)), affine=place.clone())}
    if mask is not None:
        if mask.shape != pixels.shape[1:]:
            raise TransformError("a mask has the size of its picture")
        held[_MASK] = MetaTensor(torch.from_numpy(mask[None].astype(np.float32)), affine=place.clone())
    return dict(held)


def _applied(transform: Callable[..., Any], held: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    try:
        found = transform(held)
    except (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError) as fault:
        if out_of_memory(fault):
            raise  # of this machine, and not of the picture: the picture must not be left out for it
        # MONAI says what was in the picture: its text stays here
        raise TransformError(f"{name} cannot take a picture of this form") from fault
    if not found[_PICTURE].numel():
        raise TransformError(f"{name} leaves nothing of a picture")
    return dict(found)


def _settled(held: Mapping[str, Tensor], size: Sequence[int]) -> tuple[Picture, Mask | None]:
    pixels = np.ascontiguousarray(np.asarray(held[_PICTURE].detach().cpu(), np.float32))
    if pixels.shape[1:] != tuple(size):
        raise TransformError(
            f"the transforms give {' x '.join(map(str, pixels.shape[1:]))} pixels, and the task's input has "
            f"{' x '.join(map(str, size))}: end them with Resize or ResizeWithPadOrCrop"
        )
    if not bool(np.isfinite(pixels).all()):
        raise TransformError("the transforms give a number that is not finite")
    if _MASK not in held:
        return pixels, None
    return pixels, np.ascontiguousarray(np.rint(np.asarray(held[_MASK].detach().cpu()[0])).astype(np.int64))
