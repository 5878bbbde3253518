"""How large the demo is, which mechanisms it shows, and which networks these need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.mechanisms.registry import MECHANISMS
from deploy.demo import heads

_CODEC = ("generator", "encoder")
_DISTILLING = ("autoencoder", "verifier", "unseen", "aligner")
NEEDS: Mapping[str, tuple[str, ...]] = {  # networks of public images
    "ksalsa": _CODEC,
    "anonfaces": (*_CODEC, "recogniser-0", "recogniser-1"),
    "privimage": ("semantics",),
    "centroids": _CODEC,
    "distill": _DISTILLING,
    "distill-dp": _DISTILLING,
    "remodel": (heads.NETWORK,),
}
BASE = ("ksame", "federated")  # what needs no network
MAIN = ("ksame", "ksalsa", "privimage", "federated")


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the demo is, and what it shows."""

    patients: int  # at each hospital, two images each
    rounds: int
    mechanisms: tuple[str, ...] = BASE
    pretraining: int = 60  # steps of PrivImage on public images
    form: str = "main"  # or "full", in which every mechanism is shown that can be
    left_out: Mapping[str, str] = field(default_factory=dict)  # mechanism -> why
    spare: Mapping[str, int] = field(
        default_factory=dict
    )  # site -> releases beyond the story's that its policy admits

    def shows(self, *names: str) -> bool:
        """Is one of these mechanisms shown?"""
        return not set(self.mechanisms).isdisjoint(names)


NOT_SHOWN: Final = {"model": "one hospital alone trains what the rounds train: `lazaret-agent release model`"}


def main_job(patients: int, rounds: int) -> Scale:
    """What `make demo` shows."""
    left_out = {name: "shown by `make demo-full`" for name in MECHANISMS if name not in MAIN} | NOT_SHOWN
    return Scale(patients, rounds, MAIN, left_out=left_out)


def full(patients: int, rounds: int) -> Scale:
    """What `make demo-full` shows: every mechanism that this machine has the data for."""
    missing = {} if heads.there() else {"remodel": "the real head is not installed: apt-get install mricron-data"}
    left_out = missing | NOT_SHOWN
    shown = tuple(name for name in MECHANISMS if name not in left_out)
    return Scale(patients, rounds, shown, pretraining=300, form="full", left_out=left_out)
