"""Choose by alignment: of each group's samples that the vetting kept, the one that fits its prompt best.

Contrastive reranking of Privacy Distillation (section 3.2): of the N_c samples of a condition the paper keeps the one
of the highest s_align. What the vetting dropped is never taken back, however empty a group is left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def best_of(scores: NDArray[np.floating], groups: NDArray[np.int64], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The winner of each group.

    Args:
        scores: (n,) s_align; what is not finite never wins.
        groups: (n,) whole numbers: of which group each sample is.
        kept: (n,) bool: what the vetting kept; nothing else can win.
    Returns:
        (g,) int64 places of the winners, in order of their groups: one of each group that has a sample left
        with a finite score; of equals the lowest place. An empty group gives nothing.
    Raises:
        ValueError: shapes or types do not fit.
    """
    if scores.ndim != 1 or not scores.shape == groups.shape == kept.shape:
        raise ValueError("one score, one group and one verdict for each sample")
    if not (np.issubdtype(scores.dtype, np.floating) and np.issubdtype(groups.dtype, np.integer)):
        raise ValueError("scores are numbers, groups whole numbers")
    if kept.dtype != np.bool_:  # reasons or counts would read as kept
        raise ValueError("kept is true or false")
    left = np.flatnonzero(kept & np.isfinite(scores))
    # by group, then the highest score first, then the lowest place: lexsort is stable, and left ascends
    order = left[np.lexsort((-scores[left], groups[left]))]
    return order[np.unique(groups[order], return_index=True)[1]].astype(np.int64)
