"""Reading for one prediction: as few readers as pay off, beside the caller, and none left behind."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pydicom
import pytest

from agent.ingest import context
from agent.ingest.context import open_ingest
from agent.ingest.parser_process import ParserProcess
from agent.prediction.studies import _count, reading
from agent.storage.site_directory import MAIN, SiteDirectory
from tests.support.task_site import DEPTH, task_site, write_abdomens


class CountedReader(ParserProcess):
    """One that is remembered."""

    all: list[CountedReader]

    def __init__(self, *words: object, **named: object) -> None:
        super().__init__(*words, **named)  # type: ignore[arg-type]
        CountedReader.all.append(self)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    CountedReader.all = []
    monkeypatch.setattr(context, "ParserProcess", CountedReader)
    home = task_site(tmp_path)
    write_abdomens(tmp_path / "study", [1], masked=False)
    return home


def test_few_files_have_one_reader_which_looks_for_no_text_and_takes_no_nifti(site: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in sorted((tmp_path / "study").glob("*.dcm"))]
    with open_ingest(SiteDirectory(site), MAIN) as way, reading(way, [*files, b"\x1f\x8bzipped", b"junk"]) as images:
        found = images()
        (reader,) = CountedReader.all
        assert reader.pid is not None
        loaded = Path(f"/proc/{reader.pid}/maps").read_text()
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{reader.pid}/status").read_text().splitlines())
    assert len(found.records) == DEPTH
    assert found.refused == {}, "what is no image is passed over"
    assert reader.starts == 1
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), "it is confined as any reader"
    assert "numpy" in loaded
    assert "/scipy/" not in loaded
    assert reader.pid is None, "it has ended"


def test_of_a_file_nothing_is_kept_but_its_header(site: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in sorted((tmp_path / "study").glob("*.dcm"))]
    before = [sys.getrefcount(body) for body in files]
    with open_ingest(SiteDirectory(site), MAIN) as way, reading(way, files) as images:
        found = images()
    assert [sys.getrefcount(body) for body in files] == before
    names = {found.header(name).SOPInstanceUID for name in found.records}
    assert names == {pydicom.dcmread(io.BytesIO(body)).SOPInstanceUID for body in files}


def test_what_fails_beside_the_reading_leaves_no_reader(site: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in sorted((tmp_path / "study").glob("*.dcm"))]
    with (
        open_ingest(SiteDirectory(site), MAIN) as way,
        pytest.raises(ValueError, match="no network"),
        reading(way, files * 20),
    ):
        raise ValueError("no network")
    assert [reader.pid for reader in CountedReader.all] == [None] * len(CountedReader.all)


@pytest.mark.parametrize(
    ("files", "most", "readers"), [(0, 8, 1), (128, 8, 1), (160, 8, 2), (5000, 8, 8), (5000, 1, 1)]
)
def test_one_reader_more_starts_when_it_saves_more_than_it_costs(files: int, most: int, readers: int) -> None:
    assert _count([b""] * files, most) == readers


def test_large_files_count_for_more() -> None:
    assert (_count([bytes(1 << 20)] * 80, 8), _count([b""] * 80, 8)) == (2, 1)
