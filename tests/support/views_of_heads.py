"""Made-up heads as an attacker of faces sees them: unaltered, and other people's with a part of this person left."""

from __future__ import annotations

from functools import cache

import numpy as np

from agent.defacing import head_mask
from agent.defacing.reidentification.features import Eye, ScanFeatures, extract_features, in_zone
from agent.defacing.reidentification.matching import People
from agent.defacing.reidentification.rendering import surface
from agent.domain import Volume
from agent.volumes.grid import cube_at, resample
from tests.support.heads import scan

MM = 4.0
EYE = Eye(side=32, views=("front", "left 60", "right 60", "left 90"), points=120)
PUBLIC, TESTED = range(13), range(13, 26)
SOMEBODY = 99


@cache
def unaltered(person: int, visit: int) -> ScanFeatures:
    one = scan(person, visit, MM)
    return extract_features(surface(one.volume, head_mask.threshold(one.volume.values)), one.to_template, EYE)


@cache
def left(person: int, zone: str) -> ScanFeatures:
    """Somebody else's head, the same for everybody, in which a zone of this person is left."""
    one, other = scan(person, 1, MM), scan(SOMEBODY, 0, MM)
    grid = one.volume
    here, there = (cube_at(each.to_template, 1, 1.0).affine for each in (one, other))
    lies = here @ np.linalg.inv(there) @ other.volume.affine  # no stretch: the size of a brain tells that of the head
    strange = resample(other.volume.values, lies, grid.values.shape, grid.affine)
    strange *= head_mask.threshold(grid.values) / head_mask.threshold(other.volume.values)
    to = np.linalg.inv(here) @ grid.affine
    at = np.stack(np.meshgrid(*[np.arange(n) for n in grid.values.shape], indexing="ij"), axis=-1).reshape(-1, 3)
    at = at @ to[:3, :3].T + to[:3, 3]
    keep = in_zone(at, zone).reshape(grid.values.shape) if zone else np.zeros(grid.values.shape, bool)
    mixed = Volume(np.where(keep, grid.values, strange).astype(np.float32), grid.affine)
    return extract_features(surface(mixed, head_mask.threshold(grid.values)), one.to_template, EYE)


def people(rows: range, zone: str | None = None) -> People:
    made = (unaltered(p, 1) if zone is None else left(p, zone) for p in rows)
    return People(tuple(unaltered(p, 0) for p in rows), tuple(made))


def rng() -> np.random.Generator:
    return np.random.default_rng(5)
