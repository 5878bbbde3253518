"""A clinic of made chests: an enrolled site, with the configurations of k-SALSA for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent.mechanisms.common.linear_codec import fit_basis, save_basis
from deploy.demo.train_networks import kept_network
from policies.review.policy import preset
from tests.support import federation_world
from tests.support.federation_world import Site
from tests.support.mechanism_documents import sha, toml
from tests.support.networks import files
from tests.support.release_site import enrolled_site
from tests.support.vault_records import record
from tests.support.verifiers import chests

PATIENTS, SIDE = 44, 32


@pytest.fixture(params=["as it is shipped"])
def chest_clinic(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An enrolled site with patients' chests; a generator that nobody trained, and verifiers that know chests."""
    if request.param != "as it is shipped":
        text = preset("internal")
        monkeypatch.setattr(
            federation_world, "preset", lambda _: re.sub(r"(?m)^max_reid_rate = \S+", request.param, text)
        )
    named = dict(zip(("generator", "encoder"), files(1), strict=True))
    named |= {name: kept_network(name) for name in ("verifier", "unseen")}
    pictures = (chests(PATIENTS + 60, 5, side=SIDE, visits=1)[0] / 255).astype(np.float32)
    named["basis"] = save_basis(fit_basis(pictures[PATIENTS:], 8, "public"))
    for name, raw in named.items():
        (tmp_path / f"{name}.safetensors").write_bytes(raw)
    judges = {part: f"{part}.safetensors" for part in ("verifier", "unseen")}
    table = {**judges, **{f"{part}_sha256": sha(named[part]) for part in judges}}
    ksalsa = {
        "mechanism": "ksalsa",
        "cohort": {"modality": "OT"},
        "clusters": {"k": 5, "l_diversity": 2},
        "networks": {"generator": "generator.safetensors", "encoder": "encoder.safetensors", "passes": 2},
        "alignment": {"steps": 2},
    }
    (tmp_path / "plain.toml").write_text(toml(ksalsa))
    (tmp_path / "ksalsa.toml").write_text(toml({**ksalsa, "vetting": table}))
    (tmp_path / "vetting.toml").write_text(toml({"vetting": table}))
    (tmp_path / "other.toml").write_text(toml({"vetting": {**table, "verifier_sha256": "0" * 64}}))
    records = [replace(record(n, n, "ab"[n % 2]), pixels=one) for n, one in enumerate(pictures[:PATIENTS])]
    with enrolled_site(tmp_path, records, map(sha, named.values())) as site:
        yield site
