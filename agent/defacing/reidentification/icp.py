"""How far two surfaces lie apart once they are laid onto each other: point-to-plane ICP, trimmed.

Besl & McKay 1992 with the metric of Chen & Medioni 1992, and the trimmed residuals of Chetverikov et al. 2002: what a
de-facing took away finds no counterpart, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from agent.defacing.reidentification.features import Cloud, Values

_FEWEST = 12  # points that a rigid motion is fitted to


@dataclass(frozen=True, slots=True)
class Fit:
    """How surfaces are laid onto each other."""

    rounds: int = 4
    keep: float = 0.6  # of the points, those that fit best
    reach_mm: float = 30.0  # a point further away has no counterpart

    def __post_init__(self) -> None:
        """One round or more, and something to keep."""
        if not self.rounds >= 1 or not 0.0 < self.keep <= 1.0 or not self.reach_mm > 0.0:
            raise ValueError("an ICP has a round, a share of points and a reach")


def distances(probes: Sequence[Cloud], known: Sequence[Cloud], fit: Fit) -> Values:
    """(p, k) mm between every probe and every known surface, after the best rigid motion; inf without a surface."""
    trees = [cKDTree(one.points) if len(one.points) >= _FEWEST else None for one in known]
    out = np.full((len(probes), len(known)), np.inf)
    for p, probe in enumerate(probes):
        for k, (cloud, tree) in enumerate(zip(known, trees, strict=True)):
            if tree is not None and len(probe.points) >= _FEWEST:
                out[p, k] = aligned(probe, cloud, tree, fit)[1]
    return out


def aligned(probe: Cloud, known: Cloud, tree: cKDTree, fit: Fit) -> tuple[Values, float]:
    """One probe laid onto one surface.

    Args:
        probe: what is moved.
        known: what it is moved to.
        tree: of ``known.points``.
        fit: how.

    Returns:
        (4, 4) motion of the probe, and the trimmed mean distance in mm of its points to the planes they meet, with
        half the distance to the points themselves: planes alone fit a sphere to any sphere.
    """
    motion = np.eye(4)
    kept = max(_FEWEST, round(fit.keep * len(probe.points)))
    apart = np.inf
    for turn in range(fit.rounds + 1):
        at = probe.points @ motion[:3, :3].T + motion[:3, 3]
        far, nearest = tree.query(at)
        gap = ((at - known.points[nearest]) * known.normals[nearest]).sum(axis=1)
        best = np.argpartition(far, kept - 1)[:kept]
        apart = float(np.minimum(np.abs(gap[best]) + 0.5 * far[best], fit.reach_mm).mean())
        if turn < fit.rounds:
            motion = _step(at[best], known.normals[nearest[best]], gap[best]) @ motion
    return motion, apart


def _step(at: Values, normals: Values, gap: Values) -> NDArray[np.float64]:
    """(4, 4): the small rigid motion that closes the gaps along the normals best, in least squares."""
    middle = at.mean(axis=0)
    jacobian = np.hstack([np.cross(at - middle, normals), normals])
    damped = jacobian.T @ jacobian + 1e-6 * len(at) * np.eye(6)
    turn, shift = np.split(np.linalg.solve(damped, -jacobian.T @ gap), 2)
    angle = float(np.linalg.norm(turn))
    out = np.eye(4)
    if angle > 1e-12:  # Rodrigues
        x, y, z = turn / angle
        cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
        out[:3, :3] += np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    out[:3, 3] = middle + shift - out[:3, :3] @ middle
    return out
