"""C-DeID-GAN's Figures 3 and 4, measured again: who is still recognised, and what tissues and age become.

The ICLR submission of 2021 (its code and appendix were never published). Differences from it, on purpose:

* A program picks among the five and not people: :mod:`deploy.reproduction.attacks.head_identification`. It learned on
  other people what the method leaves, so that rates are higher than the paper's. It never answers "uncertain".
* The heads that are compared are of two visits. Each method stands there once more within one visit.
* The paper's workers saw images. Here the attacker measures in millimetres too; a column of its own has images of
  heads of one width, and one has the face alone, without forehead, crown and neck. What is under "strip" is what the
  brain gives away through its surface and size: no method that keeps it can promise less to who measures.
* Rank-1 over all tested people is beside 5-way, and so is what the hull of gamma and the brain give away by itself:
  the brain remains linkable, whatever is done to the face.
* The removal methods are those of :mod:`agent.defacing.removal_methods`, and SIENAX is
  :mod:`deploy.reproduction.measures.tissue_segmentation`.
* BLURRED has its own blur: the paper's is not in its text.
* Seconds are of one processor, of the change alone: head and brain are found once for all methods.
* A head that is refused is in no row. Where one method refuses a head, that row has one person less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Final

import numpy as np

from agent.defacing.reidentification.features import ZONES, ScanFeatures
from agent.defacing.reidentification.matching import CHOICES, People
from agent.volumes.errors import NotDefacedError
from deploy.reproduction.attacks.head_identification import (
    CHANCE,
    PHOTOGRAPHS,
    WORKS,
    Identification,
    attacked,
    looks_of,
    only,
    out_of_focus,
    pixels_of,
)
from deploy.reproduction.deid_gan_heads import (
    BLURRED,
    BRAIN,
    HULL,
    REMODEL,
    UNALTERED,
    DeidSettings,
    DeidWork,
    Heads,
    TooFewHeadsError,
)
from deploy.reproduction.measures.brain_age_network import brain_age_from, predicted
from deploy.reproduction.measures.brain_age_training import Aged, train_brain_age
from deploy.reproduction.measures.tissue_segmentation import PARTS
from deploy.reproduction.result_cache import Say, locked
from deploy.reproduction.tables import Cell, Relation, Table, Verdict, judged, order

FIVE, RANK1, SAME, SAME1 = "5-way", "rank-1", "5-way, same visit", "rank-1, same visit"
PHOTOS, PHOTOS1, PHOTOS_CHANCE = "5-way, photographs", "rank-1, photographs", "at chance, photographs"
FACE, FACE1, FACE_CHANCE = "5-way, face only", "rank-1, face only", "at chance, face only"
AT_CHANCE, COUNT = "at chance", "people"
AGE, AGE_SD, AGE_MAE = "n_D - n_O", "its sd", "|n_D - n_O|"
SECONDS, CHANGED = "seconds", "brain voxels changed"
KEEPS: Final = ("quickshear", "facemask", "deface")  # removal methods that keep more than the brain
_LEAST_DICE, _LESS = 0.97, 0.01


def figure3(work: DeidWork) -> Table:
    """Figure 3: how often a method is defeated."""
    rows = (UNALTERED, BLURRED, *work.settings.methods, HULL, BRAIN)
    cells = dict[tuple[str, str], Cell]()
    for row in rows:
        found = [_identified(work, seed, row) for seed in work.settings.seeds]
        cells |= {(row, one): Cell(tuple(each[one] for each in found)) for one in found[0]}
    table = Table(
        "deid-figure3",
        "identification rate of de-faced heads; lower is better",
        rows,
        tuple(dict.fromkeys(column for _, column in cells)),
        cells,
        (),
        (
            *_who(work),
            f"chance: {CHANCE:.0%} of 5-way, one person of all for rank-1; low and high: 95 % intervals over people",
            "the face is judged by its surface; the brain alone links a person whatever the method",
        ),
    )
    works = _claim(table, FIVE, UNALTERED, lambda v: v >= WORKS, f"at least {WORKS:g}, so the attack works")
    if REMODEL not in rows:
        return judged(table, (works,))
    sure = "1: 5-way and rank-1 both"
    hidden = [_claim(table, c, REMODEL, lambda v: v == 1.0, sure) for c in (AT_CHANCE, PHOTOS_CHANCE, FACE_CHANCE)]
    below = [order(table, FIVE, (REMODEL, "<", one)) for one in KEEPS if one in rows]
    return judged(table, (works, *hidden, *below))


def figure4(work: DeidWork) -> Table:
    """Figure 4: Dice of tissues and the deviation of the age, with run time; rows are methods."""
    cells = dict[tuple[str, str], Cell]()
    for row in work.settings.methods:
        found = [_effects(work, seed, row) for seed in work.settings.seeds]
        cells |= {(row, one): Cell(tuple(each[one] for each in found)) for one in found[0]}
    columns = tuple(dict.fromkeys(column for _, column in cells))
    notes = (*_who(work), "Dice: the median over people; vcsf: fluid of the ventricles; seconds of one processor")
    table = Table("deid-figure4", "tissues and age after de-facing", work.settings.methods, columns, cells, (), notes)
    claims = [_claim(table, CHANGED, row, lambda v: v == 0.0, "0") for row in work.settings.methods]
    if REMODEL in work.settings.methods:
        for part in PARTS:
            claims.append(_claim(table, part, REMODEL, lambda v: v >= _LEAST_DICE, f"at least {_LEAST_DICE}"))
            claims += [_near(table, part, one) for one in KEEPS if one in work.settings.methods]
        if "strip" in work.settings.methods:
            worse: Sequence[str | Relation] = ("strip", "<", REMODEL)
            claims.append(order(table, "gm", worse, "skull stripping is worse"))
    return judged(table, claims)


def _identified(work: DeidWork, seed: int, row: str) -> dict[str, float]:
    """One row of Figure 3 for one seed."""

    def compute() -> Mapping[str, float]:
        other = attack(work, seed, row)
        told = {FIVE: other.rate, "low": other.low, "high": other.high, RANK1: other.rank1.value}
        told |= {"r1 low": other.rank1.interval.low, "r1 high": other.rank1.interval.high}
        if row in work.settings.methods and work.settings.same:
            same = attack(work, seed, row, visit=0)
            told |= {SAME: same.rate, SAME1: same.rank1.value}
        if row in (UNALTERED, *work.settings.methods):
            seen = attack(work, seed, row, PHOTOGRAPHS)
            told |= {PHOTOS: seen.rate, PHOTOS1: seen.rank1.value, PHOTOS_CHANCE: float(seen.at_chance)}
            face = attack(work, seed, row, "face")
            told |= {FACE: face.rate, FACE1: face.rank1.value, FACE_CHANCE: float(face.at_chance)}
        return told | {AT_CHANCE: float(other.at_chance), COUNT: float(other.trials)}

    return work.numbers(f"figure 3, {row}, seed {seed}", compute)


def attack(work: DeidWork, seed: int, row: str, kind: str = "", visit: int = 1) -> Identification:
    """Unaltered heads of the first visit against de-faced ones of a visit.

    Args:
        work: the experiment.
        seed: of the split.
        row: the method.
        kind: what the attacker has: "" everything, in millimetres; ``PHOTOGRAPHS``; or one part of the surface, of
            ``agent.defacing.reidentification.features.ZONES``, also in millimetres.
        visit: of the de-faced heads; 0 is the same visit.

    Raises:
        TooFewHeadsError: fewer than five people are left of a part.
    """
    parts = work.parts(seed)
    groups = list[People]()
    for names in (parts.public, parts.tested):
        pairs = [pair for name in names for pair in _pair(work, seed, row, name, visit)]
        if len(pairs) < CHOICES:
            raise TooFewHeadsError(
                f"{row}: {len(pairs)} of {len(names)} people are left; {CHOICES} at least are needed"
            )
        groups.append(looks_of([(_kind(known, kind), _kind(made, kind)) for known, made in pairs]))
    if kind in ZONES:
        pixels = pixels_of(groups[0].known, work.settings.eye, kind)
        groups = [People(*(tuple(only(x, pixels) for x in side) for side in (g.known, g.made))) for g in groups]
    return attacked(row, groups[0], groups[1], work.rng("chance", row, seed, kind, visit))


def _pair(work: DeidWork, seed: int, row: str, name: str, visit: int) -> list[tuple[ScanFeatures, ScanFeatures]]:
    """The two looks at one person; none if the scan is refused, or the method refuses it: it is not released then."""
    if name in work.refused(seed):
        return []
    first, second = work.visit(name, 0), work.visit(name, visit)
    try:
        if row in (HULL, BRAIN):
            return [(work.look(first, row, seed), work.look(second, row, seed))]
        known = work.look(first, UNALTERED, seed)
        made = work.look(second, UNALTERED if row == BLURRED else row, seed)
    except NotDefacedError:
        return []
    if row == BLURRED:
        eye, blur = work.settings.eye, work.settings.blur_mm
        return [(out_of_focus(known, eye, blur), out_of_focus(made, eye, blur))]
    return [(known, made)]


def _kind(look: ScanFeatures, kind: str) -> ScanFeatures:
    if kind == PHOTOGRAPHS:
        return ScanFeatures({kind: look.channels[kind]}, {})
    return ScanFeatures({name: one for name, one in look.channels.items() if name != PHOTOGRAPHS}, look.clouds)


def _effects(work: DeidWork, seed: int, row: str) -> dict[str, float]:
    """One row of Figure 4 for one seed."""

    def compute() -> Mapping[str, float]:
        people = _tested(work, seed)
        told = [one for name in people[: work.settings.segmented] for one in _told(work, seed, row, name)]
        if not told:
            raise TooFewHeadsError(f"{row}: no head is left to segment")
        found = {part: median(one[part] for one in told) for part in PARTS}
        found |= _deviation(work, seed, row, people)
        worst = max(one[CHANGED] for one in told)
        return found | {SECONDS: fmean(one[SECONDS] for one in told), CHANGED: worst, COUNT: float(len(told))}

    return work.numbers(f"figure 4, {row}, seed {seed}", compute)


def _told(work: DeidWork, seed: int, row: str, name: str) -> list[dict[str, float]]:
    """The numbers of one person, if the method does not refuse the head. All methods' are made while it is held."""
    scan = work.visit(name, 1)
    found = list[dict[str, float]]()
    for method in work.settings.methods:
        with suppress(NotDefacedError):
            told = work.told(scan, method, seed)
            found += [told] if method == row else []
    return found


def _deviation(work: DeidWork, seed: int, row: str, people: Sequence[str]) -> dict[str, float]:
    """n_D - n_O in years over people; nothing where the data do not say how old the public part is."""
    net = _age(work, seed)
    if net is None:
        return {}
    made = list[np.ndarray]()
    for name in people:
        scan = work.visit(name, 1)
        for method in work.settings.methods:
            with suppress(NotDefacedError):
                cubes = [work.cube(scan, one, seed) for one in (UNALTERED, method)]
                made += [np.stack(cubes)] if method == row else []
    if not made:
        raise TooFewHeadsError(f"{row}: no head is left to tell the age of")
    judge = brain_age_from(net)
    years = [predicted(judge, np.stack([one[side] for one in made])) for side in (0, 1)]
    apart = [float(d) for d in years[1] - years[0]]
    spread = stdev(apart) if len(apart) > 1 else 0.0
    return {AGE: fmean(apart), AGE_SD: spread, AGE_MAE: fmean(abs(d) for d in apart)}


def _age(work: DeidWork, seed: int) -> bytes | None:
    """The network of ages, trained on the public part of a seed; its file is kept."""
    public = work.parts(seed).public
    refused = work.refused(seed)
    scans = [work.visit(name, n) for name in public if name not in refused for n in (0, 1)]
    aged = [(scan, scan.age) for scan in scans if scan.age is not None]
    if len(aged) < 2 * CHOICES or len({age for _, age in aged}) < 2:
        return None

    def train() -> dict[str, np.ndarray]:
        cubes = np.stack([work.cube(scan, UNALTERED, seed) for scan, _ in aged])
        years = np.array([age for _, age in aged], np.float64)
        place = work.folder / f"age-{seed}-{work.digest[:12]}"
        raw = train_brain_age(Aged(cubes, years), work.settings.age, place)
        return {"file": np.frombuffer(raw, np.uint8)}

    kept = work.arrays(f"network of ages, seed {seed}", train, f"network of ages, seed {seed}")
    return kept["file"].tobytes()


def _tested(work: DeidWork, seed: int) -> list[str]:
    refused = work.refused(seed)
    return [name for name in work.parts(seed).tested if name not in refused]


def _who(work: DeidWork) -> tuple[str, ...]:
    seeds = work.settings.seeds
    parts = work.parts(seeds[0])
    refused = len(parts.tested) - len(_tested(work, seeds[0]))
    return (
        f"{work.heads.name}: {len(parts.tested)} people tested, {refused} of them refused, {len(parts.public)} to"
        f" learn from, {len(parts.averaged)} averaged; mean ± sd of {len(seeds)} seed(s)",
    )


def _claim(table: Table, column: str, row: str, holds: Callable[[float], bool], words: str) -> Verdict:
    cell = table.of(row, column)
    kept = sum(bool(holds(v)) for v in cell.values)
    every = all(holds(v) for v in cell.values)
    return Verdict(f"{column}: {row} is {words}", every, (kept, len(cell.values)), f"{cell.mean:.4g}")


def _near(table: Table, part: str, other: str) -> Verdict:
    ours, theirs = table.of(REMODEL, part), table.of(other, part)
    each = [a >= b - _LESS for a, b in zip(ours.values, theirs.values, strict=True)]
    numbers = f"{REMODEL} {ours.mean:.4g}, {other} {theirs.mean:.4g}"
    claim = f"{part}: {REMODEL} is no more than {_LESS} below {other}"
    return Verdict(claim, ours.mean >= theirs.mean - _LESS, (sum(each), len(each)), numbers)


TABLES: Final[Mapping[str, Callable[[DeidWork], Table]]] = {"deid-figure3": figure3, "deid-figure4": figure4}


def run(name: str, heads: Heads, settings: DeidSettings, folder: Path, say: Say) -> Table:
    """One figure of the paper.

    Args:
        name: of :data:`TABLES`.
        heads: scans by person and session, the atlas and what registers to it.
        settings: all that is chosen beforehand.
        folder: keeps looks, cubes and numbers; a run that was killed, or the other figure, goes on from there.
        say: told what is being done.

    Raises:
        KeyError: no such figure.
        TooFewHeadsError: too few people were scanned twice, or too many are refused.
        BusyError, CellError: see :mod:`deploy.reproduction.result_cache`.
    """
    table = TABLES[name]
    with locked(folder):
        return table(DeidWork(heads, settings, folder, say))
