"""What a confined call may raise: the errors that mechanisms document, each in one of the agent's own sentences.

The other side names the error and says the sentence. Neither is believed. The class is one of this list, since it
decides about exit status and grant. The sentence is one of the class's own, with numbers and the configuration's own
words in its gaps; of any other, the class's first one is told, with nothing in the gaps. An error that is not on a
list is a fault, and its text stays over there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar

from protos.common.errors import InvariantError, LazaretError

_Error = TypeVar("_Error", bound=Exception)
GAP: Final = "{}"
_MOST_SAID: Final = 1000  # characters
_NUMBER: Final = r"-?[0-9]{1,12}(?:\.[0-9]{1,12})?"
# what stands in gaps besides numbers: names of losses, of a file, of the checks and of planted copies
_WORDS: Final = (
    "all", "by the unseen one", "by the verifier", "checkpoint.safetensors", "combined", "contrast", "cpu", "crop",
    "cuda", "exact",
    "flip", "in all", "loss", "noise", "of the worst kind", "rotation",
)  # fmt: skip
# Of each class that may be raised. Of none: it takes no text, and says one of its own.
SENTENCES: Final[Mapping[str, tuple[str, ...]]] = {
    "AcceleratorLostError": (),
    "AlignmentNotFiniteError": (),
    "CohortTooSmallError": (),
    "DivergedError": (
        "at step {}: {} not all finite",
        "at step {}: parameters are not finite; a smaller learning rate or more noise helps",
        "the classifier's answers are not numbers: train it at a smaller rate",
    ),
    "DrownedHistogramError": (
        "too few patients for the noise, by the noisy histogram, in class {}: leave it out of classes, merge it with "
        "another, or give the query a larger part of epsilon. The query is spent",
    ),
    "LatentNotFiniteError": ("the model's output is not finite: train it with a smaller learning rate",),
    "NoCellError": (),
    "NothingLeftError": (
        "every sample is too similar to a patient's image, or cannot be checked: nothing is left to learn",
        "every image of the student is too similar to a patient's: nothing is released",
    ),
    "NothingSelectedError": ("no public image shows a chosen semantic: every bin needs public images",),
    "NothingShownError": (),
    "OtherRunError": (
        "{} belongs to a run with another configuration or other images: choose another folder",
        "the checkpoint belongs to a job with other constants: give the job another folder",
        "the folder's run is already longer: choose at least as many steps, or another folder",
    ),
    "RecogniserError": (
        "of near-duplicates that were planted, {} must be found, in all and of every kind, and {} by each verifier "
        "alone, for sure with so many patients. Found were {}: train the verifiers longer, or on images more like "
        "these",
        "a recogniser does not match different images of the same patient in this cohort: train it on public images "
        "of the same kind, with the same definition of an identity",
        "a verifier's output for the reference's own images is not finite: use another network",
        "a verifier's output for pairs of the reference's own images is not finite: use another network",
    ),
    "RepeatedInputError": (),
    "SharedImageError": ("{} of {} public images are images of the cohort: remove them from the public set",),
    "TaskMemoryError": (
        "task {}: training.images_per_patient, training.views, input.size: one patient needs more than the {} GiB of "
        "memory of {}",
    ),
    "TooFewImagesError": (
        "too few images for a measure of fidelity",
        "too few images for so many neighbours",
        "a full covariance needs more images than features; choose a shrunk one, or a smaller network",
    ),
    "TooFewPatientsError": ("too few held-out patients with images of these classes: hold a larger part out",),
    "TrainingCheckpointError": (
        "the checkpoint does not fit this model: delete it to start again",
        "{} does not fit this network: delete it to start again",
        "{} is damaged: delete it to start again",
    ),
}

# Whose own texts have names of keys and layers in them, which no gap takes: of these the agent's sentence is told.
# A part in a run builds its network before its price: only one that goes on under a newer program meets them later.
_REPLACED: Final[Mapping[str, str]] = {
    "TaskError": "the network does not fit the task's pictures in this version: `lazaret-agent task check FILE` says "
    "why",
    "UnsuitableNetworkError": "the network remembers, mixes or draws, so that no privacy covers it: a fault of this "
    "program",
}


class MakerFaultError(InvariantError):
    """A fault in the confined process. Only its class is known here."""


def error_of(kind: str, text: str, words: Iterable[str] = ()) -> LazaretError:
    """The error that a confined call raised, as far as it may raise it.

    Args:
        kind: its class's name, as the other side has it.
        text: what it says, as the other side has it.
        words: of the call's configuration, which may stand in a gap.
    """
    known = next((one for one in _classes(LazaretError) if one.__name__ == kind), None)
    if known is not None and kind in _REPLACED:
        return known(_REPLACED[kind])
    if known is None or kind not in SENTENCES:
        named = kind if any(one.__name__ == kind for one in _classes(Exception)) else "unknown"
        return MakerFaultError(f"internal fault ({named}) in the process that computes it")
    if not SENTENCES[kind]:
        return known()
    longest_first = sorted({*_WORDS, *words}, key=len, reverse=True)
    one = "|".join([*map(re.escape, longest_first), _NUMBER])
    gap = f"(?>(?:{one})(?:,? (?:{one}))*,?)"
    for sentence in SENTENCES[kind]:
        if re.fullmatch(gap.join(map(re.escape, sentence.split(GAP))), text[:_MOST_SAID]):
            return known(text)
    return known(SENTENCES[kind][0].replace(GAP, "..."))


def _classes(base: type[_Error]) -> Iterator[type[_Error]]:
    """Every class of errors that is known here."""
    yield base
    for one in base.__subclasses__():
        yield from _classes(one)
