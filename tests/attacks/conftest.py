"""Every attack is made on a fresh federation, and audited when it is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.ground import Ground
from tests.support.federation_world import Federation, Site


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with Federation(tmp_path) as made:
        attacked = Ground(made)
        yield attacked
        attacked.audit()


@pytest.fixture
def site(ground: Ground) -> Site:
    return ground.federation.join("site-a")


@pytest.fixture
def other(ground: Ground) -> Site:
    return ground.federation.join("site-b")
