"""Where two images are alike, as a verifier sees it. For the site's reviewer only: it shows a patient.

By covering parts, as Zeiler & Fergus 2014 ("Visualizing and understanding convolutional networks", section 4.2),
and not by Grad-CAM: of a pair's log-odds that showed nothing. On two trained verifiers (chest phantoms, 32 px)
Grad-CAM++ had its hottest pixel in a corner in 60 % and 90 % of copies; where the middle 12 x 12 of another person's
image, 14 % of it, was the patient's, it got 14 % and 15 % of the heat. By two such, :func:`heat` gives that middle
38 % and 39 %, and a corner of that size 32 % and 40 %; its hottest pixel is inside in 40 to 75 % of such pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from agent.models.image_tensors import to_tensor

_CELLS: Final = 8  # the map is as fine as this, along either side; what is covered is two by two cells
_AGAINST: Final = 2.0  # see heat: a part is alike where it gives 2/3 of what the patient's own would
_LEAST: Final = 1e-3  # of log-odds: less than this is rounding
_BATCH: Final = 27  # images at once


class ImageFeatures(Protocol):
    """A verifier's features of images."""

    @property
    def features(self) -> Tensor:
        """(n, f) float32, for verification."""


class PairVerifier(Protocol):
    """Whatever tells whether two images are of one person; :class:`agent.models.recognition.verifier.Verifier`
    does.
    """

    def look(self, images: Tensor) -> ImageFeatures:
        """Images (n, c, h, w) in [-1, 1] as it sees them."""

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        """Log-odds (p,) that two images are of one person."""


def heat(verifier: PairVerifier, made: NDArray[np.float32], real: NDArray[np.float32]) -> NDArray[np.float32]:
    """What of the synthetic image says that both are of one person.

    Every part of a quarter of either side is covered with the synthetic image's mean, which lowers the log-odds L by
    D where it spoke for the patient; and replaced by the patient's own part, which raises them by R where it was
    not the patient's. A cell's heat is relu(mean of D - 2 relu(R)) over the four parts that hold it. Without R, what
    matters to the verifier anywhere is hot, alike or not. The patient is mirrored first, if that is nearer.

    It is coarse, and it shows what the verifier goes by, of parts in the same place; a part that is alike
    elsewhere, or only with others, can be cold. No heat is no proof. It costs 164 looks at one image.

    Args:
        verifier: whose log-odds are explained.
        made: (h, w) or (h, w, 3) in [0, 1].
        real: of any size; a patient's image.
    Returns:
        (h, w) in [0, 1]; nothing but 0 where no part speaks for it, or the verifier gives no number.
    """
    ours, theirs = to_tensor(made[None]), to_tensor(real[None])
    own = _beside(theirs, ours)
    mean = ours.mean(dim=(2, 3), keepdim=True).expand_as(ours)
    with torch.no_grad():
        other = verifier.look(theirs).features
        before = _odds(verifier, [ours], other)
        drop = before - _odds(verifier, _replaced(ours, mean), other)
        rise = _odds(verifier, _replaced(ours, own), other) - before
    found = (drop - _AGAINST * rise.relu()).reshape(1, 1, _CELLS + 1, _CELLS + 1)
    return _shown(avg_pool2d(found, 2, 1)[0, 0].relu(), made.shape[0], made.shape[1])


def _beside(theirs: Tensor, ours: Tensor) -> Tensor:
    """The patient's image in the made one's size and channels, mirrored if that is nearer to it."""
    own = interpolate(theirs, ours.shape[2:], mode="bilinear", align_corners=False, antialias=True)
    if own.shape[1] != ours.shape[1]:
        own = own.mean(dim=1, keepdim=True).expand_as(ours)
    mirrored = own.flip(3)
    return mirrored if (mirrored - ours).square().mean() < (own - ours).square().mean() else own


def _replaced(ours: Tensor, by: Tensor) -> Iterator[Tensor]:
    """One image (1, c, h, w) with each of its (cells + 1)² parts replaced, row by row; at the rim halves."""
    h, w = ours.shape[2:]
    for i in range(_CELLS + 1):
        for j in range(_CELLS + 1):
            out = ours.clone()
            rows = slice(h * max(i - 1, 0) // _CELLS, h * min(i + 1, _CELLS) // _CELLS)
            columns = slice(w * max(j - 1, 0) // _CELLS, w * min(j + 1, _CELLS) // _CELLS)
            out[..., rows, columns] = by[..., rows, columns]
            yield out


def _odds(verifier: PairVerifier, pictures: Iterator[Tensor] | list[Tensor], other: Tensor) -> Tensor:
    every, out = list(pictures), []
    for start in range(0, len(every), _BATCH):
        features = verifier.look(torch.cat(every[start : start + _BATCH])).features
        out.append(verifier.logits(features, other.expand(len(features), -1)))
    return torch.cat(out).double().cpu()


def _shown(found: Tensor, h: int, w: int) -> NDArray[np.float32]:
    highest = float(found.max())
    if not (bool(found.isfinite().all()) and highest > _LEAST):
        return np.zeros((h, w), np.float32)
    scaled = interpolate((found / highest)[None, None], (h, w), mode="bilinear", align_corners=False)[0, 0]
    out: NDArray[np.float32] = scaled.clamp(0.0, 1.0).float().cpu().numpy()
    return out
