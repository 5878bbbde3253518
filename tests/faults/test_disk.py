"""The coordinator's disk fills in the middle of a round or of an upload: refused with a reason, or exit 70; then on.

The coordinator's home is a tmpfs which is made as small as what lies on it, and later larger again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.ledger.entries import Admitted
from tests.faults.audit import Auditor
from tests.faults.kills import after
from tests.faults.stage import (
    COORDINATOR,
    Stage,
    environment,
    eventually,
    resized,
    small_disk,
)
from tests.support.tcp_proxy import TcpProxy, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOMY_KIB = 1_500 * 1024  # of which next to nothing is used: uploads leave the last GiB alone


@pytest.fixture(scope="module")
def stage(enrolled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("disk") / "stage"
    with small_disk(folder / COORDINATOR, ROOMY_KIB), Stage.copied(enrolled, folder) as made:
        made.start_all()
        yield made


@pytest.fixture(scope="module")
def auditor() -> Auditor:
    return Auditor()


def fill(stage: Stage, left_kib: int) -> None:
    """So much room is left from now on."""
    home = stage.work / COORDINATOR
    disk = os.statvfs(home)
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize // 1024
    resized(home, used + left_kib)


def make_room(stage: Stage) -> None:
    """As large as before; a service manager starts the coordinator again if it ended."""
    resized(stage.work / COORDINATOR, ROOMY_KIB)
    stage.revive()


@pytest.mark.parametrize("left_kib", [0, 12, 40, 100, 250])
@pytest.mark.parametrize("when", ["granted", "sent"])
def test_a_run_on_a_disk_that_fills_ends_with_a_reason_or_goes_on(
    stage: Stage, auditor: Auditor, left_kib: int, when: str
) -> None:
    """With different room left, it is the ledger, the checkpoint, the moments or Flower's own file that fails."""
    run = f"full-{when}-{left_kib}"
    launched = stage.launch(run)
    eventually(lambda: any(e["state"] == when for e in launched.events()), "it did not begin", 120)
    fill(stage, left_kib)
    wait_until(lambda: stage.running[COORDINATOR].poll() is not None or launched.process.poll() is not None, 25)
    make_room(stage)
    end = stage.carried_out(run)
    launched.process.wait(60)
    assert end["state"] == "finished" or end["reason"]
    assert not list(after(stage, auditor, run, end["state"]))
    assert set(stage.ended) <= {(COORDINATOR, 70)}, stage.log(COORDINATOR).read_text()


def test_an_upload_on_a_disk_that_fills_is_taken_up_again(stage: Stage, auditor: Auditor) -> None:
    """The blocks were set aside, so it is the verdict that finds no room: exit 70; after a restart a yes, once."""
    with TcpProxy(f"127.0.0.1:{stage.port}") as line:
        stage.stop("site-a")
        stage.dial("site-a", line.address)
        line.bytes_per_s = 8_000.0
        words = ["release", "ksame", "--basis", str(stage.work / "basis.safetensors"), "--modality", "OT", "--k", "5"]
        command = [sys.executable, "-m", "agent", "--home", str(stage.work / "site-a"), *words, "--json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
        ) as release:
            uploads = stage.work / COORDINATOR / "uploads"
            assert wait_until(lambda: any(uploads.rglob("manifest")) or release.poll() is not None, 90)
            assert release.poll() is None, release.stdout.read() if release.stdout else ""
            fill(stage, 0)
            line.bytes_per_s = 0.0
            wait_until(lambda: stage.running[COORDINATOR].poll() is not None, 15)
            assert release.poll() is None, "nothing could be written, and yet there was a verdict"
            make_room(stage)
            said, _ = release.communicate(timeout=300)
        assert release.returncode == 0, said
        stage.dial("site-a", f"127.0.0.1:{stage.port}")
        ledger = auditor.look(stage)
        assert not list(ledger.faults("", "released", stage.work / COORDINATOR / "runs" / "none"))
        assert len([e for e in ledger.of(COORDINATOR, Admitted, "") if isinstance(e, Admitted)]) == 1
        assert set(stage.ended) <= {(COORDINATOR, 70)}
        stage.start("site-a")


def test_an_upload_that_would_take_the_ledgers_room_is_not_begun(stage: Stage, auditor: Auditor) -> None:
    """Less than the kept GiB is free: the site hears so, nothing is written, its grant waits or is spent."""
    resized(stage.work / COORDINATOR, 900 * 1024)
    try:
        stage.stop("site-b")
        words = ["release", "ksame", "--basis", str(stage.work / "basis.safetensors"), "--modality", "OT", "--k", "5"]
        command = [sys.executable, "-m", "agent", "--home", str(stage.work / "site-b"), *words, "--json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
        ) as release:
            time.sleep(15)
            assert release.poll() is None, "it tries again for a while"
            assert not list((stage.work / COORDINATOR / "uploads").rglob("manifest"))
            resized(stage.work / COORDINATOR, ROOMY_KIB)
            said, _ = release.communicate(timeout=300)
        assert release.returncode == 0, said
        assert not list(auditor.look(stage).faults("", "released", stage.work / COORDINATOR / "runs" / "none"))
    finally:
        resized(stage.work / COORDINATOR, ROOMY_KIB)
        if "site-b" not in stage.running:
            stage.start("site-b")
