"""One experiment: the split, the networks, and every number of it, kept in a folder so that a killed run goes on.

Patients are split three ways. The *public* part D0 trains generator, encoder, features, recognisers, PCA basis; the
*cohort* D is what a hospital would release; the *test* part is seen by no mechanism. The papers trained on D itself
(k-SALSA, section 4.1: "we train the GAN generator and the GAN inversion model on the training set. We then apply
k-SALSA to the training set"), which makes every representative a function of everybody in D. ``as_published`` does
the same, to show what that is worth.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Cohort, Image, Patient
from agent.mechanisms.ksalsa.style_alignment import PUBLISHED, Alignment
from agent.models.image_tensors import to_bytes
from agent.models.stylegan.network import PRESETS as GENERATORS
from agent.models.stylegan.network import StyleGanShape
from agent.models.stylegan.restyle import Polish
from agent.models.training_loop import TrainingProgress
from deploy.reproduction.datasets import Dataset
from deploy.reproduction.result_cache import Kept, Say, locked, sha
from deploy.reproduction.tables import Cell, Table

Rows = NDArray[np.int64]
_FREE: Final = ("seeds", "ks", "checkpoint_every", "device")  # settings on which no number depends
_MEASURED: Final = (
    "alignment",
    "attack_steps",
    "basis",
    "epochs",
    "judge",
    "style",
    "views",
)  # and on these no network
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
SMALL: Final = StyleGanShape(32, 3, 64, 64, 2, 1024, 64)  # a quarter of a million weights: minutes on one core


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """A data set in memory: images, whose they are, how they are graded."""

    images: NDArray[np.uint8]  # (n, s, s) or (n, s, s, 3)
    owners: Rows  # (n,): a number for each patient
    labels: tuple[str, ...]  # n
    name: str
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name -> n values

    def __post_init__(self) -> None:
        """One owner and one label for each square image."""
        shape = self.images.shape
        if self.images.dtype != np.uint8 or self.images.ndim not in (3, 4) or shape[1] != shape[2]:
            raise ValueError("images are (n, s, s) or (n, s, s, 3) uint8")
        if self.owners.shape != shape[:1] or any(
            len(v) != shape[0] for v in (self.labels, *self.attributes.values())
        ):
            raise ValueError("one owner, one label and one value of each attribute for each image")

    def digest(self) -> str:
        """SHA-256 of everything that a number depends on."""
        told = hashlib.sha256(json.dumps([self.images.shape, self.labels, sorted(self.attributes.items())]).encode())
        told.update(np.ascontiguousarray(self.images).reshape(-1).data)  # no copy of it: it may be 28 GB
        told.update(self.owners.astype("<i8").tobytes())
        return told.hexdigest()

    def unit(self, rows: Rows) -> NDArray[np.float32]:
        """Some images, in [0, 1]."""
        out: NDArray[np.float32] = self.images[rows].astype(np.float32) / np.float32(255.0)
        return out


def samples_of(data: Dataset) -> Samples:
    """Read a data set's images, one at a time, as bytes. All of them stay in memory: n * side * side * 3 bytes.

    All of EyePACS, 35,126 images, is 27.6 GB at 512 px; whatever is computed of a part of it takes that part as
    float32 besides, 50 GB of D0 while an encoder is trained. ``limit`` of the loader bounds both.

    Raises:
        DatasetError: an image cannot be read.
    """
    images = np.empty((len(data), data.side, data.side, 3), np.uint8)
    for index in range(len(data)):
        images[index] = to_bytes(data.image(index))
    _, owners = np.unique(np.array(data.patients), return_inverse=True)
    return Samples(images, owners.astype(np.int64), data.labels, data.name, data.attributes)


@dataclass(frozen=True, slots=True)
class Official:
    """A published feature network: the file ``official/KIND`` of the work folder, with its pinned digest."""

    kind: str  # of deploy.reproduction.feature_networks.FEATURES: "vgg19-unnormalised", "moco", "inception", ...
    sha256: str

    def __post_init__(self) -> None:
        """A digest is 64 lower-case hexadecimal digits."""
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError("a published network is pinned by its SHA-256, 64 lower-case hexadecimal digits")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that is chosen beforehand. The presets are ``cpu32``, ``cpu64`` and ``paper512``.

    How far codes are aligned was chosen on public data: 700 phantoms drawn for nothing else (400 made into a release,
    300 graded, by three classifiers), with a generator and encoder trained on 600 others. Some of rates 0.001 to 0.1,
    lambda 0.05 to 0.95, random and learned content features, both content targets, layers 1 to 3 and 25 or 50 steps
    were tried, one at a time: the further a code went, the nearer to real images and the worse the grade. At k = 10
    the centroid had a kappa of 0.72 and a Fréchet distance of 0.175; 25 steps of 0.002 and lambda 0.05, the default,
    0.72 and 0.131; 25 of 0.004: 0.69 and 0.112; 50 of 0.003: 0.67 and 0.098; 50 of 0.01: 0.38 and 0.064; 50 of 0.1:
    0.09 and 0.063 (rates in the code's own numbers, whose scatter was 0.89; classifiers differed by 0.03 to 0.1). No
    choice beat the centroid's kappa. ``paper512`` keeps the paper's
    (``agent.mechanisms.ksalsa.style_alignment.PUBLISHED``).
    """

    generator: StyleGanShape = SMALL  # its resolution is the side of every image
    seeds: tuple[int, ...] = (0, 1, 2)
    ks: tuple[int, ...] = (2, 5, 10)
    net_seeds: int = 1  # networks are trained so many times; seed i takes those of i modulo this number
    as_published: bool = False  # train on D, as the papers did
    public: float = 0.45  # of the patients: D0
    test: float = 0.25
    generator_steps: int = 3_000
    generator_batch: int = 16
    gamma: float | None = None  # of R1; None: the published rule
    pair_steps: int = 1_000
    image_steps: int = 800
    encoder_batch: int = 8
    encoder_rate: float = 1e-3  # the published 1e-4 needs a hundred times these steps
    passes: int = 3
    polish: Polish | None = None  # hybrid inversion, where the encoder had few steps; not part of k-SALSA
    feature_steps: int = 300
    recogniser_steps: int = 600
    false_match_rate: float = 0.02
    basis: int = 64  # components of k-Same-PCA, at most
    alignment: Alignment = field(default_factory=Alignment)
    epochs: int = 40  # of the classifier
    attack_steps: int = 300
    views: int = 5  # supplement E: images of one cluster
    style: Official | None = None  # the paper's: VGG19; None: random features
    content: Official | None = None  # the paper's: MoCo; None: features learned on D0
    judge: Official | None = None  # the paper's: Inception; None: other random features
    device: str = "cpu"
    checkpoint_every: int = 250

    def __post_init__(self) -> None:
        """Refuse what is no experiment."""
        if not self.seeds or not self.ks or list(self.ks) != sorted(set(self.ks)) or not self.ks[0] >= 2:
            raise ValueError("an experiment has seeds, and cluster sizes that rise from 2 on")
        if not (0.0 < self.public < 1.0 and 0.0 < self.test < 1.0 - self.public and self.net_seeds >= 1):
            raise ValueError("the public part and the test part leave something for the cohort")

    @property
    def side(self) -> int:
        """Pixels."""
        return self.generator.resolution


PRESETS: Final[Mapping[str, Settings]] = {
    "cpu32": Settings(),
    "cpu64": Settings(generator=GENERATORS["small64"], generator_steps=6_000, pair_steps=2_000, image_steps=2_000),
    "paper512": Settings(
        generator=GENERATORS["auto512"],
        generator_steps=78_125,  # 5,000 kimg in batches of 64
        generator_batch=64,
        pair_steps=20_000,
        image_steps=80_000,
        encoder_rate=1e-4,
        passes=5,
        feature_steps=20_000,
        recogniser_steps=20_000,
        false_match_rate=1e-3,
        basis=256,
        alignment=replace(PUBLISHED, until=256),
        epochs=60,
        attack_steps=5_000,
        device="cuda",
        checkpoint_every=2_000,
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Rows of the images of the three parts. Nobody is in two of them."""

    public: Rows
    cohort: Rows
    test: Rows


def sizes(people: int, settings: Settings) -> tuple[int, int, int]:
    """How many of so many patients are in D0, in the cohort and in the test part."""
    first, held = round(settings.public * people), round(settings.test * people)
    return first, people - first - held, held


def split(samples: Samples, settings: Settings, seed: int) -> Parts:
    """By patient. The public part depends on the networks' seed only, so that seeds can share networks.

    Raises:
        ValueError: a part would be empty.
    """
    people = np.unique(samples.owners)
    order = np.random.Generator(np.random.Philox(seed % settings.net_seeds)).permutation(people)
    first, _, held = sizes(len(people), settings)
    rest = np.random.Generator(np.random.Philox(1_000 + seed)).permutation(order[first:])
    chosen = (order[:first], rest[held:], rest[:held])
    if not all(len(part) for part in chosen):
        raise ValueError("too few patients for a public part, a cohort and a test part")
    public, cohort, test = (np.flatnonzero(np.isin(samples.owners, part)).astype(np.int64) for part in chosen)
    return Parts(public, cohort, test)


@contextlib.contextmanager
def opened(samples: Samples, settings: Settings, folder: Path, say: Say) -> Iterator[Work]:
    """Work in a folder that nobody else works in meanwhile.

    Raises:
        BusyError: somebody does.
    """
    if samples.images.shape[1] != settings.side:
        raise ValueError(f"the images are not {settings.side} pixels a side, as the generator draws them")
    with locked(folder):
        yield Work(samples, settings, folder, say)


class Work(Kept):
    """The networks and numbers of one experiment, each made once and kept whole.

    A training that was killed goes on from its checkpoint (:mod:`agent.models.training_loop`); a number or a set of
    images is written beside its place and renamed, so it is there or it is not. What is kept is found by everything
    that it depends on but the program's own version.
    """

    def __init__(self, samples: Samples, settings: Settings, folder: Path, say: Say) -> None:
        """Use :func:`opened`."""
        self.samples, self.settings = samples, settings
        told = {k: v for k, v in asdict(settings).items() if k not in _FREE}
        super().__init__(folder, sha([samples.digest(), told]), say)

    def parts(self, seed: int) -> Parts:
        """The split of a seed."""
        return split(self.samples, self.settings, seed)

    def trained_on(self, seed: int) -> Rows:
        """Rows of the images that networks may learn: D0, or D where the papers are followed."""
        parts = self.parts(seed)
        return parts.cohort if self.settings.as_published else parts.public

    def place(self, kind: str, seed: int) -> Path:
        """The folder of one training: of its kind, seed and images, and every setting that it may depend on."""
        told = {k: v for k, v in asdict(self.settings).items() if k not in (*_FREE, *_MEASURED)}
        pictures = hashlib.sha256(self.trained_on(seed).astype("<i8").tobytes()).hexdigest()
        run = sha([self.samples.digest(), told, pictures, seed % self.settings.net_seeds])
        return self.folder / "networks" / f"{kind}-{run[:16]}"

    def told(self, kind: str) -> Callable[[TrainingProgress], None]:
        """Progress of a training, as lines."""
        return lambda p: self.say(
            f"{kind}: step {p.step} of {p.steps} ({', '.join(f'{k} {v:.3g}' for k, v in p.losses.items())})"
        )


Measure = Callable[[Work, int, int, str], dict[str, float]]  # seed, k, row -> named numbers


def filled(
    work: Work, rows: Sequence[str], ks: Sequence[int], what: str, measure: Measure
) -> dict[tuple[str, str], Cell]:
    """Every row at every k and seed, each computed once; a column for each number that the measure gives."""
    cells: dict[tuple[str, str], Cell] = {}
    for k in ks:
        for row in rows:
            key = f"{what}, k {k}, {row}"
            found = [work.numbers(f"{key}, seed {s}", partial(measure, work, s, k, row)) for s in work.settings.seeds]
            for name in found[0]:
                cells[row, f"k={k} {name}"] = Cell(tuple(each[name] for each in found))
    return cells


def tabled(work: Work, name: str, title: str, cells: Mapping[tuple[str, str], Cell], *told: str) -> Table:
    """A table of these cells, with what a reader of any table must know, and the notes ``told``."""
    s = work.settings
    rows, columns = (tuple(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    where = "D itself, as the paper did: every image is a function of everybody" if s.as_published else "D0"
    shared = f"{s.net_seeds} set(s) of networks for {len(s.seeds)} seed(s) of everything else"
    notes = (f"{work.samples.name}, {s.side} px; networks trained on {where}; mean ± sd; {shared}", *told)
    return Table(name, title, rows, columns, cells, (), notes)


def cohort_of(samples: Samples, rows: Rows) -> Cohort:
    """The patients of some rows, under made-up pseudonyms, each with all of their images among the rows."""
    mine: dict[int, list[Image]] = {}
    for row, pixels in zip(rows, samples.unit(rows), strict=True):
        mine.setdefault(int(samples.owners[row]), []).append(Image(pixels, samples.labels[row]))
    return Cohort(tuple(Patient(name_of(owner), tuple(mine[owner])) for owner in sorted(mine)))


def name_of(owner: int) -> str:
    """The pseudonym of a patient of an experiment: it sorts as the number does."""
    return f"p{owner:09d}"
