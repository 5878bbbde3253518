"""``predict`` beside plain inference with the same network, weights and transforms, in one run and one process.

The command checks the model's folder, reads the files in confined processes by the rules of ingest, predicts, maps
segments back to the slices, and writes DICOM SEG and a sheet. The peer is a script: it reads the same files with
pydicom, builds the same inputs, calls a network that it has already loaded, maps back, and writes the same DICOM SEG
or table. It checks nothing, confines nothing and has no sheet. Both are measured warm: what Python imports is loaded,
and each side's second run counts. The command's readers and its network start anew each time, and count.

``predict_vs_plain_inference``: seconds of the command over those of the peer, of a volume for a 3-D SegResNet.
``predict_images_vs_plain_inference``: the same of single images for a DenseNet-121.

The same ratios of processor time, of the command with its readers, hang less on what else the machine does: they end
in ``_cpu``.
"""

from __future__ import annotations

import contextlib
import csv
import io
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pydicom
import pytest
import torch
from numpy.typing import NDArray

from agent.cli.main import main as lazaret
from agent.domain import Volume
from agent.field_of_view import fit_to
from agent.mechanisms.federated.task_training import as_placed, example_rule, network_of
from agent.models.networks.trainable import TrainableNetwork
from agent.prediction.segmentation_object import DrawnImage, SegmentationSource, part10, segmentation
from agent.storage.example_pixels import cube, cube_place, on_source
from policies.tasks.task import Task, task_from_toml
from tests.benchmarks.report import Report, Row, as_table
from tests.support.exported_models import exported_model, join
from tests.support.task_site import abdomen_series, task_site

VOLUMES, SLICES, SIDE = 1, 128, 128
IMAGES, IMAGE_SIDE = 10, 512
RUNS: Final = 1
_MM: Final = (5.0, 1.5, 1.5)  # of tests.support.task_site
VOLUME_TASK: Final = """
[task]
name = "organs"
kind = "segmentation"
[labels]
classes = ["liver", "mass"]
[input]
modality = "MR"
size = [128, 128, 128]
spacing = [5.0, 1.5, 1.5]
transforms = [{ name = "NormalizeIntensity" }]
[training]
public_patients = 25
[network]
name = "segresnet"
"""
IMAGE_TASK: Final = """
[task]
name = "triage"
kind = "classification"
[labels]
classes = ["ill", "well"]
[input]
modality = "MR"
size = [512, 512]
transforms = [{ name = "NormalizeIntensity" }]
[training]
public_patients = 25
[network]
name = "densenet121"
"""


@dataclass(frozen=True)
class Timed:
    """Shortest seconds of each side, and least seconds of processors."""

    command: float
    plain: float
    command_cpu: float
    plain_cpu: float


def write_series(folder: Path, count: int, slices: int, side: int) -> list[list[Path]]:
    """So many series of made slices, each of a patient of its own."""
    folder.mkdir()
    made = []
    for number in range(count):
        rng = np.random.default_rng(number)
        values = (np.abs(rng.normal(300, 120, (slices, side, side)))).astype(np.int16)
        paths = []
        for place, one in enumerate(abdomen_series(f"B-{number}", number + 1, values)):
            one.Rows = one.Columns = side
            paths.append(folder / f"{number}-{place}.dcm")
            one.save_as(paths[-1], enforce_file_format=True)
        made.append(paths)
    return made


def plain_volumes(task: Task, network: TrainableNetwork, series: Sequence[Sequence[Path]], out: Path) -> None:
    """What a script does: stack the slices, build the input, call the network, map back, write DICOM SEG."""
    rule = example_rule(task)
    source = SegmentationSource("plain", "0" * 64, task.name, task.labels.classes, {})
    for number, paths in enumerate(series, 1):
        slices = sorted(map(pydicom.dcmread, paths), key=lambda one: float(one.ImagePositionPatient[2]))
        values = np.stack([one.pixel_array.T for one in slices], axis=-1).astype(np.float32)
        volume = Volume(values, np.diag([-_MM[2], -_MM[1], _MM[0], 1.0]))
        seen = cube(volume, rule)
        assert not isinstance(seen, str)
        pixels, place = as_placed(task, seen)
        drawn = _outputs(network, pixels).argmax(dim=1)[0].numpy()
        whole = on_source(drawn, cube_place(volume, rule) @ place, values.shape)
        images = [DrawnImage(one, whole[None, :, :, at].transpose(0, 2, 1)) for at, one in enumerate(slices)]
        (out / f"{number}.dcm").write_bytes(part10(segmentation(images, source, number)))


def plain_images(task: Task, network: TrainableNetwork, series: Sequence[Sequence[Path]], out: Path) -> None:
    """The same of single images: a table."""
    rows = []
    for (path,) in series:
        header = pydicom.dcmread(path)
        values: NDArray[np.float32] = header.pixel_array.astype(np.float32)
        seen = fit_to((values - values.min()) / np.ptp(values), (task.input.size[0], task.input.size[1]))
        scores = _outputs(network, as_placed(task, seen[None])[0]).softmax(dim=1)[0]
        rows.append([header.PatientID, header.SOPInstanceUID, *scores.tolist()])
    with (out / "predictions.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)


def _outputs(network: TrainableNetwork, pixels: NDArray[np.float32]) -> torch.Tensor:
    return network.outputs(torch.from_numpy(pixels[None]))


def _spent(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock, and of the processors of this process and of those that it has ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used, began = sum(sum(resource.getrusage(who)[:2]) for who in whose), time.perf_counter()
    act()
    took = time.perf_counter() - began
    return took, sum(sum(resource.getrusage(who)[:2]) for who in whose) - used


def timed(folder: Path, text: str, shape: tuple[int, int, int], plain: Callable[..., None]) -> Timed:
    """Both sides in turn, twice; the first time warms them."""
    folder.mkdir()
    task = task_from_toml(text, "task.toml")
    home = task_site(folder)
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()):
        made = exported_model(folder / "federation", task, patched)
        join(home, made)
    series = write_series(folder / "study", *shape)
    network = network_of(task, {}.__getitem__)
    network.load(made.parameters)
    network.module.eval()
    commands, plains = [], []

    def command(words: list[str]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert lazaret(["--home", str(home), *words, "--json"]) == 0

    for run in range(RUNS + 1):
        out = folder / f"plain-{run}"
        out.mkdir()
        plains.append(_spent(partial(plain, task, network, series, out)))
        words = ["predict", str(made.folder), "--folder", str(folder / "study"), "--out", str(folder / f"out-{run}")]
        commands.append(_spent(partial(command, words)))
    ours, theirs = (list(zip(*each[1:], strict=True)) for each in (commands, plains))  # the first loads the imports
    return Timed(min(ours[0]), min(theirs[0]), min(ours[1]), min(theirs[1]))


def rows() -> tuple[list[Row], dict[str, float]]:
    """The rows and ratios of a report: some minutes on two processors."""
    with tempfile.TemporaryDirectory() as name:
        volumes = timed(Path(name) / "volumes", VOLUME_TASK, (VOLUMES, SLICES, SIDE), plain_volumes)
        images = timed(Path(name) / "images", IMAGE_TASK, (IMAGES, 1, IMAGE_SIDE), plain_images)
    listed = [
        Row(f"predict, {VOLUMES} volumes of {SLICES} x {SIDE} x {SIDE}", volumes.command, "s"),
        Row("plain inference on these volumes", volumes.plain, "s"),
        Row(f"predict, {IMAGES} images of {IMAGE_SIDE} x {IMAGE_SIDE}", images.command, "s"),
        Row("plain inference on these images", images.plain, "s"),
    ]
    ratios = {
        "predict_vs_plain_inference": volumes.command / volumes.plain,
        "predict_vs_plain_inference_cpu": volumes.command_cpu / volumes.plain_cpu,
        "predict_images_vs_plain_inference": images.command / images.plain,
        "predict_images_vs_plain_inference_cpu": images.command_cpu / images.plain_cpu,
    }
    return listed, ratios


def main() -> Report:
    """See the head of this module."""
    listed, ratios = rows()
    return Report(tuple(listed), ratios)


if __name__ == "__main__":
    sys.stdout.write(as_table("predict", main()) + "\n")
