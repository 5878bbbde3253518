"""Predictions as jobs: what names a patient is sealed, and in that job alone.

The record of such a job says ``--study sealed``. The Study Instance UID lies sealed beside it, under a key of the
project, and is deleted with the job's end, whichever end that is (:meth:`agent.service.jobs.JobStore.change`). The
results go from memory into the vault, and leave it when they are fetched.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from agent.errors import CommandError
from agent.pacs import archive
from agent.service.job_outputs import clear_results, result_place
from agent.service.jobs import Job, JobStateError
from agent.storage import projects
from agent.storage.encrypted_sqlite import derive
from agent.storage.site_directory import SiteDirectory
from agent.storage.vault import Vault

SEALED: Final = "sealed"  # in the place of a word that names a patient, or a place
_STUDY: Final = "study.sealed"  # in the folder ``in``
_VALUES: Final = {  # of the options that take one: no free text
    "--study": re.compile(SEALED),
    "--out": re.compile(SEALED),
    "--from": archive.NAME,
    "--project": projects.NAME,
    "--device": re.compile("auto|cpu|cuda"),
}
_NONCE: Final = 12


def check_words(words: Sequence[str]) -> None:
    """Refuse a record that would name a patient: only what is queued by ``predict ... --detach`` is taken.

    Raises:
        CommandError: the words are others.
    """
    left = list(words[2:])
    taken = list(words[:2]) == ["predict", "in/model"]
    while taken and left:
        option = left.pop(0)
        if option in _VALUES:
            taken = bool(left) and _VALUES[option].fullmatch(left.pop(0)) is not None
        else:
            taken = option in ("--vault", "--json")
    if not taken:
        raise CommandError("a prediction is queued by `predict ... --detach`, which seals what names a patient")


def _cipher(home: SiteDirectory, project: str) -> AESGCM:
    return AESGCM(derive(projects.keys(home, project).rooms, "job/study"))


def seal_study(home: SiteDirectory, project: str, key: str, uid: str, folder: Path) -> None:
    """Write the UID sealed into a job's folder; ``key``: the job's."""
    nonce = os.urandom(_NONCE)
    box = nonce + _cipher(home, project).encrypt(nonce, uid.encode(), key.encode())
    (folder / "in" / _STUDY).write_bytes(box)


def prepare(home: SiteDirectory, folder: Path, job: Job, arguments: argparse.Namespace) -> None:
    """Give a parsed command what its record has not: the study, and where its results go.

    Raises:
        JobStateError: the study cannot be opened.
    """
    if arguments.study:
        with suppress(OSError, InvalidTag, ValueError):
            box = (folder / "in" / _STUDY).read_bytes()
            opened = _cipher(home, job.project).decrypt(box[:_NONCE], box[_NONCE:], job.key.encode())
            arguments.study = opened.decode()
        if arguments.study == SEALED:
            raise JobStateError("what was to be predicted is gone: type `predict ... --detach` again")
    arguments.keep = partial(_keep, job)


def _keep(job: Job, vault: Vault, opted_out: Set[str], files: Mapping[str, bytes]) -> None:
    """Seal the results into the vault.

    Raises:
        CommandError: a patient has opted out since the images were read; nothing is kept.
    """
    for name, body in files.items():
        vault.place(result_place(job, name)).write(body)
    if vault.opted_out() != opted_out:  # asked when all is written: who opts out later finds it there
        clear_results(vault, job)
        raise CommandError("a patient opted out while the model ran: nothing was kept; type the command again")
