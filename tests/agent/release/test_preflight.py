"""Before a price: of every mechanism number, bytes and disk are known, and a set that is too large is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.domain import Scan, Selection, Volume
from agent.errors import ReviewRejectedError
from agent.federation.participant import Participant
from agent.federation.run_mechanism import update_bytes
from agent.mechanisms.registry import MECHANISMS
from agent.release.packaging import ReleaseFormat
from agent.release.pipeline import pack_volumes, release_heads, release_resumable, release_synthetic
from agent.release.preflight import (
    RefusedBeforehandError,
    known_objections,
    of_configuration,
    of_heads,
)
from protos.artifacts.bfloat16 import BFLOAT16
from protos.artifacts.shards import MAX_SHARD, Dicom, Png, plain_bytes
from protos.encryption.hpke import sealed_bytes
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.remodelled_heads import examine, remodel
from tests.support.site_world import ksame, site_world
from tests.support.small_mechanisms import DISTILL, FEDERATED, MASKED, PRIVIMAGE, SET_RELEASES, SetRelease

PATIENTS = 23
SETS = [name for name in SET_RELEASES if name != "model"]
SEALED = ReleaseFormat(reader="a" * 64, seal=lambda raw: raw)


OTHERS = {"remodel", "federated", "federated-masked"}  # below


def test_every_mechanism_is_weighed() -> None:
    assert SET_RELEASES.keys() | OTHERS == MECHANISMS.keys()


@pytest.mark.parametrize("name", SETS)
def test_number_and_bytes_follow_from_the_configuration_and_the_form(tmp_path: Path, name: str) -> None:
    case, s = SET_RELEASES[name], site_world(tmp_path, patients=PATIENTS)
    found = case.foreseen(s)
    assert (found.samples, found.public) == (case.pictures, case.public)
    assert found.size == plain_bytes(case.pictures, case.mechanism.shape, Png())
    sealed = case.foreseen(s, SEALED)
    assert sealed.size == sealed_bytes(found.size)
    if len(case.mechanism.shape) == 2:
        form = Dicom("OT", (1000, 1000))
        assert case.foreseen(s, ReleaseFormat(form)).size == plain_bytes(case.pictures, case.mechanism.shape, form)
    assert s.vault.reads == 0


@pytest.mark.parametrize("name", SETS)
def test_a_set_one_byte_too_large_is_refused_and_nothing_is_read_priced_or_written(tmp_path: Path, name: str) -> None:
    case = SET_RELEASES[name]
    (tmp_path / "first").mkdir()
    size = case.foreseen(site_world(tmp_path / "first", patients=PATIENTS)).size
    s = site_world(tmp_path, patients=PATIENTS, max_artifact_bytes=size - 1)
    before = s.site.ledger.store.state.size, s.intake.register.store.state.size, dict(s.vault.notes)
    with pytest.raises(
        RefusedBeforehandError, match=f"{case.pictures} images of this size may take more than the policy's"
    ):
        case.release(s)
    after = s.site.ledger.store.state.size, s.intake.register.store.state.size, dict(s.vault.notes)
    assert (s.vault.reads, after) == (0, before)
    (tmp_path / "third").mkdir()
    fits = site_world(tmp_path / "third", patients=PATIENTS, max_artifact_bytes=size)
    assert "artifact_size" not in {finding.rule for finding in known_objections(fits.site, case.foreseen(fits))}


@pytest.mark.parametrize("name", SET_RELEASES)
def test_a_disk_that_could_not_keep_it_is_said_beforehand(tmp_path: Path, name: str) -> None:
    case, s = SET_RELEASES[name], site_world(tmp_path, patients=PATIENTS)
    s.vault.free = case.foreseen(s).disk - 1
    with pytest.raises(RefusedBeforehandError, match="free some space"):
        case.release(s)
    assert (s.vault.reads, len(s.site.ledger.store.state.grants)) == (0, 0)


def test_a_tasks_model_is_weighed_by_its_file(tmp_path: Path) -> None:
    case = SET_RELEASES["model"]
    size = len(case.mechanism.untrained())
    s = site_world(tmp_path, max_artifact_bytes=size - 1)
    assert (case.foreseen(s).size, case.foreseen(s).samples) == (size, 0)
    with pytest.raises(RefusedBeforehandError, match=rf"the model takes {size} bytes, .*: a smaller network"):
        case.release(s)
    assert (s.vault.reads, len(s.site.ledger.store.state.grants)) == (0, 0)


def test_a_model_is_weighed_by_its_untrained_file(tmp_path: Path) -> None:
    output = replace(DISTILL.course.output, release="model")
    model = replace(DISTILL, course=replace(DISTILL.course, output=output))
    size = len(model.course.untrained())
    s = site_world(tmp_path, max_artifact_bytes=size - 1)
    with pytest.raises(RefusedBeforehandError, match=f"the model takes {size} bytes"):
        release_resumable(s.site, model, Selection("OT", model.shape), UnsafeSeededEntropy(1))
    assert not s.site.ledger.store.state.grants


def test_more_than_one_shard_is_refused_whatever_the_policy_admits(tmp_path: Path) -> None:
    s = site_world(tmp_path, max_artifact_bytes=1 << 40)
    many = replace(PRIVIMAGE, synthetic=replace(PRIVIMAGE.synthetic, pictures=100_000))
    found = of_configuration(s.site, many, Selection("OT", many.shape), ReleaseFormat())
    assert [f.rule for f in known_objections(s.site, replace(found, samples=100_001))] == ["artifact_size"]
    large = replace(found, shape=(2048, 2048, 3), samples=22)
    assert plain_bytes(22, large.shape, Png()) > MAX_SHARD
    assert ["21 would fit" in f.detail for f in known_objections(s.site, large)] == [True]


def test_clusters_that_are_shown_again_count_too(tmp_path: Path) -> None:
    s = site_world(tmp_path, patients=12, max_releases_per_patient=3)
    small = SetRelease(ksame(), 2, public=False)
    release_synthetic(s.site, small.mechanism, "OT", np.random.default_rng(1))
    s.vault.patients = 24
    found = small.foreseen(s)
    assert found.samples == 2 + 12 // 5
    signed, _ = release_synthetic(s.site, small.mechanism, "OT", np.random.default_rng(1))
    assert signed.release.artifact_bytes <= found.size


@pytest.mark.parametrize(("wide", "type_"), [(False, np.int16), (True, np.float32)])
def test_heads_are_counted_and_weighed_without_opening_one(
    tmp_path: Path, wide: bool, type_: type[np.generic]
) -> None:
    s = site_world(tmp_path)
    values = np.zeros(remodel().shape, type_)
    s.vault.heads = tuple(Scan(f"{n:04d}", Volume(values, np.eye(4)), "a") for n in range(3))
    s.vault.wide = wide
    found = of_heads(s.site, remodel(), "MR")
    assert (found.samples, found.public, s.vault.reads) == (3, False, 0)
    made = type("Made", (), {"volumes": [values] * 3, "labels": ("x" * 32,) * 3, "spacing": (1.0, 1.0, 1.0)})()
    assert found.size == len(pack_volumes(made))
    tight = site_world(_fresh(tmp_path), max_artifact_bytes=found.size - 1)
    tight.vault.heads, tight.vault.wide = s.vault.heads, wide
    with pytest.raises(RefusedBeforehandError, match="3 volumes of this size"):
        release_heads(tight.site, remodel(), "MR", examine, np.random.default_rng(1))
    assert (tight.vault.reads, len(tight.site.ledger.store.state.grants)) == (0, 0)


HALF = replace(FEDERATED, update_precision=BFLOAT16)


@pytest.mark.parametrize("job", [FEDERATED, HALF, MASKED], ids=["federated", "bfloat16", "federated-masked"])
def test_a_run_whose_updates_no_policy_admits_is_not_priced(tmp_path: Path, job: Any) -> None:
    size = update_bytes(job)
    s = site_world(tmp_path, max_artifact_bytes=size - 1, levels='["A", "A*", "B"]')
    with pytest.raises(ReviewRejectedError, match="artifact_size"):
        Participant(s.site, "OT", UnsafeSeededEntropy(1)).join("run-1", job)
    assert not s.site.ledger.store.state.grants


def _fresh(tmp_path: Path) -> Path:
    (tmp_path / "second").mkdir()
    return tmp_path / "second"
