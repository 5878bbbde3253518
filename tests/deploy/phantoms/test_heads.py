"""Head phantoms: one person is one face at every visit and another is another; the truth about them is true."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import dcmread
from scipy import ndimage
from scipy.spatial import cKDTree

from agent.domain import Volume
from deploy.phantoms import head_tissue
from deploy.phantoms.head_deformation import STEP, least_stretch
from deploy.phantoms.head_face import LANDMARKS
from deploy.phantoms.head_files import Series, bids, enhanced, localiser, nifti, series, study, turned
from deploy.phantoms.head_malformed import four_dimensional
from deploy.phantoms.heads import CONTRASTS, HeadPhantoms, Scan, axial
from deploy.phantoms.persons import Person, Visit
from tests.support.heads import bad, phantoms, real_head, scan, true_head
from tests.support.peers import need

Floats = NDArray[np.float64]
PERSONS = range(6)


def _surface(made: Scan, pose: Floats) -> Floats:
    """(n, 3) mm of the face's surface, carried by ``pose``."""
    head = ndimage.binary_fill_holes(ndimage.gaussian_filter(made.volume.values.astype(float), 0.6) > 180)
    edge = np.argwhere(head & ~ndimage.binary_erosion(head))
    points = edge @ made.volume.affine[:3, :3].T + made.volume.affine[:3, 3]
    points = points @ pose[:3, :3].T + pose[:3, 3]
    return np.asarray(points[(points[:, 1] > 30) & (points[:, 2] < 0) & (points[:, 2] > -135)])


def _upright(number: int, visit: int) -> Floats:
    """Scanner to person: the pose of the visit undone, by the landmarks that both visits show."""
    first = np.array(list(scan(number, 0).landmarks.values()))
    here = np.array(list(scan(number, visit).landmarks.values()))
    a, b = here - here.mean(0), first - first.mean(0)
    u, _, v = np.linalg.svd(a.T @ b)
    turn = (u @ np.diag((1, 1, np.sign(np.linalg.det(u @ v)))) @ v).T
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = turn, first.mean(0) - turn @ here.mean(0)
    return pose


def apart(a: Floats, b: Floats) -> float:
    """Mean distance of two surfaces, both ways, mm."""
    return float((cKDTree(a).query(b)[0].mean() + cKDTree(b).query(a)[0].mean()) / 2)


def test_a_person_has_one_face_at_every_visit_and_no_one_else_has_it() -> None:
    """Nearer to oneself at another visit, pose undone, than to anybody else."""
    first = [_surface(scan(n, 0), np.eye(4)) for n in PERSONS]
    again = [_surface(scan(n, 1), _upright(n, 1)) for n in PERSONS]
    far = np.array([[apart(a, b) for b in again] for a in first])
    own, others = np.diag(far), far[~np.eye(len(far), dtype=bool)]
    assert own.max() < others.min()
    assert 2 * np.median(own) < np.median(others)


def test_no_map_has_a_fold_and_what_is_mapped_comes_back() -> None:
    """The Jacobian determinant is positive in every cell; the inverse is one."""
    for number in range(20):
        warp = phantoms().warp(number)
        assert least_stretch(warp.nodes) > 0.2
        points = np.random.default_rng(number).uniform((-90, -115, -150), (90, 105, 95), (50, 3)).T
        assert np.abs(warp(warp.inverse(points)) - points).max() < 0.02


def test_a_fold_is_seen() -> None:
    """A map that turns back in one cell has a negative determinant there."""
    nodes = np.zeros((3, 6, 6, 6), np.float32)
    assert least_stretch(nodes) == pytest.approx(1)
    nodes[1, 3, 3, 3] = -1.5 * STEP
    assert least_stretch(nodes) < 0


def test_the_least_stretch_is_that_of_a_known_map() -> None:
    """A linear map has its own determinant everywhere."""
    turn = np.array(((1.1, 0.2, 0.0), (-0.1, 0.9, 0.3), (0.05, 0.0, 1.2)))
    grid = np.stack(np.meshgrid(*[STEP * np.arange(4.0)] * 3, indexing="ij"))
    nodes = np.tensordot(turn - np.eye(3), grid, 1).astype(np.float32)
    assert least_stretch(nodes) == pytest.approx(float(np.linalg.det(turn)), rel=1e-5)


def _shapes(count: int) -> tuple[Floats, Floats]:
    """Of each person: where landmarks of the face moved, and where points of the brain moved, sizes taken out."""
    inside = np.argwhere(real_head(4.0)[1])[::80] * 4.0 + real_head()[0].affine[:3, 3]
    marks = np.array([place for name, place in scan(0).landmarks.items() if not name.startswith("vertex")])
    faces, brains = [], []
    for number in range(count):
        warp = phantoms().warp(number)
        for points, into in ((marks, faces), (inside, brains)):
            moved = (warp(points.T) - points.T).T
            design = np.column_stack([points, np.ones(len(points))])
            into.append((moved - design @ np.linalg.lstsq(design, moved, rcond=None)[0]).ravel())
    return np.array(faces), np.array(brains)


def test_the_brain_says_nothing_about_the_face() -> None:
    """Persons whose brains are alike are no more alike in the face: Mantel's test, permuted."""
    faces, brains = _shapes(40)
    upper = np.triu_indices(40, 1)
    face_far = np.linalg.norm(faces[:, None] - faces[None], axis=-1)
    brain_far = np.linalg.norm(brains[:, None] - brains[None], axis=-1)
    rng = np.random.default_rng(0)

    def likeness(order: NDArray[np.int64]) -> float:
        return float(np.corrcoef(face_far[upper], brain_far[np.ix_(order, order)][upper])[0, 1])

    chance = [likeness(rng.permutation(40)) for _ in range(199)]
    assert likeness(np.arange(40)) < np.quantile(chance, 0.99)
    # the test can see: faces that are the brains' would be found
    brain_far = face_far + 0.5 * brain_far * face_far.mean() / brain_far.mean()
    assert likeness(np.arange(40)) > max(likeness(rng.permutation(40)) for _ in range(99))


def test_persons_differ_as_much_as_people_do() -> None:
    """Millimetres in the face, a few per cent in size."""
    marks = np.array([list(_at_home(n).values()) for n in range(40)])
    assert (marks.std(axis=0).max(axis=1) > 2.5).all()
    assert (marks.std(axis=0) < 12).all()
    long = marks[:, _name("vertex"), 2] - marks[:, _name("chin"), 2]
    assert 0.02 < long.std() / long.mean() < 0.08


def _at_home(number: int) -> dict[str, Floats]:
    """Landmarks of the person before any pose."""
    found = phantoms().warp(number).inverse(np.array(list(LANDMARKS.values())).T).T
    return dict(zip(LANDMARKS, found, strict=True))


def _name(landmark: str) -> int:
    return list(_at_home(0)).index(landmark)


def test_the_brain_keeps_away_from_the_skin() -> None:
    """Between the brain and the air lie fluid, skull and scalp."""
    for number in PERSONS:
        made = scan(number)
        air = made.labels == head_tissue.AIR
        off = ndimage.distance_transform_edt(~air, sampling=4.0)
        assert off[made.brain].min() > 4
        volume = made.brain.sum() * 0.064
        assert 1100 < volume < 2400


def test_landmarks_lie_on_the_skin() -> None:
    """The tip of the nose is where air begins in front of it; the chin as well."""
    for number in PERSONS:
        made = scan(number, 0, 2.0) if number < 2 else scan(number)
        for name in ("nose_tip", "chin"):
            at = np.rint((np.linalg.inv(made.volume.affine) @ np.append(made.landmarks[name], 1))[:3]).astype(int)
            ahead = made.labels[at[0], :, at[2]] != head_tissue.AIR
            last = int(np.flatnonzero(ahead).max())
            assert abs(last - at[1]) * made.volume.affine[1, 1] <= 10


def test_the_brain_lies_on_the_template() -> None:
    """to_template carries the person's brain onto the root's: what the warp leaves is little."""
    root = real_head(4.0)
    for number in range(4):
        made = scan(number)
        points = np.argwhere(made.brain) @ made.volume.affine[:3, :3].T + made.volume.affine[:3, 3]
        there = points @ made.to_template[:3, :3].T + made.to_template[:3, 3]
        index = np.rint((there - root[0].affine[:3, 3]) / 4).astype(int)
        index = np.clip(index, 0, np.array(root[1].shape) - 1)
        assert root[1][tuple(index.T)].mean() > 0.93


def test_ventricles_widen_with_age_and_the_cortex_thins() -> None:
    """Shares of tissue follow the years, in the labels and in the picture."""
    rows = []
    for number in range(40):
        who = phantoms().person(number)
        made = scan(number)
        count = np.bincount(made.tissues.ravel(), minlength=4)[1:] / made.brain.sum()
        values = made.volume.values[made.brain] / np.percentile(made.volume.values[made.brain], 90)
        rows.append((who.age, count[0], count[1], (values < 0.62).mean()))
    table = np.corrcoef(np.array(rows).T)[0]
    assert table[1] > 0.8
    assert table[2] < -0.8
    assert table[3] > 0.8
    assert {phantoms().person(n).sex for n in range(40)} == {"F", "M"}
    assert 20 <= min(rows)[0] < 30
    assert 80 < max(rows)[0] <= 90


def test_the_same_numbers_give_the_same_scan_and_others_another() -> None:
    """By seed, person, visit and contrast; whatever was asked for before."""
    fresh = phantoms().reseeded(0)
    fresh.scan(5, 0, 4.0, "T2")
    assert np.array_equal(fresh.scan(3, 1, 4.0).volume.values, scan(3, 1).volume.values)
    assert not np.array_equal(scan(3, 0).volume.values, scan(3, 1).volume.values)
    other = fresh.reseeded(1)
    assert other.person(3) != fresh.person(3)
    assert not np.array_equal(other.scan(3, 1, 4.0).labels, fresh.scan(3, 1, 4.0).labels)


@pytest.mark.slow
def test_the_root_is_made_the_same_way_twice() -> None:
    """Of the same files the same head."""
    again = HeadPhantoms(*real_head())
    assert np.array_equal(again.root.grey, phantoms().root.grey)
    assert np.array_equal(again.scan(3, 1, 4.0).volume.values, scan(3, 1).volume.values)


def test_another_visit_is_the_same_brain_in_another_pose() -> None:
    """As much of each tissue, within a sampling error."""
    for number in range(4):
        a, b = (np.bincount(scan(number, v).tissues.ravel(), minlength=4)[1:] for v in (0, 1))
        assert np.abs(a / b - 1).max() < 0.03


@pytest.mark.parametrize("contrast", CONTRASTS)
def test_a_contrast_orders_tissues_as_it_does(contrast: str) -> None:
    """Medians of CSF, grey and white matter, fat and bone."""
    made = phantoms().scan(3, 0, 4.0, contrast)  # type: ignore[arg-type]  # a parameter is a plain string
    inside = ndimage.binary_erosion(made.labels != head_tissue.AIR, iterations=2)
    csf, gm, wm, fat, bone = (
        float(np.median(made.volume.values[(made.labels == kind) & inside]))
        for kind in (head_tissue.CSF, head_tissue.GM, head_tissue.WM, head_tissue.FAT, head_tissue.BONE)
    )
    ordered = {
        "T1": csf < gm < wm < fat,
        "T2": wm < gm < csf,
        "FLAIR": csf < wm < gm,
        "CT": fat < csf < wm < gm < 60 and bone > 250,
    }
    assert ordered[contrast]
    assert made.volume.values.dtype == (np.int16 if contrast == "CT" else np.uint16)


def test_series_of_one_visit_lie_in_one_frame() -> None:
    """Thick tilted slices show the brain where the fine ones do."""
    fine, thick = scan(2), phantoms().scan(2, 0, contrast="FLAIR", grid=axial(4.0, 5.0))
    index = np.argwhere(thick.brain)
    points = index @ thick.volume.affine[:3, :3].T + thick.volume.affine[:3, 3]
    there = np.rint((points - fine.volume.affine[:3, 3]) / 4).astype(int)
    assert fine.brain[tuple(there.T)].mean() > 0.9


def test_the_real_head_is_in_the_root_bit_for_bit_but_for_its_edges() -> None:
    """Nothing of the brain was redrawn."""
    head, brain = real_head()
    root = phantoms().root
    start = np.rint(head.affine[:3, 3] - root.affine[:3, 3]).astype(int)
    part = root.grey[tuple(slice(a, a + n) for a, n in zip(start, head.values.shape, strict=True))]
    assert np.array_equal(part[brain], head.values[brain])
    assert (part == head.values).mean() > 0.95


def test_bad_heads_are_bad_in_the_way_they_are_called() -> None:
    """One property of each kind."""
    made, good = bad(), scan(0)
    assert four_dimensional(made["knee"]).ndim == 4
    assert np.isnan(made["not_finite"].values).sum() == 1
    assert abs(np.linalg.det(made["singular"].affine[:3, :3])) < 0.1
    assert not made["empty"].values.any()
    assert not made["brain_extracted"].values[~good.brain].any()
    assert made["cut_at_brow"].values.shape[2] < made["cut_at_nose"].values.shape[2] < good.volume.values.shape[2]
    assert made["thick_slices"].affine[2, 2] == 5
    assert made["slice_lost"].values.shape[2] == good.volume.values.shape[2] - 1
    middle = np.array(made["left_half_missing"].values.shape)[0]
    assert np.array_equal(made["left_half_missing"].values, good.volume.values[-middle:])
    behind = np.s_[20:36, :4, 12:22]
    assert (made["wrapped_nose"].values[behind] > good.volume.values[behind] + 300).sum() > 10
    before = np.s_[20:36, -6:, 20:60]
    assert made["ghosted"].values[before].mean() > 1.5 * good.volume.values[before].mean()
    skin = (good.labels != head_tissue.AIR) & (good.labels != head_tissue.CAVITY)
    front = np.zeros_like(skin)
    front[:, 50:, 18:28] = True
    assert not made["faceless"].values[skin & front].any()


def test_nifti_is_read_back_as_it_was_whatever_the_order_of_axes(tmp_path: Path) -> None:
    """Same voxels at the same millimetres."""
    volume = scan(1).volume
    for number, (codes, dtype) in enumerate((("RAS", None), ("LIP", "int16"), ("ASR", "float32"))):
        nifti(tmp_path / f"{number}.nii.gz", volume, codes, dtype)
        image = nibabel.load(tmp_path / f"{number}.nii.gz")
        assert nibabel.aff2axcodes(image.affine) == tuple(codes)
        assert image.get_data_dtype() == (dtype or "uint16")
        _same(nibabel.as_closest_canonical(image), volume)
    nifti(tmp_path / "small.nii", volume, dtype="uint8")
    assert np.asarray(nibabel.load(tmp_path / "small.nii").dataobj).max() == 255


def _same(image: nibabel.Nifti1Image, volume: Volume) -> None:
    assert np.allclose(image.affine, volume.affine, atol=1e-3)
    assert np.array_equal(np.asarray(image.dataobj), volume.values)


def _read(folder: Path) -> list[nibabel.Nifti1Image]:
    """What dcm2niix makes of a folder."""
    into = folder.parent / f"{folder.name}_nifti"
    into.mkdir()
    done = subprocess.run(["dcm2niix", "-o", into, "-f", "%s", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return [nibabel.as_closest_canonical(nibabel.load(path)) for path in sorted(into.glob("*.nii"))]


def _met() -> tuple[Person, Visit]:
    person = Person.draw(0, 0, np.random.default_rng(1))
    visit = Visit.of(person)
    return person, replace(visit, series=f"{visit.series}.2")


def _coarse() -> Scan:
    return phantoms().scan(0, 0, 8.0)


@pytest.mark.parametrize("codes", ["LPS", "PIL", "RSA"])
def test_single_frames_say_where_they_are(tmp_path: Path, codes: str) -> None:
    """By the headers of the slices alone, in axial, sagittal and odd orders."""
    volume = _coarse().volume
    paths = series(tmp_path, volume, _met(), Series("T1", "T1", codes))
    sent = turned(volume, codes)
    for index, path in enumerate(paths):
        dataset = dcmread(path)
        assert np.array_equal(dataset.pixel_array, sent.values[:, :, index].T)
        column, row = (np.array(dataset.ImageOrientationPatient[a : a + 3], dtype=float) for a in (0, 3))
        down, across = (float(step) for step in dataset.PixelSpacing)
        at = np.array(dataset.ImagePositionPatient, dtype=float) + 3 * across * column + 2 * down * row
        assert np.allclose(at * (-1, -1, 1), (sent.affine @ (3, 2, index, 1))[:3], atol=1e-3)
        assert dataset.BodyPartExamined == "HEAD"
        assert dataset.FrameOfReferenceUID.endswith(".9")


def test_another_program_reads_the_same_volumes(tmp_path: Path) -> None:
    """dcm2niix: MR slices, many frames, signed CT."""
    need("dcm2niix")
    volume = _coarse().volume
    series(tmp_path / "mr", volume, _met(), Series("T1", "T1", "PIL"))
    _same(_read(tmp_path / "mr")[0], volume)
    enhanced(tmp_path / "many" / "one.dcm", volume, _met(), Series("T1", "T1", "LPS", many_frames=True))
    _same(_read(tmp_path / "many")[0], volume)
    ct = phantoms().scan(0, 0, 8.0, "CT").volume
    assert ct.values.min() < -900
    series(tmp_path / "ct", ct, _met(), Series("CT", "CT", "LPS"))
    _same(_read(tmp_path / "ct")[0], ct)


def test_a_lost_slice_is_not_there(tmp_path: Path) -> None:
    """The others are, with their numbers."""
    volume = _coarse().volume
    paths = series(tmp_path, volume, _met(), Series("T1"), leave_out=(7,))
    numbers = [int(dcmread(path, stop_before_pixels=True).InstanceNumber) for path in paths]
    assert numbers == [n + 1 for n in range(volume.values.shape[2]) if n != 7]


def test_a_study_has_one_frame_of_reference_and_a_localiser_of_three_planes(tmp_path: Path) -> None:
    """Every series its own UID, every instance its own, all of one study."""
    made = (Series("T1 SAG", "T1", "PIL", mm=8.0), Series("FLAIR", "FLAIR", "LPS", axial(8.0, 10.0)))
    study(tmp_path, phantoms(), 0, 1, np.random.default_rng(0), made)
    found = [dcmread(path, stop_before_pixels=True) for path in sorted(tmp_path.rglob("*.dcm"))]
    assert len({d.SOPInstanceUID for d in found}) == len(found)
    assert len({d.SeriesInstanceUID for d in found}) == 3
    assert len({d.StudyInstanceUID for d in found}) == len({d.FrameOfReferenceUID for d in found}) == 1
    planes = {tuple(d.ImageOrientationPatient) for d in found if d.SeriesDescription == "LOCALISER"}
    assert len(planes) == 3
    assert sum(d.SeriesDescription == "LOCALISER" for d in found) == 9


def test_localisers_lie_in_the_visit_s_frame(tmp_path: Path) -> None:
    """Its middle sagittal slice is the fine scan's, at 2 mm pixels."""
    localiser(tmp_path, phantoms(), 0, 0, _met())
    sagittal = [d for d in map(dcmread, sorted(tmp_path.glob("*.dcm"))) if d.InstanceNumber in (4, 5, 6)]
    assert [d.Rows for d in sagittal] == [128] * 3
    assert {round(float(d.ImagePositionPatient[0])) for d in sagittal} == {-20, 0, 20}


def test_trees_are_those_of_public_data_sets(tmp_path: Path) -> None:
    """BIDS with ages."""
    bids(tmp_path / "bids", phantoms(), (0, 1), visits=2, mm=8.0)
    rows = (tmp_path / "bids" / "participants.tsv").read_text().splitlines()
    assert rows[0].split("\t") == ["participant_id", "age", "sex"]
    assert rows[2].split("\t")[1] == f"{phantoms().person(1).age:.1f}"
    image = tmp_path / "bids" / "sub-0002" / "ses-02" / "anat" / "sub-0002_ses-02_T1w.nii.gz"
    _same(nibabel.load(image), phantoms().scan(1, 1, 8.0).volume)
    assert json.loads((tmp_path / "bids" / "dataset_description.json").read_text())["BIDSVersion"]


def test_a_head_of_the_truth_is_a_head() -> None:
    """What tests begin with when nothing is to be searched for."""
    head = true_head(0)
    assert bool(head.skin[head.brain.mask].all())
