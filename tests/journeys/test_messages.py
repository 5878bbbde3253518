"""Every byte that goes through the gRPC service, while a real agent ingests and releases: no identity is in it."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import numpy as np

from deploy.demo.folder import public_basis
from deploy.phantoms import digits, scanner_files
from tests.support.command_server import python
from tests.support.federation_world import Federation
from tests.support.leak_scan import Scan


def test_no_identity_is_in_any_grpc_message(tmp_path: Path) -> None:
    planted = digits.write_hospital(tmp_path / "input", 0, 1, 12, 2, np.random.default_rng(3))
    scanner_files.add_scanner_files(tmp_path / "input")
    basis = public_basis(digits.split(1, 12, 2).public)
    (tmp_path / "basis.safetensors").write_bytes(basis)
    with Federation(tmp_path) as federation:
        federation.join("site-a")
        settings = tmp_path / "site-a" / "site.toml"
        text = settings.read_text().replace("127.0.0.1:1", f"127.0.0.1:{federation.port}", 1)
        vouched = hashlib.sha256(basis).hexdigest()
        settings.write_text(text.replace("public_components = []", f'public_components = ["{vouched}"]'))
        command = [python(), "-m", "agent", "--home", str(tmp_path / "site-a")]
        release = ["release", "ksame", "--basis", str(tmp_path / "basis.safetensors"), "--modality", "OT", "--k", "5"]
        for words in (["doctor"], ["ingest"], release):
            done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        messages = list(federation.recorder.messages)
        assert federation.store.state.releases
    scan = Scan(set(planted.strings), {d for d in planted.dates if len(d) == 8})
    assert len(messages) >= 6
    assert sum(map(len, messages)) > 5_000
    assert scan((tmp_path / "input" / "labels.csv").read_bytes()), "the scan must see what it looks for"
    for message in messages:
        assert not scan(message)


def test_a_basis_that_the_site_does_not_vouch_for_is_private_and_not_priced(tmp_path: Path) -> None:
    """P6, through the real commands: the same file, without its digest in site.toml."""
    digits.write_hospital(tmp_path / "input", 0, 1, 12, 2, np.random.default_rng(3))
    (tmp_path / "basis.safetensors").write_bytes(public_basis(digits.split(1, 12, 2).public))
    with Federation(tmp_path) as federation:
        federation.join("site-a")
        settings = tmp_path / "site-a" / "site.toml"
        settings.write_text(settings.read_text().replace("127.0.0.1:1", f"127.0.0.1:{federation.port}", 1))
        command = [python(), "-m", "agent", "--home", str(tmp_path / "site-a")]
        release = ["release", "ksame", "--basis", str(tmp_path / "basis.safetensors"), "--modality", "OT", "--k", "5"]
        subprocess.run([*command, "ingest"], check=True, capture_output=True)
        done = subprocess.run([*command, *release], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "provenance: the encoder is private" in done.stdout
        assert not federation.store.state.releases
