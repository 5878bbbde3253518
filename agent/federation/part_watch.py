"""Who watches a site's part in a federated run: shown to people, and told what they want. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

How = Literal["made", "refused", "over", "left", "replaced"]  # a part has ended


@dataclass(frozen=True, slots=True)
class PartEnd:
    """How a part has ended."""

    grant: str
    how: How
    rounds: int  # that were made
    of: int  # that were priced


class PartView(Protocol):
    """What may be seen of a :class:`agent.federation.participant.Participant`."""

    run: str
    grant: str
    granted: bool
    resumed: bool
    mechanism: Any
    rounds_trained: int
    begun: int
    unfinished: Any  # the newest round, if it was interrupted and may go on; None: it has its end
    round_in_progress: bool
    training: bool
    end: PartEnd | None
    compute: Any  # its ``why`` is a sentence

    @property
    def turns_made(self) -> int:
        """Rounds, and looks at a model, that were begun."""


class PartWatch:
    """Shows a part to people, and says what they want. It decides nothing of budget. This one shows nothing."""

    def changed(self, part: PartView) -> None:
        """After whatever may have changed how it stands."""

    def trains(self, stage: str, done: int, of: int) -> None:
        """A step of the round that is trained."""

    def came_to_nothing(self, part: PartView, number: int, why: str) -> None:
        """A task of round ``number`` ended without an answer; ``why`` stays at this site."""

    def wants_to_leave(self, part: PartView) -> bool:
        """Whether a person at this site has it leave its run."""
        return False
