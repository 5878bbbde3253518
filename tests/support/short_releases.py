"""What leaves by the mechanisms that only the long form of the demo shows, made in a second of the demo's patients.

The vaults are copies of those that the demo filled from DICOM, the ledgers real; networks and trainings are the
smallest that there are. An untrained verifier knows nobody, so the vetting of a distillation is taken at its word.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.domain import Selection
from agent.dp.noise import SystemEntropy
from agent.errors import CohortTooSmallError
from agent.mechanisms.kanonymous_config import read_synthesis
from agent.release.pipeline import release_resumable, release_synthetic
from agent.release.unsent import PART
from agent.storage.projects import open_vault
from agent.storage.site_directory import SiteDirectory
from agent.storage.vault import Vault
from deploy.demo import eyes
from deploy.demo.kept_networks import lay
from deploy.demo.scene import SITES, K, L
from deploy.demo.train_networks import RECIPES
from policies.review.policy import preset
from protos.artifacts.arrays import unpack_images
from protos.secagg.messages import SumStep
from tests.support.federated_sites import SecureRun
from tests.support.ledger_world import Hospital
from tests.support.site_world import DirectCoordinatorClient, admission, permissive, site_of
from tests.support.small_distillation import believe_the_vetting
from tests.support.small_mechanisms import CENTROIDS, DISTILL, DISTILL_DP, MASKED
from tests.support.small_tasks import changed

OF_DIGITS = {"distill": DISTILL, "distill-dp": DISTILL_DP, "centroids": CENTROIDS}
SITE = eyes.SITE
SHORT = (*OF_DIGITS, "anonfaces", "federated-masked")


@dataclass(frozen=True)
class Left:
    """What left a hospital, and of whom it was made."""

    parts: tuple[bytes, ...]  # artifacts, envelopes, both ledgers
    made: NDArray[Any]  # released pictures
    patients: NDArray[Any]  # every picture of a patient in the selection, in the same form
    names: frozenset[str]  # pseudonyms
    clusters: tuple[tuple[tuple[str, ...], ...], ...]  # of each k-anonymous release from this vault, the demo's too


def short_release(name: str, work: Path, patients: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Left:
    """One release to its verdict.

    Args:
        name: of the mechanism: one of ``SHORT``.
        work: of the demo.
        patients: of each hospital in it.
        folder: an empty one.
        monkeypatch: for the vetting.
    """
    if name == "federated-masked":
        return _sum_in_secret(work, patients, folder)
    if name != "anonfaces":
        return _one_release(name, work, folder, monkeypatch, "")
    for division in map(str, range(10)):  # by secret keys: one in sixteen leaves no picture that looks like nobody
        (own := folder / division).mkdir()
        with suppress(CohortTooSmallError):
            return _one_release(name, work, own, monkeypatch, division)
    raise AssertionError("ten divisions left AnonFACES no picture")


def _one_release(name: str, work: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, division: str) -> Left:
    shutil.copytree(work / SITE, folder / SITE)
    text = permissive(preset("internal")).replace("epsilon = 8.0", "epsilon = 100.0")
    text = text.replace("max_releases_per_patient = 1", "max_releases_per_patient = 3")
    hospital = Hospital(SITE, text)
    intake = admission(folder / "hub.db", text, hospital)
    with closing(intake.register.store), closing(open_vault(SiteDirectory(folder / SITE), "main")) as vault:
        site = site_of(folder, hospital, vault, DirectCoordinatorClient(intake, SITE))  # type: ignore[arg-type]
        with closing(site.ledger.store):
            selection = Selection("OT", OF_DIGITS[name].shape, fit=True) if name in OF_DIGITS else None
            if selection:
                believe_the_vetting(monkeypatch)
                signed, verdict = release_resumable(site, OF_DIGITS[name], selection, SystemEntropy())
            else:
                asked = _anonfaces(folder, division)
                selection = asked.selection
                signed, verdict = release_synthetic(site, asked.mechanism, selection, np.random.default_rng(1))
            assert verdict.admitted, verdict.findings
            cohort = vault.cohort(selection)
            record = vault.note("releases")
    made, _ = unpack_images(signed.artifact)
    return Left(
        (signed.artifact, signed.envelope, *_ledger(folder)),
        made,
        np.stack([np.rint(i.pixels * 255).astype(np.uint8) for p in cohort.patients for i in p.images]),
        frozenset(p.pseudonym for p in cohort.patients),
        tuple(tuple(map(tuple, one["clusters"])) for one in record if one.get("clusters")),
    )


def _ledger(folder: Path) -> list[bytes]:
    """The coordinator's ledger and the sites' own, with what is not yet written through."""
    return [path.read_bytes() for path in sorted(folder.glob("*.db*"))]


def _anonfaces(folder: Path, division: str) -> Any:
    """As the long form asks for it, with its own networks."""
    digests = lay([RECIPES[n] for n in ("generator", "encoder", "recogniser-0", "recogniser-1")], folder / "networks")
    return read_synthesis(
        eyes.configure("anonfaces", folder, K, L, division), "anonfaces", frozenset(digests.values())
    )


def _sum_in_secret(work: Path, patients: int, folder: Path) -> Left:
    """One round under secure aggregation of three hospitals' digits, until their masked parts are admitted."""
    job = changed(MASKED, rounds=2, noise_multiplier=8.0, learning_rate=10.0)
    with ExitStack() as open_:
        vaults: dict[str, Vault] = {}
        for site in SITES:
            shutil.copytree(work / site, folder / site)
            vaults[site] = open_.enter_context(closing(open_vault(SiteDirectory(folder / site), "main")))
            vaults[site].write_note(PART, None)  # the demo's last round, if its end was not heard of: by other keys
        trial = SecureRun(folder, job=job, vaults=vaults)  # type: ignore[arg-type]
        trial.granted()
        sent: list[bytes] = []
        admit = trial.admit
        trial.admit = lambda *told: (sent.extend(told[1:]), admit(*told))[1]  # type: ignore[method-assign]
        trial.play(until=SumStep.REVEAL)
        trial.intake.register.store.close()
        cohorts = [vault.cohort("OT", job.shape) for vault in vaults.values()]
    return Left(
        (*sent, *_ledger(folder)),
        np.empty((0, *job.shape), np.uint8),
        np.stack([np.rint(i.pixels * 255).astype(np.uint8) for c in cohorts for p in c.patients for i in p.images]),
        frozenset(p.pseudonym for c in cohorts for p in c.patients),
        (),
    )
