"""Frozen partitions: the second release of a grown cohort, erasure, and the site's record of both."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.domain import Clusters, Latents
from agent.errors import CohortTooSmallError
from agent.microaggregation.aggregation import average
from agent.microaggregation.partition import partition
from agent.microaggregation.released_clusters import (
    ReleasedCluster,
    ReleaseRecordError,
    from_note,
    merged,
    plan,
    retire,
    to_note,
)

FORM = "f" * 64


def _picture(seed, shape=(1, 4, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def _frozen(members, seed=0, **terms):
    return ReleasedCluster(tuple(members), _picture(seed), "ill", **{"k": 2, "l": 1, "form": FORM, **terms})


def _decoded(codes):
    """Codes (m, 12) as pictures (m, 3, 4): a decoder as good as any, for what is asked here."""
    return np.clip(np.rint(128 + 40 * codes.reshape(-1, 3, 4)), 0, 255).astype(np.uint8)


def _released(codes, frozen, gone, k, seed):
    """One release of what is in ``codes`` (pseudonym -> code): what is kept and what is new."""
    kept, taken = plan(frozen, gone, k, 1, FORM, set(codes))
    new = sorted(set(codes) - taken)
    latents = Latents(np.array([codes[p] for p in new], np.float32).reshape(len(new), 12), tuple(new))
    try:
        clusters = partition(latents, [""] * len(new), k, 1, np.random.default_rng(seed))
    except CohortTooSmallError:
        return kept, ()
    images = _decoded(average(latents, clusters))
    fresh = tuple(ReleasedCluster(c, i[None], "", k, 1, FORM) for c, i in zip(clusters.members, images, strict=True))
    return kept, fresh


def _people(numbers, seed=0):
    return {f"p{i:03d}": np.random.default_rng((seed, i)).normal(size=12) for i in numbers}


def test_a_grown_cohort_shows_the_old_clusters_byte_for_byte_and_new_ones_of_new_patients_only():
    _, first = _released(_people(range(20)), (), set(), 5, 0)
    newer = {**_people(range(20), seed=1), **_people(range(20, 31))}  # all old patients have newer images, too
    kept, fresh = _released(newer, first, set(), 5, 1)
    before = {one.members: one.images.tobytes() for one in first}
    assert {one.members: one.images.tobytes() for one in kept} == before
    assert sorted(p for one in fresh for p in one.members) == [f"p{i:03d}" for i in range(20, 31)]
    assert all(5 <= len(one.members) <= 9 for one in fresh)


def test_made_again_from_newer_images_a_cluster_would_differ_and_be_refused():
    # what P5 forbids: the two pictures of one cluster can be subtracted
    _, first = _released(_people(range(20)), (), set(), 5, 0)
    newer = _people(range(20))
    newer[first[0].members[0]] = newer[first[0].members[0]] + 2.0
    latents = Latents(np.array(list(newer.values()), np.float32), tuple(newer))
    again = Clusters(tuple(one.members for one in first))
    row = again.members.index(first[0].members)
    remade = ReleasedCluster(first[0].members, _decoded(average(latents, again))[row][None], "", 5, 1, FORM)
    assert remade.images.tobytes() != first[0].images.tobytes()
    with pytest.raises(ReleaseRecordError, match="made again"):
        merged([*first, remade])


def test_a_cohort_clustered_anew_after_one_newcomer_would_give_the_newcomer_away():
    # why nothing is clustered anew: the sums of the two releases differ by exactly the newcomer's code
    people, newcomer = _people(range(20)), _people([20])
    totals = []
    for codes in (people, {**people, **newcomer}):
        latents = Latents(np.array(list(codes.values()), np.float32), tuple(codes))
        clusters = partition(latents, [""] * len(codes), 5, 1, np.random.default_rng(0))
        sizes = np.array([len(c) for c in clusters.members])
        totals.append(sizes @ average(latents, clusters).astype(np.float64))
    assert np.abs(totals[1] - totals[0] - newcomer["p020"]).max() < 1e-4
    _, first = _released(people, (), set(), 5, 0)
    kept, fresh = _released({**people, **newcomer}, first, set(), 5, 1)
    assert not fresh, "one newcomer waits"
    assert len(kept) == len(first)


def test_a_cluster_with_one_who_is_gone_is_retired_whole_and_the_others_enter_no_other():
    _, first = _released(_people(range(20)), (), set(), 5, 0)
    gone = {first[0].members[0]}
    kept, taken = plan(first, gone, 5, 1, FORM)
    assert {one.members for one in kept} == {one.members for one in first[1:]}
    assert set(first[0].members) <= taken
    _, fresh = _released({**_people(range(20)), **_people(range(20, 40))}, first, gone, 5, 1)
    assert {p for one in fresh for p in one.members}.isdisjoint(first[0].members)


def test_who_is_gone_enters_no_new_cluster_even_when_never_released():
    assert "p001" in plan((), {"p001"}, 2, 1, FORM)[1]


def test_a_retired_cluster_stays_retired_when_the_erased_patient_comes_back():
    old = (_frozen("ab"), _frozen("cd", 1))
    record = retire(old, {"a"})
    kept, taken = plan(record, set(), 2, 1, FORM)
    assert [one.members for one in kept] == [("c", "d")]
    assert taken == frozenset("abcd")
    assert plan([*old, *record], set(), 2, 1, FORM)[0] == kept, "one record that retires it is enough"


@pytest.mark.parametrize(("k", "ell", "form"), [(3, 1, FORM), (2, 2, FORM), (2, 1, "e" * 64)])
def test_stricter_terms_or_another_form_show_no_old_cluster_but_exclude_its_patients(k, ell, form):
    kept, taken = plan([_frozen("abc")], set(), k, ell, form)
    assert not kept
    assert taken == frozenset("abc")


def test_a_cluster_is_shown_only_where_all_its_patients_are_eligible():
    assert not plan([_frozen("abc")], set(), 2, 1, FORM, {"a", "b"})[0]
    assert plan([_frozen("abc")], set(), 2, 1, FORM, {"a", "b", "c", "x"})[0]


def test_a_patient_in_two_frozen_clusters_is_an_error_that_names_nobody():
    with pytest.raises(ReleaseRecordError, match="two frozen clusters") as refusal:
        plan([_frozen(("anna", "bert")), _frozen(("bert", "carl"))], set(), 2, 1, FORM)
    assert "bert" not in str(refusal.value)
    with pytest.raises(ReleaseRecordError, match="two frozen clusters"):
        plan([_frozen("ab"), ReleasedCluster(("b", "c"))], set(), 2, 1, FORM)


def test_the_same_cluster_in_two_releases_counts_once():
    assert len(plan([_frozen("ab"), _frozen("ba")], set(), 2, 1, FORM)[0]) == 1


def test_the_pictures_of_a_frozen_cluster_cannot_be_changed():
    picture = _picture(3)
    one = ReleasedCluster(("a", "b"), picture, "", 2, 1, FORM)
    before = one.images.tobytes()
    picture[:] = 0
    assert one.images.tobytes() == before
    with pytest.raises(ValueError, match="read-only"):
        one.images[0, 0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        one.images.setflags(write=True)


def test_a_repr_names_no_patient_and_no_label():
    assert "anna" not in repr(_frozen(("anna", "bert")))
    assert "ill" not in repr(_frozen(("anna", "bert")))


@pytest.mark.parametrize("bad", [
    {"members": ()}, {"members": ("a", "a")}, {"members": ("a", "")}, {"k": 3}, {"k": 1}, {"l": 0}, {"l": 3},
    {"form": ""},
    {"images": np.zeros((1, 2, 2), np.float32)}, {"images": np.zeros((2, 2), np.uint8)},
    {"images": np.zeros((1, 2, 2, 4), np.uint8)}, {"images": np.zeros((1, 0, 2), np.uint8)},
])  # fmt: skip
def test_a_cluster_that_cannot_have_been_released_cannot_be_built(bad):
    good = {"members": ("a", "b"), "images": _picture(0), "label": "", "k": 2, "l": 1, "form": FORM}
    ReleasedCluster(**good)
    with pytest.raises(ReleaseRecordError):
        ReleasedCluster(**{**good, **bad})


@settings(max_examples=50, deadline=None)
@given(
    members=st.sets(st.text(min_size=1, max_size=6), min_size=2, max_size=6),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    grey=st.booleans(),
    label=st.text(max_size=5),
    seed=st.integers(0, 1000),
)
def test_a_note_reads_back_as_the_very_same_cluster(members, shape, grey, label, seed):
    one = ReleasedCluster(tuple(members), _picture(seed, shape if grey else (*shape, 3)), label, 2, 1, FORM)
    note = json.loads(json.dumps(to_note(one)))
    assert from_note(list(members), note).same(one)


def test_a_record_of_before_excludes_its_patients_and_shows_nothing():
    record = [{"release": "r", "clusters": [["a", "b"], ["c", "d", "e"]]}]
    old = [from_note(members, None) for one in record for members in one["clusters"]]
    assert plan(old, set(), 2, 1, FORM) == ((), frozenset("abcde"))
    assert to_note(old[0]) is None


@pytest.mark.parametrize("spoilt", [
    {"images": "!!"}, {"images": "AAAA"}, {"images": 3}, {"shape": [1, 4]}, {"shape": [1, -4, -3]}, {"shape": "143"},
    {"shape": [1, 4, 3.0]}, {"k": True}, {"k": "2"}, {"k": 9}, {"label": None}, {"form": ""}, {"more": 1},
    {"shape": [0, 4, 3]},
])  # fmt: skip
def test_a_spoilt_note_is_refused(spoilt):
    note = to_note(_frozen("ab"))
    with pytest.raises(ReleaseRecordError):
        from_note(["a", "b"], {**note, **spoilt})
    with pytest.raises(ReleaseRecordError):
        from_note(["a", "b"], {key: value for key, value in note.items() if key != next(iter(spoilt))} | {"x": 1})
    for members in ("ab", ["a", 1]):
        with pytest.raises(ReleaseRecordError):
            from_note(members, note)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), k=st.integers(2, 4))
def test_over_any_history_of_growth_and_erasure_nobody_is_in_two_clusters_and_no_picture_changes(data, k):
    present, gone, record, shown, everyone = {}, set(), (), {}, 0
    for turn in range(data.draw(st.integers(1, 6))):
        new = data.draw(st.integers(0, 9))
        present.update(_people(range(everyone, everyone + new), seed=turn))
        everyone += new
        for patient in data.draw(st.sets(st.sampled_from(sorted(present)), max_size=2)) if present else ():
            gone.add(patient)
            del present[patient]
        present = {p: code + 0.3 for p, code in present.items()}  # everybody has newer images every time
        kept, fresh = _released(present, record, gone, k, turn)
        for one in (*kept, *fresh):
            assert gone.isdisjoint(one.members)
            assert shown.setdefault(one.members, one.images.tobytes()) == one.images.tobytes()
            assert len(one.members) >= k
        assert {p for one in fresh for p in one.members} <= set(present)
        record = tuple(from_note(one.members, to_note(one)) for one in (*record, *fresh))
    patients = [p for members in shown for p in members]
    assert len(patients) == len(set(patients)), "the union of all releases is patient-disjoint"
