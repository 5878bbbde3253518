"""Admitted releases on disk. An artifact is durable before the ledger admits it, and visible only after."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from coordinator.claim_descriptions import evidence, figures, release_in
from coordinator.explanations import LEVELS
from coordinator.storage.uploads import is_open, ready
from policies.accounting.claims import RELATION, UNIT, assumption
from policies.accounting.rdp import NANO, epsilon_nano
from policies.ledger.entries import Admitted, Opened
from policies.ledger.store import Store
from policies.review.rules import TERMS, Verdict
from policies.statements import Release, claim_from, load_json
from protos.artifacts.chunks import CHUNK
from protos.common.durable_files import flush_directory, flush_file, replace_file

WORDING: Final = {level: meaning for level, (_, meaning, _) in LEVELS.items()}
UNSEEN: Final = (
    "declared by the site as encrypted to this reader; the coordinator has seen only that it has that form"
)
SEALED: Final = "artifact.hpke"
_NAMES: Final = {"image-set": "images.tar", "volume-set": "volumes.tar", "model": "model.safetensors"}


class ReleaseStore:
    """``releases/<id>/`` for each admitted release; ``uploads/`` beside it is where they come in, without a verdict.

    That directory, ``staging``, is the root of :class:`coordinator.storage.uploads.Uploads`, which is opened after
    this: what is admitted and not in its place yet is put there first.
    """

    def __init__(self, root: Path, store: Store) -> None:
        """Finish what a crash left: admitted artifacts get their place; others stay while their upload is open."""
        self.root, self.store = root, store
        self.staging = root.parent / "uploads"
        root.mkdir(parents=True, exist_ok=True)
        for site, digest, staged in ready(self.staging):
            mine = self._admitted(site, bytes.fromhex(digest))
            with contextlib.suppress(OSError, tarfile.TarError):  # what cannot be placed stays for the next start
                for entry in mine:
                    self._place(staged, entry, store.envelope(entry.envelope) or b"")
                if mine or not is_open(self.staging, site, digest):
                    staged.unlink(missing_ok=True)

    def _admitted(self, site: str, artifact: bytes) -> list[Admitted]:
        """The releases of a site that are these bytes; updates of a run are not shelved."""
        with self.store.exclusive() as state:
            return [e for e in state.releases.values() if (e.site, e.artifact, e.run) == (site, artifact, "")]

    def settle(self, staged: Path, release: Release, envelope: bytes, verdict: Verdict) -> None:
        """After the verdict is durable: put an admitted artifact in its place, remove a refused one.

        Args:
            staged: the finished file of :meth:`coordinator.storage.uploads.Uploads.finish`.
            release: what was reviewed.
            envelope: the sealed statement, byte for byte.
            verdict: the review's.
        Raises:
            OSError: it cannot be placed now; it stays where it is, and the next start places it.
        """
        entry = self.store.state.releases.get(release.release)
        if verdict.admitted and entry is not None and not release.run:
            self._place(staged, entry, envelope)
        staged.unlink(missing_ok=True)

    def _place(self, staged: Path, entry: Admitted, envelope: bytes) -> None:
        said = release_in(envelope)
        folder, name = self.root / entry.release, _name(entry, said)
        if _is(folder / name, entry.artifact):  # placed before
            return
        source = self._source(staged, entry)
        if source is None:
            return
        part = self.root / f".{entry.release}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _same(source, part / name)
        if name == _NAMES["image-set"]:
            _unfold(part / name, part / "images")
        replace_file(part / "envelope.json", envelope)
        facts = {**certificate(entry, self.account(entry)), **_measured(entry, said)}
        replace_file(part / "certificate.json", (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode())
        if folder.exists():  # not this release, or cut short by a crash: moved aside, never removed
            folder.rename(self.root / f".{entry.release}.{secrets.token_hex(4)}.aside")
        part.rename(folder)
        flush_directory(self.root)

    def _source(self, staged: Path, entry: Admitted) -> Path | None:
        """The entry's bytes: staged, or on the shelf where the same were released under two grants."""
        twins = self._admitted(entry.site, entry.artifact)
        said = {twin.release: release_in(self.store.envelope(twin.envelope) or b"") for twin in twins}
        places = [staged, *(self.root / twin.release / _name(twin, said[twin.release]) for twin in twins)]
        return next((path for path in places if _is(path, entry.artifact)), None)

    def account(self, entry: Admitted) -> Opened:
        """The account that paid for a release."""
        return self.store.state.accounts[self.store.state.grants[entry.grant].reserved.account].opened

    def place_model(
        self, run: str, model: Path | bytes, facts: dict[str, Any], envelopes: Mapping[str, bytes]
    ) -> None:
        """The final model of a federated run, with its certificate and the envelope of every update in it.

        Args:
            run: the run's name.
            model: safetensors; a file is linked or copied, and stays where it is.
            facts: the certificate.
            envelopes: each update's sealed statement, by its release.
        """
        folder = self.root / run
        (folder / "updates").mkdir(parents=True, exist_ok=True)
        for name, envelope in envelopes.items():
            replace_file(folder / "updates" / f"{name}.envelope.json", envelope)
        if isinstance(model, bytes):
            replace_file(folder / "model.safetensors", model)
        else:
            part = folder / "model.safetensors.part"
            part.unlink(missing_ok=True)
            _same(model, part)
            part.replace(folder / "model.safetensors")
            part.unlink(missing_ok=True)  # a rename to another link of the same file does nothing (POSIX)
            flush_directory(folder)
        replace_file(folder / "certificate.json", (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode())


def _name(entry: Admitted, said: Release | None) -> str:
    """What a release's artifact is called on the shelf: by its type, which its statement says within the law."""
    if entry.reader:
        return SEALED
    terms = TERMS.get(entry.mechanism)
    kind = said.artifact_type if said else terms.artifact_type if terms else ""
    return _NAMES.get(kind, "artifact")


def _is(path: Path, digest: bytes) -> bool:
    """Is this a file of that SHA-256? Read a piece at a time."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest() == digest
    except FileNotFoundError:
        return False


def _same(source: Path, target: Path) -> None:
    """The same bytes under another name, durable; on a file system without links, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    flush_file(target)
    flush_directory(target.parent)


def _unfold(archive: Path, into: Path) -> None:
    """The files of an image set, which was read strictly before it was admitted: plain names, no folders, no links.

    Not by ``extractall``: its ``filter`` is missing from the Python of Debian 12. Neither the set nor its list of
    members is ever in memory.
    """
    into.mkdir()
    with tarfile.open(archive, "r:") as opened:
        while (member := opened.next()) is not None:
            stream = opened.extractfile(member) if member.isreg() else None
            assert stream is not None, "an admitted image set holds plain files"
            assert Path(member.name).name == member.name, "an admitted image set has plain names"
            with (into / member.name).open("xb") as out:
                shutil.copyfileobj(stream, out, CHUNK)
            opened.members.clear()  # type: ignore[attr-defined]
    os.sync()  # once, where a flush for each image would take a disk's time for each


def _measured(entry: Admitted, said: Release | None) -> dict[str, Any]:
    """What the site's sealed statement says that its entry does not; at level C both figures in a sentence."""
    facts = figures(said)
    weak = {"tested": evidence(facts.get("reid_rate"), facts.get("vetting_power"))} if entry.level == "C" else {}
    return {**facts, **weak}


def certificate(entry: Admitted, opened: Opened) -> dict[str, Any]:
    """What a release certificate prints, and nothing stronger than its level; ``opened`` is the account that paid."""
    claim = claim_from(load_json(entry.claim))
    privacy: dict[str, Any] = {}
    if entry.level in ("A", "A*"):
        epsilon = epsilon_nano(claim, float(opened.delta), opened.order) / NANO
        privacy = {"epsilon": epsilon, "delta": float(opened.delta), "order": opened.order}
        privacy |= {"unit": UNIT, "relation": RELATION}
    if taken := assumption(claim):
        privacy["assumption"] = taken
    if entry.reader:
        privacy |= {"reader": entry.reader, "unseen": UNSEEN}
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
