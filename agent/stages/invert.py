"""Invert images to latent codes and decode codes to images: the classical, linear generator.

The PCA of k-Same-PCA (k-SALSA, section 4.2; Newton, Sweeney & Malin 2005 average the eigenvector
coefficients of k faces). A network's encoder and generator take the same two places in the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from agent.nouns import Cohort, Latents

Provenance = Literal["public", "private"]
_FIELDS: Final = {"mean", "components", "shape", "provenance"}
_ORTHONORMAL: Final = 1e-3  # float32 components: far above rounding, far below a wrong basis


class BadBasis(ValueError):
    """The bytes are no basis, or its arrays do not fit together."""


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """An affine subspace of images with its provenance: encoder and generator of the classical baseline.

    A basis fitted on private patients is a function of every one of them, so an image decoded by it is
    not k-anonymous (design P6): the product fits it on public images only.
    """

    mean: NDArray[np.float32]  # (p,), p = h * w
    components: NDArray[np.float32]  # (d, p), orthonormal rows
    shape: tuple[int, int]  # (h, w)
    provenance: Provenance

    def __post_init__(self) -> None:
        """Refuse arrays that are no basis and an origin that is not said."""
        p = self.shape[0] * self.shape[1]
        if self.mean.shape != (p,) or self.components.ndim != 2 or self.components.shape[1] != p:
            raise BadBasis("mean must be (p,) and components (d, p), with p = h * w")
        if self.mean.dtype != np.float32 or self.components.dtype != np.float32:
            raise BadBasis("mean and components must be float32")
        d = self.components.shape[0]
        if not 1 <= d <= p or not bool(np.isfinite(self.mean).all()):
            raise BadBasis("a basis has between 1 and p components and a finite mean")
        gram = self.components.astype(np.float64) @ self.components.T.astype(np.float64)
        if not float(np.abs(gram - np.eye(d)).max()) <= _ORTHONORMAL:
            raise BadBasis("components must be orthonormal")
        if self.provenance not in get_args(Provenance):
            raise BadBasis("provenance must be public or private")


def fit_basis(images: NDArray[np.float32], d: int, provenance: Provenance) -> Basis:
    """Fit the ``d`` principal components of ``images`` (n, h, w), intensities in [0, 1].

    Deterministic: the largest entry of every component is made positive.

    Raises:
        ValueError: not (n, h, w), not finite, or fewer than d + 1 images or d pixels.
    """
    if images.ndim != 3 or not bool(np.isfinite(images).all()):
        raise ValueError("images must be a finite (n, h, w) array")
    n, h, w = images.shape
    if not 1 <= d <= min(n - 1, h * w):
        raise ValueError("a basis of d components needs more than d images and at least d pixels")
    flat = images.reshape(n, h * w).astype(np.float64)
    mean = flat.mean(axis=0)
    _, _, components = np.linalg.svd(flat - mean, full_matrices=False)
    components = components[:d]
    largest = np.abs(components).argmax(axis=1)
    components = components * np.sign(components[np.arange(d), largest])[:, None]
    return Basis(mean.astype(np.float32), components.astype(np.float32), (h, w), provenance)


def invert(cohort: Cohort, basis: Basis) -> Latents:
    """Project each patient's images on the basis and average them: one code for one patient (P3).

    Returns:
        Latents with codes (n, d) float32, in the cohort's order.
    Raises:
        ValueError: the cohort's images have another shape than the basis.
    """
    codes = np.empty((len(cohort.patients), basis.components.shape[0]), np.float32)
    for row, patient in zip(codes, cohort.patients, strict=True):
        stack = np.stack([image.pixels for image in patient.images])
        if stack.shape[1:] != basis.shape:
            raise ValueError("the images do not have the shape that the basis was fitted on")
        row[:] = (stack.mean(axis=0).ravel() - basis.mean) @ basis.components.T
    return Latents(codes, tuple(patient.pseudonym for patient in cohort.patients))


def decode(codes: NDArray[np.float32], basis: Basis) -> NDArray[np.uint8]:
    """Decode codes (m, d) to 8-bit images (m, h, w); intensities are clipped to [0, 1]."""
    flat = basis.mean + codes @ basis.components
    pixels: NDArray[np.uint8] = np.rint(np.clip(flat, 0.0, 1.0) * 255.0).astype(np.uint8)
    return pixels.reshape(len(codes), *basis.shape)


def save_basis(basis: Basis) -> bytes:
    """Pack a basis as safetensors. Its provenance travels inside, as the bytes of the word."""
    return safetensors.numpy.save(
        {
            "mean": np.ascontiguousarray(basis.mean),
            "components": np.ascontiguousarray(basis.components),
            "shape": np.array(basis.shape, np.int64),
            "provenance": np.frombuffer(basis.provenance.encode(), np.uint8),
        }
    )


def load_basis(data: bytes) -> Basis:
    """Unpack what ``save_basis`` packed: the four arrays and nothing else. Nothing is unpickled.

    Raises:
        BadBasis: not safetensors, an array missing, unknown or of another type, or no basis.
    """
    try:
        arrays = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as fault:
        raise BadBasis("the bytes are not safetensors of known types") from fault
    if arrays.keys() != _FIELDS:
        raise BadBasis("a basis holds mean, components, shape and provenance, and nothing else")
    shape, word = arrays["shape"], arrays["provenance"]
    if shape.shape != (2,) or shape.dtype != np.int64 or not 1 <= shape.min() <= shape.max() <= 1 << 15:
        raise BadBasis("shape must be two whole numbers in [1, 32768]")
    if word.dtype != np.uint8 or word.ndim != 1:
        raise BadBasis("provenance must be a word")
    for known in get_args(Provenance):
        if word.tobytes() == known.encode():
            return Basis(arrays["mean"], arrays["components"], (int(shape[0]), int(shape[1])), known)
    raise BadBasis("provenance must be public or private")
