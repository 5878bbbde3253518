"""The verifier on made-up chests of 32 pixels at visits with changed findings: three seeds, people it never saw.

It learns half of 1,200 people with four visits each; a quarter gives the tail, a quarter the judgement in its file.
Everything printed is of 400 others. The false matches are counted as they happen: every one of their pictures against
galleries of 1,000 pictures of other people, and the tail's interval stands beside. Near-duplicates are those of
:mod:`agent.vetting.filter`, at the threshold at which one of a hundred innocent pictures is matched.

Some five minutes of one processor for each seed, which ``LAZARET_BENCHMARK_STEPS`` makes less.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from agent.models.recognition.verifier import FALSE_MATCHES, GALLERY, Verifier, verifier_from
from agent.models.recognition.verifier_training import all_logits, fit_verifier, judge, suited
from agent.models.training_loop import torch_generator
from agent.vetting.filter import KINDS
from tests.benchmarks.report import Report, Row
from tests.support.verifiers import chests

SIDE: Final = 32
PEOPLE, VISITS, FRESH = 1_200, 4, 400
STEPS: Final = 1_600
COMBINED: Final = "combined"  # every change on top of the others: reported, and not among the single changes


def main() -> Report:
    """Measure; a quarter of an hour."""
    torch.set_num_threads(1)
    steps = int(os.environ.get("LAZARET_BENCHMARK_STEPS", STEPS))
    rows, aucs, firsts, caught = list[Row](), list[float](), list[float](), list[float]()
    for seed in range(3):
        began = time.process_time()
        verifier = _trained(seed, steps)
        rows.append(Row(f"seed {seed}: {steps} steps, with tail and judgement", time.process_time() - began, "cpu-s"))
        images, whose = chests(FRESH, 1_000 + seed, SIDE, VISITS)
        pictures = torch.from_numpy(images[:, None]).float() / 127.5 - 1.0
        found = judge(verifier.net, pictures, whose, verifier.tail)
        for name in ("auc", "map_at_r", "precision_at_1", "matched"):
            share = getattr(found, name)
            rows.append(Row(f"seed {seed}: {name} [{share.low:.4f}, {share.high:.4f}]", share.value, "share"))
        kinds = _caught(verifier, pictures, whose)
        rows += [Row(f"seed {seed}: near-duplicates caught, {kind}", value, "share") for kind, value in kinds.items()]
        rows += _false_matches(seed, verifier, pictures, whose)
        aucs.append(found.auc.value)
        firsts.append(found.precision_at_1.value)
        caught.append(float(np.mean([value for kind, value in kinds.items() if kind != COMBINED])))
    ratios = {"auc": min(aucs), "precision_at_1": min(firsts), "near_duplicates_caught": min(caught)}
    return Report(tuple(rows), ratios)


def _trained(seed: int, steps: int) -> Verifier:
    config = replace(suited(f"seed-{seed}", SIDE, 1, steps), seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        data = chests(PEOPLE, seed, SIDE, VISITS)
        return verifier_from(fit_verifier(*data, config, Path(folder)).file, "public")


def _caught(verifier: Verifier, pictures: torch.Tensor, whose: NDArray[np.int64]) -> dict[str, float]:
    """Of one picture of everybody, the share of each kind's near-duplicates that reach the threshold."""
    some = pictures[np.unique(whose, return_index=True)[1]]
    threshold, generator = verifier.tail.threshold(GALLERY, FALSE_MATCHES), torch_generator(7)
    with torch.no_grad():
        real = verifier.look(some).features
        logits = {
            kind: verifier.logits(verifier.look(change(some, generator)).features, real)
            for kind, change in KINDS.items()
        }
    return {kind: float((told >= threshold).double().mean()) for kind, told in logits.items()}


def _false_matches(seed: int, verifier: Verifier, pictures: torch.Tensor, whose: NDArray[np.int64]) -> list[Row]:
    """Pictures that are matched with somebody of a gallery of others, at thresholds for some probabilities of it."""
    with torch.no_grad():
        features = torch.cat([verifier.look(part).features for part in pictures.split(64)])
        scores = all_logits(verifier.net, features).double().numpy()
    rng, highest = np.random.default_rng(seed), []
    for place, own in enumerate(whose):
        others = rng.permutation(np.flatnonzero(whose != own))[:GALLERY]
        highest.append(scores[place, others].max())
    rows = []
    for asked in (0.3, 0.1, 0.03, FALSE_MATCHES):
        threshold = verifier.tail.threshold(GALLERY, asked)
        low, high = verifier.tail.interval(GALLERY, threshold)
        told = f"seed {seed}: false matches of a picture in a gallery of {GALLERY}, asked for {asked:g}"
        rows.append(Row(f"{told} [{low:.4f}, {high:.4f}]", float(np.mean(np.array(highest) >= threshold)), "share"))
    return rows
