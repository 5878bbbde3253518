"""The files that jobs write. What may show patients is sealed into the vault of the job's project when the job ends.

It ends with the project, with the job, and with an opt-out of any patient of the project
(:func:`agent.storage.projects.opt_out`). A training on public images keeps its folder, since it goes on from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Container, Set
from contextlib import closing
from itertools import pairwise

from agent.errors import SiteStorageError
from agent.service.jobs import DONE, MADE, PREDICTION, TRAINING, Job, JobStateError, JobStore
from agent.storage import projects
from agent.storage.site_directory import SiteDirectory
from agent.storage.vault import JOB_OUTPUTS, Vault
from policies.statements import release_id


def output_names(job: Job) -> list[str]:
    """The names of the files, or of the folder, that a job was told to write."""
    values = (word.partition("=")[2] if word.startswith("--") else word for word in job.words)
    return sorted({value.removeprefix("out/") for value in values if value.startswith("out/")})


def seal_outputs(home: SiteDirectory, store: JobStore, job: Job, opted_out: Set[str]) -> None:
    """Move what a job wrote into the vault.

    Args:
        home: the site's directory.
        store: of its jobs.
        job: which has ended.
        opted_out: who had opted out before it began; if anybody has since, nothing is kept.
    Raises:
        VaultError, OSError: the vault or the disk failed; the service deletes what was written.
    """
    folder = store.folder(job.number) / "out"
    written = [name for name in output_names(job) if (folder / name).is_file()]
    if not written or job.lane == TRAINING:
        return
    with closing(projects.open_vault(home, job.project)) as vault:
        for name in written:
            vault.place(result_place(job, name)).write((folder / name).read_bytes())
        if vault.opted_out() != opted_out:  # asked when all is written: who opts out later finds it there
            vault.clear_job_outputs()
    shutil.rmtree(folder)


def keep_released(home: SiteDirectory, release: str, clear: bytes, opted_out: Set[str]) -> None:
    """Seal what has left into the vault, for the job that made it and was told to write it.

    A job that waits for persons, or for an answer, has ended before there is a verdict: it could not write it itself.

    Args:
        home: the site's directory.
        release: which the coordinator has admitted.
        clear: as persons look at it.
        opted_out: who had opted out before it left; if anybody has since, nothing is kept.
    Raises:
        VaultError, ProjectError: it cannot be kept; the set has left all the same.
    """
    site = home.settings().site
    for job in JobStore(home.root).all():
        name = release_file(job)
        if name and release_id(site, job.grant, 0) == release:
            with closing(projects.open_vault(home, job.project)) as vault:
                vault.place(result_place(job, name)).write(clear)
                if vault.opted_out() != opted_out:
                    vault.place(result_place(job, name)).clear()


def read_released(home: SiteDirectory, job: Job, admitted: Container[str]) -> bytes:
    """The set or model that a job released, in clear.

    What is only made is not given out, to nobody: who reviews it looks at it in the console or by ``release
    inspect``, and whoever could fetch it could use what the approvers refuse. What has left is no secret here.

    Args:
        home: the site's directory.
        job: which made it.
        admitted: the releases that the site's ledger has as admitted; the job's own record decides nothing.
    Raises:
        JobStateError: it has not left; the text says what it waits for.
        SiteStorageError: it has left, and is not kept here.
    """
    if not (name := release_file(job)):
        raise JobStateError(f"job {job.number} was told to write no release: `release ... --out FILE --detach` does")
    release = release_id(home.settings().site, job.grant, 0)
    if release not in admitted:
        how = f"`jobs show {job.number}`"
        if job.state == MADE:
            how = f"`release inspect {release}` shows it to who approves"
        raise JobStateError(f"job {job.number} is {job.state}: its release has not left; {how}")
    with closing(projects.open_vault(home, job.project)) as vault:
        data = read_output(vault, JobStore(home.root), job, name)
    if data is None:
        why = "it is deleted, as after an opt-out" if job.state == DONE else "it is not written yet"
        raise SiteStorageError(
            f"the set of job {job.number} has left, and is not here: {why}; the coordinator has it"
        )
    return data


def release_file(job: Job) -> str:
    """The name of the file that a job was told to write its release to; "": to none."""
    words = [part for word in job.words for part in word.split("=", 1)] if job.grant else []
    named = (value for option, value in pairwise(words) if len(option) > 2 and "--out".startswith(option))
    return next(named, "").removeprefix("out/")


def read_output(vault: Vault, store: JobStore, job: Job, name: str) -> bytes | None:
    """A file that the job wrote; None: it wrote none, or it is gone."""
    if job.lane == TRAINING:
        path = store.folder(job.number) / "out" / name
        return path.read_bytes() if path.is_file() else None
    return vault.place(result_place(job, name)).read()


def trained_files(store: JobStore, job: Job) -> list[str]:
    """What a finished training wrote, relative to its folder ``out``; of any other job none."""
    folder = store.folder(job.number) / "out"
    if job.lane != TRAINING or job.state != DONE:
        return []
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))


def last_sealed(home: SiteDirectory) -> int:
    """The greatest number of a job whose files are in the vault of a project; 0: there are none."""
    found = [0]
    for name in projects.names(home):
        with closing(projects.open_vault(home, name)) as vault:
            found += vault.jobs_with_outputs()
    return max(found)


def clear_outputs(home: SiteDirectory, job: Job) -> None:
    """Delete what the job wrote, of the vault."""
    if (output_names(job) or job.lane == PREDICTION) and job.project in projects.names(home):
        with closing(projects.open_vault(home, job.project)) as vault:
            clear_results(vault, job)


def clear_results(vault: Vault, job: Job) -> None:
    """Delete what the job wrote, of its project's vault."""
    for name in result_names(vault, job):
        vault.place(result_place(job, name)).clear()


def result_names(vault: Vault, job: Job) -> list[str]:
    """The names of the files of the job that the vault has."""
    start = result_place(job, "")
    return [name.removeprefix(start) for name in vault.places(start)]


def result_place(job: Job, name: str) -> str:
    """Of the vault, where a file of the job is."""
    return f"{JOB_OUTPUTS}{job.number}/{name}"
