"""A distillation small enough for a test: 16 px, a few steps, judges that compare coarse pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize

from agent.domain import Cohort, Image, Patient
from agent.dp.dpsgd import PrivateSgd
from agent.intervals import Proportion
from agent.mechanisms.distillation import mechanism, teacher_student
from agent.mechanisms.distillation.latent_model import LatentConfig
from agent.mechanisms.distillation.mechanism import Distill, DistillDp
from agent.mechanisms.distillation.teacher_student import Course, Output, Sampling
from agent.models.diffusion.latent import LatentArchitecture
from agent.models.diffusion.prompts import Conditions
from agent.models.image_tensors import to_tensor
from agent.models.recognition.score_tail import Tail, fit_tail
from agent.models.weights import Origin, Provenance
from agent.vetting.filter import SINGLE, FilterResult, Power
from agent.vetting.reference import Reference, Vetting
from tests.support.aligners import untrained
from tests.support.latents import tiny_autoencoder
from tests.support.small_privimage import vouched

SIDE = 16
DIGITS = (load_digits().images / 16).astype(np.float32).repeat(2, axis=1).repeat(2, axis=2)  # (1797, 16, 16)
TRUTH = load_digits().target
TEN = Conditions(tuple("0123456789"))


def worn(place: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(16, 16) what is somebody's own, whatever the label: digits alone are too much alike to know anybody by."""
    own = gaussian_filter(np.random.default_rng([7, 1000 + place]).normal(size=(SIDE, SIDE)), 1.5)
    return (own / own.std() * 0.15).astype(np.float32)


def dressed(digit: np.ndarray[Any, np.dtype[np.float32]], place: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A faint digit, and what is somebody's own."""
    out: np.ndarray[Any, np.dtype[np.float32]] = np.clip(0.4 + 0.2 * digit + worn(place), 0, 1)
    return out


class Seen(NamedTuple):
    """What a judge sees."""

    features: Tensor
    embeddings: Tensor


class CoarseImages:
    """A verifier that knows people by their coarse picture, whichever way round; its law is of digits."""

    def __init__(self, name: str, cells: int, provenance: Provenance = "public") -> None:
        """``cells`` a side."""
        self.name, self.cells = name, cells
        self.origin = Origin(provenance, hashlib.sha256(name.encode()).hexdigest())

    @property
    def tail(self) -> Tail:
        """Of 150 other people."""
        return _law(self.cells)

    def look(self, images: Tensor) -> Seen:
        """Its own picture and its mirror's."""
        small = avg_pool2d(images[:, :1], images.shape[2] // self.cells)
        coarse = torch.cat([small + small.flip(3), (small - small.flip(3)).abs()], dim=1).flatten(1)
        unit = normalize(coarse - coarse.mean(dim=1, keepdim=True))
        return Seen(unit, unit)

    def logits(self, a: Tensor, b: Tensor) -> Tensor:
        """Above 0 where they correlate by 0.8."""
        return 10.0 * ((a * b).sum(dim=1) - 0.8)


@cache
def _law(cells: int) -> Tail:
    judge = CoarseImages("law", cells)
    people = np.stack([dressed(digit, -place) for place, digit in enumerate(DIGITS[-150:])])
    features = judge.look(to_tensor(people)).features
    scores = (10.0 * (features @ features.T - 0.8)).double().numpy()
    return fit_tail((scores + scores.T) / 2, np.arange(150), np.random.default_rng(0))


def course(provenance: Provenance = "public", **changes: Any) -> Course:
    """Ten conditions; ``changes`` are of the fields."""
    architecture = LatentArchitecture((2, 8, 8), (8, 8), 1, (False, True), 8, 4, 64, 16, 8)
    model = LatentConfig(
        architecture.fitted(tiny_autoencoder(), TEN), 1, batch=8, sampling_steps=2, draws=2, guidance=1.0
    )
    whole = Course(
        conditions=TEN,
        model=model,
        autoencoder=tiny_autoencoder(),
        vetting=Vetting(CoarseImages("filter", 8, provenance), CoarseImages("unseen", 4, provenance)),
        aligner=untrained(TEN),
        student_steps=3,
        sampling=Sampling(candidates=2, groups=2),
        output=Output("samples", 20),
    )
    return replace(whole, **changes)


def distill(**changes: Any) -> Distill:
    """Without noise."""
    return Distill(course(**changes), teacher_steps=4)


def distill_dp(**changes: Any) -> DistillDp:
    """With noise; the public pictures are digits too, of others."""
    public = np.stack([dressed(digit, -200 - place) for place, digit in enumerate(DIGITS[-120:])])
    sgd = PrivateSgd(
        sampling_rate=0.25, noise_multiplier=4.0, steps=4, clip=0.01, images_per_patient=2, expected_batch=25.0
    )
    return DistillDp(
        course(**changes), vouched(np.rint(public * 255).astype(np.uint8), TRUTH[-120:].astype(np.int64)), 3, sgd, 100
    )


def cohort(patients: int = 40, first: int = 0) -> Cohort:
    """Patients of two images each, of one digit class."""
    out = []
    for digit in range(10):
        own = np.flatnonzero(TRUTH[:-150] == digit)[first:]
        for number in range(patients // 10):
            pair = own[2 * number : 2 * number + 2]
            who = 10 * number + digit
            images = tuple(Image(dressed(DIGITS[place], who), str(digit)) for place in pair)
            out.append(Patient(f"p{number:03d}{digit}", images))
    return Cohort(tuple(sorted(out, key=lambda patient: patient.pseudonym)))


_REFERENCES: dict[str, Reference] = {}
_POWERS: dict[str, Power] = {}


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reference of the same images once, and measure the vetting's power once for each: half of a small run.

    For tests of what is done with both. How they are made is tested where they are defined, without this.
    """
    reference, power = mechanism.reference_of, teacher_student.power

    def same_reference(patients: Sequence[Patient], vetting: Vetting, *told: Any) -> Reference:
        pixels = [(patient.pseudonym, image.pixels.tobytes()) for patient in patients for image in patient.images]
        key = _digest_of(vetting, *map(repr, pixels))
        if key not in _REFERENCES:
            _REFERENCES[key] = reference(patients, vetting, *told)
        return _REFERENCES[key]

    def same_power(of: Reference, vetting: Vetting, generator: torch.Generator) -> Power:
        pixels = [image.pixels.tobytes() for image in of.images]
        key = _digest_of(vetting, of.owners.tobytes(), *pixels)
        if key not in _POWERS:
            _POWERS[key] = power(of, vetting, generator)
        return _POWERS[key]

    monkeypatch.setattr(mechanism, "reference_of", same_reference)
    monkeypatch.setattr(teacher_student, "power", same_power)


def _digest_of(vetting: Vetting, *parts: str | bytes) -> str:
    judges = [(type(one).__qualname__, sorted(vars(one).items())) for one in (vetting.verifier, vetting.unseen)]
    told = hashlib.sha256(repr((judges, vetting.top, vetting.false_matches)).encode())
    for part in parts:
        told.update(part.encode() if isinstance(part, str) else part)
    return told.hexdigest()


def believe_the_vetting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the vetting of a distillation at its word: an untrained verifier knows nobody, and its figures are bad."""
    good = Proportion(0.99, 0.95, 1.0)
    power = Power(good, good, good, dict.fromkeys(SINGLE, good), None)
    monkeypatch.setattr(teacher_student, "power", lambda *_: power)
    monkeypatch.setattr(teacher_student, "measured", lambda *_: Proportion(0.0, 0.0, 0.01))
    monkeypatch.setattr(teacher_student, "vet", _every_fourth_dropped)


def _every_fourth_dropped(images: np.ndarray[Any, Any], *_: object) -> FilterResult:
    n = len(images)
    reasons = tuple("" if number % 4 else "verifier" for number in range(n))
    return FilterResult(np.linspace(-5.0, 5.0, n), np.zeros(n, np.int64), reasons)
