"""A made set is not made in vain: kill -9, a full disk and a coordinator without room, over the real port."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent import desk
from agent.edges import projects
from agent.edges.sealed import SealedPlace
from agent.mechanisms import KSame
from agent.nouns import Cohort
from agent.stages.invert import fit_basis, save_basis
from protos.artifact import unpack_images
from tests.agent.edges.test_vault import record
from tests.agent.test_synthesis_commands import Typed, at, typed
from tests.faults.stage import resized, small_disk
from tests.support.federation import Federation, Site
from tests.support.untouched import untouched

__all__ = ["typed"]  # a fixture
KILLED = Path(__file__).parent.parent / "support" / "killed_agent.py"
PATIENTS = 24


def filled(site: Site, folder: Path) -> Site:
    """Patients, and the basis whose digest the site vouches for."""
    raw = save_basis(fit_basis(np.random.default_rng(9).random((40, 8, 8)).astype(np.float32), 8, "public"))
    (folder / "basis.safetensors").write_bytes(raw)
    settings = site.home.root / "site.toml"
    vouched = f'public_components = ["{hashlib.sha256(raw).hexdigest()}"]'
    settings.write_text(settings.read_text().replace("public_components = []", vouched))
    with closing(projects.open_vault(site.home, "main")) as vault:
        dice = np.random.default_rng(1)
        shots = [record(n, n, str(n % 3)) for n in range(PATIENTS)]
        vault.keep_all([replace(shot, pixels=dice.random((8, 8), np.float32)) for shot in shots])
    with desk.open_desk(site.home.root, lambda *_: None):  # which founds the ledger
        pass
    return site


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Site]:
    with Federation(tmp_path) as federation:
        yield filled(federation.join("site-a"), tmp_path)


def ksame(folder: Path, *more: object) -> list[object]:
    basis = folder / "basis.safetensors"
    return ["release", "ksame", "--basis", basis, "--k", "5", "--modality", "OT", *more]


def held(site: Site) -> tuple[int, int]:
    """(held, spent) of the account of k, at the coordinator."""
    account = site.federation.store.state.accounts["site-a/k"]
    return account.held, account.spent


def kept(site: Site) -> list[str]:
    with closing(projects.open_vault(site.home, "main")) as vault:
        return sorted(vault.note("pending") or {})


def blobs(site: Site) -> int:
    """Rows of made sets in the site's own books."""
    with closing(projects.open_vault(site.home, "main")) as vault:
        return int(vault._notes.rows("SELECT count(*) FROM note WHERE name LIKE '%kept/%'")[0][0])


def killed(site: Site, folder: Path, moment: str) -> None:
    words = [str(word) for word in (*at(site), *ksame(folder))]
    done = subprocess.run([sys.executable, str(KILLED), moment, *words], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.parametrize("moment", ["before-sent", "before-submit", "half-sent"])
def test_what_was_made_when_it_was_killed_is_sent_later_under_the_grant_that_it_had(
    typed: Typed, ward: Site, tmp_path: Path, moment: str
) -> None:
    killed(ward, tmp_path, moment)
    (name,) = kept(ward)
    said = typed(*at(ward), *ksame(tmp_path))
    assert f"release send {name}" in said.err
    assert (said.status, held(ward), kept(ward)) == (1, (1, 0), [name]), "nothing was spent or forgotten by asking"
    said = typed(*at(ward), "release", "send", name, "--json")
    assert (said.status, said.line["admitted"], held(ward)) == (0, True, (0, 1)), said.err
    assert list(ward.federation.store.state.releases) == [name]
    assert len(ward.federation.store.state.grants) == 1
    assert (kept(ward), blobs(ward)) == ([], 0), "and nothing of it stays"


@pytest.mark.parametrize("moment", ["making", "keeping"])
def test_what_was_not_made_yet_is_made_again_by_the_same_dice_under_its_grant(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    killed(ward, tmp_path, moment)
    assert (held(ward), kept(ward)) == ((1, 0), [])
    said = typed(*at(ward), *ksame(tmp_path)[:-3], "4", "--modality", "OT")
    assert (said.status, "--anew" in said.err, held(ward)) == (1, True, (1, 0)), "another one is not begun beside it"
    sets = []
    run = KSame.run

    def seen(self: KSame, cohort: Cohort, rng: np.random.Generator, others: object) -> object:
        sets.append(rng.bit_generator.state)
        return run(self, cohort, rng, others)  # type: ignore[arg-type]

    with closing(projects.open_vault(ward.home, "main")) as vault:
        dice = vault.project_note("unfinished")["dice"]
        vault.keep_all([record(99, 99, "0")])  # who came meanwhile is in the next one
        persons = vault.project_note("unfinished")["persons"]
    monkeypatch.setattr(KSame, "run", seen)
    said = typed(*at(ward), *ksame(tmp_path), "--json")
    assert (said.status, said.line["admitted"], held(ward)) == (0, True, (0, 1)), said.err
    assert (sets, len(ward.federation.store.state.grants)) == ([dice], 1)
    with closing(projects.open_vault(ward.home, "main")) as vault:
        (one,) = vault.note("releases")
        assert sorted(person for cluster in one["clusters"] for person in cluster) == persons
        assert vault.project_note("unfinished") is None


def test_what_was_interrupted_is_given_up_when_that_is_said_and_not_otherwise(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    killed(ward, tmp_path, "making")
    said = typed(*at(ward), *ksame(tmp_path), "--anew")
    assert said.status == 1, "the one release of these patients is spent: the policy admits no second one"
    assert "used up" in said.out
    assert held(ward) == (0, 1)


@pytest.mark.parametrize("moment", ["after-verdict", "before-forgotten"])
def test_a_set_that_was_admitted_when_the_agent_was_killed_is_kept_no_longer(
    typed: Typed, ward: Site, tmp_path: Path, moment: str
) -> None:
    killed(ward, tmp_path, moment)
    (name,) = kept(ward)
    said = typed(*at(ward), "release", "send", name)
    assert (said.status, "no release of that name is kept here" in said.out) == (1, True), said.out
    assert (held(ward), kept(ward), blobs(ward)) == ((0, 1), [], 0)
    assert list(ward.federation.store.state.releases) == [name]


def test_a_coordinator_without_room_is_asked_again_later_and_gets_the_same_bytes(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = desk.GrpcDoor
    monkeypatch.setattr(desk, "GrpcDoor", lambda *told, **more: door(*told, **{**more, "patience_s": 0.5}))
    uploads = ward.federation.uploads
    monkeypatch.setattr(uploads, "keep_free", 1 << 60)  # as if its disk were full
    said = typed(*at(ward), *ksame(tmp_path))
    (name,) = kept(ward)
    assert (said.status, f"release send {name}" in said.err, held(ward)) == (1, True, (1, 0)), said.err
    with closing(projects.open_vault(ward.home, "main")) as vault:
        raw = SealedPlace(vault._notes, f"site/kept/{name}/artifact").read()
    assert raw is not None
    assert all(raw[:4096] not in path.read_bytes() for path in ward.home.root.rglob("*") if path.is_file()), "sealed"
    monkeypatch.setattr(uploads, "keep_free", 0)
    said = typed(*at(ward), "release", "send", name)
    assert (said.status, held(ward)) == (0, (0, 1)), said.err
    assert (ward.federation.home.releases / name / "images.tar").read_bytes() == raw


def test_somebody_who_opts_out_meanwhile_ends_the_made_set_at_the_next_start(
    typed: Typed, ward: Site, tmp_path: Path
) -> None:
    killed(ward, tmp_path, "before-submit")
    (name,) = kept(ward)
    with closing(projects.open_vault(ward.home, "main")) as vault:
        vault._notes.opt_out(vault.note("releases")[0]["clusters"][0][0])
    said = typed(*at(ward), "release", "send", name)
    assert (said.status, "opted out" in said.out) == (1, True)
    assert ward.federation.store.state.releases == {}
    assert (held(ward), kept(ward), blobs(ward)) == ((0, 1), [], 0)


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
            said = typed(*at(site), *ksame(tmp_path))
            assert said.status in (1, 70), said.err + said.out
            resized(disk, roomy)
            for name in kept(site):  # it was kept, and the ledger found no room
                assert typed(*at(site), "release", "send", name).status == 0
            if not federation.store.state.releases:
                said = typed(*at(site), *ksame(tmp_path))
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


def test_a_dry_run_says_price_number_and_bytes_and_touches_nothing(typed: Typed, ward: Site, tmp_path: Path) -> None:
    with untouched(ward):
        said = typed(*at(ward), *ksame(tmp_path), "--dry-run")
        line = typed(*at(ward), *ksame(tmp_path), "--dry-run", "--json").line
    assert said.status == 0, said.err
    for words in ("1 of 1 are left", "at most 4 pictures of 8 x 8", "keep it here", "the policies admit 268435456"):
        assert words in said.out
    assert line["samples"] == {"most": 4, "exact": False, "shape": [8, 8]}
    assert (line["would_go"], line["price"]["amount"], line["findings"]) == (True, 1, [])
    assert typed(*at(ward), *ksame(tmp_path)).status == 0
    (name,) = ward.federation.store.state.releases
    raw = (ward.federation.home.releases / name / "images.tar").read_bytes()
    assert len(raw) <= line["bytes"]["most"]
    assert len(unpack_images(raw)[0]) <= line["samples"]["most"]
    said = typed(*at(ward), *ksame(tmp_path), "--dry-run", "--json")
    assert (said.status, said.line["price"]["left"], said.line["findings"][0]["rule"]) == (1, 0, "budget")


@pytest.mark.parametrize(
    "rule",
    [
        ("max_artifact_bytes", "1024", "4 pictures of this size may take more than the policy's max_artifact_bytes"),
        ("artifact_types", '["model"]', "does not admit image-set"),
        ("levels", '["A"]', "does not admit releases of level B"),
    ],
    ids=lambda rule: rule[0],
)
def test_what_the_policy_would_refuse_at_the_end_is_refused_before_anything_is_read(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: tuple[str, str, str]
) -> None:
    key, value, words = rule
    policy(ward, key, value)
    monkeypatch.setattr(KSame, "run", lambda *_: pytest.fail("made"))
    entries = ward.federation.store.state.size
    with untouched(ward):
        dry = typed(*at(ward), *ksame(tmp_path), "--dry-run")
        assert (dry.status, words in dry.out) == (1, True), dry.out
    said = typed(*at(ward), *ksame(tmp_path))
    assert (said.status, words in said.err) == (1, True), said.err
    assert (held(ward), ward.federation.store.state.size) == ((0, 0), entries)


def test_a_disk_that_could_not_keep_the_set_is_said_before_the_price(
    typed: Typed, ward: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = json.loads(typed(*at(ward), *ksame(tmp_path), "--dry-run", "--json").out)["disk"]["needed"]
    real = os.statvfs(ward.home.root)
    fields = [*real[:4], needed // real.f_frsize - 1, *real[5:]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    said = typed(*at(ward), *ksame(tmp_path))
    assert (said.status, "make room" in said.err, held(ward)) == (1, True, (0, 0)), said.err
