"""ingest.toml: the example parses, defaults hold without it, and everything wrong is told at once."""

from __future__ import annotations

import datetime as dt
import tomllib
from pathlib import Path

import pytest

from agent.errors import SiteConfigError
from agent.ingest.config import Ingestion, parse_ingestion
from agent.ingest.patient_lists import Columns
from agent.storage.site_directory import SiteSettings

EXAMPLE = Path(__file__).parents[3] / "deploy" / "docs" / "ingest.example.toml"
SITE = SiteSettings("site-a", "localhost:1", Path("input"), frozenset({"CT"}), frozenset({"OT"}), frozenset())
ROOT = Path("/srv/site-a")


def parsed(text: str) -> Ingestion:
    return parse_ingestion(ROOT, SITE, text)


def test_the_documented_example_is_in_order_and_means_what_it_says() -> None:
    found = parsed(EXAMPLE.read_text())
    assert found.rules.modalities == {"CT"}
    assert found.rules.secondary_capture_modalities == {"OT"}
    assert found.rules.min_instances_per_series == 2
    assert found.rules.blanks[0].rectangles[0].bottom == 60
    assert found.listener is not None
    assert found.listener.callers[0].addresses == ("10.20.0.5", "10.20.1.0/24")
    assert found.listener.tls is not None
    assert found.listener.tls.key == ROOT / "tls" / "agent.key"
    assert found.stow is not None
    assert found.pacs["main"].query.modalities == ("MR",)
    assert found.pacs["main"].query.since == dt.date(2026, 1, 1)
    assert found.webs["archive"].hours == "22:00-06:00"
    assert found.folders[0].columns == Columns("mrn", "diagnosis")
    assert found.folders[1].watch
    assert found.reading.pull == ("main",)
    assert found.ocr is not None
    assert found.profile.retain_longitudinal
    assert found.faces is not None
    assert (found.faces.method, found.faces.safe) == ("remodel", True)


def test_every_table_of_the_example_is_one_that_is_known() -> None:
    tables = tomllib.loads(EXAMPLE.read_text())
    known = "site rules blank segment deidentify ocr listener stow pacs dicomweb folder nifti faces"
    assert set(tables) == set(known.split())


def test_without_a_file_nothing_listens_and_nobody_is_asked() -> None:
    found = parsed("")
    assert (found.listener, found.stow, found.ocr) == (None, None, None)
    assert not found.pacs
    assert not found.webs
    assert not found.folders
    assert found.reading.attempts == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[listner]\n", "unknown table: listner"),
        ('[listener]\nae_title = "A"\ncallers = []\nplain_tcp = true\nprt = 1\n', "prt"),
        ('[listener]\nae_title = "A"\ncallers = []\n', "tls"),
        ('[listener]\nae_title = "A"\ncallers = "PACS"\nplain_tcp = true\n', "callers: must be a list"),
        ("[listener]\nae_title = 7\ncallers = []\nplain_tcp = true\n", "ae_title: must be a str"),
        ('[listener]\nae_title = "A"\ncallers = []\nplain_tcp = 1\n', "plain_tcp: must be a bool"),
        ('[rules]\nmodalities = ["CT"]\n', "rules.modalities: is set in site.toml"),
        ("[rules]\nmax_bytes = -1\n", "rules"),
        ("[[rules]]\n", "rules: must be a table"),
        ("[deidentify]\nretain_everything = true\n", "retain_everything"),
        ("[deidentify]\nretain_longitudinal = false\ntimes = true\n", "times needs retain_longitudinal"),
        ("[site]\nattempts = 0\n", "attempts"),
        ("[site]\nlook_seconds = nan\n", "look_seconds"),
        ('[site]\npull = ["nobody"]\n', "no archive is called nobody"),
        ("[folder]\n", "[[folder]]"),
        ("[[folder]]\n", "folder[0].path: missing"),
        ('[pacs]\naet = "X"\n', "[pacs.NAME]"),
        ('[pacs.main]\naet = "X"\nhost = "h"\nport = 104\ncalling = "Y"\nquery.modalities = ["MR*"]\n', "codes"),
        ('[dicomweb.a]\nurl = "http://pacs.example.org/"\n', "https"),
        ("[ocr]\nevery = 0\n", "ocr"),
        ('[[blank]]\nmodality = "US"\nrows = 10\ncolumns = 10\nrectangles = []\n', "blank[0]"),
        ("not toml", "not TOML"),
        *(
            (f'[dicomweb.a]\nurl = "https://a.example.org/"\nquery.since = {value}\n', "must be a date")
            for value in ("2026-01-01T00:00:00", '"1.1.2026"', '"20260101"', "20260101", "true", '""')
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(SiteConfigError) as caught:
        parsed(text)
    assert says in str(caught.value)
    assert str(caught.value).startswith("ingest.toml: ")


@pytest.mark.parametrize("value", ["2026-01-31", '"2026-01-31"'])
def test_a_date_may_stand_in_quotes_or_not(value: str) -> None:
    found = parsed(f'[dicomweb.a]\nurl = "https://a.example.org/"\n[dicomweb.a.query]\nuntil = {value}\n')
    assert found.webs["a"].query.until == dt.date(2026, 1, 31)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SiteConfigError) as caught:
        parsed("[listner]\n[ocr]\nevery = 0\n[site]\nattempts = 0\nfoo = 1\n")
    assert all(said in str(caught.value) for said in ("listner", "every", "foo"))
