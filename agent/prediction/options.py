"""The words of ``predict``. argparse alone, so that ``--help`` waits for nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final

HELP: Final = "use a model of the pool on a study, a folder or the vault; research, not for diagnosis"


def add_options(command: argparse.ArgumentParser) -> None:
    """Which model, on which images, and where the results go."""
    command.add_argument("model", type=Path, metavar="MODEL", help="the folder that `pool export --model` wrote")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--folder", type=Path, help="DICOM files of one study or several")
    text = "a Study Instance UID, fetched from the archive --from; - reads it from standard input, unseen"
    which.add_argument("--study", metavar="UID", help=text)
    which.add_argument("--vault", action="store_true", help="what the task selects in the vault, under pseudonyms")
    text = "the archive that has the study, a [pacs.NAME] or [dicomweb.NAME] of ingest.toml"
    command.add_argument("--from", dest="archive", default="", metavar="NAME", help=text)
    text = "a new folder for the results, for this site only; of a job, `jobs fetch` writes it"
    command.add_argument("--out", type=Path, help=text)
    text = "send each segmentation to this archive by one C-STORE, a [pacs.NAME] of ingest.toml"
    command.add_argument("--send", default="", metavar="NAME", help=text)
    text = "who approves a model that this site's policy would not have approved"
    command.add_argument("--person", default="", help=text)
    command.add_argument("--key", type=Path, help="the person's private key")
    command.add_argument("--yes", action="store_true", help="sign without being asked")
    _device(command)
    command.set_defaults(keep=None, usage_check=_of_prediction(command))  # keep: where a job puts its results


def _of_prediction(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    def check(arguments: argparse.Namespace) -> None:
        if arguments.detach == (arguments.out is not None):
            parser.error("give --out FOLDER; or --detach without it: `jobs fetch` writes what a job keeps")

    return check


def _device(command: argparse.ArgumentParser) -> None:
    text = "where the network is computed (default: device of site.toml); auto: an accelerator where there is one"
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="", help=text)


def add_evaluation(command: argparse.ArgumentParser) -> None:
    """Either a set with the configuration that made it, or a model with the site's labels."""
    command.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="as for `predict`; with --labels")
    text = "of MODEL: exact figures on what is labelled here, and a sheet of the worst errors, for this site only"
    command.add_argument("--labels", action="store_true", help=text)
    command.add_argument("--config", type=Path, help="the configuration that made the set; it must have a split")
    command.add_argument("--set", type=Path, help="the file that `release ... --out` wrote")
    command.add_argument("--part", help="a part of the split whose patients are in no release of it")
    _device(command)
    command.set_defaults(person="", key=None, yes=False, usage_check=_of_evaluation(command))


def _of_evaluation(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    def check(arguments: argparse.Namespace) -> None:
        of_set = [getattr(arguments, name) is not None for name in ("config", "set", "part")]
        if arguments.labels:
            if arguments.model is None or any(of_set):
                parser.error("--labels goes with MODEL, and with none of --config, --set, --part")
            if arguments.detach:
                parser.error("a model is evaluated at once: leave --detach out")
        elif arguments.model is not None or not all(of_set) or arguments.device:
            parser.error("give MODEL --labels, and perhaps --device; or --config, --set and --part")

    return check
