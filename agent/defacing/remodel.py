"""Remodel: another face in place of a patient's, made from nothing but the privacy transform of the head.

C-DeID-GAN, section 3: Y = f(gamma(X)); corrected where it leaks. A network that gets the patient's own brain draws a
head of that brain's size, which re-identified people (60 phantoms: 5-way 0.58, where chance is 0.2). So it gets a
public brain, the template's (:class:`AroundTemplate`), and its output depends on chance alone.
:class:`agent.defacing.compositing.Paste` places that head into every series of the study and leaves the patient's
brain and everything outside the region bit for bit. Noise comes from ``rng``: the same scan gets another face each
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agent.defacing.brain_extraction import Atlas, Brain
from agent.defacing.compositing import Original, Paste, pasted
from agent.defacing.face_region import Region
from agent.defacing.head import HeadScan
from agent.defacing.privacy_transform import Coarse, Gamma, Population, transform
from agent.domain import Volume
from agent.models.weights import Origin


class HeadGenerator(Protocol):
    """What draws a head: a trained network, or a mean of public heads."""

    @property
    def population(self) -> Population:
        """Of the public heads; its cube is the one that is drawn."""

    @property
    def coarse(self) -> Coarse:
        """What of a head's own outside it was shown."""

    def draw(self, gamma: Gamma, rng: np.random.Generator) -> NDArray[np.float32]:
        """(S, S, S) in [0, 1], scaled as ``gamma.intensities``."""


class RemodelNetwork(HeadGenerator, Protocol):
    """The trained network, and its measured quality."""

    @property
    def origin(self) -> Origin:
        """Its file's digest, and whether the site vouches that no patient is in it."""

    @property
    def coarse(self) -> Coarse:
        """How the gammas were made that it learned from."""


@dataclass(frozen=True, slots=True, eq=False)
class AroundTemplate:
    """A network that is shown the template's brain in the place of every patient's."""

    net: RemodelNetwork
    shown: Gamma

    @property
    def population(self) -> Population:
        """The network's."""
        return self.net.population

    @property
    def origin(self) -> Origin:
        """The network's."""
        return self.net.origin

    @property
    def coarse(self) -> Coarse:
        """The network's."""
        return self.net.coarse

    def draw(self, gamma: Gamma, rng: np.random.Generator) -> NDArray[np.float32]:
        """A head of nobody's size: of ``gamma`` nothing is used."""
        if gamma.cube.shape != self.shown.cube.shape:
            raise ValueError("gamma has another side than the network")
        return self.net.draw(self.shown, rng)


def around_template(net: RemodelNetwork, atlas: Atlas) -> AroundTemplate:
    """A network that is shown nobody's brain."""
    brain = Brain(atlas.brain, 1.0, np.eye(4), atlas.brain)
    head = HeadScan(Volume(atlas.values, atlas.affine), atlas.brain, brain)
    return AroundTemplate(net, transform(head, net.population.skin.shape[0], net.population, net.coarse))


def remodel(
    head: HeadScan, remodeller: HeadGenerator, region: Region, rng: np.random.Generator, coarse: Coarse | None = None
) -> Paste:
    """Draw one head for a study.

    Args:
        head: examined, of the finest series.
        remodeller: public, or one that has not seen this person.
        region: what may change.
        rng: of the run.
        coarse: what gamma shows of the head's own outside; by default what the remodeller learned with.

    Returns:
        The change; the caller lays it onto every series and has each :func:`agent.defacing.change.checked`.

    Raises:
        NotDefacedError: gamma cannot be made, or what was drawn is no head.
    """
    population = remodeller.population
    gamma = transform(head, len(population.skin), population, remodeller.coarse if coarse is None else coarse)
    drawn = remodeller.draw(gamma, rng)
    original = Original(head.volume, head.skin, head.brain.mask, head.brain.to_template)
    return pasted(original, drawn, gamma.cube, region)
