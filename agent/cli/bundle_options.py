"""The words of ``task from-bundle`` and ``task to-bundle``. It imports argparse alone, as ``agent.cli.options``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from agent.mechanisms.common.option_types import count
from protos.operations.command_line import add

KINDS: Final = ("classification", "multi-label", "regression", "segmentation")  # policies.tasks.task.LOSSES


def add_from_bundle(tasks: Any) -> None:
    """``task from-bundle``."""
    taken = add(tasks, "from-bundle", "write the draft of a task from a MONAI bundle; nothing in it is run")
    taken.add_argument("folder", type=Path, metavar="FOLDER", help="of the bundle")
    taken.add_argument("--out", type=Path, required=True, metavar="TASK.toml", help="the draft, a new file")
    text = "its configuration: train or inference (default: train, if there is one)"
    taken.add_argument("--config", default="", metavar="NAME", help=text)
    text = "also convert its weights into this file, in a confined process, and begin at them"
    taken.add_argument("--weights", type=Path, metavar="FILE", help=text)
    taken.add_argument("--name", default="", help="of the task (default: the folder's)")
    taken.add_argument("--kind", default="", choices=("", *KINDS), help="if the loss does not say it")
    taken.add_argument("--modality", default="", metavar="CODE", help="DICOM code, if metadata.json names none")
    taken.add_argument("--size", type=count, nargs="+", metavar="N", help="pixels (h w), or voxels (k h w)")
    text = "names of the classes, or of a mask's segments, in the order of the outputs"
    taken.add_argument("--classes", nargs="+", metavar="NAME", help=text)
    taken.add_argument("--table", default="", metavar="NAME", help="the hospitals' label table")
    taken.add_argument("--columns", nargs="+", metavar="NAME", help="of the table, in the order of the outputs")
    text = "a public bound on the patients of a site, never a count"
    taken.add_argument("--public-patients", type=count, metavar="N", help=text)
    taken.set_defaults(homeless=True)
    taken.add_argument("--json", action="store_true")


def add_to_bundle(tasks: Any) -> None:
    """``task to-bundle``."""
    made = add(tasks, "to-bundle", "write a finished model as an inference bundle that MONAI runs")
    made.add_argument("model", type=Path, metavar="MODEL", help="the folder of `lazaret-coordinator pool export`")
    made.add_argument("out", type=Path, metavar="OUT", help="the bundle, a new folder")
    text = "the model's task file, where no task.json lies beside the model"
    made.add_argument("--task", type=Path, metavar="FILE", help=text)
    text = "a file of public weights that the task names by its SHA-256; may be repeated"
    made.add_argument("--weights", type=Path, action="append", default=[], metavar="FILE", help=text)
    made.set_defaults(homeless=True)
    made.add_argument("--json", action="store_true")
