"""A made set is not made in vain: kill -9, a full disk and a coordinator without room, over the real port."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agent import runtime
from agent.domain import Cohort
from agent.mechanisms.registry import KSame
from agent.storage import projects
from agent.storage.encrypted_sqlite import EncryptedCheckpointStore
from protos.artifacts.arrays import unpack_images
from tests.faults.stage import resized, small_disk
from tests.support.command_line import Typed, at, typed
from tests.support.federation_world import Federation, Site
from tests.support.release_site import blobs, filled, held, kept, killed, ksame_words, site
from tests.support.unchanged import untouched
from tests.support.vault_records import record

__all__ = ["site", "typed"]  # fixtures


@pytest.mark.parametrize("moment", ["before-sent", "before-submit", "half-sent"])
def test_what_was_made_when_it_was_killed_is_sent_later_under_the_grant_that_it_had(
    typed: Typed, site: Site, tmp_path: Path, moment: str
) -> None:
    killed(site, tmp_path, moment)
    (name,) = kept(site)
    said = typed(*at(site), *ksame_words(tmp_path))
    assert f"release send {name}" in said.err
    assert (said.status, held(site), kept(site)) == (1, (1, 0), [name]), "nothing was spent or forgotten by asking"
    said = typed(*at(site), "release", "send", name, "--json")
    assert (said.status, said.line["admitted"], held(site)) == (0, True, (0, 1)), said.err
    assert list(site.federation.store.state.releases) == [name]
    assert len(site.federation.store.state.grants) == 1
    assert (kept(site), blobs(site)) == ([], 0), "and nothing of it stays"


@pytest.mark.parametrize("moment", ["making", "keeping"])
def test_what_was_not_made_yet_is_made_again_by_the_same_dice_under_its_grant(
    typed: Typed, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    killed(site, tmp_path, moment)
    assert (held(site), kept(site)) == ((1, 0), [])
    said = typed(*at(site), *ksame_words(tmp_path)[:-3], "4", "--modality", "OT")
    assert (said.status, "--anew" in said.err, held(site)) == (1, True, (1, 0)), "another one is not begun beside it"
    sets = []
    run = KSame.run

    def seen(self: KSame, cohort: Cohort, rng: np.random.Generator, others: object) -> object:
        sets.append(rng.bit_generator.state)
        return run(self, cohort, rng, others)  # type: ignore[arg-type]

    with closing(projects.open_vault(site.home, "main")) as vault:
        dice = vault.project_note("unfinished")["dice"]
        vault.keep_all([record(99, 99, "0")])  # who came meanwhile is in the next one
        persons = vault.project_note("unfinished")["persons"]
    monkeypatch.setattr(KSame, "run", seen)
    said = typed(*at(site), *ksame_words(tmp_path), "--json")
    assert (said.status, said.line["admitted"], held(site)) == (0, True, (0, 1)), said.err
    assert (sets, len(site.federation.store.state.grants)) == ([dice], 1)
    with closing(projects.open_vault(site.home, "main")) as vault:
        (one,) = vault.note("releases")
        assert sorted(person for cluster in one["clusters"] for person in cluster) == persons
        assert vault.project_note("unfinished") is None


def test_what_was_interrupted_is_given_up_when_that_is_said_and_not_otherwise(
    typed: Typed, site: Site, tmp_path: Path
) -> None:
    killed(site, tmp_path, "making")
    said = typed(*at(site), *ksame_words(tmp_path), "--anew")
    assert said.status == 1, "the one release of these patients is spent: the policy admits no second one"
    assert "used up" in said.out
    assert held(site) == (0, 1)


@pytest.mark.parametrize("moment", ["after-verdict", "before-forgotten"])
def test_a_set_that_was_admitted_when_the_agent_was_killed_is_kept_no_longer(
    typed: Typed, site: Site, tmp_path: Path, moment: str
) -> None:
    killed(site, tmp_path, moment)
    (name,) = kept(site)
    said = typed(*at(site), "release", "send", name)
    assert (said.status, "no release of that name is kept here" in said.out) == (1, True), said.out
    assert (held(site), kept(site), blobs(site)) == ((0, 1), [], 0)
    assert list(site.federation.store.state.releases) == [name]


def test_a_coordinator_without_room_is_asked_again_later_and_gets_the_same_bytes(
    typed: Typed, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = runtime.GatewayClient
    monkeypatch.setattr(runtime, "GatewayClient", lambda *told, **more: gateway(*told, **{**more, "patience_s": 0.5}))
    uploads = site.federation.uploads
    monkeypatch.setattr(uploads, "keep_free", 1 << 60)  # as if its disk were full
    said = typed(*at(site), *ksame_words(tmp_path))
    (name,) = kept(site)
    assert (said.status, f"release send {name}" in said.err, held(site)) == (1, True, (1, 0)), said.err
    with closing(projects.open_vault(site.home, "main")) as vault:
        raw = EncryptedCheckpointStore(vault._notes, f"site/kept/{name}/artifact").read()
    assert raw is not None
    assert all(raw[:4096] not in path.read_bytes() for path in site.home.root.rglob("*") if path.is_file()), "sealed"
    monkeypatch.setattr(uploads, "keep_free", 0)
    said = typed(*at(site), "release", "send", name)
    assert (said.status, held(site)) == (0, (0, 1)), said.err
    assert (site.federation.home.releases / name / "images.tar").read_bytes() == raw


def test_somebody_who_opts_out_meanwhile_ends_the_made_set_at_the_next_start(
    typed: Typed, site: Site, tmp_path: Path
) -> None:
    killed(site, tmp_path, "before-submit")
    (name,) = kept(site)
    with closing(projects.open_vault(site.home, "main")) as vault:
        vault._notes.opt_out(vault.note("releases")[0]["clusters"][0][0])
    said = typed(*at(site), "release", "send", name)
    assert (said.status, "opted out" in said.out) == (1, True)
    assert site.federation.store.state.releases == {}
    assert (held(site), kept(site), blobs(site)) == ((0, 1), [], 0)


@pytest.mark.parametrize("left_kib", [0, 40])
def test_a_disk_that_fills_while_a_set_is_made_spends_nothing_and_the_same_set_is_made_when_there_is_room(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_kib: int
) -> None:
    """A real full disk: the site's home is a tmpfs that is made as small as what lies on it."""
    roomy = 400 * 1024
    with Federation(tmp_path) as federation:
        site = federation.join("site-a")
        kept_beside = tmp_path / "beside"
        site.home.root.rename(kept_beside)
        with small_disk(site.home.root, roomy) as disk:
            subprocess.run(["cp", "-a", f"{kept_beside}/.", str(disk)], check=True)
            filled(site, tmp_path)
            made = []
            run = KSame.run

            def fills(self: KSame, *told: object) -> object:
                made.append(run(self, *told))  # type: ignore[arg-type]
                if len(made) == 1:
                    used = os.statvfs(disk)
                    resized(disk, (used.f_blocks - used.f_bfree) * used.f_frsize // 1024 + left_kib)
                return made[-1]

            monkeypatch.setattr(KSame, "run", fills)
            said = typed(*at(site), *ksame_words(tmp_path))
            assert said.status in (1, 70), said.err + said.out
            resized(disk, roomy)
            for name in kept(site):  # it was kept, and the ledger found no room
                assert typed(*at(site), "release", "send", name).status == 0
            if not federation.store.state.releases:
                said = typed(*at(site), *ksame_words(tmp_path))
                assert said.status == 0, said.err + said.out
                assert len(made) == 2
                assert (made[0][0].images == made[1][0].images).all()
            assert held(site) == (0, 1)
            assert len(federation.store.state.grants) == 1


# ---------------------------------------------------------------- known beforehand


def policy(site: Site, key: str, value: str) -> None:
    path = site.home.root / "policy.toml"
    lines = [f"{key} = {value}" if line.startswith(f"{key} ") else line for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")


def test_a_dry_run_says_price_number_and_bytes_and_touches_nothing(typed: Typed, site: Site, tmp_path: Path) -> None:
    with untouched(site):
        said = typed(*at(site), *ksame_words(tmp_path), "--dry-run")
        line = typed(*at(site), *ksame_words(tmp_path), "--dry-run", "--json").line
    assert said.status == 0, said.err
    for words in ("1 of 1 are left", "at most 4 images of 8 x 8", "keep it here", "the policies admit 268435456"):
        assert words in said.out
    assert line["samples"] == {"most": 4, "exact": False, "shape": [8, 8]}
    assert (line["would_go"], line["price"]["amount"], line["findings"]) == (True, 1, [])
    assert typed(*at(site), *ksame_words(tmp_path)).status == 0
    (name,) = site.federation.store.state.releases
    raw = (site.federation.home.releases / name / "images.tar").read_bytes()
    assert len(raw) <= line["bytes"]["most"]
    assert len(unpack_images(raw)[0]) <= line["samples"]["most"]
    said = typed(*at(site), *ksame_words(tmp_path), "--dry-run", "--json")
    assert (said.status, said.line["price"]["left"], said.line["findings"][0]["rule"]) == (1, 0, "budget")


@pytest.mark.parametrize(
    "rule",
    [
        ("max_artifact_bytes", "1024", "4 images of this size may take more than the policy's max_artifact_bytes"),
        ("artifact_types", '["model"]', "does not admit image-set"),
        ("levels", '["A"]', "does not admit releases of level B"),
    ],
    ids=lambda rule: rule[0],
)
def test_what_the_policy_would_refuse_at_the_end_is_refused_before_anything_is_read(
    typed: Typed, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: tuple[str, str, str]
) -> None:
    key, value, words = rule
    policy(site, key, value)
    monkeypatch.setattr(KSame, "run", lambda *_: pytest.fail("made"))
    entries = site.federation.store.state.size
    with untouched(site):
        dry = typed(*at(site), *ksame_words(tmp_path), "--dry-run")
        assert (dry.status, words in dry.out) == (1, True), dry.out
    said = typed(*at(site), *ksame_words(tmp_path))
    assert (said.status, words in said.err) == (1, True), said.err
    assert (held(site), site.federation.store.state.size) == ((0, 0), entries)


def test_a_disk_that_could_not_keep_the_set_is_said_before_the_price(
    typed: Typed, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = json.loads(typed(*at(site), *ksame_words(tmp_path), "--dry-run", "--json").out)["disk"]["needed"]
    real = os.statvfs(site.home.root)
    fields = [*real[:4], needed // real.f_frsize - 1, *real[5:]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    said = typed(*at(site), *ksame_words(tmp_path))
    assert (said.status, "free some space" in said.err, held(site)) == (1, True, (0, 0)), said.err
