"""Choose k: what each k of a fixed menu costs in information and leaves in risk (AnonFACES, sections 3.5 and 4.4).

The menu is public and written down before anybody looks at patients: a search over private curves is itself a choice
that depends on the data, so every later statement lists what was tried (:mod:`agent.release.history`) and says
nothing of the curves. The curves are for the site only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.domain import Clusters, Latents
from agent.errors import CohortTooSmallError
from agent.evaluation.partitions import Partition, silhouettes, sizes_at
from agent.evaluation.partitions import dendrogram as tree_of
from agent.intervals import wilson
from agent.microaggregation.aggregation import average
from agent.microaggregation.partition import partition

STRAIGHT: Final = 0.05  # of the unit square: a curve that keeps this near to its chord has no elbow
LEAVES: Final = 300  # patients of a dendrogram, drawn at random when there are more
SAMPLED: Final = 4_000  # patients of a silhouette, whole clusters drawn at random when there are more
FEW_ALONE: Final = 0.1  # the upper cut of a dendrogram leaves at most this share without company
Probe = Callable[[Clusters], tuple[NDArray[np.float64], float]]


@dataclass(frozen=True, slots=True)
class Menu:
    """What may be chosen from, and the site's policy for the choice. Public configuration."""

    ks: tuple[int, ...]  # ascending
    k_min: int  # of the policy: a smaller k is measured, and never recommended
    l_diversity: int = 1
    max_reid_rate: float = 1.0  # of the policy

    def __post_init__(self) -> None:
        """A menu is two sizes or more, in order."""
        if len(self.ks) < 2 or any(type(k) is not int or k < 2 for k in self.ks):
            raise ValueError("a menu holds two cluster sizes or more, each at least 2")
        if list(self.ks) != sorted(set(self.ks)):
            raise ValueError("the sizes of a menu are distinct and ascending")
        if not (self.k_min >= 2 and 1 <= self.l_diversity <= self.ks[0] and 0 < self.max_reid_rate <= 1):
            raise ValueError("a menu needs k_min >= 2, 1 <= l_diversity <= its smallest k and a rate in (0, 1]")


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of patients with its 95 % interval (Wilson 1927)."""

    hits: int
    tries: int

    def __post_init__(self) -> None:
        """A share of something."""
        if not 0 <= self.hits <= self.tries or self.tries < 1:
            raise ValueError("a rate has 0 <= hits <= tries, and tries")

    @property
    def value(self) -> float:
        """Hits over tries."""
        return self.hits / self.tries

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval at 95 %: it keeps its level near 0 and 1, where a re-identification rate lies."""
        found = wilson(self.hits, self.tries)
        return found.low, found.high


@dataclass(frozen=True, slots=True)
class Point:
    """One k, measured."""

    k: int
    clusters: int
    information_loss: float  # Definition 3.2: mean Euclidean distance to the representative
    sse_share: float  # sum of squares within clusters over the total one: 0 nothing lost, 1 everything
    silhouette: float  # mean over patients, in [-1, 1]
    homogeneity: Mapping[str, float] = field(hash=False)  # attribute -> share of clusters that agree on it
    joint: float | None  # share of clusters that agree on every attribute; None without attributes
    reid: Rate | None  # patients whom the recogniser finds in their own representative; None: not tried


@dataclass(frozen=True, slots=True)
class RejectedK:
    """One k that gave no partition, or may not be recommended."""

    k: int
    reason: str


@dataclass(frozen=True, slots=True)
class Elbow:
    """Where a curve turns."""

    k: int
    distance: float  # from the chord, in units of the curve's own square
    bends: str  # "flattens": a larger k costs little more; "steepens": a larger k costs much more


@dataclass(frozen=True, slots=True, eq=False)
class Dendrogram:
    """Ward's tree of at most ``LEAVES`` patients without names, with two cuts (001, Fig. 12)."""

    tree: NDArray[np.float64]  # (n - 1, 4), as scipy's linkage gives it
    lower: float  # height where most patients have company
    upper: float  # height where few are still alone
    smallest: int  # of the groups at the lower cut: the text's k_min
    typical: tuple[int, int]  # median size of the groups at the two cuts
    largest: int  # at the upper cut: the text's k_max


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Measurements over the menu of k, and the recommendation. They depend on patients: they stay at the site."""

    menu: Menu
    points: tuple[Point, ...]
    refused: tuple[RejectedK, ...]
    elbow: Elbow | None  # of the whole curve
    recommended: int | None
    why: str
    dendrogram: Dendrogram


def tune(
    latents: Latents,
    labels: Sequence[str],
    menu: Menu,
    rng: np.random.Generator,
    attributes: Mapping[str, Sequence[str]] | None = None,
    probe: Probe | None = None,
) -> Curves:
    """Partition the patients at every k of the menu and measure.

    Args:
        latents: codes (n, d), clustered.
        labels: (n) for l-diversity.
        menu: fixed beforehand.
        rng: one independent stream is drawn for each k.
        attributes: name -> (n) values whose homogeneity is followed; "" is unknown and counts for nothing.
        probe: makes the representatives of a partition and gives the distances (n,) of the patients to their own
            representative in a recogniser's space, in the order of ``latents``, with the threshold below which two
            images are the same person. Without it the loss is that of the codes, and nothing is said of risk.

    Raises:
        CohortTooSmallError: no k of the menu gives a partition.
        ValueError: an argument has another length than the codes.
    """
    told = dict(attributes or {})
    if any(len(values) != len(latents.patients) for values in (labels, *told.values())):
        raise ValueError("one label and one value of each attribute for each patient")
    points, refused = [], []
    for k, stream in zip(menu.ks, rng.spawn(len(menu.ks)), strict=True):
        try:
            clusters = partition(latents, labels, k, menu.l_diversity, stream)
        except CohortTooSmallError:
            refused.append(RejectedK(k, "the cohort does not give one cluster of this size and diversity"))
            continue
        points.append(_measured(latents, clusters, k, told, (probe, stream)))
    if not points:
        raise CohortTooSmallError
    admitted, barred = _admitted(points, menu)
    recommended, why = recommend([(p.k, p.information_loss) for p in admitted])
    whole = elbow([(p.k, p.information_loss) for p in points])
    tree = dendrogram(latents.codes, rng)
    return Curves(menu, tuple(points), (*refused, *barred), whole, recommended, why, tree)


def _measured(
    latents: Latents,
    clusters: Clusters,
    k: int,
    attributes: Mapping[str, Sequence[str]],
    how: tuple[Probe | None, np.random.Generator],
) -> Point:
    probe, rng = how
    row = {patient: i for i, patient in enumerate(latents.patients)}
    groups = [np.array([row[p] for p in cluster]) for cluster in clusters.members]
    codes = latents.codes.astype(np.float64)
    means = average(latents, clusters).astype(np.float64)
    far = np.empty(len(codes))
    for rows, mean in zip(groups, means, strict=True):
        far[rows] = np.sqrt(((codes[rows] - mean) ** 2).sum(axis=1))
    total = float(((codes - codes.mean(axis=0)) ** 2).sum())
    loss, reid = float(far.mean()), None
    if probe is not None:
        distances, threshold = probe(clusters)
        if distances.shape != (len(codes),):
            raise ValueError("a probe gives one distance for each patient")
        loss = float(distances.mean())
        reid = Rate(int((~(distances >= threshold)).sum()), len(codes))  # a distance that is no number is a hit
    alike = {name: _alike(groups, values) for name, values in attributes.items()}
    return Point(
        k=k,
        clusters=len(groups),
        information_loss=loss,
        sse_share=float((far**2).sum()) / total if total > 0 else 0.0,
        silhouette=_silhouette(codes, groups, rng),
        homogeneity={name: float(flags.mean()) for name, flags in alike.items()},
        joint=float(np.all(list(alike.values()), axis=0).mean()) if alike else None,
        reid=reid,
    )


def _alike(groups: Sequence[NDArray[np.int64]], values: Sequence[str]) -> NDArray[np.bool_]:
    """(m,): the clusters whose entropy of one attribute is 0 (001, section 4.4): all known values are the same."""
    return np.array([len({values[i] for i in rows} - {""}) == 1 for rows in groups], bool)


def _silhouette(codes: NDArray[np.float64], groups: Sequence[NDArray[np.int64]], rng: np.random.Generator) -> float:
    """Mean silhouette (Rousseeuw 1987) over whole clusters, at most about ``SAMPLED`` patients; 0 for one cluster."""
    chosen: list[NDArray[np.int64]] = []
    for j in rng.permutation(len(groups)):
        chosen.append(groups[j])
        if sum(map(len, chosen)) >= SAMPLED:
            break
    if len(chosen) < 2 or all(len(rows) == 1 for rows in chosen):
        return 0.0
    assignment = np.repeat(np.arange(len(chosen)), [len(rows) for rows in chosen])
    return float(silhouettes(Partition(codes[np.concatenate(chosen)], assignment, "codes")).mean())


def elbow(curve: Sequence[tuple[int, float]]) -> Elbow | None:
    """The point of a curve farthest from its chord, after Satopää et al. 2011 ("Kneedle"), without smoothing.

    Both axes are scaled to [0, 1] between the first and the last point, so that the chord is the diagonal and the
    distance measured along the loss. A loss that grows fast and then slowly *flattens* at its elbow, and a larger k
    costs little more; one that grows slowly and then fast *steepens*, and the elbow is where to stop (001, section
    4.4 reads plateaus of its Figure 10 in both ways). Ties go to the smaller k.

    Returns:
        None for fewer than three points, a curve that does not rise, or one within ``STRAIGHT`` of its chord.
    """
    if len(curve) < 3:
        return None
    k = np.array([point[0] for point in curve], np.float64)
    loss = np.array([point[1] for point in curve], np.float64)
    if not bool(np.isfinite(loss).all() and loss[-1] > loss[0]):
        return None
    gap = (loss - loss[0]) / (loss[-1] - loss[0]) - (k - k[0]) / (k[-1] - k[0])
    at = int(np.abs(gap).round(9).argmax())  # rounding breaks no tie
    if not abs(gap[at]) > STRAIGHT:
        return None
    return Elbow(int(k[at]), float(abs(gap[at])), "flattens" if gap[at] > 0 else "steepens")


def recommend(curve: Sequence[tuple[int, float]]) -> tuple[int | None, str]:
    """The k of an admissible curve to propose, with the reason in words."""
    if not curve:
        return None, "no k of the menu is admissible under the policy"
    found = elbow(curve)
    if found is None:
        return curve[0][0], "the curve has no elbow above the policy's least k: the smallest admissible k"
    if found.bends == "flattens":
        return found.k, "elbow: beyond this k more privacy costs little more information"
    return found.k, "elbow: beyond this k more privacy costs much more information"


def _admitted(points: Sequence[Point], menu: Menu) -> tuple[list[Point], list[RejectedK]]:
    """The points that the policy lets be chosen, and why the others are not."""
    admitted, barred = [], []
    for point in points:
        limit = min(1.0 / point.k, menu.max_reid_rate)
        if not point.k >= menu.k_min:
            barred.append(RejectedK(point.k, f"measured, but below the policy's least k of {menu.k_min}"))
        elif point.reid is not None and not point.reid.interval[1] <= limit:
            barred.append(RejectedK(point.k, "the re-identification rate cannot be shown to be below its limit"))
        else:
            admitted.append(point)
    return admitted, barred


def dendrogram(codes: NDArray[np.float32], rng: np.random.Generator) -> Dendrogram:
    """Ward's tree with the two horizontal lines of 001, Figure 12.

    The lower line is the height at which more than half of the patients are in a group of two or more; the upper
    one that at which at most a tenth is alone. The paper takes the lowest and the highest group size at its lines
    as rough bounds for k.

    Raises:
        ValueError: fewer than two patients, or a code that is not finite.
    """
    found = tree_of(codes.astype(np.float64), "ward", LEAVES, rng)
    n = len(found.merges) + 1
    # a patient's first merge ends its being alone
    joined = np.sort(np.repeat(found.merges[:, 2], (found.merges[:, :2] < n).sum(axis=1)))
    lower = float(joined[n // 2])
    upper = max(lower, float(joined[math.ceil((1.0 - FEW_ALONE) * n) - 1]))
    low, high = ([int(size) for size in sizes_at(found, height) if size >= 2] for height in (lower, upper))
    return Dendrogram(found.merges, lower, upper, min(low), (int(median(low)), int(median(high))), max(high))
