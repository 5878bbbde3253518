"""What the commands of ingest tell: what is missing and why, mistakes as sentences, exit statuses, JSON."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset

from agent.cli.main import main
from agent.errors import SiteConfigError
from agent.ingest import errors as ingest_errors
from agent.ingest.context import open_ingest
from agent.ingest.retrieval import RetrievalCallbacks, narrowed, retrieve, scheduled
from agent.ingest.service import IngestService
from agent.pacs.archive import ArchiveConfig, ArchiveQuery
from agent.storage.site_directory import SiteDirectory
from agent.storage.spool import ReceivedFile
from deploy.phantoms import digits
from tests.support.archives import dataset_of, rogue
from tests.support.ingest_site import ingest_site, one_reader, told, typed
from tests.support.pacs import make_instances
from tests.support.pki import Authority
from tests.support.ports import free_port

__all__ = ["one_reader"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_reader")
CT = Path(str(get_testdata_file("CT_small.dcm", download=False)))
RGB = Path(str(get_testdata_file("examples_rgb_color.dcm", download=False)))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A hospital's agent, and an empty folder beside it."""
    return ingest_site(tmp_path)


def pacs(site: Path, port: int, more: str = "") -> None:
    (site / "ingest.toml").write_text(
        f'[pacs.main]\naet = "ROGUE"\nhost = "127.0.0.1"\nport = {port}\ncalling = "LAZARET"\nretries = 1\n'
        f"least_free_bytes = 0\n{more}\n"
    )


def other_hours() -> str:
    """A span of local time that neither is now nor begins within the hour."""
    start = dt.datetime.now() + dt.timedelta(hours=6)
    return f"{start:%H:%M}-{start + dt.timedelta(hours=1):%H:%M}"


# -- what an archive does not send


def test_what_a_pacs_lists_and_does_not_send_is_told_and_the_command_says_that_it_failed(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(_asked: Sequence[str]) -> Iterator[Dataset]:
        yield from (dataset_of(number) for number in range(2))

    with rogue(sends=two) as port:
        pacs(site, port)
        status, out, err = typed(capsys, site, "ingest", "--pacs", "main", "--json")
    archive = json.loads(out)["archive"]
    assert status == 1
    assert (archive["missing"], archive["stopped"], archive["asked"]) == (2, False, True)
    assert "main: 2 instances did not arrive" in err
    assert "SECRET-7" not in out + err
    assert json.loads(out)["files"] == 2


def test_an_archive_of_which_everything_came_is_complete(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rogue() as port:
        pacs(site, port)
        found = told(capsys, site, "ingest", "--pacs", "main")
    assert found["archive"] == {"missing": 0, "failed": 0, "stopped": False, "asked": True, "why": {}}
    assert found["files"] == 4


def test_what_an_archive_counts_and_does_not_list_is_missing(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def more(level: str, answer: Dataset) -> None:
        if level == "SERIES":
            answer.NumberOfSeriesRelatedInstances = 9

    with rogue(changes=more) as port:
        pacs(site, port)
        found = told(capsys, site, "ingest", "--pacs", "main", status=1)
    assert found["archive"]["why"] == {"unlisted": 5}
    assert found["archive"]["missing"] == 5


@pytest.mark.parametrize("road", ["--pacs", "--dicomweb"])
def test_an_archive_that_is_outside_its_hours_is_not_asked_and_that_is_said(
    site: Path, capsys: pytest.CaptureFixture[str], road: str
) -> None:
    port, hours = free_port(), other_hours()  # nobody listens there: to ask would be another fault
    if road == "--pacs":
        pacs(site, port, f'hours = "{hours}"\noutside_hours = "stop"')
    else:
        text = f'[dicomweb.main]\nurl = "http://127.0.0.1:{port}/"\nhours = "{hours}"\nleast_free_bytes = 0\n'
        (site / "ingest.toml").write_text(text)
    status, out, err = typed(capsys, site, "ingest", road, "main", "--json")
    archive = json.loads(out)["archive"]
    assert (status, archive["asked"]) == (1, False)
    assert "outside its hours" in err


def test_who_waits_for_an_archives_hours_is_told_until_when(site: Path) -> None:
    hours = other_hours()
    until: list[dt.datetime] = []
    with open_ingest(SiteDirectory(site), "main") as way:
        remote = ArchiveConfig("main", "ROGUE", "127.0.0.1", free_port(), "LAZARET", hours=hours)
        found = retrieve(way, remote, RetrievalCallbacks(waiting=until.append), lambda: bool(until))
    assert (found.asked, found.complete) == (False, False)
    assert [f"{end:%H:%M}" for end in until] == [hours[:5]]


@pytest.mark.parametrize("road", ["--pacs", "--dicomweb"])
def test_what_was_kept_is_told_and_logged_though_the_archive_cannot_be_reached(
    site: Path, capsys: pytest.CaptureFixture[str], road: str
) -> None:
    with open_ingest(SiteDirectory(site), "main") as way:
        way.inbox.put(ReceivedFile("dimse", "PACS", CT.read_bytes(), instance="1.2.3"))
    port = free_port()
    if road == "--pacs":
        pacs(site, port)
    else:
        text = f'[dicomweb.main]\nurl = "http://127.0.0.1:{port}/"\nretries = 0\nleast_free_bytes = 0\n'
        (site / "ingest.toml").write_text(text)
    status, out, err = typed(capsys, site, "ingest", road, "main", "--json")
    found = json.loads(out)
    assert (status, found["kept"]) == (1, 1)
    assert found["archive"]["missing"] is None  # nobody knows
    assert "refused: " in err
    logged = [json.loads(line) for line in (site / "agent.log").read_text().splitlines()]
    assert [line["kept"] for line in logged if line["event"] == "ingested"] == [1]


def test_what_was_kept_from_one_folder_is_told_though_the_next_one_is_missing(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(CT, site.parent / "input")
    (site / "ingest.toml").write_text('[[folder]]\npath = "../nowhere"\n')
    status, out, err = typed(capsys, site, "ingest", "--json")
    assert (status, json.loads(out)["kept"]) == (1, 1)
    assert "folder" in err


# -- what is asked


@pytest.mark.parametrize("option", ["--patients", "--accessions"])
def test_a_list_that_names_nobody_is_never_everybody(
    site: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (site.parent / "list.txt").write_text("\n  \n")
    asked: list[str] = []
    with rogue(changes=lambda level, _ds: asked.append(level)) as port:
        pacs(site, port)
        status, _, err = typed(capsys, site, "ingest", "--pacs", "main", option, str(site.parent / "list.txt"))
    assert (status, asked) == (1, [])
    assert "is empty" in err


def test_an_opt_out_of_nobody_is_a_mistake(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site.parent / "list.txt").write_text("")
    status, _, err = typed(capsys, site, "opt-out", "add", "--patients", str(site.parent / "list.txt"))
    assert status == 1
    assert "is empty" in err
    status, _, err = typed(capsys, site, "opt-out", "add", "--patients", str(site.parent / "gone.txt"))
    assert (status, "gone.txt cannot be read: file not found" in err) == (1, True)


def test_an_opt_out_of_ids_that_nobody_has_is_said_before_it_is_taken(
    site: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (one,) = make_instances(tmp_path / "made", 1, modalities=("CT",))
    (site.parent / "input" / "a.dcm").write_bytes(one.read_bytes())
    assert main(["--home", str(site), "ingest"]) == 0
    with open_ingest(SiteDirectory(site), "main") as way:  # of whom something waits is somebody, too
        waits = make_instances(tmp_path / "waits", 1, modalities=("CT",), seed="w")[0]
        way.inbox.put(ReceivedFile("dimse", "PACS", waits.read_bytes()))
    ids = site.parent / "list.txt"
    ids.write_text("PAT-0\nPAT-O\nPAT-w0\nPAT-9\n")
    add = ("opt-out", "add", "--patients", str(ids))
    status, out, err = typed(capsys, site, *add)
    assert (status, out) == (1, "")
    assert "nothing is here of 2 of the 4 ids (id 2, 4 of the file)" in err
    assert "--anyway" in err
    assert not any(word in err for word in ids.read_text().split()), "no id is in a message"
    assert told(capsys, site, "opt-out", "list") == {"patients": 0}, (
        "and nobody was opted out, not even the known ones"
    )
    status, out, err = typed(capsys, site, *add, "--anyway")
    assert status == 0
    assert "4 patients opted out; 2 of" in out
    assert "2 of the 4" in err
    assert told(capsys, site, "opt-out", "list") == {"patients": 4}
    assert typed(capsys, site, *add)[0] == 0, "who is on the list is known"


@pytest.mark.parametrize(
    "words",
    [
        *(["--modality", "MR"], ["--since", "2026-01-01"], ["--until", "2026-01-01"], ["--patients", "x"]),
        *(["--accessions", "x"], ["--folder", "x", "--modality", "MR"]),
    ],
)
def test_what_narrows_an_archive_is_wrong_usage_without_one(
    site: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--home", str(site), "ingest", *words])
    assert caught.value.code == 2
    assert "with --pacs or --dicomweb" in capsys.readouterr().err


DAYS = st.none() | st.integers(1, 9).map(lambda day: dt.date(2026, 1, day))
CODES = st.sampled_from("ABCD")
SOME = st.lists(st.sampled_from("ABCD"), max_size=3, unique=True).map(tuple)


def finds(query: ArchiveQuery, study: tuple[str, dt.date, str, str]) -> bool:
    """The meaning of a query, from its words: all that is given holds; of two lists, one."""
    modality, day, patient, accession = study
    listed = not (query.patients or query.accessions) or patient in query.patients or accession in query.accessions
    in_time = (query.since or day) <= day <= (query.until or day)
    return listed and in_time and (not query.modalities or modality in query.modalities)


@st.composite
def queries(draw: st.DrawFn) -> ArchiveQuery:
    first, last = draw(DAYS), draw(DAYS)
    if first and last and first > last:
        first, last = last, first
    return ArchiveQuery(draw(SOME), first, last, "", draw(SOME), draw(SOME))


@given(
    queries(), queries(), st.tuples(st.sampled_from("ABCD"), DAYS, st.sampled_from("ABCD"), st.sampled_from("ABCD"))
)
def test_what_is_typed_never_widens_what_the_settings_allow(
    own: ArchiveQuery, more: ArchiveQuery, study: Any
) -> None:
    study = (study[0], study[1] or dt.date(2026, 1, 5), study[2], study[3])
    try:
        both = narrowed(own, more)
    except SiteConfigError:
        return
    if finds(both, study):
        assert finds(own, study)
        assert finds(more, study)


def test_a_query_with_nothing_in_common_with_the_settings_is_refused_in_words() -> None:
    own = ArchiveQuery(("MR", "CT"), dt.date(2026, 1, 5), dt.date(2026, 1, 9), "", ("P1", "P2"))
    assert narrowed(own, ArchiveQuery(("CT", "US"))).modalities == ("CT",)
    assert narrowed(own, ArchiveQuery(since=dt.date(2026, 1, 1))).since == dt.date(2026, 1, 5)
    assert narrowed(own, ArchiveQuery(until=dt.date(2026, 1, 6))).until == dt.date(2026, 1, 6)
    assert narrowed(own, ArchiveQuery(patients=("P2", "P3"))).patients == ("P2",)
    for more in (
        ArchiveQuery(("US",)),
        ArchiveQuery(since=dt.date(2026, 2, 1)),
        ArchiveQuery(patients=("P3",)),
        ArchiveQuery(accessions=("A",)),
    ):
        with pytest.raises(SiteConfigError) as caught:
            narrowed(own, more)
        assert "P3" not in str(caught.value)


def test_the_clock_asks_for_the_last_days_only_where_a_query_names_none(site: Path) -> None:
    pacs(site, 104)
    with (site / "ingest.toml").open("a") as stream:
        stream.write('[site]\npull = ["main"]\npull_days = 7\n')
    today = dt.date(2026, 3, 8)
    with open_ingest(SiteDirectory(site), "main") as way:
        ingestion = way.ingestion
    assert [one.query.since for one in scheduled(ingestion, today)] == [dt.date(2026, 3, 1)]
    for own in (ArchiveQuery(since=dt.date(2020, 1, 1)), ArchiveQuery(until=dt.date(2020, 1, 1))):
        asked = replace(ingestion, pacs={"main": replace(ingestion.pacs["main"], query=own)})
        assert [one.query for one in scheduled(asked, today)] == [own]


# -- serve and doctor


def test_serve_ends_with_a_sentence_when_it_cannot_listen(
    site: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own process keeps its handlers
    certificate, _ = Authority(tmp_path / "pki").server()
    (tmp_path / "other.key").write_text("no key")
    callers = 'callers = [{ ae_title = "P", addresses = ["127.0.0.1"] }]\n'
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for text in (
            f'[listener]\nae_title = "L"\nplain_tcp = true\nport = {port}\n{callers}',
            '[stow]\nport = 0\ntoken_file = "no.token"\n',
            f'[stow]\nport = 0\ncertificate = "{certificate}"\nkey = "../other.key"\nclient_ca = "{certificate}"\n',
        ):
            (site / "ingest.toml").write_text(text)
            status, _, err = typed(capsys, site, "serve")
            assert status == 1
            assert err.startswith("refused: ")


@pytest.mark.parametrize("error", ingest_errors.EXPECTED)
def test_whatever_ends_serve_at_its_start_is_a_sentence(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(_self: object) -> None:
        raise error("opted_out")  # the only one of them that takes no sentence takes a reason's code

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(IngestService, "__enter__", fails)
    status, _, err = typed(capsys, site, "serve")
    assert status == 1
    assert err.startswith("refused: opted_out")


def doctor(capsys: pytest.CaptureFixture[str], site: Path, text: str) -> dict[str, str | None]:
    (site / "ingest.toml").write_text(text)
    found: dict[str, str | None] = told(capsys, site, "doctor", status=1)  # it is not enrolled, for one
    return found


def test_the_doctor_opens_what_the_listeners_will_need(
    site: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "pki")
    (good, key), (_, other) = authority.server("a"), authority.server("b")
    callers = 'callers = [{ ae_title = "P", addresses = ["127.0.0.1"] }]\n'

    def settings(key: Path, token: Path, port: int) -> str:
        tls = f'tls = {{ certificate = "{good}", key = "{key}", authorities = "{authority.ca}" }}\n'
        stow = f'[stow]\nport = {free_port()}\ncertificate = "{good}"\nkey = "{key}"\ntoken_file = "{token}"\n'
        return f'[listener]\nae_title = "L"\nport = {port}\n{callers}{tls}{stow}'

    token = tmp_path / "token"
    assert main(["--home", str(site), "token", "--out", str(token)]) == 0
    names = ("[listener] tls", "[stow] certificate and key", "[stow] token_file")
    port = free_port()
    found = doctor(capsys, site, settings(key, token, port))
    assert [found[name] for name in names] == [None] * 3
    assert found[f"[listener] port {port} is free"] is None
    token.chmod(0o644)
    found = doctor(capsys, site, settings(other, token, port))
    assert all(found[name] for name in names)
    assert "do not fit" in str(found["[listener] tls"])
    found = doctor(capsys, site, settings(tmp_path / "none.key", tmp_path / "none", port))
    assert all(found[name] for name in names)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = doctor(capsys, site, settings(key, token, port))
    assert f"[listener] port {port} is in use: by this agent's own serve, or something else" in found


def test_the_doctor_cannot_listen_where_this_machine_is_not(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callers = 'callers = [{ ae_title = "P", addresses = ["127.0.0.1"] }]\n'
    text = f'[listener]\nae_title = "L"\nhost = "192.0.2.1"\nport = 11112\nplain_tcp = true\n{callers}'  # RFC 5737
    assert "cannot listen" in str(doctor(capsys, site, text)["[listener] port 11112 is free"])


def test_the_doctor_looks_for_the_folders_and_reads_their_lists(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [site.parent / name for name in ("good", "bad")]
    for folder in folders:
        folder.mkdir()
    (folders[1] / "nifti.csv").write_text("SECRET-7\n")
    text = "".join(f'[[folder]]\npath = "../{name}"\n' for name in ("good", "bad", "none"))
    found = doctor(capsys, site, text)
    assert [bool(found[f"[[folder]] {number}"]) for number in (1, 2, 3)] == [False, True, True]
    assert "SECRET-7" not in json.dumps(found)


# -- quarantine


@pytest.fixture
def refused(site: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """A site, and the name of the one file in its quarantine."""
    deep = site.parent / "input" / ("a-long-name-of-a-folder-" * 4)
    deep.mkdir()
    shutil.copy(RGB, deep / "us.dcm")
    told(capsys, site, "ingest")
    (file,) = told(capsys, site, "quarantine", "list")["files"]
    return site, file["name"]


def test_names_in_quarantine_are_listed_whole_on_any_terminal(
    refused: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    site, name = refused
    status, out, _ = typed(capsys, site, "quarantine", "list", "--files")
    (line,) = [line for line in out.splitlines() if name in line]
    assert status == 0
    assert line.split()[0] == name
    assert line.endswith("/us.dcm")
    status, out, _ = typed(capsys, site, "quarantine", "retry", line.split()[0])
    assert status == 1
    assert "1 files read" in out


@pytest.mark.parametrize("unknown", ["0" * 32, "no-name", "../../keys/vault.key", ""])
def test_a_name_of_nothing_in_quarantine_is_a_mistake_and_nothing_is_done(
    refused: tuple[Path, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, unknown: str
) -> None:
    site, name = refused
    for words in (
        ["retry", name, unknown],
        ["drop", name, unknown, "--yes"],
        ["show", unknown, "--out", str(tmp_path / "seen")],
    ):
        status, _, err = typed(capsys, site, "quarantine", *words)
        assert status == 1
        assert "not in quarantine" in err
    assert not (tmp_path / "seen").exists()
    (entry,) = told(capsys, site, "quarantine", "list")["files"]
    assert (entry["name"], entry["attempts"]) == (name, 1)


def test_who_tries_again_is_told_what_was_left_out(
    refused: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    site, name = refused
    for _ in range(2):
        assert told(capsys, site, "quarantine", "retry", status=1)["left_out"] == 0
    _, out, err = typed(capsys, site, "quarantine", "retry", name)
    assert "add --once-more" in err
    assert "0 files read" in out
    assert told(capsys, site, "quarantine", "retry")["left_out"] == 1
    assert told(capsys, site, "quarantine", "retry", "--once-more", status=1)["files"] == 1


def test_what_is_shown_and_dropped_is_told_as_json(
    refused: tuple[Path, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site, name = refused
    found = told(capsys, site, "quarantine", "show", name, "--out", str(tmp_path / "seen.dcm"))
    assert found == {
        "name": name, "code": "burned_in_risk", "bytes": RGB.stat().st_size, "wrote": "seen.dcm",
    }  # fmt: skip
    assert told(capsys, site, "quarantine", "drop", name, "--yes") == {"dropped": 1}


# -- manifests and lists


def test_manifests_of_several_studies_are_one_array(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, site, "manifest") == []
    digits.write_hospital(site.parent / "input", 0, 1, 3, 2, np.random.default_rng(1))
    told(capsys, site, "ingest")
    found = told(capsys, site, "manifest")
    assert len(found) == 3
    with open_ingest(SiteDirectory(site), "main") as way:
        study = way.vault.studies()[0]
    assert told(capsys, site, "manifest", "--study", study) in found
    out = site.parent / "out"
    assert told(capsys, site, "manifest", "--out", str(out)) == {"manifests": 3}
    assert json.loads((out / f"{study}.json").read_text()) in found


def test_a_manifest_of_no_study_is_a_mistake(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = typed(capsys, site, "manifest", "--study", "nosuch")
    assert (status, out) == (1, "")
    assert "no study of that name" in err


def test_lists_are_told_as_json(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site.parent / "list.txt").write_text("P-1\nP-2\n")
    words = ["opt-out", "add", "--patients", str(site.parent / "list.txt"), "--anyway"]
    assert main(["--home", str(site), *words]) == 0
    assert told(capsys, site, "opt-out", "list") == {"patients": 2}
    assert main(["--home", str(site), "project", "create", "study-1"]) == 0
    assert told(capsys, site, "project", "list") == ["main", "study-1"]
    with open_ingest(SiteDirectory(site), "main") as way:
        way.vault.hold("ab" * 16)
    assert told(capsys, site, "cohort", "--held") == ["ab" * 16]
