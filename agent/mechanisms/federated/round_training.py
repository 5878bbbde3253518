"""One round of a run, as a confined process is asked for it: its steps are kept, and an ended process loses few.

**Of no step are two noisy sums released for one price.** A round's output is a function of one path of
``steps_per_round`` noisy steps, which is what the grant pays for. A step's noisy sum is either in the checkpoint, and
then it is not drawn again, or it was lost: with the process that drew it, before its checkpoint; or in an update that
was stored, but whose note the service did not live to write, and which the next one overwrites. Such a sum was never
sent or shown, and nothing that leaves hangs on it. Then the step is drawn anew, with fresh noise and another batch,
and this is the one draw of which anything leaves. Which sums are lost is decided by kills and faults from outside, at
times at which nobody knows what was drawn. A checkpoint stays sealed at the site, and no noise is made again from a
stored seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from agent.domain import TaskCohort, Update
from agent.dp.compute_device import ComputePlan
from agent.dp.dpsgd import CHECKPOINT_EVERY
from agent.dp.noise import Entropy
from agent.mechanisms.common.workspace import Workspace
from agent.mechanisms.federated.mechanism import Federated, PublicFiles, RoundPlace, round_checkpoint_bytes

STEPS: Final = "round/steps"  # the place of the round that is open
_PARTS: Final = 10  # of a round, by its checkpoints; public, as the number of its steps is


@dataclass(frozen=True, slots=True)
class RoundTraining:
    """The call: what it trains, and of which round the steps are."""

    training: Federated
    round: str  # SHA-256 of everything that the steps hang on: others' are no checkpoint of it
    own_head: int = 0  # h, of a head of the site's own

    places: ClassVar[tuple[str, ...]] = (STEPS,)

    @property
    def max_checkpoint_bytes(self) -> int:
        """Of the steps."""
        return round_checkpoint_bytes(self.training.parameters + self.own_head)

    @property
    def max_result_bytes(self) -> int:
        """Of the new parameters."""
        return self.training.max_result_bytes

    @property
    def drawn(self) -> tuple[str, ...]:
        """The words that an error may name."""
        return self.training.drawn

    @property
    def every(self) -> int:
        """Steps from one checkpoint to the next. None follows the last step, so whoever goes on has some left."""
        return min(CHECKPOINT_EVERY, -(-self.training.steps_per_round // _PARTS))

    def run_round(
        self,
        cohort: TaskCohort,
        update: Update,
        entropy: Entropy,
        bench: Workspace,
        files: PublicFiles,
        plan: ComputePlan,
    ) -> Update:
        """As :meth:`Federated.run_round`, from the newest step that the place of the bench has of this round."""
        place = RoundPlace(bench.place(STEPS), self.round, self.every)
        return self.training.run_round(cohort, update, entropy, bench, files, plan, place=place)
