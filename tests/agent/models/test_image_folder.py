"""Public pictures from a folder: what can be used is used, in one order, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agent.models.image_folder import ImageFolderError, read_identities, read_image_folder, read_labels


def save(path: Path, pixels: np.ndarray, **how: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def test_pictures_of_a_folder_and_below_it_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, value in (("b.png", 2), ("a/z.PNG", 1), ("c.tif", 3), ("notes.txt", 0)):
        if name.endswith("txt"):
            (tmp_path / name).write_text("x")
        else:
            save(tmp_path / name, np.full((8, 8, 3), value, np.uint8))
    told: list[tuple[int, int]] = []
    images, names = read_image_folder(tmp_path, 8, grey=False, say=lambda done, every: told.append((done, every)))
    assert names == ("a/z.PNG", "b.png", "c.tif")
    assert (images.shape, images.dtype) == ((3, 8, 8, 3), np.uint8)
    assert images[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_picture_of_the_right_size_is_unchanged_and_a_larger_one_is_averaged(tmp_path: Path) -> None:
    exact, wide = noise(8, 8, 3), noise(16, 20, seed=1)
    save(tmp_path / "a.png", exact)
    save(tmp_path / "b.png", wide)
    colour, _ = read_image_folder(tmp_path, 8, grey=False)
    assert np.array_equal(colour[0], exact)
    grey, _ = read_image_folder(tmp_path, 8, grey=True)
    assert grey.shape == (2, 8, 8)
    blocks = wide[:, 2:18].reshape(8, 2, 8, 2).mean(axis=(1, 3))  # the centred square, two by two
    assert np.abs(grey[1] - blocks).max() <= 0.51
    assert (colour[1] == grey[1][..., None]).all()


def test_sixteen_bits_are_not_clipped_to_white(tmp_path: Path) -> None:
    deep = np.linspace(0, 65_535, 64).round().astype(np.uint16).reshape(8, 8)
    save(tmp_path / "a.png", deep)
    save(tmp_path / "b.tif", deep)
    grey, names = read_image_folder(tmp_path, 8, grey=True)
    assert names == ("a.png", "b.tif")
    assert np.abs(grey - deep / 257.0).max() <= 0.51
    assert read_image_folder(tmp_path, 8, grey=False)[0].shape == (2, 8, 8, 3)


def test_numbers_of_which_nobody_knows_what_is_white_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path / "f.tif", np.full((8, 8), 0.5, np.float32))
    save(tmp_path / "i.tif", np.full((8, 8), 1 << 20, np.int32))
    save(tmp_path / "a.png", noise(8, 8))
    assert read_image_folder(tmp_path, 8, grey=True)[1] == ("a.png",)


def test_what_cannot_be_used_is_passed_over_and_counted(tmp_path: Path) -> None:
    save(tmp_path / "good.png", noise(8, 8))
    save(tmp_path / "small.png", noise(7, 20))
    save(tmp_path / "cut.png", noise(64, 64, 3))
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:200])
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.bmp").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    told: list[tuple[int, int]] = []
    _, names = read_image_folder(tmp_path, 8, grey=True, say=lambda *counts: told.append(counts))
    assert names == ("good.png",)
    assert told[-1] == (5, 5)


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.models.image_folder._MOST_PIXELS", 64)
    save(tmp_path / "a.png", noise(8, 8))
    save(tmp_path / "b.png", noise(9, 8))
    assert read_image_folder(tmp_path, 8, grey=True)[1] == ("a.png",)


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "small"])
def test_a_folder_that_cannot_be_trained_on_is_a_sentence(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "pictures"
    if kind == "file":
        folder.write_text("x")
    if kind in ("empty", "small"):
        folder.mkdir()
    if kind == "small":
        save(folder / "a.png", noise(8, 8))
    said = {"missing": "not a folder", "file": "not a folder", "empty": "0 image file", "small": "16 pixels a side"}
    with pytest.raises(ImageFolderError, match=said[kind]):
        read_image_folder(folder, 16, grey=True)


def test_identities_are_numbers_for_the_pictures_that_are_listed(tmp_path: Path) -> None:
    csv = tmp_path / "who.csv"
    csv.write_text("﻿identity,file,other\nzoe,c.png,1\nanna,a.png,\nzoe,x/d.png,2\nanna,gone.png,3\nzoe,c.png,4\n")
    places, whose = read_identities(csv, ("a.png", "b.png", "c.png", "x/d.png"))
    assert places.tolist() == [0, 2, 3]
    assert whose.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "columns file and identity"),
        ("file,identity\n", "columns file and identity"),
        ("file,person\na.png,1\n", "columns file and identity"),
        ("file,identity\nz.png,1\n", "names no image"),
        ("file,identity\na.png,1\na.png,2\n", "row 2"),
        ("file,identity\na.png\n", "row 1"),
        ("file,identity\na.png,\n", "row 1"),
        ("file,identity\n,1\n", "row 1"),
    ],
)
def test_a_list_of_identities_that_leaves_a_doubt_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "who.csv").write_text(text)
    with pytest.raises(ImageFolderError, match=said):
        read_identities(tmp_path / "who.csv", ("a.png",))


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "who.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("who.csv", "gone.csv"):
        with pytest.raises(ImageFolderError, match=f"{name} is not a CSV file"):
            read_identities(tmp_path / name, ("a.png",))


def test_labels_are_those_of_the_list_or_of_the_folders(tmp_path: Path) -> None:
    csv = tmp_path / "labels.csv"
    csv.write_text("file,label\nc.png,zebra\na.png,bee\ngone.png,ant\n")
    places, labels = read_labels(csv, ("a.png", "b.png", "c.png"))
    assert (places.tolist(), labels) == ([0, 2], ("bee", "zebra"))
    places, labels = read_labels(None, ("train/zebra/2.png", "bee/1.png", "zebra/1.png"))
    assert (places.tolist(), labels) == ([0, 1, 2], ("zebra", "bee", "zebra"))


def test_labels_that_leave_a_doubt_are_refused(tmp_path: Path) -> None:
    csv = tmp_path / "labels.csv"
    for text, told in (
        ("file,label\na.png,bee\na.png,zebra\n", "row 2 has no file or no label"),
        ("file,identity\na.png,bee\n", "columns file and label"),
        ("file,label\nb.png,bee\n", "names no image"),
    ):
        csv.write_text(text)
        with pytest.raises(ImageFolderError, match=told):
            read_labels(csv, ("a.png",))
    with pytest.raises(ImageFolderError, match=r"1 image\(s\) are not in a folder"):
        read_labels(None, ("bee/1.png", "2.png"))
