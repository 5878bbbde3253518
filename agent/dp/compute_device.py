"""Where a site computes its part in rounds, and predictions: what it wants, what its machine has, what was decided.

A decision is made in the agent's own process; for a round it is handed to the confined one as a plan. It changes no
number but the last bits of a float32, and neither noise nor price; and no decision hangs on a patient.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from agent.errors import SiteConfigError
from protos.common.errors import TrainingError

CPU: Final = "cpu"
CUDA: Final = "cuda"
AUTO: Final = "auto"
OWN: Final = "own"
OPACUS: Final = "opacus"
_GIB: Final = float(1 << 30)


class AcceleratorLostError(TrainingError, RuntimeError):
    """The accelerator failed while a round was computed. It takes no text of the driver's."""

    def __init__(self, text: str = "the accelerator failed while a round was computed") -> None:
        """``text``: what the site's own people read."""
        super().__init__(text)


class TaskMemoryError(TrainingError):
    """One patient of a task does not fit in the memory there is. The text names the task, keys and the memory."""


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """What one part of a round is computed with."""

    device: str = CPU  # "cpu" or "cuda"; by this field the agent knows that its process cannot be confined
    engine: str = OWN  # "own" or "opacus"


@dataclass(slots=True)
class SiteCompute:
    """The site's choice, and what has become of it: a lost accelerator is not tried again."""

    wanted: str = CPU  # ``device`` of site.toml
    confined: bool = False  # site.toml says confinement = "required"
    engine: str = OWN  # ``engine`` of site.toml
    of: str = "rounds"  # what is computed
    key: str = "site.toml: device ="  # where it was said
    available: Callable[[], bool] = torch.cuda.is_available
    plan: ComputePlan = field(init=False)
    why: str = field(init=False)  # a sentence for the log's reader and the job's page

    def __post_init__(self) -> None:
        """Decide.

        Raises:
            SiteConfigError: an accelerator is demanded, and there is none or it may not be used.
        """
        missing = ""
        if self.wanted != CPU and not self.available():
            missing = "this machine has no accelerator that PyTorch can use"
        elif self.wanted != CPU and self.confined:
            missing = 'confinement = "required", and what an accelerator computes cannot be confined'
        if missing and self.wanted == CUDA:
            raise SiteConfigError(f'{self.key} "cuda": {missing}: set device = "auto" or "cpu"')
        if self.wanted == CPU or missing:
            self._decide(CPU, missing)
        else:
            self._decide(CUDA, "")

    def lost(self) -> str:
        """The accelerator failed: what follows from it, as a sentence. With "auto" rounds go on by the processor."""
        if self.wanted == AUTO:
            self._decide(CPU, "the accelerator failed, and is used again when the service starts anew")
            return f"the accelerator failed while a round was computed; from now on {self.why}"
        return (
            'the accelerator failed while a round was computed; device = "cuda" in site.toml, so that no round is '
            'computed by the processor: see to the driver, or set device = "auto"'
        )

    def _decide(self, device: str, missing: str) -> None:
        self.plan = ComputePlan(device, self.engine)
        of = "the accelerator" if device == CUDA else "the processor"
        by = "" if self.engine == OWN else ", with the engine opacus"
        self.why = f"{self.of} are computed by {of}{by}" + (f": {missing}" if missing else "")


def accelerator_failed(fault: BaseException) -> bool:
    """Whether an error is an accelerator's own, such as one that is gone; memory that ran out is none."""
    return isinstance(fault, torch.AcceleratorError) and not isinstance(fault, torch.OutOfMemoryError)


def memory_gib(device: str) -> float:
    """How much memory a computation may take at most, GiB: the card's, the process's bound, or the machine's."""
    if device != CPU:
        return torch.cuda.mem_get_info(device)[1] / _GIB
    bound = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if bound != resource.RLIM_INFINITY:
        return bound / _GIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
