"""Distil: what a teacher draws is vetted and reranked, and a student learns the rest (Privacy Distillation, 3.2).

Fernandez, Sanchez, Pinaya, Jacenków, Tsaftaris & Cardoso 2023, steps 2 to 5. Everything here is public configuration
but the teacher's weights and the reference; whoever holds patients back holds those back.

Drawn samples: those that the student learns, the fate of the others, and those shown to a reviewer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from agent.domain import CheckpointStore, SyntheticSet
from agent.dp.noise import Entropy
from agent.intervals import Proportion
from agent.mechanisms.common.workspace import Say, of_round
from agent.mechanisms.distillation.latent_model import LatentConfig, LatentDiffusion
from agent.models.diffusion.aligner import Aligner
from agent.models.diffusion.autoencoder import Autoencoder
from agent.models.diffusion.latent import LatentDenoiser
from agent.models.diffusion.prompts import Conditions
from agent.models.image_tensors import to_tensor
from agent.models.training_loop import HEADER_BYTES, checkpoint_bytes, load_state, save_state, torch_generator
from agent.vetting.exhibits import SHOWN, Exhibit, Images, Labels, ReviewSamples, exhibits
from agent.vetting.filter import KINDS, REASONS, Power, measured, power, vet
from agent.vetting.reference import SHARES, Reference, Vetting
from protos.common.errors import RefusedError


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of one condition's samples, in the last round."""

    name: str
    drawn: int
    dropped: Mapping[str, int] = field(hash=False)  # by the reason of :class:`agent.vetting.filter.FilterResult`
    learned: int  # groups whose best sample the student learned
    empty: int  # groups with nothing left: never filled up with what had failed

    def __post_init__(self) -> None:
        """Reasons are those that there are, and nothing is counted twice."""
        numbers = (self.drawn, self.learned, self.empty, *self.dropped.values())
        if not set(self.dropped) <= set(REASONS) or min(numbers) < 0 or sum(self.dropped.values()) > self.drawn:
            raise ValueError("an unknown reason, or more dropped than were drawn")


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The samples of one round: those that the student learns, and counts of the rest."""

    images: Images  # (n, s, s[, 3]) kept
    labels: Labels
    scores: NDArray[np.float64]  # of all that was drawn
    counts: NDArray[np.int64]  # (c, len(REASONS) + 1): samples by reason; last, groups with nothing left
    before: NDArray[np.float64]  # (3,) R_re-id of the teacher's samples, and its interval
    shown: ReviewSamples

    def state(self) -> dict[str, torch.Tensor]:
        """As tensors for a checkpoint, which is stored encrypted in the vault: it contains samples too similar to
        patients.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shown"}
        more = {f"shown.{f.name}": getattr(self.shown, f.name) for f in fields(ReviewSamples)}
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in {**own, **more}.items()}

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> Drawn:
        """What :meth:`state` gave."""
        own = {name: tensor.numpy() for name, tensor in state.items()}
        shown = ReviewSamples(**{f.name: own.pop(f"shown.{f.name}") for f in fields(ReviewSamples)})
        return cls(shown=shown, **own)


def tallies(conditions: Conditions, last: Drawn) -> tuple[Tally, ...]:
    """What became of the samples of each condition."""
    out = []
    for number, name in enumerate(conditions.names):
        counts = last.counts[number]
        dropped = {reason: int(counts[place]) for place, reason in enumerate(REASONS) if reason and counts[place]}
        learned, empty = int((last.labels == number).sum()), int(counts[-1])
        out.append(Tally(name, int(counts[:-1].sum()), dropped, learned, empty))
    return tuple(out)


def best_of(scores: NDArray[np.floating], groups: NDArray[np.int64], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The winner of each group.

    Args:
        scores: (n,) s_align; what is not finite never wins.
        groups: (n,) whole numbers: of which group each sample is.
        kept: (n,) bool: what the vetting kept; nothing else can win.
    Returns:
        (g,) int64 places of the winners, in order of their groups: one of each group that has a sample left
        with a finite score; of equals the lowest place. An empty group gives nothing.
    Raises:
        ValueError: shapes or types do not fit.
    """
    if scores.ndim != 1 or not scores.shape == groups.shape == kept.shape:
        raise ValueError("one score, one group and one verdict for each sample")
    if not (np.issubdtype(scores.dtype, np.floating) and np.issubdtype(groups.dtype, np.integer)):
        raise ValueError("scores are numbers, groups whole numbers")
    if kept.dtype != np.bool_:  # reasons or counts would read as kept
        raise ValueError("kept is true or false")
    left = np.flatnonzero(kept & np.isfinite(scores))
    # by group, then the highest score first, then the lowest place: lexsort is stable, and left ascends
    order = left[np.lexsort((-scores[left], groups[left]))]
    return order[np.unique(groups[order], return_index=True)[1]].astype(np.int64)


Released = Literal["samples", "model"]
MOST: Final = 1_000_000  # samples that are drawn in one round
BLOCK: Final = 4096  # samples, about, that are in memory at once
BATCH: Final = 256  # images that the aligner sees at once
_BESIDE: Final = 64  # bytes at most of what is kept of an image beside it


class NothingLeftError(RefusedError, ValueError):
    """Every sample was too much like somebody, or none could be judged: there is nothing to learn from."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many samples the teacher draws: public constants, none of them the number of patients."""

    candidates: int = 10  # N_c of the paper: of each group, the best aligned of those that are kept is learned
    groups: int = 200  # of each condition
    rounds: int = 1  # of drawing, vetting and learning; each student is the next round's teacher (section 5)

    def __post_init__(self) -> None:
        """Refuse what draws nothing."""
        if not (1 <= self.candidates <= 1000 and 1 <= self.groups <= 100_000 and 1 <= self.rounds <= 10):
            raise ValueError("1 to 1000 candidates, 1 to 100000 groups of each condition, 1 to 10 rounds")


@dataclass(frozen=True, slots=True)
class Output:
    """What leaves."""

    release: Released = "samples"  # the student's images, vetted once more; or the student
    pictures: int = 1000  # that the student draws: they leave, or are what R_re-id of the model is measured on

    def __post_init__(self) -> None:
        """Refuse what is nothing."""
        if self.release not in get_args(Released) or not 1 <= self.pictures <= 100_000:
            raise ValueError('release "samples" or "model"; pictures: 1 to 100000')


@dataclass(frozen=True, slots=True, eq=False)
class Review:
    """The samples and figures that the site's reviewer sees before anything leaves."""

    conditions: tuple[Tally, ...]  # the teacher's samples, of the last round
    leaving: Tally  # the student's images: those that leave, or on which a model is measured
    before: Proportion  # R_re-id of the teacher's samples, by the unseen verifier
    after: Proportion  # R_re-id of the student's, of those that leave
    power: Power
    thresholds: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]  # 95 % of a false match's probability, at the verifiers' thresholds
    scores: NDArray[np.float64]  # (n,) log-odds of the teacher's samples, as drawn: highest against the reference
    alignment: float  # mean s_align of the student's samples
    exhibits: tuple[Exhibit, ...]

    def __post_init__(self) -> None:
        """What is printed has the names that there are."""
        known = {*self.thresholds, *self.intervals} <= {*SHARES, "unseen"}
        if not known or not self.power.kinds.keys() <= KINDS.keys():
            raise ValueError("an unknown threshold or kind of copy")


@dataclass(frozen=True, slots=True, eq=False)
class Distilled:
    """The result of one run: a set or a model, and its figures."""

    made: SyntheticSet | bytes
    review: Review


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """The same, with the student and what it learned: for who measures the method, and never in a release."""

    result: Distilled
    student: LatentDiffusion
    learned: tuple[Images, Labels]


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """The public configuration of all that both forms of the mechanism have in common."""

    conditions: Conditions
    model: LatentConfig  # of teacher and student
    autoencoder: Autoencoder  # trained on public images
    vetting: Vetting
    aligner: Aligner
    student_steps: int
    sampling: Sampling = field(default_factory=Sampling)
    output: Output = field(default_factory=Output)

    def __post_init__(self) -> None:
        """Refuse what does not fit together, an aligner that was trained for other conditions among it."""
        self.model.architecture.demand(self.autoencoder, self.conditions)
        self.aligner.fits(self.conditions)
        if not self.student_steps >= 1:
            raise ValueError("steps of the student: at least 1")
        if not self.conditions.count * self.sampling.groups * self.sampling.candidates <= MOST:
            raise ValueError(f"conditions x groups x candidates: at most {MOST} samples in a round")
        if not self.output.pictures >= self.conditions.count:
            raise ValueError("output: at least one image of each condition")

    def untrained(self) -> bytes:
        """A student's file before it has learned anything: a function of the public configuration alone."""
        return LatentDiffusion(self.model, self.autoencoder, self.conditions).file({})

    @property
    def max_checkpoint_bytes(self) -> int:
        """Of a training, or of what a round keeps: samples, those shown, and a score of each that was drawn."""
        groups = self.conditions.count * self.sampling.groups
        samples = (max(groups, self.output.pictures) + 2 * SHOWN) * (math.prod(self.autoencoder.shape) + _BESIDE)
        kept = samples + 8 * groups * self.sampling.candidates + HEADER_BYTES
        return max(kept, checkpoint_bytes(lambda: LatentDenoiser(self.model.architecture)))

    @property
    def form(self) -> str:
        """SHA-256 of all of it."""
        told = {
            "conditions": self.conditions.digest,
            "model": self.model.fingerprint,
            "autoencoder": self.autoencoder.origin.sha256,
            "verifier": self.vetting.verifier.origin.sha256,
            "unseen": self.vetting.unseen.origin.sha256,
            "aligner": self.aligner.origin.sha256,
            "vetting": [self.vetting.top, self.vetting.false_matches],
            "student": self.student_steps,
            "sampling": asdict(self.sampling),
            "output": asdict(self.output),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @property
    def places(self) -> tuple[str, ...]:
        """Of the power, of what each round keeps, of each student, and of what leaves."""
        rounds = range(1, self.sampling.rounds + 1)
        parts = (f"distill/{part}-{number}" for number in rounds for part in ("kept", "student"))
        return ("distill/power", *parts, "distill/leaving")

    def components(self) -> dict[str, str]:
        """The origin of the networks that draw and judge (P6), as vouched for by the site, not by a file."""
        judges = {self.vetting.verifier.origin.component, self.vetting.unseen.origin.component}
        return {
            "autoencoder": self.autoencoder.origin.component,
            "verifier": "public" if judges == {"public"} else "private",
            "aligner": self.aligner.origin.component,
        }


@dataclass(frozen=True, slots=True)
class Work:
    """The checkpoint stores of a run, and its progress callback."""

    entropy: Entropy
    place: Callable[[str], CheckpointStore]
    say: Say

    def dice(self) -> torch.Generator:
        """A generator that nobody else uses, seeded by fresh entropy."""
        return torch_generator(int.from_bytes(self.entropy.take(8), "little") >> 1)


def distil(course: Course, teach: Callable[[], LatentDiffusion], reference: Reference, work: Work) -> Taught:
    """Teach, draw, vet, rerank and learn, ``rounds`` times; then draw what leaves, and measure it.

    The vetting shows what it can find before a teacher learns anything, and so before anything is spent on one.
    Whatever is drawn by chance and then measured lies in a place before it is shown: an interrupted run shows the
    same again, and nobody draws until a figure is good enough.

    Raises:
        RecogniserError: the vetting does not find near-duplicates of the reference's own images.
        NothingLeftError: no sample was kept.
        DivergedError: a training came to numbers that are none.
    """
    strength = _power(course, reference, work)
    strength.demand()
    teacher, first = teach(), None
    for number in range(course.sampling.rounds):
        kept, student_place = course.places[2 * number + 1 : 2 * number + 3]
        here = replace(work, say=partial(_say_of_round, work, number + 1))
        found = _round(course, teacher, reference, here, work.place(kept))
        first = first or found
        student = LatentDiffusion(course.model, course.autoencoder, course.conditions, work.entropy)
        say = lambda done, here=here: here.say("student", done.step, done.steps)  # noqa: E731
        student.pretrain(found.images, found.labels, course.student_steps, work.place(student_place), say)
        teacher = student
    assert first is not None
    return _leaving(course, student, reference, work, (first, found, strength))


def _say_of_round(work: Work, number: int, stage: str, step: int, of: int) -> None:
    work.say(of_round(stage, number), step, of)


def _once(
    course: Course, place: CheckpointStore, make: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What lies in a place; or what is made now, and lies there from now on."""
    raw = place.read()
    if raw is not None:
        return load_state(raw, course.form)[1]
    state = make()
    place.write(save_state(course.form, 0, state))
    return state


def _power(course: Course, reference: Reference, work: Work) -> Power:
    """What the vetting finds of planted near-duplicates, planted once."""

    def made() -> dict[str, torch.Tensor]:
        told = json.dumps(asdict(power(reference, course.vetting, work.dice())))
        return {"power": torch.frombuffer(bytearray(told.encode()), dtype=torch.uint8)}

    raw = _once(course, work.place(course.places[0]), made)["power"].numpy().tobytes()
    told: dict[str, Any] = json.loads(raw)
    kinds = {kind: Proportion(**share) for kind, share in told.pop("kinds").items()}
    shares: dict[str, Any] = {name: None if share is None else Proportion(**share) for name, share in told.items()}
    return Power(kinds=kinds, **shares)


def _round(
    course: Course, teacher: LatentDiffusion, reference: Reference, work: Work, place: CheckpointStore
) -> Drawn:
    """One round's samples, from the place where they are kept, or drawn.

    Raises:
        NothingLeftError: no sample was kept.
    """

    def made() -> dict[str, torch.Tensor]:
        found = _drawn(course, teacher, reference, work)
        if not len(found.images):
            raise NothingLeftError(
                "every sample is too similar to a patient's image, or cannot be checked: nothing is left to learn"
            )
        return found.state()

    return Drawn.of(_once(course, place, made))


def _drawn(course: Course, teacher: LatentDiffusion, reference: Reference, work: Work) -> Drawn:
    """Draw every group, in blocks that fit in memory; of each, keep the best aligned that is left (section 3.3)."""
    asked = np.repeat(np.arange(course.conditions.count), course.sampling.groups)
    each = course.sampling.candidates
    images, labels, scores = [], [], []
    counts = np.zeros((course.conditions.count, len(REASONS) + 1), np.int64)
    shown: ReviewSamples | None = None
    for block in np.array_split(np.arange(len(asked)), -(-len(asked) * each // BLOCK)):
        wanted, groups = np.repeat(asked[block], each), np.repeat(block, each)
        made = teacher.sample(wanted, work.dice())
        vetted = vet(made, reference, course.vetting)
        aligned = _aligned(course, made, wanted)
        chosen = best_of(aligned, groups, vetted.kept)
        images.append(made[chosen])
        labels.append(wanted[chosen])
        scores.append(vetted.scores)
        reasons = np.array([REASONS.index(reason) for reason in vetted.reasons], np.int64)
        np.add.at(counts, (wanted, reasons), 1)
        np.add.at(counts[:, -1], asked[np.setdiff1d(block, groups[chosen])], 1)
        here = ReviewSamples(made, wanted, vetted.scores, vetted.nearest, aligned, reasons)
        shown = here.most(shown or here.taken(np.zeros(0, np.int64)))
        work.say("draw and vet", int(block[-1]) + 1, len(asked))
    assert shown is not None
    even = np.arange(course.output.pictures) % course.conditions.count
    before = measured(teacher.sample(even, work.dice()), reference, course.vetting)
    figures = np.array([before.value, before.low, before.high])
    return Drawn(np.concatenate(images), np.concatenate(labels), np.concatenate(scores), counts, figures, shown)


def _aligned(course: Course, images: Images, labels: Labels) -> NDArray[np.float64]:
    """s_align of each image with its condition."""
    tokens = course.conditions.tokens(torch.from_numpy(labels))
    unit = images.astype(np.float32) / np.float32(255)
    parts = (slice(a, a + BATCH) for a in range(0, len(images), BATCH))
    with torch.no_grad():
        found = [course.aligner.scores(to_tensor(unit[part]), tokens[part]).double() for part in parts]
    out: NDArray[np.float64] = torch.cat(found).cpu().numpy()
    return out


def _leaving(
    course: Course,
    student: LatentDiffusion,
    reference: Reference,
    work: Work,
    told: tuple[Drawn, Drawn, Power],
) -> Taught:
    """The student's images, of the conditions that it learned, or the student; and what is known of either."""
    first, last, strength = told
    state = _once(
        course,
        work.place(course.places[-1]),
        lambda: _last(course, student, np.unique(last.labels), reference, work),
    )
    left = ReviewSamples(**{f.name: state[f.name].numpy() for f in fields(ReviewSamples)})
    names = tuple(course.conditions.names[label] for label in left.labels)
    made = SyntheticSet(left.images, names) if course.output.release == "samples" else student.file({})
    review = Review(
        conditions=tallies(course.conditions, last),
        leaving=_told(state),
        before=Proportion(*map(float, first.before)),
        after=Proportion(*map(float, state["after"])),
        power=strength,
        thresholds=reference.thresholds,
        intervals=reference.intervals,
        scores=first.scores,
        alignment=float(left.alignments.mean()),
        exhibits=exhibits(course.conditions.names, course.vetting, left.most(last.shown.dropped()), reference),
    )
    return Taught(Distilled(made, review), student, (last.images, last.labels))


def _told(state: Mapping[str, torch.Tensor]) -> Tally:
    """What became of the student's own images."""
    counts = state["counts"].tolist()
    dropped = {reason: counts[place] for place, reason in enumerate(REASONS) if reason and counts[place]}
    return Tally("", sum(counts), dropped, len(state["images"]), 0)


def _last(
    course: Course, student: LatentDiffusion, learned: Labels, reference: Reference, work: Work
) -> dict[str, torch.Tensor]:
    """Images of the student, vetted where it is they that leave, and R_re-id of them.

    Raises:
        NothingLeftError: all of them are too much like somebody.
    """
    order = torch.randperm(course.output.pictures, generator=work.dice()).numpy()
    labels = learned[order % len(learned)]
    images = student.sample(labels, work.dice())
    vetted = vet(images, reference, course.vetting)
    reasons = np.array([REASONS.index(reason) for reason in vetted.reasons], np.int64)
    left = ReviewSamples(images, labels, vetted.scores, vetted.nearest, _aligned(course, images, labels), reasons)
    if course.output.release == "samples":
        left = left.taken(np.flatnonzero(vetted.kept))
        if not len(left.images):
            raise NothingLeftError("every image of the student is too similar to a patient's: nothing is released")
    after = measured(left.images, reference, course.vetting)
    state = {f.name: torch.from_numpy(np.ascontiguousarray(getattr(left, f.name))) for f in fields(ReviewSamples)}
    counts = torch.from_numpy(np.bincount(reasons, minlength=len(REASONS)))
    figures = torch.tensor([after.value, after.low, after.high], dtype=torch.float64)
    return {**state, "after": figures, "counts": counts}
