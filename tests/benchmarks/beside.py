"""Images that come in beside a training, and the training beside them: each by itself, then both, in one run.

A real ``lazaret-agent serve`` receives. Four senders (pynetdicom, a process each, one association each) send 500 CT
slices of 512 x 512 pixels of 16 bits each, random; the time of each C-STORE from request to answer is the sender's.
The training is a job of that service: ``release privimage`` with the preset ``small32``, in its steps of
patient-level DP-SGD. Its pace is that of its own progress, which a confined process tells in twentieths of its
500 steps: five such lines without the senders, and five while they send, again and again. All shares one machine.

``ingest_p95_beside_training``: the 95th percentile with the training over that without it.
``training_steps_beside_ingest``: steps a second with the senders over those without them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pydicom
from pydicom.data import get_testdata_file
from pydicom.uid import generate_uid
from pynetdicom import AE
from pynetdicom.sop_class import CTImageStorage

from agent.models.features.extractors import RandomFeatures
from agent.models.semantics.training import cluster_semantics
from agent.service import jobs
from agent.service.jobs import JobStore
from agent.storage import projects
from tests.benchmarks.report import Report, Row
from tests.support.federation_world import Federation, Site
from tests.support.mechanism_documents import sha, toml
from tests.support.picture_folders import write_pictures
from tests.support.release_site import vouch_for
from tests.support.small_privimage import digest_of
from tests.support.vault_records import record

SENDERS, EACH, SIZE = 4, 500, 512
SIDE, PATIENTS = 32, 400
STEPS: Final = 500
LINES: Final = 5  # of progress, from which a pace is told: 100 steps lie between the first and the last
_PATIENCE_S: Final = 300.0


def main() -> Report:
    """Some six minutes on two processors."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        folder = Path(name)
        with Federation(folder) as federation:
            site = federation.join("site-a")
            port = _prepared(site, folder)
            with _serving(site, folder):
                _sent(port, 0, 10)  # what is loaded at the first image
                alone = _sent(port, 1, EACH)
                _read(site)
                store = _queued(site, folder)
                pace = _pace(store, lambda: time.sleep(1.0))
                beside: list[float] = []
                slower = _pace(store, lambda: beside.extend(_sent(port, 2 + len(beside) // EACH, EACH)))
    quiet, busy = (float(np.percentile(times, 95)) for times in (alone, beside))
    rows = [
        Row("95th percentile of a C-STORE, by itself", 1e3 * quiet, "ms"),
        Row("the same beside the training", 1e3 * busy, "ms"),
        Row("steps of the training, by itself", pace, "1/s"),
        Row("the same beside the senders", slower, "1/s"),
    ]
    ratios = {"ingest_p95_beside_training": busy / quiet, "training_steps_beside_ingest": slower / pace}
    return Report(tuple(rows), ratios)


def _prepared(site: Site, folder: Path) -> int:
    """Patients, a configuration that trains for longer than this takes, and a listener; its port."""
    pictures = (
        np.random.default_rng(3).integers(0, 90, (120, SIDE, SIDE)) + np.repeat([0, 80, 160], 40)[:, None, None]
    )
    public = pictures.astype(np.uint8)
    raw = cluster_semantics(RandomFeatures(1, 8, 2), public, 3).file
    (folder / "semantics.safetensors").write_bytes(raw)
    write_pictures(folder, {f"{n:03d}.png": pixels for n, pixels in enumerate(public)})
    told = {
        "mechanism": "privimage",
        "classes": ["dark", "bright"],
        "cohort": {"modality": "OT"},
        "privacy": {
            "noise_multiplier": 20.0,
            "steps": STEPS,
            "sampling_rate": 0.05,
            "public_patients": PATIENTS,
            "clip": 0.01,
        },
        "semantics": {"file": "semantics.safetensors", "keep": 1, "noise": 8.0},
        "public": {"pictures": "pictures"},
        "model": {"preset": "small32", "pretraining_steps": 1, "draws": 1, "pretrain_batch": 8, "sampling_steps": 2},
        "synthetic": {"pictures": 20},
    }
    (folder / "privimage.toml").write_text(toml(told))
    vouch_for(site, sha(raw), digest_of(folder / "pictures", SIDE))
    with closing(projects.open_vault(site.home)) as vault:
        dice = np.random.default_rng(1)
        shots = [record(n, n, ("dark", "bright")[n % 2]) for n in range(PATIENTS)]
        vault.keep_all([replace(shot, pixels=dice.random((SIDE, SIDE), np.float32)) for shot in shots])
    port = 11_000 + os.getpid() % 10_000
    callers = 'callers = [{ ae_title = "PACS", addresses = ["127.0.0.1"] }]'
    (site.home.root / "ingest.toml").write_text(
        f'[listener]\nae_title = "LAZARET"\nplain_tcp = true\nport = {port}\nfull_at = 1.0\n{callers}\n'
    )
    return port


@contextmanager
def _serving(site: Site, folder: Path) -> Any:
    words = [sys.executable, "-m", "agent", "--home", str(site.home.root), "serve"]
    with (folder / "serve.log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as service:
        try:
            until = time.monotonic() + _PATIENCE_S
            while b"receiving only" not in (folder / "serve.log").read_bytes():
                assert service.poll() is None, (folder / "serve.log").read_text()
                assert time.monotonic() < until
                time.sleep(0.1)
            yield
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait()


def _sent(port: int, turn: int, count: int) -> list[float]:
    """Seconds of every C-STORE, of all senders."""
    words = [sys.executable, "-m", "tests.benchmarks.beside", str(port)]
    senders = [
        subprocess.Popen([*words, f"{turn}/{number}", str(count)], stdout=subprocess.PIPE)
        for number in range(SENDERS)
    ]
    return [seconds for sender in senders for seconds in json.loads(sender.communicate()[0])]


def _read(site: Site) -> None:
    """Wait until all that came is in the vault or rejected."""
    inbox, _ = projects.project_folders(site.home, "main")
    while any(not name.startswith(".") for name in os.listdir(inbox)):
        time.sleep(0.5)


def _queued(site: Site, folder: Path) -> JobStore:
    """The training, when it makes its steps under differential privacy."""
    words = [sys.executable, "-m", "agent", "--home", str(site.home.root), "release", "privimage", "--config"]
    queued = subprocess.run([*words, str(folder / "privimage.toml"), "--detach"], capture_output=True, check=False)
    assert queued.returncode == 0, queued.stdout + queued.stderr
    store, until = JobStore(site.home.root), time.monotonic() + _PATIENCE_S
    while "fine-tuning" not in jobs.progress_of(store.folder(1)).detail:
        assert store.read(1).state in (jobs.QUEUED, jobs.RUNNING), jobs.last_words(store.folder(1))
        assert time.monotonic() < until
        time.sleep(0.5)
    return store


def _pace(store: JobStore, meanwhile: Callable[[], None]) -> float:
    """Steps a second while something is done again and again, from the first to the last line told in that time."""
    began = time.time()
    within: list[tuple[float, int]] = []
    while len(within) < LINES:
        meanwhile()
        ended = time.time()  # all that was done until then was done beside the training
        assert store.read(1).state == jobs.RUNNING, jobs.last_words(store.folder(1))
        lines = [json.loads(line) for line in (store.folder(1) / "said.jsonl").read_text().splitlines()]
        within = [(line["at"], jobs.counted(line)[1]) for line in lines if began <= line["at"] <= ended]
    (first, low), (last, high) = within[0], within[-1]
    return (high - low) / (last - first)


def sender(words: Sequence[str]) -> None:
    """One association; the seconds of each C-STORE, as JSON."""
    port, name, count = int(words[0]), words[1], int(words[2])
    dataset = pydicom.dcmread(get_testdata_file("CT_small.dcm"))
    dataset.Rows = dataset.Columns = SIZE
    dice, times = np.random.default_rng(abs(hash(name)) % 2**32), []
    entity = AE(ae_title="PACS")
    entity.add_requested_context(CTImageStorage, dataset.file_meta.TransferSyntaxUID)
    association = entity.associate("127.0.0.1", port, ae_title="LAZARET")
    assert association.is_established
    # pynetdicom's reactor may pass its pause just before a request, takes the answer for a request, and drops it
    reactor = association._reactor_checkpoint
    reactor.clear()
    reactor.set = lambda: None  # type: ignore[method-assign]
    time.sleep(0.5)
    for one in range(count):
        dataset.PixelData = dice.integers(0, 4096, (SIZE, SIZE), dtype=np.uint16).tobytes()
        uid = generate_uid(entropy_srcs=[f"{name}/{one}/{os.getpid()}"])
        dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = uid
        began = time.perf_counter()
        answer = association.send_c_store(dataset)
        times.append(time.perf_counter() - began)
        assert answer.get("Status") == 0, (one, answer, association.is_aborted, times[-1])
    del reactor.set
    association.release()
    sys.stdout.write(json.dumps(times))


if __name__ == "__main__":
    sender(sys.argv[1:])
