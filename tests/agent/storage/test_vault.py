"""The vault keeps its secrets, keeps all or nothing, and lets only what is eligible into a cohort."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.deidentify.errors import FileRejectedError
from agent.deidentify.manifest import InstanceChange, manifest
from agent.deidentify.ps315.action_trace import AttributeAction
from agent.deidentify.record import Record
from agent.domain import Selection, Split
from agent.storage.encrypted_sqlite import FORMAT, VaultError
from agent.storage.instance_index import DefacedInstance, StateCount, part_of
from agent.storage.site_database import SiteDatabase
from agent.storage.vault import Vault
from tests.support.vault_records import KEY, OTHER, key_of, open_vault, record

SHAPE = (8, 8)
OT = Selection("OT", SHAPE)
ROOT = Path(__file__).parents[3]


def said(one: Record) -> Record:
    """As the reader tells it: beside the patient's own names, the UIDs that the file says."""
    return replace(one, uids=tuple(key_of(int(uid, 16) & 0xFFFF, 9) for uid in (one.study, one.series, one.name)))


UID_1, UID_2 = key_of(1, 9), key_of(2, 9)


def volume(number: int, person: int = 1, face: bool = True) -> Record:
    return replace(record(number, person, face=face), kind="volume", pixels=None, modality="MR")


def books_of(folder: Path) -> contextlib.closing[SiteDatabase]:
    return contextlib.closing(SiteDatabase(folder / "vault.db", KEY))


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    opened = open_vault(tmp_path)
    yield opened
    opened.close()


def names(vault: Vault) -> set[str]:
    return {head.name for head in vault.heads()}


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


# -- at rest


def test_the_vault_gives_back_what_it_keeps_and_holds_only_ciphertext(tmp_path: Path) -> None:
    vault, kept = open_vault(tmp_path), record()
    vault.keep(kept)
    vault.write_note("releases", ["someone"])
    (patient,) = vault.cohort("OT", SHAPE).patients
    assert patient.pseudonym == kept.pseudonym
    assert np.allclose(patient.images[0].pixels, kept.pixels, rtol=0, atol=0.5 / 65535)
    assert vault.payload(kept.name) == kept.payload
    assert vault.note("releases") == ["someone"]
    while_open = on_disk(tmp_path)
    vault.close()
    assert kept.pixels is not None
    for secret in (b"PAYLOAD-IN-CLEAR", kept.pseudonym, kept.study, kept.series, "CHEST", "someone", "0010,0010"):
        plain = secret if isinstance(secret, bytes) else secret.encode()
        assert plain not in while_open
        assert plain not in on_disk(tmp_path)
    assert kept.pixels.tobytes()[:64] not in while_open
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o600"}


@pytest.mark.parametrize(("site", "project"), [(OTHER, OTHER), (KEY, KEY)])
def test_another_key_opens_neither_the_notes_nor_the_records(tmp_path: Path, site: bytes, project: bytes) -> None:
    open_vault(tmp_path).close()
    with pytest.raises(VaultError, match="key is wrong"):
        Vault(SiteDatabase(tmp_path / "vault.db", site), tmp_path / "main.db", project)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE instance SET name = 'moved' WHERE id = 1",
        "UPDATE body SET pixels = (SELECT pixels FROM body WHERE id = 2) WHERE id = 1",
        "UPDATE body SET pixels = payload WHERE id = 1",
        "UPDATE instance SET head = x'00' WHERE id = 1",
        "UPDATE body SET pixels = zeroblob(100) WHERE id = 1",
    ],
)
def test_a_box_that_was_moved_or_changed_is_refused(tmp_path: Path, change: str) -> None:
    vault = open_vault(tmp_path)
    vault.keep_all([record(1), record(2)])
    vault.close()
    thief = apsw.Connection(str(tmp_path / "main.db"))
    thief.execute(change)
    thief.close()
    with contextlib.closing(open_vault(tmp_path)) as vault, pytest.raises(VaultError, match="changed"):
        vault.cohort("OT", SHAPE)


def test_a_file_of_a_newer_program_is_left_alone(tmp_path: Path) -> None:
    open_vault(tmp_path).close()
    newer = apsw.Connection(str(tmp_path / "main.db"))
    newer.execute(f"PRAGMA user_version={FORMAT + 1}")
    newer.close()
    with pytest.raises(VaultError, match="newer version"):
        open_vault(tmp_path)


def test_a_file_that_is_no_database_is_named_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "main.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(VaultError, match="damaged"):
        open_vault(tmp_path)


# -- coming in


def test_what_is_kept_is_known_by_name_and_digest_and_a_repetition_changes_nothing(vault: Vault) -> None:
    kept = record()
    assert vault.after(kept.name) is None
    vault.keep(kept)
    vault.keep_all([kept, kept])
    assert (vault.has(kept.name), vault.has(kept.digest), vault.has("f" * 32)) == (True, True, False)
    assert vault.after(kept.name) == kept.after
    assert len(list(vault.heads())) == 1


@pytest.mark.parametrize("change", [{"payload": b"other"}, {"name": "f" * 32}])
def test_an_instance_that_was_kept_with_other_content_is_refused(vault: Vault, change: dict[str, Any]) -> None:
    vault.keep(record())
    with pytest.raises(FileRejectedError) as caught:
        vault.keep_all([record(2), replace(record(), **change)])
    assert caught.value.code == "conflicting_instance"
    assert names(vault) == {record().name}


def test_a_series_of_two_studies_is_barred_until_a_person_lifts_it(tmp_path: Path) -> None:
    with contextlib.closing(open_vault(tmp_path)) as vault:
        vault.keep_all([record(1, series=5), record(2, person=2, series=6)])
        other = replace(record(3, series=5), study="f" * 32)
        assert vault.refusal(other) == "inconsistent_series"
        with pytest.raises(FileRejectedError, match="inconsistent_series"):
            vault.keep(other)
        vault.keep(record(4, series=5))  # of the first study: kept, and held back with the others
    with contextlib.closing(open_vault(tmp_path)) as vault:
        assert [p.pseudonym for p in vault.cohort("OT", SHAPE).patients] == [key_of(2, 3)]
        assert StateCount("OT", "CHEST", "held", 2, 1) in vault.counts()
        assert StateCount("OT", "CHEST", "eligible", 1, 1) in vault.counts()
        vault.lift(record(1, series=5).series)
        assert len(vault.cohort("OT", SHAPE).patients) == 2
        assert vault.refusal(other) == "inconsistent_series", "and the next one bars it again"
        assert len(vault.cohort("OT", SHAPE).patients) == 1


def test_a_contradiction_within_one_batch_is_found_before_anything_is_kept(vault: Vault) -> None:
    first, second = record(1, series=5), replace(record(2, series=5), study="f" * 32)
    assert (vault.refusal(first), vault.refusal(second)) == (None, "inconsistent_series")
    vault.keep_all([first])
    assert vault.cohort("OT", SHAPE).patients == ()


def test_a_batch_with_a_contradiction_keeps_nothing_and_bars_the_series(vault: Vault) -> None:
    with pytest.raises(FileRejectedError, match="inconsistent_series"):
        vault.keep_all([record(9, person=9), record(1, series=5), replace(record(2, series=5), study="f" * 32)])
    assert names(vault) == set()
    vault.keep(record(1, person=1, series=5))
    assert vault.cohort("OT", SHAPE).patients == ()


def test_records_that_name_no_series_contradict_none(vault: Vault) -> None:
    vault.keep_all([replace(record(n, person=n), series="0" * 32) for n in (1, 2)])
    assert len(vault.cohort("OT", SHAPE).patients) == 2


# -- selection


def test_faces_unlabelled_images_and_excluded_patients_are_in_no_cohort(vault: Vault) -> None:
    vault.keep_all([record(1, face=True), record(2, label=""), volume(3)])
    assert vault.cohort("OT", SHAPE).patients == ()
    vault.keep(record(4))
    assert len(vault.cohort("OT", SHAPE).patients) == 1
    assert vault.cohort("OT", SHAPE, without=[key_of(1, 3)]).patients == ()
    assert vault.cohort("CT", SHAPE).patients == ()
    assert vault.cohort("OT", (16, 16)).patients == ()


def test_body_part_and_labels_narrow_a_selection(vault: Vault) -> None:
    parts = [replace(record(n, person=n, label=label), body_part=part) for n, part, label in _THREE]
    vault.keep_all(parts)

    def chosen(**rule: Any) -> set[str]:
        return {p.pseudonym for p in vault.cohort(replace(OT, **rule)).patients}

    assert chosen() == {key_of(n, 3) for n in (1, 2, 3)}
    assert chosen(body_part="HEAD") == {key_of(1, 3)}
    assert chosen(labels=frozenset({"a"})) == {key_of(1, 3), key_of(3, 3)}
    assert chosen(body_part="CHEST", labels=frozenset({"a"})) == {key_of(3, 3)}


_THREE = [(1, "HEAD", "a"), (2, "CHEST", "b"), (3, "CHEST", "a")]


def test_a_series_with_too_few_instances_waits_until_it_is_complete(vault: Vault) -> None:
    three = replace(OT, min_instances=3)
    vault.keep_all([record(1), record(2, label="")])
    assert vault.cohort(three).patients == ()
    assert vault.counts(3) == (StateCount("OT", "CHEST", "waiting", 2, 1),)
    vault.keep(record(3))
    (patient,) = vault.cohort(three).patients
    assert len(patient.images) == 2, "the unlabelled one completes the series, and is not in the cohort itself"
    assert vault.counts(3) == (
        StateCount("OT", "CHEST", "eligible", 2, 1),
        StateCount("OT", "CHEST", "unlabelled", 1, 1),
    )


def test_to_select_opens_the_pixels_and_files_of_nothing_else(tmp_path: Path) -> None:
    with contextlib.closing(open_vault(tmp_path)) as vault:
        vault.keep_all([record(1), record(2, person=2, label="b")])
    spoilt = apsw.Connection(str(tmp_path / "main.db"))
    spoilt.execute("UPDATE body SET payload = x'00'")
    spoilt.execute("UPDATE body SET pixels = x'00' WHERE id = 1")
    spoilt.close()
    with contextlib.closing(open_vault(tmp_path)) as vault:
        (patient,) = vault.cohort(replace(OT, labels=frozenset({"b"}))).patients
        assert patient.pseudonym == key_of(2, 3)
        assert vault.patients() == 2
        assert sum(count.instances for count in vault.counts()) == 2
        with pytest.raises(VaultError):
            vault.cohort(OT)


def test_labels_may_come_later_than_the_images(vault: Vault) -> None:
    vault.keep_all([said(record(1, label="")), said(record(2, label="x"))])
    assert vault.relabel({UID_1: "new", UID_2: "x", "f" * 32: "nobody's"}) == 1
    assert [image.label for _, image in vault.images(OT)] == ["new", "x"]
    assert vault.relabel({UID_1: ""}) == 1
    assert [image.label for _, image in vault.images(OT)] == ["x"]
    with pytest.raises(ValueError, match="printable"):
        vault.relabel({UID_1: "good", UID_2: "bad\n"})
    assert [image.label for _, image in vault.images(OT)] == ["x"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (0, 8)},
        {"modality": ""},
        {"labels": frozenset({""})},
        {"part": "train"},
        {"split": Split("s", {"train": 1, "test": 1})},
        {"split": Split("s", {"train": 1, "test": 1}), "part": "valid"},
        {"min_instances": 0},
    ],
)
def test_a_senseless_selection_cannot_be_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which rule says so is told by the case
        replace(OT, **wrong)


@pytest.mark.parametrize("parts", [{}, {"train": 1}, {"train": 1, "test": 0}, {"train": 1, "Test": 1}])
def test_a_senseless_split_cannot_be_built(parts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="split"):
        Split("s", parts)


# -- split

PARTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=2)
PERSONS = st.lists(st.integers(0, 10**6).map(lambda n: key_of(n, 3)), unique=True, max_size=60)


@given(parts=PARTS, persons=PERSONS, key=st.binary(min_size=32, max_size=32), seed=st.integers())
def test_a_split_is_a_partition_that_neither_order_nor_newcomers_change(
    parts: dict[str, int], persons: list[str], key: bytes, seed: int
) -> None:
    before = {person: part_of(Split("s", parts), key, person) for person in persons[: len(persons) // 2]}
    shuffled, dice = list(persons), random.Random(seed)
    dice.shuffle(shuffled)
    turned = dict(dice.sample(sorted(parts.items()), len(parts)))
    after = {person: part_of(Split("s", turned), key, person) for person in shuffled}
    assert set(after.values()) <= set(parts)
    assert before.items() <= after.items()


@settings(max_examples=25, deadline=None)
@given(parts=PARTS, key=st.binary(min_size=32, max_size=32))
def test_the_shares_of_a_split_lie_within_binomial_bounds(parts: dict[str, int], key: bytes) -> None:
    n, split = 3000, Split("s", parts)
    found = [part_of(split, key, key_of(i, 3)) for i in range(n)]
    for name, share in parts.items():
        p = share / sum(parts.values())
        # 7 standard deviations, and a Poisson tail's worth where a share is tiny
        assert abs(found.count(name) - n * p) <= 7 * (n * p * (1 - p)) ** 0.5 + 10


def test_two_splits_and_two_projects_divide_independently() -> None:
    parts, people = {"a": 1, "b": 1}, [key_of(i, 3) for i in range(2000)]
    one = [part_of(Split("one", parts), KEY, p) for p in people]
    for other in (
        [part_of(Split("two", parts), KEY, p) for p in people],
        [part_of(Split("one", parts), OTHER, p) for p in people],
    ):
        assert abs(sum(a == b for a, b in zip(one, other, strict=True)) - 1000) < 7 * 500**0.5


def test_all_images_of_a_patient_are_in_one_part_and_the_parts_make_the_whole(vault: Vault) -> None:
    vault.keep_all([record(100 * who + image, person=who) for who in range(40) for image in range(3)])
    split = Split("fold", {"train": 80, "test": 20})
    train, test = (vault.cohort(replace(OT, split=split, part=part)).patients for part in ("train", "test"))
    assert {len(patient.images) for patient in (*train, *test)} == {3}
    names = [patient.pseudonym for patient in (*train, *test)]
    assert sorted(names) == [patient.pseudonym for patient in vault.cohort(OT).patients]
    assert train
    assert test


# -- opting out


def test_who_has_opted_out_is_refused_and_in_no_cohort_even_before_the_deletion(tmp_path: Path) -> None:
    with (
        contextlib.closing(open_vault(tmp_path)) as vault,
        contextlib.closing(SiteDatabase(tmp_path / "vault.db", KEY)) as ledger,
    ):
        vault.keep_all([record(1, person=1), record(2, person=2)])
        ledger.opt_out(key_of(1, 3))  # by another process
        assert [p.pseudonym for p in vault.cohort("OT", SHAPE).patients] == [key_of(2, 3)]
        assert vault.refusal(record(3, person=1)) == "opted_out"
        with pytest.raises(FileRejectedError, match="opted_out"):
            vault.keep_all([record(4, person=2), record(3, person=1)])
        assert names(vault) == {record(1).name, record(2).name}
        ledger.opt_in(key_of(1, 3))
        vault.keep(record(3, person=1))


def test_a_purge_leaves_no_ciphertext_of_the_patient_in_the_file_or_its_log(tmp_path: Path) -> None:
    vault = open_vault(tmp_path)
    big = replace(
        said(record(1)),
        payload=bytes(range(256)) * 2000,
        trace=(AttributeAction("0010,0020", "replaced", "profile"),),
    )
    vault.keep_all([big, record(2), *(record(n, person=2) for n in range(10, 60))])
    assert vault.relabel({UID_1: "later"}) == 1
    look = apsw.Connection(str(tmp_path / "main.db"))
    query = "SELECT head, pixels, payload FROM instance JOIN body USING (id) WHERE name IN (?, ?)"
    boxes: list[Any] = [
        box for row in look.execute(query, (record(1).name, record(2).name)).fetchall() for box in row
    ]
    stays: Any = look.execute("SELECT head FROM instance WHERE name = ?", (record(10).name,)).fetchall()[0][0]
    look.close()
    pieces = [box[at : at + 64] for box in boxes for at in range(0, len(box) - 64, 512)]
    before = on_disk(tmp_path)
    assert sum(piece in before for piece in pieces) > 0.9 * len(pieces), "what is looked for can be found"
    assert vault.purge({key_of(1, 3)}) == 2
    after = on_disk(tmp_path)
    assert stays in after
    assert not any(piece in after for piece in pieces)
    assert not (tmp_path / "main.db-wal").stat().st_size
    assert len(list(vault.heads())) == 50
    assert not vault.has(record(1).name)
    assert not vault.has(record(1).digest)
    assert len(vault._file.rows("SELECT 1 FROM trace")) == 1, "a trace that nobody shares is deleted as well"
    vault.close()


def test_what_was_barred_of_a_patient_is_forgotten_with_the_patient_and_nothing_of_another(vault: Vault) -> None:
    vault.keep_all([record(1, person=1, series=5), record(2, person=2, series=6)])
    for one in (record(3, person=1, series=5), record(4, person=2, series=6)):
        assert vault.refusal(replace(one, study="f" * 32)) == "inconsistent_series"
    vault.purge({key_of(1, 3)})
    assert vault.barred() == {key_of(6, 5)}
    vault.keep(record(5, person=1, series=5))
    assert [p.pseudonym for p in vault.cohort("OT", SHAPE).patients] == [key_of(1, 3)]


# -- manifests and faces


def test_a_study_is_told_with_its_instances_and_a_shared_trace_is_stored_once(vault: Vault) -> None:
    other = replace(record(3), trace=())
    vault.keep_all([record(2), record(1), other, record(4, person=2)])
    assert vault.studies() == (key_of(1, 4), key_of(2, 4))
    told = vault.instances(key_of(1, 4))
    assert told == tuple(
        InstanceChange(r.name, r.digest, vault.mark(r.payload), r.trace) for r in (record(1), record(2), other)
    )
    assert len({instance.after for instance in told} - {r.after for r in (record(1), record(2), other)}) == 3
    vault.defaced([DefacedInstance(record(1).name, b"NEW", np.zeros(SHAPE, np.float32))])
    one = vault.instances(key_of(1, 4))[0]
    assert (one.after, one.pixels.faces) == (vault.mark(b"NEW"), "removed")
    assert [i["name"] for i in manifest(key_of(1, 4), told)["instances"]] == [i.name for i in told]
    assert vault.instances("f" * 32) == ()
    assert len(vault._file.rows("SELECT 1 FROM trace")) == 1


def test_a_defaced_instance_has_new_bytes_and_none_of_the_old(tmp_path: Path) -> None:
    vault, pixels = open_vault(tmp_path), np.zeros(SHAPE, np.float32)
    pixels[0] = 1
    vault.keep_all([volume(1), record(2, face=True), record(3)])
    old = vault._file.rows("SELECT payload FROM body ORDER BY id")
    ((study, count),) = vault.faces()
    waiting = vault.faces_of(study)
    assert count == len(waiting) == 2
    assert all(face.payload.startswith(b"PAYLOAD") for face in waiting)
    assert {(face.person, face.study) for face in waiting} == {(record(1).pseudonym, study)}
    vault.defaced(DefacedInstance(face.name, b"NEW", pixels if face.kind == "image" else None) for face in waiting)
    assert vault.faces() == []
    assert vault.faces_of(study) == []
    assert vault.payload(record(1).name) == b"NEW"
    assert vault.after(record(1).name) == replace(volume(1), payload=b"NEW").after
    image = next(image for _, image in vault.images(OT))
    assert np.array_equal(image.pixels, pixels)
    assert old[0][0] not in on_disk(tmp_path)
    assert old[2][0] in on_disk(tmp_path)
    vault.close()


def test_a_defacing_that_does_not_fit_changes_nothing(vault: Vault) -> None:
    vault.keep_all([volume(1), record(2, face=True)])
    for name, pixels in (
        (record(1).name, np.zeros(SHAPE, np.float32)),
        (record(2).name, None),
        (record(2).name, np.zeros((4, 4), np.float32)),
        (record(2).name, np.full(SHAPE, np.nan, np.float32)),
    ):
        with pytest.raises(ValueError, match="pixels"):
            vault.defaced([DefacedInstance(name, b"NEW", pixels)])
    right = DefacedInstance(record(1).name, b"NEW")
    with pytest.raises(KeyError):
        vault.defaced([right, DefacedInstance("f" * 32, b"NEW")])
    assert [face.payload for face in vault.faces_of(record(1).study)] == [volume(1).payload, record(2).payload]


def test_a_barred_series_and_a_study_name_that_two_patients_have_are_never_de_faced(vault: Vault) -> None:
    one, other = volume(1), replace(volume(2), series="d" * 32)
    vault.keep_all([one, other])
    vault.bar({other.series})
    assert [face.name for face in vault.faces_of(one.study)] == [one.name]
    vault.keep_all([replace(volume(3, person=2), study=one.study)])
    assert vault.faces_of(one.study) == []


def test_a_file_that_is_another_by_now_is_not_replaced(vault: Vault) -> None:
    vault.keep_all([volume(1), volume(2)])
    (first, second) = vault.faces_of(record(1).study)
    read = {face.name: sha256(face.payload).hexdigest() for face in (first, second)}
    vault.defaced([DefacedInstance(first.name, b"FASTER", before=read[first.name])])
    with pytest.raises(KeyError):
        vault.defaced(DefacedInstance(face.name, b"NEW", before=read[face.name]) for face in (second, first))
    assert vault.payload(first.name) == b"FASTER"
    assert [face.name for face in vault.faces_of(record(1).study)] == [second.name]


def test_who_has_opted_out_has_no_face_to_take_off(vault: Vault) -> None:
    vault.keep_all([volume(1), replace(volume(2, person=2), study="e" * 32)])
    vault._notes.opt_out(record(1).pseudonym)
    assert [study for study, _ in vault.faces()] == ["e" * 32]
    assert vault.faces_of(record(1).study) == []


def test_what_is_held_waits_with_its_face_on(vault: Vault) -> None:
    vault.keep_all([volume(1), replace(volume(2, person=2), study="e" * 32)])
    vault.hold(record(1).study)
    assert [study for study, _ in vault.faces()] == ["e" * 32]
    vault.lift(record(1).study)
    assert len(vault.faces()) == 2


# -- durability

CHILD = """
    import resource, signal, sys
    from pathlib import Path
    import numpy as np
    from agent.deidentify.record import Record
    from agent.storage.site_database import SiteDatabase
    from agent.storage.vault import Vault, VaultError
    from agent.domain import Selection

    folder, records, batch, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    vault = Vault(SiteDatabase(folder / "vault.db", bytes(range(32))), folder / "main.db", bytes(range(32, 64)))
    pixels = np.zeros((8, 8), np.float32)
    pixels[0] = 1

    def made(n):
        name, who = f"{n:032x}", f"{n // 10:032x}"
        digest = f"{n + 2**100:032x}"
        return Record(name, digest, who, who, "OT", "image", "x", pixels, bytes(size), False, f"{n // 5 + 1:032x}")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
"""


def child(folder: Path, program: str, *sizes: int) -> subprocess.Popen[str]:
    """Another process with a vault of its own."""
    code = textwrap.dedent(CHILD) + textwrap.dedent(program)
    command = [sys.executable, "-c", code, str(folder), *map(str, sizes)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_process_that_is_killed_leaves_whole_batches_and_all_that_it_had_reported() -> None:
    program = """
        for start in range(0, records, batch):
            vault.keep_all(made(n) for n in range(start, start + batch))
            print(start + batch, flush=True)
    """
    torn = 0
    for wait in (1, 3, 6):
        with tempfile.TemporaryDirectory() as place:
            with child(Path(place), program, 10**6, 40, 20_000) as process:
                assert process.stdout is not None
                reported = [int(process.stdout.readline()) for _ in range(wait)][-1]
                process.send_signal(signal.SIGKILL)
                reported = max([reported, *map(int, process.stdout.read().split())])
            with contextlib.closing(open_vault(Path(place))) as vault:
                kept = names(vault)
                assert kept == {f"{n:032x}" for n in range(len(kept))}
                assert len(kept) % 40 == 0
                assert len(kept) >= reported
                assert len(vault.cohort("OT", SHAPE).patients) == len(kept) // 10
                torn += len(kept) == reported
    assert torn, "at least once the process was in the middle of a batch"


def test_a_full_disk_is_told_in_a_sentence_and_nothing_is_half_kept(tmp_path: Path) -> None:
    program = """
        vault.keep_all([made(0), made(1)])
        limit = max(path.stat().st_size for path in folder.iterdir()) + 1_000_000
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            vault.keep_all(made(n) for n in range(2, records))
        except VaultError as error:
            print(error)
        print(sum(1 for _ in vault.heads()))
    """
    with child(tmp_path, program, 60, 60, 100_000) as process:
        assert process.stdout is not None
        said, known = process.stdout.read().splitlines()
    assert "nothing was saved" in said
    assert known == "2"
    with contextlib.closing(open_vault(tmp_path)) as vault:
        assert len(names(vault)) == 2
        assert len(vault._file.rows("SELECT id FROM body")) == 2
        vault.keep(record(1))


def test_a_database_that_may_not_grow_is_a_full_disk(vault: Vault) -> None:
    vault.keep(record(1))
    pages = vault._file.rows("PRAGMA page_count")[0][0]
    vault._file.rows(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(VaultError, match="disk is full"):
        vault.keep_all([record(2), replace(record(3), payload=bytes(200_000))])
    assert names(vault) == {record(1).name}
    assert vault.after(record(2).name) is None


def memory_grown(folder: Path, records: int) -> list[int]:
    """How much more memory is resident after all records than after the first tenth; bytes: keeping, selecting."""
    program = """
        def grown(done):
            global least
            least = resident() if done == records // 10 else least
            return resident() - least

        least = 0
        for start in range(0, records, batch):
            vault.keep_all(made(n) for n in range(start, start + batch))
            kept = grown(start + batch)
        for _ in vault.images(Selection("OT", (8, 8), labels=frozenset({"none"}))):
            pass
        print(kept, resident() - least)
    """
    with child(folder, program, records, records // 20, 1000) as process:
        assert process.stdout is not None
        return [int(number) for number in process.stdout.read().split()]


def test_memory_stays_flat_over_twenty_thousand_records(tmp_path: Path) -> None:
    grown = memory_grown(tmp_path, 20_000)
    print(f"resident memory grew by {grown[0] / 2**20:.1f} MiB keeping, {grown[1] / 2**20:.1f} MiB selecting")
    assert max(grown) < 12 * 2**20  # the heads alone, held all at once, would be more
