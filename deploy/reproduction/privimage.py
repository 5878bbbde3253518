"""PrivImage's Tables 2 and 3 and Figures 6 and 7, measured again, with the order that the paper found.

Differences from the paper, on purpose:

* The unit is the patient where a data set has patients. ``per_picture`` of the settings is the paper's unit.
* Epsilon is that of a privacy loss distribution, the histogram's share included, which takes 9 to 26 % less noise
  than the paper's conversion. Sampling is Poisson, both noises are the operating system's, divisors are public.
* All methods of a model have one architecture, one fine-tuning, and one pre-training where they have any. DPDM and
  DPGAN have none, as in the paper: they had fewer steps.
* PDP-Diffusion and DPGAN-p learn all public images without a condition: a public name is no class of the cohort.
  PrivImage's selection is per class, so that it learns the condition as well (supplement C.2). That, and not nearness
  alone, is a part of its lead; figure 7's last row is the same model on all images.
* The CNN is a small one (:mod:`agent.evaluation.released_set`); the Fréchet distance is in random features with
  shrunk covariances where no Inception is at hand: orders compare, figures don't. SDS (Eq. 5) uses means of the query
  function's own features in place of word vectors.
* Table 3's rows without noise take the same steps with the same clip. More steps would show what a model could do.
* Nothing is chosen by what stands in a table: a release's last step counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.evaluation.fidelity import describe, frechet
from agent.evaluation.released_set import (
    CNN,
    LR,
    MLP,
    Meaning,
    class_means,
    frequencies,
    similarity,
    train_logistic,
    train_perceptron,
)
from agent.evaluation.utility import Examples, Train, network_trainer
from agent.models.features.extractors import RandomFeatures
from agent.models.image_tensors import to_tensor
from agent.models.semantics.classifier import Semantics
from deploy.reproduction.experiment import Rows
from deploy.reproduction.privimage_experiment import (
    Images,
    Method,
    PrivateSettings,
    PrivateWork,
    Release,
    Sources,
    opened,
    price,
    released,
    selected,
    semantics,
)
from deploy.reproduction.result_cache import Say
from deploy.reproduction.tables import Cell, Relation, Table, Verdict, judged, order
from policies.accounting.rounding import epsilon_text, format_rounded_up

DPGAN, DPGAN_P, PRIVIMAGE_G = (
    Method("DPGAN", "G", "none"),
    Method("DPGAN-p", "G", "whole"),
    Method("PrivImage+G", "G", "selected"),
)
DPDM, PDP, PRIVIMAGE_D = (
    Method("DPDM", "D", "none"),
    Method("PDP-Diffusion", "D", "whole"),
    Method("PrivImage+D", "D", "selected"),
)
METHODS: Final = (DPGAN, DPGAN_P, DPDM, PDP, PRIVIMAGE_G, PRIVIMAGE_D)
NONPRIV_G, NONPRIV_D = Method("NonPrivG", "G", "selected", False), Method("NonPrivD", "D", "selected", False)
REAL, PUBLIC = "real images", "public images of the same names"
FD: Final = "FD"
_JUDGE: Final = 2024  # seed of the features that judge
_COMPARED: Final = 5_000  # images, at most, of a Fréchet distance (section 4.3)


def utility(work: PrivateWork, seed: int, images: Images, labels: NDArray[np.int64]) -> dict[str, float]:
    """Accuracy of LR, MLP and CNN on the real test part (section 4.3)."""
    test = work.halves(seed).test
    truth, count = work.grades[test], len(work.classes)
    if len(np.unique(labels)) < 2 or len(np.unique(images.reshape(len(images), -1), axis=0)) < 2:
        return dict.fromkeys((LR, MLP, CNN), float(np.bincount(truth).max() / len(truth)))
    train: Mapping[str, Train] = {
        LR: train_logistic,
        MLP: train_perceptron,
        CNN: network_trainer(work.settings.recipe),
    }
    made = Examples(_unit(images), labels, np.arange(len(images), dtype=np.int64), count)
    real = _unit(work.sensitive.images[test])
    return {name: float((one(made, seed)(real) == truth).mean()) for name, one in train.items()}


def fidelity(work: PrivateWork, seed: int, images: Images) -> dict[str, float]:
    """The Fréchet distance to the cohort's real images."""
    net = RandomFeatures(seed=_JUDGE, channels=3 if images.ndim == 4 else 1, depth=2 if images.shape[1] < 32 else 4)
    rng = work.rng("compared", seed)
    real = work.halves(seed).cohort
    rows = real[rng.permutation(len(real))[:_COMPARED]]
    made = images[rng.permutation(len(images))[:_COMPARED]]
    a, b = (
        describe(net, _unit(x), np.arange(len(x), dtype=np.int64)).values for x in (work.sensitive.images[rows], made)
    )
    return {FD: frechet(a, b, "shrunk")}


def measured(work: PrivateWork, release: Release) -> dict[str, float]:
    """Utility and fidelity of a release, computed once."""

    def compute() -> dict[str, float]:
        images, labels = released(work, release)
        return utility(work, release.seed, images, labels) | fidelity(work, release.seed, images)

    return work.numbers(f"measured, {release.key(work.settings)}", compute)


def real(work: PrivateWork, seed: int) -> dict[str, float]:
    """A classifier that learns the cohort itself: Table 3's NonPriv."""
    rows = work.halves(seed).cohort
    return work.numbers(
        f"real, seed {seed}", lambda: utility(work, seed, work.sensitive.images[rows], work.grades[rows])
    )


def public(work: PrivateWork, seed: int) -> dict[str, float]:
    """A classifier that learns the public images whose names are the cohort's classes: what costs no privacy.

    Raises:
        ValueError: the public set has no such names.
    """
    shared = [name in work.classes for name in work.public.labels]
    if set(work.classes) - set(work.public.labels):
        raise ValueError("the public set does not name the cohort's classes")
    rows = np.flatnonzero(shared)
    labels = np.array([work.classes.index(work.public.labels[row]) for row in rows], np.int64)

    def compute() -> dict[str, float]:
        images = work.public.images[rows]
        return utility(work, seed, images, labels) | fidelity(work, seed, images)

    return work.numbers(f"public alone, seed {seed}", compute)


Measure = Callable[[int], Mapping[str, float]]  # of a seed


def _each(work: PrivateWork, release: Release) -> Measure:
    """The figures of this release, of any seed."""
    return lambda seed: measured(work, replace(release, seed=seed))


def _row(work: PrivateWork, name: str, prefix: str, measure: Measure) -> dict[tuple[str, str], Cell]:
    found = [measure(seed) for seed in work.settings.seeds]
    return {(name, f"{prefix}{one}"): Cell(tuple(each[one] for each in found)) for one in found[0]}


def _table(work: PrivateWork, name: str, title: str, cells: Mapping[tuple[str, str], Cell], *told: str) -> Table:
    s = work.settings
    rows, columns = (tuple(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    names = f"{work.sensitive.name} as the sensitive set, {work.public.name} as the public one"
    unit = f"epsilon by PLD at delta {format_rounded_up(s.delta)}, of one {s.unit} added or removed"
    notes = (f"{names}; {unit}; mean ± sd of {len(s.seeds)} seed(s)", *told)
    return Table(name, title, rows, columns, cells, (), notes)


def _priced(work: PrivateWork, releases: Iterable[Release]) -> tuple[str, ...]:
    """What each kind of release costs, once."""
    told = dict[str, None]()
    for release in releases:
        claim, parts, epsilon = price(work, release)
        query = f", query of noise {work.settings.query.noise:g}" if len(parts) > 1 else ""
        told[
            f"model {release.method.family}{query}: q {claim.sampling_rate:g}, T {claim.steps}, "
            f"sigma {claim.noise_multiplier:.3f}: epsilon {epsilon_text(epsilon)}"
        ] = None
    return tuple(told)


def _downwards(better: Sequence[str]) -> tuple[str | Relation, ...]:
    """Best first, as a chain that rises."""
    chain: list[str | Relation] = []
    for name in reversed(better):
        chain += ["<", name] if chain else [name]
    return tuple(chain)


def table2(work: PrivateWork) -> Table:
    """Table 2: six methods at every epsilon."""
    cells = dict[tuple[str, str], Cell]()
    releases = list[Release]()
    for epsilon in work.settings.epsilons:
        for method in METHODS:
            one = Release(method, work.settings.seeds[0], epsilon)
            releases.append(one)
            cells |= _row(work, method.name, f"ε={epsilon:g} ", _each(work, one))
    table = _table(work, "privimage-table2", "accuracy: higher is better; FD: lower", cells, *_priced(work, releases))
    verdicts = list[Verdict]()
    for epsilon in work.settings.epsilons:
        for family in ((PRIVIMAGE_D, PDP, DPDM), (PRIVIMAGE_G, DPGAN_P, DPGAN), (PRIVIMAGE_D, PRIVIMAGE_G)):
            names = [method.name for method in family]
            verdicts.append(order(table, f"ε={epsilon:g} {CNN}", _downwards(names)))
            if len(names) > 2:
                verdicts.append(order(table, f"ε={epsilon:g} {FD}", _downwards(names[::-1])))
    return judged(table, verdicts)


def table3(work: PrivateWork) -> Table:
    """Table 3: what privacy costs, at the largest epsilon."""
    epsilon = max(work.settings.epsilons)
    cells = _row(work, REAL, "", partial(real, work))
    if not set(work.classes) - set(work.public.labels):
        cells |= _row(work, PUBLIC, "", partial(public, work))
    for method in (NONPRIV_G, NONPRIV_D, PRIVIMAGE_G, PRIVIMAGE_D):
        one = Release(method, 0, epsilon)
        cells |= _row(work, method.name, "", _each(work, one))
    priced = _priced(work, [Release(method, 0, epsilon) for method in (PRIVIMAGE_G, PRIVIMAGE_D)])
    table = _table(work, "privimage-table3", "without privacy and with it", cells, *priced)
    pairs = ((PRIVIMAGE_D, NONPRIV_D), (PRIVIMAGE_G, NONPRIV_G))
    verdicts = [order(table, CNN, (a.name, "<", b.name)) for a, b in pairs]
    verdicts.append(order(table, CNN, (NONPRIV_D.name, "<", REAL)))
    if (PUBLIC, CNN) in cells:
        verdicts.append(order(table, CNN, (PUBLIC, "<", PRIVIMAGE_D.name), "private data teach something"))
    return judged(table, verdicts)


def sds(work: PrivateWork, seed: int, keep: int) -> dict[str, float]:
    """SDS of the cohort and the selection (Eq. 5); of the whole public set where ``keep`` is 0."""

    def compute() -> dict[str, float]:
        net = semantics(work)
        seen = _embedded(net, work.public.images)
        centre, count = seen.mean(axis=0), len(work.bins)
        vectors = class_means(seen, work.public_bins, count, centre)
        rows: Rows = np.arange(len(seen)) if keep == 0 else selected(work, seed, keep)[0]
        chosen = Meaning(frequencies(work.public_bins[rows], count), vectors)
        cohort = work.halves(seed).cohort
        grades, classes = work.grades[cohort], len(work.classes)
        means = class_means(_embedded(net, work.sensitive.images[cohort]), grades, classes, centre)
        mine = Meaning(frequencies(grades, classes), means)
        return {"SDS": similarity(mine, chosen), "share": len(rows) / len(seen)}

    return work.numbers(f"SDS, k2 {keep}, seed {seed}", compute)


def fig6(work: PrivateWork) -> Table:
    """Figure 6: how near a selection is, before any fine-tuning."""
    cells = dict[tuple[str, str], Cell]()
    for method in (DPGAN_P, PDP, PRIVIMAGE_G, PRIVIMAGE_D):
        one = Release(method, 0, tuned=False)
        cells |= _row(work, method.name, "before: ", _each(work, one))
    for keep in work.settings.keeps:
        cells |= _row(work, f"selection, k2 = {keep}", "", partial(sds, work, keep=keep))
    cells |= _row(work, "the whole public set", "", partial(sds, work, keep=0))
    table = _table(work, "privimage-fig6", "before fine-tuning: FD, lower is better; SDS, higher is better", cells)
    verdicts = [
        order(table, f"before: {FD}", (PRIVIMAGE_D.name, "<", PDP.name)),
        order(table, f"before: {FD}", (PRIVIMAGE_G.name, "<", DPGAN_P.name)),
    ]
    whole = "the whole public set"
    verdicts += [order(table, "SDS", (whole, "<", f"selection, k2 = {keep}")) for keep in work.settings.keeps]
    return judged(table, verdicts)


def fig7(work: PrivateWork) -> Table:
    """Figure 7: the share that is selected, and the size of the model, PrivImage+D at the largest epsilon."""
    s = work.settings
    epsilon, cells = max(s.epsilons), dict[tuple[str, str], Cell]()
    names = dict[int, str]()
    for keep in s.keeps:
        share = float(np.mean([sds(work, seed, keep)["share"] for seed in s.seeds]))
        names[keep] = f"{share:.0%} selected"
        one = Release(PRIVIMAGE_D, 0, epsilon, keep)
        cells |= _row(work, names[keep], "", _each(work, one))
    whole = Release(PDP, 0, epsilon)
    cells |= _row(work, "100%", "", _each(work, whole))
    for widths in s.widths:
        one = Release(PRIVIMAGE_D, 0, epsilon, widths=widths)
        name = f"widths {', '.join(map(str, widths))}"
        cells |= _row(work, name, "", _each(work, one))
    priced = _priced(work, [Release(PRIVIMAGE_D, 0, epsilon), Release(PDP, 0, epsilon)])
    table = _table(
        work, "privimage-fig7", "selection and size; accuracy: higher is better; FD: lower", cells, *priced
    )
    return judged(table, [order(table, CNN, ("100%", "<", names[keep])) for keep in s.keeps])


def _embedded(net: Semantics, images: Images) -> NDArray[np.float64]:
    with torch.no_grad():
        parts = [net.embed(to_tensor(_unit(images[a : a + 256]))).double() for a in range(0, len(images), 256)]
    out: NDArray[np.float64] = torch.cat(parts).numpy()
    return out


def _unit(images: Images) -> NDArray[np.float32]:
    out: NDArray[np.float32] = images.astype(np.float32) / np.float32(255.0)
    return out


TABLES: Final[Mapping[str, Callable[[PrivateWork], Table]]] = {
    "privimage-table2": table2,
    "privimage-table3": table3,
    "privimage-fig6": fig6,
    "privimage-fig7": fig7,
}


def run(name: str, sources: Sources, settings: PrivateSettings, folder: Path, say: Say) -> Table:
    """One table or figure of the paper.

    Args:
        name: of :data:`TABLES`.
        sources: the sensitive and the public set.
        settings: all that is chosen beforehand.
        folder: keeps networks, images and numbers; a run that was killed, or another table, goes on from there.
        say: told what is being done.
    Raises:
        KeyError: no such table.
        SharedImageError: a public image is a sensitive one.
        CoordinatorUnreachableError: no noise keeps an epsilon.
        ValueError, BusyError, CellError, DivergedError: see :mod:`deploy.reproduction.privimage_experiment`.
    """
    table = TABLES[name]
    with opened(sources, settings, folder, say) as work:
        return table(work)
