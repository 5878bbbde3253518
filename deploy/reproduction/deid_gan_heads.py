"""What the experiments of C-DeID-GAN run on: scans of heads by person and session, and what is kept of each.

A scan is examined once; for every method its surface as an attacker sees it, its tissues and its cube for the network
of ages are kept, and no voxel. People are split by the seed into those whose heads the de-facing is made from, those
whom the attacker and the network of ages learn from, and those who are tested; nobody is in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any, Final

import nibabel
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing import head_mask
from agent.defacing.brain_extraction import Atlas, Brain, Register
from agent.defacing.change import checked
from agent.defacing.face_region import Region
from agent.defacing.head import HeadScan
from agent.defacing.privacy_transform import transform
from agent.defacing.quality import examined
from agent.defacing.reidentification.features import Cloud, Eye, ScanFeatures, extract_features
from agent.defacing.reidentification.rendering import surface
from agent.defacing.remodel import HeadGenerator, remodel
from agent.defacing.removal_methods import METHODS as REMOVALS
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from deploy.phantoms.heads import HeadPhantoms
from deploy.phantoms.scanner_files import find_head
from deploy.reproduction.attacks.head_identification import brain_look, hull_look, photographed
from deploy.reproduction.average_head import average_of
from deploy.reproduction.measures.brain_age_network import head_cube
from deploy.reproduction.measures.brain_age_training import AgeConfig
from deploy.reproduction.measures.tissue_segmentation import PARTS, Tissues, dice, segment
from deploy.reproduction.result_cache import Kept, Say, sha

UNALTERED, REMODEL, BLURRED = "unaltered", "remodel", "blurred"
HULL, BRAIN = "hull only", "brain only"
MADE: Final = (REMODEL, *REMOVALS)  # what makes another volume
_FREE: Final = ("seeds",)  # settings on which no single number depends
_LEARN: Final = 12  # people to learn from, at the least
_TEST: Final = 5
_SEED: Final = 2021  # of made-up people: nobody whom a network of the tests has learned from is among them


@dataclass(frozen=True, slots=True, eq=False)
class Scanned:
    """One scan of one person; ``load`` reads it when it is needed."""

    person: str
    session: str
    age: float | None  # years; None: not known
    load: Callable[[], Volume]
    truth: Callable[[], HeadScan] | None = None  # of a made head whose brain is known: it is not looked for


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What an experiment reads."""

    name: str
    scans: tuple[Scanned, ...]
    atlas: Atlas
    register: Register
    remodeller: tuple[str, HeadGenerator] | None = (
        None  # its digest and itself; None: the mean of the first part's heads
    )
    stranger: Callable[[str], HeadGenerator] | None = None  # cross-fitted: the one that did not learn from a person

    def __post_init__(self) -> None:
        """A session is named once, and people come back."""
        keys = [(s.person, s.session) for s in self.scans]
        if len(set(keys)) != len(keys):
            raise ValueError("a session of a person is there twice")


@dataclass(frozen=True, slots=True)
class DeidSettings:
    """Everything that is chosen beforehand."""

    averaged: int = 10  # people whose heads the mean head is made from, if no network is given
    public: int = 30  # people whom the attacker and the network of ages learn from
    tested: int = 60  # people who are de-faced and attacked
    mm: float = 3.0  # of made heads; coarser ones are refused, unless their brains are known
    side: int = 64  # of the cube
    eye: Eye = field(default_factory=Eye)
    region: Region = field(default_factory=lambda: Region("surface"))  # as `deface` has it
    methods: tuple[str, ...] = MADE
    segmented: int = 10  # of the tested people, for Dice
    age: AgeConfig = field(default_factory=AgeConfig)
    blur_mm: float = 6.0
    same: bool = True  # attack heads of one visit too
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        """Refuse what is no experiment."""
        if not self.seeds or not set(self.methods) <= set(MADE) or not self.methods:
            raise ValueError(f"an experiment has seeds and methods of: {', '.join(MADE)}")
        if not (self.averaged >= 2 and self.public >= _LEARN and self.tested >= _TEST and self.segmented >= 1):
            raise ValueError(f"too few people: 2 to average, {_LEARN} to learn from and {_TEST} to test at least")
        if not (self.blur_mm > 0 and self.mm > 0 and self.side >= 16):
            raise ValueError("lengths are positive, and a cube has 16 voxels or more")


PRESETS: Final[Mapping[str, DeidSettings]] = {
    "heads3mm": DeidSettings(),
    "heads1mm": DeidSettings(mm=1.0, side=128, eye=Eye(side=128, points=600), segmented=40),
    "folder": DeidSettings(
        averaged=20, public=80, tested=200, side=128, eye=Eye(side=128, points=600), segmented=50, seeds=(0, 1, 2)
    ),
}


@dataclass(frozen=True, slots=True)
class Parts:
    """Who does what, by their names."""

    averaged: tuple[str, ...]
    public: tuple[str, ...]
    tested: tuple[str, ...]


class TooFewHeadsError(ValueError):
    """The folder holds too few people with two sessions each. The text says how many would do."""


class DeidWork(Kept):
    """The looks, tissues and cubes of one experiment."""

    def __init__(self, heads: Heads, settings: DeidSettings, folder: Path, say: Say) -> None:
        """Keep in a folder what has been computed; see :class:`deploy.reproduction.result_cache.Kept`."""
        told = {name: value for name, value in asdict(settings).items() if name not in _FREE}
        who = sorted((s.person, s.session, s.age) for s in heads.scans)
        network = heads.remodeller[0] if heads.remodeller else "mean"
        super().__init__(folder, sha([heads.name, sha(who), told, network]), say)
        self.heads, self.settings = heads, settings
        self._visits: dict[str, list[Scanned]] = {}
        for scan in sorted(heads.scans, key=lambda s: (s.person, s.session)):
            self._visits.setdefault(scan.person, []).append(scan)
        self._last: tuple[Scanned, Once] | None = None

    def parts(self, seed: int) -> Parts:
        """The split of a seed, among those who were seen twice.

        Raises:
            TooFewHeadsError: there are not enough.
        """
        s = self.settings
        names = [name for name, scans in self._visits.items() if len(scans) > 1]
        averaged = 0 if self.heads.remodeller else s.averaged
        if len(names) < averaged + _LEARN + _TEST:
            least = averaged + _LEARN + _TEST
            raise TooFewHeadsError(f"{len(names)} people were scanned twice or more; {least} at least are needed")
        order = [names[i] for i in self.rng("parts", seed).permutation(len(names))]
        left = len(names) - averaged
        public = min(s.public, max(_LEARN, left // 3))
        rest = order[averaged + public :]
        return Parts(tuple(order[:averaged]), tuple(order[averaged : averaged + public]), tuple(rest[: s.tested]))

    def visit(self, person: str, number: int) -> Scanned:
        """The first (0) or the second (1) session of a person."""
        return self._visits[person][number]

    def once(self, scan: Scanned) -> Once:
        """The examined head of a scan; the last one is held."""
        if self._last is None or self._last[0] is not scan:
            self._last = scan, Once(self, scan)
        return self._last[1]

    def draws(self, seed: int, person: str) -> HeadGenerator:
        """What draws another head for a person, who is in no part of it."""
        if self.heads.stranger is not None:
            return self.heads.stranger(person)
        if self.heads.remodeller is not None:
            return self.heads.remodeller[1]

        def mean() -> HeadGenerator:
            self.say(f"mean of public heads, seed {seed}")
            found = [self.once(self.visit(p, 0)).head for p in self.parts(seed).averaged]
            return average_of(found, self.settings.side)

        made: HeadGenerator = self.held(f"mean {seed}", mean)
        return made

    def refused(self, seed: int) -> Mapping[str, str]:
        """Whose scans are refused, with the code. All looks are taken here, scan by scan: each is examined once."""

        def look() -> dict[str, str]:
            found, parts = dict[str, str](), self.parts(seed)
            for person in (*parts.public, *parts.tested):
                for number in (0, 1):
                    scan = self.visit(person, number)
                    try:
                        self.look(scan, UNALTERED, seed)
                    except NotDefacedError as fault:
                        found[person] = fault.code
                        continue
                    made = self.settings.methods if number or self.settings.same else ()
                    for method in (*made, HULL, BRAIN):
                        with suppress(NotDefacedError):  # of this method: it is asked again when its row is made
                            self.look(scan, method, seed)
            return found

        kept: Mapping[str, str] = self.held(f"refused {seed}", look)
        return kept

    def look(self, scan: Scanned, method: str, seed: int) -> ScanFeatures:
        """What an attacker sees of a scan after a method.

        Raises:
            NotDefacedError: the scan was refused, or the method did not work on it.
        """
        one = self.once(scan)
        kept = self.arrays(self._key("look", scan, method, seed), lambda: _flat(one.look(method, seed)), one.told)
        return _unflat(kept)

    def cube(self, scan: Scanned, method: str, seed: int) -> NDArray[np.float32]:
        """What the network of ages sees of it. Raises: as :meth:`look`."""
        one = self.once(scan)
        key = self._key("cube", scan, method, seed)
        cube: NDArray[np.float32] = self.arrays(key, lambda: {"cube": one.cube(method, seed)}, one.told)["cube"]
        return cube

    def told(self, scan: Scanned, method: str, seed: int) -> dict[str, float]:
        """Dice of each tissue, seconds, and the brain's voxels that differ. Raises: as :meth:`look`."""
        one = self.once(scan)
        return self.numbers(self._key("tissue", scan, method, seed), lambda: one.numbers(method, seed))

    def _key(self, what: str, scan: Scanned, method: str, seed: int) -> str:
        # a label of a person may say more than a number does, and keys are shown and kept
        who = sha([scan.person, scan.session])[:12]
        return f"{what} of {who}, {method}" + (f", seed {seed}" if method in (REMODEL, HULL) else "")


class Once:
    """One scan: examined when first asked for, and what each method makes of it."""

    def __init__(self, work: DeidWork, scan: Scanned) -> None:
        """Nothing is read yet."""
        self.work, self.scan = work, scan
        self.told = f"a head of {work.heads.name}"
        self._made: dict[tuple[str, int], tuple[Volume, float]] = {}

    @cached_property
    def head(self) -> HeadScan:
        """Examined."""
        if self.scan.truth is not None:
            return self.scan.truth()
        return examined(self.scan.load(), self.work.heads.atlas, self.work.heads.register)

    @cached_property
    def tissues(self) -> Tissues:
        """Of the unaltered head."""
        return segment(self.head.volume, self.work.heads.atlas, self.work.heads.register)

    def volume(self, method: str, seed: int) -> Volume:
        """After a method."""
        return self.head.volume if method == UNALTERED else self._defaced(method, seed)[0]

    def look(self, method: str, seed: int) -> ScanFeatures:
        """An attacker's; all heads stand as the registration of the unaltered brain has them: the strongest case."""
        s, head = self.work.settings, self.head
        if method in (HULL, BRAIN):
            gamma = transform(head, s.side, self.work.draws(seed, self.scan.person).population)
            some = (slice(None, None, max(1, s.side // 32)),) * 3
            return (
                brain_look(gamma.brain[some], gamma.intensities[some])
                if method == BRAIN
                else hull_look(gamma.hull[some])
            )
        seen = surface(self.volume(method, seed), head_mask.threshold(head.volume.values))
        look = extract_features(seen, head.brain.to_template, s.eye)
        photographs = photographed(seen, head.brain.to_template, s.eye).channels
        return ScanFeatures({**look.channels, **photographs}, look.clouds)

    def cube(self, method: str, seed: int) -> NDArray[np.float32]:
        """The network's view of the whole head."""
        head, architecture = self.head, self.work.settings.age.architecture
        return head_cube(self.volume(method, seed), head.brain.mask, head.brain.to_template, architecture)

    def numbers(self, method: str, seed: int) -> dict[str, float]:
        """Dice of tissues with the unaltered head's, seconds of the processor, and the brain's voxels that differ."""
        heads = self.work.heads
        volume, seconds = self._defaced(method, seed)
        brain = self.head.brain.mask
        differ = float(np.count_nonzero(volume.values[brain] != self.head.volume.values[brain]))
        told = {"seconds": seconds, "brain voxels changed": differ}
        whole = self.tissues  # what cannot be segmented unaltered is no fault of the method's
        try:
            found = segment(volume, heads.atlas, heads.register)
            parts = {p: dice(whole.part(p), found.part(p)) for p in PARTS}
        except NotDefacedError:  # the segmenter finds no brain in what a method left: nothing overlaps
            parts = dict.fromkeys(PARTS, 0.0)
        return told | parts

    def _defaced(self, method: str, seed: int) -> tuple[Volume, float]:
        if (method, seed) not in self._made:
            work, head = self.work, self.head
            rng = work.rng("de-faced", method, seed, self.scan.person, self.scan.session)
            draws = work.draws(seed, self.scan.person) if method == REMODEL else None
            begun = process_time()
            if draws is not None:
                change: Any = remodel(head, draws, work.settings.region, rng)
            else:
                change = REMOVALS[method](head, rng)
            made = checked(head.volume, head.brain.mask, change.onto(head.volume, head.brain.mask, rng))
            self._made[method, seed] = Volume(made.values, head.volume.affine), process_time() - begun
        return self._made[method, seed]


def phantoms(settings: DeidSettings, atlas: Atlas, register: Register) -> Heads:
    """Made-up people from the real head that is installed, two visits each; heads and brains are looked for.

    Raises:
        FileNotFoundError: the real head is not installed (Debian: mricron-data).
    """
    made = _people(settings)
    scans = tuple(
        Scanned(_name(p), str(v), made.person(p).age, partial(_volume, made, p, v, settings.mm))
        for p, v in product(range(_count(settings)), (0, 1))
    )
    return Heads(f"made-up heads of {settings.mm:g} mm", scans, atlas, register)


def known_phantoms(settings: DeidSettings, atlas: Atlas, register: Register) -> Heads:
    """The same people, whose brain and place are told as they were made. Raises: as :func:`phantoms`."""
    made = _people(settings)
    scans = tuple(
        Scanned(
            _name(p),
            str(v),
            made.person(p).age,
            partial(_volume, made, p, v, settings.mm),
            partial(_known, made, p, v, settings.mm),
        )
        for p, v in product(range(_count(settings)), (0, 1))
    )
    return Heads(f"made-up heads of {settings.mm:g} mm, brain known", scans, atlas, register)


def _people(settings: DeidSettings) -> HeadPhantoms:
    head = find_head()
    if head is None or not (bet := head.with_name("ch2bet.nii.gz")).is_file():
        raise FileNotFoundError("the real head is not installed: apt-get install mricron-data")
    read: list[Any] = [nibabel.load(path) for path in (head, bet)]
    pieces, _ = ndimage.label(np.asarray(read[1].dataobj) > 0)
    brain = pieces == 1 + int(np.argmax(np.bincount(pieces.ravel())[1:]))
    return HeadPhantoms(Volume(np.asarray(read[0].dataobj), np.asarray(read[0].affine, np.float64)), brain, _SEED)


def _count(settings: DeidSettings) -> int:
    return settings.averaged + settings.public + settings.tested


def _name(person: int) -> str:
    return f"{person:04d}"


def _volume(made: HeadPhantoms, person: int, visit: int, mm: float) -> Volume:
    return made.scan(person, visit, mm).volume


def _known(made: HeadPhantoms, person: int, visit: int, mm: float) -> HeadScan:
    scan = made.scan(person, visit, mm)
    return HeadScan(scan.volume, head_mask.head_mask(scan.volume), Brain(scan.brain, 1.0, scan.to_template))


def smaller(settings: DeidSettings, limit: int | None) -> DeidSettings:
    """The settings for at most so many people, in the same proportions."""
    total = settings.averaged + settings.public + settings.tested
    if limit is None or limit >= total:
        return settings
    public = max(_LEARN, limit // 3)
    averaged = max(2, min(settings.averaged, limit // 8))
    return replace(settings, averaged=averaged, public=public, tested=max(_TEST, limit - public - averaged))


def _flat(look: ScanFeatures) -> dict[str, NDArray[Any]]:
    flat: dict[str, NDArray[Any]] = {f"channel/{name}": one.astype(np.float16) for name, one in look.channels.items()}
    for name, cloud in look.clouds.items():
        flat |= {f"points/{name}": cloud.points, f"normals/{name}": cloud.normals}
    return flat


def _unflat(flat: Mapping[str, NDArray[Any]]) -> ScanFeatures:
    channels = {k.split("/", 1)[1]: v.astype(np.float32) for k, v in flat.items() if k.startswith("channel/")}
    clouds = {
        k.split("/", 1)[1]: Cloud(v, flat["normals/" + k.split("/", 1)[1]])
        for k, v in flat.items()
        if k.startswith("points/")
    }
    return ScanFeatures(channels, clouds)
