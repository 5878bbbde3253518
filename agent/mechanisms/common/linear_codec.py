"""Invert images to latent codes and decode codes to images: the classical, linear generator.

The PCA of k-Same-PCA (k-SALSA, section 4.2; Newton, Sweeney & Malin 2005 average the eigenvector
coefficients of k faces). A network's encoder and generator take the same two places in the pipeline.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, get_args

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from agent.domain import Cohort, Latents
from agent.errors import CohortTooSmallError
from protos.common.errors import ArtifactError

Provenance = Literal["public", "private"]
_FIELDS: Final = {"mean", "components", "shape", "provenance"}
_ORTHONORMAL: Final = 1e-3  # float32 components: far above rounding, far below a wrong basis


class Codec(Protocol):
    """An encoder with its generator: what turns images into codes that can be averaged, and codes into images."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w) of grey images, (h, w, 3) of RGB ones."""

    def encode(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Images (n, h, w[, 3]) in [0, 1] as codes (n, d)."""

    def decode(self, codes: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Codes (m, d) as 8-bit images (m, h, w[, 3])."""

    def components(self) -> dict[str, str]:
        """Where the encoder and the generator come from, by these two names (P6)."""


class LinearBasisError(ArtifactError, ValueError):
    """The bytes are no basis, or its arrays do not fit together."""


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """An affine subspace of images with its provenance: encoder and generator of the classical baseline.

    A basis fitted on private patients is a function of every one of them, so an image decoded by it is
    not k-anonymous (design P6): the product fits it on public images only.
    """

    mean: NDArray[np.float32]  # (p,), p = h * w
    axes: NDArray[np.float32]  # (d, p), orthonormal rows: the principal components
    shape: tuple[int, int]  # (h, w)
    provenance: Provenance

    def __post_init__(self) -> None:
        """Refuse arrays that are no basis and an origin that is not said."""
        p = self.shape[0] * self.shape[1]
        if self.mean.shape != (p,) or self.axes.ndim != 2 or self.axes.shape[1] != p:
            raise LinearBasisError("mean must be (p,) and components (d, p), with p = h * w")
        if self.mean.dtype != np.float32 or self.axes.dtype != np.float32:
            raise LinearBasisError("mean and components must be float32")
        d = self.axes.shape[0]
        if not 1 <= d <= p or not bool(np.isfinite(self.mean).all()):
            raise LinearBasisError("a basis has between 1 and p components and a finite mean")
        gram = self.axes.astype(np.float64) @ self.axes.T.astype(np.float64)
        if not float(np.abs(gram - np.eye(d)).max()) <= _ORTHONORMAL:
            raise LinearBasisError("components must be orthonormal")
        if self.provenance not in get_args(Provenance):
            raise LinearBasisError("provenance must be public or private")

    def encode(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Images (n, h, w) in [0, 1] projected on the basis: (n, d).

        Raises:
            ValueError: the images have another shape than the basis.
        """
        if images.shape[1:] != self.shape:
            raise ValueError("the images do not have the shape that the basis was fitted on")
        return np.asarray((images.reshape(len(images), -1) - self.mean) @ self.axes.T, np.float32)

    def decode(self, codes: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Codes (m, d) as 8-bit images (m, h, w); intensities are clipped to [0, 1]."""
        flat = self.mean + codes @ self.axes
        pixels: NDArray[np.uint8] = np.rint(np.clip(flat, 0.0, 1.0) * 255.0).astype(np.uint8)
        return pixels.reshape(len(codes), *self.shape)

    def components(self) -> dict[str, str]:
        """Both are this basis."""
        return {"encoder": self.provenance, "generator": self.provenance}


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


def invert(cohort: Cohort, codec: Codec) -> Latents:
    """Encode each patient's images and average the codes: one code for one patient (P3).

    Returns:
        Latents with codes (n, d) float32, in the cohort's order. Summed in float64.
    Raises:
        ValueError: the cohort's images have another shape than the codec's.
    """
    if not cohort.patients:
        raise CohortTooSmallError
    if any(image.pixels.shape != codec.shape for patient in cohort.patients for image in patient.images):
        raise ValueError("the images do not have the shape that the encoder takes")
    codes = codec.encode(np.stack([image.pixels for patient in cohort.patients for image in patient.images]))
    counts = np.array([len(patient.images) for patient in cohort.patients])
    sums = np.add.reduceat(codes.astype(np.float64), np.concatenate([[0], counts.cumsum()[:-1]]), axis=0)
    return Latents(
        (sums / counts[:, np.newaxis]).astype(np.float32), tuple(patient.pseudonym for patient in cohort.patients)
    )


def save_basis(basis: Basis) -> bytes:
    """Pack a basis as safetensors. Its provenance travels inside, as the bytes of the word."""
    return safetensors.numpy.save(
        {
            "mean": np.ascontiguousarray(basis.mean),
            "components": np.ascontiguousarray(basis.axes),
            "shape": np.array(basis.shape, np.int64),
            "provenance": np.frombuffer(basis.provenance.encode(), np.uint8),
        }
    )


def load_basis(data: bytes) -> Basis:
    """Unpack what ``save_basis`` packed: the four arrays and nothing else. Nothing is unpickled.

    Raises:
        LinearBasisError: not safetensors, an array missing, unknown or of another type, or no basis.
    """
    try:
        arrays = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as fault:
        raise LinearBasisError("the bytes are not safetensors of known types") from fault
    if arrays.keys() != _FIELDS:
        raise LinearBasisError("a basis holds mean, components, shape and provenance, and nothing else")
    shape, word = arrays["shape"], arrays["provenance"]
    if shape.shape != (2,) or shape.dtype != np.int64 or not 1 <= shape.min() <= shape.max() <= 1 << 15:
        raise LinearBasisError("shape must be two whole numbers in [1, 32768]")
    if word.dtype != np.uint8 or word.ndim != 1:
        raise LinearBasisError("provenance must be a word")
    for known in get_args(Provenance):
        if word.tobytes() == known.encode():
            return Basis(arrays["mean"], arrays["components"], (int(shape[0]), int(shape[1])), known)
    raise LinearBasisError("provenance must be public or private")


def load_vouched_basis(data: bytes, vouched: frozenset[str]) -> Basis:
    """Unpack a basis; it counts as public only if the site's own configuration vouches for its SHA-256 (P6).

    Raises:
        LinearBasisError: the bytes are no basis.
    """
    basis = load_basis(data)
    return basis if hashlib.sha256(data).hexdigest() in vouched else replace(basis, provenance="private")
