"""The review's terms for each mechanism: its claim, its artifacts, its components and its vetting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from policies.accounting.claims import (
    Claim,
    Composed,
    DistributedGaussian,
    Gaussian,
    KAnonymous,
    NoClaim,
    SubsampledGaussian,
    training_of,
)

EVALUATIONS: Final = frozenset({"evaluation", "masked-evaluation"})  # what a look releases
ARTIFACT_TYPES: Final = frozenset(
    {"image-set", "volume-set", "update", "masked-update", "model", "evaluation", "masked-evaluation"}
)


@dataclass(frozen=True, slots=True)
class Terms:
    """The claim that a mechanism must make, its artifact type, the components that it names, and its vetting."""

    claim: type[KAnonymous] | type[NoClaim] | type[Gaussian]
    artifact_types: tuple[str, ...]  # of ``ARTIFACT_TYPES``: any one of them; the first is the usual one
    components: frozenset[str]
    rounds: bool  # made in the rounds of a run, step by step; or at once and alone, and then granted and used whole
    vetted: str = ""  # what it must have been vetted against: "public" | "private"; "": whatever it says
    stays: frozenset[str] = frozenset()  # components of which nothing is in the artifact: a policy may admit them
    looked: bool = False  # made at once and alone, and priced with a look at it, if the site wants one

    @property
    def artifact_type(self) -> str:
        """What it usually releases."""
        return self.artifact_types[0]

    def admits(self, claim: Claim) -> bool:
        """Is it a claim that the mechanism must make; or, of what may be looked at, that claim with looks?"""
        return type(training_of(claim) if self.rounds or self.looked else claim) is self.claim

    @property
    def kind(self) -> str:
        """The kind of account that pays for it: ``rdp``, or ``k`` for what has no epsilon; kinds never add (P4).

        What claims nothing has no epsilon either, so it is one release of every patient, like a k-anonymous one: a
        policy's ``max_releases_per_patient`` caps both together. Neither composes (P5), and two purses would let a
        patient be in twice as many releases.
        """
        return "k" if self.claim in (KAnonymous, NoClaim) else "rdp"


_IMAGES: Final = ("image-set",)
_EITHER: Final = ("image-set", "model")
_ROUND: Final = frozenset({"centre", "initial"})
TERMS: Final[Mapping[str, Terms]] = MappingProxyType(
    {
        "ksame": Terms(KAnonymous, _IMAGES, frozenset({"encoder", "generator"}), rounds=False),
        "ksalsa": Terms(KAnonymous, _IMAGES, frozenset({"encoder", "generator", "style", "content"}), rounds=False),
        "anonfaces": Terms(KAnonymous, _IMAGES, frozenset({"encoder", "generator", "recogniser"}), rounds=False),
        "federated": Terms(SubsampledGaussian, ("update", "evaluation"), _ROUND, rounds=True),
        "federated-masked": Terms(DistributedGaussian, ("masked-update", "masked-evaluation"), _ROUND, rounds=True),
        # the network of a task, trained with noise by one hospital alone; with it, the noisy sums of a look at it
        "model": Terms(SubsampledGaussian, ("model",), frozenset({"initial"}), rounds=False, looked=True),
        # a noisy histogram chooses what is pre-trained on, and training with noise follows; or noisy counts and sums
        "privimage": Terms(Composed, _IMAGES, frozenset({"semantics", "pretraining"}), rounds=False),
        "centroids": Terms(Composed, _IMAGES, frozenset({"encoder", "generator", "codebook"}), rounds=False),
        # the teacher saw the patients without noise, and samples that look like one of them were dropped: level C
        "distill": Terms(
            NoClaim,
            _EITHER,
            frozenset({"teacher", "autoencoder", "verifier", "aligner"}),
            rounds=False,
            vetted="private",
            stays=frozenset({"teacher", "verifier", "aligner"}),
        ),
        # the teacher learned with noise, and what follows is post-processing: a look at patients would end that (P7)
        "distill-dp": Terms(
            SubsampledGaussian,
            _EITHER,
            frozenset({"pretraining", "autoencoder", "verifier", "aligner"}),
            rounds=False,
            vetted="public",
        ),
        # patients' own scans with another face: nothing is synthesised of the brain, by which they remain linkable
        "remodel": Terms(NoClaim, ("volume-set",), frozenset({"generator", "atlas"}), rounds=False, vetted="private"),
    }
)
# What each makes, in plain words: the consoles and reports of both sides show it.
TEXTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ksame": "Synthetic images, each averaged over a group of patients",
        "ksalsa": "Synthetic images, each averaged over a group of patients, with their local texture (k-SALSA)",
        "anonfaces": "Synthetic images, each mixed from a group of patients and tested by recognisers (AnonFACES)",
        "privimage": "Synthetic images from a generator that was trained on patients with noise (PrivImage)",
        "centroids": "Synthetic images of averages over patients, taken with noise",
        "distill": (
            "A model, or its images, that learned from a secret one's images, of which those like a patient's were "
            "dropped (Privacy Distillation)"
        ),
        "distill-dp": (
            "A model, or its images, that learned from the images of one that was trained on patients with noise "
            "(Privacy Distillation)"
        ),
        "remodel": (
            "Patients' own head scans with another face (C-DeID-GAN): face removed; the brain itself remains linkable"
        ),
        "model": "The network of a task, trained with noise by one hospital alone",
        "federated": "Federated training with noise",
        "federated-masked": "Federated training with noise, where only the sum of all hospitals can be seen",
    }
)
