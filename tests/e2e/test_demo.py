"""What the demo leaves: verdicts, a refusal with its reason, sound books, and no byte of a patient's identity."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pydicom
import pytest

from agent.phantoms import digits
from deploy.demo.scene import SITES
from protos.artifact import unpack_images
from tests.e2e.conftest import NONET, PATIENTS, ROUNDS, Demo


def summary(demo: Demo) -> dict:  # type: ignore[type-arg]
    return json.loads((demo.out / "summary.json").read_text())  # type: ignore[no-any-return]


def test_the_summary_holds_what_others_rely_on(demo: Demo) -> None:
    found = summary(demo)
    assert found["sites"] == list(SITES)
    for site in SITES:
        counts = found["ingest"][site]
        assert counts["files"] == counts["kept"] + counts["duplicates"] + sum(counts["quarantined"].values())
        assert counts["kept"] >= 2 * PATIENTS
        assert {"too_deep", "burned_in_risk", "conflicting_instance", "not_an_image"} <= counts["quarantined"].keys()
    keys = {"id", "mechanism", "claim", "claim_level", "epsilon", "delta", "k", "verdict", "findings"}
    assert all(keys <= release.keys() for release in found["releases"])
    assert 0 < found["accuracy"]["private"] <= 1
    assert 0 < found["accuracy"]["non_private"] <= 1
    assert all(step["seconds"] >= 0 for step in found["steps"])


def test_three_sets_and_every_round_are_admitted_and_the_poor_site_is_refused(demo: Demo) -> None:
    releases = summary(demo)["releases"]
    sets = [r for r in releases if r["mechanism"] == "ksame"]
    assert sorted((r["site"], r["verdict"], r["claim_level"], r["k"]) for r in sets) == [
        (site, "admitted", "B", 5) for site in SITES
    ]
    assert all(r["epsilon"] is None for r in sets)
    updates = [r for r in releases if r["mechanism"] == "federated" and r["verdict"] == "admitted"]
    assert sorted(r["site"] for r in updates) == sorted(["site-a", "site-b"] * ROUNDS)
    assert {r["claim_level"] for r in updates} == {"A"}
    (refused,) = [r for r in releases if r["verdict"] == "refused"]
    assert (refused["site"], refused["mechanism"], refused["findings"]) == ("site-c", "federated", ["budget"])


def test_the_books_balance_and_the_poor_site_spent_nothing(demo: Demo) -> None:
    accounts = {a["account"]: a for a in summary(demo)["ledger"]["accounts"]}
    for site in ("site-a", "site-b"):
        assert accounts[f"{site}/rdp"]["spent"] > 0
        assert accounts[f"{site}/rdp"]["held"] == 0
    assert accounts["site-c/rdp"]["spent"] == accounts["site-c/rdp"]["held"] == 0
    assert all(accounts[f"{site}/k"]["spent"] == 1 for site in SITES)


@pytest.mark.parametrize("name", ["ledger.export", *(f"ledger-{site}.export" for site in SITES)])
def test_every_ledger_verifies_and_a_changed_byte_does_not(demo: Demo, name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "policies.verify"]
    assert subprocess.run([*command, str(demo.out / name)], capture_output=True, check=False).returncode == 0
    raw = bytearray((demo.out / name).read_bytes())
    raw[len(raw) // 3] ^= 1
    (tmp_path / name).write_bytes(raw)
    assert subprocess.run([*command, str(tmp_path / name)], capture_output=True, check=False).returncode == 1


def test_the_report_is_one_file_without_a_network(demo: Demo) -> None:
    page = (demo.out / "report.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", page)
    assert "<script" not in page
    for word in ("site-a", "site-c", "budget", "data:image/png;base64,"):
        assert word in page


def test_no_released_image_is_a_patients_image(demo: Demo) -> None:
    split = digits.split(len(SITES), PATIENTS, 2)
    for folder in (demo.out / "releases").glob("release-*"):
        made, labels = unpack_images((folder / "images.tar").read_bytes())
        assert len(labels) == PATIENTS // 5
        real = {image.tobytes() for site in split.sites for image in digits.upsample(site.images)}
        assert not any(image.tobytes() in real for image in made)


def test_nobody_left_this_machine_or_tried_to(demo: Demo) -> None:
    """Telemetry, update checks and installs of every dependency are off, in every process of the demo."""
    assert demo.connections.read_text() == "started\n"


def test_an_attempt_to_leave_would_have_been_seen(demo: Demo, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    environment = {**os.environ, "PYTHONPATH": str(NONET), "LAZARET_TEST_CONNECTIONS": str(notes)}
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False).returncode
    assert "192.0.2.1" in notes.read_text()


def test_only_admitted_artifacts_are_on_the_shelf(demo: Demo) -> None:
    admitted = {r["id"] for r in summary(demo)["releases"] if r["verdict"] == "admitted"}
    shelf = {path.name for path in (demo.out / "releases").iterdir()}
    assert {name for name in shelf if name.startswith("release-")} == {
        a for a in admitted if a.startswith("release-")
    }


# ---------------------------------------------------------------- the leak scan


def identities(demo: Demo) -> set[bytes]:
    """Every name, number, date, UID, address of any file that the hospitals hold."""
    found: set[str] = set()
    for path in (demo.work / "pacs").rglob("*"):
        if path.is_file():
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found |= set(_strings(pydicom.dcmread(path, force=True)))
    for site in SITES:
        listed = demo.work / "pacs" / site / "nifti.csv"
        if listed.exists():
            found |= {line.split(",")[1] for line in listed.read_text().splitlines()[1:]}
    # six characters or more, and not of the "000000000" kind, which any archive holds
    # nor "operator", which is what one scanner file calls its operator, and what we call ours
    telling = {value for value in found if len(value) >= 6 and len(set(value)) > 2} - {"operator"}
    return {value.encode() for value in telling if not value.startswith("1.2.840.10008.")}


def _strings(dataset: pydicom.Dataset) -> Iterator[str]:
    for element in dataset.iterall():
        if element.VR in ("PN", "UI", "DA", "LO", "SH", "ST", "LT", "UT") and element.value:
            values = [element.value] if isinstance(element.value, str) or element.VM == 1 else list(element.value)
            for value in values:
                text = str(value)
                # a date alone is eight digits, which turn up in any long number by chance
                if element.VR in ("PN", "UI") or element.keyword in _IDENTIFYING:
                    yield from (part for part in re.split(r"[\^=\\]", text) if element.VR == "PN" or part == text)


_IDENTIFYING = {
    "PatientID", "AccessionNumber", "PatientAddress", "InstitutionName", "InstitutionAddress", "OtherPatientIDs",
    "StudyDescription", "PatientComments", "ReferringPhysicianAddress", "StudyID", "DeviceSerialNumber",
    "StationName",
}  # fmt: skip


def readable(raw: bytes) -> Iterator[bytes]:
    """The bytes themselves, and whatever is packed in them: base64, PNG, hexadecimal."""
    yield raw
    for found in re.finditer(rb"[A-Za-z0-9+/]{40,}={0,2}", raw):
        with contextlib.suppress(binascii.Error):
            inner = base64.b64decode(found.group() + b"=" * (-len(found.group()) % 4))
            yield inner
            for again in re.finditer(rb"[A-Za-z0-9+/]{40,}={0,2}", inner):
                with contextlib.suppress(binascii.Error):
                    yield base64.b64decode(again.group() + b"=" * (-len(again.group()) % 4))
    for at in (m.start() for m in re.finditer(rb"IDAT", raw)):
        with contextlib.suppress(zlib.error):
            yield zlib.decompressobj().decompress(raw[at + 4 :])


def leaks(raw: bytes, wanted: re.Pattern[bytes]) -> set[bytes]:
    return {hit for piece in readable(raw) for hit in wanted.findall(piece)}


def pattern(demo: Demo) -> re.Pattern[bytes]:
    longest_first = sorted(identities(demo), key=len, reverse=True)
    assert len(longest_first) > 1000, "the scan must have something to look for"
    return re.compile(b"|".join(re.escape(value) for value in longest_first))


def test_the_scan_sees_what_it_looks_for(demo: Demo) -> None:
    """A control: the same scan over the hospitals' own folders, and over a packed copy, must be red."""
    wanted = pattern(demo)
    some = next((demo.work / "pacs" / "site-a").rglob("*.dcm")).read_bytes()
    assert leaks(some, wanted)
    assert leaks(b'{"x": "' + base64.b64encode(some) + b'"}', wanted)


def test_no_identity_of_a_patient_is_anywhere_outside_the_hospitals_folders(demo: Demo) -> None:
    """All of demo-out, all logs, everything the coordinator holds (Flower's database too), and the sites' own stores.

    The quarantine list is left out on purpose: it names the hospital's files for the hospital's own IT.
    """
    wanted, scanned = pattern(demo), 0
    places = [demo.out, demo.work / "coordinator", *(demo.work / site for site in SITES), *demo.work.glob("*.out")]
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.is_file() and "quarantine" not in path.parts:
                scanned += 1
                assert not leaks(path.read_bytes(), wanted), f"{path.relative_to(demo.work.parent)} holds an identity"
    assert not leaks(demo.said.encode(), wanted)
    assert scanned > 60


def test_no_pixel_of_a_patient_lies_unencrypted_in_a_site(demo: Demo) -> None:
    split = digits.split(len(SITES), PATIENTS, 2)
    rows = [image.astype(np.uint8)[10:14].tobytes() for image in digits.upsample(split.sites[0].images)]
    rows += [(image / 255).astype("<f4")[10:14].tobytes() for image in digits.upsample(split.sites[0].images)]
    for name in ("vault.db", "vault.db-wal"):
        path = demo.work / "site-a" / name
        raw = path.read_bytes() if path.exists() else b""
        assert not any(row in raw for row in rows if len(set(row)) > 3)
