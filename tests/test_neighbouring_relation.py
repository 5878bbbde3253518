"""What "one patient more" means: the definition of the claim of level A, as a test.

Every epsilon that Lazaret prints is a statement about two cohorts that differ in one patient, present with all files
or absent (P1). It holds only if the files of that one patient change nothing else. This is what that says, exactly:

*Patient*: all files under one patient id of one issuer, folded as
:meth:`agent.deidentify.deidentifier.Deidentifier.person` says. Two ids are two patients, whatever their files have in
common.

*Contribution*: the list of images, with their labels, that one patient gives to a mechanism, before anything is
clustered, sampled or clipped.

*The relation*: **a patient's contribution is a function of that patient's own files, in the order in which they came,
and of public configuration.** Whether the patient takes part, with which images, in which part of a split, and what
is held back for a person, depends on nothing that is in another patient's file: no UID, no picture, no text in a
picture, no order of arrival. So adding or removing one patient adds or removes one contribution, and every other one
stays the same, image for image.

It is tried below with the real ingest (the DICOM reader in its own process, the intake, the quarantine, the vault) on
random cohorts of patients who say each other's study, series and instance UIDs, have equal pictures, and have text in
their pictures, in every order of arrival; for the selection, the split, the vault, what an archive is asked for, and
for every mechanism of ``MECHANISMS`` whose claim has an epsilon.

*The assumption*, where a site asks archives: **an archive has under one UID the files of one patient**, as DICOM
demands of UIDs (PS3.5 chapter 9). A site knows by (UID, sender) alone what it need not ask for: who sends another
patient's SOP Instance UID changes what that same sender is asked for, and nothing else. So two patients under one UID
*in one archive* are outside the claim. What came is inside it, whoever sent it: the newcomer's files come below from
every sender, also from the archive of the others. The border is
``test_the_border_is_one_uid_of_two_patients_at_one_sender``.

Not in it: what a person decides (`cohort --lift`, labels, opt-outs) after looking at more than one patient, and a
disk that is full, a bound on an archive's matches or a machine that fails, which stop everybody.
"""

from __future__ import annotations

import inspect
import io
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Drawing
from PIL import ImageDraw, ImageFont
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

from agent.deidentify.admission_rules import AdmissionRules
from agent.deidentify.deidentifier import Deidentifier
from agent.domain import Cohort, Selection, Split
from agent.federation import participant, secure_aggregation
from agent.ingest import parser_process
from agent.ingest import pipeline as intake
from agent.ingest.pending import in_room
from agent.ingest.pipeline import IngestDependencies, IngestPipeline, sender_mark
from agent.mechanisms.centroids.codebook import codebook_from, codec_digest, fitted
from agent.mechanisms.centroids.mechanism import Centroids
from agent.mechanisms.common.linear_codec import fit_basis
from agent.mechanisms.distillation.mechanism import _counted, _stacked
from agent.mechanisms.federated.task_training import labelled_examples, units
from agent.mechanisms.kanonymous import OPTIONS
from agent.mechanisms.registry import MECHANISMS, Federated, FederatedMasked, TaskModel
from agent.release import pipeline, preflight
from agent.storage.quarantine import Quarantine
from agent.storage.site_database import SiteDatabase
from agent.storage.spool import ReceivedFile, Spool
from agent.storage.vault import Vault
from policies.accounting.claims import Gaussian, KAnonymous, NoClaim
from tests.support import small_distillation as small
from tests.support.entropy import UnsafeSeededEntropy
from tests.support.small_privimage import tiny
from tests.support.small_tasks import classification

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))
WHO = Deidentifier(KEY, "HOSPITAL", people=OTHER)
RULES = AdmissionRules(modalities=frozenset({"CT"}))
ROOT = "1.2.826.0.1.3680043.8.498"
SIDE = 96  # pixels: room for a text
NEWCOMER = 9
SPLIT = Split("fold", {"train": 2, "test": 1})
Contributions = dict[str, list[tuple[str, bytes]]]  # pseudonym -> label and pixels of each image


@dataclass(frozen=True)
class File:
    """One file that comes: whose, which UIDs it says, which picture it is, and whether a text is in it."""

    patient: int
    study: int
    series: int
    instance: int
    picture: int
    text: bool = False
    sender: str = "PACS"

    @property
    def uid(self) -> str:
        return f"{ROOT}.3.{self.instance}"


@cache
def dicom(file: File) -> bytes:
    """A CT picture; equal numbers are equal pixels, whoever's it is."""
    one = FileDataset("", Dataset(), preamble=bytes(128), file_meta=FileMetaDataset())
    one.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    one.file_meta.MediaStorageSOPClassUID = one.SOPClassUID = CTImageStorage
    one.file_meta.MediaStorageSOPInstanceUID = one.SOPInstanceUID = file.uid
    one.StudyInstanceUID, one.SeriesInstanceUID = f"{ROOT}.1.{file.study}", f"{ROOT}.2.{file.series}"
    one.PatientID, one.PatientName, one.Modality = f"PAT-{file.patient}", f"Muster^{file.patient}", "CT"
    one.ImageType, one.BodyPartExamined = ["ORIGINAL", "PRIMARY", "AXIAL"], "CHEST"
    one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
    one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 12, 11, 0
    one.RescaleIntercept, one.RescaleSlope = -1024, 1
    one.Rows = one.Columns = SIDE
    pixels = np.random.default_rng(file.picture).integers(0, 1500, (SIDE // 8, SIDE // 8), dtype=np.uint16)
    pixels = pixels.repeat(8, axis=0).repeat(8, axis=1)
    if file.text:
        sheet = Drawing.new("1", (SIDE, SIDE))
        ImageDraw.Draw(sheet).text((4, 30), "MUSTER", fill=1, font=ImageFont.load_default(20))
        pixels = np.where(np.asarray(sheet), np.uint16(4095), pixels // 8)
    one.PixelData = pixels.tobytes()
    stream = io.BytesIO()
    one.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


Told = tuple[dict[str, tuple[Any, ...]], dict[File, bool]]  # of each patient; of each file: was it sent


class Hospital:
    """Ingest, with one reader process for all cohorts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[tuple[File, ...], Told] = {}  # what was seen, and is let in once more when asked again
        self.repeated: set[tuple[File, ...]] = set()  # and found to be the same; from then on it is not let in again
        self._numbers = itertools.count()
        nothing = Quarantine(folder / "none", KEY)
        self.intake = IngestPipeline(IngestDependencies(RULES, WHO, self._vault(folder / "first"), nothing), 1)

    @staticmethod
    def _vault(folder: Path) -> Vault:
        folder.mkdir(parents=True)
        return Vault(SiteDatabase(folder / "vault.db", KEY), folder / "main.db", OTHER)

    def let_in(self, files: Iterable[File]) -> Vault:
        """An empty vault, after these files came in this order, several at once."""
        folder = self.folder / str(next(self._numbers))
        vault, inbox = self._vault(folder), Spool(folder / "inbox", KEY, durable=False)
        ports = replace(self.intake._ports, shelf=vault, quarantine=Quarantine(folder / "quarantine", KEY))
        self.intake._ports = ports
        waiting = []
        for file in files:
            before = {one.name for one in in_room(inbox)}
            inbox.put(ReceivedFile("dimse", file.sender, dicom(file), label=str(file.patient % 2), instance=file.uid))
            waiting += [one for one in in_room(inbox) if one.name not in before]
        self.intake.run(waiting)
        return vault

    def told(self, files: Iterable[File]) -> Told:
        """All that the vault says after these files, and of which of them an archive is not asked again."""
        arrivals = tuple(files)
        if arrivals in self.repeated:
            return self.known[arrivals]
        with closing(self.let_in(arrivals)) as vault:
            found = told(vault), {file: vault.was_sent(mark_of(file)) for file in arrivals}
        if arrivals in self.known:
            if found != self.known[arrivals]:
                pytest.fail("the same files, let in again, are something else")  # which `_agree` does not swallow
            self.repeated.add(arrivals)
        self.known[arrivals] = found
        return found

    def forget(self, patch: pytest.MonkeyPatch) -> None:
        """For a rule that is broken on purpose: nothing counts that was seen under the right one."""
        patch.setattr(self, "known", {})
        patch.setattr(self, "repeated", set())


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospital]:
    made = Hospital(tmp_path_factory.mktemp("hospital"))
    with made.intake:
        yield made


def person(patient: int) -> str:
    return WHO.person("", f"PAT-{patient}")


def contributions(vault: Vault, selection: Selection) -> Contributions:
    """What each patient gives."""
    found: Contributions = {}
    for patient in vault.cohort(selection).patients:
        found[patient.pseudonym] = [(image.label, image.pixels.tobytes()) for image in patient.images]
    return found


def selections() -> list[Selection]:
    """All that are tried: plain, of complete series, of a label, fitted, and each part of a split."""
    plain = Selection("CT", (SIDE, SIDE))
    return [
        plain,
        replace(plain, min_instances=2),
        replace(plain, labels=frozenset({"1"})),
        Selection("CT", (32, 32), fit=True),
        *(replace(plain, split=SPLIT, part=part) for part in SPLIT.parts),
    ]


def told(vault: Vault) -> dict[str, tuple[Any, ...]]:
    """All that the vault says of each patient: contributions to every selection, labels, what is held, and why."""
    back = vault.barred() | vault.held()
    heads: dict[str, list[tuple[Any, ...]]] = {}
    for head in sorted(vault.heads(), key=lambda head: head.name):
        one = (head.name, head.study, head.series, head.label, head.after, bool({head.study, head.series} & back))
        heads.setdefault(head.person, []).append(one)
    every = [contributions(vault, selection) for selection in selections()]
    return {who: (own, [one.get(who) for one in every]) for who, own in heads.items()}


def assert_neighbours(hospital: Hospital, arrivals: Sequence[File], newcomer: int = NEWCOMER) -> Cohort:
    """The definition: with the newcomer's files and without them, everybody else is the same.

    And each patient is what that patient's files alone make, so that nobody else matters at all. What an archive is
    asked for is the same, too, but for a UID under which that archive sent the newcomer's file as well.
    """
    twice = {(file.uid, file.sender) for file in arrivals if file.patient == newcomer}
    with closing(hospital.let_in(arrivals)) as vault:
        having, cohort = told(vault), vault.cohort(Selection("CT", (SIDE, SIDE)))
        asked = {file: vault.was_sent(mark_of(file)) for file in arrivals}
    lacking, asked_lacking = hospital.told(file for file in arrivals if file.patient != newcomer)
    for file in (one for one in arrivals if one.patient != newcomer and (one.uid, one.sender) not in twice):
        assert asked[file] == asked_lacking[file], "what an archive is asked for has changed"
    having.pop(person(newcomer), None)
    assert having == lacking, "one patient more has changed another patient"
    for patient in {file.patient for file in arrivals} - {newcomer}:
        alone, _ = hospital.told(file for file in arrivals if file.patient == patient)
        assert alone.get(person(patient)) == lacking.get(person(patient)), "a patient depends on others"
    return cohort


def mark_of(file: File) -> str:
    """As a site notes that a sender has sent an instance, for which that sender is not asked again."""
    return sender_mark(WHO, file.uid, "dimse", file.sender)


# -- random cohorts

UIDS = st.integers(0, 2)  # few, so that patients say each other's
SENDERS = ("PACS", "EVIL")


def files(patients: Iterable[int]) -> st.SearchStrategy[File]:
    return st.builds(
        File,
        patient=st.sampled_from(sorted(patients)),
        study=UIDS,
        series=UIDS,
        instance=st.integers(0, 4),
        picture=st.integers(0, 3),
        text=st.sampled_from([False, False, False, True]),
        sender=st.sampled_from(SENDERS),
    )


@settings(max_examples=30)
@given(
    others=st.lists(files(range(3)), min_size=1, max_size=7, unique=True),
    more=st.lists(files([NEWCOMER]), min_size=1, max_size=4, unique=True),
    dice=st.randoms(use_true_random=False),
)
def test_one_patient_more_changes_that_patients_contribution_only(
    hospital: Hospital, others: list[File], more: list[File], dice: Any
) -> None:
    arrivals = [*others, *more]
    dice.shuffle(arrivals)
    assert_neighbours(hospital, arrivals)


# -- each attack by itself, in every order of arrival

PLAIN = (File(0, 0, 0, 0, 0), File(1, 1, 1, 1, 1), File(2, 2, 2, 2, 2))
ATTACKS = {
    "another's series": File(NEWCOMER, 7, 0, 7, 7),
    "another's study and series": File(NEWCOMER, 0, 0, 7, 7),
    "another's study, with a text": File(NEWCOMER, 0, 7, 7, 7, text=True),
    "another's instance": File(NEWCOMER, 7, 7, 0, 7),
    "another's instance and picture": File(NEWCOMER, 7, 7, 0, 0),
    "all of another's but the id": File(NEWCOMER, 0, 0, 0, 0),
    "another's picture": File(NEWCOMER, 7, 7, 7, 0),
}


@pytest.mark.parametrize("sender", SENDERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_by_one_file_changes_nobody_in_any_order_of_arrival(
    hospital: Hospital, attack: str, sender: str
) -> None:
    for arrivals in itertools.permutations((*PLAIN[:2], replace(ATTACKS[attack], sender=sender))):
        cohort = assert_neighbours(hospital, arrivals)
        assert {person(0), person(1)} <= {patient.pseudonym for patient in cohort.patients}, "and they take part"


def test_the_border_is_one_uid_of_two_patients_at_one_sender(hospital: Hospital) -> None:
    """The assumption of the claim: these alone change what an archive is asked for, and nothing of what came."""
    theirs = PLAIN[0]  # lies in the archive and has not come, or came with a text and is in quarantine
    outside = set()
    for (attack, file), sender in itertools.product(ATTACKS.items(), SENDERS):
        newcomer = replace(file, sender=sender)
        with closing(hospital.let_in([newcomer])) as vault:
            if vault.was_sent(mark_of(theirs)):
                outside.add((attack, sender))
        for arrivals in itertools.permutations((replace(theirs, text=True), PLAIN[1], newcomer)):
            assert_neighbours(hospital, arrivals)
    with closing(hospital.let_in([])) as vault:
        assert not vault.was_sent(mark_of(theirs))
    shared = ("another's instance", "another's instance and picture", "all of another's but the id")
    assert outside == {(attack, "PACS") for attack in shared}


def test_marks_that_hold_no_sender_are_seen_red(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule broken on purpose: whoever sends a UID, no archive is asked for it any more."""
    hospital.forget(monkeypatch)
    arrivals = (replace(PLAIN[0], text=True), replace(ATTACKS["another's instance"], sender="EVIL"))
    assert _agree(hospital, arrivals)
    right = sender_mark
    for module in (intake, sys.modules[__name__]):
        monkeypatch.setattr(module, "sender_mark", lambda who, uid, road, _source: right(who, uid, road, "all"))
    hospital.forget(monkeypatch)
    assert not _agree(hospital, arrivals)


def test_what_was_seen_once_is_let_in_once_more_and_compared(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital.forget(monkeypatch)
    let_in, seen = hospital.let_in, list[tuple[File, ...]]()
    monkeypatch.setattr(hospital, "let_in", lambda files: seen.append(tuple(files)) or let_in(seen[-1]))
    first = hospital.told(PLAIN)
    assert all(hospital.told(PLAIN) == first for _ in range(3))
    assert seen == [PLAIN] * 2
    hospital.forget(monkeypatch)
    hospital.known[PLAIN] = ({}, {})
    with pytest.raises(pytest.fail.Exception, match="let in again"):
        hospital.told(PLAIN)


def test_thirty_patients_stay_whatever_one_newcomer_says(hospital: Hospital) -> None:
    others = [File(100 + n, n, n, n, n) for n in range(30)]
    evil = [File(NEWCOMER, 1000, n, 1000 + n, 1000 + n, sender=SENDERS[n % 2]) for n in range(30)]
    for arrivals in ((*others, *evil), (*evil, *others)):
        with closing(hospital.let_in(arrivals)) as vault:
            everybody = {patient.pseudonym for patient in vault.cohort(Selection("CT", (SIDE, SIDE))).patients}
        assert everybody == {person(file.patient) for file in (*others, evil[0])}


def test_a_text_holds_the_study_of_its_own_patient_and_no_other(hospital: Hospital) -> None:
    with closing(
        hospital.let_in((*PLAIN, File(0, 0, 0, 5, 5, text=True), ATTACKS["another's study, with a text"]))
    ) as v:
        assert {p.pseudonym for p in v.cohort(Selection("CT", (SIDE, SIDE))).patients} == {person(1), person(2)}
        assert len(v.held()) == 2


def test_names_that_hold_no_patient_are_seen_red(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule broken on purpose: studies, series and instances looked up by their UIDs, as they once were."""
    hospital.forget(monkeypatch)
    monkeypatch.setattr(parser_process, "keyed_name", lambda _person, name: name)
    red = {}
    for attack in ("another's series", "another's instance", "another's study, with a text"):
        for arrivals in ((*PLAIN[:2], ATTACKS[attack]), (ATTACKS[attack], *PLAIN[:2])):
            red[attack, arrivals[0] == ATTACKS[attack]] = not _agree(hospital, arrivals)
    assert red == {
        ("another's series", False): True,
        ("another's series", True): True,
        ("another's instance", False): False,  # the first one stays
        ("another's instance", True): True,
        ("another's study, with a text", False): True,
        ("another's study, with a text", True): True,
    }


def _agree(hospital: Hospital, arrivals: Sequence[File]) -> bool:
    try:
        assert_neighbours(hospital, arrivals)
    except AssertionError:
        return False
    return True


def test_a_conflict_is_shown_to_a_person_with_a_reason(hospital: Hospital) -> None:
    seen = {}
    for name, attack in ATTACKS.items():
        with closing(hospital.let_in((*PLAIN[:2], attack))) as vault:
            seen[name] = [(one.persons, one.why) for one in vault.alike()]
    two = {person(0), person(NEWCOMER)}
    assert seen == {
        "another's series": [(two, ("series",))],
        "another's study and series": [(two, ("study", "series"))],
        "another's study, with a text": [],  # that file is in quarantine, and says there why
        "another's instance": [(two, ("instance",))],
        "another's instance and picture": [(two, ("picture", "instance"))],
        "all of another's but the id": [(two, ("picture", "study", "series", "instance"))],
        "another's picture": [(two, ("picture",))],
    }


# -- every mechanism of level A

SHAPE = (8, 8)
TASK = classification(
    ("0", "1"),
    SHAPE,
    sampling_rate=0.5,
    rounds=1,
    steps_per_round=1,
    clip=1.0,
    images_per_patient=8,
    public_patients=8,
)
FEDERATED = Federated(TASK, 130, noise_multiplier=1.0)
MODEL = TaskModel(FEDERATED)
MASKED = FederatedMasked(
    classification(("0", "1"), SHAPE, rounds=30, steps_per_round=1, images_per_patient=8, public_patients=225),
    130,
    noise_multiplier=1.8,
    sites=3,
    honest=2,
    value_bound=4.0,
    scale=20,
    ring_bits=32,
)


@cache
def centroids() -> Centroids:
    """Eight pixels a side; all images of a patient are looked at, so that nothing is drawn."""
    public = np.random.default_rng(0).random((60, *SHAPE)).astype(np.float32)
    basis = fit_basis(public, 10, "public")
    raw = fitted(basis.encode(public), (2, 4), codec_digest(basis), {}, np.random.default_rng(0))
    return Centroids(basis, codebook_from(raw, "public"), ("0", "1"), 1.0, 0.5, k=5, margin=1.0, images_per_patient=8)


def _tensors(unit: Any) -> bytes:
    return b"|".join(rows.numpy().tobytes() for rows in unit.rows)


def _of_centroids(mechanism: Any, cohort: Cohort) -> list[bytes]:
    latents, labels = mechanism._read(cohort, UnsafeSeededEntropy(1))
    return [code.tobytes() + bytes([label]) for code, label in zip(latents.codes, labels, strict=True)]


def _of_task(mechanism: Any, cohort: Cohort) -> list[Any]:
    task, entropy = mechanism.task, UnsafeSeededEntropy(1)
    return units(task, mechanism.network(), labelled_examples(task, cohort), entropy)


# What each mechanism takes from each patient of a cohort, patient after patient, as it is just before it samples and
# clips. A new mechanism of level A needs a line here.
TAKES: dict[str, tuple[Callable[[], Any], Callable[[Any, Cohort], list[bytes]]]] = {
    "federated": (lambda: FEDERATED, lambda m, cohort: [_tensors(unit) for unit in _of_task(m, cohort)]),
    "federated-masked": (lambda: MASKED, lambda m, cohort: [_tensors(unit) for unit in _of_task(m, cohort)]),
    "model": (lambda: MODEL, lambda m, cohort: [_tensors(unit) for unit in _of_task(m.training, cohort)]),
    "privimage": (tiny, lambda m, cohort: [_tensors(m._unit(patient)) for patient in m._counted(cohort)]),
    "distill-dp": (
        small.distill_dp,
        lambda m, cohort: [b"|".join(x.tobytes() for x in _stacked(m, (p,))) for p in _counted(m, cohort)],
    ),
    "centroids": (centroids, _of_centroids),
}


def claiming(*wanted: type) -> set[str]:
    """The mechanisms with a claim of one of these types, by what their ``claim`` says that it returns."""
    told = {name: get_type_hints(kind.claim)["return"] for name, kind in MECHANISMS.items()}
    kinds = {name: get_args(kind) or (kind,) for name, kind in told.items()}
    known = {*get_args(Gaussian), KAnonymous, NoClaim}
    assert all(known.issuperset(some) for some in kinds.values()), "a kind nobody knows"
    return {name for name, some in kinds.items() if set(some) & set(wanted)}


def test_no_mechanism_of_level_a_is_forgotten_here() -> None:
    assert claiming(*get_args(Gaussian)) == set(TAKES)


@pytest.mark.parametrize("name", sorted(TAKES))
@settings(max_examples=4)
@given(dice=st.randoms(use_true_random=False))
def test_one_patient_more_adds_one_contribution_to_every_mechanism_of_level_a(
    hospital: Hospital, name: str, dice: Any
) -> None:
    make, takes = TAKES[name]
    mechanism = make()
    selection = Selection("CT", mechanism.shape, fit=True)
    arrivals = [*PLAIN, File(1, 1, 1, 3, 3), File(NEWCOMER, 7, 0, 7, 7), File(NEWCOMER, 7, 1, 1, 1)]
    dice.shuffle(arrivals)
    with closing(hospital.let_in(arrivals)) as vault:
        having = vault.cohort(selection)
    with closing(hospital.let_in(file for file in arrivals if file.patient != NEWCOMER)) as vault:
        lacking = vault.cohort(selection)
    own = Cohort(tuple(patient for patient in having.patients if patient.pseudonym == person(NEWCOMER)))
    assert len(takes(mechanism, own)) == 1, "the newcomer takes part"
    assert len(takes(mechanism, lacking)) == 3
    assert Counter(takes(mechanism, having)) == Counter(takes(mechanism, lacking)) + Counter(takes(mechanism, own))


def test_only_roads_of_k_ask_which_ids_may_be_one_patient() -> None:
    """Of level A nothing may ask: it would make one patient's part depend on another's pictures."""
    tree = Path(pipeline.__file__).parents[1]
    asks = {
        path.relative_to(tree).as_posix()
        for path in tree.rglob("*.py")
        if any(word in path.read_text() for word in (".second_ids(", ".alike_ids(", "out_of_it("))
    }
    told = {"console/quarantine.py"}  # how many groups wait for a person: on a page of the site
    assert asks - told == {
        "storage/vault.py",
        "release/history.py",
        "release/pipeline.py",
        "release/k_search.py",
        "release/preflight.py",
    }
    assert "isinstance(asked.mechanism.claim(), KAnonymous)" in inspect.getsource(preflight.preflight_review), (
        "a dry run, of k alone"
    )
    assert claiming(KAnonymous) == set(OPTIONS), "all of k go by one road"
    of_k = pipeline.release_synthetic.__code__.co_names
    assert {"out_of_it", "kept_clusters"} <= set(of_k)
    for road in (pipeline.release_resumable, pipeline.release_heads):
        assert not {"out_of_it", "kept_clusters", "second_ids"} & set(road.__code__.co_names)
    for module in (participant, secure_aggregation):
        assert not {"out_of_it", "kept_clusters"} & set(vars(module))
