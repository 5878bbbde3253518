"""Admitted releases on disk. An artifact is durable before the ledger admits it, and visible only after."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import secrets
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.edges.home import write_durably
from policies.claims import RELATION, UNIT
from policies.entries import Admitted, Opened
from policies.rdp import NANO, epsilon_nano
from policies.review import Verdict
from policies.statement import Release, claim_from, load_json
from policies.store import Store

WORDING = {
    "A": "(epsilon, delta)-differential privacy for each patient",
    "B": "k distinct patients behind every image, by components that do not depend on them",
    "C": "empirical only: tested by attacks, without a guarantee",
}


class Shelf:
    """``releases/<id>/`` for each admitted release, ``.staging/`` for bytes without a verdict."""

    def __init__(self, root: Path, store: Store) -> None:
        """Finish what a crash left: admitted artifacts get their place, the others are removed."""
        self.root, self.store = root, store
        self.staging = root / ".staging"
        self.staging.mkdir(parents=True, exist_ok=True)
        admitted = {entry.artifact.hex(): entry for entry in store.state.releases.values() if not entry.run}
        for staged in sorted(self.staging.iterdir()):
            entry = admitted.get(staged.name)
            if entry is None:
                staged.unlink()
                continue
            with contextlib.suppress(OSError, tarfile.TarError):  # what cannot be placed now stays for the next start
                self._place(staged, entry, store.envelope(entry.envelope) or b"")

    def stage(self, digest: str, body: bytes) -> Path:
        """Make bytes durable under the digest their statement gives; a review decides about them."""
        path = self.staging / digest
        write_durably(path, body)
        return path

    def settle(self, staged: Path, release: Release, envelope: bytes, verdict: Verdict) -> None:
        """After the verdict is durable: put an admitted artifact in its place, remove a refused one."""
        entry = self.store.state.releases.get(release.release)
        if verdict.admitted and entry is not None and not release.run:
            self._place(staged, entry, envelope)
        else:
            staged.unlink(missing_ok=True)

    def _place(self, staged: Path, entry: Admitted, envelope: bytes) -> None:
        folder = self.root / entry.release
        if _holds(folder, entry.artifact):  # placed before
            staged.unlink(missing_ok=True)
            return
        if not staged.exists() or hashlib.sha256(staged.read_bytes()).digest() != entry.artifact:
            return
        part = self.root / f".{entry.release}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        body = staged.read_bytes()
        write_durably(part / "images.tar", body)
        _unfold(body, part / "images")
        (part / "envelope.json").write_bytes(envelope)
        facts = certificate(entry, self.account(entry))
        (part / "certificate.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
        if folder.exists():  # not this release, or cut short by a crash: moved aside, never removed
            folder.rename(self.root / f".{entry.release}.{secrets.token_hex(4)}.aside")
        part.rename(folder)
        staged.unlink(missing_ok=True)

    def account(self, entry: Admitted) -> Opened:
        """The account that paid for a release."""
        return self.store.state.accounts[self.store.state.grants[entry.grant].reserved.account].opened

    def place_model(self, run: str, body: bytes, facts: dict[str, Any], envelopes: Mapping[str, bytes]) -> None:
        """The final model of a federated run, with its certificate and the envelope of every update in it."""
        folder = self.root / run
        (folder / "updates").mkdir(parents=True, exist_ok=True)
        for name, envelope in envelopes.items():
            write_durably(folder / "updates" / f"{name}.envelope.json", envelope)
        write_durably(folder / "model.safetensors", body)
        write_durably(folder / "certificate.json", (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode())


def _unfold(body: bytes, into: Path) -> None:
    """The files of an image set, which was read strictly before it was admitted: plain names, no folders, no links.

    Not by ``extractall``: its ``filter`` is missing from the Python of Debian 12.
    """
    into.mkdir()
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isreg() else None
            assert stream is not None, "an admitted image set holds plain files"
            assert Path(member.name).name == member.name, "an admitted image set has plain names"
            (into / member.name).write_bytes(stream.read())


def _holds(folder: Path, digest: bytes) -> bool:
    """Is the artifact of that SHA-256 in the folder, whole?"""
    path = folder / "images.tar"
    return path.exists() and hashlib.sha256(path.read_bytes()).digest() == digest


def certificate(entry: Admitted, opened: Opened) -> dict[str, Any]:
    """What a release certificate prints, and nothing stronger than its level; ``opened`` is the account that paid."""
    claim = claim_from(load_json(entry.claim))
    privacy: dict[str, Any] = {}
    if entry.level == "A":
        epsilon = epsilon_nano(claim, float(opened.delta), opened.order) / NANO
        privacy = {"epsilon": epsilon, "delta": float(opened.delta), "order": opened.order}
        privacy |= {"unit": UNIT, "relation": RELATION}
    return {
        **privacy,
        "release": entry.release,
        "site": entry.site,
        "mechanism": entry.mechanism,
        "level": entry.level,
        "meaning": WORDING[entry.level],
        "claim": json.loads(entry.claim),
        "artifact_sha256": entry.artifact.hex(),
        "statement_sha256": entry.envelope.hex(),
    }
