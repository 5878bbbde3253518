"""An enrolled site with patients for the commands that release, and k-Same-PCA as it is typed."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent import runtime
from agent.deidentify.record import Record
from agent.mechanisms.common.linear_codec import fit_basis, save_basis
from agent.storage import projects
from policies.ledger.backends.sqlite import read_lines
from tests.support.command_line import at
from tests.support.federation_world import Federation, Site
from tests.support.vault_records import record

KILLED = Path(__file__).with_name("killed_agent.py")
PATIENTS = 24


@contextmanager
def enrolled_site(folder: Path, records: Iterable[Record], vouched: Iterable[str] = ()) -> Iterator[Site]:
    """A site that a coordinator in this process has enrolled, with records in its vault; ``vouched`` are digests."""
    with Federation(folder) as federation:
        site = federation.join("site-a")
        with closing(projects.open_vault(site.home, "main")) as vault:
            vault.keep_all(list(records))
        vouch_for(site, *vouched)
        yield site


def vouch_for(site: Site, *digests: str) -> None:
    """The site vouches for these components, and for no others."""
    settings = site.home.root / "site.toml"
    told = f"public_components = {json.dumps(digests)}"
    settings.write_text(re.sub(r"^public_components = .*", told, settings.read_text(), flags=re.MULTILINE))


def filled(site: Site, folder: Path, *, founded: bool = True) -> Site:
    """Patients, and the basis whose digest the site vouches for. Its ledger begins, unless it is not ``founded``."""
    raw = save_basis(fit_basis(np.random.default_rng(9).random((40, 8, 8)).astype(np.float32), 8, "public"))
    (folder / "basis.safetensors").write_bytes(raw)
    vouch_for(site, hashlib.sha256(raw).hexdigest())
    with closing(projects.open_vault(site.home, "main")) as vault:
        dice = np.random.default_rng(1)
        shots = [record(n, n, str(n % 3)) for n in range(PATIENTS)]
        vault.keep_all([replace(shot, pixels=dice.random((8, 8), np.float32)) for shot in shots])
    if founded:
        with runtime.open_runtime(site.home.root, lambda *_: None):  # which founds the ledger
            pass
    return site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """An enrolled site with patients and a basis that it vouches for."""
    with Federation(tmp_path) as federation:
        yield filled(federation.join("site-a"), tmp_path)


def ksame_words(folder: Path, *more: object) -> list[object]:
    """The command that releases k-Same-PCA by the basis in ``folder``."""
    basis = folder / "basis.safetensors"
    return ["release", "ksame", "--basis", basis, "--k", "5", "--modality", "OT", *more]


def held(site: Site) -> tuple[int, int]:
    """(held, spent) of the account of k, at the coordinator."""
    account = site.federation.store.state.accounts["site-a/k"]
    return account.held, account.spent


def entries(site: Site) -> list[str]:
    """The kinds of all entries of the site's ledger."""
    return [type(line.record.entry).__name__ for line in read_lines(site.home.root / "ledger.db")]


def kept(site: Site) -> list[str]:
    """Names of the sets that are made and did not leave."""
    with closing(projects.open_vault(site.home, "main")) as vault:
        return sorted(vault.note("pending") or {})


def blobs(site: Site) -> int:
    """Rows of made sets in the site's own books."""
    with closing(projects.open_vault(site.home, "main")) as vault:
        return int(vault._notes.rows("SELECT count(*) FROM note WHERE name LIKE '%kept/%'")[0][0])


def killed(site: Site, folder: Path, moment: str) -> None:
    """The command, killed at a moment of ``tests/support/killed_agent.py``."""
    words = [str(word) for word in (*at(site), *ksame_words(folder))]
    done = subprocess.run([sys.executable, str(KILLED), moment, *words], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
