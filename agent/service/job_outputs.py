"""The files that jobs write. What may show patients is sealed into the vault of the job's project when the job ends.

It ends with the project, with the job, and with an opt-out of any patient of the project
(:func:`agent.storage.projects.purge`). A training on public images keeps its folder, since it goes on from there.
"""

from __future__ import annotations

import shutil
from contextlib import closing

from agent.service.jobs import DONE, TRAINING, Job, JobStore
from agent.storage import projects
from agent.storage.site_directory import SiteDirectory
from agent.storage.vault import JOB_OUTPUTS, Vault


def output_names(job: Job) -> list[str]:
    """The names of the files, or of the folder, that a job was told to write."""
    values = (word.partition("=")[2] if word.startswith("--") else word for word in job.words)
    return sorted({value.removeprefix("out/") for value in values if value.startswith("out/")})


def seal_outputs(home: SiteDirectory, store: JobStore, job: Job) -> None:
    """Move what a job wrote into the vault.

    Raises:
        VaultError, OSError: the vault or the disk failed; what was written is deleted with the next attempt.
    """
    folder = store.folder(job.number) / "out"
    written = [name for name in output_names(job) if (folder / name).is_file()]
    if not written or job.lane == TRAINING:
        return
    with closing(projects.open_vault(home, job.project)) as vault:
        for name in written:
            vault.place(_place(job, name)).write((folder / name).read_bytes())
    shutil.rmtree(folder)


def read_output(vault: Vault, store: JobStore, job: Job, name: str) -> bytes | None:
    """A file that the job wrote; None: it wrote none, or it is gone."""
    if job.lane == TRAINING:
        path = store.folder(job.number) / "out" / name
        return path.read_bytes() if path.is_file() else None
    return vault.place(_place(job, name)).read()


def trained_files(store: JobStore, job: Job) -> list[str]:
    """What a finished training wrote, relative to its folder ``out``; of any other job none."""
    folder = store.folder(job.number) / "out"
    if job.lane != TRAINING or job.state != DONE:
        return []
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))


def clear_outputs(home: SiteDirectory, job: Job) -> None:
    """Delete what the job wrote, of the vault."""
    if output_names(job) and job.project in projects.names(home):
        with closing(projects.open_vault(home, job.project)) as vault:
            for name in output_names(job):
                vault.place(_place(job, name)).clear()


def _place(job: Job, name: str) -> str:
    return f"{JOB_OUTPUTS}{job.number}/{name}"
