"""Vetting 10,000 made pictures against 50,000 private ones: search and verifier, beside the verifier on all pairs.

25,000 patients of two pictures each, drawn as points: a person is a point of 32 numbers, a picture is near its
person, and what the verifier sees of it, features and embedding, are two unlike maps of that point. A thousand of the
made pictures are near-duplicates of a private one, the others show nobody. The head is the product's, at the size of
its default; it is the same on both sides, learned from pairs of other people, and its threshold is calibrated for the
gallery on yet others.

Processor seconds of one thread. All pairs are 500 million: they are timed on a hundred of the made pictures, without
any copy of a feature, and multiplied. Recall is of pairs (made picture, patient) that the head matches at the
threshold when it is asked about every private picture, for all planted pictures and that hundred: how many of them
the search brings before the head too.

The copy checks see pictures and not points, and have rows of their own: of the whole and of parts, with everybody;
of moved copies, with as many candidates as the search brings, and with the search for them. ``speed_vs_all_pairs`` is
search and head beside the head on all pairs, without them; ``speed_with_copy_checks`` counts them on the side of the
product alone.
"""

from __future__ import annotations

import resource
import time
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from agent.models.recognition.score_tail import Tail, fit_tail
from agent.models.recognition.verifier import Fusion
from agent.models.training_loop import seeded, torch_generator
from agent.models.weights import Origin
from agent.vetting.copy_detection import FINE, GRID, PATCH, SIDE, Copies, Thumbnails
from agent.vetting.nearest_neighbours import Search, candidates, searches, verified
from agent.vetting.reference import VerifierView, pair_logits
from agent.vetting.shifted_copies import ShiftedCopies
from tests.benchmarks.report import Report, Row

PRIVATE: Final = 50_000
PATIENTS: Final = 25_000
MADE: Final = 10_000
PLANTED: Final = 1_000
SAMPLE: Final = 100  # of the others, for all pairs
CALIBRATED: Final = 500  # people of the tail
TOP: Final = 10
FALSE_MATCHES: Final = 0.005
POINT: Final = 32
FEATURES, HIDDEN, EMBEDDING = 64, 32, 64  # of agent.models.recognition.verifier.VerifierArchitecture


class Seen(NamedTuple):
    """What the verifier sees."""

    features: Tensor
    embeddings: Tensor


class Head:
    """Features and embeddings are maps of points; the log-odds are a verifier's."""

    name = "benchmark"
    origin = Origin("public", "0" * 64)

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.verify, self.retrieve = (
            torch.randn(POINT, width, generator=generator) for width in (FEATURES, EMBEDDING)
        )
        with seeded(0):
            self.fusion = Fusion(FEATURES, HIDDEN)
        self._learn()
        self.tail = self._law()

    def look(self, points: Tensor) -> Seen:
        return Seen(normalize(points @ self.verify), normalize(points @ self.retrieve))

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.fusion(a, b)
        return out

    def _learn(self) -> None:
        """Pairs of one person and of two, half and half."""
        one = torch.randn(4_000, POINT, generator=self.generator)
        first, second = (self.look(near(one, self.generator)).features for _ in range(2))
        a, b = torch.cat([first, first]), torch.cat([second, second.roll(1, 0)])
        truth = torch.cat([torch.ones(4_000), torch.zeros(4_000)])
        optimizer = torch.optim.Adam(self.fusion.parameters(), 0.01)
        for _ in range(200):
            loss = binary_cross_entropy_with_logits(self.fusion(a, b), truth)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        self.fusion.requires_grad_(requires_grad=False)

    def _law(self) -> Tail:
        points = near(torch.randn(CALIBRATED, POINT, generator=self.generator), self.generator)
        features = self.look(points).features
        scores = torch.stack([self.logits(own.expand_as(features), features) for own in features]).double().numpy()
        return fit_tail(scores, np.arange(CALIBRATED), np.random.default_rng(0))


def near(points: Tensor, generator: torch.Generator, far: float = 0.2) -> Tensor:
    """Another picture of each."""
    return points + far * torch.randn(points.shape, generator=generator)


def drawn(generator: torch.Generator) -> tuple[Tensor, NDArray[np.int64], Tensor]:
    """Points of the private pictures, whose each is, and points of the made ones, the planted first."""
    owners = np.arange(PRIVATE) // (PRIVATE // PATIENTS)
    private = near(torch.randn(PATIENTS, POINT, generator=generator)[torch.from_numpy(owners)], generator)
    copied = private[torch.randperm(PRIVATE, generator=generator)[:PLANTED]]
    others = torch.randn(MADE - PLANTED, POINT, generator=generator)
    return private, owners, torch.cat([near(copied, generator, 0.1), near(others, generator)])


def recall(
    head: Head, sights: tuple[VerifierView, VerifierView], owners: NDArray[np.int64], delta: float
) -> tuple[float, int]:
    """Of the pairs (made, patient) matched among all, the share that the search brings too; and how many."""
    made, real = sights
    rows = torch.arange(PLANTED + SAMPLE)
    none = torch.full((len(rows),), -1)
    listed: dict[int, set[int]] = {}
    asked = (made.embeddings[rows], normalize(made.features[rows]))
    lists = [
        search.nearest(queries, none) for search, queries in zip(searches(real, owners, TOP), asked, strict=True)
    ]
    for some, places in chain(*lists):
        row, column = torch.nonzero(places >= 0, as_tuple=True)
        place = places[row, column]
        hit = pair_logits(head, made.features, real.features, some[row], place) >= delta
        for r, p in zip(some[row][hit].tolist(), place[hit].tolist(), strict=True):
            listed.setdefault(r, set()).add(int(owners[p]))
    found = of = 0
    for r in rows.tolist():
        logits = head.logits(made.features[r].expand_as(real.features), real.features)
        matched = set(owners[torch.nonzero(logits >= delta)[:, 0].numpy()].tolist())
        of += len(matched)
        found += len(matched & listed.get(r, set()))
    return found / of, of


def all_pairs_seconds(head: Head, made: VerifierView, real: VerifierView) -> float:
    """Of the head on all pairs, from a sample of the made pictures."""
    began = time.process_time()
    for own in made.features[PLANTED : PLANTED + SAMPLE]:
        for some in torch.split(real.features, 1 << 12):  # fits in the cache: the fastest of 2^10 to 2^16
            head.logits(own.expand_as(some), some).max()
    return (time.process_time() - began) * MADE / SAMPLE


def copies_seconds(generator: torch.Generator) -> float:
    """Of copies and copied parts on all pairs, from five hundred rows; what the pictures show does not matter."""

    def small(n: int) -> Thumbnails:
        whole = torch.randn(n, SIDE, SIDE, generator=generator)
        patches = torch.randn(n, GRID, GRID, PATCH, PATCH, generator=generator)
        return Thumbnails(whole / SIDE, patches / PATCH, torch.zeros(n, 1, 1))

    reference, made = Copies.of(small(PRIVATE)), small(500)
    began = time.process_time()
    reference.alike(made)
    return (time.process_time() - began) * MADE / 500


def moved_seconds(listed: Tensor, generator: torch.Generator) -> float:
    """Of the check for moved copies with the candidates listed (m, k), from two hundred rows."""
    pictures = torch.randn(PRIVATE, SIDE * SIDE, generator=generator)
    few = ShiftedCopies.of(torch.randn(64, FINE, FINE, generator=generator))
    reference = ShiftedCopies(pictures, few.mean, few.scales[torch.arange(PRIVATE) % 64], few.views)
    made = torch.randn(200, FINE, FINE, generator=generator)
    began = time.process_time()
    reference.best(made, listed[torch.arange(0, MADE, MADE // 200)])
    return (time.process_time() - began) * MADE / 200


def peak() -> float:
    """MiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> Report:
    """Draw, search, verify; then all pairs."""
    torch.set_num_threads(1)
    generator = torch_generator(0)
    head = Head(generator)
    points, owners, asked = drawn(generator)
    real, made = (VerifierView(*head.look(some)) for some in (points, asked))
    delta = head.tail.threshold(PRIVATE, FALSE_MATCHES)
    Search(real.embeddings, owners, TOP).nearest(made.embeddings[:8], torch.full((8,), -1))  # imports what it needs
    before = peak()
    began = time.process_time()
    by = searches(real, owners, TOP)
    scores, _ = verified(made, real, head, by, torch.full((MADE,), -1))
    seconds, memory = time.process_time() - began, peak() - before
    share, matches = recall(head, (made, real), owners, delta)
    everything = all_pairs_seconds(head, made, real)
    began = time.process_time()
    listed = candidates(made, by, torch.full((MADE,), -1))
    again = time.process_time() - began
    copied, moved = copies_seconds(generator), moved_seconds(listed, generator)
    low, high = head.tail.interval(PRIVATE, delta)
    rows = (
        Row("search and verification of 10,000 against 50,000", seconds, "s"),
        Row("the head on all pairs, from a hundred rows", everything, "s"),
        Row("made pictures a second", MADE / seconds, "1/s"),
        Row("memory beyond features and embeddings, at most", memory, "MiB"),
        Row("features and embeddings of the private pictures", PRIVATE * (FEATURES + EMBEDDING) * 4 / 2**20, "MiB"),
        Row("copies and copied parts, 10,000 against 50,000, from 500 rows", copied, "s"),
        Row("candidates for moved copies: the search once more", again, "s"),
        Row("... places of each picture, a picture of a patient by either search", listed.shape[1], "places"),
        Row("moved copies, 10,000 against their candidates, from 200 rows", moved, "s"),
        Row("search, verification and copy checks together", seconds + copied + again + moved, "s"),
        Row("matches among all pairs that recall is of", matches, "pairs"),
        Row("planted near-duplicates at the threshold or above", float((scores[:PLANTED] >= delta).mean()), "share"),
        Row("pictures of nobody at the threshold or above", float((scores[PLANTED:] >= delta).mean()), "share"),
        Row("... that were allowed", FALSE_MATCHES, "share"),
        Row("... their interval, low", low, "share"),
        Row("... their interval, high", high, "share"),
    )
    whole = seconds + copied + again + moved
    ratios = {
        "speed_vs_all_pairs": everything / seconds,
        "speed_with_copy_checks": everything / whole,
        "recall": share,
    }
    return Report(rows, ratios)
