"""Privacy Distillation's Tables 1 and 2 and Figures 2 and 3, measured again, with the orders that the paper found.

Fernandez, Sanchez, Pinaya, Jacenków, Tsaftaris & Cardoso 2023. Differences from the paper, on purpose:

* R_re-id is measured by a second verifier that filtered nothing, and over every image of every patient that is
  learned. The paper asks the network that filtered, about the one real image of a sample's own prompt.
* The threshold is calibrated to a rate of false matches for a gallery of that size; figure 2 has the paper's 0.5.
* Prompts are templates with a label. There is no report, and no sample has an image of its own.
* The autoencoder and the networks that judge learn from people of whom nobody is in the cohort. "Pre-trained" in
  Table 1 is a model of those people; the paper's is Stable Diffusion. Its FID is a Fréchet distance in random
  features here, which compares rows and nothing else.
* D_synth has as many images of each condition. D_distill are the student's images before they are vetted: what
  a release of images vets once more stands in a row of its own. D_filtered is what the student learned.
* Made-up radiographs have findings that are independent of the person. A cohort of them is small, so that a teacher
  comes to know it by heart: how much a teacher remembers is a setting, and no finding.
* Figure 3's models are compared with all patients of the cohort, for one threshold; all take the same steps.
* Nothing is chosen by what stands in a table: the last step of every training counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit

from agent.evaluation.fidelity import describe, frechet
from agent.models.features.extractors import RandomFeatures
from agent.models.image_tensors import to_tensor
from agent.vetting.filter import vet
from agent.vetting.nearest_neighbours import exhaustive
from agent.vetting.reference import Reference, VerifierView, look
from deploy.reproduction.attacks.extraction import DELTAS, Planted, by_threshold, planted_caught
from deploy.reproduction.distillation_experiment import (
    DistillSettings,
    DistillWork,
    Images,
    Radiographs,
    aligner,
    opened,
    verifier,
    vetting,
)
from deploy.reproduction.distillation_models import Made, Teacher, distilled, drawn, planted, real, reference, shown
from deploy.reproduction.measures.chest_findings import area, train_findings
from deploy.reproduction.result_cache import Say
from deploy.reproduction.tables import Cell, Table, Verdict, judged, order

RE_ID, OWN, AUC, S_ALIGN, LEFT = "R_re-id", "R_re-id, own", "AUC", "s_align", "pictures"
D_REAL, STRANGERS, D_SYNTH = "D_real", "real, held out", "D_synth"
D_FILTERED, D_DISTILL, RELEASED = "D_filtered", "D_distill", "released"
FD: Final = "FD"
CALIBRATED: Final = "calibrated"
_THIRD, _MOST_LOST = 1 / 3, 0.93  # of the paper: 4.24 % to 1.34 %, 0.863 to 0.810
_JUDGE: Final = 2024  # seed of the features that judge
_AT_ONCE: Final = 256
Measure = Callable[[int], Mapping[str, float]]


def scores(work: DistillWork, of: Reference, images: Images, unseen: bool) -> NDArray[np.float64]:
    """(n,) highest log-odds of each image against every image of the reference, by one verifier."""
    judge = verifier(work, unseen)
    batches = (to_tensor(_unit(images[a : a + 64])) for a in range(0, len(images), 64))
    made: VerifierView = look(batches, (judge,), work.settings.device)[0][0]
    return exhaustive(judge, made, of.unseen if unseen else of.seen)[0]


def re_identified(work: DistillWork, of: Reference, images: Images) -> dict[str, float]:
    """R_re-id by the unseen verifier and by the filter's own, at their thresholds; NaN counts as re-identified."""
    told = {}
    for name, unseen, threshold in ((RE_ID, True, "unseen"), (OWN, False, "verifier")):
        told[name] = float((~(scores(work, of, images, unseen) < of.thresholds[threshold])).mean())
    return told


def aligned(work: DistillWork, made: Made) -> float:
    """Mean s_align of images that were asked to show a condition."""
    tokens = work.conditions.tokens(torch.from_numpy(made.labels))
    parts = (slice(a, a + _AT_ONCE) for a in range(0, len(tokens), _AT_ONCE))
    judge = aligner(work)  # trained here, if it was not before: outside of what follows
    with torch.no_grad():
        found = [judge.scores(to_tensor(_unit(made.images[part])), tokens[part]) for part in parts]
    return float(torch.cat(found).double().mean())


def utility(work: DistillWork, seed: int, images: Images, findings: NDArray[np.bool_]) -> float:
    """The mean AUC of five findings on real patients to test on, of a classifier that learns these images."""
    if bool((findings == findings[:1]).all()):
        return 0.5  # nothing to learn
    s, test, found = work.settings, real(work, seed, test=True), []
    # as many steps for a small set as for a large one: a cohort's few images are not judged by a shorter training
    recipe = replace(s.recipe, epochs=max(s.recipe.epochs, round(s.recipe.epochs * s.pictures / len(images))))
    for number in range(s.classifiers):
        predict = train_findings(_unit(images), findings, recipe, 100 * seed + number)
        logits = predict(_unit(test.images))
        found.append([area(logits[:, one], test.findings[:, one]) for one in range(findings.shape[1])])
    return float(np.mean(found))


def measured(work: DistillWork, seed: int, row: str) -> dict[str, float]:
    """One row of Table 2."""

    def compute() -> dict[str, float]:
        of = reference(work, seed)
        if row == D_REAL:
            learned = real(work, seed)
            made = Made(learned.images, work.labels_of(learned))
            return {AUC: utility(work, seed, made.images, learned.findings), S_ALIGN: aligned(work, made)}
        made = _row(work, seed, row)
        told = re_identified(work, of, made.images) | {S_ALIGN: aligned(work, made), LEFT: float(len(made.images))}
        if row == STRANGERS:
            return told
        return told | {AUC: utility(work, seed, made.images, shown(work, made.labels))}

    return work.numbers(work.keyed(row, seed), compute)


def _row(work: DistillWork, seed: int, row: str) -> Made:
    if row == STRANGERS:
        test = real(work, seed, test=True)
        known = real(work, seed).owners
        labels = work.labels_of(test)
        rows = np.flatnonzero((labels >= 0) & ~np.isin(test.owners, known))
        return Made(test.images[rows], labels[rows])
    if row == D_SYNTH:
        return drawn(work, Teacher(seed))
    learned, made = distilled(work, seed)
    if row == RELEASED:
        kept = vet(made.images, reference(work, seed), vetting(work)).kept
        return Made(made.images[kept], made.labels[kept])
    return learned if row == D_FILTERED else made


def table2(work: DistillWork) -> Table:
    """Table 2, with what the filter left, what is released, and images of nobody."""
    cells = dict[tuple[str, str], Cell]()
    for row in (D_REAL, STRANGERS, D_SYNTH, D_FILTERED, D_DISTILL, RELEASED):
        cells |= _cells(work, row, partial(measured, work, row=row))
    name = "distillation-table2"
    table = _table(work, name, "R_re-id: lower is better; AUC and s_align: higher", cells, _budget(work))
    third = _bound(table, RE_ID, D_DISTILL, D_SYNTH, lambda a, b: a <= _THIRD * b, "at most a third of")
    own = _bound(table, OWN, D_FILTERED, D_SYNTH, lambda a, b: a == 0.0 < b, "0, and not 0 of")
    worth = _bound(table, AUC, D_DISTILL, D_REAL, lambda a, b: a >= _MOST_LOST * b, f"at least {_MOST_LOST} of")
    orders = (
        order(table, AUC, (D_DISTILL, "<=", D_SYNTH, "<=", D_REAL)),
        order(table, S_ALIGN, (D_SYNTH, "<", D_FILTERED), "filtering and reranking raise it"),
        order(table, S_ALIGN, (D_DISTILL, "<=", D_SYNTH, "<=", D_REAL)),
    )
    return judged(table, (third, own, worth, *orders))


def fig2(work: DistillWork) -> Table:
    """Figure 2: R_re-id by the threshold of the verifier's probability, with the calibrated one in its place."""

    def column(seed: int, row: str, unseen: bool) -> Mapping[str, float]:
        def compute() -> Mapping[str, float]:
            of = reference(work, seed)
            found = scores(work, of, _row(work, seed, row).images, unseen)
            delta = of.thresholds["unseen" if unseen else "verifier"]
            told = {f"δ = {d:g}": one.value for d, one in zip(DELTAS, by_threshold(found), strict=True)}
            return told | {CALIBRATED: float((~(found < delta)).mean()), "its δ": float(expit(delta))}

        return work.numbers(work.keyed(f"by threshold, {row}, unseen {unseen}", seed), compute)

    cells = dict[tuple[str, str], Cell]()
    columns = {f"{row}, {'unseen' if unseen else 'own'}": (row, unseen) for unseen in (True, False) for row in _SETS}
    for name, (row, unseen) in columns.items():
        found = [column(seed, row, unseen) for seed in work.settings.seeds]
        cells |= {(one, name): Cell(tuple(each[one] for each in found)) for one in found[0]}
    table = _table(work, "distillation-fig2", "R_re-id by threshold, against all patients", cells)
    names = [f"{D_SYNTH}, {which}" for which in ("unseen", "own")]
    flat = [
        _bound(
            table, name, "δ = 0.9", "δ = 0.05", lambda a, b: a >= 0.9 * b, "0.9 or more (no difference) of that at"
        )
        for name in names
    ]
    return judged(table, flat)


_SETS: Final = (STRANGERS, D_SYNTH, D_FILTERED, D_DISTILL)


def fig3(work: DistillWork) -> Table:
    """Figure 3: R_re-id of teachers that learn a share of the patients."""
    cells, names = dict[tuple[str, str], Cell](), list[str]()
    for share in work.settings.shares:
        names.append(f"{share:.0%} of the patients")
        cells |= _cells(work, names[-1], partial(_teacher, work, share=share))
    table = _table(work, "distillation-fig3", "R_re-id of a teacher's images", cells, _budget(work))
    return judged(table, [order(table, RE_ID, (names[0], "<", one)) for one in names[1:]])


def table1(work: DistillWork) -> Table:
    """Table 1: pre-training and conditions."""
    cells, names = dict[tuple[str, str], Cell](), dict[tuple[bool, bool], str]()
    for pretrained in (False, True):
        for conditional in (False, True):
            name = f"{'pre-trained' if pretrained else 'from scratch'}, {'' if conditional else 'un'}conditional"
            names[pretrained, conditional] = name
            measure = partial(_teacher, work, conditional=conditional, pretrained=pretrained)
            cells |= _cells(work, name, measure)
    table = _table(work, "distillation-table1", "R_re-id and FD: lower is better", cells, _budget(work))
    least, most = names[False, True], names[False, False]
    others = [name for name in names.values() if name not in (least, most)]
    claims = [order(table, RE_ID, (least, "<", one)) for one in (*others, most)]
    claims += [order(table, RE_ID, (one, "<", most)) for one in others]
    claims.append(order(table, FD, (most, "<", least)))
    return judged(table, claims)


def _teacher(work: DistillWork, seed: int, **which: Any) -> dict[str, float]:
    return memorised(work, Teacher(seed, **which))


def memorised(work: DistillWork, which: Teacher) -> dict[str, float]:
    """R_re-id and the Fréchet distance of a teacher's images; neither sees a condition."""

    def compute() -> dict[str, float]:
        images = drawn(work, which).images
        net = RandomFeatures(seed=_JUDGE, channels=1, depth=4)
        known = real(work, which.seed).images
        a, b = (describe(net, _unit(one), np.arange(len(one), dtype=np.int64)).values for one in (known, images))
        return re_identified(work, reference(work, which.seed), images) | {FD: frechet(a, b, "shrunk")}

    return work.numbers(work.keyed(f"memorised, {which.key}", which.seed), compute)


def caught(work: DistillWork, seed: int, times: int) -> tuple[Planted, dict[str, float]]:
    """A stranger's image, ``times`` over in what a teacher learns: what of it is drawn, and what is dropped.

    Returns:
        What became of it, and its shares by name; a share of nothing is NaN.
    """
    which, stranger = Teacher(seed, planted=times), planted(work, seed)
    of, made = reference(work, seed, stranger), drawn(work, Teacher(seed, planted=times))
    kept = vet(made.images, of, vetting(work)).kept
    picture = np.rint(stranger.images[0].pixels * 255).astype(np.uint8)
    found = planted_caught(made.images, kept, picture, real(work, which.seed).images)
    dropped = float("nan") if found.caught is None else found.caught.value
    return found, {"drawn": found.drawn.value, "caught": dropped, "pictures": float(found.drawn.trials)}


def _cells(work: DistillWork, row: str, measure: Measure) -> dict[tuple[str, str], Cell]:
    found = [measure(seed) for seed in work.settings.seeds]
    return {(row, one): Cell(tuple(each[one] for each in found)) for one in found[0]}


def _table(work: DistillWork, name: str, title: str, cells: Mapping[tuple[str, str], Cell], *told: str) -> Table:
    rows, columns = (tuple(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    seeds, names = work.settings.seeds, work.sources.name
    learned, test = (len(np.unique(real(work, seeds[0], test).owners)) for test in (False, True))
    who = f"{names}: {learned} patients learned, {test} to test on; mean ± sd of {len(seeds)} seed(s)"
    return Table(name, title, rows, columns, cells, (), (who, *told))


def _budget(work: DistillWork) -> str:
    share = 100 * work.settings.false_matches / 2
    return (
        f"{RE_ID}: by a verifier that filtered nothing, against every image learned; of images of nobody about "
        f"{share:g} % are matched ({STRANGERS}). {OWN}: by the verifier that filters, all pairs"
    )


def _bound(table: Table, column: str, a: str, b: str, holds: Callable[[float, float], bool], words: str) -> Verdict:
    """Whether row ``a`` keeps a bound by row ``b``, in the means and in each seed."""
    return _judged(f"{column}: {a} is {words} {b}", (a, b), (table.of(a, column), table.of(b, column)), holds)


def _judged(
    claim: str, names: Sequence[str], cells: tuple[Cell, Cell], holds: Callable[[float, float], bool]
) -> Verdict:
    a, b = cells
    each = [bool(holds(x, y)) for x, y in zip(a.values, b.values, strict=True)]
    numbers = ", ".join(f"{n} {c.mean:.4g} ± {c.spread:.2g}" for n, c in zip(names, cells, strict=True))
    return Verdict(claim, bool(holds(a.mean, b.mean)), (sum(each), len(each)), numbers)


def _unit(images: Images) -> NDArray[np.float32]:
    out: NDArray[np.float32] = images.astype(np.float32) / np.float32(255)
    return out


TABLES: Final[Mapping[str, Callable[[DistillWork], Table]]] = {
    "distillation-table1": table1,
    "distillation-table2": table2,
    "distillation-fig2": fig2,
    "distillation-fig3": fig3,
}


def run(name: str, sources: Radiographs, settings: DistillSettings, folder: Path, say: Say) -> Table:
    """One table or figure of the paper.

    Args:
        name: of :data:`TABLES`.
        sources: the public part and the cohorts.
        settings: all that is chosen beforehand.
        folder: keeps networks, images and numbers; a run that was killed, or another table, goes on from there.
        say: told what is being done.
    Raises:
        KeyError: no such table.
        RecogniserError: the vetting misses near-duplicates of the cohort's own images.
        NothingLeftError: no sample was kept.
        ValueError, BusyError, CellError, DivergedError: see :mod:`deploy.reproduction.distillation_experiment`.
    """
    table = TABLES[name]
    with opened(sources, settings, folder, say) as work:
        return table(work)
