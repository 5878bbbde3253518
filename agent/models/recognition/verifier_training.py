"""Train a verifier and embedder on public or made people, fit the tail of its scores, and judge it, on three sets.

People are split three ways, as for a recogniser: for training, for the tail, and for the evaluation. Positives are
two images of one person: of other visits with other findings, turned, cropped, lit otherwise and noisy; and generated
near-duplicates of one image, if there are any, since real pairs alone do not teach what those look like. Negatives
are the others of the batch, and the most similar weigh most.

Near-duplicates as a latent model makes them: what a verifier is to recognise as the same image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import pi
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from agent.intervals import Proportion, bounds
from agent.models.augmentations import Pool, Views, eased, run_digest, view
from agent.models.diffusion.autoencoder import Autoencoder
from agent.models.features.trunk import TrunkArchitecture
from agent.models.image_tensors import to_bytes, to_tensor, to_unit
from agent.models.recognition import verifier
from agent.models.recognition.recogniser_training import divided
from agent.models.recognition.score_tail import FEWEST, Tail, fit_tail
from agent.models.training_loop import LossTrainer, TrainingPlan, TrainingProgress, seeded, torch_generator, train

NearDuplicates = Callable[[Tensor, torch.Generator], Tensor]  # (n, c, h, w) in [-1, 1] -> as many, of that shape
Say = Callable[[TrainingProgress], None]

COMPARED: Final = 1_500  # images, at most, whose pairs are all compared
VISITS: Final = Views(shift=0.03, turn=0.12, zoom=(0.85, 1.05), light=0.3, noise=0.1)
_AS_IT_IS: Final = Views(shift=0.0, turn=0.0, zoom=(1.0, 1.0), light=0.0, noise=0.0)
PLANTED: Final[Mapping[str, Views]] = MappingProxyType(
    {
        "contrast": replace(_AS_IT_IS, light=0.3),
        "rotation": replace(_AS_IT_IS, turn=5 * pi / 180),
        "crop": replace(_AS_IT_IS, zoom=(0.9, 0.9)),
        "noise": replace(_AS_IT_IS, noise=0.1),
        "flip": replace(_AS_IT_IS, flip=True),
    }
)
_SMALL: Final = 64  # pixels a side: up to it a narrow trunk is enough, and learns at a higher rate
_CELLS: Final = 8  # a side, that are read from the last map
_PAIRS: Final = 1 << 15  # compared at once
_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class VerificationConfig:
    """How one verifier is trained. Two of other seeds, splits and architectures are two opinions."""

    name: str
    architecture: verifier.VerifierArchitecture
    steps: int = 2_000
    people: int = 64  # P: of a batch
    pictures: int = 2  # K: of each
    repeated: float = 0.3  # of the people are shown with views of one image alone, and not with other visits
    learning_rate: float = 6e-3
    weight_decay: float = 1e-4
    temperature: float = 0.05  # of the embeddings' cosines
    balanced: float = 0.3  # weight of the balanced pairs
    seed: int = 0
    held_out: float = 0.25  # of the people: for the tail; and as many again to judge by
    views: Views = VISITS
    checkpoint_every: int = 500
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        counts = (self.steps, self.people, self.pictures, self.checkpoint_every)
        if not all(type(c) is int and c >= 1 for c in counts) or not (self.people >= 2 and self.pictures >= 2):
            raise ValueError("steps are a whole number, and a batch has two people or more with two images each")
        if not (0 < self.learning_rate < 1 and 0 <= self.weight_decay < 1 and 0 < self.held_out < 0.5):
            raise ValueError("rates lie between 0 and 1, and the held-out share is below a half")
        if not (0.001 <= self.temperature <= 10 and 0 <= self.balanced <= 100 and 0 <= self.repeated <= 1):
            raise ValueError("a temperature lies in [0.001, 10], a weight in [0, 100], and a share in [0, 1]")


def suited(name: str, side: int, channels: int, steps: int) -> VerificationConfig:
    """A verifier for images of this size, as it proved itself on phantoms of chests of 32 pixels.

    It is narrow, goes down to about eight pixels a side and keeps them apart. A batch has two images each of many
    people rather than many of few. Above 64 pixels nothing was measured.

    Raises:
        ValueError: no trunk has this side or these channels.
    """
    small, depth = side <= _SMALL, 1
    while side % (1 << depth) == 0 and side >> depth >= _CELLS and depth < 8:
        depth += 1
    trunk = TrunkArchitecture(side, channels, width=8 if small else 32, depth=depth)
    architecture = verifier.VerifierArchitecture(trunk, grid=min(_CELLS, trunk.left))
    return VerificationConfig(name, architecture, steps, learning_rate=6e-3 if small else 1e-3)


def second_opinion(config: VerificationConfig) -> VerificationConfig:
    """Another verifier for the same people: another seed, and so another split; fewer cells, and other features.

    A wider trunk of one level less learned too slowly: it found fewer near-duplicates after the same steps.
    """
    a = config.architecture
    grid = max(1, a.grid - max(1, a.grid // 4))
    other = verifier.VerifierArchitecture(a.trunk, grid, a.features + 16, a.hidden, a.embedding)
    return replace(config, name=f"{config.name[:30]}-b", architecture=other, seed=config.seed + 1)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVerifier:
    """A verifier's file, with its tail and judgement."""

    file: bytes = field(repr=False)
    tail: Tail
    judged: verifier.VerifierQuality


def train_verifier(
    images: NDArray[np.uint8],
    identities: NDArray[np.int64],
    config: VerificationConfig,
    folder: Path,
    say: Say = lambda _: None,
    near: NearDuplicates | None = None,
) -> TrainedVerifier:
    """Train, fit the tail, judge, and give nothing that may not judge a release.

    Args:
        images: (n, h, w) or (n, h, w, 3) of people for whom this may be done: public or made, never the cohort.
        identities: (n,) who is on each.
        config: of the run.
        folder: of its checkpoint, which stays whatever comes of it; a run that was killed goes on from there.
        say: told of the progress.
        near: makes near-duplicates of images, at noise levels of its own choice; they are the same person.
    Raises:
        ValueError: images or identities of another shape or type, images that do not differ, or near-duplicates
            that are none.
        TooFewPeopleError: somebody has one image, or there are too few people for the tail.
        RecogniserError: it recognises too few of the people whom it never saw
            (:meth:`agent.models.recognition.verifier.Verifier.demand`).
        OtherRunError, TrainingCheckpointError, DivergedError: see :func:`agent.models.training_loop.train`.
    """
    trained = fit_verifier(images, identities, config, folder, say, near)
    verifier.verifier_from(trained.file).demand()
    return trained


def fit_verifier(
    images: NDArray[np.uint8],
    identities: NDArray[np.int64],
    config: VerificationConfig,
    folder: Path,
    say: Say = lambda _: None,
    near: NearDuplicates | None = None,
) -> TrainedVerifier:
    """The same however little it knows, for an experiment that says how much that is.

    Args, raises: as :func:`train_verifier`, but for ``RecogniserError``.
    """
    learn, settle, judge_by = split(images, identities, config)
    trunk, device = config.architecture.trunk, torch.device(config.device)
    Pool(images, trunk.side, trunk.channels, device)  # refuses what are no images, before anything is made of them
    made = [images[:0]] * 2 if near is None else [_made(images[part], near, config) for part in (learn, judge_by)]
    taught = Pool(np.concatenate([images, *made]), trunk.side, trunk.channels, device)
    end = len(images) + len(made[0])
    whose = np.concatenate([identities, identities[learn][: len(made[0])]])
    digest = run_digest({**asdict(config), "device": None}, images, identities, *made)
    trainer = _Trainer(taught, whose, np.concatenate([learn, np.arange(len(images), end)]), config)
    train(trainer, TrainingPlan(config.steps, digest, config.seed, config.checkpoint_every), folder, say)
    net, settle, kept = trainer.net.eval(), settle[_some(identities[settle])], _some(identities[judge_by])
    tail = tail_of(net, taught.take(torch.from_numpy(settle)), identities[settle], config.seed)
    planted = None if near is None else taught.take(torch.from_numpy(end + kept))
    judge_by = judge_by[kept]
    judged = judge(net, taught.take(torch.from_numpy(judge_by)), identities[judge_by], tail, planted)
    notes = {"run": digest, "seed": config.seed, "steps": config.steps}
    return TrainedVerifier(verifier.verifier_bytes(config.name, net, tail, judged, notes), tail, judged)


def split(
    images: NDArray[np.uint8], identities: NDArray[np.int64], config: VerificationConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Places of the images to learn, to fit the tail and to judge by; nobody is in two of them.

    Raises:
        ValueError: not one whole number for each image.
        TooFewPeopleError: somebody has one image, or there are too few people for the tail.
    """
    too_few = f"too few people: {FEWEST} are held out for the tail, as many to judge, and others learned"
    return divided(len(images), identities, config.held_out, config.seed, (FEWEST, too_few))


def _some(whose: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of ``COMPARED`` images at most, whole people but for those with more than is needed of one."""
    order = np.argsort(whose, kind="stable")
    first = np.searchsorted(whose[order], whose[order])
    return order[np.arange(len(order)) - first < COMPARED // FEWEST][:COMPARED].astype(np.int64)


def _made(images: NDArray[np.uint8], near: NearDuplicates, config: VerificationConfig) -> NDArray[np.uint8]:
    """A near-duplicate of each image, as bytes.

    Raises:
        ValueError: they are of another shape, or not finite.
    """
    generator, out = torch_generator(config.seed, config.device), []
    for batch in np.array_split(images, -(-len(images) // _BATCH)):
        pictures = to_tensor(batch.astype(np.float32) / np.float32(255)).to(config.device)
        with torch.no_grad():
            made = near(pictures, generator)
        if made.shape != pictures.shape or not bool(torch.isfinite(made).all()):
            raise ValueError("near-duplicates are finite, and of the shape of the images that they are of")
        out.append(to_bytes(to_unit(made)))
    return np.concatenate(out)


class _Trainer(LossTrainer):
    """Both heads over P x K batches."""

    def __init__(
        self, pool: Pool, identities: NDArray[np.int64], learn: NDArray[np.int64], config: VerificationConfig
    ) -> None:
        self.pool, self.config = pool, config
        learnt = identities[learn]
        self.places = [torch.from_numpy(learn[learnt == who]) for who in np.unique(learnt)]
        with seeded(config.seed):
            net = verifier.VerifierNet(config.architecture)
        self.net = net.to(pool.device)
        rate, decay = config.learning_rate, config.weight_decay
        adam = torch.optim.AdamW(self.net.parameters(), rate, weight_decay=decay)
        super().__init__({"net": self.net}, {"optimizer": adam})
        self.clipped = self.net

    def rate(self) -> float:
        return self.config.learning_rate * eased(self.done, self.config.steps)

    def loss(self, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        people = torch.randperm(len(self.places), generator=generator)[: self.config.people]
        chosen = torch.cat([self._some(self.places[int(who)], generator) for who in people])
        whose = people.repeat_interleave(self.config.pictures).to(self.pool.device)
        seen: verifier.VerifierFeatures = self.net(view(self.pool.take(chosen), self.config.views, generator))
        retrieval = contrastive(seen.embeddings @ seen.embeddings.T / self.config.temperature, whose)
        logits = all_logits(self.net, seen.features)
        verification, pairs = contrastive(logits, whose), balanced(logits, whose, generator)
        told = {"retrieval": float(retrieval.detach()), "verification": float(verification.detach())}
        return retrieval + verification + self.config.balanced * pairs, told

    def _some(self, places: Tensor, generator: torch.Generator) -> Tensor:
        k = self.config.pictures
        order = torch.randperm(len(places), generator=generator)
        if float(torch.rand((), generator=generator)) < self.config.repeated:
            order = order[:1]
        return places[order.repeat(-(-k // len(order)))[:k]]


def contrastive(scores: Tensor, whose: Tensor) -> Tensor:
    """The supervised contrastive loss (Khosla et al. 2020, Eq. 2, L_out) of scores (n, n), temperature included.

    Every image's own person's others against all the others: those most alike weigh most.
    """
    alone = torch.eye(len(whose), dtype=torch.bool, device=scores.device)
    same = (whose[:, None] == whose) & ~alone
    log_p = scores.masked_fill(alone, -torch.inf).log_softmax(dim=1).masked_fill(~same, 0.0)
    return -(log_p.sum(dim=1) / same.sum(dim=1).clamp_min(1)).mean()


def balanced(logits: Tensor, whose: Tensor, generator: torch.Generator) -> Tensor:
    """Binary cross-entropy of as many pairs of two persons as there are of one, from logits (n, n).

    Half of the former are the hardest of the batch, half are drawn: of the hard ones alone it would learn to say no.
    """
    upper = torch.triu(torch.ones_like(logits, dtype=torch.bool), 1)
    same = whose[:, None] == whose
    own, others = logits[upper & same], logits[upper & ~same]
    count = min(len(own), len(others))
    hard = others.topk(count // 2).values
    drawn = others[torch.randperm(len(others), generator=generator)[: count - count // 2].to(others.device)]
    return softplus(-own).mean() + softplus(torch.cat([hard, drawn])).mean()


def all_logits(net: verifier.VerifierNet, features: Tensor) -> Tensor:
    """(n, n) logits of all pairs, symmetric to the last bit; an image with itself has 0, which nobody reads."""
    n = len(features)
    a, b = torch.triu_indices(n, n, 1, device=features.device).unbind()
    some = (slice(at, at + _PAIRS) for at in range(0, len(a), _PAIRS))
    upper = torch.cat([features.new_zeros(0), *(net.fusion(features[a[i]], features[b[i]]) for i in some)])
    out = features.new_zeros(n, n).index_put((a, b), upper)
    return out + out.T


def tail_of(net: verifier.VerifierNet, pictures: Tensor, identities: NDArray[np.int64], seed: int) -> Tail:
    """The law of strangers' logits: images (n, c, side, side) of people whom training did not see, (n,) whose."""
    with torch.no_grad():
        scores = all_logits(net, _seen(net, pictures).features).double().cpu().numpy()
    return fit_tail(scores, identities, np.random.Generator(np.random.Philox(seed)))


def judge(
    net: verifier.VerifierNet, pictures: Tensor, identities: NDArray[np.int64], tail: Tail, made: Tensor | None = None
) -> verifier.VerifierQuality:
    """What it knows of people of neither training nor the tail.

    Args:
        net: trained, in evaluation.
        pictures: (n, c, side, side) in [-1, 1]; everybody has two or more.
        identities: (n,) whose each is.
        tail: gives the threshold for ``GALLERY`` and ``FALSE_MATCHES``.
        made: (n, c, side, side) a generator's near-duplicate of each, or none.
    """
    people, threshold = len(np.unique(identities)), tail.threshold(verifier.GALLERY, verifier.FALSE_MATCHES)
    with torch.no_grad():
        seen = _seen(net, pictures)
        logits = all_logits(net, seen.features).double().cpu().numpy()
        planted = {kind: view(pictures, how, torch_generator(0)) for kind, how in PLANTED.items()}
        planted["flip"] = pictures.flip(3)  # and not every other one
        if made is not None:
            planted[verifier.MADE] = made
        found = {
            kind: net.fusion(_seen(net, some).features, seen.features).cpu().numpy() for kind, some in planted.items()
        }
    upper = np.triu(np.ones(logits.shape, bool), 1)
    same = identities[:, None] == identities
    own, others = logits[upper & same], np.sort(logits[upper & ~same])
    auc = (np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")).mean() / (2 * len(others))
    precision, average = retrieved((seen.embeddings @ seen.embeddings.T).double().cpu().numpy(), identities)
    return verifier.VerifierQuality(
        _share(auc, people),
        _share(average, people),
        _share(precision, people),
        _share(np.mean(own >= threshold), people),
        {kind: _share(np.mean(scores >= threshold), people) for kind, scores in found.items()},
    )


def retrieved(likeness: NDArray[np.float64], identities: NDArray[np.int64]) -> tuple[float, float]:
    """Precision@1 and mAP@R (Musgrave et al. 2020, section 3.2) of a likeness (n, n); everybody has two images.

    R is the number of other images of the query's person; a place among the first R counts its precision if right.
    """
    ranked = likeness.copy()
    np.fill_diagonal(ranked, -np.inf)
    order = np.argsort(-ranked, axis=1, kind="stable")[:, :-1]
    right = identities[order] == identities[:, None]
    r = right.sum(axis=1)
    place = np.arange(1, right.shape[1] + 1)
    precision = np.where(right & (place <= r[:, None]), np.cumsum(right, axis=1) / place, 0.0)
    return float(right[:, 0].mean()), float((precision.sum(axis=1) / r).mean())


def _seen(net: verifier.VerifierNet, pictures: Tensor) -> verifier.VerifierFeatures:
    told = [net(pictures[at : at + _BATCH]) for at in range(0, len(pictures), _BATCH)]
    return verifier.VerifierFeatures(*(torch.cat(column) for column in zip(*told, strict=True)))


def _share(value: Any, people: int) -> Proportion:
    """A share of pairs or images, as sure as so many people can make it."""
    share = min(1.0, float(value))
    low, high = bounds(share * people, people)
    return Proportion(share, min(low, share), max(high, share))  # but for rounding


# noise on the latents, in units of their deviation, which the autoencoder's scale makes 1; 0: the round trip
NEAR: Final = (0.0, 0.1, 0.2, 0.35)


def near_duplicates(through: Autoencoder) -> NearDuplicates:
    """Images through the autoencoder, with noise on the latents: for each a level of ``NEAR``, by chance.

    What a latent model remembers comes back so: blurred where the decoder blurs, and a little beside the original.
    Two images of one person, from a hospital's machine both, do not show that.

    Args:
        through: of public images, on the device of the training.
    Returns:
        What makes of images (n, c, s, s) in [-1, 1] as many of that shape, by the generator alone.
    """

    def make(images: Tensor, generator: torch.Generator) -> Tensor:
        latents = through.encode(images)
        chosen = torch.randint(len(NEAR), (len(images),), generator=generator, device=generator.device)
        noise = torch.tensor(NEAR)[chosen.cpu()][:, None, None, None].to(latents.device)
        drawn = torch.randn(latents.shape, generator=generator, device=generator.device).to(latents.device)
        return through.decode(latents + noise * drawn).clamp(-1, 1)

    return make
