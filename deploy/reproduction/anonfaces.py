"""AnonFACES' figures and its table, measured again as tables: clustering, information loss, attributes, recognition.

Differences from the paper, on purpose. One image of each patient is anonymised (Definition 3.1); a patient's other
images are the gallery. The k-means of the paper's code gives everybody to the *farthest* mean: here it is the
nearest. Two recognisers guide the mechanism, a third one, which it never saw, measures loss and risk: each table says
how well they know people again, since a blind one finds nobody at risk. Recognisers, generator and encoder are
trained on other people; the paper's were made by others, on faces. Figures are printed as tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from agent.domain import Clusters
from agent.evaluation.partitions import Partition
from deploy.reproduction.anonfaces_experiment import (
    MIXINGS,
    OURS,
    assignment,
    clustered,
    drawn,
    embedded,
    mixed,
    people,
    risked,
)
from deploy.reproduction.attacks.membership import Pool, Published
from deploy.reproduction.attacks.recognition import naive, rank_one
from deploy.reproduction.datasets import Dataset
from deploy.reproduction.experiment import Measure, Settings, Work, filled, name_of, opened, samples_of, tabled
from deploy.reproduction.measures.information_loss import homogeneity, tightness
from deploy.reproduction.networks import content, knowledge, recogniser
from deploy.reproduction.requirements import Needs, ready
from deploy.reproduction.result_cache import Say
from deploy.reproduction.tables import Cell, Relation, Table, Verdict, judged, order

CLUSTERINGS: Final = (
    *("anonfaces-average", "anonfaces-complete", "anonfaces-ward"),  # Fig. 2 leaves single linkage out
    *("knn", "mdav", "kmember", "kmeans", "ksalsa-greedy", "random", OURS),
)
CURVES: Final = ("anonfaces-ward", "knn", "kmeans", OURS, "random")  # Fig. 9b, 10 and 15
TIGHT_K: Final = 20  # of Fig. 2, 3 and 14
BEFORE: Final = "before"
ALONE: Final = "inverted, nobody averaged"  # no anonymity: says how much the attack could find


def _tight(work: Work, seed: int, k: int, row: str) -> dict[str, float]:
    of = people(work, seed)
    space = embedded(of, 0)
    place = assignment(clustered(of, "recogniser", row, k), space.patients)
    found = tightness(Partition(space.codes.astype(np.float64), place, "identity-0"))
    return {
        "min": found.cluster_means[0],
        "mean": found.mean,
        "max": found.cluster_means[2],
        "silhouette": found.silhouette,
        "SSE/SST": found.share,
    }


def _loss_of_embedding(work: Work, seed: int, k: int, row: str) -> dict[str, float]:
    of = people(work, seed)
    clusters = clustered(of, row, "anonfaces-ward", k)
    return risked(of, drawn(of, clusters, "StyleGAN"))


def _loss_of_clustering(work: Work, seed: int, k: int, row: str) -> dict[str, float]:
    of = people(work, seed)
    clusters = clustered(of, "recogniser", row, k)
    return risked(of, drawn(of, clusters, "StyleGAN"))


def _loss_of_generator(work: Work, seed: int, k: int, row: str) -> dict[str, float]:
    of = people(work, seed)
    clusters = clustered(of, "recogniser", "anonfaces-ward", k)
    return risked(of, drawn(of, clusters, row))


def _compared(work: Work, seed: int, k: int, row: str) -> dict[str, float]:
    of = people(work, seed)
    if row == ALONE:  # what the recogniser can still see in the generator's images
        alone = Clusters(tuple((patient.pseudonym,) for patient in of.cohort.patients))
        return risked(of, drawn(of, alone, "StyleGAN"))
    if row == "k-Same (pixels, kNN on PCA)":
        return risked(of, drawn(of, clustered(of, "PCA", "knn", k), "pixels"))
    method = {"AnonFACES": "anonfaces-ward", "ours": OURS, "random": "random"}[row]
    clusters = clustered(of, "recogniser", method, k)
    if row == "random":
        return risked(of, drawn(of, clusters, "StyleGAN"))
    return risked(of, mixed(of, clusters, k, MIXINGS[3] if row == "ours" else "adjusted"))


def _adjusted(work: Work, seed: int, k: int, row: str) -> dict[str, float]:
    of = people(work, seed)
    return risked(of, mixed(of, clustered(of, "recogniser", "anonfaces-ward", k), k, row))


def _alike(work: Work, seed: int, k: int, row: str) -> dict[str, float]:
    of, samples = people(work, seed), work.samples
    told = {"label": samples.labels, **samples.attributes}
    values = {name: [column[i] for i in of.rows] for name, column in told.items()}
    space = embedded(of, 0)
    place = assignment(clustered(of, "recogniser", row, k), space.patients)
    joint = (tuple(values),) if len(values) > 1 else ()
    return {f.name.removeprefix("homogeneous in "): f.value for f in homogeneity(place, values, joint)}


def _ranked(work: Work, seed: int, k: int, row: str) -> dict[str, float]:
    """Rank-1 of the third recogniser: gallery of other images of the same people, and of the test part."""
    of, samples = people(work, seed), work.samples
    gallery_rows = np.concatenate([of.others, work.parts(seed).test])
    gallery = Pool(samples.unit(gallery_rows), samples.owners[gallery_rows])
    net = recogniser(work, seed, 2)
    if row == BEFORE:
        return {"Rank-1": rank_one(net, gallery, Pool(samples.unit(of.rows), of.owners)).value}
    released = mixed(of, clustered(of, "recogniser", "anonfaces-ward", k), k, row)
    if released is None:
        return {"Rank-1": math.nan}
    clusters, made = released
    number = {name_of(int(p)): int(p) for p in of.owners}
    members = tuple(tuple(number[name] for name in cluster) for cluster in clusters.members)
    found = naive(net, gallery, Published(made.astype(np.float32) / np.float32(255.0), members), k)
    return {"Rank-1": found.figures[0].value}


_TOLD: Final = "loss and re-identification by a recogniser that guided nothing; Rank-1's limit is 1/k"


def _table(work: Work, name: str, title: str, cells: Mapping[tuple[str, str], Cell]) -> Table:
    known = (knowledge(work, which) for which in NEEDS[name].recognisers)
    content_net = f"the encoder was trained with {content(work)}"
    return tabled(work, name, title, cells, _TOLD, content_net, *known)


def _tight_k(work: Work) -> int:
    """20 as in Fig. 2, 3 and 14; where the cohort is small, the largest of the menu."""
    return TIGHT_K if len(people(work, work.settings.seeds[0]).rows) >= 4 * TIGHT_K else work.settings.ks[-1]


def _below(table: Table, name: str, ks: Sequence[int]) -> list[Verdict]:
    """Is a rate of every row at most 1/k?"""
    found = []
    for k in ks:
        column = f"k={k} {name}"
        for row in table.rows:
            if (row, column) in table.cells and row not in (BEFORE, ALONE):
                cell = table.of(row, column)
                kept = sum(v <= 1 / k for v in cell.values)
                numbers = f"{cell.mean:.4g} ± {cell.spread:.2g} against {1 / k:.3g}"
                found.append(
                    Verdict(f"{column}: {row} <= 1/k", cell.mean <= 1 / k, (kept, len(cell.values)), numbers)
                )
    return found


def figure2(work: Work) -> Table:
    """Pair distances inside clusters (Fig. 2)."""
    k = _tight_k(work)
    table = _table(
        work, "anonfaces-fig2", "pair distances inside clusters", filled(work, CLUSTERINGS, (k,), "tight", _tight)
    )
    chain: tuple[str | Relation, ...] = (OURS, "<=", "anonfaces-ward", "<", "random")
    return judged(table, [order(table, f"k={k} mean", chain)])


def figure3(work: Work) -> Table:
    """Silhouettes (Fig. 3): "the only technique that achieves positive scores" is hierarchical, says the paper."""
    k = _tight_k(work)
    table = _table(
        work, "anonfaces-fig3", "silhouette, higher is better", filled(work, CLUSTERINGS, (k,), "tight", _tight)
    )
    column = f"k={k} silhouette"
    others = [row for row in CLUSTERINGS if not row.startswith("anonfaces")]
    return judged(table, [order(table, column, (row, "<", "anonfaces-ward")) for row in others])


def figure9(work: Work) -> Table:
    """Information loss by embedding (a), clustering (b) and generator (c)."""
    ks, cells = work.settings.ks, dict[tuple[str, str], Cell]()
    stages: tuple[tuple[str, tuple[str, ...], Measure], ...] = (
        ("a", ("recogniser", "W+", "PCA"), _loss_of_embedding),
        ("b", CURVES, _loss_of_clustering),
        ("c", ("StyleGAN", "pixels"), _loss_of_generator),
    )
    for stage, rows, measure in stages:
        found = filled(work, rows, ks, f"figure 9{stage}", measure)
        cells |= {
            (f"{stage}: {row}", column): cell for (row, column), cell in found.items() if column.endswith(" IL")
        }
    table = _table(work, "anonfaces-fig9", "information loss, lower is better", cells)
    pairs = (
        *(("a: recogniser", "a: PCA"), ("b: anonfaces-ward", "b: knn")),
        *(("b: ours", "b: anonfaces-ward"), ("b: anonfaces-ward", "b: random")),
    )
    return judged(table, [order(table, f"k={k} IL", (a, "<=", b)) for k in ks for a, b in pairs])


def figure10(work: Work) -> Table:
    """Loss and risk of whole methods (Fig. 10)."""
    rows = ("AnonFACES", "ours", "k-Same (pixels, kNN on PCA)", "random", ALONE)
    table = _table(
        work,
        "anonfaces-fig10",
        "information loss and re-identification",
        filled(work, rows, work.settings.ks, "figure 10", _compared),
    )
    return judged(table, _below(table, "re-id", work.settings.ks))


def figure13(work: Work) -> Table:
    """Clusters that agree on an attribute (Fig. 13): fewer with every k."""
    ks, rows = work.settings.ks, ("anonfaces-ward", OURS)
    cells = filled(work, rows, ks, "figure 13", _alike)
    turned = {(f"{row}, {column.split(' ', 1)[0]}", column.split(" ", 1)[1]): c for (row, column), c in cells.items()}
    table = _table(work, "anonfaces-fig13", "homogeneous clusters", turned)
    chain: list[str | Relation] = []
    for k in reversed(ks):
        chain += ["<=", f"{rows[0]}, k={k}"] if chain else [f"{rows[0]}, k={k}"]
    return judged(table, [order(table, column, chain) for column in table.columns] if len(ks) > 1 else [])


def table1(work: Work) -> Table:
    """Rank-1 before and after (Table 1)."""
    rows = (BEFORE, "adjusted", MIXINGS[3])
    table = _table(
        work, "anonfaces-table1", "Rank-1 recognition", filled(work, rows, work.settings.ks, "table 1", _ranked)
    )
    falls = [order(table, f"k={k} Rank-1", ("adjusted", "<", BEFORE)) for k in work.settings.ks]
    return judged(table, [*falls, *_below(table, "Rank-1", work.settings.ks)])


def figure14(work: Work) -> Table:
    """Distances to the synthetic face at k = 20 (Fig. 14): "for all clusters above the threshold" in the mean."""
    k = _tight_k(work)
    table = _table(
        work,
        "anonfaces-fig14",
        "distances to the representative, and the threshold",
        filled(work, ("adjusted", MIXINGS[3]), (k,), "mixed", _adjusted),
    )
    cell = table.of("adjusted", f"k={k} clusters below")
    kept = sum(v == 0 for v in cell.values)
    claim = f"k={k}: no cluster's mean distance is below the threshold"
    return judged(table, [Verdict(claim, cell.mean == 0, (kept, len(cell.values)), f"share below {cell.mean:.4g}")])


def figure15(work: Work) -> Table:
    """Re-identification by clustering (Fig. 15)."""
    cells = filled(work, CURVES, work.settings.ks, "figure 9b", _loss_of_clustering)
    kept = {key: cell for key, cell in cells.items() if key[1].endswith(" re-id")}
    table = _table(work, "anonfaces-fig15", "re-identification, lower is better", kept)
    return judged(table, _below(table, "re-id", work.settings.ks))


def figure16(work: Work) -> Table:
    """What adjusting and random weights cost and give (Fig. 16)."""
    cells = filled(work, MIXINGS, work.settings.ks, "mixed", _adjusted)
    kept = {key: cell for key, cell in cells.items() if key[1].endswith((" re-id", " IL"))}
    table = _table(work, "anonfaces-fig16", "adjusted and random weights", kept)
    verdicts = []
    for k in work.settings.ks:
        verdicts.append(order(table, f"k={k} re-id", (MIXINGS[1], "<=", MIXINGS[0])))
        verdicts.append(order(table, f"k={k} IL", (MIXINGS[0], "<=", MIXINGS[2])))
    return judged(table, verdicts)


TABLES: Final[Mapping[str, Callable[[Work], Table]]] = {
    "anonfaces-fig2": figure2,
    "anonfaces-fig3": figure3,
    "anonfaces-fig9": figure9,
    "anonfaces-fig10": figure10,
    "anonfaces-fig13": figure13,
    "anonfaces-table1": table1,
    "anonfaces-fig14": figure14,
    "anonfaces-fig15": figure15,
    "anonfaces-fig16": figure16,
}
NEEDS: Final[Mapping[str, Needs]] = {
    "anonfaces-fig2": Needs(clusters=2, recognisers=(0,)),
    "anonfaces-fig3": Needs(clusters=2, recognisers=(0,)),
    "anonfaces-fig9": Needs(recognisers=(0, 2)),
    "anonfaces-fig10": Needs(recognisers=(0, 1, 2)),
    "anonfaces-fig13": Needs(recognisers=(0,)),
    "anonfaces-table1": Needs(second=True, recognisers=(0, 1, 2)),
    "anonfaces-fig14": Needs(recognisers=(0, 1, 2)),
    "anonfaces-fig15": Needs(recognisers=(0, 2)),
    "anonfaces-fig16": Needs(recognisers=(0, 1, 2)),
}


def run(name: str, data: Dataset, settings: Settings, folder: Path, say: Say) -> Table:
    """One figure or table of the paper; arguments and errors as of :func:`deploy.reproduction.ksalsa.run`."""
    table = TABLES[name]
    with opened(samples_of(data), settings, folder, say) as work:
        ready(work, name, NEEDS[name])
        return table(work)
