"""A face that is nobody's, without a network: the weighted mean of public heads, drawn with other weights each time.

As mri_reface does it (Schwarz et al. 2021), but one never sees the same face twice, and the mean is not fitted to the
patient's brain: a head stretched to a brain has that person's size, and by size alone people were found (5-way 0.37;
without the stretch 0.18, where chance is 0.2). The surfaces are averaged as distances, so that the mean is as sharp
as one head. It does what a remodeller does, is drawn in milliseconds, and a trained network is measured against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.defacing.compositing import FAR_MM, made_head
from agent.defacing.head import HeadScan
from agent.defacing.privacy_transform import EXTENT_MM, Coarse, Gamma, Population, population_of, whole_head
from agent.volumes.grid import cube_at

FEWEST: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class AverageHead:
    """Public heads in the cube."""

    heads: NDArray[np.float32]  # (n, S, S, S) in [0, 1], as ``Gamma.intensities`` but of the whole head, carried on
    surfaces: NDArray[np.float32]  # (n, S, S, S) mm to the skin, negative inside
    population: Population
    coarse: Coarse = field(default_factory=Coarse)  # of gamma, which is not looked at

    def __post_init__(self) -> None:
        """A mean of one is that one."""
        if self.heads.shape != self.surfaces.shape or self.heads.ndim != 4 or self.heads.shape[1:] != self._cube:
            raise ValueError("heads and surfaces are (n, S, S, S), of the population's cube")
        if not len(self.heads) >= FEWEST:
            raise ValueError(f"an average needs {FEWEST} public heads")
        if not (float(self.heads.min()) >= 0.0 and float(self.heads.max()) <= 1.0):
            raise ValueError("a head's numbers lie in [0, 1]")

    @property
    def _cube(self) -> tuple[int, ...]:
        return self.population.skin.shape

    def draw(self, gamma: Gamma, rng: np.random.Generator) -> NDArray[np.float32]:
        """A mean head where the brain of gamma lies. Of gamma nothing is used: what it draws tells of nobody.

        Args:
            gamma: of the head that gets it.
            rng: of the run: the weights are uniform on the simplex.

        Returns:
            (S, S, S) float32 in [0, 1]. No brain of anybody is in it that could be recognised.
        """
        if gamma.cube.shape != self._cube:
            raise ValueError("gamma has another side than the public heads")
        weights = rng.dirichlet(np.ones(len(self.heads))).astype(np.float32)
        surface, bright = (np.tensordot(weights, of, axes=1) for of in (self.surfaces, self.heads))
        drawn = np.clip(0.5 - surface / gamma.cube.mm, 0.0, 1.0) * bright
        return np.asarray(np.clip(drawn, 0.0, 1.0), np.float32)


def average_of(heads: Sequence[HeadScan], side: int) -> AverageHead:
    """From public heads. Patients are not public.

    Args:
        heads: examined, two at least.
        side: S of the cube.
    """
    heads_, surfaces = [], []
    for head in heads:
        cube = cube_at(head.brain.to_template, side, EXTENT_MM)
        made = made_head(whole_head(head, side), cube)
        heads_.append(made.tissue.on(cube.affine, cube.shape, 0.0))
        surfaces.append(made.surface.on(cube.affine, cube.shape, FAR_MM))
    population = population_of(heads, side, Coarse().directions)
    return AverageHead(np.stack(heads_), np.stack(surfaces), population)
