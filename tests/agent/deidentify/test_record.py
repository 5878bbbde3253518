"""Colour, from a coloured file to a cohort: kept as it is, seen as it is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from agent.cli.main import main
from agent.deidentify.record import Record, grey
from agent.domain import Selection
from agent.ingest.ocr import Ocr
from agent.storage.instance_index import DefacedInstance, InstanceRecord, decode, head_of
from agent.storage.pixel_codec import packed, unpacked
from agent.storage.projects import open_vault
from agent.storage.site_database import SiteDatabase
from agent.storage.site_directory import SiteDirectory
from agent.storage.vault import Vault
from deploy.phantoms import fundus
from deploy.phantoms.persons import ISSUER

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))
BT601 = (0.299, 0.587, 0.114)


def _key(number: int, kind: int = 0) -> str:
    return f"{kind:016x}{number:016x}"


def _record(number: int, pixels: np.ndarray) -> Record:
    return Record(
        *(_key(number, kind) for kind in (1, 2, 3, 4)), "OP", "image", "1", pixels, b"PAYLOAD", False, _key(number, 5)
    )


def _noise(*shape: int) -> np.ndarray:
    levels = np.random.default_rng(shape).integers(40, 256, shape)
    return levels.astype(np.float32) / np.float32(255)


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    """Two coloured pictures of two sizes, and one grey one."""
    vault = Vault(SiteDatabase(tmp_path / "vault.db", KEY), tmp_path / "main.db", OTHER)
    vault.keep_all([_record(1, _noise(8, 8, 3)), _record(2, _noise(8, 8)), _record(3, _noise(20, 12, 3))])
    return vault


def _seen(vault: Vault, selection: Selection) -> dict[str, np.ndarray]:
    return {person: image.pixels for person, image in vault.images(selection)}


def test_a_coloured_picture_comes_back_in_its_colours(vault: Vault) -> None:
    seen = _seen(vault, Selection("OP", (8, 8, 3)))
    assert list(seen) == [_key(1, 3)]
    assert np.array_equal(seen[_key(1, 3)], _noise(8, 8, 3))


def test_who_asks_for_grey_gets_the_luma_of_colour(vault: Vault) -> None:
    seen = _seen(vault, Selection("OP", (8, 8)))
    assert list(seen) == [_key(1, 3), _key(2, 3)]
    assert np.allclose(seen[_key(1, 3)], _noise(8, 8, 3).astype(float) @ BT601, rtol=0, atol=1e-6)
    assert np.array_equal(seen[_key(2, 3)], _noise(8, 8))


@pytest.mark.parametrize(
    ("shape", "persons"),
    [((8, 8, 3), (1, 3)), ((8, 8), (1, 2, 3)), ((12, 12, 3), (3,)), ((13, 13, 3), ()), ((4, 4), (1, 2, 3))],
)
def test_pictures_of_any_size_are_fitted_and_never_enlarged(
    vault: Vault, shape: tuple[int, ...], persons: tuple[int, ...]
) -> None:
    seen = _seen(vault, Selection("OP", shape, fit=True))
    assert list(seen) == [_key(person, 3) for person in persons]
    assert {picture.shape for picture in seen.values()} <= {shape}
    if shape == (4, 4):
        expected = _noise(8, 8).astype(float).reshape(4, 2, 4, 2).mean((1, 3))
        assert np.allclose(seen[_key(2, 3)], expected, rtol=0, atol=1e-6)


def test_a_retina_smaller_than_its_frame_does_not_count_as_large(tmp_path: Path) -> None:
    vault = Vault(SiteDatabase(tmp_path / "vault.db", KEY), tmp_path / "main.db", OTHER)
    (patient,) = fundus.fundus_patients(1, np.random.default_rng(0), 64, eyes=("left",))
    retina = patient.photographs[0].pixels.astype(np.float32) / np.float32(255)
    vault.keep(_record(1, np.pad(retina, ((40, 40), (40, 40), (0, 0)))))
    assert list(_seen(vault, Selection("OP", (100, 100, 3), fit=True))) == []
    assert len(_seen(vault, Selection("OP", (48, 48, 3), fit=True))) == 1


def test_a_cohort_of_colours_can_be_asked_for_by_its_shape(vault: Vault) -> None:
    assert len(vault.cohort("OP", (8, 8, 3)).patients) == 1
    assert len(vault.cohort(Selection("OP", (8, 8, 3), fit=True)).patients) == 2


def test_defacing_keeps_the_colours_and_grey_does_not_take_their_place(vault: Vault) -> None:
    with pytest.raises(ValueError, match="shape"):
        vault.defaced([DefacedInstance(_key(1, 1), b"NEW", _noise(8, 8))])
    vault.defaced([DefacedInstance(_key(1, 1), b"NEW", _noise(8, 8, 3) / 2)])
    seen = _seen(vault, Selection("OP", (8, 8, 3)))[_key(1, 3)]
    assert np.abs(seen - _noise(8, 8, 3) / 2).max() < 1e-5


def test_heads_of_older_vaults_have_two_numbers_and_open() -> None:
    head = head_of(_record(1, _noise(8, 8)), "", "")
    raw = head.encode()
    assert json.loads(raw)["shape"] == [8, 8]
    assert decode(raw) == head
    coloured = head_of(_record(1, _noise(8, 8, 3)), "", "")
    assert decode(coloured.encode()).shape == (8, 8, 3)
    assert isinstance(decode(raw), InstanceRecord)


def test_a_box_of_an_older_vault_opens(tmp_path: Path) -> None:
    vault = Vault(SiteDatabase(tmp_path / "vault.db", KEY), tmp_path / "main.db", OTHER)
    vault.keep(_record(1, _noise(8, 8)))
    old = np.rint(_noise(8, 8) * 65535).astype("<u2").tobytes()  # as every picture was written before
    name = _key(1, 1)
    vault._file.rows("UPDATE body SET pixels = ?", (vault._file.seal(f"pixels:{name}", old),))
    assert np.allclose(_seen(vault, Selection("OP", (8, 8)))[_key(1, 3)], _noise(8, 8), rtol=0, atol=1e-6)


@given(arrays(np.float32, st.sampled_from([(3, 4), (2, 5, 3)]), elements=st.floats(0, 1, width=32)))
def test_what_is_packed_comes_back_to_half_of_the_finest_level(pixels: np.ndarray) -> None:
    raw = packed(pixels)
    assert len(raw) in (pixels.size, 2 * pixels.size)
    assert np.abs(unpacked(raw, pixels.shape).astype(float) - pixels).max() <= 0.51 / 65535


def test_bytes_need_a_byte_and_are_exact() -> None:
    levels = np.arange(256, dtype=np.float32).reshape(16, 16) / np.float32(255)
    assert len(packed(levels)) == 256
    assert np.array_equal(unpacked(packed(levels), (16, 16)), levels)
    with pytest.raises(ValueError, match="reshape"):
        unpacked(packed(levels), (17, 16))


@given(arrays(np.float32, (4, 3), elements=st.floats(0, 1, width=32)))
def test_luma_stays_in_the_unit_range_and_between_the_colours(row: np.ndarray) -> None:
    luma = grey(row[None])[0]
    assert (luma <= 1).all()
    assert (luma >= row.min(axis=1) - 1e-6).all()
    assert (luma <= row.max(axis=1) + 1e-6).all()
    assert grey(np.ones((1, 1, 3), np.float32))[0, 0] <= 1


@pytest.mark.parametrize("shape", [(8,), (8, 8, 1), (8, 8, 4), (8, 8, 2), (2, 8, 8, 3)])
def test_a_record_is_grey_or_has_three_colours(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="pixels"):
        _record(1, np.zeros(shape, np.float32))


def test_a_record_gives_its_luma_to_who_looks_for_text() -> None:
    record = _record(1, _noise(8, 8, 3))
    assert record.grey is not None
    assert record.grey.shape == (8, 8)
    assert replace(record, kind="volume", pixels=None).grey is None


def test_an_alarm_sees_grey_pictures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    ocr = object.__new__(Ocr)
    monkeypatch.setattr(Ocr, "chosen", lambda *_: True)
    monkeypatch.setattr(Ocr, "read_words", lambda _self, picture: seen.append(picture.shape) or [])
    object.__setattr__(ocr, "settings", type("S", (), {"least_letters": 4})())
    assert ocr.alarm(_record(1, _noise(8, 8, 3))) is None
    assert seen == [(8, 8)]


@pytest.mark.parametrize("shape", [(8,), (8, 8, 1), (8, 8, 4), (8, 0, 3), (8, 8, 3, 1)])
def test_a_selection_is_grey_or_coloured(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        Selection("OP", shape)


def test_only_squares_are_fitted() -> None:
    with pytest.raises(ValueError, match="square"):
        Selection("OP", (8, 9, 3), fit=True)
    assert Selection("OP", (8, 8)).fit is False


def test_a_clinics_photographs_come_in_with_their_colours_and_without_names(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    words = ["init", "--site", "site-a", "--policy", "internal", "--input", "../input", "--modality", "OP"]
    assert main(["--home", str(tmp_path / "site"), *words]) == 0
    rules = f'[site]\nissuer = "{ISSUER}"\n[rules]\ncolour_modalities = ["OP"]\n'
    (tmp_path / "site" / "ingest.toml").write_text(rules)
    made = fundus.fundus_patients(3, np.random.default_rng(1), 32, 2)
    planted = fundus.write_clinic(tmp_path / "input", 0, made, np.random.default_rng(2))
    assert main(["--home", str(tmp_path / "site"), "ingest"]) == 0
    vault = open_vault(SiteDirectory(tmp_path / "site"))
    try:
        cohort = vault.cohort("OP", (32, 32, 3))
        assert [len(patient.images) for patient in cohort.patients] == [4] * 3
        kept = {np.rint(i.pixels * 255).astype(np.uint8).tobytes() for p in cohort.patients for i in p.images}
        assert kept == {photo.pixels.tobytes() for patient in made for photo in patient.photographs}
        payloads = b"".join(vault.payload(head.name) for head in vault.heads())
        assert not [word for word in planted.strings if word.encode() in payloads]
        grades = sorted(image.label for patient in cohort.patients for image in patient.images)
        assert grades == sorted(str(patient.grade) for patient in made for _ in range(4))
    finally:
        vault.close()


def test_colour_is_let_in_only_where_a_site_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "input").mkdir()
    words = ["init", "--site", "site-a", "--policy", "internal", "--input", "../input", "--modality", "OP"]
    assert main(["--home", str(tmp_path / "site"), *words]) == 0
    made = fundus.fundus_patients(1, np.random.default_rng(1), 32, eyes=("left",))
    fundus.write_clinic(tmp_path / "input", 0, made, np.random.default_rng(2))
    capsys.readouterr()
    main(["--home", str(tmp_path / "site"), "ingest", "--json"])
    assert json.loads(capsys.readouterr().out)["quarantined"] == {"burned_in_risk": 1}
