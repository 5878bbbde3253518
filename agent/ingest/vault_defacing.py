"""Deface the pending studies of the vault, one by one, by the table ``[faces]`` of ``ingest.toml``.

A study is replaced completely, in one transaction, or stays withheld as it is: no release may use a head with a face.
The reason is recorded, and the study is tried again when it, or the method, changes.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import numpy as np
import pydicom
from numpy.typing import NDArray

from agent.defacing.engine import DefacingMethod, take_off, tools
from agent.deidentify.pixels import pixel_data
from agent.errors import SiteConfigError
from agent.ingest.context import IngestContext
from agent.storage.encrypted_sqlite import VaultError
from agent.storage.instance_index import DefacedInstance, FaceInstance
from agent.storage.vault import Vault
from agent.storage.withheld_series import volumes_of
from agent.volumes.errors import NotDefacedError
from agent.volumes.volume_io import VolumeSource

NOTE: Final = "faces"  # of the project: study -> [why, how many instances, by what]


@dataclass(frozen=True, slots=True)
class Swept:
    """What became of the studies that may show a face."""

    studies: int
    defaced: int
    kept: Mapping[str, int]  # why -> studies


def sweep(
    way: IngestContext,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
    stopping: Callable[[], bool] = lambda: False,
    *,
    once_more: bool = False,
) -> Swept:
    """De-face what waits.

    Args:
        way: of one project.
        progress: studies done, and of how many.
        stopping: asked before each study.
        once_more: also those that were refused before, though nothing of them has changed.

    Raises:
        SiteConfigError: no method is configured.
        NetworkConfigError: the network is not what the configuration says.
        VaultError: the disk; every study is as it was, or de-faced.
    """
    settings = way.ingestion.faces
    if settings is None:
        raise SiteConfigError("ingest.toml has no table [faces]: head scans stay withheld")
    waiting = way.vault.faces()
    known: dict[str, list[object]] = way.vault.project_note(NOTE) or {}
    if gone := known.keys() - dict(waiting):  # de-faced since, or of a patient who has opted out
        known = {study: told for study, told in known.items() if study not in gone}
        way.vault.write_project_note(NOTE, known)
    if not waiting:
        return Swept(0, 0, {})
    if settings.network is not None and settings.network_sha256 not in way.home.settings().public_components:
        raise SiteConfigError(
            "site.toml's public_components does not vouch that the network of [faces] saw no patient"
        )
    with_ = tools(settings)
    kept: Counter[str] = Counter()
    done = 0
    for number, (study, count) in enumerate(waiting):
        if stopping():
            break
        before = known.get(study)
        if before is not None and before[1:] == [count, with_.made_of] and not once_more:
            kept[str(before[0])] += 1
        else:
            why = _one(way.vault, study, with_)
            if why:
                kept[why] += 1
                known[study] = [why, count, with_.made_of]
            else:
                done += why is not None
                known.pop(study, None)
            way.vault.write_project_note(NOTE, known)
        progress(number + 1, len(waiting))
    way.vault.overwrite()
    return Swept(done + sum(kept.values()), done, dict(sorted(kept.items())))


def _one(vault: Vault, study: str, with_: DefacingMethod) -> str | None:
    """Replace a study by one without faces; or why it stays. "": it is done; None, it is gone or another by now."""
    faces = vault.faces_of(study)
    if not faces:
        return None
    try:
        sources, whose = volumes_of(faces)
        taken = take_off(sources, with_)
        bare = [
            one
            for source, group, values in zip(sources, whose, taken.values, strict=True)
            for one in _bare(source, group, values)
        ]
    except NotDefacedError as error:
        return error.code
    except VaultError:
        raise
    except Exception:  # noqa: BLE001 - one study must not keep the others waiting; its text may quote the file
        return "fault"
    try:
        vault.defaced(bare)
    except KeyError:  # its patient has opted out meanwhile, or another sweep was faster
        return None
    return ""


def _bare(source: VolumeSource, group: list[FaceInstance], values: NDArray[np.generic]) -> list[DefacedInstance]:
    """The new files under the old names, and of single images their pixels in [0, 1], as the reader makes them."""
    out = []
    for face, payload in zip(group, source.encoded(values), strict=True):
        if face.kind == "volume":
            out.append(DefacedInstance(face.name, payload, before=sha256(face.payload).hexdigest()))
            continue
        dataset = pydicom.dcmread(io.BytesIO(payload))
        stored = pixel_data.decode(dataset, str(dataset.file_meta.TransferSyntaxUID))
        unit = np.ascontiguousarray(pixel_data.unit_range(pixel_data.native(dataset, stored), stored), np.float32)
        out.append(DefacedInstance(face.name, payload, unit, sha256(face.payload).hexdigest()))
    return out
