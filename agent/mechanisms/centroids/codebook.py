"""A public codebook of latent space: which cell a patient's mean code lies in, and how far from the cell's centre.

The level-A counterpart of clustering. A partition of the patients moves with every one of them; cells that were fixed
beforehand, by public images alone, do not (design section 5), so that a patient's contribution is a function of
that patient's own record. Codes are projected to a few principal components of public codes first: the noise on a
mean grows with the root of their number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Latents
from agent.mechanisms.common.linear_codec import Basis, Codec, save_basis
from agent.mechanisms.common.stylegan_codec import StyledCodec
from agent.models.weights import Origin, Provenance, WeightsError, pack, unpack

KIND: Final = "codebook"
MOST_DIMS: Final = 32
MOST_CELLS: Final = 4096
ENOUGH: Final = 10  # public images for each cell, on the average
QUANTILE: Final = 0.95  # of the public distances to the nearest centre: the radius
MARGIN: Final = 1e-6  # of the bound: covers the rounding of norms and of float64 sums
_ORTHONORMAL: Final = 1e-3
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ALIKE: Final = "the public images are all equal: a cell has no extent"
_ARRAYS: Final = ("mean", "axes", "centres")


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """Cells of a q-dimensional public subspace of the codes of one codec; a constant, fixed before any patient."""

    mean: NDArray[np.float32]  # (d,) of the public codes
    axes: NDArray[np.float32]  # (q, d), orthonormal rows: their principal components
    centres: NDArray[np.float32]  # (m, q), projected
    radius: float  # R: a residual is clipped to it
    codec: str  # SHA-256 of the codec whose codes these are: :func:`codec_digest`
    origin: Origin

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit together."""
        arrays = (self.mean, self.axes, self.centres)
        if any(a.dtype != np.float32 or not bool(np.isfinite(a).all()) for a in arrays):
            raise ValueError("a codebook's arrays are finite float32")
        if self.mean.ndim != 1 or self.axes.ndim != 2 or self.centres.ndim != 2:
            raise ValueError("mean must be (d,), axes (q, d) and centres (m, q)")
        if self.axes.shape[1] != self.mean.shape[0] or self.centres.shape[1] != self.dims:
            raise ValueError("mean must be (d,), axes (q, d) and centres (m, q)")
        if not (1 <= self.dims <= MOST_DIMS and 1 <= self.cells <= MOST_CELLS):
            raise ValueError(f"a codebook has 1 to {MOST_DIMS} dimensions and 1 to {MOST_CELLS} cells")
        gram = self.axes.astype(np.float64) @ self.axes.T.astype(np.float64)
        if not float(np.abs(gram - np.eye(self.dims)).max()) <= _ORTHONORMAL:
            raise ValueError("axes must be orthonormal")
        if not 0.0 < self.radius < np.inf or not _DIGEST.fullmatch(self.codec):
            raise ValueError("a codebook has a positive radius, and the SHA-256 of a codec")

    @property
    def cells(self) -> int:
        """Their number, m."""
        return len(self.centres)

    @property
    def dims(self) -> int:
        """Of the subspace, q."""
        return len(self.axes)

    def projected(self, codes: NDArray[np.float32]) -> NDArray[np.float64]:
        """Codes (n, d) in the subspace: (n, q). Row by row: no row's last digit depends on the rows beside it."""
        axes, mean = self.axes.astype(np.float64), self.mean.astype(np.float64)
        rows = [axes @ (code.astype(np.float64) - mean) for code in codes]
        return np.array(rows, np.float64).reshape(len(codes), self.dims)

    def restored(self, points: NDArray[np.float64]) -> NDArray[np.float32]:
        """Points (n, q) of the subspace as codes (n, d); what lies outside of it is the public mean."""
        codes: NDArray[np.float32] = (self.mean + points @ self.axes).astype(np.float32)
        return codes


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """What each patient contributes: one cell, and a vector of norm at most 1 in it."""

    cells: NDArray[np.int64]  # (n,)
    residuals: NDArray[np.float64]  # (n, q): from the centre, clipped to R, in units of R


def quantise(latents: Latents, codebook: Codebook) -> Placed:
    """The nearest cell of each patient's mean code, and the clipped residual.

    Abadi et al. 2016, Algorithm 1, clips gradients so; here it is the way from a public centre, r:
    r / max(|r|, R), which is r / R when |r| <= R. Of several nearest centres the first.
    """
    points = codebook.projected(latents.codes)
    centres = codebook.centres.astype(np.float64)
    cells = np.array([((centres - point) ** 2).sum(axis=1).argmin() for point in points], np.int64)
    return Placed(cells, _clipped(points - centres[cells], codebook.radius))


def votes(placed: Placed, labels: NDArray[np.int64], cells: int, classes: int) -> NDArray[np.float64]:
    """One vote of each patient, in the bin of its cell and its label (n,): counts (cells, classes)."""
    counts = np.zeros((cells, classes))
    np.add.at(counts, (placed.cells, labels), 1.0)
    return counts


def vector_sums(placed: Placed, cells: int) -> NDArray[np.float64]:
    """The residuals of each cell's patients, added up: (cells, q), in units of R."""
    sums = np.zeros((cells, placed.residuals.shape[1]))
    np.add.at(sums, placed.cells, placed.residuals)
    return sums


def _clipped(residuals: NDArray[np.float64], radius: float) -> NDArray[np.float64]:
    norms = np.linalg.norm(residuals, axis=1, keepdims=True)
    clipped: NDArray[np.float64] = residuals / np.maximum(norms * (1.0 + MARGIN), radius)
    return clipped


def codec_digest(codec: Codec) -> str:
    """SHA-256 of everything that decides a code: networks, passes, polish; or a linear basis.

    Raises:
        ValueError: a codec of another kind, whose codes nobody can tell from another's.
    """
    if isinstance(codec, StyledCodec):
        told = [codec.drawn_by, sorted((name, origin.sha256) for name, origin in codec.origins.items())]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()
    if isinstance(codec, Basis):
        return hashlib.sha256(save_basis(codec)).hexdigest()
    raise ValueError(f"{type(codec).__name__} is a codec without a digest")


def fitted(
    codes: NDArray[np.float32], sizes: tuple[int, int], codec: str, notes: Mapping[str, Any], rng: np.random.Generator
) -> bytes:
    """Make a codebook of public codes: principal components, then k-means, then the radius.

    Args:
        codes: (n, d), of public images by the codec. Never patients'.
        sizes: numbers of cells (m) and of dimensions (q).
        codec: its digest.
        notes: for people: which images.
        rng: of the search.
    Returns:
        The codebook's file.
    Raises:
        ValueError: codes that are not finite, too few of them, or all alike.
    """
    # every process of an agent reads this file, and few make a codebook: it is a second of each
    from sklearn.cluster import KMeans  # noqa: PLC0415
    from sklearn.decomposition import PCA  # noqa: PLC0415

    (n, d), (m, q) = codes.shape, sizes
    if not (1 <= m <= MOST_CELLS and 1 <= q <= min(MOST_DIMS, d)):
        most = min(MOST_DIMS, d)
        raise ValueError(f"a codebook has 1 to {MOST_CELLS} cells, and here 1 to {most} dimensions")
    if not n >= max(ENOUGH * m, q + 1):
        raise ValueError(f"{m} cells of {q} dimensions need {max(ENOUGH * m, q + 1)} images, and there are {n}")
    if not bool(np.isfinite(codes).all()):
        raise ValueError("codes must be finite")
    if not float(np.ptp(codes, axis=0).max()) > 0.0:
        raise ValueError(_ALIKE)
    seed = int(rng.integers(1 << 31))
    pca = PCA(q, random_state=seed).fit(codes.astype(np.float64))
    points = pca.transform(codes.astype(np.float64))
    means = KMeans(m, n_init=10, random_state=seed).fit(points)
    far = np.linalg.norm(points - means.cluster_centers_[means.labels_], axis=1)
    radius = float(np.quantile(far, QUANTILE))
    if not radius > 0.0:
        raise ValueError(_ALIKE)
    arrays = (pca.mean_, pca.components_, means.cluster_centers_)
    state = {name: torch.from_numpy(a.astype(np.float32)) for name, a in zip(_ARRAYS, arrays, strict=True)}
    held = {"pictures": n, "variance": round(float(pca.explained_variance_ratio_.sum()), 4), **notes}
    return pack(KIND, {"radius": radius, "codec": codec}, held, state)


def codebook_from(raw: bytes, provenance: Provenance) -> Codebook:
    """Read what :func:`fitted` made.

    Args:
        raw: the file.
        provenance: what the site says of it; what the file says of itself counts for nothing.
    Raises:
        WeightsError: no codebook, or one that does not fit together.
    """
    packed = unpack(raw, KIND)
    if packed.state.keys() != set(_ARRAYS) or packed.config.keys() != {"radius", "codec"}:
        raise WeightsError("a codebook has a mean, axes, centres, a radius and a codec, and nothing else")
    radius, codec = packed.config["radius"], packed.config["codec"]
    if type(radius) is not float or type(codec) is not str:
        raise WeightsError("a codebook's radius is a number, its codec a SHA-256")
    mean, axes, centres = (packed.state[name].numpy() for name in _ARRAYS)
    try:
        return Codebook(mean, axes, centres, radius, codec, Origin(provenance, packed.sha256))
    except ValueError as fault:
        raise WeightsError(str(fault)) from fault
