"""Two patient ids with equal pictures, or one UID, count as one patient towards k until a person decides."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from agent.domain import Selection
from agent.errors import CohortTooSmallError
from agent.ingest.context import open_ingest
from agent.release import pipeline
from agent.release.history import patients_of
from agent.release.pipeline import release_synthetic
from agent.storage import projects
from agent.storage import vault as vaults
from agent.storage.equal_patients import group_equal_patients, left_out
from agent.storage.instance_index import DefacedInstance, InstanceRecord, head_of
from agent.storage.pixel_codec import packed
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory
from agent.storage.vault import Vault
from tests.support.ingest_site import ingest_site, typed
from tests.support.site_world import RNG, SHAPE, SiteWorld, ksame, site_world
from tests.support.vault_records import key_of, picture_record

OT = Selection("OT", SHAPE)


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    opened = Vault(SiteDatabase(tmp_path / "vault.db", bytes(32)), tmp_path / "main.db", bytes(range(32)))
    yield opened
    opened.close()


def in_cohort(vault: Vault) -> set[str]:
    return {patient.pseudonym for patient in vault.cohort(OT).patients}


# -- who counts as one

MARKS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=20)  # a patient has a picture
DECIDED = st.lists(st.frozensets(st.integers(0, 7), min_size=2, max_size=4), max_size=4)


def heads(marks: list[tuple[int, int]]) -> list[InstanceRecord]:
    return [head_of(picture_record(p, n), "", key_of(m, 7)) for n, (p, m) in enumerate(marks)]


@given(marks=MARKS, decided=DECIDED)
def test_the_groups_are_all_who_are_joined_by_pairs_that_nobody_has_told_apart(
    marks: list[tuple[int, int]], decided: list[frozenset[int]]
) -> None:
    pairs = {
        (a, b)
        for mark in range(6)
        for a, b in combinations(sorted({p for p, m in marks if m == mark}), 2)
        if not any({a, b} <= group for group in decided)
    }
    graph = coo_array((np.ones(len(pairs)), tuple(np.array(sorted(pairs)).reshape(-1, 2).T)), shape=(8, 8))
    _, group = connected_components(graph, directed=False)
    expected = {frozenset(key_of(p, 3) for p in range(8) if group[p] == one) for one in group}
    apart = [frozenset(key_of(p, 3) for p in one) for one in decided]
    found = group_equal_patients(heads(marks), apart)
    assert {one.persons for one in found} == {one for one in expected if len(one) > 1}
    assert all(one.why == ("picture",) for one in found)


PEOPLE = st.frozensets(st.integers(0, 11).map(str))


@given(persons=st.permutations([str(n) for n in range(12)]), found=PEOPLE, taken=PEOPLE)
def test_of_each_group_one_id_stays_and_none_where_one_is_taken(
    persons: list[str], found: frozenset[str], taken: frozenset[str]
) -> None:
    groups = [frozenset(persons[:2]), frozenset(persons[2:5]), frozenset(persons[5:9])]
    out = left_out(groups, found, taken)
    assert out.isdisjoint(persons[9:]), "who is in no group is never left out"
    for group in groups:
        stays = (group & found) - out - taken
        assert len(stays) == (0 if group & taken or not group & found else 1)


def test_equal_pictures_and_one_uid_are_shown_and_pictures_that_show_nothing_are_not(vault: Vault) -> None:
    blank = [replace(picture_record(p, n), pixels=np.full(SHAPE, 0.5, np.float32)) for p, n in ((5, 50), (6, 60))]
    vault.keep_all(
        [
            picture_record(0, 1),
            picture_record(1, 2, picture=1),
            picture_record(2, 3),
            picture_record(3, 4, instance=3),
            *blank,
        ]
    )
    found = {(frozenset(one.persons), one.why) for one in vault.alike()}
    assert found == {
        (frozenset({key_of(0, 3), key_of(1, 3)}), ("picture",)),
        (frozenset({key_of(2, 3), key_of(3, 3)}), ("instance",)),
    }
    assert in_cohort(vault) == {key_of(n, 3) for n in range(4)}, "a cohort never changes by it"


def test_a_picture_whose_face_was_taken_off_is_compared_as_it_is_now(vault: Vault) -> None:
    vault.keep_all([replace(picture_record(n, n, picture=1), face=True) for n in (0, 1)])
    assert len(vault.alike()) == 1
    (face,) = vault.faces_of(picture_record(0, 0).study)
    vault.defaced([DefacedInstance(face.name, b"NEW", picture_record(0, 9).pixels)])
    assert vault.alike() == ()
    (face,) = vault.faces_of(picture_record(1, 1).study)
    vault.defaced([DefacedInstance(face.name, b"NEW", picture_record(0, 9).pixels)])
    assert len(vault.alike()) == 1


def test_a_picture_that_an_older_version_packed_is_equal_to_the_same_one_of_today(vault: Vault) -> None:
    pixels = picture_record(0, 0).pixels
    assert pixels is not None
    fine = np.rint(pixels * np.float32(65535)).astype("<u2").tobytes()
    assert len(packed(pixels)) < len(fine)
    assert vault._picture(packed(pixels), SHAPE) == vault._picture(fine, SHAPE) != ""
    assert vault._picture(packed(pixels), (4, 16)) != vault._picture(fine, SHAPE)


def test_a_person_decides_once_and_a_new_id_asks_again(vault: Vault) -> None:
    vault.keep_all([picture_record(0, 0), picture_record(1, 1, picture=0)])
    (one,) = vault.alike()
    assert vault.tell_apart(one.name) == 2
    assert vault.alike() == ()
    with pytest.raises(KeyError):
        vault.tell_apart(one.name)
    vault.keep(picture_record(1, 5, picture=0))
    assert vault.alike() == (), "the same two are decided"
    vault.keep(picture_record(2, 2, picture=0))
    (one,) = vault.alike()
    assert len(one.persons) == 3, "the third may be either"
    vault.tell_apart(one.name)
    assert vault.alike() == ()


def test_what_was_decided_is_forgotten_with_the_patient(tmp_path: Path) -> None:
    with contextlib.closing(SiteDatabase(tmp_path / "vault.db", bytes(32))) as notes:
        notes.tell_apart({key_of(n, 3) for n in range(3)})
        notes.opt_out(key_of(0, 3))
        notes.purged({key_of(0, 3)})
        assert notes.apart() == (frozenset({key_of(1, 3), key_of(2, 3)}),)
        notes.purged({key_of(1, 3)})
        assert notes.apart() == ()


# -- releases

DOUBLES = 12


@pytest.fixture
def ward(tmp_path: Path, vault: Vault) -> SiteWorld:
    """A site of two persons, who have six ids each, and equal pictures under all of them."""
    s = site_world(tmp_path)
    vault.keep_all([picture_record(n, n, picture=n % 2) for n in range(DOUBLES)])
    s.site = replace(s.site, vault=vault)
    return s


def test_k_of_five_is_not_reached_by_two_persons_of_many_ids(ward: SiteWorld) -> None:
    with pytest.raises(CohortTooSmallError):
        release_synthetic(ward.site, ksame(), "OT", RNG)
    assert ward.spent("k") == ((0, 0), (0, 0)), "known beforehand: nothing is priced"


def test_a_count_of_ids_would_let_them_through(ward: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule broken on purpose, before the making and at the door: two persons behind every picture of k = 5."""
    monkeypatch.setattr(vaults, "left_out", lambda *_: frozenset())
    monkeypatch.setattr(pipeline, "still_enough", lambda *_: None)
    signed, verdict = release_synthetic(ward.site, ksame(), "OT", RNG)
    assert verdict.admitted
    assert len(patients_of(ward.site, signed.release.release)) == DOUBLES


def test_once_a_person_has_told_them_apart_they_count(ward: SiteWorld, vault: Vault) -> None:
    vault.keep_all([picture_record(n, 100 + n) for n in range(DOUBLES)])
    for one in vault.alike():
        vault.tell_apart(one.name)
    _, verdict = release_synthetic(ward.site, ksame(), "OT", RNG)
    assert verdict.admitted


def test_one_id_of_each_group_takes_part_and_the_others_never_while_it_is_out(ward: SiteWorld, vault: Vault) -> None:
    vault.keep_all([picture_record(n, 200 + n) for n in range(20, 32)])
    signed, verdict = release_synthetic(ward.site, ksame(), "OT", RNG)
    assert verdict.admitted
    behind = patients_of(ward.site, signed.release.release)
    assert behind == {key_of(n, 3) for n in (0, 1, *range(20, 32))}
    vault.keep_all([picture_record(n, 300 + n) for n in range(40, 52)])
    out = vault.second_ids(OT, frozenset(behind))
    assert out == {key_of(n, 3) for n in range(2, 12)}, "a person is in one released cluster, whatever the id"


def test_a_cluster_that_turns_out_to_be_of_fewer_patients_is_not_shown_again(tmp_path: Path, vault: Vault) -> None:
    s = site_world(tmp_path, max_releases_per_patient=9)
    vault.keep_all([picture_record(n, n) for n in range(5)])
    s.site = replace(s.site, vault=vault)
    first, verdict = release_synthetic(s.site, ksame(), "OT", RNG)
    assert verdict.admitted
    vault.keep_all(
        [picture_record(0, 100), picture_record(1, 101, picture=100), *(picture_record(n, n) for n in range(10, 15))]
    )
    second, _ = release_synthetic(s.site, ksame(), "OT", RNG)
    assert patients_of(s.site, second.release.release) == {key_of(n, 3) for n in range(10, 15)}
    assert patients_of(s.site, first.release.release) == {key_of(n, 3) for n in range(5)}


# -- typed


@pytest.fixture
def site(tmp_path: Path) -> Path:
    ingest_site(tmp_path, "OT")
    with open_ingest(SiteDirectory(tmp_path / "site"), "main") as way:
        way.vault.keep_all([picture_record(0, 0), picture_record(1, 1, picture=0), picture_record(2, 2)])
    return tmp_path / "site"


def test_a_person_sees_why_and_decides_and_the_decision_is_logged(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = typed(capsys, site, "cohort")
    assert (status, "1 groups of patient ids count as one patient each" in err) == (0, True)
    status, out, _ = typed(capsys, site, "cohort", "--same", "--json")
    (group,) = json.loads(out)
    studies = sorted(picture_record(n, n).study for n in (0, 1))
    assert (group["ids"], group["why"], group["studies"]) == (2, ["picture"], studies)
    status, out, _ = typed(capsys, site, "cohort", "--same")
    assert group["name"] in out
    assert "equal images" in out
    assert all(study in out for study in studies)
    assert not any(key_of(n, 3) in out for n in range(3)), "no pseudonym is shown"
    assert typed(capsys, site, "cohort", "--apart", "0" * 16)[0] == 1
    assert typed(capsys, site, "cohort", "--apart", group["name"])[0] == 0
    assert json.loads(typed(capsys, site, "cohort", "--same", "--json")[1]) == []
    assert "groups of patient ids" not in typed(capsys, site, "cohort")[2]
    logged = [json.loads(line) for line in (site / "agent.log").read_text().splitlines()]
    (one,) = [line for line in logged if line["event"] == "ids_told_apart"]
    assert (one["where"], one["count"]) == (group["name"], 2)
    with contextlib.closing(projects.open_vault(SiteDirectory(site))) as vault:
        assert vault.alike() == (), "it is the site's word, and lasts"
