"""``predict ... --detach``: the model is checked and copied, the study sealed; and ``jobs fetch`` of the results."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from agent.cli.model_use import compute_of, require_use
from agent.cli.output import say
from agent.cli.predict import own_folders, read_study
from agent.dp.compute_device import CUDA
from agent.errors import CommandError
from agent.ingest.context import open_ingest
from agent.ingest.retrieval import archive_of_study
from agent.prediction.model_folder import read_model_folder
from agent.prediction.result_folder import NOTICE, refuse_place, write
from agent.service.job_outputs import clear_results, result_names, result_place
from agent.service.jobs import DONE, Job
from agent.service.prediction_jobs import SEALED, seal_study
from agent.storage.site_directory import SiteDirectory
from policies.tasks.released_model import MODEL_FILE, SUMS_FILE


def freeze(arguments: argparse.Namespace, folder: Path, key: str) -> tuple[list[str], bool]:
    """Put what a prediction reads into the folder of a job that has no number yet.

    The officer's approval, where the model needs one, is asked for here: the job has no person.

    Args:
        arguments: as parsed.
        folder: the job's.
        key: the job's.
    Returns:
        The words of the job, which name no patient; and whether it takes an accelerator.
    Raises:
        CommandError: it cannot be a job.
        ModelFolderError, ModelNotApprovedError, SiteConfigError: see ``predict``.
    """
    if arguments.folder is not None:
        raise CommandError("a folder is read by whoever types `predict --folder`, without --detach")
    if arguments.send:
        raise CommandError("--send: a job sends nothing, since one that is begun anew would send twice")
    home = SiteDirectory(arguments.home)
    read_study(arguments)
    model = read_model_folder(arguments.model, home.coordinator_key())
    if not arguments.vault:  # before the officer signs
        with open_ingest(home, arguments.project) as way:
            archive_of_study(way.ingestion, arguments.archive, arguments.study)
    require_use(home, model, arguments)
    cuda = compute_of(home, arguments.device).plan.device == CUDA
    words = ["predict", "in/model"]
    if arguments.vault:
        words.append("--vault")
    else:
        seal_study(home, arguments.project, key, arguments.study, folder)
        words += ["--study", SEALED, "--from", arguments.archive]
    (folder / "in" / "model").mkdir()
    for name in (MODEL_FILE, SUMS_FILE, *model.papers):
        shutil.copyfile(arguments.model / name, folder / "in" / "model" / name)
    words += ["--out", SEALED, "--project", arguments.project]
    words += ["--device", arguments.device] if arguments.device else []
    return words + (["--json"] if arguments.json else []), cuda


def fetch(home: SiteDirectory, job: Job, out: Path) -> int:
    """Write the results of a job into a new folder; then the agent has them no longer, but sealed in old backups.

    Raises:
        CommandError: it has none, or the folder cannot be that.
    """
    if job.state != DONE:
        raise CommandError(f"job {job.number} is {job.state}: it has no results")
    with open_ingest(home, job.project) as way:
        refuse_place(out, own_folders(way))
        found = {name: way.vault.place(result_place(job, name)).read() for name in result_names(way.vault, job)}
        files = {name: body for name, body in found.items() if body is not None}
        if not files or len(files) < len(found):
            raise CommandError(
                f"the results of job {job.number} are not here: they were fetched, or dropped after an opt-out, a "
                "restore or keep_days; type `predict ... --detach` again"
            )
        write(out, files)
        clear_results(way.vault, job)
    say(f"wrote {out.name}: {len(files)} files, which the agent has no longer. {NOTICE}")
    return 0
