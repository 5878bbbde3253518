"""The demo's story: what is prepared, which commands are typed, what is measured."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from agent.mechanisms.federated import Federated
from agent.nouns import Cohort, Image, Patient
from agent.phantoms import digits, scanners
from deploy.demo import chests, eyes, letters, pacs
from deploy.demo.folder import public_basis
from deploy.demo.twin import non_private_twin
from policies.accounting import epsilon, tight_epsilon
from policies.claims import Gaussian, KAnonymous, NoClaim
from policies.figures import epsilon_text, never_less
from policies.policy import preset
from policies.statement import claim_from, claim_json
from protos.artifact import unpack_vector

SITES = ("site-a", "site-b", "site-c")
POOR = "site-c"  # its own policy has a smaller budget
RUN = "digits-1"
PERSONS = {"dpo-1": "compliance", "physician-1": "hospital"}  # who approve at the coordinator, and as what
K, L = 5, 2
PUBLIC_PATIENTS = 250  # a public bound on the patients of a site; delta is a thousandth of 1 / bound
Say = Callable[[str], None]
T = TypeVar("T")


class DemoFailed(RuntimeError):
    """A command did not do what the story needs; the text ends with the command's own words."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the demo is."""

    patients: int  # at each hospital, two images each
    rounds: int
    training: int = 0  # steps of each network of the eye clinic; 0: there is no eye clinic
    eyes: int = 60  # its patients: among many more, a division by chance may leave AnonFACES no picture to show
    networks: Path | None = None  # of an earlier demo's clinics, instead of training them again


def federated_job(public: digits.Digits, rounds: int) -> Federated:
    """The federated mechanism's public configuration; the centre comes from public digits alone."""
    centre = public.images.reshape(len(public.images), -1).mean(axis=0)
    return Federated(
        sampling_rate=0.25,
        noise_multiplier=1.8,
        steps_per_round=15,
        rounds=rounds,
        clip=0.1,
        images_per_patient=2,
        public_patients=PUBLIC_PATIENTS,
        learning_rate=40.0,
        classes=tuple(str(c) for c in range(10)),
        shape=(32, 32),
        centre=tuple(round(float(c), 4) for c in centre),
        proximal=0.0,
    )


def placed(known: Path, names: Sequence[str], work: Path) -> dict[str, str]:
    """Lay networks of an earlier demo beside the configurations; the SHA-256 of each, by name."""
    (work / "networks").mkdir(exist_ok=True)
    digests = {}
    for name in names:
        raw = (known / f"{name}.safetensors").read_bytes()
        (work / "networks" / f"{name}.safetensors").write_bytes(raw)
        digests[name] = hashlib.sha256(raw).hexdigest()
    return digests


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two reports of the same site's way in as one."""
    codes = dict(one["quarantined"])
    for code, count in other["quarantined"].items():
        codes[code] = codes.get(code, 0) + count
    return {**{k: one[k] + other[k] for k in ("files", "kept", "duplicates")}, "quarantined": codes}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True, eq=False)
class Scene:
    """The stage: directories, running processes, and what was measured."""

    out: Path
    work: Path
    scale: Scale
    steps: list[dict[str, Any]] = field(default_factory=list)
    ingested: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    vouched: list[str] = field(default_factory=list)  # SHA-256 of the networks that the clinics vouch for
    chests: dict[str, str] = field(default_factory=dict)  # SHA-256 of the chest clinic's networks, by name
    pacs: pacs.Orthanc | None = None  # of the first hospital, where one is installed
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    split: digits.Split = field(init=False)
    mechanism: Federated = field(init=False)

    def __post_init__(self) -> None:
        """Deal the digits out and fix the public configuration."""
        self.split = digits.split(len(SITES), self.scale.patients, 2)
        self.mechanism = federated_job(self.split.public, self.scale.rounds)

    def __enter__(self) -> Self:
        """Nothing runs yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop whatever still runs."""
        self.stop()

    def story(self) -> Iterator[tuple[str, Callable[[Say], str]]]:
        """The steps, in order: a title and what to do."""
        yield "three hospitals' folders: real handwriting as DICOM, real scanner files, broken files", self.folders
        if self.scale.training:
            yield "networks learn from public pictures: of eyes, printed letters and chests", self.networks
        yield "keys are born where they are used; two persons may approve; the ledger begins", self.found
        yield "the coordinator serves; sites join by token, fingerprint and two approvals", self.enrol
        yield "ingest: de-identify, pseudonymise, encrypt; quarantine the rest", self.ingest
        yield "k-anonymous synthetic sets: price, cluster, average, seal, verdict", self.synthetic
        if self.scale.training:
            yield "an eye clinic: k-SALSA and AnonFACES, from DICOM to a verdict", self.eyes
            yield "a set under differential privacy: PrivImage, from price to a verdict", self.private
            yield "a chest clinic: a student of what was vetted, from DICOM to a verdict", self.distill
        yield "federated rounds with patient-level DP-SGD", self.federate
        yield "accuracy on held-out digits, beside the non-private twin", self.evaluate
        yield "report, ledger export, offline verification", self.report

    def agent(self, site: str, *words: str) -> list[str]:
        """A ``lazaret-agent`` command line."""
        return [sys.executable, "-m", "agent", "--home", str(self.work / site), *words]

    def coordinator(self, *words: str) -> list[str]:
        """A ``lazaret-coordinator`` command line."""
        return [sys.executable, "-m", "coordinator", "--home", str(self.work / "coordinator"), *words]

    def each(self, act: Callable[[str], T]) -> dict[str, T]:
        """The same for every site, side by side, as at three hospitals."""
        with ThreadPoolExecutor(len(SITES)) as pool:
            return dict(zip(SITES, pool.map(act, SITES), strict=True))

    def run(self, command: list[str], may_refuse: bool = False) -> str:
        """Run a command to its end and give what it printed.

        Raises:
            DemoFailed: another status than 0 (or 1 with an answer, where a refusal is part of the story).
        """
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
        told = may_refuse and done.returncode == 1 and done.stdout.strip()  # a verdict, not a fault
        if done.returncode != 0 and not told:
            raise DemoFailed(
                f"{' '.join(command[2:])}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.stdout

    def start(self, name: str, command: list[str], ready: str) -> None:
        """Start a process that stays, and wait until it says ``ready``.

        Raises:
            DemoFailed: it ended, or said nothing for three minutes.
        """
        log = self.work / f"{name}.out"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=_environment())
        self._running.append(process)
        until = time.monotonic() + 180
        while ready not in log.read_text():
            if process.poll() is not None or not time.monotonic() < until:
                raise DemoFailed(f"{name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End every running process, gently."""
        if self.pacs is not None:
            self.pacs.stop()
            self.pacs = None
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self._running.clear()

    def folders(self, say: Say) -> str:
        """Write each hospital's DICOM folder."""
        lines = []
        for i, site in enumerate(SITES):
            say(site)
            folder = self.work / "pacs" / site
            rng = np.random.default_rng(i)
            digits.write_hospital(folder, i, len(SITES), self.scale.patients, 2, rng)
            extra = len(scanners.add_scanner_files(folder))
            head = scanners.add_head(folder) if i == 0 else False
            files = sum(1 for path in folder.rglob("*") if path.is_file())
            lines.append(
                f"{site}: {files} files, {extra} of them scanner or broken files{', one head MRI' if head else ''}"
            )
            if i == 0 and pacs.installed():
                lines.append(f"{site}: {self._into_orthanc(folder, say)} of them are in its PACS, a real Orthanc")
        if self.scale.training:
            count = eyes.write_clinic(self.work / "pacs" / f"{eyes.SITE}-eyes", self.scale.eyes)
            lines.append(f"{eyes.SITE}: {count} photographs of eyes, DICOM in colour")
            count = chests.write_clinic(self.work / "pacs" / f"{chests.SITE}-chests")
            lines.append(f"{chests.SITE}: {count} radiographs of chests, two visits of each patient")
        return "\n".join(lines)

    def _into_orthanc(self, folder: Path, say: Say) -> int:
        """The first hospital's own pictures live in its PACS and no longer in the folder."""
        say("an Orthanc takes the first hospital's pictures")
        self.pacs = pacs.Orthanc.start(self.work / "orthanc")
        pictures = sorted(folder.glob("*/*/IM*.dcm"))
        count = self.pacs.load(pictures)
        for path in pictures:
            path.unlink()
        return count

    def networks(self, say: Say) -> str:
        """Train what the eye clinic's releases are made with, on pictures of other people."""
        known = self.scale.networks
        self.vouched = list(
            placed(known, eyes.NETWORKS, self.work).values()
            if known
            else eyes.train(self.work, self.scale.training, self.run, say)
        )
        steps = "an earlier demo's" if known else f"{self.scale.training} steps or so each"
        told = f"{len(self.vouched)} networks, {steps}, on phantoms of {eyes.PUBLIC} people"
        say("what printed letters look like")
        self.vouched += letters.train(self.work, self.agent, self.run)
        self.chests = (
            placed(known, tuple(chests.STEPS), self.work) if known else chests.train(self.work, self.run, say)
        )
        self.vouched += self.chests.values()
        judged = f"{len(self.chests)} networks for a distillation, on phantoms of {chests.PUBLIC} other people"
        return f"{told}\n{letters.CLUSTERS} clusters of printed letters, for the semantic query\n{judged}"

    def eyes(self, say: Say) -> str:
        """One k-anonymous set by each of the two papers; no patient is in both."""
        lines = []
        for mechanism in ("ksalsa", "anonfaces"):
            say(mechanism)
            config = str(eyes.configure(mechanism, self.work, K, L))
            words = ["release", mechanism, "--config", config, "--json"]
            answer = json.loads(self.run(self.agent(eyes.SITE, *words), may_refuse=True))
            rules = ", ".join(finding["rule"] for finding in answer["findings"])
            said = f"admitted, level {answer['level']}" if answer["admitted"] else f"refused: {rules}"
            lines.append(f"{mechanism}: {said}")
        return "\n".join(lines)

    def private(self, say: Say) -> str:
        """One set of all digits as one class: a histogram and DP-SGD under one price."""
        say("histogram, selection, pre-training, fine-tuning")
        config = letters.configure(self.work, max(PUBLIC_PATIENTS, self.scale.patients), self.scale.training)
        words = ["release", "privimage", "--config", str(config), "--json"]
        answer = json.loads(self.run(self.agent(letters.SITE, *words), may_refuse=True))
        rules = ", ".join(finding["rule"] for finding in answer["findings"])
        if not answer["admitted"]:
            return f"refused: {rules}"
        return (
            f"admitted, level {answer['level']}: epsilon {epsilon_text(answer['epsilon'])} at delta "
            f"{answer['delta']} in the ledger, per patient; "
            f"{epsilon_text(answer['epsilon_by_loss_distributions'])} by loss distributions"
        )

    def distill(self, say: Say) -> str:
        """One set of level C: no claim, but what an unseen verifier finds, and what the vetting would have found."""
        say("teacher, samples, vetting, student")
        config = chests.configure(self.work, self.chests, self.scale.training)
        sheet = self.work / f"{chests.SITE}-contact-sheet.html"
        words = ["release", "distill", "--config", str(config), "--sheet", str(sheet), "--json"]
        answer = json.loads(self.run(self.agent(chests.SITE, *words), may_refuse=True).splitlines()[-1])
        if not answer["admitted"]:
            return "refused: " + ", ".join(finding["rule"] for finding in answer["findings"])
        return f"admitted, level {answer['level']}; its reviewer has a contact sheet, which shows patients and stays"

    def found(self, say: Say) -> str:
        """Make the coordinator's and the sites' directories, and appoint the two who approve."""
        listen = f"127.0.0.1:{_free_port()}"
        basis = public_basis(self.split.public)
        (self.work / "basis.safetensors").write_bytes(basis)
        vouched = hashlib.sha256(basis).hexdigest()
        (self.work / "poor.toml").write_text(preset("internal").replace("epsilon = 8.0", "epsilon = 2.0"))
        several = f"max_releases_per_patient = {eyes.RELEASES} "
        (self.work / "several.toml").write_text(preset("internal").replace("max_releases_per_patient = 1 ", several))
        poor, several_too = ((self.work / f"{name}.toml").read_text() for name in ("poor", "several"))
        (self.work / "federation.toml").write_text(chests.admitting(several_too))
        two = f"max_releases_per_patient = {chests.RELEASES} "
        (self.work / "poor-c.toml").write_text(chests.admitting(poor.replace("max_releases_per_patient = 1 ", two)))
        federation = str(self.work / "federation.toml") if self.scale.training else "internal"
        own = {site: "internal" for site in SITES}
        own[POOR] = str(self.work / ("poor-c.toml" if self.scale.training else "poor.toml"))
        if self.scale.training:
            own[eyes.SITE] = str(self.work / "several.toml")
        self.run(self.coordinator("init", "--listen", listen, "--policy", federation))
        (self.work / "persons").mkdir(mode=0o700)
        for person, role in PERSONS.items():
            public = self.run(self.coordinator("ledger", "person", str(self._key(person)))).strip()
            self.run(self.coordinator("ledger", "appoint", person, role, public))
        common = ["--coordinator", listen]
        common += [word for digest in (vouched, *self.vouched) for word in ("--public-component", digest)]
        common += [word for modality in ("OT", "CT", "MR", "CR", "OP") for word in ("--modality", modality)]

        def init(site: str) -> None:
            words = ["init", "--site", site, "--policy", own[site], "--input", f"../pacs/{site}", *common]
            self.run(self.agent(site, *words, "--secondary-capture-modality", "OT"))

        say("three sites make their keys")
        self.each(init)
        if self.pacs is not None:
            (self.work / SITES[0] / "ingest.toml").write_text(self.pacs.table())
        if self.scale.training:
            (self.work / eyes.SITE / "ingest.toml").write_text(eyes.INGEST)
            (self.work / chests.SITE / "ingest.toml").write_text(chests.INGEST)
        return f"{POOR} has a lifetime budget of epsilon 2 in its own policy, the others 8; k is at least {K}"

    def enrol(self, say: Say) -> str:
        """Start the coordinator; each site joins by token, and two persons approve what they compared."""
        self.start("coordinator", self.coordinator("serve"), "serving")
        roots = {}
        for site in SITES:
            say(f"the coordinator invites {site}")
            invitation, token = self.work / f"{site}.invitation", self.work / f"{site}.token"
            said = self.run(self.coordinator("invite", site, "--out", str(invitation), "--token-file", str(token)))
            roots[site] = said.partition("root: ")[2].partition("\n")[0]

        def join(site: str) -> str:
            words = ["enrol", str(self.work / f"{site}.invitation"), "--fingerprint", roots[site]]
            words += ["--token-file", str(self.work / f"{site}.token")]
            return self.run(self.agent(site, *words), may_refuse=True).partition("request: ")[2].partition("\n")[0]

        say("three sites hand in their requests")
        compared = self.each(join)
        waiting = json.loads(self.run(self.coordinator("enrolments", "--json")))
        for pending in waiting:
            if pending["fingerprint"] != compared[pending["site"]]:
                raise DemoFailed(f"{pending['site']}: the fingerprints differ")
            say(f"two persons approve {pending['site']}")
            self._approved(pending["site"], pending["digest"])
        self.each(lambda site: self.run(self.agent(site, "enrol", "--wait", "20")))
        say("three doctors")
        self.each(lambda site: self.run(self.agent(site, "doctor")))
        return "\n".join(f"{site}: {words}" for site, words in compared.items())

    def _key(self, person: str) -> Path:
        """Where a person keeps the private key."""
        return self.work / "persons" / f"{person}.key"

    def _approved(self, site: str, digest: str) -> None:
        """Each person signs the request that was compared; the operator hands both approvals in."""
        files = []
        for person in PERSONS:
            files.append(str(self.work / f"{site}.{person}.json"))
            words = ["ledger", "sign", "enrol", site, digest, "--person", person, "--serial", f"enrol-{site}"]
            self.run(self.coordinator(*words, "--key", str(self._key(person)), "--out", files[-1]))
        self.run(self.coordinator("approve", site, *files, "--serial", f"enrol-{site}"))

    def ingest(self, say: Say) -> str:
        """Ingest what the first hospital's PACS has, and each folder."""
        asked = None
        if self.pacs is not None:
            say("the first one asks its PACS")
            asked = json.loads(self.run(self.agent(SITES[0], "ingest", "--pacs", "orthanc", "--json")))
        say("three agents read their folders")
        found = self.each(lambda site: self.run(self.agent(site, "ingest", "--json")))
        self.ingested = {site: json.loads(text) for site, text in found.items()}
        if asked is not None:
            self.ingested[SITES[0]] = _both(asked, self.ingested[SITES[0]])
        return "\n".join(
            f"{site}: {found['kept']} kept, {found['duplicates']} duplicate, {sum(found['quarantined'].values())} "
            f"quarantined ({', '.join(f'{reason} {n}' for reason, n in found['quarantined'].items())})"
            for site, found in self.ingested.items()
        )

    def synthetic(self, say: Say) -> str:
        """One k-anonymous set from each site."""
        lines = []
        words = ["release", "ksame", "--basis", str(self.work / "basis.safetensors"), "--modality", "OT"]
        words += ["--k", str(K), "--l-diversity", str(L), "--json"]
        say("three agents")
        answers = self.each(lambda site: self.run(self.agent(site, *words), may_refuse=True))
        for site, text in answers.items():
            answer = json.loads(text)
            rules = ", ".join(finding["rule"] for finding in answer["findings"])
            lines.append(
                f"{site}: " + (f"admitted, level {answer['level']}" if answer["admitted"] else f"refused: {rules}")
            )
        return "\n".join(lines)

    def federate(self, say: Say) -> str:
        """Start the three agents' links, launch the run, watch it."""
        say("three agents connect")
        self.each(lambda site: self.start(site, self.agent(site, "serve", "--modality", "OT"), "link: online"))
        job = {
            "mechanism": "federated",
            "parameters": int(self.mechanism.initial().vector.size),
            "sites": list(SITES),
            "rounds": self.scale.rounds,
            "min_sites": 2,
            "config": json.loads(self.mechanism.to_json()),
        }
        (self.work / "job.json").write_text(json.dumps(job, indent=2))
        command = self.coordinator("round", "launch", str(self.work / "job.json"), "--run", RUN, "--json")
        lines = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as process:
            assert process.stdout is not None
            for text in process.stdout:
                event = json.loads(text)
                where = f"round {event['round']} of {self.scale.rounds}" if event["round"] else "price"
                line = f"{where}: {event['state']} {', '.join(event['sites'])} {event['reason']}".strip()
                say(line)
                if event["state"] != "sent":
                    lines.append(line)
        if process.returncode != 0:
            raise DemoFailed("the federated run failed:\n" + "\n".join(lines))
        return "\n".join(lines)

    def evaluate(self, say: Say) -> str:
        """Accuracy of each round's model and of the twin that has no privacy."""
        test = self.split.held_out
        pictures, truth = _large(test.images), np.array([str(label) for label in test.labels])
        order, delta = self._account()
        rounds = []
        for number in range(1, self.scale.rounds + 1):
            say(f"round {number}")
            raw = (self.work / "coordinator" / "runs" / RUN / f"round-{number}.safetensors").read_bytes()
            claim = replace(self.mechanism.claim(), steps=self.mechanism.steps_per_round * number)
            spent = epsilon([claim], delta, order)
            rounds.append(
                {"round": number, "epsilon": spent, "accuracy": self._accuracy(unpack_vector(raw), pictures, truth)}
            )
        say("the twin without privacy")
        claim = self.mechanism.claim()
        taking_part = [i for i, site in enumerate(SITES) if site != POOR]
        twin = non_private_twin(self.mechanism, [self._cohort(i) for i in taking_part], np.random.default_rng(0))
        self.measured = {
            "title": "Lazaret demo",
            "accuracy": {
                "private": rounds[-1]["accuracy"],
                "non_private": self._accuracy(twin.vector, pictures, truth),
                "chance": 0.1,
                "test_images": len(truth),
            },
            "epsilon": {
                "filter": epsilon([claim], delta, order),
                "tight": tight_epsilon([claim], delta),
                "delta": delta,
                "order": order,
            },
            "rounds": rounds,
        }
        a, e = self.measured["accuracy"], self.measured["epsilon"]
        return (
            f"{a['private']:.1%} at epsilon {epsilon_text(e['filter'])} (filter, order {order}; "
            f"{epsilon_text(e['tight'])} by PLD), delta {never_less(delta)}, per patient; "
            f"{a['non_private']:.1%} without privacy"
        )

    def _account(self) -> tuple[int, float]:
        """The order and delta of the account that pays for the federated run, from the ledger."""
        ledger = json.loads(self.run(self.coordinator("ledger", "show", "--json")))
        account = next(a for a in ledger["accounts"] if a["account"] == f"{SITES[0]}/rdp")
        return int(account["order"]), float(account["delta"])

    def _accuracy(self, vector: NDArray[np.float32], pictures: NDArray[np.float32], truth: NDArray[np.str_]) -> float:
        return float((np.array(self.mechanism.predict(vector, pictures)) == truth).mean())

    def _cohort(self, index: int) -> Cohort:
        """The same patients as the site ingested, straight from the digits."""
        own = self.split.sites[index]
        pictures = _large(own.images)
        patients = []
        for i in range(self.scale.patients):
            images = [Image(pictures[j], str(own.labels[j])) for j in (2 * i, 2 * i + 1)]
            patients.append(Patient(f"{i:06d}", tuple(images)))
        return Cohort(tuple(patients))

    def report(self, say: Say) -> str:
        """Stop everybody, then write what the three users look at."""
        self.stop()
        say("summary")
        (self.work / "measured.json").write_text(json.dumps(self._for_report()))
        words = ["report", str(self.out / "report.html"), "--measured", str(self.work / "measured.json")]
        self.run(self.coordinator(*words))
        self.run(self.coordinator("ledger", "export", str(self.out / "ledger.export")))
        self.each(lambda s: self.run(self.agent(s, "ledger", "export", str(self.out / f"ledger-{s}.export"))))
        visible = shutil.ignore_patterns(".*")
        shutil.copytree(self.work / "coordinator" / "releases", self.out / "releases", ignore=visible)
        verify, keys = [sys.executable, "-m", "policies.verify"], self._fingerprints()
        return "".join(self.run([*verify, str(self.out / name), "--key", key]) for name, key in sorted(keys.items()))

    def _fingerprints(self) -> dict[str, str]:
        """The key of each export, as the other side knows it: an auditor asks there."""
        asked = {"ledger.export": self.agent(SITES[0], "ledger", "fingerprint", "--coordinator")}
        asked |= {f"ledger-{s}.export": self.coordinator("ledger", "fingerprint", "--site", s) for s in SITES}
        return {name: self.run(command).strip() for name, command in asked.items()}

    def _for_report(self) -> dict[str, Any]:
        ingest = {site: {k: v for k, v in found.items() if k != "files"} for site, found in self.ingested.items()}
        return {**self.measured, "steps": self.steps, "ingest": ingest}

    def write_summary(self) -> dict[str, Any]:
        """``summary.json``, once every step has its time."""
        found = self.summary()
        (self.out / "summary.json").write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
        return found

    def summary(self) -> dict[str, Any]:
        """``summary.json``: sites, counts, releases with verdicts, accuracy, seconds."""
        ledger = json.loads(self.run(self.coordinator("ledger", "show", "--json")))
        asked = {"federated": claim_json(self.mechanism.claim())}
        asked["privimage"] = claim_json(letters.claim(self.scale.training))
        asked |= dict.fromkeys(("ksame", "ksalsa", "anonfaces"), claim_json(KAnonymous(K, L, 1)))
        asked["distill"] = claim_json(NoClaim())
        orders = {a["account"]: (a["order"], a["delta"]) for a in ledger["accounts"]}
        return {
            "sites": list(SITES),
            "ingest": self.ingested,
            "releases": [r for e in ledger["entries"] if (r := _release(e, orders, asked)) is not None],
            **{k: v for k, v in self.measured.items() if k != "title"},
            "ledger": {
                "size": ledger["size"],
                "key": self.run(self.agent(SITES[0], "ledger", "fingerprint", "--coordinator")).strip(),
                "accounts": ledger["accounts"],
            },
            "steps": self.steps,
        }


def _release(
    entry: dict[str, Any], orders: dict[str, tuple[int, str]], asked: dict[str, Any]
) -> dict[str, Any] | None:
    """One line of the summary for each release or reservation; a refusal shows the claim that was asked for."""
    if entry["type"] not in ("admitted", "refused") or entry.get("stage") == "expired":
        return None
    claim = claim_from(entry.get("claim") or asked[entry["mechanism"]])
    order, delta = orders.get(f"{entry['site']}/rdp", (0, ""))
    private = isinstance(claim, Gaussian)
    return {
        "id": entry.get("release") or entry["subject"],
        "site": entry["site"],
        "mechanism": entry["mechanism"],
        "round": entry.get("round", 0),
        "claim": claim_json(claim),
        "claim_level": entry.get("level", ""),
        "epsilon": epsilon([claim], float(delta), order) if private else None,
        "delta": float(delta) if private else None,
        "k": getattr(claim, "k", None),
        "verdict": entry["type"],
        "findings": entry.get("findings", []),
    }


def _large(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, 8, 8) digits as the (n, 32, 32) pictures that were written as DICOM, in [0, 1]."""
    return (digits.upsample(images) / np.float32(255)).astype(np.float32)


def _environment() -> dict[str, str]:
    """One computing thread for each process: three hospitals share this machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
