"""From nothing to the first image in a hospital's vault: what is typed on either side, and what is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydicom.data import get_testdata_file

from agent.storage.read_only_access import records
from agent.storage.site_directory import SiteDirectory
from tests.support.ports import free_port
from tests.support.steady_sender import send
from tests.support.terminal import Terminal, lines_of


@dataclass(frozen=True, slots=True)
class FirstImage:
    """Both sides, while they still serve."""

    coordinator: Terminal  # the operator's, and the two approvers' beside it
    hospital: Terminal

    def patients(self) -> int:
        """How many are in the hospital's vault."""
        return records(SiteDirectory(self.hospital.folder / "site")).most


@contextmanager
def first_image(folder: Path) -> Iterator[FirstImage]:
    """Real processes on both sides, and an image by C-STORE. The telephone is this function."""
    coordinator, hospital = (Terminal(folder / name) for name in ("coordinator", "hospital"))
    for side in (coordinator, hospital):
        side.folder.mkdir(parents=True)
    (coordinator.folder / "persons").mkdir(mode=0o700)
    both = FirstImage(coordinator, hospital)
    try:
        _typed(both, free_port())
        yield both
    finally:
        coordinator.stop()
        hospital.stop()


def _typed(both: FirstImage, dicom: int) -> None:
    """Every line of both sides, in the order of time."""
    hub, site = "lazaret-coordinator --home hub", "lazaret-agent --home site"
    coordinator, hospital = both.coordinator, both.hospital
    # each approver, on a machine of their own
    officer = coordinator.type("lazaret-coordinator ledger person persons/officer.key").strip()
    physician = coordinator.type("lazaret-coordinator ledger person persons/physician.key").strip()
    # the operator
    told = coordinator.type(
        f"{hub} setup",
        ("reach this coordinator", f"localhost:{free_port()}"),
        ("policy of the federation", ""),
        ("reach the console", f"localhost:{free_port()}"),
        ("first person of compliance", f"officer-1 {officer}"),
        ("first person of hospital", f"physician-1 {physician}"),
        ("hospital to invite", "site-a"),
    )
    coordinator.leave(f"{hub} serve", "serving")
    # hospital IT: the file came by mail, both others by telephone
    hospital.type(
        f"{site} setup --listen 127.0.0.1:{dicom}",
        ("file of the invitation", str(coordinator.folder / "site-a.invitation")),
        ("root's fingerprint", lines_of(told, "federation's root: ")),
        ("token", lines_of(told, "within 30 minutes: ")),
        ("what may come in", "ct"),
        ("policy", ""),
        ("PACS that sends images", "HOSPITALPACS@127.0.0.1"),
        ("AE title", ""),
        ("TLS from the PACS", "plain"),
        ("reach the console", f"localhost:{free_port()}"),
        status=1,  # it waits
    )
    heard = lines_of(hospital.said, "fingerprint of this site's request: ")
    # the approvers, each with a key of their own
    for name in ("officer", "physician"):
        sign = f"{hub} ledger sign 1 --person {name}-1 --key persons/{name}.key"
        coordinator.type(sign, ("request's fingerprint", heard), ("sign exactly this?", "y"))
    # hospital IT
    hospital.type(f"{site} setup")
    hospital.leave(f"{site} serve", "receiving only")
    send(Path(str(get_testdata_file("CT_small.dcm"))), dicom, caller="HOSPITALPACS")  # the PACS
    until = time.monotonic() + 120
    while not both.patients():
        assert time.monotonic() < until, "the image came into no vault"
        time.sleep(0.2)
