"""Run with an older commit's tree on the path: writes a coordinator's and a site's home as it did."""

import hashlib
import shutil
import sys
from pathlib import Path

import numpy as np

from agent.deidentify.record import Record
from agent.runtime import open_runtime
from agent.storage.site_directory import SiteDirectory as AgentHome
from agent.storage.site_directory import origin
from coordinator.storage.directory import ORIGIN, CoordinatorDirectory
from policies.ledger.backends.sqlite import export_file
from tests.support.federation_world import Federation, pictures
from tests.support.ledger_world import DP, K5


def main(out: Path) -> None:
    """Everything below a folder that is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with Federation(out) as fed:
        site = fed.join("site-a")
        fed.join("site-b")
        toml = site.home.root / "site.toml"
        toml.write_text(toml.read_text().replace('127.0.0.1:1"', f'127.0.0.1:{fed.port}"'))
        with open_runtime(site.home.root, lambda *_: None) as runtime:
            rng = np.random.default_rng(4)
            for n in range(12):
                pixels = rng.random((8, 8)).astype(np.float32)
                runtime.vault.keep(
                    Record(
                        f"{n:032x}",
                        hashlib.sha256(b"f%d" % n).hexdigest()[:32],
                        f"{n % 6:032x}",
                        "0" * 32,
                        "OT",
                        "image",
                        str(n % 3),
                        pixels,
                        b"DICOM %d" % n,
                        False,
                    )
                )
            for grant, claim, mechanism, run in (("grant-1", K5, "ksame", ""), ("grant-2", DP, "federated", "run-1")):
                said = site.hospital.reservation(grant, claim, mechanism, run)
                sealed = runtime.site.seal(said)
                v = runtime.site.ledger.reserve(f"reserve-{grant}", said, sealed)
                assert v.admitted, v
                v = runtime.gateway.reserve(f"reserve-{grant}", sealed)
                assert v.admitted, v
            artifact = pictures()
            release = site.release("grant-1", artifact)
            sealed = runtime.site.seal(release)
            runtime.vault.write_note(
                "releases", [{"release": release.release, "clusters": [[f"{n:032x}" for n in range(5)]], "again": []}]
            )
            runtime.site.ledger.send(release, sealed)
            v = runtime.gateway.submit(f"submit-{release.release}", sealed, artifact)
            assert v.admitted, v
            runtime.site.ledger.record(f"submit-{release.release}", release, sealed, v)
            runtime.gateway.hello(runtime.watch.cosigned("site-a", runtime.home.sign_key(), 1_760_000_000))
            runtime.vault.write_note("ledger", runtime.site.ledger.store.state.size)
    for root in (out / "coordinator", out / "site-a"):
        for path in list(root.rglob("*")):
            if path.suffix in {".log", ".part"} or path.name.endswith(("-wal", "-shm")):
                path.unlink()
    shutil.rmtree(out / "coordinator" / "offline")
    coordinator, site_a = CoordinatorDirectory(out / "coordinator"), AgentHome(out / "site-a")
    exported = export_file(coordinator.ledger, ORIGIN, coordinator.ledger_key())
    (out / "coordinator.export").write_bytes(exported)
    exported = export_file(site_a.root / "ledger.db", origin("site-a"), site_a.sign_key())
    (out / "site-a.export").write_bytes(exported)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
