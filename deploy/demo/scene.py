"""The demo's story: what is prepared, which commands are typed, what is measured."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from agent.errors import CohortTooSmallError
from agent.mechanisms.federated.mechanism import Federated, FederatedMasked
from deploy.demo import chests, eyes, heads, letters, pacs
from deploy.demo.finished_run import FinishedRun, looked, trained_on
from deploy.demo.folder import public_basis
from deploy.demo.jobs import PUBLIC_PATIENTS, federated_job, job_file, masked_job, public_start
from deploy.demo.kept_networks import lay
from deploy.demo.own_policies import POOR, SITES, policies
from deploy.demo.processes import DemoError, Processes
from deploy.demo.scale import NEEDS, Scale
from deploy.demo.summary import release_lines
from deploy.demo.train_networks import RECIPES
from deploy.phantoms import digits, scanner_files
from policies.accounting.claims import Claim, KAnonymous, NoClaim
from policies.accounting.rounding import epsilon_text, format_rounded_up

RUN, MASKED_RUN = "digits-1", "digits-masked"
PERSONS = {"dpo-1": "compliance", "physician-1": "hospital"}  # who approve at the coordinator, and as what
K, L = 5, 2
Say = Callable[[str], None]
T = TypeVar("T")


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two reports of the same site's ingest as one."""
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
    networks: dict[str, str] = field(default_factory=dict)  # SHA-256 of each that is laid out, by name
    vouched: list[str] = field(default_factory=list)  # SHA-256 of all that the clinics say is public
    pacs: pacs.Orthanc | None = None  # of the first hospital, where one is installed
    processes: Processes = field(default_factory=Processes)
    split: digits.Split = field(init=False)
    mechanism: Federated = field(init=False)

    def __post_init__(self) -> None:
        """Deal the digits out and fix the public configuration."""
        self.split = digits.split(len(SITES), self.scale.patients, 2)
        self.mechanism = federated_job(self.scale.rounds)

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
        shows = self.scale.shows
        yield "three hospitals' folders: real handwriting as DICOM, real scanner files, broken files", self.folders
        if shows(*NEEDS):
            yield "networks that learned from public images: of eyes, printed letters, chests, heads", self.public
        yield "keys are born where they are used; two persons may approve; the ledger begins", self.found
        yield "the coordinator serves; sites join by token, fingerprint and two approvals", self.enrol
        yield "ingest: de-identify, pseudonymise, encrypt; quarantine the rest", self.ingest
        yield "k-anonymous synthetic sets: price, cluster, average, seal, verdict", self.synthetic
        if shows("ksalsa", "anonfaces", "privimage", "centroids"):
            yield (
                "k patients behind each image of an eye, and sets under differential privacy, side by side",
                self.sets,
            )
        if shows("distill", "distill-dp"):
            yield "a chest clinic: a student of what was vetted, to a verdict", self.distilled
        if shows("remodel"):
            yield "a clinic of heads: patients' own scans with other faces, to a verdict", self.remodelled
        yield "federated rounds with patient-level DP-SGD", self.federate
        if shows("federated-masked"):
            yield "federated rounds under secure aggregation", self.federate_masked
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
            DemoError: another status than 0 (or 1 with an answer, where a refusal is part of the story).
        """
        return self.processes.run(command, may_refuse)

    def start(self, name: str, command: list[str], ready: str) -> None:
        """Start a process that stays, and wait until it says ``ready``.

        Raises:
            DemoError: it ended, or said nothing for three minutes.
        """
        log = self.work / f"{name}.out"
        self.processes.start(name, command, lambda: ready in log.read_text(), log)

    def stop(self) -> None:
        """End every running process, gently."""
        self.pacs = None
        self.processes.stop()

    def folders(self, say: Say) -> str:
        """Write each hospital's DICOM folder."""
        lines = []
        for i, site in enumerate(SITES):
            say(site)
            folder = self.work / "pacs" / site
            rng = np.random.default_rng(i)
            digits.write_hospital(folder, i, len(SITES), self.scale.patients, 2, rng)
            extra = len(scanner_files.add_scanner_files(folder))
            head = scanner_files.add_head(folder) if i == 0 else False
            files = sum(1 for path in folder.rglob("*") if path.is_file())
            lines.append(
                f"{site}: {files} files, {extra} of them scanner or broken files{', one head MRI' if head else ''}"
            )
            if i == 0 and pacs.installed():
                lines.append(f"{site}: {self._into_orthanc(folder, say)} of them are in its PACS, a real Orthanc")
        return "\n".join([*lines, *self._clinics(say)])

    def _clinics(self, say: Say) -> Iterator[str]:
        """What each clinic whose mechanism is shown writes as DICOM or NIfTI."""
        say("clinics")
        shows, where = self.scale.shows, self.work / "pacs"
        if shows("ksalsa", "anonfaces"):
            count = eyes.write_clinic(where / f"{eyes.SITE}-eyes")
            yield f"{eyes.SITE}: {count} photographs of eyes, DICOM in colour"
        if shows("centroids"):
            count = eyes.write_screening(where / f"{eyes.SCREENED}-eyes")
            yield f"{eyes.SCREENED}: {count} photographs of eyes, of a screening"
        for mechanism, site in chests.SITES.items():
            if shows(mechanism):
                count = chests.write_clinic(where / f"{site}-chests", SITES.index(site))
                yield f"{site}: {count} radiographs of chests, two visits of each patient"
        if shows("remodel"):
            count = heads.write_clinic(where / f"{heads.SITE}-heads")
            yield f"{heads.SITE}: {count} MRI of heads, with their faces"

    def _into_orthanc(self, folder: Path, say: Say) -> int:
        """The first hospital's own images live in its PACS and no longer in the folder."""
        say("an Orthanc takes the first hospital's images")
        self.pacs = pacs.Orthanc.start(self.work / "orthanc", self.processes)
        pictures = sorted(folder.glob("*/*/IM*.dcm"))
        count = self.pacs.load(pictures)
        for path in pictures:
            path.unlink()
        return count

    def public(self, say: Say) -> str:
        """Lay out what the mechanisms need that is no patient's; the sites will vouch for it."""
        names = dict.fromkeys(name for one in self.scale.mechanisms for name in NEEDS.get(one, ()))
        say(", ".join(names))
        self.networks = lay([RECIPES[name] for name in names], self.work / "networks")
        self.vouched = list(self.networks.values())
        lines = [f"{len(names)} networks, trained before on phantoms of other people, and kept in this repository"]
        if self.scale.shows("privimage"):
            letters.write_public(self.work / "letters")
            self.vouched.append(letters.images_sha256(self.work / "letters"))
            lines.append(f"{letters.CLUSTERS} clusters of printed letters, for the semantic query; the letters")
        if self.scale.shows("distill-dp"):
            chests.write_public(self.work / "public-chests")
            self.vouched.append(chests.images_sha256(self.work / "public-chests"))
            lines.append(f"radiographs of {chests.PUBLIC['people']} other people, to learn before the patients")
        if self.scale.shows("centroids"):
            say("a codebook of public eyes")
            told = json.loads(self.run(self.agent(eyes.SCREENED, *eyes.codebook(self.work))))
            self.vouched.append(told["sha256"])
            lines.append(f"a codebook of {eyes.CELLS} cells, of photographs of {eyes.PUBLIC['people']} other people")
        return "\n".join(lines)

    def _released(self, site: str, mechanism: str, config: Path, *more: str) -> str:
        """Release as a configuration says; the verdict in a line."""
        words = ["release", mechanism, "--config", str(config), *more, "--json"]
        answer = json.loads(self.run(self.agent(site, *words), may_refuse=True).splitlines()[-1])
        if not answer["admitted"]:
            return f"{mechanism}: refused: " + ", ".join(finding["rule"] for finding in answer["findings"])
        line = f"{mechanism}: admitted, level {answer['level']}"
        if "epsilon" not in answer:
            return line
        return (
            f"{line}: epsilon {epsilon_text(answer['epsilon'])} at delta {answer['delta']} in the ledger, "
            f"per patient; {epsilon_text(answer['epsilon_by_loss_distributions'])} by loss distributions"
        )

    def sets(self, say: Say) -> str:
        """Two hospitals work side by side."""
        with ThreadPoolExecutor(2) as pool:
            return "\n".join(text for text in pool.map(lambda act: act(say), (self.eyes, self.private)) if text)

    def eyes(self, say: Say) -> str:
        """One k-anonymous set by each of the two papers; no patient is in both."""
        lines = []
        for mechanism in ("ksalsa", "anonfaces"):
            if self.scale.shows(mechanism):
                say(mechanism)
                lines.append(self._divided(mechanism, say))
        return "\n".join(lines)

    def _divided(self, mechanism: str, say: Say) -> str:
        """Release one part of the eyes' patients, under another division if AnonFACES can show no image."""
        for division in eyes.DIVISIONS:
            try:
                return self._released(eyes.SITE, mechanism, eyes.configure(mechanism, self.work, K, L, division))
            except DemoError as error:
                if mechanism != "anonfaces" or str(CohortTooSmallError()) not in str(error):
                    raise
                say(f"{mechanism}: every image looked like somebody, none is shown; another division")
        raise DemoError(f"{mechanism}: {len(eyes.DIVISIONS)} divisions left no image that looks like nobody")

    def private(self, say: Say) -> str:
        """Sets under differential privacy: of all digits as one class, and of a screening's eyes."""
        lines = []
        if self.scale.shows("privimage"):
            say("histogram, selection, pre-training, fine-tuning")
            config = letters.configure(self.work, max(PUBLIC_PATIENTS, self.scale.patients), self.scale.pretraining)
            lines.append(self._released(letters.SITE, "privimage", config))
        if self.scale.shows("centroids"):
            say("counts and sums of a public codebook's cells")
            lines.append(self._released(eyes.SCREENED, "centroids", eyes.configure_centroids(self.work)))
        return "\n".join(lines)

    def distilled(self, say: Say) -> str:
        """Without a claim, what an unseen verifier finds and what the vetting would have found; and with one."""
        lines = []
        for mechanism, site in chests.SITES.items():
            if self.scale.shows(mechanism):
                say(f"{mechanism}: teacher, samples, vetting, student")
                config = chests.configure(mechanism, self.work, self.networks)
                sheet = self.work / f"{site}-contact-sheet.html"
                lines.append(self._released(site, mechanism, config, "--sheet", str(sheet)))
        return "\n".join(lines)

    def remodelled(self, say: Say) -> str:
        """Scans of level C: an attacker looks for the patients in them first."""
        say("another face for every head, and an attacker who looks for the patients")
        return self._released(heads.SITE, "remodel", heads.configure(self.work, self.networks[heads.NETWORK]))

    def found(self, say: Say) -> str:
        """Make the coordinator's and the sites' directories, and appoint the two who approve."""
        listen = f"127.0.0.1:{_free_port()}"
        basis = public_basis(self.split.public)
        (self.work / "basis.safetensors").write_bytes(basis)
        start = public_start()
        vouched = [hashlib.sha256(basis).hexdigest(), *start, *self.vouched]
        for name, text in policies(self.scale.mechanisms, self.scale.spare).items():
            (self.work / f"{name}.toml").write_text(text)
        self.run(self.coordinator("init", "--listen", listen, "--policy", str(self.work / "federation.toml")))
        (self.work / "persons").mkdir(mode=0o700)
        for person, role in PERSONS.items():
            public = self.run(self.coordinator("ledger", "person", str(self.key(person)))).strip()
            self.run(self.coordinator("ledger", "appoint", person, role, public))
        common = ["--coordinator", listen]
        common += [word for digest in vouched for word in ("--public-component", digest)]
        common += [word for modality in ("OT", "CT", "MR", "CR", "OP") for word in ("--modality", modality)]

        def init(site: str) -> None:
            own = str(self.work / f"{'poor' if site == POOR else site}.toml")
            words = ["init", "--site", site, "--policy", own, "--input", f"../pacs/{site}", *common]
            self.run(self.agent(site, *words, "--secondary-capture-modality", "OT"))
            for digest, raw in start.items():
                (self.work / site / "weights").mkdir(mode=0o700)
                (self.work / site / "weights" / f"{digest}.safetensors").write_bytes(raw)

        say("three sites make their keys")
        self.each(init)
        for site in SITES:
            if text := self._ways_in(site):
                (self.work / site / "ingest.toml").write_text(text)
        return f"{POOR} has a lifetime budget of epsilon 2 in its own policy, the others have more; k is at least {K}"

    def _ways_in(self, site: str) -> str:
        """``ingest.toml``: a colour camera's modality, the PACS, and each clinic's folder beside the site's own."""
        folders = sorted((self.work / "pacs").glob(f"{site}-*"))
        text = eyes.RULES if any(folder.name.endswith("-eyes") for folder in folders) else ""
        if self.pacs is not None and site == SITES[0]:
            text += self.pacs.table()
        return text + "".join(f'[[folder]]\npath = "../pacs/{folder.name}"\n' for folder in folders)

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
                raise DemoError(f"{pending['site']}: the fingerprints differ")
            say(f"two persons approve {pending['site']}")
            self._approved(pending["site"], pending["digest"])
        enrolled = self.each(lambda site: self.run(self.agent(site, "enrol", "--wait", "20")))
        if self.scale.shows("federated-masked"):
            self._partners({site: said.split()[-1] for site, said in enrolled.items()})
        say("three doctors")
        self.each(lambda site: self.run(self.agent(site, "doctor")))
        return "\n".join(f"{site}: {words}" for site, words in compared.items())

    def _partners(self, keys: Mapping[str, str]) -> None:
        """Each hospital names the others, whom it knows by telephone: without both it is in no secret sum."""
        for site in SITES:
            others = json.dumps([key for other, key in keys.items() if other != site])
            with (self.work / site / "site.toml").open("a") as settings:
                settings.write(f"partners = {others}\nleast_partners = {len(SITES) - 1}\n")

    def key(self, person: str) -> Path:
        """Where a person keeps the private key."""
        return self.work / "persons" / f"{person}.key"

    def _approved(self, site: str, digest: str) -> None:
        """Each person signs the request that was compared; the operator hands both approvals in."""
        files = []
        for person in PERSONS:
            files.append(str(self.work / f"{site}.{person}.json"))
            words = ["ledger", "sign", "enrol", site, digest, "--person", person, "--serial", f"enrol-{site}"]
            self.run(self.coordinator(*words, "--key", str(self.key(person)), "--out", files[-1]))
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
        return self._launched(RUN, self.mechanism, 2, say)

    def federate_masked(self, say: Say) -> str:
        """A run whose coordinator sees sums of three updates, and no update."""
        return self._launched(MASKED_RUN, masked_job(self.mechanism), 3, say)

    def _launched(self, run: str, mechanism: Federated | FederatedMasked, min_sites: int, say: Say) -> str:
        """Launch a run and follow it to its end."""
        file = self.work / ("job.json" if run == RUN else f"{run}.json")
        file.write_text(json.dumps(job_file(mechanism, min_sites), indent=2))
        lines = []
        with self.processes.piped(self.coordinator("round", "launch", str(file), "--run", run, "--json")) as process:
            assert process.stdout is not None
            for text in process.stdout:
                event = json.loads(text)
                where = f"round {event['round']} of {mechanism.turns}" if event["round"] else "price"
                line = f"{where}: {event['state']} {', '.join(event['sites'])} {event['reason']}".strip()
                say(line)
                if event["state"] != "sent":
                    lines.append(line)
        if process.returncode != 0:
            raise DemoError("the federated run failed:\n" + "\n".join(lines))
        return "\n".join(lines)

    def evaluate(self, say: Say) -> str:
        """Stop everybody; then accuracy of each round's model, of its public start, and of a twin without privacy."""
        self.stop()
        order, delta = account = self._account()
        run = FinishedRun(
            self.mechanism, public_start(), self.work / "coordinator", RUN, self.split.held_out, account
        )
        say("each round's model, and the twin without privacy")
        took_part = [trained_on(self.work / site, self.mechanism) for site in SITES if site != POOR]
        self.measured = {"title": "Lazaret demo", **run.measured(took_part)}
        a, e = self.measured["accuracy"], self.measured["epsilon"]
        return (
            f"{a['private']:.1%} at epsilon {epsilon_text(e['filter'])} (filter, order {order}; "
            f"{epsilon_text(e['tight'])} by PLD), delta {format_rounded_up(delta)}, per patient; "
            f"{a['public_start']:.1%} before the first round, {a['non_private']:.1%} without privacy\n"
            f"{looked(self.measured['evaluation'])}; that epsilon covers it"
        )

    def _account(self) -> tuple[int, float]:
        """The order and delta of the account that pays for the federated run, from the ledger."""
        ledger = json.loads(self.run(self.coordinator("ledger", "show", "--json")))
        account = next(a for a in ledger["accounts"] if a["account"] == f"{SITES[0]}/rdp")
        return int(account["order"]), float(account["delta"])

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
        verify, keys = [sys.executable, "-m", "policies.audit.verify"], self._fingerprints()
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
        """``summary.json``, in the form of ``summary.schema.json``."""
        ledger = json.loads(self.run(self.coordinator("ledger", "show", "--json")))
        asked: dict[str, Claim] = {"federated": self.mechanism.claim()}
        asked["federated-masked"] = masked_job(self.mechanism).claim()
        asked |= {"privimage": letters.claim(self.scale.pretraining), "distill-dp": chests.private_claim()}
        asked["centroids"] = eyes.centroids_claim()
        asked |= dict.fromkeys(("ksame", "ksalsa", "anonfaces"), KAnonymous(K, L, 1))
        asked |= dict.fromkeys(("distill", "remodel"), NoClaim())
        return {
            "form": self.scale.form,
            "left_out": [{"mechanism": name, "why": why} for name, why in self.scale.left_out.items()],
            "sites": list(SITES),
            "ingest": self.ingested,
            "releases": release_lines(ledger, asked),
            **{k: v for k, v in self.measured.items() if k != "title"},
            "ledger": {
                "size": ledger["size"],
                "key": self.run(self.agent(SITES[0], "ledger", "fingerprint", "--coordinator")).strip(),
                "accounts": ledger["accounts"],
            },
            "steps": self.steps,
        }
