"""A coordinator's home with a history worth a report (sets, heads, runs, refusals), and the overview of a ledger."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.admission import AdmissionService
from coordinator.federation.events import RunEvent, SignOfLife
from coordinator.federation.participation import RoundMembers
from coordinator.federation.run_journal import keep_event
from coordinator.reports.html_renderer import as_html
from coordinator.reports.overview import ReleaseView, overview
from coordinator.reports.report_inputs import ReportInputs, books_of
from coordinator.storage import directory as homes
from coordinator.storage.release_store import ReleaseStore
from coordinator.storage.uploads import Uploads
from policies.accounting.accountant import epsilon_nano
from policies.accounting.claims import DistributedGaussian, KAnonymous, NoClaim, SubsampledGaussian
from policies.ledger.backends.sqlite import open_sqlite
from policies.ledger.store import Store, export
from policies.review.mechanism_terms import ARTIFACT_TYPES
from policies.review.policy import parse as parse_policy
from policies.statements import Settlement
from protos.artifacts.arrays import pack_images, pack_vector
from protos.artifacts.shards import Nifti, pack_shard
from protos.artifacts.strict_safetensors import pack_ring
from protos.common.durable_files import replace_file
from tests.support.coordinator_runs import job, signed
from tests.support.ledger_world import COMPONENTS, DP, Clock, Hospital, policy
from tests.support.upload_server import staged

NOW = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.UTC)
LAX = policy(
    components='["public", "private"]',
    levels='["A", "A*", "B", "C"]',
    max_releases_per_patient=3,
    mechanisms='["ksame", "distill", "remodel", "federated", "federated-masked"]',
    artifact_types=json.dumps(sorted(ARTIFACT_TYPES)),
)
K11 = KAnonymous(k=11, l_diversity=2, releases_per_patient=1)
K5 = KAnonymous(k=5, l_diversity=2, releases_per_patient=1)


class Days(Clock):
    """A clock that goes on by two days with every entry."""

    def __call__(self) -> int:
        self.now += 172_800
        return self.now


def pictures(count: int = 6) -> bytes:
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    images = np.stack([np.roll(ramp, 17 * i) for i in range(count)])
    return pack_images(images, tuple("effusion" if i % 2 else "clear" for i in range(count)))


def heads() -> bytes:
    return pack_shard([np.zeros((4, 5, 6), np.int16)], [""], Nifti((1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0, 0)))


@dataclass
class Stage:
    """What happened, and the names under which the ledger has it."""

    home: homes.CoordinatorDirectory
    store: Store
    north: Hospital
    south: Hospital
    names: dict[str, str] = field(default_factory=dict)
    run: str = "trial"
    shared: str = "shared"  # the run whose noise both sites share: level A*

    def __post_init__(self) -> None:
        self.intake = AdmissionService.over(self.store, parse_policy(LAX, "federation"))
        self.shelf = ReleaseStore(self.home.releases, self.store)
        self.uploads = Uploads(self.shelf.staging, lambda: 0.0, keep_free=0)

    def reserve(self, hospital: Hospital, grant: str, claim: Any, mechanism: str = "ksame", run: str = "") -> bool:
        asked = hospital.reservation(grant, claim, mechanism, run)
        return self.intake.reserve(hospital.name, f"r-{grant}", hospital.seal(asked)).admitted

    def submit(self, hospital: Hospital, grant: str, body: bytes, **changes: Any) -> str:
        """The release's name, or "" when it was refused."""
        values = {"artifact_sha256": hashlib.sha256(body).hexdigest(), "artifact_bytes": len(body), **changes}
        release = hospital.release(grant, **values)
        path, envelope = staged(self.uploads, hospital.name, body), hospital.seal(release)
        key = f"s-{release.release[:40]}"
        verdict = self.intake.admit(hospital.name, key, envelope, release, signed(release, body))
        self.shelf.settle(path, release, envelope, verdict)
        self.uploads.drop(hospital.name, hashlib.sha256(body).hexdigest())
        return release.release if verdict.admitted else ""

    def update(self, hospital: Hospital, grant: str, number: int, steps: int) -> None:
        opened = self.store.state.accounts[f"{hospital.name}/rdp"].opened
        claim = SubsampledGaussian(DP.sampling_rate, DP.noise_multiplier, steps)
        facts: dict[str, Any] = {"mechanism": "federated", "artifact_type": "update", "claim": claim}
        facts |= {"epsilon_nano": epsilon_nano(claim, float(opened.delta), opened.order), "delta": opened.delta}
        facts |= {"components": COMPONENTS["federated"], "run": self.run, "round": number}
        assert self.submit(hospital, grant, pack_vector(np.full(4, number, np.float32)), **facts)

    def place_model(self, run: str, model: bytes) -> None:
        """A run's model on the shelf, with the least of a certificate."""
        facts = {"release": run, "artifact_sha256": hashlib.sha256(model).hexdigest()}
        self.shelf.place_model(run, model, facts, {})

    def sum_up(self) -> None:
        """A run of one round, of which only the sum can be seen, in two sites' noise."""
        for hospital in (self.north, self.south):
            grant, claim = f"m-{hospital.name}", DistributedGaussian(0.25, 1.8, 1, 2, 2)
            assert self.reserve(hospital, grant, claim, "federated-masked", self.shared)
            opened = self.store.state.accounts[f"{hospital.name}/rdp"].opened
            facts: dict[str, Any] = {"mechanism": "federated-masked", "artifact_type": "masked-update"}
            facts |= {"claim": claim, "components": COMPONENTS["federated-masked"], "run": self.shared, "round": 1}
            facts |= {"epsilon_nano": epsilon_nano(claim, float(opened.delta), opened.order), "delta": opened.delta}
            assert self.submit(hospital, grant, pack_ring(np.arange(5, dtype=np.uint64)), **facts)
        model = pack_vector(np.full(4, 8, np.float32))
        self.intake.register.close_round(self.shared, 1, ["north", "south"], hashlib.sha256(model).digest())
        self.place_model(self.shared, model)
        for name in ("north", "south"):
            self.intake.register.close(f"m-{name}", "released")

    def remodel(self) -> None:
        """Patients' own heads with other faces, in front of an attacker."""
        assert self.reserve(self.north, "g-heads", NoClaim(), "remodel")
        facts: dict[str, Any] = {"mechanism": "remodel", "artifact_type": "volume-set", "claim": NoClaim()}
        facts |= {"components": COMPONENTS["remodel"], "vetted_against": "private", "modality": "OT"}
        facts |= {"reid_rate": "0.04", "vetting_power": "0.92"}
        self.names["heads"] = self.submit(self.north, "g-heads", heads(), **facts)

    def play(self) -> None:
        """Admitted: two sets, two tested only, two runs. Refused: price, door. Given up: one."""
        for hospital in (self.north, self.south):
            self.intake.enrol(hospital.enrolment()[1])
        north, south = self.north, self.south
        assert self.reserve(north, "g-eleven", K11)
        self.names["eleven"] = self.submit(north, "g-eleven", pictures(6), claim=K11, menu="8,11,16")
        assert not self.reserve(south, "g-two", KAnonymous(k=2, l_diversity=2, releases_per_patient=1))
        assert self.reserve(south, "g-five", K5)
        self.names["five"] = self.submit(south, "g-five", pictures(4), claim=K5)
        assert self.reserve(north, "g-north", DP, "federated", self.run)
        assert self.reserve(south, "g-south", DP, "federated", self.run)
        register = self.intake.register
        self.update(north, "g-north", 1, 30)
        self.update(south, "g-south", 1, 30)
        register.close_round(self.run, 1, ["north", "south"], hashlib.sha256(b"first").digest())
        self.update(north, "g-north", 2, 60)
        model = pack_vector(np.full(4, 7, np.float32))
        register.close_round(self.run, 2, ["north"], hashlib.sha256(model).digest())
        self.place_model(self.run, model)
        register.close("g-north", "released")
        assert self.reserve(north, "g-taught", NoClaim(), "distill")
        taught: dict[str, Any] = {"mechanism": "distill", "claim": NoClaim(), "components": COMPONENTS["distill"]}
        taught |= {"vetted_against": "private", "reid_rate": "0.03", "vetting_power": "0.95"}
        self.names["taught"] = self.submit(north, "g-taught", pictures(5), **taught)
        assert self.reserve(south, "g-bad", K5)
        assert not self.submit(south, "g-bad", pictures(3), artifact_sha256="cd" * 32, claim=K5)
        word = Settlement("g-south", "south", self.run, "federated", "expired", "restart", 0)
        self.intake.settle("south", "settle-g-south", south.seal(word))
        self.sum_up()
        self.remodel()
        assert all(self.names.values())


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """The home, with its ledger open for writing."""
    home = homes.create(folder / "home", 'listen = "127.0.0.1:7443"\n', LAX, dt.datetime.now(dt.UTC))
    with Store(open_sqlite(home.ledger), homes.ORIGIN, home.ledger_key(), Days()) as store:
        shown = Stage(home, store, Hospital("north", LAX), Hospital("south", LAX))
        shown.play()
        yield shown


def keep_run(shown: Stage, state: str = "finished", run: str = "trial", **changes: Any) -> Path:
    """The folder of the stage's run of two rounds, as the coordinator keeps it: south is out of the second one."""
    folder = shown.home.root / "runs" / run
    folder.mkdir(parents=True, exist_ok=True)
    asked = job(2, ("north", "south"), **{"run": run, "min_sites": 1, **changes})
    replace_file(folder / "job.json", asked.to_json().encode())
    RoundMembers(1, False, ("north", "south"), {}).keep(folder)
    RoundMembers(2, False, ("north",), {"south": "no_reply"}).keep(folder)
    links = SignOfLife(1.0, 1000, 5000, 0.0, "idle")
    for at, number, said, sites, reason, answered in (
        (100.0, 0, "granted", ("north", "south"), "", 0.0),
        (101.0, 1, "sent", ("north", "south"), "", 0.0),
        (111.0, 1, "closed", ("north", "south"), "", 105.0),
        (112.0, 2, "waiting", ("south",), "too_few_updates", 105.0),
        (140.0, 2, "sent", ("north", "south"), "", 105.0),
        (200.0, 2, "refused", ("south",), "no_reply", 105.0),
        (200.0, 2, "closed", ("north",), "", 150.0),
    ):
        links = replace(links, received=links.received + 100, sent=links.sent + 200, answered=answered)
        event = RunEvent(run, number, said, sites, reason)
        keep_event(folder, event, at, {"north": links, "south": replace(links, answered=104.0)}, {})
    if state in ("finished", "failed"):
        reason = "south is in 1 of 2 rounds; the other sites are in all" if state == "finished" else "no_aggregate"
        end = RunEvent(run, 2, state, ("north", "south"), reason)
        replace_file(folder / "end.json", json.dumps(asdict(end)).encode())
        keep_event(folder, end, 210.0, {}, {})
    return folder


def books_of_store(store: Store) -> ReportInputs:
    """What the store holds, read back from its export."""
    return books_of(export(store._disk, store.origin, store._key), "", NOW)


def page_of(store: Store, releases: Sequence[ReleaseView] = (), measured: Mapping[str, Any] | None = None) -> str:
    """The overview's HTML."""
    return as_html(overview(books_of_store(store), releases, measured))
