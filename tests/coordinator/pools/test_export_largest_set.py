"""The largest set that the presets admit goes all the way: packed, sealed, sent, looked into, shelved and pooled.

The short form is a set of a few MiB, whose pictures are as hard to compress as any; the long one is 256 MiB.
"""

from __future__ import annotations

import numpy as np
import pytest

from agent.errors import CoordinatorUnreachableError
from coordinator.pools.export import envelope_of, read_books, read_pool_images
from coordinator.pools.selection import source_of
from coordinator.sandbox import inspector_process
from policies.review.policy import parse, preset
from protos.artifacts.arrays import pack_images
from protos.artifacts.shards import MAX_SHARD, Png, capacity, plain_bytes
from tests.support.federation_world import Federation


@pytest.mark.parametrize(
    ("side", "most"),
    [(64, 4 << 20), pytest.param(512, MAX_SHARD, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_a_set_of_the_largest_size_is_admitted_shelved_and_pooled(
    tmp_path_factory: pytest.TempPathFactory, side: int, most: int
) -> None:
    assert parse(preset("public"), "public").max_artifact_bytes == MAX_SHARD
    count = capacity(most, (side, side, 3), Png())
    dice = np.random.default_rng(7)
    images = dice.integers(0, 256, (count, side, side, 3), np.uint8)
    images[::2] //= 32  # every other one compresses
    artifact = pack_images(images, ("a label of thirty-two characters",) * count)
    assert most // 2 < len(artifact) <= plain_bytes(count, (side, side, 3), Png()) <= most
    with Federation(tmp_path_factory.mktemp("largest")) as federation:
        site = federation.join("site-a")
        site.reserved("g-1")
        release = site.release("g-1", artifact)
        told: list[tuple[int, int]] = []
        gateway = site.gateway(patience_s=300.0)
        gateway.progress = lambda done, of: told.append((done, of))
        verdict = gateway.submit(f"submit-{release.release}", site.seal(release), artifact)
        gateway.close()
        assert verdict.admitted, verdict
        assert told[-1] == (len(artifact), len(artifact))
        shelved = federation.home.releases / release.release
        assert len(list((shelved / "images").glob("*.png"))) == count
        source = source_of(read_books(federation.home), release.release, envelope_of(shelved))
        found = read_pool_images(shelved / "images.tar", source)
        assert isinstance(found, list)
        assert len(found) == count


def test_a_coordinator_too_busy_to_look_inside_says_so_and_spends_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict is final, and the set that it is about cannot be made again."""
    artifact = pack_images(np.zeros((2, 8, 8), np.uint8), ("", ""))
    with Federation(tmp_path_factory.mktemp("busy")) as federation:
        site = federation.join("site-a")
        site.reserved("g-1")
        release = site.release("g-1", artifact)
        told = f"submit-{release.release}", site.seal(release), artifact
        with monkeypatch.context() as patch:
            limits = inspector_process.InspectionLimits(wall_seconds=0.0)
            patch.setattr(inspector_process.InspectionLimits, "for_size", staticmethod(lambda _size: limits))
            with pytest.raises(CoordinatorUnreachableError, match="too busy"):
                site.gateway().submit(*told)
        assert federation.store.state.grants["g-1"].state == "held"
        assert site.gateway().submit(*told).admitted


def test_the_largest_picture_is_read_within_the_sandboxs_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Limits of memory do not depend on the file: 2048 x 2048 in colour is the most that one picture can be."""
    images = np.random.default_rng(1).integers(0, 200, (2, 2048, 2048, 3), np.uint8)
    images[1] //= 16
    path = tmp_path_factory.mktemp("large") / "images.tar"
    path.write_bytes(pack_images(images, ("", "")))
    found = inspector_process.inspect(path, "image-set", {})
    assert found.ok, (found.rule, found.reason)
    assert found.facts["shape"] == [2048, 2048, 3]
