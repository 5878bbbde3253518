"""Every attack against every mechanism, on pictures of real things and on fundus phantoms, with chance beside it.

A scene (``attack_scenes``) is a release of half its people and everybody who might be in it. Rows are rates or areas,
with their 95 % interval, what chance alone reaches, and the limit where k promises one. For each attack there is a
leaky control: nothing done, pixelation, equal weights, a partition drawn anew, files by first member, soft labels. An
attack that does not find its control is broken, and the benchmark stops: ``controls_found`` is 1, or no table.

"Mean codes" are k-Centroid's without a generator: exact codes, as an attacker has them at best. Three minutes.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import Latents
from agent.intervals import Figure, Resampling
from agent.mechanisms.anonfaces.identity_mixing import Mixing, secret_weights
from agent.mechanisms.common.linear_codec import Basis
from agent.microaggregation.aggregation import average
from agent.microaggregation.partition import partition
from agent.models.features.extractors import RandomFeatures
from deploy.reproduction.attacks.collusion import Known, Shown, collusion, guessed
from deploy.reproduction.attacks.disclosure import (
    Trials,
    cohort_order,
    differencing,
    label_counts,
    name_leak,
    nearest_representative,
    order_leak,
)
from deploy.reproduction.attacks.membership import (
    Anonymise,
    Game,
    NearestFeatures,
    NearestPixels,
    Pool,
    Published,
    Recipe,
    attack,
    game,
    train_attack,
)
from deploy.reproduction.attacks.recognition import naive, naive_open_set, parrot, rank_one, reverse
from deploy.reproduction.datasets import real_images
from protos.artifacts.shards import Png, pack_shard
from tests.benchmarks import attack_scenes
from tests.benchmarks.attack_scenes import CONTROL, MIX, PCA, PIXEL, Scene
from tests.benchmarks.report import Report, Row
from tests.support.shipped import frozen, recomputed

HOW = Resampling(200)
CODES = "mean codes"
RECIPE = Recipe(steps=60, width=8, side=16, batch=64)
FPIR = 0.05
K = 11  # of made codes, the strictest preset's
Values = NDArray[np.float64]


@dataclass
class Found:
    """The table as it grows."""

    rows: list[Row] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    controls: list[tuple[str, bool]] = field(default_factory=list)

    def put(self, where: str, figures: tuple[Figure, ...], note: str = "") -> None:
        """A row for each figure."""
        for f in figures:
            limit = "" if f.limit is None else f", limit {f.limit:.3f}"
            chance = "-" if f.chance is None else f"{f.chance:.3f}"
            span = f"[{f.interval.low:.3f}, {f.interval.high:.3f}], chance {chance}{limit}, n {f.trials}{note}"
            self.rows.append(Row(f"{where}: {f.name} {span}", f.value, "rate"))

    def control(self, where: str, figure: Figure) -> None:
        """A leak that was put there must be found."""
        self.controls.append((where, figure.chance is not None and figure.interval.low > figure.chance))


def membership(table: Found, scene: Scene, name: str, victim: Game, anonymise: Anonymise) -> None:
    """Top-K, AUC in a cluster and AUC in the whole release, by pixels, by features, and by a trained network."""
    trained = train_attack(
        game(scene.own, anonymise, np.random.default_rng(2)), RECIPE, torch.Generator().manual_seed(0)
    )
    for scorer in (NearestPixels(), NearestFeatures(RandomFeatures(5, 16, 3, 1)), trained):
        found = attack(scorer, victim, scene.k, np.random.default_rng(1), HOW).figures
        where = f"{scene.name}, {name}, membership K={scene.k} {scorer.name}"
        table.put(where, (found[0], found[1], found[3]))
        if name == CONTROL:
            table.control(f"{where}, in a cluster", found[1])
            table.control(f"{where}, in the release", found[3])


def encoded(table: Found, scene: Scene, name: str, victim: Game, codes: Values) -> None:
    """By whoever has the encoder: the nearest representative, and k - 1 members together."""
    published = victim.published
    inside = np.isin(victim.pool.owners, [p for c in published.members for p in c])
    exact = np.stack([codes[list(c)].mean(axis=0) for c in published.members])
    shown = scene.basis.encode(published.representatives).astype(np.float64)
    for what, reps in ((name, shown), (CODES, exact)):
        if what == CODES and name != PCA:
            continue
        where = f"{scene.name}, {what}"
        near = nearest_representative(codes, inside, reps, np.random.default_rng(1), HOW).figures
        table.put(f"{where}, nearest representative", near)
        if name == CONTROL:
            table.control(f"{where}, nearest representative", near[0])
            continue
        known = collusion(Known(codes, published.members, reps), np.random.default_rng(1), HOW).figures
        table.put(f"{where}, k-1 collusion", known)
        if what == CODES:
            table.control(f"{where}, k-1 collusion", known[0])


def checked(table: Found, scene: Scene, name: str, victim: Game, codes: NDArray[np.float32]) -> None:
    """A guess at the last member, drawn as the mechanism draws and compared with the picture."""
    of = Shown(codes, victim.published.members, _bytes(victim.published.representatives), scene.basis.decode)
    if name == PIXEL:
        flat = victim.pool.images.reshape(len(codes), -1)
        of = Shown(flat, of.members, of.pictures.reshape(len(of.pictures), -1), lambda x: _bytes(x.clip(0, 1)))
    figures = guessed(of, np.random.default_rng(1), min(100, len(codes) - 2 * scene.k)).figures
    table.put(f"{scene.name}, {name}, a guess checked by k-1 members", figures)
    table.ratios[f"guess_equal_{_key(scene, name)}"] = figures[0].value
    table.ratios[f"guess_near_{_key(scene, name)}"] = figures[1].value
    if name == PCA:
        table.control(f"{scene.name}, {name}, a guess, equal picture", figures[0])


def recognised(table: Found, scene: Scene, name: str, victim: Game, anonymise: Anonymise) -> None:
    """Naive, reverse and parrot, and naive in an open set; the attacker has other pictures of the same people."""
    judge, published = scene.judges[0], victim.published
    blank = scene.basis.mean.reshape(scene.basis.shape)
    where = f"{scene.name}, {name}"
    strangers = anonymise(scene.own).representatives
    forward = naive(judge, scene.again, published, scene.k).figures
    back = reverse(judge, scene.again, published, scene.k).figures
    opened = naive_open_set(judge, scene.again, published, strangers, FPIR)
    hidden = attack_scenes.pixelated if name == CONTROL else attack_scenes.replaced(anonymise, blank)
    seen = parrot(judge, scene.people, scene.again, hidden, scene.k).figures
    table.put(f"{where}, naive recognition", forward)
    table.put(f"{where}, naive recognition, open set", (opened,))
    table.put(f"{where}, reverse recognition", back)
    table.put(f"{where if name != CONTROL else scene.name + ', pixelation'}, parrot recognition", seen)
    table.ratios[f"naive_rank1_{_key(scene, name)}"] = forward[0].value
    if name == CONTROL:
        for what, figure in (("naive", forward[0]), ("reverse", back[0]), ("open set", opened), ("parrot", seen[0])):
            table.control(f"{where}, {what}", figure)


def traces(table: Found, scene: Scene, name: str, published: Published) -> None:
    """Names and order of the files, and label counts."""
    m, where = len(published.members), f"{scene.name}, {name}"
    members = [[attack_scenes.pseudonym(p) for p in c] for c in published.members]
    names = _names(published)
    places = list(range(m))
    order = order_leak(places, cohort_order(published.members), np.random.default_rng(1), 400)
    table.put(f"{where}, order of files", (order.figure,), f", p = {order.p_value:.3f}")
    table.put(f"{where}, names of files", (name_leak(names, members),))
    counts, kinds = _counts(scene, published), int(scene.labels.max()) + 1
    shadow = np.random.default_rng(3).multinomial(scene.k, np.bincount(scene.labels) / len(scene.labels), 400)
    table.put(
        f"{where}, label counts",
        label_counts(
            np.eye(kinds)[counts.argmax(axis=1)], counts, (np.eye(kinds)[shadow.argmax(axis=1)], shadow)
        ).figures,
    )
    if name != PCA:
        return
    by_first = order_leak(places, cohort_order(sorted(published.members, key=min)), np.random.default_rng(1), 400)
    first = name_leak([f"{c[0]}.png" for c in members], members)
    soft = label_counts(_soft(counts), counts, (_soft(shadow), shadow)).figures
    table.put(
        f"{scene.name}, files by first member, order of files", (by_first.figure,), f", p = {by_first.p_value:.3f}"
    )
    table.put(f"{scene.name}, files by first member, names of files", (first,))
    table.put(f"{scene.name}, soft labels, label counts", soft)
    table.controls.append((f"{scene.name}, order by first member", by_first.p_value < 0.05))
    table.control(f"{scene.name}, names of first members", first)
    table.control(f"{scene.name}, soft labels", soft[0])


def played(table: Found, scene: Scene) -> None:
    """All of a scene."""
    table.put(f"{scene.name}, real against real", (rank_one(scene.judges[0], scene.people, scene.again),))
    codes = scene.basis.encode(scene.people.images)
    for name, anonymise in scene.mechanisms().items():
        victim = game(scene.people, anonymise, np.random.default_rng(0))
        membership(table, scene, name, victim, anonymise)
        encoded(table, scene, name, victim, codes.astype(np.float64))
        recognised(table, scene, name, victim, anonymise)
        if name != CONTROL:
            checked(table, scene, name, victim, codes)
            traces(table, scene, name, victim.published)


def differences(table: Found, basis: Basis, people: Pool) -> None:
    """Two releases through the pipeline, ledgers and all: by a site with its memory, and by one without."""
    codes = basis.encode(people.images).astype(np.float64)
    for key, plan in (
        ("joined", Trials("joined", 20, 20, 5)),
        ("joined_with_4", Trials("joined", 20, 20, 5, newcomers=4)),
        ("left", Trials("left", 20, 20, 5, newcomers=5)),
    ):
        for how, mechanism in (("frozen, as shipped", frozen), ("drawn anew", recomputed)):
            with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
                begin = mechanism(Path(folder), people.images, basis, 5)
                (figure,) = differencing(begin, codes, plan, np.random.default_rng(0)).figures
            table.put(f"digits, k-Same-PCA k=5, {how}, difference of two releases ({key})", (figure,))
            table.ratios[f"{key}_{'frozen' if mechanism is frozen else 'anew'}"] = figure.value
            if mechanism is recomputed and key != "joined_with_4":  # five at once hide one another, whatever is done
                table.control(f"differences, {key}", figure)


def made_codes(table: Found) -> None:
    """Isotropic codes, k = 11: what dimensions and secret weights do to whoever has the encoder."""
    rng = np.random.default_rng(0)
    for d in (2, 32, 512):
        codes = rng.normal(size=(1320, d)).astype(np.float32)
        latents = Latents(codes[:660], tuple(f"{i:05d}" for i in range(660)))
        clusters = partition(latents, [""] * 660, K, 1, rng)
        members = tuple(tuple(int(p) for p in c) for c in clusters.members)
        wide, equal = codes.astype(np.float64), average(latents, clusters).astype(np.float64)
        near = nearest_representative(wide, np.arange(1320) < 660, equal, np.random.default_rng(1), HOW).figures
        table.put(f"made codes, {d} dimensions, {CODES}, nearest representative", near)
        table.ratios[f"nearest_auc_{d}d"] = near[0].value
        weights = [secret_weights(len(c), Mixing(K).delta, rng) for c in members]
        secret = np.stack([w @ wide[list(c)] for w, c in zip(weights, members, strict=True)])
        for how, reps in (("equal", equal), ("secret", secret)):
            found = collusion(Known(wide[:660], members, reps), np.random.default_rng(1), HOW).figures
            table.put(f"made codes, {d} dimensions, {how} weights, k-1 collusion", found)
            table.ratios[f"collusion_{how}_{d}d"] = found[0].value
            table.ratios[f"collusion_likeness_{how}_{d}d"] = found[2].value


def main() -> Report:
    """Measure; about three minutes of one processor."""
    threads, table = torch.get_num_threads(), Found()
    torch.set_num_threads(1)
    try:
        real = real_images(32)
        first = attack_scenes.digits(real)
        made_codes(table)
        differences(table, first.basis, Pool(first.people.images[:90], first.people.owners[:90]))
        for scene in _all(first):
            played(table, scene)
    finally:
        torch.set_num_threads(threads)
    missed = [where for where, found in table.controls if not found]
    if missed:
        raise RuntimeError(f"attacks that do not find what was put there: {'; '.join(missed)}")
    table.ratios["controls_found"] = 1.0
    return Report((*table.rows, Row("leaky controls, all found", len(table.controls), "controls")), table.ratios)


def _all(first: Scene) -> Iterator[Scene]:
    yield first
    yield attack_scenes.faces(real_images(32))
    yield attack_scenes.fundus()


def _key(scene: Scene, name: str) -> str:
    return f"{ {CONTROL: 'control', PIXEL: 'pixel', PCA: 'pca', MIX: 'mix'}[name] }_{scene.name.split()[0]}"


def _bytes(pictures: NDArray[np.float32]) -> NDArray[np.uint8]:
    rounded: NDArray[np.uint8] = np.rint(pictures * 255.0).astype(np.uint8)
    return rounded


def _names(published: Published) -> list[str]:
    """As the files of the artifact are named."""
    raw = pack_shard(list(_bytes(published.representatives)), [""] * len(published.members), Png())
    with tarfile.open(fileobj=io.BytesIO(raw)) as shard:
        return [name for name in shard.getnames() if name.endswith(".png")]


def _counts(scene: Scene, published: Published) -> NDArray[np.int64]:
    kinds = int(scene.labels.max()) + 1
    return np.stack([np.bincount(scene.labels[list(c)], minlength=kinds) for c in published.members])


def _soft(counts: NDArray[np.int64]) -> Values:
    e = np.exp(counts - counts.max(axis=1, keepdims=True).astype(np.float64))
    whole: Values = e / e.sum(axis=1, keepdims=True)
    return whole
