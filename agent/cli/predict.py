"""``predict``: use a model of the pool on a study, a folder, or the vault. Research, not for diagnosis.

Everything that names a patient is in this process's memory and, at the end, in the folder that was asked for; of a
job, sealed in the vault (:mod:`agent.service.prediction_jobs`).
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from agent.cli.model_use import network_here, require_use
from agent.cli.output import answered_ingest, print_progress, print_stderr, say
from agent.deidentify.errors import REASONS
from agent.errors import CommandError
from agent.event_log import open_log
from agent.ingest import retrieval
from agent.ingest.context import IngestContext, open_ingest
from agent.pacs.archive import ArchiveConfig, ArchiveError
from agent.pacs.dicomweb.config import DicomWebError
from agent.pacs.dimse.storage_scu import store_all
from agent.prediction.model_folder import ExportedModel, read_model_folder
from agent.prediction.result_folder import NOTICE, refuse_place, write
from agent.prediction.studies import MemoryStudies, folder_files, reading
from agent.service.jobs import BUSY
from agent.storage.site_directory import SiteDirectory
from agent.storage.vault import Vault
from agent.volumes.dicom_series import parsed
from policies.tasks.task import SEGMENTATION

if TYPE_CHECKING:
    from pydicom import Dataset

    from agent.prediction.predictor import NotPredicted, Prediction
    from agent.prediction.results import Results


@dataclass(frozen=True, slots=True)
class VaultStudies:
    """The vault, whose results name what they are of as the vault does: by pseudonyms."""

    vault: Vault
    refused: ClassVar[Mapping[str, int]] = MappingProxyType({})  # nothing: it was read when it came

    def __getattr__(self, name: str) -> Any:
        """All but :meth:`header` is the vault's."""
        return getattr(self.vault, name)

    def header(self, name: str) -> Dataset:
        """The header of the de-identified file. Raises: NotDefacedError, it is none of DICOM."""
        return parsed(self.vault.payload(name), pixels_too=False)[0]


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command; what it expects to go wrong becomes a sentence and exit status 1."""
    return answered_ingest(_predict if arguments.keep is None else _predict_as_job, arguments)


def _predict_as_job(arguments: argparse.Namespace) -> int:
    """What an archive may do better later is tried again later."""
    try:
        return _predict(arguments)
    except (ArchiveError, DicomWebError) as error:
        if not (error.passing if isinstance(error, ArchiveError) else error.retry):
            raise
        print_stderr(f"refused: {error}")
        return BUSY


def _predict(arguments: argparse.Namespace) -> int:
    """Check the model and the site's word on it, then read, predict, write, and send."""
    home = SiteDirectory(arguments.home)
    read_study(arguments)
    model = read_model_folder(arguments.model, home.coordinator_key())
    require_use(home, model, arguments)
    with open_ingest(home, arguments.project) as way:
        if arguments.keep is None:
            refuse_place(arguments.out, own_folders(way))
        archive = _archive(way, arguments.send) if arguments.send else None
        if archive is not None and model.task.kind != SEGMENTATION:
            raise CommandError("--send: only segmentations are sent to an archive; this model makes a table")
        with _images(way, model, arguments) as images:  # they are read while torch and the network are loaded
            from agent.prediction.predictor import (  # noqa: PLC0415
                NotPredicted,
                Prediction,
                of_accelerator,
                predict,
            )
            from agent.prediction.results import Results, results  # noqa: PLC0415

            network = network_here(home, model, arguments)
            store = images()
            gc.freeze()  # what was loaded is no garbage: to look through it costs a second
        excluded = way.vault.opted_out()
        found = list[Prediction]()
        left = [NotPredicted(_refusal(code), count) for code, count in store.refused.items()]
        with of_accelerator():
            for one in predict(model.task, network, store, excluded, here=way.ingestion.rule_here):
                if isinstance(one, Prediction):
                    found.append(one)
                    print_progress("predict", f"{len(found)} done", arguments.json)
                else:
                    left.append(one)
        if way.vault.opted_out() != excluded:
            raise CommandError("a patient opted out while the model ran: nothing was written; type the command again")
        made, lost = results(model, store, found, way.ingestion.rules.segments) if found else (Results({}, ()), [])
        done = bool(found) and (model.task.kind != SEGMENTATION or bool(made.objects))
        if done:
            if arguments.keep is None:
                write(arguments.out, made.files)
            else:
                arguments.keep(way.vault, excluded, made.files)
    open_log(home.root / "agent.log").info("predicted", count=len(found))
    sent = _send(archive, made, arguments) if done and archive is not None else None
    _say(arguments, model, found, made if done else Results({}, ()), [*left, *lost], sent)
    return 0 if done and (sent is None or sent == len(made.objects)) else 1


def read_study(arguments: argparse.Namespace) -> None:
    """``--study -``: the UID is read from standard input, since other users of the machine see command lines."""
    if arguments.study == "-":
        if sys.stdin.isatty():
            print_stderr("Study Instance UID:")
        arguments.study = sys.stdin.readline().strip()


def own_folders(way: IngestContext) -> list[Path]:
    """Where no results may be: the agent's own, and what ``ingest`` reads."""
    return [way.home.root, *(one.path for one in (way.usual(), *way.ingestion.folders))]


# -- where the images come from


def _archive(way: IngestContext, name: str) -> ArchiveConfig:
    found = retrieval.named(way.ingestion, "pacs", name)
    assert isinstance(found, ArchiveConfig)
    return found


def _images(
    way: IngestContext, model: ExportedModel, arguments: argparse.Namespace
) -> AbstractContextManager[Callable[[], VaultStudies | MemoryStudies]]:
    """The images, which are read from now on; what waits for them."""
    if arguments.vault:
        return nullcontext(partial(VaultStudies, way.vault))
    if arguments.folder is not None:
        files = folder_files(arguments.folder)
    else:
        now, modality = dt.datetime.now(), model.task.input.modality
        files = retrieval.fetch_study(way.ingestion, arguments.archive, arguments.study, modality, now)
    print_progress("read", f"{len(files)} files", arguments.json)
    return reading(way, files)


def _refusal(code: str) -> str:
    return f"{code}: {REASONS[code]}"


# -- what became of it


def _send(archive: ArchiveConfig, made: Results, arguments: argparse.Namespace) -> int:
    """Send every segmentation; how many were stored. The folder has them whatever happens."""
    try:
        return store_all(archive, made.objects)
    except ArchiveError as error:
        told = f"nothing is lost: {arguments.out.name} has the segmentations"
        print_stderr(f"not sent: {error}; {told}")
        return -1


def _say(
    arguments: argparse.Namespace,
    model: ExportedModel,
    found: list[Prediction],
    made: Results,
    left: Iterable[NotPredicted],
    sent: int | None,
) -> None:
    why = Counter[str]()
    for one in left:
        why[one.why] += one.images
    if arguments.json:
        told = {
            "model": model.name,
            "sha256": model.sha256,
            "task": model.task.digest,
            "predictions": len(found),
            "files": sorted(made.files),
            "left_out": [{"why": reason, "images": count} for reason, count in why.items()],
            "sent": None if sent is None else max(sent, 0),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        return
    for reason, count in why.items():
        say(f"{count} images are left out: {reason}")
    if not made.files:
        say("nothing was written")
        return
    where = "wrote " + arguments.out.name if arguments.keep is None else "sealed for `jobs fetch`"
    say(f"{where}: {len(found)} predictions in {len(made.files)} files. {NOTICE}")
    if sent is not None and sent >= 0:
        say(f"{sent} segmentations were stored in {arguments.send}")
