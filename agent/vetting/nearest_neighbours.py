"""Who is nearest: exhaustive neighbours by inner product, the verifier on the nearest patients, or on everybody.

Two lists of neighbours are asked about, by the retrieval embedding and by the features that the verifier compares:
the embedding alone misses one in a hundred of the pairs that the verifier would match among all. Neighbours are
patients and not images: a patient with many images would fill the list and hide the next. faiss (Douze et al.
2024) searches large references, torch the others and those on an accelerator; both compare with every image, and
answer alike.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from agent.vetting.reference import NUMBERS, Judge, VerifierView, pair_logits

FAISS_FROM: Final = 20_000  # images of a reference
_PLACES: Final = 1 << 22  # of images, in one list of neighbours or one block of pairs


class Search:
    """Neighbours among the images of a reference, all of them compared."""

    def __init__(self, embeddings: Tensor, owners: NDArray[np.int64], top: int) -> None:
        """Take unit vectors (n, d), whose each is (n,), and how many patients are wanted."""
        self.embeddings = embeddings
        self.top = top
        self.owners = torch.from_numpy(owners).to(embeddings.device)
        self._index: Any = None
        if len(embeddings) >= FAISS_FROM and embeddings.device.type == "cpu":
            import faiss  # noqa: PLC0415 - it takes long to import, and a small reference never asks for it

            self._index = faiss.IndexFlatIP(embeddings.shape[1])
            self._index.add(np.ascontiguousarray(embeddings.numpy(), np.float32))

    def nearest(self, queries: Tensor, left_out: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The images in the order of likeness, up to the nearest one of the ``top``-th patient.

        Args:
            queries: (m, d).
            left_out: (m,) a place that does not count, or -1.
        Returns:
            Pieces of (rows (r,), places (r, k)): rows of ``queries``, each in one piece, and places in the reference,
            -1 where there is none.
        """
        rows, k = torch.arange(len(queries), device=queries.device), 2 * self.top + 1
        out = []
        while len(rows):
            k = min(k, len(self.embeddings))
            left = []
            for some in torch.split(rows, max(1, _PLACES // k)):
                places, enough = self._before(self._ranked(queries[some], k), left_out[some])
                done = enough | (k == len(self.embeddings))
                out.append((some[done], places[done]))
                left.append(some[~done])
            rows, k = torch.cat(left), 4 * k
        return out

    def _ranked(self, queries: Tensor, k: int) -> Tensor:
        """(m, k) places, the most like first."""
        if self._index is not None:
            return torch.from_numpy(self._index.search(np.ascontiguousarray(queries.numpy(), np.float32), k)[1])
        size = max(1, _PLACES // len(self.embeddings))
        return torch.cat([(some @ self.embeddings.T).topk(k, dim=1).indices for some in torch.split(queries, size)])

    def _before(self, places: Tensor, left_out: Tensor) -> tuple[Tensor, Tensor]:
        """The places (m, k) up to the ``top``-th patient, -1 after; and whether so many patients are there (m,)."""
        places = torch.where(places == left_out[:, None], -1, places)
        owners = torch.where(places >= 0, self.owners[places.clamp_min(0)], -1)
        rising, order = owners.sort(dim=1, stable=True)
        new = rising >= 0
        new[:, 1:] &= rising[:, 1:] != rising[:, :-1]
        first = torch.zeros_like(new).scatter(1, order, new)  # a patient's nearest image
        met = first.cumsum(dim=1)
        return torch.where(met - first.long() < self.top, places, -1), met[:, -1] >= self.top


def searches(real: VerifierView, owners: NDArray[np.int64], top: int) -> tuple[Search, Search]:
    """By the embeddings, made for it, and by the direction of the features, which the verifier itself reads."""
    return Search(real.embeddings, owners, top), Search(normalize(real.features), owners, top)


def candidates(made: VerifierView, by: tuple[Search, Search], left_out: Tensor) -> Tensor:
    """(m, k) places of the images of the nearest patients by either search, -1 where there is none; any twice.

    Of m images; ``by`` and ``left_out`` are those of :func:`verified`.
    """
    finite = made.finite()
    lists = []
    for search, seen in zip(by, (made.embeddings, normalize(made.features)), strict=True):
        pieces = search.nearest(torch.where(finite[:, None], seen, torch.zeros_like(seen)), left_out)
        listed = torch.full((len(seen), max((p.shape[1] for _, p in pieces), default=0)), -1, device=seen.device)
        for rows, places in pieces:
            listed[rows, : places.shape[1]] = places
        lists.append(listed)
    return torch.cat(lists, dim=1)


def verified(
    made: VerifierView, real: VerifierView, judge: Judge, by: tuple[Search, Search], left_out: Tensor
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The verifier on the images of the nearest patients by either search.

    Args:
        made: of m images.
        real: of the reference.
        judge: the verifier that saw both.
        by: of :func:`searches`.
        left_out: (m,) a place of the reference that does not count for each, or -1.
    Returns:
        The highest log-odds (m,), NaN where the verifier gave no number, and the place (m,) they are of.
    """
    finite = made.finite()
    scores = torch.full((len(finite),), -torch.inf, device=finite.device)
    nearest = torch.zeros(len(finite), dtype=torch.int64, device=finite.device)
    for search, seen in zip(by, (made.embeddings, normalize(made.features)), strict=True):
        queries = torch.where(finite[:, None], seen, torch.zeros_like(seen))
        for rows, places in search.nearest(queries, left_out):
            row, column = torch.nonzero(places >= 0, as_tuple=True)
            found = pair_logits(judge, made.features, real.features, rows[row], places[row, column])
            logits = torch.full(places.shape, -torch.inf, device=finite.device)
            logits[row, column] = torch.where(torch.isfinite(found), found, torch.nan)
            best, at = logits.max(dim=1)  # NaN, where there is one
            better = torch.isnan(best) | (best > scores[rows])  # NaN stays: nothing is greater
            scores[rows] = torch.where(better, best, scores[rows])
            nearest[rows] = torch.where(better, places.gather(1, at[:, None])[:, 0], nearest[rows])
    scores = torch.where(finite & torch.isfinite(scores), scores, torch.nan)
    return scores.double().cpu().numpy(), nearest.clamp_min(0).cpu().numpy()


def exhaustive(judge: Judge, made: VerifierView, real: VerifierView) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The verifier on all pairs: the highest log-odds (m,) of each image, and the place (m,) they are of.

    NaN where a pair has no number.
    """
    size = max(1, NUMBERS // max(1, made.features.shape[1]))
    scores, places = [made.features.new_zeros(0)], [torch.zeros(0, dtype=torch.int64)]
    with torch.no_grad():
        for own in made.features:
            # a view of one row beside many: nothing is copied
            parts = [judge.logits(own.expand_as(some), some).float() for some in torch.split(real.features, size)]
            logits = torch.cat(parts)
            best = torch.where(torch.isfinite(logits).all(), logits.max(), torch.nan)
            scores.append(best[None])
            places.append(logits.argmax()[None].cpu())
    told = torch.where(made.finite(), torch.cat(scores), torch.nan)
    return told.double().cpu().numpy(), torch.cat(places).numpy()
