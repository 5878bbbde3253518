"""A coordinator's directory with a ledger and a shelf, and hospitals whose networks and sets are admitted to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.pools.selection import PoolLedger, books_of
from coordinator.storage.directory import CoordinatorDirectory
from coordinator.storage.release_store import ReleaseStore
from coordinator.storage.uploads import Uploads
from policies.accounting.claims import Claim, NoClaim
from policies.audit.display import as_json
from policies.ledger_service import ArtifactFindings, LedgerService
from policies.review.policy import parse
from policies.statements import Release
from tests.support.ledger_world import COMPONENTS, Hospital, open_register, policy
from tests.support.upload_server import staged

LAX = policy(components='["public", "private"]', levels='["A", "B", "C"]', max_releases_per_patient=9)
MEASURED = {"vetted_against": "private", "reid_rate": "0.0312", "vetting_power": "0.9559"}


@dataclass
class World:
    """A coordinator's home with a ledger, a shelf and two hospitals whose policies admit level C."""

    root: Path
    register: LedgerService = field(init=False)
    home: CoordinatorDirectory = field(init=False)
    shelf: ReleaseStore = field(init=False)

    def __post_init__(self) -> None:
        self.home = CoordinatorDirectory(self.root / "home")
        self.home.releases.mkdir(parents=True)
        (self.home.root / "coordinator.toml").write_text('listen = "127.0.0.1:0"\n')
        self.north, self.south = Hospital("north", LAX), Hospital("south", LAX)
        key, agreed = Ed25519PrivateKey.generate(), parse(LAX, "lax")
        register = open_register(self.home.ledger, self.north, self.south, key=key)
        self.register = replace(register, policy_of=lambda _site: agreed)
        self.shelf = ReleaseStore(self.home.releases, self.register.store)
        self.uploads = Uploads(self.shelf.staging, lambda: 0.0, keep_free=0)

    @property
    def pool_ledger(self) -> PoolLedger:
        store = self.register.store
        return books_of(store.line(i).record for i in range(store.state.size))

    def admit(
        self,
        site: Hospital,
        grant: str,
        body: bytes,
        mechanism: str = "distill",
        claim: Claim | None = None,
        **more: Any,
    ) -> Release:
        """Reserve, upload, review and put on the shelf, as the service does."""
        claim = claim or NoClaim()
        components = more.pop("components", COMPONENTS[mechanism])
        asked = replace(site.reservation(grant, claim, mechanism), components=components)
        assert self.register.reserve(f"r-{grant}", asked, site.seal(asked)).admitted
        facts = {"artifact_type": "model", **(MEASURED if mechanism == "distill" else {}), **more}
        release = site.release(
            grant, mechanism=mechanism, claim=claim, components=components,
            artifact_sha256=hashlib.sha256(body).hexdigest(), artifact_bytes=len(body), **facts,
        )  # fmt: skip
        path, envelope = staged(self.uploads, site.name, body), site.seal(release)
        verdict = self.register.admit(f"s-{grant}", release, envelope, ArtifactFindings())
        assert verdict.admitted, verdict
        self.shelf.settle(path, release, envelope, verdict)
        self.uploads.drop(site.name, release.artifact_sha256)
        return release

    def ledger(self) -> dict[str, Any]:
        store = self.register.store
        return as_json("lazaret/test", [store.line(i).record for i in range(store.state.size)])
