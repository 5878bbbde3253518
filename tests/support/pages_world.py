"""What the pages of deploy/docs presuppose: hospitals and a coordinator that serve, and the files that are named."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from pydicom import dcmread

from agent.domain import Volume
from deploy import verifier
from deploy.demo import chests, heads, letters
from deploy.demo.jobs import job_file
from deploy.demo.kept_networks import lay
from deploy.demo.processes import environment
from deploy.demo.scale import Scale
from deploy.demo.scene import SITES
from deploy.demo.train_networks import RECIPES
from deploy.phantoms.head_files import nifti
from tests.support.command_server import python
from tests.support.mechanism_documents import (
    CENTROIDS,
    KSALSA,
    centroids_codebook,
    changed,
    lay_networks,
    toml,
)
from tests.support.pacs import make_instances, orthanc
from tests.support.process_world import ProcessWorld, ledger

MODULES: Final = {
    "lazaret-agent": "agent",
    "lazaret-coordinator": "coordinator",
    "lazaret-verify": "policies.audit.verify",
}
SHOWN: Final = ("ksame", "ksalsa", "privimage", "centroids", "federated")  # by the policies
PATIENTS: Final = 90  # of each hospital: a third of them is held out
_CHEST_TRIAGE: Final = re.compile(r'```toml\n(\[task\]\nname = "chest-triage".*?)```', re.DOTALL)
AT_HOME: Final = {"lazaret-agent": "site-a", "lazaret-coordinator": "coordinator"}  # an installed command knows it


@dataclass(slots=True, eq=False)
class PagesWorld(ProcessWorld):
    """A reader who types a page line by line, in the folder in which all homes lie."""

    said: str = ""  # by the last line
    filled: dict[str, str] = field(default_factory=dict)  # words that a page leaves open
    seen: list[str] = field(default_factory=list)  # each line that was typed
    opened: ExitStack = field(default_factory=ExitStack)  # what else runs

    def type(self, line: str, status: int = 0) -> str:
        """Type one line in a shell; what it prints.

        Args:
            line: of a page.
            status: with which it must end.
        """
        self.seen.append(line)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.work,
            env={**environment(), "PATH": f"{self.work / 'bin'}:{os.environ['PATH']}", "COLUMNS": "200"},
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        self.said = done.stdout
        assert done.returncode == status, f"{line}\nexit {done.returncode}\n{self.said[-4000:]}"
        return self.said

    def commands(self) -> None:
        """The installed commands: each knows its home, if none is typed."""
        folder = self.work / "bin"
        folder.mkdir()
        for name, module in MODULES.items():
            known = f'--home "{self.work / AT_HOME[name]}"' if name in AT_HOME else ""
            home = f'[ "$1" = --home ] || set -- {known} "$@"' if known else ""
            (folder / name).write_text(f'#!/bin/sh\n{home}\nexec "{python()}" -m {module} "$@"\n')
            (folder / name).chmod(0o755)
        (folder / "python3").symlink_to(sys.executable)
        (self.work / "backup").mkdir()

    def files(self) -> None:
        """What the pages name: public pictures, networks, configurations, lists, a job, a scan."""
        (self.work).chmod(0o700)
        self._public()
        vouched = [*lay_networks(self.work, channels=1), *self._private()]
        (self.work / "codebook.safetensors").write_bytes(centroids_codebook())
        vouched.append(hashlib.sha256(centroids_codebook()).hexdigest())
        own = {"cohort": {"modality": "OT"}, "clusters": {"k": 11, "l_diversity": 2}}
        (self.work / "ksalsa.toml").write_text(toml(changed(KSALSA, **own)))
        digests = lay([RECIPES[name] for name in ("autoencoder", "verifier", "unseen", "aligner")], self.work)
        (self.work / "networks").mkdir()
        text = chests.configure("distill", self.work, digests).read_text()
        (self.work / "distill.toml").write_text(f'{text}release = "model"\n')  # the last table is [output]
        (self.work / "centroids.toml").write_text(
            CENTROIDS.replace('"OP"', '"OT"')
            .replace("count_noise = 7", "count_noise = 2")
            .replace('"0", "1", "2"', '"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"')
        )
        self.vouched += vouched
        (self.work / "job.json").write_text(json.dumps(self.job()))

    def _clinics(self, say: Any) -> Iterator[str]:
        """No clinic has patients of its own: the pages' releases are of digits."""
        yield from ()

    def _public(self) -> None:
        """Pictures that show nobody, with who and what is on each."""
        (self.work / "public").mkdir()
        dice, rows = np.random.default_rng(3), []
        for number in range(60):
            name = f"{number}.png"
            Image.fromarray(dice.integers(0, 256, (64, 64), np.uint8)).save(self.work / "public" / name)
            rows.append((name, f"person-{number // 2}", f"kind-{number % 3}"))
        for file, column in (("who.csv", 1), ("labels.csv", 2)):
            with (self.work / file).open("w", newline="") as stream:
                header = ("file", "identity" if column == 1 else "label")
                csv.writer(stream).writerows([header, *((row[0], row[column]) for row in rows)])

    def _private(self) -> list[str]:
        """PrivImage's query function, public letters and configuration; the digests to vouch for."""
        letters.write_public(self.work / "letters")
        digests = lay([RECIPES["semantics"]], self.work)
        text = letters.CONFIG.format(multiplier=20.0, steps=3, rate=0.25, patients=PATIENTS, noise=1.2, pretraining=3)
        split = 'modality = "OT"\nsplit = "pages"\nparts = ["release:2", "held-out:1"]\npart = "release"\n'
        text = text.replace('modality = "OT"\n', split).replace("../letters", "letters")
        (self.work / "privimage.toml").write_text(text)
        return [*digests.values(), letters.images_sha256(self.work / "letters")]

    def job(self) -> dict[str, Any]:
        """Of a short run."""
        return job_file(self.mechanism, 2) | {
            "config": json.loads(replace(self.mechanism, noise_multiplier=4.0).to_json())
        }

    def join(self) -> None:
        """A fourth hospital has asked: what the approvers of enrolment.md were told."""
        shutil.copy(self.key("dpo-1"), self.work / "dpo.key")  # the officer's own
        made = self.work / "site-d.invitation", self.work / "site-d.token"
        said = self.type(f"lazaret-coordinator invite site-d --out {made[0]} --token-file {made[1]}")
        root = said.partition("root: ")[2].partition("\n")[0]
        text = (self.work / "coordinator" / "coordinator.toml").read_text()
        own, listen = self.work / "site-a.toml", re.findall(r'^listen = "(.*)"', text, re.MULTILINE)[0]
        words = f"--site site-d --policy {own} --modality OT --input ../pacs/site-d --coordinator {listen}"
        self.type(f"lazaret-agent --home site-d init {words}")
        words = f'enrol {made[0]} --fingerprint "{root}" --token-file {made[1]}'
        self.type(f"lazaret-agent --home site-d {words}", status=1)
        asked = json.loads(self.type("lazaret-coordinator enrolments --json"))
        (waits,) = [one for one in asked if one["site"] == "site-d"]
        self.filled["DIGEST"] = waits["digest"]

    def other_signs(self) -> None:
        """The second approver, as the first one did."""
        line = self.seen[-1].replace("dpo-1", "physician-1").replace("dpo.json", "physician.json")
        self.type(line.replace("dpo.key", str(self.key("physician-1"))))

    def joined(self) -> None:
        """Hospital IT goes on, and the operator sees the number of its certificate."""
        self.type("lazaret-agent --home site-d enrol --wait 60")
        issued = [e for e in ledger(self)["entries"] if e["type"] == "issued" and e["site"] == "site-d"]
        self.filled["NUMBER"] = str(issued[-1]["number"])

    def hand_over(self) -> None:
        """The person gives the operator the certificate."""
        shutil.copy(self.work / "dpo-1" / "dpo-1.crt", self.work)

    def archives(self) -> None:
        """A PACS with images of this year, which speaks DIMSE and DICOMweb; and whose images are wanted."""
        for path in make_instances(self.work / "archived", 6, patients=2):
            dataset = dcmread(path)
            dataset.StudyDate = "20260301"
            dataset.save_as(path)
        found = self.opened.enter_context(orthanc(self.work / "orthanc", aet="HOSPITALPACS"))
        found.store(sorted((self.work / "archived").iterdir()))
        (self.work / "site-a" / "archive.password").write_text(found.password)
        (self.work / "site-a" / "archive.password").chmod(0o600)
        (self.work / "site-a" / "ingest.toml").write_text(
            f'[pacs.main]\naet = "HOSPITALPACS"\nhost = "127.0.0.1"\nport = {found.dicom_port}\n'
            f'calling = "LAZARET"\nmode = "get"\n[dicomweb.archive]\nurl = "{found.dicomweb_url}"\n'
            f'user = "{found.user}"\npassword_file = "archive.password"\n'
        )
        (self.work / "patients.txt").write_text("PAT-0\n")

    def one_refused(self) -> None:
        """The name of a file that is in quarantine."""
        listed = self.type("lazaret-agent quarantine list --files")
        self.filled["NAME"] = re.findall(r"^([0-9a-f]{32})  too_deep", listed, re.MULTILINE)[0]

    def one_patient(self) -> None:
        """Whose opt-out is typed: one of the archive's."""
        (self.work / "patients.txt").write_text("PAT-1\n")

    def learned(self, network: str, file: str) -> None:
        """A network that is on the way of its page learned earlier."""
        target = self.work / "nets" / network / f"{network}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.work / file, target)

    def scans(self) -> None:
        """A head, its brain, a study of another, and the network."""
        head, other = heads.phantoms().scan(1, 0, 3.0), heads.phantoms().scan(2, 0, 3.0)
        nifti(self.work / "head.nii.gz", head.volume, dtype="int16")
        nifti(self.work / "brain.nii.gz", Volume(head.brain.astype(np.uint8), head.volume.affine), dtype="uint8")
        (self.work / "study").mkdir()
        nifti(self.work / "study" / "t1.nii.gz", other.volume, dtype="int16")
        lay([RECIPES["remodeller"]], self.work)

    def other_method(self) -> None:
        """The page shows another method of the same scan."""
        (self.work / "bare.nii.gz").unlink()

    def run_begins(self) -> None:
        """A second run, whose command goes on elsewhere while the next lines are typed."""
        self.type("lazaret-coordinator round launch job.json --run digits-2 > launched.txt 2>&1 &")
        self.filled["NAME"] = "digits-2"
        self.type("timeout 60 sh -c 'until grep -q granted launched.txt; do sleep 0.2; done'")

    def task_file(self) -> None:
        """The task file of rounds.md, as it is printed there."""
        page = (Path(__file__).parents[2] / "deploy" / "docs" / "rounds.md").read_text()
        (self.work / "chest-triage.toml").write_text(_CHEST_TRIAGE.findall(page)[0])

    def architecture(self) -> None:
        """A network of a configuration of distill.md."""
        self.type("lazaret-agent release distill --config distill.toml --blank blank.safetensors")

    def exported(self) -> None:
        """Steps 1 to 3 of verify.md: the export, the verifier, and the key's fingerprint by another way."""
        self.filled["FINGERPRINT"] = self.type("lazaret-agent ledger fingerprint --coordinator").strip()
        self.type("lazaret-coordinator ledger export ledger.export")
        assert verifier.main([str(self.work / "lazaret-verify.pyz")]) == 0

    def a_release(self) -> None:
        """The name of an admitted release, and its images as its recipient has them."""
        admitted = [e for e in ledger(self)["entries"] if e["type"] == "admitted"]
        name = next(e["release"] for e in admitted if e["release"].startswith("release-"))
        shutil.copy(self.work / "coordinator" / "releases" / name / "images.tar", self.work)
        self.filled["NAME"] = name


@contextmanager
def pages_world(folder: Path) -> Iterator[PagesWorld]:
    """Three hospitals with their cohorts in the vault, and a coordinator; all four serve."""
    (folder / "out").mkdir(parents=True)
    (folder / "work").mkdir()
    quiet = lambda _text: None  # noqa: E731 - nobody watches
    scale = Scale(PATIENTS, 2, SHOWN, spare=dict.fromkeys(SITES, 4))
    with PagesWorld(folder / "out", folder / "work", scale) as world, world.opened:
        world.files()
        world.commands()
        for step in (world.folders, world.found, world.enrol, world.ingest):
            step(quiet)
        for site in SITES:
            world.start(site, world.agent(site, "serve", "--modality", "OT"), "link: online")
        yield world
