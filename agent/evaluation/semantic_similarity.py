"""How near the semantics of two sets of images are (PrivImage, Eq. 5): a check that a selection selected something.

The paper's V turns a *word*, the name of a semantic, into its embedding (GloVe). There are no word vectors here, and
a public set of letters has no words: a semantic's vector is any row of a (NS, d) matrix, such as the weights of a
classifier's last layer for that semantic, or the mean of a public network's features over the images that have it
(:func:`class_means`). Figures with different vectors do not compare. The frequencies of a private set are private: a
similarity computed from them is for the site's eyes, or is charged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float64]  # (NS, d)


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """The semantics of a set of images: how often each occurs, and the vector of each."""

    frequencies: NDArray[np.float64]  # (NS,): w, not negative; they sum to 1
    vectors: Vectors

    def __post_init__(self) -> None:
        """Frequencies are a distribution; a vector of length 0 has no direction, unless nothing has that semantic."""
        w, v = self.frequencies, self.vectors
        if w.ndim != 1 or v.ndim != 2 or len(w) != len(v) or not len(w):
            raise ValueError("semantics are (NS,) frequencies with (NS, d) vectors")
        if not bool(np.isfinite(v).all()) or not (w >= 0).all() or not abs(float(w.sum()) - 1.0) <= 1e-9:
            raise ValueError("vectors are finite; frequencies are not negative and sum to 1")
        if not (np.linalg.norm(v[w > 0], axis=1) > 0).all():
            raise ValueError("a semantic that occurs has a vector that is not 0")


def frequencies(labels: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """How often each of ``count`` semantics is among labels (n,), as shares. Raises: ValueError: none, or unknown."""
    if not len(labels) or not 0 <= labels.min() <= labels.max() < count:
        raise ValueError("labels are 0 .. count-1, and there is one")
    return np.bincount(labels, minlength=count).astype(np.float64) / len(labels)


def class_means(features: Vectors, labels: NDArray[np.int64], count: int, centre: NDArray[np.float64]) -> Vectors:
    """The vector of each semantic: its images' mean feature, less a public centre; 0 where there is no image.

    Args:
        features: (n, d), of a public network.
        labels: (n,), 0 .. count-1.
        count: NS.
        centre: (d,), the mean feature of a public set, the same for all sets that shall be compared. Without it, all
            means of features that are never negative have nearly one direction.
    Raises:
        ValueError: shapes or labels do not fit.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1] or centre.shape != features.shape[1:]:
        raise ValueError("features are (n, d), with a label for each row and a centre (d,)")
    shares = frequencies(labels, count)
    sums = np.zeros((count, features.shape[1]))
    np.add.at(sums, labels, features - centre)
    out: Vectors = sums / np.maximum(shares * len(labels), 1.0)[:, None]
    return out


def similarity(first: Meaning, second: Meaning) -> float:
    """SDS(D1, D2) of Eq. 5, in [-1, 1]: the cosine of two semantics, weighted by how often each occurs in its set.

    Raises:
        ValueError: the vectors are of different spaces.
    """
    if first.vectors.shape[1] != second.vectors.shape[1]:
        raise ValueError("vectors of different length are of different spaces")
    # Eq. 5 is a product of two sums: sum_i w_1^i V(s_1^i)/|V(s_1^i)|, and the same of the other set
    return float(_direction(first) @ _direction(second))


def _direction(of: Meaning) -> NDArray[np.float64]:
    lengths = np.linalg.norm(of.vectors, axis=1)
    out: NDArray[np.float64] = (of.frequencies / np.where(lengths > 0, lengths, 1.0)) @ of.vectors
    return out
